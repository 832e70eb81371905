/*
disagmoe train: runs a manifest's schedules for real, one rank a GPU of the plan.

Started alone, this process is the launcher: it reads and plans everything, so that what is wrong is said
before anything starts, and then starts mpirun for one run (a system at a point) after the other. Under mpirun
or srun it is a rank, and the runs follow one another in the one world; ranks that a run has no use for wait.

Ranks decide together: what any of them finds wrong ends all of them with the same status, and the first that
found something says it.
*/
#include "cli/cli.h"
#include "cli/launch.h"
#include "cli/together.h"
#include "cli/watch.h"
#include "train/train.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef FLOATX_DOUBLE
enum { OWN_DTYPE = DTYPE_FP64 };
static const char OWN_PRECISION[] = "fp64", OTHER_PROGRAM[] = "disagmoe in fp32";
static const double OWN_TOLERANCE = 1e-10;
#else
enum { OWN_DTYPE = DTYPE_FP32 };
static const char OWN_PRECISION[] = "fp32", OTHER_PROGRAM[] = "disagmoe-double in fp64";
static const double OWN_TOLERANCE = 1e-4;
#endif

static const double BF16_TOLERANCE = 0.05, TIMEOUT = 600;

#define MAX_IMPORTS 64

/* ---- options ----------------------------------------------------------------------------------------- */

struct train {
    struct options options;
    int steps, every; /* 0: not given */
    const char *data, *checkpoint, *resume;
    const char *imports[MAX_IMPORTS];
    int import_count;
    bool verify, reference;
    double tolerance; /* below 0: not given */
    double timeout;   /* seconds of silence that end a run; 0: never */
    struct experiment experiment;
    const char
        *other_dtypes;   /* a note on models of another dtype than what computes here; NULL: there are none */
    struct pulse *pulse; /* of this rank; NULL: of the launcher */
    struct arena *arena;
};

/* --import may come several times, and with commas: every one counts, not only the last. */
static bool take_imports(struct train *train, char **argv, int argc) {
    static const char name[] = "--import";
    for (int i = 0; i < argc; i++) {
        const char *value = NULL;
        if (strncmp(argv[i], name, sizeof name - 1) != 0) continue;
        if (argv[i][sizeof name - 1] == '=') value = argv[i] + sizeof name;
        if (argv[i][sizeof name - 1] == '\0' && i + 1 < argc) value = argv[++i];
        if (!value) continue;
        char *list = arena_strdup(train->arena, value), *rest = list;
        for (char *file; (file = strsep(&rest, ","));) {
            if (!*file) continue;
            if (train->import_count == MAX_IMPORTS) {
                fprintf(stderr, "disagmoe: train: --import takes at most %d files\n", MAX_IMPORTS);
                return false;
            }
            train->imports[train->import_count++] = file;
        }
    }
    return true;
}

/* Leaves the number as it is where the option is not given. */
static bool take_real(const char *option, const char *text, double *number) {
    if (!text) return true;
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value) || value < 0) {
        fprintf(stderr, "disagmoe: train: %s: a number from 0 on is needed, found %s\n", option, text);
        return false;
    }
    *number = value;
    return true;
}

static bool check_options(const struct train *train) {
    const char *wrong = NULL;
    if (train->resume && train->import_count) wrong = "--resume and --import exclude each other";
    if (train->every && !train->checkpoint) wrong = "--every needs --checkpoint";
    if (train->reference && train->resume) wrong = "--reference begins at step 0; --resume excludes it";
    if (wrong) fprintf(stderr, "disagmoe: train: %s; see 'disagmoe train --help'\n", wrong);
    return !wrong;
}

static bool parse(struct train *train, int argc, char **argv, bool *helped) {
    struct options *options = &train->options;
    const char *tolerance = NULL, *timeout = NULL, *import = NULL;
    train->tolerance = -1;
    train->timeout = TIMEOUT;
    const struct option_rule rules[] = {
        {"--system", &options->system, NULL, NULL},     {"--json", NULL, NULL, &options->json},
        {"--jsonl", &options->jsonl, NULL, NULL},       {"--trace", &options->trace, NULL, NULL},
        {"--steps", NULL, &train->steps, NULL},         {"--every", NULL, &train->every, NULL},
        {"--data", &train->data, NULL, NULL},           {"--checkpoint", &train->checkpoint, NULL, NULL},
        {"--resume", &train->resume, NULL, NULL},       {"--import", &import, NULL, NULL},
        {"--verify", NULL, NULL, &train->verify},       {"--tolerance", &tolerance, NULL, NULL},
        {"--reference", NULL, NULL, &train->reference}, {"--timeout", &timeout, NULL, NULL}};
    if (!parse_options(&verb_train, argc, argv, rules, COUNT(rules), options, &options->manifest, helped))
        return false;
    if (*helped) return true;
    return !is_missing(&verb_train, options->manifest, "a manifest") && take_imports(train, argv, argc) &&
           take_real("--tolerance", tolerance, &train->tolerance) &&
           take_real("--timeout", timeout, &train->timeout) && check_options(train);
}

