/*
What each operation of a plan lasts and moves, and what its GPUs hold.

Either the cost model (work ÷ achieved rate, bytes ÷ achieved bandwidth, latency, launches; the cluster file
names the source of each rate) or the manifest's table of explicit durations. Both sides of a worker group are
treated alike: the attention side has micro_batch_size × seq_len ÷ cp tokens a GPU, the feed-forward side
shares all copies of them by the experts each GPU holds, and the busiest GPU sets the pace, since a group's
transfers wait for all its members.

A matrix product takes the longer of its FLOPs at the achieved rate and its operands through the GPU's memory:
with few rows its weights, or the gradients that it adds to, are what it waits for.

Context parallelism. A run of cp GPUs holds each sequence, every GPU its own keys and values. It gathers the
others' ahead of the core in forward and again in backward, where their gradients are then summed and
scattered: three collectives a layer, inside the attention operations; a fourth where the whole attention is
recomputed. Where keys and values alone are, backward gathers them as it would have. All of a sequence is
gathered, under a window as well.
*/
#include "plan/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Seconds of `work` on a GPU of `speed` (1: as the rates say). */
static double seconds_of(const struct cluster *cluster, const struct work *work, bool backward,
                         double speed) {
    static const enum rate unit_rates[] = {
        [UNIT_DENSE] = RATE_GEMM, [UNIT_EXPERTS] = RATE_GROUPED_GEMM, [UNIT_HEAD] = RATE_HEAD_GEMM};
    const double *rates = cluster->rates;
    double core = rates[backward ? RATE_CORE_BACKWARD : RATE_CORE_FORWARD];
    double seconds =
        work->core_flops / core + work->bytes / rates[RATE_HBM] + work->kernels * rates[RATE_KERNEL_LAUNCH];
    for (int i = 0; i < work->product_count; i++) {
        const struct matrix_product *product = &work->products[i];
        seconds += fmax(product->flops / rates[unit_rates[product->unit]], product->bytes / rates[RATE_HBM]);
    }
    return seconds / speed;
}

double plan_tokens(const struct plan *plan) {
    return (double)plan->point->micro_batch_size * plan->point->seq_len / plan->parallel.cp;
}

static struct tokens attention_tokens(const struct plan *plan) {
    return (struct tokens){plan->point->micro_batch_size, plan->point->seq_len, plan->parallel.cp};
}

static double gradient_bytes(const struct plan *plan) {
    return plan->memory.grads == PRECISION_BF16 ? 2 : model_wide_bytes(plan->point->model);
}

struct recompute plan_recompute(const struct plan *plan, int index) {
    struct recompute recompute = plan->memory.recompute;
    return recompute.layers == 0 || index < recompute.layers ? recompute : (struct recompute){0};
}

/* ---- routing ----------------------------------------------------------------------------------------- */

/* Share of all copies that an expert takes; they sum to less than 1 where a capacity factor drops some. */
static double expert_share(const struct plan *plan, int expert) {
    const struct model *model = plan->point->model;
    double share = plan->point->routing.share[expert],
           copies = (double)plan->point->seq_len * model->moe.top_k;
    if (model->moe.capacity_factor <= 0) return share;
    return fmin(share, model_expert_capacity(model, plan->point->seq_len) / copies);
}

/* Of one GPU's experts. */
static double gpu_share(const struct plan *plan, int gpus, int gpu) {
    int experts = plan->point->model->moe.experts, end = plan_first_expert(experts, gpus, gpu + 1);
    double share = 0;
    for (int expert = plan_first_expert(experts, gpus, gpu); expert < end; expert++)
        share += expert_share(plan, expert);
    return share;
}

/* Copies of one micro-batch at GPU number `gpu` of a feed-forward side. */
static struct ffn_load gpu_load(const struct plan *plan, double copies, int gpus, int gpu) {
    int experts = plan->point->model->moe.experts, first = plan_first_expert(experts, gpus, gpu);
    double tile = plan->point->cluster->rates[RATE_GROUPED_TILE];
    struct ffn_load load = {.experts = plan_first_expert(experts, gpus, gpu + 1) - first};
    for (int expert = first; expert < first + load.experts; expert++) {
        double here = copies * expert_share(plan, expert);
        load.copies += here;
        load.rows += tile > 0 ? ceil(here / tile - 1e-9) * tile : here;
    }
    return load;
}

