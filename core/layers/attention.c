/*
RoPE, QK-norm and core attention with its backward pass.

A tile is TILE_QUERIES × TILE_KEYS scores of one head, its queries all of one piece. Tiles no query of which
sees a key (later keys, keys before the window) are skipped; within a tile, masked scores are never
exponentiated. Query heads that share a key head are one task in the backward pass, since they add to the same
key gradients.
*/
#include "layers/kernels.h"
#include "layers/vector_math.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

enum { TILE_QUERIES = 64, TILE_KEYS = 128, TOKENS_A_TASK = 32 };

struct rope rope_new(struct arena *arena, int seq_len, int head_dim, double theta) {
    int half = head_dim / 2;
    struct rope rope = {arena_alloc(arena, (size_t)seq_len * half * sizeof(floatX) + 1),
                        arena_alloc(arena, (size_t)seq_len * half * sizeof(floatX) + 1)};
    for (int position = 0; position < seq_len; position++)
        for (int i = 0; i < half; i++) {
            double angle = position * pow(theta, -2.0 * i / head_dim);
            rope.cosine[(size_t)position * half + i] = (floatX)cos(angle);
            rope.sine[(size_t)position * half + i] = (floatX)sin(angle);
        }
    return rope;
}

/* ---- norm and rotation of queries and keys ----------------------------------------------------------- */

struct rotation {
    const struct attention_shape *shape;
    const struct rope *rope;
    floatX *out, *partial; /* backward: out is dqkv; partial (tasks, 2, head_dim) or NULL */
    const floatX *in;
    int out_stride, in_stride;
    const floatX *q_norm, *k_norm;
    double eps;
};

static int token_tasks(const struct attention_shape *shape) {
    return (rows_of_all(shape->sequences) + TOKENS_A_TASK - 1) / TOKENS_A_TASK;
}

/* Where a token's angles are in the tables. */
static size_t angle_of(const struct attention_shape *shape, int token) {
    int row = token % rows_of_sequence(shape->sequences);
    return (size_t)position_of_row(shape->sequences, row) * (shape->head_dim / 2);
}

/* (a, b) → (a cos − b sin, b cos + a sin) for the two halves; direction −1 undoes it. */
static void rotate_head(floatX *restrict y, const floatX *restrict x, const floatX *restrict cosine,
                        const floatX *restrict sine, int half, floatX direction) {
    for (int i = 0; i < half; i++) {
        floatX a = x[i], b = x[half + i], turn = direction * sine[i];
        y[i] = a * cosine[i] - b * turn;
        y[half + i] = b * cosine[i] + a * turn;
    }
}

static void rotate_forward_tokens(void *context, int task) {
    const struct rotation *r = context;
    const struct attention_shape *shape = r->shape;
    int dim = shape->head_dim, tokens = rows_of_all(shape->sequences);
    int end = (task + 1) * TOKENS_A_TASK < tokens ? (task + 1) * TOKENS_A_TASK : tokens;
    floatX head[dim];
    for (int t = task * TOKENS_A_TASK; t < end; t++) {
        size_t angle = angle_of(shape, t);
        for (int h = 0; h < shape->heads + shape->kv_heads; h++) {
            const floatX *x = r->in + (size_t)t * r->in_stride + (size_t)h * dim;
            const floatX *norm = h < shape->heads ? r->q_norm : r->k_norm;
            floatX scale = norm ? 1 / (floatX)sqrt((double)vector_dot(x, x, dim) / dim + r->eps) : 1;
            for (int i = 0; i < dim; i++) head[i] = norm ? x[i] * scale * norm[i] : x[i];
            rotate_head(r->out + (size_t)t * r->out_stride + (size_t)h * dim, head, r->rope->cosine + angle,
                        r->rope->sine + angle, dim / 2, 1);
        }
    }
}

void rotate_forward(struct context *context, const struct attention_shape *shape, const struct rope *rope,
                    floatX *qk, int qk_stride, const floatX *qkv, int qkv_stride, const floatX *q_norm,
                    const floatX *k_norm, double eps) {
    struct rotation rotation = {shape, rope, qk, NULL, qkv, qk_stride, qkv_stride, q_norm, k_norm, eps};
    workers_run(context->workers, token_tasks(shape), rotate_forward_tokens, &rotation);
}

