/*
What a model costs: parameters, FLOPs, memory traffic, kept activations. Exact for the architecture.

FLOPs count a multiply-add as 2. Traffic counts each element-wise kernel's tensors once read and once written in BF16;
matrix products and core attention count none of their own, since they are bound by FLOPs at training sizes.
*/
#include "model/model.h"

#include <math.h>

#define BF16 2.0
#define FP32 4.0

/* ---- structure ------------------------------------------------------------------------------------------- */

bool model_layer_is_moe(const struct model *model, int layer)
{
    return layer >= model->moe.dense_layers;
}

int model_layer_window(const struct model *model, int layer)
{
    switch (model->attention.window_layers) {
    case WINDOW_ALL: return model->attention.window;
    case WINDOW_EVEN: return layer % 2 == 0 ? model->attention.window : 0;
    case WINDOW_ODD: return layer % 2 == 1 ? model->attention.window : 0;
    default: return 0;
    }
}

int model_copies(const struct model *model, int layer)
{
    return model_layer_is_moe(model, layer) ? model->moe.top_k : 1;
}

static double query_width(const struct model *model)
{
    return (double)model->attention.heads * model->attention.head_dim;
}

static double key_width(const struct model *model)
{
    return (double)model->attention.kv_heads * model->attention.head_dim;
}

/* Elements of the four projection matrices. */
static double projection_elements(const struct model *model)
{
    return model->hidden * (2 * query_width(model) + 2 * key_width(model));
}

/* ---- parameters ------------------------------------------------------------------------------------------ */

double model_attention_parameters(const struct model *model)
{
    double count = projection_elements(model) + model->hidden; /* and the attention norm */
    if (model->attention.bias) count += query_width(model) + 2 * key_width(model) + model->hidden;
    if (model->attention.qk_norm) count += 2 * model->attention.head_dim;
    if (model->attention.sinks) count += model->attention.heads;
    return count;
}

double model_router_parameters(const struct model *model, int layer)
{
    double norm = model->hidden;
    if (!model_layer_is_moe(model, layer)) return norm;
    double noise = model->moe.router == ROUTER_NOISY_TOPK ? (double)model->moe.experts * model->hidden : 0;
    return norm + noise + (double)model->moe.experts * (model->hidden + model->moe.bias);
}

double model_expert_parameters(const struct model *model)
{
    double inner = model->moe.expert_hidden, count = 3 * inner * model->hidden;
    return model->moe.bias ? count + 2 * inner + model->hidden : count;
}

/* Width of the part that every token passes: shared experts side by side, or the dense FFN. */
static double shared_width(const struct model *model, int layer)
{
    if (!model_layer_is_moe(model, layer)) return model->moe.dense_hidden;
    return (double)model->moe.shared_experts * model->moe.expert_hidden;
}

double model_shared_parameters(const struct model *model, int layer)
{
    return 3 * shared_width(model, layer) * model->hidden;
}

double model_embedding_parameters(const struct model *model)
{
    return (double)model->vocab * model->hidden;
}

double model_head_parameters(const struct model *model)
{
    return model->hidden + (model->tie_embeddings ? 0 : (double)model->vocab * model->hidden);
}

struct parameter_count model_parameter_count(const struct model *model)
{
    double ends = model_embedding_parameters(model) + model_head_parameters(model);
    struct parameter_count count = {ends, ends, 0};
    for (int layer = 0; layer < model->layers; layer++) {
        double every = model_attention_parameters(model) + model_router_parameters(model, layer) +
                       model_shared_parameters(model, layer);
        double expert = model_layer_is_moe(model, layer) ? model_expert_parameters(model) : 0;
        count.total += every + model->moe.experts * expert;
        count.active += every + model->moe.top_k * expert;
    }
    count.active_without_input_embedding = count.active - (model->tie_embeddings ? 0 : model_embedding_parameters(model));
    return count;
}

