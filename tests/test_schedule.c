/*
Tests of core/schedule: the builder, the list-scheduler on cases small enough to compute by hand, the
validator on schedules that are wrong in one place, what is read off and what is shown; then all of it on
random schedules.

DISAGMOE_SAMPLE=N divides the number of random schedules, for slow runs (valgrind, sanitizers).
*/
#include "schedule/schedule.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/cases.h"

#define CASES 2000
#define SEED 20240607

/* ---- help -------------------------------------------------------------------------------------------- */

static bool says(const struct errors *errors, const char *part) {
    for (int i = 0; i < errors->count; i++)
        if (strstr(errors->messages[i], part) != NULL) return true;
    return false;
}

/* The validator rejects it, and some message has `part`. */
static void assert_rejected(const struct schedule *schedule, const char *part) {
    struct errors errors = {0};
    assert_false(schedule_validate(schedule, &errors));
    if (!says(&errors, part)) {
        errors_print(&errors, stderr);
        fail_msg("no message says \"%s\"", part);
    }
    errors_free(&errors);
}

static void assert_accepted(const struct schedule *schedule) {
    struct errors errors = {0};
    bool valid = schedule_validate(schedule, &errors);
    errors_print(&errors, stderr);
    assert_true(valid);
    assert_int_equal(errors.count, 0);
    errors_free(&errors);
}

static void assert_time(const struct timeline *timeline, int op, double start, double end) {
    assert_true(timeline->start[op] == start);
    assert_true(timeline->end[op] == end);
}

/* Orders were changed by hand: the sequence found for the old ones no longer counts. */
static void forget_sequence(struct schedule *schedule) {
    free(schedule->sequence);
    schedule->sequence = NULL;
}

static void swap_ints(int *a, int *b) {
    int old = *a;
    *a = *b;
    *b = old;
}

/* One layer, `micro_batches` micro-batches through A0 and F0 and back: attention 1 s, dispatch and combine 2
   s, FFN 3 s. What attention keeps is freed by its backward. */
struct small {
    struct schedule *schedule;
    struct timeline timeline;
    int attention[4], dispatch[4], ffn[4], ffn_back[4], combine[4], attention_back[4], kept[4];
};

static struct small small_new(int micro_batches) {
    struct small small = {.schedule = schedule_new(2, 1, micro_batches)};
    struct schedule *s = small.schedule;
    schedule_group(s, 0, 8, 100, "A%d", 0);
    schedule_group(s, 1, 8, 50, "F%d", 0);
    for (int m = 0; m < micro_batches; m++) {
        small.attention[m] = schedule_compute(s, KIND_ATTENTION, PASS_FORWARD, 0, m, 0, 1);
        small.kept[m] = schedule_keep(s, 0, small.attention[m], 10);
        small.dispatch[m] = schedule_transfer(s, KIND_DISPATCH, PASS_FORWARD, 0, m, 0, 1, 2, 7);
        schedule_after(s, small.attention[m]);
        small.ffn[m] = schedule_compute(s, KIND_FFN, PASS_FORWARD, 0, m, 1, 3);
        schedule_after(s, small.dispatch[m]);
    }
    for (int m = 0; m < micro_batches; m++) {
        small.ffn_back[m] = schedule_compute(s, KIND_FFN, PASS_BACKWARD, 0, m, 1, 3);
        schedule_after(s, small.ffn[m]);
        small.combine[m] = schedule_transfer(s, KIND_COMBINE, PASS_BACKWARD, 0, m, 1, 0, 2, 7);
        schedule_after(s, small.ffn_back[m]);
        small.attention_back[m] = schedule_compute(s, KIND_ATTENTION, PASS_BACKWARD, 0, m, 0, 1);
        schedule_after(s, small.combine[m]);
        schedule_reads(s, small.kept[m], small.attention_back[m]);
        schedule_release(s, small.kept[m], small.attention_back[m]);
    }
    return small;
}

static struct small small_arranged(int micro_batches) {
    struct small small = small_new(micro_batches);
    assert_true(schedule_arrange(small.schedule, &small.timeline));
    return small;
}

static void small_free(struct small *small) {
    timeline_free(&small->timeline);
    schedule_free(small->schedule);
}

/* ---- builder ----------------------------------------------------------------------------------------- */

static void test_builder(void **state) {
    (void)state;
    struct small small = small_new(2);
    struct schedule *s = small.schedule;
    assert_int_equal(s->op_count, 12);
    assert_int_equal(s->lane_count, 6);
    assert_int_equal(s->activation_count, 2);
    assert_string_equal(s->groups[1].name, "F0");
    const struct operation *dispatch = &s->ops[small.dispatch[1]];
    assert_int_equal(dispatch->lane_count, 2);
    assert_int_equal(dispatch->lanes[0], lane_of(0, RESOURCE_SEND));
    assert_int_equal(dispatch->lanes[1], lane_of(1, RESOURCE_RECV));
    assert_int_equal(dispatch->dep_count, 1);
    assert_int_equal(s->deps[dispatch->first_dep], small.attention[1]);
    schedule_after(s, -1); /* nothing to wait for */
    assert_int_equal(s->ops[s->op_count - 1].dep_count, 1);
    char label[128], cut[9];
    assert_string_equal(operation_label(s, small.dispatch[1], label, sizeof label),
                        "dispatch forward layer 0 micro-batch 1");
    assert_string_equal(operation_label(s, small.dispatch[1], cut, sizeof cut), "dispatch");
    s->half_duplex = true; /* all four lanes of two groups; both of one */
    for (int from = 0; from < 2; from++) {
        const struct operation *half =
            &s->ops[schedule_transfer(s, KIND_P2P, PASS_FORWARD, 0, 1, from, 1, 1, 1)];
        assert_int_equal(half->lane_count, from ? 2 : 4);
        assert_int_equal(half->lanes[0], lane_of(from, RESOURCE_SEND));
        assert_int_equal(half->lanes[half->lane_count - 1], lane_of(1, RESOURCE_RECV));
        if (from == 0) assert_int_equal(half->lanes[1], lane_of(0, RESOURCE_RECV));
        if (from == 0) assert_int_equal(half->lanes[2], lane_of(1, RESOURCE_SEND));
    }
    int optimizer = schedule_compute(s, KIND_OPTIMIZER, PASS_FORWARD, -1, -1, 0, 1);
    assert_string_equal(operation_label(s, optimizer, label, sizeof label), "optimizer");
    s->ops[small.ffn[0]].chunks = 2;
    assert_string_equal(operation_label(s, small.ffn[0], label, sizeof label),
                        "ffn forward layer 0 micro-batch 0 chunk 0 of 2");
    small_free(&small);
}

