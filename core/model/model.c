/*
Reading, checking and writing a model's manifest.

A manifest says what differs from the plainest MoE transformer; what it leaves out is off. Sizes have no
default: a wrong guess of a size would make every count wrong.
*/
#include "model/model.h"

#include <limits.h>
#include <stdarg.h>
#include <string.h>

/* ---- reading ----------------------------------------------------------------------------------------- */

/* One table row, its arguments in the order a reader asks: key, member, type, required?, bounds or words. */
#define INT_FIELD(key, offset, required, min, max)                                                           \
    { key, JSON_INT, offset, required, min, max, NULL }
#define REAL_FIELD(key, offset, min, max)                                                                    \
    { key, JSON_REAL, offset, false, min, max, NULL }
#define BOOL_FIELD(key, offset)                                                                              \
    { key, JSON_BOOL, offset, false, 0, 0, NULL }
#define CHOICE_FIELD(key, offset, choices)                                                                   \
    { key, JSON_CHOICE, offset, false, 0, 0, choices }

static bool read_attention(struct json value, struct model *model) {
    static const struct json_field fields[] = {
        INT_FIELD("heads", offsetof(struct model, attention.heads), true, 1, MODEL_MOST_WIDTH),
        INT_FIELD("kv_heads", offsetof(struct model, attention.kv_heads), true, 1, MODEL_MOST_WIDTH),
        INT_FIELD("head_dim", offsetof(struct model, attention.head_dim), true, 2, MODEL_MOST_WIDTH),
        REAL_FIELD("rope_theta", offsetof(struct model, attention.rope_theta), 1, MODEL_MOST_THETA),
        BOOL_FIELD("qk_norm", offsetof(struct model, attention.qk_norm)),
        BOOL_FIELD("bias", offsetof(struct model, attention.bias)),
        BOOL_FIELD("sinks", offsetof(struct model, attention.sinks)),
        INT_FIELD("window", offsetof(struct model, attention.window), false, 0, INT_MAX),
        CHOICE_FIELD("window_layers", offsetof(struct model, attention.window_layers), WINDOW_CHOICES),
    };
    return json_read_fields(value, fields, COUNT(fields), model);
}

static bool read_moe(struct json value, struct model *model) {
    static const struct json_field fields[] = {
        INT_FIELD("experts", offsetof(struct model, moe.experts), true, 1, MODEL_MOST_WIDTH),
        INT_FIELD("top_k", offsetof(struct model, moe.top_k), true, 1, MODEL_MOST_WIDTH),
        INT_FIELD("expert_hidden", offsetof(struct model, moe.expert_hidden), true, 1, MODEL_MOST_WIDTH),
        INT_FIELD("shared_experts", offsetof(struct model, moe.shared_experts), false, 0,
                  MODEL_MOST_SHARED_EXPERTS),
        INT_FIELD("dense_layers", offsetof(struct model, moe.dense_layers), false, 0, MODEL_MOST_LAYERS),
        INT_FIELD("dense_hidden", offsetof(struct model, moe.dense_hidden), false, 0, MODEL_MOST_WIDTH),
        CHOICE_FIELD("router", offsetof(struct model, moe.router), ROUTER_CHOICES),
        BOOL_FIELD("renormalise", offsetof(struct model, moe.renormalise)),
        REAL_FIELD("aux_loss", offsetof(struct model, moe.aux_loss), 0, 1e6),
        REAL_FIELD("z_loss", offsetof(struct model, moe.z_loss), 0, 1e6),
        REAL_FIELD("capacity_factor", offsetof(struct model, moe.capacity_factor), 0, 1e6),
        CHOICE_FIELD("activation", offsetof(struct model, moe.activation), ACTIVATION_CHOICES),
        BOOL_FIELD("bias", offsetof(struct model, moe.bias)),
    };
    return json_read_fields(value, fields, COUNT(fields), model);
}

bool model_read(struct json value, struct model *model) {
    struct top {
        struct json attention, moe;
        struct model model;
    } top = {.model = {.name = "", .source = "", .norm_eps = 1e-6, .attention.rope_theta = 10000}};
    static const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct top, model.name), true, 0, 0, NULL},
        {"source", JSON_TEXT, offsetof(struct top, model.source), false, 0, 0, NULL},
        INT_FIELD("layers", offsetof(struct top, model.layers), true, 1, MODEL_MOST_LAYERS),
        INT_FIELD("hidden", offsetof(struct top, model.hidden), true, 1, MODEL_MOST_WIDTH),
        INT_FIELD("vocab", offsetof(struct top, model.vocab), true, 1, MODEL_MOST_VOCAB),
        {"dtype", JSON_CHOICE, offsetof(struct top, model.dtype), false, 0, 0, DTYPE_CHOICES},
        REAL_FIELD("norm_eps", offsetof(struct top, model.norm_eps), 0, 1),
        BOOL_FIELD("tie_embeddings", offsetof(struct top, model.tie_embeddings)),
        {"attention", JSON_VALUE, offsetof(struct top, attention), true, 0, 0, NULL},
        {"moe", JSON_VALUE, offsetof(struct top, moe), true, 0, 0, NULL},
    };
    bool sound = json_read_fields(value, fields, COUNT(fields), &top);
    if (top.attention.node) sound &= read_attention(top.attention, &top.model);
    if (top.moe.node) sound &= read_moe(top.moe, &top.model);
    sound &= model_check(value, &top.model);
    *model = top.model;
    return sound;
}

