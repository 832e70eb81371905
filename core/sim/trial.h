/*
Trying plans for the tuner: what levers need, what an order takes, whether it fits, and the best plan so far.

A short trial runs a step cut off behind the point where its pace shows, and reckons the rest; it ranks plans.
Only a whole trial decides.
*/
#ifndef SIM_TRIAL_H
#define SIM_TRIAL_H

#include "sim/space.h"

/* A shape (layout and placement) with levers: what choosing states and levers asks for. */
struct known {
    int groups;
    struct bound bound;      /* with the leanest state */
    double *kept, *backward; /* (groups) bytes a micro-batch keeps; that one backward pass takes beside it */
    double *static_bytes, *end; /* (states, groups) bytes; (states) seconds of the step's end */
    double soonest;             /* of these ends */
};

struct trials {
    const struct space *space;
    struct plan best_plan;
    double best;         /* seconds per sequence; INFINITY: none yet */
    int64_t operations;  /* simulated so far: the measure of work done, since clocks differ */
    double *activations; /* of the last trial: each group's peak without static bytes */
    int activation_count;
    struct memo *memo;
};

struct trials trials_new(const struct space *space);
void trials_free(struct trials *trials);

static inline double per_sequence(const struct plan *plan, double seconds) {
    return seconds / plan->sequences;
}

/* Remembered: asked for at every turn. Valid until memo_trim. */
const struct known *known_of(struct trials *trials, const struct plan *plan);
/* Forgets when much is remembered; between two shapes. */
void memo_trim(struct trials *trials);
/* Forgets all: for another memory limit. */
void memo_clear(struct trials *trials);
/* (groups) static bytes in one state. */
const double *static_bytes_of(const struct known *known, int state);

/* The state that ends the step soonest among those that fit beside each group's activations (NULL: all fit),
   and the seconds that end takes; INFINITY when none fits. The least intrusive of equals. */
double choose_state(struct trials *trials, const struct plan *plan, const double *activations,
                    struct memory *chosen);
/* The last trial's activations ÷ what a state leaves for them, of the worst group: above 1 they do not fit.
 */
double load_of(struct trials *trials, const struct plan *plan, int state);

/* Seconds per sequence of a short trial with the quickest state; INFINITY when that is not below `limit`. */
double try_short(struct trials *trials, struct plan *plan, double limit);
/* Tries a whole step with the state that suits it, gives up when it is no better than the best plan, which it
   becomes otherwise. Returns its load when it does not fit, else 0. */
double try_whole(struct trials *trials, struct plan plan);
/* The same, but the lower bound and, where it saves work, a short trial rule out first what they can. */
double try_plan(struct trials *trials, struct plan plan);

#endif
