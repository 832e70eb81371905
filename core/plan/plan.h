/*
From a manifest to a plan: what is run, who holds what, what each operation costs.

Concepts
- An experiment is a manifest; a sweep makes several points of it. A point still has choices marked "auto".
- A point's systems run the same, but for what per_system sets: then a system has a variant of the point.
- A plan is one point for one system with every choice made. One data-parallel replica of it is a schedule.
- A system (struct system) is a way of ordering work: one readable file that enumerates its layouts and builds
its schedule. It sees model, cluster, plan and schedule, never an executor.
- Sides: the GPUs of one worker group that hold attention and those that hold the feed-forward part. A
pipelined system has the same GPUs on both sides; a disaggregated one has two sets. One cost model serves
both.
*/
#ifndef PLAN_H
#define PLAN_H

#include "base/base.h"
#include "cluster/cluster.h"
#include "model/model.h"
#include "schedule/schedule.h"

/* ---- choices ----------------------------------------------------------------------------------------- */

/* A value of 0 is still to be chosen ("auto"). */
struct parallel {
    int pp, vpp, ep;                 /* pipelined systems: stages, chunks a stage, expert-parallel GPUs */
    int groups, attn_gpus, ffn_gpus; /* disaggregated systems: ring groups, GPUs of one group on each side */
    int cp;                          /* attention GPUs in a run that hold each sequence between them */
    int attn_nics, ffn_nics; /* disaggregated systems: NICs of one group on each side; NICS_SHARED: each GPU
                                uses its part of its node's, where there are too few for every side */
};
#define NICS_SHARED (-1)

enum expert_input { INPUT_KEEP, INPUT_RESEND };
#define INPUT_CHOICES "keep|resend"
enum precision { PRECISION_FP32, PRECISION_BF16 };
#define PRECISION_CHOICES "fp32|bf16"
/* What is recomputed, by side, in the lowest `layers` of each stage or group (0: in all). */
struct recompute {
    int attention, ffn; /* enum attention_recompute, enum ffn_recompute */
    int layers;
};
struct memory {
    struct recompute recompute;
    int expert_input;
    int grads, moments; /* enum precision */
    int zero;
    int offload; /* optimizer state on the host: 0 or 1. Ints alone, without padding: compared as bytes */
};

/* Keys of memory, or-ed. */
enum memory_key {
    MEMORY_RECOMPUTE = 1,
    MEMORY_EXPERT_INPUT = 2,
    MEMORY_GRADS = 4,
    MEMORY_MOMENTS = 8,
    MEMORY_ZERO = 16,
    MEMORY_OFFLOAD = 32,
    MEMORY_ALL = 63
};

enum prefer { PREFER_BACKWARD, PREFER_FORWARD, PREFER_WAVE, PREFER_COUNT };
#define PREFER_CHOICES "backward|forward|wave"
#define PREFER_OPEN (-1)
/* Parts of AF-Pipe that are off, or-ed; in the order of their words. */
enum without {
    WITHOUT_FUSED_COMBINE = 1, /* combine returns to its own A-group, then one hop to the next */
    WITHOUT_DUPLEX = 2,        /* a group sends or receives, never both at once */
    WITHOUT_INTERLEAVING = 4,  /* what is under way goes all forward, then all backward */
    WITHOUT_WAVES = 8          /* the earlier micro-batch goes first, nothing else counts */
};
#define WITHOUT_CHOICES "fused-combine|duplex|interleaving|waves"
struct order {
    int wave;            /* micro-batches that travel together; 0: to be chosen */
    int waves_in_flight; /* 0: to be chosen */
    int prefer;          /* PREFER_OPEN: to be chosen */
    int patient;         /* whether a lane waits for its most urgent ready operation; FLAG_OPEN */
    int justified;       /* whether the order found is improved by justification; FLAG_OPEN */
    int without;         /* enum without; never searched. Ints alone, without padding: compared as bytes */
};
#define FLAG_OPEN (-1)

enum placement { PLACEMENT_SPLIT, PLACEMENT_MIXED };
#define PLACEMENT_CHOICES "split-nodes|mixed-nodes"

enum head { HEAD_LAST_FFN, HEAD_ALL_FFN };
#define HEAD_CHOICES "last-ffn|all-ffn"

/* Explicit durations in seconds, in place of the cost model. */
struct cost_table {
    double attn_fwd_s, attn_bwd_s, attn_wgrad_s, ffn_fwd_s, ffn_bwd_s, ffn_wgrad_s, dispatch_s, combine_s;
    double p2p_s, embed_fwd_s, embed_bwd_s, head_fwd_s, head_bwd_s;
    double grad_sync_s, param_gather_s, optimizer_s;
    const char *source; /* where they come from, for the reader alone; may be NULL */
};

