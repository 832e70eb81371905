/*
What a model costs: parameters, FLOPs, memory traffic, activations kept.

Every count is a closed form of the architecture, with the shapes in the comments: T tokens, s tokens a
sequence, H hidden, A = heads · head_dim, K = kv_heads · head_dim, E experts, k top-k, D expert hidden, W
width of the shared experts or the dense feed-forward, V vocabulary.

Traffic of element-wise kernels counts each tensor a kernel reads or writes once, in BF16 (2 bytes an element)
unless said (or in the model's dtype, where it is another one); what one matrix product reads and writes is
part of its achieved rate. Biases and the addition of a gradient to the residual's are fused into the kernel
beside them. Gradients of norm weights come out of the kernel that makes the input's gradient, so the weight
pass has matrix products and bias sums alone.
*/
#include "model/model.h"

#include <math.h>

#define INDEX 4.0 /* bytes of an expert's number */

double model_element_bytes(const struct model *model) {
    static const double bytes[] = {2, 4, 8};
    return bytes[model->dtype];
}

/* Of what is kept in FP32 beside BF16: logits, log-sum-exps, router weights. */
double model_wide_bytes(const struct model *model) {
    return model->dtype == DTYPE_FP64 ? 8 : 4;
}

/* ---- structure --------------------------------------------------------------------------------------- */

bool model_layer_is_moe(const struct model *model, int layer) {
    return layer >= model->moe.dense_layers;
}

int model_moe_layers(const struct model *model) {
    return model->layers - model->moe.dense_layers;
}

int model_layer_window(const struct model *model, int layer) {
    switch (model->attention.window_layers) {
    case WINDOW_ALL:
        return model->attention.window;
    case WINDOW_EVEN:
        return layer % 2 == 0 ? model->attention.window : 0;
    case WINDOW_ODD:
        return layer % 2 == 1 ? model->attention.window : 0;
    default:
        return 0;
    }
}

int model_copies(const struct model *model, int layer) {
    return model_layer_is_moe(model, layer) ? model->moe.top_k : 1;
}

int model_expert_capacity(const struct model *model, int seq_len) {
    double copies = model->moe.capacity_factor * seq_len * model->moe.top_k / model->moe.experts;
    if (model->moe.capacity_factor <= 0 || copies >= seq_len) return seq_len;
    return (int)ceil(copies - 1e-9 * copies);
}

static double query_width(const struct model *model) { /* A */
    return (double)model->attention.heads * model->attention.head_dim;
}

static double key_width(const struct model *model) { /* K */
    return (double)model->attention.kv_heads * model->attention.head_dim;
}

/* W: shared experts act as one of their summed width; 0 where an MoE layer has none. */
static double shared_width(const struct model *model, int layer) {
    if (!model_layer_is_moe(model, layer)) return model->moe.dense_hidden;
    return (double)model->moe.shared_experts * model->moe.expert_hidden;
}

/* Matrices (E, H) of the router: noisy top-k has a second one, for the noise's scale. */
static double router_matrices(const struct model *model, int layer) {
    if (!model_layer_is_moe(model, layer)) return 0;
    return model->moe.router == ROUTER_NOISY_TOPK ? 2 : 1;
}

/* ---- parameters -------------------------------------------------------------------------------------- */

double model_attention_parameters(const struct model *model) {
    double h = model->hidden, a = query_width(model), k = key_width(model);
    double count = h + a * h + 2 * k * h + h * a; /* norm; q (A, H); k, v (K, H); o (H, A) */
    if (model->attention.bias) count += a + 2 * k + h;
    if (model->attention.sinks) count += model->attention.heads;
    if (model->attention.qk_norm) count += 2.0 * model->attention.head_dim; /* shared by the heads */
    return count;
}

double model_router_parameters(const struct model *model, int layer) {
    double h = model->hidden, matrices = router_matrices(model, layer);
    return h + matrices * model->moe.experts * (h + model->moe.bias);
}

/* gate, up (D, H), down (H, D); biases D, D, H. */
static double ffn_parameters(const struct model *model, double width) {
    double h = model->hidden;
    if (width == 0) return 0;
    return 3 * h * width + (model->moe.bias ? 2 * width + h : 0);
}

double model_expert_parameters(const struct model *model) {
    return ffn_parameters(model, model->moe.expert_hidden);
}

double model_shared_parameters(const struct model *model, int layer) {
    /* Shared experts are one of their summed width. */
    return ffn_parameters(model, shared_width(model, layer));
}

double model_embedding_parameters(const struct model *model) {
    return (double)model->vocab * model->hidden;
}

