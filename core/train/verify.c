/*
The reference beside the run: the same batch, the same parameters, one process; gradients compared tensor by
tensor.

Before a step rank 0 takes the run's parameters over, so that any step can be compared, not only the first. A
token whose k-th and next logit nearly tie may be routed differently by two correct programs: such a batch is
drawn again.
*/
#include "train/verify.h"
#include "train/waiting.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DRAWS = 100 };

/* Below it rounding can decide which expert is chosen: logits of size 1, with a few bits to spare. */
static double least_margin(void) {
    return sizeof(floatX) == sizeof(double) ? 1e-12 : 1e-5;
}

/* A gradient below this part of the model's largest one is compared with that part: it may be nothing but
   rounding (the key's bias has no gradient at all). */
static const double FLOOR = 1e-3;

struct verifier {
    struct reference *reference; /* of rank 0, else NULL */
    struct step_losses losses;   /* the reference's */
    struct verification worst;
};

struct verifier *verifier_new(const struct runner *runner, uint64_t seed) {
    struct verifier *verifier = must_alloc(sizeof *verifier);
    if (runner->rank != 0) return verifier;
    verifier->reference = reference_new(runner->model, runner->seq_len, 1, 1, seed);
    verifier->reference->forced = runner->forced;
    return verifier;
}

void verifier_free(struct verifier *verifier) {
    if (!verifier) return;
    reference_free(verifier->reference);
    free(verifier);
}

static int *whole_batch(const struct runner *runner, uint64_t seed) {
    size_t length = (size_t)runner->seq_len + 1;
    int64_t sequences = batch_sequences(&runner->ranks);
    int *tokens = must_alloc((size_t)sequences * length * sizeof *tokens);
    for (int64_t s = 0; s < sequences; s++)
        data_sequence(runner->data, seed, runner->step, s, tokens + (size_t)s * length);
    return tokens;
}

/* The reference's gradients and losses of a batch with a sufficient margin; returns its seed. */
static uint64_t run_reference(struct verifier *verifier, const struct runner *runner, uint64_t first) {
    for (uint64_t draw = 0;; draw++) {
        uint64_t seed = first + draw;
        int *tokens = whole_batch(runner, seed);
        struct batch batch = {tokens, (int)batch_sequences(&runner->ranks), seed, runner->step};
        verifier->losses = reference_gradients(verifier->reference, &batch);
        free(tokens);
        bool clear = verifier->losses.margin > least_margin();
        if (clear || draw + 1 == MOST_DRAWS) return seed;
        verifier->worst.reseeded++;
    }
}

uint64_t verify_batch(struct verifier *verifier, const struct runner *runner, uint64_t seed) {
    struct reference *reference = verifier->reference;
    state_collect(runner->state, runner->comm, false, reference ? &reference->parameters : NULL,
                  reference ? reference->values : NULL);
    if (reference) seed = run_reference(verifier, runner, seed);
    MPI_Request request;
    MPI_Ibcast(&seed, 1, MPI_UINT64_T, 0, runner->comm, &request);
    wait_all(&request, 1);
    return seed;
}

/* Of two differences the one that counts: a NaN stays, whatever comes behind it. */
static double larger_or_nan(double a, double b) {
    return isnan(a) || a >= b ? a : b;
}

static double largest_of(const floatX *values, size_t count) {
    double most = 0;
    for (size_t i = 0; i < count; i++) most = larger_or_nan(most, fabs((double)values[i]));
    return most;
}

double relative_difference(const floatX *found, const floatX *expected, size_t count, double floor) {
    double most = 0, scale = largest_of(expected, count);
    for (size_t i = 0; i < count; i++)
        most = larger_or_nan(most, fabs((double)found[i] - (double)expected[i]));
    return most / (isnan(scale) ? scale : fmax(scale, floor));
}

/* The loss and each of its parts: an auxiliary loss may be a small part of the whole. */
static void compare_losses(struct verifier *verifier, const struct step_losses *found) {
    const struct step_losses *expected = &verifier->losses;
    const double pairs[][2] = {{found->total, expected->total},
                               {found->cross_entropy, expected->cross_entropy},
                               {found->aux, expected->aux},
                               {found->z, expected->z}};
    for (size_t i = 0; i < COUNT(pairs); i++) {
        double off = fabs(pairs[i][0] - pairs[i][1]);
        if (pairs[i][1] != 0) off /= fabs(pairs[i][1]);
        verifier->worst.loss_rel = larger_or_nan(verifier->worst.loss_rel, off);
    }
}

static void compare_gradients(struct verifier *verifier, const floatX *found) {
    const struct reference *reference = verifier->reference;
    struct verification *worst = &verifier->worst;
    double floor = FLOOR * largest_of(reference->gradients, reference->parameters.total);
    for (int i = 0; i < reference->parameters.count; i++) {
        const struct parameter *p = &reference->parameters.list[i];
        double relative =
            relative_difference(found + p->offset, reference->gradients + p->offset, p->count, floor);
        bool worse = larger_or_nan(worst->grad_rel, relative) != worst->grad_rel && !isnan(worst->grad_rel);
        if (!worse && worst->worst_parameter[0]) continue;
        worst->grad_rel = relative;
        snprintf(worst->worst_parameter, sizeof worst->worst_parameter, "%s", p->name);
    }
}

void verify_step(struct verifier *verifier, const struct runner *runner, const struct step_losses *losses) {
    const struct reference *reference = verifier->reference;
    floatX *found = reference ? must_alloc(reference->parameters.total * sizeof *found) : NULL;
    state_collect(runner->state, runner->comm, true, reference ? &reference->parameters : NULL, found);
    if (!reference) return;
    compare_losses(verifier, losses);
    compare_gradients(verifier, found);
    free(found);
}

struct verification verifier_found(const struct verifier *verifier) {
    return verifier->worst;
}
