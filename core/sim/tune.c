/*
The tuner: makes a point's open choices for one system, maximising tokens/s of the whole cluster at the given
batch under the memory limit. space.h says what the choices are, trial.h how one is tried.

1. Explore. Shapes (layout and placement) stand in a queue by what they promise: a lower bound of their step
time that needs no placement; when that comes to the front, the tighter one of the placed shape; then one with
what the memory allows. The first in the queue is looked at, with the levers that recompute least and with
more and fewer micro-batches under way. What is seen says how many layer activations are alive at a time; so
it can be reckoned which levers fit, in how many layers, and what they cost; the best guess is tried. This
goes on until no promise is below the best step.
2. Refine the shapes with the best estimates: a few orders for many of them, all orders about as deep as the
best one for the best of them, each with the levers that should fit.
3. Polish: from the best plan on, one choice at a time.
4. Where a step is small, all other shapes are refined as well, and then everything is tried that no bound
rules out, as far as a budget of simulated operations goes: so small points are searched to the end.

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
#define WIDE_SLACK 1.2    /* before other policies were looked at */
#define FINALISTS 4       /* shapes that are refined */
#define LATE 2            /* that are refined because they are like the best */
#define MORE_FINALISTS 24 /* where there is no order to refine, only layers that recompute */
#define MOST_WAVE 3       /* micro-batches of a wave, while refining */
#define WHOLE_TRIALS 6    /* orders of each that are tried in full */
#define NEAR_TRIALS 3     /* and with more and fewer layers that recompute */
/* Operations that may be simulated behind refining: for polishing; and for all else where they suffice for
   that many steps. */
#define POLISHING 4000000
#define SWEEPING 24000000L
#define FEWEST_STEPS 3000

struct shape {
    struct plan plan;
    double bound;   /* seconds per sequence: no plan of it is quicker */
    double promise; /* the same, with what memory allows reckoned in; by it the queue is ordered */
    enum stage { LISTED, SETTLED, RECKONED } stage; /* of what bound and promise know */
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
    if (a->promise != b->promise) return a->promise < b->promise;
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

/* Between what was found of a shape and what it promises: a better order may come near that. */
static double prospect(const struct shape *shape) {
    return shape->estimate + shape->promise;
}

static int by_prospect(const void *a, const void *b) {
    const struct shape *x = a, *y = b;
    if (prospect(x) != prospect(y)) return prospect(x) < prospect(y) ? -1 : 1;
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
            shape.bound = shape.promise = outline_of(tuner, &shape.plan);
            queue_push(&tuner->queue, shape);
        }
}

/* The least time with some levers in some part of the layers, when work grows and what is kept shrinks in
   proportion to that part: where the one grows past the other. Between the ends that is reckoned, no bound.
 */
static double promise_of(const struct known *none, const struct known *all, bool partly) {
    double work = none->bound.busy, more = all->bound.busy - work;
    double memory = none->bound.memory_seconds, less = memory - all->bound.memory_seconds;
    double end = fmax(all->bound.busy, all->bound.memory_seconds);
    if (!partly || memory == INFINITY || more + less <= 0) return end;
    double part = fmin(1, fmax(0, (memory - work) / (more + less)));
    return fmin(end, fmax(work + part * more, memory - part * less));
}

/* Places a shape. Its bound is then that of the levers that recompute least, memory aside: more of them mean
   more work. */
static bool settle(struct tuner *tuner, struct shape *shape) {
    const struct system *system = tuner->space.system;
    struct errors ignored = {0};
    bool settled = !system->settle || system->settle(&shape->plan, &ignored);
    errors_free(&ignored);
    if (!settled) return false;
    struct plan lightest = with_levers(&shape->plan, tuner->space.levers[0]);
    double busy = known_of(&tuner->trials, &lightest)->bound.busy;
    shape->bound = shape->promise = fmax(shape->bound, per_sequence(&shape->plan, busy));
    return true;
}

/* The promise of the levers that promise most. False when no levers fit. */
static bool reckon(struct tuner *tuner, struct shape *shape) {
    const struct space *space = &tuner->space;
    struct plan lightest = with_levers(&shape->plan, space->levers[0]);
    const struct known *none = known_of(&tuner->trials, &lightest);
    double promise = INFINITY;
    for (int i = 0; i < space->lever_count; i++) {
        struct plan plan = with_levers(&shape->plan, space->levers[i]);
        const struct known *all = known_of(&tuner->trials, &plan);
        if (all->bound.bytes > space->usable) continue;
        promise = fmin(promise, promise_of(none, all, space->layers_open && recomputes(plan.memory)));
    }
    shape->promise = fmax(shape->bound, per_sequence(&shape->plan, promise));
    return promise < INFINITY;
}

