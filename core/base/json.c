/*
Values of a JSON tree: members, errors that name them, tables of fields, dotted paths, numbers.

A table of fields is read in one walk over the object's members, each looked up in the table (which is short),
so an object with a million keys costs no more than its length.

Numbers are written as raw nodes: cJSON itself prints 15 digits where those are "nearly" right. A raw node
here carries its value in valuedouble too and is a number to everything in this file, but not to
cJSON_IsNumber.
*/
#include "base/base.h"

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- members and errors ------------------------------------------------------------------------------ */

/* How many bytes of a user's text to show: at most `most`, whole UTF-8 characters. */
static int shown(const char *text, int most) {
    size_t length = strlen(text);
    if (length <= (size_t)most) return (int)length;
    while (most > 0 && ((unsigned char)text[most] & 0xc0) == 0x80) most--;
    return most;
}

static const char *path_below(struct json value, const char *key) {
    const char *dot = value.path && *value.path ? "." : "", *path = value.path ? value.path : "";
    int length = shown(key, 80);
    return arena_printf(value.arena, "%s%s%.*s%s", path, dot, length, key, key[length] ? "…" : "");
}

struct json json_member(struct json object, const char *key) {
    struct json member = object;
    member.node = cJSON_IsObject(object.node) ? cJSON_GetObjectItemCaseSensitive(object.node, key) : NULL;
    member.path = path_below(object, key);
    return member;
}

struct json json_element(struct json array, const cJSON *element, int index) {
    struct json value = array;
    value.node = (cJSON *)(uintptr_t)element; /* struct json is for reading; the tree is the caller's */
    value.path = arena_printf(array.arena, "%s[%d]", array.path ? array.path : "", index);
    return value;
}

static bool is_number(const cJSON *node) {
    return cJSON_IsNumber(node) ||
           (cJSON_IsRaw(node) && node->valuestring && strchr("-0123456789", node->valuestring[0]));
}

/* The value's JSON text, shortened: the inside of objects and lists is left out. */
static char *found(struct json value) {
    const cJSON *node = value.node;
    char number[32];
    if (cJSON_IsObject(node)) return arena_strdup(value.arena, node->child ? "{…}" : "{}");
    if (cJSON_IsArray(node)) return arena_strdup(value.arena, node->child ? "[…]" : "[]");
    if (is_number(node) && !isfinite(node->valuedouble))
        return arena_strdup(value.arena, "a number beyond 1.8e308");
    if (is_number(node)) return arena_strdup(value.arena, number_text(node->valuedouble, number));
    char *text = cJSON_PrintUnformatted(node);
    if (!text) return arena_strdup(value.arena, "an unknown value");
    int length = shown(text, 60);
    char *result = arena_printf(value.arena, "%.*s%s", length, text, text[length] ? "…\"" : "");
    free(text);
    return result;
}

void json_error(struct json value, const char *format, ...) {
    va_list arguments;
    char message[1024];
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (value.node)
        errors_add(value.errors, value.file, value.path, "found %s; %s", found(value), message);
    else
        errors_add(value.errors, value.file, value.path, "the key is missing; %s", message);
}

/* ---- what a field allows ----------------------------------------------------------------------------- */

static bool bounded(const struct json_field *field) {
    return field->min != 0 || field->max != 0;
}

static const char *allowed_number(struct arena *arena, const struct json_field *field) {
    const char *what = field->type == JSON_INT ? "a whole number" : "a number";
    const double endless = 1e300;
    char min[32], max[32];
    number_text(field->min, min);
    number_text(field->max, max);
    if (!bounded(field)) return what;
    if (field->max >= endless) return arena_printf(arena, "%s of at least %s", what, min);
    if (field->min <= -endless) return arena_printf(arena, "%s of at most %s", what, max);
    return arena_printf(arena, "%s from %s to %s", what, min, max);
}

