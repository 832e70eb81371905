/*
What a training run shows: a heading, a line a step, and at its end memory, speed and the last losses.

JSON lines: one object a step; then the run's record, with the keys that records have whatever the executor
(null where a real run measures nothing of the kind) and those that only training has; with --verify one
object more.
*/
#include "cli/cli.h"
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- lines ------------------------------------------------------------------------------------------- */

/* Takes the object. */
static void print_line(const struct training_report *report, cJSON *object) {
    char *text = cJSON_PrintUnformatted(object);
    if (report->json) printf("%s\n", text);
    if (report->lines) fprintf(report->lines, "%s\n", text);
    if (report->lines) fflush(report->lines);
    cJSON_free(text);
    cJSON_Delete(object);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The first step warms up caches, threads and connections: it counts only when there is no other. */
static double median_seconds(const struct training_report *report) {
    int skipped = report->steps > 1, count = report->steps - skipped;
    if (count == 0) return NAN;
    double *sorted = must_alloc((size_t)count * sizeof *sorted);
    memcpy(sorted, report->seconds + skipped, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, by_value);
    double median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
    free(sorted);
    return median;
}

static double tokens_of(const struct plan *plan) {
    return plan->sequences * plan->point->seq_len;
}

/* ---- the table --------------------------------------------------------------------------------------- */

/* "A 2 + F 2, 2 groups, cp 2" or "pp 2 x ep 2 x dp 2, vpp 2" */
static void print_layout(const struct plan *plan) {
    const struct parallel *parallel = &plan->parallel;
    if (!plan->micro_batches) {
        printf("a single process");
    } else if (parallel->groups) {
        printf("A %d + F %d, %d group%s", parallel->attn_gpus, parallel->ffn_gpus, parallel->groups,
               parallel->groups > 1 ? "s" : "");
        if (plan->replicas > 1) printf(", %d replicas", plan->replicas);
    } else {
        printf("pp %d x ep %d x dp %d", parallel->pp, parallel->ep, plan->replicas);
        if (parallel->vpp > 1) printf(", vpp %d", parallel->vpp);
    }
    if (parallel->cp > 1) printf(", cp %d", parallel->cp);
}

void training_report_begin(const struct training_report *report) {
    if (report->json) return;
    const struct plan *plan = report->plan;
    const struct point *point = plan->point;
    printf("%s: %.24s, %.2f M parameters, executor cpu, %s, seed %llu\n", report->system->name,
           point->model->name, model_parameter_count(point->model).total / 1e6, report->precision,
           (unsigned long long)report->seed);
    if (*point->label) printf("%s\n", point->label);
    printf("%d ranks: ", plan->gpus);
    print_layout(plan);
    printf("; %.0f x %d tokens a step\n", plan->sequences, point->seq_len);
    if (!isnan(report->entropy))
        printf("entropy of the data: %.4f nats a token, below which no cross-entropy can be\n",
               report->entropy);
    printf("%6s %10s %10s %9s %9s %9s %9s %10s\n", "step", "loss", "cross-ent.", "aux", "tokens/s",
           "grad norm", "imbalance", "exposed ms");
    fflush(stdout);
}

/* ---- a step ------------------------------------------------------------------------------------------ */

static cJSON *step_json(const struct training_report *report, const struct step_report *step) {
    const struct point *point = report->plan->point;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "system", report->system->name);
    cJSON_AddStringToObject(object, "executor", "cpu");
    if (*point->label) cJSON_AddStringToObject(object, "point", point->label);
    json_add_number(object, "step", (double)step->step);
    json_add_number(object, "loss", step->losses.total);
    json_add_number(object, "cross_entropy", step->losses.cross_entropy);
    json_add_number(object, "aux_loss", step->losses.aux);
    json_add_number(object, "z_loss", step->losses.z);
    json_add_number(object, "learning_rate", step->learning_rate);
    json_add_number(object, "grad_norm", step->grad_norm);
    json_add_number(object, "tokens_per_s", step->tokens_per_s);
    json_add_number(object, "step_time_s", step->seconds);
    json_add_number(object, "imbalance", step->losses.imbalance);
    json_add_number(object, "exposed_comm_s", step->exposed);
    return object;
}

void training_report_step(struct training_report *report, const struct step_report *step) {
    report->seconds = must_realloc(report->seconds, (size_t)(report->steps + 1) * sizeof *report->seconds);
    report->seconds[report->steps++] = step->seconds;
    print_line(report, step_json(report, step));
    if (!report->json)
        printf("%6lld %10.6f %10.6f %9.6f %9.0f %9.4f %9.3f %10.3f\n", (long long)step->step,
               step->losses.total, step->losses.cross_entropy, step->losses.aux, step->tokens_per_s,
               step->grad_norm, step->losses.imbalance, 1e3 * step->exposed);
    fflush(stdout);
}

void training_report_checkpoint(struct training_report *report, const char *checkpoint) {
    report->checkpoint = checkpoint;
    if (!report->json) printf("checkpoint %s\n", checkpoint);
    fflush(stdout);
}

/* ---- the run ----------------------------------------------------------------------------------------- */

/* Largest of all ranks: of what was held, from what was due in the order in which the step really ran; of
   that, from the simulated timeline's peak, which it may stay below where transfers came later than
   simulated. */
struct deviations {
    double bytes, order;
};

static struct deviations deviations_of(const struct memory_report *memory, int ranks) {
    struct deviations found = {0};
    for (int rank = 0; rank < ranks && memory[rank].predicted > 0; rank++) {
        found.bytes = fmax(found.bytes, fabs(memory[rank].used / memory[rank].as_run - 1));
        found.order = fmax(found.order, 1 - memory[rank].as_run / memory[rank].predicted);
    }
    return found;
}