/* ---- runs -------------------------------------------------------------------------------------------- */

/* Stands in for a system: the single-process training step, which has no schedule. */
static const struct system single_process = {.name = "reference", .executors = EXECUTOR_CPU};

struct run {
    const struct point *point;
    const struct system *system;
    struct plan plan;
    const char *name; /* of its folder of checkpoints, where there are several runs */
};

struct runs {
    struct run *list;
    int count;
    bool several; /* of the manifest: the launcher has ranks do one at a time */
};

/* Every model is trained in what this program was compiled for. */
static void set_dtype(struct train *train, struct model *model) {
    if (model->dtype == OWN_DTYPE) return;
    if (!train->other_dtypes)
        train->other_dtypes =
            arena_printf(train->arena, "%s: model.dtype: found %s for %s; this program computes in %s, %s",
                         train->options.manifest, choice_word(train->arena, DTYPE_CHOICES, model->dtype),
                         model->name, OWN_PRECISION, OTHER_PROGRAM);
    model->dtype = OWN_DTYPE;
}

/* The manifest with what the command line changes. */
static bool load(struct train *train, struct errors *errors) {
    const struct output outputs[] = {{"--jsonl", train->options.jsonl}, {"--trace", train->options.trace}};
    struct experiment *experiment = &train->experiment;
    if (!load_experiment(&train->options, experiment, errors)) return false;
    for (int i = 0; i < experiment->point_count; i++)
        for (int k = -1; k < experiment->points[i].system_count; k++) {
            struct point *point = k < 0 ? &experiment->points[i] : experiment->points[i].variants[k];
            set_dtype(train, point->model);
            if (train->steps) point->training.steps = train->steps;
            if (train->data) point->training.data = train->data;
        }
    int before = errors->count;
    check_outputs(outputs, COUNT(outputs), experiment, errors);
    return errors->count == before;
}

static struct runs list_runs(const struct train *train) {
    const struct experiment *experiment = &train->experiment;
    struct runs runs = {0};
    for (int i = 0; i < experiment->point_count; i++)
        runs.count += experiment->points[i].system_count + train->reference;
    runs.list = arena_alloc(train->arena, (size_t)runs.count * sizeof *runs.list);
    struct run *run = runs.list;
    for (int i = 0; i < experiment->point_count; i++)
        for (int k = train->reference ? -1 : 0; k < experiment->points[i].system_count; k++, run++) {
            run->point = k < 0 ? &experiment->points[i] : experiment->points[i].variants[k];
            run->system = k < 0 ? &single_process : system_named(experiment->points[i].systems[k]);
            run->name = experiment->point_count > 1
                            ? arena_printf(train->arena, "%s-%d", run->system->name, i)
                            : run->system->name;
        }
    /* The reference has no checkpoints and no trace to keep apart. */
    runs.several = runs.count - (train->reference ? experiment->point_count : 0) > 1;
    return runs;
}

/* Those that this rank is to do. */
static struct runs own_runs(const struct train *train) {
    struct runs runs = list_runs(train);
    int only = launch_run();
    if (only < 0 || only >= runs.count) return runs;
    return (struct runs){&runs.list[only], 1, runs.several};
}

/* DIR itself for a single run; for several, each its own folder below. */
static const char *folder_of(const struct train *train, const struct runs *runs, const struct run *run,
                             const char *folder) {
    return folder && runs->several ? arena_printf(train->arena, "%s/%s", folder, run->name) : folder;
}

/* Several runs may also resume from one and the same checkpoint. */
static const char *resume_of(const struct train *train, const struct runs *runs, const struct run *run) {
    const char *own = folder_of(train, runs, run, train->resume);
    return own && access(own, F_OK) == 0 ? own : train->resume;
}

/* What is not wrong, but may not be what was meant. */
static void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs(LAUNCH_NOTE, stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
}

