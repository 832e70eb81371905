/*
Reading the definition of the regimes: strict like a manifest, and what the levels set is checked when the
points they make are read.
*/
#include "cli/regimes.h"

#include <stdlib.h>
#include <string.h>

const char *const regimes_systems[SYSTEM_COUNT] = {"megatron", "disagmoe"};

/* ---- factors ----------------------------------------------------------------------------------------- */

struct raw_level {
    struct level level;
    struct json set, per_system;
};

static void read_level(struct json value, struct level *level) {
    static const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct raw_level, level.name), true, 0, 0, NULL},
        {"by_point", JSON_BOOL, offsetof(struct raw_level, level.by_point), false, 0, 0, NULL},
        {"set", JSON_VALUE, offsetof(struct raw_level, set), false, 0, 0, NULL},
        {"per_system", JSON_VALUE, offsetof(struct raw_level, per_system), false, 0, 0, NULL}};
    struct raw_level raw = {0};
    json_read_fields(value, fields, COUNT(fields), &raw);
    if (raw.set.node && !cJSON_IsObject(raw.set.node))
        json_error(raw.set, "must be an object of paths and values");
    if (raw.per_system.node && !cJSON_IsObject(raw.per_system.node))
        json_error(raw.per_system, "must be an object of systems, each with an object of paths and values");
    for (cJSON *own = raw.per_system.node ? raw.per_system.node->child : NULL; own; own = own->next) {
        struct json its = json_member(raw.per_system, own->string);
        if (strcmp(own->string, regimes_systems[BASELINE]) && strcmp(own->string, regimes_systems[SUBJECT]))
            json_error(its, "no such system here; allowed: %s, %s", regimes_systems[BASELINE],
                       regimes_systems[SUBJECT]);
        if (!cJSON_IsObject(own)) json_error(its, "must be an object of paths and values");
    }
    *level = raw.level;
    level->set = raw.set.node;
    level->per_system = raw.per_system.node;
}

struct raw_factor {
    struct factor factor;
    struct json levels;
};

static void read_factor(struct json value, bool sensitivity, struct factor *factor) {
    static const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct raw_factor, factor.name), true, 0, 0, NULL},
        {"why", JSON_TEXT, offsetof(struct raw_factor, factor.why), false, 0, 0, NULL},
        {"default", JSON_TEXT, offsetof(struct raw_factor, factor.default_name), true, 0, 0, NULL},
        {"levels", JSON_VALUE, offsetof(struct raw_factor, levels), true, 0, 0, NULL}};
    struct raw_factor raw = {.factor.sensitivity = sensitivity};
    json_read_fields(value, fields, COUNT(fields), &raw);
    *factor = raw.factor;
    if (!raw.levels.node) return;
    if (!cJSON_IsArray(raw.levels.node) || !raw.levels.node->child) {
        json_error(raw.levels, "must be a list of at least one level");
        return;
    }
    factor->levels =
        arena_alloc(value.arena, (size_t)cJSON_GetArraySize(raw.levels.node) * sizeof *factor->levels);
    for (cJSON *child = raw.levels.node->child; child; child = child->next, factor->level_count++)
        read_level(json_element(raw.levels, child, factor->level_count),
                   &factor->levels[factor->level_count]);
}

static void read_factors(struct json list, bool sensitivity, struct regimes *regimes) {
    int i = 0;
    if (!list.node) return;
    if (!cJSON_IsArray(list.node)) {
        json_error(list, "must be a list of factors");
        return;
    }
    for (cJSON *child = list.node->child; child; child = child->next, i++)
        read_factor(json_element(list, child, i), sensitivity, &regimes->factors[regimes->factor_count++]);
}

/* ---- combinations ------------------------------------------------------------------------------------ */

static int factor_named(const struct regimes *regimes, const char *name) {
    for (int i = 0; i < regimes->factor_count; i++)
        if (regimes->factors[i].name && strcmp(regimes->factors[i].name, name) == 0) return i;
    return -1;
}

static int level_named(const struct factor *factor, const cJSON *name) {
    for (int k = 0; k < factor->level_count && cJSON_IsString(name); k++)
        if (factor->levels[k].name && strcmp(factor->levels[k].name, name->valuestring) == 0) return k + 1;
    return 0;
}