/* ---- layers ------------------------------------------------------------------------------------------ */

static bool is_pipelined(const struct sides *sides) {
    return sides->attention.gpus == sides->ffn.gpus;
}

/* Copies that leave the attention side in one micro-batch, before any are dropped. */
static double all_copies(const struct plan *plan, int layer, const struct sides *sides) {
    return sides->attention.count * plan_tokens(plan) * model_copies(plan->point->model, layer);
}

/* Tokens that pass the shared experts, or the dense FFN, of a feed-forward GPU. On separate sides a token's
   shared experts run where its first choice runs, and first choices are spread as all copies are. */
static double shared_tokens(const struct plan *plan, int layer, const struct sides *sides, double copies) {
    if (is_pipelined(sides)) return plan_tokens(plan);
    return copies / model_copies(plan->point->model, layer);
}

static struct ffn_load ffn_gpu_load(const struct plan *plan, int layer, const struct sides *sides, int gpu) {
    double copies = all_copies(plan, layer, sides);
    int gpus = sides->ffn.count;
    struct ffn_load load = {.copies = copies / gpus, .rows = copies / gpus, .experts = 1};
    if (model_layer_is_moe(plan->point->model, layer)) load = gpu_load(plan, copies, gpus, gpu);
    load.tokens = shared_tokens(plan, layer, sides, load.copies);
    return load;
}

static bool is_balanced(const struct plan *plan) {
    return strcmp(plan->point->routing.text, "balanced") == 0;
}

/* The feed-forward GPU with most rows to compute (most copies of equals). Experts that are all alike leave
   one with ⌈E ÷ N⌉ of them, which the last GPU has. */
static struct ffn_load busiest_load(const struct plan *plan, int layer, const struct sides *sides) {
    struct ffn_load busiest = ffn_gpu_load(plan, layer, sides, sides->ffn.count - 1);
    if (!model_layer_is_moe(plan->point->model, layer) || is_balanced(plan)) return busiest;
    for (int gpu = 0; gpu < sides->ffn.count - 1; gpu++) {
        struct ffn_load load = ffn_gpu_load(plan, layer, sides, gpu);
        if (load.rows > busiest.rows || (load.rows == busiest.rows && load.copies > busiest.copies))
            busiest = load;
    }
    return busiest;
}

/* Of a table, whole forward passes alone are known: what a lower level repeats takes no time. */
static void table_layer_cost(const struct plan *plan, struct recompute recompute, struct layer_cost *cost) {
    const struct cost_table *table = plan->point->table;
    cost->attention[PASS_FORWARD] = table->attn_fwd_s;
    cost->attention[PASS_RECOMPUTE] = recompute.attention == ATTENTION_FULL ? table->attn_fwd_s : 0;
    cost->attention[PASS_BACKWARD] = table->attn_bwd_s;
    cost->attention[PASS_WEIGHT] = table->attn_wgrad_s;
    cost->ffn[PASS_FORWARD] = table->ffn_fwd_s;
    cost->ffn[PASS_RECOMPUTE] = recompute.ffn == FFN_FULL ? table->ffn_fwd_s : 0;
    cost->ffn[PASS_BACKWARD] = table->ffn_bwd_s;
    cost->ffn[PASS_WEIGHT] = table->ffn_wgrad_s;
}

/* Gathering the keys and values of the slowest run's sequences; scattering their gradients takes as long. */
static double gather_seconds(const struct plan *plan, const struct side *attention) {
    int cp = plan->parallel.cp;
    double bytes = (double)plan->point->micro_batch_size * plan->point->seq_len *
                   model_key_value_bytes(plan->point->model);
    double slowest = 0;
    for (int run = 0; cp > 1 && run < attention->count; run += cp)
        slowest =
            fmax(slowest, cluster_reduce_seconds(plan->point->cluster, attention->gpus + run, cp, bytes));
    return slowest;
}

