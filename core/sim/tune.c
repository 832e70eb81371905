/*
The tuner: makes a point's open choices for one system, maximising tokens/s of the whole cluster at the given
batch under the memory limit. space.h says what the choices are, trial.h how one is tried.

1. Explore. Shapes (layout and placement) stand in a queue by a lower bound of their step time: first one that
needs no placement, then, when it comes to the front, the tighter one of the placed shape. The first in the
queue is looked at, with the levers that recompute least and with more and fewer micro-batches under way. What
is seen says how many layer activations are alive at a time; so it can be reckoned which levers fit, in how
many layers, and what they cost; the best guess is tried. This goes on until no bound is below the best
estimate.
2. Refine the shapes with the best estimates: all orders about as deep as the one found, each with the levers
that should fit.
3. Polish: from the best plan on, one choice at a time.
4. Sweep: what is left of a budget of simulated operations goes to everything that no bound rules out, so that
small points are searched to the end.

A list-scheduler's step time jumps about as durations change, and less memory may mean a quicker step by
accident. Trying many orders, and keeping the best, is what makes tuned plans get no slower when a point gets
better (tests/test_tune.c measures by how much they do). Nothing depends on clocks or threads: the same point
gives the same choice everywhere.
*/
#include "sim/sim.h"
#include "sim/trial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SLACK 1.03        /* estimates this far behind the best are given up */
#define FINALISTS 6       /* shapes that are refined */
#define MORE_FINALISTS 24 /* where there is no order to refine, only layers that recompute */
#define WHOLE_TRIALS 6    /* orders of each that are tried in full */
#define BUDGET 6000000    /* operations for polishing and sweeping */
#define FEWEST_STEPS 300  /* that the budget must suffice for, else nothing is swept */

struct shape {
    struct plan plan;
    double bound;    /* seconds per sequence */
    bool settled;    /* the bound is of the placed shape */
    double estimate; /* seconds per sequence of the best plan, by a short step; INFINITY: too slow, or too
                        large */
    struct plan best;
};

struct shapes {
    struct shape *list;
    int count, capacity;
};

struct tuner {
    struct space space;
    struct trials trials;
    struct shapes queue; /* a heap by bound */
    struct shapes explored;
    double estimate; /* the least of all shapes */
    int64_t budget_end;
};

/* ---- shapes ------------------------------------------------------------------------------------------ */

static void add_shape(struct shapes *shapes, struct shape shape) {
    if (shapes->count == shapes->capacity) {
        shapes->capacity = shapes->capacity ? 2 * shapes->capacity : 64;
        shapes->list = must_realloc(shapes->list, (size_t)shapes->capacity * sizeof *shapes->list);
    }
    shapes->list[shapes->count++] = shape;
}

static bool shape_before(const struct shape *a, const struct shape *b) {
    if (a->bound != b->bound) return a->bound < b->bound;
    int parallel = memcmp(&a->plan.parallel, &b->plan.parallel, sizeof a->plan.parallel);
    return parallel ? parallel < 0 : a->plan.placement < b->plan.placement;
}

static void queue_push(struct shapes *queue, struct shape shape) {
    add_shape(queue, shape);
    int at = queue->count - 1;
    while (at > 0 && shape_before(&shape, &queue->list[(at - 1) / 2])) {
        queue->list[at] = queue->list[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue->list[at] = shape;
}

static struct shape queue_pop(struct shapes *queue) {
    struct shape first = queue->list[0], last = queue->list[--queue->count];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= queue->count) break;
        if (child + 1 < queue->count && shape_before(&queue->list[child + 1], &queue->list[child])) child++;
        if (!shape_before(&queue->list[child], &last)) break;
        queue->list[at] = queue->list[child];
        at = child;
    }
    queue->list[at] = last;
    return first;
}

static int by_estimate(const void *a, const void *b) {
    const struct shape *x = a, *y = b;
    if (x->estimate != y->estimate) return x->estimate < y->estimate ? -1 : 1;
    return shape_before(x, y) ? -1 : shape_before(y, x);
}

static struct plan with_levers(const struct plan *shape, struct memory levers) {
    struct plan plan = *shape;
    plan.memory = levers;
    return plan;
}

/* Layers of a stage or group, the fullest one's. */
static int layers_of(const struct plan *plan) {
    int parts = plan->parallel.groups ? plan->parallel.groups : plan->parallel.pp;
    return (plan->point->model->layers + parts - 1) / parts;
}

