/*
The judge, who only counts seconds, and the thread that carries the signs.

Judges are the first two ranks and the last, which may be on another machine; one speaks when all before it
are silent. Signs are small messages in a communicator of their own. A judge that is stopped does not take
them: the next one to it is sent only when the last one has gone.
*/
#include "cli/watch.h"
#include "cli/launch.h"

#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- a judge ----------------------------------------------------------------------------------------- */

struct watched {
    struct sign last;
    double unheard, quiet; /* seconds since the last sign; since the last one that was another */
    bool named;
};

struct judge {
    int ranks;
    double warning, end;
    struct watched *list;
    bool still; /* all wait, and it has been said, of rank `stood` */
    int stood;
};

struct judge *judge_new(int ranks, double warning, double end) {
    struct judge *judge = must_alloc(sizeof *judge);
    *judge = (struct judge){.ranks = ranks, .warning = warning, .end = end};
    judge->list = must_alloc((size_t)ranks * sizeof *judge->list);
    for (int rank = 0; rank < ranks; rank++) judge->list[rank].last.step = -1;
    return judge;
}

void judge_free(struct judge *judge) {
    if (!judge) return;
    free(judge->list);
    free(judge);
}

void judge_pass(struct judge *judge, double seconds) {
    for (int rank = 0; rank < judge->ranks; rank++) {
        judge->list[rank].unheard += seconds;
        judge->list[rank].quiet += seconds;
    }
}

void judge_hear(struct judge *judge, int rank, const struct sign *sign) {
    struct watched *it = &judge->list[rank];
    if (sign->life != it->last.life || sign->step != it->last.step) it->quiet = 0;
    it->unheard = 0;
    it->last = *sign;
}

bool judge_misses(const struct judge *judge, int rank) {
    return !judge->list[rank].last.ended && judge->list[rank].unheard >= judge->warning;
}

bool judge_all_ended(const struct judge *judge) {
    bool all = true;
    for (int rank = 0; rank < judge->ranks; rank++) all &= judge->list[rank].last.ended;
    return all;
}

/* Seconds of silence: who waits for others may be quiet, but must be heard. */
static double silence(const struct watched *it) {
    if (it->last.ended) return 0;
    return it->last.waits ? it->unheard : it->quiet;
}

/* Seconds in which all ranks have waited, each for another; 0 where one works, or is not heard and may be
   what the others wait for. */
static double standstill(const struct judge *judge) {
    double shortest = INFINITY;
    for (int rank = 0; rank < judge->ranks; rank++) {
        const struct watched *it = &judge->list[rank];
        if (it->last.ended) continue;
        if (!it->last.waits || it->unheard >= judge->warning / 2) return 0;
        if (it->quiet < shortest) shortest = it->quiet;
    }
    return isfinite(shortest) ? shortest : 0;
}

static void add_step(struct text *says, int64_t step) {
    if (step < 0)
        text_add(says, " before the first step");
    else
        text_add(says, " in step %lld", (long long)step);
}

/* Of the others that wait, the one that has waited longest. */
static void add_waiting(struct text *says, const struct judge *judge, int silent) {
    int longest = -1;
    for (int rank = 0; rank < judge->ranks; rank++) {
        const struct watched *it = &judge->list[rank];
        if (rank == silent || !it->last.waits || it->last.ended || it->unheard >= judge->warning) continue;
        if (longest < 0 || it->quiet > judge->list[longest].quiet) longest = rank;
    }
    if (longest >= 0) text_add(says, "; rank %d is %s", longest, judge->list[longest].last.doing);
}

static void add_silent(struct text *says, const struct judge *judge, int rank, double seconds, bool ends) {
    const struct watched *it = &judge->list[rank];
    text_add(says, "%srank %d: silent for %.3g s", ends ? "disagmoe: train: " : LAUNCH_NOTE, rank, seconds);
    add_step(says, it->last.step);
    if (*it->last.doing)
        text_add(says, ", %s%s", it->unheard >= judge->warning ? "last seen " : "", it->last.doing);
    add_waiting(says, judge, rank);
    if (ends)
        text_add(says, ": all ranks end (--timeout)\n");
    else if (judge->end > 0)
        text_add(says, "; all ranks end after %.3g s (--timeout)\n", judge->end);
    else
        text_add(says, "\n");
}

