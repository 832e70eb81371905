/*
Each layer against a naive version or finite differences; the split blocks, put together as a distributed run
would, against the reference; forced choices; edge cases: odd sizes, windows, sinks, experts without rows,
products without rows, logits that are no numbers.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "layers/layers.h"
#include "plan/plan.h"
#include "state/safetensors.h"
#include "train/data.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef FLOATX_DOUBLE
static const double CLOSE = 1e-11;
#else
static const double CLOSE = 5e-5;
#endif

static floatX *randoms(size_t count, uint64_t seed) {
    struct rng rng = rng_seed(seed);
    floatX *x = must_alloc((count + 1) * sizeof *x);
    for (size_t i = 0; i < count; i++) x[i] = (floatX)rng_normal(&rng);
    return x;
}

/* max |a − b| against max |b|, or `floor` where all are smaller */
static void assert_near(const floatX *a, const floatX *b, size_t count, double floor, const char *what) {
    double most = floor, worst = 0;
    for (size_t i = 0; i < count; i++) {
        most = fmax(most, fabs((double)b[i]));
        worst = fmax(worst, fabs((double)a[i] - b[i]));
    }
    if (!(worst <= CLOSE * most)) fail_msg("%s: off by %g of %g", what, worst, most);
}

static void assert_close(const floatX *a, const floatX *b, size_t count, const char *what) {
    assert_near(a, b, count, 1e-3, what);
}

/* ---- products ---------------------------------------------------------------------------------------- */

static void grouped_products(void **state) {
    (void)state;
    enum { IN = 13, OUT = 9, GROUPS = 5 };
    const int rows[GROUPS] = {0, 70, 0, 133, 1};
    struct context context = {.workers = workers_new(3)};
    floatX *x = randoms(204 * IN, 1), *dy = randoms(204 * OUT, 2), *w = randoms(GROUPS * OUT * IN, 3);
    floatX *y = randoms(204 * OUT, 4), *dx = randoms(204 * IN, 5),
           *dw = must_alloc(GROUPS * OUT * IN * sizeof *dw);
    floatX *expected = must_alloc((204 * (OUT + IN) + GROUPS * OUT * IN) * sizeof *expected);
    floatX *ey = expected, *edx = ey + 204 * OUT, *edw = edx + 204 * IN, *weights[GROUPS], *gradients[GROUPS];
    for (int g = 0, row = 0; g < GROUPS; g++) {
        weights[g] = w + g * OUT * IN;
        gradients[g] = dw + g * OUT * IN;
        for (int end = row + rows[g]; row < end; row++)
            for (int o = 0; o < OUT; o++)
                for (int i = 0; i < IN; i++) {
                    ey[row * OUT + o] += x[row * IN + i] * weights[g][o * IN + i];
                    edx[row * IN + i] += dy[row * OUT + o] * weights[g][o * IN + i];
                    edw[g * OUT * IN + o * IN + i] += dy[row * OUT + o] * x[row * IN + i];
                }
    }
    grouped_linear_forward(&context, &(struct groups){GROUPS, rows, weights, NULL}, y, x, IN, OUT);
    grouped_linear_backward_input(&context, &(struct groups){GROUPS, rows, weights, NULL}, dx, dy, IN, OUT);
    grouped_linear_backward_weight(&context, &(struct groups){GROUPS, rows, gradients, NULL}, dy, x, IN, OUT);
    assert_close(y, ey, 204 * OUT, "y");
    assert_close(dx, edx, 204 * IN, "dx");
    assert_close(dw, edw, GROUPS * OUT * IN, "dw");
    linear_forward(&context, y, x, w, NULL, 0, IN, OUT); /* no rows: nothing happens */
    linear_backward_weight(&context, dw, dw, dy, x, 0, IN, OUT);
    assert_close(dw, edw, GROUPS * OUT * IN, "dw after an empty product");
    assert_int_equal(context.scratch_bytes, 0);
    free(x), free(dy), free(w), free(y), free(dx), free(dw), free(expected);
    context_free(&context);
    workers_free(context.workers);
}

/* ---- attention --------------------------------------------------------------------------------------- */

/* Straight from the definition, one query at a time; gradients too. */
static void naive_attention(const struct attention_shape *shape, const struct attention_inputs *in,
                            floatX *out, const floatX *dout, floatX *dq, floatX *dk, floatX *dv,
                            double *dsinks) {
    int length = shape->sequences.seq_len, dim = shape->head_dim, group = shape->heads / shape->kv_heads;
    double *p = must_alloc((size_t)length * sizeof *p), scale = 1 / sqrt(dim);
    for (int s = 0; s < shape->sequences.count; s++)
        for (int h = 0; h < shape->heads; h++)
            for (int t = 0; t < length; t++) {
                size_t at = ((size_t)s * length + t) * shape->heads * dim + (size_t)h * dim;
                int first = shape->window && t - shape->window + 1 > 0 ? t - shape->window + 1 : 0;
                double sink = in->sinks ? exp(in->sinks[h]) : 0, sum = sink, delta = 0;
                for (int j = first; j <= t; j++) {
                    size_t kv = ((size_t)s * length + j) * shape->kv_heads * dim + (size_t)(h / group) * dim;
                    double score = 0;
                    for (int d = 0; d < dim; d++) score += (double)in->q[at + d] * in->k[kv + d];
                    sum += p[j] = exp(score * scale);
                }
                for (int d = 0; d < dim; d++) {
                    double value = 0;
                    for (int j = first; j <= t; j++)
                        value += p[j] / sum *
                                 in->v[((size_t)s * length + j) * shape->kv_heads * dim +
                                       (size_t)(h / group) * dim + d];
                    out[at + d] = (floatX)value;
                    delta += value * dout[at + d];
                }
                for (int j = first; j <= t; j++) {
                    size_t kv = ((size_t)s * length + j) * shape->kv_heads * dim + (size_t)(h / group) * dim;
                    double dp = 0, weight = p[j] / sum;
                    for (int d = 0; d < dim; d++) dp += (double)dout[at + d] * in->v[kv + d];
                    double dscore = weight * (dp - delta) * scale;
                    for (int d = 0; d < dim; d++) {
                        dq[at + d] += (floatX)(dscore * in->k[kv + d]);
                        dk[kv + d] += (floatX)(dscore * in->q[at + d]);
                        dv[kv + d] += (floatX)(weight * dout[at + d]);
                    }
                }
                if (in->sinks) dsinks[h] -= sink / sum * delta;
            }
    free(p);
}

/* found: rows of width `width` that lie `stride` apart */
static void assert_rows_close(const floatX *found, int stride, const floatX *expected, int width, size_t rows,
                              const char *what) {
    floatX *close = must_alloc(rows * width * sizeof *close);
    for (size_t r = 0; r < rows; r++)
        memcpy(close + r * width, found + r * stride, (size_t)width * sizeof *close);
    assert_near(close, expected, rows * width, 1, what); /* a window of 1 has gradients of 0 */
    free(close);
}

/* A rank's rows of whole sequences, piece after piece; or these added to the whole's. */
static void take_rows(struct sequences s, floatX *rows, const floatX *whole, int width) {
    for (int r = 0; r < rows_of_all(s); r++) {
        int row = r % rows_of_sequence(s), sequence = r / rows_of_sequence(s);
        memcpy(rows + (size_t)r * width,
               whole + ((size_t)sequence * s.seq_len + position_of_row(s, row)) * width,
               (size_t)width * sizeof *rows);
    }
}

/* Queries of one rank's pieces, keys and values of whole sequences. */
static void check_attention_of_pieces(struct attention_shape shape, const struct attention_inputs *in,
                                      const floatX *dout, const floatX *expected_out,
                                      const floatX *expected_dq, floatX *dkv, floatX *dsinks) {
    struct context context = {0};
    size_t rows = (size_t)rows_of_all(shape.sequences), heads = (size_t)shape.heads;
    size_t keys = (size_t)shape.sequences.count * shape.sequences.seq_len;
    int width = in->q_stride, kv_width = in->k_stride;
    floatX *q = randoms(rows * width, 1), *own_dout = randoms(rows * width, 2);
    floatX *out = randoms(rows * width, 3), *lse = randoms(rows * heads, 4), *dq = randoms(rows * width, 5);
    floatX *expected = randoms(rows * width, 6), *d = randoms(2 * keys * kv_width, 7);
    struct attention_inputs own = *in;
    own.q = q;
    take_rows(shape.sequences, q, in->q, width);
    take_rows(shape.sequences, own_dout, dout, width);
    attention_forward(&context, &shape, out, lse, &own);
    take_rows(shape.sequences, expected, expected_out, width);
    assert_close(out, expected, rows * width, "attention of pieces");
    struct attention_gradients gradients = {dq, d, d + kv_width, width, 2 * kv_width, dsinks};
    attention_backward(&context, &shape, &gradients, own_dout, out, lse, &own);
    take_rows(shape.sequences, expected, expected_dq, width);
    assert_near(dq, expected, rows * width, 1, "dq of pieces");
    for (size_t i = 0; i < 2 * keys * kv_width; i++) dkv[i] += d[i];
    free(q), free(own_dout), free(out), free(lse), free(dq), free(expected), free(d);
    context_free(&context);
}

