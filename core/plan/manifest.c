/*
Reading an experiment manifest into points.

The manifest, with its model, cluster and costs files put in place of their paths, is one JSON document. --set
changes that document, a sweep changes copies of it, per_system changes copies of those, and each copy is read
strictly through the same tables: so whatever sets a value, it is checked like anything else, and an error
names the key as the user wrote it.
*/
#include "plan/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_POINTS 100000

/* ---- files that could not be read ---------------------------------------------------------------------- */

/* Stands where a model, a cluster or costs should: its file was wrong, which has been said, and nothing more
   is said of what would have been in it. No text of a user's parses to a raw node. */
static cJSON *unread(void) {
    return cJSON_CreateRaw("unread");
}

static bool is_unread(const cJSON *node) {
    return cJSON_IsRaw(node);
}

static bool is_there(struct json value) {
    return value.node && !is_unread(value.node);
}

/* ---- parts that may be "auto" ------------------------------------------------------------------------ */

static bool is_auto(struct json value) {
    return cJSON_IsString(value.node) && strcmp(value.node->valuestring, "auto") == 0;
}

/* Words for what both sides recompute, in all layers. */
static const struct {
    const char *word;
    struct recompute meaning;
} recompute_words[] = {{"none", {ATTENTION_NONE, FFN_NONE, 0}},
                       {"selective", {ATTENTION_NORMS, FFN_ACTIVATION, 0}},
                       {"full", {ATTENTION_FULL, FFN_FULL, 0}}};

struct raw_memory {
    struct memory memory;
    struct json recompute;
};

