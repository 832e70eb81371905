/*
What `disagmoe plan` says: a JSON object a point, or tables and a drawn roofline, 80 columns wide.
*/
#include "cli/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- JSON ---------------------------------------------------------------------------------------------- */

static void add_inputs(cJSON *object, const struct roofline *roofline) {
    cJSON *inputs = cJSON_AddObjectToObject(object, "inputs");
    json_add_number(inputs, "attn_flops", roofline->attn_flops);
    json_add_number(inputs, "ffn_flops", roofline->ffn_flops);
    json_add_number(inputs, "bytes", roofline->bytes);
    json_add_number(inputs, "peak_flops", roofline->peak_flops);
    json_add_number(inputs, "attn_flops_per_s", roofline->attn_flops_per_s);
    json_add_number(inputs, "ffn_flops_per_s", roofline->ffn_flops_per_s);
    json_add_number(inputs, "nic_bytes_per_s", roofline->nic_bytes_per_s);
    json_add_number(inputs, "gpus", roofline->gpus);
    json_add_number(inputs, "nics", roofline->nics);
}

static void add_solution(cJSON *object, const struct allocation_solution *solution) {
    cJSON *milp = cJSON_AddObjectToObject(object, "milp");
    json_add_number(milp, "attn_gpus", solution->allocation.attn_gpus);
    json_add_number(milp, "ffn_gpus", solution->allocation.ffn_gpus);
    json_add_number(milp, "attn_nics", solution->allocation.attn_nics);
    json_add_number(milp, "ffn_nics", solution->allocation.ffn_nics);
    json_add_number(milp, "t_attn_s", solution->attn_seconds);
    json_add_number(milp, "t_ffn_s", solution->ffn_seconds);
    json_add_number(milp, "mfu", solution->mfu);
}

static cJSON *layout_json(const struct plan *plan) {
    const struct parallel *parallel = &plan->parallel;
    cJSON *object = cJSON_CreateObject();
    json_add_number(object, "groups", parallel->groups);
    json_add_number(object, "attn_gpus", parallel->attn_gpus);
    json_add_number(object, "ffn_gpus", parallel->ffn_gpus);
    bool shared = parallel->attn_nics == NICS_SHARED;
    json_add_number(object, "attn_nics", shared ? NAN : parallel->attn_nics);
    json_add_number(object, "ffn_nics", shared ? NAN : parallel->ffn_nics);
    json_add_number(object, "cp", parallel->cp);
    json_add_number(object, "replicas", plan->replicas);
    cJSON_AddStringToObject(object, "placement",
                            plan->placement == PLACEMENT_MIXED ? "mixed-nodes" : "split-nodes");
    return object;
}

static void add_trials(cJSON *object, const struct search *search) {
    cJSON *candidates = cJSON_AddArrayToObject(object, "candidates");
    for (int i = 0; i < search->count; i++) {
        const struct trial *trial = &search->trials[i];
        cJSON *one = layout_json(&trial->plan);
        json_add_number(one, "predicted_s_per_sequence", trial->predicted);
        json_add_number(one, "seconds_per_sequence", trial->seconds);
        cJSON_AddItemToArray(candidates, one);
    }
}

static void add_comparison(cJSON *object, const struct comparison *comparison) {
    if (!comparison->done) return;
    cJSON *to = cJSON_AddObjectToObject(object, "comparison");
    json_add_number(to, "uniform_s_per_sequence", comparison->uniform);
    json_add_number(to, "milp_s_per_sequence", comparison->milp);
    json_add_number(to, "searched_s_per_sequence", comparison->searched);
    json_add_number(to, "searched_evaluations", comparison->searched_evaluations);
    json_add_number(to, "scratch_s_per_sequence", comparison->scratch);
    json_add_number(to, "scratch_evaluations", comparison->scratch_evaluations);
    json_add_number(to, "exhaustive_s_per_sequence", comparison->exhaustive.best.seconds);
    json_add_number(to, "exhaustive_evaluations", comparison->exhaustive.evaluations);
    json_add_number(to, "layouts", (double)comparison->exhaustive.layouts);
    if (comparison->exhaustive.best.seconds < INFINITY)
        cJSON_AddItemToObject(to, "exhaustive", layout_json(&comparison->exhaustive.best.plan));
}

