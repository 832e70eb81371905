/*
disagmoe plan: the roofline allocation of every point of a manifest for its disaggregated systems.

Seeds come from the integer program, one for each shape; a local search goes on from them by the simulator's
word, or by that of measured training steps. What a manifest says of GPUs and NICs (attn_gpus, ffn_gpus,
attn_nics, ffn_nics) is tried beside what is found; a table of costs holds for them.
*/
#include "cli/plan.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_SEEDS 16
#define DEFAULT_RADIUS 2
#define DEFAULT_TRIALS 48
#define DEFAULT_PATIENCE 24
#define CPU_STEPS 5

struct plan_options {
    struct options common;
    const char *lp, *log, *executor;
    int radius, trials, patience;
    bool relaxed, from_scratch, exhaustive;
};

/* ---- evaluators ---------------------------------------------------------------------------------------- */

/* The point as the search runs it: nothing of its layout given but groups and cp. */
struct evaluation {
    const struct plan_options *options;
    const struct point *point;
    const struct system *system;
};

/* A point that gives this layout and leaves the rest as it was. Under a table of costs its seconds follow. */
static void give_layout(const struct point *point, const struct plan *layout, struct point *given,
                        struct cost_table *table) {
    *given = *point;
    given->parallel = layout->parallel;
    given->placement = layout->placement;
    given->placement_given = true;
    given->auto_memory = point->memory_given != MEMORY_ALL;
    if (!point->table) return;
    const struct parallel *parallel = &layout->parallel;
    int nics = parallel->attn_nics < parallel->ffn_nics ? parallel->attn_nics : parallel->ffn_nics;
    *table = allocation_table(point, parallel->attn_gpus, parallel->ffn_gpus, nics > 0 ? nics : 1);
    given->table = table;
}

/* The layout with the memory and order that suit it best; false where nothing fits. */
static bool complete(const struct evaluation *evaluation, const struct plan *layout, struct point *point,
                     struct cost_table *table, struct plan *plan) {
    bool feasible = false;
    struct errors errors = {0};
    give_layout(evaluation->point, layout, point, table);
    bool possible = tune_point(evaluation->system, point, plan, &feasible, &errors);
    errors_free(&errors);
    return possible && feasible;
}

static double simulated_seconds(void *context, const struct plan *layout) {
    const struct evaluation *evaluation = context;
    struct point point;
    struct cost_table table;
    struct plan plan;
    struct result result;
    if (!complete(evaluation, layout, &point, &table, &plan)) return INFINITY;
    simulate_plan(evaluation->system, &plan, &result, NULL, NULL);
    return result.oom ? INFINITY : result.step_time / plan.sequences;
}

/* For the shell, in single quotes. */
static void add_quoted(struct text *command, const char *word) {
    text_add(command, " '");
    for (; *word; word++) text_add(command, *word == '\'' ? "'\\''" : "%c", *word);
    text_add(command, "'");
}

static void add_set(struct text *command, const char *path, const char *value) {
    struct text set = {0};
    text_add(&set, "%s=%s", path, value);
    text_add(command, " --set");
    add_quoted(command, set.text);
    free(set.text);
}

static void add_number(struct text *command, const char *path, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    add_set(command, path, text);
}

