/*
The roofline allocation: the integer program against brute force, and what becomes of its seeds.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <glpk.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "allocate/allocate.h"
#include "cases.h"
#include "disagmoe/disagmoe.h"

#define CASES 1000
#define SEED 20260512
#define MOST 24 /* GPUs or NICs of a random group */

/* ---- random problems --------------------------------------------------------------------------------- */

struct random_problem {
    struct allocation_problem problem;
    double attn[MOST], ffn[MOST], attn_nic[MOST], ffn_nic[MOST], attn_static[MOST], ffn_static[MOST];
};

static double up_to(struct rng *rng, double most) {
    return rng_uniform(rng) * most;
}

/* Every constraint of the kind that real problems have, each at times too tight. */
static void random_problem(struct rng *rng, struct random_problem *it) {
    bool whole = rng_below(rng, 2) == 0; /* few different seconds: many ties */
    double a = whole ? 12 : 0.1 + up_to(rng, 1), f = whole ? 12 : 0.1 + up_to(rng, 1);
    double v = rng_below(rng, 4) ? (whole ? 6 : up_to(rng, 1)) : 0;
    int gpus = 1 + rng_below(rng, MOST), nics = 1 + rng_below(rng, MOST / 2),
        experts = 1 + rng_below(rng, 16);
    *it = (struct random_problem){
        .problem = {.gpus = gpus,
                    .nics = nics,
                    .most_attn_gpus = gpus > 1 ? gpus - 1 : 1,
                    .most_ffn_gpus = gpus - 1 < experts ? (gpus > 1 ? gpus - 1 : 1) : experts,
                    .usable = INFINITY,
                    .flops = a + f,
                    .peak_flops = 1,
                    .multiple = 1}};
    for (int i = 0; i < MOST; i++) {
        it->attn[i] = a / (i + 1);
        it->ffn[i] = f / experts * ceil((double)experts / (i + 1));
        it->attn_nic[i] = it->ffn_nic[i] = v / (i + 1);
    }
    struct allocation_problem *problem = &it->problem;
    problem->attn_seconds = it->attn, problem->ffn_seconds = it->ffn;
    problem->attn_nic_seconds = it->attn_nic, problem->ffn_nic_seconds = it->ffn_nic;
    problem->attn_static = it->attn_static, problem->ffn_static = it->ffn_static;
    if (rng_below(rng, 3) == 0) problem->multiple = 1 << rng_below(rng, 4);
    if (rng_below(rng, 2) == 0) {
        problem->blocks = 1 + rng_below(rng, 3);
        problem->gpus_per_node = 1 << rng_below(rng, 4);
        problem->nics_per_node = 1 + rng_below(rng, problem->gpus_per_node);
        problem->nodes = 1 + rng_below(rng, 2 + problem->blocks * gpus / problem->gpus_per_node);
        problem->mixed = rng_below(rng, 3) == 0;
    }
    if (rng_below(rng, 2) == 0) {
        problem->usable = 10;
        problem->attn_kept = up_to(rng, 6);
        problem->ffn_kept = up_to(rng, 6);
        double share = up_to(rng, 5), experts_bytes = up_to(rng, 60);
        for (int i = 0; i < MOST; i++) {
            it->attn_static[i] = share + up_to(rng, 1);
            it->ffn_static[i] = experts_bytes / (i + 1);
        }
    }
}

/* ---- brute force --------------------------------------------------------------------------------------- */

enum { SKIP_NOTHING, SKIP_A_MEMORY, SKIP_F_MEMORY, SKIP_MULTIPLE, SKIP_NODES, SKIP_NICS, SKIP_GPUS };

static int nodes_for(int count, int per_node) {
    return (count + per_node - 1) / per_node;
}

static int larger(int a, int b) {
    return a > b ? a : b;
}

