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
    bool fits; /* whatever is searched must fit the memory */
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
    space.fits = !point->table && (!whole || open || space.placement_open);
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

struct shape {
    struct plan plan;
    double bound;   /* seconds per sequence */
    bool settled;   /* the bound is of the placed shape */
    double seconds; /* per sequence, the best found */
    struct plan best;
};

struct tuner {
    struct space space;
    struct shape *queue; /* heap by bound */
    int queue_count, queue_capacity;
    struct shape *tried;
    int tried_count, tried_capacity;
    struct need *needs; /* room for a plan's groups */
    double *activations;
    struct plan best_plan;
    double best; /* seconds per sequence */
    bool found;
    int64_t simulated;
};

static double per_sequence(const struct plan *plan, double seconds) {
    return seconds / plan->sequences;
}

/* ---- trying one plan --------------------------------------------------------------------------------- */

/* The state that ends the step soonest among those that fit beside each group's activations (NULL: all fit);
   false when none does. The least intrusive of equals. */
static bool choose_state(const struct tuner *tuner, const struct plan *plan, const double *activations,
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
        if (space->fits && bytes > space->usable) continue;
        if (seconds < soonest) {
            soonest = seconds;
            *chosen = tried.memory;
        }
    }
    return soonest < INFINITY;
}

/* Peak activations of each group, static bytes left out; returns how many groups there are. */
static int read_activations(const struct tuner *tuner, const struct schedule *schedule,
                            const struct timeline *timeline) {
    schedule_memory_peaks(schedule, timeline, tuner->activations);
    for (int g = 0; g < schedule->group_count; g++) tuner->activations[g] -= schedule->groups[g].static_bytes;
    return schedule->group_count;
}

enum outcome { TOO_SLOW, TOO_LARGE, FITS };

/* What one trial showed. load: activations ÷ what the leanest state leaves for them, of the worst group. */
struct trial {
    enum outcome outcome;
    double seconds, load; /* per sequence */
    struct plan plan;     /* with its state */
};

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

static void keep_best(struct tuner *tuner, const struct trial *trial) {
    if (tuner->found && trial->seconds >= tuner->best) return;
    tuner->found = true;
    tuner->best = trial->seconds;
    tuner->best_plan = trial->plan;
}

/* Simulates a plan, gives up when it cannot be better than `limit` seconds per sequence. */
static struct trial try_plan(struct tuner *tuner, struct plan plan, double limit) {
    const struct system *system = tuner->space.system;
    struct trial trial = {.outcome = TOO_SLOW, .seconds = INFINITY, .plan = plan};
    struct schedule *schedule;
    struct timeline timeline = {0};
    struct result result;
    struct memory chosen;
    choose_state(tuner, &plan, NULL, &plan.memory); /* the quickest: what cannot win with it never can */
    tuner->simulated++;
    if (!simulate_before(system, &plan, limit * plan.sequences, &result, &schedule, &timeline)) return trial;
    read_activations(tuner, schedule, &timeline);
    timeline_free(&timeline);
    schedule_free(schedule);
    trial.load = load_of(tuner, &plan);
    trial.outcome = TOO_LARGE;
    if (!choose_state(tuner, &plan, tuner->activations, &chosen)) return trial;
    if (memcmp(&chosen, &plan.memory, sizeof chosen) != 0) {
        plan.memory = chosen;
        tuner->simulated++;
        simulate_plan(system, &plan, &result, NULL, NULL);
        if (result.oom && tuner->space.fits) return trial;
    }
    trial.outcome = FITS;
    trial.plan = plan;
    trial.seconds = per_sequence(&plan, result.step_time);
    keep_best(tuner, &trial);
    return trial;
}

/* ---- micro-batches under way ------------------------------------------------------------------------- */

static struct order order_of(const struct space *space, int wave, int waves, int prefer) {
    const struct order *given = &space->point->order;
    return (struct order){space->wave_open ? wave : given->wave,
                          space->waves_open ? waves : given->waves_in_flight,
                          space->prefer_open ? prefer : given->prefer};
}

static int waves_that_matter(const struct plan *plan, int wave) {
    return (plan->micro_batches + wave - 1) / wave;
}

/* With waves of this size, as many under way as fit: activations grow about in proportion to their number.
   Fewer are tried too as long as that is no slower: they may be quicker, since orders are found greedily. */
