/*
Policies for moving shapes: which layout runs each step of a stream of sequence lengths, when going from one
to another costs the time to move weights and optimizer state.

Concepts
- This is a metrical task system (Borodin, Linial and Saks, J. ACM 1992): layouts are its states, a step is a
task. Its work function w(l) is the least time in which the steps so far can have been done so that layout l
is there after them.
- The oracle is the work function of the whole stream, read backwards.
- The online policy follows the work function algorithm (the same source): it goes to the layout with the
least w(l) + move from here, among those whose w(l) ends with a step done in l itself. Between two layouts
that means: go when what could have been saved there since pays a round trip.
- An account binds it. Let A be what it is ahead of staying at home (the layout it begins with) so far, moves
paid, and R the dearest round trip between home and another layout. It does a step in layout l only where

    A + seconds(home) − seconds(l) − move(here, l) − move(l, home) ≥ −R,

so behind every step A − move(here, home) ≥ −R: it can still come home and be no more than R behind. By that
the step at home is always allowed (A − move(here, home) ≥ −R before it, and at home A does not change), so
there is always something to do, and A ≥ −R at the end of any stream: never more than one round trip worse
than home. A first excursion is always allowed (A = 0, and R covers both moves) as far as its first step pays
for itself; what excursions gain allows more of them.
*/
#include "allocate/allocate.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static double seconds_of(const struct stream_table *table, int layout, int shape) {
    return table->seconds[(size_t)layout * table->shapes + shape];
}

static double move_of(const struct stream_table *table, int from, int to) {
    return table->moves[(size_t)from * table->layouts + to];
}

/* Reads time and moves off the layouts of the steps. */
static void total(const struct stream_table *table, const int *shapes, int steps,
                  struct stream_outcome *outcome) {
    outcome->seconds = outcome->move_seconds = outcome->moves = 0;
    for (int t = 0; t < steps; t++) {
        int layout = outcome->layouts[t];
        outcome->seconds += seconds_of(table, layout, shapes[t]);
        if (t == 0 || outcome->layouts[t - 1] == layout) continue;
        outcome->moves++;
        outcome->move_seconds += move_of(table, outcome->layouts[t - 1], layout);
    }
    outcome->seconds += outcome->move_seconds;
}

void stream_stay(const struct stream_table *table, const int *shapes, int steps, int layout,
                 struct stream_outcome *outcome) {
    for (int t = 0; t < steps; t++) outcome->layouts[t] = layout;
    total(table, shapes, steps, outcome);
}

int stream_home(const struct stream_table *table, int shape) {
    int best = 0;
    for (int l = 1; l < table->layouts; l++)
        if (seconds_of(table, l, shape) < seconds_of(table, best, shape)) best = l;
    return best;
}

int stream_static(const struct stream_table *table, const int *shapes, int steps,
                  struct stream_outcome *outcome) {
    double *sums = must_alloc((size_t)table->layouts * sizeof *sums);
    memset(sums, 0, (size_t)table->layouts * sizeof *sums);
    int best = 0;
    for (int l = 0; l < table->layouts; l++) {
        for (int t = 0; t < steps; t++) sums[l] += seconds_of(table, l, shapes[t]);
        if (sums[l] < sums[best]) best = l;
    }
    free(sums);
    stream_stay(table, shapes, steps, best, outcome);
    return best;
}

/* ---- work function ------------------------------------------------------------------------------------- */

/* One more step, done in each layout: before (layouts) → after (layouts), the least time up to its end.
   entry: where one comes from; of equals, without a move. */
static void add_step(const struct stream_table *table, int shape, const double *before, double *after,
                     int *entry) {
    for (int l = 0; l < table->layouts; l++) {
        entry[l] = l;
        double least = before[l];
        for (int from = 0; from < table->layouts; from++)
            if (before[from] + move_of(table, from, l) < least) {
                least = before[from] + move_of(table, from, l);
                entry[l] = from;
            }
        after[l] = least + seconds_of(table, l, shape);
    }
}

void stream_oracle(const struct stream_table *table, const int *shapes, int steps,
                   struct stream_outcome *outcome) {
    size_t layouts = (size_t)table->layouts;
    int *entries = must_alloc((size_t)steps * layouts * sizeof *entries);
    double *work = must_alloc(2 * layouts * sizeof *work), *before = work, *after = work + layouts;
    memset(work, 0, 2 * layouts * sizeof *work);
    for (int t = 0; t < steps; t++) {
        add_step(table, shapes[t], before, after, entries + (size_t)t * layouts);
        double *done = after;
        after = before;
        before = done;
    }
    int layout = 0;
    for (int l = 1; l < table->layouts; l++)
        if (before[l] < before[layout]) layout = l;
    for (int t = steps - 1; t >= 0; t--) {
        outcome->layouts[t] = layout;
        layout = entries[(size_t)t * layouts + layout];
    }
    free(work);
    free(entries);
    total(table, shapes, steps, outcome);
}

/* ---- online -------------------------------------------------------------------------------------------- */

double stream_round_trip(const struct stream_table *table, int home) {
    double dearest = 0;
    for (int l = 0; l < table->layouts; l++)
        dearest = fmax(dearest, move_of(table, home, l) + move_of(table, l, home));
    return dearest;
}

/* Where the work function algorithm goes. done (layouts): the least time with the step done in the layout;
   work, filled: the same with a move behind the step allowed. */
static int best_target(const struct stream_table *table, const double *done, double *work, int here) {
    int target = -1;
    double least = INFINITY;
    for (int l = 0; l < table->layouts; l++) {
        work[l] = done[l];
        for (int from = 0; from < table->layouts; from++)
            work[l] = fmin(work[l], done[from] + move_of(table, from, l));
    }
    for (int k = -1; k < table->layouts; k++) {
        int l = k < 0 ? here : k; /* of equals it stays */
        if (work[l] < done[l] || !(done[l] < INFINITY)) continue;
        if (target < 0 || work[l] + move_of(table, here, l) < least) {
            target = l;
            least = work[l] + move_of(table, here, l);
        }
    }
    assert(target >= 0); /* some layout fits */
    return target;
}

void stream_online(const struct stream_table *table, const int *shapes, int steps, int home,
                   struct stream_outcome *outcome) {
    size_t layouts = (size_t)table->layouts;
    double *work = must_alloc(2 * layouts * sizeof *work), *done = work + layouts;
    double account = 0, round_trip = stream_round_trip(table, home);
    int here = home;
    for (int l = 0; l < table->layouts; l++) work[l] = move_of(table, home, l);
    for (int t = 0; t < steps; t++) {
        double at_home = seconds_of(table, home, shapes[t]);
        for (int l = 0; l < table->layouts; l++) done[l] = work[l] + seconds_of(table, l, shapes[t]);
        /* What it would like, else where it is, else home. A step that home cannot do at all is beyond any
           account. */
        const int wishes[] = {best_target(table, done, work, here), here, home};
        int next = home;
        double ahead = account;
        for (size_t i = 0; i < COUNT(wishes); i++) {
            next = wishes[i];
            ahead = account - move_of(table, here, next);
            if (next != home) ahead += at_home - seconds_of(table, next, shapes[t]);
            if (ahead - move_of(table, next, home) >= -round_trip) break;
        }
        account = ahead;
        outcome->layouts[t] = here = next;
    }
    free(work);
    total(table, shapes, steps, outcome);
}
