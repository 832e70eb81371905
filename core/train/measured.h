/*
What a step really was: the times that the lanes measured.
*/
#ifndef TRAIN_MEASURED_H
#define TRAIN_MEASURED_H

#include "train/runner.h"

/* Seconds in which this rank's compute lane waited for a transfer in progress. */
double exposed_seconds(const struct runner *runner);
/* A schedule whose groups are ranks, and its timeline. On rank 0, else NULL; the caller frees both.
 * Collective. */
struct schedule *measured_schedule(const struct runner *runner, struct timeline *timeline);

#endif
