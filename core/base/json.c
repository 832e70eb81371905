/*
Strict reading of JSON through tables of fields, and numbers that print the same everywhere.

cJSON parses; this file adds what a user needs of an error: file, path of the key, what was found, what is allowed. A
document is checked as a whole (size, binary content, text behind the end, a key given twice) before any key is read.
*/
#include "base/base.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES ((size_t)8 << 20)

/* ---- documents ------------------------------------------------------------------------------------------- */

static void position_of(const char *text, size_t offset, int *line, int *column)
{
    *line = *column = 1;
    for (size_t i = 0; i < offset; i++) {
        ++*column;
        if (text[i] == '\n') {
            ++*line;
            *column = 1;
        }
    }
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Sorted, so that objects of many keys cost n log n. */
static void check_twice(struct json object)
{
    size_t count = 0, next = 0;
    for (cJSON *child = object.node->child; child; child = child->next) count++;
    if (count < 2) return;
    const char **names = must_alloc(count * sizeof *names);
    for (cJSON *child = object.node->child; child; child = child->next) names[next++] = child->string;
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = 1; i < count; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            errors_add(object.errors, object.file, json_member(object, names[i]).path,
                       "the key is given twice; each key is allowed once");
    free(names);
}

static void check_keys(struct json value)
{
    if (cJSON_IsObject(value.node)) check_twice(value);
    int index = 0;
    for (cJSON *child = value.node->child; child; child = child->next, index++) {
        if (!child->child) continue;
        check_keys(child->string ? json_member(value, child->string) : json_element(value, child, index));
    }
}

struct json json_read_text(const char *text, size_t length, const char *file, struct arena *arena,
                           struct errors *errors)
{
    struct json document = {.file = file, .path = "", .arena = arena, .errors = errors};
    int line, column;
    const char *zero = memchr(text, 0, length);
    if (zero) {
        position_of(text, (size_t)(zero - text), &line, &column);
        errors_add(errors, file, NULL, "line %d, column %d: found a zero byte; only JSON text is allowed", line, column);
        return document;
    }
    char *copy = must_alloc(length + 1); /* ends in the zero byte that cJSON's end check needs */
    memcpy(copy, text, length);
    const char *end = NULL;
    document.node = cJSON_ParseWithLengthOpts(copy, length + 1, &end, true);
    if (!document.node) {
        position_of(copy, end ? (size_t)(end - copy) : 0, &line, &column);
        errors_add(errors, file, NULL, "line %d, column %d: not valid JSON here (or nested too deeply)", line, column);
    } else {
        int before = errors->count;
        check_keys(document);
        if (errors->count > before) {
            cJSON_Delete(document.node);
            document.node = NULL;
        }
    }
    free(copy);
    return document;
}

struct json json_read_file(const char *file, struct arena *arena, struct errors *errors)
{
    struct json document = {.file = file, .path = "", .arena = arena, .errors = errors};
    FILE *stream = fopen(file, "rb");
    if (!stream) {
        errors_add(errors, file, NULL, "cannot be opened: %s", strerror(errno));
        return document;
    }
    char *text = must_alloc(MAX_BYTES + 1);
    size_t length = fread(text, 1, MAX_BYTES + 1, stream);
    if (ferror(stream)) errors_add(errors, file, NULL, "cannot be read: %s", strerror(errno));
    else if (length > MAX_BYTES)
        errors_add(errors, file, NULL, "is larger than 8 MiB; a manifest of at most 8 MiB is allowed");
    else document = json_read_text(text, length, file, arena, errors);
    free(text);
    fclose(stream);
    return document;
}

struct json json_member(struct json object, const char *key)
{
    struct json member = object;
    member.node = cJSON_GetObjectItemCaseSensitive(object.node, key);
    member.path = *object.path ? arena_printf(object.arena, "%s.%s", object.path, key) : arena_strdup(object.arena, key);
    return member;
}

struct json json_element(struct json array, const cJSON *element, int index)
{
    struct json value = array;
    value.node = (cJSON *)element;
    value.path = arena_printf(array.arena, "%s[%d]", array.path, index);
    return value;
}

/* ---- errors ---------------------------------------------------------------------------------------------- */

static void add_found(struct json value, const char *message)
{
    char *printed = cJSON_IsObject(value.node)  ? strdup("an object")
                    : cJSON_IsArray(value.node) ? strdup("a list")
                                                : cJSON_PrintUnformatted(value.node);
    const char *found = printed ? printed : "nothing";
    errors_add(value.errors, value.file, value.path, "found %.60s%s; %s", found, strlen(found) > 60 ? "..." : "", message);
    free(printed);
}

void json_error(struct json value, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    char message[512];
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    add_found(value, message);
}

/* ---- fields ---------------------------------------------------------------------------------------------- */

/* Levenshtein distance of short texts; large for long ones. */
static int distance(const char *a, const char *b)
{
    int row[64];
    int columns = (int)strlen(b);
    if (columns >= (int)COUNT(row) || strlen(a) >= COUNT(row)) return (int)COUNT(row);
    for (int j = 0; j <= columns; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= columns; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[columns];
}

static void report_unknown(struct json object, const char *key, const struct json_field *fields, size_t count)
{
    const char *path = json_member(object, key).path, *nearest = NULL;
    int least = 4;
    struct text allowed = {0};
    for (size_t i = 0; i < count; i++) {
        int here = distance(key, fields[i].key);
        if (here < least && here < (int)strlen(key)) {
            least = here;
            nearest = fields[i].key;
        }
        text_add(&allowed, "%s%s", i ? ", " : "", fields[i].key);
    }
    if (nearest) errors_add(object.errors, object.file, path, "unknown key; did you mean \"%s\"?", nearest);
    else errors_add(object.errors, object.file, path, "unknown key; allowed are %s", allowed.text);
    free(allowed.text);
}

static bool in_range(const struct json_field *field, double value)
{
    return (field->min == 0 && field->max == 0) || (value >= field->min && value <= field->max);
}

static bool read_number(struct json value, const struct json_field *field, void *out)
{
    double number = cJSON_IsNumber(value.node) ? value.node->valuedouble : NAN;
    bool whole = field->type == JSON_INT;
    bool fits = isfinite(number) && in_range(field, number);
    if (whole) fits = fits && number == floor(number) && fabs(number) <= 2147483647.0;
    if (!fits) {
        char low[32], high[32];
        const char *kind = whole ? "a whole number" : "a number";
        if (field->min == 0 && field->max == 0) json_error(value, "%s is allowed", kind);
        else
            json_error(value, "%s from %s to %s is allowed", kind, number_text(field->min, low),
                       number_text(field->max, high));
        return false;
    }
    if (whole) *(int *)out = (int)number;
    else *(double *)out = number;
    return true;
}

static bool read_choice(struct json value, const struct json_field *field, int *out)
{
    int index = 0;
    const char *word = field->choices;
    while (cJSON_IsString(value.node) && *word) {
        size_t length = strcspn(word, "|");
        if (strlen(value.node->valuestring) == length && strncmp(word, value.node->valuestring, length) == 0) {
            *out = index;
            return true;
        }
        word += length + (word[length] == '|');
        index++;
    }
    json_error(value, "one of %s is allowed", field->choices);
    return false;
}

static bool read_field(struct json value, const struct json_field *field, void *out)
{
    switch (field->type) {
    case JSON_INT:
    case JSON_REAL: return read_number(value, field, out);
    case JSON_BOOL:
        if (!cJSON_IsBool(value.node)) {
            json_error(value, "true or false is allowed");
            return false;
        }
        *(bool *)out = cJSON_IsTrue(value.node);
        return true;
    case JSON_TEXT:
        if (!cJSON_IsString(value.node)) {
            json_error(value, "a text is allowed");
            return false;
        }
        *(const char **)out = arena_strdup(value.arena, value.node->valuestring);
        return true;
    case JSON_CHOICE: return read_choice(value, field, out);
    case JSON_VALUE: *(struct json *)out = value; return true;
    }
    return false;
}

bool json_read_fields(struct json object, const struct json_field *fields, size_t count, void *out)
{
    if (!cJSON_IsObject(object.node)) {
        json_error(object, "an object is allowed");
        return false;
    }
    int before = object.errors->count;
    for (cJSON *child = object.node->child; child; child = child->next) {
        bool known = false;
        for (size_t i = 0; i < count; i++) known |= strcmp(fields[i].key, child->string) == 0;
        if (!known) report_unknown(object, child->string, fields, count);
    }
    for (size_t i = 0; i < count; i++) {
        struct json member = json_member(object, fields[i].key);
        if (member.node) read_field(member, &fields[i], (char *)out + fields[i].offset);
        else if (fields[i].required)
            errors_add(object.errors, object.file, member.path, "missing; the key is required");
    }
    return object.errors->count == before;
}

/* ---- paths ----------------------------------------------------------------------------------------------- */

/* The object that holds the path's last key, and that key. */
static cJSON *holder(cJSON *root, const char *path, const char **key)
{
    const char *dot;
    while ((dot = strchr(path, '.'))) {
        char part[128];
        if ((size_t)(dot - path) >= sizeof part) return NULL;
        memcpy(part, path, (size_t)(dot - path));
        part[dot - path] = 0;
        root = cJSON_GetObjectItemCaseSensitive(root, part);
        path = dot + 1;
    }
    *key = path;
    return cJSON_IsObject(root) && *path ? root : NULL;
}

bool json_set_path(cJSON *root, const char *path, cJSON *value)
{
    const char *key;
    cJSON *object = holder(root, path, &key);
    if (!object) return false;
    if (cJSON_GetObjectItemCaseSensitive(object, key)) return cJSON_ReplaceItemInObjectCaseSensitive(object, key, value);
    return cJSON_AddItemToObject(object, key, value);
}

cJSON *json_get_path(cJSON *root, const char *path)
{
    const char *key;
    cJSON *object = holder(root, path, &key);
    return object ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

/* ---- numbers --------------------------------------------------------------------------------------------- */

/* A raw item: cJSON's own printing of numbers is not the shortest. It prints right but cJSON_IsNumber is false. */
cJSON *json_number(double value)
{
    char buffer[32];
    return isfinite(value) ? cJSON_CreateRaw(number_text(value, buffer)) : cJSON_CreateNull();
}

void json_add_number(cJSON *object, const char *key, double value)
{
    cJSON_AddItemToObject(object, key, json_number(value));
}
