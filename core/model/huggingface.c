/*
Reading a HuggingFace config.json.

Each family is a table of the keys that it reads. Keys that change nothing of what is computed in training
(tokens' numbers, formats of storage, generation) are struck out first. Any other key is an error: silently
dropping one might drop mathematics.
*/
#include "model/huggingface.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

static const char *const FAMILIES[] = {"qwen3_moe", "gpt_oss", "deepseek", "mixtral"};

/* ---- keys -------------------------------------------------------------------------------------------- */

#define KEY(key, type, member, required, min, max)                                                           \
    { key, type, offsetof(struct config, member), required, min, max, NULL }
#define SIZE(key, member, max) KEY(key, JSON_INT, member, false, 1, max)
#define WIDTH(key, member) SIZE(key, member, MODEL_MOST_WIDTH)
#define REAL(key, member, min, max) KEY(key, JSON_REAL, member, false, min, max)
#define FLAG(key, member) KEY(key, JSON_BOOL, member, false, 0, 0)
#define VALUE(key, member) KEY(key, JSON_VALUE, member, false, 0, 0)
#define TEXT(key, member) KEY(key, JSON_TEXT, member, false, 0, 0)
#define IGNORED(key) VALUE(key, ignored)

static const struct json_field COMMON[] = {
    WIDTH("hidden_size", hidden),
    SIZE("num_hidden_layers", layers, MODEL_MOST_LAYERS),
    WIDTH("num_attention_heads", heads),
    SIZE("vocab_size", vocab, MODEL_MOST_VOCAB),
    WIDTH("num_experts_per_tok", top_k),
    WIDTH("num_key_value_heads", kv_heads),
    WIDTH("head_dim", head_dim),
    TEXT("hidden_act", hidden_act),
    REAL("rms_norm_eps", norm_eps, 0, 1),
    REAL("rope_theta", rope_theta, 1, MODEL_MOST_THETA),
    REAL("partial_rotary_factor", partial_rotary_factor, 0, 1e300),
    REAL("attention_dropout", attention_dropout, 0, 1e300),
    VALUE("rope_scaling", rope_scaling),
    VALUE("rope_parameters", rope_parameters),
    VALUE("layer_types", layer_types),
    FLAG("tie_word_embeddings", tie),
    VALUE("architectures", architectures),
    FLAG("is_encoder_decoder", is_encoder_decoder),
    FLAG("add_cross_attention", add_cross_attention),
    VALUE("pruned_heads", pruned_heads),
    IGNORED("model_type"),
};

/* The number of experts has two names; transformers reads either, and of late writes Qwen3-MoE's under the
   other one. */
static const struct json_field QWEN3_KEYS[] = {
    WIDTH("num_experts", experts),
    WIDTH("num_local_experts", experts_again),
    WIDTH("moe_intermediate_size", expert_hidden),
    REAL("router_aux_loss_coef", aux_loss, 0, 100),
    FLAG("norm_topk_prob", norm_topk_prob),
    FLAG("attention_bias", attention_bias),
    FLAG("use_sliding_window", use_sliding_window),
    SIZE("decoder_sparse_step", moe_every, INT_MAX),
    VALUE("mlp_only_layers", mlp_only_layers),
    IGNORED("intermediate_size"), /* of dense layers, which mlp_only_layers has to leave out */
    IGNORED("sliding_window"),    /* only with use_sliding_window */
    IGNORED("max_window_layers"),
};

static const struct json_field GPT_OSS_KEYS[] = {
    WIDTH("num_local_experts", experts),
    WIDTH("num_experts", experts_again),
    WIDTH("intermediate_size", expert_hidden),
    WIDTH("experts_per_token", top_k_again),
    REAL("router_aux_loss_coef", aux_loss, 0, 100),
    REAL("swiglu_alpha", swiglu_alpha, 0, 1e300),
    REAL("swiglu_limit", swiglu_limit, 0, 1e300),
    FLAG("attention_bias", attention_bias),
    SIZE("sliding_window", sliding_window, INT_MAX),
    IGNORED("initial_context_length"),
};

/* Without n_routed_experts and num_experts_per_tok its class makes a dense model. */
static const struct json_field DEEPSEEK_KEYS[] = {
    WIDTH("n_routed_experts", experts),
    WIDTH("moe_intermediate_size", expert_hidden),
    KEY("n_shared_experts", JSON_INT, shared, false, 0, MODEL_MOST_SHARED_EXPERTS),
    KEY("first_k_dense_replace", JSON_INT, first_dense, false, 0, INT_MAX),
    WIDTH("intermediate_size", dense_hidden),
    SIZE("moe_layer_freq", moe_every, INT_MAX),
    REAL("aux_loss_alpha", aux_loss, 0, 100),
    TEXT("scoring_func", scoring_func),
    FLAG("norm_topk_prob", norm_topk_prob),
    FLAG("attention_bias", attention_bias),
    FLAG("seq_aux", seq_aux),
    IGNORED("pretraining_tp"),
};