/* The suite's own `train`, a few steps of the layout, each point's swept values as single ones. */
static char *train_command(const struct evaluation *evaluation, const struct plan *layout) {
    const struct options *options = &evaluation->options->common;
    const struct parallel *parallel = &layout->parallel;
    const struct point *point = evaluation->point;
    char self[PATH_MAX] = "";
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    struct text command = {0};
    self[length > 0 ? length : 0] = 0;
    add_quoted(&command, self);
    text_add(&command, " train");
    add_quoted(&command, options->manifest);
    text_add(&command, " --json --steps %d --system %s", CPU_STEPS, evaluation->system->name);
    for (int i = 0; i < options->override_count; i++)
        add_set(&command, options->overrides[i].path, options->overrides[i].value);
    for (int i = 0; i < point->swept_count; i++) {
        struct text path = {0}, value = {0};
        text_add(&path, "sweep.%s", point->swept[i].path);
        text_add(&value, "[%s]", point->swept[i].value);
        add_set(&command, path.text, value.text);
        free(path.text);
        free(value.text);
    }
    add_number(&command, "parallel.groups", parallel->groups);
    add_number(&command, "parallel.attn_gpus", parallel->attn_gpus);
    add_number(&command, "parallel.ffn_gpus", parallel->ffn_gpus);
    add_number(&command, "parallel.cp", parallel->cp);
    if (parallel->attn_nics > 0) add_number(&command, "parallel.attn_nics", parallel->attn_nics);
    if (parallel->ffn_nics > 0) add_number(&command, "parallel.ffn_nics", parallel->ffn_nics);
    add_set(&command, "placement", layout->placement == PLACEMENT_MIXED ? "mixed-nodes" : "split-nodes");
    return command.text;
}

static int by_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of the steps behind the first. A run that fails does not fit: it has said why on stderr. */
static double measured_seconds(void *context, const struct plan *layout) {
    const struct evaluation *evaluation = context;
    char *command = train_command(evaluation, layout), *line = NULL;
    size_t room = 0;
    double seconds[CPU_STEPS];
    int count = 0;
    FILE *stream = popen(command, "r");
    while (stream && getline(&line, &room, stream) > 0) {
        cJSON *object = cJSON_Parse(line);
        const cJSON *step = cJSON_GetObjectItemCaseSensitive(object, "step");
        const cJSON *time = cJSON_GetObjectItemCaseSensitive(object, "step_time_s");
        if (cJSON_IsNumber(step) && step->valueint > 0 && cJSON_IsNumber(time) && count < CPU_STEPS)
            seconds[count++] = time->valuedouble;
        cJSON_Delete(object);
    }
    bool good = stream && pclose(stream) == 0 && count > 0;
    free(line);
    free(command);
    if (!good) return INFINITY;
    qsort(seconds, (size_t)count, sizeof *seconds, by_double);
    double median = (seconds[(count - 1) / 2] + seconds[count / 2]) / 2;
    return median / layout->sequences;
}

/* ---- one point ----------------------------------------------------------------------------------------- */

static bool reads_executor(const struct plan_options *options) {
    return strcmp(options->executor, "sim") == 0 || strcmp(options->executor, "cpu") == 0;
}

/* What a search is of: another manifest, point, system, executor or version is another search. */
static const char *identity_of(const struct plan_options *options, const struct evaluation *evaluation,
                               struct arena *arena) {
    const struct point *point = evaluation->point;
    return arena_printf(arena,
                        "%s; %s; %s; model %s; cluster %s of %d nodes; seq_len %d; %s %d; executor %s; "
                        "costs %s; seed %d; version %s",
                        point->name, point->label, evaluation->system->name, point->model->name,
                        point->cluster->name, point->cluster->nodes, point->seq_len,
                        point->global_batch ? "global_batch" : "micro_batches",
                        point->global_batch ? point->global_batch : point->micro_batches, options->executor,
                        point->table ? "table" : "model", point->seed, VERSION);
}

/* The point without what is to be allocated. */
static struct point open_point(const struct point *point) {
    struct point open = *point;
    if (point->table) return open; /* which the table is of */
    open.parallel.attn_gpus = open.parallel.ffn_gpus = 0;
    open.parallel.attn_nics = open.parallel.ffn_nics = 0;
    return open;
}

