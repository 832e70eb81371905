/*
A rank's trainer: making it, a step from its start to its report, and what can be asked of it.
*/
#include "train/executor.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory of a step -------------------------------------------------------------------------------- */

/* In front of each piece, in a list of all of a step's. */
struct passing {
    _Alignas(max_align_t) struct passing *previous, *next;
    size_t bytes;
};

void *passing_new(struct trainer *trainer, size_t bytes) {
    struct passing *passing = must_alloc(sizeof *passing + bytes);
    pthread_mutex_lock(&trainer->mutex);
    passing->bytes = bytes;
    passing->next = trainer->passing;
    if (passing->next) passing->next->previous = passing;
    trainer->passing = passing;
    trainer->passing_bytes += bytes;
    if (trainer->passing_bytes > trainer->passing_peak) trainer->passing_peak = trainer->passing_bytes;
    pthread_mutex_unlock(&trainer->mutex);
    return passing + 1;
}

void passing_free(struct trainer *trainer, void *memory) {
    if (!memory) return;
    struct passing *passing = (struct passing *)memory - 1;
    pthread_mutex_lock(&trainer->mutex);
    if (passing->previous)
        passing->previous->next = passing->next;
    else
        trainer->passing = passing->next;
    if (passing->next) passing->next->previous = passing->previous;
    trainer->passing_bytes -= passing->bytes;
    pthread_mutex_unlock(&trainer->mutex);
    free(passing);
}

static void free_all_passing(struct trainer *trainer) {
    while (trainer->passing) passing_free(trainer, trainer->passing + 1);
}

/* ---- making it --------------------------------------------------------------------------------------- */

static size_t cell_count(const struct trainer *trainer) {
    return ((size_t)trainer->model->layers + 1) * (size_t)trainer->schedule->micro_batches;
}

static int lane_length(const struct trainer *trainer, int group, enum resource resource) {
    return trainer->schedule->lanes[lane_of(group, resource)].count;
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

static void make_communicators(struct trainer *trainer, MPI_Comm comm) {
    MPI_Comm_dup(comm, &trainer->comm);
    MPI_Comm_dup(comm, &trainer->forward);
    MPI_Comm_dup(comm, &trainer->backward);
    MPI_Comm_dup(comm, &trainer->control);
    MPI_Type_contiguous(trainer->hidden, MPI_FLOATX, &trainer->row);
    MPI_Type_commit(&trainer->row);
}

static void make_step_memory(struct trainer *trainer) {
    const struct schedule *schedule = trainer->schedule;
    struct arena *arena = trainer->arena;
    const struct model *model = trainer->model;
    trainer->cells = arena_alloc(arena, cell_count(trainer) * sizeof *trainer->cells);
    trainer->sums.expert_copies =
        arena_alloc(arena, (size_t)model->layers * model->moe.experts * sizeof(int64_t));
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        trainer->spans[resource] = arena_alloc(
            arena, ((size_t)lane_length(trainer, trainer->seat.group, (enum resource)resource) + 1) *
                       sizeof(struct span));
    trainer->half_done = arena_alloc(arena, (size_t)schedule->op_count);
    trainer->taken = arena_alloc(arena, ((size_t)schedule->activation_count + 1) * sizeof(double));
    trainer->contexts[RESOURCE_COMPUTE].workers = workers_new(1);
    pthread_mutex_init(&trainer->mutex, NULL);
    pthread_cond_init(&trainer->changed, NULL);
    fill_expected(trainer);
    /* A little more for each buffer's header. */
    trainer->pool = pool_new((size_t)(trainer->expected_peak * 1.05) + (1 << 16));
}

struct trainer *trainer_new(const struct plan *plan, const struct schedule *schedule,
                            const struct timeline *planned, const struct data *data, uint64_t seed,
                            MPI_Comm comm, struct errors *errors) {
    const struct point *point = plan->point;
    struct arena *arena = arena_new();
    struct trainer *trainer = arena_alloc(arena, sizeof *trainer);
    *trainer = (struct trainer){.plan = plan,
                                .model = point->model,
                                .schedule = schedule,
                                .planned = planned,
                                .data = data,
                                .mark = {.seed = seed},
                                .seq_len = point->seq_len,
                                .hidden = point->model->hidden,
                                .arena = arena};
    if (!ranks_read(&trainer->ranks, plan, schedule, arena, errors) ||
        !check_mpi(&trainer->ranks, comm, errors)) {
        arena_free(arena);
        return NULL;
    }
    MPI_Comm_rank(comm, &trainer->rank);
    trainer->seat = seat_of(&trainer->ranks, trainer->rank);
    make_communicators(trainer, comm);
    trainer->program = program_new(arena, schedule, planned, trainer->seat.group);
    trainer->rope =
        rope_new(arena, point->seq_len, point->model->attention.head_dim, point->model->attention.rope_theta);
    trainer->state = state_new(&trainer->ranks, trainer->rank, trainer->comm, &trainer->rope, seed);
    if (point->training.forced_routing)
        trainer->forced = forced_routing_new(arena, point->model, point->routing.share, point->seq_len);
    make_step_memory(trainer);
    return trainer;
}

void trainer_free(struct trainer *trainer) {
    if (!trainer) return;
    free_all_passing(trainer);
    pool_free(trainer->pool);
    state_free(trainer->state);
    reference_free(trainer->reference);
    workers_free(trainer->contexts[RESOURCE_COMPUTE].workers);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) context_free(&trainer->contexts[resource]);
    pthread_mutex_destroy(&trainer->mutex);
    pthread_cond_destroy(&trainer->changed);
    MPI_Type_free(&trainer->row);
    MPI_Comm_free(&trainer->control);
    MPI_Comm_free(&trainer->backward);
    MPI_Comm_free(&trainer->forward);
    MPI_Comm_free(&trainer->comm);
    arena_free(trainer->arena);
}

