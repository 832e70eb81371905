/* disagmoe: one binary, a verb for each thing it does. */
#include "cli/cli.h"

#include <malloc.h>
#include <signal.h>
#include <string.h>

static const struct verb *const verbs[] = {&verb_sim,    &verb_schedule, &verb_check, &verb_train,
                                           &verb_import, &verb_systems,  &verb_bench, &verb_regimes,
                                           &verb_plan,   &verb_profile};

static void print_usage(FILE *stream) {
    fprintf(stream, "usage: disagmoe VERB [OPTIONS]\n\nMoE training systems as schedules: DisagMoE and what "
                    "it is compared with.\n\n");
    for (size_t i = 0; i < COUNT(verbs); i++)
        fprintf(stream, "  %-10s %s\n", verbs[i]->name, verbs[i]->summary);
    fprintf(stream, "\n'disagmoe VERB --help' says more. Version %s.\n", VERSION);
}

/* A full disk shows only when the last of the output is written. */
static int finish(int status) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    fprintf(stderr, "disagmoe: standard output: it could not be written\n");
    return status ? status : STATUS_FAILED;
}

int main(int argc, char **argv) {
    /* Schedules are built and freed by the thousand: keep their memory instead of returning each to the
     * kernel. */
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is a file that cannot be written */
    if (argc < 2) {
        print_usage(stderr);
        return STATUS_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return finish(STATUS_DONE);
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("disagmoe %s\n", VERSION);
        return finish(STATUS_DONE);
    }
    for (size_t i = 0; i < COUNT(verbs); i++)
        if (strcmp(argv[1], verbs[i]->name) == 0) return finish(verbs[i]->run(argc - 2, argv + 2));
    fprintf(stderr, "disagmoe: unknown verb '%s'; see 'disagmoe --help'\n", argv[1]);
    return STATUS_USAGE;
}
