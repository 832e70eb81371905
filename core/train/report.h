/*
What a run reports: of a step, of its verification, of its memory.
*/
#ifndef TRAIN_REPORT_H
#define TRAIN_REPORT_H

#include "layers/layers.h"

struct step_report {
    int64_t step; /* from 0 */
    struct step_losses losses;
    double learning_rate, grad_norm; /* before clipping */
    double seconds, tokens_per_s;    /* wall clock of the slowest rank */
    double exposed; /* seconds in which a rank's computation waited for a transfer: mean of ranks */
    bool finite;    /* false: loss or gradient is not; nothing was updated, and the run must end */
    int bad_rank;   /* the first rank where a number was not finite; −1 */
};

/* Of a run beside the reference. */
struct verification {
    double loss_rel; /* of the loss and each of its parts */
    double grad_rel; /* largest over the steps verified */
    char worst_parameter[160];
    int reseeded; /* batches drawn again */
};

/* Bytes of one rank. */
struct memory_report {
    double predicted, predicted_static; /* of the simulated timeline, with this rank's share of experts and
                                           copies by the plan's routing; static: parameters, gradients and
                                           optimizer state */
    double as_run; /* peak of the schedule's bytes for what was held at one time: transfers that come later
                      than simulated overlap less, so it may be below predicted, never above */
    double used, used_static; /* what the rank really held: its peak, and the static part */
    double workspace; /* scratch of operations, message staging, hand-over buffers: not in the others */
    double host;      /* optimizer state offloaded */
};

#endif
