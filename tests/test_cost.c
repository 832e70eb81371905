/*
What a plan's operations last and its GPUs hold: core/plan/cost.c against formulas written anew, on random
models, clusters, routings and plans. Work and bytes of a model's parts are test_model's business, ports and
rings test_cluster's; here is how they are put together.

Random cases come from a fixed seed; DISAGMOE_SAMPLE=N runs one N-th of them.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "disagmoe/disagmoe.h"
#include "plan/plan.h"
#include "tests/cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SEED 20261107
#define MOST_GPUS 48
#define MOST_EXPERTS 24
#define CLOSE 1e-12

static void assert_near(double found, double expected) {
    assert_within(found, expected, CLOSE);
}

static int between(struct rng *rng, int low, int high) {
    return low + rng_below(rng, high - low + 1);
}

/* value × up to `factor` in either direction */
static double varied(struct rng *rng, double value, double factor) {
    return value * pow(factor, 2 * rng_uniform(rng) - 1);
}

/* ---- random scenes ----------------------------------------------------------------------------------- */

struct scene {
    struct model model;
    struct cluster cluster;
    struct slow_gpu slow[2];
    struct point point;
    struct plan plan;
    double share[MOST_EXPERTS];
    int gpus[3][MOST_GPUS]; /* attention, feed-forward, next */
    struct sides sides;
    bool pipelined;
};

static struct model random_model(struct rng *rng) {
    int experts = between(rng, 2, MOST_EXPERTS);
    struct model model = {.name = "random",
                          .source = "",
                          .dtype = rng_below(rng, 3) ? DTYPE_BF16 : DTYPE_FP32,
                          .layers = 4,
                          .hidden = 8 * between(rng, 1, 16),
                          .vocab = between(rng, 50, 500)};
    model.attention.kv_heads = between(rng, 1, 4);
    model.attention.heads = model.attention.kv_heads * between(rng, 1, 4);
    model.attention.head_dim = 2 * between(rng, 1, 16);
    model.attention.qk_norm = rng_below(rng, 2);
    model.attention.bias = rng_below(rng, 2);
    model.moe.experts = experts;
    model.moe.top_k = between(rng, 1, experts < 4 ? experts : 4);
    model.moe.expert_hidden = between(rng, 8, 100);
    model.moe.shared_experts = rng_below(rng, 3);
    model.moe.dense_layers = 1;
    model.moe.dense_hidden = between(rng, 8, 200);
    model.moe.bias = rng_below(rng, 2);
    if (rng_below(rng, 3) == 0) model.moe.capacity_factor = 0.5 + rng_uniform(rng);
    return model;
}

static struct cluster random_cluster(struct rng *rng) {
    struct cluster cluster = {.nodes = 6, .gpus_per_node = 8, .nics_per_node = 1 << rng_below(rng, 4)};
    cluster.spine.oversubscription = 1 + rng_below(rng, 2);
    cluster.nvlink.latency_s = 1e-6;
    cluster.nic.latency_s = 3e-6;
    for (int rate = 0; rate < RATE_COUNT; rate++) cluster.rates[rate] = varied(rng, 1e9, 3);
    for (int rate = RATE_GEMM; rate <= RATE_HEAD_GEMM; rate++) cluster.rates[rate] = varied(rng, 1e11, 3);
    cluster.rates[RATE_HBM] = varied(rng, 1e10, 10);
    cluster.rates[RATE_KERNEL_LAUNCH] = varied(rng, 1e-6, 3);
    cluster.rates[RATE_LAYER_OVERHEAD] = rng_below(rng, 2) ? varied(rng, 1e-5, 3) : 0;
    cluster.rates[RATE_GROUPED_TILE] = rng_below(rng, 3) ? 1 << rng_below(rng, 6) : 0;
    return cluster;
}

/* `count` GPUs from `first` on, in order. */
static struct side side_of(int *gpus, int first, int count) {
    for (int i = 0; i < count; i++) gpus[i] = first + i;
    return (struct side){.gpus = gpus, .count = count};
}

static void set_routing(struct rng *rng, struct scene *scene) {
    double sum = 0;
    bool balanced = rng_below(rng, 2);
    scene->point.routing = (struct routing){balanced ? "balanced" : "zipf:1", scene->share};
    for (int i = 0; i < scene->model.moe.experts; i++)
        sum += scene->share[i] = balanced ? 1 : rng_uniform(rng) * rng_uniform(rng);
    for (int i = 0; i < scene->model.moe.experts; i++) scene->share[i] /= sum;
}

