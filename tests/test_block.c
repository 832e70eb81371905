/*
What all systems share of a schedule (core/plan/block.c): a layer's operations, what each waits for, and who
holds what memory from when to when, for every combination of memory levers, on one group and on several. The
head and the step's end likewise.

What is expected is written down here from the text of the design, by name; the order in which operations are
added does not matter.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

#define LAYER 1
#define MICRO_BATCH 2
#define MOST 64
#define NOBODY (-1)

/* ---- a layer alone ------------------------------------------------------------------------------------ */

struct scene {
    bool pipelined, moe, has_input;
    struct recompute recompute;
    bool resend, gathers;
    int parts; /* groups that take the output */
    /* Made of these: */
    struct model model;
    struct point point;
    struct plan plan;
    struct layer_cost cost;
    struct transfer_cost combine[3];
    struct layer_memory memory;
    struct schedule *schedule;
    struct block block;
    int next[3], input, gradients[3], attention_group, ffn_group, returned[2];
};

static bool has_transfers(const struct scene *scene) {
    return scene->moe || !scene->pipelined;
}

static bool recomputes_all(const struct scene *scene) {
    return scene->recompute.attention == ATTENTION_FULL && scene->recompute.ffn == FFN_FULL;
}

static bool sends_again(const struct scene *scene) {
    return has_transfers(scene) && (scene->resend || recomputes_all(scene));
}

static void build(struct scene *scene) {
    static const double kept_attention[] = {900, 700, 300, 0}, kept_ffn[] = {800, 600, 0};
    scene->model = (struct model){.layers = 4, .moe = {.dense_layers = scene->moe ? 1 : 2}};
    scene->point = (struct point){.model = &scene->model};
    scene->plan = (struct plan){.point = &scene->point};
    scene->plan.memory.expert_input = scene->resend ? INPUT_RESEND : INPUT_KEEP;
    scene->cost = (struct layer_cost){.attention = {2, 3, 5, 7},
                                      .ffn = {11, 13, 17, 19},
                                      .gather = {0.25, 0.5, 0.75, 0},
                                      .dispatch = {23, 230}};
    scene->memory = (struct layer_memory){.layer_input = 1000,
                                          .attention = kept_attention[scene->recompute.attention],
                                          .gathered = scene->gathers ? 70 : 0,
                                          .expert_input = 500,
                                          .ffn = kept_ffn[scene->recompute.ffn],
                                          .full_attention = 900,
                                          .full_ffn = 800};
    scene->attention_group = 0;
    scene->ffn_group = scene->pipelined ? 0 : 1;
    struct schedule *schedule = scene->schedule = schedule_new(5, 4, 4);
    for (int g = 0; g < 5; g++) schedule_group(schedule, g, 1, 0, "g%d", g);
    for (int i = 0; i < scene->parts; i++) {
        scene->next[i] = scene->pipelined ? 0 : 2 + i;
        scene->combine[i] = (struct transfer_cost){29 + i, 290 + i};
    }
    scene->input = NOBODY;
    if (scene->has_input)
        scene->input = schedule_compute(schedule, KIND_EMBED, PASS_FORWARD, -1, MICRO_BATCH, 0, 1);
    scene->block = (struct block){.plan = &scene->plan,
                                  .recompute = scene->recompute,
                                  .cost = &scene->cost,
                                  .combine = scene->combine,
                                  .memory = &scene->memory,
                                  .place = {0, scene->ffn_group, scene->next, scene->parts},
                                  .layer = LAYER,
                                  .micro_batch = MICRO_BATCH};
    scene->returned[0] = block_forward(schedule, &scene->block, scene->input);
    for (int i = 0; i < scene->parts; i++)
        scene->gradients[i] =
            schedule_compute(schedule, KIND_HEAD, PASS_BACKWARD, -1, MICRO_BATCH, scene->next[i], 1);
    scene->returned[1] = block_backward(schedule, &scene->block, scene->gradients);
}

/* The operation of that kind, pass and chunk. */
static int find(const struct scene *scene, enum kind kind, enum pass pass, int chunk) {
    int found = NOBODY;
    for (int i = 0; i < scene->schedule->op_count; i++) {
        const struct operation *op = &scene->schedule->ops[i];
        if (op->layer != LAYER || op->kind != kind || op->pass != pass || op->chunk != chunk) continue;
        assert_int_equal(found, NOBODY); /* once */
        found = i;
    }
    return found;
}

