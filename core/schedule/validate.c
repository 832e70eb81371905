/*
The validator: all that a schedule must hold before anything may run it, whoever made it. It trusts nothing:
first the numbers (every index in range), then cycles and whether each operation is on its lanes once, then
the lives of activations, which need whole and acyclic orders, and last the coverage of the model.

"X before Y" is meant in every execution, whatever the durations: there is a path from X to Y over
dependencies and lane orders. It is answered from vector clocks: of each operation, how many operations of
each lane are done when it starts. An operation's first lane is enough to place it, so only lanes that are
somebody's first have a clock.
*/
#include "schedule/names.h"

#include <math.h>
#include <stdlib.h>

#define FAULTS_SHOWN 20
#define CYCLE_SHOWN 12  /* operations */
#define CYCLE_STARTS 32 /* operations from which a short cycle is searched */

struct check {
    const struct schedule *schedule;
    struct errors *errors;
    int faults;
    int *previous; /* MAX_LANES of an operation: the operation before it on that lane, or −1 */
    int *position; /* of an operation in the order of its first lane, or −1 */
    bool *present; /* MAX_LANES of an operation: whether it stands in that lane's order */
    int *order;    /* all operations in topological order */
};

#define FAULT(check, ...)                                                                                    \
    do {                                                                                                     \
        if ((check)->faults++ < FAULTS_SHOWN) errors_add((check)->errors, NULL, "schedule", __VA_ARGS__);    \
    } while (0)

#define LABEL_SIZE 128
#define LABEL(check, op) operation_label((check)->schedule, op, (char[LABEL_SIZE]){0}, LABEL_SIZE)

static const char *lane_name(const struct schedule *schedule, int lane, char *buffer, size_t size) {
    char word[WORD_SIZE];
    snprintf(buffer, size, "%s.%s", group_name(schedule, lane / RESOURCE_COUNT),
             word_of(RESOURCE_CHOICES, lane % RESOURCE_COUNT, word));
    return buffer;
}
#define LANE(check, lane) lane_name((check)->schedule, lane, (char[LABEL_SIZE]){0}, LABEL_SIZE)

/* ---- numbers ----------------------------------------------------------------------------------------- */

static bool within(int value, int low, int bound) {
    return value >= low && value < bound;
}

static void check_names(struct check *check, int op) {
    const struct schedule *schedule = check->schedule;
    const struct operation *it = &schedule->ops[op];
    if (it->kind >= KIND_COUNT || it->pass >= PASS_COUNT)
        FAULT(check, "operation %d has kind %d and pass %d; kinds are 0 to %d, passes 0 to %d", op, it->kind,
              it->pass, KIND_COUNT - 1, PASS_COUNT - 1);
    int lowest = it->kind == KIND_ATTENTION || it->kind == KIND_FFN ? 0 : -1;
    if (!within(it->layer, lowest, schedule->layers))
        FAULT(check, "%s (operation %d) is of layer %d; layers are %d to %d", LABEL(check, op), op, it->layer,
              lowest, schedule->layers - 1);
    if (!within(it->micro_batch, lowest, schedule->micro_batches))
        FAULT(check, "%s (operation %d) is of micro-batch %d; micro-batches are %d to %d", LABEL(check, op),
              op, it->micro_batch, lowest, schedule->micro_batches - 1);
    if (it->chunks < 1 || !within(it->chunk, 0, it->chunks))
        FAULT(check, "%s (operation %d) is chunk %d of %d; chunks count from 0", LABEL(check, op), op,
              it->chunk, it->chunks);
    if (!(isfinite(it->duration) && it->duration >= 0 && isfinite(it->bytes) && it->bytes >= 0))
        FAULT(check, "%s (operation %d) lasts %g s and moves %g bytes; both must be finite and at least 0",
              LABEL(check, op), op, it->duration, it->bytes);
}