static void make_scene(struct rng *rng, struct scene *scene) {
    *scene = (struct scene){.model = random_model(rng), .cluster = random_cluster(rng)};
    int experts = scene->model.moe.experts, cp = 1 << rng_below(rng, 3);
    scene->pipelined = rng_below(rng, 2);
    int most_runs = (scene->pipelined && experts < 16 ? experts : 16) / cp;
    if (most_runs == 0) cp = most_runs = 1;
    int m = cp * between(rng, 1, most_runs), n = between(rng, 1, experts < 16 ? experts : 16);
    struct side a = side_of(scene->gpus[0], rng_below(rng, 4), m);
    struct side f = scene->pipelined ? a : side_of(scene->gpus[1], 20 + rng_below(rng, 4), n);
    struct side next = scene->pipelined ? a : side_of(scene->gpus[2], rng_below(rng, 5), m);
    scene->sides = (struct sides){a, f, next};
    for (int i = 0; i < 2; i++)
        if (rng_below(rng, 2))
            scene->slow[scene->cluster.slow_count++] =
                (struct slow_gpu){rng_below(rng, 40), 0.3 + 0.5 * rng_uniform(rng)};
    scene->cluster.slow_gpus = scene->slow;
    scene->point.model = &scene->model;
    scene->point.cluster = &scene->cluster;
    scene->point.seq_len = 2 * cp * between(rng, 1, 40);
    scene->point.micro_batch_size = between(rng, 1, 3);
    set_routing(rng, scene);
    scene->plan.point = &scene->point;
    scene->plan.parallel.cp = cp;
    scene->plan.memory.grads = rng_below(rng, 2);
    scene->plan.memory.moments = rng_below(rng, 2);
    scene->plan.memory.expert_input = rng_below(rng, 2);
}

static struct recompute random_recompute(struct rng *rng) {
    return (struct recompute){rng_below(rng, ATTENTION_FULL + 1), rng_below(rng, FFN_FULL + 1), 0};
}

/* ---- formulas anew ----------------------------------------------------------------------------------- */

/* Every product takes the longer of its FLOPs and its operands; all else is added. */
static double seconds_of(const struct scene *scene, struct work work, bool backward, double speed) {
    const double *r = scene->cluster.rates;
    double seconds = work.core_flops / (backward ? r[RATE_CORE_BACKWARD] : r[RATE_CORE_FORWARD]);
    seconds += work.bytes / r[RATE_HBM];
    seconds += work.kernels * r[RATE_KERNEL_LAUNCH];
    for (int i = 0; i < work.product_count; i++) {
        struct matrix_product p = work.products[i];
        double rate = p.unit == UNIT_DENSE     ? r[RATE_GEMM]
                      : p.unit == UNIT_EXPERTS ? r[RATE_GROUPED_GEMM]
                                               : r[RATE_HEAD_GEMM];
        double computing = p.flops / rate, moving = p.bytes / r[RATE_HBM];
        seconds += computing > moving ? computing : moving;
    }
    return seconds / speed;
}

static double speed_of(const struct scene *scene, struct side side) {
    double speed = 1;
    for (int s = 0; s < scene->cluster.slow_count; s++)
        for (int i = 0; i < side.count; i++)
            if (side.gpus[i] == scene->slow[s].gpu) speed = fmin(speed, scene->slow[s].speed);
    return speed;
}

static double gradient_bytes(const struct scene *scene) {
    return scene->plan.memory.grads == PRECISION_BF16 ? 2 : 4;
}

static struct tokens tokens_of(const struct scene *scene) {
    return (struct tokens){scene->point.micro_batch_size, scene->point.seq_len, scene->plan.parallel.cp};
}

static double tokens_a_gpu(const struct scene *scene) {
    return 1.0 * scene->point.micro_batch_size * scene->point.seq_len / scene->plan.parallel.cp;
}

/* Which GPU of the side holds an expert: in order, the k-th ends at ⌊E (k + 1) ÷ N⌋. */
static int holder(const struct scene *scene, int expert) {
    int gpu = 0, count = scene->sides.ffn.count;
    while (expert >= scene->model.moe.experts * (gpu + 1) / count) gpu++;
    return gpu;
}

/* Copies that an expert takes, those behind its capacity dropped. */
static double expert_copies(const struct scene *scene, double all, int expert) {
    double factor = scene->model.moe.capacity_factor;
    double a_sequence = (double)scene->point.seq_len * scene->model.moe.top_k;
    double capacity = ceil(a_sequence * factor / scene->model.moe.experts * (1 - 1e-9));
    double most = all * fmin(scene->point.seq_len, capacity) / a_sequence;
    double wanted = all * scene->share[expert];
    return factor > 0 && wanted > most ? most : wanted;
}

