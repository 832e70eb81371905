/*
Parameters: names, order, initial values.
*/
#include "layers/parameters.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double DEVIATION = 0.02; /* of all matrices, as GPT-2 and the three models have it */

/* ---- the list ---------------------------------------------------------------------------------------- */

struct building {
    struct arena *arena;
    struct parameters *parameters;
    bool (*keep)(void *context, const struct parameter *parameter);
    void *context;
    int capacity;
};

/* Adds a tensor if it is kept; suffix is its name below its layer or expert. */
static void add(struct building *b, struct parameter parameter, const char *suffix) {
    struct parameters *list = b->parameters;
    parameter.name = parameter.layer < 0 ? arena_strdup(b->arena, suffix)
                     : parameter.expert < 0
                         ? arena_printf(b->arena, "model.layers.%d.%s", parameter.layer, suffix)
                         : arena_printf(b->arena, "model.layers.%d.mlp.experts.%d.%s", parameter.layer,
                                        parameter.expert, suffix);
    parameter.count = (size_t)parameter.rows * parameter.columns;
    if (b->keep && !b->keep(b->context, &parameter)) return;
    if (list->count == b->capacity) {
        b->capacity = b->capacity ? 2 * b->capacity : 64;
        list->list = must_realloc(list->list, (size_t)b->capacity * sizeof *list->list);
    }
    parameter.offset = list->total;
    list->total += parameter.count;
    list->list[list->count++] = parameter;
}

static void matrix(struct building *b, struct parameter at, int rows, int columns, double deviation,
                   const char *suffix) {
    at.rows = rows;
    at.columns = columns;
    at.deviation = deviation;
    at.decay = true;
    add(b, at, suffix);
}

static void vector(struct building *b, struct parameter at, int length, double initial, const char *suffix) {
    at.rows = 1;
    at.columns = length;
    at.initial = initial;
    add(b, at, suffix);
}

/* Projections back into the residual stream start smaller, so that depth does not widen it (GPT-2). */
static double residual_deviation(const struct model *model) {
    return DEVIATION / sqrt(2.0 * model->layers);
}

static void attention(struct building *b, const struct model *model, int layer) {
    struct parameter at = {.owner = OWNER_ATTENTION, .layer = layer, .expert = -1};
    int hidden = model->hidden, dim = model->attention.head_dim;
    int query = model->attention.heads * dim, key = model->attention.kv_heads * dim;
    vector(b, at, hidden, 1, "input_layernorm.weight");
    matrix(b, at, query, hidden, DEVIATION, "self_attn.q_proj.weight");
    matrix(b, at, key, hidden, DEVIATION, "self_attn.k_proj.weight");
    matrix(b, at, key, hidden, DEVIATION, "self_attn.v_proj.weight");
    if (model->attention.bias) {
        vector(b, at, query, 0, "self_attn.q_proj.bias");
        vector(b, at, key, 0, "self_attn.k_proj.bias");
        vector(b, at, key, 0, "self_attn.v_proj.bias");
    }
    if (model->attention.qk_norm) {
        vector(b, at, dim, 1, "self_attn.q_norm.weight");
        vector(b, at, dim, 1, "self_attn.k_norm.weight");
    }
    if (model->attention.sinks) vector(b, at, model->attention.heads, 0, "self_attn.sinks");
    matrix(b, at, hidden, query, residual_deviation(model), "self_attn.o_proj.weight");
    if (model->attention.bias) vector(b, at, hidden, 0, "self_attn.o_proj.bias");
}

