/*
The safetensors reader.
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
