/*
Waiting for messages without keeping a core busy: other ranks share the processor, and MPI's own calls spin.
*/
#ifndef TRAIN_WAITING_H
#define TRAIN_WAITING_H

#include <mpi.h>

/* Between two looks for what is awaited: yields for a while, then sleeps in growing naps. *round begins at 0.
 */
void wait_a_little(int *round);
void wait_all(MPI_Request *requests, int count);
/* For a message that MPI_Mrecv then takes; status says how long it is. */
MPI_Message wait_for_message(MPI_Comm comm, int source, int tag, MPI_Status *status);
/* MPI_Allreduce in place. Collective over comm. */
void wait_for_all(MPI_Comm comm, void *values, int count, MPI_Datatype type, MPI_Op op);

#endif
