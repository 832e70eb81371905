/*
The attention block and the expert block: forward, backward in two halves, and where kept activations lie.
*/
#include "layers/blocks.h"

#include <string.h>

/* ---- placing ----------------------------------------------------------------------------------------- */

/* Hands out pieces of a piece of memory; memory NULL only counts. */
struct placement {
    char *memory;
    size_t used;
};

static void *place(struct placement *placement, size_t count, size_t element) {
    void *here = placement->memory ? placement->memory + placement->used : NULL;
    placement->used += (count * element + 63) / 64 * 64;
    return here;
}

static floatX *place_floats(struct placement *placement, int rows, int columns) {
    return place(placement, (size_t)rows * columns, sizeof(floatX));
}

static void place_attention_normed(const struct model *model, int layer, int tokens,
                                   struct attention_kept *kept, struct placement *at) {
    kept->normed = place_floats(at, tokens, model->hidden);
    if (model_layer_is_moe(model, layer)) kept->ffn_normed = place_floats(at, tokens, model->hidden);
}

static struct attention_kept place_attention(const struct model *model, int layer,
                                             enum attention_recompute recompute, int tokens,
                                             struct placement *at) {
    struct attention_kept kept = {0};
    size_t copies = (size_t)tokens * model->moe.top_k;
    bool moe = model_layer_is_moe(model, layer);
    if (recompute == ATTENTION_NONE) place_attention_normed(model, layer, tokens, &kept, at);
    kept.qkv = place_floats(at, tokens, qkv_width(model));
    kept.qk = model->attention.qk_norm ? place_floats(at, tokens, rotated_width(model)) : kept.qkv;
    kept.attended = place_floats(at, tokens, query_width(model));
    kept.lse = place_floats(at, tokens, model->attention.heads);
    kept.middle = place_floats(at, tokens, model->hidden);
    if (!moe) return kept;
    kept.route.logits = place_floats(at, tokens, model->moe.experts);
    if (model->moe.router == ROUTER_NOISY_TOPK) kept.noise = place_floats(at, tokens, model->moe.experts);
    kept.route.weights = place_floats(at, tokens, model->moe.top_k);
    kept.route.ids = place(at, copies, sizeof(int));
    kept.route.kept = place(at, copies, 1);
    return kept;
}

size_t attention_kept_bytes(const struct model *model, int layer, enum attention_recompute recompute,
                            int tokens) {
    struct placement at = {0};
    place_attention(model, layer, recompute, tokens, &at);
    return at.used;
}

struct attention_kept attention_kept_place(const struct model *model, int layer,
                                           enum attention_recompute recompute, int tokens, void *memory) {
    return place_attention(model, layer, recompute, tokens, &(struct placement){memory, 0});
}

size_t attention_restored_bytes(const struct model *model, int layer, int tokens) {
    struct placement at = {0};
    place_attention_normed(model, layer, tokens, &(struct attention_kept){0}, &at);
    return at.used;
}

static struct attention_pending place_attention_pending(const struct model *model, int layer, int tokens,
                                                        struct placement *at) {
    struct attention_pending pending = {0};
    pending.dmiddle = place_floats(at, tokens, model->hidden);
    pending.dqkv = place_floats(at, tokens, qkv_width(model));
    if (!model_layer_is_moe(model, layer)) return pending;
    pending.dlogits = place_floats(at, tokens, model->moe.experts);
    if (model->moe.router == ROUTER_NOISY_TOPK) pending.dnoise = place_floats(at, tokens, model->moe.experts);
    return pending;
}

size_t attention_pending_bytes(const struct model *model, int layer, int tokens) {
    struct placement at = {0};
    place_attention_pending(model, layer, tokens, &at);
    return at.used;
}

struct attention_pending attention_pending_place(const struct model *model, int layer, int tokens,
                                                 void *memory) {
    return place_attention_pending(model, layer, tokens, &(struct placement){memory, 0});
}

/* ---- attention block, forward ------------------------------------------------------------------------ */

