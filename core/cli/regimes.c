/*
disagmoe regimes: one factor at a time from the table's setting; then the product of the factors with most
effect, at the shortest and the longest sequences; then, at all lengths, the variants of the product that have
all inside there, or the nearest.
*/
#include "cli/regimes.h"

#include <stdlib.h>
#include <string.h>

#define CROSSED 4 /* factors of the product */

struct command {
    struct options options;
    const char *records, *reuse, *published;
    struct regimes regimes;
    struct record_store store;
    struct variant *variants;
    int count;
    struct effect *effects;
    struct findings findings;
};

/* ---- variants ---------------------------------------------------------------------------------------- */

static struct variant *add_variant(struct command *command, const char *kind, const char *name) {
    const struct regimes *regimes = &command->regimes;
    command->variants =
        must_realloc(command->variants, (size_t)(command->count + 1) * sizeof *command->variants);
    struct variant *variant = &command->variants[command->count++];
    *variant = (struct variant){
        .name = name,
        .kind = kind,
        .levels = arena_alloc(regimes->arena, ((size_t)regimes->factor_count + 1) * sizeof(int))};
    return variant;
}

static void add_single(struct command *command) {
    const struct regimes *regimes = &command->regimes;
    add_variant(command, "table", "table");
    for (int i = 0; i < regimes->factor_count; i++)
        for (int level = 1; level <= regimes->factors[i].level_count; level++) {
            const struct factor *factor = &regimes->factors[i];
            const char *name =
                arena_printf(regimes->arena, "%s %s", factor->name, factor->levels[level - 1].name);
            struct variant *variant =
                add_variant(command, factor->sensitivity ? "sensitivity" : "factor", name);
            variant->levels[i] = level;
            variant->ends = factor->sensitivity;
        }
    for (int i = 0; i < regimes->combination_count; i++) {
        struct variant *variant =
            add_variant(command, "combination", arena_printf(regimes->arena, "combination %d", i + 1));
        memcpy(variant->levels, regimes->combinations[i], (size_t)regimes->factor_count * sizeof(int));
    }
}

/* "A-CD": the factors of the product that are not at their default. */
static void add_product(struct command *command) {
    const struct effect *effects = command->effects;
    int crossed = command->findings.crossed;
    for (int set = 0; set < 1 << crossed; set++) {
        char name[CROSSED + 1] = "";
        for (int k = 0; k < crossed; k++) name[k] = set & 1 << k ? (char)('A' + k) : '-';
        struct variant *variant =
            add_variant(command, "product", arena_printf(command->regimes.arena, "%s", name));
        variant->ends = true;
        for (int k = 0; k < crossed; k++)
            if (set & 1 << k) variant->levels[effects[k].factor] = effects[k].level;
    }
}

/* Nearest first; of equally near ones the order stays. */
static void sort_by_nearness(struct command *command, int first) {
    const struct range *range = &command->findings.range;
    for (int i = first + 1; i < command->count; i++) {
        struct variant moved = command->variants[i];
        struct verdict own = verdict_of(&command->store, &moved, range), other;
        int to = i;
        for (; to > first; to--) {
            other = verdict_of(&command->store, &command->variants[to - 1], range);
            if (!is_nearer(&own, &other)) break;
            command->variants[to] = command->variants[to - 1];
        }
        command->variants[to] = moved;
    }
}

/* Of the product, nearest first, the variants that have all inside at the ends, else the nearest one: at all
   lengths. */
static void add_nearest(struct command *command, int first) {
    int end = command->count;
    for (int i = first; i < end; i++) {
        const struct variant own = command->variants[i];
        struct verdict verdict = verdict_of(&command->store, &own, &command->findings.range);
        if (i > first && verdict.inside < verdict.points) return;
        struct variant *variant = add_variant(
            command, "product", arena_printf(command->regimes.arena, "%s, all lengths", own.name));
        memcpy(variant->levels, own.levels, (size_t)command->regimes.factor_count * sizeof(int));
    }
}

static bool fill(struct command *command, int first, struct errors *errors) {
    return store_fill(&command->store, command->variants + first, command->count - first, errors);
}

static bool explore(struct command *command, struct errors *errors) {
    struct findings *findings = &command->findings;
    add_single(command);
    if (!fill(command, 0, errors)) return false;
    command->effects = must_alloc(((size_t)command->regimes.factor_count + 1) * sizeof *command->effects);
    findings->effect_count = effects_of(&command->store, command->effects);
    while (findings->crossed < findings->effect_count && findings->crossed < CROSSED &&
           command->effects[findings->crossed].level)
        findings->crossed++;
    int first = command->count;
    add_product(command);
    if (!fill(command, first, errors)) return false;
    sort_by_nearness(command, first);
    int product_end = command->count;
    add_nearest(command, first);
    if (!fill(command, product_end, errors)) return false;
    findings->variants = command->variants;
    findings->count = command->count;
    findings->effects = command->effects;
    return true;
}