#ifndef NDEBUG
/* A generator that builds nonsense is a programming error: the process ends. */
static void assert_aborts(void (*build)(struct schedule *schedule)) {
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        build(schedule_new(2, 1, 1));
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void build_group_outside(struct schedule *schedule) {
    schedule_compute(schedule, KIND_FFN, PASS_FORWARD, 0, 0, 2, 1);
}

static void build_receiver_outside(struct schedule *schedule) {
    schedule_transfer(schedule, KIND_P2P, PASS_FORWARD, 0, 0, 0, -1, 1, 1);
}

static void build_negative_duration(struct schedule *schedule) {
    schedule_compute(schedule, KIND_FFN, PASS_FORWARD, 0, 0, 0, -1);
}

static void build_waits_for_itself(struct schedule *schedule) {
    schedule_after(schedule, schedule_compute(schedule, KIND_FFN, PASS_FORWARD, 0, 0, 0, 1));
}

static void build_waits_for_later(struct schedule *schedule) {
    schedule_compute(schedule, KIND_FFN, PASS_FORWARD, 0, 0, 0, 1);
    schedule_after(schedule, 5);
}

static void test_builder_errors(void **state) {
    (void)state;
    assert_aborts(build_group_outside);
    assert_aborts(build_receiver_outside);
    assert_aborts(build_negative_duration);
    assert_aborts(build_waits_for_itself);
    assert_aborts(build_waits_for_later);
}
#endif

/* ---- list-scheduler ---------------------------------------------------------------------------------- */

/* One micro-batch: one chain. */
static void test_arrange_chain(void **state) {
    (void)state;
    struct small small = small_arranged(1);
    assert_time(&small.timeline, small.attention[0], 0, 1);
    assert_time(&small.timeline, small.dispatch[0], 1, 3);
    assert_time(&small.timeline, small.ffn[0], 3, 6);
    assert_time(&small.timeline, small.ffn_back[0], 6, 9);
    assert_time(&small.timeline, small.combine[0], 9, 11);
    assert_time(&small.timeline, small.attention_back[0], 11, 12);
    assert_true(small.timeline.makespan == 12);
    assert_true(schedule_critical_path(small.schedule) == 12);
    assert_accepted(small.schedule);
    small_free(&small);
}

/* Two: at 6 F0 has the second forward (added before) and the first backward ready; by id the forward goes
 * first. */
static void test_arrange_pipeline(void **state) {
    (void)state;
    struct small small = small_arranged(2);
    assert_time(&small.timeline, small.attention[1], 1, 2);
    assert_time(&small.timeline, small.dispatch[1], 3, 5);
    assert_time(&small.timeline, small.ffn[1], 6, 9);
    assert_time(&small.timeline, small.ffn_back[0], 9, 12);
    assert_time(&small.timeline, small.combine[0], 12, 14);
    assert_time(&small.timeline, small.ffn_back[1], 12, 15);
    assert_time(&small.timeline, small.attention_back[1], 17, 18);
    assert_true(small.timeline.makespan == 18);
    double busy[6];
    schedule_busy(small.schedule, busy);
    assert_true(busy[lane_of(0, RESOURCE_COMPUTE)] == 4);
    assert_true(busy[lane_of(1, RESOURCE_COMPUTE)] == 12);
    assert_true(busy[lane_of(1, RESOURCE_SEND)] == 4);
    assert_true(busy[lane_of(0, RESOURCE_SEND)] == 4);
    small_free(&small);
}

/* The same with backward first. */
static void test_arrange_priority(void **state) {
    (void)state;
    struct small small = small_new(2);
    small.schedule->ops[small.ffn_back[0]].priority = -1;
    assert_true(schedule_arrange(small.schedule, &small.timeline));
    assert_time(&small.timeline, small.ffn_back[0], 6, 9);
    assert_time(&small.timeline, small.ffn[1], 9, 12);
    assert_accepted(small.schedule);
    small_free(&small);
}

/* A transfer needs both its lanes: two senders to one receiver take turns, and one sender's next transfer to
   a free receiver passes the one that waits. */
static void test_arrange_ports(void **state) {
    (void)state;
    struct schedule *s = schedule_new(4, 0, 0);
    struct timeline timeline = {0};
    int first = schedule_transfer(s, KIND_P2P, PASS_FORWARD, -1, -1, 0, 2, 4, 1);
    int blocked = schedule_transfer(s, KIND_P2P, PASS_FORWARD, -1, -1, 1, 2, 4, 1);
    int passes = schedule_transfer(s, KIND_P2P, PASS_FORWARD, -1, -1, 1, 3, 5, 1);
    int collective = schedule_transfer(s, KIND_GRAD_SYNC, PASS_BACKWARD, -1, -1, 2, 2, 1, 1);
    assert_true(schedule_arrange(s, &timeline));
    assert_time(&timeline, first, 0, 4);
    assert_time(&timeline, passes, 0, 5);
    assert_true(timeline.start[blocked] >= 5);
    assert_true(timeline.start[collective] >= 4);
    assert_true(timeline.makespan == 9 || timeline.makespan == 10);
    timeline_free(&timeline);
    schedule_free(s);
}

/* A given order holds even where the first operation is not ready and another is. */
static void test_arrange_given_order(void **state) {
    (void)state;
    struct small small = small_new(2);
    int order[] = {small.attention[1], small.attention[0], small.attention_back[1], small.attention_back[0]};
    schedule_fix_order(small.schedule, lane_of(0, RESOURCE_COMPUTE), order, 4);
    assert_true(schedule_arrange(small.schedule, &small.timeline));
    assert_time(&small.timeline, small.attention[1], 0, 1);
    assert_time(&small.timeline, small.ffn[1], 3, 6);
    assert_time(&small.timeline, small.ffn[0], 6, 9); /* ready at 5, before any backward is */
    assert_true(small.timeline.start[small.attention_back[0]] >= small.timeline.end[small.attention_back[1]]);
    assert_memory_equal(small.schedule->lanes[lane_of(0, RESOURCE_COMPUTE)].ops, order, sizeof order);
    assert_accepted(small.schedule);
    small_free(&small);
}

/* Both sides of a link have an order, and they disagree: nobody can start. */
static void test_arrange_dead_lock(void **state) {
    (void)state;
    struct small small = small_new(2);
    int send[] = {small.dispatch[0], small.dispatch[1]}, receive[] = {small.dispatch[1], small.dispatch[0]};
    schedule_fix_order(small.schedule, lane_of(0, RESOURCE_SEND), send, 2);
    schedule_fix_order(small.schedule, lane_of(1, RESOURCE_RECV), receive, 2);
    assert_false(schedule_arrange(small.schedule, &small.timeline));
    assert_rejected(small.schedule,
                    "dispatch forward layer 0 micro-batch 0 (lanes A0.send, F0.recv) → next on A0.send: "
                    "dispatch forward layer 0 micro-batch 1 (lanes A0.send, F0.recv) → next on F0.recv: "
                    "dispatch forward layer 0 micro-batch 0");
    small_free(&small);
}

/* An order may also disagree with a dependency. */
static void test_order_against_dependency(void **state) {
    (void)state;
    struct small small = small_new(1);
    int order[] = {small.ffn_back[0], small.ffn[0]};
    schedule_fix_order(small.schedule, lane_of(1, RESOURCE_COMPUTE), order, 2);
    assert_false(schedule_arrange(small.schedule, &small.timeline));
    assert_rejected(small.schedule, "→ needed by ffn backward layer 0 micro-batch 0");
    small_free(&small);
}

static void test_arrange_nothing(void **state) {
    (void)state;
    struct schedule *s = schedule_new(1, 0, 0);
    struct timeline timeline = {0};
    double peak;
    schedule_group(s, 0, 1, 5, "A0");
    assert_true(schedule_arrange(s, &timeline));
    assert_true(timeline.makespan == 0);
    assert_true(schedule_replay(s, &timeline));
    assert_accepted(s);
    schedule_memory_peaks(s, &timeline, &peak);
    assert_true(peak == 5);
    timeline_free(&timeline);
    schedule_free(s);
}

static void assert_json_reads_back(const struct schedule *schedule, const struct timeline *timeline);

/* At 0 the sender's most urgent transfer is to a receiver that is busy until 4. A greedy lane sends what it
   can meanwhile, and the urgent one waits for it; a patient lane keeps itself free. */
static void patient_case(bool patient, double urgent_start, double other_start) {
    struct schedule *s = schedule_new(4, 0, 0);
    struct timeline timeline = {0};
    s->patient = patient;
    schedule_transfer(s, KIND_P2P, PASS_FORWARD, -1, -1, 0, 2, 4, 1);
    schedule_priority(s, 1);
    int urgent = schedule_transfer(s, KIND_P2P, PASS_FORWARD, -1, -1, 1, 2, 4, 1);
    schedule_priority(s, 2);
    int other = schedule_transfer(s, KIND_P2P, PASS_FORWARD, -1, -1, 1, 3, 10, 1);
    schedule_priority(s, 3);
    assert_true(schedule_arrange(s, &timeline));
    assert_time(&timeline, urgent, urgent_start, urgent_start + 4);
    assert_time(&timeline, other, other_start, other_start + 10);
    timeline_free(&timeline);
    schedule_free(s);
}

static void test_arrange_patient(void **state) {
    (void)state;
    patient_case(false, 10, 0);
    patient_case(true, 4, 8);
}

/* Two computations of A0, of which the second has something to follow on F0. In the order of their numbers
   that takes 7 s; justified, 4 s. */
static void test_arrange_justified(void **state) {
    (void)state;
    for (int justified = 0; justified < 2; justified++) {
        struct schedule *s = schedule_new(2, 0, 0);
        struct timeline timeline = {0};
        s->justified = justified;
        schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, -1, 0, 3);
        int first = schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, -1, 0, 1);
        int then = schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, -1, 1, 3);
        schedule_after(s, first);
        assert_true(schedule_arrange(s, &timeline));
        assert_time(&timeline, first, justified ? 0 : 3, justified ? 1 : 4);
        assert_time(&timeline, then, justified ? 1 : 4, justified ? 4 : 7);
        timeline_free(&timeline);
        /* Given up at once when that is no better. */
        assert_false(schedule_arrange_before(s, justified ? 4 : 7, &timeline));
        assert_true(schedule_arrange_before(s, justified ? 4.5 : 7.5, &timeline));
        timeline_free(&timeline);
        schedule_free(s);
    }
}

