/*
The ring's space: its layouts, what they need, and how fast they can be at best.
*/
#include "disagmoe/disagmoe.h"

#include "disagmoe/ring.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

static int replica_gpus(const struct parallel *parallel) {
    return parallel->groups * (parallel->attn_gpus + parallel->ffn_gpus);
}

static int at_least_one(int value) {
    return value ? value : 1;
}

/* The keys of a ring; those of pipelined systems are ignored. */
static struct parallel own_keys(const struct parallel *given) {
    return (struct parallel){.groups = given->groups,
                             .attn_gpus = given->attn_gpus,
                             .ffn_gpus = given->ffn_gpus,
                             .attn_nics = given->attn_nics,
                             .ffn_nics = given->ffn_nics,
                             .cp = at_least_one(given->cp)};
}

static bool is_whole(const struct parallel *given) {
    return given->groups && given->attn_gpus && given->ffn_gpus;
}

/* ---- sizes ------------------------------------------------------------------------------------------- */

/* attn_key: the key that says how many A-GPUs there are. */
static void check_gpus(const struct plan *plan, const char *attn_key, struct errors *errors) {
    const struct parallel *parallel = &plan->parallel;
    int gpus = cluster_gpus(plan->point->cluster);
    bool one = parallel->groups == 1;
    if ((int64_t)parallel->groups * ((int64_t)parallel->attn_gpus + parallel->ffn_gpus) <= gpus) return;
    errors_add(errors, NULL,
               one && parallel->ffn_gpus == 1    ? attn_key
               : one && parallel->attn_gpus == 1 ? "parallel.ffn_gpus"
                                                 : "parallel.groups",
               "found %d groups of %d + %d GPUs; at most the cluster's %d GPUs are allowed", parallel->groups,
               parallel->attn_gpus, parallel->ffn_gpus, gpus);
}

static bool size(struct plan *plan, struct errors *errors) {
    const struct point *point = plan->point;
    struct parallel *parallel = &plan->parallel;
    int before = errors->count;
    parallel->groups = at_least_one(parallel->groups);
    parallel->cp = at_least_one(parallel->cp);
    const char *attn_key = parallel->attn_gpus ? "parallel.attn_gpus" : "parallel.cp";
    if (!parallel->attn_gpus) parallel->attn_gpus = parallel->cp;
    parallel->ffn_gpus = at_least_one(parallel->ffn_gpus);
    if (parallel->groups > point->model->layers)
        errors_add(errors, NULL, "parallel.groups", "found %d; at most the model's %d layers are allowed",
                   parallel->groups, point->model->layers);
    if (parallel->ffn_gpus > point->model->moe.experts)
        errors_add(errors, NULL, "parallel.ffn_gpus", "found %d; at most the model's %d experts are allowed",
                   parallel->ffn_gpus, point->model->moe.experts);
    check_gpus(plan, attn_key, errors);
    if (!plan_check_cp(plan, parallel->attn_gpus, "attn_gpus", errors) || errors->count > before)
        return false;
    plan_size(plan, replica_gpus(parallel), parallel->attn_gpus);
    while (!placement_fits(plan, plan->replicas > 1 ? NULL : errors) && plan->replicas > 1)
        plan_resize(plan, plan->replicas - 1, replica_gpus(parallel), parallel->attn_gpus);
    return errors->count == before;
}

static bool settle(struct plan *plan, struct errors *errors) {
    struct ring_placement placement;
    struct arena *arena = arena_new();
    placement_divide_nics(plan);
    bool placed = placement_make(plan, arena, &placement, errors);
    arena_free(arena);
    return placed;
}

static struct sides sides(const struct plan *plan, int group, struct arena *arena) {
    struct ring_placement placement;
    struct errors errors = {0};
    placement_make(plan, arena, &placement, &errors); /* settle has seen to it */
    assert(errors.count == 0);
    bool returns = plan->order.without & WITHOUT_FUSED_COMBINE;
    int next = returns ? group : (group + 1) % plan->parallel.groups;
    return (struct sides){placement.attention[group], placement.ffn[group], placement.attention[next]};
}

