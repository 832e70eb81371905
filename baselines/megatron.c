/*
Megatron-LM with expert parallelism: PP × EP × DP, 1F1B and interleaved 1F1B (arXiv 2104.04473), all-to-alls
exposed.

    stage 0  F0 F1 F2 F3       B0 F4 B1 F5 B2 …          1F1B: warm-up of (pp − stage − 1) forwards,
    stage 1     F0 F1 F2    B0 F3 B1 F4 B2 …             then one forward, one backward in turn,
    stage 2        F0 F1 B0 F2 B1 F3 B2 …                then the remaining backwards.
    stage 3           F0 B0 F1 B1 F2 B2 …

Interleaved (vpp > 1): stage s holds chunks s, s + pp, s + 2·pp, …; pp micro-batches go through a chunk before
the next chunk, and the warm-up is 2·(pp − stage − 1) + (vpp − 1)·pp chunks, as in Megatron-Core's
schedules.py.

Choices. A stage is one group of `ep` GPUs, each with attention replicated and experts ÷ ep, where each run of
cp GPUs holds one sequence between them; tensor parallelism is 1. The compute lane's order is written here; a
lane that waits for an all-to-all waits, since the next operation in its order needs it. Point-to-point
messages travel beside computation. Layers are spread over stages so that the slowest stage, embedding and
head included, is as fast as can be (Megatron's
--pipeline-model-parallel-layout allows any split), which for equal stages is the even split. Replicas of a
stage stand next to each other, stage after stage.
*/
#include "plan/plan.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- who holds what ---------------------------------------------------------------------------------- */

struct chunk {
    int stage, first_layer, layers;
};

struct layout {
    const struct plan *plan;
    int pp, vpp, ep, chunks;
    struct chunk *chunk; /* pp × vpp of them, in the order tokens pass them */
    int **gpus;          /* of each stage in the replica that is modelled */
    int **all_gpus;      /* of each stage in all replicas */
    int *tied;           /* GPUs with a tied embedding: of the first and last stage, in all replicas */
    int **expert_gpus;   /* GPUs that hold the same experts as the stage's first GPU, one a replica */
    double *slowest;     /* GPU speed of each stage */
    struct recompute *recompute; /* of each layer */
    struct layer_cost *cost;
    struct layer_memory *memory;
    double embed[2], head[2]; /* forward, backward seconds */
    struct transfer_cost p2p;
    struct arena *arena;
};

static struct sides sides_of(const struct layout *layout, int stage) {
    struct side side = {.gpus = layout->gpus[stage], .count = layout->ep};
    return (struct sides){side, side, side};
}

/* Number of a layer within its stage, lowest first. */
static int index_in_stage(const struct layout *layout, int chunk, int layer) {
    int index = layer - layout->chunk[chunk].first_layer;
    for (int c = layout->chunk[chunk].stage; c < chunk; c += layout->pp) index += layout->chunk[c].layers;
    return index;
}

static bool sends_again(const struct layout *layout, struct recompute recompute) {
    return layout->plan->memory.expert_input == INPUT_RESEND ||
           (recompute.attention == ATTENTION_FULL && recompute.ffn == FFN_FULL);
}

/* Forward and backward of a layer, one operation after the other. */
static double block_seconds(const struct layout *layout, int layer, struct recompute recompute,
                            const struct layer_cost *cost) {
    double seconds = 0, dispatch = cost->dispatch.seconds, combine = cost->combine.seconds;
    for (int pass = 0; pass < PASS_COUNT; pass++) seconds += cost->attention[pass] + cost->ffn[pass];
    if (!model_layer_is_moe(layout->plan->point->model, layer)) return seconds;
    seconds += 2 * (dispatch + combine);
    if (sends_again(layout, recompute)) seconds += dispatch;
    if (recompute.attention == ATTENTION_FULL && recompute.ffn == FFN_FULL) seconds += combine;
    return seconds;
}

/* Seconds of a typical layer that is number `index` of its stage. */
static double typical_seconds(const struct layout *layout, int index) {
    int layer = layout->plan->point->model->layers - 1;
    struct recompute recompute = plan_recompute(layout->plan, index);
    struct layer_cost cost = plan_layer_cost(layout->plan, layer, recompute, sides_of(layout, 0));
    return block_seconds(layout, layer, recompute, &cost);
}

