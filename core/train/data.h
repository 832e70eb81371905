/*
Where training tokens come from: a corpus of bytes, or a Markov chain whose entropy is known.

A sequence is a function of the data, a seed, the step and the sequence's index in the batch, and of nothing
before it: training resumes at any step, and any rank can make the sequences it needs.
*/
#ifndef TRAIN_DATA_H
#define TRAIN_DATA_H

#include "base/base.h"

struct data;

/* Every byte of the file is a token. Each sequence is a random stretch of it. What is no regular file of at
   most 1 GiB, cannot be read, holds fewer than seq_len + 1 bytes (an empty one too) or a byte that is no id
   of the vocabulary: an error that says so, and NULL. */
struct data *data_open_text(const char *file, int seq_len, int vocab, struct errors *errors);

/* A chain over min(vocab, 64) states with random transition probabilities drawn from chain_seed, every one of
   them above zero. Sequences start in the stationary distribution, so every position is equally hard. vocab
   ≥ 2. */
struct data *data_markov(int vocab, int seq_len, uint64_t chain_seed);

void data_free(struct data *data); /* NULL is allowed */

/* tokens (S + 1) */
void data_sequence(const struct data *data, uint64_t seed, int64_t step, int64_t sequence, int *tokens);

/* Of the Markov chain, in nats a token: no model can reach a lower mean cross-entropy. NaN for a text. */
double data_entropy(const struct data *data);

#endif
