/*
The paper's roofline allocation: how many GPUs and NICs go to attention and to experts. Front door of
core/allocate.

Concepts
- A roofline says how long one layer takes each side for a fixed number of tokens, whatever GPUs it has: the
longer of its FLOPs over its GPUs and its bytes over its NICs (the paper's T_a and T_f, section 4).
- An allocation problem is the integer program on it: GPUs and NICs of each side so that the slower side is as
quick as can be (phase 1) with the best MFU among those (phase 2). The relaxed form is the paper's: one peak,
the whole cluster's GPUs and NICs, nothing else constrained. The other takes what the cost model says of this
plan: achieved rates, the plan's real NIC and NVLink bytes, whole nodes, memory.
- Groups, context parallelism, placement and memory levers are enumerated outside: one small problem each. Its
solution is a seed, ranked by the step time that the roofline predicts.
- A local search goes on from a seed by an evaluator's word: the simulator's, or measured steps.
- Moving shapes: a stream of sequence lengths, and policies that say when another allocation pays for moving
weights and optimizer state (stream.c).

Nothing here knows an executor: who calls fills the evaluator.
*/
#ifndef ALLOCATE_H
#define ALLOCATE_H

#include "plan/plan.h"

/* ---- the roofline ------------------------------------------------------------------------------------ */

/* One layer, the FLOPs and bytes of its tokens in a group's micro-batch. */
struct roofline {
    double attn_flops, ffn_flops;             /* model FLOPs, as MFU counts them */
    double bytes;                             /* that either side sends, and receives */
    double peak_flops;                        /* of a GPU, the maker's: MFU divides by it */
    double attn_flops_per_s, ffn_flops_per_s; /* of a GPU, achieved; relaxed: the peak */
    double nic_bytes_per_s;                   /* achieved: of all bytes, those that stay in a node too */
    int gpus, nics;                           /* to be divided */
};

/* The paper's, of the whole cluster, `sequences` and one forward pass, a layer on average: one peak for both
   sides, the maker's for NICs. */
struct roofline roofline_relaxed(const struct point *point, double sequences);

/* FLOPs per byte that one layer sends: by the paper's simplified forms (section 3: two-matrix FFN, heads ×
   head dimension = hidden, not causal), and exact. */
struct intensity {
    double attention, ffn;
};
struct intensity intensity_of_paper(const struct model *model, int seq_len);
struct intensity intensity_exact(const struct model *model, int seq_len);
/* FLOPs per byte above which compute binds: FLOP/s of a GPU ÷ bytes/s of its NIC or NVLink port (Î). */
double turning_point(double flops_per_s, double bytes_per_s);

/* ---- the integer program ----------------------------------------------------------------------------- */

struct allocation {
    int attn_gpus, ffn_gpus, attn_nics, ffn_nics; /* of one group */
};

/* Seconds are for the same tokens whatever the allocation. Arrays start with one GPU or NIC: [0] of one. */
struct allocation_problem {
    int gpus, nics;                                   /* of a group: both sides together at most */
    int most_attn_gpus, most_ffn_gpus;                /* lengths of the next two (experts bound an F-group) */
    const double *attn_seconds, *ffn_seconds;         /* computing */
    const double *attn_nic_seconds, *ffn_nic_seconds; /* (nics) sending or receiving */
    /* Whole nodes: `blocks` groups in all stand on nodes that hold one component each. nodes 0: not asked. */
    int nodes, gpus_per_node, nics_per_node, blocks;
    bool mixed; /* nodes hold both components: only the totals are bounded */
    /* Memory, bytes of a GPU: attn_static[m − 1] ≤ usable − attn_kept, and ffn_static[n − 1] + ffn_kept ·
       m ÷ n ≤ usable, ffn_kept being what one A-GPU's tokens keep on the F side. usable INFINITY: not asked.
     */
    double usable, attn_kept, ffn_kept;
    const double *attn_static, *ffn_static;
    double flops, peak_flops; /* of both sides together; of a GPU */
    int multiple;             /* attn_gpus is a multiple of it: context parallelism. 1: any */
};

