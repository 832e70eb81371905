/* disagmoe check: everything that is wrong with a manifest, and for each point whether its plans validate and
 * fit. */
#include "cli/cli.h"

/* What is wrong goes to `found`. */
static void check_plan(const struct system *system, const struct point *point, struct errors *found) {
    struct plan plan;
    bool feasible;
    if (!tune_point(system, point, &plan, &feasible, found)) return;
    const char *at = *point->label ? point->label : point->name;
    if (!feasible) {
        printf("%s: %s: nothing fits the GPUs' memory\n", at, system->name);
        return;
    }
    struct result result;
    struct schedule *schedule;
    simulate_plan(system, &plan, &result, &schedule, NULL);
    bool valid = schedule_validate(schedule, found);
    printf("%s: %s: %lld operations, %s; peak memory %.1f GB of %.1f GB%s\n", at, system->name,
           (long long)result.ops, valid ? "valid" : "not valid", result.peak_memory / 1e9,
           point->cluster->gpu.memory_bytes / 1e9, result.oom ? ", does not fit" : "");
    schedule_free(schedule);
}

static void check_point(const struct options *options, const struct point *point, struct errors *errors) {
    for (int k = 0; k < point->system_count; k++) {
        const struct system *system = system_named(point->systems[k]);
        struct errors found = {0};
        check_plan(system, point, &found);
        add_point_errors(options, point, system, &found, errors);
        errors_free(&found);
    }
}

static int run(int argc, char **argv) {
    struct options options = {0};
    bool helped;
    const struct option_rule rules[] = {{"--system", &options.system, NULL, NULL}};
    if (!parse_options(&verb_check, argc, argv, rules, COUNT(rules), &options, &options.manifest, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (is_missing(&verb_check, options.manifest, "a manifest")) return STATUS_USAGE;
    struct errors errors = {0};
    struct experiment experiment;
    if (load_experiment(&options, &experiment, &errors))
        for (int i = 0; i < experiment.point_count; i++)
            check_point(&options, &experiment.points[i], &errors);
    int status = errors.count ? STATUS_USAGE : STATUS_DONE;
    errors_print(&errors, stderr);
    errors_free(&errors);
    experiment_free(&experiment);
    return status;
}

const struct verb verb_check = {
    .name = "check",
    .usage = "MANIFEST [--system NAME] [--set path=value]...",
    .summary = "validate a manifest, its schedules and their memory",
    .help = "  --system NAME      only this system\n  --set path=value   change the manifest\n",
    .run = run,
};