/* ---- work ------------------------------------------------------------------------------------------------ */

struct work work_add(struct work a, struct work b)
{
    return (struct work){a.gemm_flops + b.gemm_flops, a.core_flops + b.core_flops, a.grouped_flops + b.grouped_flops,
                         a.bytes + b.bytes, a.kernels + b.kernels};
}

struct work work_scale(struct work a, double factor)
{
    return (struct work){a.gemm_flops * factor, a.core_flops * factor, a.grouped_flops * factor, a.bytes * factor,
                         a.kernels * factor};
}

/* Pairs of query and key that a causal sequence computes: position i (from 1) sees min(i, window) keys. */
static double causal_pairs(double seq_len, double window)
{
    if (window <= 0 || window >= seq_len) return seq_len * (seq_len + 1) / 2;
    return window * (window + 1) / 2 + (seq_len - window) * window;
}

/* Element-wise traffic of one token's attention, forward: both norms (read, write), RoPE and QK-norm on query and key
   (read, write), the residual addition (two reads, a write). */
static double attention_traffic(const struct model *model)
{
    double rotated = query_width(model) + key_width(model);
    double elements = 2 * 2 * model->hidden + 2 * rotated + 3 * model->hidden;
    if (model->attention.qk_norm) elements += 2 * rotated;
    return elements * BF16;
}

struct work model_attention_work(const struct model *model, int layer, enum work_pass pass, double sequences,
                                 int seq_len)
{
    double tokens = sequences * seq_len;
    bool moe = model_layer_is_moe(model, layer);
    double matrices = projection_elements(model) + (moe ? (double)model->moe.experts * model->hidden : 0);
    struct work work = {.gemm_flops = 2 * tokens * matrices, .kernels = 5}; /* q, k, v, output, router */
    if (pass == WORK_BACKWARD_WEIGHT) return work;
    /* Scores and weighted values: 2 products of head_dim a pair and head. FlashAttention's backward has 5, the scores
       computed anew among them. */
    double pairs = sequences * causal_pairs(seq_len, model_layer_window(model, layer));
    work.core_flops = 4 * pairs * query_width(model);
    if (pass == WORK_BACKWARD_INPUT) work.core_flops *= 2.5;
    work.bytes = tokens * attention_traffic(model);
    if (moe) work.bytes += tokens * model->moe.experts * 2 * FP32; /* router probabilities: read, write */
    if (pass == WORK_BACKWARD_INPUT) work.bytes *= 2; /* each kernel reads the gradient beside its input */
    work.kernels += 6; /* two norms, RoPE, core attention, residual, top-k */
    return work;
}

/* Element-wise traffic of one copy on the feed-forward side, forward: permutation into expert order (read, write), the
   activation (two inputs, one output), and the output's way back into token order and sum (read, write). */
static double copy_traffic(const struct model *model, double inner)
{
    return (2.0 * model->hidden + 3 * inner + 2.0 * model->hidden) * BF16;
}

struct work model_ffn_work(const struct model *model, int layer, enum work_pass pass, double copies, double tokens,
                           double experts_here)
{
    (void)experts_here; /* grouped products: one launch for all experts */
    struct work work = {0};
    double inner = model->moe.expert_hidden, shared = shared_width(model, layer);
    bool input = pass != WORK_BACKWARD_WEIGHT;
    double twice = pass == WORK_BACKWARD_INPUT ? 2 : 1; /* each kernel reads the gradient beside its input */
    if (model_layer_is_moe(model, layer)) {
        work.grouped_flops = 6 * copies * model->hidden * inner;
        work.kernels += 2; /* gate and up in one product, down */
        if (input) {
            work.bytes += twice * copies * copy_traffic(model, inner);
            work.kernels += 3;
        }
    }
    if (shared > 0) {
        work.gemm_flops = 6 * tokens * model->hidden * shared;
        work.kernels += 2;
        if (input) {
            work.bytes += twice * tokens * (3 * shared + 3 * model->hidden) * BF16; /* activation, addition */
            work.kernels += 2;
        }
    }
    return work;
}

