/*
Which point a row of a table is of.

A swept value has a cell as short as it can be told by: a number, a word, a model's or a cluster's file
without its folder. Where two cells would look alike or one is long (an object of choices), the column holds
numbers, and a list below the table says which value each is.
*/
#include "cli/cli.h"

#include <stdlib.h>
#include <string.h>

#define LONGEST_CELL 14
#define LONGEST_MODEL 16

enum { COLUMN_MODEL = -1, COLUMN_SEQUENCE = -2, COLUMN_NODES = -3, COLUMN_POINT = -4 };

struct column {
    int what; /* number of the path among the swept ones, or one of the above */
    int width;
    char head[LONGEST_CELL + 1];
    bool numbered;
};

struct columns {
    const struct result *results;
    int count;
    struct column *list, *common; /* shown, and moved above the table */
    int shown, common_count;
    bool *differs; /* of each swept path: whether rows are told apart by it and by no other column */
};

static const struct point *point_at(const struct columns *columns, int i) {
    return columns->results[i].plan.point;
}

static int larger(int a, int b) {
    return a > b ? a : b;
}

/* ---- texts ------------------------------------------------------------------------------------------- */

const char *sequence_text(int seq_len, char *buffer) {
    if (seq_len % 1024 == 0)
        snprintf(buffer, 16, "%dK", seq_len / 1024);
    else
        snprintf(buffer, 16, "%d", seq_len);
    return buffer;
}

/* How much of a text stands on a line of `room` bytes: up to a space or a comma in its second half, else all
   that fits. */
static int line_of(const char *text, int room) {
    int length = (int)strlen(text), end = room;
    if (length <= room) return length;
    while (end > room / 2 && text[end - 1] != ' ' && text[end - 1] != ',') end--;
    if (end > room / 2) return end;
    for (end = room; end > 1 && ((unsigned char)text[end] & 0xc0) == 0x80;)
        end--; /* not inside a character */
    return end;
}

void print_wrapped(const char *text, FILE *stream) {
    int indent = 0;
    for (int further = 2 + (int)strspn(text, " "); *text; indent = further) {
        int end = line_of(text, TABLE_WIDTH - indent), shown = end;
        while (shown > 0 && text[shown - 1] == ' ') shown--;
        fprintf(stream, "%*s%.*s\n", indent, "", shown, text);
        text += end;
    }
}

/* "models/a.json" → "a"; other texts stay. */
static const char *without_folder(const char *text, int *length) {
    *length = (int)strlen(text);
    if (*length <= 5 || strcmp(text + *length - 5, ".json") != 0) return text;
    const char *slash = strrchr(text, '/');
    *length -= 5 + (slash ? (int)(slash + 1 - text) : 0);
    return slash ? slash + 1 : text;
}

/* The shortest that says it; the caller frees it. */
static char *short_value(const struct swept *swept) {
    struct text text = {0};
    cJSON *value = cJSON_Parse(swept->value),
          *only = value && value->child && !value->child->next ? value->child : NULL;
    int length;
    if (cJSON_IsString(value)) {
        const char *name = without_folder(value->valuestring, &length);
        text_add(&text, "%.*s", length, name);
    } else if (cJSON_IsNumber(value) && strlen(swept->value) > 8) {
        text_add(&text, "%.4g", value->valuedouble);
    } else if (cJSON_IsObject(value) && (cJSON_IsNumber(only) || cJSON_IsString(only))) {
        char *inside = cJSON_PrintUnformatted(only);
        text_add(&text, "%s %s", only->string, cJSON_IsString(only) ? only->valuestring : inside);
        cJSON_free(inside);
    } else {
        text_add(&text, "%s", swept->value);
    }
    cJSON_Delete(value);
    return text.text;
}

static const char *cell(const struct column *column, const struct point *point, char *buffer, size_t size) {
    switch (column->what) {
    case COLUMN_MODEL:
        snprintf(buffer, size, "%.*s", column->width, point->model->name);
        return buffer;
    case COLUMN_SEQUENCE:
        return sequence_text(point->seq_len, buffer);
    case COLUMN_NODES:
        snprintf(buffer, size, "%d", point->cluster->nodes);
        return buffer;
    case COLUMN_POINT:
        snprintf(buffer, size, "#%d", point->index + 1);
        return buffer;
    }
    if (column->numbered) {
        snprintf(buffer, size, "#%d", point->swept[column->what].number + 1);
    } else {
        char *text = short_value(&point->swept[column->what]);
        snprintf(buffer, size, "%s", text);
        free(text);
    }
    return buffer;
}

/* ---- which columns ----------------------------------------------------------------------------------- */

static bool is_shown_anyway(const char *path) {
    return strcmp(path, "model") == 0 || strcmp(path, "seq_len") == 0 || strcmp(path, "cluster.nodes") == 0;
}

