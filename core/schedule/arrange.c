/*
Ordering and timing a schedule.

schedule_arrange is an event-driven list-scheduler. Ready operations wait in queues, one for each distinct set
of lanes (an A-group's dispatches to its F-group, say), each a heap by (priority, id). When a lane becomes
free, the best head among the queues that use it and whose other lanes are free too starts. A lane with a
given order starts only its next operation, so its queue's priority is the place in that order. An operation
without lanes waits in no queue: it starts when it is ready.

schedule_replay needs no queue: operations are visited in `sequence`, an order found once in which each stands
behind its dependencies and its predecessors on every lane. Start = the latest end of those. Both run in
double precision with the same additions, so that replaying an arranged schedule gives the same bits.
*/
#include "schedule/schedule.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void timeline_free(struct timeline *timeline) {
    free(timeline->start);
    free(timeline->end);
    *timeline = (struct timeline){0};
}

static void timeline_reset(struct timeline *timeline, int ops) {
    size_t bytes = (size_t)(ops ? ops : 1) * sizeof(double);
    timeline->start = must_realloc(timeline->start, bytes);
    timeline->end = must_realloc(timeline->end, bytes);
    timeline->makespan = 0;
}

/* ---- the list-scheduler ------------------------------------------------------------------------------ */

struct entry {
    int64_t priority;
    int op;
};

struct queue {
    int lanes[MAX_LANES], lane_count;
    struct entry *heap;
    int count, capacity;
};

struct event {
    double time;
    int op;
};

/* All that one run of the list-scheduler knows. */
struct arranger {
    struct schedule *schedule;
    struct timeline *timeline;
    struct queue *queues;
    int queue_count, queue_capacity;
    int *queue_of;     /* of each operation */
    int **lane_queues; /* queues that hold a lane */
    int *lane_queue_count;
    int *waiting; /* dependencies not yet done, of each operation */
    int *successor_first, *successors;
    int64_t *place; /* in the given order; NULL when no lane has one */
    bool *lane_busy;
    double *lane_left; /* seconds of operations not yet started on each lane */
    double limit;      /* give up when a lane can no longer end before */
    bool hopeless;
    int *lane_done;       /* operations started on each lane */
    struct event *events; /* heap of running operations by end */
    int event_count;
    int started, ended;
};

static bool same_lanes(const struct queue *queue, const struct operation *op) {
    if (queue->lane_count != op->lane_count) return false;
    for (int i = 0; i < op->lane_count; i++)
        if (queue->lanes[i] != op->lanes[i]) return false;
    return true;
}

static int find_queue(struct arranger *a, const struct operation *op) {
    const int *candidates = a->lane_queues[op->lanes[0]];
    for (int i = 0; i < a->lane_queue_count[op->lanes[0]]; i++)
        if (same_lanes(&a->queues[candidates[i]], op)) return candidates[i];
    if (a->queue_count == a->queue_capacity) {
        a->queue_capacity = a->queue_capacity ? 2 * a->queue_capacity : 64;
        a->queues = must_realloc(a->queues, (size_t)a->queue_capacity * sizeof *a->queues);
    }
    int id = a->queue_count++;
    struct queue *queue = &a->queues[id];
    *queue = (struct queue){.lane_count = op->lane_count};
    for (int i = 0; i < op->lane_count; i++) {
        int lane = op->lanes[i];
        queue->lanes[i] = lane;
        int count = a->lane_queue_count[lane]++;
        a->lane_queues[lane] = must_realloc(a->lane_queues[lane], (size_t)(count + 1) * sizeof(int));
        a->lane_queues[lane][count] = id;
    }
    return id;
}

static bool entry_before(struct entry a, struct entry b) {
    return a.priority != b.priority ? a.priority < b.priority : a.op < b.op;
}

