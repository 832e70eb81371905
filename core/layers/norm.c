/*
RMSNorm, embedding and element-wise sums.

Sums over a row use a fixed number of lanes, which the compiler turns into vector registers without being
allowed to reorder floating-point sums in general.
*/
#include "layers/kernels.h"

#include <math.h>
#include <string.h>

enum { LANES = 16, ROWS_A_TASK = 64 };

floatX vector_dot(const floatX *a, const floatX *b, int count) {
    floatX lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += a[i + lane] * b[i + lane];
    floatX sum = 0;
    for (; i < count; i++) sum += a[i] * b[i];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* Tasks of ROWS_A_TASK rows whatever the number of workers, so that partial sums are the same too. */
static int task_count(int rows) {
    return (rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
}
static int task_end(int task, int rows) {
    int end = (task + 1) * ROWS_A_TASK;
    return end < rows ? end : rows;
}

/* ---- sums -------------------------------------------------------------------------------------------- */

enum { ELEMENTS_A_TASK = 1 << 15 };
struct addition {
    floatX *y;
    const floatX *x;
    size_t count;
};

static void add_part(void *context, int i) {
    const struct addition *add = context;
    size_t start = (size_t)i * ELEMENTS_A_TASK;
    size_t end = start + ELEMENTS_A_TASK < add->count ? start + ELEMENTS_A_TASK : add->count;
    floatX *restrict y = add->y;
    const floatX *restrict x = add->x;
    for (size_t e = start; e < end; e++) y[e] += x[e];
}

void vector_add(struct context *context, floatX *y, const floatX *x, size_t count) {
    struct addition add = {y, x, count};
    workers_run(context->workers, (int)((count + ELEMENTS_A_TASK - 1) / ELEMENTS_A_TASK), add_part, &add);
}

/* ---- embedding --------------------------------------------------------------------------------------- */

void embedding_forward(struct context *context, floatX *y, const floatX *table, const int *ids, int tokens,
                       int hidden) {
    (void)context;
    for (int t = 0; t < tokens; t++)
        memcpy(y + (size_t)t * hidden, table + (size_t)ids[t] * hidden, (size_t)hidden * sizeof *y);
}

void embedding_backward(struct context *context, floatX *dtable, const floatX *dy, const int *ids, int tokens,
                        int hidden) {
    (void)context; /* a token may occur twice: rows are added in order */
    for (int t = 0; t < tokens; t++) {
        floatX *restrict row = dtable + (size_t)ids[t] * hidden;
        const floatX *restrict from = dy + (size_t)t * hidden;
        for (int i = 0; i < hidden; i++) row[i] += from[i];
    }
}

/* ---- RMSNorm ----------------------------------------------------------------------------------------- */

struct norm {
    floatX *y, *partial; /* backward: y is dx; partial (tasks, width) or NULL */
    const floatX *x, *dy, *weight;
    int rows, width;
    double eps;
    bool add;
};

static floatX reciprocal_root(const floatX *x, int width, double eps) {
    return 1 / (floatX)sqrt((double)vector_dot(x, x, width) / width + eps);
}

static void norm_forward_rows(void *context, int task) {
    const struct norm *norm = context;
    for (int r = task * ROWS_A_TASK; r < task_end(task, norm->rows); r++) {
        const floatX *restrict x = norm->x + (size_t)r * norm->width, *restrict weight = norm->weight;
        floatX *restrict y = norm->y + (size_t)r * norm->width;
        floatX scale = reciprocal_root(x, norm->width, norm->eps);
        for (int i = 0; i < norm->width; i++) y[i] = x[i] * scale * weight[i];
    }
}

void rmsnorm_forward(struct context *context, floatX *y, const floatX *x, const floatX *weight, int rows,
                     int width, double eps) {
    struct norm norm = {.y = y, .x = x, .weight = weight, .rows = rows, .width = width, .eps = eps};
    workers_run(context->workers, task_count(rows), norm_forward_rows, &norm);
}

/* With r = 1/sqrt(mean x² + eps), n = x r and g = dy · weight: dx = r (g − n · mean(g n)), dweight = Σ dy n.
 */
static void norm_backward_rows(void *context, int task) {
    const struct norm *norm = context;
    int width = norm->width;
    floatX *partial = norm->partial ? norm->partial + (size_t)task * width : NULL;
    const floatX *weight = norm->weight;
    if (partial) memset(partial, 0, (size_t)width * sizeof *partial);
    for (int r = task * ROWS_A_TASK; r < task_end(task, norm->rows); r++) {
        const floatX *x = norm->x + (size_t)r * width, *dy = norm->dy + (size_t)r * width;
        floatX *dx = norm->y + (size_t)r * width;
        floatX scale = reciprocal_root(x, width, norm->eps), lanes[LANES] = {0}, sum = 0;
        int whole = width / LANES * LANES;
        for (int i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] += dy[i + lane] * weight[i + lane] * x[i + lane];
        for (int i = whole; i < width; i++) sum += dy[i] * weight[i] * x[i];
        for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
        if (partial)
            for (int i = 0; i < width; i++) partial[i] += dy[i] * x[i] * scale;
        floatX shift = sum * scale * scale * scale / width;
        if (norm->add)
            for (int i = 0; i < width; i++) dx[i] += dy[i] * weight[i] * scale - x[i] * shift;
        else
            for (int i = 0; i < width; i++) dx[i] = dy[i] * weight[i] * scale - x[i] * shift;
    }
}

void rmsnorm_backward(struct context *context, floatX *dx, floatX *dweight, const floatX *dy, const floatX *x,
                      const floatX *weight, int rows, int width, double eps, bool add) {
    int tasks = task_count(rows);
    struct norm norm = {
        .y = dx, .x = x, .dy = dy, .weight = weight, .rows = rows, .width = width, .eps = eps, .add = add};
    floatX *partial = norm.partial = dweight ? scratch_floats(context, (size_t)tasks * width) : NULL;
    workers_run(context->workers, tasks, norm_backward_rows, &norm);
    if (!dweight) return;
    for (int task = 0; task < tasks; task++)
        for (int i = 0; i < width; i++) dweight[i] += partial[(size_t)task * width + i];
    scratch_release(context, partial);
}