/* Ahead of placing: the least work of any levers. */
static double outline_of(const struct tuner *tuner, const struct plan *shape) {
    const struct system *system = tuner->space.system;
    struct plan plan = with_levers(shape, space_leanest(&tuner->space, tuner->space.levers[0]));
    return system->outline ? per_sequence(&plan, system->outline(&plan).seconds) : 0;
}

static void list_shapes(struct tuner *tuner, const struct parallel *layouts, int count) {
    const struct space *space = &tuner->space;
    tuner->queue.count = 0;
    for (int i = 0; i < count; i++)
        for (int place = 0; place < (space->placement_open ? 2 : 1); place++) {
            struct errors ignored = {0};
            struct shape shape = {
                .plan = {.point = space->point,
                         .parallel = layouts[i],
                         .order = space->point->order,
                         .placement = space->placement_open ? place : space->point->placement},
                .estimate = INFINITY};
            bool possible = space->system->size(&shape.plan, &ignored);
            errors_free(&ignored);
            if (!possible) continue;
            shape.bound = outline_of(tuner, &shape.plan);
            queue_push(&tuner->queue, shape);
        }
}

/* Places a shape; its bound is then the least of any levers that may fit, in any number of layers: so between
   none and all of them, memory aside, it is that of none. False when nothing can fit. */
static bool settle(struct tuner *tuner, struct shape *shape) {
    const struct space *space = &tuner->space;
    struct errors ignored = {0};
    bool settled = !space->system->settle || space->system->settle(&shape->plan, &ignored);
    errors_free(&ignored);
    shape->settled = true;
    double least = INFINITY;
    bool fits = false;
    for (int i = 0; settled && i < space->lever_count; i++) {
        struct plan plan = with_levers(&shape->plan, space->levers[i]);
        struct bound bound = known_of(&tuner->trials, &plan)->bound;
        fits = fits || bound.bytes <= space->usable;
        least = fmin(least, per_sequence(&plan, bound.busy));
    }
    shape->bound = fmax(shape->bound, least);
    return fits;
}

/* ---- levers by what was seen with others ------------------------------------------------------------- */

/* What was seen with one order and the levers that recompute least. */
struct sight {
    struct order order;
    double seconds;      /* per sequence */
    double *activations; /* (groups) */
};

/* The plan that should be quickest of a sight, and how quick it should be. */
struct guess {
    struct plan plan;
    double seconds;
};

/* The part of the layers that must recompute so that activations fit which were seen with `base` in every
   layer: they grow as what a micro-batch keeps. Above 1: all are too few. */
static double part_that_fits(const struct tuner *tuner, const struct known *base, const struct known *levers,
                             const double *activations) {
    const double *lean = lean_bytes(&tuner->trials, levers);
    double part = 0;
    for (int g = 0; g < levers->groups; g++) {
        double under_way = (activations[g] - base->backward[g]) / base->kept[g];
        double left = tuner->space.usable - lean[g] - levers->backward[g];
        double none = under_way * base->kept[g], all = under_way * levers->kept[g];
        if (under_way <= 0 || none <= left) continue;
        part = fmax(part, all < none ? (none - left) / (none - all) : INFINITY);
    }
    return part;
}

static struct guess best_guess(struct tuner *tuner, const struct plan *shape, const struct sight *sight) {
    const struct space *space = &tuner->space;
    struct guess best = {.seconds = INFINITY};
    struct plan lightest = with_levers(shape, space->levers[0]);
    const struct known *base = known_of(&tuner->trials, &lightest);
    int layers = layers_of(shape);
    for (int i = 0; i < space->lever_count; i++) {
        struct plan plan = with_levers(shape, space->levers[i]);
        const struct known *known = known_of(&tuner->trials, &plan);
        double part = part_that_fits(tuner, base, known, sight->activations);
        bool open = space->layers_open && recomputes(plan.memory);
        if (part > 1 || (!open && i == 0 && part > 0)) continue;
        int recomputing = part > 0 ? (int)ceil(part * layers - 1e-9) : 1;
        double work = known->bound.busy / base->bound.busy;
        if (open) work = 1 + (work - 1) * recomputing / layers;
        double seconds = sight->seconds * work;
        if (seconds >= best.seconds) continue;
        if (open && recomputing < layers) plan.memory.recompute.layers = recomputing;
        plan.order = sight->order;
        best = (struct guess){plan, seconds};
    }
    return best;
}