static void add_prices(cJSON *object, const struct allocation_report *report);

void plan_report_json(const struct allocation_report *report, FILE *stream) {
    const struct point *point = report->point;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "system", report->system->name);
    cJSON_AddStringToObject(object, "model", point->model->name);
    cJSON_AddStringToObject(object, "cluster", point->cluster->name);
    json_add_number(object, "nodes", point->cluster->nodes);
    json_add_number(object, "seq_len", point->seq_len);
    cJSON *swept = cJSON_AddObjectToObject(object, "swept");
    for (int i = 0; i < point->swept_count; i++)
        cJSON_AddItemToObject(swept, point->swept[i].path, cJSON_Parse(point->swept[i].value));
    cJSON_AddStringToObject(object, "form", report->relaxed_form ? "relaxed" : "constrained");
    cJSON_AddStringToObject(object, "passes", report->relaxed_form ? "forward" : "training step");
    if (report->relaxed_form) {
        add_inputs(object, &report->relaxed);
        if (report->relaxed_solved) add_solution(object, &report->relaxed_solution);
        cJSON_AddNullToObject(object, "chosen");
        cJSON_AddArrayToObject(object, "candidates");
        json_add_number(object, "evaluations", 0);
    } else {
        const struct seed *seed = &report->seeds.list[0];
        add_inputs(object, &seed->roofline);
        add_solution(object, &seed->solution);
        cJSON_AddItemToObject(object, "chosen",
                              report->chosen.feasible ? result_json(&report->chosen) : cJSON_CreateNull());
        add_trials(object, &report->search);
        json_add_number(object, "evaluations", report->search.count - report->search.reused);
        json_add_number(object, "solver_s", report->seeds.solve_seconds);
        add_prices(object, report);
        add_comparison(object, &report->comparison);
    }
    cJSON_AddStringToObject(object, "executor", report->executor);
    cJSON_AddStringToObject(object, "cost_source", point->table ? "table" : "model");
    json_add_number(object, "seed", point->seed);
    cJSON_AddStringToObject(object, "version", VERSION);
    print_json_line(object, stream);
}

/* ---- what binds ---------------------------------------------------------------------------------------- */

/* Roofs of the chosen layout: seconds of a layer for the micro-batch of the even split. */
struct roofs {
    double attention, ffn, attention_nics, ffn_nics;
};

static double at(const double *seconds, int length, int count) {
    return count >= 1 && count <= length ? seconds[count - 1] : INFINITY;
}

static struct roofs roofs_of(const struct allocation_problem *problem, const struct parallel *parallel) {
    int nics = problem->nics / 2;
    bool shared = parallel->attn_nics == NICS_SHARED;
    return (struct roofs){at(problem->attn_seconds, problem->most_attn_gpus, parallel->attn_gpus),
                          at(problem->ffn_seconds, problem->most_ffn_gpus, parallel->ffn_gpus),
                          at(problem->attn_nic_seconds, problem->nics, shared ? nics : parallel->attn_nics),
                          at(problem->ffn_nic_seconds, problem->nics, shared ? nics : parallel->ffn_nics)};
}

static double highest(struct roofs roofs) {
    return fmax(fmax(roofs.attention, roofs.ffn), fmax(roofs.attention_nics, roofs.ffn_nics));
}

static const char *binding(struct roofs roofs) {
    double most = highest(roofs);
    return most == roofs.attention        ? "attention's computation"
           : most == roofs.ffn            ? "the experts' computation"
           : most == roofs.attention_nics ? "the attention side's NICs"
                                          : "the feed-forward side's NICs";
}

/* The slower side with one more of something, as a part of what it is. */
struct price {
    const char *key, *what;
    double ratio;
};
#define PRICES 4

