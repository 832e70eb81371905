/*
The attention block and the expert block: forward, backward in two halves, and where kept activations lie.
*/
#include "layers/blocks.h"

#include <assert.h>
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

static struct attention_kept place_attention(const struct model *model, int layer,
                                             enum attention_recompute recompute, int tokens,
                                             struct placement *stays, struct placement *dropped) {
    struct placement *norms = recompute >= ATTENTION_NORMS ? dropped : stays;
    struct placement *projections = recompute >= ATTENTION_PROJECTIONS ? dropped : stays;
    struct placement *rest = recompute == ATTENTION_FULL ? dropped : stays;
    struct attention_kept kept = {0};
    size_t copies = (size_t)tokens * model->moe.top_k;
    bool moe = model_layer_is_moe(model, layer);
    kept.normed = place_floats(norms, tokens, model->hidden);
    if (moe) kept.ffn_normed = place_floats(norms, tokens, model->hidden);
    kept.qkv = place_floats(projections, tokens, qkv_width(model));
    kept.qk = model->attention.qk_norm ? place_floats(projections, tokens, rotated_width(model)) : kept.qkv;
    kept.attended = place_floats(rest, tokens, query_width(model));
    kept.lse = place_floats(rest, tokens, model->attention.heads);
    kept.middle = place_floats(rest, tokens, model->hidden);
    if (!moe) return kept;
    kept.route.logits = place_floats(rest, tokens, model->moe.experts);
    if (model->moe.router == ROUTER_NOISY_TOPK) kept.noise = place_floats(rest, tokens, model->moe.experts);
    kept.route.weights = place_floats(rest, tokens, model->moe.top_k);
    kept.route.ids = place(rest, copies, sizeof(int));
    kept.route.kept = place(rest, copies, 1);
    return kept;
}

size_t attention_kept_bytes(const struct model *model, int layer, enum attention_recompute recompute,
                            int tokens) {
    struct placement stays = {0}, dropped = {0};
    place_attention(model, layer, recompute, tokens, &stays, &dropped);
    return stays.used;
}

size_t attention_restored_bytes(const struct model *model, int layer, enum attention_recompute recompute,
                                int tokens) {
    struct placement stays = {0}, dropped = {0};
    place_attention(model, layer, recompute, tokens, &stays, &dropped);
    return dropped.used;
}

struct attention_kept attention_kept_place(const struct model *model, int layer,
                                           enum attention_recompute recompute, int tokens, void *kept,
                                           void *restored) {
    return place_attention(model, layer, recompute, tokens, &(struct placement){kept, 0},
                           &(struct placement){restored, 0});
}

