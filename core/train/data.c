/*
Text and Markov data.
*/
#include "train/data.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_STATES = 64 };
static const double MOST_BYTES = 1 << 30; /* of a text */

struct data {
    int seq_len;
    unsigned char *text; /* NULL for a chain */
    size_t length;
    int states;
    double *cumulative; /* (states, states): sums of each row's transition probabilities */
    double *stationary; /* (states): sums likewise */
    double entropy;
};

/* ---- text -------------------------------------------------------------------------------------------- */

/* What else can be opened never ends, or can be read but once, and every rank reads it. */
static bool check_file(const char *file, const struct stat *status, struct errors *errors) {
    double bytes = (double)status->st_size;
    if (S_ISREG(status->st_mode) && bytes <= MOST_BYTES) return true;
    if (S_ISREG(status->st_mode))
        errors_add(errors, file, NULL,
                   "found %.3f GB; at most %.3f GB are allowed: every rank holds the whole text", bytes / 1e9,
                   MOST_BYTES / 1e9);
    else
        errors_add(errors, file, NULL, "is %s; allowed is a regular file",
                   S_ISDIR(status->st_mode)    ? "a folder"
                   : S_ISFIFO(status->st_mode) ? "a pipe"
                                               : "a device or a socket");
    return false;
}

/* As many bytes as the file says it has, or fewer; NULL with errno set. */
static unsigned char *read_all(int descriptor, size_t bytes, size_t *length) {
    unsigned char *text = must_alloc(bytes + 1);
    for (*length = 0; *length < bytes;) {
        ssize_t count = read(descriptor, text + *length, bytes - *length);
        if (count < 0 && errno == EINTR) continue;
        if (count == 0) break;
        if (count < 0) {
            free(text);
            return NULL;
        }
        *length += (size_t)count;
    }
    return text;
}

/* The whole file, or NULL with the reason in errors. */
static unsigned char *read_bytes(const char *file, size_t *length, struct errors *errors) {
    unsigned char *bytes = NULL;
    struct stat status;
    int descriptor =
        open(file, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe without a writer waits for one */
    bool known = descriptor >= 0 && fstat(descriptor, &status) == 0;
    if (!known || check_file(file, &status, errors)) {
        if (known) bytes = read_all(descriptor, (size_t)status.st_size, length);
        if (!bytes) errors_add(errors, file, NULL, "cannot be read: %s", strerror(errno));
    }
    if (descriptor >= 0) close(descriptor);
    return bytes;
}

static bool check_text(const char *file, const unsigned char *text, size_t length, int seq_len, int vocab,
                       struct errors *errors) {
    if (length < (size_t)seq_len + 1) {
        errors_add(errors, file, NULL, "%s; a sequence needs seq_len + 1 = %d bytes",
                   length ? "is too short" : "is empty", seq_len + 1);
        return false;
    }
    for (size_t i = 0; i < length; i++)
        if (text[i] >= vocab) {
            errors_add(errors, file, NULL,
                       "byte %zu is %d; the model's vocabulary has ids 0 to %d (256 take any text)", i,
                       text[i], vocab - 1);
            return false;
        }
    return true;
}

struct data *data_open_text(const char *file, int seq_len, int vocab, struct errors *errors) {
    assert(seq_len > 0);
    size_t length;
    unsigned char *text = read_bytes(file, &length, errors);
    if (!text || !check_text(file, text, length, seq_len, vocab, errors)) {
        free(text);
        return NULL;
    }
    struct data *data = must_alloc(sizeof *data);
    *data = (struct data){.seq_len = seq_len, .text = text, .length = length, .entropy = (double)NAN};
    return data;
}

/* ---- chain ------------------------------------------------------------------------------------------- */

/* p (n, n): rows of squared exponentials, so that a few successors are likely and none impossible. */
static void draw_transitions(double *p, int n, uint64_t seed) {
    struct rng rng = rng_seed(seed);
    for (int i = 0; i < n; i++) {
        double sum = 0;
        for (int j = 0; j < n; j++) {
            double exponential = -log(1 - rng_uniform(&rng));
            sum += p[i * n + j] = exponential * exponential + 1e-3;
        }
        for (int j = 0; j < n; j++) p[i * n + j] /= sum;
    }
}

/* Solves π P = π, Σ π = 1 by elimination with pivoting: the last equation is replaced by the sum. */
static void solve_stationary(double *pi, const double *p, int n) {
    int width = n + 1;
    double *a = must_alloc((size_t)n * width * sizeof *a);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) a[i * width + j] = i == n - 1 ? 1 : p[j * n + i] - (i == j);
    a[(n - 1) * width + n] = 1;
    for (int k = 0; k < n; k++) {
        int pivot = k;
        for (int i = k + 1; i < n; i++)
            if (fabs(a[i * width + k]) > fabs(a[pivot * width + k])) pivot = i;
        for (int j = 0; j < width; j++) {
            double swapped = a[k * width + j];
            a[k * width + j] = a[pivot * width + j];
            a[pivot * width + j] = swapped;
        }
        for (int i = 0; i < n; i++) {
            double factor = i == k ? 0 : a[i * width + k] / a[k * width + k];
            for (int j = k; factor != 0 && j < width; j++) a[i * width + j] -= factor * a[k * width + j];
        }
    }
    for (int i = 0; i < n; i++) pi[i] = a[i * width + n] / a[i * width + i];
    free(a);
}

