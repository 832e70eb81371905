/*
Random numbers: xoshiro256** (Blackman and Vigna, 2018), its state filled by splitmix64 as its authors advise.

The normal deviate needs a logarithm and a cosine. Those of the C library may differ in the last bit between
versions and processors, and simulated results must be the same bytes everywhere, so both are computed here
from arithmetic that IEEE 754 fixes, to about 1e-15.
*/
#include "base/base.h"

#include <math.h>

static uint64_t rotate_left(uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

struct rng rng_seed(uint64_t seed) {
    struct rng rng;
    for (int i = 0; i < 4; i++) {
        uint64_t z = seed += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        rng.state[i] = z ^ z >> 31;
    }
    return rng;
}

uint64_t rng_next(struct rng *rng) {
    uint64_t *s = rng->state, result = rotate_left(s[1] * 5, 7) * 9, shifted = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = rotate_left(s[3], 45);
    return result;
}

double rng_uniform(struct rng *rng) {
    return (double)(rng_next(rng) >> 11) * 0x1p-53;
}

uint64_t rng_seed_of(const uint64_t *numbers, size_t count) {
    uint64_t mixed = 0;
    for (size_t i = 0; i < count; i++) {
        struct rng rng = rng_seed(mixed ^ numbers[i]);
        mixed = rng_next(&rng);
    }
    return mixed;
}

int rng_below(struct rng *rng, int bound) {
    uint64_t size = (uint64_t)bound, surplus = (UINT64_MAX % size + 1) % size, next;
    do next = rng_next(rng);
    while (next > UINT64_MAX - surplus); /* the last, incomplete run of remainders */
    return (int)(next % size);
}

/* ln x of a normal x > 0: x = m · 2^e with m near 1, and ln m = 2 artanh((m − 1)/(m + 1)) as a series. */
static double logarithm(double x) {
    int exponent;
    double m = frexp(x, &exponent);
    if (m < 0.70710678118654752) {
        m *= 2;
        exponent--;
    }
    double t = (m - 1) / (m + 1), square = t * t, sum = 0;
    for (int n = 23; n >= 1; n -= 2) sum = sum * square + 1.0 / n;
    return 2 * t * sum + exponent * 0.693147180559945309;
}

/* cos x for 0 ≤ x ≤ π/4 and sin x: Taylor, whose first term left out is below 1e-19. */
static double cosine_near_zero(double x) {
    double sum = 1;
    for (int n = 18; n >= 2; n -= 2) sum = 1 - x * x / (n * (n - 1)) * sum;
    return sum;
}

static double sine_near_zero(double x) {
    double sum = 1;
    for (int n = 19; n >= 3; n -= 2) sum = 1 - x * x / (n * (n - 1)) * sum;
    return x * sum;
}

/* cos 2πu for 0 ≤ u < 1, by the symmetries of the circle's eighths. */
static double cosine_of_turn(double u) {
    const double full = 6.283185307179586477;
    if (u > 0.5) u = 1 - u;
    double sign = 1;
    if (u > 0.25) {
        u = 0.5 - u;
        sign = -1;
    }
    return sign * (u <= 0.125 ? cosine_near_zero(full * u) : sine_near_zero(full * (0.25 - u)));
}

double rng_normal(struct rng *rng) {
    double radius = 1 - rng_uniform(rng); /* (0, 1] */
    double turn = rng_uniform(rng);
    return sqrt(-2 * logarithm(radius)) * cosine_of_turn(turn);
}
