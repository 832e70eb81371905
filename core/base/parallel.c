/*
Parallel loop, progress, clock.

The loop hands out one index at a time, since the points of a sweep differ in length. The calling thread works
too; where the system gives fewer threads than asked for, the loop goes on with those it got.
*/
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/base.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct loop {
    int count;
    atomic_int next;
    void (*task)(void *context, int i);
    void *context;
    const volatile int *stop;
};

static void *work_off(void *argument) {
    struct loop *loop = argument;
    while (!loop->stop || !__atomic_load_n(loop->stop, __ATOMIC_RELAXED)) {
        int i = atomic_fetch_add(&loop->next, 1);
        if (i >= loop->count) break;
        loop->task(loop->context, i);
    }
    return NULL;
}

void parallel_for(int count, int jobs, void (*task)(void *context, int i), void *context,
                  const volatile int *stop) {
    struct loop loop = {.count = count, .task = task, .context = context, .stop = stop};
    int helpers = (jobs < count ? jobs : count) - 1, started = 0;
    pthread_t *threads = helpers > 0 ? must_alloc((size_t)helpers * sizeof *threads) : NULL;
    while (started < helpers && pthread_create(&threads[started], NULL, work_off, &loop) == 0) started++;
    work_off(&loop);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    free(threads);
}

int processor_count(void) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) > 0)
        return CPU_COUNT(&allowed);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- progress ---------------------------------------------------------------------------------------- */

#define REDRAW_SECONDS 0.1
#define LINE_SECONDS 30
#define LINE_SHARE 0.1 /* of the time gone by: a run of hours needs no line every half minute */

const char *duration_text(double seconds, char *buffer) {
    long long whole = seconds < 1e15 ? (long long)(seconds + 0.5) : (long long)1e15;
    if (whole < 60)
        snprintf(buffer, 32, "%lld s", whole);
    else if (whole < 3600)
        snprintf(buffer, 32, "%lld min %02lld s", whole / 60, whole % 60);
    else
        snprintf(buffer, 32, "%lld h %02lld min", whole / 3600, whole / 60 % 60);
    return buffer;
}

struct progress progress_begin(const char *what, int total) {
    double now = seconds_now();
    return (struct progress){
        .what = what, .total = total, .terminal = isatty(STDERR_FILENO) == 1, .began = now, .shown = now};
}

static void show_line(struct progress *progress, int done, double now) {
    double elapsed = now - progress->began, pause = fmax(LINE_SECONDS, LINE_SHARE * elapsed);
    char gone[32], left[32];
    if (now - progress->shown < pause) return;
    progress->shown = now;
    fprintf(stderr, "disagmoe: %s: %d of %d (%d %%) after %s, about %s left\n", progress->what, done,
            progress->total, (int)(100.0 * done / progress->total), duration_text(elapsed, gone),
            duration_text(elapsed * (progress->total - done) / done, left));
}

static void show_bar(struct progress *progress, int done, double now) {
    static const char full[] = "##############################";
    int width = (int)sizeof full - 1, filled = (int)((double)width * done / progress->total);
    if (now - progress->shown < REDRAW_SECONDS) return;
    progress->shown = now;
    progress->drawn = true;
    fprintf(stderr, "\r\033[K%s [%.*s%*s] %d/%d", progress->what, filled, full, width - filled, "", done,
            progress->total);
    fflush(stderr);
}

/* At the end there is nothing to say: what follows is the result. */
void progress_show(struct progress *progress, int done) {
    if (done >= progress->total)
        progress_clear(progress);
    else if (done > 0)
        (progress->terminal ? show_bar : show_line)(progress, done, seconds_now());
}

void progress_clear(struct progress *progress) {
    if (progress->drawn) fputs("\r\033[K", stderr);
    if (progress->drawn) fflush(stderr);
    progress->drawn = false;
}
