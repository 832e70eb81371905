/*
The single-process reference: its gradients against finite differences; loss, logits and gradients against
golden values of HuggingFace transformers and PyTorch (tests/golden/make_golden.py); independence of how a
batch is cut and of the number of threads; training steps.

Finite differences need double precision (in float a step large enough to measure flips experts), so the float
build skips them and relies on golden values.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "layers/layers.h"
#include "state/safetensors.h"
#include "state/state.h"
#include "train/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    model.layers = 3;
    model.moe.dense_layers = 1;
    model.moe.dense_hidden = 9;
    model.moe.shared_experts = 1;
    model.moe.activation = ACTIVATION_SWIGLU_CLAMPED;
    model.moe.bias = true;
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

/* A few elements of every tensor: central difference against the gradient. share (E) of a forced choice, or
   NULL. */
static void check_finite_differences(struct model model, const double *share) {
    struct reference *reference = reference_new(&model, SEQ_LEN, 2, 2, 1);
    struct arena *arena = arena_new();
    if (share) reference->forced = forced_routing_new(arena, &model, share, SEQ_LEN);
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
    arena_free(arena);
    reference_free(reference);
}

static bool under_valgrind(void) {
    const char *mode = getenv("DISAGMOE_MODE");
    return mode && strcmp(mode, "valgrind") == 0;
}

static void finite_differences(void **state) {
    (void)state;
    if (sizeof(floatX) < sizeof(double)) {
        print_message("skip: finite differences need float64, which the double build has\n");
        skip();
    }
    const struct model models[] = {tiny_qwen3(), tiny_gptoss(), tiny_deepseek(), tiny_noisy()};
    const double share[] = {0.1, 0.5, 0, 0.2, 0.2}; /* some tokens, every token, none */
    for (size_t i = 0; i < COUNT(models); i++) {
        check_finite_differences(models[i], NULL);
        if (!under_valgrind()) check_finite_differences(models[i], share); /* minutes there */
    }
}

/* ---- golden values ----------------------------------------------------------------------------------- */

#ifdef FLOATX_DOUBLE
static const double LOGIT_TOLERANCE = 1e-12, GRADIENT_TOLERANCE = 1e-12;
#else
static const double LOGIT_TOLERANCE = 1e-5, GRADIENT_TOLERANCE = 1e-4;
#endif

struct golden {
    struct arena *arena;
    struct errors errors;
    struct model model;
    struct safetensors *expected;
    struct reference *reference;
    int *tokens;
    struct batch batch;
};

static void stop_on_errors(const struct errors *errors) {
    errors_print(errors, stderr);
    assert_int_equal(errors->count, 0);
}

static const struct stored_tensor *expected_tensor(const struct golden *golden, const char *name) {
    const struct stored_tensor *tensor = safetensors_find(golden->expected, name);
    if (!tensor) fail_msg("%s: no tensor %s", golden->expected->file, name);
    return tensor;
}

static floatX expected_value(const struct golden *golden, const char *name) {
    floatX value;
    stored_tensor_copy(expected_tensor(golden, name), 0, 0, 1, 1, 1, &value);
    return value;
}

static void read_golden_tokens(struct golden *golden) {
    const struct stored_tensor *tokens = safetensors_find(golden->expected, "tokens");
    floatX *values = must_alloc((size_t)tokens->count * sizeof *values);
    stored_tensor_copy(tokens, 0, 0, 1, 1, (int)tokens->count, values);
    golden->tokens = must_alloc((size_t)tokens->count * sizeof *golden->tokens);
    for (int64_t i = 0; i < tokens->count; i++) golden->tokens[i] = (int)values[i];
    golden->batch = (struct batch){golden->tokens, (int)tokens->shape[0], 1, 0};
    free(values);
}

