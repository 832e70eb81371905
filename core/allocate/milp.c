/*
The integer program of an allocation (the paper's section 4), by GLPK.

Every count that a time is inversely proportional to has one binary for each value it may take, so that tables
of seconds make the problem linear:

    minimise t   (phase 1)          t ≥ Σ seconds[m] · a[m]      Σ a[m] = 1     a: attention GPUs
                                    t ≥ Σ seconds[n] · f[n]      Σ f[n] = 1     f: feed-forward GPUs
                                    t ≥ Σ seconds[i] · i[i]      Σ i[i] = 1     i, j: NICs of the two sides
                                    t ≥ Σ seconds[j] · j[j]      Σ j[j] = 1
    Σ m·a[m] + Σ n·f[n] ≤ gpus      Σ i·i[i] + Σ j·j[j] ≤ nics
    blocks · Σ m·a[m] ≤ gpus_per_node · A        A, F: nodes of each component, A + F ≤ nodes
    blocks · Σ n·f[n] ≤ gpus_per_node · F        (NICs likewise)
    Σ m·a[m] ≤ Σ most[n] · f[n]     most[n]: A-GPUs whose tokens n F-GPUs have memory for

A solver works with tolerances, tables do not. So what it finds is read as four whole numbers, its seconds
come from the tables, and it is the best when the same problem without anything as slow has no solution: a
question about binaries alone. Phase 2 and 3 fix what the phase before has proved by leaving out all that is
slower.
*/
#define _GNU_SOURCE /* memfd_create */
#include "allocate/allocate.h"

#include <glpk.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* GLPK keeps its environment in a global where it was built without thread-local storage. */
static pthread_mutex_t solver = PTHREAD_MUTEX_INITIALIZER;

/* Which of a problem's constraints hold; all but one are asked to find out which cannot. */
enum constraint {
    LIMIT_GPUS = 1,
    LIMIT_NICS = 2,
    LIMIT_NODES = 4,
    LIMIT_ATTENTION_MEMORY = 8,
    LIMIT_FFN_MEMORY = 16,
    LIMIT_MULTIPLE = 32,
    LIMIT_ALL = 63
};

/* What is asked beside the constraints: no seconds above these, no more GPUs than that. */
struct request {
    unsigned limits;
    double computing, sending; /* entries of the tables that are slower are left out */
    int most_gpus;
    enum { MINIMISE_SECONDS, MINIMISE_GPUS, MINIMISE_SENDING, MINIMISE_NOTHING } goal;
};

/* The four counts, in the order of the columns. */
enum count { ATTENTION_GPUS, FFN_GPUS, ATTENTION_NICS, FFN_NICS, COUNTS };

struct table {
    const double *seconds;
    int length, first; /* column of the value 1 */
    const char *name;
};

struct program {
    const struct allocation_problem *problem;
    glp_prob *glpk;
    struct table tables[COUNTS];
};

static double larger(double a, double b) {
    return a > b ? a : b;
}

/* ---- tables ------------------------------------------------------------------------------------------ */

static bool asks_nodes(const struct allocation_problem *problem) {
    return problem->nodes > 0;
}

static bool attention_fits(const struct allocation_problem *problem, int gpus) {
    return problem->usable == INFINITY ||
           problem->attn_static[gpus - 1] + problem->attn_kept <= problem->usable;
}

/* A-GPUs whose tokens n F-GPUs have memory for; −1: not even their own parameters fit. */
static double most_attention_gpus(const struct allocation_problem *problem, int n) {
    double left = problem->usable - (problem->usable == INFINITY ? 0 : problem->ffn_static[n - 1]);
    if (left < 0) return -1;
    if (left == INFINITY || problem->ffn_kept == 0) return problem->most_attn_gpus;
    double most = floor(left / problem->ffn_kept * n * (1 + 1e-12));
    return most < problem->most_attn_gpus ? most : problem->most_attn_gpus;
}

