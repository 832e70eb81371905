/*
Tables for people, 80 columns wide: the records; the speedups beside the paper's range; the factors that
explain them.

The paper's figures come from a file that nothing else reads (experiments/published.json): no cost and no
choice of the suite depends on them.

Factors. A step lasts ideal × recompute × idle GPUs × imbalance × exposed × bubble × step end, each ≥ 1, where
- ideal: the step's computation without recomputation or optimizer, in GPU-seconds, ÷ all GPUs of the cluster;
- recompute: computation with recomputation ÷ without;
- idle GPUs: GPUs of the cluster ÷ GPUs in use;
- imbalance: the busiest worker's computation ÷ the mean worker's;
- exposed, bubble, step end: waiting for transfers, other waiting, and optimizer, on top of the busiest
worker's computation. The speedup of two systems is the quotient of the same product, factor by factor.
*/
#include "cli/cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *scaled_text(double value, char *buffer, size_t size) {
    static const char *const prefixes[] = {"", " K", " M", " G", " T"};
    size_t prefix = 0;
    for (; value >= 1000 && prefix + 1 < COUNT(prefixes); prefix++) value /= 1000;
    snprintf(buffer, size,
             value < 10    ? "%.2f%s"
             : value < 100 ? "%.1f%s"
                           : "%.0f%s",
             value, prefixes[prefix]);
    return buffer;
}

/* ---- records ----------------------------------------------------------------------------------------- */

const char *layout_text(const struct plan *plan, char *buffer, size_t size) {
    const struct parallel *parallel = &plan->parallel;
    char cp[16] = "";
    if (parallel->cp > 1) snprintf(cp, sizeof cp, " cp%d", parallel->cp);
    if (parallel->groups)
        snprintf(buffer, size, "%dx%dx(%d+%d)%s%s", plan->replicas, parallel->groups, parallel->attn_gpus,
                 parallel->ffn_gpus, plan->placement == PLACEMENT_MIXED ? "m" : "s", cp);
    else
        snprintf(buffer, size, "%dx pp%d v%d ep%d%s", plan->replicas, parallel->pp, parallel->vpp,
                 parallel->ep, cp);
    return buffer;
}

static int layout_width(const struct result *results, int count) {
    char layout[48];
    int width = 6;
    for (int i = 0; i < count; i++) {
        int here =
            results[i].feasible ? (int)strlen(layout_text(&results[i].plan, layout, sizeof layout)) : 0;
        if (here > width) width = here;
    }
    return width;
}

static void print_record(const struct result *result, int width, FILE *stream) {
    char rate[16], layout[48], peak[20];
    fprintf(stream, " %-8.8s", result->system->name);
    if (!result->feasible) {
        fprintf(stream, " out of memory: nothing tried fits\n");
        return;
    }
    bytes_text(result->peak_memory, peak);
    fprintf(stream, " %-*s %8s %4.1f%% %5.3f %6s%s\n", width,
            layout_text(&result->plan, layout, sizeof layout),
            scaled_text(result->tokens_per_s, rate, sizeof rate), 100 * result->mfu, result->efficiency, peak,
            result->oom ? "!" : "");
}

/* Of the columns behind those that name the point, without the layout's; with the mark behind the peak. */
#define RECORD_WIDTH 39

static void print_records(const struct result *results, int count, const struct columns *columns, int width,
                          FILE *stream) {
    bool oom = false;
    columns_print_common(columns, stream);
    columns_print_heading(columns, stream);
    fprintf(stream, " %-8s %-*s %8s %5s %5s %6s\n", "system", width, "layout", "tokens/s", "MFU", "eff.",
            "peak");
    for (int i = 0; i < count; i++) {
        columns_print(columns, results[i].plan.point, stream);
        print_record(&results[i], width, stream);
        oom |= results[i].feasible && results[i].oom;
    }
    columns_print_legend(columns, stream);
    fprintf(stream,
            "layout: replicas x ...; ring: replicas x groups x (A+F GPUs) on split (s) or\nmixed (m) nodes. "
            "eff.: the busiest compute lane's busy time / step time.\npeak: memory of the fullest GPU%s.\n",
            oom ? "; !: out of memory, more than it may use" : "");
}

/* ---- speedups ---------------------------------------------------------------------------------------- */

const char *published_beside(const char *manifest, struct arena *arena) {
    const char *file = path_beside(arena, manifest, "published.json");
    return access(file, R_OK) == 0 ? file : NULL;
}

