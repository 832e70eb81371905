/*
A rank's program, its memory pool and the comparison of gradients, without ranks: whatever order the lanes
really drift into, nothing waits in a circle and no group ever holds more than the planned timeline says.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "sim/sim.h"
#include "train/pool.h"
#include "train/program.h"
#include "train/verify.h"
#include "tests/cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- random plans ------------------------------------------------------------------------------------ */

static const char manifest[] =
    "{\"model\": {\"name\": \"m\", \"layers\": %d, \"hidden\": 8, \"vocab\": 32, \"attention\": {\"heads\": "
    "2, "
    "\"kv_heads\": 1, \"head_dim\": 4}, \"moe\": {\"experts\": 6, \"top_k\": 2, \"expert_hidden\": 4, "
    "\"dense_layers\": %d, \"dense_hidden\": 8, \"shared_experts\": %d}}, \"cluster\": "
    "\"experiments/clusters/h800-16x8.json\", \"systems\": [\"%s\"], \"seq_len\": 8, \"micro_batches\": %d, "
    "\"parallel\": {\"pp\": %d, \"vpp\": %d, \"ep\": %d, \"groups\": %d, \"attn_gpus\": %d, \"ffn_gpus\": "
    "%d, \"cp\": %d}, "
    "\"memory\": {\"recompute\": {\"attention\": \"%s\", \"ffn\": \"%s\", \"layers\": %d}, \"expert_input\": "
    "\"%s\"}, \"head\": \"%s\", \"order\": {\"wave\": %d, "
    "\"waves_in_flight\": %d, \"prefer\": \"%s\", \"without\": %s}, \"placement\": \"mixed-nodes\", "
    "\"costs\": "
    "{\"attn_fwd_s\": %g, "
    "\"attn_bwd_s\": %g, \"ffn_fwd_s\": %g, \"ffn_bwd_s\": %g, \"dispatch_s\": %g, \"combine_s\": %g, "
    "\"p2p_s\": %g, "
    "\"head_fwd_s\": %g, \"grad_sync_s\": %g, \"optimizer_s\": %g, \"param_gather_s\": %g}}";

static const char *pick(struct rng *rng, const char *a, const char *b, const char *c) {
    const char *words[] = {a, b, c};
    return words[rng_below(rng, 3)];
}

static double cost(struct rng *rng, bool zeros) {
    return zeros && rng_below(rng, 2) ? 0 : 1e-3 + rng_uniform(rng);
}

/* Costs of 0 make operations of no length, whose order only the sequence tells; what lives for no time is not
   in the planned peak, so then only the waiting is checked. */
static char *random_manifest(struct rng *rng, const char *system, bool zeros) {
    struct text text = {0}, without = {0};
    add_random_without(&without, rng);
    int pp = 1 + rng_below(rng, 3), vpp = 1 + rng_below(rng, 2), rounds = 1 + rng_below(rng, 3);
    int layers = pp * vpp + rng_below(rng, 3), cp = 1 << rng_below(rng, 3);
    text_add(&text, manifest, layers, rng_below(rng, layers), rng_below(rng, 2), system, pp * rounds, pp, vpp,
             cp * (1 + rng_below(rng, 2)), 1 + rng_below(rng, layers < 3 ? layers : 3),
             cp * (1 + rng_below(rng, 2)), 1 + rng_below(rng, 3), cp,
             rng_below(rng, 2) ? pick(rng, "none", "norms", "projections") : "full",
             pick(rng, "none", "activation", "full"), 1 + rng_below(rng, 3),
             pick(rng, "keep", "resend", "resend"), pick(rng, "last-ffn", "all-ffn", "all-ffn"),
             1 + rng_below(rng, 3), 1 + rng_below(rng, 2), pick(rng, "backward", "forward", "wave"),
             without.text, cost(rng, zeros), cost(rng, zeros), cost(rng, zeros), cost(rng, zeros),
             cost(rng, zeros), cost(rng, zeros), cost(rng, zeros), cost(rng, zeros), cost(rng, zeros),
             cost(rng, zeros), cost(rng, zeros));
    free(without.text);
    return text.text;
}

/* ---- drifting lanes ---------------------------------------------------------------------------------- */

struct drift {
    const struct schedule *schedule;
    struct program *programs; /* (groups) */
    int *next;                /* (lanes) operations started */
    int *finished;            /* (lanes) */
    bool *done;               /* (operations) */
    int *open;                /* operations in progress */
    int open_count;
    double *now, *peak; /* (groups) bytes */
};