static void prices_of(const struct allocation_report *report, struct price prices[PRICES]) {
    const struct allocation_problem *problem = &report->chosen_seed.problem;
    const struct parallel *chosen = &report->chosen.plan.parallel;
    double now = highest(roofs_of(problem, chosen));
    struct parallel more[PRICES] = {*chosen, *chosen, *chosen, *chosen};
    more[0].attn_gpus += chosen->cp;
    more[1].ffn_gpus++;
    if (chosen->attn_nics != NICS_SHARED) {
        more[2].attn_nics++;
        more[3].ffn_nics++;
    }
    static const struct price names[PRICES] = {{"attn_gpus", "an attention GPU (a run of cp)", 1},
                                               {"ffn_gpus", "a feed-forward GPU", 1},
                                               {"attn_nics", "a NIC for attention", 1},
                                               {"ffn_nics", "a NIC for experts", 1}};
    for (int i = 0; i < PRICES; i++) {
        struct roofs roofs = roofs_of(problem, &more[i]), before = roofs_of(problem, chosen);
        prices[i] = names[i];
        /* Beyond the tables there is no such group: the same law goes on. */
        if (roofs.attention == INFINITY)
            roofs.attention = before.attention * chosen->attn_gpus / more[i].attn_gpus;
        if (roofs.ffn == INFINITY) roofs.ffn = before.ffn;
        if (roofs.attention_nics == INFINITY)
            roofs.attention_nics = before.attention_nics * chosen->attn_nics / more[i].attn_nics;
        if (roofs.ffn_nics == INFINITY)
            roofs.ffn_nics = before.ffn_nics * chosen->ffn_nics / more[i].ffn_nics;
        prices[i].ratio = highest(roofs) / now;
    }
}

static bool has_roofs(const struct allocation_report *report) {
    return report->chosen.feasible && report->chosen_seed.problem.attn_seconds;
}

static void add_prices(cJSON *object, const struct allocation_report *report) {
    if (!has_roofs(report)) return;
    struct price prices[PRICES];
    prices_of(report, prices);
    cJSON_AddStringToObject(object, "binds",
                            binding(roofs_of(&report->chosen_seed.problem, &report->chosen.plan.parallel)));
    cJSON *to = cJSON_AddObjectToObject(object, "with_one_more");
    for (int i = 0; i < PRICES; i++) json_add_number(to, prices[i].key, prices[i].ratio);
}

/* ---- the drawing --------------------------------------------------------------------------------------- */

#define COLUMNS 56
#define ROWS 13
#define DECADES 5.0 /* 1 to 100,000 FLOP a byte */
#define LOWEST 11.0 /* 0.1 to 1000 TFLOP/s */

static int column_of(double intensity) {
    int column = (int)lround(log10(intensity) / DECADES * (COLUMNS - 1));
    return column < 0 ? 0 : column > COLUMNS - 1 ? COLUMNS - 1 : column;
}

static int row_of(double flops_per_s) {
    int row = ROWS - 1 - (int)lround((log10(flops_per_s) - LOWEST) / 4 * (ROWS - 1));
    return row < 0 ? 0 : row > ROWS - 1 ? ROWS - 1 : row;
}

/* A roof: bytes/s × intensity up to the peak. */
static void draw_roof(char drawing[ROWS][COLUMNS + 1], double bytes_per_s, double peak, char mark) {
    for (int column = 0; column < COLUMNS; column++) {
        double intensity = pow(10, column * DECADES / (COLUMNS - 1));
        double reach = fmin(peak, intensity * bytes_per_s);
        if (reach < pow(10, LOWEST)) continue;
        char *cell = &drawing[row_of(reach)][column];
        if (*cell == ' ' || reach < peak) *cell = reach < peak ? mark : '-';
    }
}

