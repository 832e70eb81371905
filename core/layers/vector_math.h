/*
The exponential as a loop the compiler can vectorise, private to the layers.

The C library's expf is a call per element. Here x = n ln 2 + r with |r| ≤ ln 2 / 2 and e^r by a polynomial of
degree 7, whose error (1e-7 relative) is that of float itself. The double build uses the library: it is for
proofs.
*/
#ifndef LAYERS_VECTOR_MATH_H
#define LAYERS_VECTOR_MATH_H

#include "layers/kernels.h"

#include <math.h>
#include <string.h>

#ifdef FLOATX_DOUBLE
static inline floatX exponential(floatX x) {
    return exp(x);
}
#else
static inline float exponential(float x) {
    /* below −87 the result would be denormal, above 88 infinite: clamped, both never matter here */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float magic = 12582912.0f; /* 1.5 · 2²³: adding it rounds to an integer */
    float n = x * 1.44269504f + magic - magic;
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits = ((uint32_t)(int32_t)n + 127) << 23; /* unsigned: n of a NaN is any number */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}
#endif

static inline floatX sigmoid(floatX x) {
    return 1 / (1 + exponential(-x));
}

/* Largest of count ≥ 1 values. */
static inline floatX largest(const floatX *x, int count) {
    enum { WIDE = 16 };
    floatX lanes[WIDE], most = x[0];
    for (int lane = 0; lane < WIDE; lane++) lanes[lane] = most;
    int i = 0;
    for (; i + WIDE <= count; i += WIDE)
        for (int lane = 0; lane < WIDE; lane++)
            lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int lane = 0; lane < WIDE; lane++) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

/* y = exp(x · scale − shift); returns the sum. y may be x. */
static inline floatX exponentials(floatX *y, const floatX *x, int count, floatX scale, floatX shift) {
    enum { WIDE = 16 };
    floatX lanes[WIDE] = {0}, sum = 0;
    int i = 0;
    for (; i + WIDE <= count; i += WIDE)
        for (int lane = 0; lane < WIDE; lane++) {
            floatX value = exponential(x[i + lane] * scale - shift);
            y[i + lane] = value;
            lanes[lane] += value;
        }
    for (; i < count; i++) sum += y[i] = exponential(x[i] * scale - shift);
    for (int lane = 0; lane < WIDE; lane++) sum += lanes[lane];
    return sum;
}

#endif