static struct attention_shape shape_of(const struct attention_block *block,
                                       const struct attention_part *part) {
    const struct model *model = block->model;
    return (struct attention_shape){part->sequences,           part->seq_len,
                                    model->attention.heads,    model->attention.kv_heads,
                                    model->attention.head_dim, model_layer_window(model, block->layer)};
}

static struct attention_inputs inputs_of(const struct attention_block *block,
                                         const struct attention_kept *kept) {
    const struct model *model = block->model;
    int stride = model->attention.qk_norm ? rotated_width(model) : qkv_width(model);
    return (struct attention_inputs){
        kept->qk,         kept->qk + query_width(model), kept->qkv + rotated_width(model), stride, stride,
        qkv_width(model), block->weights.sinks};
}

/* The kept normalised rows, or where they were dropped, made anew in scratch. */
static const floatX *normed_again(struct context *context, const floatX *kept, const floatX *x,
                                  const floatX *norm, int rows, const struct model *model) {
    if (kept) return kept;
    floatX *again = scratch_floats(context, (size_t)rows * model->hidden);
    rmsnorm_forward(context, again, x, norm, rows, model->hidden, model->norm_eps);
    return again;
}

static struct route_key key_of(const struct attention_block *block, const struct attention_part *part) {
    struct route_key key = part->key;
    key.layer = block->layer;
    return key;
}

static void route_block_forward(struct context *context, const struct attention_block *block,
                                const struct attention_part *part, struct attention_kept *kept) {
    const struct model *model = block->model;
    int tokens = part->sequences * part->seq_len, experts = model->moe.experts;
    void *mark = scratch_take(context, 0);
    floatX *normed = kept->ffn_normed;
    if (!normed) normed = scratch_floats(context, (size_t)tokens * model->hidden);
    rmsnorm_forward(context, normed, kept->middle, block->weights.ffn_norm, tokens, model->hidden,
                    model->norm_eps);
    linear_forward(context, kept->route.logits, normed, block->weights.router, block->weights.router_bias,
                   tokens, model->hidden, experts);
    if (block->weights.noise) {
        linear_forward(context, kept->noise, normed, block->weights.noise, block->weights.noise_bias, tokens,
                       model->hidden, experts);
        noise_forward(context, kept->route.logits, kept->noise, key_of(block, part), tokens, experts);
    }
    route_forward(context, model, &kept->route, part->forced, block->layer, part->sequences, part->seq_len);
    scratch_release(context, mark);
}

void attention_block_forward(struct context *context, const struct attention_block *block,
                             const struct attention_part *part, struct attention_kept *kept,
                             const floatX *input) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights;
    struct attention_shape shape = shape_of(block, part);
    struct attention_inputs inputs = inputs_of(block, kept);
    int tokens = part->sequences * part->seq_len, hidden = model->hidden, width = qkv_width(model);
    void *mark = scratch_take(context, 0);
    floatX *normed = kept->normed ? kept->normed : scratch_floats(context, (size_t)tokens * hidden);
    rmsnorm_forward(context, normed, input, w->input_norm, tokens, hidden, model->norm_eps);
    linear_forward(context, kept->qkv, normed, w->qkv, w->qkv_bias, tokens, hidden, width);
    rotate_forward(context, &shape, block->rope, kept->qk, inputs.q_stride, kept->qkv, width, w->q_norm,
                   w->k_norm, model->norm_eps);
    attention_forward(context, &shape, kept->attended, kept->lse, &inputs);
    linear_forward(context, kept->middle, kept->attended, w->out, w->out_bias, tokens, query_width(model),
                   hidden);
    vector_add(context, kept->middle, input, (size_t)tokens * hidden);
    scratch_release(context, mark);
    if (model_layer_is_moe(model, block->layer)) route_block_forward(context, block, part, kept);
}