static void queue_push(struct queue *queue, struct entry entry) {
    if (queue->count == queue->capacity) {
        queue->capacity = queue->capacity ? 2 * queue->capacity : 16;
        queue->heap = must_realloc(queue->heap, (size_t)queue->capacity * sizeof *queue->heap);
    }
    int at = queue->count++;
    while (at > 0 && entry_before(entry, queue->heap[(at - 1) / 2])) {
        queue->heap[at] = queue->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue->heap[at] = entry;
}

static void queue_pop(struct queue *queue) {
    struct entry last = queue->heap[--queue->count];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= queue->count) break;
        if (child + 1 < queue->count && entry_before(queue->heap[child + 1], queue->heap[child])) child++;
        if (!entry_before(queue->heap[child], last)) break;
        queue->heap[at] = queue->heap[child];
        at = child;
    }
    queue->heap[at] = last;
}

static bool event_before(struct event a, struct event b) {
    return a.time != b.time ? a.time < b.time : a.op < b.op;
}

static void event_push(struct arranger *a, struct event event) {
    int at = a->event_count++;
    while (at > 0 && event_before(event, a->events[(at - 1) / 2])) {
        a->events[at] = a->events[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    a->events[at] = event;
}

static struct event event_pop(struct arranger *a) {
    struct event first = a->events[0], last = a->events[--a->event_count];
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= a->event_count) break;
        if (child + 1 < a->event_count && event_before(a->events[child + 1], a->events[child])) child++;
        if (!event_before(a->events[child], last)) break;
        a->events[at] = a->events[child];
        at = child;
    }
    a->events[at] = last;
    return first;
}

/* Whether its turn has come on lanes with a given order. */
static bool is_due(const struct arranger *a, const struct queue *queue) {
    if (!queue->count) return false;
    for (int i = 0; i < queue->lane_count; i++) {
        int lane = queue->lanes[i];
        const struct lane *order = &a->schedule->lanes[lane];
        if (order->given &&
            (a->lane_done[lane] >= order->count || order->ops[a->lane_done[lane]] != queue->heap[0].op))
            return false;
    }
    return true;
}

static bool lanes_are_free(const struct arranger *a, const struct queue *queue) {
    for (int i = 0; i < queue->lane_count; i++)
        if (a->lane_busy[queue->lanes[i]]) return false;
    return true;
}

static void begin(struct arranger *a, int id, double now) {
    double end = now + a->schedule->ops[id].duration;
    a->timeline->start[id] = now;
    a->timeline->end[id] = end;
    a->schedule->sequence[a->started++] = id;
    event_push(a, (struct event){end, id});
}

static void start(struct arranger *a, struct queue *queue, double now) {
    int id = queue->heap[0].op;
    queue_pop(queue);
    const struct operation *op = &a->schedule->ops[id];
    for (int i = 0; i < op->lane_count; i++) {
        struct lane *lane = &a->schedule->lanes[op->lanes[i]];
        a->lane_busy[op->lanes[i]] = true;
        if (!lane->given) lane->ops[a->lane_done[op->lanes[i]]] = id;
        a->lane_done[op->lanes[i]]++;
        if (now + a->lane_left[op->lanes[i]] >= a->limit) a->hopeless = true;
        a->lane_left[op->lanes[i]] -= op->duration;
    }
    begin(a, id, now);
}

/* The queue with the most urgent operation on a lane; NULL: none. */
static struct queue *most_urgent(struct arranger *a, int lane, bool now) {
    struct queue *best = NULL;
    for (int i = 0; i < a->lane_queue_count[lane]; i++) {
        struct queue *queue = &a->queues[a->lane_queues[lane][i]];
        if (!is_due(a, queue) || (now && !lanes_are_free(a, queue))) continue;
        if (!best || entry_before(queue->heap[0], best->heap[0])) best = queue;
    }
    return best;
}

/* Starts the best operation that a free lane allows; true when one was started. A patient lane waits for the
   most urgent one that is ready, and starts it when it is that on all its lanes. Some operation always is, on
   lanes that are free or will be. */