/* A table of costs says what its groups take: all of it must be there to be scaled. */
static bool check_table(const struct point *point, struct errors *errors) {
    const struct cost_table *table = point->table;
    if (!table) return true;
    const struct {
        const char *key;
        double seconds;
    } parts[] = {{"costs.attn_fwd_s", table->attn_fwd_s}, {"costs.attn_bwd_s", table->attn_bwd_s},
                 {"costs.ffn_fwd_s", table->ffn_fwd_s},   {"costs.ffn_bwd_s", table->ffn_bwd_s},
                 {"costs.dispatch_s", table->dispatch_s}, {"costs.combine_s", table->combine_s}};
    int before = errors->count;
    for (size_t i = 0; i < COUNT(parts); i++)
        if (!(parts[i].seconds > 0))
            errors_add(errors, NULL, parts[i].key,
                       "found %g; above 0 is allowed where GPUs are allocated by a table of costs",
                       parts[i].seconds);
    const struct parallel *given = &point->parallel;
    if (!given->groups || !given->attn_gpus || !given->ffn_gpus)
        errors_add(
            errors, NULL, "parallel",
            "found no whole layout; groups, attn_gpus and ffn_gpus are needed beside costs: those that "
            "they were measured on");
    return errors->count == before;
}

/* What the manifest gives is as wrong here as anywhere. */
static bool check_given(const struct system *system, const struct point *point, struct errors *errors) {
    struct plan plan = {.point = point, .parallel = point->parallel, .placement = point->placement};
    int before = errors->count;
    if (!point->placement_given) plan.placement = PLACEMENT_MIXED;
    if (cluster_gpus(point->cluster) < 2)
        errors_add(errors, NULL, "cluster", "found 1 GPU; attention and experts take one each at least");
    else
        system->size(&plan, errors);
    return errors->count == before && check_table(point, errors);
}

static void solve_relaxed(struct allocation_report *report) {
    const struct point *point = report->point;
    struct arena *arena = arena_new();
    double sequences = (double)point->micro_batch_size * cluster_gpus(point->cluster) / 2;
    report->relaxed = roofline_relaxed(point, sequences);
    struct allocation_problem problem = roofline_problem(&report->relaxed, arena);
    report->relaxed_solved =
        allocation_solve(&problem, &report->relaxed_solution, report->why, sizeof report->why);
    arena_free(arena);
}

static struct search_options search_options(const struct plan_options *options, const char *identity) {
    return (struct search_options){.radius = options->radius,
                                   .trials = options->trials,
                                   .patience = options->patience,
                                   .log = options->log,
                                   .identity = identity,
                                   .stop = &interrupted};
}

/* The layout that the manifest gives, where it gives one, beside the seeds. */
static void add_given(const struct point *point, const struct system *system, struct seeds *seeds) {
    struct errors errors = {0};
    const struct parallel *given = &point->parallel;
    struct plan plan = {.point = point,
                        .parallel = *given,
                        .memory = point->memory,
                        .order = point->order,
                        .placement = point->placement};
    if (given->groups && given->attn_gpus && given->ffn_gpus && system->size(&plan, &errors) &&
        system->settle(&plan, &errors)) {
        struct seed seed = {.plan = plan, .predicted = NAN};
        seeds->list = must_realloc(seeds->list, (size_t)(seeds->count + 1) * sizeof *seeds->list);
        seeds->list[seeds->count++] = seed;
    }
    errors_free(&errors);
}