/* prefix "mlp.", "mlp.shared_experts." or, for a routed expert, "" */
static void swiglu(struct building *b, const struct model *model, struct parameter at, int inner,
                   const char *prefix) {
    static const char *const suffixes[] = {"gate_proj.weight", "up_proj.weight",   "gate_proj.bias",
                                           "up_proj.bias",     "down_proj.weight", "down_proj.bias"};
    for (int i = 0; i < (int)COUNT(suffixes); i++) {
        bool is_bias = strstr(suffixes[i], "bias"), down = i >= 4;
        const char *suffix = arena_printf(b->arena, "%s%s", prefix, suffixes[i]);
        int out = down ? model->hidden : inner, in = down ? inner : model->hidden;
        if (!is_bias)
            matrix(b, at, out, in, down ? residual_deviation(model) : DEVIATION, suffix);
        else if (model->moe.bias)
            vector(b, at, out, 0, suffix);
    }
}

static void feed_forward(struct building *b, const struct model *model, int layer) {
    struct parameter at = {.owner = OWNER_FFN_NORM, .layer = layer, .expert = -1};
    int inner = model->moe.expert_hidden;
    vector(b, at, model->hidden, 1, "post_attention_layernorm.weight");
    struct parameter shared = {.owner = OWNER_SHARED, .layer = layer, .expert = -1};
    if (!model_layer_is_moe(model, layer)) {
        swiglu(b, model, shared, model->moe.dense_hidden, "mlp.");
        return;
    }
    at.owner = OWNER_ATTENTION;
    matrix(b, at, model->moe.experts, model->hidden, DEVIATION, "mlp.gate.weight");
    if (model->moe.bias) vector(b, at, model->moe.experts, 0, "mlp.gate.bias");
    if (model->moe.router == ROUTER_NOISY_TOPK) {
        matrix(b, at, model->moe.experts, model->hidden, DEVIATION, "mlp.noise_gate.weight");
        if (model->moe.bias) vector(b, at, model->moe.experts, 0, "mlp.noise_gate.bias");
    }
    for (int expert = 0; expert < model->moe.experts; expert++) {
        struct parameter routed = {.owner = OWNER_EXPERT, .layer = layer, .expert = expert};
        swiglu(b, model, routed, inner, "");
    }
    if (model->moe.shared_experts)
        swiglu(b, model, shared, model->moe.shared_experts * inner, "mlp.shared_experts.");
}

struct parameters parameters_new(struct arena *arena, const struct model *model,
                                 bool (*keep)(void *context, const struct parameter *parameter),
                                 void *context) {
    struct parameters parameters = {.model = model};
    struct building b = {arena, &parameters, keep, context, 0};
    struct parameter end = {.owner = OWNER_EMBEDDING, .layer = -1, .expert = -1};
    matrix(&b, end, model->vocab, model->hidden, DEVIATION, "model.embed_tokens.weight");
    for (int layer = 0; layer < model->layers; layer++) {
        attention(&b, model, layer);
        feed_forward(&b, model, layer);
    }
    end.owner = OWNER_HEAD;
    vector(&b, end, model->hidden, 1, "model.norm.weight");
    if (!model->tie_embeddings) matrix(&b, end, model->vocab, model->hidden, DEVIATION, "lm_head.weight");
    struct parameter *list = arena_alloc(arena, (size_t)parameters.count * sizeof *list + 1);
    if (parameters.count) memcpy(list, parameters.list, (size_t)parameters.count * sizeof *list);
    free(parameters.list);
    parameters.list = list;
    return parameters;
}

const struct parameter *parameters_find(const struct parameters *parameters, const char *name) {
    for (int i = 0; i < parameters->count; i++)
        if (!strcmp(parameters->list[i].name, name)) return &parameters->list[i];
    return NULL;
}

/* ---- initial values ---------------------------------------------------------------------------------- */

/* FNV-1a of the name. */
uint64_t parameter_key(const struct parameter *parameter, uint64_t number) {
    return text_hash(parameter->name) ^ (number * 0x9e3779b97f4a7c15u);
}

