/*
What a point leaves open to a system, as lists of choices.

Concepts
- Levers say what is recomputed on each side, in how many layers, and whether the experts' input is kept or
sent again. They shape the schedule.
- A state is the rest of memory: precision of gradients and moments, ZeRO, offload. It hardly touches the
pipeline.
- What the manifest gives is not open. In a layout that is given whole nothing is, but the order and what the
manifest says is "auto".
*/
#ifndef SIM_SPACE_H
#define SIM_SPACE_H

#include "plan/plan.h"

#define MAX_STATES 64
#define MAX_LEVERS 32

struct space {
    const struct system *system;
    const struct point *point;
    double usable;        /* GPU bytes that a plan may use */
    bool searches_memory; /* what is searched must fit; what is given whole runs as given */
    bool placement_open;
    bool layers_open; /* in how many layers the levers recompute */
    bool order_open;  /* any of the next ones */
    bool wave_open, waves_open, prefer_open, patient_open;
    struct memory states[MAX_STATES]; /* the least intrusive first, the leanest last */
    struct memory levers[MAX_LEVERS]; /* in all layers; the one that recomputes least first */
    int state_count, lever_count;
};

struct space space_of(const struct system *system, const struct point *point);

/* An order with what is given in place of what is not open. */
struct order space_order(const struct space *space, int wave, int waves, int prefer, int patient);
#define POLICIES (2 * PREFER_COUNT)
/* Number `policy` of the combinations of prefer and patient. */
static inline struct order space_policy(const struct space *space, int wave, int waves, int policy) {
    return space_order(space, wave, waves, policy / 2, policy % 2);
}

/* Levers with the leanest state. */
struct memory space_leanest(const struct space *space, struct memory levers);

static inline bool recomputes(struct memory levers) {
    return levers.recompute.attention || levers.recompute.ffn;
}

#endif
