/*
Both systems by closed form: what one micro-batch takes on its way through every layer at every level of
recomputation, what links, context parallelism, gradient reduction and the head add to a step, and where the
paper's ring waits for its slowest group.

Under a table of costs all durations are whole seconds, so that sums are exact. Everything runs from the
repository's root, whose cluster file lends its rates.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "disagmoe/placement.h"
#include "sim/sim.h"
#include "tests/cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXACT 1e-9
#define HIDDEN 256
#define SEQ_LEN 1024
#define TOP_K 2

/* ---- help -------------------------------------------------------------------------------------------- */

struct run {
    struct experiment experiment;
    struct result result;
    struct schedule *schedule;
    struct timeline timeline;
};

/* A small model on nodes × gpus_per_node GPUs; `rest` ends the manifest, whose layout must be whole. */
struct shape {
    int layers, dense, nodes, gpus_per_node;
    const char *sweep; /* single values that are set, each with a comma ahead; NULL: none */
};

static char *manifest_of(struct shape shape, const char *rest) {
    struct text text = {0};
    text_add(&text,
             "{\"model\":{\"name\":\"plain\",\"layers\":%d,\"hidden\":%d,\"vocab\":1000,\"attention\":{"
             "\"heads\":4,\"kv_heads\":2,\"head_dim\":64},\"moe\":{\"experts\":16,\"top_k\":%d,"
             "\"expert_hidden\":512,\"dense_layers\":%d,\"dense_hidden\":%d}},",
             shape.layers, HIDDEN, TOP_K, shape.dense, shape.dense ? 768 : 0);
    text_add(&text,
             "\"cluster\":\"clusters/h800-16x8.json\",\"systems\":[\"megatron\",\"disagmoe\"],\"seq_len\":%d,"
             "\"sweep\":{\"cluster.nodes\":[%d],\"cluster.gpus_per_node\":[%d],\"cluster.nics_per_node\":"
             "[%d]%s},\"order\":{\"wave\":64,\"waves_in_flight\":1,\"prefer\":\"backward\",\"patient\":false,"
             "\"justified\":false},%s}",
             SEQ_LEN, shape.nodes, shape.gpus_per_node, shape.gpus_per_node, shape.sweep ? shape.sweep : "",
             rest);
    return text.text;
}

