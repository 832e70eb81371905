/*
The single-process training step.

Read it from the bottom: a batch is a few sequences at a time through embedding, layers and head, then back. A
layer is attention and a feed-forward part; backward functions stand below their forward ones and undo them
line by line. Every activation is kept: memory is not the point here.
*/
#include "layers/reference.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What one layer keeps for its backward pass. T tokens, H hidden, E experts, K copies a token, D expert
 * width. */
struct kept {
    floatX *input;          /* (T, H) */
    floatX *normed;         /* (T, H) into the projections */
    floatX *qkv;            /* (T, heads + 2 kv_heads, head_dim) as projected */
    floatX *qk;             /* (T, heads + kv_heads, head_dim) normalised and rotated */
    floatX *attended, *lse; /* (T, heads, head_dim), (T, heads) */
    floatX *middle;         /* (T, H) after attention */
    floatX *ffn_normed;     /* (T, H) into router and experts */
    floatX *noise;          /* (T, E) or NULL */
    struct route route;
    int *order, *counts, *row_of; /* copies in expert order; rows an expert; a copy's row, −1 dropped */
    int copies;
    floatX *rows, *gate_up, *act;        /* (copies, H), (copies, 2 D), (copies, D) */
    floatX *shared_gate_up, *shared_act; /* (T, 2 D'), (T, D'): shared experts or dense FFN; NULL without */
};

struct reference_memory {
    struct arena *arena;
    struct rope rope;
    struct kept *kept;                                        /* (layers) */
    struct attention_tensors *attention, *attention_gradient; /* (layers) */
    struct ffn_tensors *shared, *shared_gradient;             /* (layers) */
    struct expert_tensors *experts, *expert_gradients;        /* (layers) */
    floatX *output, *final_normed;                            /* (T, H) of the last layer */
};

/* Copies of one micro-batch; what varies between the calls below. */
struct part {
    struct reference *reference;
    struct reference_memory *memory;
    const struct model *model;
    int sequences, tokens; /* of this part */
    struct route_key key;
    double aux_scale, z_scale;
};

/* ---- shapes ------------------------------------------------------------------------------------------ */

/* Of routed and shared experts and of dense layers alike. */
static enum activation_function expert_activation(const struct model *model) {
    return (enum activation_function)model->moe.activation;
}

static struct sequences part_sequences(const struct part *part) {
    return whole_sequences(part->sequences, part->reference->seq_len);
}

static struct attention_shape attention_shape(const struct part *part, int layer) {
    const struct model *model = part->model;
    return (struct attention_shape){part_sequences(part), model->attention.heads, model->attention.kv_heads,
                                    model->attention.head_dim, model_layer_window(model, layer)};
}

static struct attention_inputs attention_inputs(const struct model *model, const struct kept *kept,
                                                const floatX *sinks) {
    return (struct attention_inputs){kept->qk,
                                     kept->qk + query_width(model),
                                     kept->qkv + rotated_width(model),
                                     rotated_width(model),
                                     rotated_width(model),
                                     qkv_width(model),
                                     sinks};
}

/* ---- attention --------------------------------------------------------------------------------------- */

static void attention_layer_forward(const struct part *part, int layer) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    const struct attention_tensors *w = &part->memory->attention[layer];
    struct attention_shape shape = attention_shape(part, layer);
    struct attention_inputs inputs = attention_inputs(model, kept, w->sinks);
    int hidden = model->hidden, tokens = part->tokens;
    rmsnorm_forward(context, kept->normed, kept->input, w->input_norm, tokens, hidden, model->norm_eps);
    linear_forward(context, kept->qkv, kept->normed, w->qkv, w->qkv_bias, tokens, hidden, qkv_width(model));
    rotate_forward(context, &shape, &part->memory->rope, kept->qk, rotated_width(model), kept->qkv,
                   qkv_width(model), w->q_norm, w->k_norm, model->norm_eps);
    attention_forward(context, &shape, kept->attended, kept->lse, &inputs);
    linear_forward(context, kept->middle, kept->attended, w->out, w->out_bias, tokens, query_width(model),
                   hidden);
    vector_add(context, kept->middle, kept->input, (size_t)tokens * hidden);
}