/* A message that takes no time neither waits for its ports nor holds them up. */
static void test_instant(void **state) {
    (void)state;
    for (int drop = 0; drop < 2; drop++) {
        struct schedule *s = schedule_new(2, 0, 0);
        struct timeline timeline = {0};
        double busy[6];
        schedule_group(s, 0, 1, 0, "A0");
        schedule_group(s, 1, 1, 0, "F0");
        int work = schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, -1, 0, 1);
        int zero_work = schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, -1, 1, 0);
        int sent = schedule_transfer(s, KIND_P2P, PASS_FORWARD, -1, -1, 0, 1, 5, 1);
        int instant = schedule_transfer(s, KIND_DISPATCH, PASS_FORWARD, -1, -1, 0, 1, 0, 7);
        schedule_after(s, work);
        int next = schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, -1, 1, 1);
        schedule_after(s, instant);
        if (drop) schedule_drop_instant(s);
        assert_int_equal(s->ops[instant].lane_count, drop ? 0 : 2);
        assert_int_equal(s->ops[sent].lane_count, 2);
        assert_int_equal(s->ops[zero_work].lane_count, 1); /* a computation keeps its place */
        assert_true(operation_is_transfer(&s->ops[instant]) && !operation_is_transfer(&s->ops[zero_work]));
        assert_true(schedule_arrange(s, &timeline));
        assert_accepted(s);
        assert_time(&timeline, instant, drop ? 1 : 5, drop ? 1 : 5);
        assert_time(&timeline, next, drop ? 1 : 5, drop ? 2 : 6);
        schedule_busy(s, busy);
        assert_true(busy[lane_of(0, RESOURCE_SEND)] == 5);
        assert_json_reads_back(s, &timeline);
        assert_true(schedule_replay(s, &timeline));
        assert_time(&timeline, next, drop ? 1 : 5, drop ? 2 : 6);
        timeline_free(&timeline);
        schedule_free(s);
    }
}

/* Exposed is where what is waited for is being sent; communication where a group's ports or the collectives
   in its computations are busy, each moment once. */
static void test_communication(void **state) {
    (void)state;
    struct schedule *s = schedule_new(2, 0, 0);
    struct timeline timeline = {0};
    schedule_group(s, 0, 1, 0, "A0");
    schedule_group(s, 1, 1, 0, "F0");
    int first = schedule_compute(s, KIND_ATTENTION, PASS_FORWARD, -1, -1, 0, 4); /* 0 to 4 */
    schedule_gather(s, 1);
    int out = schedule_transfer(s, KIND_DISPATCH, PASS_FORWARD, -1, -1, 0, 1, 3, 1); /* 4 to 7 */
    schedule_after(s, first);
    int in = schedule_transfer(s, KIND_COMBINE, PASS_FORWARD, -1, -1, 1, 0, 6, 1); /* 4 to 10 */
    schedule_after(s, first);
    int last = schedule_compute(s, KIND_FFN, PASS_FORWARD, -1, -1, 1, 1); /* 10 to 11 */
    schedule_after(s, out);
    schedule_after(s, in);
    schedule_after(s, first);
    int tail = schedule_compute(s, KIND_ATTENTION, PASS_FORWARD, -1, -1, 0, 2); /* 11 to 13 */
    schedule_after(s, last);
    schedule_gather(s, 0.5);
    assert_true(schedule_arrange(s, &timeline));
    assert_true(timeline.makespan == 13);
    assert_true(schedule_exposed(s, &timeline, last, 0, 10) == 6);
    assert_true(schedule_exposed(s, &timeline, last, 5, 10) == 5);
    assert_true(schedule_exposed(s, &timeline, tail, 10, 11) == 0); /* it waits for a computation */
    assert_true(schedule_communication(s, &timeline, 0) == 1 + 6 + 0.5);
    assert_true(schedule_communication(s, &timeline, 1) == 6);
    timeline_free(&timeline);
    schedule_free(s);
}

/* ---- validator --------------------------------------------------------------------------------------- */

static void test_swapped_transfers(void **state) {
    (void)state;
    struct small small = small_arranged(2);
    struct lane *lane = &small.schedule->lanes[lane_of(1, RESOURCE_RECV)];
    swap_ints(&lane->ops[0], &lane->ops[1]);
    forget_sequence(small.schedule);
    assert_false(schedule_replay(small.schedule, &small.timeline));
    assert_rejected(small.schedule, "dead-lock, 2 operations wait for each other");
    assert_rejected(small.schedule, "dispatch forward layer 0 micro-batch 0 (lanes A0.send, F0.recv) →");
    assert_rejected(small.schedule, "dispatch forward layer 0 micro-batch 1 (lanes A0.send, F0.recv) →");
    small_free(&small);
}

static void test_orders_hold_every_operation_once(void **state) {
    (void)state;
    struct small small = small_arranged(2);
    struct schedule *s = small.schedule;
    struct lane *lane = &s->lanes[lane_of(0, RESOURCE_SEND)];
    lane->count = 1;
    assert_rejected(
        s, "dispatch forward layer 0 micro-batch 1 (operation 4) is missing from the order of lane A0.send");
    lane->count = 2;
    lane->ops[1] = small.dispatch[0];
    assert_rejected(
        s, "dispatch forward layer 0 micro-batch 0 (operation 1) stands in the order of lane A0.send more");
    lane->ops[1] = small.ffn[0];
    assert_rejected(s, "which it does not hold");
    lane->ops[1] = 99;
    assert_rejected(s, "lane A0.send has operation 99 in its order");
    lane->ops[1] = small.dispatch[1];
    assert_accepted(s);
    small_free(&small);
}

