/*
A step's end: gradients are reduced, losses and norm agreed on, parameters updated.
*/
#ifndef TRAIN_STEP_END_H
#define TRAIN_STEP_END_H

#include "train/runner.h"

/* A lane's gradient reduction: of what all ranks of one group hold. Collective over them. */
void reduce_within_group(struct runner *runner);
/* The optimizer's operation; fills the report but for its times. Collective over all ranks. */
void end_step(struct runner *runner);

#endif
