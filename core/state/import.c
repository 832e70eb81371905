/*
Parameters from HuggingFace's checkpoints.

Every parameter of the whole model must be a tensor of the files, and every tensor of the files a parameter,
also on a rank that keeps a part of them: so all ranks find the same faults. Only rotary_emb.inv_freq may be
left over, RoPE's frequencies as old checkpoints store them, and an output matrix equal to the embedding where
the model ties the two.

Qwen3-MoE and DeepSeek-MoE store an expert's matrices one by one under the names used here, Mixtral under
others. The classes of transformers 5 hold all experts of a layer in two tensors, and may save them so:
gate_up_proj (E, 2 D, H), gate above up, and down_proj (E, H, D). GPT-OSS's are always packed, to be
multiplied from the right and with gate and up interleaved: (E, H, 2 D) and (E, D, H). They are unpacked into
(out, in) matrices.
*/
#include "state/safetensors.h"
#include "state/state.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* A tensor that may be taken. */
struct source {
    const struct stored_tensor *tensor;
    int file; /* of import.files */
    bool used;
};

/* Of faults that many tensors share the first few are named and the others counted. */
enum fault { MISSING, NO_PLACE, SHAPE, TYPE, NOT_IN_SHARD, NOT_IN_MAP, TWICE, FAULTS };
static const char *const MORE[FAULTS] = {
    [MISSING] = "tensors are missing",
    [NO_PLACE] = "tensors for which the model has no place",
    [SHAPE] = "tensors have another shape",
    [TYPE] = "tensors have a type that cannot be read",
    [NOT_IN_SHARD] = "tensors are not in the file that weight_map names",
    [NOT_IN_MAP] = "tensors are not in weight_map",
    [TWICE] = "tensors are in two files",
};
enum { NAMED = 5 };
static const char HEAD[] = "lm_head.weight";

struct import {
    struct safetensors **files;
    int file_count, file_capacity;
    struct source *sources; /* sorted by name once all files are open */
    int source_count, source_capacity;
    const char *names; /* of all files, for messages */
    const struct model *model;
    struct arena *arena;
    struct errors *errors;
    int faults[FAULTS];
};

static void add_fault(struct import *import, enum fault fault, const char *file, const char *tensor,
                      const char *format, ...) __attribute__((format(printf, 5, 6)));
static void add_fault(struct import *import, enum fault fault, const char *file, const char *tensor,
                      const char *format, ...) {
    if (import->faults[fault]++ >= NAMED) return;
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    errors_add(import->errors, file, tensor, "%s", message);
}

static void count_faults(const struct import *import) {
    for (int i = 0; i < FAULTS; i++)
        if (import->faults[i] > NAMED)
            errors_add(import->errors, import->names, NULL, "%d more %s, %d in all",
                       import->faults[i] - NAMED, MORE[i], import->faults[i]);
}

static bool ends_with(const char *text, const char *ending) {
    size_t length = strlen(text), end = strlen(ending);
    return length >= end && !strcmp(text + length - end, ending);
}

/* Tensors that no model here has, and without which it is the same. */
static bool is_left_out(const char *name) {
    return ends_with(name, ".rotary_emb.inv_freq");
}

/* ---- which tensors there are ------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b) {
    const struct source *first = a, *second = b;
    return strcmp(first->tensor->name, second->tensor->name);
}

static struct source *find(const struct import *import, const char *name) {
    struct stored_tensor tensor = {.name = name};
    struct source key = {.tensor = &tensor};
    return bsearch(&key, import->sources, (size_t)import->source_count, sizeof key, by_name);
}

static void add_source(struct import *import, int file, const struct stored_tensor *tensor) {
    if (import->source_count == import->source_capacity) {
        import->source_capacity = 2 * import->source_capacity + 64;
        import->sources =
            must_realloc(import->sources, (size_t)import->source_capacity * sizeof(struct source));
    }
    import->sources[import->source_count++] = (struct source){tensor, file, false};
}

/* The open file's number; −1 when it cannot be opened. */
static int open_once(struct import *import, const char *name) {
    for (int i = import->file_count - 1; i >= 0; i--) /* tensors of one file follow one another in an index */
        if (!strcmp(import->files[i]->file, name)) return i;
    struct safetensors *file = safetensors_open(name, import->errors);
    if (!file) return -1;
    if (import->file_count == import->file_capacity) {
        import->file_capacity = 2 * import->file_capacity + 8;
        import->files =
            must_realloc(import->files, (size_t)import->file_capacity * sizeof(struct safetensors *));
    }
    import->files[import->file_count] = file;
    return import->file_count++;
}

