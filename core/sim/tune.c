/*
The tuner: makes a point's open choices for one system, maximising tokens/s of the whole cluster at the given
batch under the memory limit.

Choices. A shape is a layout and a placement. Levers say what is recomputed (each side's level, in how many
layers) and whether the experts' input is kept or sent again. A state is what hardly touches the pipeline:
precision of gradients and moments, ZeRO, offload. An order is of systems that search one.

1. Shapes stand in a queue by a lower bound of their step time: first one that needs no placement, then, when
it comes to the front, the tighter one of the placed shape. The first in the queue is tried until no bound is
below the best step found.
2. Trying a shape: of every levers' bound the least come first. Levers leave the number of layers that
recompute open; the bound says which is best. An open order is then tried under one typical policy, with as
many micro-batches under way as fit.
3. The best few shapes are refined: other policies, waves, numbers of layers, levers next to those found.
State: for each simulated order the one is taken that fits beside the activations and ends the step soonest;
of equals the least intrusive. Nothing depends on clocks or threads: the same point gives the same choice
everywhere.
*/
#include "sim/sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STATES 64
#define MAX_LEVERS 32

/* ---- the space --------------------------------------------------------------------------------------- */

struct space {
    const struct system *system;
    const struct point *point;
    bool searches_memory; /* whatever is searched must fit; what is given runs as given */
    bool placement_open, order_open, wave_open, waves_open, prefer_open;
    bool layers_open;                 /* of recomputation */
    struct memory states[MAX_STATES]; /* gradients, moments, ZeRO, offload: the least intrusive first */
    struct memory levers[MAX_LEVERS]; /* recomputation and expert input */
    int state_count, lever_count;
    double usable;
};

static bool is_open(const struct space *space, int open, int key) {
    (void)space;
    return (open & key) != 0;
}

static void list_states(struct space *space, int open) {
    struct memory given = space->point->memory;
    bool offload = is_open(space, open, MEMORY_OFFLOAD), moments = is_open(space, open, MEMORY_MOMENTS);
    bool grads = is_open(space, open, MEMORY_GRADS), zero = is_open(space, open, MEMORY_ZERO);
    for (int o = 0; o < (offload ? 2 : 1); o++)
        for (int m = 0; m < (moments ? 2 : 1); m++)
            for (int g = 0; g < (grads ? 2 : 1); g++)
                for (int z = 0; z < (zero ? space->system->zero_max + 1 : 1); z++)
                    space->states[space->state_count++] =
                        (struct memory){.grads = grads ? g : given.grads,
                                        .moments = moments ? m : given.moments,
                                        .zero = zero ? z : given.zero,
                                        .offload = offload ? o : given.offload};
}

/* Where both sides recompute all, the experts' input is sent again whatever the lever says. */
static void list_levers(struct space *space, int open) {
    struct memory given = space->point->memory;
    bool recompute = is_open(space, open, MEMORY_RECOMPUTE),
         input = is_open(space, open, MEMORY_EXPERT_INPUT);
    for (int a = 0; a < (recompute ? ATTENTION_FULL + 1 : 1); a++)
        for (int f = 0; f < (recompute ? FFN_FULL + 1 : 1); f++)
            for (int i = 0; i < (input ? 2 : 1); i++) {
                struct memory levers = {.recompute = given.recompute, .expert_input = given.expert_input};
                if (recompute) levers.recompute = (struct recompute){a, f, 0};
                if (input) levers.expert_input = i;
                space->levers[space->lever_count++] = levers;
            }
    space->layers_open = recompute;
}

static struct space space_of(const struct system *system, const struct point *point) {
    struct space space = {.system = system, .point = point, .usable = plan_usable_memory(point)};
    bool whole = system->is_whole(&point->parallel);
    int open = point->auto_memory ? MEMORY_ALL : whole ? 0 : MEMORY_ALL & ~point->memory_given;
    if (point->table) open = 0; /* memory is not enforced then */
    space.placement_open =
        system->uses_placement && !point->placement_given && (point->auto_placement || !whole);
    space.searches_memory = !whole || open || space.placement_open;
    space.wave_open = system->searches_order && !point->order.wave;
    space.waves_open = system->searches_order && !point->order.waves_in_flight;
    space.prefer_open = system->searches_order && point->order.prefer == PREFER_OPEN;
    space.order_open = space.wave_open || space.waves_open || space.prefer_open;
    list_states(&space, open);
    list_levers(&space, open);
    return space;
}