/* Into a structure that stays where it is: the reference points to its model. */
static void golden_open(struct golden *golden, const char *name) {
    *golden = (struct golden){.arena = arena_new()};
    const char *folder = arena_printf(golden->arena, "tests/golden/%s", name);
    const char *weights = arena_printf(golden->arena, "%s/model.safetensors", folder);
    if (access(weights, F_OK)) weights = arena_printf(golden->arena, "%s.index.json", weights);
    struct json config =
        json_read_file(arena_printf(golden->arena, "%s/config.json", folder), golden->arena, &golden->errors);
    if (config.node) model_import(config, &golden->model);
    stop_on_errors(&golden->errors);
    cJSON_Delete(config.node);
    golden->model.moe.aux_loss =
        0.01; /* import scales it by each family's own definition; the script uses one */
    golden->expected =
        safetensors_open(arena_printf(golden->arena, "%s/expected.safetensors", folder), &golden->errors);
    stop_on_errors(&golden->errors);
    int64_t seq_len = expected_tensor(golden, "tokens")->shape[1] - 1;
    golden->reference = reference_new(&golden->model, (int)seq_len, 2, 1, 1);
    parameters_import(&golden->reference->parameters, golden->reference->values, &weights, 1,
                      &golden->errors);
    stop_on_errors(&golden->errors);
    read_golden_tokens(golden);
}

static void golden_close(struct golden *golden) {
    reference_free(golden->reference);
    safetensors_close(golden->expected);
    errors_free(&golden->errors);
    arena_free(golden->arena);
    free(golden->tokens);
}

/* max |found − expected| of a tensor ÷ max(max |expected|, floor) */
static double difference(const struct golden *golden, const char *name, const floatX *found, int rows,
                         int columns, double floor) {
    const struct stored_tensor *tensor = expected_tensor(golden, name);
    assert_int_equal(tensor->count, (int64_t)rows * columns);
    floatX *expected = must_alloc((size_t)rows * columns * sizeof *expected);
    stored_tensor_copy(tensor, 0, columns, 1, rows, columns, expected);
    double most = floor, worst = 0;
    for (size_t i = 0; i < (size_t)rows * columns; i++) {
        most = fmax(most, fabs((double)expected[i]));
        worst = fmax(worst, fabs((double)expected[i] - found[i]));
    }
    free(expected);
    return worst / most;
}

static void check_golden(const char *name) {
    struct golden golden;
    golden_open(&golden, name);
    struct reference *reference = golden.reference;
    int tokens = golden.batch.sequences * reference->seq_len, vocab = golden.model.vocab;
    floatX *logits = must_alloc((size_t)tokens * vocab * sizeof *logits);
    reference_losses(reference, &golden.batch, logits);
    double logit = difference(&golden, "logits", logits, tokens, vocab, 1), gradient = 0;
    struct step_losses losses = reference_gradients(reference, &golden.batch);
    const char *worst = "";
    for (int i = 0; i < reference->parameters.count; i++) {
        const struct parameter *p = &reference->parameters.list[i];
        double off = difference(&golden, arena_printf(golden.arena, "grad.%s", p->name),
                                reference->gradients + p->offset, p->rows, p->columns, 1e-3);
        if (off > gradient) worst = p->name;
        gradient = fmax(gradient, off);
    }
    print_message("%s: logits %.1e, gradients %.1e (%s)\n", name, logit, gradient, worst);
    assert_true(logit < LOGIT_TOLERANCE);
    assert_true(gradient < GRADIENT_TOLERANCE);
    assert_true(fabs(losses.total - expected_value(&golden, "loss")) < LOGIT_TOLERANCE);
    assert_true(fabs(losses.aux - expected_value(&golden, "aux")) < LOGIT_TOLERANCE);
    free(logits);
    golden_close(&golden);
}

static void golden_values(void **state) {
    (void)state;
    static const struct {
        const char *family;
        int cases;
    } families[] = {{"qwen3", 4}, {"gptoss", 4}, {"deepseek", 3}, {"mixtral", 2}};
    for (size_t i = 0; i < COUNT(families); i++)
        for (int number = 1; number <= families[i].cases; number++) {
            char name[32];
            snprintf(name, sizeof name, "%s-%d", families[i].family, number);
            check_golden(name);
        }
}

/* ---- whole steps ------------------------------------------------------------------------------------- */