static struct run run_system(const char *name, struct shape shape, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static struct run run_system(const char *name, struct shape shape, const char *format, ...) {
    char rest[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(rest, sizeof rest, format, arguments);
    va_end(arguments);
    struct run run = {0};
    struct errors errors = {0};
    struct plan plan;
    bool feasible = false;
    char *text = manifest_of(shape, rest);
    if (!experiment_read_text(text, "experiments/test.json", &run.experiment, &errors) ||
        !tune_point(system_named(name), &run.experiment.points[0], &plan, &feasible, &errors))
        fail_msg("%s in %s", errors.messages[0], text);
    free(text);
    assert_true(feasible);
    simulate_plan(system_named(name), &plan, &run.result, &run.schedule, &run.timeline);
    if (!schedule_validate(run.schedule, &errors)) fail_msg("%s", errors.messages[0]);
    return run;
}

static void run_free(struct run *run) {
    schedule_free(run->schedule);
    timeline_free(&run->timeline);
    experiment_free(&run->experiment);
}

/* When the last micro-batch is through: the step's end aside. */
static double turned_and_free(struct run run) {
    double last = 0;
    for (int i = 0; i < run.schedule->op_count; i++)
        if (run.schedule->ops[i].kind == KIND_EMBED) last = fmax(last, run.timeline.end[i]);
    run_free(&run);
    return last;
}

static double step_and_free(struct run run) {
    double seconds = run.result.step_time;
    run_free(&run);
    return seconds;
}

/* Operations of a kind and pass; their durations summed. */
static int count_ops(const struct run *run, enum kind kind, enum pass pass, double *seconds) {
    int count = 0;
    double sum = 0;
    for (int i = 0; i < run->schedule->op_count; i++) {
        const struct operation *op = &run->schedule->ops[i];
        if (op->kind != kind || op->pass != pass) continue;
        count++;
        sum += op->duration;
    }
    if (seconds) *seconds = sum;
    return count;
}

/* ---- one micro-batch, every level -------------------------------------------------------------------- */

enum {
    A_FWD = 3,
    A_BWD = 5 + 2, /* input and weight halves */
    F_FWD = 7,
    F_BWD = 11 + 4,
    DISPATCH = 13,
    COMBINE = 17,
    P2P = 19,
    EMBED_FWD = 1,
    EMBED_BWD = 2,
    HEAD = 6 + 9,
    END = 23 + 31 + 29 /* reduction, optimizer, gathering */
};
#define COSTS                                                                                                \
    "\"costs\":{\"attn_fwd_s\":3,\"attn_bwd_s\":5,\"attn_wgrad_s\":2,\"ffn_fwd_s\":7,\"ffn_bwd_s\":11,"      \
    "\"ffn_wgrad_s\":4,\"dispatch_s\":13,\"combine_s\":17,\"p2p_s\":19,\"embed_fwd_s\":1,"                   \
    "\"embed_bwd_s\":2,\"head_fwd_s\":6,\"head_bwd_s\":9,\"grad_sync_s\":23,\"optimizer_s\":31,"             \
    "\"param_gather_s\":29}"

struct level {
    int attention, ffn, layers; /* 0: all */
    bool resend;
};

static const char *const attention_words[] = {"none", "norms", "projections", "full"};
static const char *const ffn_words[] = {"none", "activation", "full"};

static void level_text(struct level level, char *text, size_t size) {
    char layers[32] = "";
    if (level.layers) snprintf(layers, sizeof layers, ",\"layers\":%d", level.layers);
    snprintf(text, size,
             "\"memory\":{\"recompute\":{\"attention\":\"%s\",\"ffn\":\"%s\"%s},\"expert_input\":\"%s\"}",
             attention_words[level.attention], ffn_words[level.ffn], layers,
             level.resend ? "resend" : "keep");
}

/* Whether the layer that is number `index` of its stage or group recomputes: then full[] says what of it a
   table of costs knows the time of. */
static void full_sides(struct level level, int index, bool full[2]) {
    bool recomputes = level.layers == 0 || index < level.layers;
    full[0] = recomputes && level.attention == ATTENTION_FULL;
    full[1] = recomputes && level.ffn == FFN_FULL;
}

/* A pipelined layer does one thing after the other. */
static double pipelined_layer(struct level level, int index, bool moe) {
    bool full[2], both;
    full_sides(level, index, full);
    both = full[0] && full[1];
    double seconds = A_FWD + F_FWD + A_BWD + F_BWD + full[0] * A_FWD + full[1] * F_FWD;
    if (!moe) return seconds;
    seconds += 2 * (DISPATCH + COMBINE) + both * COMBINE;
    return seconds + (level.resend || both) * DISPATCH;
}

/* Two stages of two chunks, or one stage: layers in order of the chunks, the earlier ones fuller. */
static double megatron_seconds(struct level level, int layers, int dense, int pp, int vpp) {
    double seconds = EMBED_FWD + EMBED_BWD + HEAD + END + 2 * P2P * (pp > 1 ? pp * vpp - 1 : 0);
    int first = 0, here[2] = {0};
    for (int c = 0; c < pp * vpp; c++) {
        int count = layers / (pp * vpp);
        for (int l = first; l < first + count; l++)
            seconds += pipelined_layer(level, here[c % pp]++, l >= dense);
        first += count;
    }
    return seconds;
}

static void check_megatron_chain(struct level level, int dense, int pp, int vpp) {
    char memory[160];
    level_text(level, memory, sizeof memory);
    struct run run = run_system("megatron", (struct shape){8, dense, 1, 2, NULL},
                                "\"micro_batches\":%d,\"parallel\":{\"pp\":%d,\"vpp\":%d,\"ep\":1},%s," COSTS,
                                pp > 1 && vpp > 1 ? pp : 1, pp, vpp, memory);
    if (pp == 1 || vpp == 1)
        assert_within(run.result.step_time, megatron_seconds(level, 8, dense, pp, vpp), EXACT);
    if (pp == 1) {
        struct bound bound = plan_bound(run.result.system, &run.result.plan);
        assert_within(bound.busy, run.result.step_time - END, EXACT);
    }
    bool full[2];
    int again[2] = {0}, per_stage = 8 / pp, micro_batches = run.result.plan.micro_batches;
    for (int i = 0; i < per_stage; i++) {
        full_sides(level, i, full);
        for (int side = 0; side < 2; side++) again[side] += pp * full[side] * micro_batches;
    }
    double seconds[2];
    count_ops(&run, KIND_ATTENTION, PASS_RECOMPUTE, &seconds[0]);
    count_ops(&run, KIND_FFN, PASS_RECOMPUTE, &seconds[1]);
    assert_true(seconds[0] == again[0] * A_FWD && seconds[1] == again[1] * F_FWD);
    run_free(&run);
}

/* Patient: a greedy port would rather reduce a group's gradients than wait for the receiver of its last
   message. The output's gradient is at the next group at `now`: when the input's is at this layer's. Dispatch
   and combine come in by one port: whichever is ready first goes first. */
static double ring_back(struct level level, int index, double now) {
    bool full[2];
    full_sides(level, index, full);
    bool again = level.resend || (full[0] && full[1]);
    double restored = now + full[0] * A_FWD, arrived = now + COMBINE, experts = now;
    if (again && full[0]) {
        experts = fmax(restored, arrived) + DISPATCH;
    } else if (again) {
        experts = now + DISPATCH;
        arrived = experts + COMBINE;
    }
    if (full[1]) experts += F_FWD;
    double back = fmax(arrived, experts) + F_BWD + DISPATCH;
    return fmax(back, restored) + A_BWD;
}

static void check_ring_chain(struct level level, int p, int dense) {
    char memory[160];
    level_text(level, memory, sizeof memory);
    struct run run =
        run_system("disagmoe", (struct shape){6, dense, 1, 8, ",\"order.patient\":[true]"},
                   "\"micro_batches\":1,\"parallel\":{\"groups\":%d,\"attn_gpus\":1,\"ffn_gpus\":1},"
                   "\"placement\":\"mixed-nodes\",%s," COSTS,
                   p, memory);
    double now = EMBED_FWD + 6 * (A_FWD + DISPATCH + F_FWD + COMBINE) + HEAD;
    for (int l = 5; l >= 0; l--) now = ring_back(level, l / p, now);
    assert_within(run.result.step_time, now + EMBED_BWD + END, EXACT);
    struct bound bound = plan_bound(run.result.system, &run.result.plan);
    bool waits =
        level.resend || (level.attention == ATTENTION_FULL && level.ffn == FFN_FULL); /* for a port */
    assert_true(bound.busy <= now + EMBED_BWD);
    if (!waits) assert_within(bound.busy, now + EMBED_BWD, EXACT);
    run_free(&run);
}

static void test_every_level(void **state) {
    (void)state;
    for (int attention = 0; attention <= ATTENTION_FULL; attention++)
        for (int ffn = 0; ffn <= FFN_FULL; ffn++)
            for (int resend = 0; resend < 2; resend++)
                for (int layers = 0; layers < 3; layers++) {
                    struct level level = {attention, ffn, layers, resend};
                    if (layers && !attention && !ffn) continue;
                    check_megatron_chain(level, 0, 1, 1);
                    check_megatron_chain(level, 3, 1, 1);
                    check_megatron_chain(level, 2, 2, 2);
                    check_megatron_chain(level, 2, 2, 4);
                    check_ring_chain(level, 1, 0);
                    check_ring_chain(level, 2, 1);
                    check_ring_chain(level, 3, 0);
                }
}

/* Two stages, one micro-batch: through both and back, a message each way. One stage, several micro-batches:
   each behind the other, since all-to-alls are not overlapped. */
static void test_pipelined_transfers(void **state) {
    (void)state;
    struct level none = {0};
    for (int dense = 0; dense <= 4; dense += 2) {
        double layer = pipelined_layer(none, 0, true), plain = pipelined_layer(none, 0, false);
        double ends = EMBED_FWD + EMBED_BWD + HEAD, layers = dense * plain + (4 - dense) * layer;
        double two = step_and_free(
            run_system("megatron", (struct shape){4, dense, 1, 2, NULL},
                       "\"micro_batches\":1,\"parallel\":{\"pp\":2,\"vpp\":1,\"ep\":1}," COSTS));
        assert_within(two, ends + layers + 2 * P2P + END, EXACT);
        double several = step_and_free(
            run_system("megatron", (struct shape){4, dense, 1, 2, NULL},
                       "\"micro_batches\":5,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":1}," COSTS));
        assert_within(several, 5 * (ends + layers) + END, EXACT);
    }
}

/* ---- transfers of no duration ------------------------------------------------------------------------ */

static double without_transfers(const char *system, int layers, int dense, int pp, int micro_batches,
                                const char *memory) {
    return step_and_free(run_system(
        system, (struct shape){layers, dense, 1, 8, NULL},
        "\"micro_batches\":%d,\"parallel\":{\"pp\":%d,\"vpp\":%d,\"ep\":1,\"groups\":%d,\"attn_gpus\":1,"
        "\"ffn_gpus\":1},\"placement\":\"mixed-nodes\",%s,\"costs\":{\"attn_fwd_s\":0.3,\"attn_bwd_s\":0.7,"
        "\"ffn_fwd_s\":0.4,\"ffn_bwd_s\":1.1,\"p2p_s\":2.9,\"embed_fwd_s\":0.1,\"embed_bwd_s\":0.2,"
        "\"head_fwd_s\":0.5,\"head_bwd_s\":0.6}",
        micro_batches, pp, micro_batches % pp ? 1 : 2, pp, memory));
}

/* Layers of experts whose dispatch and combine cost nothing take exactly as long as dense ones, however long
   the messages between stages hold the ports. */
static void test_instant_transfers(void **state) {
    (void)state;
    static const struct level levels[] = {
        {0}, {ATTENTION_FULL, FFN_FULL, 0, false}, {ATTENTION_NORMS, 0, 1, true}};
    for (size_t i = 0; i < COUNT(levels); i++)
        for (int pp = 1; pp <= 4; pp++)
            for (int m = 1; m <= 8; m += 1 + m / 2)
                for (int k = 0; k < 2; k++) {
                    char memory[160];
                    const char *system = k ? "disagmoe" : "megatron";
                    level_text(levels[i], memory, sizeof memory);
                    double dense = without_transfers(system, 8, 8, pp, m, memory);
                    assert_within(without_transfers(system, 8, 0, pp, m, memory), dense, EXACT);
                    assert_within(without_transfers(system, 8, 3, pp, m, memory), dense, EXACT);
                }
}

/* ---- links ------------------------------------------------------------------------------------------- */

#define SLOWER ",\"cluster.rates.nic_exchange.value\":[22.3e9]"
#define RATE 44.6e9 /* of the cluster file; half of it is slower */

/* A way through all layers on links of half the rate is longer by the bytes that one NIC carries, of every
 * transfer in turn. */
static void check_slower(const char *system, struct shape shape, const char *rest, double bytes) {
    double before = turned_and_free(run_system(system, shape, "%s", rest));
    shape.sweep = SLOWER;
    double after = turned_and_free(run_system(system, shape, "%s", rest));
    assert_within(after - before, bytes / RATE, 1e-6);
}

static void test_slower_links(void **state) {
    (void)state;
    double token = HIDDEN * 2, copies = SEQ_LEN * TOP_K * token;
    /* Two GPUs on two nodes: half of the copies leave, four times a layer of experts and micro-batch. */
    const char *one_stage = "\"micro_batches\":3,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":2},\"memory\":{}";
    check_slower("megatron", (struct shape){5, 0, 2, 1, NULL}, one_stage, 3 * 5 * 4 * copies / 2);
    check_slower("megatron", (struct shape){5, 2, 2, 1, NULL}, one_stage, 3 * 3 * 4 * copies / 2);
    /* Sent again for a full recomputation, with the combine; for resend, alone. */
    check_slower(
        "megatron", (struct shape){5, 0, 2, 1, NULL},
        "\"micro_batches\":3,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":2},\"memory\":{\"recompute\":\"full\"}",
        3 * 5 * 6 * copies / 2);
    check_slower(
        "megatron", (struct shape){5, 0, 2, 1, NULL},
        "\"micro_batches\":3,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":2},\"memory\":{\"expert_input\":"
        "\"resend\"}",
        3 * 5 * 5 * copies / 2);
    /* Two stages of one GPU: the residual stream there, its gradient back. */
    check_slower("megatron", (struct shape){4, 0, 2, 1, NULL},
                 "\"micro_batches\":1,\"parallel\":{\"pp\":2,\"vpp\":1,\"ep\":1},\"memory\":{}",
                 2 * SEQ_LEN * token);
    /* One group: all copies leave, but for the last combine, which goes to the head on the same GPU. */
    check_slower(
        "disagmoe", (struct shape){5, 0, 2, 1, NULL},
        "\"micro_batches\":1,\"parallel\":{\"groups\":1,\"attn_gpus\":1,\"ffn_gpus\":1},\"memory\":{},"
        "\"placement\":\"split-nodes\"",
        (2 * 5 + 2 * 4) * copies);
    /* Two groups, all on nodes of their own; the last layer's output stays. A dense layer has one copy. */
    check_slower(
        "disagmoe", (struct shape){5, 1, 4, 1, NULL},
        "\"micro_batches\":1,\"parallel\":{\"groups\":2,\"attn_gpus\":1,\"ffn_gpus\":1},\"memory\":{},"
        "\"placement\":\"split-nodes\"",
        (2 * 4 + 2 * 3) * copies + 4 * SEQ_LEN * token);
}

