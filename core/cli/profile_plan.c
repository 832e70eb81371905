/*
disagmoe profile MANIFEST: what a plan's layers and transfers take here, beside what the cost model makes of
the rates measured, and beside a short real training.

Three figures of each component and of the whole step: by the cost model with the cluster file just measured
(the roofline), measured by itself (the table of costs), and in the run, where others share the machine and
the executor's own work comes on top. The whole step likewise: simulated with the cluster file, simulated with
the table, measured.
*/
#include "cli/profile.h"
#include "cli/together.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- components -------------------------------------------------------------------------------------- */

#define ONE(pass) (1 << PASS_##pass)

/* Operations of a schedule, and the costs that make up one of them. */
static const struct row {
    const char *name, *key;
    enum kind kind;
    int passes, counted; /* whose durations are added up; whose number divides the sum */
    enum resource lane;  /* on which a real rank measures it */
    bool in_run;         /* whether one of the run's operations is this alone */
    enum cost first;
    int costs;
} components[] = {
    {"attention forward", "attn_fwd", KIND_ATTENTION, ONE(FORWARD), ONE(FORWARD), RESOURCE_COMPUTE, true,
     COST_ATTN_FWD, 1},
    {"attention backward", "attn_bwd", KIND_ATTENTION, ONE(BACKWARD) | ONE(WEIGHT), ONE(BACKWARD),
     RESOURCE_COMPUTE, true, COST_ATTN_BWD, 2},
    {"ffn forward", "ffn_fwd", KIND_FFN, ONE(FORWARD), ONE(FORWARD), RESOURCE_COMPUTE, true, COST_FFN_FWD, 1},
    {"ffn backward", "ffn_bwd", KIND_FFN, ONE(BACKWARD) | ONE(WEIGHT), ONE(BACKWARD), RESOURCE_COMPUTE, true,
     COST_FFN_BWD, 2},
    {"dispatch", "dispatch", KIND_DISPATCH, ONE(FORWARD) | ONE(BACKWARD), ONE(FORWARD) | ONE(BACKWARD),
     RESOURCE_RECV, true, COST_DISPATCH, 1},
    {"combine", "combine", KIND_COMBINE, ONE(FORWARD) | ONE(BACKWARD), ONE(FORWARD) | ONE(BACKWARD),
     RESOURCE_RECV, true, COST_COMBINE, 1},
    {"point to point", "p2p", KIND_P2P, ONE(FORWARD) | ONE(BACKWARD), ONE(FORWARD) | ONE(BACKWARD),
     RESOURCE_RECV, true, COST_P2P, 1},
    {"embedding forward", "embed_fwd", KIND_EMBED, ONE(FORWARD), ONE(FORWARD), RESOURCE_COMPUTE, true,
     COST_EMBED_FWD, 1},
    {"embedding backward", "embed_bwd", KIND_EMBED, ONE(BACKWARD), ONE(BACKWARD), RESOURCE_COMPUTE, true,
     COST_EMBED_BWD, 1},
    {"head, both passes", "head", KIND_HEAD, ONE(FORWARD) | ONE(BACKWARD), ONE(FORWARD), RESOURCE_COMPUTE,
     true, COST_HEAD_FWD, 2},
    {"gradient reduction", "grad_sync", KIND_GRAD_SYNC, -1, -1, RESOURCE_SEND, false, COST_GRAD_SYNC, 1},
    {"parameter gathering", "param_gather", KIND_PARAM_GATHER, -1, -1, RESOURCE_SEND, false,
     COST_PARAM_GATHER, 1},
    {"optimizer", "optimizer", KIND_OPTIMIZER, -1, -1, RESOURCE_COMPUTE, false, COST_OPTIMIZER, 1},
};

/* Seconds of the mean operation; NAN without any. timeline NULL: as planned, else as measured, where a
   collective has a half on each of its lanes. */
static double seconds_in(const struct schedule *schedule, const struct timeline *timeline,
                         const struct row *component) {
    double sum = 0;
    int count = 0;
    for (int i = 0; i < schedule->op_count; i++) {
        const struct operation *op = &schedule->ops[i];
        if (op->kind != component->kind || !(component->passes & 1 << op->pass)) continue;
        if (timeline && op->lanes[0] % RESOURCE_COUNT != (int)component->lane) continue;
        sum += timeline ? timeline->end[i] - timeline->start[i] : op->duration;
        count += (component->counted & 1 << op->pass) != 0;
    }
    return count ? sum / count : NAN;
}