static void check_attention(struct attention_shape shape, bool with_sinks, int threads) {
    size_t tokens = (size_t)rows_of_all(shape.sequences);
    size_t query = tokens * shape.heads * shape.head_dim, key = tokens * shape.kv_heads * shape.head_dim;
    int q_stride = shape.heads * shape.head_dim, k_stride = shape.kv_heads * shape.head_dim;
    struct context context = {.workers = workers_new(threads)};
    floatX *q = randoms(query, 1), *k = randoms(key, 2), *v = randoms(key, 3), *dout = randoms(query, 4);
    floatX *sinks = with_sinks ? randoms((size_t)shape.heads, 5) : NULL, dsinks[16] = {0};
    double expected_sinks[16] = {0};
    floatX *out = randoms(query, 6), *expected = must_alloc(query * sizeof *out);
    floatX *lse = must_alloc(tokens * shape.heads * sizeof *lse);
    /* the backward pass writes rows of one stride, as of a fused projection */
    int stride = q_stride + 2 * k_stride;
    floatX *d = randoms(tokens * stride, 7), *dq = must_alloc(query * sizeof *dq),
           *dk = must_alloc(key * sizeof *dk), *dv = must_alloc(key * sizeof *dv);
    struct attention_inputs in = {q, k, v, q_stride, k_stride, k_stride, sinks};
    struct attention_gradients gradients = {d, d + q_stride, d + q_stride + k_stride, stride, stride, dsinks};
    naive_attention(&shape, &in, expected, dout, dq, dk, dv, expected_sinks);
    attention_forward(&context, &shape, out, lse, &in);
    attention_backward(&context, &shape, &gradients, dout, out, lse, &in);
    assert_close(out, expected, query, "attention");
    assert_rows_close(d, stride, dq, q_stride, tokens, "dq");
    assert_rows_close(d + q_stride, stride, dk, k_stride, tokens, "dk");
    assert_rows_close(d + q_stride + k_stride, stride, dv, k_stride, tokens, "dv");
    for (int h = 0; with_sinks && h < shape.heads; h++)
        assert_true(fabs(dsinks[h] - expected_sinks[h]) < CLOSE * fmax(1, fabs(expected_sinks[h])));
    for (int cp = 2; cp <= 4 && shape.sequences.seq_len % (2 * cp) == 0; cp *= 2) {
        floatX *dkv = must_alloc(2 * key * sizeof *dkv);
        memset(dsinks, 0, sizeof dsinks);
        shape.sequences.cp = cp;
        for (int i = 0; i < cp; i++) {
            shape.sequences.index = i;
            check_attention_of_pieces(shape, &in, dout, expected, dq, dkv, dsinks);
        }
        assert_rows_close(dkv, 2 * k_stride, dk, k_stride, tokens, "dk of all pieces");
        assert_rows_close(dkv + k_stride, 2 * k_stride, dv, k_stride, tokens, "dv of all pieces");
        for (int h = 0; with_sinks && h < shape.heads; h++)
            assert_true(fabs(dsinks[h] - expected_sinks[h]) < CLOSE * fmax(1, fabs(expected_sinks[h])));
        free(dkv);
    }
    free(q), free(k), free(v), free(dout), free(sinks), free(out), free(expected), free(lse), free(d);
    free(dq), free(dk), free(dv);
    context_free(&context);
    workers_free(context.workers);
}

static void tiled_attention(void **state) {
    (void)state;
    check_attention((struct attention_shape){whole_sequences(2, 1), 2, 1, 4, 0}, false, 1);
    check_attention((struct attention_shape){whole_sequences(1, 64), 2, 2, 8, 0}, false, 1);
    check_attention((struct attention_shape){whole_sequences(2, 201), 4, 2, 6, 0}, true, 3);
    check_attention((struct attention_shape){whole_sequences(2, 208), 4, 2, 6, 0}, true, 3);
    check_attention((struct attention_shape){whole_sequences(1, 333), 2, 1, 10, 1}, false, 2);
    check_attention((struct attention_shape){whole_sequences(1, 333), 2, 1, 10, 1}, true, 2);
    check_attention((struct attention_shape){whole_sequences(1, 300), 3, 1, 4, 37}, true, 2);
    check_attention((struct attention_shape){whole_sequences(2, 640), 3, 1, 4, 37}, true, 2);
    check_attention((struct attention_shape){whole_sequences(2, 257), 2, 2, 4, 128}, false, 2);
    check_attention((struct attention_shape){whole_sequences(1, 1032), 2, 2, 4, 128}, false, 2);
    check_attention((struct attention_shape){whole_sequences(1, 130), 2, 1, 4, 1000}, false, 1);
}

/* Scores of ±400: exponentials that overflow unless the maximum is taken out. */
static void extreme_scores(void **state) {
    (void)state;
    struct attention_shape shape = {whole_sequences(1, 150), 1, 1, 4, 0};
    struct context context = {0};
    floatX *q = randoms(600, 1), *k = randoms(600, 2), *v = randoms(600, 3), *out = randoms(600, 4), lse[150];
    for (int i = 0; i < 600; i++) q[i] *= 100, k[i] *= 4;
    struct attention_inputs in = {q, k, v, 4, 4, 4, NULL};
    attention_forward(&context, &shape, out, lse, &in);
    for (int i = 0; i < 600; i++) assert_true(isfinite(out[i]) && fabs((double)out[i]) < 10);
    free(q), free(k), free(v), free(out);
    context_free(&context);
}

/* ---- router ------------------------------------------------------------------------------------------ */

static struct model small_model(void) {
    struct model model = {.name = "small", .layers = 2, .hidden = 10, .vocab = 19, .norm_eps = 1e-6};
    model.attention.heads = 4;
    model.attention.kv_heads = 2;
    model.attention.head_dim = 6;
    model.attention.rope_theta = 1e4;
    model.moe.experts = 6;
    model.moe.top_k = 2;
    model.moe.expert_hidden = 5;
    model.moe.renormalise = true;
    model.moe.aux_loss = 0.02;
    model.moe.z_loss = 0.003;
    return model;
}

struct router_test {
    floatX logits[12 * 6], weights[12 * 2];
    int ids[12 * 2], chosen[12 * 6];
    unsigned char kept[12 * 2];
    struct route route;
};

static void route_tokens(struct router_test *test, const struct model *model, int sequences) {
    struct context context = {0};
    test->route = (struct route){test->logits, test->ids, test->weights, test->kept, test->chosen};
    route_forward(&context, model, &test->route, NULL, 0, whole_sequences(sequences, 12 / sequences));
    context_free(&context);
}

/* All tokens prefer expert 0, then expert 3. */
static void fill_skewed(struct router_test *test) {
    memset(test, 0, sizeof *test);
    for (int t = 0; t < 12; t++) {
        test->logits[t * 6] = 3;
        test->logits[t * 6 + 3] = 2;
    }
}

static void capacity(void **state) {
    (void)state;
    struct model model = small_model();
    struct router_test test;
    fill_skewed(&test);
    model.moe.capacity_factor = 1; /* 6 · 2 / 6 = 2 copies an expert and sequence */
    route_tokens(&test, &model, 2);
    for (int t = 0; t < 12; t++)
        for (int k = 0; k < 2; k++) {
            bool kept = t % 6 < 2; /* the first two tokens of each sequence */
            assert_int_equal(test.kept[t * 2 + k], kept);
            assert_int_equal(test.weights[t * 2 + k] > 0, kept);
        }
    struct router_test free_test;
    fill_skewed(&free_test);
    model.moe.capacity_factor = 6; /* room for all: the same as dropless */
    route_tokens(&free_test, &model, 2);
    model.moe.capacity_factor = 0;
    route_tokens(&test, &model, 2);
    assert_memory_equal(test.kept, free_test.kept, sizeof test.kept);
    assert_memory_equal(test.weights, free_test.weights, sizeof test.weights);
    assert_int_equal(test.ids[0], 0);
    assert_int_equal(test.ids[1], 3);
}

/* 1.1 · 100 · 2 ÷ 4 is 55 copies, though the product is a hair above; what the router keeps is what the plan
   counts on. */
static void capacity_as_planned(void **state) {
    (void)state;
    enum { EXPERTS = 4, TOP_K = 2, SEQ_LEN = 100 };
    static const int kept[EXPERTS] = {55, 55, 40, 20}, gpus[2 * EXPERTS] = {0, 1, 2, 3, 4};
    double share[EXPERTS] = {0.4, 0.3, 0.2, 0.1};
    struct model model = small_model();
    model.moe.experts = EXPERTS, model.moe.top_k = TOP_K, model.moe.capacity_factor = 1.1;
    struct arena *arena = arena_new();
    struct context context = {0};
    floatX logits[SEQ_LEN * EXPERTS] = {0}, weights[SEQ_LEN * TOP_K];
    int ids[SEQ_LEN * TOP_K], chosen[EXPERTS], found[EXPERTS] = {0};
    unsigned char stays[SEQ_LEN * TOP_K];
    struct route route = {logits, ids, weights, stays, chosen};
    route_forward(&context, &model, &route, forced_routing_new(arena, &model, share, SEQ_LEN), 0,
                  whole_sequences(1, SEQ_LEN));
    for (int copy = 0; copy < SEQ_LEN * TOP_K; copy++) found[ids[copy]] += stays[copy];
    struct cluster cluster = {0};
    struct point point = {.model = &model,
                          .cluster = &cluster,
                          .seq_len = SEQ_LEN,
                          .micro_batch_size = 1,
                          .routing.share = share};
    struct plan plan = {.point = &point, .parallel.cp = 1};
    struct sides sides = {{gpus, 1, NULL, 0}, {gpus + 1, EXPERTS, NULL, 0}, {gpus, 1, NULL, 0}};
    for (int e = 0; e < EXPERTS; e++) {
        assert_int_equal(found[e], kept[e]);
        double bytes = plan_gpu_layer_memory(&plan, 0, (struct recompute){0}, sides, e).expert_input;
        assert_true(fabs(bytes / model_hidden_bytes(&model) - kept[e]) < 1e-9);
    }
    context_free(&context);
    arena_free(arena);
}

static void auxiliary_losses(void **state) {
    (void)state;
    struct model model = small_model();
    struct router_test test;
    memset(&test, 0, sizeof test);
    route_tokens(&test, &model, 2); /* equal logits: softmax 1/6, so aux = E · K / E per sequence */
    struct route_losses losses = route_losses(&model, &test.route, whole_sequences(2, 6));
    assert_true(fabs(losses.aux - 2 * 2) < 1e-5);
    assert_true(fabs(losses.z - 12 * log(6) * log(6)) < 1e-4);
    assert_true(route_margin(&model, &test.route, 12) == 0);
    /* the sums of two sequences apart are the sum of both */
    fill_skewed(&test);
    for (int i = 0; i < 72; i++) test.logits[i] += (floatX)(0.1 * (i % 7));
    route_tokens(&test, &model, 2);
    struct sequences one = whole_sequences(1, 6);
    struct route second = {test.logits + 36, test.ids + 12, test.weights + 12, test.kept + 12,
                           test.chosen + 6};
    struct route_losses both = route_losses(&model, &test.route, whole_sequences(2, 6));
    struct route_losses a = route_losses(&model, &test.route, one), b = route_losses(&model, &second, one);
    assert_true(fabs(both.aux - a.aux - b.aux) < 1e-6 && fabs(both.z - a.z - b.z) < 1e-5);
}

static void assert_valid_choice(const int *ids, const struct model *model) {
    for (int k = 0; k < model->moe.top_k; k++) {
        assert_in_range(ids[k], 0, model->moe.experts - 1);
        for (int other = 0; other < k; other++) assert_int_not_equal(ids[k], ids[other]);
    }
}

/* Logits that are not numbers choose some experts, but never one twice or one that is not there. */
static void damaged_logits(void **state) {
    (void)state;
    const floatX values[] = {0, 1, (floatX)NAN, (floatX)INFINITY, (floatX)-INFINITY};
    struct model model = small_model();
    struct rng rng = rng_seed(2);
    for (int round = 0; round < 300; round++) {
        struct router_test test;
        int ids[12 * 6], chosen[12];
        floatX weights[12 * 6], p = (floatX)NAN;
        unsigned char kept[12 * 6];
        for (int i = 0; i < 72; i++) ids[i] = -1, test.logits[i] = round ? values[rng_below(&rng, 5)] : p;
        test.route = (struct route){test.logits, ids, weights, kept, chosen};
        model.moe.top_k = round % 6 + 1;
        model.moe.renormalise = round % 2;
        model.moe.capacity_factor = round % 3 ? 0 : 0.7;
        struct context context = {0};
        route_forward(&context, &model, &test.route, NULL, 0, whole_sequences(2, 6));
        context_free(&context);
        for (int t = 0; t < 12; t++) assert_valid_choice(ids + t * model.moe.top_k, &model);
    }
}

