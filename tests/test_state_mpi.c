/*
A rank's state: layout, tables, gradient sums, AdamW with every memory lever, collecting; on real MPI ranks.

Run plainly this is a cmocka program that starts itself under mpirun once a setting; run by mpirun it is a
rank of that setting, which ends the run with a message at the first thing that is wrong.

Gradients are known functions of parameter, element, rank and step. They are exact or rough. Exact ones are
eighths, whose sums are exact even in BF16: what comes out must be the bits of one process's AdamW. Rough ones
round, and test that the bits do not depend on ZeRO nor on who holds them.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "sim/sim.h"
#include "state/state.h"
#include "tests/under_mpi.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SEED = 7, STEPS = 2 };
static const bool IS_DOUBLE = sizeof(floatX) == sizeof(double);

struct setting {
    const char *name, *system;
    int ranks;
    const char *parallel;
    bool tied;
    int vocab;
    const char *head;
};
static const struct setting settings[] = {
    {"stages_of_3", "megatron", 6, "\"pp\":1,\"vpp\":1,\"ep\":3", false, 31, "last-ffn"},
    {"two_stages_tied", "megatron", 8, "\"pp\":2,\"vpp\":1,\"ep\":2", true, 31, "last-ffn"},
    {"separate_2_to_1_tied", "disagmoe", 6, "\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":1", true, 31,
     "last-ffn"},
    {"separate_1_to_2", "disagmoe", 12, "\"groups\":2,\"attn_gpus\":1,\"ffn_gpus\":2", false, 31, "last-ffn"},
    {"heads_of_2_groups_tied", "disagmoe", 8, "\"groups\":2,\"attn_gpus\":2,\"ffn_gpus\":2,\"cp\":2", true,
     31, "all-ffn"},
    /* slices of more than one message */
    {"large_tensors", "megatron", 3, "\"pp\":1,\"vpp\":1,\"ep\":3", false, 9000, "last-ffn"},
};

/* ---- a rank: help ------------------------------------------------------------------------------------ */

static int my_rank;

