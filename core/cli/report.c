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
#include <string.h>

/* "4K" for 4096, else digits. */
static const char *sequence_text(int seq_len, char *buffer, size_t size) {
    if (seq_len % 1024 == 0)
        snprintf(buffer, size, "%dK", seq_len / 1024);
    else
        snprintf(buffer, size, "%d", seq_len);
    return buffer;
}

/* Three significant digits with a unit prefix: "812 G". */
static const char *scaled_text(double value, char *buffer, size_t size) {
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

/* "ep16 pp8 v2" or "4x(20+12)", and the replicas. */
static const char *layout_text(const struct plan *plan, char *buffer, size_t size) {
    const struct parallel *parallel = &plan->parallel;
    if (parallel->groups)
        snprintf(buffer, size, "%dx%dx(%d+%d)%s", plan->replicas, parallel->groups, parallel->attn_gpus,
                 parallel->ffn_gpus, plan->placement == PLACEMENT_MIXED ? "m" : "s");
    else
        snprintf(buffer, size, "%dx pp%d v%d ep%d", plan->replicas, parallel->pp, parallel->vpp,
                 parallel->ep);
    return buffer;
}

static void print_record(const struct result *result, FILE *stream) {
    const struct point *point = result->plan.point;
    char seq[16], rate[16], layout[48];
    fprintf(stream, "%-16.16s %4s %4d %-9.9s", point->model->name,
            sequence_text(point->seq_len, seq, sizeof seq), point->cluster->nodes, result->system->name);
    if (!result->feasible) {
        fprintf(stream, " out of memory: nothing tried fits\n");
        return;
    }
    fprintf(stream, " %-15.15s %8s %4.1f%% %5.3f %4.0f%s\n",
            layout_text(&result->plan, layout, sizeof layout),
            scaled_text(result->tokens_per_s, rate, sizeof rate), 100 * result->mfu, result->efficiency,
            result->peak_memory / 1e9, result->oom ? " OOM" : "");
}

static void print_records(const struct result *results, int count, FILE *stream) {
    fprintf(stream, "%-16s %4s %4s %-9s %-15s %8s %5s %5s %4s\n", "model", "seq", "node", "system", "layout",
            "tokens/s", "MFU", "eff.", "GB");
    for (int i = 0; i < count; i++) print_record(&results[i], stream);
    fprintf(stream,
            "layout: replicas x ...; ring: replicas x groups x (A+F GPUs) on split (s) or\nmixed (m) nodes. "
            "eff.: the busiest compute lane's busy time / step time.\nGB: peak of the fullest GPU.\n");
}

/* ---- speedups ---------------------------------------------------------------------------------------- */

struct range {
    double low, high;
    char where[160];
};

static bool read_range(const char *published, const char *key, const char *low, const char *high,
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

static const struct result *megatron_of(const struct result *results, int count, const struct point *point) {
    for (int i = 0; i < count; i++)
        if (results[i].plan.point == point && strcmp(results[i].system->name, "megatron") == 0)
            return &results[i];
    return NULL;
}

static void print_speedup(const struct result *result, const struct range *paper, FILE *stream) {
    const struct point *point = result->plan.point;
    char seq[16], range[32] = "-", difference[32] = "-";
    if (paper && strcmp(result->system->name, "disagmoe") == 0) {
        snprintf(range, sizeof range, "%.2f-%.2f", paper->low, paper->high);
        double off = result->speedup < paper->low    ? result->speedup - paper->low
                     : result->speedup > paper->high ? result->speedup - paper->high
                                                     : 0;
        if (isnan(off))
            snprintf(difference, sizeof difference, "no baseline");
        else if (off == 0)
            snprintf(difference, sizeof difference, "inside");
        else
            snprintf(difference, sizeof difference, "%+.2f", off);
    }
    fprintf(stream, "%-18.18s %4s %5d %-12.12s", point->model->name,
            sequence_text(point->seq_len, seq, sizeof seq), point->cluster->nodes, result->system->name);
    if (isnan(result->speedup))
        fprintf(stream, " %8s", "-");
    else
        fprintf(stream, " %8.3f", result->speedup);
    fprintf(stream, " %11s %12s\n", range, difference);
}

static void print_assumptions(const struct result *results, int count, const struct range *paper,
                              FILE *stream) {
    const struct point *point = results[0].plan.point;
    bool same = true;
    for (int i = 1; i < count; i++) same &= results[i].plan.point->global_batch == point->global_batch;
    fprintf(stream, "Rests on: executor sim; costs %s;\n  cluster %s; seed %d; version %s;\n",
            point->table ? "from the manifest's table" : "from achieved rates", point->cluster->name,
            point->seed, VERSION);
    if (same && point->global_batch)
        fprintf(stream, "  global batch %d sequences, the suite's choice (the paper gives none);\n",
                point->global_batch);
    if (point->parallel.ep)
        fprintf(stream, "  baseline EP fixed at %d as in the paper, its PP and virtual stages searched;\n",
                point->parallel.ep);
    fprintf(stream, "  speedup = tokens/s per GPU of the cluster at the same global batch.\n");
    if (paper) fprintf(stream, "Paper: %s.\n", paper->where);
}

static void print_speedups(const struct result *results, int count, const char *published, FILE *stream) {
    struct range paper;
    bool known = read_range(published, "speedup_vs_megatron", "low", "high", &paper);
    bool any = false;
    for (int i = 0; i < count; i++) {
        const struct result *base = megatron_of(results, count, results[i].plan.point);
        if (!base || base == &results[i]) continue;
        if (!any)
            fprintf(stream, "\n%-18s %4s %5s %-12s %8s %11s %12s\n", "model", "seq", "nodes", "system",
                    "speedup", "paper", "difference");
        any = true;
        print_speedup(&results[i], known ? &paper : NULL, stream);
    }
    if (any) print_assumptions(results, count, known ? &paper : NULL, stream);
    if (any && known)
        fprintf(stream, "Where the range is not reached, --explain prints what would have to change.\n");
}

void print_report(const struct experiment *experiment, const struct result *results, int count,
                  const char *published, FILE *stream) {
    (void)experiment;
    if (!count) return;
    print_records(results, count, stream);
    print_speedups(results, count, published, stream);
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
    for (int i = 0; i < count; i++) {
        if (!results[i].feasible) continue;
        char seq[16], label[96];
        double own[FACTOR_COUNT], base[FACTOR_COUNT];
        const struct point *point = results[i].plan.point;
        factors_of(&results[i], own);
        snprintf(label, sizeof label, "%.9s %s n%d %s", point->model->name,
                 sequence_text(point->seq_len, seq, sizeof seq), point->cluster->nodes,
                 results[i].system->name);
        print_factors(label, own, results[i].step_time, stream);
        const struct result *megatron = megatron_of(results, count, point);
        if (!megatron || megatron == &results[i] || !megatron->feasible) continue;
        factors_of(megatron, base);
        double ceiling = ceiling_of(base, own);
        for (int k = 0; k < FACTOR_COUNT; k++) base[k] /= own[k];
        snprintf(label, sizeof label, "  speedup (ceiling %.2f)", ceiling);
        print_factors(label, base, results[i].speedup, stream);
    }
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
            point.model->name, sequence_text(point.seq_len, seq, sizeof seq));
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
