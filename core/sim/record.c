/*
The result record: one JSON object a line, or a line of CSV, the same keys for every system and executor.
Which keys of `parallel` and `order` appear is the system's matter: those it uses.
*/
#include "sim/sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *word(const char *choices, int index, char *buffer, size_t size) {
    for (; index > 0; index--) choices = strchr(choices, '|') + 1;
    snprintf(buffer, size, "%.*s", (int)strcspn(choices, "|"), choices);
    return buffer;
}

static void add_word(cJSON *object, const char *key, const char *choices, int index) {
    char buffer[32];
    cJSON_AddStringToObject(object, key, word(choices, index, buffer, sizeof buffer));
}

/* A figure; null where nothing is feasible. */
static void add_figure(cJSON *object, const struct result *result, const char *key, double value) {
    json_add_number(object, key, result->feasible ? value : NAN);
}

static cJSON *parallel_json(const struct plan *plan) {
    cJSON *object = cJSON_CreateObject();
    const struct parallel *parallel = &plan->parallel;
    if (parallel->pp) json_add_number(object, "pp", parallel->pp);
    if (parallel->vpp) json_add_number(object, "vpp", parallel->vpp);
    if (parallel->ep) json_add_number(object, "ep", parallel->ep);
    if (parallel->groups) json_add_number(object, "groups", parallel->groups);
    if (parallel->attn_gpus) json_add_number(object, "attn_gpus", parallel->attn_gpus);
    if (parallel->ffn_gpus) json_add_number(object, "ffn_gpus", parallel->ffn_gpus);
    if (parallel->attn_nics > 0) json_add_number(object, "attn_nics", parallel->attn_nics);
    if (parallel->ffn_nics > 0) json_add_number(object, "ffn_nics", parallel->ffn_nics);
    json_add_number(object, "cp", parallel->cp);
    json_add_number(object, "replicas", plan->replicas);
    return object;
}

/* A word where one says it all. */
static void add_recompute(cJSON *memory, struct recompute recompute) {
    const char *word = recompute_word(recompute);
    if (word) {
        cJSON_AddStringToObject(memory, "recompute", word);
        return;
    }
    cJSON *object = cJSON_AddObjectToObject(memory, "recompute");
    add_word(object, "attention", ATTENTION_CHOICES, recompute.attention);
    add_word(object, "ffn", FFN_CHOICES, recompute.ffn);
    if (recompute.layers) json_add_number(object, "layers", recompute.layers);
}

static cJSON *memory_json(const struct memory *memory) {
    cJSON *object = cJSON_CreateObject();
    add_recompute(object, memory->recompute);
    add_word(object, "expert_input", INPUT_CHOICES, memory->expert_input);
    add_word(object, "grads", PRECISION_CHOICES, memory->grads);
    add_word(object, "moments", PRECISION_CHOICES, memory->moments);
    json_add_number(object, "zero", memory->zero);
    cJSON_AddBoolToObject(object, "offload", memory->offload);
    return object;
}

static void add_without(cJSON *order, int without) {
    char buffer[32];
    cJSON *list = cJSON_AddArrayToObject(order, "without");
    for (int i = 0; without >> i; i++)
        if (without >> i & 1)
            cJSON_AddItemToArray(list, cJSON_CreateString(word(WITHOUT_CHOICES, i, buffer, sizeof buffer)));
}

static cJSON *order_json(const struct result *result) {
    if (!result->system->searches_order) return cJSON_CreateNull();
    cJSON *object = cJSON_CreateObject();
    json_add_number(object, "wave", result->plan.order.wave);
    json_add_number(object, "waves_in_flight", result->plan.order.waves_in_flight);
    add_word(object, "prefer", PREFER_CHOICES, result->plan.order.prefer);
    cJSON_AddBoolToObject(object, "patient", result->plan.order.patient);
    cJSON_AddBoolToObject(object, "justified", result->plan.order.justified);
    if (result->plan.order.without) add_without(object, result->plan.order.without);
    return object;
}

static cJSON *breakdown_json(const struct result *result) {
    cJSON *object = cJSON_CreateObject();
    const struct breakdown *parts = &result->breakdown;
    add_figure(object, result, "attention_s", parts->attention);
    add_figure(object, result, "ffn_s", parts->ffn);
    add_figure(object, result, "other_compute_s", parts->other_compute);
    add_figure(object, result, "exposed_comm_s", parts->exposed_comm);
    add_figure(object, result, "bubble_s", parts->bubble);
    add_figure(object, result, "optimizer_s", parts->optimizer);
    return object;
}

/* What the manifest gives, whether anything fits or not; the other of the two follows from the layout. */
static void add_batch(cJSON *object, const struct result *result) {
    const struct plan *plan = &result->plan;
    double batch = plan->sequences, micro_batches = plan->micro_batches;
    if (!result->feasible) {
        batch = plan->point->global_batch ? plan->point->global_batch : NAN;
        micro_batches = plan->point->micro_batches ? plan->point->micro_batches : NAN;
    }
    json_add_number(object, "global_batch", batch);
    json_add_number(object, "micro_batches", micro_batches);
}

static cJSON *swept_json(const struct point *point) {
    cJSON *object = cJSON_CreateObject();
    for (int i = 0; i < point->swept_count; i++)
        cJSON_AddRawToObject(object, point->swept[i].path, point->swept[i].value);
    return object;
}