void attention_block_restore(struct context *context, const struct attention_block *block,
                             struct attention_kept *kept, const floatX *input, int tokens, void *memory) {
    const struct model *model = block->model;
    place_attention_normed(model, block->layer, tokens, kept, &(struct placement){memory, 0});
    rmsnorm_forward(context, kept->normed, input, block->weights.input_norm, tokens, model->hidden,
                    model->norm_eps);
    if (kept->ffn_normed)
        rmsnorm_forward(context, kept->ffn_normed, kept->middle, block->weights.ffn_norm, tokens,
                        model->hidden, model->norm_eps);
}

/* ---- attention block, backward ----------------------------------------------------------------------- */

/* pending->dmiddle += through the router */
static void route_block_backward_input(struct context *context, const struct attention_block *block,
                                       const struct attention_part *part, const struct attention_kept *kept,
                                       struct attention_pending *pending, const floatX *dweights) {
    const struct model *model = block->model;
    int tokens = part->sequences * part->seq_len, experts = model->moe.experts, hidden = model->hidden;
    floatX *dnormed = scratch_floats(context, (size_t)tokens * hidden);
    route_backward(context, model, pending->dlogits, dweights, &kept->route, part->sequences, part->seq_len,
                   part->aux_scale, part->z_scale);
    linear_backward_input(context, dnormed, pending->dlogits, block->weights.router, tokens, hidden, experts);
    if (block->weights.noise) {
        floatX *through = scratch_floats(context, (size_t)tokens * hidden);
        noise_backward(context, pending->dnoise, pending->dlogits, kept->noise, key_of(block, part), tokens,
                       experts);
        linear_backward_input(context, through, pending->dnoise, block->weights.noise, tokens, hidden,
                              experts);
        vector_add(context, dnormed, through, (size_t)tokens * hidden);
    }
    rmsnorm_backward(context, pending->dmiddle, block->gradients.ffn_norm, dnormed, kept->middle,
                     block->weights.ffn_norm, tokens, hidden, model->norm_eps, true);
    scratch_release(context, dnormed);
}

void attention_block_backward_input(struct context *context, const struct attention_block *block,
                                    const struct attention_part *part, struct attention_kept *kept,
                                    struct attention_pending *pending, floatX *dinput, const floatX *dmiddle,
                                    const floatX *dweights, const floatX *input) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights, *g = &block->gradients;
    struct attention_shape shape = shape_of(block, part);
    struct attention_inputs inputs = inputs_of(block, kept);
    int tokens = part->sequences * part->seq_len, hidden = model->hidden, width = qkv_width(model);
    size_t elements = (size_t)tokens * hidden;
    memcpy(pending->dmiddle, dmiddle, elements * sizeof(floatX));
    if (model_layer_is_moe(model, block->layer))
        route_block_backward_input(context, block, part, kept, pending, dweights);
    floatX *dattended = scratch_floats(context, (size_t)tokens * query_width(model));
    floatX *dnormed = scratch_floats(context, elements), *dqkv = pending->dqkv;
    linear_backward_input(context, dattended, pending->dmiddle, w->out, tokens, query_width(model), hidden);
    attention_backward(context, &shape, dqkv, dqkv + query_width(model), dqkv + rotated_width(model), width,
                       g->sinks, dattended, kept->attended, kept->lse, &inputs);
    rotate_backward(context, &shape, block->rope, dqkv, width, kept->qkv, width, w->q_norm, w->k_norm,
                    g->q_norm, g->k_norm, model->norm_eps);
    linear_backward_input(context, dnormed, dqkv, w->qkv, tokens, hidden, width);
    memcpy(dinput, pending->dmiddle, elements * sizeof(floatX));
    rmsnorm_backward(context, dinput, g->input_norm, dnormed, input, w->input_norm, tokens, hidden,
                     model->norm_eps, true);
    scratch_release(context, dattended);
}

