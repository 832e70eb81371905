/*
disagmoe sim: simulates every point of a manifest for every system, in parallel, and reports.

Each (point, system) is one task; results are written in the manifest's order whatever the number of threads,
so that the output is the same bytes on every run. After Ctrl-C what is finished is reported and the status
is 1.
*/
#include "cli/cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct task {
    const struct point *point;
    const struct system *system;
    struct result result;
    struct errors errors;
    bool done;
};

struct run {
    struct task *tasks;
    int count, finished;
    bool quiet;
};

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
    task->done = true;
    int finished = __atomic_add_fetch(&run->finished, 1, __ATOMIC_RELAXED);
    if (!run->quiet) progress("simulating", finished, run->count);
}

static struct run plan_tasks(const struct experiment *experiment) {
    struct run run = {0};
    for (int i = 0; i < experiment->point_count; i++) run.count += experiment->points[i].system_count;
    run.tasks = must_alloc((size_t)(run.count ? run.count : 1) * sizeof *run.tasks);
    int next = 0;
    for (int i = 0; i < experiment->point_count; i++)
        for (int k = 0; k < experiment->points[i].system_count; k++, next++) {
            run.tasks[next].point = &experiment->points[i];
            run.tasks[next].system = system_named(experiment->points[i].systems[k]);
        }
    return run;
}

/* An impossible layout is the manifest's error: say where. */
static void collect_errors(const struct options *options, struct run *run, struct errors *errors) {
    for (int i = 0; i < run->count; i++) {
        struct task *task = &run->tasks[i];
        add_point_errors(options, task->point, task->system, &task->errors, errors);
        errors_free(&task->errors);
    }
}

/* Results of finished tasks, point after point. A point that was cut off has no speedup. */
static struct result *collect_results(struct run *run, int *count) {
    struct result *results = must_alloc((size_t)(run->count ? run->count : 1) * sizeof *results);
    *count = 0;
    for (int i = 0; i < run->count;) {
        int first = *count, end = i;
        for (; end < run->count && run->tasks[end].point == run->tasks[i].point; end++)
            if (run->tasks[end].done && run->tasks[end].result.system)
                results[(*count)++] = run->tasks[end].result;
        fill_speedups(results + first, *count - first);
        i = end;
    }
    return results;
}

static void print_json_lines(const struct result *results, int count, FILE *stream) {
    for (int i = 0; i < count; i++) print_json_line(result_json(&results[i]), stream);
}

static void print_csv(const struct result *results, int count, FILE *stream) {
    result_csv(NULL, stream);
    for (int i = 0; i < count; i++) result_csv(&results[i], stream);
}

static bool write_records(const char *file, void (*print)(const struct result *, int, FILE *),
                          const struct result *results, int count, struct errors *errors) {
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    print(results, count, stream);
    fclose(stream);
    bool written = make_folder_of(file, errors) && file_write_atomic(file, text, length, errors);
    free(text);
    return written;
}

static bool write_trace(const char *file, const struct result *results, int count, struct errors *errors) {
    if (count != 1 || !results[0].feasible) {
        errors_add(errors, NULL, "--trace",
                   "found %d records; one feasible record is needed: choose with --set and --system", count);
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
    int count;
    collect_errors(options, run, errors);
    struct result *results = collect_results(run, &count);
    int status = errors->count ? STATUS_USAGE : STATUS_DONE;
    if (options->json)
        print_json_lines(results, count, stdout);
    else
        print_report(experiment, results, count, published_beside(experiment), stdout);
    if (options->explain) {
        print_explanation(results, count, options->json ? stderr : stdout);
        print_trend(experiment, published_beside(experiment), options->json ? stderr : stdout);
    }
    if (options->csv && !write_records(options->csv, print_csv, results, count, errors) && !status)
        status = STATUS_FAILED;
    if (options->jsonl && !write_records(options->jsonl, print_json_lines, results, count, errors) && !status)
        status = STATUS_FAILED;
    if (options->trace && !write_trace(options->trace, results, count, errors) && !status)
        status = STATUS_FAILED;
    if (interrupted) {
        errors_add(errors, options->manifest, NULL, "interrupted: %d of %d records are finished", count,
                   run->count);
        status = STATUS_FAILED;
    }
    free(results);
    return status;
}

static int simulate(struct options *options) {
    struct errors errors = {0};
    struct experiment experiment;
    int status = STATUS_USAGE;
    if (load_experiment(options, &experiment, &errors)) {
        struct run run = plan_tasks(&experiment);
        catch_interrupt();
        run.quiet = options->quiet;
        parallel_for(run.count, options->jobs ? options->jobs : processor_count(), run_task, &run,
                     &interrupted);
        status = report(options, &experiment, &run, &errors);
        free(run.tasks);
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
            "  --jobs N           threads; the output does not depend on it\n"
            "  --json             one record a line instead of tables\n"
            "  --csv FILE         the records as CSV\n"
            "  --jsonl FILE       the records as JSON lines\n"
            "  --trace FILE       Perfetto / chrome://tracing JSON of a single record\n"
            "  --explain          factors of step time and speedup; all-to-all share by nodes\n"
            "  --quiet            no progress bar\n",
    .run = run,
};
