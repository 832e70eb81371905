/*
What moves between ranks: the transfers of a plan, in its sizes and with all groups' at the same time, and the
rates of exchange and reduction. The messages are plain ones; the executor's own put heads, lists of rows and
hand-overs between threads on top.
*/
#include "profile/profile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- messages ---------------------------------------------------------------------------------------- */

/* What this rank sends and receives in one exchange. */
struct exchange {
    MPI_Comm comm;
    struct message {
        int rank, bytes;
        bool in;
        char *memory;
    } * list;
    int count;
    MPI_Request *requests;
};

/* At most `most` messages. */
static struct exchange exchange_new(MPI_Comm comm, int most) {
    return (struct exchange){.comm = comm,
                             .list = must_alloc(((size_t)most + 1) * sizeof(struct message)),
                             .requests = must_alloc(((size_t)most + 1) * sizeof(MPI_Request))};
}

static void exchange_add(struct exchange *exchange, int rank, bool in, double bytes) {
    int whole = (int)fmin(bytes, 1 << 30);
    exchange->list[exchange->count++] = (struct message){rank, whole, in, must_alloc((size_t)whole + 1)};
}

static void exchange_run(void *work, int stage) {
    const struct exchange *exchange = work;
    (void)stage;
    for (int i = 0; i < exchange->count; i++) {
        const struct message *m = &exchange->list[i];
        if (m->in)
            MPI_Irecv(m->memory, m->bytes, MPI_BYTE, m->rank, 0, exchange->comm, &exchange->requests[i]);
        else
            MPI_Isend(m->memory, m->bytes, MPI_BYTE, m->rank, 0, exchange->comm, &exchange->requests[i]);
    }
    MPI_Waitall(exchange->count, exchange->requests, MPI_STATUSES_IGNORE);
}

/* Measures it on all ranks of comm, whatever each has to move, and frees it. 0 where nobody moves anything.
 */
static struct spread exchange_measure(struct exchange *exchange, MPI_Comm comm, int repeats) {
    struct spread seconds = {0};
    int all;
    MPI_Allreduce(&exchange->count, &all, 1, MPI_INT, MPI_SUM, comm);
    const struct lap lap = {comm, repeats, 1, exchange_run, exchange};
    if (all) lap_measure(&lap, &seconds);
    for (int i = 0; i < exchange->count; i++) free(exchange->list[i].memory);
    free(exchange->list);
    free(exchange->requests);
    return seconds;
}

/* ---- a plan's transfers ------------------------------------------------------------------------------ */

/* Of the copies of a micro-batch that leave a token's rank, the part that goes to a rank of the feed-forward
   group. */
static double share_of(const struct plan *plan, int layer, int gpus, int gpu) {
    const struct model *model = plan->point->model;
    if (!model_layer_is_moe(model, layer)) return 1.0 / gpus;
    double share = 0;
    for (int e = plan_first_expert(model->moe.experts, gpus, gpu);
         e < plan_first_expert(model->moe.experts, gpus, gpu + 1); e++)
        share += plan->point->routing.share[e];
    return share;
}

/* The groups that take a layer's output. */
static int next_group(const struct ranks *ranks, int layer) {
    if (ranks->pipelined) return ranks->attention[layer];
    return layer + 1 < ranks->model->layers ? ranks->attention[layer + 1] : ranks->heads[0];
}

