/*
What the records of the regimes say: how each variant's speedups lie to the paper's range, which factors
change them most, and whether any variant has all of them inside.
*/
#include "cli/regimes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double speedup_at(const struct record_store *store, const struct variant *variant,
                         const struct point *point) {
    return store_rate(store, variant, point, SUBJECT) / store_rate(store, variant, point, BASELINE);
}

static bool is_asked(const struct record_store *store, const struct variant *variant,
                     const struct point *point) {
    return !variant->ends || regimes_is_end(store->regimes, point);
}

/* ---- verdicts ---------------------------------------------------------------------------------------- */

struct verdict verdict_of(const struct record_store *store, const struct variant *variant,
                          const struct range *range) {
    const struct experiment *table = &store->regimes->experiment;
    struct verdict verdict = {0};
    double largest = 0;
    for (int i = 0; i < table->point_count; i++) {
        const struct point *point = &table->points[i];
        if (!is_asked(store, variant, point)) continue;
        double speedup = speedup_at(store, variant, point);
        verdict.points++;
        if (isnan(speedup)) {
            verdict.missing++;
            verdict.away = INFINITY;
            continue;
        }
        verdict.inside += outside_of(range, speedup) == 0;
        verdict.away += fabs(outside_of(range, speedup));
        if (speedup > largest) verdict.largest = point->seq_len;
        largest = fmax(largest, speedup);
    }
    return verdict;
}

bool is_nearer(const struct verdict *a, const struct verdict *b) {
    return a->inside != b->inside ? a->inside > b->inside : a->away < b->away;
}

static int longest_of(const struct regimes *regimes) {
    int longest = 0;
    for (int i = 0; i < regimes->experiment.point_count; i++)
        if (regimes->experiment.points[i].seq_len > longest) longest = regimes->experiment.points[i].seq_len;
    return longest;
}

/* ---- effects ----------------------------------------------------------------------------------------- */

/* NAN where a system does not fit under the level at a point where both fit in the table. */
static double effect_of(const struct record_store *store, int factor, int level) {
    const struct regimes *regimes = store->regimes;
    size_t size = (size_t)regimes->factor_count * sizeof(int);
    struct variant table = {.levels = arena_alloc(regimes->arena, size)},
                   changed = {.levels = arena_alloc(regimes->arena, size)};
    changed.levels[factor] = level;
    double sum = 0;
    int count = 0;
    for (int i = 0; i < regimes->experiment.point_count; i++) {
        const struct point *point = &regimes->experiment.points[i];
        double before = speedup_at(store, &table, point), after = speedup_at(store, &changed, point);
        if (isnan(before)) continue;
        sum += fabs(log(after / before));
        count++;
    }
    return sum / count;
}

static int by_size(const void *a, const void *b) {
    const struct effect *x = a, *y = b;
    return x->size != y->size ? (x->size < y->size ? 1 : -1) : x->factor - y->factor;
}

int effects_of(const struct record_store *store, struct effect *effects) {
    const struct regimes *regimes = store->regimes;
    int count = 0;
    for (int i = 0; i < regimes->factor_count; i++) {
        if (regimes->factors[i].sensitivity) continue;
        struct effect *effect = &effects[count++];
        *effect = (struct effect){.factor = i};
        for (int level = 1; level <= regimes->factors[i].level_count; level++) {
            double size = effect_of(store, i, level);
            if (size > effect->size) *effect = (struct effect){i, level, size};
        }
    }
    qsort(effects, (size_t)count, sizeof *effects, by_size);
    return count;
}

/* ---- a row a variant --------------------------------------------------------------------------------- */

char *levels_text(const struct regimes *regimes, const int *levels) {
    struct text text = {0};
    for (int i = 0; i < regimes->factor_count; i++)
        if (levels[i])
            text_add(&text, "%s%s %s", text.length ? ", " : "", regimes->factors[i].name,
                     regimes->factors[i].levels[levels[i] - 1].name);
    if (!text.length) text_add(&text, "as in the table");
    return text.text;
}

/* The table's sequence lengths in their order; room for one a point. */
static int lengths_of(const struct regimes *regimes, int *lengths) {
    int count = 0;
    for (int i = 0; i < regimes->experiment.point_count; i++) {
        int length = regimes->experiment.points[i].seq_len, k = 0;
        while (k < count && lengths[k] != length) k++;
        if (k == count) lengths[count++] = length;
    }
    return count;
}

