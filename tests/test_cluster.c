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
#include "model/model.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CLUSTER_FILE "experiments/clusters/h800-16x8.json"
#define MODEL_FILE "experiments/models/qwen3-235b-paper.json"

/* DISAGMOE_SAMPLE=N runs one N-th of the random cases. */
static int sampled(int count) {
    const char *sample = getenv("DISAGMOE_SAMPLE");
    int divisor = sample ? atoi(sample) : 1;
    return divisor > 1 ? (count + divisor - 1) / divisor : count;
}

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
        assert_true(cluster.rates[rate] > 0);
        assert_true(strlen(cluster.rate_sources[rate]) > 20);
        assert_non_null(cluster_rate_name((enum rate)rate));
        assert_non_null(cluster_rate_unit((enum rate)rate));
    }
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
struct side {
    int gpus[MOST_GPUS];
    double shares[MOST_GPUS];
    int count;
};

/* `count` GPUs from `first` on, with equal shares. */
static struct side even_side(int first, int count) {
    struct side side = {.count = count};
    for (int i = 0; i < count; i++) {
        side.gpus[i] = first + i;
        side.shares[i] = 1.0 / count;
    }
    return side;
}

static struct ports ports_of(const struct side *side) {
    return (struct ports){side->gpus, side->shares, side->count};
}

static struct traffic exchange(const struct cluster *cluster, struct side from, struct side to,
                               double bytes) {
    return cluster_exchange(cluster, ports_of(&from), ports_of(&to), bytes);
}

static void test_all_to_all_over_two_nodes(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(2, 8, 8);
    /* 16 × 160 bytes: a GPU sends 160, 10 to each of 16. */
    struct traffic traffic = exchange(&cluster, even_side(0, 16), even_side(0, 16), 2560);
    assert_true(traffic.nic_bytes == 160.0 * 8 / 16);
    assert_true(traffic.nvlink_bytes == 160.0 * 7 / 16);
    assert_near(traffic.seconds, 3 + 80.0 / 10, 1e-15);
    /* Inside a node no NIC, and only NVLink's latency. */
    traffic = exchange(&cluster, even_side(8, 8), even_side(8, 8), 2560);
    assert_true(traffic.nic_bytes == 0 && traffic.nvlink_bytes == 320.0 * 7 / 8);
    assert_near(traffic.seconds, 1 + 280.0 / 100, 1e-15);
    /* Whole nodes apart, everything leaves by NIC. */
    traffic = exchange(&cluster, even_side(0, 8), even_side(8, 8), 2560);
    assert_true(traffic.nic_bytes == 320 && traffic.nvlink_bytes == 0);
}

static void test_unequal_sides(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(3, 8, 8);
    /* 16 senders, 4 receivers on another node: a receiver's port is four times as busy as a sender's. */
    struct traffic traffic = exchange(&cluster, even_side(0, 16), even_side(16, 4), 1600);
    assert_true(traffic.nic_bytes == 400 && traffic.nvlink_bytes == 0);
    assert_near(traffic.seconds, 3 + 40, 1e-15);
    traffic = exchange(&cluster, even_side(16, 4), even_side(0, 16), 1600);
    assert_true(traffic.nic_bytes == 400);
    /* One sender on the first node; 3 receivers beside it, 1 on the second node. */
    struct side to = even_side(1, 4);
    to.gpus[3] = 8;
    traffic = exchange(&cluster, even_side(0, 1), to, 400);
    assert_true(traffic.nic_bytes == 100 && traffic.nvlink_bytes == 300);
    assert_near(traffic.seconds, 3 + 10, 1e-15);
}

static void test_nothing_moves(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(2, 8, 8);
    struct traffic traffic = exchange(&cluster, even_side(5, 1), even_side(5, 1), 1e9);
    assert_true(traffic.seconds == 0 && traffic.nic_bytes == 0 && traffic.nvlink_bytes == 0);
    assert_true(exchange(&cluster, even_side(0, 16), even_side(0, 16), 0).seconds == 0);
    assert_true(exchange(&cluster, even_side(0, 0), even_side(0, 0), 100).seconds == 0);
    int same[] = {3, 12};
    assert_true(cluster_pairwise(&cluster, same, same, 2, 100).seconds == 0);
    assert_true(cluster_reduce_seconds(&cluster, same, 1, 100) == 0);
    assert_true(cluster_reduce_seconds(&cluster, same, 2, 0) == 0);
}

