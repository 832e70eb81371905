/*
What ranks that hold sequences between them do together: the collectives of attention under context
parallelism.
*/
#ifndef TRAIN_COLLECTIVES_H
#define TRAIN_COLLECTIVES_H

#include "train/runner.h"

/* Fills run and collectives. Collective over runner->comm. */
void make_collectives(struct runner *runner);

#endif
