/*
Tests of core/model: manifests and what is wrong with them, accounting against loops that count one thing at a
time, the sizes that the models' makers publish, and imports of their configurations.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "model/model.h"
#include "tests/cases.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct bench {
    struct arena *arena;
    struct errors errors;
};

static int set_up(void **state) {
    struct bench *bench = must_alloc(sizeof *bench);
    bench->arena = arena_new();
    *state = bench;
    return 0;
}

static int tear_down(void **state) {
    struct bench *bench = *state;
    errors_free(&bench->errors);
    arena_free(bench->arena);
    free(bench);
    return 0;
}

static void assert_errors(struct bench *bench, int count, const char *const *messages) {
    for (int i = 0; i < count && i < bench->errors.count; i++)
        assert_string_equal(bench->errors.messages[i], messages[i]);
    assert_int_equal(bench->errors.count, count);
    errors_free(&bench->errors);
}

#define ASSERT_ERRORS(bench, ...)                                                                            \
    do {                                                                                                     \
        const char *const messages_[] = {__VA_ARGS__};                                                       \
        assert_errors(bench, COUNT(messages_), messages_);                                                   \
    } while (0)

static void assert_close(double found, double expected, double relative) {
    if (fabs(found - expected) > relative * fabs(expected))
        fail_msg("%.17g is not within %g of %.17g", found, relative, expected);
}

static struct model load(struct bench *bench, const char *file) {
    struct model model;
    struct json document = json_read_file(file, bench->arena, &bench->errors);
    assert_non_null(document.node);
    assert_true(model_read(document, &model));
    assert_int_equal(bench->errors.count, 0);
    cJSON_Delete(document.node);
    return model;
}

static struct model released(struct bench *bench, const char *name) {
    return load(bench, arena_printf(bench->arena, "experiments/models/%s-released.json", name));
}

/* ---- manifests --------------------------------------------------------------------------------------- */

static const char *const NAMES[] = {"deepseek-moe-16b", "gpt-oss-120b", "qwen3-235b"};

#define SMALL                                                                                                \
    "\"name\": \"m\", \"layers\": 2, \"hidden\": 8, \"vocab\": 16,"                                          \
    "\"attention\": {\"heads\": 4, \"kv_heads\": 2, \"head_dim\": 2},"                                       \
    "\"moe\": {\"experts\": 4, \"top_k\": 2, \"expert_hidden\": 6}"

static bool read_text(struct bench *bench, const char *text, struct model *model) {
    struct json document = json_read_text(text, strlen(text), "m.json", bench->arena, &bench->errors);
    if (!document.node) return false;
    bool sound = model_read(document, model);
    cJSON_Delete(document.node);
    return sound;
}

static void left_out_means_plain(void **state) {
    struct bench *bench = *state;
    struct model model;
    assert_true(read_text(bench, "{" SMALL "}", &model));
    assert_true(model.norm_eps == 1e-6 && model.attention.rope_theta == 10000 && !model.tie_embeddings);
    assert_true(!model.attention.qk_norm && !model.attention.bias && !model.attention.sinks);
    assert_true(!model.attention.window && model.attention.window_layers == WINDOW_NONE);
    assert_true(!model.moe.shared_experts && !model.moe.dense_layers &&
                model.moe.router == ROUTER_SOFTMAX_TOPK);
    assert_true(!model.moe.renormalise && model.moe.aux_loss == 0 && model.moe.capacity_factor == 0);
    assert_string_equal(model.source, "");
}

static void all_that_is_wrong_is_told_at_once(void **state) {
    struct bench *bench = *state;
    struct model model;
    assert_false(
        read_text(bench,
                  "{\"name\": 1, \"layers\": 0, \"hiden\": 8, \"vocab\": 1.5,"
                  "\"attention\": {\"heads\": 4, \"kv_heads\": 3, \"head_dim\": 3, \"window\": 2},"
                  "\"moe\": {\"experts\": 4, \"top_k\": 5, \"expert_hidden\": 6, \"dense_layers\": 1,"
                  " \"router\": \"softmax\", \"aux_loss\": -1, \"gate\": 1}}",
                  &model));
    ASSERT_ERRORS(bench, "m.json: name: found 1; allowed: a text",
                  "m.json: layers: found 0; allowed: a whole number from 1 to 10000",
                  "m.json: hiden: unknown key; did you mean \"hidden\"?",
                  "m.json: vocab: found 1.5; allowed: a whole number from 1 to 268435456",
                  "m.json: hidden: the key is missing; allowed: a whole number from 1 to 16777216",
                  "m.json: moe.router: found \"softmax\"; allowed: \"softmax_topk\", \"topk_softmax\" or "
                  "\"noisy_topk\"",
                  "m.json: moe.aux_loss: found -1; allowed: a number from 0 to 1000000",
                  "m.json: moe.gate: unknown key; allowed: experts, top_k, expert_hidden, shared_experts, "
                  "dense_layers, "
                  "dense_hidden, router, renormalise, aux_loss, z_loss, capacity_factor, activation, bias",
                  "m.json: attention.kv_heads: found 3; allowed: a divisor of heads, which is 4",
                  "m.json: attention.head_dim: found 3; allowed: an even number, since RoPE turns pairs",
                  "m.json: attention.window_layers: found \"none\"; allowed with window 2: \"all\", \"even\" "
                  "or \"odd\"",
                  "m.json: moe.top_k: found 5; allowed: at most experts, which is 4",
                  "m.json: moe.dense_hidden: found 0; allowed with dense_layers: at least 1");
}

/* The least and the most of each number, and what is beyond. */
static void limits_are_told(void **state) {
    struct bench *bench = *state;
    static const struct {
        const char *path;
        double inside, outside;
        const char *allowed;
    } cases[] = {
        {"norm_eps", 1, 1.5, "a number from 0 to 1"},
        {"layers", 10000, 10001, "a whole number from 1 to 10000"},
        {"attention.rope_theta", 1e15, 1e16, "a number from 1 to 1e+15"},
        {"attention.rope_theta", 1, 0.5, "a number from 1 to 1e+15"},
        {"moe.shared_experts", 1024, 1025, "a whole number from 0 to 1024"},
        {"moe.aux_loss", 1e6, 2e6, "a number from 0 to 1000000"},
        {"moe.z_loss", 1e6, 2e6, "a number from 0 to 1000000"},
        {"moe.capacity_factor", 1e6, -1, "a number from 0 to 1000000"},
        {"vocab", 1 << 28, 0, "a whole number from 1 to 268435456"},
        {"hidden", 1 << 24, (1 << 24) + 1, "a whole number from 1 to 16777216"},
        {"moe.top_k", 1, 0, "a whole number from 1 to 16777216"},
        {"moe.experts", 2, 0, "a whole number from 1 to 16777216"},
        {"attention.head_dim", 2, 1, "a whole number from 2 to 16777216"},
        {"attention.kv_heads", 1, 0, "a whole number from 1 to 16777216"},
        {"moe.expert_hidden", 1, 0, "a whole number from 1 to 16777216"},
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int beyond = 0; beyond < 2; beyond++) {
            double number = beyond ? cases[i].outside : cases[i].inside;
            struct json document =
                json_read_text("{" SMALL "}", strlen("{" SMALL "}"), "m.json", bench->arena, &bench->errors);
            assert_true(json_set_path(document.node, cases[i].path, cJSON_CreateNumber(number)));
            struct model model;
            assert_true(model_read(document, &model) != beyond);
            cJSON_Delete(document.node);
            if (!beyond) continue;
            if (strncmp(bench->errors.messages[0], "m.json: ", 8) != 0 ||
                !strstr(bench->errors.messages[0], cases[i].path) ||
                !strstr(bench->errors.messages[0], cases[i].allowed))
                fail_msg("%s", bench->errors.messages[0]);
            errors_free(&bench->errors);
        }
}

static void the_same_error_fails_twice(void **state) {
    struct bench *bench = *state;
    struct model model;
    const char *text = "{\"name\": \"m\", \"layers\": 2, \"hidden\": 8, \"vocab\": 16,"
                       "\"attention\": {\"heads\": 4, \"kv_heads\": 3, \"head_dim\": 2},"
                       "\"moe\": {\"experts\": 4, \"top_k\": 2, \"expert_hidden\": 6, \"dense_layers\": 3,"
                       " \"dense_hidden\": 4}}";
    assert_false(read_text(bench, text, &model));
    assert_false(read_text(bench, text, &model));
    assert_int_equal(bench->errors.count, 2);
}

