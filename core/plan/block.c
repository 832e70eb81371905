/*
One layer of one micro-batch as operations, the same for every system.

Forward: attention on the attention group; dispatch sends each token's copies; ffn; combine sends the copies'
outputs to the next group. Backward: combine⁻¹ sends the output's gradient to the experts, ffn⁻¹, dispatch⁻¹
sends the copies' input gradients back, attention⁻¹. A dense layer of a pipelined system stays on its GPUs and
has no transfers.

The residual stream. In a pipelined system it never leaves its GPU. In a disaggregated one it has to reach the
next attention group; it rides with the token for free: what dispatch sends is the un-normalised hidden state
h, every expert normalises it itself, and the F-GPU with the token's first expert adds h to that expert's
weighted output before combine. So dispatch and combine carry exactly copies × hidden bytes and no message of
its own is needed. Backward the same GPU adds the output's gradient to the first copy's input gradient.
(Price: a normalisation per copy on the F side.)

Memory levers. What attention drops it makes again from the layer's input, which always stays: norms and
projections just ahead of its backward pass, all of it as soon as the layer's backward pass is due, since what
is dispatched may be needed. What the feed-forward part drops it makes again from the experts' input: the
activation just ahead of its backward pass, all of it as soon as that is due. The experts' input is dropped
too, and dispatched once more, when `expert_input` says resend or both sides recompute all. A pipelined
system that recomputes all checkpoints the whole layer and repeats the combine as well; a disaggregated one
has no use for that: the next layer's input is kept where it arrived.
*/
#include "plan/plan.h"

static bool has_transfers(const struct block *block) {
    return block->place.attention != block->place.ffn ||
           model_layer_is_moe(block->plan->point->model, block->layer);
}

static bool is_pipelined(const struct block *block) {
    return block->place.attention == block->place.ffn;
}

static bool recomputes_all(const struct block *block) {
    return block->recompute.attention == ATTENTION_FULL && block->recompute.ffn == FFN_FULL;
}

static bool dispatches_again(const struct block *block) {
    bool resend = block->plan->memory.expert_input == INPUT_RESEND;
    return has_transfers(block) && (resend || recomputes_all(block));
}

static int add_transfer(struct schedule *schedule, const struct block *block, enum kind kind, enum pass pass,
                        int from, int to, struct transfer_cost leg, int after) {
    int op = schedule_transfer(schedule, kind, pass, block->layer, block->micro_batch, from, to, leg.seconds,
                               leg.bytes);
    schedule_after(schedule, after);
    return op;
}

static int add_dispatch(struct schedule *schedule, const struct block *block, enum pass pass, int after) {
    int a = block->place.attention, f = block->place.ffn;
    bool backward = pass == PASS_BACKWARD;
    return add_transfer(schedule, block, KIND_DISPATCH, pass, backward ? f : a, backward ? a : f,
                        block->cost->dispatch, after);
}

/* To or from each of the next groups in turn, each behind after[i] and the one before, so that the experts'
   output or its gradient is whole behind the last. Returns the first one; the others follow it. */
static int add_combine(struct schedule *schedule, const struct block *block, enum pass pass,
                       const int *after) {
    const struct place *place = &block->place;
    int first = schedule->op_count;
    for (int i = 0; i < place->next_count; i++) {
        bool backward = pass == PASS_BACKWARD;
        int next = place->next[i];
        add_transfer(schedule, block, KIND_COMBINE, pass, backward ? next : place->ffn,
                     backward ? place->ffn : next, block->combine[i], after[backward ? i : 0]);
        schedule_chunk(schedule, i, place->next_count);
        if (i) schedule_after(schedule, first + i - 1);
    }
    return first;
}