static struct memory with_state(struct memory levers, struct memory state) {
    state.recompute = levers.recompute;
    state.expert_input = levers.expert_input;
    return state;
}

static struct memory leanest(const struct space *space, struct memory levers) {
    return with_state(levers, space->states[space->state_count - 1]);
}

/* ---- the search's state ------------------------------------------------------------------------------ */

/* A layout and a placement; and the best plan that was found for it. */
struct shape {
    struct plan plan;
    double bound; /* seconds per sequence */
    bool settled; /* the bound is of the placed shape */
    struct plan best;
    double estimate; /* seconds per sequence of the best plan, by a step cut short */
};

struct tuner {
    struct space space;
    struct shape *queue; /* heap by bound */
    int queue_count, queue_capacity;
    struct shape *explored;
    int explored_count, explored_capacity;
    struct need *needs;  /* room for a plan's groups */
    double *activations; /* of the last evaluation, each group's peak without static bytes */
    double estimate;     /* the least of all shapes */
    struct plan best_plan;
    double best; /* seconds per sequence, of the whole step */
    bool found;
    int64_t evaluated; /* operations */
    int evaluations;
};

static double per_sequence(const struct plan *plan, double seconds) {
    return seconds / plan->sequences;
}

/* ---- evaluating one plan ----------------------------------------------------------------------------- */

static int by_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds from one micro-batch's end to the next one's, in the middle of a step. period: micro-batches after
   which the order repeats itself. */
static double pace_of(const struct schedule *schedule, const struct timeline *timeline, int period) {
    int count = 0, micro_batches = schedule->micro_batches;
    double *ends = must_alloc((size_t)micro_batches * sizeof *ends);
    for (int i = 0; i < schedule->op_count; i++)
        if (schedule->ops[i].kind == KIND_EMBED && schedule->ops[i].pass == PASS_BACKWARD)
            ends[count++] = timeline->end[i];
    qsort(ends, (size_t)count, sizeof *ends, by_double);
    int first = count / 3, steps = count / 3 / period * period;
    if (steps == 0) steps = count - 1 - first;
    double pace = (ends[first + steps] - ends[first]) / steps;
    free(ends);
    return pace;
}

/* Micro-batches after which a system's order repeats itself. */
static int period_of(const struct plan *plan) {
    return plan->order.wave ? plan->order.wave : plan->parallel.pp ? plan->parallel.pp : 1;
}

/* Enough micro-batches to fill the pipeline and see its pace; all, where that saves little. */
static int cut_short(const struct plan *plan) {
    int period = period_of(plan);
    int under_way = plan->order.wave ? plan->order.wave * plan->order.waves_in_flight : 2 * plan->parallel.pp;
    int enough = 3 * (under_way > 6 ? under_way : 6);
    enough = (enough + period - 1) / period * period;
    return enough * 4 / 3 < plan->micro_batches ? enough : plan->micro_batches;
}

/* Seconds per sequence; INFINITY when the step cannot end within `limit` of them. whole: of all its
   micro-batches, else it may be cut short and the rest reckoned by its pace. Leaves the activations. */
static double evaluate(struct tuner *tuner, const struct plan *plan, double limit, bool whole) {
    struct plan shorter = *plan;
    struct timeline timeline = {0};
    if (!whole) shorter.micro_batches = cut_short(plan);
    int rest = plan->micro_batches - shorter.micro_batches;
    struct schedule *schedule = tuner->space.system->build(&shorter);
    schedule_drop_instant(schedule);
    tuner->evaluated += schedule->op_count;
    tuner->evaluations++;
    double seconds = INFINITY, most = limit * plan->sequences;
    if (schedule_arrange_before(schedule, rest ? INFINITY : most, &timeline)) {
        seconds = timeline.makespan;
        if (rest) seconds += rest * pace_of(schedule, &timeline, period_of(plan));
        schedule_memory_peaks(schedule, &timeline, tuner->activations);
        for (int g = 0; g < schedule->group_count; g++)
            tuner->activations[g] -= schedule->groups[g].static_bytes;
    }
    timeline_free(&timeline);
    schedule_free(schedule);
    return seconds < most ? per_sequence(plan, seconds) : INFINITY;
}

