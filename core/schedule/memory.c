/*
Memory over time, read off a schedule's timeline: every activation is an allocation at its producer's start
and a free at the end of the operation that frees it. Events are ordered by a radix sort on the bits of their
time (which order as the numbers do, times being at least 0). Tuning asks for peaks at every candidate: there
the list-scheduler's own order of starts and ends serves.
*/
#include "schedule/schedule.h"

#include <stdlib.h>
#include <string.h>

struct event {
    uint64_t time; /* bits of the double */
    double bytes;  /* negative when freed */
    int group;
};

#define DIGIT_BITS 11
#define DIGIT_VALUES (1 << DIGIT_BITS)
#define DIGITS 6 /* 66 bits ≥ 64 */

static uint64_t bits_of(double time) {
    time += 0.0; /* −0 becomes 0 */
    uint64_t bits;
    memcpy(&bits, &time, sizeof bits);
    return bits;
}

static double time_of(uint64_t bits) {
    double time;
    memcpy(&time, &bits, sizeof time);
    return time;
}

/* Stable, so that events of one time keep the order in which they were listed. Returns the array (of the two)
   that holds the result. */
static struct event *sort_by_time(struct event *events, struct event *spare, int count) {
    uint32_t(*histogram)[DIGIT_VALUES] = must_alloc(DIGITS * sizeof *histogram);
    for (int i = 0; i < count; i++)
        for (int digit = 0; digit < DIGITS; digit++)
            histogram[digit][events[i].time >> (digit * DIGIT_BITS) & (DIGIT_VALUES - 1)]++;
    for (int digit = 0; digit < DIGITS && count > 0; digit++) {
        int shift = digit * DIGIT_BITS;
        uint32_t *place = histogram[digit];
        if (place[events[0].time >> shift & (DIGIT_VALUES - 1)] == (uint32_t)count) continue; /* all alike */
        uint32_t sum = 0;
        for (int value = 0; value < DIGIT_VALUES; value++) {
            uint32_t here = place[value];
            place[value] = sum;
            sum += here;
        }
        for (int i = 0; i < count; i++)
            spare[place[events[i].time >> shift & (DIGIT_VALUES - 1)]++] = events[i];
        struct event *sorted = spare;
        spare = events;
        events = sorted;
    }
    free(histogram);
    return events;
}

/* One event, unless the activation is of another group (only ≥ 0), never freed (no free then) or lives no
   time at all: that one needs no memory, and its free must not come before its allocation. */
static int add_event(const struct schedule *schedule, const struct timeline *timeline, int activation,
                     int only, bool frees, struct event *event) {
    const struct activation *kept = &schedule->activations[activation];
    if (only >= 0 && kept->group != only) return 0;
    if (frees && kept->freed_by < 0) return 0;
    double start = timeline->start[kept->producer];
    double end = kept->freed_by >= 0 ? timeline->end[kept->freed_by] : timeline->makespan;
    if (end <= start) return 0;
    *event = (struct event){.time = bits_of(frees ? end : start),
                            .bytes = frees ? -kept->bytes : kept->bytes,
                            .group = kept->group};
    return 1;
}

/* What ends at the very time it began held its memory beside what is taken then. */
static bool takes_no_time(const struct timeline *timeline, int op) {
    return op >= 0 && timeline->start[op] == timeline->end[op];
}

/* All events of a group (−1: of all groups) in order of time; frees come before allocations of the same time,
   since what an operation frees at its end is there for the next one, but for an operation that takes no
   time. Returns their number; free(*to_free). */
static int collect_events(const struct schedule *schedule, const struct timeline *timeline, int only,
                          struct event **sorted, struct event **to_free) {
    size_t most = 2 * (size_t)schedule->activation_count;
    struct event *events = must_alloc(2 * (most + 1) * sizeof *events);
    int count = 0;
    for (int a = 0; a < schedule->activation_count; a++)
        if (!takes_no_time(timeline, schedule->activations[a].freed_by))
            count += add_event(schedule, timeline, a, only, true, &events[count]);
    for (int a = 0; a < schedule->activation_count; a++)
        count += add_event(schedule, timeline, a, only, false, &events[count]);
    for (int a = 0; a < schedule->activation_count; a++)
        if (takes_no_time(timeline, schedule->activations[a].freed_by))
            count += add_event(schedule, timeline, a, only, true, &events[count]);
    *sorted = sort_by_time(events, events + count, count);
    *to_free = events;
    return count;
}

/* ---- peaks, quickly ---------------------------------------------------------------------------------- */

/* Activations by the operation that takes, or frees, their memory: of operation i those listed from first[i]
   to first[i + 1] − 1. */
struct by_operation {
    int *first, *list;
};

static struct by_operation by_operation(const struct schedule *schedule, bool frees) {
    int ops = schedule->op_count, count = schedule->activation_count;
    struct by_operation sorted = {must_alloc(((size_t)ops + 2) * sizeof(int)),
                                  must_alloc(((size_t)count + 1) * sizeof(int))};
    int *next = sorted.first + 1; /* shifted, so that filling leaves the starts behind */
    for (int pass = 0; pass < 2; pass++) {
        for (int a = 0; a < count; a++) {
            int op = frees ? schedule->activations[a].freed_by : schedule->activations[a].producer;
            if (op < 0) continue;
            if (pass)
                sorted.list[next[op]++] = a;
            else
                next[op + 1]++;
        }
        for (int op = 0; !pass && op < ops; op++) next[op + 1] += next[op];
    }
    return sorted;
}

