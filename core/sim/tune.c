/*
The tuner: makes a point's open choices for one system, maximising tokens/s of the whole cluster at the given
batch under the memory limit.

1. Every candidate (layout, placement, recompute, expert input) gets the system's lower bounds of step time
and memory; what cannot fit even with the leanest state (BF16 gradients and moments, ZeRO, offload) is
dropped.
2. In the order of their time bound, candidates are simulated, where the order is open under one typical
policy with fewer and fewer micro-batches under way; those whose bound is not below the best step are passed
over. Then the order of the few best is refined over waves and preferences.
3. State levers (gradients, moments, ZeRO, offload) hardly touch the order of the pipeline: for each simulated
order the one is taken that fits beside the activations and ends the step soonest; of equals the least
intrusive. The candidate is then simulated with it, so that the reported figures are of the reported plan.
Nothing depends on clocks or threads: the same point gives the same choice everywhere.
*/
#include "sim/sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LAYOUTS 4096
#define MAX_STATES 64
#define SLACK 1.05 /* the first phase follows candidates this far behind the best */
#define REFINED 12 /* candidates whose order is refined */

struct candidate {
    struct plan plan;
    struct bound bound;
    double seconds; /* per sequence, the best found in the first phase */
};

struct tuner {
    const struct system *system;
    const struct point *point;
    double usable;
    struct memory states[MAX_STATES]; /* gradients, moments, ZeRO, offload: the least intrusive first */
    int state_count;
    struct candidate *candidates;
    int candidate_count;
    struct need *needs; /* room for a plan's groups */
    struct plan best_plan;
    double best;   /* seconds for the sequences of a step, so per sequence */
    double slack;  /* plans slower than slack × best are given up */
    double latest; /* the best of the candidate under way, seconds per sequence */
    bool found;
};

/* ---- the space --------------------------------------------------------------------------------------- */

static void list_states(struct tuner *tuner) {
    struct memory given = tuner->point->memory;
    if (!tuner->point->auto_memory) {
        tuner->states[tuner->state_count++] = given;
        return;
    }
    for (int offload = 0; offload < 2; offload++)
        for (int moments = 0; moments < 2; moments++)
            for (int grads = 0; grads < 2; grads++)
                for (int zero = 0; zero <= tuner->system->zero_max; zero++)
                    tuner->states[tuner->state_count++] =
                        (struct memory){.grads = grads, .moments = moments, .zero = zero, .offload = offload};
}

static struct memory with_state(struct memory levers, struct memory state) {
    state.recompute = levers.recompute;
    state.expert_input = levers.expert_input;
    return state;
}

static double per_sequence(const struct plan *plan, double seconds) {
    return seconds / plan->sequences;
}

static void add_candidate(struct tuner *tuner, struct plan plan) {
    struct errors ignored = {0};
    bool possible = tuner->system->size(&plan, &ignored);
    errors_free(&ignored);
    if (!possible) return;
    struct plan leanest = plan;
    leanest.memory = with_state(plan.memory, tuner->states[tuner->state_count - 1]);
    struct bound bound = tuner->system->bound(&leanest);
    if (bound.bytes > tuner->usable && tuner->point->auto_memory) return;
    bound.seconds = per_sequence(&plan, bound.seconds);
    tuner->candidates =
        must_realloc(tuner->candidates, (size_t)(tuner->candidate_count + 1) * sizeof *tuner->candidates);
    tuner->candidates[tuner->candidate_count++] = (struct candidate){plan, bound, INFINITY};
}

static void list_candidates(struct tuner *tuner, const struct parallel *layouts, int layout_count) {
    const struct point *point = tuner->point;
    bool memory = point->auto_memory, placement = point->auto_placement && tuner->system->uses_placement;
    for (int i = 0; i < layout_count; i++)
        for (int place = 0; place < (placement ? 2 : 1); place++)
            for (int recompute = 0; recompute < (memory ? 3 : 1); recompute++)
                for (int input = 0; input < (memory && recompute != RECOMPUTE_FULL ? 2 : 1); input++) {
                    struct plan plan = {.point = point, .parallel = layouts[i], .order = point->order};
                    plan.memory = memory ? (struct memory){.recompute = recompute, .expert_input = input}
                                         : point->memory;
                    plan.placement = placement ? place : point->placement;
                    add_candidate(tuner, plan);
                }
}

static int by_bound(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->bound.seconds != y->bound.seconds) return x->bound.seconds < y->bound.seconds ? -1 : 1;
    return memcmp(&x->plan.parallel, &y->plan.parallel, sizeof x->plan.parallel);
}

/* Micro-batches under way, most first: memory decides how many there can be, and fewer starve the ring. */
static const int in_flight_choices[] = {64, 48, 32, 24, 16, 12, 8, 4, 2, 1};