size_t attention_gathered_bytes(const struct model *model, struct sequences sequences) {
    return (size_t)sequences.count * sequences.seq_len * gathered_width(model) * sizeof(floatX);
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

/* ---- keys and values of whole sequences -------------------------------------------------------------- */

/* This GPU's rows of a sequence, piece by piece, beside the sequence's rows in gathered. */
static void copy_rows(const struct attention_part *part, floatX *gathered, int gathered_stride, floatX *own,
                      int own_stride, int width, bool to_own) {
    const struct sequences *all = &part->sequences;
    for (int s = 0; s < all->count; s++)
        for (int row = 0; row < rows_of_sequence(*all); row++) {
            floatX *there =
                gathered + ((size_t)s * all->seq_len + position_of_row(*all, row)) * gathered_stride;
            floatX *here = own + ((size_t)s * rows_of_sequence(*all) + row) * own_stride;
            memcpy(to_own ? here : there, to_own ? there : here, (size_t)width * sizeof *here);
        }
}

static size_t piece_elements(const struct model *model, const struct attention_part *part) {
    return (size_t)piece_here(part->sequences, 0).rows * gathered_width(model);
}

/* part->gathered (sequences · S, keys and values of a row) from this GPU's and those of the others. */
static void gather_keys(const struct model *model, const struct attention_part *part,
                        const struct attention_kept *kept) {
    int width = key_width(model), stride = gathered_width(model);
    copy_rows(part, part->gathered, stride, kept->qk + query_width(model), rotated_stride(model), width,
              false);
    copy_rows(part, part->gathered + width, stride, kept->qkv + rotated_width(model), qkv_width(model), width,
              false);
    part->collectives->gather(part->collectives->owner, part->gathered, part->sequences.count,
                              piece_elements(model, part) * sizeof(floatX));
}

/* dqkv's keys and values from gradients, laid out as gathered is, of this GPU's and the others' queries. */
static void scatter_gradients(const struct model *model, const struct attention_part *part, floatX *gradients,
                              floatX *dqkv) {
    int width = key_width(model), stride = gathered_width(model);
    part->collectives->scatter(part->collectives->owner, gradients, part->sequences.count,
                               piece_elements(model, part));
    copy_rows(part, gradients, stride, dqkv + query_width(model), qkv_width(model), width, true);
    copy_rows(part, gradients + width, stride, dqkv + rotated_width(model), qkv_width(model), width, true);
}

static bool holds_parts(const struct attention_part *part) {
    return part->sequences.cp > 1;
}

static struct attention_inputs inputs_of(const struct attention_block *block,
                                         const struct attention_part *part,
                                         const struct attention_kept *kept) {
    const struct model *model = block->model;
    int rotated = rotated_stride(model), gathered = gathered_width(model);
    struct attention_inputs inputs = {
        kept->qk,         kept->qk + query_width(model), kept->qkv + rotated_width(model), rotated, rotated,
        qkv_width(model), block->weights.sinks};
    if (!holds_parts(part)) return inputs;
    inputs.k = part->gathered;
    inputs.v = part->gathered + key_width(model);
    inputs.k_stride = inputs.v_stride = gathered;
    return inputs;
}

/* ---- attention block, forward ------------------------------------------------------------------------ */

static struct attention_shape shape_of(const struct attention_block *block,
                                       const struct attention_part *part) {
    const struct model *model = block->model;
    return (struct attention_shape){part->sequences, model->attention.heads, model->attention.kv_heads,
                                    model->attention.head_dim, model_layer_window(model, block->layer)};
}

static struct route_key key_of(const struct attention_block *block, const struct attention_part *part) {
    struct route_key key = part->key;
    key.layer = block->layer;
    return key;
}

static void route_whole_sequences(struct context *context, const struct attention_block *block,
                                  const struct attention_part *part, struct route *route) {
    const struct model *model = block->model;
    size_t choices = (size_t)model->moe.top_k * model->moe.experts;
    size_t pieces = (size_t)part->sequences.count * pieces_of_sequence(part->sequences);
    int *counts = scratch_take(context, pieces * choices * sizeof *counts);
    route_choose(context, model, route, part->forced, block->layer, part->sequences);
    route_count(model, counts, route, part->sequences);
    if (holds_parts(part))
        part->collectives->gather(part->collectives->owner, counts, part->sequences.count,
                                  choices * sizeof *counts);
    route_settle(model, route, counts, part->sequences);
    scratch_release(context, counts);
}

static void ffn_norm_forward(struct context *context, const struct attention_block *block,
                             const struct attention_part *part, struct attention_kept *kept) {
    rmsnorm_forward(context, kept->ffn_normed, kept->middle, block->weights.ffn_norm,
                    rows_of_all(part->sequences), block->model->hidden, block->model->norm_eps);
}

static void route_block_forward(struct context *context, const struct attention_block *block,
                                const struct attention_part *part, struct attention_kept *kept) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights;
    int tokens = rows_of_all(part->sequences), experts = model->moe.experts;
    ffn_norm_forward(context, block, part, kept);
    linear_forward(context, kept->route.logits, kept->ffn_normed, w->router, w->router_bias, tokens,
                   model->hidden, experts);
    if (w->noise) {
        linear_forward(context, kept->noise, kept->ffn_normed, w->noise, w->noise_bias, tokens, model->hidden,
                       experts);
        noise_forward(context, kept->route.logits, kept->noise, key_of(block, part), part->sequences,
                      experts);
    }
    route_whole_sequences(context, block, part, &kept->route);
}