static struct ffn_load load_of(const struct scene *scene, int layer, int gpu) {
    bool moe = layer >= scene->model.moe.dense_layers;
    double k = moe ? scene->model.moe.top_k : 1;
    double all = scene->sides.attention.count * tokens_a_gpu(scene) * k;
    double tile = scene->cluster.rates[RATE_GROUPED_TILE];
    struct ffn_load load = {0};
    if (!moe)
        load = (struct ffn_load){all / scene->sides.ffn.count, all / scene->sides.ffn.count, 1,
                                 all / scene->sides.ffn.count};
    for (int expert = 0; moe && expert < scene->model.moe.experts; expert++) {
        if (holder(scene, expert) != gpu) continue;
        double copies = expert_copies(scene, all, expert);
        load.experts++;
        load.copies += copies;
        load.rows += tile > 0 ? tile * ceil(copies / tile - 1e-9) : copies;
    }
    if (moe) load.tokens = load.copies / k; /* a token's shared experts run where its first choice does */
    if (scene->pipelined) load.tokens = tokens_a_gpu(scene);
    return load;
}

/* ---- computation ------------------------------------------------------------------------------------- */

/* Ring gather of a run's keys and values: the slowest run, each ring inside its nodes and between them. */
static double gather_seconds(const struct scene *scene) {
    int cp = scene->plan.parallel.cp, per_node = 8;
    double k_and_v = 2 * scene->model.attention.kv_heads * scene->model.attention.head_dim *
                     (scene->model.dtype == DTYPE_BF16 ? 2 : 4);
    double bytes = scene->point.micro_batch_size * scene->point.seq_len * k_and_v, slowest = 0;
    const double *r = scene->cluster.rates;
    for (int first = 0; cp > 1 && first < scene->sides.attention.count; first += cp) {
        const int *run = scene->sides.attention.gpus + first;
        int nodes = run[cp - 1] / per_node - run[0] / per_node + 1, here = 0; /* a run is contiguous */
        for (int i = 0; i < cp; i++) here += run[i] / per_node == run[0] / per_node;
        double most = here > cp - here ? here : cp - here, fewest = cp - most;
        double inside = (most - 1) / most * bytes / r[RATE_NVLINK_REDUCE];
        double seconds = (most - 1) * 1e-6 + inside;
        if (nodes == 2) {
            double nics = fewest * scene->cluster.nics_per_node / 8;
            double between_nodes =
                bytes / 2 / nics / (r[RATE_NIC_REDUCE] / scene->cluster.spine.oversubscription);
            seconds = (most - 1) * 1e-6 + 3e-6 + fmax(inside, between_nodes);
        }
        slowest = fmax(slowest, seconds);
    }
    return slowest;
}

static void test_attention(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED);
    int straddling = 0;
    for (int i = sampled(3000); i > 0; i--) {
        struct scene scene;
        make_scene(&rng, &scene);
        int layer = rng_below(&rng, 2);
        struct recompute recompute = random_recompute(&rng);
        struct layer_cost cost = plan_computation_cost(&scene.plan, layer, recompute, scene.sides);
        struct tokens tokens = tokens_of(&scene);
        double speed = speed_of(&scene, scene.sides.attention), gradient = gradient_bytes(&scene);
        double gather = gather_seconds(&scene), overhead = scene.cluster.rates[RATE_LAYER_OVERHEAD];
        const struct model *m = &scene.model;
        straddling += gather > 3e-6;
        struct work forward = model_attention_work(m, layer, WORK_FORWARD, tokens, gradient);
        struct work input = model_attention_work(m, layer, WORK_BACKWARD_INPUT, tokens, gradient);
        struct work weight = model_attention_work(m, layer, WORK_BACKWARD_WEIGHT, tokens, gradient);
        struct work again = model_attention_again_work(m, layer, recompute.attention, tokens);
        bool full = recompute.attention == ATTENTION_FULL;
        assert_near(cost.attention[PASS_FORWARD],
                    seconds_of(&scene, forward, false, speed) + overhead + gather);
        assert_near(cost.attention[PASS_BACKWARD],
                    seconds_of(&scene, input, true, speed) + overhead + 2 * gather);
        assert_near(cost.attention[PASS_WEIGHT], seconds_of(&scene, weight, true, speed));
        assert_near(cost.attention[PASS_RECOMPUTE],
                    seconds_of(&scene, again, false, speed) + (full ? overhead + gather : 0));
        assert_near(cost.gather[PASS_FORWARD], gather);
        assert_near(cost.gather[PASS_BACKWARD], 2 * gather);
        assert_near(cost.gather[PASS_RECOMPUTE], full ? gather : 0);
        assert_true(cost.gather[PASS_WEIGHT] == 0);
        assert_true(cost.dispatch.seconds == 0 && cost.combine.seconds == 0);
    }
    assert_true(straddling > 0);
}