/* ---- operations --------------------------------------------------------------------------------------- */

static bool waits_for(const struct schedule *schedule, int op, int on) {
    for (int k = 0; k < schedule->ops[op].dep_count; k++)
        if (schedule->deps[schedule->ops[op].first_dep + k] == on) return true;
    return false;
}

/* Waits for these and nothing else; NOBODY stands for nothing. */
static void assert_waits(const struct schedule *schedule, int op, int a, int b) {
    int expected = (a != NOBODY) + (b != NOBODY && b != a);
    if (a != NOBODY && !waits_for(schedule, op, a)) fail_msg("%d does not wait for %d", op, a);
    if (b != NOBODY && !waits_for(schedule, op, b)) fail_msg("%d does not wait for %d", op, b);
    for (int k = 0; k < schedule->ops[op].dep_count; k++) {
        int on = schedule->deps[schedule->ops[op].first_dep + k];
        if (on != a && on != b) fail_msg("%d waits for %d", op, on);
    }
    assert_true(schedule->ops[op].dep_count >= expected);
}

/* What the operations of one layer are called here; NOBODY: there is none. */
struct names {
    int attention, dispatch, ffn, combine[3];                      /* forward */
    int attention_again, dispatch_again, ffn_again, combine_again; /* recomputation */
    int combine_back[3], ffn_back, dispatch_back, attention_back;  /* backward */
    bool early_attention, early_ffn; /* all of it again, as soon as the backward pass is due */
};

static struct names names_of(const struct scene *scene) {
    struct names names = {.attention = find(scene, KIND_ATTENTION, PASS_FORWARD, 0),
                          .dispatch = find(scene, KIND_DISPATCH, PASS_FORWARD, 0),
                          .ffn = find(scene, KIND_FFN, PASS_FORWARD, 0),
                          .attention_again = find(scene, KIND_ATTENTION, PASS_RECOMPUTE, 0),
                          .dispatch_again = find(scene, KIND_DISPATCH, PASS_RECOMPUTE, 0),
                          .ffn_again = find(scene, KIND_FFN, PASS_RECOMPUTE, 0),
                          .combine_again = find(scene, KIND_COMBINE, PASS_RECOMPUTE, 0),
                          .ffn_back = find(scene, KIND_FFN, PASS_BACKWARD, 0),
                          .dispatch_back = find(scene, KIND_DISPATCH, PASS_BACKWARD, 0),
                          .attention_back = find(scene, KIND_ATTENTION, PASS_BACKWARD, 0)};
    for (int i = 0; i < 3; i++) {
        names.combine[i] = find(scene, KIND_COMBINE, PASS_FORWARD, i);
        names.combine_back[i] = find(scene, KIND_COMBINE, PASS_BACKWARD, i);
    }
    names.early_attention = scene->recompute.attention == ATTENTION_FULL;
    names.early_ffn = scene->recompute.ffn == FFN_FULL;
    return names;
}

static void assert_present(int op, bool expected) {
    assert_true((op != NOBODY) == expected);
}

static void assert_operations_are_those(const struct scene *scene, const struct names *n) {
    bool transfers = has_transfers(scene);
    bool again = scene->pipelined && transfers && recomputes_all(scene);
    int count = 2 + 2 + scene->has_input + scene->parts; /* forward, backward, input, gradients */
    assert_present(n->attention, true);
    assert_present(n->ffn, true);
    assert_present(n->ffn_back, true);
    assert_present(n->attention_back, true);
    assert_present(n->dispatch, transfers);
    assert_present(n->dispatch_back, transfers);
    for (int i = 0; i < 3; i++) {
        assert_present(n->combine[i], transfers && i < scene->parts);
        assert_present(n->combine_back[i], transfers && i < scene->parts);
    }
    assert_present(n->attention_again, scene->recompute.attention != ATTENTION_NONE);
    assert_present(n->ffn_again, scene->recompute.ffn != FFN_NONE);
    assert_present(n->dispatch_again, sends_again(scene));
    assert_present(n->combine_again, again);
    count += transfers * 2 * (1 + scene->parts) + (n->attention_again >= 0) + (n->ffn_again >= 0) +
             sends_again(scene) + again;
    assert_int_equal(scene->schedule->op_count, count);
}

