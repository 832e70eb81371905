/*
Sizes of activations: those of the cells, and the schedule's with this rank's own share of the copies.

The schedule counts a group's fullest GPU. Where experts do not divide, or some are hotter than others, the
other ranks of the group hold less, by the plan's routing.
*/
#include "train/sizes.h"

#include <stdlib.h>
#include <string.h>

/* ---- what a cell holds ------------------------------------------------------------------------------- */

enum attention_recompute attention_level(const struct runner *runner, int layer) {
    return (enum attention_recompute)runner->ranks.recompute[layer].attention;
}

enum ffn_recompute ffn_level(const struct runner *runner, int layer) {
    return (enum ffn_recompute)runner->ranks.recompute[layer].ffn;
}

size_t received_kept_bytes(const struct runner *runner, int layer, const struct cell *cell) {
    return expert_kept_bytes(runner->model, layer, ffn_level(runner, layer), cell->routed, cell->firsts);
}

static size_t local_kept_bytes(const struct runner *runner, int layer, int micro_batch) {
    if (!runner->ranks.pipelined) return 0;
    return expert_kept_bytes(runner->model, layer, ffn_level(runner, layer), 0,
                             own_tokens(runner, micro_batch));
}

size_t received_restored_bytes(const struct runner *runner, int layer, const struct cell *cell) {
    return expert_restored_bytes(runner->model, layer, ffn_level(runner, layer), cell->routed, cell->firsts);
}

static size_t local_restored_bytes(const struct runner *runner, int layer, int micro_batch) {
    if (!runner->ranks.pipelined) return 0;
    return expert_restored_bytes(runner->model, layer, ffn_level(runner, layer), 0,
                                 own_tokens(runner, micro_batch));
}

/* In backward the gradients lie beside the keys and values. */
static size_t gathered_bytes(const struct runner *runner, const struct activation *activation) {
    bool backward = runner->schedule->ops[activation->producer].pass == PASS_BACKWARD;
    struct batch_part batch = own_batch(runner, activation->micro_batch);
    return (backward ? 2 : 1) * attention_gathered_bytes(runner->model, batch.sequences);
}

size_t activation_bytes(const struct runner *runner, const struct activation *activation) {
    int layer = activation->layer, m = activation->micro_batch;
    const struct cell *cell = cell_at(runner, layer, m);
    size_t row = (size_t)runner->hidden * sizeof(floatX);
    switch ((enum role)activation->role) {
    case ROLE_LAYER_INPUT:
    case ROLE_SENT:
    case ROLE_MIDDLE_GRADIENT:
        return (size_t)own_tokens(runner, m) * row;
    case ROLE_HEAD_INPUT:
        return (size_t)head_tokens(runner, m) * row;
    case ROLE_EXPERT_INPUT:
    case ROLE_EXPERT_OUTPUT:
    case ROLE_OUTPUT_GRADIENT:
    case ROLE_INPUT_GRADIENT:
        return (size_t)cell->copies.rows * row;
    case ROLE_ATTENTION:
        return attention_kept_bytes(runner->model, layer, attention_level(runner, layer),
                                    own_tokens(runner, m));
    case ROLE_RESTORED_ATTENTION:
        return attention_restored_bytes(runner->model, layer, attention_level(runner, layer),
                                        own_tokens(runner, m));
    case ROLE_GATHERED:
        return gathered_bytes(runner, activation);
    case ROLE_FFN:
        return received_kept_bytes(runner, layer, cell) + local_kept_bytes(runner, layer, m);
    case ROLE_RESTORED_FFN:
        return received_restored_bytes(runner, layer, cell) + local_restored_bytes(runner, layer, m);
    default:
        return 0;
    }
}

/* ---- what a rank should hold ------------------------------------------------------------------------- */

static struct sides sides_of(const struct ranks *ranks, int layer) {
    static const int here = 0, there = 0; /* two sides are told apart by their lists of GPUs */
    const struct group *groups = ranks->schedule->groups;
    return (struct sides){
        .attention = {.gpus = &here, .count = groups[ranks->attention[layer]].gpus},
        .ffn = {.gpus = ranks->pipelined ? &here : &there, .count = groups[ranks->ffn[layer]].gpus}};
}

/* Of a feed-forward role. */
static double ffn_bytes(const struct runner *runner, const struct activation *activation) {
    struct layer_memory memory =
        plan_gpu_layer_memory(runner->plan, activation->layer, runner->ranks.recompute[activation->layer],
                              sides_of(&runner->ranks, activation->layer), runner->seat.index);
    if (activation->role == ROLE_FFN) return memory.ffn;
    if (activation->role == ROLE_RESTORED_FFN) return memory.full_ffn - memory.ffn;
    return memory.expert_input;
}

static double bytes_of(const struct runner *runner, const struct activation *activation) {
    switch ((enum role)activation->role) {
    case ROLE_EXPERT_INPUT:
    case ROLE_EXPERT_OUTPUT:
    case ROLE_OUTPUT_GRADIENT:
    case ROLE_INPUT_GRADIENT:
    case ROLE_FFN:
    case ROLE_RESTORED_FFN:
        return ffn_bytes(runner, activation);
    default:
        return activation->bytes;
    }
}

/* Elements of experts that the group's fullest rank has beyond this one. */
static double missing_parameters(const struct ranks *ranks, struct seat seat) {
    int experts = ranks->model->moe.experts, here = ranks->schedule->groups[seat.group].gpus, layers = 0;
    int own = plan_first_expert(experts, here, seat.index + 1) - plan_first_expert(experts, here, seat.index);
    for (int layer = 0; layer < ranks->model->layers; layer++)
        layers += ranks->ffn[layer] == seat.group && model_layer_is_moe(ranks->model, layer);
    return layers * ((experts + here - 1) / here - own) * model_expert_parameters(ranks->model);
}

void fill_expected(struct runner *runner, const struct timeline *planned, struct arena *arena) {
    const struct schedule *schedule = runner->schedule;
    int group = runner->seat.group;
    struct shard missing = {missing_parameters(&runner->ranks, runner->seat), NULL, runner->plan->replicas};
    runner->expected_static =
        schedule->groups[group].static_bytes - plan_static_bytes(runner->plan, &missing, 1);
    /* The same schedule with other sizes: only its list of activations is another one. */
    struct schedule own = *schedule;
    own.activations = arena_alloc(arena, ((size_t)own.activation_count + 1) * sizeof *own.activations);
    memcpy(own.activations, schedule->activations, (size_t)own.activation_count * sizeof *own.activations);
    for (int a = 0; a < own.activation_count; a++)
        if (own.activations[a].group == group)
            own.activations[a].bytes = bytes_of(runner, &own.activations[a]);
    runner->expected = own.activations;
    double *peaks = must_alloc((size_t)schedule->group_count * sizeof *peaks);
    schedule_memory_peaks(&own, planned, peaks);
    runner->expected_peak = peaks[group] - schedule->groups[group].static_bytes;
    free(peaks);
}