/* ---- what is measured for ---------------------------------------------------------------------------- */

struct session {
    struct profile *profile;
    const struct system *system;
    struct point *point;
    int given_dtype; /* of the manifest's model */
    struct plan plan;
    MPI_Comm comm;
    int rank;
    struct data *data;
    struct schedule *schedule;
    struct timeline planned;
    int head_parts; /* groups with a head */
    struct machine machine;
    struct spread costs[COST_COUNT];
    double roofline[COUNT(components)];
    struct spread in_run[COUNT(components)]; /* median NAN: not there */
    struct spread step;                      /* of the training */
    double by_costs, by_cluster, by_run;     /* the step simulated; by_run: with the run's own durations */
    cJSON *cluster_file, *costs_file;
    struct errors errors;
};

/* Of one operation: a head on several groups is one on each. */
static struct spread cost_of(const struct session *session, const struct row *component) {
    const struct spread *costs = session->costs;
    double parts = component->kind == KIND_HEAD ? session->head_parts : 1;
    struct spread sum = {0};
    for (int i = 0; i < component->costs; i++) {
        sum.median += costs[component->first + i].median / parts;
        sum.low += costs[component->first + i].low / parts;
        sum.high += costs[component->first + i].high / parts;
    }
    return sum;
}

#ifdef FLOATX_DOUBLE
enum { OWN_DTYPE = DTYPE_FP64 };
#else
enum { OWN_DTYPE = DTYPE_FP32 };
#endif

/* The point with the dtype that this program computes in, whichever the manifest has. */
static struct point *point_of(const struct experiment *experiment, int *given_dtype) {
    struct point *point = experiment->points[0].variants[0];
    if (given_dtype) *given_dtype = point->model->dtype;
    point->model->dtype = OWN_DTYPE;
    return point;
}

/* Reads the manifest and takes the one plan that is asked for. */
static bool load(struct session *session) {
    struct profile *profile = session->profile;
    struct experiment *experiment = &profile->experiment;
    struct errors *errors = &session->errors;
    const struct output outputs[] = {{"--cluster", profile->cluster}, {"--costs", profile->costs}};
    const char *manifest = profile->options.manifest;
    if (!load_experiment(&profile->options, experiment, errors)) return false;
    check_outputs(outputs, COUNT(outputs), experiment, errors);
    if (experiment->point_count != 1)
        errors_add(errors, manifest, "sweep", "found %d points; a single one is needed: choose with --set",
                   experiment->point_count);
    else if (experiment->points[0].system_count != 1)
        errors_add(errors, manifest, "systems", "found %d; a single one is needed: choose with --system",
                   experiment->points[0].system_count);
    if (errors->count) return false;
    session->point = point_of(experiment, &session->given_dtype);
    session->system = system_named(experiment->points[0].systems[0]);
    if (!(session->system->executors & EXECUTOR_CPU))
        errors_add(errors, manifest, "systems", "found %s, which is not run by the cpu executor",
                   session->system->name);
    if (session->point->table)
        errors_add(errors, manifest, "costs", "found a table; profile measures one, so none is allowed");
    return errors->count == 0;
}

/* A status; on one process alone, since a search takes its time. */
static int make_plan(struct session *session) {
    const struct profile *profile = session->profile;
    const char *manifest = profile->options.manifest;
    struct errors found = {0}, *errors = &session->errors;
    bool feasible = false;
    tune_point(session->system, session->point, &session->plan, &feasible, &found);
    add_point_errors(&profile->options, session->point, session->system, &found, errors);
    bool sound = found.count == 0;
    errors_free(&found);
    if (!sound) return STATUS_USAGE;
    if (!feasible) {
        errors_add(errors, manifest, NULL, "nothing fits the GPUs' memory for %s", session->system->name);
        return STATUS_FAILED;
    }
    if (session->plan.parallel.cp > 1)
        errors_add(errors, manifest, "parallel.cp",
                   "found %d; profile measures whole sequences: 1 is allowed", session->plan.parallel.cp);
    if (profile->cluster) file_is_writable(profile->cluster, errors);
    if (profile->costs) file_is_writable(profile->costs, errors);
    return errors->count ? STATUS_USAGE : STATUS_DONE;
}