static void check_lanes_and_deps(struct check *check, int op) {
    const struct schedule *schedule = check->schedule;
    const struct operation *it = &schedule->ops[op];
    if (!within(it->lane_count, 0, MAX_LANES + 1)) {
        FAULT(check, "%s (operation %d) holds %d lanes; 0 to %d are possible", LABEL(check, op), op,
              it->lane_count, MAX_LANES);
        return;
    }
    if (it->lane_count == 0 && it->duration > 0)
        FAULT(check, "%s (operation %d) lasts %g s and holds no lane", LABEL(check, op), op, it->duration);
    for (int i = 0; i < it->lane_count; i++) {
        if (!within(it->lanes[i], 0, schedule->lane_count))
            FAULT(check, "%s (operation %d) holds lane %d; lanes are 0 to %d", LABEL(check, op), op,
                  it->lanes[i], schedule->lane_count - 1);
        for (int j = 0; j < i; j++)
            if (it->lanes[i] == it->lanes[j])
                FAULT(check, "%s (operation %d) holds lane %d twice", LABEL(check, op), op, it->lanes[i]);
    }
    if (it->dep_count < 0 || (it->dep_count > 0 && (!within(it->first_dep, 0, schedule->dep_count) ||
                                                    it->dep_count > schedule->dep_count - it->first_dep))) {
        FAULT(check, "%s (operation %d) has a list of dependencies outside the schedule's", LABEL(check, op),
              op);
        return;
    }
    for (int i = 0; i < it->dep_count; i++)
        if (!within(schedule->deps[it->first_dep + i], 0, op))
            FAULT(check,
                  "%s (operation %d) depends on operation %d; only operations added before are possible",
                  LABEL(check, op), op, schedule->deps[it->first_dep + i]);
}

static void check_activation_numbers(struct check *check) {
    const struct schedule *schedule = check->schedule;
    for (int i = 0; i < schedule->activation_count; i++) {
        const struct activation *it = &schedule->activations[i];
        if (!within(it->group, 0, schedule->group_count) || !within(it->producer, 0, schedule->op_count) ||
            !within(it->freed_by, -1, schedule->op_count) || !(isfinite(it->bytes) && it->bytes >= 0))
            FAULT(check,
                  "activation %d (group %d, %g bytes, produced by operation %d, freed by %d): not possible",
                  i, it->group, it->bytes, it->producer, it->freed_by);
    }
    for (int i = 0; i < schedule->read_count; i++) {
        const struct read *it = &schedule->reads[i];
        if (!within(it->activation, 0, schedule->activation_count) ||
            !within(it->operation, 0, schedule->op_count))
            FAULT(check, "read %d is of activation %d by operation %d: there is none", i, it->activation,
                  it->operation);
    }
}

/* ---- orders ------------------------------------------------------------------------------------------ */

static int slot_of(const struct operation *it, int lane) {
    for (int slot = 0; slot < it->lane_count; slot++)
        if (it->lanes[slot] == lane) return slot;
    return -1;
}

/* Fills check->previous and check->position; an operation that stands on a lane twice counts where it stands
 * first. */
static void check_lane(struct check *check, int lane) {
    const struct schedule *schedule = check->schedule;
    const struct lane *order = &schedule->lanes[lane];
    int before = -1;
    for (int i = 0; order->ops != NULL && i < order->count; i++) {
        int op = order->ops[i];
        if (!within(op, 0, schedule->op_count)) {
            FAULT(check, "lane %s has operation %d in its order; operations are 0 to %d", LANE(check, lane),
                  op, schedule->op_count - 1);
            continue;
        }
        int slot = slot_of(&schedule->ops[op], lane);
        if (slot < 0) {
            FAULT(check, "%s (operation %d) stands in the order of lane %s, which it does not hold",
                  LABEL(check, op), op, LANE(check, lane));
            continue;
        }
        if (check->present[op * MAX_LANES + slot]) {
            FAULT(check, "%s (operation %d) stands in the order of lane %s more than once", LABEL(check, op),
                  op, LANE(check, lane));
            continue;
        }
        check->present[op * MAX_LANES + slot] = true;
        check->previous[op * MAX_LANES + slot] = before;
        if (slot == 0) check->position[op] = i;
        before = op;
    }
}