static void test_coverage(void **state) {
    (void)state;
    struct small small = small_arranged(2);
    struct schedule *s = small.schedule;
    struct operation *ffn = &s->ops[small.ffn[1]], kept = *ffn;
    ffn->kind = KIND_EMBED;
    assert_rejected(s, "ffn forward layer 0 micro-batch 1 is missing");
    *ffn = kept;
    ffn->micro_batch = 0;
    assert_rejected(s, "ffn forward layer 0 micro-batch 0 (operation 5) is there more than once");
    assert_rejected(s, "ffn forward layer 0 micro-batch 1 is missing");
    *ffn = kept;
    ffn->chunks = 2;
    assert_rejected(s, "ffn forward layer 0 micro-batch 1: chunk 1 of 2 is missing");
    ffn->chunk = 2;
    assert_rejected(s, "is chunk 2 of 2");
    *ffn = kept;
    ffn->layer = 1;
    assert_rejected(s, "is of layer 1; layers are 0 to 0");
    *ffn = kept;
    ffn->micro_batch = -1;
    assert_rejected(s, "is of micro-batch -1; micro-batches are 0 to 1");
    *ffn = kept;
    ffn->duration = NAN;
    assert_rejected(s, "must be finite");
    *ffn = kept;
    s->ops[small.attention_back[0]].pass = PASS_WEIGHT;
    assert_rejected(s, "attention backward layer 0 micro-batch 0 is missing");
    small_free(&small);
}

/* A backward in two parts, a recomputation and two chunks are fine; a second weight gradient is not. */
static void test_coverage_split(void **state) {
    (void)state;
    struct schedule *s = schedule_new(1, 1, 1);
    struct timeline timeline = {0};
    enum pass passes[] = {PASS_FORWARD, PASS_RECOMPUTE, PASS_BACKWARD, PASS_WEIGHT};
    schedule_group(s, 0, 1, 0, "A0");
    for (size_t i = 0; i < COUNT(passes); i++) {
        schedule_compute(s, KIND_ATTENTION, passes[i], 0, 0, 0, 1);
        for (int chunk = 0; chunk < 2; chunk++) {
            int op = schedule_compute(s, KIND_FFN, passes[i], 0, 0, 0, 1);
            s->ops[op].chunk = (int16_t)chunk;
            s->ops[op].chunks = 2;
        }
    }
    assert_true(schedule_arrange(s, &timeline));
    assert_accepted(s);
    schedule_compute(s, KIND_ATTENTION, PASS_WEIGHT, 0, 0, 0, 1);
    assert_true(schedule_arrange(s, &timeline));
    assert_rejected(s, "attention weight layer 0 micro-batch 0 (operation 12) is there more than once");
    timeline_free(&timeline);
    schedule_free(s);
}

static void test_activation_lives(void **state) {
    (void)state;
    struct small small = small_arranged(2);
    struct schedule *s = small.schedule;
    schedule_reads(s, small.kept[0], small.ffn_back[1]); /* not ordered against A0's backward */
    assert_rejected(
        s, "ffn backward layer 0 micro-batch 1 uses activation 0 after it is freed: attention backward");
    s->reads[s->read_count - 1].operation = small.ffn_back[0];
    assert_accepted(s);
    s->reads[s->read_count - 1] = (struct read){small.kept[1], small.attention[0]};
    assert_rejected(s, "attention forward layer 0 micro-batch 0 uses activation 1 before it exists");
    s->reads[s->read_count - 1] = (struct read){small.kept[0], small.attention_back[1]};
    assert_rejected(s, "attention backward layer 0 micro-batch 1 uses activation 0 after it is freed");
    s->reads[s->read_count - 1] = (struct read){small.kept[0], small.attention[0]}; /* its producer */
    assert_accepted(s);
    s->reads[s->read_count - 1].activation = 7;
    assert_rejected(s, "is of activation 7");
    s->read_count--;
    schedule_release(s, small.kept[1], small.attention[0]);
    assert_rejected(s, "attention forward layer 0 micro-batch 0 frees activation 1");
    s->activations[small.kept[1]].freed_by = -1;
    assert_rejected(s, "is never freed");
    small_free(&small);
}

static void test_numbers_outside(void **state) {
    (void)state;
    struct small small = small_arranged(1);
    struct schedule *s = small.schedule;
    struct operation *op = &s->ops[small.dispatch[0]], kept = *op;
    op->lanes[1] = 6;
    assert_rejected(s, "holds lane 6; lanes are 0 to 5");
    op->lanes[1] = op->lanes[0];
    assert_rejected(s, "holds lane 1 twice");
    op->lane_count = 9;
    assert_rejected(s, "holds 9 lanes");
    *op = kept;
    s->deps[op->first_dep] = small.ffn[0];
    assert_rejected(s, "only operations added before");
    op->dep_count = 1 << 30;
    assert_rejected(s, "dependencies outside");
    *op = kept;
    op->kind = 200;
    assert_rejected(s, "has kind 200");
    small_free(&small);
}

/* All faults count, twenty are told. */
static void test_many_faults(void **state) {
    (void)state;
    struct schedule *s = schedule_new(1, 5, 10);
    struct timeline timeline = {0};
    struct errors errors = {0};
    schedule_group(s, 0, 1, 0, "A0");
    assert_true(schedule_arrange(s, &timeline));
    assert_false(schedule_validate(s, &errors)); /* 2 × 5 × 10 × 2 operations are missing */
    assert_int_equal(errors.count, 21);
    assert_non_null(strstr(errors.messages[20], "and 180 more"));
    errors_free(&errors);
    timeline_free(&timeline);
    schedule_free(s);
}

/* ---- memory ------------------------------------------------------------------------------------------ */

static void test_memory(void **state) {
    (void)state;
    struct small small = small_arranged(2);
    double peaks[2];
    schedule_memory_peaks(small.schedule, &small.timeline, peaks);
    assert_true(peaks[0] == 120);
    assert_true(peaks[1] == 50);
    struct memory_point *points;
    int count = schedule_memory_timeline(small.schedule, &small.timeline, 0, &points);
    const struct memory_point expected[] = {{0, 110}, {1, 120}, {15, 110}, {18, 100}};
    assert_int_equal(count, 4);
    for (int i = 0; i < count; i++)
        assert_true(points[i].time == expected[i].time && points[i].bytes == expected[i].bytes);
    free(points);
    small_free(&small);
}

/* What is freed at a time is there for what is allocated at that time; what lives no time needs no memory. */
static void test_memory_ties(void **state) {
    (void)state;
    struct schedule *s = schedule_new(1, 0, 0);
    struct timeline timeline = {0};
    double durations[] = {2, 0, 3}, peak;
    schedule_group(s, 0, 1, 0, "A0");
    for (int i = 0; i < 3; i++) {
        int op = schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, -1, 0, durations[i]);
        int kept = schedule_keep(s, 0, op, i == 1 ? 1000 : 10);
        schedule_release(s, kept, op);
    }
    assert_true(schedule_arrange(s, &timeline));
    assert_accepted(s);
    schedule_memory_peaks(s, &timeline, &peak);
    assert_true(peak == 10);
    struct memory_point *points;
    int count = schedule_memory_timeline(s, &timeline, 0, &points);
    for (int i = 0; i < count; i++) assert_true(points[i].bytes >= 0 && points[i].bytes <= 10);
    assert_true(points[count - 1].time == 5 && points[count - 1].bytes == 0);
    free(points);
    timeline_free(&timeline);
    schedule_free(s);
}

/* ---- showing ----------------------------------------------------------------------------------------- */

/* What `write` prints, from a memory stream. */
static char *drawn(const struct small *small, int columns) {
    char *text = NULL;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    schedule_draw(small->schedule, &small->timeline, columns, stream);
    fclose(stream);
    return text;
}

