/*
DisagMoE (arXiv 2605.11005): attention and experts on separate GPUs, tokens one way round a ring of groups.

    A0 ──dispatch──► F0 ──combine──► A1 ──dispatch──► F1 ──combine──► … ──► F(p−1) ──combine──► A0   (next
layer) ◄──────────────────────────── backward, in reverse ─────────────────────────────

Placement: group g of p holds layers g, g + p, g + 2p, …: attention (replicated) on its M A-GPUs, everything
feed-forward (experts ÷ N, the feed-forward norm, shared experts or a dense FFN replicated) on its N F-GPUs
(placement.h says where they stand). The embedding sits with A0; the output head with the F-group of the last
layer, to which that layer's combine goes, or, with "all-ffn", replicated on all F-groups, each of which takes
an equal part of the tokens. Combine goes straight to the next A-group: no point-to-point hop of its own. The
residual stream rides along (core/plan/block.c says how).

AF-Pipe: every worker has one compute lane; transfers hold a send and a receive lane and are stages of their
own. Which ready operation goes first is the policy below; the list-scheduler turns it into an order.

Policy. Micro-batches go round in waves of `wave`; at most wave × waves_in_flight of them are under way. An
operation's place is how far round its micro-batch's trip it is: forward layer l at l, backward layer l at 2L
− 1 − l.
- backward: backward passes first, then the older wave, then the earlier place;
- forward: the same with forward first;
- wave: the older wave first, a wave's passes in the order of their places.
A transfer needs two lanes at once. Greedy lanes take whatever can start; patient ones wait for the most
urgent. A justified order is what the list-scheduler finds under the policy, improved
(core/schedule/justify.c).

Parts that are off (order.without), to see what each is worth:
- fused-combine: combine returns to its own A-group, and the residual stream goes on from there point to
point, as between a pipeline's stages. The last layer's combine goes to the head all the same.
- duplex: a group sends or receives.
- interleaving: micro-batches go in rounds of as many as may be under way, all of a round forward, then all
backward, the next round behind it.
- waves: of two ready operations the earlier micro-batch's goes first, whatever their pass and place.
*/
#include "disagmoe/disagmoe.h"

#include "disagmoe/ring.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- placement --------------------------------------------------------------------------------------- */

static const struct side *side_of(const struct ring *ring, int replica, int g, bool ffn) {
    int block = replica * ring->p + g;
    return ffn ? &ring->placement.ffn[block] : &ring->placement.attention[block];
}

static int after(const struct ring *ring, int g) {
    return (g + 1) % ring->p;
}

static bool is_without(const struct ring *ring, enum without part) {
    return ring->plan->order.without & part;
}

/* The last layer's output goes to the head, where no A-group comes next. */
bool ring_hops(const struct ring *ring, int layer) {
    return is_without(ring, WITHOUT_FUSED_COMBINE) && ring->p > 1 && layer < ring->layers - 1;
}

static struct sides sides_of(const struct ring *ring, int replica, int g) {
    int next = is_without(ring, WITHOUT_FUSED_COMBINE) ? g : after(ring, g);
    return (struct sides){*side_of(ring, replica, g, false), *side_of(ring, replica, g, true),
                          *side_of(ring, replica, next, false)};
}

/* A side's GPUs in all replicas. */
static int *all_gpus(const struct ring *ring, int g, bool ffn) {
    int replicas = ring->plan->replicas, count = ffn ? ring->n : ring->m;
    int *all = arena_alloc(ring->arena, (size_t)(replicas * count) * sizeof(int));
    for (int r = 0; r < replicas; r++)
        memcpy(all + r * count, side_of(ring, r, g, ffn)->gpus, (size_t)count * sizeof(int));
    return all;
}

/* How long a replica takes for one layer of each group, more or less: replicas that stand differently on the
   nodes, or have slow GPUs, differ. */
static double slowness(const struct ring *ring, int replica) {
    double seconds = 0;
    int layer = ring->layers - 1;
    struct recompute none = {0};
    for (int g = 0; g < ring->p; g++) {
        struct layer_cost cost = plan_layer_cost(ring->plan, layer, none, sides_of(ring, replica, g));
        seconds += cost.attention[PASS_FORWARD] + cost.ffn[PASS_FORWARD] + cost.dispatch.seconds +
                   cost.combine.seconds;
    }
    return seconds;
}