/* Load of each expert, as its share of all copies; sums to 1. */
struct routing {
    const char *text; /* as the manifest gives it */
    double *share;
};

/* What a real run needs beyond the plan. */
struct training {
    int steps;
    const char *data;    /* "markov" or a text file, from the manifest's folder */
    bool forced_routing; /* experts are chosen by the manifest's routing, not by the router */
    double learning_rate, final_learning_rate;
    int warmup_steps;
    int decay_steps; /* of the cosine; 0: steps */
    double beta1, beta2, epsilon, weight_decay, clip;
};

/* "none", "selective", "full" where one says it all; else NULL. */
const char *recompute_word(struct recompute recompute);

/* ---- points ------------------------------------------------------------------------------------------ */

/* What a sweep sets at a point. */
struct swept {
    const char *path;  /* "cluster.nodes" */
    const char *value; /* JSON text, as the manifest gives it: a path of a model stays a path */
    int number;        /* of the value in its list, from 0 */
};

struct point {
    const char *name; /* of the manifest */
    struct model *model;
    struct cluster *cluster;
    const char **systems;
    int system_count;
    int seq_len, micro_batch_size;
    int global_batch, micro_batches; /* one of them is 0 */
    struct parallel parallel;
    struct memory memory;
    struct order order;
    int placement;
    int head;                         /* of disaggregated systems */
    int memory_given;                 /* enum memory_key: those the manifest gives */
    bool placement_given;             /* whether it does */
    bool auto_memory, auto_placement; /* the manifest says "auto": what is not given is searched even in a
                                         whole layout */
    struct routing routing;
    int seed;
    struct cost_table *table; /* NULL: the cost model */
    struct training training;
    int index;         /* in the experiment; a system's variant has its point's */
    const char *label; /* "seq_len=4096 cluster.nodes=8": the sweep's values here; "" without a sweep */
    const struct swept *swept; /* the same, in the manifest's order; every point has the same paths */
    int swept_count;
    const char *own; /* JSON text of what per_system sets for the one system this is for; NULL: nothing */
    struct point **variants; /* of each of the systems: what it runs, this point itself where per_system sets
                                nothing */
};

struct experiment {
    const char *file;
    struct point *points;
    int point_count;
    const char **files; /* that were read: the manifest, models, clusters */
    int file_count;
    struct arena *arena;
};

struct override {
    const char *path, *value; /* from --set path=value; value is JSON, or else taken as a text */
};
/* Reads a manifest with all it refers to, applies overrides, expands the sweep and per_system. System names
   are checked by the caller, who has the registry. False when errors were added. */
bool experiment_read(const char *file, const struct override *overrides, int override_count,
                     struct experiment *experiment, struct errors *errors);
/* The same from a text that stands for `file`: paths in it are relative to that file's folder. */
bool experiment_read_text(const char *text, const char *file, struct experiment *experiment,
                          struct errors *errors);
void experiment_free(struct experiment *experiment);

/* ---- plans ------------------------------------------------------------------------------------------- */

struct plan {
    const struct point *point;
    struct parallel parallel;
    struct memory memory;
    struct order order;
    int placement;
    int replicas;      /* data-parallel copies of the schedule */
    int gpus;          /* in use by all replicas */
    int micro_batches; /* of one replica */
    double sequences; /* of all replicas in a step that count: global_batch, or what the micro-batches hold */
};

/* Fills replicas, gpus, micro_batches and sequences of a plan whose replica has `replica_gpus` GPUs, of which
   `attention_gpus` take micro_batch_size sequences each (each run of cp of them) per micro-batch. A last
   micro-batch that the global batch does not fill costs as much as a full one. False when the cluster has
   fewer GPUs. */
bool plan_size(struct plan *plan, int replica_gpus, int attention_gpus);
/* The same with a given number of replicas. */
void plan_resize(struct plan *plan, int replicas, int replica_gpus, int attention_gpus);
/* Says what is wrong with cp for that many attention GPUs of a stage or group. */
bool plan_check_cp(const struct plan *plan, int attention_gpus, const char *gpus_key, struct errors *errors);
/* Micro-batches that a searched order allows under way. */
static inline int plan_under_way(const struct plan *plan) {
    int64_t most = (int64_t)plan->order.wave * plan->order.waves_in_flight;
    return most < plan->micro_batches ? (int)most : plan->micro_batches;
}
/* Tokens of a micro-batch on each attention GPU. */
double plan_tokens(const struct plan *plan);

/* `levers` with gradients, moments, ZeRO and offload of `state`. */
static inline struct memory memory_with_state(struct memory levers, struct memory state) {
    state.recompute = levers.recompute;
    state.expert_input = levers.expert_input;
    return state;
}

