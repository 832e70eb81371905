/*
A model's parameters by the names HuggingFace gives them, and where they lie in memory.

Concepts
- A parameter list says which tensors there are, in a fixed order, each with its place in one array of
  floatX. Values, gradients and optimizer moments are arrays of that one layout.
- A rank that holds part of a model makes a list with only what it keeps; names identify parameters between
ranks, in checkpoints and for initialisation, which depends on the seed and the name alone.
- Tensors that are multiplied together follow one another: q, k and v projections, an expert's gate and up
  projections, and their biases, are one matrix each to the layers. So keep all or none of a component.
- Every expert's tensors are parameters of their own (`model.layers.3.mlp.experts.7.up_proj.weight`) whichever
way a checkpoint packs them.
*/
#ifndef LAYERS_PARAMETERS_H
#define LAYERS_PARAMETERS_H

#include "layers/kernels.h"

enum owner {
    OWNER_EMBEDDING, /* input embedding; also the output matrix where tied */
    OWNER_ATTENTION, /* attention and its norm; router */
    OWNER_FFN_NORM,  /* needed by router and experts: both sides of a disaggregated layer hold it */
    OWNER_EXPERT,    /* one routed expert */
    OWNER_SHARED,    /* shared experts, or the dense FFN */
    OWNER_HEAD,      /* final norm and output matrix */
};

struct parameter {
    const char *name;
    enum owner owner;
    int layer, expert;    /* −1 where it has none */
    int rows, columns;    /* a vector has 1 row */
    size_t count, offset; /* elements; place in the array */
    double deviation;     /* initial values: normal with this deviation; or, where 0, all `initial` */
    double initial;
    bool decay; /* matrices decay, norms, biases and sinks do not */
};

struct parameters {
    const struct model *model;
    struct parameter *list;
    int count;
    size_t total; /* elements */
};

/* Those for which keep(context, parameter) is true; all when keep is NULL. model must outlive the list. */
struct parameters parameters_new(struct arena *arena, const struct model *model,
                                 bool (*keep)(void *context, const struct parameter *parameter),
                                 void *context);
const struct parameter *parameters_find(const struct parameters *parameters, const char *name); /* or NULL */
/* A seed from a parameter's name and a number: the same on whichever rank and in whichever order. */
uint64_t parameter_key(const struct parameter *parameter, uint64_t number);
void parameters_initialise(const struct parameters *parameters, floatX *values, uint64_t seed);

/* ---- where a component's tensors lie ----------------------------------------------------------------- */

/* Pointers into an array of the list's layout: values, or gradients. NULL where there is none. */
struct attention_tensors {
    floatX *input_norm;           /* (H) */
    floatX *qkv, *qkv_bias;       /* ((heads + 2 kv_heads) head_dim, H) */
    floatX *q_norm, *k_norm;      /* (head_dim) */
    floatX *sinks;                /* (heads) */
    floatX *out, *out_bias;       /* (H, heads head_dim) */
    floatX *ffn_norm;             /* (H) */
    floatX *router, *router_bias; /* (E, H), (E) */
    floatX *noise, *noise_bias;   /* (E, H), (E): of noisy top-k */
};
struct ffn_tensors {
    floatX *gate_up, *gate_up_bias; /* (2 D, H) gate first */
    floatX *down, *down_bias;       /* (H, D) */
};
struct attention_tensors attention_tensors(const struct parameters *parameters, floatX *array, int layer);
/* expert −1: the shared experts or the dense FFN. All pointers NULL when not in the list. */
struct ffn_tensors ffn_tensors(const struct parameters *parameters, floatX *array, int layer, int expert);
/* Pointers to the tensors of each of a number of experts, (experts) each. */
struct expert_tensors {
    floatX **gate_up, **gate_up_bias, **down, **down_bias;
};
struct expert_tensors expert_tensors(struct arena *arena, const struct parameters *parameters, floatX *array,
                                     int layer, int first_expert, int experts);
/* One tensor's place, or NULL. */
floatX *tensor_at(const struct parameters *parameters, floatX *array, const char *name);
/* The output matrix (V, H): its own, or the embedding where tied. */
floatX *head_tensor(const struct parameters *parameters, floatX *array);

#endif
