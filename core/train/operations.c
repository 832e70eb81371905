/*
Computations: what each operation of the compute lane does with the cell of its layer and micro-batch.

The feed-forward part of a disaggregated system computes the copies it received: with a token's first copy
ride the residual and the shared experts, and a dense layer's rows are all first. A pipelined system keeps
residual and shared experts (and dense layers whole) on the token's own rank, as a local block beside the
received copies.
*/
#include "train/operations.h"
#include "train/cell_memory.h"
#include "train/sizes.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- one computation --------------------------------------------------------------------------------- */

struct work_item {
    struct runner *runner;
    struct context *context;
    struct cell *cell, *above; /* above: the next layer's, whose input is this one's output */
    int layer, micro_batch, tokens;
};

static struct attention_part attention_part(const struct work_item *item) {
    struct runner *runner = item->runner;
    struct batch_part batch = own_batch(runner, item->micro_batch);
    int64_t sequences = batch_sequences(&runner->ranks);
    return (struct attention_part){
        .sequences = batch.sequences,
        .key = {runner->seed, runner->step, item->layer, batch.first_sequence * runner->seq_len},
        .aux_scale = route_aux_scale(runner->model, sequences),
        .z_scale = route_z_scale(runner->model, sequences * runner->seq_len),
        .forced = runner->forced,
        .collectives = &runner->collectives,
        .gathered = item->cell->slot[ROLE_GATHERED]};
}

static void add_gradients(const struct work_item *item, enum component component, int layer) {
    state_add_gradients(item->runner->state, item->context, component, layer, item->runner->step,
                        item->micro_batch);
}

/* ---- attention --------------------------------------------------------------------------------------- */

/* Where the cell's attention lies now. */
static struct attention_kept *place_attention(const struct work_item *item) {
    const struct model *model = item->runner->model;
    struct cell *cell = item->cell;
    struct sequences sequences = own_batch(item->runner, item->micro_batch).sequences;
    cell->attention =
        attention_kept_place(model, item->layer, attention_level(item->runner, item->layer), item->tokens,
                             cell->slot[ROLE_ATTENTION], cell->slot[ROLE_RESTORED_ATTENTION]);
    if (!cell->chosen && model_layer_is_moe(model, item->layer))
        cell->chosen = passing_new(item->runner, (size_t)sequences.count * model->moe.experts * sizeof(int));
    cell->attention.route.chosen = cell->chosen;
    return &cell->attention;
}

static void run_attention(const struct work_item *item) {
    struct attention_part part = attention_part(item);
    attention_block_forward(item->context, &item->runner->state->attention[item->layer], &part,
                            place_attention(item), stream_of(item->cell));
}

/* Appends a copy that goes to rank j of the feed-forward group; without room for it, only counts. */
static void add_sent(struct cell *cell, int j, struct copy copy, int place) {
    struct sent *sent = &cell->sent[j];
    if (sent->copies) {
        sent->copies[sent->count] = copy;
        sent->row[sent->count] = copy.token;
        sent->place[sent->count] = place;
    }
    sent->count++;
}

/* A token's copies to the ranks of their experts. Its first copy carries the residual, but in a pipelined
   system, where that stays; a token without copies is sent all the same, to an even choice of ranks. */
static void address_token(const struct work_item *item, int t, int token_of_all, int all) {
    const struct model *model = item->runner->model;
    const struct route *route = &item->cell->attention.route;
    int there = group_size(item->runner, item->runner->ranks.ffn[item->layer]);
    int top_k = model->moe.top_k, experts = model->moe.experts;
    bool first = !item->runner->ranks.pipelined;
    for (int k = 0; model_layer_is_moe(model, item->layer) && k < top_k; k++) {
        int place = t * top_k + k, expert = route->ids[place];
        if (!route->kept[place]) continue;
        int j = (int)((((int64_t)expert + 1) * there - 1) / experts);
        struct copy copy = {route->weights[place], t, expert - plan_first_expert(experts, there, j), first};
        add_sent(item->cell, j, copy, place);
        first = false;
    }
    if (!first) return;
    int j = (int)((int64_t)token_of_all * there / all);
    add_sent(item->cell, j, (struct copy){0, t, -1, 1}, t * top_k);
}

static void count_routes(const struct work_item *item) {
    struct runner *runner = item->runner;
    const struct model *model = runner->model;
    const struct route *route = &item->cell->attention.route;
    if (!model_layer_is_moe(model, item->layer)) return;
    struct route_losses losses = route_losses(model, route, own_batch(runner, item->micro_batch).sequences);
    runner->sums.aux += losses.aux;
    runner->sums.z += losses.z;
    int64_t *copies = runner->sums.expert_copies + (size_t)item->layer * model->moe.experts;
    for (int copy = 0; copy < item->tokens * model->moe.top_k; copy++)
        copies[route->ids[copy]] += route->kept[copy];
}