static void add_file(struct import *import, const char *name) {
    int file = open_once(import, name);
    for (int i = 0; file >= 0 && i < import->files[file]->count; i++)
        add_source(import, file, &import->files[file]->tensors[i]);
}

/* Whether a shard's name stays in the folder of its index. */
static bool stays_inside(const char *name) {
    if (name[0] == '/' || !*name) return false;
    for (const char *part = name; part; part = strchr(part, '/')) {
        part += *part == '/';
        if (!strncmp(part, "..", 2) && (part[2] == '/' || !part[2])) return false;
    }
    return true;
}

static void add_entry(struct import *import, const char *index, const cJSON *entry) {
    struct json value = {(cJSON *)(uintptr_t)entry, index,
                         arena_printf(import->arena, "weight_map.%s", entry->string), import->arena,
                         import->errors};
    if (!cJSON_IsString(entry) || !stays_inside(entry->valuestring)) {
        json_error(value, "allowed: the name of a file in the index's folder");
        return;
    }
    int file = open_once(import, path_beside(import->arena, index, entry->valuestring));
    const struct stored_tensor *tensor =
        file < 0 ? NULL : safetensors_find(import->files[file], entry->string);
    if (tensor)
        add_source(import, file, tensor);
    else if (file >= 0)
        add_fault(import, NOT_IN_SHARD, index, value.path, "found \"%s\", a file without this tensor",
                  entry->valuestring);
}

/* What a shard holds and the index does not speak of is a fault: nobody says whether it is meant. Another
   copy of a tensor that the index places elsewhere is none. */
static void check_shards(struct import *import, int first) {
    struct source *listed = import->sources + first;
    size_t count = (size_t)(import->source_count - first);
    bool *named = must_alloc((size_t)import->file_count + 1);
    if (count) qsort(listed, count, sizeof *listed, by_name);
    for (size_t i = 0; i < count; i++) named[listed[i].file] = true;
    for (int f = 0; f < import->file_count; f++)
        for (int i = 0; named[f] && i < import->files[f]->count; i++) {
            struct source key = {.tensor = &import->files[f]->tensors[i]};
            if (is_left_out(key.tensor->name) || bsearch(&key, listed, count, sizeof key, by_name)) continue;
            add_fault(import, NOT_IN_MAP, import->files[f]->file, key.tensor->name,
                      "is not in the weight_map of the index");
        }
    free(named);
}

/* HuggingFace's model.safetensors.index.json: {"weight_map": {tensor: file beside the index}}. */
static void add_index(struct import *import, const char *index) {
    struct json document = json_read_file(index, import->arena, import->errors);
    struct json map = json_member(document, "weight_map");
    int first = import->source_count, before = import->errors->count;
    if (document.node && !cJSON_IsObject(map.node))
        json_error(map, "allowed: an object with the file of each tensor");
    for (const cJSON *entry = cJSON_IsObject(map.node) ? map.node->child : NULL; entry; entry = entry->next)
        add_entry(import, index, entry);
    if (import->errors->count == before) check_shards(import, first);
    cJSON_Delete(document.node);
}

/* Sorts what there is. A tensor in two of the files that were given is a fault: either may be stale. */
static void close_sources(struct import *import) {
    if (import->source_count)
        qsort(import->sources, (size_t)import->source_count, sizeof(struct source), by_name);
    for (int i = 1; i < import->source_count; i++) {
        struct source *a = &import->sources[i - 1], *b = &import->sources[i];
        if (strcmp(a->tensor->name, b->tensor->name)) continue;
        const char *file = import->files[a->file]->file, *other = import->files[b->file]->file;
        add_fault(import, TWICE, file, a->tensor->name, "is in %s too",
                  a->file == b->file ? "this file" : other);
    }
}

/* ---- which tensor a parameter is --------------------------------------------------------------------- */

/* Where a parameter stands in a tensor, and the shape that the tensor must have. */
struct piece {
    struct source *source;
    int dimensions;
    int64_t shape[3];
    int64_t start, row_stride, column_stride;
};

/* A tensor that is the parameter as it is. */
static struct piece whole(struct source *source, const struct parameter *p) {
    struct piece piece = {source, 2, {p->rows, p->columns, 0}, 0, p->columns, 1};
    if (p->rows == 1 && source->tensor->dimensions == 1) {
        piece.dimensions = 1;
        piece.shape[0] = p->columns;
    }
    return piece;
}

