/*
The single-process reference beside a run.
*/
#ifndef TRAIN_VERIFY_H
#define TRAIN_VERIFY_H

#include "train/runner.h"

struct verifier *verifier_new(const struct runner *runner, uint64_t seed);
void verifier_free(struct verifier *verifier); /* NULL is allowed */

/* Ahead of a step: the reference takes the run's parameters over and computes the batch of runner->step.
   Returns the seed the batch is drawn from: the one given, or a later one. Collective. */
uint64_t verify_batch(struct verifier *verifier, const struct runner *runner, uint64_t seed);
/* Compares the step's losses and reduced gradients with the reference's. Collective. */
void verify_step(struct verifier *verifier, const struct runner *runner, const struct step_losses *losses);
/* max|found − expected| ÷ max(max|expected|, floor); NaN where either holds one. */
double relative_difference(const floatX *found, const floatX *expected, size_t count, double floor);
/* On rank 0; zeros on the others. */
struct verification verifier_found(const struct verifier *verifier);

#endif
