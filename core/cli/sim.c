/*
disagmoe sim: simulates every point of a manifest for every system, in parallel, and reports.

Each (point, system) is one task. A point's records are written when all its tasks are done and all points
before it are written: in the manifest's order whatever the number of threads, so that the output is the same
bytes on every run. Files grow beside their targets and take their place at the end: whatever ends a run, what
is finished can be read, and no file of a whole run is replaced by a part of one. After Ctrl-C what is
finished is reported and the status is 1.
*/
#include "cli/cli.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct task {
    const struct point *point; /* as its system runs it */
    const struct system *system;
    struct result result;
    struct errors errors;
    bool done;
};

struct run {
    const struct options *options;
    struct task *tasks;
    int count;
    pthread_mutex_t mutex; /* of all below, and of done */
    int finished, written; /* tasks; those before `written` are records now */
    struct result *records;
    int record_count;
    struct growing_file csv, jsonl;
    struct progress progress;
};

/* ---- records as they come ---------------------------------------------------------------------------- */

static void write_csv(const struct result *records, int count, FILE *stream) {
    for (int i = 0; i < count; i++) result_csv(&records[i], stream);
}

static void write_json_lines(const struct result *records, int count, FILE *stream) {
    for (int i = 0; i < count; i++) print_json_line(result_json(&records[i]), stream);
}

static void add_to(struct growing_file *file, void (*write)(const struct result *, int, FILE *),
                   const struct result *records, int count) {
    if (!file->name || !count) return;
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    write(records, count, stream);
    fclose(stream);
    growing_file_add(file, text, length);
    free(text);
}

/* Makes records of the tasks of one point, first … end − 1, as far as they are done. */
static void write_point(struct run *run, int first, int end) {
    struct result *records = run->records + run->record_count;
    int count = 0;
    for (int i = first; i < end; i++)
        if (run->tasks[i].done && run->tasks[i].result.system) records[count++] = run->tasks[i].result;
    fill_speedups(records, count);
    run->record_count += count;
    run->written = end;
    add_to(&run->csv, write_csv, records, count);
    add_to(&run->jsonl, write_json_lines, records, count);
    if (!run->options->json || !count) return;
    progress_clear(&run->progress);
    write_json_lines(records, count, stdout);
    fflush(stdout);
}

/* Writes the points that are due. At the end those that are cut off as well, which have no speedup where the
   baseline is missing. */
static void write_points(struct run *run, bool cut_off) {
    while (run->written < run->count) {
        int first = run->written, end = first;
        bool done = true;
        for (; end < run->count && run->tasks[end].point->index == run->tasks[first].point->index; end++)
            done &= run->tasks[end].done;
        if (!done && !cut_off) return;
        write_point(run, first, end);
    }
}

/* ---- tasks ------------------------------------------------------------------------------------------- */

static void finish_task(struct run *run, struct task *task) {
    pthread_mutex_lock(&run->mutex);
    task->done = true;
    run->finished++;
    write_points(run, false);
    if (!run->options->quiet) progress_show(&run->progress, run->finished);
    pthread_mutex_unlock(&run->mutex);
}

static void run_task(void *context, int i) {
    struct run *run = context;
    struct task *task = &run->tasks[i];
    struct plan plan;
    bool feasible = false;
    if (tune_point(task->system, task->point, &plan, &feasible, &task->errors)) {
        if (feasible)
            simulate_plan(task->system, &plan, &task->result, NULL, NULL);
        else
            task->result = (struct result){.system = task->system,
                                           .plan = {.point = task->point},
                                           .oom = true,
                                           .speedup = NAN,
                                           .executor = "sim"};
    }
    finish_task(run, task);
}

static void plan_tasks(struct run *run, const struct experiment *experiment) {
    int next = 0;
    for (int i = 0; i < experiment->point_count; i++) run->count += experiment->points[i].system_count;
    run->tasks = must_alloc((size_t)(run->count + 1) * sizeof *run->tasks);
    run->records = must_alloc((size_t)(run->count + 1) * sizeof *run->records);
    for (int i = 0; i < experiment->point_count; i++)
        for (int k = 0; k < experiment->points[i].system_count; k++, next++) {
            run->tasks[next].point = experiment->points[i].variants[k];
            run->tasks[next].system = system_named(experiment->points[i].systems[k]);
        }
}

/* An impossible layout is the manifest's error: say where. */
static void collect_errors(const struct options *options, struct run *run, struct errors *errors) {
    for (int i = 0; i < run->count; i++) {
        struct task *task = &run->tasks[i];
        add_point_errors(options, task->point, task->system, &task->errors, errors);
        errors_free(&task->errors);
    }
}

/* ---- files ------------------------------------------------------------------------------------------- */

/* Before the run begins, so that it is not in vain. */
static bool open_files(struct run *run, const struct experiment *experiment, struct errors *errors) {
    const struct options *options = run->options;
    char *heading = NULL;
    size_t length = 0;
    if (options->csv &&
        !(make_folder_of(options->csv, errors) && growing_file_open(&run->csv, options->csv, errors)))
        return false;
    if (options->jsonl &&
        !(make_folder_of(options->jsonl, errors) && growing_file_open(&run->jsonl, options->jsonl, errors))) {
        growing_file_leave(&run->csv, false);
        return false;
    }
    FILE *stream = open_memstream(&heading, &length);
    result_csv_heading(&experiment->points[0], stream);
    fclose(stream);
    growing_file_add(&run->csv, heading, length);
    free(heading);
    return true;
}

