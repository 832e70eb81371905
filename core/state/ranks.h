/*
Who runs and who holds what: ranks of a real run, read off the schedule.

Concepts
- A rank is one GPU of the plan: a seat in a replica, in one of the schedule's groups. Ranks are numbered
replica after replica, group after group.
- A group's ranks hold what its operations need: attention, router and feed-forward norm of layers whose
attention runs there; experts (split between the group's ranks), feed-forward norm and shared experts or dense
FFN of layers whose feed-forward part runs there; embedding and head where their operations run, which for the
head may be several groups.
- A parameter's holders are all ranks that have it, on both sides of a layer and in all replicas. Its gradient
is the sum over its holders.
- The sequences of a micro-batch lie in equal parts on the runs of cp ranks of the attention groups, each
sequence on all ranks of its run: rank i has the same tokens in every layer. The head's groups, where they are
others, take even parts of the tokens in the order of these ranks, and split them evenly over their own.
*/
#ifndef STATE_RANKS_H
#define STATE_RANKS_H

#include "layers/layers.h"
#include "plan/plan.h"

struct seat {
    int replica, group, index;
};

struct ranks {
    const struct plan *plan;
    const struct model *model;
    const struct schedule *schedule;
    int count;                   /* of all replicas */
    int replica_size;            /* ranks of a replica */
    int *first;                  /* (groups) a group's first rank within its replica */
    int *attention, *ffn;        /* (layers) groups that run attention and feed-forward */
    struct recompute *recompute; /* (layers) */
    int embed;                   /* group */
    int *heads, head_count;      /* groups, by the part of the tokens that they have */
    int attention_ranks;         /* of every attention group */
    bool pipelined;              /* attention and feed-forward of a layer run on the same ranks */
};

/* Everything is in the arena. False when the schedule cannot be run by ranks: it has no embedding or head, a
   layer without attention or feed-forward part, attention groups or groups with a head of different sizes,
   only some layers on separate groups, or micro-batches too large to count; errors say which. */
bool ranks_read(struct ranks *ranks, const struct plan *plan, const struct schedule *schedule,
                struct arena *arena, struct errors *errors);

struct seat seat_of(const struct ranks *ranks, int rank);
int rank_at(const struct ranks *ranks, struct seat seat);

bool rank_holds(const struct ranks *ranks, int rank, const struct parameter *parameter);
/* What the rank holds, in the usual order. */
struct parameters rank_parameters(struct arena *arena, const struct ranks *ranks, int rank);
/* Ranks that hold a parameter, in order, into holders (ranks->count); returns their number. */
int parameter_holders(const struct ranks *ranks, const struct parameter *parameter, int *holders);

/* ---- tokens ------------------------------------------------------------------------------------------ */

/* The sequences of one micro-batch on one rank of an attention group. */
struct batch_part {
    int64_t first_sequence;     /* in the step's batch */
    struct sequences sequences; /* fewer, or none, where the global batch does not fill the micro-batch */
};
struct batch_part attention_batch(const struct ranks *ranks, int replica, int micro_batch, int index);
/* Tokens of the micro-batch, in the order of attention ranks, before attention rank `index` (all: index =
 * attention_ranks). */
int tokens_before(const struct ranks *ranks, int replica, int micro_batch, int index);
/* The ranks of the head's groups, group after group, have a part of these tokens each: number of a rank's
   part (−1: it has no head), and the first token of a part, which may be the number of parts. */
int head_part(const struct ranks *ranks, struct seat seat);
int head_tokens_before(const struct ranks *ranks, int replica, int micro_batch, int part);
/* Sequences of the step's batch. */
int64_t batch_sequences(const struct ranks *ranks);

#endif
