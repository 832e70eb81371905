/*
Transfers between the ranks of two groups (M to N, M and N as they are), or inside one.

A message from one rank to another is a head, whose length the receiver learns from the message itself, and
rows. The head says ahead of the rows what is in them: dispatch announces each copy's token, expert and
weight, combine the tokens, dispatch's backward carries the gradients of the copies' weights. Everything a
transfer sends has the operation's number as its tag.

Rows are sent from and received into the places where they are used, by an MPI datatype that lists them: no
buffers in between. Only sums are staged: a token's copies come from several ranks and are added in the ranks'
order, whichever arrives first.
*/
#include "train/transfers.h"
#include "train/cell_memory.h"
#include "train/waiting.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- empty messages ---------------------------------------------------------------------------------- */

void tell_group(struct runner *runner, int op, int group) {
    for (int i = 0; i < group_size(runner, group); i++)
        MPI_Send(NULL, 0, MPI_BYTE, peer(runner, group, i), op, runner->control);
}

void wait_for_group(struct runner *runner, int op) {
    const struct list *waits = &runner->program.waits;
    for (int i = waits->first[op]; i < waits->first[op + 1]; i++) {
        const struct operation *on = &runner->schedule->ops[waits->items[i]];
        int group = on->lanes[on->lane_count - 1] / RESOURCE_COUNT;
        for (int r = 0; r < group_size(runner, group); r++) {
            MPI_Status status;
            MPI_Message message =
                wait_for_message(runner->control, peer(runner, group, r), waits->items[i], &status);
            MPI_Mrecv(NULL, 0, MPI_BYTE, &message, &status);
        }
    }
}

/* ---- messages ---------------------------------------------------------------------------------------- */

struct message {
    int rank;
    void *head;
    size_t head_bytes;
    floatX *rows;
    const int *row; /* (count) which rows; NULL: the first ones */
    int count;
};

static MPI_Comm comm_of(const struct runner *runner, int op) {
    return runner->schedule->ops[op].pass == PASS_BACKWARD ? runner->backward : runner->forward;
}

static MPI_Datatype rows_type(const struct runner *runner, const struct message *message) {
    MPI_Datatype type;
    if (message->row)
        MPI_Type_create_indexed_block(message->count, 1, message->row, runner->row, &type);
    else
        MPI_Type_contiguous(message->count, runner->row, &type);
    MPI_Type_commit(&type);
    return type;
}

static void send_messages(struct runner *runner, int op, const struct message *messages, int count) {
    MPI_Comm comm = comm_of(runner, op);
    MPI_Request *requests = must_alloc(2 * (size_t)count * sizeof(MPI_Request) + 1);
    int open = 0;
    for (int i = 0; i < count; i++) {
        const struct message *message = &messages[i];
        MPI_Isend(message->head, (int)message->head_bytes, MPI_BYTE, message->rank, op, comm,
                  &requests[open++]);
        if (!message->count) continue;
        MPI_Datatype type = rows_type(runner, message);
        MPI_Isend(message->rows, 1, type, message->rank, op, comm, &requests[open++]);
        MPI_Type_free(&type);
    }
    wait_all(requests, open);
    free(requests);
}

/* What this rank's other lanes did before a message could be answered, the receiving lane sees: the order
   came to it round other ranks, which no memory model knows of. */
static void see_other_lanes(struct runner *runner) {
    pthread_mutex_lock(&runner->mutex);
    pthread_mutex_unlock(&runner->mutex);
}

static void wait_for_any(MPI_Comm comm, int tag, const struct message *messages, int count) {
    for (int round = 0;; wait_a_little(&round))
        for (int i = 0, found = 0; i < count; i++) {
            MPI_Iprobe(messages[i].rank, tag, comm, &found, MPI_STATUS_IGNORE);
            if (found) return;
        }
}

/* Fills head and head_bytes of each message, in memory the caller frees. Returns when the first came. */
static double receive_heads(struct runner *runner, int op, struct message *messages, int count) {
    MPI_Comm comm = comm_of(runner, op);
    wait_for_any(comm, op, messages, count);
    double first = seconds_now();
    for (int i = 0; i < count; i++) {
        MPI_Status status;
        int bytes;
        MPI_Message message = wait_for_message(comm, messages[i].rank, op, &status);
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        messages[i].head = must_alloc((size_t)bytes + 1);
        messages[i].head_bytes = (size_t)bytes;
        MPI_Mrecv(messages[i].head, bytes, MPI_BYTE, &message, &status);
    }
    see_other_lanes(runner);
    return first;
}

