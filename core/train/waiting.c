/*
Naps that grow while nothing comes.
*/
#include "train/waiting.h"

#include <sched.h>
#include <time.h>

enum { YIELDS = 50, FIRST_NAP_NS = 20000, LONGEST_NAP_NS = 200000 };

void wait_a_little(int *round) {
    if (++*round <= YIELDS) {
        sched_yield();
        return;
    }
    long nap = (long)FIRST_NAP_NS * (*round - YIELDS);
    struct timespec time = {.tv_nsec = nap < LONGEST_NAP_NS ? nap : LONGEST_NAP_NS};
    nanosleep(&time, NULL);
}

void wait_all(MPI_Request *requests, int count) {
    int done = 0, round = 0;
    for (;;) {
        MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE);
        if (done) return;
        wait_a_little(&round);
    }
}

MPI_Message wait_for_message(MPI_Comm comm, int source, int tag, MPI_Status *status) {
    MPI_Message message;
    for (int found = 0, round = 0;;) {
        MPI_Improbe(source, tag, comm, &found, &message, status);
        if (found) return message;
        wait_a_little(&round);
    }
}

void wait_for_all(MPI_Comm comm, void *values, int count, MPI_Datatype type, MPI_Op op) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, values, count, type, op, comm, &request);
    wait_all(&request, 1);
}
