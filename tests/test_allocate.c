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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_brute_force),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