static void parts_must_be_objects(void **state) {
    struct bench *bench = *state;
    struct model model;
    assert_false(read_text(bench, "[]", &model));
    ASSERT_ERRORS(bench, "m.json: found []; allowed: an object");
    assert_false(read_text(
        bench, "{\"name\": \"m\", \"layers\": 2, \"hidden\": 8, \"vocab\": 16, \"attention\": 3}", &model));
    ASSERT_ERRORS(bench, "m.json: moe: the key is missing; allowed: a value",
                  "m.json: attention: found 3; allowed: an object");
}

static char *print(const struct model *model) {
    cJSON *tree = model_write(model);
    char *text = cJSON_Print(tree);
    cJSON_Delete(tree);
    return text;
}

static void written_models_read_back(void **state) {
    struct bench *bench = *state;
    for (size_t i = 0; i < COUNT(NAMES); i++) {
        struct model model = released(bench, NAMES[i]), again;
        char *first = print(&model);
        assert_true(read_text(bench, first, &again));
        char *second = print(&again);
        assert_string_equal(first, second);
        free(first);
        free(second);
        cJSON *tree = model_write(&model); /* and without printing */
        struct json value = {tree, "m.json", "", bench->arena, &bench->errors};
        assert_true(model_read(value, &again));
        cJSON_Delete(tree);
    }
}

/* A small model with everything on. */
static struct model everything(void) {
    return (struct model){
        .name = "everything",
        .source = "",
        .layers = 3,
        .hidden = 10,
        .vocab = 100,
        .norm_eps = 1e-6,
        .attention = {.heads = 4,
                      .kv_heads = 2,
                      .head_dim = 6,
                      .rope_theta = 1e4,
                      .qk_norm = true,
                      .bias = true,
                      .sinks = true,
                      .window = 5,
                      .window_layers = WINDOW_ODD},
        .moe = {.experts = 8,
                .top_k = 3,
                .expert_hidden = 7,
                .shared_experts = 2,
                .dense_layers = 1,
                .dense_hidden = 20,
                .bias = true},
    };
}

/* Every key, none of which has its default. */
static void nothing_is_lost_in_writing(void **state) {
    struct bench *bench = *state;
    struct model model = everything(), again;
    model.source = "a source";
    model.dtype = DTYPE_FP32;
    model.norm_eps = 3e-5;
    model.tie_embeddings = true;
    model.attention.rope_theta = 12345;
    model.moe.router = ROUTER_NOISY_TOPK;
    model.moe.renormalise = true;
    model.moe.aux_loss = 0.25;
    model.moe.z_loss = 0.125;
    model.moe.capacity_factor = 1.5;
    model.moe.activation = ACTIVATION_SWIGLU_CLAMPED;
    char *text = print(&model);
    assert_true(read_text(bench, text, &again));
    free(text);
    assert_string_equal(again.name, model.name);
    assert_string_equal(again.source, model.source);
    assert_true(again.dtype == model.dtype && again.layers == 3 && again.hidden == 10 && again.vocab == 100);
    assert_true(again.norm_eps == 3e-5 && again.tie_embeddings);
    assert_true(again.attention.heads == 4 && again.attention.kv_heads == 2 && again.attention.head_dim == 6);
    assert_true(again.attention.rope_theta == 12345 && again.attention.qk_norm && again.attention.bias);
    assert_true(again.attention.sinks && again.attention.window == 5);
    assert_int_equal(again.attention.window_layers, WINDOW_ODD);
    assert_true(again.moe.experts == 8 && again.moe.top_k == 3 && again.moe.expert_hidden == 7);
    assert_true(again.moe.shared_experts == 2 && again.moe.dense_layers == 1 && again.moe.dense_hidden == 20);
    assert_true(again.moe.router == ROUTER_NOISY_TOPK && again.moe.renormalise && again.moe.bias);
    assert_true(again.moe.aux_loss == 0.25 && again.moe.z_loss == 0.125 && again.moe.capacity_factor == 1.5);
    assert_int_equal(again.moe.activation, ACTIVATION_SWIGLU_CLAMPED);
}

/* The paper's table 1, and nothing beside it. */
static void paper_models_are_the_table(void **state) {
    struct bench *bench = *state;
    static const struct {
        int layers, experts, top_k, hidden, expert_hidden, heads, kv_heads, head_dim, vocab;
    } table[] = {{28, 64, 4, 2048, 1408, 16, 16, 128, 102400},
                 {36, 128, 4, 2880, 2880, 64, 8, 64, 201088},
                 {94, 128, 8, 4096, 1536, 64, 4, 128, 151936}};
    for (size_t i = 0; i < COUNT(NAMES); i++) {
        struct model m =
            load(bench, arena_printf(bench->arena, "experiments/models/%s-paper.json", NAMES[i]));
        assert_true(m.layers == table[i].layers && m.hidden == table[i].hidden && m.vocab == table[i].vocab);
        assert_true(m.moe.experts == table[i].experts && m.moe.top_k == table[i].top_k);
        assert_true(m.moe.expert_hidden == table[i].expert_hidden);
        assert_true(m.attention.heads == table[i].heads && m.attention.kv_heads == table[i].kv_heads);
        assert_true(m.attention.head_dim == table[i].head_dim);
        assert_true(!m.attention.qk_norm && !m.attention.bias && !m.attention.sinks && !m.attention.window);
        assert_true(!m.moe.shared_experts && !m.moe.dense_layers && !m.moe.bias && !m.tie_embeddings);
        assert_true(strlen(m.source) > 0);
    }
}

static void mutated_manifests_never_crash(void **state) {
    struct bench *bench = *state;
    struct model model = released(bench, "gpt-oss-120b");
    char *text = print(&model), buffer[2048];
    size_t whole = strlen(text);
    assert_true(whole < sizeof buffer);
    struct rng rng = rng_seed(7);
    static const char pieces[] = "{}[]\",:0129eE.-truefalsn ";
    for (int i = 0; i < sampled(20000); i++) {
        memcpy(buffer, text, whole + 1);
        for (int edits = rng_below(&rng, 4); edits >= 0; edits--)
            buffer[rng_below(&rng, (int)whole)] = pieces[rng_below(&rng, sizeof pieces - 1)];
        struct arena *arena = arena_new();
        struct json document = json_read_text(buffer, whole, "m.json", arena, &bench->errors);
        struct model mutated;
        if (document.node && model_read(document, &mutated)) {
            assert_true(model_parameter_count(&mutated).total > 0);
            assert_true(isfinite(model_step_flops(&mutated, 4096)));
        } else {
            assert_true(bench->errors.count > 0);
        }
        errors_free(&bench->errors);
        cJSON_Delete(document.node);
        arena_free(arena);
    }
    free(text);
}

/* ---- published sizes --------------------------------------------------------------------------------- */

static void sizes_are_as_published(void **state) {
    struct bench *bench = *state;
    struct model qwen = released(bench, "qwen3-235b"), gpt = released(bench, "gpt-oss-120b"),
                 deepseek = released(bench, "deepseek-moe-16b");
    struct parameter_count count = model_parameter_count(&qwen); /* Qwen3 report: 235B, 22B active */
    assert_close(count.total, 235e9, 0.01);
    assert_close(count.active, 22e9, 0.03);
    count = model_parameter_count(&gpt); /* GPT-OSS model card: 116.83B, 5.13B active */
    assert_close(count.total, 116.83e9, 0.0005);
    assert_close(count.active_without_input_embedding, 5.13e9, 0.002);
    count = model_parameter_count(&deepseek); /* DeepSeek-MoE paper: 16.4B, 2.8B active */
    assert_close(count.total, 16.4e9, 0.01);
    assert_close(count.active, 2.8e9, 0.03);
}

/* By hand from the matrices' shapes. */
static void parameters_by_hand(void **state) {
    (void)state;
    struct model m = everything();
    /* norm 10; q 240, k 120, v 120, o 240; biases 24 + 12 + 12 + 10; sinks 4; QK-norm 12 */
    assert_true(model_attention_parameters(&m) == 10 + 720 + 58 + 4 + 12);
    assert_true(model_router_parameters(&m, 0) == 10);
    assert_true(model_router_parameters(&m, 1) == 10 + 80 + 8);
    assert_true(model_expert_parameters(&m) == 210 + 24);
    assert_true(model_shared_parameters(&m, 0) == 600 + 50);
    assert_true(model_shared_parameters(&m, 1) == 3 * 10 * 14 + 2 * 14 + 10);
    assert_true(model_embedding_parameters(&m) == 1000 && model_head_parameters(&m) == 1010);
    struct parameter_count count = model_parameter_count(&m);
    double always = 2010 + 3 * 804 + 10 + 2 * 98 + 650 + 2 * 458;
    assert_true(count.total == always + 2 * 8 * 234);
    assert_true(count.active == always + 2 * 3 * 234);
    assert_true(count.active_without_input_embedding == count.active - 1000);
    m.tie_embeddings = true;
    assert_true(model_head_parameters(&m) == 10);
    assert_true(model_parameter_count(&m).total == count.total - 1000);
    assert_true(model_parameter_count(&m).active_without_input_embedding == count.active - 1000);
    m.moe.router = ROUTER_NOISY_TOPK;
    assert_true(model_router_parameters(&m, 1) == 10 + 2 * 88);
}

