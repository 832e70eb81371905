/*
Memory: arenas, and the malloc family that does not return without memory.

An arena is a list of blocks, newest first. Small objects are cut one after the other from the newest block;
an object too large for that gets a block of its own, so that no space of the newest one is lost. Objects of a
run live as long as the run, therefore nothing is ever given back singly.
*/
#include "base/base.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES 65536
#define ALIGNMENT _Alignof(max_align_t)

struct block {
    struct block *next;
    size_t used, capacity;
    _Alignas(max_align_t) char data[];
};

struct arena {
    struct block *blocks;
};

static _Noreturn void out_of_memory(size_t bytes) {
    fprintf(stderr, "disagmoe: out of memory: %zu bytes could not be allocated\n", bytes);
    exit(1);
}

void *must_alloc(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) out_of_memory(bytes);
    return memory;
}

void *must_realloc(void *old, size_t bytes) {
    void *memory = realloc(old, bytes ? bytes : 1);
    if (!memory) out_of_memory(bytes);
    return memory;
}

struct arena *arena_new(void) {
    return must_alloc(sizeof(struct arena));
}

void arena_free(struct arena *arena) {
    if (!arena) return;
    for (struct block *block = arena->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    free(arena);
}

static struct block *block_new(size_t capacity) {
    struct block *block = must_alloc(sizeof *block + capacity);
    block->capacity = capacity;
    return block;
}

void *arena_alloc(struct arena *arena, size_t bytes) {
    if (bytes > SIZE_MAX / 2) out_of_memory(bytes);
    size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (size == 0) size = ALIGNMENT; /* two objects never share an address */
    struct block *newest = arena->blocks;
    if (!newest || size > newest->capacity - newest->used) {
        bool large = newest && size > BLOCK_BYTES / 4;
        struct block *block = block_new(size > BLOCK_BYTES / 4 ? size : BLOCK_BYTES);
        block->next = large ? newest->next : newest;
        if (large)
            newest->next = block;
        else
            arena->blocks = block;
        newest = block;
    }
    void *memory = newest->data + newest->used;
    newest->used += size;
    return memory;
}

char *arena_printf(struct arena *arena, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) out_of_memory(0);
    char *text = arena_alloc(arena, (size_t)length + 1);
    vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}

char *arena_strdup(struct arena *arena, const char *text) {
    size_t bytes = strlen(text) + 1;
    return memcpy(arena_alloc(arena, bytes), text, bytes);
}
