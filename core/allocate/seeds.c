/*
Seeds: the integer program of every shape that a point leaves open, and the plans its solutions stand for.

A shape's tables come from the cost model, for the tokens of one micro-batch of an even split: what
attention's and the feed-forward part's passes take on one GPU, two or three, and what dispatch and combine
take through one NIC, two or three. All passes of a training step count (forward, recomputation, backward),
and of the transfers those that share a lane: forward and backward have opposite directions, so a lane carries
two a layer, three where the experts' input is sent again.

What the roofline leaves out is said in README ("Allocation"): with another number of GPUs a micro-batch has
more or fewer tokens, but launches, weights read and the constant time a layer are those of the even split;
transfers have the NVLink bytes of the even split; micro-batches in flight are taken to be one for each group,
whole, which is what memory has to hold.
*/
#include "allocate/allocate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What a search looks at before the last allocation is known. */
struct shape {
    const struct system *system;
    const struct point *point;
    struct plan even; /* sized and settled, the GPUs divided evenly */
    struct sides sides;
    int total;      /* GPUs of a group, both sides and idle ones */
    int layers;     /* of the fullest group */
    double waiting; /* micro-batches held for each that Little's law says */
    int most_ffn;   /* experts bound it */
};

/* ---- tables ------------------------------------------------------------------------------------------ */

static double sum_of(const double passes[PASS_COUNT]) {
    double sum = 0;
    for (int pass = 0; pass < PASS_COUNT; pass++) sum += passes[pass];
    return sum;
}

static struct recompute recompute_of(const struct plan *plan, int layer) {
    return plan_recompute(plan, layer / plan->parallel.groups);
}

static bool is_like(const struct plan *plan, int a, int b) {
    const struct model *model = plan->point->model;
    struct recompute x = recompute_of(plan, a), y = recompute_of(plan, b);
    return model_layer_is_moe(model, a) == model_layer_is_moe(model, b) &&
           model_layer_window(model, a) == model_layer_window(model, b) && x.attention == y.attention &&
           x.ffn == y.ffn;
}

/* Of how many layers a layer is the first of its kind; 0: it is not the first. */
static int layers_like(const struct plan *plan, int layer) {
    int count = 0;
    for (int l = 0; l < plan->point->model->layers; l++) {
        if (!is_like(plan, l, layer)) continue;
        if (l < layer) return 0;
        count++;
    }
    return count;
}

static struct layer_cost cost_with(const struct plan *plan, int layer, struct sides sides, int ffn_gpus,
                                   const int *gpus) {
    sides.ffn = (struct side){.gpus = gpus, .count = ffn_gpus};
    return plan_computation_cost(plan, layer, recompute_of(plan, layer), sides);
}

/* A table of costs holds for the groups that the manifest gives: what becomes of its feed-forward seconds
   with the plan's A-GPUs' tokens on n F-GPUs. 1 without a table. */
static double table_share(const struct shape *shape, const struct plan *plan, int n) {
    const struct parallel *given = &shape->point->parallel;
    if (!shape->point->table) return 1;
    return (double)plan->parallel.attn_gpus / given->attn_gpus * given->ffn_gpus / n;
}

/* Seconds of attention and of the feed-forward part on n GPUs, a layer on average. */
static void average_layer(const struct shape *shape, const struct plan *plan, double *attention, double *ffn,
                          struct arena *arena) {
    const struct model *model = shape->point->model;
    int *gpus = arena_alloc(arena, (size_t)shape->most_ffn * sizeof *gpus);
    for (int i = 0; i < shape->most_ffn; i++) gpus[i] = i;
    for (int layer = 0; layer < model->layers; layer++) {
        double part = (double)layers_like(plan, layer) / model->layers;
        if (part == 0) continue;
        for (int n = 1; n <= shape->most_ffn; n++) {
            struct layer_cost cost = cost_with(plan, layer, shape->sides, n, gpus);
            ffn[n - 1] += part * sum_of(cost.ffn) * table_share(shape, plan, n);
            if (n == 1) *attention += part * sum_of(cost.attention);
        }
    }
}