static void layers_have_their_kind_and_window(void **state) {
    (void)state;
    struct model m = everything();
    assert_true(!model_layer_is_moe(&m, 0) && model_layer_is_moe(&m, 1));
    assert_true(model_copies(&m, 0) == 1 && model_copies(&m, 1) == 3);
    static const int windows[][2] = {
        [WINDOW_NONE] = {0, 0}, [WINDOW_ALL] = {5, 5}, [WINDOW_EVEN] = {5, 0}, [WINDOW_ODD] = {0, 5}};
    for (int choice = WINDOW_NONE; choice <= WINDOW_ODD; choice++) {
        m.attention.window_layers = choice;
        for (int layer = 0; layer < 4; layer++)
            assert_int_equal(model_layer_window(&m, layer), windows[choice][layer % 2]);
    }
}

/* By whole numbers, with factors of two decimals; S where there is none, or more than S would fit. */
static void capacities_by_whole_numbers(void **state) {
    (void)state;
    struct model m = everything();
    struct rng rng = rng_seed(5);
    for (int i = 0; i < sampled(200000); i++) {
        long long percent = 1 + rng_below(&rng, 300), seq_len = 1 + rng_below(&rng, 32768);
        m.moe.experts = 1 + rng_below(&rng, 256);
        m.moe.top_k = 1 + rng_below(&rng, m.moe.experts);
        m.moe.capacity_factor = (double)percent / 100;
        long long parts = 100LL * m.moe.experts,
                  copies = (percent * seq_len * m.moe.top_k + parts - 1) / parts;
        int found = model_expert_capacity(&m, (int)seq_len);
        if (found != (copies < seq_len ? copies : seq_len))
            fail_msg("%lld %% of %lld tokens, top %d of %d: %d copies, expected %lld", percent, seq_len,
                     m.moe.top_k, m.moe.experts, found, copies);
    }
    m.moe.capacity_factor = 0;
    assert_int_equal(model_expert_capacity(&m, 77), 77);
    m.moe.capacity_factor = 1e6;
    assert_int_equal(model_expert_capacity(&m, INT_MAX), INT_MAX);
}

/* ---- work, counted by loops -------------------------------------------------------------------------- */

/* Keys that this query of the layer sees, itself included. */
static int keys_of(const struct model *m, int layer, int query) {
    int window = model_layer_window(m, layer), keys = 0;
    for (int key = 0; key <= query; key++) keys += !window || query - key < window;
    return keys;
}

/* Core attention of the GPU with most to do of a run of cp, which has pieces i and 2·cp − 1 − i of 2·cp. */
static double count_core_flops(const struct model *m, int layer, int seq_len, int cp) {
    double most = 0;
    int piece = seq_len / (2 * cp);
    for (int rank = 0; rank < cp; rank++) {
        double flops = 0;
        for (int query = 0; query < seq_len; query++) {
            bool here = cp == 1 || query / piece == rank || query / piece == 2 * cp - 1 - rank;
            /* a score and a weighted value */
            if (here) flops += keys_of(m, layer, query) * 2 * 2.0 * m->attention.head_dim;
        }
        most = fmax(most, flops * m->attention.heads);
    }
    return most;
}

/* One multiply-add an element of each matrix and token. */
static double count_dense_flops(const struct model *m, int layer) {
    double flops = 0;
    for (int head = 0; head < m->attention.heads; head++)
        flops += 2.0 * 2 * m->attention.head_dim * m->hidden;
    for (int head = 0; head < m->attention.kv_heads; head++)
        flops += 2.0 * 2 * m->attention.head_dim * m->hidden;
    for (int e = 0; e < m->moe.experts && model_layer_is_moe(m, layer); e++) flops += 2.0 * m->hidden;
    return flops;
}

/* A product as it should be: rows in all times `matrices` matrices (out, in). */
struct expected_product {
    enum unit unit;
    double rows, in, out, matrices;
};

/* In order, in this pass. Elements in BF16; `gradient`: bytes of one in the buffer of gradients. */
static void assert_products(const struct work *work, enum work_pass pass, double gradient,
                            const struct expected_product *expected, int count) {
    assert_int_equal(work->product_count, count);
    for (int i = 0; i < count; i++) {
        struct expected_product e = expected[i];
        double weights = e.matrices * e.in * e.out, rows = 2 * e.rows * e.in + 2 * e.rows * e.out;
        double bytes = pass == WORK_BACKWARD_WEIGHT ? gradient * weights + rows + gradient * weights
                                                    : 2 * weights + rows;
        assert_int_equal(work->products[i].unit, e.unit);
        assert_close(work->products[i].flops, 2 * e.rows * e.in * e.out, 1e-15);
        assert_close(work->products[i].bytes, bytes, 1e-15);
    }
}

static void attention_work_by_loops(void **state) {
    (void)state;
    struct model m = everything();
    static const struct tokens runs[] = {{2, 1, 1},  {2, 2, 1},  {2, 5, 1},  {2, 37, 1},  {2, 4, 2},
                                         {1, 24, 2}, {3, 24, 3}, {1, 96, 4}, {2, 60, 10}, {1, 6, 3}};
    for (int window = 0; window < 20; window += 5)
        for (size_t i = 0; i < COUNT(runs); i++)
            for (int layer = 0; layer < 3; layer++) {
                m.attention.window = window;
                struct tokens run = runs[i];
                double core = run.sequences * count_core_flops(&m, layer, run.seq_len, run.cp);
                double here = run.sequences * run.seq_len / run.cp;
                double dense = here * count_dense_flops(&m, layer);
                struct work forward = model_attention_work(&m, layer, WORK_FORWARD, run, 4);
                struct work input = model_attention_work(&m, layer, WORK_BACKWARD_INPUT, run, 4);
                struct work weight = model_attention_work(&m, layer, WORK_BACKWARD_WEIGHT, run, 4);
                assert_close(tokens_here(run), here, 1e-15);
                assert_close(forward.core_flops, core, 1e-14);
                assert_close(input.core_flops, 2.5 * core, 1e-14);
                assert_true(weight.core_flops == 0);
                assert_close(work_flops(&forward, UNIT_DENSE), dense, 1e-14);
                assert_close(work_flops(&input, UNIT_DENSE), dense, 1e-14);
                assert_close(work_flops(&weight, UNIT_DENSE), dense, 1e-14);
                assert_true(work_flops(&forward, UNIT_EXPERTS) == 0 && work_flops(&forward, UNIT_HEAD) == 0);
            }
}

static void full_attention_is_half_a_square(void **state) {
    struct bench *bench = *state;
    struct model m = load(bench, "experiments/models/qwen3-235b-paper.json");
    struct work work = model_attention_work(&m, 0, WORK_FORWARD, (struct tokens){1, 4096, 1}, 4);
    assert_true(work.core_flops == 4.0 * 64 * 128 * (4096.0 * 4097 / 2));
    /* q and o 4096 × 8192, k and v 4096 × 512, router 4096 × 128 */
    assert_true(work_flops(&work, UNIT_DENSE) == 2.0 * 4096 * 4096 * (2 * 8192 + 2 * 512 + 128));
    /* Without a window every GPU of a run has the same part of it. */
    struct work part = model_attention_work(&m, 0, WORK_FORWARD, (struct tokens){1, 4096, 8}, 4);
    assert_close(part.core_flops * 8, work.core_flops, 1e-15);
}

/* Traffic of one token of a plain layer, kernel by kernel, in BF16 elements of H 8, A 8, K 4, E 4, k 2. */
static void attention_bytes_by_hand(void **state) {
    struct bench *bench = *state;
    struct model m;
    struct tokens one = {1, 1, 1};
    assert_true(read_text(bench, "{" SMALL "}", &m));
    double forward =
        16 + 24 + 24 + 16 + 8 + 8 + 16 + 8 + 16; /* norm, RoPE, residual, norm, h2, x, copies, packing */
    assert_true(model_attention_work(&m, 0, WORK_FORWARD, one, 4).bytes == 2 * forward + 4 * 4 + 8 * 2);
    double input = 32 + 24 + 16 + 32 + 8 + 16 + 16 + 8;
    assert_true(model_attention_work(&m, 0, WORK_BACKWARD_INPUT, one, 4).bytes ==
                2 * input + 2 * 16 + 12 * 2);
    assert_true(model_attention_work(&m, 0, WORK_BACKWARD_WEIGHT, one, 4).bytes == 0);
}

