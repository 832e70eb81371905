/*
A cluster: nodes of GPUs with NVLink inside and NICs between, and the rates its kernels and links achieve.

Concepts
- Peaks (gpu.peak_flops, nvlink, nic) are the maker's figures; only MFU divides by them. Durations come from
  `rates`: what kernels and collectives achieve, each with the source of its value.
- A port is one direction of one GPU's NVLink or NIC. A transfer lasts as long as its busiest port.
- GPUs are numbered node by node: GPU i stands on node i ÷ gpus_per_node.
*/
#ifndef CLUSTER_H
#define CLUSTER_H

#include "base/base.h"

/* Each achieved rate of a cluster file; README's "How to write a manifest" lists them too. */
enum rate {
    RATE_GEMM,            /* dense matrix products, FLOP/s */
    RATE_CORE_FORWARD,    /* core attention forward, counted causally, FLOP/s */
    RATE_CORE_BACKWARD,   /* core attention backward, FLOP/s */
    RATE_GROUPED_GEMM,    /* matrix products of experts, FLOP/s */
    RATE_HEAD_GEMM,       /* the output head's matrix product, FLOP/s; left out: gemm's */
    RATE_GROUPED_TILE,    /* rows that an expert's products are rounded up to; left out: none */
    RATE_HBM,             /* element-wise kernels and operands of products, bytes/s read and written */
    RATE_KERNEL_LAUNCH,   /* seconds a kernel */
    RATE_LAYER_OVERHEAD,  /* seconds that a layer's attention takes in each pass, whatever its tokens; left
                             out:  none */
    RATE_NVLINK_EXCHANGE, /* all-to-all and M2N inside a node, bytes/s a GPU and direction */
    RATE_NIC_EXCHANGE,    /* all-to-all and M2N between nodes, bytes/s a GPU and direction */
    RATE_NVLINK_REDUCE,   /* all-reduce, reduce-scatter and all-gather inside a node, bus bandwidth a GPU */
    RATE_NIC_REDUCE,      /* the same between nodes, a NIC */
    RATE_HOST_COPY,       /* between GPU and host memory, bytes/s a GPU and direction */
    RATE_HOST_ADAM,       /* optimizer on the host, parameters/s a GPU's share of the cores */
    RATE_MEMORY_RESERVE,  /* GPU bytes that no schedule may use: context, communication buffers, fragmentation
                           */
    RATE_COUNT
};

struct slow_gpu {
    int gpu;
    double speed; /* 1: as fast as the others */
};

struct cluster {
    const char *name;
    int nodes, gpus_per_node, nics_per_node;
    struct {
        const char *name;
        double memory_bytes, peak_flops, hbm_bytes_per_s;
    } gpu;
    struct {
        double bytes_per_s, latency_s;
    } nvlink, nic; /* per direction; a NIC's own */
    double host_bytes_per_s;
    struct {
        double oversubscription; /* 1: full bisection */
        bool rail_only; /* NIC i of a node reaches only NIC i of the others; the rest hops over NVLink */
    } spine;
    struct slow_gpu *slow_gpus;
    int slow_count;
    double rates[RATE_COUNT];
    const char *rate_sources[RATE_COUNT];
};

bool cluster_read(struct json value, struct cluster *cluster);
const char *cluster_rate_name(enum rate rate);
const char *cluster_rate_unit(enum rate rate);

int cluster_gpus(const struct cluster *cluster);
/* The GPUs beside a NIC, from the first on: gpus_per_node ÷ nics_per_node of them. */
int cluster_gpu_beside(const struct cluster *cluster, int nic);
/* The NIC beside a GPU. */
int cluster_nic_beside(const struct cluster *cluster, int gpu);
/* Slowest speed among `count` GPUs: a synchronised group moves with its slowest. gpus may be NULL: the first
 * ones. */
double cluster_slowest(const struct cluster *cluster, const int *gpus, int count);

/* ---- transfers --------------------------------------------------------------------------------------- */

/* One side of a transfer: which GPUs, and which share of all bytes each sends or receives (shares sum to 1);
   which NICs it owns, by number (NIC i stands on node i ÷ nics_per_node). nics NULL: each GPU brings its part
   of its node's, nics_per_node ÷ gpus_per_node of one. In a node a side's bytes spread evenly over its NICs:
   each GPU uses the one beside it up to that share, the rest hops over NVLink to the GPUs beside the others.
   A side must own a NIC on each node from which it sends. */
struct ports {
    const int *gpus;
    const double *shares;
    int count;
    const int *nics;
    int nic_count;
};
struct traffic {
    double seconds;      /* of the busiest port, with latency; 0 when nothing moves */
    double nic_bytes;    /* through the busiest NIC, one direction */
    double nvlink_bytes; /* through the busiest NVLink port */
};
/* All of `bytes` go from `from` to `to`, every sender spreading over the receivers by their shares (an
   all-to-all when both are the same GPUs). What a GPU sends to itself costs nothing. */
struct traffic cluster_exchange(const struct cluster *cluster, struct ports from, struct ports to,
                                double bytes);
/* GPU i of `from` sends bytes_each to GPU i of `to`, all at once. */
struct traffic cluster_pairwise(const struct cluster *cluster, const int *from, const int *to, int count,
                                double bytes_each);
/* Ring reduce-scatter or all-gather (half an all-reduce) of a tensor of `bytes` over `gpus`. A node's GPUs
   reduce over NVLink first, so that each of its NICs carries its share of the ring between nodes. */
double cluster_reduce_seconds(const struct cluster *cluster, const int *gpus, int count, double bytes);

#endif
