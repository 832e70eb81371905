/*
Records: what they say of the sweep and of inputs where nothing fits, the same in JSON and CSV; speedups
between systems of one point, also where per_system gives them different clusters. Runs from the repository's
root.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "sim/sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- help -------------------------------------------------------------------------------------------- */

/* A manifest of one node and few layers; `rest` holds its batch and what a test is about. */
static struct experiment experiment_with(const char *rest) {
    struct text text = {0};
    struct errors errors = {0};
    struct experiment experiment;
    text_add(&text,
             "{\"model\":\"models/deepseek-moe-16b-paper.json\",\"cluster\":\"clusters/h800-16x8.json\","
             "\"systems\":[\"megatron\",\"disagmoe\"],\"seq_len\":1024,%s}",
             rest);
    if (!experiment_read_text(text.text, "experiments/test.json", &experiment, &errors))
        fail_msg("%s", errors.messages[0]);
    free(text.text);
    return experiment;
}

/* As the simulator leaves it where nothing fits. */
static struct result infeasible(const struct point *point, const char *system) {
    return (struct result){.system = system_named(system),
                           .plan = {.point = point},
                           .oom = true,
                           .speedup = NAN,
                           .executor = "sim"};
}

static struct result feasible(const struct point *point, const char *system, double tokens_per_s) {
    struct result result = infeasible(point, system);
    result.oom = false;
    result.feasible = true;
    result.tokens_per_s = tokens_per_s;
    result.plan.sequences = point->global_batch;
    return result;
}

static bool is_null(cJSON *object, const char *path) {
    return cJSON_IsNull(json_get_path(object, path));
}

static double number(cJSON *object, const char *key) {
    const cJSON *node = cJSON_GetObjectItemCaseSensitive(object, key);
    assert_non_null(node);
    return node->valuedouble;
}

/* Reads back what is printed. */
static cJSON *record_of(const struct result *result) {
    cJSON *object = result_json(result);
    char *text = cJSON_PrintUnformatted(object);
    cJSON *again = cJSON_Parse(text);
    assert_non_null(again);
    cJSON_free(text);
    cJSON_Delete(object);
    return again;
}

static char *csv_of(const struct result *result, const struct point *heading) {
    char *text = NULL;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    if (heading) result_csv_heading(heading, stream);
    if (result) result_csv(result, stream);
    fclose(stream);
    return text;
}

static bool ends_with(const char *text, const char *end) {
    return strlen(text) >= strlen(end) && strcmp(text + strlen(text) - strlen(end), end) == 0;
}

/* ---- what is swept ----------------------------------------------------------------------------------- */

static void test_swept(void **state) {
    (void)state;
    struct experiment experiment =
        experiment_with("\"global_batch\":64,\"sweep\":{\"cluster.nodes\":[1,2],\"order\":[{\"wave\":4,"
                        "\"waves_in_flight\":2}],"
                        "\"routing\":[\"zipf:0.5\",\"balanced\"],\"cluster.gpu.memory_bytes\":[80.5e9]}");
    struct result result = feasible(&experiment.points[2], "disagmoe", 100);
    cJSON *record = record_of(&result), *swept = record->child;
    assert_string_equal(swept->string, "swept"); /* the first key */
    assert_int_equal(cJSON_GetArraySize(swept), 4);
    char *text = cJSON_PrintUnformatted(swept);
    assert_string_equal(text, "{\"cluster.nodes\":2,\"order\":{\"wave\":4,\"waves_in_flight\":2},\"routing\":"
                              "\"zipf:0.5\",\"cluster.gpu.memory_bytes\":80500000000}");
    cJSON_free(text);
    cJSON_Delete(record);
    /* In CSV behind all other columns, so that those stand where they always do. */
    char *heading = csv_of(NULL, &experiment.points[0]), *line = csv_of(&result, NULL);
    assert_true(ends_with(
        heading, ",version,swept.cluster.nodes,swept.order,swept.routing,swept.cluster.gpu.memory_bytes\n"));
    assert_true(ends_with(line, "," VERSION
                                ",2,\"{\"\"wave\"\":4,\"\"waves_in_flight\"\":2}\",zipf:0.5,80500000000\n"));
    free(heading);
    free(line);
    experiment_free(&experiment);
    experiment = experiment_with("\"global_batch\":64");
    result = feasible(&experiment.points[0], "megatron", 100);
    record = record_of(&result);
    assert_true(cJSON_IsObject(record->child) && !record->child->child);
    heading = csv_of(NULL, &experiment.points[0]);
    assert_true(ends_with(heading, ",version\n"));
    free(heading);
    cJSON_Delete(record);
    experiment_free(&experiment);
}