static void draw_roofline(const struct point *point, struct intensity intensity, FILE *stream) {
    const struct cluster *cluster = point->cluster;
    char drawing[ROWS][COLUMNS + 1];
    double peak = cluster->gpu.peak_flops, nic = cluster->nic.bytes_per_s,
           nvlink = cluster->nvlink.bytes_per_s;
    memset(drawing, ' ', sizeof drawing);
    draw_roof(drawing, nvlink, peak, '.');
    draw_roof(drawing, nic, peak, '/');
    drawing[row_of(fmin(peak, intensity.attention * nic))][column_of(intensity.attention)] = 'A';
    char *experts = &drawing[row_of(fmin(peak, intensity.ffn * nic))][column_of(intensity.ffn)];
    if (*experts == 'A') experts += intensity.ffn < intensity.attention ? -1 : 1; /* beside, not over it */
    *experts = 'F';
    fprintf(stream, "\nTFLOP/s a GPU\n");
    for (int row = 0; row < ROWS; row++) {
        static const char *const labels[] = {"1000", "100", "10", "1", "0.1"};
        bool labelled = row * 4 % (ROWS - 1) == 0;
        drawing[row][COLUMNS] = 0;
        int length = COLUMNS;
        while (length > 0 && drawing[row][length - 1] == ' ') drawing[row][--length] = 0;
        fprintf(stream, "%6s |%s\n", labelled ? labels[row * 4 / (ROWS - 1)] : "", drawing[row]);
    }
    fprintf(stream, "       +");
    for (int i = 0; i < COLUMNS; i++) fputc('-', stream);
    fprintf(stream, "\n        1          10         100        1000       10K        100K  FLOP/byte\n");
    fprintf(stream, "A attention, F experts on the NIC's roof (/); . NVLink's roof; - peak\n");
}

/* ---- text ---------------------------------------------------------------------------------------------- */

static const char *recompute_text(const struct memory *memory, char *buffer, size_t size) {
    static const char *const attention[] = {"none", "norms", "projections", "full"};
    static const char *const ffn[] = {"none", "activation", "full"};
    const char *word = recompute_word(memory->recompute);
    if (word)
        snprintf(buffer, size, "%s", word);
    else if (memory->recompute.layers)
        snprintf(buffer, size, "attention %s, ffn %s in %d layers", attention[memory->recompute.attention],
                 ffn[memory->recompute.ffn], memory->recompute.layers);
    else
        snprintf(buffer, size, "attention %s, ffn %s", attention[memory->recompute.attention],
                 ffn[memory->recompute.ffn]);
    return buffer;
}

static void print_heading(const struct allocation_report *report, FILE *stream) {
    const struct point *point = report->point;
    char sequence[16];
    fprintf(stream, "\n%s, %s tokens, %d nodes of %s: %s\n", point->model->name,
            sequence_text(point->seq_len, sequence), point->cluster->nodes, point->cluster->name,
            report->system->name);
}

static void print_relaxed(const struct allocation_report *report, FILE *stream) {
    const struct roofline *roofline = &report->relaxed;
    const struct point *point = report->point;
    char a[16], f[16], v[16];
    struct intensity exact = intensity_exact(point->model, point->seq_len);
    struct intensity paper = intensity_of_paper(point->model, point->seq_len);
    fprintf(stream, "\nThe paper's roofline (forward, one peak of %s, GPUs and NICs free)\n",
            scaled_text(roofline->peak_flops, a, sizeof a));
    fprintf(stream, "  a layer's micro-batch: attention %sFLOP, experts %sFLOP, %sB sent; A:F %.2f\n",
            scaled_text(roofline->attn_flops, a, sizeof a), scaled_text(roofline->ffn_flops, f, sizeof f),
            scaled_text(roofline->bytes, v, sizeof v), roofline->attn_flops / roofline->ffn_flops);
    fprintf(stream, "  FLOP a byte sent:      attention %.0f, experts %.0f (the paper's forms: %.0f, %.0f)\n",
            exact.attention, exact.ffn, paper.attention, paper.ffn);
    fprintf(stream, "  turning point:         NIC %.0f, NVLink %.0f\n",
            turning_point(roofline->peak_flops, roofline->nic_bytes_per_s),
            turning_point(roofline->peak_flops, point->cluster->nvlink.bytes_per_s));
    if (!report->relaxed_solved) {
        fprintf(stream, "  no allocation: %s\n", report->why);
        return;
    }
    const struct allocation_solution *solution = &report->relaxed_solution;
    fprintf(
        stream, "  best split:            %d + %d GPUs, %d + %d NICs; T_a %.3g s, T_f %.3g s; MFU %.0f%%\n",
        solution->allocation.attn_gpus, solution->allocation.ffn_gpus, solution->allocation.attn_nics,
        solution->allocation.ffn_nics, solution->attn_seconds, solution->ffn_seconds, 100 * solution->mfu);
}

