/*
Trials of plans, and what is remembered of levers.
*/
#include "sim/trial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- what is known of levers ------------------------------------------------------------------------- */

struct levers_key {
    struct parallel parallel;
    int placement;
    struct recompute recompute;
    int expert_input;
};

struct entry {
    struct entry *next; /* in its place */
    struct levers_key key;
    struct known known;
    struct tried *tried; /* orders that were tried with it */
};
struct tried {
    struct tried *next;
    struct order order;
    double load;
};

#define PLACES 4096
#define MOST_REMEMBERED 20000
#define PRICING 300 /* operations that pricing a plan counts as */
#define FLATTERY                                                                                             \
    1.005 /* a short step may be this much slower than the whole one; in a fixed order it is not */

struct memo {
    struct entry *places[PLACES];
    int count;
};

static struct levers_key key_of(const struct plan *plan) {
    return (struct levers_key){plan->parallel, plan->placement, plan->memory.recompute,
                               plan->memory.expert_input};
}

/* FNV-1a */
static size_t place_of(struct levers_key key) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof key; i++) hash = (hash ^ ((const unsigned char *)&key)[i]) * 1099511628211u;
    return hash % PLACES;
}

static struct known learn(struct trials *trials, const struct plan *plan) {
    const struct space *space = trials->space;
    struct plan lean = *plan;
    int groups = space->system->groups(plan), states = space->state_count;
    lean.memory = space_leanest(space, plan->memory);
    struct need *needs = must_alloc((size_t)(groups * states) * sizeof *needs);
    struct known known = {.groups = groups,
                          .bound = space->system->needs(&lean, space->states, states, needs)};
    if (space->usable == INFINITY) { /* what is given runs as given, whatever the GPUs hold */
        known.bound.seconds = known.bound.busy;
        known.bound.memory_seconds = 0;
    }
    known.kept = must_alloc((size_t)(2 * groups + groups * states + states) * sizeof(double));
    known.backward = known.kept + groups;
    known.static_bytes = known.backward + groups;
    known.end = known.static_bytes + groups * states;
    for (int g = 0; g < groups; g++) {
        known.kept[g] = needs[g].kept_bytes;
        known.backward[g] = needs[g].backward_bytes;
    }
    for (int i = 0; i < groups * states; i++) {
        struct step_end end = needs[i].end;
        known.static_bytes[i] = needs[i].static_bytes;
        known.end[i / groups] = fmax(known.end[i / groups], end.grad_sync + end.optimizer + end.param_gather);
    }
    known.soonest = INFINITY;
    for (int i = 0; i < states; i++) known.soonest = fmin(known.soonest, known.end[i]);
    free(needs);
    trials->operations += PRICING;
    return known;
}

static struct entry *entry_of(struct trials *trials, const struct plan *plan) {
    struct levers_key key = key_of(plan);
    struct entry **place = &trials->memo->places[place_of(key)];
    for (struct entry *entry = *place; entry; entry = entry->next)
        if (memcmp(&entry->key, &key, sizeof key) == 0) return entry;
    struct entry *entry = must_alloc(sizeof *entry);
    *entry = (struct entry){*place, key, learn(trials, plan), NULL};
    *place = entry;
    trials->memo->count++;
    return entry;
}

const struct known *known_of(struct trials *trials, const struct plan *plan) {
    return &entry_of(trials, plan)->known;
}

static void forget(struct memo *memo) {
    for (int i = 0; i < PLACES; i++)
        for (struct entry *entry = memo->places[i], *next; entry; entry = next) {
            next = entry->next;
            for (struct tried *tried = entry->tried, *after; tried; tried = after) {
                after = tried->next;
                free(tried);
            }
            free(entry->known.kept);
            free(entry);
        }
    *memo = (struct memo){0};
}

void memo_trim(struct trials *trials) {
    if (trials->memo->count > MOST_REMEMBERED) forget(trials->memo);
}

void memo_clear(struct trials *trials) {
    forget(trials->memo);
}

const double *static_bytes_of(const struct known *known, int state) {
    return known->static_bytes + state * known->groups;
}

struct trials trials_new(const struct space *space) {
    return (struct trials){.space = space, .best = INFINITY, .memo = must_alloc(sizeof(struct memo))};
}

void trials_free(struct trials *trials) {
    forget(trials->memo);
    free(trials->memo);
    free(trials->activations);
}

