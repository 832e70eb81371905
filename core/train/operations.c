/*
Computations: what each operation of the compute lane does with the cell of its layer and micro-batch.

The feed-forward part of a disaggregated system computes the copies it received: with a token's first copy
ride the residual and the shared experts, and a dense layer's rows are all first. A pipelined system keeps
residual and shared experts (and dense layers whole) on the token's own rank, as a local block beside the
received copies.
*/
#include "train/executor.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- sizes ------------------------------------------------------------------------------------------- */

int own_tokens(const struct trainer *trainer, int micro_batch) {
    return attention_batch(&trainer->ranks, trainer->seat.replica, micro_batch, trainer->seat.index)
               .sequences *
           trainer->seq_len;
}

int head_tokens(const struct trainer *trainer, int micro_batch) {
    int index = trainer->seat.index, replica = trainer->seat.replica;
    return head_tokens_before(&trainer->ranks, replica, micro_batch, index + 1) -
           head_tokens_before(&trainer->ranks, replica, micro_batch, index);
}

static enum recompute kept_level(const struct trainer *trainer) {
    int level = trainer->plan->memory.recompute;
    return level == RECOMPUTE_FULL ? RECOMPUTE_NONE : (enum recompute)level;
}

/* Of the copies received; of the rank's own tokens in a pipelined system. */
static size_t received_kept_bytes(const struct trainer *trainer, int layer, const struct cell *cell) {
    return expert_kept_bytes(trainer->model, layer, kept_level(trainer), cell->routed, cell->firsts);
}

static size_t local_kept_bytes(const struct trainer *trainer, int layer, int micro_batch) {
    if (!trainer->ranks.pipelined) return 0;
    return expert_kept_bytes(trainer->model, layer, kept_level(trainer), 0, own_tokens(trainer, micro_batch));
}

static size_t received_restored_bytes(const struct trainer *trainer, int layer, const struct cell *cell) {
    return expert_restored_bytes(trainer->model, layer, cell->routed, cell->firsts);
}

static size_t local_restored_bytes(const struct trainer *trainer, int layer, int micro_batch) {
    if (!trainer->ranks.pipelined) return 0;
    return expert_restored_bytes(trainer->model, layer, 0, own_tokens(trainer, micro_batch));
}

size_t activation_bytes(const struct trainer *trainer, const struct activation *activation) {
    int layer = activation->layer, m = activation->micro_batch;
    const struct cell *cell = cell_at(trainer, layer, m);
    size_t row = (size_t)trainer->hidden * sizeof(floatX);
    switch ((enum role)activation->role) {
    case ROLE_LAYER_INPUT:
    case ROLE_SENT:
    case ROLE_MIDDLE_GRADIENT:
        return (size_t)own_tokens(trainer, m) * row;
    case ROLE_HEAD_INPUT:
        return (size_t)head_tokens(trainer, m) * row;
    case ROLE_EXPERT_INPUT:
    case ROLE_EXPERT_OUTPUT:
    case ROLE_OUTPUT_GRADIENT:
    case ROLE_INPUT_GRADIENT:
        return (size_t)cell->copies.rows * row;
    case ROLE_ATTENTION:
        return attention_kept_bytes(trainer->model, layer, kept_level(trainer), own_tokens(trainer, m));
    case ROLE_RESTORED_ATTENTION:
        return attention_restored_bytes(trainer->model, layer, own_tokens(trainer, m));
    case ROLE_FFN:
        return received_kept_bytes(trainer, layer, cell) + local_kept_bytes(trainer, layer, m);
    case ROLE_RESTORED_FFN:
        return received_restored_bytes(trainer, layer, cell) + local_restored_bytes(trainer, layer, m);
    default:
        return 0;
    }
}

/* ---- the residual stream ----------------------------------------------------------------------------- */

floatX *stream_of(const struct cell *cell) {
    if (cell->slot[ROLE_LAYER_INPUT]) return cell->slot[ROLE_LAYER_INPUT];
    if (cell->slot[ROLE_HEAD_INPUT]) return cell->slot[ROLE_HEAD_INPUT];
    return cell->passing;
}