/* ---- what no single key shows ------------------------------------------------------------------------ */

/* Adds "found A; allowed B" for a key of a part. Always false, so that `sound &= wrong(…)` reads well. */
static bool wrong(struct json part, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static bool wrong(struct json part, const char *key, const char *format, ...) {
    char message[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    errors_add(part.errors, part.file, json_member(part, key).path, "%s", message);
    return false;
}

static bool check_attention(struct json part, const struct model *model) {
    int heads = model->attention.heads, kv_heads = model->attention.kv_heads;
    int window = model->attention.window;
    bool windowed = model->attention.window_layers != WINDOW_NONE, sound = true;
    if (heads && kv_heads && heads % kv_heads)
        sound &=
            wrong(part, "kv_heads", "found %d; allowed: a divisor of heads, which is %d", kv_heads, heads);
    if (model->attention.head_dim % 2)
        sound &= wrong(part, "head_dim", "found %d; allowed: an even number, since RoPE turns pairs",
                       model->attention.head_dim);
    if (windowed && window == 0)
        sound &= wrong(part, "window", "found 0; allowed with window_layers: at least 1");
    if (!windowed && window > 0)
        sound &= wrong(part, "window_layers",
                       "found \"none\"; allowed with window %d: \"all\", \"even\" or \"odd\"", window);
    return sound;
}

static bool check_moe(struct json part, const struct model *model) {
    int experts = model->moe.experts, dense = model->moe.dense_layers;
    bool sound = true;
    if (experts && model->moe.top_k > experts)
        sound &= wrong(part, "top_k", "found %d; allowed: at most experts, which is %d", model->moe.top_k,
                       experts);
    if (model->layers && dense > model->layers)
        sound &= wrong(part, "dense_layers", "found %d; allowed: at most layers, which is %d", dense,
                       model->layers);
    if (dense > 0 && model->moe.dense_hidden == 0)
        sound &= wrong(part, "dense_hidden", "found 0; allowed with dense_layers: at least 1");
    return sound;
}

/* A size that could not be read is 0 here, and has had its own error: nothing follows from it. */
bool model_check(struct json value, const struct model *model) {
    bool attention = check_attention(json_member(value, "attention"), model);
    bool moe = check_moe(json_member(value, "moe"), model);
    return attention && moe;
}

/* ---- writing ----------------------------------------------------------------------------------------- */

static void add_choice(cJSON *object, const char *key, const char *choices, int index) {
    struct arena *arena = arena_new();
    cJSON_AddStringToObject(object, key, choice_word(arena, choices, index));
    arena_free(arena);
}

static cJSON *write_attention(const struct model *model) {
    cJSON *object = cJSON_CreateObject();
    json_add_number(object, "heads", model->attention.heads);
    json_add_number(object, "kv_heads", model->attention.kv_heads);
    json_add_number(object, "head_dim", model->attention.head_dim);
    json_add_number(object, "rope_theta", model->attention.rope_theta);
    cJSON_AddBoolToObject(object, "qk_norm", model->attention.qk_norm);
    cJSON_AddBoolToObject(object, "bias", model->attention.bias);
    cJSON_AddBoolToObject(object, "sinks", model->attention.sinks);
    json_add_number(object, "window", model->attention.window);
    add_choice(object, "window_layers", WINDOW_CHOICES, model->attention.window_layers);
    return object;
}

static cJSON *write_moe(const struct model *model) {
    cJSON *object = cJSON_CreateObject();
    json_add_number(object, "experts", model->moe.experts);
    json_add_number(object, "top_k", model->moe.top_k);
    json_add_number(object, "expert_hidden", model->moe.expert_hidden);
    json_add_number(object, "shared_experts", model->moe.shared_experts);
    json_add_number(object, "dense_layers", model->moe.dense_layers);
    json_add_number(object, "dense_hidden", model->moe.dense_hidden);
    add_choice(object, "router", ROUTER_CHOICES, model->moe.router);
    cJSON_AddBoolToObject(object, "renormalise", model->moe.renormalise);
    json_add_number(object, "aux_loss", model->moe.aux_loss);
    json_add_number(object, "z_loss", model->moe.z_loss);
    json_add_number(object, "capacity_factor", model->moe.capacity_factor);
    add_choice(object, "activation", ACTIVATION_CHOICES, model->moe.activation);
    cJSON_AddBoolToObject(object, "bias", model->moe.bias);
    return object;
}

cJSON *model_write(const struct model *model) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "name", model->name);
    cJSON_AddStringToObject(object, "source", model->source);
    if (model->dtype != DTYPE_BF16) add_choice(object, "dtype", DTYPE_CHOICES, model->dtype);
    json_add_number(object, "layers", model->layers);
    json_add_number(object, "hidden", model->hidden);
    json_add_number(object, "vocab", model->vocab);
    json_add_number(object, "norm_eps", model->norm_eps);
    cJSON_AddBoolToObject(object, "tie_embeddings", model->tie_embeddings);
    cJSON_AddItemToObject(object, "attention", write_attention(model));
    cJSON_AddItemToObject(object, "moe", write_moe(model));
    return object;
}
