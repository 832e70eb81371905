/*
A HuggingFace config.json as a model: Qwen3-MoE, GPT-OSS, DeepSeek-MoE, Mixtral.

Each family is a table: the keys that it reads, the keys that change nothing of what is computed in training
(tokens' numbers, formats of storage, generation), and values that a key must have because nothing here could
represent another. A key in none of them is an error: silently dropping one might drop mathematics.

Two departures are allowed, because released models need them, and written into the model's source:
- YaRN scaling of GPT-OSS: it changes RoPE's frequencies, and no count;
- DeepSeek-MoE without seq_aux: its balance loss is taken per micro-batch, here always per sequence.
*/
#include "model/model.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

enum family { QWEN3_MOE, GPT_OSS, DEEPSEEK, MIXTRAL };
static const char *const FAMILIES[] = {"qwen3_moe", "gpt_oss", "deepseek", "mixtral"};

/* Every key of any family that is read. */
struct config {
    const char *hidden_act, *scoring_func;
    int layers, hidden, vocab, heads, kv_heads, head_dim;
    double norm_eps, rope_theta;
    bool tie, attention_bias;
    struct json rope_scaling, rope_parameters, layer_types, mlp_only_layers;
    int experts, top_k, top_k_again, expert_hidden, dense_hidden, shared, first_dense, moe_every;
    bool norm_topk_prob, seq_aux, use_sliding_window;
    double aux_loss, attention_dropout, router_noise, swiglu_limit;
    int sliding_window;
    struct json ignored;
};

#define KEY(key, type, member, required, min, max)                                                           \
    { key, type, offsetof(struct config, member), required, min, max, NULL }
#define SIZE(key, member) KEY(key, JSON_INT, member, true, 1, INT_MAX)
#define OPTIONAL_SIZE(key, member) KEY(key, JSON_INT, member, false, 0, INT_MAX)
#define REAL(key, member) KEY(key, JSON_REAL, member, false, 0, 1e300)
#define FLAG(key, member) KEY(key, JSON_BOOL, member, false, 0, 0)
#define VALUE(key, member) KEY(key, JSON_VALUE, member, false, 0, 0)
#define TEXT(key, member) KEY(key, JSON_TEXT, member, false, 0, 0)
#define IGNORED(key) VALUE(key, ignored)

static const struct json_field COMMON[] = {
    SIZE("hidden_size", hidden),
    SIZE("num_hidden_layers", layers),
    SIZE("num_attention_heads", heads),
    SIZE("vocab_size", vocab),
    SIZE("num_experts_per_tok", top_k),
    OPTIONAL_SIZE("num_key_value_heads", kv_heads),
    OPTIONAL_SIZE("head_dim", head_dim),
    TEXT("hidden_act", hidden_act),
    REAL("rms_norm_eps", norm_eps),
    REAL("rope_theta", rope_theta),
    REAL("attention_dropout", attention_dropout),
    VALUE("rope_scaling", rope_scaling),
    VALUE("rope_parameters", rope_parameters),
    FLAG("tie_word_embeddings", tie),
    IGNORED("model_type"),
    IGNORED("architectures"),
    IGNORED("auto_map"),
    IGNORED("bos_token_id"),
    IGNORED("eos_token_id"),
    IGNORED("pad_token_id"),
    IGNORED("dtype"),
    IGNORED("torch_dtype"),
    IGNORED("transformers_version"),
    IGNORED("use_cache"),
    IGNORED("initializer_range"),
    IGNORED("max_position_embeddings"),
    IGNORED("output_router_logits"),
    IGNORED("_name_or_path"),
    IGNORED("quantization_config"),
};

static const struct json_field QWEN3_KEYS[] = {
    SIZE("num_experts", experts),
    SIZE("moe_intermediate_size", expert_hidden),
    REAL("router_aux_loss_coef", aux_loss),
    FLAG("norm_topk_prob", norm_topk_prob),
    FLAG("attention_bias", attention_bias),
    FLAG("use_sliding_window", use_sliding_window),
    OPTIONAL_SIZE("decoder_sparse_step", moe_every),
    VALUE("mlp_only_layers", mlp_only_layers),
    IGNORED("intermediate_size"), /* of dense layers, which mlp_only_layers has to leave out */
    IGNORED("sliding_window"),    /* only with use_sliding_window */
    IGNORED("max_window_layers"),
};

static const struct json_field GPT_OSS_KEYS[] = {
    SIZE("num_local_experts", experts),
    SIZE("intermediate_size", expert_hidden),
    OPTIONAL_SIZE("experts_per_token", top_k_again),
    REAL("router_aux_loss_coef", aux_loss),
    REAL("swiglu_limit", swiglu_limit),
    FLAG("attention_bias", attention_bias),
    OPTIONAL_SIZE("sliding_window", sliding_window),
    VALUE("layer_types", layer_types),
    IGNORED("initial_context_length"),
};