/* Ends all ranks with a message unless something holds. */
#define check(holds, ...) ((holds) ? (void)0 : wrong(__VA_ARGS__))
static void wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void wrong(const char *format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    fprintf(stderr, "rank %d: %s\n", my_rank, message);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

struct run {
    struct experiment experiment;
    struct plan plan; /* its memory levers are changed between states */
    struct schedule *schedule;
    struct ranks ranks;
    struct rope rope;
    struct parameters whole;
    struct arena *arena;
};

static void read_setting(struct run *run, const struct setting *setting) {
    struct text text = {0};
    struct errors errors = {0};
    struct json cluster = json_read_file("experiments/clusters/h800-16x8.json", run->arena, &errors);
    json_set_path(cluster.node, "nodes", json_number(1));
    json_set_path(cluster.node, "gpus_per_node", json_number(setting->ranks));
    json_set_path(cluster.node, "nics_per_node", json_number(setting->ranks));
    char *printed = cJSON_PrintUnformatted(cluster.node);
    text_add(&text,
             "{\"model\":{\"name\":\"tiny\",\"layers\":3,\"hidden\":12,\"vocab\":%d,\"tie_embeddings\":%s,"
             "\"attention\":{\"heads\":4,\"kv_heads\":2,\"head_dim\":6,\"qk_norm\":true,\"bias\":true,"
             "\"sinks\":true},\"moe\":{\"experts\":7,\"top_k\":2,\"expert_hidden\":5,\"shared_experts\":1,"
             "\"dense_layers\":1,\"dense_hidden\":9,\"bias\":true}},\"cluster\":%s,\"systems\":[\"%s\"],"
             "\"seq_len\":8,\"micro_batches\":2,\"parallel\":{%s},\"memory\":{},"
             "\"order\":{\"wave\":1,\"waves_in_flight\":1},\"placement\":\"mixed-nodes\",\"head\":\"%s\","
             "\"costs\":{\"attn_"
             "fwd_s\":1,\"ffn_fwd_s\":1}}",
             setting->vocab, setting->tied ? "true" : "false", printed, setting->system, setting->parallel,
             setting->head);
    experiment_read_text(text.text, "experiments/test.json", &run->experiment, &errors);
    check(!errors.count, "%s", errors.count ? errors.messages[0] : "");
    free(text.text);
    cJSON_free(printed);
    cJSON_Delete(cluster.node);
}

static struct run run_new(const struct setting *setting) {
    struct run run = {.arena = arena_new()};
    struct errors errors = {0};
    bool feasible = false;
    read_setting(&run, setting);
    const struct system *system = system_named(setting->system);
    const struct point *point = &run.experiment.points[0];
    tune_point(system, point, &run.plan, &feasible, &errors);
    check(feasible && !errors.count, "no plan: %s", errors.count ? errors.messages[0] : "");
    run.schedule = system->build(&run.plan);
    run.rope = rope_new(run.arena, point->seq_len, point->model->attention.head_dim, 1e4);
    run.whole = parameters_new(run.arena, point->model, NULL, NULL);
    return run;
}

static void run_free(struct run *run) {
    schedule_free(run->schedule);
    experiment_free(&run->experiment);
    arena_free(run->arena);
}

/* ---- known gradients --------------------------------------------------------------------------------- */

enum filling { EXACT, ROUGH, FILLINGS };

static uint64_t gradient_key(const struct parameter *p, int rank, int step) {
    uint64_t key = 14695981039346656037u + (uint64_t)(rank + 100 * step) * 0x9e3779b97f4a7c15u;
    for (const char *name = p->name; *name; name++) key = (key ^ (unsigned char)*name) * 1099511628211u;
    return key;
}

/* [−1, 1], a float; eighths when exact */
static float gradient(enum filling filling, uint64_t key, size_t element) {
    uint64_t x = (key ^ element) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    x ^= x >> 33;
    return filling == EXACT ? (float)((int)(x % 17) - 8) / 8 : (float)(x >> 40) / (1 << 23) - 1;
}

static void fill_gradients(struct state *state, enum filling filling, int step) {
    for (int i = 0; i < state->parameters.count; i++) {
        const struct parameter *p = &state->parameters.list[i];
        uint64_t key = gradient_key(p, state->rank, step);
        for (size_t e = 0; e < p->count; e++) {
            float value = gradient(filling, key, e);
            if (state->gradients)
                state->gradients[p->offset + e] = value;
            else
                state->half_gradients[p->offset + e] = bf16_from_float(value);
        }
    }
}

static floatX gradient_of(const struct state *state, size_t at) {
    return state->gradients ? state->gradients[at] : (floatX)bf16_to_float(state->half_gradients[at]);
}

/* Sums over holders, of the whole model. */
static double *expected_sums(const struct run *run, enum filling filling, int step) {
    double *sums = must_alloc(run->whole.total * sizeof *sums);
    int *holders = must_alloc((size_t)run->ranks.count * sizeof *holders);
    for (int i = 0; i < run->whole.count; i++) {
        const struct parameter *p = &run->whole.list[i];
        int count = parameter_holders(&run->ranks, p, holders);
        for (int h = 0; h < count; h++) {
            uint64_t key = gradient_key(p, holders[h], step);
            for (size_t e = 0; e < p->count; e++) sums[p->offset + e] += gradient(filling, key, e);
        }
    }
    free(holders);
    return sums;
}

static size_t whole_place(const struct run *run, const struct parameter *p) {
    return parameters_find(&run->whole, p->name)->offset;
}

/* ---- layout, bytes ----------------------------------------------------------------------------------- */

static void check_bucket(const struct run *run, const struct state *state, const struct bucket *bucket) {
    int *holders = must_alloc((size_t)run->ranks.count * sizeof *holders);
    size_t inside = 0;
    for (int i = 0; i < state->parameters.count; i++) {
        const struct parameter *p = &state->parameters.list[i];
        if (p->offset < bucket->start || p->offset >= bucket->start + bucket->count) continue;
        int count = parameter_holders(&run->ranks, p, holders);
        check(count == bucket->holder_count && !memcmp(holders, bucket->holders, (size_t)count * sizeof(int)),
              "%s is in a bucket of other holders", p->name);
        check(p->offset == bucket->start + inside, "%s is out of order in its bucket", p->name);
        inside += p->count;
    }
    check(inside == bucket->count, "a bucket of %zu elements has tensors of %zu", bucket->count, inside);
    bool within = true;
    size_t covered = 0;
    for (int h = 0; h < bucket->holder_count; h++) {
        struct slice slice = bucket_slice(bucket, h);
        check(slice.first == covered, "slices of a bucket do not follow one another");
        covered += slice.count;
        within &=
            seat_of(&run->ranks, bucket->holders[h]).group == seat_of(&run->ranks, bucket->holders[0]).group;
    }
    check(covered == bucket->count, "slices do not cover their bucket");
    check(within == bucket->within_group, "a bucket is wrong about its group");
    check(bucket->holders[bucket->me] == my_rank, "a bucket is wrong about this rank");
    free(holders);
}

static void check_layout(const struct run *run, const struct state *state) {
    struct parameters held = rank_parameters(run->arena, &run->ranks, my_rank);
    check(held.count == state->parameters.count, "another number of parameters");
    for (int i = 0; i < held.count; i++)
        check(!strcmp(held.list[i].name, state->parameters.list[i].name), "parameters in another order");
    size_t start = 0;
    for (int b = 0; b < state->bucket_count; b++) {
        check(state->buckets[b].start == start && state->buckets[b].count,
              "buckets do not follow one another");
        check_bucket(run, state, &state->buckets[b]);
        start += state->buckets[b].count;
    }
    check(start == held.total, "buckets do not hold all parameters");
}

static void check_bytes(const struct run *run, const struct state *state) {
    const struct memory *levers = &run->plan.memory;
    size_t total = state->parameters.total, updated = 0;
    for (int b = 0; b < state->bucket_count; b++) {
        const struct bucket *bucket = &state->buckets[b];
        updated += levers->zero ? bucket_slice(bucket, bucket->me).count : bucket->count;
        if (levers->zero)
            check(bucket->updated.count <= bucket->count / (size_t)bucket->holder_count + 1,
                  "ZeRO leaves too large a slice");
    }
    size_t moments = 2 * updated * (levers->moments == PRECISION_BF16 ? 2 : sizeof(floatX));
    check(state->value_bytes == total * sizeof(floatX), "bytes of values");
    check(state->gradient_bytes == total * (levers->grads == PRECISION_BF16 ? 2 : sizeof(floatX)),
          "bytes of gradients");
    check(state->moment_bytes == (levers->offload ? 0 : moments), "bytes of moments");
    check(state->host_bytes == (levers->offload ? moments : 0), "bytes on the host");
}

/* ---- tables ------------------------------------------------------------------------------------------ */

/* Tensors of one component as the tables give them. */
struct view {
    const struct state *state;
    struct {
        const struct parameter *parameter;
        floatX *gradient;
    } tensors[256];
    int count;
};

static size_t size_of(const struct state *state, const char *name) {
    const struct parameter *p = parameters_find(&state->parameters, name);
    return p ? p->count : 0;
}

/* A tensor that lies `after` elements behind the pointers. */
static void see(struct view *view, const char *name, floatX *value, floatX *into, size_t after) {
    const struct state *state = view->state;
    const struct parameter *p = parameters_find(&state->parameters, name);
    if (!p) {
        check(!value && !into, "%s is in the tables and not held", name);
        return;
    }
    check(value && value + after == state->values + p->offset, "%s: the table's values are elsewhere", name);
    check(into, "%s: no gradient", name);
    if (state->gradients)
        check(into + after == state->gradients + p->offset, "%s: the table's gradients are elsewhere", name);
    view->tensors[view->count].parameter = p;
    view->tensors[view->count++].gradient = into + after;
}

static void see_attention(struct view *view, const struct attention_block *block, int layer) {
    const struct attention_tensors *w = &block->weights, *g = &block->gradients;
    const struct {
        const char *name, *behind; /* behind: the tensors before it in the same matrix */
        floatX *value, *into;
    } rows[] = {
        {"input_layernorm.weight", "", w->input_norm, g->input_norm},
        {"self_attn.q_proj.weight", "", w->qkv, g->qkv},
        {"self_attn.k_proj.weight", "q", w->qkv, g->qkv},
        {"self_attn.v_proj.weight", "qk", w->qkv, g->qkv},
        {"self_attn.q_proj.bias", "", w->qkv_bias, g->qkv_bias},
        {"self_attn.k_proj.bias", "q", w->qkv_bias, g->qkv_bias},
        {"self_attn.v_proj.bias", "qk", w->qkv_bias, g->qkv_bias},
        {"self_attn.q_norm.weight", "", w->q_norm, g->q_norm},
        {"self_attn.k_norm.weight", "", w->k_norm, g->k_norm},
        {"self_attn.sinks", "", w->sinks, g->sinks},
        {"self_attn.o_proj.weight", "", w->out, g->out},
        {"self_attn.o_proj.bias", "", w->out_bias, g->out_bias},
        {"post_attention_layernorm.weight", "", w->ffn_norm, g->ffn_norm},
        {"mlp.gate.weight", "", w->router, g->router},
        {"mlp.gate.bias", "", w->router_bias, g->router_bias},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char name[128], before[128];
        size_t after = 0;
        snprintf(name, sizeof name, "model.layers.%d.%s", layer, rows[i].name);
        for (const char *letter = rows[i].behind; *letter; letter++) {
            snprintf(before, sizeof before, "%s", name);
            strstr(before, "_proj")[-1] = *letter;
            after += size_of(view->state, before);
        }
        see(view, name, rows[i].value, rows[i].into, after);
    }
}

static void see_swiglu(struct view *view, const char *prefix, struct ffn_tensors w, struct ffn_tensors g) {
    char gate[128], gate_bias[128], name[128];
    snprintf(gate, sizeof gate, "%sgate_proj.weight", prefix);
    snprintf(gate_bias, sizeof gate_bias, "%sgate_proj.bias", prefix);
    see(view, gate, w.gate_up, g.gate_up, 0);
    see(view, gate_bias, w.gate_up_bias, g.gate_up_bias, 0);
    snprintf(name, sizeof name, "%sup_proj.weight", prefix);
    see(view, name, w.gate_up, g.gate_up, size_of(view->state, gate));
    snprintf(name, sizeof name, "%sup_proj.bias", prefix);
    see(view, name, w.gate_up_bias, g.gate_up_bias, size_of(view->state, gate_bias));
    snprintf(name, sizeof name, "%sdown_proj.weight", prefix);
    see(view, name, w.down, g.down, 0);
    snprintf(name, sizeof name, "%sdown_proj.bias", prefix);
    see(view, name, w.down_bias, g.down_bias, 0);
}

static struct ffn_tensors expert_at(const struct expert_tensors *t, int e) {
    return (struct ffn_tensors){t->gate_up[e], t->gate_up_bias[e], t->down[e], t->down_bias[e]};
}

static void see_experts(struct view *view, const struct run *run, const struct expert_block *block,
                        int layer) {
    struct seat seat = seat_of(&run->ranks, my_rank);
    int experts = run->ranks.model->moe.experts, here = run->schedule->groups[seat.group].gpus;
    bool moe = model_layer_is_moe(run->ranks.model, layer);
    int first = plan_first_expert(experts, here, seat.index);
    int count = plan_first_expert(experts, here, seat.index + 1) - first;
    check(block->experts == (moe ? count : 0), "layer %d: %d experts", layer, block->experts);
    char name[128];
    for (int e = 0; e < block->experts; e++) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.", layer, first + e);
        see_swiglu(view, name, expert_at(&block->weights, e), expert_at(&block->gradients, e));
    }
    snprintf(name, sizeof name, "model.layers.%d.mlp.%s", layer, moe ? "shared_experts." : "");
    see_swiglu(view, name, block->shared, block->shared_gradients);
    snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", layer);
    see(view, name, block->ffn_norm, block->ffn_norm_gradient, 0);
}