static void input_norm_forward(struct context *context, const struct attention_block *block,
                               const struct attention_part *part, struct attention_kept *kept,
                               const floatX *input) {
    rmsnorm_forward(context, kept->normed, input, block->weights.input_norm, rows_of_all(part->sequences),
                    block->model->hidden, block->model->norm_eps);
}

static void project_forward(struct context *context, const struct attention_block *block,
                            const struct attention_part *part, struct attention_kept *kept) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights;
    struct attention_shape shape = shape_of(block, part);
    int width = qkv_width(model);
    linear_forward(context, kept->qkv, kept->normed, w->qkv, w->qkv_bias, rows_of_all(part->sequences),
                   model->hidden, width);
    rotate_forward(context, &shape, block->rope, kept->qk, rotated_stride(model), kept->qkv, width, w->q_norm,
                   w->k_norm, model->norm_eps);
}

void attention_block_forward(struct context *context, const struct attention_block *block,
                             const struct attention_part *part, struct attention_kept *kept,
                             const floatX *input) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights;
    struct attention_shape shape = shape_of(block, part);
    struct attention_inputs inputs = inputs_of(block, part, kept);
    int tokens = rows_of_all(part->sequences), hidden = model->hidden;
    input_norm_forward(context, block, part, kept, input);
    project_forward(context, block, part, kept);
    if (holds_parts(part)) gather_keys(model, part, kept);
    attention_forward(context, &shape, kept->attended, kept->lse, &inputs);
    linear_forward(context, kept->middle, kept->attended, w->out, w->out_bias, tokens, query_width(model),
                   hidden);
    vector_add(context, kept->middle, input, (size_t)tokens * hidden);
    if (model_layer_is_moe(model, block->layer)) route_block_forward(context, block, part, kept);
}

void attention_block_restore(struct context *context, const struct attention_block *block,
                             const struct attention_part *part, enum attention_recompute recompute,
                             struct attention_kept *kept, const floatX *input) {
    assert(recompute == ATTENTION_NORMS || recompute == ATTENTION_PROJECTIONS);
    input_norm_forward(context, block, part, kept, input);
    if (recompute == ATTENTION_PROJECTIONS) project_forward(context, block, part, kept);
    if (kept->ffn_normed) ffn_norm_forward(context, block, part, kept);
}

/* ---- attention block, backward ----------------------------------------------------------------------- */

/* pending->dmiddle += through the router */
static void route_block_backward_input(struct context *context, const struct attention_block *block,
                                       const struct attention_part *part, const struct attention_kept *kept,
                                       struct attention_pending *pending, const floatX *dweights) {
    const struct model *model = block->model;
    int tokens = rows_of_all(part->sequences), experts = model->moe.experts, hidden = model->hidden;
    floatX *dnormed = scratch_floats(context, (size_t)tokens * hidden);
    route_backward(context, model, pending->dlogits, dweights, &kept->route, part->sequences, part->aux_scale,
                   part->z_scale);
    linear_backward_input(context, dnormed, pending->dlogits, block->weights.router, tokens, hidden, experts);
    if (block->weights.noise) {
        floatX *through = scratch_floats(context, (size_t)tokens * hidden);
        noise_backward(context, pending->dnoise, pending->dlogits, kept->noise, key_of(block, part),
                       part->sequences, experts);
        linear_backward_input(context, through, pending->dnoise, block->weights.noise, tokens, hidden,
                              experts);
        vector_add(context, dnormed, through, (size_t)tokens * hidden);
    }
    rmsnorm_backward(context, pending->dmiddle, block->gradients.ffn_norm, dnormed, kept->middle,
                     block->weights.ffn_norm, tokens, hidden, model->norm_eps, true);
    scratch_release(context, dnormed);
}

