/*
Building a schedule: groups, operations, dependencies, activations, given orders.

Operations are stored in one array in the order in which a generator adds them, and a dependency may only
point back: so the dependencies of a generator are free of cycles by construction. A dependency is added to
the operation added last, which keeps each operation's dependencies contiguous.
*/
#include "schedule/schedule.h"

#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct schedule *schedule_new(int groups, int layers, int micro_batches) {
    struct schedule *schedule = must_alloc(sizeof *schedule);
    schedule->arena = arena_new();
    schedule->group_count = groups;
    schedule->groups = arena_alloc(schedule->arena, (size_t)groups * sizeof *schedule->groups);
    schedule->lane_count = RESOURCE_COUNT * groups;
    schedule->lanes = arena_alloc(schedule->arena, (size_t)schedule->lane_count * sizeof *schedule->lanes);
    schedule->layers = layers;
    schedule->micro_batches = micro_batches;
    return schedule;
}

void schedule_free(struct schedule *schedule) {
    if (!schedule) return;
    free(schedule->ops);
    free(schedule->deps);
    free(schedule->activations);
    free(schedule->reads);
    free(schedule->sequence);
    free(schedule->ended);
    for (int lane = 0; lane < schedule->lane_count; lane++) free(schedule->lanes[lane].ops);
    arena_free(schedule->arena);
    free(schedule);
}

void schedule_group(struct schedule *schedule, int group, int gpus, double static_bytes, const char *name,
                    ...) {
    assert(group >= 0 && group < schedule->group_count);
    char text[64];
    va_list arguments;
    va_start(arguments, name);
    vsnprintf(text, sizeof text, name, arguments);
    va_end(arguments);
    schedule->groups[group] = (struct group){
        .name = arena_strdup(schedule->arena, text), .gpus = gpus, .static_bytes = static_bytes};
}

/* Room for one more element in an array of *capacity elements. */
static void *grown(void *array, int count, int *capacity, size_t element) {
    if (count < *capacity) return array;
    *capacity = *capacity ? 2 * *capacity : 256;
    return must_realloc(array, (size_t)*capacity * element);
}

static int add(struct schedule *schedule, struct operation op) {
    schedule->ops = grown(schedule->ops, schedule->op_count, &schedule->op_capacity, sizeof *schedule->ops);
    op.first_dep = schedule->dep_count;
    schedule->ops[schedule->op_count] = op;
    return schedule->op_count++;
}

int schedule_compute(struct schedule *schedule, enum kind kind, enum pass pass, int layer, int micro_batch,
                     int group, double duration) {
    assert(group >= 0 && group < schedule->group_count && duration >= 0);
    return add(schedule, (struct operation){.kind = (uint8_t)kind,
                                            .pass = (uint8_t)pass,
                                            .lane_count = 1,
                                            .chunks = 1,
                                            .layer = layer,
                                            .micro_batch = micro_batch,
                                            .lanes = {lane_of(group, RESOURCE_COMPUTE)},
                                            .duration = duration});
}

int schedule_transfer(struct schedule *schedule, enum kind kind, enum pass pass, int layer, int micro_batch,
                      int from, int to, double duration, double bytes) {
    assert(from >= 0 && from < schedule->group_count && to >= 0 && to < schedule->group_count &&
           duration >= 0);
    struct operation op = {.kind = (uint8_t)kind,
                           .pass = (uint8_t)pass,
                           .chunks = 1,
                           .layer = layer,
                           .micro_batch = micro_batch,
                           .duration = duration,
                           .bytes = bytes};
    op.lanes[op.lane_count++] = lane_of(from, RESOURCE_SEND);
    if (schedule->half_duplex && from != to) {
        op.lanes[op.lane_count++] = lane_of(from, RESOURCE_RECV);
        op.lanes[op.lane_count++] = lane_of(to, RESOURCE_SEND);
    }
    op.lanes[op.lane_count++] = lane_of(to, RESOURCE_RECV);
    return add(schedule, op);
}

void schedule_chunk(struct schedule *schedule, int chunk, int chunks) {
    schedule->ops[schedule->op_count - 1].chunk = (int16_t)chunk;
    schedule->ops[schedule->op_count - 1].chunks = (int16_t)chunks;
}

void schedule_gather(struct schedule *schedule, double seconds) {
    schedule->ops[schedule->op_count - 1].gather = seconds;
}

void schedule_drop_instant(struct schedule *schedule) {
    for (int i = 0; i < schedule->op_count; i++)
        if (operation_is_transfer(&schedule->ops[i]) && schedule->ops[i].duration == 0)
            schedule->ops[i].lane_count = 0;
}

void schedule_after(struct schedule *schedule, int on) {
    if (on < 0) return;
    assert(schedule->op_count > 0 && on < schedule->op_count - 1);
    schedule->deps =
        grown(schedule->deps, schedule->dep_count, &schedule->dep_capacity, sizeof *schedule->deps);
    schedule->deps[schedule->dep_count++] = on;
    schedule->ops[schedule->op_count - 1].dep_count++;
}

void schedule_priority(struct schedule *schedule, int64_t priority) {
    schedule->ops[schedule->op_count - 1].priority = priority;
}

int schedule_keep(struct schedule *schedule, int group, int producer, double bytes) {
    assert(producer >= 0 && producer < schedule->op_count && bytes >= 0);
    schedule->activations = grown(schedule->activations, schedule->activation_count,
                                  &schedule->activation_capacity, sizeof *schedule->activations);
    schedule->activations[schedule->activation_count] = (struct activation){.group = group,
                                                                            .producer = producer,
                                                                            .freed_by = producer,
                                                                            .bytes = bytes,
                                                                            .layer = -1,
                                                                            .micro_batch = -1};
    return schedule->activation_count++;
}

void schedule_role(struct schedule *schedule, enum role role, int layer, int micro_batch) {
    struct activation *activation = &schedule->activations[schedule->activation_count - 1];
    activation->role = (uint8_t)role;
    activation->layer = layer;
    activation->micro_batch = micro_batch;
}

void schedule_reads(struct schedule *schedule, int activation, int op) {
    schedule->reads =
        grown(schedule->reads, schedule->read_count, &schedule->read_capacity, sizeof *schedule->reads);
    schedule->reads[schedule->read_count++] = (struct read){activation, op};
}

void schedule_release(struct schedule *schedule, int activation, int op) {
    assert(op >= 0 && op < schedule->op_count);
    schedule->activations[activation].freed_by = op;
}

void schedule_fix_order(struct schedule *schedule, int lane, const int *ops, int count) {
    struct lane *to = &schedule->lanes[lane];
    free(to->ops);
    to->ops = must_alloc((size_t)(count ? count : 1) * sizeof *to->ops);
    if (count) memcpy(to->ops, ops, (size_t)count * sizeof *ops);
    to->count = count;
    to->given = true;
}