/* Every rank holds embedding and head while these are measured. */
static double bytes_beside(const struct plan *plan) {
    return 4.0 * plan->gpus * model_embedding_parameters(plan->point->model) * sizeof(floatX);
}

int look_at_plan(struct profile *profile, int *ranks) {
    struct session session = {.profile = profile};
    int status = load(&session) ? make_plan(&session) : STATUS_USAGE;
    if (status == STATUS_DONE && !fits_this_machine("profile", session.system, &session.plan,
                                                    bytes_beside(&session.plan), &session.errors))
        status = STATUS_FAILED;
    *ranks = session.plan.gpus;
    errors_print(&session.errors, stderr);
    errors_free(&session.errors);
    return status;
}

/* ---- simulation -------------------------------------------------------------------------------------- */

/* The plan simulated with another value of one of the manifest's keys. NAN, with errors, where the manifest
   does not take it. */
static double simulate_with(struct session *session, const char *path, const cJSON *value, double *seconds) {
    struct options options = session->profile->options;
    struct arena *arena = arena_new();
    struct experiment experiment;
    double step_time = NAN;
    options.overrides[options.override_count++] = (struct override){path, json_text(arena, value)};
    if (load_experiment(&options, &experiment, &session->errors)) {
        struct plan plan = session->plan;
        struct result result;
        struct schedule *schedule;
        struct timeline timeline = {0};
        plan.point = point_of(&experiment, NULL);
        simulate_plan(session->system, &plan, &result, &schedule, &timeline);
        step_time = result.step_time;
        for (size_t i = 0; seconds && i < COUNT(components); i++)
            seconds[i] = seconds_in(schedule, NULL, &components[i]);
        schedule_free(schedule);
        timeline_free(&timeline);
    }
    experiment_free(&experiment);
    arena_free(arena);
    return step_time;
}

/* ---- on all ranks ------------------------------------------------------------------------------------ */

static bool build(struct session *session) {
    session->data = open_data(session->point, &session->errors);
    if (!agree(session->comm, &session->errors)) return false;
    session->schedule = session->system->build(&session->plan);
    if (!schedule_arrange(session->schedule, &session->planned) ||
        !schedule_validate(session->schedule, &session->errors))
        errors_add(&session->errors, NULL, "schedule", "%s cannot be executed", session->system->name);
    return agree(session->comm, &session->errors);
}

/* Ranks on one host may stand for any nodes; on several, nodes are what they are. */
static void check_shape(struct session *session) {
    const struct machine *machine = &session->machine;
    const struct cluster *cluster = session->point->cluster;
    int here = machine->ranks / machine->hosts;
    if (machine->hosts > 1 && (cluster->nodes != machine->hosts || cluster->gpus_per_node != here))
        errors_add(
            &session->errors, session->profile->options.manifest, "cluster",
            "found nodes %d, gpus_per_node %d; the ranks stand on %d hosts, %d on each: start them like "
            "the cluster, or set cluster.nodes and cluster.gpus_per_node",
            cluster->nodes, cluster->gpus_per_node, machine->hosts, here);
}

static bool measure(struct session *session, const struct ranks *ranks) {
    const struct measurement measurement = {&session->plan, ranks, session->comm, session->profile->repeats};
    session->head_parts = ranks->head_count;
    session->machine.repeats = session->profile->repeats;
    measure_kernels(&measurement, &session->machine); /* first: a single rank's links are told by them */
    if (measure_network(&measurement, &session->machine, &session->errors)) check_shape(session);
    if (!agree(session->comm, &session->errors)) return false;
    describe_machine(&session->machine);
    measure_layers(&measurement, session->costs);
    measure_transfers(&measurement, session->costs);
    measure_step_end(&measurement, session->costs);
    return true;
}

/* What the step that was done last was made of. */
static void add_sample(struct session *session, struct trainer *trainer, int sample, double *samples) {
    struct timeline timeline = {0};
    struct schedule *measured = trainer_measured(trainer, &timeline);
    if (!measured) return;
    for (size_t i = 0; i < COUNT(components); i++)
        samples[i * (size_t)session->profile->steps + (size_t)sample] =
            components[i].in_run ? seconds_in(measured, &timeline, &components[i]) : NAN;
    schedule_free(measured);
    timeline_free(&timeline);
}

