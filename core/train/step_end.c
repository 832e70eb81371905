/*
Losses are means over the whole batch, the gradient's norm is that of the whole model: every rank learns both
before it updates what it holds.
*/
#include "train/step_end.h"
#include "train/verify.h"
#include "train/waiting.h"

#include <limits.h>
#include <math.h>

/* Mean over MoE layers of the busiest expert's copies over the mean expert's. */
static double imbalance_of(const struct model *model, const int64_t *copies) {
    double sum = 0;
    for (int layer = model->moe.dense_layers; layer < model->layers; layer++) {
        const int64_t *here = copies + (size_t)layer * model->moe.experts;
        int64_t most = 0, all = 0;
        for (int e = 0; e < model->moe.experts; e++) {
            all += here[e];
            if (here[e] > most) most = here[e];
        }
        if (all) sum += (double)most * model->moe.experts / (double)all;
    }
    return sum / fmax(model_moe_layers(model), 1);
}

static struct step_losses losses_of(struct runner *runner, const double *sums) {
    const struct model *model = runner->model;
    double sequences = (double)batch_sequences(&runner->ranks), tokens = sequences * runner->seq_len;
    double layers = fmax(model_moe_layers(model), 1);
    wait_for_all(runner->comm, runner->sums.expert_copies, model->layers * model->moe.experts, MPI_INT64_T,
                 MPI_SUM);
    struct step_losses losses = {.cross_entropy = sums[0] / tokens,
                                 .aux = sums[1] / (sequences * layers),
                                 .z = sums[2] / (tokens * layers),
                                 .margin = INFINITY,
                                 .imbalance = imbalance_of(model, runner->sums.expert_copies)};
    losses.total = losses.cross_entropy + model->moe.aux_loss * losses.aux + model->moe.z_loss * losses.z;
    return losses;
}

void reduce_within_group(struct runner *runner) {
    state_reduce(runner->state, true);
    runner->reduced = true;
}

/* Reduces what no lane has reduced, agrees on losses and norm, and updates, unless a number is not finite. */
void end_step(struct runner *runner) {
    struct step_report *report = &runner->report;
    if (!runner->reduced) state_reduce(runner->state, true);
    state_reduce(runner->state, false);
    double sums[4] = {runner->sums.cross_entropy, runner->sums.aux, runner->sums.z,
                      state_gradient_squares(runner->state)};
    int bad = isfinite(sums[0] + sums[1] + sums[2]) ? INT_MAX : runner->rank;
    if (bad == INT_MAX && !isfinite(sums[3])) bad = runner->rank;
    wait_for_all(runner->comm, &bad, 1, MPI_INT, MPI_MIN);
    wait_for_all(runner->comm, sums, 4, MPI_DOUBLE, MPI_SUM);
    struct optimizer optimizer = training_optimizer(&runner->plan->point->training);
    report->losses = losses_of(runner, sums);
    report->grad_norm = sqrt(sums[3]);
    report->learning_rate = optimizer_rate(&optimizer, runner->step);
    report->bad_rank = bad == INT_MAX ? -1 : bad;
    report->finite = bad == INT_MAX;
    if (runner->verifier) verify_step(runner->verifier, runner, &report->losses);
    if (report->finite)
        state_update(runner->state, &runner->contexts[RESOURCE_COMPUTE], &optimizer, runner->step,
                     clip_scale(&optimizer, sums[3]));
}