/* The same with everything on, dense and MoE layer: H 10, A 24, K 12, E 8, k 3. `logits`: of the router. */
static void attention_bytes_with_everything(void **state) {
    (void)state;
    for (int noisy = 0; noisy < 2; noisy++) {
        struct model m = everything();
        if (noisy) m.moe.router = ROUTER_NOISY_TOPK;
        double logits = noisy ? 16 : 8, norm = 20, q_and_k = 72, residual = 30;
        double forward = norm + q_and_k + q_and_k + residual + norm;  /* QK-norm, RoPE */
        double packed = 10 + 30, summed = 10 + 30 + 10;               /* h2 and copies in, x out */
        double input = 40 + 108 + 72 + 48 + 40, spread = 10 + 30;     /* norm, QK-norm, RoPE, sums, norm */
        double biases = 24 + 12 + 12 + 10, gate = logits * 4 + 3 * 8; /* weights and numbers of the top 3 */
        const double bytes[3][2] = {
            [WORK_FORWARD] = {2 * (forward + 10 + 10 + 10), 2 * (forward + packed + summed) + gate},
            [WORK_BACKWARD_INPUT] = {2 * input,
                                     2 * (input + spread + packed) + 2 * 4 * logits + 3 * (4 + 4 + 4)},
            [WORK_BACKWARD_WEIGHT] = {2 * biases, 2 * biases + 4 * logits}};
        static const double kernels[3][2] = {
            /* norm, qkv, QK-norm, RoPE, core, output, residual, norm, residual; router, gate, packing */
            [WORK_FORWARD] = {9, 12},
            /* norm, qkv, QK-norm, RoPE, sums, core, output, norm; router, gate, packing, spreading */
            [WORK_BACKWARD_INPUT] = {8, 12},
            /* qkv, output, their biases; router, its bias */
            [WORK_BACKWARD_WEIGHT] = {4, 6}};
        for (int pass = WORK_FORWARD; pass <= WORK_BACKWARD_WEIGHT; pass++)
            for (int layer = 0; layer < 2; layer++)
                for (int cp = 1; cp <= 2; cp++) {
                    struct tokens tokens = {3, 8, cp};
                    double here = 24 / cp, gradient = layer ? 2 : 4;
                    struct work work = model_attention_work(&m, layer, pass, tokens, gradient);
                    assert_close(work.bytes, here * bytes[pass][layer], 1e-15);
                    assert_true(work.kernels == kernels[pass][layer]);
                    const struct expected_product products[] = {{UNIT_DENSE, here, 10, 24 + 12 + 12, 1},
                                                                {UNIT_DENSE, here, 24, 10, 1},
                                                                {UNIT_DENSE, here, 10, logits, 1}};
                    assert_products(&work, pass, gradient, products, 2 + layer);
                }
        m.attention.qk_norm = m.attention.bias = m.moe.bias = false;
        assert_true(model_attention_work(&m, 1, WORK_FORWARD, (struct tokens){1, 1, 1}, 4).kernels == 11);
        assert_true(model_attention_work(&m, 1, WORK_BACKWARD_INPUT, (struct tokens){1, 1, 1}, 4).kernels ==
                    11);
        assert_true(model_attention_work(&m, 1, WORK_BACKWARD_WEIGHT, (struct tokens){1, 1, 1}, 4).kernels ==
                    3);
    }
}

static void ffn_work_by_hand(void **state) {
    (void)state;
    struct model m = everything();
    /* 30 copies at 4 experts, whose 32 rows fill their tiles; 9 tokens pass the shared experts. */
    const struct ffn_load load = {.copies = 30, .rows = 32, .experts = 4, .tokens = 9};
    const struct expected_product moe_products[] = {{UNIT_EXPERTS, 32, 10, 2 * 7, 4},
                                                    {UNIT_EXPERTS, 32, 7, 10, 4},
                                                    {UNIT_DENSE, 9, 10, 2 * 14, 1},
                                                    {UNIT_DENSE, 9, 14, 10, 1}};
    const struct expected_product dense_products[] = {{UNIT_DENSE, 9, 10, 2 * 20, 1},
                                                      {UNIT_DENSE, 9, 20, 10, 1}};
    /* Two sorts 2 × (10 in, 10 out); SwiGLU 2 widths in, 1 out, and 3 in, 2 out; the router's weight in FP32;
       the sum of shared and routed, or of their input gradients, 3 × 10. Then sums for the biases. */
    static const double moe_bytes[] = {30 * (2 * (40 + 21) + 4) + 9 * 2 * (42 + 30),
                                       30 * (2 * (40 + 35) + 4) + 9 * 2 * (70 + 30),
                                       30 * 2 * (14 + 10) + 9 * 2 * (28 + 10)};
    static const double dense_bytes[] = {9 * 2 * 60, 9 * 2 * 100, 9 * 2 * (40 + 10)};
    static const double moe_kernels[] = {5 + 4, 5 + 4, 4 + 4}, dense_kernels[] = {3, 3, 4};
    for (int pass = WORK_FORWARD; pass <= WORK_BACKWARD_WEIGHT; pass++)
        for (int gradient = 2; gradient <= 4; gradient += 2) {
            struct work moe = model_ffn_work(&m, 1, pass, load, gradient);
            struct work dense = model_ffn_work(&m, 0, pass, load, gradient);
            assert_products(&moe, pass, gradient, moe_products, 4);
            assert_products(&dense, pass, gradient, dense_products, 2);
            assert_true(work_flops(&moe, UNIT_EXPERTS) == 32 * 3 * 2.0 * 10 * 7);
            assert_true(work_flops(&moe, UNIT_DENSE) == 9 * 3 * 2.0 * 10 * 14);
            assert_true(moe.core_flops == 0 && dense.core_flops == 0);
            assert_true(moe.bytes == moe_bytes[pass] && dense.bytes == dense_bytes[pass]);
            assert_true(moe.kernels == moe_kernels[pass] && dense.kernels == dense_kernels[pass]);
        }
    m.moe.shared_experts = 0;
    m.moe.bias = false;
    assert_true(model_ffn_work(&m, 1, WORK_FORWARD, load, 4).kernels == 5);
    assert_true(model_ffn_work(&m, 1, WORK_FORWARD, load, 4).bytes == 30 * (2 * (40 + 21) + 4));
    assert_true(model_ffn_work(&m, 1, WORK_BACKWARD_WEIGHT, load, 4).bytes == 0);
    assert_true(model_ffn_work(&m, 1, WORK_BACKWARD_WEIGHT, load, 4).kernels == 2);
    struct work none = model_ffn_work(&m, 1, WORK_FORWARD, (struct ffn_load){.tokens = 10}, 4);
    assert_true(none.product_count == 0 && none.bytes == 0 && none.kernels == 0);
}

/* Qwen3, 4096 tokens a GPU: over 1 or 16 GPUs each has as many copies, but 128 or 8 experts for them. */
static void few_rows_wait_for_memory(void **state) {
    struct bench *bench = *state;
    struct model m = load(bench, "experiments/models/qwen3-235b-paper.json");
    const double flops_rate = 700e12, hbm = 2.68e12;
    double seconds[3][2] = {{0}}, ratio = 0;
    for (int pass = WORK_FORWARD; pass <= WORK_BACKWARD_WEIGHT; pass++)
        for (int spread = 0; spread < 2; spread++) {
            struct ffn_load load = {4096 * 8, 4096 * 8, spread ? 8 : 128, 4096};
            struct work work = model_ffn_work(&m, 0, pass, load, 4);
            double flops = work_flops(&work, UNIT_EXPERTS) / flops_rate, bytes = 0;
            for (int i = 0; i < work.product_count; i++) {
                bytes += work.products[i].bytes / hbm;
                seconds[pass][spread] +=
                    fmax(work.products[i].flops / flops_rate, work.products[i].bytes / hbm);
            }
            if (spread) assert_true(bytes < flops);
            if (pass == WORK_BACKWARD_WEIGHT && !spread) ratio = bytes / flops;
        }
    assert_true(ratio > 4 && ratio < 5); /* FP32 gradients of 128 experts, read and written */
    assert_true(seconds[WORK_BACKWARD_WEIGHT][0] > 4 * seconds[WORK_BACKWARD_WEIGHT][1]);
    assert_true(seconds[WORK_FORWARD][0] > 1.1 * seconds[WORK_FORWARD][1]);
}