/* A short real training; its first step is not counted. */
static bool train(struct session *session) {
    int steps = session->profile->steps, counted = steps - 1;
    size_t rows = COUNT(components);
    struct trainer *trainer = trainer_new(&session->plan, session->schedule, &session->planned, session->data,
                                          (uint64_t)session->point->seed, session->comm, &session->errors);
    if (!agree(session->comm, &session->errors) || !trainer) return false;
    double *samples = must_alloc((rows + 1) * (size_t)steps * sizeof *samples);
    double *whole = samples + rows * (size_t)steps;
    bool finite = true;
    for (int step = 0; step < steps && finite; step++) {
        struct step_report report = trainer_step(trainer);
        finite = report.finite;
        if (step == 0 || !finite) continue;
        whole[step - 1] = report.seconds;
        add_sample(session, trainer, step - 1, samples);
    }
    if (finite) session->step = spread_of(whole, counted);
    for (size_t i = 0; finite && session->rank == 0 && i < rows; i++)
        session->in_run[i] = isnan(samples[i * (size_t)steps])
                                 ? (struct spread){NAN, NAN, NAN}
                                 : spread_of(samples + i * (size_t)steps, counted);
    free(samples);
    trainer_free(trainer);
    if (!finite)
        errors_add(
            &session->errors, NULL, "profile",
            "loss or gradient is not finite in the training steps; a smaller train.learning_rate may help");
    return agree(session->comm, &session->errors);
}

/* ---- report ------------------------------------------------------------------------------------------ */

static void time_text(double seconds, char *buffer, size_t size) {
    if (isnan(seconds))
        snprintf(buffer, size, "-");
    else if (seconds < 1e-3)
        snprintf(buffer, size, "%.1f us", seconds * 1e6);
    else if (seconds < 1)
        snprintf(buffer, size, "%.2f ms", seconds * 1e3);
    else
        snprintf(buffer, size, "%.2f s", seconds);
}

static void print_time(double seconds) {
    char text[32];
    time_text(seconds, text, sizeof text);
    printf(" %10s", text);
}

static void print_ratio(double a, double b) {
    if (a > 0 && b > 0)
        printf(" %8.2f", a / b);
    else
        printf(" %8s", "-");
}

static void print_heading(const struct session *session) {
    const struct machine *machine = &session->machine;
    struct text text = {0};
    text_add(&text, "%s, %s: %d rank%s on %d host%s of %d processor%s (%s), %s; medians of %d",
             session->point->name, session->system->name, machine->ranks, machine->ranks > 1 ? "s" : "",
             machine->hosts, machine->hosts > 1 ? "s" : "", machine->processors,
             machine->processors > 1 ? "s" : "", machine->cpu, sizeof(floatX) == 4 ? "fp32" : "fp64",
             machine->repeats);
    print_wrapped(text.text, stdout);
    free(text.text);
    if (session->given_dtype != OWN_DTYPE)
        printf("note: model.dtype is %s; this program computes in %s, and figures are of that\n",
               choice_word(session->profile->arena, DTYPE_CHOICES, session->given_dtype),
               choice_word(session->profile->arena, DTYPE_CHOICES, OWN_DTYPE));
    int here = machine->ranks / machine->hosts;
    if (here <= machine->processors) return;
    text = (struct text){0};
    text_add(
        &text,
        "note: %d ranks share %d processor%s. A figure is what one rank gets while all are at work. In the "
        "run some wait, and the others compute faster; but who has something to do may have to wait for a "
        "processor, which no simulation knows of. So simulated and measured steps need not agree here.",
        here, machine->processors, machine->processors > 1 ? "s" : "");
    print_wrapped(text.text, stdout);
    free(text.text);
}