/* ---- where nothing fits ------------------------------------------------------------------------------ */

static void test_inputs_stay(void **state) {
    (void)state;
    struct experiment experiment = experiment_with("\"global_batch\":64,\"seed\":5");
    struct result result = infeasible(&experiment.points[0], "disagmoe");
    cJSON *record = record_of(&result);
    assert_true(number(record, "global_batch") == 64);
    assert_true(number(record, "seq_len") == 1024 && number(record, "nodes") == 16 &&
                number(record, "seed") == 5);
    static const char *const figures[] = {"micro_batches",
                                          "gpus",
                                          "parallel",
                                          "memory",
                                          "order",
                                          "placement",
                                          "step_time_s",
                                          "tokens_per_s",
                                          "mfu",
                                          "speedup_vs_megatron",
                                          "breakdown.bubble_s",
                                          "comm_total_s",
                                          "schedule_efficiency",
                                          "peak_memory_bytes",
                                          "ops"};
    for (size_t i = 0; i < COUNT(figures); i++)
        if (!is_null(record, figures[i])) fail_msg("%s is not null", figures[i]);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(record, "oom")));
    cJSON_Delete(record);
    experiment_free(&experiment);
    experiment = experiment_with("\"micro_batches\":12");
    result = infeasible(&experiment.points[0], "megatron");
    record = record_of(&result);
    assert_true(number(record, "micro_batches") == 12 && is_null(record, "global_batch"));
    cJSON_Delete(record);
    experiment_free(&experiment);
}

/* ---- what was chosen ----------------------------------------------------------------------------------- */

static void assert_part(cJSON *record, const char *part, const char *expected) {
    char *text = cJSON_PrintUnformatted(cJSON_GetObjectItemCaseSensitive(record, part));
    assert_string_equal(text, expected);
    cJSON_free(text);
}

/* Each system's own keys alone; NICs that nobody owns are not there; a word of recomputation where one says
   it all. */
static void test_choices(void **state) {
    (void)state;
    struct experiment experiment = experiment_with("\"global_batch\":64");
    struct result result = feasible(&experiment.points[0], "disagmoe", 100);
    struct plan *plan = &result.plan;
    plan->parallel =
        (struct parallel){.groups = 3, .attn_gpus = 4, .ffn_gpus = 5, .cp = 2, .attn_nics = 6, .ffn_nics = 7};
    plan->replicas = 8;
    plan->gpus = 9;
    plan->micro_batches = 10;
    plan->order = (struct order){11, 12, PREFER_WAVE, true, false, 0};
    plan->placement = PLACEMENT_MIXED;
    plan->memory = (struct memory){.recompute = {ATTENTION_PROJECTIONS, FFN_ACTIVATION, 13},
                                   .expert_input = INPUT_RESEND,
                                   .grads = PRECISION_BF16,
                                   .zero = 1,
                                   .offload = true};
    cJSON *record = record_of(&result);
    assert_part(record, "parallel",
                "{\"groups\":3,\"attn_gpus\":4,\"ffn_gpus\":5,\"attn_nics\":6,\"ffn_nics\":7,\"cp\":2,"
                "\"replicas\":8}");
    assert_part(
        record, "order",
        "{\"wave\":11,\"waves_in_flight\":12,\"prefer\":\"wave\",\"patient\":true,\"justified\":false}");
    assert_part(
        record, "memory",
        "{\"recompute\":{\"attention\":\"projections\",\"ffn\":\"activation\",\"layers\":13},"
        "\"expert_input\":\"resend\",\"grads\":\"bf16\",\"moments\":\"fp32\",\"zero\":1,\"offload\":true}");
    assert_part(record, "placement", "\"mixed-nodes\"");
    assert_true(number(record, "gpus") == 9 && number(record, "micro_batches") == 10);
    cJSON_Delete(record);
    plan->parallel.attn_nics = plan->parallel.ffn_nics = NICS_SHARED;
    plan->order.without = WITHOUT_WAVES | WITHOUT_FUSED_COMBINE;
    plan->memory.recompute = (struct recompute){ATTENTION_NORMS, FFN_ACTIVATION, 0};
    record = record_of(&result);
    assert_part(record, "parallel", "{\"groups\":3,\"attn_gpus\":4,\"ffn_gpus\":5,\"cp\":2,\"replicas\":8}");
    assert_string_equal(json_get_path(record, "memory.recompute")->valuestring, "selective");
    assert_part(record, "order",
                "{\"wave\":11,\"waves_in_flight\":12,\"prefer\":\"wave\",\"patient\":true,"
                "\"justified\":false,\"without\":[\"fused-combine\",\"waves\"]}");
    cJSON_Delete(record);
    result = feasible(&experiment.points[0], "megatron", 100);
    result.plan.parallel = (struct parallel){.pp = 2, .vpp = 3, .ep = 4, .cp = 1};
    result.plan.replicas = 5;
    record = record_of(&result);
    assert_part(record, "parallel", "{\"pp\":2,\"vpp\":3,\"ep\":4,\"cp\":1,\"replicas\":5}");
    assert_true(is_null(record, "order") && is_null(record, "placement"));
    cJSON_Delete(record);
    experiment_free(&experiment);
}

