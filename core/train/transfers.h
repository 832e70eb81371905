/*
A rank's half of a transfer: what the send lane, or the receive lane, does.
*/
#ifndef TRAIN_TRANSFERS_H
#define TRAIN_TRANSFERS_H

#include "train/runner.h"

void send_operation(struct runner *runner, int op);
/* Takes the memory of the operation's activations once their sizes have come. Returns when the first message
   came: what a receiver waits for before that is its sender, not the network. */
double receive_operation(struct runner *runner, int op);
/* Empty messages between groups: dependencies without data. */
void tell_group(struct runner *runner, int op, int group);
void wait_for_group(struct runner *runner, int op);

#endif