/* Sees a shape under one order; false when that is too slow to matter. */
static bool look(struct tuner *tuner, const struct plan *shape, struct order order, struct sight *sight) {
    struct plan plan = with_levers(shape, tuner->space.levers[0]);
    plan.order = sight->order = order;
    sight->seconds = try_short(&tuner->trials, &plan, SLACK * tuner->estimate);
    if (sight->seconds == INFINITY) return false;
    int groups = known_of(&tuner->trials, &plan)->groups;
    sight->activations = must_realloc(sight->activations, (size_t)groups * sizeof(double));
    memcpy(sight->activations, tuner->trials.activations, (size_t)groups * sizeof(double));
    return true;
}

/* Tries what a sight promises until it holds: the estimate of what fits, INFINITY when none is below `limit`.
   Changes the sight's activations by what it learns. */
static double follow(struct tuner *tuner, const struct plan *shape, struct sight *sight, double limit,
                     struct plan *found) {
    struct trials *trials = &tuner->trials;
    for (int round = 0; round < 4; round++) {
        struct guess guess = best_guess(tuner, shape, sight);
        if (guess.seconds >= limit) return INFINITY;
        double seconds = try_short(trials, &guess.plan, limit);
        if (seconds == INFINITY) return INFINITY;
        double quickest = choose_state(trials, &guess.plan, NULL, &guess.plan.memory);
        double end = choose_state(trials, &guess.plan, trials->activations, &guess.plan.memory);
        if (end < INFINITY) {
            *found = guess.plan;
            return seconds + per_sequence(&guess.plan, end - quickest);
        }
        double load = load_of(trials, &guess.plan);
        int groups = known_of(trials, &guess.plan)->groups;
        for (int g = 0; g < groups; g++) sight->activations[g] *= load * 1.001;
    }
    return INFINITY;
}

/* ---- exploring --------------------------------------------------------------------------------------- */

/* Micro-batches under way at which a shape is looked at: with the most there is least waiting, and when that
   is too slow nothing else need be tried. */
static const int under_way[] = {24, 12, 8, 6, 5, 4, 3, 2, 1};

static bool explore_order(struct tuner *tuner, struct shape *shape, struct order order, struct sight *sight) {
    struct plan found;
    if (!look(tuner, &shape->plan, order, sight)) return false;
    double limit = fmin(shape->estimate, SLACK * tuner->estimate);
    double estimate = follow(tuner, &shape->plan, sight, limit, &found);
    if (estimate >= shape->estimate) return true;
    shape->estimate = estimate;
    shape->best = found;
    tuner->estimate = fmin(tuner->estimate, estimate);
    return true;
}

static void explore(struct tuner *tuner, struct shape *shape) {
    struct sight sight = {0};
    int micro_batches = shape->plan.micro_batches;
    bool open = tuner->space.order_open;
    for (size_t i = 0; i < (open ? COUNT(under_way) : 1); i++) {
        if (i && under_way[i] >= micro_batches) continue;
        int waves = under_way[i] < micro_batches ? under_way[i] : micro_batches;
        bool matters = false;
        for (int patient = 0; patient < (tuner->space.patient_open ? 2 : 1); patient++)
            matters |= explore_order(tuner, shape,
                                     space_order(&tuner->space, 1, waves, PREFER_FORWARD, patient), &sight);
        if (!matters) break;
    }
    free(sight.activations);
}

static void explore_shapes(struct tuner *tuner) {
    while (tuner->queue.count) {
        struct shape shape = queue_pop(&tuner->queue);
        if (shape.bound >= tuner->estimate) {
            queue_push(&tuner->queue, shape);
            return;
        }
        memo_trim(&tuner->trials);
        if (!shape.settled) {
            if (settle(tuner, &shape)) queue_push(&tuner->queue, shape);
            continue;
        }
        explore(tuner, &shape);
        add_shape(&tuner->explored, shape);
    }
}

/* ---- refining ---------------------------------------------------------------------------------------- */

/* Tries a plan, then fewer layers that recompute until it no longer fits, or more until it does. */
static void try_layers(struct tuner *tuner, struct plan plan) {
    int all = layers_of(&plan), step = 0;
    double load = try_whole(&tuner->trials, plan);
    if (!tuner->space.layers_open || !recomputes(plan.memory)) return;
    for (int round = 0; round < 6; round++) {
        int layers = plan.memory.recompute.layers ? plan.memory.recompute.layers : all;
        int next = load > 0 ? 1 : -1;
        if ((step && next != step) || layers + next > all || layers + next < 1) return;
        step = next;
        plan.memory.recompute.layers = layers + step == all ? 0 : layers + step;
        load = try_whole(&tuner->trials, plan);
    }
}

static int by_seconds(const void *a, const void *b) {
    const struct guess *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return memcmp(&x->plan.order, &y->plan.order, sizeof x->plan.order);
}

struct guesses {
    struct guess *list;
    int count;
};