/* dqkv of the rotated queries and keys from dattended. */
static void core_backward(struct context *context, const struct attention_block *block,
                          const struct attention_part *part, const struct attention_kept *kept, floatX *dqkv,
                          const floatX *dattended) {
    const struct model *model = block->model;
    struct attention_shape shape = shape_of(block, part);
    struct attention_inputs inputs = inputs_of(block, part, kept);
    int width = qkv_width(model);
    struct attention_gradients gradients = {
        dqkv, dqkv + query_width(model), dqkv + rotated_width(model), width, width, block->gradients.sinks};
    if (holds_parts(part)) {
        gather_keys(model, part, kept);
        gradients.k = part->gathered + attention_gathered_bytes(model, part->sequences) / sizeof(floatX);
        gradients.v = gradients.k + key_width(model);
        gradients.kv_stride = gathered_width(model);
    }
    attention_backward(context, &shape, &gradients, dattended, kept->attended, kept->lse, &inputs);
    if (holds_parts(part)) scatter_gradients(model, part, gradients.k, dqkv);
}

void attention_block_backward_input(struct context *context, const struct attention_block *block,
                                    const struct attention_part *part, struct attention_kept *kept,
                                    struct attention_pending *pending, floatX *dinput, const floatX *dmiddle,
                                    const floatX *dweights, const floatX *input) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights, *g = &block->gradients;
    struct attention_shape shape = shape_of(block, part);
    int tokens = rows_of_all(part->sequences), hidden = model->hidden, width = qkv_width(model);
    size_t elements = (size_t)tokens * hidden;
    memcpy(pending->dmiddle, dmiddle, elements * sizeof(floatX));
    if (model_layer_is_moe(model, block->layer))
        route_block_backward_input(context, block, part, kept, pending, dweights);
    floatX *dattended = scratch_floats(context, (size_t)tokens * query_width(model));
    floatX *dnormed = scratch_floats(context, elements), *dqkv = pending->dqkv;
    linear_backward_input(context, dattended, pending->dmiddle, w->out, tokens, query_width(model), hidden);
    core_backward(context, block, part, kept, dqkv, dattended);
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
                                     const struct attention_pending *pending) {
    const struct model *model = block->model;
    const struct attention_tensors *w = &block->weights, *g = &block->gradients;
    int tokens = rows_of_all(part->sequences), hidden = model->hidden, experts = model->moe.experts;
    linear_backward_weight(context, g->out, g->out_bias, pending->dmiddle, kept->attended, tokens,
                           query_width(model), hidden);
    linear_backward_weight(context, g->qkv, g->qkv_bias, pending->dqkv, kept->normed, tokens, hidden,
                           qkv_width(model));
    if (!model_layer_is_moe(model, block->layer)) return;
    linear_backward_weight(context, g->router, g->router_bias, pending->dlogits, kept->ffn_normed, tokens,
                           hidden, experts);
    if (w->noise)
        linear_backward_weight(context, g->noise, g->noise_bias, pending->dnoise, kept->ffn_normed, tokens,
                               hidden, experts);
}

/* ---- expert block: placing --------------------------------------------------------------------------- */

static struct expert_kept place_expert(const struct model *model, int layer, enum ffn_recompute recompute,
                                       int routed, int firsts, struct placement *stays,
                                       struct placement *dropped) {
    struct placement *activations = recompute >= FFN_ACTIVATION ? dropped : stays;
    struct placement *rest = recompute == FFN_FULL ? dropped : stays;
    struct expert_kept kept = {0};
    int shared = shared_width(model, layer);
    if (!model_layer_is_moe(model, layer)) kept.normed = place_floats(activations, firsts, model->hidden);
    kept.gate_up = place_floats(rest, routed, 2 * model->moe.expert_hidden);
    kept.act = place_floats(activations, routed, model->moe.expert_hidden);
    if (!shared) return kept;
    kept.shared_gate_up = place_floats(rest, firsts, 2 * shared);
    kept.shared_act = place_floats(activations, firsts, shared);
    return kept;
}

