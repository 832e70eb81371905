/*
DisagMoE (arXiv 2605.11005): attention and experts on separate GPUs, tokens one way round a ring of groups.

    A0 ──dispatch──► F0 ──combine──► A1 ──dispatch──► F1 ──combine──► … ──► F(p−1) ──combine──► A0   (next
layer) ◄──────────────────────────── backward, in reverse ─────────────────────────────

Placement: group g of p holds layers g, g + p, g + 2p, …: attention (replicated) on its M A-GPUs, everything
feed-forward (experts ÷ N, the feed-forward norm, shared experts or a dense FFN replicated) on its N F-GPUs.
The embedding sits with A0; the output head with the F-group of the last layer, to which that layer's combine
goes. Combine goes straight to the next A-group: no point-to-point hop of its own. The residual stream rides
along (core/plan/block.c says how).

AF-Pipe: every worker has one compute lane; transfers hold a send and a receive lane and are stages of their
own. Which ready operation goes first is the policy below; the list-scheduler turns it into an order.

Policy. Micro-batches go round in waves of `wave`; at most wave × waves_in_flight of them are under way. An
operation's place is how far round its micro-batch's trip it is: forward layer l at l, backward layer l at 2L
− 1 − l.
- backward: backward passes first, then the older wave, then the earlier place;
- forward: the same with forward first;
- wave: the older wave first, a wave's passes in the order of their places.
*/
#include "disagmoe/disagmoe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct ring {
    const struct plan *plan;
    int p, m, n, layers;    /* groups, A-GPUs and F-GPUs of a group */
    int **a_gpus, **f_gpus; /* of each group in the modelled replica */
    int **a_all, **f_all;   /* of each group in all replicas: what shares replicated parameters */
    int **f_same;           /* GPUs with the same experts as the group's first F-GPU, one a replica */
    int *tied;              /* GPUs with a tied embedding: of A0 and of the head's F-group, in all replicas */
    struct layer_cost *cost;
    struct layer_memory *memory;
    double embed[2], head[2];
    struct arena *arena;
};

/* ---- placement --------------------------------------------------------------------------------------- */

static int replica_gpus(const struct parallel *parallel) {
    return parallel->groups * (parallel->attn_gpus + parallel->ffn_gpus);
}

/* First GPU of the F side when a node holds one component: the node behind the last A-GPU's. */
static int first_ffn_gpu(const struct plan *plan, int replicas) {
    int node = plan->point->cluster->gpus_per_node,
        a = replicas * plan->parallel.groups * plan->parallel.attn_gpus;
    return (a + node - 1) / node * node;
}

/* GPU number i of one side of group g of replica r. */
static int gpu_of(const struct ring *ring, int r, int g, bool ffn, int i) {
    const struct plan *plan = ring->plan;
    int m = ring->m, n = ring->n, block = r * ring->p + g;
    if (plan->placement == PLACEMENT_SPLIT)
        return ffn ? first_ffn_gpu(plan, plan->replicas) + block * n + i : block * m + i;
    /* Each run of M + N GPUs holds both components evenly mixed: A-GPU i stands where the i-th of M equal
     * parts ends. */
    int place = ffn ? 0 : (int)(((int64_t)(i + 1) * (m + n) + m - 1) / m) - 1;
    if (ffn)
        for (int seen = -1; seen < i; place++)
            if ((int64_t)(place + 1) * m / (m + n) == (int64_t)place * m / (m + n) && ++seen == i) break;
    return block * (m + n) + place;
}

/* GPUs of every group; the modelled replica is the one with the slowest GPU. */
static void place_side(struct ring *ring, bool ffn, int **here, int **all) {
    int replicas = ring->plan->replicas, count = ffn ? ring->n : ring->m, modelled = 0;
    const struct cluster *cluster = ring->plan->point->cluster;
    for (int g = 0; g < ring->p; g++) {
        all[g] = arena_alloc(ring->arena, (size_t)(replicas * count) * sizeof(int));
        for (int r = 0; r < replicas; r++)
            for (int i = 0; i < count; i++) all[g][r * count + i] = gpu_of(ring, r, g, ffn, i);
        for (int r = 0; r < replicas; r++)
            if (cluster_slowest(cluster, all[g] + r * count, count) <
                cluster_slowest(cluster, all[g] + modelled * count, count))
                modelled = r;
    }
    for (int g = 0; g < ring->p; g++) here[g] = all[g] + modelled * count;
}