/* ---- the whole run ----------------------------------------------------------------------------------- */

static bool write_csv(const struct command *command, struct errors *errors) {
    char *text = NULL;
    size_t length = 0;
    if (!command->options.csv) return true;
    FILE *stream = open_memstream(&text, &length);
    regimes_csv(&command->store, &command->findings, stream);
    fclose(stream);
    bool written = make_folder_of(command->options.csv, errors) &&
                   file_write_atomic(command->options.csv, text, length, errors);
    free(text);
    return written;
}

static bool open_records(struct command *command, struct errors *errors) {
    const struct options *options = &command->options;
    const struct output outputs[] = {{"--csv", options->csv}, {"--jsonl", options->jsonl}};
    const char *const inputs[] = {options->manifest, command->records, command->reuse};
    int before = errors->count;
    check_outputs(outputs, COUNT(outputs), &command->regimes.experiment, errors);
    for (size_t i = 0; i < COUNT(outputs); i++)
        for (size_t k = 0; k < COUNT(inputs); k++)
            if (outputs[i].file && inputs[k] && is_same_file(outputs[i].file, inputs[k]))
                errors_add(errors, NULL, outputs[i].option, "found %s, which is read; another file is needed",
                           outputs[i].file);
    if (errors->count > before) return false;
    if (command->records && !store_read(&command->store, command->records, errors)) return false;
    if (command->reuse && !store_read(&command->store, command->reuse, errors)) return false;
    return !options->jsonl || (make_folder_of(options->jsonl, errors) &&
                               growing_file_open(&command->store.file, options->jsonl, errors));
}

static int finish(struct command *command, bool whole, struct errors *errors) {
    struct growing_file *file = &command->store.file;
    int status = whole ? STATUS_DONE : errors->count ? STATUS_USAGE : STATUS_FAILED;
    if (whole) {
        print_regimes(&command->store, &command->findings, stdout);
        bool written = growing_file_finish(file, errors);
        if (!write_csv(command, errors) || !written) status = STATUS_FAILED;
    } else if (interrupted) {
        errors_add(errors, command->options.manifest, NULL, "interrupted%s%s",
                   file->part ? "; --reuse goes on from " : "", file->part ? file->part : "");
        status = STATUS_FAILED;
    }
    growing_file_leave(file, file->length > 0);
    return status;
}

static bool read_paper(struct command *command, struct errors *errors) {
    const char *manifest = command->regimes.table.manifest;
    const char *file = published_beside(manifest, command->regimes.arena);
    if (read_range(file, "speedup_vs_megatron", "low", "high", &command->findings.range)) return true;
    errors_add(errors, path_beside(command->regimes.arena, manifest, "published.json"), "speedup_vs_megatron",
               "the paper's range is needed, numbers low and high");
    return false;
}

static int regimes(struct command *command) {
    struct errors errors = {0};
    int status = STATUS_USAGE;
    command->store = (struct record_store){.regimes = &command->regimes,
                                           .mutex = PTHREAD_MUTEX_INITIALIZER,
                                           .jobs = command->options.jobs,
                                           .quiet = command->options.quiet,
                                           .only_known = command->records != NULL};
    if (regimes_read(command->options.manifest, &command->options, &command->regimes, &errors) &&
        read_paper(command, &errors) && open_records(command, &errors)) {
        catch_interrupt();
        status = finish(command, explore(command, &errors), &errors);
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    store_free(&command->store);
    regimes_free(&command->regimes);
    free(command->variants);
    free(command->effects);
    return status;
}

static int run(int argc, char **argv) {
    struct command command = {0};
    struct options *options = &command.options;
    bool helped;
    const struct option_rule rules[] = {
        {"--jobs", NULL, &options->jobs, NULL},  {"--jsonl", &options->jsonl, NULL, NULL},
        {"--csv", &options->csv, NULL, NULL},    {"--records", &command.records, NULL, NULL},
        {"--reuse", &command.reuse, NULL, NULL}, {"--quiet", NULL, NULL, &options->quiet}};
    if (!parse_options(&verb_regimes, argc, argv, rules, COUNT(rules), options, &options->manifest, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (is_missing(&verb_regimes, options->manifest, "a definition (experiments/regimes.json)"))
        return STATUS_USAGE;
    return regimes(&command);
}

const struct verb verb_regimes = {
    .name = "regimes",
    .usage = "DEFINITION [OPTIONS]",
    .summary = "under which of the choices the paper leaves open its speedups hold",
    .help = "  --set path=value   change the table's manifest, e.g. --set sweep.seq_len=[4096]\n"
            "  --records FILE     simulate nothing: report these records (JSON lines)\n"
            "  --reuse FILE       take from FILE what it has, simulate the rest\n"
            "  --jsonl FILE       the records as JSON lines; grow as FILE.part\n"
            "  --csv FILE         a row for each variant, model and sequence length\n"
            "  --jobs N           threads; the output does not depend on it\n"
            "  --quiet            no progress\n",
    .run = run,
};