size_t expert_kept_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                         int firsts) {
    struct placement stays = {0}, dropped = {0};
    place_expert(model, layer, recompute, routed, firsts, &stays, &dropped);
    return stays.used;
}

size_t expert_restored_bytes(const struct model *model, int layer, enum ffn_recompute recompute, int routed,
                             int firsts) {
    struct placement stays = {0}, dropped = {0};
    place_expert(model, layer, recompute, routed, firsts, &stays, &dropped);
    return dropped.used;
}

struct expert_kept expert_kept_place(const struct model *model, int layer, enum ffn_recompute recompute,
                                     int routed, int firsts, void *kept, void *restored) {
    return place_expert(model, layer, recompute, routed, firsts, &(struct placement){kept, 0},
                        &(struct placement){restored, 0});
}

static struct expert_pending place_expert_pending(const struct model *model, int layer, int routed,
                                                  int firsts, struct placement *at) {
    struct expert_pending pending = {.d = place_floats(at, routed, model->hidden)};
    if (shared_width(model, layer)) pending.shared_d = place_floats(at, firsts, model->hidden);
    return pending;
}

size_t expert_pending_bytes(const struct model *model, int layer, int routed, int firsts) {
    struct placement at = {0};
    place_expert_pending(model, layer, routed, firsts, &at);
    return at.used;
}

struct expert_pending expert_pending_place(const struct model *model, int layer, int routed, int firsts,
                                           void *memory) {
    return place_expert_pending(model, layer, routed, firsts, &(struct placement){memory, 0});
}

/* ---- expert block: helpers --------------------------------------------------------------------------- */

static int routed_rows(const struct expert_block *block, const struct expert_part *part) {
    int routed = 0;
    for (int e = 0; e < block->experts; e++) routed += part->counts[e];
    return routed;
}

