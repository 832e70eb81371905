/*
Matrix products: OpenBLAS on one thread each, cut into tasks for the workers.

Experts get uneven numbers of rows, so a grouped product is cut by rows rather than by expert: one expert with
all rows is shared by all workers, many small ones are dealt out whole.
*/
#include "layers/kernels.h"

#include <cblas.h>
#include <string.h>

enum { SMALLEST_BLOCK = 48 }; /* rows below which cutting a product costs more than it gains */

/* C (m, n) = op(A) op(B) + beta C. BLAS forbids a leading dimension of 0 and some versions misread empty
   matrices, so these never reach it. */
static void gemm(bool transpose_a, bool transpose_b, int m, int n, int k, const floatX *a, int a_stride,
                 const floatX *b, int b_stride, double beta, floatX *c, int c_stride) {
    if (m == 0 || n == 0) return;
    if (k == 0) {
        for (int i = 0; beta == 0 && i < m; i++) memset(c + (size_t)i * c_stride, 0, (size_t)n * sizeof *c);
        return;
    }
    enum CBLAS_TRANSPOSE ta = transpose_a ? CblasTrans : CblasNoTrans;
    enum CBLAS_TRANSPOSE tb = transpose_b ? CblasTrans : CblasNoTrans;
#ifdef FLOATX_DOUBLE
    cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, a_stride, b, b_stride, beta, c, c_stride);
#else
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, a_stride, b, b_stride, (float)beta, c, c_stride);
#endif
}

/* ---- cutting ----------------------------------------------------------------------------------------- */

/* A piece of a group's product: `length` rows of its input, or of its weight, from `start`. */
struct piece {
    int group, start, length;
    int first_row; /* of the group, among all rows */
};
struct product {
    const struct groups *groups;
    struct piece *pieces;
    floatX *out;
    const floatX *a, *b;
    int in, width; /* width: the layer's outputs */
};

static int block_of(const struct context *context, int total) {
    int threads = context_threads(context);
    if (threads == 1) return total > 0 ? total : 1;
    int block = (total + 2 * threads - 1) / (2 * threads);
    return block > SMALLEST_BLOCK ? block : SMALLEST_BLOCK;
}

static int total_rows(const struct groups *groups) {
    int total = 0;
    for (int g = 0; g < groups->count; g++) total += groups->rows[g];
    return total;
}

/* Pieces of at most `block`, of the groups' rows or, when length is not 0, of `length` weight rows each. */
static int cut(struct context *context, struct product *product, int block, int length) {
    const struct groups *groups = product->groups;
    int most = 0, count = 0, first = 0;
    for (int g = 0; g < groups->count; g++) most += (length ? length : groups->rows[g]) / block + 1;
    product->pieces = scratch_take(context, (size_t)most * sizeof *product->pieces);
    for (int g = 0; g < groups->count; first += groups->rows[g++]) {
        if (!groups->rows[g]) continue;
        int end = length ? length : groups->rows[g];
        for (int start = 0; start < end; start += block) {
            int rest = end - start;
            product->pieces[count++] = (struct piece){g, start, rest < block ? rest : block, first};
        }
    }
    return count;
}

/* ---- grouped linear ---------------------------------------------------------------------------------- */

static void forward_piece(void *context, int i) {
    const struct product *p = context;
    const struct piece piece = p->pieces[i];
    const floatX *bias = p->groups->biases ? p->groups->biases[piece.group] : NULL;
    size_t row = (size_t)piece.first_row + piece.start;
    floatX *y = p->out + row * p->width;
    for (int r = 0; bias && r < piece.length; r++)
        memcpy(y + (size_t)r * p->width, bias, (size_t)p->width * sizeof *y);
    gemm(false, true, piece.length, p->width, p->in, p->a + row * p->in, p->in,
         p->groups->weights[piece.group], p->in, bias ? 1 : 0, y, p->width);
}