/* Whether a value of a count is open under a request. */
static bool is_open(const struct program *program, const struct request *request, enum count count,
                    int value) {
    const struct allocation_problem *problem = program->problem;
    bool computes = count == ATTENTION_GPUS || count == FFN_GPUS;
    if (program->tables[count].seconds[value - 1] > (computes ? request->computing : request->sending))
        return false;
    if (count == ATTENTION_GPUS && request->limits & LIMIT_MULTIPLE && value % problem->multiple != 0)
        return false;
    if (count == ATTENTION_GPUS && request->limits & LIMIT_ATTENTION_MEMORY &&
        !attention_fits(problem, value))
        return false;
    return !(count == FFN_GPUS && request->limits & LIMIT_FFN_MEMORY &&
             most_attention_gpus(problem, value) < 1);
}

/* ---- the program ------------------------------------------------------------------------------------- */

/* One row under construction. */
struct row {
    int *columns;
    double *values;
    int count;
};

static void add_term(struct row *row, int column, double value) {
    if (value == 0) return;
    row->columns[++row->count] = column;
    row->values[row->count] = value;
}

static void add_row(struct program *program, struct row *row, const char *name, int type, double bound) {
    int at = glp_add_rows(program->glpk, 1);
    glp_set_row_name(program->glpk, at, name);
    glp_set_row_bnds(program->glpk, at, type, bound, bound);
    glp_set_mat_row(program->glpk, at, row->count, row->columns, row->values);
    row->count = 0;
}

static void add_count(const struct program *program, struct row *row, enum count count, double factor) {
    const struct table *table = &program->tables[count];
    for (int value = 1; value <= table->length; value++)
        add_term(row, table->first + value - 1, factor * value);
}

static int add_column(struct program *program, const char *name, int kind, double lowest, double highest) {
    int at = glp_add_cols(program->glpk, 1);
    glp_set_col_name(program->glpk, at, name);
    glp_set_col_kind(program->glpk, at, kind); /* a binary's bounds are set anew below */
    if (highest == lowest)
        glp_set_col_bnds(program->glpk, at, GLP_FX, lowest, highest);
    else if (highest == INFINITY)
        glp_set_col_bnds(program->glpk, at, GLP_LO, lowest, 0);
    else
        glp_set_col_bnds(program->glpk, at, GLP_DB, lowest, highest);
    return at;
}

static void add_tables(struct program *program, const struct request *request) {
    char name[32];
    for (int count = 0; count < COUNTS; count++) {
        struct table *table = &program->tables[count];
        for (int value = 1; value <= table->length; value++) {
            snprintf(name, sizeof name, "%s_%d", table->name, value);
            bool open = is_open(program, request, (enum count)count, value);
            int column = add_column(program, name, GLP_BV, 0, open ? 1 : 0);
            if (value == 1) table->first = column;
        }
    }
}

/* Seconds by the longest of all, so that the solver's tolerances fit them. */
static double scale_of(const struct program *program, const struct request *request) {
    double scale = 0;
    for (int count = 0; count < COUNTS; count++)
        for (int value = 1; value <= program->tables[count].length; value++)
            if (is_open(program, request, (enum count)count, value))
                scale = larger(scale, program->tables[count].seconds[value - 1]);
    return scale > 0 ? scale : 1;
}

/* t is no shorter than what the tables say of the counts first … last. */
static void add_seconds(struct program *program, const struct request *request, struct row *row, int first,
                        int last) {
    int t = add_column(program, "t", GLP_CV, 0, INFINITY);
    double scale = scale_of(program, request);
    char name[32];
    glp_set_obj_coef(program->glpk, t, 1);
    for (int count = first; count <= last; count++) {
        const struct table *table = &program->tables[count];
        add_term(row, t, 1);
        for (int value = 1; value <= table->length; value++)
            if (is_open(program, request, (enum count)count, value))
                add_term(row, table->first + value - 1, -table->seconds[value - 1] / scale);
        snprintf(name, sizeof name, "seconds_of_%s", table->name);
        add_row(program, row, name, GLP_LO, 0);
    }
}

