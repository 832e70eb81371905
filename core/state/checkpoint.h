/*
Checkpoints: a folder a step, a file a rank, found by parameter name.

    DIR/step-00000100/rank-0003.safetensors   this rank's slices of values and moments
    DIR/step-00000100/checkpoint.json         step, seed, model, size and checksum (XXH64) of every file

- Every rank writes a slice of each parameter it holds (state.h): no value is written twice. A piece is named
by its parameter and the first element, so any system, layout, ZeRO level or number of ranks can read it:
"NAME", or "NAME@24" for what starts at element 24, and the moments as "optimizer.moment1.NAME" and
"optimizer.moment2.NAME". FP32, FP64 and BF16 are converted where a run holds another of them.
- All is written into DIR/.step-00000100.tmp, synced, and renamed once every rank has succeeded: a folder that
is there is complete. A failed one is removed; one of a killed run is ignored, and removed by the next write.
- Resuming with the same layout and precision gives the same bits as never having stopped.
*/
#ifndef STATE_CHECKPOINT_H
#define STATE_CHECKPOINT_H

#include "base/base.h"

#include <mpi.h>

struct state;

/* Steps done, and the seed that data and noise are drawn from. */
struct progress_mark {
    int64_t step;
    uint64_t seed;
};

/* folder: on a file system that all ranks see, of one run at a time, since every write removes what a killed
   one left. Collective over comm. False on every rank when any failed; each failing rank's errors name file,
   rank and step, the others' stay empty. */
bool checkpoint_write(const struct state *state, MPI_Comm comm, const char *folder, struct progress_mark mark,
                      struct errors *errors);
/* path: a checkpoint's folder, or one that holds checkpoints: then its latest. Collective; false on every
   rank when any failed. A damaged checkpoint's error names the file and the latest other checkpoint that is
   sound. State and mark change only when all is sound. */
bool checkpoint_read(struct state *state, MPI_Comm comm, const char *path, struct progress_mark *mark,
                     struct errors *errors);

/* ---- the folder, before a run begins ------------------------------------------------------------------- */

/* Makes the folder, with those above it, and sees that a file can be created there and that the disk has room
   for `bytes`. False with what is in the way in errors. */
bool checkpoint_folder_check(const char *folder, double bytes, struct errors *errors);

/* The folder is this process's until it ends: DIR/.lock, which names host, process and its start. Of a run
   that is gone it is taken over. NULL with an error that says who has it. One process of a run takes it. */
struct folder_lock *folder_lock_take(const char *folder, struct errors *errors);
/* Whether another run has it at the moment; then an error says who. */
bool folder_lock_is_free(const char *folder, struct errors *errors);
const char *folder_lock_file(const struct folder_lock *lock); /* whoever is killed removes it */
void folder_lock_release(struct folder_lock *lock);           /* NULL is allowed */

#endif