static void accumulate(double *row, int n) {
    for (int i = 1; i < n; i++) row[i] += row[i - 1];
    row[n - 1] = 1; /* so that a draw below 1 always ends */
}

struct data *data_markov(int vocab, int seq_len, uint64_t chain_seed) {
    assert(vocab >= 2 && seq_len > 0);
    int n = vocab < MOST_STATES ? vocab : MOST_STATES;
    struct data *data = must_alloc(sizeof *data);
    *data = (struct data){.seq_len = seq_len, .states = n};
    double *p = data->cumulative = must_alloc((size_t)n * n * sizeof *p);
    data->stationary = must_alloc((size_t)n * sizeof *data->stationary);
    draw_transitions(p, n, chain_seed);
    solve_stationary(data->stationary, p, n);
    /* Entropy rate: Σ π(i) · entropy of row i (Shannon 1948, section 7). */
    for (int i = 0; i < n * n; i++) data->entropy -= data->stationary[i / n] * p[i] * log(p[i]);
    for (int i = 0; i < n; i++) accumulate(p + (size_t)i * n, n);
    accumulate(data->stationary, n);
    return data;
}

/* ---- both -------------------------------------------------------------------------------------------- */

void data_free(struct data *data) {
    if (!data) return;
    free(data->text);
    free(data->cumulative);
    free(data->stationary);
    free(data);
}

static struct rng sequence_rng(uint64_t seed, int64_t step, int64_t sequence) {
    const uint64_t numbers[] = {seed, (uint64_t)step, (uint64_t)sequence};
    return rng_seed(rng_seed_of(numbers, COUNT(numbers)));
}

static int draw(const double *cumulative, int n, double uniform) {
    int i = 0;
    while (i < n - 1 && uniform >= cumulative[i]) i++;
    return i;
}

void data_sequence(const struct data *data, uint64_t seed, int64_t step, int64_t sequence, int *tokens) {
    struct rng rng = sequence_rng(seed, step, sequence);
    if (data->text) {
        double places = (double)(data->length - (size_t)data->seq_len);
        size_t start = (size_t)(rng_uniform(&rng) * places);
        for (int i = 0; i <= data->seq_len; i++) tokens[i] = data->text[start + (size_t)i];
        return;
    }
    int state = draw(data->stationary, data->states, rng_uniform(&rng));
    for (int i = 0; i <= data->seq_len; i++) {
        tokens[i] = state;
        state = draw(data->cumulative + (size_t)state * data->states, data->states, rng_uniform(&rng));
    }
}

double data_entropy(const struct data *data) {
    return data->entropy;
}