static void guess_order(struct tuner *tuner, const struct plan *shape, struct order order,
                        struct sight *sight, struct guesses *guesses) {
    if (!look(tuner, shape, order, sight)) return;
    struct guess guess = best_guess(tuner, shape, sight);
    if (guess.seconds == INFINITY) return;
    guesses->list = must_realloc(guesses->list, (size_t)(guesses->count + 1) * sizeof *guesses->list);
    guesses->list[guesses->count++] = guess;
}

/* More waves than the batch has make no difference. */
static bool waves_matter(int wave, int waves, int micro_batches) {
    return waves == 1 || wave * (waves - 1) < micro_batches;
}

static void guess_all_orders(struct tuner *tuner, const struct shape *shape, struct sight *sight,
                             struct guesses *guesses) {
    int deep = shape->best.order.wave * shape->best.order.waves_in_flight;
    int most = deep + deep / 2 + 2, micro_batches = shape->plan.micro_batches;
    for (int wave = 1; wave <= most && wave <= micro_batches; wave++)
        for (int waves = 1; wave * waves <= most; waves++) {
            if (wave * waves < deep / 2 || !waves_matter(wave, waves, micro_batches)) continue;
            for (int policy = 0; policy < POLICIES; policy++) {
                /* Waves of one micro-batch: the older one's backward passes come first either way. */
                if (wave == 1 && policy / 2 == PREFER_WAVE) continue;
                guess_order(tuner, &shape->plan, space_policy(&tuner->space, wave, waves, policy), sight,
                            guesses);
            }
        }
}

static void refine(struct tuner *tuner, const struct shape *shape) {
    struct sight sight = {0};
    struct guesses guesses = {0};
    guess_all_orders(tuner, shape, &sight, &guesses);
    if (guesses.count) qsort(guesses.list, (size_t)guesses.count, sizeof *guesses.list, by_seconds);
    try_layers(tuner, shape->best);
    for (int i = 0; i < guesses.count && i < WHOLE_TRIALS; i++) try_layers(tuner, guesses.list[i].plan);
    free(guesses.list);
    free(sight.activations);
}

static void refine_shapes(struct tuner *tuner) {
    struct shapes *explored = &tuner->explored;
    int finalists = tuner->space.order_open ? FINALISTS : MORE_FINALISTS;
    if (explored->count) qsort(explored->list, (size_t)explored->count, sizeof *explored->list, by_estimate);
    for (int i = 0; i < explored->count && i < finalists; i++) {
        if (explored->list[i].estimate == INFINITY) return;
        memo_trim(&tuner->trials);
        if (tuner->space.order_open)
            refine(tuner, &explored->list[i]);
        else
            try_layers(tuner, explored->list[i].best);
    }
}

/* ---- polishing and sweeping -------------------------------------------------------------------------- */

static bool has_budget(const struct tuner *tuner) {
    return tuner->trials.operations < tuner->budget_end;
}

/* Orders with `least` to `most` micro-batches under way; the plan's own where orders are not open. */
static void try_orders(struct tuner *tuner, struct plan plan, int least, int most) {
    const struct space *space = &tuner->space;
    if (!space->order_open) try_if_promising(&tuner->trials, plan);
    if (most > plan.micro_batches) most = plan.micro_batches;
    for (int wave = 1; space->order_open && wave <= most; wave++)
        for (int waves = 1; wave * waves < most + wave && has_budget(tuner); waves++) {
            if (wave * waves < least) continue;
            for (int policy = 0; policy < POLICIES; policy++) {
                plan.order = space_policy(space, wave, waves, policy);
                try_if_promising(&tuner->trials, plan);
            }
        }
}

/* All levers, in all numbers of layers or in those next to the plan's; the plan's order, or any (most > 0).
 */
static void try_levers(struct tuner *tuner, struct plan plan, bool all_layers, int most) {
    int layers = layers_of(&plan), here = plan.memory.recompute.layers;
    for (int i = 0; i < tuner->space.lever_count && has_budget(tuner); i++) {
        struct memory levers = tuner->space.levers[i];
        bool open = tuner->space.layers_open && recomputes(levers);
        for (int n = 0; n < (open ? layers : 1); n++) {
            if (!all_layers && n && abs(n - here) > 1) continue;
            plan.memory = levers;
            if (open) plan.memory.recompute.layers = n;
            if (most)
                try_orders(tuner, plan, 1, most);
            else
                try_if_promising(&tuner->trials, plan);
        }
    }
}