static void read_combination(struct json value, const struct regimes *regimes, int *levels) {
    if (!cJSON_IsObject(value.node)) json_error(value, "must be an object of factors and their levels");
    for (cJSON *child = cJSON_IsObject(value.node) ? value.node->child : NULL; child; child = child->next) {
        int factor = factor_named(regimes, child->string);
        if (factor < 0)
            json_error(json_member(value, child->string), "no factor of this file");
        else if (!(levels[factor] = level_named(&regimes->factors[factor], child)))
            json_error(json_member(value, child->string), "no level of this factor besides its default");
    }
}

static void read_combinations(struct json list, struct regimes *regimes) {
    if (!list.node) return;
    if (!cJSON_IsArray(list.node)) {
        json_error(list, "must be a list of objects, each of factors and their levels");
        return;
    }
    size_t count = (size_t)cJSON_GetArraySize(list.node), factors = (size_t)regimes->factor_count + 1;
    regimes->combinations = arena_alloc(regimes->arena, (count + 1) * sizeof *regimes->combinations);
    for (cJSON *child = list.node->child; child; child = child->next) {
        int i = regimes->combination_count++;
        regimes->combinations[i] = arena_alloc(regimes->arena, factors * sizeof(int));
        read_combination(json_element(list, child, i), regimes, regimes->combinations[i]);
    }
}

/* ---- the table --------------------------------------------------------------------------------------- */

static void add_override(struct options *table, struct override override) {
    if (table->override_count < MAX_OVERRIDES) table->overrides[table->override_count++] = override;
}

/* What the definition sets, then the command line. */
static void set_in_table(struct json set, const struct options *options, struct regimes *regimes) {
    if (set.node && !cJSON_IsObject(set.node)) json_error(set, "must be an object of paths and values");
    for (cJSON *child = cJSON_IsObject(set.node) ? set.node->child : NULL; child; child = child->next)
        add_override(&regimes->table, (struct override){child->string, json_text(regimes->arena, child)});
    for (int i = 0; i < options->override_count; i++) add_override(&regimes->table, options->overrides[i]);
}

/* The figures that {"times": x} multiplies. */
static void read_cluster(struct regimes *regimes, struct errors *errors) {
    struct json manifest = json_read_file(regimes->table.manifest, regimes->arena, errors);
    cJSON *cluster = cJSON_DetachItemFromObjectCaseSensitive(manifest.node, "cluster");
    if (cJSON_IsString(cluster)) {
        const char *file = path_beside(regimes->arena, regimes->table.manifest, cluster->valuestring);
        regimes->cluster = json_read_file(file, regimes->arena, errors).node;
        cJSON_Delete(cluster);
    } else {
        regimes->cluster = cluster;
    }
    cJSON_Delete(manifest.node);
}

static bool runs_both(const struct point *point) {
    int found = 0;
    for (int k = 0; k < point->system_count; k++)
        for (int s = 0; s < SYSTEM_COUNT; s++) found += strcmp(point->systems[k], regimes_systems[s]) == 0;
    return found == SYSTEM_COUNT;
}

/* Every {"times": x} must have a figure of the cluster to multiply. */
static void check_settings(const struct regimes *regimes, const cJSON *settings, struct json level) {
    for (const cJSON *child = settings ? settings->child : NULL; child; child = child->next) {
        cJSON *times = cJSON_GetObjectItemCaseSensitive(child, "times");
        bool cluster = strncmp(child->string, "cluster.", 8) == 0;
        cJSON *figure = cluster ? json_get_path(regimes->cluster, child->string + 8) : NULL;
        if (times && !(cJSON_IsNumber(times) && cJSON_IsNumber(figure)))
            errors_add(level.errors, level.file, child->string,
                       "\"times\" takes a number, and a path of the cluster to a figure that it multiplies");
    }
}

static void check_levels(const struct regimes *regimes, struct json document) {
    for (int i = 0; i < regimes->factor_count; i++)
        for (int k = 0; k < regimes->factors[i].level_count; k++) {
            const struct level *level = &regimes->factors[i].levels[k];
            check_settings(regimes, level->set, document);
            for (cJSON *own = level->per_system ? level->per_system->child : NULL; own; own = own->next)
                check_settings(regimes, own, document);
        }
}

struct raw_regimes {
    const char *name, *manifest;
    struct json set, factors, combinations, sensitivity;
};

static void read_document(struct json document, const struct options *options, struct regimes *regimes) {
#define RAW(key, required)                                                                                   \
    { #key, JSON_VALUE, offsetof(struct raw_regimes, key), required, 0, 0, NULL }
    static const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct raw_regimes, name), false, 0, 0, NULL},
        {"manifest", JSON_TEXT, offsetof(struct raw_regimes, manifest), true, 0, 0, NULL},
        RAW(set, false),
        RAW(factors, true),
        RAW(combinations, false),
        RAW(sensitivity, false)};