static void print_table(const struct session *session) {
    print_heading(session);
    printf("\n%-20s %10s %10s %10s %10s %8s\n", "component", "roofline", "measured", "least", "most",
           "roof/mea");
    for (size_t i = 0; i < COUNT(components); i++) {
        struct spread cost = cost_of(session, &components[i]);
        bool used = !isnan(session->roofline[i]);
        printf("%-20s", components[i].name);
        print_time(session->roofline[i]);
        print_time(cost.median);
        print_time(cost.low);
        print_time(cost.high);
        print_ratio(session->roofline[i], cost.median);
        printf("%s\n", used ? "" : " unused");
    }
    printf("\n%-20s %10s %10s %10s %10s %8s\n", "in the run", "measured", "in run", "least", "most",
           "mea/run");
    for (size_t i = 0; i < COUNT(components); i++) {
        if (isnan(session->in_run[i].median)) continue;
        double measured = cost_of(session, &components[i]).median;
        printf("%-20s", components[i].name);
        print_time(measured);
        print_time(session->in_run[i].median);
        print_time(session->in_run[i].low);
        print_time(session->in_run[i].high);
        print_ratio(measured, session->in_run[i].median);
        printf("\n");
    }
    printf("\n%-42s %10s %10s %8s\n", "whole step", "seconds", "", "sim/mea");
    printf("%-42s", "measured, median of training steps");
    print_time(session->step.median);
    printf("\n%-42s", "  least and most");
    print_time(session->step.low);
    print_time(session->step.high);
    printf("\n%-42s", "simulated with the table of costs");
    print_time(session->by_costs);
    printf(" %10s", "");
    print_ratio(session->by_costs, session->step.median);
    printf("\n%-42s", "simulated with the cluster file");
    print_time(session->by_cluster);
    printf(" %10s", "");
    print_ratio(session->by_cluster, session->step.median);
    printf("\n%-42s", "simulated with the run's own durations");
    print_time(session->by_run);
    printf(" %10s", "");
    print_ratio(session->by_run, session->step.median);
    printf("\n");
    print_wrapped("What the run's own durations leave unexplained lies between operations: threads and ranks "
                  "that hand over to one another.",
                  stdout);
}

static void add_spread(cJSON *object, const char *key, struct spread spread) {
    cJSON *entry = cJSON_AddObjectToObject(object, key);
    json_add_number(entry, "median", spread.median);
    json_add_number(entry, "low", spread.low);
    json_add_number(entry, "high", spread.high);
}

/* Takes the session's files. */
static void print_json(struct session *session) {
    const struct machine *machine = &session->machine;
    cJSON *object = cJSON_CreateObject(), *list, *step;
    cJSON_AddStringToObject(object, "name", session->point->name);
    cJSON_AddStringToObject(object, "system", session->system->name);
    cJSON_AddStringToObject(object, "model", session->point->model->name);
    json_add_number(object, "seq_len", session->point->seq_len);
    json_add_number(object, "micro_batch_size", session->point->micro_batch_size);
    json_add_number(object, "micro_batches", session->plan.micro_batches);
    cJSON_AddStringToObject(object, "precision", sizeof(floatX) == 4 ? "fp32" : "fp64");
    json_add_number(object, "seed", session->point->seed);
    cJSON_AddStringToObject(object, "version", VERSION);
    json_add_number(object, "ranks", machine->ranks);
    json_add_number(object, "hosts", machine->hosts);
    json_add_number(object, "processors", machine->processors);
    cJSON_AddStringToObject(object, "cpu", machine->cpu);
    json_add_number(object, "repeats", machine->repeats);
    list = cJSON_AddArrayToObject(object, "components");
    for (size_t i = 0; i < COUNT(components); i++) {
        cJSON *entry = cJSON_CreateObject();
        cJSON_AddStringToObject(entry, "component", components[i].key);
        json_add_number(entry, "roofline_s", session->roofline[i]);
        add_spread(entry, "measured_s", cost_of(session, &components[i]));
        add_spread(entry, "in_run_s", session->in_run[i]);
        cJSON_AddItemToArray(list, entry);
    }
    step = cJSON_AddObjectToObject(object, "step");
    json_add_number(step, "steps", session->profile->steps - 1);
    add_spread(step, "measured_s", session->step);
    json_add_number(step, "simulated_with_costs_s", session->by_costs);
    json_add_number(step, "simulated_with_cluster_s", session->by_cluster);
    json_add_number(step, "simulated_with_run_s", session->by_run);
    cJSON_AddItemToObject(object, "cluster", session->cluster_file);
    cJSON_AddItemToObject(object, "costs", session->costs_file);
    session->cluster_file = session->costs_file = NULL;
    print_json_line(object, stdout);
}

/* ---- files ------------------------------------------------------------------------------------------- */

