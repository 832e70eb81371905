/*
A rank's three lanes.
*/
#ifndef TRAIN_LANES_H
#define TRAIN_LANES_H

#include "train/runner.h"

/* Runs a step's operations; returns when all lanes are done. */
void run_lanes(struct runner *runner);

#endif