/* ---- context parallelism ----------------------------------------------------------------------------- */

/* Runs of two GPUs on one node or on two. The time of the collectives is the step's difference to one whose
   links have no end of bandwidth and no latency. */
static void check_gathers(const char *system, const char *layout, int nodes, int gpus_per_node, bool full) {
    bool far = nodes == 4 || (nodes == 2 && gpus_per_node == 1);
    double bytes = SEQ_LEN * 2.0 * 2 * 64 * 2; /* keys and values of 2 heads of 64, in BF16 */
    double g = far ? bytes / 2 / 45e9 + 9.6e-6 : bytes / 2 / 164e9 + 3.4e-6;
    struct run run =
        run_system(system, (struct shape){1, 0, nodes, gpus_per_node, NULL},
                   "\"global_batch\":3,%s,\"memory\":{\"recompute\":{\"attention\":\"%s\",\"ffn\":"
                   "\"none\"}},\"placement\":\"split-nodes\"",
                   layout, full ? "full" : "projections");
    struct run quick = run_system(
        system,
        (struct shape){1, 0, nodes, gpus_per_node,
                       ",\"cluster.nic.bytes_per_s\":[1e21],\"cluster.nvlink.bytes_per_s\":[1e21],\"cluster."
                       "rates.nic_reduce.value\":[1e21],\"cluster.rates.nvlink_reduce.value\":[1e21],"
                       "\"cluster.nic.latency_s\":[0],\"cluster.nvlink.latency_s\":[0]"},
        "\"global_batch\":3,%s,\"memory\":{\"recompute\":{\"attention\":\"%s\",\"ffn\":\"none\"}},"
        "\"placement\":\"split-nodes\"",
        layout, full ? "full" : "projections");
    assert_int_equal(run.result.plan.micro_batches, 3); /* one sequence in each */
    assert_int_equal(run.schedule->op_count, quick.schedule->op_count);
    int gathered = 0;
    for (int i = 0; i < run.schedule->op_count; i++) {
        const struct operation *op = &run.schedule->ops[i], *same = &quick.schedule->ops[i];
        double times = 0;
        if (op->kind == KIND_ATTENTION)
            times = op->pass == PASS_FORWARD ? 1 : op->pass == PASS_BACKWARD ? 2 : full;
        assert_within(op->gather, times * g, EXACT);
        if (op->lane_count == 1 && op->layer >= 0)
            assert_true(fabs(op->duration - same->duration - times * g) < 1e-6 * op->duration + 1e-15);
        if (op->kind == KIND_DISPATCH)
            assert_true(op->bytes == SEQ_LEN / 2 * TOP_K * HIDDEN * 2 || op->pass != PASS_FORWARD);
    }
    for (int i = 0; i < run.schedule->activation_count; i++) {
        const struct activation *it = &run.schedule->activations[i];
        if (it->role != ROLE_GATHERED) continue;
        bool backward = run.schedule->ops[it->producer].pass == PASS_BACKWARD;
        assert_true(it->bytes == (backward ? 2 : 1) * bytes && it->freed_by == it->producer);
        assert_int_equal(run.schedule->ops[it->producer].kind, KIND_ATTENTION);
        gathered++;
    }
    assert_int_equal(gathered, 3 * (2 + full));
    run_free(&run);
    run_free(&quick);
}

static void test_context_parallelism(void **state) {
    (void)state;
    for (int full = 0; full < 2; full++) {
        static const char stage[] = "\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":2,\"cp\":2}";
        static const char ring[] = "\"parallel\":{\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":2,\"cp\":2}";
        check_gathers("megatron", stage, 1, 2, full);
        check_gathers("megatron", stage, 2, 1, full);
        check_gathers("disagmoe", ring, 2, 2, full);
        check_gathers("disagmoe", ring, 4, 1, full);
    }
}

/* On one stage nothing overlaps: all communication is transfers and collectives, one after the other. */
static void test_communication_in_all(void **state) {
    (void)state;
    struct run run = run_system("megatron", (struct shape){3, 1, 2, 1, NULL},
                                "\"micro_batches\":2,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":2,\"cp\":2},"
                                "\"memory\":{}");
    double seconds = 0;
    for (int i = 0; i < run.schedule->op_count; i++) {
        const struct operation *op = &run.schedule->ops[i];
        seconds += operation_is_transfer(op) ? op->duration : op->gather;
    }
    assert_within(run.result.comm_total, seconds, EXACT);
    run_free(&run);
}

/* ---- the step's end ---------------------------------------------------------------------------------- */

/* Two replicas whose GPUs stand on nodes of their own: what both hold of `parameters` in `shards` kinds is
   reduced round a ring of two, half of it through each NIC in each of two rounds. */
struct end {
    double sync, gather, optimizer;
};

static struct end end_of(double parameters, int shards, bool zero, bool narrow_grads, bool narrow_moments,
                         bool offload) {
    double grads = narrow_grads ? 2 : 4, moments = narrow_moments ? 4 : 8, latency = shards * 9.6e-6;
    double round = parameters * grads / 2 / 45e9 + latency, updated = zero ? parameters / 2 : parameters;
    struct end end = {.sync = zero ? round : 2 * round};
    if (zero) end.gather = parameters * 2 / 2 / 45e9 + latency;
    end.optimizer = updated * (grads + 2 * (4 + moments) + 2) / 2.68e12 + 5e-6;
    if (offload) end.optimizer = fmax(updated * fmax(grads, 2) / 50e9, updated / 1.8e9);
    return end;
}

static double duration_on(const struct run *run, enum kind kind, int group) {
    double seconds = 0;
    for (int i = 0; i < run->schedule->op_count; i++) {
        const struct operation *op = &run->schedule->ops[i];
        if (op->kind == kind && op->lane_count && op->lanes[0] / RESOURCE_COUNT == group)
            seconds += op->duration;
    }
    return seconds;
}

static void assert_end(const struct run *run, int group, struct end end) {
    assert_within(duration_on(run, KIND_GRAD_SYNC, group), end.sync, EXACT);
    assert_within(duration_on(run, KIND_PARAM_GATHER, group), end.gather, EXACT);
    assert_within(duration_on(run, KIND_OPTIMIZER, group), end.optimizer, EXACT);
}

/* When a group has done all that is of some micro-batch, its ports included. */
static double ready_of(const struct run *run, int group) {
    double ready = 0;
    for (int lane = lane_of(group, RESOURCE_COMPUTE); lane <= lane_of(group, RESOURCE_RECV); lane++)
        for (int i = 0; i < run->schedule->lanes[lane].count; i++) {
            int op = run->schedule->lanes[lane].ops[i];
            if (run->schedule->ops[op].micro_batch >= 0) ready = fmax(ready, run->timeline.end[op]);
        }
    return ready;
}

