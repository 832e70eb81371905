/*
Listing a point's choices.
*/
#include "sim/space.h"

static void list_states(struct space *space, int open) {
    struct memory given = space->point->memory;
    bool moments = open & MEMORY_MOMENTS, grads = open & MEMORY_GRADS, zero = open & MEMORY_ZERO;
    for (int o = 0; o < (open & MEMORY_OFFLOAD ? 2 : 1); o++)
        for (int m = 0; m < (moments ? 2 : 1); m++)
            for (int g = 0; g < (grads ? 2 : 1); g++)
                for (int z = 0; z < (zero ? space->system->zero_max + 1 : 1); z++)
                    space->states[space->state_count++] =
                        (struct memory){.grads = grads ? g : given.grads,
                                        .moments = moments ? m : given.moments,
                                        .zero = zero ? z : given.zero,
                                        .offload = open & MEMORY_OFFLOAD ? o : given.offload};
}

static void list_levers(struct space *space, int open) {
    struct memory given = space->point->memory;
    bool recompute = open & MEMORY_RECOMPUTE, input = open & MEMORY_EXPERT_INPUT;
    for (int a = 0; a < (recompute ? ATTENTION_FULL + 1 : 1); a++)
        for (int f = 0; f < (recompute ? FFN_FULL + 1 : 1); f++)
            for (int i = 0; i < (input ? 2 : 1); i++) {
                struct memory levers = {.recompute = given.recompute, .expert_input = given.expert_input};
                if (recompute) levers.recompute = (struct recompute){a, f, 0};
                if (input) levers.expert_input = i;
                space->levers[space->lever_count++] = levers;
            }
    space->layers_open = recompute;
}

struct space space_of(const struct system *system, const struct point *point) {
    struct space space = {.system = system, .point = point, .usable = plan_usable_memory(point)};
    bool whole = system->is_whole(&point->parallel);
    int open = point->auto_memory ? MEMORY_ALL : whole ? 0 : MEMORY_ALL & ~point->memory_given;
    if (point->table) open = 0; /* memory is not enforced then */
    space.placement_open =
        system->uses_placement && !point->placement_given && (point->auto_placement || !whole);
    space.searches_memory = !whole || open || space.placement_open;
    space.wave_open = system->searches_order && !point->order.wave;
    space.waves_open = system->searches_order && !point->order.waves_in_flight;
    space.prefer_open = system->searches_order && point->order.prefer == PREFER_OPEN;
    space.patient_open = system->searches_order && point->order.patient == PATIENT_OPEN;
    space.order_open = space.wave_open || space.waves_open || space.prefer_open || space.patient_open;
    list_states(&space, open);
    list_levers(&space, open);
    return space;
}

struct order space_order(const struct space *space, int wave, int waves, int prefer, int patient) {
    struct order order = space->point->order;
    if (space->wave_open) order.wave = wave;
    if (space->waves_open) order.waves_in_flight = waves;
    if (space->prefer_open) order.prefer = prefer;
    if (space->patient_open) order.patient = patient;
    return order;
}

struct memory space_leanest(const struct space *space, struct memory levers) {
    return memory_with_state(levers, space->states[space->state_count - 1]);
}