/* ---- forced routing ---------------------------------------------------------------------------------- */

/* rate (E) = min(1, c · share) with c such that they sum to K, by bisection. */
static void expected_rates(double *rate, const double *share, int experts, int top_k) {
    double low = 1e-9, high = 1e30;
    for (int i = 0; i < 200; i++) {
        double middle = sqrt(low * high), sum = 0;
        for (int e = 0; e < experts; e++) sum += rate[e] = fmin(1, middle * share[e]);
        *(sum < top_k ? &low : &high) = middle;
    }
}

/* Every sequence of every layer: copies, first choices, and copies of the first third of the positions. */
static void check_forced(int experts, int top_k, int seq_len, const double *share, const double *rate) {
    struct model model = small_model();
    model.moe.experts = experts, model.moe.top_k = top_k;
    struct arena *arena = arena_new();
    struct context context = {.workers = workers_new(2)};
    struct forced_routing *forced = forced_routing_new(arena, &model, share, seq_len);
    size_t copies = 2 * (size_t)seq_len * top_k;
    floatX *logits = randoms(2 * (size_t)seq_len * experts, 1), *weights = randoms(copies, 2);
    int *ids = must_alloc(copies * sizeof *ids);
    struct sequences sequences = whole_sequences(2, seq_len);
    struct route route = {logits, ids, weights, must_alloc(copies),
                          must_alloc(2 * (size_t)experts * sizeof(int))};
    for (int layer = 0; layer < 3; layer++) {
        route_forward(&context, &model, &route, forced, layer, sequences);
        for (int s = 0; s < 2; s++) {
            int all[512] = {0}, first[512] = {0}, third[512] = {0};
            for (int t = 0; t < seq_len; t++) {
                const int *chosen = ids + ((size_t)s * seq_len + t) * top_k;
                assert_valid_choice(chosen, &model);
                first[chosen[0]]++;
                for (int k = 0; k < top_k; k++) all[chosen[k]]++, third[chosen[k]] += t < seq_len / 3;
            }
            for (int e = 0; e < experts; e++) {
                assert_true(fabs(all[e] - rate[e] * seq_len) < 1 - 1e-9);
                assert_true(fabs(first[e] - (double)all[e] / top_k) < 2);
                assert_true(fabs(third[e] - rate[e] * (seq_len / 3)) < 4 + seq_len / 100);
                assert_true(rate[e] > 0 || !all[e]);
            }
        }
    }
    for (size_t c = 0; c < copies; c++) assert_true(route.kept[c] && weights[c] > 0 && weights[c] <= 1);
    free(logits), free(weights), free(ids), free(route.kept), free(route.chosen);
    context_free(&context);
    workers_free(context.workers);
    arena_free(arena);
}

static void forced_shares(void **state) {
    (void)state;
    static const int sizes[][3] = {{1, 1, 1},   {2, 1, 1},    {6, 2, 9},    {5, 5, 7},      {8, 1, 30},
                                   {16, 4, 64}, {49, 49, 50}, {64, 6, 333}, {128, 8, 1024}, {384, 8, 250}};
    static const double exponents[] = {0, 0.5, 1, 3, 10};
    double share[512], rate[512];
    for (size_t i = 0; i < COUNT(sizes); i++)
        for (size_t j = 0; j < COUNT(exponents); j++) {
            int experts = sizes[i][0], top_k = sizes[i][1];
            for (int e = 0; e < experts; e++) share[e] = pow(e + 1, -exponents[j]);
            expected_rates(rate, share, experts, top_k);
            check_forced(experts, top_k, sizes[i][2], share, rate);
            for (int e = 0; e < experts / 2 && experts >= 4 * top_k; e++) share[2 * e + 1] = 0;
            expected_rates(rate, share, experts, top_k);
            check_forced(experts, top_k, sizes[i][2], share, rate);
        }
    /* one takes every token, another none; one takes more than it can; fewer than K take any */
    check_forced(4, 2, 10, (double[]){0.2, 0.5, 0, 0.3}, (double[]){0.4, 1, 0, 0.6});
    check_forced(4, 2, 10, (double[]){0.1, 0.7, 0, 0.2}, (double[]){1.0 / 3, 1, 0, 2.0 / 3});
    check_forced(5, 2, 12, (double[]){0, 0, 1, 0, 0}, (double[]){0.25, 0.25, 1, 0.25, 0.25});
}

/* Noise is a token's, whichever part of a batch or of a sequence its rank has. */
static void noise_by_token(void **state) {
    (void)state;
    struct context context = {0};
    floatX *all = randoms(96, 1), *part = randoms(96, 1), *noise = randoms(96, 2), *own = randoms(96, 1);
    floatX rows[24], own_noise[24];
    noise_forward(&context, all, noise, (struct route_key){5, 3, 1, 0}, whole_sequences(2, 8), 6);
    noise_forward(&context, part + 48, noise + 48, (struct route_key){5, 3, 1, 8}, whole_sequences(1, 8), 6);
    assert_memory_equal(all + 48, part + 48, 48 * sizeof *all);
    noise_forward(&context, part, noise, (struct route_key){5, 4, 1, 0}, whole_sequences(1, 8), 6);
    assert_memory_not_equal(all, part, 48 * sizeof *all);
    for (int index = 0; index < 2; index++) {
        struct sequences half = {1, 8, 2, index};
        take_rows(half, rows, own, 6);
        take_rows(half, own_noise, noise, 6);
        noise_forward(&context, rows, own_noise, (struct route_key){5, 3, 1, 0}, half, 6);
        take_rows(half, own_noise, all, 6);
        assert_memory_equal(rows, own_noise, sizeof rows);
    }
    free(all), free(part), free(noise), free(own);
}

/* ---- routing of pieces ------------------------------------------------------------------------------- */

enum { PIECE_TOKENS = 48, PIECE_EXPERTS = 6, PIECE_TOP_K = 2 };

/* A route, its gradient and its losses of two sequences, or of one rank's part of them. */
struct routed {
    floatX logits[PIECE_TOKENS * PIECE_EXPERTS], dlogits[PIECE_TOKENS * PIECE_EXPERTS];
    floatX weights[PIECE_TOKENS * PIECE_TOP_K], dweights[PIECE_TOKENS * PIECE_TOP_K];
    int ids[PIECE_TOKENS * PIECE_TOP_K], chosen[2 * PIECE_EXPERTS];
    unsigned char kept[PIECE_TOKENS * PIECE_TOP_K];
    struct route route;
    struct sequences sequences;
};

static void make_routed(struct routed *routed, struct sequences sequences) {
    floatX *logits = randoms(COUNT(routed->logits), 3), *dweights = randoms(COUNT(routed->dweights), 4);
    for (size_t i = 0; i < COUNT(routed->logits); i++) logits[i] -= (floatX)(i % PIECE_EXPERTS) / 2;
    routed->sequences = sequences;
    routed->route =
        (struct route){routed->logits, routed->ids, routed->weights, routed->kept, routed->chosen};
    take_rows(sequences, routed->logits, logits, PIECE_EXPERTS);
    take_rows(sequences, routed->dweights, dweights, PIECE_TOP_K);
    free(logits), free(dweights);
}

static void finish_routed(struct routed *routed, const struct model *model, const int *choices) {
    struct context context = {0};
    route_settle(model, &routed->route, choices, routed->sequences);
    route_backward(&context, model, routed->dlogits, routed->dweights, &routed->route, routed->sequences,
                   0.02, 0.003);
    context_free(&context);
}

/* Every rank's rows are those of whole sequences, bit by bit. */
static void check_routes_of_pieces(const struct model *model, const struct forced_routing *forced, int cp) {
    struct context context = {0};
    struct routed whole, part[4];
    int choices[2 * 8 * PIECE_TOP_K * PIECE_EXPERTS];
    int whole_choices[2 * PIECE_TOP_K * PIECE_EXPERTS];
    make_routed(&whole, whole_sequences(2, PIECE_TOKENS / 2));
    route_choose(&context, model, &whole.route, forced, 1, whole.sequences);
    route_count(model, whole_choices, &whole.route, whole.sequences);
    finish_routed(&whole, model, whole_choices);
    for (int i = 0; i < cp; i++) {
        make_routed(&part[i], (struct sequences){2, PIECE_TOKENS / 2, cp, i});
        route_choose(&context, model, &part[i].route, forced, 1, part[i].sequences);
        route_count(model, choices, &part[i].route, part[i].sequences);
    }
    struct route_losses all = route_losses(model, &whole.route, whole.sequences), sum = {0, 0};
    int dropped = 0;
    for (int i = 0; i < cp; i++) {
        struct sequences s = part[i].sequences;
        finish_routed(&part[i], model, choices);
        struct route_losses own = route_losses(model, &part[i].route, s);
        sum.aux += own.aux;
        sum.z += own.z;
        assert_memory_equal(part[i].chosen, whole.chosen, sizeof whole.chosen);
        for (int r = 0; r < rows_of_all(s); r++) {
            int row = r % rows_of_sequence(s), sequence = r / rows_of_sequence(s);
            int t = sequence * s.seq_len + position_of_row(s, row);
            for (int k = 0; k < PIECE_TOP_K; k++) {
                int a = r * PIECE_TOP_K + k, b = t * PIECE_TOP_K + k;
                assert_int_equal(part[i].ids[a], whole.ids[b]);
                assert_int_equal(part[i].kept[a], whole.kept[b]);
                assert_true(part[i].weights[a] == whole.weights[b]);
                dropped += !whole.kept[b];
            }
            assert_memory_equal(part[i].dlogits + r * PIECE_EXPERTS, whole.dlogits + t * PIECE_EXPERTS,
                                PIECE_EXPERTS * sizeof(floatX));
        }
    }
    assert_true(fabs(sum.aux - all.aux) < 1e-5 * all.aux && fabs(sum.z - all.z) < 1e-5 * all.z);
    assert_int_equal(dropped > 0, model->moe.capacity_factor > 0);
    context_free(&context);
}

static void routes_of_pieces(void **state) {
    (void)state;
    struct model model = small_model();
    struct arena *arena = arena_new();
    const double share[] = {0.4, 0.3, 0.1, 0.1, 0.05, 0.05};
    struct forced_routing *forced = forced_routing_new(arena, &model, share, PIECE_TOKENS / 2);
    for (int cp = 1; cp <= 4; cp *= 2)
        for (int capacity = 0; capacity < 2; capacity++) {
            model.moe.capacity_factor = capacity * 0.7;
            check_routes_of_pieces(&model, NULL, cp);
            check_routes_of_pieces(&model, forced, cp);
        }
    arena_free(arena);
}