/* How many sequences micro-batches hold is a layout's affair, which this run has none of. */
static bool plan_reference(struct run *run, struct errors *errors) {
    const struct point *point = run->point;
    run->plan = (struct plan){.point = point, .replicas = 1, .gpus = 1, .sequences = point->global_batch};
    if (!point->global_batch)
        errors_add(errors, NULL, "micro_batches", "--reference needs a manifest with global_batch instead");
    return point->global_batch > 0;
}

/* Makes the run's plan and looks at its data. A status, with errors where it is not 0. */
static int plan_run(const struct train *train, struct run *run, struct errors *errors) {
    struct errors found = {0};
    bool feasible = false;
    if (run->system == &single_process)
        feasible = plan_reference(run, &found);
    else if (!(run->system->executors & EXECUTOR_CPU))
        errors_add(&found, NULL, NULL, "is not run by the cpu executor");
    else
        tune_point(run->system, run->point, &run->plan, &feasible, &found);
    int before = errors->count;
    data_free(open_data(run->point, errors));
    bool sound = found.count == 0 && errors->count == before;
    int status = !sound ? STATUS_USAGE : feasible ? STATUS_DONE : STATUS_FAILED;
    if (status == STATUS_FAILED)
        errors_add(errors, train->options.manifest, NULL, "nothing fits the GPUs' memory for %s",
                   run->system->name);
    add_point_errors(&train->options, run->point, run->system, &found, errors);
    errors_free(&found);
    return status;
}

/* Values and both moments. */
static double checkpoint_bytes(const struct run *run) {
    double moments = run->plan.memory.moments == PRECISION_BF16 ? 2 : sizeof(floatX);
    return model_parameter_count(run->point->model).total * ((double)sizeof(floatX) + 2 * moments);
}

/* What a run needs only at its end, or after hours, is looked at before it begins. */
static bool check_files(const struct train *train, const struct runs *runs, struct errors *errors) {
    const char *trace = train->options.trace;
    int before = errors->count;
    if (trace && runs->several)
        errors_add(errors, NULL, "--trace",
                   "found %d runs; a single one is needed: choose with --set and --system", runs->count);
    if (trace) file_is_writable(trace, errors);
    if (train->resume && access(train->resume, F_OK) != 0)
        errors_add(errors, train->resume, NULL, "cannot be read: %s", strerror(errno));
    for (int i = 0; i < runs->count; i++) {
        const struct run *run = &runs->list[i];
        const char *folder = folder_of(train, runs, run, train->checkpoint);
        if (!folder || run->system == &single_process) continue;
        if (checkpoint_folder_check(folder, checkpoint_bytes(run), errors))
            folder_lock_is_free(folder, errors);
    }
    return errors->count == before;
}

static int plan_runs(const struct train *train, struct runs *runs, struct errors *errors) {
    int worst = STATUS_DONE;
    for (int i = 0; i < runs->count; i++) {
        int status = plan_run(train, &runs->list[i], errors);
        if (status > worst) worst = status;
    }
    return worst == STATUS_DONE && !check_files(train, runs, errors) ? STATUS_USAGE : worst;
}

/* A file of lines begins anew, unless a run goes on. */
static bool begin_lines(const struct train *train, struct errors *errors) {
    const char *file = train->options.jsonl;
    if (!file) return true;
    if (!make_folder_of(file, errors)) return false;
    FILE *stream = fopen(file, train->resume ? "a" : "w");
    if (!stream) errors_add(errors, file, NULL, "cannot be written: %s", strerror(errno));
    if (stream) fclose(stream);
    return stream != NULL;
}

/* ---- one run, on each of its ranks ------------------------------------------------------------------- */

struct session {
    const struct train *train;
    const struct run *run;
    const char *checkpoints, *resume;
    MPI_Comm comm;
    int rank;
    struct data *data;
    struct folder_lock *lock; /* of the checkpoints' folder, on rank 0 */
    struct schedule *schedule;
    struct timeline planned;
    struct trainer *trainer;
    struct training_report report;
    struct step_report last;
    int64_t done; /* steps of this session */
    struct errors errors;
    struct arena *arena;
};

static bool build_schedule(struct session *session) {
    session->schedule = session->run->system->build(&session->run->plan);
    if (!schedule_arrange(session->schedule, &session->planned) ||
        !schedule_validate(session->schedule, &session->errors))
        errors_add(&session->errors, NULL, "schedule", "%s cannot be executed", session->run->system->name);
    return agree(session->comm, &session->errors);
}

