/*
How long messages take on the links of a cluster.

A transfer lasts as long as its busiest port, one direction of one GPU's NVLink or of one NIC, plus the
latency of the slowest kind of link it uses. Bytes between two GPUs of a node go over NVLink, between nodes
over NICs. Loads are summed by node first, so that an exchange among M senders and N receivers costs O(M + N)
and not O(M · N).

What a side sends or receives through its NICs of a node spreads evenly over them (as NCCL's PXN does): a GPU
uses the NIC beside it up to that share; what it has above, or all where the NIC is another side's, passes
over NVLink to a GPU beside a NIC with room, and counts at both.

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

/* Bytes/s of one NIC towards the spine. */
static double nic_capacity(const struct cluster *cluster, enum rate rate) {
    return cluster->rates[rate] / cluster->spine.oversubscription;
}

/* NICs that one GPU brings: its part of its node's. */
static double nics_per_gpu(const struct cluster *cluster) {
    return (double)cluster->nics_per_node / cluster->gpus_per_node;
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

/* One side of an exchange, summed; arrays are of the span's GPUs, nodes and NICs. Bytes are shares of all. */
struct side {
    double total;
    double *of_gpu, *of_node;
    double *outside; /* of each GPU: what passes through NICs */
    double *outside_of_node, *outside_of_nic;
    double *nics_of_node;
    bool by_gpu; /* every GPU of the side brings its part of a NIC */
    bool *owned; /* NICs, or by_gpu: GPUs that bring one */
};

static int span_nics(const struct cluster *cluster, struct span span) {
    return span.nodes * cluster->nics_per_node;
}

/* Doubles that a side needs. */
static int side_room(const struct cluster *cluster, struct span span) {
    return 3 * span.gpus + 3 * span.nodes + span_nics(cluster, span); /* the last span.gpus for `owned` */
}

static void side_place(struct side *side, const struct cluster *cluster, struct span span, double *room) {
    side->of_gpu = room;
    side->outside = side->of_gpu + span.gpus;
    side->of_node = side->outside + span.gpus;
    side->outside_of_node = side->of_node + span.nodes;
    side->nics_of_node = side->outside_of_node + span.nodes;
    side->outside_of_nic = side->nics_of_node + span.nodes;
    side->owned = (bool *)(side->outside_of_nic + span_nics(cluster, span));
}

static void sum_side(const struct cluster *cluster, struct span span, struct ports ports, struct side *side) {
    /* The total adds up in the order of the nodes' sums: when all shares stand on one node the two are equal
       to the last bit, and nothing is left over for a NIC. */
    for (int i = 0; i < ports.count; i++) {
        int node = node_of(cluster, ports.gpus[i]) - span.first_node;
        side->of_gpu[ports.gpus[i] - span.first_gpu] += ports.shares[i];
        side->of_node[node] += ports.shares[i];
        side->total += ports.shares[i];
        if (ports.nics) continue;
        side->nics_of_node[node] += nics_per_gpu(cluster);
        side->owned[ports.gpus[i] - span.first_gpu] = true;
    }
    side->by_gpu = !ports.nics;
    for (int i = 0; ports.nics && i < ports.nic_count; i++) {
        int nic = ports.nics[i] - span.first_node * cluster->nics_per_node;
        if (nic < 0 || nic >= span_nics(cluster, span)) continue; /* on a node without GPUs */
        side->owned[nic] = true;
        side->nics_of_node[nic / cluster->nics_per_node]++;
    }
}

/* What each GPU, and all GPUs beside a NIC, send to or receive from other nodes. */
static void sum_outside(const struct cluster *cluster, struct span span, struct ports ports,
                        struct side *side, const struct side *other) {
    for (int i = 0; i < ports.count; i++) {
        int gpu = ports.gpus[i] - span.first_gpu, node = gpu / cluster->gpus_per_node;
        double bytes = ports.shares[i] * (other->total - other->of_node[node]);
        side->outside[gpu] += bytes;
        side->outside_of_node[node] += bytes;
        side->outside_of_nic[cluster_nic_beside(cluster, gpu)] += bytes;
    }
}

/* Share of all bytes through the busiest NIC. */
static double busiest_nic(struct span span, const struct side *side) {
    double most = 0;
    for (int node = 0; node < span.nodes; node++) {
        if (side->outside_of_node[node] == 0) continue;
        assert(side->nics_of_node[node] > 0);
        most = larger(most, side->outside_of_node[node] / side->nics_of_node[node]);
    }
    return most;
}

/* What a GPU passes on to others' NICs, or gets from them (leaves), and what it takes over for others at the
   NIC beside it (relays). */
struct hop {
    double leaves, relays;
};
static struct hop hop_of(const struct cluster *cluster, const struct side *side, int gpu) {
    int node = gpu / cluster->gpus_per_node, nic = cluster_nic_beside(cluster, gpu);
    double own = side->outside[gpu], beside = side->outside_of_nic[nic];
    double beside_gpus = (double)cluster->gpus_per_node / cluster->nics_per_node;
    if (side->outside_of_node[node] == 0) return (struct hop){0};
    double share = side->outside_of_node[node] / side->nics_of_node[node];
    if (side->by_gpu) {
        double room = share * nics_per_gpu(cluster);
        return side->owned[gpu] ? (struct hop){larger(0, own - room), larger(0, room - own)}
                                : (struct hop){0};
    }
    if (!side->owned[nic]) return (struct hop){own, 0};
    if (beside > share) return (struct hop){own - own * share / beside, 0};
    return (struct hop){0, (share - beside) / beside_gpus};
}

struct traffic cluster_exchange(const struct cluster *cluster, struct ports from, struct ports to,
                                double bytes) {
    struct span span = span_of(cluster, from.gpus, from.count, to.gpus, to.count);
    double stack[STACK_SUMS];
    int room = side_room(cluster, span);
    double *sums = sums_new(stack, 2 * room);
    struct side sender = {0}, receiver = {0};
    side_place(&sender, cluster, span, sums);
    side_place(&receiver, cluster, span, sums + room);
    sum_side(cluster, span, from, &sender);
    sum_side(cluster, span, to, &receiver);
    sum_outside(cluster, span, from, &sender, &receiver);
    sum_outside(cluster, span, to, &receiver, &sender);

    /* On rails alone what leaves for another rail hops to the GPU on it, and its node's GPUs share that. */
    double rail = cluster->spine.rail_only ? 1 - 1.0 / cluster->nics_per_node : 0, nvlink = 0;
    for (int gpu = 0; gpu < span.gpus; gpu++) {
        int node = gpu / cluster->gpus_per_node;
        struct hop out = hop_of(cluster, &sender, gpu), in = hop_of(cluster, &receiver, gpu);
        double sent = sender.of_gpu[gpu] * (receiver.of_node[node] - receiver.of_gpu[gpu]);
        double received = receiver.of_gpu[gpu] * (sender.of_node[node] - sender.of_gpu[gpu]);
        nvlink = larger(nvlink, sent + out.leaves + in.relays + rail * sender.outside[gpu]);
        nvlink = larger(nvlink, received + in.leaves + out.relays +
                                    rail * sender.outside_of_node[node] / cluster->gpus_per_node);
    }
    double nic = larger(busiest_nic(span, &sender), busiest_nic(span, &receiver));
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
        if (cluster->spine.rail_only && cluster_nic_beside(cluster, sender) % cluster->nics_per_node !=
                                            cluster_nic_beside(cluster, receiver) % cluster->nics_per_node) {
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
    return traffic_of(cluster, bytes_each * nic / nics_per_gpu(cluster), bytes_each * nvlink);
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
    double nics = fewest * nics_per_gpu(cluster);
    double between = (nodes - 1) / nodes * bytes / nics / nic_capacity(cluster, RATE_NIC_REDUCE);
    double latency = (most - 1) * cluster->nvlink.latency_s + (nodes - 1) * cluster->nic.latency_s;
    return latency + larger(inside, between);
}