static void check_orders(struct check *check) {
    const struct schedule *schedule = check->schedule;
    size_t slots = (size_t)schedule->op_count * MAX_LANES;
    check->present = must_alloc(slots + 1);
    check->previous = must_alloc((slots + 1) * sizeof(int));
    check->position = must_alloc(((size_t)schedule->op_count + 1) * sizeof(int));
    for (size_t i = 0; i < slots; i++) check->previous[i] = -1;
    for (int op = 0; op < schedule->op_count; op++) check->position[op] = -1;
    for (int lane = 0; lane < schedule->lane_count; lane++) check_lane(check, lane);
}

/* After a dead-lock the list-scheduler leaves lanes without a given order unfinished: then the cycle is the
   fault, and what is missing from those lanes only its consequence. */
static void check_missing(struct check *check, bool acyclic) {
    const struct schedule *schedule = check->schedule;
    for (int op = 0; op < schedule->op_count; op++)
        for (int slot = 0; slot < schedule->ops[op].lane_count; slot++) {
            int lane = schedule->ops[op].lanes[slot];
            if (check->present[op * MAX_LANES + slot] || !(acyclic || schedule->lanes[lane].given)) continue;
            FAULT(check, "%s (operation %d) is missing from the order of lane %s, which it holds",
                  LABEL(check, op), op, LANE(check, lane));
        }
}

/* ---- coverage ---------------------------------------------------------------------------------------- */

/* One (component, layer, micro-batch, pass): which of its chunks are there. */
struct cell {
    int chunks; /* 0: nothing of it is there */
    int first;  /* its chunks in `seen` */
};

static size_t cell_of(const struct schedule *schedule, int component, int layer, int micro_batch, int pass) {
    size_t index = (size_t)component * (size_t)schedule->layers + (size_t)layer;
    return (index * (size_t)schedule->micro_batches + (size_t)micro_batch) * PASS_COUNT + (size_t)pass;
}

/* Only operations that check_names finds in range have a cell. */
static struct cell *cell_of_operation(const struct schedule *schedule, struct cell *cells, int op) {
    const struct operation *it = &schedule->ops[op];
    if (it->kind != KIND_ATTENTION && it->kind != KIND_FFN) return NULL;
    return &cells[cell_of(schedule, it->kind == KIND_FFN, it->layer, it->micro_batch, it->pass)];
}

/* Every chunk that is there, counted; the number of chunks is the first operation's. */
static int *count_chunks(struct check *check, struct cell *cells) {
    const struct schedule *schedule = check->schedule;
    int total = 0;
    for (int op = 0; op < schedule->op_count; op++) {
        struct cell *cell = cell_of_operation(schedule, cells, op);
        if (cell == NULL || cell->chunks > 0) continue;
        *cell = (struct cell){.chunks = schedule->ops[op].chunks, .first = total};
        total += cell->chunks;
    }
    int *seen = must_alloc(((size_t)total + 1) * sizeof *seen);
    for (int op = 0; op < schedule->op_count; op++) {
        struct cell *cell = cell_of_operation(schedule, cells, op);
        if (cell == NULL) continue;
        if (schedule->ops[op].chunks != cell->chunks)
            FAULT(check, "%s (operation %d) is one of %d chunks where another is one of %d", LABEL(check, op),
                  op, schedule->ops[op].chunks, cell->chunks);
        else if (++seen[cell->first + schedule->ops[op].chunk] > 1)
            FAULT(check, "%s (operation %d) is there more than once", LABEL(check, op), op);
    }
    return seen;
}

