/*
Inside of the ring: who stands where, what a plan's layers cost, its schedule. ring.c fills it; space.c asks.
*/
#ifndef DISAGMOE_RING_H
#define DISAGMOE_RING_H

#include "disagmoe/placement.h"

struct ring {
    const struct plan *plan;
    int p, m, n, layers; /* groups, A-GPUs and F-GPUs of a group */
    struct ring_placement placement;
    int modelled;           /* the replica that the schedule is of */
    int **a_all, **f_all;   /* GPUs of each group in all replicas: what shares replicated parameters */
    int **f_same;           /* GPUs with the same experts as the group's first F-GPU, one a replica */
    int *heads, head_count; /* F-groups that hold the head */
    int *head_gpus;         /* theirs in all replicas */
    int *tied;              /* with those of A0, which a tied embedding is on */
    struct layer_cost *cost;
    struct layer_memory *memory;
    struct transfer_cost *last_combine; /* (head_count) */
    struct transfer_cost *hop;          /* (p) from each A-group to the next; none where combine goes there */
    double embed[2], head[2];           /* head: of one group's part */
    struct arena *arena;
};

/* The plan's NICs are settled. */
struct ring *ring_new(const struct plan *plan);
void ring_free(struct ring *ring);

/* Whether a layer's output is combined on its own A-group and goes on from there. */
bool ring_hops(const struct ring *ring, int layer);
/* What a layer recomputes. */
struct recompute ring_recompute(const struct ring *ring, int layer);
/* Of the GPUs of each side of group g. */
struct need ring_attention_need(const struct ring *ring, int g);
struct need ring_ffn_need(const struct ring *ring, int g);

struct schedule *ring_schedule(const struct plan *plan);

#endif