/* The GPU with most rows sets the pace; of equals the one with most copies. */
static struct ffn_load busiest_of(const struct scene *scene, int layer) {
    struct ffn_load busiest = load_of(scene, layer, scene->sides.ffn.count - 1);
    for (int gpu = 0; gpu < scene->sides.ffn.count; gpu++) {
        struct ffn_load load = load_of(scene, layer, gpu);
        if (load.rows > busiest.rows * (1 + 1e-12) ||
            (load.rows > busiest.rows * (1 - 1e-12) && load.copies > busiest.copies * (1 + 1e-12)))
            busiest = load;
    }
    return busiest;
}

static void test_ffn(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 1);
    for (int i = sampled(3000); i > 0; i--) {
        struct scene scene;
        make_scene(&rng, &scene);
        int layer = rng_below(&rng, 2);
        struct recompute recompute = random_recompute(&rng);
        struct layer_cost cost = plan_layer_cost(&scene.plan, layer, recompute, scene.sides);
        struct ffn_load load = busiest_of(&scene, layer);
        double speed = speed_of(&scene, scene.sides.ffn), gradient = gradient_bytes(&scene);
        const struct model *m = &scene.model;
        struct work forward = model_ffn_work(m, layer, WORK_FORWARD, load, gradient);
        struct work again = model_ffn_again_work(m, layer, recompute.ffn, load);
        /* A pipelined system that drops both sides checkpoints the layer: all of it runs again. */
        if (scene.pipelined && recompute.attention == ATTENTION_FULL && recompute.ffn == FFN_FULL)
            again = forward;
        assert_near(cost.ffn[PASS_FORWARD], seconds_of(&scene, forward, false, speed));
        assert_near(
            cost.ffn[PASS_BACKWARD],
            seconds_of(&scene, model_ffn_work(m, layer, WORK_BACKWARD_INPUT, load, gradient), true, speed));
        assert_near(
            cost.ffn[PASS_WEIGHT],
            seconds_of(&scene, model_ffn_work(m, layer, WORK_BACKWARD_WEIGHT, load, gradient), true, speed));
        assert_near(cost.ffn[PASS_RECOMPUTE], seconds_of(&scene, again, false, speed));
    }
}

/* At equal tokens a GPU with all experts, of few rows each, is slower than one of 16 with an eighth. */
static void test_few_rows(void **state) {
    (void)state;
    struct experiment experiment;
    struct errors errors = {0};
    assert_true(experiment_read("experiments/speedup.json", NULL, 0, &experiment, &errors));
    const struct point *point = &experiment.points[experiment.point_count - 4]; /* Qwen3, 16 nodes, 4K */
    assert_int_equal(point->seq_len, 4096);
    assert_string_equal(point->model->name, "qwen3-235b-paper");
    int gpus[16];
    struct side one = side_of(gpus, 0, 1), sixteen = side_of(gpus, 0, 16);
    struct plan plan = {.point = point, .parallel = {.cp = 1}};
    struct recompute none = {0};
    struct layer_cost few = plan_layer_cost(&plan, 0, none, (struct sides){one, one, one});
    struct layer_cost many = plan_layer_cost(&plan, 0, none, (struct sides){sixteen, sixteen, sixteen});
    assert_true(few.ffn[PASS_WEIGHT] > 3.5 * many.ffn[PASS_WEIGHT]);
    assert_true(few.ffn[PASS_FORWARD] > 1.05 * many.ffn[PASS_FORWARD]);
    assert_near(few.attention[PASS_FORWARD], many.attention[PASS_FORWARD]);
    plan.memory.grads = PRECISION_BF16; /* half as much to add to */
    double bf16 = plan_layer_cost(&plan, 0, none, (struct sides){one, one, one}).ffn[PASS_WEIGHT];
    assert_true(few.ffn[PASS_WEIGHT] > 1.8 * bf16 && few.ffn[PASS_WEIGHT] < 2 * bf16);
    experiment_free(&experiment);
}

