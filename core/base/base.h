/*
What every part of the suite stands on: memory, errors, JSON, random numbers, parallel loops.

- An arena owns all objects of one run; nothing in it is freed singly. Running out of memory ends the process
  with a message: no caller could go on.
- Errors are collected, not returned one by one: a reader goes on after a wrong key, so that the user sees all
  that is wrong at once. An error names file, path of the key, what was found and what is allowed.
- JSON is read through tables of fields (struct json_field): an unknown key, a wrong type, a value out of
range and a missing key are found by the table, never by the caller.
- Nothing here depends on time, locale or number of threads.
*/
#ifndef BASE_H
#define BASE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- memory ------------------------------------------------------------------------------------------ */

struct arena;
struct arena *arena_new(void);
void arena_free(struct arena *arena); /* NULL is allowed */
/* Zeroed memory, aligned for any type. */
void *arena_alloc(struct arena *arena, size_t bytes);
char *arena_printf(struct arena *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));
char *arena_strdup(struct arena *arena, const char *text);

/* malloc family that ends the process with a message when memory is exhausted. */
void *must_alloc(size_t bytes); /* zeroed */
void *must_realloc(void *old, size_t bytes);

/* ---- errors ------------------------------------------------------------------------------------------ */

/* A growing list of messages, each "FILE: path.to.key: what is wrong, what is allowed". Zero-initialise. */
struct errors {
    char **messages;
    int count;
};
/* file and path may be NULL or empty: then that part is left out. The same message is kept only once. */
void errors_add(struct errors *errors, const char *file, const char *path, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Prints each as "disagmoe: MESSAGE" on a line of its own. */
void errors_print(const struct errors *errors, FILE *stream);
void errors_free(struct errors *errors);

/* ---- reading JSON ------------------------------------------------------------------------------------ */

/* A value inside a document, with what an error message needs to name it. node is NULL where a key is absent.
 */
struct json {
    cJSON *node;
    const char *file; /* as the user gave it */
    const char *path; /* "attention.heads", "" for the document itself */
    struct arena *arena;
    struct errors *errors;
};

/* Reads a whole file of at most 8 MiB. A missing, unreadable, oversized, cut-off or binary file, text after
   the document and a key given twice are errors, with line and column where there is one; then node is NULL.
   The tree belongs to the caller (cJSON_Delete). */
struct json json_read_file(const char *file, struct arena *arena, struct errors *errors);
struct json json_read_text(const char *text, size_t length, const char *file, struct arena *arena,
                           struct errors *errors);

struct json json_member(struct json object, const char *key); /* exact case; node NULL when absent */
struct json json_element(struct json array, const cJSON *element, int index);
/* Adds "found FOUND; MESSAGE" for this value, FOUND being its JSON text, shortened. */
void json_error(struct json value, const char *format, ...) __attribute__((format(printf, 2, 3)));

enum json_type {
    JSON_INT,    /* int; whole number */
    JSON_REAL,   /* double; finite */
    JSON_BOOL,   /* bool */
    JSON_TEXT,   /* const char *, in the arena */
    JSON_CHOICE, /* int: the index of the word in choices, e.g. "none|selective|full" */
    JSON_VALUE,  /* struct json: any value, read by the caller; left untouched when absent */
};

/* One key of an object and the member of a C structure that takes it. An absent key leaves the member as it
   is (its default) unless it is required. min and max bound numbers, inclusively; both 0: unbounded. */
struct json_field {
    const char *key;
    enum json_type type;
    size_t offset;
    bool required;
    double min, max;
    const char *choices;
};

/* Reads every field and reports every key that is not in the table (with the nearest allowed key when there
   is a near one). False when anything was wrong. object.node must not be NULL; anything but an object is an
   error. */
bool json_read_fields(struct json object, const struct json_field *fields, size_t count, void *out);

/* Sets the value at a dotted path below root ("model.layers"), creating the last key when absent. False when
   a part before the last is no object. Takes ownership of value when true. */
bool json_set_path(cJSON *root, const char *path, cJSON *value);
/* The value at a dotted path, or NULL. */
cJSON *json_get_path(cJSON *root, const char *path);

/* The value's JSON text on one line, its numbers as number_text gives them, in the arena. */
const char *json_text(struct arena *arena, const cJSON *value);

/* Text of a JSON_CHOICE: word number index of "a|b|c", in the arena. */
const char *choice_word(struct arena *arena, const char *choices, int index);
/* The number of a word in them, or −1. */
int choice_index(const char *choices, const char *word);

/* ---- writing JSON ------------------------------------------------------------------------------------ */

/* Adds a number that prints as the shortest text that reads back to the same double, the same everywhere.
   Not finite: null. The node is a raw one that carries the value in valuedouble and valueint too: readers
   here take it for a number, cJSON_IsNumber does not. */
void json_add_number(cJSON *object, const char *key, double value);
cJSON *json_number(double value);
/* The shortest such text; buffer of at least 32 bytes. */
const char *number_text(double value, char *buffer);

/* ---- files ------------------------------------------------------------------------------------------- */

/* Writes through a temporary file beside it, fsync and rename, so that a reader sees the old or the new
   content, never a part. A failure is added to errors with the reason (full disk, no permission). */
bool file_write_atomic(const char *file, const void *data, size_t bytes, struct errors *errors);
/* base "experiments/a.json", file "models/b.json" -> "experiments/models/b.json"; an absolute file stays. */
const char *path_beside(struct arena *arena, const char *base, const char *file);
bool make_folder_of(const char *file, struct errors *errors); /* mkdir -p of the file's folder */
/* Whether file_write_atomic could write it later: makes its folder and, beside it, a file that it removes
 * again. */
bool file_is_writable(const char *file, struct errors *errors);
/* Whether two paths lead to one file, be it there or not. Devices (/dev/null) are nobody's alone: false. */
bool is_same_file(const char *a, const char *b);

/* A file that is written while a long run goes on, beside its target as FILE.part (FILE.part2, ... where an
   interrupted run left one), so that whatever ends the run, what was added can be read and the target is the
   old one or the whole new one. A target that exists and is no regular file is written in place. */
struct growing_file {
    const char *name; /* as the user gave it; NULL: not open */
    char *target;     /* links resolved */
    char *part;       /* NULL: written in place */
    int descriptor;
    size_t length; /* bytes added */
    int failure;   /* errno of what could not be added; nothing is added behind it */
};
/* False when it cannot be written: added to errors, and there is nothing to close. */
bool growing_file_open(struct growing_file *file, const char *name, struct errors *errors);
/* All of it is in the file, for every reader, or nothing of it (full disk). */
void growing_file_add(struct growing_file *file, const char *data, size_t bytes);
/* Puts the part in the target's place. False, with the reason in errors and the part left, where something
   could not be written. */
bool growing_file_finish(struct growing_file *file, struct errors *errors);
/* Leaves the target as it was, and the part when `keep`. */
void growing_file_leave(struct growing_file *file, bool keep);

/* A text that grows. Zero-initialise; free(text). */
struct text {
    char *text;
    size_t length, capacity;
};
void text_add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint64_t text_hash(const char *text); /* FNV-1a of 64 bits */

/* ---- random numbers ---------------------------------------------------------------------------------- */

/* xoshiro256** seeded by splitmix64: the same sequence on every machine. */
struct rng {
    uint64_t state[4];
};
struct rng rng_seed(uint64_t seed);
uint64_t rng_seed_of(const uint64_t *numbers,
                     size_t count); /* one seed from several numbers, in their order */
uint64_t rng_next(struct rng *rng);
double rng_uniform(struct rng *rng);       /* [0, 1) */
int rng_below(struct rng *rng, int bound); /* 0 … bound − 1, unbiased; bound ≥ 1 */
double rng_normal(struct rng *rng);        /* mean 0, deviation 1 (Box–Muller) */

/* ---- parallel loop, progress, time ------------------------------------------------------------------- */

/* Calls task(context, i) for i = 0 … count − 1 on jobs threads; each i once, in any order. jobs ≤ 1: in order
   on the calling thread. Stops handing out new i when *stop becomes non-zero (may be NULL). */
void parallel_for(int count, int jobs, void (*task)(void *context, int i), void *context,
                  const volatile int *stop);
int processor_count(void);

/* How far some work of `total` parts is, on stderr: on a terminal a bar, elsewhere a line now and then and
   none for work of under half a minute. One thread at a time. */
struct progress {
    const char *what; /* "simulating" */
    int total;
    bool terminal;
    bool drawn;          /* a bar stands on the terminal's line */
    double began, shown; /* seconds_now() of the beginning, and of what was shown last */
};
struct progress progress_begin(const char *what, int total);
void progress_show(struct progress *progress, int done);
/* Takes the bar away before something else is printed. */
void progress_clear(struct progress *progress);
/* "45 s", "12 min 30 s", "3 h 05 min"; buffer of at least 32 bytes. */
const char *duration_text(double seconds, char *buffer);
double seconds_now(void); /* monotonic clock */

/* ---- pulse ------------------------------------------------------------------------------------------- */

/* What the threads of a process are doing, for one that watches whether it gets on. */
struct pulse;
enum { PULSE_THREADS = 4, PULSE_TEXT = 112 };
enum pulse_kind {
    PULSE_NONE, /* this thread is not there, or has nothing to do */
    PULSE_WORK, /* it gets on as long as it has processor time */
    PULSE_WAIT  /* for another thread or process, however busily */
};
struct pulse *pulse_new(void);
void pulse_free(struct pulse *pulse); /* NULL is allowed */
/* From now on the calling thread, which goes by the number `thread`, does this. pulse NULL: nobody watches.
 */
void pulse_set(struct pulse *pulse, int thread, enum pulse_kind kind, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
struct pulse_sample {
    uint64_t
        life;   /* another number whenever a thread went on to something else, or one that works has worked */
    bool waits; /* all that there are wait */
    char text[PULSE_TEXT]; /* of the thread that tells most */
};
struct pulse_sample pulse_read(struct pulse *pulse);

#endif
