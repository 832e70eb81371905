/*
Reading off a schedule which rank holds what.
*/
#include "state/ranks.h"

#include <limits.h>

/* ---- groups ------------------------------------------------------------------------------------------ */

/* Where forward operations of each kind run. */
static void read_groups(struct ranks *ranks, struct arena *arena) {
    const struct schedule *schedule = ranks->schedule;
    for (int layer = 0; layer < ranks->model->layers; layer++)
        ranks->attention[layer] = ranks->ffn[layer] = -1;
    ranks->embed = -1;
    for (int id = 0; id < schedule->op_count; id++) {
        const struct operation *op = &schedule->ops[id];
        if (op->pass != PASS_FORWARD || op->lane_count != 1) continue;
        int group = op->lanes[0] / RESOURCE_COUNT;
        if (op->kind == KIND_ATTENTION) ranks->attention[op->layer] = group;
        if (op->kind == KIND_FFN) ranks->ffn[op->layer] = group;
        if (op->kind == KIND_EMBED) ranks->embed = group;
        if (op->kind != KIND_HEAD) continue;
        if (!ranks->heads) ranks->heads = arena_alloc(arena, (size_t)op->chunks * sizeof(int));
        ranks->head_count = op->chunks;
        ranks->heads[op->chunk] = group;
    }
}

/* A layer's number in its stage or group, lowest first, is what the plan goes by. */
static void read_recompute(struct ranks *ranks) {
    for (int layer = 0; layer < ranks->model->layers; layer++) {
        int index = 0;
        for (int lower = 0; lower < layer; lower++)
            index += ranks->attention[lower] == ranks->attention[layer];
        ranks->recompute[layer] = plan_recompute(ranks->plan, index);
    }
}

/* Tokens stay with the rank of the same index from group to group, so attention groups are alike. */
static bool check_groups(struct ranks *ranks, struct errors *errors) {
    const struct schedule *schedule = ranks->schedule;
    int before = errors->count;
    if (ranks->embed < 0 || !ranks->head_count)
        errors_add(errors, NULL, "schedule", "has no embedding or no head");
    for (int layer = 0; layer < ranks->model->layers && errors->count == before; layer++) {
        int attention = ranks->attention[layer];
        if (attention < 0 || ranks->ffn[layer] < 0)
            errors_add(errors, NULL, "schedule", "layer %d has no attention or no feed-forward operation",
                       layer);
        else if (schedule->groups[attention].gpus != schedule->groups[ranks->embed].gpus)
            errors_add(errors, NULL, "schedule", "attention groups differ in size: %d and %d GPUs",
                       schedule->groups[ranks->embed].gpus, schedule->groups[attention].gpus);
        else if ((attention == ranks->ffn[layer]) != (ranks->attention[0] == ranks->ffn[0]))
            errors_add(errors, NULL, "schedule", "only some layers are on separate groups");
    }
    for (int i = 1; i < ranks->head_count && errors->count == before; i++)
        if (schedule->groups[ranks->heads[i]].gpus != schedule->groups[ranks->heads[0]].gpus)
            errors_add(errors, NULL, "schedule", "groups with a head differ in size: %d and %d GPUs",
                       schedule->groups[ranks->heads[0]].gpus, schedule->groups[ranks->heads[i]].gpus);
    return errors->count == before;
}

/* Tokens, copies and the heads that announce them are counted in int. */
static bool check_sizes(const struct ranks *ranks, struct errors *errors) {
    enum { MOST_COPY_BYTES = 64 };
    const struct point *point = ranks->plan->point;
    double copies = ranks->attention_ranks * plan_tokens(ranks->plan) * ranks->model->moe.top_k;
    if (copies * MOST_COPY_BYTES <= INT_MAX) return true;
    errors_add(errors, NULL, "seq_len",
               "found %d with micro_batch_size %d: a micro-batch has %.0f copies; at most %d are allowed",
               point->seq_len, point->micro_batch_size, copies, INT_MAX / MOST_COPY_BYTES);
    return false;
}

bool ranks_read(struct ranks *ranks, const struct plan *plan, const struct schedule *schedule,
                struct arena *arena, struct errors *errors) {
    *ranks = (struct ranks){.plan = plan, .model = plan->point->model, .schedule = schedule};
    size_t layers = (size_t)ranks->model->layers;
    ranks->first = arena_alloc(arena, (size_t)schedule->group_count * sizeof(int));
    ranks->attention = arena_alloc(arena, layers * sizeof(int));
    ranks->ffn = arena_alloc(arena, layers * sizeof(int));
    ranks->recompute = arena_alloc(arena, layers * sizeof *ranks->recompute);
    for (int group = 0; group < schedule->group_count; group++) {
        ranks->first[group] = ranks->replica_size;
        ranks->replica_size += schedule->groups[group].gpus;
    }
    ranks->count = plan->replicas * ranks->replica_size;
    read_groups(ranks, arena);
    if (!check_groups(ranks, errors)) return false;
    ranks->attention_ranks = schedule->groups[ranks->embed].gpus;
    ranks->pipelined = ranks->attention[0] == ranks->ffn[0];
    read_recompute(ranks);
    return check_sizes(ranks, errors);
}