floatX *stream_for(struct trainer *trainer, struct cell *cell, int tokens) {
    if (!stream_of(cell))
        cell->passing = passing_new(trainer, (size_t)tokens * trainer->hidden * sizeof(floatX));
    return stream_of(cell);
}

static floatX *gradient_for(struct trainer *trainer, struct cell *cell, int tokens) {
    cell->gradient = passing_new(trainer, (size_t)tokens * trainer->hidden * sizeof(floatX));
    return cell->gradient;
}

/* ---- one computation --------------------------------------------------------------------------------- */

struct work_item {
    struct trainer *trainer;
    struct context *context;
    struct cell *cell, *above; /* above: the next layer's, whose input is this one's output */
    int layer, micro_batch, tokens;
    bool full;
};

static struct attention_part attention_part(const struct work_item *item) {
    const struct trainer *trainer = item->trainer;
    struct batch_part batch =
        attention_batch(&trainer->ranks, trainer->seat.replica, item->micro_batch, trainer->seat.index);
    int64_t sequences = batch_sequences(&trainer->ranks);
    return (struct attention_part){.sequences = batch.sequences,
                                   .seq_len = trainer->seq_len,
                                   .key = {trainer->batch_seed, trainer->mark.step, item->layer,
                                           batch.first_sequence * trainer->seq_len},
                                   .aux_scale = route_aux_scale(trainer->model, sequences),
                                   .z_scale = route_z_scale(trainer->model, sequences * trainer->seq_len),
                                   .forced = trainer->forced};
}

static void add_gradients(const struct work_item *item, enum component component, int layer) {
    state_add_gradients(item->trainer->state, item->context, component, layer, item->trainer->mark.step,
                        item->micro_batch);
}

/* ---- attention --------------------------------------------------------------------------------------- */

static void run_attention(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    struct cell *cell = item->cell;
    struct attention_part part = attention_part(item);
    cell->attention = attention_kept_place(trainer->model, item->layer, kept_level(trainer), item->tokens,
                                           cell->slot[ROLE_ATTENTION]);
    attention_block_forward(item->context, &trainer->state->attention[item->layer], &part, &cell->attention,
                            stream_of(cell));
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
    const struct model *model = item->trainer->model;
    const struct route *route = &item->cell->attention.route;
    int there = group_size(item->trainer, item->trainer->ranks.ffn[item->layer]);
    int top_k = model->moe.top_k, experts = model->moe.experts;
    bool first = !item->trainer->ranks.pipelined;
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
    struct trainer *trainer = item->trainer;
    const struct model *model = trainer->model;
    const struct route *route = &item->cell->attention.route;
    int sequences = item->tokens / trainer->seq_len;
    if (!model_layer_is_moe(model, item->layer)) return;
    struct route_losses losses = route_losses(model, route, sequences, trainer->seq_len);
    trainer->sums.aux += losses.aux;
    trainer->sums.z += losses.z;
    int64_t *copies = trainer->sums.expert_copies + (size_t)item->layer * model->moe.experts;
    for (int copy = 0; copy < item->tokens * model->moe.top_k; copy++)
        copies[route->ids[copy]] += route->kept[copy];
}

static void address_copies(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    const struct ranks *ranks = &trainer->ranks;
    int there = group_size(trainer, ranks->ffn[item->layer]), replica = trainer->seat.replica;
    int before = tokens_before(ranks, replica, item->micro_batch, trainer->seat.index);
    int all = tokens_before(ranks, replica, item->micro_batch, ranks->attention_ranks);
    item->cell->sent = passing_new(trainer, (size_t)there * sizeof(struct sent));
    for (int t = 0; t < item->tokens; t++) address_token(item, t, before + t, all);
    for (int j = 0; j < there; j++) {
        struct sent *sent = &item->cell->sent[j];
        sent->copies = passing_new(trainer, (size_t)sent->count * sizeof *sent->copies);
        sent->row = passing_new(trainer, (size_t)sent->count * sizeof *sent->row);
        sent->place = passing_new(trainer, (size_t)sent->count * sizeof *sent->place);
        sent->count = 0;
    }
    for (int t = 0; t < item->tokens; t++) address_token(item, t, before + t, all);
}