static bool open_lines(struct session *session) {
    const char *file = session->train->options.jsonl;
    if (file && session->rank == 0) {
        session->report.lines = fopen(file, "a");
        if (!session->report.lines)
            errors_add(&session->errors, file, NULL, "cannot be written: %s", strerror(errno));
    }
    return agree(session->comm, &session->errors);
}

/* Every rank writes there, rank 0 on behalf of all keeps other runs out. */
static bool take_folder(struct session *session) {
    if (!session->checkpoints) return true;
    checkpoint_folder_check(session->checkpoints, 0, &session->errors);
    if (!agree(session->comm, &session->errors)) return false;
    if (session->rank == 0) session->lock = folder_lock_take(session->checkpoints, &session->errors);
    if (session->lock) launch_hold(folder_lock_file(session->lock));
    return agree(session->comm, &session->errors);
}

static void leave_folder(struct session *session) {
    launch_hold(NULL);
    folder_lock_release(session->lock);
}

static void note_seed(const struct session *session, uint64_t seed) {
    int given = session->run->point->seed;
    if (session->rank == 0 && seed != (uint64_t)given)
        note("%s: goes on with the checkpoint's seed %llu, not with the manifest's %d", session->resume,
             (unsigned long long)seed, given);
}

/* Parameters of another origin than the seed. A status. */
static int fill_parameters(struct session *session) {
    const struct train *train = session->train;
    struct state *state = trainer_state(session->trainer);
    struct progress_mark mark = {0};
    if (train->import_count || session->resume)
        pulse_set(train->pulse, 0, PULSE_WORK, "reading %s",
                  session->resume ? session->resume : "parameters");
    if (train->import_count &&
        !parameters_import(&state->parameters, state->values, train->imports, train->import_count,
                           &session->errors) &&
        !session->errors.count)
        errors_add(&session->errors, train->imports[0], NULL, "cannot be imported");
    if (!agree(session->comm, &session->errors)) return STATUS_USAGE;
    if (!session->resume) return STATUS_DONE;
    bool read = checkpoint_read(state, session->comm, session->resume, &mark, &session->errors);
    if (!agree(session->comm, &session->errors) || !read) return STATUS_USAGE;
    note_seed(session, mark.seed);
    trainer_resume(session->trainer, mark);
    return STATUS_DONE;
}

/* A status: everything stands, or what is in the way has been said. */
static int prepare(struct session *session) {
    const struct run *run = session->run;
    session->data = open_data(run->point, &session->errors);
    if (!agree(session->comm, &session->errors) || !take_folder(session)) return STATUS_USAGE;
    if (!build_schedule(session) || !open_lines(session)) return STATUS_FAILED;
    session->trainer = trainer_new(&run->plan, session->schedule, &session->planned, session->data,
                                   (uint64_t)run->point->seed, session->comm, &session->errors);
    if (!agree(session->comm, &session->errors) || !session->trainer) return STATUS_FAILED;
    trainer_watch(session->trainer, session->train->pulse);
    int status = fill_parameters(session);
    if (status == STATUS_DONE && session->train->verify) trainer_verify(session->trainer);
    return status;
}

static void begin_report(struct session *session) {
    session->report.system = session->run->system;
    session->report.plan = &session->run->plan;
    session->report.entropy = data_entropy(session->data);
    session->report.json = session->train->options.json;
    session->report.precision = OWN_PRECISION;
    session->report.seed =
        session->trainer ? trainer_mark(session->trainer).seed : (uint64_t)session->run->point->seed;
    if (session->rank == 0) training_report_begin(&session->report);
}

/* printf shows a NaN's sign, which means nothing. */
static double unsigned_nan(double value) {
    return isnan(value) ? (double)NAN : value;
}

static void say_not_finite(const struct session *session) {
    const struct step_report *last = &session->last;
    fprintf(stderr,
            "disagmoe: train: rank %d: %s is not finite in step %lld (cross-entropy %g, gradient norm %g, "
            "learning rate %g); nothing of this step is kept\n",
            last->bad_rank, isfinite(last->losses.total) ? "gradient" : "loss", (long long)last->step,
            unsigned_nan(last->losses.cross_entropy), unsigned_nan(last->grad_norm), last->learning_rate);
}