static bool order_is_open(const struct tuner *tuner) {
    return tuner->system->searches_order && tuner->point->auto_order;
}

/* More under way than the batch has makes no difference: only the first such number is tried. */
static bool in_flight_is_useful(const struct plan *plan, size_t choice) {
    return choice + 1 == COUNT(in_flight_choices) || in_flight_choices[choice + 1] < plan->micro_batches;
}

/* ---- trying ------------------------------------------------------------------------------------------ */

/* The state that ends the step soonest among those that fit beside each group's activations (NULL: all fit);
   false when none does. The least intrusive of equals. */
static bool choose_state(const struct tuner *tuner, const struct plan *plan, const double *activations,
                         struct memory *chosen) {
    struct need *needs = tuner->needs;
    double soonest = INFINITY;
    for (int i = 0; i < tuner->state_count; i++) {
        struct plan tried = *plan;
        tried.memory = with_state(plan->memory, tuner->states[i]);
        int groups = tuner->system->needs(&tried, needs);
        double bytes = 0, seconds = 0;
        for (int g = 0; g < groups; g++) {
            if (activations) bytes = fmax(bytes, needs[g].static_bytes + activations[g]);
            seconds =
                fmax(seconds, needs[g].end.grad_sync + needs[g].end.optimizer + needs[g].end.param_gather);
        }
        /* A given memory runs as given, whether it fits or not. */
        if (tuner->point->auto_memory && bytes > tuner->usable) continue;
        if (seconds < soonest) {
            soonest = seconds;
            *chosen = tried.memory;
        }
    }
    return soonest < INFINITY;
}

/* Peak activations of each group, static bytes left out. */
static double *activation_peaks(const struct schedule *schedule, const struct timeline *timeline) {
    double *peaks = must_alloc((size_t)schedule->group_count * sizeof *peaks);
    schedule_memory_peaks(schedule, timeline, peaks);
    for (int g = 0; g < schedule->group_count; g++) peaks[g] -= schedule->groups[g].static_bytes;
    return peaks;
}

/* How far the activations are above what the leanest state leaves, at the worst group: above 1 nothing fits.
 */
static double overflow(const struct tuner *tuner, const struct plan *plan, const double *activations) {
    struct need *needs = tuner->needs;
    struct plan leanest = *plan;
    leanest.memory = with_state(plan->memory, tuner->states[tuner->state_count - 1]);
    int groups = tuner->system->needs(&leanest, needs);
    double worst = 0;
    for (int g = 0; g < groups; g++)
        worst = fmax(worst, activations[g] / fmax(1, tuner->usable - needs[g].static_bytes));
    return worst;
}

/* Simulates a plan and keeps it when it is the best so far. Returns 0, or the overflow when it does not fit.
 */
static double try_plan(struct tuner *tuner, struct plan plan) {
    struct schedule *schedule;
    struct timeline timeline = {0};
    struct result result;
    double limit = tuner->found ? tuner->slack * tuner->best * plan.sequences : INFINITY;
    if (!simulate_before(tuner->system, &plan, limit, &result, &schedule, &timeline)) return 0;
    double *activations = activation_peaks(schedule, &timeline);
    struct memory chosen = plan.memory;
    double over = 0;
    bool fits = choose_state(tuner, &plan, activations, &chosen);
    if (!fits) over = overflow(tuner, &plan, activations);
    free(activations);
    timeline_free(&timeline);
    schedule_free(schedule);
    if (!fits) return over;
    if (memcmp(&chosen, &plan.memory, sizeof chosen) != 0) {
        plan.memory = chosen;
        simulate_plan(tuner->system, &plan, &result, NULL, NULL);
        if (result.oom && tuner->point->auto_memory) return 1;
    }
    double seconds = per_sequence(&plan, result.step_time);
    tuner->latest = fmin(tuner->latest, seconds);
    if (tuner->found && seconds >= tuner->best) return 0;
    tuner->found = true;
    tuner->best = seconds;
    tuner->best_plan = plan;
    return 0;
}

/* Tries fewer and fewer micro-batches under way. Activations grow about in proportion to them, so a number
   that is far too large for the memory rules out the next ones without simulating them. */
static void try_in_flight(struct tuner *tuner, struct plan plan, int wave, int prefer) {
    double most = INFINITY;
    for (size_t i = 0; i < COUNT(in_flight_choices); i++) {
        int in_flight = in_flight_choices[i];
        if (in_flight > most || !in_flight_is_useful(&plan, i)) continue;
        if (wave > in_flight || in_flight % wave) continue;
        plan.order = (struct order){wave, in_flight / wave, prefer};
        double over = try_plan(tuner, plan);
        if (over > 0) most = 1.2 * in_flight / over;
    }
}

