/* disagmoe check: everything that is wrong with a manifest, and for each point whether its plans validate and
 * fit. */
#include "cli/cli.h"

/* What a schedule may use is less than the GPU has: the reserve is kept free. */
static void print_memory(const struct result *result) {
    const struct point *point = result->plan.point;
    char peak[16], usable[16], over[16];
    bytes_text(result->peak_memory, peak);
    bytes_text(plan_usable_memory(point), usable);
    bytes_text(result->peak_memory - plan_usable_memory(point), over);
    if (point->table)
        printf("peak memory %s, which costs do not limit\n", peak);
    else if (result->oom)
        printf("peak memory %s, %s more than the usable %s: does not fit\n", peak, over, usable);
    else
        printf("peak memory %s of the usable %s\n", peak, usable);
}

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
    printf("%s: %s: %lld operations, %s; ", at, system->name, (long long)result.ops,
           valid ? "valid" : "not valid");
    print_memory(&result);
    schedule_free(schedule);
}

static void check_point(const struct options *options, const struct point *point, struct errors *errors) {
    for (int k = 0; k < point->system_count; k++) {
        const struct system *system = system_named(point->systems[k]);
        struct errors found = {0};
        check_plan(system, point->variants[k], &found);
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
    int done = 0;
    if (load_experiment(&options, &experiment, &errors)) {
        catch_interrupt();
        for (; done < experiment.point_count && !interrupted; done++)
            check_point(&options, &experiment.points[done], &errors);
    }
    int status = errors.count ? STATUS_USAGE : STATUS_DONE;
    if (interrupted && done < experiment.point_count) {
        errors_add(&errors, options.manifest, NULL, "interrupted: %d of %d points are checked", done,
                   experiment.point_count);
        status = STATUS_FAILED;
    }
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
