/*
The safetensors reader, and the import of the three architectures' checkpoints.

Qwen3-MoE and DeepSeek-MoE store an expert's matrices one by one under the names used here. GPT-OSS packs all
experts of a layer: gate_up_proj (E, H, 2 D) with gate and up interleaved, down_proj (E, D, H), both to be
multiplied from the right; they are unpacked into (out, in) matrices.
*/
#include "state/safetensors.h"
#include "state/state.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t LARGEST_HEADER = 100u << 20; /* the format's own limit */

/* ---- header ------------------------------------------------------------------------------------------ */

static enum tensor_type type_of(const char *name, int *bytes) {
    static const struct {
        const char *name;
        enum tensor_type type;
        int bytes;
    } types[] = {{"F64", TENSOR_F64, 8},   {"F32", TENSOR_F32, 4},   {"F16", TENSOR_F16, 2},
                 {"BF16", TENSOR_BF16, 2}, {"I64", TENSOR_OTHER, 8}, {"U64", TENSOR_OTHER, 8},
                 {"I32", TENSOR_OTHER, 4}, {"U32", TENSOR_OTHER, 4}, {"I16", TENSOR_OTHER, 2},
                 {"U16", TENSOR_OTHER, 2}, {"I8", TENSOR_OTHER, 1},  {"U8", TENSOR_OTHER, 1},
                 {"BOOL", TENSOR_OTHER, 1}};
    for (size_t i = 0; i < COUNT(types); i++)
        if (!strcmp(types[i].name, name)) {
            *bytes = types[i].bytes;
            return types[i].type;
        }
    *bytes = 0; /* newer types: their size is not checked and they are never read */
    return TENSOR_OTHER;
}

/* A whole number from 0 to 2⁵³, else −1. */
static int64_t whole(const cJSON *number) {
    if (!cJSON_IsNumber(number) || !(number->valuedouble >= 0) || number->valuedouble > 9007199254740992.0)
        return -1;
    return number->valuedouble == floor(number->valuedouble) ? (int64_t)number->valuedouble : -1;
}

/* Fills shape and count; false when a dimension is no size or the product overflows. */
static bool read_shape(const cJSON *shape, struct stored_tensor *tensor) {
    tensor->count = 1;
    if (!cJSON_IsArray(shape)) return false;
    const cJSON *size;
    cJSON_ArrayForEach(size, shape) {
        int64_t value = whole(size);
        if (value < 0 || (value > 0 && tensor->count > INT64_MAX / 8 / value)) return false;
        tensor->count *= value;
        if (tensor->dimensions < TENSOR_DIMENSIONS) tensor->shape[tensor->dimensions] = value;
        tensor->dimensions++;
    }
    return true;
}

static bool read_tensor(struct safetensors *file, const cJSON *entry, const unsigned char *data,
                        size_t data_bytes, struct errors *errors) {
    struct stored_tensor tensor = {.name = arena_strdup(file->arena, entry->string)};
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(entry, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    int64_t begin = whole(cJSON_GetArrayItem(offsets, 0)), end = whole(cJSON_GetArrayItem(offsets, 1));
    if (!cJSON_IsString(type) || !read_shape(cJSON_GetObjectItemCaseSensitive(entry, "shape"), &tensor) ||
        cJSON_GetArraySize(offsets) != 2 || begin < 0 || end < begin) {
        errors_add(errors, file->file, tensor.name,
                   "header entry is damaged; dtype, shape and data_offsets expected");
        return false;
    }
    int bytes;
    tensor.type = type_of(type->valuestring, &bytes);
    tensor.type_name = arena_strdup(file->arena, type->valuestring);
    if ((uint64_t)end > data_bytes) {
        errors_add(errors, file->file, tensor.name,
                   "ends at byte %lld of the data, which has %zu: the file is cut off", (long long)end,
                   data_bytes);
        return false;
    }
    if (bytes && end - begin != tensor.count * bytes) {
        errors_add(errors, file->file, tensor.name, "has %lld bytes, its shape and type need %lld",
                   (long long)(end - begin), (long long)(tensor.count * bytes));
        return false;
    }
    tensor.data = data + begin;
    file->tensors[file->count++] = tensor;
    return true;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const struct stored_tensor *)a)->name, ((const struct stored_tensor *)b)->name);
}

static bool read_entries(struct safetensors *file, const cJSON *header, size_t header_bytes,
                         struct errors *errors) {
    const unsigned char *data = (const unsigned char *)file->map + 8 + header_bytes;
    bool good = true;
    file->tensors =
        arena_alloc(file->arena, ((size_t)cJSON_GetArraySize(header) + 1) * sizeof *file->tensors);
    const cJSON *entry;
    cJSON_ArrayForEach(entry, header) {
        if (!strcmp(entry->string, "__metadata__")) continue;
        good &= read_tensor(file, entry, data, file->bytes - 8 - header_bytes, errors);
    }
    qsort(file->tensors, (size_t)file->count, sizeof *file->tensors, by_name);
    for (int i = 1; i < file->count; i++)
        if (!strcmp(file->tensors[i - 1].name, file->tensors[i].name)) {
            errors_add(errors, file->file, file->tensors[i].name, "occurs twice");
            good = false;
        }
    return good;
}

