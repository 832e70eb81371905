/*
A model's description, and what it costs to hold and to run: parameters, FLOPs, bytes.

Concepts
- A layer has two components: attention (norms, projections, core attention) and the feed-forward part, which
is either a mixture of experts (router, routed experts, shared experts) or, in leading dense layers, one dense
  SwiGLU.
- A pass is forward, backward-input or backward-weight: the last two together are the backward pass.
- A copy is one token at one of its top-k experts. A dense layer has one copy per token.
- Counts are exact for the architecture: causal attention counts s(s + 1)/2 pairs a head, a window w counts
  min(position, w). A multiply-add is 2 FLOPs.
- Everything is per sequence, per token or per copy as its comment says; nothing here knows of GPUs.
*/
#ifndef MODEL_H
#define MODEL_H

#include "base/base.h"

/* The largest values that a manifest may hold, so that every count stays far from overflow. */
#define MODEL_MOST_LAYERS 10000
#define MODEL_MOST_WIDTH (1 << 24)
#define MODEL_MOST_VOCAB (1 << 28)
#define MODEL_MOST_SHARED_EXPERTS 1024
#define MODEL_MOST_THETA 1e15

enum router { ROUTER_SOFTMAX_TOPK, ROUTER_TOPK_SOFTMAX, ROUTER_NOISY_TOPK };
#define ROUTER_CHOICES "softmax_topk|topk_softmax|noisy_topk"
enum activation_function { ACTIVATION_SWIGLU, ACTIVATION_SWIGLU_CLAMPED };
#define ACTIVATION_CHOICES "swiglu|swiglu_clamped"
enum window_layers { WINDOW_NONE, WINDOW_ALL, WINDOW_EVEN, WINDOW_ODD }; /* even: layers 0, 2, 4, … */
#define WINDOW_CHOICES "none|all|even|odd"

enum dtype { DTYPE_BF16, DTYPE_FP32, DTYPE_FP64 };
#define DTYPE_CHOICES "bf16|fp32|fp64"

struct model {
    const char *name;
    const char *source;
    int dtype; /* of weights, activations and messages */
    int layers, hidden, vocab;
    double norm_eps;
    bool tie_embeddings;
    struct {
        int heads, kv_heads, head_dim;
        double rope_theta;
        bool qk_norm; /* RMSNorm of each head's query and key */
        bool bias;    /* on the four projections */
        bool sinks;   /* one learned logit a head that takes part in the softmax */
        int window;   /* keys a query sees in windowed layers, itself included; 0: all */
        int window_layers;
    } attention;
    struct {
        int experts, top_k, expert_hidden;
        int shared_experts; /* each of expert_hidden */
        int dense_layers;   /* the first ones */
        int dense_hidden;
        int router;
        bool renormalise; /* divide the chosen weights by their sum */
        double aux_loss, z_loss;
        double capacity_factor; /* 0: dropless */
        int activation;
        bool bias; /* on expert matrices and the router */
    } moe;
};

/* Reads a model manifest, an object; all that is wrong goes to value.errors. False then. */
bool model_read(struct json value, struct model *model);
/* Checks what no single key shows: heads divisible by kv_heads, top_k ≤ experts, … Called by model_read. */
bool model_check(struct json value, const struct model *model);
/* The manifest of a model, as model_read takes it. */
cJSON *model_write(const struct model *model);
/* A HuggingFace config.json of Qwen3-MoE, GPT-OSS, DeepSeek-MoE or Mixtral → a model, one that model_read
   takes. An absent key has what its configuration class takes for it; a key that changes the mathematics and
   cannot be represented is an error that names it. */
bool model_import(struct json config, struct model *model);

/* Bytes of an element of the dtype, and of what is kept wider beside BF16: logits, master weights, … */
double model_element_bytes(const struct model *model);
double model_wide_bytes(const struct model *model);

/* ---- structure --------------------------------------------------------------------------------------- */

bool model_layer_is_moe(const struct model *model, int layer);
int model_moe_layers(const struct model *model); /* how many */
/* Keys a query of this layer sees at most; 0: all before it. */
int model_layer_window(const struct model *model, int layer);
/* Copies per token that travel to the feed-forward side: top_k, or 1 in a dense layer. */
int model_copies(const struct model *model, int layer);

/* Copies of one sequence that an expert takes at most (GShard, Lepikhin et al. 2020): x = capacity_factor · S
   · K ÷ E rounded up, where a hair above a whole number, 1e-9 of x, is none: 1.1 · 100 · 2 ÷ 4 is 55, not 56.
   S where nothing is dropped: an expert takes a token once. */
int model_expert_capacity(const struct model *model, int seq_len);

/* ---- parameters (numbers of elements) ---------------------------------------------------------------- */

double model_attention_parameters(
    const struct model *model); /* of one layer, with its attention norm, sinks, QK-norm */
double model_router_parameters(const struct model *model,
                               int layer); /* with the feed-forward norm; 0 router in dense layers */
