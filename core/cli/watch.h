/*
Watching that the ranks of a run get on.

Concepts
- A rank gives a sign of itself every now and then: its step, a number that changes as long as it gets on,
whether it only waits for others, and what it is doing. A thread of its own sends it, so a long computation is
no silence.
- A few ranks are judges and hear all of them. A rank is silent when no sign has come, or when it is at work
and has had no processor time (it waits for a disk that does not answer). Who waits for others is not silent,
unless all ranks do.
- Who has been silent for long is named once; after --timeout seconds all ranks end. Time in which the judge
itself was stopped does not count.
*/
#ifndef CLI_WATCH_H
#define CLI_WATCH_H

#include "base/base.h"

/* ---- a judge ----------------------------------------------------------------------------------------- */

struct sign {
    int64_t step; /* −1: before the first */
    uint64_t life;
    int32_t waits, ended; /* ended: as it should; nothing more will come */
    char doing[PULSE_TEXT];
};

struct judge;
/* warning, end: seconds of silence after which a rank is named, and after which the run ends (0: never). */
struct judge *judge_new(int ranks, double warning, double end);
void judge_free(struct judge *judge);
void judge_pass(struct judge *judge, double seconds); /* time that has passed, before what was heard in it */
void judge_hear(struct judge *judge, int rank, const struct sign *sign);
/* Adds to `says`, for each rank that has become silent or is heard again, a line; true when the run must end,
   then the line says so. */
bool judge_say(struct judge *judge, struct text *says);
bool judge_misses(const struct judge *judge, int rank); /* no sign for `warning` seconds */
bool judge_all_ended(const struct judge *judge);

/* ---- a rank ------------------------------------------------------------------------------------------ */

/* Seconds of silence, from --timeout's: a tenth of it, at most a minute, which is also what 0 (never) means.
 */
double watch_warning(double timeout);

struct watch;
/* Collective over all ranks of MPI_COMM_WORLD, with MPI_THREAD_MULTIPLE; NULL without. pulse: of this
 * process. */
struct watch *watch_start(struct pulse *pulse, double timeout);
/* Collective: the last thing but MPI_Finalize. NULL is allowed. */
void watch_stop(struct watch *watch);

#endif
