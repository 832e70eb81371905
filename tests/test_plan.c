/*
Reading of experiment manifests: what each kind of mistake is told as, sweeps, --set, parts that are "auto",
routing, and texts that are no manifests at all; then thousands of manifests with random damage, which may be
refused but never bring the program down.

Random cases come from a fixed seed; DISAGMOE_SAMPLE=N runs one N-th of them. Everything runs from the
repository's root, whose experiments are read.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "plan/plan.h"
#include "sim/sim.h"
#include "tests/cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MUTATIONS 6000
#define SEED 7
#define EXACT 1e-12
#define HERE "experiments/test.json" /* the manifest that texts stand for */

/* ---- help -------------------------------------------------------------------------------------------- */

static void assert_near(double found, double expected) {
    assert_within(found, expected, EXACT);
}

static bool says(const struct errors *errors, const char *part) {
    for (int i = 0; i < errors->count; i++)
        if (strstr(errors->messages[i], part)) return true;
    return false;
}

static void assert_says(const struct errors *errors, const char *part) {
    if (says(errors, part)) return;
    errors_print(errors, stderr);
    fail_msg("no message says \"%s\"", part);
}

/* A sound manifest with the model and the cluster in their own files. */
#define SOUND                                                                                                \
    "{\"name\":\"test\",\"model\":\"models/deepseek-moe-16b-paper.json\",\"cluster\":"                       \
    "\"clusters/h800-16x8.json\",\"systems\":[\"megatron\",\"disagmoe\"],\"seq_len\":4096,"                  \
    "\"global_batch\":1024}"

/* Reads SOUND with keys added or replaced; the model and the cluster are put in place where a path leads into
   them. */
struct reading {
    struct experiment experiment;
    struct errors errors;
    bool good;
};

static void put_in_place(cJSON *manifest, const char *key, const char *path) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(manifest, key);
    if (strncmp(path, key, strlen(key)) != 0 || path[strlen(key)] != '.' || !cJSON_IsString(item)) return;
    char file[256];
    snprintf(file, sizeof file, "experiments/%s", item->valuestring);
    struct errors errors = {0};
    struct arena *arena = arena_new();
    struct json loaded = json_read_file(file, arena, &errors);
    assert_int_equal(errors.count, 0);
    cJSON_ReplaceItemInObjectCaseSensitive(manifest, key, loaded.node);
    arena_free(arena);
}

/* value: JSON text; NULL removes the key. */
struct change {
    const char *path, *value;
};

static void change(cJSON *manifest, struct change it) {
    put_in_place(manifest, "model", it.path);
    put_in_place(manifest, "cluster", it.path);
    if (it.value) {
        cJSON *value = cJSON_Parse(it.value);
        assert_non_null(value);
        assert_true(json_set_path(manifest, it.path, value));
        return;
    }
    const char *dot = strrchr(it.path, '.');
    char parent[128] = "";
    if (dot) memcpy(parent, it.path, (size_t)(dot - it.path));
    cJSON_DeleteItemFromObjectCaseSensitive(dot ? json_get_path(manifest, parent) : manifest,
                                            dot ? dot + 1 : it.path);
}

static struct reading read_text(const char *text) {
    struct reading reading = {0};
    reading.good = experiment_read_text(text, HERE, &reading.experiment, &reading.errors);
    assert_true(reading.good == (reading.errors.count == 0));
    return reading;
}

static struct reading read_changed(const struct change *changes, size_t count) {
    cJSON *manifest = cJSON_Parse(SOUND);
    for (size_t i = 0; i < count; i++) change(manifest, changes[i]);
    char *text = cJSON_PrintUnformatted(manifest);
    struct reading reading = read_text(text);
    cJSON_free(text);
    cJSON_Delete(manifest);
    return reading;
}

/* SOUND changed in one place. */
static struct reading read_with(const char *path, const char *value) {
    return read_changed(&(struct change){path, value}, 1);
}

static void reading_free(struct reading *reading) {
    experiment_free(&reading->experiment);
    errors_free(&reading->errors);
}

static void assert_good(const struct reading *reading) {
    if (!reading->good) fail_msg("unexpected: %s", reading->errors.messages[0]);
}

static void assert_order(struct order found, int wave, int waves_in_flight, int prefer, int patient,
                         int justified, int without) {
    assert_int_equal(found.wave, wave);
    assert_int_equal(found.waves_in_flight, waves_in_flight);
    assert_int_equal(found.prefer, prefer);
    assert_int_equal(found.patient, patient);
    assert_int_equal(found.justified, justified);
    assert_int_equal(found.without, without);
}

/* ---- what is wrong is named -------------------------------------------------------------------------- */

/* The key that is named, what was found and what is allowed. */
struct mistake {
    struct change change;
    const char *path, *says;
};

