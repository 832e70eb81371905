/* What tests with random cases and closed forms share; included behind cmocka. */
#ifndef TESTS_CASES_H
#define TESTS_CASES_H

#include "plan/plan.h"

#include <math.h>
#include <stdlib.h>

/* DISAGMOE_SAMPLE=N runs one N-th of the random cases, at least one: for slow runs (valgrind, sanitizers). */
static inline int sampled(int count) {
    const char *sample = getenv("DISAGMOE_SAMPLE");
    int divisor = sample ? atoi(sample) : 1;
    return divisor > 1 ? count / divisor + 1 : count;
}

/* A value of order.without: nothing half of the time, else any of its words in any order. */
static inline void add_random_without(struct text *text, struct rng *rng) {
    static const char *const words[] = {"fused-combine", "duplex", "interleaving", "waves"};
    int off = rng_below(rng, 2) ? rng_below(rng, 16) : 0, first = rng_below(rng, 4), said = 0;
    text_add(text, "[");
    for (int k = 0; k < 4; k++)
        if (off >> (first + k) % 4 & 1) text_add(text, "%s\"%s\"", said++ ? "," : "", words[(first + k) % 4]);
    text_add(text, "]");
}

/* To a part of the larger one. */
static inline void assert_within(double found, double expected, double relative) {
    if (!(fabs(found - expected) <= relative * fmax(fabs(found), fabs(expected))))
        fail_msg("found %.17g, expected %.17g", found, expected);
}

#endif
