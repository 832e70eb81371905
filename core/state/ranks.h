/*
Who runs and who holds what: ranks of a real run, read off the schedule.

Concepts
- A rank is one GPU of the plan: a seat in a replica, in one of the schedule's groups. Ranks are numbered
replica after replica, group after group.
- A group's ranks hold what its operations need: attention, router and feed-forward norm of layers whose
attention runs there; experts (split between the group's ranks), feed-forward norm and shared experts or dense
FFN of layers whose feed-forward part runs there; embedding and head where their operations run.
- A parameter's holders are all ranks that have it, on both sides of a layer and in all replicas. Its gradient
is the sum over its holders.
- The tokens of a micro-batch lie in equal parts on the ranks of the attention groups: rank i has the same
tokens in every layer. The head's group, where it is another, splits them evenly over its own ranks.
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
    int count;        /* of all replicas */
    int replica_size; /* ranks of a replica */
    int *first;       /* (groups) a group's first rank within its replica */
    int *attention, *ffn,
        *next;           /* (layers) groups that run attention and feed-forward, and take the output */
    int embed, head;     /* groups */
    int attention_ranks; /* of every attention group */
    bool pipelined;      /* attention and feed-forward of a layer run on the same ranks */
};

/* Everything is in the arena. False when the schedule cannot be run by ranks: it has no embedding or head, a
   layer without attention or feed-forward part, attention groups of different sizes, only some layers on
   separate groups, or micro-batches too large to count; errors say which. */
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
    int64_t first_sequence; /* in the step's batch */
    int sequences;          /* fewer, or none, where the global batch does not fill the micro-batch */
};
struct batch_part attention_batch(const struct ranks *ranks, int replica, int micro_batch, int index);
/* Tokens of the micro-batch, in the order of attention ranks, before attention rank `index` (all: index =
 * attention_ranks). */
int tokens_before(const struct ranks *ranks, int replica, int micro_batch, int index);
/* First of them that rank `index` of the head's group has; index may be the group's size. */
int head_tokens_before(const struct ranks *ranks, int replica, int micro_batch, int index);
/* Sequences of the step's batch. */
int64_t batch_sequences(const struct ranks *ranks);

#endif