enum matrix { GATE, UP, DOWN }; /* of an expert */
static enum matrix matrix_of(const struct parameter *p) {
    return strstr(p->name, ".gate_proj.") ? GATE : strstr(p->name, ".up_proj.") ? UP : DOWN;
}

/* One expert's part of a tensor of all experts. A bias has the places of a matrix of one column. */
static struct piece part(const struct import *import, struct source *source, const struct parameter *p) {
    const struct model *model = import->model;
    enum matrix matrix = matrix_of(p);
    bool gpt_oss = model->moe.activation == ACTIVATION_SWIGLU_CLAMPED, bias = ends_with(p->name, ".bias");
    bool turned = gpt_oss && !bias, interleaved = gpt_oss && matrix != DOWN;
    int64_t hidden = model->hidden, width = model->moe.expert_hidden, experts = model->moe.experts;
    int64_t out = matrix == DOWN ? hidden : 2 * width, in = bias ? 1 : matrix == DOWN ? width : hidden;
    int64_t row = turned ? 1 : in, column = turned ? out : 1; /* from one to the next */
    int64_t first = matrix != UP ? 0 : interleaved ? 1 : width;
    struct piece piece = {.source = source,
                          .dimensions = bias ? 2 : 3,
                          .shape = {experts, turned ? in : out, turned ? out : in},
                          .start = p->expert * out * in + first * row,
                          .row_stride = interleaved ? 2 * row : row,
                          .column_stride = column};
    if (bias) piece.column_stride = piece.row_stride; /* a parameter of one row */
    return piece;
}

/* The tensor that is the parameter as it is: under its own name, which is Qwen3-MoE's and DeepSeek-MoE's, or
   under GPT-OSS's or Mixtral's. Or NULL. */
static struct source *find_whole(const struct import *import, const struct parameter *p) {
    static const char *const mixtral[] = {[GATE] = "w1", [UP] = "w3", [DOWN] = "w2"};
    const char *router = strstr(p->name, ".mlp.gate."), *ending = strrchr(p->name, '.') + 1;
    struct arena *arena = import->arena;
    struct source *source = find(import, p->name);
    if (!source && router)
        source = find(import, arena_printf(arena, "model.layers.%d.mlp.router.%s", p->layer, ending));
    if (!source && router)
        source =
            find(import, arena_printf(arena, "model.layers.%d.block_sparse_moe.gate.%s", p->layer, ending));
    if (!source && p->expert >= 0)
        source = find(import, arena_printf(arena, "model.layers.%d.block_sparse_moe.experts.%d.%s.%s",
                                           p->layer, p->expert, mixtral[matrix_of(p)], ending));
    return source;
}

/* Where the parameter's values are. False: nowhere. */
static bool find_piece(const struct import *import, const struct parameter *p, struct piece *piece) {
    struct source *source = find_whole(import, p);
    if (source) *piece = whole(source, p);
    if (source || p->expert < 0) return source;
    source = find(import, arena_printf(import->arena, "model.layers.%d.mlp.experts.%s%s", p->layer,
                                       matrix_of(p) == DOWN ? "down_proj" : "gate_up_proj",
                                       ends_with(p->name, ".bias") ? "_bias" : ""));
    if (source) *piece = part(import, source, p);
    return source;
}

/* Whether the tensor has the shape and a type that can be read. Said once a tensor. */
static void check_piece(struct import *import, const struct piece *piece) {
    const struct stored_tensor *tensor = piece->source->tensor;
    const char *file = import->files[piece->source->file]->file;
    bool same = tensor->dimensions == piece->dimensions;
    if (piece->source->used) return;
    for (int i = 0; same && i < piece->dimensions; i++) same = tensor->shape[i] == piece->shape[i];
    if (!same) {
        const char *expected = arena_printf(import->arena, "%lld", (long long)piece->shape[0]);
        for (int i = 1; i < piece->dimensions; i++)
            expected = arena_printf(import->arena, "%s, %lld", expected, (long long)piece->shape[i]);
        add_fault(import, SHAPE, file, tensor->name, "has another shape; the model needs (%s)", expected);
    } else if (tensor->type == TENSOR_OTHER) {
        add_fault(import, TYPE, file, tensor->name, "found type %s; F64, F32, F16 or BF16 is allowed",
                  tensor->type_name);
    }
}

