/*
A rank's parameters with their gradients and optimizer state, and the collectives at a step's end.

Concepts
- A bucket is all parameters with the same holders (state/ranks.h). Its tensors lie next to one another in the
rank's arrays, so a bucket is reduced, sharded and gathered as one piece. Buckets have the same order on every
rank, so that collectives cannot wait in a circle.
- ZeRO 1: every holder keeps moments for, and updates, its slice of a bucket. Slices are even parts; without
ZeRO the slice that a rank updates is the whole bucket, and the slices are used by checkpoints alone.
- Gradients in BF16 are added up in BF16: a backward pass writes a component's gradients into an FP32
workspace (of that component alone), and state_add_gradients rounds the sum stochastically, since rounding to
nearest loses what small micro-batches add to a sum that has grown. The random bits depend on parameter,
element, step and place in the batch alone: a run that is repeated or resumed has the same ones.
- Offload puts the moments into memory that is counted as the host's.
*/
#ifndef STATE_H
#define STATE_H

#include "layers/layers.h"
#include "state/checkpoint.h"
#include "state/ranks.h"

#include <mpi.h>

#ifdef FLOATX_DOUBLE
#define MPI_FLOATX MPI_DOUBLE
#else
#define MPI_FLOATX MPI_FLOAT
#endif

struct slice {
    size_t first, count; /* elements of a bucket */
};
struct bucket {
    size_t start, count;  /* elements in the rank's arrays */
    int *holders;         /* ranks, in order */
    int holder_count, me; /* me: this rank's place among them */
    bool within_group;    /* all holders are of one group, in whichever replica */
    struct slice updated; /* that this rank updates: its slice with ZeRO, else all */
    size_t moments;       /* place of these elements' moments in the moment arrays */
    MPI_Comm comm;        /* MPI_COMM_NULL with one holder */
};
/* A holder's slice: what it writes to a checkpoint and, with ZeRO, updates. */
struct slice bucket_slice(const struct bucket *bucket, int holder);

/* What of a layer (or, layer −1, of the ends) one backward operation has gradients of. */
enum component { COMPONENT_ATTENTION, COMPONENT_FFN, COMPONENT_EMBEDDING, COMPONENT_HEAD };

struct state {
    const struct ranks *ranks;
    int rank;
    struct memory levers;
    struct parameters parameters; /* offsets go by buckets */
    floatX *values;
    floatX *gradients;         /* NULL when BF16 */
    uint16_t *half_gradients;  /* NULL when not */
    floatX *moment1, *moment2; /* of the slices it updates, bucket after bucket; NULL when BF16 */
    uint16_t *half_moment1, *half_moment2;
    struct bucket *buckets;
    int bucket_count;
    size_t updated; /* elements of the slices it updates */
    /* Ready to use, one a layer; those of layers it does not hold are zeroed. Gradients point into the arrays
       or, when BF16, into the workspace. */
    struct attention_block *attention;
    struct expert_block *experts; /* received copies: routed experts, residual and shared experts */
    struct head_block head;
    floatX *embedding, *embedding_gradient; /* (V, H) or NULL */
    /* Bytes: values, gradients, moments on the device, moments on the host, workspace. */
    size_t value_bytes, gradient_bytes, moment_bytes, host_bytes, workspace_bytes;
    struct arena *arena;
    struct component_workspace *workspace;
};

/* Collective over comm (of ranks->count ranks). rope is of the run's sequence length. Values start as the
   seed says. ranks and rope must outlive the state. */
struct state *state_new(const struct ranks *ranks, int rank, MPI_Comm comm, const struct rope *rope,
                        uint64_t seed);
void state_free(struct state *state); /* collective */

void state_zero_gradients(struct state *state);
/* Around a backward operation of a component, one at a time; they do nothing when gradients are not BF16. */
void state_begin_gradients(struct state *state, enum component component, int layer);
void state_add_gradients(struct state *state, struct context *context, enum component component, int layer,
                         int64_t step, int micro_batch);

/* Sums gradients over holders: of buckets whose holders are all of one group, or of the others. With ZeRO
   only the own slice is then right. The same bits on every holder, and with and without ZeRO: the sum runs
   around the ring of holders; in BF16 it is made wide where the slice belongs and rounded to nearest, once.
   Collective over the holders. */
void state_reduce(struct state *state, bool within_group);
/* Σ of squares of the whole gradient, each parameter once: this rank's part, to be summed over all ranks. */
double state_gradient_squares(const struct state *state);
/* AdamW on the slices it updates. scale: of the gradients (clipping). */
void state_update(struct state *state, struct context *context, const struct optimizer *optimizer,
                  int64_t step, double scale);
/* The optimizer a manifest's training asks for. */
struct optimizer training_optimizer(const struct training *training);
/* With ZeRO: gathers updated values. Collective over the holders. */
void state_gather(struct state *state);

/* Rank 0 receives all values (or all gradients, after state_reduce) into an array of the whole model's
   layout; whole is used on rank 0 alone. Collective over comm. */
void state_collect(const struct state *state, MPI_Comm comm, bool gradients, const struct parameters *whole,
                   floatX *array);

/* ---- import ------------------------------------------------------------------------------------------ */

/* Fills values from safetensors files of Qwen3-MoE, GPT-OSS, DeepSeek-MoE or Mixtral, by their own names. A
   file whose name ends in .index.json says which of the files beside it each tensor is taken from. A tensor
   that is missing, of another shape or type, in two files, or for which the whole model has no place is an
   error that names file and tensor, the same on every rank. */
bool parameters_import(const struct parameters *parameters, floatX *values, const char *const *files,
                       int file_count, struct errors *errors);

#endif