/* ---- states ------------------------------------------------------------------------------------------ */

double choose_state(struct trials *trials, const struct plan *plan, const double *activations,
                    struct memory *chosen) {
    const struct known *known = known_of(trials, plan);
    double soonest = INFINITY;
    for (int i = 0; i < trials->space->state_count; i++) {
        double bytes = 0;
        for (int g = 0; activations && g < known->groups; g++)
            bytes = fmax(bytes, known->static_bytes[i * known->groups + g] + activations[g]);
        if (bytes > trials->space->usable || known->end[i] >= soonest) continue;
        soonest = known->end[i];
        *chosen = memory_with_state(plan->memory, trials->space->states[i]);
    }
    return soonest;
}

double load_of(struct trials *trials, const struct plan *plan, int state) {
    const struct known *known = known_of(trials, plan);
    const double *static_bytes = static_bytes_of(known, state);
    double load = 0;
    for (int g = 0; g < known->groups; g++)
        load = fmax(load, trials->activations[g] / fmax(1, trials->space->usable - static_bytes[g]));
    return load;
}

static int leanest_state(const struct trials *trials) {
    return trials->space->state_count - 1;
}

/* ---- short steps ------------------------------------------------------------------------------------- */

static int by_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds from one micro-batch's end to the next one's, in the middle of a step. period: micro-batches after
   which the order repeats itself. */
