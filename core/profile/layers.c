/*
The blocks of a layer, embedding and head, as the executor calls them (core/train), with the busiest rank's
share of experts and copies. Every rank has a layer of its own: none waits for another.
*/
#include "profile/profile.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* A rank's numbers of the plan, and its memory, which is all scratch. */
struct bench {
    const struct measurement *measurement;
    const struct plan *plan;
    const struct model *model;
    struct context context;
    struct arena *arena;
    struct rng rng;
    int tokens; /* of a micro-batch, on an attention rank */
};

static struct bench bench_new(const struct measurement *measurement) {
    const struct plan *plan = measurement->plan;
    struct bench bench = {.measurement = measurement,
                          .plan = plan,
                          .model = plan->point->model,
                          .arena = arena_new(),
                          .rng = rng_seed((uint64_t)plan->point->seed),
                          .tokens = (int)plan_tokens(plan)};
    bench.context.workers = workers_new(1);
    return bench;
}

static void bench_free(struct bench *bench) {
    workers_free(bench->context.workers);
    context_free(&bench->context);
    arena_free(bench->arena);
}

static void *zeroed(struct bench *bench, size_t bytes) {
    return memset(scratch_take(&bench->context, bytes + 1), 0, bytes);
}

/* Normal numbers, as a layer's input is behind a norm. */
static floatX *random_rows(struct bench *bench, int rows, int columns) {
    size_t count = (size_t)rows * (size_t)columns;
    floatX *values = scratch_floats(&bench->context, count + 1);
    for (size_t i = 0; i < count; i++) values[i] = (floatX)rng_normal(&bench->rng);
    return values;
}

static void measure(const struct bench *bench, int stages, void (*run)(void *work, int stage), void *work,
                    struct spread *seconds) {
    const struct lap lap = {bench->measurement->comm, bench->measurement->repeats, stages, run, work};
    lap_measure(&lap, seconds);
}

/* ---- load -------------------------------------------------------------------------------------------- */

/* Copies of one micro-batch at the experts of the busiest rank of a feed-forward group. */
struct load {
    int first, experts;
    int *counts; /* (experts) */
    int routed, tokens;
};

static int copies_of(const struct bench *bench, double all, int expert) {
    const struct point *point = bench->plan->point;
    double share = point->routing.share[expert];
    if (bench->model->moe.capacity_factor > 0)
        share = fmin(share, model_expert_capacity(bench->model, point->seq_len) /
                                ((double)point->seq_len * bench->model->moe.top_k));
    return (int)lround(all * share);
}

static struct load load_of(struct bench *bench, int layer) {
    const struct ranks *ranks = bench->measurement->ranks;
    int gpus = ranks->schedule->groups[ranks->ffn[layer]].gpus, experts = bench->model->moe.experts;
    int tokens = bench->tokens * ranks->attention_ranks;
    struct load busiest = {.tokens = (tokens + gpus - 1) / gpus};
    if (!model_layer_is_moe(bench->model, layer)) return busiest;
    double all = (double)tokens * model_copies(bench->model, layer);
    for (int gpu = 0; gpu < gpus; gpu++) {
        int first = plan_first_expert(experts, gpus, gpu), end = plan_first_expert(experts, gpus, gpu + 1);
        int routed = 0;
        for (int expert = first; expert < end; expert++) routed += copies_of(bench, all, expert);
        if (routed < busiest.routed) continue;
        busiest.first = first;
        busiest.experts = end - first;
        busiest.routed = routed;
    }
    busiest.counts = arena_alloc(bench->arena, ((size_t)busiest.experts + 1) * sizeof(int));
    for (int i = 0; i < busiest.experts; i++) busiest.counts[i] = copies_of(bench, all, busiest.first + i);
    return busiest;
}

/* ---- parameters -------------------------------------------------------------------------------------- */

struct kept_parameters {
    int layer;          /* −1: embedding and head */
    int first, experts; /* routed experts */
};