static int widest_line(const char *text) {
    int widest = 0, width = 0;
    for (; *text != '\0'; text++) {
        if (*text == '\n')
            width = 0;
        else if (((unsigned char)*text & 0xC0) != 0x80) /* not inside a character of several bytes */
            width++;
        if (width > widest) widest = width;
    }
    return widest;
}

static void test_draw(void **state) {
    (void)state;
    struct small small = small_arranged(2);
    char *text = drawn(&small, 80);
    assert_int_equal(widest_line(text), 80);
    assert_non_null(strstr(text, "A0 compute 0000111"));
    assert_non_null(strstr(text, "F0 send"));
    assert_non_null(strstr(text, "AAA"));
    assert_non_null(strstr(text, "BBB"));
    assert_non_null(strstr(text, "A-J backward"));
    assert_null(strstr(text, "recomputation"));
    assert_null(strstr(text, "\033")); /* no terminal, no colour */
    free(text);
    text = drawn(&small, 1);
    assert_true(widest_line(text) <= 60);
    free(text);
    small_free(&small);
}

/* What is left of the two lanes' rows, of two groups that take turns 200 times, the first for `share` of the
 * time. */
static void draw_turns(double share, char rows[2][80]) {
    struct schedule *s = schedule_new(2, 0, 0);
    struct timeline timeline = {0};
    schedule_group(s, 0, 1, 0, "A0");
    schedule_group(s, 1, 1, 0, "F0");
    for (int i = 0, last = -1; i < 400; i++) {
        int op = schedule_compute(s, KIND_FFN, PASS_FORWARD, 0, 3, i % 2, i % 2 ? 1 - share : share);
        if (last >= 0) schedule_after(s, last);
        last = op;
    }
    assert_true(schedule_arrange(s, &timeline));
    struct small turns = {.schedule = s, .timeline = timeline};
    char *text = drawn(&turns, 80), *line = text;
    for (int i = 0; i < 2; i++, line = strchr(line, '\n') + 1) {
        assert_true(strncmp(line, i ? "F0 compute " : "A0 compute ", 11) == 0);
        snprintf(rows[i], 80, "%.*s", (int)strcspn(line, "\n") - 16, line + 11);
    }
    assert_non_null(strstr(text, "idle"));
    bool marked = strchr(rows[0], ':') || strchr(rows[1], ':');
    assert_true(marked == (strstr(text, ": less than half busy") != NULL));
    free(text);
    timeline_free(&timeline);
    schedule_free(s);
}

/* Work in pieces smaller than a slice: more than half of the time is the work's own character, less a mark of
   its own, next to nothing is idle. */
static void test_draw_density(void **state) {
    (void)state;
    char rows[2][80];
    draw_turns(0.54, rows);
    assert_int_equal(strspn(rows[0], "3"), strlen(rows[0]));
    assert_int_equal(strspn(rows[1], ":"), strlen(rows[1]));
    draw_turns(0.9, rows);
    assert_int_equal(strspn(rows[1], ":"), strlen(rows[1]));
    draw_turns(0.97, rows);
    assert_int_equal(strspn(rows[0], "3"), strlen(rows[0]));
    assert_int_equal(strspn(rows[1], "."), strlen(rows[1]));
}

static double number_of(const cJSON *object, const char *key) {
    const cJSON *node = cJSON_GetObjectItemCaseSensitive(object, key);
    assert_true(cJSON_IsNumber(node));
    return node->valuedouble;
}

static const char *string_of(const cJSON *object, const char *key) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
    assert_non_null(text);
    return text;
}

static void assert_ints(const cJSON *object, const char *key, const int *values, int count) {
    const cJSON *array = cJSON_GetObjectItemCaseSensitive(object, key), *node;
    int i = 0;
    assert_int_equal(cJSON_GetArraySize(array), count);
    cJSON_ArrayForEach(node, array) assert_true(node->valuedouble == values[i++]);
}

static void assert_operation_read_back(const struct schedule *schedule, const struct timeline *timeline,
                                       int op, const cJSON *node) {
    const struct operation *it = &schedule->ops[op];
    assert_true(number_of(node, "id") == op);
    assert_true(number_of(node, "layer") == it->layer);
    assert_true(number_of(node, "micro_batch") == it->micro_batch);
    assert_true(number_of(node, "chunk") == it->chunk);
    assert_true(number_of(node, "chunks") == it->chunks);
    assert_true(number_of(node, "duration_s") == it->duration);
    assert_true(number_of(node, "start_s") == timeline->start[op]);
    assert_true(number_of(node, "end_s") == timeline->end[op]);
    assert_true(number_of(node, "bytes") == it->bytes);
    assert_ints(node, "lanes", it->lanes, it->lane_count);
    assert_ints(node, "deps", schedule->deps + it->first_dep, it->dep_count);
    assert_string_equal(string_of(node, "kind"), choice_word(schedule->arena, KIND_CHOICES, it->kind));
    assert_string_equal(string_of(node, "pass"), choice_word(schedule->arena, PASS_CHOICES, it->pass));
}

/* The JSON holds the whole schedule, to the last bit. */
static void assert_json_reads_back(const struct schedule *schedule, const struct timeline *timeline) {
    char *text = NULL;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    schedule_write_json(schedule, timeline, stream);
    fclose(stream);
    cJSON *root = cJSON_Parse(text), *node;
    assert_non_null(root);
    assert_int_equal(cJSON_GetArraySize(root), 3);
    assert_true(number_of(root, "makespan_s") == timeline->makespan);
    int lane = 0, op = 0;
    cJSON_ArrayForEach(node, cJSON_GetObjectItemCaseSensitive(root, "lanes")) {
        assert_true(number_of(node, "id") == lane);
        assert_string_equal(string_of(node, "group"), schedule->groups[lane / RESOURCE_COUNT].name);
        assert_string_equal(string_of(node, "resource"),
                            choice_word(schedule->arena, RESOURCE_CHOICES, lane % RESOURCE_COUNT));
        assert_ints(node, "ops", schedule->lanes[lane].ops, schedule->lanes[lane].count);
        lane++;
    }
    cJSON_ArrayForEach(node, cJSON_GetObjectItemCaseSensitive(root, "ops"))
        assert_operation_read_back(schedule, timeline, op++, node);
    assert_int_equal(lane, schedule->lane_count);
    assert_int_equal(op, schedule->op_count);
    cJSON_Delete(root);
    free(text);
}

static void test_json(void **state) {
    (void)state;
    struct small small = small_arranged(3);
    small.schedule->groups[0].name = "a \"quoted\" name\n";
    assert_json_reads_back(small.schedule, &small.timeline);
    small_free(&small);
}

/* The file's JSON; the file is removed. */
static cJSON *trace_of(const struct schedule *schedule, const struct timeline *timeline) {
    char file[64];
    struct errors errors = {0};
    snprintf(file, sizeof file, "/tmp/test_schedule.%d.json", (int)getpid());
    assert_true(schedule_write_trace(schedule, timeline, "a \"title\"", file, &errors));
    assert_int_equal(errors.count, 0);
    FILE *stream = fopen(file, "r");
    assert_non_null(stream);
    struct text text = {0};
    char line[1024];
    while (fgets(line, sizeof line, stream) != NULL) text_add(&text, "%s", line);
    fclose(stream);
    unlink(file);
    cJSON *root = cJSON_Parse(text.text);
    assert_non_null(root);
    free(text.text);
    return root;
}