/* What the ends of the model add to the fullest group, as if its layers were that much longer. */
static void add_ends(const struct shape *shape, const struct plan *plan, double *attention, double *ffn) {
    double tokens = plan_tokens(plan), heads = shape->point->head == HEAD_ALL_FFN ? plan->parallel.groups : 1;
    double embed = plan_embed_cost(plan, false, tokens, 1) + plan_embed_cost(plan, true, tokens, 1);
    *attention += embed / shape->layers;
    for (int n = 1; n <= shape->most_ffn; n++) {
        double here = tokens * plan->parallel.attn_gpus / n / heads;
        double head = plan_head_cost(plan, false, here, 1) + plan_head_cost(plan, true, here, 1);
        ffn[n - 1] += head / shape->layers / (shape->point->table ? heads : 1);
    }
}

static bool sends_again(const struct memory *memory) {
    return memory->expert_input == INPUT_RESEND ||
           (memory->recompute.attention == ATTENTION_FULL && memory->recompute.ffn == FFN_FULL);
}

/* Of all copies, those that leave their node. */
static double nic_part(const struct shape *shape) {
    const struct sides *sides = &shape->sides;
    int node = shape->point->cluster->gpus_per_node;
    double inside = 0;
    for (int i = 0; i < sides->attention.count; i++)
        for (int j = 0; j < sides->ffn.count; j++)
            inside += sides->attention.gpus[i] / node == sides->ffn.gpus[j] / node;
    return 1 - inside / sides->attention.count / sides->ffn.count;
}

/* Bytes of one dispatch of the even split's micro-batch, a layer on average. */
static double dispatch_bytes(const struct shape *shape, const struct plan *plan) {
    const struct model *model = shape->point->model;
    double copies = 0;
    for (int layer = 0; layer < model->layers; layer++) copies += model_copies(model, layer);
    return copies / model->layers * plan_tokens(plan) * plan->parallel.attn_gpus * model_hidden_bytes(model);
}

/* Seconds of one transfer through a number of NICs. */
static double transfer_seconds(const struct shape *shape, const struct plan *plan, int nics) {
    const struct cluster *cluster = shape->point->cluster;
    const struct parallel *parallel = &plan->parallel;
    if (shape->point->table) {
        struct cost_table scaled =
            allocation_table(shape->point, parallel->attn_gpus, parallel->ffn_gpus, nics);
        return fmax(scaled.dispatch_s, scaled.combine_s);
    }
    double bytes = dispatch_bytes(shape, plan), part = nic_part(shape);
    int fewer = parallel->attn_gpus < parallel->ffn_gpus ? parallel->attn_gpus : parallel->ffn_gpus;
    double nic = part * bytes / nics * cluster->spine.oversubscription / cluster->rates[RATE_NIC_EXCHANGE];
    double nvlink = (1 - part) * bytes / fewer / cluster->rates[RATE_NVLINK_EXCHANGE];
    return cluster->nic.latency_s + fmax(nic, nvlink);
}

/* ---- memory ------------------------------------------------------------------------------------------ */

/* What the GPUs of a side hold at most, of all groups. */
static struct need fullest(const struct need *needs, int first, int count) {
    struct need most = {0};
    for (int g = first; g < first + count; g++) {
        most.static_bytes = fmax(most.static_bytes, needs[g].static_bytes);
        most.kept_bytes = fmax(most.kept_bytes, needs[g].kept_bytes);
        most.backward_bytes = fmax(most.backward_bytes, needs[g].backward_bytes);
    }
    return most;
}

static void needs_of(const struct shape *shape, const struct plan *plan, struct need sides[2]) {
    int groups = shape->system->groups(plan);
    struct need *needs = must_alloc((size_t)groups * sizeof *needs);
    shape->system->needs(plan, &plan->memory, 1, needs);
    sides[0] = fullest(needs, 0, groups / 2);
    sides[1] = fullest(needs, groups / 2, groups / 2);
    free(needs);
}

/* Experts of the fullest of n GPUs. */
static double experts_on(const struct shape *shape, int n) {
    return ceil((double)shape->point->model->moe.experts / n);
}

/* The simulator's schedules hold about so many times what Little's law says; and at least. The best plans
   fill the memory to the brim, so both are solved for. */
static const double waiting[] = {1.25, 0.9};

/* Micro-batches that a group's GPUs hold at a time, each with what it keeps and with what a pass takes beside
   it. By Little's law as many are under way as one's way through the ring takes longer than the busiest group
   is at one, and those that wait; no more than an order that is given lets in. */