static const struct json_field DEEPSEEK_KEYS[] = {
    SIZE("n_routed_experts", experts),
    SIZE("moe_intermediate_size", expert_hidden),
    OPTIONAL_SIZE("n_shared_experts", shared),
    OPTIONAL_SIZE("first_k_dense_replace", first_dense),
    OPTIONAL_SIZE("intermediate_size", dense_hidden),
    OPTIONAL_SIZE("moe_layer_freq", moe_every),
    REAL("aux_loss_alpha", aux_loss),
    TEXT("scoring_func", scoring_func),
    FLAG("norm_topk_prob", norm_topk_prob),
    FLAG("attention_bias", attention_bias),
    FLAG("seq_aux", seq_aux),
    IGNORED("pretraining_tp"),
};

static const struct json_field MIXTRAL_KEYS[] = {
    SIZE("num_local_experts", experts),
    SIZE("intermediate_size", expert_hidden),
    REAL("router_aux_loss_coef", aux_loss),
    REAL("router_jitter_noise", router_noise),
    OPTIONAL_SIZE("sliding_window", sliding_window),
};

static const struct {
    const struct json_field *keys;
    size_t count;
} KEYS[] = {
    [QWEN3_MOE] = {QWEN3_KEYS, COUNT(QWEN3_KEYS)},
    [GPT_OSS] = {GPT_OSS_KEYS, COUNT(GPT_OSS_KEYS)},
    [DEEPSEEK] = {DEEPSEEK_KEYS, COUNT(DEEPSEEK_KEYS)},
    [MIXTRAL] = {MIXTRAL_KEYS, COUNT(MIXTRAL_KEYS)},
};

/* What HuggingFace's configuration classes take for a key that is absent. */
static const struct config DEFAULTS[] = {
    [QWEN3_MOE] = {.norm_eps = 1e-6, .rope_theta = 10000, .aux_loss = 0.001},
    [GPT_OSS] = {.norm_eps = 1e-5,
                 .rope_theta = 150000,
                 .aux_loss = 0.9,
                 .attention_bias = true,
                 .head_dim = 64,
                 .sliding_window = 128,
                 .swiglu_limit = 7},
    [DEEPSEEK] = {.norm_eps = 1e-6, .rope_theta = 10000, .aux_loss = 0.001, .seq_aux = true},
    [MIXTRAL] = {.norm_eps = 1e-5, .rope_theta = 1e6, .aux_loss = 0.001},
};

/* ---- reading ----------------------------------------------------------------------------------------- */

static int read_family(struct json config) {
    struct json type = json_member(config, "model_type");
    for (size_t i = 0; i < COUNT(FAMILIES); i++)
        if (cJSON_IsString(type.node) && strcmp(type.node->valuestring, FAMILIES[i]) == 0) return (int)i;
    json_error(type, "allowed: \"qwen3_moe\", \"gpt_oss\", \"deepseek\" or \"mixtral\"");
    return -1;
}

/* Every family's rope_parameters, as newer files write theta and scaling: its keys move up. */
static void lift_rope_parameters(cJSON *config) {
    cJSON *rope = cJSON_GetObjectItemCaseSensitive(config, "rope_parameters");
    if (!cJSON_IsObject(rope)) return;
    cJSON *theta = cJSON_DetachItemFromObjectCaseSensitive(rope, "rope_theta");
    if (theta && !json_get_path(config, "rope_theta"))
        cJSON_AddItemToObject(config, "rope_theta", theta);
    else
        cJSON_Delete(theta);
}

static bool read_config(struct json value, int family, struct config *config) {
    struct json_field fields[COUNT(COMMON) + 16];
    assert(KEYS[family].count <= 16);
    memcpy(fields, COMMON, sizeof COMMON);
    memcpy(fields + COUNT(COMMON), KEYS[family].keys, KEYS[family].count * sizeof *fields);
    *config = DEFAULTS[family];
    config->hidden_act = "silu";
    config->scoring_func = "softmax";
    config->moe_every = 1;
    return json_read_fields(value, fields, COUNT(COMMON) + KEYS[family].count, config);
}

/* ---- what cannot be represented ---------------------------------------------------------------------- */

/* Refuses the value of a key unless it is as it must be. */
static bool must(bool holds, struct json value, const char *key, const char *allowed) {
    if (!holds) json_error(json_member(value, key), "allowed: %s", allowed);
    return holds;
}

static const char *rope_type(struct json scaling) {
    if (!cJSON_IsObject(scaling.node)) return "default";
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(scaling.node, "rope_type");
    if (!type) type = cJSON_GetObjectItemCaseSensitive(scaling.node, "type");
    return cJSON_IsString(type) ? type->valuestring : "";
}