static void assert_compute(const struct scene *scene, int op, int group, double seconds, double gather) {
    const struct operation *it = &scene->schedule->ops[op];
    assert_int_equal(it->lane_count, 1);
    assert_int_equal(it->lanes[0], lane_of(group, RESOURCE_COMPUTE));
    assert_true(it->duration == seconds && it->gather == gather && it->bytes == 0);
    assert_true(it->micro_batch == MICRO_BATCH && it->chunk == 0 && it->chunks == 1);
}

static void assert_transfer(const struct scene *scene, int op, int from, int to, struct transfer_cost cost,
                            int chunk, int chunks) {
    const struct operation *it = &scene->schedule->ops[op];
    assert_int_equal(it->lane_count, 2);
    assert_int_equal(it->lanes[0], lane_of(from, RESOURCE_SEND));
    assert_int_equal(it->lanes[1], lane_of(to, RESOURCE_RECV));
    assert_true(it->duration == cost.seconds && it->bytes == cost.bytes && it->gather == 0);
    assert_true(it->micro_batch == MICRO_BATCH && it->chunk == chunk && it->chunks == chunks);
}

/* Durations, lanes, bytes. */
static void assert_costs(const struct scene *scene, const struct names *n) {
    int a = 0, f = scene->ffn_group;
    assert_compute(scene, n->attention, a, 2, 0.25);
    assert_compute(scene, n->ffn, f, 11, 0);
    assert_compute(scene, n->ffn_back, f, 17 + 19, 0); /* both halves */
    assert_compute(scene, n->attention_back, a, 5 + 7, 0.75);
    if (n->attention_again >= 0) assert_compute(scene, n->attention_again, a, 3, 0.5);
    if (n->ffn_again >= 0) assert_compute(scene, n->ffn_again, f, 13, 0);
    if (n->dispatch >= 0) assert_transfer(scene, n->dispatch, a, f, scene->cost.dispatch, 0, 1);
    if (n->dispatch_again >= 0) assert_transfer(scene, n->dispatch_again, a, f, scene->cost.dispatch, 0, 1);
    if (n->dispatch_back >= 0) assert_transfer(scene, n->dispatch_back, f, a, scene->cost.dispatch, 0, 1);
    if (n->combine_again >= 0) assert_transfer(scene, n->combine_again, f, a, scene->combine[0], 0, 1);
    for (int i = 0; i < scene->parts && n->combine[i] >= 0; i++) {
        int next = scene->next[i], parts = scene->parts;
        assert_transfer(scene, n->combine[i], f, next, scene->combine[i], i, parts);
        assert_transfer(scene, n->combine_back[i], next, f, scene->combine[i], i, parts);
    }
}

static int last_of(int a, int b) { /* the later one that there is */
    return b != NOBODY ? b : a;
}

static void assert_forward_waits(const struct scene *scene, const struct names *n) {
    const struct schedule *s = scene->schedule;
    assert_waits(s, n->attention, scene->input, NOBODY);
    if (n->dispatch >= 0) assert_waits(s, n->dispatch, n->attention, NOBODY);
    assert_waits(s, n->ffn, last_of(n->attention, n->dispatch), NOBODY);
    for (int i = 0; i < scene->parts && n->combine[i] >= 0; i++)
        assert_waits(s, n->combine[i], n->ffn, i ? n->combine[i - 1] : NOBODY);
    assert_int_equal(scene->returned[0], last_of(n->ffn, n->combine[0]));
}

/* All of attention, then dispatch, then all of the experts, then combine: each behind the one before it where
   that is due; on one GPU one thing after the other. */