static bool save(struct session *session) {
    struct progress_mark mark = trainer_mark(session->trainer);
    pulse_set(session->train->pulse, 0, PULSE_WORK, "writing a checkpoint");
    bool written = checkpoint_write(trainer_state(session->trainer), session->comm, session->checkpoints,
                                    mark, &session->errors);
    if (!agree(session->comm, &session->errors) || !written) return false;
    if (session->rank == 0)
        training_report_checkpoint(
            &session->report,
            arena_printf(session->arena, "%s/step-%08lld", session->checkpoints, (long long)mark.step));
    return true;
}

/* Steps up to the manifest's number. A run whose state could not be saved ends: it was asked to be safe. */
static bool train_on(struct session *session) {
    const struct train *train = session->train;
    int64_t steps = session->run->point->training.steps;
    for (int64_t step = trainer_mark(session->trainer).step; step < steps; step++) {
        launch_step(step);
        pulse_set(train->pulse, 0, PULSE_WORK, "beginning the step");
        session->last = trainer_step(session->trainer);
        if (!session->last.finite) {
            if (session->rank == 0) say_not_finite(session);
            return false;
        }
        session->done++;
        if (session->rank == 0) training_report_step(&session->report, &session->last);
        bool due = step + 1 == steps || (train->every && (step + 1) % train->every == 0);
        if (session->checkpoints && due && !save(session)) return false;
    }
    return true;
}

static bool trace(struct session *session) {
    const char *file = session->train->options.trace;
    if (!file || !session->done) return true;
    struct timeline measured = {0};
    struct schedule *schedule = trainer_measured(session->trainer, &measured);
    if (session->rank == 0) {
        schedule_write_trace(schedule, &measured, session->run->system->name, file, &session->errors);
        schedule_free(schedule);
        timeline_free(&measured);
    }
    return agree(session->comm, &session->errors);
}

/* Gradients that are added up in BF16 keep 8 bits of each sum. Where M like micro-batches are, the j-th
   addition's variance is at most a quarter of its last place squared, (2⁻⁷ j)² ÷ 4 of one's gradient, and at
   most what is added times that place: in all M ÷ (3 · 2¹⁶) of the sum's square, and no more than 2⁻⁸. Five
   deviations. */
static double tolerance_of(const struct session *session) {
    const struct plan *plan = &session->run->plan;
    if (session->train->tolerance >= 0) return session->train->tolerance;
    if (plan->memory.grads != PRECISION_BF16) return OWN_TOLERANCE;
    return fmax(BF16_TOLERANCE, 5 * sqrt(fmin(plan->micro_batches / (3 * 0x1p16), 0x1p-8)));
}

/* What was verified is rank 0's on all ranks. */
static bool verify(struct session *session, int ranks) {
    double tolerance = tolerance_of(session);
    struct verification found = trainer_verification(session->trainer);
    bool equal = found.loss_rel <= tolerance && found.grad_rel <= tolerance;
    if (!session->done)
        errors_add(&session->errors, NULL, "--verify", "no step is left to do, so nothing was verified");
    else if (session->rank == 0)
        training_report_verdict(&session->report, &found, tolerance, ranks);
    if (session->done && !equal)
        errors_add(
            &session->errors, "train", session->run->system->name,
            "differs from the single-process reference: loss by %.2g, gradients by %.2g (%s); allowed is "
            "%g",
            found.loss_rel, found.grad_rel, found.worst_parameter, tolerance);
    return agree(session->comm, &session->errors);
}

static int conclude(struct session *session) {
    int ranks = trainer_ranks(session->trainer);
    struct memory_report *memory = must_alloc((size_t)ranks * sizeof *memory);
    trainer_memory(session->trainer, memory);
    if (session->rank == 0)
        training_report_end(&session->report, session->done ? &session->last : NULL, memory, ranks);
    free(memory);
    bool good = trace(session);
    if (session->train->verify) good &= verify(session, ranks);
    return good ? STATUS_DONE : STATUS_FAILED;
}

static bool close_lines(struct session *session) {
    FILE *lines = session->report.lines;
    if (lines && (ferror(lines) | fclose(lines)))
        errors_add(&session->errors, session->train->options.jsonl, NULL, "cannot be written: %s",
                   strerror(errno));
    return agree(session->comm, &session->errors);
}

/* ---- the reference, in one process ------------------------------------------------------------------- */

static bool import_into(struct session *session, struct reference *reference) {
    const struct train *train = session->train;
    return !train->import_count || parameters_import(&reference->parameters, reference->values,
                                                     train->imports, train->import_count, &session->errors);
}

