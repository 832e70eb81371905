/*
The cluster module: reading of cluster files, time of transfers, and the calibration of the H800 file.

The calibration's tests hold the paper's section 3 (Qwen3 on 8 nodes) as constants of their own. The rates of
the file have to follow from these and from public micro-benchmarks alone, which shows that nothing else was
fitted.
*/
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "cluster/cluster.h"
#include "disagmoe/placement.h"
#include "model/model.h"
#include "tests/cases.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CLUSTER_FILE "experiments/clusters/h800-16x8.json"
#define FAST_CLUSTER_FILE "experiments/clusters/h800-16x8-fast.json"
#define MODEL_FILE "experiments/models/qwen3-235b-paper.json"

static bool near(double found, double expected, double relative) {
    return fabs(found - expected) <= relative * fmax(fabs(found), fabs(expected));
}

static void assert_near(double found, double expected, double relative) {
    if (!near(found, expected, relative)) fail_msg("found %.17g, expected %.17g", found, expected);
}

/* ---- reading ----------------------------------------------------------------------------------------- */

/* A change of the committed file: the value at path becomes this JSON text; NULL: the key is removed. */
struct change {
    const char *path, *value;
};

static void change_document(cJSON *document, struct change change) {
    if (change.value) {
        cJSON *value = cJSON_Parse(change.value);
        assert_non_null(value);
        assert_true(json_set_path(document, change.path, value));
        return;
    }
    const char *dot = strrchr(change.path, '.');
    char parent_path[128] = "";
    if (dot) memcpy(parent_path, change.path, (size_t)(dot - change.path));
    cJSON *parent = dot ? json_get_path(document, parent_path) : document;
    assert_non_null(parent);
    cJSON_DeleteItemFromObjectCaseSensitive(parent, dot ? dot + 1 : change.path);
}

/* Reads the committed file with these changes; all messages joined, to be freed. "" when it is accepted. */
static char *messages_of(const struct change *changes, int count) {
    struct arena *arena = arena_new();
    struct errors errors = {0};
    struct json document = json_read_file(CLUSTER_FILE, arena, &errors);
    assert_non_null(document.node);
    for (int i = 0; i < count; i++) change_document(document.node, changes[i]);
    struct cluster cluster;
    bool good = cluster_read(document, &cluster);
    assert_int_equal(good, errors.count == 0);
    struct text text = {0};
    text_add(&text, "%s", "");
    for (int i = 0; i < errors.count; i++) text_add(&text, "%s\n", errors.messages[i]);
    cJSON_Delete(document.node);
    errors_free(&errors);
    arena_free(arena);
    return text.text;
}

static int lines_of(const char *text) {
    int lines = 0;
    for (; *text; text++) lines += *text == '\n';
    return lines;
}

/* The change alone gives one message, which names this path and has this text in it. */
static void assert_rejected(struct change change, const char *path, const char *text) {
    char *messages = messages_of(&change, 1);
    if (lines_of(messages) != 1 || !strstr(messages, path) || !strstr(messages, text))
        fail_msg("%s = %s: expected one message with \"%s\" and \"%s\", found:\n%s", change.path,
                 change.value ? change.value : "(removed)", path, text, messages);
    free(messages);
}

static void assert_accepted(struct change change) {
    char *messages = messages_of(&change, 1);
    assert_string_equal(messages, "");
    free(messages);
}

static void test_accepts(void **state) {
    (void)state;
    char *messages = messages_of(NULL, 0);
    assert_string_equal(messages, "");
    free(messages);
    assert_accepted((struct change){"spine", NULL});
    assert_accepted((struct change){"slow_gpus", NULL});
    assert_accepted((struct change){"nics_per_node", "4"});
    assert_accepted(
        (struct change){"slow_gpus", "[{\"gpu\": 0, \"speed\": 0.5}, {\"gpu\": 127, \"speed\": 1}]"});
    assert_accepted((struct change){"rates.kernel_launch.value", "0"});
    assert_accepted((struct change){"rates.gemm.value", "989e12"});
    assert_accepted((struct change){"nvlink.source", NULL});
}

static void test_values_of_the_testbed(void **state) {
    (void)state;
    struct arena *arena = arena_new();
    struct errors errors = {0};
    struct json document = json_read_file(CLUSTER_FILE, arena, &errors);
    struct cluster cluster;
    assert_true(cluster_read(document, &cluster));
    assert_int_equal(cluster_gpus(&cluster), 128);
    assert_string_equal(cluster.name, "h800-16x8");
    assert_string_equal(cluster.gpu.name, "H800-80GB");
    assert_true(cluster.gpu.peak_flops == 989e12);
    assert_true(cluster.nvlink.bytes_per_s == 200e9 && cluster.nic.bytes_per_s == 50e9);
    for (int rate = 0; rate < RATE_COUNT; rate++) {
        assert_non_null(cluster_rate_name((enum rate)rate));
        assert_non_null(cluster_rate_unit((enum rate)rate));
        if (rate == RATE_LAYER_OVERHEAD) continue; /* of the other reading of section 3 */
        assert_true(cluster.rates[rate] > 0);
        assert_true(strlen(cluster.rate_sources[rate]) > 20);
    }
    assert_true(cluster.rates[RATE_LAYER_OVERHEAD] == 0);
    cJSON_Delete(document.node);
    errors_free(&errors);
    arena_free(arena);
}

