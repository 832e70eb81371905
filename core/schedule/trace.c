/*
A schedule as Chrome trace events, which Perfetto and chrome://tracing open: a process a group, a thread a
lane (an operation that holds two lanes is drawn on both), and a counter of memory a group.

Times are rounded to whole nanoseconds, start and end each, so that operations which touch on a lane still
touch and never overlap by a rounding error: a viewer would take an overlap for nesting.
*/
#include "schedule/names.h"

#include <math.h>
#include <stdlib.h>

/* Numbers of processes and threads are kept apart: a viewer takes a thread whose number is its process's for
   the main thread. */
static int process_of(int group) {
    return group + 1;
}

static int thread_of(const struct schedule *schedule, int lane) {
    return schedule->group_count + 1 + lane;
}

/* A whole number, as a double: an integer's 64 bits end at 292 years. */
static double nanoseconds(double seconds) {
    return round(seconds * 1e9);
}

/* "ts":MICROSECONDS with three exact decimals. */
static void text_micro(struct text *text, const char *key, double nanoseconds) {
    double rest = fmod(nanoseconds, 1000);
    text_add(text, "\"%s\":%.0f.%03.0f", key, (nanoseconds - rest) / 1000, rest);
}

static void text_group(struct text *text, const struct schedule *schedule, int group) {
    char *name = quoted(group_name(schedule, group));
    int process = process_of(group);
    text_add(text, ",\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":%s}}", process,
             name);
    text_add(text,
             ",\n{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":%d,\"args\":{\"sort_index\":%d}}",
             process, group);
    free(name);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) {
        char word[WORD_SIZE];
        int thread = thread_of(schedule, lane_of(group, (enum resource)resource));
        struct text plain = {0};
        text_add(&plain, "%s %s", group_name(schedule, group), word_of(RESOURCE_CHOICES, resource, word));
        char *track = quoted(plain.text);
        text_add(text,
                 ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":%s}}",
                 process, thread, track);
        text_add(text,
                 ",\n{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_"
                 "index\":%d}}",
                 process, thread, resource);
        free(track);
        free(plain.text);
    }
}

static void text_operation(struct text *text, const struct schedule *schedule,
                           const struct timeline *timeline, int op) {
    const struct operation *it = &schedule->ops[op];
    char label[128], kind[WORD_SIZE], pass[WORD_SIZE], bytes[32];
    operation_label(schedule, op, label, sizeof label);
    word_of(KIND_CHOICES, it->kind, kind);
    word_of(PASS_CHOICES, it->pass, pass);
    number_text(it->bytes, bytes);
    double start = nanoseconds(timeline->start[op]), end = nanoseconds(timeline->end[op]);
    for (int slot = 0; slot < it->lane_count; slot++) {
        int lane = it->lanes[slot];
        text_add(text, ",\n{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,", label, kind,
                 process_of(lane / RESOURCE_COUNT), thread_of(schedule, lane));
        text_micro(text, "ts", start);
        text_add(text, ",");
        text_micro(text, "dur", end - start);
        text_add(text,
                 ",\"args\":{\"operation\":%d,\"layer\":%d,\"micro_batch\":%d,\"chunk\":%d,\"pass\":\"%s\","
                 "\"bytes\":%s}}",
                 op, it->layer, it->micro_batch, it->chunk, pass, bytes);
    }
}

static void text_memory(struct text *text, const struct schedule *schedule, const struct timeline *timeline,
                        int group) {
    struct memory_point *points;
    int count = schedule_memory_timeline(schedule, timeline, group, &points);
    for (int i = 0; i < count; i++) {
        char number[32];
        text_add(text, ",\n{\"ph\":\"C\",\"name\":\"memory of a GPU\",\"pid\":%d,", process_of(group));
        text_micro(text, "ts", nanoseconds(points[i].time));
        text_add(text, ",\"args\":{\"bytes\":%s}}", number_text(points[i].bytes, number));
    }
    free(points);
}

bool schedule_write_trace(const struct schedule *schedule, const struct timeline *timeline, const char *title,
                          const char *file, struct errors *errors) {
    struct text text = {0};
    char *name = quoted(title != NULL ? title : "");
    text_add(&text, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"title\":%s},\"traceEvents\":[\n", name);
    /* The first event, without the comma that all others begin with: the title again, where Perfetto lists
     * it. */
    text_add(&text, "{\"ph\":\"M\",\"name\":\"process_labels\",\"pid\":%d,\"args\":{\"labels\":%s}}",
             process_of(0), name);
    free(name);
    for (int group = 0; group < schedule->group_count; group++) text_group(&text, schedule, group);
    for (int op = 0; op < schedule->op_count; op++) text_operation(&text, schedule, timeline, op);
    for (int group = 0; group < schedule->group_count; group++) text_memory(&text, schedule, timeline, group);
    text_add(&text, "\n]}\n");
    bool written = file_write_atomic(file, text.text, text.length, errors);
    free(text.text);
    return written;
}
