/*
The systems that DisagMoE is compared with, one file each, and the registry of all systems.
*/
#ifndef BASELINES_H
#define BASELINES_H

#include "plan/plan.h"

extern const struct system megatron;

/* All registered systems, baselines first; sets *count. */
const struct system *const *systems_all(int *count);
/* NULL when there is none of that name. */
const struct system *system_named(const char *name);

#endif
