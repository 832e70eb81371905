/*
A layer in two halves that may run on different ranks: the attention block and the expert block.

Concepts
- The attention block turns a micro-batch's residual stream x (T, H) into the stream after attention, `middle`
(T, H), and a route: which expert takes a copy of which row, with which weight.
- A copy of a row of `middle` travels to its expert's rank un-normalised. The expert block normalises every
copy itself, and returns weight · expert(norm(row)). Of a token's copies one is the first: to it the residual
row and the shared experts' output are added. The layer's output is the sum of a token's copies, made by
whoever receives them.
- Or no copy that travels is the first, and each token's own rank has a second, local expert block without
routed experts, whose rows are its tokens, all of them first: residual and shared experts then need no
communication.
- Backward, the expert block gets the gradient of the layer's output for each copy, and returns each copy's
gradient of its row and of its weight; the attention block gets their sums. Normalising each copy is exact:
RMSNorm's backward is linear in the gradient. The norm's own gradient is thus in two parts, the router's and
the copies', to be summed by whoever reduces gradients.
- What a block keeps between passes is a structure placed in memory the caller provides, of exactly the size
the functions here say. At recompute level none all is kept; selective drops normalised inputs and outputs of
activations; full keeps nothing: run forward again into other memory before the backward pass. What selective
dropped is made anew within the backward pass, or by *_restore ahead of it; then the backward functions run as
at level none.
- The input half of the backward pass leaves in `pending` what the weight half needs. kept and pending live
until the weight half is done; the input half may overwrite parts of kept.
*/
#ifndef LAYERS_BLOCKS_H
#define LAYERS_BLOCKS_H

#include "layers/parameters.h"

/* ---- attention block --------------------------------------------------------------------------------- */

struct attention_block {
    const struct model *model;
    int layer;
    const struct rope *rope;
    struct attention_tensors weights, gradients;
};
/* One micro-batch on one rank. */
struct attention_part {
    int sequences, seq_len;
    struct route_key key;                /* layer is taken from the block */
    double aux_scale, z_scale;           /* of the whole batch: route_aux_scale, route_z_scale */
    const struct forced_routing *forced; /* NULL: the router chooses */
};
struct attention_kept {
    floatX *normed, *ffn_normed; /* (T, H); NULL when selective, the second also in dense layers */
    floatX *qkv;                 /* (T, (heads + 2 kv_heads) head_dim) */
    floatX *qk; /* (T, (heads + kv_heads) head_dim); without QK-norm it is qkv, rotated in place */
    floatX *attended, *lse; /* (T, heads head_dim), (T, heads) */
    floatX *middle;         /* (T, H) */
    floatX *noise;          /* (T, E) of noisy top-k, else NULL */
    struct route route;     /* NULL in dense layers */
};
struct attention_pending {
    floatX *dmiddle; /* (T, H) */
    floatX *dqkv;    /* as qkv */
    floatX *dlogits; /* (T, E); NULL in dense layers */
    floatX *dnoise;  /* (T, E) of noisy top-k, else NULL */
};
/* Bytes, a multiple of 64, for recompute none or selective. Memory must be 64-byte aligned. */
size_t attention_kept_bytes(const struct model *model, int layer, enum attention_recompute recompute,
                            int tokens);
size_t attention_pending_bytes(const struct model *model, int layer, int tokens);
struct attention_kept attention_kept_place(const struct model *model, int layer,
                                           enum attention_recompute recompute, int tokens, void *memory);
struct attention_pending attention_pending_place(const struct model *model, int layer, int tokens,
                                                 void *memory);

/* Fills kept, from which middle and route are read. input (T, H) */
void attention_block_forward(struct context *context, const struct attention_block *block,
                             const struct attention_part *part, struct attention_kept *kept,
                             const floatX *input);
/* Puts what selective dropped into memory, of attention_restored_bytes, and fills it. */
size_t attention_restored_bytes(const struct model *model, int layer, int tokens);
void attention_block_restore(struct context *context, const struct attention_block *block,
                             struct attention_kept *kept, const floatX *input, int tokens, void *memory);
