/*
What a model costs: parameters, FLOPs, memory traffic, activations kept.

Every count is a closed form of the architecture, with the shapes in the comments: T tokens, s tokens a
sequence, H hidden, A = heads · head_dim, K = kv_heads · head_dim, E experts, k top-k, D expert hidden, W
width of the shared experts or the dense feed-forward, V vocabulary.

Traffic of element-wise kernels counts each tensor a kernel reads or writes once, in BF16 (2 bytes an element)
unless said (or in the model's dtype, where it is another one). A matrix product is counted with its FLOPs and
with what it reads and writes: it takes the longer of the two. Biases and the addition of a gradient to the
residual's are fused into the kernel beside them. Gradients of norm weights come out of the kernel that makes
the input's gradient, so the weight pass has matrix products and bias sums alone.
*/
#include "model/model.h"

#include <assert.h>
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
    a.core_flops += b.core_flops;
    a.bytes += b.bytes;
    a.kernels += b.kernels;
    for (int i = 0; i < b.product_count; i++) {
        assert(a.product_count < MAX_PRODUCTS);
        a.products[a.product_count++] = b.products[i];
    }
    return a;
}

double work_flops(const struct work *work, enum unit unit) {
    double flops = 0;
    for (int i = 0; i < work->product_count; i++)
        if (work->products[i].unit == (int)unit) flops += work->products[i].flops;
    return flops;
}

/* Matrices (out, in), `matrices` of them, times `rows` rows in all, in one of the three passes: all have the
   same FLOPs and the same three operands, of which the weight pass adds to one. */
struct shape {
    enum unit unit;
    double rows, in, out, matrices;
};

static void add_product(struct work *work, const struct model *model, enum work_pass pass, struct shape shape,
                        double gradient_bytes) {
    double element = model_element_bytes(model);
    double matrix =
        shape.matrices * shape.in * shape.out * (pass == WORK_BACKWARD_WEIGHT ? 2 * gradient_bytes : element);
    assert(work->product_count < MAX_PRODUCTS);
    work->products[work->product_count++] =
        (struct matrix_product){(int)shape.unit, 2 * shape.rows * shape.in * shape.out,
                                matrix + element * shape.rows * (shape.in + shape.out)};
}

double tokens_here(struct tokens tokens) {
    return tokens.sequences * tokens.seq_len / tokens.cp;
}

/* Query-key pairs of one head and sequence: the sum over positions 1 … s of min(position, window). */
static double attention_pairs(double s, double window) {
    if (window == 0 || window >= s) return s * (s + 1) / 2;
    return window * (window + 1) / 2 + (s - window) * window;
}

/* Scores and weighted values: two products of head_dim multiply-adds a pair and head. Of a run of cp GPUs
   the last has the two pieces in the middle, and the pairs a position has never decrease and never grow
   faster, so no other two pieces have more. */