/* Adds what this rank has of one layer's dispatch (or combine). */
static void add_leg(const struct measurement *measurement, struct exchange *exchange, int layer, bool combine,
                    struct seat own) {
    const struct ranks *ranks = measurement->ranks;
    const struct plan *plan = measurement->plan;
    int tokens_group = combine ? next_group(ranks, layer) : ranks->attention[layer], ffn = ranks->ffn[layer];
    int token_ranks = ranks->schedule->groups[tokens_group].gpus, gpus = ranks->schedule->groups[ffn].gpus;
    double bytes = plan_tokens(plan) * ranks->attention_ranks / token_ranks *
                   model_copies(plan->point->model, layer) * model_hidden_bytes(plan->point->model);
    for (int j = 0; own.group == tokens_group && j < gpus; j++) {
        int rank = rank_at(ranks, (struct seat){own.replica, ffn, j});
        if (ffn != own.group || j != own.index)
            exchange_add(exchange, rank, combine, bytes * share_of(plan, layer, gpus, j));
    }
    for (int i = 0; own.group == ffn && i < token_ranks; i++) {
        int rank = rank_at(ranks, (struct seat){own.replica, tokens_group, i});
        if (tokens_group != own.group || i != own.index)
            exchange_add(exchange, rank, !combine, bytes * share_of(plan, layer, gpus, own.index));
    }
}

/* One layer for every two groups: none sends or receives twice. */
static struct exchange leg_exchange(const struct measurement *measurement, bool combine) {
    const struct ranks *ranks = measurement->ranks;
    int groups = ranks->schedule->group_count, rank;
    bool *sends = must_alloc(2 * (size_t)groups * sizeof *sends), *receives = sends + groups;
    struct exchange exchange = exchange_new(measurement->comm, 4 * ranks->count);
    MPI_Comm_rank(measurement->comm, &rank);
    for (int layer = 0; layer < ranks->model->layers; layer++) {
        int from = combine ? ranks->ffn[layer] : ranks->attention[layer];
        int to = combine ? next_group(ranks, layer) : ranks->ffn[layer];
        bool moves = !ranks->pipelined || model_layer_is_moe(ranks->model, layer);
        if (!moves || sends[from] || receives[to]) continue;
        sends[from] = receives[to] = true;
        add_leg(measurement, &exchange, layer, combine, seat_of(ranks, rank));
    }
    free(sends);
    return exchange;
}

/* Each rank to the one at its place in the group behind, around all groups. */
static struct exchange pairwise_exchange(const struct measurement *measurement) {
    const struct ranks *ranks = measurement->ranks;
    int rank, count = ranks->count, stride = ranks->schedule->groups[0].gpus % count;
    double bytes = plan_tokens(measurement->plan) * model_hidden_bytes(ranks->model);
    struct exchange exchange = exchange_new(measurement->comm, 2);
    MPI_Comm_rank(measurement->comm, &rank);
    if (count == 1) return exchange;
    if (!stride) stride = 1;
    exchange_add(&exchange, (rank + stride) % count, false, bytes);
    exchange_add(&exchange, (rank + count - stride) % count, true, bytes);
    return exchange;
}

void measure_transfers(const struct measurement *measurement, struct spread *costs) {
    struct exchange dispatch = leg_exchange(measurement, false), combine = leg_exchange(measurement, true);
    struct exchange pairwise = pairwise_exchange(measurement);
    costs[COST_DISPATCH] = exchange_measure(&dispatch, measurement->comm, measurement->repeats);
    costs[COST_COMBINE] = exchange_measure(&combine, measurement->comm, measurement->repeats);
    costs[COST_P2P] = exchange_measure(&pairwise, measurement->comm, measurement->repeats);
}

/* ---- the step's end ---------------------------------------------------------------------------------- */

struct step_end_work {
    struct state *state;
    struct context context;
    struct optimizer optimizer;
};

static void run_step_end(void *work, int stage) {
    struct step_end_work *end = work;
    if (stage == 0) {
        state_reduce(end->state, true);
        state_reduce(end->state, false);
    } else if (stage == 1) {
        state_gather(end->state);
    } else {
        state_update(end->state, &end->context, &end->optimizer, 0, 1);
    }
}

