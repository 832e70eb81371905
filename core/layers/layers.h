/*
What one GPU computes: front door of core/layers.

- kernels.h is what a backend computes, function by function, on plain arrays.
- parameters.h names a model's parameters and says where they lie in memory.
- blocks.h makes of both the halves of a layer that operations of a schedule run.
- reference.h is a whole training step in one process.
*/
#ifndef LAYERS_H
#define LAYERS_H

#include "layers/blocks.h"
#include "layers/kernels.h"
#include "layers/parameters.h"
#include "layers/reference.h"

#endif
