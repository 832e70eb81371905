/*
Where the ring's GPUs stand and which NICs each side owns.

Concepts
- A block is one group of one replica: M attention GPUs and N feed-forward GPUs. Blocks are numbered replica
by replica, group by group.
- Split nodes: the attention GPUs of all blocks stand on the first nodes, the feed-forward GPUs on nodes
behind them, each spread evenly over its nodes in the order of the blocks. Mixed nodes: each block is a run of
M + N GPUs with both components evenly interleaved, and the runs are spread evenly over the nodes.
- NICs are counted apart from GPUs (the paper's second allocation): a side may own NICs beside GPUs that idle,
or that are another side's. No two sides share one. On its nodes a side's NICs are spread as its GPUs are.
- The numbers of NICs say on how many nodes a side stands: on as many as its GPUs and its NICs need.
*/
#ifndef DISAGMOE_PLACEMENT_H
#define DISAGMOE_PLACEMENT_H

#include "plan/plan.h"

struct ring_placement {
    int blocks;
    struct side *attention, *ffn; /* (blocks) */
};

/* Sets the plan's numbers of NICs that are 0: the division between the sides with the shortest longest
   dispatch or combine, on as few nodes as that takes. NICS_SHARED where a node has too few for every side. */
void placement_divide_nics(struct plan *plan);

/* Whether the nodes suffice for the plan's GPUs and the NICs it gives; errors (NULL: nobody asks) say what is
   too many. */
bool placement_fits(const struct plan *plan, struct errors *errors);
/* Everything is in the arena. False when GPUs or NICs do not fit the cluster's nodes: errors (NULL: nobody
   asks) say what is too many. */
bool placement_make(const struct plan *plan, struct arena *arena, struct ring_placement *placement,
                    struct errors *errors);

#endif
