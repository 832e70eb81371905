/*
Memory over time, read off a schedule's timeline: every activation is an allocation at its producer's start
and a free at the end of the operation that frees it. Tuning asks for peaks at every candidate, so events are
ordered by a radix sort on the bits of their time (which order as the numbers do, times being at least 0) in
place of a comparison sort.
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

void schedule_memory_peaks(const struct schedule *schedule, const struct timeline *timeline, double *peaks) {
    struct event *events, *to_free;
    int count = collect_events(schedule, timeline, -1, &events, &to_free);
    double *now = must_alloc((size_t)schedule->group_count * sizeof *now);
    for (int group = 0; group < schedule->group_count; group++)
        peaks[group] = now[group] = schedule->groups[group].static_bytes;
    for (int i = 0; i < count; i++) {
        int group = events[i].group;
        now[group] += events[i].bytes;
        if (now[group] > peaks[group]) peaks[group] = now[group];
    }
    free(now);
    free(to_free);
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
