/*
Judges: who is silent and who only waits, what is said of it and when a run ends. Time is what the test says.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cli/watch.h"

#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, PAUSE = 5 };

/* What each rank does in a trial, and what has been said of it. */
struct trial {
    struct judge *judge;
    struct sign signs[RANKS];
    bool mute[RANKS], works[RANKS]; /* works: its life goes on */
    struct text says;
    bool over;
    double now;
};

static struct trial trial_new(double warning, double end) {
    struct trial trial = {.judge = judge_new(RANKS, warning, end)};
    for (int rank = 0; rank < RANKS; rank++) {
        trial.works[rank] = true;
        trial.signs[rank].step = 7;
        snprintf(trial.signs[rank].doing, PULSE_TEXT, "receiving from %d", rank);
    }
    return trial;
}

static void trial_free(struct trial *trial) {
    judge_free(trial->judge);
    free(trial->says.text);
}

/* Signs and judgement every PAUSE seconds, until something is said or the time is over. */
static void pass(struct trial *trial, double seconds) {
    double until = trial->now + seconds;
    trial->says.length = 0;
    while (trial->now < until && !trial->says.length) {
        trial->now += PAUSE;
        judge_pass(trial->judge, PAUSE);
        for (int rank = 0; rank < RANKS; rank++) {
            trial->signs[rank].life += trial->works[rank];
            if (!trial->mute[rank]) judge_hear(trial->judge, rank, &trial->signs[rank]);
        }
        trial->over = judge_say(trial->judge, &trial->says);
    }
}

static void assert_says(const struct trial *trial, const char *line) {
    const char *said = trial->says.length ? trial->says.text : "";
    if (strcmp(said, line) != 0) fail_msg("at %g s: said '%s', expected '%s'", trial->now, said, line);
}

static void wait_all_but(struct trial *trial, int rank) {
    for (int other = 0; other < RANKS; other++) {
        if (other == rank) continue;
        trial->signs[other].waits = 1;
        trial->works[other] = false;
    }
}

/* Hours of work, and of waiting for one that works, are no silence. */
static void long_work_is_no_silence(void **state) {
    (void)state;
    struct trial trial = trial_new(60, 600);
    pass(&trial, 7200);
    assert_says(&trial, "");
    wait_all_but(&trial, 2);
    pass(&trial, 7200);
    assert_says(&trial, "");
    trial_free(&trial);
}

static void a_mute_rank_is_named(void **state) {
    (void)state;
    struct trial trial = trial_new(60, 600);
    pass(&trial, 100);
    trial.mute[2] = true;
    wait_all_but(&trial, 2);
    pass(&trial, 1000);
    assert_true(trial.now == 160 && !trial.over);
    assert_says(
        &trial,
        "disagmoe: train: note: rank 2: silent for 60 s in step 7, last seen receiving from 2; rank 0 is "
        "receiving from 0; all ranks end after 600 s (--timeout)\n");
    assert_true(judge_misses(trial.judge, 2) && !judge_misses(trial.judge, 1));
    trial.mute[2] = false;
    pass(&trial, 1000);
    assert_says(&trial, "disagmoe: train: note: rank 2 goes on\n");
    assert_false(judge_misses(trial.judge, 2));
    pass(&trial, 1000);
    assert_says(&trial, "");
    trial.mute[2] = true;
    double from = trial.now;
    pass(&trial, 1000);
    assert_true(trial.now == from + 60);
    pass(&trial, 1000);
    assert_true(trial.now == from + 600 && trial.over);
    assert_says(&trial,
                "disagmoe: train: rank 2: silent for 600 s in step 7, last seen receiving from 2; rank 0 is "
                "receiving from 0: all ranks end (--timeout)\n");
    trial_free(&trial);
}

/* It waited, too, when it was last heard of, as all others do: it alone is named, not they. */
static void mute_while_waiting(void **state) {
    (void)state;
    struct trial trial = trial_new(60, 600);
    wait_all_but(&trial, -1);
    trial.signs[1].step = -1;
    pass(&trial, 20); /* the others have waited longer than it is mute */
    trial.mute[1] = true;
    pass(&trial, 1000);
    assert_true(trial.now == 80);
    assert_says(
        &trial,
        "disagmoe: train: note: rank 1: silent for 60 s before the first step, last seen receiving from "
        "1; rank 0 is receiving from 0; all ranks end after 600 s (--timeout)\n");
    pass(&trial, 500);
    assert_says(&trial, "");
    trial_free(&trial);
}

/* At work, and not getting on: a disk that does not answer. */
static void stuck_at_work(void **state) {
    (void)state;
    struct trial trial = trial_new(1, 0);
    wait_all_but(&trial, 3);
    trial.works[3] = false;
    snprintf(trial.signs[3].doing, PULSE_TEXT, "writing a checkpoint");
    pass(&trial, 10);
    assert_says(&trial,
                "disagmoe: train: note: rank 3: silent for 5 s in step 7, writing a checkpoint; rank 0 is "
                "receiving from 0\n");
    for (int i = 0; i < 100; i++) pass(&trial, 1000); /* 0: never */
    assert_says(&trial, "");
    assert_false(trial.over);
    trial_free(&trial);
}

/* Each waits for another: said once, of the one that began first, and ended. */
static void standstill(void **state) {
    (void)state;
    struct trial trial = trial_new(60, 600);
    trial.works[2] = false;
    trial.signs[2].waits = 1;
    pass(&trial, 30);
    wait_all_but(&trial, -1);
    pass(&trial, 1000);
    assert_true(trial.now == 90); /* a minute after the last of them did something */
    assert_says(
        &trial,
        "disagmoe: train: note: rank 2: silent for 60 s in step 7, receiving from 2; rank 0 is receiving "
        "from 0; all ranks end after 600 s (--timeout)\n");
    pass(&trial, 1000);
    assert_true(trial.now == 630 && trial.over);
    trial_free(&trial);
}

/* Ranks that have ended as they should are silent for good; a new step is a sign of life. */
static void ended_ranks(void **state) {
    (void)state;
    struct trial trial = trial_new(60, 600);
    for (int rank = 1; rank < RANKS; rank++) trial.signs[rank].ended = 1;
    trial.works[0] = false;
    for (int i = 0; i < 50; i++) {
        trial.signs[0].step++;
        pass(&trial, 30);
        assert_says(&trial, "");
    }
    assert_false(judge_all_ended(trial.judge));
    trial.signs[0].ended = 1;
    for (int rank = 0; rank < RANKS; rank++) {
        trial.mute[rank] = rank > 0;
        assert_false(judge_misses(trial.judge, rank));
    }
    pass(&trial, 5000);
    assert_says(&trial, "");
    assert_true(judge_all_ended(trial.judge));
    trial_free(&trial);
}

static void warnings(void **state) {
    (void)state;
    assert_true(watch_warning(600) == 60 && watch_warning(0) == 60 && watch_warning(86400) == 60);
    assert_true(watch_warning(30) == 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(long_work_is_no_silence),
        cmocka_unit_test(a_mute_rank_is_named),
        cmocka_unit_test(mute_while_waiting),
        cmocka_unit_test(stuck_at_work),
        cmocka_unit_test(standstill),
        cmocka_unit_test(ended_ranks),
        cmocka_unit_test(warnings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