void measure_step_end(const struct measurement *measurement, struct spread *costs) {
    const struct point *point = measurement->plan->point;
    const struct model *model = point->model;
    struct arena *arena = arena_new();
    struct rope rope =
        rope_new(arena, point->seq_len, model->attention.head_dim, model->attention.rope_theta);
    struct step_end_work work = {.optimizer = training_optimizer(&point->training)};
    int rank;
    MPI_Comm_rank(measurement->comm, &rank);
    work.context.workers = workers_new(1);
    work.state = state_new(measurement->ranks, rank, measurement->comm, &rope, (uint64_t)point->seed);
    state_zero_gradients(work.state);
    const struct lap lap = {measurement->comm, measurement->repeats, 3, run_step_end, &work};
    struct spread seconds[3];
    lap_measure(&lap, seconds);
    costs[COST_GRAD_SYNC] = seconds[0];
    costs[COST_PARAM_GATHER] = measurement->plan->memory.zero ? seconds[1] : (struct spread){0};
    costs[COST_OPTIMIZER] = seconds[2];
    state_free(work.state);
    workers_free(work.context.workers);
    context_free(&work.context);
    arena_free(arena);
}

/* ---- rates ------------------------------------------------------------------------------------------- */

enum { EXCHANGE_BYTES = 1 << 18, REDUCE_ELEMENTS = 1 << 18 };

/* Which ranks share a host: number of a rank's host and its place there. */
struct hosts {
    int *host, count;
    MPI_Comm local, across; /* across: ranks at the same place of all hosts */
    int here, place;        /* ranks of this host, this rank's place among them */
};

static bool find_hosts(MPI_Comm comm, struct hosts *hosts, struct errors *errors) {
    int rank, ranks, sizes[2], head;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &hosts->local);
    MPI_Comm_size(hosts->local, &hosts->here);
    MPI_Comm_rank(hosts->local, &hosts->place);
    MPI_Comm_split(comm, hosts->place, rank, &hosts->across);
    head = rank;
    MPI_Bcast(&head, 1, MPI_INT, 0, hosts->local);
    hosts->host = must_alloc((size_t)ranks * sizeof *hosts->host);
    MPI_Allgather(&head, 1, MPI_INT, hosts->host, 1, MPI_INT, comm);
    for (int i = 0; i < ranks; i++) hosts->count += hosts->host[i] == i;
    sizes[0] = hosts->here;
    sizes[1] = -hosts->here;
    MPI_Allreduce(MPI_IN_PLACE, sizes, 2, MPI_INT, MPI_MAX, comm);
    if (sizes[0] != -sizes[1])
        errors_add(errors, NULL, "profile",
                   "found hosts with %d and with %d ranks; a cluster file has nodes "
                   "of equal size: start as many ranks on each",
                   -sizes[1], sizes[0]);
    return sizes[0] == -sizes[1];
}

static void hosts_free(struct hosts *hosts) {
    MPI_Comm_free(&hosts->local);
    MPI_Comm_free(&hosts->across);
    free(hosts->host);
}

static struct spread exchange_rate(MPI_Comm comm, const struct hosts *hosts, bool inside, int repeats) {
    int rank, ranks, peers = 0;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    struct exchange exchange = exchange_new(comm, 2 * ranks);
    for (int i = 1; i < ranks; i++) {
        int to = (rank + i) % ranks, from = (rank + ranks - i) % ranks;
        bool sends = (hosts->host[to] == hosts->host[rank]) == inside;
        if (sends) exchange_add(&exchange, to, false, EXCHANGE_BYTES);
        if ((hosts->host[from] == hosts->host[rank]) == inside)
            exchange_add(&exchange, from, true, EXCHANGE_BYTES);
        peers += sends;
    }
    struct spread seconds = exchange_measure(&exchange, comm, repeats);
    double bytes = (double)peers * EXCHANGE_BYTES;
    return (struct spread){bytes / seconds.median, bytes / seconds.high, bytes / seconds.low};
}

struct reduction {
    MPI_Comm comm;
    int rank, ranks;
    floatX *values, *arrived;
};