static const struct json_field MIXTRAL_KEYS[] = {
    WIDTH("num_local_experts", experts),
    WIDTH("num_experts", experts_again),
    WIDTH("intermediate_size", expert_hidden),
    REAL("router_aux_loss_coef", aux_loss, 0, 100),
    REAL("router_jitter_noise", router_noise, 0, 1e300),
    SIZE("sliding_window", sliding_window, INT_MAX),
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

enum { MOST_KEYS = COUNT(COMMON) + 16 };

/* Where null is a value of its own, not an absent key. All are 0 then: as many as heads, hidden_size ÷ heads,
   no window, no experts, no second name. */
static const char *const NULL_IS_ZERO[] = {"num_key_value_heads", "head_dim",         "sliding_window",
                                           "n_shared_experts",    "n_routed_experts", "experts_per_token"};

/* Keys of any configuration that change nothing of what is computed in training: of the file and how it is
   stored; of tokens; of lengths, initial values, what a call returns and other tasks' heads; of generation,
   as files before transformers 5 have them. */
static const char NO_MATTER[] =
    " auto_map dtype torch_dtype transformers_version _name_or_path name_or_path _commit_hash "
    "quantization_config attn_implementation _attn_implementation _attn_implementation_autoset "
    "experts_implementation _experts_implementation torchscript use_bfloat16 tf_legacy_loss "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix "
    "initializer_range max_position_embeddings use_cache output_router_logits output_hidden_states "
    "output_attentions return_dict chunk_size_feed_forward id2label label2id num_labels problem_type "
    "tie_last_hidden_states task_specific_params finetuning_task is_decoder tie_encoder_decoder "
    "cross_attention_hidden_size "
    "max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "num_beam_groups diversity_penalty ";

/* ---- what absent keys stand for ---------------------------------------------------------------------- */

/* What a configuration's class takes for a key that is absent: transformers 5.24 (before 5, GPT-OSS's balance
   loss had 0.9); for DeepSeek-MoE, which is not part of it, configuration_deepseek.py of the released model.
 */
static const struct config DEFAULTS[] = {
    [QWEN3_MOE] = {.layers = 24,
                   .hidden = 2048,
                   .vocab = 151936,
                   .heads = 32,
                   .kv_heads = 4,
                   .experts = 128,
                   .top_k = 8,
                   .expert_hidden = 768,
                   .norm_eps = 1e-6,
                   .rope_theta = 10000,
                   .aux_loss = 0.001},
    [GPT_OSS] = {.layers = 36,
                 .hidden = 2880,
                 .vocab = 201088,
                 .heads = 64,
                 .kv_heads = 8,
                 .head_dim = 64,
                 .experts = 128,
                 .top_k = 4,
                 .expert_hidden = 2880,
                 .norm_eps = 1e-5,
                 .rope_theta = 150000,
                 .aux_loss = 0.001,
                 .attention_bias = true,
                 .sliding_window = 128,
                 .yarn = true},
    [DEEPSEEK] = {.layers = 30,
                  .hidden = 4096,
                  .vocab = 102400,
                  .heads = 32,
                  .kv_heads = 32,
                  .expert_hidden = 1407,
                  .dense_hidden = 11008,
                  .norm_eps = 1e-6,
                  .rope_theta = 10000,
                  .aux_loss = 0.001,
                  .seq_aux = true},
    [MIXTRAL] = {.layers = 32,
                 .hidden = 4096,
                 .vocab = 32000,
                 .heads = 32,
                 .kv_heads = 8,
                 .experts = 8,
                 .top_k = 2,
                 .expert_hidden = 14336,
                 .norm_eps = 1e-5,
                 .rope_theta = 1e6,
                 .aux_loss = 0.001},
};

struct config config_defaults(int family) {
    struct config config = DEFAULTS[family];
    config.hidden_act = "silu";
    config.scoring_func = "softmax";
    config.partial_rotary_factor = config.moe_every = 1;
    config.swiglu_alpha = 1.702;
    config.swiglu_limit = 7;
    return config;
}

/* ---- reading ----------------------------------------------------------------------------------------- */

const char *family_name(int family) {
    return FAMILIES[family];
}

int config_family(struct json value) {
    struct json type = json_member(value, "model_type");
    for (size_t i = 0; i < COUNT(FAMILIES); i++)
        if (cJSON_IsString(type.node) && strcmp(type.node->valuestring, FAMILIES[i]) == 0) return (int)i;
    json_error(type, "allowed: \"qwen3_moe\", \"gpt_oss\", \"deepseek\" or \"mixtral\"");
    return -1;
}

static bool matters(const char *key) {
    size_t length = strlen(key);
    if (!length || strchr(key, ' ')) return true;
    for (const char *at = NO_MATTER; (at = strstr(at, key)); at++)
        if (at[-1] == ' ' && at[length] == ' ') return false;
    return true;
}

/* Whether null at this key is as good as no key; where it stands for something else, that is stored. It is
   not where the family's class wants a number, a flag or a text: there it stays, to be refused. */
static bool settle_null(const char *key, const struct json_field *fields, size_t count,
                        struct config *config) {
    size_t i = 0;
    while (i < count && strcmp(fields[i].key, key) != 0) i++;
    if (i == count || fields[i].type == JSON_VALUE) return true;
    for (size_t j = 0; j < COUNT(NULL_IS_ZERO); j++)
        if (strcmp(NULL_IS_ZERO[j], key) == 0) {
            *(int *)((char *)config + fields[i].offset) = 0;
            return true;
        }
    return false;
}

bool config_read(struct json value, int family, struct config *config) {
    struct json_field fields[MOST_KEYS];
    size_t count = COUNT(COMMON) + KEYS[family].count;
    assert(count <= MOST_KEYS);
    memcpy(fields, COMMON, sizeof COMMON);
    memcpy(fields + COUNT(COMMON), KEYS[family].keys, KEYS[family].count * sizeof *fields);
    *config = config_defaults(family);
    for (cJSON *child = value.node->child, *next; child; child = next) {
        next = child->next;
        if (!matters(child->string) ||
            (cJSON_IsNull(child) && settle_null(child->string, fields, count, config)))
            cJSON_Delete(cJSON_DetachItemViaPointer(value.node, child));
    }
    return json_read_fields(value, fields, count, config);
}