static void make_files(struct session *session) {
    const struct machine *machine = &session->machine;
    struct text source = {0};
    text_add(&source,
             "Measured by disagmoe profile %s: %s, %s, %d x %d tokens a micro-batch and attention rank; "
             "medians of %d; "
             "%d ranks at once, a thread each, on %d host%s with %d processor%s, %s, %s",
             VERSION, session->point->model->name, session->system->name, session->point->micro_batch_size,
             session->point->seq_len, machine->repeats, machine->ranks, machine->hosts,
             machine->hosts > 1 ? "s" : "", machine->processors, machine->processors > 1 ? "s" : "",
             machine->cpu, sizeof(floatX) == 4 ? "fp32" : "fp64");
    session->costs_file = costs_table(session->costs, source.text);
    session->cluster_file = machine_cluster(machine, session->point->cluster, "measured");
    free(source.text);
}

static void write_file(struct session *session, const char *file, const cJSON *value) {
    if (!file) return;
    char *text = cJSON_Print(value);
    struct text whole = {0};
    text_add(&whole, "%s\n", text);
    file_write_atomic(file, whole.text, whole.length, &session->errors);
    cJSON_free(text);
    free(whole.text);
}

/* The table of costs, with what the run's operations took where one of them is a component alone. */
static double simulate_run(struct session *session) {
    struct spread costs[COST_COUNT];
    memcpy(costs, session->costs, sizeof costs);
    for (size_t i = 0; i < COUNT(components); i++) {
        const struct row *row = &components[i];
        if (!row->in_run) continue;
        for (int k = 0; k < row->costs; k++) costs[row->first + k].median = 0;
        if (!isnan(session->in_run[i].median))
            costs[row->first].median =
                session->in_run[i].median * (row->kind == KIND_HEAD ? session->head_parts : 1);
    }
    cJSON *table = costs_table(costs, "the run");
    double seconds = simulate_with(session, "costs", table, NULL);
    cJSON_Delete(table);
    return seconds;
}

/* On rank 0. */
static void conclude(struct session *session) {
    make_files(session);
    session->by_costs = simulate_with(session, "costs", session->costs_file, NULL);
    session->by_cluster = simulate_with(session, "cluster", session->cluster_file, session->roofline);
    session->by_run = simulate_run(session);
    if (session->errors.count) return;
    write_file(session, session->profile->cluster, session->cluster_file);
    write_file(session, session->profile->costs, session->costs_file);
    if (session->profile->options.json)
        print_json(session);
    else
        print_table(session);
}

/* ---- all of it --------------------------------------------------------------------------------------- */

static int plan_together(struct session *session) {
    int size, status = STATUS_DONE;
    load(session);
    if (!agree(session->comm, &session->errors)) return STATUS_USAGE;
    if (session->rank == 0) status = make_plan(session);
    MPI_Bcast(&status, 1, MPI_INT, 0, session->comm);
    if (!agree(session->comm, &session->errors) || status != STATUS_DONE) return status;
    MPI_Bcast(&session->plan, sizeof session->plan, MPI_BYTE, 0, session->comm);
    session->plan.point = session->point;
    MPI_Comm_size(session->comm, &size);
    if (size != session->plan.gpus)
        errors_add(&session->errors, session->profile->options.manifest, NULL,
                   "%s: found %d rank%s; the plan needs %d: one a GPU", session->system->name, size,
                   size > 1 ? "s" : "", session->plan.gpus);
    return agree(session->comm, &session->errors) ? STATUS_DONE : STATUS_USAGE;
}

int measure_plan(struct profile *profile, MPI_Comm world) {
    struct session session = {.profile = profile, .comm = world};
    struct arena *arena = arena_new();
    struct ranks ranks;
    MPI_Comm_rank(world, &session.rank);
    int status = plan_together(&session);
    if (status == STATUS_DONE && !build(&session)) status = STATUS_FAILED;
    if (status == STATUS_DONE) {
        ranks_read(&ranks, &session.plan, session.schedule, arena, &session.errors);
        if (!agree(world, &session.errors)) status = STATUS_FAILED;
    }
    if (status == STATUS_DONE && (!measure(&session, &ranks) || !train(&session))) status = STATUS_FAILED;
    if (status == STATUS_DONE) {
        if (session.rank == 0) conclude(&session);
        if (!agree(world, &session.errors)) status = STATUS_FAILED;
    }
    cJSON_Delete(session.cluster_file);
    cJSON_Delete(session.costs_file);
    if (session.schedule) schedule_free(session.schedule);
    timeline_free(&session.planned);
    data_free(session.data);
    arena_free(arena);
    return status;
}