static const struct mistake mistakes[] = {
    /* unknown keys */
    {{"sequence", "1"}, "sequence", "unknown key"},
    {{"seqlen", "1"}, "seqlen", "did you mean \"seq_len\"?"},
    {{"model.layer", "1"}, "model.layer", "did you mean \"layers\"?"},
    {{"model.moe.gates", "1"}, "model.moe.gates", "unknown key"},
    {{"cluster.rates.gem", "{}"}, "cluster.rates.gem", "did you mean \"gemm\"?"},
    {{"cluster.gpu.memory", "1"}, "cluster.gpu.memory", "unknown key"},
    {{"parallel", "{\"tp\":2}"}, "parallel.tp", "unknown key"},
    {{"memory", "{\"zeros\":2}"}, "memory.zeros", "did you mean \"zero\"?"},
    {{"order", "{\"wave\":1,\"waves_in_flight\":1,\"x\":1}"}, "order.x", "unknown key"},
    {{"costs", "{\"attn_fwd\":1}"}, "costs.attn_fwd", "did you mean \"attn_fwd_s\"?"},
    /* missing keys */
    {{"model", NULL}, "model", "missing"},
    {{"cluster", NULL}, "cluster", "missing"},
    {{"systems", NULL}, "systems", "missing"},
    {{"seq_len", NULL}, "seq_len", "missing"},
    {{"global_batch", NULL}, "global_batch", "missing; exactly one of global_batch and micro_batches"},
    {{"model.layers", NULL}, "model.layers", "missing"},
    {{"model.moe.top_k", NULL}, "model.moe.top_k", "missing"},
    {{"cluster.rates.gemm", NULL}, "cluster.rates.gemm", "missing"},
    {{"cluster.rates.hbm.source", NULL}, "cluster.rates.hbm.source", "missing"},
    /* wrong types */
    {{"seq_len", "\"4K\""}, "seq_len", "found \"4K\""},
    {{"seq_len", "4096.5"}, "seq_len", "a whole number"},
    {{"seq_len", "null"}, "seq_len", "found null"},
    {{"seq_len", "[4096]"}, "seq_len", "found […]"},
    {{"name", "1"}, "name", "found 1"},
    {{"model", "1"}, "model", "found 1"},
    {{"model", "[]"}, "model", "found []"},
    {{"model.attention", "true"}, "model.attention", "an object"},
    {{"model.tie_embeddings", "1"}, "model.tie_embeddings", "found 1"},
    {{"cluster", "true"}, "cluster", "found true"},
    {{"cluster.nodes", "{}"}, "cluster.nodes", "found {}"},
    {{"systems", "\"megatron\""}, "systems", "found \"megatron\""},
    {{"systems", "[]"}, "systems", "at least one"},
    {{"systems", "[\"megatron\",7]"}, "systems[1]", "found 7"},
    {{"systems", "[\"megatron\",\"megatron\"]"}, "systems[1]", "twice"},
    {{"parallel", "3"}, "parallel", "found 3"},
    {{"parallel", "{\"pp\":\"many\"}"}, "parallel.pp", "found \"many\""},
    {{"memory", "\"small\""}, "memory", "found \"small\""},
    {{"memory", "{\"offload\":1}"}, "memory.offload", "found 1"},
    {{"order", "[]"}, "order", "found []"},
    {{"placement", "2"}, "placement", "found 2"},
    {{"placement", "\"anywhere\""}, "placement", "auto|split-nodes|mixed-nodes"},
    {{"routing", "0.5"}, "routing", "found 0.5"},
    {{"costs", "7"}, "costs", "found 7"},
    {{"sweep", "[]"}, "sweep", "found []"},
    {{"sweep", "{\"seq_len\":4096}"}, "sweep.seq_len", "a list of at least one value"},
    {{"sweep", "{\"seq_len\":[]}"}, "sweep.seq_len", "a list of at least one value"},
    /* out of range, not among the words */
    {{"seq_len", "0"}, "seq_len", "found 0"},
    {{"seq_len", "1e300"}, "seq_len", "found 1"},
    {{"micro_batch_size", "-1"}, "micro_batch_size", "found -1"},
    {{"global_batch", "0"}, "global_batch", "found 0"},
    {{"seed", "-1"}, "seed", "found -1"},
    {{"model.layers", "0"}, "model.layers", "found 0"},
    {{"model.moe.experts", "-3"}, "model.moe.experts", "found -3"},
    {{"model.moe.router", "\"best\""}, "model.moe.router", "softmax_topk"},
    {{"model.attention.window_layers", "\"some\""}, "model.attention.window_layers", "none"},
    {{"cluster.nodes", "0"}, "cluster.nodes", "found 0"},
    {{"cluster.rates.gemm.value", "0"}, "cluster.rates.gemm.value", "found 0"},
    {{"cluster.rates.gemm.unit", "\"FLOPS\""}, "cluster.rates.gemm.unit", "FLOP/s"},
    {{"cluster.slow_gpus", "[{\"gpu\":128,\"speed\":0.5}]"}, "cluster.slow_gpus[0].gpu", "128 GPUs"},
    {{"cluster.slow_gpus", "[{\"gpu\":1,\"speed\":0}]"}, "cluster.slow_gpus[0].speed", "found 0"},
    {{"parallel", "{\"ep\":0}"}, "parallel.ep", "found 0"},
    {{"memory", "{\"zero\":4}"}, "memory.zero", "found 4"},
    {{"memory", "{\"recompute\":\"some\"}"}, "memory.recompute", "none"},
    {{"memory", "{\"grads\":\"fp8\"}"}, "memory.grads", "fp32"},
    {{"order", "{\"wave\":0,\"waves_in_flight\":1}"}, "order.wave", "found 0"},
    {{"order", "{\"wave\":1,\"waves_in_flight\":1,\"prefer\":\"me\"}"}, "order.prefer", "backward"},
    {{"costs", "{\"p2p_s\":-1}"}, "costs.p2p_s", "found -1"},
    {{"routing", "\"zipf\""}, "routing", "found \"zipf\""},
    {{"routing", "\"zipf:\""}, "routing", "zipf:EXPONENT"},
    {{"routing", "\"zipf:-1\""}, "routing", "exponent from 0"},
    {{"routing", "\"zipf:1x\""}, "routing", "found \"zipf:1x\""},
    {{"routing", "\"zipf:nan\""}, "routing", "found \"zipf:nan\""},
    {{"routing", "\"skewed\""}, "routing", "found \"skewed\""},
    {{"routing", "\"file:none.txt\""}, "routing", "cannot be opened"},
    {{"sweep", "{\"seq_len\":[1024,-5]}"}, "seq_len", "found -5"},
    {{"sweep", "{\"seq_len.x\":[1]}"}, "seq_len.x", "no such place"},
    {{"sweep", "{\"unheard\":[1]}"}, "unheard", "unknown key"},
    {{"sweep", "{\"sweep\":[{\"seq_len\":[1,2]}]}"}, "sweep.sweep", "cannot be swept"},
    {{"sweep", "{\"sweep.seq_len\":[[1,2]]}"}, "sweep.sweep.seq_len", "cannot be swept"},
    /* per_system */
    {{"per_system", "7"}, "per_system", "found 7"},
    {{"per_system", "{\"tutel\":{}}"}, "per_system.tutel", "allowed: megatron, disagmoe"},
    {{"per_system", "{\"megatron\":7}"}, "per_system.megatron", "found 7"},
    {{"per_system", "{\"megatron\":{\"seq_len\":0}}"}, "per_system.megatron.seq_len", "found 0"},
    {{"per_system", "{\"megatron\":{\"model.layers\":-1}}"}, "per_system.megatron.model.layers", "found -1"},
    {{"per_system", "{\"megatron\":{\"memory\":{\"zero\":9}}}"},
     "per_system.megatron.memory.zero",
     "found 9"},
    {{"per_system", "{\"megatron\":{\"unheard\":1}}"}, "per_system.megatron.unheard", "unknown key"},
    {{"per_system", "{\"megatron\":{\"seq_len.x\":1}}"}, "per_system.megatron.seq_len.x", "no such place"},
    {{"per_system", "{\"megatron\":{\"model.moe.experts\":2}}"}, "per_system.megatron", "model.moe.top_k"},
    {{"per_system", "{\"megatron\":{\"micro_batches\":2}}"}, "per_system.megatron", "global_batch"},
    {{"per_system", "{\"megatron\":{\"systems\":[]}}"}, "per_system.megatron.systems", "cannot differ"},
    {{"per_system", "{\"megatron\":{\"name\":\"x\"}}"}, "per_system.megatron.name", "cannot differ"},
    {{"per_system", "{\"megatron\":{\"sweep.x\":1}}"}, "per_system.megatron.sweep.x", "cannot differ"},
    {{"per_system", "{\"megatron\":{\"per_system\":1}}"}, "per_system.megatron.per_system", "cannot differ"},
    {{"per_system", "{\"megatron\":{\"model\":\"none.json\"}}"}, "experiments/none.json", "cannot be opened"},
    {{"sweep", "{\"per_system\":[{},{\"megatron\":{\"seed\":-1}}]}"}, "per_system.megatron.seed", "found -1"},
    {{"sweep", "{\"per_system.megatron.seed\":[1,-2]}"}, "per_system.megatron.seed", "found -2"},
    {{"sweep", "{\"per_system.tutel\":[{}]}"}, "per_system.tutel", "no system of this manifest"},
    /* impossible together */
    {{"micro_batches", "4"}, "global_batch", "exactly one of the two"},
    {{"model.attention.kv_heads", "3"}, "model.attention.kv_heads", "a divisor of heads"},
    {{"model.moe.top_k", "65"}, "model.moe.top_k", "at most experts"},
    {{"model.moe.dense_layers", "29"}, "model.moe.dense_layers", "at most layers"},
    {{"model.moe.dense_layers", "1"}, "model.moe.dense_hidden", "at least 1"},
    {{"model.attention.window", "128"}, "model.attention.window_layers", "window 128"},
    {{"model.attention.window_layers", "\"even\""}, "model.attention.window", "at least 1"},
    {{"cluster.nics_per_node", "3"}, "cluster.nics_per_node", "a divisor of gpus_per_node"},
    /* files that are not there */
    {{"model", "\"models/none.json\""}, "experiments/models/none.json", "cannot be opened"},
    {{"cluster", "\"models\""}, "experiments/models", "cannot be read"},
};

static void test_mistakes(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(mistakes); i++) {
        struct reading reading = read_changed(&mistakes[i].change, 1);
        char start[256];
        bool of_file = strstr(mistakes[i].path, "experiments/") == mistakes[i].path;
        snprintf(start, sizeof start, of_file ? "%s%s: " : "%s: %s: ", of_file ? "" : HERE, mistakes[i].path);
        bool found = false;
        for (int k = 0; k < reading.errors.count; k++)
            found |= strncmp(reading.errors.messages[k], start, strlen(start)) == 0 &&
                     strstr(reading.errors.messages[k] + strlen(start), mistakes[i].says) != NULL;
        if (!found) {
            errors_print(&reading.errors, stderr);
            fail_msg("%s: no message begins \"%s\" and says \"%s\"", mistakes[i].change.path, start,
                     mistakes[i].says);
        }
        reading_free(&reading);
    }
}

