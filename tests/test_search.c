/*
The local search and the exhaustive one, with evaluators whose answers are known.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "allocate/allocate.h"
#include "cases.h"
#include "disagmoe/disagmoe.h"

#define SEED 20260513

/* 4 nodes of 8 GPUs; nothing given but the micro-batches. */
static struct experiment small_experiment(void) {
    static const char text[] =
        "{\"name\": \"search\", \"model\": \"models/deepseek-moe-16b-paper.json\","
        " \"cluster\": \"clusters/h800-16x8.json\", \"systems\": [\"disagmoe\"], \"seq_len\": 4096,"
        " \"micro_batches\": 32, \"memory\": {\"recompute\": \"none\"}, \"placement\": \"mixed-nodes\","
        " \"order\": {\"wave\": 2, \"waves_in_flight\": 4, \"prefer\": \"wave\"}, \"sweep\": "
        "{\"cluster.nodes\": [2]}}";
    struct experiment experiment = {0};
    struct errors errors = {0};
    bool read = experiment_read_text(text, "experiments/search.json", &experiment, &errors);
    if (!read) errors_print(&errors, stderr);
    assert_true(read);
    errors_free(&errors);
    return experiment;
}

/* Seconds that grow with the distance from one layout; some layouts do not fit. */
struct hill {
    int attn_gpus, ffn_gpus, groups;
    bool holes;
    pthread_mutex_t mutex;
    int calls;
};

static double climb_hill(void *context, const struct plan *plan) {
    struct hill *hill = context;
    const struct parallel *parallel = &plan->parallel;
    pthread_mutex_lock(&hill->mutex);
    hill->calls++;
    pthread_mutex_unlock(&hill->mutex);
    double far = abs(parallel->attn_gpus - hill->attn_gpus) + abs(parallel->ffn_gpus - hill->ffn_gpus) +
                 100.0 * abs(parallel->groups - hill->groups);
    if (hill->holes && (parallel->attn_gpus * 7 + parallel->ffn_gpus * 3) % 5 == 0 && far > 0)
        return INFINITY;
    return 1 + far + 0.01 * abs(parallel->attn_nics - parallel->ffn_nics);
}

static struct search search_hill(struct hill *hill, const struct seeds *seeds, int threads,
                                 struct search_options options) {
    struct evaluator evaluator = {"test", &disagmoe, hill, climb_hill, threads};
    struct search search;
    struct errors errors = {0};
    bool good = allocation_search(&evaluator, seeds->list, seeds->count, &options, &search, &errors);
    if (!good) errors_print(&errors, stderr);
    assert_true(good);
    errors_free(&errors);
    return search;
}

static void assert_same_search(const struct search *a, const struct search *b) {
    assert_int_equal(a->count, b->count);
    assert_int_equal(a->best, b->best);
    for (int i = 0; i < a->count; i++) {
        assert_memory_equal(&a->trials[i].plan.parallel, &b->trials[i].plan.parallel,
                            sizeof(struct parallel));
        assert_true(a->trials[i].seconds == b->trials[i].seconds);
    }
}

/* From even splits to the top of a hill, round holes, no layout twice, the same on any number of threads. */
static void test_finds_the_top(void **state) {
    (void)state;
    struct experiment experiment = small_experiment();
    struct seeds even = allocation_even_seeds(&disagmoe, &experiment.points[0]);
    assert_int_equal(even.count, 4); /* 1, 2, 4, 8 groups */
    struct rng rng = rng_seed(SEED);
    for (int i = 0, cases = sampled(40); i < cases; i++) {
        int groups = 1 + rng_below(&rng, 2), m = 1 + rng_below(&rng, 7);
        struct hill hill = {m, 1 + rng_below(&rng, 8 - m), groups, i % 2, PTHREAD_MUTEX_INITIALIZER, 0};
        struct search_options options = {.radius = 2, .trials = 200, .patience = 0, .identity = "a hill"};
        struct search one = search_hill(&hill, &even, 1, options);
        assert_int_equal(hill.calls, one.count);
        assert_true(one.best >= 0);
        assert_int_equal(one.trials[one.best].plan.parallel.attn_gpus, hill.attn_gpus);
        assert_int_equal(one.trials[one.best].plan.parallel.ffn_gpus, hill.ffn_gpus);
        for (int a = 0; a < one.count; a++)
            for (int b = 0; b < a; b++)
                assert_true(memcmp(&one.trials[a].plan.parallel, &one.trials[b].plan.parallel,
                                   sizeof(struct parallel)) != 0);
        struct search many = search_hill(&hill, &even, 4, options);
        assert_same_search(&one, &many);
        free(one.trials);
        free(many.trials);
    }
    seeds_free(&even);
    experiment_free(&experiment);
}

