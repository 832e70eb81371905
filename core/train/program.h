/*
What one rank does in a step: the operations of its group's three lanes, in their order, and when each may
start.

An operation starts when enough operations are finished on each of the rank's own lanes. That one rule covers
- dependencies on operations that hold one of these lanes, and
- memory: before an operation that takes memory starts, everything has been freed that the simulated timeline
frees before it. So a rank holds at most what that timeline says, however its lanes drift apart in reality.
Both kinds of edge point forward in the schedule's sequence, so waiting cannot go in a circle. A dependency on
an operation of another group (the gradient's arrival on the next group that lets this one begin to recompute)
comes as an empty message.
*/
#ifndef TRAIN_PROGRAM_H
#define TRAIN_PROGRAM_H

#include "schedule/schedule.h"

/* (operation, other): an operation of this group, and one (or a group) it has to wait for (or to tell). */
struct list {
    int *first; /* (operations + 1) */
    int *items;
};

struct program {
    const struct schedule *schedule;
    int group;
    int (*before)[RESOURCE_COUNT]; /* (operations) finished operations of each lane */
    struct list takes, frees;      /* activations of this group, by operation */
    struct list waits;             /* operations of other groups that this group's operation waits for */
    struct list tells;             /* groups that wait for this group's operation */
};

/* planned: the timeline whose order of freeing and taking memory is kept. */
struct program program_new(struct arena *arena, const struct schedule *schedule,
                           const struct timeline *planned, int group);
/* Whether an operation holds this lane of a group; any of the group's. */
bool holds_lane(const struct schedule *schedule, int op, int group, enum resource resource);
bool holds_group(const struct schedule *schedule, int op, int group);

#endif