static void check_end(int zero, int grads, int moments, int offload) {
    char memory[160];
    snprintf(memory, sizeof memory,
             "\"memory\":{\"zero\":%d,\"grads\":\"%s\",\"moments\":\"%s\",\"offload\":%s}", zero,
             grads ? "bf16" : "fp32", moments ? "bf16" : "fp32", offload ? "true" : "false");
    struct run run = run_system("megatron", (struct shape){3, 0, 2, 1, NULL},
                                "\"micro_batches\":2,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":1},%s", memory);
    const struct model *model = run.experiment.points[0].model;
    double all = model_parameter_count(model).total;
    struct end end = end_of(all, 2, zero, grads, moments, offload);
    assert_end(&run, 0, end);
    /* The one GPU of a stage computes, then reduces, updates and gathers. */
    double work =
        run.result.breakdown.attention + run.result.breakdown.ffn + run.result.breakdown.other_compute;
    assert_within(run.result.step_time, work + end.sync + end.optimizer + end.gather, EXACT);
    assert_within(run.result.breakdown.exposed_comm, end.sync + end.gather, EXACT);
    assert_within(run.result.breakdown.optimizer, end.optimizer, EXACT);
    run_free(&run);
    run = run_system("disagmoe", (struct shape){3, 0, 4, 1, NULL},
                     "\"micro_batches\":2,\"parallel\":{\"groups\":1,\"attn_gpus\":1,\"ffn_gpus\":1},"
                     "\"placement\":\"split-nodes\",%s",
                     memory);
    model = run.experiment.points[0].model;
    double attention = model_embedding_parameters(model) +
                       3 * (model_attention_parameters(model) + model_router_parameters(model, 0));
    assert_end(&run, 0, end_of(attention, 1, zero, grads, moments, offload));
    /* Experts, head and the feed-forward norms, which are on both sides. */
    assert_end(&run, 1, end_of(all - attention + 3 * HIDDEN, 3, zero, grads, moments, offload));
    double last = 0;
    for (int g = 0; g < 2; g++) {
        struct end of =
            end_of(g ? all - attention + 3 * HIDDEN : attention, g ? 3 : 1, zero, grads, moments, offload);
        last = fmax(last, ready_of(&run, g) + of.sync + of.optimizer + of.gather);
    }
    assert_within(run.result.step_time, last, EXACT);
    run_free(&run);
}

static void test_step_end(void **state) {
    (void)state;
    for (int i = 0; i < 16; i++) check_end(i & 1, i >> 1 & 1, i >> 2 & 1, i >> 3);
}

/* Reduction round a ring of `count` GPUs on nodes of their own, and all-gather behind it. */
static double reduced(double parameters, int count) {
    double bytes = 4 * parameters;
    return count > 1 ? 2 * ((count - 1) * bytes / count / 45e9 + (count - 1) * 9.6e-6) : 0;
}

static void assert_holds(const struct run *run, int group, double parameters, double sync) {
    assert_within(run->schedule->groups[group].static_bytes, (2 + 4 + 4 + 8) * parameters, EXACT);
    assert_within(duration_on(run, KIND_GRAD_SYNC, group), sync, EXACT);
}

/* Two stages of two GPUs, twice: what a stage shares is on four, an expert on two, a tied embedding on all
   eight. */
static void check_stage_holders(bool tied) {
    struct run run =
        run_system("megatron", (struct shape){4, 1, 8, 1, tied ? ",\"model.tie_embeddings\":[true]" : NULL},
                   "\"micro_batches\":2,\"parallel\":{\"pp\":2,\"vpp\":1,\"ep\":2},\"memory\":{}");
    const struct model *model = run.experiment.points[0].model;
    double embedding = model_embedding_parameters(model);
    for (int stage = 0; stage < 2; stage++) {
        double shared = stage ? model_head_parameters(model) : tied ? 0 : embedding, experts = 0;
        for (int i = 0; i < run.schedule->op_count; i++) {
            const struct operation *op = &run.schedule->ops[i];
            if (op->kind != KIND_ATTENTION || op->pass != PASS_FORWARD || op->micro_batch ||
                op->lanes[0] != lane_of(stage, RESOURCE_COMPUTE))
                continue;
            shared += model_attention_parameters(model) + model_router_parameters(model, op->layer) +
                      model_shared_parameters(model, op->layer);
            if (op->layer > 0) experts += 8 * model_expert_parameters(model);
        }
        double sync = reduced(shared, 4) + reduced(experts, 2) + (tied ? reduced(embedding, 8) : 0);
        assert_holds(&run, stage, shared + experts + (tied ? embedding : 0), sync);
    }
    run_free(&run);
}

/* Two groups of m + n GPUs, twice. An F-GPU has its part of the experts; the head is on one group or on both.
 */
static void check_ring_holders(int m, int n, bool tied, bool all) {
    struct run run = run_system(
        "disagmoe", (struct shape){4, 0, 4 * (m + n), 1, tied ? ",\"model.tie_embeddings\":[true]" : NULL},
        "\"micro_batches\":2,\"parallel\":{\"groups\":2,\"attn_gpus\":%d,\"ffn_gpus\":%d},\"memory\":{},"
        "\"placement\":\"split-nodes\",\"head\":\"%s\"",
        m, n, all ? "all-ffn" : "last-ffn");
    const struct model *model = run.experiment.points[0].model;
    double embedding = model_embedding_parameters(model), head = model_head_parameters(model);
    int heads = all ? 2 : 1, with_tied = 2 * (m + heads * n);
    for (int g = 0; g < 2; g++) {
        double attention = 2 * (model_attention_parameters(model) + model_router_parameters(model, 0));
        double experts = 2 * (16 / n) * model_expert_parameters(model), norms = 2 * HIDDEN;
        double tie = tied ? reduced(embedding, with_tied) : 0;
        if (g == 0 && !tied) attention += embedding;
        assert_holds(&run, g, attention + (g == 0 && tied ? embedding : 0),
                     reduced(attention, 2 * m) + (g == 0 ? tie : 0));
        bool here = all || g == 1;
        assert_holds(&run, 2 + g, norms + experts + here * (head + (tied ? embedding : 0)),
                     reduced(norms, 2 * n) + reduced(experts, 2) +
                         (here ? reduced(head, 2 * heads * n) + tie : 0));
    }
    run_free(&run);
}

static void test_who_holds_what(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        check_stage_holders(tied);
        for (int all = 0; all < 2; all++) {
            check_ring_holders(1, 1, tied, all);
            check_ring_holders(2, 1, tied, all);
            check_ring_holders(1, 2, tied, all);
        }
    }
}

/* ---- the head ---------------------------------------------------------------------------------------- */

/* On all groups: the last combine goes out in p parts, one behind the other, each group has its part of the
   work, and the parts' gradients come back one behind the other. */
static void test_head_on_all_groups(void **state) {
    (void)state;
    static const char costs[] =
        "\"costs\":{\"attn_fwd_s\":3,\"attn_bwd_s\":7,\"ffn_fwd_s\":7,\"ffn_bwd_s\":15,\"dispatch_s\":13,"
        "\"combine_s\":12,\"head_fwd_s\":120,\"head_bwd_s\":180}";
    for (int p = 1; p <= 4; p++)
        for (int all = 0; all < 2; all++) {
            struct run run = run_system("disagmoe", (struct shape){5, 0, 1, 8, NULL},
                                        "\"micro_batches\":1,\"parallel\":{\"groups\":%d,\"attn_gpus\":1,"
                                        "\"ffn_gpus\":1},\"memory\":{},"
                                        "\"placement\":\"mixed-nodes\",\"head\":\"%s\",%s",
                                        p, all ? "all-ffn" : "last-ffn", costs);
            int parts = all ? p : 1, last_group = p + 4 % p, seen = 0;
            double there = 5 * (3 + 13 + 7) + 4 * 12, back = 5 * (15 + 13 + 7) + 4 * 12;
            double turn = 12.0 * (parts + 1) / parts + 300.0 / parts;
            assert_within(run.result.step_time, there + turn + back, EXACT);
            assert_within(plan_bound(run.result.system, &run.result.plan).busy, there + turn + back, EXACT);
            for (int i = 0; i < run.schedule->op_count; i++) {
                const struct operation *op = &run.schedule->ops[i];
                bool head = op->kind == KIND_HEAD, of_last = op->kind == KIND_COMBINE && op->layer == 4;
                if (!head && !of_last) continue;
                assert_int_equal(op->chunks, parts);
                int group = all ? p + op->chunk : last_group;
                if (head) {
                    assert_int_equal(op->lanes[0], lane_of(group, RESOURCE_COMPUTE));
                    assert_within(op->duration, (op->pass == PASS_FORWARD ? 120.0 : 180.0) / parts, EXACT);
                } else {
                    bool forward = op->pass == PASS_FORWARD;
                    assert_int_equal(op->lanes[0], lane_of(forward ? last_group : group, RESOURCE_SEND));
                    assert_int_equal(op->lanes[1], lane_of(forward ? group : last_group, RESOURCE_RECV));
                    assert_within(op->duration, 12.0 / parts, EXACT);
                }
                seen++;
            }
            assert_int_equal(seen, 4 * parts);
            run_free(&run);
        }
}

/* A ring in which only the F-groups have work, one layer each, and the last the head: nothing comes faster
   than that one turns it round. */