/* The one message that a change brings, whole. */
static void test_messages(void **state) {
    (void)state;
    static const struct {
        const char *path, *value, *message;
    } cases[] = {
        {"parallel", "{\"cp\":0}", "parallel.cp: found 0; allowed: a whole number from 1 to 1048576"},
        {"parallel", "{\"cp\":2.5}", "parallel.cp: found 2.5; allowed: a whole number from 1 to 1048576"},
        {"parallel", "{\"cp\":\"many\"}",
         "parallel.cp: found \"many\"; allowed: a whole number from 1 to 1048576"},
        {"parallel", "{\"attn_nics\":0}",
         "parallel.attn_nics: found 0; allowed: a whole number from 1 to 1048576"},
        {"parallel", "{\"ffn_nics\":-1}",
         "parallel.ffn_nics: found -1; allowed: a whole number from 1 to 1048576"},
        {"parallel", "{\"ffn_nics\":1048577}",
         "parallel.ffn_nics: found 1048577; allowed: a whole number from 1 to 1048576"},
        {"parallel", "{\"attn_nic\":1}", "parallel.attn_nic: unknown key; did you mean \"attn_nics\"?"},
        {"memory", "{\"recompute\":\"some\"}",
         "memory.recompute: found \"some\"; must be one of auto|none|selective|full, or an object of "
         "attention, ffn and layers"},
        {"memory", "{\"recompute\":1}",
         "memory.recompute: found 1; must be one of auto|none|selective|full, or an object of attention, ffn "
         "and layers"},
        {"memory", "{\"recompute\":null}",
         "memory.recompute: found null; must be one of auto|none|selective|full, or an object of attention, "
         "ffn and layers"},
        {"memory", "{\"recompute\":{\"attention\":\"half\"}}",
         "memory.recompute.attention: found \"half\"; allowed: \"none\", \"norms\", \"projections\" or "
         "\"full\""},
        {"memory", "{\"recompute\":{\"attention\":\"activation\"}}",
         "memory.recompute.attention: found \"activation\"; allowed: \"none\", \"norms\", "
         "\"projections\" or \"full\""},
        {"memory", "{\"recompute\":{\"ffn\":\"norms\"}}",
         "memory.recompute.ffn: found \"norms\"; allowed: \"none\", \"activation\" or \"full\""},
        {"memory", "{\"recompute\":{\"layers\":0}}",
         "memory.recompute.layers: found 0; allowed: a whole number from 1 to 1048576"},
        {"memory", "{\"recompute\":{\"layer\":1}}",
         "memory.recompute.layer: unknown key; did you mean \"layers\"?"},
        {"memory", "{\"recompute\":{\"router\":\"full\"}}",
         "memory.recompute.router: unknown key; allowed: attention, ffn, layers"},
        {"memory", "{\"zero\":4}", "memory.zero: found 4; allowed: a whole number from 0 to 3"},
        {"memory", "{\"offload\":\"yes\"}", "memory.offload: found \"yes\"; allowed: true or false"},
        {"head", "\"first-ffn\"", "head: found \"first-ffn\"; allowed: \"last-ffn\" or \"all-ffn\""},
        {"head", "\"auto\"", "head: found \"auto\"; allowed: \"last-ffn\" or \"all-ffn\""},
        {"head", "1", "head: found 1; allowed: \"last-ffn\" or \"all-ffn\""},
        {"order", "{\"patient\":1}", "order.patient: found 1; allowed: true or false"},
        {"order", "{\"justified\":\"no\"}", "order.justified: found \"no\"; allowed: true or false"},
        {"order", "{\"prefer\":\"me\"}",
         "order.prefer: found \"me\"; allowed: \"backward\", \"forward\" or \"wave\""},
        {"order", "{\"waves\":1}", "order.waves: unknown key; did you mean \"wave\"?"},
        {"order", "{\"without\":[\"duplex\",\"wave\"]}",
         "order.without[1]: found \"wave\"; must be one of fused-combine|duplex|interleaving|waves"},
        {"order", "{\"without\":[\"waves\",\"duplex\",\"waves\"]}",
         "order.without[2]: found \"waves\"; is named twice"},
        {"order", "{\"without\":[[]]}",
         "order.without[0]: found []; must be one of fused-combine|duplex|interleaving|waves"},
        {"order", "{\"without\":\"auto\"}",
         "order.without: found \"auto\"; must be a list of fused-combine|duplex|interleaving|waves"},
        {"order", "{\"without\":null}",
         "order.without: found null; must be a list of fused-combine|duplex|interleaving|waves"},
        {"per_system", "{\"megatron\":{\"order.without\":[\"all\"]}}",
         "per_system.megatron.order.without[0]: found \"all\"; must be one of "
         "fused-combine|duplex|interleaving|waves"},
        {"per_system", "{\"megatron\":{\"parallel.cp\":0}}",
         "per_system.megatron.parallel.cp: found 0; allowed: a whole number from 1 to 1048576"},
        {"per_system", "{\"disagmoe\":{\"head\":\"none\"}}",
         "per_system.disagmoe.head: found \"none\"; allowed: \"last-ffn\" or \"all-ffn\""},
        {"per_system", "{\"disagmoe\":{\"memory\":{\"recompute\":{\"ffn\":3}}}}",
         "per_system.disagmoe.memory.recompute.ffn: found 3; allowed: \"none\", \"activation\" or \"full\""},
        {"per_system", "{\"megatron\":{\"order.patient\":7}}",
         "per_system.megatron.order.patient: found 7; allowed: true or false"},
        {"sweep", "{\"memory.recompute\":[\"none\",\"most\"]}",
         "memory.recompute: found \"most\"; must be one of auto|none|selective|full, or an object of "
         "attention, ffn and layers"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct reading reading = read_with(cases[i].path, cases[i].value);
        char message[512];
        snprintf(message, sizeof message, HERE ": %s", cases[i].message);
        assert_int_equal(reading.errors.count, 1);
        assert_string_equal(reading.errors.messages[0], message);
        reading_free(&reading);
    }
}

static void test_all_at_once(void **state) {
    (void)state;
    static const struct change changes[] = {
        {"seq_len", "\"long\""},      {"micro_batch_size", "0"}, {"unheard", "1"},
        {"model.layers", "-1"},       {"model.moe.top_k", "99"}, {"model.attention.kv_heads", "5"},
        {"cluster.nodes", "0"},       {"routing", "\"odd\""},    {"memory", "{\"zero\":9,\"grads\":1}"},
        {"parallel", "{\"pp\":-1}"},  {"order", "{\"wave\":0}"}, {"costs", "{\"p2p_s\":\"x\"}"},
        {"placement", "\"nowhere\""}, {"systems", "[1]"},
    };
    static const char *const named[] = {
        ": seq_len: ",       ": micro_batch_size: ", ": unheard: ",
        ": model.layers: ",  ": model.moe.top_k: ",  ": model.attention.kv_heads: ",
        ": cluster.nodes: ", ": memory.zero: ",      ": memory.grads: ",
        ": parallel.pp: ",   ": order.wave: ",       ": costs.p2p_s: ",
        ": placement: ",     ": systems[0]: "};
    struct reading reading = read_changed(changes, COUNT(changes));
    for (size_t i = 0; i < COUNT(named); i++) assert_says(&reading.errors, named[i]);
    reading_free(&reading);
    /* Routing is looked at where the model is sound: the number of experts is known then. */
    static const struct change two[] = {{"routing", "\"odd\""}, {"seq_len", "0"}};
    reading = read_changed(two, 2);
    assert_int_equal(reading.errors.count, 2);
    reading_free(&reading);
}

/* The largest values are taken, and none above them. */
static void test_limits(void **state) {
    (void)state;
    static const struct {
        const char *path;
        int least, most;
    } cases[] = {{"seq_len", 1, 1 << 24},
                 {"micro_batch_size", 1, 1 << 16},
                 {"global_batch", 1, 1 << 24},
                 {"seed", 0, 2147483647}};
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int k = 0; k < 4; k++) {
            char value[32], message[128];
            double number = k < 2 ? cases[i].least - k : (double)cases[i].most + k - 2;
            snprintf(value, sizeof value, "%.0f", number);
            snprintf(message, sizeof message, ": %s: found %s; allowed: a whole number ", cases[i].path,
                     value);
            struct reading reading = read_with(cases[i].path, value);
            bool allowed = k % 2 == 0;
            assert_true(reading.good == allowed);
            if (!allowed) assert_says(&reading.errors, message);
            reading_free(&reading);
        }
    static const struct change many[] = {{"global_batch", NULL}, {"micro_batches", "1048576"}};
    struct reading reading = read_changed(many, COUNT(many));
    assert_good(&reading);
    reading_free(&reading);
}

/* The same mistake at every point of a sweep is told once. */
static void test_told_once(void **state) {
    (void)state;
    static const struct change changes[] = {{"seed", "-1"}, {"sweep", "{\"seq_len\":[1024,2048,4096]}"}};
    struct reading reading = read_changed(changes, 2);
    assert_int_equal(reading.errors.count, 1);
    reading_free(&reading);
    /* Nor again for a system that has its own of other keys. */
    static const struct change own[] = {{"seq_len", "0"},
                                        {"per_system", "{\"megatron\":{\"micro_batch_size\":2}}"}};
    reading = read_changed(own, 2);
    assert_int_equal(reading.errors.count, 1);
    assert_says(&reading.errors, HERE ": seq_len: found 0");
    reading_free(&reading);
}

/* ---- defaults and auto ------------------------------------------------------------------------------- */

static void test_defaults(void **state) {
    (void)state;
    struct reading reading = read_text(SOUND);
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 1);
    const struct point *point = &reading.experiment.points[0];
    assert_string_equal(point->name, "test");
    assert_string_equal(point->label, "");
    assert_string_equal(point->model->name, "deepseek-moe-16b-paper");
    assert_string_equal(point->cluster->name, "h800-16x8");
    assert_int_equal(point->system_count, 2);
    assert_string_equal(point->systems[1], "disagmoe");
    assert_int_equal(point->micro_batch_size, 1);
    assert_int_equal(point->seed, 1);
    assert_int_equal(point->micro_batches, 0);
    assert_null(point->table);
    assert_true(!point->auto_memory && !point->auto_placement); /* said by nobody */
    assert_true(!point->memory_given && !point->placement_given);
    assert_int_equal(point->head, HEAD_LAST_FFN);
    assert_order(point->order, 0, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0);
    const struct parallel open = {0};
    assert_memory_equal(&point->parallel, &open, sizeof open);
    assert_string_equal(point->routing.text, "balanced");
    for (int i = 0; i < 64; i++) assert_near(point->routing.share[i], 1.0 / 64);
    reading_free(&reading);
}

/* Of the GPT-3 and DeepSeek papers' AdamW, and a rate that suits small models. */
static void test_training_defaults(void **state) {
    (void)state;
    struct reading reading = read_text(SOUND);
    assert_good(&reading);
    const struct training *training = &reading.experiment.points[0].training;
    assert_true(training->steps == 10 && training->warmup_steps == 10 && training->decay_steps == 0);
    assert_true(!training->forced_routing && strcmp(training->data, "markov") == 0);
    assert_true(training->learning_rate == 3e-3 && training->final_learning_rate == 3e-4);
    assert_true(training->beta1 == 0.9 && training->beta2 == 0.95 && training->epsilon == 1e-8);
    assert_true(training->weight_decay == 0.1 && training->clip == 1);
    reading_free(&reading);
    reading = read_with("train", "{\"data\":\"text.txt\",\"beta2\":0.5,\"steps\":3}");
    assert_good(&reading);
    training = &reading.experiment.points[0].training;
    assert_string_equal(training->data, "experiments/text.txt"); /* beside the manifest */
    assert_true(training->beta1 == 0.9 && training->beta2 == 0.5 && training->steps == 3);
    reading_free(&reading);
}

/* Which parts a manifest gives, and which it says are "auto". */
struct openness {
    const char *memory, *placement; /* NULL: not in the manifest */
    int memory_given;
    bool auto_memory, placement_given, auto_placement;
};

