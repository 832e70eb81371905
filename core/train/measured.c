/*
The lanes' spans as a timeline: of one rank on the run's own schedule, of all ranks on a schedule of ranks.
*/
#include "train/measured.h"

#include <math.h>
#include <stdlib.h>

/* ---- one rank ---------------------------------------------------------------------------------------- */

/* The rank's own operations as a timeline; a collective's times are its receiving half's. */
static struct timeline own_timeline(const struct runner *runner) {
    size_t ops = (size_t)runner->schedule->op_count + 1;
    struct timeline timeline = {must_alloc(ops * sizeof(double)), must_alloc(ops * sizeof(double)), 0};
    static const enum resource order[] = {RESOURCE_COMPUTE, RESOURCE_SEND, RESOURCE_RECV};
    for (size_t i = 0; i < COUNT(order); i++) {
        const struct lane *lane = group_lane(runner, runner->seat.group, order[i]);
        for (int k = 0; k < lane->count; k++) {
            timeline.start[lane->ops[k]] = runner->spans[order[i]][k].start;
            timeline.end[lane->ops[k]] = runner->spans[order[i]][k].end;
        }
    }
    return timeline;
}

double exposed_seconds(const struct runner *runner) {
    struct timeline timeline = own_timeline(runner);
    const struct lane *lane = group_lane(runner, runner->seat.group, RESOURCE_COMPUTE);
    double exposed = 0, now = runner->began;
    for (int i = 0; i < lane->count; i++) {
        struct span span = runner->spans[RESOURCE_COMPUTE][i];
        if (span.start > now)
            exposed += schedule_exposed(runner->schedule, &timeline, lane->ops[i], now, span.start);
        now = span.end;
    }
    timeline_free(&timeline);
    return exposed;
}

/* ---- all ranks --------------------------------------------------------------------------------------- */

/* Numbers that a rank of this group measured: start and end of each operation of its lanes, lane by lane,
   then the bytes of each activation. */
static int measurement_count(const struct runner *runner, int group) {
    int count = runner->schedule->activation_count;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        count += 2 * group_lane(runner, group, resource)->count;
    return count;
}

static double *own_measurements(const struct runner *runner) {
    int group = runner->seat.group, filled = 0;
    double *values = must_alloc((size_t)measurement_count(runner, group) * sizeof *values + 1);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        for (int i = 0; i < group_lane(runner, group, resource)->count; i++) {
            values[filled++] = runner->spans[resource][i].start;
            values[filled++] = runner->spans[resource][i].end;
        }
    for (int a = 0; a < runner->schedule->activation_count; a++) values[filled++] = runner->taken[a];
    return values;
}

static void name_rank(const struct runner *runner, struct schedule *measured, int rank) {
    struct seat seat = seat_of(&runner->ranks, rank);
    const struct group *group = &runner->schedule->groups[seat.group];
    schedule_group(measured, rank, 1, group->static_bytes, "rank %d: %s, GPU %d", rank, group->name,
                   seat.index);
}

/* One operation on one lane of a rank: the two halves of a collective take each their own time. */
static int add_half(const struct runner *runner, struct schedule *measured, struct timeline *timeline, int op,
                    int lane, const double *span) {
    const struct operation *it = &runner->schedule->ops[op];
    int group = lane / RESOURCE_COUNT;
    int half = schedule_compute(measured, (enum kind)it->kind, (enum pass)it->pass, it->layer,
                                it->micro_batch, group, span[1] - span[0]);
    measured->ops[half].lanes[0] = lane;
    measured->ops[half].bytes = it->bytes;
    measured->ops[half].chunk = it->chunk;
    measured->ops[half].chunks = it->chunks;
    timeline->start[half] = span[0];
    timeline->end[half] = span[1];
    return half;
}

static void add_measurements(const struct runner *runner, struct schedule *measured,
                             struct timeline *timeline, int rank, const double *values) {
    const struct schedule *schedule = runner->schedule;
    int group = seat_of(&runner->ranks, rank).group;
    /* Memory is taken by the receiving half of an operation and freed by the half that ends last. */
    size_t bytes = (size_t)schedule->op_count * sizeof(int) + 1;
    int *takes = must_alloc(bytes), *frees = must_alloc(bytes);
    for (int op = 0; op < schedule->op_count; op++) frees[op] = -1;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) {
        const struct lane *lane = group_lane(runner, group, resource);
        for (int i = 0; i < lane->count; i++, values += 2) {
            int op = lane->ops[i], half = add_half(runner, measured, timeline, op,
                                                   lane_of(rank, (enum resource)resource), values);
            takes[op] = half;
            if (frees[op] < 0 || timeline->end[frees[op]] < timeline->end[half]) frees[op] = half;
        }
    }
    for (int a = 0; a < schedule->activation_count; a++) {
        const struct activation *it = &schedule->activations[a];
        if (it->group != group) continue;
        int kept = schedule_keep(measured, rank, takes[it->producer], values[a]);
        schedule_role(measured, (enum role)it->role, it->layer, it->micro_batch);
        schedule_release(measured, kept, frees[it->freed_by]);
    }
    free(takes);
    free(frees);
}

/* Times from the first operation's start on. */
static void shift_to_zero(struct timeline *timeline, int count) {
    double first = INFINITY;
    for (int op = 0; op < count; op++) first = fmin(first, timeline->start[op]);
    for (int op = 0; op < count; op++) {
        timeline->start[op] -= first;
        timeline->end[op] -= first;
        timeline->makespan = fmax(timeline->makespan, timeline->end[op]);
    }
}

struct schedule *measured_schedule(const struct runner *runner, struct timeline *timeline) {
    const struct ranks *ranks = &runner->ranks;
    double *own = own_measurements(runner);
    *timeline = (struct timeline){0};
    if (runner->rank != 0) {
        MPI_Send(own, measurement_count(runner, runner->seat.group), MPI_DOUBLE, 0, 0, runner->comm);
        free(own);
        return NULL;
    }
    struct schedule *measured =
        schedule_new(ranks->count, runner->model->layers, runner->schedule->micro_batches);
    size_t halves = 1;
    for (int rank = 0; rank < ranks->count; rank++)
        halves += (size_t)measurement_count(runner, seat_of(ranks, rank).group) / 2;
    timeline->start = must_alloc(halves * sizeof(double));
    timeline->end = must_alloc(halves * sizeof(double));
    for (int rank = 0; rank < ranks->count; rank++) {
        int count = measurement_count(runner, seat_of(ranks, rank).group);
        double *values = rank == 0 ? own : must_alloc((size_t)count * sizeof *values + 1);
        if (rank > 0) MPI_Recv(values, count, MPI_DOUBLE, rank, 0, runner->comm, MPI_STATUS_IGNORE);
        name_rank(runner, measured, rank);
        add_measurements(runner, measured, timeline, rank, values);
        free(values);
    }
    shift_to_zero(timeline, measured->op_count);
    return measured;
}