bool read_range(const char *published, const char *key, const char *low, const char *high,
                struct range *range) {
    if (!published) return false;
    struct arena *arena = arena_new();
    struct errors errors = {0};
    struct json document = json_read_file(published, arena, &errors);
    cJSON *entry = document.node ? cJSON_GetObjectItemCaseSensitive(document.node, key) : NULL;
    cJSON *from = cJSON_GetObjectItemCaseSensitive(entry, low),
          *to = cJSON_GetObjectItemCaseSensitive(entry, high);
    cJSON *where = cJSON_GetObjectItemCaseSensitive(entry, "where");
    bool found = cJSON_IsNumber(from) && cJSON_IsNumber(to);
    if (found) {
        range->low = from->valuedouble;
        range->high = to->valuedouble;
        snprintf(range->where, sizeof range->where, "%s", cJSON_IsString(where) ? where->valuestring : "");
    }
    cJSON_Delete(document.node);
    errors_free(&errors);
    arena_free(arena);
    return found;
}

double outside_of(const struct range *range, double value) {
    return value < range->low ? value - range->low : value > range->high ? value - range->high : 0;
}

/* Of the same point as record i, as that system runs it; a point's records follow each other. */
static const struct result *megatron_beside(const struct result *results, int count, int i) {
    int index = results[i].plan.point->index, first = i;
    while (first > 0 && results[first - 1].plan.point->index == index) first--;
    for (int k = first; k < count && results[k].plan.point->index == index; k++)
        if (strcmp(results[k].system->name, "megatron") == 0) return &results[k];
    return NULL;
}

static void print_speedup(const struct result *result, const struct range *paper, FILE *stream) {
    char range[32] = "-", difference[32] = "-";
    if (paper && strcmp(result->system->name, "disagmoe") == 0) {
        snprintf(range, sizeof range, "%.2f-%.2f", paper->low, paper->high);
        double off = outside_of(paper, result->speedup);
        if (isnan(result->speedup))
            snprintf(difference, sizeof difference, result->oom ? "out of memory" : "no baseline");
        else if (off == 0)
            snprintf(difference, sizeof difference, "inside");
        else
            snprintf(difference, sizeof difference, "%+.2f", off);
    }
    fprintf(stream, " %-12.12s", result->system->name);
    if (isnan(result->speedup))
        fprintf(stream, " %8s", "-");
    else
        fprintf(stream, " %8.3f", result->speedup);
    fprintf(stream, " %11s %13s\n", range, difference);
}

/* ---- what the speedups rest on ----------------------------------------------------------------------- */

/* What a manifest says of a choice. */
enum choice_state { CHOICE_SEARCHED, CHOICE_GIVEN, CHOICE_DEFAULT, CHOICE_BY_POINT, CHOICE_ABSENT };
static const char *const state_names[] = {"searched", "given", "default", "given by point"};

struct choice {
    const char *name, *group; /* "zero" of "memory"; group NULL: its own */
    int state, number;        /* 0: the value is no number, or not given */
};
#define MOST_CHOICES 17

static void add_number(struct choice *choices, int *count, const char *name, int given, int otherwise) {
    choices[(*count)++] =
        (struct choice){name, NULL, given > 0 ? CHOICE_GIVEN : otherwise, given > 0 ? given : 0};
}

static void add_memory(struct choice *choices, int *count, const struct point *point, bool whole) {
    static const char *const names[] = {"recompute", "expert_input", "grads", "moments", "zero", "offload"};
    for (size_t i = 0; i < COUNT(names); i++) {
        bool given = point->memory_given & 1 << i; /* in the order of memory_key */
        bool searched = !point->table && (point->auto_memory || !whole);
        choices[(*count)++] = (struct choice){names[i], "memory",
                                              given      ? CHOICE_GIVEN
                                              : searched ? CHOICE_SEARCHED
                                                         : CHOICE_DEFAULT,
                                              0};
    }
}

static void add_order(struct choice *choices, int *count, const struct order *order) {
    static const char *const names[] = {"wave", "waves_in_flight", "prefer", "patient", "justified"};
    const bool given[] = {order->wave > 0, order->waves_in_flight > 0, order->prefer != PREFER_OPEN,
                          order->patient != FLAG_OPEN, order->justified != FLAG_OPEN};
    for (size_t i = 0; i < COUNT(names); i++)
        choices[(*count)++] =
            (struct choice){names[i], "order", given[i] ? CHOICE_GIVEN : CHOICE_SEARCHED, 0};
    choices[(*count)++] =
        (struct choice){"order.without", NULL, order->without ? CHOICE_GIVEN : CHOICE_ABSENT, order->without};
}

/* All choices that a system has at a point, always in the same order; their number. What follows from the
   others (NICs) is left out. */