static bool read_header(struct safetensors *file, struct errors *errors) {
    const unsigned char *bytes = file->map;
    uint64_t length = 0;
    for (int i = 7; file->bytes >= 8 && i >= 0; i--) length = length << 8 | bytes[i];
    if (file->bytes < 8 || length > file->bytes - 8 || length > LARGEST_HEADER) {
        errors_add(errors, file->file, NULL, "no safetensors file, or cut off within its header");
        return false;
    }
    cJSON *header = cJSON_ParseWithLength((const char *)bytes + 8, (size_t)length);
    bool good = cJSON_IsObject(header);
    if (!good) errors_add(errors, file->file, NULL, "the header is not a JSON object");
    good = good && read_entries(file, header, (size_t)length, errors);
    cJSON_Delete(header);
    return good;
}

static bool map_file(struct safetensors *file, struct errors *errors) {
    int descriptor = open(file->file, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) || !S_ISREG(status.st_mode)) {
        errors_add(errors, file->file, NULL, "cannot be read: %s",
                   errno ? strerror(errno) : "no regular file");
        if (descriptor >= 0) close(descriptor);
        return false;
    }
    file->bytes = (size_t)status.st_size;
    if (file->bytes) file->map = mmap(NULL, file->bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    close(descriptor);
    if (file->map == MAP_FAILED) {
        errors_add(errors, file->file, NULL, "cannot be mapped: %s", strerror(errno));
        file->map = NULL;
        return false;
    }
    return true;
}

struct safetensors *safetensors_open(const char *name, struct errors *errors) {
    struct safetensors *file = must_alloc(sizeof *file);
    file->arena = arena_new();
    file->file = arena_strdup(file->arena, name);
    errno = 0;
    if (map_file(file, errors) && read_header(file, errors)) return file;
    safetensors_close(file);
    return NULL;
}

void safetensors_close(struct safetensors *file) {
    if (!file) return;
    if (file->map) munmap(file->map, file->bytes);
    arena_free(file->arena);
    free(file);
}

const struct stored_tensor *safetensors_find(const struct safetensors *file, const char *name) {
    struct stored_tensor key = {.name = name};
    return bsearch(&key, file->tensors, (size_t)file->count, sizeof key, by_name);
}

/* ---- elements ---------------------------------------------------------------------------------------- */

static double half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, -24);
    return sign * ldexp(1024 + fraction, exponent - 25);
}

/* The data may start at any byte, so elements are copied out. */
static floatX element(const struct stored_tensor *tensor, int64_t at) {
    double wide;
    float single;
    uint16_t half;
    switch (tensor->type) {
    case TENSOR_F64:
        memcpy(&wide, tensor->data + at * 8, 8);
        return (floatX)wide;
    case TENSOR_F32:
        memcpy(&single, tensor->data + at * 4, 4);
        return single;
    case TENSOR_F16:
        memcpy(&half, tensor->data + at * 2, 2);
        return (floatX)half_value(half);
    default:
        memcpy(&half, tensor->data + at * 2, 2);
        return bf16_to_float(half);
    }
}

void stored_tensor_copy(const struct stored_tensor *tensor, int64_t start, int64_t row_stride,
                        int64_t column_stride, int rows, int columns, floatX *out) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            out[(size_t)r * columns + c] = element(tensor, start + r * row_stride + c * column_stride);
}

/* ---- import ------------------------------------------------------------------------------------------ */

struct import {
    struct safetensors **files;
    int file_count, capacity;
    const char *names; /* of all files, for messages */
    const struct model *model;
    struct arena *arena;
    struct errors *errors;
};

static const struct stored_tensor *find(const struct import *import, const char *name) {
    for (int i = 0; i < import->file_count; i++) {
        const struct stored_tensor *tensor = safetensors_find(import->files[i], name);
        if (tensor) return tensor;
    }
    return NULL;
}

/* Whether it has this shape (0: no such dimension) and a type that can be read; else an error. */
static bool has_shape(const struct import *import, const struct stored_tensor *tensor, int64_t a, int64_t b,
                      int64_t c) {
    const int64_t want[] = {a, b, c};
    int dimensions = c ? 3 : b ? 2 : 1;
    bool same = tensor->dimensions == dimensions;
    for (int i = 0; same && i < dimensions; i++) same = tensor->shape[i] == want[i];
    if (!same) {
        const char *expected = arena_printf(import->arena, "%lld", (long long)a);
        for (int i = 1; i < dimensions; i++)
            expected = arena_printf(import->arena, "%s, %lld", expected, (long long)want[i]);
        errors_add(import->errors, import->names, tensor->name, "has another shape; the model needs (%s)",
                   expected);
    } else if (tensor->type == TENSOR_OTHER) {
        errors_add(import->errors, import->names, tensor->name,
                   "found type %s; F64, F32, F16 or BF16 is allowed", tensor->type_name);
    }
    return same && tensor->type != TENSOR_OTHER;
}

