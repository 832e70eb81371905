/* What tests with random cases and closed forms share; included behind cmocka. */
#ifndef TESTS_CASES_H
#define TESTS_CASES_H

#include <math.h>
#include <stdlib.h>

/* DISAGMOE_SAMPLE=N runs one N-th of the random cases, at least one: for slow runs (valgrind, sanitizers). */
static inline int sampled(int count) {
    const char *sample = getenv("DISAGMOE_SAMPLE");
    int divisor = sample ? atoi(sample) : 1;
    return divisor > 1 ? count / divisor + 1 : count;
}

/* To a part of the larger one. */
static inline void assert_within(double found, double expected, double relative) {
    if (!(fabs(found - expected) <= relative * fmax(fabs(found), fabs(expected))))
        fail_msg("found %.17g, expected %.17g", found, expected);
}

#endif
