/*
How long messages take on the links of a cluster.

A transfer lasts as long as its busiest port, one direction of one GPU's NVLink or NIC, plus the latency of
the slowest kind of link it uses. Bytes between two GPUs of a node go over NVLink, between nodes over NICs.
Loads are summed by node first, so that an exchange among M senders and N receivers costs O(M + N) and not O(M
· N).

Where the spine connects rails only, bytes for another rail first hop over NVLink to the GPU of their node
that sits on that rail. In an exchange the receivers are taken to be spread evenly over the rails, so the
fraction 1 − 1/rails of them hops; a pairwise transfer knows both rails.
*/
#include "cluster/cluster.h"

#include <assert.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Sums up to this many fit on the stack: every group of real experiments. */
#define STACK_SUMS 1024

static int node_of(const struct cluster *cluster, int gpu) {
    return gpu / cluster->gpus_per_node;
}

static int rail_of(const struct cluster *cluster, int gpu) {
    return gpu % cluster->gpus_per_node * cluster->nics_per_node / cluster->gpus_per_node;
}

/* Bytes/s that one GPU gets through the NICs of its node towards the spine. */
static double nic_capacity(const struct cluster *cluster, enum rate rate) {
    return cluster->rates[rate] * cluster->nics_per_node / cluster->gpus_per_node /
           cluster->spine.oversubscription;
}

/* The nodes that a transfer touches, first to last, those between included. */
struct span {
    int first_node, nodes, first_gpu, gpus;
};

static void span_include(const struct cluster *cluster, const int *gpus, int count, int *first, int *last) {
    for (int i = 0; i < count; i++) {
        int node = node_of(cluster, gpus[i]);
        assert(gpus[i] >= 0 && node < cluster->nodes);
        if (node < *first) *first = node;
        if (node > *last) *last = node;
    }
}

static struct span span_of(const struct cluster *cluster, const int *a, int a_count, const int *b,
                           int b_count) {
    int first = INT_MAX, last = -1;
    span_include(cluster, a, a_count, &first, &last);
    span_include(cluster, b, b_count, &first, &last);
    if (last < 0) return (struct span){0};
    int nodes = last - first + 1;
    return (struct span){first, nodes, first * cluster->gpus_per_node, nodes * cluster->gpus_per_node};
}

/* Zeroed sums: on the caller's stack when they fit. Released by sums_free. */
static double *sums_new(double *stack, int count) {
    if (count > STACK_SUMS) return must_alloc((size_t)count * sizeof *stack);
    memset(stack, 0, (size_t)count * sizeof *stack);
    return stack;
}

static void sums_free(double *sums, const double *stack) {
    if (sums != stack) free(sums);
}

static double larger(double a, double b) {
    return a > b ? a : b;
}

static struct traffic traffic_of(const struct cluster *cluster, double nic_bytes, double nvlink_bytes) {
    struct traffic traffic = {.nic_bytes = nic_bytes, .nvlink_bytes = nvlink_bytes};
    double latency = 0;
    if (nic_bytes > 0) latency = cluster->nic.latency_s;
    if (nvlink_bytes > 0) latency = larger(latency, cluster->nvlink.latency_s);
    traffic.seconds = latency + larger(nic_bytes / nic_capacity(cluster, RATE_NIC_EXCHANGE),
                                       nvlink_bytes / cluster->rates[RATE_NVLINK_EXCHANGE]);
    return traffic;
}

double cluster_slowest(const struct cluster *cluster, const int *gpus, int count) {
    double slowest = 1;
    for (int s = 0; s < cluster->slow_count; s++) {
        struct slow_gpu slow = cluster->slow_gpus[s];
        bool among = !gpus && slow.gpu < count;
        for (int i = 0; gpus && i < count && !among; i++) among = gpus[i] == slow.gpu;
        if (among && slow.speed < slowest) slowest = slow.speed;
    }
    return slowest;
}

/* ---- exchange ---------------------------------------------------------------------------------------- */

/* One side's shares, summed. */
struct side_sums {
    double total;
    double *of_gpu, *of_node; /* from the span's first on */
};

static void sum_side(const struct cluster *cluster, struct span span, struct ports side,
                     struct side_sums *sums) {
    /* The total adds up in the order of the nodes' sums: when all shares stand on one node the two are equal
       to the last bit, and nothing is left over for a NIC. */
    for (int i = 0; i < side.count; i++) {
        sums->of_gpu[side.gpus[i] - span.first_gpu] += side.shares[i];
        sums->of_node[node_of(cluster, side.gpus[i]) - span.first_node] += side.shares[i];
        sums->total += side.shares[i];
    }
}

/* Shares of all bytes through one GPU's ports in one direction, the other side's sums given. */
struct load {
    double nic, nvlink;
};

static struct load load_of(const struct cluster *cluster, struct span span, int gpu, double share,
                           const struct side_sums *others) {
    double on_node = others->of_node[node_of(cluster, gpu) - span.first_node];
    double self = others->of_gpu[gpu - span.first_gpu];
    return (struct load){.nic = share * (others->total - on_node), .nvlink = share * (on_node - self)};
}