static bool keep(void *context, const struct parameter *parameter) {
    const struct kept_parameters *kept = context;
    if (parameter->layer != kept->layer) return false;
    if (parameter->owner != OWNER_EXPERT) return true;
    return parameter->expert >= kept->first && parameter->expert < kept->first + kept->experts;
}

struct weights {
    struct parameters parameters;
    floatX *values, *gradients;
};

static struct weights weights_new(struct bench *bench, struct kept_parameters kept) {
    struct weights weights = {.parameters = parameters_new(bench->arena, bench->model, keep, &kept)};
    size_t bytes = weights.parameters.total * sizeof(floatX);
    weights.values = zeroed(bench, bytes);
    weights.gradients = zeroed(bench, bytes);
    parameters_initialise(&weights.parameters, weights.values, (uint64_t)bench->plan->point->seed);
    return weights;
}

/* ---- attention --------------------------------------------------------------------------------------- */

struct attention_work {
    struct context *context;
    struct attention_block block;
    struct attention_part part;
    struct attention_kept kept;
    struct attention_pending pending;
    floatX *input, *dinput, *dmiddle, *dweights;
};

static void run_attention(void *work, int stage) {
    struct attention_work *a = work;
    if (stage == 0)
        attention_block_forward(a->context, &a->block, &a->part, &a->kept, a->input);
    else if (stage == 1)
        attention_block_backward_input(a->context, &a->block, &a->part, &a->kept, &a->pending, a->dinput,
                                       a->dmiddle, a->dweights, a->input);
    else
        attention_block_backward_weight(a->context, &a->block, &a->part, &a->kept, &a->pending);
}

static void measure_attention(struct bench *bench, int layer, const struct weights *weights,
                              const struct rope *rope, struct spread *seconds) {
    const struct model *model = bench->model;
    const struct point *point = bench->plan->point;
    int tokens = bench->tokens, hidden = model->hidden, count = point->micro_batch_size;
    int64_t sequences = batch_sequences(bench->measurement->ranks);
    struct attention_work work = {
        .context = &bench->context,
        .block = {.model = model,
                  .layer = layer,
                  .rope = rope,
                  .weights = attention_tensors(&weights->parameters, weights->values, layer),
                  .gradients = attention_tensors(&weights->parameters, weights->gradients, layer)},
        .part = {.sequences = whole_sequences(count, point->seq_len),
                 .key = {(uint64_t)point->seed, 0, layer, 0},
                 .aux_scale = route_aux_scale(model, sequences),
                 .z_scale = route_z_scale(model, sequences * point->seq_len)},
        .input = random_rows(bench, tokens, hidden),
        .dinput = random_rows(bench, tokens, hidden),
        .dmiddle = random_rows(bench, tokens, hidden)};
    if (model_layer_is_moe(model, layer)) work.dweights = random_rows(bench, tokens, model->moe.top_k);
    work.kept =
        attention_kept_place(model, layer, ATTENTION_NONE, tokens,
                             zeroed(bench, attention_kept_bytes(model, layer, ATTENTION_NONE, tokens)), NULL);
    work.kept.route.chosen = zeroed(bench, (size_t)count * model->moe.experts * sizeof(int));
    work.pending = attention_pending_place(model, layer, tokens,
                                           zeroed(bench, attention_pending_bytes(model, layer, tokens)));
    measure(bench, 3, run_attention, &work, seconds);
}

/* ---- feed-forward ------------------------------------------------------------------------------------ */

/* One of the two blocks that a pipelined system has, of received copies and of the rank's own tokens; a
   disaggregated one has the first alone. */
struct expert_work {
    struct context *context;
    struct expert_block block;
    struct expert_part part;
    struct expert_kept kept;
    struct expert_pending pending;
    floatX *input, *output, *doutput, *dinput, *dweights;
};
struct ffn_work {
    struct expert_work blocks[2];
    int count;
};

