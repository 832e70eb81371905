/*
The schedule: operations, the lanes they hold, and the order on every lane. The suite's one data structure.

Concepts
- A group is a set of GPUs that move alike. It has three lanes: compute, send, receive. A lane does one
operation at a time, in an order that is fixed before anything runs.
- An operation holds up to four lanes at once: a computation its group's compute lane; a transfer its
sender's send lane and its receiver's receive lane; a collective inside a group both of the group's own. In a
half-duplex schedule a transfer holds both lanes of both its groups, so that a group does not send while it
receives. The sender's send lane comes first, the receiver's receive lane last. A transfer that takes no time
holds none once schedule_drop_instant has been called.
- An operation starts when its dependencies are done and it is first on all its lanes. Nothing else decides.
- Dependencies point to operations added before, so they alone can't form a cycle; orders can, and the
validator says so.
- An activation is memory on each GPU of a group, from the start of the operation that produces it to the end
of the one that frees it. Peaks are read off the schedule's timeline, never from a formula.

Life of a schedule: schedule_new → schedule_group, schedule_operation, … → (schedule_fix_order on lanes whose
order the generator knows) → schedule_arrange, which fixes the order of all lanes → schedule_validate →
schedule_replay.
*/
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "base/base.h"

enum kind {
    KIND_ATTENTION,
    KIND_FFN,
    KIND_DISPATCH,
    KIND_COMBINE,
    KIND_P2P,
    KIND_EMBED,
    KIND_HEAD,
    KIND_GRAD_SYNC,
    KIND_PARAM_GATHER,
    KIND_OPTIMIZER,
    KIND_COUNT
};
#define KIND_CHOICES "attention|ffn|dispatch|combine|p2p|embed|head|grad_sync|param_gather|optimizer"
enum pass { PASS_FORWARD, PASS_RECOMPUTE, PASS_BACKWARD, PASS_WEIGHT, PASS_COUNT };
#define PASS_CHOICES "forward|recompute|backward|weight"
enum resource { RESOURCE_COMPUTE, RESOURCE_SEND, RESOURCE_RECV, RESOURCE_COUNT };
#define RESOURCE_CHOICES "compute|send|recv"

#define MAX_LANES 4

struct operation {
    uint8_t kind, pass;
    uint8_t lane_count;
    int16_t chunk, chunks; /* token chunk: 0 of 1 when not chunked */
    int layer; /* −1 where it belongs to no layer (optimizer, …); of p2p, the layer whose output, or the
                  gradient of it, is sent */
    int micro_batch; /* −1 likewise */
    int lanes[MAX_LANES];
    int first_dep, dep_count; /* in schedule.deps */
    int64_t priority;         /* smaller goes first, on lanes without a given order */
    double duration;          /* seconds under the cost source in use */
    double bytes;             /* that each sending GPU moves; 0 for computation */
    double gather;            /* seconds of a computation's duration that are a collective within its group */
};

struct group {
    const char *name; /* "A0", "stage 3" */
    int gpus;
    double static_bytes; /* parameters, gradients, optimizer state of a GPU */
};

/* What an activation holds: an executor finds its buffers by it. T tokens, H hidden; copies as received. */
enum role {
    ROLE_OTHER,
    ROLE_LAYER_INPUT,        /* residual stream (T, H) that enters the layer */
    ROLE_ATTENTION,          /* attention's internals */
    ROLE_SENT,               /* what dispatch sends (T, H), where the internals are dropped before it */
    ROLE_EXPERT_INPUT,       /* copies received (copies, H) */
    ROLE_FFN,                /* the feed-forward part's internals */
    ROLE_EXPERT_OUTPUT,      /* (copies, H), until combine has sent them */
    ROLE_OUTPUT_GRADIENT,    /* of the copies' outputs (copies, H) */
    ROLE_INPUT_GRADIENT,     /* of the copies (copies, H), until dispatch's backward has sent them */
    ROLE_MIDDLE_GRADIENT,    /* of what dispatch sent (T, H) */
    ROLE_RESTORED_FFN,       /* internals that are not kept, while they are there */
    ROLE_RESTORED_ATTENTION, /* likewise */
    ROLE_GATHERED,           /* keys and values of whole sequences; beside them in backward their gradients */
    ROLE_HEAD_INPUT,         /* final residual stream; its layer is the number of layers */
    ROLE_COUNT
};

struct activation {
    int group;
    int producer, freed_by; /* operations */
    double bytes;           /* on each GPU of the group */
    uint8_t role;
    int layer, micro_batch;
};

struct lane {
    int *ops; /* in execution order, once arranged */
    int count;
    bool given; /* the generator fixed its order */
};

struct schedule {
    struct operation *ops;
    int op_count, op_capacity;
    int *deps;
    int dep_count, dep_capacity;
    struct group *groups;
    int group_count;
    struct activation *activations;
    int activation_count, activation_capacity;
    struct read *reads; /* (activation, operation): who uses an activation between producer and end */
    int read_count, read_capacity;
    struct lane *lanes; /* 3 × group_count */
    int lane_count;
    int *sequence; /* all operations in an order in which they may be executed, once arranged */
    int *ended;    /* in the order in which the list-scheduler saw them end; NULL before */
    int layers, micro_batches;
    bool patient;     /* the list-scheduler keeps a lane free for its most urgent ready operation */
    bool justified;   /* the order it finds is improved by justification; no lane has a given order then */
    bool half_duplex; /* a group sends or receives; set before transfers are added */
    struct arena *arena;
};

struct read {
    int activation, operation;
};

/* ---- building ---------------------------------------------------------------------------------------- */

struct schedule *schedule_new(int groups, int layers, int micro_batches);
void schedule_free(struct schedule *schedule);
void schedule_group(struct schedule *schedule, int group, int gpus, double static_bytes, const char *name,
                    ...) __attribute__((format(printf, 5, 6)));

