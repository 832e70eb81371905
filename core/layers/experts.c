/*
What an expert does between its two products, and the order in which copies reach experts.
*/
#include "layers/kernels.h"
#include "layers/vector_math.h"

#include <string.h>

enum { ROWS_A_TASK = 16 };
static const floatX GPT_OSS_ALPHA = (floatX)1.702, GPT_OSS_LIMIT = 7;

struct activation_rows {
    floatX *out;
    const floatX *gate_up, *dact;
    int rows, width;
    enum activation_function kind;
};

static int rows_end(const struct activation_rows *a, int task) {
    int end = (task + 1) * ROWS_A_TASK;
    return end < a->rows ? end : a->rows;
}

static void swiglu(floatX *restrict act, const floatX *restrict gate, const floatX *restrict up, int width) {
    for (int i = 0; i < width; i++) act[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

static void swiglu_clamped(floatX *restrict act, const floatX *restrict gate, const floatX *restrict up,
                           int width) {
    for (int i = 0; i < width; i++) {
        floatX g = gate[i] > GPT_OSS_LIMIT ? GPT_OSS_LIMIT : gate[i];
        floatX u = up[i] > GPT_OSS_LIMIT ? GPT_OSS_LIMIT : up[i];
        u = u < -GPT_OSS_LIMIT ? -GPT_OSS_LIMIT : u;
        act[i] = (u + 1) * g * sigmoid(GPT_OSS_ALPHA * g);
    }
}

static void activation_rows_forward(void *context, int task) {
    const struct activation_rows *a = context;
    for (int r = task * ROWS_A_TASK; r < rows_end(a, task); r++) {
        const floatX *gate = a->gate_up + (size_t)r * 2 * a->width;
        (a->kind == ACTIVATION_SWIGLU ? swiglu : swiglu_clamped)(a->out + (size_t)r * a->width, gate,
                                                                 gate + a->width, a->width);
    }
}

void activation_forward(struct context *context, floatX *act, const floatX *gate_up, int rows, int width,
                        enum activation_function kind) {
    struct activation_rows a = {act, gate_up, NULL, rows, width, kind};
    workers_run(context->workers, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, activation_rows_forward, &a);
}

/* The outputs may lie where gate and up do: each element is read before it is written. */
static void swiglu_backward(floatX *dgate, floatX *dup, const floatX *restrict dact, const floatX *gate,
                            const floatX *up, int width) {
#pragma GCC ivdep
    for (int i = 0; i < width; i++) {
        floatX g = gate[i], u = up[i], s = sigmoid(g);
        dgate[i] = dact[i] * u * s * (1 + g * (1 - s));
        dup[i] = dact[i] * g * s;
    }
}

static void swiglu_clamped_backward(floatX *dgate, floatX *dup, const floatX *restrict dact,
                                    const floatX *gate, const floatX *up, int width) {
#pragma GCC ivdep
    for (int i = 0; i < width; i++) {
        floatX g = gate[i] > GPT_OSS_LIMIT ? GPT_OSS_LIMIT : gate[i];
        floatX u = up[i] > GPT_OSS_LIMIT ? GPT_OSS_LIMIT : up[i];
        u = u < -GPT_OSS_LIMIT ? -GPT_OSS_LIMIT : u;
        floatX s = sigmoid(GPT_OSS_ALPHA * g);
        floatX through_gate = dact[i] * (u + 1) * s * (1 + GPT_OSS_ALPHA * g * (1 - s));
        floatX through_up = dact[i] * g * s;
        through_gate = gate[i] > GPT_OSS_LIMIT ? 0 : through_gate;
        through_up = up[i] > GPT_OSS_LIMIT ? 0 : through_up;
        dgate[i] = through_gate;
        dup[i] = up[i] < -GPT_OSS_LIMIT ? 0 : through_up;
    }
}

static void activation_rows_backward(void *context, int task) {
    const struct activation_rows *a = context;
    for (int r = task * ROWS_A_TASK; r < rows_end(a, task); r++) {
        const floatX *gate = a->gate_up + (size_t)r * 2 * a->width, *dact = a->dact + (size_t)r * a->width;
        floatX *dgate = a->out + (size_t)r * 2 * a->width;
        (a->kind == ACTIVATION_SWIGLU ? swiglu_backward : swiglu_clamped_backward)(
            dgate, dgate + a->width, dact, gate, gate + a->width, a->width);
    }
}

void activation_backward(struct context *context, floatX *dgate_up, const floatX *dact, const floatX *gate_up,
                         int rows, int width, enum activation_function kind) {
    struct activation_rows a = {dgate_up, gate_up, dact, rows, width, kind};
    workers_run(context->workers, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, activation_rows_backward, &a);
}

struct permutation permutation_new(struct context *context, const struct route *route, int tokens, int top_k,
                                   int experts) {
    int copies = tokens * top_k, next[experts];
    struct permutation permutation = {0};
    permutation.order = scratch_take(context, ((size_t)copies + experts) * sizeof(int));
    permutation.counts = permutation.order + copies;
    memset(permutation.counts, 0, (size_t)experts * sizeof(int));
    for (int copy = 0; copy < copies; copy++)
        if (route->kept[copy]) permutation.counts[route->ids[copy]]++;
    for (int e = 0; e < experts; e++) {
        next[e] = permutation.copies;
        permutation.copies += permutation.counts[e];
    }
    for (int copy = 0; copy < copies; copy++)
        if (route->kept[copy]) permutation.order[next[route->ids[copy]]++] = copy;
    return permutation;
}