double model_head_parameters(const struct model *model) {
    return model->hidden + (model->tie_embeddings ? 0 : model_embedding_parameters(model));
}

struct parameter_count model_parameter_count(const struct model *model) {
    double embeddings = model_embedding_parameters(model) + model_head_parameters(model);
    struct parameter_count count = {embeddings, embeddings, 0};
    for (int layer = 0; layer < model->layers; layer++) {
        double always = model_attention_parameters(model) + model_router_parameters(model, layer) +
                        model_shared_parameters(model, layer);
        bool moe = model_layer_is_moe(model, layer);
        count.total += always + (moe ? model->moe.experts * model_expert_parameters(model) : 0);
        count.active += always + (moe ? model->moe.top_k * model_expert_parameters(model) : 0);
    }
    /* A tied matrix is still used, as the output's. */
    count.active_without_input_embedding =
        count.active - (model->tie_embeddings ? 0 : model_embedding_parameters(model));
    return count;
}

/* ---- work: attention --------------------------------------------------------------------------------- */

struct work work_add(struct work a, struct work b) {
    return (struct work){a.gemm_flops + b.gemm_flops, a.core_flops + b.core_flops,
                         a.grouped_flops + b.grouped_flops, a.bytes + b.bytes, a.kernels + b.kernels};
}

/* Query-key pairs of one head and sequence: the sum over positions 1 … s of min(position, window). */
static double attention_pairs(double s, double window) {
    if (window == 0 || window >= s) return s * (s + 1) / 2;
    return window * (window + 1) / 2 + (s - window) * window;
}

/* Scores and weighted values: two products of head_dim multiply-adds a pair and head. */
static double core_forward_flops(const struct model *model, int layer, double seq_len) {
    return 4 * query_width(model) * attention_pairs(seq_len, model_layer_window(model, layer));
}

/* FLOPs a token of the four projections and the router; the same in each pass. */
static double attention_gemm_flops(const struct model *model, int layer) {
    double h = model->hidden;
    return 2 * h * (2 * query_width(model) + 2 * key_width(model)) +
           2 * h * router_matrices(model, layer) * model->moe.experts;
}

static double attention_forward_bytes(const struct model *model, int layer) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    double h = model->hidden, a = query_width(model), k = key_width(model), copies = model->moe.top_k;
    double elements = 2 * h                                          /* attention norm: x in, out */
                      + (model->attention.qk_norm ? 2 * (a + k) : 0) /* QK-norm: q, k in, out */
                      + 2 * (a + k)                                  /* RoPE: q, k in, out */
                      + 3 * h  /* residual: x and attention in, sum out */
                      + 2 * h  /* feed-forward norm: in, out */
                      + 2 * h; /* second residual, fused with the sum of copies: h2 in, next x out */
    if (!model_layer_is_moe(model, layer)) return element * (elements + h); /* the feed-forward's output in */
    elements += copies * h        /* the second residual's copies in */
                + h + copies * h; /* copies packed for dispatch: token in, copies out */
    double logits = router_matrices(model, layer) * model->moe.experts;
    return element * elements + wide * logits + (wide + INDEX) * copies; /* gate: logits in, top-k out */
}

static double attention_input_bytes(const struct model *model, int layer) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    double h = model->hidden, a = query_width(model), k = key_width(model), copies = model->moe.top_k;
    double elements = 4 * h /* attention norm: x, dy, residual's gradient in, dx out */
                      + (model->attention.qk_norm ? 3 * (a + k) : 0) /* QK-norm: x, dy in, dx out */
                      + 2 * (a + k)                                  /* RoPE: in, out */
                      + 2 * a  /* rows' sums of output × its gradient */
                      + 4 * h; /* feed-forward norm: like the other */
    if (!model_layer_is_moe(model, layer)) return element * elements;
    elements += h + copies * h    /* the sum's gradient spread over the copies: in, out */
                + copies * h + h; /* packing's gradient: copies in, sum out */
    double logits = router_matrices(model, layer) * model->moe.experts;
    /* Gate: logits, top-k and their gradients in, logits' gradients out. */
    return element * elements + 2 * wide * logits + (2 * wide + INDEX) * copies;
}

/* Sums over tokens of the gradients of q, k, v, the output and the logits. */
static double attention_weight_bytes(const struct model *model, int layer) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    double bytes = 0;
    if (model->attention.bias) bytes += element * (query_width(model) + 2 * key_width(model) + model->hidden);
    if (model->moe.bias) bytes += wide * router_matrices(model, layer) * model->moe.experts;
    return bytes;
}

