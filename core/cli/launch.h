/*
Starting the ranks of a run, and saying how they ended.

Concepts
- A launcher is a process outside MPI. It starts mpirun, which starts this program once a rank, passes on what
they print, and says in one line why a run ended early. Ranks that mpirun or srun started by hand have none.
- The board is a small file that launcher and ranks map: each rank's process and the step it is in. So it can
be told who died where: the dead cannot, and the others are ended before they could.
- What Open MPI prints about a failure is held back, and shown when nothing else explains it.
*/
#ifndef CLI_LAUNCH_H
#define CLI_LAUNCH_H

#include "base/base.h"

/* Whether this process is an MPI rank: started by mpirun, or by srun with PMIx or PMI. */
bool launch_inside(void);
/* Whether it is one of several tasks of an srun that offers no PMIx: each would take itself for the whole
   run. */
bool launch_is_stray(void);

/* Both sides, ahead of all else: which verb speaks ("train", the default), and whether its runs are made of
   steps, so that an end tells the step and where to go on. */
void launch_as(const char *verb, bool has_steps);

/* Begins a line on stderr that explains no end. */
#define LAUNCH_NOTE "disagmoe: train: note: "

/* ---- the launcher ------------------------------------------------------------------------------------ */

struct launch {
    int ranks;
    int run;                 /* number of the run, which the ranks read with launch_run */
    char *const *arguments;  /* of the program, NULL behind the last */
    const char *checkpoints; /* folder the run writes checkpoints to; NULL: none */
};
enum launch_end {
    LAUNCH_DONE,
    LAUNCH_FAILED, /* a rank ended with 1: it has said why */
    LAUNCH_USAGE,  /* with 2 */
    LAUNCH_CUT     /* the run did not come to its end: a rank was killed, or this process was told to end */
};
/* Runs to the end; nothing of it is left over. Ctrl-C, SIGTERM and SIGHUP end the ranks. Why it ended early
   stands on stderr. */
enum launch_end launch_ranks(const struct launch *launch);

/* ---- a rank ------------------------------------------------------------------------------------------ */

/* The run the launcher asks for; −1: no launcher, all of them. */
int launch_run(void);
/* After MPI_Init: joins the board when there is a launcher. From here on SIGTERM, SIGINT and SIGHUP (unless
   it is ignored) end this rank with status 1 (the first two ranks without a launcher say in which step), and
   a file that grows beyond its limit is an error of writing. */
void launch_join(int rank);
void launch_step(int64_t step); /* this rank is in this step now */
int64_t launch_current_step(void);
/* A file that a signal which ends this rank removes; NULL: none any more. */
void launch_hold(const char *file);
void launch_leave(void); /* this rank ends as it should */

#endif