static void test_auto(void **state) {
    (void)state;
    static const struct openness cases[] = {
        {NULL, NULL, 0, false, false, false},
        {"\"auto\"", NULL, 0, true, false, false},
        {NULL, "\"auto\"", 0, false, false, true},
        {"{}", "\"mixed-nodes\"", 0, false, true, false},
        {"{\"zero\":1}", "\"split-nodes\"", MEMORY_ZERO, false, true, false},
        {"{\"recompute\":\"none\"}", NULL, MEMORY_RECOMPUTE, false, false, false},
        {"{\"recompute\":{\"layers\":2}}", NULL, MEMORY_RECOMPUTE, false, false, false},
        {"{\"expert_input\":\"keep\"}", NULL, MEMORY_EXPERT_INPUT, false, false, false},
        {"{\"grads\":\"fp32\"}", NULL, MEMORY_GRADS, false, false, false},
        {"{\"moments\":\"fp32\"}", NULL, MEMORY_MOMENTS, false, false, false},
        {"{\"offload\":false}", NULL, MEMORY_OFFLOAD, false, false, false},
        {"{\"recompute\":\"auto\",\"expert_input\":\"auto\",\"zero\":\"auto\",\"offload\":true}", NULL,
         MEMORY_OFFLOAD, false, false, false},
        {"{\"recompute\":\"full\",\"expert_input\":\"keep\",\"grads\":\"bf16\",\"moments\":\"bf16\","
         "\"zero\":0,\"offload\":false}",
         NULL, MEMORY_ALL, false, false, false},
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int whole = 0; whole < 2; whole++) { /* the layout does not matter here */
            const struct change changes[] = {{"memory", cases[i].memory},
                                             {"placement", cases[i].placement},
                                             {"parallel", whole ? "{\"pp\":2,\"vpp\":1,\"ep\":2}" : NULL}};
            struct reading reading = read_changed(changes, COUNT(changes));
            assert_good(&reading);
            const struct point *point = &reading.experiment.points[0];
            if (point->memory_given != cases[i].memory_given || point->auto_memory != cases[i].auto_memory ||
                point->placement_given != cases[i].placement_given ||
                point->auto_placement != cases[i].auto_placement)
                fail_msg("case %zu: memory %d %d, placement %d %d", i, point->memory_given,
                         point->auto_memory, point->placement_given, point->auto_placement);
            reading_free(&reading);
        }
}

/* What is left out of the order, or is "auto", is open; the rest is as given. */
static void test_order_in_part(void **state) {
    (void)state;
    static const struct {
        const char *text; /* NULL: not in the manifest */
        struct order order;
    } cases[] = {
        {NULL, {0, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0}},
        {"\"auto\"", {0, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0}},
        {"{}", {0, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0}},
        {"{\"wave\":5}", {5, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0}},
        {"{\"waves_in_flight\":3}", {0, 3, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0}},
        {"{\"prefer\":\"backward\"}", {0, 0, PREFER_BACKWARD, FLAG_OPEN, FLAG_OPEN, 0}},
        {"{\"prefer\":\"forward\",\"wave\":\"auto\"}", {0, 0, PREFER_FORWARD, FLAG_OPEN, FLAG_OPEN, 0}},
        {"{\"patient\":true}", {0, 0, PREFER_OPEN, 1, FLAG_OPEN, 0}},
        {"{\"patient\":false,\"justified\":\"auto\"}", {0, 0, PREFER_OPEN, 0, FLAG_OPEN, 0}},
        {"{\"justified\":true,\"patient\":\"auto\"}", {0, 0, PREFER_OPEN, FLAG_OPEN, 1, 0}},
        {"{\"justified\":false}", {0, 0, PREFER_OPEN, FLAG_OPEN, 0, 0}},
        {"{\"wave\":1048576,\"waves_in_flight\":1,\"prefer\":\"wave\",\"patient\":true,\"justified\":false}",
         {1048576, 1, PREFER_WAVE, 1, 0, 0}},
        {"{\"without\":[]}", {0, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0}},
        {"{\"without\":[\"duplex\"]}", {0, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, WITHOUT_DUPLEX}},
        {"{\"without\":[\"interleaving\",\"fused-combine\"],\"wave\":3}",
         {3, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, WITHOUT_INTERLEAVING | WITHOUT_FUSED_COMBINE}},
        /* Without waves there is nothing to prefer, and a wave says only how many are under way. */
        {"{\"without\":[\"waves\"]}", {1, 0, PREFER_WAVE, FLAG_OPEN, FLAG_OPEN, WITHOUT_WAVES}},
        {"{\"without\":[\"waves\",\"duplex\"],\"wave\":5,\"prefer\":\"forward\",\"patient\":true}",
         {5, 0, PREFER_WAVE, 1, FLAG_OPEN, WITHOUT_WAVES | WITHOUT_DUPLEX}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct reading reading = read_with("order", cases[i].text);
        assert_good(&reading);
        struct order o = cases[i].order;
        assert_order(reading.experiment.points[0].order, o.wave, o.waves_in_flight, o.prefer, o.patient,
                     o.justified, o.without);
        reading_free(&reading);
    }
}

/* A word, or an object whose sides are none where they are left out. */
static void test_recompute(void **state) {
    (void)state;
    static const struct {
        const char *text;
        struct recompute recompute;
        const char *word; /* that says the same; NULL: none does */
    } cases[] = {
        {"\"none\"", {ATTENTION_NONE, FFN_NONE, 0}, "none"},
        {"\"selective\"", {ATTENTION_NORMS, FFN_ACTIVATION, 0}, "selective"},
        {"\"full\"", {ATTENTION_FULL, FFN_FULL, 0}, "full"},
        {"{}", {ATTENTION_NONE, FFN_NONE, 0}, "none"},
        {"{\"layers\":3}", {ATTENTION_NONE, FFN_NONE, 3}, "none"},
        {"{\"attention\":\"norms\",\"ffn\":\"activation\"}",
         {ATTENTION_NORMS, FFN_ACTIVATION, 0},
         "selective"},
        {"{\"attention\":\"norms\",\"ffn\":\"activation\",\"layers\":1}",
         {ATTENTION_NORMS, FFN_ACTIVATION, 1},
         NULL},
        {"{\"attention\":\"full\",\"ffn\":\"full\"}", {ATTENTION_FULL, FFN_FULL, 0}, "full"},
        {"{\"attention\":\"full\",\"ffn\":\"full\",\"layers\":2}", {ATTENTION_FULL, FFN_FULL, 2}, NULL},
        {"{\"attention\":\"projections\"}", {ATTENTION_PROJECTIONS, FFN_NONE, 0}, NULL},
        {"{\"attention\":\"norms\"}", {ATTENTION_NORMS, FFN_NONE, 0}, NULL},
        {"{\"attention\":\"full\"}", {ATTENTION_FULL, FFN_NONE, 0}, NULL},
        {"{\"ffn\":\"activation\",\"layers\":7}", {ATTENTION_NONE, FFN_ACTIVATION, 7}, NULL},
        {"{\"ffn\":\"full\",\"attention\":\"none\"}", {ATTENTION_NONE, FFN_FULL, 0}, NULL},
        {"{\"ffn\":\"full\",\"attention\":\"projections\",\"layers\":94}",
         {ATTENTION_PROJECTIONS, FFN_FULL, 94},
         NULL},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const struct change changes[] = {{"memory", "{}"}, {"memory.recompute", cases[i].text}};
        struct reading reading = read_changed(changes, COUNT(changes));
        assert_good(&reading);
        struct recompute found = reading.experiment.points[0].memory.recompute, e = cases[i].recompute;
        if (found.attention != e.attention || found.ffn != e.ffn || found.layers != e.layers)
            fail_msg("%s: %d %d %d", cases[i].text, found.attention, found.ffn, found.layers);
        const char *word = recompute_word(found);
        if (!cases[i].word) assert_null(word);
        if (cases[i].word) assert_string_equal(word, cases[i].word);
        reading_free(&reading);
    }
}

/* The lowest layers of a stage or group recompute, the rest keep all. */
static void test_recompute_by_layer(void **state) {
    (void)state;
    struct plan plan = {.memory.recompute = {ATTENTION_PROJECTIONS, FFN_FULL, 3}};
    for (int all = 0; all < 2; all++, plan.memory.recompute.layers = 0)
        for (int index = 0; index < 6; index++) {
            struct recompute found = plan_recompute(&plan, index);
            bool recomputes = all || index < 3;
            assert_int_equal(found.attention, recomputes ? ATTENTION_PROJECTIONS : ATTENTION_NONE);
            assert_int_equal(found.ffn, recomputes ? FFN_FULL : FFN_NONE);
        }
}

static void test_head(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int head;
    } cases[] = {{NULL, HEAD_LAST_FFN}, {"\"last-ffn\"", HEAD_LAST_FFN}, {"\"all-ffn\"", HEAD_ALL_FFN}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct reading reading = read_with("head", cases[i].text);
        assert_good(&reading);
        assert_int_equal(reading.experiment.points[0].head, cases[i].head);
        reading_free(&reading);
    }
}

