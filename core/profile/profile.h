/*
Measuring a machine: what its layers and links achieve. Front door of core/profile.

Concepts
- A figure is measured several times, and told as the median with the least and the most.
- A real run has all its ranks on the machine at once, so all of them do the same work while a figure is
measured: where there are more ranks than processors, they share them as they would in the run, and a figure
is what one rank gets. In the run some wait for others meanwhile, so there it may be faster.
- What is measured are the suite's own kernels and blocks (layers/layers.h), in the shapes that a plan gives
them, and plain MPI messages of the sizes that it sends.
- Links: all pairs of ranks, in rounds in which every rank has one partner at most, so that no port serves two
pairs. Ranks may share a host; then their link is its memory.
*/
#ifndef PROFILE_H
#define PROFILE_H

#include "state/state.h"

#include <mpi.h>

/* ---- statistics -------------------------------------------------------------------------------------- */

struct spread {
    double median, low, high;
};
/* Sorts the values; of an even number the median is the mean of the middle two. count ≥ 1. */
struct spread spread_of(double *values, int count);

/* ---- links ------------------------------------------------------------------------------------------- */

/* Rounds of a tournament in which every two of `ranks` meet once: ranks − 1, or ranks where that is odd. */
int link_rounds(int ranks);
/* Whom a rank meets in a round; −1: nobody. */
int link_partner(int ranks, int round, int rank);

/* Between two ranks, a < b, one way: half of a round trip. */
struct link {
    int a, b;
    struct spread bytes_per_s; /* of messages of LINK_BYTES */
    struct spread latency_s;   /* of messages of one byte */
};
enum { LINK_BYTES = 4 << 20 };
/* All pairs, by a and then b, on rank 0; NULL on the others. The caller frees. Collective. */
struct link *links_measure(MPI_Comm comm, int repeats, int *count);
/* The names of the ranks' hosts on rank 0, in an arena; NULL on the others. Collective. */
const char **link_hosts(struct arena *arena, MPI_Comm comm);

/* ---- laps -------------------------------------------------------------------------------------------- */

/* Work of several stages, one after the other; on all ranks of comm at the same time. */
struct lap {
    MPI_Comm comm;
    int repeats;
    int stages;
    void (*run)(void *work, int stage);
    void *work;
};
enum { MOST_STAGES = 4 };
/* Seconds of each stage (stages), the mean of the ranks. A repeat goes round until it has lasted long enough
   to be measured. Collective. */
void lap_measure(const struct lap *lap, struct spread *seconds);

/* ---- a plan's costs and the machine's rates ---------------------------------------------------------- */

/* In the order of struct cost_table. */
enum cost {
    COST_ATTN_FWD,
    COST_ATTN_BWD,
    COST_ATTN_WGRAD,
    COST_FFN_FWD,
    COST_FFN_BWD,
    COST_FFN_WGRAD,
    COST_DISPATCH,
    COST_COMBINE,
    COST_P2P,
    COST_EMBED_FWD,
    COST_EMBED_BWD,
    COST_HEAD_FWD,
    COST_HEAD_BWD,
    COST_GRAD_SYNC,
    COST_PARAM_GATHER,
    COST_OPTIMIZER,
    COST_COUNT
};
const char *cost_name(enum cost cost); /* its key in the table: "attn_fwd_s" */

/* A rate of the cluster file, and what it was measured with. */
struct measured_rate {
    struct spread value; /* in the rate's unit */
    char how[160];
};
struct machine {
    int hosts, ranks; /* ranks: of all hosts, the same number on each */
    int processors;   /* of rank 0's host that a process may use */
    int repeats;
    char cpu[128];
    double memory_bytes;                    /* of a host, a rank's share */
    struct measured_rate rates[RATE_COUNT]; /* median 0: not measured, which the file leaves out */
    struct measured_rate peak_flops, copy;  /* copy: bytes/s of a copy in memory, one way */
    struct measured_rate inside, between; /* bytes/s of a link; between hosts, or as inside on a single one */
    struct measured_rate inside_latency, between_latency; /* seconds */
};

/* What is measured for: a plan whose schedule is arranged. */
struct measurement {
    const struct plan *plan;
    const struct ranks *ranks;
    MPI_Comm comm; /* of the plan's ranks */
    int repeats;
};
/* Seconds of each cost (COST_COUNT). Layers that are not alike count by their number. What a real rank does
   with the head's forward pass is part of its backward pass, so that COST_HEAD_FWD is 0; of a head on several
   groups the cost is of all their parts. Collective. */
void measure_layers(const struct measurement *measurement, struct spread *costs);
void measure_transfers(const struct measurement *measurement, struct spread *costs);
void measure_step_end(const struct measurement *measurement, struct spread *costs);
/* Rates of kernels in the plan's shapes. Collective. */
void measure_kernels(const struct measurement *measurement, struct machine *machine);
/* Hosts, links, exchange and reduction. False when hosts have different numbers of ranks (told in errors, on
   all ranks). Collective. */
bool measure_network(const struct measurement *measurement, struct machine *machine, struct errors *errors);
/* Processor, memory. */
void describe_machine(struct machine *machine);

/* ---- files ------------------------------------------------------------------------------------------- */

/* A cluster manifest of the shape of `like`, nodes, GPUs and NICs, of which a GPU is a rank and a NIC as many
   ranks' links as there are GPUs to one. Ranks of several nodes may stand on one host. */
cJSON *machine_cluster(const struct machine *machine, const struct cluster *like, const char *name);
/* The object that a manifest's `costs` takes. source: how it was measured. */
cJSON *costs_table(const struct spread *costs, const char *source);

#endif