static void assert_backward_waits(const struct scene *scene, const struct names *n) {
    const struct schedule *s = scene->schedule;
    int due = scene->gradients[0], parts = scene->parts;
    int attention = n->early_attention ? n->attention_again : NOBODY;
    int ffn = n->early_ffn ? n->ffn_again : NOBODY;
    if (attention >= 0) assert_waits(s, attention, due, NOBODY);
    if (n->dispatch_again >= 0) assert_waits(s, n->dispatch_again, last_of(due, attention), NOBODY);
    if (ffn >= 0) {
        int before = n->dispatch_again >= 0 ? n->dispatch_again : scene->pipelined ? attention : NOBODY;
        assert_waits(s, ffn, last_of(due, before), NOBODY);
    }
    if (n->combine_again >= 0) assert_waits(s, n->combine_again, ffn, NOBODY);
    int restored = last_of(last_of(last_of(attention, n->dispatch_again), ffn), n->combine_again);
    int experts = last_of(n->dispatch_again, ffn); /* their input and, where dropped, internals */
    int arrived = scene->pipelined ? last_of(due, restored) : due;
    for (int i = 0; i < parts && n->combine_back[i] >= 0; i++) {
        int on = scene->pipelined ? arrived : scene->gradients[i];
        assert_waits(s, n->combine_back[i], on, i ? n->combine_back[i - 1] : NOBODY);
    }
    if (n->combine_back[0] >= 0) arrived = n->combine_back[parts - 1];
    if (scene->recompute.ffn == FFN_ACTIVATION) {
        assert_waits(s, n->ffn_again, arrived, experts);
        arrived = n->ffn_again;
    }
    assert_waits(s, n->ffn_back, arrived, experts);
    if (n->dispatch_back >= 0) assert_waits(s, n->dispatch_back, n->ffn_back, NOBODY);
    int back = last_of(n->ffn_back, n->dispatch_back);
    if (n->attention_again >= 0 && attention < 0) {
        assert_waits(s, n->attention_again, back, NOBODY);
        back = n->attention_again;
    }
    assert_waits(s, n->attention_back, back, attention);
    assert_int_equal(scene->returned[1], n->attention_back);
    assert_int_equal(scene->block.ffn_backward, n->ffn_back);
}

/* ---- memory ------------------------------------------------------------------------------------------- */

struct hold {
    enum role role;
    int group, from, to;
    double bytes;
};

struct holds {
    struct hold list[MOST];
    int count;
};

static void expect(struct holds *holds, enum role role, int group, int from, int to, double bytes) {
    if (bytes > 0) holds->list[holds->count++] = (struct hold){role, group, from, to, bytes};
}

static void expect_attention(const struct scene *scene, const struct names *n, struct holds *holds) {
    const struct layer_memory *m = &scene->memory;
    int returned = last_of(n->ffn_back, n->dispatch_back);
    double dropped = m->full_attention - m->attention;
    bool full = n->early_attention;
    expect(holds, ROLE_LAYER_INPUT, 0, scene->has_input ? scene->input : n->attention, n->attention_back,
           m->layer_input);
    /* Kept to the backward pass, but where all of it is dropped: then what is sent until it is. */
    if (full)
        expect(holds, ROLE_SENT, 0, n->attention, last_of(n->attention, n->dispatch), m->layer_input);
    else
        expect(holds, ROLE_ATTENTION, 0, n->attention, n->attention_back, m->attention);
    if (n->attention_again >= 0) {
        expect(holds, ROLE_RESTORED_ATTENTION, 0, n->attention, n->attention, dropped);
        expect(holds, ROLE_RESTORED_ATTENTION, 0, n->attention_again, n->attention_back, dropped);
    }
    expect(holds, ROLE_GATHERED, 0, n->attention, n->attention, m->gathered);
    if (full) expect(holds, ROLE_GATHERED, 0, n->attention_again, n->attention_again, m->gathered);
    expect(holds, ROLE_GATHERED, 0, n->attention_back, n->attention_back, 2 * m->gathered);
    expect(holds, ROLE_MIDDLE_GRADIENT, 0, returned, n->attention_back, m->layer_input);
}

static void expect_ffn(const struct scene *scene, const struct names *n, struct holds *holds) {
    const struct layer_memory *m = &scene->memory;
    int f = scene->ffn_group, last = scene->parts - 1;
    double dropped = m->full_ffn - m->ffn;
    if (!n->early_ffn) expect(holds, ROLE_FFN, f, n->ffn, n->ffn_back, m->ffn);
    if (n->ffn_again >= 0) {
        expect(holds, ROLE_RESTORED_FFN, f, n->ffn, n->ffn, dropped);
        expect(holds, ROLE_RESTORED_FFN, f, n->ffn_again, n->ffn_back, dropped);
    }
    if (!has_transfers(scene)) return; /* a dense layer in place has its input in what attention keeps */
    expect(holds, ROLE_EXPERT_INPUT, f, n->dispatch, sends_again(scene) ? n->ffn : n->ffn_back,
           m->expert_input);
    if (sends_again(scene))
        expect(holds, ROLE_EXPERT_INPUT, f, n->dispatch_again, n->ffn_back, m->expert_input);
    expect(holds, ROLE_EXPERT_OUTPUT, f, n->ffn, n->combine[last], m->expert_input);
    if (n->combine_again >= 0)
        expect(holds, ROLE_EXPERT_OUTPUT, f, n->ffn_again, n->combine_again, m->expert_input);
    expect(holds, ROLE_OUTPUT_GRADIENT, f, n->combine_back[0], n->ffn_back, m->expert_input);
    expect(holds, ROLE_INPUT_GRADIENT, f, n->ffn_back, n->dispatch_back, m->expert_input);
}