/* ---- activations: vectorised exponential and both backward forms ------------------------------------- */

static double activation_value(double gate, double up, enum activation_function kind) {
    if (kind == ACTIVATION_SWIGLU) return gate / (1 + exp(-gate)) * up;
    gate = fmin(gate, 7);
    up = fmax(-7, fmin(up, 7));
    return (up + 1) * gate / (1 + exp(-1.702 * gate));
}

static void activations(void **state) {
    (void)state;
    enum { ROWS = 37, WIDTH = 23 };
    struct context context = {.workers = workers_new(2)};
    for (int kind = ACTIVATION_SWIGLU; kind <= ACTIVATION_SWIGLU_CLAMPED; kind++) {
        floatX *x = randoms(ROWS * 2 * WIDTH, 1), *act = randoms(ROWS * WIDTH, 2),
               *d = randoms(ROWS * WIDTH, 3);
        floatX *dx = randoms(ROWS * 2 * WIDTH, 4), *expected = must_alloc(ROWS * 2 * WIDTH * sizeof *x);
        for (int i = 0; i < ROWS * 2 * WIDTH; i++) x[i] *= 5; /* some beyond the limits */
        activation_forward(&context, act, x, ROWS, WIDTH, (enum activation_function)kind);
        activation_backward(&context, dx, d, x, ROWS, WIDTH, (enum activation_function)kind);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < WIDTH; i++) {
                double g = x[r * 2 * WIDTH + i], u = x[r * 2 * WIDTH + WIDTH + i], h = 1e-6,
                       dy = d[r * WIDTH + i];
                enum activation_function f = (enum activation_function)kind;
                assert_true(fabs(act[r * WIDTH + i] - activation_value(g, u, f)) < 1e-4);
                expected[r * 2 * WIDTH + i] =
                    (floatX)(dy * (activation_value(g + h, u, f) - activation_value(g - h, u, f)) / (2 * h));
                expected[r * 2 * WIDTH + WIDTH + i] =
                    (floatX)(dy * (activation_value(g, u + h, f) - activation_value(g, u - h, f)) / (2 * h));
            }
        for (int i = 0; i < ROWS * 2 * WIDTH; i++) assert_true(fabs((double)dx[i] - expected[i]) < 1e-3);
        activation_backward(&context, x, d, x, ROWS, WIDTH, (enum activation_function)kind); /* in place */
        assert_close(x, dx, ROWS * 2 * WIDTH, "activation backward in place");
        free(x), free(act), free(d), free(dx), free(expected);
    }
    context_free(&context);
    workers_free(context.workers);
}

/* ---- head -------------------------------------------------------------------------------------------- */

/* What one token adds to the loss and, of a quarter of it, to the gradients, in double. */
static double naive_token(const floatX *x, const floatX *w, int target, int hidden, int vocab, double *dx,
                          double *dw) {
    double *p = must_alloc((size_t)vocab * sizeof *p), sum = 0, loss;
    for (int v = 0; v < vocab; v++) {
        double logit = 0;
        for (int i = 0; i < hidden; i++) logit += (double)x[i] * w[(size_t)v * hidden + i];
        sum += p[v] = exp(logit);
    }
    loss = log(sum) - log(p[target]);
    for (int v = 0; v < vocab; v++)
        for (int i = 0; i < hidden; i++) {
            double d = 0.25 * (p[v] / sum - (v == target));
            dx[i] += d * w[(size_t)v * hidden + i];
            dw[(size_t)v * hidden + i] += d * x[i];
        }
    free(p);
    return loss;
}

static floatX *narrowed(double *values, size_t count) {
    floatX *narrow = must_alloc(count * sizeof *narrow);
    for (size_t i = 0; i < count; i++) narrow[i] = (floatX)values[i];
    free(values);
    return narrow;
}

static void head_in_chunks(void **state) {
    (void)state;
    enum { TOKENS = 45, HIDDEN = 6, VOCAB = 70001 }; /* so wide that a chunk is 16 tokens */
    struct context context = {.workers = workers_new(2)};
    floatX *x = randoms(TOKENS * HIDDEN, 1), *w = randoms((size_t)VOCAB * HIDDEN, 2);
    floatX *dx = randoms(TOKENS * HIDDEN, 4), *dw = must_alloc((size_t)VOCAB * HIDDEN * sizeof *dw);
    double *naive_dx = must_alloc(TOKENS * HIDDEN * sizeof *naive_dx), naive = 0;
    double *naive_dw = must_alloc((size_t)VOCAB * HIDDEN * sizeof *naive_dw);
    int targets[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        targets[t] = t * 1555;
        naive += naive_token(x + t * HIDDEN, w, targets[t], HIDDEN, VOCAB, naive_dx + t * HIDDEN, naive_dw);
    }
    double loss = head_forward(&context, x, w, targets, TOKENS, HIDDEN, VOCAB);
    double again = head_forward_backward(&context, dx, dw, x, w, targets, TOKENS, HIDDEN, VOCAB, 0.25);
    assert_true(fabs(loss - naive) < 1e-5 * naive && loss == again);
    floatX *expected_dx = narrowed(naive_dx, TOKENS * HIDDEN);
    floatX *expected_dw = narrowed(naive_dw, (size_t)VOCAB * HIDDEN);
    assert_close(dx, expected_dx, TOKENS * HIDDEN, "head dx");
    assert_close(dw, expected_dw, (size_t)VOCAB * HIDDEN, "head dw");
    free(x), free(w), free(dx), free(dw), free(expected_dx), free(expected_dw);
    context_free(&context);
    workers_free(context.workers);
}

/* ---- blocks, put together as a distributed run does, against the reference --------------------------- */

enum { SEQUENCES = 3, SEQ_LEN = 16, MOST_CP = 4 };
/* Two ranks of experts, and the token's own rank, which has a part only in the pipelined form. */
enum { LOCAL = 2, PARTS = 3 };

/* A setting of the blocks. */
struct levels {
    enum attention_recompute attention;
    enum ffn_recompute ffn;
    int cp;         /* attention runs on that many ranks, which have a thread each */
    bool pipelined; /* residual and shared experts stay at home; else they go with a token's first copy */
};
struct run {
    struct arena *arena;
    const struct model *model;
    struct parameters parameters;
    floatX *values, *gradients[MOST_CP]; /* of each attention rank; the rest is in the first one */
    struct rope rope;
    struct context contexts[MOST_CP];
    const struct forced_routing *forced;
    struct levels levels;
};
/* What one attention rank has. */
struct attention_side {
    struct attention_block block;
    struct attention_part part;
    struct attention_kept kept;
    struct attention_pending pending;
    void *stays, *dropped;
    floatX *input, *dmiddle, *dweights; /* its rows */
};
/* One micro-batch (a sequence) at one layer: what the attention ranks and each part keep. */
struct layer_state {
    struct attention_side side[MOST_CP];
    int layer;
    struct route route; /* of the whole sequence */
    floatX *middle;     /* likewise */
    struct expert_block block[PARTS];
    struct expert_part expert_part[PARTS];
    struct expert_kept expert_kept[PARTS];
    struct expert_pending expert_pending[PARTS];
    void *stays[PARTS], *dropped[PARTS];
    floatX *rows[PARTS];
    int *copy[PARTS]; /* of each row: t · K + k, or t · K where it has no expert */
};

static void *take(struct run *run, size_t bytes) {
    return arena_alloc(run->arena, bytes + 64);
}
static void *take_aligned(struct run *run, size_t bytes) {
    if (!bytes) return NULL;
    return (void *)(((uintptr_t)arena_alloc(run->arena, bytes + 128) + 63) / 64 * 64);
}

/* Rows of experts first … first + experts, then rows without an expert; a part without experts has no counts
   and no weights. */
static void choose_rows(struct run *run, struct layer_state *state, int part, int first, int experts) {
    const struct route *route = &state->route;
    bool moe = model_layer_is_moe(run->model, state->layer),
         home = part == (run->levels.pipelined ? LOCAL : 1);
    int rows = 0, top_k = run->model->moe.top_k;
    int *counts = experts ? take(run, (size_t)experts * sizeof *counts) : NULL,
        *copy = take(run, 100 * sizeof *copy);
    floatX *weights = experts ? take(run, 100 * sizeof *weights) : NULL;
    unsigned char *firsts = take(run, 100);
    for (int e = 0; e < experts; e++)
        for (int c = 0; c < SEQ_LEN * top_k; c++) {
            if (!route->kept[c] || route->ids[c] != first + e) continue;
            int k = 0;
            while (!route->kept[c / top_k * top_k + k]) k++;
            firsts[rows] = !run->levels.pipelined && c % top_k == k;
            weights[rows] = route->weights[c];
            copy[rows++] = c;
            counts[e]++;
        }
    for (int t = 0; home && t < SEQ_LEN; t++) {
        bool alone = true;
        for (int k = 0; !run->levels.pipelined && moe && k < top_k; k++) alone &= !route->kept[t * top_k + k];
        if (!alone) continue;
        firsts[rows] = 1;
        copy[rows++] = t * top_k;
    }
    state->expert_part[part] = (struct expert_part){rows, counts, weights, firsts};
    state->copy[part] = copy;
}

/* The first half of the experts, the rest, none. */
static void dispatch(struct run *run, struct layer_state *state, int part) {
    const struct model *model = run->model;
    int layer = state->layer, half = model->moe.experts / 2, first = part ? half : 0;
    int experts = part ? model->moe.experts - half : half;
    if (part == LOCAL || !model_layer_is_moe(model, layer)) experts = 0;
    choose_rows(run, state, part, first, experts);
    struct expert_block *block = &state->block[part];
    *block = (struct expert_block){.model = model, .layer = layer, .experts = experts};
    block->ffn_norm = attention_tensors(&run->parameters, run->values, layer).ffn_norm;
    block->ffn_norm_gradient = attention_tensors(&run->parameters, run->gradients[0], layer).ffn_norm;
    if (experts) {
        block->weights = expert_tensors(run->arena, &run->parameters, run->values, layer, first, experts);
        block->gradients =
            expert_tensors(run->arena, &run->parameters, run->gradients[0], layer, first, experts);
    }
    if (run->levels.pipelined && part != LOCAL) return; /* its shared experts are elsewhere */
    block->shared = ffn_tensors(&run->parameters, run->values, layer, -1);
    block->shared_gradients = ffn_tensors(&run->parameters, run->gradients[0], layer, -1);
}