/* The state that ends the step soonest among those that fit beside each group's activations (NULL: all fit),
   and the seconds that end takes; INFINITY when none fits. The least intrusive of equals. */
static double choose_state(const struct tuner *tuner, const struct plan *plan, const double *activations,
                           struct memory *chosen) {
    const struct space *space = &tuner->space;
    double soonest = INFINITY;
    for (int i = 0; i < space->state_count; i++) {
        struct plan tried = *plan;
        tried.memory = with_state(plan->memory, space->states[i]);
        int groups = space->system->needs(&tried, tuner->needs);
        double bytes = 0, seconds = 0;
        for (int g = 0; g < groups; g++) {
            const struct need *need = &tuner->needs[g];
            if (activations) bytes = fmax(bytes, need->static_bytes + activations[g]);
            seconds = fmax(seconds, need->end.grad_sync + need->end.optimizer + need->end.param_gather);
        }
        if (bytes > space->usable) continue;
        if (seconds < soonest) {
            soonest = seconds;
            *chosen = tried.memory;
        }
    }
    return soonest;
}

/* Activations ÷ what the leanest state leaves for them, of the worst group: above 1 nothing fits. */
static double load_of(const struct tuner *tuner, const struct plan *plan) {
    struct plan lean = *plan;
    lean.memory = leanest(&tuner->space, plan->memory);
    int groups = tuner->space.system->needs(&lean, tuner->needs);
    double load = 0;
    for (int g = 0; g < groups; g++)
        load =
            fmax(load, tuner->activations[g] / fmax(1, tuner->space.usable - tuner->needs[g].static_bytes));
    return load;
}

/* Evaluates a whole step, with the state that suits it, and keeps the plan when it is the best so far.
   Returns its load when it does not fit, else 0. */
static double confirm(struct tuner *tuner, struct plan plan) {
    double limit = tuner->found ? tuner->best : INFINITY;
    struct memory chosen;
    choose_state(tuner, &plan, NULL, &plan.memory); /* the quickest: what cannot win with it never can */
    double seconds = evaluate(tuner, &plan, limit, true);
    if (seconds == INFINITY) return 0;
    if (choose_state(tuner, &plan, tuner->activations, &chosen) == INFINITY) return load_of(tuner, &plan);
    if (memcmp(&chosen, &plan.memory, sizeof chosen) != 0) {
        plan.memory = chosen;
        seconds = evaluate(tuner, &plan, limit, true);
        if (seconds == INFINITY) return 0;
        struct memory again;
        if (choose_state(tuner, &plan, tuner->activations, &again) == INFINITY) return 1;
    }
    tuner->found = true;
    tuner->best = seconds;
    tuner->best_plan = plan;
    return 0;
}

/* ---- levers by what is known of others --------------------------------------------------------------- */

#define MAX_PARTS 256 /* groups looked at when levers are reckoned; of more, the first ones */

/* What levers need, in all layers of each group. */
struct lever {
    struct memory levers;
    double busy; /* seconds per sequence */
    double bound, bytes;
    int groups;
    struct need *needs; /* with the leanest state */
};

static struct lever lever_of(const struct tuner *tuner, const struct plan *shape, struct memory levers) {
    struct plan plan = *shape;
    plan.memory = leanest(&tuner->space, levers);
    struct bound bound = tuner->space.system->bound(&plan);
    struct lever lever = {.levers = levers,
                          .busy = per_sequence(&plan, bound.busy),
                          .bound = per_sequence(&plan, bound.seconds),
                          .bytes = bound.bytes};
    lever.groups = tuner->space.system->needs(&plan, tuner->needs);
    lever.needs = must_alloc((size_t)lever.groups * sizeof *lever.needs);
    memcpy(lever.needs, tuner->needs, (size_t)lever.groups * sizeof *lever.needs);
    return lever;
}

static int layers_of_group(const struct plan *plan) {
    int parts = plan->parallel.groups ? plan->parallel.groups : plan->parallel.pp;
    return (plan->point->model->layers + parts - 1) / parts;
}

/* The part of the layers that must recompute so that the activations fit, when `activations` were seen with
   `base` in every layer: they grow as what a micro-batch keeps. Above 1: all are too few. */
