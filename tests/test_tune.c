/*
How good the tuner is: on random small points its plan against an exhaustive search of the same space, and
what must not happen when a point gets better: more memory, a faster link or faster kernels never make a tuned
plan slower by more than a little.

The exhaustive search lists the space on its own: every layout, placement, level of recomputation on each side
in every number of layers, expert input, state and order. It leaves out only what a lower bound or the plan to
be beaten rules out. Random cases come from a fixed seed; DISAGMOE_SAMPLE=N runs one N-th of them,
DISAGMOE_LONG=1 all that the figures in the README are of.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "sim/sim.h"
#include "tests/cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SEED 20260701
#define NEAR 1.01   /* a tuned plan is at most this much slower than the best */
#define LATER 1.005 /* than before the point got better */

/* ---- random points ----------------------------------------------------------------------------------- */

static int cases(int few, int many) {
    return sampled(getenv("DISAGMOE_LONG") ? many : few);
}

static int between(struct rng *rng, int low, int high) {
    return low + rng_below(rng, high - low + 1);
}

#define CHOOSE(rng, ...)                                                                                     \
    ((const char *const[]){__VA_ARGS__}[rng_below(rng, COUNT(((const char *const[]){__VA_ARGS__})))])

/* value × up to `factor` in either direction */
static double varied(struct rng *rng, double value, double factor) {
    return value * pow(factor, 2 * rng_uniform(rng) - 1);
}

static void add_cluster(struct text *text, struct rng *rng, int most_gpus) {
    static const char *const varied_rates[] = {
        "gemm",         "core_attention_forward", "grouped_gemm", "hbm", "nvlink_exchange",
        "nic_exchange", "nvlink_reduce",          "nic_reduce"};
    struct errors errors = {0};
    struct arena *arena = arena_new();
    struct json cluster = json_read_file("experiments/clusters/h800-16x8.json", arena, &errors);
    if (errors.count) fail_msg("%s", errors.messages[0]);
    int per_node = between(rng, 1, 4), nodes = between(rng, 1, most_gpus / per_node);
    json_set_path(cluster.node, "nodes", json_number(nodes));
    json_set_path(cluster.node, "gpus_per_node", json_number(per_node));
    json_set_path(cluster.node, "nics_per_node", json_number(per_node));
    for (size_t i = 0; i < COUNT(varied_rates); i++) {
        cJSON *rate = cJSON_GetObjectItem(cJSON_GetObjectItem(cluster.node, "rates"), varied_rates[i]);
        cJSON *value = cJSON_GetObjectItem(rate, "value");
        cJSON_SetNumberValue(value, varied(rng, 0.5 * value->valuedouble, 2));
    }
    char *printed = cJSON_PrintUnformatted(cluster.node);
    text_add(text, "\"cluster\":%s,", printed);
    cJSON_free(printed);
    cJSON_Delete(cluster.node);
    arena_free(arena);
}

/* Everything is open but, at times, a state. */
static struct experiment random_point(struct rng *rng, int most_gpus, int most_layers, int most_batch) {
    struct text text = {0};
    int experts = 1 << between(rng, 1, 4), heads = 1 << between(rng, 2, 5);
    text_add(
        &text,
        "{\"model\":{\"name\":\"small\",\"layers\":%d,\"hidden\":%d,\"vocab\":%d,\"attention\":{\"heads\":%d,"
        "\"kv_heads\":%d,\"head_dim\":64},\"moe\":{\"experts\":%d,\"top_k\":%d,\"expert_hidden\":%d,"
        "\"dense_layers\":%d,\"dense_hidden\":2048,\"shared_experts\":%d}},",
        between(rng, 2, most_layers), 512 * between(rng, 1, 8), 1000 * between(rng, 1, 60), heads,
        heads / (1 << rng_below(rng, 3)), experts, between(rng, 1, experts < 4 ? experts : 4),
        256 * between(rng, 1, 10), rng_below(rng, 4) == 0, rng_below(rng, 4) == 0);
    add_cluster(&text, rng, most_gpus);
    text_add(&text, "\"memory\":{\"grads\":\"%s\",\"moments\":\"%s\",\"offload\":%s},",
             CHOOSE(rng, "fp32", "bf16"), CHOOSE(rng, "auto", "fp32"), CHOOSE(rng, "false", "false", "true"));
    text_add(&text, "\"systems\":[\"megatron\",\"disagmoe\"],\"seq_len\":%d,\"global_batch\":%d}",
             1024 * (1 << rng_below(rng, 5)), between(rng, 1, most_batch));
    struct experiment experiment;
    struct errors errors = {0};
    if (!experiment_read_text(text.text, "experiments/test.json", &experiment, &errors))
        fail_msg("%s in %s", errors.count ? errors.messages[0] : "no message", text.text);
    free(text.text);
    /* As much memory as makes it bind at times: some multiple of what the parameters take on all GPUs. */
    struct point *point = &experiment.points[0];
    double parameters = 18 * model_parameter_count(point->model).total / cluster_gpus(point->cluster);
    double activations = 40.0 * point->seq_len * point->model->layers * model_hidden_bytes(point->model);
    point->cluster->gpu.memory_bytes =
        point->cluster->rates[RATE_MEMORY_RESERVE] + varied(rng, parameters, 2) + varied(rng, activations, 4);
    return experiment;
}