struct state *trainer_state(struct trainer *trainer) {
    return trainer->state;
}

struct progress_mark trainer_mark(const struct trainer *trainer) {
    return trainer->mark;
}

void trainer_resume(struct trainer *trainer, struct progress_mark mark) {
    trainer->mark = mark;
}

void trainer_watch(struct trainer *trainer, struct pulse *pulse) {
    trainer->pulse = pulse;
}

int trainer_ranks(const struct trainer *trainer) {
    return trainer->ranks.count;
}

/* ---- a step's end ------------------------------------------------------------------------------------ */

struct optimizer training_optimizer(const struct training *training) {
    return (struct optimizer){.learning_rate = training->learning_rate,
                              .final_learning_rate = training->final_learning_rate,
                              .warmup_steps = training->warmup_steps,
                              .steps = training->decay_steps ? training->decay_steps : training->steps,
                              .beta1 = training->beta1,
                              .beta2 = training->beta2,
                              .epsilon = training->epsilon,
                              .weight_decay = training->weight_decay,
                              .clip = training->clip};
}

static void reduce_over_ranks(struct trainer *trainer, void *values, int count, MPI_Datatype type,
                              MPI_Op op) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, values, count, type, op, trainer->comm, &request);
    wait_all(&request, 1);
}

static int moe_layers(const struct model *model) {
    int count = 0;
    for (int layer = 0; layer < model->layers; layer++) count += model_layer_is_moe(model, layer);
    return count;
}

/* Mean over MoE layers of the busiest expert's copies over the mean expert's. */
static double imbalance_of(const struct model *model, const int64_t *copies) {
    double sum = 0;
    for (int layer = model->moe.dense_layers; layer < model->layers; layer++) {
        const int64_t *here = copies + (size_t)layer * model->moe.experts;
        int64_t most = 0, all = 0;
        for (int e = 0; e < model->moe.experts; e++) {
            all += here[e];
            if (here[e] > most) most = here[e];
        }
        if (all) sum += (double)most * model->moe.experts / (double)all;
    }
    return moe_layers(model) ? sum / moe_layers(model) : 0;
}

