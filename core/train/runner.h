/*
What a rank's lanes share: its part of the run, and the state of the step under way.

Inside of core/train, where calls run one way, from later lines to earlier ones:

    waiting, data, pool, program    messages; tokens; activations' memory; what a lane does in which order
    cell, runner, report            these structures
    collectives                     what ranks that hold sequences between them do together
    sizes, cell_memory              what a cell's activations weigh; taking and freeing them
    operations, transfers, verify   what the lanes run; the reference beside them
    step_end, measured              reduction and update; what a step really was
    lanes                           threads that run all this
    trainer                         a run, step by step: train.h
*/
#ifndef TRAIN_RUNNER_H
#define TRAIN_RUNNER_H

#include "plan/plan.h"
#include "state/state.h"
#include "train/cell.h"
#include "train/data.h"
#include "train/program.h"
#include "train/report.h"

#include <pthread.h>

struct span {
    double start, end;
};

/* Sums of one step on this rank. */
struct sums {
    double cross_entropy, aux, z;
    int64_t *expert_copies; /* (layers, experts): chosen on this rank's tokens */
};

struct runner {
    const struct plan *plan;
    const struct model *model;
    const struct schedule *schedule;
    const struct data *data;
    const struct forced_routing *forced; /* NULL: the router chooses */
    struct ranks ranks;
    struct seat seat;
    int rank, seq_len, hidden;
    struct program program;
    struct state *state;
    MPI_Comm comm, forward, backward, control; /* transfers of each direction match in schedule order */
    MPI_Comm
        run; /* ranks that hold sequences between them (struct sequences), in order; of the compute lane */
    struct collectives collectives;
    MPI_Datatype row; /* H elements */

    /* the step under way */
    int64_t step;
    uint64_t seed;      /* of its data and noise */
    struct cell *cells; /* (layers + 1, micro-batches) */
    struct sums sums;
    struct context contexts[RESOURCE_COUNT]; /* scratch of each lane's thread */
    bool reduced;                            /* the lanes have reduced what stays within groups */
    struct step_report report;
    struct verifier *verifier; /* NULL: this run is not verified */
    struct pulse *pulse;       /* what the lanes are doing; NULL: nobody watches */

    /* Under the mutex: the lanes' progress and the accounts of memory. */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int progress[RESOURCE_COUNT]; /* operations finished */
    bool *half_done;              /* (operations) one of the two threads that run it has ended */
    struct passing *passing;      /* hand-over buffers and bookkeeping of the step */
    size_t passing_bytes, passing_peak;
    /* Bytes of activations, by the schedule: held now, and the most held at one time, of all steps. */
    double expected_now, as_run_peak;

    struct pool *pool;
    const struct activation *expected;     /* the schedule's, with this rank's bytes */
    double expected_static, expected_peak; /* peak: of activations, on the simulated timeline */

    /* measured */
    double began;
    struct span *spans[RESOURCE_COUNT]; /* (operations of the lane) */
    double *taken;                      /* (activations) bytes really taken */
};

static inline struct cell *cell_at(const struct runner *runner, int layer, int micro_batch) {
    return &runner->cells[(size_t)layer * runner->schedule->micro_batches + micro_batch];
}
/* This replica's rank number `index` of a group. */
static inline int peer(const struct runner *runner, int group, int index) {
    return rank_at(&runner->ranks, (struct seat){runner->seat.replica, group, index});
}
static inline int group_size(const struct runner *runner, int group) {
    return runner->schedule->groups[group].gpus;
}
static inline const struct lane *group_lane(const struct runner *runner, int group, int resource) {
    return &runner->schedule->lanes[lane_of(group, (enum resource)resource)];
}
/* Sequences of a micro-batch on this rank of an attention group; their tokens here; tokens on this rank of a
   group with a head. */
static inline struct batch_part own_batch(const struct runner *runner, int micro_batch) {
    return attention_batch(&runner->ranks, runner->seat.replica, micro_batch, runner->seat.index);
}
static inline int own_tokens(const struct runner *runner, int micro_batch) {
    return rows_of_all(own_batch(runner, micro_batch).sequences);
}
static inline int head_tokens(const struct runner *runner, int micro_batch) {
    int replica = runner->seat.replica, part = head_part(&runner->ranks, runner->seat);
    return head_tokens_before(&runner->ranks, replica, micro_batch, part + 1) -
           head_tokens_before(&runner->ranks, replica, micro_batch, part);
}

#endif