/* The thread's name, or its process's (thread 0): what a viewer writes beside the track. NULL: no name. */
static const char *track_name(const cJSON *events, const char *what, int process, int thread) {
    const cJSON *event;
    cJSON_ArrayForEach(event, events) {
        if (strcmp(string_of(event, "ph"), "M") != 0 || strcmp(string_of(event, "name"), what) != 0) continue;
        if (number_of(event, "pid") != process) continue;
        if (thread > 0 && number_of(event, "tid") != thread) continue;
        return string_of(cJSON_GetObjectItemCaseSensitive(event, "args"), "name");
    }
    return NULL;
}

static void assert_slice(const struct schedule *schedule, const struct timeline *timeline,
                         const cJSON *events, const cJSON *event) {
    const cJSON *args = cJSON_GetObjectItemCaseSensitive(event, "args");
    int op = (int)number_of(args, "operation");
    const struct operation *it = &schedule->ops[op];
    assert_true(number_of(args, "layer") == it->layer && number_of(args, "micro_batch") == it->micro_batch);
    assert_true(number_of(args, "bytes") == it->bytes);
    assert_string_equal(string_of(args, "pass"), choice_word(schedule->arena, PASS_CHOICES, it->pass));
    double slack = 1e-3 + 1e-15 * timeline->end[op] * 1e6; /* µs */
    assert_true(fabs(number_of(event, "ts") - timeline->start[op] * 1e6) < slack);
    assert_true(fabs(number_of(event, "dur") - (timeline->end[op] - timeline->start[op]) * 1e6) < 2 * slack);
    int process = (int)number_of(event, "pid"), thread = (int)number_of(event, "tid");
    const char *group = track_name(events, "process_name", process, 0);
    const char *lane = track_name(events, "thread_name", process, thread);
    assert_non_null(group);
    assert_non_null(lane);
    bool found = false;
    for (int slot = 0; slot < it->lane_count; slot++) {
        const char *name = schedule->groups[it->lanes[slot] / RESOURCE_COUNT].name;
        const char *resource =
            choice_word(schedule->arena, RESOURCE_CHOICES, it->lanes[slot] % RESOURCE_COUNT);
        found |= strcmp(group, name) == 0 && strncmp(lane, name, strlen(name)) == 0 &&
                 strcmp(lane + strlen(name) + 1, resource) == 0;
    }
    assert_true(found);
}

static void assert_trace(const struct schedule *schedule, const struct timeline *timeline) {
    cJSON *root = trace_of(schedule, timeline);
    const cJSON *events = cJSON_GetObjectItemCaseSensitive(root, "traceEvents"), *event;
    int slices = 0, counters = 0, expected = 0;
    cJSON_ArrayForEach(event, events) {
        const char *phase = string_of(event, "ph");
        if (strcmp(phase, "X") == 0) {
            assert_slice(schedule, timeline, events, event);
            slices++;
        } else if (strcmp(phase, "C") == 0) {
            assert_non_null(track_name(events, "process_name", (int)number_of(event, "pid"), 0));
            counters++;
        } else
            assert_string_equal(phase, "M");
    }
    for (int op = 0; op < schedule->op_count; op++) expected += schedule->ops[op].lane_count;
    assert_int_equal(slices, expected);
    assert_true(counters >= schedule->group_count);
    cJSON_Delete(root);
}

static void test_trace(void **state) {
    (void)state;
    struct small small = small_arranged(3);
    assert_trace(small.schedule, &small.timeline);
    struct errors errors = {0};
    assert_false(
        schedule_write_trace(small.schedule, &small.timeline, NULL, "/nonexistent/a/trace.json", &errors));
    assert_int_equal(errors.count, 1);
    errors_free(&errors);
    /* years, and more nanoseconds than 64 bits count */
    for (int i = 0; i < 6; i++) {
        for (int op = 0; op < small.schedule->op_count; op++) {
            small.timeline.start[op] *= 1234;
            small.timeline.end[op] *= 1234;
        }
        assert_trace(small.schedule, &small.timeline);
    }
    small_free(&small);
}

/* ---- random schedules -------------------------------------------------------------------------------- */

#define MOST_OPS 288 /* what sample_new can make */

struct sample {
    struct schedule *schedule;
    struct timeline timeline;
    struct rng rng;
    bool whole_seconds; /* durations 0, 1, 2, 3: many ties */
    bool reaches[MOST_OPS][MOST_OPS];
};

/* The operation added last: a priority, and up to three dependencies on earlier ones. */
static void finish_random_op(struct sample *sample, int op) {
    schedule_priority(sample->schedule, rng_below(&sample->rng, 8));
    sample->reaches[op][op] = true;
    for (int i = rng_below(&sample->rng, 4); i > 0 && op > 0; i--) {
        int on = rng_below(&sample->rng, op);
        schedule_after(sample->schedule, on);
        for (int before = 0; before < op; before++)
            sample->reaches[before][op] |= sample->reaches[before][on];
    }
}

static double random_duration(struct sample *sample) {
    return sample->whole_seconds ? rng_below(&sample->rng, 4) : rng_uniform(&sample->rng);
}

static void add_random_transfer(struct sample *sample) {
    static const enum kind kinds[] = {KIND_DISPATCH, KIND_COMBINE, KIND_P2P, KIND_GRAD_SYNC,
                                      KIND_PARAM_GATHER};
    struct schedule *s = sample->schedule;
    int from = rng_below(&sample->rng, s->group_count), to = rng_below(&sample->rng, s->group_count);
    int op = schedule_transfer(
        s, kinds[rng_below(&sample->rng, COUNT(kinds))], (enum pass)rng_below(&sample->rng, PASS_COUNT),
        rng_below(&sample->rng, s->layers + 1) - 1, rng_below(&sample->rng, s->micro_batches + 1) - 1, from,
        to, random_duration(sample), rng_below(&sample->rng, 1000));
    finish_random_op(sample, op);
}

static void add_random_compute(struct sample *sample, enum kind kind, enum pass pass, int layer,
                               int micro_batch) {
    struct schedule *s = sample->schedule;
    int chunks = 1 + (rng_below(&sample->rng, 4) == 0);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int group = rng_below(&sample->rng, s->group_count);
        int op = schedule_compute(s, kind, pass, layer, micro_batch, group, random_duration(sample));
        s->ops[op].chunk = (int16_t)chunk;
        s->ops[op].chunks = (int16_t)chunks;
        finish_random_op(sample, op);
        if (rng_below(&sample->rng, 2) == 0) add_random_transfer(sample);
    }
}

/* Activations along dependencies: from an operation to one that it reaches, read by some in between. */
static void add_random_activations(struct sample *sample) {
    struct schedule *s = sample->schedule;
    for (int i = 0; i < s->op_count; i++) {
        int producer = rng_below(&sample->rng, s->op_count), end = rng_below(&sample->rng, s->op_count);
        if (!sample->reaches[producer][end]) end = producer;
        int kept = schedule_keep(s, rng_below(&sample->rng, s->group_count), producer,
                                 rng_below(&sample->rng, 1000));
        for (int reader = producer; reader <= end; reader++)
            if (sample->reaches[producer][reader] && sample->reaches[reader][end])
                schedule_reads(s, kept, reader);
        schedule_release(s, kept, end);
    }
}

/* 1 to 4 groups, layers and micro-batches as many, every attention and FFN with optional passes; at most
   2 × 9 × 4 × 2 operations and as many transfers. */