static void attention_cost(const struct plan *plan, int layer, struct recompute recompute,
                           const struct side *side, struct layer_cost *cost) {
    const struct model *model = plan->point->model;
    const struct cluster *cluster = plan->point->cluster;
    struct tokens tokens = attention_tokens(plan);
    double speed = cluster_slowest(cluster, side->gpus, side->count), gradient = gradient_bytes(plan);
    double overhead = cluster->rates[RATE_LAYER_OVERHEAD], gather = gather_seconds(plan, side);
    bool full = recompute.attention == ATTENTION_FULL;
    struct work forward = model_attention_work(model, layer, WORK_FORWARD, tokens, gradient);
    struct work input = model_attention_work(model, layer, WORK_BACKWARD_INPUT, tokens, gradient);
    struct work weight = model_attention_work(model, layer, WORK_BACKWARD_WEIGHT, tokens, gradient);
    struct work again =
        model_attention_again_work(model, layer, (enum attention_recompute)recompute.attention, tokens);
    cost->gather[PASS_FORWARD] = gather;
    cost->gather[PASS_RECOMPUTE] = full ? gather : 0;
    cost->gather[PASS_BACKWARD] = 2 * gather;
    double *seconds = cost->attention;
    seconds[PASS_FORWARD] = seconds_of(cluster, &forward, false, speed) + overhead + gather;
    seconds[PASS_RECOMPUTE] = seconds_of(cluster, &again, false, speed) + (full ? overhead + gather : 0);
    seconds[PASS_BACKWARD] = seconds_of(cluster, &input, true, speed) + overhead + 2 * gather;
    seconds[PASS_WEIGHT] = seconds_of(cluster, &weight, true, speed);
}

/* A pipelined system that recomputes all runs the whole layer again, as its checkpoint does. */
static bool checkpoints(struct recompute recompute, const struct sides *sides) {
    return is_pipelined(sides) && recompute.attention == ATTENTION_FULL && recompute.ffn == FFN_FULL;
}

static void ffn_cost(const struct plan *plan, int layer, struct recompute recompute,
                     const struct sides *sides, double *seconds) {
    const struct model *model = plan->point->model;
    const struct cluster *cluster = plan->point->cluster;
    double speed = cluster_slowest(cluster, sides->ffn.gpus, sides->ffn.count);
    double gradient = gradient_bytes(plan);
    struct ffn_load load = busiest_load(plan, layer, sides);
    struct work forward = model_ffn_work(model, layer, WORK_FORWARD, load, gradient);
    struct work input = model_ffn_work(model, layer, WORK_BACKWARD_INPUT, load, gradient);
    struct work weight = model_ffn_work(model, layer, WORK_BACKWARD_WEIGHT, load, gradient);
    struct work again = checkpoints(recompute, sides)
                            ? forward
                            : model_ffn_again_work(model, layer, (enum ffn_recompute)recompute.ffn, load);
    seconds[PASS_FORWARD] = seconds_of(cluster, &forward, false, speed);
    seconds[PASS_RECOMPUTE] = seconds_of(cluster, &again, false, speed);
    seconds[PASS_BACKWARD] = seconds_of(cluster, &input, true, speed);
    seconds[PASS_WEIGHT] = seconds_of(cluster, &weight, true, speed);
}

/* A dense layer of a pipelined system stays on its GPU; of a disaggregated one it sends one copy. */
static bool has_transfers(const struct plan *plan, int layer, const struct sides *sides) {
    return model_layer_is_moe(plan->point->model, layer) || !is_pipelined(sides);
}

/* Shares of the copies at each feed-forward GPU, and their bytes, those that a capacity factor drops left
 * out.
 */
