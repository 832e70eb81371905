/*
What each operation of a plan lasts and moves, and what its GPUs hold.

Either the cost model (work ÷ achieved rate, bytes ÷ achieved bandwidth, latency, launches; the cluster file
names the source of each rate) or the manifest's table of explicit durations. Both sides of a worker group are
treated alike: the attention side has micro_batch_size × seq_len tokens a GPU, the feed-forward side shares
all copies of them by the experts each GPU holds, and the busiest GPU sets the pace, since a group's transfers
wait for all its members.
*/
#include "plan/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Seconds of `work` on a GPU of `speed` (1: as the rates say). */
static double seconds_of(const struct cluster *cluster, struct work work, bool backward, double speed) {
    const double *rates = cluster->rates;
    double core = rates[backward ? RATE_CORE_BACKWARD : RATE_CORE_FORWARD];
    return (work.gemm_flops / rates[RATE_GEMM] + work.core_flops / core +
            work.grouped_flops / rates[RATE_GROUPED_GEMM] + work.bytes / rates[RATE_HBM] +
            work.kernels * rates[RATE_KERNEL_LAUNCH]) /
           speed;
}

static double tokens_per_gpu(const struct plan *plan) {
    return (double)plan->point->micro_batch_size * plan->point->seq_len;
}

/* ---- routing ----------------------------------------------------------------------------------------- */

/* Shares of all copies that each of `gpus` GPUs receives; they sum to less than 1 where a capacity factor
 * drops some. */
static void expert_shares(const struct plan *plan, int gpus, double *shares) {
    const struct model *model = plan->point->model;
    double copies = (double)plan->point->seq_len * model->moe.top_k, limit = INFINITY;
    if (model->moe.capacity_factor > 0) limit = model_expert_capacity(model, plan->point->seq_len) / copies;
    for (int gpu = 0; gpu < gpus; gpu++) {
        shares[gpu] = 0;
        int end = plan_first_expert(model->moe.experts, gpus, gpu + 1);
        for (int expert = plan_first_expert(model->moe.experts, gpus, gpu); expert < end; expert++)
            shares[gpu] += fmin(plan->point->routing.share[expert], limit);
    }
}

/* The busiest GPU's share of all copies, and the experts it holds. */
static double busiest_share(const struct plan *plan, int gpus, double *experts) {
    double *shares = must_alloc((size_t)gpus * sizeof *shares), busiest = 0;
    expert_shares(plan, gpus, shares);
    for (int gpu = 0; gpu < gpus; gpu++)
        if (shares[gpu] > busiest) {
            int count = plan->point->model->moe.experts;
            busiest = shares[gpu];
            if (experts)
                *experts = plan_first_expert(count, gpus, gpu + 1) - plan_first_expert(count, gpus, gpu);
        }
    free(shares);
    return busiest;
}

/* ---- layers ------------------------------------------------------------------------------------------ */

/* Copies that the busiest feed-forward GPU computes for one micro-batch of a layer. */
static double busiest_copies(const struct plan *plan, int layer, int attention_count, int ffn_count,
                             double *experts) {
    const struct model *model = plan->point->model;
    double all = attention_count * tokens_per_gpu(plan) * model_copies(model, layer);
    *experts = 1;
    if (!model_layer_is_moe(model, layer)) return all / ffn_count;
    return all * busiest_share(plan, ffn_count, experts);
}

static bool is_pipelined(struct sides sides) {
    return sides.attention_gpus == sides.ffn_gpus;
}

/* Tokens that pass the shared experts, or the dense FFN, of the busiest feed-forward GPU. On separate sides a
   token's shared experts run where its first choice runs, and first choices are spread as all copies are. */
static double shared_tokens(const struct plan *plan, int layer, struct sides sides, double copies) {
    if (is_pipelined(sides)) return tokens_per_gpu(plan);
    return copies / model_copies(plan->point->model, layer);
}

static void table_layer_cost(const struct plan *plan, struct layer_cost *cost) {
    const struct cost_table *table = plan->point->table;
    bool full = plan->memory.recompute == RECOMPUTE_FULL;
    cost->attention[PASS_FORWARD] = table->attn_fwd_s;
    cost->attention[PASS_RECOMPUTE] = full ? table->attn_fwd_s : 0;
    cost->attention[PASS_BACKWARD] = table->attn_bwd_s;
    cost->attention[PASS_WEIGHT] = table->attn_wgrad_s;
    cost->ffn[PASS_FORWARD] = table->ffn_fwd_s;
    cost->ffn[PASS_RECOMPUTE] = full ? table->ffn_fwd_s : 0;
    cost->ffn[PASS_BACKWARD] = table->ffn_bwd_s;
    cost->ffn[PASS_WEIGHT] = table->ffn_wgrad_s;
    cost->dispatch = table->dispatch_s;
    cost->combine = table->combine_s;
}

