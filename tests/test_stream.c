/* Policies for moving shapes: against brute force, and the online policy's guarantee on any stream. */
#include "allocate/allocate.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cases.h"

#define MOST_LAYOUTS 5
#define MOST_SHAPES 4
#define MOST_STEPS 600

struct instance {
    struct stream_table table;
    double seconds[MOST_LAYOUTS * MOST_SHAPES], moves[MOST_LAYOUTS * MOST_LAYOUTS];
    int shapes[MOST_STEPS], steps;
};

/* Seconds between 1 and 3, moves up to `dearest`, not symmetric and without a triangle inequality; with
   `holes`, some layouts do not fit some shapes. */
static void draw_table(struct rng *rng, struct instance *instance, double dearest, bool holes) {
    struct stream_table *table = &instance->table;
    *table = (struct stream_table){1 + rng_below(rng, MOST_LAYOUTS), 1 + rng_below(rng, MOST_SHAPES),
                                   instance->seconds, instance->moves};
    for (int i = 0; i < table->layouts * table->shapes; i++) instance->seconds[i] = 1 + 2 * rng_uniform(rng);
    for (int i = 0; holes && i < table->layouts * table->shapes; i++)
        if (i / table->shapes != table->layouts - 1 && rng_below(rng, 6) == 0)
            instance->seconds[i] = INFINITY;
    for (int i = 0; i < table->layouts * table->layouts; i++)
        instance->moves[i] = i % (table->layouts + 1) == 0 ? 0 : dearest * rng_uniform(rng);
}

/* Runs of about `run` steps. */
static void draw_stream(struct rng *rng, struct instance *instance, int steps, int run) {
    instance->steps = steps;
    for (int t = 0; t < steps; t++)
        instance->shapes[t] =
            t > 0 && rng_below(rng, run) ? instance->shapes[t - 1] : rng_below(rng, instance->table.shapes);
}

static double cost_of(const struct instance *instance, const int *layouts) {
    const struct stream_table *table = &instance->table;
    double sum = 0;
    for (int t = 0; t < instance->steps; t++) {
        sum += table->seconds[layouts[t] * table->shapes + instance->shapes[t]];
        if (t) sum += table->moves[layouts[t - 1] * table->layouts + layouts[t]];
    }
    return sum;
}

/* Seconds of all policies, whose outcomes are what their layouts say. */
struct outcomes {
    double start, fixed, oracle, online;
    int moves;
};
static struct outcomes run_all(const struct instance *instance) {
    const struct stream_table *table = &instance->table;
    int layouts[MOST_STEPS], home = stream_home(table, instance->shapes[0]);
    struct stream_outcome outcome = {.layouts = layouts};
    struct outcomes found;
    stream_stay(table, instance->shapes, instance->steps, home, &outcome);
    assert_int_equal(outcome.moves, 0);
    found.start = outcome.seconds;
    int best = stream_static(table, instance->shapes, instance->steps, &outcome);
    assert_int_equal(layouts[instance->steps - 1], best);
    found.fixed = outcome.seconds;
    stream_oracle(table, instance->shapes, instance->steps, &outcome);
    assert_within(outcome.seconds, cost_of(instance, layouts), 1e-12);
    found.oracle = outcome.seconds;
    stream_online(table, instance->shapes, instance->steps, home, &outcome);
    assert_within(outcome.seconds, cost_of(instance, layouts), 1e-12);
    found.online = outcome.seconds;
    found.moves = outcome.moves;
    return found;
}

static void check(const struct instance *instance, struct outcomes found) {
    double round_trip =
        stream_round_trip(&instance->table, stream_home(&instance->table, instance->shapes[0]));
    double rounding = 1e-12 * (found.oracle + round_trip);
    assert_true(found.oracle <= found.fixed + rounding);
    assert_true(found.fixed <= found.start);
    assert_true(found.oracle <= found.online + rounding);
    assert_true(isfinite(found.oracle) && isfinite(found.online));
    if (!(found.online <= found.start + round_trip + rounding))
        fail_msg("online takes %.17g, staying %.17g, a round trip %.17g", found.online, found.start,
                 round_trip);
}

static void test_random_streams(void **state) {
    (void)state;
    struct rng rng = rng_seed(81);
    int cases = sampled(1000), moved = 0, better = 0;
    for (int i = 0; i < cases; i++) {
        struct instance instance;
        draw_table(&rng, &instance, i % 3 == 0 ? 1 : i % 3 == 1 ? 10 : 60, i % 4 == 3);
        draw_stream(&rng, &instance, 1 + rng_below(&rng, MOST_STEPS), 1 + rng_below(&rng, 80));
        struct outcomes found = run_all(&instance);
        check(&instance, found);
        moved += found.moves > 0;
        better += found.online < found.start;
    }
    /* The guarantee is not that of a policy which stays at home. */
    if (cases >= 1000) assert_true(moved > 200 && better > 160);
}