/* What is known of a shape grows when it comes to the queue's front. False when nothing of it can fit. */
static bool learn_more(struct tuner *tuner, struct shape *shape) {
    memo_trim(&tuner->trials);
    return shape->stage++ == LISTED ? settle(tuner, shape) : reckon(tuner, shape);
}

/* ---- levers by what was seen with others ------------------------------------------------------------- */

/* What was seen with one order and the levers that recompute least. */
struct sight {
    struct order order;
    double seconds;      /* per sequence */
    double *activations; /* (groups) */
};

/* The plan that should be quickest of a sight, in which state, and how quick it should be. */
struct guess {
    struct plan plan;
    int state;
    double seconds;
};

/* The part of the layers that must recompute so that activations fit beside a state which were seen with
   `base` in every layer: they grow as what a micro-batch keeps. Above 1: all are too few. */
static double part_that_fits(const struct tuner *tuner, const struct known *base, const struct known *levers,
                             const double *activations, int state) {
    const double *static_bytes = static_bytes_of(levers, state);
    double part = 0;
    for (int g = 0; g < levers->groups; g++) {
        double left = tuner->space.usable - static_bytes[g] - levers->backward[g];
        if (base->kept[g] == 0) { /* where all is recomputed nothing grows with what is under way */
            if (left < 0) part = INFINITY;
            continue;
        }
        double under_way = (activations[g] - base->backward[g]) / base->kept[g];
        double none = under_way * base->kept[g], all = under_way * levers->kept[g];
        if (under_way <= 0 || none <= left) continue;
        part = fmax(part, all < none ? (none - left) / (none - all) : INFINITY);
    }
    return part;
}

/* With levers number i in one state; INFINITY seconds where they do not suffice. */
static struct guess guess_in_state(struct tuner *tuner, const struct plan *shape, const struct sight *sight,
                                   int i, int state) {
    const struct space *space = &tuner->space;
    struct plan lightest = with_levers(shape, space->levers[0]), plan = with_levers(shape, space->levers[i]);
    const struct known *base = known_of(&tuner->trials, &lightest);
    const struct known *known = known_of(&tuner->trials, &plan);
    double part = part_that_fits(tuner, base, known, sight->activations, state);
    bool open = space->layers_open && recomputes(plan.memory);
    if (part > 1 || (!open && i == 0 && part > 0)) return (struct guess){.seconds = INFINITY};
    int layers = layers_of(shape), recomputing = part > 0 ? (int)ceil(part * layers - 1e-9) : 1;
    double work = known->bound.busy / base->bound.busy;
    if (open) work = 1 + (work - 1) * recomputing / layers;
    if (open && recomputing < layers) plan.memory.recompute.layers = recomputing;
    plan.order = sight->order;
    double end = known->end[state] - known->soonest;
    return (struct guess){plan, state, sight->seconds * work + per_sequence(&plan, end)};
}

static struct guess guess_levers(struct tuner *tuner, const struct plan *shape, const struct sight *sight,
                                 int i) {
    struct guess best = {.seconds = INFINITY};
    for (int state = 0; state < tuner->space.state_count; state++) {
        struct guess guess = guess_in_state(tuner, shape, sight, i, state);
        if (guess.seconds < best.seconds) best = guess;
    }
    return best;
}

static struct guess best_guess(struct tuner *tuner, const struct plan *shape, const struct sight *sight) {
    struct guess best = {.seconds = INFINITY};
    for (int i = 0; i < tuner->space.lever_count; i++) {
        struct guess guess = guess_levers(tuner, shape, sight, i);
        if (guess.seconds < best.seconds) best = guess;
    }
    return best;
}

/* Sees a shape under one order; false when that is too slow to matter. */
static bool look(struct tuner *tuner, const struct plan *shape, struct order order, double slack,
                 struct sight *sight) {
    struct plan plan = with_levers(shape, tuner->space.levers[0]);
    plan.order = sight->order = order;
    sight->seconds = try_short(&tuner->trials, &plan, slack * tuner->trials.best);
    if (sight->seconds == INFINITY) return false;
    int groups = known_of(&tuner->trials, &plan)->groups;
    sight->activations = must_realloc(sight->activations, (size_t)groups * sizeof(double));
    memcpy(sight->activations, tuner->trials.activations, (size_t)groups * sizeof(double));
    return true;
}

