/*
Local search (the paper's algorithm 1) on an evaluator's word, and the exhaustive one that it is measured by.

A trial is a layout: groups, GPUs and NICs of the two sides, cp, placement; the evaluator sees to the rest.
The search tries the seeds, then climbs: neighbours of the best layout in its shape have up to `radius` GPUs
or NICs more or fewer on either side. Rounds of eight are tried at once, the best predicted first.
*/
#include "allocate/allocate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROUND 8

static double per_sequence(const struct plan *plan, double seconds) {
    return seconds / plan->sequences;
}

/* Sizes and settles a layout: false where it is impossible. */
static bool settle(const struct system *system, struct plan *plan) {
    struct errors errors = {0};
    bool good = system->size(plan, &errors) && system->settle(plan, &errors);
    errors_free(&errors);
    return good;
}

static bool is_same(const struct plan *a, const struct plan *b) {
    return memcmp(&a->parallel, &b->parallel, sizeof a->parallel) == 0 && a->placement == b->placement &&
           a->replicas == b->replicas;
}

/* ---- log --------------------------------------------------------------------------------------------- */

static cJSON *trial_json(const struct trial *trial) {
    const struct parallel *parallel = &trial->plan.parallel;
    cJSON *object = cJSON_CreateObject();
    json_add_number(object, "groups", parallel->groups);
    json_add_number(object, "attn_gpus", parallel->attn_gpus);
    json_add_number(object, "ffn_gpus", parallel->ffn_gpus);
    json_add_number(object, "attn_nics", parallel->attn_nics);
    json_add_number(object, "ffn_nics", parallel->ffn_nics);
    json_add_number(object, "cp", parallel->cp);
    json_add_number(object, "placement", trial->plan.placement);
    json_add_number(object, "replicas", trial->plan.replicas);
    json_add_number(object, "seconds_per_sequence", trial->seconds);
    return object;
}

struct log {
    const char *file;
    FILE *stream;
    struct trial *known; /* layouts alone */
    int count;
};

static int int_of(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNumber(item) ? item->valueint : 0;
}

/* False: not a trial. */
static bool trial_read(const char *line, struct trial *trial) {
    cJSON *object = cJSON_Parse(line);
    const cJSON *seconds = cJSON_GetObjectItemCaseSensitive(object, "seconds_per_sequence");
    bool good = cJSON_IsObject(object) && (cJSON_IsNumber(seconds) || cJSON_IsNull(seconds));
    if (good)
        *trial = (struct trial){.plan = {.parallel = {.groups = int_of(object, "groups"),
                                                      .attn_gpus = int_of(object, "attn_gpus"),
                                                      .ffn_gpus = int_of(object, "ffn_gpus"),
                                                      .attn_nics = int_of(object, "attn_nics"),
                                                      .ffn_nics = int_of(object, "ffn_nics"),
                                                      .cp = int_of(object, "cp")},
                                         .placement = int_of(object, "placement"),
                                         .replicas = int_of(object, "replicas")},
                                .seconds = cJSON_IsNumber(seconds) ? seconds->valuedouble : INFINITY};
    cJSON_Delete(object);
    return good;
}

/* The first line says what the log is of, the others are trials; a last one without its end was cut off.
   Leaves the bytes that count. False: a log of something else, or none at all. */
static bool log_read(struct log *log, FILE *stream, const char *first, long *whole, struct errors *errors) {
    char *line = NULL;
    size_t room = 0;
    int number = 0;
    bool good = true;
    for (ssize_t length; good && (length = getline(&line, &room, stream)) > 0;) {
        struct trial trial;
        if (line[length - 1] != '\n') break;
        number++;
        if (number == 1 && strcmp(line, first) != 0) {
            errors_add(errors, log->file, NULL,
                       "is the log of another search (or none at all); found %.200s; allowed is a new file "
                       "or %.200s",
                       line, first);
            good = false;
        } else if (number > 1 && !trial_read(line, &trial)) {
            errors_add(errors, log->file, NULL, "line %d is no trial: %.100s", number, line);
            good = false;
        } else if (number > 1) {
            log->known = must_realloc(log->known, (size_t)(log->count + 1) * sizeof *log->known);
            log->known[log->count++] = trial;
        }
        *whole = ftell(stream);
    }
    free(line);
    return good;
}