static void attention_cost(const struct plan *plan, int layer, double speed, double *seconds) {
    const struct point *point = plan->point;
    const struct model *model = point->model;
    double sequences = point->micro_batch_size;
    struct work forward = model_attention_work(model, layer, WORK_FORWARD, sequences, point->seq_len);
    struct work input = model_attention_work(model, layer, WORK_BACKWARD_INPUT, sequences, point->seq_len);
    struct work weight = model_attention_work(model, layer, WORK_BACKWARD_WEIGHT, sequences, point->seq_len);
    struct work again = {0};
    if (plan->memory.recompute == RECOMPUTE_FULL) again = forward;
    if (plan->memory.recompute == RECOMPUTE_SELECTIVE)
        again = model_attention_selective_work(model, tokens_per_gpu(plan));
    seconds[PASS_FORWARD] = seconds_of(point->cluster, forward, false, speed);
    seconds[PASS_RECOMPUTE] = seconds_of(point->cluster, again, false, speed);
    seconds[PASS_BACKWARD] = seconds_of(point->cluster, input, true, speed);
    seconds[PASS_WEIGHT] = seconds_of(point->cluster, weight, true, speed);
}

static void ffn_cost(const struct plan *plan, int layer, struct sides sides, double speed, double *seconds) {
    const struct model *model = plan->point->model;
    const struct cluster *cluster = plan->point->cluster;
    double experts, copies = busiest_copies(plan, layer, sides.attention_count, sides.ffn_count, &experts);
    double tokens = shared_tokens(plan, layer, sides, copies);
    struct work forward = model_ffn_work(model, layer, WORK_FORWARD, copies, tokens, experts);
    struct work again = {0};
    if (plan->memory.recompute == RECOMPUTE_FULL) again = forward;
    if (plan->memory.recompute == RECOMPUTE_SELECTIVE)
        again = model_ffn_selective_work(model, layer, copies, tokens);
    seconds[PASS_FORWARD] = seconds_of(cluster, forward, false, speed);
    seconds[PASS_RECOMPUTE] = seconds_of(cluster, again, false, speed);
    seconds[PASS_BACKWARD] = seconds_of(
        cluster, model_ffn_work(model, layer, WORK_BACKWARD_INPUT, copies, tokens, experts), true, speed);
    seconds[PASS_WEIGHT] = seconds_of(
        cluster, model_ffn_work(model, layer, WORK_BACKWARD_WEIGHT, copies, tokens, experts), true, speed);
}

/* Dispatch and combine. A backward transfer takes its forward one's ports in the other direction, so it costs
   the same. A dense layer of a pipelined system stays on its GPU; of a disaggregated one it sends one copy.
 */
static void transfer_cost(const struct plan *plan, int layer, struct sides sides, struct layer_cost *cost) {
    const struct model *model = plan->point->model;
    bool moe = model_layer_is_moe(model, layer);
    if (!moe && is_pipelined(sides)) return;
    int all = sides.attention_count + sides.ffn_count + sides.next_count;
    double *shares = must_alloc((size_t)all * sizeof *shares);
    double *loads = shares + sides.attention_count, *next_shares = loads + sides.ffn_count, kept = 0;
    for (int i = 0; i < sides.attention_count; i++) shares[i] = 1.0 / sides.attention_count;
    for (int i = 0; i < sides.ffn_count; i++) loads[i] = 1.0 / sides.ffn_count;
    for (int i = 0; i < sides.next_count; i++) next_shares[i] = 1.0 / sides.next_count;
    if (moe) expert_shares(plan, sides.ffn_count, loads);
    for (int i = 0; i < sides.ffn_count; i++)
        kept += loads[i]; /* below 1 where a capacity factor drops copies */
    for (int i = 0; i < sides.ffn_count; i++) loads[i] /= kept;
    double bytes = kept * sides.attention_count * tokens_per_gpu(plan) * model_copies(model, layer) *
                   model_hidden_bytes(model);
    struct ports attention = {sides.attention_gpus, shares, sides.attention_count};
    struct ports ffn = {sides.ffn_gpus, loads, sides.ffn_count};
    struct ports next = {sides.next_gpus, next_shares, sides.next_count};
    cost->dispatch = cluster_exchange(plan->point->cluster, attention, ffn, bytes).seconds;
    cost->dispatch_bytes = bytes / sides.attention_count;
    cost->combine = cluster_exchange(plan->point->cluster, ffn, next, bytes).seconds;
    cost->combine_bytes = bytes / sides.ffn_count;
    free(shares);
}

