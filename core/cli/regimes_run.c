/*
The records of the regimes: known from files, or simulated, each once.

Records are written in the order in which variants ask for them, whatever the number of threads and whichever
were known, so the file is the same bytes on every run.
*/
#include "cli/regimes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One record asked for. */
struct slot {
    int system;
    const struct point *point; /* of the table */
    cJSON *swept;
    cJSON *record; /* NULL: not there yet, or impossible */
    char *line;    /* its JSON text, with a line end */
    bool pending;
    struct experiment experiment; /* while it is to be simulated */
    struct errors errors;
};

/* ---- known records ----------------------------------------------------------------------------------- */

/* The line as it was read: printed anew, numbers could lose a digit. */
struct known {
    cJSON *record;
    char *line;
};

static char *copy_of(const char *text, size_t length) {
    char *copy = must_alloc(length + 1);
    memcpy(copy, text, length);
    return copy;
}

static void add_known(struct record_store *store, struct known known) {
    if (store->known_count == store->known_capacity) {
        store->known_capacity = 2 * store->known_capacity + 64;
        store->known = must_realloc(store->known, (size_t)store->known_capacity * sizeof *store->known);
    }
    store->known[store->known_count++] = known;
}

static bool is_record(const cJSON *record) {
    const cJSON *rate = cJSON_GetObjectItemCaseSensitive(record, "tokens_per_s");
    return cJSON_IsString(cJSON_GetObjectItemCaseSensitive(record, "system")) &&
           cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(record, "swept")) &&
           cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(record, "nodes")) &&
           cJSON_IsBool(cJSON_GetObjectItemCaseSensitive(record, "oom")) &&
           (cJSON_IsNumber(rate) || cJSON_IsNull(rate));
}

bool store_read(struct record_store *store, const char *file, struct errors *errors) {
    FILE *stream = fopen(file, "r");
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    int before = errors->count;
    if (!stream) {
        errors_add(errors, file, NULL, "cannot be read");
        return false;
    }
    for (int number = 1; (length = getline(&line, &room, stream)) > 0 && line[length - 1] == '\n'; number++) {
        struct arena *arena = store->regimes->arena;
        const char *where = arena_printf(arena, "%s:%d", file, number);
        cJSON *record = json_read_text(line, (size_t)length, where, arena, errors).node;
        if (!record) break;
        if (!is_record(record)) {
            errors_add(errors, where, NULL, "no record of a simulation");
            cJSON_Delete(record);
            break;
        }
        add_known(store, (struct known){record, copy_of(line, (size_t)length)});
    }
    free(line);
    fclose(stream);
    return errors->count == before;
}

static const struct known *find_known(const struct record_store *store, const struct slot *slot) {
    for (int i = 0; i < store->known_count; i++) {
        const cJSON *record = store->known[i].record;
        const char *system = cJSON_GetObjectItemCaseSensitive(record, "system")->valuestring;
        if (strcmp(system, regimes_systems[slot->system]) == 0 &&
            cJSON_Compare(cJSON_GetObjectItemCaseSensitive(record, "swept"), slot->swept, true))
            return &store->known[i];
    }
    return NULL;
}

/* ---- slots ------------------------------------------------------------------------------------------- */

static struct slot *find_slot(const struct record_store *store, const struct point *point, int system,
                              const cJSON *swept) {
    for (int i = 0; i < store->count; i++) {
        struct slot *slot = &store->slots[i];
        if (slot->system == system && slot->point == point && cJSON_Compare(slot->swept, swept, true))
            return slot;
    }
    return NULL;
}

/* Reads the point that the slot stands for: the table's, with one value for each swept path. */
static void prepare(const struct record_store *store, struct slot *slot, struct errors *errors) {
    struct arena *arena = store->regimes->arena;
    struct options options = store->regimes->table;
    options.system = regimes_systems[slot->system];
    for (const cJSON *child = slot->swept->child; child; child = child->next) {
        if (options.override_count == MAX_OVERRIDES) {
            errors_add(errors, store->regimes->file, NULL, "sets too much at once, at most %d paths",
                       MAX_OVERRIDES);
            return;
        }
        options.overrides[options.override_count++] =
            (struct override){arena_printf(arena, "sweep.%s", child->string),
                              arena_printf(arena, "[%s]", json_text(arena, child))};
    }
    load_experiment(&options, &slot->experiment, errors);
}

static void add_slot(struct record_store *store, const struct point *point, int system, cJSON *swept,
                     struct errors *errors) {
    if (store->count == store->capacity) {
        store->capacity = 2 * store->capacity + 64;
        store->slots = must_realloc(store->slots, (size_t)store->capacity * sizeof *store->slots);
    }
    struct slot *slot = &store->slots[store->count++];
    *slot = (struct slot){.system = system, .point = point, .swept = swept};
    const struct known *known = find_known(store, slot);
    if (known) {
        slot->record = cJSON_Duplicate(known->record, true);
        slot->line = copy_of(known->line, strlen(known->line));
    } else if (store->only_known) {
        char *text = cJSON_PrintUnformatted(swept);
        errors_add(errors, store->regimes->file, NULL, "the records lack %s at %s", regimes_systems[system],
                   text);
        cJSON_free(text);
    } else {
        slot->pending = true;
        prepare(store, slot, errors);
    }
}