static double quiet_of(const struct watched *it) {
    return it->last.ended ? 0 : it->quiet;
}

static int most(const struct judge *judge, double (*seconds)(const struct watched *it)) {
    int found = 0;
    for (int rank = 1; rank < judge->ranks; rank++)
        if (seconds(&judge->list[rank]) > seconds(&judge->list[found])) found = rank;
    return found;
}

/* Whether the run must end; then a line says for whom. */
static bool must_end(const struct judge *judge, struct text *says) {
    if (judge->end <= 0) return false;
    int silent = most(judge, silence), still = most(judge, quiet_of);
    double seconds = silence(&judge->list[silent]);
    if (seconds >= judge->end)
        add_silent(says, judge, silent, seconds, true);
    else if (standstill(judge) >= judge->end)
        add_silent(says, judge, still, judge->list[still].quiet, true);
    else
        return false;
    return true;
}

/* A line when it begins, another when it is over. */
static void name(struct judge *judge, int rank, double seconds, bool *named, struct text *says) {
    bool silent = seconds >= judge->warning;
    if (silent && !*named) add_silent(says, judge, rank, seconds, false);
    if (!silent && *named) text_add(says, LAUNCH_NOTE "rank %d goes on\n", rank);
    *named = silent;
}

bool judge_say(struct judge *judge, struct text *says) {
    if (must_end(judge, says)) return true;
    for (int rank = 0; rank < judge->ranks; rank++)
        name(judge, rank, silence(&judge->list[rank]), &judge->list[rank].named, says);
    if (!judge->still) judge->stood = most(judge, quiet_of);
    name(judge, judge->stood, standstill(judge), &judge->still, says);
    return false;
}

double watch_warning(double timeout) {
    return timeout > 0 && timeout < 600 ? timeout / 10 : 60;
}

/* ---- the thread -------------------------------------------------------------------------------------- */

enum { MOST_JUDGES = 3 };
static const double LONGEST_PAUSE = 5; /* seconds between two signs */

struct watch {
    struct pulse *pulse;
    MPI_Comm comm;
    int rank, ranks, judges[MOST_JUDGES], judge_count;
    double pause;
    struct judge *judge;           /* NULL: this rank is none */
    struct sign sent[MOST_JUDGES]; /* under way */
    MPI_Request requests[MOST_JUDGES];
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool stopped;
};

static void find_judges(struct watch *watch) {
    const int candidates[MOST_JUDGES] = {0, 1, watch->ranks - 1};
    for (int i = 0; i < MOST_JUDGES; i++) {
        bool known = candidates[i] >= watch->ranks;
        for (int k = 0; k < watch->judge_count; k++) known |= watch->judges[k] == candidates[i];
        if (!known) watch->judges[watch->judge_count++] = candidates[i];
    }
}

static struct sign own_sign(const struct watch *watch, bool ended) {
    struct pulse_sample sample = pulse_read(watch->pulse);
    struct sign sign = {
        .step = launch_current_step(), .life = sample.life, .waits = sample.waits, .ended = ended};
    memcpy(sign.doing, sample.text, sizeof sign.doing);
    return sign;
}

/* True when nothing is under way any more. */
static bool give_signs(struct watch *watch, const struct sign *sign) {
    bool all = true;
    for (int i = 0; i < watch->judge_count; i++) {
        int done;
        MPI_Test(&watch->requests[i], &done, MPI_STATUS_IGNORE);
        all &= done;
        if (!done || !sign) continue;
        if (watch->judges[i] == watch->rank) {
            judge_hear(watch->judge, watch->rank, sign);
            continue;
        }
        watch->sent[i] = *sign;
        MPI_Isend(&watch->sent[i], (int)sizeof *sign, MPI_BYTE, watch->judges[i], 0, watch->comm,
                  &watch->requests[i]);
        all = false;
    }
    return all;
}

static void take_signs(struct watch *watch) {
    for (int found = 1; found;) {
        MPI_Status status;
        MPI_Message message;
        struct sign sign;
        MPI_Improbe(MPI_ANY_SOURCE, 0, watch->comm, &found, &message, &status);
        if (!found) break;
        MPI_Mrecv(&sign, (int)sizeof sign, MPI_BYTE, &message, &status);
        judge_hear(watch->judge, status.MPI_SOURCE, &sign);
    }
}

