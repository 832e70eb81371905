/*
The simulator and the tuner: closed forms under a table of costs, the efficiency the paper's section-3 ratios
allow, what each memory lever saves, and on random manifests what must hold for every plan of every system.

Random cases come from a fixed seed; DISAGMOE_SAMPLE=N runs one N-th of them. Everything runs from the
repository's root, whose cluster file lends its rates.
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

#define CASES 2000 /* manifests of the property test */
#define SEED 20250511
#define EXACT 1e-9

/* ---- help -------------------------------------------------------------------------------------------- */

/* `low` is not above `high`, rounding aside. */
static void assert_at_most(double low, double high, const char *what) {
    if (!(low <= high * (1 + EXACT))) fail_msg("%s: %.17g is above %.17g", what, low, high);
}

static void assert_no_errors(struct errors *errors) {
    if (errors->count) fail_msg("unexpected: %s", errors->messages[0]);
}

/* Reads a manifest's text; the experiment belongs to the caller. */
static struct experiment read_text(const char *text) {
    struct experiment experiment;
    struct errors errors = {0};
    if (!experiment_read_text(text, "experiments/test.json", &experiment, &errors))
        fail_msg("%s in %s", errors.count ? errors.messages[0] : "no message", text);
    assert_no_errors(&errors);
    return experiment;
}

/* A model of `layers` layers, small in everything else. */
static void add_plain_model(struct text *text, int layers) {
    text_add(text,
             "\"model\":{\"name\":\"plain\",\"layers\":%d,\"hidden\":256,\"vocab\":1000,\"attention\":{"
             "\"heads\":4,\"kv_heads\":2,\"head_dim\":64},\"moe\":{\"experts\":16,\"top_k\":2,"
             "\"expert_hidden\":512}},",
             layers);
}

static void add_cluster(struct text *text, int nodes, int gpus_per_node) {
    struct errors errors = {0};
    struct arena *arena = arena_new();
    struct json cluster = json_read_file("experiments/clusters/h800-16x8.json", arena, &errors);
    assert_no_errors(&errors);
    json_set_path(cluster.node, "nodes", json_number(nodes));
    json_set_path(cluster.node, "gpus_per_node", json_number(gpus_per_node));
    json_set_path(cluster.node, "nics_per_node", json_number(gpus_per_node));
    char *printed = cJSON_PrintUnformatted(cluster.node);
    text_add(text, "\"cluster\":%s,", printed);
    cJSON_free(printed);
    cJSON_Delete(cluster.node);
    arena_free(arena);
}

/* A point of the plain model on nodes of 8 GPUs; `rest` ends the manifest. */
static struct experiment plain(int layers, int nodes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static struct experiment plain(int layers, int nodes, const char *format, ...) {
    char rest[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(rest, sizeof rest, format, arguments);
    va_end(arguments);
    struct text text = {0};
    text_add(&text, "{");
    add_plain_model(&text, layers);
    add_cluster(&text, nodes, 8);
    text_add(&text, "\"systems\":[\"megatron\",\"disagmoe\"],\"seq_len\":1024,%s}", rest);
    struct experiment experiment = read_text(text.text);
    free(text.text);
    return experiment;
}

struct outcome {
    struct result result;
    struct schedule *schedule;
    struct timeline timeline;
};

/* Tunes the point for the system and simulates the choice. */
static struct outcome simulate(const struct point *point, const char *system) {
    struct outcome outcome = {0};
    struct errors errors = {0};
    struct plan plan;
    bool feasible = false;
    tune_point(system_named(system), point, &plan, &feasible, &errors);
    assert_no_errors(&errors);
    assert_true(feasible);
    simulate_plan(system_named(system), &plan, &outcome.result, &outcome.schedule, &outcome.timeline);
    return outcome;
}

static void outcome_free(struct outcome *outcome) {
    schedule_free(outcome->schedule);
    timeline_free(&outcome->timeline);
}

/* ---- closed forms of 1F1B ---------------------------------------------------------------------------- */

#define FORWARD_LAYER (0.3 + 0.7)            /* seconds of a layer */
#define BACKWARD_LAYER (0.5 + 0.25 + 1 + .5) /* input and weight halves of both components */
#define TABLE                                                                                                \
    "\"costs\":{\"attn_fwd_s\":0.3,\"attn_bwd_s\":0.5,\"attn_wgrad_s\":0.25,\"ffn_fwd_s\":0.7,"              \
    "\"ffn_bwd_s\":1,\"ffn_wgrad_s\":0.5}"

static double megatron_seconds(int layers, int pp, int vpp, int micro_batches) {
    struct experiment experiment =
        plain(layers, 2, "\"micro_batches\":%d,\"parallel\":{\"pp\":%d,\"vpp\":%d,\"ep\":1}," TABLE,
              micro_batches, pp, vpp);
    struct outcome outcome = simulate(&experiment.points[0], "megatron");
    double seconds = outcome.result.step_time;
    outcome_free(&outcome);
    experiment_free(&experiment);
    return seconds;
}

static void test_1f1b(void **state) {
    (void)state;
    static const int micro_batches[] = {1, 2, 3, 4, 7, 8, 16, 33};
    for (int p = 1; p <= 8; p++)
        for (size_t i = 0; i < COUNT(micro_batches); i++)
            for (int per_stage = 1; per_stage <= 3; per_stage += 2) {
                int m = micro_batches[i];
                double stage = per_stage * (FORWARD_LAYER + BACKWARD_LAYER);
                assert_within(megatron_seconds(p * per_stage, p, 1, m), (m + p - 1) * stage, EXACT);
            }
}

/* Each of v chunks is a v-th of a stage: the bubble is (p − 1)(t_f + t_b) ÷ v. */
static void test_interleaved(void **state) {
    (void)state;
    for (int p = 2; p <= 8; p *= 2)
        for (int v = 1; v <= 4; v++)
            for (int rounds = 1; rounds <= 5; rounds += 2) {
                int m = rounds * p, layers = p * v * 2;
                double stage = 2 * v * (FORWARD_LAYER + BACKWARD_LAYER);
                assert_within(megatron_seconds(layers, p, v, m), m * stage + (p - 1) * stage / v, EXACT);
            }
}

static void test_one_stage(void **state) {
    (void)state;
    struct experiment experiment =
        plain(5, 1, "\"micro_batches\":7,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":8}," TABLE);
    struct outcome outcome = simulate(&experiment.points[0], "megatron");
    assert_within(outcome.result.step_time, 7 * 5 * (FORWARD_LAYER + BACKWARD_LAYER), EXACT);
    assert_within(outcome.result.efficiency, 1, EXACT);
    assert_within(outcome.result.breakdown.attention, 7 * 5 * (0.3 + 0.5 + 0.25), EXACT);
    assert_within(outcome.result.breakdown.ffn, 7 * 5 * (0.7 + 1 + 0.5), EXACT);
    assert_true(fabs(outcome.result.breakdown.bubble) < EXACT);
    outcome_free(&outcome);
    experiment_free(&experiment);
}

/* ---- 1F1B with unequal stages ------------------------------------------------------------------------ */

#define MAX_STAGES 8
#define MAX_MICRO_BATCHES 32

/* The textbook's 1F1B worked out by its own recurrence: stage s runs p − s − 1 forwards, then a forward and a
   backward in turn, then the backwards left; a forward waits for the stage before, a backward for the one
   behind. */
static double textbook_1f1b(const double *forward, const double *backward, int p, int m) {
    double done[2][MAX_STAGES][MAX_MICRO_BATCHES], now[MAX_STAGES] = {0}, last = 0;
    int count[2][MAX_STAGES] = {{0}};
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < p; s++) {
            int f = count[0][s], b = count[1][s], ahead = p - s - 1 < m ? p - s - 1 : m;
            bool is_backward = f == m || f - b > ahead;
            if (b == m || (!is_backward && s > 0 && count[0][s - 1] <= f) ||
                (is_backward && s < p - 1 && count[1][s + 1] <= b))
                continue;
            double ready = is_backward ? (s < p - 1 ? done[1][s + 1][b] : done[0][s][b])
                                       : (s > 0 ? done[0][s - 1][f] : 0);
            int i = count[is_backward][s]++;
            now[s] = fmax(now[s], ready) + (is_backward ? backward[s] : forward[s]);
            done[is_backward][s][i] = now[s];
            last = fmax(last, now[s]);
            moved = true;
        }
    }
    return last;
}