/* The same batch worked through 1, 2 or 3 sequences at a time, on 1 or 3 threads. */
static void cut_does_not_matter(void **state) {
    (void)state;
    struct model models[] = {tiny_qwen3(), tiny_gptoss(), tiny_deepseek(), tiny_noisy()};
    const double tolerance = sizeof(floatX) == 8 ? 1e-12 : 1e-4;
    for (size_t m = 0; m < COUNT(models); m++) {
        struct reference *whole = reference_new(&models[m], SEQ_LEN, SEQUENCES, 1, 1);
        int *tokens = random_tokens(SEQUENCES, SEQ_LEN, models[m].vocab);
        struct batch batch = {tokens, SEQUENCES, 11, 5};
        randomise(whole, 0.3);
        double loss = reference_gradients(whole, &batch).total;
        for (int at_once = 1; at_once < SEQUENCES; at_once++) {
            struct reference *cut = reference_new(&models[m], SEQ_LEN, at_once, 3, 1);
            randomise(cut, 0.3);
            assert_true(fabs(reference_gradients(cut, &batch).total - loss) < tolerance * loss);
            for (size_t i = 0; i < whole->parameters.total; i++)
                assert_true(fabs((double)whole->gradients[i] - cut->gradients[i]) < tolerance);
            reference_free(cut);
        }
        free(tokens);
        reference_free(whole);
    }
}

/* One expert takes every token, the others none: empty products everywhere. */
static void one_expert_takes_all(void **state) {
    (void)state;
    struct model model = tiny_gptoss();
    model.moe.top_k = 1;
    struct reference *reference = reference_new(&model, SEQ_LEN, SEQUENCES, 2, 1);
    int *tokens = random_tokens(SEQUENCES, SEQ_LEN, model.vocab);
    struct batch batch = {tokens, SEQUENCES, 11, 5};
    randomise(reference, 0.3);
    for (int layer = 0; layer < model.layers; layer++)
        attention_tensors(&reference->parameters, reference->values, layer).router_bias[3] = 100;
    struct step_losses losses = reference_gradients(reference, &batch);
    assert_true(isfinite(losses.total) && fabs(losses.imbalance - model.moe.experts) < 1e-9);
    struct ffn_tensors idle = ffn_tensors(&reference->parameters, reference->gradients, 0, 0);
    for (int i = 0; i < model.hidden; i++) assert_true(idle.down_bias[i] == 0);
    free(tokens);
    reference_free(reference);
}

static void nan_changes_nothing(void **state) {
    (void)state;
    struct model model = tiny_qwen3();
    struct reference *reference = reference_new(&model, SEQ_LEN, SEQUENCES, 1, 1);
    int *tokens = random_tokens(SEQUENCES, SEQ_LEN, model.vocab);
    struct batch batch = {tokens, SEQUENCES, 1, 0};
    struct optimizer optimizer = optimizer_default();
    reference->values[tokens[2] * model.hidden] = (floatX)NAN;
    floatX before = reference->values[reference->parameters.total - 1];
    assert_true(isnan(reference_step(reference, &batch, &optimizer, NULL).total));
    assert_true(reference->values[reference->parameters.total - 1] == before);
    free(tokens);
    reference_free(reference);
}

/* 300 steps come within 3 % of the entropy of the source. */
static void learns_the_chain(void **state) {
    (void)state;
    if (under_valgrind()) {
        print_message(
            "skip: 300 steps take minutes under valgrind; the plain and the sanitized run have them\n");
        skip();
    }
    enum { BATCH = 16, LENGTH = 32, STEPS = 300 };
    struct model model = tiny_qwen3();
    model.layers = 1;
    model.hidden = 32;
    model.vocab = 8;
    model.moe.expert_hidden = 16;
    struct data *data = data_markov(model.vocab, LENGTH, 2);
    struct reference *reference = reference_new(&model, LENGTH, BATCH, 2, 1);
    struct optimizer optimizer = optimizer_default();
    optimizer.learning_rate = 1e-2;
    optimizer.steps = STEPS;
    static int tokens[BATCH][LENGTH + 1];
    double first = 0, last = 0, norm;
    for (int step = 0; step < STEPS; step++) {
        for (int s = 0; s < BATCH; s++) data_sequence(data, 1, step, s, tokens[s]);
        struct batch batch = {tokens[0], BATCH, 1, step};
        double loss = reference_step(reference, &batch, &optimizer, &norm).cross_entropy;
        if (step == 0) first = loss;
        if (step >= STEPS - 50) last += loss / 50;
    }
    print_message("loss %.4f, then %.4f; entropy %.4f nats\n", first, last, data_entropy(data));
    assert_true(last < 1.03 * data_entropy(data) && last > 0.97 * data_entropy(data));
    reference_free(reference);
    data_free(data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finite_differences),  cmocka_unit_test(golden_values),
        cmocka_unit_test(cut_does_not_matter), cmocka_unit_test(one_expert_takes_all),
        cmocka_unit_test(nan_changes_nothing), cmocka_unit_test(learns_the_chain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
