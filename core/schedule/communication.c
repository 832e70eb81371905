/*
Time that goes into transfers, read off a timeline: what is exposed of it, and all of it.
*/
#include "schedule/schedule.h"

#include <math.h>
#include <stdlib.h>

struct span {
    double start, end;
};

static int by_start(const void *a, const void *b) {
    const struct span *x = a, *y = b;
    return (x->start > y->start) - (x->start < y->start);
}

/* Length of the union of spans, clipped to from … to. */
static double covered(struct span *spans, int count, double from, double to) {
    if (count > 1) qsort(spans, (size_t)count, sizeof *spans, by_start);
    double length = 0, reached = from;
    for (int i = 0; i < count; i++) {
        double start = fmax(spans[i].start, reached), end = fmin(spans[i].end, to);
        if (end > start) length += end - start;
        reached = fmax(reached, end);
    }
    return length;
}

double schedule_exposed(const struct schedule *schedule, const struct timeline *timeline, int op, double from,
                        double to) {
    const struct operation *waiting = &schedule->ops[op];
    struct span few[16], *spans = few;
    if (waiting->dep_count > (int)COUNT(few)) spans = must_alloc((size_t)waiting->dep_count * sizeof *spans);
    int count = 0;
    for (int i = 0; i < waiting->dep_count; i++) {
        int dep = schedule->deps[waiting->first_dep + i];
        if (operation_is_transfer(&schedule->ops[dep]) && timeline->end[dep] > from)
            spans[count++] = (struct span){timeline->start[dep], timeline->end[dep]};
    }
    double seconds = covered(spans, count, from, to);
    if (spans != few) free(spans);
    return seconds;
}

static struct span *add_lane(struct span *span, const struct timeline *timeline, const struct lane *lane) {
    for (int i = 0; i < lane->count; i++)
        *span++ = (struct span){timeline->start[lane->ops[i]], timeline->end[lane->ops[i]]};
    return span;
}

double schedule_communication(const struct schedule *schedule, const struct timeline *timeline, int group) {
    const struct lane *compute = &schedule->lanes[lane_of(group, RESOURCE_COMPUTE)];
    const struct lane *send = &schedule->lanes[lane_of(group, RESOURCE_SEND)];
    const struct lane *receive = &schedule->lanes[lane_of(group, RESOURCE_RECV)];
    struct span *spans =
        must_alloc((size_t)(compute->count + send->count + receive->count + 1) * sizeof *spans);
    struct span *end = add_lane(add_lane(spans, timeline, send), timeline, receive);
    for (int i = 0; i < compute->count; i++) { /* when in the operation the collectives run is not known */
        int op = compute->ops[i];
        double gather = schedule->ops[op].gather, start = timeline->start[op];
        if (gather > 0) *end++ = (struct span){start, start + gather};
    }
    double seconds = covered(spans, (int)(end - spans), 0, timeline->makespan);
    free(spans);
    return seconds;
}