static bool try_lane(struct arranger *a, int lane, double now) {
    if (a->lane_busy[lane]) return false;
    struct queue *best = most_urgent(a, lane, !a->schedule->patient);
    if (!best) return false;
    if (a->schedule->patient) {
        if (!lanes_are_free(a, best)) return false;
        for (int i = 0; i < best->lane_count; i++)
            if (most_urgent(a, best->lanes[i], false) != best) return false;
    }
    start(a, best, now);
    return true;
}

static void make_ready(struct arranger *a, int op, double now) {
    if (a->schedule->ops[op].lane_count == 0) {
        begin(a, op, now);
        return;
    }
    int64_t priority = a->place && a->place[op] >= 0 ? a->place[op] : a->schedule->ops[op].priority;
    queue_push(&a->queues[a->queue_of[op]], (struct entry){priority, op});
}

static void prepare_lanes(struct arranger *a) {
    struct schedule *schedule = a->schedule;
    int *held = must_alloc((size_t)schedule->lane_count * sizeof *held);
    for (int i = 0; i < schedule->op_count; i++)
        for (int k = 0; k < schedule->ops[i].lane_count; k++) held[schedule->ops[i].lanes[k]]++;
    for (int lane = 0; lane < schedule->lane_count; lane++) {
        struct lane *order = &schedule->lanes[lane];
        if (order->given) {
            if (!a->place) {
                a->place = must_alloc((size_t)schedule->op_count * sizeof *a->place);
                for (int i = 0; i < schedule->op_count; i++) a->place[i] = -1;
            }
            for (int i = 0; i < order->count; i++) a->place[order->ops[i]] = i;
        } else {
            order->ops = must_realloc(order->ops, (size_t)(held[lane] ? held[lane] : 1) * sizeof(int));
            order->count = held[lane];
        }
    }
    free(held);
}

static void prepare_successors(struct arranger *a) {
    const struct schedule *schedule = a->schedule;
    int ops = schedule->op_count;
    a->successor_first = must_alloc(((size_t)ops + 2) * sizeof(int));
    a->successors = must_alloc((size_t)(schedule->dep_count ? schedule->dep_count : 1) * sizeof(int));
    int *first = a->successor_first + 1; /* shifted, so that filling leaves the starts behind */
    for (int i = 0; i < schedule->dep_count; i++) first[schedule->deps[i] + 1]++;
    for (int i = 1; i <= ops; i++) first[i] += first[i - 1];
    for (int i = 0; i < ops; i++) {
        const struct operation *op = &schedule->ops[i];
        a->waiting[i] = op->dep_count;
        for (int k = 0; k < op->dep_count; k++) a->successors[first[schedule->deps[op->first_dep + k]]++] = i;
    }
    /* Filling advanced each start to the next one's: a->successor_first[i] is now the start of operation i.
     */
}

static void prepare(struct arranger *a) {
    struct schedule *schedule = a->schedule;
    size_t ops = (size_t)schedule->op_count, lanes = (size_t)schedule->lane_count;
    timeline_reset(a->timeline, schedule->op_count);
    schedule->sequence = must_realloc(schedule->sequence, (ops ? ops : 1) * sizeof(int));
    schedule->ended = must_realloc(schedule->ended, (ops ? ops : 1) * sizeof(int));
    a->queue_of = must_alloc((ops ? ops : 1) * sizeof(int));
    a->waiting = must_alloc((ops ? ops : 1) * sizeof(int));
    a->lane_queues = must_alloc(lanes * sizeof *a->lane_queues);
    a->lane_queue_count = must_alloc(lanes * sizeof(int));
    a->lane_busy = must_alloc(lanes * sizeof(bool));
    a->lane_done = must_alloc(lanes * sizeof(int));
    a->lane_left = must_alloc(lanes * sizeof(double));
    schedule_busy(schedule, a->lane_left);
    size_t free_ops = 0; /* that hold no lane */
    for (int i = 0; i < schedule->op_count; i++) free_ops += schedule->ops[i].lane_count == 0;
    a->events = must_alloc((lanes + free_ops + 1) * sizeof *a->events);
    prepare_lanes(a);
    prepare_successors(a);
    for (int i = 0; i < schedule->op_count; i++)
        if (schedule->ops[i].lane_count) a->queue_of[i] = find_queue(a, &schedule->ops[i]);
}

