/*
Regimes: under which of the choices that the paper leaves open does its range of speedups hold?

A definition file names factors, each with a default (what the table's manifest says) and levels (what else it
could be). A variant takes one level of each factor. What a level sets for one system alone leaves the other's
records as they are, so variants share records: a record is asked for by system, point and all that is set,
and simulated once.

Calls run one way: regimes.c (the verb) → regimes_run.c (records) and regimes_report.c (what they say) →
regimes_definition.c.
*/
#ifndef REGIMES_H
#define REGIMES_H

#include "cli/cli.h"

#include <pthread.h>

/* ---- definition -------------------------------------------------------------------------------------- */

/* What a factor can be besides its default. set, per_system: objects of paths and values; a value
   {"times": x} stands for x times the cluster's own figure, {"by_seq_len": {"8192": v}} for v at that
   sequence length and for nothing at others. */
struct level {
    const char *name;
    cJSON *set, *per_system; /* NULL: none */
    bool by_point;           /* the report shows every speedup of it */
};

struct factor {
    const char *name, *why;
    const char *default_name;
    struct level *levels; /* (level_count); level number k of a variant is levels[k − 1] */
    int level_count;
    bool sensitivity; /* a figure with a source, no choice: shown at the shortest and the longest sequences,
                         never in a product */
};

/* The two systems of a speedup. */
enum { BASELINE, SUBJECT, SYSTEM_COUNT };
extern const char *const regimes_systems[SYSTEM_COUNT];

struct regimes {
    const char *file;
    struct options table;         /* the table's manifest, and what is set in it for all variants */
    struct experiment experiment; /* its points */
    cJSON *cluster;               /* its cluster's figures */
    struct factor *factors;       /* those of sensitivity last */
    int factor_count;
    int **combinations; /* (combination_count, factor_count) levels, named by the definition */
    int combination_count;
    cJSON *document;
    struct arena *arena;
};

/* Reads a definition and the manifest it is about, changed by `options`' overrides. Free it in either case.
 */
bool regimes_read(const char *file, const struct options *options, struct regimes *regimes,
                  struct errors *errors);
void regimes_free(struct regimes *regimes);
/* All that tells a record from others of its system: the point's swept values, then what the levels
   (factor_count; 0: default) set for that system. The caller deletes it. */
cJSON *regimes_swept(const struct regimes *regimes, const struct point *point, const int *levels, int system);
/* Whether the point's sequences are the shortest or the longest of the table. */
bool regimes_is_end(const struct regimes *regimes, const struct point *point);

/* ---- records ----------------------------------------------------------------------------------------- */

/* A variant, and whether it is asked for at the shortest and longest sequences only. */
struct variant {
    const char *name;
    const char *kind; /* "table", "factor", "combination", "product" or "sensitivity" */
    int *levels;
    bool ends;
};

struct slot;
struct known;
struct record_store {
    const struct regimes *regimes;
    struct slot *slots; /* each record asked for, in that order */
    int count, capacity;
    struct known *known; /* records read from files */
    int known_count, known_capacity;
    int written; /* slots before it are in the file */
    struct growing_file file;
    pthread_mutex_t mutex;
    struct progress progress;
    int finished;
    int jobs;
    bool quiet, only_known; /* a record that is not known is an error instead of being simulated */
};

/* Reads JSON lines. A last line without an end is what a killed run left, and passed over. */
bool store_read(struct record_store *store, const char *file, struct errors *errors);
/* Makes sure that all records of these variants are there. False: errors, or interrupted. */
bool store_fill(struct record_store *store, const struct variant *variants, int count, struct errors *errors);
/* Tokens/s per node of the cluster; NAN where nothing fits or where the record was not asked for. */
double store_rate(const struct record_store *store, const struct variant *variant, const struct point *point,
                  int system);
void store_free(struct record_store *store);

/* ---- what they say ----------------------------------------------------------------------------------- */

/* How the speedups of a variant lie to the paper's range. */
struct verdict {
    int points, inside; /* speedups asked for; those in the range */
    int missing;        /* where one of the two systems does not fit */
    double away;        /* sum of the distances from the range; infinite where one is missing */
    int largest;        /* sequence length of the largest speedup; 0: there is none */
};
struct verdict verdict_of(const struct record_store *store, const struct variant *variant,
                          const struct range *range);
/* Whether a is nearer to the paper's range than b: more speedups inside; then a smaller sum of distances. */
bool is_nearer(const struct verdict *a, const struct verdict *b);

/* How much a factor changes the speedups: mean over points of |ln(speedup ÷ the table's)|, of its level with
   the largest, among levels under which both systems fit wherever they do in the table. */
struct effect {
    int factor, level; /* 0: no level is like that */
    double size;
};
/* Of all factors but those of sensitivity, the largest first. Returns their number. */
int effects_of(const struct record_store *store, struct effect *effects);

/* What is shown besides records: the product's variants, nearest first, and what its letters stand for. */
struct findings {
    const struct variant *variants; /* the table's own first */
    int count;
    const struct effect *effects; /* largest first */
    int effect_count;
    int crossed; /* of them are factors of the product */
    struct range range;
};
/* "M2N as all-to-all, recompute full"; "as in the table". The caller frees it. */
char *levels_text(const struct regimes *regimes, const int *levels);
void print_regimes(const struct record_store *store, const struct findings *findings, FILE *stream);
/* A row for each variant, model and sequence length. */
void regimes_csv(const struct record_store *store, const struct findings *findings, FILE *stream);

#endif