static const char *allowed_words(struct arena *arena, const char *choices) {
    struct text list = {0};
    for (const char *word = choices; *word;) {
        size_t length = strcspn(word, "|");
        bool last = word[length] == 0;
        text_add(&list, "%s\"%.*s\"", word == choices ? "" : last ? " or " : ", ", (int)length, word);
        word += length + !last;
    }
    const char *result = arena_strdup(arena, list.text ? list.text : "nothing");
    free(list.text);
    return result;
}

static const char *allowed(struct arena *arena, const struct json_field *field) {
    switch (field->type) {
    case JSON_INT:
    case JSON_REAL:
        return allowed_number(arena, field);
    case JSON_BOOL:
        return "true or false";
    case JSON_TEXT:
        return "a text";
    case JSON_CHOICE:
        return allowed_words(arena, field->choices);
    case JSON_VALUE:
        break;
    }
    return "a value";
}

/* ---- reading fields ---------------------------------------------------------------------------------- */

static bool within(const struct json_field *field, double value) {
    if (!isfinite(value)) return false;
    if (bounded(field) && (value < field->min || value > field->max)) return false;
    return field->type != JSON_INT || (value == floor(value) && value >= INT_MIN && value <= INT_MAX);
}

int choice_index(const char *choices, const char *word) {
    size_t length = strlen(word);
    for (int index = 0;; index++) {
        size_t here = strcspn(choices, "|");
        if (here == length && memcmp(choices, word, length) == 0) return index;
        if (!choices[here]) return -1;
        choices += here + 1;
    }
}

/* False, with nothing stored, when the value is not what the field allows. */
static bool store(struct json value, const struct json_field *field, void *member) {
    const cJSON *node = value.node;
    int index;
    switch (field->type) {
    case JSON_INT:
        if (!is_number(node) || !within(field, node->valuedouble)) return false;
        *(int *)member = (int)node->valuedouble;
        return true;
    case JSON_REAL:
        if (!is_number(node) || !within(field, node->valuedouble)) return false;
        *(double *)member = node->valuedouble;
        return true;
    case JSON_BOOL:
        if (!cJSON_IsBool(node)) return false;
        *(bool *)member = cJSON_IsTrue(node);
        return true;
    case JSON_TEXT:
        if (!cJSON_IsString(node)) return false;
        *(const char **)member = arena_strdup(value.arena, node->valuestring);
        return true;
    case JSON_CHOICE:
        index = cJSON_IsString(node) ? choice_index(field->choices, node->valuestring) : -1;
        if (index >= 0) *(int *)member = index;
        return index >= 0;
    case JSON_VALUE:
        *(struct json *)member = value;
        return true;
    }
    return false;
}

/* Edit distance (insert, delete, replace, each 1) of two words of at most 63 bytes; longer ones are far. */
static int distance(const char *a, const char *b) {
    size_t rows = strlen(a), columns = strlen(b);
    int row[64];
    if (rows > 63 || columns > 63) return INT_MAX;
    for (size_t j = 0; j <= columns; j++) row[j] = (int)j;
    for (size_t i = 1; i <= rows; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= columns; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[columns];
}

static void add_unknown(struct json object, const char *key, const struct json_field *fields, size_t count) {
    const char *nearest = NULL;
    struct text all = {0};
    int best = INT_MAX;
    for (size_t i = 0; i < count; i++) {
        int here = distance(key, fields[i].key);
        if (here < best) {
            best = here;
            nearest = fields[i].key;
        }
        text_add(&all, "%s%s", i ? ", " : "", fields[i].key);
    }
    /* Near: at most a third of the letters differ. */
    if (nearest && best <= (int)(strlen(nearest) + 2) / 3)
        errors_add(object.errors, object.file, path_below(object, key), "unknown key; did you mean \"%s\"?",
                   nearest);
    else
        errors_add(object.errors, object.file, path_below(object, key), "unknown key; allowed: %s",
                   all.text ? all.text : "none");
    free(all.text);
}

static bool read_member(struct json object, cJSON *node, const struct json_field *fields, size_t count,
                        void *out, bool *seen) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(fields[i].key, node->string) != 0) continue;
        struct json value = object;
        value.node = node;
        value.path = path_below(object, node->string);
        seen[i] = true;
        if (store(value, &fields[i], (char *)out + fields[i].offset)) return true;
        json_error(value, "allowed: %s", allowed(object.arena, &fields[i]));
        return false;
    }
    if (object.errors->count <= 200) add_unknown(object, node->string, fields, count);
    return false;
}