static void test_rejects(void **state) {
    (void)state;
    const struct {
        struct change change;
        const char *path, *text;
    } cases[] = {
        {{"racks", "2"}, "racks", ""},
        {{"nodes", "0"}, ": nodes: ", "0"},
        {{"nodes", "1.5"}, ": nodes: ", "1.5"},
        {{"nodes", "\"16\""}, ": nodes: ", "16"},
        {{"nodes", NULL}, "nodes", ""},
        {{"nics_per_node", "3"}, ": nics_per_node: ", "divisor of gpus_per_node, 8"},
        {{"nics_per_node", "16"}, ": nics_per_node: ", "divisor of gpus_per_node, 8"},
        {{"gpu", NULL}, "gpu", ""},
        {{"gpu", "[]"}, ": gpu: ", ""},
        {{"gpu.memory", "1"}, "gpu.memory", ""},
        {{"gpu.peak_flops", "-1"}, "gpu.peak_flops", "-1"},
        {{"gpu.hbm_bytes_per_s", "true"}, "gpu.hbm_bytes_per_s", "true"},
        {{"nvlink.latency_s", NULL}, "nvlink.latency_s", ""},
        {{"nic.latency_s", "2"}, "nic.latency_s", "2"},
        {{"host.bytes_per_s", "0"}, "host.bytes_per_s", "0"},
        {{"spine.oversubscription", "0.5"}, "spine.oversubscription", "0.5"},
        {{"spine.rail_only", "1"}, "spine.rail_only", "1"},
        {{"slow_gpus", "3"}, ": slow_gpus: ", "a list"},
        {{"slow_gpus", "[{\"gpu\": 128, \"speed\": 0.5}]"}, "slow_gpus", "allowed: 0 to 127"},
        {{"nodes", "65537"}, ": nodes: ", "from 1 to 65536"},
        {{"slow_gpus", "[{\"gpu\": 1, \"speed\": 1.5}]"}, "slow_gpus", "1.5"},
        {{"slow_gpus", "[{\"gpu\": 1, \"speed\": 0}]"}, "slow_gpus", "0"},
        {{"slow_gpus", "[{\"gpu\": 1}]"}, "slow_gpus", "speed"},
        {{"slow_gpus", "[{\"gpu\": 1, \"speed\": 0.5}, {\"gpu\": 1, \"speed\": 0.6}]"}, "slow_gpus", "once"},
        {{"rates", NULL}, "rates", ""},
        {{"rates.hbm", NULL}, "rates.hbm", ""},
        {{"rates.hbm", "2.68e12"}, "rates.hbm", ""},
        {{"rates.tensor", "{}"}, "rates.tensor", ""},
        {{"rates.gemm.unit", "\"TFLOP/s\""}, "rates.gemm.unit", "\"FLOP/s\""},
        {{"rates.kernel_launch.unit", "\"us\""}, "rates.kernel_launch.unit", "allowed: \"s\""},
        {{"rates.host_adam.unit", "\"bytes/s\""}, "rates.host_adam.unit", "\"parameters/s\""},
        {{"rates.gemm.source", "\"\""}, "rates.gemm.source", "where the value comes from"},
        {{"rates.gemm.source", "\"  \""}, "rates.gemm.source", "where the value comes from"},
        {{"rates.gemm.source", NULL}, "rates.gemm.source", ""},
        {{"rates.gemm.value", "0"}, "rates.gemm.value", "0"},
        {{"rates.gemm.value", "990e12"}, "rates.gemm.value", "gpu.peak_flops"},
        {{"rates.hbm.value", "4e12"}, "rates.hbm.value", "gpu.hbm_bytes_per_s"},
        {{"rates.nvlink_exchange.value", "201e9"}, "rates.nvlink_exchange.value", "nvlink.bytes_per_s"},
        {{"rates.nic_reduce.value", "51e9"}, "rates.nic_reduce.value", "nic.bytes_per_s"},
        {{"rates.host_copy.value", "65e9"}, "rates.host_copy.value", "host.bytes_per_s"},
        {{"rates.memory_reserve.value", "90e9"}, "rates.memory_reserve.value", "gpu.memory_bytes"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) assert_rejected(cases[i].change, cases[i].path, cases[i].text);
}

/* The largest clusters are checked like others. */
static void test_largest(void **state) {
    (void)state;
    const struct change changes[] = {{"nodes", "65536"},
                                     {"gpus_per_node", "256"},
                                     {"nics_per_node", "256"},
                                     {"slow_gpus", "[{\"gpu\": 16777216, \"speed\": 0.5}]"}};
    char *messages = messages_of(changes, COUNT(changes));
    assert_string_equal(messages, CLUSTER_FILE ": slow_gpus[0].gpu: found 16777216; the cluster has 16777216 "
                                               "GPUs; allowed: 0 to 16777215\n");
    free(messages);
    messages = messages_of(changes, 3);
    assert_string_equal(messages, "");
    free(messages);
}

/* What is left out: the head's products run as fast as others, rows are not rounded, a layer costs no more.
 */
static void test_optional_rates(void **state) {
    (void)state;
    static const struct {
        const char *file, *gemm; /* gemm: NULL as in the file */
        bool out;                /* whether the optional rates are */
        double head, tile, overhead;
    } cases[] = {{CLUSTER_FILE, NULL, false, 600e12, 128, 0},
                 {CLUSTER_FILE, NULL, true, 281.7e12, 0, 0},
                 {CLUSTER_FILE, "5e14", true, 5e14, 0, 0},
                 {FAST_CLUSTER_FILE, "5e14", false, 600e12, 128, 980e-6},
                 {FAST_CLUSTER_FILE, NULL, true, 600e12, 0, 0}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct arena *arena = arena_new();
        struct errors errors = {0};
        struct json document = json_read_file(cases[i].file, arena, &errors);
        struct cluster cluster = {.rates = {[RATE_LAYER_OVERHEAD] = 0}};
        if (cases[i].gemm) change_document(document.node, (struct change){"rates.gemm.value", cases[i].gemm});
        cJSON *rates = json_get_path(document.node, "rates");
        static const char *const optional[] = {"head_gemm", "grouped_gemm_tile", "layer_overhead"};
        for (size_t k = 0; cases[i].out && k < COUNT(optional); k++)
            cJSON_DeleteItemFromObjectCaseSensitive(rates, optional[k]);
        assert_true(cluster_read(document, &cluster));
        assert_true(cluster.rates[RATE_HEAD_GEMM] == cases[i].head);
        assert_true(cluster.rates[RATE_GROUPED_TILE] == cases[i].tile);
        assert_true(cluster.rates[RATE_LAYER_OVERHEAD] == cases[i].overhead);
        cJSON_Delete(document.node);
        errors_free(&errors);
        arena_free(arena);
    }
    assert_accepted(
        (struct change){"rates.layer_overhead", "{\"value\": 0, \"unit\": \"s\", \"source\": \"none\"}"});
    assert_accepted(
        (struct change){"rates.layer_overhead", "{\"value\": 1, \"unit\": \"s\", \"source\": \"a second\"}"});
    assert_accepted((struct change){"rates.grouped_gemm_tile.value", "1"});
}

/* File, path, what was found, what is allowed. */
static void test_messages(void **state) {
    (void)state;
    static const struct {
        struct change change;
        const char *message;
    } cases[] = {
        {{"rates.head_gemm.value", "990e12"},
         "rates.head_gemm.value: found 990000000000000; above what the hardware has; allowed: at most "
         "gpu.peak_flops, 989000000000000"},
        {{"rates.head_gemm.value", "0"}, "rates.head_gemm.value: found 0; allowed: a number from 1 to 1e+21"},
        {{"rates.head_gemm.unit", "\"s\""}, "rates.head_gemm.unit: found \"s\"; allowed: \"FLOP/s\""},
        {{"rates.grouped_gemm_tile.value", "0"},
         "rates.grouped_gemm_tile.value: found 0; allowed: a number from 1 to 1e+21"},
        {{"rates.grouped_gemm_tile.unit", "\"row\""},
         "rates.grouped_gemm_tile.unit: found \"row\"; allowed: \"rows\""},
        {{"rates.layer_overhead", "{\"value\": 1.5, \"unit\": \"s\", \"source\": \"too much\"}"},
         "rates.layer_overhead.value: found 1.5; allowed: a number from 0 to 1"},
        {{"rates.layer_overhead", "{\"value\": -1, \"unit\": \"s\", \"source\": \"less than none\"}"},
         "rates.layer_overhead.value: found -1; allowed: a number from 0 to 1"},
        {{"rates.layer_overhead", "{\"value\": 0, \"unit\": \"s\"}"},
         "rates.layer_overhead.source: the key is missing; allowed: a text"},
        {{"rates.kernel_launch.value", "2"},
         "rates.kernel_launch.value: found 2; allowed: a number from 0 to 1"},
        {{"nics_per_node", "3"}, "nics_per_node: found 3; allowed: a divisor of gpus_per_node, 8"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char *messages = messages_of(&cases[i].change, 1), expected[256];
        snprintf(expected, sizeof expected, CLUSTER_FILE ": %s\n", cases[i].message);
        assert_string_equal(messages, expected);
        free(messages);
    }
}

static void test_all_errors_at_once(void **state) {
    (void)state;
    const struct change changes[] = {
        {"nodes", "-3"},
        {"nics_per_node", "0"},
        {"gpu.name", "7"},
        {"nic", "null"},
        {"spine.rails", "true"},
        {"slow_gpus", "[{\"gpu\": -1, \"speed\": 1}, 5]"},
        {"rates.gemm.unit", "\"flops\""},
        {"rates.hbm.value", "\"fast\""},
        {"rates.nvlink_reduce.value", "300e9"},
        {"rates.host_adam", NULL},
    };
    char *messages = messages_of(changes, COUNT(changes));
    const char *expected[] = {"nodes",
                              "nics_per_node",
                              "gpu.name",
                              "nic",
                              "spine.rails",
                              "slow_gpus",
                              "rates.gemm.unit",
                              "rates.hbm.value",
                              "rates.nvlink_reduce.value",
                              "host_adam"};
    for (size_t i = 0; i < COUNT(expected); i++)
        if (!strstr(messages, expected[i])) fail_msg("no message on %s in\n%s", expected[i], messages);
    assert_true(lines_of(messages) >= (int)COUNT(changes) + 1);
    free(messages);
}

/* ---- transfers: closed forms ------------------------------------------------------------------------- */

/* Round figures, so that closed forms are easy to write: NVLink 100, NIC 10 bytes/s. */
static struct cluster plain_cluster(int nodes, int gpus_per_node, int nics_per_node) {
    struct cluster cluster = {.nodes = nodes, .gpus_per_node = gpus_per_node, .nics_per_node = nics_per_node};
    cluster.spine.oversubscription = 1;
    cluster.nvlink.latency_s = 1;
    cluster.nic.latency_s = 3;
    cluster.rates[RATE_NVLINK_EXCHANGE] = cluster.rates[RATE_NVLINK_REDUCE] = 100;
    cluster.rates[RATE_NIC_EXCHANGE] = cluster.rates[RATE_NIC_REDUCE] = 10;
    return cluster;
}

#define MOST_GPUS 64
struct sharers {
    int gpus[MOST_GPUS];
    double shares[MOST_GPUS];
    int count;
};

/* `count` GPUs from `first` on, with equal shares. */
static struct sharers even_sharers(int first, int count) {
    struct sharers group = {.count = count};
    for (int i = 0; i < count; i++) {
        group.gpus[i] = first + i;
        group.shares[i] = 1.0 / count;
    }
    return group;
}

static struct ports ports_of(const struct sharers *group) {
    return (struct ports){group->gpus, group->shares, group->count, NULL, 0};
}

static struct traffic exchange(const struct cluster *cluster, struct sharers from, struct sharers to,
                               double bytes) {
    return cluster_exchange(cluster, ports_of(&from), ports_of(&to), bytes);
}

static void test_all_to_all_over_two_nodes(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(2, 8, 8);
    /* 16 × 160 bytes: a GPU sends 160, 10 to each of 16. */
    struct traffic traffic = exchange(&cluster, even_sharers(0, 16), even_sharers(0, 16), 2560);
    assert_true(traffic.nic_bytes == 160.0 * 8 / 16);
    assert_true(traffic.nvlink_bytes == 160.0 * 7 / 16);
    assert_near(traffic.seconds, 3 + 80.0 / 10, 1e-15);
    /* Inside a node no NIC, and only NVLink's latency. */
    traffic = exchange(&cluster, even_sharers(8, 8), even_sharers(8, 8), 2560);
    assert_true(traffic.nic_bytes == 0 && traffic.nvlink_bytes == 320.0 * 7 / 8);
    assert_near(traffic.seconds, 1 + 280.0 / 100, 1e-15);
    /* Whole nodes apart, everything leaves by NIC. */
    traffic = exchange(&cluster, even_sharers(0, 8), even_sharers(8, 8), 2560);
    assert_true(traffic.nic_bytes == 320 && traffic.nvlink_bytes == 0);
}

static void test_unequal_sides(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(3, 8, 8);
    /* 16 senders, 4 receivers on another node: a receiver's port is four times as busy as a sender's. */
    struct traffic traffic = exchange(&cluster, even_sharers(0, 16), even_sharers(16, 4), 1600);
    assert_true(traffic.nic_bytes == 400 && traffic.nvlink_bytes == 0);
    assert_near(traffic.seconds, 3 + 40, 1e-15);
    traffic = exchange(&cluster, even_sharers(16, 4), even_sharers(0, 16), 1600);
    assert_true(traffic.nic_bytes == 400);
    /* One sender on the first node; 3 receivers beside it, 1 on the second node. */
    struct sharers to = even_sharers(1, 4);
    to.gpus[3] = 8;
    traffic = exchange(&cluster, even_sharers(0, 1), to, 400);
    assert_true(traffic.nic_bytes == 100 && traffic.nvlink_bytes == 300);
    assert_near(traffic.seconds, 3 + 10, 1e-15);
}

static void test_nothing_moves(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(2, 8, 8);
    struct traffic traffic = exchange(&cluster, even_sharers(5, 1), even_sharers(5, 1), 1e9);
    assert_true(traffic.seconds == 0 && traffic.nic_bytes == 0 && traffic.nvlink_bytes == 0);
    assert_true(exchange(&cluster, even_sharers(0, 16), even_sharers(0, 16), 0).seconds == 0);
    assert_true(exchange(&cluster, even_sharers(0, 0), even_sharers(0, 0), 100).seconds == 0);
    /* However little moves, it has its way to go. */
    assert_near(exchange(&cluster, even_sharers(0, 8), even_sharers(0, 8), 1e-3).seconds, 1, 1e-3);
    assert_near(exchange(&cluster, even_sharers(0, 8), even_sharers(8, 8), 1e-3).seconds, 3, 1e-3);
    int same[] = {3, 12};
    assert_true(cluster_pairwise(&cluster, same, same, 2, 100).seconds == 0);
    assert_true(cluster_reduce_seconds(&cluster, same, 1, 100) == 0);
    assert_true(cluster_reduce_seconds(&cluster, same, 2, 0) == 0);
}

static void test_spine_and_shared_nics(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(2, 8, 8);
    double full = exchange(&cluster, even_sharers(0, 16), even_sharers(0, 16), 2560).seconds - 3;
    cluster.spine.oversubscription = 4;
    assert_near(exchange(&cluster, even_sharers(0, 16), even_sharers(0, 16), 2560).seconds - 3, 4 * full,
                1e-14);
    cluster = plain_cluster(2, 8, 2);
    assert_near(exchange(&cluster, even_sharers(0, 16), even_sharers(0, 16), 2560).seconds - 3, 4 * full,
                1e-14);
    /* Rails: 7 of 8 bytes for the other node hop over NVLink first. */
    cluster = plain_cluster(2, 8, 8);
    cluster.spine.rail_only = true;
    struct traffic traffic = exchange(&cluster, even_sharers(0, 16), even_sharers(0, 16), 2560);
    assert_near(traffic.nvlink_bytes, 70 + 80 * 7.0 / 8, 1e-14);
    assert_true(traffic.nic_bytes == 80);
}

static void test_pairwise(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(2, 4, 4);
    int from[] = {0, 1, 2}, beside[] = {1, 2, 3}, across[] = {4, 5, 6}, turned[] = {5, 6, 4};
    struct traffic traffic = cluster_pairwise(&cluster, from, beside, 3, 200);
    assert_true(traffic.nvlink_bytes == 200 && traffic.nic_bytes == 0);
    assert_near(traffic.seconds, 1 + 2, 1e-15);
    traffic = cluster_pairwise(&cluster, from, across, 3, 200);
    assert_true(traffic.nvlink_bytes == 0 && traffic.nic_bytes == 200);
    assert_near(traffic.seconds, 3 + 20, 1e-15);
    /* On rails the same pairs stay on theirs; turned ones hop. */
    cluster.spine.rail_only = true;
    assert_true(cluster_pairwise(&cluster, from, across, 3, 200).nvlink_bytes == 0);
    traffic = cluster_pairwise(&cluster, from, turned, 3, 200);
    assert_true(traffic.nvlink_bytes == 200 && traffic.nic_bytes == 200);
    /* Two messages through one port take twice as long. */
    int one[] = {0, 0}, two[] = {4, 5};
    cluster.spine.rail_only = false;
    assert_true(cluster_pairwise(&cluster, one, two, 2, 200).nic_bytes == 400);
}

static void test_reduce(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(4, 8, 8);
    int gpus[32];
    for (int i = 0; i < 32; i++) gpus[i] = i;
    assert_near(cluster_reduce_seconds(&cluster, gpus, 8, 800), 7 + 7.0 / 8 * 800 / 100, 1e-15);
    /* Four whole nodes: each NIC carries an eighth of the tensor, three quarters of it. */
    assert_near(cluster_reduce_seconds(&cluster, gpus, 32, 8000), 7 + 9 + 3.0 / 4 * 1000 / 10, 1e-15);
    /* One GPU a node: the whole tensor through its NIC. */
    int apart[] = {0, 8, 16, 24};
    assert_near(cluster_reduce_seconds(&cluster, apart, 4, 800), 9 + 3.0 / 4 * 800 / 10, 1e-15);
    cluster.spine.oversubscription = 2;
    assert_near(cluster_reduce_seconds(&cluster, apart, 4, 800), 9 + 3.0 / 4 * 800 / 5, 1e-15);
}

static void test_slowest(void **state) {
    (void)state;
    struct slow_gpu slow[] = {{3, 0.5}, {9, 0.25}};
    struct cluster cluster = plain_cluster(2, 8, 8);
    int gpus[] = {8, 3, 15};
    assert_true(cluster_slowest(&cluster, gpus, 3) == 1);
    cluster.slow_gpus = slow;
    cluster.slow_count = 2;
    assert_true(cluster_slowest(&cluster, gpus, 3) == 0.5);
    assert_true(cluster_slowest(&cluster, gpus, 1) == 1);
    assert_true(cluster_slowest(&cluster, NULL, 3) == 1);
    assert_true(cluster_slowest(&cluster, NULL, 4) == 0.5);
    assert_true(cluster_slowest(&cluster, NULL, 16) == 0.25);
}

/* ---- transfers: every pair counted ------------------------------------------------------------------- */

static struct sharers random_sharers(struct rng *rng, int gpus) {
    struct sharers group = {0};
    double total = 0;
    int wanted = 1 + rng_below(rng, gpus);
    for (int gpu = 0; gpu < gpus; gpu++) {
        if (rng_below(rng, gpus) >= wanted && !(group.count == 0 && gpu == gpus - 1)) continue;
        double share = rng_below(rng, 5) ? rng_uniform(rng) : 0;
        group.gpus[group.count] = gpu;
        group.shares[group.count++] = share;
        total += share;
    }
    for (int i = 0; i < group.count; i++)
        group.shares[i] = total > 0 ? group.shares[i] / total : 1.0 / group.count;
    /* Order must not matter: exchange two. */
    int a = rng_below(rng, group.count), b = rng_below(rng, group.count);
    int gpu = group.gpus[a];
    double share = group.shares[a];
    group.gpus[a] = group.gpus[b], group.shares[a] = group.shares[b];
    group.gpus[b] = gpu, group.shares[b] = share;
    return group;
}

static double busiest(const double *ports, int count) {
    double most = 0;
    for (int i = 0; i < count; i++) most = fmax(most, ports[i]);
    return most;
}

/* Where one side of an exchange meets the network: NICs that it owns, or, where it names none, the part of a
   NIC that each of its GPUs brings. */
struct door {
    int node;
    int first_gpu, gpus; /* beside it */
    double nics;         /* how much of one */
    double offered;      /* bytes between other nodes and the side's GPUs beside it */
    double through;      /* bytes that pass it */
};

static int doors_of(const struct cluster *cluster, struct ports side, struct door *doors) {
    int per_node = cluster->gpus_per_node, per_nic = per_node / cluster->nics_per_node;
    for (int i = 0; side.nics && i < side.nic_count; i++)
        doors[i] = (struct door){.node = side.nics[i] / cluster->nics_per_node,
                                 .first_gpu = side.nics[i] / cluster->nics_per_node * per_node +
                                              side.nics[i] % cluster->nics_per_node * per_nic,
                                 .gpus = per_nic,
                                 .nics = 1};
    for (int i = 0; !side.nics && i < side.count; i++)
        doors[i] = (struct door){
            .node = side.gpus[i] / per_node, .first_gpu = side.gpus[i], .gpus = 1, .nics = 1.0 / per_nic};
    return side.nics ? side.nic_count : side.count;
}

static struct door *door_beside(struct door *doors, int count, int gpu) {
    for (int i = 0; i < count; i++)
        if (gpu >= doors[i].first_gpu && gpu < doors[i].first_gpu + doors[i].gpus) return &doors[i];
    return NULL;
}

/* One direction of every GPU's NVLink port and of every door. */
struct counted {
    const struct cluster *cluster;
    struct ports sides[2]; /* from, to */
    struct door doors[2][MOST_GPUS];
    int door_count[2];
    double nvlink[2][MOST_GPUS]; /* out, in */
};

static double message(const struct counted *counted, double bytes, int i, int j) {
    return bytes * counted->sides[0].shares[i] * counted->sides[1].shares[j];
}

static bool is_inside(const struct counted *counted, int i, int j) {
    int per_node = counted->cluster->gpus_per_node;
    return counted->sides[0].gpus[i] / per_node == counted->sides[1].gpus[j] / per_node;
}

/* What a node's doors carry is the same at each NIC. */
static void level_doors(struct counted *counted, int end, int node) {
    double bytes = 0, nics = 0;
    int per_node = counted->cluster->gpus_per_node;
    for (int d = 0; d < counted->door_count[end]; d++)
        if (counted->doors[end][d].node == node) nics += counted->doors[end][d].nics;
    for (int i = 0; i < counted->sides[0].count; i++)
        for (int j = 0; j < counted->sides[1].count; j++)
            if (!is_inside(counted, i, j) && counted->sides[end].gpus[end ? j : i] / per_node == node)
                bytes += message(counted, 1, i, j);
    for (int d = 0; d < counted->door_count[end]; d++) {
        struct door *door = &counted->doors[end][d];
        if (door->node == node && bytes > 0) door->through = bytes * door->nics / nics;
    }
}

/* A part of one message passes a door that is not beside its GPU: it hops to or from each of the GPUs there.
 */
static void hop(struct counted *counted, int end, int gpu, double bytes) {
    int node = gpu / counted->cluster->gpus_per_node;
    double room = 0;
    for (int d = 0; d < counted->door_count[end]; d++) {
        const struct door *door = &counted->doors[end][d];
        if (door->node == node) room += fmax(0, door->through - door->offered);
    }
    counted->nvlink[end][gpu] += bytes;
    for (int d = 0; d < counted->door_count[end]; d++) {
        const struct door *door = &counted->doors[end][d];
        double part = door->node == node ? fmax(0, door->through - door->offered) / room : 0;
        for (int g = 0; g < door->gpus; g++)
            counted->nvlink[1 - end][door->first_gpu + g] += bytes * part / door->gpus;
    }
}

/* Adds up each message of 1 byte in all on the ports that it passes. */
static void count_pairs(struct counted *counted) {
    const struct cluster *cluster = counted->cluster;
    int per_node = cluster->gpus_per_node;
    double rails = cluster->spine.rail_only ? 1 - 1.0 / cluster->nics_per_node : 0;
    for (int end = 0; end < 2; end++) {
        counted->door_count[end] = doors_of(cluster, counted->sides[end], counted->doors[end]);
        for (int i = 0; i < counted->sides[0].count; i++)
            for (int j = 0; j < counted->sides[1].count; j++) {
                struct door *door = door_beside(counted->doors[end], counted->door_count[end],
                                                counted->sides[end].gpus[end ? j : i]);
                if (door && !is_inside(counted, i, j)) door->offered += message(counted, 1, i, j);
            }
        for (int node = 0; node < cluster->nodes; node++) level_doors(counted, end, node);
    }
    for (int i = 0; i < counted->sides[0].count; i++)
        for (int j = 0; j < counted->sides[1].count; j++) {
            int gpus[] = {counted->sides[0].gpus[i], counted->sides[1].gpus[j]};
            double bytes = message(counted, 1, i, j);
            if (gpus[0] == gpus[1] || bytes == 0) continue;
            if (is_inside(counted, i, j)) {
                for (int end = 0; end < 2; end++) counted->nvlink[end][gpus[end]] += bytes;
                continue;
            }
            for (int end = 0; end < 2; end++) {
                const struct door *door =
                    door_beside(counted->doors[end], counted->door_count[end], gpus[end]);
                double stays = door ? fmin(1, door->through / door->offered) : 0;
                if (stays < 1 - 1e-12) hop(counted, end, gpus[end], bytes * (1 - stays));
            }
            counted->nvlink[0][gpus[0]] += rails * bytes;
            for (int g = 0; g < per_node; g++)
                counted->nvlink[1][gpus[0] / per_node * per_node + g] += rails * bytes / per_node;
        }
}

static struct traffic exchange_by_pairs(const struct cluster *cluster, struct ports from, struct ports to,
                                        double bytes) {
    struct counted counted = {.cluster = cluster, .sides = {from, to}};
    struct traffic traffic = {0};
    count_pairs(&counted);
    for (int end = 0; end < 2; end++) {
        for (int d = 0; d < counted.door_count[end]; d++)
            traffic.nic_bytes =
                fmax(traffic.nic_bytes, bytes * counted.doors[end][d].through / counted.doors[end][d].nics);
        traffic.nvlink_bytes =
            fmax(traffic.nvlink_bytes, bytes * busiest(counted.nvlink[end], cluster_gpus(cluster)));
    }
    double nic_rate = cluster->rates[RATE_NIC_EXCHANGE] / cluster->spine.oversubscription;
    traffic.seconds =
        fmax(traffic.nic_bytes / nic_rate, traffic.nvlink_bytes / cluster->rates[RATE_NVLINK_EXCHANGE]);
    if (traffic.nic_bytes > 0)
        traffic.seconds += cluster->nic.latency_s;
    else if (traffic.nvlink_bytes > 0)
        traffic.seconds += cluster->nvlink.latency_s;
    return traffic;
}

static struct cluster random_cluster(struct rng *rng) {
    int per_node = 1 << rng_below(rng, 4), nics = 1 << rng_below(rng, 4);
    struct cluster cluster =
        plain_cluster(1 + rng_below(rng, 6), per_node, nics > per_node ? per_node : nics);
    cluster.spine.oversubscription = 1 + rng_below(rng, 4);
    cluster.spine.rail_only = rng_below(rng, 2);
    return cluster;
}

/* Any NICs of the nodes that the group stands on, at least one on each, and some elsewhere, which carry
   nothing. */
static struct ports with_random_nics(struct rng *rng, const struct cluster *cluster,
                                     const struct sharers *group, int nics[MOST_GPUS]) {
    struct ports ports = ports_of(group);
    int a_node = cluster->nics_per_node, wanted = rng_below(rng, 4);
    ports.nics = nics;
    for (int node = 0; node < cluster->nodes; node++) {
        bool here = false;
        for (int i = 0; i < group->count; i++) here |= group->gpus[i] / cluster->gpus_per_node == node;
        int sure = here ? rng_below(rng, a_node) : -1;
        for (int k = 0; k < a_node; k++)
            if (k == sure || rng_below(rng, 4) < wanted) nics[ports.nic_count++] = node * a_node + k;
    }
    return ports;
}

static void assert_as_by_pairs(const struct cluster *cluster, struct ports from, struct ports to,
                               double bytes) {
    struct traffic found = cluster_exchange(cluster, from, to, bytes);
    struct traffic expected = exchange_by_pairs(cluster, from, to, bytes);
    assert_near(found.nic_bytes, expected.nic_bytes, 1e-9);
    /* To the rounding of what is left when the two sides of a NIC's share are subtracted. */
    if (fabs(found.nvlink_bytes - expected.nvlink_bytes) > 1e-12 * bytes)
        fail_msg("NVLink %.17g, expected %.17g", found.nvlink_bytes, expected.nvlink_bytes);
    assert_near(found.seconds, expected.seconds, 1e-9);
}

static void test_exchange_equals_sum_over_pairs(void **state) {
    (void)state;
    struct rng rng = rng_seed(20260511);
    int cases = sampled(3000), nics[2][MOST_GPUS];
    for (int i = 0; i < cases; i++) {
        struct cluster cluster = random_cluster(&rng);
        struct sharers from = random_sharers(&rng, cluster_gpus(&cluster));
        struct sharers to = rng_below(&rng, 3) ? random_sharers(&rng, cluster_gpus(&cluster)) : from;
        struct ports sender = ports_of(&from), receiver = ports_of(&to);
        if (rng_below(&rng, 3)) sender = with_random_nics(&rng, &cluster, &from, nics[0]);
        if (rng_below(&rng, 3)) receiver = with_random_nics(&rng, &cluster, &to, nics[1]);
        assert_as_by_pairs(&cluster, sender, receiver, 1e6 * rng_uniform(&rng));
    }
}

/* ---- where a ring's sides stand, and their NICs ------------------------------------------------------- */

#define MOST_EXPERTS 64

/* A plan of a ring by hand. */
struct ring_scene {
    struct cluster cluster;
    struct model model;
    struct point point;
    struct plan plan;
    double share[MOST_EXPERTS];
    struct arena *arena;
    struct ring_placement placement;
};

static void open_ring(struct ring_scene *scene, struct cluster cluster, struct parallel parallel,
                      int placement, int replicas) {
    *scene = (struct ring_scene){.cluster = cluster, .arena = arena_new()};
    scene->model = (struct model){.name = "m", .layers = 8, .hidden = 16, .vocab = 32};
    scene->model.moe.experts = MOST_EXPERTS;
    scene->model.moe.top_k = 2;
    scene->model.moe.expert_hidden = 8;
    scene->point = (struct point){.model = &scene->model,
                                  .cluster = &scene->cluster,
                                  .seq_len = 48,
                                  .micro_batch_size = 1,
                                  .routing = {"balanced", scene->share}};
    for (int i = 0; i < MOST_EXPERTS; i++) scene->share[i] = 1.0 / MOST_EXPERTS;
    scene->plan = (struct plan){
        .point = &scene->point, .parallel = parallel, .placement = placement, .replicas = replicas};
}

static bool place(struct ring_scene *scene) {
    return placement_make(&scene->plan, scene->arena, &scene->placement, NULL);
}

static void close_ring(struct ring_scene *scene) {
    arena_free(scene->arena);
}

static struct sides sides_of(const struct ring_scene *scene, int block, int next) {
    return (struct sides){scene->placement.attention[block], scene->placement.ffn[block],
                          scene->placement.attention[next]};
}

/* The issue's own example: attention on 16 GPUs of two whole nodes, experts on 10 of two others. */
static void test_ten_ffn_gpus_with_all_nics(void **state) {
    (void)state;
    const struct parallel even = {.groups = 1, .attn_gpus = 16, .ffn_gpus = 16, .cp = 1};
    struct parallel ten = even, ten_nics;
    double seconds[3], combine[3];
    ten.ffn_gpus = 10;
    ten_nics = ten;
    ten.attn_nics = ten.ffn_nics = ten_nics.attn_nics = 16;
    ten_nics.ffn_nics = 10;
    const struct parallel layouts[] = {even, ten, ten_nics};
    for (int i = 0; i < 3; i++) {
        struct ring_scene scene;
        open_ring(&scene, plain_cluster(4, 8, 8), layouts[i], PLACEMENT_SPLIT, 1);
        if (i == 0) scene.plan.parallel.attn_nics = scene.plan.parallel.ffn_nics = 16;
        assert_true(place(&scene));
        const struct side *ffn = &scene.placement.ffn[0];
        for (int gpu = 0; gpu < ffn->count; gpu++) /* 8 and 8, or 5 and 5 */
            assert_int_equal(ffn->gpus[gpu], 16 + gpu / (ffn->count / 2) * 8 + gpu % (ffn->count / 2));
        assert_int_equal(ffn->nic_count, i < 2 ? 16 : 10);
        seconds[i] = plan_dispatch_cost(&scene.plan, 0, sides_of(&scene, 0, 0)).seconds - 3;
        combine[i] = plan_combine_cost(&scene.plan, 0, sides_of(&scene, 0, 0), 1).seconds - 3;
        close_ring(&scene);
    }
    /* 16 × 48 tokens × 2 copies × 32 bytes over 16 NICs */
    assert_near(seconds[0], 48 * 2 * 32 / 10.0, 1e-12);
    assert_near(seconds[1], seconds[0], 1e-12);
    assert_near(seconds[2], 1.6 * seconds[0], 1e-12);
    for (int i = 0; i < 3; i++) assert_near(combine[i], seconds[i], 1e-12);
}

static int node_of(const struct ring_scene *scene, int gpu) {
    return gpu / scene->cluster.gpus_per_node;
}

static int gpus_on(const struct ring_scene *scene, const struct side *side, int node) {
    int count = 0;
    for (int i = 0; i < side->count; i++) count += node_of(scene, side->gpus[i]) == node;
    return count;
}

static int nics_on(const struct ring_scene *scene, const struct side *side, int node) {
    int count = 0;
    for (int i = 0; i < side->nic_count; i++) count += side->nics[i] / scene->cluster.nics_per_node == node;
    return count;
}

static const struct side *side_number(const struct ring_scene *scene, int number) {
    return number % 2 ? &scene->placement.ffn[number / 2] : &scene->placement.attention[number / 2];
}

/* No GPU and no NIC twice; as many as are asked for; a NIC only where the side stands, and one on each node.
 */
static void assert_placed(const struct ring_scene *scene) {
    const struct parallel *parallel = &scene->plan.parallel;
    bool gpu_taken[2 * MOST_GPUS] = {0}, nic_taken[2 * MOST_GPUS] = {0};
    for (int s = 0; s < 2 * scene->placement.blocks; s++) {
        const struct side *side = side_number(scene, s);
        assert_int_equal(side->count, s % 2 ? parallel->ffn_gpus : parallel->attn_gpus);
        for (int i = 0; i < side->count; i++) {
            assert_in_range(side->gpus[i], 0, cluster_gpus(&scene->cluster) - 1);
            assert_false(gpu_taken[side->gpus[i]]);
            gpu_taken[side->gpus[i]] = true;
        }
        if (parallel->attn_nics == NICS_SHARED) {
            assert_null(side->nics);
            continue;
        }
        assert_int_equal(side->nic_count, s % 2 ? parallel->ffn_nics : parallel->attn_nics);
        for (int i = 0; i < side->nic_count; i++) {
            assert_false(nic_taken[side->nics[i]]);
            nic_taken[side->nics[i]] = true;
            assert_true(gpus_on(scene, side, side->nics[i] / scene->cluster.nics_per_node) > 0);
        }
        for (int node = 0; node < scene->cluster.nodes; node++)
            assert_true((gpus_on(scene, side, node) > 0) == (nics_on(scene, side, node) > 0));
    }
}

/* A node holds one component; a component's GPUs are spread evenly over the nodes that they, or their NICs,
   need. */
static void assert_split(const struct ring_scene *scene) {
    const struct parallel *parallel = &scene->plan.parallel;
    int a_node = scene->cluster.gpus_per_node, a_node_nics = scene->cluster.nics_per_node;
    for (int ffn = 0; ffn < 2; ffn++) {
        int on[MOST_GPUS] = {0}, used = 0, blocks = scene->placement.blocks;
        int gpus = blocks * (ffn ? parallel->ffn_gpus : parallel->attn_gpus);
        int nics = blocks * (ffn ? parallel->ffn_nics : parallel->attn_nics);
        if (parallel->attn_nics == NICS_SHARED) nics = 0;
        int nodes = (gpus + a_node - 1) / a_node, by_nics = (nics + a_node_nics - 1) / a_node_nics;
        if (by_nics > nodes) nodes = by_nics;
        for (int s = ffn; s < 2 * blocks; s += 2)
            for (int node = 0; node < scene->cluster.nodes; node++)
                on[node] += gpus_on(scene, side_number(scene, s), node);
        for (int node = 0; node < scene->cluster.nodes; node++) {
            if (!on[node]) continue;
            used++;
            assert_in_range(on[node], gpus / nodes, (gpus + nodes - 1) / nodes);
            for (int s = 1 - ffn; s < 2 * blocks; s += 2)
                assert_int_equal(gpus_on(scene, side_number(scene, s), node), 0);
        }
        assert_int_equal(used, gpus < nodes ? gpus : nodes);
    }
}

/* Dispatch and combine of each block against every pair of its GPUs. */
static void assert_legs_by_pairs(const struct ring_scene *scene) {
    const struct plan *plan = &scene->plan;
    double tokens = 1.0 * plan->point->micro_batch_size * plan->point->seq_len / plan->parallel.cp;
    double bytes = tokens * plan->parallel.attn_gpus * 2 /* copies */ * 32, even[MOST_GPUS],
           shares[MOST_GPUS];
    int m = plan->parallel.attn_gpus, n = plan->parallel.ffn_gpus, p = plan->parallel.groups;
    for (int i = 0; i < m; i++) even[i] = 1.0 / m;
    for (int i = 0; i < n; i++) shares[i] = 0;
    for (int expert = 0, gpu = 0; expert < MOST_EXPERTS; expert++) {
        while (expert >= MOST_EXPERTS * (gpu + 1) / n) gpu++;
        shares[gpu] += scene->share[expert];
    }
    for (int b = 0; b < scene->placement.blocks; b++) {
        struct sides sides = sides_of(scene, b, b / p * p + (b + 1) % p);
        struct side *a = &sides.attention, *f = &sides.ffn, *next = &sides.next;
        struct ports experts = {f->gpus, shares, n, f->nics, f->nic_count};
        struct traffic dispatch = exchange_by_pairs(
            &scene->cluster, (struct ports){a->gpus, even, m, a->nics, a->nic_count}, experts, bytes);
        struct traffic combine =
            exchange_by_pairs(&scene->cluster, experts,
                              (struct ports){next->gpus, even, m, next->nics, next->nic_count}, bytes);
        assert_near(plan_dispatch_cost(plan, 0, sides).seconds, dispatch.seconds, 1e-9);
        assert_near(plan_combine_cost(plan, 0, sides, 1).seconds, combine.seconds, 1e-9);
    }
}

static void test_random_placements(void **state) {
    (void)state;
    struct rng rng = rng_seed(20261102);
    int cases = sampled(6000), placed = 0, with_nics = 0;
    for (int i = 0; i < cases; i++) {
        struct cluster cluster = random_cluster(&rng);
        int gpus = cluster_gpus(&cluster), p = 1 + rng_below(&rng, 3), replicas = 1 + rng_below(&rng, 2);
        int each = gpus / p / replicas, cp = 1 << rng_below(&rng, 2);
        if (each < 2) continue;
        struct parallel parallel = {.groups = p, .cp = cp};
        parallel.attn_gpus = (1 + rng_below(&rng, each - 1) + cp - 1) / cp * cp;
        parallel.ffn_gpus =
            1 + rng_below(&rng, each - parallel.attn_gpus > 0 ? each - parallel.attn_gpus : 1);
        bool shared = rng_below(&rng, 4) == 0;
        int nics = cluster.nodes * cluster.nics_per_node / p / replicas / 2 + 1;
        parallel.attn_nics = shared ? NICS_SHARED : 1 + rng_below(&rng, nics);
        parallel.ffn_nics = shared ? NICS_SHARED : 1 + rng_below(&rng, nics);
        struct ring_scene scene;
        open_ring(&scene, cluster, parallel, rng_below(&rng, 2), replicas);
        if (rng_below(&rng, 2)) {
            double sum = 0;
            scene.point.routing.text = "zipf:1";
            for (int e = 0; e < MOST_EXPERTS; e++) sum += scene.share[e] = rng_uniform(&rng);
            for (int e = 0; e < MOST_EXPERTS; e++) scene.share[e] /= sum;
        }
        if (place(&scene)) {
            assert_placed(&scene);
            if (scene.plan.placement == PLACEMENT_SPLIT) assert_split(&scene);
            assert_legs_by_pairs(&scene);
            placed++;
            with_nics += !shared;
        }
        close_ring(&scene);
    }
    print_message("%d of %d placed, %d with NICs of their own\n", placed, cases, with_nics);
    assert_true(placed > cases / 10 && with_nics > cases / 25);
}

/* NICs by node, of sides that share nodes: as their GPUs there are, as the side's own are. */
static void test_nics_are_divided(void **state) {
    (void)state;
    static const struct {
        struct parallel parallel;
        int placement, replicas, nodes;
        int attention[4][4], ffn[4][4]; /* of each block, NICs on each node */
    } cases[] = {
        /* One group: 10 F-GPUs on two nodes, 5 NICs: the first node has one more. */
        {{.groups = 1, .attn_gpus = 16, .ffn_gpus = 10, .cp = 1, .attn_nics = 16, .ffn_nics = 5},
         PLACEMENT_SPLIT,
         1,
         4,
         {{8, 8}},
         {{0, 0, 3, 2}}},
        /* More NICs than the GPUs' nodes have: a third node. */
        {{.groups = 1, .attn_gpus = 9, .ffn_gpus = 1, .cp = 1, .attn_nics = 24, .ffn_nics = 8},
         PLACEMENT_SPLIT,
         1,
         4,
         {{8, 8, 8}},
         {{0, 0, 0, 8}}},
        /* Two groups of 12 on three nodes: 8 + 4 and 4 + 8 GPUs. */
        {{.groups = 2, .attn_gpus = 12, .ffn_gpus = 4, .cp = 1, .attn_nics = 12, .ffn_nics = 4},
         PLACEMENT_SPLIT,
         1,
         4,
         {{8, 4, 0, 0}, {0, 4, 8, 0}},
         {{0, 0, 0, 4}, {0, 0, 0, 4}}},
        /* Fewer than it has GPUs: 6 NICs for 8 + 4. */
        {{.groups = 2, .attn_gpus = 12, .ffn_gpus = 4, .cp = 1, .attn_nics = 6, .ffn_nics = 3},
         PLACEMENT_SPLIT,
         1,
         4,
         {{4, 2, 0, 0}, {0, 2, 4, 0}},
         {{0, 0, 0, 3}, {0, 0, 0, 3}}},
        /* Mixed nodes: 6 and 2 GPUs of each group on its own node. */
        {{.groups = 2, .attn_gpus = 6, .ffn_gpus = 2, .cp = 1, .attn_nics = 5, .ffn_nics = 3},
         PLACEMENT_MIXED,
         1,
         2,
         {{5, 0}, {0, 5}},
         {{3, 0}, {0, 3}}},
        /* Two replicas of one group on a node each. */
        {{.groups = 1, .attn_gpus = 3, .ffn_gpus = 5, .cp = 1, .attn_nics = 4, .ffn_nics = 4},
         PLACEMENT_MIXED,
         2,
         2,
         {{4, 0}, {0, 4}},
         {{4, 0}, {0, 4}}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct ring_scene scene;
        open_ring(&scene, plain_cluster(cases[i].nodes, 8, 8), cases[i].parallel, cases[i].placement,
                  cases[i].replicas);
        assert_true(place(&scene));
        assert_placed(&scene);
        for (int b = 0; b < scene.placement.blocks; b++)
            for (int node = 0; node < cases[i].nodes; node++) {
                assert_int_equal(nics_on(&scene, &scene.placement.attention[b], node),
                                 cases[i].attention[b][node]);
                assert_int_equal(nics_on(&scene, &scene.placement.ffn[b], node), cases[i].ffn[b][node]);
            }
        close_ring(&scene);
    }
}

/* A side takes the NICs beside its own GPUs first, so that nothing hops that need not. */
static void test_own_nics_first(void **state) {
    (void)state;
    struct ring_scene scene;
    struct parallel parallel = {.groups = 1, .attn_gpus = 4, .ffn_gpus = 4, .cp = 1, .attn_nics = 4};
    parallel.ffn_nics = 4;
    open_ring(&scene, plain_cluster(1, 8, 8), parallel, PLACEMENT_MIXED, 1);
    assert_true(place(&scene));
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < 4; i++)
            assert_int_equal(side_number(&scene, s)->nics[i], side_number(&scene, s)->gpus[i]);
    close_ring(&scene);
}

/* Without numbers the division with the shorter longest transfer: never longer than each of a few others. */
static void test_division_is_computed(void **state) {
    (void)state;
    struct rng rng = rng_seed(20261103);
    int cases = sampled(200), shared = 0;
    for (int i = 0; i < cases; i++) {
        struct cluster cluster = plain_cluster(2 + rng_below(&rng, 3), 8, 8);
        struct parallel parallel = {.groups = 1 + rng_below(&rng, 2), .cp = 1};
        int each = cluster_gpus(&cluster) / parallel.groups;
        parallel.attn_gpus = 1 + rng_below(&rng, each - 1);
        parallel.ffn_gpus = 1 + rng_below(&rng, each - parallel.attn_gpus);
        int placement = rng_below(&rng, 2), given = rng_below(&rng, 4) ? 0 : 1 + rng_below(&rng, 8);
        struct ring_scene best, other;
        parallel.attn_nics = given;
        open_ring(&best, cluster, parallel, placement, 1);
        placement_divide_nics(&best.plan);
        const struct parallel *chosen = &best.plan.parallel;
        if (given) assert_int_equal(chosen->attn_nics, given);
        assert_true((chosen->attn_nics == NICS_SHARED) == (chosen->ffn_nics == NICS_SHARED));
        assert_true(given || (chosen->attn_nics != 0 && chosen->ffn_nics != 0));
        if (place(&best) && chosen->attn_nics > 0) {
            double longest[2] = {0, 0};
            struct ring_scene *both[] = {&best, &other};
            for (int tries = 0; tries < 10; tries++) {
                struct parallel tried = parallel;
                tried.attn_nics = given ? given : 1 + rng_below(&rng, parallel.attn_gpus);
                tried.ffn_nics = 1 + rng_below(&rng, parallel.ffn_gpus);
                open_ring(&other, cluster, tried, placement, 1);
                if (place(&other)) {
                    for (int k = 0; k < 2; k++) {
                        longest[k] = 0;
                        for (int g = 0; g < parallel.groups; g++) {
                            struct sides sides = sides_of(both[k], g, (g + 1) % parallel.groups);
                            longest[k] =
                                fmax(longest[k], plan_dispatch_cost(&both[k]->plan, 0, sides).seconds);
                            longest[k] =
                                fmax(longest[k], plan_combine_cost(&both[k]->plan, 0, sides, 1).seconds);
                        }
                    }
                    if (longest[0] > longest[1] * (1 + 1e-9))
                        fail_msg("%d+%d: NICs %d+%d take %g, %d+%d %g", parallel.attn_gpus, parallel.ffn_gpus,
                                 chosen->attn_nics, chosen->ffn_nics, longest[0], tried.attn_nics,
                                 tried.ffn_nics, longest[1]);
                }
                close_ring(&other);
            }
        }
        shared += chosen->attn_nics == NICS_SHARED;
        close_ring(&best);
    }
    print_message("%d of %d share each node's NICs by GPUs\n", shared, cases);
}

/* ---- calibration ------------------------------------------------------------------------------------- */

/* Section 3 of the paper: Qwen3 on 8 nodes. Experts are spread over 16 GPUs, as in the paper's baselines. */
#define EXPERT_PARALLEL 16
struct section_3 {
    int seq_len;
    double attention_share, ffn_share; /* of a layer's forward time */
    double attention_ratio, ffn_ratio; /* ÷ one all-to-all */
};
static const struct section_3 SECTION_3[] = {{4096, 0.2838, 0.1922, 1.08, 0.73},
                                             {32768, 0.5026, 0.1396, 2.78, 0.77}};

struct testbed {
    struct arena *arena;
    struct errors errors;
    cJSON *documents[2];
    struct cluster cluster;
    struct model model;
};

static int close_testbed(void **state) {
    struct testbed *testbed = *state;
    for (int i = 0; i < 2; i++) cJSON_Delete(testbed->documents[i]);
    errors_free(&testbed->errors);
    arena_free(testbed->arena);
    free(testbed);
    return 0;
}

static int open_with(void **state, const char *cluster_file) {
    struct testbed *testbed = must_alloc(sizeof *testbed);
    *state = testbed;
    testbed->arena = arena_new();
    struct json cluster = json_read_file(cluster_file, testbed->arena, &testbed->errors);
    struct json model = json_read_file(MODEL_FILE, testbed->arena, &testbed->errors);
    testbed->documents[0] = cluster.node;
    testbed->documents[1] = model.node;
    if (cluster.node && model.node && cluster_read(cluster, &testbed->cluster) &&
        model_read(model, &testbed->model))
        return 0;
    errors_print(&testbed->errors, stderr);
    close_testbed(state); /* cmocka does not, after a setup that failed */
    return -1;
}

static int open_testbed(void **state) {
    return open_with(state, CLUSTER_FILE);
}

static int open_fast_testbed(void **state) {
    return open_with(state, FAST_CLUSTER_FILE);
}

/* Each product takes the longer of its FLOPs and its operands. */
static double seconds_of(struct work work, const double *rates) {
    static const enum rate of_unit[] = {
        [UNIT_DENSE] = RATE_GEMM, [UNIT_EXPERTS] = RATE_GROUPED_GEMM, [UNIT_HEAD] = RATE_HEAD_GEMM};
    double seconds = work.core_flops / rates[RATE_CORE_FORWARD] + work.bytes / rates[RATE_HBM] +
                     work.kernels * rates[RATE_KERNEL_LAUNCH];
    for (int i = 0; i < work.product_count; i++)
        seconds += fmax(work.products[i].flops / rates[of_unit[work.products[i].unit]],
                        work.products[i].bytes / rates[RATE_HBM]);
    return seconds;
}

static struct work attention_work(const struct model *model, int seq_len) {
    return model_attention_work(model, 0, WORK_FORWARD, (struct tokens){1, seq_len, 1}, 4);
}

/* Balanced routing: a GPU gets as many copies as it sends, each of its experts a whole number of tiles. */
static struct work ffn_work(const struct model *model, int seq_len, int expert_parallel) {
    double copies = (double)seq_len * model->moe.top_k;
    struct ffn_load load = {copies, copies, (double)model->moe.experts / expert_parallel, seq_len};
    return model_ffn_work(model, 0, WORK_FORWARD, load, 4);
}

/* One all-to-all of a micro-batch of one sequence a GPU. */
static double all_to_all(const struct testbed *testbed, int seq_len, int expert_parallel) {
    struct sharers group = even_sharers(0, expert_parallel);
    double bytes = (double)expert_parallel * seq_len * testbed->model.moe.top_k * 2 * testbed->model.hidden;
    return exchange(&testbed->cluster, group, group, bytes).seconds;
}

static double attention_seconds(const struct testbed *testbed, int seq_len) {
    return seconds_of(attention_work(&testbed->model, seq_len), testbed->cluster.rates) +
           testbed->cluster.rates[RATE_LAYER_OVERHEAD];
}

static void test_section_3_table(void **state) {
    const struct testbed *testbed = *state;
    for (size_t i = 0; i < COUNT(SECTION_3); i++) {
        struct section_3 paper = SECTION_3[i];
        double a = attention_seconds(testbed, paper.seq_len);
        double f =
            seconds_of(ffn_work(&testbed->model, paper.seq_len, EXPERT_PARALLEL), testbed->cluster.rates);
        double c = all_to_all(testbed, paper.seq_len, EXPERT_PARALLEL);
        double layer = a + f + 2 * c;
        print_message(
            "%5d tokens: attention %.2f %% (paper %.2f), FFN %.2f %% (%.2f), ÷ all-to-all %.3f (%.2f) "
            "and %.3f (%.2f)\n",
            paper.seq_len, 100 * a / layer, 100 * paper.attention_share, 100 * f / layer,
            100 * paper.ffn_share, a / c, paper.attention_ratio, f / c, paper.ffn_ratio);
        assert_true(fabs(a / layer - paper.attention_share) < 0.02);
        assert_true(fabs(f / layer - paper.ffn_share) < 0.02);
        assert_true(fabs(a / c / paper.attention_ratio - 1) < 0.005);
        assert_true(fabs(f / c / paper.ffn_ratio - 1) < 0.05);
    }
}

static void test_communication_share_rises_with_nodes(void **state) {
    const struct testbed *testbed = *state;
    double before = 0;
    for (int nodes = 1; nodes <= 8; nodes *= 2) {
        int expert_parallel = nodes * testbed->cluster.gpus_per_node;
        double a = attention_seconds(testbed, 4096);
        double f = seconds_of(ffn_work(&testbed->model, 4096, expert_parallel), testbed->cluster.rates);
        double c = all_to_all(testbed, 4096, expert_parallel);
        double share = 2 * c / (a + f + 2 * c);
        print_message("%d nodes, EP %d: all-to-all %.1f %% of a layer's forward time\n", nodes,
                      expert_parallel, 100 * share);
        assert_true(share > before);
        before = share;
    }
}

static double three_digits(double value) {
    double unit = pow(10, floor(log10(value)) - 2);
    return round(value / unit) * unit;
}

/* The rates that both readings of section 3 take from elsewhere. */
static void set_public_rates(double *rates) {
    /* DeepEP, 64 ranks over NICs and 8 inside a node; what stays on the node, or the GPU, is counted there.
     */
    rates[RATE_NIC_EXCHANGE] = three_digits(51e9 * 7 / 8);
    rates[RATE_NVLINK_EXCHANGE] = three_digits((153e9 + 158e9) / 2 * 7 / 8);
    rates[RATE_HBM] = 0.8 * 3.35e12;
    rates[RATE_KERNEL_LAUNCH] = 5e-6;
    rates[RATE_HEAD_GEMM] = 600e12;
    rates[RATE_GROUPED_TILE] = 128;
    rates[RATE_LAYER_OVERHEAD] = 0;
}

static double element_wise(struct work work, const double *rates) {
    return work.bytes / rates[RATE_HBM] + work.kernels * rates[RATE_KERNEL_LAUNCH];
}

/* Whether every product of a unit waits for its FLOPs, so that their sum is its time. */
static bool bound_by_flops(struct work work, enum unit unit, double rate, double hbm) {
    for (int i = 0; i < work.product_count; i++)
        if (work.products[i].unit == (int)unit &&
            work.products[i].flops / rate < work.products[i].bytes / hbm)
            return false;
    return true;
}

/* t0 = a0 x + b0 y, t1 = a1 x + b1 y */
static void solve(const double *a, const double *b, const double *t, double *x, double *y) {
    double determinant = a[0] * b[1] - a[1] * b[0];
    *x = (t[0] * b[1] - t[1] * b[0]) / determinant;
    *y = (a[0] * t[1] - a[1] * t[0]) / determinant;
}

/* The paper's two FFN ratios should be one, as both times are linear in the tokens. */
static void solve_experts(struct testbed *expected) {
    double *rates = expected->cluster.rates;
    struct work ffn = ffn_work(&expected->model, 4096, EXPERT_PARALLEL);
    double ratio = (SECTION_3[0].ffn_ratio + SECTION_3[1].ffn_ratio) / 2;
    double seconds = ratio * all_to_all(expected, 4096, EXPERT_PARALLEL) - element_wise(ffn, rates);
    rates[RATE_GROUPED_GEMM] = work_flops(&ffn, UNIT_EXPERTS) / seconds;
    assert_true(bound_by_flops(ffn, UNIT_EXPERTS, rates[RATE_GROUPED_GEMM], rates[RATE_HBM]));
}

static void assert_solved(const struct testbed *expected, const double *file) {
    const double *rates = expected->cluster.rates;
    const enum rate solved[] = {
        RATE_NIC_EXCHANGE, RATE_NVLINK_EXCHANGE, RATE_HBM,           RATE_KERNEL_LAUNCH,
        RATE_GEMM,         RATE_CORE_FORWARD,    RATE_CORE_BACKWARD, RATE_GROUPED_GEMM,
        RATE_HEAD_GEMM,    RATE_GROUPED_TILE,    RATE_LAYER_OVERHEAD};
    for (size_t i = 0; i < COUNT(solved); i++)
        print_message("%s: %.4g in the file, %.4g solved\n", cluster_rate_name(solved[i]), file[solved[i]],
                      rates[solved[i]]);
    for (size_t i = 0; i < COUNT(solved); i++) assert_near(file[solved[i]], rates[solved[i]], 0.001);
}

/* gemm ÷ G + core ÷ C = what is left, at two sequence lengths: two equations, two unknowns. */
static void test_rates_follow_from_section_3(void **state) {
    struct testbed expected = *(const struct testbed *)*state;
    double *rates = expected.cluster.rates, products[2], cores[2], left[2], gemm, core;
    set_public_rates(rates);
    for (int i = 0; i < 2; i++) {
        struct work work = attention_work(&expected.model, SECTION_3[i].seq_len);
        double c = all_to_all(&expected, SECTION_3[i].seq_len, EXPERT_PARALLEL);
        products[i] = work_flops(&work, UNIT_DENSE);
        cores[i] = work.core_flops;
        left[i] = SECTION_3[i].attention_ratio * c - element_wise(work, rates);
    }
    solve(products, cores, left, &gemm, &core);
    for (int i = 0; i < 2; i++)
        assert_true(bound_by_flops(attention_work(&expected.model, SECTION_3[i].seq_len), UNIT_DENSE,
                                   1 / gemm, rates[RATE_HBM]));
    rates[RATE_GEMM] = 1 / gemm;
    rates[RATE_CORE_FORWARD] = 1 / core;
    rates[RATE_CORE_BACKWARD] = rates[RATE_CORE_FORWARD] * 473 / 555; /* public FlashAttention traces */
    solve_experts(&expected);
    assert_solved(&expected, ((const struct testbed *)*state)->cluster.rates);
}

/* Products at a public rate, and core ÷ C + overhead = what is left. */
static void test_fast_rates_follow_from_section_3(void **state) {
    struct testbed expected = *(const struct testbed *)*state;
    double *rates = expected.cluster.rates, cores[2], left[2], core;
    const double once[] = {1, 1};
    set_public_rates(rates);
    rates[RATE_GEMM] = 600e12;
    for (int i = 0; i < 2; i++) {
        struct work work = attention_work(&expected.model, SECTION_3[i].seq_len);
        cores[i] = work.core_flops;
        work.core_flops = 0;
        left[i] =
            SECTION_3[i].attention_ratio * all_to_all(&expected, SECTION_3[i].seq_len, EXPERT_PARALLEL) -
            seconds_of(work, rates);
    }
    solve(cores, once, left, &core, &rates[RATE_LAYER_OVERHEAD]);
    rates[RATE_CORE_FORWARD] = 1 / core;
    rates[RATE_CORE_BACKWARD] = rates[RATE_CORE_FORWARD] * 473 / 555;
    solve_experts(&expected);
    assert_solved(&expected, ((const struct testbed *)*state)->cluster.rates);
}

#define SLOW_AND_FAST(test)                                                                                  \
    cmocka_unit_test_setup_teardown(test, open_testbed, close_testbed),                                      \
        cmocka_unit_test_setup_teardown(test, open_fast_testbed, close_testbed)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepts),
        cmocka_unit_test(test_values_of_the_testbed),
        cmocka_unit_test(test_rejects),
        cmocka_unit_test(test_largest),
        cmocka_unit_test(test_optional_rates),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_all_errors_at_once),
        cmocka_unit_test(test_all_to_all_over_two_nodes),
        cmocka_unit_test(test_unequal_sides),
        cmocka_unit_test(test_nothing_moves),
        cmocka_unit_test(test_spine_and_shared_nics),
        cmocka_unit_test(test_pairwise),
        cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_slowest),
        cmocka_unit_test(test_exchange_equals_sum_over_pairs),
        cmocka_unit_test(test_ten_ffn_gpus_with_all_nics),
        cmocka_unit_test(test_random_placements),
        cmocka_unit_test(test_nics_are_divided),
        cmocka_unit_test(test_own_nics_first),
        cmocka_unit_test(test_division_is_computed),
        SLOW_AND_FAST(test_section_3_table),
        SLOW_AND_FAST(test_communication_share_rises_with_nodes),
        cmocka_unit_test_setup_teardown(test_rates_follow_from_section_3, open_testbed, close_testbed),
        cmocka_unit_test_setup_teardown(test_fast_rates_follow_from_section_3, open_fast_testbed,
                                        close_testbed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