/* d (T, H): gradient after attention → before it, in place */
static void attention_layer_backward(const struct part *part, int layer, floatX *d) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    const struct attention_tensors *w = &part->memory->attention[layer];
    const struct attention_tensors *g = &part->memory->attention_gradient[layer];
    struct attention_shape shape = attention_shape(part, layer);
    struct attention_inputs inputs = attention_inputs(model, kept, w->sinks);
    int hidden = model->hidden, tokens = part->tokens, query = query_width(model), width = qkv_width(model);
    floatX *dattended = scratch_floats(context, (size_t)tokens * query);
    floatX *dqkv = scratch_floats(context, (size_t)tokens * width);
    floatX *dnormed = scratch_floats(context, (size_t)tokens * hidden);
    linear_backward_input(context, dattended, d, w->out, tokens, query, hidden);
    linear_backward_weight(context, g->out, g->out_bias, d, kept->attended, tokens, query, hidden);
    struct attention_gradients gradients = {dqkv,  dqkv + query, dqkv + rotated_width(model),
                                            width, width,        g->sinks};
    attention_backward(context, &shape, &gradients, dattended, kept->attended, kept->lse, &inputs);
    rotate_backward(context, &shape, &part->memory->rope, dqkv, width, kept->qkv, width, w->q_norm, w->k_norm,
                    g->q_norm, g->k_norm, model->norm_eps);
    linear_backward_input(context, dnormed, dqkv, w->qkv, tokens, hidden, width);
    linear_backward_weight(context, g->qkv, g->qkv_bias, dqkv, kept->normed, tokens, hidden, width);
    rmsnorm_backward(context, d, g->input_norm, dnormed, kept->input, w->input_norm, tokens, hidden,
                     model->norm_eps, true);
    scratch_release(context, dattended);
}

/* ---- router ------------------------------------------------------------------------------------------ */

static struct route_key layer_key(const struct part *part, int layer) {
    struct route_key key = part->key;
    key.layer = layer;
    return key;
}

static void router_forward(const struct part *part, int layer) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    const struct attention_tensors *w = &part->memory->attention[layer];
    int experts = model->moe.experts, tokens = part->tokens, hidden = model->hidden;
    linear_forward(context, kept->route.logits, kept->ffn_normed, w->router, w->router_bias, tokens, hidden,
                   experts);
    if (w->noise) {
        linear_forward(context, kept->noise, kept->ffn_normed, w->noise, w->noise_bias, tokens, hidden,
                       experts);
        noise_forward(context, kept->route.logits, kept->noise, layer_key(part, layer), part_sequences(part),
                      experts);
    }
    route_forward(context, model, &kept->route, part->reference->forced, layer, part_sequences(part));
}

/* dnormed (T, H) += through the router, from dweights (T, K) */
static void router_backward(const struct part *part, int layer, floatX *dnormed, const floatX *dweights) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    const struct attention_tensors *w = &part->memory->attention[layer];
    const struct attention_tensors *g = &part->memory->attention_gradient[layer];
    int experts = model->moe.experts, tokens = part->tokens, hidden = model->hidden;
    floatX *dlogits = scratch_floats(context, (size_t)tokens * experts);
    floatX *through = scratch_floats(context, (size_t)tokens * hidden);
    route_backward(context, model, dlogits, dweights, &kept->route, part_sequences(part), part->aux_scale,
                   part->z_scale);
    linear_backward_input(context, through, dlogits, w->router, tokens, hidden, experts);
    linear_backward_weight(context, g->router, g->router_bias, dlogits, kept->ffn_normed, tokens, hidden,
                           experts);
    vector_add(context, dnormed, through, (size_t)tokens * hidden);
    if (w->noise) {
        noise_backward(context, dlogits, dlogits, kept->noise, layer_key(part, layer), part_sequences(part),
                       experts);
        linear_backward_input(context, through, dlogits, w->noise, tokens, hidden, experts);
        linear_backward_weight(context, g->noise, g->noise_bias, dlogits, kept->ffn_normed, tokens, hidden,
                               experts);
        vector_add(context, dnormed, through, (size_t)tokens * hidden);
    }
    scratch_release(context, dlogits);
}

