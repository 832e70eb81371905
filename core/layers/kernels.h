/*
The mathematics of a training step: layers, forward and backward, on plain arrays.

Concepts
- floatX is float, or double when built with FLOATX_DOUBLE (for proofs). Loss sums are always double.
- All arrays are row-major and belong to the caller. A row is one token (T of them, sequences of S tokens, or
this GPU's part of each, one after another), or one copy of a token at an expert (R of them, grouped by
expert).
- Weight matrices are (out, in), as HuggingFace stores them: y = x Wᵀ + b.
- The backward pass is split. *_backward_input gives the gradient of the layer's input; *_backward_weight
gives the gradients of its matrices and biases. Gradients of small vectors that come for free with the input's
  (norms, sinks) belong to the input half. Gradients of parameters are added to, never overwritten.
- Nothing here knows of ranks or schedules. What GPUs that share sequences have to tell each other is an array
between two functions, filled by whoever calls them. Sums run in a fixed order, so results do not depend on
timing. How a product is cut among workers depends on their number, which may change the last bit.
*/
#ifndef LAYERS_KERNELS_H
#define LAYERS_KERNELS_H

#include "base/base.h"
#include "model/model.h"

#include <string.h>

#ifdef FLOATX_DOUBLE
typedef double floatX;
#else
typedef float floatX;
#endif

/* ---- context: threads and scratch memory ------------------------------------------------------------- */

struct workers;
/* threads − 1 threads that wait for work; the caller is the last one. OpenBLAS itself is set to one thread:
   products are cut here, so that several ranks' threads may multiply at once. */
struct workers *workers_new(int threads);
void workers_free(struct workers *workers); /* NULL is allowed */
/* Calls task(context, i) for i = 0 … count − 1, each once, in any order; returns when all are done. */
void workers_run(struct workers *workers, int count, void (*task)(void *context, int i), void *context);

/* What a thread that calls layers needs. Zero-initialise; workers NULL: everything on the calling thread. One
   context serves one thread at a time. */
struct context {
    struct workers *workers;
    struct scratch_block *scratch; /* a stack of blocks, the last one first */
    size_t scratch_bytes, scratch_peak;
};
int context_threads(const struct context *context);
/* Memory until the matching scratch_release; not zeroed; 64-byte aligned. */
void *scratch_take(struct context *context, size_t bytes);
floatX *scratch_floats(struct context *context, size_t count);
void scratch_release(struct context *context, void *since); /* since and all taken after it */
void context_free(struct context *context);                 /* its scratch, not its workers */

/* ---- sequences --------------------------------------------------------------------------------------- */

/* The sequences of a micro-batch, and which part of each a GPU holds. A run of cp GPUs holds every sequence
   as 2·cp equal pieces in order of position (cp 1: as one), of which GPU number `index` has numbers index and
   2·cp − 1 − index, so that under a causal mask all have as much to do (Llama 3, Dubey et al. 2024,
   section 3.3.2). On a GPU a sequence's rows are its pieces there, one after the other. */
struct sequences {
    int count, seq_len, cp, index;
};
struct sequence_piece {
    int number;    /* among the sequence's pieces */
    int row, rows; /* where its rows begin among the GPU's rows of the sequence; how many there are */
    int position;  /* of its first token in the sequence */
};
static inline struct sequences whole_sequences(int count, int seq_len) {
    return (struct sequences){count, seq_len, 1, 0};
}
static inline int pieces_of_sequence(struct sequences s) {
    return s.cp > 1 ? 2 * s.cp : 1;
}
static inline int pieces_here(struct sequences s) {
    return s.cp > 1 ? 2 : 1;
}
static inline struct sequence_piece piece_here(struct sequences s, int i) {
    int rows = s.seq_len / pieces_of_sequence(s), number = i ? 2 * s.cp - 1 - s.index : s.index;
    return (struct sequence_piece){number, i * rows, rows, number * rows};
}
/* Rows of one sequence; of all. */
static inline int rows_of_sequence(struct sequences s) {
    return s.seq_len / s.cp;
}
static inline int rows_of_all(struct sequences s) {
    return s.count * rows_of_sequence(s);
}
/* In its sequence, of one of the sequence's rows. */
static inline int position_of_row(struct sequences s, int row) {
    struct sequence_piece piece = piece_here(s, row >= s.seq_len / pieces_of_sequence(s));
    return piece.position + row - piece.row;
}