/* Gives each layer in turn to the stage that is least loaded, then spreads a stage's layers over its chunks.
 */
static void split_layers(struct layout *layout) {
    int layers = layout->plan->point->model->layers, pp = layout->pp;
    double *load = arena_alloc(layout->arena, (size_t)pp * sizeof *load);
    int *count = arena_alloc(layout->arena, (size_t)pp * sizeof *count);
    /* The first ones of a stage may recompute, the others not. */
    int recomputing = layout->plan->memory.recompute.layers;
    double lowest = typical_seconds(layout, 0);
    double others = recomputing ? typical_seconds(layout, recomputing) : lowest;
    load[0] += layout->embed[0] + layout->embed[1];
    load[pp - 1] += layout->head[0] + layout->head[1];
    for (int layer = 0; layer < layers; layer++) {
        int least = 0;
        for (int stage = 1; stage < pp; stage++)
            if (load[stage] < load[least] || (load[stage] == load[least] && count[stage] < count[least]))
                least = stage;
        if (layer < pp * layout->vpp) least = layer % pp; /* every chunk has at least one layer */
        load[least] += !recomputing || count[least] < recomputing ? lowest : others;
        /* Costs that are all 0 still split evenly. */
        count[least]++;
    }
    int next = 0;
    for (int c = 0; c < layout->chunks; c++) {
        int stage = c % pp, v = c / pp;
        int here = count[stage] / layout->vpp + (v < count[stage] % layout->vpp);
        layout->chunk[c] = (struct chunk){stage, next, here};
        next += here;
    }
    assert(next == layers);
}

/* GPUs of a stage: replicas of the stage side by side. The modelled replica is the one with the slowest GPU,
   since the step ends with a reduction over all. */
static void place_stages(struct layout *layout) {
    const struct cluster *cluster = layout->plan->point->cluster;
    int replicas = layout->plan->replicas, ep = layout->ep, all = replicas * ep, modelled = 0;
    for (int stage = 0; stage < layout->pp; stage++) {
        layout->all_gpus[stage] = arena_alloc(layout->arena, (size_t)all * sizeof(int));
        for (int i = 0; i < all; i++) layout->all_gpus[stage][i] = stage * all + i;
        for (int r = 0; r < replicas; r++)
            if (cluster_slowest(cluster, layout->all_gpus[stage] + r * ep, ep) <
                cluster_slowest(cluster, layout->all_gpus[stage] + modelled * ep, ep))
                modelled = r;
    }
    for (int stage = 0; stage < layout->pp; stage++) {
        layout->gpus[stage] = layout->all_gpus[stage] + modelled * ep;
        layout->slowest[stage] = cluster_slowest(cluster, layout->gpus[stage], ep);
        layout->expert_gpus[stage] = arena_alloc(layout->arena, (size_t)replicas * sizeof(int));
        for (int r = 0; r < replicas; r++) layout->expert_gpus[stage][r] = layout->all_gpus[stage][r * ep];
    }
    layout->tied = arena_alloc(layout->arena, 2 * (size_t)all * sizeof(int));
    memcpy(layout->tied, layout->all_gpus[0], (size_t)all * sizeof(int));
    memcpy(layout->tied + all, layout->all_gpus[layout->pp - 1], (size_t)all * sizeof(int));
}

static bool same_cost(const struct layout *layout, int a, int b) {
    const struct model *model = layout->plan->point->model;
    struct recompute x = layout->recompute[a], y = layout->recompute[b];
    return model_layer_is_moe(model, a) == model_layer_is_moe(model, b) &&
           model_layer_window(model, a) == model_layer_window(model, b) && x.attention == y.attention &&
           x.ffn == y.ffn;
}

