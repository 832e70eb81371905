/*
Reading, checking and writing a model manifest. Both directions use the same tables of fields.
*/
#include "model/model.h"

#include <string.h>

struct raw_model {
    struct model model;
    struct json attention, moe;
};

#define TOP(name, type, required, min, max) {#name, type, offsetof(struct raw_model, model.name), required, min, max, NULL}
#define ATTENTION(name, type, required, min, max, choices) \
    {#name, type, offsetof(struct model, attention.name), required, min, max, choices}
#define MOE(name, type, required, min, max, choices) \
    {#name, type, offsetof(struct model, moe.name), required, min, max, choices}

static const struct json_field top_fields[] = {
    TOP(name, JSON_TEXT, true, 0, 0),
    TOP(source, JSON_TEXT, false, 0, 0),
    TOP(layers, JSON_INT, true, 1, 2048),
    TOP(hidden, JSON_INT, true, 1, 1 << 20),
    TOP(vocab, JSON_INT, true, 1, 1 << 28),
    TOP(norm_eps, JSON_REAL, false, 1e-12, 1),
    TOP(tie_embeddings, JSON_BOOL, false, 0, 0),
    {"attention", JSON_VALUE, offsetof(struct raw_model, attention), true, 0, 0, NULL},
    {"moe", JSON_VALUE, offsetof(struct raw_model, moe), true, 0, 0, NULL},
};

static const struct json_field attention_fields[] = {
    ATTENTION(heads, JSON_INT, true, 1, 65536, NULL),
    ATTENTION(kv_heads, JSON_INT, true, 1, 65536, NULL),
    ATTENTION(head_dim, JSON_INT, true, 1, 65536, NULL),
    ATTENTION(rope_theta, JSON_REAL, false, 1, 1e12, NULL),
    ATTENTION(qk_norm, JSON_BOOL, false, 0, 0, NULL),
    ATTENTION(bias, JSON_BOOL, false, 0, 0, NULL),
    ATTENTION(sinks, JSON_BOOL, false, 0, 0, NULL),
    ATTENTION(window, JSON_INT, false, 0, 1 << 28, NULL),
    ATTENTION(window_layers, JSON_CHOICE, false, 0, 0, WINDOW_CHOICES),
};

static const struct json_field moe_fields[] = {
    MOE(experts, JSON_INT, true, 1, 65536, NULL),
    MOE(top_k, JSON_INT, true, 1, 65536, NULL),
    MOE(expert_hidden, JSON_INT, true, 1, 1 << 24, NULL),
    MOE(shared_experts, JSON_INT, false, 0, 1024, NULL),
    MOE(dense_layers, JSON_INT, false, 0, 2048, NULL),
    MOE(dense_hidden, JSON_INT, false, 0, 1 << 24, NULL),
    MOE(router, JSON_CHOICE, false, 0, 0, ROUTER_CHOICES),
    MOE(renormalise, JSON_BOOL, false, 0, 0, NULL),
    MOE(aux_loss, JSON_REAL, false, 0, 1e6, NULL),
    MOE(z_loss, JSON_REAL, false, 0, 1e6, NULL),
    MOE(capacity_factor, JSON_REAL, false, 0, 1e6, NULL),
    MOE(activation, JSON_CHOICE, false, 0, 0, ACTIVATION_CHOICES),
    MOE(bias, JSON_BOOL, false, 0, 0, NULL),
};

/* Adds an error about a key whose value is fine alone. */
static void clash(struct json value, const char *path, const char *format, int found, int other)
{
    char message[256];
    snprintf(message, sizeof message, format, found, other);
    const char *whole = *value.path ? arena_printf(value.arena, "%s.%s", value.path, path) : path;
    errors_add(value.errors, value.file, whole, "%s", message);
}

bool model_check(struct json value, const struct model *model)
{
    int before = value.errors->count;
    if (model->attention.kv_heads && model->attention.heads % model->attention.kv_heads)
        clash(value, "attention.heads", "found %d; must be divisible by kv_heads %d", model->attention.heads,
              model->attention.kv_heads);
    if (model->attention.head_dim % 2)
        clash(value, "attention.head_dim", "found %d; must be even: RoPE turns pairs", model->attention.head_dim, 0);
    if (model->moe.top_k > model->moe.experts)
        clash(value, "moe.top_k", "found %d; at most the number of experts, %d, is allowed", model->moe.top_k,
              model->moe.experts);
    if (model->moe.dense_layers > model->layers)
        clash(value, "moe.dense_layers", "found %d; at most the number of layers, %d, is allowed", model->moe.dense_layers,
              model->layers);
    if (model->moe.dense_layers && !model->moe.dense_hidden)
        clash(value, "moe.dense_hidden", "found 0 with dense_layers %d; must be above 0 then", model->moe.dense_layers, 0);
    if (model->attention.window_layers != WINDOW_NONE && !model->attention.window)
        clash(value, "attention.window", "found 0 with windowed layers; must be above 0 then", 0, 0);
    return value.errors->count == before;
}

bool model_read(struct json value, struct model *model)
{
    int before = value.errors->count;
    struct raw_model raw = {.model = {.norm_eps = 1e-6, .attention.rope_theta = 10000}};
    json_read_fields(value, top_fields, COUNT(top_fields), &raw);
    *model = raw.model;
    if (raw.attention.node) json_read_fields(raw.attention, attention_fields, COUNT(attention_fields), model);
    if (raw.moe.node) json_read_fields(raw.moe, moe_fields, COUNT(moe_fields), model);
    if (value.errors->count > before) return false;
    return model_check(value, model);
}

static void write_fields(cJSON *object, const struct json_field *fields, size_t count, const void *from)
{
    struct arena *arena = arena_new();
    for (size_t i = 0; i < count; i++) {
        const char *at = (const char *)from + fields[i].offset, *text;
        switch (fields[i].type) {
        case JSON_INT: json_add_number(object, fields[i].key, *(const int *)at); break;
        case JSON_REAL: json_add_number(object, fields[i].key, *(const double *)at); break;
        case JSON_BOOL: cJSON_AddBoolToObject(object, fields[i].key, *(const bool *)at); break;
        case JSON_TEXT:
            text = *(const char *const *)at;
            if (text) cJSON_AddStringToObject(object, fields[i].key, text);
            break;
        case JSON_CHOICE:
            cJSON_AddStringToObject(object, fields[i].key, choice_word(arena, fields[i].choices, *(const int *)at));
            break;
        case JSON_VALUE: break;
        }
    }
    arena_free(arena);
}

cJSON *model_write(const struct model *model)
{
    cJSON *object = cJSON_CreateObject();
    struct raw_model raw = {.model = *model};
    write_fields(object, top_fields, COUNT(top_fields), &raw);
    write_fields(cJSON_AddObjectToObject(object, "attention"), attention_fields, COUNT(attention_fields), model);
    write_fields(cJSON_AddObjectToObject(object, "moe"), moe_fields, COUNT(moe_fields), model);
    return object;
}