/* The estimate of a guess by a short step, with the quickest state that then fits; INFINITY when none does or
   it is not below `limit`. load: above 1 when it does not fit in the state that was reckoned with, 0 when it
   is too slow in any. */
static double estimate_of(struct tuner *tuner, struct guess *guess, double limit, double *load) {
    struct trials *trials = &tuner->trials;
    struct plan *plan = &guess->plan;
    double seconds = try_short(trials, plan, limit);
    *load = 0;
    if (seconds == INFINITY) return INFINITY;
    double soonest = known_of(trials, plan)->soonest;
    double end = choose_state(trials, plan, trials->activations, &plan->memory);
    *load = load_of(trials, plan, guess->state);
    seconds += per_sequence(plan, end - soonest);
    return seconds < limit ? seconds : INFINITY;
}

/* Keeps a guess whose estimate is below the best. */
static void try_estimate(struct tuner *tuner, struct guess guess, double *best, double *load,
                         struct plan *found) {
    double seconds = estimate_of(tuner, &guess, *best, load);
    if (seconds >= *best) return;
    *best = seconds;
    *found = guess.plan;
}

/* Tries what a sight promises until it holds: the estimate of the best that fits, INFINITY when none is below
   `limit`. Changes the sight's activations by what it learns. */
static double follow(struct tuner *tuner, const struct plan *shape, struct sight *sight, double limit,
                     struct plan *found) {
    double best = limit, load = 2;
    for (int round = 0; round < 4 && load > 1; round++) {
        struct guess guess = best_guess(tuner, shape, sight);
        if (guess.seconds >= best) break;
        try_estimate(tuner, guess, &best, &load, found);
        /* Layers that are all alike may keep a better beat, although they have more to do. */
        if (guess.plan.memory.recompute.layers && tuner->space.layers_open) {
            double ignored;
            guess.plan.memory.recompute.layers = 0;
            try_estimate(tuner, guess, &best, &ignored, found);
        }
        int groups = tuner->space.system->groups(shape);
        for (int g = 0; g < groups; g++) sight->activations[g] *= fmax(1, load * 1.001);
    }
    return best < limit ? best : INFINITY;
}

/* ---- exploring --------------------------------------------------------------------------------------- */

/* Keeps the best plan that a sight leads to. */
static void use_sight(struct tuner *tuner, struct shape *shape, struct sight *sight) {
    struct plan found;
    double limit = fmin(shape->estimate, SLACK * tuner->trials.best);
    double estimate = follow(tuner, &shape->plan, sight, limit, &found);
    if (estimate >= shape->estimate) return;
    /* A short step may flatter: what looks like the best is tried in full. */
    if (estimate < tuner->trials.best) {
        try_whole(&tuner->trials, found);
        estimate = fmax(estimate, tuner->trials.best);
    }
    shape->estimate = estimate;
    shape->best = found;
}

static bool explore_order(struct tuner *tuner, struct shape *shape, struct order order, struct sight *sight) {
    if (!look(tuner, &shape->plan, order, SLACK, sight)) return false;
    use_sight(tuner, shape, sight);
    return true;
}

/* Waves of one micro-batch, `deep` of them under way. */
static struct order plain_order(const struct tuner *tuner, int deep) {
    return space_order(&tuner->space, 1, deep, policy_of(PREFER_FORWARD, true, false));
}

/* The same, justified. This and the next ones: false when that is too slow to matter. */
static bool explore_justified(struct tuner *tuner, struct shape *shape, int deep, struct sight *sight) {
    const struct space *space = &tuner->space;
    struct order order = space_order(space, 1, deep, policy_of(PREFER_FORWARD, true, true));
    return space->justified_open && explore_order(tuner, shape, order, sight);
}

static bool explore_depth(struct tuner *tuner, struct shape *shape, int deep, struct sight *sight) {
    bool matters = explore_order(tuner, shape, plain_order(tuner, deep), sight);
    matters |= explore_justified(tuner, shape, deep, sight);
    return matters;
}

/* Waves of some micro-batches, backward passes first, about `deep` under way. */
static bool explore_waves(struct tuner *tuner, struct shape *shape, int deep, struct sight *sight) {
    bool matters = false;
    for (int wave = 2; wave <= MOST_WAVE && wave <= deep; wave++) {
        int policy = policy_of(PREFER_BACKWARD, true, true);
        struct order order = space_order(&tuner->space, wave, (deep + wave - 1) / wave, policy);
        matters |= explore_order(tuner, shape, order, sight);
    }
    return matters;
}