/* One head's gradient through its norm, as in rmsnorm_backward; dnorm (head_dim) is added to. */
static void norm_head_backward(floatX *restrict dx, floatX *restrict dnorm, const floatX *restrict dy,
                               const floatX *restrict x, const floatX *restrict norm, int dim, double eps) {
    floatX scale = 1 / (floatX)sqrt((double)vector_dot(x, x, dim) / dim + eps), sum = 0;
    for (int i = 0; i < dim; i++) {
        sum += dy[i] * norm[i] * x[i];
        dnorm[i] += dy[i] * x[i] * scale;
    }
    floatX shift = sum * scale * scale * scale / dim;
    for (int i = 0; i < dim; i++) dx[i] = dy[i] * norm[i] * scale - x[i] * shift;
}

static void rotate_backward_tokens(void *context, int task) {
    const struct rotation *r = context;
    const struct attention_shape *shape = r->shape;
    int dim = shape->head_dim, tokens = rows_of_all(shape->sequences);
    int end = (task + 1) * TOKENS_A_TASK < tokens ? (task + 1) * TOKENS_A_TASK : tokens;
    floatX head[dim];
    floatX *partial = r->partial ? r->partial + (size_t)task * 2 * dim : NULL;
    if (partial) memset(partial, 0, 2 * (size_t)dim * sizeof *partial);
    for (int t = task * TOKENS_A_TASK; t < end; t++) {
        size_t angle = angle_of(shape, t);
        for (int h = 0; h < shape->heads + shape->kv_heads; h++) {
            floatX *d = r->out + (size_t)t * r->out_stride + (size_t)h * dim;
            bool query = h < shape->heads;
            rotate_head(head, d, r->rope->cosine + angle, r->rope->sine + angle, dim / 2, -1);
            if (r->q_norm)
                norm_head_backward(d, partial + (query ? 0 : dim), head,
                                   r->in + (size_t)t * r->in_stride + (size_t)h * dim,
                                   query ? r->q_norm : r->k_norm, dim, r->eps);
            else
                memcpy(d, head, (size_t)dim * sizeof *d);
        }
    }
}

void rotate_backward(struct context *context, const struct attention_shape *shape, const struct rope *rope,
                     floatX *dqkv, int dqkv_stride, const floatX *qkv, int qkv_stride, const floatX *q_norm,
                     const floatX *k_norm, floatX *dq_norm, floatX *dk_norm, double eps) {
    int tasks = token_tasks(shape), dim = shape->head_dim;
    floatX *partial = scratch_floats(context, (size_t)tasks * 2 * dim);
    struct rotation rotation = {shape,  rope,   dqkv, q_norm ? partial : NULL, qkv, dqkv_stride, qkv_stride,
                                q_norm, k_norm, eps};
    workers_run(context->workers, tasks, rotate_backward_tokens, &rotation);
    for (int task = 0; q_norm && task < tasks; task++)
        for (int i = 0; i < dim; i++) {
            dq_norm[i] += partial[(size_t)task * 2 * dim + i];
            dk_norm[i] += partial[((size_t)task * 2 + 1) * dim + i];
        }
    scratch_release(context, partial);
}

/* ---- tiles ------------------------------------------------------------------------------------------- */

/* C (m, n) = alpha op(A) op(B) + beta C, all sizes at least 1 */
static void tile_product(bool transpose_a, bool transpose_b, int m, int n, int k, floatX alpha,
                         const floatX *a, int a_stride, const floatX *b, int b_stride, floatX beta, floatX *c,
                         int c_stride) {
    enum CBLAS_TRANSPOSE ta = transpose_a ? CblasTrans : CblasNoTrans;
    enum CBLAS_TRANSPOSE tb = transpose_b ? CblasTrans : CblasNoTrans;
#ifdef FLOATX_DOUBLE
    cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, a_stride, b, b_stride, beta, c, c_stride);
#else
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, a_stride, b, b_stride, beta, c, c_stride);
#endif
}