/* Forward and backward must be there; recompute and weight may, but then with all their chunks. */
static void check_cell(struct check *check, const struct cell *cell, const int *seen, int component,
                       int layer, int micro_batch, int pass) {
    char kind_word[WORD_SIZE], pass_word[WORD_SIZE];
    word_of(KIND_CHOICES, component ? KIND_FFN : KIND_ATTENTION, kind_word);
    word_of(PASS_CHOICES, pass, pass_word);
    if (cell->chunks == 0 && (pass == PASS_FORWARD || pass == PASS_BACKWARD))
        FAULT(check, "%s %s layer %d micro-batch %d is missing", kind_word, pass_word, layer, micro_batch);
    for (int chunk = 0; chunk < cell->chunks; chunk++)
        if (seen[cell->first + chunk] == 0)
            FAULT(check, "%s %s layer %d micro-batch %d: chunk %d of %d is missing", kind_word, pass_word,
                  layer, micro_batch, chunk, cell->chunks);
}

static void check_coverage(struct check *check) {
    const struct schedule *schedule = check->schedule;
    struct cell *cells = must_alloc((cell_of(schedule, 2, 0, 0, 0) + 1) * sizeof *cells);
    int *seen = count_chunks(check, cells);
    for (int component = 0; component < 2; component++)
        for (int layer = 0; layer < schedule->layers; layer++)
            for (int micro_batch = 0; micro_batch < schedule->micro_batches; micro_batch++)
                for (int pass = 0; pass < PASS_COUNT; pass++)
                    check_cell(check, &cells[cell_of(schedule, component, layer, micro_batch, pass)], seen,
                               component, layer, micro_batch, pass);
    free(seen);
    free(cells);
}

/* ---- cycles ------------------------------------------------------------------------------------------ */

static int edges_into(const struct check *check, int op) {
    return check->schedule->ops[op].lane_count + check->schedule->ops[op].dep_count;
}

/* What operation `op` waits for by its edge number `edge` (lanes first, then dependencies); −1: nothing. */
static int waits_for(const struct check *check, int op, int edge) {
    const struct operation *it = &check->schedule->ops[op];
    if (edge < it->lane_count) return check->previous[op * MAX_LANES + edge];
    return check->schedule->deps[it->first_dep + edge - it->lane_count];
}

enum mark { UNSEEN, OPEN, DONE };

/* Depth-first over what operations wait for: fills check->order. Where it comes back to an operation on the
   path, the path from there is a cycle, against the arrows: left in `path`, its length is returned. 0: no
   cycle. */
static int sort_topologically(struct check *check, int *path) {
    int count = check->schedule->op_count, done = 0, cycle = 0;
    uint8_t *marks = must_alloc((size_t)count + 1);
    int *next_edge = must_alloc(((size_t)count + 1) * sizeof *next_edge);
    for (int root = 0; root < count && cycle == 0; root++) {
        if (marks[root] != UNSEEN) continue;
        int depth = 0;
        path[0] = root;
        marks[root] = OPEN;
        while (depth >= 0 && cycle == 0) {
            int op = path[depth];
            if (next_edge[op] == edges_into(check, op)) {
                marks[op] = DONE;
                check->order[done++] = op;
                depth--;
                continue;
            }
            int before = waits_for(check, op, next_edge[op]++);
            if (before < 0 || marks[before] == DONE) continue;
            if (marks[before] == OPEN) {
                int from = depth;
                while (path[from] != before) from--;
                cycle = depth - from + 1;
                memmove(path, path + from, (size_t)cycle * sizeof *path);
            } else {
                marks[before] = OPEN;
                path[++depth] = before;
            }
        }
    }
    free(next_edge);
    free(marks);
    return cycle;
}

/* The shortest cycle through `start`, along the arrows, into `cycle`; its length, or `limit` when none is
 * shorter. */