double model_expert_parameters(const struct model *model);            /* of one routed expert */
double model_shared_parameters(const struct model *model, int layer); /* shared experts, or the dense FFN */
double model_embedding_parameters(const struct model *model);         /* input embedding */
double model_head_parameters(const struct model *model); /* final norm and output matrix (0 matrix if tied) */

struct parameter_count {
    double total;                          /* both embeddings counted */
    double active;                         /* used by one token: top-k experts, both embeddings */
    double active_without_input_embedding; /* as GPT-OSS publishes it */
};
struct parameter_count model_parameter_count(const struct model *model);

/* ---- work -------------------------------------------------------------------------------------------- */

enum work_pass { WORK_FORWARD, WORK_BACKWARD_INPUT, WORK_BACKWARD_WEIGHT };

/* Which achieved rate a matrix product runs at. */
enum unit { UNIT_DENSE, UNIT_EXPERTS, UNIT_HEAD };
/* One matrix product. bytes: what it must move through the GPU's memory, each operand and its result once; of
   a gradient's buffer, which is read and written, twice. */
struct matrix_product {
    int unit;
    double flops, bytes;
};
#define MAX_PRODUCTS 8
/* Work by what bounds it. */
struct work {
    struct matrix_product products[MAX_PRODUCTS];
    int product_count;
    double
        core_flops; /* core attention: scores and weighted values; backward with the scores computed anew */
    double bytes;   /* memory traffic of element-wise kernels: norms, RoPE, activation, permutation */
    double kernels; /* launches */
};
struct work work_add(struct work a, struct work b);
/* FLOPs of the products of one unit. */
double work_flops(const struct work *work, enum unit unit);

/* A micro-batch on one GPU of a run of cp that hold each sequence between them: pieces i and 2·cp − 1 − i of
   2·cp go to the i-th. With a window the middle ones have most to do; the work is theirs. */
struct tokens {
    double sequences; /* that the run holds */
    int seq_len, cp;
};
double tokens_here(struct tokens tokens); /* on each GPU */

/* One layer's attention: pre-norm, projections, QK-norm, RoPE, core attention, output projection, residual;
   then the feed-forward norm and router, which decide where tokens go. gradient_bytes: of an element of the
   buffer that the weight pass adds to (ignored by the others). */
struct work model_attention_work(const struct model *model, int layer, enum work_pass pass,
                                 struct tokens tokens, double gradient_bytes);
/* What one GPU's feed-forward part computes of a micro-batch. */
struct ffn_load {
    double copies;  /* at its routed experts */
    double rows;    /* the same with each expert's rounded up to the tile of its matrix product */
    double experts; /* routed experts it holds */
    double tokens;  /* that pass the shared experts, or the dense FFN */
};
struct work model_ffn_work(const struct model *model, int layer, enum work_pass pass, struct ffn_load load,
                           double gradient_bytes);
struct work model_embed_work(const struct model *model, enum work_pass pass, double tokens);
/* Final norm, output matrix, cross-entropy. The logits are made chunk by chunk and never kept whole. */
struct work model_head_work(const struct model *model, enum work_pass pass, double tokens,
                            double gradient_bytes);

/* Model FLOPs of one sequence's training step, forward and backward, without any recomputation: what MFU
   counts (core attention backward as twice its forward). */
double model_step_flops(const struct model *model, int seq_len);

/* ---- activations kept for backward -------------------------------------------------------------------- */

/* What a layer's attention drops behind its forward pass, and makes again ahead of its backward pass:
   norms: the norms' outputs; projections: also queries, keys and values (the core's output and log-sum-exp
   and what is dispatched stay); full: all but the layer's input. */
enum attention_recompute { ATTENTION_NONE, ATTENTION_NORMS, ATTENTION_PROJECTIONS, ATTENTION_FULL };
#define ATTENTION_CHOICES "none|norms|projections|full"
/* What its feed-forward part drops: the activation's output (and a dense layer's normalised input), or all
   but the input. */
enum ffn_recompute { FFN_NONE, FFN_ACTIVATION, FFN_FULL };
#define FFN_CHOICES "none|activation|full"

/* Bytes per token that a layer's attention keeps for its backward pass, without the layer's input. */
double model_attention_activation_bytes(const struct model *model, int layer,
                                        enum attention_recompute recompute);
/* Bytes per copy that an expert keeps beside its input. */
double model_expert_activation_bytes(const struct model *model, int layer, enum ffn_recompute recompute);
/* Bytes per token that shared experts (or the dense FFN) keep beside their input. */
double model_shared_activation_bytes(const struct model *model, int layer, enum ffn_recompute recompute);
/* Bytes per token of keys and values, which a run of context-parallel GPUs gathers. */
double model_key_value_bytes(const struct model *model);
/* Bytes of one token's hidden vector: of the residual stream, of an expert's input, of a message. */
double model_hidden_bytes(const struct model *model);
/* What has to be done again. A full recomputation of the feed-forward part ends at the activation's output,
   which is all that backward needs. */
struct work model_attention_again_work(const struct model *model, int layer,
                                       enum attention_recompute recompute, struct tokens tokens);
struct work model_ffn_again_work(const struct model *model, int layer, enum ffn_recompute recompute,
                                 struct ffn_load load);

#endif