/* ---- moving rows between token order and expert order ------------------------------------------------ */

enum { ROWS_A_TASK = 32 };
struct movement {
    const struct kept *kept;
    int tokens, top_k, hidden;
    const floatX *from, *weights; /* weights (T, K) or NULL: 1 */
    floatX *to;
};

static int movement_end(int task, int rows) {
    int end = (task + 1) * ROWS_A_TASK;
    return end < rows ? end : rows;
}

static void gather_rows(void *context, int task) {
    const struct movement *m = context;
    for (int row = task * ROWS_A_TASK; row < movement_end(task, m->kept->copies); row++)
        memcpy(m->to + (size_t)row * m->hidden,
               m->from + (size_t)(m->kept->order[row] / m->top_k) * m->hidden,
               (size_t)m->hidden * sizeof *m->to);
}

static void combine_tokens(void *context, int task) {
    const struct movement *m = context;
    for (int t = task * ROWS_A_TASK; t < movement_end(task, m->tokens); t++)
        for (int copy = t * m->top_k; copy < (t + 1) * m->top_k; copy++) {
            if (m->kept->row_of[copy] < 0) continue;
            floatX *restrict to = m->to + (size_t)t * m->hidden;
            const floatX *restrict from = m->from + (size_t)m->kept->row_of[copy] * m->hidden;
            floatX weight = m->weights ? m->weights[copy] : 1;
            for (int i = 0; i < m->hidden; i++) to[i] += weight * from[i];
        }
}

/* rows (copies, H) = each copy's token's row of from (T, H) */
static void gather(const struct part *part, const struct kept *kept, floatX *rows, const floatX *from) {
    struct movement m = {kept, part->tokens, part->model->moe.top_k, part->model->hidden, from, NULL, rows};
    workers_run(part->reference->context.workers, (kept->copies + ROWS_A_TASK - 1) / ROWS_A_TASK, gather_rows,
                &m);
}

/* to (T, H) += each token's copies' rows (copies, H), weighted when weights is not NULL */
static void combine(const struct part *part, const struct kept *kept, floatX *to, const floatX *rows,
                    const floatX *weights) {
    struct movement m = {kept, part->tokens, part->model->moe.top_k, part->model->hidden, rows, weights, to};
    workers_run(part->reference->context.workers, (part->tokens + ROWS_A_TASK - 1) / ROWS_A_TASK,
                combine_tokens, &m);
}

static void order_copies(const struct part *part, struct kept *kept) {
    struct context *context = &part->reference->context;
    int copies = part->tokens * part->model->moe.top_k, experts = part->model->moe.experts;
    struct permutation permutation =
        permutation_new(context, &kept->route, part->tokens, part->model->moe.top_k, experts);
    kept->copies = permutation.copies;
    memcpy(kept->order, permutation.order, (size_t)permutation.copies * sizeof *kept->order);
    memcpy(kept->counts, permutation.counts, (size_t)experts * sizeof *kept->counts);
    for (int copy = 0; copy < copies; copy++) kept->row_of[copy] = -1;
    for (int row = 0; row < kept->copies; row++) kept->row_of[kept->order[row]] = row;
    scratch_release(context, permutation.order);
}

/* ---- routed experts ---------------------------------------------------------------------------------- */

static struct groups gate_up_groups(const struct model *model, const struct kept *kept,
                                    const struct expert_tensors *tables) {
    return (struct groups){model->moe.experts, kept->counts, tables->gate_up,
                           model->moe.bias ? tables->gate_up_bias : NULL};
}
static struct groups down_groups(const struct model *model, const struct kept *kept,
                                 const struct expert_tensors *tables) {
    return (struct groups){model->moe.experts, kept->counts, tables->down,
                           model->moe.bias ? tables->down_bias : NULL};
}