static int choices_of(const struct system *system, const struct point *point, bool ring,
                      struct choice *choices) {
    const struct parallel *given = &point->parallel;
    bool whole = system->is_whole(given), place = point->placement_given,
         open = point->auto_placement || !whole;
    int count = 0;
    add_number(choices, &count, ring ? "groups" : "pp", ring ? given->groups : given->pp, CHOICE_SEARCHED);
    add_number(choices, &count, ring ? "attn_gpus" : "vpp", ring ? given->attn_gpus : given->vpp,
               CHOICE_SEARCHED);
    add_number(choices, &count, ring ? "ffn_gpus" : "ep", ring ? given->ffn_gpus : given->ep,
               CHOICE_SEARCHED);
    add_number(choices, &count, "cp", given->cp, whole ? CHOICE_DEFAULT : CHOICE_SEARCHED);
    add_memory(choices, &count, point, whole);
    if (system->searches_order) add_order(choices, &count, &point->order);
    if (system->uses_placement)
        choices[count++] = (struct choice){"placement", NULL,
                                           place  ? CHOICE_GIVEN
                                           : open ? CHOICE_SEARCHED
                                                  : CHOICE_DEFAULT,
                                           0};
    return count;
}

/* The same of all records of a system. */
static int common_choices(const struct result *results, int count, const struct result *record,
                          struct choice *choices) {
    bool ring = record->plan.parallel.groups > 0;
    int used = choices_of(record->system, record->plan.point, ring, choices);
    for (int i = 0; i < count; i++) {
        struct choice own[MOST_CHOICES];
        if (results[i].system != record->system) continue;
        choices_of(record->system, results[i].plan.point, ring, own);
        for (int k = 0; k < used; k++)
            if (own[k].state != choices[k].state || own[k].number != choices[k].number)
                choices[k].state = CHOICE_BY_POINT;
    }
    return used;
}

/* Whether all parts of its group are in its state: then the group's name stands for them. */
static bool stands_for_group(const struct choice *choices, int count, int at) {
    bool same = choices[at].group != NULL;
    for (int i = 0; i < count && same; i++)
        same = choices[i].group != choices[at].group || choices[i].state == choices[at].state;
    return same;
}

static void add_without(struct text *line, int without) {
    const char *before = " ";
    for (const char *word = WITHOUT_CHOICES; without; without >>= 1) {
        int length = (int)strcspn(word, "|");
        if (without & 1) text_add(line, "%s%.*s", before, length, word);
        if (without & 1) before = " + ";
        word += length + (word[length] != 0);
    }
}

/* "given ep 16, memory; " */
static void add_choices(struct text *line, const struct choice *choices, int count, int state, bool paper) {
    const char *before = state_names[state];
    for (int i = 0; i < count; i++) {
        bool group = stands_for_group(choices, count, i);
        bool again = group && i > 0 && choices[i - 1].group == choices[i].group;
        if (choices[i].state != state || again) continue;
        text_add(line, "%s %s", before, group ? choices[i].group : choices[i].name);
        if (state == CHOICE_GIVEN && strcmp(choices[i].name, "order.without") == 0)
            add_without(line, choices[i].number);
        else if (state == CHOICE_GIVEN && choices[i].number)
            text_add(line, " %d", choices[i].number);
        bool ep = strcmp(choices[i].name, "ep") == 0 && choices[i].number == 16;
        if (paper && ep && state == CHOICE_GIVEN) text_add(line, " as in the paper");
        before = ",";
    }
    if (*before == ',') text_add(line, "; ");
}