static double pace_of(const struct schedule *schedule, const struct timeline *timeline, int period) {
    int count = 0;
    double *ends = must_alloc((size_t)schedule->micro_batches * sizeof *ends);
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

/* Micro-batches under way at most; of a pipelined system, about. */
static int under_way_of(const struct plan *plan) {
    return plan->parallel.pp ? 2 * plan->parallel.pp : plan_under_way(plan);
}

static int period_of(const struct plan *plan) {
    if (plan->parallel.pp) return plan->parallel.pp;
    return plan->order.without & WITHOUT_INTERLEAVING ? under_way_of(plan) : plan->order.wave;
}

/* Enough micro-batches to fill the pipeline and see its pace; all, where that saves little. */
static int short_step(const struct plan *plan) {
    int period = period_of(plan), under_way = under_way_of(plan);
    int enough = 3 * (under_way > 6 ? under_way : 6);
    enough = (enough + period - 1) / period * period;
    return enough < plan->micro_batches / 4 * 3 ? enough : plan->micro_batches;
}

/* ---- thin models ------------------------------------------------------------------------------------- */

/* A ring's step is a round that repeats: with fewer layers, and as much less of everything else, it shows the
   same at a fraction of the work. Not so what happens between two waves. */
#define THIN_LAYERS 24

/* Layers of a thin model whose groups are as uneven and whose windows alternate as in the real one. */
static int thin_layers(const struct trials *trials, const struct plan *plan) {
    const struct model *model = plan->point->model;
    int round = 2 * plan->parallel.groups, least = THIN_LAYERS;
    if (!trials->space->order_open || model->moe.dense_layers || plan->order.wave > 1) return model->layers;
    if (least < 4 * plan->parallel.groups) least = 4 * plan->parallel.groups;
    int rounds = (model->layers - least) / round;
    return rounds > 0 ? model->layers - rounds * round : model->layers;
}

/* The plan on a thin model; point and model are the caller's, and stay. */
static struct plan thin_plan(const struct plan *plan, int layers, struct point *point, struct model *model) {
    struct plan thin = *plan;
    double part = (double)layers / plan->point->model->layers;
    *point = *plan->point;
    *model = *plan->point->model;
    point->model = model;
    thin.point = point;
    model->layers = layers;
    model->vocab = (int)ceil(model->vocab * part);
    struct recompute *recompute = &thin.memory.recompute;
    if (recompute->layers) recompute->layers = (int)fmax(1, round(recompute->layers * part));
    return thin;
}

/* ---- trials ------------------------------------------------------------------------------------------ */

static void read_activations(struct trials *trials, const struct schedule *schedule,
                             const struct timeline *timeline) {
    if (trials->activation_count < schedule->group_count) {
        trials->activation_count = schedule->group_count;
        trials->activations =
            must_realloc(trials->activations, (size_t)schedule->group_count * sizeof(double));
    }
    schedule_memory_peaks(schedule, timeline, trials->activations);
    for (int g = 0; g < schedule->group_count; g++)
        trials->activations[g] -= schedule->groups[g].static_bytes;
}

/* Seconds of the plan's step, its first `micro_batches` simulated and the rest at their pace; INFINITY when
   that is not below `limit`. Leaves the activations. */
static double seconds_of(struct trials *trials, const struct plan *plan, int micro_batches, double limit) {
    struct plan shorter = *plan;
    struct timeline timeline = {0};
    int rest = plan->micro_batches - micro_batches;
    shorter.micro_batches = micro_batches;
    struct schedule *schedule = trials->space->system->build(&shorter);
    schedule_drop_instant(schedule);
    trials->operations += (schedule->justified ? 3 : 1) * schedule->op_count;
    double seconds = INFINITY;
    if (schedule_arrange_before(schedule, rest ? INFINITY : limit, &timeline)) {
        seconds = timeline.makespan;
        if (rest) seconds += rest * pace_of(schedule, &timeline, period_of(plan));
        read_activations(trials, schedule, &timeline);
    }
    timeline_free(&timeline);
    schedule_free(schedule);
    return seconds < limit ? seconds : INFINITY;
}

/* Activations of a thin model's step as the real one's would be: what one backward pass takes stays. */
static void thicken(struct trials *trials, const struct plan *plan, double part) {
    const struct known *known = known_of(trials, plan);
    for (int g = 0; g < known->groups; g++) {
        double kept = fmax(0, trials->activations[g] - known->backward[g]);
        trials->activations[g] += kept / part - kept;
    }
}

double try_short(struct trials *trials, struct plan *plan, double limit) {
    struct point point;
    struct model model;
    choose_state(trials, plan, NULL, &plan->memory);
    int layers = thin_layers(trials, plan);
    double part = (double)layers / plan->point->model->layers, most = limit * plan->sequences;
    struct plan thin = part < 1 ? thin_plan(plan, layers, &point, &model) : *plan;
    double seconds = seconds_of(trials, &thin, short_step(plan), most * part) / part;
    if (seconds < INFINITY && part < 1) thicken(trials, plan, part);
    return per_sequence(plan, seconds);
}

double try_whole(struct trials *trials, struct plan plan) {
    double limit = trials->best * plan.sequences;
    struct memory chosen;
    choose_state(trials, &plan, NULL, &plan.memory); /* what cannot win with the quickest never can */
    for (int round = 0; round < 3; round++) { /* gradients of another precision may change what overlaps */
        double seconds = seconds_of(trials, &plan, plan.micro_batches, limit);
        if (seconds == INFINITY) return 0;
        if (choose_state(trials, &plan, trials->activations, &chosen) == INFINITY) break;
        if (memcmp(&chosen, &plan.memory, sizeof chosen) == 0) {
            trials->best = per_sequence(&plan, seconds);
            trials->best_plan = plan;
            return 0;
        }
        plan.memory = chosen;
    }
    return load_of(trials, &plan, leanest_state(trials));
}

static double try_new_plan(struct trials *trials, struct plan plan) {
    const struct bound bound = known_of(trials, &plan)->bound;
    double flattery = trials->space->order_open ? FLATTERY : 1;
    if (bound.bytes > trials->space->usable) return bound.bytes / trials->space->usable;
    if (per_sequence(&plan, bound.seconds) >= trials->best) return 0;
    if (short_step(&plan) < plan.micro_batches || thin_layers(trials, &plan) < plan.point->model->layers) {
        struct memory ignored;
        if (try_short(trials, &plan, flattery * trials->best) == INFINITY) return 0;
        if (choose_state(trials, &plan, trials->activations, &ignored) == INFINITY)
            return load_of(trials, &plan, leanest_state(trials));
    }
    return try_whole(trials, plan);
}

/* What was tried once is no better the second time. */
double try_plan(struct trials *trials, struct plan plan) {
    struct entry *entry = entry_of(trials, &plan);
    for (struct tried *tried = entry->tried; tried; tried = tried->next)
        if (memcmp(&tried->order, &plan.order, sizeof plan.order) == 0) return tried->load;
    struct tried *tried = must_alloc(sizeof *tried);
    *tried = (struct tried){entry->tried, plan.order, try_new_plan(trials, plan)};
    entry->tried = tried;
    return tried->load;
}