static double part_that_fits(const struct tuner *tuner, const struct lever *base, const struct lever *lever,
                             const double *activations) {
    double part = 0;
    for (int g = 0; g < lever->groups; g++) {
        double under_way = (activations[g] - base->needs[g].backward_bytes) / base->needs[g].kept_bytes;
        double left = tuner->space.usable - lever->needs[g].static_bytes - lever->needs[g].backward_bytes;
        double none = under_way * base->needs[g].kept_bytes, all = under_way * lever->needs[g].kept_bytes;
        if (under_way <= 0 || none <= left) continue;
        part = fmax(part, all < none ? (none - left) / (none - all) : INFINITY);
    }
    return part;
}

/* What was seen with one order and the base levers. */
struct sight {
    struct order order;
    double seconds; /* per sequence */
    double *activations;
};

/* The plan that should be quickest of one sight, and how quick it should be. */
struct guess {
    struct plan plan;
    double seconds;
};

static bool recomputes(struct memory levers) {
    return levers.recompute.attention || levers.recompute.ffn;
}

static struct guess best_guess(const struct tuner *tuner, const struct plan *shape, const struct lever *list,
                               int count, const struct sight *sight) {
    struct guess best = {.seconds = INFINITY};
    int layers = layers_of_group(shape);
    for (int i = 0; i < count; i++) {
        double part = part_that_fits(tuner, &list[0], &list[i], sight->activations);
        bool open = tuner->space.layers_open && recomputes(list[i].levers);
        if (part > 1 || (i == 0 && part > 0)) continue;
        if (!open && i > 0) part = 1;
        int recomputing = (int)ceil(part * layers - 1e-9);
        if (open && recomputing == 0) recomputing = 1;
        double busy =
            list[0].busy + (list[i].busy - list[0].busy) * (open ? (double)recomputing / layers : 1);
        double seconds = sight->seconds * busy / list[0].busy;
        if (seconds >= best.seconds) continue;
        best.seconds = seconds;
        best.plan = *shape;
        best.plan.order = sight->order;
        best.plan.memory = list[i].levers;
        if (open && recomputing < layers) best.plan.memory.recompute.layers = recomputing;
    }
    return best;
}

/* ---- one shape --------------------------------------------------------------------------------------- */

static double SLACK = 1.03;
static int FINALISTS = 4, TOP = 6;
static double RANGE = 1.5;
__attribute__((constructor)) static void set_params(void) {
    if (getenv("T_SLACK")) SLACK = atof(getenv("T_SLACK"));
    if (getenv("T_FIN")) FINALISTS = atoi(getenv("T_FIN"));
    if (getenv("T_TOP")) TOP = atoi(getenv("T_TOP"));
    if (getenv("T_RANGE")) RANGE = atof(getenv("T_RANGE"));
}

static struct order order_of(const struct space *space, int wave, int waves, int prefer) {
    const struct order *given = &space->point->order;
    return (struct order){space->wave_open ? wave : given->wave,
                          space->waves_open ? waves : given->waves_in_flight,
                          space->prefer_open ? prefer : given->prefer};
}

/* Sees a shape under one order with the base levers; false when that is too slow to matter. */
static bool look(struct tuner *tuner, struct plan plan, const struct lever *base, struct order order,
                 struct sight *sight) {
    plan.order = order;
    plan.memory = base->levers;
    choose_state(tuner, &plan, NULL, &plan.memory);
    double limit = tuner->estimate < INFINITY ? SLACK * tuner->estimate : INFINITY;
    sight->order = order;
    sight->seconds = evaluate(tuner, &plan, limit, false);
    if (sight->seconds == INFINITY) return false;
    memcpy(sight->activations, tuner->activations, (size_t)base->groups * sizeof(double));
    return true;
}

/* Evaluates what a sight promises until it holds; the estimate of what fits, INFINITY where nothing does. */
static double follow(struct tuner *tuner, const struct plan *shape, const struct lever *list, int count,
                     struct sight sight, double limit, struct plan *found) {
    double *scaled = must_alloc((size_t)list[0].groups * sizeof *scaled), seconds = INFINITY;
    memcpy(scaled, sight.activations, (size_t)list[0].groups * sizeof *scaled);
    sight.activations = scaled;
    for (int round = 0; round < 4 && seconds == INFINITY; round++) {
        struct guess guess = best_guess(tuner, shape, list, count, &sight);
        if (guess.seconds >= limit) break;
        double quickest = choose_state(tuner, &guess.plan, NULL, &guess.plan.memory);
        double now = evaluate(tuner, &guess.plan, limit, false);
        if (now == INFINITY) break;
        double load = load_of(tuner, &guess.plan);
        double end = choose_state(tuner, &guess.plan, tuner->activations, &guess.plan.memory);
        if (end < INFINITY) {
            seconds = now + per_sequence(&guess.plan, end - quickest);
            *found = guess.plan;
        }
        for (int g = 0; g < list[0].groups; g++) scaled[g] *= load * 1.001;
    }
    free(scaled);
    return seconds;
}