static void run_ffn(void *work, int stage) {
    struct ffn_work *ffn = work;
    for (int i = 0; i < ffn->count; i++) {
        struct expert_work *e = &ffn->blocks[i];
        if (stage == 0)
            expert_block_forward(e->context, &e->block, &e->part, &e->kept, e->output, e->input);
        else if (stage == 1)
            expert_block_backward_input(e->context, &e->block, &e->part, &e->kept, &e->pending, e->dinput,
                                        e->dweights, e->doutput, e->input);
        else
            expert_block_backward_weight(e->context, &e->block, &e->part, &e->kept, &e->pending, e->input);
    }
}

/* rows: all, of which the first `routed` have an expert; one of every `first_every` is a token's first (0:
   none). */
static struct expert_work expert_work_new(struct bench *bench, const struct expert_block *block,
                                          const int *counts, int routed, int rows, int first_every) {
    const struct model *model = bench->model;
    int layer = block->layer, hidden = model->hidden, firsts = 0;
    unsigned char *first = zeroed(bench, (size_t)rows);
    for (int i = 0; first_every && i < rows; i += first_every) firsts += first[i] = 1;
    struct expert_work work = {.context = &bench->context,
                               .block = *block,
                               .part = {.rows = rows, .counts = counts, .first = first},
                               .input = random_rows(bench, rows, hidden),
                               .output = random_rows(bench, rows, hidden),
                               .doutput = random_rows(bench, rows, hidden),
                               .dinput = random_rows(bench, rows, hidden)};
    if (!routed) work.block.experts = 0;
    if (routed) work.part.weights = random_rows(bench, rows, 1);
    if (routed) work.dweights = random_rows(bench, rows, 1);
    work.kept =
        expert_kept_place(model, layer, FFN_NONE, routed, firsts,
                          zeroed(bench, expert_kept_bytes(model, layer, FFN_NONE, routed, firsts)), NULL);
    work.pending = expert_pending_place(model, layer, routed, firsts,
                                        zeroed(bench, expert_pending_bytes(model, layer, routed, firsts)));
    return work;
}

static void measure_ffn(struct bench *bench, int layer, const struct weights *weights,
                        const struct load *load, struct spread *seconds) {
    const struct model *model = bench->model;
    const struct parameters *list = &weights->parameters;
    bool pipelined = bench->measurement->ranks->pipelined;
    const struct expert_block block = {
        .model = model,
        .layer = layer,
        .experts = load->experts,
        .ffn_norm = attention_tensors(list, weights->values, layer).ffn_norm,
        .ffn_norm_gradient = attention_tensors(list, weights->gradients, layer).ffn_norm,
        .weights = expert_tensors(bench->arena, list, weights->values, layer, load->first, load->experts),
        .gradients =
            expert_tensors(bench->arena, list, weights->gradients, layer, load->first, load->experts),
        .shared = ffn_tensors(list, weights->values, layer, -1),
        .shared_gradients = ffn_tensors(list, weights->gradients, layer, -1)};
    struct ffn_work work = {0};
    if (load->routed)
        work.blocks[work.count++] = expert_work_new(bench, &block, load->counts, load->routed, load->routed,
                                                    pipelined ? 0 : model_copies(model, layer));
    if (pipelined)
        work.blocks[work.count++] = expert_work_new(bench, &block, NULL, 0, bench->tokens, 1);
    else if (!model_layer_is_moe(model, layer))
        work.blocks[work.count++] = expert_work_new(bench, &block, NULL, 0, load->tokens, 1);
    measure(bench, 3, run_ffn, &work, seconds);
}

/* ---- layers that are alike --------------------------------------------------------------------------- */

static bool are_alike(const struct model *model, int a, int b) {
    return model_layer_is_moe(model, a) == model_layer_is_moe(model, b) &&
           model_layer_window(model, a) == model_layer_window(model, b);
}