/* "1.03-1.40", over the models; with a mark where a speedup is missing. */
static void print_length(const struct record_store *store, const struct variant *variant, int length,
                         FILE *stream) {
    const struct experiment *table = &store->regimes->experiment;
    double low = INFINITY, high = -INFINITY;
    bool missing = false;
    char cell[32] = "no plan";
    for (int i = 0; i < table->point_count; i++) {
        const struct point *point = &table->points[i];
        if (point->seq_len != length || !is_asked(store, variant, point)) continue;
        double speedup = speedup_at(store, variant, point);
        missing |= isnan(speedup);
        low = fmin(low, speedup);
        high = fmax(high, speedup);
    }
    if (low <= high)
        snprintf(cell, sizeof cell, "%.2f-%.2f", low, high);
    else if (!missing)
        snprintf(cell, sizeof cell, "-");
    fprintf(stream, "%9s%c", cell, missing && low <= high ? '!' : ' ');
}

#define NAME_WIDTH 22

static void print_variant(const struct record_store *store, const struct variant *variant,
                          const struct range *range, FILE *stream) {
    const struct regimes *regimes = store->regimes;
    struct verdict verdict = verdict_of(store, variant, range);
    int *lengths = arena_alloc(regimes->arena, (size_t)regimes->experiment.point_count * sizeof *lengths);
    int count = lengths_of(regimes, lengths);
    char inside[32], away[32] = "-", most[16] = "-";
    fprintf(stream, "%-*.*s ", NAME_WIDTH, NAME_WIDTH, variant->name);
    for (int i = 0; i < count; i++) print_length(store, variant, lengths[i], stream);
    snprintf(inside, sizeof inside, "%d/%d", verdict.inside, verdict.points);
    if (isfinite(verdict.away)) snprintf(away, sizeof away, "%.2f", verdict.away);
    if (verdict.largest) sequence_text(verdict.largest, most);
    fprintf(stream, "%5s %5s %4s\n", inside, away, most);
}

static void print_heading(const struct record_store *store, const char *name, FILE *stream) {
    const struct regimes *regimes = store->regimes;
    int *lengths = arena_alloc(regimes->arena, (size_t)regimes->experiment.point_count * sizeof *lengths);
    int count = lengths_of(regimes, lengths);
    char text[16];
    fprintf(stream, "\n%-*s ", NAME_WIDTH, name);
    for (int i = 0; i < count; i++) fprintf(stream, "%9s ", sequence_text(lengths[i], text));
    fprintf(stream, "%5s %5s %4s\n", "in", "away", "most");
}

static bool is_kind(const struct variant *variant, const char *kind) {
    return strcmp(variant->kind, kind) == 0;
}

static void print_kinds(const struct record_store *store, const struct findings *findings,
                        const char *const *kinds, int kind_count, FILE *stream) {
    for (int i = 0; i < findings->count; i++)
        for (int k = 0; k < kind_count; k++)
            if (is_kind(&findings->variants[i], kinds[k]))
                print_variant(store, &findings->variants[i], &findings->range, stream);
}

/* ---- legends ----------------------------------------------------------------------------------------- */

static void print_factor_legend(const struct findings *findings, const struct regimes *regimes,
                                FILE *stream) {
    print_wrapped("in: speedups inside the paper's range; away: sum of the others' distances from it; "
                  "most: sequence length of the largest; !: somewhere a system does not fit.",
                  stream);
    for (int i = 0; i < regimes->factor_count; i++) {
        const struct factor *factor = &regimes->factors[i];
        struct text line = {0};
        text_add(&line, "%s (table: %s)%s%s.", factor->name, factor->default_name, factor->why ? ": " : "",
                 factor->why ? factor->why : "");
        print_wrapped(line.text, stream);
        free(line.text);
    }
    for (int i = 0; i < findings->count; i++) {
        if (!is_kind(&findings->variants[i], "combination")) continue;
        char *levels = levels_text(regimes, findings->variants[i].levels);
        struct text line = {0};
        text_add(&line, "%s: %s.", findings->variants[i].name, levels);
        print_wrapped(line.text, stream);
        free(levels);
        free(line.text);
    }
}

static void print_effects(const struct findings *findings, const struct regimes *regimes, FILE *stream) {
    fprintf(stream, "\nEffect of a factor: mean |ln(speedup / the table's)| of its strongest level\n");
    for (int i = 0; i < findings->effect_count; i++) {
        const struct effect *effect = &findings->effects[i];
        const struct factor *factor = &regimes->factors[effect->factor];
        if (effect->level)
            fprintf(stream, "  %.3f  %c  %s %s\n", effect->size, i < findings->crossed ? 'A' + i : ' ',
                    factor->name, factor->levels[effect->level - 1].name);
        else
            fprintf(stream, "      -     %s: nothing changes, or a system does not fit\n", factor->name);
    }
}