/* Ring reduce-scatter (Patarasuk & Yuan 2009), as state_reduce runs it. */
static void reduction_run(void *work, int stage) {
    const struct reduction *r = work;
    size_t part = REDUCE_ELEMENTS / (size_t)r->ranks;
    (void)stage;
    for (int i = 0; i < r->ranks - 1; i++) {
        floatX *out = r->values + part * (size_t)((r->rank + 2 * r->ranks - 1 - i) % r->ranks);
        floatX *in = r->values + part * (size_t)((r->rank + 2 * r->ranks - 2 - i) % r->ranks);
        MPI_Sendrecv(out, (int)part, MPI_FLOATX, (r->rank + 1) % r->ranks, 0, r->arrived, (int)part,
                     MPI_FLOATX, (r->rank + r->ranks - 1) % r->ranks, 0, r->comm, MPI_STATUS_IGNORE);
        for (size_t k = 0; k < part; k++) in[k] += r->arrived[k];
    }
}

/* Bus bandwidth over the ranks of `ring`; all rings at once. */
static struct spread reduce_rate(MPI_Comm comm, MPI_Comm ring, int repeats) {
    struct reduction work = {.comm = ring,
                             .values = must_alloc(REDUCE_ELEMENTS * sizeof(floatX)),
                             .arrived = must_alloc(REDUCE_ELEMENTS * sizeof(floatX))};
    MPI_Comm_rank(ring, &work.rank);
    MPI_Comm_size(ring, &work.ranks);
    const struct lap lap = {comm, repeats, 1, reduction_run, &work};
    struct spread seconds;
    lap_measure(&lap, &seconds);
    double bytes = (double)(work.ranks - 1) * (double)(REDUCE_ELEMENTS / work.ranks) * sizeof(floatX);
    free(work.values);
    free(work.arrived);
    return (struct spread){bytes / seconds.median, bytes / seconds.high, bytes / seconds.low};
}

/* Medians over the pairs inside hosts, or between them, of all ranks. */
static void link_rates(const struct measurement *measurement, const struct hosts *hosts, bool inside,
                       const struct link *links, int count, struct measured_rate *bytes_per_s,
                       struct measured_rate *latency_s) {
    double *rates = must_alloc(2 * ((size_t)count + 1) * sizeof *rates), *times = rates + count;
    int pairs = 0;
    for (int i = 0; i < count; i++)
        if ((hosts->host[links[i].a] == hosts->host[links[i].b]) == inside) {
            rates[pairs] = links[i].bytes_per_s.median;
            times[pairs++] = links[i].latency_s.median;
        }
    if (pairs) {
        bytes_per_s->value = spread_of(rates, pairs);
        latency_s->value = spread_of(times, pairs);
    }
    MPI_Bcast(&bytes_per_s->value, sizeof(struct spread), MPI_BYTE, 0, measurement->comm);
    MPI_Bcast(&latency_s->value, sizeof(struct spread), MPI_BYTE, 0, measurement->comm);
    snprintf(bytes_per_s->how, sizeof bytes_per_s->how, "messages of %d MiB of all pairs %s",
             LINK_BYTES >> 20, inside ? "inside a host" : "between hosts");
    snprintf(latency_s->how, sizeof latency_s->how, "messages of one byte of all pairs %s",
             inside ? "inside a host" : "between hosts");
    free(rates);
}

/* Of a kind that this machine does not have, the nearest that it has. */
static void stand_in(struct measured_rate *rate, const struct measured_rate *other, const char *why) {
    rate->value = other->value;
    snprintf(rate->how, sizeof rate->how, "%s, %.100s", why, other->how);
}

/* One rank has no link. Copies in memory stand in for what no schedule of one GPU uses. */
static void single_rank(struct machine *machine) {
    static const char why[] = "no link between a single rank and another; in its place";
    static const enum rate rates[] = {RATE_NVLINK_EXCHANGE, RATE_NVLINK_REDUCE};
    for (size_t i = 0; i < COUNT(rates); i++) stand_in(&machine->rates[rates[i]], &machine->copy, why);
    stand_in(&machine->inside, &machine->copy, why);
    stand_in(&machine->inside_latency, &machine->rates[RATE_KERNEL_LAUNCH], why);
}