/* The figures of the best trial, as the simulator sees it. */
static void read_chosen(struct allocation_report *report, const struct evaluation *evaluation,
                        struct arena *arena) {
    const struct plan *layout = &report->search.trials[report->search.best].plan;
    struct point *point = arena_alloc(arena, sizeof *point);
    struct cost_table *table = arena_alloc(arena, sizeof *table);
    struct plan plan;
    struct schedule *schedule;
    struct errors errors = {0};
    report->chosen.feasible = complete(evaluation, layout, point, table, &plan);
    if (!report->chosen.feasible) return;
    simulate_plan(evaluation->system, &plan, &report->chosen, &schedule, NULL);
    double *busy = must_alloc((size_t)schedule->lane_count * sizeof *busy);
    schedule_busy(schedule, busy);
    for (int g = 0; g < schedule->group_count; g++) {
        double *side = &report->lane_seconds[g >= schedule->group_count / 2],
               *sent = &report->lane_seconds[2];
        *side = fmax(*side, busy[lane_of(g, RESOURCE_COMPUTE)]);
        *sent = fmax(*sent, fmax(busy[lane_of(g, RESOURCE_SEND)], busy[lane_of(g, RESOURCE_RECV)]));
    }
    free(busy);
    schedule_free(schedule);
    struct plan seen = report->chosen.plan;
    seen.point = evaluation->point;
    if (!allocation_seed(evaluation->system, &seen, &report->chosen_seed, report->seeds.arena, &errors))
        report->chosen_seed = (struct seed){0};
    errors_free(&errors);
}

/* ---- the comparison ------------------------------------------------------------------------------------ */

/* The point with cp, placement, memory and order of a plan. */
static struct point fixed_point(const struct point *point, const struct plan *like) {
    struct point fixed = open_point(point);
    fixed.parallel.groups = 0;
    fixed.parallel.cp = like->parallel.cp;
    fixed.memory = like->memory;
    fixed.memory_given = MEMORY_ALL;
    fixed.order = like->order;
    fixed.placement = like->placement;
    fixed.placement_given = true;
    return fixed;
}

static double fixed_seconds(void *context, const struct plan *layout) {
    const struct evaluation *evaluation = context;
    struct result result;
    simulate_plan(evaluation->system, layout, &result, NULL, NULL);
    return result.oom ? INFINITY : result.step_time / layout->sequences;
}

static double best_of(const struct search *search) {
    return search->best < 0 ? INFINITY : search->trials[search->best].seconds;
}

/* At the tuner's cp, placement, memory and order: an even split, the integer program alone, with the search
   behind it, a search from scratch, and everything there is. */
static bool compare(const struct plan_options *options, struct allocation_report *report,
                    struct errors *errors) {
    struct comparison *comparison = &report->comparison;
    struct plan like;
    bool feasible;
    const struct point open = open_point(report->point);
    if (!tune_point(report->system, &open, &like, &feasible, errors) || !feasible) return false;
    const struct point fixed = fixed_point(report->point, &like);
    like.point = &fixed;
    struct evaluation evaluation = {options, &fixed, report->system};
    struct evaluator evaluator = {"sim", report->system, &evaluation, fixed_seconds,
                                  options->common.jobs ? options->common.jobs : processor_count()};
    struct search_options rules = search_options(options, "");
    rules.log = NULL;
    struct seeds seeds = allocation_seeds(report->system, &fixed, MOST_SEEDS);
    struct seeds even = allocation_even_seeds(report->system, &fixed);
    for (int i = 0; i < seeds.count; i++) seeds.list[i].plan.order = like.order;
    for (int i = 0; i < even.count; i++) even.list[i].plan.memory = like.memory;
    struct search searched, scratch;
    bool good = allocation_search(&evaluator, seeds.list, seeds.count, &rules, &searched, errors) &&
                allocation_search(&evaluator, even.list, even.count, &rules, &scratch, errors);
    if (good) {
        *comparison = (struct comparison){.done = true,
                                          .uniform = INFINITY,
                                          .milp = searched.count ? searched.trials[0].seconds : INFINITY,
                                          .searched = best_of(&searched),
                                          .scratch = best_of(&scratch),
                                          .searched_evaluations = searched.count,
                                          .scratch_evaluations = scratch.count};
        for (int i = 0; i < scratch.count && i < even.count; i++)
            comparison->uniform = fmin(comparison->uniform, scratch.trials[i].seconds);
        comparison->exhaustive = allocation_exhaustive(&evaluator, &like, &interrupted);
        free(searched.trials);
        free(scratch.trials);
    }
    seeds_free(&seeds);
    seeds_free(&even);
    return good;
}

