/*
What a process is doing, told by its threads to the one that watches it.
*/
#define _GNU_SOURCE /* pthread_getcpuclockid */
#include "base/base.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct doing {
    enum pulse_kind kind;
    double since;
    clockid_t clock; /* the thread's */
    char text[PULSE_TEXT];
};

struct pulse {
    pthread_mutex_t mutex;
    uint64_t beats;
    struct doing threads[PULSE_THREADS];
};

struct pulse *pulse_new(void) {
    struct pulse *pulse = must_alloc(sizeof *pulse);
    pthread_mutex_init(&pulse->mutex, NULL);
    return pulse;
}

void pulse_free(struct pulse *pulse) {
    if (!pulse) return;
    pthread_mutex_destroy(&pulse->mutex);
    free(pulse);
}

void pulse_set(struct pulse *pulse, int thread, enum pulse_kind kind, const char *format, ...) {
    if (!pulse) return;
    struct doing doing = {.kind = kind, .since = seconds_now()};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(doing.text, sizeof doing.text, format, arguments);
    va_end(arguments);
    if (pthread_getcpuclockid(pthread_self(), &doing.clock) != 0) doing.clock = CLOCK_PROCESS_CPUTIME_ID;
    pthread_mutex_lock(&pulse->mutex);
    pulse->threads[thread] = doing;
    pulse->beats++;
    pthread_mutex_unlock(&pulse->mutex);
}

/* Nanoseconds of processor time; a thread that has ended has none. */
static uint64_t spent(clockid_t clock) {
    struct timespec time;
    if (clock_gettime(clock, &time) != 0) return 0;
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Who works tells more than who waits; of several, the one that has been at it longest. */
static bool tells_more(const struct doing *a, const struct doing *b) {
    if (!b || a->kind != b->kind) return !b || a->kind == PULSE_WORK;
    return a->since < b->since;
}

struct pulse_sample pulse_read(struct pulse *pulse) {
    struct pulse_sample sample = {.waits = true};
    const struct doing *most = NULL;
    pthread_mutex_lock(&pulse->mutex);
    for (int i = 0; i < PULSE_THREADS; i++) {
        const struct doing *doing = &pulse->threads[i];
        if (doing->kind == PULSE_NONE) continue;
        if (doing->kind == PULSE_WORK) {
            sample.waits = false;
            sample.life += spent(doing->clock);
        }
        if (tells_more(doing, most)) most = doing;
    }
    sample.life += pulse->beats;
    if (most) memcpy(sample.text, most->text, sizeof sample.text);
    pthread_mutex_unlock(&pulse->mutex);
    return sample;
}