/* ---- layouts ----------------------------------------------------------------------------------------- */

struct list {
    const struct point *point;
    struct parallel *found;
    int count, capacity;
};

static bool is_open_to(int given, int value) {
    return !given || given == value;
}

/* Every cp that divides the attention side and the sequence. */
static void add_split(struct list *list, struct parallel one) {
    const struct point *point = list->point;
    for (int cp = 1; cp <= one.attn_gpus; cp++) {
        bool fits = one.attn_gpus % cp == 0 && (cp == 1 || point->seq_len % (2 * cp) == 0);
        if (!fits || !is_open_to(point->parallel.cp, cp)) continue;
        one.cp = cp;
        if (list->count < list->capacity) list->found[list->count] = one;
        list->count++;
    }
}

/* Rings of p groups of `total` GPUs: every split A:F. */
static void add_rings(struct list *list, int p, int total) {
    const struct parallel *given = &list->point->parallel;
    for (int m = 1; m < total; m++) {
        struct parallel one = {.groups = p, .attn_gpus = m, .ffn_gpus = total - m};
        one.attn_nics = given->attn_nics;
        one.ffn_nics = given->ffn_nics;
        if (is_open_to(given->attn_gpus, m) && is_open_to(given->ffn_gpus, total - m) &&
            one.ffn_gpus <= list->point->model->moe.experts)
            add_split(list, one);
    }
}

/* All rings that leave less than a replica's group a GPU idle: p groups, r replicas, as large as they can be.
 */
static int layouts(const struct point *point, struct parallel *found, int capacity) {
    struct list list = {point, found, 0, capacity};
    const struct parallel *given = &point->parallel;
    int gpus = cluster_gpus(point->cluster), layers = point->model->layers;
    if (is_whole(given)) {
        if (capacity) found[0] = own_keys(given);
        return 1;
    }
    for (int p = 1; p <= gpus / 2 && p <= layers; p++) {
        if (!is_open_to(given->groups, p)) continue;
        if (given->attn_gpus && given->ffn_gpus) {
            if (p * (given->attn_gpus + given->ffn_gpus) <= gpus)
                add_rings(&list, p, given->attn_gpus + given->ffn_gpus);
            continue;
        }
        for (int r = 1, before = 0; gpus / p / r >= 2; r++) {
            int total = gpus / p / r;
            if (total == before) continue; /* the same ring with GPUs idle */
            before = total;
            add_rings(&list, p, total);
        }
    }
    return list.count;
}

/* ---- bounds ------------------------------------------------------------------------------------------ */

/* One micro-batch alone, as soon as each operation can be: seconds from its first operation's start. Nothing
   that waits for an operation can end sooner behind it than here. */
struct trip {
    double *due;            /* (layers) the layer's input begins to arrive on its group */
    double *attention;      /* attention begins */
    double *dispatched;     /* dispatch begins */
    double *ffn;            /* the feed-forward part begins */
    double *ffn_back;       /* its backward pass has ended */
    double *attention_back; /* attention's has */
    double whole;
};

static bool sends_again(const struct ring *ring, int layer) {
    struct recompute recompute = ring_recompute(ring, layer);
    return ring->plan->memory.expert_input == INPUT_RESEND ||
           (recompute.attention == ATTENTION_FULL && recompute.ffn == FFN_FULL);
}

static double last_combine(const struct ring *ring) {
    double seconds = 0;
    for (int i = 0; i < ring->head_count; i++) seconds += ring->last_combine[i].seconds;
    return seconds;
}

static double combine_of(const struct ring *ring, int layer) {
    return layer == ring->layers - 1 ? last_combine(ring) : ring->cost[layer].combine.seconds;
}

