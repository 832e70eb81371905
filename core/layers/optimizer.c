/*
AdamW, learning-rate schedule, clipping, and BF16 for optimizer state and summed gradients.
*/
#include "layers/kernels.h"

#include <math.h>
#include <string.h>

struct optimizer optimizer_default(void) {
    return (struct optimizer){.learning_rate = 3e-4,
                              .final_learning_rate = 3e-5,
                              .warmup_steps = 10,
                              .steps = 1000,
                              .beta1 = 0.9,
                              .beta2 = 0.95,
                              .epsilon = 1e-8,
                              .weight_decay = 0.1,
                              .clip = 1.0};
}

double optimizer_rate(const struct optimizer *optimizer, int64_t step) {
    double peak = optimizer->learning_rate, last = optimizer->final_learning_rate;
    if (step < optimizer->warmup_steps) return peak * (double)(step + 1) / (double)optimizer->warmup_steps;
    if (step >= optimizer->steps) return last;
    double done =
        (double)(step - optimizer->warmup_steps) / (double)(optimizer->steps - optimizer->warmup_steps);
    return last + (peak - last) * 0.5 * (1 + cos(acos(-1) * done));
}

double sum_of_squares(const floatX *x, size_t count) {
    enum { WIDE = 8 };
    double lanes[WIDE] = {0}, sum = 0;
    size_t i = 0;
    for (; i + WIDE <= count; i += WIDE)
        for (int lane = 0; lane < WIDE; lane++) lanes[lane] += (double)x[i + lane] * (double)x[i + lane];
    for (; i < count; i++) sum += (double)x[i] * (double)x[i];
    for (int lane = 0; lane < WIDE; lane++) sum += lanes[lane];
    return sum;
}

double clip_scale(const struct optimizer *optimizer, double squares) {
    double norm = sqrt(squares);
    return optimizer->clip > 0 && norm > optimizer->clip ? optimizer->clip / norm : 1;
}

/* ---- BF16 -------------------------------------------------------------------------------------------- */

/* 32 well mixed bits of a key and a number (the finaliser of MurmurHash3). */
static uint32_t mix(uint64_t key, uint64_t number) {
    uint64_t x = key + number * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return (uint32_t)(x >> 32);
}

/* Up with the probability of the part cut off. Infinities and NaN stay what they are. */
static uint16_t bf16_stochastic(float value, uint32_t random) {
    uint32_t bits = float_bits(value);
    if ((bits & 0x7f800000u) == 0x7f800000u) return bf16_from_float(value);
    return (uint16_t)((bits + (random & 0xffff)) >> 16);
}

enum { ELEMENTS_A_TASK = 1 << 15 };

static int part_count(size_t count) {
    return (int)((count + ELEMENTS_A_TASK - 1) / ELEMENTS_A_TASK);
}

struct bf16_sum {
    uint16_t *sums;
    const floatX *addends;
    size_t count, first;
    uint64_t key;
};

static void add_part(void *context, int task) {
    const struct bf16_sum sum = *(const struct bf16_sum *)context;
    size_t start = (size_t)task * ELEMENTS_A_TASK;
    size_t end = start + ELEMENTS_A_TASK < sum.count ? start + ELEMENTS_A_TASK : sum.count;
    for (size_t i = start; i < end; i++)
        sum.sums[i] = bf16_stochastic((float)((floatX)bf16_to_float(sum.sums[i]) + sum.addends[i]),
                                      mix(sum.key, sum.first + i));
}

void add_bf16(struct context *context, uint16_t *sums, const floatX *addends, size_t count, size_t first,
              uint64_t key) {
    struct bf16_sum sum = {sums, addends, count, first, key};
    workers_run(context->workers, part_count(count), add_part, &sum);
}

/* ---- AdamW ------------------------------------------------------------------------------------------- */

struct adamw_update {
    floatX *values, *moment1, *moment2;
    uint16_t *half1, *half2; /* in place of the moments above */
    const floatX *gradients;
    size_t count, first;
    uint64_t key;
    floatX rate, decay, beta1, beta2, epsilon, scale, correction1, correction2;
};