/* Seconds of micro-batch 0 in each stage, and the layers each holds. */
static void read_stages(const struct schedule *schedule, double *forward, double *backward, int *layers) {
    for (int op = 0; op < schedule->op_count; op++) {
        const struct operation *it = &schedule->ops[op];
        int stage = it->lanes[0] / RESOURCE_COUNT;
        if (it->micro_batch != 0 || it->lane_count != 1) continue;
        (it->pass == PASS_FORWARD ? forward : backward)[stage] += it->duration;
        layers[stage] += it->kind == KIND_ATTENTION && it->pass == PASS_FORWARD;
    }
}

static void check_unequal(int layers, int p, int m, const char *ends, bool even) {
    struct experiment experiment =
        plain(layers, 1,
              "\"micro_batches\":%d,\"parallel\":{\"pp\":%d,\"vpp\":1,\"ep\":1},\"costs\":{\"attn_fwd_s\":1,"
              "\"attn_bwd_s\":2,\"ffn_fwd_s\":1.5,\"ffn_bwd_s\":2.5,\"ffn_wgrad_s\":0.5%s}",
              m, p, ends);
    struct outcome outcome = simulate(&experiment.points[0], "megatron");
    double forward[MAX_STAGES] = {0}, backward[MAX_STAGES] = {0};
    int held[MAX_STAGES] = {0}, sum = 0;
    read_stages(outcome.schedule, forward, backward, held);
    for (int s = 0; s < p; s++) {
        if (even) assert_in_range(held[s], layers / p, (layers + p - 1) / p);
        sum += held[s];
    }
    assert_int_equal(sum, layers);
    assert_within(outcome.result.step_time, textbook_1f1b(forward, backward, p, m), EXACT);
    outcome_free(&outcome);
    experiment_free(&experiment);
}

static void test_unequal_stages(void **state) {
    (void)state;
    for (int p = 2; p <= 8; p++)
        for (int layers = p; layers <= 3 * p; layers += 1 + p / 3)
            for (int m = 1; m <= 17; m += 4) {
                check_unequal(layers, p, m, "", true);
                check_unequal(layers, p, m,
                              ",\"embed_fwd_s\":0.25,\"embed_bwd_s\":0.5,\"head_fwd_s\":3,\"head_bwd_s\":5",
                              false);
            }
    /* The recurrence itself, by hand: two stages of 1 + 1 and 2 + 2 seconds, two micro-batches. */
    assert_within(textbook_1f1b((double[]){1, 2}, (double[]){1, 2}, 2, 2), 1 + 2 * 4 + 1, EXACT);
}

/* ---- DisagMoE under the ratios of section 3 ---------------------------------------------------------- */

/* As the list-scheduler finds it, nothing searched. */
#define PLAIN "\"patient\":false,\"justified\":false}"

