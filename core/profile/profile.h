/*
Measuring a machine: what its layers and links achieve. Front door of core/profile.

Concepts
- A figure is measured several times, and told as the median with the least and the most.
- Links: all pairs of ranks, in rounds in which every rank has one partner at most, so that no port serves two
pairs. Ranks may share a host; then their link is its memory.
*/
#ifndef PROFILE_H
#define PROFILE_H

#include "base/base.h"

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

#endif
