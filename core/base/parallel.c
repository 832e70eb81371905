/*
Parallel loop, progress line, clock.

The loop hands out one index at a time, since the points of a sweep differ in length. The calling thread works
too; where the system gives fewer threads than asked for, the loop goes on with those it got.
*/
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/base.h"

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

void progress(const char *what, int done, int total) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static double last;
    if (!isatty(STDERR_FILENO)) return;
    pthread_mutex_lock(&mutex);
    double now = seconds_now();
    if (done >= total) {
        fprintf(stderr, "\r\033[K"); /* what follows is the result; the line has done its work */
        fflush(stderr);
    } else if (now - last >= 0.1) {
        last = now;
        int filled = (int)(30.0 * done / total);
        fprintf(stderr, "\r\033[K%s [%.*s%*s] %d/%d", what, filled, "##############################",
                30 - filled, "", done, total);
        fflush(stderr);
    }
    pthread_mutex_unlock(&mutex);
}
