/*
Parameters, gradients and optimizer state of one rank.

Which bucket a tensor is in and where it lies is worked out from the ranks alone (layout_of), so that a rank
can do it for another one. Everything behind that goes by buckets: a bucket's slices are passed around the
ring of its holders, for sums (reduce-scatter) and for copies (all-gather; both as in Patarasuk & Yuan 2009).
MPI's own collectives would do, but add up in another order for every algorithm, count in int and need a
buffer as large as the bucket. In BF16 a sum that travels would be rounded by each holder: instead every
holder gets the others' parts of its own slice, the same bytes for each, adds them up wide and rounds once.
*/
#include "state/state.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 1 << 16 }; /* elements moved or widened at once */

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* ---- layout ------------------------------------------------------------------------------------------ */

struct layout {
    struct parameters parameters;
    struct bucket *buckets;
    int bucket_count;
};

/* Holders of one parameter after the other; those of a component are the same. */
struct holders {
    const struct ranks *ranks;
    const struct parameter *of;
    int *list, count;
};

static void find_holders(struct holders *holders, const struct parameter *parameter) {
    const struct parameter *of = holders->of;
    bool same = of && of->owner == parameter->owner && of->layer == parameter->layer &&
                of->expert == parameter->expert;
    if (!same) holders->count = parameter_holders(holders->ranks, parameter, holders->list);
    holders->of = parameter;
}

/* An order of sets of holders, the same on all ranks. */
static int compare(const struct bucket *bucket, const struct holders *holders) {
    for (int i = 0; i < bucket->holder_count && i < holders->count; i++)
        if (bucket->holders[i] != holders->list[i]) return bucket->holders[i] < holders->list[i] ? -1 : 1;
    return (bucket->holder_count > holders->count) - (bucket->holder_count < holders->count);
}