/* Each expected one is there, and no other. */
static void assert_holds(const struct scene *scene, const struct holds *holds) {
    const struct schedule *s = scene->schedule;
    bool taken[MOST] = {0};
    int count = 0;
    for (int i = 0; i < s->activation_count; i++) {
        const struct activation *it = &s->activations[i];
        bool found = it->bytes == 0;
        for (int k = 0; k < holds->count && !found; k++) {
            const struct hold *hold = &holds->list[k];
            if (taken[k] || it->role != hold->role || it->group != hold->group ||
                it->producer != hold->from || it->freed_by != hold->to || it->bytes != hold->bytes)
                continue;
            assert_true(it->layer == LAYER && it->micro_batch == MICRO_BATCH);
            found = taken[k] = true;
        }
        if (!found)
            fail_msg("role %d of group %d, operations %d to %d, %g bytes", it->role, it->group, it->producer,
                     it->freed_by, it->bytes);
        count += it->bytes > 0;
    }
    for (int k = 0; k < holds->count; k++)
        if (!taken[k])
            fail_msg("missing: role %d of group %d, operations %d to %d, %g bytes", holds->list[k].role,
                     holds->list[k].group, holds->list[k].from, holds->list[k].to, holds->list[k].bytes);
    assert_int_equal(count, holds->count);
}

static bool reads(const struct schedule *s, enum role role, int producer, int op) {
    for (int i = 0; i < s->read_count; i++) {
        const struct activation *it = &s->activations[s->reads[i].activation];
        if (it->role == role && it->producer == producer && s->reads[i].operation == op) return true;
    }
    return false;
}

/* What is used between its making and its end. */
static void assert_reads(const struct scene *scene, const struct names *n) {
    const struct schedule *s = scene->schedule;
    int expected = 0, input = scene->has_input ? scene->input : n->attention;
    if (n->early_attention) {
        assert_true(reads(s, ROLE_LAYER_INPUT, input, n->attention_again));
        expected++;
    }
    if (n->dispatch_again >= 0) {
        bool restored = n->early_attention;
        assert_true(reads(s, restored ? ROLE_RESTORED_ATTENTION : ROLE_ATTENTION,
                          restored ? n->attention_again : n->attention, n->dispatch_again));
        expected++;
    }
    if (n->early_ffn && has_transfers(scene)) {
        assert_true(reads(s, ROLE_EXPERT_INPUT, last_of(n->dispatch, n->dispatch_again), n->ffn_again));
        expected++;
    }
    assert_int_equal(s->read_count, expected);
}

static void check(struct scene scene) {
    build(&scene);
    struct names names = names_of(&scene);
    struct holds holds = {0};
    assert_operations_are_those(&scene, &names);
    assert_costs(&scene, &names);
    assert_forward_waits(&scene, &names);
    assert_backward_waits(&scene, &names);
    expect_attention(&scene, &names, &holds);
    expect_ffn(&scene, &names, &holds);
    assert_holds(&scene, &holds);
    assert_reads(&scene, &names);
    assert_true(scene.block.forward_first == names.attention);
    assert_true(scene.block.forward_last == scene.gradients[0]);
    assert_true(scene.block.backward_first == scene.gradients[scene.parts - 1] + 1);
    assert_true(scene.block.backward_last == scene.schedule->op_count);
    schedule_free(scene.schedule);
}

static void test_every_combination(void **state) {
    (void)state;
    int count = 0;
    for (int a = 0; a <= ATTENTION_FULL; a++)
        for (int f = 0; f <= FFN_FULL; f++)
            for (int flags = 0; flags < 16; flags++)
                for (int parts = 0; parts <= 3; parts += parts ? 2 : 1, count++)
                    check((struct scene){.pipelined = parts == 0,
                                         .parts = parts ? parts : 1,
                                         .moe = flags & 1,
                                         .resend = flags & 2,
                                         .gathers = flags & 4,
                                         .has_input = flags & 8,
                                         .recompute = {a, f, 0}});
    assert_int_equal(count, 4 * 3 * 16 * 3);
}

