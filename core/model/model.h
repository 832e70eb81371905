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

/* Work by the unit that does it, since each has an achieved rate of its own. */
struct work {
    double gemm_flops; /* dense matrix products */
    double
        core_flops; /* core attention: scores and weighted values; backward with the scores computed anew */
    double grouped_flops; /* matrix products of experts */
    double bytes;         /* memory traffic of element-wise kernels: norms, RoPE, activation, permutation */
    double kernels;       /* launches */
};
struct work work_add(struct work a, struct work b);

/* One layer's attention for `sequences` sequences of `seq_len` tokens: pre-norm, projections, QK-norm, RoPE,
   core attention, output projection, residual; then the feed-forward norm and router, which decide where
   tokens go. */
struct work model_attention_work(const struct model *model, int layer, enum work_pass pass, double sequences,
                                 int seq_len);
/* One layer's feed-forward on one GPU: `copies` copies at `experts_here` routed experts (grouped products:
   the time of one GPU), and the shared experts or the dense FFN for `tokens` tokens. */
struct work model_ffn_work(const struct model *model, int layer, enum work_pass pass, double copies,
                           double tokens, double experts_here);
struct work model_embed_work(const struct model *model, enum work_pass pass, double tokens);
/* Final norm, output matrix, cross-entropy. The logits are made chunk by chunk and never kept. */
struct work model_head_work(const struct model *model, enum work_pass pass, double tokens);

/* Model FLOPs of one sequence's training step, forward and backward, without any recomputation: what MFU
   counts (core attention backward as twice its forward). */
double model_step_flops(const struct model *model, int seq_len);

/* ---- activations kept for backward -------------------------------------------------------------------- */

enum recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL };
#define RECOMPUTE_CHOICES "none|selective|full"

/* Bytes per token that a layer's attention keeps for its backward pass, without the layer's input. selective
   drops normalised inputs; full drops everything (the layer's input is counted apart, by model_hidden_bytes).
 */
double model_attention_activation_bytes(const struct model *model, int layer, enum recompute recompute);
/* Bytes per copy that an expert keeps beside its input; selective drops the activation's output, full all. */
double model_expert_activation_bytes(const struct model *model, int layer, enum recompute recompute);
/* Bytes per token that shared experts (or the dense FFN) keep beside their input. */
double model_shared_activation_bytes(const struct model *model, int layer, enum recompute recompute);
/* Bytes of one token's hidden vector: of the residual stream, of an expert's input, of a message. */
double model_hidden_bytes(const struct model *model);
/* Work that a recompute level adds to a layer's backward pass on each side, beyond what a full forward
   repeats: selective repeats norms (attention side) and activations (feed-forward side). */
struct work model_attention_selective_work(const struct model *model, double tokens);
struct work model_ffn_selective_work(const struct model *model, int layer, double copies, double tokens);

#endif
