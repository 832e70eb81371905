/*
From a plan to its result: build, order, time, and read the figures off the timeline.

The breakdown is of the busiest worker's compute lane. Each gap before an operation is split by what that
operation waits for: while a transfer it depends on is in progress the gap is exposed communication, otherwise
a bubble.
*/
#include "sim/sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Behind the last operation a worker waits for its own parameters to be gathered, then for the others. */
static double exposed_tail(const struct schedule *schedule, const struct timeline *timeline, int group,
                           double from) {
    const struct lane *lane = &schedule->lanes[lane_of(group, RESOURCE_SEND)];
    if (!lane->count) return 0;
    int last = lane->ops[lane->count - 1];
    if (schedule->ops[last].kind != KIND_PARAM_GATHER) return 0;
    return fmax(0, timeline->end[last] - fmax(from, timeline->start[last]));
}

static struct breakdown break_down(const struct schedule *schedule, const struct timeline *timeline,
                                   int group) {
    struct breakdown parts = {0};
    const struct lane *lane = &schedule->lanes[lane_of(group, RESOURCE_COMPUTE)];
    double now = 0;
    for (int i = 0; i < lane->count; i++) {
        int id = lane->ops[i];
        double gap = timeline->start[id] - now, seconds = schedule->ops[id].duration;
        if (gap > 0) {
            double waiting = schedule_exposed(schedule, timeline, id, now, timeline->start[id]);
            parts.exposed_comm += waiting;
            parts.bubble += gap - waiting;
        }
        switch (schedule->ops[id].kind) {
        case KIND_ATTENTION:
            parts.attention += seconds;
            break;
        case KIND_FFN:
            parts.ffn += seconds;
            break;
        case KIND_OPTIMIZER:
            parts.optimizer += seconds;
            break;
        default:
            parts.other_compute += seconds;
        }
        now = timeline->end[id];
    }
    double tail = timeline->makespan - now, waiting = exposed_tail(schedule, timeline, group, now);
    parts.exposed_comm += waiting;
    parts.bubble += tail - waiting;
    return parts;
}

static int busiest_group(const struct schedule *schedule, const double *busy) {
    int busiest = 0;
    for (int g = 1; g < schedule->group_count; g++)
        if (busy[lane_of(g, RESOURCE_COMPUTE)] > busy[lane_of(busiest, RESOURCE_COMPUTE)]) busiest = g;
    return busiest;
}

static void read_compute(const struct schedule *schedule, struct result *result) {
    for (int i = 0; i < schedule->op_count; i++) {
        const struct operation *op = &schedule->ops[i];
        if (operation_is_transfer(op)) continue;
        double gpu_seconds = op->duration * schedule->groups[op->lanes[0] / RESOURCE_COUNT].gpus;
        result->compute_busy += gpu_seconds;
        if (op->pass == PASS_RECOMPUTE) result->recompute_busy += gpu_seconds;
        if (op->kind == KIND_OPTIMIZER) result->optimizer_busy += gpu_seconds;
    }
}

static void read_figures(const struct schedule *schedule, const struct timeline *timeline,
                         struct result *result) {
    const struct point *point = result->plan.point;
    double *busy = must_alloc((size_t)schedule->lane_count * sizeof *busy);
    double *peaks = must_alloc((size_t)schedule->group_count * sizeof *peaks);
    schedule_busy(schedule, busy);
    schedule_memory_peaks(schedule, timeline, peaks);
    int group = busiest_group(schedule, busy);
    double tokens = result->plan.sequences * point->seq_len;
    result->step_time = timeline->makespan;
    result->tokens_per_s = tokens / timeline->makespan;
    result->mfu = result->plan.sequences * model_step_flops(point->model, point->seq_len) /
                  (point->cluster->gpu.peak_flops * cluster_gpus(point->cluster) * timeline->makespan);
    result->breakdown = break_down(schedule, timeline, group);
    result->comm_total = schedule_communication(schedule, timeline, group);
    result->busiest_compute = busy[lane_of(group, RESOURCE_COMPUTE)];
    result->efficiency = result->busiest_compute / timeline->makespan;
    for (int g = 0; g < schedule->group_count; g++) result->peak_memory = fmax(result->peak_memory, peaks[g]);
    result->oom = result->peak_memory > plan_usable_memory(point);
    result->ops = schedule->op_count;
    read_compute(schedule, result);
    free(busy);
    free(peaks);
}

/* A generator's own order that dead-locks is a defect of the suite, not of its input. */
static void fail_on_dead_lock(const struct schedule *schedule) {
    struct errors errors = {0};
    schedule_validate(schedule, &errors);
    errors_print(&errors, stderr);
    abort();
}

bool simulate_before(const struct system *system, const struct plan *plan, double limit,
                     struct result *result, struct schedule **keep_schedule, struct timeline *keep_timeline) {
    *result =
        (struct result){.system = system, .plan = *plan, .feasible = true, .speedup = NAN, .executor = "sim"};
    struct schedule *schedule = system->build(plan);
    schedule_drop_instant(schedule);
    struct timeline timeline = {0};
    bool ended = schedule_arrange_before(schedule, limit, &timeline);
    if (!ended && limit == INFINITY) fail_on_dead_lock(schedule);
    if (ended) read_figures(schedule, &timeline, result);
    if (keep_schedule && ended)
        *keep_schedule = schedule;
    else
        schedule_free(schedule);
    if (keep_timeline && ended)
        *keep_timeline = timeline;
    else
        timeline_free(&timeline);
    return ended;
}

void simulate_plan(const struct system *system, const struct plan *plan, struct result *result,
                   struct schedule **keep_schedule, struct timeline *keep_timeline) {
    simulate_before(system, plan, INFINITY, result, keep_schedule, keep_timeline);
}

/* GPUs of the base's cluster ÷ of this one's: per_system may give a system a cluster of its own. */
static double gpu_ratio(const struct point *base, const struct point *point) {
    return base == point ? 1 : (double)cluster_gpus(base->cluster) / cluster_gpus(point->cluster);
}

static bool counts(const struct result *result) {
    return result->feasible && !result->oom;
}

void fill_speedups(struct result *results, int count) {
    const struct result *base = NULL;
    for (int i = 0; i < count; i++)
        if (counts(&results[i]) && strcmp(results[i].system->name, "megatron") == 0) base = &results[i];
    for (int i = 0; i < count; i++) {
        results[i].speedup = NAN;
        if (base && counts(&results[i]))
            results[i].speedup = results[i].tokens_per_s / base->tokens_per_s *
                                 gpu_ratio(base->plan.point, results[i].plan.point);
    }
}