static void test_parallel_in_part(void **state) {
    (void)state;
    static const struct {
        const char *text;
        struct parallel parallel;
    } cases[] = {
        {"{\"ep\":16,\"pp\":\"auto\",\"groups\":4}", {.ep = 16, .groups = 4}},
        {"{\"cp\":4}", {.cp = 4}},
        {"{\"cp\":\"auto\",\"vpp\":3,\"pp\":2}", {.pp = 2, .vpp = 3}},
        {"{\"attn_gpus\":5,\"ffn_gpus\":\"auto\"}", {.attn_gpus = 5}},
        {"{\"ffn_gpus\":7,\"attn_nics\":9,\"ffn_nics\":\"auto\"}", {.ffn_gpus = 7, .attn_nics = 9}},
        {"{\"ffn_nics\":1048576,\"attn_nics\":1}", {.attn_nics = 1, .ffn_nics = 1048576}},
        {"{\"pp\":1,\"vpp\":2,\"ep\":3,\"groups\":4,\"attn_gpus\":5,\"ffn_gpus\":6,\"cp\":7,\"attn_nics\":8,"
         "\"ffn_nics\":9}",
         {1, 2, 3, 4, 5, 6, 7, 8, 9}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct reading reading = read_with("parallel", cases[i].text);
        assert_good(&reading);
        assert_memory_equal(&reading.experiment.points[0].parallel, &cases[i].parallel,
                            sizeof cases[i].parallel);
        reading_free(&reading);
    }
}

static void test_given_parts(void **state) {
    (void)state;
    static const struct change changes[] = {
        {"memory", "{\"recompute\":\"full\",\"expert_input\":\"resend\",\"grads\":\"bf16\",\"moments\":"
                   "\"bf16\",\"zero\":1,\"offload\":true}"},
        {"order", "{\"wave\":16,\"waves_in_flight\":2}"},
        {"placement", "\"mixed-nodes\""},
        {"costs", "{\"attn_fwd_s\":0.5,\"optimizer_s\":2}"},
        {"seed", "9"},
    };
    struct reading reading = read_changed(changes, COUNT(changes));
    assert_good(&reading);
    const struct point *point = &reading.experiment.points[0];
    assert_int_equal(point->memory.recompute.attention, ATTENTION_FULL);
    assert_int_equal(point->memory.recompute.ffn, FFN_FULL);
    assert_int_equal(point->memory.expert_input, INPUT_RESEND);
    assert_int_equal(point->memory.grads, PRECISION_BF16);
    assert_int_equal(point->memory.moments, PRECISION_BF16);
    assert_int_equal(point->memory.zero, 1);
    assert_true(point->memory.offload && !point->auto_memory && !point->auto_placement);
    assert_int_equal(point->memory_given, MEMORY_ALL);
    assert_order(point->order, 16, 2, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0);
    assert_int_equal(point->placement, PLACEMENT_MIXED);
    assert_non_null(point->table);
    assert_true(point->table->attn_fwd_s == 0.5 && point->table->optimizer_s == 2);
    assert_true(point->table->ffn_fwd_s == 0);
    assert_int_equal(point->seed, 9);
    reading_free(&reading);
    reading = read_with("costs", "null"); /* as if it were not there */
    assert_good(&reading);
    assert_null(reading.experiment.points[0].table);
    assert_int_equal(reading.experiment.points[0].memory_given, 0);
    reading_free(&reading);
}

/* ---- sweeps ------------------------------------------------------------------------------------------ */

static void test_sweep(void **state) {
    (void)state;
    struct reading reading =
        read_with("sweep", "{\"model\":[\"models/deepseek-moe-16b-paper.json\",\"models/gpt-oss-120b-paper"
                           ".json\"],\"cluster.nodes\":[8,16],\"seq_len\":[1024,2048,4096]}");
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 12);
    static const int lengths[] = {1024, 2048, 4096};
    for (int i = 0; i < 12; i++) { /* the last axis changes fastest */
        const struct point *point = &reading.experiment.points[i];
        char label[256];
        snprintf(label, sizeof label, "model=models/%s.json cluster.nodes=%d seq_len=%d",
                 i < 6 ? "deepseek-moe-16b-paper" : "gpt-oss-120b-paper", i / 3 % 2 ? 16 : 8, lengths[i % 3]);
        assert_string_equal(point->label, label);
        assert_string_equal(point->model->name, i < 6 ? "deepseek-moe-16b-paper" : "gpt-oss-120b-paper");
        assert_int_equal(point->cluster->nodes, i / 3 % 2 ? 16 : 8);
        assert_int_equal(point->seq_len, lengths[i % 3]);
    }
    reading_free(&reading);
}

static void test_sweep_of_parts(void **state) {
    (void)state;
    static const struct change changes[] = {
        {"parallel", "{\"pp\":2}"},
        {"sweep", "{\"order\":[\"auto\",{\"wave\":4,\"waves_in_flight\":2}],\"memory.zero\":[0,1],"
                  "\"model.layers\":[4],\"parallel.ep\":[1,2]}"},
        {"memory", "{}"}};
    struct reading reading = read_changed(changes, COUNT(changes));
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 8);
    const struct point *last = &reading.experiment.points[7];
    assert_string_equal(
        last->label, "order={\"wave\":4,\"waves_in_flight\":2} memory.zero=1 model.layers=4 parallel.ep=2");
    assert_int_equal(last->order.wave, 4);
    assert_int_equal(last->memory.zero, 1);
    assert_int_equal(last->model->layers, 4);
    assert_int_equal(last->parallel.ep, 2);
    assert_int_equal(last->parallel.pp, 2);
    assert_order(reading.experiment.points[0].order, 0, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0);
    reading_free(&reading);
}

static void test_sweep_too_large(void **state) {
    (void)state;
    struct text sweep = {0};
    text_add(&sweep, "{");
    for (int axis = 0; axis < 3; axis++) {
        static const char *const keys[] = {"seq_len", "seed", "micro_batch_size"};
        text_add(&sweep, "%s\"%s\":[1", axis ? "," : "", keys[axis]);
        for (int i = 2; i <= 100; i++) text_add(&sweep, ",%d", i);
        text_add(&sweep, "]");
    }
    text_add(&sweep, "}");
    struct reading reading = read_with("sweep", sweep.text);
    assert_says(&reading.errors, HERE ": sweep: ");
    reading_free(&reading);
    free(sweep.text);
}

/* ---- overrides --------------------------------------------------------------------------------------- */

static struct reading read_speedup(const struct override *overrides, int count) {
    struct reading reading = {0};
    reading.good =
        experiment_read("experiments/speedup.json", overrides, count, &reading.experiment, &reading.errors);
    assert_true(reading.good == (reading.errors.count == 0));
    return reading;
}

static void test_overrides(void **state) {
    (void)state;
    static const struct override overrides[] = {
        {"seq_len", "512"},        {"model", "models/gpt-oss-120b-paper.json"},
        {"cluster.nodes", "2"},    {"model.layers", "3"},
        {"memory.zero", "1"},      {"memory", "{\"zero\":1}"},
        {"placement", "\"auto\""}, {"routing", "zipf:1.25"},
    };
    struct reading reading = read_speedup(NULL, 0);
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 24);
    reading_free(&reading);
    reading = read_speedup(&overrides[5], 1);
    assert_good(&reading);
    assert_int_equal(reading.experiment.points[23].memory.zero, 1);
    reading_free(&reading);
    /* A swept key that is set is no longer swept; a path and what lies below it follow in turn. */
    const struct override most[] = {overrides[0], overrides[1], overrides[2], overrides[3],
                                    overrides[5], overrides[6], overrides[7]};
    reading = read_speedup(most, COUNT(most));
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 1);
    const struct point *point = &reading.experiment.points[0];
    assert_string_equal(point->label, "");
    assert_int_equal(point->seq_len, 512);
    assert_string_equal(point->model->name, "gpt-oss-120b-paper");
    assert_int_equal(point->model->layers, 3);
    assert_int_equal(point->cluster->nodes, 2);
    assert_int_equal(point->parallel.ep, 16);
    assert_string_equal(point->routing.text, "zipf:1.25");
    reading_free(&reading);
    /* What lies below a swept key changes in each of its values. */
    reading = read_speedup(&overrides[3], 1);
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 24);
    for (int i = 0; i < 24; i++) assert_int_equal(reading.experiment.points[i].model->layers, 3);
    reading_free(&reading);
    /* memory is "auto" in the manifest: what is set below it is given, as if it stood in an object there. */
    reading = read_speedup(&overrides[4], 1);
    assert_good(&reading);
    assert_int_equal(reading.experiment.points[23].memory.zero, 1);
    reading_free(&reading);
}

static void test_wrong_overrides(void **state) {
    (void)state;
    static const struct {
        struct override override;
        const char *says;
    } cases[] = {
        {{"seq_len", "long"}, ": seq_len: found \"long\""},
        {{"nothing", "1"}, ": nothing: unknown key"},
        {{"seq_len.x", "1"}, ": seq_len.x: no such place"},
        {{"", "1"}, ": "},
        {{"model", "gone.json"}, "experiments/gone.json"},
        {{"model.moe.top_k", "[1"}, ": model.moe.top_k: "},
        {{"a.b.c", "1"}, ": a: unknown key"},
        {{"placement.x", "1"}, ": placement: found {…}"},
        {{"name.x", "1"}, ": name.x: no such place: name is \"speedup\", not an object"},
        {{"systems.x", "1"}, ": systems.x: no such place"},
        {{"model.moe.top_k.x", "1"}, ": model.moe.top_k.x: no such place: model.moe.top_k is 8"},
        {{"a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a", "1"}, ": no such place"},
        {{"per_system.tutel.seed", "1"}, ": per_system.tutel: no system"},
        {{"per_system.megatron.seed", "-1"}, ": per_system.megatron.seed: found -1"},
        {{"sweep.cluster.nodes", "8"}, ": sweep.cluster.nodes: found 8; must be a list"},
        {{"sweep", "7"}, ": sweep: found 7"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct reading reading = read_speedup(&cases[i].override, 1);
        assert_false(reading.good);
        assert_says(&reading.errors, cases[i].says);
        reading_free(&reading);
    }
}

/* Objects that are not there are made, so that one part can be set; the rest is as if nothing were there. */
static void test_made_parents(void **state) {
    (void)state;
    static const struct override overrides[] = {{"costs.p2p_s", "0.5"},
                                                {"train.steps", "7"},
                                                {"order.wave", "4"},
                                                {"order.waves_in_flight", "2"},
                                                {"parallel.pp", "2"}};
    struct reading reading = {0};
    reading.good = experiment_read("experiments/speedup.json", overrides, COUNT(overrides),
                                   &reading.experiment, &reading.errors);
    assert_good(&reading);
    const struct point *point = &reading.experiment.points[0];
    assert_true(point->table && point->table->p2p_s == 0.5 && point->table->attn_fwd_s == 0);
    assert_int_equal(point->training.steps, 7);
    assert_int_equal(point->order.wave, 4);
    assert_int_equal(point->parallel.pp, 2);
    assert_int_equal(point->parallel.ep, 16); /* of the manifest */
    reading_free(&reading);
    reading = read_with("sweep", "{\"parallel.ep\":[1,2],\"costs.p2p_s\":[0,1]}");
    assert_good(&reading);
    assert_int_equal(reading.experiment.points[3].parallel.ep, 2);
    assert_int_equal(reading.experiment.points[3].parallel.pp, 0);
    assert_true(reading.experiment.points[3].table->p2p_s == 1);
    reading_free(&reading);
    /* --set sweep.PATH adds an axis, whatever dots the path has. */
    const struct override axis = {"sweep.cluster.nodes", "[1,2,4]"};
    reading = read_speedup(&axis, 1);
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 36);
    assert_int_equal(reading.experiment.points[35].cluster->nodes, 4);
    reading_free(&reading);
}