static int list_levers_of(const struct tuner *tuner, const struct plan *shape, struct lever *list) {
    int count = 0;
    for (int i = 0; i < tuner->space.lever_count; i++)
        list[count++] = lever_of(tuner, shape, tuner->space.levers[i]);
    return count;
}

static void free_levers(struct lever *list, int count) {
    for (int i = 0; i < count; i++) free(list[i].needs);
}

/* Micro-batches under way at which a shape is looked at first: with the most there is least waiting, and when
   that is too slow nothing else need be tried. */
static const int under_way[] = {24, 12, 8, 6, 5, 4, 3, 2, 1};

static void explore(struct tuner *tuner, struct shape *shape) {
    struct lever list[MAX_LEVERS];
    int count = list_levers_of(tuner, &shape->plan, list);
    struct sight sight = {.activations = must_alloc((size_t)list[0].groups * sizeof(double))};
    bool open = tuner->space.order_open;
    for (size_t i = 0; i < (open ? COUNT(under_way) : 1); i++) {
        int waves = under_way[i] < shape->plan.micro_batches ? under_way[i] : shape->plan.micro_batches;
        if (i && under_way[i] >= shape->plan.micro_batches) continue;
        struct order order = order_of(&tuner->space, 1, waves, PREFER_FORWARD);
        if (!look(tuner, shape->plan, &list[0], order, &sight)) break;
        struct plan found;
        double limit = fmin(shape->estimate, tuner->estimate * SLACK);
        double seconds = follow(tuner, &shape->plan, list, count, sight, limit, &found);
        if (seconds >= shape->estimate) continue;
        shape->estimate = seconds;
        shape->best = found;
        tuner->estimate = fmin(tuner->estimate, seconds);
    }
    free(sight.activations);
    free_levers(list, count);
}

/* ---- the queue --------------------------------------------------------------------------------------- */

static bool shape_before(const struct shape *a, const struct shape *b) {
    if (a->bound != b->bound) return a->bound < b->bound;
    int parallel = memcmp(&a->plan.parallel, &b->plan.parallel, sizeof a->plan.parallel);
    return parallel ? parallel < 0 : a->plan.placement < b->plan.placement;
}

static void queue_push(struct tuner *tuner, struct shape shape) {
    if (tuner->queue_count == tuner->queue_capacity) {
        tuner->queue_capacity = tuner->queue_capacity ? 2 * tuner->queue_capacity : 64;
        tuner->queue = must_realloc(tuner->queue, (size_t)tuner->queue_capacity * sizeof *tuner->queue);
    }
    int at = tuner->queue_count++;
    while (at > 0 && shape_before(&shape, &tuner->queue[(at - 1) / 2])) {
        tuner->queue[at] = tuner->queue[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    tuner->queue[at] = shape;
}

static struct shape queue_pop(struct tuner *tuner) {
    struct shape first = tuner->queue[0], last = tuner->queue[--tuner->queue_count];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= tuner->queue_count) break;
        if (child + 1 < tuner->queue_count && shape_before(&tuner->queue[child + 1], &tuner->queue[child]))
            child++;
        if (!shape_before(&tuner->queue[child], &last)) break;
        tuner->queue[at] = tuner->queue[child];
        at = child;
    }
    tuner->queue[at] = last;
    return first;
}

/* Ahead of placing: the least work of any levers. */
static double outline_of(const struct tuner *tuner, const struct plan *shape) {
    const struct system *system = tuner->space.system;
    struct plan plan = *shape;
    plan.memory = leanest(&tuner->space, tuner->space.levers[0]);
    return system->outline ? per_sequence(&plan, system->outline(&plan).seconds) : 0;
}

static void list_shapes(struct tuner *tuner, const struct parallel *layouts, int count) {
    const struct space *space = &tuner->space;
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
            queue_push(tuner, shape);
        }
}

