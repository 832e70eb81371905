/*
What HuggingFace's configurations of the four model families say, before it is asked whether a model here can
be that: the keys of a config.json with their values, or what the family's configuration class takes for those
that are absent.
*/
#ifndef HUGGINGFACE_H
#define HUGGINGFACE_H

#include "model/model.h"

enum family { QWEN3_MOE, GPT_OSS, DEEPSEEK, MIXTRAL };

/* Every key of any family that is read. */
struct config {
    const char *hidden_act, *scoring_func;
    int layers, hidden, vocab, heads;
    int kv_heads, head_dim; /* 0: as many as heads; hidden ÷ heads */
    double norm_eps, rope_theta, partial_rotary_factor;
    bool tie, attention_bias;
    bool yarn; /* RoPE with YaRN's scaling, unless the file says otherwise */
    struct json rope_scaling, rope_parameters, layer_types, mlp_only_layers;
    int experts, experts_again, top_k, top_k_again; /* the numbers under their second names; 0: absent */
    int expert_hidden, dense_hidden, shared, first_dense, moe_every;
    bool norm_topk_prob, seq_aux, use_sliding_window;
    double aux_loss, attention_dropout, router_noise, swiglu_alpha, swiglu_limit;
    int sliding_window; /* 0: none */
    bool is_encoder_decoder, add_cross_attention;
    struct json architectures, pruned_heads, ignored;
};

const char *family_name(int family); /* model_type */
/* The family of a config.json, or −1 with an error. */
int config_family(struct json value);
/* What the family's class takes for absent keys. */
struct config config_defaults(int family);
/* Reads the keys of a config.json; strikes out of it those that do not matter and the absent ones that null
   stands for. A key that the family has not, or a value that no class would take, is an error; false then. */
bool config_read(struct json value, int family, struct config *config);

#endif
