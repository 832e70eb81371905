/*
Threads and scratch memory of a thread that runs layers.

The workers sleep between pieces of work. A piece is an array of equal tasks, taken one by one through an
atomic counter: with other processes on the machine a fixed share would wait for the slowest. A worker spins
for a short while before it sleeps, since the next layer's work follows within microseconds.
*/
#include "layers/kernels.h"

#include <assert.h>
#include <cblas.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 2000 };

struct workers {
    int threads; /* with the caller */
    pthread_t *handles;
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    atomic_uint round; /* grows by one with each piece of work */
    atomic_int next;
    atomic_int active; /* workers not yet back from this round */
    bool stop;
    int count;
    void (*task)(void *context, int i);
    void *context;
};

static void run_tasks(struct workers *workers) {
    for (int i; (i = atomic_fetch_add(&workers->next, 1)) < workers->count;)
        workers->task(workers->context, i);
}

static void pause_briefly(void) {
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#endif
}

/* Waits until the round differs from `seen`; returns it. */
static unsigned wait_for_round(struct workers *workers, unsigned seen) {
    for (int spin = 0; spin < SPINS; spin++) {
        unsigned round = atomic_load(&workers->round);
        if (round != seen) return round;
        pause_briefly();
    }
    pthread_mutex_lock(&workers->mutex);
    while (atomic_load(&workers->round) == seen) pthread_cond_wait(&workers->wake, &workers->mutex);
    pthread_mutex_unlock(&workers->mutex);
    return atomic_load(&workers->round);
}

static void *worker_main(void *argument) {
    struct workers *workers = argument;
    for (unsigned seen = 0;;) {
        seen = wait_for_round(workers, seen);
        if (workers->stop) return NULL;
        run_tasks(workers);
        if (atomic_fetch_sub(&workers->active, 1) == 1) {
            pthread_mutex_lock(&workers->mutex);
            pthread_cond_signal(&workers->done);
            pthread_mutex_unlock(&workers->mutex);
        }
    }
}

/* Starts a round; all fields the workers read are written before. */
static void announce(struct workers *workers) {
    atomic_store(&workers->active, workers->threads - 1);
    pthread_mutex_lock(&workers->mutex);
    atomic_fetch_add(&workers->round, 1);
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->mutex);
}

struct workers *workers_new(int threads) {
    openblas_set_num_threads(1);
    struct workers *workers = must_alloc(sizeof *workers);
    workers->threads = 1;
    pthread_mutex_init(&workers->mutex, NULL);
    pthread_cond_init(&workers->wake, NULL);
    pthread_cond_init(&workers->done, NULL);
    workers->handles = must_alloc((size_t)(threads > 1 ? threads : 1) * sizeof *workers->handles);
    /* A machine that refuses more threads still computes, only slower. */
    while (workers->threads < threads &&
           pthread_create(&workers->handles[workers->threads - 1], NULL, worker_main, workers) == 0)
        workers->threads++;
    return workers;
}

void workers_free(struct workers *workers) {
    if (!workers) return;
    workers->stop = true;
    announce(workers);
    for (int i = 0; i + 1 < workers->threads; i++) pthread_join(workers->handles[i], NULL);
    pthread_mutex_destroy(&workers->mutex);
    pthread_cond_destroy(&workers->wake);
    pthread_cond_destroy(&workers->done);
    free(workers->handles);
    free(workers);
}

void workers_run(struct workers *workers, int count, void (*task)(void *context, int i), void *context) {
    if (!workers || workers->threads == 1 || count <= 1) {
        for (int i = 0; i < count; i++) task(context, i);
        return;
    }
    workers->count = count;
    workers->task = task;
    workers->context = context;
    atomic_store(&workers->next, 0);
    announce(workers);
    run_tasks(workers);
    for (int spin = 0; spin < SPINS && atomic_load(&workers->active); spin++) pause_briefly();
    if (!atomic_load(&workers->active)) return;
    pthread_mutex_lock(&workers->mutex);
    while (atomic_load(&workers->active)) pthread_cond_wait(&workers->done, &workers->mutex);
    pthread_mutex_unlock(&workers->mutex);
}

int context_threads(const struct context *context) {
    return context->workers ? context->workers->threads : 1;
}

/* ---- scratch ----------------------------------------------------------------------------------------- */

/* A block grows to what the deepest call needed, then is reused: after the first step nothing is allocated.
 */
struct scratch_block {
    struct scratch_block *previous;
    size_t capacity, used;
    char *memory;
};
enum { SCRATCH_ALIGN = 64, SCRATCH_BLOCK = 1 << 20 };

static struct scratch_block *block_new(size_t bytes, struct scratch_block *previous) {
    struct scratch_block *block = must_alloc(sizeof *block);
    block->capacity = bytes > SCRATCH_BLOCK ? bytes : SCRATCH_BLOCK;
    block->capacity = (block->capacity + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN;
    block->memory = aligned_alloc(SCRATCH_ALIGN, block->capacity);
    if (!block->memory) must_alloc(SIZE_MAX / 2); /* ends the process with its message */
    block->previous = previous;
    return block;
}

static void block_free(struct scratch_block *block) {
    free(block->memory);
    free(block);
}

void *scratch_take(struct context *context, size_t bytes) {
    bytes = (bytes + SCRATCH_ALIGN) / SCRATCH_ALIGN * SCRATCH_ALIGN;
    struct scratch_block *block = context->scratch;
    if (!block || block->capacity - block->used < bytes) {
        size_t want = block ? block->capacity : context->scratch_peak;
        block = context->scratch = block_new(bytes > want ? bytes : want, block);
    }
    void *memory = block->memory + block->used;
    block->used += bytes;
    context->scratch_bytes += bytes;
    if (context->scratch_bytes > context->scratch_peak) context->scratch_peak = context->scratch_bytes;
    return memory;
}

floatX *scratch_floats(struct context *context, size_t count) {
    return scratch_take(context, count * sizeof(floatX));
}

void scratch_release(struct context *context, void *since) {
    for (struct scratch_block *block = context->scratch; block; block = context->scratch) {
        char *start = block->memory;
        bool inside = (char *)since >= start && (char *)since < start + block->used;
        size_t keep = inside ? (size_t)((char *)since - start) : 0;
        context->scratch_bytes -= block->used - keep;
        block->used = keep;
        /* An empty block that turned out too small goes: the next one is made for the peak. */
        if (!inside || (!context->scratch_bytes && block->capacity < context->scratch_peak)) {
            context->scratch = block->previous;
            block_free(block);
        }
        if (inside) return;
    }
    assert(!"scratch_release of memory that was not taken");
}

void context_free(struct context *context) {
    while (context->scratch) {
        struct scratch_block *block = context->scratch;
        context->scratch = block->previous;
        block_free(block);
    }
    *context = (struct context){.workers = context->workers};
}