static void test_ring_waits_for_its_head(void **state) {
    (void)state;
    double f = 1, b = 2, head = 1.5;
    for (int p = 1; p <= 4; p++)
        for (int m = 4; m <= 32; m += 14) {
            double seconds[2];
            for (int all = 0; all < 2; all++) {
                struct run run = run_system(
                    "disagmoe", (struct shape){p, 0, 1, 8, NULL},
                    "\"micro_batches\":%d,\"parallel\":{\"groups\":%d,\"attn_gpus\":1,\"ffn_gpus\":1},"
                    "\"placement\":\"mixed-nodes\",\"head\":\"%s\",\"costs\":{\"ffn_fwd_s\":1,\"ffn_bwd_s\":"
                    "2,"
                    "\"head_fwd_s\":0.5,\"head_bwd_s\":1}",
                    m, p, all ? "all-ffn" : "last-ffn");
                /* The lower bound knows as much of it. */
                struct bound bound = plan_bound(run.result.system, &run.result.plan);
                if (!all) assert_within(bound.busy, run.result.step_time, EXACT);
                seconds[all] = step_and_free(run);
            }
            assert_within(seconds[0], (p - 1) * (f + b) + m * (f + b + head), EXACT);
            if (p == 1) assert_true(seconds[1] == seconds[0]);
            assert_true(seconds[1] >= m * (f + b + head / p));
            if (p > 1 && m > 4) assert_true(seconds[1] < seconds[0]);
        }
}

/* Parameters of the head: on the last F-group alone, or on all of them. */
static void test_head_parameters(void **state) {
    (void)state;
    double bytes[2][6];
    struct run runs[2];
    for (int all = 0; all < 2; all++) {
        runs[all] =
            run_system("disagmoe", (struct shape){6, 0, 1, 8, NULL},
                       "\"micro_batches\":4,\"parallel\":{\"groups\":3,\"attn_gpus\":1,\"ffn_gpus\":1},"
                       "\"memory\":{},\"placement\":\"mixed-nodes\",\"head\":\"%s\"",
                       all ? "all-ffn" : "last-ffn");
        for (int g = 0; g < 6; g++) bytes[all][g] = runs[all].schedule->groups[g].static_bytes;
    }
    double head = model_head_parameters(runs[0].experiment.points[0].model) * (2 + 4 + 4 + 8);
    for (int g = 0; g < 6; g++) assert_within(bytes[1][g] - bytes[0][g], g == 3 || g == 4 ? head : 0, 1e-6);
    /* The work of a micro-batch's head is the same, but for what each part starts with: weights and launches.
     */
    double once, parts;
    assert_int_equal(count_ops(&runs[0], KIND_HEAD, PASS_FORWARD, &once), 4);
    assert_int_equal(count_ops(&runs[1], KIND_HEAD, PASS_FORWARD, &parts), 12);
    assert_true(parts >= once && parts < 3 * once);
    for (int all = 0; all < 2; all++) run_free(&runs[all]);
}

/* ---- recomputation in some of the layers ------------------------------------------------------------- */

static void check_some_layers(const char *system, struct level level) {
    double step[4], peak[4], again[4];
    for (int n = 0; n <= 3; n++) { /* three layers a stage or group */
        struct level some = level;
        some.layers = n;
        if (n == 0) some.attention = some.ffn = 0;
        char memory[160];
        level_text(some, memory, sizeof memory);
        struct run run =
            run_system(system, (struct shape){6, 0, 1, 8, NULL},
                       "\"micro_batches\":6,\"parallel\":{\"pp\":2,\"vpp\":1,\"ep\":2,\"groups\":2,"
                       "\"attn_gpus\":2,\"ffn_gpus\":2},\"placement\":\"mixed-nodes\",%s",
                       memory);
        step[n] = run.result.step_time;
        peak[n] = 0;
        double peaks[4];
        schedule_memory_peaks(run.schedule, &run.timeline, peaks);
        for (int g = 0; g < run.schedule->group_count; g++) peak[n] += peaks[g];
        double sides[2];
        count_ops(&run, KIND_ATTENTION, PASS_RECOMPUTE, &sides[0]);
        count_ops(&run, KIND_FFN, PASS_RECOMPUTE, &sides[1]);
        again[n] = sides[0] + sides[1];
        run_free(&run);
    }
    assert_true(again[0] == 0 && again[1] > 0);
    assert_within(again[2], 2 * again[1], EXACT);
    assert_within(again[3], 3 * again[1], EXACT);
    for (int n = 1; n <= 3; n++) {
        assert_true(peak[n] < peak[n - 1]);
        assert_true(step[n] > step[0] && step[n] <= step[0] + again[n]);
        if (strcmp(system, "megatron") == 0) assert_true(step[n] > step[n - 1]);
    }
}

static void test_some_layers(void **state) {
    (void)state;
    static const struct level levels[] = {{ATTENTION_NORMS, FFN_ACTIVATION, 0, false},
                                          {ATTENTION_PROJECTIONS, FFN_NONE, 0, false},
                                          {ATTENTION_NONE, FFN_FULL, 0, false},
                                          {ATTENTION_FULL, FFN_ACTIVATION, 0, false}};
    for (size_t i = 0; i < COUNT(levels); i++) {
        check_some_layers("megatron", levels[i]);
        check_some_layers("disagmoe", levels[i]);
    }
}

/* ---- bounds of time ---------------------------------------------------------------------------------- */

/* Where one kind of operation has all the time, the lanes that hold it decide, and the bound knows it;
   transfers, which hold two lanes at once, seldom fill theirs. */
static void test_busiest_lane(void **state) {
    (void)state;
    static const char *const costs[] = {"\"attn_fwd_s\":1,\"attn_bwd_s\":1,\"attn_wgrad_s\":1",
                                        "\"ffn_fwd_s\":1,\"ffn_bwd_s\":1,\"ffn_wgrad_s\":1",
                                        "\"dispatch_s\":1",
                                        "\"combine_s\":1",
                                        "\"embed_fwd_s\":1,\"embed_bwd_s\":2",
                                        "\"head_fwd_s\":1,\"head_bwd_s\":2"};
    for (size_t i = 0; i < COUNT(costs); i++)
        for (int p = 1; p <= 3; p++)
            for (int again = 0; again < 2; again++) {
                struct run run = run_system(
                    "disagmoe",
                    (struct shape){
                        6, 0, 1, 8,
                        ",\"order.justified\":[true],\"order.wave\":[1],\"order.waves_in_flight\":[6]"},
                    "\"micro_batches\":12,\"parallel\":{\"groups\":%d,\"attn_gpus\":1,"
                    "\"ffn_gpus\":1},\"memory\":{\"recompute\":\"%s\"},\"placement\":"
                    "\"mixed-nodes\",\"costs\":{%s}",
                    p, again ? "full" : "none", costs[i]);
                double busy = plan_bound(run.result.system, &run.result.plan).busy;
                double part = busy / run.result.step_time, least = i == 2 ? 0.75 : i == 3 ? 0.55 : 0.97;
                if (!(part >= least && part <= 1 + EXACT)) fail_msg("%s: %g of the step", costs[i], part);
                run_free(&run);
            }
}

/* ---- bounds of memory -------------------------------------------------------------------------------- */

/* What any order must hold is all that is held where one micro-batch after the other goes through one stage
   or group, and a stage of several holds what is under way at its first backward pass. */
static void check_memory_bound(const char *system, int dense, const char *parallel, int micro_batches,
                               struct level level, double least) {
    char memory[160];
    level_text(level, memory, sizeof memory);
    struct run run = run_system(system, (struct shape){8, dense, 2, 4, ",\"order.wave\":[1]"},
                                "\"micro_batches\":%d,\"parallel\":%s,\"placement\":\"mixed-nodes\",%s",
                                micro_batches, parallel, memory);
    double bytes = plan_bound(run.result.system, &run.result.plan).bytes, peak = run.result.peak_memory;
    if (bytes > peak * (1 + EXACT) || bytes < least * peak)
        fail_msg("%s %s %s: at least %.17g, held %.17g", system, parallel, memory, bytes, peak);
    run_free(&run);
}