static void receive_rows(struct runner *runner, int op, const struct message *messages, int count) {
    MPI_Comm comm = comm_of(runner, op);
    MPI_Request *requests = must_alloc((size_t)count * sizeof(MPI_Request) + 1);
    int open = 0;
    for (int i = 0; i < count; i++) {
        if (!messages[i].count) continue;
        MPI_Datatype type = rows_type(runner, &messages[i]);
        MPI_Irecv(messages[i].rows, 1, type, messages[i].rank, op, comm, &requests[open++]);
        MPI_Type_free(&type);
    }
    wait_all(requests, open);
    free(requests);
}

static struct message *messages_with(const struct runner *runner, int group) {
    int count = group_size(runner, group);
    struct message *messages = must_alloc((size_t)count * sizeof *messages);
    for (int i = 0; i < count; i++) messages[i].rank = peer(runner, group, i);
    return messages;
}

static void free_messages(struct message *messages, int count) {
    for (int i = 0; i < count; i++) free(messages[i].head);
    free(messages);
}

static struct rows *rows_new(struct runner *runner, int count) {
    return passing_new(runner, (size_t)count * sizeof(struct rows));
}

static void rows_room(struct runner *runner, struct rows *rows, int count) {
    rows->row = passing_new(runner, (size_t)count * sizeof(int));
    rows->token = passing_new(runner, (size_t)count * sizeof(int));
}

/* ---- dispatch ---------------------------------------------------------------------------------------- */

/* What a transfer between two groups is about. */
struct leg {
    struct runner *runner;
    struct cell *cell;
    int op, layer, micro_batch;
    int other, others; /* the group at the other end, and its ranks */
    bool again;        /* a repetition: the other side still knows what is where */
};

static void dispatch_send(struct leg leg) {
    struct cell *cell = leg.cell;
    struct message *messages = messages_with(leg.runner, leg.other);
    floatX *middle = cell->slot[ROLE_SENT] ? cell->slot[ROLE_SENT] : cell->attention.middle;
    for (int j = 0; j < leg.others; j++) {
        const struct sent *sent = &cell->sent[j];
        messages[j].head = sent->copies;
        messages[j].head_bytes = leg.again ? 0 : (size_t)sent->count * sizeof *sent->copies;
        messages[j].rows = middle;
        messages[j].row = sent->row;
        messages[j].count = sent->count;
    }
    send_messages(leg.runner, leg.op, messages, leg.others);
    free(messages);
}

/* Gives each copy announced its row: expert by expert, in an expert sender by sender; then those without one.
 */
static void place_copies(struct leg leg, const struct message *messages) {
    struct runner *runner = leg.runner;
    struct cell *cell = leg.cell;
    int experts = runner->state->experts[leg.layer].experts, rows = 0;
    int *counts = passing_new(runner, ((size_t)experts + 1) * sizeof *counts);
    int *next = must_alloc(((size_t)experts + 2) * sizeof *next);
    cell->received = rows_new(runner, leg.others);
    for (int i = 0; i < leg.others; i++) {
        const struct copy *copies = messages[i].head;
        struct rows *received = &cell->received[i];
        received->count = (int)(messages[i].head_bytes / sizeof *copies);
        rows_room(runner, received, received->count);
        for (int n = 0; n < received->count; n++) counts[copies[n].expert < 0 ? experts : copies[n].expert]++;
        rows += received->count;
    }
    for (int e = 0; e <= experts; e++) next[e + 1] = next[e] + counts[e];
    cell->routed = rows - counts[experts];
    cell->firsts = 0;
    floatX *weights = passing_new(runner, (size_t)rows * sizeof *weights);
    unsigned char *first = passing_new(runner, (size_t)rows);
    for (int i = 0; i < leg.others; i++) {
        const struct copy *copies = messages[i].head;
        for (int n = 0; n < cell->received[i].count; n++) {
            int row = next[copies[n].expert < 0 ? experts : copies[n].expert]++;
            cell->received[i].row[n] = row;
            cell->received[i].token[n] = copies[n].token;
            weights[row] = copies[n].weight;
            first[row] = (unsigned char)copies[n].first;
            cell->firsts += copies[n].first;
        }
    }
    free(next);
    cell->copies = (struct expert_part){rows, counts, weights, first};
}