void attention_block_backward_weight(struct context *context, const struct attention_block *block,
                                     const struct attention_part *part, const struct attention_kept *kept,
                                     const struct attention_pending *pending, const floatX *input) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights, *g = &block->gradients;
    int tokens = part->sequences * part->seq_len, hidden = model->hidden, experts = model->moe.experts;
    void *mark = scratch_take(context, 0);
    linear_backward_weight(context, g->out, g->out_bias, pending->dmiddle, kept->attended, tokens,
                           query_width(model), hidden);
    const floatX *normed = normed_again(context, kept->normed, input, w->input_norm, tokens, model);
    linear_backward_weight(context, g->qkv, g->qkv_bias, pending->dqkv, normed, tokens, hidden,
                           qkv_width(model));
    if (model_layer_is_moe(model, block->layer)) {
        normed = normed_again(context, kept->ffn_normed, kept->middle, w->ffn_norm, tokens, model);
        linear_backward_weight(context, g->router, g->router_bias, pending->dlogits, normed, tokens, hidden,
                               experts);
        if (w->noise)
            linear_backward_weight(context, g->noise, g->noise_bias, pending->dnoise, normed, tokens, hidden,
                                   experts);
    }
    scratch_release(context, mark);
}

/* ---- expert block: placing --------------------------------------------------------------------------- */

static void place_expert_acts(const struct model *model, int layer, int routed, int firsts,
                              struct expert_kept *kept, struct placement *at) {
    int shared = shared_width(model, layer);
    kept->act = place_floats(at, routed, model->moe.expert_hidden);
    if (shared) kept->shared_act = place_floats(at, firsts, shared);
}

static struct expert_kept place_expert(const struct model *model, int layer, enum ffn_recompute recompute,
                                       int routed, int firsts, struct placement *at) {
    struct expert_kept kept = {0};
    int shared = shared_width(model, layer);
    kept.gate_up = place_floats(at, routed, 2 * model->moe.expert_hidden);
    if (shared) kept.shared_gate_up = place_floats(at, firsts, 2 * shared);
    if (recompute == FFN_NONE) place_expert_acts(model, layer, routed, firsts, &kept, at);
    return kept;
}

size_t expert_kept_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                         int firsts) {
    struct placement at = {0};
    place_expert(model, layer, recompute, routed, firsts, &at);
    return at.used;
}

struct expert_kept expert_kept_place(const struct model *model, int layer, enum ffn_recompute recompute,
                                     int routed, int firsts, void *memory) {
    return place_expert(model, layer, recompute, routed, firsts, &(struct placement){memory, 0});
}

size_t expert_restored_bytes(const struct model *model, int layer, int routed, int firsts) {
    struct placement at = {0};
    place_expert_acts(model, layer, routed, firsts, &(struct expert_kept){0}, &at);
    return at.used;
}

static struct expert_pending place_expert_pending(const struct model *model, int layer,
                                                  enum ffn_recompute recompute, int routed, int firsts,
                                                  struct placement *at) {
    struct expert_pending pending = {0};
    int shared = shared_width(model, layer);
    bool dropped = recompute != FFN_NONE;
    pending.d = place_floats(at, routed, model->hidden);
    if (dropped) pending.act = place_floats(at, routed, model->moe.expert_hidden);
    if (shared) pending.shared_d = place_floats(at, firsts, model->hidden);
    if (shared && dropped) pending.shared_act = place_floats(at, firsts, shared);
    return pending;
}

size_t expert_pending_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                            int firsts) {
    struct placement at = {0};
    place_expert_pending(model, layer, recompute, routed, firsts, &at);
    return at.used;
}

struct expert_pending expert_pending_place(const struct model *model, int layer, enum ffn_recompute recompute,
                                           int routed, int firsts, void *memory) {
    return place_expert_pending(model, layer, recompute, routed, firsts, &(struct placement){memory, 0});
}

/* ---- expert block: helpers --------------------------------------------------------------------------- */

static int routed_rows(const struct expert_block *block, const struct expert_part *part) {
    int routed = 0;
    for (int e = 0; e < block->experts; e++) routed += part->counts[e];
    return routed;
}