cJSON *result_json(const struct result *result) {
    const struct plan *plan = &result->plan;
    const struct point *point = plan->point;
    bool feasible = result->feasible;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToObject(object, "swept", swept_json(point));
    cJSON_AddStringToObject(object, "system", result->system->name);
    cJSON_AddStringToObject(object, "model", point->model->name);
    cJSON_AddStringToObject(object, "cluster", point->cluster->name);
    json_add_number(object, "nodes", point->cluster->nodes);
    json_add_number(object, "seq_len", point->seq_len);
    add_batch(object, result);
    add_figure(object, result, "gpus", plan->gpus);
    cJSON_AddItemToObject(object, "parallel", feasible ? parallel_json(plan) : cJSON_CreateNull());
    cJSON_AddItemToObject(object, "memory", feasible ? memory_json(&plan->memory) : cJSON_CreateNull());
    cJSON_AddItemToObject(object, "order", feasible ? order_json(result) : cJSON_CreateNull());
    if (feasible && result->system->uses_placement)
        add_word(object, "placement", PLACEMENT_CHOICES, plan->placement);
    else
        cJSON_AddNullToObject(object, "placement");
    add_figure(object, result, "step_time_s", result->step_time);
    add_figure(object, result, "tokens_per_s", result->tokens_per_s);
    add_figure(object, result, "mfu", result->mfu);
    add_figure(object, result, "speedup_vs_megatron", result->speedup);
    cJSON_AddItemToObject(object, "breakdown", breakdown_json(result));
    add_figure(object, result, "comm_total_s", result->comm_total);
    add_figure(object, result, "schedule_efficiency", result->efficiency);
    add_figure(object, result, "peak_memory_bytes", result->peak_memory);
    cJSON_AddBoolToObject(object, "oom", result->oom);
    add_figure(object, result, "ops", (double)result->ops);
    cJSON_AddStringToObject(object, "executor", result->executor);
    cJSON_AddStringToObject(object, "cost_source", point->table ? "table" : "model");
    json_add_number(object, "seed", point->seed);
    cJSON_AddStringToObject(object, "version", VERSION);
    return object;
}

/* ---- CSV --------------------------------------------------------------------------------------------- */

static void csv_text(const char *text, FILE *stream) {
    bool quote = strpbrk(text, ",\"\r\n") != NULL;
    if (quote) fputc('"', stream);
    for (; *text; text++) {
        if (*text == '"') fputc('"', stream);
        fputc(*text, stream);
    }
    if (quote) fputc('"', stream);
}

/* Nested objects become columns "breakdown.attention_s"; the columns are those of all systems, so that every
   line has the same. What is swept comes last: the others stand in one place whatever the manifest sweeps. */
static const char *const columns[] = {"system",
                                      "model",
                                      "cluster",
                                      "nodes",
                                      "seq_len",
                                      "global_batch",
                                      "micro_batches",
                                      "gpus",
                                      "parallel.pp",
                                      "parallel.vpp",
                                      "parallel.ep",
                                      "parallel.groups",
                                      "parallel.attn_gpus",
                                      "parallel.ffn_gpus",
                                      "parallel.attn_nics",
                                      "parallel.ffn_nics",
                                      "parallel.cp",
                                      "parallel.replicas",
                                      "memory.recompute",
                                      "memory.expert_input",
                                      "memory.grads",
                                      "memory.moments",
                                      "memory.zero",
                                      "memory.offload",
                                      "order.wave",
                                      "order.waves_in_flight",
                                      "order.prefer",
                                      "order.patient",
                                      "order.justified",
                                      "order.without",
                                      "placement",
                                      "step_time_s",
                                      "tokens_per_s",
                                      "mfu",
                                      "speedup_vs_megatron",
                                      "breakdown.attention_s",
                                      "breakdown.ffn_s",
                                      "breakdown.other_compute_s",
                                      "breakdown.exposed_comm_s",
                                      "breakdown.bubble_s",
                                      "breakdown.optimizer_s",
                                      "comm_total_s",
                                      "schedule_efficiency",
                                      "peak_memory_bytes",
                                      "oom",
                                      "ops",
                                      "executor",
                                      "cost_source",
                                      "seed",
                                      "version"};

void result_csv_heading(const struct point *point, FILE *stream) {
    for (size_t i = 0; i < COUNT(columns); i++) fprintf(stream, "%s%s", i ? "," : "", columns[i]);
    for (int i = 0; i < point->swept_count; i++) {
        struct text column = {0};
        text_add(&column, "swept.%s", point->swept[i].path);
        fputc(',', stream);
        csv_text(column.text, stream);
        free(column.text);
    }
    fputc('\n', stream);
}

static void csv_value(const cJSON *value, FILE *stream) {
    if (!value || cJSON_IsNull(value)) return;
    char *text = cJSON_IsString(value) ? NULL : cJSON_PrintUnformatted(value);
    csv_text(text ? text : value->valuestring, stream);
    cJSON_free(text);
}

/* A text without its quotes, as in the other columns. */
static void csv_swept(const struct swept *swept, FILE *stream) {
    cJSON *value = cJSON_Parse(swept->value);
    csv_text(cJSON_IsString(value) ? value->valuestring : swept->value, stream);
    cJSON_Delete(value);
}

void result_csv(const struct result *result, FILE *stream) {
    const struct point *point = result->plan.point;
    cJSON *object = result_json(result);
    for (size_t i = 0; i < COUNT(columns); i++) {
        if (i) fputc(',', stream);
        csv_value(json_get_path(object, columns[i]), stream);
    }
    for (int i = 0; i < point->swept_count; i++) {
        fputc(',', stream);
        csv_swept(&point->swept[i], stream);
    }
    fputc('\n', stream);
    cJSON_Delete(object);
}