static void place_ring(struct ring *ring) {
    size_t p = (size_t)ring->p;
    ring->a_gpus = arena_alloc(ring->arena, p * sizeof(int *));
    ring->f_gpus = arena_alloc(ring->arena, p * sizeof(int *));
    ring->a_all = arena_alloc(ring->arena, p * sizeof(int *));
    ring->f_all = arena_alloc(ring->arena, p * sizeof(int *));
    ring->f_same = arena_alloc(ring->arena, p * sizeof(int *));
    place_side(ring, false, ring->a_gpus, ring->a_all);
    place_side(ring, true, ring->f_gpus, ring->f_all);
    int a = ring->plan->replicas * ring->m, f = ring->plan->replicas * ring->n;
    ring->tied = arena_alloc(ring->arena, (size_t)(a + f) * sizeof(int));
    memcpy(ring->tied, ring->a_all[0], (size_t)a * sizeof(int));
    memcpy(ring->tied + a, ring->f_all[(ring->layers - 1) % ring->p], (size_t)f * sizeof(int));
    for (int g = 0; g < ring->p; g++) {
        ring->f_same[g] = arena_alloc(ring->arena, (size_t)ring->plan->replicas * sizeof(int));
        for (int r = 0; r < ring->plan->replicas; r++) ring->f_same[g][r] = ring->f_all[g][r * ring->n];
    }
}

static bool same_kind(const struct model *model, int a, int b) {
    return model_layer_is_moe(model, a) == model_layer_is_moe(model, b) &&
           model_layer_window(model, a) == model_layer_window(model, b);
}

static void price(struct ring *ring) {
    const struct plan *plan = ring->plan;
    const struct point *point = plan->point;
    double tokens = (double)point->micro_batch_size * point->seq_len;
    int last = (ring->layers - 1) % ring->p;
    for (int l = 0; l < ring->layers; l++) {
        int g = l % ring->p, next = (l + 1) % ring->p, like = l - ring->p;
        bool ends = l == ring->layers - 1;
        while (like >= 0 && !same_kind(point->model, l, like)) like -= ring->p;
        if (like >= 0 && !ends) { /* a layer of the same kind on the same groups costs the same */
            ring->cost[l] = ring->cost[like];
            ring->memory[l] = ring->memory[like];
            continue;
        }
        struct sides sides = {ring->a_gpus[g],    ring->m, ring->f_gpus[g], ring->n,
                              ring->a_gpus[next], ring->m};
        if (ends) {
            sides.next_gpus = ring->f_gpus[g];
            sides.next_count = ring->n;
        }
        ring->cost[l] = plan_layer_cost(plan, l, sides);
        ring->memory[l] = plan_layer_memory(plan, l, sides);
    }
    for (int pass = 0; pass < 2; pass++) {
        enum pass which = pass ? PASS_BACKWARD : PASS_FORWARD;
        ring->embed[pass] =
            plan_embed_cost(plan, which, tokens, cluster_slowest(point->cluster, ring->a_gpus[0], ring->m));
        ring->head[pass] = plan_head_cost(plan, which, tokens * ring->m / ring->n,
                                          cluster_slowest(point->cluster, ring->f_gpus[last], ring->n));
    }
}

static struct ring *ring_new(const struct plan *plan) {
    struct arena *arena = arena_new();
    struct ring *ring = arena_alloc(arena, sizeof *ring);
    *ring = (struct ring){.plan = plan,
                          .p = plan->parallel.groups,
                          .m = plan->parallel.attn_gpus,
                          .n = plan->parallel.ffn_gpus,
                          .layers = plan->point->model->layers,
                          .arena = arena};
    ring->cost = arena_alloc(arena, (size_t)ring->layers * sizeof *ring->cost);
    ring->memory = arena_alloc(arena, (size_t)ring->layers * sizeof *ring->memory);
    place_ring(ring);
    price(ring);
    return ring;
}

/* An embedding that the output head uses as well is one parameter with holders on both sides. */
static struct shard tied_shard(const struct ring *ring) {
    return (struct shard){model_embedding_parameters(ring->plan->point->model), ring->tied,
                          ring->plan->replicas * (ring->m + ring->n)};
}

/* What a GPU of each side of group g holds. The feed-forward norm is on both: the router's side and the
 * experts'. */