/* What the layer that is number `index` of its stage or group recomputes. */
struct recompute plan_recompute(const struct plan *plan, int index);

/* GPUs of one side of a worker group, and the NICs it owns (NULL: each GPU its part of its node's). */
struct side {
    const int *gpus;
    int count;
    const int *nics;
    int nic_count;
};
/* The two sides of a worker group and where its combine goes: attention again in a pipelined system. */
struct sides {
    struct side attention, ffn, next;
};

/* A transfer's seconds and the bytes each sending GPU moves. */
struct transfer_cost {
    double seconds, bytes;
};
/* Durations of one layer's operations for one micro-batch on its sides. */
struct layer_cost {
    double attention[PASS_COUNT]; /* backward without the weight pass */
    double ffn[PASS_COUNT];
    double gather[PASS_COUNT]; /* of attention: collectives of context parallelism within it */
    struct transfer_cost dispatch, combine;
};

/* PASS_RECOMPUTE holds what `recompute` repeats. */
struct layer_cost plan_layer_cost(const struct plan *plan, int layer, struct recompute recompute,
                                  struct sides sides);
/* The same without transfers. */
struct layer_cost plan_computation_cost(const struct plan *plan, int layer, struct recompute recompute,
                                        struct sides sides);
struct transfer_cost plan_dispatch_cost(const struct plan *plan, int layer, struct sides sides);
/* A micro-batch's residual stream from one attention side to another of equal size, GPU by GPU. */
struct transfer_cost plan_hop_cost(const struct plan *plan, struct side from, struct side to);
/* The combine of 1/parts of a layer's tokens. */
struct transfer_cost plan_combine_cost(const struct plan *plan, int layer, struct sides sides, int parts);
/* backward: both halves */
double plan_embed_cost(const struct plan *plan, bool backward, double tokens_per_gpu, double slowest);
double plan_head_cost(const struct plan *plan, bool backward, double tokens_per_gpu, double slowest);

/* First expert that GPU number `gpu` of `gpus` holds. Experts in order; where they do not divide, some GPUs
   hold one more. */
static inline int plan_first_expert(int experts, int gpus, int gpu) {
    return (int)((int64_t)experts * gpu / gpus);
}

/* What a GPU holds of the parameters: some are replicated over a set of GPUs that reduce their gradients. */
struct shard {
    double parameters; /* elements on this GPU */
    const int *gpus;   /* that hold the same: gradients are reduced over them */
    int count;
};
/* Parameters, gradients and optimizer state of a GPU that holds these shards, bytes. */
double plan_static_bytes(const struct plan *plan, const struct shard *shards, int count);
/* The step's end on such a GPU: gradient reduction, parameter gathering (ZeRO), optimizer. Seconds. */
struct step_end {
    double grad_sync, param_gather, optimizer;
    double sync_bytes, gather_bytes;
};
struct step_end plan_step_end(const struct plan *plan, const struct shard *shards, int count);

/* Bytes that the busiest GPU keeps of one layer and micro-batch. */
struct layer_memory {
    double layer_input;    /* A: residual stream entering the layer */
    double attention;      /* A: attention's internals kept to the backward pass */
    double gathered;       /* A: keys and values of the whole sequences; 0 without context parallelism */
    double expert_input;   /* F: copies received, permuted */
    double ffn;            /* F: internals kept */
    double full_attention; /* A and F internals while the pass itself runs, or what is recomputed is there */
    double full_ffn;
};
struct layer_memory plan_layer_memory(const struct plan *plan, int layer, struct recompute recompute,
                                      struct sides sides);
/* The same of feed-forward GPU number ffn_gpu of the side, which may have fewer experts or colder ones. */
struct layer_memory plan_gpu_layer_memory(const struct plan *plan, int layer, struct recompute recompute,
                                          struct sides sides, int ffn_gpu);

/* GPU bytes that a plan may use; infinite under a table of costs, where memory is not enforced. */
double plan_usable_memory(const struct point *point);

/* ---- blocks ------------------------------------------------------------------------------------------ */

/* The worker groups (of a schedule) that run one layer: equal in a pipelined system. */
struct place {
    int attention, ffn;
    const int *next; /* the groups that take the combined output, equal parts of the tokens each */
    int next_count;
};

/* What every system repeats for a layer and a micro-batch: attention → dispatch → ffn → combine and its
   backward counterpart, with the operations and activations that the memory levers ask for. */