/* Nodes that hold one component have its GPUs and its NICs. */
static void add_nodes(struct program *program, struct row *row) {
    const struct allocation_problem *problem = program->problem;
    int all = problem->nodes, gpus = problem->gpus_per_node, nics = problem->nics_per_node;
    double blocks = problem->blocks;
    if (problem->mixed) {
        add_count(program, row, ATTENTION_GPUS, blocks);
        add_count(program, row, FFN_GPUS, blocks);
        add_row(program, row, "gpus_of_nodes", GLP_UP, (double)all * gpus);
        add_count(program, row, ATTENTION_NICS, blocks);
        add_count(program, row, FFN_NICS, blocks);
        add_row(program, row, "nics_of_nodes", GLP_UP, (double)all * nics);
        return;
    }
    int nodes[2] = {add_column(program, "attn_nodes", GLP_IV, 1, all),
                    add_column(program, "ffn_nodes", GLP_IV, 1, all)};
    for (int side = 0; side < 2; side++) {
        add_count(program, row, side ? FFN_GPUS : ATTENTION_GPUS, blocks);
        add_term(row, nodes[side], -gpus);
        add_row(program, row, side ? "gpus_of_ffn_nodes" : "gpus_of_attn_nodes", GLP_UP, 0);
        add_count(program, row, side ? FFN_NICS : ATTENTION_NICS, blocks);
        add_term(row, nodes[side], -nics);
        add_row(program, row, side ? "nics_of_ffn_nodes" : "nics_of_attn_nodes", GLP_UP, 0);
    }
    add_term(row, nodes[0], 1);
    add_term(row, nodes[1], 1);
    add_row(program, row, "nodes", GLP_UP, all);
}

static void add_limits(struct program *program, const struct request *request, struct row *row) {
    const struct allocation_problem *problem = program->problem;
    int most = problem->most_attn_gpus + problem->most_ffn_gpus;
    if (request->limits & LIMIT_GPUS && problem->gpus < most) most = problem->gpus;
    if (request->most_gpus < most) most = request->most_gpus;
    add_count(program, row, ATTENTION_GPUS, 1);
    add_count(program, row, FFN_GPUS, 1);
    add_row(program, row, "gpus", GLP_UP, most);
    if (request->limits & LIMIT_NICS) {
        add_count(program, row, ATTENTION_NICS, 1);
        add_count(program, row, FFN_NICS, 1);
        add_row(program, row, "nics", GLP_UP, problem->nics);
    }
    if (request->limits & LIMIT_FFN_MEMORY && problem->usable < INFINITY) {
        add_count(program, row, ATTENTION_GPUS, 1);
        for (int n = 1; n <= problem->most_ffn_gpus; n++)
            add_term(row, program->tables[FFN_GPUS].first + n - 1,
                     -larger(0, most_attention_gpus(problem, n)));
        add_row(program, row, "ffn_memory", GLP_UP, 0);
    }
    if (request->limits & LIMIT_NODES && asks_nodes(problem)) add_nodes(program, row);
}

static void add_goal(struct program *program, const struct request *request, struct row *row) {
    if (request->goal == MINIMISE_SECONDS) add_seconds(program, request, row, ATTENTION_GPUS, FFN_NICS);
    if (request->goal == MINIMISE_SENDING) add_seconds(program, request, row, ATTENTION_NICS, FFN_NICS);
    for (int count = ATTENTION_GPUS; request->goal == MINIMISE_GPUS && count <= FFN_GPUS; count++)
        for (int value = 1; value <= program->tables[count].length; value++)
            glp_set_obj_coef(program->glpk, program->tables[count].first + value - 1, value);
}

static struct program program_new(const struct allocation_problem *problem, const struct request *request) {
    struct program program = {.problem = problem,
                              .glpk = glp_create_prob(),
                              .tables = {{problem->attn_seconds, problem->most_attn_gpus, 0, "attn_gpus"},
                                         {problem->ffn_seconds, problem->most_ffn_gpus, 0, "ffn_gpus"},
                                         {problem->attn_nic_seconds, problem->nics, 0, "attn_nics"},
                                         {problem->ffn_nic_seconds, problem->nics, 0, "ffn_nics"}}};
    size_t most =
        8 + (size_t)problem->most_attn_gpus + (size_t)problem->most_ffn_gpus + 2 * (size_t)problem->nics;
    struct row row = {must_alloc(most * sizeof(int)), must_alloc(most * sizeof(double)), 0};
    glp_set_prob_name(program.glpk, "allocation");
    glp_set_obj_dir(program.glpk, GLP_MIN);
    add_tables(&program, request);
    for (int count = 0; count < COUNTS; count++) {
        const struct table *table = &program.tables[count];
        for (int value = 1; value <= table->length; value++) add_term(&row, table->first + value - 1, 1);
        add_row(&program, &row, table->name, GLP_FX, 1);
    }
    add_limits(&program, request, &row);
    add_goal(&program, request, &row);
    free(row.columns);
    free(row.values);
    return program;
}