static struct step_losses losses_of(struct trainer *trainer, const double *sums) {
    const struct model *model = trainer->model;
    double sequences = (double)batch_sequences(&trainer->ranks), tokens = sequences * trainer->seq_len;
    double layers = moe_layers(model) ? moe_layers(model) : 1;
    reduce_over_ranks(trainer, trainer->sums.expert_copies, model->layers * model->moe.experts, MPI_INT64_T,
                      MPI_SUM);
    struct step_losses losses = {.cross_entropy = sums[0] / tokens,
                                 .aux = sums[1] / (sequences * layers),
                                 .z = sums[2] / (tokens * layers),
                                 .margin = INFINITY,
                                 .imbalance = imbalance_of(model, trainer->sums.expert_copies)};
    losses.total = losses.cross_entropy + model->moe.aux_loss * losses.aux + model->moe.z_loss * losses.z;
    return losses;
}

/* Reduces what no lane has reduced, agrees on losses and norm, and updates, unless a number is not finite. */
void optimizer_operation(struct trainer *trainer) {
    struct step_report *report = &trainer->report;
    if (!trainer->reduced) state_reduce(trainer->state, true);
    state_reduce(trainer->state, false);
    double sums[4] = {trainer->sums.cross_entropy, trainer->sums.aux, trainer->sums.z,
                      state_gradient_squares(trainer->state)};
    int bad = isfinite(sums[0] + sums[1] + sums[2]) ? INT_MAX : trainer->rank;
    if (bad == INT_MAX && !isfinite(sums[3])) bad = trainer->rank;
    reduce_over_ranks(trainer, &bad, 1, MPI_INT, MPI_MIN);
    reduce_over_ranks(trainer, sums, 4, MPI_DOUBLE, MPI_SUM);
    struct optimizer optimizer = training_optimizer(&trainer->plan->point->training);
    report->losses = losses_of(trainer, sums);
    report->grad_norm = sqrt(sums[3]);
    report->learning_rate = optimizer_rate(&optimizer, trainer->mark.step);
    report->bad_rank = bad == INT_MAX ? -1 : bad;
    report->finite = bad == INT_MAX;
    if (trainer->verifying) verify_gradients(trainer);
    if (report->finite)
        state_update(trainer->state, &trainer->contexts[RESOURCE_COMPUTE], &optimizer, trainer->mark.step,
                     clip_scale(&optimizer, sums[3]));
}

/* ---- a step ------------------------------------------------------------------------------------------ */

/* The rank's own operations as a timeline; a collective's times are its receiving half's. */
static struct timeline own_timeline(const struct trainer *trainer) {
    size_t ops = (size_t)trainer->schedule->op_count + 1;
    struct timeline timeline = {must_alloc(ops * sizeof(double)), must_alloc(ops * sizeof(double)), 0};
    static const enum resource order[] = {RESOURCE_COMPUTE, RESOURCE_SEND, RESOURCE_RECV};
    for (size_t i = 0; i < COUNT(order); i++) {
        const struct lane *lane = &trainer->schedule->lanes[lane_of(trainer->seat.group, order[i])];
        for (int k = 0; k < lane->count; k++) {
            timeline.start[lane->ops[k]] = trainer->spans[order[i]][k].start;
            timeline.end[lane->ops[k]] = trainer->spans[order[i]][k].end;
        }
    }
    return timeline;
}

/* Seconds in which the compute lane waited for a transfer in progress. */
static double exposed_seconds(const struct trainer *trainer, const struct timeline *timeline) {
    const struct lane *lane = &trainer->schedule->lanes[lane_of(trainer->seat.group, RESOURCE_COMPUTE)];
    double exposed = 0, now = trainer->began;
    for (int i = 0; i < lane->count; i++) {
        struct span span = trainer->spans[RESOURCE_COMPUTE][i];
        if (span.start > now)
            exposed += schedule_exposed(trainer->schedule, timeline, lane->ops[i], now, span.start);
        now = span.end;
    }
    return exposed;
}