static int shortest_cycle(const struct check *check, int start, int limit, int *cycle, int *towards,
                          int *queue) {
    for (int op = 0; op < check->schedule->op_count; op++) towards[op] = -1;
    int head = 0, tail = 0, last = -1;
    queue[tail++] = start;
    while (head < tail && last < 0) {
        int op = queue[head++];
        for (int edge = 0; edge < edges_into(check, op) && last < 0; edge++) {
            int before = waits_for(check, op, edge);
            if (before == start) last = op;
            if (before < 0 || before == start || towards[before] >= 0) continue;
            towards[before] = op;
            queue[tail++] = before;
        }
    }
    int length = 1;
    for (int op = last; op != start; op = towards[op]) length++;
    if (length >= limit) return limit;
    length = 0;
    cycle[length++] = start;
    for (int op = last; op != start; op = towards[op]) cycle[length++] = op;
    return length;
}

static void text_operation(const struct check *check, struct text *text, int op) {
    const struct operation *it = &check->schedule->ops[op];
    text_add(text, "%s (lane%s", LABEL(check, op), it->lane_count > 1 ? "s" : "");
    for (int slot = 0; slot < it->lane_count; slot++)
        text_add(text, "%s %s", slot > 0 ? "," : "", LANE(check, it->lanes[slot]));
    text_add(text, ")");
}

/* " → " and why `op` comes after `before`. */
static void text_arrow(const struct check *check, struct text *text, int before, int op) {
    int edge = 0;
    while (edge < edges_into(check, op) && waits_for(check, op, edge) != before) edge++;
    const struct operation *it = &check->schedule->ops[op];
    if (edge < it->lane_count)
        text_add(text, " → next on %s: ", LANE(check, it->lanes[edge]));
    else
        text_add(text, " → needed by ");
}

static void report_cycle(struct check *check, const int *cycle, int length) {
    struct text text = {0};
    int shown = length <= CYCLE_SHOWN ? length : CYCLE_SHOWN;
    for (int i = 0; i < shown; i++) {
        if (i > 0) text_arrow(check, &text, cycle[i - 1], cycle[i]);
        text_operation(check, &text, cycle[i]);
    }
    if (length > shown) text_add(&text, " → … %d more …", length - shown);
    text_arrow(check, &text, cycle[length - 1], cycle[0]);
    text_add(&text, "%s", LABEL(check, cycle[0]));
    FAULT(check, "dead-lock, %d operations wait for each other: %s", length, text.text);
    free(text.text);
}

static bool check_cycles(struct check *check) {
    size_t count = (size_t)check->schedule->op_count + 1;
    int *path = must_alloc(4 * count * sizeof *path);
    int *cycle = path + count, *towards = path + 2 * count, *queue = path + 3 * count;
    check->order = must_alloc(count * sizeof(int));
    int length = sort_topologically(check, path);
    if (length > 0) {
        int best = length + 1, starts = length < CYCLE_STARTS ? length : CYCLE_STARTS;
        for (int i = 0; i < starts; i++) best = shortest_cycle(check, path[i], best, cycle, towards, queue);
        report_cycle(check, cycle, best);
    }
    free(path);
    return length == 0;
}

/* ---- activations ------------------------------------------------------------------------------------- */

struct clocks {
    const struct check *check;
    int *clock_of; /* of a lane: its clock, −1 where no operation has it as first lane */
    int count;
    int *done; /* of an operation, for each clock */
};

static int *clock_row(const struct clocks *clocks, int op) {
    return &clocks->done[(size_t)op * (size_t)clocks->count];
}