static bool reference_trains(struct session *session, struct reference *reference) {
    const struct point *point = session->run->point;
    struct optimizer optimizer = training_optimizer(&point->training);
    int sequences = point->global_batch, length = point->seq_len + 1;
    int *tokens = must_alloc((size_t)sequences * (size_t)length * sizeof *tokens);
    bool finite = true;
    for (int64_t step = 0; step < point->training.steps && finite; step++) {
        for (int s = 0; s < sequences; s++)
            data_sequence(session->data, (uint64_t)point->seed, step, s, tokens + (size_t)s * length);
        struct batch batch = {tokens, sequences, (uint64_t)point->seed, step};
        double began = seconds_now(), norm;
        launch_step(step);
        pulse_set(session->train->pulse, 0, PULSE_WORK, "the single-process reference");
        struct step_losses losses = reference_step(reference, &batch, &optimizer, &norm);
        double seconds = seconds_now() - began;
        finite = isfinite(losses.total) && isfinite(norm);
        session->last = (struct step_report){.step = step,
                                             .losses = losses,
                                             .learning_rate = optimizer_rate(&optimizer, step),
                                             .grad_norm = norm,
                                             .seconds = seconds,
                                             .tokens_per_s = sequences * point->seq_len / seconds,
                                             .finite = finite};
        if (finite) training_report_step(&session->report, &session->last);
    }
    free(tokens);
    if (!finite) say_not_finite(session);
    return finite;
}

/* Checkpoints, traces and verification are about schedules: this run has none of them. */
static int execute_reference(struct session *session) {
    const struct point *point = session->run->point;
    session->data = open_data(point, &session->errors);
    if (!agree(session->comm, &session->errors)) return STATUS_USAGE;
    if (!open_lines(session)) return STATUS_FAILED;
    struct reference *reference =
        reference_new(point->model, point->seq_len, point->global_batch, 1, (uint64_t)point->seed);
    struct arena *arena = arena_new();
    if (point->training.forced_routing)
        reference->forced = forced_routing_new(arena, point->model, point->routing.share, point->seq_len);
    import_into(session, reference);
    int status = STATUS_USAGE;
    if (agree(session->comm, &session->errors)) {
        begin_report(session);
        status = reference_trains(session, reference) ? STATUS_DONE : STATUS_FAILED;
        struct memory_report memory = {.used_static = 4.0 * reference->parameters.total * sizeof(floatX)};
        memory.used = memory.used_static;
        if (status == STATUS_DONE) training_report_end(&session->report, &session->last, &memory, 1);
    }
    reference_free(reference);
    arena_free(arena);
    return status;
}

/* ---- a run ------------------------------------------------------------------------------------------- */

static int execute_schedule(struct session *session) {
    int status = prepare(session);
    if (status != STATUS_DONE) return status;
    session->report.ops = session->schedule->op_count;
    begin_report(session);
    return train_on(session) ? conclude(session) : STATUS_FAILED;
}

/* Collective over comm, which has the plan's ranks. */
static int execute(const struct train *train, const struct runs *runs, const struct run *run, MPI_Comm comm) {
    struct session session = {.train = train,
                              .run = run,
                              .checkpoints = folder_of(train, runs, run, train->checkpoint),
                              .resume = resume_of(train, runs, run),
                              .comm = comm,
                              .arena = arena_new()};
    MPI_Comm_rank(comm, &session.rank);
    int status = run->system == &single_process ? execute_reference(&session) : execute_schedule(&session);
    if (!close_lines(&session) && !status) status = STATUS_FAILED;
    leave_folder(&session);
    trainer_free(session.trainer);
    if (session.schedule) schedule_free(session.schedule);
    timeline_free(&session.planned);
    data_free(session.data);
    free(session.report.seconds);
    arena_free(session.arena);
    return status;
}

/* ---- a rank ------------------------------------------------------------------------------------------ */

/* The worst status of all ranks. Who waits for the others leaves its processor to them. */
static int worst_of(MPI_Comm world, int status, struct pulse *pulse) {
    const struct timespec pause = {.tv_nsec = 1000 * 1000};
    int worst, done = 0;
    MPI_Request request;
    pulse_set(pulse, 0, PULSE_WAIT, "waiting for the ranks of a run");
    MPI_Iallreduce(&status, &worst, 1, MPI_INT, MPI_MAX, world, &request);
    for (;;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done) break;
        nanosleep(&pause, NULL);
    }
    pulse_set(pulse, 0, PULSE_WORK, "between two runs");
    return worst;
}