/* Mean over ranks. */
static void report_exposed(struct trainer *trainer) {
    struct timeline timeline = own_timeline(trainer);
    double exposed = exposed_seconds(trainer, &timeline);
    timeline_free(&timeline);
    reduce_over_ranks(trainer, &exposed, 1, MPI_DOUBLE, MPI_SUM);
    trainer->report.exposed = exposed / trainer->ranks.count;
}

static void begin_step(struct trainer *trainer) {
    const struct model *model = trainer->model;
    free_all_passing(trainer);
    memset(trainer->cells, 0, cell_count(trainer) * sizeof *trainer->cells);
    memset(trainer->sums.expert_copies, 0,
           (size_t)model->layers * model->moe.experts * sizeof *trainer->sums.expert_copies);
    trainer->sums.cross_entropy = trainer->sums.aux = trainer->sums.z = 0;
    trainer->reduced = false;
    trainer->report = (struct step_report){.step = trainer->mark.step};
    state_zero_gradients(trainer->state);
}

struct step_report trainer_step(struct trainer *trainer) {
    trainer->batch_seed = trainer->mark.seed;
    if (trainer->verifying) verify_batch(trainer);
    begin_step(trainer);
    trainer->began = seconds_now();
    run_lanes(trainer);
    state_gather(trainer->state);
    struct step_report *report = &trainer->report;
    report->seconds = seconds_now() - trainer->began;
    reduce_over_ranks(trainer, &report->seconds, 1, MPI_DOUBLE, MPI_MAX);
    report->tokens_per_s = (double)batch_sequences(&trainer->ranks) * trainer->seq_len / report->seconds;
    report_exposed(trainer);
    trainer->mark.step++;
    return *report;
}

/* ---- memory ------------------------------------------------------------------------------------------ */

void trainer_memory(struct trainer *trainer, struct memory_report *reports) {
    const struct state *state = trainer->state;
    struct memory_report own = {
        .predicted = trainer->expected_static + trainer->expected_peak,
        .as_run = trainer->expected_static + trainer->as_run_peak,
        .predicted_static = trainer->expected_static,
        .used_static = (double)(state->value_bytes + state->gradient_bytes + state->moment_bytes),
        .workspace = (double)(trainer->passing_peak + state->workspace_bytes),
        .host = (double)state->host_bytes,
    };
    own.used = own.used_static + (double)pool_use(trainer->pool).peak;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        own.workspace += (double)trainer->contexts[resource].scratch_peak;
    int doubles = (int)(sizeof own / sizeof(double));
    MPI_Allgather(&own, doubles, MPI_DOUBLE, reports, doubles, MPI_DOUBLE, trainer->comm);
}

/* ---- what a step really was -------------------------------------------------------------------------- */

/* Numbers that a rank of this group measured: start and end of each operation of its lanes, lane by lane,
   then the bytes of each activation. */
static int measurement_count(const struct trainer *trainer, int group) {
    int count = trainer->schedule->activation_count;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        count += 2 * lane_length(trainer, group, (enum resource)resource);
    return count;
}

static double *own_measurements(const struct trainer *trainer) {
    int group = trainer->seat.group, filled = 0;
    double *values = must_alloc((size_t)measurement_count(trainer, group) * sizeof *values + 1);
    for (int resource = 0; resource < RESOURCE_COUNT; resource++)
        for (int i = 0; i < lane_length(trainer, group, (enum resource)resource); i++) {
            values[filled++] = trainer->spans[resource][i].start;
            values[filled++] = trainer->spans[resource][i].end;
        }
    for (int a = 0; a < trainer->schedule->activation_count; a++) values[filled++] = trainer->taken[a];
    return values;
}

static void name_rank(const struct trainer *trainer, struct schedule *measured, int rank) {
    struct seat seat = seat_of(&trainer->ranks, rank);
    const struct group *group = &trainer->schedule->groups[seat.group];
    schedule_group(measured, rank, 1, group->static_bytes, "rank %d: %s, GPU %d", rank, group->name,
                   seat.index);
}