static bool log_open(struct log *log, const struct search_options *options, struct errors *errors) {
    *log = (struct log){.file = options->log};
    if (!log->file) return true;
    if (!make_folder_of(log->file, errors)) return false;
    struct text first = {0};
    cJSON *head = cJSON_CreateObject();
    cJSON_AddStringToObject(head, "search", options->identity);
    char *head_text = cJSON_PrintUnformatted(head);
    text_add(&first, "%s\n", head_text);
    free(head_text);
    cJSON_Delete(head);
    long whole = 0;
    FILE *old = fopen(log->file, "r");
    bool good = !old || log_read(log, old, first.text, &whole, errors);
    if (old) fclose(old);
    if (good) {
        log->stream = fopen(log->file, whole ? "r+" : "w");
        good =
            log->stream &&
            (!whole || (ftruncate(fileno(log->stream), whole) == 0 && fseek(log->stream, 0, SEEK_END) == 0));
        if (good && !whole) good = fputs(first.text, log->stream) >= 0 && fflush(log->stream) == 0;
        if (!good) errors_add(errors, log->file, NULL, "cannot be written");
    }
    free(first.text);
    return good;
}

static const struct trial *log_find(const struct log *log, const struct plan *plan) {
    for (int i = 0; i < log->count; i++)
        if (is_same(&log->known[i].plan, plan)) return &log->known[i];
    return NULL;
}

static void log_add(struct log *log, const struct trial *trial) {
    if (!log->stream) return;
    cJSON *object = trial_json(trial);
    char *line = cJSON_PrintUnformatted(object);
    fprintf(log->stream, "%s\n", line);
    fflush(log->stream);
    free(line);
    cJSON_Delete(object);
}

static bool log_close(struct log *log, struct errors *errors) {
    bool good = true;
    if (log->stream) {
        good = !ferror(log->stream);
        if (fclose(log->stream) != 0) good = false;
    }
    if (!good) errors_add(errors, log->file, NULL, "could not be written whole");
    free(log->known);
    return good;
}

/* ---- rounds ------------------------------------------------------------------------------------------ */

struct seeker {
    const struct evaluator *evaluator;
    const struct seed *seeds;
    int seed_count;
    const struct search_options *options;
    struct search *search;
    struct log log;
    int since_best; /* trials */
};

static bool is_stopped(const struct seeker *seeker) {
    const struct search_options *options = seeker->options;
    return (options->stop && *options->stop) || seeker->search->count >= options->trials ||
           (options->patience && seeker->since_best >= options->patience);
}

static bool was_tried(const struct seeker *seeker, const struct plan *plan) {
    for (int i = 0; i < seeker->search->count; i++)
        if (is_same(&seeker->search->trials[i].plan, plan)) return true;
    return false;
}

struct round {
    const struct evaluator *evaluator;
    struct trial trials[ROUND];
    bool known[ROUND], done[ROUND];
};

static void evaluate_one(void *context, int i) {
    struct round *round = context;
    if (!round->known[i])
        round->trials[i].seconds =
            round->evaluator->evaluate(round->evaluator->context, &round->trials[i].plan);
    round->done[i] = true;
}

/* Tries a round's layouts at once; true when one is better than all before. */
static bool try_round(struct seeker *seeker, const struct trial *layouts, int count) {
    struct search *search = seeker->search;
    const struct evaluator *evaluator = seeker->evaluator;
    struct round round = {.evaluator = evaluator};
    bool better = false;
    int left = seeker->options->trials - search->count;
    if (count > left) count = left;
    for (int i = 0; i < count; i++) {
        const struct trial *known = log_find(&seeker->log, &layouts[i].plan);
        round.trials[i] = layouts[i];
        round.known[i] = known != NULL;
        if (known) round.trials[i].seconds = known->seconds;
    }
    parallel_for(count, evaluator->threads, evaluate_one, &round, seeker->options->stop);
    for (int i = 0; i < count; i++) {
        if (!round.done[i]) continue;
        struct trial *trial = &round.trials[i];
        search->trials = must_realloc(search->trials, (size_t)(search->count + 1) * sizeof *search->trials);
        search->trials[search->count] = *trial;
        seeker->since_best++;
        if (round.known[i])
            search->reused++;
        else
            log_add(&seeker->log, trial);
        if (trial->seconds < INFINITY &&
            (search->best < 0 || trial->seconds < search->trials[search->best].seconds)) {
            search->best = search->count;
            seeker->since_best = 0;
            better = true;
        }
        search->count++;
    }
    return better;
}

/* ---- neighbours -------------------------------------------------------------------------------------- */

struct candidates {
    struct trial *list;
    int count;
};