/* output (T, H) += Σ over a token's copies of weight · expert(ffn_normed) */
static void experts_forward(const struct part *part, int layer, floatX *output) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    int hidden = model->hidden, width = model->moe.expert_hidden;
    struct groups gate_up = gate_up_groups(model, kept, &part->memory->experts[layer]);
    struct groups down = down_groups(model, kept, &part->memory->experts[layer]);
    order_copies(part, kept);
    floatX *out = scratch_floats(context, (size_t)kept->copies * hidden);
    gather(part, kept, kept->rows, kept->ffn_normed);
    grouped_linear_forward(context, &gate_up, kept->gate_up, kept->rows, hidden, 2 * width);
    activation_forward(context, kept->act, kept->gate_up, kept->copies, width, expert_activation(model));
    grouped_linear_forward(context, &down, out, kept->act, width, hidden);
    combine(part, kept, output, out, kept->route.weights);
    scratch_release(context, out);
}

/* With y = expert's output and d = the gradient of the layer's output: dweight = d · y = (d W_down) · act + d
   · bias, so y need not be kept; then d and d W_down become the gradients of y and act by the copy's weight.
 */
struct weighting {
    const struct kept *kept;
    floatX *d, *dact, *dweights, *const *biases;
    int hidden, width;
};

static void weigh_rows(void *context, int expert) {
    const struct weighting *w = context;
    int first = 0;
    for (int e = 0; e < expert; e++) first += w->kept->counts[e];
    for (int row = first; row < first + w->kept->counts[expert]; row++) {
        int copy = w->kept->order[row];
        floatX *d = w->d + (size_t)row * w->hidden, *dact = w->dact + (size_t)row * w->width;
        floatX weight = w->kept->route.weights[copy];
        w->dweights[copy] = vector_dot(dact, w->kept->act + (size_t)row * w->width, w->width) +
                            (w->biases ? vector_dot(d, w->biases[expert], w->hidden) : 0);
        for (int i = 0; i < w->hidden; i++) d[i] *= weight;
        for (int i = 0; i < w->width; i++) dact[i] *= weight;
    }
}

/* dnormed (T, H) +=, dweights (T, K) overwritten, from d (T, H), the gradient of the layer's output */
static void experts_backward(const struct part *part, int layer, floatX *dnormed, floatX *dweights,
                             const floatX *d) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    const struct expert_tensors *w = &part->memory->experts[layer],
                                *g = &part->memory->expert_gradients[layer];
    int hidden = model->hidden, width = model->moe.expert_hidden, copies = kept->copies;
    struct groups gate_up = gate_up_groups(model, kept, w), down = down_groups(model, kept, w);
    struct groups dgate_up = gate_up_groups(model, kept, g), ddown = down_groups(model, kept, g);
    floatX *drows = scratch_floats(context, (size_t)copies * hidden);
    floatX *dact = scratch_floats(context, (size_t)copies * width);
    memset(dweights, 0, (size_t)part->tokens * model->moe.top_k * sizeof *dweights);
    gather(part, kept, drows, d);
    grouped_linear_backward_input(context, &down, dact, drows, width, hidden);
    struct weighting weighting = {kept, drows, dact, dweights, down.biases, hidden, width};
    workers_run(context->workers, model->moe.experts, weigh_rows, &weighting);
    grouped_linear_backward_weight(context, &ddown, drows, kept->act, width, hidden);
    activation_backward(context, kept->gate_up, dact, kept->gate_up, copies, width, expert_activation(model));
    grouped_linear_backward_weight(context, &dgate_up, kept->gate_up, kept->rows, hidden, 2 * width);
    grouped_linear_backward_input(context, &gate_up, drows, kept->gate_up, hidden, 2 * width);
    combine(part, kept, dnormed, drows, NULL);
    scratch_release(context, drows);
}

/* ---- shared experts, dense FFN ----------------------------------------------------------------------- */

/* output (T, H) += SwiGLU(ffn_normed) */
static void shared_forward(const struct part *part, int layer, floatX *output) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    const struct ffn_tensors *w = &part->memory->shared[layer];
    int hidden = model->hidden, width = shared_width(model, layer), tokens = part->tokens;
    if (!width) return;
    floatX *out = scratch_floats(context, (size_t)tokens * hidden);
    linear_forward(context, kept->shared_gate_up, kept->ffn_normed, w->gate_up, w->gate_up_bias, tokens,
                   hidden, 2 * width);
    activation_forward(context, kept->shared_act, kept->shared_gate_up, tokens, width,
                       expert_activation(model));
    linear_forward(context, out, kept->shared_act, w->down, w->down_bias, tokens, width, hidden);
    vector_add(context, output, out, (size_t)tokens * hidden);
    scratch_release(context, out);
}

