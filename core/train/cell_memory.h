/*
Memory of cells: activations, taken and freed where the schedule says, and what only passes from one operation
to the next, a transfer's or a computation's.
*/
#ifndef TRAIN_CELL_MEMORY_H
#define TRAIN_CELL_MEMORY_H

#include "train/runner.h"

/* Bookkeeping and hand-over memory: counted, freed with passing_free or at the step's end. */
void *passing_new(struct runner *runner, size_t bytes); /* zeroed */
/* Frees what a cell's field points to, which may be NULL, and clears the field. */
void passing_free(struct runner *runner, floatX **field);
void passing_free_all(struct runner *runner);
/* Where to write the residual stream at the cell's input: where it is, or new memory; and its gradient. */
floatX *stream_for(struct runner *runner, struct cell *cell, int tokens);
floatX *gradient_for(struct runner *runner, struct cell *cell, int tokens);

/* Memory that an operation's activations take, by who starts it, when sizes are known; and what the
   operation's end frees. */
void take_memory(struct runner *runner, int op);
void free_memory(struct runner *runner, int op);

#endif