/* ---- linear ------------------------------------------------------------------------------------------ */

/* Rows of several experts, one after another: counts[g] rows use weights[g]. A count of 0 is allowed. */
struct groups {
    int count;
    const int *rows;        /* (count) */
    floatX *const *weights; /* (count) each (out, in) */
    floatX *const *biases;  /* (count) each (out), or NULL */
};
/* y (R, out) = x (R, in) Wᵀ + b */
void grouped_linear_forward(struct context *context, const struct groups *groups, floatX *y, const floatX *x,
                            int in, int out);
/* dx (R, in) = dy (R, out) W */
void grouped_linear_backward_input(struct context *context, const struct groups *groups, floatX *dx,
                                   const floatX *dy, int in, int out);
/* dW (out, in) += dyᵀ x, db (out) += sum of dy's rows; groups holds gradients in place of weights */
void grouped_linear_backward_weight(struct context *context, const struct groups *gradients, const floatX *dy,
                                    const floatX *x, int in, int out);

/* The same for one matrix. bias and dbias may be NULL. */
void linear_forward(struct context *context, floatX *y, const floatX *x, const floatX *weight,
                    const floatX *bias, int rows, int in, int out);
void linear_backward_input(struct context *context, floatX *dx, const floatX *dy, const floatX *weight,
                           int rows, int in, int out);
void linear_backward_weight(struct context *context, floatX *dweight, floatX *dbias, const floatX *dy,
                            const floatX *x, int rows, int in, int out);

/* ---- widths ------------------------------------------------------------------------------------------ */

/* Columns of all queries; of what RoPE turns, queries and keys; of queries, keys and values. */
static inline int query_width(const struct model *model) {
    return model->attention.heads * model->attention.head_dim;
}
static inline int rotated_width(const struct model *model) {
    return query_width(model) + model->attention.kv_heads * model->attention.head_dim;
}
static inline int qkv_width(const struct model *model) {
    return rotated_width(model) + model->attention.kv_heads * model->attention.head_dim;
}
static inline int key_width(const struct model *model) { /* of keys, or of values */
    return model->attention.kv_heads * model->attention.head_dim;
}
static inline int gathered_width(const struct model *model) { /* keys and values side by side */
    return 2 * key_width(model);
}
/* Of rows of rotated queries and keys: of their own with QK-norm, else where they were projected. */
static inline int rotated_stride(const struct model *model) {
    return model->attention.qk_norm ? rotated_width(model) : qkv_width(model);
}
/* Of the part that every token passes: shared experts side by side, or the dense FFN. */
static inline int shared_width(const struct model *model, int layer) {
    return model_layer_is_moe(model, layer) ? model->moe.shared_experts * model->moe.expert_hidden
                                            : model->moe.dense_hidden;
}

/* ---- element-wise ------------------------------------------------------------------------------------ */

void vector_add(struct context *context, floatX *y, const floatX *x, size_t count); /* y += x */
floatX vector_dot(const floatX *a, const floatX *b, int count);

/* ---- embedding --------------------------------------------------------------------------------------- */

/* y (T, H) = rows of table (V, H) */
void embedding_forward(struct context *context, floatX *y, const floatX *table, const int *ids, int tokens,
                       int hidden);
/* dtable (V, H) += dy (T, H), scattered */
void embedding_backward(struct context *context, floatX *dtable, const floatX *dy, const int *ids, int tokens,
                        int hidden);

/* ---- RMSNorm ----------------------------------------------------------------------------------------- */

