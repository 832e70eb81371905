/*
disagmoe profile: what this machine's layers and links achieve.

Started alone, this process is the launcher and starts the ranks; under mpirun or srun it is a rank. Rank 0
tells and writes. Ranks decide together: what one finds wrong ends all.
*/
#include "cli/cli.h"
#include "cli/launch.h"
#include "profile/profile.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum { REPEATS = 10, SLOW_PAIRS = 20 };
/* Below this part of the median of its kind a pair is slow. */
static const double SLOW = 0.8;

struct profile {
    struct options options;
    int ranks, repeats; /* 0: not given */
    bool links;
    struct arena *arena;
};

static bool parse(struct profile *profile, int argc, char **argv, bool *helped) {
    struct options *options = &profile->options;
    const struct option_rule rules[] = {{"--links", NULL, NULL, &profile->links},
                                        {"--ranks", NULL, &profile->ranks, NULL},
                                        {"--repeats", NULL, &profile->repeats, NULL},
                                        {"--json", NULL, NULL, &options->json}};
    if (!parse_options(&verb_profile, argc, argv, rules, COUNT(rules), options, &options->manifest, helped))
        return false;
    if (*helped) return true;
    if (!profile->repeats) profile->repeats = REPEATS;
    const char *wrong = NULL;
    if (profile->links && options->manifest)
        wrong = "--links measures ranks as they are; no manifest is allowed";
    if (profile->ranks && !profile->links) wrong = "--ranks needs --links; a manifest's plan has its own";
    if (profile->ranks && launch_inside()) wrong = "--ranks is for a start without mpirun or srun";
    if (profile->ranks == 1) wrong = "--ranks: found 1; a link needs 2";
    if (wrong) fprintf(stderr, "disagmoe: profile: %s; see 'disagmoe profile --help'\n", wrong);
    return !wrong &&
           (profile->links || !is_missing(&verb_profile, options->manifest, "a manifest, or --links,"));
}

/* ---- links ------------------------------------------------------------------------------------------- */

struct links {
    struct link *list;
    int count;
    const char **hosts;
};

static bool same_host(const struct links *links, const struct link *link) {
    return strcmp(links->hosts[link->a], links->hosts[link->b]) == 0;
}

/* Medians over all pairs inside a host, or between hosts. False where there are none. */
static bool medians(const struct links *links, bool inside, double *bytes_per_s, double *latency_s) {
    double *rates = must_alloc(2 * ((size_t)links->count + 1) * sizeof *rates), *times = rates + links->count;
    int count = 0;
    for (int i = 0; i < links->count; i++)
        if (same_host(links, &links->list[i]) == inside) {
            rates[count] = links->list[i].bytes_per_s.median;
            times[count++] = links->list[i].latency_s.median;
        }
    if (count) {
        *bytes_per_s = spread_of(rates, count).median;
        *latency_s = spread_of(times, count).median;
    }
    free(rates);
    return count > 0;
}

static void print_links_json(const struct links *links, int repeats) {
    for (int i = 0; i < links->count; i++) {
        const struct link *link = &links->list[i];
        cJSON *line = cJSON_CreateObject();
        json_add_number(line, "a", link->a);
        json_add_number(line, "b", link->b);
        cJSON_AddStringToObject(line, "host_a", links->hosts[link->a]);
        cJSON_AddStringToObject(line, "host_b", links->hosts[link->b]);
        json_add_number(line, "bytes_per_s", link->bytes_per_s.median);
        json_add_number(line, "bytes_per_s_low", link->bytes_per_s.low);
        json_add_number(line, "bytes_per_s_high", link->bytes_per_s.high);
        json_add_number(line, "latency_s", link->latency_s.median);
        json_add_number(line, "latency_s_low", link->latency_s.low);
        json_add_number(line, "latency_s_high", link->latency_s.high);
        json_add_number(line, "message_bytes", LINK_BYTES);
        json_add_number(line, "repeats", repeats);
        print_json_line(line, stdout);
    }
}

static int by_speed(const void *a, const void *b) {
    double x = ((const struct link *)a)->bytes_per_s.median, y = ((const struct link *)b)->bytes_per_s.median;
    return (x > y) - (x < y);
}

