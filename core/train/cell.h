/*
A cell: what a rank knows of one layer and micro-batch. One more layer, behind the last, is the head's.

A cell's fields are written by one operation and read by later ones; the lanes' progress, which is under a
mutex, orders them.
*/
#ifndef TRAIN_CELL_H
#define TRAIN_CELL_H

#include "layers/layers.h"
#include "schedule/schedule.h"

/* Rows that go to, or came from, one other rank. */
struct rows {
    int count;
    int *row;   /* place in this rank's rows */
    int *token; /* place among the other rank's tokens */
};
/* One copy as dispatch announces it, ahead of the rows themselves. */
struct copy {
    floatX weight;
    int token;  /* of the sender */
    int expert; /* of the receiver, from 0; −1: none, only the residual and shared experts */
    int first;  /* whether the residual rides with it */
};
/* Copies that a rank of the attention group sends to one of the feed-forward group. */
struct sent {
    int count;
    struct copy *copies;
    int *row;   /* rows of `middle` */
    int *place; /* place of the copy's weight in (T, K) */
};

struct cell {
    void *slot[ROLE_COUNT]; /* pool memory that the schedule's activations say is there now */
    /* Residual stream at the layer's input, and its gradient, where no activation of the schedule holds it:
       between an operation and the transfer that sends its result on. */
    floatX *passing, *gradient;
    /* attention side */
    struct attention_kept attention;
    int *chosen;            /* (sequences, E) of attention.route */
    floatX *middle;         /* pipelined, attention recomputed: for the rank's own tokens until ffn */
    struct sent *sent;      /* (ranks of the feed-forward group) */
    floatX *dweights;       /* (T, K) */
    floatX *local_gradient; /* pipelined: gradient of middle through shared experts and residual */
    /* feed-forward side */
    struct rows *received; /* (ranks of the attention group) */
    struct rows *returned; /* (ranks of the next groups): rows whose outputs they get */
    struct expert_part copies;
    int routed, firsts;
    struct expert_kept kept, local_kept;
    floatX *copy_dweights; /* (rows) */
    /* next side */
    struct rows *combined; /* (ranks of the feed-forward group): row is the token */
    /* ends */
    int *tokens; /* inputs, or the head's targets */
};

/* Residual stream at the cell's input (the head's), where it is now; NULL while it is nowhere. */
static inline floatX *stream_of(const struct cell *cell) {
    if (cell->slot[ROLE_LAYER_INPUT]) return cell->slot[ROLE_LAYER_INPUT];
    if (cell->slot[ROLE_HEAD_INPUT]) return cell->slot[ROLE_HEAD_INPUT];
    return cell->passing;
}

#endif