/* y (rows, width) = x / sqrt(mean(x²) + eps) · weight (width) */
void rmsnorm_forward(struct context *context, floatX *y, const floatX *x, const floatX *weight, int rows,
                     int width, double eps);
/* dx (rows, width) = gradient (+ dx when add), dweight (width) += ... (NULL: not wanted). dx may be dy when
   not add. The statistics are computed anew from x. */
void rmsnorm_backward(struct context *context, floatX *dx, floatX *dweight, const floatX *dy, const floatX *x,
                      const floatX *weight, int rows, int width, double eps, bool add);

/* ---- attention --------------------------------------------------------------------------------------- */

struct attention_shape {
    struct sequences sequences;
    int heads, kv_heads, head_dim;
    int window; /* keys a query sees, itself included; 0: all before it */
};
/* cosines and sines (S, head_dim / 2) of position p and frequency theta^(−2 i / head_dim). */
struct rope {
    floatX *cosine, *sine;
};
struct rope rope_new(struct arena *arena, int seq_len, int head_dim, double theta);

/* qk (T, (heads + kv_heads) · head_dim), row stride qk_stride, from qkv of row stride qkv_stride: each head's
   query and key normalised (when q_norm is not NULL), then rotated in halves, as HuggingFace does. May run in
   place. */
void rotate_forward(struct context *context, const struct attention_shape *shape, const struct rope *rope,
                    floatX *qk, int qk_stride, const floatX *qkv, int qkv_stride, const floatX *q_norm,
                    const floatX *k_norm, double eps);
/* In place on dqkv: gradient of the rotated queries and keys → of the raw ones. qkv: the raw ones, read only
   with norms. dq_norm, dk_norm (head_dim) are added to. */
void rotate_backward(struct context *context, const struct attention_shape *shape, const struct rope *rope,
                     floatX *dqkv, int dqkv_stride, const floatX *qkv, int qkv_stride, const floatX *q_norm,
                     const floatX *k_norm, floatX *dq_norm, floatX *dk_norm, double eps);

/* Rotated queries (T, heads · head_dim); keys and values (sequences · S, kv_heads · head_dim) of whole
   sequences in order of position, which for cp 1 are those of the same rows. Each with its row stride. */
struct attention_inputs {
    const floatX *q, *k, *v;
    int q_stride, k_stride, v_stride;
    const floatX *sinks; /* (heads) or NULL: a logit that takes part in the softmax and has no value */
};
/* out (T, heads · head_dim), lse (T, heads): the logarithm of each softmax's denominator. Tile by tile with a
   running maximum (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022): memory linear in S. */
void attention_forward(struct context *context, const struct attention_shape *shape, floatX *out, floatX *lse,
                       const struct attention_inputs *inputs);
/* Of the same shapes, overwritten: keys and values of whole sequences get what these rows' queries give them;
   sinks (heads) are added to, or NULL. */
struct attention_gradients {
    floatX *q, *k, *v;
    int q_stride, kv_stride;
    floatX *sinks;
};
/* The scores are computed anew. */
void attention_backward(struct context *context, const struct attention_shape *shape,
                        const struct attention_gradients *gradients, const floatX *dout, const floatX *out,
                        const floatX *lse, const struct attention_inputs *inputs);

/* ---- router ------------------------------------------------------------------------------------------ */

/* What the router decided for T tokens; the caller's arrays. */
struct route {
    floatX *logits;      /* (T, E), with the noise of noisy top-k */
    int *ids;            /* (T, K) chosen experts, largest logit first; the lower index wins a tie. Distinct
                            and valid whatever the logits, NaN too */
    floatX *weights;     /* (T, K) 0 where dropped */
    unsigned char *kept; /* (T, K) 0: dropped, over the expert's capacity */
    int *chosen;         /* (sequences, E) how often each whole sequence chose it, dropped copies too */
};
/* Where the tokens stand in the batch, so that noise is the same whatever rank computes it. */
struct route_key {
    uint64_t seed;
    int64_t step;
    int layer;
    int64_t first_token; /* global index of the first sequence's first token */
};
/* Noisy top-k (Shazeer et al. 2017, eq. 4): logits += ε · softplus(noise), ε normal, keyed by token. */
void noise_forward(struct context *context, floatX *logits, const floatX *noise, struct route_key key,
                   struct sequences sequences, int experts);