static double core_forward_flops(const struct model *model, int layer, struct tokens tokens) {
    double window = model_layer_window(model, layer), piece = tokens.seq_len / (2.0 * tokens.cp);
    double pairs =
        attention_pairs(piece * (tokens.cp + 1), window) - attention_pairs(piece * (tokens.cp - 1), window);
    return tokens.sequences * 4 * query_width(model) * pairs;
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

static void add_projections(struct work *work, const struct model *model, enum work_pass pass, double tokens,
                            double gradient_bytes) {
    struct shape shape = {UNIT_DENSE, tokens, model->hidden, query_width(model) + 2 * key_width(model), 1};
    add_product(work, model, pass, shape, gradient_bytes);
}

struct work model_attention_work(const struct model *model, int layer, enum work_pass pass,
                                 struct tokens tokens, double gradient_bytes) {
    double here = tokens_here(tokens), core = core_forward_flops(model, layer, tokens);
    bool moe = model_layer_is_moe(model, layer), norm = model->attention.qk_norm;
    struct work work = {0};
    add_projections(&work, model, pass, here, gradient_bytes);
    add_product(&work, model, pass, (struct shape){UNIT_DENSE, here, query_width(model), model->hidden, 1},
                gradient_bytes);
    if (moe)
        add_product(&work, model, pass,
                    (struct shape){UNIT_DENSE, here, model->hidden,
                                   router_matrices(model, layer) * model->moe.experts, 1},
                    gradient_bytes);
    switch (pass) {
    case WORK_FORWARD:
        work.core_flops = core;
        work.bytes = here * attention_forward_bytes(model, layer);
        /* norm, q-k-v, RoPE, core, output, residual, norm, residual; router, gate, packing */
        work.kernels = 8 + norm + 3 * moe;
        break;
    case WORK_BACKWARD_INPUT:
        work.core_flops = 2.5 * core; /* five products where forward has two: the scores are made anew */
        work.bytes = here * attention_input_bytes(model, layer);
        /* norm, q-k-v, RoPE, rows' sums, core, output, norm; router, gate, packing, spreading */
        work.kernels = 7 + norm + 4 * moe;
        break;
    case WORK_BACKWARD_WEIGHT:
        work.bytes = here * attention_weight_bytes(model, layer);
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

/* gate and up are one product, down the other. */
static void add_ffn_products(struct work *work, const struct model *model, enum work_pass pass,
                             struct shape shape, double width, double gradient_bytes) {
    shape.in = model->hidden;
    shape.out = 2 * width;
    add_product(work, model, pass, shape, gradient_bytes);
    shape.in = width;
    shape.out = model->hidden;
    add_product(work, model, pass, shape, gradient_bytes);
}

/* A grouped product is one launch, however many experts a GPU has; none where it has none. */
struct work model_ffn_work(const struct model *model, int layer, enum work_pass pass, struct ffn_load load,
                           double gradient_bytes) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    double width = shared_width(model, layer);
    bool weight = pass == WORK_BACKWARD_WEIGHT;
    struct work work = {0};
    if (model_layer_is_moe(model, layer) && load.experts > 0) {
        add_ffn_products(&work, model, pass,
                         (struct shape){.unit = UNIT_EXPERTS, .rows = load.rows, .matrices = load.experts},
                         model->moe.expert_hidden, gradient_bytes);
        work.bytes = element * load.copies * routed_elements(model, pass);
        if (!weight) work.bytes += wide * load.copies; /* the router's weight in, or its gradient out */
        /* sort, gate-up, SwiGLU, down, sort back; or two products and their biases' sums */
        work.kernels = weight ? 2 + 2 * model->moe.bias : 5;
    }
    if (width > 0) {
        add_ffn_products(&work, model, pass,
                         (struct shape){.unit = UNIT_DENSE, .rows = load.tokens, .matrices = 1}, width,
                         gradient_bytes);
        work.bytes += element * load.tokens * shared_elements(model, layer, pass);
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
struct work model_head_work(const struct model *model, enum work_pass pass, double tokens,
                            double gradient_bytes) {
    double element = model_element_bytes(model);
    double h = model->hidden, v = model->vocab;
    struct work work = {.kernels = 1};
    add_product(&work, model, pass, (struct shape){UNIT_HEAD, tokens, h, v, 1}, gradient_bytes);
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
    struct work head = model_head_work(model, WORK_FORWARD, seq_len, 0);
    double forward = work_flops(&head, UNIT_HEAD);
    struct tokens tokens = {1, seq_len, 1};
    for (int layer = 0; layer < model->layers; layer++) {
        struct work attention = model_attention_work(model, layer, WORK_FORWARD, tokens, 0);
        double copies = (double)seq_len * model_copies(model, layer);
        struct ffn_load load = {copies, copies, model->moe.experts, seq_len};
        struct work ffn = model_ffn_work(model, layer, WORK_FORWARD, load, 0);
        forward += work_flops(&attention, UNIT_DENSE) + attention.core_flops + work_flops(&ffn, UNIT_DENSE) +
                   work_flops(&ffn, UNIT_EXPERTS);
    }
    return 3 * forward;
}

/* ---- activations kept -------------------------------------------------------------------------------- */

double model_hidden_bytes(const struct model *model) {
    double element = model_element_bytes(model);
    return element * model->hidden;
}

double model_attention_activation_bytes(const struct model *model, int layer,
                                        enum attention_recompute recompute) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    if (recompute == ATTENTION_FULL) return 0;
    double h = model->hidden, a = query_width(model), k = key_width(model);
    bool moe = model_layer_is_moe(model, layer);
    double bytes = element * a                     /* output of core attention */
                   + wide * model->attention.heads /* log-sum-exp of each head's scores */
                   + element * h;                  /* h2: residual after attention, what is dispatched */
    if (recompute <= ATTENTION_NORMS) {
        bytes += element * (a + 2 * k);                           /* q, k (after RoPE), v */
        if (model->attention.qk_norm) bytes += element * (a + k); /* q, k before their norm */
    }
    /* The norms' outputs; a dense layer's second norm belongs to its feed-forward part. */
    if (recompute == ATTENTION_NONE) bytes += (1 + moe) * element * h;
    if (moe)
        bytes += wide * router_matrices(model, layer) * model->moe.experts /* logits */
                 + (wide + INDEX) * model->moe.top_k;                      /* weights and experts chosen */
    return bytes;
}

double model_key_value_bytes(const struct model *model) {
    return model_element_bytes(model) * 2 * key_width(model);
}

/* gate and up, and their product. The router's weight is applied to the product, so the expert's output is
   not needed for that weight's gradient. */
static double swiglu_activation_bytes(const struct model *model, double width, enum ffn_recompute recompute) {
    static const double kept[] = {[FFN_NONE] = 3, [FFN_ACTIVATION] = 2, [FFN_FULL] = 0};
    return model_element_bytes(model) * width * kept[recompute];
}

double model_expert_activation_bytes(const struct model *model, int layer, enum ffn_recompute recompute) {
    if (!model_layer_is_moe(model, layer)) return 0;
    return swiglu_activation_bytes(model, model->moe.expert_hidden, recompute);
}

double model_shared_activation_bytes(const struct model *model, int layer, enum ffn_recompute recompute) {
    bool normed = recompute == FFN_NONE && !model_layer_is_moe(model, layer);
    return swiglu_activation_bytes(model, shared_width(model, layer), recompute) +
           normed * model_hidden_bytes(model);
}

/* ---- work again -------------------------------------------------------------------------------------- */

struct work model_attention_again_work(const struct model *model, int layer,
                                       enum attention_recompute recompute, struct tokens tokens) {
    double element = model_element_bytes(model), here = tokens_here(tokens);
    double h = model->hidden, a = query_width(model), k = key_width(model);
    bool moe = model_layer_is_moe(model, layer), norm = model->attention.qk_norm;
    if (recompute == ATTENTION_NONE) return (struct work){0};
    if (recompute == ATTENTION_FULL) return model_attention_work(model, layer, WORK_FORWARD, tokens, 0);
    struct work work = {.bytes = element * here * 2 * h * (1 + moe), .kernels = 1 + moe}; /* norms: in, out */
    if (recompute == ATTENTION_NORMS) return work;
    add_projections(&work, model, WORK_FORWARD, here, 0);
    work.bytes += element * here * (1 + norm) * 2 * (a + k); /* RoPE, QK-norm: q, k in, out */
    work.kernels += 2 + norm;
    return work;
}

struct work model_ffn_again_work(const struct model *model, int layer, enum ffn_recompute recompute,
                                 struct ffn_load load) {
    double element = model_element_bytes(model), wide = model_wide_bytes(model);
    double h = model->hidden, width = shared_width(model, layer);
    bool moe = model_layer_is_moe(model, layer), full = recompute == FFN_FULL;
    struct work work = {0};
    if (recompute == FFN_NONE) return work;
    if (moe && load.experts > 0) {
        struct shape gate_up = {UNIT_EXPERTS, load.rows, h, 2.0 * model->moe.expert_hidden, load.experts};
        if (full) add_product(&work, model, WORK_FORWARD, gate_up, 0);
        /* sort: in, out; SwiGLU */
        work.bytes =
            element * load.copies * (full * 2 * h + swiglu_elements(WORK_FORWARD, model->moe.expert_hidden)) +
            wide * load.copies;
        work.kernels = 1 + 2 * full;
    }
    if (width > 0) {
        if (full)
            add_product(&work, model, WORK_FORWARD, (struct shape){UNIT_DENSE, load.tokens, h, 2 * width, 1},
                        0);
        /* a dense layer's norm: in, out; SwiGLU */
        work.bytes += element * load.tokens * (!moe * 2 * h + swiglu_elements(WORK_FORWARD, width));
        work.kernels += 1 + full + !moe;
    }
    return work;
}