/* Of a run that is not whole the target stays what it was. */
static bool close_file(struct growing_file *file, bool whole, int records, struct errors *errors) {
    if (!file->name) return true;
    if (whole || !file->part) return growing_file_finish(file, errors);
    if (file->failure) errors_add(errors, file->name, NULL, "cannot be written: %s", strerror(file->failure));
    if (records)
        errors_add(errors, file->name, NULL,
                   "left as it was: the run is not whole; what is finished lies in %s", file->part);
    growing_file_leave(file, records > 0);
    return true;
}

/* ---- the whole run ----------------------------------------------------------------------------------- */

static bool check_files(const struct run *run, const struct experiment *experiment, struct errors *errors) {
    const struct options *options = run->options;
    const struct output outputs[] = {
        {"--csv", options->csv}, {"--jsonl", options->jsonl}, {"--trace", options->trace}};
    int before = errors->count;
    check_outputs(outputs, COUNT(outputs), experiment, errors);
    if (options->trace && run->count != 1)
        errors_add(errors, NULL, "--trace", "found %d records; one is needed: choose with --set and --system",
                   run->count);
    return errors->count == before;
}

static bool write_trace(const char *file, const struct result *results, int count, struct errors *errors) {
    if (!count) return false; /* what was wrong has been said */
    if (!results[0].feasible) {
        errors_add(errors, NULL, "--trace", "nothing fits the GPUs' memory, so there is no schedule");
        return false;
    }
    struct schedule *schedule;
    struct timeline timeline = {0};
    struct result again;
    simulate_plan(results[0].system, &results[0].plan, &again, &schedule, &timeline);
    bool written = schedule_write_trace(schedule, &timeline, results[0].system->name, file, errors);
    schedule_free(schedule);
    timeline_free(&timeline);
    return written;
}

/* published.json beside the manifest, when it is there: the paper's figures, for the report alone. */
static const char *published_beside(struct experiment *experiment) {
    const char *file = path_beside(experiment->arena, experiment->file, "published.json");
    return access(file, R_OK) == 0 ? file : NULL;
}

static int report(const struct options *options, struct experiment *experiment, struct run *run,
                  struct errors *errors) {
    const struct result *records = run->records;
    int count = run->record_count;
    collect_errors(options, run, errors);
    int status = errors->count ? STATUS_USAGE : STATUS_DONE;
    bool cut = run->finished < run->count, whole = !errors->count && !cut, written = true;
    if (!options->json) print_report(records, count, published_beside(experiment), stdout);
    if (options->explain) {
        print_explanation(records, count, options->json ? stderr : stdout);
        print_trend(experiment, published_beside(experiment), options->json ? stderr : stdout);
    }
    if (cut)
        errors_add(errors, options->manifest, NULL, "interrupted: %d of %d records are finished", count,
                   run->count);
    written &= close_file(&run->csv, whole, count, errors);
    written &= close_file(&run->jsonl, whole, count, errors);
    if (options->trace) written &= write_trace(options->trace, records, count, errors);
    return cut || (!written && !status) ? STATUS_FAILED : status;
}

static int simulate(struct options *options) {
    struct errors errors = {0};
    struct experiment experiment;
    struct run run = {.options = options, .mutex = PTHREAD_MUTEX_INITIALIZER};
    int status = STATUS_USAGE;
    if (load_experiment(options, &experiment, &errors)) {
        plan_tasks(&run, &experiment);
        if (check_files(&run, &experiment, &errors)) status = STATUS_FAILED;
        if (status == STATUS_FAILED && open_files(&run, &experiment, &errors)) {
            catch_interrupt();
            run.progress = progress_begin("simulating", run.count);
            parallel_for(run.count, options->jobs ? options->jobs : processor_count(), run_task, &run,
                         &interrupted);
            progress_clear(&run.progress);
            write_points(&run, true);
            status = report(options, &experiment, &run, &errors);
        }
        free(run.tasks);
        free(run.records);
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    experiment_free(&experiment);
    return status;
}

static int run(int argc, char **argv) {
    struct options options = {0};
    bool helped;
    const struct option_rule rules[] = {
        {"--system", &options.system, NULL, NULL},   {"--jobs", NULL, &options.jobs, NULL},
        {"--json", NULL, NULL, &options.json},       {"--csv", &options.csv, NULL, NULL},
        {"--jsonl", &options.jsonl, NULL, NULL},     {"--trace", &options.trace, NULL, NULL},
        {"--explain", NULL, NULL, &options.explain}, {"--quiet", NULL, NULL, &options.quiet}};
    if (!parse_options(&verb_sim, argc, argv, rules, COUNT(rules), &options, &options.manifest, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (is_missing(&verb_sim, options.manifest, "a manifest")) return STATUS_USAGE;
    return simulate(&options);
}

const struct verb verb_sim = {
    .name = "sim",
    .usage = "MANIFEST [OPTIONS]",
    .summary = "simulate every point of a manifest",
    .help = "  --system NAME      only this system\n"
            "  --set path=value   change the manifest, e.g. --set model.layers=8 (repeatable)\n"
            "                     --set per_system.NAME.path=value for one system, --set sweep.path=[1,2]\n"
            "  --jobs N           threads, at most one a record; the output does not depend on it\n"
            "  --json             one record a line instead of tables, as they come\n"
            "  --csv FILE         the records as CSV\n"
            "  --jsonl FILE       the records as JSON lines\n"
            "  --trace FILE       Perfetto / chrome://tracing JSON of a single record\n"
            "  --explain          factors of step time and speedup; all-to-all share by nodes\n"
            "  --quiet            no progress\n"
            "Files grow as FILE.part and become FILE when the run is whole. Ctrl-C, SIGTERM and\n"
            "SIGHUP end a run early: what is finished is shown and stays in FILE.part.\n",
    .run = run,
};