static struct sample *sample_new(uint64_t seed) {
    struct sample *sample = must_alloc(sizeof *sample);
    sample->rng = rng_seed(seed);
    sample->whole_seconds = rng_below(&sample->rng, 2) == 0;
    int groups = 1 + rng_below(&sample->rng, 4);
    struct schedule *s = schedule_new(groups, 1 + rng_below(&sample->rng, 3), 1 + rng_below(&sample->rng, 3));
    sample->schedule = s;
    s->half_duplex = rng_below(&sample->rng, 3) == 0;
    for (int group = 0; group < groups; group++)
        schedule_group(s, group, 8, rng_below(&sample->rng, 100), "G%d", group);
    for (int pass = 0; pass < PASS_COUNT; pass++)
        for (int layer = 0; layer < s->layers; layer++)
            for (int micro_batch = 0; micro_batch < s->micro_batches; micro_batch++)
                for (int kind = KIND_ATTENTION; kind <= KIND_FFN; kind++) {
                    bool optional = pass == PASS_RECOMPUTE || pass == PASS_WEIGHT;
                    if (optional && rng_below(&sample->rng, 2) == 0) continue;
                    add_random_compute(sample, (enum kind)kind, (enum pass)pass, layer, micro_batch);
                }
    add_random_activations(sample);
    assert_true(schedule_arrange(s, &sample->timeline));
    return sample;
}

static void sample_free(struct sample *sample) {
    timeline_free(&sample->timeline);
    schedule_free(sample->schedule);
    free(sample);
}

static void assert_same_timeline(const struct schedule *schedule, const struct timeline *a,
                                 const struct timeline *b) {
    size_t bytes = (size_t)schedule->op_count * sizeof(double);
    assert_memory_equal(a->start, b->start, bytes);
    assert_memory_equal(a->end, b->end, bytes);
    assert_true(a->makespan == b->makespan);
}

/* Replaying gives the same bits, whether the sequence is the list-scheduler's or found anew; and arranging
   again with all orders given does too. */
static void assert_replays(struct sample *sample) {
    struct schedule *s = sample->schedule;
    struct timeline again = {0};
    assert_true(schedule_replay(s, &again));
    assert_same_timeline(s, &sample->timeline, &again);
    forget_sequence(s);
    assert_true(schedule_replay(s, &again));
    assert_same_timeline(s, &sample->timeline, &again);
    for (int lane = 0; lane < s->lane_count; lane++) {
        int count = s->lanes[lane].count, *order = must_alloc(((size_t)count + 1) * sizeof *order);
        memcpy(order, s->lanes[lane].ops, (size_t)count * sizeof *order);
        schedule_fix_order(s, lane, order, count);
        free(order);
    }
    assert_true(schedule_arrange(s, &again));
    assert_same_timeline(s, &sample->timeline, &again);
    timeline_free(&again);
}

static void assert_execution_holds(const struct sample *sample) {
    const struct schedule *s = sample->schedule;
    const struct timeline *t = &sample->timeline;
    double busy[3 * 4];
    schedule_busy(s, busy);
    for (int lane = 0; lane < s->lane_count; lane++) {
        assert_true(t->makespan >= busy[lane] * (1 - 1e-12));
        for (int i = 1; i < s->lanes[lane].count; i++)
            assert_true(t->start[s->lanes[lane].ops[i]] >= t->end[s->lanes[lane].ops[i - 1]]);
    }
    assert_true(t->makespan >= schedule_critical_path(s) * (1 - 1e-12));
    for (int op = 0; op < s->op_count; op++) {
        assert_true(t->end[op] == t->start[op] + s->ops[op].duration);
        assert_true(t->end[op] <= t->makespan);
        for (int i = 0; i < s->ops[op].dep_count; i++)
            assert_true(t->start[op] >= t->end[s->deps[s->ops[op].first_dep + i]]);
    }
}

/* Bytes of a group at a time: all that has started and not ended; for the moment also what an operation that
   takes no time frees at this time. Bytes are whole, so sums are exact. */
static double bytes_at(const struct sample *sample, int group, double time, bool moment) {
    const struct schedule *s = sample->schedule;
    double bytes = s->groups[group].static_bytes;
    for (int i = 0; i < s->activation_count; i++) {
        const struct activation *it = &s->activations[i];
        double start = sample->timeline.start[it->producer], end = sample->timeline.end[it->freed_by];
        bool at_once = moment && sample->timeline.start[it->freed_by] == end && start < end;
        if (it->group == group && start <= time && (time < end || (at_once && time == end)))
            bytes += it->bytes;
    }
    return bytes;
}

static void assert_memory(const struct sample *sample) {
    const struct schedule *s = sample->schedule;
    double peaks[4];
    schedule_memory_peaks(s, &sample->timeline, peaks);
    for (int group = 0; group < s->group_count; group++) {
        double peak = s->groups[group].static_bytes, highest = 0;
        for (int op = 0; op < s->op_count; op++)
            peak = fmax(peak, bytes_at(sample, group, sample->timeline.start[op], true));
        assert_true(peaks[group] == peak);
        struct memory_point *points;
        int count = schedule_memory_timeline(s, &sample->timeline, group, &points);
        for (int i = 0; i < count; i++) {
            assert_true(points[i].bytes == bytes_at(sample, group, points[i].time, false));
            if (i > 0) assert_true(points[i].time > points[i - 1].time);
            highest = fmax(highest, points[i].bytes);
        }
        assert_true(highest <= peak);
        assert_true(points[count - 1].time == sample->timeline.makespan);
        assert_true(points[count - 1].bytes == s->groups[group].static_bytes);
        free(points);
    }
}

static void test_random_execution(void **state) {
    (void)state;
    for (int i = 0, cases = sampled(CASES); i < cases; i++) {
        struct sample *sample = sample_new(SEED + (uint64_t)i);
        assert_accepted(sample->schedule);
        assert_execution_holds(sample);
        assert_memory(sample);
        assert_replays(sample);
        assert_accepted(sample->schedule);
        sample_free(sample);
    }
}

/* ---- better orders, limits, instant transfers, on random schedules ------------------------------------- */

/* The sample's schedule arranged another way; its own order is kept as the plain greedy one. */
static double arranged_makespan(uint64_t seed, bool patient, bool justified, bool instant,
                                struct timeline *kept) {
    struct sample *sample = sample_new(seed);
    struct schedule *s = sample->schedule;
    s->patient = patient;
    s->justified = justified;
    if (instant) schedule_drop_instant(s);
    assert_true(schedule_arrange(s, &sample->timeline));
    assert_accepted(s);
    assert_execution_holds(sample);
    assert_memory(sample);
    double makespan = sample->timeline.makespan;
    if (kept) {
        *kept = sample->timeline;
        sample->timeline = (struct timeline){0};
    } else {
        assert_replays(sample);
    }
    sample_free(sample);
    return makespan;
}

/* Valid whatever the policy; a justified order is never longer than what it began with, and at times shorter;
   the same schedule gives the same order. */
static void test_random_orders(void **state) {
    (void)state;
    int shorter = 0, other = 0, cases = (sampled(CASES) + 3) / 4;
    for (int i = 0; i < cases; i++) {
        uint64_t seed = SEED + 3000000 + (uint64_t)i;
        bool patient = i % 2, instant = i % 4 >= 2;
        double plain = arranged_makespan(seed, patient, false, instant, NULL);
        double justified = arranged_makespan(seed, patient, true, instant, NULL);
        assert_true(justified <= plain);
        shorter += justified < plain;
        other += plain != arranged_makespan(seed, !patient, false, instant, NULL);
        struct timeline first = {0}, second = {0};
        assert_true(arranged_makespan(seed, patient, true, instant, &first) == justified);
        assert_true(arranged_makespan(seed, patient, true, instant, &second) == justified);
        struct sample *sample = sample_new(seed);
        assert_same_timeline(sample->schedule, &first, &second);
        sample_free(sample);
        timeline_free(&first);
        timeline_free(&second);
    }
    if (cases >= 100) assert_true(shorter > cases / 10 && other > cases / 10);
}