static void test_embedding_and_head(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 2);
    for (int i = sampled(500); i > 0; i--) {
        struct scene scene;
        make_scene(&rng, &scene);
        double tokens = between(&rng, 1, 4000), speed = 0.2 + 0.8 * rng_uniform(&rng);
        double gradient = gradient_bytes(&scene);
        const struct model *m = &scene.model;
        assert_near(plan_embed_cost(&scene.plan, false, tokens, speed),
                    seconds_of(&scene, model_embed_work(m, WORK_FORWARD, tokens), false, speed));
        assert_near(plan_embed_cost(&scene.plan, true, tokens, speed),
                    seconds_of(&scene, model_embed_work(m, WORK_BACKWARD_WEIGHT, tokens), true, speed));
        assert_near(plan_head_cost(&scene.plan, false, tokens, speed),
                    seconds_of(&scene, model_head_work(m, WORK_FORWARD, tokens, gradient), false, speed));
        assert_near(
            plan_head_cost(&scene.plan, true, tokens, speed),
            seconds_of(&scene, model_head_work(m, WORK_BACKWARD_INPUT, tokens, gradient), true, speed) +
                seconds_of(&scene, model_head_work(m, WORK_BACKWARD_WEIGHT, tokens, gradient), true, speed));
    }
}

/* ---- transfers --------------------------------------------------------------------------------------- */

static void assert_leg(struct transfer_cost found, struct traffic expected, double bytes_a_sender) {
    assert_near(found.seconds, expected.seconds);
    assert_near(found.bytes, bytes_a_sender);
}

static void test_transfers(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 3);
    for (int i = sampled(3000); i > 0; i--) {
        struct scene scene;
        make_scene(&rng, &scene);
        int layer = rng_below(&rng, 2), m = scene.sides.attention.count, n = scene.sides.ffn.count;
        int parts = between(&rng, 1, 4);
        struct recompute none = {0};
        struct layer_cost cost = plan_layer_cost(&scene.plan, layer, none, scene.sides);
        struct transfer_cost part = plan_combine_cost(&scene.plan, layer, scene.sides, parts);
        if (layer < scene.model.moe.dense_layers && scene.pipelined) { /* stays where it is */
            assert_true(cost.dispatch.seconds == 0 && cost.dispatch.bytes == 0);
            assert_true(cost.combine.seconds == 0 && part.seconds == 0);
            continue;
        }
        double copies[MOST_GPUS], even[MOST_GPUS], all = 0;
        double hidden = scene.model.hidden * (scene.model.dtype == DTYPE_BF16 ? 2.0 : 4.0);
        for (int gpu = 0; gpu < n; gpu++) all += copies[gpu] = load_of(&scene, layer, gpu).copies;
        for (int gpu = 0; gpu < n; gpu++) copies[gpu] /= all;
        for (int gpu = 0; gpu < m; gpu++) even[gpu] = 1.0 / m;
        struct ports experts = {scene.sides.ffn.gpus, copies, n, NULL, 0};
        struct ports tokens = {scene.sides.attention.gpus, even, m, NULL, 0};
        struct ports next = {scene.sides.next.gpus, even, m, NULL, 0};
        assert_leg(cost.dispatch, cluster_exchange(&scene.cluster, tokens, experts, all * hidden),
                   all * hidden / m);
        assert_leg(cost.combine, cluster_exchange(&scene.cluster, experts, next, all * hidden),
                   all * hidden / n);
        assert_leg(part, cluster_exchange(&scene.cluster, experts, next, all * hidden / parts),
                   all * hidden / n / parts);
        if (m > 1 || !scene.pipelined) assert_true(cost.dispatch.seconds > 0 && cost.combine.seconds > 0);
    }
}

/* ---- a table of costs -------------------------------------------------------------------------------- */

static void test_table(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 4);
    struct scene scene;
    struct cost_table table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, NULL};
    make_scene(&rng, &scene);
    scene.point.table = &table;
    assert_true(plan_usable_memory(&scene.point) == INFINITY);
    for (int a = 0; a <= ATTENTION_FULL; a++)
        for (int f = 0; f <= FFN_FULL; f++)
            for (int layer = 0; layer < 2; layer++) {
                struct layer_cost cost =
                    plan_layer_cost(&scene.plan, layer, (struct recompute){a, f, 0}, scene.sides);
                const double expected[] = {1, a == ATTENTION_FULL ? 1 : 0, 2, 3,
                                           4, f == FFN_FULL ? 4 : 0,       5, 6};
                static const int passes[] = {PASS_FORWARD, PASS_RECOMPUTE, PASS_BACKWARD, PASS_WEIGHT};
                for (int k = 0; k < 4; k++) {
                    assert_true(cost.attention[passes[k]] == expected[k]);
                    assert_true(cost.ffn[passes[k]] == expected[4 + k]);
                    assert_true(cost.gather[passes[k]] == 0);
                }
                assert_true(cost.dispatch.seconds == 7 && cost.combine.seconds == 8);
                assert_true(plan_combine_cost(&scene.plan, layer, scene.sides, 4).seconds == 2);
            }
    assert_true(plan_embed_cost(&scene.plan, false, 1, 1) == 10 &&
                plan_embed_cost(&scene.plan, true, 1, 1) == 11);
    assert_true(plan_head_cost(&scene.plan, false, 1, 1) == 12 &&
                plan_head_cost(&scene.plan, true, 1, 1) == 13);
    struct step_end end = plan_step_end(&scene.plan, NULL, 0);
    assert_true(end.grad_sync == 14 && end.param_gather == 15 && end.optimizer == 16);
    assert_true(end.sync_bytes == 0 && end.gather_bytes == 0);
}