static int compute(struct schedule *schedule, const struct block *block, enum kind kind, enum pass pass,
                   int after) {
    const struct layer_cost *cost = block->cost;
    bool attention = kind == KIND_ATTENTION;
    const double *seconds = attention ? cost->attention : cost->ffn;
    int op = schedule_compute(schedule, kind, pass, block->layer, block->micro_batch,
                              attention ? block->place.attention : block->place.ffn,
                              seconds[pass] + (pass == PASS_BACKWARD ? seconds[PASS_WEIGHT] : 0));
    if (attention) schedule_gather(schedule, cost->gather[pass]);
    schedule_after(schedule, after);
    return op;
}

static int keep(struct schedule *schedule, const struct block *block, enum role role, int group, int producer,
                double bytes) {
    int activation = schedule_keep(schedule, group, producer, bytes);
    schedule_role(schedule, role, block->layer, block->micro_batch);
    return activation;
}

/* Memory that only one operation or the way to the next one needs. */
static void keep_until(struct schedule *schedule, const struct block *block, enum role role, int group,
                       int producer, int last, double bytes) {
    schedule_release(schedule, keep(schedule, block, role, group, producer, bytes), last);
}

/* Keys and values of whole sequences while attention runs, and in backward their gradients. */
static void keep_gathered(struct schedule *schedule, const struct block *block, int attention, int times) {
    if (block->memory->gathered > 0)
        keep_until(schedule, block, ROLE_GATHERED, block->place.attention, attention, attention,
                   times * block->memory->gathered);
}

static double dropped_attention(const struct block *block) {
    return block->memory->full_attention - block->memory->attention;
}
static double dropped_ffn(const struct block *block) {
    return block->memory->full_ffn - block->memory->ffn;
}

static void release(struct schedule *schedule, int activation, int op) {
    if (activation >= 0) schedule_release(schedule, activation, op);
}

int block_forward(struct schedule *schedule, struct block *block, int input) {
    const struct layer_memory *memory = block->memory;
    int a = block->place.attention, f = block->place.ffn;
    bool transfers = has_transfers(block);
    block->forward_first = schedule->op_count;
    int attention = compute(schedule, block, KIND_ATTENTION, PASS_FORWARD, input);
    int dispatch = transfers ? add_dispatch(schedule, block, PASS_FORWARD, attention) : attention;
    int ffn = compute(schedule, block, KIND_FFN, PASS_FORWARD, dispatch);
    int combine = transfers ? add_combine(schedule, block, PASS_FORWARD, &ffn) : ffn;
    block->forward_last = schedule->op_count;

    block->attention_activation = block->expert_activation = block->ffn_activation = -1; /* until kept */
    block->restored_attention = block->restored_ffn = -1;
    block->input_activation =
        keep(schedule, block, ROLE_LAYER_INPUT, a, input >= 0 ? input : attention, memory->layer_input);
    if (block->recompute.attention == ATTENTION_FULL)
        keep_until(schedule, block, ROLE_SENT, a, attention, dispatch, memory->layer_input);
    else
        block->attention_activation = keep(schedule, block, ROLE_ATTENTION, a, attention, memory->attention);
    if (block->recompute.attention != ATTENTION_NONE)
        keep_until(schedule, block, ROLE_RESTORED_ATTENTION, a, attention, attention,
                   dropped_attention(block));
    keep_gathered(schedule, block, attention, 1);
    if (transfers && !dispatches_again(block))
        block->expert_activation =
            keep(schedule, block, ROLE_EXPERT_INPUT, f, dispatch, memory->expert_input);
    else if (transfers) /* a dense layer in place has its input in what attention keeps */
        keep_until(schedule, block, ROLE_EXPERT_INPUT, f, dispatch, ffn, memory->expert_input);
    if (block->recompute.ffn != FFN_FULL)
        block->ffn_activation = keep(schedule, block, ROLE_FFN, f, ffn, memory->ffn);
    if (block->recompute.ffn != FFN_NONE)
        keep_until(schedule, block, ROLE_RESTORED_FFN, f, ffn, ffn, dropped_ffn(block));
    if (transfers)
        keep_until(schedule, block, ROLE_EXPERT_OUTPUT, f, ffn, block->forward_last - 1,
                   memory->expert_input);
    return combine;
}

