/*
Import of HuggingFace's checkpoints (core/state/import.c): from which file a tensor is taken, and that none is
lost. That the values mean the same is shown by the golden values of test_reference, whose files transformers
wrote.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "layers/layers.h"
#include "state/safetensors.h"
#include "state/state.h"
#include "tests/cases.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct model tiny(void) {
    struct model model = {.name = "tiny", .layers = 2, .hidden = 6, .vocab = 11, .norm_eps = 1e-6};
    model.attention.heads = 2;
    model.attention.kv_heads = 1;
    model.attention.head_dim = 4;
    model.moe.experts = 3;
    model.moe.top_k = 2;
    model.moe.expert_hidden = 3; /* hidden is twice that: both ways of packing have the same shape */
    return model;
}

/* ---- a checkpoint in a folder ------------------------------------------------------------------------ */

enum { MOST = 400 };
struct tensor {
    const char *name;
    int shape[3]; /* 0: no such dimension */
    const floatX *values;
    const char *type; /* NULL: floatX */
    int shard;        /* the file that has it */
    int listed;       /* the file that the index names; −1: none */
};
struct checkpoint {
    struct arena *arena;
    struct errors errors;
    char folder[64];
    const char *index, *shards[3];
    struct model model;
    struct parameters parameters;
    floatX *values, *read;
    struct tensor tensors[MOST];
    int count;
};

static struct tensor *add(struct checkpoint *c, const char *name, int a, int b, int shard) {
    assert_true(c->count < MOST);
    size_t elements = (size_t)a * (b ? b : 1);
    floatX *values = arena_alloc(c->arena, elements * sizeof *values);
    for (size_t i = 0; i < elements; i++) values[i] = (floatX)(i + 1) / 8;
    c->tensors[c->count] =
        (struct tensor){arena_strdup(c->arena, name), {a, b, 0}, values, NULL, shard, shard};
    return &c->tensors[c->count++];
}