static void count_rows(const struct layer_state *state, int part, int *routed, int *firsts) {
    *routed = *firsts = 0;
    for (int e = 0; e < state->block[part].experts; e++) *routed += state->expert_part[part].counts[e];
    for (int r = 0; r < state->expert_part[part].rows; r++) *firsts += state->expert_part[part].first[r];
}

/* The dropped memory is another one each time, and the old one is spoilt. */
static void *drop(struct run *run, void *old, size_t bytes) {
    if (old) memset(old, 0xff, bytes); /* NaN, and no expert's number */
    return take_aligned(run, bytes);
}

static void place_experts(struct run *run, struct layer_state *state, int part) {
    enum ffn_recompute level = run->levels.ffn;
    int layer = state->layer, routed, firsts;
    count_rows(state, part, &routed, &firsts);
    state->dropped[part] =
        drop(run, state->dropped[part], expert_restored_bytes(run->model, layer, level, routed, firsts));
    state->expert_kept[part] =
        expert_kept_place(run->model, layer, level, routed, firsts, state->stays[part], state->dropped[part]);
}

static void make_expert_memory(struct run *run, struct layer_state *state, int part) {
    int layer = state->layer, routed, firsts;
    count_rows(state, part, &routed, &firsts);
    state->stays[part] =
        take_aligned(run, expert_kept_bytes(run->model, layer, run->levels.ffn, routed, firsts));
    state->expert_pending[part] =
        expert_pending_place(run->model, layer, routed, firsts,
                             take_aligned(run, expert_pending_bytes(run->model, layer, routed, firsts)));
    place_experts(run, state, part);
}

/* ---- attention ranks in threads ---------------------------------------------------------------------- */

struct meeting {
    pthread_barrier_t barrier;
    void *pieces[MOST_CP];
    int cp;
};
struct attendant {
    struct meeting *meeting;
    int index;
    struct run *run;
    struct layer_state *state;
    void (*task)(struct run *run, struct layer_state *state, int index);
};

static void meet(struct attendant *own, void *pieces) {
    own->meeting->pieces[own->index] = pieces;
    pthread_barrier_wait(&own->meeting->barrier);
}

/* Of a piece among (sequences, 2·cp). */
static int holder_of(int piece, int cp) {
    int number = piece % (2 * cp);
    return number < cp ? number : 2 * cp - 1 - number;
}

static void gather(void *owner, void *pieces, int sequences, size_t bytes) {
    struct attendant *own = owner;
    meet(own, pieces);
    int cp = own->meeting->cp, all = sequences * 2 * cp;
    for (int i = 0; i < all; i++) {
        int holder = holder_of(i, cp);
        if (holder != own->index)
            memcpy((char *)pieces + i * bytes, (char *)own->meeting->pieces[holder] + i * bytes, bytes);
    }
    pthread_barrier_wait(&own->meeting->barrier);
}

static void scatter(void *owner, floatX *pieces, int sequences, size_t count) {
    struct attendant *own = owner;
    meet(own, pieces);
    int cp = own->meeting->cp, all = sequences * 2 * cp;
    for (int i = 0; i < all; i++) {
        int holder = holder_of(i, cp);
        for (int j = 0; holder == own->index && j < cp; j++)
            for (size_t e = i * count; j != holder && e < (i + 1) * count; e++)
                pieces[e] += ((floatX *)own->meeting->pieces[j])[e];
    }
    pthread_barrier_wait(&own->meeting->barrier);
    for (int i = 0; i < all; i++) { /* the others are lost */
        int holder = holder_of(i, cp);
        if (holder != own->index) memset(pieces + i * count, 0xff, count * sizeof *pieces);
    }
}

static void *attend(void *argument) {
    struct attendant *own = argument;
    struct collectives collectives = {gather, scatter, own};
    own->state->side[own->index].part.collectives = &collectives;
    own->task(own->run, own->state, own->index);
    return NULL;
}

static void on_attention_ranks(struct run *run, struct layer_state *state,
                               void (*task)(struct run *run, struct layer_state *state, int index)) {
    struct meeting meeting = {.cp = run->levels.cp};
    struct attendant attendants[MOST_CP];
    pthread_t threads[MOST_CP];
    pthread_barrier_init(&meeting.barrier, NULL, (unsigned)meeting.cp);
    for (int i = 0; i < meeting.cp; i++) attendants[i] = (struct attendant){&meeting, i, run, state, task};
    for (int i = 1; i < meeting.cp; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, attend, &attendants[i]), 0);
    attend(&attendants[0]);
    for (int i = 1; i < meeting.cp; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&meeting.barrier);
}

static void *taken(size_t bytes) { /* by a thread of its own */
    return must_alloc(bytes + 1);
}

static void forward_task(struct run *run, struct layer_state *state, int index) {
    struct attention_side *side = &state->side[index];
    side->part.gathered = taken(attention_gathered_bytes(run->model, side->part.sequences));
    attention_block_forward(&run->contexts[index], &side->block, &side->part, &side->kept, side->input);
    free(side->part.gathered);
}

static void restore_task(struct run *run, struct layer_state *state, int index) {
    struct attention_side *side = &state->side[index];
    side->part.gathered = NULL; /* nothing is gathered here */
    attention_block_restore(&run->contexts[index], &side->block, &side->part, run->levels.attention,
                            &side->kept, side->input);
}

static void backward_task(struct run *run, struct layer_state *state, int index) {
    struct attention_side *side = &state->side[index];
    side->part.gathered = taken(2 * attention_gathered_bytes(run->model, side->part.sequences));
    attention_block_backward_input(&run->contexts[index], &side->block, &side->part, &side->kept,
                                   &side->pending, side->dmiddle, side->dmiddle, side->dweights, side->input);
    free(side->part.gathered);
}

/* ---- a layer ----------------------------------------------------------------------------------------- */

static int rows_a_rank(const struct run *run) {
    return SEQ_LEN / run->levels.cp;
}

static void place_side(struct run *run, struct layer_state *state, int index) {
    struct attention_side *side = &state->side[index];
    enum attention_recompute level = run->levels.attention;
    int tokens = rows_a_rank(run), *chosen = side->kept.route.chosen;
    side->dropped =
        drop(run, side->dropped, attention_restored_bytes(run->model, state->layer, level, tokens));
    side->kept = attention_kept_place(run->model, state->layer, level, tokens, side->stays, side->dropped);
    side->kept.route.chosen = chosen;
}

static void make_side(struct run *run, struct layer_state *state, int index, const floatX *input) {
    const struct model *model = run->model;
    struct attention_side *side = &state->side[index];
    int layer = state->layer, tokens = rows_a_rank(run);
    size_t row_bytes = (size_t)model->hidden * sizeof(floatX);
    side->block = (struct attention_block){model, layer, &run->rope,
                                           attention_tensors(&run->parameters, run->values, layer),
                                           attention_tensors(&run->parameters, run->gradients[index], layer)};
    side->stays = take_aligned(run, attention_kept_bytes(model, layer, run->levels.attention, tokens));
    side->pending = attention_pending_place(model, layer, tokens,
                                            take_aligned(run, attention_pending_bytes(model, layer, tokens)));
    side->input = take(run, (size_t)tokens * row_bytes);
    side->dmiddle = take(run, (size_t)tokens * row_bytes);
    side->dweights = take(run, (size_t)tokens * model->moe.top_k * sizeof(floatX));
    side->kept.route.chosen = take(run, (size_t)model->moe.experts * sizeof(int));
    take_rows(side->part.sequences, side->input, input, model->hidden);
    place_side(run, state, index);
}

/* middle and route of the whole sequence from the ranks' rows. */
static void assemble(struct run *run, struct layer_state *state) {
    const struct model *model = run->model;
    int top_k = model->moe.top_k;
    for (int i = 0; i < run->levels.cp; i++) {
        const struct attention_side *side = &state->side[i];
        for (int r = 0; r < rows_a_rank(run); r++) {
            int t = position_of_row(side->part.sequences, r);
            memcpy(state->middle + t * model->hidden, side->kept.middle + r * model->hidden,
                   (size_t)model->hidden * sizeof(floatX));
            for (int k = 0; side->kept.route.ids && k < top_k; k++) {
                state->route.ids[t * top_k + k] = side->kept.route.ids[r * top_k + k];
                state->route.kept[t * top_k + k] = side->kept.route.kept[r * top_k + k];
                state->route.weights[t * top_k + k] = side->kept.route.weights[r * top_k + k];
            }
        }
    }
}

static void attention_sides_forward(struct run *run, struct layer_state *state, const floatX *input) {
    const struct model *model = run->model;
    size_t copies = (size_t)SEQ_LEN * model->moe.top_k;
    for (int i = 0; i < run->levels.cp; i++) make_side(run, state, i, input);
    on_attention_ranks(run, state, forward_task);
    state->middle = take(run, (size_t)SEQ_LEN * model->hidden * sizeof(floatX));
    state->route = (struct route){.ids = take(run, copies * sizeof(int)),
                                  .weights = take(run, copies * sizeof(floatX)),
                                  .kept = take(run, copies)};
    assemble(run, state);
}

static void fill_rows(struct run *run, struct layer_state *state, int part) {
    int hidden = run->model->hidden;
    for (int r = 0; r < state->expert_part[part].rows; r++)
        memcpy(state->rows[part] + r * hidden,
               state->middle + state->copy[part][r] / run->model->moe.top_k * hidden,
               (size_t)hidden * sizeof(floatX));
}

static void block_layer_forward(struct run *run, struct layer_state *state, const floatX *input,
                                floatX *output) {
    const struct model *model = run->model;
    int hidden = model->hidden;
    size_t row_bytes = (size_t)hidden * sizeof(floatX);
    attention_sides_forward(run, state, input);
    memset(output, 0, SEQ_LEN * row_bytes);
    for (int p = 0; p < PARTS; p++) {
        dispatch(run, state, p);
        make_expert_memory(run, state, p);
        const struct expert_part *part = &state->expert_part[p];
        state->rows[p] = take_aligned(run, (size_t)part->rows * row_bytes);
        floatX *out = take_aligned(run, (size_t)part->rows * row_bytes);
        fill_rows(run, state, p);
        expert_block_forward(&run->contexts[0], &state->block[p], part, &state->expert_kept[p], out,
                             state->rows[p]);
        for (int r = 0; r < part->rows; r++)
            for (int i = 0; i < hidden; i++)
                output[state->copy[p][r] / model->moe.top_k * hidden + i] += out[r * hidden + i];
    }
}