static bool may_start(const struct drift *drift, int op) {
    const struct operation *it = &drift->schedule->ops[op];
    for (int slot = 0; slot < it->lane_count; slot++) {
        int lane = it->lanes[slot], group = lane / RESOURCE_COUNT;
        const struct lane *order = &drift->schedule->lanes[lane];
        if (drift->next[lane] != drift->finished[lane]) return false; /* busy */
        if (drift->next[lane] == order->count || order->ops[drift->next[lane]] != op) return false;
        for (int resource = 0; resource < RESOURCE_COUNT; resource++)
            if (drift->finished[lane_of(group, (enum resource)resource)] <
                drift->programs[group].before[op][resource])
                return false;
        const struct list *waits = &drift->programs[group].waits;
        for (int i = waits->first[op]; i < waits->first[op + 1]; i++)
            if (!drift->done[waits->items[i]]) return false;
    }
    return true;
}

static void account(struct drift *drift, int op, bool takes) {
    for (int group = 0; group < drift->schedule->group_count; group++) {
        const struct program *program = &drift->programs[group];
        const struct list *list = takes ? &program->takes : &program->frees;
        for (int i = list->first[op]; i < list->first[op + 1]; i++)
            drift->now[group] += (takes ? 1 : -1) * drift->schedule->activations[list->items[i]].bytes;
        if (drift->now[group] > drift->peak[group]) drift->peak[group] = drift->now[group];
    }
}

static void start(struct drift *drift, int op) {
    const struct operation *it = &drift->schedule->ops[op];
    for (int slot = 0; slot < it->lane_count; slot++) drift->next[it->lanes[slot]]++;
    drift->open[drift->open_count++] = op;
    account(drift, op, true);
}

static void end(struct drift *drift, int which) {
    int op = drift->open[which];
    const struct operation *it = &drift->schedule->ops[op];
    account(drift, op, false);
    drift->open[which] = drift->open[--drift->open_count];
    drift->done[op] = true;
    for (int slot = 0; slot < it->lane_count; slot++) drift->finished[it->lanes[slot]]++;
}

/* Starts and ends operations in a random order until nothing moves; returns how many were done. */
static int drift_through(struct drift *drift, struct rng *rng) {
    const struct schedule *schedule = drift->schedule;
    int *ready = must_alloc((size_t)schedule->lane_count * sizeof *ready), done = 0;
    for (;;) {
        int count = 0;
        for (int lane = 0; lane < schedule->lane_count; lane++) {
            const struct lane *order = &schedule->lanes[lane];
            int op = drift->next[lane] < order->count ? order->ops[drift->next[lane]] : -1;
            if (op >= 0 && schedule->ops[op].lanes[0] == lane && may_start(drift, op)) ready[count++] = op;
        }
        if (!count && !drift->open_count) break;
        int choice = rng_below(rng, count + drift->open_count);
        if (choice < count) {
            start(drift, ready[choice]);
        } else {
            end(drift, choice - count);
            done++;
        }
    }
    free(ready);
    return done;
}

static void check_drift(const struct schedule *schedule, const struct timeline *planned, struct rng *rng,
                        bool zeros, const char *text) {
    struct arena *arena = arena_new();
    size_t groups = (size_t)schedule->group_count, lanes = (size_t)schedule->lane_count;
    struct drift drift = {.schedule = schedule,
                          .programs = arena_alloc(arena, groups * sizeof(struct program)),
                          .next = arena_alloc(arena, lanes * sizeof(int)),
                          .finished = arena_alloc(arena, lanes * sizeof(int)),
                          .done = arena_alloc(arena, (size_t)schedule->op_count),
                          .open = arena_alloc(arena, lanes * sizeof(int)),
                          .now = arena_alloc(arena, groups * sizeof(double)),
                          .peak = arena_alloc(arena, groups * sizeof(double))};
    double *planned_peak = arena_alloc(arena, groups * sizeof *planned_peak);
    schedule_memory_peaks(schedule, planned, planned_peak);
    for (size_t g = 0; g < groups; g++) drift.programs[g] = program_new(arena, schedule, planned, (int)g);
    int done = drift_through(&drift, rng);
    if (done != schedule->op_count)
        fail_msg("only %d of %d operations ran: %s", done, schedule->op_count, text);
    for (size_t g = 0; g < groups; g++) {
        double allowed = planned_peak[g] - schedule->groups[g].static_bytes;
        if (!zeros && drift.peak[g] > allowed * (1 + 1e-9) + 1e-6)
            fail_msg("%s held %g bytes, planned %g: %s", schedule->groups[g].name, drift.peak[g], allowed,
                     text);
        assert_true(fabs(drift.now[g]) < 1e-6);
    }
    arena_free(arena);
}