static int first_rows(const struct expert_part *part) {
    int firsts = 0;
    for (int r = 0; r < part->rows; r++) firsts += part->first[r];
    return firsts;
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

/* Every row normalised: into what a dense layer keeps, else into scratch. */
static floatX *norm_rows(struct context *context, const struct expert_block *block,
                         const struct expert_part *part, const struct expert_kept *kept,
                         const floatX *input) {
    int hidden = block->model->hidden;
    floatX *normed = kept->normed;
    if (!normed) normed = scratch_floats(context, (size_t)part->rows * hidden);
    rmsnorm_forward(context, normed, input, block->ffn_norm, part->rows, hidden, block->model->norm_eps);
    return normed;
}

static void gate_up_forward(struct context *context, const struct expert_block *block,
                            const struct expert_part *part, struct expert_kept *kept, const floatX *normed) {
    struct groups gate_up = gate_up_groups(block, part, &block->weights);
    int hidden = block->model->hidden, shared = shared_width(block->model, block->layer);
    grouped_linear_forward(context, &gate_up, kept->gate_up, normed, hidden, 2 * expert_width(block));
    if (!shared) return;
    floatX *rows = scratch_floats(context, (size_t)part->rows * hidden);
    int firsts = gather_firsts(part, hidden, rows, normed);
    linear_forward(context, kept->shared_gate_up, rows, block->shared.gate_up, block->shared.gate_up_bias,
                   firsts, hidden, 2 * shared);
    scratch_release(context, rows);
}

static void activations_forward(struct context *context, const struct expert_block *block,
                                const struct expert_part *part, struct expert_kept *kept) {
    int shared = shared_width(block->model, block->layer);
    activation_forward(context, kept->act, kept->gate_up, routed_rows(block, part), expert_width(block),
                       activation_of(block));
    if (shared)
        activation_forward(context, kept->shared_act, kept->shared_gate_up, first_rows(part), shared,
                           activation_of(block));
}

/* output's first copies += shared experts, or the dense FFN */
static void shared_down_forward(struct context *context, const struct expert_block *block,
                                const struct expert_part *part, struct expert_kept *kept, floatX *output) {
    int width = shared_width(block->model, block->layer), hidden = block->model->hidden;
    if (!width) return;
    int firsts = first_rows(part);
    floatX *rows = scratch_floats(context, (size_t)firsts * hidden);
    linear_forward(context, rows, kept->shared_act, block->shared.down, block->shared.down_bias, firsts,
                   width, hidden);
    add_to_firsts(part, hidden, output, rows);
    scratch_release(context, rows);
}

void expert_block_forward(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, struct expert_kept *kept, floatX *output,
                          const floatX *input) {
    struct groups down = down_groups(block, part, &block->weights);
    int hidden = block->model->hidden;
    void *mark = scratch_take(context, 0);
    gate_up_forward(context, block, part, kept, norm_rows(context, block, part, kept, input));
    activations_forward(context, block, part, kept);
    grouped_linear_forward(context, &down, output, kept->act, expert_width(block), hidden);
    weigh_output(part, routed_rows(block, part), hidden, output, input);
    shared_down_forward(context, block, part, kept, output);
    scratch_release(context, mark);
}

void expert_block_restore(struct context *context, const struct expert_block *block,
                          const struct expert_part *part, enum ffn_recompute recompute,
                          struct expert_kept *kept, const floatX *input) {
    void *mark = scratch_take(context, 0);
    if (recompute == FFN_FULL)
        gate_up_forward(context, block, part, kept, norm_rows(context, block, part, kept, input));
    else if (kept->normed)
        norm_rows(context, block, part, kept, input);
    activations_forward(context, block, part, kept);
    scratch_release(context, mark);
}

/* ---- expert block, backward -------------------------------------------------------------------------- */

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
    if (routed) memcpy(pending->d, doutput, (size_t)routed * hidden * sizeof(floatX));
    grouped_linear_backward_input(context, &down, dact, pending->d, width, hidden);
    weights_backward(block, part, dweights, pending->d, dact, kept->act);
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
    void *mark = scratch_take(context, 0);
    floatX *normed = kept->normed ? kept->normed : norm_rows(context, block, part, kept, input);
    grouped_linear_backward_weight(context, &down, pending->d, kept->act, width, hidden);
    grouped_linear_backward_weight(context, &gate_up, kept->gate_up, normed, hidden, 2 * width);
    if (shared) {
        int firsts = gather_firsts(part, hidden, normed, normed);
        linear_backward_weight(context, block->shared_gradients.down, block->shared_gradients.down_bias,
                               pending->shared_d, kept->shared_act, firsts, shared, hidden);
        linear_backward_weight(context, block->shared_gradients.gate_up, block->shared_gradients.gate_up_bias,
                               kept->shared_gate_up, normed, firsts, hidden, 2 * shared);
    }
    scratch_release(context, mark);
}

/* ---- head -------------------------------------------------------------------------------------------- */

double head_block_forward_backward(struct context *context, const struct head_block *block, floatX *dinput,
                                   const floatX *input, const int *targets, int tokens, double scale) {
    const struct model *model = block->model;
    floatX *normed = scratch_floats(context, (size_t)tokens * model->hidden);
    rmsnorm_forward(context, normed, input, block->norm, tokens, model->hidden, model->norm_eps);
    double loss = head_forward_backward(context, dinput, block->output_gradient, normed, block->output,
                                        targets, tokens, model->hidden, model->vocab, scale);
    rmsnorm_backward(context, dinput, block->norm_gradient, dinput, input, block->norm, tokens, model->hidden,
                     model->norm_eps, false);
    scratch_release(context, normed);
    return loss;
}