/* ---- head and step's end ------------------------------------------------------------------------------- */

static void test_head(void **state) {
    (void)state;
    struct schedule *s = schedule_new(3, 4, 4);
    int arrived = schedule_compute(s, KIND_EMBED, PASS_FORWARD, -1, 3, 0, 1);
    const double seconds[] = {5, 11};
    int forward = plan_add_head(s, 2, 3, 1, 4, arrived, seconds[0]);
    int backward = plan_add_head_backward(s, forward, seconds[1], 640);
    assert_true(backward == 2 && s->op_count == 3);
    for (int i = 1; i <= 2; i++) {
        const struct operation *op = &s->ops[i];
        assert_true(op->kind == KIND_HEAD && op->pass == (i == 1 ? PASS_FORWARD : PASS_BACKWARD));
        assert_true(op->layer == -1 && op->micro_batch == 3 && op->chunk == 1 && op->chunks == 4);
        assert_true(op->lane_count == 1 && op->lanes[0] == lane_of(2, RESOURCE_COMPUTE));
        assert_true(op->duration == seconds[i - 1]);
        assert_waits(s, i, i - 1, NOBODY);
    }
    assert_int_equal(s->activation_count, 1); /* the logits are never held whole */
    const struct activation *input = &s->activations[0];
    assert_true(input->role == ROLE_HEAD_INPUT && input->layer == 4 && input->micro_batch == 3);
    assert_true(input->group == 2 && input->producer == arrived && input->freed_by == backward);
    assert_true(input->bytes == 640);
    schedule_free(s);
}

/* Reduction behind everything, optimizer behind it, parameters gathered last; what takes no time is not
 * there.
 */
static void test_step_end(void **state) {
    (void)state;
    static const double times[] = {0, 1e-7, 0.5, 3};
    for (size_t r = 0; r < COUNT(times); r++)
        for (size_t g = 0; g < COUNT(times); g++) {
            struct schedule *s = schedule_new(2, 1, 2);
            int after[2];
            for (int i = 0; i < 2; i++)
                after[i] = schedule_compute(s, KIND_EMBED, PASS_BACKWARD, -1, i, 1, 1);
            struct step_end end = {.grad_sync = times[r],
                                   .param_gather = times[g],
                                   .optimizer = 7,
                                   .sync_bytes = 40,
                                   .gather_bytes = 20};
            int optimizer = plan_add_step_end(s, 1, end, after, 2);
            int reduced = times[r] > 0 ? 2 : NOBODY, at = 2;
            if (reduced >= 0) {
                const struct operation *op = &s->ops[at++];
                assert_true(op->kind == KIND_GRAD_SYNC && op->pass == PASS_BACKWARD);
                assert_true(op->duration == times[r] && op->bytes == 40 && op->lane_count == 2);
                assert_true(op->lanes[0] == lane_of(1, RESOURCE_SEND));
                assert_true(op->lanes[1] == lane_of(1, RESOURCE_RECV));
                assert_waits(s, reduced, after[0], after[1]);
            }
            assert_int_equal(optimizer, at);
            const struct operation *op = &s->ops[at++];
            assert_true(op->kind == KIND_OPTIMIZER && op->pass == PASS_BACKWARD && op->duration == 7);
            assert_true(op->lane_count == 1 && op->lanes[0] == lane_of(1, RESOURCE_COMPUTE));
            assert_waits(s, optimizer, reduced >= 0 ? reduced : after[0], reduced >= 0 ? NOBODY : after[1]);
            if (times[g] > 0) {
                op = &s->ops[at];
                assert_true(op->kind == KIND_PARAM_GATHER && op->pass == PASS_FORWARD);
                assert_true(op->duration == times[g] && op->bytes == 20 && op->lane_count == 2);
                assert_true(op->lanes[0] == lane_of(1, RESOURCE_SEND));
                assert_true(op->lanes[1] == lane_of(1, RESOURCE_RECV));
                assert_waits(s, at++, optimizer, NOBODY);
            }
            assert_int_equal(s->op_count, at);
            for (int i = 2; i < at; i++) assert_true(s->ops[i].layer == -1 && s->ops[i].micro_batch == -1);
            schedule_free(s);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_combination),
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_step_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
