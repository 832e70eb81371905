/*
One thread a lane: compute, send, receive. Each goes through its lane's operations in order and waits, before
each one, until enough operations are finished on the others (train/program.h).

An operation that holds two lanes of the rank, a collective inside its group, is run by both threads, each its
half; the one that finishes last frees its memory and tells other groups. The gather of parameters is left to
the step's end: no optimizer starts before every rank's gradient is reduced, since clipping needs the norm of
the whole, so a gather in the lanes could wait for a rank that waits for this rank's other transfers.
*/
#include "train/executor.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ------------------------------------------------------------------------------------------ */

/* The slots are of the cell that the activation belongs to; a stream that was passing moves in. */
static void take(struct trainer *trainer, int id) {
    const struct activation *activation = &trainer->schedule->activations[id];
    if (activation->role == ROLE_OTHER) return;
    struct cell *cell = cell_at(trainer, activation->layer, activation->micro_batch);
    size_t bytes = activation_bytes(trainer, activation);
    pthread_mutex_lock(&trainer->mutex); /* so that what is held and what is expected grow together */
    void *memory = pool_take(trainer->pool, bytes);
    trainer->expected_now += trainer->expected[id].bytes;
    if (trainer->expected_now > trainer->as_run_peak) trainer->as_run_peak = trainer->expected_now;
    pthread_mutex_unlock(&trainer->mutex);
    trainer->taken[id] = (double)bytes;
    cell->slot[activation->role] = memory;
    bool stream = activation->role == ROLE_LAYER_INPUT || activation->role == ROLE_HEAD_INPUT;
    if (stream && cell->passing) {
        memcpy(memory, cell->passing, bytes);
        passing_free(trainer, cell->passing);
        cell->passing = NULL;
    }
}

void take_memory(struct trainer *trainer, int op) {
    const struct list *takes = &trainer->program.takes;
    for (int i = takes->first[op]; i < takes->first[op + 1]; i++) take(trainer, takes->items[i]);
}

static void free_memory(struct trainer *trainer, int op) {
    const struct list *frees = &trainer->program.frees;
    for (int i = frees->first[op]; i < frees->first[op + 1]; i++) {
        const struct activation *activation = &trainer->schedule->activations[frees->items[i]];
        if (activation->role == ROLE_OTHER) continue;
        struct cell *cell = cell_at(trainer, activation->layer, activation->micro_batch);
        pthread_mutex_lock(&trainer->mutex);
        pool_give(trainer->pool, cell->slot[activation->role]);
        trainer->expected_now -= trainer->expected[frees->items[i]].bytes;
        pthread_mutex_unlock(&trainer->mutex);
        cell->slot[activation->role] = NULL;
    }
}

/* ---- progress ---------------------------------------------------------------------------------------- */

static bool may_start(const struct trainer *trainer, int op) {
    const int *before = trainer->program.before[op];
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        if (trainer->progress[resource] < before[resource]) return false;
    return true;
}

static void wait_to_start(struct trainer *trainer, int op) {
    pthread_mutex_lock(&trainer->mutex);
    while (!may_start(trainer, op)) pthread_cond_wait(&trainer->changed, &trainer->mutex);
    pthread_mutex_unlock(&trainer->mutex);
}

static int held_lanes(const struct trainer *trainer, int op) {
    int held = 0;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        held += holds_lane(trainer->schedule, op, trainer->seat.group, (enum resource)resource);
    return held;
}

/* Of the threads that run an operation, the last one to end. */
static bool ends_operation(struct trainer *trainer, int op) {
    if (held_lanes(trainer, op) < 2) return true;
    pthread_mutex_lock(&trainer->mutex);
    bool last = trainer->half_done[op];
    trainer->half_done[op] = !last;
    pthread_mutex_unlock(&trainer->mutex);
    return last;
}