static double ffn_shares(const struct plan *plan, int layer, const struct sides *sides, double *shares) {
    int count = sides->ffn.count;
    bool moe = model_layer_is_moe(plan->point->model, layer);
    double kept = 0;
    for (int i = 0; i < count; i++) kept += shares[i] = moe ? gpu_share(plan, count, i) : 1.0 / count;
    for (int i = 0; i < count; i++) shares[i] /= kept;
    return kept * all_copies(plan, layer, sides) * model_hidden_bytes(plan->point->model);
}

static struct ports ports_of(const struct side *side, const double *shares) {
    return (struct ports){side->gpus, shares, side->count, side->nics, side->nic_count};
}

/* Between the feed-forward side and `other`, whose GPUs have equal parts of the tokens; 1/parts of them. A
   backward transfer takes its forward one's ports in the other direction, so it costs the same. */
static struct transfer_cost leg_cost(const struct plan *plan, int layer, const struct sides *sides,
                                     const struct side *other, bool to_ffn, int parts) {
    if (plan->point->table) {
        double seconds = to_ffn ? plan->point->table->dispatch_s : plan->point->table->combine_s;
        return (struct transfer_cost){.seconds = seconds / parts};
    }
    if (!has_transfers(plan, layer, sides)) return (struct transfer_cost){0};
    double *shares = must_alloc((size_t)(sides->ffn.count + other->count) * sizeof *shares);
    double *even = shares + sides->ffn.count, bytes = ffn_shares(plan, layer, sides, shares) / parts;
    for (int i = 0; i < other->count; i++) even[i] = 1.0 / other->count;
    struct ports experts = ports_of(&sides->ffn, shares), tokens = ports_of(other, even);
    struct traffic traffic =
        cluster_exchange(plan->point->cluster, to_ffn ? tokens : experts, to_ffn ? experts : tokens, bytes);
    free(shares);
    return (struct transfer_cost){traffic.seconds, bytes / (to_ffn ? other->count : sides->ffn.count)};
}

struct transfer_cost plan_combine_cost(const struct plan *plan, int layer, struct sides sides, int parts) {
    return leg_cost(plan, layer, &sides, &sides.next, false, parts);
}

/* The sides' NICs share the bytes as in an exchange. */
struct transfer_cost plan_hop_cost(const struct plan *plan, struct side from, struct side to) {
    double each = plan_tokens(plan) * model_hidden_bytes(plan->point->model);
    if (plan->point->table) return (struct transfer_cost){plan->point->table->p2p_s, each};
    double *even = must_alloc((size_t)from.count * sizeof *even);
    for (int i = 0; i < from.count; i++) even[i] = 1.0 / from.count;
    struct traffic traffic =
        cluster_exchange(plan->point->cluster, ports_of(&from, even), ports_of(&to, even), each * from.count);
    free(even);
    return (struct transfer_cost){traffic.seconds, each};
}

struct transfer_cost plan_dispatch_cost(const struct plan *plan, int layer, struct sides sides) {
    return leg_cost(plan, layer, &sides, &sides.attention, true, 1);
}

struct layer_cost plan_computation_cost(const struct plan *plan, int layer, struct recompute recompute,
                                        struct sides sides) {
    struct layer_cost cost = {0};
    if (plan->point->table) {
        table_layer_cost(plan, recompute, &cost);
        return cost;
    }
    attention_cost(plan, layer, recompute, &sides.attention, &cost);
    ffn_cost(plan, layer, recompute, &sides, cost.ffn);
    return cost;
}

struct layer_cost plan_layer_cost(const struct plan *plan, int layer, struct recompute recompute,
                                  struct sides sides) {
    struct layer_cost cost = plan_computation_cost(plan, layer, recompute, sides);
    cost.dispatch = plan_dispatch_cost(plan, layer, sides);
    cost.combine = plan_combine_cost(plan, layer, sides, 1);
    return cost;
}

/* An embedding or head has no split passes: its backward is both halves. */
double plan_embed_cost(const struct plan *plan, bool backward, double tokens, double slowest) {
    const struct cost_table *table = plan->point->table;
    const struct model *model = plan->point->model;
    if (table) return backward ? table->embed_bwd_s : table->embed_fwd_s;
    struct work work = model_embed_work(model, backward ? WORK_BACKWARD_WEIGHT : WORK_FORWARD, tokens);
    return seconds_of(plan->point->cluster, &work, backward, slowest);
}