static void test_memory_bounds(void **state) {
    (void)state;
    static const struct level levels[] = {{0},
                                          {ATTENTION_NORMS, FFN_ACTIVATION, 0, false},
                                          {ATTENTION_PROJECTIONS, FFN_FULL, 2, true},
                                          {ATTENTION_FULL, FFN_FULL, 0, false}};
    /* Where several are under way an input may be there early; behind a dense last layer the head's input is
       there beside all that is kept. */
    for (size_t i = 0; i < COUNT(levels); i++)
        for (int dense = 1; dense <= 8; dense += 7) {
            struct level it = levels[i];
            double least = dense == 8 ? 0.95 : 1 - EXACT;
            check_memory_bound("megatron", dense, "{\"pp\":1,\"vpp\":1,\"ep\":2}", 3, it, least);
            check_memory_bound("megatron", dense, "{\"pp\":2,\"vpp\":1,\"ep\":2}", 6, it, 0.95);
            check_memory_bound("megatron", dense, "{\"pp\":2,\"vpp\":2,\"ep\":2}", 6, it, 0.9);
            check_memory_bound("megatron", dense, "{\"pp\":2,\"vpp\":2,\"ep\":4}", 6, it, 0.9);
            check_memory_bound("megatron", dense, "{\"pp\":1,\"vpp\":1,\"ep\":4,\"cp\":4}", 3, it, least);
            check_memory_bound("disagmoe", dense, "{\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":2}", 3, it,
                               least);
            check_memory_bound("disagmoe", dense, "{\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":2,\"cp\":2}", 3,
                               it, least);
            check_memory_bound("disagmoe", dense, "{\"groups\":1,\"attn_gpus\":1,\"ffn_gpus\":7}", 3, it,
                               least);
            check_memory_bound("disagmoe", dense, "{\"groups\":2,\"attn_gpus\":1,\"ffn_gpus\":1}", 3, it,
                               0.95);
        }
}

/* Ahead of placing, computation alone is known: of one group, that of its busier side. */
static void test_outline(void **state) {
    (void)state;
    for (int n = 1; n <= 8; n += 7) {
        struct run run =
            run_system("disagmoe", (struct shape){6, 0, 2, 8, NULL},
                       "\"micro_batches\":3,\"parallel\":{\"groups\":1,\"attn_gpus\":8,\"ffn_gpus\":%d},"
                       "\"placement\":\"split-nodes\",\"memory\":{\"recompute\":{\"attention\":\"norms\","
                       "\"ffn\":\"full\",\"layers\":4}}",
                       n);
        double sides[2] = {0};
        for (int i = 0; i < run.schedule->op_count; i++)
            if (run.schedule->ops[i].layer >= 0 && run.schedule->ops[i].lane_count == 1)
                sides[run.schedule->ops[i].kind == KIND_FFN] += run.schedule->ops[i].duration;
        assert_within(run.result.system->outline(&run.result.plan).seconds, fmax(sides[0], sides[1]), EXACT);
        assert_true((sides[1] > sides[0]) == (n == 1)); /* either is the busier one */
        run_free(&run);
    }
}

/* ---- who is slow, who has what ----------------------------------------------------------------------- */

/* A slow GPU slows the step by as much in whichever replica it stands. */
static void test_slow_replica(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        double seconds[3];
        for (int which = 0; which < 3; which++) {
            char sweep[96] = "";
            if (which)
                snprintf(sweep, sizeof sweep, ",\"cluster.slow_gpus\":[[{\"gpu\":%d,\"speed\":0.5}]]",
                         which == 1 ? 0
                         : k        ? 2
                                    : 1);
            seconds[which] = step_and_free(
                run_system(k ? "disagmoe" : "megatron", (struct shape){2, 0, 1, k ? 4 : 2, sweep},
                           "\"micro_batches\":3,\"parallel\":{\"pp\":1,\"vpp\":1,\"ep\":1,\"groups\":1,"
                           "\"attn_gpus\":1,\"ffn_gpus\":1},\"memory\":{},\"placement\":\"mixed-nodes\""));
        }
        assert_true(seconds[1] > 1.2 * seconds[0]);
        assert_within(seconds[2], seconds[1], EXACT);
    }
}

/* ---- layouts ----------------------------------------------------------------------------------------- */

static bool runs_fit(int gpus, int cp) {
    return gpus % cp == 0 && (cp == 1 || SEQ_LEN % (2 * cp) == 0);
}

/* Of 6 layers and 16 experts on `gpus`, with what is given; 0: open. */
static int stage_layouts(int gpus, struct parallel given) {
    int count = 0;
    for (int ep = 1; ep <= gpus && ep <= 16; ep++)
        for (int pp = 1; pp * ep <= gpus && pp <= 6; pp++)
            for (int vpp = 1; vpp * pp <= 6; vpp++)
                for (int cp = 1; cp <= ep; cp++) {
                    if ((given.ep && ep != given.ep) || (given.pp && pp != given.pp) ||
                        (given.cp && cp != given.cp))
                        continue;
                    bool even = given.ep || gpus % ep == 0 || 16 % ep == 0;
                    count += even && (pp > 1 || vpp == 1) && runs_fit(ep, cp);
                }
    return count;
}

/* A ring's groups are as large as some number of replicas allows. */
static int ring_layouts(int gpus, struct parallel given) {
    int count = 0;
    for (int p = 1; p <= gpus / 2 && p <= 6; p++)
        for (int m = 1; m < gpus; m++)
            for (int n = 1; n <= 16 && p * (m + n) <= gpus; n++)
                for (int cp = 1; cp <= m; cp++) {
                    int replicas = gpus / p / (m + n);
                    bool largest = gpus / p / replicas == m + n;
                    if ((given.groups && p != given.groups) || (given.attn_gpus && m != given.attn_gpus) ||
                        (given.cp && cp != given.cp))
                        continue;
                    count += largest && runs_fit(m, cp);
                }
    return count;
}

static void test_layouts(void **state) {
    (void)state;
    static const struct parallel givens[] = {
        {0}, {.pp = 2, .groups = 2}, {.ep = 3, .attn_gpus = 3}, {.cp = 2}, {.ep = 4, .cp = 4, .groups = 3}};
    for (int gpus = 2; gpus <= 12; gpus += 5)
        for (size_t i = 0; i < COUNT(givens); i++) {
            struct experiment experiment;
            struct errors errors = {0};
            char *text = manifest_of((struct shape){6, 0, 1, gpus, NULL}, "\"global_batch\":8");
            assert_true(experiment_read_text(text, "experiments/test.json", &experiment, &errors));
            free(text);
            struct point *point = &experiment.points[0];
            point->parallel = givens[i];
            assert_int_equal(system_named("megatron")->layouts(point, NULL, 0),
                             stage_layouts(gpus, givens[i]));
            assert_int_equal(system_named("disagmoe")->layouts(point, NULL, 0),
                             ring_layouts(gpus, givens[i]));
            experiment_free(&experiment);
        }
}

/* ---- where the ring stands --------------------------------------------------------------------------- */

static int between(struct rng *rng, int low, int high) {
    return low + rng_below(rng, high - low + 1);
}

/* A random ring of two layers in one group; the layout may have several replicas. Returns the manifest's end.
 */
static struct shape random_ring(struct rng *rng, char *layout, size_t size) {
    struct shape shape = {2, 0, between(rng, 2, 4), 1 << between(rng, 1, 2), NULL};
    bool split = rng_below(rng, 2);
    int gpus = shape.nodes * shape.gpus_per_node, most = gpus / between(rng, 1, 3), cp = between(rng, 1, 2);
    int m = cp * between(rng, 1, most / 2 / cp > 0 ? most / 2 / cp : 1),
        n = between(rng, 1, most - m > 0 ? most - m : 1);
    if (split && m > gpus / 2) m = cp;
    if (split && n > gpus / 2 - 1) n = 1;
    snprintf(layout, size,
             "\"global_batch\":64,\"parallel\":{\"groups\":1,\"attn_gpus\":%d,\"ffn_gpus\":%d,\"cp\":%d},"
             "\"memory\":{},\"placement\":\"%s-nodes\"",
             m, n < 16 ? n : 16, cp, split ? "split" : "mixed");
    return shape;
}

static struct layer_cost cost_of(const struct plan *plan, const struct ring_placement *placement,
                                 int replica) {
    struct sides sides = {placement->attention[replica], placement->ffn[replica],
                          placement->attention[replica]};
    return plan_layer_cost(plan, 0, (struct recompute){0}, sides);
}

static double seconds_of(struct layer_cost cost) {
    return cost.attention[PASS_FORWARD] + cost.ffn[PASS_FORWARD] + cost.dispatch.seconds +
           cost.combine.seconds;
}