/* ---- memory ------------------------------------------------------------------------------------------ */

static void assert_memory(const struct scene *scene, int layer, struct recompute recompute,
                          struct layer_memory found, struct ffn_load load) {
    const struct model *m = &scene->model;
    bool moe = layer >= m->moe.dense_layers;
    double tokens = tokens_a_gpu(scene), element = m->dtype == DTYPE_BF16 ? 2 : 4;
    double hidden = element * m->hidden, cp = scene->plan.parallel.cp;
    double k_and_v = 2 * element * m->attention.kv_heads * m->attention.head_dim;
    assert_near(found.layer_input, tokens * hidden);
    assert_near(found.expert_input, load.copies * hidden);
    assert_near(found.gathered, cp > 1 ? tokens * cp * k_and_v : 0); /* of the whole sequences */
    assert_near(found.attention, tokens * model_attention_activation_bytes(m, layer, recompute.attention));
    assert_near(found.full_attention, tokens * model_attention_activation_bytes(m, layer, ATTENTION_NONE));
    double routed = moe ? load.copies : 0;
    assert_near(found.ffn, routed * model_expert_activation_bytes(m, layer, recompute.ffn) +
                               load.tokens * model_shared_activation_bytes(m, layer, recompute.ffn));
    assert_near(found.full_ffn, routed * model_expert_activation_bytes(m, layer, FFN_NONE) +
                                    load.tokens * model_shared_activation_bytes(m, layer, FFN_NONE));
}

static void test_layer_memory(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 5);
    for (int i = sampled(2000); i > 0; i--) {
        struct scene scene;
        make_scene(&rng, &scene);
        int layer = rng_below(&rng, 2), n = scene.sides.ffn.count, fullest = n - 1;
        struct recompute recompute = random_recompute(&rng);
        for (int gpu = 0; gpu < n; gpu++) {
            if (load_of(&scene, layer, gpu).copies > load_of(&scene, layer, fullest).copies) fullest = gpu;
            assert_memory(&scene, layer, recompute,
                          plan_gpu_layer_memory(&scene.plan, layer, recompute, scene.sides, gpu),
                          load_of(&scene, layer, gpu));
        }
        assert_memory(&scene, layer, recompute, plan_layer_memory(&scene.plan, layer, recompute, scene.sides),
                      load_of(&scene, layer, fullest));
    }
}

static void test_usable_memory(void **state) {
    (void)state;
    struct cluster cluster = {.gpu.memory_bytes = 80e9};
    cluster.rates[RATE_MEMORY_RESERVE] = 3e9;
    struct cost_table table = {0};
    struct point point = {.cluster = &cluster};
    assert_true(plan_usable_memory(&point) == 77e9);
    point.table = &table;
    assert_true(plan_usable_memory(&point) == INFINITY);
}

/* ---- parameters and the step's end -------------------------------------------------------------------- */

/* Of one parameter, bytes: gradient, both moments, and the master weight beside a BF16 one. */
struct kept {
    double weight, gradient, moments, master;
};

static struct kept kept_of(const struct plan *plan) {
    bool narrow = plan->point->model->dtype == DTYPE_BF16;
    return (struct kept){narrow ? 2 : 4, plan->memory.grads == PRECISION_BF16 ? 2 : 4,
                         plan->memory.moments == PRECISION_BF16 ? 4 : 8, narrow ? 4 : 0};
}

static double ring_seconds(const struct scene *scene, const struct shard *shard, double bytes) {
    return cluster_reduce_seconds(&scene->cluster, shard->gpus, shard->count, bytes);
}