static void work_is_linear(void **state) {
    (void)state;
    struct model m = everything();
    struct work one = model_attention_work(&m, 1, WORK_FORWARD, (struct tokens){1, 9, 1}, 4);
    struct work three = model_attention_work(&m, 1, WORK_FORWARD, (struct tokens){3, 9, 1}, 4);
    struct work sum = work_add(one, one);
    assert_true(2 * one.product_count <= MAX_PRODUCTS && sum.product_count == 2 * one.product_count);
    assert_true(work_flops(&sum, UNIT_DENSE) == 2 * work_flops(&one, UNIT_DENSE));
    assert_true(work_flops(&three, UNIT_DENSE) == 3 * work_flops(&one, UNIT_DENSE));
    assert_true(sum.core_flops == 2 * one.core_flops && three.core_flops == 3 * one.core_flops);
    assert_true(sum.bytes == 2 * one.bytes && three.bytes == 3 * one.bytes);
    assert_true(sum.kernels == 2 * one.kernels && three.kernels == one.kernels);
    /* Of a product's operands the matrices do not grow with the tokens. */
    assert_true(three.products[0].bytes < 3 * one.products[0].bytes);
    for (int i = 0; i < sum.product_count; i++)
        assert_true(sum.products[i].bytes == one.products[i % one.product_count].bytes);
}

static void embedding_and_head(void **state) {
    (void)state;
    struct model m = everything();
    struct work forward = model_embed_work(&m, WORK_FORWARD, 7);
    struct work weight = model_embed_work(&m, WORK_BACKWARD_WEIGHT, 7);
    assert_true(forward.bytes == 7 * 10 * 4 && forward.kernels == 1 && forward.product_count == 0);
    assert_true(model_embed_work(&m, WORK_BACKWARD_INPUT, 7).kernels == 0);
    assert_true(weight.bytes == 7 * 10 * (2 + 8) && weight.kernels == 1 && weight.product_count == 0);
    const struct expected_product product = {UNIT_HEAD, 7, 10, 100, 1};
    /* norm and logits, in and out; softmax in place, norm's x, dy in, dx out */
    static const double bytes[] = {7 * 2 * (2 * 10 + 2 * 100), 7 * 2 * (2 * 100 + 3 * 10), 0};
    static const double kernels[] = {3, 3, 1};
    for (int pass = WORK_FORWARD; pass <= WORK_BACKWARD_WEIGHT; pass++)
        for (int gradient = 2; gradient <= 4; gradient += 2) {
            struct work work = model_head_work(&m, pass, 7, gradient);
            assert_products(&work, pass, gradient, &product, 1);
            assert_true(work.bytes == bytes[pass] && work.kernels == kernels[pass] && work.core_flops == 0);
        }
}

static void step_flops_by_loops(void **state) {
    struct bench *bench = *state;
    struct model m = everything();
    double forward = 0;
    for (int layer = 0; layer < 3; layer++) {
        forward += count_core_flops(&m, layer, 11, 1) + 11 * count_dense_flops(&m, layer);
        int wide = layer == 0 ? 20 : 3 * 7 + 2 * 7; /* hidden units that a token meets */
        for (int unit = 0; unit < wide; unit++) forward += 11 * 3 * 2.0 * 10;
    }
    forward += 11 * 2.0 * 10 * 100;
    assert_true(model_step_flops(&m, 11) == 3 * forward);
    /* 6 FLOPs an active parameter and token, as long as attention's square is small. */
    struct model qwen = released(bench, "qwen3-235b");
    double active = model_parameter_count(&qwen).active_without_input_embedding;
    assert_close(model_step_flops(&qwen, 16), 16 * 6 * active, 0.002);
}

/* ---- activations ------------------------------------------------------------------------------------- */

static void activations_by_hand(void **state) {
    (void)state;
    struct model m = everything();
    double core = 2 * 24 + 4 * 4, sent = 2 * 10;           /* output and log-sum-exp; what is dispatched */
    double projected = 2 * (24 + 12 + 12) + 2 * (24 + 12); /* q, k, v; q and k ahead of their norm */
    double gate = 4 * 8 + 8 * 3, norm = 2 * 10;
    for (int layer = 0; layer < 2; layer++) {
        double always = core + sent + layer * gate;
        /* The dense layer's second norm belongs to its feed-forward part. */
        const double kept[] = {[ATTENTION_NONE] = always + projected + (layer ? 2 : 1) * norm,
                               [ATTENTION_NORMS] = always + projected,
                               [ATTENTION_PROJECTIONS] = always,
                               [ATTENTION_FULL] = 0};
        for (int level = ATTENTION_NONE; level <= ATTENTION_FULL; level++)
            assert_true(model_attention_activation_bytes(&m, layer, level) == kept[level]);
    }
    m.attention.qk_norm = false;
    assert_true(model_attention_activation_bytes(&m, 0, ATTENTION_NORMS) == core + sent + projected - 72);
    m.moe.router = ROUTER_NOISY_TOPK;
    assert_true(model_attention_activation_bytes(&m, 1, ATTENTION_PROJECTIONS) == core + sent + gate + 4 * 8);
    m = everything();
    static const double share[] = {[FFN_NONE] = 6, [FFN_ACTIVATION] = 4, [FFN_FULL] = 0};
    for (int level = FFN_NONE; level <= FFN_FULL; level++) {
        assert_true(model_expert_activation_bytes(&m, 1, level) == share[level] * 7);
        assert_true(model_expert_activation_bytes(&m, 0, level) == 0);
        assert_true(model_shared_activation_bytes(&m, 1, level) == share[level] * 14);
        /* and the norm's output, the dense feed-forward's input */
        assert_true(model_shared_activation_bytes(&m, 0, level) ==
                    share[level] * 20 + (level == FFN_NONE ? norm : 0));
    }
    assert_true(model_hidden_bytes(&m) == 20 && model_key_value_bytes(&m) == 2 * (12 + 12));
}

/* FP32: twice what is BF16 here, and the same of what is FP32 anyway; FP64: twice as much again, but for the
   experts' numbers. */
static void activations_of_wider_models(void **state) {
    (void)state;
    struct model m = everything();
    double narrow = 2 * 24 + 2 * 10 + 2 * (24 + 12 + 12) + 2 * (24 + 12) + 2 * 2 * 10;
    double wide = 4 * 4 + 4 * 8 + 4 * 3, numbers = 4 * 3;
    assert_true(model_attention_activation_bytes(&m, 1, ATTENTION_NONE) == narrow + wide + numbers);
    m.dtype = DTYPE_FP32;
    assert_true(model_element_bytes(&m) == 4 && model_wide_bytes(&m) == 4);
    assert_true(model_hidden_bytes(&m) == 40 && model_key_value_bytes(&m) == 96);
    assert_true(model_expert_activation_bytes(&m, 1, FFN_NONE) == 84);
    assert_true(model_attention_activation_bytes(&m, 1, ATTENTION_NONE) == 2 * narrow + wide + numbers);
    m.dtype = DTYPE_FP64;
    assert_true(model_element_bytes(&m) == 8 && model_wide_bytes(&m) == 8);
    assert_true(model_hidden_bytes(&m) == 80);
    assert_true(model_attention_activation_bytes(&m, 1, ATTENTION_NONE) == 4 * narrow + 2 * wide + numbers);
}