double plan_head_cost(const struct plan *plan, bool backward, double tokens, double slowest) {
    const struct cost_table *table = plan->point->table;
    const struct model *model = plan->point->model;
    if (table) return backward ? table->head_bwd_s : table->head_fwd_s;
    struct work work = model_head_work(model, backward ? WORK_BACKWARD_INPUT : WORK_FORWARD, tokens, 0);
    if (backward)
        work = work_add(work, model_head_work(model, WORK_BACKWARD_WEIGHT, tokens, gradient_bytes(plan)));
    return seconds_of(plan->point->cluster, &work, backward, slowest);
}

/* ---- parameters, gradients, optimizer ---------------------------------------------------------------- */

static double moment_bytes(const struct plan *plan) /* both moments of one parameter */
{
    return plan->memory.moments == PRECISION_BF16 ? 4 : 2 * model_wide_bytes(plan->point->model);
}

/* A BF16 weight has an FP32 master; a wider one is its own. */
static double master_bytes(const struct plan *plan) {
    return plan->point->model->dtype == DTYPE_BF16 ? 4 : 0;
}

double plan_static_bytes(const struct plan *plan, const struct shard *shards, int count) {
    double bytes = 0, weight = model_element_bytes(plan->point->model);
    for (int i = 0; i < count; i++) {
        double optimizer = plan->memory.offload ? 0 : master_bytes(plan) + moment_bytes(plan);
        if (plan->memory.zero >= 1) optimizer /= shards[i].count;
        bytes += shards[i].parameters * (weight + gradient_bytes(plan) + optimizer);
    }
    return bytes;
}

struct step_end plan_step_end(const struct plan *plan, const struct shard *shards, int count) {
    const struct cost_table *table = plan->point->table;
    if (table) return (struct step_end){table->grad_sync_s, table->param_gather_s, table->optimizer_s, 0, 0};
    const struct cluster *cluster = plan->point->cluster;
    struct step_end end = {0};
    double updated = 0, weight = model_element_bytes(plan->point->model);
    for (int i = 0; i < count; i++) {
        double grads = shards[i].parameters * gradient_bytes(plan);
        bool sharded = plan->memory.zero >= 1 && shards[i].count > 1;
        double half = cluster_reduce_seconds(cluster, shards[i].gpus, shards[i].count, grads);
        end.grad_sync += sharded ? half : 2 * half; /* reduce-scatter alone, or with the all-gather */
        if (shards[i].count > 1) end.sync_bytes += (sharded ? 1 : 2) * grads;
        if (sharded) {
            end.param_gather += cluster_reduce_seconds(cluster, shards[i].gpus, shards[i].count,
                                                       weight * shards[i].parameters);
            end.gather_bytes += weight * shards[i].parameters;
        }
        updated += shards[i].parameters / (sharded ? shards[i].count : 1);
    }
    /* AdamW reads gradient, master weight and moments, writes master weight, moments and weight. */
    double master = fmax(master_bytes(plan), weight);
    double written = master_bytes(plan) > 0 ? weight : 0;
    double traffic = updated * (gradient_bytes(plan) + 2 * (master + moment_bytes(plan)) + written);
    end.optimizer = traffic / cluster->rates[RATE_HBM] + cluster->rates[RATE_KERNEL_LAUNCH];
    if (plan->memory.offload) { /* gradients down, weights up and the update itself run bucket by bucket,
                                   overlapped */
        double copy = updated * fmax(gradient_bytes(plan), weight) / cluster->rates[RATE_HOST_COPY];
        end.optimizer = fmax(copy, updated / cluster->rates[RATE_HOST_ADAM]);
    }
    return end;
}

/* ---- activations ------------------------------------------------------------------------------------- */