static double held_micro_batches(const struct shape *shape, const struct plan *plan,
                                 const struct allocation_problem *problem) {
    const struct order *order = &plan->order;
    const struct parallel *parallel = &plan->parallel;
    double attention = problem->attn_seconds[parallel->attn_gpus - 1];
    double ffn = problem->ffn_seconds[parallel->ffn_gpus - 1];
    double lane = problem->attn_nic_seconds[problem->nics > 1 ? problem->nics / 2 - 1 : 0];
    double way = shape->point->model->layers * (attention + ffn + 2 * lane);
    double under_way = shape->waiting * way / (shape->layers * fmax(lane, fmax(attention, ffn)));
    if (order->wave && order->waves_in_flight)
        under_way = fmin(under_way, order->wave * order->waves_in_flight);
    return fmax(1, fmin(under_way, plan->micro_batches));
}

/* Static bytes of the feed-forward side are a part that all its GPUs hold and one for each expert: two plans
   tell them apart. */
static void fill_memory(const struct shape *shape, const struct plan *plan,
                        struct allocation_problem *problem, struct arena *arena) {
    struct need at[2], fewer[2];
    struct plan less = *plan;
    int m = plan->parallel.attn_gpus, n = plan->parallel.ffn_gpus;
    double held = held_micro_batches(shape, plan, problem);
    needs_of(shape, plan, at);
    less.parallel.ffn_gpus = n > 1 ? n / 2 : 1;
    less.parallel.attn_nics = less.parallel.ffn_nics = NICS_SHARED;
    needs_of(shape, &less, fewer);
    double more_experts = experts_on(shape, less.parallel.ffn_gpus) - experts_on(shape, n);
    double an_expert = more_experts > 0 ? (fewer[1].static_bytes - at[1].static_bytes) / more_experts : 0;
    double *attention = arena_alloc(arena, (size_t)problem->most_attn_gpus * sizeof *attention);
    double *ffn = arena_alloc(arena, (size_t)problem->most_ffn_gpus * sizeof *ffn);
    for (int i = 0; i < problem->most_attn_gpus; i++) attention[i] = at[0].static_bytes;
    for (int i = 0; i < problem->most_ffn_gpus; i++)
        ffn[i] = at[1].static_bytes + an_expert * (experts_on(shape, i + 1) - experts_on(shape, n));
    problem->usable = plan_usable_memory(shape->point);
    problem->attn_static = attention;
    problem->ffn_static = ffn;
    problem->attn_kept = held * (at[0].kept_bytes + at[0].backward_bytes);
    problem->ffn_kept = held * (at[1].kept_bytes + at[1].backward_bytes) * n / m;
}

/* ---- tables of costs --------------------------------------------------------------------------------- */

struct cost_table allocation_table(const struct point *point, int attn_gpus, int ffn_gpus, int nics) {
    const struct parallel *given = &point->parallel;
    struct cost_table table = *point->table;
    double tokens = (double)attn_gpus / given->attn_gpus, experts = tokens * given->ffn_gpus / ffn_gpus;
    int a_nics = given->attn_nics > 0 ? given->attn_nics : given->attn_gpus;
    int f_nics = given->ffn_nics > 0 ? given->ffn_nics : given->ffn_gpus;
    double through = tokens * (a_nics < f_nics ? a_nics : f_nics) / nics;
    double *seconds[] = {&table.ffn_fwd_s, &table.ffn_bwd_s, &table.ffn_wgrad_s, &table.head_fwd_s,
                         &table.head_bwd_s};
    for (size_t i = 0; i < COUNT(seconds); i++) *seconds[i] *= experts;
    table.dispatch_s *= through;
    table.combine_s *= through;
    return table;
}

/* ---- one shape ----------------------------------------------------------------------------------------- */

static int divisor_below(int total, int cp) {
    int half = total / 2 / cp * cp;
    return half ? half : cp;
}