/* Many under way first: with fewer there is more waiting, so when many are too slow nothing else need be
   looked at. Still more where the memory had room for many. */
static void explore(struct tuner *tuner, struct shape *shape) {
    static const int fewer[] = {8, 6, 5, 4, 3, 2, 1};
    const struct space *space = &tuner->space;
    struct sight sight = {0};
    int micro_batches = shape->plan.micro_batches, many = micro_batches < 12 ? micro_batches : 12;
    bool matters = false;
    if (look(tuner, &shape->plan, plain_order(tuner, many), WIDE_SLACK, &sight)) {
        matters = sight.seconds < SLACK * tuner->trials.best;
        if (matters) use_sight(tuner, shape, &sight);
        matters |= explore_justified(tuner, shape, many, &sight);
        if (space->order_open) matters |= explore_waves(tuner, shape, many, &sight);
    }
    for (size_t i = 0; space->order_open && i < COUNT(fewer) && matters; i++)
        if (fewer[i] < many) matters = explore_depth(tuner, shape, fewer[i], &sight);
    if (shape->best.order.wave * shape->best.order.waves_in_flight == 12 && micro_batches > 12)
        explore_depth(tuner, shape, micro_batches < 24 ? micro_batches : 24, &sight);
    free(sight.activations);
}

/* Other policies about as deep as the best order found, and waves of some more sizes. Backward passes first
   hold less, so that more may be under way. */
static void look_again(struct tuner *tuner, struct shape *shape) {
    const struct space *space = &tuner->space;
    struct sight sight = {0};
    int deep = shape->best.order.wave * shape->best.order.waves_in_flight;
    int micro_batches = shape->plan.micro_batches, backward = policy_of(PREFER_BACKWARD, true, true);
    for (int wave = 2; wave <= MOST_WAVE && wave <= micro_batches; wave++)
        for (int prefer = PREFER_BACKWARD; prefer <= PREFER_FORWARD; prefer++)
            explore_order(tuner, shape,
                          space_order(space, wave, (deep + wave - 1) / wave,
                                      policy_of((enum prefer)prefer, true, true)),
                          &sight);
    explore_order(tuner, shape, space_order(space, 1, deep, policy_of(PREFER_FORWARD, false, false)), &sight);
    for (int half = 2; half <= 4 && deep * half / 2 <= micro_batches; half++)
        explore_order(tuner, shape, space_order(space, 1, deep * half / 2, backward), &sight);
    free(sight.activations);
}

static void explore_shapes(struct tuner *tuner) {
    while (tuner->queue.count) {
        struct shape shape = queue_pop(&tuner->queue);
        if (shape.promise >= tuner->trials.best) {
            queue_push(&tuner->queue, shape);
            return;
        }
        if (shape.stage != RECKONED) {
            if (learn_more(tuner, &shape)) queue_push(&tuner->queue, shape);
            continue;
        }
        explore(tuner, &shape);
        add_shape(&tuner->explored, shape);
    }
}

/* ---- refining ---------------------------------------------------------------------------------------- */

/* Tries a plan with all layers recomputing, and as it is. */
static double try_guess(struct tuner *tuner, struct plan plan) {
    if (plan.memory.recompute.layers && tuner->space.layers_open) {
        struct plan whole = plan;
        whole.memory.recompute.layers = 0;
        try_plan(&tuner->trials, whole);
    }
    return try_plan(&tuner->trials, plan);
}

