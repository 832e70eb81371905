/*
Output matrix and cross-entropy.

A vocabulary of 150,000 makes the logits of a long micro-batch larger than all activations together. So they
are made for a chunk of tokens, used and overwritten; and once only, since forward and backward run at one go.
*/
#include "layers/kernels.h"
#include "layers/vector_math.h"

#include <math.h>
#include <string.h>

enum { CHUNK_ELEMENTS = 1 << 20, SMALLEST_CHUNK = 16, ROWS_A_TASK = 8 };

static int chunk_tokens(int tokens, int vocab) {
    int chunk = CHUNK_ELEMENTS / vocab;
    if (chunk < SMALLEST_CHUNK) chunk = SMALLEST_CHUNK;
    return chunk < tokens ? chunk : tokens;
}

struct chunk {
    floatX *logits; /* (rows, V) */
    floatX *lse;    /* (rows) */
    const int *targets;
    int rows, vocab;
    floatX scale;
};

static int chunk_end(const struct chunk *chunk, int task) {
    int end = (task + 1) * ROWS_A_TASK;
    return end < chunk->rows ? end : chunk->rows;
}

static void lse_rows(void *context, int task) {
    const struct chunk *chunk = context;
    for (int r = task * ROWS_A_TASK; r < chunk_end(chunk, task); r++) {
        const floatX *row = chunk->logits + (size_t)r * chunk->vocab;
        floatX most = largest(row, chunk->vocab), lanes[16] = {0}, sum = 0;
        int i = 0;
        for (; i + 16 <= chunk->vocab; i += 16)
            for (int lane = 0; lane < 16; lane++) lanes[lane] += exponential(row[i + lane] - most);
        for (; i < chunk->vocab; i++) sum += exponential(row[i] - most);
        for (int lane = 0; lane < 16; lane++) sum += lanes[lane];
        chunk->lse[r] = most + (floatX)log(sum);
    }
}

/* logits → scale · (softmax − one at the target) */
static void gradient_rows(void *context, int task) {
    const struct chunk *chunk = context;
    for (int r = task * ROWS_A_TASK; r < chunk_end(chunk, task); r++) {
        floatX *row = chunk->logits + (size_t)r * chunk->vocab, lse = chunk->lse[r];
        for (int i = 0; i < chunk->vocab; i++) row[i] = chunk->scale * exponential(row[i] - lse);
        row[chunk->targets[r]] -= chunk->scale;
    }
}

static int row_tasks(int rows) {
    return (rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
}

static double chunk_loss(const struct chunk *chunk) {
    double loss = 0;
    for (int r = 0; r < chunk->rows; r++)
        loss += (double)chunk->lse[r] - chunk->logits[(size_t)r * chunk->vocab + chunk->targets[r]];
    return loss;
}

/* dx and dweight: both or, forward only, none. */
struct head {
    const floatX *x, *weight;
    const int *targets;
    int tokens, hidden, vocab;
    floatX *dx, *dweight;
    double scale;
};

static double head_run(struct context *context, const struct head *head) {
    int step = chunk_tokens(head->tokens, head->vocab), hidden = head->hidden, vocab = head->vocab;
    floatX *logits = scratch_floats(context, (size_t)step * vocab);
    floatX *lse = scratch_floats(context, (size_t)step);
    double loss = 0;
    for (int first = 0; first < head->tokens; first += step) {
        int rows = head->tokens - first < step ? head->tokens - first : step;
        const floatX *x = head->x + (size_t)first * hidden;
        struct chunk chunk = {logits, lse, head->targets + first, rows, vocab, (floatX)head->scale};
        linear_forward(context, logits, x, head->weight, NULL, rows, hidden, vocab);
        workers_run(context->workers, row_tasks(rows), lse_rows, &chunk);
        loss += chunk_loss(&chunk);
        if (!head->dx) continue;
        workers_run(context->workers, row_tasks(rows), gradient_rows, &chunk);
        linear_backward_input(context, head->dx + (size_t)first * hidden, logits, head->weight, rows, hidden,
                              vocab);
        linear_backward_weight(context, head->dweight, NULL, logits, x, rows, hidden, vocab);
    }
    scratch_release(context, logits);
    return loss;
}

double head_forward(struct context *context, const floatX *x, const floatX *weight, const int *targets,
                    int tokens, int hidden, int vocab) {
    return head_run(context, &(struct head){x, weight, targets, tokens, hidden, vocab, NULL, NULL, 0});
}

double head_forward_backward(struct context *context, floatX *dx, floatX *dweight, const floatX *x,
                             const floatX *weight, const int *targets, int tokens, int hidden, int vocab,
                             double scale) {
    return head_run(context, &(struct head){x, weight, targets, tokens, hidden, vocab, dx, dweight, scale});
}

void head_logits(struct context *context, floatX *logits, const floatX *x, const floatX *weight, int tokens,
                 int hidden, int vocab) {
    linear_forward(context, logits, x, weight, NULL, tokens, hidden, vocab);
}
