/*
Timing work that all ranks do at once.

Ranks that share processors take turns of milliseconds, much longer than most work here. So a repeat goes
round all stages again and again, long enough for every rank to have had several turns, and a stage's time is
its part of the whole.
*/
#include "profile/profile.h"

#include <math.h>
#include <stdlib.h>

/* Of work alone, without the turns of others. */
static const double REPEAT_SECONDS = 0.02;
enum { MOST_ROUNDS = 2000 };

static double run_round(const struct lap *lap, double *seconds) {
    double began = seconds_now(), before = began;
    for (int stage = 0; stage < lap->stages; stage++) {
        lap->run(lap->work, stage);
        double now = seconds_now();
        seconds[stage] += now - before;
        before = now;
    }
    return before - began;
}

/* The shortest of a few: without others' turns. The same number on all ranks. */
static int rounds_of(const struct lap *lap) {
    double unused[MOST_STAGES] = {0}, shortest = INFINITY;
    MPI_Barrier(lap->comm);
    for (int i = 0; i < 3; i++) shortest = fmin(shortest, run_round(lap, unused));
    MPI_Allreduce(MPI_IN_PLACE, &shortest, 1, MPI_DOUBLE, MPI_MAX, lap->comm);
    return (int)fmin(fmax(ceil(REPEAT_SECONDS / fmax(shortest, 1e-9)), 1), MOST_ROUNDS);
}

void lap_measure(const struct lap *lap, struct spread *seconds) {
    int rounds = rounds_of(lap), ranks;
    double *samples = must_alloc((size_t)(lap->stages * lap->repeats) * sizeof *samples);
    MPI_Comm_size(lap->comm, &ranks);
    for (int i = 0; i < lap->repeats; i++) {
        double sums[MOST_STAGES] = {0};
        MPI_Barrier(lap->comm);
        for (int round = 0; round < rounds; round++) run_round(lap, sums);
        MPI_Allreduce(MPI_IN_PLACE, sums, lap->stages, MPI_DOUBLE, MPI_SUM, lap->comm);
        for (int stage = 0; stage < lap->stages; stage++)
            samples[stage * lap->repeats + i] = sums[stage] / rounds / ranks;
    }
    for (int stage = 0; stage < lap->stages; stage++)
        seconds[stage] = spread_of(samples + stage * lap->repeats, lap->repeats);
    free(samples);
}