struct work model_attention_work(const struct model *model, int layer, enum work_pass pass, double sequences,
                                 int seq_len) {
    double tokens = sequences * seq_len, core = sequences * core_forward_flops(model, layer, seq_len);
    bool moe = model_layer_is_moe(model, layer), norm = model->attention.qk_norm;
    struct work work = {.gemm_flops = tokens * attention_gemm_flops(model, layer)};
    switch (pass) {
    case WORK_FORWARD:
        work.core_flops = core;
        work.bytes = tokens * attention_forward_bytes(model, layer);
        /* norm, q-k-v, RoPE, core, output, residual, norm, residual; router, gate, packing */
        work.kernels = 8 + norm + 3 * moe;
        break;
    case WORK_BACKWARD_INPUT:
        work.core_flops = 2.5 * core; /* five products where forward has two: the scores are made anew */
        work.bytes = tokens * attention_input_bytes(model, layer);
        /* norm, q-k-v, RoPE, rows' sums, core, output, norm; router, gate, packing, spreading */
        work.kernels = 7 + norm + 4 * moe;
        break;
    case WORK_BACKWARD_WEIGHT:
        work.bytes = tokens * attention_weight_bytes(model, layer);
        /* q-k-v, output; their biases' sums; router and its bias */
        work.kernels = 2 + 2 * model->attention.bias + moe * (1 + model->moe.bias);
        break;
    }
    return work;
}

/* ---- work: feed-forward ------------------------------------------------------------------------------ */

/* Elements a SwiGLU of this width moves for one row: forward gate and up in, product out; backward gate, up
   and the product's gradient in, two gradients out. The router's weight is applied in the same kernel. */
static double swiglu_elements(enum work_pass pass, double width) {
    return pass == WORK_FORWARD ? 3 * width : pass == WORK_BACKWARD_INPUT ? 5 * width : 0;
}

static double bias_sum_elements(const struct model *model, double width) {
    return model->moe.bias ? 2 * width + model->hidden : 0;
}

/* Elements of one copy at a routed expert. Copies arrive in the order of their senders and are sorted by
   expert before the products and back after them, in both directions: each sort H in, H out. */
static double routed_elements(const struct model *model, enum work_pass pass) {
    double width = model->moe.expert_hidden;
    if (pass == WORK_BACKWARD_WEIGHT) return bias_sum_elements(model, width);
    return 4.0 * model->hidden + swiglu_elements(pass, width);
}

/* Elements of one token at the shared experts, whose output is added to the routed ones' (forward: two in,
   one out; backward: the two input gradients are added likewise), or at the dense feed-forward. */
static double shared_elements(const struct model *model, int layer, enum work_pass pass) {
    double width = shared_width(model, layer);
    if (pass == WORK_BACKWARD_WEIGHT) return bias_sum_elements(model, width);
    return swiglu_elements(pass, width) + (model_layer_is_moe(model, layer) ? 3.0 * model->hidden : 0);
}

/* A grouped product is one launch, however many experts a GPU has; none where it has none. */
struct work model_ffn_work(const struct model *model, int layer, enum work_pass pass, double copies,
                           double tokens, double experts_here) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    double h = model->hidden, width = shared_width(model, layer);
    bool weight = pass == WORK_BACKWARD_WEIGHT;
    struct work work = {0};
    if (model_layer_is_moe(model, layer) && experts_here > 0) {
        work.grouped_flops = 6 * h * model->moe.expert_hidden * copies; /* three matrices of H · D */
        work.bytes = element * copies * routed_elements(model, pass);
        if (!weight) work.bytes += wide * copies; /* the router's weight in, or its gradient out */
        /* sort, gate-up, SwiGLU, down, sort back; or two products and their biases' sums */
        work.kernels = weight ? 2 + 2 * model->moe.bias : 5;
    }
    if (width > 0) {
        work.gemm_flops = 6 * h * width * tokens;
        work.bytes += element * tokens * shared_elements(model, layer, pass);
        /* gate-up, SwiGLU, down; the addition beside routed experts */
        work.kernels += weight ? 2 + 2 * model->moe.bias : 3 + model_layer_is_moe(model, layer);
    }
    return work;
}

/* ---- work: embedding and head ------------------------------------------------------------------------ */

/* Forward copies a row a token. Backward adds the token's gradient to a row in FP32, and has no input. */
struct work model_embed_work(const struct model *model, enum work_pass pass, double tokens) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    double elements = tokens * model->hidden;
    switch (pass) {
    case WORK_FORWARD:
        return (struct work){.bytes = elements * 2 * element, .kernels = 1};
    case WORK_BACKWARD_WEIGHT:
        return (struct work){.bytes = elements * (element + 2 * wide), .kernels = 1};
    default:
        return (struct work){0};
    }
}

