/*
Router: from logits to experts and weights, and back; forced choices; auxiliary losses; capacity; the noise of
noisy top-k.

All rules of choosing end in one of two weights: the softmax over all experts at the chosen ones, or the
softmax over the chosen ones alone. (Dividing the first by its sum is the second.) Auxiliary losses are always
of the softmax over all experts. The weights are computed anew in the backward pass, so only logits are kept.
*/
#include "layers/kernels.h"
#include "layers/vector_math.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS_A_TASK = 64 };

static bool weights_of_chosen_only(const struct model *model) {
    return model->moe.router != ROUTER_SOFTMAX_TOPK || model->moe.renormalise;
}

/* p (E) = softmax of logits; returns log Σ exp. */
static floatX softmax(floatX *p, const floatX *logits, int count) {
    floatX most = largest(logits, count), sum = exponentials(p, logits, count, 1, most);
    for (int e = 0; e < count; e++) p[e] /= sum;
    return most + (floatX)log(sum);
}

/* The weights of one token before dropping, from its logits and choice. p (E) is overwritten. */
static void weights_of_token(const struct model *model, floatX *weights, floatX *p, const floatX *logits,
                             const int *ids) {
    int top_k = model->moe.top_k;
    if (weights_of_chosen_only(model)) {
        floatX chosen[top_k];
        for (int k = 0; k < top_k; k++) chosen[k] = logits[ids[k]];
        softmax(weights, chosen, top_k);
    } else {
        softmax(p, logits, model->moe.experts);
        for (int k = 0; k < top_k; k++) weights[k] = p[ids[k]];
    }
}

/* ---- choosing ---------------------------------------------------------------------------------------- */

/* Insertion into a list of the K best: K is small. Every expert is inserted at most once and the first K
   always are, so the list is whole and without repetition even where comparisons with a NaN are all false. */