/* Blocks that stand alike on nodes without slow GPUs are all equal. */
static bool replicas_are_alike(const struct ring *ring) {
    const struct cluster *cluster = ring->plan->point->cluster;
    int a = ring->m, f = ring->n, node = cluster->gpus_per_node, blocks = ring->placement.blocks;
    bool whole = ring->plan->placement == PLACEMENT_MIXED
                     ? (a + f) % node == 0 || node % (a + f) == 0
                     : (a % node == 0 || node % a == 0) && (f % node == 0 || node % f == 0);
    return ring->plan->replicas == 1 ||
           (cluster->slow_count == 0 && whole && blocks * (a + f) == cluster_gpus(cluster));
}

/* The step ends with a reduction over all replicas, so the slowest is modelled. */
static void choose_replica(struct ring *ring) {
    double slowest = -1;
    for (int r = 0; r < ring->plan->replicas && !replicas_are_alike(ring); r++) {
        double seconds = slowness(ring, r);
        if (seconds <= slowest) continue;
        slowest = seconds;
        ring->modelled = r;
    }
}

static void place_head(struct ring *ring) {
    bool all = ring->plan->point->head == HEAD_ALL_FFN;
    int replicas = ring->plan->replicas, per_group = replicas * ring->n, a = replicas * ring->m;
    ring->head_count = all ? ring->p : 1;
    ring->heads = arena_alloc(ring->arena, (size_t)ring->head_count * sizeof(int));
    int f = ring->head_count * per_group;
    ring->tied = arena_alloc(ring->arena, (size_t)(a + f) * sizeof(int));
    ring->head_gpus = ring->tied + a;
    memcpy(ring->tied, ring->a_all[0], (size_t)a * sizeof(int));
    for (int i = 0; i < ring->head_count; i++) {
        ring->heads[i] = all ? i : (ring->layers - 1) % ring->p;
        memcpy(ring->head_gpus + i * per_group, ring->f_all[ring->heads[i]], (size_t)per_group * sizeof(int));
    }
}

static void place_ring(struct ring *ring) {
    size_t p = (size_t)ring->p;
    bool placed = placement_make(ring->plan, ring->arena, &ring->placement, NULL);
    assert(placed); /* size and settle have seen to it */
    (void)placed;
    ring->a_all = arena_alloc(ring->arena, p * sizeof(int *));
    ring->f_all = arena_alloc(ring->arena, p * sizeof(int *));
    ring->f_same = arena_alloc(ring->arena, p * sizeof(int *));
    for (int g = 0; g < ring->p; g++) {
        ring->a_all[g] = all_gpus(ring, g, false);
        ring->f_all[g] = all_gpus(ring, g, true);
        ring->f_same[g] = arena_alloc(ring->arena, (size_t)ring->plan->replicas * sizeof(int));
        for (int r = 0; r < ring->plan->replicas; r++) ring->f_same[g][r] = ring->f_all[g][r * ring->n];
    }
    choose_replica(ring);
    place_head(ring);
}

/* ---- costs ------------------------------------------------------------------------------------------- */

struct recompute ring_recompute(const struct ring *ring, int layer) {
    return plan_recompute(ring->plan, layer / ring->p);
}

static bool same_cost(const struct ring *ring, int a, int b) {
    const struct model *model = ring->plan->point->model;
    struct recompute x = ring_recompute(ring, a), y = ring_recompute(ring, b);
    return model_layer_is_moe(model, a) == model_layer_is_moe(model, b) &&
           model_layer_window(model, a) == model_layer_window(model, b) && x.attention == y.attention &&
           x.ffn == y.ffn;
}

static void price_layers(struct ring *ring) {
    for (int l = 0; l < ring->layers; l++) {
        int like = l - ring->p;
        while (like >= 0 && !same_cost(ring, l, like)) like -= ring->p;
        if (like >= 0) {
            ring->cost[l] = ring->cost[like];
            ring->memory[l] = ring->memory[like];
            continue;
        }
        struct sides sides = sides_of(ring, ring->modelled, l % ring->p);
        ring->cost[l] = plan_layer_cost(ring->plan, l, ring_recompute(ring, l), sides);
        ring->memory[l] = plan_layer_memory(ring->plan, l, ring_recompute(ring, l), sides);
    }
}