/* One choice at a time, the others as in the best plan, until none of them helps. */
static void polish(struct tuner *tuner) {
    struct trials *trials = &tuner->trials;
    for (double before = INFINITY; trials->best < before && has_budget(tuner);) {
        before = trials->best;
        memo_trim(trials);
        int deep = trials->best_plan.order.wave * trials->best_plan.order.waves_in_flight;
        try_levers(tuner, trials->best_plan, layers_of(&trials->best_plan) <= 8, 0);
        try_orders(tuner, trials->best_plan, deep * 3 / 4, deep + deep / 4 + 1);
        for (int i = 0; i < tuner->explored.count && i < 16 && has_budget(tuner); i++) {
            struct plan plan = with_levers(&tuner->explored.list[i].plan, trials->best_plan.memory);
            plan.order = trials->best_plan.order;
            try_if_promising(trials, plan);
        }
    }
}

static void sweep_shape(struct tuner *tuner, const struct shape *shape) {
    memo_trim(&tuner->trials);
    if (shape->bound < tuner->trials.best) try_levers(tuner, shape->plan, true, shape->plan.micro_batches);
}

/* Explored shapes, then those whose bound no estimate was below. */
static void sweep(struct tuner *tuner) {
    for (int i = 0; i < tuner->explored.count && has_budget(tuner); i++)
        sweep_shape(tuner, &tuner->explored.list[i]);
    while (tuner->queue.count && has_budget(tuner)) {
        struct shape shape = queue_pop(&tuner->queue);
        if (shape.bound >= tuner->trials.best) return;
        if (shape.settled || settle(tuner, &shape)) sweep_shape(tuner, &shape);
    }
}

/* Operations of a whole step of the best plan, or of any. */
static int64_t step_operations(const struct tuner *tuner) {
    const struct shapes *explored = &tuner->explored;
    const struct plan *plan = explored->count ? &explored->list[0].plan : NULL;
    if (tuner->trials.best < INFINITY) plan = &tuner->trials.best_plan;
    return plan ? (int64_t)plan->micro_batches * plan->point->model->layers * 10 : 0;
}

static void search(struct tuner *tuner) {
    tuner->estimate = INFINITY;
    tuner->explored.count = 0;
    explore_shapes(tuner);
    refine_shapes(tuner);
    tuner->budget_end = tuner->trials.operations + BUDGET;
    polish(tuner);
    if (step_operations(tuner) * FEWEST_STEPS < BUDGET) sweep(tuner);
}

/* ---- the point --------------------------------------------------------------------------------------- */

/* Each given part for itself, the others at their least: so an error names the part that is impossible. A
   searched layout that is impossible is passed over. */
static bool report_impossible(const struct space *space, int layout_count, struct errors *errors) {
    int before = errors->count;
    const struct point *point = space->point;
    const struct system *system = space->system;
    struct plan plan = {.point = point, .parallel = point->parallel, .placement = point->placement};
    if (space->placement_open) plan.placement = PLACEMENT_MIXED; /* takes whatever there are GPUs for */
    if (system->size(&plan, errors) && system->is_whole(&point->parallel) && system->settle)
        system->settle(&plan, errors);
    if (layout_count == 0 && errors->count == before)
        errors_add(errors, NULL, "parallel",
                   "no layout of %s with what is given fits the cluster's %d GPUs and the model's %d layers",
                   system->name, cluster_gpus(point->cluster), point->model->layers);
    if (point->memory.zero > system->zero_max)
        errors_add(errors, NULL, "memory.zero", "found %d; %s allows at most %d", point->memory.zero,
                   system->name, system->zero_max);
    return errors->count > before;
}

bool tune_point(const struct system *system, const struct point *point, struct plan *plan, bool *feasible,
                struct errors *errors) {
    struct tuner tuner = {.space = space_of(system, point)};
    int count = system->layouts(point, NULL, 0);
    struct parallel *layouts = must_alloc((size_t)(count + 1) * sizeof *layouts);
    system->layouts(point, layouts, count);
    tuner.trials = trials_new(&tuner.space);
    bool possible = !report_impossible(&tuner.space, count, errors);
    if (possible) {
        list_shapes(&tuner, layouts, count);
        search(&tuner);
        if (tuner.trials.best == INFINITY && !tuner.space.searches_memory) {
            tuner.space.usable = INFINITY; /* what is given runs as given */
            list_shapes(&tuner, layouts, count);
            search(&tuner);
        }
        *feasible = tuner.trials.best < INFINITY;
        *plan = *feasible ? tuner.trials.best_plan : (struct plan){.point = point};
    }
    trials_free(&tuner.trials);
    free(tuner.queue.list);
    free(tuner.explored.list);
    free(layouts);
    return possible;
}