/* ---- all points ---------------------------------------------------------------------------------------- */

static bool write_lp(const struct plan_options *options, const struct allocation_report *report,
                     struct errors *errors) {
    if (!options->lp) return true;
    if (!make_folder_of(options->lp, errors)) return false;
    struct arena *arena = arena_new();
    struct allocation_problem problem = roofline_problem(&report->relaxed, arena);
    bool written = allocation_write_lp(options->relaxed ? &problem : &report->seeds.list[0].problem,
                                       options->lp, errors);
    arena_free(arena);
    return written;
}

static bool search_point(const struct plan_options *options, const struct evaluation *evaluation,
                         struct allocation_report *report, struct arena *arena, struct errors *errors) {
    bool measures = strcmp(options->executor, "cpu") == 0;
    struct evaluator evaluator = {options->executor, report->system, (void *)evaluation,
                                  measures ? measured_seconds : simulated_seconds,
                                  measures               ? 1
                                  : options->common.jobs ? options->common.jobs
                                                         : processor_count()};
    struct search_options rules = search_options(options, identity_of(options, evaluation, arena));
    report->seeds = options->from_scratch ? allocation_even_seeds(report->system, evaluation->point)
                                          : allocation_seeds(report->system, evaluation->point, MOST_SEEDS);
    if (report->seeds.count == 0) {
        errors_add(errors, NULL, "parallel", "no allocation is possible: %s", report->seeds.why);
        return false;
    }
    if (!options->from_scratch && !write_lp(options, report, errors)) return false;
    add_given(report->point, report->system, &report->seeds);
    if (!allocation_search(&evaluator, report->seeds.list, report->seeds.count, &rules, &report->search,
                           errors))
        return false;
    if (report->search.best >= 0) read_chosen(report, evaluation, arena);
    return !options->exhaustive || compare(options, report, errors);
}

static void plan_point(const struct plan_options *options, const struct point *point,
                       const struct system *system, struct errors *errors) {
    struct errors found = {0};
    struct arena *arena = arena_new();
    struct allocation_report report = {.point = point,
                                       .system = system,
                                       .executor = options->executor,
                                       .relaxed_form = options->relaxed,
                                       .search = {.best = -1}};
    const struct point open = open_point(point);
    struct evaluation evaluation = {options, &open, system};
    bool good = check_given(system, point, &found);
    if (good) solve_relaxed(&report);
    if (good && options->relaxed) good = write_lp(options, &report, &found);
    if (good && !options->relaxed) good = search_point(options, &evaluation, &report, arena, &found);
    if (good) (options->common.json ? plan_report_json : plan_report_print)(&report, stdout);
    fflush(stdout);
    add_point_errors(&options->common, point, system, &found, errors);
    errors_free(&found);
    free(report.search.trials);
    if (report.seeds.arena) seeds_free(&report.seeds);
    arena_free(arena);
}

/* Only systems whose groups have two sides have something to allocate. */
static bool check_systems(const struct plan_options *options, const struct experiment *experiment,
                          int *records, struct errors *errors) {
    *records = 0;
    for (int i = 0; i < experiment->point_count; i++)
        for (int k = 0; k < experiment->points[i].system_count; k++)
            *records += system_named(experiment->points[i].systems[k])->sides != NULL;
    if (*records == 0)
        errors_add(
            errors, options->common.manifest, options->common.system ? "--system" : "systems",
            "found %s; a system that gives attention and experts GPUs of their own is allowed: disagmoe",
            options->common.system ? options->common.system : "none that divides its GPUs");
    if (*records > 1 && (options->lp || options->log))
        errors_add(errors, NULL, options->lp ? "--lp" : "--log",
                   "found %d points; one is needed: choose with --set and --system", *records);
    return errors->count == 0;
}