/* The even split: sized, its NICs divided, its sides known. False where it is impossible. */
static bool shape_place(struct shape *shape, const struct parallel *parallel, int placement,
                        struct arena *arena, struct errors *errors) {
    const struct point *point = shape->point;
    int cp = parallel->cp, m = divisor_below(shape->total, cp), n = shape->total - m;
    if (n > shape->most_ffn) n = shape->most_ffn;
    shape->even =
        (struct plan){.point = point,
                      .parallel = {.groups = parallel->groups, .attn_gpus = m, .ffn_gpus = n, .cp = cp},
                      .memory = point->memory,
                      .order = point->order,
                      .placement = placement};
    if (n < 1 || !shape->system->size(&shape->even, errors) || !shape->system->settle(&shape->even, errors))
        return false;
    shape->sides = shape->system->sides(&shape->even, 0, arena);
    shape->layers = (point->model->layers + parallel->groups - 1) / parallel->groups;
    return true;
}

/* Tables and roofline for the levers of `plan`, which is the shape's even split with them. */
static void fill_seed(const struct shape *shape, const struct plan *plan, struct seed *seed,
                      struct arena *arena) {
    const struct point *point = shape->point;
    const struct cluster *cluster = point->cluster;
    const struct parallel *parallel = &plan->parallel;
    int m = parallel->attn_gpus, n = parallel->ffn_gpus, blocks = parallel->groups * plan->replicas;
    int nics = cluster->nodes * cluster->nics_per_node / blocks, most_attn = shape->total - 1;
    double sequences = (double)m / parallel->cp * point->micro_batch_size, attention = 0;
    double *ffn = arena_alloc(arena, (size_t)shape->most_ffn * sizeof *ffn);
    average_layer(shape, plan, &attention, ffn, arena);
    int lane = sends_again(&plan->memory) ? 3 : 2;

    struct roofline roofline = roofline_relaxed(point, sequences);
    roofline.attn_flops *= 3; /* backward has twice the FLOPs of forward */
    roofline.ffn_flops *= 3;
    roofline.attn_flops_per_s = roofline.attn_flops / (attention * m);
    roofline.ffn_flops_per_s = roofline.ffn_flops / (ffn[n - 1] * n);
    /* Of one NIC all in all: with what stays in a node, the latency, the NVLink bytes. */
    roofline.bytes = lane * dispatch_bytes(shape, plan);
    roofline.nic_bytes_per_s = roofline.bytes / (lane * transfer_seconds(shape, plan, 1));
    roofline.gpus = shape->total;
    roofline.nics = nics;
    seed->roofline = roofline;
    seed->even_attn_gpus = m;

    add_ends(shape, plan, &attention, ffn);
    struct allocation_problem *problem = &seed->problem;
    double *attn_seconds = arena_alloc(arena, (size_t)most_attn * sizeof(double));
    double *nic_seconds = arena_alloc(arena, (size_t)(nics + 1) * sizeof(double));
    for (int i = 0; i < most_attn; i++) attn_seconds[i] = attention * m / (i + 1);
    for (int i = 0; i < nics; i++) nic_seconds[i] = lane * transfer_seconds(shape, plan, i + 1);
    *problem = (struct allocation_problem){.gpus = shape->total,
                                           .nics = nics,
                                           .most_attn_gpus = most_attn,
                                           .most_ffn_gpus =
                                               shape->most_ffn < most_attn ? shape->most_ffn : most_attn,
                                           .attn_seconds = attn_seconds,
                                           .ffn_seconds = ffn,
                                           .attn_nic_seconds = nic_seconds,
                                           .ffn_nic_seconds = nic_seconds,
                                           .nodes = cluster->nodes,
                                           .gpus_per_node = cluster->gpus_per_node,
                                           .nics_per_node = cluster->nics_per_node,
                                           .blocks = blocks,
                                           .mixed = plan->placement == PLACEMENT_MIXED,
                                           .flops = roofline.attn_flops + roofline.ffn_flops,
                                           .peak_flops = roofline.peak_flops,
                                           .multiple = parallel->cp};
}

/* The slower side of the fullest group for each micro-batch but one, and that one's way through all layers:
   computations one after the other, two transfers forward and two or three backward. */