/* What has to be there again before the backward pass begins, as operations; −1: it never left. */
struct restored {
    int attention; /* attention's internals */
    int experts;   /* the experts' input and internals */
    int last;      /* of all that one GPU of a pipelined system does for it */
};

/* A pipelined GPU does one thing after the other; on two groups each begins when the layer is due. */
static int behind(const struct block *block, const struct restored *restored, int gradient) {
    return is_pipelined(block) && restored->last >= 0 ? restored->last : gradient;
}

static struct restored restore(struct schedule *schedule, struct block *block, int gradient) {
    const struct layer_memory *memory = block->memory;
    int a = block->place.attention, f = block->place.ffn;
    struct restored restored = {-1, -1, -1};
    if (block->recompute.attention == ATTENTION_FULL) {
        restored.attention = restored.last =
            compute(schedule, block, KIND_ATTENTION, PASS_RECOMPUTE, gradient);
        block->restored_attention =
            keep(schedule, block, ROLE_RESTORED_ATTENTION, a, restored.attention, dropped_attention(block));
        keep_gathered(schedule, block, restored.attention, 1);
        schedule_reads(schedule, block->input_activation, restored.attention);
    }
    if (dispatches_again(block)) {
        int again = restored.attention;
        restored.experts = restored.last =
            add_dispatch(schedule, block, PASS_RECOMPUTE, again >= 0 ? again : gradient);
        schedule_reads(schedule, again >= 0 ? block->restored_attention : block->attention_activation,
                       restored.experts);
        block->expert_activation =
            keep(schedule, block, ROLE_EXPERT_INPUT, f, restored.experts, memory->expert_input);
    }
    if (block->recompute.ffn != FFN_FULL) return restored;
    int after = restored.experts >= 0 ? restored.experts : behind(block, &restored, gradient);
    restored.experts = restored.last = compute(schedule, block, KIND_FFN, PASS_RECOMPUTE, after);
    if (block->expert_activation >= 0) schedule_reads(schedule, block->expert_activation, restored.experts);
    block->restored_ffn = keep(schedule, block, ROLE_RESTORED_FFN, f, restored.experts, dropped_ffn(block));
    if (has_transfers(block) && is_pipelined(block) && recomputes_all(block)) {
        int combine = add_combine(schedule, block, PASS_RECOMPUTE, &restored.experts);
        keep_until(schedule, block, ROLE_EXPERT_OUTPUT, f, restored.experts, combine, memory->expert_input);
        restored.last = combine;
    }
    return restored;
}