/* dnoise (T, E) from dlogits (T, E) */
void noise_backward(struct context *context, floatX *dnoise, const floatX *dlogits, const floatX *noise,
                    struct route_key key, struct sequences sequences, int experts);
/* A choice of experts that does not depend on logits, for measurements whose load must be known
   (Megatron-Core has one that is uniform and random). Weights, losses and gradients stay those of the logits,
   so only the choice itself is not learned. */
struct forced_routing {
    int seq_len;
    int *ids; /* (S, K) of a sequence's positions in layer 0; layer l starts l positions on */
};
/* In every sequence each expert gets share[e] (E) of all copies, rounded to a whole number of them, by
   systematic sampling (Madow 1949): a token's K experts are distinct, and K times a share above 1 counts as
   1, an expert taking a token once at most, with the rest spread over the others in proportion. Nothing is
   sent to an expert whose share is 0, unless fewer than K have one: then the rest is spread evenly. Shares
   must not be negative; they need not sum to 1. First choices, and any stretch of a sequence, have nearly the
   same shares. */
struct forced_routing *forced_routing_new(struct arena *arena, const struct model *model, const double *share,
                                          int seq_len);
/* Routing in three steps, since two things are of a whole sequence (so that they do not depend on
   micro-batches or ranks), the balance loss and capacity: an expert takes at most model_expert_capacity
   copies of a sequence, first choices before second ones, earlier tokens before later ones. choose: ids and
   weights from route->logits; ids from `forced`, for this layer, unless it is NULL. count: how often each of
   this GPU's pieces chose each expert as its k-th, into its places of choices (sequences, pieces of a
   sequence, K, E), the others left alone. settle: chosen and kept from the choices of all pieces; the weights
   of what is dropped become 0. */
void route_choose(struct context *context, const struct model *model, struct route *route,
                  const struct forced_routing *forced, int layer, struct sequences sequences);
void route_count(const struct model *model, int *choices, const struct route *route,
                 struct sequences sequences);
void route_settle(const struct model *model, struct route *route, const int *choices,
                  struct sequences sequences);
/* All three, of whole sequences. */
void route_forward(struct context *context, const struct model *model, struct route *route,
                   const struct forced_routing *forced, int layer, struct sequences sequences);
/* dlogits (T, E), overwritten, from dweights (T, K) and the two auxiliary losses, which count aux_scale and
   z_scale times their sums below. */
void route_backward(struct context *context, const struct model *model, floatX *dlogits,
                    const floatX *dweights, const struct route *route, struct sequences sequences,
                    double aux_scale, double z_scale);
/* Sums over sequences and tokens, not yet scaled; of the rows here.
   aux: Σ over sequences of E · Σₑ fₑ Pₑ, with fₑ the sequence's copies chosen for e ÷ S and Pₑ the mean of
   the softmax over all experts (Switch, Fedus et al. 2021, eq. 4; scaled as HuggingFace does: K when
   balanced). Per sequence, so that it is the same for every layout and number of micro-batches. Dropped
   copies count. z: Σ over tokens of (log Σ exp logits)² (ST-MoE, Zoph et al. 2022, eq. 5). */
struct route_losses {
    double aux, z;
};
struct route_losses route_losses(const struct model *model, const struct route *route,
                                 struct sequences sequences);
/* The step's loss adds aux_loss · mean over sequences and MoE layers, z_loss · mean over tokens and MoE
 * layers. */
double route_aux_scale(const struct model *model, int64_t batch_sequences);
double route_z_scale(const struct model *model, int64_t batch_tokens);
/* Smallest gap between a token's last chosen logit and the best one left out: below the precision, two
   correct programs may choose differently. Infinite when K = E. Of a choice that is not forced. */