/* ---- running ----------------------------------------------------------------------------------------- */

/* Hundreds of records are committed: what a record of one system alone cannot say is left out, and what `sim`
   says of any of them. */
static void shorten(cJSON *record) {
    static const char *const left_out[] = {"speedup_vs_megatron", "breakdown", "comm_total_s",
                                           "schedule_efficiency", "ops",       "executor",
                                           "cost_source",         "seed"};
    for (size_t i = 0; i < COUNT(left_out); i++) cJSON_DeleteItemFromObjectCaseSensitive(record, left_out[i]);
}

/* Up to the first that is pending; cut_off: the finished ones behind it as well. */
static void write_finished(struct record_store *store, bool cut_off) {
    for (; store->written < store->count; store->written++) {
        const struct slot *slot = &store->slots[store->written];
        if (slot->pending && !cut_off) return;
        if (slot->line) growing_file_add(&store->file, slot->line, strlen(slot->line));
    }
}

static void run_slot(void *context, int i) {
    struct record_store *store = context;
    struct slot *slot = NULL;
    struct result result;
    for (int k = 0; !slot; k++) /* number i of those without a record when the run began */
        if (store->slots[k].experiment.arena && i-- == 0) slot = &store->slots[k];
    const struct point *point = slot->experiment.points[0].variants[0];
    if (simulate_point(system_named(regimes_systems[slot->system]), point, &result, &slot->errors)) {
        cJSON *record = result_json(&result);
        shorten(record);
        char *text = cJSON_PrintUnformatted(record);
        struct text line = {0};
        text_add(&line, "%s\n", text);
        slot->line = line.text;
        slot->record = cJSON_Parse(text);
        cJSON_free(text);
        cJSON_Delete(record);
    }
    pthread_mutex_lock(&store->mutex);
    slot->pending = false;
    store->finished++;
    write_finished(store, false);
    if (!store->quiet) progress_show(&store->progress, store->finished);
    pthread_mutex_unlock(&store->mutex);
}

static void run_pending(struct record_store *store, struct errors *errors) {
    int pending = 0;
    for (int i = 0; i < store->count; i++) pending += store->slots[i].pending;
    store->finished = 0;
    store->progress = progress_begin("regimes", pending);
    write_finished(store, false);
    parallel_for(pending, store->jobs ? store->jobs : processor_count(), run_slot, store, &interrupted);
    progress_clear(&store->progress);
    write_finished(store, interrupted);
    for (int i = 0; i < store->count; i++) {
        struct slot *slot = &store->slots[i];
        if (!slot->experiment.arena) continue;
        add_point_errors(&store->regimes->table, slot->experiment.points,
                         system_named(regimes_systems[slot->system]), &slot->errors, errors);
        errors_free(&slot->errors);
        experiment_free(&slot->experiment);
    }
}

bool store_fill(struct record_store *store, const struct variant *variants, int count,
                struct errors *errors) {
    const struct regimes *regimes = store->regimes;
    int before = errors->count;
    for (int v = 0; v < count; v++)
        for (int p = 0; p < regimes->experiment.point_count; p++)
            for (int system = 0; system < SYSTEM_COUNT; system++) {
                const struct point *point = &regimes->experiment.points[p];
                if (variants[v].ends && !regimes_is_end(regimes, point)) continue;
                cJSON *swept = regimes_swept(regimes, point, variants[v].levels, system);
                if (find_slot(store, point, system, swept))
                    cJSON_Delete(swept);
                else
                    add_slot(store, point, system, swept, errors);
            }
    if (errors->count == before) run_pending(store, errors);
    return errors->count == before && !interrupted;
}

double store_rate(const struct record_store *store, const struct variant *variant, const struct point *point,
                  int system) {
    cJSON *swept = regimes_swept(store->regimes, point, variant->levels, system);
    const struct slot *slot = find_slot(store, point, system, swept);
    cJSON_Delete(swept);
    if (!slot || !slot->record) return NAN;
    const cJSON *rate = cJSON_GetObjectItemCaseSensitive(slot->record, "tokens_per_s");
    if (!cJSON_IsNumber(rate) || cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(slot->record, "oom")))
        return NAN;
    return rate->valuedouble / cJSON_GetObjectItemCaseSensitive(slot->record, "nodes")->valuedouble;
}

void store_free(struct record_store *store) {
    for (int i = 0; i < store->count; i++) {
        struct slot *slot = &store->slots[i];
        cJSON_Delete(slot->swept);
        cJSON_Delete(slot->record);
        free(slot->line);
        errors_free(&slot->errors);
        if (slot->experiment.arena) experiment_free(&slot->experiment);
    }
    for (int i = 0; i < store->known_count; i++) {
        cJSON_Delete(store->known[i].record);
        free(store->known[i].line);
    }
    free(store->slots);
    free(store->known);
}