struct traffic cluster_exchange(const struct cluster *cluster, struct ports from, struct ports to,
                                double bytes) {
    struct span span = span_of(cluster, from.gpus, from.count, to.gpus, to.count);
    double stack[STACK_SUMS];
    double *sums = sums_new(stack, 2 * span.gpus + 3 * span.nodes);
    struct side_sums senders = {0, sums, sums + 2 * span.gpus};
    struct side_sums receivers = {0, sums + span.gpus, senders.of_node + span.nodes};
    double *hops = receivers.of_node + span.nodes; /* of each node */
    double hop = cluster->spine.rail_only ? 1 - 1.0 / cluster->nics_per_node : 0;
    sum_side(cluster, span, from, &senders);
    sum_side(cluster, span, to, &receivers);

    double nic = 0, nvlink = 0;
    for (int i = 0; i < from.count; i++) {
        struct load load = load_of(cluster, span, from.gpus[i], from.shares[i], &receivers);
        nic = larger(nic, load.nic);
        nvlink = larger(nvlink, load.nvlink + hop * load.nic);
        hops[node_of(cluster, from.gpus[i]) - span.first_node] += hop * load.nic;
    }
    for (int i = 0; i < to.count; i++) {
        struct load load = load_of(cluster, span, to.gpus[i], to.shares[i], &senders);
        /* What its node's senders pass on arrives at all GPUs of the node alike. A GPU that receives nothing
           else need not be looked at: some sender's own port carries at least the mean. */
        double passing = hops[node_of(cluster, to.gpus[i]) - span.first_node] / cluster->gpus_per_node;
        nic = larger(nic, load.nic);
        nvlink = larger(nvlink, load.nvlink + passing);
    }
    sums_free(sums, stack);
    return traffic_of(cluster, bytes * nic, bytes * nvlink);
}

/* ---- pairwise ---------------------------------------------------------------------------------------- */

struct traffic cluster_pairwise(const struct cluster *cluster, const int *from, const int *to, int count,
                                double bytes_each) {
    struct span span = span_of(cluster, from, count, to, count);
    double stack[STACK_SUMS];
    double *sums = sums_new(stack, 4 * span.gpus);
    double *nic_out = sums, *nic_in = nic_out + span.gpus;
    double *nvlink_out = nic_in + span.gpus, *nvlink_in = nvlink_out + span.gpus;
    for (int i = 0; i < count; i++) {
        int sender = from[i] - span.first_gpu, receiver = to[i] - span.first_gpu;
        if (sender == receiver) continue;
        if (node_of(cluster, from[i]) == node_of(cluster, to[i])) {
            nvlink_out[sender]++;
            nvlink_in[receiver]++;
            continue;
        }
        int leaves = sender;
        if (cluster->spine.rail_only && rail_of(cluster, from[i]) != rail_of(cluster, to[i])) {
            leaves = sender - sender % cluster->gpus_per_node + receiver % cluster->gpus_per_node;
            nvlink_out[sender]++;
            nvlink_in[leaves]++;
        }
        nic_out[leaves]++;
        nic_in[receiver]++;
    }
    double nic = 0, nvlink = 0;
    for (int i = 0; i < span.gpus; i++) {
        nic = larger(nic, larger(nic_out[i], nic_in[i]));
        nvlink = larger(nvlink, larger(nvlink_out[i], nvlink_in[i]));
    }
    sums_free(sums, stack);
    return traffic_of(cluster, bytes_each * nic, bytes_each * nvlink);
}

/* ---- reduction --------------------------------------------------------------------------------------- */

double cluster_reduce_seconds(const struct cluster *cluster, const int *gpus, int count, double bytes) {
    if (count <= 1 || bytes <= 0) return 0;
    struct span span = span_of(cluster, gpus, count, NULL, 0);
    double stack[STACK_SUMS];
    double *on_node = sums_new(stack, span.nodes);
    for (int i = 0; i < count; i++) on_node[node_of(cluster, gpus[i]) - span.first_node]++;
    double nodes = 0, most = 0, fewest = count;
    for (int n = 0; n < span.nodes; n++) {
        if (on_node[n] == 0) continue;
        nodes++;
        most = larger(most, on_node[n]);
        if (on_node[n] < fewest) fewest = on_node[n];
    }
    sums_free(on_node, stack);
    /* A ring of n passes (n − 1)/n of what it reduces through each port. Inside a node that is the tensor;
       between nodes each GPU carries the part that it holds after the reduction inside. Both go on at once,
       chunk after chunk, so the slower one decides, and their first chunk takes a latency at every step of
       both rings. The node with the fewest GPUs has the fewest NICs in the ring. A ring stays on its rail. */
    double inside = (most - 1) / most * bytes / cluster->rates[RATE_NVLINK_REDUCE];
    double between = (nodes - 1) / nodes * bytes / fewest / nic_capacity(cluster, RATE_NIC_REDUCE);
    double latency = (most - 1) * cluster->nvlink.latency_s + (nodes - 1) * cluster->nic.latency_s;
    return latency + larger(inside, between);
}