static void attention_forward_operation(const struct work_item *item) {
    struct cell *cell = item->cell;
    size_t bytes = (size_t)item->tokens * item->trainer->hidden * sizeof(floatX);
    run_attention(item);
    count_routes(item);
    if (!item->trainer->ranks.pipelined || model_layer_is_moe(item->trainer->model, item->layer))
        address_copies(item);
    if (cell->slot[ROLE_SENT]) memcpy(cell->slot[ROLE_SENT], cell->attention.middle, bytes);
    if (!item->full || !item->trainer->ranks.pipelined) return;
    cell->middle = passing_new(item->trainer, bytes);
    memcpy(cell->middle, cell->attention.middle, bytes);
}

static void attention_recompute_operation(const struct work_item *item) {
    if (item->full)
        run_attention(item);
    else
        attention_block_restore(item->context, &item->trainer->state->attention[item->layer],
                                &item->cell->attention, stream_of(item->cell), item->tokens,
                                item->cell->slot[ROLE_RESTORED_ATTENTION]);
}

static void attention_backward_operation(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    struct cell *cell = item->cell;
    const struct attention_block *block = &trainer->state->attention[item->layer];
    struct attention_part part = attention_part(item);
    void *memory =
        scratch_take(item->context, attention_pending_bytes(trainer->model, item->layer, item->tokens));
    struct attention_pending pending =
        attention_pending_place(trainer->model, item->layer, item->tokens, memory);
    state_begin_gradients(trainer->state, COMPONENT_ATTENTION, item->layer);
    attention_block_backward_input(item->context, block, &part, &cell->attention, &pending,
                                   gradient_for(trainer, cell, item->tokens),
                                   cell->slot[ROLE_MIDDLE_GRADIENT], cell->dweights, stream_of(cell));
    attention_block_backward_weight(item->context, block, &part, &cell->attention, &pending, stream_of(cell));
    add_gradients(item, COMPONENT_ATTENTION, item->layer);
    scratch_release(item->context, memory);
    passing_free(trainer, cell->dweights);
    cell->dweights = NULL;
    if (!trainer->ranks.pipelined) return;
    passing_free(trainer, item->above->gradient);
    item->above->gradient = NULL;
}

/* ---- feed-forward ------------------------------------------------------------------------------------ */

/* The rank's own tokens in a pipelined system: residual, shared experts, dense layers. */
struct local {
    struct expert_block block;
    struct expert_part part;
    const floatX *input;
};

static struct local local_of(const struct work_item *item) {
    struct local local = {.block = item->trainer->state->experts[item->layer],
                          .part = {.rows = item->tokens}};
    unsigned char *first = scratch_take(item->context, (size_t)item->tokens);
    memset(first, 1, (size_t)item->tokens);
    local.block.experts = 0;
    local.part.first = first;
    local.input = item->cell->middle ? item->cell->middle : item->cell->attention.middle;
    return local;
}

static void run_ffn(const struct work_item *item, floatX *output, floatX *local_output) {
    struct trainer *trainer = item->trainer;
    struct cell *cell = item->cell;
    char *memory = cell->slot[ROLE_FFN];
    cell->kept = expert_kept_place(trainer->model, item->layer, kept_level(trainer), cell->routed,
                                   cell->firsts, memory);
    if (cell->received)
        expert_block_forward(item->context, &trainer->state->experts[item->layer], &cell->copies, &cell->kept,
                             output, cell->slot[ROLE_EXPERT_INPUT]);
    if (!trainer->ranks.pipelined) return;
    struct local local = local_of(item);
    cell->local_kept = expert_kept_place(trainer->model, item->layer, kept_level(trainer), 0, item->tokens,
                                         memory + received_kept_bytes(trainer, item->layer, cell));
    expert_block_forward(item->context, &local.block, &local.part, &cell->local_kept, local_output,
                         local.input);
}