/* The component's tensors, with a check of the pointers. */
static struct view view_of(const struct run *run, const struct state *state, enum component component,
                           int layer) {
    struct view view = {.state = state};
    if (component == COMPONENT_ATTENTION) see_attention(&view, &state->attention[layer], layer);
    if (component == COMPONENT_FFN) see_experts(&view, run, &state->experts[layer], layer);
    if (component == COMPONENT_EMBEDDING)
        see(&view, "model.embed_tokens.weight", state->embedding, state->embedding_gradient, 0);
    if (component == COMPONENT_HEAD) {
        const char *output =
            run->ranks.model->tie_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
        see(&view, "model.norm.weight", state->head.norm, state->head.norm_gradient, 0);
        see(&view, output, state->head.output, state->head.output_gradient, 0);
    }
    return view;
}

/* Whether a BF16 sum is one of the two numbers beside, or is, the exact one. */
static bool is_beside(uint16_t found, double exact) {
    double spacing = fmax(fabs(exact) * 0x1p-7, 0x1p-133), off = bf16_to_float(found) - exact;
    return fabs(off) < spacing;
}

static void fill_component(const struct view *view, int step) {
    for (int i = 0; i < view->count; i++) {
        const struct parameter *p = view->tensors[i].parameter;
        for (size_t e = 0; e < p->count; e++) {
            floatX *into = &view->tensors[i].gradient[e];
            if (view->state->half_gradients) check(*into == 0, "%s: the workspace is not zeroed", p->name);
            *into = gradient(ROUGH, gradient_key(p, my_rank, step), e);
        }
    }
}

