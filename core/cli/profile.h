/*
disagmoe profile: profile.c starts the ranks, profile_links.c measures links between them, profile_plan.c what
a manifest's plan needs.
*/
#ifndef CLI_PROFILE_H
#define CLI_PROFILE_H

#include "cli/cli.h"
#include "profile/profile.h"

struct profile {
    struct options options;
    int ranks, repeats, steps;
    bool links;
    const char *cluster, *costs; /* files to write; NULL: none */
    struct experiment experiment;
    struct arena *arena;
};

/* Each returns a status, the same on all ranks where it is collective, and has said what was wrong. */

/* Collective. */
int measure_links(const struct profile *profile, MPI_Comm world, int rank, int ranks);
/* The launcher's look at what the ranks are to do: how many the plan needs, whether all can be written. */
int look_at_plan(struct profile *profile, int *ranks);
/* Collective. */
int measure_plan(struct profile *profile, MPI_Comm world);

#endif