static void ffn_forward_operation(const struct work_item *item) {
    floatX *stream = NULL;
    if (item->trainer->ranks.pipelined) stream = stream_for(item->trainer, item->above, item->tokens);
    run_ffn(item, item->cell->slot[ROLE_EXPERT_OUTPUT], stream);
    passing_free(item->trainer, item->cell->middle);
    item->cell->middle = NULL;
}

static floatX *scratch_rows(const struct work_item *item, int rows) {
    return scratch_floats(item->context, (size_t)rows * item->trainer->hidden);
}

static void ffn_recompute_operation(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    struct cell *cell = item->cell;
    char *memory = cell->slot[ROLE_RESTORED_FFN];
    if (item->full) {
        floatX *output = cell->slot[ROLE_EXPERT_OUTPUT];
        run_ffn(item, output ? output : scratch_rows(item, cell->copies.rows),
                scratch_rows(item, item->tokens));
        return;
    }
    if (cell->received)
        expert_block_restore(item->context, &trainer->state->experts[item->layer], &cell->copies, &cell->kept,
                             memory);
    if (!trainer->ranks.pipelined) return;
    struct local local = local_of(item);
    expert_block_restore(item->context, &local.block, &local.part, &cell->local_kept,
                         memory + received_restored_bytes(trainer, item->layer, cell));
}

/* Both halves of the backward pass of one block; what selective dropped is there again. */
static void backward_of(const struct work_item *item, const struct expert_block *block,
                        const struct expert_part *part, struct expert_kept *kept, int routed, int firsts,
                        floatX *dinput, floatX *dweights, const floatX *doutput, const floatX *input) {
    const struct model *model = item->trainer->model;
    void *memory =
        scratch_take(item->context, expert_pending_bytes(model, item->layer, RECOMPUTE_NONE, routed, firsts));
    struct expert_pending pending =
        expert_pending_place(model, item->layer, RECOMPUTE_NONE, routed, firsts, memory);
    expert_block_backward_input(item->context, block, part, kept, &pending, dinput, dweights, doutput, input);
    expert_block_backward_weight(item->context, block, part, kept, &pending, input);
    scratch_release(item->context, memory);
}

static void ffn_backward_operation(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    struct cell *cell = item->cell;
    state_begin_gradients(trainer->state, COMPONENT_FFN, item->layer);
    if (cell->received) {
        cell->copy_dweights = passing_new(trainer, (size_t)cell->copies.rows * sizeof(floatX));
        backward_of(item, &trainer->state->experts[item->layer], &cell->copies, &cell->kept, cell->routed,
                    cell->firsts, cell->slot[ROLE_INPUT_GRADIENT], cell->copy_dweights,
                    cell->slot[ROLE_OUTPUT_GRADIENT], cell->slot[ROLE_EXPERT_INPUT]);
    }
    if (trainer->ranks.pipelined) {
        struct local local = local_of(item);
        floatX *dmiddle = cell->slot[ROLE_MIDDLE_GRADIENT];
        if (!dmiddle)
            dmiddle = cell->local_gradient =
                passing_new(trainer, (size_t)item->tokens * trainer->hidden * sizeof(floatX));
        backward_of(item, &local.block, &local.part, &cell->local_kept, 0, item->tokens, dmiddle, NULL,
                    item->above->gradient, local.input);
    }
    add_gradients(item, COMPONENT_FFN, item->layer);
}

/* ---- ends -------------------------------------------------------------------------------------------- */

/* Token number t of the micro-batch in the order of attention ranks, as input or, shifted by one, as target.
 */
static void fill_tokens(struct trainer *trainer, int micro_batch, int first, int count, int shift, int *out) {
    const struct ranks *ranks = &trainer->ranks;
    int replica = trainer->seat.replica, index = 0, seq_len = trainer->seq_len;
    int *sequence = must_alloc(((size_t)seq_len + 1) * sizeof *sequence);
    for (int done = 0; done < count;) {
        while (first + done >= tokens_before(ranks, replica, micro_batch, index + 1)) index++;
        int within = first + done - tokens_before(ranks, replica, micro_batch, index);
        int64_t number =
            attention_batch(ranks, replica, micro_batch, index).first_sequence + within / seq_len;
        data_sequence(trainer->data, trainer->batch_seed, trainer->mark.step, number, sequence);
        for (int p = within % seq_len; p < seq_len && done < count; p++) out[done++] = sequence[p + shift];
    }
    free(sequence);
}