/* The policy's other parameters, for one candidate's layout and levers. */
static void refine_order(struct tuner *tuner, struct plan plan) {
    static const int waves[] = {1, 2, 4, 8, 16, 24, 32, 64};
    choose_state(tuner, &plan, NULL, &plan.memory);
    for (size_t i = 0; i < COUNT(waves); i++)
        for (int prefer = PREFER_BACKWARD; prefer <= PREFER_WAVE; prefer++)
            try_in_flight(tuner, plan, waves[i], prefer);
}

static int by_seconds(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    return x->seconds != y->seconds ? (x->seconds < y->seconds ? -1 : 1) : by_bound(a, b);
}

/* First phase: every candidate that may win, in the order of its bound, under a typical policy. */
static void try_candidates(struct tuner *tuner, bool open) {
    for (int i = 0; i < tuner->candidate_count; i++) {
        struct candidate *candidate = &tuner->candidates[i];
        struct plan plan = candidate->plan;
        if (tuner->found && candidate->bound.seconds >= tuner->best) continue;
        /* The quickest state first: what cannot win with it cannot win at all. */
        choose_state(tuner, &plan, NULL, &plan.memory);
        tuner->latest = INFINITY;
        if (open)
            try_in_flight(tuner, plan, 4, PREFER_BACKWARD);
        else
            try_plan(tuner, plan);
        candidate->seconds = tuner->latest;
    }
}

static void search(struct tuner *tuner) {
    bool open = order_is_open(tuner);
    qsort(tuner->candidates, (size_t)tuner->candidate_count, sizeof *tuner->candidates, by_bound);
    if (!open && tuner->candidate_count == 1 && tuner->state_count == 1) { /* nothing to choose */
        tuner->best_plan = tuner->candidates[0].plan;
        tuner->found = true;
        return;
    }
    tuner->slack = open ? SLACK : 1;
    try_candidates(tuner, open);
    if (!open) return;
    qsort(tuner->candidates, (size_t)tuner->candidate_count, sizeof *tuner->candidates, by_seconds);
    tuner->slack = 1;
    for (int i = 0; i < tuner->candidate_count && i < REFINED; i++)
        if (tuner->candidates[i].seconds < INFINITY || !tuner->found)
            refine_order(tuner, tuner->candidates[i].plan);
}

/* ---- the point --------------------------------------------------------------------------------------- */

/* A layout that the point gives whole is reported when it is impossible; a searched one is passed over. */
static bool report_impossible(const struct tuner *tuner, const struct parallel *layouts, int count,
                              struct errors *errors) {
    int before = errors->count;
    if (count == 1) {
        /* Mixed nodes take every layout that the cluster has GPUs for. */
        struct plan plan = {.point = tuner->point,
                            .parallel = layouts[0],
                            .memory = tuner->point->memory,
                            .order = tuner->point->order};
        plan.placement = tuner->point->auto_placement ? PLACEMENT_MIXED : tuner->point->placement;
        tuner->system->size(&plan, errors);
    } else if (count == 0) {
        errors_add(errors, NULL, "parallel",
                   "no layout of %s fits the cluster's %d GPUs and the model's %d layers",
                   tuner->system->name, cluster_gpus(tuner->point->cluster), tuner->point->model->layers);
    }
    if (tuner->point->memory.zero > tuner->system->zero_max)
        errors_add(errors, NULL, "memory.zero", "found %d; %s allows at most %d", tuner->point->memory.zero,
                   tuner->system->name, tuner->system->zero_max);
    return errors->count > before;
}

bool tune_point(const struct system *system, const struct point *point, struct plan *plan, bool *feasible,
                struct errors *errors) {
    struct tuner tuner = {.system = system, .point = point, .usable = usable_memory(point)};
    struct parallel *layouts = must_alloc(MAX_LAYOUTS * sizeof *layouts);
    tuner.needs = must_alloc(MAX_GROUPS * sizeof *tuner.needs);
    int layout_count = system->layouts(point, layouts, MAX_LAYOUTS);
    if (layout_count > MAX_LAYOUTS) layout_count = MAX_LAYOUTS;
    bool possible = !report_impossible(&tuner, layouts, layout_count, errors);
    if (possible) {
        list_states(&tuner);
        list_candidates(&tuner, layouts, layout_count);
        if (tuner.candidate_count) search(&tuner);
        *feasible = tuner.found;
        *plan = tuner.found ? tuner.best_plan : (struct plan){.point = point};
    }
    free(tuner.candidates);
    free(tuner.needs);
    free(layouts);
    return possible;
}
