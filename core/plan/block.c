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

Memory levers. recompute full keeps the layer's input alone: backward repeats attention, dispatch and ffn
(and, in a pipelined system, combine, as a checkpointed layer does; a disaggregated one has no use for it: the
next layer's input is kept where it arrived). expert_input resend drops the received copies after ffn and
dispatches them once more.
*/
#include "plan/plan.h"

static bool has_transfers(const struct block *block) {
    return block->place.attention != block->place.ffn ||
           model_layer_is_moe(block->plan->point->model, block->layer);
}

static int transfer(struct schedule *schedule, const struct block *block, enum kind kind, enum pass pass,
                    int from, int to, int after) {
    const struct layer_cost *cost = block->cost;
    bool dispatch = kind == KIND_DISPATCH;
    int op = schedule_transfer(schedule, kind, pass, block->layer, block->micro_batch, from, to,
                               dispatch ? cost->dispatch : cost->combine,
                               dispatch ? cost->dispatch_bytes : cost->combine_bytes);
    schedule_after(schedule, after);
    return op;
}

static int compute(struct schedule *schedule, const struct block *block, enum kind kind, enum pass pass,
                   double seconds, int after) {
    int group = kind == KIND_ATTENTION ? block->place.attention : block->place.ffn;
    int op = schedule_compute(schedule, kind, pass, block->layer, block->micro_batch, group, seconds);
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

int block_forward(struct schedule *schedule, struct block *block, int input) {
    const struct layer_memory *memory = block->memory;
    const struct place place = block->place;
    bool full = block->plan->memory.recompute == RECOMPUTE_FULL, transfers = has_transfers(block);
    bool resend = block->plan->memory.expert_input == INPUT_RESEND;
    block->forward_first = schedule->op_count;
    int attention =
        compute(schedule, block, KIND_ATTENTION, PASS_FORWARD, block->cost->attention[PASS_FORWARD], input);
    int dispatch = attention;
    if (transfers)
        dispatch =
            transfer(schedule, block, KIND_DISPATCH, PASS_FORWARD, place.attention, place.ffn, attention);
    int ffn = compute(schedule, block, KIND_FFN, PASS_FORWARD, block->cost->ffn[PASS_FORWARD], dispatch);
    int combine = ffn;
    if (transfers)
        combine = transfer(schedule, block, KIND_COMBINE, PASS_FORWARD, place.ffn, place.next, ffn);
    block->forward_last = schedule->op_count;

    block->input_activation = keep(schedule, block, ROLE_LAYER_INPUT, place.attention,
                                   input >= 0 ? input : attention, memory->layer_input);
    block->attention_activation = block->expert_activation = block->ffn_activation = -1; /* until kept */
    if (full) {
        keep_until(schedule, block, ROLE_ATTENTION, place.attention, attention, attention,
                   memory->full_attention);
        keep_until(schedule, block, ROLE_SENT, place.attention, attention, dispatch, memory->layer_input);
    } else {
        block->attention_activation =
            keep(schedule, block, ROLE_ATTENTION, place.attention, attention, memory->attention);
    }
    /* A full recomputation drops the copies too; a dense layer in place has them in h. */
    if (transfers && !resend && !full)
        block->expert_activation =
            keep(schedule, block, ROLE_EXPERT_INPUT, place.ffn, dispatch, memory->expert_input);
    else if (transfers)
        keep_until(schedule, block, ROLE_EXPERT_INPUT, place.ffn, dispatch, ffn, memory->expert_input);
    if (full)
        keep_until(schedule, block, ROLE_FFN, place.ffn, ffn, ffn, memory->full_ffn);
    else
        block->ffn_activation = keep(schedule, block, ROLE_FFN, place.ffn, ffn, memory->ffn);
    if (transfers)
        keep_until(schedule, block, ROLE_EXPERT_OUTPUT, place.ffn, ffn, combine, memory->expert_input);
    return combine;
}

/* Recomputation and resending ahead of the backward pass. Returns the operation after which the experts'
   input and internals are there again (−1: they never left), and sets *attention to the one that restores
   attention's. */
static int restore(struct schedule *schedule, struct block *block, int gradient, int *attention) {
    const struct place place = block->place;
    const struct layer_memory *memory = block->memory;
    const struct memory levers = block->plan->memory;
    bool full = levers.recompute == RECOMPUTE_FULL, transfers = has_transfers(block);
    *attention = -1;
    int ready = gradient;
    if (full) {
        *attention = ready = compute(schedule, block, KIND_ATTENTION, PASS_RECOMPUTE,
                                     block->cost->attention[PASS_RECOMPUTE], gradient);
        block->attention_activation =
            keep(schedule, block, ROLE_ATTENTION, place.attention, ready, memory->full_attention);
        schedule_reads(schedule, block->input_activation, ready);
    }
    bool again = transfers && (full || levers.expert_input == INPUT_RESEND);
    if (again) {
        ready = transfer(schedule, block, KIND_DISPATCH, PASS_RECOMPUTE, place.attention, place.ffn, ready);
        schedule_reads(schedule, block->attention_activation, ready);
        block->expert_activation =
            keep(schedule, block, ROLE_EXPERT_INPUT, place.ffn, ready, memory->expert_input);
    }
    if (!full) return again ? ready : -1;
    ready = compute(schedule, block, KIND_FFN, PASS_RECOMPUTE, block->cost->ffn[PASS_RECOMPUTE], ready);
    block->ffn_activation = keep(schedule, block, ROLE_FFN, place.ffn, ready, memory->full_ffn);
    if (transfers && place.attention == place.next) {
        int combine = transfer(schedule, block, KIND_COMBINE, PASS_RECOMPUTE, place.ffn, place.next, ready);
        keep_until(schedule, block, ROLE_EXPERT_OUTPUT, place.ffn, ready, combine, memory->expert_input);
        ready = combine;
    }
    return ready;
}

int block_backward(struct schedule *schedule, struct block *block, int gradient) {
    const struct place place = block->place;
    const struct layer_memory *memory = block->memory;
    const struct layer_cost *cost = block->cost;
    bool transfers = has_transfers(block), selective = block->plan->memory.recompute == RECOMPUTE_SELECTIVE;
    bool pipelined = place.attention == place.ffn;
    block->backward_first = schedule->op_count;
    int attention_ready, ready = restore(schedule, block, gradient, &attention_ready);

    /* One GPU's layer runs one thing after the other; on two groups the gradient travels beside the
     * restoring. */
    int arrived = pipelined && ready >= 0 ? ready : gradient;
    if (transfers)
        arrived = transfer(schedule, block, KIND_COMBINE, PASS_BACKWARD, place.next, place.ffn, arrived);
    int delivered = arrived;
    if (selective) {
        arrived = compute(schedule, block, KIND_FFN, PASS_RECOMPUTE, cost->ffn[PASS_RECOMPUTE], arrived);
        if (ready >= 0) schedule_after(schedule, ready);
    }
    int ffn = compute(schedule, block, KIND_FFN, PASS_BACKWARD,
                      cost->ffn[PASS_BACKWARD] + cost->ffn[PASS_WEIGHT], arrived);
    if (ready >= 0 && ready != arrived) schedule_after(schedule, ready);
    int back = ffn;
    if (transfers)
        back = transfer(schedule, block, KIND_DISPATCH, PASS_BACKWARD, place.ffn, place.attention, ffn);
    int returned = back;
    if (selective)
        back =
            compute(schedule, block, KIND_ATTENTION, PASS_RECOMPUTE, cost->attention[PASS_RECOMPUTE], back);
    int attention = compute(schedule, block, KIND_ATTENTION, PASS_BACKWARD,
                            cost->attention[PASS_BACKWARD] + cost->attention[PASS_WEIGHT], back);
    if (attention_ready >= 0) schedule_after(schedule, attention_ready);
    block->backward_last = schedule->op_count;
    block->ffn_backward = ffn;

    if (transfers) {
        keep_until(schedule, block, ROLE_OUTPUT_GRADIENT, place.ffn, delivered, ffn, memory->expert_input);
        keep_until(schedule, block, ROLE_INPUT_GRADIENT, place.ffn, ffn, returned, memory->expert_input);
    }
    keep_until(schedule, block, ROLE_MIDDLE_GRADIENT, place.attention, returned, attention,
               memory->layer_input);
    if (selective) { /* what selective dropped comes back for as long as the pass needs it */
        keep_until(schedule, block, ROLE_RESTORED_FFN, place.ffn, arrived, ffn,
                   memory->full_ffn - memory->ffn);
        keep_until(schedule, block, ROLE_RESTORED_ATTENTION, place.attention, back, attention,
                   memory->full_attention - memory->attention);
    }
    schedule_release(schedule, block->input_activation, attention);
    schedule_release(schedule, block->attention_activation, attention);
    schedule_release(schedule, block->ffn_activation, ffn);
    if (block->expert_activation >= 0) schedule_release(schedule, block->expert_activation, ffn);
    return attention;
}

int plan_add_head(struct schedule *schedule, int group, int micro_batch, int arrived, const double seconds[2],
                  double input_bytes) {
    int forward = schedule_compute(schedule, KIND_HEAD, PASS_FORWARD, -1, micro_batch, group, seconds[0]);
    schedule_after(schedule, arrived);
    int backward = schedule_compute(schedule, KIND_HEAD, PASS_BACKWARD, -1, micro_batch, group, seconds[1]);
    schedule_after(schedule, forward);
    schedule_release(schedule, schedule_keep(schedule, group, arrived, input_bytes), backward);
    schedule_role(schedule, ROLE_HEAD_INPUT, schedule->layers, micro_batch);
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