/* dnormed (T, H) +=, from d (T, H) */
static void shared_backward(const struct part *part, int layer, floatX *dnormed, const floatX *d) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    const struct ffn_tensors *w = &part->memory->shared[layer], *g = &part->memory->shared_gradient[layer];
    int hidden = model->hidden, width = shared_width(model, layer), tokens = part->tokens;
    if (!width) return;
    floatX *dact = scratch_floats(context, (size_t)tokens * width);
    floatX *through = scratch_floats(context, (size_t)tokens * hidden);
    linear_backward_input(context, dact, d, w->down, tokens, width, hidden);
    linear_backward_weight(context, g->down, g->down_bias, d, kept->shared_act, tokens, width, hidden);
    activation_backward(context, kept->shared_gate_up, dact, kept->shared_gate_up, tokens, width,
                        expert_activation(model));
    linear_backward_input(context, through, kept->shared_gate_up, w->gate_up, tokens, hidden, 2 * width);
    linear_backward_weight(context, g->gate_up, g->gate_up_bias, kept->shared_gate_up, kept->ffn_normed,
                           tokens, hidden, 2 * width);
    vector_add(context, dnormed, through, (size_t)tokens * hidden);
    scratch_release(context, dact);
}

/* ---- one layer --------------------------------------------------------------------------------------- */

/* output (T, H): the next layer's input */
static void layer_forward(const struct part *part, int layer, floatX *output) {
    const struct model *model = part->model;
    struct kept *kept = &part->memory->kept[layer];
    attention_layer_forward(part, layer);
    rmsnorm_forward(&part->reference->context, kept->ffn_normed, kept->middle,
                    part->memory->attention[layer].ffn_norm, part->tokens, model->hidden, model->norm_eps);
    memcpy(output, kept->middle, (size_t)part->tokens * model->hidden * sizeof *output);
    shared_forward(part, layer, output);
    if (!model_layer_is_moe(model, layer)) return;
    router_forward(part, layer);
    experts_forward(part, layer, output);
}

/* d (T, H): gradient of the layer's output → of its input, in place */
static void layer_backward(const struct part *part, int layer, floatX *d) {
    const struct model *model = part->model;
    struct context *context = &part->reference->context;
    struct kept *kept = &part->memory->kept[layer];
    size_t elements = (size_t)part->tokens * model->hidden;
    floatX *dnormed = scratch_floats(context, elements);
    memset(dnormed, 0, elements * sizeof *dnormed);
    shared_backward(part, layer, dnormed, d);
    if (model_layer_is_moe(model, layer)) {
        floatX *dweights = scratch_floats(context, (size_t)part->tokens * model->moe.top_k);
        experts_backward(part, layer, dnormed, dweights, d);
        router_backward(part, layer, dnormed, dweights);
    }
    rmsnorm_backward(context, d, part->memory->attention_gradient[layer].ffn_norm, dnormed, kept->middle,
                     part->memory->attention[layer].ffn_norm, part->tokens, model->hidden, model->norm_eps,
                     true);
    scratch_release(context, dnormed);
    attention_layer_backward(part, layer, d);
}

/* ---- a few sequences --------------------------------------------------------------------------------- */

static floatX *layer_output(const struct part *part, int layer) {
    return layer + 1 < part->model->layers ? part->memory->kept[layer + 1].input : part->memory->output;
}

static void add_route_losses(const struct part *part, int layer, struct step_losses *losses) {
    const struct kept *kept = &part->memory->kept[layer];
    const struct model *model = part->model;
    struct route_losses sums = route_losses(model, &kept->route, part_sequences(part));
    double margin = part->reference->forced ? INFINITY : route_margin(model, &kept->route, part->tokens);
    losses->aux += sums.aux;
    losses->z += sums.z;
    if (margin < losses->margin) losses->margin = margin;
    int most = 0;
    for (int e = 0; e < model->moe.experts; e++) most = kept->counts[e] > most ? kept->counts[e] : most;
    if (kept->copies) losses->imbalance += (double)most * model->moe.experts / kept->copies * part->sequences;
}