/* Which outputs go to which rank of the next groups: to the token's own rank, or, at the end, to the rank of
   the head whose part of the tokens it is in. */
static void place_outputs(struct leg leg) {
    struct runner *runner = leg.runner;
    const struct ranks *ranks = &runner->ranks;
    struct cell *cell = leg.cell;
    int replica = runner->seat.replica, parts = ranks->head_count * group_size(runner, ranks->heads[0]);
    if (ranks->pipelined || leg.layer + 1 < runner->model->layers) {
        cell->returned = cell->received;
        return;
    }
    cell->returned = rows_new(runner, parts);
    for (int j = 0; j < parts; j++) rows_room(runner, &cell->returned[j], cell->copies.rows);
    for (int i = 0; i < leg.others; i++) {
        int before = tokens_before(ranks, replica, leg.micro_batch, i), j = 0;
        for (int n = 0; n < cell->received[i].count; n++) {
            int token = before + cell->received[i].token[n];
            while (token < head_tokens_before(ranks, replica, leg.micro_batch, j)) j--;
            while (token >= head_tokens_before(ranks, replica, leg.micro_batch, j + 1)) j++;
            struct rows *returned = &cell->returned[j];
            returned->row[returned->count] = cell->received[i].row[n];
            returned->token[returned->count++] =
                token - head_tokens_before(ranks, replica, leg.micro_batch, j);
        }
    }
}

static double dispatch_receive(struct leg leg) {
    struct message *messages = messages_with(leg.runner, leg.other);
    double first = receive_heads(leg.runner, leg.op, messages, leg.others);
    if (!leg.again) {
        place_copies(leg, messages);
        place_outputs(leg);
    }
    take_memory(leg.runner, leg.op);
    for (int i = 0; i < leg.others; i++) {
        messages[i].rows = leg.cell->slot[ROLE_EXPERT_INPUT];
        messages[i].row = leg.cell->received[i].row;
        messages[i].count = leg.cell->received[i].count;
    }
    receive_rows(leg.runner, leg.op, messages, leg.others);
    free_messages(messages, leg.others);
    return first;
}

/* ---- combine ----------------------------------------------------------------------------------------- */

/* Of the rank's outputs, those for the group at the other end. */
static const struct rows *returned_to(struct leg leg) {
    return leg.cell->returned + leg.runner->schedule->ops[leg.op].chunk * leg.others;
}

static void combine_send(struct leg leg) {
    struct message *messages = messages_with(leg.runner, leg.other);
    for (int j = 0; j < leg.others; j++) {
        const struct rows *returned = &returned_to(leg)[j];
        messages[j].head = returned->token;
        messages[j].head_bytes = leg.again ? 0 : (size_t)returned->count * sizeof *returned->token;
        messages[j].rows = leg.cell->slot[ROLE_EXPERT_OUTPUT];
        messages[j].row = returned->row;
        messages[j].count = returned->count;
    }
    send_messages(leg.runner, leg.op, messages, leg.others);
    free(messages);
}

/* Rows of each message one after another in scratch of the receiving lane, to be released by the caller. */
static void stage_rows(struct leg leg, struct message *messages) {
    struct runner *runner = leg.runner;
    size_t rows = 0;
    for (int i = 0; i < leg.others; i++) rows += (size_t)messages[i].count;
    floatX *staged = scratch_floats(&runner->contexts[RESOURCE_RECV], rows * runner->hidden);
    for (int i = 0; i < leg.others; i++) {
        messages[i].rows = staged;
        messages[i].row = NULL;
        staged += (size_t)messages[i].count * runner->hidden;
    }
    receive_rows(runner, leg.op, messages, leg.others);
}

static void unstage_rows(struct leg leg, struct message *messages) {
    scratch_release(&leg.runner->contexts[RESOURCE_RECV], messages[0].rows);
    free_messages(messages, leg.others);
}

static void add_rows(floatX *to, const int *row, const floatX *from, int count, int hidden) {
    for (int n = 0; n < count; n++, from += hidden) {
        floatX *restrict sum = to + (size_t)row[n] * hidden;
        for (int i = 0; i < hidden; i++) sum[i] += from[i];
    }
}

static int stream_tokens(const struct runner *runner, int layer, int micro_batch) {
    return layer == runner->model->layers ? head_tokens(runner, micro_batch)
                                          : own_tokens(runner, micro_batch);
}