static struct trial fill_memory(struct tuner *tuner, struct plan plan, int wave, int prefer, int first_guess,
                                double slack) {
    struct trial best = {.outcome = TOO_LARGE, .seconds = INFINITY, .plan = plan};
    int most = waves_that_matter(&plan, wave), waves = first_guess < most ? first_guess : most;
    int fit = 0, over = most + 1; /* the most known to fit, the fewest known not to */
    if (waves < 1) waves = 1;
    double least_load = INFINITY;
    for (int round = 0; round < 8; round++) {
        plan.order = order_of(&tuner->space, wave, waves, prefer);
        double limit = tuner->found ? slack * tuner->best : INFINITY;
        struct trial trial = try_plan(tuner, plan, limit);
        if (trial.outcome == TOO_LARGE) {
            over = waves;
            least_load = fmin(least_load, trial.load);
        } else
            fit = waves;
        if (trial.seconds < best.seconds) best = trial;
        if (trial.outcome == TOO_SLOW || fit + 1 >= over || !tuner->space.waves_open) break;
        int next = trial.load > 0 ? (int)(waves / trial.load) : most;
        if (next <= fit) next = fit + 1;
        if (next >= over) next = over - 1;
        waves = next;
    }
    best.load = least_load;
    return best;
}

/* ---- levers of one shape ----------------------------------------------------------------------------- */

struct option {
    struct memory levers;
    double bound; /* seconds per sequence */
    double bytes;
};

static struct option option_of(const struct tuner *tuner, const struct plan *shape, struct memory levers,
                               int layers) {
    struct plan plan = *shape;
    levers.recompute.layers = layers;
    plan.memory = leanest(&tuner->space, levers);
    struct bound bound = tuner->space.system->bound(&plan);
    return (struct option){levers, per_sequence(&plan, bound.seconds), bound.bytes};
}

static int layers_of_group(const struct plan *plan) {
    int parts = plan->parallel.groups ? plan->parallel.groups : plan->parallel.pp;
    return (plan->point->model->layers + parts - 1) / parts;
}

static bool recomputes(struct memory levers) {
    return levers.recompute.attention || levers.recompute.ffn;
}

/* The number of layers with the least bound among those that fit: with more of them there is more to do and
   less to keep, so the least stands where either stops deciding. */
static struct option best_layers(const struct tuner *tuner, const struct plan *shape, struct memory levers) {
    struct option all = option_of(tuner, shape, levers, 0);
    bool fits = all.bytes <= tuner->space.usable || !tuner->space.fits;
    if (!tuner->space.layers_open || !recomputes(levers) || !fits) return all;
    int low = 1, high = layers_of_group(shape); /* high: all, known to fit */
    struct option best = all;
    while (low < high) {
        int middle = (low + high) / 2;
        struct option here = option_of(tuner, shape, levers, middle);
        struct option next = middle + 1 == high ? best : option_of(tuner, shape, levers, middle + 1);
        bool here_fits = here.bytes <= tuner->space.usable;
        if (here_fits && here.bound <= next.bound) {
            best = here;
            high = middle;
        } else
            low = middle + 1;
    }
    return best;
}

static int by_option(const void *a, const void *b) {
    const struct option *x = a, *y = b;
    if (x->bound != y->bound) return x->bound < y->bound ? -1 : 1;
    return memcmp(&x->levers, &y->levers, sizeof x->levers);
}

/* All levers that may fit, least bound first. */
static int list_options(const struct tuner *tuner, const struct plan *shape, struct option *options) {
    int count = 0;
    for (int i = 0; i < tuner->space.lever_count; i++) {
        struct option option = best_layers(tuner, shape, tuner->space.levers[i]);
        if (tuner->space.fits && option.bytes > tuner->space.usable) continue;
        options[count++] = option;
    }
    qsort(options, (size_t)count, sizeof *options, by_option);
    return count;
}

/* ---- one shape --------------------------------------------------------------------------------------- */

/* Fewer or more layers: until it fits. */
static struct trial try_given_order(struct tuner *tuner, struct plan plan, double slack) {
    struct trial trial = {0};
    int all = layers_of_group(&plan);
    for (int round = 0; round < 8; round++) {
        double limit = tuner->found ? slack * tuner->best : INFINITY;
        trial = try_plan(tuner, plan, limit);
        int layers = plan.memory.recompute.layers;
        if (trial.outcome != TOO_LARGE || !tuner->space.layers_open || !layers) break;
        layers += 1 + (int)((trial.load - 1) * all);
        plan.memory.recompute.layers = layers >= all ? 0 : layers;
    }
    return trial;
}

static int guess_waves(const struct plan *plan, int wave) {
    (void)plan;
    return (8 + wave - 1) / wave;
}