/* What is predicted quickest first; what is not predicted in the order in which it was listed. */
static int by_prediction(const void *a, const void *b) {
    const struct trial *x = a, *y = b;
    if (isnan(x->predicted) || isnan(y->predicted)) return isnan(x->predicted) - isnan(y->predicted);
    if (x->predicted != y->predicted) return x->predicted < y->predicted ? -1 : 1;
    return memcmp(&x->plan.parallel, &y->plan.parallel, sizeof x->plan.parallel);
}

/* The seed whose tables a plan is in: of its groups, cp and placement, and of its replicas where there is
   one, else of the fewest. */
static const struct seed *seed_of(const struct seeker *seeker, const struct plan *plan) {
    const struct seed *best = NULL;
    for (int i = 0; i < seeker->seed_count; i++) {
        const struct seed *seed = &seeker->seeds[i];
        if (seed->plan.parallel.groups != plan->parallel.groups ||
            seed->plan.parallel.cp != plan->parallel.cp || seed->plan.placement != plan->placement)
            continue;
        if (seed->plan.replicas == plan->replicas) return seed;
        if (!best || seed->plan.replicas < best->plan.replicas) best = seed;
    }
    return best;
}

static void add_candidate(struct seeker *seeker, struct candidates *candidates, struct plan plan) {
    const struct parallel *parallel = &plan.parallel;
    if (parallel->attn_gpus < 1 || parallel->ffn_gpus < 1 || !settle(seeker->evaluator->system, &plan) ||
        was_tried(seeker, &plan))
        return;
    for (int i = 0; i < candidates->count; i++)
        if (is_same(&candidates->list[i].plan, &plan)) return;
    const struct seed *seed = seed_of(seeker, &plan);
    double predicted = seed ? seed_predict(seed, &plan) : NAN;
    if (predicted == INFINITY) return;
    candidates->list =
        must_realloc(candidates->list, (size_t)(candidates->count + 1) * sizeof *candidates->list);
    candidates->list[candidates->count++] = (struct trial){plan, predicted, INFINITY};
}

/* Nearest first: other numbers of GPUs with the NICs divided anew, then other divisions of the NICs. */
static void add_neighbours(struct seeker *seeker, const struct plan *of, struct candidates *candidates) {
    int radius = seeker->options->radius;
    for (int far = 1; far <= radius; far++)
        for (int m = -far; m <= far; m++)
            for (int n = -far; n <= far; n++) {
                struct plan plan = *of;
                if (abs(m) != far && abs(n) != far) continue;
                plan.parallel.attn_gpus += m * plan.parallel.cp; /* whole runs */
                plan.parallel.ffn_gpus += n;
                plan.parallel.attn_nics = plan.parallel.ffn_nics = 0;
                add_candidate(seeker, candidates, plan);
            }
    if (of->parallel.attn_nics == NICS_SHARED) return;
    for (int far = 1; far <= radius; far++)
        for (int side = -1; side <= 1; side += 2) {
            struct plan plan = *of;
            plan.parallel.attn_nics += side * far;
            plan.parallel.ffn_nics -= side * far;
            if (plan.parallel.attn_nics < 1 || plan.parallel.ffn_nics < 1) continue;
            add_candidate(seeker, candidates, plan);
        }
}

/* From a layout on to better neighbours until there are none. */
static void climb(struct seeker *seeker, struct plan from) {
    for (bool better = true; better && !is_stopped(seeker);) {
        struct candidates near = {0};
        add_neighbours(seeker, &from, &near);
        if (near.count && !isnan(near.list[0].predicted))
            qsort(near.list, (size_t)near.count, sizeof *near.list, by_prediction);
        better = false;
        for (int i = 0; i < near.count && !better && !is_stopped(seeker); i += ROUND)
            better = try_round(seeker, near.list + i, near.count - i < ROUND ? near.count - i : ROUND);
        if (better) from = seeker->search->trials[seeker->search->best].plan;
        free(near.list);
    }
}

/* A round of seeds, from number `first` on. */
static bool try_seeds(struct seeker *seeker, int first) {
    struct trial round[ROUND];
    int here = 0;
    for (int k = first; k < seeker->seed_count && k < first + ROUND; k++) {
        const struct seed *seed = &seeker->seeds[k];
        if (!was_tried(seeker, &seed->plan))
            round[here++] = (struct trial){seed->plan, seed->predicted, INFINITY};
    }
    return try_round(seeker, round, here);
}

/* What was predicted to be quicker than the best, and did not fit, may do so nearby. */
static void climb_from_misfits(struct seeker *seeker) {
    const struct search *search = seeker->search;
    int tried = search->count;
    for (int i = 0; i < tried && !is_stopped(seeker); i++) {
        const struct trial *trial = &search->trials[i];
        double best = search->best < 0 ? INFINITY : search->trials[search->best].seconds;
        if (trial->seconds == INFINITY && !(trial->predicted >= best)) climb(seeker, trial->plan);
    }
}