double seed_predict(const struct seed *seed, const struct plan *plan) {
    const struct allocation_problem *problem = &seed->problem;
    const struct parallel *parallel = &plan->parallel;
    int nics = parallel->attn_nics < parallel->ffn_nics ? parallel->attn_nics : parallel->ffn_nics;
    if (!problem->attn_seconds) return NAN;
    if (nics == NICS_SHARED) nics = problem->nics / 2 > 0 ? problem->nics / 2 : 1;
    if (parallel->attn_gpus > problem->most_attn_gpus || parallel->ffn_gpus > problem->most_ffn_gpus ||
        nics > problem->nics)
        return INFINITY;
    double attention = problem->attn_seconds[parallel->attn_gpus - 1];
    double ffn = problem->ffn_seconds[parallel->ffn_gpus - 1], lane = problem->attn_nic_seconds[nics - 1];
    int layers = plan->point->model->layers, fullest = (layers + parallel->groups - 1) / parallel->groups;
    double slower = fmax(lane, fmax(attention, ffn)), way = layers * (attention + ffn + 2 * lane);
    double scale = parallel->attn_gpus / seed->even_attn_gpus, interval = fullest * slower;
    const struct order *order = &plan->order; /* lets in the next micro-batch when one has left */
    if (order->wave && order->waves_in_flight)
        interval = fmax(interval, way / (order->wave * order->waves_in_flight));
    return scale * (way + (plan->micro_batches - 1) * interval) / plan->sequences;
}

/* The longest dispatch or combine of a settled plan where its GPUs and NICs stand. */
static double longest_transfer(const struct shape *shape, const struct plan *plan) {
    struct arena *arena = arena_new();
    int layer = shape->point->model->layers - 1;
    double longest = 0;
    for (int g = 0; g < plan->parallel.groups; g++) {
        struct sides sides = shape->system->sides(plan, g, arena);
        longest = fmax(longest, plan_dispatch_cost(plan, layer, sides).seconds);
        longest = fmax(longest, plan_combine_cost(plan, layer, sides, 1).seconds);
    }
    arena_free(arena);
    return longest;
}

static bool settle(const struct shape *shape, struct plan *plan) {
    struct errors errors = {0};
    bool good = shape->system->settle(plan, &errors);
    errors_free(&errors);
    return good;
}

/* The plan of the solution, and what the roofline predicts of it. Its NICs are divided anew where that makes
   the longest transfer shorter: how they fall on nodes is not in the program. False where the placement of
   GPUs does not allow it after all. */
static bool settle_seed(const struct shape *shape, struct seed *seed) {
    struct allocation a = seed->solution.allocation;
    struct plan *plan = &seed->plan;
    struct errors errors = {0};
    plan->parallel.attn_gpus = a.attn_gpus;
    plan->parallel.ffn_gpus = a.ffn_gpus;
    plan->parallel.attn_nics = plan->parallel.ffn_nics = 0;
    bool good = shape->system->size(plan, &errors);
    errors_free(&errors);
    struct plan divided = *plan;
    if (!good || !settle(shape, &divided)) return false;
    plan->parallel.attn_nics = a.attn_nics;
    plan->parallel.ffn_nics = a.ffn_nics;
    /* Equal ones differ in the last bits. */
    if (!settle(shape, plan) ||
        longest_transfer(shape, &divided) < longest_transfer(shape, plan) * (1 - 1e-9))
        *plan = divided;
    /* No schedule is quicker than the system's own bound, which knows what the tables leave out: where GPUs
       stand, and how long activations hold memory. */
    struct bound bound = plan_bound(shape->system, plan);
    if (bound.bytes > plan_usable_memory(shape->point)) return false;
    seed->predicted = fmax(seed_predict(seed, plan), bound.seconds / plan->sequences);
    return true;
}

/* No allocation of the shape is quicker, seconds per sequence. */
static double least_seconds(const struct shape *shape, const struct seed *seed) {
    const struct allocation_problem *problem = &seed->problem;
    double attention = problem->attn_seconds[0], ffn = INFINITY, even = seed->plan.parallel.attn_gpus;
    for (int n = 1; n <= problem->most_ffn_gpus; n++) ffn = fmin(ffn, n * problem->ffn_seconds[n - 1]);
    double both = (attention + ffn) / shape->total * shape->layers;
    double a_micro_batch = even / seed->plan.parallel.cp * shape->point->micro_batch_size;
    return both / (a_micro_batch * seed->plan.replicas);
}

/* ---- levers -------------------------------------------------------------------------------------------- */