void parameters_initialise(const struct parameters *parameters, floatX *values, uint64_t seed) {
    for (int i = 0; i < parameters->count; i++) {
        const struct parameter *p = &parameters->list[i];
        struct rng rng = rng_seed(parameter_key(p, seed));
        for (size_t e = 0; e < p->count; e++) {
            /* through float, so that both builds start from the same values */
            float value = p->deviation > 0 ? (float)(p->deviation * rng_normal(&rng)) : (float)p->initial;
            values[p->offset + e] = value;
        }
    }
}

/* ---- where tensors lie ------------------------------------------------------------------------------- */

static floatX **pointers(struct arena *arena, int count) {
    return arena_alloc(arena, (size_t)(count ? count : 1) * sizeof(floatX *));
}

struct expert_tensors expert_tensors(struct arena *arena, const struct parameters *parameters, floatX *array,
                                     int layer, int first_expert, int experts) {
    struct expert_tensors tensors = {pointers(arena, experts), pointers(arena, experts),
                                     pointers(arena, experts), pointers(arena, experts)};
    for (int e = 0; e < experts; e++) {
        struct ffn_tensors t = ffn_tensors(parameters, array, layer, first_expert + e);
        tensors.gate_up[e] = t.gate_up;
        tensors.gate_up_bias[e] = t.gate_up_bias;
        tensors.down[e] = t.down;
        tensors.down_bias[e] = t.down_bias;
    }
    return tensors;
}

floatX *tensor_at(const struct parameters *parameters, floatX *array, const char *name) {
    const struct parameter *parameter = parameters_find(parameters, name);
    return parameter ? array + parameter->offset : NULL;
}

/* The tensor of a layer (and expert) whose name ends so. The list is in layer order: a search by halves. */
static floatX *layer_tensor(const struct parameters *parameters, floatX *array, int layer, int expert,
                            const char *ending) {
    int low = 0, high = parameters->count;
    while (low < high) {
        int middle = (low + high) / 2;
        const struct parameter *p = &parameters->list[middle];
        bool before = p->layer < layer && p->owner != OWNER_HEAD;
        if (before)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < parameters->count && parameters->list[low].layer == layer; low++) {
        const struct parameter *p = &parameters->list[low];
        size_t length = strlen(p->name), end = strlen(ending);
        if (p->expert == expert && length >= end && !strcmp(p->name + length - end, ending))
            return array + p->offset;
    }
    return NULL;
}

struct attention_tensors attention_tensors(const struct parameters *parameters, floatX *array, int layer) {
    struct attention_tensors t = {0};
    const struct {
        floatX **tensor;
        const char *name;
    } places[] = {{&t.input_norm, ".input_layernorm.weight"},
                  {&t.qkv, ".q_proj.weight"},
                  {&t.qkv_bias, ".q_proj.bias"},
                  {&t.q_norm, ".q_norm.weight"},
                  {&t.k_norm, ".k_norm.weight"},
                  {&t.sinks, ".sinks"},
                  {&t.out, ".o_proj.weight"},
                  {&t.out_bias, ".o_proj.bias"},
                  {&t.ffn_norm, ".post_attention_layernorm.weight"},
                  {&t.router, ".gate.weight"},
                  {&t.router_bias, ".gate.bias"},
                  {&t.noise, ".noise_gate.weight"},
                  {&t.noise_bias, ".noise_gate.bias"}};
    for (size_t i = 0; i < COUNT(places); i++)
        *places[i].tensor = layer_tensor(parameters, array, layer, -1, places[i].name);
    return t;
}

struct ffn_tensors ffn_tensors(const struct parameters *parameters, floatX *array, int layer, int expert) {
    return (struct ffn_tensors){layer_tensor(parameters, array, layer, expert, ".gate_proj.weight"),
                                layer_tensor(parameters, array, layer, expert, ".gate_proj.bias"),
                                layer_tensor(parameters, array, layer, expert, ".down_proj.weight"),
                                layer_tensor(parameters, array, layer, expert, ".down_proj.bias")};
}

floatX *head_tensor(const struct parameters *parameters, floatX *array) {
    return tensor_at(parameters, array,
                     parameters->model->tie_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
}