static void price_layer(struct layout *layout, int c, int i) {
    const struct chunk *chunk = &layout->chunk[c];
    int layer = chunk->first_layer + i;
    layout->recompute[layer] = plan_recompute(layout->plan, index_in_stage(layout, c, layer));
    for (int before = c % layout->pp; before <= c; before += layout->pp)
        for (int k = 0; k < (before == c ? i : layout->chunk[before].layers); k++) {
            int like = layout->chunk[before].first_layer + k;
            if (!same_cost(layout, layer, like)) continue;
            layout->cost[layer] = layout->cost[like];
            layout->memory[layer] = layout->memory[like];
            return;
        }
    struct sides sides = sides_of(layout, chunk->stage);
    layout->cost[layer] = plan_layer_cost(layout->plan, layer, layout->recompute[layer], sides);
    layout->memory[layer] = plan_layer_memory(layout->plan, layer, layout->recompute[layer], sides);
}

static void price(struct layout *layout) {
    const struct plan *plan = layout->plan;
    const struct point *point = plan->point;
    int ep = layout->ep, pp = layout->pp;
    double tokens = plan_tokens(plan);
    for (int backward = 0; backward < 2; backward++) {
        layout->embed[backward] = plan_embed_cost(plan, backward, tokens, layout->slowest[0]);
        layout->head[backward] = plan_head_cost(plan, backward, tokens, layout->slowest[pp - 1]);
    }
    layout->p2p.bytes = tokens * model_hidden_bytes(point->model);
    if (pp > 1 && point->table)
        layout->p2p.seconds = point->table->p2p_s;
    else if (pp > 1)
        layout->p2p.seconds =
            cluster_pairwise(point->cluster, layout->gpus[0], layout->gpus[1], ep, layout->p2p.bytes).seconds;
    split_layers(layout);
    /* A stage with a slow GPU, or one whose GPUs straddle nodes differently, has costs of its own; its layers
       of one kind that recompute alike have the same. */
    for (int c = 0; c < layout->chunks; c++)
        for (int i = 0; i < layout->chunk[c].layers; i++) price_layer(layout, c, i);
}

static struct layout *layout_new(const struct plan *plan) {
    struct arena *arena = arena_new();
    struct layout *layout = arena_alloc(arena, sizeof *layout);
    int layers = plan->point->model->layers;
    *layout = (struct layout){.plan = plan,
                              .pp = plan->parallel.pp,
                              .vpp = plan->parallel.vpp,
                              .ep = plan->parallel.ep,
                              .chunks = plan->parallel.pp * plan->parallel.vpp,
                              .arena = arena};
    size_t pp = (size_t)layout->pp;
    layout->chunk = arena_alloc(arena, (size_t)layout->chunks * sizeof *layout->chunk);
    layout->gpus = arena_alloc(arena, pp * sizeof *layout->gpus);
    layout->all_gpus = arena_alloc(arena, pp * sizeof *layout->all_gpus);
    layout->expert_gpus = arena_alloc(arena, pp * sizeof *layout->expert_gpus);
    layout->slowest = arena_alloc(arena, pp * sizeof *layout->slowest);
    layout->recompute = arena_alloc(arena, (size_t)layers * sizeof *layout->recompute);
    layout->cost = arena_alloc(arena, (size_t)layers * sizeof *layout->cost);
    layout->memory = arena_alloc(arena, (size_t)layers * sizeof *layout->memory);
    place_stages(layout);
    price(layout);
    return layout;
}

/* What a GPU of a stage holds: everything that all GPUs of the stage share, its experts, and an embedding
   that the last stage uses as well for its output. */
static int stage_shards(const struct layout *layout, int stage, struct shard shards[3]) {
    const struct plan *plan = layout->plan;
    const struct model *model = plan->point->model;
    double shared = 0, experts = 0, here = ceil((double)model->moe.experts / layout->ep);
    bool first = stage == 0, last = stage == layout->pp - 1;
    int tied_stages = layout->pp > 1 ? 2 : 1;
    if (first && !model->tie_embeddings) shared += model_embedding_parameters(model);
    if (last) shared += model_head_parameters(model);
    for (int c = stage; c < layout->chunks; c += layout->pp)
        for (int i = 0; i < layout->chunk[c].layers; i++) {
            int layer = layout->chunk[c].first_layer + i;
            shared += model_attention_parameters(model) + model_router_parameters(model, layer) +
                      model_shared_parameters(model, layer);
            if (model_layer_is_moe(model, layer)) experts += here * model_expert_parameters(model);
        }
    shards[0] = (struct shard){shared, layout->all_gpus[stage], plan->replicas * layout->ep};
    shards[1] = (struct shard){experts, layout->expert_gpus[stage], plan->replicas};
    if (!model->tie_embeddings || !(first || last)) return 2;
    shards[2] = (struct shard){model_embedding_parameters(model), layout->tied,
                               tied_stages * plan->replicas * layout->ep};
    return 3;
}