/* ---- every speedup ----------------------------------------------------------------------------------- */

#define MOST_COLUMNS 5

/* The only factor of a variant that is not at its default. */
static int factor_of(const struct regimes *regimes, const struct variant *variant) {
    int factor = 0;
    while (factor + 1 < regimes->factor_count && !variant->levels[factor]) factor++;
    return factor;
}

static void print_speedups_of(const struct record_store *store, const struct variant *table,
                              const struct variant **shown, int count, FILE *stream) {
    const struct regimes *regimes = store->regimes;
    char seq[16];
    fprintf(stream, "\n%-16s %4s %8s", "every speedup", "seq", "table");
    for (int k = 0; k < count; k++)
        fprintf(stream, " %8.8s", regimes->factors[factor_of(regimes, shown[k])].name);
    fprintf(stream, "\n%-30s", "");
    for (int k = 0; k < count; k++) {
        int factor = factor_of(regimes, shown[k]);
        fprintf(stream, " %8.8s", regimes->factors[factor].levels[shown[k]->levels[factor] - 1].name);
    }
    fprintf(stream, "\n");
    for (int i = 0; i < regimes->experiment.point_count; i++) {
        const struct point *point = &regimes->experiment.points[i];
        fprintf(stream, "%-16.16s %4s", point->model->name, sequence_text(point->seq_len, seq));
        for (int k = -1; k < count; k++) {
            const struct variant *variant = k < 0 ? table : shown[k];
            double speedup = speedup_at(store, variant, point);
            if (!is_asked(store, variant, point))
                fprintf(stream, " %8s", "-");
            else if (isnan(speedup))
                fprintf(stream, " %8s", "no plan");
            else
                fprintf(stream, " %8.3f", speedup);
        }
        fprintf(stream, "\n");
    }
}

static bool is_shown_by_point(const struct regimes *regimes, const struct variant *variant) {
    if (!is_kind(variant, "factor") && !is_kind(variant, "sensitivity")) return false;
    int factor = factor_of(regimes, variant);
    return regimes->factors[factor].levels[variant->levels[factor] - 1].by_point;
}

static void print_by_point(const struct record_store *store, const struct findings *findings, FILE *stream) {
    const struct variant *shown[MOST_COLUMNS];
    int count = 0;
    for (int i = 0; i < findings->count; i++) {
        const struct variant *variant = &findings->variants[i];
        if (is_shown_by_point(store->regimes, variant)) shown[count++] = variant;
        if (count < MOST_COLUMNS && (i + 1 < findings->count || !count)) continue;
        print_speedups_of(store, findings->variants, shown, count, stream);
        count = 0;
    }
}

/* ---- the answer -------------------------------------------------------------------------------------- */

/* The nearest of those asked for at all lengths, or at the ends; NULL: there is none. */
static const struct variant *nearest(const struct record_store *store, const struct findings *findings,
                                     bool ends) {
    const struct variant *best = NULL;
    struct verdict best_verdict = {0};
    for (int i = 0; i < findings->count; i++) {
        const struct variant *variant = &findings->variants[i];
        struct verdict verdict = verdict_of(store, variant, &findings->range);
        if (variant->ends != ends || is_kind(variant, "sensitivity")) continue;
        if (!best || is_nearer(&verdict, &best_verdict)) {
            best = variant;
            best_verdict = verdict;
        }
    }
    return best;
}

static void print_nearest(const struct record_store *store, const struct findings *findings, bool ends,
                          FILE *stream) {
    const struct variant *variant = nearest(store, findings, ends);
    if (!variant) return;
    struct verdict verdict = verdict_of(store, variant, &findings->range);
    char *levels = levels_text(store->regimes, variant->levels), seq[16] = "-";
    struct text line = {0};
    text_add(&line, "%s: ", ends ? "At the shortest and longest sequences" : "At all sequences");
    if (verdict.inside == verdict.points)
        text_add(&line, "all %d speedups are inside under: %s", verdict.points, levels);
    else
        text_add(&line, "no variant has all %d speedups inside; the nearest has %d: %s", verdict.points,
                 verdict.inside, levels);
    if (verdict.away > 0 && isfinite(verdict.away))
        text_add(&line, "; the others are %.2f away in all", verdict.away);
    if (verdict.largest)
        text_add(&line, "; the largest is at %s%s.", sequence_text(verdict.largest, seq),
                 verdict.largest == longest_of(store->regimes) ? ", as the paper says"
                                                               : ", not at the longest as the paper says");
    print_wrapped(line.text, stream);
    free(levels);
    free(line.text);
}