static bool is_ordered(const int *order, const double *times, int count) {
    for (int i = 1; i < count; i++)
        if (times[order[i - 1]] > times[order[i]]) return false;
    return true;
}

/* One walk over the step. */
struct walk {
    const struct schedule *schedule;
    const struct timeline *timeline;
    struct by_operation taken, freed;
    double *now, *peaks; /* of each group */
};

static bool lives(const struct walk *walk, const struct activation *kept) {
    double end = kept->freed_by >= 0 ? walk->timeline->end[kept->freed_by] : walk->timeline->makespan;
    return end > walk->timeline->start[kept->producer];
}

static void take(struct walk *walk, int op) {
    for (int i = walk->taken.first[op]; i < walk->taken.first[op + 1]; i++) {
        const struct activation *kept = &walk->schedule->activations[walk->taken.list[i]];
        if (!lives(walk, kept)) continue;
        double now = walk->now[kept->group] += kept->bytes;
        if (now > walk->peaks[kept->group]) walk->peaks[kept->group] = now;
    }
}

static void free_of(struct walk *walk, int op) {
    for (int i = walk->freed.first[op]; i < walk->freed.first[op + 1]; i++) {
        const struct activation *kept = &walk->schedule->activations[walk->freed.list[i]];
        if (lives(walk, kept)) walk->now[kept->group] -= kept->bytes;
    }
}

/* starts, ends: operations in the order of their starts and ends. At one time what ends frees first, but for
   operations that take no time. */
static void walk_step(struct walk *walk, const int *starts, const int *ends) {
    int ops = walk->schedule->op_count;
    const double *start = walk->timeline->start, *end = walk->timeline->end;
    for (int i = 0, j = 0; i < ops;) {
        double time = start[starts[i]];
        for (; j < ops && end[ends[j]] < time; j++) free_of(walk, ends[j]);
        int last = j;
        for (; last < ops && end[ends[last]] == time; last++)
            if (!takes_no_time(walk->timeline, ends[last])) free_of(walk, ends[last]);
        for (; i < ops && start[starts[i]] == time; i++) take(walk, starts[i]);
        for (; j < last; j++)
            if (takes_no_time(walk->timeline, ends[j])) free_of(walk, ends[j]);
    }
}

static void peaks_by_sorting(const struct schedule *schedule, const struct timeline *timeline, double *peaks,
                             double *now) {
    struct event *events, *to_free;
    int count = collect_events(schedule, timeline, -1, &events, &to_free);
    for (int i = 0; i < count; i++) {
        int group = events[i].group;
        now[group] += events[i].bytes;
        if (now[group] > peaks[group]) peaks[group] = now[group];
    }
    free(to_free);
}

/* An arranged schedule knows the order of its operations' starts and ends; of another timeline, events are
   sorted. */
void schedule_memory_peaks(const struct schedule *schedule, const struct timeline *timeline, double *peaks) {
    double *now = must_alloc((size_t)schedule->group_count * sizeof *now);
    int ops = schedule->op_count;
    for (int group = 0; group < schedule->group_count; group++)
        peaks[group] = now[group] = schedule->groups[group].static_bytes;
    if (schedule->sequence && schedule->ended && is_ordered(schedule->sequence, timeline->start, ops) &&
        is_ordered(schedule->ended, timeline->end, ops)) {
        struct walk walk = {schedule, timeline, by_operation(schedule, false), by_operation(schedule, true),
                            now,      peaks};
        walk_step(&walk, schedule->sequence, schedule->ended);
        free(walk.taken.first);
        free(walk.taken.list);
        free(walk.freed.first);
        free(walk.freed.list);
    } else {
        peaks_by_sorting(schedule, timeline, peaks, now);
    }
    free(now);
}

/* From time 0, one point for each time at which memory changes, to the end of the step. */
int schedule_memory_timeline(const struct schedule *schedule, const struct timeline *timeline, int group,
                             struct memory_point **points) {
    struct event *events, *to_free;
    int count = collect_events(schedule, timeline, group, &events, &to_free);
    struct memory_point *out = must_alloc(((size_t)count + 2) * sizeof *out);
    int last = 0;
    out[0] = (struct memory_point){.time = 0, .bytes = schedule->groups[group].static_bytes};
    for (int i = 0; i < count; i++) {
        double time = time_of(events[i].time), bytes = out[last].bytes + events[i].bytes;
        if (time > out[last].time) last++;
        out[last] = (struct memory_point){.time = time, .bytes = bytes};
    }
    if (timeline->makespan > out[last].time) {
        out[last + 1] = (struct memory_point){.time = timeline->makespan, .bytes = out[last].bytes};
        last++;
    }
    free(to_free);
    *points = out;
    return last + 1;
}
