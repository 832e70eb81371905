/*
Gather and scatter of pieces of sequences, each rank of a run with each other one.

Pieces are sent from and received into their places, by an MPI datatype that lists a rank's pieces. Gradients
alone are staged: they are added in the ranks' order, whichever arrives first.
*/
#include "train/collectives.h"
#include "train/waiting.h"

#include <assert.h>
#include <stdlib.h>

static int run_size(const struct runner *runner) {
    return runner->plan->parallel.cp;
}
static int place_in_run(const struct runner *runner) {
    return runner->seat.index % run_size(runner);
}

/* A rank's pieces of all sequences among (sequences, 2·cp) of them. */
static MPI_Datatype pieces_type(const struct runner *runner, int index, int sequences, MPI_Datatype piece) {
    int cp = run_size(runner), *places = must_alloc(2 * (size_t)sequences * sizeof *places + 1);
    for (int s = 0; s < sequences; s++) {
        places[2 * s] = 2 * cp * s + index;
        places[2 * s + 1] = 2 * cp * s + 2 * cp - 1 - index;
    }
    MPI_Datatype type;
    MPI_Type_create_indexed_block(2 * sequences, 1, places, piece, &type);
    MPI_Type_commit(&type);
    free(places);
    return type;
}

static MPI_Datatype piece_type(size_t count, MPI_Datatype element) {
    MPI_Datatype type;
    MPI_Type_contiguous((int)count, element, &type);
    return type;
}

/* Of a compute lane that is in the middle of attention. */
static void wait_for_run(struct runner *runner, MPI_Request *requests, int count) {
    pulse_set(runner->pulse, RESOURCE_COMPUTE, PULSE_WAIT, "attention, waiting for the ranks of a sequence");
    wait_all(requests, count);
    pulse_set(runner->pulse, RESOURCE_COMPUTE, PULSE_WORK, "attention");
}

/* All that is gathered is made of ints or of wider numbers: in bytes a long piece might be too many. */
static void gather(void *owner, void *pieces, int sequences, size_t bytes) {
    struct runner *runner = owner;
    int cp = run_size(runner), own = place_in_run(runner), open = 0;
    if (!sequences) return;
    assert(bytes % sizeof(int) == 0);
    MPI_Request *requests = must_alloc(2 * (size_t)cp * sizeof(MPI_Request));
    MPI_Datatype piece = piece_type(bytes / sizeof(int), MPI_INT),
                 sent = pieces_type(runner, own, sequences, piece);
    for (int i = 0; i < cp; i++) {
        if (i == own) continue;
        MPI_Datatype received = pieces_type(runner, i, sequences, piece);
        MPI_Isend(pieces, 1, sent, i, 0, runner->run, &requests[open++]);
        MPI_Irecv(pieces, 1, received, i, 0, runner->run, &requests[open++]);
        MPI_Type_free(&received);
    }
    wait_for_run(runner, requests, open);
    MPI_Type_free(&sent);
    MPI_Type_free(&piece);
    free(requests);
}

/* pieces of this rank += others (sequences, 2, count) */
static void add_pieces(const struct runner *runner, floatX *pieces, const floatX *others, int sequences,
                       size_t count) {
    int cp = run_size(runner), index = place_in_run(runner);
    for (int s = 0; s < sequences; s++)
        for (int half = 0; half < 2; half++, others += count) {
            int number = 2 * cp * s + (half ? 2 * cp - 1 - index : index);
            floatX *restrict sum = pieces + (size_t)number * count;
            for (size_t i = 0; i < count; i++) sum[i] += others[i];
        }
}

static void scatter(void *owner, floatX *pieces, int sequences, size_t count) {
    struct runner *runner = owner;
    struct context *context = &runner->contexts[RESOURCE_COMPUTE];
    int cp = run_size(runner), own = place_in_run(runner), open = 0;
    size_t part = 2 * (size_t)sequences * count;
    if (!sequences) return;
    floatX *staged = scratch_floats(context, (size_t)cp * part);
    MPI_Request *requests = must_alloc(2 * (size_t)cp * sizeof(MPI_Request));
    MPI_Datatype piece = piece_type(count, MPI_FLOATX);
    MPI_Type_commit(&piece);
    for (int i = 0; i < cp; i++) {
        if (i == own) continue;
        MPI_Datatype sent = pieces_type(runner, i, sequences, piece);
        MPI_Isend(pieces, 1, sent, i, 0, runner->run, &requests[open++]);
        MPI_Irecv(staged + i * part, 2 * sequences, piece, i, 0, runner->run, &requests[open++]);
        MPI_Type_free(&sent);
    }
    wait_for_run(runner, requests, open);
    for (int i = 0; i < cp; i++)
        if (i != own) add_pieces(runner, pieces, staged + i * part, sequences, count);
    MPI_Type_free(&piece);
    free(requests);
    scratch_release(context, staged);
}

void make_collectives(struct runner *runner) {
    struct seat first = runner->seat;
    first.index -= place_in_run(runner);
    MPI_Comm_split(runner->comm, rank_at(&runner->ranks, first), runner->rank, &runner->run);
    runner->collectives = (struct collectives){gather, scatter, runner};
}