static int attention_shards(const struct ring *ring, int g, struct shard shards[2]) {
    const struct model *model = ring->plan->point->model;
    double shared = g == 0 && !model->tie_embeddings ? model_embedding_parameters(model) : 0;
    for (int l = g; l < ring->layers; l += ring->p)
        shared += model_attention_parameters(model) + model_router_parameters(model, l);
    shards[0] = (struct shard){shared, ring->a_all[g], ring->plan->replicas * ring->m};
    if (g > 0 || !model->tie_embeddings) return 1;
    shards[1] = tied_shard(ring);
    return 2;
}

static int ffn_shards(const struct ring *ring, int g, struct shard shards[3]) {
    const struct model *model = ring->plan->point->model;
    double shared = 0, experts = 0, here = ceil((double)model->moe.experts / ring->n);
    bool head = g == (ring->layers - 1) % ring->p;
    if (head) shared += model_head_parameters(model);
    for (int l = g; l < ring->layers; l += ring->p) {
        shared += model_shared_parameters(model, l) + model->hidden;
        if (model_layer_is_moe(model, l)) experts += here * model_expert_parameters(model);
    }
    shards[0] = (struct shard){shared, ring->f_all[g], ring->plan->replicas * ring->n};
    shards[1] = (struct shard){experts, ring->f_same[g], ring->plan->replicas};
    if (!head || !model->tie_embeddings) return 2;
    shards[2] = tied_shard(ring);
    return 3;
}

static struct need attention_need(const struct ring *ring, int g) {
    struct shard shards[2];
    int count = attention_shards(ring, g, shards);
    return (struct need){plan_static_bytes(ring->plan, shards, count),
                         plan_step_end(ring->plan, shards, count)};
}

static struct need ffn_need(const struct ring *ring, int g) {
    struct shard shards[3];
    int count = ffn_shards(ring, g, shards);
    return (struct need){plan_static_bytes(ring->plan, shards, count),
                         plan_step_end(ring->plan, shards, count)};
}

/* ---- the schedule ------------------------------------------------------------------------------------ */

/* Which of two ready operations goes first: smaller does. */
static int64_t urgency(const struct ring *ring, int micro_batch, bool backward, int layer) {
    const struct order *order = &ring->plan->order;
    int64_t wave = micro_batch / order->wave, place = backward ? 2 * ring->layers - 1 - layer : layer;
    int64_t first = 0;
    if (order->prefer == PREFER_BACKWARD) first = !backward;
    if (order->prefer == PREFER_FORWARD) first = backward;
    return ((first * (1 << 20) + wave) * (1 << 12) + place) * (1 << 20) + micro_batch;
}

static void set_urgency(struct schedule *schedule, int first, int last, int64_t urgency) {
    for (int op = first; op < last; op++) schedule->ops[op].priority = urgency;
}

/* A micro-batch's last operation on each group: the backward pass of the group's first layer. last[g] is of
   A-group g, last[p + g] of F-group g. */
static void add_micro_batch(struct schedule *schedule, const struct ring *ring, int m, int behind,
                            struct block *blocks, int *last) {
    int p = ring->p, last_ffn = p + (ring->layers - 1) % p;
    int at = schedule_compute(schedule, KIND_EMBED, PASS_FORWARD, -1, m, 0, ring->embed[0]);
    schedule_after(schedule, behind);
    schedule_priority(schedule, urgency(ring, m, false, 0));
    for (int l = 0; l < ring->layers; l++) {
        int g = l % p, next = l == ring->layers - 1 ? last_ffn : (l + 1) % p;
        blocks[l] = (struct block){.plan = ring->plan,
                                   .cost = &ring->cost[l],
                                   .memory = &ring->memory[l],
                                   .place = {g, p + g, next},
                                   .layer = l,
                                   .micro_batch = m};
        at = block_forward(schedule, &blocks[l], at);
        set_urgency(schedule, blocks[l].forward_first, blocks[l].forward_last, urgency(ring, m, false, l));
    }
    double hidden = ring->memory[0].layer_input * ring->m / ring->n;
    at = plan_add_head(schedule, last_ffn, m, at, ring->head, hidden);
    set_urgency(schedule, at - 1, at, urgency(ring, m, false, ring->layers - 1));
    set_urgency(schedule, at, at + 1, urgency(ring, m, true, ring->layers - 1));
    for (int l = ring->layers - 1; l >= 0; l--) {
        at = block_backward(schedule, &blocks[l], at);
        set_urgency(schedule, blocks[l].backward_first, blocks[l].backward_last, urgency(ring, m, true, l));
        last[l % p] = at; /* a later layer's is overwritten by an earlier one's */
        last[p + l % p] = blocks[l].ffn_backward;
    }
    last[0] = schedule_compute(schedule, KIND_EMBED, PASS_BACKWARD, -1, m, 0, ring->embed[1]);
    schedule_after(schedule, at);
    schedule_priority(schedule, urgency(ring, m, true, 0));
}