/* The step ends when the slowest replica does: its layers are the schedule's. */
static void check_modelled_replica(const struct run *run, const struct ring_placement *placement) {
    double slowest = 0, modelled = 0;
    for (int r = 0; r < run->result.plan.replicas; r++)
        slowest = fmax(slowest, seconds_of(cost_of(&run->result.plan, placement, r)));
    for (int i = 0; i < run->schedule->op_count; i++) {
        const struct operation *op = &run->schedule->ops[i];
        if (op->layer == 0 && op->micro_batch == 0 && op->pass == PASS_FORWARD) modelled += op->duration;
    }
    assert_within(modelled, slowest, EXACT);
}

static bool straddles(const struct plan *plan, const struct ring_placement *placement) {
    int cp = plan->parallel.cp, node = plan->point->cluster->gpus_per_node;
    for (int r = 0; r < plan->replicas; r++)
        for (int i = 0; i < plan->parallel.attn_gpus; i++)
            if (placement->attention[r].gpus[i] / node != placement->attention[r].gpus[i - i % cp] / node)
                return true;
    return false;
}

/* Whatever numbers of NICs might have been given, none makes the longest transfer of the first replica
   shorter, unless that tears runs apart which the choice leaves whole. */
static int check_division(const struct run *run, const struct ring_placement *placement) {
    const struct plan *plan = &run->result.plan;
    struct layer_cost chosen = cost_of(plan, placement, 0);
    double longest = fmax(chosen.dispatch.seconds, chosen.combine.seconds);
    bool torn = straddles(plan, placement);
    int most = plan->point->cluster->nodes * plan->point->cluster->nics_per_node, tried = 0;
    for (int a = 1; a < most; a++)
        for (int f = 1; a + f <= most; f++) {
            struct plan other = *plan;
            struct ring_placement stands;
            struct arena *arena = arena_new();
            other.parallel.attn_nics = a;
            other.parallel.ffn_nics = f;
            bool stood = placement_make(&other, arena, &stands, NULL),
                 tears = stood && straddles(&other, &stands);
            if (stood && !tears) assert_false(torn);
            if (stood && (torn || !tears)) {
                struct layer_cost cost = cost_of(&other, &stands, 0);
                double here = fmax(cost.dispatch.seconds, cost.combine.seconds);
                if (here < longest * (1 - 1e-6))
                    fail_msg("%d and %d NICs: %g s; %d and %d: %g s", plan->parallel.attn_nics,
                             plan->parallel.ffn_nics, longest, a, f, here);
                tried++;
            }
            arena_free(arena);
        }
    return tried;
}

static void test_where_the_ring_stands(void **state) {
    (void)state;
    struct rng rng = rng_seed(20260901);
    int several = 0, divided = 0;
    for (int i = 0; i < 60; i++) {
        char layout[256];
        struct shape shape = random_ring(&rng, layout, sizeof layout);
        if (i == 0) { /* the second of three replicas has its run on two nodes */
            shape = (struct shape){2, 0, 3, 6, NULL};
            snprintf(
                layout, sizeof layout,
                "\"global_batch\":64,\"parallel\":{\"groups\":1,\"attn_gpus\":4,\"ffn_gpus\":2,\"cp\":4},"
                "\"memory\":{},\"placement\":\"split-nodes\"");
        }
        if (i == 2) { /* likewise the second's experts */
            shape = (struct shape){2, 0, 3, 6, NULL};
            snprintf(layout, sizeof layout,
                     "\"global_batch\":64,\"parallel\":{\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":4},"
                     "\"memory\":{},\"placement\":\"split-nodes\",\"routing\":\"zipf:1.5\"");
        }
        if (i == 1) { /* on another node the run's GPUs would have two more NICs, and a link between them */
            shape = (struct shape){2, 0, 4, 2, NULL};
            snprintf(
                layout, sizeof layout,
                "\"global_batch\":64,\"parallel\":{\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":3,\"cp\":2},"
                "\"memory\":{},\"placement\":\"split-nodes\"");
        }
        if (i == 3) { /* the attention side finds more NICs where the other side asks for fewer */
            shape = (struct shape){2, 0, 4, 4, NULL};
            snprintf(layout, sizeof layout,
                     "\"global_batch\":64,\"parallel\":{\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":14},"
                     "\"memory\":{},\"placement\":\"mixed-nodes\"");
        }
        struct run run = run_system("disagmoe", shape, "%s", layout);
        struct ring_placement placement;
        struct arena *arena = arena_new();
        assert_true(placement_make(&run.result.plan, arena, &placement, NULL));
        several += run.result.plan.replicas > 1;
        check_modelled_replica(&run, &placement);
        if (run.result.plan.parallel.attn_nics != NICS_SHARED)
            divided += check_division(&run, &placement) > 1;
        arena_free(arena);
        run_free(&run);
    }
    assert_true(several > 10 && divided > 20);
}

/* ---- the ring's policy ------------------------------------------------------------------------------- */

/* Smaller goes first: by direction if the policy says so, then the older wave, the earlier place on the
   micro-batch's way, the earlier micro-batch. */
static double rank_of(const struct operation *op, int layers, int wave, const char *prefer) {
    bool backward = op->pass != PASS_FORWARD;
    int layer = op->kind == KIND_EMBED ? 0 : op->kind == KIND_HEAD ? layers - 1 : op->layer;
    int place = backward ? 2 * layers - 1 - layer : layer, last = 0;
    if (strcmp(prefer, "backward") == 0) last = !backward;
    if (strcmp(prefer, "forward") == 0) last = backward;
    return last * 1e9 + op->micro_batch / wave * 1e6 + place * 1e3 + op->micro_batch;
}

/* Of a group's computations that were ready, the first in rank was started. */
static int check_policy(const struct run *run, int lane, int wave, const char *prefer) {
    const struct schedule *s = run->schedule;
    int compared = 0;
    for (int i = 0; i < s->lanes[lane].count; i++)
        for (int k = i + 1; k < s->lanes[lane].count; k++) {
            const struct operation *first = &s->ops[s->lanes[lane].ops[i]],
                                   *then = &s->ops[s->lanes[lane].ops[k]];
            double start = run->timeline.start[s->lanes[lane].ops[i]], ready = 0;
            for (int d = 0; d < then->dep_count; d++)
                ready = fmax(ready, run->timeline.end[s->deps[then->first_dep + d]]);
            if (then->kind == KIND_OPTIMIZER || ready > start) continue;
            assert_true(rank_of(first, s->layers, wave, prefer) <= rank_of(then, s->layers, wave, prefer));
            compared++;
        }
    return compared;
}

static void test_policy(void **state) {
    (void)state;
    static const char *const prefers[] = {"backward", "forward", "wave"};
    for (size_t i = 0; i < COUNT(prefers); i++)
        for (int wave = 1; wave <= 6; wave += 2)
            for (int waves = 1; waves <= 3; waves++) {
                char order[160];
                snprintf(order, sizeof order,
                         ",\"order.wave\":[%d],\"order.waves_in_flight\":[%d],\"order.prefer\":[\"%s\"]",
                         wave, waves, prefers[i]);
                struct run run = run_system(
                    "disagmoe", (struct shape){7, 0, 1, 8, order},
                    "\"micro_batches\":14,\"parallel\":{\"groups\":3,\"attn_gpus\":1,\"ffn_gpus\":1},"
                    "\"memory\":"
                    "{\"recompute\":\"selective\"},\"placement\":\"mixed-nodes\",\"costs\":{\"attn_fwd_s\":0."
                    "9,"
                    "\"attn_bwd_s\":2.1,\"ffn_fwd_s\":1.3,\"ffn_bwd_s\":2.4,\"dispatch_s\":0.7,\"combine_s\":"
                    "0.6,"
                    "\"embed_fwd_s\":0.1,\"embed_bwd_s\":0.2,\"head_fwd_s\":0.5,\"head_bwd_s\":0.8}");
                int compared = 0, first[14], under_way = 0, most = 0;
                for (int g = 0; g < 6; g++)
                    compared += check_policy(&run, lane_of(g, RESOURCE_COMPUTE), wave, prefers[i]);
                if (wave * waves > 2) assert_true(compared > 10);
                /* No more are under way than the waves say: a micro-batch begins behind another's end. */
                const struct lane *lane = &run.schedule->lanes[lane_of(0, RESOURCE_COMPUTE)];
                for (int k = 0; k < lane->count; k++) {
                    const struct operation *op = &run.schedule->ops[lane->ops[k]];
                    if (op->kind != KIND_EMBED) continue;
                    under_way += op->pass == PASS_FORWARD ? 1 : -1;
                    if (op->pass == PASS_FORWARD) first[op->micro_batch] = k;
                    if (under_way > most) most = under_way;
                }
                assert_int_equal(most, wave * waves < 14 ? wave * waves : 14);
                for (int m = 1; m < wave && m < 14; m++) assert_true(first[m] > first[m - 1]);
                run_free(&run);
            }
}

