/*
The list of errors of a run.

A message is cleaned when it is added, since parts of it are the user's: a control character in a key must not
reach the terminal. Lists are bounded, because a file of the wrong kind can hold a wrong key a line; the last
message then says that there is more.
*/
#include "base/base.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define MOST_MESSAGES 200
static const char MORE[] = "there are more errors; these are the first";

static void clean(char *text) {
    for (unsigned char *c = (unsigned char *)text; *c; c++)
        if (*c < 32 || *c == 127) *c = '?';
}

static void keep(struct errors *errors, const char *message) {
    for (int i = 0; i < errors->count; i++)
        if (strcmp(errors->messages[i], message) == 0) return;
    if (errors->count > MOST_MESSAGES) return;
    if (errors->count == MOST_MESSAGES) message = MORE;
    errors->messages = must_realloc(errors->messages, ((size_t)errors->count + 1) * sizeof(char *));
    errors->messages[errors->count] = strcpy(must_alloc(strlen(message) + 1), message);
    errors->count++;
}

void errors_add(struct errors *errors, const char *file, const char *path, const char *format, ...) {
    if (errors->count > MOST_MESSAGES) return;
    struct text message = {0};
    if (file && *file) text_add(&message, "%s: ", file);
    if (path && *path) text_add(&message, "%s: ", path);
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *rest = must_alloc((size_t)(length < 0 ? 0 : length) + 1);
    vsnprintf(rest, (size_t)(length < 0 ? 0 : length) + 1, format, again);
    va_end(again);
    text_add(&message, "%s", rest);
    free(rest);
    clean(message.text);
    keep(errors, message.text);
    free(message.text);
}

void errors_print(const struct errors *errors, FILE *stream) {
    for (int i = 0; i < errors->count; i++) fprintf(stream, "disagmoe: %s\n", errors->messages[i]);
}

void errors_free(struct errors *errors) {
    for (int i = 0; i < errors->count; i++) free(errors->messages[i]);
    free(errors->messages);
    *errors = (struct errors){0};
}