static void choose(int *ids, const floatX *logits, int experts, int top_k) {
    int have = 0;
    for (int e = 0; e < experts; e++) {
        if (have == top_k && !(logits[e] > logits[ids[have - 1]])) continue;
        int at = have < top_k ? have++ : top_k - 1;
        for (; at > 0 && logits[e] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = e;
    }
}

struct routing {
    const struct model *model;
    struct route *route;
    const struct forced_routing *forced; /* or NULL */
    int layer;
    struct sequences sequences;
    floatX *dlogits;
    const floatX *dweights;
    double aux_scale, z_scale;
    const struct route *chosen;
};

static int routing_end(const struct routing *r, int task) {
    int end = (task + 1) * TOKENS_A_TASK, tokens = rows_of_all(r->sequences);
    return end < tokens ? end : tokens;
}

static const int *forced_choice(const struct routing *r, int t) {
    int position = position_of_row(r->sequences, t % rows_of_sequence(r->sequences));
    int shifted = (position + r->layer) % r->sequences.seq_len;
    return r->forced->ids + (size_t)shifted * r->model->moe.top_k;
}

static void route_tokens(void *context, int task) {
    const struct routing *r = context;
    int experts = r->model->moe.experts, top_k = r->model->moe.top_k;
    floatX p[experts];
    for (int t = task * TOKENS_A_TASK; t < routing_end(r, task); t++) {
        const floatX *logits = r->route->logits + (size_t)t * experts;
        int *ids = r->route->ids + (size_t)t * top_k;
        if (r->forced)
            memcpy(ids, forced_choice(r, t), (size_t)top_k * sizeof *ids);
        else
            choose(ids, logits, experts, top_k);
        weights_of_token(r->model, r->route->weights + (size_t)t * top_k, p, logits, ids);
    }
}

void route_choose(struct context *context, const struct model *model, struct route *route,
                  const struct forced_routing *forced, int layer, struct sequences sequences) {
    assert(!forced || forced->seq_len == sequences.seq_len);
    struct routing routing = {
        .model = model, .route = route, .forced = forced, .layer = layer, .sequences = sequences};
    int tokens = rows_of_all(sequences);
    workers_run(context->workers, (tokens + TOKENS_A_TASK - 1) / TOKENS_A_TASK, route_tokens, &routing);
}

/* ---- what is of a whole sequence --------------------------------------------------------------------- */

/* A piece's choices (K, E) among all. */
static size_t choices_at(const struct model *model, struct sequences sequences, int sequence, int piece) {
    size_t number = (size_t)sequence * pieces_of_sequence(sequences) + piece;
    return number * model->moe.top_k * model->moe.experts;
}

void route_count(const struct model *model, int *choices, const struct route *route,
                 struct sequences sequences) {
    int experts = model->moe.experts, top_k = model->moe.top_k;
    for (int s = 0; s < sequences.count; s++)
        for (int i = 0; i < pieces_here(sequences); i++) {
            struct sequence_piece piece = piece_here(sequences, i);
            int *here = choices + choices_at(model, sequences, s, piece.number);
            size_t copy = ((size_t)s * rows_of_sequence(sequences) + piece.row) * top_k;
            memset(here, 0, (size_t)top_k * experts * sizeof *here);
            for (int row = 0; row < piece.rows; row++)
                for (int k = 0; k < top_k; k++) here[k * experts + route->ids[copy++]]++;
        }
}

/* Goes through a piece's k-th choices in order; those that exceed their expert's capacity are dropped. chosen
   (E): of all choices before. */
static void drop_choices(const struct model *model, struct route *route, int *chosen, size_t first_row,
                         int rows, int k, int capacity) {
    int top_k = model->moe.top_k;
    for (int row = 0; row < rows; row++) {
        size_t copy = (first_row + row) * top_k + k;
        if (++chosen[route->ids[copy]] <= capacity) continue;
        route->kept[copy] = 0;
        route->weights[copy] = 0;
    }
}

static void settle_piece(const struct model *model, struct route *route, const int *choices,
                         struct sequences sequences, int sequence, int number, int k) {
    int experts = model->moe.experts, capacity = model_expert_capacity(model, sequences.seq_len);
    int *chosen = route->chosen + (size_t)sequence * experts;
    for (int i = 0; i < pieces_here(sequences); i++) {
        struct sequence_piece piece = piece_here(sequences, i);
        if (piece.number != number) continue;
        size_t row = (size_t)sequence * rows_of_sequence(sequences) + piece.row;
        drop_choices(model, route, chosen, row, piece.rows, k, capacity);
        return;
    }
    const int *there = choices + choices_at(model, sequences, sequence, number) + (size_t)k * experts;
    for (int e = 0; e < experts; e++) chosen[e] += there[e];
}

void route_settle(const struct model *model, struct route *route, const int *choices,
                  struct sequences sequences) {
    memset(route->kept, 1, (size_t)rows_of_all(sequences) * model->moe.top_k);
    memset(route->chosen, 0, (size_t)sequences.count * model->moe.experts * sizeof *route->chosen);
    for (int s = 0; s < sequences.count; s++)
        for (int k = 0; k < model->moe.top_k; k++)
            for (int number = 0; number < pieces_of_sequence(sequences); number++)
                settle_piece(model, route, choices, sequences, s, number, k);
}

void route_forward(struct context *context, const struct model *model, struct route *route,
                   const struct forced_routing *forced, int layer, struct sequences sequences) {
    size_t choices = choices_at(model, sequences, sequences.count, 0);
    int *counts = scratch_take(context, choices * sizeof *counts);
    route_choose(context, model, route, forced, layer, sequences);
    route_count(model, counts, route, sequences);
    route_settle(model, route, counts, sequences);
    scratch_release(context, counts);
}

/* ---- forced choices ---------------------------------------------------------------------------------- */

/* rate (E): copies a token sends to each expert, at most 1, K in all. An expert whose part would be above 1
   is full, and the others share what is left, until there is no such part. */
static void forced_rates(double *rate, const double *share, int experts, int top_k) {
    for (int e = 0; e < experts; e++) rate[e] = 0;
    for (int full = 0, before = -1; full > before;) {
        before = full;
        double left = top_k - full, sum = 0;
        for (int e = 0; e < experts; e++) sum += rate[e] < 1 ? share[e] : 0;
        for (int e = 0; e < experts; e++) {
            if (rate[e] == 1) continue;
            rate[e] = fmin(1, sum > 0 ? left * (share[e] / sum) : left / (experts - before));
            full += rate[e] == 1;
        }
    }
}

/* counts (E): a sequence's copies for each expert, S · K in all. Parts with the largest remainders are
   rounded up, so that each is within 1 of its part, and S and 0 stay what they are. rate is overwritten. */
static void forced_counts(int *counts, double *rate, int experts, int top_k, int seq_len) {
    int left = seq_len * top_k;
    for (int e = 0; e < experts; e++) {
        double part = rate[e] * seq_len;
        counts[e] = (int)part;
        rate[e] = part - counts[e];
        left -= counts[e];
    }
    for (; left > 0; left--) {
        int best = 0;
        for (int e = 1; e < experts; e++)
            if (rate[e] > rate[best]) best = e;
        counts[best]++;
        rate[best] = 0;
    }
}

static bool coprime(int a, int b) {
    while (b) {
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a == 1;
}

/* Lay the experts' counts one after another on S · K points: token j takes points j, j + S, j + 2 S, …, which
   are of K experts since no count exceeds S. Neighbours among the j are alike, so positions take them in
   steps of about the golden section of S; and the choices of j are turned by j, so that which one is first
   takes turns. */
struct forced_routing *forced_routing_new(struct arena *arena, const struct model *model, const double *share,
                                          int seq_len) {
    int experts = model->moe.experts, top_k = model->moe.top_k, counts[experts],
        step = (int)(0.618 * seq_len);
    double rate[experts];
    struct forced_routing *forced = arena_alloc(arena, sizeof *forced);
    int *chosen = must_alloc((size_t)seq_len * top_k * sizeof *chosen); /* (S, K) */
    forced->seq_len = seq_len;
    forced->ids = arena_alloc(arena, (size_t)seq_len * top_k * sizeof *forced->ids);
    forced_rates(rate, share, experts, top_k);
    forced_counts(counts, rate, experts, top_k, seq_len);
    for (int e = 0, point = 0; e < experts; e++)
        for (int end = point + counts[e]; point < end; point++)
            chosen[(size_t)(point % seq_len) * top_k + point / seq_len] = e;
    while (!coprime(step, seq_len)) step++;
    for (int position = 0; position < seq_len; position++) {
        int j = (int)((int64_t)position * step % seq_len);
        for (int k = 0; k < top_k; k++)
            forced->ids[(size_t)position * top_k + k] = chosen[(size_t)j * top_k + (k + j) % top_k];
    }
    free(chosen);
    return forced;
}

/* ---- auxiliary losses -------------------------------------------------------------------------------- */

double route_aux_scale(const struct model *model, int64_t batch_sequences) {
    int layers = model_moe_layers(model);
    return layers ? model->moe.aux_loss / ((double)batch_sequences * layers) : 0;
}

double route_z_scale(const struct model *model, int64_t batch_tokens) {
    int layers = model_moe_layers(model);
    return layers ? model->moe.z_loss / ((double)batch_tokens * layers) : 0;
}

/* fractions (E): how often a sequence chose each expert, per token */
static void chosen_fractions(floatX *fractions, const struct model *model, const struct route *route,
                             struct sequences sequences, int sequence) {
    int experts = model->moe.experts;
    const int *chosen = route->chosen + (size_t)sequence * experts;
    for (int e = 0; e < experts; e++) fractions[e] = (floatX)chosen[e] / sequences.seq_len;
}

struct route_losses route_losses(const struct model *model, const struct route *route,
                                 struct sequences sequences) {
    int experts = model->moe.experts, rows = rows_of_sequence(sequences);
    struct route_losses losses = {0, 0};
    floatX p[experts], fractions[experts];
    for (int s = 0; s < sequences.count; s++) {
        double sum = 0;
        chosen_fractions(fractions, model, route, sequences, s);
        for (int t = s * rows; t < (s + 1) * rows; t++) {
            floatX lse = softmax(p, route->logits + (size_t)t * experts, experts);
            sum += vector_dot(fractions, p, experts);
            losses.z += (double)lse * lse;
        }
        losses.aux += experts * sum / sequences.seq_len;
    }
    return losses;
}

double route_margin(const struct model *model, const struct route *route, int tokens) {
    int experts = model->moe.experts, top_k = model->moe.top_k;
    double margin = INFINITY;
    for (int t = 0; t < tokens; t++) {
        const floatX *logits = route->logits + (size_t)t * experts;
        const int *ids = route->ids + (size_t)t * top_k;
        for (int e = 0; e < experts; e++) {
            bool chosen = false;
            for (int k = 0; k < top_k; k++) chosen |= ids[k] == e;
            double gap = (double)logits[ids[top_k - 1]] - logits[e];
            if (!chosen && gap < margin) margin = gap;
        }
    }
    return margin;
}

/* ---- backward ---------------------------------------------------------------------------------------- */

/* dlogits += p · (g − Σ g p): through a softmax over all experts. */
static void softmax_backward(floatX *dlogits, const floatX *p, const floatX *g, int count) {
    floatX mean = vector_dot(g, p, count);
    for (int e = 0; e < count; e++) dlogits[e] += p[e] * (g[e] - mean);
}

static void route_backward_token(const struct routing *r, int t, floatX *dlogits, const floatX *fractions) {
    const struct model *model = r->model;
    int experts = model->moe.experts, top_k = model->moe.top_k;
    const floatX *logits = r->chosen->logits + (size_t)t * experts;
    const int *ids = r->chosen->ids + (size_t)t * top_k;
    const unsigned char *kept = r->chosen->kept + (size_t)t * top_k;
    const floatX *dweights = r->dweights + (size_t)t * top_k;
    floatX p[experts], g[experts], weights[top_k], mean = 0;
    floatX lse = softmax(p, logits, experts), all = (floatX)(r->aux_scale * experts / r->sequences.seq_len);
    bool chosen_only = weights_of_chosen_only(model);
    for (int e = 0; e < experts; e++) {
        g[e] = all * fractions[e];
        dlogits[e] = (floatX)(2 * r->z_scale) * lse * p[e];
    }
    if (chosen_only) weights_of_token(model, weights, p, logits, ids);
    for (int k = 0; k < top_k; k++) {
        floatX d = kept[k] ? dweights[k] : 0;
        if (chosen_only)
            mean += d * weights[k];
        else
            g[ids[k]] += d;
    }
    for (int k = 0; chosen_only && k < top_k; k++)
        dlogits[ids[k]] += weights[k] * ((kept[k] ? dweights[k] : 0) - mean);
    softmax_backward(dlogits, p, g, experts);
}

static void route_backward_sequence(void *context, int s) {
    const struct routing *r = context;
    int experts = r->model->moe.experts, rows = rows_of_sequence(r->sequences);
    floatX fractions[experts];
    chosen_fractions(fractions, r->model, r->chosen, r->sequences, s);
    for (int t = s * rows; t < (s + 1) * rows; t++)
        route_backward_token(r, t, r->dlogits + (size_t)t * experts, fractions);
}

void route_backward(struct context *context, const struct model *model, floatX *dlogits,
                    const floatX *dweights, const struct route *route, struct sequences sequences,
                    double aux_scale, double z_scale) {
    struct routing routing = {.model = model,
                              .sequences = sequences,
                              .dlogits = dlogits,
                              .dweights = dweights,
                              .aux_scale = aux_scale,
                              .z_scale = z_scale,
                              .chosen = route};
    workers_run(context->workers, sequences.count, route_backward_sequence, &routing);
}

/* ---- noise ------------------------------------------------------------------------------------------- */

/* Of one row: keyed by its token's place in the batch. */
static struct rng row_rng(struct route_key key, struct sequences sequences, int row) {
    int rows = rows_of_sequence(sequences);
    int64_t first = key.first_token + (int64_t)(row / rows) * sequences.seq_len;
    int64_t token = first + position_of_row(sequences, row % rows);
    uint64_t parts[] = {key.seed, (uint64_t)key.step, (uint64_t)key.layer, (uint64_t)token}, mixed = 0;
    for (size_t i = 0; i < COUNT(parts); i++) {
        struct rng rng = rng_seed(mixed ^ parts[i]);
        mixed = rng_next(&rng);
    }
    return rng_seed(mixed);
}

void noise_forward(struct context *context, floatX *logits, const floatX *noise, struct route_key key,
                   struct sequences sequences, int experts) {
    (void)context;
    for (int t = 0; t < rows_of_all(sequences); t++) {
        struct rng rng = row_rng(key, sequences, t);
        for (size_t i = (size_t)t * experts; i < (size_t)(t + 1) * experts; i++) {
            double softplus = noise[i] > 30 ? (double)noise[i] : log1p(exp((double)noise[i]));
            logits[i] += (floatX)(rng_normal(&rng) * softplus);
        }
    }
}

void noise_backward(struct context *context, floatX *dnoise, const floatX *dlogits, const floatX *noise,
                    struct route_key key, struct sequences sequences, int experts) {
    (void)context;
    for (int t = 0; t < rows_of_all(sequences); t++) {
        struct rng rng = row_rng(key, sequences, t);
        for (size_t i = (size_t)t * experts; i < (size_t)(t + 1) * experts; i++)
            dnoise[i] = (floatX)(dlogits[i] * rng_normal(&rng) / (1 + exp(-(double)noise[i])));
    }
}