void grouped_linear_forward(struct context *context, const struct groups *groups, floatX *y, const floatX *x,
                            int in, int out) {
    struct product product = {.groups = groups, .out = y, .a = x, .in = in, .width = out};
    int count = cut(context, &product, block_of(context, total_rows(groups)), 0);
    workers_run(context->workers, count, forward_piece, &product);
    scratch_release(context, product.pieces);
}

static void backward_input_piece(void *context, int i) {
    const struct product *p = context;
    const struct piece piece = p->pieces[i];
    size_t row = (size_t)piece.first_row + piece.start;
    gemm(false, false, piece.length, p->in, p->width, p->a + row * p->width, p->width,
         p->groups->weights[piece.group], p->in, 0, p->out + row * p->in, p->in);
}

void grouped_linear_backward_input(struct context *context, const struct groups *groups, floatX *dx,
                                   const floatX *dy, int in, int out) {
    struct product product = {.groups = groups, .out = dx, .a = dy, .in = in, .width = out};
    int count = cut(context, &product, block_of(context, total_rows(groups)), 0);
    workers_run(context->workers, count, backward_input_piece, &product);
    scratch_release(context, product.pieces);
}

/* Outputs start … start + length of one group's weight and bias. */
static void backward_weight_piece(void *context, int i) {
    const struct product *p = context;
    const struct piece piece = p->pieces[i];
    const struct groups *groups = p->groups;
    int rows = groups->rows[piece.group];
    const floatX *dy = p->a + (size_t)piece.first_row * p->width + piece.start;
    gemm(true, false, piece.length, p->in, rows, dy, p->width, p->b + (size_t)piece.first_row * p->in, p->in,
         1, groups->weights[piece.group] + (size_t)piece.start * p->in, p->in);
    floatX *dbias = groups->biases ? groups->biases[piece.group] : NULL;
    for (int r = 0; dbias && r < rows; r++)
        for (int o = 0; o < piece.length; o++) dbias[piece.start + o] += dy[(size_t)r * p->width + o];
}

void grouped_linear_backward_weight(struct context *context, const struct groups *gradients, const floatX *dy,
                                    const floatX *x, int in, int out) {
    struct product product = {.groups = gradients, .a = dy, .b = x, .in = in, .width = out};
    int busy = 0;
    for (int g = 0; g < gradients->count; g++) busy += gradients->rows[g] > 0;
    /* With many experts whole weights are pieces enough; one matrix is cut among the workers. */
    int block = busy >= 4 * context_threads(context) ? out : block_of(context, out);
    int count = cut(context, &product, block, out);
    workers_run(context->workers, count, backward_weight_piece, &product);
    scratch_release(context, product.pieces);
}

/* ---- one matrix -------------------------------------------------------------------------------------- */

/* The casts away from const are safe: forward and backward_input only read weights and biases. */
void linear_forward(struct context *context, floatX *y, const floatX *x, const floatX *weight,
                    const floatX *bias, int rows, int in, int out) {
    floatX *weights[] = {(floatX *)(uintptr_t)weight}, *biases[] = {(floatX *)(uintptr_t)bias};
    struct groups groups = {1, &rows, weights, biases};
    grouped_linear_forward(context, &groups, y, x, in, out);
}

void linear_backward_input(struct context *context, floatX *dx, const floatX *dy, const floatX *weight,
                           int rows, int in, int out) {
    floatX *weights[] = {(floatX *)(uintptr_t)weight};
    struct groups groups = {1, &rows, weights, NULL};
    grouped_linear_backward_input(context, &groups, dx, dy, in, out);
}

void linear_backward_weight(struct context *context, floatX *dweight, floatX *dbias, const floatX *dy,
                            const floatX *x, int rows, int in, int out) {
    floatX *weights[] = {dweight}, *biases[] = {dbias};
    struct groups groups = {1, &rows, weights, biases};
    grouped_linear_backward_weight(context, &groups, dy, x, in, out);
}
