/*
Inside of the executor: a rank's state during a step, shared by lanes, operations and transfers.

A cell is what the rank knows of one layer and micro-batch; one more layer, behind the last, is the head's. A
cell's fields are written by one operation and read by later ones; the lanes' progress, which is under a
mutex, orders them.
*/
#ifndef TRAIN_EXECUTOR_H
#define TRAIN_EXECUTOR_H

#include "train/pool.h"
#include "train/program.h"
#include "train/train.h"

#include <pthread.h>

#ifdef FLOATX_DOUBLE
#define MPI_FLOATX MPI_DOUBLE
#else
#define MPI_FLOATX MPI_FLOAT
#endif

/* ---- cells ------------------------------------------------------------------------------------------- */

/* Rows that go to, or came from, one other rank. */
struct rows {
    int count;
    int *row;   /* place in this rank's rows */
    int *token; /* place among the other rank's tokens */
};
/* One copy as dispatch announces it, ahead of the rows themselves. */
struct copy {
    floatX weight;
    int token;  /* of the sender */
    int expert; /* of the receiver, from 0; −1: none, only the residual and shared experts */
    int first;  /* whether the residual rides with it */
};
/* Copies that a rank of the attention group sends to one of the feed-forward group. */
struct sent {
    int count;
    struct copy *copies;
    int *row;   /* rows of `middle` */
    int *place; /* place of the copy's weight in (T, K) */
};

struct cell {
    void *slot[ROLE_COUNT]; /* pool memory that the schedule's activations say is there now */
    /* Residual stream at the layer's input, and its gradient, where no activation of the schedule holds it:
       between an operation and the transfer that sends its result on. */
    floatX *passing, *gradient;
    /* attention side */
    struct attention_kept attention;
    floatX *middle;         /* pipelined, full recomputation: for the rank's own tokens until ffn */
    struct sent *sent;      /* (ranks of the feed-forward group) */
    floatX *dweights;       /* (T, K) */
    floatX *local_gradient; /* pipelined: gradient of middle through shared experts and residual */
    /* feed-forward side */
    struct rows *received; /* (ranks of the attention group) */
    struct rows *returned; /* (ranks of the next group): rows whose outputs they get */
    struct expert_part copies;
    int routed, firsts;
    struct expert_kept kept, local_kept;
    floatX *copy_dweights; /* (rows) */
    /* next side */
    struct rows *combined; /* (ranks of the feed-forward group): row is the token */
    /* ends */
    int *tokens; /* inputs, or the head's targets */
};

/* ---- trainer ----------------------------------------------------------------------------------------- */

struct span {
    double start, end;
};

/* Sums of one step on this rank. */
struct sums {
    double cross_entropy, aux, z;
    int64_t *expert_copies; /* (layers, experts): chosen on this rank's tokens */
};

struct trainer {
    const struct plan *plan;
    const struct model *model;
    const struct schedule *schedule;
    const struct timeline *planned;
    const struct data *data;
    struct ranks ranks;
    struct seat seat;
    int rank;
    MPI_Comm comm, forward, backward, control; /* transfers of each direction match in schedule order */
    MPI_Datatype row;                          /* H elements */
    struct program program;
    struct state *state;
    struct pool *pool;
    struct rope rope;
    const struct forced_routing *forced; /* NULL: the router chooses */
    struct progress_mark mark;
    uint64_t batch_seed; /* of the step under way: the mark's, but for a batch that was drawn again */
    int seq_len, hidden;
    struct arena *arena;

    /* a step */
    struct cell *cells; /* (layers + 1, micro-batches) */
    struct sums sums;
    struct context contexts[RESOURCE_COUNT]; /* scratch of each lane's thread */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int progress[RESOURCE_COUNT];       /* operations finished */
    struct span *spans[RESOURCE_COUNT]; /* (operations of the lane) measured */
    bool *half_done;                    /* (operations) one of the two threads that run it has ended */
    double *taken;                      /* (activations) bytes really taken */
    bool reduced;                       /* the lanes have reduced what stays within groups */
    double began;
    struct step_report report;
    struct passing *passing; /* hand-over buffers and bookkeeping of the step */
    size_t passing_bytes, passing_peak;
    const struct activation *expected;     /* the schedule's, with this rank's bytes */
    double expected_static, expected_peak; /* of activations, on the simulated timeline */
    double expected_now, as_run_peak;      /* of those held now; the most of them at one time, of all steps */

    struct pulse *pulse;         /* what the lanes are doing; NULL: nobody watches */
    struct reference *reference; /* of rank 0 when verifying */
    bool verifying;
    struct step_losses reference_losses;
    struct verification verification;
};

static inline struct cell *cell_at(const struct trainer *trainer, int layer, int micro_batch) {
    return &trainer->cells[(size_t)layer * trainer->schedule->micro_batches + micro_batch];
}
/* This replica's rank number `index` of a group. */
static inline int peer(const struct trainer *trainer, int group, int index) {
    return rank_at(&trainer->ranks, (struct seat){trainer->seat.replica, group, index});
}
static inline int group_size(const struct trainer *trainer, int group) {
    return trainer->schedule->groups[group].gpus;
}
/* Tokens of a micro-batch on this rank of an attention group; on this rank of the head's group. */
int own_tokens(const struct trainer *trainer, int micro_batch);
int head_tokens(const struct trainer *trainer, int micro_batch);
/* Bookkeeping and hand-over memory: counted, freed with passing_free or at the step's end. */
void *passing_new(struct trainer *trainer, size_t bytes);
void passing_free(struct trainer *trainer, void *memory);
/* Residual stream at the input of cell `layer` (layers: the head's), as it is there; or where to write it. */
floatX *stream_of(const struct cell *cell);
floatX *stream_for(struct trainer *trainer, struct cell *cell, int tokens);

/* Fills expected, expected_static and expected_peak. */
void fill_expected(struct trainer *trainer);

/* ---- lanes ------------------------------------------------------------------------------------------- */

/* Runs a step's operations; returns when all lanes are done. */
void run_lanes(struct trainer *trainer);
/* Memory that an operation's activations take; called by who starts it, when sizes are known. */
void take_memory(struct trainer *trainer, int op);

/* ---- operations -------------------------------------------------------------------------------------- */

void compute_operation(struct trainer *trainer, int op);
/* Bytes of an activation on this rank; of the feed-forward side, once the copies have been announced. */
size_t activation_bytes(const struct trainer *trainer, const struct activation *activation);

/* ---- transfers --------------------------------------------------------------------------------------- */

void send_operation(struct trainer *trainer, int op);
/* Returns when the first message came: what a receiver waits for before that is its sender, not the network.
 */
double receive_operation(struct trainer *trainer, int op);
/* Empty messages between groups: dependencies without data. */
void tell_group(struct trainer *trainer, int op, int group);
void wait_for_group(struct trainer *trainer, int op);
/* Waits for requests without keeping a core busy. */
void wait_all(MPI_Request *requests, int count);

/* ---- step's end -------------------------------------------------------------------------------------- */

void optimizer_operation(struct trainer *trainer);
/* Ahead of a step: the reference takes the run's parameters and computes the batch; agrees on its seed. */
void verify_batch(struct trainer *trainer);
/* max|found − expected| ÷ max(max|expected|, floor); NaN where either holds one. */
double relative_difference(const floatX *found, const floatX *expected, size_t count, double floor);
/* Compares the reduced gradients with the reference's. Collective. */
void verify_gradients(struct trainer *trainer);

#endif
