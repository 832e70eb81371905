/*
What the verbs that run ranks share: agreeing on errors, the data of a run, whether it fits here.
*/
#ifndef CLI_TOGETHER_H
#define CLI_TOGETHER_H

#include "cli/cli.h"
#include "train/train.h"

/* Whether no rank has errors. Where some have, the first of them prints its own. Collective. */
bool agree(MPI_Comm comm, struct errors *errors);
/* What a point trains on; NULL with errors. */
struct data *open_data(const struct point *point, struct errors *errors);
/* A model of real size is for the GPUs of a cluster: better to say so than to fill this machine's memory.
   verb: who says it; beside: bytes that are needed besides the run's. */
bool fits_this_machine(const char *verb, const struct system *system, const struct plan *plan, double beside,
                       struct errors *errors);

#endif