/* What is done again: never more than forward, all of it at the highest level. */
static void work_again_by_hand(void **state) {
    (void)state;
    struct model m = everything();
    const struct tokens tokens = {2, 12, 3}; /* 8 tokens here */
    const struct ffn_load load = {.copies = 30, .rows = 32, .experts = 4, .tokens = 9};
    for (int layer = 0; layer < 2; layer++) {
        struct work none = model_attention_again_work(&m, layer, ATTENTION_NONE, tokens);
        assert_true(none.product_count == 0 && none.bytes == 0 && none.kernels == 0 && none.core_flops == 0);
        struct work norms = model_attention_again_work(&m, layer, ATTENTION_NORMS, tokens);
        assert_true(norms.product_count == 0 && norms.core_flops == 0);
        assert_true(norms.bytes == 8 * 2 * 20 * (1 + layer) && norms.kernels == 1 + layer);
        struct work projections = model_attention_again_work(&m, layer, ATTENTION_PROJECTIONS, tokens);
        const struct expected_product qkv = {UNIT_DENSE, 8, 10, 48, 1};
        assert_products(&projections, WORK_FORWARD, 4, &qkv, 1);
        assert_true(projections.bytes == norms.bytes + 8 * 2 * (72 + 72)); /* QK-norm, RoPE */
        assert_true(projections.kernels == norms.kernels + 3 && projections.core_flops == 0);
        struct work full = model_attention_again_work(&m, layer, ATTENTION_FULL, tokens);
        const struct expected_product all[] = {qkv, {UNIT_DENSE, 8, 24, 10, 1}, {UNIT_DENSE, 8, 10, 8, 1}};
        assert_products(&full, WORK_FORWARD, 4, all, 2 + layer);
        assert_close(full.core_flops, 2 * count_core_flops(&m, layer, 12, 3), 1e-14);
        assert_true(full.kernels == 9 + 3 * layer && full.bytes > projections.bytes);

        none = model_ffn_again_work(&m, layer, FFN_NONE, load);
        assert_true(none.product_count == 0 && none.bytes == 0 && none.kernels == 0);
    }
    struct work dense = model_ffn_again_work(&m, 0, FFN_ACTIVATION, load);
    assert_true(dense.bytes == 9 * 2 * (20 + 60) && dense.kernels == 2 && dense.product_count == 0);
    struct work moe = model_ffn_again_work(&m, 1, FFN_ACTIVATION, load);
    assert_true(moe.bytes == 30 * (2 * 21 + 4) + 9 * 2 * 42 && moe.kernels == 2 && moe.product_count == 0);
    /* Up to the activation's output, which is all that backward needs. */
    const struct expected_product gate_up[] = {{UNIT_EXPERTS, 32, 10, 14, 4}, {UNIT_DENSE, 9, 10, 28, 1}},
                                  wide = {UNIT_DENSE, 9, 10, 40, 1};
    dense = model_ffn_again_work(&m, 0, FFN_FULL, load);
    assert_products(&dense, WORK_FORWARD, 4, &wide, 1);
    assert_true(dense.bytes == 9 * 2 * (20 + 60) && dense.kernels == 3);
    moe = model_ffn_again_work(&m, 1, FFN_FULL, load);
    assert_products(&moe, WORK_FORWARD, 4, gate_up, 2);
    assert_true(moe.bytes == 30 * (2 * (20 + 21) + 4) + 9 * 2 * 42 && moe.kernels == 3 + 2);
    m.attention.qk_norm = false;
    assert_true(model_attention_again_work(&m, 1, ATTENTION_PROJECTIONS, tokens).kernels == 4);
}

/* ---- import ------------------------------------------------------------------------------------------ */

static bool import_text(struct bench *bench, const char *text, struct model *model) {
    struct json document = json_read_text(text, strlen(text), "a/config.json", bench->arena, &bench->errors);
    assert_non_null(document.node);
    bool sound = model_import(document, model);
    cJSON_Delete(document.node);
    return sound;
}

static struct json fixture(struct bench *bench, const char *name) {
    struct json document = json_read_file(arena_printf(bench->arena, "tests/fixtures/%s.json", name),
                                          bench->arena, &bench->errors);
    assert_non_null(document.node);
    return document;
}

/* Equal in every key but name and source, which say where the model was read. */
static void imports_equal_the_released_manifests(void **state) {
    struct bench *bench = *state;
    for (size_t i = 0; i < COUNT(NAMES); i++) {
        struct json config = fixture(bench, NAMES[i]);
        struct model expected = released(bench, NAMES[i]), imported;
        assert_true(model_import(config, &imported));
        assert_string_equal(imported.name, NAMES[i]);
        imported.name = expected.name;
        imported.source = expected.source;
        char *a = print(&imported), *b = print(&expected);
        assert_string_equal(a, b);
        free(a);
        free(b);
        cJSON_Delete(config.node);
    }
    assert_int_equal(bench->errors.count, 0);
}

static void mixtral_is_imported(void **state) {
    struct bench *bench = *state;
    struct json config = fixture(bench, "mixtral-8x7b");
    struct model m;
    assert_true(model_import(config, &m));
    struct parameter_count count = model_parameter_count(&m); /* Mixtral paper: 47B, 13B active */
    assert_close(count.total, 46.7e9, 0.002);
    assert_close(count.active, 12.9e9, 0.002);
    assert_true(m.moe.renormalise && m.attention.head_dim == 128 && m.moe.aux_loss == 0.02 &&
                !m.attention.window);
    cJSON_Delete(config.node);
}

/* aux_loss_alpha 0.001: of the sum over 27 MoE layers of a loss that is 1 when balanced, where ours is the
   mean of one that is top_k, 6. */
static void balance_loss_is_rescaled(void **state) {
    struct bench *bench = *state;
    struct json deepseek = fixture(bench, "deepseek-moe-16b"), qwen3 = fixture(bench, "qwen3-235b");
    struct model m;
    assert_true(model_import(deepseek, &m));
    assert_close(m.moe.aux_loss * m.moe.top_k, 27 * 0.001, 1e-12);
    assert_true(model_import(qwen3, &m) && m.moe.aux_loss == 0.001);
    cJSON_Delete(deepseek.node);
    cJSON_Delete(qwen3.node);
}

static void departures_are_in_the_source(void **state) {
    struct bench *bench = *state;
    struct model m;
    struct json gpt = fixture(bench, "gpt-oss-120b"), deepseek = fixture(bench, "deepseek-moe-16b");
    assert_true(model_import(gpt, &m) && strstr(m.source, "YaRN"));
    assert_true(model_import(deepseek, &m) && !strstr(m.source, "seq_aux"));
    assert_true(json_set_path(deepseek.node, "seq_aux", cJSON_CreateFalse()));
    assert_true(model_import(deepseek, &m) && strstr(m.source, "seq_aux"));
    cJSON_Delete(gpt.node);
    cJSON_Delete(deepseek.node);
}

/* Sets one key of a fixture; the import has to fail with one error that names the path. */
static void assert_refused(struct bench *bench, const char *name, const char *key, const char *value,
                           const char *path) {
    struct json config = fixture(bench, name);
    assert_true(json_set_path(config.node, key, cJSON_Parse(value)));
    struct model m;
    if (model_import(config, &m)) fail_msg("%s: %s = %s was imported", name, key, value);
    assert_int_equal(bench->errors.count, 1);
    char *start = arena_printf(bench->arena, "%s: %s: ", config.file, path);
    if (strncmp(bench->errors.messages[0], start, strlen(start)) != 0)
        fail_msg("%s does not begin with %s", bench->errors.messages[0], start);
    errors_free(&bench->errors);
    cJSON_Delete(config.node);
}