/* No more trials than allowed, and none long behind the best. */
static void test_ends_early(void **state) {
    (void)state;
    struct experiment experiment = small_experiment();
    struct seeds even = allocation_even_seeds(&disagmoe, &experiment.points[0]);
    struct hill hill = {7, 1, 1, false, PTHREAD_MUTEX_INITIALIZER, 0};
    for (int trials = 1; trials <= 12; trials++) {
        struct search_options options = {.radius = 1, .trials = trials, .identity = ""};
        struct search search = search_hill(&hill, &even, 2, options);
        assert_true(search.count <= trials);
        free(search.trials);
    }
    struct search_options options = {.radius = 3, .trials = 500, .patience = 5, .identity = ""};
    struct search search = search_hill(&hill, &even, 2, options);
    assert_true(search.best >= 0 && search.count - 1 - search.best < 5 + 8); /* a round is not cut short */
    free(search.trials);
    seeds_free(&even);
    experiment_free(&experiment);
}

/* ---- the log ---------------------------------------------------------------------------------------------
 */

static char *content_of(const char *file) {
    FILE *stream = fopen(file, "r");
    assert_non_null(stream);
    char *text = must_alloc(1 << 20);
    text[fread(text, 1, (1 << 20) - 1, stream)] = 0;
    fclose(stream);
    return text;
}

static void write_part(const char *file, const char *text, size_t length) {
    FILE *stream = fopen(file, "w");
    assert_non_null(stream);
    assert_int_equal(fwrite(text, 1, length, stream), length);
    fclose(stream);
}

/* Cut off anywhere, a log goes on where its last whole line ends, to the same trials in the end. */
static void test_resumes(void **state) {
    (void)state;
    char folder[] = "/tmp/search-XXXXXX", file[64];
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/deep/log.jsonl", folder);
    struct experiment experiment = small_experiment();
    struct seeds even = allocation_even_seeds(&disagmoe, &experiment.points[0]);
    struct hill hill = {5, 2, 2, true, PTHREAD_MUTEX_INITIALIZER, 0};
    struct search_options options = {.radius = 2, .trials = 60, .log = file, .identity = "one \"search\""};
    struct search whole = search_hill(&hill, &even, 2, options);
    assert_int_equal(whole.reused, 0);
    char *text = content_of(file);
    size_t length = strlen(text);
    struct rng rng = rng_seed(SEED + 2);
    for (int i = 0; i < 12; i++) {
        size_t cut = i == 0 ? length : (size_t)rng_below(&rng, (int)length + 1);
        int lines = 0;
        for (size_t k = 0; k < cut; k++) lines += text[k] == '\n';
        write_part(file, text, cut);
        hill.calls = 0;
        struct search again = search_hill(&hill, &even, 2, options);
        assert_same_search(&whole, &again);
        assert_int_equal(again.reused, lines > 0 ? lines - 1 : 0);
        assert_int_equal(hill.calls, whole.count - again.reused);
        char *now = content_of(file);
        assert_string_equal(now, text);
        free(now);
        free(again.trials);
    }
    free(text);
    free(whole.trials);
    unlink(file);
    snprintf(file, sizeof file, "%s/deep", folder);
    rmdir(file);
    rmdir(folder);
    seeds_free(&even);
    experiment_free(&experiment);
}