struct allocation_solution {
    struct allocation allocation;
    double attn_seconds, ffn_seconds; /* T_a, T_f: the longer of computing and sending */
    double mfu;                       /* flops ÷ (max(T_a, T_f) · GPUs chosen · peak) */
    double solve_seconds;             /* of the solver: shown, never compared */
};

/* Of a roofline alone: nothing but its GPUs and NICs is bounded. Everything is in the arena. */
struct allocation_problem roofline_problem(const struct roofline *roofline, struct arena *arena);
/* Whether some numbers of GPUs have the memory: what allocation_solve would say of it, at once. */
bool allocation_has_memory(const struct allocation_problem *problem);

/* Phase 1: the least max(T_a, T_f). Phase 2: of these the highest MFU, which is the fewest GPUs. Phase 3: of
   these the NICs with the shortest longest transfer, which costs nothing. Exact: each phase is proved by a
   last problem that has no solution. False where nothing is allowed: `why` (128 bytes or more) names the
   constraint that cannot hold. */
bool allocation_solve(const struct allocation_problem *problem, struct allocation_solution *solution,
                      char *why, size_t why_size);
/* Phase 1's problem in CPLEX LP format. False when it could not be written: errors. */
bool allocation_write_lp(const struct allocation_problem *problem, const char *file, struct errors *errors);

/* ---- seeds ------------------------------------------------------------------------------------------- */

/* A shape is all but the allocation: groups, replicas, cp, placement and memory levers. A seed is a shape's
   problem solved, and the plan it stands for. */
struct seed {
    struct plan plan;         /* layout and memory whole, sized and settled; order as the point gives it */
    struct roofline roofline; /* of the passes of a training step, both directions, with achieved rates */
    struct allocation_problem problem;
    double even_attn_gpus; /* whose micro-batch the problem's seconds are for */
    struct allocation_solution solution;
    double predicted; /* seconds per sequence by the roofline: the slower side of the fullest group for each
                         micro-batch, and one micro-batch's way through the ring; without the step's end */
};
/* The prediction for another allocation of the seed's shape, a sized plan; NAN where the seed is blind (no
   roofline), INFINITY where the tables do not reach. */
double seed_predict(const struct seed *seed, const struct plan *plan);
struct seeds {
    struct seed *list; /* the best predicted first, in turn those of either problem */
    int count;
    int shapes, problems; /* looked at; solved */
    double solve_seconds; /* of the slowest */
    char why[192];        /* when there is none: what could not hold, of the shape that came last */
    struct arena *arena;
};

/* About `most` seeds: two problems for each shape that the point leaves open to `system`, which differ in how
   many micro-batches memory has to hold, with the memory levers that take least time among those that fit;
   shapes whose roofline cannot come below the last seed's are left out. The system has sides. */
struct seeds allocation_seeds(const struct system *system, const struct point *point, int most);
/* The seed of a shape that a plan is of (its groups, replicas, cp, placement and memory), whatever its
   allocation. False: errors say what cannot hold. */
bool allocation_seed(const struct system *system, const struct plan *plan, struct seed *seed,
                     struct arena *arena, struct errors *errors);
void seeds_free(struct seeds *seeds);

/* A point's table of costs, which holds for the groups that its parallel gives, for other groups: attention's
   seconds are those of a GPU's own tokens and stay, the feed-forward part's follow tokens and GPUs, transfers
   tokens and the fewer NICs. */
struct cost_table allocation_table(const struct point *point, int attn_gpus, int ffn_gpus, int nics);

/* ---- local search ------------------------------------------------------------------------------------ */

/* What an executor says of a layout (parallel and placement of the plan, which is sized and settled): seconds
   of a step per sequence; INFINITY where it does not fit. Called by several threads at a time. */
