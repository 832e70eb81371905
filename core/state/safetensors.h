/*
Reading a safetensors file: 8 bytes of header length, a JSON header, raw little-endian tensors.

The file is mapped, not read: a checkpoint may be larger than memory. The header is not trusted: every
tensor's range is checked against the file and its shape before anything is read.
*/
#ifndef STATE_SAFETENSORS_H
#define STATE_SAFETENSORS_H

#include "layers/layers.h"

enum tensor_type { TENSOR_F64, TENSOR_F32, TENSOR_F16, TENSOR_BF16, TENSOR_OTHER };
enum { TENSOR_DIMENSIONS = 4 };

struct stored_tensor {
    const char *name;
    enum tensor_type type;
    const char *type_name;
    int dimensions;
    int64_t shape[TENSOR_DIMENSIONS];
    int64_t count;
    const unsigned char *data;
};

struct safetensors {
    const char *file;
    struct arena *arena;
    struct stored_tensor *tensors; /* sorted by name */
    int count;
    void *map;
    size_t bytes;
};

/* NULL when it cannot be read; why is in errors. */
struct safetensors *safetensors_open(const char *file, struct errors *errors);
void safetensors_close(struct safetensors *file); /* NULL is allowed */
const struct stored_tensor *safetensors_find(const struct safetensors *file, const char *name); /* or NULL */

/* out (rows, columns) [r][c] = element start + r · row_stride + c · column_stride of the tensor. The caller
   has checked the shape; type must not be TENSOR_OTHER. */
void stored_tensor_copy(const struct stored_tensor *tensor, int64_t start, int64_t row_stride,
                        int64_t column_stride, int rows, int columns, floatX *out);

#endif