/* One backward operation's gradients; each sum must be what was there and what was filled in. */
static void add_component(struct state *state, const struct view *view, enum component component, int layer,
                          int step) {
    struct context context = {0};
    size_t total = state->parameters.total;
    double *expected = must_alloc(total * sizeof *expected);
    for (size_t i = 0; i < total; i++) expected[i] = state->half_gradients ? gradient_of(state, i) : 0;
    for (int i = 0; i < view->count; i++) {
        const struct parameter *p = view->tensors[i].parameter;
        for (size_t e = 0; e < p->count; e++)
            expected[p->offset + e] += gradient(ROUGH, gradient_key(p, my_rank, step), e);
    }
    state_begin_gradients(state, component, layer);
    fill_component(view, step);
    state_add_gradients(state, &context, component, layer, step, step);
    for (size_t i = 0; i < total; i++)
        check(state->half_gradients ? is_beside(state->half_gradients[i], expected[i])
                                    : (double)state->gradients[i] == expected[i],
              "component %d, layer %d: gradient %zu is %g, expected %g", component, layer, i,
              (double)gradient_of(state, i), expected[i]);
    free(expected);
}

/* Two backward operations of the component add up, and nothing else changes; in BF16 to the same bits every
   time. Returns its elements. */
static size_t check_gradients_of(const struct run *run, struct state *state, enum component component,
                                 int layer) {
    struct view view = view_of(run, state, component, layer);
    uint16_t *first = must_alloc(state->gradient_bytes);
    size_t size = 0;
    for (int i = 0; i < view.count; i++) size += view.tensors[i].parameter->count;
    for (int round = 0; round < 2; round++) {
        state_zero_gradients(state);
        add_component(state, &view, component, layer, 0);
        if (!state->half_gradients) break;
        add_component(state, &view, component, layer, 1);
        if (round == 0) memcpy(first, state->half_gradients, state->gradient_bytes);
        check(!memcmp(first, state->half_gradients, state->gradient_bytes),
              "component %d, layer %d: sums differ from run to run", component, layer);
    }
    free(first);
    return size;
}