/* A log of something else, no log at all, or one with a line that is no trial: refused, and left as it is. */
static void test_refuses_other_logs(void **state) {
    (void)state;
    char file[] = "/tmp/search-XXXXXX";
    close(mkstemp(file));
    struct experiment experiment = small_experiment();
    struct seeds even = allocation_even_seeds(&disagmoe, &experiment.points[0]);
    struct hill hill = {5, 2, 2, true, PTHREAD_MUTEX_INITIALIZER, 0};
    struct evaluator evaluator = {"test", &disagmoe, &hill, climb_hill, 1};
    static const char *const texts[] = {"{\"search\":\"another\"}\n", "hello\n",
                                        "{\"search\":\"mine\"}\n{\"groups\":1}\n",
                                        "{\"search\":\"mine\"}\nnothing\n"};
    struct search_options options = {.radius = 1, .trials = 5, .log = file, .identity = "mine"};
    for (size_t i = 0; i < COUNT(texts); i++) {
        struct search search;
        struct errors errors = {0};
        write_part(file, texts[i], strlen(texts[i]));
        assert_false(allocation_search(&evaluator, even.list, even.count, &options, &search, &errors));
        assert_int_equal(errors.count, 1);
        assert_int_equal(hill.calls, 0);
        char *now = content_of(file);
        assert_string_equal(now, texts[i]);
        free(now);
        errors_free(&errors);
    }
    struct search search;
    struct errors errors = {0};
    options.log = "/proc/nowhere/log";
    assert_false(allocation_search(&evaluator, even.list, even.count, &options, &search, &errors));
    assert_int_equal(errors.count, 1);
    errors_free(&errors);
    unlink(file);
    seeds_free(&even);
    experiment_free(&experiment);
}

/* ---- exhaustive ------------------------------------------------------------------------------------------
 */

/* A time that keeps the bound's order and is never below it. */
static double bounded_seconds(void *context, const struct plan *plan) {
    const struct parallel *parallel = &plan->parallel;
    int *calls = context;
    ++*calls;
    uint64_t numbers[] = {(uint64_t)parallel->groups, (uint64_t)parallel->attn_gpus,
                          (uint64_t)parallel->ffn_gpus, (uint64_t)(parallel->attn_nics + 1),
                          (uint64_t)(parallel->ffn_nics + 1)};
    struct rng rng = rng_seed(rng_seed_of(numbers, COUNT(numbers)));
    return plan_bound(&disagmoe, plan).seconds / plan->sequences * (1 + 0.3 * rng_uniform(&rng));
}

/* The least of all layouts, found with a part of the evaluations: against all of them one by one. */
static void test_exhaustive(void **state) {
    (void)state;
    struct experiment experiment = small_experiment();
    const struct point *point = &experiment.points[0];
    struct plan like = {.point = point,
                        .parallel = {.cp = 1},
                        .memory = point->memory,
                        .order = {2, 4, PREFER_WAVE, 1, 1},
                        .placement = PLACEMENT_MIXED};
    int calls = 0, all_calls = 0;
    double best = INFINITY;
    struct evaluator evaluator = {"test", &disagmoe, &calls, bounded_seconds, 1};
    struct exhaustive found = allocation_exhaustive(&evaluator, &like, NULL);
    assert_int_equal(calls, found.evaluations);
    int64_t layouts = 0;
    for (int p = 1; p <= 8; p++)
        for (int m = 1; m < 16 / p; m++)
            for (int n = 1; n <= 16 / p - m; n++) {
                struct errors errors = {0};
                struct plan plan = like;
                plan.parallel = (struct parallel){.groups = p, .attn_gpus = m, .ffn_gpus = n, .cp = 1};
                if (!disagmoe.size(&plan, &errors)) {
                    errors_free(&errors);
                    continue;
                }
                int nics = 16 / (p * plan.replicas);
                for (int i = 0; i < nics; i++)
                    for (int j = 0; j < nics; j++) {
                        bool all = i + j == nics && i > 0 && j > 0, equal = i == j && 2 * i < nics && i > 0;
                        bool divided = i == 0 && j == 0; /* as the system would */
                        layouts += all || equal || (divided && nics <= 1);
                        struct plan one = plan;
                        one.parallel.attn_nics = i, one.parallel.ffn_nics = j;
                        if (!(all || equal || divided) || !disagmoe.settle(&one, &errors)) continue;
                        if (plan_bound(&disagmoe, &one).bytes > plan_usable_memory(point)) continue;
                        best = fmin(best, bounded_seconds(&all_calls, &one));
                    }
                errors_free(&errors);
            }
    assert_true(found.best.seconds == best && best < INFINITY);
    assert_int_equal(found.layouts, layouts);
    assert_true(found.evaluations < all_calls);
    experiment_free(&experiment);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_the_top), cmocka_unit_test(test_ends_early),
        cmocka_unit_test(test_resumes),       cmocka_unit_test(test_refuses_other_logs),
        cmocka_unit_test(test_exhaustive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