struct block {
    const struct plan *plan;
    struct recompute recompute; /* of this layer */
    const struct layer_cost *cost;
    const struct transfer_cost *combine; /* (next_count) */
    const struct layer_memory *memory;
    struct place place;
    int layer, micro_batch;
    int forward_first, forward_last;   /* operations first … last − 1 of the forward pass */
    int backward_first, backward_last; /* of the backward pass, recomputation included */
    int ffn_backward;                  /* the feed-forward group's last operation */
    int input_activation, attention_activation, expert_activation, ffn_activation; /* −1: not kept */
    int restored_attention, restored_ffn;                                          /* likewise */
};

/* Adds the forward pass behind `input`, the operation that puts the layer's input on the attention group (−1:
   none). Returns the first of next_count operations, one after the other, that put the output on the next
   groups. */
int block_forward(struct schedule *schedule, struct block *block, int input);
/* Adds the backward pass behind gradients[next_count], the operations that put the output's gradient on the
   next groups. Returns the operation that puts the input's gradient on the attention group. */
int block_backward(struct schedule *schedule, struct block *block, const int *gradients);

/* The point-to-point hop of a layer's output, or backward its gradient, behind `after`; none within a group.
   Returns the operation behind which it is there. */
int plan_add_hop(struct schedule *schedule, enum pass pass, int layer, int micro_batch, int from, int to,
                 struct transfer_cost cost, int after);

/* Head and loss of one of `chunks` parts of a micro-batch's tokens on `group` behind `arrived`. */
int plan_add_head(struct schedule *schedule, int group, int micro_batch, int chunk, int chunks, int arrived,
                  double seconds);
/* The backward pass of a head's forward operation, behind it. input_bytes: the final hidden state on each
 * GPU.
 */
int plan_add_head_backward(struct schedule *schedule, int forward, double seconds, double input_bytes);

/* The step's end of a group: gradient reduction behind `after` (count operations), optimizer, parameter
   gathering. Returns the optimizer's operation. */
int plan_add_step_end(struct schedule *schedule, int group, struct step_end end, const int *after, int count);

/* ---- systems ----------------------------------------------------------------------------------------- */

enum executor { EXECUTOR_SIMULATOR = 1, EXECUTOR_CPU = 2, EXECUTOR_CUDA = 4, EXECUTOR_EMULATION = 8 };

/* What is known of a plan before its schedule is built: used to try good plans first and skip hopeless ones.
 */
struct bound {
    double seconds;        /* no step that fits is shorter; the step's end is left out */
    double busy;           /* the same by what its lanes have to do, whatever moments, zero and offload */
    double memory_seconds; /* the same by the memory that each micro-batch takes, and for how long */
    double bytes; /* no GPU of the busiest group holds less: static bytes and what any order must keep */
};

/* What a group's GPU holds all step long, what ends its step, what a micro-batch keeps on it between its
   passes in all of the group's layers, and what one layer's backward pass takes beside that. */
struct need {
    double static_bytes;
    struct step_end end;
    double kept_bytes, backward_bytes;
};

struct system {
    const char *name;  /* "megatron" */
    const char *title; /* what it is, one line */
    const char *paper;
    unsigned executors; /* enum executor, or-ed */
    bool searches_order, uses_placement;
    int zero_max; /* highest ZeRO stage it models */
    /* Whether the layout is given whole: then nothing of it is searched. */
    bool (*is_whole)(const struct parallel *given);
    /* The layouts open to it where the point leaves zeros; writes at most capacity, returns how many there
     * are. */
    int (*layouts)(const struct point *point, struct parallel *layouts, int capacity);
    /* Fills the plan's sizes for its layout and says what is impossible about it, errors naming the
       manifest's keys. Parts that are 0 count as 1. */
    bool (*size)(struct plan *plan, struct errors *errors);
    /* Fills what is computed and not searched. NULL: nothing is. Behind size; errors as there. */
    bool (*settle)(struct plan *plan, struct errors *errors);
    /* Of a system whose groups have GPUs for attention and others for the feed-forward part: the two sides of
       one group of a settled plan, and the next group's attention, in the arena. NULL: each GPU does both. */
    struct sides (*sides)(const struct plan *plan, int group, struct arena *arena);
    /* A bound that needs nothing settled; NULL: there is none. */
    struct bound (*outline)(const struct plan *plan);
    /* Groups of the schedule. */
    int (*groups)(const struct plan *plan);
    /* needs (count, groups): of each group, in the schedule's order, with each of the `count` states of
       gradients, moments, ZeRO and offload in place of the plan's. Returns the plan's bound. */
    struct bound (*needs)(const struct plan *plan, const struct memory *states, int count,
                          struct need *needs);
    struct schedule *(*build)(const struct plan *plan);
};

static inline struct bound plan_bound(const struct system *system, const struct plan *plan) {
    return system->needs(plan, NULL, 0, NULL);
}

#endif