/* What a point's record says of the sweep: the paths in their order, values as the manifest gives them. */
static void test_swept(void **state) {
    (void)state;
    struct reading reading = read_text(SOUND);
    assert_int_equal(reading.experiment.points[0].swept_count, 0);
    reading_free(&reading);
    reading =
        read_with("sweep", "{\"model\":[\"models/gpt-oss-120b-paper.json\"],\"order\":[\"auto\",{\"wave\":4,"
                           "\"waves_in_flight\":2}],\"cluster.gpu.memory_bytes\":[8e10,0.1e12,85899345920]}");
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 6);
    static const char *const bytes[] = {"80000000000", "100000000000", "85899345920"};
    for (int i = 0; i < 6; i++) {
        const struct point *point = &reading.experiment.points[i];
        assert_int_equal(point->index, i);
        assert_int_equal(point->swept_count, 3);
        assert_string_equal(point->swept[0].path, "model");
        assert_string_equal(point->swept[0].value, "\"models/gpt-oss-120b-paper.json\"");
        assert_string_equal(point->swept[1].path, "order");
        assert_string_equal(point->swept[1].value, i < 3 ? "\"auto\"" : "{\"wave\":4,\"waves_in_flight\":2}");
        assert_string_equal(point->swept[2].path, "cluster.gpu.memory_bytes");
        assert_string_equal(point->swept[2].value, bytes[i % 3]);
        assert_int_equal(point->swept[2].number, i % 3);
    }
    reading_free(&reading);
    /* A swept key that is set is no longer swept. */
    const struct override overrides[] = {{"cluster.nodes", "8"}, {"seq_len", "4096"}};
    reading = read_speedup(overrides, 2);
    assert_good(&reading);
    assert_int_equal(reading.experiment.points[2].swept_count, 1);
    assert_string_equal(reading.experiment.points[2].swept[0].path, "model");
    reading_free(&reading);
}

/* ---- per_system -------------------------------------------------------------------------------------- */

static void test_per_system(void **state) {
    (void)state;
    static const struct change changes[] = {
        {"per_system", "{\"disagmoe\":{\"cluster.nodes\":4,\"cluster\":\"clusters/local-8.json\",\"seed\":7,"
                       "\"parallel\":{\"groups\":2}},\"megatron\":{}}"},
        {"sweep", "{\"seq_len\":[1024,2048]}"}};
    struct reading reading = read_changed(changes, COUNT(changes));
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 2);
    for (int i = 0; i < 2; i++) {
        struct point *point = &reading.experiment.points[i], *own = point->variants[1];
        assert_true(point->variants[0] == point); /* nothing is set for it */
        assert_null(point->own);
        assert_int_equal(point->cluster->nodes, 16);
        assert_int_equal(point->seed, 1);
        assert_true(own != point);
        /* The cluster first, then what is set in it. */
        assert_string_equal(own->cluster->name, "local-8");
        assert_int_equal(own->cluster->nodes, 4);
        assert_int_equal(own->seed, 7);
        assert_int_equal(own->parallel.groups, 2);
        assert_int_equal(own->parallel.pp, 0);
        assert_int_equal(own->seq_len, i ? 2048 : 1024);
        assert_int_equal(own->index, i);
        assert_string_equal(own->label, point->label);
        assert_int_equal(own->swept_count, 1);
        assert_non_null(strstr(own->own, "\"cluster.nodes\":4"));
    }
    reading_free(&reading);
}

/* Every key that shapes a plan may differ between the systems of a point. */
static void test_per_system_choices(void **state) {
    (void)state;
    static const struct change changes[] = {
        {"parallel", "{\"ep\":4,\"cp\":2}"},
        {"memory", "{\"recompute\":\"selective\",\"zero\":1}"},
        {"order", "{\"wave\":3}"},
        {"head", "\"all-ffn\""},
        {"per_system",
         "{\"megatron\":{\"parallel.cp\":4,\"memory.recompute\":{\"attention\":\"projections\",\"layers\":2},"
         "\"cluster.rates.head_gemm.value\":5e14},"
         "\"disagmoe\":{\"parallel\":{\"attn_nics\":6},\"order\":{\"patient\":true,\"justified\":false},"
         "\"head\":\"last-ffn\",\"memory\":\"auto\",\"placement\":\"mixed-nodes\"}}"}};
    struct reading reading = read_changed(changes, COUNT(changes));
    assert_good(&reading);
    const struct point *common = &reading.experiment.points[0];
    const struct point *m = common->variants[0], *d = common->variants[1];
    assert_true(common->parallel.cp == 2 && common->head == HEAD_ALL_FFN && common->memory.zero == 1);
    assert_true(common->cluster->rates[RATE_HEAD_GEMM] == 600e12);
    assert_true(m->parallel.cp == 4 && m->parallel.ep == 4 && m->head == HEAD_ALL_FFN);
    assert_true(m->memory.recompute.attention == ATTENTION_PROJECTIONS && m->memory.recompute.layers == 2);
    assert_true(m->memory.recompute.ffn == FFN_NONE && m->memory.zero == 1 && !m->placement_given);
    assert_int_equal(m->memory_given, MEMORY_RECOMPUTE | MEMORY_ZERO);
    assert_true(m->cluster->rates[RATE_HEAD_GEMM] == 5e14);
    assert_order(m->order, 3, 0, PREFER_OPEN, FLAG_OPEN, FLAG_OPEN, 0);
    /* An object stands for the whole of what it replaces. */
    assert_true(d->parallel.attn_nics == 6 && d->parallel.cp == 0 && d->parallel.ep == 0);
    assert_order(d->order, 0, 0, PREFER_OPEN, 1, 0, 0);
    assert_true(d->head == HEAD_LAST_FFN && d->auto_memory && d->memory_given == 0);
    assert_true(d->placement_given && d->placement == PLACEMENT_MIXED);
    assert_true(d->cluster->rates[RATE_HEAD_GEMM] == 600e12);
    reading_free(&reading);
}

/* Swept whole, by system and by path; --set reaches what per_system puts in place. */
static void test_per_system_swept(void **state) {
    (void)state;
    static const struct change changes[] = {
        {"sweep", "{\"per_system\":[{},{\"megatron\":{\"seed\":5}}],\"per_system.disagmoe\":[{\"seed\":2},"
                  "{\"cluster.nodes\":3}],\"per_system.disagmoe.cluster.gpu.memory_bytes\":[5e9,6e9]}"}};
    struct reading reading = read_changed(changes, COUNT(changes));
    assert_good(&reading);
    assert_int_equal(reading.experiment.point_count, 8);
    for (int i = 0; i < 8; i++) {
        const struct point *point = &reading.experiment.points[i];
        assert_int_equal(point->variants[0]->seed, i < 4 ? 1 : 5);
        assert_int_equal(point->variants[1]->seed, i / 2 % 2 ? 1 : 2);
        assert_int_equal(point->variants[1]->cluster->nodes, i / 2 % 2 ? 3 : 16);
        assert_true(point->variants[1]->cluster->gpu.memory_bytes == (i % 2 ? 6e9 : 5e9));
        assert_true(point->cluster->gpu.memory_bytes > 6e9);
    }
    assert_string_equal(reading.experiment.points[7].label,
                        "per_system={\"megatron\":{\"seed\":5}} per_system.disagmoe={\"cluster.nodes\":3} "
                        "per_system.disagmoe.cluster.gpu.memory_bytes=6000000000");
    reading_free(&reading);
    static const struct override overrides[] = {
        {"per_system.disagmoe.model", "models/gpt-oss-120b-paper.json"},
        {"model.layers", "3"},
        {"seq_len", "64"},
        {"per_system.megatron.seq_len", "32"},
        {"model", "models/qwen3-235b-paper.json"},
        {"cluster.nodes", "1"}};
    reading = read_speedup(overrides, COUNT(overrides));
    assert_good(&reading);
    const struct point *point = &reading.experiment.points[0];
    assert_int_equal(reading.experiment.point_count, 1);
    assert_string_equal(point->variants[1]->model->name, "gpt-oss-120b-paper");
    assert_int_equal(point->variants[1]->model->layers, 3); /* as in a swept model */
    assert_int_equal(point->variants[1]->seq_len, 64);
    assert_int_equal(point->variants[0]->seq_len, 32); /* per_system is set last */
    assert_string_equal(point->variants[0]->model->name, "qwen3-235b-paper");
    reading_free(&reading);
}