#define PARALLEL_FIELD(name)                                                                                 \
    { #name, JSON_INT, offsetof(struct parallel, name), false, 1, 1 << 20, NULL }

/* Reads the keys that are not "auto" by themselves, as if the others were not there. */
static void read_given(struct json value, const struct json_field *fields, int count, void *target) {
    cJSON *copy = cJSON_Duplicate(value.node, true), *next;
    for (cJSON *child = copy->child; child; child = next) {
        next = child->next;
        if (is_auto((struct json){.node = child})) cJSON_Delete(cJSON_DetachItemViaPointer(copy, child));
    }
    struct json given = value;
    given.node = copy;
    json_read_fields(given, fields, count, target);
    cJSON_Delete(copy);
}

/* Whether the manifest gives a key: it is there and not "auto". */
static bool is_given(struct json value, const char *key) {
    cJSON *member = cJSON_GetObjectItemCaseSensitive(value.node, key);
    return member && !is_auto((struct json){.node = member});
}

static void read_parallel(struct json value, struct parallel *parallel) {
    static const struct json_field fields[] = {
        PARALLEL_FIELD(pp),        PARALLEL_FIELD(vpp),       PARALLEL_FIELD(ep),
        PARALLEL_FIELD(groups),    PARALLEL_FIELD(attn_gpus), PARALLEL_FIELD(ffn_gpus),
        PARALLEL_FIELD(attn_nics), PARALLEL_FIELD(ffn_nics),  PARALLEL_FIELD(cp)};
    *parallel = (struct parallel){0};
    if (value.node && !is_auto(value)) read_given(value, fields, COUNT(fields), parallel);
}

/* One word, or an object of both sides. */
static void read_recompute(struct json value, struct recompute *recompute) {
    static const struct json_field fields[] = {
        {"attention", JSON_CHOICE, offsetof(struct recompute, attention), false, 0, 0, ATTENTION_CHOICES},
        {"ffn", JSON_CHOICE, offsetof(struct recompute, ffn), false, 0, 0, FFN_CHOICES},
        {"layers", JSON_INT, offsetof(struct recompute, layers), false, 1, 1 << 20, NULL}};
    if (cJSON_IsObject(value.node)) {
        json_read_fields(value, fields, COUNT(fields), recompute);
        return;
    }
    for (size_t i = 0; cJSON_IsString(value.node) && i < COUNT(recompute_words); i++)
        if (strcmp(value.node->valuestring, recompute_words[i].word) == 0) {
            *recompute = recompute_words[i].meaning;
            return;
        }
    json_error(value, "must be one of auto|none|selective|full, or an object of attention, ffn and layers");
}

const char *recompute_word(struct recompute recompute) {
    for (size_t i = 0; i < COUNT(recompute_words); i++) {
        struct recompute meaning = recompute_words[i].meaning;
        bool nothing = !meaning.attention && !meaning.ffn; /* in how many layers does not matter */
        if (recompute.attention == meaning.attention && recompute.ffn == meaning.ffn &&
            (nothing || recompute.layers == 0))
            return recompute_words[i].word;
    }
    return NULL;
}

/* What of memory is given, and whether it says "auto". */
static void read_memory(struct json value, struct point *point) {
    static const struct json_field fields[] = {
        {"recompute", JSON_VALUE, offsetof(struct raw_memory, recompute), false, 0, 0, NULL},
        {"expert_input", JSON_CHOICE, offsetof(struct raw_memory, memory.expert_input), false, 0, 0,
         INPUT_CHOICES},
        {"grads", JSON_CHOICE, offsetof(struct raw_memory, memory.grads), false, 0, 0, PRECISION_CHOICES},
        {"moments", JSON_CHOICE, offsetof(struct raw_memory, memory.moments), false, 0, 0, PRECISION_CHOICES},
        {"zero", JSON_INT, offsetof(struct raw_memory, memory.zero), false, 0, 3, NULL},
        {"offload", JSON_BOOL, offsetof(struct raw_memory, memory.offload), false, 0, 0, NULL},
    };
    struct raw_memory raw = {0};
    point->auto_memory = value.node && is_auto(value);
    if (!value.node || point->auto_memory) return;
    read_given(value, fields, COUNT(fields), &raw);
    for (size_t i = 0; i < COUNT(fields); i++)
        if (is_given(value, fields[i].key)) point->memory_given |= 1 << i; /* in the order of memory_key */
    /* From the manifest itself: what read_given read of it is gone. */
    if (raw.recompute.node) read_recompute(json_member(value, "recompute"), &raw.memory.recompute);
    point->memory = raw.memory;
}

struct raw_order {
    struct order order; /* first: its fields' offsets are those in it */
    bool patient, justified;
    struct json without;
};

/* Never searched, so "auto" is an error as well. */
static int read_without(struct json value) {
    int without = 0, i = 0;
    if (!cJSON_IsArray(value.node)) json_error(value, "must be a list of " WITHOUT_CHOICES);
    for (cJSON *child = cJSON_IsArray(value.node) ? value.node->child : NULL; child; child = child->next) {
        struct json element = json_element(value, child, i++);
        int word = cJSON_IsString(child) ? choice_index(WITHOUT_CHOICES, child->valuestring) : -1;
        if (word < 0)
            json_error(element, "must be one of " WITHOUT_CHOICES);
        else if (without & 1 << word)
            json_error(element, "is named twice");
        else
            without |= 1 << word;
    }
    return without;
}

static void read_order(struct json value, struct order *order) {
    static const struct json_field fields[] = {
        {"wave", JSON_INT, offsetof(struct order, wave), false, 1, 1 << 20, NULL},
        {"waves_in_flight", JSON_INT, offsetof(struct order, waves_in_flight), false, 1, 1 << 20, NULL},
        {"prefer", JSON_CHOICE, offsetof(struct order, prefer), false, 0, 0, PREFER_CHOICES},
        {"patient", JSON_BOOL, offsetof(struct raw_order, patient), false, 0, 0, NULL},
        {"justified", JSON_BOOL, offsetof(struct raw_order, justified), false, 0, 0, NULL},
        {"without", JSON_VALUE, offsetof(struct raw_order, without), false, 0, 0, NULL},
    };
    struct raw_order raw = {.order = {.prefer = PREFER_OPEN}};
    bool given = value.node && !is_auto(value);
    if (given) read_given(value, fields, COUNT(fields), &raw);
    *order = raw.order;
    order->patient = given && is_given(value, "patient") ? raw.patient : FLAG_OPEN;
    order->justified = given && is_given(value, "justified") ? raw.justified : FLAG_OPEN;
    /* From the manifest itself: what read_given read of it is gone. */
    if (given && json_member(value, "without").node)
        order->without = read_without(json_member(value, "without"));
    if (!(order->without & WITHOUT_WAVES)) return;
    /* Micro-batch order is that of waves of one; with a larger one it only says how many are under way. */
    if (!order->wave) order->wave = 1;
    order->prefer = PREFER_WAVE;
}

#define TRAIN_REAL(name, max)                                                                                \
    { #name, JSON_REAL, offsetof(struct training, name), false, 0, max, NULL }

/* Defaults are those of the GPT-3 and DeepSeek papers' AdamW, and a rate that suits small models. */
static struct training read_training(struct json value, const char *manifest) {
    static const struct json_field fields[] = {
        {"steps", JSON_INT, offsetof(struct training, steps), false, 1, 1 << 30, NULL},
        {"data", JSON_TEXT, offsetof(struct training, data), false, 0, 0, NULL},
        {"forced_routing", JSON_BOOL, offsetof(struct training, forced_routing), false, 0, 0, NULL},
        {"warmup_steps", JSON_INT, offsetof(struct training, warmup_steps), false, 0, 1 << 30, NULL},
        {"decay_steps", JSON_INT, offsetof(struct training, decay_steps), false, 1, 1 << 30, NULL},
        TRAIN_REAL(learning_rate, 1e30),
        TRAIN_REAL(final_learning_rate, 1e30),
        TRAIN_REAL(beta1, 0.999999),
        TRAIN_REAL(beta2, 0.999999),
        TRAIN_REAL(epsilon, 1),
        TRAIN_REAL(weight_decay, 1e6),
        TRAIN_REAL(clip, 1e30),
    };
    struct training training = {.steps = 10,
                                .data = "markov",
                                .learning_rate = 3e-3,
                                .final_learning_rate = 3e-4,
                                .warmup_steps = 10,
                                .beta1 = 0.9,
                                .beta2 = 0.95,
                                .epsilon = 1e-8,
                                .weight_decay = 0.1,
                                .clip = 1};
    if (value.node) json_read_fields(value, fields, COUNT(fields), &training);
    if (strcmp(training.data, "markov") != 0)
        training.data = path_beside(value.arena, manifest, training.data);
    return training;
}

#define COST_FIELD(name)                                                                                     \
    { #name, JSON_REAL, offsetof(struct cost_table, name), false, 0, 1e9, NULL }

static struct cost_table *read_costs(struct json value) {
    static const struct json_field fields[] = {
        COST_FIELD(attn_fwd_s),
        COST_FIELD(attn_bwd_s),
        COST_FIELD(attn_wgrad_s),
        COST_FIELD(ffn_fwd_s),
        COST_FIELD(ffn_bwd_s),
        COST_FIELD(ffn_wgrad_s),
        COST_FIELD(dispatch_s),
        COST_FIELD(combine_s),
        COST_FIELD(p2p_s),
        COST_FIELD(embed_fwd_s),
        COST_FIELD(embed_bwd_s),
        COST_FIELD(head_fwd_s),
        COST_FIELD(head_bwd_s),
        COST_FIELD(grad_sync_s),
        COST_FIELD(param_gather_s),
        COST_FIELD(optimizer_s),
        {"source", JSON_TEXT, offsetof(struct cost_table, source), false, 0, 0, NULL},
    };
    if (!is_there(value) || cJSON_IsNull(value.node)) return NULL;
    struct cost_table *table = arena_alloc(value.arena, sizeof *table);
    json_read_fields(value, fields, COUNT(fields), table);
    return table;
}

/* ---- routing ----------------------------------------------------------------------------------------- */

static void normalise(double *share, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += share[i];
    for (int i = 0; i < count; i++) share[i] /= sum;
}

/* One non-negative number an expert, separated by white space or commas, relative to the manifest's folder.
 */
static void read_counts(struct json value, const char *file, int experts, double *share) {
    FILE *stream = fopen(file, "r");
    if (!stream) {
        json_error(value, "the file cannot be opened");
        return;
    }
    double sum = 0;
    int count = 0;
    for (double number; count <= experts && fscanf(stream, " %lf%*[, ]", &number) == 1; count++) {
        if (!(number >= 0 && number < 1e300)) json_error(value, "count %d must be a number ≥ 0", count);
        if (count < experts) sum += share[count] = number;
    }
    if (count != experts || !feof(stream))
        json_error(value, "must hold one number for each of the model's %d experts", experts);
    if (count == experts && !(sum > 0)) json_error(value, "at least one count must be above 0");
    fclose(stream);
    normalise(share, experts);
}

static void read_routing(struct json value, const char *manifest, int experts, struct routing *routing) {
    const char *text = value.node && cJSON_IsString(value.node) ? value.node->valuestring : "balanced";
    routing->text = arena_strdup(value.arena, text);
    routing->share = arena_alloc(value.arena, (size_t)experts * sizeof(double));
    if (value.node && !cJSON_IsString(value.node))
        json_error(value, "must be balanced, zipf:EXPONENT or file:FILE");
    for (int i = 0; i < experts; i++) routing->share[i] = 1.0 / experts;
    if (strcmp(text, "balanced") == 0) return;
    if (strncmp(text, "file:", 5) == 0) {
        read_counts(value, path_beside(value.arena, manifest, text + 5), experts, routing->share);
        return;
    }
    char *end = NULL;
    double exponent = strncmp(text, "zipf:", 5) == 0 ? strtod(text + 5, &end) : -1;
    if (!end || *end || end == text + 5 || !(exponent >= 0 && exponent <= 10)) {
        json_error(value, "must be balanced, zipf:EXPONENT with an exponent from 0 to 10, or file:FILE");
        return;
    }
    for (int i = 0; i < experts; i++) routing->share[i] = pow(i + 1, -exponent);
    normalise(routing->share, experts);
}

/* ---- one point --------------------------------------------------------------------------------------- */

struct raw_point {
    struct point point;
    struct json model, cluster, systems, parallel, memory, order, placement, routing, costs, train;
    struct json sweep, per_system; /* taken out of a point's document before it is read */
    const char *name;
};

#define RAW(name, required)                                                                                  \
    { #name, JSON_VALUE, offsetof(struct raw_point, name), required, 0, 0, NULL }
#define POINT_INT(name, required, min, max)                                                                  \
    { #name, JSON_INT, offsetof(struct raw_point, point.name), required, min, max, NULL }

static void read_systems(struct json value, struct point *point) {
    if (!cJSON_IsArray(value.node) || !value.node->child) {
        json_error(value, "must be a list of at least one system's name");
        return;
    }
    int count = cJSON_GetArraySize(value.node), i = 0;
    point->systems = arena_alloc(value.arena, (size_t)count * sizeof *point->systems);
    for (cJSON *child = value.node->child; child; child = child->next, i++) {
        struct json element = json_element(value, child, i);
        if (!cJSON_IsString(child)) {
            json_error(element, "must be a system's name");
            continue;
        }
        for (int k = 0; k < point->system_count; k++)
            if (strcmp(point->systems[k], child->valuestring) == 0) json_error(element, "is named twice");
        point->systems[point->system_count++] = arena_strdup(value.arena, child->valuestring);
    }
}

static void read_placement(struct json value, struct point *point) {
    point->auto_placement = value.node && is_auto(value);
    point->placement_given = value.node && !point->auto_placement;
    if (!point->placement_given) return;
    if (cJSON_IsString(value.node) && strcmp(value.node->valuestring, "split-nodes") == 0)
        point->placement = PLACEMENT_SPLIT;
    else if (cJSON_IsString(value.node) && strcmp(value.node->valuestring, "mixed-nodes") == 0)
        point->placement = PLACEMENT_MIXED;
    else
        json_error(value, "must be one of auto|" PLACEMENT_CHOICES);
}

static bool read_point(struct json manifest, const char *label, struct point *point) {
    static const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct raw_point, name), false, 0, 0, NULL},
        RAW(model, true),
        RAW(cluster, true),
        RAW(systems, true),
        POINT_INT(seq_len, true, 1, 1 << 24),
        POINT_INT(micro_batch_size, false, 1, 1 << 16),
        POINT_INT(global_batch, false, 1, 1 << 24),
        POINT_INT(micro_batches, false, 1, 1 << 20),
        RAW(parallel, false),
        RAW(memory, false),
        RAW(order, false),
        RAW(placement, false),
        {"head", JSON_CHOICE, offsetof(struct raw_point, point.head), false, 0, 0, HEAD_CHOICES},
        RAW(routing, false),
        POINT_INT(seed, false, 0, 2147483647),
        RAW(costs, false),
        RAW(train, false),
        RAW(sweep, false),
        RAW(per_system, false)};
    int before = manifest.errors->count;
    struct raw_point raw = {.point = {.micro_batch_size = 1, .seed = 1}, .name = "unnamed"};
    if (!cJSON_IsObject(manifest.node)) {
        json_error(manifest, "must be an object");
        return false;
    }
    json_read_fields(manifest, fields, COUNT(fields), &raw);
    *point = raw.point;
    point->name = raw.name;
    point->label = label;
    if ((point->global_batch != 0) == (point->micro_batches != 0) && manifest.errors->count == before)
        errors_add(manifest.errors, manifest.file, "global_batch",
                   point->global_batch
                       ? "micro_batches is given as well; exactly one of the two is allowed"
                       : "missing; exactly one of global_batch and micro_batches is required");
    if (raw.systems.node) read_systems(raw.systems, point);
    point->model = arena_alloc(manifest.arena, sizeof *point->model);
    point->cluster = arena_alloc(manifest.arena, sizeof *point->cluster);
    bool model = is_there(raw.model) && model_read(raw.model, point->model);
    if (is_there(raw.cluster)) cluster_read(raw.cluster, point->cluster);
    read_parallel(raw.parallel, &point->parallel);
    read_memory(raw.memory, point);
    read_order(raw.order, &point->order);
    read_placement(raw.placement, point);
    raw.routing.arena = manifest.arena;
    if (model) read_routing(raw.routing, manifest.file, point->model->moe.experts, &point->routing);
    point->table = read_costs(raw.costs);
    raw.train.arena = manifest.arena;
    point->training = read_training(raw.train, manifest.file);
    return manifest.errors->count == before;
}

/* ---- documents --------------------------------------------------------------------------------------- */

static void note_file(struct experiment *experiment, const char *file) {
    for (int i = 0; i < experiment->file_count; i++)
        if (strcmp(experiment->files[i], file) == 0) return;
    const char **files = arena_alloc(experiment->arena, (size_t)(experiment->file_count + 1) * sizeof *files);
    for (int i = 0; i < experiment->file_count; i++) files[i] = experiment->files[i];
    files[experiment->file_count++] = file;
    experiment->files = files;
}

/* What all that changes a document needs: the experiment, and --set. */
struct reader {
    struct experiment *experiment;
    const struct override *overrides;
    int override_count;
};

/* Keys that take an object or the path of a file that holds one. */
static const char *const files[] = {"model", "cluster", "costs"};

/* Puts the file's object where a path stands. The reader of a model or cluster sees the object alone. */
static void load_in_place(const struct reader *reader, struct json document, const char *key) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(document.node, key);
    if (!cJSON_IsString(item)) return;
    const char *file = path_beside(document.arena, document.file, item->valuestring);
    note_file(reader->experiment, file);
    struct json loaded = json_read_file(file, document.arena, document.errors);
    cJSON_ReplaceItemInObjectCaseSensitive(document.node, key, loaded.node ? loaded.node : unread());
}

/* ---- setting a path ---------------------------------------------------------------------------------- */

/* One key of a document and its value: from a sweep or per_system. */
struct setting {
    const char *path;
    const cJSON *value;
    int number; /* of a sweep's value in its list */
};

/* Of parts of a path: more than any key lies below. */
#define DEEPEST 32

static int depth_of(const char *path) {
    int depth = 0;
    for (; *path && depth <= DEEPEST; path++) depth += *path == '.';
    return depth;
}

/* How many dots of a path part its keys: `sweep` and `per_system` hold paths themselves. */
static int parts_before_a_path(const char *path) {
    return strncmp(path, "sweep.", 6) == 0 ? 1 : strncmp(path, "per_system.", 11) == 0 ? 2 : 1 << 20;
}

/* The object below `object` for one part of a path. Where there is none, none is set or the choice is left to
   the tuner, it is made: setting a part of something sets that part alone. NULL where something else stands.
 */
static cJSON *part_of(cJSON *object, const char *part) {
    cJSON *item = cJSON_GetObjectItemCaseSensitive(object, part);
    if (cJSON_IsObject(item) || is_unread(item)) return item;
    if (item && !cJSON_IsNull(item) && !is_auto((struct json){.node = item})) return NULL;
    if (item) cJSON_DeleteItemFromObjectCaseSensitive(object, part);
    return cJSON_AddObjectToObject(object, part);
}

/* Takes the value. */
static void set_value(const struct reader *reader, struct json document, const char *path, cJSON *value) {
    const char *rest = path;
    cJSON *object = document.node;
    int parts = parts_before_a_path(path);
    for (const char *dot; parts-- > 0 && (dot = strchr(rest, '.')); rest = dot + 1) {
        char *part = arena_printf(document.arena, "%.*s", (int)(dot - rest), rest);
        cJSON *below = depth_of(path) <= DEEPEST ? part_of(object, part) : NULL;
        if (!below)
            errors_add(document.errors, document.file, path, "no such place: %.*s is %.40s, not an object",
                       (int)(dot - path), path,
                       json_text(document.arena, cJSON_GetObjectItemCaseSensitive(object, part)));
        if (!below || is_unread(below)) {
            cJSON_Delete(value);
            return;
        }
        object = below;
    }
    if (cJSON_GetObjectItemCaseSensitive(object, rest))
        cJSON_ReplaceItemInObjectCaseSensitive(object, rest, value);
    else
        cJSON_AddItemToObject(object, rest, value);
    for (size_t i = 0; i < COUNT(files); i++)
        if (strcmp(path, files[i]) == 0) load_in_place(reader, document, path);
}

static void apply_override(const struct reader *reader, struct json document, struct override override) {
    struct errors ignored = {0};
    struct json value =
        json_read_text(override.value, strlen(override.value), "--set", document.arena, &ignored);
    errors_free(&ignored);
    cJSON *node = value.node ? value.node : cJSON_CreateString(override.value);
    /* A swept key that is set by hand is no longer swept. */
    cJSON *sweep = cJSON_GetObjectItemCaseSensitive(document.node, "sweep");
    if (sweep) cJSON_DeleteItemFromObjectCaseSensitive(sweep, override.path);
    set_value(reader, document, override.path, node);
}

static bool is_below(const char *path, const char *above) {
    size_t length = strlen(above);
    return strncmp(path, above, length) == 0 && path[length] == '.';
}

/* Short paths first: a model must not replace what is set in it. Then --set once more, where it changes what
   was put in place just now: model.layers of each swept model. */
static void apply_settings(const struct reader *reader, struct json document, const struct setting *settings,
                           int count) {
    int deepest = 0;
    for (int i = 0; i < count; i++)
        if (depth_of(settings[i].path) > deepest) deepest = depth_of(settings[i].path);
    for (int depth = 0; depth <= deepest; depth++)
        for (int i = 0; i < count; i++)
            if (depth_of(settings[i].path) == depth)
                set_value(reader, document, settings[i].path, cJSON_Duplicate(settings[i].value, true));
    for (int k = 0; k < reader->override_count; k++) {
        bool below = false;
        for (int i = 0; i < count; i++) below |= is_below(reader->overrides[k].path, settings[i].path);
        if (below) apply_override(reader, document, reader->overrides[k]);
    }
}

/* ---- per_system -------------------------------------------------------------------------------------- */

/* What is the same for all systems of a point. */
static bool is_common(const char *path) {
    static const char *const common[] = {"name", "systems", "sweep", "per_system"};
    for (size_t i = 0; i < COUNT(common); i++)
        if (strcmp(path, common[i]) == 0 || is_below(path, common[i])) return true;
    return false;
}

static bool runs_system(const struct point *point, const char *name) {
    for (int k = 0; k < point->system_count; k++)
        if (strcmp(point->systems[k], name) == 0) return true;
    return point->system_count == 0; /* what is wrong with them has been said */
}

static void add_not_run(struct json its, const struct point *point) {
    struct text names = {0};
    for (int k = 0; k < point->system_count; k++) text_add(&names, "%s%s", k ? ", " : "", point->systems[k]);
    errors_add(its.errors, its.file, its.path, "no system of this manifest; allowed: %s", names.text);
    free(names.text);
}

static void check_per_system(struct json per_system, const struct point *point) {
    if (!cJSON_IsObject(per_system.node)) {
        json_error(per_system, "must be an object of systems, each with an object of paths and their values");
        return;
    }
    for (cJSON *system = per_system.node->child; system; system = system->next) {
        struct json its = json_member(per_system, system->string);
        if (!runs_system(point, system->string)) add_not_run(its, point);
        if (!cJSON_IsObject(system)) {
            json_error(its, "must be an object of paths and their values");
            continue;
        }
        for (cJSON *child = system->child; child; child = child->next)
            if (is_common(child->string))
                errors_add(its.errors, its.file, json_member(its, child->string).path,
                           "cannot differ between the systems of a point");
    }
}

/* An error in what per_system sets is named as the user wrote it; one that the point has without it as well
   has been told; any other is of how the two go together. */
static void add_variant_error(struct json document, const char *system, const cJSON *its,
                              const char *message) {
    const char *file = document.file, *path = message;
    size_t length = strlen(file);
    if (strncmp(message, file, length) != 0 || strncmp(message + length, ": ", 2) != 0) {
        errors_add(document.errors, NULL, NULL, "%s", message); /* of another file */
        return;
    }
    for (int i = 0; i < document.errors->count; i++)
        if (strcmp(document.errors->messages[i], message) == 0) return;
    path += length + 2;
    for (const cJSON *child = its->child; child; child = child->next) {
        size_t set = strlen(child->string);
        if (strncmp(path, child->string, set) == 0 && strchr(":.[", path[set])) {
            errors_add(document.errors, file, NULL, "per_system.%s.%s", system, path);
            return;
        }
    }
    errors_add(document.errors, file, NULL, "per_system.%s: %s", system, path);
}

/* The point as one system runs it. */
static struct point *read_variant(const struct reader *reader, struct json document, const char *system,
                                  const cJSON *its, const char *label) {
    struct errors found = {0};
    struct json copy = document;
    copy.node = cJSON_Duplicate(document.node, true);
    copy.errors = &found;
    struct setting *settings = must_alloc((size_t)cJSON_GetArraySize(its) * sizeof *settings);
    int count = 0;
    for (const cJSON *child = its->child; child; child = child->next)
        settings[count++] = (struct setting){child->string, child, 0};
    apply_settings(reader, copy, settings, count);
    struct point *variant = arena_alloc(document.arena, sizeof *variant);
    read_point(copy, label, variant);
    variant->own = json_text(document.arena, its);
    for (int i = 0; i < found.count; i++) add_variant_error(document, system, its, found.messages[i]);
    errors_free(&found);
    free(settings);
    cJSON_Delete(copy.node);
    return variant;
}

/* ---- a sweep's points -------------------------------------------------------------------------------- */

static int sweep_size(struct json sweep) {
    double size = 1;
    if (!cJSON_IsObject(sweep.node)) {
        json_error(sweep, "must be an object of paths, each with a list of values");
        return 0;
    }
    for (cJSON *axis = sweep.node->child; axis; axis = axis->next) {
        struct json values = json_member(sweep, axis->string);
        if (strcmp(axis->string, "sweep") == 0 || is_below(axis->string, "sweep")) {
            json_error(values, "a sweep cannot be swept");
            return 0;
        }
        if (!cJSON_IsArray(axis) || !axis->child) {
            json_error(values, "must be a list of at least one value");
            return 0;
        }
        size *= cJSON_GetArraySize(axis);
        if (size > MAX_POINTS) {
            json_error(sweep, "makes more than %d points", MAX_POINTS);
            return 0;
        }
    }
    return (int)size;
}

/* "seq_len=4096 model=models/a.json" */
static const char *label_of(struct arena *arena, const struct swept *swept, const struct setting *settings,
                            int count) {
    struct text label = {0};
    for (int i = 0; i < count; i++) {
        const cJSON *value = settings[i].value;
        text_add(&label, "%s%s=%s", i ? " " : "", swept[i].path,
                 cJSON_IsString(value) ? value->valuestring : swept[i].value);
    }
    const char *kept = label.text ? arena_strdup(arena, label.text) : "";
    free(label.text);
    return kept;
}

/* The sweep's values at point number `index` of the product, the last axis changing fastest; room for one an
   axis. Returns their number. */
static int values_at(const cJSON *sweep, int index, struct setting *settings) {
    int stride = 1, used = 0;
    for (const cJSON *axis = sweep ? sweep->child : NULL; axis; axis = axis->next)
        stride *= cJSON_GetArraySize(axis);
    for (const cJSON *axis = sweep ? sweep->child : NULL; axis; axis = axis->next) {
        int count = cJSON_GetArraySize(axis);
        stride /= count;
        int number = index / stride % count;
        settings[used++] = (struct setting){axis->string, cJSON_GetArrayItem(axis, number), number};
    }
    return used;
}

/* Reads the point of a document that has its sweep's values, and each system's variant of it. */
static void read_with_variants(const struct reader *reader, struct json document, struct point *point) {
    struct point own = *point; /* what the sweep says of it */
    struct json per_system = json_member(document, "per_system");
    cJSON *settings = cJSON_DetachItemFromObjectCaseSensitive(document.node, "per_system");
    read_point(document, own.label, point);
    point->variants =
        arena_alloc(document.arena, (size_t)(point->system_count + 1) * sizeof *point->variants);
    if (settings) check_per_system(per_system, point);
    for (int k = 0; k < point->system_count; k++) {
        const cJSON *its = cJSON_GetObjectItemCaseSensitive(settings, point->systems[k]);
        point->variants[k] = cJSON_IsObject(its) && its->child
                                 ? read_variant(reader, document, point->systems[k], its, own.label)
                                 : point;
    }
    for (int k = -1; k < point->system_count; k++) {
        struct point *variant = k < 0 ? point : point->variants[k];
        variant->index = own.index;
        variant->swept = own.swept;
        variant->swept_count = own.swept_count;
        variant->variants = point->variants;
    }
    cJSON_Delete(settings);
}

static void read_sweep_point(const struct reader *reader, struct json document, const cJSON *sweep, int index,
                             struct point *point) {
    int axes = sweep ? cJSON_GetArraySize(sweep) : 0;
    struct setting *settings = must_alloc((size_t)(axes + 1) * sizeof *settings);
    struct swept *swept = arena_alloc(document.arena, (size_t)(axes + 1) * sizeof *swept);
    struct json whole = document;
    whole.node = cJSON_Duplicate(document.node, true);
    cJSON_DeleteItemFromObjectCaseSensitive(whole.node, "sweep");
    int count = values_at(sweep, index, settings);
    for (int i = 0; i < count; i++)
        swept[i] = (struct swept){arena_strdup(document.arena, settings[i].path),
                                  json_text(document.arena, settings[i].value), settings[i].number};
    *point = (struct point){.index = index,
                            .swept = swept,
                            .swept_count = count,
                            .label = label_of(document.arena, swept, settings, count)};
    apply_settings(reader, whole, settings, count);
    read_with_variants(reader, whole, point);
    free(settings);
    cJSON_Delete(whole.node);
}

/* Takes the document's tree. */
static bool read_document(struct json document, const struct reader *reader) {
    struct experiment *experiment = reader->experiment;
    int before = document.errors->count;
    if (!document.node) return false;
    if (!cJSON_IsObject(document.node)) {
        json_error(document, "must be an object");
        cJSON_Delete(document.node);
        return false;
    }
    note_file(experiment, document.file);
    for (size_t i = 0; i < COUNT(files); i++) load_in_place(reader, document, files[i]);
    for (int i = 0; i < reader->override_count; i++) apply_override(reader, document, reader->overrides[i]);
    struct json sweep = json_member(document, "sweep");
    int count = sweep.node ? sweep_size(sweep) : 1;
    experiment->points =
        arena_alloc(document.arena, (size_t)(count ? count : 1) * sizeof *experiment->points);
    experiment->point_count = count;
    for (int i = 0; i < count; i++) read_sweep_point(reader, document, sweep.node, i, &experiment->points[i]);
    cJSON_Delete(document.node);
    return document.errors->count == before;
}

bool experiment_read(const char *file, const struct override *overrides, int override_count,
                     struct experiment *experiment, struct errors *errors) {
    *experiment = (struct experiment){.file = file, .arena = arena_new()};
    struct json document = json_read_file(file, experiment->arena, errors);
    struct reader reader = {experiment, overrides, override_count};
    return read_document(document, &reader);
}

bool experiment_read_text(const char *text, const char *file, struct experiment *experiment,
                          struct errors *errors) {
    *experiment = (struct experiment){.file = file, .arena = arena_new()};
    struct json document = json_read_text(text, strlen(text), file, experiment->arena, errors);
    struct reader reader = {.experiment = experiment};
    return read_document(document, &reader);
}

void experiment_free(struct experiment *experiment) {
    arena_free(experiment->arena);
    experiment->arena = NULL;
}