/* ---- the exhaustive search --------------------------------------------------------------------------- */

struct hunt {
    const struct system *system;
    const struct point *point;
    double best; /* seconds per sequence; only what is quicker counts */
    struct plan plan;
    int64_t tried;
};

static void try_state(struct hunt *hunt, struct plan plan) {
    struct bound bound = plan_bound(hunt->system, &plan);
    double usable = plan_usable_memory(hunt->point), limit = hunt->best * plan.sequences;
    struct result result;
    if (bound.seconds >= limit || bound.bytes > usable) return;
    hunt->tried++;
    if (!simulate_before(hunt->system, &plan, limit, &result, NULL, NULL) || result.oom) return;
    if (result.step_time >= limit) return;
    hunt->best = result.step_time / plan.sequences;
    hunt->plan = plan;
}

static void try_states(struct hunt *hunt, struct plan plan) {
    int given = hunt->point->memory_given;
    for (int moments = 0; moments < (given & MEMORY_MOMENTS ? 1 : 2); moments++)
        for (int zero = 0; zero < 2; zero++) {
            struct plan tried = plan;
            tried.memory.grads = hunt->point->memory.grads;
            tried.memory.moments = given & MEMORY_MOMENTS ? hunt->point->memory.moments : moments;
            tried.memory.zero = zero;
            tried.memory.offload = hunt->point->memory.offload;
            try_state(hunt, tried);
        }
}

static void try_orders(struct hunt *hunt, struct plan plan) {
    int all = plan.micro_batches;
    plan.order = hunt->point->order;
    if (!hunt->system->searches_order) try_states(hunt, plan);
    for (int wave = 1; wave <= all && hunt->system->searches_order; wave++)
        for (int waves = 1; wave * (waves - 1) < all; waves++)
            for (int policy = 0; policy < 4 * PREFER_COUNT; policy++) {
                plan.order = (struct order){wave, waves, policy / 4, policy / 2 % 2, policy % 2, 0};
                try_states(hunt, plan);
            }
}

static void try_levers(struct hunt *hunt, struct plan plan) {
    int parts = plan.parallel.groups ? plan.parallel.groups : plan.parallel.pp;
    int layers = (hunt->point->model->layers + parts - 1) / parts;
    for (int attention = 0; attention <= ATTENTION_FULL; attention++)
        for (int ffn = 0; ffn <= FFN_FULL; ffn++)
            for (int input = 0; input < 2; input++)
                for (int n = 0; n < (attention || ffn ? layers : 1); n++) {
                    plan.memory = (struct memory){.recompute = {attention, ffn, n}, .expert_input = input};
                    try_orders(hunt, plan);
                }
}

static struct hunt exhaust(const struct system *system, const struct point *point, double better_than) {
    struct hunt hunt = {.system = system, .point = point, .best = better_than};
    int count = system->layouts(point, NULL, 0);
    struct parallel *layouts = must_alloc((size_t)(count + 1) * sizeof *layouts);
    system->layouts(point, layouts, count);
    for (int i = 0; i < count; i++)
        for (int placement = 0; placement <= system->uses_placement; placement++) {
            struct plan plan = {.point = point, .parallel = layouts[i], .placement = placement};
            struct errors ignored = {0};
            if (system->size(&plan, &ignored) && (!system->settle || system->settle(&plan, &ignored)))
                try_levers(&hunt, plan);
            errors_free(&ignored);
        }
    free(layouts);
    return hunt;
}

/* Seconds per sequence of the tuned plan; INFINITY where nothing fits, or a ring has too few GPUs. */
static double tuned(const struct system *system, const struct point *point, struct plan *plan) {
    struct errors errors = {0};
    bool feasible = false;
    struct result result;
    bool possible = tune_point(system, point, plan, &feasible, &errors);
    if (!possible && cluster_gpus(point->cluster) > 1) fail_msg("%s", errors.messages[0]);
    errors_free(&errors);
    if (!possible || !feasible) return INFINITY;
    simulate_plan(system, plan, &result, NULL, NULL);
    assert_false(result.oom);
    return result.step_time / plan->sequences;
}