/* Plans are made once, on rank 0, and given to all: a search takes its time. */
static int share_plans(const struct train *train, struct runs *runs, MPI_Comm world, int rank) {
    struct errors errors = {0};
    int status = rank == 0 ? plan_runs(train, runs, &errors) : STATUS_DONE;
    if (rank == 0 && status == STATUS_DONE && launch_run() < 0 && !begin_lines(train, &errors))
        status = STATUS_USAGE;
    MPI_Bcast(&status, 1, MPI_INT, 0, world);
    agree(world, &errors);
    for (int i = 0; i < runs->count && status == STATUS_DONE; i++) {
        struct run *run = &runs->list[i];
        MPI_Bcast(&run->plan, sizeof run->plan, MPI_BYTE, 0, world);
        run->plan.point = run->point;
    }
    return status;
}

static bool enough_ranks(const struct train *train, const struct runs *runs, MPI_Comm world) {
    struct errors errors = {0};
    int size, rank;
    MPI_Comm_size(world, &size);
    MPI_Comm_rank(world, &rank);
    for (int i = 0; i < runs->count; i++)
        if (runs->list[i].plan.gpus > size)
            errors_add(&errors, train->options.manifest, NULL,
                       "%s%s%s: found %d rank%s; the plan needs %d: one a GPU", runs->list[i].point->label,
                       *runs->list[i].point->label ? ": " : "", runs->list[i].system->name, size,
                       size > 1 ? "s" : "", runs->list[i].plan.gpus);
    return agree(world, &errors);
}

static int run_in_world(const struct train *train, const struct runs *runs, MPI_Comm world, int rank) {
    int worst = STATUS_DONE;
    for (int i = 0; i < runs->count; i++) {
        const struct run *run = &runs->list[i];
        MPI_Comm comm;
        MPI_Comm_split(world, rank < run->plan.gpus ? 0 : MPI_UNDEFINED, rank, &comm);
        int status = comm == MPI_COMM_NULL ? STATUS_DONE : execute(train, runs, run, comm);
        if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
        status = worst_of(world, status, train->pulse);
        if (status > worst) worst = status;
    }
    return worst;
}