/* How many layers are like this one; 0 where an earlier one is. */
static int count_alike(const struct model *model, int layer) {
    int count = 0;
    for (int other = 0; other < model->layers; other++) {
        if (!are_alike(model, layer, other)) continue;
        if (other < layer) return 0;
        count++;
    }
    return count;
}

static void add_part(struct spread *sum, const struct spread *seconds, int count, double part) {
    for (int i = 0; i < count; i++) {
        sum[i].median += seconds[i].median * part;
        sum[i].low += seconds[i].low * part;
        sum[i].high += seconds[i].high * part;
    }
}

static void measure_all_layers(struct bench *bench, struct spread *costs) {
    const struct model *model = bench->model;
    struct rope rope = rope_new(bench->arena, bench->plan->point->seq_len, model->attention.head_dim,
                                model->attention.rope_theta);
    for (int layer = 0; layer < model->layers; layer++) {
        double part = (double)count_alike(model, layer) / model->layers;
        if (part == 0) continue;
        struct spread seconds[3];
        void *mark = scratch_take(&bench->context, 1);
        struct load load = load_of(bench, layer);
        struct weights weights =
            weights_new(bench, (struct kept_parameters){layer, load.first, load.experts});
        measure_attention(bench, layer, &weights, &rope, seconds);
        add_part(costs + COST_ATTN_FWD, seconds, 3, part);
        measure_ffn(bench, layer, &weights, &load, seconds);
        add_part(costs + COST_FFN_FWD, seconds, 3, part);
        scratch_release(&bench->context, mark);
    }
}

/* ---- ends -------------------------------------------------------------------------------------------- */

struct ends_work {
    struct context *context;
    const struct model *model;
    floatX *table, *dtable, *rows, *drows;
    struct head_block head;
    int *ids;
    int tokens, head_tokens;
};

static void run_ends(void *work, int stage) {
    struct ends_work *e = work;
    int hidden = e->model->hidden;
    if (stage == 0)
        embedding_forward(e->context, e->rows, e->table, e->ids, e->tokens, hidden);
    else if (stage == 1)
        embedding_backward(e->context, e->dtable, e->drows, e->ids, e->tokens, hidden);
    else
        head_block_forward_backward(e->context, &e->head, e->drows, e->rows, e->ids, e->head_tokens, 1e-3);
}

static void measure_ends(struct bench *bench, struct spread *costs) {
    const struct model *model = bench->model;
    const struct ranks *ranks = bench->measurement->ranks;
    const char *norm = "model.norm.weight", *table = "model.embed_tokens.weight";
    struct weights weights = weights_new(bench, (struct kept_parameters){-1, 0, 0});
    const struct parameters *list = &weights.parameters;
    int head_tokens = head_tokens_before(ranks, 0, 0, 1), tokens = bench->tokens;
    int most = head_tokens > tokens ? head_tokens : tokens;
    struct ends_work work = {.context = &bench->context,
                             .model = model,
                             .table = tensor_at(list, weights.values, table),
                             .dtable = tensor_at(list, weights.gradients, table),
                             .rows = random_rows(bench, most, model->hidden),
                             .drows = random_rows(bench, most, model->hidden),
                             .head = {.model = model,
                                      .norm = tensor_at(list, weights.values, norm),
                                      .norm_gradient = tensor_at(list, weights.gradients, norm),
                                      .output = head_tensor(list, weights.values),
                                      .output_gradient = head_tensor(list, weights.gradients)},
                             .ids = zeroed(bench, (size_t)most * sizeof(int)),
                             .tokens = tokens,
                             .head_tokens = head_tokens};
    for (int i = 0; i < most; i++) work.ids[i] = rng_below(&bench->rng, model->vocab);
    struct spread seconds[3];
    measure(bench, 3, run_ends, &work, seconds);
    costs[COST_EMBED_FWD] = seconds[0];
    costs[COST_EMBED_BWD] = seconds[1];
    costs[COST_HEAD_FWD] = (struct spread){0};
    costs[COST_HEAD_BWD] = (struct spread){0};
    add_part(&costs[COST_HEAD_BWD], &seconds[2], 1, ranks->head_count); /* groups, with a part each */
}