static double best_efficiency(int seq_len, double f) {
    static const char *const orders[] = {"{\"wave\":16,\"waves_in_flight\":4,\"prefer\":\"backward\"," PLAIN,
                                         "{\"wave\":16,\"waves_in_flight\":3,\"prefer\":\"forward\"," PLAIN,
                                         "{\"wave\":16,\"waves_in_flight\":3,\"prefer\":\"backward\"," PLAIN,
                                         "{\"wave\":16,\"waves_in_flight\":1,\"prefer\":\"wave\"," PLAIN,
                                         "{\"wave\":64,\"waves_in_flight\":1,\"prefer\":\"wave\"," PLAIN};
    double half = (0.837 + 0.0607 * seq_len / 1024 + f) / 2, best = 0;
    for (size_t i = 0; i < COUNT(orders); i++) {
        struct experiment experiment =
            plain(32, 1,
                  "\"micro_batches\":64,\"parallel\":{\"groups\":4,\"attn_gpus\":1,\"ffn_gpus\":1},"
                  "\"placement\":\"mixed-nodes\",\"order\":%s,\"costs\":{\"attn_fwd_s\":%.17g,"
                  "\"attn_bwd_s\":%.17g,\"attn_wgrad_s\":%.17g,\"ffn_fwd_s\":%.17g,\"ffn_bwd_s\":%.17g,"
                  "\"ffn_wgrad_s\":%.17g,\"dispatch_s\":1,\"combine_s\":1}",
                  orders[i], half, half, half, half, half, half);
        struct outcome outcome = simulate(&experiment.points[0], "disagmoe");
        best = fmax(best, outcome.result.efficiency);
        /* 64 micro-batches, 8 layers a group, 3 × half each. */
        assert_within(outcome.result.busiest_compute, 64 * 8 * 3 * half, EXACT);
        outcome_free(&outcome);
        experiment_free(&experiment);
    }
    return best;
}

static void test_disagmoe_efficiency(void **state) {
    (void)state;
    double at_4k = best_efficiency(4096, 0.73), at_16k = best_efficiency(16384, 0.747),
           at_32k = best_efficiency(32768, 0.77);
    if (at_4k < 0.92 || at_16k < 0.95 || at_32k < 0.96)
        fail_msg("efficiency %.4f at 4K, %.4f at 16K, %.4f at 32K; at least 0.92, 0.95, 0.96 are asked for",
                 at_4k, at_16k, at_32k);
}

/* ---- random manifests -------------------------------------------------------------------------------- */

static int between(struct rng *rng, int low, int high) {
    return low + rng_below(rng, high - low + 1);
}

static bool chance(struct rng *rng, double probability) {
    return rng_uniform(rng) < probability;
}

static int larger(int a, int b) {
    return a > b ? a : b;
}

static const char *choose(struct rng *rng, const char *const *words, int count) {
    return words[rng_below(rng, count)];
}
#define CHOOSE(rng, ...)                                                                                     \
    choose(rng, (const char *const[]){__VA_ARGS__}, (int)COUNT(((const char *const[]){__VA_ARGS__})))

struct shape {
    int layers, experts, gpus;
};

static void add_random_model(struct text *text, struct rng *rng, struct shape *shape) {
    int kv_heads = between(rng, 1, 3), layers = between(rng, 1, 12), experts = between(rng, 1, 24);
    int dense = chance(rng, 0.3) ? between(rng, 1, layers) : 0;
    bool windowed = chance(rng, 0.4);
    text_add(text,
             "\"model\":{\"name\":\"random\",\"layers\":%d,\"hidden\":%d,\"vocab\":%d,\"tie_embeddings\":%s,"
             "\"attention\":{\"heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"qk_norm\":%s,\"bias\":%s,"
             "\"sinks\":%s,\"window\":%d,\"window_layers\":\"%s\"},",
             layers, 32 * between(rng, 1, 40), between(rng, 1, 50000), CHOOSE(rng, "true", "false"),
             kv_heads * between(rng, 1, 4), kv_heads, 2 * between(rng, 4, 64), CHOOSE(rng, "true", "false"),
             CHOOSE(rng, "true", "false"), CHOOSE(rng, "true", "false"), windowed ? between(rng, 1, 500) : 0,
             windowed ? CHOOSE(rng, "all", "even", "odd") : "none");
    text_add(text,
             "\"moe\":{\"experts\":%d,\"top_k\":%d,\"expert_hidden\":%d,\"shared_experts\":%d,"
             "\"dense_layers\":%d,\"dense_hidden\":%d,\"capacity_factor\":%s,\"bias\":%s}},",
             experts, between(rng, 1, experts < 8 ? experts : 8), between(rng, 16, 2000),
             chance(rng, 0.4) ? between(rng, 1, 3) : 0, dense, dense ? between(rng, 16, 4000) : 0,
             CHOOSE(rng, "0", "0", "1.25"), CHOOSE(rng, "true", "false"));
    shape->layers = layers;
    shape->experts = experts;
}

static void add_random_cluster(struct text *text, struct rng *rng, struct shape *shape) {
    static const int sizes[] = {1, 2, 3, 4, 8};
    int nodes = between(rng, 1, 4), per_node = sizes[rng_below(rng, COUNT(sizes))];
    if (nodes * per_node < 2) nodes = 2;
    struct text cluster = {0};
    add_cluster(&cluster, nodes, per_node);
    shape->gpus = nodes * per_node;
    cluster.text[cluster.length - 2] = '\0'; /* its closing brace is behind what is changed here */
    char *slow = strstr(cluster.text, "\"slow_gpus\":[]");
    char *spine = strstr(cluster.text, "\"rail_only\":false");
    assert_non_null(slow);
    assert_non_null(spine);
    bool rails = chance(rng, 0.2), limps = chance(rng, 0.3);
    if (rails) memcpy(spine, "\"rail_only\":true ", strlen("\"rail_only\":true "));
    *slow = '\0';
    text_add(text, "%s\"slow_gpus\":[", cluster.text);
    if (limps)
        text_add(text, "{\"gpu\":%d,\"speed\":%.3f}", rng_below(rng, shape->gpus),
                 0.3 + 0.7 * rng_uniform(rng));
    text_add(text, "%s},", slow + strlen("\"slow_gpus\":["));
    free(cluster.text);
}

