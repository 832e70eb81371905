/*
Memory for activations: one region, sized ahead, from which buffers are taken and to which they return.

Where the region is too small or too fragmented, a buffer comes from the heap, so that a run never fails for
it; overflow says how much. Any thread may call.
*/
#ifndef TRAIN_POOL_H
#define TRAIN_POOL_H

#include "base/base.h"

struct pool;

struct pool *pool_new(size_t capacity);
void pool_free(struct pool *pool);                /* NULL is allowed; buffers still out are gone with it */
void *pool_take(struct pool *pool, size_t bytes); /* 64-byte aligned, not zeroed; never NULL */
void pool_give(struct pool *pool, void *buffer);  /* NULL is allowed */

struct pool_use {
    size_t now, peak; /* bytes asked for and not given back */
    size_t overflow;  /* the most that lay outside the region at one time */
};
struct pool_use pool_use(struct pool *pool);

#endif