struct evaluator {
    const char *name; /* "sim", "cpu": in the log */
    const struct system *system;
    void *context;
    double (*evaluate)(void *context, const struct plan *plan);
    int threads; /* at once; 1 where measured steps would disturb each other */
};

struct trial {
    struct plan plan;
    double predicted; /* by the roofline of its shape; NAN: there is none */
    double seconds;   /* per sequence; INFINITY: does not fit */
};

struct search_options {
    int radius;      /* GPUs or NICs that a neighbour has more or fewer on either side (the paper's r) */
    int trials;      /* evaluations at most (the paper's K) */
    int patience;    /* evaluations without a better layout before it stops; 0: never early */
    const char *log; /* JSON lines, one a trial, as they come; what is there already is not evaluated again.
                        NULL: none */
    const char *identity;     /* of what is searched: a log of something else is refused */
    const volatile int *stop; /* NULL, or ends the search early when it is not 0 */
};

struct search {
    struct trial *trials; /* in the order in which they were tried */
    int count, best;      /* best: −1 where nothing fits */
    int reused;           /* that the log knew */
};

/* The paper's algorithm 1 from several seeds: the best predicted first, then the neighbours of the best
   layout found, the best predicted first, until none is better. Tried in rounds of eight, so that what is
   tried does not depend on the number of threads. seeds (count): those of allocation_seeds, or blind ones.
   The caller frees trials. False: errors say what is wrong with the log. */
bool allocation_search(const struct evaluator *evaluator, const struct seed *seeds, int count,
                       const struct search_options *options, struct search *search, struct errors *errors);

/* To begin from scratch: for every number of groups that is a power of two, one replica on all GPUs, divided
   evenly; without a roofline. */
struct seeds allocation_even_seeds(const struct system *system, const struct point *point);

/* Every groups, attn_gpus, ffn_gpus, and every division of the NICs that are there between the sides, or
   equal numbers of fewer, at the cp, placement, memory and order of `like`. What a lower bound shows to be
   slower than the best so far is not evaluated. */
struct exhaustive {
    struct trial best;
    int64_t layouts; /* all that there are */
    int evaluations;
};
struct exhaustive allocation_exhaustive(const struct evaluator *evaluator, const struct plan *like,
                                        const volatile int *stop);

/* ---- moving shapes ----------------------------------------------------------------------------------- */

/* What is known of layouts under a stream of shapes (sequence lengths): seconds of a step (layouts, shapes),
   INFINITY where a layout does not fit; at least one fits each shape. moves (layouts, layouts): seconds to
   reallocate between two steps, 0 on the diagonal. */
struct stream_table {
    int layouts, shapes;
    const double *seconds, *moves;
};
/* What a policy does with a stream of `steps` steps: the layout of each, and what it takes. */
struct stream_outcome {
    int *layouts;                 /* (steps), the caller's */
    double seconds, move_seconds; /* moves are part of seconds */
    int moves;
};

/* Policies. shapes (steps): of each step. outcome->layouts is filled, the other members set.

   One layout all along. */
void stream_stay(const struct stream_table *table, const int *shapes, int steps, int layout,
                 struct stream_outcome *outcome);
/* The single layout that is best for the whole stream; returns it. Where none fits every shape, seconds are
   INFINITY. */
int stream_static(const struct stream_table *table, const int *shapes, int steps,
                  struct stream_outcome *outcome);
/* The best that knows the whole stream; begins where it likes. */
void stream_oracle(const struct stream_table *table, const int *shapes, int steps,
                   struct stream_outcome *outcome);
/* Knows the past and the present step's shape, and begins with `home`. On no stream is it worse than staying
   there by more than stream_round_trip. */
void stream_online(const struct stream_table *table, const int *shapes, int steps, int home,
                   struct stream_outcome *outcome);
/* The dearest way from `home` to another layout and back, seconds. */
double stream_round_trip(const struct stream_table *table, int home);
/* Where one begins who knows the first step alone. */
int stream_home(const struct stream_table *table, int shape);

#endif
