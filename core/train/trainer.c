/*
A rank's trainer: making it, a step from its start to its report, and what can be asked of it.
*/
#include "train/train.h"
#include "train/cell_memory.h"
#include "train/collectives.h"
#include "train/lanes.h"
#include "train/measured.h"
#include "train/pool.h"
#include "train/sizes.h"
#include "train/verify.h"
#include "train/waiting.h"

#include <stdlib.h>
#include <string.h>

struct trainer {
    struct runner runner;
    struct progress_mark mark;
    struct rope rope;
    struct arena *arena;
};

/* ---- making it --------------------------------------------------------------------------------------- */

static size_t cell_count(const struct runner *runner) {
    return ((size_t)runner->model->layers + 1) * (size_t)runner->schedule->micro_batches;
}

static size_t expert_count(const struct runner *runner) {
    return (size_t)runner->model->layers * (size_t)runner->model->moe.experts;
}

/* Lanes are threads that all communicate, and an operation's number is its messages' tag. */
static bool check_mpi(const struct ranks *ranks, MPI_Comm comm, struct errors *errors) {
    int provided, size, found, *most, before = errors->count;
    MPI_Query_thread(&provided);
    MPI_Comm_size(comm, &size);
    MPI_Comm_get_attr(comm, MPI_TAG_UB, &most, &found);
    if (provided < MPI_THREAD_MULTIPLE)
        errors_add(errors, NULL, "train", "this MPI library has no MPI_THREAD_MULTIPLE, which lanes need");
    if (size != ranks->count)
        errors_add(errors, NULL, "train", "found %d ranks; the plan has %d GPUs", size, ranks->count);
    if (found && ranks->schedule->op_count > *most)
        errors_add(errors, NULL, "train", "found %d operations; this MPI library has tags up to %d",
                   ranks->schedule->op_count, *most);
    return errors->count == before;
}

static void make_communicators(struct runner *runner, MPI_Comm comm) {
    MPI_Comm_dup(comm, &runner->comm);
    MPI_Comm_dup(comm, &runner->forward);
    MPI_Comm_dup(comm, &runner->backward);
    MPI_Comm_dup(comm, &runner->control);
    make_collectives(runner);
    MPI_Type_contiguous(runner->hidden, MPI_FLOATX, &runner->row);
    MPI_Type_commit(&runner->row);
}

static void make_step_memory(struct runner *runner, const struct timeline *planned, struct arena *arena) {
    const struct schedule *schedule = runner->schedule;
    runner->cells = arena_alloc(arena, cell_count(runner) * sizeof *runner->cells);
    runner->sums.expert_copies =
        arena_alloc(arena, expert_count(runner) * sizeof *runner->sums.expert_copies);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        runner->spans[resource] =
            arena_alloc(arena, ((size_t)group_lane(runner, runner->seat.group, resource)->count + 1) *
                                   sizeof(struct span));
    runner->half_done = arena_alloc(arena, (size_t)schedule->op_count);
    runner->taken = arena_alloc(arena, ((size_t)schedule->activation_count + 1) * sizeof(double));
    runner->contexts[RESOURCE_COMPUTE].workers = workers_new(1);
    pthread_mutex_init(&runner->mutex, NULL);
    pthread_cond_init(&runner->changed, NULL);
    fill_expected(runner, planned, arena);
    /* A little more for each buffer's header. */
    runner->pool = pool_new((size_t)(runner->expected_peak * 1.05) + (1 << 16));
}

struct trainer *trainer_new(const struct plan *plan, const struct schedule *schedule,
                            const struct timeline *planned, const struct data *data, uint64_t seed,
                            MPI_Comm comm, struct errors *errors) {
    const struct point *point = plan->point;
    const struct model *model = point->model;
    struct arena *arena = arena_new();
    struct trainer *trainer = arena_alloc(arena, sizeof *trainer);
    struct runner *runner = &trainer->runner;
    *trainer = (struct trainer){
        .mark = {.seed = seed},
        .rope = rope_new(arena, point->seq_len, model->attention.head_dim, model->attention.rope_theta),
        .arena = arena};
    *runner = (struct runner){.plan = plan,
                              .model = model,
                              .schedule = schedule,
                              .data = data,
                              .seq_len = point->seq_len,
                              .hidden = model->hidden};
    if (!ranks_read(&runner->ranks, plan, schedule, arena, errors) ||
        !check_mpi(&runner->ranks, comm, errors)) {
        arena_free(arena);
        return NULL;
    }
    MPI_Comm_rank(comm, &runner->rank);
    runner->seat = seat_of(&runner->ranks, runner->rank);
    make_communicators(runner, comm);
    runner->program = program_new(arena, schedule, planned, runner->seat.group);
    runner->state = state_new(&runner->ranks, runner->rank, runner->comm, &trainer->rope, seed);
    if (point->training.forced_routing)
        runner->forced = forced_routing_new(arena, model, point->routing.share, point->seq_len);
    make_step_memory(runner, planned, arena);
    return trainer;
}