/* Under a table of costs a part of the head's tokens costs its share. */
static void price_ends(struct ring *ring) {
    const struct plan *plan = ring->plan;
    const struct cluster *cluster = plan->point->cluster;
    int last = ring->layers - 1, parts = ring->head_count;
    struct sides sides = sides_of(ring, ring->modelled, last % ring->p);
    double tokens = plan_tokens(plan), slowest = 1, shares = plan->point->table ? parts : 1;
    for (int i = 0; i < parts; i++) {
        sides.next = *side_of(ring, ring->modelled, ring->heads[i], true);
        ring->last_combine[i] = plan_combine_cost(plan, last, sides, parts);
        slowest = fmin(slowest, cluster_slowest(cluster, sides.next.gpus, ring->n));
    }
    for (int g = 0; is_without(ring, WITHOUT_FUSED_COMBINE) && g < ring->p && ring->p > 1; g++)
        ring->hop[g] = plan_hop_cost(plan, *side_of(ring, ring->modelled, g, false),
                                     *side_of(ring, ring->modelled, after(ring, g), false));
    double a_slowest = cluster_slowest(cluster, side_of(ring, ring->modelled, 0, false)->gpus, ring->m);
    for (int backward = 0; backward < 2; backward++) {
        ring->embed[backward] = plan_embed_cost(plan, backward, tokens, a_slowest);
        ring->head[backward] =
            plan_head_cost(plan, backward, tokens * ring->m / ring->n / parts, slowest) / shares;
    }
}

struct ring *ring_new(const struct plan *plan) {
    struct arena *arena = arena_new();
    struct ring *ring = arena_alloc(arena, sizeof *ring);
    *ring = (struct ring){.plan = plan,
                          .p = plan->parallel.groups,
                          .m = plan->parallel.attn_gpus,
                          .n = plan->parallel.ffn_gpus,
                          .layers = plan->point->model->layers,
                          .arena = arena};
    ring->hop = arena_alloc(arena, (size_t)ring->p * sizeof *ring->hop);
    place_ring(ring);
    ring->cost = arena_alloc(arena, (size_t)ring->layers * sizeof *ring->cost);
    ring->memory = arena_alloc(arena, (size_t)ring->layers * sizeof *ring->memory);
    ring->last_combine = arena_alloc(arena, (size_t)ring->head_count * sizeof *ring->last_combine);
    price_layers(ring);
    price_ends(ring);
    return ring;
}

void ring_free(struct ring *ring) {
    arena_free(ring->arena);
}

/* ---- who holds what ---------------------------------------------------------------------------------- */

static bool has_head(const struct ring *ring, int g) {
    for (int i = 0; i < ring->head_count; i++)
        if (ring->heads[i] == g) return true;
    return false;
}