/* Places a shape; its bound is then the least of any levers that may fit. */
static bool settle(struct tuner *tuner, struct shape *shape) {
    struct errors ignored = {0};
    bool settled = !tuner->space.system->settle || tuner->space.system->settle(&shape->plan, &ignored);
    errors_free(&ignored);
    if (!settled) return false;
    shape->settled = true;
    double least = INFINITY;
    bool fits = false;
    for (int i = 0; i < tuner->space.lever_count; i++) {
        struct plan plan = shape->plan;
        plan.memory = leanest(&tuner->space, tuner->space.levers[i]);
        struct bound bound = tuner->space.system->bound(&plan);
        fits = fits || bound.bytes <= tuner->space.usable;
        least = fmin(least, per_sequence(&plan, i ? bound.seconds : bound.busy));
    }
    shape->bound = fmax(shape->bound, least);
    return fits;
}

static void explore_shapes(struct tuner *tuner) {
    while (tuner->queue_count) {
        struct shape shape = queue_pop(tuner);
        if (shape.bound >= tuner->estimate) break;
        if (!shape.settled) {
            if (settle(tuner, &shape)) queue_push(tuner, shape);
            continue;
        }
        int before = tuner->evaluations;
        explore(tuner, &shape);
        if (getenv("TUNE_DEBUG2")) {
            struct parallel *q = &shape.plan.parallel;
            struct memory *mm = &shape.best.memory;
            fprintf(stderr,
                    "SHAPE p%d m%d n%d cp%d nics %d %d %s r%d mb%d pp%d v%d ep%d bound %.6g sec %.6g ratio "
                    "%.3f sims %d lev %d%d/%d in%d order %d %d %d\n",
                    q->groups, q->attn_gpus, q->ffn_gpus, q->cp, q->attn_nics, q->ffn_nics,
                    shape.plan.placement ? "mixed" : "split", shape.plan.replicas, shape.plan.micro_batches,
                    q->pp, q->vpp, q->ep, shape.bound, shape.estimate, shape.estimate / shape.bound,
                    tuner->evaluations - before, mm->recompute.attention, mm->recompute.ffn,
                    mm->recompute.layers, mm->expert_input, shape.best.order.wave,
                    shape.best.order.waves_in_flight, shape.best.order.prefer);
        }
        if (shape.estimate == INFINITY) continue;
        if (tuner->explored_count == tuner->explored_capacity) {
            tuner->explored_capacity = tuner->explored_capacity ? 2 * tuner->explored_capacity : 64;
            tuner->explored =
                must_realloc(tuner->explored, (size_t)tuner->explored_capacity * sizeof *tuner->explored);
        }
        tuner->explored[tuner->explored_count++] = shape;
    }
}

/* ---- refining ---------------------------------------------------------------------------------------- */

static int by_estimate(const void *a, const void *b) {
    const struct shape *x = a, *y = b;
    if (x->estimate != y->estimate) return x->estimate < y->estimate ? -1 : 1;
    return shape_before(x, y) ? -1 : 1;
}

struct found {
    struct plan plan;
    double seconds;
};

static int by_found(const void *a, const void *b) {
    const struct found *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return memcmp(&x->plan.order, &y->plan.order, sizeof x->plan.order);
}

/* Fewer layers that recompute, until it no longer fits; or more, until it does. */
static void adjust_layers(struct tuner *tuner, struct plan plan) {
    int all = layers_of_group(&plan), step = 0;
    double load = confirm(tuner, plan);
    if (!tuner->space.layers_open || !recomputes(plan.memory)) return;
    for (int round = 0; round < 6; round++) {
        int layers = plan.memory.recompute.layers ? plan.memory.recompute.layers : all;
        int next = load > 0 ? 1 : -1;
        if (step && next != step) break;
        step = next;
        if (layers + step > all || layers + step < 1) break;
        plan.memory.recompute.layers = layers + step == all ? 0 : layers + step;
        load = confirm(tuner, plan);
    }
}