/* Behind a file that cannot be read nothing else is said of what it would have held. */
static void test_only_the_cause(void **state) {
    (void)state;
    static const struct change missing[] = {{"model", "\"models/none.json\""},
                                            {"cluster", "\"clusters/none.json\""},
                                            {"routing", "\"odd\""},
                                            {"sweep", "{\"model.layers\":[2,4],\"cluster.nodes\":[1,2]}"},
                                            {"per_system", "{\"megatron\":{\"model.moe.top_k\":2}}"}};
    struct reading reading = read_changed(missing, COUNT(missing));
    assert_says(&reading.errors, "experiments/models/none.json: cannot be opened");
    assert_says(&reading.errors, "experiments/clusters/none.json: cannot be opened");
    assert_int_equal(reading.errors.count, 2);
    reading_free(&reading);
    static const struct override overrides[] = {{"model", "models/none.json"},
                                                {"model.layers", "3"},
                                                {"model.attention.heads", "4"},
                                                {"seq_len", "0"}};
    reading = read_speedup(overrides, COUNT(overrides));
    assert_says(&reading.errors, "experiments/models/none.json: cannot be opened");
    assert_says(&reading.errors, "seq_len: found 0"); /* the rest is told as ever */
    assert_int_equal(reading.errors.count, 2);
    reading_free(&reading);
}

/* All files that a manifest is read from are known, so that none is overwritten. */
static void test_files(void **state) {
    (void)state;
    static const struct override overrides[] = {{"per_system.megatron.cluster", "clusters/local-8.json"}};
    static const char *const expected[] = {"experiments/speedup.json",
                                           "experiments/models/qwen3-235b-paper.json",
                                           "experiments/clusters/h800-16x8.json",
                                           "experiments/models/deepseek-moe-16b-paper.json",
                                           "experiments/clusters/local-8.json",
                                           "experiments/models/gpt-oss-120b-paper.json"};
    struct reading reading = read_speedup(overrides, 1);
    assert_int_equal(reading.experiment.file_count, COUNT(expected));
    for (size_t i = 0; i < COUNT(expected); i++)
        assert_string_equal(reading.experiment.files[i], expected[i]);
    reading_free(&reading);
}

/* ---- what is searched fits --------------------------------------------------------------------------- */

#define SMALL_MODEL                                                                                          \
    "{\"name\":\"small\",\"layers\":2,\"hidden\":512,\"vocab\":1000,\"attention\":{\"heads\":8,"             \
    "\"kv_heads\":4,\"head_dim\":64},\"moe\":{\"experts\":8,\"top_k\":2,\"expert_hidden\":1024}}"

/* Whether one was found; then it fits, and what is given is as given. */
static bool searched_plan_fits(const struct point *point, int which, double usable) {
    const struct system *system = system_named(point->systems[which]);
    struct errors errors = {0};
    struct result result;
    struct plan plan;
    bool feasible = false, ring = which == 1;
    if (!tune_point(system, point, &plan, &feasible, &errors)) fail_msg("%s", errors.messages[0]);
    if (!feasible) return false;
    simulate_plan(system, &plan, &result, NULL, NULL);
    if (result.oom || result.peak_memory > usable)
        fail_msg("%s: %g bytes do not fit %g", system->name, result.peak_memory, usable);
    const struct parallel *given = &point->parallel, *found = &plan.parallel;
    assert_true(ring || !given->ep || found->ep == given->ep);
    assert_true(ring || !given->pp || found->pp == given->pp);
    assert_true(!given->cp || found->cp == given->cp);
    assert_true(!ring || !given->groups || found->groups == given->groups);
    assert_true(!ring || !given->attn_gpus || found->attn_gpus == given->attn_gpus);
    assert_true(!ring || !given->ffn_gpus || found->ffn_gpus == given->ffn_gpus);
    assert_true(!ring || !given->attn_nics || found->attn_nics == given->attn_nics);
    if (point->memory_given & MEMORY_RECOMPUTE)
        assert_string_equal(recompute_word(plan.memory.recompute), "none");
    if (point->memory_given & MEMORY_ZERO) assert_int_equal(plan.memory.zero, 0);
    if (point->memory_given & MEMORY_EXPERT_INPUT) assert_int_equal(plan.memory.expert_input, INPUT_KEEP);
    if (ring && point->order.wave) assert_int_equal(plan.order.wave, point->order.wave);
    return true;
}

/* A part that is given stays; what is searched beside it never exceeds the memory. */
static void test_searched_plans_fit(void **state) {
    (void)state;
    static const struct change parts[] = {
        {"seed", "1"}, /* nothing is given */
        {"parallel", "{\"ep\":4}"},
        {"parallel", "{\"pp\":2,\"cp\":2}"},
        {"parallel", "{\"groups\":2}"},
        {"parallel", "{\"attn_gpus\":1,\"vpp\":1}"},
        {"parallel", "{\"ffn_gpus\":2,\"attn_nics\":2}"},
        {"memory", "{\"recompute\":\"none\"}"},
        {"memory", "{\"zero\":0,\"expert_input\":\"keep\"}"},
        {"order", "{\"wave\":4}"},
    };
    static const double bytes[] = {3.02e9, 3.3e9}; /* 3e9 are reserved */
    int cases = sampled(COUNT(parts) * COUNT(bytes)), fit = 0;
    for (int i = 0; i < cases; i++) {
        const struct change *part = &parts[i % COUNT(parts)];
        double memory = bytes[(size_t)i / COUNT(parts)];
        char text[32];
        snprintf(text, sizeof text, "%.0f", memory);
        const struct change changes[] = {{"model", SMALL_MODEL},
                                         {"cluster.nodes", "1"},
                                         {"cluster.gpus_per_node", "4"},
                                         {"cluster.nics_per_node", "4"},
                                         {"cluster.slow_gpus", "[]"},
                                         {"cluster.gpu.memory_bytes", text},
                                         {"placement", "\"mixed-nodes\""},
                                         {"seq_len", "1024"},
                                         {"global_batch", "6"},
                                         *part};
        struct reading reading = read_changed(changes, COUNT(changes));
        assert_good(&reading);
        for (int s = 0; s < 2; s++) fit += searched_plan_fits(&reading.experiment.points[0], s, memory - 3e9);
        reading_free(&reading);
    }
    print_message("%d of %d searches found a plan that fits\n", fit, 2 * cases);
    assert_true(cases < 18 || (fit > cases / 2 && fit < 2 * cases));
}

/* ---- routing ----------------------------------------------------------------------------------------- */

static void test_zipf(void **state) {
    (void)state;
    static const double exponents[] = {0, 0.5, 1, 2.5, 10};
    for (size_t i = 0; i < COUNT(exponents); i++) {
        char text[64];
        snprintf(text, sizeof text, "\"zipf:%g\"", exponents[i]);
        struct reading reading = read_with("routing", text);
        assert_good(&reading);
        const double *share = reading.experiment.points[0].routing.share;
        double sum = 0;
        for (int e = 0; e < 64; e++) {
            sum += share[e];
            assert_near(share[e] / share[0], pow(e + 1, -exponents[i]));
        }
        assert_near(sum, 1);
        reading_free(&reading);
    }
}

static struct reading read_counts(const char *counts) {
    char file[] = "/tmp/disagmoe-test-plan-XXXXXX", value[64];
    int descriptor = mkstemp(file);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, counts, strlen(counts)), (ssize_t)strlen(counts));
    close(descriptor);
    snprintf(value, sizeof value, "\"file:%s\"", file);
    const struct change changes[] = {
        {"model.moe.experts", "4"}, {"model.moe.top_k", "2"}, {"routing", value}};
    struct reading reading = read_changed(changes, COUNT(changes));
    unlink(file);
    return reading;
}

static void test_counts(void **state) {
    (void)state;
    static const char *const good[] = {"1 2 3 4",      "1,2,3,4\n",   "1\n2\n3\n4\n",
                                       " 1, 2, 3, 4 ", "10 20 30 40", "1e0,2.0,3,4"};
    static const char *const wrong[] = {"",          "1 2 3",     "1 2 3 4 5",  "1 2 3 x",
                                        "1 2 -3 4",  "0 0 0 0",   "1 2 3 4x",   "a",
                                        "nan 1 1 1", "inf 1 1 1", "1e301 1 1 1"};
    for (size_t i = 0; i < COUNT(good); i++) {
        struct reading reading = read_counts(good[i]);
        if (!reading.good) fail_msg("\"%s\": %s", good[i], reading.errors.messages[0]);
        for (int e = 0; e < 4; e++)
            assert_near(reading.experiment.points[0].routing.share[e], (e + 1) / 10.0);
        reading_free(&reading);
    }
    for (size_t i = 0; i < COUNT(wrong); i++) {
        struct reading reading = read_counts(wrong[i]);
        if (reading.good) fail_msg("\"%s\" was taken", wrong[i]);
        assert_says(&reading.errors, HERE ": routing: ");
        reading_free(&reading);
    }
}

/* ---- no manifests ------------------------------------------------------------------------------------ */

static void assert_refused(const char *text, size_t length, const char *says_what) {
    char file[] = "/tmp/disagmoe-test-plan-XXXXXX";
    int descriptor = mkstemp(file);
    FILE *stream = fdopen(descriptor, "w");
    assert_non_null(stream);
    assert_int_equal(fwrite(text, 1, length, stream), length);
    assert_int_equal(fclose(stream), 0);
    struct reading reading = {0};
    reading.good = experiment_read(file, NULL, 0, &reading.experiment, &reading.errors);
    unlink(file);
    assert_false(reading.good);
    assert_true(reading.errors.count > 0);
    assert_int_equal(strncmp(reading.errors.messages[0], file, strlen(file)), 0);
    assert_says(&reading.errors, says_what);
    reading_free(&reading);
}