static void test_step_end(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 6);
    for (int i = sampled(2000); i > 0; i--) {
        struct scene scene;
        make_scene(&rng, &scene);
        scene.plan.memory.zero = rng_below(&rng, 2);
        scene.plan.memory.offload = rng_below(&rng, 2);
        bool sharded = scene.plan.memory.zero, offload = scene.plan.memory.offload;
        struct kept kept = kept_of(&scene.plan);
        const double *r = scene.cluster.rates;
        int gpus[MOST_GPUS];
        struct side all = side_of(gpus, 0, MOST_GPUS);
        struct shard shards[] = {{1e6 * rng_uniform(&rng), all.gpus, between(&rng, 1, 40)},
                                 {1e6 * rng_uniform(&rng), all.gpus, rng_below(&rng, 2) ? 1 : 8}};
        double held = 0, sync = 0, gather = 0, updated = 0, sync_bytes = 0, gather_bytes = 0;
        for (int k = 0; k < 2; k++) {
            double n = shards[k].parameters, holders = shards[k].count;
            double part = sharded ? n / holders : n; /* whose optimizer state stands here */
            held += n * (kept.weight + kept.gradient) + (offload ? 0 : part * (kept.master + kept.moments));
            updated += part;
            if (holders == 1) continue;
            /* A reduce-scatter; then an all-gather of the gradients, or of the weights behind the update. */
            sync += ring_seconds(&scene, &shards[k], n * kept.gradient) * (sharded ? 1 : 2);
            sync_bytes += n * kept.gradient * (sharded ? 1 : 2);
            if (sharded) gather += ring_seconds(&scene, &shards[k], n * kept.weight);
            if (sharded) gather_bytes += n * kept.weight;
        }
        assert_near(plan_static_bytes(&scene.plan, shards, 2), held);
        struct step_end end = plan_step_end(&scene.plan, shards, 2);
        assert_near(end.grad_sync, sync);
        assert_near(end.param_gather, gather);
        assert_near(end.sync_bytes, sync_bytes);
        assert_near(end.gather_bytes, gather_bytes);
        /* Read: gradient, master or weight, moments; written: those but the gradient, and a BF16 weight. */
        double master = kept.master ? kept.master : kept.weight, copy = kept.master ? kept.weight : 0;
        double traffic = kept.gradient + 2 * master + 2 * kept.moments + copy;
        double optimizer = updated * traffic / r[RATE_HBM] + r[RATE_KERNEL_LAUNCH];
        if (offload) /* both directions of the host link, and the update, side by side */
            optimizer = fmax(fmax(kept.gradient, kept.weight) * updated / r[RATE_HOST_COPY],
                             updated / r[RATE_HOST_ADAM]);
        assert_near(end.optimizer, optimizer);
    }
}

/* ---- sizes ------------------------------------------------------------------------------------------- */

/* As few whole micro-batches as hold the batch; no replica without work. */
static void test_sizes(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 7);
    for (int i = sampled(3000); i > 0; i--) {
        struct cluster cluster = {.nodes = between(&rng, 1, 8), .gpus_per_node = 8, .nics_per_node = 8};
        int cp = 1 << rng_below(&rng, 3), a = cp * between(&rng, 1, 8), replica = a + rng_below(&rng, 20);
        struct point point = {.cluster = &cluster, .micro_batch_size = between(&rng, 1, 3)};
        bool batch = rng_below(&rng, 2);
        if (batch)
            point.global_batch = between(&rng, 1, 500);
        else
            point.micro_batches = between(&rng, 1, 50);
        struct plan plan = {.point = &point, .parallel.cp = cp};
        bool fits = plan_size(&plan, replica, a);
        assert_true(fits == (replica <= cluster_gpus(&cluster)));
        if (!fits) continue;
        int each = a / cp * point.micro_batch_size, most = cluster_gpus(&cluster) / replica;
        assert_int_equal(plan.gpus, plan.replicas * replica);
        if (!batch) {
            assert_true(plan.replicas == most && plan.micro_batches == point.micro_batches);
            assert_true(plan.sequences == (double)each * plan.micro_batches * plan.replicas);
            continue;
        }
        assert_true(plan.sequences == point.global_batch);
        assert_true(plan.replicas >= 1 && plan.replicas <= most);
        assert_true(plan.replicas == most || plan.replicas * each >= point.global_batch);
        assert_true((plan.replicas - 1) * each < point.global_batch);
        assert_true(plan.replicas * plan.micro_batches * each >= point.global_batch);
        assert_true(plan.replicas * (plan.micro_batches - 1) * each < point.global_batch);
    }
}

static void test_tokens(void **state) {
    (void)state;
    struct point point = {.micro_batch_size = 3, .seq_len = 4096};
    struct plan plan = {.point = &point, .parallel.cp = 1};
    assert_true(plan_tokens(&plan) == 12288);
    plan.parallel.cp = 8;
    assert_true(plan_tokens(&plan) == 1536);
}

/* ---- what is impossible -------------------------------------------------------------------------------- */

struct impossible {
    const struct system *system;
    struct parallel parallel;
    const char *message;
};

