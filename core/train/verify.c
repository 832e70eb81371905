/*
The reference beside the run: the same batch, the same parameters, one process; gradients compared tensor by
tensor.

Before a step rank 0 takes the run's parameters over, so that any step can be compared, not only the first. A
token whose k-th and next logit nearly tie may be routed differently by two correct programs: such a batch is
drawn again.
*/
#include "train/executor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DRAWS = 100 };

/* Below it rounding can decide which expert is chosen: logits of size 1, with a few bits to spare. */
static double least_margin(void) {
    return sizeof(floatX) == sizeof(double) ? 1e-12 : 1e-5;
}

/* A gradient below this part of the model's largest one is compared with that part: it may be nothing but
   rounding (the key's bias has no gradient at all). */
static const double FLOOR = 1e-3;

void trainer_verify(struct trainer *trainer) {
    trainer->verifying = true;
    if (trainer->rank != 0) return;
    trainer->reference = reference_new(trainer->model, trainer->seq_len, 1, 1, trainer->mark.seed);
    trainer->reference->forced = trainer->forced;
}

static int *whole_batch(const struct trainer *trainer, uint64_t seed) {
    size_t length = (size_t)trainer->seq_len + 1;
    int64_t sequences = batch_sequences(&trainer->ranks);
    int *tokens = must_alloc((size_t)sequences * length * sizeof *tokens);
    for (int64_t s = 0; s < sequences; s++)
        data_sequence(trainer->data, seed, trainer->mark.step, s, tokens + (size_t)s * length);
    return tokens;
}

/* The reference's gradients and losses of a batch with a sufficient margin; returns its seed. */
static uint64_t run_reference(struct trainer *trainer) {
    for (uint64_t draw = 0;; draw++) {
        uint64_t seed = trainer->mark.seed + draw;
        int *tokens = whole_batch(trainer, seed);
        struct batch batch = {tokens, (int)batch_sequences(&trainer->ranks), seed, trainer->mark.step};
        trainer->reference_losses = reference_gradients(trainer->reference, &batch);
        free(tokens);
        bool clear = trainer->reference_losses.margin > least_margin();
        if (clear || draw + 1 == MOST_DRAWS) return seed;
        trainer->verification.reseeded++;
    }
}

void verify_batch(struct trainer *trainer) {
    struct reference *reference = trainer->reference;
    state_collect(trainer->state, trainer->comm, false, reference ? &reference->parameters : NULL,
                  reference ? reference->values : NULL);
    if (reference) trainer->batch_seed = run_reference(trainer);
    MPI_Request request;
    MPI_Ibcast(&trainer->batch_seed, 1, MPI_UINT64_T, 0, trainer->comm, &request);
    wait_all(&request, 1);
}

/* Of two differences the one that counts: a NaN stays, whatever comes behind it. */
static double larger_or_nan(double a, double b) {
    return isnan(a) || a >= b ? a : b;
}

static double largest_of(const floatX *values, size_t count) {
    double most = 0;
    for (size_t i = 0; i < count; i++) most = larger_or_nan(most, fabs((double)values[i]));
    return most;
}

double relative_difference(const floatX *found, const floatX *expected, size_t count, double floor) {
    double most = 0, scale = largest_of(expected, count);
    for (size_t i = 0; i < count; i++)
        most = larger_or_nan(most, fabs((double)found[i] - (double)expected[i]));
    return most / (isnan(scale) ? scale : fmax(scale, floor));
}

/* The loss and each of its parts: an auxiliary loss may be a small part of the whole. */
static void compare_losses(struct trainer *trainer) {
    const struct step_losses *found = &trainer->report.losses, *expected = &trainer->reference_losses;
    const double pairs[][2] = {{found->total, expected->total},
                               {found->cross_entropy, expected->cross_entropy},
                               {found->aux, expected->aux},
                               {found->z, expected->z}};
    for (size_t i = 0; i < COUNT(pairs); i++) {
        double off = fabs(pairs[i][0] - pairs[i][1]);
        if (pairs[i][1] != 0) off /= fabs(pairs[i][1]);
        trainer->verification.loss_rel = larger_or_nan(trainer->verification.loss_rel, off);
    }
}

static void compare(struct trainer *trainer, const floatX *found) {
    const struct reference *reference = trainer->reference;
    struct verification *worst = &trainer->verification;
    double floor = FLOOR * largest_of(reference->gradients, reference->parameters.total);
    compare_losses(trainer);
    for (int i = 0; i < reference->parameters.count; i++) {
        const struct parameter *p = &reference->parameters.list[i];
        double relative =
            relative_difference(found + p->offset, reference->gradients + p->offset, p->count, floor);
        bool worse = larger_or_nan(worst->grad_rel, relative) != worst->grad_rel && !isnan(worst->grad_rel);
        if (!worse && worst->worst_parameter[0]) continue;
        worst->grad_rel = relative;
        snprintf(worst->worst_parameter, sizeof worst->worst_parameter, "%s", p->name);
    }
}

void verify_gradients(struct trainer *trainer) {
    const struct reference *reference = trainer->reference;
    floatX *found = reference ? must_alloc(reference->parameters.total * sizeof *found) : NULL;
    state_collect(trainer->state, trainer->comm, true, reference ? &reference->parameters : NULL, found);
    if (reference) compare(trainer, found);
    free(found);
}

struct verification trainer_verification(const struct trainer *trainer) {
    struct verification verification = trainer->verification;
    MPI_Bcast(&verification, (int)sizeof verification, MPI_BYTE, 0, trainer->comm);
    return verification;
}