static bool nodes_suffice(const struct allocation_problem *p, struct allocation a) {
    int g = p->gpus_per_node, n = p->nics_per_node, b = p->blocks;
    if (!p->nodes) return true;
    if (p->mixed)
        return b * (a.attn_gpus + a.ffn_gpus) <= p->nodes * g &&
               b * (a.attn_nics + a.ffn_nics) <= p->nodes * n;
    return larger(nodes_for(b * a.attn_gpus, g), nodes_for(b * a.attn_nics, n)) +
               larger(nodes_for(b * a.ffn_gpus, g), nodes_for(b * a.ffn_nics, n)) <=
           p->nodes;
}

static bool is_allowed(const struct allocation_problem *p, struct allocation a, int skip) {
    if (skip != SKIP_GPUS && a.attn_gpus + a.ffn_gpus > p->gpus) return false;
    if (skip != SKIP_NICS && a.attn_nics + a.ffn_nics > p->nics) return false;
    if (skip != SKIP_MULTIPLE && a.attn_gpus % p->multiple) return false;
    if (skip != SKIP_NODES && !nodes_suffice(p, a)) return false;
    if (p->usable == INFINITY) return true;
    if (skip != SKIP_A_MEMORY && p->attn_static[a.attn_gpus - 1] + p->attn_kept > p->usable) return false;
    return skip == SKIP_F_MEMORY ||
           p->ffn_static[a.ffn_gpus - 1] + p->ffn_kept * a.attn_gpus / a.ffn_gpus <= p->usable * (1 + 1e-12);
}

static double longest(const struct allocation_problem *p, struct allocation a) {
    return fmax(p->attn_nic_seconds[a.attn_nics - 1], p->ffn_nic_seconds[a.ffn_nics - 1]);
}

static double slower(const struct allocation_problem *p, struct allocation a) {
    return fmax(fmax(p->attn_seconds[a.attn_gpus - 1], p->ffn_seconds[a.ffn_gpus - 1]), longest(p, a));
}

static bool is_better(const struct allocation_problem *p, struct allocation a, struct allocation b) {
    double x = slower(p, a), y = slower(p, b);
    int g = a.attn_gpus + a.ffn_gpus, h = b.attn_gpus + b.ffn_gpus;
    if (x != y) return x < y;
    return g != h ? g < h : longest(p, a) < longest(p, b);
}

static bool best_of_all(const struct allocation_problem *p, int skip, struct allocation *best) {
    bool found = false;
    struct allocation a;
    for (a.attn_gpus = 1; a.attn_gpus <= p->most_attn_gpus; a.attn_gpus++)
        for (a.ffn_gpus = 1; a.ffn_gpus <= p->most_ffn_gpus; a.ffn_gpus++)
            for (a.attn_nics = 1; a.attn_nics <= p->nics; a.attn_nics++)
                for (a.ffn_nics = 1; a.ffn_nics <= p->nics; a.ffn_nics++) {
                    if (!is_allowed(p, a, skip) || (found && !is_better(p, a, *best))) continue;
                    *best = a;
                    found = true;
                }
    return found;
}

static void assert_explained(const struct allocation_problem *p, const char *why) {
    static const char *const words[] = {[SKIP_A_MEMORY] = "memory of the attention",
                                        [SKIP_F_MEMORY] = "memory of the feed-forward",
                                        [SKIP_MULTIPLE] = "attention GPUs a multiple of cp",
                                        [SKIP_NODES] = "whole nodes",
                                        [SKIP_NICS] = "NICs",
                                        [SKIP_GPUS] = "GPUs"};
    struct allocation ignored;
    bool named = false;
    for (int skip = SKIP_A_MEMORY; skip <= SKIP_GPUS; skip++) {
        bool helps = best_of_all(p, skip, &ignored);
        if (strncmp(why, words[skip], strlen(words[skip])) == 0) {
            assert_true(helps || p->gpus < 2 || p->nics < 2);
            named = true;
        }
        if (helps) assert_null(strstr(why, "several"));
    }
    assert_true(named || strstr(why, "several") != NULL);
}