/* A layout for each system that the cluster can hold, split-nodes aside. */
static void add_random_layout(struct text *text, struct rng *rng, struct shape shape, int *micro_batches) {
    int pp = between(rng, 1, shape.layers < shape.gpus ? shape.layers : shape.gpus);
    int most_ep = shape.gpus / pp < shape.experts ? shape.gpus / pp : shape.experts;
    int groups = between(rng, 1, shape.layers < shape.gpus / 2 ? shape.layers : shape.gpus / 2);
    int most = shape.gpus / groups, attention = between(rng, 1, most - 1);
    int most_ffn = most - attention < shape.experts ? most - attention : shape.experts;
    const int counts[] = {1, pp, groups, 2 * between(rng, 0, 4) + 1, between(rng, 1, 12)};
    int ep = between(rng, 1, most_ep), cp = chance(rng, 0.3) ? 1 << between(rng, 1, 2) : 1;
    if (cp > most_ep || cp > most - 1) cp = 1;
    ep = larger(cp, ep / cp * cp); /* whole runs on both systems */
    attention = larger(cp, attention / cp * cp);
    *micro_batches = counts[rng_below(rng, COUNT(counts))];
    int vpp = *micro_batches % pp == 0 ? between(rng, 1, shape.layers / pp) : 1;
    text_add(text,
             "\"parallel\":{\"pp\":%d,\"vpp\":%d,\"ep\":%d,\"groups\":%d,\"attn_gpus\":%d,\"ffn_gpus\":%d,"
             "\"cp\":%d",
             pp, vpp, ep, groups, attention,
             between(rng, 1, most_ffn < most - attention ? most_ffn : most - attention), cp);
    if (chance(rng, 0.15)) text_add(text, ",\"attn_nics\":%d", between(rng, 1, attention));
    if (chance(rng, 0.15)) text_add(text, ",\"ffn_nics\":%d", between(rng, 1, most_ffn));
    text_add(text, "},");
}

/* A word, or a level for each side in some of the layers. */
static void add_random_recompute(struct text *text, struct rng *rng) {
    if (chance(rng, 0.3)) {
        text_add(text, "\"recompute\":\"%s\",", CHOOSE(rng, "none", "selective", "full"));
        return;
    }
    text_add(text, "\"recompute\":{\"attention\":\"%s\",\"ffn\":\"%s\"",
             CHOOSE(rng, "none", "norms", "projections", "full"), CHOOSE(rng, "none", "activation", "full"));
    if (chance(rng, 0.5)) text_add(text, ",\"layers\":%d", between(rng, 1, 4));
    text_add(text, "},");
}

static void add_random_costs(struct text *text, struct rng *rng) {
    static const char *const keys[] = {"attn_bwd_s",  "attn_wgrad_s", "ffn_fwd_s",     "ffn_bwd_s",
                                       "ffn_wgrad_s", "dispatch_s",   "combine_s",     "p2p_s",
                                       "embed_fwd_s", "embed_bwd_s",  "head_fwd_s",    "head_bwd_s",
                                       "grad_sync_s", "optimizer_s",  "param_gather_s"};
    text_add(text, ",\"costs\":{\"attn_fwd_s\":%.6f", 0.01 + rng_uniform(rng));
    for (size_t i = 0; i < COUNT(keys); i++)
        if (chance(rng, 0.7))
            text_add(text, ",\"%s\":%.6f", keys[i], chance(rng, 0.5) ? rng_uniform(rng) : rng_below(rng, 3));
    text_add(text, "}");
}

static char *random_manifest(struct rng *rng) {
    struct text text = {0};
    struct shape shape;
    int micro_batches;
    text_add(&text, "{\"systems\":[\"megatron\",\"disagmoe\"],\"seq_len\":%d,\"micro_batch_size\":%d,",
             chance(rng, 0.5) ? 1 << between(rng, 4, 13) : between(rng, 1, 3000), between(rng, 1, 3));
    add_random_model(&text, rng, &shape);
    add_random_cluster(&text, rng, &shape);
    add_random_layout(&text, rng, shape, &micro_batches);
    if (chance(rng, 0.15))
        text_add(&text, "\"global_batch\":%d,", between(rng, 1, 64));
    else
        text_add(&text, "\"micro_batches\":%d,", micro_batches);
    if (chance(rng, 0.98)) {
        text_add(&text, "\"memory\":{");
        add_random_recompute(&text, rng);
        text_add(&text,
                 "\"expert_input\":\"%s\",\"grads\":\"%s\",\"moments\":\"%s\",\"zero\":%d,\"offload\":%s},",
                 CHOOSE(rng, "keep", "resend"), CHOOSE(rng, "fp32", "bf16"), CHOOSE(rng, "fp32", "bf16"),
                 between(rng, 0, 1), CHOOSE(rng, "true", "false"));
    }
    if (chance(rng, 0.98)) {
        text_add(&text,
                 "\"order\":{\"wave\":%d,\"waves_in_flight\":%d,\"prefer\":\"%s\",\"patient\":%s,"
                 "\"justified\":%s,\"without\":",
                 between(rng, 1, 16), between(rng, 1, 4), CHOOSE(rng, "backward", "forward", "wave"),
                 CHOOSE(rng, "false", "true"), CHOOSE(rng, "false", "true"));
        add_random_without(&text, rng);
        text_add(&text, "},");
    }
    if (chance(rng, 0.3)) text_add(&text, "\"head\":\"all-ffn\",");
    text_add(&text, "\"placement\":\"%s\",\"routing\":\"%s\",\"seed\":%d",
             CHOOSE(rng, "split-nodes", "mixed-nodes", "mixed-nodes", "auto"),
             CHOOSE(rng, "balanced", "zipf:0", "zipf:0.7", "zipf:1.5"), rng_below(rng, 1000));
    if (chance(rng, 0.4)) add_random_costs(&text, rng);
    text_add(&text, "}");
    return text.text;
}

/* ---- what holds for every plan ----------------------------------------------------------------------- */

