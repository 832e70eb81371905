/*
Reading a rank's program off a schedule.
*/
#include "train/program.h"

#include <stdlib.h>

bool holds_lane(const struct schedule *schedule, int op, int group, enum resource resource) {
    const struct operation *it = &schedule->ops[op];
    for (int slot = 0; slot < it->lane_count; slot++)
        if (it->lanes[slot] == lane_of(group, resource)) return true;
    return false;
}

bool holds_group(const struct schedule *schedule, int op, int group) {
    const struct operation *it = &schedule->ops[op];
    for (int slot = 0; slot < it->lane_count; slot++)
        if (it->lanes[slot] / RESOURCE_COUNT == group) return true;
    return false;
}

/* ---- lists ------------------------------------------------------------------------------------------- */

struct pair {
    int op, item;
};
struct pairs {
    struct pair *list;
    int count, capacity;
};

static void add_pair(struct pairs *pairs, int op, int item) {
    if (pairs->count == pairs->capacity) {
        pairs->capacity = pairs->capacity ? 2 * pairs->capacity : 256;
        pairs->list = must_realloc(pairs->list, (size_t)pairs->capacity * sizeof *pairs->list);
    }
    pairs->list[pairs->count++] = (struct pair){op, item};
}

/* Items by operation, those of one operation in the order they were added. Frees the pairs. */
static struct list list_of(struct arena *arena, struct pairs *pairs, int ops) {
    struct list list = {.first = arena_alloc(arena, ((size_t)ops + 2) * sizeof(int)),
                        .items = arena_alloc(arena, ((size_t)pairs->count + 1) * sizeof(int))};
    for (int i = 0; i < pairs->count; i++) list.first[pairs->list[i].op + 2]++;
    for (int op = 0; op < ops; op++) list.first[op + 2] += list.first[op + 1];
    for (int i = 0; i < pairs->count; i++)
        list.items[list.first[pairs->list[i].op + 1]++] = pairs->list[i].item;
    free(pairs->list);
    return list;
}

/* ---- waiting ----------------------------------------------------------------------------------------- */

/* Where operations stand: on this group's lanes, and in the schedule's sequence. */
struct places {
    int (*on_lane)[RESOURCE_COUNT];
    int *in_sequence;
};

static struct places find_places(const struct schedule *schedule, int group) {
    size_t ops = (size_t)schedule->op_count + 1;
    struct places places = {must_alloc(ops * sizeof *places.on_lane),
                            must_alloc(ops * sizeof *places.in_sequence)};
    for (int i = 0; i < schedule->op_count; i++) places.in_sequence[schedule->sequence[i]] = i;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) {
        const struct lane *lane = &schedule->lanes[lane_of(group, (enum resource)resource)];
        for (int i = 0; i < lane->count; i++) places.on_lane[lane->ops[i]][resource] = i;
    }
    return places;
}

static void wait_for(struct program *program, const struct places *places, int op, int earlier) {
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) {
        if (!holds_lane(program->schedule, earlier, program->group, (enum resource)resource)) continue;
        int finished = places->on_lane[earlier][resource] + 1;
        if (program->before[op][resource] < finished) program->before[op][resource] = finished;
    }
}

static void read_dependencies(struct program *program, const struct places *places, struct pairs *waits,
                              struct pairs *tells) {
    const struct schedule *schedule = program->schedule;
    for (int op = 0; op < schedule->op_count; op++)
        for (int i = 0; i < schedule->ops[op].dep_count; i++) {
            int dep = schedule->deps[schedule->ops[op].first_dep + i];
            const struct operation *it = &schedule->ops[op], *on = &schedule->ops[dep];
            bool here = holds_group(schedule, op, program->group);
            if (here && holds_group(schedule, dep, program->group)) wait_for(program, places, op, dep);
            /* Who starts an operation is its compute lane's or its sender's group; who ends one, the
             * receiver's. */
            int starts = it->lanes[0] / RESOURCE_COUNT, ends = on->lanes[on->lane_count - 1] / RESOURCE_COUNT;
            if (holds_group(schedule, dep, starts)) continue;
            if (starts == program->group) add_pair(waits, op, dep);
            if (ends == program->group) add_pair(tells, dep, starts);
        }
}

/* Number of operations at the head of a lane's freeing ones that the timeline ends before `op` starts. */
static int ended_before(const int *freeing, int count, const struct timeline *planned,
                        const struct places *places, int op) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2, earlier = freeing[middle];
        if (planned->end[earlier] <= planned->start[op] &&
            places->in_sequence[earlier] < places->in_sequence[op])
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void read_memory_order(struct program *program, const struct places *places,
                              const struct timeline *planned) {
    const struct schedule *schedule = program->schedule;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) {
        const struct lane *lane = &schedule->lanes[lane_of(program->group, (enum resource)resource)];
        int *freeing = must_alloc(((size_t)lane->count + 1) * sizeof *freeing), count = 0;
        for (int i = 0; i < lane->count; i++)
            if (program->frees.first[lane->ops[i]] < program->frees.first[lane->ops[i] + 1])
                freeing[count++] = lane->ops[i];
        for (int op = 0; op < schedule->op_count; op++) {
            if (program->takes.first[op] == program->takes.first[op + 1]) continue;
            int ended = ended_before(freeing, count, planned, places, op);
            if (ended > 0) wait_for(program, places, op, freeing[ended - 1]);
        }
        free(freeing);
    }
}

struct program program_new(struct arena *arena, const struct schedule *schedule,
                           const struct timeline *planned, int group) {
    struct program program = {.schedule = schedule, .group = group};
    int ops = schedule->op_count;
    program.before = arena_alloc(arena, ((size_t)ops + 1) * sizeof *program.before);
    struct places places = find_places(schedule, group);
    struct pairs takes = {0}, frees = {0}, waits = {0}, tells = {0};
    for (int a = 0; a < schedule->activation_count; a++) {
        const struct activation *activation = &schedule->activations[a];
        if (activation->group != group) continue;
        add_pair(&takes, activation->producer, a);
        if (activation->freed_by >= 0) add_pair(&frees, activation->freed_by, a);
    }
    read_dependencies(&program, &places, &waits, &tells);
    program.takes = list_of(arena, &takes, ops);
    program.frees = list_of(arena, &frees, ops);
    program.waits = list_of(arena, &waits, ops);
    program.tells = list_of(arena, &tells, ops);
    read_memory_order(&program, &places, planned);
    free(places.on_lane);
    free(places.in_sequence);
    return program;
}