/* Whether an earlier variant at all lengths sets the same: a factor's level is in the product as well. */
static bool is_told(const struct findings *findings, const struct regimes *regimes, int at) {
    const struct variant *variant = &findings->variants[at];
    size_t size = (size_t)regimes->factor_count * sizeof *variant->levels;
    for (int i = 0; i < at; i++)
        if (!findings->variants[i].ends && memcmp(findings->variants[i].levels, variant->levels, size) == 0)
            return true;
    return false;
}

/* The variants that have all inside at all lengths, besides the nearest. */
static void print_others_inside(const struct record_store *store, const struct findings *findings,
                                FILE *stream) {
    const struct variant *first = nearest(store, findings, false);
    for (int i = 0; i < findings->count; i++) {
        const struct variant *variant = &findings->variants[i];
        struct verdict verdict = verdict_of(store, variant, &findings->range);
        if (variant == first || variant->ends || is_told(findings, store->regimes, i)) continue;
        if (verdict.inside < verdict.points) continue;
        char *levels = levels_text(store->regimes, variant->levels), seq[16];
        struct text line = {0};
        text_add(&line, "  also all inside, the largest at %s: %s.", sequence_text(verdict.largest, seq),
                 levels);
        print_wrapped(line.text, stream);
        free(levels);
        free(line.text);
    }
}

void print_regimes(const struct record_store *store, const struct findings *findings, FILE *stream) {
    const struct regimes *regimes = store->regimes;
    static const char *const single[] = {"table", "factor"}, *const combination[] = {"combination"},
                             *const sensitivity[] = {"sensitivity"}, *const product[] = {"product"};
    fprintf(stream, "Speedup of %s over %s, lowest to highest of the models, %d nodes.\n",
            regimes_systems[SUBJECT], regimes_systems[BASELINE],
            regimes->experiment.points[0].cluster->nodes);
    fprintf(stream, "The paper: %.2f-%.2f, largest at long sequences\n", findings->range.low,
            findings->range.high);
    print_heading(store, "one factor at a time", stream);
    print_kinds(store, findings, single, COUNT(single), stream);
    print_kinds(store, findings, combination, COUNT(combination), stream);
    print_kinds(store, findings, sensitivity, COUNT(sensitivity), stream);
    print_factor_legend(findings, regimes, stream);
    print_by_point(store, findings, stream);
    print_effects(findings, regimes, stream);
    print_heading(store, "product, nearest first", stream);
    print_kinds(store, findings, product, COUNT(product), stream);
    fprintf(stream, "\n");
    print_nearest(store, findings, false, stream);
    print_others_inside(store, findings, stream);
    print_nearest(store, findings, true, stream);
}

/* ---- CSV --------------------------------------------------------------------------------------------- */

static void csv_number(double value, FILE *stream) {
    char text[32];
    fprintf(stream, ",%s", isnan(value) ? "" : number_text(value, text));
}

/* Names hold no quotes: a definition with one would be cut there by any reader. */
static void csv_row(const struct record_store *store, const struct variant *variant,
                    const struct point *point, FILE *stream) {
    char *levels = levels_text(store->regimes, variant->levels);
    fprintf(stream, "%s,\"%s\",\"%s\",%s,%d", variant->kind, variant->name, levels, point->model->name,
            point->seq_len);
    for (int system = 0; system < SYSTEM_COUNT; system++)
        csv_number(store_rate(store, variant, point, system) * point->cluster->nodes, stream);
    csv_number(speedup_at(store, variant, point), stream);
    fprintf(stream, "\n");
    free(levels);
}

void regimes_csv(const struct record_store *store, const struct findings *findings, FILE *stream) {
    const struct experiment *table = &store->regimes->experiment;
    fprintf(stream, "kind,variant,levels,model,seq_len");
    for (int system = 0; system < SYSTEM_COUNT; system++)
        fprintf(stream, ",%s_tokens_per_s", regimes_systems[system]);
    fprintf(stream, ",speedup\n");
    for (int v = 0; v < findings->count; v++)
        for (int i = 0; i < table->point_count; i++)
            if (is_asked(store, &findings->variants[v], &table->points[i]))
                csv_row(store, &findings->variants[v], &table->points[i], stream);
}