static struct need stage_need(const struct layout *layout, int stage) {
    struct shard shards[3];
    int count = stage_shards(layout, stage, shards);
    return (struct need){.static_bytes = plan_static_bytes(layout->plan, shards, count),
                         .end = plan_step_end(layout->plan, shards, count)};
}

/* ---- the order of a stage ---------------------------------------------------------------------------- */

/* Number k of a stage's forwards (or backwards): which chunk of the stage, which micro-batch. */
static void unit(const struct layout *layout, int k, bool backward, int *v, int *micro_batch) {
    int round = layout->pp * layout->vpp, within = k % round;
    *v = within / layout->pp;
    if (backward) *v = layout->vpp - 1 - *v;
    *micro_batch = k / round * layout->pp + within % layout->pp;
}

/* Forward chunks that run before the first backward. */
static int warm_up(const struct layout *layout, int stage) {
    int total = layout->plan->micro_batches * layout->vpp, behind = layout->pp - stage - 1;
    int warm = layout->vpp == 1 ? behind : 2 * behind + (layout->vpp - 1) * layout->pp;
    return warm < total ? warm : total;
}

struct range {
    int first, last; /* operations of one chunk and micro-batch: first … last − 1 */
};

/* Collects the compute operations of a stage in Megatron's order. */
static void order_stage(struct schedule *schedule, const struct layout *layout, int stage,
                        struct range (*ranges)[2]) {
    int total = layout->plan->micro_batches * layout->vpp, warm = warm_up(layout, stage), count = 0;
    int lane = lane_of(stage, RESOURCE_COMPUTE);
    int *order = must_alloc((size_t)schedule->op_count * sizeof *order);
    for (int step = 0; step < total + warm; step++)
        for (int backward = 0; backward < 2; backward++) { /* steady state: one forward, one backward */
            int k = backward ? step - warm : step, v, micro_batch;
            if (k < 0 || k >= total) continue;
            unit(layout, k, backward, &v, &micro_batch);
            int c = v * layout->pp + stage;
            struct range range = ranges[micro_batch * layout->chunks + c][backward];
            for (int op = range.first; op < range.last; op++)
                if (schedule->ops[op].lanes[0] == lane) order[count++] = op;
        }
    schedule_fix_order(schedule, lane, order, count);
    free(order);
}

/* ---- the schedule ------------------------------------------------------------------------------------ */

/* All-to-alls run in the compute stream's order: the next chunk does not begin beside this one's last
   combine, nor does a backward chunk's first one beside the chunk before. The wait holds the compute lane for
   no time. */
static int wait_for(struct schedule *schedule, const struct layout *layout, const struct chunk *chunk,
                    enum pass pass, int m, int after) {
    int layer = chunk->first_layer + chunk->layers - 1;
    if (!model_layer_is_moe(layout->plan->point->model, layer)) return after;
    int op = schedule_compute(schedule, KIND_COMBINE, pass, layer, m, chunk->stage, 0);
    schedule_after(schedule, after);
    return op;
}