/* Seconds of the hop behind a layer's combine. */
static double hop_of(const struct ring *ring, int layer) {
    return ring_hops(ring, layer) ? ring->hop[layer % ring->p].seconds : 0;
}

/* Seconds in which a layer's output comes to the A-group of the next, or its gradient leaves that. */
static double arrival_of(const struct ring *ring, int layer) {
    return ring_hops(ring, layer) ? hop_of(ring, layer) : ring->cost[layer].combine.seconds;
}

/* Backward through one layer whose output's gradient is there at `now`; returns when its input's is. */
static double back_through(const struct ring *ring, int l, double now, struct trip *trip) {
    const struct layer_cost *cost = &ring->cost[l];
    struct recompute recompute = ring_recompute(ring, l);
    double attention_again = cost->attention[PASS_RECOMPUTE], ffn_again = cost->ffn[PASS_RECOMPUTE];
    double restored = now, experts = now;
    if (recompute.attention == ATTENTION_FULL) restored += attention_again;
    if (sends_again(ring, l)) experts = restored + cost->dispatch.seconds;
    if (recompute.ffn == FFN_FULL) experts += ffn_again;
    double begin = fmax(now + combine_of(ring, l), experts);
    if (recompute.ffn == FFN_ACTIVATION) begin += ffn_again;
    trip->ffn_back[l] = begin + cost->ffn[PASS_BACKWARD] + cost->ffn[PASS_WEIGHT];
    double back = trip->ffn_back[l] + cost->dispatch.seconds;
    if (recompute.attention != ATTENTION_FULL) back += attention_again;
    trip->attention_back[l] =
        fmax(back, restored) + cost->attention[PASS_BACKWARD] + cost->attention[PASS_WEIGHT];
    return trip->attention_back[l];
}

static struct trip trip_of(const struct ring *ring) {
    struct trip trip = {0};
    double **times[] = {&trip.due, &trip.attention, &trip.dispatched,
                        &trip.ffn, &trip.ffn_back,  &trip.attention_back};
    for (size_t i = 0; i < COUNT(times); i++)
        *times[i] = arena_alloc(ring->arena, (size_t)ring->layers * sizeof(double));
    double now = 0, due = 0;
    now += ring->embed[0];
    for (int l = 0; l < ring->layers; l++) {
        const struct layer_cost *cost = &ring->cost[l];
        trip.due[l] = due;
        trip.attention[l] = now;
        trip.dispatched[l] = now + cost->attention[PASS_FORWARD];
        trip.ffn[l] = trip.dispatched[l] + cost->dispatch.seconds;
        due = trip.ffn[l] + cost->ffn[PASS_FORWARD];
        now = due + (l == ring->layers - 1 ? ring->last_combine[0].seconds : cost->combine.seconds);
        if (ring_hops(ring, l)) due = now;
        now += hop_of(ring, l);
    }
    now += ring->head[0] + ring->head[1];
    for (int l = ring->layers - 1; l >= 0; l--) now = back_through(ring, l, now + hop_of(ring, l), &trip);
    trip.whole = now + ring->embed[1];
    return trip;
}

/* Of one side of a group: bytes that a micro-batch keeps at its turning point, and bytes × seconds that it
   takes of the memory in all. */
struct held {
    double bytes, byte_seconds;
};

static void hold(struct held *held, double bytes, double from, double to) {
    held->bytes += bytes;
    held->byte_seconds += bytes * (to - from);
}

/* Busy seconds a micro-batch of each lane of a group pair. */
struct load {
    double a, f, a_send, a_recv, f_send, f_recv;
};