/* dinput (T, H) from dmiddle (T, H), the sum over a token's copies, and dweights (T, K) (NULL in dense
   layers). Sums of small vectors' gradients go to block->gradients. */
void attention_block_backward_input(struct context *context, const struct attention_block *block,
                                    const struct attention_part *part, struct attention_kept *kept,
                                    struct attention_pending *pending, floatX *dinput, const floatX *dmiddle,
                                    const floatX *dweights, const floatX *input);
void attention_block_backward_weight(struct context *context, const struct attention_block *block,
                                     const struct attention_part *part, const struct attention_kept *kept,
                                     const struct attention_pending *pending, const floatX *input);

/* ---- expert block ------------------------------------------------------------------------------------ */

struct expert_block {
    const struct model *model;
    int layer;
    int experts; /* routed experts here; 0 in dense layers and local blocks, which have no `weights` */
    floatX *ffn_norm, *ffn_norm_gradient;
    struct expert_tensors weights, gradients;
    struct ffn_tensors shared, shared_gradients; /* NULL pointers where there are none */
};
/* The copies of one micro-batch: counts[e] rows of expert e, expert after expert; then, up to `rows`, rows
   without an expert: all of a dense layer's or a local block's, and tokens whose copies were all dropped. */
struct expert_part {
    int rows;                   /* may be 0 */
    const int *counts;          /* (experts) */
    const floatX *weights;      /* (rows), of those with an expert; NULL where no row has one */
    const unsigned char *first; /* (rows) whether the row is its token's first copy */
};
struct expert_kept {
    floatX *gate_up, *act;               /* (routed, 2 D), (routed, D); act NULL when selective */
    floatX *shared_gate_up, *shared_act; /* (firsts, 2 D'), (firsts, D'); likewise */
};
struct expert_pending {
    floatX *d;          /* (routed, H) gradient of the expert's own output */
    floatX *act;        /* (routed, D) when selective, else NULL */
    floatX *shared_d;   /* (firsts, H) */
    floatX *shared_act; /* (firsts, D') when selective, else NULL */
};
/* As for attention. routed: rows with an expert; firsts: first copies, which count only where the layer has
   shared experts or is dense. */
size_t expert_kept_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                         int firsts);
size_t expert_pending_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                            int firsts);
struct expert_kept expert_kept_place(const struct model *model, int layer, enum ffn_recompute recompute,
                                     int routed, int firsts, void *memory);
struct expert_pending expert_pending_place(const struct model *model, int layer, enum ffn_recompute recompute,
                                           int routed, int firsts, void *memory);

/* output (rows, H) from input (rows, H), rows of `middle` */
void expert_block_forward(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, struct expert_kept *kept, floatX *output,
                          const floatX *input);
/* Puts what selective dropped into memory, of expert_restored_bytes, and fills it. Then pending is one of
   FFN_NONE. */
size_t expert_restored_bytes(const struct model *model, int layer, int routed, int firsts);
void expert_block_restore(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, struct expert_kept *kept, void *memory);
/* dinput (rows, H), dweights (rows; 0 without an expert) from doutput (rows, H). dinput may not be doutput.
   dweights may be NULL where no row has an expert. */
void expert_block_backward_input(struct context *context, const struct expert_block *block,
                                 const struct expert_part *part, struct expert_kept *kept,
                                 struct expert_pending *pending, floatX *dinput, floatX *dweights,
                                 const floatX *doutput, const floatX *input);
void expert_block_backward_weight(struct context *context, const struct expert_block *block,
                                  const struct expert_part *part, const struct expert_kept *kept,
                                  const struct expert_pending *pending, const floatX *input);

/* ---- head -------------------------------------------------------------------------------------------- */

/* Final norm and cross-entropy. The head's input (T, H) is all that is kept. */
struct head_block {
    const struct model *model;
    floatX *norm, *norm_gradient, *output, *output_gradient;
};
/* Σ of the tokens' losses, and dinput (T, H) and the parameters' gradients of scale times that sum. */
double head_block_forward_backward(struct context *context, const struct head_block *block, floatX *dinput,
                                   const floatX *input, const int *targets, int tokens, double scale);

#endif