/* The operation ends when its memory is free again: the measured timeline then shows what was held. */
static double finish(struct trainer *trainer, enum resource resource, int op) {
    if (ends_operation(trainer, op)) {
        free_memory(trainer, op);
        const struct list *tells = &trainer->program.tells;
        for (int i = tells->first[op]; i < tells->first[op + 1]; i++)
            tell_group(trainer, op, tells->items[i]);
    }
    double end = seconds_now();
    pthread_mutex_lock(&trainer->mutex);
    trainer->progress[resource]++;
    pthread_cond_broadcast(&trainer->changed);
    pthread_mutex_unlock(&trainer->mutex);
    return end;
}

/* ---- lanes ------------------------------------------------------------------------------------------- */

struct lane_run {
    struct trainer *trainer;
    enum resource resource;
};

/* Returns when the operation's own time began, where that is later than `start`. */
static double run_half(struct trainer *trainer, enum resource resource, int op, double start) {
    enum kind kind = (enum kind)trainer->schedule->ops[op].kind;
    if (kind == KIND_PARAM_GATHER) return start;
    if (kind == KIND_GRAD_SYNC) {
        if (resource == RESOURCE_SEND) {
            state_reduce(trainer->state, true);
            trainer->reduced = true;
        }
        return start;
    }
    if (resource == RESOURCE_SEND) {
        send_operation(trainer, op);
        return start;
    }
    if (resource == RESOURCE_RECV) return receive_operation(trainer, op);
    take_memory(trainer, op);
    compute_operation(trainer, op);
    return start;
}

/* For whoever watches: a transfer is waiting, whichever end it has. */
static void tell(const struct lane_run *run, enum pulse_kind kind, const char *what, int op) {
    char label[PULSE_TEXT];
    if (!run->trainer->pulse) return;
    pulse_set(run->trainer->pulse, (int)run->resource, kind, "%s%s", what,
              operation_label(run->trainer->schedule, op, label, sizeof label));
}

static void *run_lane(void *argument) {
    const struct lane_run *run = argument;
    struct trainer *trainer = run->trainer;
    const struct lane *lane = &trainer->schedule->lanes[lane_of(trainer->seat.group, run->resource)];
    for (int i = 0; i < lane->count; i++) {
        int op = lane->ops[i];
        tell(run, PULSE_WAIT, "waiting to start ", op);
        wait_to_start(trainer, op);
        if (run->resource != RESOURCE_RECV) wait_for_group(trainer, op);
        if (run->resource == RESOURCE_COMPUTE)
            tell(run, PULSE_WORK, "", op);
        else
            tell(run, PULSE_WAIT, run->resource == RESOURCE_SEND ? "sending " : "receiving ", op);
        double start = seconds_now();
        start = run_half(trainer, run->resource, op, start);
        trainer->spans[run->resource][i] = (struct span){start, finish(trainer, run->resource, op)};
    }
    pulse_set(trainer->pulse, (int)run->resource, PULSE_NONE, "lane done");
    return NULL;
}

void run_lanes(struct trainer *trainer) {
    struct lane_run runs[RESOURCE_COUNT];
    pthread_t threads[RESOURCE_COUNT];
    memset(trainer->progress, 0, sizeof trainer->progress);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        runs[resource] = (struct lane_run){trainer, (enum resource)resource};
    for (int resource = RESOURCE_SEND; resource < RESOURCE_COUNT; resource++)
        if (pthread_create(&threads[resource], NULL, run_lane, &runs[resource]) != 0) {
            fprintf(stderr, "disagmoe: train: rank %d: a thread cannot be started\n", trainer->rank);
            MPI_Abort(trainer->comm, 1);
        }
    run_lane(&runs[RESOURCE_COMPUTE]);
    for (int resource = RESOURCE_SEND; resource < RESOURCE_COUNT; resource++)
        pthread_join(threads[resource], NULL);
    pulse_set(trainer->pulse, RESOURCE_COMPUTE, PULSE_WORK, "ending the step");
}