static bool is_zero(const void *memory, size_t bytes) {
    const char *at = memory;
    for (size_t i = 0; i < bytes; i++)
        if (at[i]) return false;
    return true;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static void check_tables(const struct run *run, struct state *state) {
    int group = seat_of(&run->ranks, my_rank).group;
    size_t most = 0;
    for (int layer = 0; layer < run->ranks.model->layers; layer++) {
        if (run->ranks.attention[layer] == group)
            most = larger(most, check_gradients_of(run, state, COMPONENT_ATTENTION, layer));
        else
            check(is_zero(&state->attention[layer], sizeof state->attention[layer]), "an attention not held");
        if (run->ranks.ffn[layer] == group)
            most = larger(most, check_gradients_of(run, state, COMPONENT_FFN, layer));
        else
            check(is_zero(&state->experts[layer], sizeof state->experts[layer]), "experts not held");
    }
    if (run->ranks.embed == group)
        most = larger(most, check_gradients_of(run, state, COMPONENT_EMBEDDING, -1));
    else
        check(!state->embedding && !state->embedding_gradient, "an embedding not held");
    if (head_part(&run->ranks, seat_of(&run->ranks, state->rank)) >= 0)
        most = larger(most, check_gradients_of(run, state, COMPONENT_HEAD, -1));
    else
        check(is_zero(&state->head, sizeof state->head), "a head not held");
    check(state->workspace_bytes == (state->half_gradients ? most * sizeof(floatX) : 0),
          "a workspace of %zu bytes for %zu elements", state->workspace_bytes, most);
}

/* ---- steps ------------------------------------------------------------------------------------------- */

/* One process's AdamW on the whole model. */
struct single {
    floatX *values, *gradients, *moment1, *moment2;
};

static struct single single_new(const struct run *run) {
    size_t bytes = run->whole.total * sizeof(floatX);
    struct single single = {must_alloc(bytes), must_alloc(bytes), must_alloc(bytes), must_alloc(bytes)};
    parameters_initialise(&run->whole, single.values, SEED);
    return single;
}

static void single_free(struct single *single) {
    free(single->values);
    free(single->gradients);
    free(single->moment1);
    free(single->moment2);
}

static void single_step(struct single *single, const struct run *run, struct context *context,
                        const struct optimizer *optimizer, int step, double scale, const double *sums) {
    for (int i = 0; i < run->whole.count; i++) {
        const struct parameter *p = &run->whole.list[i];
        for (size_t e = p->offset; e < p->offset + p->count; e++) single->gradients[e] = (floatX)sums[e];
        adamw(context, optimizer, step, scale, p->decay, single->values + p->offset,
              single->gradients + p->offset, single->moment1 + p->offset, single->moment2 + p->offset,
              p->count);
    }
}

/* The whole model's values or gradients, on every rank. */
static floatX *collected(const struct run *run, const struct state *state, bool gradients) {
    floatX *array = must_alloc(run->whole.total * sizeof *array);
    state_collect(state, MPI_COMM_WORLD, gradients, &run->whole, array);
    MPI_Bcast(array, (int)(run->whole.total * sizeof *array), MPI_BYTE, 0, MPI_COMM_WORLD);
    return array;
}

/* Elements that must be right after a reduction: with ZeRO those of this rank's slices. */
static bool is_reduced(const struct state *state, size_t at) {
    for (int b = 0; b < state->bucket_count && state->levers.zero; b++) {
        const struct bucket *bucket = &state->buckets[b];
        struct slice slice = bucket_slice(bucket, bucket->me);
        size_t first = bucket->start + slice.first;
        if (at >= bucket->start && at < bucket->start + bucket->count)
            return at >= first && at < first + slice.count;
    }
    return true;
}

static void check_sums(const struct run *run, const struct state *state, enum filling filling,
                       const double *sums, const floatX *whole) {
    double holders = run->ranks.count, unit = state->half_gradients ? 0x1p-8 : IS_DOUBLE ? 0x1p-53 : 0x1p-24;
    double tolerance = filling == EXACT ? 0 : holders * holders * unit;
    if (state->half_gradients && filling == ROUGH)
        tolerance = 1.5 * holders * unit; /* rounded once each, and once */
    for (size_t i = 0; i < run->whole.total; i++)
        check(fabs((double)whole[i] - sums[i]) <= tolerance, "collected gradient %zu is %g, expected %g", i,
              (double)whole[i], sums[i]);
    for (int i = 0; i < state->parameters.count; i++) {
        const struct parameter *p = &state->parameters.list[i];
        size_t place = whole_place(run, p);
        for (size_t e = 0; e < p->count; e++)
            check(!is_reduced(state, p->offset + e) || gradient_of(state, p->offset + e) == whole[place + e],
                  "%s[%zu]: its sum is not that of the other holders", p->name, e);
    }
}

/* Σ of squares over all ranks, against the whole gradient's. */
static double check_squares(const struct run *run, const struct state *state, enum filling filling,
                            const double *sums) {
    double mine = state_gradient_squares(state), all, expected = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    for (size_t i = 0; i < run->whole.total; i++) expected += sums[i] * sums[i];
    double tolerance = filling == EXACT ? 0 : state->half_gradients ? 0.01 : IS_DOUBLE ? 1e-11 : 1e-6;
    check(fabs(all - expected) <= tolerance * expected, "the sum of squares is %.17g, expected %.17g", all,
          expected);
    return all;
}

static void check_values(const struct run *run, const struct state *state, const floatX *whole,
                         const struct single *single, double tolerance) {
    for (int i = 0; i < state->parameters.count; i++) {
        const struct parameter *p = &state->parameters.list[i];
        size_t place = whole_place(run, p);
        for (size_t e = 0; e < p->count; e++)
            check(state->values[p->offset + e] == whole[place + e],
                  "%s[%zu]: its value is not that of the other holders", p->name, e);
    }
    for (size_t i = 0; i < run->whole.total; i++)
        check(fabs((double)(whole[i] - single->values[i])) <= tolerance, "value %zu is %.17g, expected %.17g",
              i, (double)whole[i], (double)single->values[i]);
}

/* How far values may be from one process's after a step. */
static double value_tolerance(const struct state *state, enum filling filling, double rates) {
    if (state->half_gradients && filling == ROUGH) return 3 * rates; /* a gradient near 0 may turn its sign */
    if (state->half_moment1) return 0.02 * rates;
    return filling == EXACT ? 0 : IS_DOUBLE ? 1e-13 : 1e-6;
}

/* Gradients and values of the whole model after each step. */
struct outcome {
    floatX *gradients[STEPS], *values[STEPS];
};

static void outcome_free(struct outcome *outcome) {
    for (int step = 0; step < STEPS; step++) {
        free(outcome->gradients[step]);
        free(outcome->values[step]);
    }
}

static struct outcome check_steps(const struct run *run, struct state *state, enum filling filling,
                                  double *const *sums) {
    struct outcome outcome;
    struct context context = {0};
    struct single single = single_new(run);
    struct optimizer optimizer = optimizer_default();
    double rates = 0;
    for (int step = 0; step < STEPS; step++) {
        state_zero_gradients(state);
        fill_gradients(state, filling, step);
        state_reduce(state, true);
        state_reduce(state, false);
        outcome.gradients[step] = collected(run, state, true);
        check_sums(run, state, filling, sums[step], outcome.gradients[step]);
        double scale = clip_scale(&optimizer, check_squares(run, state, filling, sums[step]));
        state_update(state, &context, &optimizer, step, scale);
        state_gather(state);
        outcome.values[step] = collected(run, state, false);
        single_step(&single, run, &context, &optimizer, step, scale, sums[step]);
        rates += optimizer_rate(&optimizer, step);
        check_values(run, state, outcome.values[step], &single, value_tolerance(state, filling, rates));
    }
    single_free(&single);
    context_free(&context);
    return outcome;
}

/* ZeRO moves work and changes no bit. */
static void check_zero(struct run *run, enum filling filling, double *const *sums) {
    struct outcome outcomes[2];
    size_t bytes = run->whole.total * sizeof(floatX);
    for (int zero = 0; zero < 2; zero++) {
        run->plan.memory.zero = zero;
        run->plan.memory.offload = filling == ROUGH;
        struct state *state = state_new(&run->ranks, my_rank, MPI_COMM_WORLD, &run->rope, SEED);
        check_bytes(run, state);
        if (filling == EXACT) {
            check_layout(run, state);
            check_tables(run, state);
        }
        outcomes[zero] = check_steps(run, state, filling, sums);
        state_free(state);
    }
    for (int step = 0; step < STEPS; step++) {
        check(!memcmp(outcomes[0].gradients[step], outcomes[1].gradients[step], bytes),
              "ZeRO changes gradients");
        check(!memcmp(outcomes[0].values[step], outcomes[1].values[step], bytes), "ZeRO changes values");
    }
    outcome_free(&outcomes[0]);
    outcome_free(&outcomes[1]);
}

static int run_rank(const char *name) {
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
    const struct setting *setting = NULL;
    for (size_t i = 0; i < COUNT(settings); i++)
        if (!strcmp(settings[i].name, name)) setting = &settings[i];
    check(setting, "there is no setting %s", name);
    struct run run = run_new(setting);
    struct errors errors = {0};
    check(ranks_read(&run.ranks, &run.plan, run.schedule, run.arena, &errors), "%s",
          errors.count ? errors.messages[0] : "");
    check(run.ranks.count == setting->ranks, "a plan of %d ranks", run.ranks.count);
    for (enum filling filling = EXACT; filling < FILLINGS; filling++) {
        double *sums[STEPS];
        for (int step = 0; step < STEPS; step++) sums[step] = expected_sums(&run, filling, step);
        for (int levers = 0; levers < 4; levers++) {
            run.plan.memory.grads = levers & 1 ? PRECISION_BF16 : PRECISION_FP32;
            run.plan.memory.moments = levers & 2 ? PRECISION_BF16 : PRECISION_FP32;
            check_zero(&run, filling, sums);
        }
        for (int step = 0; step < STEPS; step++) free(sums[step]);
    }
    run_free(&run);
    MPI_Finalize();
    return 0;
}

/* ---- the cmocka program ------------------------------------------------------------------------------ */

static const char *program;

static void start_ranks(void **state) {
    const struct setting *setting = *state;
    assert_ranks_succeed(setting->ranks, program, setting->name);
}

int main(int argc, char **argv) {
    program = argv[0];
    if (inside_mpi()) return argc == 2 ? run_rank(argv[1]) : 2;
    struct CMUnitTest tests[COUNT(settings)];
    for (size_t i = 0; i < COUNT(settings); i++)
        tests[i] = (struct CMUnitTest){settings[i].name, start_ranks, NULL, NULL, (void *)&settings[i]};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