/* Seconds, GPUs and the longest transfer of the optimum are those of the best of all allocations. */
static void test_brute_force(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED);
    int impossible = 0, cases = sampled(CASES);
    double slowest = 0;
    for (int i = 0; i < cases; i++) {
        struct random_problem it;
        random_problem(&rng, &it);
        const struct allocation_problem *p = &it.problem;
        struct allocation best;
        struct allocation_solution solution;
        char why[128] = "";
        bool possible = best_of_all(p, SKIP_NOTHING, &best);
        assert_true(allocation_solve(p, &solution, why, sizeof why) == possible);
        if (!possible) {
            impossible++;
            assert_explained(p, why);
            continue;
        }
        struct allocation a = solution.allocation;
        assert_true(is_allowed(p, a, SKIP_NOTHING));
        assert_true(slower(p, a) == slower(p, best));
        assert_int_equal(a.attn_gpus + a.ffn_gpus, best.attn_gpus + best.ffn_gpus);
        assert_true(longest(p, a) == longest(p, best));
        assert_true(fmax(solution.attn_seconds, solution.ffn_seconds) == slower(p, best));
        assert_within(solution.mfu, p->flops / (slower(p, best) * (a.attn_gpus + a.ffn_gpus)), 1e-12);
        slowest = fmax(slowest, solution.solve_seconds);
    }
    print_message("%d problems, %d without a solution; the longest took %.3f s\n", cases, impossible,
                  slowest);
    assert_true(impossible > 0 && impossible < cases);
}

/* ---- the roofline ----------------------------------------------------------------------------------------
 */

static const char *const manifest =
    "{\"name\": \"allocate\", \"model\": \"models/%s.json\", \"cluster\": \"clusters/h800-16x8.json\","
    " \"systems\": [\"disagmoe\"], \"seq_len\": %d, \"global_batch\": 256%s}";

static struct experiment read_experiment(const char *model, int seq_len, const char *more) {
    char text[2048];
    struct experiment experiment = {0};
    struct errors errors = {0};
    snprintf(text, sizeof text, manifest, model, seq_len, more);
    bool read = experiment_read_text(text, "experiments/allocate.json", &experiment, &errors);
    if (!read) errors_print(&errors, stderr);
    assert_true(read);
    errors_free(&errors);
    return experiment;
}

/* The paper's forms by hand (section 3): Qwen3's g is 16, so (4096 · 2.125 + 4 · 4096) ÷ 16 and 2 · 1536. */
static void test_paper_intensities(void **state) {
    (void)state;
    struct experiment experiment = read_experiment("qwen3-235b-paper", 4096, "");
    const struct point *point = &experiment.points[0];
    struct intensity paper = intensity_of_paper(point->model, 4096);
    assert_within(paper.attention, (4096 * 2.125 + 16384) / 16, 1e-12);
    assert_within(paper.ffn, 3072, 1e-12);
    assert_within(turning_point(989e12, 50e9), 19780, 1e-12);
    /* Exact by hand, per token: projections of 64 + 2 · 4 heads and back, router, 2 · 4097 keys on average.
     */
    double h = 4096, wide = 64 * 128, narrow = 4 * 128;
    double attention = 2 * h * (2 * wide + 2 * narrow) + 2 * h * 128 + 2 * wide * 4097;
    double experts = 8 * 3 * 2 * h * 1536, bytes = 8 * h * 2;
    struct intensity exact = intensity_exact(point->model, 4096);
    assert_within(exact.attention, attention / bytes, 1e-9);
    assert_within(exact.ffn, experts / bytes, 1e-9);
    struct roofline roofline = roofline_relaxed(point, 3);
    assert_within(roofline.attn_flops, 3 * 4096 * attention, 1e-9);
    assert_within(roofline.ffn_flops, 3 * 4096 * experts, 1e-9);
    assert_within(roofline.bytes, 3 * 4096 * bytes, 1e-9);
    assert_within(roofline.attn_flops / roofline.ffn_flops, 0.698,
                  1e-3); /* one peak: experts have more to do */
    assert_int_equal(roofline.gpus, 128);
    experiment_free(&experiment);
}