static int by_seconds(const void *a, const void *b) {
    const struct trial *x = *(const struct trial *const *)a, *y = *(const struct trial *const *)b;
    if (x->seconds != y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return (x > y) - (x < y);
}

#define SHOWN 10

static void print_candidates(const struct allocation_report *report, FILE *stream) {
    const struct search *search = &report->search;
    const struct trial **sorted = must_alloc((size_t)(search->count + 1) * sizeof *sorted);
    for (int i = 0; i < search->count; i++) sorted[i] = &search->trials[i];
    qsort(sorted, (size_t)search->count, sizeof *sorted, by_seconds);
    fprintf(stream, "\n%-26s %-9s %12s %12s %6s\n", "layout", "NICs", "predicted", report->executor, "ratio");
    for (int i = 0; i < search->count && i < SHOWN; i++) {
        const struct trial *trial = sorted[i];
        char layout[48], nics[24] = "shared", predicted[16] = "-", found[16] = "does not fit",
                         ratio[16] = "-";
        if (trial->plan.parallel.attn_nics != NICS_SHARED)
            snprintf(nics, sizeof nics, "%d+%d", trial->plan.parallel.attn_nics,
                     trial->plan.parallel.ffn_nics);
        if (!isnan(trial->predicted)) snprintf(predicted, sizeof predicted, "%.5g", trial->predicted);
        if (trial->seconds < INFINITY) snprintf(found, sizeof found, "%.5g", trial->seconds);
        if (trial->seconds < INFINITY && !isnan(trial->predicted))
            snprintf(ratio, sizeof ratio, "%.3f", trial->seconds / trial->predicted);
        fprintf(stream, "%-26s %-9s %12s %12s %6s\n", layout_text(&trial->plan, layout, sizeof layout), nics,
                predicted, found, ratio);
    }
    free(sorted);
    fprintf(stream,
            "layout: replicas x groups x (A+F GPUs) on split (s) or mixed (m) nodes; NICs of\n"
            "a group's sides; seconds a sequence, predicted by the roofline and by %s.\n",
            report->executor);
    fprintf(stream, "%d layouts tried, %d of them read from the log; %d programs solved for %d shapes\n",
            search->count, search->reused, report->seeds.problems, report->seeds.shapes);
}

static void print_roof(const char *name, double roof, double most, double micro_batches, double simulated,
                       FILE *stream) {
    char of_step[16] = "-", ratio[16] = "-";
    if (simulated > 0) snprintf(of_step, sizeof of_step, "%.4g", simulated);
    if (simulated > 0) snprintf(ratio, sizeof ratio, "%.3f", simulated / (roof * micro_batches));
    fprintf(stream, "%-26s %11.4g %5.0f%% %12.4g %11s %6s\n", name, roof, 100 * roof / most,
            roof * micro_batches, of_step, ratio);
}

static void print_why(const struct allocation_report *report, FILE *stream) {
    const struct plan *plan = &report->chosen.plan;
    const struct seed *seed = &report->chosen_seed;
    struct roofs roofs = roofs_of(&seed->problem, &plan->parallel);
    double most = highest(roofs);
    int layers = plan->point->model->layers,
        fullest = (layers + plan->parallel.groups - 1) / plan->parallel.groups;
    /* The tables are for the micro-batch of the even split. */
    double many = plan->parallel.attn_gpus / seed->even_attn_gpus * fullest * plan->micro_batches;
    fprintf(stream, "\nroofs of the chosen layout    a layer, s  of 1st    of a step    %s's  ratio\n",
            "sim");
    print_roof("attention, computing", roofs.attention, most, many, report->lane_seconds[0], stream);
    print_roof("experts, computing", roofs.ffn, most, many, report->lane_seconds[1], stream);
    double nics = fmax(roofs.attention_nics, roofs.ffn_nics);
    print_roof(roofs.attention_nics >= roofs.ffn_nics ? "transfers (A's NICs)" : "transfers (F's NICs)", nics,
               most, many, report->lane_seconds[2], stream);
    fprintf(stream, "It is bound by %s.", binding(roofs));
    struct price prices[PRICES];
    prices_of(report, prices);
    fprintf(stream, " With one more of each, the slower side would take\n");
    for (int i = 0; i < PRICES; i++)
        fprintf(stream, "  %-32s %+5.1f%%\n", prices[i].what, 100 * (prices[i].ratio - 1));
}

static void print_chosen(const struct allocation_report *report, FILE *stream) {
    const struct result *chosen = &report->chosen;
    char layout[48], recompute[64], rate[16];
    if (!chosen->feasible) {
        fprintf(stream, "\nNothing that was tried fits.\n");
        return;
    }
    fprintf(stream, "\nchosen: %s, NICs %d+%d, recompute %s, expert input %s\n",
            layout_text(&chosen->plan, layout, sizeof layout), chosen->plan.parallel.attn_nics,
            chosen->plan.parallel.ffn_nics, recompute_text(&chosen->plan.memory, recompute, sizeof recompute),
            chosen->plan.memory.expert_input == INPUT_RESEND ? "sent again" : "kept");
    fprintf(stream, "        %stokens/s, step %.4g s, MFU %.1f%% (executor sim)\n",
            scaled_text(chosen->tokens_per_s, rate, sizeof rate), chosen->step_time, 100 * chosen->mfu);
    if (has_roofs(report)) print_why(report, stream);
}

static void print_way(const char *name, double seconds, double best, int evaluations, FILE *stream) {
    char found[24] = "does not fit", over[16] = "-";
    if (seconds < INFINITY) snprintf(found, sizeof found, "%.5g", seconds);
    if (seconds < INFINITY) snprintf(over, sizeof over, "%+.1f%%", 100 * (seconds / best - 1));
    fprintf(stream, "%-30s %14s %10s %12d\n", name, found, over, evaluations);
}

static void print_comparison(const struct comparison *comparison, FILE *stream) {
    if (!comparison->done) return;
    double best = comparison->exhaustive.best.seconds;
    fprintf(stream, "\n%-30s %14s %10s %12s\n", "at the tuner's other choices", "s a sequence", "over best",
            "evaluations");
    print_way("even splits, the best of them", comparison->uniform, best, comparison->scratch_evaluations,
              stream);
    print_way("program alone", comparison->milp, best, 1, stream);
    print_way("program and search", comparison->searched, best, comparison->searched_evaluations, stream);
    print_way("search from scratch", comparison->scratch, best, comparison->scratch_evaluations, stream);
    print_way("exhaustive", best, best, comparison->exhaustive.evaluations, stream);
    fprintf(stream, "of %lld layouts; the others have a lower bound above the best\n",
            (long long)comparison->exhaustive.layouts);
}

void plan_report_print(const struct allocation_report *report, FILE *stream) {
    print_heading(report, stream);
    print_relaxed(report, stream);
    draw_roofline(report->point, intensity_exact(report->point->model, report->point->seq_len), stream);
    if (report->relaxed_form) return;
    const struct roofline *achieved = &report->seeds.list[0].roofline;
    if (achieved->attn_flops > 0) {
        char a[16], f[16], b[16];
        fprintf(stream,
                "\nAt achieved rates (all passes): attention %sFLOP/s, experts %sFLOP/s a GPU, NIC\n"
                "%sB/s; A:F of seconds %.2f. The best predicted: %d + %d GPUs, %d + %d NICs.\n",
                scaled_text(achieved->attn_flops_per_s, a, sizeof a),
                scaled_text(achieved->ffn_flops_per_s, f, sizeof f),
                scaled_text(achieved->nic_bytes_per_s, b, sizeof b),
                achieved->attn_flops / achieved->attn_flops_per_s * achieved->ffn_flops_per_s /
                    achieved->ffn_flops,
                report->seeds.list[0].solution.allocation.attn_gpus,
                report->seeds.list[0].solution.allocation.ffn_gpus,
                report->seeds.list[0].solution.allocation.attn_nics,
                report->seeds.list[0].solution.allocation.ffn_nics);
    }
    print_candidates(report, stream);
    print_chosen(report, stream);
    print_comparison(&report->comparison, stream);
}