static bool check_rope(struct json value, int family, const struct config *config) {
    struct json scalings[] = {config->rope_scaling, config->rope_parameters};
    bool sound = true;
    for (size_t i = 0; i < COUNT(scalings); i++) {
        const char *type = rope_type(scalings[i]), *key = i ? "rope_parameters" : "rope_scaling";
        if (!scalings[i].node || strcmp(type, "default") == 0) continue;
        bool yarn = family == GPT_OSS && strcmp(type, "yarn") == 0;
        sound &= must(yarn, value, key,
                      family == GPT_OSS ? "null or rope_type \"default\" or \"yarn\""
                                        : "null or rope_type \"default\"");
    }
    return sound;
}

/* Full and sliding layers have to alternate, or be all alike. Fills window_layers; none without sliding. */
static bool read_layer_types(const struct config *config, int *window_layers) {
    int sliding[2] = {0, 0}, count = 0; /* in even and odd layers */
    *window_layers = WINDOW_EVEN;       /* what GPT-OSS has where the list is absent */
    if (!config->layer_types.node) return true;
    if (!cJSON_IsArray(config->layer_types.node)) return false;
    for (const cJSON *type = config->layer_types.node->child; type; type = type->next, count++) {
        if (!cJSON_IsString(type)) return false;
        if (strcmp(type->valuestring, "sliding_attention") == 0)
            sliding[count % 2]++;
        else if (strcmp(type->valuestring, "full_attention") != 0)
            return false;
    }
    int even = (count + 1) / 2, odd = count / 2;
    if (count != config->layers) return false;
    if ((sliding[0] && sliding[0] != even) || (sliding[1] && sliding[1] != odd)) return false;
    *window_layers = sliding[0] && (sliding[1] || !odd) ? WINDOW_ALL
                     : sliding[0]                       ? WINDOW_EVEN
                     : sliding[1]                       ? WINDOW_ODD
                                                        : WINDOW_NONE;
    return true;
}

static bool check_config(struct json value, int family, const struct config *config) {
    bool sound = check_rope(value, family, config);
    sound &= must(strcmp(config->hidden_act, "silu") == 0, value, "hidden_act", "\"silu\"");
    sound &= must(config->attention_dropout == 0, value, "attention_dropout", "0");
    sound &= must(config->moe_every == 1, value,
                  family == DEEPSEEK ? "moe_layer_freq" : "decoder_sparse_step", "1");
    sound &= must(strcmp(config->scoring_func, "softmax") == 0, value, "scoring_func", "\"softmax\"");
    sound &= must(!config->use_sliding_window, value, "use_sliding_window", "false");
    sound &= must(config->router_noise == 0, value, "router_jitter_noise", "0");
    sound &= must(family != GPT_OSS || config->swiglu_limit == 7, value, "swiglu_limit", "7");
    sound &= must(!config->top_k_again || config->top_k_again == config->top_k, value, "experts_per_token",
                  "the same as num_experts_per_tok");
    const struct json *dense = &config->mlp_only_layers;
    sound &= must(!dense->node || (cJSON_IsArray(dense->node) && !dense->node->child), value,
                  "mlp_only_layers", "[]");
    sound &= must(config->kv_heads == 0 || config->heads % config->kv_heads == 0, value,
                  "num_key_value_heads", "a divisor of num_attention_heads");
    sound &= must(config->head_dim > 0 || config->hidden % config->heads == 0, value, "head_dim",
                  "hidden_size is no multiple of num_attention_heads, so it must be given");
    sound &=
        must(config->top_k <= config->experts, value, "num_experts_per_tok", "at most the number of experts");
    sound &= must(config->first_dense <= config->layers, value, "first_k_dense_replace",
                  "at most num_hidden_layers");
    sound &= must(!config->first_dense || config->dense_hidden > 0, value, "intermediate_size", "at least 1");
    return sound;
}

/* ---- the model --------------------------------------------------------------------------------------- */

/* "models/qwen3/config.json" → "qwen3"; any other file gives its own name without the ending. */
static const char *name_of(struct arena *arena, const char *file) {
    char *path = arena_strdup(arena, file && *file ? file : "imported"), *slash = strrchr(path, '/');
    if (slash && slash != path && strcmp(slash, "/config.json") == 0) {
        *slash = 0;
        slash = strrchr(path, '/');
        return slash ? slash + 1 : path;
    }
    char *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
    if (dot && dot != name) *dot = 0;
    return name;
}

static const char *source_of(struct json value, int family, const struct config *config) {
    bool yarn = strcmp(rope_type(config->rope_scaling), "yarn") == 0 ||
                strcmp(rope_type(config->rope_parameters), "yarn") == 0;
    return arena_printf(value.arena, "config.json of model_type %s%s%s", FAMILIES[family],
                        yarn ? "; without its YaRN scaling of RoPE, which changes frequencies and no count"
                             : "",
                        family == DEEPSEEK && !config->seq_aux
                            ? "; balance loss per sequence, not per micro-batch (seq_aux false)"
                            : "");
}