/* What a layer needs for its backward pass and did not keep; rows are sent again. */
static void regain(struct run *run, struct layer_state *state) {
    enum attention_recompute level = run->levels.attention;
    for (int i = 0; i < run->levels.cp; i++) place_side(run, state, i);
    if (level == ATTENTION_FULL) on_attention_ranks(run, state, forward_task);
    if (level == ATTENTION_NORMS || level == ATTENTION_PROJECTIONS)
        on_attention_ranks(run, state, restore_task);
    assemble(run, state);
    for (int p = 0; p < PARTS; p++) {
        place_experts(run, state, p);
        fill_rows(run, state, p);
        if (run->levels.ffn != FFN_NONE)
            expert_block_restore(&run->contexts[0], &state->block[p], &state->expert_part[p], run->levels.ffn,
                                 &state->expert_kept[p], state->rows[p]);
    }
}

/* Gradients of middle and of the weights, each on its token's attention rank. */
static void return_gradients(struct run *run, struct layer_state *state, const floatX *dmiddle,
                             const floatX *dweights, floatX *d) {
    int hidden = run->model->hidden;
    for (int i = 0; i < run->levels.cp; i++) {
        struct attention_side *side = &state->side[i];
        take_rows(side->part.sequences, side->dmiddle, dmiddle, hidden);
        take_rows(side->part.sequences, side->dweights, dweights, run->model->moe.top_k);
    }
    on_attention_ranks(run, state, backward_task);
    for (int i = 0; i < run->levels.cp; i++)
        for (int r = 0; r < rows_a_rank(run); r++)
            memcpy(d + position_of_row(state->side[i].part.sequences, r) * hidden,
                   state->side[i].dmiddle + r * hidden, (size_t)hidden * sizeof *d);
}

/* d (T, H), in place */
static void block_layer_backward(struct run *run, struct layer_state *state, floatX *d) {
    const struct model *model = run->model;
    int hidden = model->hidden;
    size_t row_bytes = (size_t)hidden * sizeof(floatX);
    floatX *dmiddle = take(run, SEQ_LEN * row_bytes),
           *dweights = take(run, SEQ_LEN * (size_t)model->moe.top_k * 8);
    regain(run, state);
    for (int p = 0; p < PARTS; p++) {
        const struct expert_part *part = &state->expert_part[p];
        floatX *dout = take_aligned(run, (size_t)part->rows * row_bytes),
               *din = take_aligned(run, (size_t)part->rows * row_bytes);
        floatX *row_dweights = part->weights ? take(run, (size_t)part->rows * sizeof(floatX)) : NULL;
        for (int r = 0; r < part->rows; r++)
            memcpy(dout + r * hidden, d + state->copy[p][r] / model->moe.top_k * hidden, row_bytes);
        expert_block_backward_input(&run->contexts[0], &state->block[p], part, &state->expert_kept[p],
                                    &state->expert_pending[p], din, row_dweights, dout, state->rows[p]);
        for (int r = 0; r < part->rows; r++) {
            int copy = state->copy[p][r];
            if (row_dweights) dweights[copy] += row_dweights[r];
            for (int i = 0; i < hidden; i++)
                dmiddle[copy / model->moe.top_k * hidden + i] += din[r * hidden + i];
        }
    }
    return_gradients(run, state, dmiddle, dweights, d);
}

static void block_layer_weight(struct run *run, struct layer_state *state) {
    for (int p = 0; p < PARTS; p++)
        expert_block_backward_weight(&run->contexts[0], &state->block[p], &state->expert_part[p],
                                     &state->expert_kept[p], &state->expert_pending[p], state->rows[p]);
    for (int i = 0; i < run->levels.cp; i++)
        attention_block_backward_weight(&run->contexts[i], &state->side[i].block, &state->side[i].part,
                                        &state->side[i].kept, &state->side[i].pending);
}

static void prepare_layer(struct run *run, struct layer_state *state, const struct batch *batch, int sequence,
                          int layer) {
    state->layer = layer;
    for (int i = 0; i < run->levels.cp; i++)
        state->side[i].part =
            (struct attention_part){.sequences = {1, SEQ_LEN, run->levels.cp, i},
                                    .key = {batch->seed, batch->step, -1, (int64_t)sequence * SEQ_LEN},
                                    .aux_scale = route_aux_scale(run->model, SEQUENCES),
                                    .z_scale = route_z_scale(run->model, SEQUENCES * SEQ_LEN),
                                    .forced = run->forced};
}

/* One micro-batch forward, then all input gradients, then, in another order, all weight gradients. */
static void block_micro_batch(struct run *run, const struct batch *batch, int sequence) {
    const struct model *model = run->model;
    struct context *context = &run->contexts[0];
    const int *inputs = batch->tokens + sequence * (SEQ_LEN + 1), *targets = inputs + 1;
    size_t bytes = (size_t)SEQ_LEN * model->hidden * sizeof(floatX);
    struct layer_state states[8];
    memset(states, 0, sizeof states);
    floatX *x = take(run, bytes), *d = take(run, bytes);
    embedding_forward(context, x, tensor_at(&run->parameters, run->values, "model.embed_tokens.weight"),
                      inputs, SEQ_LEN, model->hidden);
    for (int layer = 0; layer < model->layers; layer++) {
        const floatX *input = x;
        x = take(run, bytes);
        prepare_layer(run, &states[layer], batch, sequence, layer);
        block_layer_forward(run, &states[layer], input, x);
    }
    struct head_block head = {model, tensor_at(&run->parameters, run->values, "model.norm.weight"),
                              tensor_at(&run->parameters, run->gradients[0], "model.norm.weight"),
                              head_tensor(&run->parameters, run->values),
                              head_tensor(&run->parameters, run->gradients[0])};
    double scale = 1.0 / (SEQUENCES * SEQ_LEN);
    head_block_forward_backward(context, &head, d, x, targets, SEQ_LEN, scale);
    for (int layer = model->layers - 1; layer >= 0; layer--) block_layer_backward(run, &states[layer], d);
    embedding_backward(context, tensor_at(&run->parameters, run->gradients[0], "model.embed_tokens.weight"),
                       d, inputs, SEQ_LEN, model->hidden);
    for (int layer = 0; layer < model->layers; layer++) block_layer_weight(run, &states[layer]);
}

/* The gradients that the blocks make of a batch, for the caller to free. */
static floatX *block_gradients(struct reference *reference, const struct batch *batch, struct levels levels) {
    const struct model *model = reference->model;
    struct run run = {.arena = arena_new(), .model = model, .levels = levels, .forced = reference->forced};
    run.parameters = parameters_new(run.arena, model, NULL, NULL);
    run.values = reference->values;
    for (int i = 0; i < levels.cp; i++) run.gradients[i] = take(&run, run.parameters.total * sizeof(floatX));
    run.rope = rope_new(run.arena, SEQ_LEN, model->attention.head_dim, model->attention.rope_theta);
    for (int s = 0; s < SEQUENCES; s++) block_micro_batch(&run, batch, s);
    floatX *sum = must_alloc(run.parameters.total * sizeof *sum);
    for (int i = 0; i < levels.cp; i++) {
        for (size_t e = 0; e < run.parameters.total; e++) sum[e] += run.gradients[i][e];
        assert_int_equal(run.contexts[i].scratch_bytes, 0);
        context_free(&run.contexts[i]);
    }
    arena_free(run.arena);
    return sum;
}

/* At every level, on any number of ranks, the reference's gradients; what is restored is what was dropped, to
   the bit. share (E) of a forced choice, or NULL. */
static void check_blocks(struct model model, bool pipelined, const double *share) {
    int tokens[SEQUENCES * (SEQ_LEN + 1)];
    struct rng rng = rng_seed(8);
    struct arena *arena = arena_new();
    for (size_t i = 0; i < COUNT(tokens); i++) tokens[i] = rng_below(&rng, model.vocab);
    struct batch batch = {tokens, SEQUENCES, 4, 2};
    struct reference *reference = reference_new(&model, SEQ_LEN, SEQUENCES, 2, 1);
    size_t total = reference->parameters.total;
    floatX *values = randoms(total, 17), *kept[MOST_CP + 1] = {0};
    for (size_t i = 0; i < total; i++) reference->values[i] = values[i] * (floatX)0.4;
    if (share) reference->forced = forced_routing_new(arena, &model, share, SEQ_LEN);
    struct step_losses losses = reference_gradients(reference, &batch);
    assert_int_equal(isinf(losses.margin) != 0, share != NULL);
    for (int level = 0; level < 12; level++)
        for (int cp = 1; cp <= MOST_CP; cp *= 2) {
            struct levels levels = {(enum attention_recompute)(level % 4), (enum ffn_recompute)(level / 4),
                                    cp, pipelined};
            if (level && share && level != 11) continue;
            floatX *found = block_gradients(reference, &batch, levels);
            for (int i = 0; i < reference->parameters.count; i++) {
                const struct parameter *p = &reference->parameters.list[i];
                assert_close(found + p->offset, reference->gradients + p->offset, p->count, p->name);
            }
            if (kept[cp]) assert_memory_equal(found, kept[cp], total * sizeof *found);
            if (kept[cp])
                free(found);
            else
                kept[cp] = found;
        }
    for (int cp = 1; cp <= MOST_CP; cp++) free(kept[cp]);
    free(values);
    arena_free(arena);
    reference_free(reference);
}

static void blocks_equal_reference(void **state) {
    (void)state;
    struct model gptoss = small_model(), qwen3 = small_model(), deepseek = small_model(),
                 noisy = small_model();
    gptoss.attention.bias = gptoss.attention.sinks = gptoss.moe.bias = true;
    gptoss.attention.window = 4;
    gptoss.attention.window_layers = WINDOW_ODD;
    gptoss.moe.router = ROUTER_TOPK_SOFTMAX;
    gptoss.moe.activation = ACTIVATION_SWIGLU_CLAMPED;
    qwen3.attention.qk_norm = true;
    deepseek.layers = 3;
    deepseek.moe.renormalise = false;
    deepseek.moe.shared_experts = 2;
    deepseek.moe.dense_layers = 1;
    deepseek.moe.dense_hidden = 11;
    noisy.moe.router = ROUTER_NOISY_TOPK;
    noisy.moe.capacity_factor = 0.5;
    noisy.moe.shared_experts = 1;
    noisy.moe.dense_layers = 1;
    noisy.moe.dense_hidden = 7;
    noisy.moe.bias = true;
    noisy.tie_embeddings = true;
    const struct model models[] = {gptoss, qwen3, deepseek, noisy};
    const double share[] = {0.1, 0, 0.5, 0.2, 0.2, 0}; /* every token, nothing, in between */
    for (size_t m = 0; m < COUNT(models); m++)
        for (int pipelined = 0; pipelined < 2; pipelined++) {
            check_blocks(models[m], pipelined, NULL);
            check_blocks(models[m], pipelined, share);
        }
}

/* What a block keeps is what the simulator counts, up to the padding of its tensors; the rest is what it
   restores. */
