/*
The pool: blocks in address order, each with a header in front; first fit, neighbours that are free are
merged.
*/
#include "train/pool.h"

#include <pthread.h>
#include <stdlib.h>

enum { ALIGN = 64 };

/* In front of every buffer; a multiple of ALIGN, so that buffers are aligned. */
struct block {
    _Alignas(ALIGN) struct block *previous, *next; /* neighbours in the region; NULL outside of it */
    size_t room;                                   /* bytes behind the header */
    size_t bytes;                                  /* asked for; 0: free */
    bool inside;
};

struct pool {
    pthread_mutex_t mutex;
    void *region;
    struct block *first;
    struct pool_use use;
    size_t outside;
};

static size_t rounded(size_t bytes) {
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static void *aligned(size_t bytes) {
    void *memory = aligned_alloc(ALIGN, rounded(bytes));
    if (!memory) must_alloc(SIZE_MAX / 2); /* ends the process with its message */
    return memory;
}

struct pool *pool_new(size_t capacity) {
    struct pool *pool = must_alloc(sizeof *pool);
    pthread_mutex_init(&pool->mutex, NULL);
    pool->region = aligned(rounded(capacity) + sizeof(struct block));
    pool->first = pool->region;
    *pool->first = (struct block){.room = rounded(capacity), .inside = true};
    return pool;
}

void pool_free(struct pool *pool) {
    if (!pool) return;
    pthread_mutex_destroy(&pool->mutex);
    free(pool->region);
    free(pool);
}

/* Cuts what is left behind a block of `bytes` off as a free block, when it can hold anything. */
static void split(struct block *block, size_t bytes) {
    size_t left = block->room - bytes;
    if (left < sizeof(struct block) + ALIGN) return;
    struct block *rest = (struct block *)((char *)(block + 1) + bytes);
    *rest = (struct block){
        .previous = block, .next = block->next, .room = left - sizeof(struct block), .inside = true};
    if (rest->next) rest->next->previous = rest;
    block->next = rest;
    block->room = bytes;
}

static void merge_with_next(struct block *block) {
    struct block *next = block->next;
    block->room += sizeof(struct block) + next->room;
    block->next = next->next;
    if (next->next) next->next->previous = block;
}

static struct block *take_inside(struct pool *pool, size_t room) {
    for (struct block *block = pool->first; block; block = block->next)
        if (!block->bytes && block->room >= room) {
            split(block, room);
            return block;
        }
    return NULL;
}

void *pool_take(struct pool *pool, size_t bytes) {
    if (!bytes) bytes = 1; /* a buffer of its own, so that it can be given back */
    pthread_mutex_lock(&pool->mutex);
    struct block *block = take_inside(pool, rounded(bytes));
    if (!block) {
        block = aligned(rounded(bytes) + sizeof *block);
        *block = (struct block){.room = rounded(bytes)};
        pool->outside += bytes;
        if (pool->outside > pool->use.overflow) pool->use.overflow = pool->outside;
    }
    block->bytes = bytes;
    pool->use.now += bytes;
    if (pool->use.now > pool->use.peak) pool->use.peak = pool->use.now;
    pthread_mutex_unlock(&pool->mutex);
    return block + 1;
}

void pool_give(struct pool *pool, void *buffer) {
    if (!buffer) return;
    pthread_mutex_lock(&pool->mutex);
    struct block *block = (struct block *)buffer - 1;
    pool->use.now -= block->bytes;
    if (!block->inside) {
        pool->outside -= block->bytes;
        free(block);
    } else {
        block->bytes = 0;
        if (block->next && !block->next->bytes) merge_with_next(block);
        if (block->previous && !block->previous->bytes) merge_with_next(block->previous);
    }
    pthread_mutex_unlock(&pool->mutex);
}

struct pool_use pool_use(struct pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    struct pool_use use = pool->use;
    pthread_mutex_unlock(&pool->mutex);
    return use;
}