static void program_free(struct program *program) {
    glp_delete_prob(program->glpk);
}

static int chosen(const struct program *program, enum count count) {
    const struct table *table = &program->tables[count];
    for (int value = 1; value <= table->length; value++)
        if (glp_mip_col_val(program->glpk, table->first + value - 1) > 0.5) return value;
    return 0;
}

/* False where the request has no solution. */
static bool solve(const struct allocation_problem *problem, const struct request *request,
                  struct allocation *allocation) {
    struct program program = program_new(problem, request);
    glp_iocp options;
    glp_init_iocp(&options);
    options.msg_lev = GLP_MSG_OFF;
    options.presolve = GLP_ON;
    bool found = glp_intopt(program.glpk, &options) == 0 &&
                 (glp_mip_status(program.glpk) == GLP_OPT || glp_mip_status(program.glpk) == GLP_FEAS);
    if (found)
        *allocation = (struct allocation){chosen(&program, ATTENTION_GPUS), chosen(&program, FFN_GPUS),
                                          chosen(&program, ATTENTION_NICS), chosen(&program, FFN_NICS)};
    program_free(&program);
    return found;
}

/* ---- the three phases -------------------------------------------------------------------------------- */

static double attention_seconds(const struct allocation_problem *problem, struct allocation a) {
    return larger(problem->attn_seconds[a.attn_gpus - 1], problem->attn_nic_seconds[a.attn_nics - 1]);
}

static double ffn_seconds(const struct allocation_problem *problem, struct allocation a) {
    return larger(problem->ffn_seconds[a.ffn_gpus - 1], problem->ffn_nic_seconds[a.ffn_nics - 1]);
}

static double slower_side(const struct allocation_problem *problem, struct allocation a) {
    return larger(attention_seconds(problem, a), ffn_seconds(problem, a));
}

static double sending(const struct allocation_problem *problem, struct allocation a) {
    return larger(problem->attn_nic_seconds[a.attn_nics - 1], problem->ffn_nic_seconds[a.ffn_nics - 1]);
}

/* Just below. */
static double below(double seconds) {
    return nextafter(seconds, -INFINITY);
}

/* Until nothing is better. */
static void prove_seconds(const struct allocation_problem *problem, struct request request,
                          struct allocation *best) {
    request.goal = MINIMISE_NOTHING;
    do request.computing = request.sending = below(slower_side(problem, *best));
    while (solve(problem, &request, best));
}

static void prove_gpus(const struct allocation_problem *problem, struct request request,
                       struct allocation *best) {
    request.goal = MINIMISE_NOTHING;
    do request.most_gpus = best->attn_gpus + best->ffn_gpus - 1;
    while (solve(problem, &request, best));
}

static void prove_sending(const struct allocation_problem *problem, struct request request,
                          struct allocation *best) {
    request.goal = MINIMISE_NOTHING;
    do request.sending = below(sending(problem, *best));
    while (solve(problem, &request, best));
}

static bool optimise(const struct allocation_problem *problem, struct allocation *best) {
    struct request request = {LIMIT_ALL, INFINITY, INFINITY, INT32_MAX, MINIMISE_SECONDS};
    if (!solve(problem, &request, best)) return false;
    prove_seconds(problem, request, best);
    request.computing = request.sending = slower_side(problem, *best);
    request.goal = MINIMISE_GPUS;
    solve(problem, &request, best);
    prove_gpus(problem, request, best);
    request.most_gpus = best->attn_gpus + best->ffn_gpus;
    request.goal = MINIMISE_SENDING;
    solve(problem, &request, best);
    prove_sending(problem, request, best);
    return true;
}

/* ---- what cannot hold -------------------------------------------------------------------------------- */

static bool is_empty(const struct allocation_problem *problem, char *why, size_t size) {
    if (problem->gpus < 2)
        snprintf(why, size, "GPUs: a group has %d; attention and experts take one each at least",
                 problem->gpus);
    else if (problem->nics < 2)
        snprintf(why, size, "NICs: a group has %d; attention and experts take one each at least",
                 problem->nics);
    else if (problem->most_attn_gpus < 1 || problem->most_ffn_gpus < 1)
        snprintf(why, size, "GPUs: a side may have none");
    else
        return false;
    return true;
}