static void test_cut_off(void **state) {
    (void)state;
    for (size_t length = 0; length < strlen(SOUND); length++) assert_refused(SOUND, length, "");
}

static void test_no_manifest(void **state) {
    (void)state;
    char binary[4096];
    struct rng rng = rng_seed(SEED);
    for (size_t i = 0; i < sizeof binary; i++) binary[i] = (char)rng_next(&rng);
    assert_refused(binary, sizeof binary, "");
    assert_refused("\0\0\0\0", 4, "");
    assert_refused(SOUND "\0", sizeof SOUND, "");
    assert_refused(SOUND SOUND, 2 * strlen(SOUND), "");
    assert_refused("[]", 2, "an object");
    assert_refused("7", 1, "an object");
    assert_refused("null", 4, "an object");
    assert_refused("{}", 2, "missing");
    assert_refused("{\"seq_len\":1,\"seq_len\":2}", 25, "twice");
}

/* Ten million bytes of sound JSON, of brackets, and of nothing. */
static void test_huge(void **state) {
    (void)state;
    size_t length = 10 * 1000 * 1000;
    char *text = must_alloc(length + 1);
    memset(text, ' ', length);
    memcpy(text, SOUND, strlen(SOUND));
    assert_refused(text, length, "8 MiB");
    memset(text, '[', length);
    assert_refused(text, length, "");
    for (size_t i = 0; i + 5 <= length; i += 5) memcpy(text + i, "{\"a\":", 5);
    assert_refused(text, length, "");
    assert_refused(text, 5 * 1000 * 1000, ""); /* below the limit of size: the depth is too much */
    memset(text, 0, length);
    assert_refused(text, length, "");
    free(text);
}

static void test_deeply_nested(void **state) {
    (void)state;
    struct text text = {0};
    text_add(&text, "%.*s,\"routing\":", (int)strlen(SOUND) - 1, SOUND);
    for (int i = 0; i < 100000; i++) text_add(&text, "[");
    for (int i = 0; i < 100000; i++) text_add(&text, "]");
    text_add(&text, "}");
    assert_refused(text.text, text.length, "");
    free(text.text);
}

/* ---- random damage ----------------------------------------------------------------------------------- */

/* The manifest of the speedup table with one model and cluster written out: the damage reaches every reader.
 */
static char *whole_manifest(void) {
    cJSON *manifest = cJSON_Parse(SOUND);
    static const struct change changes[] = {
        {"model.layers", "4"},
        {"cluster.nodes", "2"},
        {"parallel", "{\"ep\":4,\"pp\":\"auto\"}"},
        {"memory", "{\"recompute\":\"none\",\"zero\":1,\"offload\":false}"},
        {"order", "{\"wave\":4,\"waves_in_flight\":2,\"prefer\":\"wave\"}"},
        {"placement", "\"auto\""},
        {"routing", "\"zipf:0.5\""},
        {"costs", "{\"attn_fwd_s\":0.25}"},
        {"per_system",
         "{\"disagmoe\":{\"cluster.nodes\":3,\"memory\":{\"zero\":1}},\"megatron\":{\"seed\":2}}"},
        {"sweep", "{\"seq_len\":[1024,2048],\"cluster.nodes\":[1,2],\"model.moe.top_k\":[2]}"}};
    for (size_t i = 0; i < COUNT(changes); i++) change(manifest, changes[i]);
    char *text = cJSON_PrintUnformatted(manifest);
    cJSON_Delete(manifest);
    return text;
}

static const char *const tokens[] = {"{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     ":",
                                     "\"",
                                     "-",
                                     "1e999",
                                     "null",
                                     "true",
                                     "\"auto\"",
                                     "0",
                                     "1e-400",
                                     "\\u0000",
                                     "\\ud800",
                                     "99999999999999999999",
                                     "{}",
                                     "[]",
                                     "\"\"",
                                     "\x80",
                                     "\n",
                                     "//",
                                     "NaN"};

/* Length of the value, key or mark that starts here. */
static size_t token_length(const char *text) {
    if (*text == '"') {
        const char *end = strchr(text + 1, '"');
        return end ? (size_t)(end - text) + 1 : 1;
    }
    size_t length = strcspn(text, ",:{}[]\"");
    return length ? length : 1;
}

/* Replaces `old` bytes at `at` by a text. */
static char *splice(char *text, size_t at, size_t old, const char *with, size_t count) {
    size_t length = strlen(text);
    if (old > length - at) old = length - at;
    char *changed = must_alloc(length - old + count + 1);
    memcpy(changed, text, at);
    memcpy(changed + at, with, count);
    memcpy(changed + at + count, text + at + old, length - at - old);
    free(text);
    return changed;
}

static size_t random_token(const char *text, struct rng *rng) {
    size_t target = (size_t)rng_below(rng, (int)strlen(text)), at = 0;
    while (at + token_length(text + at) <= target) at += token_length(text + at);
    return at;
}

/* A byte, a token, or a token's place is changed. */
static char *damage(char *text, struct rng *rng) {
    if (!*text) return text;
    size_t byte = (size_t)rng_below(rng, (int)strlen(text)), at = random_token(text, rng);
    const char *token = tokens[rng_below(rng, COUNT(tokens))];
    char any[2] = {(char)(1 + rng_below(rng, 255)), '\0'}, *copy;
    size_t other = random_token(text, rng), length = token_length(text + other);
    switch (rng_below(rng, 7)) {
    case 0:
        return splice(text, byte, 1, any, 1);
    case 1:
        return splice(text, byte, 0, any, 1);
    case 2:
        return splice(text, byte, (size_t)rng_below(rng, 20), "", 0);
    case 3:
        return splice(text, at, token_length(text + at), token, strlen(token));
    case 4:
        return splice(text, at, 0, token, strlen(token));
    case 5:
        return splice(text, byte, rng_below(rng, 10) ? 0 : strlen(text), "", 0);
    default: /* another token of the manifest */
        copy = must_alloc(length + 1);
        memcpy(copy, text + other, length);
        text = splice(text, at, token_length(text + at), copy, length);
        free(copy);
        return text;
    }
}

/* What a point that was taken must be good for. */
static void check_point(const struct point *point) {
    assert_true(point->model && point->model->layers >= 1 &&
                point->model->moe.experts >= point->model->moe.top_k);
    assert_true(point->cluster && point->cluster->nodes >= 1 && cluster_gpus(point->cluster) >= 1);
    assert_true(point->system_count >= 1 && point->seq_len >= 1 && point->micro_batch_size >= 1);
    assert_true((point->global_batch > 0) != (point->micro_batches > 0));
    double sum = 0;
    for (int i = 0; i < point->model->moe.experts; i++) sum += point->routing.share[i];
    assert_true(fabs(sum - 1) < 1e-9);
    for (int k = 0; k < point->system_count; k++)
        if (point->variants[k] != point) {
            assert_true(point->variants[k]->variants == point->variants && !point->own);
            assert_true(point->variants[k]->own && point->variants[k]->index == point->index);
            assert_true(point->variants[k]->model && point->variants[k]->seq_len >= 1);
        }
}

static void test_random_damage(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED);
    int count = sampled(MUTATIONS), taken = 0;
    char *whole = whole_manifest();
    for (int i = 0; i < count; i++) {
        char *text = must_alloc(strlen(whole) + 1);
        strcpy(text, whole);
        for (int k = rng_below(&rng, 3); k >= 0; k--) text = damage(text, &rng);
        struct reading reading = read_text(text);
        for (int k = 0; reading.good && k < reading.experiment.point_count; k++)
            check_point(&reading.experiment.points[k]);
        for (int k = 0; k < reading.errors.count; k++) assert_true(strlen(reading.errors.messages[k]) < 2000);
        taken += reading.good;
        reading_free(&reading);
        free(text);
    }
    cJSON_free(whole);
    assert_true(taken < count);
}

/* ---- the committed manifests ------------------------------------------------------------------------- */

static void test_committed(void **state) {
    (void)state;
    static const char *const files[] = {"experiments/speedup.json", "experiments/batch-size.json"};
    for (size_t i = 0; i < COUNT(files); i++) {
        struct reading reading = {0};
        reading.good = experiment_read(files[i], NULL, 0, &reading.experiment, &reading.errors);
        assert_good(&reading);
        for (int k = 0; k < reading.experiment.point_count; k++) check_point(&reading.experiment.points[k]);
        reading_free(&reading);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_all_at_once),
        cmocka_unit_test(test_told_once),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_training_defaults),
        cmocka_unit_test(test_auto),
        cmocka_unit_test(test_parallel_in_part),
        cmocka_unit_test(test_order_in_part),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_recompute_by_layer),
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_given_parts),
        cmocka_unit_test(test_sweep),
        cmocka_unit_test(test_sweep_of_parts),
        cmocka_unit_test(test_sweep_too_large),
        cmocka_unit_test(test_overrides),
        cmocka_unit_test(test_wrong_overrides),
        cmocka_unit_test(test_made_parents),
        cmocka_unit_test(test_swept),
        cmocka_unit_test(test_per_system),
        cmocka_unit_test(test_per_system_swept),
        cmocka_unit_test(test_per_system_choices),
        cmocka_unit_test(test_searched_plans_fit),
        cmocka_unit_test(test_only_the_cause),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_zipf),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_no_manifest),
        cmocka_unit_test(test_huge),
        cmocka_unit_test(test_deeply_nested),
        cmocka_unit_test(test_random_damage),
        cmocka_unit_test(test_committed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