static void add_micro_batch(struct schedule *schedule, const struct layout *layout, int m,
                            struct block *blocks, struct range (*ranges)[2]) {
    int last_stage = layout->pp - 1, at = -1;
    double hidden = layout->memory[0].layer_input;
    for (int c = 0; c < layout->chunks; c++) {
        const struct chunk *chunk = &layout->chunk[c];
        struct range *range = &ranges[c][0];
        if (c > 0)
            at = plan_add_hop(schedule, PASS_FORWARD, chunk->first_layer - 1, m, layout->chunk[c - 1].stage,
                              chunk->stage, layout->p2p, at);
        range->first = schedule->op_count;
        if (c == 0) at = schedule_compute(schedule, KIND_EMBED, PASS_FORWARD, -1, m, 0, layout->embed[0]);
        for (int l = chunk->first_layer; l < chunk->first_layer + chunk->layers; l++) {
            blocks[l] = (struct block){.plan = layout->plan,
                                       .recompute = layout->recompute[l],
                                       .cost = &layout->cost[l],
                                       .combine = &layout->cost[l].combine,
                                       .memory = &layout->memory[l],
                                       .place = {chunk->stage, chunk->stage, &chunk->stage, 1},
                                       .layer = l,
                                       .micro_batch = m};
            at = block_forward(schedule, &blocks[l], at);
        }
        at = wait_for(schedule, layout, chunk, PASS_FORWARD, m, at);
        range->last = schedule->op_count;
    }
    int turn = plan_add_head(schedule, last_stage, m, 0, 1, at, layout->head[0]);
    int gradient = plan_add_head_backward(schedule, turn, layout->head[1], hidden);
    ranges[layout->chunks - 1][0].last = gradient;
    at = gradient;
    for (int c = layout->chunks - 1; c >= 0; c--) {
        const struct chunk *chunk = &layout->chunk[c];
        ranges[c][1].first = c == layout->chunks - 1 ? gradient : schedule->op_count;
        if (c < layout->chunks - 1) at = wait_for(schedule, layout, chunk, PASS_BACKWARD, m, at);
        for (int l = chunk->first_layer + chunk->layers - 1; l >= chunk->first_layer; l--)
            at = block_backward(schedule, &blocks[l], &at);
        if (c == 0) {
            int before = at;
            at = schedule_compute(schedule, KIND_EMBED, PASS_BACKWARD, -1, m, 0, layout->embed[1]);
            schedule_after(schedule, before);
        }
        ranges[c][1].last = schedule->op_count;
        if (c > 0)
            at = plan_add_hop(schedule, PASS_BACKWARD, chunk->first_layer - 1, m, chunk->stage,
                              layout->chunk[c - 1].stage, layout->p2p, at);
    }
}

/* The optimizer joins the given order of the compute lane. */
static void end_step(struct schedule *schedule, int stage, struct step_end end) {
    struct lane *order = &schedule->lanes[lane_of(stage, RESOURCE_COMPUTE)];
    int last = order->ops[order->count - 1];
    int optimizer = plan_add_step_end(schedule, stage, end, &last, 1);
    order->ops = must_realloc(order->ops, (size_t)(order->count + 1) * sizeof(int));
    order->ops[order->count++] = optimizer;
}

static struct schedule *build(const struct plan *plan) {
    struct layout *layout = layout_new(plan);
    int layers = plan->point->model->layers;
    struct schedule *schedule = schedule_new(layout->pp, layers, plan->micro_batches);
    struct block *blocks = must_alloc((size_t)layers * sizeof *blocks);
    struct range(*ranges)[2] =
        must_alloc((size_t)plan->micro_batches * (size_t)layout->chunks * sizeof *ranges);
    for (int m = 0; m < plan->micro_batches; m++)
        add_micro_batch(schedule, layout, m, blocks, ranges + m * layout->chunks);
    for (int stage = 0; stage < layout->pp; stage++) {
        struct need need = stage_need(layout, stage);
        schedule_group(schedule, stage, layout->ep, need.static_bytes, "stage %d", stage);
        order_stage(schedule, layout, stage, ranges);
        end_step(schedule, stage, need.end);
    }
    free(blocks);
    free(ranges);
    arena_free(layout->arena);
    return schedule;
}

/* ---- planning ---------------------------------------------------------------------------------------- */

static bool is_whole(const struct parallel *given) {
    return given->pp && given->vpp && given->ep;
}

static int at_least_one(int value) {
    return value ? value : 1;
}