static void embed_forward_operation(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    struct cell *cell = item->cell;
    int first = tokens_before(&trainer->ranks, trainer->seat.replica, item->micro_batch, trainer->seat.index);
    cell->tokens = passing_new(trainer, (size_t)item->tokens * sizeof(int));
    fill_tokens(trainer, item->micro_batch, first, item->tokens, 0, cell->tokens);
    embedding_forward(item->context, stream_for(trainer, cell, item->tokens), trainer->state->embedding,
                      cell->tokens, item->tokens, trainer->hidden);
}

static void embed_backward_operation(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    state_begin_gradients(trainer->state, COMPONENT_EMBEDDING, -1);
    embedding_backward(item->context, trainer->state->embedding_gradient, item->cell->gradient,
                       item->cell->tokens, item->tokens, trainer->hidden);
    add_gradients(item, COMPONENT_EMBEDDING, -1);
    passing_free(trainer, item->cell->gradient);
    item->cell->gradient = NULL;
}

/* Loss and gradient at one go, so that a chunk's logits are made once: the head's forward operation is its
   target tokens alone. */
static void head_forward_operation(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    int count = head_tokens(trainer, item->micro_batch);
    int first =
        head_tokens_before(&trainer->ranks, trainer->seat.replica, item->micro_batch, trainer->seat.index);
    item->cell->tokens = passing_new(trainer, (size_t)count * sizeof(int));
    fill_tokens(trainer, item->micro_batch, first, count, 1, item->cell->tokens);
}

static void head_backward_operation(const struct work_item *item) {
    struct trainer *trainer = item->trainer;
    const struct model *model = trainer->model;
    const struct head_block *head = &trainer->state->head;
    int count = head_tokens(trainer, item->micro_batch);
    double scale = 1 / ((double)batch_sequences(&trainer->ranks) * trainer->seq_len);
    const floatX *input = stream_of(item->cell);
    floatX *d = gradient_for(trainer, item->cell, count), *normed = scratch_rows(item, count);
    state_begin_gradients(trainer->state, COMPONENT_HEAD, -1);
    rmsnorm_forward(item->context, normed, input, head->norm, count, model->hidden, model->norm_eps);
    trainer->sums.cross_entropy +=
        head_forward_backward(item->context, d, head->output_gradient, normed, head->output,
                              item->cell->tokens, count, model->hidden, model->vocab, scale);
    rmsnorm_backward(item->context, d, head->norm_gradient, d, input, head->norm, count, model->hidden,
                     model->norm_eps, false);
    add_gradients(item, COMPONENT_HEAD, -1);
}

/* ---- which computation ------------------------------------------------------------------------------- */

static struct work_item item_of(struct trainer *trainer, const struct operation *op) {
    int layer = op->kind == KIND_EMBED ? 0 : op->kind == KIND_HEAD ? trainer->model->layers : op->layer;
    int layers = trainer->model->layers;
    return (struct work_item){.trainer = trainer,
                              .context = &trainer->contexts[RESOURCE_COMPUTE],
                              .cell = cell_at(trainer, layer, op->micro_batch),
                              .above = layer < layers ? cell_at(trainer, layer + 1, op->micro_batch) : NULL,
                              .layer = layer,
                              .micro_batch = op->micro_batch,
                              .tokens = own_tokens(trainer, op->micro_batch),
                              .full = trainer->plan->memory.recompute == RECOMPUTE_FULL};
}

void compute_operation(struct trainer *trainer, int id) {
    const struct operation *op = &trainer->schedule->ops[id];
    if (op->kind == KIND_OPTIMIZER) {
        optimizer_operation(trainer);
        return;
    }
    struct work_item item = item_of(trainer, op);
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