static inline int lane_of(int group, enum resource resource) {
    return RESOURCE_COUNT * group + (int)resource;
}

/* Adds an operation without dependencies that holds the compute lane of `group`; returns its id. */
int schedule_compute(struct schedule *schedule, enum kind kind, enum pass pass, int layer, int micro_batch,
                     int group, double duration);
/* … that holds the send lane of `from` and the receive lane of `to` (a collective when they are the same),
   and the other two of these groups in a half-duplex schedule. */
int schedule_transfer(struct schedule *schedule, enum kind kind, enum pass pass, int layer, int micro_batch,
                      int from, int to, double duration, double bytes);
/* Part of its tokens that the operation added last is about: number `chunk` of `chunks`. */
void schedule_chunk(struct schedule *schedule, int chunk, int chunks);
/* Seconds of the duration of the operation added last that are a collective within its group. */
void schedule_gather(struct schedule *schedule, double seconds);
/* The operation added last waits for `on` as well; −1: nothing to wait for. */
void schedule_after(struct schedule *schedule, int on);
/* Priority of the operation added last. */
void schedule_priority(struct schedule *schedule, int64_t priority);

/* Memory on each GPU of `group` from `producer` on; returns the activation's id. 0 bytes are recorded as
 * well. */
int schedule_keep(struct schedule *schedule, int group, int producer, double bytes);
/* What the activation added last is, of which layer and micro-batch; ROLE_OTHER of none until said. */
void schedule_role(struct schedule *schedule, enum role role, int layer, int micro_batch);
void schedule_reads(struct schedule *schedule, int activation, int op);
void schedule_release(struct schedule *schedule, int activation, int op); /* reads it, then frees it */

/* The order of a lane, given by the generator: all operations that hold it. The array is copied. */
void schedule_fix_order(struct schedule *schedule, int lane, const int *ops, int count);

/* Takes the lanes from transfers that take no time: they wait for nothing but their dependencies. For
   executors that move no real bytes; before an order is fixed or found for the lanes that transfers hold. */
void schedule_drop_instant(struct schedule *schedule);
static inline bool operation_is_transfer(const struct operation *op) {
    return op->lane_count != 1;
}

/* ---- ordering ---------------------------------------------------------------------------------------- */

struct timeline {
    double *start, *end; /* of each operation, seconds */
    double makespan;
};
void timeline_free(struct timeline *timeline);

/* The priority list-scheduler: simulates with the planned durations; whenever a lane is free it starts the
   ready operation of smallest (priority, id) whose lanes are all free (patient: of all, when its lanes are),
   or, on a lane with a given order, only the next one. Records the order it found on every lane. False when
   given orders dead-lock (schedule_validate names the cycle). */
bool schedule_arrange(struct schedule *schedule, struct timeline *timeline);
/* The same, but gives up (false, no order recorded) as soon as some lane cannot end before `limit` seconds.
 */
bool schedule_arrange_before(struct schedule *schedule, double limit, struct timeline *timeline);
/* One pass alone: no justification. */
bool schedule_arrange_once(struct schedule *schedule, double limit, struct timeline *timeline);

/* Recomputes start and end from orders and dependencies alone. False when they contain a cycle. */
bool schedule_replay(struct schedule *schedule, struct timeline *timeline);

/* ---- checking ---------------------------------------------------------------------------------------- */

/* Everything a schedule must hold: no cycle of orders and dependencies (the cycle is printed), every
   operation on the orders of exactly its lanes, attention and ffn of every (layer, micro-batch, forward and
   backward) present exactly once per chunk, no activation used before it exists or after it is freed. All
   faults are added; true when none. */
bool schedule_validate(const struct schedule *schedule, struct errors *errors);

/* ---- reading off ------------------------------------------------------------------------------------- */

/* Peak bytes on a GPU of each group over the step, static bytes included; peaks has group_count entries. */
void schedule_memory_peaks(const struct schedule *schedule, const struct timeline *timeline, double *peaks);
/* Bytes on a GPU of one group over time: points (seconds, bytes), in order. Returns their number;
 * free(*points). */
struct memory_point {
    double time, bytes;
};
int schedule_memory_timeline(const struct schedule *schedule, const struct timeline *timeline, int group,
                             struct memory_point **points);
/* Busy seconds of each lane. */
void schedule_busy(const struct schedule *schedule, double *busy);
/* Of the gap `from` … `to` in which an operation waits, the part in which a transfer it depends on is in
 * progress. */
double schedule_exposed(const struct schedule *schedule, const struct timeline *timeline, int op, double from,
                        double to);
/* Seconds in which a group sends or receives: its lanes, and collectives within its computations. */
double schedule_communication(const struct schedule *schedule, const struct timeline *timeline, int group);
/* Longest chain of dependencies, lanes aside, in seconds: no execution can be shorter. */
double schedule_critical_path(const struct schedule *schedule);

const char *operation_label(const struct schedule *schedule, int op, char *buffer, size_t size);

/* ---- showing ----------------------------------------------------------------------------------------- */

/* The object of design.md: {"makespan_s", "lanes", "ops"}. */
void schedule_write_json(const struct schedule *schedule, const struct timeline *timeline, FILE *stream);
/* Lanes as rows, time from left to right, at most `columns` wide; digits are micro-batches. */
void schedule_draw(const struct schedule *schedule, const struct timeline *timeline, int columns,
                   FILE *stream);
/* Chrome trace JSON (Perfetto opens it): one named track a lane, and a memory counter a group. */
bool schedule_write_trace(const struct schedule *schedule, const struct timeline *timeline, const char *title,
                          const char *file, struct errors *errors);

#endif