bool allocation_search(const struct evaluator *evaluator, const struct seed *seeds, int count,
                       const struct search_options *options, struct search *search, struct errors *errors) {
    struct seeker seeker = {evaluator, seeds, count, options, search, {0}, 0};
    *search = (struct search){.best = -1};
    if (!log_open(&seeker.log, options, errors)) {
        free(seeker.log.known);
        return false;
    }
    for (int first = 0; first < count && !is_stopped(&seeker); first += ROUND) {
        bool better = try_seeds(&seeker, first);
        if (better) climb(&seeker, search->trials[search->best].plan);
        climb_from_misfits(&seeker);
    }
    return log_close(&seeker.log, errors);
}

/* ---- exhaustive -------------------------------------------------------------------------------------- */

struct split {
    struct plan plan; /* sized */
    double bound;     /* per sequence, whatever the NICs */
};

static int by_bound(const void *a, const void *b) {
    const struct split *x = a, *y = b;
    if (x->bound != y->bound) return x->bound < y->bound ? -1 : 1;
    return memcmp(&x->plan.parallel, &y->plan.parallel, sizeof x->plan.parallel);
}

struct quest {
    const struct evaluator *evaluator;
    struct exhaustive found;
};

static void consider(struct quest *quest, struct plan plan) {
    const struct system *system = quest->evaluator->system;
    struct errors errors = {0};
    bool placed = system->settle(&plan, &errors);
    errors_free(&errors);
    if (!placed) return;
    struct bound bound = plan_bound(system, &plan);
    if (bound.bytes > plan_usable_memory(plan.point) ||
        per_sequence(&plan, bound.seconds) >= quest->found.best.seconds)
        return;
    quest->found.evaluations++;
    double seconds = quest->evaluator->evaluate(quest->evaluator->context, &plan);
    if (seconds < quest->found.best.seconds) quest->found.best = (struct trial){plan, NAN, seconds};
}

/* The tuner's division first, which is seldom far from the best. */
static void consider_divisions(struct quest *quest, const struct split *split) {
    const struct cluster *cluster = split->plan.point->cluster;
    int nics = cluster->nodes * cluster->nics_per_node / (split->plan.parallel.groups * split->plan.replicas);
    quest->found.layouts += nics > 1 ? nics - 1 + (nics - 1) / 2 : 1;
    if (split->bound >= quest->found.best.seconds) return;
    struct plan plan = split->plan;
    plan.parallel.attn_nics = plan.parallel.ffn_nics = 0;
    consider(quest, plan);
    for (int i = 1; i < nics; i++) {
        plan.parallel.attn_nics = i;
        plan.parallel.ffn_nics = nics - i;
        consider(quest, plan);
        if (2 * i >= nics) continue;
        plan.parallel.ffn_nics = i;
        consider(quest, plan);
    }
}

static void add_split(struct split **splits, int *count, const struct system *system, const struct plan *like,
                      int p, int m, int n) {
    struct errors errors = {0};
    struct plan plan = *like;
    plan.parallel = (struct parallel){.groups = p, .attn_gpus = m, .ffn_gpus = n, .cp = like->parallel.cp};
    if (system->size(&plan, &errors)) {
        *splits = must_realloc(*splits, (size_t)(*count + 1) * sizeof **splits);
        (*splits)[(*count)++] =
            (struct split){plan, system->outline ? per_sequence(&plan, system->outline(&plan).seconds) : 0};
    }
    errors_free(&errors);
}

struct exhaustive allocation_exhaustive(const struct evaluator *evaluator, const struct plan *like,
                                        const volatile int *stop) {
    struct quest quest = {evaluator, {.best = {.seconds = INFINITY}}};
    struct split *splits = NULL;
    int count = 0, gpus = cluster_gpus(like->point->cluster), cp = like->parallel.cp;
    for (int p = 1; p <= gpus / 2 && p <= like->point->model->layers; p++)
        for (int m = cp; m < gpus / p; m += cp)
            for (int n = 1; n <= gpus / p - m && n <= like->point->model->moe.experts; n++)
                add_split(&splits, &count, evaluator->system, like, p, m, n);
    if (count) qsort(splits, (size_t)count, sizeof *splits, by_bound);
    for (int i = 0; i < count && !(stop && *stop); i++) consider_divisions(&quest, &splits[i]);
    free(splits);
    return quest.found;
}