void trainer_free(struct trainer *trainer) {
    if (!trainer) return;
    struct runner *runner = &trainer->runner;
    passing_free_all(runner);
    pool_free(runner->pool);
    state_free(runner->state);
    verifier_free(runner->verifier);
    workers_free(runner->contexts[RESOURCE_COMPUTE].workers);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) context_free(&runner->contexts[resource]);
    pthread_mutex_destroy(&runner->mutex);
    pthread_cond_destroy(&runner->changed);
    MPI_Type_free(&runner->row);
    MPI_Comm_free(&runner->run);
    MPI_Comm_free(&runner->control);
    MPI_Comm_free(&runner->backward);
    MPI_Comm_free(&runner->forward);
    MPI_Comm_free(&runner->comm);
    arena_free(trainer->arena);
}

struct state *trainer_state(struct trainer *trainer) {
    return trainer->runner.state;
}

struct progress_mark trainer_mark(const struct trainer *trainer) {
    return trainer->mark;
}

void trainer_resume(struct trainer *trainer, struct progress_mark mark) {
    trainer->mark = mark;
}

void trainer_watch(struct trainer *trainer, struct pulse *pulse) {
    trainer->runner.pulse = pulse;
}

int trainer_ranks(const struct trainer *trainer) {
    return trainer->runner.ranks.count;
}

/* ---- a step ------------------------------------------------------------------------------------------ */

static void begin_step(struct runner *runner) {
    passing_free_all(runner);
    memset(runner->cells, 0, cell_count(runner) * sizeof *runner->cells);
    memset(runner->sums.expert_copies, 0, expert_count(runner) * sizeof *runner->sums.expert_copies);
    runner->sums.cross_entropy = runner->sums.aux = runner->sums.z = 0;
    runner->reduced = false;
    runner->report = (struct step_report){.step = runner->step};
    state_zero_gradients(runner->state);
}

/* Times of the slowest rank, and of the mean one. */
static void report_times(struct runner *runner, double seconds) {
    struct step_report *report = &runner->report;
    wait_for_all(runner->comm, &seconds, 1, MPI_DOUBLE, MPI_MAX);
    double exposed = exposed_seconds(runner);
    wait_for_all(runner->comm, &exposed, 1, MPI_DOUBLE, MPI_SUM);
    report->seconds = seconds;
    report->tokens_per_s = (double)batch_sequences(&runner->ranks) * runner->seq_len / seconds;
    report->exposed = exposed / runner->ranks.count;
}

struct step_report trainer_step(struct trainer *trainer) {
    struct runner *runner = &trainer->runner;
    runner->step = trainer->mark.step;
    runner->seed = trainer->mark.seed;
    if (runner->verifier) runner->seed = verify_batch(runner->verifier, runner, trainer->mark.seed);
    begin_step(runner);
    runner->began = seconds_now();
    run_lanes(runner);
    state_gather(runner->state);
    report_times(runner, seconds_now() - runner->began);
    trainer->mark.step++;
    return runner->report;
}

/* ---- what can be asked of it ------------------------------------------------------------------------- */

void trainer_verify(struct trainer *trainer) {
    trainer->runner.verifier = verifier_new(&trainer->runner, trainer->mark.seed);
}

struct verification trainer_verification(const struct trainer *trainer) {
    const struct runner *runner = &trainer->runner;
    struct verification verification = {0};
    if (runner->verifier) verification = verifier_found(runner->verifier);
    MPI_Bcast(&verification, (int)sizeof verification, MPI_BYTE, 0, runner->comm);
    return verification;
}

void trainer_memory(struct trainer *trainer, struct memory_report *reports) {
    const struct runner *runner = &trainer->runner;
    const struct state *state = runner->state;
    struct memory_report own = {
        .predicted = runner->expected_static + runner->expected_peak,
        .as_run = runner->expected_static + runner->as_run_peak,
        .predicted_static = runner->expected_static,
        .used_static = (double)(state->value_bytes + state->gradient_bytes + state->moment_bytes),
        .workspace = (double)(runner->passing_peak + state->workspace_bytes),
        .host = (double)state->host_bytes,
    };
    own.used = own.used_static + (double)pool_use(runner->pool).peak;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        own.workspace += (double)runner->contexts[resource].scratch_peak;
    int doubles = (int)(sizeof own / sizeof(double));
    MPI_Allgather(&own, doubles, MPI_DOUBLE, reports, doubles, MPI_DOUBLE, runner->comm);
}

struct schedule *trainer_measured(struct trainer *trainer, struct timeline *timeline) {
    return measured_schedule(&trainer->runner, timeline);
}