static void release(struct arranger *a) {
    for (int i = 0; i < a->queue_count; i++) free(a->queues[i].heap);
    for (int i = 0; i < a->schedule->lane_count; i++) free(a->lane_queues[i]);
    free(a->queues);
    free(a->queue_of);
    free(a->lane_queues);
    free(a->lane_queue_count);
    free(a->waiting);
    free(a->successor_first);
    free(a->successors);
    free(a->place);
    free(a->lane_busy);
    free(a->lane_done);
    free(a->lane_left);
    free(a->events);
}

/* Ends all operations that end at `now`; notes in `touched` the lanes where something may start. */
static double finish_next(struct arranger *a, bool *touched) {
    double now = a->events[0].time;
    while (a->event_count && a->events[0].time == now) {
        int id = event_pop(a).op;
        const struct operation *op = &a->schedule->ops[id];
        a->schedule->ended[a->ended++] = id;
        for (int i = 0; i < op->lane_count; i++) {
            a->lane_busy[op->lanes[i]] = false;
            touched[op->lanes[i]] = true;
        }
        for (int i = a->successor_first[id]; i < a->successor_first[id + 1]; i++) {
            int next = a->successors[i];
            if (--a->waiting[next]) continue;
            make_ready(a, next, now);
            if (a->schedule->ops[next].lane_count) touched[a->schedule->ops[next].lanes[0]] = true;
        }
    }
    return now;
}

static bool order_is_whole(const struct schedule *schedule) {
    for (int lane = 0; lane < schedule->lane_count; lane++)
        for (int i = 0; i < schedule->lanes[lane].count; i++)
            if (schedule->lanes[lane].given &&
                (schedule->lanes[lane].ops[i] < 0 || schedule->lanes[lane].ops[i] >= schedule->op_count))
                return false;
    return true;
}

/* What never ran has no place on a lane and no time. */
static void forget_order(struct arranger *a) {
    struct schedule *schedule = a->schedule;
    free(schedule->sequence);
    free(schedule->ended);
    schedule->sequence = schedule->ended = NULL;
    for (int lane = 0; lane < schedule->lane_count; lane++)
        if (!schedule->lanes[lane].given) schedule->lanes[lane].count = a->lane_done[lane];
}

bool schedule_arrange(struct schedule *schedule, struct timeline *timeline) {
    return schedule_arrange_before(schedule, INFINITY, timeline);
}

bool schedule_arrange_before(struct schedule *schedule, double limit, struct timeline *timeline) {
    if (!order_is_whole(schedule)) return false;
    struct arranger a = {.schedule = schedule, .timeline = timeline, .limit = limit};
    prepare(&a);
    bool *touched = must_alloc((size_t)schedule->lane_count * sizeof *touched);
    for (int i = 0; i < schedule->op_count; i++)
        if (!a.waiting[i]) make_ready(&a, i, 0);
    memset(touched, true, (size_t)schedule->lane_count * sizeof *touched);
    double now = 0;
    for (;;) {
        for (int lane = 0; lane < schedule->lane_count; lane++) {
            if (!touched[lane]) continue;
            touched[lane] = false;
            try_lane(&a, lane, now);
        }
        if (!a.event_count || a.hopeless) break;
        now = finish_next(&a, touched);
    }
    timeline->makespan = now;
    bool whole = a.started == schedule->op_count && !a.hopeless;
    if (!whole) forget_order(&a);
    free(touched);
    release(&a);
    return whole;
}

/* ---- replay ------------------------------------------------------------------------------------------ */