#define MOST_LEVERS 24
#define MOST_STATES 5

/* What the point leaves open of recomputation and the experts' input, what takes least time first. */
static int list_levers(const struct point *point, struct memory *levers) {
    int count = 0;
    for (int resend = 0; resend <= 1; resend++)
        for (int ffn = FFN_NONE; ffn <= FFN_FULL; ffn++)
            for (int attention = ATTENTION_NONE; attention <= ATTENTION_FULL; attention++) {
                struct memory one = point->memory;
                bool open = !(point->memory_given & MEMORY_RECOMPUTE);
                if (!open && (ffn || attention)) continue;
                if (open) one.recompute = (struct recompute){attention, ffn, 0};
                if (point->memory_given & MEMORY_EXPERT_INPUT && resend != one.expert_input) continue;
                one.expert_input = resend;
                levers[count++] = one;
            }
    return count;
}

/* Gradients, moments, ZeRO and offload: the least intrusive first. */
static int list_states(const struct system *system, const struct point *point, struct memory *states) {
    const struct memory steps[MOST_STATES] = {
        {.zero = 0},
        {.zero = 1},
        {.moments = PRECISION_BF16, .zero = 1},
        {.grads = PRECISION_BF16, .moments = PRECISION_BF16, .zero = 1},
        {.grads = PRECISION_BF16, .moments = PRECISION_BF16, .zero = 1, .offload = 1}};
    int count = 0, given = point->memory_given;
    for (int i = 0; i < MOST_STATES; i++) {
        struct memory one = point->memory;
        if (!(given & MEMORY_GRADS)) one.grads = steps[i].grads;
        if (!(given & MEMORY_MOMENTS)) one.moments = steps[i].moments;
        if (!(given & MEMORY_ZERO))
            one.zero = steps[i].zero < system->zero_max ? steps[i].zero : system->zero_max;
        if (!(given & MEMORY_OFFLOAD)) one.offload = steps[i].offload;
        if (count == 0 || memcmp(&states[count - 1], &one, sizeof one) != 0) states[count++] = one;
    }
    return count;
}

/* Whether the point says all of memory, or its layout is whole: then what is not given has its default. */
static bool searches_memory(const struct system *system, const struct point *point) {
    return point->auto_memory || !system->is_whole(&point->parallel);
}

struct choices {
    struct memory levers[MOST_LEVERS], states[MOST_STATES];
    int lever_count, state_count;
};

static struct choices choices_of(const struct system *system, const struct point *point) {
    struct choices choices = {.levers = {point->memory}, .states = {point->memory}, 1, 1};
    if (!searches_memory(system, point)) return choices;
    choices.lever_count = list_levers(point, choices.levers);
    choices.state_count = list_states(system, point, choices.states);
    return choices;
}

struct priced {
    struct memory levers;
    double seconds; /* that no allocation is quicker than */
};

static int by_price(const void *a, const void *b) {
    const struct priced *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return memcmp(&x->levers, &y->levers, sizeof x->levers);
}

static bool has_memory(const struct shape *shape, struct seed *seed, struct memory memory,
                       struct arena *arena) {
    seed->plan.memory = memory;
    fill_memory(shape, &seed->plan, &seed->problem, arena);
    return allocation_has_memory(&seed->problem);
}

/* The problem with the quickest levers that leave memory for some allocation, and the least intrusive state
   that does. False: none do, or those that do are not below `limit` seconds per sequence. */
static bool choose_levers(const struct shape *shape, const struct choices *choices, double limit,
                          struct seed *seed, struct arena *arena) {
    struct priced list[MOST_LEVERS];
    struct arena *scratch = arena_new();
    for (int i = 0; i < choices->lever_count; i++) {
        *seed = (struct seed){.plan = shape->even};
        seed->plan.memory = choices->levers[i];
        fill_seed(shape, &seed->plan, seed, scratch);
        list[i] = (struct priced){choices->levers[i], least_seconds(shape, seed)};
    }
    qsort(list, (size_t)choices->lever_count, sizeof *list, by_price);
    bool found = false;
    for (int i = 0; i < choices->lever_count && list[i].seconds < limit && !found; i++) {
        const struct memory *states = choices->states, *leanest = &states[choices->state_count - 1];
        seed->plan.memory = list[i].levers;
        fill_seed(shape, &seed->plan, seed, scratch);
        if (!has_memory(shape, seed, memory_with_state(list[i].levers, *leanest), scratch)) continue;
        fill_seed(shape, &seed->plan, seed, arena);
        for (int s = 0; s < choices->state_count && !found; s++)
            found = has_memory(shape, seed, memory_with_state(list[i].levers, states[s]), arena);
    }
    arena_free(scratch);
    return found;
}

