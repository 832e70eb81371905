/*
Executor 1: the simulator, and the tuner that uses it.

simulate_plan builds a system's schedule for a plan, lets the list-scheduler order and time it, and reads
everything off that timeline. tune_point makes the choices a point leaves open, by branch and bound over the
system's own space: candidates are tried in the order of a lower bound of their step time until no bound is
below the best step found.
*/
#ifndef SIM_H
#define SIM_H

#include "plan/plan.h"

#define VERSION "0.1.0"

/* Parts of the step time of the busiest worker's compute lane; they sum to the step time. Seconds. */
struct breakdown {
    double attention, ffn, other_compute, exposed_comm, bubble, optimizer;
};

/* One record: what came out for one system at one point. Same members whatever the executor. */
struct result {
    const struct system *system;
    struct plan plan;
    bool feasible; /* false: nothing fits the memory, and only oom means anything */
    bool oom;
    double step_time;    /* seconds */
    double tokens_per_s; /* of the whole cluster */
    double mfu;          /* model FLOPs ÷ (peak of all GPUs of the cluster × step time) */
    double speedup; /* tokens/s per GPU of the cluster ÷ megatron's; NAN where there is none, and for what
                       does not fit */
    struct breakdown breakdown;
    double comm_total;      /* time in which the busiest worker sends or receives */
    double efficiency;      /* busy time of the busiest compute lane ÷ step time */
    double peak_memory;     /* bytes on the fullest GPU */
    double recompute_busy;  /* GPU-seconds of recomputation, of all workers of a replica */
    double compute_busy;    /* GPU-seconds of computation, recomputation and optimizer included, likewise */
    double optimizer_busy;  /* GPU-seconds of the optimizer, likewise */
    double busiest_compute; /* seconds of the busiest compute lane */
    int64_t ops;
    const char *executor;
};

/* Builds and times the schedule. keep_schedule and keep_timeline, when not NULL, receive it (the caller
 * frees). */
void simulate_plan(const struct system *system, const struct plan *plan, struct result *result,
                   struct schedule **keep_schedule, struct timeline *keep_timeline);

/* The same, but gives up (false, nothing kept) as soon as the step cannot end before `limit` seconds. */
bool simulate_before(const struct system *system, const struct plan *plan, double limit,
                     struct result *result, struct schedule **keep_schedule, struct timeline *keep_timeline);

/* Makes all open choices. False when the point is impossible for the system: errors say why. A point where
   nothing fits the memory gives feasible false. */
bool tune_point(const struct system *system, const struct point *point, struct plan *plan, bool *feasible,
                struct errors *errors);

/* Fills speedup of each result from the megatron result of the same point. count results of one point, each
   of its system's variant. */
void fill_speedups(struct result *results, int count);

/* The record as design.md gives its keys. */
cJSON *result_json(const struct result *result);
/* One line of CSV, with a line end; the heading's columns are those of all points of the experiment. */
void result_csv(const struct result *result, FILE *stream);
void result_csv_heading(const struct point *point, FILE *stream);

#endif