/* Then with fewer layers recomputing until it no longer fits, and with more until that is no better. */
static void try_layers(struct tuner *tuner, struct plan plan) {
    int all = layers_of(&plan);
    double load = try_guess(tuner, plan);
    if (!tuner->space.layers_open || !recomputes(plan.memory)) return;
    int here = plan.memory.recompute.layers ? plan.memory.recompute.layers : all;
    for (int step = -1; step <= 1; step += 2) {
        if (load > 0 && step < 0) continue;
        double before = INFINITY;
        for (int round = 0, layers = here + step; round < 6 && layers >= 1 && layers <= all;
             round++, layers += step) {
            plan.memory.recompute.layers = layers == all ? 0 : layers;
            double more = try_plan(&tuner->trials, plan);
            if (step < 0 ? more > 0 : more == 0 && tuner->trials.best >= before) break;
            before = tuner->trials.best;
        }
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

static void add_guess(struct guesses *guesses, struct guess guess) {
    if (guess.seconds == INFINITY) return;
    guesses->list = must_realloc(guesses->list, (size_t)(guesses->count + 1) * sizeof *guesses->list);
    guesses->list[guesses->count++] = guess;
}

static void guess_order(struct tuner *tuner, const struct plan *shape, struct order order,
                        struct sight *sight, struct guesses *guesses) {
    if (look(tuner, shape, order, SLACK, sight)) add_guess(guesses, best_guess(tuner, shape, sight));
}

/* More waves than the batch has make no difference. */
static bool waves_matter(int wave, int waves, int micro_batches) {
    return waves == 1 || wave * (waves - 1) < micro_batches;
}

/* Orders with waves of one size and some policy, `least` to `most` micro-batches under way: of few all
   numbers, of many some. */
static void guess_waves(struct tuner *tuner, const struct plan *shape, int wave, int policy, int least,
                        int most, struct sight *sight, struct guesses *guesses) {
    for (int waves = (least + wave - 1) / wave; wave * waves < most + wave; waves += 1 + waves / 4)
        if (waves_matter(wave, waves, shape->micro_batches))
            guess_order(tuner, shape, space_order(&tuner->space, wave, waves, policy), sight, guesses);
}

/* Policies and waves that were ever among the best on points of real size; sweeping tries all. Backward
   passes first hold little however many are under way. */
static void guess_all_orders(struct tuner *tuner, const struct shape *shape, struct sight *sight,
                             struct guesses *guesses) {
    const struct plan *plan = &shape->plan;
    int deep = shape->best.order.wave * shape->best.order.waves_in_flight, least = (deep + 1) / 2;
    int most = deep + deep / 2 + 2, many = 3 * deep > 24 ? 3 * deep : 24;
    for (int wave = 1; wave <= MOST_WAVE && wave <= plan->micro_batches; wave++)
        for (int justified = wave > 1; justified <= 1; justified++) {
            guess_waves(tuner, plan, wave, policy_of(PREFER_FORWARD, true, justified), least, most, sight,
                        guesses);
            guess_waves(tuner, plan, wave, policy_of(PREFER_BACKWARD, true, justified), least, many, sight,
                        guesses);
            if (wave == 1)
                guess_waves(tuner, plan, wave, policy_of(PREFER_FORWARD, false, justified), least, most,
                            sight, guesses);
        }
}

static void try_guesses(struct tuner *tuner, struct guesses *guesses) {
    if (guesses->count) qsort(guesses->list, (size_t)guesses->count, sizeof *guesses->list, by_seconds);
    for (int i = 0; i < guesses->count && i < WHOLE_TRIALS; i++)
        if (guesses->list[i].seconds < SLACK * tuner->trials.best) {
            if (i < NEAR_TRIALS)
                try_layers(tuner, guesses->list[i].plan);
            else
                try_guess(tuner, guesses->list[i].plan);
        }
    free(guesses->list);
}

/* The levers that should be quickest under one order: they may differ by less than is known of them. */
static void refine_levers(struct tuner *tuner, const struct shape *shape, struct order order) {
    struct sight sight = {0};
    struct guesses guesses = {0};
    if (look(tuner, &shape->plan, order, SLACK, &sight))
        for (int i = 0; i < tuner->space.lever_count; i++)
            add_guess(&guesses, guess_levers(tuner, &shape->plan, &sight, i));
    try_guesses(tuner, &guesses);
    free(sight.activations);
}

static void refine_orders(struct tuner *tuner, const struct shape *shape) {
    struct sight sight = {0};
    struct guesses guesses = {0};
    guess_all_orders(tuner, shape, &sight, &guesses);
    try_guesses(tuner, &guesses);
    free(sight.activations);
}

static void refine(struct tuner *tuner, const struct shape *shape) {
    memo_trim(&tuner->trials);
    try_layers(tuner, shape->best);
    refine_levers(tuner, shape, shape->best.order);
    if (tuner->space.order_open) refine_orders(tuner, shape);
}

/* One that was not among the best, or given up as too slow: as deep as the best plan. */
static void refine_late(struct tuner *tuner, struct shape shape) {
    bool any = tuner->trials.best < INFINITY;
    if (shape.bound >= tuner->trials.best) return;
    if (shape.estimate == INFINITY) {
        int policy = policy_of(PREFER_FORWARD, true, true);
        shape.best = with_levers(&shape.plan, tuner->space.levers[0]);
        shape.best.order = any ? tuner->trials.best_plan.order : space_order(&tuner->space, 1, 1, policy);
    }
    refine(tuner, &shape);
}

/* More or fewer rings, of more or fewer groups, of GPUs that share the work in the same way. */
static bool are_alike(const struct plan *a, const struct plan *b) {
    const struct parallel *x = &a->parallel, *y = &b->parallel;
    return a->placement == b->placement && x->cp == y->cp &&
           x->attn_gpus * y->ffn_gpus == y->attn_gpus * x->ffn_gpus;
}

static void sort_explored(struct tuner *tuner) {
    struct shapes *explored = &tuner->explored;
    if (explored->count) qsort(explored->list, (size_t)explored->count, sizeof *explored->list, by_prospect);
}

/* Of the explored shapes, sorted. */
static bool is_finalist(const struct tuner *tuner, int i) {
    int most = tuner->space.order_open ? FINALISTS : MORE_FINALISTS;
    return i < most && tuner->explored.list[i].estimate < INFINITY;
}

static void refine_shapes(struct tuner *tuner) {
    struct shapes *explored = &tuner->explored;
    bool open = tuner->space.order_open;
    sort_explored(tuner);
    for (int i = 0; open && i < explored->count && i < 2 * FINALISTS; i++)
        if (explored->list[i].estimate < INFINITY) look_again(tuner, &explored->list[i]);
    sort_explored(tuner);
    for (int i = 0; i < explored->count; i++)
        if (is_finalist(tuner, i)) refine(tuner, &explored->list[i]);
    const struct plan best = tuner->trials.best_plan;
    for (int i = 0, late = 0; open && i < explored->count && late < LATE; i++)
        if (!is_finalist(tuner, i) && are_alike(&explored->list[i].plan, &best)) {
            refine_late(tuner, explored->list[i]);
            late++;
        }
}

/* ---- polishing and sweeping -------------------------------------------------------------------------- */

static bool has_budget(const struct tuner *tuner) {
    return tuner->trials.operations < tuner->budget_end;
}

/* Orders with `least` to `most` micro-batches under way; the plan's own where orders are not open. */
static void try_orders(struct tuner *tuner, struct plan plan, int least, int most) {
    const struct space *space = &tuner->space;
    if (!space->order_open) try_plan(&tuner->trials, plan);
    if (most > plan.micro_batches) most = plan.micro_batches;
    for (int wave = 1; space->order_open && wave <= most; wave++)
        for (int waves = 1; wave * waves < most + wave && has_budget(tuner); waves++) {
            if (wave * waves < least) continue;
            for (int policy = 0; policy < POLICIES; policy++) {
                plan.order = space_order(space, wave, waves, policy);
                try_plan(&tuner->trials, plan);
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
                try_plan(&tuner->trials, plan);
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
            try_plan(trials, plan);
        }
    }
}

static void sweep(struct tuner *tuner) {
    for (int i = 0; i < tuner->explored.count && has_budget(tuner); i++) {
        const struct shape *shape = &tuner->explored.list[i];
        memo_trim(&tuner->trials);
        if (shape->bound < tuner->trials.best)
            try_levers(tuner, shape->plan, true, shape->plan.micro_batches);
    }
}

/* Shapes whose promise no estimate was below. */
static void keep_rest(struct tuner *tuner) {
    while (tuner->queue.count && has_budget(tuner)) {
        struct shape shape = queue_pop(&tuner->queue);
        bool fits = shape.bound < tuner->trials.best;
        while (fits && shape.stage != RECKONED) fits = learn_more(tuner, &shape);
        if (fits && shape.bound < tuner->trials.best) add_shape(&tuner->explored, shape);
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
    tuner->explored.count = 0;
    explore_shapes(tuner);
    refine_shapes(tuner);
    tuner->budget_end = tuner->trials.operations + POLISHING;
    polish(tuner);
    if (step_operations(tuner) * FEWEST_STEPS > SWEEPING) return;
    tuner->budget_end = tuner->trials.operations + SWEEPING;
    keep_rest(tuner);
    for (int i = 0; i < tuner->explored.count && has_budget(tuner); i++)
        if (!is_finalist(tuner, i)) refine_late(tuner, tuner->explored.list[i]);
    polish(tuner);
    sweep(tuner);
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
            memo_clear(&tuner.trials);
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
