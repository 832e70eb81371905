/*
Executor 2: training for real, one MPI rank a GPU of the plan. Front door of core/train.

Concepts
- A trainer is one rank's share of a run: its seat in the schedule, its parameters, one thread a lane. All
ranks call the trainer functions together, in the same order; what comes back is the same on every rank.
- A step runs the schedule's operations in the order of its lanes: an operation starts when what it depends on
is done here or has arrived, and when the memory it needs has been freed in the schedule's own order, so that
no rank ever holds more activations than the simulated timeline says.
- Losses, data and noise depend on seed and step alone, never on the layout.
*/
#ifndef TRAIN_H
#define TRAIN_H

#include "plan/plan.h"
#include "state/state.h"
#include "train/data.h"
#include "train/report.h"

struct trainer;

/* plan, schedule (arranged), planned (its timeline) and data must outlive it. comm has exactly ranks->count
   ranks and only those of them call. NULL on every rank when any failed. */
struct trainer *trainer_new(const struct plan *plan, const struct schedule *schedule,
                            const struct timeline *planned, const struct data *data, uint64_t seed,
                            MPI_Comm comm, struct errors *errors);
void trainer_free(struct trainer *trainer); /* collective; NULL is allowed */

struct state *trainer_state(struct trainer *trainer); /* for checkpoints and import */
/* Steps done, and the seed. The mark goes on behind a step that was not finite, too: it must not be saved
 * then. */
struct progress_mark trainer_mark(const struct trainer *trainer);
void trainer_resume(struct trainer *trainer, struct progress_mark mark);
/* From now on the lanes tell what they are doing: compute as thread 0, send 1, receive 2. pulse must outlive
   the trainer. */
void trainer_watch(struct trainer *trainer, struct pulse *pulse);

/* One step. Errors never come from here but for loss and gradient: a rank that dies takes the run with it. */
struct step_report trainer_step(struct trainer *trainer);

/* Beside each following step the single-process reference runs on rank 0, with the parameters the run has.
   Batches whose top-k margin is below the precision are drawn again from the next seed. Called on all ranks;
   rank 0 then holds a whole model and its gradient twice. */
void trainer_verify(struct trainer *trainer);
/* Of rank 0, on all ranks. Collective. */
struct verification trainer_verification(const struct trainer *trainer);

/* reports: (ranks), filled on every rank. Peaks are of all steps so far. Collective. */
void trainer_memory(struct trainer *trainer, struct memory_report *reports);
int trainer_ranks(const struct trainer *trainer);

/* What the last step really was: a schedule whose groups are ranks, and its measured timeline. On rank 0; the
   caller frees both. Collective. */
struct schedule *trainer_measured(struct trainer *trainer, struct timeline *timeline);

#endif