/* A group's step ends behind its last operation of every micro-batch. */
static void end_step(struct schedule *schedule, int group, int groups, struct step_end end, const int *last) {
    int *after = must_alloc((size_t)schedule->micro_batches * sizeof *after);
    for (int m = 0; m < schedule->micro_batches; m++) after[m] = last[m * groups + group];
    plan_add_step_end(schedule, group, end, after, schedule->micro_batches);
    free(after);
}

static struct schedule *build(const struct plan *plan) {
    struct ring *ring = ring_new(plan);
    int p = ring->p, groups = 2 * p, in_flight = plan->order.wave * plan->order.waves_in_flight;
    struct schedule *schedule = schedule_new(groups, ring->layers, plan->micro_batches);
    struct block *blocks = must_alloc((size_t)ring->layers * sizeof *blocks);
    int *last = must_alloc((size_t)plan->micro_batches * (size_t)groups * sizeof *last);
    for (int m = 0; m < plan->micro_batches; m++)
        add_micro_batch(schedule, ring, m, m >= in_flight ? last[(m - in_flight) * groups] : -1, blocks,
                        last + m * groups);
    for (int g = 0; g < p; g++) {
        struct need a = attention_need(ring, g), f = ffn_need(ring, g);
        schedule_group(schedule, g, ring->m, a.static_bytes, "A%d", g);
        schedule_group(schedule, p + g, ring->n, f.static_bytes, "F%d", g);
        end_step(schedule, g, groups, a.end, last);
        end_step(schedule, p + g, groups, f.end, last);
    }
    free(blocks);
    free(last);
    arena_free(ring->arena);
    return schedule;
}

/* ---- planning ---------------------------------------------------------------------------------------- */

static bool size(struct plan *plan, struct errors *errors) {
    const struct point *point = plan->point;
    const struct parallel *parallel = &plan->parallel;
    int before = errors->count, gpus = cluster_gpus(point->cluster);
    if (parallel->groups > point->model->layers)
        errors_add(errors, NULL, "parallel.groups", "found %d; at most the model's %d layers are allowed",
                   parallel->groups, point->model->layers);
    if (parallel->ffn_gpus > point->model->moe.experts)
        errors_add(errors, NULL, "parallel.ffn_gpus", "found %d; at most the model's %d experts are allowed",
                   parallel->ffn_gpus, point->model->moe.experts);
    if ((int64_t)parallel->groups * ((int64_t)parallel->attn_gpus + parallel->ffn_gpus) > gpus) {
        errors_add(errors, NULL, "parallel",
                   "found %d groups of %d + %d GPUs; at most the cluster's %d GPUs are allowed",
                   parallel->groups, parallel->attn_gpus, parallel->ffn_gpus, gpus);
        return false;
    }
    plan_size(plan, replica_gpus(parallel), parallel->attn_gpus);
    while (plan->placement == PLACEMENT_SPLIT &&
           first_ffn_gpu(plan, plan->replicas) + plan->replicas * parallel->groups * parallel->ffn_gpus >
               gpus) {
        if (plan->replicas == 1) {
            errors_add(errors, NULL, "placement",
                       "found split-nodes; %d A-GPUs and %d F-GPUs on nodes of their own do not fit the "
                       "cluster's %d nodes",
                       parallel->groups * parallel->attn_gpus, parallel->groups * parallel->ffn_gpus,
                       point->cluster->nodes);
            break;
        }
        plan_resize(plan, plan->replicas - 1, replica_gpus(parallel), parallel->attn_gpus);
    }
    return errors->count == before;
}