/* The program of a bare roofline gives the split of its own formula. */
static void test_relaxed_program(void **state) {
    (void)state;
    struct roofline roofline = {300, 100, 8, 1, 1, 1, 4, 16, 8};
    struct arena *arena = arena_new();
    struct allocation_problem problem = roofline_problem(&roofline, arena);
    struct allocation_solution solution;
    char why[128];
    assert_true(allocation_solve(&problem, &solution, why, sizeof why));
    assert_int_equal(solution.allocation.attn_gpus, 12);
    assert_int_equal(solution.allocation.ffn_gpus, 4);
    assert_true(solution.attn_seconds == 25 && solution.ffn_seconds == 25);
    assert_within(solution.mfu, 1, 1e-12);
    roofline.bytes = 800; /* NICs bind at 800 ÷ (4 · 4) = 50 s: half of the GPUs would do */
    problem = roofline_problem(&roofline, arena);
    assert_true(allocation_solve(&problem, &solution, why, sizeof why));
    assert_true(solution.attn_seconds == 50 && solution.ffn_seconds == 50);
    assert_int_equal(solution.allocation.attn_gpus, 6);
    assert_int_equal(solution.allocation.ffn_gpus, 2);
    roofline.nics = 0;
    problem = roofline_problem(&roofline, arena);
    assert_false(allocation_solve(&problem, &solution, why, sizeof why));
    assert_non_null(strstr(why, "NICs"));
    roofline.nics = 8;
    roofline.gpus = 1;
    problem = roofline_problem(&roofline, arena);
    assert_false(allocation_solve(&problem, &solution, why, sizeof why));
    assert_non_null(strstr(why, "GPUs"));
    arena_free(arena);
}

/* What is written is the problem: another reading of it has the same optimum. */
static void test_written_program(void **state) {
    (void)state;
    struct rng rng = rng_seed(SEED + 1);
    char file[] = "/tmp/allocation-XXXXXX", why[128];
    int handle = mkstemp(file), read = 0;
    close(handle);
    for (int i = 0; i < 40; i++) {
        struct random_problem it;
        struct allocation_solution solution;
        struct errors errors = {0};
        random_problem(&rng, &it);
        if (!allocation_solve(&it.problem, &solution, why, sizeof why)) continue;
        assert_true(allocation_write_lp(&it.problem, file, &errors));
        glp_term_out(GLP_OFF);
        glp_prob *again = glp_create_prob();
        glp_iocp options;
        glp_init_iocp(&options);
        options.presolve = GLP_ON;
        assert_int_equal(glp_read_lp(again, NULL, file), 0);
        assert_int_equal(glp_intopt(again, &options), 0);
        /* t is by the longest of all seconds that are open. */
        double scale = 0, best = fmax(solution.attn_seconds, solution.ffn_seconds);
        const struct allocation_problem *p = &it.problem;
        for (int m = p->multiple; m <= p->most_attn_gpus; m += p->multiple)
            if (p->usable == INFINITY || p->attn_static[m - 1] + p->attn_kept <= p->usable)
                scale = fmax(scale, p->attn_seconds[m - 1]);
        for (int n = 1; n <= p->most_ffn_gpus; n++)
            if (p->usable == INFINITY || p->ffn_static[n - 1] + p->ffn_kept / n <= p->usable)
                scale = fmax(scale, p->ffn_seconds[n - 1]);
        if (p->nics) scale = fmax(scale, fmax(p->attn_nic_seconds[0], p->ffn_nic_seconds[0]));
        assert_true(fabs(glp_mip_obj_val(again) * scale - best) <= 1e-6 * scale);
        glp_delete_prob(again);
        glp_free_env();
        read++;
    }
    assert_true(read > 10);
    struct errors errors = {0};
    struct random_problem it;
    struct allocation_solution solution;
    do random_problem(&rng, &it);
    while (!allocation_solve(&it.problem, &solution, why, sizeof why));
    assert_false(allocation_write_lp(&it.problem, "/nowhere/at/all.lp", &errors));
    assert_int_equal(errors.count, 1);
    errors_free(&errors);
    unlink(file);
}