static void drifting_lanes_keep_the_plan(void **state) {
    (void)state;
    static const char *const systems[] = {"megatron", "disagmoe"};
    struct rng rng = rng_seed(20);
    for (int i = 0; i < sampled(400); i++) {
        const char *system = systems[i % 2];
        bool zeros = i % 5 == 0;
        char *text = random_manifest(&rng, system, zeros);
        struct experiment experiment;
        struct errors errors = {0};
        struct plan plan;
        bool feasible;
        if (!experiment_read_text(text, "test.json", &experiment, &errors)) {
            errors_print(&errors, stderr);
            fail_msg("%s", text);
        }
        if (tune_point(system_named(system), &experiment.points[0], &plan, &feasible, &errors)) {
            struct schedule *schedule = system_named(system)->build(&plan);
            struct timeline planned = {0};
            assert_true(schedule_arrange(schedule, &planned));
            for (int k = 0; k < 3; k++) check_drift(schedule, &planned, &rng, zeros, text);
            timeline_free(&planned);
            schedule_free(schedule);
        }
        errors_free(&errors);
        experiment_free(&experiment);
        free(text);
    }
}

/* ---- the pool ---------------------------------------------------------------------------------------- */

/* Buffers keep what is written into them, never overlap, and all room comes back. */
static void pool_holds_what_it_is_given(void **state) {
    (void)state;
    enum { MOST = 40 };
    struct rng rng = rng_seed(3);
    struct pool *pool = pool_new(20000);
    unsigned char *buffers[MOST] = {0};
    size_t sizes[MOST], now = 0, peak = 0;
    for (int step = 0; step < 20000; step++) {
        int i = rng_below(&rng, MOST);
        if (buffers[i]) {
            for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(buffers[i][k], i);
            pool_give(pool, buffers[i]);
            now -= sizes[i];
            buffers[i] = NULL;
            continue;
        }
        sizes[i] = 1 + (size_t)rng_below(&rng, 2000);
        buffers[i] = pool_take(pool, sizes[i]);
        assert_int_equal((uintptr_t)buffers[i] % 64, 0);
        memset(buffers[i], i, sizes[i]);
        now += sizes[i];
        if (now > peak) peak = now;
        struct pool_use use = pool_use(pool);
        assert_int_equal(use.now, now);
        assert_int_equal(use.peak, peak);
    }
    for (int i = 0; i < MOST; i++) pool_give(pool, buffers[i]);
    assert_int_equal(pool_use(pool).now, 0);
    assert_true(pool_use(pool).overflow > 0); /* 40 buffers of up to 2,000 bytes do not fit */
    size_t overflow = pool_use(pool).overflow;
    pool_give(pool, pool_take(pool, 20000)); /* the region is whole again */
    assert_int_equal(pool_use(pool).overflow, overflow);
    pool_free(pool);
}

/* ---- comparing gradients ----------------------------------------------------------------------------- */

/* A NaN is found wherever it stands, on either side, and is not forgotten for the numbers behind it. */
static void differences_keep_nan(void **state) {
    (void)state;
    const floatX expected[] = {1, -4, 2};
    for (int place = 0; place < 3; place++)
        for (int side = 0; side < 2; side++) {
            floatX a[] = {1, -4, 2}, b[] = {1, -4, 2};
            (side ? a : b)[place] = (floatX)NAN;
            assert_true(isnan(relative_difference(a, b, 3, 1e-3)));
        }
    assert_true(relative_difference(expected, expected, 3, 1e-3) == 0);
    assert_true(relative_difference((floatX[]){1, -4, 3}, expected, 3, 1e-3) == 0.25);
    assert_true(relative_difference((floatX[]){1, -4, 3}, expected, 3, 8) == 0.125);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(drifting_lanes_keep_the_plan),
        cmocka_unit_test(pool_holds_what_it_is_given),
        cmocka_unit_test(differences_keep_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