struct attention {
    const struct attention_shape *shape;
    const struct attention_inputs *in;
    floatX *out, *lse; /* forward: written */
    const struct attention_gradients *gradients;
    floatX *delta;
    const floatX *dout;
};

static int smaller(int a, int b) {
    return a < b ? a : b;
}
static int larger(int a, int b) {
    return a > b ? a : b;
}
/* Queries that stand next to each other in a sequence. */
struct tile {
    size_t row;            /* of the first query among all rows */
    size_t keys;           /* row of the sequence's first key */
    int position, queries; /* of the first query in the sequence; how many there are */
};

static int tiles_of_piece(const struct attention_shape *shape) {
    return (piece_here(shape->sequences, 0).rows + TILE_QUERIES - 1) / TILE_QUERIES;
}

static int tiles_of_sequence(const struct attention_shape *shape) {
    return pieces_here(shape->sequences) * tiles_of_piece(shape);
}

static struct tile tile_of(const struct attention_shape *shape, int sequence, int number) {
    int tiles = tiles_of_piece(shape), start = number % tiles * TILE_QUERIES;
    struct sequence_piece piece = piece_here(shape->sequences, number / tiles);
    return (struct tile){(size_t)sequence * rows_of_sequence(shape->sequences) + piece.row + start,
                         (size_t)sequence * shape->sequences.seq_len, piece.position + start,
                         smaller(TILE_QUERIES, piece.rows - start)};
}

/* First key that the query at this position sees; the last is its own. */
static int first_key(const struct attention_shape *shape, int position) {
    return shape->window ? larger(0, position - shape->window + 1) : 0;
}

/* Zeroes the row's masked scores left and right of *from … *to, the keys of this tile that it sees. */
static void mask_row(floatX *row, const struct attention_shape *shape, int position, int first, int keys,
                     int *from, int *to) {
    *from = smaller(keys, larger(0, first_key(shape, position) - first));
    *to = larger(*from, smaller(keys, position + 1 - first));
    memset(row, 0, (size_t)*from * sizeof *row);
    memset(row + *to, 0, (size_t)(keys - *to) * sizeof *row);
}

/* ---- forward ----------------------------------------------------------------------------------------- */

/* One tile of keys for one row: the running maximum and sum, the row of scores turned into weights. Returns
   the factor that brings what was summed before to the new maximum. */
static floatX softmax_row(floatX *row, int from, int to, floatX scale, floatX *most, floatX *sum) {
    if (from == to) return 1;
    floatX now = largest(row + from, to - from) * scale;
    floatX next = now > *most ? now : *most;
    floatX factor = *sum > 0 ? exponential(*most - next) : 0;
    *sum = *sum * factor + exponentials(row + from, row + from, to - from, scale, next);
    *most = next;
    return factor;
}

static void forward_tile(void *context, int task) {
    const struct attention *a = context;
    const struct attention_shape *shape = a->shape;
    const struct attention_inputs *in = a->in;
    int tiles = tiles_of_sequence(shape), dim = shape->head_dim, head = task / tiles % shape->heads;
    struct tile tile =
        tile_of(shape, task / tiles / shape->heads, tiles - 1 - task % tiles); /* the longest first */
    int kv_head = head / (shape->heads / shape->kv_heads), out_stride = shape->heads * dim;
    floatX scale = (floatX)(1 / sqrt(dim));
    floatX scores[TILE_QUERIES * TILE_KEYS], most[TILE_QUERIES], sum[TILE_QUERIES];
    floatX *out = a->out + tile.row * out_stride + (size_t)head * dim;
    for (int i = 0; i < tile.queries; i++) {
        most[i] = in->sinks ? in->sinks[head] : (floatX)-INFINITY;
        sum[i] = in->sinks ? 1 : 0;
    }
    bool fresh = true; /* nothing in out yet */
    int end = tile.position + tile.queries;
    for (int first = first_key(shape, tile.position) / TILE_KEYS * TILE_KEYS; first < end;
         first += TILE_KEYS) {
        int keys = smaller(TILE_KEYS, end - first);
        const floatX *q = in->q + tile.row * in->q_stride + (size_t)head * dim;
        const floatX *k = in->k + (tile.keys + first) * in->k_stride + (size_t)kv_head * dim;
        const floatX *v = in->v + (tile.keys + first) * in->v_stride + (size_t)kv_head * dim;
        tile_product(false, true, tile.queries, keys, dim, 1, q, in->q_stride, k, in->k_stride, 0, scores,
                     TILE_KEYS);
        for (int i = 0; i < tile.queries; i++) {
            int from, to;
            floatX *row = scores + (size_t)i * TILE_KEYS, *old = out + (size_t)i * out_stride;
            mask_row(row, shape, tile.position + i, first, keys, &from, &to);
            floatX factor = softmax_row(row, from, to, scale, &most[i], &sum[i]);
            for (int d = 0; !fresh && factor != 1 && d < dim; d++) old[d] *= factor;
        }
        tile_product(false, false, tile.queries, dim, keys, 1, scores, TILE_KEYS, v, in->v_stride, !fresh,
                     out, out_stride);
        fresh = false;
    }
    for (int i = 0; i < tile.queries; i++) {
        floatX inverse = 1 / sum[i], *row = out + (size_t)i * out_stride;
        for (int d = 0; d < dim; d++) row[d] *= inverse;
        a->lse[(tile.row + i) * shape->heads + head] = most[i] + (floatX)log(sum[i]);
    }
}