double route_margin(const struct model *model, const struct route *route, int tokens);

/* ---- experts ----------------------------------------------------------------------------------------- */

/* act (rows, D) from gate_up (rows, 2 D), gate first: silu(gate) · up, or GPT-OSS's clamped form
   (up + 1) · gate · sigmoid(1.702 gate) with gate ≤ 7 and −7 ≤ up ≤ 7. */
void activation_forward(struct context *context, floatX *act, const floatX *gate_up, int rows, int width,
                        enum activation_function kind);
/* dgate_up (rows, 2 D), overwritten; may be gate_up itself. */
void activation_backward(struct context *context, floatX *dgate_up, const floatX *dact, const floatX *gate_up,
                         int rows, int width, enum activation_function kind);

/* Copies grouped by expert. order lists, expert by expert, the copies t · K + k that were kept. */
struct permutation {
    int *order;  /* (copies) */
    int *counts; /* (E) */
    int copies;
};
struct permutation permutation_new(struct context *context, const struct route *route, int tokens, int top_k,
                                   int experts); /* arrays in scratch */

/* ---- output head ------------------------------------------------------------------------------------- */

/* Cross-entropy of x (T, H) Wᵀ against targets (T), W (V, H): Σ of losses. Logits live for a chunk of tokens
   only. */
double head_forward(struct context *context, const floatX *x, const floatX *weight, const int *targets,
                    int tokens, int hidden, int vocab);
/* The same with dx (T, H), overwritten, and dweight (V, H), added to, of scale · Σ of losses: a chunk's
   logits are made once for all three. */
double head_forward_backward(struct context *context, floatX *dx, floatX *dweight, const floatX *x,
                             const floatX *weight, const int *targets, int tokens, int hidden, int vocab,
                             double scale);
/* logits (T, V), for inspection only */
void head_logits(struct context *context, floatX *logits, const floatX *x, const floatX *weight, int tokens,
                 int hidden, int vocab);

/* ---- optimizer --------------------------------------------------------------------------------------- */

struct optimizer {
    double learning_rate, final_learning_rate;
    int64_t warmup_steps, steps; /* linear warm-up, then a cosine down to the final rate at `steps` */
    double beta1, beta2, epsilon, weight_decay;
    double clip; /* largest norm of the whole gradient; 0: none */
};
struct optimizer optimizer_default(void);
double optimizer_rate(const struct optimizer *optimizer, int64_t step); /* step counts from 0 */
double sum_of_squares(const floatX *x, size_t count);                   /* in double, fixed order */
/* What to multiply gradients by so that their norm is at most clip. */
double clip_scale(const struct optimizer *optimizer, double squares);
/* One AdamW step (Loshchilov & Hutter 2019) of parameters whose gradient is scale · gradients; decay: whether
   weight decay applies. */
void adamw(struct context *context, const struct optimizer *optimizer, int64_t step, double scale, bool decay,
           floatX *values, const floatX *gradients, floatX *moment1, floatX *moment2, size_t count);
/* The same with both moments in BF16, rounded stochastically so that small updates are not lost. The rounding
   is keyed by element: first is the index of the first one in its tensor, so that a slice rounds as the whole
   does. key: any number that differs between steps and parameters. */
void adamw_bf16(struct context *context, const struct optimizer *optimizer, int64_t step, double scale,
                bool decay, floatX *values, const floatX *gradients, uint16_t *moment1, uint16_t *moment2,
                size_t count, size_t first, uint64_t key);
/* sums += addends, in BF16 rounded stochastically: up with the probability of the part cut off, so that the
   sum of many small numbers is right on average, where rounding to nearest would come to a halt as soon as
   one is below half of the sum's last bit. Keyed by element as above; key: differs between additions. */
void add_bf16(struct context *context, uint16_t *sums, const floatX *addends, size_t count, size_t first,
              uint64_t key);
static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
/* To nearest, ties to even; a NaN stays one. */
static inline uint16_t bf16_from_float(float value) {
    uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

#endif