static cJSON *memory_json(const struct memory_report *fullest) {
    cJSON *object = cJSON_CreateObject();
    json_add_number(object, "predicted", fullest->predicted);
    json_add_number(object, "predicted_static", fullest->predicted_static);
    json_add_number(object, "as_run", fullest->as_run);
    json_add_number(object, "used", fullest->used);
    json_add_number(object, "static", fullest->used_static);
    json_add_number(object, "workspace", fullest->workspace);
    json_add_number(object, "host", fullest->host);
    return object;
}

static cJSON *run_json(const struct training_report *report, const struct step_report *last,
                       const struct memory_report *fullest, struct deviations deviations, int ranks,
                       bool oom) {
    double seconds = median_seconds(report);
    struct result result = {.system = report->system,
                            .plan = *report->plan,
                            .feasible = true,
                            .oom = oom,
                            .step_time = seconds,
                            .tokens_per_s = tokens_of(report->plan) / seconds,
                            .mfu = NAN,
                            .speedup = NAN,
                            .breakdown = {NAN, NAN, NAN, NAN, NAN, NAN},
                            .comm_total = NAN,
                            .efficiency = NAN,
                            .peak_memory = fullest->used,
                            .ops = report->ops,
                            .executor = "cpu"};
    cJSON *object = result_json(&result);
    cJSON_ReplaceItemInObjectCaseSensitive(object, "cost_source", cJSON_CreateString("measured"));
    cJSON_ReplaceItemInObjectCaseSensitive(object, "seed", json_number((double)report->seed));
    if (*report->plan->point->label) cJSON_AddStringToObject(object, "point", report->plan->point->label);
    cJSON_AddStringToObject(object, "dtype", report->precision);
    json_add_number(object, "ranks", ranks);
    json_add_number(object, "steps", report->steps);
    json_add_number(object, "loss", last ? last->losses.total : NAN);
    json_add_number(object, "cross_entropy", last ? last->losses.cross_entropy : NAN);
    json_add_number(object, "aux_loss", last ? last->losses.aux : NAN);
    json_add_number(object, "z_loss", last ? last->losses.z : NAN);
    json_add_number(object, "entropy", report->entropy);
    cJSON_AddItemToObject(object, "memory_bytes", memory_json(fullest));
    json_add_number(object, "memory_deviation", deviations.bytes);
    json_add_number(object, "memory_below_simulated", deviations.order);
    if (report->checkpoint)
        cJSON_AddStringToObject(object, "checkpoint", report->checkpoint);
    else
        cJSON_AddNullToObject(object, "checkpoint");
    return object;
}

static void print_memory(const struct training_report *report, const struct memory_report *fullest,
                         struct deviations deviations) {
    printf("memory of the fullest rank, MB: predicted %.3f, as run %.3f, used %.3f;\n",
           fullest->predicted / 1e6, fullest->as_run / 1e6, fullest->used / 1e6);
    printf("  of it static %.3f; besides workspace %.3f, host %.3f\n", fullest->used_static / 1e6,
           fullest->workspace / 1e6, fullest->host / 1e6);
    printf("  largest deviation of a rank: %.2g %%%s;\n  at most %.2g %% below the simulated peak\n",
           100 * deviations.bytes,
           report->plan->point->training.forced_routing ? "" : " (the router's load is not the plan's)",
           100 * deviations.order);
}

static void print_end(const struct training_report *report, const struct memory_report *fullest,
                      struct deviations deviations, bool oom) {
    double seconds = median_seconds(report);
    if (report->steps)
        printf("median of the steps%s: %.0f tokens/s, %.2f ms a step\n",
               report->steps > 1 ? " behind the first" : "", tokens_of(report->plan) / seconds,
               1e3 * seconds);
    else
        printf("no step is left to do\n");
    if (fullest->predicted > 0) print_memory(report, fullest, deviations);
    if (oom) printf("  oom: %.3f MB of a GPU are usable\n", plan_usable_memory(report->plan->point) / 1e6);
    fflush(stdout);
}

void training_report_end(struct training_report *report, const struct step_report *last,
                         const struct memory_report *memory, int ranks) {
    int fullest = 0;
    double predicted = 0;
    struct deviations deviations = deviations_of(memory, ranks);
    for (int rank = 0; rank < ranks; rank++) {
        if (memory[rank].used > memory[fullest].used) fullest = rank;
        predicted = fmax(predicted, memory[rank].predicted);
    }
    bool oom = predicted > plan_usable_memory(report->plan->point);
    print_line(report, run_json(report, last, &memory[fullest], deviations, ranks, oom));
    if (!report->json) print_end(report, &memory[fullest], deviations, oom);
    fflush(stdout);
}

/* ---- the verdict ------------------------------------------------------------------------------------- */

void training_report_verdict(const struct training_report *report, const struct verification *verification,
                             double tolerance, int ranks) {
    cJSON *object = cJSON_CreateObject();
    json_add_number(object, "loss_rel", verification->loss_rel);
    json_add_number(object, "grad_rel", verification->grad_rel);
    cJSON_AddStringToObject(object, "worst_parameter", verification->worst_parameter);
    json_add_number(object, "ranks", ranks);
    cJSON_AddStringToObject(object, "system", report->system->name);
    print_line(report, object);
    if (!report->json) {
        bool equal = verification->loss_rel <= tolerance && verification->grad_rel <= tolerance;
        printf("%s the single-process reference: loss off by %.2g, gradients by %.2g\n",
               equal ? "agrees with" : "DIFFERS FROM", verification->loss_rel, verification->grad_rel);
        printf("  of %.70s\n", verification->worst_parameter);
        printf("  relative tolerance %g; batches drawn again for ties: %d\n", tolerance,
               verification->reseeded);
    }
    fflush(stdout);
}