static void other_mathematics_is_refused(void **state) {
    struct bench *bench = *state;
    static const struct {
        const char *name, *key, *value, *path; /* path: of what is named, where it is not the key */
    } wrong[] = {
        {"qwen3-235b", "model_type", "\"llama\"", NULL},
        {"qwen3-235b", "model_type", "7", NULL},
        {"qwen3-235b", "hidden_act", "\"gelu\"", NULL},
        {"qwen3-235b", "decoder_sparse_step", "2", NULL},
        {"qwen3-235b", "mlp_only_layers", "[0]", NULL},
        {"qwen3-235b", "mlp_only_layers", "0", NULL},
        {"qwen3-235b", "use_sliding_window", "true", NULL},
        {"qwen3-235b", "layer_types", "[\"full_attention\"]", NULL},
        {"qwen3-235b", "rope_scaling", "{\"rope_type\": \"yarn\", \"factor\": 4.0}",
         "rope_scaling.rope_type"},
        {"qwen3-235b", "rope_scaling", "{\"type\": \"linear\", \"factor\": 4.0}", "rope_scaling.type"},
        {"qwen3-235b", "rope_scaling", "{\"rope_type\": 3}", "rope_scaling.rope_type"},
        {"qwen3-235b", "rope_scaling", "{\"factor\": 4.0}", "rope_scaling.factor"},
        {"qwen3-235b", "rope_scaling", "\"yarn\"", NULL},
        {"qwen3-235b", "rope_parameters", "[]", NULL},
        {"qwen3-235b", "rope_parameters", "{\"rope_type\": \"yarn\"}", "rope_parameters.rope_type"},
        {"qwen3-235b", "rope_parameters", "{\"partial_rotary_factor\": 0.5}",
         "rope_parameters.partial_rotary_factor"},
        {"qwen3-235b", "rope_parameters", "{\"full_attention\": {\"rope_theta\": 1e4}}",
         "rope_parameters.full_attention"},
        {"qwen3-235b", "partial_rotary_factor", "0.5", NULL},
        {"qwen3-235b", "attention_dropout", "0.1", NULL},
        {"qwen3-235b", "num_experts_per_tok", "129", NULL},
        {"qwen3-235b", "num_local_experts", "64", NULL},
        {"qwen3-235b", "num_key_value_heads", "5", NULL},
        {"qwen3-235b", "num_key_value_heads", "0", NULL},
        {"qwen3-235b", "head_dim", "3", NULL},
        {"qwen3-235b", "n_shared_experts", "1", NULL},
        {"qwen3-235b", "mystery", "1", NULL},
        {"qwen3-235b", "hidden_size", "\"4096\"", NULL},
        {"qwen3-235b", "hidden_size", "null", NULL},
        {"qwen3-235b", "norm_topk_prob", "null", NULL},
        {"qwen3-235b", "rope_theta", "0.5", NULL},
        {"qwen3-235b", "num_hidden_layers", "10001", NULL},
        {"qwen3-235b", "architectures", "[\"Qwen3MoeForSequenceClassification\"]", NULL},
        {"qwen3-235b", "is_encoder_decoder", "true", NULL},
        {"qwen3-235b", "add_cross_attention", "true", NULL},
        {"qwen3-235b", "pruned_heads", "{\"0\": [1]}", NULL},
        {"qwen3-235b", "per_layer_config", "{\"0\": {\"num_experts\": 8}}", NULL},
        {"gpt-oss-120b", "swiglu_limit", "5.0", NULL},
        {"gpt-oss-120b", "swiglu_alpha", "1.5", NULL},
        {"gpt-oss-120b", "layer_types", "[\"full_attention\"]", NULL},
        {"gpt-oss-120b", "layer_types", "3", NULL},
        {"gpt-oss-120b", "experts_per_token", "8", NULL},
        {"gpt-oss-120b", "rope_scaling", "{\"rope_type\": \"llama3\"}", "rope_scaling.rope_type"},
        {"gpt-oss-120b", "rope_scaling", "{\"rope_type\": \"yarn\", \"mystery\": 1}", "rope_scaling.mystery"},
        {"gpt-oss-120b", "rope_scaling", "{\"rope_type\": \"yarn\", \"partial_rotary_factor\": 0.25}",
         "rope_scaling.partial_rotary_factor"},
        {"deepseek-moe-16b", "moe_layer_freq", "2", NULL},
        {"deepseek-moe-16b", "scoring_func", "\"sigmoid\"", NULL},
        {"deepseek-moe-16b", "first_k_dense_replace", "29", NULL},
        {"deepseek-moe-16b", "kv_lora_rank", "512", NULL},
        {"deepseek-moe-16b", "routed_scaling_factor", "2.5", NULL},
        {"deepseek-moe-16b", "n_routed_experts", "null", NULL},
        {"deepseek-moe-16b", "num_experts_per_tok", "null", NULL},
        {"deepseek-moe-16b", "head_dim", "64", NULL},
        {"mixtral-8x7b", "router_jitter_noise", "0.1", NULL},
        {"mixtral-8x7b", "attention_bias", "true", NULL},
    };
    for (size_t i = 0; i < COUNT(wrong); i++)
        assert_refused(bench, wrong[i].name, wrong[i].key, wrong[i].value,
                       wrong[i].path ? wrong[i].path : wrong[i].key);
}

/* As transformers 5.24 reads them: what is in rope_parameters wins, and rope_scaling stands in its place. */
static void rope_of_two_places(void **state) {
    struct bench *bench = *state;
    static const struct {
        const char *keys;
        double theta;
        bool yarn;
    } cases[] = {
        {"\"model_type\": \"mixtral\"", 1e6, false},
        {"\"model_type\": \"mixtral\", \"rope_theta\": 5", 5, false},
        {"\"model_type\": \"mixtral\", \"rope_theta\": 5, \"rope_parameters\": {\"rope_theta\": 7}", 7,
         false},
        {"\"model_type\": \"mixtral\", \"rope_theta\": 5, \"rope_parameters\": {\"rope_type\": \"default\"}",
         5, false},
        {"\"model_type\": \"mixtral\", \"rope_theta\": 5, \"rope_parameters\": {\"rope_theta\": 7},"
         "\"rope_scaling\": {\"rope_theta\": 3}",
         3, false},
        {"\"model_type\": \"mixtral\", \"rope_scaling\": {\"type\": \"default\"},"
         "\"rope_parameters\": {\"rope_theta\": 9}",
         1e6, false},
        {"\"model_type\": \"mixtral\", \"rope_scaling\": {}, \"rope_parameters\": {\"rope_theta\": 9,"
         "\"partial_rotary_factor\": 1}",
         9, false},
        {"\"model_type\": \"gpt_oss\"", 150000, true},
        {"\"model_type\": \"gpt_oss\", \"rope_theta\": 5, \"rope_scaling\": null", 5, true},
        {"\"model_type\": \"gpt_oss\", \"rope_parameters\": {}", 150000, false},
        {"\"model_type\": \"gpt_oss\", \"rope_scaling\": {\"rope_type\": \"default\"}", 150000, false},
        {"\"model_type\": \"gpt_oss\", \"rope_theta\": 8, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": "
         "4}",
         8, true},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct model m;
        if (!import_text(bench, arena_printf(bench->arena, "{%s}", cases[i].keys), &m))
            fail_msg("%s: %s", cases[i].keys, bench->errors.messages[0]);
        if (m.attention.rope_theta != cases[i].theta || !strstr(m.source, "YaRN") == cases[i].yarn)
            fail_msg("%s: theta %g, %s", cases[i].keys, m.attention.rope_theta, m.source);
    }
}

static void layer_types_become_windows(void **state) {
    struct bench *bench = *state;
    static const struct {
        const char *even, *odd;
        int expected;
    } patterns[] = {{"sliding", "full", WINDOW_EVEN},
                    {"full", "sliding", WINDOW_ODD},
                    {"sliding", "sliding", WINDOW_ALL},
                    {"full", "full", WINDOW_NONE}};
    for (size_t i = 0; i < COUNT(patterns); i++) {
        struct json config = fixture(bench, "gpt-oss-120b");
        cJSON *types = cJSON_CreateArray();
        for (int layer = 0; layer < 36; layer++)
            cJSON_AddItemToArray(
                types, cJSON_CreateString(arena_printf(bench->arena, "%s_attention",
                                                       layer % 2 ? patterns[i].odd : patterns[i].even)));
        json_set_path(config.node, "layer_types", types);
        struct model m;
        assert_true(model_import(config, &m));
        assert_int_equal(m.attention.window_layers, patterns[i].expected);
        assert_int_equal(m.attention.window, patterns[i].expected == WINDOW_NONE ? 0 : 128);
        cJSON_Delete(config.node);
    }
}

/* A number of a configuration, or `absent` where the key is missing or null. */
static double said(const cJSON *config, const char *key, double absent) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(config, key);
    return cJSON_IsNumber(value) ? value->valuedouble : cJSON_IsBool(value) ? cJSON_IsTrue(value) : absent;
}

/* A model against a configuration that leaves out nothing. */
static void assert_as_said(const struct model *m, const cJSON *config) {
    const cJSON *rope = cJSON_GetObjectItemCaseSensitive(config, "rope_parameters");
    double heads = said(config, "num_attention_heads", 0), hidden = said(config, "hidden_size", 0);
    double inner = said(config, "intermediate_size", 0), experts = said(config, "n_routed_experts", 0);
    double aux = said(config, "router_aux_loss_coef", 0);
    bool deepseek = said(config, "n_routed_experts", 0) > 0;
    if (!experts) experts = said(config, "num_local_experts", said(config, "num_experts", 0));
    if (deepseek) aux = said(config, "aux_loss_alpha", 0) * (m->layers - m->moe.dense_layers) / m->moe.top_k;
    assert_true(m->layers == said(config, "num_hidden_layers", 0) && m->hidden == hidden);
    assert_true(m->vocab == said(config, "vocab_size", 0) && m->norm_eps == said(config, "rms_norm_eps", 0));
    assert_true(m->tie_embeddings == said(config, "tie_word_embeddings", 2));
    assert_true(m->attention.heads == heads);
    assert_true(m->attention.kv_heads == said(config, "num_key_value_heads", heads));
    assert_true(m->attention.head_dim == said(config, "head_dim", hidden / heads));
    assert_true(m->attention.rope_theta == said(rope, "rope_theta", said(config, "rope_theta", 0)));
    assert_true(m->attention.bias == said(config, "attention_bias", 0));
    assert_true(m->attention.window == said(config, "sliding_window", 0));
    assert_true(m->moe.experts == experts && m->moe.top_k == said(config, "num_experts_per_tok", 0));
    assert_true(m->moe.expert_hidden == said(config, "moe_intermediate_size", inner));
    assert_true(m->moe.shared_experts == said(config, "n_shared_experts", 0));
    assert_true(m->moe.dense_layers == said(config, "first_k_dense_replace", 0));
    assert_true(m->moe.dense_hidden == (m->moe.dense_layers ? inner : 0));
    assert_true(m->moe.renormalise == said(config, "norm_topk_prob", m->moe.renormalise));
    assert_true(m->moe.aux_loss == aux);
}

