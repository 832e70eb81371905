/*
For cmocka programs whose tests need ranks: a test starts the program again under mpirun.
*/
#ifndef TESTS_UNDER_MPI_H
#define TESTS_UNDER_MPI_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static inline bool inside_mpi(void) {
    return getenv("OMPI_COMM_WORLD_SIZE") != NULL;
}

/* Runs `program argument` as that many ranks and asserts that all of them succeed; skips without mpirun. */
static inline void assert_ranks_succeed(int ranks, const char *program, const char *argument) {
    char count[16];
    snprintf(count, sizeof count, "%d", ranks);
    if (system("command -v mpirun >/dev/null") != 0) {
        print_message("skip: mpirun is not installed\n");
        skip();
    }
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        execlp("mpirun", "mpirun", "-n", count, "--oversubscribe", "--bind-to", "none", "--timeout", "280",
               "--mca", "mpi_yield_when_idle", "1", program, argument, (char *)NULL);
        _exit(127);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#endif