void measure_layers(const struct measurement *measurement, struct spread *costs) {
    struct bench bench = bench_new(measurement);
    memset(costs + COST_ATTN_FWD, 0, (COST_FFN_WGRAD + 1) * sizeof *costs);
    measure_all_layers(&bench, costs);
    measure_ends(&bench, costs);
    bench_free(&bench);
}

/* ---- kernels ----------------------------------------------------------------------------------------- */

struct kernel_work {
    struct context *context;
    const struct model *model;
    int tokens, head_tokens, layer;
    struct attention_shape shape;
    struct attention_inputs inputs;
    struct attention_gradients gradients;
    floatX *x, *y, *w, *attended, *lse;
    struct groups groups;
    int rows, width, square;
    char *from, *to;
    size_t bytes;
    floatX *values, *dvalues, *moment1, *moment2;
    struct optimizer optimizer;
};

enum { SQUARE = 384, COPY_BYTES = 8 << 20, ADAM_PARAMETERS = 1 << 18, TINY_CALLS = 16 };

static void run_gemm(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    linear_forward(k->context, k->y, k->x, k->w, NULL, k->tokens, k->model->hidden, qkv_width(k->model));
}

static void run_head(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    linear_forward(k->context, k->y, k->x, k->w, NULL, k->head_tokens, k->model->hidden, k->model->vocab);
}

static void run_square(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    linear_forward(k->context, k->y, k->x, k->w, NULL, SQUARE, SQUARE, SQUARE);
}

static void run_core(void *work, int stage) {
    struct kernel_work *k = work;
    if (stage == 0)
        attention_forward(k->context, &k->shape, k->attended, k->lse, &k->inputs);
    else
        attention_backward(k->context, &k->shape, &k->gradients, k->y, k->attended, k->lse, &k->inputs);
}

static void run_grouped(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    grouped_linear_forward(k->context, &k->groups, k->y, k->x, k->model->hidden, k->width);
}

static void run_norm(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    rmsnorm_forward(k->context, k->y, k->x, k->w, k->tokens, k->model->hidden, k->model->norm_eps);
}

static void run_tiny(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    for (int i = 0; i < TINY_CALLS; i++) rmsnorm_forward(k->context, k->y, k->x, k->w, 1, 1, 1e-6);
}

static void run_copy(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    memcpy(k->to, k->from, COPY_BYTES);
    __asm__ volatile("" : : "r"(k->to) : "memory"); /* it is read by nobody */
}

static void run_adam(void *work, int stage) {
    struct kernel_work *k = work;
    (void)stage;
    adamw(k->context, &k->optimizer, 0, 1, true, k->values, k->dvalues, k->moment1, k->moment2,
          ADAM_PARAMETERS);
}