/* Files of transformers' own: as it saves them, with every key, and with those alone that differ from the
   class's defaults. All three are the same model. */
static void saved_configurations(void **state) {
    struct bench *bench = *state;
    static const char *const names[] = {
        "mixtral-default",      "mixtral-8x7b",         "mixtral-8x22b",
        "mixtral-changed",      "gpt_oss-default",      "gpt_oss-20b",
        "gpt_oss-changed",      "qwen3_moe-default",    "qwen3_moe-30b",
        "qwen3_moe-235b",       "qwen3_moe-changed",    "deepseek-default",
        "deepseek-16b",         "deepseek-changed",     "mixtral-4.57-changed",
        "gpt_oss-4.57-default", "gpt_oss-4.57-changed", "qwen3_moe-4.57-changed",
        "qwen3_moe-4.57-235b"};
    static const char *const kinds[] = {"full", "saved", "short"};
    for (size_t i = 0; i < COUNT(names); i++) {
        char *whole = NULL;
        for (size_t k = 0; k < COUNT(kinds) - (strstr(names[i], "4.57") != NULL); k++) {
            struct json config =
                fixture(bench, arena_printf(bench->arena, "configs/%s.%s", names[i], kinds[k]));
            struct model m;
            if (!model_import(config, &m)) fail_msg("%s: %s", config.file, bench->errors.messages[0]);
            if (k == 0) assert_as_said(&m, config.node);
            m.name = names[i];
            char *text = print(&m);
            if (!whole) whole = arena_strdup(bench->arena, text);
            assert_string_equal(text, whole);
            free(text);
            cJSON_Delete(config.node);
        }
    }
    struct json other = fixture(bench, "configs/deepseek_v2-default.saved");
    struct model m;
    assert_false(model_import(other, &m));
    ASSERT_ERRORS(bench, "tests/fixtures/configs/deepseek_v2-default.saved.json: model_type: found "
                         "\"deepseek_v2\"; allowed: \"qwen3_moe\", \"gpt_oss\", \"deepseek\" or \"mixtral\"");
    cJSON_Delete(other.node);
}

static void absent_keys_take_their_defaults(void **state) {
    struct bench *bench = *state;
    static const struct {
        const char *type;
        int kv_heads;
    } families[] = {{"mixtral", 8}, {"gpt_oss", 8}, {"qwen3_moe", 4}};
    struct model m;
    for (size_t i = 0; i < COUNT(families); i++) {
        const char *text = "{\"model_type\": \"%s\", \"num_attention_heads\": 16, \"hidden_size\": 256}";
        assert_true(import_text(bench, arena_printf(bench->arena, text, families[i].type), &m));
        assert_int_equal(m.attention.kv_heads, families[i].kv_heads);
    }
    assert_true(import_text(bench,
                            "{\"model_type\": \"mixtral\", \"hidden_size\": 64, \"num_hidden_layers\": 2,"
                            "\"num_attention_heads\": 4, \"vocab_size\": 100, \"num_experts_per_tok\": 2,"
                            "\"num_local_experts\": 4, \"intermediate_size\": 32, \"sliding_window\": 16,"
                            "\"num_key_value_heads\": null, \"head_dim\": null, \"q_lora_rank\": null,"
                            "\"rope_parameters\": {\"rope_theta\": 5000.0, \"rope_type\": \"default\"}}",
                            &m));
    assert_string_equal(m.name, "a");
    assert_true(m.attention.kv_heads == 4 && m.attention.head_dim == 16 && m.attention.rope_theta == 5000);
    assert_true(m.attention.window == 16 && m.attention.window_layers == WINDOW_ALL && m.norm_eps == 1e-5);
    struct json gpt = fixture(bench, "gpt-oss-120b");
    json_set_path(gpt.node, "sliding_window", cJSON_CreateNull()); /* none, not the default 128 */
    assert_true(model_import(gpt, &m) && m.attention.window == 0 && m.attention.window_layers == WINDOW_NONE);
    cJSON_Delete(gpt.node);
    assert_false(import_text(bench, "{\"model_type\": \"deepseek\"}", &m)); /* a dense model by default */
    ASSERT_ERRORS(
        bench, "a/config.json: n_routed_experts: the key is missing; allowed: a whole number of at least 1",
        "a/config.json: num_experts_per_tok: the key is missing; allowed: a whole number of at least 1");
    assert_false(import_text(bench, "{\"model_type\": \"qwen3_moe\", \"num_attention_heads\": 10}", &m));
    ASSERT_ERRORS(bench,
                  "a/config.json: num_key_value_heads: the key is missing; its default, 4, does not fit; "
                  "allowed: a divisor of num_attention_heads, which is 10",
                  "a/config.json: head_dim: the key is missing; allowed: any even number, but given, as "
                  "hidden_size is no multiple of num_attention_heads");
    assert_false(import_text(bench, "[]", &m));
    ASSERT_ERRORS(bench, "a/config.json: found []; allowed: an object");
    assert_false(import_text(bench, "{}", &m));
    ASSERT_ERRORS(bench,
                  "a/config.json: model_type: the key is missing; allowed: \"qwen3_moe\", \"gpt_oss\", "
                  "\"deepseek\" or \"mixtral\"");
}

/* Cut off or with wrong letters: an error, or a model whose manifest can be read. */
static void damaged_configurations(void **state) {
    struct bench *bench = *state;
    static const char *const names[] = {"mixtral-changed", "gpt_oss-changed", "qwen3_moe-30b",
                                        "deepseek-16b"};
    static const char pieces[] = "{}[]\",:0129eE.-truefalsn ";
    struct rng rng = rng_seed(11);
    int imported = 0, refused = 0;
    for (int i = 0; i < sampled(8000); i++) {
        struct arena *arena = arena_new();
        struct json config = fixture(bench, arena_printf(arena, "configs/%s.short", names[i % 4]));
        char *text = cJSON_Print(config.node);
        size_t length = strlen(text);
        cJSON_Delete(config.node);
        if (rng_below(&rng, 4) == 0) length = (size_t)rng_below(&rng, (int)length);
        for (int edits = rng_below(&rng, 4); edits > 0 && length; edits--)
            text[rng_below(&rng, (int)length)] = pieces[rng_below(&rng, sizeof pieces - 1)];
        struct json damaged = json_read_text(text, length, "c.json", arena, &bench->errors);
        struct model m, again;
        if (damaged.node && model_import(damaged, &m)) {
            struct json manifest = {model_write(&m), "m.json", "", arena, &bench->errors};
            if (!model_read(manifest, &again)) fail_msg("%s\n%s", bench->errors.messages[0], text);
            cJSON_Delete(manifest.node);
            imported++;
        } else {
            assert_true(bench->errors.count > 0);
            refused++;
        }
        errors_free(&bench->errors);
        cJSON_Delete(damaged.node);
        cJSON_free(text);
        arena_free(arena);
    }
    print_message("%d imported, %d refused\n", imported, refused);
    assert_true(imported && refused);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(left_out_means_plain),
        TEST(all_that_is_wrong_is_told_at_once),
        TEST(limits_are_told),
        TEST(the_same_error_fails_twice),
        TEST(parts_must_be_objects),
        TEST(written_models_read_back),
        TEST(nothing_is_lost_in_writing),
        TEST(paper_models_are_the_table),
        TEST(mutated_manifests_never_crash),
        TEST(sizes_are_as_published),
        TEST(parameters_by_hand),
        TEST(layers_have_their_kind_and_window),
        TEST(capacities_by_whole_numbers),
        TEST(attention_work_by_loops),
        TEST(full_attention_is_half_a_square),
        TEST(attention_bytes_by_hand),
        TEST(attention_bytes_with_everything),
        TEST(ffn_work_by_hand),
        TEST(few_rows_wait_for_memory),
        TEST(work_is_linear),
        TEST(embedding_and_head),
        TEST(step_flops_by_loops),
        TEST(activations_by_hand),
        TEST(activations_of_wider_models),
        TEST(work_again_by_hand),
        TEST(imports_equal_the_released_manifests),
        TEST(mixtral_is_imported),
        TEST(balance_loss_is_rescaled),
        TEST(departures_are_in_the_source),
        TEST(other_mathematics_is_refused),
        TEST(rope_of_two_places),
        TEST(layer_types_become_windows),
        TEST(saved_configurations),
        TEST(absent_keys_take_their_defaults),
        TEST(damaged_configurations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