static void fill_attention(const struct config *config, int family, int window_layers, struct model *model) {
    model->attention.heads = config->heads;
    model->attention.kv_heads = config->kv_heads ? config->kv_heads : config->heads;
    model->attention.head_dim = config->head_dim ? config->head_dim : config->hidden / config->heads;
    model->attention.rope_theta = config->rope_theta;
    model->attention.qk_norm = family == QWEN3_MOE;
    model->attention.bias = config->attention_bias;
    model->attention.sinks = family == GPT_OSS;
    model->attention.window_layers = config->sliding_window ? window_layers : WINDOW_NONE;
    model->attention.window = window_layers == WINDOW_NONE ? 0 : config->sliding_window;
}

/* The weight of the balance loss as it is taken here: K when balanced, the mean over MoE layers.
   router_aux_loss_coef multiplies the same: transformers' load_balancing_loss_func, which all three families
   use, strings the layers' tokens together (so one product of means over all layers, here the mean of each
   layer's) and gives E · Σ fₑ Pₑ with f per token. aux_loss_alpha multiplies a loss in which f is divided by
   K, so it is 1 when balanced, and which every MoE layer adds on its own: the sum over layers (MoEGate and
   AddAuxiliaryLoss of the released modeling_deepseek.py; Dai et al. 2024, section 3.3). */
static double aux_loss(const struct config *config, int family) {
    if (family != DEEPSEEK) return config->aux_loss;
    return config->aux_loss * (config->layers - config->first_dense) / config->top_k;
}

/* Mixtral takes the softmax over all experts and divides the chosen weights by their sum; GPT-OSS takes it
   over the chosen ones, and their sum is 1 as it is. */
static void fill_moe(const struct config *config, int family, struct model *model) {
    model->moe.experts = config->experts;
    model->moe.top_k = config->top_k;
    model->moe.expert_hidden = config->expert_hidden;
    model->moe.shared_experts = config->shared;
    model->moe.dense_layers = config->first_dense;
    model->moe.dense_hidden = config->first_dense ? config->dense_hidden : 0;
    model->moe.router = family == GPT_OSS ? ROUTER_TOPK_SOFTMAX : ROUTER_SOFTMAX_TOPK;
    model->moe.renormalise = family == MIXTRAL || config->norm_topk_prob;
    model->moe.aux_loss = aux_loss(config, family);
    model->moe.activation = family == GPT_OSS ? ACTIVATION_SWIGLU_CLAMPED : ACTIVATION_SWIGLU;
    model->moe.bias = family == GPT_OSS;
}

static bool import_family(struct json value, int family, struct model *model) {
    struct config config;
    if (!read_config(value, family, &config) || !check_config(value, family, &config)) return false;
    int window_layers = family == MIXTRAL ? WINDOW_ALL : WINDOW_NONE;
    if (family == GPT_OSS &&
        !must(read_layer_types(&config, &window_layers), value, "layer_types",
              "one of \"sliding_attention\" and \"full_attention\" a layer, alternating or all alike"))
        return false;
    *model = (struct model){.name = name_of(value.arena, value.file),
                            .source = source_of(value, family, &config),
                            .layers = config.layers,
                            .hidden = config.hidden,
                            .vocab = config.vocab,
                            .norm_eps = config.norm_eps,
                            .tie_embeddings = config.tie};
    fill_attention(&config, family, window_layers, model);
    fill_moe(&config, family, model);
    return model_check(value, model);
}

/* A null counts as absent, except where absence has a default of its own and null means none: there 0 does.
 */
static void drop_nulls(cJSON *config) {
    for (cJSON *child = config->child, *next; child; child = next) {
        next = child->next;
        if (!cJSON_IsNull(child)) continue;
        if (strcmp(child->string, "sliding_window") == 0 || strcmp(child->string, "head_dim") == 0)
            child->type = cJSON_Number; /* its value is 0 already */
        else
            cJSON_Delete(cJSON_DetachItemViaPointer(config, child));
    }
}

bool model_import(struct json config, struct model *model) {
    if (!cJSON_IsObject(config.node)) {
        json_error(config, "allowed: an object");
        return false;
    }
    int family = read_family(config);
    if (family < 0) return false;
    struct json given = config; /* a copy: the caller's tree stays as it is */
    given.node = cJSON_Duplicate(config.node, true);
    drop_nulls(given.node);
    lift_rope_parameters(given.node);
    bool sound = import_family(given, family, model);
    cJSON_Delete(given.node);
    return sound;
}