/* ---- parts of AF-Pipe that are off ------------------------------------------------------------------- */

static int group_of(const struct operation *op, bool receiver) {
    return op->lanes[receiver ? op->lane_count - 1 : 0] / RESOURCE_COUNT;
}

/* Combine returns to its own A-group and a hop goes on from there; of the last layer neither. */
static void check_hops(const struct run *run, int p, bool off) {
    const struct schedule *s = run->schedule;
    int layers = s->layers, hops = 0;
    for (int i = 0; i < s->op_count; i++) {
        const struct operation *op = &s->ops[i];
        if (op->kind != KIND_COMBINE && op->kind != KIND_P2P) continue;
        bool backward = op->pass == PASS_BACKWARD, hop = op->kind == KIND_P2P;
        int g = op->layer % p, next = (g + 1) % p, from = hop ? g : p + g;
        int to = op->layer == layers - 1 ? p + g : hop ? next : off ? g : next;
        assert_int_equal(group_of(op, backward), from);
        assert_int_equal(group_of(op, !backward), to);
        hops += hop;
    }
    assert_int_equal(hops, off && p > 1 ? 2 * (layers - 1) * s->micro_batches : 0);
}

/* Whether some group ever sends one transfer and receives another at one time. */
static bool is_duplex(const struct run *run) {
    const struct schedule *s = run->schedule;
    for (int g = 0; g < s->group_count; g++) {
        const struct lane *send = &s->lanes[lane_of(g, RESOURCE_SEND)];
        const struct lane *receive = &s->lanes[lane_of(g, RESOURCE_RECV)];
        for (int i = 0; i < send->count; i++)
            for (int k = 0; k < receive->count; k++) {
                int a = send->ops[i], b = receive->ops[k];
                bool apart = run->timeline.end[a] <= run->timeline.start[b] ||
                             run->timeline.end[b] <= run->timeline.start[a];
                if (a != b && !apart) return true;
            }
    }
    return false;
}

/* Whether every group's computations are, round by round, all forward and then all backward. */
static bool goes_in_rounds(const struct run *run, int under_way) {
    const struct schedule *s = run->schedule;
    for (int g = 0; g < s->group_count; g++) {
        const struct lane *lane = &s->lanes[lane_of(g, RESOURCE_COMPUTE)];
        int phase = 0;
        for (int i = 0; i < lane->count; i++) {
            const struct operation *op = &s->ops[lane->ops[i]];
            if (op->kind == KIND_OPTIMIZER) continue;
            int here = 2 * (op->micro_batch / under_way) + (op->pass != PASS_FORWARD);
            if (here < phase) return false;
            phase = here;
        }
    }
    return true;
}

/* One micro-batch alone meets nobody: its way in and back, with the hops, is the step, and the bound. */
static void check_one_alone(const struct run *run, int p, bool hops) {
    double way = 5 * (3 + 13 + 7 + 15 + 13 + 7) + 2 * 5 * 12 + 300 + (hops && p > 1 ? 2 * 4 * 17 : 0);
    assert_within(run->result.step_time, way, EXACT);
    assert_within(plan_bound(run->result.system, &run->result.plan).busy, way, EXACT);
}

static void test_parts_off(void **state) {
    (void)state;
    static const char *const words[] = {"\"fused-combine\"", "\"duplex\"", "\"interleaving\"", "\"waves\""};
    int duplex = 0, mixed = 0;
    for (int p = 1; p <= 3; p++)
        for (int off = 0; off < 16; off++)
            for (int m = 1; m <= 13; m += 4) {
                char sweep[160] = ",\"order.wave\":[3],\"order.waves_in_flight\":[2],\"order.without\":[[";
                for (int k = 0, said = 0; k < 4; k++)
                    if (off >> k & 1) strcat(strcat(sweep, said++ ? "," : ""), words[k]);
                strcat(sweep, "]]");
                struct run run = run_system(
                    "disagmoe", (struct shape){5, 0, 1, 8, sweep},
                    "\"micro_batches\":%d,\"parallel\":{\"groups\":%d,\"attn_gpus\":1,\"ffn_gpus\":1},"
                    "\"memory\":{},\"placement\":\"mixed-nodes\",\"costs\":{\"attn_fwd_s\":3,"
                    "\"attn_bwd_s\":7,\"ffn_fwd_s\":7,\"ffn_bwd_s\":15,\"dispatch_s\":13,\"combine_s\":12,"
                    "\"p2p_s\":17,\"head_fwd_s\":120,\"head_bwd_s\":180}",
                    m, p);
                check_hops(&run, p, off & WITHOUT_FUSED_COMBINE);
                if (m == 1) check_one_alone(&run, p, off & WITHOUT_FUSED_COMBINE);
                if (off & WITHOUT_DUPLEX)
                    assert_false(is_duplex(&run));
                else
                    duplex += is_duplex(&run);
                if (off & WITHOUT_INTERLEAVING)
                    assert_true(goes_in_rounds(&run, 6));
                else
                    mixed += !goes_in_rounds(&run, 6);
                if (off ==
                    WITHOUT_WAVES) /* in micro-batch order a wave is one, whatever the manifest prefers */
                    for (int g = 0; g < 2 * p; g++)
                        check_policy(&run, lane_of(g, RESOURCE_COMPUTE), 1, "wave");
                run_free(&run);
            }
    assert_true(duplex > 30 && mixed > 30);
}

/* ---- stages ------------------------------------------------------------------------------------------ */

/* Layers are spread so that the slowest stage, embedding and head included, is as fast as can be. */
static void check_balance(int layers, int head, int recomputing) {
    struct run run = run_system("megatron", (struct shape){layers, 0, 1, 2, NULL},
                                "\"micro_batches\":4,\"parallel\":{\"pp\":2,\"vpp\":1,\"ep\":1},\"memory\":{"
                                "\"recompute\":{\"attention\":\"full\",\"ffn\":\"none\",\"layers\":%d}},"
                                "\"costs\":{\"attn_fwd_s\":3,\"attn_bwd_s\":5,\"ffn_fwd_s\":1,"
                                "\"ffn_bwd_s\":1,\"head_fwd_s\":%d}",
                                recomputing, head);
    int here[2] = {0};
    for (int i = 0; i < run.schedule->op_count; i++) {
        const struct operation *op = &run.schedule->ops[i];
        bool counts = op->kind == KIND_ATTENTION && op->pass == PASS_FORWARD && op->micro_batch == 0;
        if (counts) here[op->lanes[0] / RESOURCE_COUNT]++;
    }
    double best = INFINITY, found = INFINITY;
    for (int first = 1; first < layers; first++) {
        int second = layers - first;
        double ahead = 10 * first + 3 * fmin(first, recomputing);
        double slowest = fmax(ahead, 10 * second + 3 * fmin(second, recomputing) + head);
        best = fmin(best, slowest);
        if (first == here[0]) found = slowest;
    }
    assert_int_equal(here[0] + here[1], layers);
    /* The least loaded stage takes the next layer: exact where all layers weigh the same. */
    assert_true(found <= best + (recomputing < layers ? 3 : 0));
    run_free(&run);
}

static void test_stages_are_balanced(void **state) {
    (void)state;
    for (int head = 0; head <= 60; head += 12)
        for (int layers = 4; layers <= 12; layers += 4)
            for (int recomputing = 1; recomputing <= layers; recomputing++)
                check_balance(layers, head, recomputing);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_level),
        cmocka_unit_test(test_pipelined_transfers),
        cmocka_unit_test(test_instant_transfers),
        cmocka_unit_test(test_slower_links),
        cmocka_unit_test(test_context_parallelism),
        cmocka_unit_test(test_communication_in_all),
        cmocka_unit_test(test_step_end),
        cmocka_unit_test(test_who_holds_what),
        cmocka_unit_test(test_head_on_all_groups),
        cmocka_unit_test(test_ring_waits_for_its_head),
        cmocka_unit_test(test_head_parameters),
        cmocka_unit_test(test_some_layers),
        cmocka_unit_test(test_busiest_lane),
        cmocka_unit_test(test_memory_bounds),
        cmocka_unit_test(test_outline),
        cmocka_unit_test(test_slow_replica),
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_where_the_ring_stands),
        cmocka_unit_test(test_policy),
        cmocka_unit_test(test_parts_off),
        cmocka_unit_test(test_stages_are_balanced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
