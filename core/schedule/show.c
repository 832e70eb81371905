/*
A schedule for people and for programs: the label of an operation, the JSON of design.md, and a timeline drawn
in the terminal.

The drawing has one row a lane and one character a slice of time. It must be readable without colour, so the
character tells the pass as well as the micro-batch: 0-9 forward, A-J backward, a-j weight gradient, k-t
recomputation, each the micro-batch's last digit. On a terminal backward passes are in inverse video besides.
A slice that is busy for less than half, however many operations that are, has a mark of its own: it is not
idle.
*/
#include "schedule/names.h"

#include <stdlib.h>
#include <unistd.h>

const char *operation_label(const struct schedule *schedule, int op, char *buffer, size_t size) {
    const struct operation *it = &schedule->ops[op];
    char kind[WORD_SIZE], pass[WORD_SIZE], layer[24] = "", micro_batch[32] = "", chunk[32] = "";
    word_of(KIND_CHOICES, it->kind, kind);
    word_of(PASS_CHOICES, it->pass, pass);
    if (it->layer >= 0) snprintf(layer, sizeof layer, " layer %d", it->layer);
    if (it->micro_batch >= 0) snprintf(micro_batch, sizeof micro_batch, " micro-batch %d", it->micro_batch);
    if (it->chunks > 1) snprintf(chunk, sizeof chunk, " chunk %d of %d", it->chunk, it->chunks);
    /* What is done once a step has no pass worth naming. */
    bool once = it->kind == KIND_GRAD_SYNC || it->kind == KIND_PARAM_GATHER || it->kind == KIND_OPTIMIZER;
    snprintf(buffer, size, "%s%s%s%s%s%s", kind, once ? "" : " ", once ? "" : pass, layer, micro_batch,
             chunk);
    return buffer;
}

/* ---- JSON -------------------------------------------------------------------------------------------- */

static void write_ints(FILE *stream, const int *values, int count) {
    putc('[', stream);
    for (int i = 0; i < count; i++) fprintf(stream, "%s%d", i > 0 ? "," : "", values[i]);
    putc(']', stream);
}

static void write_lane(const struct schedule *schedule, int lane, FILE *stream) {
    char word[WORD_SIZE];
    char *group = quoted(group_name(schedule, lane / RESOURCE_COUNT));
    fprintf(stream, "{\"id\":%d,\"group\":%s,\"resource\":\"%s\",\"ops\":", lane, group,
            word_of(RESOURCE_CHOICES, lane % RESOURCE_COUNT, word));
    write_ints(stream, schedule->lanes[lane].ops,
               schedule->lanes[lane].ops != NULL ? schedule->lanes[lane].count : 0);
    putc('}', stream);
    free(group);
}

static void write_operation(const struct schedule *schedule, const struct timeline *timeline, int op,
                            FILE *stream) {
    const struct operation *it = &schedule->ops[op];
    char kind[WORD_SIZE], pass[WORD_SIZE], number[32];
    fprintf(stream,
            "{\"id\":%d,\"kind\":\"%s\",\"pass\":\"%s\",\"layer\":%d,\"micro_batch\":%d,\"chunk\":%d,"
            "\"chunks\":%d,"
            "\"lanes\":",
            op, word_of(KIND_CHOICES, it->kind, kind), word_of(PASS_CHOICES, it->pass, pass), it->layer,
            it->micro_batch, it->chunk, it->chunks);
    write_ints(stream, it->lanes, it->lane_count);
    fputs(",\"deps\":", stream);
    write_ints(stream, schedule->deps + it->first_dep, it->dep_count);
    fprintf(stream, ",\"duration_s\":%s", number_text(it->duration, number));
    fprintf(stream, ",\"start_s\":%s", number_text(timeline->start[op], number));
    fprintf(stream, ",\"end_s\":%s", number_text(timeline->end[op], number));
    fprintf(stream, ",\"bytes\":%s}", number_text(it->bytes, number));
}