bool json_read_fields(struct json object, const struct json_field *fields, size_t count, void *out) {
    if (!cJSON_IsObject(object.node)) {
        json_error(object, "allowed: an object");
        return false;
    }
    bool *seen = must_alloc(count), sound = true;
    for (cJSON *node = object.node->child; node; node = node->next)
        sound &= read_member(object, node, fields, count, out, seen);
    for (size_t i = 0; i < count; i++) {
        if (seen[i] || !fields[i].required) continue;
        errors_add(object.errors, object.file, path_below(object, fields[i].key),
                   "the key is missing; allowed: %s", allowed(object.arena, &fields[i]));
        sound = false;
    }
    free(seen);
    return sound;
}

/* ---- dotted paths ------------------------------------------------------------------------------------ */

/* The object that holds the path's last key, which is left in *key; NULL where a part is no object. */
static cJSON *holder(cJSON *root, const char *path, const char **key) {
    for (const char *dot; root && (dot = strchr(path, '.')); path = dot + 1) {
        char *part = must_alloc((size_t)(dot - path) + 1);
        memcpy(part, path, (size_t)(dot - path));
        root = cJSON_IsObject(root) ? cJSON_GetObjectItemCaseSensitive(root, part) : NULL;
        free(part);
    }
    *key = path;
    return cJSON_IsObject(root) && *path ? root : NULL;
}

cJSON *json_get_path(cJSON *root, const char *path) {
    const char *key;
    cJSON *object = holder(root, path, &key);
    return object ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

bool json_set_path(cJSON *root, const char *path, cJSON *value) {
    const char *key;
    cJSON *object = holder(root, path, &key);
    if (!object) return false;
    if (cJSON_GetObjectItemCaseSensitive(object, key))
        return cJSON_ReplaceItemInObjectCaseSensitive(object, key, value);
    return cJSON_AddItemToObject(object, key, value);
}

/* ---- writing ----------------------------------------------------------------------------------------- */

cJSON *json_number(double value) {
    if (!isfinite(value)) return cJSON_CreateNull();
    char text[32];
    cJSON *node = cJSON_CreateRaw(number_text(value, text));
    if (!node) return NULL;
    node->valuedouble = value;
    node->valueint = value >= INT_MAX ? INT_MAX : value <= INT_MIN ? INT_MIN : (int)value;
    return node;
}

/* The same tree with every number as text of its own. */
static void write_out_numbers(cJSON *node) {
    for (cJSON *child = node->child; child; child = child->next) write_out_numbers(child);
    if (!cJSON_IsNumber(node)) return;
    char text[32];
    node->valuestring = cJSON_malloc(sizeof text);
    if (!node->valuestring) return; /* then cJSON prints it its own way */
    node->type = (node->type & ~0xff) | cJSON_Raw;
    number_text(node->valuedouble, node->valuestring);
}

const char *json_text(struct arena *arena, const cJSON *value) {
    cJSON *copy = cJSON_Duplicate(value, true);
    if (copy) write_out_numbers(copy);
    char *printed = copy ? cJSON_PrintUnformatted(copy) : NULL;
    const char *text = arena_strdup(arena, printed ? printed : "null");
    cJSON_free(printed);
    cJSON_Delete(copy);
    return text;
}

void json_add_number(cJSON *object, const char *key, double value) {
    cJSON_AddItemToObject(object, key, json_number(value));
}
