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
- What a block makes in its forward pass and needs in its backward pass is a structure in two pieces of memory
of the caller's, each of exactly the size that the functions here say: what stays between the passes, and what
the recompute level drops. The second is there during the forward pass, then, other memory, from *_restore on
(or from forward run again, at attention's level full) to the end of the backward pass: place the structure
anew when it has changed.
- GPUs that hold sequences between them (struct sequences) run the attention block together, and meet in its
collectives; the expert block knows nothing of it.
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
/* What GPUs of a run do together, by functions of whoever runs the block; all of a run call them in the same
   order. An array of pieces has those of each sequence in order of position, whichever GPU's they are. */
struct collectives {
    /* pieces (sequences, 2·cp) of `bytes` each: this GPU's are filled in, and afterwards all are. */
    void (*gather)(void *owner, void *pieces, int sequences, size_t bytes);
    /* pieces (sequences, 2·cp) of `count` elements each: this GPU's become sums over the run, the others are
       lost. */
    void (*scatter)(void *owner, floatX *pieces, int sequences, size_t count);
    void *owner;
};
/* One micro-batch on one rank. */
struct attention_part {
    struct sequences sequences;
    struct route_key key;                /* layer is taken from the block */
    double aux_scale, z_scale;           /* of the whole batch: route_aux_scale, route_z_scale */
    const struct forced_routing *forced; /* NULL: the router chooses */
    /* With cp above 1; and memory for keys and values of whole sequences, attention_gathered_bytes of it, in
       the backward pass twice that, for their gradients too. Nothing stays in it. */
    const struct collectives *collectives;
    floatX *gathered;
};
struct attention_kept {
    floatX *normed, *ffn_normed; /* (T, H); the second NULL in dense layers */
    floatX *qkv;                 /* (T, (heads + 2 kv_heads) head_dim) */
    floatX *qk; /* (T, (heads + kv_heads) head_dim); without QK-norm it is qkv, rotated in place */
    floatX *attended, *lse; /* (T, heads head_dim), (T, heads) */
    floatX *middle;         /* (T, H) */
    floatX *noise;          /* (T, E) of noisy top-k, else NULL */
    struct route route;     /* NULL in dense layers; `chosen` is not placed, but set by the caller */
};
struct attention_pending {
    floatX *dmiddle; /* (T, H) */
    floatX *dqkv;    /* as qkv */
    floatX *dlogits; /* (T, E); NULL in dense layers */
    floatX *dnoise;  /* (T, E) of noisy top-k, else NULL */
};
/* Bytes, a multiple of 64: of what stays, and of what is dropped and restored. Memory must be 64-byte
   aligned; that of 0 bytes may be NULL. */
size_t attention_kept_bytes(const struct model *model, int layer, enum attention_recompute recompute,
                            int tokens);
size_t attention_restored_bytes(const struct model *model, int layer, enum attention_recompute recompute,
                                int tokens);
size_t attention_gathered_bytes(const struct model *model, struct sequences sequences);
size_t attention_pending_bytes(const struct model *model, int layer, int tokens);
struct attention_kept attention_kept_place(const struct model *model, int layer,
                                           enum attention_recompute recompute, int tokens, void *kept,
                                           void *restored);
struct attention_pending attention_pending_place(const struct model *model, int layer, int tokens,
                                                 void *memory);

/* Fills kept, from which middle and route are read. input (T, H) */
void attention_block_forward(struct context *context, const struct attention_block *block,
                             const struct attention_part *part, struct attention_kept *kept,
                             const floatX *input);
/* Makes what norms or projections dropped again, from the layer's input and what stayed. */
void attention_block_restore(struct context *context, const struct attention_block *block,
                             const struct attention_part *part, enum attention_recompute recompute,
                             struct attention_kept *kept, const floatX *input);
/* dinput (T, H) from dmiddle (T, H), the sum over a token's copies, and dweights (T, K) (NULL in dense
   layers). Sums of small vectors' gradients go to block->gradients. */
void attention_block_backward_input(struct context *context, const struct attention_block *block,
                                    const struct attention_part *part, struct attention_kept *kept,
                                    struct attention_pending *pending, floatX *dinput, const floatX *dmiddle,
                                    const floatX *dweights, const floatX *input);
void attention_block_backward_weight(struct context *context, const struct attention_block *block,
                                     const struct attention_part *part, const struct attention_kept *kept,
                                     const struct attention_pending *pending);

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
    floatX *normed;        /* (firsts, H) of a dense layer; else NULL, copies are normalised anew */
    floatX *gate_up, *act; /* (routed, 2 D), (routed, D) */
    floatX *shared_gate_up, *shared_act; /* (firsts, 2 D'), (firsts, D') */
};
struct expert_pending {
    floatX *d;        /* (routed, H) gradient of the expert's own output */
    floatX *shared_d; /* (firsts, H) */
};
/* As for attention. routed: rows with an expert; firsts: first copies, which count only where the layer has
   shared experts or is dense (then all rows are first ones). */
size_t expert_kept_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                         int firsts);
size_t expert_restored_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                             int firsts);
size_t expert_pending_bytes(const struct model *model, int layer, int routed, int firsts);
struct expert_kept expert_kept_place(const struct model *model, int layer, enum ffn_recompute recompute,
                                     int routed, int firsts, void *kept, void *restored);
struct expert_pending expert_pending_place(const struct model *model, int layer, int routed, int firsts,
                                           void *memory);

/* output (rows, H) from input (rows, H), rows of `middle` */
void expert_block_forward(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, struct expert_kept *kept, floatX *output,
                          const floatX *input);
/* Makes what was dropped again, from the block's input and what stayed; the output is not. */
void expert_block_restore(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, enum ffn_recompute recompute,
                          struct expert_kept *kept, const floatX *input);
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