/* One operation on one lane of a rank: the two halves of a collective take each their own time. */
static int add_half(const struct trainer *trainer, struct schedule *measured, struct timeline *timeline,
                    int op, int lane, const double *span) {
    const struct operation *it = &trainer->schedule->ops[op];
    int group = lane / RESOURCE_COUNT;
    int half = schedule_compute(measured, (enum kind)it->kind, (enum pass)it->pass, it->layer,
                                it->micro_batch, group, span[1] - span[0]);
    measured->ops[half].lanes[0] = lane;
    measured->ops[half].bytes = it->bytes;
    timeline->start[half] = span[0];
    timeline->end[half] = span[1];
    return half;
}

static void add_measurements(const struct trainer *trainer, struct schedule *measured,
                             struct timeline *timeline, int rank, const double *values) {
    const struct schedule *schedule = trainer->schedule;
    int group = seat_of(&trainer->ranks, rank).group;
    /* Memory is taken by the receiving half of an operation and freed by the half that ends last. */
    size_t bytes = (size_t)schedule->op_count * sizeof(int) + 1;
    int *takes = must_alloc(bytes), *frees = must_alloc(bytes);
    for (int op = 0; op < schedule->op_count; op++) frees[op] = -1;
    for (int resource = 0; resource < RESOURCE_COUNT; resource++) {
        const struct lane *lane = &schedule->lanes[lane_of(group, (enum resource)resource)];
        for (int i = 0; i < lane->count; i++, values += 2) {
            int op = lane->ops[i], half = add_half(trainer, measured, timeline, op,
                                                   lane_of(rank, (enum resource)resource), values);
            takes[op] = half;
            if (frees[op] < 0 || timeline->end[frees[op]] < timeline->end[half]) frees[op] = half;
        }
    }
    for (int a = 0; a < schedule->activation_count; a++) {
        const struct activation *it = &schedule->activations[a];
        if (it->group != group) continue;
        int kept = schedule_keep(measured, rank, takes[it->producer], values[a]);
        schedule_role(measured, (enum role)it->role, it->layer, it->micro_batch);
        schedule_release(measured, kept, frees[it->freed_by]);
    }
    free(takes);
    free(frees);
}

/* Times from the first operation's start on. */
static void shift_to_zero(struct timeline *timeline, int count) {
    double first = INFINITY;
    for (int op = 0; op < count; op++) first = fmin(first, timeline->start[op]);
    for (int op = 0; op < count; op++) {
        timeline->start[op] -= first;
        timeline->end[op] -= first;
        timeline->makespan = fmax(timeline->makespan, timeline->end[op]);
    }
}

struct schedule *trainer_measured(struct trainer *trainer, struct timeline *timeline) {
    const struct ranks *ranks = &trainer->ranks;
    double *own = own_measurements(trainer);
    *timeline = (struct timeline){0};
    if (trainer->rank != 0) {
        MPI_Send(own, measurement_count(trainer, trainer->seat.group), MPI_DOUBLE, 0, 0, trainer->comm);
        free(own);
        return NULL;
    }
    struct schedule *measured =
        schedule_new(ranks->count, trainer->model->layers, trainer->schedule->micro_batches);
    size_t halves = 1;
    for (int rank = 0; rank < ranks->count; rank++)
        halves += (size_t)measurement_count(trainer, seat_of(ranks, rank).group) / 2;
    timeline->start = must_alloc(halves * sizeof(double));
    timeline->end = must_alloc(halves * sizeof(double));
    for (int rank = 0; rank < ranks->count; rank++) {
        int count = measurement_count(trainer, seat_of(ranks, rank).group);
        double *values = rank == 0 ? own : must_alloc((size_t)count * sizeof *values + 1);
        if (rank > 0) MPI_Recv(values, count, MPI_DOUBLE, rank, 0, trainer->comm, MPI_STATUS_IGNORE);
        name_rank(trainer, measured, rank);
        add_measurements(trainer, measured, timeline, rank, values);
        free(values);
    }
    shift_to_zero(timeline, measured->op_count);
    return measured;
}