/* Whether the judges before this one are silent. */
static bool speaks(const struct watch *watch) {
    for (int i = 0; i < watch->judge_count && watch->judges[i] != watch->rank; i++)
        if (!judge_misses(watch->judge, watch->judges[i])) return false;
    return true;
}

static void judge_now(struct watch *watch) {
    struct text says = {0};
    take_signs(watch);
    bool over = judge_say(watch->judge, &says);
    if (says.text && speaks(watch)) {
        fputs(says.text, stderr);
        fflush(stderr);
        if (over) MPI_Abort(MPI_COMM_WORLD, 1);
    }
    free(says.text);
}

/* True when the run is over. */
static bool pause_a_while(struct watch *watch) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    double whole = floor(watch->pause), rest = 1e9 * (watch->pause - whole) + (double)until.tv_nsec;
    until.tv_sec += (time_t)whole + (rest >= 1e9);
    until.tv_nsec = (long)(rest >= 1e9 ? rest - 1e9 : rest);
    pthread_mutex_lock(&watch->mutex);
    while (!watch->stopped && pthread_cond_timedwait(&watch->changed, &watch->mutex, &until) == 0) continue;
    bool stopped = watch->stopped;
    pthread_mutex_unlock(&watch->mutex);
    return stopped;
}

/* Seconds of this watch's own life since *before: while this process was stopped, the others may have been.
 */
static void pass_time(struct watch *watch, double *before) {
    double now = seconds_now();
    if (watch->judge) judge_pass(watch->judge, fmin(now - *before, 2 * watch->pause));
    *before = now;
}

/* After the run: says that this rank has ended, and a judge hears it of all. */
static void take_leave(struct watch *watch, double before) {
    const struct timespec nap = {.tv_nsec = 1000 * 1000};
    struct sign last = own_sign(watch, true);
    for (bool said = false, sent = false; !sent || (watch->judge && !judge_all_ended(watch->judge));) {
        pass_time(watch, &before);
        sent = give_signs(watch, NULL);
        if (sent && !said) {
            sent = give_signs(watch, &last);
            said = true;
        }
        if (watch->judge) judge_now(watch);
        nanosleep(&nap, NULL);
    }
}

static void *keep_watch(void *argument) {
    struct watch *watch = argument;
    double before = seconds_now();
    while (!pause_a_while(watch)) {
        struct sign sign = own_sign(watch, false);
        pass_time(watch, &before);
        give_signs(watch, &sign);
        if (watch->judge) judge_now(watch);
    }
    take_leave(watch, before);
    return NULL;
}

/* ---- a rank ------------------------------------------------------------------------------------------ */

static void free_watch(struct watch *watch) {
    pthread_mutex_destroy(&watch->mutex);
    pthread_cond_destroy(&watch->changed);
    judge_free(watch->judge);
    MPI_Comm_free(&watch->comm);
    free(watch);
}

struct watch *watch_start(struct pulse *pulse, double timeout) {
    int provided;
    MPI_Query_thread(&provided);
    if (provided < MPI_THREAD_MULTIPLE) return NULL;
    struct watch *watch = must_alloc(sizeof *watch);
    watch->pulse = pulse;
    MPI_Comm_dup(MPI_COMM_WORLD, &watch->comm);
    MPI_Comm_rank(watch->comm, &watch->rank);
    MPI_Comm_size(watch->comm, &watch->ranks);
    watch->pause = fmin(watch_warning(timeout) / 8, LONGEST_PAUSE);
    find_judges(watch);
    for (int i = 0; i < watch->judge_count; i++) {
        watch->requests[i] = MPI_REQUEST_NULL;
        if (watch->judges[i] == watch->rank)
            watch->judge = judge_new(watch->ranks, watch_warning(timeout), timeout);
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&watch->mutex, NULL);
    if (pthread_create(&watch->thread, NULL, keep_watch, watch) == 0) return watch;
    fprintf(stderr, "disagmoe: train: rank %d: a thread cannot be started\n", watch->rank);
    MPI_Abort(MPI_COMM_WORLD, 1);
    return NULL;
}

void watch_stop(struct watch *watch) {
    if (!watch) return;
    pthread_mutex_lock(&watch->mutex);
    watch->stopped = true;
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
    pthread_join(watch->thread, NULL);
    free_watch(watch);
}