static void print_pair(const struct links *links, const struct link *link, double median) {
    char rate[16], low[16], high[16];
    printf("%6d %-18.18s %6d %-18.18s %7s/s %6.1f us %3.0f %%\n", link->a, links->hosts[link->a], link->b,
           links->hosts[link->b], bytes_text(link->bytes_per_s.median, rate), link->latency_s.median * 1e6,
           100 * link->bytes_per_s.median / median);
    if (link->bytes_per_s.high > 2 * link->bytes_per_s.low)
        printf("%49s/s to %s/s\n", bytes_text(link->bytes_per_s.low, low),
               bytes_text(link->bytes_per_s.high, high));
}

/* Pairs of one kind: how fast they are, and which are slow, the slowest first. */
static void print_kind(struct links *links, bool inside) {
    double bytes_per_s, latency_s;
    char rate[16];
    if (!medians(links, inside, &bytes_per_s, &latency_s)) return;
    qsort(links->list, (size_t)links->count, sizeof *links->list, by_speed);
    int pairs = 0, slow = 0;
    for (int i = 0; i < links->count; i++) {
        const struct link *link = &links->list[i];
        if (same_host(links, link) != inside) continue;
        pairs++;
        slow += link->bytes_per_s.median < SLOW * bytes_per_s;
    }
    printf("%s: %d pair%s, median %s/s, %.1f us\n", inside ? "inside a host" : "between hosts", pairs,
           pairs > 1 ? "s" : "", bytes_text(bytes_per_s, rate), latency_s * 1e6);
    if (!slow) {
        printf("  none below %.0f %% of the median\n", 100 * SLOW);
        return;
    }
    printf("  %d below %.0f %% of the median%s:\n%6s %-18s %6s %-18s %9s %9s %5s\n", slow, 100 * SLOW,
           slow > SLOW_PAIRS ? ", the slowest" : "", "rank", "host", "rank", "host", "bandwidth", "latency",
           "part");
    int shown = 0;
    for (int i = 0; i < links->count && shown < SLOW_PAIRS; i++)
        if (same_host(links, &links->list[i]) == inside &&
            links->list[i].bytes_per_s.median < SLOW * bytes_per_s) {
            print_pair(links, &links->list[i], bytes_per_s);
            shown++;
        }
}

static int measure_links(const struct profile *profile, MPI_Comm world, int rank, int ranks) {
    struct links links = {0};
    if (ranks < 2) {
        fprintf(stderr, "disagmoe: profile: --links: found 1 rank; a link needs 2\n");
        return STATUS_USAGE;
    }
    links.hosts = link_hosts(profile->arena, world);
    links.list = links_measure(world, profile->repeats, &links.count);
    if (rank == 0 && profile->options.json) print_links_json(&links, profile->repeats);
    if (rank == 0 && !profile->options.json) {
        printf("links between %d ranks, in %d rounds of pairs at the same time: messages of %d MiB one way,\n"
               "latency of one byte; medians of %d\n",
               ranks, link_rounds(ranks), LINK_BYTES >> 20, profile->repeats);
        print_kind(&links, false);
        print_kind(&links, true);
    }
    free(links.list);
    return STATUS_DONE;
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
        status = helped ? STATUS_DONE : measure_links(profile, MPI_COMM_WORLD, rank, ranks);
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
    int cores = processor_count();
    return launch(profile->ranks ? profile->ranks : cores > 2 ? cores : 2, arguments);
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
    arena_free(profile.arena);
    return status;
}

const struct verb verb_profile = {
    .name = "profile",
    .usage = "--links [OPTIONS]",
    .summary = "measure links here, between the ranks",
    .help = "  --links            links of all pairs of ranks: bandwidth, latency, which pairs are slow\n"
            "  --ranks N          without mpirun or srun: ranks to start here; default: a processor each\n"
            "  --repeats N        measurements of each figure; default 10\n"
            "  --json             a JSON line a pair instead of the table\n"
            "Ranks are started with mpirun; or start them yourself:\n"
            "  mpirun -n 8 disagmoe profile --links      srun --mpi=pmix disagmoe profile --links\n",
    .run = run,
};
