/*
What the activations of a rank's cells weigh: really, once it is known which copies came, and by the schedule.
*/
#ifndef TRAIN_SIZES_H
#define TRAIN_SIZES_H

#include "train/runner.h"

enum attention_recompute attention_level(const struct runner *runner, int layer);
enum ffn_recompute ffn_level(const struct runner *runner, int layer);
/* Bytes that the feed-forward part keeps, or restores, of the copies received. A pipelined system's own
   tokens come behind them. */
size_t received_kept_bytes(const struct runner *runner, int layer, const struct cell *cell);
size_t received_restored_bytes(const struct runner *runner, int layer, const struct cell *cell);
/* Bytes of an activation on this rank; of the feed-forward side, once the copies have been announced. */
size_t activation_bytes(const struct runner *runner, const struct activation *activation);

/* Fills expected, expected_static and expected_peak. planned: the simulated timeline. */
void fill_expected(struct runner *runner, const struct timeline *planned, struct arena *arena);

#endif