/* ---- all shapes ---------------------------------------------------------------------------------------- */

static int by_predicted(const void *a, const void *b) {
    const struct seed *x = a, *y = b;
    if (x->predicted != y->predicted) return x->predicted < y->predicted ? -1 : 1;
    return memcmp(&x->plan.parallel, &y->plan.parallel, sizeof x->plan.parallel);
}

struct hunt {
    const struct system *system;
    const struct point *point;
    struct choices choices;
    struct seeds *seeds;
    int most;
    double waiting;
};

static void keep_seed(struct hunt *hunt, const struct seed *seed) {
    struct seeds *seeds = hunt->seeds;
    if (seeds->count < hunt->most)
        seeds->list[seeds->count++] = *seed;
    else if (seed->predicted < seeds->list[seeds->count - 1].predicted)
        seeds->list[seeds->count - 1] = *seed;
    qsort(seeds->list, (size_t)seeds->count, sizeof *seeds->list, by_predicted);
}

/* What a seed has to come below. */
static double limit_of(const struct hunt *hunt) {
    const struct seeds *seeds = hunt->seeds;
    return seeds->count < hunt->most ? INFINITY : seeds->list[seeds->count - 1].predicted;
}

static void try_shape(struct hunt *hunt, int total, struct parallel parallel, int placement) {
    struct seeds *seeds = hunt->seeds;
    struct errors errors = {0};
    struct shape shape = {
        .system = hunt->system, .point = hunt->point, .total = total, .waiting = hunt->waiting};
    int experts = hunt->point->model->moe.experts;
    shape.most_ffn = total - parallel.cp < experts ? total - parallel.cp : experts;
    struct seed seed = {0};
    bool placed = shape.most_ffn > 0 && shape_place(&shape, &parallel, placement, seeds->arena, &errors);
    errors_free(&errors);
    if (!placed) return;
    seeds->shapes++;
    if (!choose_levers(&shape, &hunt->choices, limit_of(hunt), &seed, seeds->arena)) {
        if (!seeds->count)
            snprintf(seeds->why, sizeof seeds->why, "memory: no levers leave room on %d groups of %d GPUs",
                     parallel.groups, total);
        return;
    }
    seeds->problems++;
    char why[128];
    if (!allocation_solve(&seed.problem, &seed.solution, why, sizeof why)) {
        if (!seeds->count) snprintf(seeds->why, sizeof seeds->why, "%s", why);
        return;
    }
    seeds->solve_seconds = fmax(seeds->solve_seconds, seed.solution.solve_seconds);
    if (settle_seed(&shape, &seed)) keep_seed(hunt, &seed);
}

static bool is_open_to(int given, int value) {
    return !given || given == value;
}

/* cp that are powers of two, or the one that is given. */
static void try_groups(struct hunt *hunt, int p, int total) {
    const struct point *point = hunt->point;
    for (int cp = 1; cp < total; cp *= 2) {
        struct parallel parallel = {.groups = p, .cp = point->parallel.cp ? point->parallel.cp : cp};
        bool fits = parallel.cp == 1 || point->seq_len % (2 * parallel.cp) == 0;
        for (int placement = PLACEMENT_SPLIT; fits && placement <= PLACEMENT_MIXED; placement++)
            if (!(point->placement_given && placement != point->placement))
                try_shape(hunt, total, parallel, placement);
        if (point->parallel.cp) return;
    }
}

static void hunt_all(struct hunt *hunt) {
    const struct point *point = hunt->point;
    int gpus = cluster_gpus(point->cluster);
    for (int p = 1; p <= gpus / 2 && p <= point->model->layers; p++) {
        if (!is_open_to(point->parallel.groups, p)) continue;
        for (int r = 1, before = 0; gpus / p / r >= 2; r++) {
            int total = gpus / p / r;
            if (total != before) try_groups(hunt, p, total);
            before = total;
        }
    }
}