static void test_spine_and_shared_nics(void **state) {
    (void)state;
    struct cluster cluster = plain_cluster(2, 8, 8);
    double full = exchange(&cluster, even_side(0, 16), even_side(0, 16), 2560).seconds - 3;
    cluster.spine.oversubscription = 4;
    assert_near(exchange(&cluster, even_side(0, 16), even_side(0, 16), 2560).seconds - 3, 4 * full, 1e-14);
    cluster = plain_cluster(2, 8, 2);
    assert_near(exchange(&cluster, even_side(0, 16), even_side(0, 16), 2560).seconds - 3, 4 * full, 1e-14);
    /* Rails: 7 of 8 bytes for the other node hop over NVLink first. */
    cluster = plain_cluster(2, 8, 8);
    cluster.spine.rail_only = true;
    struct traffic traffic = exchange(&cluster, even_side(0, 16), even_side(0, 16), 2560);
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

static struct side random_side(struct rng *rng, int gpus) {
    struct side side = {0};
    double total = 0;
    int wanted = 1 + rng_below(rng, gpus);
    for (int gpu = 0; gpu < gpus; gpu++) {
        if (rng_below(rng, gpus) >= wanted && !(side.count == 0 && gpu == gpus - 1)) continue;
        double share = rng_below(rng, 5) ? rng_uniform(rng) : 0;
        side.gpus[side.count] = gpu;
        side.shares[side.count++] = share;
        total += share;
    }
    for (int i = 0; i < side.count; i++)
        side.shares[i] = total > 0 ? side.shares[i] / total : 1.0 / side.count;
    /* Order must not matter: exchange two. */
    int a = rng_below(rng, side.count), b = rng_below(rng, side.count);
    int gpu = side.gpus[a];
    double share = side.shares[a];
    side.gpus[a] = side.gpus[b], side.shares[a] = side.shares[b];
    side.gpus[b] = gpu, side.shares[b] = share;
    return side;
}

static double busiest(const double *ports, int count) {
    double most = 0;
    for (int i = 0; i < count; i++) most = fmax(most, ports[i]);
    return most;
}

/* Adds up each message on the ports that it passes. */
static struct traffic exchange_by_pairs(const struct cluster *cluster, const struct side *from,
                                        const struct side *to, double bytes) {
    double nic[2 * MOST_GPUS] = {0}, nvlink[2 * MOST_GPUS] = {0};
    int per_node = cluster->gpus_per_node;
    double hop = cluster->spine.rail_only ? 1 - 1.0 / cluster->nics_per_node : 0;
    for (int i = 0; i < from->count; i++) {
        for (int j = 0; j < to->count; j++) {
            int sender = from->gpus[i], receiver = to->gpus[j];
            double message = bytes * from->shares[i] * to->shares[j];
            if (sender == receiver) continue;
            bool inside = sender / per_node == receiver / per_node;
            double *ports = inside ? nvlink : nic;
            ports[sender] += message;
            ports[MOST_GPUS + receiver] += message;
            if (inside) continue;
            nvlink[sender] += hop * message;
            for (int g = 0; g < per_node; g++)
                nvlink[MOST_GPUS + sender / per_node * per_node + g] += hop * message / per_node;
        }
    }
    struct traffic traffic = {.nic_bytes = busiest(nic, 2 * MOST_GPUS),
                              .nvlink_bytes = busiest(nvlink, 2 * MOST_GPUS)};
    double nic_rate = cluster->rates[RATE_NIC_EXCHANGE] * cluster->nics_per_node / per_node /
                      cluster->spine.oversubscription;
    traffic.seconds =
        fmax(traffic.nic_bytes / nic_rate, traffic.nvlink_bytes / cluster->rates[RATE_NVLINK_EXCHANGE]);
    if (traffic.nic_bytes > 0)
        traffic.seconds += cluster->nic.latency_s;
    else if (traffic.nvlink_bytes > 0)
        traffic.seconds += cluster->nvlink.latency_s;
    return traffic;
}

static void test_exchange_equals_sum_over_pairs(void **state) {
    (void)state;
    struct rng rng = rng_seed(20260511);
    int cases = sampled(4000);
    for (int i = 0; i < cases; i++) {
        int per_node = 1 << rng_below(&rng, 4);
        int nics = 1 << rng_below(&rng, 4);
        struct cluster cluster =
            plain_cluster(1 + rng_below(&rng, 6), per_node, nics > per_node ? per_node : nics);
        cluster.spine.oversubscription = 1 + rng_below(&rng, 4);
        cluster.spine.rail_only = rng_below(&rng, 2);
        struct side from = random_side(&rng, cluster_gpus(&cluster));
        struct side to = rng_below(&rng, 3) ? random_side(&rng, cluster_gpus(&cluster)) : from;
        double bytes = 1e6 * rng_uniform(&rng);
        struct traffic found = exchange(&cluster, from, to, bytes);
        struct traffic expected = exchange_by_pairs(&cluster, &from, &to, bytes);
        assert_near(found.nic_bytes, expected.nic_bytes, 1e-9);
        assert_near(found.nvlink_bytes, expected.nvlink_bytes, 1e-9);
        assert_near(found.seconds, expected.seconds, 1e-9);
    }
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

static int open_testbed(void **state) {
    struct testbed *testbed = must_alloc(sizeof *testbed);
    *state = testbed;
    testbed->arena = arena_new();
    struct json cluster = json_read_file(CLUSTER_FILE, testbed->arena, &testbed->errors);
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

static double seconds_of(struct work work, const double *rates) {
    return work.gemm_flops / rates[RATE_GEMM] + work.core_flops / rates[RATE_CORE_FORWARD] +
           work.grouped_flops / rates[RATE_GROUPED_GEMM] + work.bytes / rates[RATE_HBM] +
           work.kernels * rates[RATE_KERNEL_LAUNCH];
}

static struct work attention_work(const struct model *model, int seq_len) {
    return model_attention_work(model, 0, WORK_FORWARD, 1, seq_len);
}

/* Balanced routing: a GPU gets as many copies as it sends. */
static struct work ffn_work(const struct model *model, int seq_len, int expert_parallel) {
    return model_ffn_work(model, 0, WORK_FORWARD, (double)seq_len * model_copies(model, 0), seq_len,
                          (double)model->moe.experts / expert_parallel);
}

/* One all-to-all of a micro-batch of one sequence a GPU. */
static double all_to_all(const struct testbed *testbed, int seq_len, int expert_parallel) {
    struct side group = even_side(0, expert_parallel);
    double bytes = (double)expert_parallel * seq_len * model_copies(&testbed->model, 0) *
                   model_hidden_bytes(&testbed->model);
    return exchange(&testbed->cluster, group, group, bytes).seconds;
}

static void test_section_3_table(void **state) {
    const struct testbed *testbed = *state;
    for (size_t i = 0; i < COUNT(SECTION_3); i++) {
        struct section_3 paper = SECTION_3[i];
        double a = seconds_of(attention_work(&testbed->model, paper.seq_len), testbed->cluster.rates);
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
        assert_true(fabs(a / c / paper.attention_ratio - 1) < 0.05);
        assert_true(fabs(f / c / paper.ffn_ratio - 1) < 0.05);
    }
}

static void test_communication_share_rises_with_nodes(void **state) {
    const struct testbed *testbed = *state;
    double before = 0;
    for (int nodes = 1; nodes <= 8; nodes *= 2) {
        int expert_parallel = nodes * testbed->cluster.gpus_per_node;
        double a = seconds_of(attention_work(&testbed->model, 4096), testbed->cluster.rates);
        double f = seconds_of(ffn_work(&testbed->model, 4096, expert_parallel), testbed->cluster.rates);
        double c = all_to_all(testbed, 4096, expert_parallel);
        double share = 2 * c / (a + f + 2 * c);
        print_message("%d nodes, EP %d: all-to-all %.1f %% of a layer's forward time\n", nodes,
                      expert_parallel, 100 * share);
        assert_true(share > before);
        before = share;
    }
}

/* What element-wise kernels and launches leave of a time for the matrix products. */
static double left_for_products(struct work work, double seconds, const double *rates) {
    work.gemm_flops = work.core_flops = work.grouped_flops = 0;
    return seconds - (work.bytes / rates[RATE_HBM] + work.kernels * rates[RATE_KERNEL_LAUNCH]);
}

static void test_rates_follow_from_section_3(void **state) {
    struct testbed expected = *(const struct testbed *)*state;
    const double *file = ((const struct testbed *)*state)->cluster.rates;
    double *rates = expected.cluster.rates;
    rates[RATE_NIC_EXCHANGE] = 43e9; /* DeepEP, 16 ranks */
    rates[RATE_NVLINK_EXCHANGE] = (153e9 + 158e9) / 2;
    rates[RATE_HBM] = 0.8 * 3.35e12;
    rates[RATE_KERNEL_LAUNCH] = 5e-6;

    /* gemm ÷ G + core ÷ C = what is left, at two sequence lengths: two equations, two unknowns. */
    struct work work[2];
    double left[2];
    for (int i = 0; i < 2; i++) {
        work[i] = attention_work(&expected.model, SECTION_3[i].seq_len);
        double c = all_to_all(&expected, SECTION_3[i].seq_len, EXPERT_PARALLEL);
        left[i] = left_for_products(work[i], SECTION_3[i].attention_ratio * c, rates);
    }
    double determinant = work[0].gemm_flops * work[1].core_flops - work[1].gemm_flops * work[0].core_flops;
    rates[RATE_GEMM] = determinant / (left[0] * work[1].core_flops - left[1] * work[0].core_flops);
    rates[RATE_CORE_FORWARD] = determinant / (left[1] * work[0].gemm_flops - left[0] * work[1].gemm_flops);
    rates[RATE_CORE_BACKWARD] = rates[RATE_CORE_FORWARD] * 473 / 555; /* public FlashAttention traces */

    /* The paper's two FFN ratios should be one, as both times are linear in the tokens. */
    struct work ffn = ffn_work(&expected.model, 4096, EXPERT_PARALLEL);
    double ratio = (SECTION_3[0].ffn_ratio + SECTION_3[1].ffn_ratio) / 2;
    double seconds = ratio * all_to_all(&expected, 4096, EXPERT_PARALLEL);
    rates[RATE_GROUPED_GEMM] = ffn.grouped_flops / left_for_products(ffn, seconds, rates);

    const enum rate solved[] = {
        RATE_NIC_EXCHANGE, RATE_NVLINK_EXCHANGE, RATE_HBM,           RATE_KERNEL_LAUNCH,
        RATE_GEMM,         RATE_CORE_FORWARD,    RATE_CORE_BACKWARD, RATE_GROUPED_GEMM};
    for (size_t i = 0; i < COUNT(solved); i++)
        print_message("%s: %.4g in the file, %.4g solved\n", cluster_rate_name(solved[i]), file[solved[i]],
                      rates[solved[i]]);
    for (size_t i = 0; i < COUNT(solved); i++) assert_near(file[solved[i]], rates[solved[i]], 0.005);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepts),
        cmocka_unit_test(test_values_of_the_testbed),
        cmocka_unit_test(test_rejects),
        cmocka_unit_test(test_all_errors_at_once),
        cmocka_unit_test(test_all_to_all_over_two_nodes),
        cmocka_unit_test(test_unequal_sides),
        cmocka_unit_test(test_nothing_moves),
        cmocka_unit_test(test_spine_and_shared_nics),
        cmocka_unit_test(test_pairwise),
        cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_slowest),
        cmocka_unit_test(test_exchange_equals_sum_over_pairs),
        cmocka_unit_test_setup_teardown(test_section_3_table, open_testbed, close_testbed),
        cmocka_unit_test_setup_teardown(test_communication_share_rises_with_nodes, open_testbed,
                                        close_testbed),
        cmocka_unit_test_setup_teardown(test_rates_follow_from_section_3, open_testbed, close_testbed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