static struct groups gate_up_groups(const struct expert_block *block, const struct expert_part *part,
                                    const struct expert_tensors *tensors) {
    return (struct groups){block->experts, part->counts, tensors->gate_up,
                           block->model->moe.bias ? tensors->gate_up_bias : NULL};
}
static struct groups down_groups(const struct expert_block *block, const struct expert_part *part,
                                 const struct expert_tensors *tensors) {
    return (struct groups){block->experts, part->counts, tensors->down,
                           block->model->moe.bias ? tensors->down_bias : NULL};
}

static int expert_width(const struct expert_block *block) {
    return block->model->moe.expert_hidden;
}
static enum activation_function activation_of(const struct expert_block *block) {
    return (enum activation_function)block->model->moe.activation;
}

/* to (firsts, H) = the first copies among from (rows, H); returns how many. */
static int gather_firsts(const struct expert_part *part, int hidden, floatX *to, const floatX *from) {
    int firsts = 0;
    for (int r = 0; r < part->rows; r++)
        if (part->first[r])
            memmove(to + (size_t)firsts++ * hidden, from + (size_t)r * hidden, (size_t)hidden * sizeof *to);
    return firsts;
}

static void add_to_firsts(const struct expert_part *part, int hidden, floatX *to, const floatX *from) {
    for (int r = 0; r < part->rows; r++) {
        if (!part->first[r]) continue;
        floatX *restrict row = to + (size_t)r * hidden;
        for (int i = 0; i < hidden; i++) row[i] += from[i];
        from += hidden;
    }
}

/* ---- expert block, forward --------------------------------------------------------------------------- */

/* output (rows, H) = weight · expert(normed) where there is an expert, plus the residual of first copies */
static void weigh_output(const struct expert_part *part, int routed, int hidden, floatX *output,
                         const floatX *input) {
    for (int r = 0; r < part->rows; r++) {
        floatX *restrict row = output + (size_t)r * hidden, weight = r < routed ? part->weights[r] : 0;
        const floatX *restrict residual = input + (size_t)r * hidden;
        if (r >= routed) memset(row, 0, (size_t)hidden * sizeof *row);
        if (part->first[r])
            for (int i = 0; i < hidden; i++) row[i] = weight * row[i] + residual[i];
        else
            for (int i = 0; i < hidden; i++) row[i] *= weight;
    }
}

/* output's first copies += shared experts, or the dense FFN */
static void shared_block_forward(struct context *context, const struct expert_block *block,
                                 const struct expert_part *part, struct expert_kept *kept, floatX *output,
                                 const floatX *normed) {
    int width = shared_width(block->model, block->layer), hidden = block->model->hidden;
    if (!width) return;
    floatX *rows = scratch_floats(context, (size_t)part->rows * hidden);
    int firsts = gather_firsts(part, hidden, rows, normed);
    floatX *act = kept->shared_act ? kept->shared_act : scratch_floats(context, (size_t)firsts * width);
    linear_forward(context, kept->shared_gate_up, rows, block->shared.gate_up, block->shared.gate_up_bias,
                   firsts, hidden, 2 * width);
    activation_forward(context, act, kept->shared_gate_up, firsts, width, activation_of(block));
    linear_forward(context, rows, act, block->shared.down, block->shared.down_bias, firsts, width, hidden);
    add_to_firsts(part, hidden, output, rows);
    scratch_release(context, rows);
}

void expert_block_forward(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, struct expert_kept *kept, floatX *output,
                          const floatX *input) {
    const struct model *model = block->model;
    int routed = routed_rows(block, part), width = expert_width(block), hidden = model->hidden;
    struct groups gate_up = gate_up_groups(block, part, &block->weights);
    struct groups down = down_groups(block, part, &block->weights);
    floatX *normed = scratch_floats(context, (size_t)part->rows * hidden);
    floatX *act = kept->act ? kept->act : scratch_floats(context, (size_t)routed * width);
    rmsnorm_forward(context, normed, input, block->ffn_norm, part->rows, hidden, model->norm_eps);
    grouped_linear_forward(context, &gate_up, kept->gate_up, normed, hidden, 2 * width);
    activation_forward(context, act, kept->gate_up, routed, width, activation_of(block));
    grouped_linear_forward(context, &down, output, act, width, hidden);
    weigh_output(part, routed, hidden, output, input);
    shared_block_forward(context, block, part, kept, output, normed);
    scratch_release(context, normed);
}

