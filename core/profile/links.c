/*
Links between all pairs of ranks.

The rounds are those of a round-robin tournament (the circle method: one stands still, the others walk round).
A pair's bandwidth and latency are half of a round trip's, which needs no common clock. The round's pairs are
measured at the same time: a switch without full bisection shows, and so do processors that ranks share.
*/
#include "profile/profile.h"

#include <stdlib.h>

enum { LATENCY_TRIPS = 20 };

int link_rounds(int ranks) {
    return ranks % 2 ? ranks : ranks - 1;
}

int link_partner(int ranks, int round, int rank) {
    int walking = link_rounds(ranks); /* of an odd number, who meets the one that stands still rests */
    int partner = rank == walking ? round : ((2 * round - rank) % walking + walking) % walking;
    if (partner == rank) partner = walking;
    return partner < ranks ? partner : -1;
}

/* Seconds of one way, of `trips` round trips. */
static double one_way(MPI_Comm comm, int partner, bool first, char *message, int bytes, int trips) {
    double began = seconds_now();
    for (int i = 0; i < trips; i++) {
        if (first) MPI_Send(message, bytes, MPI_BYTE, partner, 0, comm);
        MPI_Recv(message, bytes, MPI_BYTE, partner, 0, comm, MPI_STATUS_IGNORE);
        if (!first) MPI_Send(message, bytes, MPI_BYTE, partner, 0, comm);
    }
    return (seconds_now() - began) / (2 * trips);
}

/* Both partners call; the first one's result counts. */
static struct link measure(MPI_Comm comm, int rank, int partner, int repeats, char *message) {
    bool first = rank < partner;
    double *seconds = must_alloc((size_t)repeats * sizeof *seconds);
    struct link link = {.a = first ? rank : partner, .b = first ? partner : rank};
    one_way(comm, partner, first, message, LINK_BYTES, 1); /* connects */
    for (int i = 0; i < repeats; i++) seconds[i] = one_way(comm, partner, first, message, 1, LATENCY_TRIPS);
    link.latency_s = spread_of(seconds, repeats);
    for (int i = 0; i < repeats; i++)
        seconds[i] = LINK_BYTES / one_way(comm, partner, first, message, LINK_BYTES, 1);
    link.bytes_per_s = spread_of(seconds, repeats);
    free(seconds);
    return link;
}

static int by_ranks(const void *a, const void *b) {
    const struct link *x = a, *y = b;
    return x->a != y->a ? (x->a > y->a) - (x->a < y->a) : (x->b > y->b) - (x->b < y->b);
}

/* Leaves the links that are there: every pair once, of its first rank. */
static int keep_pairs(struct link *links, int count) {
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (links[i].b > 0) links[kept++] = links[i];
    qsort(links, (size_t)kept, sizeof *links, by_ranks);
    return kept;
}

struct link *links_measure(MPI_Comm comm, int repeats, int *count) {
    int rank, ranks;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    int rounds = link_rounds(ranks), bytes = rounds * (int)sizeof(struct link);
    struct link *own = must_alloc((size_t)bytes + 1), *all = NULL;
    char *message = must_alloc(LINK_BYTES);
    for (int round = 0; round < rounds; round++) {
        int partner = link_partner(ranks, round, rank);
        MPI_Barrier(comm);
        if (partner < 0) continue;
        struct link link = measure(comm, rank, partner, repeats, message);
        if (rank < partner) own[round] = link;
    }
    if (rank == 0) all = must_alloc((size_t)ranks * (size_t)bytes + 1);
    MPI_Gather(own, bytes, MPI_BYTE, all, bytes, MPI_BYTE, 0, comm);
    free(message);
    free(own);
    *count = all ? keep_pairs(all, ranks * rounds) : 0;
    return all;
}

const char **link_hosts(struct arena *arena, MPI_Comm comm) {
    char own[MPI_MAX_PROCESSOR_NAME] = "", *all = NULL;
    const char **hosts = NULL;
    int rank, ranks, length;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    MPI_Get_processor_name(own, &length);
    if (rank == 0) all = must_alloc((size_t)ranks * sizeof own);
    MPI_Gather(own, sizeof own, MPI_CHAR, all, sizeof own, MPI_CHAR, 0, comm);
    if (all) hosts = arena_alloc(arena, (size_t)ranks * sizeof *hosts);
    for (int i = 0; all && i < ranks; i++) hosts[i] = arena_strdup(arena, all + (size_t)i * sizeof own);
    free(all);
    return hosts;
}