static void add_layer(const struct ring *ring, int l, const struct trip *trip, struct load *load,
                      struct held *a, struct held *f) {
    const struct layer_cost *cost = &ring->cost[l];
    const struct layer_memory *memory = &ring->memory[l];
    double d = cost->dispatch.seconds, c = combine_of(ring, l);
    bool again = sends_again(ring, l);
    for (int pass = 0; pass < PASS_COUNT; pass++) {
        load->a += cost->attention[pass];
        load->f += cost->ffn[pass];
    }
    load->a_send += again ? 2 * d : d;
    load->f_recv += (again ? 2 * d : d) + c;
    load->a_recv += d;
    load->f_send += c + d;
    if (l > 0) { /* the output of the layer before arrives at this A-group, and its gradient leaves it */
        load->a_recv += arrival_of(ring, l - 1);
        load->a_send += arrival_of(ring, l - 1);
    }
    if (ring_hops(ring, l)) { /* combine returns, and the hop begins here */
        load->a_recv += c + hop_of(ring, l);
        load->a_send += c + hop_of(ring, l);
    }
    hold(a, memory->layer_input, trip->due[l], trip->attention_back[l]);
    hold(a, memory->attention, trip->attention[l], trip->attention_back[l]);
    hold(f, memory->ffn, trip->ffn[l], trip->ffn_back[l]);
    if (!again) hold(f, memory->expert_input, trip->dispatched[l], trip->ffn_back[l]);
}

/* What a layer's backward pass takes beside what micro-batches keep. */
static double attention_backward_bytes(const struct ring *ring, int l) {
    const struct layer_memory *memory = &ring->memory[l];
    return memory->full_attention - memory->attention + 2 * memory->gathered + memory->layer_input;
}
static double ffn_backward_bytes(const struct ring *ring, int l) {
    const struct layer_memory *memory = &ring->memory[l];
    return memory->full_ffn - memory->ffn + (sends_again(ring, l) ? 3 : 2) * memory->expert_input;
}

/* A step in which every micro-batch takes byte_seconds of the memory that static bytes leave lasts at least
   this long. */
static double memory_seconds(const struct ring *ring, struct held held, double static_bytes) {
    double left = plan_usable_memory(ring->plan->point) - static_bytes;
    if (left == INFINITY || held.byte_seconds == 0) return 0;
    return left > 0 ? ring->plan->micro_batches * held.byte_seconds / left : INFINITY;
}

static double busiest_lane(const struct ring *ring, struct load load) {
    if (ring->plan->order.without & WITHOUT_DUPLEX)
        return fmax(fmax(load.a, load.f), fmax(load.a_send + load.a_recv, load.f_send + load.f_recv));
    return fmax(fmax(fmax(load.a, load.f), fmax(load.a_send, load.a_recv)), fmax(load.f_send, load.f_recv));
}

static struct bound bound_of(const struct ring *ring) {
    const struct plan *plan = ring->plan;
    struct trip trip = trip_of(ring);
    struct bound bound = {.busy = trip.whole};
    int last = ring->layers - 1;
    for (int g = 0; g < ring->p; g++) {
        struct load load = {0};
        struct held a = {0}, f = {0};
        double a_static = ring_attention_need(ring, g).static_bytes;
        double f_static = ring_ffn_need(ring, g).static_bytes;
        for (int l = g; l < ring->layers; l += ring->p) add_layer(ring, l, &trip, &load, &a, &f);
        if (g == last % ring->p) { /* the first to turn round has all its layers' activations then */
            a.bytes += attention_backward_bytes(ring, last);
            f.bytes += ffn_backward_bytes(ring, last);
        }
        if (g == 0) load.a += ring->embed[0] + ring->embed[1];
        for (int i = 0; i < ring->head_count; i++)
            if (ring->heads[i] == g) load.f += ring->head[0] + ring->head[1];
        /* The first micro-batch has to come to the group, and the last one from it back to the first; the
           arrival of the layer before, in both directions, is the group's own, and so is the embedding. */
        double way = trip.due[g] + trip.whole - trip.attention_back[g];
        way -= g > 0 ? arrival_of(ring, g - 1) : ring->embed[1];
        bound.busy = fmax(bound.busy, way + busiest_lane(ring, load) * plan->micro_batches);
        bound.memory_seconds = fmax(bound.memory_seconds, memory_seconds(ring, a, a_static));
        bound.memory_seconds = fmax(bound.memory_seconds, memory_seconds(ring, f, f_static));
        bound.bytes = fmax(bound.bytes, fmax(a_static + a.bytes, f_static + f.bytes));
    }
    bound.seconds = fmax(bound.busy, bound.memory_seconds);
    return bound;
}