static bool size(struct plan *plan, struct errors *errors) {
    const struct point *point = plan->point;
    struct parallel *parallel = &plan->parallel;
    int before = errors->count, gpus = cluster_gpus(point->cluster);
    parallel->pp = at_least_one(parallel->pp);
    parallel->vpp = at_least_one(parallel->vpp);
    parallel->cp = at_least_one(parallel->cp);
    /* A run of cp GPUs stands within the ep ones of a stage. */
    const char *ep_key = parallel->ep || parallel->cp == 1 ? "parallel.ep" : "parallel.cp";
    if (!parallel->ep) parallel->ep = parallel->cp;
    if (parallel->pp > point->model->layers)
        errors_add(errors, NULL, "parallel.pp", "found %d; at most the model's %d layers are allowed",
                   parallel->pp, point->model->layers);
    else if ((int64_t)parallel->pp * parallel->vpp > point->model->layers)
        errors_add(errors, NULL, "parallel.vpp",
                   "found pp %d × vpp %d; at most the model's %d layers are allowed", parallel->pp,
                   parallel->vpp, point->model->layers);
    if (parallel->ep > point->model->moe.experts)
        errors_add(errors, NULL, ep_key, "found %d; at most the model's %d experts are allowed", parallel->ep,
                   point->model->moe.experts);
    if ((int64_t)parallel->pp * parallel->ep > gpus)
        errors_add(errors, NULL, parallel->pp == 1 ? ep_key : "parallel.pp",
                   "found pp %d × ep %d; at most the cluster's %d GPUs are allowed", parallel->pp,
                   parallel->ep, gpus);
    if (!plan_check_cp(plan, parallel->ep, "ep", errors) || errors->count > before) return false;
    plan_size(plan, parallel->pp * parallel->ep, parallel->ep);
    if (parallel->vpp > 1 && parallel->pp > 1 && plan->micro_batches % parallel->pp != 0)
        errors_add(errors, NULL, "parallel.vpp",
                   "found %d with %d micro-batches; above 1 the micro-batches must be divisible by pp %d",
                   parallel->vpp, plan->micro_batches, parallel->pp);
    return errors->count == before;
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

/* Every cp that divides the stage and the sequence. */
static void add_stages(struct list *list, struct parallel one) {
    const struct point *point = list->point;
    for (int cp = 1; cp <= one.ep; cp++) {
        bool fits = one.ep % cp == 0 && (cp == 1 || point->seq_len % (2 * cp) == 0);
        if (!fits || !is_open_to(point->parallel.cp, cp)) continue;
        one.cp = cp;
        if (list->count < list->capacity) list->found[list->count] = one;
        list->count++;
    }
}

/* Chunks a stage: all up to 16, then the least of each size of chunk, since more would be no shorter. One
   stage alone has no use for several. */
static void add_chunks(struct list *list, struct parallel one) {
    int layers = list->point->model->layers, given = list->point->parallel.vpp, size = layers + 1;
    for (int vpp = 1; vpp * one.pp <= layers; vpp++) {
        int here = (layers + vpp * one.pp - 1) / (vpp * one.pp);
        bool same = vpp > 16 && here == size;
        size = here;
        if (!is_open_to(given, vpp) || (!given && (same || (one.pp == 1 && vpp > 1)))) continue;
        one.vpp = vpp;
        add_stages(list, one);
    }
}

/* Every number of stages; experts over every number of GPUs that divides them or the cluster's. */
static int layouts(const struct point *point, struct parallel *found, int capacity) {
    struct list list = {point, found, 0, capacity};
    const struct parallel *given = &point->parallel;
    int gpus = cluster_gpus(point->cluster), experts = point->model->moe.experts;
    if (is_whole(given)) {
        if (capacity)
            found[0] = (struct parallel){given->pp, given->vpp, given->ep, .cp = at_least_one(given->cp)};
        return 1;
    }
    for (int ep = 1; ep <= gpus && ep <= experts; ep++) {
        if (!is_open_to(given->ep, ep) || (!given->ep && gpus % ep && experts % ep)) continue;
        for (int pp = 1; pp * ep <= gpus && pp <= point->model->layers; pp++) {
            if (is_open_to(given->pp, pp)) add_chunks(&list, (struct parallel){.pp = pp, .ep = ep});
        }
    }
    return list.count;
}

/* ---- bounds ------------------------------------------------------------------------------------------ */

/* What a layer keeps of a micro-batch between its passes; and what its backward pass takes beside that. */
static double kept_bytes(const struct layout *layout, int layer) {
    const struct layer_memory *memory = &layout->memory[layer];
    bool moe = model_layer_is_moe(layout->plan->point->model, layer);
    double bytes = memory->layer_input + memory->attention + memory->ffn;
    return bytes + (moe && !sends_again(layout, layout->recompute[layer]) ? memory->expert_input : 0);
}

static double backward_bytes(const struct layout *layout, int layer) {
    const struct layer_memory *memory = &layout->memory[layer];
    struct recompute recompute = layout->recompute[layer];
    bool moe = model_layer_is_moe(layout->plan->point->model, layer);
    bool again = sends_again(layout, recompute);
    double ffn = memory->full_ffn - memory->ffn;
    if (moe) ffn += (again ? 3 : 2) * memory->expert_input;
    if (recompute.attention == ATTENTION_FULL) /* restored ahead of both */
        ffn += memory->full_attention - memory->attention;
    double attention =
        memory->full_attention - memory->attention + memory->layer_input + 2 * memory->gathered;
    attention -= memory->ffn + (moe && !again ? memory->expert_input : 0); /* free by then */
    return fmax(ffn, attention);
}

static struct bound bound_of(const struct layout *layout) {
    const struct plan *plan = layout->plan;
    struct bound bound = {0};
    double before = 0; /* forward and backward through the chunks ahead of a stage's first one */
    for (int stage = 0; stage < layout->pp; stage++) {
        double busy = 0, first = 0;
        int warm = warm_up(layout, stage), total = plan->micro_batches * layout->vpp;
        double bytes = stage_need(layout, stage).static_bytes;
        for (int c = stage; c < layout->chunks; c += layout->pp) {
            double seconds = 0, kept = 0;
            int last = layout->chunk[c].first_layer + layout->chunk[c].layers - 1;
            for (int l = layout->chunk[c].first_layer; l <= last; l++) {
                seconds += block_seconds(layout, l, layout->recompute[l], &layout->cost[l]);
                kept += kept_bytes(layout, l);
            }
            if (c == 0) seconds += layout->embed[0] + layout->embed[1];
            if (c == layout->chunks - 1) seconds += layout->head[0] + layout->head[1];
            if (c == stage) first = seconds;
            busy += seconds;
            for (int k = 0; k < total && k <= warm; k++) { /* what is in flight at the first backward */
                int v, micro_batch;
                unit(layout, k, false, &v, &micro_batch);
                if (v * layout->pp + stage == c) bytes += kept;
            }
            if (c + layout->pp >= layout->chunks) bytes += backward_bytes(layout, last);
        }
        double seconds = before + busy * plan->micro_batches;
        bound.seconds = bound.busy = fmax(bound.seconds, seconds);
        bound.bytes = fmax(bound.bytes, bytes);
        before += first;
    }
    return bound;
}

static int groups(const struct plan *plan) {
    return plan->parallel.pp;
}

static struct bound needs(const struct plan *plan, const struct memory *states, int count,
                          struct need *needs) {
    struct layout *layout = layout_new(plan);
    struct bound bound = bound_of(layout);
    struct plan with_state = *plan;
    layout->plan = &with_state;
    for (int i = 0; i < count; i++, needs += layout->pp) {
        with_state.memory = memory_with_state(plan->memory, states[i]);
        for (int stage = 0; stage < layout->pp; stage++) {
            struct need *need = &needs[stage];
            *need = stage_need(layout, stage);
            for (int c = stage; c < layout->chunks; c += layout->pp)
                for (int k = 0; k < layout->chunk[c].layers; k++) {
                    int layer = layout->chunk[c].first_layer + k;
                    need->kept_bytes += kept_bytes(layout, layer);
                    need->backward_bytes = fmax(need->backward_bytes, backward_bytes(layout, layer));
                }
        }
    }
    arena_free(layout->arena);
    return bound;
}

const struct system megatron = {
    .name = "megatron",
    .title = "PP x EP x DP, interleaved 1F1B, all-to-alls not overlapped",
    .paper = "Megatron-LM, arXiv 1909.08053 and 2104.04473",
    .executors = EXECUTOR_SIMULATOR | EXECUTOR_CPU,
    .zero_max = 1,
    .is_whole = is_whole,
    .layouts = layouts,
    .size = size,
    .groups = groups,
    .needs = needs,
    .build = build,
};