static int plan_all(const struct plan_options *options) {
    struct errors errors = {0};
    struct experiment experiment;
    int records, status = STATUS_USAGE;
    if (load_experiment(&options->common, &experiment, &errors) &&
        check_systems(options, &experiment, &records, &errors)) {
        const struct output outputs[] = {{"--lp", options->lp}, {"--log", options->log}};
        check_outputs(outputs, COUNT(outputs), &experiment, &errors);
        catch_interrupt();
        struct progress progress = progress_begin("planning", records);
        int done = 0;
        for (int i = 0; i < experiment.point_count && !errors.count; i++)
            for (int k = 0; k < experiment.points[i].system_count && !interrupted; k++) {
                const struct system *system = system_named(experiment.points[i].systems[k]);
                if (!system->sides) continue;
                progress_clear(&progress);
                plan_point(options, experiment.points[i].variants[k], system, &errors);
                if (!options->common.quiet) progress_show(&progress, ++done);
            }
        progress_clear(&progress);
        status = errors.count ? STATUS_USAGE : STATUS_DONE;
        if (interrupted) {
            errors_add(&errors, options->common.manifest, NULL, "interrupted: the last search is not whole");
            status = STATUS_FAILED;
        }
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    experiment_free(&experiment);
    return status;
}

static int run(int argc, char **argv) {
    struct plan_options options = {
        .executor = "sim", .radius = DEFAULT_RADIUS, .trials = DEFAULT_TRIALS, .patience = DEFAULT_PATIENCE};
    struct options *common = &options.common;
    bool helped;
    const struct option_rule rules[] = {
        {"--system", &common->system, NULL, NULL},
        {"--jobs", NULL, &common->jobs, NULL},
        {"--json", NULL, NULL, &common->json},
        {"--quiet", NULL, NULL, &common->quiet},
        {"--relaxed", NULL, NULL, &options.relaxed},
        {"--lp", &options.lp, NULL, NULL},
        {"--log", &options.log, NULL, NULL},
        {"--executor", &options.executor, NULL, NULL},
        {"--radius", NULL, &options.radius, NULL},
        {"--trials", NULL, &options.trials, NULL},
        {"--patience", NULL, &options.patience, NULL},
        {"--from-scratch", NULL, NULL, &options.from_scratch},
        {"--exhaustive", NULL, NULL, &options.exhaustive},
    };
    if (!parse_options(&verb_plan, argc, argv, rules, COUNT(rules), common, &common->manifest, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (is_missing(&verb_plan, common->manifest, "a manifest")) return STATUS_USAGE;
    if (!reads_executor(&options)) {
        fprintf(stderr, "disagmoe: plan: --executor: found %s; allowed are sim and cpu\n", options.executor);
        return STATUS_USAGE;
    }
    return plan_all(&options);
}

const struct verb verb_plan = {
    .name = "plan",
    .usage = "MANIFEST [OPTIONS]",
    .summary = "allocate GPUs and NICs to attention and experts by a roofline",
    .help = "  --system NAME      only this system\n"
            "  --set path=value   change the manifest (repeatable)\n"
            "  --relaxed          the paper's integer program alone: one peak, free GPUs and NICs\n"
            "  --radius N         GPUs or NICs that a neighbour differs by; default 2\n"
            "  --trials N         layouts that are tried at most; default 48\n"
            "  --patience N       ... without a better one; default 24\n"
            "  --executor sim|cpu who says how long a step lasts: the simulator, or training on this\n"
            "                     machine's processors\n"
            "  --log FILE         every trial as it comes; what it holds already is not tried again\n"
            "  --lp FILE          the integer program of the best seed in CPLEX LP format\n"
            "  --from-scratch     begin at even splits instead of the program's solutions\n"
            "  --exhaustive       compare even split, program, search and search from scratch with\n"
            "                     every layout there is, at the tuner's cp, memory and order\n"
            "  --jobs N           threads; the result does not depend on it\n"
            "  --json             one object a point\n"
            "  --quiet            no progress\n",
    .run = run,
};