static void check_times(const struct outcome *outcome) {
    const struct schedule *schedule = outcome->schedule;
    double *busy = must_alloc((size_t)schedule->lane_count * sizeof *busy);
    schedule_busy(schedule, busy);
    for (int lane = 0; lane < schedule->lane_count; lane++)
        assert_at_most(busy[lane], outcome->timeline.makespan, "a lane's busy time");
    free(busy);
    assert_at_most(schedule_critical_path(schedule), outcome->timeline.makespan, "the critical path");
    assert_true(outcome->result.step_time == outcome->timeline.makespan);
    assert_at_most(outcome->result.comm_total, outcome->timeline.makespan, "communication");
    assert_at_most(outcome->result.efficiency, 1, "efficiency");
}

/* GPU-seconds of a replica, of all workers. */
static void check_busy(const struct outcome *outcome) {
    const struct schedule *schedule = outcome->schedule;
    double all = 0, again = 0, optimizer = 0, busiest = 0;
    double *lanes = must_alloc((size_t)schedule->group_count * sizeof *lanes);
    for (int op = 0; op < schedule->op_count; op++) {
        const struct operation *it = &schedule->ops[op];
        if (it->lane_count != 1) continue;
        int group = it->lanes[0] / RESOURCE_COUNT;
        double seconds = it->duration * schedule->groups[group].gpus;
        all += seconds;
        again += it->pass == PASS_RECOMPUTE ? seconds : 0;
        optimizer += it->kind == KIND_OPTIMIZER ? seconds : 0;
        busiest = fmax(busiest, lanes[group] += it->duration);
    }
    assert_within(outcome->result.compute_busy, all, EXACT);
    assert_within(outcome->result.recompute_busy, again, EXACT);
    assert_within(outcome->result.optimizer_busy, optimizer, EXACT);
    assert_within(outcome->result.busiest_compute, busiest, EXACT);
    assert_within(outcome->result.efficiency * outcome->result.step_time, busiest, EXACT);
    free(lanes);
}

static void check_replay(struct outcome *outcome) {
    struct timeline again = {0};
    size_t bytes = (size_t)outcome->schedule->op_count * sizeof(double);
    assert_true(schedule_replay(outcome->schedule, &again));
    assert_memory_equal(again.start, outcome->timeline.start, bytes);
    assert_memory_equal(again.end, outcome->timeline.end, bytes);
    assert_true(again.makespan == outcome->timeline.makespan);
    timeline_free(&again);
}

static void check_breakdown(const struct result *result) {
    const struct breakdown *it = &result->breakdown;
    const double parts[] = {it->attention,    it->ffn,    it->other_compute,
                            it->exposed_comm, it->bubble, it->optimizer};
    double sum = 0;
    for (size_t i = 0; i < COUNT(parts); i++) {
        if (!(parts[i] >= -EXACT * result->step_time)) fail_msg("part %zu is %.17g", i, parts[i]);
        sum += parts[i];
    }
    assert_within(sum, result->step_time, EXACT);
}

/* A change of memory. At one time what ends frees first, then what starts takes, then what both starts and
   ends frees. */
struct change {
    double time, bytes;
    int turn;
};

static int by_time(const void *a, const void *b) {
    const struct change *x = a, *y = b;
    if (x->time != y->time) return x->time < y->time ? -1 : 1;
    return x->turn - y->turn;
}

/* Peak of one group, all its starts and ends played through. */
static double played_peak(const struct outcome *outcome, int group) {
    const struct schedule *schedule = outcome->schedule;
    const struct timeline *timeline = &outcome->timeline;
    struct change *changes = must_alloc((2 * (size_t)schedule->activation_count + 1) * sizeof *changes);
    int count = 0;
    for (int i = 0; i < schedule->activation_count; i++) {
        const struct activation *it = &schedule->activations[i];
        double start = timeline->start[it->producer], end = timeline->end[it->freed_by];
        if (it->group != group || start == end) continue;
        bool instant = timeline->start[it->freed_by] == end;
        changes[count++] = (struct change){start, it->bytes, 1};
        changes[count++] = (struct change){end, -it->bytes, instant ? 2 : 0};
    }
    qsort(changes, (size_t)count, sizeof *changes, by_time);
    double now = schedule->groups[group].static_bytes, peak = now;
    for (int i = 0; i < count; i++) peak = fmax(peak, now += changes[i].bytes);
    free(changes);
    return peak;
}

static void check_memory(const struct outcome *outcome) {
    const struct schedule *schedule = outcome->schedule;
    const struct plan *plan = &outcome->result.plan;
    int groups = outcome->result.system->groups(plan);
    assert_int_equal(groups, schedule->group_count);
    struct need *needs = must_alloc((size_t)groups * sizeof *needs);
    double *peaks = must_alloc((size_t)groups * sizeof *peaks), most = 0;
    outcome->result.system->needs(plan, &plan->memory, 1, needs);
    schedule_memory_peaks(schedule, &outcome->timeline, peaks);
    for (int g = 0; g < groups; g++) {
        assert_within(needs[g].static_bytes, schedule->groups[g].static_bytes, EXACT);
        assert_at_most(schedule->groups[g].static_bytes, peaks[g], "static bytes");
        assert_within(peaks[g], played_peak(outcome, g), EXACT);
        most = fmax(most, peaks[g]);
    }
    assert_within(outcome->result.peak_memory, most, EXACT);
    free(peaks);
    free(needs);
}

/* An activation that is kept for no time at all, between operations without duration, is on no timeline. */
static bool has_duration_everywhere(const struct schedule *schedule) {
    for (int op = 0; op < schedule->op_count; op++)
        if (schedule->ops[op].duration == 0 && schedule->ops[op].layer >= 0) return false;
    return true;
}

static void check_bound(const struct outcome *outcome) {
    struct bound bound = plan_bound(outcome->result.system, &outcome->result.plan);
    if (!outcome->result.oom)
        assert_at_most(bound.seconds, outcome->result.step_time, "the bound of the step's time");
    assert_at_most(bound.busy, outcome->result.step_time, "the bound by what lanes have to do");
    assert_true(bound.seconds == fmax(bound.busy, bound.memory_seconds));
    /* The tuner bounds a candidate with the leanest state before one is chosen: moments, ZeRO and offload may
       not matter to what lanes have to do, and narrow gradients are read and written faster. */
    struct plan other = outcome->result.plan;
    other.memory.offload = !other.memory.offload;
    other.memory.grads = PRECISION_BF16;
    other.memory.moments = !other.memory.moments;
    other.memory.zero = !other.memory.zero;
    assert_at_most(plan_bound(outcome->result.system, &other).busy, outcome->result.step_time,
                   "the bound under other state levers");
    if (has_duration_everywhere(outcome->schedule))
        assert_at_most(bound.bytes, outcome->result.peak_memory, "the bound of its memory");
}