/* 4 layers, 8 experts, 2 nodes of 8 GPUs, 96 tokens a sequence, 32 sequences a step. */
static void test_impossible_layouts(void **state) {
    (void)state;
    static const struct impossible cases[] = {
        {&megatron, {.pp = 5}, "parallel.pp: found 5; at most the model's 4 layers are allowed"},
        {&megatron,
         {.pp = 2, .vpp = 3},
         "parallel.vpp: found pp 2 × vpp 3; at most the model's 4 layers are allowed"},
        {&megatron, {.ep = 9}, "parallel.ep: found 9; at most the model's 8 experts are allowed"},
        {&megatron,
         {.ep = 8, .pp = 3},
         "parallel.pp: found pp 3 × ep 8; at most the cluster's 16 GPUs are allowed"},
        {&megatron, {.ep = 6, .cp = 4}, "parallel.cp: found 4; a divisor of ep 6 is allowed"},
        {&megatron,
         {.ep = 5, .cp = 5},
         "parallel.cp: found 5 with seq_len 96; a multiple of 2 × cp tokens a sequence is allowed"},
        {&megatron,
         {.pp = 2, .vpp = 2, .ep = 6},
         "parallel.vpp: found 2 with 9 micro-batches; above 1 the micro-batches must be divisible by pp 2"},
        {&disagmoe, {.groups = 5}, "parallel.groups: found 5; at most the model's 4 layers are allowed"},
        {&disagmoe, {.ffn_gpus = 9}, "parallel.ffn_gpus: found 9; at most the model's 8 experts are allowed"},
        {&disagmoe,
         {.groups = 2, .attn_gpus = 5, .ffn_gpus = 4},
         "parallel.groups: found 2 groups of 5 + 4 GPUs; at most the cluster's 16 GPUs are allowed"},
        {&disagmoe,
         {.attn_gpus = 16},
         "parallel.attn_gpus: found 1 groups of 16 + 1 GPUs; at most the cluster's 16 GPUs are allowed"},
        {&disagmoe,
         {.attn_gpus = 4, .ffn_gpus = 4, .cp = 3},
         "parallel.cp: found 3; a divisor of attn_gpus 4 is allowed"},
        {&disagmoe,
         {.attn_gpus = 9, .ffn_gpus = 7},
         "placement: found split-nodes; 9 A-GPUs and 7 F-GPUs on nodes of their own do not fit the cluster's "
         "2 nodes"},
        {&disagmoe,
         {.attn_gpus = 4, .ffn_gpus = 4, .attn_nics = 9, .ffn_nics = 8},
         "parallel.attn_nics: found 9 and 8 NICs a group, 1 groups in all; they need 3 nodes, the cluster "
         "has 2"},
        {&disagmoe,
         {.groups = 2, .attn_gpus = 2, .ffn_gpus = 2, .ffn_nics = 5},
         "parallel.ffn_nics: found 0 and 5 NICs a group, 2 groups in all; they need 3 nodes, the cluster has "
         "2"},
        {&disagmoe, {.attn_gpus = 8, .ffn_gpus = 8, .cp = 8}, NULL},
        {&megatron, {.pp = 4, .vpp = 1, .ep = 4, .cp = 4}, NULL},
        {&megatron, {.pp = 2, .vpp = 2, .ep = 8}, NULL},
    };
    struct model model = {.name = "m", .layers = 4, .hidden = 8, .vocab = 16};
    model.moe.experts = 8, model.moe.top_k = 2, model.moe.expert_hidden = 8;
    model.attention.heads = model.attention.kv_heads = 2, model.attention.head_dim = 4;
    struct cluster cluster = {.nodes = 2, .gpus_per_node = 8, .nics_per_node = 8};
    struct point point = {.model = &model, .cluster = &cluster, .seq_len = 96, .micro_batch_size = 1};
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct errors errors = {0};
        struct plan plan = {.point = &point, .parallel = cases[i].parallel};
        point.global_batch = cases[i].parallel.ep == 6 && cases[i].parallel.vpp ? 54 : 32;
        bool possible = cases[i].system->size(&plan, &errors);
        if (!cases[i].message && !possible) fail_msg("%s", errors.messages[0]);
        if (cases[i].message) {
            if (possible) fail_msg("possible, where expected: %s", cases[i].message);
            assert_int_equal(errors.count, 1);
            assert_string_equal(errors.messages[0], cases[i].message);
        }
        errors_free(&errors);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention),    cmocka_unit_test(test_ffn),
        cmocka_unit_test(test_few_rows),     cmocka_unit_test(test_embedding_and_head),
        cmocka_unit_test(test_transfers),    cmocka_unit_test(test_table),
        cmocka_unit_test(test_layer_memory), cmocka_unit_test(test_usable_memory),
        cmocka_unit_test(test_step_end),     cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_tokens),       cmocka_unit_test(test_impossible_layouts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