static struct tensor *tensor_named(struct checkpoint *c, const char *name) {
    for (int i = 0; i < c->count; i++)
        if (!strcmp(c->tensors[i].name, name)) return &c->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

/* Every parameter of the model, dealt to three shards. */
static void fill(struct checkpoint *c) {
    c->count = 0;
    c->parameters = parameters_new(c->arena, &c->model, NULL, NULL);
    c->values = arena_alloc(c->arena, c->parameters.total * sizeof *c->values);
    c->read = arena_alloc(c->arena, c->parameters.total * sizeof *c->read);
    parameters_initialise(&c->parameters, c->values, 3);
    for (int i = 0; i < c->parameters.count; i++) {
        const struct parameter *p = &c->parameters.list[i];
        struct tensor *tensor =
            add(c, p->name, p->rows == 1 ? p->columns : p->rows, p->rows == 1 ? 0 : p->columns, i % 3);
        tensor->values = c->values + p->offset;
    }
}

static int set_up(void **state) {
    struct checkpoint *c = must_alloc(sizeof *c);
    c->arena = arena_new();
    strcpy(c->folder, "/tmp/test_import_XXXXXX");
    if (!mkdtemp(c->folder)) return 1;
    c->index = arena_printf(c->arena, "%s/model.safetensors.index.json", c->folder);
    for (int i = 0; i < 3; i++) c->shards[i] = arena_printf(c->arena, "%s/%d.safetensors", c->folder, i);
    c->model = tiny();
    fill(c);
    *state = c;
    return 0;
}

static void empty(const char *folder) {
    DIR *entries = opendir(folder);
    char file[400];
    for (struct dirent *entry; (entry = readdir(entries));) {
        snprintf(file, sizeof file, "%s/%s", folder, entry->d_name);
        unlink(file);
    }
    closedir(entries);
}

static int tear_down(void **state) {
    struct checkpoint *c = *state;
    empty(c->folder);
    int wrong = rmdir(c->folder);
    errors_free(&c->errors);
    arena_free(c->arena);
    free(c);
    return wrong;
}

static void write_file(struct checkpoint *c, const char *file, const void *data, size_t bytes) {
    if (!file_write_atomic(file, data, bytes, &c->errors)) fail_msg("%s", c->errors.messages[0]);
}

static void write_shard(struct checkpoint *c, int shard) {
    struct text header = {0};
    size_t offset = 0;
    for (int i = 0; i < c->count; i++) {
        const struct tensor *t = &c->tensors[i];
        if (t->shard != shard) continue;
        size_t bytes = sizeof *t->values;
        text_add(&header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", header.length ? "," : "{", t->name,
                 t->type                  ? t->type
                 : sizeof *t->values == 8 ? "F64"
                                          : "F32");
        for (int d = 0; d < 3 && t->shape[d]; d++) {
            text_add(&header, "%s%d", d ? "," : "", t->shape[d]);
            bytes *= (size_t)t->shape[d];
        }
        text_add(&header, "],\"data_offsets\":[%zu,%zu]}", offset, offset + bytes);
        offset += bytes;
    }
    text_add(&header, "%s}", header.length ? "" : "{");
    unsigned char *all = must_alloc(8 + header.length + offset), *at = all + 8 + header.length;
    for (int i = 0; i < 8; i++) all[i] = (unsigned char)(header.length >> 8 * i);
    memcpy(all + 8, header.text, header.length);
    for (int i = 0; i < c->count; i++) {
        const struct tensor *t = &c->tensors[i];
        if (t->shard != shard) continue;
        size_t bytes = sizeof *t->values;
        for (int d = 0; d < 3 && t->shape[d]; d++) bytes *= (size_t)t->shape[d];
        memcpy(at, t->values, bytes);
        at += bytes;
    }
    write_file(c, c->shards[shard], all, 8 + header.length + offset);
    free(header.text);
    free(all);
}

static void write_checkpoint(struct checkpoint *c) {
    struct text index = {0};
    text_add(&index, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    for (int i = 0, first = 1; i < c->count; i++) {
        if (c->tensors[i].listed < 0) continue;
        text_add(&index, "%s\"%s\":\"%d.safetensors\"", first ? "" : ",", c->tensors[i].name,
                 c->tensors[i].listed);
        first = 0;
    }
    text_add(&index, "}}");
    write_file(c, c->index, index.text, index.length);
    free(index.text);
    for (int shard = 0; shard < 3; shard++) write_shard(c, shard);
}

/* ---- what comes of it -------------------------------------------------------------------------------- */

static void assert_imported(struct checkpoint *c, const char *const *files, int count) {
    memset(c->read, 0, c->parameters.total * sizeof *c->read);
    if (!parameters_import(&c->parameters, c->read, files, count, &c->errors))
        fail_msg("%s", c->errors.messages[0]);
    assert_memory_equal(c->values, c->read, c->parameters.total * sizeof *c->values);
}

/* The import of the index is refused with exactly these errors, each after its file. */
static void assert_refused(struct checkpoint *c, const char *const *messages, int count) {
    assert_false(parameters_import(&c->parameters, c->read, &c->index, 1, &c->errors));
    for (int i = 0; i < count && i < c->errors.count; i++)
        if (strncmp(c->errors.messages[i], c->folder, strlen(c->folder)) ||
            !strstr(c->errors.messages[i], messages[i]))
            fail_msg("\"%s\" does not say \"%s\"", c->errors.messages[i], messages[i]);
    if (c->errors.count > count) fail_msg("unexpected: %s", c->errors.messages[count]);
    assert_int_equal(c->errors.count, count);
    errors_free(&c->errors);
}
#define ASSERT_REFUSED(checkpoint, ...)                                                                      \
    do {                                                                                                     \
        const char *const messages_[] = {__VA_ARGS__};                                                       \
        assert_refused(checkpoint, messages_, COUNT(messages_));                                             \
    } while (0)

/* ---- which file -------------------------------------------------------------------------------------- */

static void index_or_files(void **state) {
    struct checkpoint *c = *state;
    write_checkpoint(c);
    assert_imported(c, &c->index, 1);
    assert_imported(c, c->shards, 3);
    const char *const twice[] = {c->shards[0], c->shards[1], c->shards[2], c->shards[1]};
    assert_false(parameters_import(&c->parameters, c->read, twice, 4, &c->errors));
    assert_non_null(strstr(c->errors.messages[0], "is in this file too"));
}

/* Old values of a tensor in a shard before and behind that which the index names. */
static void stale_copies_are_not_taken(void **state) {
    struct checkpoint *c = *state;
    const struct parameter *p = &c->parameters.list[4];
    int listed = 4 % 3;
    for (int shard = 0; shard < 3; shard++)
        if (shard != listed) add(c, p->name, p->rows, p->columns, shard)->listed = -1;
    write_checkpoint(c);
    assert_imported(c, &c->index, 1);
    assert_false(parameters_import(&c->parameters, c->read, c->shards, 3, &c->errors));
    assert_int_equal(c->errors.count, 2); /* no index, and three files that claim it */
    assert_non_null(strstr(c->errors.messages[0], arena_printf(c->arena, "%s: is in ", p->name)));
}

static void the_index_must_be_right(void **state) {
    struct checkpoint *c = *state;
    struct tensor *norm = tensor_named(c, "model.norm.weight");
    int right = norm->shard;
    norm->listed = (right + 1) % 3;
    write_checkpoint(c);
    ASSERT_REFUSED(c,
                   arena_printf(c->arena,
                                "index.json: weight_map.model.norm.weight: found \"%d.safetensors\", a file "
                                "without this tensor",
                                norm->listed));
    norm->listed = -1;
    write_checkpoint(c);
    ASSERT_REFUSED(c, arena_printf(c->arena,
                                   "%d.safetensors: model.norm.weight: is not in the weight_map of the index",
                                   right));
    norm->listed = right;
    for (int shard = 0; shard < 3; shard++)
        add(c, arena_printf(c->arena, "more.%d", shard), 2, 0, shard)->listed = -1;
    write_checkpoint(c);
    ASSERT_REFUSED(c, "0.safetensors: more.0: is not in", "1.safetensors: more.1: is not in",
                   "2.safetensors: more.2: is not in");
    c->count -= 3;
    add(c, "model.layers.0.self_attn.rotary_emb.inv_freq", 2, 0, 1)->listed = -1;
    write_checkpoint(c);
    assert_imported(c, &c->index, 1);
    unlink(c->shards[1]);
    ASSERT_REFUSED(c, "1.safetensors: cannot be read: No such file");
    static const char *const values[] = {"1",        "\"\"",          "null",     "\"/etc/hostname\"",
                                         "\"../a\"", "\"b/../../a\"", "\"b/..\"", "[\"0.safetensors\"]"};
    for (size_t i = 0; i < COUNT(values); i++) {
        char *text = arena_printf(c->arena, "{\"weight_map\":{\"a\":%s}}", values[i]);
        write_file(c, c->index, text, strlen(text));
        const char *said = arena_printf(
            c->arena, "index.json: weight_map.a: found %s; allowed: the name of a file in the index's folder",
            *values[i] == '[' ? "[…]" : values[i]);
        ASSERT_REFUSED(c, said);
    }
    write_file(c, c->index, "{\"weight_map\":[\"0.safetensors\"]}", 32);
    ASSERT_REFUSED(c, "index.json: weight_map: found […]; allowed: an object");
    write_file(c, c->index, "{}", 2);
    ASSERT_REFUSED(c, "index.json: weight_map: the key is missing");
    write_file(c, c->index, "{\"weight_map\":{", 15);
    ASSERT_REFUSED(c, "index.json: ");
    unlink(c->index);
    ASSERT_REFUSED(c, "index.json: cannot be opened");
}

/* Names that only look as if they left the folder; and a folder below it. */
static void shards_below_the_folder(void **state) {
    struct checkpoint *c = *state;
    c->shards[1] = arena_printf(c->arena, "%s/..1.safetensors", c->folder);
    write_checkpoint(c);
    struct text index = {0};
    for (int i = 0; i < c->count; i++)
        text_add(&index, "%s\"%s\":\"%s%d.safetensors\"", i ? "," : "{\"weight_map\":{", c->tensors[i].name,
                 c->tensors[i].listed == 1 ? "./.." : "", c->tensors[i].listed);
    text_add(&index, "}}");
    write_file(c, c->index, index.text, index.length);
    free(index.text);
    assert_imported(c, &c->index, 1);
}

/* ---- every tensor ------------------------------------------------------------------------------------ */

/* The model that is read has less than the file. */
static void nothing_is_left_over(void **state) {
    struct checkpoint *c = *state;
    static const char no_place[] = ": the model has no place for this tensor";
    c->model.attention.qk_norm = true;
    fill(c);
    write_checkpoint(c);
    c->model.attention.qk_norm = false;
    c->parameters = parameters_new(c->arena, &c->model, NULL, NULL);
    ASSERT_REFUSED(c, "model.layers.0.self_attn.k_norm.weight: the model has no place for this tensor",
                   "model.layers.0.self_attn.q_norm.weight: the model has no place for this tensor",
                   "model.layers.1.self_attn.k_norm.weight: the model has no place for this tensor",
                   "model.layers.1.self_attn.q_norm.weight: the model has no place for this tensor");
    struct model wide = tiny();
    wide.attention.bias = wide.moe.bias = true;
    wide.layers = 3;
    c->model = wide;
    fill(c);
    write_checkpoint(c);
    int in_file = c->parameters.count;
    c->model = tiny();
    c->parameters = parameters_new(c->arena, &c->model, NULL, NULL);
    int more = in_file - c->parameters.count;
    ASSERT_REFUSED(c, no_place, no_place, no_place, no_place, no_place,
                   arena_printf(c->arena,
                                "index.json: %d more tensors for which the model has no place, %d in all",
                                more - 5, more));
    c->model.moe.experts = 2;
    c->model.layers = 3;
    c->model.attention.bias = c->model.moe.bias = true;
    c->parameters = parameters_new(c->arena, &c->model, NULL, NULL);
    assert_false(parameters_import(&c->parameters, c->read, &c->index, 1, &c->errors));
    bool expert = false;
    for (int i = 0; i < c->errors.count; i++)
        expert |= strstr(c->errors.messages[i], "experts.2.") && strstr(c->errors.messages[i], no_place);
    assert_true(expert);
}

/* The same tensor under the names of two families; RoPE's frequencies, which old files have. */
static void second_names_and_buffers(void **state) {
    struct checkpoint *c = *state;
    for (int layer = 0; layer < 2; layer++)
        add(c, arena_printf(c->arena, "model.layers.%d.self_attn.rotary_emb.inv_freq", layer), 2, 0, 0);
    add(c, "model.rotary_emb.inv_freq", 2, 0, 2);
    write_checkpoint(c);
    assert_imported(c, &c->index, 1);
    add(c, "model.layers.1.mlp.router.weight", 3, 6, 0);
    add(c, "model.layers.1.self_attn.rotary_emb.inv_freq.weight", 2, 0, 0);
    write_checkpoint(c);
    ASSERT_REFUSED(c, "model.layers.1.mlp.router.weight: the model has no place",
                   "inv_freq.weight: the model has no place");
}

static void a_tied_head_must_be_equal(void **state) {
    struct checkpoint *c = *state;
    c->model.tie_embeddings = true;
    fill(c);
    write_checkpoint(c);
    assert_imported(c, &c->index, 1);
    struct tensor *head = add(c, "lm_head.weight", 11, 6, 2);
    head->values = c->values; /* the embedding is the first parameter */
    write_checkpoint(c);
    assert_imported(c, &c->index, 1);
    floatX *other = arena_alloc(c->arena, 66 * sizeof *other);
    memcpy(other, c->values, 66 * sizeof *other);
    other[65] += 1;
    head->values = other;
    write_checkpoint(c);
    ASSERT_REFUSED(c, "2.safetensors: lm_head.weight: differs from model.embed_tokens.weight");
    head->shape[0] = 6;
    head->shape[1] = 11;
    head->values = c->values;
    write_checkpoint(c);
    ASSERT_REFUSED(c, "2.safetensors: lm_head.weight: has another shape; the model needs (11, 6)");
    c->count--;
    c->model.tie_embeddings = false;
    c->parameters = parameters_new(c->arena, &c->model, NULL, NULL);
    write_checkpoint(c);
    ASSERT_REFUSED(c, "index.json: lm_head.weight: is missing");
}

static void what_is_missing_or_wrong_is_named(void **state) {
    struct checkpoint *c = *state;
    write_checkpoint(c);
    c->model.layers = 4;
    c->parameters = parameters_new(c->arena, &c->model, NULL, NULL);
    int missing = (c->parameters.count - 3) / 2;
    static const char is_missing[] = ": is missing";
    ASSERT_REFUSED(
        c, "index.json: model.layers.2.input_layernorm.weight: is missing", is_missing, is_missing,
        is_missing, is_missing,
        arena_printf(c->arena, "index.json: %d more tensors are missing, %d in all", missing - 5, missing));
    c->model = tiny();
    c->model.vocab = 12;
    c->parameters = parameters_new(c->arena, &c->model, NULL, NULL);
    ASSERT_REFUSED(c, "model.embed_tokens.weight: has another shape; the model needs (12, 6)",
                   "lm_head.weight: has another shape; the model needs (12, 6)");
    fill(c);
    struct tensor *gate = tensor_named(c, "model.layers.0.mlp.gate.weight");
    gate->shape[2] = 1;
    tensor_named(c, "model.layers.1.mlp.gate.weight")->type = sizeof(floatX) == 8 ? "I64" : "I32";
    write_checkpoint(c);
    ASSERT_REFUSED(c, "model.layers.0.mlp.gate.weight: has another shape; the model needs (3, 6)",
                   "model.layers.1.mlp.gate.weight: found type I");
    fill(c);
    add(c, "model.layers.0.mlp.experts.down_proj_blocks", 3, 2, 0);
    add(c, "model.layers.0.mlp.experts.down_proj_scales", 3, 2, 0);
    for (int i = 0; i < c->count; i++)
        if (strstr(c->tensors[i].name, ".experts.0.")) c->tensors[i--] = c->tensors[--c->count];
    write_checkpoint(c);
    ASSERT_REFUSED(c, "down_proj_blocks: experts are in MXFP4; convert");
}

static bool is_embedding(void *context, const struct parameter *parameter) {
    (void)context;
    return parameter->owner == OWNER_EMBEDDING;
}

/* A rank that keeps a part only: the same errors as on any other. */
static void every_rank_sees_the_whole(void **state) {
    struct checkpoint *c = *state;
    struct parameters own = parameters_new(c->arena, &c->model, is_embedding, NULL);
    assert_int_equal(own.count, 1);
    write_checkpoint(c);
    assert_true(parameters_import(&own, c->read, &c->index, 1, &c->errors));
    assert_memory_equal(c->values, c->read, own.total * sizeof *c->values);
    add(c, "model.layers.1.mlp.experts.3.up_proj.weight", 3, 6, 0);
    tensor_named(c, "model.layers.1.mlp.experts.1.up_proj.weight")->name = "a";
    tensor_named(c, "model.layers.0.self_attn.q_proj.weight")->shape[0] = 7;
    write_checkpoint(c);
    struct errors all = {0};
    assert_false(parameters_import(&own, c->read, &c->index, 1, &c->errors));
    assert_false(parameters_import(&own, c->read, &c->index, 1, &c->errors)); /* what is known fails again */
    assert_false(parameters_import(&c->parameters, c->read, &c->index, 1, &all));
    assert_int_equal(all.count, 4);
    assert_int_equal(c->errors.count, 4);
    for (int i = 0; i < 4; i++) assert_string_equal(all.messages[i], c->errors.messages[i]);
    errors_free(&all);
}

/* ---- all experts of a layer in one tensor ------------------------------------------------------------ */

static floatX value(const struct checkpoint *c, int layer, int expert, const char *ending, int row,
                    int column) {
    const char *name = arena_printf(c->arena, "model.layers.%d.mlp.experts.%d.%s", layer, expert, ending);
    const struct parameter *p = parameters_find(&c->parameters, name);
    return c->values[p->offset + (size_t)row * p->columns + column];
}

/* Packs the experts' matrices of all layers: GPT-OSS's way, or that of the other classes of transformers 5.
 */
static void pack(struct checkpoint *c, bool gpt_oss) {
    int experts = c->model.moe.experts, hidden = c->model.hidden, width = c->model.moe.expert_hidden;
    for (int i = 0; i < c->count; i++)
        if (strstr(c->tensors[i].name, ".experts.")) c->tensors[i--] = c->tensors[--c->count];
    for (int layer = 0; layer < c->model.layers; layer++) {
        const char *prefix = arena_printf(c->arena, "model.layers.%d.mlp.experts.", layer);
        floatX *up = arena_alloc(c->arena, (size_t)experts * 2 * width * hidden * sizeof *up), *at = up;
        floatX *down = arena_alloc(c->arena, (size_t)experts * width * hidden * sizeof *down), *to = down;
        for (int e = 0; e < experts; e++) {
            int outer = gpt_oss ? hidden : 2 * width, inner = gpt_oss ? 2 * width : hidden;
            for (int i = 0; i < outer; i++)
                for (int j = 0; j < inner; j++) {
                    int out = gpt_oss ? j : i, in = gpt_oss ? i : j;
                    bool gate = gpt_oss ? out % 2 == 0 : out < width;
                    *at++ = value(c, layer, e, gate ? "gate_proj.weight" : "up_proj.weight",
                                  gpt_oss ? out / 2 : out % width, in);
                }
            outer = gpt_oss ? width : hidden, inner = gpt_oss ? hidden : width;
            for (int i = 0; i < outer; i++)
                for (int j = 0; j < inner; j++)
                    *to++ = value(c, layer, e, "down_proj.weight", gpt_oss ? j : i, gpt_oss ? i : j);
        }
        struct tensor *first = add(c, arena_printf(c->arena, "%sgate_up_proj", prefix), experts,
                                   gpt_oss ? hidden : 2 * width, 0),
                      *second = add(c, arena_printf(c->arena, "%sdown_proj", prefix), experts,
                                    gpt_oss ? width : hidden, 1);
        first->shape[2] = gpt_oss ? 2 * width : hidden;
        second->shape[2] = gpt_oss ? hidden : width;
        first->values = up;
        second->values = down;
    }
}

/* hidden = 2 · expert_hidden, so that only the family tells the two ways apart; and other sizes. */
static void packed_experts(void **state) {
    struct checkpoint *c = *state;
    static const int widths[] = {3, 1, 5};
    for (size_t i = 0; i < COUNT(widths); i++)
        for (int gpt_oss = 0; gpt_oss < 2; gpt_oss++) {
            c->model.moe.expert_hidden = widths[i];
            c->model.moe.activation = gpt_oss ? ACTIVATION_SWIGLU_CLAMPED : ACTIVATION_SWIGLU;
            fill(c);
            pack(c, gpt_oss);
            write_checkpoint(c);
            assert_imported(c, &c->index, 1);
        }
    c->tensors[c->count - 1].shape[0] = 2;
    c->tensors[c->count - 2].shape[0] = 2;
    write_checkpoint(c); /* once a tensor, however many experts are in it */
    ASSERT_REFUSED(c,
                   "model.layers.1.mlp.experts.gate_up_proj: has another shape; the model needs (3, 6, 10)",
                   "model.layers.1.mlp.experts.down_proj: has another shape; the model needs (3, 5, 6)");
}

/* ---- damage ------------------------------------------------------------------------------------------ */

static char *content(const char *file, size_t *length) {
    FILE *stream = fopen(file, "rb");
    assert_non_null(stream);
    char *bytes = must_alloc(1 << 20);
    *length = fread(bytes, 1, 1 << 20, stream);
    fclose(stream);
    return bytes;
}

static void damage(struct rng *rng, char *bytes, size_t *length, size_t text) {
    static const char pieces[] = "{}[]\",:0129eE.-truefalsn/";
    if (rng_below(rng, 3) == 0) *length = (size_t)rng_below(rng, (int)*length + 1);
    if (text > *length) text = *length;
    for (int edits = rng_below(rng, 4); edits > 0 && text; edits--)
        bytes[rng_below(rng, (int)text)] =
            (char)(rng_below(rng, 8) ? pieces[rng_below(rng, sizeof pieces - 1)] : rng_below(rng, 256));
}

/* transformers' own files, cut off or with wrong bytes in the index or a header: an error, or an import. */
static void damaged_files(void **state) {
    struct checkpoint *c = *state;
    static const char golden[] = "tests/golden/qwen3-4/";
    static const char *const files[] = {
        "model.safetensors.index.json",     "model-00001-of-00007.safetensors",
        "model-00002-of-00007.safetensors", "model-00003-of-00007.safetensors",
        "model-00004-of-00007.safetensors", "model-00005-of-00007.safetensors",
        "model-00006-of-00007.safetensors", "model-00007-of-00007.safetensors"};
    struct json config =
        json_read_file(arena_printf(c->arena, "%sconfig.json", golden), c->arena, &c->errors);
    assert_true(config.node && model_import(config, &c->model));
    cJSON_Delete(config.node);
    fill(c);
    char *whole[COUNT(files)];
    const char *names[COUNT(files)];
    size_t lengths[COUNT(files)];
    for (size_t i = 0; i < COUNT(files); i++) {
        names[i] = arena_printf(c->arena, "%s/%s", c->folder, files[i]);
        whole[i] = content(arena_printf(c->arena, "%s%s", golden, files[i]), &lengths[i]);
        write_file(c, names[i], whole[i], lengths[i]);
    }
    assert_true(parameters_import(&c->parameters, c->read, &c->index, 1, &c->errors));
    struct rng rng = rng_seed(5);
    int imported = 0, refused = 0;
    for (int i = 0; i < sampled(2000); i++) {
        size_t f = rng_below(&rng, 2) ? 0 : (size_t)rng_below(&rng, COUNT(files)), length = lengths[f];
        char *bytes = must_alloc(length + 1);
        memcpy(bytes, whole[f], length);
        damage(&rng, bytes, &length, f ? 2000 : length);
        FILE *stream = fopen(names[f], "wb"); /* not atomically: no fsync for each case */
        fwrite(bytes, 1, length, stream);
        fclose(stream);
        bool done = parameters_import(&c->parameters, c->read, &c->index, 1, &c->errors);
        assert_true(done == (c->errors.count == 0));
        done ? imported++ : refused++;
        errors_free(&c->errors);
        stream = fopen(names[f], "wb");
        fwrite(whole[f], 1, lengths[f], stream);
        fclose(stream);
        free(bytes);
    }
    print_message("%d imported, %d refused\n", imported, refused);
    assert_true(imported && refused);
    for (size_t i = 0; i < COUNT(files); i++) free(whole[i]);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(index_or_files),
        TEST(stale_copies_are_not_taken),
        TEST(the_index_must_be_right),
        TEST(shards_below_the_folder),
        TEST(nothing_is_left_over),
        TEST(second_names_and_buffers),
        TEST(a_tied_head_must_be_equal),
        TEST(what_is_missing_or_wrong_is_named),
        TEST(every_rank_sees_the_whole),
        TEST(packed_experts),
        TEST(damaged_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