/* Exhaustive over the splits A:F of rings that use the whole cluster: p groups, r replicas, every M. */
static int layouts(const struct point *point, struct parallel *found, int capacity) {
    int count = 0, gpus = cluster_gpus(point->cluster);
    const struct parallel *given = &point->parallel;
    for (int p = given->groups ? given->groups : 1; p <= gpus / 2 && p <= point->model->layers; p *= 2) {
        for (int total = gpus / p; total >= 2; total /= 2)
            for (int m = 1; m < total; m++) {
                struct parallel one = {.groups = p, .attn_gpus = m, .ffn_gpus = total - m};
                if (given->attn_gpus && given->ffn_gpus) {
                    if (m > 1 || total != gpus / p) continue;
                    one.attn_gpus = given->attn_gpus;
                    one.ffn_gpus = given->ffn_gpus;
                }
                if (given->attn_gpus && one.attn_gpus != given->attn_gpus) continue;
                if (given->ffn_gpus && one.ffn_gpus != given->ffn_gpus) continue;
                if (one.ffn_gpus > point->model->moe.experts) continue;
                if (count < capacity) found[count] = one;
                count++;
            }
        if (given->groups) break;
    }
    return count;
}

/* Busy seconds a micro-batch of each lane of a group pair. */
struct load {
    double a, f, a_send, a_recv, f_send, f_recv;
};

static struct bound bound(const struct plan *plan) {
    struct ring *ring = ring_new(plan);
    struct bound bound = {0};
    double before = 0; /* the way to group g and, at the end, back from it */
    bool again = plan->memory.recompute == RECOMPUTE_FULL || plan->memory.expert_input == INPUT_RESEND;
    for (int g = 0; g < ring->p; g++) {
        struct load load = {0};
        double a_bytes = attention_need(ring, g).static_bytes, f_bytes = ffn_need(ring, g).static_bytes;
        double way = 0;
        for (int l = g; l < ring->layers; l += ring->p) {
            const struct layer_cost *cost = &ring->cost[l];
            const struct layer_memory *memory = &ring->memory[l];
            double a = 0, f = 0, d = cost->dispatch, c = cost->combine;
            for (int pass = 0; pass < PASS_COUNT; pass++) {
                a += cost->attention[pass];
                f += cost->ffn[pass];
            }
            load.a += a;
            load.f += f;
            load.a_send += again ? 2 * d : d;
            load.f_recv += (again ? 2 * d : d) + c;
            load.a_recv += d;
            load.f_send += c + d;
            if (l == g)
                way = cost->attention[PASS_FORWARD] + cost->ffn[PASS_FORWARD] +
                      cost->attention[PASS_BACKWARD] + cost->attention[PASS_WEIGHT] +
                      cost->ffn[PASS_BACKWARD] + cost->ffn[PASS_WEIGHT] + 2 * (c + d);
            /* The way of the previous group's combine ends and begins at this A-group. */
            if (l > 0) {
                load.a_recv += ring->cost[l - 1].combine;
                load.a_send += ring->cost[l - 1].combine;
            }
            if (l == ring->layers - 1) {
                load.f_send += c; /* the head's gradient leaves from this F-group */
                load.f += ring->head[0] + ring->head[1];
            }
            a_bytes += memory->layer_input + memory->attention;
            f_bytes += memory->ffn + (again ? 0 : memory->expert_input);
        }
        if (g == 0) load.a += ring->embed[0] + ring->embed[1];
        double busiest =
            fmax(fmax(fmax(load.a, load.f), fmax(load.a_send, load.a_recv)), fmax(load.f_send, load.f_recv));
        bound.seconds = fmax(bound.seconds, before + busiest * plan->micro_batches);
        bound.bytes = fmax(bound.bytes, fmax(a_bytes, f_bytes));
        before += way;
    }
    arena_free(ring->arena);
    return bound;
}

static int needs(const struct plan *plan, struct need *needs) {
    struct ring *ring = ring_new(plan);
    int p = ring->p;
    for (int g = 0; g < p; g++) {
        needs[g] = attention_need(ring, g);
        needs[p + g] = ffn_need(ring, g);
    }
    arena_free(ring->arena);
    return 2 * p;
}

const struct system disagmoe = {
    .name = "disagmoe",
    .title = "attention and experts on separate GPUs, AF-Pipe round a ring",
    .paper = "DisagMoE, arXiv 2605.11005",
    .executors = EXECUTOR_SIMULATOR | EXECUTOR_CPU,
    .searches_order = true,
    .uses_placement = true,
    .zero_max = 1,
    .layouts = layouts,
    .size = size,
    .bound = bound,
    .needs = needs,
    .build = build,
};
