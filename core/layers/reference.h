/*
One training step in one process: loss and gradients of a batch, with nothing distributed.

It is what every system's run is compared with, so it is composed of the layers in the plainest way and knows
nothing of schedules. All losses are means over the batch (route_losses says which), so a batch may be worked
through a few sequences at a time: that changes sums' rounding and nothing else.
*/
#ifndef LAYERS_REFERENCE_H
#define LAYERS_REFERENCE_H

#include "layers/kernels.h"
#include "layers/parameters.h"

struct reference {
    const struct model *model;
    int seq_len;
    int sequences_at_once; /* worked through together */
    struct parameters parameters;
    floatX *values, *gradients;          /* (parameters.total), in the parameters' layout */
    floatX *moment1, *moment2;           /* made by the first reference_step */
    const struct forced_routing *forced; /* NULL, as reference_new makes it: the router chooses */
    struct context context;
    struct reference_memory *memory; /* tables of tensors and activations */
};

struct step_losses {
    double total; /* cross_entropy and both auxiliary losses with their coefficients */
    double cross_entropy, aux,
        z;            /* nats a token; means over sequences or tokens and MoE layers, not weighted */
    double margin;    /* smallest route_margin of all layers; infinite where the choice is forced */
    double imbalance; /* mean over MoE layers of the busiest expert's copies ÷ the mean; 1: even */
};

/* threads: 1 or more. model must outlive the reference. Values start as parameters_initialise(seed) makes
 * them. */
struct reference *reference_new(const struct model *model, int seq_len, int sequences_at_once, int threads,
                                uint64_t seed);
void reference_free(struct reference *reference);

/* Where a batch stands in training; its noise is keyed by it. */
struct batch {
    const int
        *tokens; /* (sequences, S + 1): inputs and, one place on, targets; all ids below the vocabulary */
    int sequences;
    uint64_t seed;
    int64_t step;
};
/* Overwrites reference->gradients. */
struct step_losses reference_gradients(struct reference *reference, const struct batch *batch);
/* Forward only; logits (sequences · S, V) may be NULL. */
struct step_losses reference_losses(struct reference *reference, const struct batch *batch, floatX *logits);
/* Gradients, clipping, AdamW. *norm (may be NULL): the gradient's norm before clipping. A loss or gradient
   that is not finite changes no parameter. */
struct step_losses reference_step(struct reference *reference, const struct batch *batch,
                                  const struct optimizer *optimizer, double *norm);

#endif