/* ---- seeds -----------------------------------------------------------------------------------------------
 */

/* Seeds are plans that can be: sized, settled, and no GPU of theirs holds less than its memory. */
static void test_seeds(void **state) {
    (void)state;
    static const struct {
        const char *model, *more;
        int seq_len;
    } cases[] = {{"deepseek-moe-16b-paper", "", 8192},
                 {"qwen3-235b-paper", ", \"memory\": {\"recompute\": \"full\"}", 16384},
                 {"gpt-oss-120b-paper", ", \"parallel\": {\"groups\": 3, \"cp\": 4}", 32768},
                 {"qwen3-235b-released", ", \"placement\": \"split-nodes\"", 4096}};
    for (int i = 0, count = sampled(COUNT(cases)); i < count; i++) {
        struct experiment experiment = read_experiment(cases[i].model, cases[i].seq_len, cases[i].more);
        const struct point *point = &experiment.points[0];
        struct seeds seeds = allocation_seeds(&disagmoe, point, 8);
        assert_true(seeds.count > 0 && seeds.problems >= seeds.count);
        for (int k = 0; k < seeds.count; k++) {
            const struct seed *seed = &seeds.list[k];
            const struct parallel *parallel = &seed->plan.parallel;
            struct plan again = seed->plan;
            struct errors errors = {0};
            assert_true(disagmoe.size(&again, &errors) && disagmoe.settle(&again, &errors));
            assert_memory_equal(&again.parallel, parallel, sizeof again.parallel);
            assert_int_equal(parallel->attn_gpus % parallel->cp, 0);
            assert_true(plan_bound(&disagmoe, &again).bytes <= plan_usable_memory(point));
            assert_true(seed->predicted >= seed_predict(seed, &again) && seed->predicted < INFINITY);
            if (point->parallel.groups) assert_int_equal(parallel->groups, point->parallel.groups);
            if (point->parallel.cp) assert_int_equal(parallel->cp, point->parallel.cp);
            if (point->placement_given) assert_int_equal(seed->plan.placement, point->placement);
            if (point->memory_given & MEMORY_RECOMPUTE)
                assert_memory_equal(&seed->plan.memory.recompute, &point->memory.recompute,
                                    sizeof point->memory.recompute);
        }
        seeds_free(&seeds);
        experiment_free(&experiment);
    }
}

/* Clusters that are too small have no seed, and it is said why. */
static void test_no_seed(void **state) {
    (void)state;
    static const struct {
        const char *sweep, *why;
    } cases[] = {{", \"sweep\": {\"cluster.nodes\": [1]}", "memory"},
                 {", \"sweep\": {\"cluster.nodes\": [1]}, \"parallel\": {\"groups\": 8}", "GPUs"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct experiment experiment = read_experiment("qwen3-235b-paper", 32768, cases[i].sweep);
        struct seeds seeds = allocation_seeds(&disagmoe, &experiment.points[0], 8);
        assert_int_equal(seeds.count, 0);
        assert_non_null(strstr(seeds.why, cases[i].why));
        seeds_free(&seeds);
        experiment_free(&experiment);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_brute_force),     cmocka_unit_test(test_paper_intensities),
        cmocka_unit_test(test_relaxed_program), cmocka_unit_test(test_written_program),
        cmocka_unit_test(test_seeds),           cmocka_unit_test(test_no_seed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