static struct layer_memory memory_of_load(const struct plan *plan, int layer, struct recompute recompute,
                                          struct ffn_load load) {
    const struct model *model = plan->point->model;
    enum attention_recompute attention = (enum attention_recompute)recompute.attention;
    enum ffn_recompute ffn = (enum ffn_recompute)recompute.ffn;
    double tokens = plan_tokens(plan), routed = model_layer_is_moe(model, layer) ? load.copies : 0;
    int cp = plan->parallel.cp;
    return (struct layer_memory){
        .layer_input = tokens * model_hidden_bytes(model),
        .attention = tokens * model_attention_activation_bytes(model, layer, attention),
        .gathered = cp > 1 ? tokens * cp * model_key_value_bytes(model) : 0,
        .expert_input = load.copies * model_hidden_bytes(model),
        .ffn = routed * model_expert_activation_bytes(model, layer, ffn) +
               load.tokens * model_shared_activation_bytes(model, layer, ffn),
        .full_attention = tokens * model_attention_activation_bytes(model, layer, ATTENTION_NONE),
        .full_ffn = routed * model_expert_activation_bytes(model, layer, FFN_NONE) +
                    load.tokens * model_shared_activation_bytes(model, layer, FFN_NONE),
    };
}

/* Most copies, which may be elsewhere than most rows. */
struct layer_memory plan_layer_memory(const struct plan *plan, int layer, struct recompute recompute,
                                      struct sides sides) {
    struct ffn_load fullest = busiest_load(plan, layer, &sides);
    for (int gpu = 0; !is_balanced(plan) && gpu < sides.ffn.count; gpu++) {
        struct ffn_load load = ffn_gpu_load(plan, layer, &sides, gpu);
        if (load.copies > fullest.copies) fullest = load;
    }
    return memory_of_load(plan, layer, recompute, fullest);
}

struct layer_memory plan_gpu_layer_memory(const struct plan *plan, int layer, struct recompute recompute,
                                          struct sides sides, int ffn_gpu) {
    return memory_of_load(plan, layer, recompute, ffn_gpu_load(plan, layer, &sides, ffn_gpu));
}

double plan_usable_memory(const struct point *point) {
    if (point->table) return INFINITY;
    return point->cluster->gpu.memory_bytes - point->cluster->rates[RATE_MEMORY_RESERVE];
}

/* ---- sizes ------------------------------------------------------------------------------------------- */

void plan_resize(struct plan *plan, int replicas, int replica_gpus, int attention_gpus) {
    const struct point *point = plan->point;
    double per_micro_batch = (double)attention_gpus / plan->parallel.cp * point->micro_batch_size;
    plan->replicas = replicas;
    if (point->global_batch) {
        /* More replicas than micro-batches would leave some without work. */
        double needed = ceil(point->global_batch / per_micro_batch);
        if (plan->replicas > needed) plan->replicas = (int)needed;
        plan->micro_batches = (int)ceil(point->global_batch / (per_micro_batch * plan->replicas));
        plan->sequences = point->global_batch;
    } else {
        plan->micro_batches = point->micro_batches;
        plan->sequences = per_micro_batch * plan->micro_batches * plan->replicas;
    }
    plan->gpus = plan->replicas * replica_gpus;
}

bool plan_size(struct plan *plan, int replica_gpus, int attention_gpus) {
    int replicas = cluster_gpus(plan->point->cluster) / replica_gpus;
    if (replicas < 1) return false;
    plan_resize(plan, replicas, replica_gpus, attention_gpus);
    return true;
}

bool plan_check_cp(const struct plan *plan, int attention_gpus, const char *gpus_key, struct errors *errors) {
    int cp = plan->parallel.cp, before = errors->count;
    if (attention_gpus % cp != 0)
        errors_add(errors, NULL, "parallel.cp", "found %d; a divisor of %s %d is allowed", cp, gpus_key,
                   attention_gpus);
    if (cp > 1 && plan->point->seq_len % (2 * cp) != 0)
        errors_add(errors, NULL, "parallel.cp",
                   "found %d with seq_len %d; a multiple of 2 × cp tokens a sequence is allowed", cp,
                   plan->point->seq_len);
    return errors->count == before;
}
