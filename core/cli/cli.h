/*
The command line: one file a verb, each filling a struct verb; what they share stands in options.c and
report.c. Exit status: 0 done, 1 the run failed, 2 bad usage or bad manifest.
*/
#ifndef CLI_H
#define CLI_H

#include "baselines/baselines.h"
#include "sim/sim.h"

enum exit_status { STATUS_DONE = 0, STATUS_FAILED = 1, STATUS_USAGE = 2 };

struct verb {
    const char *name;
    const char *usage;                 /* behind "disagmoe NAME " */
    const char *summary;               /* one line */
    const char *help;                  /* options, one a line; "" for none */
    int (*run)(int argc, char **argv); /* without the verb itself */
};

extern const struct verb verb_sim, verb_schedule, verb_check, verb_train, verb_import, verb_systems,
    verb_bench, verb_regimes, verb_plan, verb_profile;

/* ---- options ----------------------------------------------------------------------------------------- */

#define MAX_OVERRIDES 64

/* What the verbs that read a manifest have in common. */
struct options {
    const char *manifest;
    const char *system; /* only this one; NULL: all that the manifest names */
    struct override overrides[MAX_OVERRIDES];
    int override_count;
    int jobs; /* threads; default: the number of processors */
    bool json, explain, quiet;
    const char *csv, *jsonl, *trace, *output;
};

/* A parser's table: an option and where its value goes. One of text, number, flag is set. */
struct option_rule {
    const char *name; /* "--csv" */
    const char **text;
    int *number; /* from 1 on */
    bool *flag;
};
/* Parses --name VALUE and --name=VALUE, --set path=value (into overrides) and one positional argument (into
   *positional, which may be NULL: none allowed). --help prints the verb's help and sets *helped. False: bad
   usage, already reported on stderr. */
bool parse_options(const struct verb *verb, int argc, char **argv, const struct option_rule *rules,
                   int rule_count, struct options *options, const char **positional, bool *helped);

/* Reads the manifest and checks that its systems, or the one asked for, are registered. Each system runs its
   point's variant. */
bool load_experiment(const struct options *options, struct experiment *experiment, struct errors *errors);
/* Adds what was found wrong with a point for a system, with the manifest and the point named. */
void add_point_errors(const struct options *options, const struct point *point, const struct system *system,
                      const struct errors *found, struct errors *errors);

/* Makes a point's open choices for a system and simulates what came out; nothing fits the memory: a record
   that says so. False when the point is impossible for the system: errors say why. */
bool simulate_point(const struct system *system, const struct point *point, struct result *result,
                    struct errors *errors);

/* A file the command line has written. */
struct output {
    const char *option, *file; /* "--csv"; NULL: not asked for */
};
/* Adds an error for every two outputs that are one file, and for each that one of the manifest's files is. */
void check_outputs(const struct output *outputs, int count, const struct experiment *experiment,
                   struct errors *errors);

/* Set by Ctrl-C, SIGTERM and SIGHUP (unless it was ignored, as nohup does): what is finished is kept, nothing
   new begins. A second signal ends the process at once. */
extern volatile int interrupted;
void catch_interrupt(void);

/* One object a line; takes the object. */
void print_json_line(cJSON *object, FILE *stream);
/* "82 GB", "3.4 MB": two digits or more with a unit that suits the value; buffer of at least 16 bytes. */
const char *bytes_text(double bytes, char *buffer);
/* Reports a missing argument on stderr when text is NULL; what: "a manifest". */
bool is_missing(const struct verb *verb, const char *text, const char *what);

/* ---- tables ------------------------------------------------------------------------------------------ */

/* "4K" for 4096, else digits; buffer of at least 16 bytes. */
const char *sequence_text(int seq_len, char *buffer);
#define TABLE_WIDTH 80
/* Three significant digits with a unit prefix: "812 G". */
const char *scaled_text(double value, char *buffer, size_t size);
/* "2x pp8 v2 ep16" or "2x1x(20+12)m": replicas x groups x (A+F GPUs), and cp. */
const char *layout_text(const struct plan *plan, char *buffer, size_t size);
/* Prints a line, broken at TABLE_WIDTH behind spaces and commas where there are some; what follows is
 * indented. */
void print_wrapped(const char *text, FILE *stream);

/* The columns that say of which point a row is: model, sequence, nodes, and what the manifest sweeps besides.
   Where room is short, what is the same in all rows moves to a line above the table, and then the swept
   values to a list below it, in which the rows give their number. */
struct columns;
/* For tables of these records whose other columns leave `room` characters. */
struct columns *columns_new(const struct result *results, int count, int room);
void columns_free(struct columns *columns);
void columns_print_common(const struct columns *columns, FILE *stream); /* the line above, where needed */
void columns_print_heading(const struct columns *columns, FILE *stream);
void columns_print(const struct columns *columns, const struct point *point, FILE *stream);
void columns_print_legend(const struct columns *columns, FILE *stream);

/* Two figures of the paper that belong together, and where it has them. */
struct range {
    double low, high;
    char where[160];
};
/* published.json beside a manifest, where it is there: the paper's figures, for reports alone. */
const char *published_beside(const char *manifest, struct arena *arena);
/* Reads two figures of its entry `key`. False where there are none. */
bool read_range(const char *published, const char *key, const char *low, const char *high,
                struct range *range);
/* How far a value is above the range, or (negative) below; 0 inside. */
double outside_of(const struct range *range, double value);

/* The records as a table, and where megatron stands beside another system the speedups next to the paper's
   figures, which are read from `published` (NULL: none). Rows of one point follow each other. */
void print_report(const struct result *results, int count, const char *published, FILE *stream);
/* The factors of each record's step time and of its speedup. */
void print_explanation(const struct result *results, int count, FILE *stream);
/* All-to-all share of forward time by nodes under the cost model, beside the paper's section-3 trend. */
void print_trend(const struct experiment *experiment, const char *published, FILE *stream);

/* ---- training ---------------------------------------------------------------------------------------- */

struct step_report;
struct memory_report;
struct verification;

/* What rank 0 shows of a training run: a table or JSON lines on standard output, and the same JSON lines at
   the end of a file. Every line is out before the next step begins. */
struct training_report {
    const struct system *system;
    const struct plan *plan;
    int64_t ops;            /* of the schedule */
    double entropy;         /* of the data, nats a token; NaN: not known */
    bool json;              /* on standard output */
    FILE *lines;            /* NULL: no file */
    const char *precision;  /* "fp32" */
    uint64_t seed;          /* that is used: of a run that goes on the checkpoint's */
    const char *checkpoint; /* last one written, or NULL */
    double *seconds;        /* of each step shown, in order */
    int steps;
};

void training_report_begin(const struct training_report *report);
void training_report_step(struct training_report *report, const struct step_report *step);
void training_report_checkpoint(struct training_report *report, const char *checkpoint);
/* The whole run: medians of the steps behind the first, memory of the fullest of `ranks` ranks. last: NULL
   when there was no step left to do. */
void training_report_end(struct training_report *report, const struct step_report *last,
                         const struct memory_report *memory, int ranks);
void training_report_verdict(const struct training_report *report, const struct verification *verification,
                             double tolerance, int ranks);

#endif
