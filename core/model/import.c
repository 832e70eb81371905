/*
A HuggingFace config.json as a model: Qwen3-MoE, GPT-OSS, DeepSeek-MoE, Mixtral. A value that nothing here can
represent is an error.

Departures that are allowed, because released models need them; the first two are written into the model's
source:
- YaRN scaling of GPT-OSS: it changes RoPE's frequencies and attention's scale, and no count;
- DeepSeek-MoE without seq_aux: its balance loss is taken per micro-batch, here always per sequence;
- output_router_logits, with which transformers adds the balance loss to the loss it returns: the makers'
  training had it, so here its coefficient counts either way.
*/
#include "model/huggingface.h"

#include <stdarg.h>
#include <string.h>

/* ---- what cannot be represented ---------------------------------------------------------------------- */

/* Refuses the value of a key unless it is as it must be. */
static bool must(bool holds, struct json value, const char *key, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static bool must(bool holds, struct json value, const char *key, const char *format, ...) {
    char allowed[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(allowed, sizeof allowed, format, arguments);
    va_end(arguments);
    if (!holds) json_error(json_member(value, key), "allowed: %s", allowed);
    return holds;
}

/* RoPE as transformers 5 reads it (convert_rope_params_to_dict): rope_scaling, where it says anything, stands
   in the place of rope_parameters; what is said inside wins over the same key outside; rope_type over type.
 */
static bool read_rope(struct json value, int family, struct config *config) {
    struct rope {
        const char *rope_type, *type;
        double theta, partial;
        struct json ignored;
    } rope = {NULL, NULL, config->rope_theta, config->partial_rotary_factor, {0}};
#define ROPE(key, type, member, min, max)                                                                    \
    { key, type, offsetof(struct rope, member), false, min, max, NULL }
#define YARN(key) ROPE(key, JSON_VALUE, ignored, 0, 0)
    static const struct json_field fields[] = {
        ROPE("rope_type", JSON_TEXT, rope_type, 0, 0),
        ROPE("type", JSON_TEXT, type, 0, 0),
        ROPE("rope_theta", JSON_REAL, theta, 1, MODEL_MOST_THETA),
        ROPE("partial_rotary_factor", JSON_REAL, partial, 0, 1e300),
        YARN("factor"),
        YARN("original_max_position_embeddings"),
        YARN("attention_factor"),
        YARN("beta_fast"),
        YARN("beta_slow"),
        YARN("mscale"),
        YARN("mscale_all_dim"),
        YARN("truncate"),
    };
    enum { PLAIN = 4 }; /* of them, those of RoPE without scaling */
    struct json said = config->rope_scaling;
    if (!said.node || (cJSON_IsObject(said.node) && !said.node->child)) said = config->rope_parameters;
    if (!said.node) return must(rope.partial == 1, value, "partial_rotary_factor", "1");
    const char *key = json_member(said, "rope_type").node ? "rope_type" : "type";
    const cJSON *type = json_member(said, key).node;
    config->yarn = family == GPT_OSS && cJSON_IsString(type) && strcmp(type->valuestring, "yarn") == 0;
    if (type && !must(config->yarn || (cJSON_IsString(type) && strcmp(type->valuestring, "default") == 0),
                      said, key, family == GPT_OSS ? "\"default\" or \"yarn\"" : "\"default\""))
        return false;
    if (!json_read_fields(said, fields, config->yarn ? COUNT(fields) : PLAIN, &rope)) return false;
    config->rope_theta = rope.theta;
    bool inside = json_member(said, "partial_rotary_factor").node;
    return must(rope.partial == 1, inside ? said : value, "partial_rotary_factor", "1");
}

/* Full and sliding layers have to alternate, or be all alike. Fills window_layers. */
static bool read_layer_types(const struct config *config, int *window_layers) {
    int sliding[2] = {0, 0}, count = 0; /* in even and odd layers */
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

/* Which layers have a window. Only GPT-OSS's class reads layer_types; the others have the window of
   sliding_window in every layer, and a list that says otherwise is refused. */
static bool read_windows(struct json value, int family, const struct config *config, int *window_layers) {
    int whole = config->sliding_window ? WINDOW_ALL : WINDOW_NONE;
    *window_layers = family == GPT_OSS ? WINDOW_EVEN : whole;
    if (!config->layer_types.node) return true;
    if (!must(read_layer_types(config, window_layers), value, "layer_types",
              "one of \"sliding_attention\" and \"full_attention\" a layer, alternating or all alike"))
        return false;
    return must(family == GPT_OSS || *window_layers == whole, value, "layer_types",
                "\"%s_attention\" in every layer of a %s with this sliding_window",
                whole == WINDOW_ALL ? "sliding" : "full", family_name(family));
}

static bool ends_with(const char *text, const char *ending) {
    size_t length = strlen(text), end = strlen(ending);
    return length >= end && strcmp(text + length - end, ending) == 0;
}

/* The whole model or its layers alone, without a head for another task. */
static bool are_language_models(struct json architectures) {
    if (!architectures.node) return true;
    if (!cJSON_IsArray(architectures.node)) return false;
    for (const cJSON *name = architectures.node->child; name; name = name->next)
        if (!cJSON_IsString(name) ||
            !(ends_with(name->valuestring, "ForCausalLM") || ends_with(name->valuestring, "Model")))
            return false;
    return true;
}

static bool is_empty(struct json value) {
    return !value.node || ((cJSON_IsArray(value.node) || cJSON_IsObject(value.node)) && !value.node->child);
}

/* Values of single keys. */
static bool check_values(struct json value, int family, const struct config *config) {
    bool sound = must(strcmp(config->hidden_act, "silu") == 0, value, "hidden_act", "\"silu\"");
    sound &= must(config->attention_dropout == 0, value, "attention_dropout", "0");
    sound &= must(config->moe_every == 1, value,
                  family == DEEPSEEK ? "moe_layer_freq" : "decoder_sparse_step", "1");
    sound &= must(strcmp(config->scoring_func, "softmax") == 0, value, "scoring_func", "\"softmax\"");
    sound &= must(!config->use_sliding_window, value, "use_sliding_window", "false");
    sound &= must(config->router_noise == 0, value, "router_jitter_noise", "0");
    sound &= must(config->swiglu_alpha == 1.702, value, "swiglu_alpha", "1.702");
    sound &= must(config->swiglu_limit == 7, value, "swiglu_limit", "7");
    sound &= must(is_empty(config->mlp_only_layers), value, "mlp_only_layers", "[]");
    sound &= must(are_language_models(config->architectures), value, "architectures",
                  "names that end in ForCausalLM or Model");
    sound &= must(!config->is_encoder_decoder, value, "is_encoder_decoder", "false");
    sound &= must(!config->add_cross_attention, value, "add_cross_attention", "false");
    return sound & must(is_empty(config->pruned_heads), value, "pruned_heads", "{}");
}

/* Refuses a size unless it fits the others, also where it is its class's default. */
static bool must_fit(bool fits, struct json value, const char *key, int size, const char *allowed,
                     int other) {
    struct json given = json_member(value, key);
    if (!fits && given.node)
        json_error(given, "allowed: %s, which is %d", allowed, other);
    else if (!fits)
        json_error(given, "its default, %d, does not fit; allowed: %s, which is %d", size, allowed, other);
    return fits;
}

static bool check_sizes(struct json value, int family, const struct config *config) {
    int heads = config->heads, experts = config->experts, top_k = config->top_k;
    int dim = config->head_dim ? config->head_dim : config->hidden / heads;
    bool sound = must_fit(!config->kv_heads || heads % config->kv_heads == 0, value, "num_key_value_heads",
                          config->kv_heads, "a divisor of num_attention_heads", heads);
    sound &= must(config->head_dim || config->hidden % heads == 0, value, "head_dim",
                  "any even number, but given, as hidden_size is no multiple of num_attention_heads");
    sound &= must(dim % 2 == 0 || config->hidden % heads, value, "head_dim",
                  "an even number, since RoPE turns pairs; here it is %d", dim);
    sound &= must(family != DEEPSEEK || (double)dim * heads == config->hidden || config->hidden % heads,
                  value, "head_dim", "hidden_size / num_attention_heads, since this family has no other");
    sound &= must(experts, value, "n_routed_experts", "a whole number of at least 1");
    sound &= must(top_k, value, "num_experts_per_tok", "a whole number of at least 1");
    sound &= must_fit(!experts || top_k <= experts, value, "num_experts_per_tok", top_k,
                      "at most the number of experts", experts);
    sound &= must_fit(!config->top_k_again || config->top_k_again == top_k, value, "experts_per_token",
                      config->top_k_again, "the same as num_experts_per_tok", top_k);
    return sound & must_fit(config->first_dense <= config->layers, value, "first_k_dense_replace",
                            config->first_dense, "at most num_hidden_layers", config->layers);
}

/* One number of experts from its two names. */
static bool settle_experts(struct json value, int family, struct config *config) {
    const char *first = family == QWEN3_MOE ? "num_experts" : "num_local_experts";
    const char *second = family == QWEN3_MOE ? "num_local_experts" : "num_experts";
    if (!config->experts_again) return true;
    if (!json_member(value, first).node) config->experts = config->experts_again;
    return must(config->experts == config->experts_again, value, second, "the same as %s, which is %d", first,
                config->experts);
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
    return arena_printf(value.arena, "config.json of model_type %s%s%s", family_name(family),
                        config->yarn ? "; without its YaRN scaling of RoPE, which changes frequencies and "
                                       "attention's scale, and no count"
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
    int window_layers = WINDOW_NONE;
    if (!config_read(value, family, &config)) return false;
    bool sound = settle_experts(value, family, &config);
    sound &= read_rope(value, family, &config);
    sound &= check_values(value, family, &config);
    sound &= check_sizes(value, family, &config);
    sound &= read_windows(value, family, &config, &window_layers);
    if (!sound) return false;
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

bool model_import(struct json config, struct model *model) {
    if (!cJSON_IsObject(config.node)) {
        json_error(config, "allowed: an object");
        return false;
    }
    int family = config_family(config);
    if (family < 0) return false;
    struct json given = config; /* a copy: the caller's tree stays as it is */
    given.node = cJSON_Duplicate(config.node, true);
    bool sound = import_family(given, family, model);
    cJSON_Delete(given.node);
    return sound;
}