static void swap_ints(int *a, int *b) {
    int old = *a;
    *a = *b;
    *b = old;
}

/* Swaps two transfers with the same sender and receiver on the sender's side alone; false: there are none. */
static bool swap_transfers(struct schedule *schedule, struct rng *rng) {
    int first = rng_below(rng, schedule->lane_count);
    for (int k = 0; k < schedule->lane_count; k++) {
        struct lane *lane = &schedule->lanes[(first + k) % schedule->lane_count];
        if ((first + k) % schedule->lane_count % RESOURCE_COUNT == RESOURCE_COMPUTE) continue;
        for (int i = 1; i < lane->count; i++) {
            const struct operation *a = &schedule->ops[lane->ops[i - 1]], *b = &schedule->ops[lane->ops[i]];
            if (a->lanes[0] != b->lanes[0] || a->lanes[a->lane_count - 1] != b->lanes[b->lane_count - 1])
                continue;
            swap_ints(&lane->ops[i - 1], &lane->ops[i]);
            free(schedule->sequence); /* found for the old order */
            schedule->sequence = NULL;
            return true;
        }
    }
    return false;
}

static bool check_swap(struct outcome *outcome, struct rng *rng) {
    if (!swap_transfers(outcome->schedule, rng)) return false;
    struct errors errors = {0};
    struct timeline timeline = {0};
    assert_false(schedule_validate(outcome->schedule, &errors));
    assert_true(errors.count > 0);
    assert_non_null(strstr(errors.messages[0], "dead-lock"));
    assert_non_null(strstr(errors.messages[0], "next on "));
    assert_false(schedule_replay(outcome->schedule, &timeline));
    timeline_free(&timeline);
    errors_free(&errors);
    return true;
}

/* True when two transfers could be swapped. */
static bool check_everything(struct outcome *outcome, struct rng *rng) {
    struct errors errors = {0};
    bool valid = schedule_validate(outcome->schedule, &errors);
    if (!valid) fail_msg("%s", errors.messages[0]);
    assert_no_errors(&errors);
    check_times(outcome);
    check_busy(outcome);
    check_replay(outcome);
    check_breakdown(&outcome->result);
    check_memory(outcome);
    check_bound(outcome);
    return check_swap(outcome, rng);
}

struct tally {
    int run, impossible, swapped;
};

/* What the case is, should an assertion fail in it. */
static char *current;
static const char *current_system;

static void run_random(const struct point *point, const char *name, struct rng *rng, struct tally *tally) {
    const struct system *system = system_named(current_system = name);
    struct outcome outcome = {0};
    struct errors errors = {0};
    struct plan plan;
    bool feasible = false, possible = tune_point(system, point, &plan, &feasible, &errors);
    assert_true(possible == (errors.count == 0));
    errors_free(&errors);
    if (!possible || !feasible) {
        tally->impossible++;
        return;
    }
    simulate_plan(system, &plan, &outcome.result, &outcome.schedule, &outcome.timeline);
    tally->swapped += check_everything(&outcome, rng);
    tally->run++;
    outcome_free(&outcome);
}

static int show_case(void **state) {
    (void)state;
    if (current) fprintf(stderr, "the case was %s of %s\n", current_system, current);
    free(current);
    current = NULL;
    return 0;
}

static void test_random_manifests(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED);
    struct tally tally = {0};
    int cases = sampled(CASES);
    for (int i = 0; i < cases; i++) {
        current = random_manifest(&rng);
        struct experiment experiment = read_text(current);
        run_random(&experiment.points[0], "megatron", &rng, &tally);
        run_random(&experiment.points[0], "disagmoe", &rng, &tally);
        experiment_free(&experiment);
        free(current);
        current = NULL;
    }
    /* Most of them must have been worth something. */
    assert_true(tally.run >= cases);
    assert_true(tally.swapped >= tally.run / 2);
}

/* ---- memory levers ----------------------------------------------------------------------------------- */

/* One lever on top of the fixed defaults, and the resource whose peak it promises to lower. */
struct lever {
    const char *name;
    struct memory memory;
};

static const struct lever levers[] = {
    {"none", {.grads = PRECISION_FP32}},
    {"selective", {.recompute = {ATTENTION_NORMS, FFN_ACTIVATION, 0}}},
    {"full", {.recompute = {ATTENTION_FULL, FFN_FULL, 0}}},
    {"resend", {.expert_input = INPUT_RESEND}},
    {"bf16 gradients", {.grads = PRECISION_BF16}},
    {"bf16 moments", {.moments = PRECISION_BF16}},
    {"zero", {.zero = 1}},
    {"offload", {.offload = true}},
};

struct saving {
    double peak, activations, static_bytes; /* sums over the groups */
    int forward[2];                         /* operations of attention and ffn */
};

static struct saving use_lever(const struct point *point, const char *system, struct memory memory) {
    struct point changed = *point;
    changed.memory = memory;
    changed.auto_memory = false;
    struct outcome outcome = simulate(&changed, system);
    const struct schedule *schedule = outcome.schedule;
    double *peaks = must_alloc((size_t)schedule->group_count * sizeof *peaks);
    struct saving saving = {.peak = outcome.result.peak_memory};
    schedule_memory_peaks(schedule, &outcome.timeline, peaks);
    for (int g = 0; g < schedule->group_count; g++) {
        saving.activations += peaks[g] - schedule->groups[g].static_bytes;
        saving.static_bytes += schedule->groups[g].static_bytes;
    }
    for (int op = 0; op < schedule->op_count; op++)
        if (schedule->ops[op].pass == PASS_FORWARD && schedule->ops[op].kind <= KIND_FFN)
            saving.forward[schedule->ops[op].kind == KIND_FFN]++;
    free(peaks);
    outcome_free(&outcome);
    return saving;
}