static bool is_common(const struct columns *columns, int what) {
    const struct point *first = point_at(columns, 0);
    for (int i = 1; i < columns->count; i++) {
        const struct point *point = point_at(columns, i);
        bool same = what == COLUMN_MODEL      ? strcmp(point->model->name, first->model->name) == 0
                    : what == COLUMN_SEQUENCE ? point->seq_len == first->seq_len
                    : what == COLUMN_NODES    ? point->cluster->nodes == first->cluster->nodes
                                              : point->swept[what].number == first->swept[what].number;
        if (!same) return false;
    }
    return true;
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Characters of a model's name that tell the names apart, LONGEST_MODEL at the most where those do. */
static int model_width(const struct columns *columns) {
    int longest = 5, apart = 0;
    const char **names = must_alloc((size_t)(columns->count + 1) * sizeof *names);
    for (int i = 0; i < columns->count; i++) names[i] = point_at(columns, i)->model->name;
    qsort(names, (size_t)columns->count, sizeof *names, by_text);
    for (int i = 0; i < columns->count; i++) {
        int same = 0;
        longest = larger(longest, (int)strlen(names[i]));
        if (i == 0 || strcmp(names[i - 1], names[i]) == 0) continue;
        while (names[i][same] == names[i - 1][same]) same++; /* neighbours have most in common */
        apart = larger(apart, same + 1);
    }
    free(names);
    return longest <= LONGEST_MODEL ? longest : larger(LONGEST_MODEL, apart);
}

/* "nic_exchange" of "cluster.rates.nic_exchange.value" */
static void head_of(const char *path, char *head, int room) {
    size_t length = strlen(path);
    if (length > 6 && strcmp(path + length - 6, ".value") == 0) length -= 6;
    size_t start = length;
    while (start > 0 && path[start - 1] != '.') start--;
    snprintf(head, LONGEST_CELL + 1, "%.*s", (int)length - (int)start < room ? (int)(length - start) : room,
             path + start);
}

/* Whether the cells of a path's values are short and differ; their width. */
static bool cells_tell(const struct columns *columns, int what, int *width) {
    int values = 0;
    for (int i = 0; i < columns->count; i++)
        values = larger(values, point_at(columns, i)->swept[what].number + 1);
    char **texts = must_alloc((size_t)values * sizeof *texts);
    for (int i = 0; i < columns->count; i++) {
        const struct swept *swept = &point_at(columns, i)->swept[what];
        if (!texts[swept->number]) texts[swept->number] = short_value(swept);
    }
    int used = 0;
    for (int i = 0; i < values; i++)
        if (texts[i]) texts[used++] = texts[i];
    qsort(texts, (size_t)used, sizeof *texts, by_text);
    bool tell = true;
    *width = 1;
    for (int i = 0; i < used; i++) {
        tell &= i == 0 || strcmp(texts[i - 1], texts[i]) != 0;
        *width = larger(*width, (int)strlen(texts[i]));
    }
    for (int i = 0; i < used; i++) free(texts[i]);
    free(texts);
    return tell && *width <= LONGEST_CELL;
}

static void add_column(struct columns *columns, struct column column) {
    columns->list[columns->shown++] = column;
}

/* At least as wide as the widest cell of those whose cells are numbers, or fixed. */
static void add_fixed(struct columns *columns, int what, const char *head, int width) {
    struct column column = {.what = what, .width = width};
    char buffer[64];
    snprintf(column.head, sizeof column.head, "%s", head);
    for (int i = 0; i < columns->count && what != COLUMN_MODEL; i++)
        column.width =
            larger(column.width, (int)strlen(cell(&column, point_at(columns, i), buffer, sizeof buffer)));
    add_column(columns, column);
}

static void add_swept(struct columns *columns, int what) {
    struct column column = {.what = what};
    if (!cells_tell(columns, what, &column.width)) {
        int values = 0;
        for (int i = 0; i < columns->count; i++)
            values = larger(values, point_at(columns, i)->swept[what].number + 1);
        column.numbered = true;
        column.width = 1 + snprintf(NULL, 0, "%d", values);
    }
    head_of(point_at(columns, 0)->swept[what].path, column.head, larger(column.width, 10));
    column.width = larger(column.width, (int)strlen(column.head));
    add_column(columns, column);
}

static int width_of(const struct columns *columns) {
    int width = 0;
    for (int i = 0; i < columns->shown; i++) width += columns->list[i].width + (i > 0);
    return width;
}

static void take_out(struct columns *columns, int at) {
    columns->shown--;
    memmove(columns->list + at, columns->list + at + 1,
            (size_t)(columns->shown - at) * sizeof *columns->list);
}

static void move_common(struct columns *columns, int room) {
    static const int order[] = {COLUMN_MODEL, COLUMN_NODES, COLUMN_SEQUENCE};
    for (size_t k = 0; k < COUNT(order) && width_of(columns) > room; k++)
        for (int i = 0; i < columns->shown; i++)
            if (columns->list[i].what == order[k] && is_common(columns, order[k])) {
                columns->common[columns->common_count++] = columns->list[i];
                take_out(columns, i);
            }
}

/* One number for all swept values of a row. */
static void number_points(struct columns *columns) {
    bool any = false;
    for (int i = columns->shown - 1; i >= 0; i--)
        if (columns->list[i].what >= 0) {
            take_out(columns, i);
            any = true;
        }
    if (any) add_fixed(columns, COLUMN_POINT, "point", 5);
}

struct columns *columns_new(const struct result *results, int count, int room) {
    struct columns *columns = must_alloc(sizeof *columns);
    int paths = count ? results[0].plan.point->swept_count : 0;
    *columns = (struct columns){.results = results, .count = count};
    columns->list = must_alloc((size_t)(paths + 4) * sizeof *columns->list);
    columns->common = must_alloc(4 * sizeof *columns->common);
    add_fixed(columns, COLUMN_MODEL, "model", model_width(columns));
    add_fixed(columns, COLUMN_SEQUENCE, "seq", 4);
    add_fixed(columns, COLUMN_NODES, "node", 4);
    columns->differs = must_alloc((size_t)(paths + 1) * sizeof *columns->differs);
    for (int what = 0; what < paths; what++) {
        bool anyway = is_shown_anyway(results[0].plan.point->swept[what].path);
        columns->differs[what] = !anyway && !is_common(columns, what);
        if (columns->differs[what]) add_swept(columns, what);
    }
    move_common(columns, room);
    if (width_of(columns) > room) number_points(columns);
    return columns;
}

void columns_free(struct columns *columns) {
    free(columns->list);
    free(columns->common);
    free(columns->differs);
    free(columns);
}

/* ---- printing ---------------------------------------------------------------------------------------- */

void columns_print_common(const struct columns *columns, FILE *stream) {
    const char *before = "";
    char buffer[64];
    if (!columns->common_count || !columns->count) return;
    const struct point *point = point_at(columns, 0);
    for (int i = 0; i < columns->common_count; i++, before = ", ") {
        int what = columns->common[i].what, nodes = point->cluster->nodes;
        if (what == COLUMN_MODEL)
            fprintf(stream, "%s%s", before, point->model->name);
        else if (what == COLUMN_NODES)
            fprintf(stream, "%s%d node%s", before, nodes, nodes > 1 ? "s" : "");
        else
            fprintf(stream, "%ssequences of %s", before, sequence_text(point->seq_len, buffer));
    }
    fprintf(stream, "\n");
}

void columns_print_heading(const struct columns *columns, FILE *stream) {
    for (int i = 0; i < columns->shown; i++) {
        const struct column *column = &columns->list[i];
        fprintf(stream, "%s%*s", i ? " " : "", column->what == COLUMN_MODEL ? -column->width : column->width,
                column->head);
    }
}

void columns_print(const struct columns *columns, const struct point *point, FILE *stream) {
    char buffer[64];
    for (int i = 0; i < columns->shown; i++) {
        const struct column *column = &columns->list[i];
        fprintf(stream, "%s%*s", i ? " " : "", column->what == COLUMN_MODEL ? -column->width : column->width,
                cell(column, point, buffer, sizeof buffer));
    }
}

/* Each value of a numbered column, in the order of its list. */
static void print_values(const struct columns *columns, const struct column *column, FILE *stream) {
    int next = 0;
    for (bool more = true; more; next++) {
        more = false;
        for (int i = 0; i < columns->count; i++) {
            const struct swept *swept = &point_at(columns, i)->swept[column->what];
            more |= swept->number > next;
            if (swept->number != next) continue;
            struct text line = {0};
            text_add(&line, "%s #%d: %s", column->head, next + 1, swept->value);
            print_wrapped(line.text, stream);
            free(line.text);
            more = true;
            break;
        }
    }
}

static void print_points(const struct columns *columns, FILE *stream) {
    for (int i = 0; i < columns->count; i++) {
        const struct point *point = point_at(columns, i);
        struct text line = {0};
        if (i > 0 && point_at(columns, i - 1)->index == point->index) continue;
        text_add(&line, "point #%d:", point->index + 1);
        for (int k = 0; k < point->swept_count; k++)
            if (columns->differs[k]) text_add(&line, " %s=%s", point->swept[k].path, point->swept[k].value);
        print_wrapped(line.text, stream);
        free(line.text);
    }
}

void columns_print_legend(const struct columns *columns, FILE *stream) {
    struct text heads = {0};
    if (!columns->count) return;
    for (int i = 0; i < columns->shown; i++) {
        const struct column *column = &columns->list[i];
        if (column->what < 0) continue;
        const char *path = point_at(columns, 0)->swept[column->what].path;
        if (strcmp(path, column->head) != 0)
            text_add(&heads, "%s%s: %s", heads.length ? ", " : "swept: ", column->head, path);
    }
    if (heads.text) print_wrapped(heads.text, stream);
    free(heads.text);
    for (int i = 0; i < columns->shown; i++) {
        if (columns->list[i].what == COLUMN_POINT) print_points(columns, stream);
        if (columns->list[i].numbered) print_values(columns, &columns->list[i], stream);
    }
}
