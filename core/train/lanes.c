/*
One thread a lane: compute, send, receive. Each goes through its lane's operations in order and waits, before
each one, until enough operations are finished on the others (program.h).

An operation that holds two lanes of the rank is run by both threads; the one that finishes last frees its
memory and tells other groups. Of a collective inside its group each does its half. In a half-duplex schedule
the lane that has no part in a transfer stands still while the other works. The gather of parameters is left
to the step's end: no optimizer starts before every rank's gradient is reduced, since clipping needs the norm
of the whole, so a gather in the lanes could wait for a rank that waits for this rank's other transfers.
*/
#include "train/lanes.h"
#include "train/cell_memory.h"
#include "train/operations.h"
#include "train/step_end.h"
#include "train/transfers.h"

#include <string.h>

/* ---- progress ---------------------------------------------------------------------------------------- */

static bool may_start(const struct runner *runner, int op) {
    const int *before = runner->program.before[op];
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        if (runner->progress[resource] < before[resource]) return false;
    return true;
}

static void wait_to_start(struct runner *runner, int op) {
    pthread_mutex_lock(&runner->mutex);
    while (!may_start(runner, op)) pthread_cond_wait(&runner->changed, &runner->mutex);
    pthread_mutex_unlock(&runner->mutex);
}

/* Whether this lane is held by a transfer that goes the other way. */
static bool stands_still(const struct runner *runner, enum resource resource, int op) {
    const struct operation *it = &runner->schedule->ops[op];
    int own = lane_of(runner->seat.group, resource);
    if (resource == RESOURCE_SEND) return it->lanes[0] != own;
    return resource == RESOURCE_RECV && it->lanes[it->lane_count - 1] != own;
}

static void wait_for_other_lane(struct runner *runner, int op) {
    pthread_mutex_lock(&runner->mutex);
    while (!runner->half_done[op]) pthread_cond_wait(&runner->changed, &runner->mutex);
    pthread_mutex_unlock(&runner->mutex);
}

static int held_lanes(const struct runner *runner, int op) {
    int held = 0;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        held += holds_lane(runner->schedule, op, runner->seat.group, (enum resource)resource);
    return held;
}

/* Of the threads that run an operation, the last one to end. */
static bool ends_operation(struct runner *runner, int op) {
    if (held_lanes(runner, op) < 2) return true;
    pthread_mutex_lock(&runner->mutex);
    bool last = runner->half_done[op];
    runner->half_done[op] = !last;
    pthread_mutex_unlock(&runner->mutex);
    return last;
}

/* The operation ends when its memory is free again: the measured timeline then shows what was held. */
static double finish(struct runner *runner, enum resource resource, int op) {
    if (ends_operation(runner, op)) {
        free_memory(runner, op);
        const struct list *tells = &runner->program.tells;
        for (int i = tells->first[op]; i < tells->first[op + 1]; i++) tell_group(runner, op, tells->items[i]);
    }
    double end = seconds_now();
    pthread_mutex_lock(&runner->mutex);
    runner->progress[resource]++;
    pthread_cond_broadcast(&runner->changed);
    pthread_mutex_unlock(&runner->mutex);
    return end;
}

/* ---- lanes ------------------------------------------------------------------------------------------- */

struct lane_run {
    struct runner *runner;
    enum resource resource;
};

/* Returns when the operation's own time began, where that is later than `start`. */
static double run_half(struct runner *runner, enum resource resource, int op, double start) {
    enum kind kind = (enum kind)runner->schedule->ops[op].kind;
    if (stands_still(runner, resource, op)) {
        wait_for_other_lane(runner, op);
        return start;
    }
    if (kind == KIND_PARAM_GATHER) return start;
    if (kind == KIND_GRAD_SYNC) {
        if (resource == RESOURCE_SEND) reduce_within_group(runner);
        return start;
    }
    if (resource == RESOURCE_SEND) {
        send_operation(runner, op);
        return start;
    }
    if (resource == RESOURCE_RECV) return receive_operation(runner, op);
    take_memory(runner, op);
    if (kind == KIND_OPTIMIZER)
        end_step(runner);
    else
        compute_operation(runner, op);
    return start;
}

/* For whoever watches: a transfer is waiting, whichever end it has. */
static void tell(const struct lane_run *run, enum pulse_kind kind, const char *what, int op) {
    char label[PULSE_TEXT];
    if (!run->runner->pulse) return;
    pulse_set(run->runner->pulse, (int)run->resource, kind, "%s%s", what,
              operation_label(run->runner->schedule, op, label, sizeof label));
}

static void *run_lane(void *argument) {
    const struct lane_run *run = argument;
    struct runner *runner = run->runner;
    const struct lane *lane = group_lane(runner, runner->seat.group, run->resource);
    for (int i = 0; i < lane->count; i++) {
        int op = lane->ops[i];
        tell(run, PULSE_WAIT, "waiting to start ", op);
        wait_to_start(runner, op);
        if (run->resource != RESOURCE_RECV) wait_for_group(runner, op);
        if (run->resource == RESOURCE_COMPUTE)
            tell(run, PULSE_WORK, "", op);
        else
            tell(run, PULSE_WAIT,
                 stands_still(runner, run->resource, op) ? "other lane "
                 : run->resource == RESOURCE_SEND        ? "sending "
                                                         : "receiving ",
                 op);
        double start = seconds_now();
        start = run_half(runner, run->resource, op, start);
        runner->spans[run->resource][i] = (struct span){start, finish(runner, run->resource, op)};
    }
    pulse_set(runner->pulse, (int)run->resource, PULSE_NONE, "lane done");
    return NULL;
}

void run_lanes(struct runner *runner) {
    struct lane_run runs[RESOURCE_COUNT];
    pthread_t threads[RESOURCE_COUNT];
    memset(runner->progress, 0, sizeof runner->progress);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        runs[resource] = (struct lane_run){runner, (enum resource)resource};
    for (int resource = RESOURCE_SEND; resource < RESOURCE_COUNT; resource++)
        if (pthread_create(&threads[resource], NULL, run_lane, &runs[resource]) != 0) {
            fprintf(stderr, "disagmoe: train: rank %d: a thread cannot be started\n", runner->rank);
            MPI_Abort(runner->comm, 1);
        }
    run_lane(&runs[RESOURCE_COMPUTE]);
    for (int resource = RESOURCE_SEND; resource < RESOURCE_COUNT; resource++)
        pthread_join(threads[resource], NULL);
    pulse_set(runner->pulse, RESOURCE_COMPUTE, PULSE_WORK, "ending the step");
}
