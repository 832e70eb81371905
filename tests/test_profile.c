/*
What profile makes of its measurements: medians, who meets whom, and files that manifests take. What is
measured is nobody's to assert; test_profile.sh runs the whole.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "plan/plan.h"
#include "profile/profile.h"
#include "tests/cases.h"

#include <string.h>

/* ---- statistics -------------------------------------------------------------------------------------- */

static void test_spread(void **state) {
    (void)state;
    struct rng rng = rng_seed(1);
    for (int i = 0; i < sampled(300); i++) {
        int count = 1 + rng_below(&rng, 12), below = 0, above = 0;
        double values[12], low = INFINITY, high = -INFINITY;
        for (int k = 0; k < count; k++) {
            values[k] = rng_below(&rng, 6) + rng_uniform(&rng) * rng_below(&rng, 2);
            low = fmin(low, values[k]);
            high = fmax(high, values[k]);
        }
        struct spread spread = spread_of(values, count);
        for (int k = 0; k < count; k++) {
            below += values[k] < spread.median;
            above += values[k] > spread.median;
        }
        assert_true(spread.low == low && spread.high == high);
        assert_true(below <= count / 2 && above <= count / 2);
    }
    double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2};
    assert_true(spread_of(odd, 3).median == 2);
    assert_true(spread_of(even, 4).median == 2.5);
}

/* ---- links ------------------------------------------------------------------------------------------- */

static void test_rounds(void **state) {
    (void)state;
    enum { MOST = 41 };
    for (int ranks = 1; ranks <= MOST; ranks++) {
        int met[MOST][MOST] = {{0}};
        assert_int_equal(link_rounds(ranks), ranks % 2 ? ranks : ranks - 1);
        for (int round = 0; round < link_rounds(ranks); round++) {
            int rest = 0;
            for (int rank = 0; rank < ranks; rank++) {
                int partner = link_partner(ranks, round, rank);
                assert_true(partner >= -1 && partner < ranks && partner != rank);
                rest += partner < 0;
                if (partner < 0) continue;
                assert_int_equal(link_partner(ranks, round, partner), rank);
                met[rank][partner]++;
            }
            assert_int_equal(rest, ranks % 2);
        }
        for (int a = 0; a < ranks; a++)
            for (int b = 0; b < ranks; b++) assert_int_equal(met[a][b], a != b);
    }
}

/* ---- files ------------------------------------------------------------------------------------------- */

/* A rate of every kind, some above what the peaks were measured as. */
static struct machine machine_of(struct rng *rng) {
    struct machine machine = {.hosts = 1 + rng_below(rng, 2), .processors = 2, .repeats = 5};
    machine.ranks = machine.hosts * (1 + rng_below(rng, 4));
    machine.memory_bytes = 1e9 + rng_uniform(rng) * 1e9;
    strcpy(machine.cpu, "a \"quoted\" processor");
    struct measured_rate *all[] = {&machine.peak_flops, &machine.copy, &machine.inside, &machine.between};
    for (int i = 0; i < RATE_COUNT; i++) {
        double value = i == RATE_KERNEL_LAUNCH || i == RATE_LAYER_OVERHEAD ? 1e-6 * rng_uniform(rng)
                                                                           : 1e6 + 1e9 * rng_uniform(rng);
        machine.rates[i].value = (struct spread){value, value, value};
        snprintf(machine.rates[i].how, sizeof machine.rates[i].how, "figure %d", i);
    }
    machine.rates[RATE_HOST_COPY].value.median = 1e6;
    machine.rates[RATE_MEMORY_RESERVE].value.median = 1e6;
    for (size_t i = 0; i < COUNT(all); i++) {
        double value = 1e6 + 1e9 * rng_uniform(rng);
        all[i]->value = (struct spread){value, value, value};
    }
    machine.inside_latency.value.median = machine.between_latency.value.median = 1e-6;
    return machine;
}

static void test_cluster_file(void **state) {
    (void)state;
    struct rng rng = rng_seed(2);
    const struct cluster like = {.nodes = 3, .gpus_per_node = 4, .nics_per_node = 2};
    for (int i = 0; i < sampled(100); i++) {
        struct machine machine = machine_of(&rng);
        struct arena *arena = arena_new();
        struct errors errors = {0};
        struct cluster cluster;
        cJSON *file = machine_cluster(&machine, &like, "measured");
        const char *text = json_text(arena, file);
        struct json value = json_read_text(text, strlen(text), "file", arena, &errors);
        assert_true(cluster_read(value, &cluster));
        if (errors.count) fail_msg("%s", errors.messages[0]);
        for (int rate = 0; rate < RATE_COUNT; rate++) {
            bool nic = rate == RATE_NIC_EXCHANGE || rate == RATE_NIC_REDUCE; /* of two ranks each */
            assert_within(cluster.rates[rate], machine.rates[rate].value.median * (nic ? 2 : 1), 1e-3);
            assert_true(cluster.rates[rate] > 0);
            assert_non_null(strstr(cluster.rate_sources[rate], machine.rates[rate].how));
        }
        assert_true(cluster.nodes == 3 && cluster.gpus_per_node == 4 && cluster.nics_per_node == 2);
        cJSON_Delete(value.node);
        cJSON_Delete(file);
        errors_free(&errors);
        arena_free(arena);
    }
}

/* Every cost arrives under its own name: struct cost_table has the order of enum cost. */
static void test_costs_file(void **state) {
    (void)state;
    struct spread costs[COST_COUNT];
    for (int i = 0; i < COST_COUNT; i++) costs[i] = (struct spread){1e-3 * (i + 1), 0, 1};
    cJSON *table = costs_table(costs, "this test");
    struct arena *arena = arena_new();
    struct errors errors = {0};
    struct experiment experiment;
    char *manifest = arena_printf(arena,
                                  "{\"model\": \"models/qwen3-235b-paper.json\", \"cluster\": "
                                  "\"clusters/h800-16x8.json\", \"systems\": "
                                  "[\"megatron\"], \"seq_len\": 4096, \"global_batch\": 1024, \"costs\": %s}",
                                  json_text(arena, table));
    if (!experiment_read_text(manifest, "experiments/x.json", &experiment, &errors))
        fail_msg("%s", errors.messages[0]);
    const struct cost_table *read = experiment.points[0].table;
    assert_non_null(read);
    assert_string_equal(read->source, "this test");
    for (int i = 0; i < COST_COUNT; i++) {
        double value = ((const double *)read)[i];
        assert_within(value, costs[i].median, 1e-12);
        assert_true(cJSON_HasObjectItem(table, cost_name((enum cost)i)));
    }
    experiment_free(&experiment);
    cJSON_Delete(table);
    arena_free(arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_spread), cmocka_unit_test(test_rounds),
                                       cmocka_unit_test(test_cluster_file),
                                       cmocka_unit_test(test_costs_file)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