/* The layer's output is the sum of a token's copies; in a pipelined system the rank's own part is there
 * already. */
static double combine_receive(struct leg leg) {
    struct runner *runner = leg.runner;
    struct cell *cell = leg.cell, *above = cell_at(runner, leg.layer + 1, leg.micro_batch);
    struct message *messages = messages_with(runner, leg.other);
    double first = receive_heads(runner, leg.op, messages, leg.others);
    if (!leg.again) cell->combined = rows_new(runner, leg.others);
    for (int j = 0; j < leg.others; j++) {
        struct rows *combined = &cell->combined[j];
        if (!leg.again) {
            combined->count = (int)(messages[j].head_bytes / sizeof *combined->row);
            combined->row = passing_new(runner, messages[j].head_bytes);
            if (combined->count) memcpy(combined->row, messages[j].head, messages[j].head_bytes);
        }
        messages[j].count = combined->count;
    }
    take_memory(runner, leg.op);
    stage_rows(leg, messages);
    if (!leg.again) {
        int tokens = stream_tokens(runner, leg.layer + 1, leg.micro_batch);
        floatX *stream = stream_for(runner, above, tokens);
        if (!runner->ranks.pipelined) memset(stream, 0, (size_t)tokens * runner->hidden * sizeof *stream);
        for (int j = 0; j < leg.others; j++)
            add_rows(stream, cell->combined[j].row, messages[j].rows, messages[j].count, runner->hidden);
    }
    unstage_rows(leg, messages);
    return first;
}

/* ---- combine, backward: the output's gradient to every copy ------------------------------------------ */

static void combine_backward_send(struct leg leg) {
    struct runner *runner = leg.runner;
    struct cell *above = cell_at(runner, leg.layer + 1, leg.micro_batch);
    struct message *messages = messages_with(runner, leg.other);
    for (int j = 0; j < leg.others; j++) {
        messages[j].rows = above->gradient;
        messages[j].row = leg.cell->combined[j].row;
        messages[j].count = leg.cell->combined[j].count;
    }
    send_messages(runner, leg.op, messages, leg.others);
    free(messages);
    if (runner->ranks.pipelined) return; /* the rank's own part still needs it */
    passing_free(runner, &above->gradient);
}

static double combine_backward_receive(struct leg leg) {
    struct message *messages = messages_with(leg.runner, leg.other);
    double first = receive_heads(leg.runner, leg.op, messages, leg.others);
    take_memory(leg.runner, leg.op);
    for (int j = 0; j < leg.others; j++) {
        messages[j].rows = leg.cell->slot[ROLE_OUTPUT_GRADIENT];
        messages[j].row = returned_to(leg)[j].row;
        messages[j].count = returned_to(leg)[j].count;
    }
    receive_rows(leg.runner, leg.op, messages, leg.others);
    free_messages(messages, leg.others);
    return first;
}

/* ---- dispatch, backward: every copy's gradient to its token ------------------------------------------ */

static void dispatch_backward_send(struct leg leg) {
    struct runner *runner = leg.runner;
    struct cell *cell = leg.cell;
    struct message *messages = messages_with(runner, leg.other);
    for (int i = 0; i < leg.others; i++) {
        const struct rows *received = &cell->received[i];
        floatX *dweights = must_alloc((size_t)received->count * sizeof *dweights + 1);
        for (int n = 0; n < received->count; n++) dweights[n] = cell->copy_dweights[received->row[n]];
        messages[i].head = dweights;
        messages[i].head_bytes = (size_t)received->count * sizeof *dweights;
        messages[i].rows = cell->slot[ROLE_INPUT_GRADIENT];
        messages[i].row = received->row;
        messages[i].count = received->count;
    }
    send_messages(runner, leg.op, messages, leg.others);
    free_messages(messages, leg.others);
    passing_free(runner, &cell->copy_dweights);
}