/* Written piece by piece: a tree of a large schedule would take many times its memory. */
void schedule_write_json(const struct schedule *schedule, const struct timeline *timeline, FILE *stream) {
    char number[32];
    fprintf(stream, "{\"makespan_s\":%s,\"lanes\":[", number_text(timeline->makespan, number));
    for (int lane = 0; lane < schedule->lane_count; lane++) {
        if (lane > 0) putc(',', stream);
        write_lane(schedule, lane, stream);
    }
    fputs("],\"ops\":[", stream);
    for (int op = 0; op < schedule->op_count; op++) {
        if (op > 0) putc(',', stream);
        write_operation(schedule, timeline, op, stream);
    }
    fputs("]}\n", stream);
}

/* ---- drawing ----------------------------------------------------------------------------------------- */

struct drawing {
    const struct schedule *schedule;
    const struct timeline *timeline;
    FILE *stream;
    int label_width, slices;
    bool terminal;
    bool used[128]; /* characters that stand in the drawing, for the legend */
    bool drawn[PASS_COUNT];
};

#define IDLE '.'
#define PARTLY ':'
#define LEAST_BUSY 0.05 /* share of a slice from which it is partly busy */
#define NARROWEST 40
#define LONGEST_LABEL 20
#define BUSY_WIDTH 5 /* " 100%" */

/* What has no micro-batch has a sign of its own. */
static const struct {
    char sign;
    enum kind kind;
    const char *meaning;
} signs[] = {{'+', KIND_GRAD_SYNC, "gradient sync"},
             {'=', KIND_PARAM_GATHER, "parameter gather"},
             {'$', KIND_OPTIMIZER, "optimizer"}};

static const struct {
    char first;
    const char *range, *meaning;
} alphabets[PASS_COUNT] = {[PASS_FORWARD] = {'0', "0-9", "forward"},
                           [PASS_RECOMPUTE] = {'k', "k-t", "recomputation"},
                           [PASS_BACKWARD] = {'A', "A-J", "backward"},
                           [PASS_WEIGHT] = {'a', "a-j", "weight gradient"}};

static char sign_of(const struct operation *it) {
    for (size_t i = 0; i < COUNT(signs); i++)
        if (it->kind == signs[i].kind) return signs[i].sign;
    if (it->micro_batch < 0) return '#';
    return (char)(alphabets[it->pass].first + it->micro_batch % 10);
}

static const char *label_of_lane(const struct drawing *drawing, int lane, char *buffer, size_t size) {
    char word[WORD_SIZE];
    snprintf(buffer, size, "%s %s", group_name(drawing->schedule, lane / RESOURCE_COUNT),
             word_of(RESOURCE_CHOICES, lane % RESOURCE_COUNT, word));
    return buffer;
}

/* In place of an operation. */
enum { NOTHING = -1, SOMETHING = -2 };

/* Each slice shows the operation that takes most of it where half of it is busy, else NOTHING or SOMETHING.
   Operations of a lane come in order and don't overlap. Returns the lane's busy seconds. */
static double fill_row(const struct drawing *drawing, int lane, int *row) {
    const struct lane *order = &drawing->schedule->lanes[lane];
    int slices = drawing->slices;
    double width = drawing->timeline->makespan / slices, busy = 0;
    double *share = must_alloc(2 * (size_t)slices * sizeof *share), *most = share + slices;
    for (int slice = 0; slice < slices; slice++) row[slice] = NOTHING;
    for (int i = 0; i < order->count && width > 0; i++) {
        int op = order->ops[i];
        double start = drawing->timeline->start[op], end = drawing->timeline->end[op];
        busy += end - start;
        for (int slice = (int)(start / width); slice < slices && slice * width < end; slice++) {
            double from = slice * width > start ? slice * width : start;
            double to = (slice + 1) * width < end ? (slice + 1) * width : end;
            if (to <= from) continue;
            share[slice] += to - from;
            if (to - from <= most[slice]) continue;
            most[slice] = to - from;
            row[slice] = op;
        }
    }
    for (int slice = 0; slice < slices; slice++)
        if (share[slice] < width / 2) row[slice] = share[slice] < LEAST_BUSY * width ? NOTHING : SOMETHING;
    free(share);
    return busy;
}