/* Rank 0 reads the command line first: if it is wrong, once is enough to be told so. */
static bool parse_together(struct train *train, int argc, char **argv, int rank, bool *helped) {
    int sound = rank == 0 && parse(train, argc, argv, helped) && !*helped;
    MPI_Bcast(&sound, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return sound && (rank == 0 || parse(train, argc, argv, helped));
}

static int work_on_runs(struct train *train, int rank) {
    struct errors errors = {0};
    load(train, &errors);
    if (!agree(MPI_COMM_WORLD, &errors)) return STATUS_USAGE;
    if (rank == 0 && launch_run() < 0 && train->other_dtypes) note("%s", train->other_dtypes);
    struct runs runs = own_runs(train);
    int status = share_plans(train, &runs, MPI_COMM_WORLD, rank);
    if (status == STATUS_DONE && !enough_ranks(train, &runs, MPI_COMM_WORLD)) status = STATUS_USAGE;
    return status == STATUS_DONE ? run_in_world(train, &runs, MPI_COMM_WORLD, rank) : status;
}

static int work_as_rank(struct train *train, int argc, char **argv) {
    int rank, provided, status = STATUS_USAGE;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    launch_join(rank);
    bool helped = false;
    struct watch *watch = NULL;
    if (!parse_together(train, argc, argv, rank, &helped)) {
        int was_helped = helped;
        MPI_Bcast(&was_helped, 1, MPI_INT, 0, MPI_COMM_WORLD);
        if (was_helped) status = STATUS_DONE;
    } else {
        train->pulse = pulse_new();
        pulse_set(train->pulse, 0, PULSE_WORK, "planning");
        watch = watch_start(train->pulse, train->timeout);
        status = work_on_runs(train, rank);
    }
    fflush(stdout); /* before any rank ends: mpirun may end the others then */
    MPI_Barrier(MPI_COMM_WORLD);
    watch_stop(watch);
    pulse_free(train->pulse);
    launch_leave();
    MPI_Finalize();
    return status;
}

/* ---- the launcher ------------------------------------------------------------------------------------ */

/* Verification holds a whole model and its gradient beside the run. */
static bool run_fits(const struct train *train, const struct run *run, struct errors *errors) {
    double whole = model_parameter_count(run->point->model).total * sizeof(floatX);
    return run->system == &single_process ||
           fits_this_machine(verb_train.name, run->system, &run->plan, train->verify ? 2 * whole : 0, errors);
}

static int launch_all(const struct train *train, const struct runs *runs, char **arguments) {
    int worst = STATUS_DONE;
    for (int i = 0; i < runs->count; i++) {
        const struct run *run = &runs->list[i];
        struct launch launch = {.ranks = run->plan.gpus,
                                .run = i,
                                .arguments = arguments,
                                .checkpoints = folder_of(train, runs, run, train->checkpoint)};
        enum launch_end end = launch_ranks(&launch);
        int status = end == LAUNCH_DONE ? STATUS_DONE : end == LAUNCH_USAGE ? STATUS_USAGE : STATUS_FAILED;
        if (status > worst) worst = status;
        if (end == LAUNCH_CUT) break;
    }
    return worst;
}

static int work_as_launcher(struct train *train, int argc, char **argv, char **arguments) {
    struct errors errors = {0};
    bool helped;
    int status = STATUS_USAGE;
    if (!parse(train, argc, argv, &helped)) return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (load(train, &errors)) {
        struct runs runs = list_runs(train);
        if (train->other_dtypes) note("%s", train->other_dtypes);
        status = plan_runs(train, &runs, &errors);
        for (int i = 0; i < runs.count && status == STATUS_DONE; i++)
            if (!run_fits(train, &runs.list[i], &errors)) status = STATUS_FAILED;
        if (status == STATUS_DONE && !begin_lines(train, &errors)) status = STATUS_USAGE;
        if (status == STATUS_DONE) status = launch_all(train, &runs, arguments);
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    return status;
}

/* The command line as it was, from the verb on: reading it may change it. */
static char **copy_arguments(struct arena *arena, int argc, char **argv) {
    char **arguments = arena_alloc(arena, (size_t)(argc + 2) * sizeof *arguments);
    arguments[0] = arena_strdup(arena, verb_train.name);
    for (int i = 0; i < argc; i++) arguments[i + 1] = arena_strdup(arena, argv[i]);
    return arguments;
}

static int run(int argc, char **argv) {
    if (launch_is_stray()) {
        const char *task = getenv("SLURM_PROCID");
        if (!task || atoi(task) == 0)
            fprintf(stderr,
                    "disagmoe: train: srun offers no PMIx to its tasks; start them with srun --mpi=pmix\n");
        return STATUS_USAGE;
    }
    struct train train = {.arena = arena_new()};
    char **arguments = copy_arguments(train.arena, argc, argv);
    int status =
        launch_inside() ? work_as_rank(&train, argc, argv) : work_as_launcher(&train, argc, argv, arguments);
    experiment_free(&train.experiment);
    arena_free(train.arena);
    return status;
}

const struct verb verb_train = {
    .name = "train",
    .usage = "MANIFEST [OPTIONS]",
    .summary = "train for real: one rank a GPU of the plan, on this machine's processors",
    .help =
        "  --system NAME      only this system; else one after the other\n"
        "  --set path=value   change the manifest, e.g. --set train.learning_rate=0.01 (repeatable)\n"
        "  --steps N          the run's last step is the N-th; default: the manifest's train.steps\n"
        "  --data FILE        each of its bytes is a token; or markov; default: train.data\n"
        "  --checkpoint DIR   write checkpoints there (several runs: in a folder of each), at the end and\n"
        "  --every N          ... after every N-th step\n"
        "  --resume DIR       go on from a checkpoint, or from the latest in DIR\n"
        "  --import FILE      begin with a safetensors file's parameters (repeatable, or a,b,c)\n"
        "  --verify           run the single-process reference beside it and compare losses and gradients\n"
        "  --tolerance X      largest relative difference; default 1e-4, in double precision 1e-10, with\n"
        "                     BF16 gradients 0.05\n"
        "  --reference        train in a single process first, without a schedule, for its loss column\n"
        "  --json             a JSON line a step, then the run's record, instead of the table\n"
        "  --jsonl FILE       the same lines into a file; with --resume at its end\n"
        "  --trace FILE       the last step as it was: Perfetto / chrome://tracing JSON\n"
        "  --timeout SECONDS  a rank that is silent so long ends the run, 0: never; default 600. It is "
        "named\n"
        "                     after a tenth of the time, at most a minute\n"
        "Ranks are started with mpirun, as many as the plan has GPUs; or start them yourself:\n"
        "  mpirun -n 8 disagmoe train M      srun --mpi=pmix -K -n 8 disagmoe train M\n",
    .run = run,
};