static void address_copies(const struct work_item *item) {
    struct runner *runner = item->runner;
    const struct ranks *ranks = &runner->ranks;
    int there = group_size(runner, ranks->ffn[item->layer]), replica = runner->seat.replica;
    int before = tokens_before(ranks, replica, item->micro_batch, runner->seat.index);
    int all = tokens_before(ranks, replica, item->micro_batch, ranks->attention_ranks);
    item->cell->sent = passing_new(runner, (size_t)there * sizeof(struct sent));
    for (int t = 0; t < item->tokens; t++) address_token(item, t, before + t, all);
    for (int j = 0; j < there; j++) {
        struct sent *sent = &item->cell->sent[j];
        sent->copies = passing_new(runner, (size_t)sent->count * sizeof *sent->copies);
        sent->row = passing_new(runner, (size_t)sent->count * sizeof *sent->row);
        sent->place = passing_new(runner, (size_t)sent->count * sizeof *sent->place);
        sent->count = 0;
    }
    for (int t = 0; t < item->tokens; t++) address_token(item, t, before + t, all);
}

static bool drops_attention(const struct work_item *item) {
    return attention_level(item->runner, item->layer) == ATTENTION_FULL;
}

static void attention_forward_operation(const struct work_item *item) {
    struct cell *cell = item->cell;
    size_t bytes = (size_t)item->tokens * item->runner->hidden * sizeof(floatX);
    run_attention(item);
    count_routes(item);
    if (!item->runner->ranks.pipelined || model_layer_is_moe(item->runner->model, item->layer))
        address_copies(item);
    if (cell->slot[ROLE_SENT]) memcpy(cell->slot[ROLE_SENT], cell->attention.middle, bytes);
    if (!drops_attention(item) || !item->runner->ranks.pipelined) return;
    cell->middle = passing_new(item->runner, bytes);
    memcpy(cell->middle, cell->attention.middle, bytes);
}

static void attention_recompute_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    struct attention_part part = attention_part(item);
    if (drops_attention(item))
        run_attention(item);
    else
        attention_block_restore(item->context, &runner->state->attention[item->layer], &part,
                                attention_level(runner, item->layer), place_attention(item),
                                stream_of(item->cell));
}

static void attention_backward_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    struct cell *cell = item->cell;
    const struct attention_block *block = &runner->state->attention[item->layer];
    struct attention_part part = attention_part(item);
    void *memory =
        scratch_take(item->context, attention_pending_bytes(runner->model, item->layer, item->tokens));
    struct attention_pending pending =
        attention_pending_place(runner->model, item->layer, item->tokens, memory);
    state_begin_gradients(runner->state, COMPONENT_ATTENTION, item->layer);
    attention_block_backward_input(item->context, block, &part, &cell->attention, &pending,
                                   gradient_for(runner, cell, item->tokens), cell->slot[ROLE_MIDDLE_GRADIENT],
                                   cell->dweights, stream_of(cell));
    attention_block_backward_weight(item->context, block, &part, &cell->attention, &pending);
    add_gradients(item, COMPONENT_ATTENTION, item->layer);
    scratch_release(item->context, memory);
    passing_free(runner, &cell->dweights);
    if (!runner->ranks.pipelined) return;
    passing_free(runner, &item->above->gradient);
}

/* ---- feed-forward ------------------------------------------------------------------------------------ */

/* The rank's own tokens in a pipelined system: residual, shared experts, dense layers. */
struct local {
    struct expert_block block;
    struct expert_part part;
    const floatX *input;
};

static struct local local_of(const struct work_item *item) {
    struct local local = {.block = item->runner->state->experts[item->layer], .part = {.rows = item->tokens}};
    unsigned char *first = scratch_take(item->context, (size_t)item->tokens);
    memset(first, 1, (size_t)item->tokens);
    local.block.experts = 0;
    local.part.first = first;
    local.input = item->cell->middle ? item->cell->middle : item->cell->attention.middle;
    return local;
}

/* Where what the feed-forward part makes lies now: that of the copies received, behind it that of the rank's
   own tokens. */
static void place_ffn(const struct work_item *item) {
    struct runner *runner = item->runner;
    const struct model *model = runner->model;
    struct cell *cell = item->cell;
    enum ffn_recompute level = ffn_level(runner, item->layer);
    char *kept = cell->slot[ROLE_FFN], *restored = cell->slot[ROLE_RESTORED_FFN];
    cell->kept = expert_kept_place(model, item->layer, level, cell->routed, cell->firsts, kept, restored);
    if (!runner->ranks.pipelined) return;
    if (kept) kept += received_kept_bytes(runner, item->layer, cell);
    if (restored) restored += received_restored_bytes(runner, item->layer, cell);
    cell->local_kept = expert_kept_place(model, item->layer, level, 0, item->tokens, kept, restored);
}