int block_backward(struct schedule *schedule, struct block *block, const int *gradients) {
    const struct layer_memory *memory = block->memory;
    int a = block->place.attention, f = block->place.ffn;
    bool transfers = has_transfers(block);
    block->backward_first = schedule->op_count;
    struct restored restored = restore(schedule, block, gradients[0]);

    int arrived = behind(block, &restored, gradients[0]), first_arrived = arrived;
    if (transfers) {
        first_arrived =
            add_combine(schedule, block, PASS_BACKWARD, is_pipelined(block) ? &arrived : gradients);
        arrived = schedule->op_count - 1;
    }
    int ready = arrived;
    if (block->recompute.ffn == FFN_ACTIVATION) {
        ready = compute(schedule, block, KIND_FFN, PASS_RECOMPUTE, arrived);
        if (restored.experts >= 0) schedule_after(schedule, restored.experts);
        block->restored_ffn = keep(schedule, block, ROLE_RESTORED_FFN, f, ready, dropped_ffn(block));
    }
    int ffn = compute(schedule, block, KIND_FFN, PASS_BACKWARD, ready);
    if (restored.experts >= 0 && restored.experts != ready) schedule_after(schedule, restored.experts);
    int back = transfers ? add_dispatch(schedule, block, PASS_BACKWARD, ffn) : ffn, returned = back;
    if (block->recompute.attention == ATTENTION_NORMS ||
        block->recompute.attention == ATTENTION_PROJECTIONS) {
        back = compute(schedule, block, KIND_ATTENTION, PASS_RECOMPUTE, returned);
        block->restored_attention =
            keep(schedule, block, ROLE_RESTORED_ATTENTION, a, back, dropped_attention(block));
    }
    int attention = compute(schedule, block, KIND_ATTENTION, PASS_BACKWARD, back);
    if (restored.attention >= 0) schedule_after(schedule, restored.attention);
    block->backward_last = schedule->op_count;
    block->ffn_backward = ffn;

    if (transfers) {
        keep_until(schedule, block, ROLE_OUTPUT_GRADIENT, f, first_arrived, ffn, memory->expert_input);
        keep_until(schedule, block, ROLE_INPUT_GRADIENT, f, ffn, returned, memory->expert_input);
    }
    keep_until(schedule, block, ROLE_MIDDLE_GRADIENT, a, returned, attention, memory->layer_input);
    keep_gathered(schedule, block, attention, 2);
    release(schedule, block->input_activation, attention);
    release(schedule, block->attention_activation, attention);
    release(schedule, block->restored_attention, attention);
    release(schedule, block->ffn_activation, ffn);
    release(schedule, block->restored_ffn, ffn);
    release(schedule, block->expert_activation, ffn);
    return attention;
}

int plan_add_hop(struct schedule *schedule, enum pass pass, int layer, int micro_batch, int from, int to,
                 struct transfer_cost cost, int after) {
    if (from == to) return after;
    int op =
        schedule_transfer(schedule, KIND_P2P, pass, layer, micro_batch, from, to, cost.seconds, cost.bytes);
    schedule_after(schedule, after);
    return op;
}

int plan_add_head(struct schedule *schedule, int group, int micro_batch, int chunk, int chunks, int arrived,
                  double seconds) {
    int forward = schedule_compute(schedule, KIND_HEAD, PASS_FORWARD, -1, micro_batch, group, seconds);
    schedule_chunk(schedule, chunk, chunks);
    schedule_after(schedule, arrived);
    return forward;
}

int plan_add_head_backward(struct schedule *schedule, int forward, double seconds, double input_bytes) {
    struct operation of = schedule->ops[forward];
    int group = of.lanes[0] / RESOURCE_COUNT, arrived = schedule->deps[of.first_dep];
    int backward = schedule_compute(schedule, KIND_HEAD, PASS_BACKWARD, -1, of.micro_batch, group, seconds);
    schedule_chunk(schedule, of.chunk, of.chunks);
    schedule_after(schedule, forward);
    schedule_release(schedule, schedule_keep(schedule, group, arrived, input_bytes), backward);
    schedule_role(schedule, ROLE_HEAD_INPUT, schedule->layers, of.micro_batch);
    return backward;
}

int plan_add_step_end(struct schedule *schedule, int group, struct step_end end, const int *after,
                      int count) {
    int reduced;
    if (end.grad_sync > 0) {
        reduced = schedule_transfer(schedule, KIND_GRAD_SYNC, PASS_BACKWARD, -1, -1, group, group,
                                    end.grad_sync, end.sync_bytes);
        for (int i = 0; i < count; i++) schedule_after(schedule, after[i]);
        after = &reduced;
        count = 1;
    }
    int optimizer = schedule_compute(schedule, KIND_OPTIMIZER, PASS_BACKWARD, -1, -1, group, end.optimizer);
    for (int i = 0; i < count; i++) schedule_after(schedule, after[i]);
    if (end.param_gather > 0) {
        schedule_transfer(schedule, KIND_PARAM_GATHER, PASS_FORWARD, -1, -1, group, group, end.param_gather,
                          end.gather_bytes);
        schedule_after(schedule, optimizer);
    }
    return optimizer;
}