static void check_levers(const struct point *point, const char *system) {
    struct saving none = use_lever(point, system, levers[0].memory), selective = none;
    for (size_t i = 1; i < COUNT(levers); i++) {
        struct saving with = use_lever(point, system, levers[i].memory);
        bool of_state = i >= 4;
        if (of_state ? with.static_bytes >= none.static_bytes : with.activations >= none.activations)
            fail_msg("%s saves nothing in %s", levers[i].name, system);
        if (!of_state) assert_within(with.static_bytes, none.static_bytes, EXACT);
        assert_at_most(with.peak, none.peak, levers[i].name);
        assert_int_equal(with.forward[0], 6 * 8);
        assert_int_equal(with.forward[1], 6 * 8);
        if (i == 1) selective = with;
        if (i == 2) assert_true(with.activations < selective.activations);
    }
}

static void test_levers(void **state) {
    (void)state;
    struct experiment experiment =
        plain(6, 2,
              "\"micro_batches\":8,\"parallel\":{\"pp\":2,\"vpp\":1,\"ep\":4,\"groups\":2,"
              "\"attn_gpus\":2,\"ffn_gpus\":2},\"placement\":\"mixed-nodes\",\"order\":{\"wave\":8,"
              "\"waves_in_flight\":1}");
    check_levers(&experiment.points[0], "megatron");
    check_levers(&experiment.points[0], "disagmoe");
    experiment_free(&experiment);
}

/* BF16 weights 2 bytes, gradients 4 or 2, master weights 4, moments 8 or 4; ZeRO shares out the last two
   among those that hold the same parameters, offload moves them to the host. FP32 weights are their own
   masters. */
static void test_static_bytes(void **state) {
    (void)state;
    static const struct shard shards[] = {{1000, NULL, 8}, {500, NULL, 2}};
    for (int grads = 0; grads < 2; grads++)
        for (int moments = 0; moments < 2; moments++)
            for (int zero = 0; zero < 2; zero++)
                for (int offload = 0; offload < 2; offload++) {
                    struct model model = {.dtype = DTYPE_BF16}, wide = {.dtype = DTYPE_FP32};
                    struct point point = {.model = &model};
                    struct plan plan = {
                        .point = &point,
                        .memory = {.grads = grads, .moments = moments, .zero = zero, .offload = offload}};
                    double held = 1500 * (2 + (grads == PRECISION_BF16 ? 2 : 4));
                    double optimizer = 4 + (moments == PRECISION_BF16 ? 4 : 8);
                    double elements = zero ? 1000.0 / 8 + 500.0 / 2 : 1500;
                    assert_within(plan_static_bytes(&plan, shards, 2), held + !offload * optimizer * elements,
                                  EXACT);
                    point.model = &wide;
                    assert_within(plan_static_bytes(&plan, shards, 2),
                                  held + 1500 * 2 + !offload * (optimizer - 4) * elements, EXACT);
                }
}

/* ---- sizes ------------------------------------------------------------------------------------------- */

static void check_size(int global_batch, int micro_batch_size, int gpus_of_replica, int attention_gpus) {
    struct experiment experiment =
        plain(2, 2, "\"global_batch\":%d,\"micro_batch_size\":%d", global_batch, micro_batch_size);
    struct plan plan = {.point = &experiment.points[0], .parallel.cp = 1};
    assert_true(plan_size(&plan, gpus_of_replica, attention_gpus));
    int of_replica = attention_gpus * micro_batch_size, room = plan.replicas * of_replica;
    assert_true(plan.sequences == global_batch);
    assert_int_equal(plan.gpus, plan.replicas * gpus_of_replica);
    assert_in_range(plan.replicas, 1, 16 / gpus_of_replica);
    /* Enough micro-batches, none too many, and no replica without work. */
    assert_true(plan.micro_batches * room >= global_batch);
    assert_true((plan.micro_batches - 1) * room < global_batch);
    assert_true((plan.replicas - 1) * of_replica < global_batch);
    experiment_free(&experiment);
}

static void test_plan_size(void **state) {
    (void)state;
    for (int batch = 1; batch <= 40; batch += 3)
        for (int size = 1; size <= 3; size++)
            for (int gpus = 2; gpus <= 16; gpus += 3) check_size(batch, size, gpus, 1 + batch % (gpus - 1));
    struct experiment experiment = plain(2, 2, "\"global_batch\":10");
    struct plan plan = {.point = &experiment.points[0], .parallel.cp = 1};
    assert_true(plan_size(&plan, 8, 4)); /* two replicas of four: the last micro-batch is not full */
    assert_int_equal(plan.replicas, 2);
    assert_int_equal(plan.micro_batches, 2);
    assert_false(plan_size(&plan, 17, 4));
    experiment_free(&experiment);
    experiment = plain(2, 2, "\"micro_batches\":3,\"micro_batch_size\":2");
    plan = (struct plan){.point = &experiment.points[0], .parallel.cp = 1};
    assert_true(plan_size(&plan, 5, 4));
    assert_int_equal(plan.replicas, 3);
    assert_int_equal(plan.gpus, 15);
    assert_true(plan.sequences == 3 * 2 * 4 * 3);
    plan.parallel.cp = 4; /* the four hold two sequences between them */
    assert_true(plan_size(&plan, 5, 4));
    assert_true(plan.sequences == 3 * 2 * 1 * 3);
    assert_true(plan_tokens(&plan) == 2 * 1024 / 4);
    experiment_free(&experiment);
}

/* ---- the tuner --------------------------------------------------------------------------------------- */

