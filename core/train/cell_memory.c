/*
Activations come from the pool, into the slots of their cell; what passes comes from the heap.
*/
#include "train/cell_memory.h"
#include "train/pool.h"
#include "train/sizes.h"

#include <stdlib.h>
#include <string.h>

/* ---- what passes ------------------------------------------------------------------------------------- */

/* In front of each piece, in a list of all of a step's. */
struct passing {
    _Alignas(max_align_t) struct passing *previous, *next;
    size_t bytes;
};

void *passing_new(struct runner *runner, size_t bytes) {
    struct passing *passing = must_alloc(sizeof *passing + bytes);
    pthread_mutex_lock(&runner->mutex);
    passing->bytes = bytes;
    passing->next = runner->passing;
    if (passing->next) passing->next->previous = passing;
    runner->passing = passing;
    runner->passing_bytes += bytes;
    if (runner->passing_bytes > runner->passing_peak) runner->passing_peak = runner->passing_bytes;
    pthread_mutex_unlock(&runner->mutex);
    return passing + 1;
}

static void drop(struct runner *runner, struct passing *passing) {
    pthread_mutex_lock(&runner->mutex);
    if (passing->previous)
        passing->previous->next = passing->next;
    else
        runner->passing = passing->next;
    if (passing->next) passing->next->previous = passing->previous;
    runner->passing_bytes -= passing->bytes;
    pthread_mutex_unlock(&runner->mutex);
    free(passing);
}

void passing_free(struct runner *runner, floatX **field) {
    if (*field) drop(runner, (struct passing *)(void *)*field - 1);
    *field = NULL;
}

void passing_free_all(struct runner *runner) {
    while (runner->passing) drop(runner, runner->passing);
}

floatX *stream_for(struct runner *runner, struct cell *cell, int tokens) {
    if (!stream_of(cell))
        cell->passing = passing_new(runner, (size_t)tokens * runner->hidden * sizeof(floatX));
    return stream_of(cell);
}

floatX *gradient_for(struct runner *runner, struct cell *cell, int tokens) {
    cell->gradient = passing_new(runner, (size_t)tokens * runner->hidden * sizeof(floatX));
    return cell->gradient;
}

/* ---- activations ------------------------------------------------------------------------------------- */

/* The slots are of the cell that the activation belongs to; a stream that was passing moves in. */
static void take(struct runner *runner, int id) {
    const struct activation *activation = &runner->schedule->activations[id];
    if (activation->role == ROLE_OTHER) return;
    struct cell *cell = cell_at(runner, activation->layer, activation->micro_batch);
    size_t bytes = activation_bytes(runner, activation);
    pthread_mutex_lock(&runner->mutex); /* so that what is held and what is expected grow together */
    void *memory = pool_take(runner->pool, bytes);
    runner->expected_now += runner->expected[id].bytes;
    if (runner->expected_now > runner->as_run_peak) runner->as_run_peak = runner->expected_now;
    pthread_mutex_unlock(&runner->mutex);
    runner->taken[id] = (double)bytes;
    cell->slot[activation->role] = memory;
    bool stream = activation->role == ROLE_LAYER_INPUT || activation->role == ROLE_HEAD_INPUT;
    if (stream && cell->passing) {
        memcpy(memory, cell->passing, bytes);
        passing_free(runner, &cell->passing);
    }
}

void take_memory(struct runner *runner, int op) {
    const struct list *takes = &runner->program.takes;
    for (int i = takes->first[op]; i < takes->first[op + 1]; i++) take(runner, takes->items[i]);
}

void free_memory(struct runner *runner, int op) {
    const struct list *frees = &runner->program.frees;
    for (int i = frees->first[op]; i < frees->first[op + 1]; i++) {
        const struct activation *activation = &runner->schedule->activations[frees->items[i]];
        if (activation->role == ROLE_OTHER) continue;
        struct cell *cell = cell_at(runner, activation->layer, activation->micro_batch);
        pthread_mutex_lock(&runner->mutex);
        pool_give(runner->pool, cell->slot[activation->role]);
        runner->expected_now -= runner->expected[frees->items[i]].bytes;
        pthread_mutex_unlock(&runner->mutex);
        cell->slot[activation->role] = NULL;
    }
}
