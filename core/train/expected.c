/*
What one rank should hold: the schedule's activations with its own share of the copies.

The schedule counts a group's fullest GPU. Where experts do not divide, or some are hotter than others, the
other ranks of the group hold less, by the plan's routing.
*/
#include "train/executor.h"

#include <stdlib.h>
#include <string.h>

static struct sides sides_of(const struct ranks *ranks, int layer) {
    static const int here = 0, there = 0; /* two sides are told apart by their lists of GPUs */
    const struct group *groups = ranks->schedule->groups;
    return (struct sides){
        .attention = {.gpus = &here, .count = groups[ranks->attention[layer]].gpus},
        .ffn = {.gpus = ranks->pipelined ? &here : &there, .count = groups[ranks->ffn[layer]].gpus}};
}

/* Of a feed-forward role. */
static double ffn_bytes(const struct trainer *trainer, const struct activation *activation) {
    struct layer_memory memory =
        plan_gpu_layer_memory(trainer->plan, activation->layer, plan_recompute(trainer->plan, 0),
                              sides_of(&trainer->ranks, activation->layer), trainer->seat.index);
    if (activation->role == ROLE_FFN) return memory.ffn;
    if (activation->role == ROLE_RESTORED_FFN) return memory.full_ffn - memory.ffn;
    return memory.expert_input;
}

static double bytes_of(const struct trainer *trainer, const struct activation *activation) {
    switch ((enum role)activation->role) {
    case ROLE_EXPERT_INPUT:
    case ROLE_EXPERT_OUTPUT:
    case ROLE_OUTPUT_GRADIENT:
    case ROLE_INPUT_GRADIENT:
    case ROLE_FFN:
    case ROLE_RESTORED_FFN:
        return ffn_bytes(trainer, activation);
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

void fill_expected(struct trainer *trainer) {
    const struct schedule *schedule = trainer->schedule;
    int group = trainer->seat.group;
    struct shard missing = {missing_parameters(&trainer->ranks, trainer->seat), NULL,
                            trainer->plan->replicas};
    trainer->expected_static =
        schedule->groups[group].static_bytes - plan_static_bytes(trainer->plan, &missing, 1);
    /* The same schedule with other sizes: only its list of activations is another one. */
    struct schedule own = *schedule;
    own.activations =
        arena_alloc(trainer->arena, ((size_t)own.activation_count + 1) * sizeof *own.activations);
    memcpy(own.activations, schedule->activations, (size_t)own.activation_count * sizeof *own.activations);
    for (int a = 0; a < own.activation_count; a++)
        if (own.activations[a].group == group)
            own.activations[a].bytes = bytes_of(trainer, &own.activations[a]);
    trainer->expected = own.activations;
    double *peaks = must_alloc((size_t)schedule->group_count * sizeof *peaks);
    schedule_memory_peaks(&own, trainer->planned, peaks);
    trainer->expected_peak = peaks[group] - schedule->groups[group].static_bytes;
    free(peaks);
}
