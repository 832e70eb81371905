/*
What `disagmoe plan` found for one point and system: filled by plan.c, shown by plan_report.c.
*/
#ifndef CLI_PLAN_H
#define CLI_PLAN_H

#include "allocate/allocate.h"
#include "cli/cli.h"

/* Four ways to an allocation and the best of all, at the same cp, placement, memory and order: seconds per
   sequence, INFINITY where nothing fits, and evaluations. */
struct comparison {
    bool done;
    double uniform, milp, searched, scratch;
    int searched_evaluations, scratch_evaluations;
    struct exhaustive exhaustive;
};

struct allocation_report {
    const struct point *point;
    const struct system *system;
    const char *executor; /* "sim", "cpu" */
    bool relaxed_form;    /* only the paper's was asked for */
    struct roofline relaxed;
    struct allocation_solution relaxed_solution;
    bool relaxed_solved;
    char why[192]; /* not */
    struct seeds seeds;
    struct search search;
    struct result chosen;    /* of the best trial, by the simulator; feasible false: nothing fits */
    struct seed chosen_seed; /* the roofline of its shape */
    double lane_seconds[3];  /* the busiest attention, feed-forward and transfer lane of a step, simulated */
    struct comparison comparison;
};

void plan_report_json(const struct allocation_report *report, FILE *stream);
void plan_report_print(const struct allocation_report *report, FILE *stream);

#endif