/* Finds `sequence` by Kahn's algorithm over dependencies and lane orders. False on a cycle. */
static bool find_sequence(struct schedule *schedule) {
    int ops = schedule->op_count;
    int *waiting = must_alloc((size_t)(ops ? ops : 1) * sizeof *waiting);
    int *next_on_lane = must_alloc((size_t)(ops ? ops : 1) * MAX_LANES * sizeof *next_on_lane);
    struct arranger a = {.schedule = schedule, .waiting = waiting};
    prepare_successors(&a);
    for (int i = 0; i < ops * MAX_LANES; i++) next_on_lane[i] = -1;
    for (int lane = 0; lane < schedule->lane_count; lane++)
        for (int i = 0; i + 1 < schedule->lanes[lane].count; i++) {
            int before = schedule->lanes[lane].ops[i], after = schedule->lanes[lane].ops[i + 1], slot = 0;
            while (schedule->ops[before].lanes[slot] != lane) slot++;
            next_on_lane[MAX_LANES * before + slot] = after;
            waiting[after]++;
        }
    int *sequence = must_alloc((size_t)(ops ? ops : 1) * sizeof *sequence);
    int found = 0, visited = 0;
    for (int i = 0; i < ops; i++)
        if (!waiting[i]) sequence[found++] = i;
    while (visited < found) {
        int op = sequence[visited++];
        for (int i = a.successor_first[op]; i < a.successor_first[op + 1]; i++)
            if (!--waiting[a.successors[i]]) sequence[found++] = a.successors[i];
        for (int slot = 0; slot < MAX_LANES; slot++) {
            int after = next_on_lane[MAX_LANES * op + slot];
            if (after >= 0 && !--waiting[after]) sequence[found++] = after;
        }
    }
    free(waiting);
    free(next_on_lane);
    free(a.successor_first);
    free(a.successors);
    free(schedule->sequence);
    schedule->sequence = sequence;
    if (found == ops) return true;
    free(sequence);
    schedule->sequence = NULL;
    return false;
}

bool schedule_replay(struct schedule *schedule, struct timeline *timeline) {
    if (!schedule->sequence && !find_sequence(schedule)) return false;
    timeline_reset(timeline, schedule->op_count);
    double *lane_free = must_alloc((size_t)schedule->lane_count * sizeof *lane_free);
    double makespan = 0;
    for (int i = 0; i < schedule->op_count; i++) {
        int id = schedule->sequence[i];
        const struct operation *op = &schedule->ops[id];
        double begin = 0;
        for (int k = 0; k < op->lane_count; k++)
            if (lane_free[op->lanes[k]] > begin) begin = lane_free[op->lanes[k]];
        for (int k = 0; k < op->dep_count; k++) {
            double done = timeline->end[schedule->deps[op->first_dep + k]];
            if (done > begin) begin = done;
        }
        double end = begin + op->duration;
        timeline->start[id] = begin;
        timeline->end[id] = end;
        for (int k = 0; k < op->lane_count; k++) lane_free[op->lanes[k]] = end;
        if (end > makespan) makespan = end;
    }
    timeline->makespan = makespan;
    free(lane_free);
    return true;
}

/* ---- bounds ------------------------------------------------------------------------------------------ */

void schedule_busy(const struct schedule *schedule, double *busy) {
    memset(busy, 0, (size_t)schedule->lane_count * sizeof *busy);
    for (int i = 0; i < schedule->op_count; i++)
        for (int k = 0; k < schedule->ops[i].lane_count; k++)
            busy[schedule->ops[i].lanes[k]] += schedule->ops[i].duration;
}

double schedule_critical_path(const struct schedule *schedule) {
    double *end = must_alloc((size_t)(schedule->op_count ? schedule->op_count : 1) * sizeof *end),
           longest = 0;
    for (int i = 0; i < schedule->op_count; i++) { /* dependencies point back, so one pass suffices */
        const struct operation *op = &schedule->ops[i];
        double begin = 0;
        for (int k = 0; k < op->dep_count; k++)
            if (end[schedule->deps[op->first_dep + k]] > begin)
                begin = end[schedule->deps[op->first_dep + k]];
        end[i] = begin + op->duration;
        if (end[i] > longest) longest = end[i];
    }
    free(end);
    return longest;
}