/* `amount` of something a second, and how it was measured. */
static void rate_of(struct measured_rate *rate, double amount, struct spread seconds, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void rate_of(struct measured_rate *rate, double amount, struct spread seconds, const char *format,
                    ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(rate->how, sizeof rate->how, format, arguments);
    va_end(arguments);
    rate->value = (struct spread){amount / seconds.median, amount / seconds.high, amount / seconds.low};
}

static void measure_products(struct bench *bench, struct kernel_work *k, struct machine *machine) {
    const struct model *model = bench->model;
    int hidden = model->hidden, qkv = qkv_width(model);
    struct spread seconds;
    void *mark = scratch_take(&bench->context, 1);
    k->x = random_rows(bench, k->tokens, hidden);
    k->w = random_rows(bench, qkv, hidden);
    k->y = zeroed(bench, (size_t)k->tokens * qkv * sizeof(floatX));
    measure(bench, 1, run_gemm, k, &seconds);
    rate_of(&machine->rates[RATE_GEMM], 2.0 * k->tokens * hidden * qkv, seconds,
            "the query, key and value projection, (%d, %d) by (%d, %d)", k->tokens, hidden, hidden, qkv);
    scratch_release(&bench->context, mark);

    mark = scratch_take(&bench->context, 1);
    k->x = random_rows(bench, k->head_tokens, hidden);
    k->w = random_rows(bench, model->vocab, hidden);
    k->y = zeroed(bench, (size_t)k->head_tokens * model->vocab * sizeof(floatX));
    measure(bench, 1, run_head, k, &seconds);
    rate_of(&machine->rates[RATE_HEAD_GEMM], 2.0 * k->head_tokens * hidden * model->vocab, seconds,
            "the head's product, (%d, %d) by (%d, %d)", k->head_tokens, hidden, hidden, model->vocab);
    scratch_release(&bench->context, mark);

    mark = scratch_take(&bench->context, 1);
    k->x = random_rows(bench, SQUARE, SQUARE);
    k->w = random_rows(bench, SQUARE, SQUARE);
    k->y = zeroed(bench, (size_t)SQUARE * SQUARE * sizeof(floatX));
    measure(bench, 1, run_square, k, &seconds);
    rate_of(&machine->peak_flops, 2.0 * SQUARE * SQUARE * SQUARE, seconds, "a product of %d squared matrices",
            SQUARE);
    scratch_release(&bench->context, mark);
}

static void measure_grouped(struct bench *bench, struct kernel_work *k, struct machine *machine) {
    const struct model *model = bench->model;
    int layer = model->layers - 1, hidden = model->hidden; /* dense layers come first */
    struct load load = load_of(bench, layer);
    struct spread seconds;
    machine->rates[RATE_GROUPED_GEMM] = machine->rates[RATE_GEMM];
    if (!load.routed) return;
    void *mark = scratch_take(&bench->context, 1);
    floatX **weights = arena_alloc(bench->arena, (size_t)load.experts * sizeof *weights);
    k->width = 2 * model->moe.expert_hidden;
    for (int i = 0; i < load.experts; i++) weights[i] = random_rows(bench, k->width, hidden);
    k->groups = (struct groups){.count = load.experts, .rows = load.counts, .weights = weights};
    k->x = random_rows(bench, load.routed, hidden);
    k->y = zeroed(bench, (size_t)load.routed * k->width * sizeof(floatX));
    measure(bench, 1, run_grouped, k, &seconds);
    rate_of(&machine->rates[RATE_GROUPED_GEMM], 2.0 * load.routed * hidden * k->width, seconds,
            "gate and up of %d experts, %d rows in all, (%d) to (%d)", load.experts, load.routed, hidden,
            k->width);
    scratch_release(&bench->context, mark);
}

static void measure_core(struct bench *bench, struct kernel_work *k, struct machine *machine) {
    const struct model *model = bench->model;
    const struct point *point = bench->plan->point;
    int query = query_width(model), key = key_width(model), tokens = k->tokens;
    struct spread seconds[2];
    void *mark = scratch_take(&bench->context, 1);
    k->shape = (struct attention_shape){whole_sequences(point->micro_batch_size, point->seq_len),
                                        model->attention.heads, model->attention.kv_heads,
                                        model->attention.head_dim, model_layer_window(model, 0)};
    floatX *q = random_rows(bench, tokens, query);
    k->inputs = (struct attention_inputs){
        q, random_rows(bench, tokens, key), random_rows(bench, tokens, key), query, key, key, NULL};
    k->gradients = (struct attention_gradients){random_rows(bench, tokens, query),
                                                random_rows(bench, tokens, key),
                                                random_rows(bench, tokens, key),
                                                query,
                                                key,
                                                NULL};
    k->attended = zeroed(bench, (size_t)tokens * query * sizeof(floatX));
    k->lse = zeroed(bench, (size_t)tokens * model->attention.heads * sizeof(floatX));
    k->y = random_rows(bench, tokens, query);
    measure(bench, 2, run_core, k, seconds);
    struct tokens counted = {point->micro_batch_size, point->seq_len, 1};
    double forward = model_attention_work(model, 0, WORK_FORWARD, counted, 4).core_flops;
    double backward = model_attention_work(model, 0, WORK_BACKWARD_INPUT, counted, 4).core_flops;
    rate_of(&machine->rates[RATE_CORE_FORWARD], forward, seconds[0],
            "%d x %d tokens, %d heads of %d, counted causally", point->micro_batch_size, point->seq_len,
            model->attention.heads, model->attention.head_dim);
    rate_of(&machine->rates[RATE_CORE_BACKWARD], backward, seconds[1],
            "%d x %d tokens, %d heads of %d, scores computed anew", point->micro_batch_size, point->seq_len,
            model->attention.heads, model->attention.head_dim);
    scratch_release(&bench->context, mark);
}

static void measure_memory(struct bench *bench, struct kernel_work *k, struct machine *machine) {
    const struct model *model = bench->model;
    int hidden = model->hidden;
    struct spread seconds;
    void *mark = scratch_take(&bench->context, 1);
    k->x = random_rows(bench, k->tokens, hidden);
    k->w = random_rows(bench, 1, hidden);
    k->y = zeroed(bench, (size_t)k->tokens * hidden * sizeof(floatX));
    measure(bench, 1, run_norm, k, &seconds);
    rate_of(&machine->rates[RATE_HBM], 2.0 * k->tokens * hidden * sizeof(floatX), seconds,
            "RMSNorm of (%d, %d), read and written, which may lie in a cache", k->tokens, hidden);
    measure(bench, 1, run_tiny, k, &seconds);
    machine->rates[RATE_KERNEL_LAUNCH].value =
        (struct spread){seconds.median / TINY_CALLS, seconds.low / TINY_CALLS, seconds.high / TINY_CALLS};
    snprintf(machine->rates[RATE_KERNEL_LAUNCH].how, sizeof machine->rates[0].how,
             "a call of RMSNorm of one number");
    k->from = zeroed(bench, COPY_BYTES);
    k->to = zeroed(bench, COPY_BYTES);
    measure(bench, 1, run_copy, k, &seconds);
    rate_of(&machine->copy, COPY_BYTES, seconds, "copies of %d MiB in memory", COPY_BYTES >> 20);
    machine->rates[RATE_HOST_COPY] = machine->copy;
    k->values = random_rows(bench, 1, ADAM_PARAMETERS);
    k->dvalues = random_rows(bench, 1, ADAM_PARAMETERS);
    k->moment1 = zeroed(bench, ADAM_PARAMETERS * sizeof(floatX));
    k->moment2 = zeroed(bench, ADAM_PARAMETERS * sizeof(floatX));
    k->optimizer = optimizer_default();
    measure(bench, 1, run_adam, k, &seconds);
    rate_of(&machine->rates[RATE_HOST_ADAM], ADAM_PARAMETERS, seconds, "AdamW of %d parameters",
            ADAM_PARAMETERS);
    scratch_release(&bench->context, mark);
}

void measure_kernels(const struct measurement *measurement, struct machine *machine) {
    struct bench bench = bench_new(measurement);
    struct kernel_work work = {.context = &bench.context,
                               .model = bench.model,
                               .tokens = bench.tokens,
                               .head_tokens = head_tokens_before(measurement->ranks, 0, 0, 1)};
    measure_products(&bench, &work, machine);
    measure_grouped(&bench, &work, machine);
    measure_core(&bench, &work, machine);
    measure_memory(&bench, &work, machine);
    bench_free(&bench);
}