static double dispatch_backward_receive(struct leg leg) {
    struct runner *runner = leg.runner;
    struct cell *cell = leg.cell;
    int tokens = own_tokens(runner, leg.micro_batch), top_k = runner->model->moe.top_k;
    size_t elements = (size_t)tokens * runner->hidden;
    struct message *messages = messages_with(runner, leg.other);
    double first = receive_heads(runner, leg.op, messages, leg.others);
    for (int j = 0; j < leg.others; j++) messages[j].count = cell->sent[j].count;
    take_memory(runner, leg.op);
    stage_rows(leg, messages);
    floatX *dmiddle = cell->slot[ROLE_MIDDLE_GRADIENT];
    cell->dweights = passing_new(runner, (size_t)tokens * top_k * sizeof *cell->dweights);
    if (cell->local_gradient)
        memcpy(dmiddle, cell->local_gradient, elements * sizeof *dmiddle);
    else
        memset(dmiddle, 0, elements * sizeof *dmiddle);
    passing_free(runner, &cell->local_gradient);
    for (int j = 0; j < leg.others; j++) {
        const struct sent *sent = &cell->sent[j];
        const floatX *dweights = messages[j].head;
        add_rows(dmiddle, sent->row, messages[j].rows, sent->count, runner->hidden);
        for (int n = 0; n < sent->count; n++)
            if (sent->copies[n].expert >= 0) cell->dweights[sent->place[n]] = dweights[n];
    }
    unstage_rows(leg, messages);
    return first;
}

/* ---- point to point: the residual stream, or its gradient, between pipeline stages ------------------- */

static void p2p_send(struct leg leg) {
    struct runner *runner = leg.runner;
    struct cell *above = cell_at(runner, leg.layer + 1, leg.micro_batch);
    bool backward = runner->schedule->ops[leg.op].pass == PASS_BACKWARD;
    struct message message = {.rank = peer(runner, leg.other, runner->seat.index),
                              .rows = backward ? above->gradient : stream_of(above),
                              .count = own_tokens(runner, leg.micro_batch)};
    send_messages(runner, leg.op, &message, 1);
    passing_free(runner, backward ? &above->gradient : &above->passing);
}

static double p2p_receive(struct leg leg) {
    struct runner *runner = leg.runner;
    struct cell *above = cell_at(runner, leg.layer + 1, leg.micro_batch);
    int tokens = own_tokens(runner, leg.micro_batch);
    struct message message = {.rank = peer(runner, leg.other, runner->seat.index), .count = tokens};
    double first = receive_heads(runner, leg.op, &message, 1);
    take_memory(runner, leg.op);
    if (runner->schedule->ops[leg.op].pass == PASS_BACKWARD)
        message.rows = gradient_for(runner, above, tokens);
    else
        message.rows = stream_for(runner, above, tokens);
    receive_rows(runner, leg.op, &message, 1);
    free(message.head);
    return first;
}

/* ---- which transfer ---------------------------------------------------------------------------------- */

static struct leg leg_of(struct runner *runner, int op, int other_slot) {
    const struct operation *it = &runner->schedule->ops[op];
    int other = it->lanes[other_slot] / RESOURCE_COUNT;
    return (struct leg){.runner = runner,
                        .cell = cell_at(runner, it->layer, it->micro_batch),
                        .op = op,
                        .layer = it->layer,
                        .micro_batch = it->micro_batch,
                        .other = other,
                        .others = group_size(runner, other),
                        .again = it->pass == PASS_RECOMPUTE};
}

void send_operation(struct runner *runner, int op) {
    const struct operation *it = &runner->schedule->ops[op];
    struct leg leg = leg_of(runner, op, it->lane_count - 1);
    bool backward = it->pass == PASS_BACKWARD;
    switch ((enum kind)it->kind) {
    case KIND_DISPATCH:
        backward ? dispatch_backward_send(leg) : dispatch_send(leg);
        break;
    case KIND_COMBINE:
        backward ? combine_backward_send(leg) : combine_send(leg);
        break;
    case KIND_P2P:
        p2p_send(leg);
        break;
    default:
        assert(!"a transfer of this kind is not known");
    }
}

double receive_operation(struct runner *runner, int op) {
    const struct operation *it = &runner->schedule->ops[op];
    struct leg leg = leg_of(runner, op, 0);
    bool backward = it->pass == PASS_BACKWARD;
    switch ((enum kind)it->kind) {
    case KIND_DISPATCH:
        return backward ? dispatch_backward_receive(leg) : dispatch_receive(leg);
    case KIND_COMBINE:
        return backward ? combine_backward_receive(leg) : combine_receive(leg);
    case KIND_P2P:
        return p2p_receive(leg);
    default:
        assert(!"a transfer of this kind is not known");
        return 0;
    }
}