struct work model_embed_work(const struct model *model, enum work_pass pass, double tokens)
{
    if (pass == WORK_BACKWARD_INPUT) return (struct work){0};
    return (struct work){.bytes = 2 * tokens * model->hidden * BF16, .kernels = 1};
}

struct work model_head_work(const struct model *model, enum work_pass pass, double tokens)
{
    struct work work = {.gemm_flops = 2 * tokens * model->hidden * model->vocab, .kernels = 1};
    if (pass == WORK_BACKWARD_WEIGHT) return work;
    /* Logits of a chunk: written by the product, read for maximum and sum; backward the gradient is written and read
       by both products. */
    work.bytes = tokens * (2.0 * model->vocab + 2 * model->hidden) * BF16;
    work.kernels += 2;
    return work;
}

double model_step_flops(const struct model *model, int seq_len)
{
    double flops = 3 * model_head_work(model, WORK_FORWARD, seq_len).gemm_flops;
    for (int layer = 0; layer < model->layers; layer++) {
        struct work attention = model_attention_work(model, layer, WORK_FORWARD, 1, seq_len);
        struct work ffn = model_ffn_work(model, layer, WORK_FORWARD, (double)seq_len * model->moe.top_k, seq_len, 1);
        flops += 3 * (attention.gemm_flops + attention.core_flops + ffn.gemm_flops + ffn.grouped_flops);
    }
    return flops;
}

/* ---- activations ----------------------------------------------------------------------------------------- */

double model_hidden_bytes(const struct model *model)
{
    return model->hidden * BF16;
}

/* Both normalised inputs, which selective recomputation makes anew. */
static double normalised_bytes(const struct model *model)
{
    return 2 * model_hidden_bytes(model);
}

double model_attention_activation_bytes(const struct model *model, int layer, enum recompute recompute)
{
    if (recompute == RECOMPUTE_FULL) return 0;
    double elements = query_width(model) + 2 * key_width(model); /* query, key, value as core attention reads them */
    if (model->attention.qk_norm) elements += query_width(model) + key_width(model); /* before their norm */
    elements += query_width(model); /* attention's output */
    double bytes = elements * BF16 + model->attention.heads * FP32 /* log-sum-exp */ + model_hidden_bytes(model); /* h */
    if (model_layer_is_moe(model, layer)) /* router logits, chosen weights and ids */
        bytes += model->moe.experts * FP32 + model->moe.top_k * (FP32 + FP32);
    return recompute == RECOMPUTE_NONE ? bytes + normalised_bytes(model) : bytes;
}

/* Gate and up; and their product, which selective recomputation makes anew. */
static double inner_bytes(double inner, enum recompute recompute)
{
    if (recompute == RECOMPUTE_FULL) return 0;
    return (recompute == RECOMPUTE_NONE ? 3 : 2) * inner * BF16;
}

double model_expert_activation_bytes(const struct model *model, int layer, enum recompute recompute)
{
    return model_layer_is_moe(model, layer) ? inner_bytes(model->moe.expert_hidden, recompute) : 0;
}

double model_shared_activation_bytes(const struct model *model, int layer, enum recompute recompute)
{
    return inner_bytes(shared_width(model, layer), recompute);
}

struct work model_attention_selective_work(const struct model *model, double tokens)
{
    return (struct work){.bytes = tokens * 2 * normalised_bytes(model), .kernels = 2}; /* both norms: read, write */
}

struct work model_ffn_selective_work(const struct model *model, int layer, double copies, double tokens)
{
    double routed = model_layer_is_moe(model, layer) ? copies * 3 * model->moe.expert_hidden : 0;
    return (struct work){.bytes = (routed + tokens * 3 * shared_width(model, layer)) * BF16, .kernels = 1};
}