void attention_forward(struct context *context, const struct attention_shape *shape, floatX *out, floatX *lse,
                       const struct attention_inputs *inputs) {
    struct attention attention = {.shape = shape, .in = inputs, .out = out, .lse = lse};
    workers_run(context->workers, shape->sequences.count * shape->heads * tiles_of_sequence(shape),
                forward_tile, &attention);
}

/* ---- backward ---------------------------------------------------------------------------------------- */

/* Scores of a tile → their softmax weights, from the saved denominators. */
static void weights_of_tile(const struct attention *a, floatX *scores, const floatX *lse, int start,
                            int queries, int first, int keys, floatX scale) {
    for (int i = 0; i < queries; i++) {
        int from, to;
        floatX *row = scores + (size_t)i * TILE_KEYS;
        mask_row(row, a->shape, start + i, first, keys, &from, &to);
        exponentials(row + from, row + from, to - from, scale, lse[(size_t)i * a->shape->heads]);
    }
}

/* dscores = weights · (dweights − delta) · scale, in place of dweights. */
static void scores_backward(floatX *dweights, const floatX *weights, const floatX *delta, int delta_stride,
                            int queries, int keys, floatX scale) {
    for (int i = 0; i < queries; i++) {
        floatX *restrict d = dweights + (size_t)i * TILE_KEYS, shift = delta[(size_t)i * delta_stride];
        const floatX *restrict w = weights + (size_t)i * TILE_KEYS;
        for (int j = 0; j < keys; j++) d[j] = w[j] * (d[j] - shift) * scale;
    }
}

static void backward_tile(const struct attention *a, struct tile tile, int head, int first) {
    const struct attention_shape *shape = a->shape;
    const struct attention_inputs *in = a->in;
    const struct attention_gradients *g = a->gradients;
    int dim = shape->head_dim, out_stride = shape->heads * dim, heads = shape->heads, queries = tile.queries;
    int keys = smaller(TILE_KEYS, tile.position + queries - first);
    size_t query = tile.row, key = tile.keys + first;
    size_t q_at = (size_t)head * dim, kv_at = (size_t)(head / (heads / shape->kv_heads)) * dim;
    const floatX *q = in->q + query * in->q_stride + q_at, *dout = a->dout + query * out_stride + q_at;
    const floatX *k = in->k + key * in->k_stride + kv_at, *v = in->v + key * in->v_stride + kv_at;
    floatX *dq = g->q + query * g->q_stride + q_at;
    floatX *dk = g->k + key * g->kv_stride + kv_at, *dv = g->v + key * g->kv_stride + kv_at;
    floatX scale = (floatX)(1 / sqrt(dim));
    floatX weights[TILE_QUERIES * TILE_KEYS], dscores[TILE_QUERIES * TILE_KEYS];
    tile_product(false, true, queries, keys, dim, 1, q, in->q_stride, k, in->k_stride, 0, weights, TILE_KEYS);
    weights_of_tile(a, weights, a->lse + query * heads + head, tile.position, queries, first, keys, scale);
    tile_product(true, false, keys, dim, queries, 1, weights, TILE_KEYS, dout, out_stride, 1, dv,
                 g->kv_stride);
    tile_product(false, true, queries, keys, dim, 1, dout, out_stride, v, in->v_stride, 0, dscores,
                 TILE_KEYS);
    scores_backward(dscores, weights, a->delta + query * heads + head, heads, queries, keys, scale);
    tile_product(false, false, queries, dim, keys, 1, dscores, TILE_KEYS, k, in->k_stride, 1, dq,
                 g->q_stride);
    tile_product(true, false, keys, dim, queries, 1, dscores, TILE_KEYS, q, in->q_stride, 1, dk,
                 g->kv_stride);
}