static bool has_plan(const struct seeds *seeds, const struct plan *plan) {
    for (int i = 0; i < seeds->count; i++)
        if (memcmp(&seeds->list[i].plan.parallel, &plan->parallel, sizeof plan->parallel) == 0 &&
            seeds->list[i].plan.placement == plan->placement)
            return true;
    return false;
}

/* In turn from both, each once. */
static void merge_seeds(struct seeds *seeds, const struct seeds lists[2]) {
    for (int i = 0; i < lists[0].count || i < lists[1].count; i++)
        for (int k = 0; k < 2; k++)
            if (i < lists[k].count && !has_plan(seeds, &lists[k].list[i].plan))
                seeds->list[seeds->count++] = lists[k].list[i];
    for (int k = 0; k < 2; k++) {
        seeds->shapes += lists[k].shapes;
        seeds->problems += lists[k].problems;
        seeds->solve_seconds = fmax(seeds->solve_seconds, lists[k].solve_seconds);
    }
    memcpy(seeds->why, lists[1].why, sizeof seeds->why);
}

struct seeds allocation_seeds(const struct system *system, const struct point *point, int most) {
    struct seeds seeds = {.arena = arena_new()}, lists[2];
    size_t half = (size_t)(most / 2 + 1);
    seeds.list = must_alloc(2 * half * sizeof *seeds.list);
    for (int k = 0; k < 2; k++) {
        lists[k] = (struct seeds){.list = must_alloc(half * sizeof *seeds.list),
                                  .arena = seeds.arena,
                                  .why = "GPUs: the cluster has too few for one group"};
        struct hunt hunt = {system, point, choices_of(system, point), &lists[k], (int)half, waiting[k]};
        hunt_all(&hunt);
    }
    merge_seeds(&seeds, lists);
    for (int k = 0; k < 2; k++) free(lists[k].list);
    return seeds;
}

struct seeds allocation_even_seeds(const struct system *system, const struct point *point) {
    struct seeds seeds = {.arena = arena_new(), .why = "GPUs: the cluster has too few for one group"};
    seeds.list = must_alloc(32 * sizeof *seeds.list);
    int gpus = cluster_gpus(point->cluster), cp = point->parallel.cp ? point->parallel.cp : 1;
    for (int p = 1; p <= gpus / 2 && p <= point->model->layers && seeds.count < 32; p *= 2) {
        if (!is_open_to(point->parallel.groups, p)) continue;
        struct errors errors = {0};
        struct parallel parallel = {.groups = p, .cp = cp};
        struct shape shape = {.system = system, .point = point, .total = gpus / p};
        shape.most_ffn = point->model->moe.experts;
        if (shape_place(&shape, &parallel, point->placement, seeds.arena, &errors))
            seeds.list[seeds.count++] = (struct seed){.plan = shape.even, .predicted = NAN};
        errors_free(&errors);
    }
    return seeds;
}

bool allocation_seed(const struct system *system, const struct plan *plan, struct seed *seed,
                     struct arena *arena, struct errors *errors) {
    const struct parallel *parallel = &plan->parallel;
    int experts = plan->point->model->moe.experts;
    struct shape shape = {.system = system, .point = plan->point, .waiting = waiting[0]};
    shape.total = cluster_gpus(plan->point->cluster) / (parallel->groups * plan->replicas);
    shape.most_ffn = shape.total - parallel->cp < experts ? shape.total - parallel->cp : experts;
    if (!shape_place(&shape, parallel, plan->placement, arena, errors)) return false;
    *seed = (struct seed){.plan = shape.even};
    seed->plan.memory = plan->memory;
    seed->plan.order = plan->order;
    fill_seed(&shape, &seed->plan, seed, arena);
    fill_memory(&shape, &seed->plan, &seed->problem, arena);
    char why[128];
    if (allocation_solve(&seed->problem, &seed->solution, why, sizeof why) && settle_seed(&shape, seed))
        return true;
    errors_add(errors, NULL, "parallel", "no allocation of %d groups: %s", parallel->groups, why);
    return false;
}

void seeds_free(struct seeds *seeds) {
    free(seeds->list);
    arena_free(seeds->arena);
    *seeds = (struct seeds){0};
}