#undef RAW
    struct raw_regimes raw = {0};
    struct errors *errors = document.errors;
    int before = errors->count;
    if (!json_read_fields(document, fields, COUNT(fields), &raw)) return;
    int most = cJSON_GetArraySize(raw.factors.node) + cJSON_GetArraySize(raw.sensitivity.node);
    regimes->factors = arena_alloc(regimes->arena, ((size_t)most + 1) * sizeof *regimes->factors);
    read_factors(raw.factors, false, regimes);
    read_factors(raw.sensitivity, true, regimes);
    read_combinations(raw.combinations, regimes);
    regimes->table.manifest = path_beside(regimes->arena, regimes->file, raw.manifest);
    set_in_table(raw.set, options, regimes);
    read_cluster(regimes, errors);
    if (errors->count > before || !load_experiment(&regimes->table, &regimes->experiment, errors)) return;
    check_levels(regimes, document);
    for (int i = 0; i < regimes->experiment.point_count; i++)
        if (!runs_both(&regimes->experiment.points[i]))
            errors_add(errors, regimes->table.manifest, "systems", "%s and %s are needed",
                       regimes_systems[BASELINE], regimes_systems[SUBJECT]);
}

bool regimes_read(const char *file, const struct options *options, struct regimes *regimes,
                  struct errors *errors) {
    int before = errors->count;
    *regimes = (struct regimes){.file = file, .arena = arena_new()};
    struct json document = json_read_file(file, regimes->arena, errors);
    regimes->document = document.node;
    if (document.node) read_document(document, options, regimes);
    return errors->count == before;
}

void regimes_free(struct regimes *regimes) {
    if (regimes->experiment.arena) experiment_free(&regimes->experiment);
    cJSON_Delete(regimes->cluster);
    cJSON_Delete(regimes->document);
    arena_free(regimes->arena);
}

/* ---- what a variant sets ----------------------------------------------------------------------------- */

/* What a level's value is at a point; NULL: nothing is set there. The caller deletes it. */
static cJSON *value_at(const struct regimes *regimes, const struct point *point, const cJSON *value) {
    const cJSON *times = cJSON_GetObjectItemCaseSensitive(value, "times");
    const cJSON *by_length = cJSON_GetObjectItemCaseSensitive(value, "by_seq_len");
    if (times) {
        cJSON *figure = json_get_path(regimes->cluster, value->string + strlen("cluster."));
        return cJSON_CreateNumber(times->valuedouble * figure->valuedouble);
    }
    if (!by_length) return cJSON_Duplicate(value, true);
    char length[16];
    snprintf(length, sizeof length, "%d", point->seq_len);
    const cJSON *here = cJSON_GetObjectItemCaseSensitive(by_length, length);
    return here ? cJSON_Duplicate(here, true) : NULL;
}

static void add_settings(const struct regimes *regimes, const struct point *point, const cJSON *settings,
                         cJSON *swept) {
    for (const cJSON *child = settings ? settings->child : NULL; child; child = child->next) {
        cJSON *value = value_at(regimes, point, child);
        if (!value) continue;
        cJSON_DeleteItemFromObjectCaseSensitive(swept, child->string);
        cJSON_AddItemToObject(swept, child->string, value);
    }
}

cJSON *regimes_swept(const struct regimes *regimes, const struct point *point, const int *levels,
                     int system) {
    cJSON *swept = cJSON_CreateObject();
    for (int i = 0; i < point->swept_count; i++)
        cJSON_AddItemToObject(swept, point->swept[i].path, cJSON_Parse(point->swept[i].value));
    for (int i = 0; i < regimes->factor_count; i++) {
        if (!levels[i]) continue;
        const struct level *level = &regimes->factors[i].levels[levels[i] - 1];
        add_settings(regimes, point, level->set, swept);
        add_settings(regimes, point,
                     cJSON_GetObjectItemCaseSensitive(level->per_system, regimes_systems[system]), swept);
    }
    return swept;
}

bool regimes_is_end(const struct regimes *regimes, const struct point *point) {
    int shortest = point->seq_len, longest = point->seq_len;
    for (int i = 0; i < regimes->experiment.point_count; i++) {
        int length = regimes->experiment.points[i].seq_len;
        if (length < shortest) shortest = length;
        if (length > longest) longest = length;
    }
    return point->seq_len == shortest || point->seq_len == longest;
}