static void measure_inside(const struct measurement *measurement, const struct hosts *hosts,
                           const struct link *links, int count, struct machine *machine) {
    struct measured_rate *exchange = &machine->rates[RATE_NVLINK_EXCHANGE];
    struct measured_rate *reduce = &machine->rates[RATE_NVLINK_REDUCE];
    link_rates(measurement, hosts, true, links, count, &machine->inside, &machine->inside_latency);
    exchange->value = exchange_rate(measurement->comm, hosts, true, measurement->repeats);
    snprintf(exchange->how, sizeof exchange->how, "all-to-all of %d KiB between all ranks of a host",
             EXCHANGE_BYTES >> 10);
    reduce->value = reduce_rate(measurement->comm, hosts->local, measurement->repeats);
    snprintf(reduce->how, sizeof reduce->how, "ring reduce-scatter of %d elements over all ranks of a host",
             REDUCE_ELEMENTS);
}

static void measure_between(const struct measurement *measurement, const struct hosts *hosts,
                            const struct link *links, int count, struct machine *machine) {
    struct measured_rate *exchange = &machine->rates[RATE_NIC_EXCHANGE];
    struct measured_rate *reduce = &machine->rates[RATE_NIC_REDUCE];
    link_rates(measurement, hosts, false, links, count, &machine->between, &machine->between_latency);
    exchange->value = exchange_rate(measurement->comm, hosts, false, measurement->repeats);
    snprintf(exchange->how, sizeof exchange->how, "all-to-all of %d KiB between the ranks of all hosts",
             EXCHANGE_BYTES >> 10);
    reduce->value = reduce_rate(measurement->comm, hosts->across, measurement->repeats);
    snprintf(reduce->how, sizeof reduce->how, "ring reduce-scatter of %d elements over a rank of each host",
             REDUCE_ELEMENTS);
}

bool measure_network(const struct measurement *measurement, struct machine *machine, struct errors *errors) {
    struct hosts hosts = {0};
    int count, ranks;
    MPI_Comm_size(measurement->comm, &ranks);
    bool good = find_hosts(measurement->comm, &hosts, errors);
    machine->hosts = hosts.count;
    machine->ranks = ranks;
    if (good) {
        static const char one[] = "all ranks are on one host; in its place",
                          alone[] = "a rank a host; in its place";
        struct measured_rate *rates = machine->rates;
        struct link *links = links_measure(measurement->comm, measurement->repeats, &count);
        if (hosts.count > 1) measure_between(measurement, &hosts, links, count, machine);
        if (hosts.here > 1) measure_inside(measurement, &hosts, links, count, machine);
        if (ranks == 1) single_rank(machine);
        if (ranks > 1 && hosts.here == 1) {
            stand_in(&machine->inside, &machine->between, alone);
            stand_in(&machine->inside_latency, &machine->between_latency, alone);
            stand_in(&rates[RATE_NVLINK_EXCHANGE], &rates[RATE_NIC_EXCHANGE], alone);
            stand_in(&rates[RATE_NVLINK_REDUCE], &rates[RATE_NIC_REDUCE], alone);
        }
        if (hosts.count == 1) {
            stand_in(&machine->between, &machine->inside, one);
            stand_in(&machine->between_latency, &machine->inside_latency, one);
            stand_in(&rates[RATE_NIC_EXCHANGE], &rates[RATE_NVLINK_EXCHANGE], one);
            stand_in(&rates[RATE_NIC_REDUCE], &rates[RATE_NVLINK_REDUCE], one);
        }
        free(links);
    }
    hosts_free(&hosts);
    return good;
}
