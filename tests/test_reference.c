/*
The single-process reference: its gradients against finite differences.

Finite differences need double precision (in float a step large enough to measure flips experts), so the float
build skips them and relies on golden values.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "train/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double STEP = 1e-5, TOLERANCE = 1e-7;

static struct model tiny_qwen3(void) {
    struct model model = {.name = "qwen3", .layers = 2, .hidden = 12, .vocab = 17, .norm_eps = 1e-6};
    model.attention.heads = 4;
    model.attention.kv_heads = 2;
    model.attention.head_dim = 6;
    model.attention.rope_theta = 1e4;
    model.attention.qk_norm = true;
    model.moe.experts = 5;
    model.moe.top_k = 2;
    model.moe.expert_hidden = 7;
    model.moe.router = ROUTER_SOFTMAX_TOPK;
    model.moe.renormalise = true;
    model.moe.aux_loss = 0.01;
    model.moe.z_loss = 0.001;
    return model;
}

static struct model tiny_gptoss(void) {
    struct model model = tiny_qwen3();
    model.name = "gptoss";
    model.attention.qk_norm = false;
    model.attention.bias = true;
    model.attention.sinks = true;
    model.attention.window = 3;
    model.attention.window_layers = WINDOW_EVEN;
    model.moe.router = ROUTER_TOPK_SOFTMAX;
    model.moe.activation = ACTIVATION_SWIGLU_CLAMPED;
    model.moe.bias = true;
    return model;
}

static struct model tiny_deepseek(void) {
    struct model model = tiny_qwen3();
    model.name = "deepseek";
    model.layers = 3;
    model.attention.qk_norm = false;
    model.attention.kv_heads = 4;
    model.moe.renormalise = false;
    model.moe.shared_experts = 2;
    model.moe.dense_layers = 1;
    model.moe.dense_hidden = 9;
    return model;
}

static struct model tiny_noisy(void) {
    struct model model = tiny_qwen3();
    model.name = "noisy, capacity, tied";
    model.moe.router = ROUTER_NOISY_TOPK;
    model.moe.capacity_factor = 0.8;
    model.tie_embeddings = true;
    return model;
}

/* Every tensor random, biases and norms too, and large enough that no path is negligible. */
static void randomise(struct reference *reference, double deviation) {
    struct rng rng = rng_seed(7);
    for (int i = 0; i < reference->parameters.count; i++) {
        const struct parameter *p = &reference->parameters.list[i];
        for (size_t e = 0; e < p->count; e++)
            reference->values[p->offset + e] = (floatX)(p->initial + deviation * rng_normal(&rng));
    }
}

static int *random_tokens(int sequences, int seq_len, int vocab) {
    struct rng rng = rng_seed(3);
    int *tokens = must_alloc((size_t)sequences * (seq_len + 1) * sizeof *tokens);
    for (int i = 0; i < sequences * (seq_len + 1); i++) tokens[i] = rng_below(&rng, vocab);
    return tokens;
}

enum { SEQUENCES = 3, SEQ_LEN = 7, PROBES = 6 };

/* A few elements of every tensor: central difference against the gradient. */
static void check_finite_differences(struct model model) {
    struct reference *reference = reference_new(&model, SEQ_LEN, 2, 2, 1);
    int *tokens = random_tokens(SEQUENCES, SEQ_LEN, model.vocab);
    struct batch batch = {tokens, SEQUENCES, 11, 5};
    randomise(reference, 0.3);
    reference_gradients(reference, &batch);
    struct rng rng = rng_seed(9);
    for (int i = 0; i < reference->parameters.count; i++) {
        const struct parameter *p = &reference->parameters.list[i];
        double most = 0, worst = 0;
        for (int probe = 0; probe < PROBES; probe++) {
            size_t at = p->offset + (size_t)rng_below(&rng, (int)p->count);
            floatX value = reference->values[at];
            reference->values[at] = value + (floatX)STEP;
            double up = reference_losses(reference, &batch, NULL).total;
            reference->values[at] = value - (floatX)STEP;
            double down = reference_losses(reference, &batch, NULL).total;
            reference->values[at] = value;
            double expected = (up - down) / (2 * STEP), found = reference->gradients[at];
            most = fmax(most, fabs(expected));
            worst = fmax(worst, fabs(expected - found));
        }
        if (worst > TOLERANCE * fmax(most, 0.01))
            fail_msg("%s: %s: off by %g of %g", model.name, p->name, worst, most);
    }
    free(tokens);
    reference_free(reference);
}

static void finite_differences(void **state) {
    (void)state;
    if (sizeof(floatX) < sizeof(double)) skip();
    check_finite_differences(tiny_qwen3());
    check_finite_differences(tiny_gptoss());
    check_finite_differences(tiny_deepseek());
    check_finite_differences(tiny_noisy());
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(finite_differences)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