/* Every sequence of layouts. */
static void test_oracle_is_brute_force(void **state) {
    (void)state;
    struct rng rng = rng_seed(82);
    for (int i = 0, cases = sampled(300); i < cases; i++) {
        struct instance instance;
        draw_table(&rng, &instance, i % 2 ? 1 : 4, i % 3 == 0);
        int layouts[MOST_STEPS], most = instance.table.layouts > 3 ? 5 : 7, sequences = 1;
        draw_stream(&rng, &instance, 1 + rng_below(&rng, most), 3);
        for (int t = 0; t < instance.steps; t++) sequences *= instance.table.layouts;
        double least = INFINITY;
        for (int sequence = 0; sequence < sequences; sequence++) {
            for (int t = 0, rest = sequence; t < instance.steps; t++, rest /= instance.table.layouts)
                layouts[t] = rest % instance.table.layouts;
            least = fmin(least, cost_of(&instance, layouts));
        }
        assert_within(run_all(&instance).oracle, least, 1e-12);
    }
}

/* Who sees what the policy does shows it, at each step, the shape at which its layout loses. */
static void test_adversary(void **state) {
    (void)state;
    const double costs[] = {0.1, 0.7, 5, 33, 1000};
    for (size_t c = 0; c < COUNT(costs); c++) {
        struct instance instance = {.seconds = {1, 2, 2, 1}, .moves = {0, costs[c], costs[c] / 2, 0}};
        instance.table = (struct stream_table){2, 2, instance.seconds, instance.moves};
        int layouts[MOST_STEPS];
        struct stream_outcome outcome = {.layouts = layouts};
        instance.shapes[0] = 0;
        for (instance.steps = 1; instance.steps < MOST_STEPS; instance.steps++) {
            stream_online(&instance.table, instance.shapes, instance.steps, 0, &outcome);
            instance.shapes[instance.steps] = !layouts[instance.steps - 1];
            check(&instance, run_all(&instance));
        }
    }
}

/* Alternating from step to step, where moving never pays, and in runs of every length. */
static void test_alternating(void **state) {
    (void)state;
    for (int run = 1; run <= 200; run++) {
        struct instance instance = {.seconds = {1, 2, 2, 1}, .moves = {0, 5, 5, 0}, .steps = MOST_STEPS};
        instance.table = (struct stream_table){2, 2, instance.seconds, instance.moves};
        for (int t = 0; t < MOST_STEPS; t++) instance.shapes[t] = t / run % 2;
        struct outcomes found = run_all(&instance);
        check(&instance, found);
        /* A round trip takes 10 seconds, a step in the other layout saves one. */
        if (run < 10) assert_int_equal(found.moves, 0);
        if (run >= 40) assert_true(found.online < found.fixed);
    }
}

/* In runs of 100, a move of 5 seconds: it waits for a round trip's worth of loss (10 steps that take one
   second more), goes, and so on. 6 runs: 5 moves, each behind 9 or 10 lost seconds. */
static void test_closed_form(void **state) {
    (void)state;
    struct instance instance = {.seconds = {1, 2, 2, 1}, .moves = {0, 5, 5, 0}, .steps = 600};
    instance.table = (struct stream_table){2, 2, instance.seconds, instance.moves};
    for (int t = 0; t < 600; t++) instance.shapes[t] = t / 100 % 2;
    struct outcomes found = run_all(&instance);
    assert_within(found.oracle, 600 + 5 * 5, 1e-12);
    assert_within(found.start, 900, 1e-12);
    assert_int_equal(found.moves, 5);
    assert_true(found.online >= 600 + 5 * (5 + 9) && found.online <= 600 + 5 * (5 + 10));
}

/* A home that does not fit a shape is left at once, whatever it costs. */
static void test_home_does_not_fit(void **state) {
    (void)state;
    struct instance instance = {.seconds = {1, INFINITY, 2, 3}, .moves = {0, 100, 100, 0}, .steps = 40};
    instance.table = (struct stream_table){2, 2, instance.seconds, instance.moves};
    for (int t = 0; t < 40; t++) instance.shapes[t] = t == 20;
    struct outcomes found = run_all(&instance);
    assert_true(isinf(found.start));
    check(&instance, found);
    assert_within(found.online, 20 + 100 + 3 + 19 * 2, 1e-12);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_streams), cmocka_unit_test(test_oracle_is_brute_force),
        cmocka_unit_test(test_adversary),      cmocka_unit_test(test_alternating),
        cmocka_unit_test(test_closed_form),    cmocka_unit_test(test_home_does_not_fit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