/* ---- speedups ---------------------------------------------------------------------------------------- */

static void test_speedups(void **state) {
    (void)state;
    struct experiment experiment = experiment_with("\"global_batch\":64");
    const struct point *point = &experiment.points[0];
    struct result results[] = {feasible(point, "disagmoe", 150), feasible(point, "megatron", 100)};
    fill_speedups(results, 2);
    assert_true(results[0].speedup == 1.5 && results[1].speedup == 1);
    results[0].oom = true; /* it runs nowhere: no speedup, and no harm to the baseline's own */
    fill_speedups(results, 2);
    assert_true(isnan(results[0].speedup) && results[1].speedup == 1);
    cJSON *record = record_of(&results[0]);
    assert_true(is_null(record, "speedup_vs_megatron") && number(record, "tokens_per_s") == 150);
    cJSON_Delete(record);
    results[0].oom = false;
    results[1].oom = true;
    fill_speedups(results, 2);
    assert_true(isnan(results[0].speedup) && isnan(results[1].speedup));
    results[1] = infeasible(point, "megatron");
    fill_speedups(results, 2);
    assert_true(isnan(results[0].speedup) && isnan(results[1].speedup));
    experiment_free(&experiment);
}

/* tokens/s per GPU of the cluster: each system's own. */
static void test_speedups_per_gpu(void **state) {
    (void)state;
    struct experiment experiment =
        experiment_with("\"global_batch\":64,\"per_system\":{\"disagmoe\":{\"cluster.nodes\":24}}");
    struct point **variants = experiment.points[0].variants;
    struct result results[] = {feasible(variants[0], "megatron", 100),
                               feasible(variants[1], "disagmoe", 150)};
    fill_speedups(results, 2);
    assert_true(results[0].speedup == 1 && results[1].speedup == 1);
    cJSON *record = record_of(&results[1]);
    assert_true(number(record, "nodes") == 24);
    cJSON_Delete(record);
    record = record_of(&results[0]);
    assert_true(number(record, "nodes") == 16);
    cJSON_Delete(record);
    experiment_free(&experiment);
}

/* A variant's figures are those of a manifest that says the same of all its systems. */
static void test_variant_is_its_manifest(void **state) {
    (void)state;
    static const char *const rest = "\"global_batch\":32,\"parallel\":{\"pp\":2,\"vpp\":1,\"ep\":4,"
                                    "\"groups\":2,\"attn_gpus\":2,\"ffn_gpus\":2},"
                                    "\"order\":{\"wave\":4,\"waves_in_flight\":2},\"placement\":\"mixed-"
                                    "nodes\",\"sweep\":{\"model.layers\":[4],"
                                    "\"cluster.nodes\":[1]},";
    char with[1024], without[1024];
    snprintf(with, sizeof with,
             "%s\"memory\":{},\"per_system\":{\"disagmoe\":{\"memory.recompute\":\"full\","
             "\"cluster.rates.nvlink_exchange.value\":1e11}}",
             rest);
    snprintf(without, sizeof without, "%s\"memory\":{\"recompute\":\"full\"}", rest);
    struct experiment own = experiment_with(with), all = experiment_with(without);
    all.points[0].cluster->rates[RATE_NVLINK_EXCHANGE] = 1e11;
    for (int k = 0; k < 2; k++) {
        const struct point *points[] = {own.points[0].variants[k], &all.points[0]};
        const struct system *system = system_named(own.points[0].systems[k]);
        struct result results[2];
        for (int i = 0; i < 2; i++) {
            struct errors errors = {0};
            struct plan plan;
            bool fits = false;
            assert_true(tune_point(system, points[i], &plan, &fits, &errors) && fits);
            simulate_plan(system, &plan, &results[i], NULL, NULL);
        }
        bool same =
            results[0].step_time == results[1].step_time && results[0].peak_memory == results[1].peak_memory;
        assert_true(same == (k == 1)); /* and the other system has nothing of it */
    }
    experiment_free(&own);
    experiment_free(&all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_swept),
        cmocka_unit_test(test_inputs_stay),
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_speedups),
        cmocka_unit_test(test_speedups_per_gpu),
        cmocka_unit_test(test_variant_is_its_manifest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