static void part_forward(const struct part *part, const int *inputs, struct step_losses *losses) {
    const struct model *model = part->model;
    struct reference *reference = part->reference;
    struct context *context = &reference->context;
    embedding_forward(context, part->memory->kept[0].input,
                      tensor_at(&reference->parameters, reference->values, "model.embed_tokens.weight"),
                      inputs, part->tokens, model->hidden);
    for (int layer = 0; layer < model->layers; layer++) {
        layer_forward(part, layer, layer_output(part, layer));
        if (model_layer_is_moe(model, layer)) add_route_losses(part, layer, losses);
    }
    rmsnorm_forward(context, part->memory->final_normed, part->memory->output,
                    tensor_at(&reference->parameters, reference->values, "model.norm.weight"), part->tokens,
                    model->hidden, model->norm_eps);
}

/* Returns the summed cross-entropy; scale: what each token's counts in the batch's mean. */
static double part_backward(const struct part *part, const int *inputs, const int *targets, double scale) {
    const struct model *model = part->model;
    struct reference *reference = part->reference;
    struct context *context = &reference->context;
    const struct parameters *parameters = &reference->parameters;
    floatX *values = reference->values, *gradients = reference->gradients;
    floatX *d = scratch_floats(context, (size_t)part->tokens * model->hidden);
    double loss = head_forward_backward(context, d, head_tensor(parameters, gradients),
                                        part->memory->final_normed, head_tensor(parameters, values), targets,
                                        part->tokens, model->hidden, model->vocab, scale);
    rmsnorm_backward(context, d, tensor_at(parameters, gradients, "model.norm.weight"), d,
                     part->memory->output, tensor_at(parameters, values, "model.norm.weight"), part->tokens,
                     model->hidden, model->norm_eps, false);
    for (int layer = model->layers - 1; layer >= 0; layer--) layer_backward(part, layer, d);
    embedding_backward(context, tensor_at(parameters, gradients, "model.embed_tokens.weight"), d, inputs,
                       part->tokens, model->hidden);
    scratch_release(context, d);
    return loss;
}

/* ---- a batch ----------------------------------------------------------------------------------------- */

/* Splits (sequences, S + 1) tokens into inputs and targets of S each. */
static void split_tokens(const int *tokens, int sequences, int seq_len, int *inputs, int *targets) {
    for (int s = 0; s < sequences; s++) {
        const int *from = tokens + (size_t)s * (seq_len + 1);
        memcpy(inputs + (size_t)s * seq_len, from, (size_t)seq_len * sizeof *inputs);
        memcpy(targets + (size_t)s * seq_len, from + 1, (size_t)seq_len * sizeof *targets);
    }
}

static struct step_losses means(const struct model *model, struct step_losses sums, double sequences,
                                double tokens) {
    double layers = fmax(model_moe_layers(model), 1);
    sums.cross_entropy /= tokens;
    sums.aux /= sequences * layers;
    sums.z /= tokens * layers;
    sums.imbalance /= sequences * layers;
    sums.total = sums.cross_entropy + model->moe.aux_loss * sums.aux + model->moe.z_loss * sums.z;
    return sums;
}