static void kept_bytes_are_as_modelled(void **state) {
    (void)state;
    struct model model = small_model();
    enum { TOKENS = 4096, BYTES = sizeof(floatX) };
    model.attention.qk_norm = true;
    model.moe.dense_layers = 1;
    model.moe.dense_hidden = 7;
    for (int layer = 0; layer < 2; layer++) {
        bool moe = layer > 0;
        double all = (double)attention_kept_bytes(&model, layer, ATTENTION_NONE, TOKENS);
        for (int level = ATTENTION_NONE; level <= ATTENTION_FULL; level++) {
            enum attention_recompute recompute = (enum attention_recompute)level;
            double found = (double)attention_kept_bytes(&model, layer, recompute, TOKENS);
            double restored = (double)attention_restored_bytes(&model, layer, recompute, TOKENS);
            double small = model.attention.heads +
                           moe * (model.moe.experts + 2.0 * model.moe.top_k); /* 4 bytes each in the model */
            double modelled = model_attention_activation_bytes(&model, layer, recompute) - 4 * small;
            double expected = modelled / 2 * BYTES + (small - moe * model.moe.top_k) * BYTES +
                              moe * model.moe.top_k * (4 + 1.0);
            assert_true(fabs(found / TOKENS - (level == ATTENTION_FULL ? 0 : expected)) < 1);
            assert_true(found + restored == all);
        }
        all = (double)expert_kept_bytes(&model, layer, FFN_NONE, moe * TOKENS, TOKENS);
        for (int level = FFN_NONE; level <= FFN_FULL; level++) {
            enum ffn_recompute recompute = (enum ffn_recompute)level;
            double found = (double)expert_kept_bytes(&model, layer, recompute, moe * TOKENS, TOKENS);
            double restored = (double)expert_restored_bytes(&model, layer, recompute, moe * TOKENS, TOKENS);
            double expected = model_expert_activation_bytes(&model, layer, recompute) +
                              model_shared_activation_bytes(&model, layer, recompute);
            assert_true(fabs(found / TOKENS - expected / 2 * BYTES) < 1);
            assert_true(found + restored == all);
        }
    }
}

/* ---- optimizer --------------------------------------------------------------------------------------- */

static void optimizer(void **state) {
    (void)state;
    struct optimizer o = optimizer_default();
    o.warmup_steps = 4, o.steps = 104, o.learning_rate = 1e-2, o.final_learning_rate = 1e-3;
    assert_true(fabs(optimizer_rate(&o, 0) - 0.25e-2) < 1e-12 && fabs(optimizer_rate(&o, 3) - 1e-2) < 1e-12);
    assert_true(fabs(optimizer_rate(&o, 54) - 5.5e-3) < 1e-12 &&
                fabs(optimizer_rate(&o, 104) - 1e-3) < 1e-12);
    floatX clipped[] = {3, 4};
    assert_true(fabs(clip_scale(&o, sum_of_squares(clipped, 2)) - 0.2) < 1e-12);
    /* one step of one number, by hand: m = 0.1 g, v = 0.05 g², both corrected to g and g² */
    struct context context = {0};
    floatX value = 2, gradient = (floatX)0.5, m = 0, v = 0;
    adamw(&context, &o, 0, 1, true, &value, &gradient, &m, &v, 1);
    assert_true(fabs(value - (2 * (1 - 0.25e-2 * 0.1) - 0.25e-2)) < 1e-6);
    /* BF16 moments stay near the exact ones, on average over many elements */
    enum { COUNT_ = 4096 };
    floatX *a = randoms(COUNT_, 1), *b = randoms(COUNT_, 1), *g = randoms(COUNT_, 2);
    floatX *m32 = must_alloc(COUNT_ * sizeof *m32), *v32 = must_alloc(COUNT_ * sizeof *v32);
    uint16_t *m16 = must_alloc(COUNT_ * 2), *v16 = must_alloc(COUNT_ * 2);
    floatX *whole = randoms(COUNT_, 1);
    uint16_t *m_whole = must_alloc(COUNT_ * 2), *v_whole = must_alloc(COUNT_ * 2);
    double drift = 0, moved = 0;
    for (int step = 0; step < 50; step++) {
        adamw(&context, &o, step, 1, false, a, g, m32, v32, COUNT_);
        /* in two slices, which must round as one would */
        adamw_bf16(&context, &o, step, 1, false, b, g, m16, v16, 1000, 0, (uint64_t)step);
        adamw_bf16(&context, &o, step, 1, false, b + 1000, g + 1000, m16 + 1000, v16 + 1000, COUNT_ - 1000,
                   1000, (uint64_t)step);
        adamw_bf16(&context, &o, step, 1, false, whole, g, m_whole, v_whole, COUNT_, 0, (uint64_t)step);
    }
    assert_memory_equal(b, whole, COUNT_ * sizeof *b);
    assert_memory_equal(v16, v_whole, COUNT_ * 2);
    floatX *start = randoms(COUNT_, 1);
    for (int i = 0; i < COUNT_; i++)
        drift += fabs((double)a[i] - b[i]), moved += fabs((double)a[i] - start[i]);
    assert_true(drift < 0.01 * moved);
    assert_int_equal(bf16_from_float(1.0f), 0x3f80);
    assert_true(isnan(bf16_to_float(bf16_from_float(NAN))) &&
                isinf(bf16_to_float(bf16_from_float(INFINITY))));
    free(a), free(b), free(g), free(m32), free(v32), free(m16), free(v16), free(start);
    free(whole), free(m_whole), free(v_whole);
}

/* Summing N times the same g > 0: the j-th addition rounds at u ≤ 2⁻⁷ j g, its variance is at most g u,
   together at most 2⁻⁸ N² g²: whatever N, an element is off by at most 1/16 of itself, root mean square.
   Second moments decay likewise: each step's variance is at most (1 − β₂) 2⁻⁷ of their square, and what is
   old fades twice as fast, so that again 2⁻⁸ are left, whatever β₂. */
static const double DEVIATION = 1.0 / 16;

static double norm_of(const uint16_t *x, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += pow(bf16_to_float(x[i]), 2);
    return sqrt(sum);
}

/* 4,096 small gradients come to their sum, where rounding to nearest stops at half of it. */
static void bf16_sums_of_many(void **state) {
    (void)state;
    enum { MANY = 4096, ELEMENTS = 4096 };
    struct context context = {0};
    struct rng rng = rng_seed(3);
    floatX *g = must_alloc(ELEMENTS * sizeof *g);
    uint16_t *sums = must_alloc(ELEMENTS * 2), *nearest = must_alloc(ELEMENTS * 2);
    double squares = 0, bias = 0;
    for (int i = 0; i < ELEMENTS; i++) {
        g[i] = (floatX)((1 + rng_uniform(&rng)) * (i % 2 ? -0x1p-9 : 0x1p-9));
        squares += pow((double)g[i] * MANY, 2);
    }
    for (int n = 0; n < MANY; n++) {
        add_bf16(&context, sums, g, ELEMENTS, 0, rng_seed_of((uint64_t[]){7, (uint64_t)n}, 2));
        for (int i = 0; i < ELEMENTS; i++)
            nearest[i] = bf16_from_float(bf16_to_float(nearest[i]) + (float)g[i]);
    }
    for (int i = 0; i < ELEMENTS; i++)
        bias += (bf16_to_float(sums[i]) / ((double)g[i] * MANY) - 1) / ELEMENTS;
    /* five deviations of a mean over 4,096 elements; in the norm also half of the elements' variance */
    double five = 5 * DEVIATION / sqrt(ELEMENTS), off = norm_of(sums, ELEMENTS) / sqrt(squares) - 1;
    if (fabs(bias) > five) fail_msg("sums are off by %g of themselves on average, allowed is %g", bias, five);
    if (fabs(off) > DEVIATION * DEVIATION / 2 + 1.1 * five) fail_msg("the norm is off by %g", off);
    assert_true(norm_of(nearest, ELEMENTS) < 0.6 * sqrt(squares));
    free(g), free(sums), free(nearest);
}

/* A quarter of the last place: up in a quarter of all cases, each element and key for itself. */
static void bf16_rounding_is_fair(void **state) {
    (void)state;
    enum { ELEMENTS = 1 << 15 };
    struct context context = {0};
    floatX *quarter = must_alloc(ELEMENTS * sizeof *quarter);
    uint16_t *up[2];
    const uint16_t one = bf16_from_float(1);
    int agree[3] = {0}, rounded_up = 0;
    for (int k = 0; k < 2; k++) {
        up[k] = must_alloc((ELEMENTS + 1) * 2);
        for (int i = 0; i < ELEMENTS; i++) up[k][i] = one, quarter[i] = (floatX)0x1p-9;
        add_bf16(&context, up[k], quarter, ELEMENTS, 0, (uint64_t)k);
    }
    for (int i = 0; i < ELEMENTS; i++) {
        assert_in_range(up[0][i], one, one + 1);
        rounded_up += up[0][i] > one;
        agree[0] += up[0][i] == up[1][i];
        agree[1] += i > 0 && up[0][i] == up[0][i - 1];
        agree[2] += i > 0 && up[0][i] == up[1][i - 1]; /* the next key is not this one, moved on */
    }
    double places = 5 * sqrt(0.25 * 0.75 * ELEMENTS), pairs = 5 * sqrt(0.625 * 0.375 * ELEMENTS) + 1;
    assert_true(fabs(rounded_up - 0.25 * ELEMENTS) < places);
    for (size_t i = 0; i < COUNT(agree); i++) assert_true(fabs(agree[i] - 0.625 * ELEMENTS) < pairs);
    /* what can be represented stays, and what is not finite */
    const floatX plain[] = {0.5, -1, 0, (floatX)INFINITY, (floatX)-INFINITY, (floatX)NAN};
    uint16_t sums[COUNT(plain)] = {0};
    for (uint64_t key = 0; key < 64; key++) {
        memset(sums, 0, sizeof sums);
        add_bf16(&context, sums, plain, COUNT(plain), 0, key);
        for (size_t i = 0; i < 5; i++) assert_true(bf16_to_float(sums[i]) == (float)plain[i]);
        assert_true(isnan(bf16_to_float(sums[5])));
    }
    free(quarter), free(up[0]), free(up[1]);
}

/* The same bits whatever thread adds an element, in whichever piece, and every time. */
static void bf16_sums_by_threads(void **state) {
    (void)state;
    enum { ELEMENTS = 100003, CUT = 34567 };
    struct context plain = {0}, threads = {.workers = workers_new(4)};
    floatX *g = randoms(ELEMENTS, 1);
    uint16_t *a = must_alloc(ELEMENTS * 2), *b = must_alloc(ELEMENTS * 2), *c = must_alloc(ELEMENTS * 2);
    for (uint64_t key = 1; key < 6; key++) {
        add_bf16(&plain, a, g, ELEMENTS, 0, key);
        add_bf16(&threads, b, g, ELEMENTS, 0, key);
        add_bf16(&threads, c + CUT, g + CUT, ELEMENTS - CUT, CUT, key);
        add_bf16(&plain, c, g, CUT, 0, key);
    }
    assert_memory_equal(a, b, ELEMENTS * 2);
    assert_memory_equal(a, c, ELEMENTS * 2);
    add_bf16(&plain, a, g, ELEMENTS, 0, 6);
    add_bf16(&plain, b, g, ELEMENTS, 0, 7);
    assert_memory_not_equal(a, b, ELEMENTS * 2);
    workers_free(threads.workers);
    free(g), free(a), free(b), free(c);
}