static struct clocks clocks_new(const struct check *check) {
    const struct schedule *schedule = check->schedule;
    struct clocks clocks = {.check = check};
    clocks.clock_of = must_alloc(((size_t)schedule->lane_count + 1) * sizeof(int));
    for (int lane = 0; lane < schedule->lane_count; lane++) clocks.clock_of[lane] = -1;
    for (int op = 0; op < schedule->op_count; op++) {
        int lane = schedule->ops[op].lanes[0];
        if (schedule->ops[op].lane_count && clocks.clock_of[lane] < 0) clocks.clock_of[lane] = clocks.count++;
    }
    clocks.done = must_alloc(((size_t)schedule->op_count * (size_t)clocks.count + 1) * sizeof(int));
    for (int i = 0; i < schedule->op_count; i++) {
        int op = check->order[i], *mine = clock_row(&clocks, op);
        for (int edge = 0; edge < edges_into(check, op); edge++) {
            int before = waits_for(check, op, edge);
            if (before < 0) continue;
            const int *theirs = clock_row(&clocks, before);
            for (int c = 0; c < clocks.count; c++) mine[c] = mine[c] > theirs[c] ? mine[c] : theirs[c];
            if (schedule->ops[before].lane_count == 0) continue;
            int c = clocks.clock_of[schedule->ops[before].lanes[0]], finished = check->position[before] + 1;
            if (mine[c] < finished) mine[c] = finished;
        }
    }
    return clocks;
}

/* What holds no lane takes no time: it is done when its dependencies are. */
static bool same_or_before(const struct clocks *clocks, int first, int second) {
    const struct operation *it = &clocks->check->schedule->ops[first];
    if (first != second && it->lane_count == 0) {
        for (int i = 0; i < it->dep_count; i++)
            if (!same_or_before(clocks, clocks->check->schedule->deps[it->first_dep + i], second))
                return false;
        return true;
    }
    int c = clocks->clock_of[clocks->check->schedule->ops[first].lanes[0]];
    return first == second || clock_row(clocks, second)[c] > clocks->check->position[first];
}

static void check_activations(struct check *check) {
    const struct schedule *schedule = check->schedule;
    if (schedule->activation_count == 0) return;
    struct clocks clocks = clocks_new(check);
    for (int i = 0; i < schedule->activation_count; i++) {
        const struct activation *it = &schedule->activations[i];
        if (it->freed_by < 0)
            FAULT(check, "activation %d, produced by %s, is never freed", i, LABEL(check, it->producer));
        else if (!same_or_before(&clocks, it->producer, it->freed_by))
            FAULT(check, "%s frees activation %d, but %s, which produces it, need not be done by then",
                  LABEL(check, it->freed_by), i, LABEL(check, it->producer));
    }
    for (int i = 0; i < schedule->read_count; i++) {
        const struct activation *it = &schedule->activations[schedule->reads[i].activation];
        int op = schedule->reads[i].operation;
        if (!same_or_before(&clocks, it->producer, op))
            FAULT(check,
                  "%s uses activation %d before it exists: %s, which produces it, need not be done by then",
                  LABEL(check, op), schedule->reads[i].activation, LABEL(check, it->producer));
        if (it->freed_by >= 0 && !same_or_before(&clocks, op, it->freed_by))
            FAULT(check, "%s uses activation %d after it is freed: %s frees it and need not come later",
                  LABEL(check, op), schedule->reads[i].activation, LABEL(check, it->freed_by));
    }
    free(clocks.done);
    free(clocks.clock_of);
}

/* ---- all of it --------------------------------------------------------------------------------------- */

bool schedule_validate(const struct schedule *schedule, struct errors *errors) {
    struct check check = {.schedule = schedule, .errors = errors};
    for (int op = 0; op < schedule->op_count; op++) {
        check_names(&check, op);
        check_lanes_and_deps(&check, op);
    }
    check_activation_numbers(&check);
    if (check.faults == 0) {
        check_orders(&check);
        bool acyclic = check_cycles(&check);
        check_missing(&check, acyclic);
        if (check.faults == 0) check_activations(&check); /* needs whole orders */
        check_coverage(&check);
    }
    if (check.faults > FAULTS_SHOWN)
        errors_add(errors, NULL, "schedule", "and %d more faults", check.faults - FAULTS_SHOWN);
    free(check.order);
    free(check.position);
    free(check.previous);
    free(check.present);
    return check.faults == 0;
}
