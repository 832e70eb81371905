/*
disagmoe profile: what this machine's layers and links achieve.

Started alone, this process is the launcher and starts the ranks; under mpirun or srun it is a rank. Rank 0
tells and writes. Ranks decide together: what one finds wrong ends all.
*/
#include "cli/profile.h"
#include "cli/launch.h"

#include <stdlib.h>
#include <string.h>

enum { REPEATS = 5, STEPS = 6 };

static bool parse(struct profile *profile, int argc, char **argv, bool *helped) {
    struct options *options = &profile->options;
    const struct option_rule rules[] = {
        {"--links", NULL, NULL, &profile->links},     {"--ranks", NULL, &profile->ranks, NULL},
        {"--repeats", NULL, &profile->repeats, NULL}, {"--steps", NULL, &profile->steps, NULL},
        {"--system", &options->system, NULL, NULL},   {"--cluster", &profile->cluster, NULL, NULL},
        {"--costs", &profile->costs, NULL, NULL},     {"--json", NULL, NULL, &options->json}};
    if (!parse_options(&verb_profile, argc, argv, rules, COUNT(rules), options, &options->manifest, helped))
        return false;
    if (*helped) return true;
    const char *wrong = NULL;
    if (profile->links &&
        (profile->steps || options->system || profile->cluster || profile->costs || options->override_count))
        wrong = "--links takes --ranks, --repeats and --json alone";
    if (profile->steps == 1) wrong = "--steps: found 1; the first step is not counted, so 2 are needed";
    if (options->override_count == MAX_OVERRIDES) wrong = "too many of --set";
    if (!profile->repeats) profile->repeats = REPEATS;
    if (!profile->steps) profile->steps = STEPS;
    if (profile->links && options->manifest)
        wrong = "--links measures ranks as they are; no manifest is allowed";
    if (profile->ranks && !profile->links) wrong = "--ranks needs --links; a manifest's plan has its own";
    if (profile->ranks && launch_inside()) wrong = "--ranks is for a start without mpirun or srun";
    if (profile->ranks == 1) wrong = "--ranks: found 1; a link needs 2";
    if (wrong) fprintf(stderr, "disagmoe: profile: %s; see 'disagmoe profile --help'\n", wrong);
    return !wrong &&
           (profile->links || !is_missing(&verb_profile, options->manifest, "a manifest, or --links,"));
}

/* ---- a rank ------------------------------------------------------------------------------------------ */

/* Rank 0 reads the command line first: if it is wrong, once is enough to be told so. */
static bool parse_together(struct profile *profile, int argc, char **argv, int rank, bool *helped) {
    int sound[2] = {0, 0};
    if (rank == 0) {
        sound[0] = parse(profile, argc, argv, helped);
        sound[1] = *helped;
    }
    MPI_Bcast(sound, 2, MPI_INT, 0, MPI_COMM_WORLD);
    *helped = sound[1];
    return sound[0] && (rank == 0 || *helped || parse(profile, argc, argv, helped));
}

static int work_as_rank(struct profile *profile, int argc, char **argv) {
    int rank, ranks, provided, status = STATUS_USAGE;
    bool helped = false;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    launch_join(rank);
    if (parse_together(profile, argc, argv, rank, &helped))
        status = helped           ? STATUS_DONE
                 : profile->links ? measure_links(profile, MPI_COMM_WORLD, rank, ranks)
                                  : measure_plan(profile, MPI_COMM_WORLD);
    fflush(stdout); /* before any rank ends: mpirun may end the others then */
    MPI_Barrier(MPI_COMM_WORLD);
    launch_leave();
    MPI_Finalize();
    return status;
}

/* ---- the launcher ------------------------------------------------------------------------------------ */

static int launch(int ranks, char **arguments) {
    struct launch launch = {.ranks = ranks, .arguments = arguments};
    enum launch_end end = launch_ranks(&launch);
    return end == LAUNCH_DONE ? STATUS_DONE : end == LAUNCH_USAGE ? STATUS_USAGE : STATUS_FAILED;
}

static int work_as_launcher(struct profile *profile, int argc, char **argv, char **arguments) {
    bool helped;
    if (!parse(profile, argc, argv, &helped)) return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    int cores = processor_count(), ranks = profile->ranks ? profile->ranks : cores > 2 ? cores : 2;
    int status = profile->links ? STATUS_DONE : look_at_plan(profile, &ranks);
    return status == STATUS_DONE ? launch(ranks, arguments) : status;
}

/* The command line as it was, from the verb on: reading it may change it. Without --ranks, which is the
   launcher's alone. */
static char **copy_arguments(struct arena *arena, int argc, char **argv) {
    char **arguments = arena_alloc(arena, (size_t)(argc + 2) * sizeof *arguments);
    int count = 0;
    arguments[count++] = arena_strdup(arena, verb_profile.name);
    for (int i = 0; i < argc; i++) {
        bool ranks = strcmp(argv[i], "--ranks") == 0;
        if (ranks) i++;
        if (!ranks && strncmp(argv[i], "--ranks=", 8) != 0) arguments[count++] = arena_strdup(arena, argv[i]);
    }
    return arguments;
}

static int run(int argc, char **argv) {
    launch_as(verb_profile.name, false);
    if (launch_is_stray()) {
        const char *task = getenv("SLURM_PROCID");
        if (!task || atoi(task) == 0)
            fprintf(stderr,
                    "disagmoe: profile: srun offers no PMIx to its tasks; start them with srun --mpi=pmix\n");
        return STATUS_USAGE;
    }
    struct profile profile = {.arena = arena_new()};
    char **arguments = copy_arguments(profile.arena, argc, argv);
    int status = launch_inside() ? work_as_rank(&profile, argc, argv)
                                 : work_as_launcher(&profile, argc, argv, arguments);
    experiment_free(&profile.experiment);
    arena_free(profile.arena);
    return status;
}

const struct verb verb_profile = {
    .name = "profile",
    .usage = "MANIFEST [OPTIONS] | --links [OPTIONS]",
    .summary = "measure layers and links here: a cluster file and a table of costs",
    .help =
        "  --system NAME      the system whose plan is measured, where the manifest names several\n"
        "  --set path=value   change the manifest (repeatable)\n"
        "  --cluster FILE     write what was measured as a cluster manifest\n"
        "  --costs FILE       write what was measured as a manifest's costs\n"
        "  --repeats N        measurements of each figure; default 5\n"
        "  --steps N          training steps to compare with, behind the first; default 6\n"
        "  --json             one JSON object instead of the table; of --links a line a pair\n"
        "  --links            without a manifest: bandwidth and latency of all pairs of ranks\n"
        "  --ranks N          of --links, without mpirun or srun: ranks to start here; default: a processor "
        "each\n"
        "Ranks are started with mpirun, as many as the plan has GPUs; or start them yourself:\n"
        "  mpirun -n 8 disagmoe profile M      srun --mpi=pmix -K disagmoe profile --links\n",
    .run = run,
};