static void describe(const char *what, const struct plan *plan, double seconds) {
    const struct parallel *p = &plan->parallel;
    const struct memory *m = &plan->memory;
    print_message(
        "  %s: %.6g s, pp%d v%d ep%d p%d %d+%d cp%d nics %d+%d %s, recompute %d %d in %d, input %d, "
        "zero %d, moments %d, order %d x %d %d %d %d, %d micro-batches\n",
        what, seconds, p->pp, p->vpp, p->ep, p->groups, p->attn_gpus, p->ffn_gpus, p->cp, p->attn_nics,
        p->ffn_nics, plan->placement ? "mixed" : "split", m->recompute.attention, m->recompute.ffn,
        m->recompute.layers, m->expert_input, m->zero, m->moments, plan->order.wave,
        plan->order.waves_in_flight, plan->order.prefer, plan->order.patient, plan->order.justified,
        plan->micro_batches);
}

static void test_tuned_plans_are_near_the_best(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED);
    int count = cases(10, 220), off = 0;
    double worst = 1;
    for (int i = 0; i < count; i++) {
        struct experiment experiment = random_point(&rng, 6, 4, 6);
        const struct point *point = &experiment.points[0];
        for (int k = 0; k < point->system_count; k++) {
            const struct system *system = system_named(point->systems[k]);
            struct plan plan;
            double found = tuned(system, point, &plan);
            struct hunt hunt = exhaust(system, point, found);
            if (hunt.best < found) {
                worst = fmax(worst, found / hunt.best);
                if (found > NEAR * hunt.best) {
                    off++;
                    print_message("case %d, %s: %.3f times the best (%ld tried)\n", i, system->name,
                                  found / hunt.best, (long)hunt.tried);
                    if (found < INFINITY) describe("tuned", &plan, found);
                    describe("best ", &hunt.plan, hunt.best);
                }
            }
        }
        experiment_free(&experiment);
    }
    print_message("%d points, both systems: at most %.4f times the exhaustive search's best\n", count, worst);
    assert_int_equal(off, 0);
}

/* ---- a better point is no slower --------------------------------------------------------------------- */

/* Makes one thing of a cluster better by a factor. */
static const char *improve(struct rng *rng, struct cluster *cluster, double *factor) {
    static const struct {
        const char *what;
        enum rate rates[3];
    } choices[] = {{"memory", {RATE_COUNT}},
                   {"NICs", {RATE_NIC_EXCHANGE, RATE_NIC_REDUCE, RATE_COUNT}},
                   {"NVLink", {RATE_NVLINK_EXCHANGE, RATE_NVLINK_REDUCE, RATE_COUNT}},
                   {"matrix products", {RATE_GEMM, RATE_HEAD_GEMM, RATE_GROUPED_GEMM}},
                   {"attention", {RATE_CORE_FORWARD, RATE_CORE_BACKWARD, RATE_COUNT}},
                   {"HBM", {RATE_HBM, RATE_COUNT}}};
    int choice = rng_below(rng, (int)COUNT(choices));
    *factor = 1 + pow(10, -2.5 + 2 * rng_uniform(rng)); /* 1.003 to 1.3 */
    if (choice == 0) cluster->gpu.memory_bytes *= *factor;
    for (int i = 0; i < 3 && choices[choice].rates[i] != RATE_COUNT; i++)
        cluster->rates[choices[choice].rates[i]] *= *factor;
    return choices[choice].what;
}

static void test_better_points_are_no_slower(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 1);
    int count = cases(24, 600), off = 0;
    double worst = 1;
    for (int i = 0; i < count; i++) {
        struct experiment experiment = random_point(&rng, 12, 8, 16);
        struct point better = experiment.points[0];
        struct cluster cluster = *better.cluster;
        double factor;
        const char *what = improve(&rng, &cluster, &factor);
        better.cluster = &cluster;
        for (int k = 0; k < better.system_count; k++) {
            const struct system *system = system_named(better.systems[k]);
            struct plan plan, after;
            double before = tuned(system, &experiment.points[0], &plan), now = tuned(system, &better, &after);
            if (now == INFINITY && before == INFINITY) continue;
            worst = fmax(worst, now / before);
            if (now <= LATER * before) continue;
            off++;
            print_message("case %d, %s: %s %.4f times better, %.4f times slower\n", i, system->name, what,
                          factor, now / before);
            describe("before", &plan, before);
            describe("after ", &after, now);
        }
        experiment_free(&experiment);
    }
    print_message("%d points, both systems: at most %.4f times slower\n", count, worst);
    assert_int_equal(off, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tuned_plans_are_near_the_best),
        cmocka_unit_test(test_better_points_are_no_slower),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