/* Second moments in BF16 follow a gradient that has become small, where a step changes them by less than half
   of their last place: from 1 down to 0.01 with β₂ 0.95, 0.99 and 0.999. */
static void bf16_moments_decay(void **state) {
    (void)state;
    enum { ELEMENTS = 4096 };
    const double betas[] = {0.95, 0.99, 0.999};
    struct context context = {0};
    for (size_t b = 0; b < COUNT(betas); b++) {
        struct optimizer o = optimizer_default();
        o.beta2 = betas[b];
        int steps = (int)ceil(8 / (1 - betas[b]));
        floatX *values = must_alloc(ELEMENTS * sizeof *values), *g = must_alloc(ELEMENTS * sizeof *g);
        uint16_t *m = must_alloc(ELEMENTS * 2), *v = must_alloc(ELEMENTS * 2);
        double exact = 1, bias = 0, variance = 0;
        for (int i = 0; i < ELEMENTS; i++) g[i] = (floatX)0.1, v[i] = bf16_from_float(1);
        for (int step = 0; step < steps; step++) {
            adamw_bf16(&context, &o, step, 1, false, values, g, m, v, ELEMENTS, 0, (uint64_t)step);
            exact = betas[b] * exact + (1 - betas[b]) * pow((double)g[0], 2);
        }
        for (int i = 0; i < ELEMENTS; i++) {
            double off = bf16_to_float(v[i]) / exact - 1;
            bias += off / ELEMENTS;
            variance += off * off / ELEMENTS;
        }
        if (fabs(bias) > 5 * DEVIATION / sqrt(ELEMENTS) || sqrt(variance) > 1.1 * DEVIATION)
            fail_msg("beta2 %g: off by %g on average, deviation %g", betas[b], bias, sqrt(variance));
        free(values), free(g), free(m), free(v);
    }
}

/* ---- parameters, data, safetensors ------------------------------------------------------------------- */

static bool keep_second_half(void *context, const struct parameter *p) {
    (void)context;
    return p->owner == OWNER_EXPERT && p->expert >= 3;
}

static void parameter_lists(void **state) {
    (void)state;
    struct arena *arena = arena_new();
    struct model model = small_model();
    model.attention.bias = model.attention.sinks = model.attention.qk_norm = model.moe.bias = true;
    model.moe.dense_layers = 1, model.moe.dense_hidden = 8, model.moe.shared_experts = 2;
    model.moe.router = ROUTER_NOISY_TOPK;
    struct parameters all = parameters_new(arena, &model, NULL, NULL);
    struct parameters part = parameters_new(arena, &model, keep_second_half, NULL);
    assert_true((double)all.total == model_parameter_count(&model).total);
    assert_int_equal(part.total, 3 * (size_t)model_expert_parameters(&model));
    floatX *a = must_alloc(all.total * sizeof *a), *b = must_alloc(part.total * sizeof *b);
    parameters_initialise(&all, a, 5);
    parameters_initialise(&part, b, 5);
    for (int i = 0; i < part.count; i++)
        assert_memory_equal(b + part.list[i].offset, tensor_at(&all, a, part.list[i].name),
                            part.list[i].count * sizeof *a);
    assert_null(ffn_tensors(&part, b, 1, 0).gate_up);
    assert_ptr_equal(ffn_tensors(&part, b, 1, 4).down,
                     tensor_at(&part, b, "model.layers.1.mlp.experts.4.down_proj.weight"));
    assert_ptr_equal(attention_tensors(&all, a, 1).router,
                     tensor_at(&all, a, "model.layers.1.mlp.gate.weight"));
    free(a), free(b);
    arena_free(arena);
}

static void markov_entropy(void **state) {
    (void)state;
    enum { LENGTH = 200, MANY = 2000, STATES = 7 };
    struct data *data = data_markov(STATES, LENGTH, 3);
    static int tokens[LENGTH + 1], again[LENGTH + 1];
    double pairs[STATES][STATES] = {{0}}, from[STATES] = {0}, entropy = 0;
    for (int s = 0; s < MANY; s++) {
        data_sequence(data, 1, 2, s, tokens);
        for (int i = 0; i < LENGTH; i++) pairs[tokens[i]][tokens[i + 1]]++, from[tokens[i]]++;
    }
    for (int i = 0; i < STATES; i++)
        for (int j = 0; j < STATES; j++)
            if (pairs[i][j] > 0) entropy -= pairs[i][j] / (MANY * LENGTH) * log(pairs[i][j] / from[i]);
    assert_true(fabs(entropy - data_entropy(data)) < 0.005);
    data_sequence(data, 1, 2, MANY - 1, again);
    assert_memory_equal(tokens, again, sizeof tokens);
    data_sequence(data, 1, 3, MANY - 1, again);
    assert_memory_not_equal(tokens, again, sizeof tokens);
    data_free(data);
}

static const char *temporary(const void *bytes, size_t length) {
    static char name[] = "/tmp/test_layers_XXXXXX";
    strcpy(name + strlen(name) - 6, "XXXXXX");
    int descriptor = mkstemp(name);
    assert_true(descriptor >= 0 && write(descriptor, bytes, length) == (ssize_t)length);
    close(descriptor);
    return name;
}

static void text_errors(void **state) {
    (void)state;
    const struct {
        const char *text;
        size_t length;
        const char *message;
    } cases[] = {{"", 0, "is empty"}, {"abc", 3, "too short"}, {"abcdef\xc8ghi", 10, "byte 6 is 200"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct errors errors = {0};
        const char *file = temporary(cases[i].text, cases[i].length);
        assert_null(data_open_text(file, 5, 128, &errors));
        assert_int_equal(errors.count, 1);
        assert_non_null(strstr(errors.messages[0], cases[i].message));
        errors_free(&errors);
        unlink(file);
    }
    struct errors errors = {0};
    assert_null(data_open_text("/nonexistent", 5, 128, &errors));
    errors_free(&errors);
    const char *file = temporary("abcdefgh", 8);
    /* what never ends, and what is too long: a hole of 2 GiB */
    char pipe[64];
    snprintf(pipe, sizeof pipe, "%s.pipe", file);
    assert_int_equal(mkfifo(pipe, 0600), 0);
    const char *const others[][2] = {
        {"/dev/zero", "a device"}, {"/dev", "a folder"}, {pipe, "a pipe"}, {file, "GB"}};
    assert_int_equal(truncate(file, 2LL << 30), 0);
    for (size_t i = 0; i < COUNT(others); i++) {
        assert_null(data_open_text(others[i][0], 5, 128, &errors));
        assert_int_equal(errors.count, 1);
        assert_non_null(strstr(errors.messages[0], others[i][1]));
        errors_free(&errors);
    }
    unlink(pipe);
    assert_int_equal(truncate(file, 8), 0);
    struct data *data = data_open_text(file, 5, 128, &errors);
    int tokens[6];
    for (int s = 0; s < 50; s++) {
        data_sequence(data, 1, 0, s, tokens);
        for (int i = 0; i < 6; i++) assert_int_equal(tokens[i], tokens[0] + i);
        assert_in_range(tokens[0], 'a', 'c');
    }
    data_free(data);
    unlink(file);
}

/* A file with this header and so many bytes of data. */
static struct safetensors *open_header(const char *header, size_t data_bytes, struct errors *errors) {
    size_t length = strlen(header);
    unsigned char *bytes = must_alloc(8 + length + data_bytes + 1);
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(length >> 8 * i);
    memcpy(bytes + 8, header, length);
    const char *file = temporary(bytes, 8 + length + data_bytes);
    struct safetensors *opened = safetensors_open(file, errors);
    unlink(file);
    free(bytes);
    return opened;
}

static void damaged_safetensors(void **state) {
    (void)state;
    static const char *const headers[] = {
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,25]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,4],\"data_offsets\":[0,32]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-2,-3],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[24,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[1e300,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0.5,24.5]}}",
        "{\"a\":{\"dtype\":1,\"shape\":[2,3],\"data_offsets\":[0,24]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":{},\"data_offsets\":[0,24]}}",
        "{\"a\":7}",
        "[1,2]",
        "{\"a\":",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
    };
    for (size_t i = 0; i < COUNT(headers); i++) {
        struct errors errors = {0};
        if (open_header(headers[i], 24, &errors)) fail_msg("accepted %s", headers[i]);
        assert_true(errors.count > 0);
        errors_free(&errors);
    }
    struct errors errors = {0};
    struct safetensors *good =
        open_header("{\"__metadata__\":{},\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}",
                    24, &errors);
    assert_non_null(good);
    assert_int_equal(safetensors_find(good, "a")->count, 6);
    assert_null(safetensors_find(good, "b"));
    safetensors_close(good);
    const unsigned char huge[9] = {255, 255, 255, 255, 255, 255, 255, 127, '{'};
    const char *file = temporary(huge, sizeof huge);
    assert_null(safetensors_open(file, &errors));
    unlink(file);
    file = temporary("", 0);
    assert_null(safetensors_open(file, &errors));
    unlink(file);
    assert_null(safetensors_open("/nonexistent", &errors));
    assert_null(safetensors_open("/tmp", &errors));
    errors_free(&errors);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grouped_products),
        cmocka_unit_test(tiled_attention),
        cmocka_unit_test(extreme_scores),
        cmocka_unit_test(capacity),
        cmocka_unit_test(capacity_as_planned),
        cmocka_unit_test(auxiliary_losses),
        cmocka_unit_test(damaged_logits),
        cmocka_unit_test(forced_shares),
        cmocka_unit_test(noise_by_token),
        cmocka_unit_test(routes_of_pieces),
        cmocka_unit_test(activations),
        cmocka_unit_test(head_in_chunks),
        cmocka_unit_test(blocks_equal_reference),
        cmocka_unit_test(kept_bytes_are_as_modelled),
        cmocka_unit_test(optimizer),
        cmocka_unit_test(bf16_sums_of_many),
        cmocka_unit_test(bf16_rounding_is_fair),
        cmocka_unit_test(bf16_sums_by_threads),
        cmocka_unit_test(bf16_moments_decay),
        cmocka_unit_test(parameter_lists),
        cmocka_unit_test(markov_entropy),
        cmocka_unit_test(text_errors),
        cmocka_unit_test(damaged_safetensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