/* The first constraint without which there is a solution. */
static void explain(const struct allocation_problem *problem, char *why, size_t size) {
    static const struct {
        enum constraint constraint;
        const char *what;
    } parts[] = {{LIMIT_ATTENTION_MEMORY, "memory of the attention GPUs"},
                 {LIMIT_FFN_MEMORY, "memory of the feed-forward GPUs"},
                 {LIMIT_MULTIPLE, "attention GPUs a multiple of cp"},
                 {LIMIT_NODES, "whole nodes for each component"},
                 {LIMIT_NICS, "NICs of a group"},
                 {LIMIT_GPUS, "GPUs of a group"}};
    struct allocation ignored;
    struct request request = {LIMIT_ALL, INFINITY, INFINITY, INT32_MAX, MINIMISE_NOTHING};
    for (size_t i = 0; i < COUNT(parts); i++) {
        request.limits = LIMIT_ALL & ~(unsigned)parts[i].constraint;
        if (!solve(problem, &request, &ignored)) continue;
        snprintf(why, size, "%s: nothing fits with it, something would without", parts[i].what);
        return;
    }
    snprintf(why, size, "several constraints at once: no single one can be left out so that something fits");
}

bool allocation_has_memory(const struct allocation_problem *problem) {
    bool attention = false, ffn = false;
    for (int m = problem->multiple; m <= problem->most_attn_gpus; m += problem->multiple)
        attention |= attention_fits(problem, m);
    for (int n = 1; n <= problem->most_ffn_gpus; n++)
        ffn |= most_attention_gpus(problem, n) >= problem->multiple;
    return attention && ffn;
}

/* ---- front door -------------------------------------------------------------------------------------- */

bool allocation_solve(const struct allocation_problem *problem, struct allocation_solution *solution,
                      char *why, size_t why_size) {
    if (is_empty(problem, why, why_size)) return false;
    struct allocation best;
    pthread_mutex_lock(&solver);
    glp_term_out(GLP_OFF);
    double began = seconds_now();
    bool found = optimise(problem, &best);
    double seconds = seconds_now() - began;
    if (!found) explain(problem, why, why_size);
    glp_free_env();
    pthread_mutex_unlock(&solver);
    if (!found) return false;
    double slower = slower_side(problem, best);
    *solution = (struct allocation_solution){
        .allocation = best,
        .attn_seconds = attention_seconds(problem, best),
        .ffn_seconds = ffn_seconds(problem, best),
        .mfu = problem->flops / (slower * (best.attn_gpus + best.ffn_gpus) * problem->peak_flops),
        .solve_seconds = seconds};
    return true;
}

/* GLPK writes to a name alone: the name of a file in memory, so that what comes out is written by the suite's
   own rule (whole or not at all; a device in its place). */
static bool write_program(glp_prob *glpk, const char *file, struct errors *errors) {
    int memory = memfd_create("program.lp", MFD_CLOEXEC);
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", memory);
    bool written = memory >= 0 && glp_write_lp(glpk, NULL, name) == 0;
    off_t bytes = written ? lseek(memory, 0, SEEK_END) : 0;
    char *text = must_alloc((size_t)bytes + 1);
    written = written && pread(memory, text, (size_t)bytes, 0) == bytes;
    if (!written)
        errors_add(errors, file, NULL, "the program cannot be put into words: no memory or no /proc");
    else
        written = file_write_atomic(file, text, (size_t)bytes, errors);
    free(text);
    if (memory >= 0) close(memory);
    return written;
}

bool allocation_write_lp(const struct allocation_problem *problem, const char *file, struct errors *errors) {
    char why[128];
    if (is_empty(problem, why, sizeof why)) {
        errors_add(errors, file, NULL, "not written: %s", why);
        return false;
    }
    struct request request = {LIMIT_ALL, INFINITY, INFINITY, INT32_MAX, MINIMISE_SECONDS};
    pthread_mutex_lock(&solver);
    glp_term_out(GLP_OFF);
    struct program program = program_new(problem, &request);
    bool written = write_program(program.glpk, file, errors);
    program_free(&program);
    glp_free_env();
    pthread_mutex_unlock(&solver);
    return written;
}