/* delta (T, heads) = Σ over head_dim of dout · out: what every score's gradient has in common. */
static void delta_of_head(const struct attention *a, size_t first, size_t rows, int head) {
    const struct attention_shape *shape = a->shape;
    size_t stride = (size_t)shape->heads * shape->head_dim;
    for (size_t t = first; t < first + rows; t++) {
        size_t at = t * stride + (size_t)head * shape->head_dim;
        a->delta[t * shape->heads + head] = vector_dot(a->dout + at, a->out + at, shape->head_dim);
    }
}

static void clear_rows(floatX *x, int stride, size_t first, size_t rows, size_t width) {
    for (size_t t = first; t < first + rows; t++) memset(x + t * stride, 0, width * sizeof *x);
}

/* One sequence's key head with all its query heads. */
static void backward_group(void *context, int task) {
    const struct attention *a = context;
    const struct attention_shape *shape = a->shape;
    const struct attention_gradients *g = a->gradients;
    int group = shape->heads / shape->kv_heads, kv_head = task % shape->kv_heads;
    int sequence = task / shape->kv_heads;
    size_t rows = (size_t)rows_of_sequence(shape->sequences), keys = (size_t)shape->sequences.seq_len;
    size_t dim = (size_t)shape->head_dim, row = sequence * rows, key = sequence * keys;
    clear_rows(g->q + kv_head * group * dim, g->q_stride, row, rows, group * dim);
    clear_rows(g->k + kv_head * dim, g->kv_stride, key, keys, dim);
    clear_rows(g->v + kv_head * dim, g->kv_stride, key, keys, dim);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        delta_of_head(a, row, rows, head);
        for (int i = 0; i < tiles_of_sequence(shape); i++) {
            struct tile tile = tile_of(shape, sequence, i);
            for (int first = first_key(shape, tile.position) / TILE_KEYS * TILE_KEYS;
                 first < tile.position + tile.queries; first += TILE_KEYS)
                backward_tile(a, tile, head, first);
        }
    }
}

void attention_backward(struct context *context, const struct attention_shape *shape,
                        const struct attention_gradients *gradients, const floatX *dout, const floatX *out,
                        const floatX *lse, const struct attention_inputs *inputs) {
    size_t tokens = (size_t)rows_of_all(shape->sequences), heads = (size_t)shape->heads;
    floatX *delta = scratch_floats(context, tokens * heads);
    /* out and lse are only read here */
    struct attention attention = {.shape = shape,
                                  .in = inputs,
                                  .out = (floatX *)(uintptr_t)out,
                                  .lse = (floatX *)(uintptr_t)lse,
                                  .gradients = gradients,
                                  .delta = delta,
                                  .dout = dout};
    workers_run(context->workers, shape->sequences.count * shape->kv_heads, backward_group, &attention);
    /* A sink has a weight but no value: its score's gradient is −weight · delta. */
    for (size_t h = 0; gradients->sinks && inputs->sinks && h < heads; h++)
        for (size_t t = 0; t < tokens; t++)
            gradients->sinks[h] -= exponential(inputs->sinks[h] - lse[t * heads + h]) * delta[t * heads + h];
    scratch_release(context, delta);
}