static struct step_losses run_batch(struct reference *reference, const struct batch *batch, bool backward,
                                    floatX *logits) {
    const struct model *model = reference->model;
    struct context *context = &reference->context;
    int seq_len = reference->seq_len, most = reference->sequences_at_once * seq_len;
    double tokens = (double)batch->sequences * seq_len;
    struct step_losses losses = {.margin = INFINITY};
    int *inputs = scratch_take(context, 2 * (size_t)most * sizeof *inputs), *targets = inputs + most;
    for (int first = 0; first < batch->sequences; first += reference->sequences_at_once) {
        int rest = batch->sequences - first;
        struct part part = {.reference = reference, .memory = reference->memory, .model = model};
        part.sequences = rest < reference->sequences_at_once ? rest : reference->sequences_at_once;
        part.tokens = part.sequences * seq_len;
        part.key = (struct route_key){batch->seed, batch->step, 0, (int64_t)first * seq_len};
        part.aux_scale = route_aux_scale(model, batch->sequences);
        part.z_scale = route_z_scale(model, (int64_t)batch->sequences * seq_len);
        split_tokens(batch->tokens + (size_t)first * (seq_len + 1), part.sequences, seq_len, inputs, targets);
        part_forward(&part, inputs, &losses);
        const floatX *output = head_tensor(&reference->parameters, reference->values);
        losses.cross_entropy += backward ? part_backward(&part, inputs, targets, 1 / tokens)
                                         : head_forward(context, part.memory->final_normed, output, targets,
                                                        part.tokens, model->hidden, model->vocab);
        if (logits)
            head_logits(context, logits + (size_t)first * seq_len * model->vocab, part.memory->final_normed,
                        output, part.tokens, model->hidden, model->vocab);
    }
    scratch_release(context, inputs);
    return means(model, losses, batch->sequences, tokens);
}

struct step_losses reference_gradients(struct reference *reference, const struct batch *batch) {
    memset(reference->gradients, 0, reference->parameters.total * sizeof *reference->gradients);
    return run_batch(reference, batch, true, NULL);
}

struct step_losses reference_losses(struct reference *reference, const struct batch *batch, floatX *logits) {
    return run_batch(reference, batch, false, logits);
}

struct step_losses reference_step(struct reference *reference, const struct batch *batch,
                                  const struct optimizer *optimizer, double *norm) {
    const struct parameters *parameters = &reference->parameters;
    if (!reference->moment1) {
        reference->moment1 = must_alloc(parameters->total * sizeof(floatX));
        reference->moment2 = must_alloc(parameters->total * sizeof(floatX));
    }
    struct step_losses losses = reference_gradients(reference, batch);
    double squares = sum_of_squares(reference->gradients, parameters->total);
    if (norm) *norm = sqrt(squares);
    if (!isfinite(losses.total) || !isfinite(squares)) return losses;
    double scale = clip_scale(optimizer, squares);
    for (int i = 0; i < parameters->count; i++) {
        const struct parameter *p = &parameters->list[i];
        adamw(&reference->context, optimizer, batch->step, scale, p->decay, reference->values + p->offset,
              reference->gradients + p->offset, reference->moment1 + p->offset,
              reference->moment2 + p->offset, p->count);
    }
    return losses;
}

/* ---- making it --------------------------------------------------------------------------------------- */

static floatX *floats(struct arena *arena, size_t rows, size_t columns) {
    return arena_alloc(arena, rows * columns * sizeof(floatX) + 1);
}

static void make_route(struct arena *arena, struct kept *kept, const struct model *model, size_t tokens,
                       size_t sequences) {
    size_t experts = (size_t)model->moe.experts, copies = tokens * model->moe.top_k;
    size_t hidden = (size_t)model->hidden, width = (size_t)model->moe.expert_hidden;
    kept->route.logits = floats(arena, tokens, experts);
    kept->route.weights = floats(arena, copies, 1);
    kept->route.ids = arena_alloc(arena, copies * sizeof(int));
    kept->route.kept = arena_alloc(arena, copies);
    kept->route.chosen = arena_alloc(arena, sequences * experts * sizeof(int));
    if (model->moe.router == ROUTER_NOISY_TOPK) kept->noise = floats(arena, tokens, experts);
    kept->order = arena_alloc(arena, copies * sizeof(int));
    kept->row_of = arena_alloc(arena, copies * sizeof(int));
    kept->counts = arena_alloc(arena, experts * sizeof(int));
    kept->rows = floats(arena, copies, hidden);
    kept->gate_up = floats(arena, copies, 2 * width);
    kept->act = floats(arena, copies, width);
}