void expert_block_restore(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, struct expert_kept *kept, void *memory) {
    int routed = routed_rows(block, part), firsts = 0;
    for (int r = 0; r < part->rows; r++) firsts += part->first[r];
    place_expert_acts(block->model, block->layer, routed, firsts, kept, &(struct placement){memory, 0});
    activation_forward(context, kept->act, kept->gate_up, routed, expert_width(block), activation_of(block));
    activation_forward(context, kept->shared_act, kept->shared_gate_up, kept->shared_act ? firsts : 0,
                       shared_width(block->model, block->layer), activation_of(block));
}

/* ---- expert block, backward -------------------------------------------------------------------------- */

/* The output of the activations: kept, or made anew in pending, before gate_up is overwritten by its
 * gradient. */
static const floatX *act_again(struct context *context, floatX *kept, floatX *pending, const floatX *gate_up,
                               int rows, int width, enum activation_function kind) {
    if (kept) return kept;
    activation_forward(context, pending, gate_up, rows, width, kind);
    return pending;
}

/* dweights (rows); d (routed, H) and dact (routed, D), of the weighted output, become those of the expert's
   own. With y = W act + b: d · y = (d W) · act + d · b, so y need not be kept. */
static void weights_backward(const struct expert_block *block, const struct expert_part *part,
                             floatX *dweights, floatX *d, floatX *dact, const floatX *act) {
    int hidden = block->model->hidden, width = expert_width(block), row = 0;
    for (int e = 0; e < block->experts; e++)
        for (int end = row + part->counts[e]; row < end; row++) {
            floatX *restrict d_row = d + (size_t)row * hidden, *restrict dact_row =
                                                                   dact + (size_t)row * width;
            floatX weight = part->weights[row];
            dweights[row] = vector_dot(dact_row, act + (size_t)row * width, width);
            if (block->model->moe.bias)
                dweights[row] += vector_dot(d_row, block->weights.down_bias[e], hidden);
            for (int i = 0; i < hidden; i++) d_row[i] *= weight;
            for (int i = 0; i < width; i++) dact_row[i] *= weight;
        }
    for (; dweights && row < part->rows; row++) dweights[row] = 0;
}

/* dnormed's first copies += through shared experts, or the dense FFN */
static void shared_block_backward_input(struct context *context, const struct expert_block *block,
                                        const struct expert_part *part, struct expert_kept *kept,
                                        struct expert_pending *pending, floatX *dnormed,
                                        const floatX *doutput) {
    int width = shared_width(block->model, block->layer), hidden = block->model->hidden;
    if (!width) return;
    int firsts = gather_firsts(part, hidden, pending->shared_d, doutput);
    floatX *dact = scratch_floats(context, (size_t)firsts * width);
    floatX *through = scratch_floats(context, (size_t)firsts * hidden);
    act_again(context, kept->shared_act, pending->shared_act, kept->shared_gate_up, firsts, width,
              activation_of(block));
    linear_backward_input(context, dact, pending->shared_d, block->shared.down, firsts, width, hidden);
    activation_backward(context, kept->shared_gate_up, dact, kept->shared_gate_up, firsts, width,
                        activation_of(block));
    linear_backward_input(context, through, kept->shared_gate_up, block->shared.gate_up, firsts, hidden,
                          2 * width);
    add_to_firsts(part, hidden, dnormed, through);
    scratch_release(context, dact);
}