/* An embedding that the output head uses as well is one parameter with holders on both sides. */
static struct shard tied_shard(const struct ring *ring) {
    return (struct shard){model_embedding_parameters(ring->plan->point->model), ring->tied,
                          ring->plan->replicas * (ring->m + ring->head_count * ring->n)};
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

static int ffn_shards(const struct ring *ring, int g, struct shard shards[4]) {
    const struct model *model = ring->plan->point->model;
    double shared = 0, experts = 0, here = ceil((double)model->moe.experts / ring->n);
    int replicas = ring->plan->replicas;
    for (int l = g; l < ring->layers; l += ring->p) {
        shared += model_shared_parameters(model, l) + model->hidden;
        if (model_layer_is_moe(model, l)) experts += here * model_expert_parameters(model);
    }
    shards[0] = (struct shard){shared, ring->f_all[g], replicas * ring->n};
    shards[1] = (struct shard){experts, ring->f_same[g], replicas};
    if (!has_head(ring, g)) return 2;
    shards[2] =
        (struct shard){model_head_parameters(model), ring->head_gpus, replicas * ring->head_count * ring->n};
    if (!model->tie_embeddings) return 3;
    shards[3] = tied_shard(ring);
    return 4;
}

struct need ring_attention_need(const struct ring *ring, int g) {
    struct shard shards[2];
    int count = attention_shards(ring, g, shards);
    return (struct need){.static_bytes = plan_static_bytes(ring->plan, shards, count),
                         .end = plan_step_end(ring->plan, shards, count)};
}

struct need ring_ffn_need(const struct ring *ring, int g) {
    struct shard shards[4];
    int count = ffn_shards(ring, g, shards);
    return (struct need){.static_bytes = plan_static_bytes(ring->plan, shards, count),
                         .end = plan_step_end(ring->plan, shards, count)};
}

/* ---- the schedule ------------------------------------------------------------------------------------ */

/* Which of two ready operations goes first: smaller does. */
static int64_t urgency(const struct ring *ring, int micro_batch, bool backward, int layer) {
    const struct order *order = &ring->plan->order;
    int64_t wave = is_without(ring, WITHOUT_WAVES) ? micro_batch : micro_batch / order->wave;
    int64_t place = backward ? 2 * ring->layers - 1 - layer : layer, first = 0;
    if (order->prefer == PREFER_BACKWARD) first = !backward;
    if (order->prefer == PREFER_FORWARD) first = backward;
    return ((first * (1 << 20) + wave) * (1 << 12) + place) * (1 << 20) + micro_batch;
}

static void set_urgency(struct schedule *schedule, int first, int last, int64_t urgency) {
    for (int op = first; op < last; op++) schedule->ops[op].priority = urgency;
}

/* The groups that take each layer's output. */
struct ways {
    int *next;  /* (p) the A-group that each group's combine goes to */
    int *heads; /* (head_count) schedule groups */
};

static struct block block_of(const struct ring *ring, const struct ways *ways, int l, int m) {
    bool ends = l == ring->layers - 1;
    int g = l % ring->p;
    return (struct block){
        .plan = ring->plan,
        .recompute = ring_recompute(ring, l),
        .cost = &ring->cost[l],
        .combine = ends ? ring->last_combine : &ring->cost[l].combine,
        .memory = &ring->memory[l],
        .place = {g, ring->p + g, ends ? ways->heads : &ways->next[g], ends ? ring->head_count : 1},
        .layer = l,
        .micro_batch = m};
}

static int add_hop(struct schedule *schedule, const struct ring *ring, enum pass pass, int l, int m,
                   int behind) {
    int g = l % ring->p, next = after(ring, g);
    bool forward = pass == PASS_FORWARD;
    return plan_add_hop(schedule, pass, l, m, forward ? g : next, forward ? next : g, ring->hop[g], behind);
}

/* Micro-batches that go forward before any of them turns round: one, or all that are under way. */
struct round {
    int first, count;
    struct block *blocks; /* (count, layers) */
    int *arrived;         /* (count) the last layer's combine, to the first head */
    int *forwards;        /* (count) of one head */
    int *gradients;       /* (count, head_count) */
};

static void add_forward(struct schedule *schedule, const struct ring *ring, const struct ways *ways,
                        struct round *round, int k, const int *behind, int behind_count) {
    int m = round->first + k;
    int at = schedule_compute(schedule, KIND_EMBED, PASS_FORWARD, -1, m, 0, ring->embed[0]);
    for (int i = 0; i < behind_count; i++) schedule_after(schedule, behind[i]);
    schedule_priority(schedule, urgency(ring, m, false, 0));
    for (int l = 0; l < ring->layers; l++) {
        struct block *block = &round->blocks[k * ring->layers + l];
        *block = block_of(ring, ways, l, m);
        at = block_forward(schedule, block, at);
        if (ring_hops(ring, l)) at = add_hop(schedule, ring, PASS_FORWARD, l, m, at);
        set_urgency(schedule, block->forward_first, schedule->op_count, urgency(ring, m, false, l));
    }
    round->arrived[k] = at;
}

/* The last layer's output goes to the head's groups: each has forward and backward on its part of the tokens.
   No micro-batch of the round turns round before all have come. */
static void add_heads(struct schedule *schedule, const struct ring *ring, struct round *round) {
    int last = ring->layers - 1, count = ring->head_count;
    double hidden = ring->memory[0].layer_input * ring->m / ring->n / count;
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < round->count; k++) {
            int m = round->first + k;
            round->forwards[k] = plan_add_head(schedule, ring->p + ring->heads[i], m, i, count,
                                               round->arrived[k] + i, ring->head[0]);
            schedule_priority(schedule, urgency(ring, m, false, last));
        }
        for (int k = 0; k < round->count; k++) {
            int backward = plan_add_head_backward(schedule, round->forwards[k], ring->head[1], hidden);
            for (int other = 0; other < round->count; other++)
                if (other != k) schedule_after(schedule, round->forwards[other]);
            schedule_priority(schedule, urgency(ring, round->first + k, true, last));
            round->gradients[k * count + i] = backward;
        }
    }
}

/* Fills a micro-batch's last operation on each group: the backward pass of the group's first layer. last[g]
   is of A-group g, last[p + g] of F-group g. */