/* Computation alone, of the least group, on GPUs that stand as well as they can. */
static struct bound outline(const struct plan *plan) {
    const struct point *point = plan->point;
    const struct parallel *parallel = &plan->parallel;
    const struct model *model = point->model;
    int m = parallel->attn_gpus, n = parallel->ffn_gpus;
    if (point->table || point->cluster->slow_count) return (struct bound){0};
    int *gpus = must_alloc((size_t)(m + n) * sizeof *gpus);
    for (int i = 0; i < m; i++) gpus[i] = i;
    for (int i = 0; i < n; i++) gpus[m + i] = i;
    struct sides sides = {.attention = {.gpus = gpus, .count = m}, .ffn = {.gpus = gpus + m, .count = n}};
    double attention = 0, ffn = 0;
    for (int l = 0; l < model->layers;) { /* layers alike, one after the other */
        int first = l;
        struct layer_cost cost =
            plan_computation_cost(plan, l, plan_recompute(plan, l / parallel->groups), sides);
        while (l < model->layers && model_layer_is_moe(model, l) == model_layer_is_moe(model, first) &&
               model_layer_window(model, l) == model_layer_window(model, first) &&
               l / parallel->groups == first / parallel->groups)
            l++;
        for (int pass = 0; pass < PASS_COUNT; pass++) {
            attention += (l - first) * cost.attention[pass];
            ffn += (l - first) * cost.ffn[pass];
        }
    }
    free(gpus);
    double busiest = fmax(attention, ffn) / parallel->groups; /* the busiest group is no less busy */
    return (struct bound){.seconds = busiest * plan->micro_batches, .busy = busiest * plan->micro_batches};
}

static int groups(const struct plan *plan) {
    return 2 * plan->parallel.groups;
}

static struct bound needs(const struct plan *plan, const struct memory *states, int count,
                          struct need *needs) {
    struct ring *ring = ring_new(plan);
    struct bound bound = bound_of(ring);
    struct plan with_state = *plan;
    int p = ring->p;
    ring->plan = &with_state;
    for (int i = 0; i < count; i++, needs += 2 * p) {
        with_state.memory = memory_with_state(plan->memory, states[i]);
        for (int g = 0; g < p; g++) {
            needs[g] = ring_attention_need(ring, g);
            needs[p + g] = ring_ffn_need(ring, g);
            for (int l = g; l < ring->layers; l += p) {
                const struct layer_memory *memory = &ring->memory[l];
                struct need *a = &needs[g], *f = &needs[p + g];
                a->kept_bytes += memory->layer_input + memory->attention;
                f->kept_bytes += memory->ffn + (sends_again(ring, l) ? 0 : memory->expert_input);
                a->backward_bytes = fmax(a->backward_bytes, attention_backward_bytes(ring, l));
                f->backward_bytes = fmax(f->backward_bytes, ffn_backward_bytes(ring, l));
            }
        }
    }
    ring_free(ring);
    return bound;
}

const struct system disagmoe = {
    .name = "disagmoe",
    .title = "attention and experts on separate GPUs, AF-Pipe round a ring",
    .paper = "DisagMoE, arXiv 2605.11005",
    .executors = EXECUTOR_SIMULATOR | EXECUTOR_CPU,
    .searches_order = true,
    .uses_placement = true,
    .zero_max = 1,
    .is_whole = is_whole,
    .layouts = layouts,
    .size = size,
    .settle = settle,
    .sides = sides,
    .outline = outline,
    .groups = groups,
    .needs = needs,
    .build = ring_schedule,
};