static void ffn_forward_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    struct cell *cell = item->cell;
    place_ffn(item);
    if (cell->received)
        expert_block_forward(item->context, &runner->state->experts[item->layer], &cell->copies, &cell->kept,
                             cell->slot[ROLE_EXPERT_OUTPUT], cell->slot[ROLE_EXPERT_INPUT]);
    if (!runner->ranks.pipelined) return;
    struct local local = local_of(item);
    expert_block_forward(item->context, &local.block, &local.part, &cell->local_kept,
                         stream_for(runner, item->above, item->tokens), local.input);
    passing_free(runner, &cell->middle);
}

/* The output is made again where the schedule sends it again. */
static void ffn_recompute_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    struct cell *cell = item->cell;
    const struct expert_block *block = &runner->state->experts[item->layer];
    enum ffn_recompute level = ffn_level(runner, item->layer);
    floatX *input = cell->slot[ROLE_EXPERT_INPUT], *output = cell->slot[ROLE_EXPERT_OUTPUT];
    place_ffn(item);
    if (cell->received && output)
        expert_block_forward(item->context, block, &cell->copies, &cell->kept, output, input);
    else if (cell->received)
        expert_block_restore(item->context, block, &cell->copies, level, &cell->kept, input);
    if (!runner->ranks.pipelined) return;
    struct local local = local_of(item);
    expert_block_restore(item->context, &local.block, &local.part, level, &cell->local_kept, local.input);
}

/* Both halves of the backward pass of one block; what was dropped is there again. */
static void backward_of(const struct work_item *item, const struct expert_block *block,
                        const struct expert_part *part, struct expert_kept *kept, int routed, int firsts,
                        floatX *dinput, floatX *dweights, const floatX *doutput, const floatX *input) {
    const struct model *model = item->runner->model;
    void *memory = scratch_take(item->context, expert_pending_bytes(model, item->layer, routed, firsts));
    struct expert_pending pending = expert_pending_place(model, item->layer, routed, firsts, memory);
    expert_block_backward_input(item->context, block, part, kept, &pending, dinput, dweights, doutput, input);
    expert_block_backward_weight(item->context, block, part, kept, &pending, input);
    scratch_release(item->context, memory);
}

static void ffn_backward_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    struct cell *cell = item->cell;
    state_begin_gradients(runner->state, COMPONENT_FFN, item->layer);
    if (cell->received) {
        cell->copy_dweights = passing_new(runner, (size_t)cell->copies.rows * sizeof(floatX));
        backward_of(item, &runner->state->experts[item->layer], &cell->copies, &cell->kept, cell->routed,
                    cell->firsts, cell->slot[ROLE_INPUT_GRADIENT], cell->copy_dweights,
                    cell->slot[ROLE_OUTPUT_GRADIENT], cell->slot[ROLE_EXPERT_INPUT]);
    }
    if (runner->ranks.pipelined) {
        struct local local = local_of(item);
        floatX *dmiddle = cell->slot[ROLE_MIDDLE_GRADIENT];
        if (!dmiddle)
            dmiddle = cell->local_gradient =
                passing_new(runner, (size_t)item->tokens * runner->hidden * sizeof(floatX));
        backward_of(item, &local.block, &local.part, &cell->local_kept, 0, item->tokens, dmiddle, NULL,
                    item->above->gradient, local.input);
    }
    add_gradients(item, COMPONENT_FFN, item->layer);
}

/* ---- ends -------------------------------------------------------------------------------------------- */

/* Tokens of the micro-batch in the order of attention ranks, as inputs or, shifted by one, as targets. */
static void fill_tokens(struct runner *runner, int micro_batch, int first, int count, int shift, int *out) {
    const struct ranks *ranks = &runner->ranks;
    int replica = runner->seat.replica, index = 0;
    int *sequence = must_alloc(((size_t)runner->seq_len + 1) * sizeof *sequence);
    int64_t there = -1; /* which one that is */
    for (int i = 0; i < count; i++) {
        while (first + i >= tokens_before(ranks, replica, micro_batch, index + 1)) index++;
        struct batch_part batch = attention_batch(ranks, replica, micro_batch, index);
        int within = first + i - tokens_before(ranks, replica, micro_batch, index);
        int rows = rows_of_sequence(batch.sequences);
        int64_t number = batch.first_sequence + within / rows;
        if (number != there) data_sequence(runner->data, runner->seed, runner->step, number, sequence);
        there = number;
        out[i] = sequence[position_of_row(batch.sequences, within % rows) + shift];
    }
    free(sequence);
}

