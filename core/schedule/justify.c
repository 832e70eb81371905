/*
Better orders by justification: what the list-scheduler found is arranged a second time from the end, and then
a third time from the start.

The greedy pass starts whatever is most urgent by the generator's policy, and so holds up things that turn out
to matter. Arranged backwards, with what ended last first, every operation comes as late as it can; how late
that is says how urgent it was. A third pass takes operations in that order (forward-backward improvement: Li
and Willis 1992; "justification": Valls, Ballestin and Quintanilla 2005). It is kept when it is shorter. On
rings of real size this gains some 3 %, and it is what keeps step times from jumping when a duration changes
by a little.
*/
#include "schedule/schedule.h"

#include <math.h>
#include <stdlib.h>

/* The first pass may be this much longer than what is asked for: justification seldom gains more. */
#define ROOM 1.15

/* The same operations with time running backwards: number i is n − 1 − i, and what waited is waited for. */
static struct schedule *mirror_of(const struct schedule *schedule) {
    int n = schedule->op_count;
    struct schedule *mirror = schedule_new(schedule->group_count, schedule->layers, schedule->micro_batches);
    mirror->ops = must_alloc((size_t)(n + 1) * sizeof *mirror->ops);
    mirror->deps = must_alloc((size_t)(schedule->dep_count + 1) * sizeof *mirror->deps);
    mirror->op_count = mirror->op_capacity = n;
    mirror->dep_count = mirror->dep_capacity = schedule->dep_count;
    mirror->patient = schedule->patient;
    for (int i = 0; i < n; i++) {
        mirror->ops[n - 1 - i] = schedule->ops[i];
        mirror->ops[n - 1 - i].dep_count = 0;
    }
    for (int d = 0; d < schedule->dep_count; d++) mirror->ops[n - 1 - schedule->deps[d]].dep_count++;
    int next = 0;
    for (int i = 0; i < n; i++) {
        mirror->ops[i].first_dep = next;
        next += mirror->ops[i].dep_count;
        mirror->ops[i].dep_count = 0;
    }
    for (int i = 0; i < n; i++)
        for (int d = 0; d < schedule->ops[i].dep_count; d++) {
            struct operation *waits = &mirror->ops[n - 1 - schedule->deps[schedule->ops[i].first_dep + d]];
            mirror->deps[waits->first_dep + waits->dep_count++] = n - 1 - i;
        }
    return mirror;
}

/* What ended last goes first when time runs the other way. */
static void set_priorities(struct schedule *to, const struct schedule *from) {
    int n = from->op_count;
    for (int k = 0; k < n; k++) to->ops[n - 1 - from->ended[k]].priority = n - k;
}

static bool arrange_justified(struct schedule *schedule, double limit, struct timeline *timeline) {
    if (!schedule_arrange_once(schedule, ROOM * limit, timeline)) return false;
    int n = schedule->op_count;
    double greedy = timeline->makespan;
    int64_t *priorities = must_alloc((size_t)(n + 1) * sizeof *priorities);
    for (int i = 0; i < n; i++) priorities[i] = schedule->ops[i].priority;
    struct schedule *mirror = mirror_of(schedule);
    struct timeline backwards = {0};
    set_priorities(mirror, schedule);
    bool better = schedule_arrange_once(mirror, INFINITY, &backwards);
    if (better) set_priorities(schedule, mirror);
    timeline_free(&backwards);
    schedule_free(mirror);
    better = better && schedule_arrange_once(schedule, fmin(limit, greedy), timeline);
    if (!better) { /* as it was */
        for (int i = 0; i < n; i++) schedule->ops[i].priority = priorities[i];
        better = schedule_arrange_once(schedule, limit, timeline);
    }
    free(priorities);
    return better;
}

bool schedule_arrange_before(struct schedule *schedule, double limit, struct timeline *timeline) {
    if (schedule->justified) return arrange_justified(schedule, limit, timeline);
    return schedule_arrange_once(schedule, limit, timeline);
}

bool schedule_arrange(struct schedule *schedule, struct timeline *timeline) {
    return schedule_arrange_before(schedule, INFINITY, timeline);
}