static void add_backward(struct schedule *schedule, const struct ring *ring, struct round *round, int k,
                         int *last) {
    int p = ring->p, m = round->first + k, at = -1;
    for (int l = ring->layers - 1; l >= 0; l--) {
        struct block *block = &round->blocks[k * ring->layers + l];
        bool ends = l == ring->layers - 1;
        int first = schedule->op_count;
        if (ring_hops(ring, l)) at = add_hop(schedule, ring, PASS_BACKWARD, l, m, at);
        at = block_backward(schedule, block, ends ? round->gradients + k * ring->head_count : &at);
        set_urgency(schedule, first, block->backward_last, urgency(ring, m, true, l));
        last[l % p] = at; /* a later layer's is overwritten by an earlier one's */
        last[p + l % p] = block->ffn_backward;
    }
    last[0] = schedule_compute(schedule, KIND_EMBED, PASS_BACKWARD, -1, m, 0, ring->embed[1]);
    schedule_after(schedule, at);
    schedule_priority(schedule, urgency(ring, m, true, 0));
}

/* All micro-batches, round by round. Fills last (micro-batches, groups). A round begins behind the one that
   many micro-batches before it as may be under way. */
static void add_rounds(struct schedule *schedule, const struct ring *ring, const struct ways *ways,
                       int *last) {
    int total = schedule->micro_batches, groups = 2 * ring->p, under_way = plan_under_way(ring->plan);
    int size = is_without(ring, WITHOUT_INTERLEAVING) ? under_way : 1;
    size_t count = (size_t)size, layers = (size_t)ring->layers, heads = (size_t)ring->head_count;
    struct round round = {.blocks = arena_alloc(ring->arena, count * layers * sizeof *round.blocks),
                          .arrived = arena_alloc(ring->arena, count * sizeof(int)),
                          .forwards = arena_alloc(ring->arena, count * sizeof(int)),
                          .gradients = arena_alloc(ring->arena, count * heads * sizeof(int))};
    int *behind = arena_alloc(ring->arena, count * sizeof(int));
    for (round.first = 0; round.first < total; round.first += size) {
        round.count = size < total - round.first ? size : total - round.first;
        int before = round.first - under_way;
        for (int k = 0; before >= 0 && k < size; k++) behind[k] = last[(before + k) * groups];
        for (int k = 0; k < round.count; k++)
            add_forward(schedule, ring, ways, &round, k, behind, before >= 0 ? size : 0);
        add_heads(schedule, ring, &round);
        for (int k = 0; k < round.count; k++)
            add_backward(schedule, ring, &round, k, last + (round.first + k) * groups);
    }
}

/* A group's step ends behind its last operation of every micro-batch. What others still wait for goes first:
   the last gradients that the group sends before the reduction of its own. */
static void end_step(struct schedule *schedule, int group, int groups, struct step_end end, const int *last) {
    int *after = must_alloc((size_t)schedule->micro_batches * sizeof *after);
    for (int m = 0; m < schedule->micro_batches; m++) after[m] = last[m * groups + group];
    int first = schedule->op_count;
    plan_add_step_end(schedule, group, end, after, schedule->micro_batches);
    set_urgency(schedule, first, schedule->op_count, INT64_MAX);
    free(after);
}

struct schedule *ring_schedule(const struct plan *plan) {
    struct ring *ring = ring_new(plan);
    int p = ring->p, groups = 2 * p;
    bool returns = is_without(ring, WITHOUT_FUSED_COMBINE);
    struct schedule *schedule = schedule_new(groups, ring->layers, plan->micro_batches);
    schedule->patient = plan->order.patient > 0;
    schedule->justified = plan->order.justified > 0;
    schedule->half_duplex = is_without(ring, WITHOUT_DUPLEX);
    int *last = must_alloc((size_t)plan->micro_batches * (size_t)groups * sizeof *last);
    struct ways ways = {arena_alloc(ring->arena, (size_t)p * sizeof(int)),
                        arena_alloc(ring->arena, (size_t)ring->head_count * sizeof(int))};
    for (int g = 0; g < p; g++) ways.next[g] = returns ? g : after(ring, g);
    for (int i = 0; i < ring->head_count; i++) ways.heads[i] = p + ring->heads[i];
    add_rounds(schedule, ring, &ways, last);
    for (int g = 0; g < p; g++) {
        struct need a = ring_attention_need(ring, g), f = ring_ffn_need(ring, g);
        schedule_group(schedule, g, ring->m, a.static_bytes, "A%d", g);
        schedule_group(schedule, p + g, ring->n, f.static_bytes, "F%d", g);
        end_step(schedule, g, groups, a.end, last);
        end_step(schedule, p + g, groups, f.end, last);
    }
    free(last);
    ring_free(ring);
    return schedule;
}
