/*
Texts: one that grows, numbers as text, words of a choice.

number_text tries 15, 16 and 17 digits and takes the first that reads back to the same double; 17 always do.
The program never calls setlocale, so the decimal point is a point everywhere.
*/
#include "base/base.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void text_add(struct text *text, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) length = 0; /* only a character set could fail, and there is none but bytes */
    size_t needed = text->length + (size_t)length + 1;
    if (needed > text->capacity) {
        text->capacity = needed > 2 * text->capacity ? needed : 2 * text->capacity;
        text->text = must_realloc(text->text, text->capacity);
    }
    vsnprintf(text->text + text->length, (size_t)length + 1, format, again);
    va_end(again);
    text->length += (size_t)length;
}

uint64_t text_hash(const char *text) {
    uint64_t hash = 14695981039346656037u;
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    return hash;
}

const char *number_text(double value, char *buffer) {
    if (!isfinite(value)) return strcpy(buffer, "null");
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(buffer, 32, "%.*g", digits, value);
        if (strtod(buffer, NULL) == value) break;
    }
    return buffer;
}

const char *choice_word(struct arena *arena, const char *choices, int index) {
    for (; index > 0 && *choices; index--) {
        const char *bar = strchr(choices, '|');
        choices = bar ? bar + 1 : "";
    }
    return arena_printf(arena, "%.*s", (int)strcspn(choices, "|"), choices);
}