/* Its bucket; or, where that is still missing, the place to insert it. */
static int place_of(const struct layout *layout, const struct holders *holders) {
    int low = 0, high = layout->bucket_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (compare(&layout->buckets[middle], holders) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct bucket bucket_of(struct arena *arena, const struct holders *holders, int rank) {
    size_t bytes = (size_t)holders->count * sizeof(int);
    struct bucket bucket = {.holders = arena_alloc(arena, bytes),
                            .holder_count = holders->count,
                            .within_group = true,
                            .comm = MPI_COMM_NULL};
    memcpy(bucket.holders, holders->list, bytes);
    int group = seat_of(holders->ranks, holders->list[0]).group;
    for (int i = 0; i < holders->count; i++) {
        if (holders->list[i] == rank) bucket.me = i;
        if (seat_of(holders->ranks, holders->list[i]).group != group) bucket.within_group = false;
    }
    return bucket;
}

static void find_buckets(struct arena *arena, struct layout *layout, struct holders *holders, int rank) {
    int capacity = 0;
    struct bucket *buckets = NULL;
    for (int i = 0; i < layout->parameters.count; i++) {
        find_holders(holders, &layout->parameters.list[i]);
        int place = place_of(layout, holders);
        if (place < layout->bucket_count && compare(&buckets[place], holders) == 0) continue;
        if (layout->bucket_count == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            buckets = layout->buckets = must_realloc(buckets, (size_t)capacity * sizeof *buckets);
        }
        memmove(buckets + place + 1, buckets + place,
                (size_t)(layout->bucket_count++ - place) * sizeof *buckets);
        buckets[place] = bucket_of(arena, holders, rank);
    }
    size_t bytes = (size_t)layout->bucket_count * sizeof *buckets;
    layout->buckets = arena_alloc(arena, bytes);
    if (bytes) memcpy(layout->buckets, buckets, bytes);
    free(buckets);
}

/* Tensors of a bucket one after the other, in the list's order. */
static void place_tensors(struct layout *layout, struct holders *holders) {
    struct parameters *parameters = &layout->parameters;
    int *places = must_alloc((size_t)parameters->count * sizeof *places);
    for (int i = 0; i < parameters->count; i++) {
        find_holders(holders, &parameters->list[i]);
        struct bucket *bucket = &layout->buckets[places[i] = place_of(layout, holders)];
        parameters->list[i].offset = bucket->count;
        bucket->count += parameters->list[i].count;
    }
    for (int b = 1; b < layout->bucket_count; b++)
        layout->buckets[b].start = layout->buckets[b - 1].start + layout->buckets[b - 1].count;
    for (int i = 0; i < parameters->count; i++)
        parameters->list[i].offset += layout->buckets[places[i]].start;
    free(places);
}

static struct layout layout_of(struct arena *arena, const struct ranks *ranks, int rank) {
    struct layout layout = {.parameters = rank_parameters(arena, ranks, rank)};
    struct holders holders = {.ranks = ranks};
    holders.list = must_alloc((size_t)ranks->count * sizeof(int));
    find_buckets(arena, &layout, &holders, rank);
    place_tensors(&layout, &holders);
    free(holders.list);
    return layout;
}

struct slice bucket_slice(const struct bucket *bucket, int holder) {
    size_t parts = (size_t)bucket->holder_count, part = (size_t)holder;
    size_t first = bucket->count * part / parts;
    return (struct slice){first, bucket->count * (part + 1) / parts - first};
}

/* What a slice of a bucket has of a tensor, as elements of the tensor. */
static struct slice overlap(const struct parameter *parameter, const struct bucket *bucket,
                            struct slice slice) {
    size_t first = bucket->start + slice.first, end = first + slice.count;
    size_t from = first > parameter->offset ? first : parameter->offset;
    size_t to = smaller(end, parameter->offset + parameter->count);
    return from < to ? (struct slice){from - parameter->offset, to - from} : (struct slice){0, 0};
}

/* ---- elements ---------------------------------------------------------------------------------------- */

struct element {
    MPI_Datatype type;
    size_t size;
};

static void add_floats(floatX *restrict to, const floatX *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] += from[i];
}

static void widen(floatX *to, const uint16_t *from, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = bf16_to_float(from[i]);
}

static struct element element_of(bool half) {
    if (half) return (struct element){MPI_UINT16_T, sizeof(uint16_t)};
    return (struct element){MPI_FLOATX, sizeof(floatX)};
}

/* ---- rings ------------------------------------------------------------------------------------------- */

/* Sends one slice to the next holder and receives another from the one before; adds it through `piece`, or
   overwrites when that is NULL. */
static void exchange(const struct bucket *bucket, char *array, const struct element *element,
                     struct slice sent, struct slice received, void *piece) {
    int next = (bucket->me + 1) % bucket->holder_count;
    int previous = (bucket->me + bucket->holder_count - 1) % bucket->holder_count;
    for (size_t done = 0; done < sent.count || done < received.count; done += PIECE) {
        size_t out = done < sent.count ? smaller(sent.count - done, PIECE) : 0;
        size_t in = done < received.count ? smaller(received.count - done, PIECE) : 0;
        char *from = array + (sent.first + done) * element->size;
        char *to = array + (received.first + done) * element->size;
        MPI_Sendrecv(from, (int)out, element->type, out ? next : MPI_PROC_NULL, 0, piece ? piece : to,
                     (int)in, element->type, in ? previous : MPI_PROC_NULL, 0, bucket->comm,
                     MPI_STATUS_IGNORE);
        if (piece) add_floats((floatX *)to, piece, in);
    }
}

/* array: of the bucket, wide. Afterwards this rank's slice of it is the sum over all holders, in the order
   that ends with this rank; the other slices are left with parts of sums. */
static void ring_reduce(const struct bucket *bucket, void *array, const struct element *element) {
    int holders = bucket->holder_count, me = bucket->me;
    void *piece = must_alloc(smaller(bucket->count, PIECE) * element->size);
    for (int turn = 1; turn < holders; turn++)
        exchange(bucket, array, element, bucket_slice(bucket, (me - turn + holders) % holders),
                 bucket_slice(bucket, (me - turn - 1 + holders) % holders), piece);
    free(piece);
}

/* Sends each other holder what this rank has of its slice, from element `done` on, and adds up in sum (PIECE)
   what they and this rank have of this rank's, in the ring's order. Returns the number of elements. */
static size_t sum_piece(const struct bucket *bucket, const uint16_t *array, size_t done, floatX *sum,
                        uint16_t *piece, floatX *wide) {
    int holders = bucket->holder_count, me = bucket->me;
    struct slice mine = bucket_slice(bucket, me);
    size_t in = done < mine.count ? smaller(mine.count - done, PIECE) : 0;
    for (int turn = 1; turn < holders; turn++) {
        int from = (me + turn) % holders, to = (me + holders - turn) % holders;
        struct slice theirs = bucket_slice(bucket, to);
        size_t out = done < theirs.count ? smaller(theirs.count - done, PIECE) : 0;
        MPI_Sendrecv(array + theirs.first + done, (int)out, MPI_UINT16_T, out ? to : MPI_PROC_NULL, 0, piece,
                     (int)in, MPI_UINT16_T, in ? from : MPI_PROC_NULL, 0, bucket->comm, MPI_STATUS_IGNORE);
        widen(turn == 1 ? sum : wide, piece, in);
        if (turn > 1) add_floats(sum, wide, in);
    }
    widen(wide, array + mine.first + done, in);
    add_floats(sum, wide, in);
    return in;
}

/* The same of BF16. */
static void direct_reduce(const struct bucket *bucket, uint16_t *array) {
    if (bucket->holder_count == 1) return;
    size_t longest = bucket->count / (size_t)bucket->holder_count + 1, room = smaller(longest, PIECE);
    uint16_t *piece = must_alloc(room * sizeof *piece), *own = array + bucket_slice(bucket, bucket->me).first;
    floatX *sum = must_alloc(room * sizeof *sum), *wide = must_alloc(room * sizeof *wide);
    for (size_t done = 0; done < longest; done += PIECE) {
        size_t count = sum_piece(bucket, array, done, sum, piece, wide);
        for (size_t i = 0; i < count; i++) own[done + i] = bf16_from_float((float)sum[i]);
    }
    free(wide);
    free(sum);
    free(piece);
}

/* Afterwards every slice is what its own holder had. */
static void ring_gather(const struct bucket *bucket, void *array, const struct element *element) {
    int holders = bucket->holder_count, me = bucket->me;
    for (int turn = 0; turn < holders - 1; turn++)
        exchange(bucket, array, element, bucket_slice(bucket, (me - turn + holders) % holders),
                 bucket_slice(bucket, (me - turn - 1 + holders) % holders), NULL);
}

/* ---- components: gradients in BF16 ------------------------------------------------------------------- */

/* Tensors of one component, packed: their places in the workspace and in the rank's arrays. */
struct component_list {
    struct parameters parameters;
    size_t *places;
};

struct component_workspace {
    floatX *memory;
    struct component_list *attention, *ffn; /* (layers) */
    struct component_list embedding, head;
};

static bool component_held(const struct state *state, enum component component, int layer) {
    const struct ranks *ranks = state->ranks;
    int group = seat_of(ranks, state->rank).group;
    switch (component) {
    case COMPONENT_ATTENTION:
        return ranks->attention[layer] == group;
    case COMPONENT_FFN:
        return ranks->ffn[layer] == group;
    case COMPONENT_EMBEDDING:
        return ranks->embed == group;
    case COMPONENT_HEAD:
        return head_part(ranks, seat_of(ranks, state->rank)) >= 0;
    }
    return false;
}

static bool component_has(const struct model *model, enum component component, int layer,
                          const struct parameter *parameter) {
    enum owner owner = parameter->owner;
    switch (component) {
    case COMPONENT_ATTENTION:
        return parameter->layer == layer && (owner == OWNER_ATTENTION || owner == OWNER_FFN_NORM);
    case COMPONENT_FFN:
        return parameter->layer == layer && owner != OWNER_ATTENTION;
    case COMPONENT_EMBEDDING:
        return owner == OWNER_EMBEDDING;
    case COMPONENT_HEAD:
        return owner == OWNER_HEAD || (owner == OWNER_EMBEDDING && model->tie_embeddings);
    }
    return false;
}

static struct component_list component_list(const struct state *state, enum component component, int layer) {
    struct component_list list = {.parameters.model = state->ranks->model};
    if (!component_held(state, component, layer)) return list;
    const struct parameters *all = &state->parameters;
    int count = 0;
    for (int i = 0; i < all->count; i++) count += component_has(all->model, component, layer, &all->list[i]);
    list.parameters.list = arena_alloc(state->arena, (size_t)count * sizeof *all->list);
    list.places = arena_alloc(state->arena, (size_t)count * sizeof *list.places);
    for (int i = 0; i < all->count; i++) {
        if (!component_has(all->model, component, layer, &all->list[i])) continue;
        struct parameters *packed = &list.parameters;
        list.places[packed->count] = all->list[i].offset;
        packed->list[packed->count] = all->list[i];
        packed->list[packed->count++].offset = packed->total;
        packed->total += all->list[i].count;
    }
    return list;
}

static struct component_workspace *workspace_new(struct state *state) {
    struct component_workspace *workspace = arena_alloc(state->arena, sizeof *workspace);
    int layers = state->ranks->model->layers;
    workspace->attention = arena_alloc(state->arena, (size_t)layers * sizeof *workspace->attention);
    workspace->ffn = arena_alloc(state->arena, (size_t)layers * sizeof *workspace->ffn);
    workspace->embedding = component_list(state, COMPONENT_EMBEDDING, -1);
    workspace->head = component_list(state, COMPONENT_HEAD, -1);
    size_t most = workspace->embedding.parameters.total;
    if (most < workspace->head.parameters.total) most = workspace->head.parameters.total;
    for (int layer = 0; layer < layers; layer++) {
        workspace->attention[layer] = component_list(state, COMPONENT_ATTENTION, layer);
        workspace->ffn[layer] = component_list(state, COMPONENT_FFN, layer);
        size_t attention = workspace->attention[layer].parameters.total;
        size_t ffn = workspace->ffn[layer].parameters.total;
        if (most < attention) most = attention;
        if (most < ffn) most = ffn;
    }
    state->workspace_bytes = most * sizeof(floatX);
    workspace->memory = arena_alloc(state->arena, state->workspace_bytes);
    return workspace;
}

static const struct component_list *component_of(const struct component_workspace *workspace,
                                                 enum component component, int layer) {
    switch (component) {
    case COMPONENT_ATTENTION:
        return &workspace->attention[layer];
    case COMPONENT_FFN:
        return &workspace->ffn[layer];
    case COMPONENT_EMBEDDING:
        return &workspace->embedding;
    case COMPONENT_HEAD:
        return &workspace->head;
    }
    return NULL;
}

void state_begin_gradients(struct state *state, enum component component, int layer) {
    if (!state->workspace) return;
    const struct component_list *list = component_of(state->workspace, component, layer);
    memset(state->workspace->memory, 0, list->parameters.total * sizeof(floatX));
}

/* From what is added, not from who adds it: the place of the micro-batch in the step's batch and, but for a
   routed expert, which one rank has whole, the rank's part of it. */
static uint64_t rounding_key(const struct state *state, enum component component,
                             const struct parameter *parameter, int64_t step, int micro_batch) {
    struct seat seat = seat_of(state->ranks, state->rank);
    int64_t first = attention_batch(state->ranks, seat.replica, micro_batch, 0).first_sequence;
    int part = parameter->owner == OWNER_EXPERT ? 0
               : component == COMPONENT_HEAD    ? head_part(state->ranks, seat)
                                                : seat.index;
    const uint64_t numbers[] = {(uint64_t)step, (uint64_t)first, (uint64_t)component, (uint64_t)part};
    return parameter_key(parameter, rng_seed_of(numbers, COUNT(numbers)));
}

void state_add_gradients(struct state *state, struct context *context, enum component component, int layer,
                         int64_t step, int micro_batch) {
    if (!state->workspace) return;
    const struct component_list *list = component_of(state->workspace, component, layer);
    for (int i = 0; i < list->parameters.count; i++) {
        const struct parameter *p = &list->parameters.list[i];
        add_bf16(context, state->half_gradients + list->places[i], state->workspace->memory + p->offset,
                 p->count, 0, rounding_key(state, component, p, step, micro_batch));
    }
}

/* ---- tables ------------------------------------------------------------------------------------------ */

/* Where a component's gradients are written: the list that says how, and the array. */
struct target {
    const struct parameters *parameters;
    floatX *array;
};

static struct target gradient_target(const struct state *state, enum component component, int layer) {
    if (!state->workspace) return (struct target){&state->parameters, state->gradients};
    return (struct target){&component_of(state->workspace, component, layer)->parameters,
                           state->workspace->memory};
}

static void fill_attention(struct state *state, int layer, const struct rope *rope) {
    struct target target = gradient_target(state, COMPONENT_ATTENTION, layer);
    state->attention[layer] = (struct attention_block){
        .model = state->ranks->model,
        .layer = layer,
        .rope = rope,
        .weights = attention_tensors(&state->parameters, state->values, layer),
        .gradients = attention_tensors(target.parameters, target.array, layer),
    };
}

static void fill_experts(struct state *state, int layer) {
    const struct ranks *ranks = state->ranks;
    const struct parameters *parameters = &state->parameters;
    struct target target = gradient_target(state, COMPONENT_FFN, layer);
    struct seat seat = seat_of(ranks, state->rank);
    int all = model_layer_is_moe(ranks->model, layer) ? ranks->model->moe.experts : 0;
    int gpus = ranks->schedule->groups[seat.group].gpus;
    int first = plan_first_expert(all, gpus, seat.index);
    int here = plan_first_expert(all, gpus, seat.index + 1) - first;
    state->experts[layer] = (struct expert_block){
        .model = ranks->model,
        .layer = layer,
        .experts = here,
        .ffn_norm = attention_tensors(parameters, state->values, layer).ffn_norm,
        .ffn_norm_gradient = attention_tensors(target.parameters, target.array, layer).ffn_norm,
        .weights = expert_tensors(state->arena, parameters, state->values, layer, first, here),
        .gradients = expert_tensors(state->arena, target.parameters, target.array, layer, first, here),
        .shared = ffn_tensors(parameters, state->values, layer, -1),
        .shared_gradients = ffn_tensors(target.parameters, target.array, layer, -1),
    };
}

static void fill_ends(struct state *state) {
    const char *embedding = "model.embed_tokens.weight", *norm = "model.norm.weight";
    const struct parameters *parameters = &state->parameters;
    if (component_held(state, COMPONENT_EMBEDDING, -1)) {
        struct target target = gradient_target(state, COMPONENT_EMBEDDING, -1);
        state->embedding = tensor_at(parameters, state->values, embedding);
        state->embedding_gradient = tensor_at(target.parameters, target.array, embedding);
    }
    if (component_held(state, COMPONENT_HEAD, -1)) {
        struct target target = gradient_target(state, COMPONENT_HEAD, -1);
        state->head = (struct head_block){
            .model = parameters->model,
            .norm = tensor_at(parameters, state->values, norm),
            .norm_gradient = tensor_at(target.parameters, target.array, norm),
            .output = head_tensor(parameters, state->values),
            .output_gradient = head_tensor(target.parameters, target.array),
        };
    }
}

static void fill_tables(struct state *state, const struct rope *rope) {
    int layers = state->ranks->model->layers;
    state->attention = arena_alloc(state->arena, (size_t)layers * sizeof *state->attention);
    state->experts = arena_alloc(state->arena, (size_t)layers * sizeof *state->experts);
    for (int layer = 0; layer < layers; layer++) {
        if (component_held(state, COMPONENT_ATTENTION, layer)) fill_attention(state, layer, rope);
        if (component_held(state, COMPONENT_FFN, layer)) fill_experts(state, layer);
    }
    fill_ends(state);
}

/* ---- making ------------------------------------------------------------------------------------------ */

/* Buckets are in one order everywhere, so each rank comes to this one once all before are made. */
static MPI_Comm holders_comm(MPI_Comm comm, const struct bucket *bucket) {
    if (bucket->holder_count < 2) return MPI_COMM_NULL;
    MPI_Group all, holders;
    MPI_Comm made;
    MPI_Comm_group(comm, &all);
    MPI_Group_incl(all, bucket->holder_count, bucket->holders, &holders);
    MPI_Comm_create_group(comm, holders, 0, &made);
    MPI_Group_free(&holders);
    MPI_Group_free(&all);
    return made;
}

static void make_buckets(struct state *state, MPI_Comm comm) {
    for (int b = 0; b < state->bucket_count; b++) {
        struct bucket *bucket = &state->buckets[b];
        bucket->comm = holders_comm(comm, bucket);
        bucket->updated =
            state->levers.zero ? bucket_slice(bucket, bucket->me) : (struct slice){0, bucket->count};
        bucket->moments = state->updated;
        state->updated += bucket->updated.count;
    }
}

static void make_gradients(struct state *state) {
    size_t count = state->parameters.total;
    if (state->levers.grads == PRECISION_BF16) {
        state->gradient_bytes = count * sizeof *state->half_gradients;
        state->half_gradients = arena_alloc(state->arena, state->gradient_bytes);
        state->workspace = workspace_new(state);
    } else {
        state->gradient_bytes = count * sizeof *state->gradients;
        state->gradients = arena_alloc(state->arena, state->gradient_bytes);
    }
}

static void make_moments(struct state *state) {
    bool half = state->levers.moments == PRECISION_BF16;
    size_t bytes = state->updated * (half ? sizeof(uint16_t) : sizeof(floatX));
    void *moment1 = arena_alloc(state->arena, bytes), *moment2 = arena_alloc(state->arena, bytes);
    if (half) {
        state->half_moment1 = moment1;
        state->half_moment2 = moment2;
    } else {
        state->moment1 = moment1;
        state->moment2 = moment2;
    }
    *(state->levers.offload ? &state->host_bytes : &state->moment_bytes) = 2 * bytes;
}

struct state *state_new(const struct ranks *ranks, int rank, MPI_Comm comm, const struct rope *rope,
                        uint64_t seed) {
    struct arena *arena = arena_new();
    struct state *state = arena_alloc(arena, sizeof *state);
    struct layout layout = layout_of(arena, ranks, rank);
    *state = (struct state){.ranks = ranks,
                            .rank = rank,
                            .levers = ranks->plan->memory,
                            .parameters = layout.parameters,
                            .buckets = layout.buckets,
                            .bucket_count = layout.bucket_count,
                            .arena = arena};
    state->value_bytes = state->parameters.total * sizeof *state->values;
    state->values = arena_alloc(arena, state->value_bytes);
    make_buckets(state, comm);
    make_gradients(state);
    make_moments(state);
    fill_tables(state, rope);
    parameters_initialise(&state->parameters, state->values, seed);
    return state;
}

void state_free(struct state *state) {
    if (!state) return;
    for (int b = 0; b < state->bucket_count; b++)
        if (state->buckets[b].comm != MPI_COMM_NULL) MPI_Comm_free(&state->buckets[b].comm);
    arena_free(state->arena);
}

/* ---- a step's end ------------------------------------------------------------------------------------ */

void state_zero_gradients(struct state *state) {
    void *gradients = state->gradients ? (void *)state->gradients : state->half_gradients;
    memset(gradients, 0, state->gradient_bytes);
}

void state_reduce(struct state *state, bool within_group) {
    struct element element = element_of(state->half_gradients);
    char *gradients = state->gradients ? (char *)state->gradients : (char *)state->half_gradients;
    for (int b = 0; b < state->bucket_count; b++) {
        const struct bucket *bucket = &state->buckets[b];
        if (bucket->within_group != within_group) continue;
        char *array = gradients + bucket->start * element.size;
        if (state->half_gradients)
            direct_reduce(bucket, state->half_gradients + bucket->start);
        else
            ring_reduce(bucket, array, &element);
        if (!state->levers.zero) ring_gather(bucket, array, &element);
    }
}

void state_gather(struct state *state) {
    struct element element = element_of(false);
    for (int b = 0; b < state->bucket_count && state->levers.zero; b++)
        ring_gather(&state->buckets[b], state->values + state->buckets[b].start, &element);
}

/* Gradients from an element of the rank's arrays on, widened into wide (PIECE) where they are BF16: then
 *count is cut to what fits. */
static const floatX *gradients_at(const struct state *state, size_t at, size_t *count, floatX *wide) {
    if (state->gradients) return state->gradients + at;
    *count = smaller(*count, PIECE);
    widen(wide, state->half_gradients + at, *count);
    return wide;
}

double state_gradient_squares(const struct state *state) {
    floatX *wide = must_alloc(PIECE * sizeof *wide);
    double sum = 0;
    for (int b = 0; b < state->bucket_count; b++)
        for (int i = 0; i < state->parameters.count; i++) {
            const struct bucket *bucket = &state->buckets[b];
            const struct parameter *p = &state->parameters.list[i];
            struct slice part = overlap(p, bucket, bucket_slice(bucket, bucket->me));
            for (size_t done = 0, count; done < part.count; done += count) {
                count = part.count - done;
                const floatX *gradients = gradients_at(state, p->offset + part.first + done, &count, wide);
                sum += sum_of_squares(gradients, count);
            }
        }
    free(wide);
    return sum;
}

struct step {
    struct context *context;
    const struct optimizer *optimizer;
    int64_t number;
    double scale;
    floatX *wide;
};

/* part: of the tensor; moments: the place of its first element's. */
static void update_part(struct state *state, const struct step *step, const struct parameter *p,
                        struct slice part, size_t moments) {
    uint64_t key = parameter_key(p, (uint64_t)step->number + 1);
    for (size_t done = 0, count; done < part.count; done += count) {
        count = part.count - done;
        size_t first = part.first + done, at = p->offset + first, moment = moments + done;
        const floatX *gradients = gradients_at(state, at, &count, step->wide);
        if (state->moment1)
            adamw(step->context, step->optimizer, step->number, step->scale, p->decay, state->values + at,
                  gradients, state->moment1 + moment, state->moment2 + moment, count);
        else
            adamw_bf16(step->context, step->optimizer, step->number, step->scale, p->decay,
                       state->values + at, gradients, state->half_moment1 + moment,
                       state->half_moment2 + moment, count, first, key);
    }
}

struct optimizer training_optimizer(const struct training *training) {
    return (struct optimizer){.learning_rate = training->learning_rate,
                              .final_learning_rate = training->final_learning_rate,
                              .warmup_steps = training->warmup_steps,
                              .steps = training->decay_steps ? training->decay_steps : training->steps,
                              .beta1 = training->beta1,
                              .beta2 = training->beta2,
                              .epsilon = training->epsilon,
                              .weight_decay = training->weight_decay,
                              .clip = training->clip};
}

void state_update(struct state *state, struct context *context, const struct optimizer *optimizer,
                  int64_t step_number, double scale) {
    struct step step = {context, optimizer, step_number, scale, scratch_floats(context, PIECE)};
    for (int b = 0; b < state->bucket_count; b++)
        for (int i = 0; i < state->parameters.count; i++) {
            const struct bucket *bucket = &state->buckets[b];
            const struct parameter *p = &state->parameters.list[i];
            struct slice part = overlap(p, bucket, bucket->updated);
            if (!part.count) continue;
            size_t in_bucket = p->offset + part.first - bucket->start;
            update_part(state, &step, p, part, bucket->moments + in_bucket - bucket->updated.first);
        }
    scratch_release(context, step.wide);
}

/* ---- collecting -------------------------------------------------------------------------------------- */

enum { COLLECT_TAG = 1 };

/* Where each tensor of a rank lies in the whole model's array; both lists have the same order. */
static size_t *places_in(const struct parameters *whole, const struct parameters *part) {
    size_t *places = must_alloc((size_t)part->count * sizeof *places);
    for (int i = 0, j = 0; i < part->count; i++, j++) {
        while (j < whole->count && strcmp(whole->list[j].name, part->list[i].name)) j++;
        assert(j < whole->count);
        places[i] = whole->list[j].offset;
    }
    return places;
}

/* Puts a slice's elements, `elements` beginning with its first, into the whole model's array. */
static void spread(const struct layout *layout, const size_t *places, const struct bucket *bucket,
                   struct slice slice, const void *elements, bool half, floatX *array) {
    for (int i = 0; i < layout->parameters.count; i++) {
        const struct parameter *p = &layout->parameters.list[i];
        struct slice part = overlap(p, bucket, slice);
        if (!part.count) continue;
        size_t at = p->offset + part.first - bucket->start - slice.first;
        floatX *to = array + places[i] + part.first;
        if (half)
            widen(to, (const uint16_t *)elements + at, part.count);
        else
            memcpy(to, (const floatX *)elements + at, part.count * sizeof *to);
    }
}

static struct slice piece_of(struct slice slice, size_t done) {
    return (struct slice){slice.first + done, smaller(slice.count - done, PIECE)};
}

/* Rank 0: another rank's slices, or its own. */
static void receive_slices(const struct state *state, MPI_Comm comm, int rank, const char *own,
                           const struct element *element, bool half, const struct parameters *whole,
                           floatX *array) {
    struct arena *arena = arena_new();
    struct layout layout = layout_of(arena, state->ranks, rank);
    size_t *places = places_in(whole, &layout.parameters);
    void *received = must_alloc(PIECE * element->size);
    for (int b = 0; b < layout.bucket_count; b++) {
        const struct bucket *bucket = &layout.buckets[b];
        struct slice slice = bucket_slice(bucket, bucket->me);
        for (size_t done = 0; done < slice.count; done += PIECE) {
            struct slice piece = piece_of(slice, done);
            const void *elements = received;
            if (rank == state->rank)
                elements = own + (bucket->start + piece.first) * element->size;
            else
                MPI_Recv(received, (int)piece.count, element->type, rank, COLLECT_TAG, comm,
                         MPI_STATUS_IGNORE);
            spread(&layout, places, bucket, piece, elements, half, array);
        }
    }
    free(received);
    free(places);
    arena_free(arena);
}

static void send_slices(const struct state *state, MPI_Comm comm, const char *own,
                        const struct element *element) {
    for (int b = 0; b < state->bucket_count; b++) {
        const struct bucket *bucket = &state->buckets[b];
        struct slice slice = bucket_slice(bucket, bucket->me);
        for (size_t done = 0; done < slice.count; done += PIECE) {
            struct slice piece = piece_of(slice, done);
            MPI_Send(own + (bucket->start + piece.first) * element->size, (int)piece.count, element->type, 0,
                     COLLECT_TAG, comm);
        }
    }
}

void state_collect(const struct state *state, MPI_Comm comm, bool gradients, const struct parameters *whole,
                   floatX *array) {
    bool half = gradients && state->half_gradients;
    struct element element = element_of(half);
    const char *own = !gradients ? (char *)state->values
                      : half     ? (char *)state->half_gradients
                                 : (char *)state->gradients;
    if (state->rank != 0) {
        send_slices(state, comm, own, &element);
        return;
    }
    for (int rank = 0; rank < state->ranks->count; rank++)
        receive_slices(state, comm, rank, own, &element, half, whole, array);
}