static struct adamw_update update_of(const struct optimizer *optimizer, int64_t step, double scale,
                                     bool decay) {
    double rate = optimizer_rate(optimizer, step);
    return (struct adamw_update){
        .rate = (floatX)rate,
        .decay = decay ? (floatX)(1 - rate * optimizer->weight_decay) : 1,
        .beta1 = (floatX)optimizer->beta1,
        .beta2 = (floatX)optimizer->beta2,
        .epsilon = (floatX)optimizer->epsilon,
        .scale = (floatX)scale,
        .correction1 = (floatX)(1 / (1 - pow(optimizer->beta1, (double)(step + 1)))),
        .correction2 = (floatX)(1 / (1 - pow(optimizer->beta2, (double)(step + 1)))),
    };
}

static floatX root(floatX x) {
#ifdef FLOATX_DOUBLE
    return sqrt(x);
#else
    return sqrtf(x);
#endif
}

static void adamw_part(void *context, int task) {
    const struct adamw_update u = *(const struct adamw_update *)context;
    size_t start = (size_t)task * ELEMENTS_A_TASK;
    size_t end = start + ELEMENTS_A_TASK < u.count ? start + ELEMENTS_A_TASK : u.count;
    floatX *restrict values = u.values, *restrict m = u.moment1, *restrict v = u.moment2;
    const floatX *restrict gradients = u.gradients;
    for (size_t i = start; i < end; i++) {
        floatX g = gradients[i] * u.scale;
        m[i] = u.beta1 * m[i] + (1 - u.beta1) * g;
        v[i] = u.beta2 * v[i] + (1 - u.beta2) * g * g;
        values[i] =
            values[i] * u.decay - u.rate * (m[i] * u.correction1) / (root(v[i] * u.correction2) + u.epsilon);
    }
}

static void adamw_bf16_part(void *context, int task) {
    const struct adamw_update u = *(const struct adamw_update *)context;
    size_t start = (size_t)task * ELEMENTS_A_TASK;
    size_t end = start + ELEMENTS_A_TASK < u.count ? start + ELEMENTS_A_TASK : u.count;
    for (size_t i = start; i < end; i++) {
        floatX g = u.gradients[i] * u.scale;
        floatX m = u.beta1 * (floatX)bf16_to_float(u.half1[i]) + (1 - u.beta1) * g;
        floatX v = u.beta2 * (floatX)bf16_to_float(u.half2[i]) + (1 - u.beta2) * g * g;
        u.half1[i] = bf16_stochastic((float)m, mix(u.key, 2 * (u.first + i)));
        u.half2[i] = bf16_stochastic((float)v, mix(u.key, 2 * (u.first + i) + 1));
        u.values[i] =
            u.values[i] * u.decay - u.rate * (m * u.correction1) / (root(v * u.correction2) + u.epsilon);
    }
}

void adamw(struct context *context, const struct optimizer *optimizer, int64_t step, double scale, bool decay,
           floatX *values, const floatX *gradients, floatX *moment1, floatX *moment2, size_t count) {
    struct adamw_update update = update_of(optimizer, step, scale, decay);
    update.values = values;
    update.gradients = gradients;
    update.moment1 = moment1;
    update.moment2 = moment2;
    update.count = count;
    workers_run(context->workers, part_count(count), adamw_part, &update);
}

void adamw_bf16(struct context *context, const struct optimizer *optimizer, int64_t step, double scale,
                bool decay, floatX *values, const floatX *gradients, uint16_t *moment1, uint16_t *moment2,
                size_t count, size_t first, uint64_t key) {
    struct adamw_update update = update_of(optimizer, step, scale, decay);
    update.values = values;
    update.gradients = gradients;
    update.half1 = moment1;
    update.half2 = moment2;
    update.count = count;
    update.first = first;
    update.key = key;
    workers_run(context->workers, part_count(count), adamw_bf16_part, &update);
}
