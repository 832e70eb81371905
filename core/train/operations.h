/*
Computations of the compute lane.
*/
#ifndef TRAIN_OPERATIONS_H
#define TRAIN_OPERATIONS_H

#include "train/runner.h"

/* Any but the optimizer. What the operation's activations take must be there. */
void compute_operation(struct runner *runner, int op);

#endif