struct layer_cost plan_layer_cost(const struct plan *plan, int layer, struct sides sides) {
    struct layer_cost cost = {0};
    if (plan->point->table) {
        table_layer_cost(plan, &cost);
        return cost;
    }
    const struct cluster *cluster = plan->point->cluster;
    attention_cost(plan, layer, cluster_slowest(cluster, sides.attention_gpus, sides.attention_count),
                   cost.attention);
    ffn_cost(plan, layer, sides, cluster_slowest(cluster, sides.ffn_gpus, sides.ffn_count), cost.ffn);
    transfer_cost(plan, layer, sides, &cost);
    return cost;
}

/* An embedding or head has no split passes: its backward is both halves. */
static double end_cost(const struct plan *plan, enum pass pass, double tokens, double slowest, bool head) {
    struct work (*work_of)(const struct model *, enum work_pass, double) =
        head ? model_head_work : model_embed_work;
    struct work work = work_of(plan->point->model, WORK_FORWARD, tokens);
    if (pass != PASS_FORWARD)
        work = work_add(work_of(plan->point->model, WORK_BACKWARD_INPUT, tokens),
                        work_of(plan->point->model, WORK_BACKWARD_WEIGHT, tokens));
    return seconds_of(plan->point->cluster, work, pass != PASS_FORWARD, slowest);
}

double plan_embed_cost(const struct plan *plan, enum pass pass, double tokens, double slowest) {
    const struct cost_table *table = plan->point->table;
    if (table) return pass == PASS_FORWARD ? table->embed_fwd_s : table->embed_bwd_s;
    return end_cost(plan, pass, tokens, slowest, false);
}

double plan_head_cost(const struct plan *plan, enum pass pass, double tokens, double slowest) {
    const struct cost_table *table = plan->point->table;
    if (table) return pass == PASS_FORWARD ? table->head_fwd_s : table->head_bwd_s;
    return end_cost(plan, pass, tokens, slowest, true);
}

/* ---- parameters, gradients, optimizer ---------------------------------------------------------------- */

static double gradient_bytes(const struct plan *plan) {
    return plan->memory.grads == PRECISION_BF16 ? 2 : model_wide_bytes(plan->point->model);
}

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

/* `copies` arrive at the feed-forward GPU. */
static struct layer_memory memory_of_copies(const struct plan *plan, int layer, struct sides sides,
                                            double copies) {
    const struct model *model = plan->point->model;
    enum recompute level = (enum recompute)plan->memory.recompute;
    double tokens = tokens_per_gpu(plan);
    double ffn_tokens = shared_tokens(plan, layer, sides, copies);
    double routed = model_layer_is_moe(model, layer) ? copies : 0;
    return (struct layer_memory){
        .layer_input = tokens * model_hidden_bytes(model),
        .attention = tokens * model_attention_activation_bytes(model, layer, level),
        .expert_input = copies * model_hidden_bytes(model),
        .ffn = routed * model_expert_activation_bytes(model, layer, level) +
               ffn_tokens * model_shared_activation_bytes(model, layer, level),
        .full_attention = tokens * model_attention_activation_bytes(model, layer, RECOMPUTE_NONE),
        .full_ffn = routed * model_expert_activation_bytes(model, layer, RECOMPUTE_NONE) +
                    ffn_tokens * model_shared_activation_bytes(model, layer, RECOMPUTE_NONE),
    };
}

struct layer_memory plan_layer_memory(const struct plan *plan, int layer, struct sides sides) {
    double experts, busiest = busiest_copies(plan, layer, sides.attention_count, sides.ffn_count, &experts);
    return memory_of_copies(plan, layer, sides, busiest);
}

struct layer_memory plan_gpu_layer_memory(const struct plan *plan, int layer, struct sides sides,
                                          int ffn_gpu) {
    double copies = sides.attention_count * tokens_per_gpu(plan) * model_copies(plan->point->model, layer);
    double *shares = must_alloc((size_t)sides.ffn_count * sizeof *shares);
    expert_shares(plan, sides.ffn_count, shares);
    copies *= model_layer_is_moe(plan->point->model, layer) ? shares[ffn_gpu] : 1.0 / sides.ffn_count;
    free(shares);
    return memory_of_copies(plan, layer, sides, copies);
}

/* ---- sizes ------------------------------------------------------------------------------------------- */

void plan_resize(struct plan *plan, int replicas, int replica_gpus, int attention_gpus) {
    const struct point *point = plan->point;
    double per_micro_batch = (double)attention_gpus * point->micro_batch_size;
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