/* A step that is no shorter than the limit is given up, a shorter one never; and a schedule that was given up
   can be arranged after all. Whole seconds, so that sums are exact. */
static void test_random_limits(void **state) {
    (void)state;
    for (int i = 0, cases = (sampled(CASES) + 3) / 4; i < cases; i++) {
        struct sample *sample = sample_new(SEED + 4000000 + (uint64_t)i);
        struct schedule *s = sample->schedule;
        double greedy = sample->timeline.makespan, makespan = greedy,
               part = 0.3 + 0.7 * rng_uniform(&sample->rng);
        s->justified = i % 2 == 0;
        if (s->justified) {
            struct sample *twin = sample_new(SEED + 4000000 + (uint64_t)i);
            twin->schedule->justified = true;
            assert_true(schedule_arrange(twin->schedule, &twin->timeline));
            makespan = twin->timeline.makespan;
            sample_free(twin);
        }
        struct timeline again = {0};
        if (sample->whole_seconds) assert_false(schedule_arrange_before(s, makespan, &again));
        assert_false(schedule_arrange_before(s, floor(part * makespan * (1 - 1e-9)), &again));
        assert_null(s->sequence);
        assert_true(schedule_arrange_before(s, greedy + 1, &again));
        assert_true(again.makespan == makespan);
        assert_accepted(s);
        timeline_free(&again);
        sample_free(sample);
    }
}

/* Two transfers between the same groups, on the sender's lane: first *a, later *b (places). */
static bool find_pair(const struct schedule *schedule, int *lane, int *a, int *b) {
    for (*lane = 0; *lane < schedule->lane_count; ++*lane) {
        if (*lane % RESOURCE_COUNT != RESOURCE_SEND) continue;
        const struct lane *order = &schedule->lanes[*lane];
        for (*a = 0; *a < order->count; ++*a)
            for (*b = *a + 1; *b < order->count; ++*b)
                if (schedule->ops[order->ops[*a]].lanes[1] == schedule->ops[order->ops[*b]].lanes[1])
                    return true;
    }
    return false;
}

static int random_swaps(struct sample *sample) {
    struct schedule *s = sample->schedule;
    struct timeline timeline = {0};
    int lane, a, b;
    if (!find_pair(s, &lane, &a, &b)) return 0;
    int *order = s->lanes[lane].ops;
    swap_ints(&order[a], &order[b]);
    assert_rejected(s, "dead-lock");
    assert_rejected(s, "→ next on ");
    forget_sequence(s);
    assert_false(schedule_replay(s, &timeline));
    timeline_free(&timeline);
    swap_ints(&order[a], &order[b]);
    assert_accepted(s);
    return 1;
}

static void random_order_faults(struct sample *sample) {
    struct schedule *s = sample->schedule;
    int op = rng_below(&sample->rng, s->op_count), slot = rng_below(&sample->rng, s->ops[op].lane_count);
    struct lane *lane = &s->lanes[s->ops[op].lanes[slot]];
    int place = rng_below(&sample->rng, lane->count), other = rng_below(&sample->rng, lane->count);
    int kept = lane->ops[place];
    swap_ints(&lane->ops[place], &lane->ops[lane->count - 1]);
    lane->count--;
    assert_rejected(s, "");
    lane->count++;
    swap_ints(&lane->ops[place], &lane->ops[lane->count - 1]);
    if (other == place) return;
    lane->ops[place] = lane->ops[other];
    assert_rejected(s, "more than once");
    lane->ops[place] = kept;
}

/* Along dependencies, so that no order can save it. */
static int random_life_faults(struct sample *sample) {
    struct schedule *s = sample->schedule;
    int found = 0;
    for (int tries = 0; tries < 20; tries++) {
        int kept = rng_below(&sample->rng, s->activation_count), op = rng_below(&sample->rng, s->op_count);
        const struct activation *it = &s->activations[kept];
        bool early = op != it->producer && sample->reaches[op][it->producer];
        bool late = op != it->freed_by && sample->reaches[it->freed_by][op];
        if (!early && !late) continue;
        schedule_reads(s, kept, op);
        assert_rejected(s, early ? "before it exists" : "after it is freed");
        s->read_count--;
        found++;
    }
    return found;
}

static void random_coverage_faults(struct sample *sample) {
    struct schedule *s = sample->schedule;
    int op;
    do op = rng_below(&sample->rng, s->op_count);
    while (s->ops[op].kind > KIND_FFN || s->ops[op].pass == PASS_WEIGHT || s->ops[op].pass == PASS_RECOMPUTE);
    struct operation kept = s->ops[op];
    s->ops[op].kind = KIND_EMBED;
    assert_rejected(s, "is missing");
    s->ops[op] = kept;
    if (s->micro_batches == 1) return;
    s->ops[op].micro_batch = (kept.micro_batch + 1) % s->micro_batches;
    assert_rejected(s, "");
    s->ops[op] = kept;
}

static void test_random_faults(void **state) {
    (void)state;
    int swaps = 0, lives = 0, cases = sampled(CASES);
    for (int i = 0; i < cases; i++) {
        struct sample *sample = sample_new(SEED + 1000000 + (uint64_t)i);
        swaps += random_swaps(sample);
        random_order_faults(sample);
        lives += random_life_faults(sample);
        random_coverage_faults(sample);
        assert_accepted(sample->schedule); /* all is mended again */
        sample_free(sample);
    }
    assert_true(swaps > cases / 2);
    assert_true(lives > cases);
}

static void test_random_shown(void **state) {
    (void)state;
    for (int i = 0, cases = (sampled(CASES) + 19) / 20; i < cases; i++) {
        struct sample *sample = sample_new(SEED + 2000000 + (uint64_t)i);
        assert_json_reads_back(sample->schedule, &sample->timeline);
        assert_trace(sample->schedule, &sample->timeline);
        struct small shown = {.schedule = sample->schedule, .timeline = sample->timeline};
        char *text = drawn(&shown, 100);
        assert_true(widest_line(text) <= 100);
        free(text);
        sample_free(sample);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_builder),
#ifndef NDEBUG
        cmocka_unit_test(test_builder_errors),
#endif
        cmocka_unit_test(test_arrange_chain),
        cmocka_unit_test(test_arrange_pipeline),
        cmocka_unit_test(test_arrange_priority),
        cmocka_unit_test(test_arrange_ports),
        cmocka_unit_test(test_arrange_given_order),
        cmocka_unit_test(test_arrange_dead_lock),
        cmocka_unit_test(test_order_against_dependency),
        cmocka_unit_test(test_arrange_nothing),
        cmocka_unit_test(test_arrange_patient),
        cmocka_unit_test(test_arrange_justified),
        cmocka_unit_test(test_instant),
        cmocka_unit_test(test_communication),
        cmocka_unit_test(test_swapped_transfers),
        cmocka_unit_test(test_orders_hold_every_operation_once),
        cmocka_unit_test(test_coverage),
        cmocka_unit_test(test_coverage_split),
        cmocka_unit_test(test_activation_lives),
        cmocka_unit_test(test_numbers_outside),
        cmocka_unit_test(test_many_faults),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_memory_ties),
        cmocka_unit_test(test_draw),
        cmocka_unit_test(test_draw_density),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_trace),
        cmocka_unit_test(test_random_execution),
        cmocka_unit_test(test_random_orders),
        cmocka_unit_test(test_random_limits),
        cmocka_unit_test(test_random_faults),
        cmocka_unit_test(test_random_shown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
