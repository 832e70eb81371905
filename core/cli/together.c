/* What the verbs that run ranks share. */
#include "cli/together.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of the Markov chain: a run's seed changes what is drawn from it, not the chain, so that the losses of
   different seeds are of one problem. */
#define CHAIN_SEED 1

struct data *open_data(const struct point *point, struct errors *errors) {
    const char *file = point->training.data;
    if (strcmp(file, "markov") == 0) {
        if (point->model->vocab >= 2) return data_markov(point->model->vocab, point->seq_len, CHAIN_SEED);
        errors_add(errors, NULL, "model.vocab", "found 1; a Markov chain needs at least 2");
        return NULL;
    }
    return data_open_text(file, point->seq_len, point->model->vocab, errors);
}

bool agree(MPI_Comm comm, struct errors *errors) {
    int rank, first;
    MPI_Comm_rank(comm, &rank);
    int mine = errors->count ? rank : INT_MAX;
    MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, comm);
    if (mine == first) errors_print(errors, stderr);
    errors_free(errors);
    return first == INT_MAX;
}

bool fits_this_machine(const char *verb, const struct system *system, const struct plan *plan, double beside,
                       struct errors *errors) {
    struct result result;
    struct schedule *schedule;
    struct timeline timeline = {0};
    simulate_plan(system, plan, &result, &schedule, &timeline);
    double *peaks = must_alloc((size_t)schedule->group_count * sizeof *peaks), needed = beside;
    schedule_memory_peaks(schedule, &timeline, peaks);
    for (int g = 0; g < schedule->group_count; g++)
        needed += peaks[g] * schedule->groups[g].gpus * plan->replicas;
    double here = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (needed > here)
        errors_add(errors, NULL, verb,
                   "%s: %d ranks need %.1f GB; this machine has %.1f GB. Under mpirun or srun they may be "
                   "spread over others",
                   system->name, plan->gpus, needed / 1e9, here / 1e9);
    free(peaks);
    schedule_free(schedule);
    timeline_free(&timeline);
    return needed <= here;
}