static void try_shape(struct tuner *tuner, struct shape *shape) {
    struct option options[MAX_LEVERS];
    int count = list_options(tuner, &shape->plan, options), fitted = 0;
    for (int i = 0; i < count && fitted < 3; i++) {
        if (tuner->found && options[i].bound >= tuner->best) break;
        struct plan plan = shape->plan;
        plan.memory = options[i].levers;
        struct trial trial = tuner->space.order_open
                                 ? fill_memory(tuner, plan, 1, PREFER_BACKWARD, guess_waves(&plan, 1), 1.05)
                                 : try_given_order(tuner, plan, 1);
        if (trial.outcome == FITS) fitted++;
        if (trial.seconds >= shape->seconds) continue;
        shape->seconds = trial.seconds;
        shape->best = trial.plan;
    }
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

/* The least bound of any levers. */
static double shape_bound(const struct tuner *tuner, const struct plan *shape, bool placed) {
    const struct system *system = tuner->space.system;
    struct plan plan = *shape;
    if (!placed) {
        plan.memory = leanest(&tuner->space, tuner->space.levers[0]);
        return system->outline ? per_sequence(&plan, system->outline(&plan).seconds) : 0;
    }
    struct option options[MAX_LEVERS];
    return list_options(tuner, shape, options) ? options[0].bound : INFINITY;
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
                .seconds = INFINITY};
            bool possible = space->system->size(&shape.plan, &ignored);
            errors_free(&ignored);
            if (!possible) continue;
            shape.bound = shape_bound(tuner, &shape.plan, false);
            queue_push(tuner, shape);
        }
}

static bool settle(struct tuner *tuner, struct shape *shape) {
    struct errors ignored = {0};
    bool settled = !tuner->space.system->settle || tuner->space.system->settle(&shape->plan, &ignored);
    errors_free(&ignored);
    if (!settled) return false;
    shape->settled = true;
    shape->bound = fmax(shape->bound, shape_bound(tuner, &shape->plan, true));
    return shape->bound < INFINITY;
}

static void try_shapes(struct tuner *tuner) {
    while (tuner->queue_count) {
        struct shape shape = queue_pop(tuner);
        if (tuner->found && shape.bound >= tuner->best) break;
        if (!shape.settled) {
            if (settle(tuner, &shape)) queue_push(tuner, shape);
            continue;
        }
        int64_t before_sims = tuner->simulated;
        try_shape(tuner, &shape);
        if (getenv("TUNE_DEBUG2")) { struct parallel *q = &shape.plan.parallel; struct memory *mm = &shape.best.memory;
            fprintf(stderr, "SHAPE p%d m%d n%d cp%d nics %d %d %s r%d mb%d pp%d v%d ep%d bound %.6g sec %.6g ratio %.3f sims %ld lev %d%d/%d in%d order %d %d %d\n", q->groups, q->attn_gpus, q->ffn_gpus, q->cp, q->attn_nics, q->ffn_nics, shape.plan.placement ? "mixed":"split", shape.plan.replicas, shape.plan.micro_batches, q->pp, q->vpp, q->ep, shape.bound, shape.seconds, shape.seconds / shape.bound, (long)(tuner->simulated - before_sims), mm->recompute.attention, mm->recompute.ffn, mm->recompute.layers, mm->expert_input, shape.best.order.wave, shape.best.order.waves_in_flight, shape.best.order.prefer); }
        if (tuner->tried_count == tuner->tried_capacity) {
            tuner->tried_capacity = tuner->tried_capacity ? 2 * tuner->tried_capacity : 64;
            tuner->tried = must_realloc(tuner->tried, (size_t)tuner->tried_capacity * sizeof *tuner->tried);
        }
        tuner->tried[tuner->tried_count++] = shape;
    }
}

/* ---- refining ---------------------------------------------------------------------------------------- */

static int by_seconds(const void *a, const void *b) {
    const struct shape *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return shape_before(x, y) ? -1 : 1;
}

static void refine(struct tuner *tuner, struct shape *shape) {
    static const int waves[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
    int in_flight = shape->best.order.wave * shape->best.order.waves_in_flight;
    for (size_t i = 0; i < COUNT(waves); i++)
        for (int prefer = 0; prefer < PREFER_COUNT; prefer++) {
            int wave = waves[i];
            if (wave > shape->plan.micro_batches) continue;
            fill_memory(tuner, shape->best, wave, prefer, (in_flight + wave / 2) / wave, 1);
        }
}

static void search(struct tuner *tuner) {
    try_shapes(tuner);
    if (!tuner->space.order_open) return;
    qsort(tuner->tried, (size_t)tuner->tried_count, sizeof *tuner->tried, by_seconds);
    for (int i = 0; i < tuner->tried_count && i < 4; i++)
        if (tuner->tried[i].seconds < INFINITY) refine(tuner, &tuner->tried[i]);
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
        *feasible = tuner.found;
        *plan = tuner.found ? tuner.best_plan : (struct plan){.point = point};
    }
    if (getenv("TUNE_DEBUG"))
        fprintf(stderr, "%s: %d layouts, %d shapes left, %d tried, %ld simulated, best %g\n", system->name,
                count, tuner.queue_count, tuner.tried_count, (long)tuner.simulated, tuner.best);
    free(tuner.queue);
    free(tuner.tried);
    free(tuner.needs);
    free(tuner.activations);
    free(layouts);
    return possible;
}