static bool is_same_text(const char *a, const char *b) {
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* What per_system sets for it. */
static void add_own(struct text *line, const struct result *results, int count, const struct system *system) {
    const char *first = NULL;
    bool any = false, same = true;
    for (int i = 0; i < count; i++) {
        if (results[i].system != system) continue;
        const char *own = results[i].plan.point->own;
        if (!any) first = own;
        any = true;
        same &= is_same_text(own, first);
    }
    if (!same) text_add(line, "for it alone, by point, what per_system sets; ");
    if (same && first) text_add(line, "for it alone %s; ", first);
}

/* "  megatron: given ep 16; searched pp, vpp, cp, memory;" */
static void print_choices(const struct result *results, int count, const struct result *record,
                          FILE *stream) {
    static const int order[] = {CHOICE_GIVEN, CHOICE_BY_POINT, CHOICE_SEARCHED, CHOICE_DEFAULT};
    struct choice choices[MOST_CHOICES];
    struct text line = {0};
    int used = common_choices(results, count, record, choices);
    bool paper = strcmp(record->system->name, "megatron") == 0;
    text_add(&line, "  %s: ", record->system->name);
    for (size_t i = 0; i < COUNT(order); i++) add_choices(&line, choices, used, order[i], paper);
    add_own(&line, results, count, record->system);
    print_wrapped(line.text, stream);
    free(line.text);
}

static void print_batch(const struct result *results, int count, FILE *stream) {
    const struct point *point = results[0].plan.point;
    bool same = true;
    for (int i = 1; i < count; i++)
        same &= results[i].plan.point->global_batch == point->global_batch &&
                results[i].plan.point->micro_batches == point->micro_batches;
    if (!same)
        fprintf(stream, "  the batch of each point as the manifest gives it (the paper gives none);\n");
    else if (point->global_batch)
        fprintf(stream, "  global batch %d sequences (the paper gives none);\n", point->global_batch);
    else
        fprintf(stream, "  %d micro-batches a replica (the paper gives none);\n", point->micro_batches);
}

static void print_assumptions(const struct result *results, int count, const struct range *paper,
                              FILE *stream) {
    const struct point *point = results[0].plan.point;
    bool one_cluster = true;
    for (int i = 1; i < count; i++)
        one_cluster &= strcmp(results[i].plan.point->cluster->name, point->cluster->name) == 0;
    fprintf(stream, "Rests on: executor sim; costs %s;\n  cluster %s; seed %d; version %s;\n",
            point->table ? "from the manifest's table" : "from achieved rates",
            one_cluster ? point->cluster->name : "of each point its own", point->seed, VERSION);
    print_batch(results, count, stream);
    for (int i = 0; i < count; i++) {
        bool first = results[i].feasible;
        for (int k = 0; k < i && first; k++)
            first = results[k].system != results[i].system || !results[k].feasible;
        if (first) print_choices(results, count, &results[i], stream);
    }
    fprintf(stream, "  speedup = tokens/s per GPU of the cluster at the same global batch.\n");
    if (paper) fprintf(stream, "Paper: %s.\n", paper->where);
}

/* Of the columns behind those that name the point. */
#define SPEEDUP_WIDTH 48

static void print_speedups(const struct result *results, int count, const struct columns *columns,
                           const char *published, FILE *stream) {
    struct range paper;
    bool known = read_range(published, "speedup_vs_megatron", "low", "high", &paper), any = false;
    for (int i = 0; i < count; i++) {
        const struct result *base = megatron_beside(results, count, i);
        if (!base || base == &results[i]) continue;
        if (!any) {
            fprintf(stream, "\n");
            columns_print_heading(columns, stream);
            fprintf(stream, " %-12s %8s %11s %13s\n", "system", "speedup", "paper", "difference");
        }
        any = true;
        columns_print(columns, results[i].plan.point, stream);
        print_speedup(&results[i], known ? &paper : NULL, stream);
    }
    if (any) print_assumptions(results, count, known ? &paper : NULL, stream);
    if (any && known)
        fprintf(stream, "Where the range is not reached, --explain prints what would have to change.\n");
}

void print_report(const struct result *results, int count, const char *published, FILE *stream) {
    if (!count) return;
    int width = layout_width(results, count), records = RECORD_WIDTH + width;
    int widest = records > SPEEDUP_WIDTH ? records : SPEEDUP_WIDTH;
    struct columns *columns = columns_new(results, count, TABLE_WIDTH - widest);
    print_records(results, count, columns, width, stream);
    print_speedups(results, count, columns, published, stream);
    columns_free(columns);
}

/* ---- explanation ------------------------------------------------------------------------------------- */

enum factor {
    FACTOR_IDEAL,
    FACTOR_RECOMPUTE,
    FACTOR_IDLE,
    FACTOR_IMBALANCE,
    FACTOR_EXPOSED,
    FACTOR_BUBBLE,
    FACTOR_END,
    FACTOR_COUNT
};
static const char *const factor_names[] = {"ideal_s", "recompute", "idle", "imbalance",
                                           "exposed", "bubble",    "end"};

static void factors_of(const struct result *result, double *factors) {
    const struct plan *plan = &result->plan;
    double gpus = cluster_gpus(plan->point->cluster), used = plan->gpus;
    double work = (result->compute_busy - result->optimizer_busy) * plan->replicas;
    double useful = work - result->recompute_busy * plan->replicas;
    const struct breakdown *parts = &result->breakdown;
    double busiest = parts->attention + parts->ffn + parts->other_compute;
    factors[FACTOR_IDEAL] = useful / gpus;
    factors[FACTOR_RECOMPUTE] = work / useful;
    factors[FACTOR_IDLE] = gpus / used;
    factors[FACTOR_IMBALANCE] = busiest / (work / used);
    factors[FACTOR_EXPOSED] = (busiest + parts->exposed_comm) / busiest;
    factors[FACTOR_BUBBLE] =
        (busiest + parts->exposed_comm + parts->bubble) / (busiest + parts->exposed_comm);
    factors[FACTOR_END] = result->step_time / (busiest + parts->exposed_comm + parts->bubble);
}

static void print_factors(const char *label, const double *factors, double product, FILE *stream) {
    fprintf(stream, "%-27.27s %8.3f", label, product);
    for (int i = 0; i < FACTOR_COUNT; i++) fprintf(stream, i == 0 ? " %7.3f" : " %5.3f", factors[i]);
    fprintf(stream, "\n");
}

/* The speedup that remains if a system's transfers, bubbles, imbalance and step end cost nothing. */
static double ceiling_of(const double *base, const double *own) {
    double ceiling = base[FACTOR_IDEAL] / own[FACTOR_IDEAL];
    for (int i = FACTOR_RECOMPUTE; i < FACTOR_COUNT; i++) ceiling *= base[i];
    return ceiling;
}

void print_explanation(const struct result *results, int count, FILE *stream) {
    fprintf(stream, "\nFactors of the step time, and of the speedup (step time = product):\n%-27s %8s", "",
            "product");
    for (int i = 0; i < FACTOR_COUNT; i++) fprintf(stream, i == 0 ? " %7s" : " %5.5s", factor_names[i]);
    fprintf(stream, "\n");
    struct columns *columns = columns_new(results, count, TABLE_WIDTH);
    int index = -1;
    for (int i = 0; i < count; i++) {
        if (!results[i].feasible) continue;
        char label[96];
        double own[FACTOR_COUNT], base[FACTOR_COUNT];
        const struct point *point = results[i].plan.point;
        if (point->index != index) {
            columns_print(columns, point, stream);
            fprintf(stream, "\n");
        }
        index = point->index;
        factors_of(&results[i], own);
        snprintf(label, sizeof label, "  %s", results[i].system->name);
        print_factors(label, own, results[i].step_time, stream);
        const struct result *megatron = megatron_beside(results, count, i);
        if (!megatron || megatron == &results[i] || isnan(results[i].speedup)) continue;
        factors_of(megatron, base);
        double ceiling = ceiling_of(base, own);
        for (int k = 0; k < FACTOR_COUNT; k++) base[k] /= own[k];
        snprintf(label, sizeof label, "    speedup (ceiling %.2f)", ceiling);
        print_factors(label, base, results[i].speedup, stream);
    }
    columns_print_legend(columns, stream);
    columns_free(columns);
    fprintf(stream, "ceiling: the speedup if this system had no transfer, bubble, imbalance,\n"
                    "recomputation, idle GPU or step end at all, against this baseline; beyond it\nonly a "
                    "slower baseline leads.\n");
}

/* ---- trend ------------------------------------------------------------------------------------------- */

void print_trend(const struct experiment *experiment, const char *published, FILE *stream) {
    struct range paper;
    if (!experiment->point_count || experiment->points[0].table) return;
    struct point point = experiment->points[0];
    struct cluster cluster = *point.cluster;
    point.cluster = &cluster;
    struct plan plan = {.point = &point, .parallel = {.cp = 1}};
    char seq[16];
    fprintf(stream, "\nAll-to-all share of a forward layer by nodes, EP over all GPUs, balanced\n(%s, %s):\n",
            point.model->name, sequence_text(point.seq_len, seq));
    for (int nodes = 1; nodes <= 8; nodes *= 2) {
        cluster.nodes = nodes;
        int gpus[8 * 64], count = cluster_gpus(&cluster);
        if (count > (int)COUNT(gpus) || count > point.model->moe.experts) break;
        for (int i = 0; i < count; i++) gpus[i] = i;
        struct side side = {.gpus = gpus, .count = count};
        struct layer_cost cost = plan_layer_cost(&plan, point.model->layers - 1, (struct recompute){0},
                                                 (struct sides){side, side, side});
        double exchange = cost.dispatch.seconds + cost.combine.seconds;
        fprintf(stream, "  %d node%s: %4.1f %%\n", nodes, nodes > 1 ? "s" : " ",
                100 * exchange / (cost.attention[PASS_FORWARD] + cost.ffn[PASS_FORWARD] + exchange));
    }
    if (read_range(published, "all_to_all_share", "one_node", "eight_nodes", &paper))
        fprintf(stream, "  paper: %.0f %% on 1 node, %.0f %% on 8\n  (%s)\n", 100 * paper.low,
                100 * paper.high, paper.where);
}