static void make_kept(struct arena *arena, struct kept *kept, const struct model *model, int layer,
                      size_t tokens, size_t sequences) {
    size_t hidden = (size_t)model->hidden, shared = (size_t)shared_width(model, layer);
    kept->input = floats(arena, tokens, hidden);
    kept->normed = floats(arena, tokens, hidden);
    kept->qkv = floats(arena, tokens, (size_t)qkv_width(model));
    kept->qk = floats(arena, tokens, (size_t)rotated_width(model));
    kept->attended = floats(arena, tokens, (size_t)query_width(model));
    kept->lse = floats(arena, tokens, (size_t)model->attention.heads);
    kept->middle = floats(arena, tokens, hidden);
    kept->ffn_normed = floats(arena, tokens, hidden);
    kept->shared_gate_up = floats(arena, tokens, 2 * shared);
    kept->shared_act = floats(arena, tokens, shared);
    if (model_layer_is_moe(model, layer)) make_route(arena, kept, model, tokens, sequences);
}

static struct reference_memory *make_memory(struct arena *arena, struct reference *reference) {
    const struct model *model = reference->model;
    const struct parameters *parameters = &reference->parameters;
    size_t layers = (size_t)model->layers, tokens = (size_t)reference->sequences_at_once * reference->seq_len;
    struct reference_memory *memory = arena_alloc(arena, sizeof *memory);
    memory->arena = arena;
    memory->rope =
        rope_new(arena, reference->seq_len, model->attention.head_dim, model->attention.rope_theta);
    memory->kept = arena_alloc(arena, layers * sizeof *memory->kept);
    memory->attention = arena_alloc(arena, layers * sizeof *memory->attention);
    memory->attention_gradient = arena_alloc(arena, layers * sizeof *memory->attention_gradient);
    memory->shared = arena_alloc(arena, layers * sizeof *memory->shared);
    memory->shared_gradient = arena_alloc(arena, layers * sizeof *memory->shared_gradient);
    memory->experts = arena_alloc(arena, layers * sizeof *memory->experts);
    memory->expert_gradients = arena_alloc(arena, layers * sizeof *memory->expert_gradients);
    for (int layer = 0; layer < model->layers; layer++) {
        int experts = model_layer_is_moe(model, layer) ? model->moe.experts : 0;
        make_kept(arena, &memory->kept[layer], model, layer, tokens, (size_t)reference->sequences_at_once);
        memory->attention[layer] = attention_tensors(parameters, reference->values, layer);
        memory->attention_gradient[layer] = attention_tensors(parameters, reference->gradients, layer);
        memory->shared[layer] = ffn_tensors(parameters, reference->values, layer, -1);
        memory->shared_gradient[layer] = ffn_tensors(parameters, reference->gradients, layer, -1);
        memory->experts[layer] = expert_tensors(arena, parameters, reference->values, layer, 0, experts);
        memory->expert_gradients[layer] =
            expert_tensors(arena, parameters, reference->gradients, layer, 0, experts);
    }
    memory->output = floats(arena, tokens, (size_t)model->hidden);
    memory->final_normed = floats(arena, tokens, (size_t)model->hidden);
    return memory;
}

struct reference *reference_new(const struct model *model, int seq_len, int sequences_at_once, int threads,
                                uint64_t seed) {
    assert(model->layers > 0 && seq_len > 0 && sequences_at_once > 0 && threads > 0);
    struct arena *arena = arena_new();
    struct reference *reference = must_alloc(sizeof *reference);
    reference->model = model;
    reference->seq_len = seq_len;
    reference->sequences_at_once = sequences_at_once;
    reference->parameters = parameters_new(arena, model, NULL, NULL);
    reference->values = must_alloc(reference->parameters.total * sizeof(floatX));
    reference->gradients = must_alloc(reference->parameters.total * sizeof(floatX));
    reference->context.workers = workers_new(threads);
    parameters_initialise(&reference->parameters, reference->values, seed);
    reference->memory = make_memory(arena, reference);
    return reference;
}

void reference_free(struct reference *reference) {
    if (!reference) return;
    context_free(&reference->context);
    workers_free(reference->context.workers);
    free(reference->values);
    free(reference->gradients);
    free(reference->moment1);
    free(reference->moment2);
    arena_free(reference->memory->arena);
    free(reference);
}