static void draw_row(struct drawing *drawing, int lane, int *row) {
    char label[64];
    double busy = fill_row(drawing, lane, row);
    fprintf(drawing->stream, "%-*.*s ", drawing->label_width, drawing->label_width,
            label_of_lane(drawing, lane, label, sizeof label));
    bool inverse = false;
    for (int slice = 0; slice < drawing->slices; slice++) {
        const struct operation *it = row[slice] >= 0 ? &drawing->schedule->ops[row[slice]] : NULL;
        bool invert =
            drawing->terminal && it != NULL && (it->pass == PASS_BACKWARD || it->pass == PASS_WEIGHT);
        if (invert != inverse) fputs(invert ? "\033[7m" : "\033[27m", drawing->stream);
        inverse = invert;
        char sign = it != NULL ? sign_of(it) : row[slice] == SOMETHING ? PARTLY : IDLE;
        drawing->used[(int)sign] = true;
        if (it != NULL && sign >= '0' && sign != '=') drawing->drawn[it->pass] = true;
        putc(sign, drawing->stream);
    }
    if (inverse) fputs("\033[27m", drawing->stream);
    double makespan = drawing->timeline->makespan;
    fprintf(drawing->stream, " %3.0f%%\n", makespan > 0 ? 100 * busy / makespan : 0);
}

/* Ticks and times below the rows, one unit for all of them. */
static void draw_axis(const struct drawing *drawing) {
    double makespan = drawing->timeline->makespan;
    const char *unit = makespan >= 1 ? "s" : makespan >= 1e-3 ? "ms" : "µs";
    double scale = makespan >= 1 ? 1 : makespan >= 1e-3 ? 1e3 : 1e6;
    int ticks = drawing->slices >= 48 ? 4 : 2, spacing = drawing->slices / ticks;
    fprintf(drawing->stream, "%-*s ", drawing->label_width, "");
    for (int slice = 0; slice < drawing->slices; slice++)
        putc(slice % spacing == 0 && slice / spacing < ticks ? '|'
             : slice == drawing->slices - 1                  ? '|'
                                                             : '-',
             drawing->stream);
    fprintf(drawing->stream, " busy\n%-*s ", drawing->label_width, unit);
    for (int tick = 0; tick < ticks; tick++) {
        int width = tick < ticks - 1 ? spacing : drawing->slices - tick * spacing - 6;
        fprintf(drawing->stream, "%-*.4g", width, makespan * scale * tick * spacing / drawing->slices);
    }
    fprintf(drawing->stream, "%6.4g\n", makespan * scale);
}

static void draw_legend(const struct drawing *drawing) {
    const char *before = "";
    for (int pass = 0; pass < PASS_COUNT; pass++) {
        if (!drawing->drawn[pass]) continue;
        fprintf(drawing->stream, "%s%s %s", before, alphabets[pass].range, alphabets[pass].meaning);
        before = "  ";
    }
    fprintf(drawing->stream, "%s%c idle", *before ? "\n" : "", IDLE);
    if (drawing->used[PARTLY]) fprintf(drawing->stream, "  %c less than half busy", PARTLY);
    for (size_t i = 0; i < COUNT(signs); i++)
        if (drawing->used[(int)signs[i].sign])
            fprintf(drawing->stream, "  %c %s", signs[i].sign, signs[i].meaning);
    fprintf(drawing->stream, "%s\n", drawing->used['#'] ? "  # other" : "");
    fprintf(drawing->stream, "the character is the micro-batch's last digit (A, a, k: 0)\n");
}

void schedule_draw(const struct schedule *schedule, const struct timeline *timeline, int columns,
                   FILE *stream) {
    struct drawing drawing = {.schedule = schedule, .timeline = timeline, .stream = stream};
    drawing.terminal = isatty(fileno(stream)) == 1;
    for (int lane = 0; lane < schedule->lane_count; lane++) {
        char label[64];
        int width = (int)strlen(label_of_lane(&drawing, lane, label, sizeof label));
        if (schedule->lanes[lane].count > 0 && width > drawing.label_width) drawing.label_width = width;
    }
    if (drawing.label_width > LONGEST_LABEL) drawing.label_width = LONGEST_LABEL;
    if (columns < NARROWEST) columns = NARROWEST;
    drawing.slices = columns - drawing.label_width - 1 - BUSY_WIDTH;
    int *row = must_alloc((size_t)drawing.slices * sizeof *row);
    for (int lane = 0; lane < schedule->lane_count; lane++)
        if (schedule->lanes[lane].count > 0 && schedule->lanes[lane].ops != NULL)
            draw_row(&drawing, lane, row);
    draw_axis(&drawing);
    draw_legend(&drawing);
    free(row);
}