/* GPT-OSS as it was released: its experts' weights are MXFP4. Said once, and then nothing of them is missed.
 */
static bool are_mxfp4(struct import *import) {
    const char *name = "model.layers.0.mlp.experts.down_proj_blocks";
    const struct source *source = find(import, name);
    if (!source) return false;
    errors_add(import->errors, import->files[source->file]->file, name,
               "experts are in MXFP4; convert the checkpoint to BF16 first");
    for (int i = 0; i < import->source_count; i++)
        import->sources[i].used |= strstr(import->sources[i].tensor->name, ".mlp.experts.") != NULL;
    return true;
}

/* Finds every parameter of the whole model a tensor, and every tensor a parameter. */
static void account(struct import *import) {
    struct parameters all = parameters_new(import->arena, import->model, NULL, NULL);
    bool mxfp4 = are_mxfp4(import);
    for (int i = 0; i < all.count; i++) {
        const struct parameter *p = &all.list[i];
        struct piece piece;
        if (mxfp4 && p->expert >= 0) continue;
        if (find_piece(import, p, &piece)) {
            check_piece(import, &piece);
            piece.source->used = true;
        } else {
            add_fault(import, MISSING, import->names, p->name, "is missing");
        }
    }
    struct source *head = find(import, HEAD);
    if (head && import->model->tie_embeddings) {
        struct parameter embedding = {.rows = import->model->vocab, .columns = import->model->hidden};
        struct piece piece = whole(head, &embedding);
        check_piece(import, &piece);
        head->used = true;
    }
    for (int i = 0; i < import->source_count; i++) {
        const struct source *source = &import->sources[i];
        if (!source->used && !is_left_out(source->tensor->name))
            add_fault(import, NO_PLACE, import->files[source->file]->file, source->tensor->name,
                      "the model has no place for this tensor");
    }
}

/* ---- values ------------------------------------------------------------------------------------------ */

/* Where the model ties its output matrix to the embedding, a file may hold it all the same, if it is equal.
 */
static void compare_head(struct import *import, const struct parameter *embedding, const floatX *values) {
    const struct source *head = find(import, HEAD);
    if (!head || !import->model->tie_embeddings) return;
    floatX *row = must_alloc((size_t)embedding->columns * sizeof *row);
    bool equal = true;
    for (int r = 0; r < embedding->rows && equal; r++) {
        stored_tensor_copy(head->tensor, (int64_t)r * embedding->columns, 0, 1, 1, embedding->columns, row);
        equal =
            !memcmp(row, values + (size_t)r * embedding->columns, (size_t)embedding->columns * sizeof *row);
    }
    free(row);
    if (!equal)
        errors_add(
            import->errors, import->files[head->file]->file, HEAD,
            "differs from model.embed_tokens.weight, to which the model ties it; an equal one is allowed");
}

static void copy_values(struct import *import, const struct parameters *parameters, floatX *values) {
    for (int i = 0; i < parameters->count; i++) {
        const struct parameter *p = &parameters->list[i];
        struct piece piece;
        if (!find_piece(import, p, &piece)) continue;
        stored_tensor_copy(piece.source->tensor, piece.start, piece.row_stride, piece.column_stride, p->rows,
                           p->columns, values + p->offset);
        if (p->owner == OWNER_EMBEDDING) compare_head(import, p, values + p->offset);
    }
}

bool parameters_import(const struct parameters *parameters, floatX *values, const char *const *files,
                       int file_count, struct errors *errors) {
    struct errors found = {0}; /* its own: a message that the caller has already counts here too */
    struct import import = {.model = parameters->model, .arena = arena_new(), .errors = &found, .names = ""};
    for (int i = 0; i < file_count; i++) {
        (ends_with(files[i], ".index.json") ? add_index : add_file)(&import, files[i]);
        import.names = arena_printf(import.arena, "%s%s%s", import.names, i ? ", " : "", files[i]);
    }
    close_sources(&import);
    if (!found.count) account(&import);
    if (!found.count) copy_values(&import, parameters, values);
    count_faults(&import);
    bool done = !found.count;
    for (int i = 0; i < found.count; i++) errors_add(errors, NULL, NULL, "%s", found.messages[i]);
    for (int i = 0; i < import.file_count; i++) safetensors_close(import.files[i]);
    free(import.files);
    free(import.sources);
    errors_free(&found);
    arena_free(import.arena);
    return done;
}