static char *tuned_record(const struct point *point, const char *system) {
    struct outcome outcome = simulate(point, system);
    assert_false(outcome.result.oom);
    cJSON *record = result_json(&outcome.result);
    char *text = cJSON_PrintUnformatted(record);
    cJSON_Delete(record);
    outcome_free(&outcome);
    return text;
}

static void test_tuner_is_deterministic(void **state) {
    (void)state;
    for (int batch = 8; batch <= 24; batch += 8) {
        struct experiment experiment = plain(6, 1, "\"global_batch\":%d", batch);
        for (int i = 0; i < 2; i++) {
            char *first = tuned_record(&experiment.points[0], experiment.points[0].systems[i]);
            char *second = tuned_record(&experiment.points[0], experiment.points[0].systems[i]);
            assert_string_equal(first, second);
            cJSON_free(first);
            cJSON_free(second);
        }
        experiment_free(&experiment);
    }
}

/* The quickest of all layouts and placements, by trying each. */
static double best_of_all(const struct point *point, const struct system *system) {
    struct parallel *layouts = must_alloc(4096 * sizeof *layouts);
    int count = system->layouts(point, layouts, 4096);
    double best = INFINITY;
    for (int i = 0; i < count; i++)
        for (int placement = 0; placement <= system->uses_placement; placement++) {
            struct plan plan = {.point = point,
                                .parallel = layouts[i],
                                .memory = point->memory,
                                .order = point->order,
                                .placement = placement};
            struct errors ignored = {0};
            struct result result;
            bool possible =
                system->size(&plan, &ignored) && (!system->settle || system->settle(&plan, &ignored));
            if (possible) {
                simulate_plan(system, &plan, &result, NULL, NULL);
                best = fmin(best, result.step_time / plan.sequences);
            }
            errors_free(&ignored);
        }
    free(layouts);
    return best;
}

/* With memory and order given, layout and placement are searched exhaustively: bounds may not lose the best.
 */
static void test_tuner_finds_the_best(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 1);
    for (int i = 0; i < sampled(30); i++) {
        struct experiment experiment =
            plain(between(&rng, 1, 6), 1,
                  "\"%s\":%d,\"placement\":\"auto\",\"memory\":{\"recompute\":\"%s\",\"expert_input\":"
                  "\"%s\",\"grads\":\"fp32\",\"moments\":\"fp32\",\"zero\":0,\"offload\":false},"
                  "\"order\":{\"wave\":%d,\"waves_in_flight\":1,\"prefer\":\"wave\",\"patient\":%s,"
                  "\"justified\":%s}",
                  CHOOSE(&rng, "global_batch", "micro_batches"), between(&rng, 1, 24),
                  CHOOSE(&rng, "none", "selective", "full"), CHOOSE(&rng, "keep", "resend"),
                  between(&rng, 1, 8), CHOOSE(&rng, "false", "true"), CHOOSE(&rng, "false", "true"));
        const struct point *point = &experiment.points[0];
        for (int k = 0; k < 2; k++) {
            struct outcome outcome = simulate(point, point->systems[k]);
            double found = outcome.result.step_time / outcome.result.plan.sequences;
            assert_within(found, best_of_all(point, outcome.result.system), EXACT);
            outcome_free(&outcome);
        }
        experiment_free(&experiment);
    }
}

static void assert_nothing_fits(const struct point *point) {
    for (int i = 0; i < 2; i++) {
        struct plan plan;
        struct errors errors = {0};
        bool feasible = true;
        assert_true(tune_point(system_named(point->systems[i]), point, &plan, &feasible, &errors));
        assert_false(feasible);
        assert_no_errors(&errors);
    }
}

/* Where nothing fits there is no choice, and the record says so. */
static void test_nothing_fits(void **state) {
    (void)state;
    struct experiment experiment = plain(6, 1, "\"global_batch\":8");
    struct point *point = &experiment.points[0];
    point->cluster->gpu.memory_bytes = point->cluster->rates[RATE_MEMORY_RESERVE] + 1000;
    assert_nothing_fits(point);
    /* So does one in whose layout something is left to be searched. */
    point->parallel = (struct parallel){.pp = 2, .ep = 2, .groups = 2, .attn_gpus = 1};
    assert_nothing_fits(point);
    /* A layout and a memory that are given run all the same. */
    point->parallel.vpp = point->parallel.ffn_gpus = 1;
    point->auto_memory = point->auto_placement = false;
    point->placement = PLACEMENT_MIXED;
    for (int i = 0; i < 2; i++) {
        struct outcome outcome = simulate(point, point->systems[i]);
        assert_true(outcome.result.oom);
        assert_true(outcome.result.step_time > 0);
        outcome_free(&outcome);
    }
    experiment_free(&experiment);
}

/* ---- speedups ---------------------------------------------------------------------------------------- */

static void test_speedups(void **state) {
    (void)state;
    struct result results[] = {
        {.system = system_named("megatron"), .feasible = true, .tokens_per_s = 100},
        {.system = system_named("disagmoe"), .feasible = true, .tokens_per_s = 150},
        {.system = system_named("disagmoe"), .feasible = false},
    };
    fill_speedups(results, 3);
    assert_true(results[0].speedup == 1 && results[1].speedup == 1.5 && isnan(results[2].speedup));
    results[0].oom = true; /* no baseline then */
    fill_speedups(results, 3);
    assert_true(isnan(results[0].speedup) && isnan(results[1].speedup));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_1f1b),
        cmocka_unit_test(test_interleaved),
        cmocka_unit_test(test_one_stage),
        cmocka_unit_test(test_unequal_stages),
        cmocka_unit_test(test_disagmoe_efficiency),
        cmocka_unit_test_teardown(test_random_manifests, show_case),
        cmocka_unit_test(test_levers),
        cmocka_unit_test(test_static_bytes),
        cmocka_unit_test(test_plan_size),
        cmocka_unit_test(test_tuner_is_deterministic),
        cmocka_unit_test(test_tuner_finds_the_best),
        cmocka_unit_test(test_nothing_fits),
        cmocka_unit_test(test_speedups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
