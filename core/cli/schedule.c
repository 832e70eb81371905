/* disagmoe schedule: the schedule of one point, as JSON or drawn in the terminal. */
#include "cli/cli.h"

#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int terminal_width(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col : 80;
}

static int show(const struct options *options, const struct system *system, const struct point *point,
                struct errors *errors) {
    struct plan plan;
    bool feasible;
    struct errors found = {0};
    bool possible = tune_point(system, point, &plan, &feasible, &found);
    add_point_errors(options, point, system, &found, errors);
    errors_free(&found);
    if (!possible) return STATUS_USAGE;
    if (!feasible) {
        errors_add(errors, options->manifest, NULL, "nothing fits the GPUs' memory for %s", system->name);
        return STATUS_FAILED;
    }
    struct result result;
    struct schedule *schedule;
    struct timeline timeline = {0};
    simulate_plan(system, &plan, &result, &schedule, &timeline);
    if (options->json)
        schedule_write_json(schedule, &timeline, stdout);
    else
        schedule_draw(schedule, &timeline, terminal_width(), stdout);
    int status = STATUS_DONE;
    if (options->trace && !schedule_write_trace(schedule, &timeline, system->name, options->trace, errors))
        status = STATUS_FAILED;
    schedule_free(schedule);
    timeline_free(&timeline);
    return status;
}

static int run(int argc, char **argv) {
    struct options options = {0};
    bool helped;
    const struct option_rule rules[] = {{"--system", &options.system, NULL, NULL},
                                        {"--json", NULL, NULL, &options.json},
                                        {"--trace", &options.trace, NULL, NULL}};
    if (!parse_options(&verb_schedule, argc, argv, rules, COUNT(rules), &options, &options.manifest, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (is_missing(&verb_schedule, options.manifest, "a manifest")) return STATUS_USAGE;
    struct errors errors = {0};
    struct experiment experiment;
    int status = STATUS_USAGE;
    if (load_experiment(&options, &experiment, &errors)) {
        const struct point *point = &experiment.points[0];
        const struct output output = {"--trace", options.trace};
        check_outputs(&output, 1, &experiment, &errors);
        if (experiment.point_count == 1 && point->system_count == 1 && !errors.count)
            status = show(&options, system_named(point->systems[0]), point->variants[0], &errors);
        else if (!errors.count)
            errors_add(
                &errors, options.manifest, NULL,
                "found %d points and %d systems; one of each is needed: choose with --set and --system",
                experiment.point_count, point->system_count);
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    experiment_free(&experiment);
    return status;
}

const struct verb verb_schedule = {
    .name = "schedule",
    .usage = "MANIFEST [--system NAME] [--json] [--trace FILE] [--set path=value]...",
    .summary = "one point's schedule: drawn, as JSON, or as a trace",
    .help = "  --system NAME      of the manifest's systems\n"
            "  --json             lanes and operations with start and end\n"
            "  --trace FILE       Perfetto / chrome://tracing JSON\n"
            "  --set path=value   change the manifest\n",
    .run = run,
};