/* A chunk's logits live from the product that makes them until their gradient, which takes their place, has
   been multiplied into both gradients: head forward and backward follow one another chunk by chunk, so no
   product is done twice. */
struct work model_head_work(const struct model *model, enum work_pass pass, double tokens) {
    double element = model_element_bytes(model);
    double h = model->hidden, v = model->vocab;
    struct work work = {.gemm_flops = 2 * h * v * tokens, .kernels = 1};
    if (pass == WORK_FORWARD) {
        work.bytes = element * tokens *
                     (2 * h     /* norm: in, out */
                      + 2 * v); /* logits out of the product, into the cross-entropy */
        work.kernels = 3;
    } else if (pass == WORK_BACKWARD_INPUT) {
        work.bytes = element * tokens *
                     (2 * v     /* softmax minus target: logits in, gradient out in place */
                      + 3 * h); /* norm: x, dy in, dx out */
        work.kernels = 3;
    }
    return work;
}

double model_step_flops(const struct model *model, int seq_len) {
    double forward = model_head_work(model, WORK_FORWARD, seq_len).gemm_flops;
    for (int layer = 0; layer < model->layers; layer++) {
        struct work attention = model_attention_work(model, layer, WORK_FORWARD, 1, seq_len);
        double copies = (double)seq_len * model_copies(model, layer);
        struct work ffn = model_ffn_work(model, layer, WORK_FORWARD, copies, seq_len, model->moe.experts);
        forward += attention.gemm_flops + attention.core_flops + ffn.gemm_flops + ffn.grouped_flops;
    }
    return 3 * forward;
}

/* ---- activations kept -------------------------------------------------------------------------------- */

double model_hidden_bytes(const struct model *model) {
    double element = model_element_bytes(model);
    return element * model->hidden;
}

double model_attention_activation_bytes(const struct model *model, int layer, enum recompute recompute) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    if (recompute == RECOMPUTE_FULL) return 0;
    double h = model->hidden, a = query_width(model), k = key_width(model);
    double bytes = element * (a + 2 * k)           /* q, k (after RoPE), v */
                   + element * a                   /* output of core attention */
                   + wide * model->attention.heads /* log-sum-exp of each head's scores */
                   + element * h;                  /* h2: residual after attention, input of the norm */
    if (model->attention.qk_norm) bytes += element * (a + k); /* q, k before their norm */
    /* The norms' outputs; a dense layer makes the second one anew where it is needed. */
    if (recompute == RECOMPUTE_NONE) bytes += (model_layer_is_moe(model, layer) ? 2 : 1) * element * h;
    if (model_layer_is_moe(model, layer))
        bytes += wide * router_matrices(model, layer) * model->moe.experts /* logits */
                 + (wide + INDEX) * model->moe.top_k;                      /* weights and experts chosen */
    return bytes;
}

/* gate and up, and their product. The router's weight is applied to the product, so the expert's output is
   not needed for that weight's gradient. */
static double swiglu_activation_bytes(const struct model *model, double width, enum recompute recompute) {
    double element = model_element_bytes(model);
    return recompute == RECOMPUTE_FULL ? 0 : element * width * (recompute == RECOMPUTE_SELECTIVE ? 2 : 3);
}

double model_expert_activation_bytes(const struct model *model, int layer, enum recompute recompute) {
    if (!model_layer_is_moe(model, layer)) return 0;
    return swiglu_activation_bytes(model, model->moe.expert_hidden, recompute);
}

double model_shared_activation_bytes(const struct model *model, int layer, enum recompute recompute) {
    return swiglu_activation_bytes(model, shared_width(model, layer), recompute);
}

/* Both norms again, in and out. */
struct work model_attention_selective_work(const struct model *model, double tokens) {
    double element = model_element_bytes(model);
    return (struct work){.bytes = element * tokens * 4 * model->hidden, .kernels = 2};
}

/* The SwiGLU products again. */
struct work model_ffn_selective_work(const struct model *model, int layer, double copies, double tokens) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    struct work work = {0};
    double width = shared_width(model, layer);
    if (model_layer_is_moe(model, layer)) {
        work.bytes =
            element * copies * swiglu_elements(WORK_FORWARD, model->moe.expert_hidden) + wide * copies;
        work.kernels = 1;
    }
    if (width > 0) {
        work.bytes += element * tokens * swiglu_elements(WORK_FORWARD, width);
        work.kernels += 1;
    }
    return work;
}