static void refine(struct tuner *tuner, struct shape *shape) {
    struct lever list[MAX_LEVERS];
    int count = list_levers_of(tuner, &shape->plan, list), found = 0,
        micro_batches = shape->plan.micro_batches;
    struct sight sight = {.activations = must_alloc((size_t)list[0].groups * sizeof(double))};
    int best_under_way = shape->best.order.wave * shape->best.order.waves_in_flight;
    int most = (int)(best_under_way * RANGE) + 2, least = best_under_way / 2;
    struct found *plans = must_alloc((size_t)(most * most * PREFER_COUNT + 1) * sizeof *plans);
    for (int wave = 1; wave <= most && wave <= micro_batches; wave++)
        for (int waves = 1; wave * waves <= most; waves++)
            for (int prefer = 0; prefer < PREFER_COUNT; prefer++) {
                if (wave * waves < least) continue;
                if (waves > 1 && wave * (waves - 1) >= micro_batches) continue;
                struct order order = order_of(&tuner->space, wave, waves, prefer);
                if (!look(tuner, shape->plan, &list[0], order, &sight)) continue;
                struct guess guess = best_guess(tuner, &shape->plan, list, count, &sight);
                if (guess.seconds < INFINITY) plans[found++] = (struct found){guess.plan, guess.seconds};
            }
    qsort(plans, (size_t)found, sizeof *plans, by_found);
    for (int i = 0; i < found && i < TOP; i++) adjust_layers(tuner, plans[i].plan);
    adjust_layers(tuner, shape->best);
    free(plans);
    free(sight.activations);
    free_levers(list, count);
}

static void search(struct tuner *tuner) {
    tuner->estimate = INFINITY;
    tuner->explored_count = 0;
    explore_shapes(tuner);
    qsort(tuner->explored, (size_t)tuner->explored_count, sizeof *tuner->explored, by_estimate);
    for (int i = 0; i < tuner->explored_count && i < FINALISTS; i++)
        if (tuner->space.order_open)
            refine(tuner, &tuner->explored[i]);
        else
            adjust_layers(tuner, tuner->explored[i].best);
}

/* ---- the point --------------------------------------------------------------------------------------- */

/* Each given part for itself, the others at their least: so an error names the part that is impossible. A
   searched layout that is impossible is passed over. */
static bool report_impossible(const struct space *space, int layout_count, struct errors *errors) {
    int before = errors->count;
    const struct point *point = space->point;
    struct plan plan = {.point = point, .parallel = point->parallel, .placement = point->placement};
    if (space->placement_open) plan.placement = PLACEMENT_MIXED; /* takes whatever there are GPUs for */
    if (space->system->size(&plan, errors) && space->system->is_whole(&point->parallel) &&
        space->system->settle)
        space->system->settle(&plan, errors);
    if (layout_count == 0 && errors->count == before)
        errors_add(errors, NULL, "parallel",
                   "no layout of %s with what is given fits the cluster's %d GPUs and the model's %d layers",
                   space->system->name, cluster_gpus(point->cluster), point->model->layers);
    if (point->memory.zero > space->system->zero_max)
        errors_add(errors, NULL, "memory.zero", "found %d; %s allows at most %d", point->memory.zero,
                   space->system->name, space->system->zero_max);
    return errors->count > before;
}

bool tune_point(const struct system *system, const struct point *point, struct plan *plan, bool *feasible,
                struct errors *errors) {
    struct tuner tuner = {.space = space_of(system, point)};
    int count = system->layouts(point, NULL, 0);
    struct parallel *layouts = must_alloc((size_t)(count + 1) * sizeof *layouts);
    system->layouts(point, layouts, count);
    tuner.needs = must_alloc(MAX_GROUPS * sizeof *tuner.needs);
    tuner.activations = must_alloc(MAX_GROUPS * sizeof *tuner.activations);
    bool possible = !report_impossible(&tuner.space, count, errors);
    if (possible) {
        list_shapes(&tuner, layouts, count);
        search(&tuner);
        if (!tuner.found && !tuner.space.searches_memory) { /* what is given runs as given */
            tuner.space.usable = INFINITY;
            tuner.queue_count = 0;
            list_shapes(&tuner, layouts, count);
            search(&tuner);
        }
        *feasible = tuner.found;
        *plan = tuner.found ? tuner.best_plan : (struct plan){.point = point};
    }
    if (getenv("TUNE_DEBUG"))
        fprintf(stderr, "%s: %d layouts, %d shapes left, %d explored, %d evaluations, %ld ops, best %g\n",
                system->name, count, tuner.queue_count, tuner.explored_count, tuner.evaluations,
                (long)tuner.evaluated, tuner.best);
    free(tuner.queue);
    free(tuner.explored);
    free(tuner.needs);
    free(tuner.activations);
    free(layouts);
    return possible;
}