static void embed_forward_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    struct cell *cell = item->cell;
    int first = tokens_before(&runner->ranks, runner->seat.replica, item->micro_batch, runner->seat.index);
    cell->tokens = passing_new(runner, (size_t)item->tokens * sizeof(int));
    fill_tokens(runner, item->micro_batch, first, item->tokens, 0, cell->tokens);
    embedding_forward(item->context, stream_for(runner, cell, item->tokens), runner->state->embedding,
                      cell->tokens, item->tokens, runner->hidden);
}

static void embed_backward_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    state_begin_gradients(runner->state, COMPONENT_EMBEDDING, -1);
    embedding_backward(item->context, runner->state->embedding_gradient, item->cell->gradient,
                       item->cell->tokens, item->tokens, runner->hidden);
    add_gradients(item, COMPONENT_EMBEDDING, -1);
    passing_free(runner, &item->cell->gradient);
}

/* Loss and gradient at one go, so that a chunk's logits are made once: the head's forward operation is its
   target tokens alone. */
static void head_forward_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    int count = head_tokens(runner, item->micro_batch);
    int first = head_tokens_before(&runner->ranks, runner->seat.replica, item->micro_batch,
                                   head_part(&runner->ranks, runner->seat));
    item->cell->tokens = passing_new(runner, (size_t)count * sizeof(int));
    fill_tokens(runner, item->micro_batch, first, count, 1, item->cell->tokens);
}

static void head_backward_operation(const struct work_item *item) {
    struct runner *runner = item->runner;
    int count = head_tokens(runner, item->micro_batch);
    double scale = 1 / ((double)batch_sequences(&runner->ranks) * runner->seq_len);
    floatX *d = gradient_for(runner, item->cell, count);
    state_begin_gradients(runner->state, COMPONENT_HEAD, -1);
    runner->sums.cross_entropy += head_block_forward_backward(
        item->context, &runner->state->head, d, stream_of(item->cell), item->cell->tokens, count, scale);
    add_gradients(item, COMPONENT_HEAD, -1);
}

/* ---- which computation ------------------------------------------------------------------------------- */

static struct work_item item_of(struct runner *runner, const struct operation *op) {
    int layer = op->kind == KIND_EMBED ? 0 : op->kind == KIND_HEAD ? runner->model->layers : op->layer;
    int layers = runner->model->layers;
    return (struct work_item){.runner = runner,
                              .context = &runner->contexts[RESOURCE_COMPUTE],
                              .cell = cell_at(runner, layer, op->micro_batch),
                              .above = layer < layers ? cell_at(runner, layer + 1, op->micro_batch) : NULL,
                              .layer = layer,
                              .micro_batch = op->micro_batch,
                              .tokens = own_tokens(runner, op->micro_batch)};
}

void compute_operation(struct runner *runner, int id) {
    const struct operation *op = &runner->schedule->ops[id];
    struct work_item item = item_of(runner, op);
    void *mark = scratch_take(item.context, 0);
    switch (op->kind * PASS_COUNT + op->pass) {
    case KIND_ATTENTION *PASS_COUNT + PASS_FORWARD:
        attention_forward_operation(&item);
        break;
    case KIND_ATTENTION *PASS_COUNT + PASS_RECOMPUTE:
        attention_recompute_operation(&item);
        break;
    case KIND_ATTENTION *PASS_COUNT + PASS_BACKWARD:
        attention_backward_operation(&item);
        break;
    case KIND_FFN *PASS_COUNT + PASS_FORWARD:
        ffn_forward_operation(&item);
        break;
    case KIND_FFN *PASS_COUNT + PASS_RECOMPUTE:
        ffn_recompute_operation(&item);
        break;
    case KIND_FFN *PASS_COUNT + PASS_BACKWARD:
        ffn_backward_operation(&item);
        break;
    case KIND_EMBED *PASS_COUNT + PASS_FORWARD:
        embed_forward_operation(&item);
        break;
    case KIND_EMBED *PASS_COUNT + PASS_BACKWARD:
        embed_backward_operation(&item);
        break;
    case KIND_HEAD *PASS_COUNT + PASS_FORWARD:
        head_forward_operation(&item);
        break;
    case KIND_HEAD *PASS_COUNT + PASS_BACKWARD:
        head_backward_operation(&item);
        break;
    default:
        assert(op->kind == KIND_COMBINE); /* a lane's wait for the end of a transfer: nothing to compute */
    }
    scratch_release(item.context, mark);
}