struct seat seat_of(const struct ranks *ranks, int rank) {
    struct seat seat = {.replica = rank / ranks->replica_size};
    int within = rank % ranks->replica_size;
    while (within >= ranks->first[seat.group] + ranks->schedule->groups[seat.group].gpus) seat.group++;
    seat.index = within - ranks->first[seat.group];
    return seat;
}

int rank_at(const struct ranks *ranks, struct seat seat) {
    return seat.replica * ranks->replica_size + ranks->first[seat.group] + seat.index;
}

/* ---- parameters -------------------------------------------------------------------------------------- */

static bool has_expert(const struct ranks *ranks, struct seat seat, const struct parameter *parameter) {
    int experts = ranks->model->moe.experts, here = ranks->schedule->groups[seat.group].gpus;
    return ranks->ffn[parameter->layer] == seat.group &&
           parameter->expert >= plan_first_expert(experts, here, seat.index) &&
           parameter->expert < plan_first_expert(experts, here, seat.index + 1);
}

static bool has_head(const struct ranks *ranks, int group) {
    return head_part(ranks, (struct seat){0, group, 0}) >= 0;
}

bool rank_holds(const struct ranks *ranks, int rank, const struct parameter *parameter) {
    struct seat seat = seat_of(ranks, rank);
    int layer = parameter->layer;
    switch (parameter->owner) {
    case OWNER_EMBEDDING:
        return seat.group == ranks->embed || (ranks->model->tie_embeddings && has_head(ranks, seat.group));
    case OWNER_ATTENTION:
        return seat.group == ranks->attention[layer];
    case OWNER_FFN_NORM:
        return seat.group == ranks->attention[layer] || seat.group == ranks->ffn[layer];
    case OWNER_EXPERT:
        return has_expert(ranks, seat, parameter);
    case OWNER_SHARED:
        return seat.group == ranks->ffn[layer];
    case OWNER_HEAD:
        return has_head(ranks, seat.group);
    }
    return false;
}

struct holder {
    const struct ranks *ranks;
    int rank;
};

static bool keep(void *context, const struct parameter *parameter) {
    const struct holder *holder = context;
    return rank_holds(holder->ranks, holder->rank, parameter);
}

struct parameters rank_parameters(struct arena *arena, const struct ranks *ranks, int rank) {
    struct holder holder = {ranks, rank};
    return parameters_new(arena, ranks->model, keep, &holder);
}

int parameter_holders(const struct ranks *ranks, const struct parameter *parameter, int *holders) {
    int count = 0;
    for (int rank = 0; rank < ranks->count; rank++)
        if (rank_holds(ranks, rank, parameter)) holders[count++] = rank;
    return count;
}

/* ---- tokens ------------------------------------------------------------------------------------------ */

int64_t batch_sequences(const struct ranks *ranks) {
    return (int64_t)ranks->plan->sequences;
}

struct batch_part attention_batch(const struct ranks *ranks, int replica, int micro_batch, int index) {
    const struct point *point = ranks->plan->point;
    int cp = ranks->plan->parallel.cp, runs = ranks->attention_ranks / cp;
    int64_t size = point->micro_batch_size;
    int64_t place = ((int64_t)micro_batch * ranks->plan->replicas + replica) * runs + index / cp;
    int64_t rest = batch_sequences(ranks) - place * size;
    int count = (int)(rest < 0 ? 0 : rest < size ? rest : size);
    return (struct batch_part){place * size, {count, point->seq_len, cp, index % cp}};
}

int tokens_before(const struct ranks *ranks, int replica, int micro_batch, int index) {
    int tokens = 0;
    for (int i = 0; i < index; i++)
        tokens += rows_of_all(attention_batch(ranks, replica, micro_batch, i).sequences);
    return tokens;
}

int head_part(const struct ranks *ranks, struct seat seat) {
    for (int i = 0; i < ranks->head_count; i++)
        if (ranks->heads[i] == seat.group) return i * ranks->schedule->groups[seat.group].gpus + seat.index;
    return -1;
}

int head_tokens_before(const struct ranks *ranks, int replica, int micro_batch, int part) {
    if (ranks->pipelined) return tokens_before(ranks, replica, micro_batch, part);
    int gpus = ranks->schedule->groups[ranks->heads[0]].gpus, head = part / gpus;
    int64_t all = tokens_before(ranks, replica, micro_batch, ranks->attention_ranks);
    int64_t first = all * head / ranks->head_count, end = all * (head + 1) / ranks->head_count;
    return (int)(first + (end - first) * (part % gpus) / gpus);
}