static bool ends_with(const char *text, const char *ending) {
    size_t length = strlen(text), end = strlen(ending);
    return length >= end && !strcmp(text + length - end, ending);
}

/* One expert's tensor out of GPT-OSS's packed ones. True when there is a packed tensor, whether good or not.
 */
static bool import_packed(const struct import *import, const struct parameter *p, floatX *out) {
    bool down = strstr(p->name, "down_proj"), bias = ends_with(p->name, ".bias"),
         up = strstr(p->name, "up_proj");
    int64_t hidden = import->model->hidden, width = import->model->moe.expert_hidden, expert = p->expert;
    int64_t experts = import->model->moe.experts;
    const char *name = arena_printf(import->arena, "model.layers.%d.mlp.experts.%s%s", p->layer,
                                    down ? "down_proj" : "gate_up_proj", bias ? "_bias" : "");
    const struct stored_tensor *tensor = find(import, name);
    if (!tensor) return false;
    if (down && bias && has_shape(import, tensor, experts, hidden, 0))
        stored_tensor_copy(tensor, expert * hidden, 0, 1, 1, (int)hidden, out);
    if (down && !bias && has_shape(import, tensor, experts, width, hidden))
        stored_tensor_copy(tensor, expert * width * hidden, 1, hidden, (int)hidden, (int)width, out);
    if (!down && bias && has_shape(import, tensor, experts, 2 * width, 0))
        stored_tensor_copy(tensor, expert * 2 * width + up, 0, 2, 1, (int)width, out);
    if (!down && !bias && has_shape(import, tensor, experts, hidden, 2 * width))
        stored_tensor_copy(tensor, expert * hidden * 2 * width + up, 2, 2 * width, (int)width, (int)hidden,
                           out);
    return true;
}

static void import_one(const struct import *import, const struct parameter *p, floatX *out) {
    const struct stored_tensor *tensor = find(import, p->name);
    const char *router = strstr(p->name, ".mlp.gate.");
    if (!tensor && router) /* GPT-OSS's name of it */
        tensor = find(import, arena_printf(import->arena, "model.layers.%d.mlp.router.%s", p->layer,
                                           router + strlen(".mlp.gate.")));
    if (tensor) {
        bool vector = p->rows == 1 && tensor->dimensions == 1;
        if (has_shape(import, tensor, vector ? p->columns : p->rows, vector ? 0 : p->columns, 0))
            stored_tensor_copy(tensor, 0, p->columns, 1, p->rows, p->columns, out);
        return;
    }
    if (p->expert >= 0 && import_packed(import, p, out)) return;
    const char *blocks =
        arena_printf(import->arena, "model.layers.%d.mlp.experts.down_proj_blocks", p->layer);
    if (p->expert >= 0 && find(import, blocks))
        errors_add(import->errors, import->names, blocks,
                   "experts are in MXFP4; convert the checkpoint to BF16 first");
    else
        errors_add(import->errors, import->names, p->name, "is missing");
}

/* Opens a file unless it is open. */
static void open_once(struct import *import, const char *name) {
    for (int i = import->file_count - 1; i >= 0; i--) /* tensors of one file follow one another in an index */
        if (!strcmp(import->files[i]->file, name)) return;
    struct safetensors *file = safetensors_open(name, import->errors);
    if (!file) return;
    if (import->file_count == import->capacity) {
        import->capacity = 2 * import->capacity + 8;
        import->files = must_realloc(import->files, (size_t)import->capacity * sizeof(struct safetensors *));
    }
    import->files[import->file_count++] = file;
}

/* HuggingFace's model.safetensors.index.json: {"weight_map": {tensor: file beside the index}}. Which tensor
   is in which file is read from the files themselves. */
static void open_index(struct import *import, const char *index) {
    struct json document = json_read_file(index, import->arena, import->errors);
    struct json map = json_member(document, "weight_map");
    if (document.node && !cJSON_IsObject(map.node))
        json_error(map, "must be an object with the file of each tensor");
    for (const cJSON *file = cJSON_IsObject(map.node) ? map.node->child : NULL; file; file = file->next)
        if (cJSON_IsString(file))
            open_once(import, path_beside(import->arena, index, file->valuestring));
        else
            errors_add(import->errors, index, file->string, "must be the name of a file");
    cJSON_Delete(document.node);
}

bool parameters_import(const struct parameters *parameters, floatX *values, const char *const *files,
                       int file_count, struct errors *errors) {
    struct import import = {.model = parameters->model, .arena = arena_new(), .errors = errors, .names = ""};
    int before = errors->count;
    for (int i = 0; i < file_count; i++) {
        (ends_with(files[i], ".index.json") ? open_index : open_once)(&import, files[i]);
        import.names = arena_printf(import.arena, "%s%s%s", import.names, i ? ", " : "", files[i]);
    }
    if (errors->count == before)
        for (int i = 0; i < parameters->count; i++)
            import_one(&import, &parameters->list[i], values + parameters->list[i].offset);
    for (int i = 0; i < import.file_count; i++) safetensors_close(import.files[i]);
    free(import.files);
    arena_free(import.arena);
    return errors->count == before;
}