void expert_block_backward_input(struct context *context, const struct expert_block *block,
                                 const struct expert_part *part, struct expert_kept *kept,
                                 struct expert_pending *pending, floatX *dinput, floatX *dweights,
                                 const floatX *doutput, const floatX *input) {
    const struct model *model = block->model;
    int routed = routed_rows(block, part), width = expert_width(block), hidden = model->hidden;
    struct groups gate_up = gate_up_groups(block, part, &block->weights);
    struct groups down = down_groups(block, part, &block->weights);
    floatX *dact = scratch_floats(context, (size_t)routed * width);
    floatX *dnormed = scratch_floats(context, (size_t)part->rows * hidden);
    const floatX *act =
        act_again(context, kept->act, pending->act, kept->gate_up, routed, width, activation_of(block));
    if (routed) memcpy(pending->d, doutput, (size_t)routed * hidden * sizeof(floatX));
    grouped_linear_backward_input(context, &down, dact, pending->d, width, hidden);
    weights_backward(block, part, dweights, pending->d, dact, act);
    activation_backward(context, kept->gate_up, dact, kept->gate_up, routed, width, activation_of(block));
    grouped_linear_backward_input(context, &gate_up, dnormed, kept->gate_up, hidden, 2 * width);
    memset(dnormed + (size_t)routed * hidden, 0, (size_t)(part->rows - routed) * hidden * sizeof(floatX));
    shared_block_backward_input(context, block, part, kept, pending, dnormed, doutput);
    rmsnorm_backward(context, dinput, block->ffn_norm_gradient, dnormed, input, block->ffn_norm, part->rows,
                     hidden, model->norm_eps, false);
    for (int r = 0; r < part->rows; r++) /* the residual */
        for (int i = 0; part->first[r] && i < hidden; i++)
            dinput[(size_t)r * hidden + i] += doutput[(size_t)r * hidden + i];
    scratch_release(context, dact);
}

void expert_block_backward_weight(struct context *context, const struct expert_block *block,
                                  const struct expert_part *part, const struct expert_kept *kept,
                                  const struct expert_pending *pending, const floatX *input) {
    const struct model *model = block->model;
    int width = expert_width(block), shared = shared_width(model, block->layer), hidden = model->hidden;
    struct groups gate_up = gate_up_groups(block, part, &block->gradients);
    struct groups down = down_groups(block, part, &block->gradients);
    const floatX *act = kept->act ? kept->act : pending->act;
    const floatX *shared_act = kept->shared_act ? kept->shared_act : pending->shared_act;
    floatX *normed = scratch_floats(context, (size_t)part->rows * hidden);
    rmsnorm_forward(context, normed, input, block->ffn_norm, part->rows, hidden, model->norm_eps);
    grouped_linear_backward_weight(context, &down, pending->d, act, width, hidden);
    grouped_linear_backward_weight(context, &gate_up, kept->gate_up, normed, hidden, 2 * width);
    if (shared) {
        int firsts = gather_firsts(part, hidden, normed, normed);
        linear_backward_weight(context, block->shared_gradients.down, block->shared_gradients.down_bias,
                               pending->shared_d, shared_act, firsts, shared, hidden);
        linear_backward_weight(context, block->shared_gradients.gate_up, block->shared_gradients.gate_up_bias,
                               kept->shared_gate_up, normed, firsts, hidden, 2 * shared);
    }
    scratch_release(context, normed);
}

/* ---- head -------------------------------------------------------------------------------------------- */

double head_block_forward_backward(struct context *context, const struct head_block *block, floatX *dinput,
                                   const floatX *input, const int *targets, int tokens, double scale) {
    const struct model *model = block->model;
    void *mark = scratch_take(context, 0);
    const floatX *normed = normed_again(context, NULL, input, block->norm, tokens, model);
    double loss = head_forward_backward(context, dinput, block->output_gradient, normed, block->output,
                                        targets, tokens, model->hidden, model->vocab, scale);
    rmsnorm_backward(context, dinput, block->norm_gradient, dinput, input, block->norm, tokens, model->hidden,
                     model->norm_eps, false);
    scratch_release(context, mark);
    return loss;
}
