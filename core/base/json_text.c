/*
From a file or text to a tree of JSON.

cJSON accepts more than JSON (01, control characters in strings, numbers cut at 63 characters) and does not
say what it disliked. So the text is first walked through by the grammar of RFC 8259, which gives each error
its line, column and reason; cJSON then builds the tree from text known to be sound. Keys given twice are
looked for in the tree, by sorting the keys of each object.
*/
#include "base/base.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BYTES ((size_t)8 << 20)
#define MOST_DEPTH 200
#define MOST_DIGITS 60 /* cJSON reads 63 characters of a number */

/* ---- grammar ----------------------------------------------------------------------------------------- */

struct scan {
    const char *text;
    size_t length, at;
    int depth;
    const char *wrong; /* what was found and is allowed; at is its place */
};

static bool scan_value(struct scan *scan);

static bool wrong(struct scan *scan, const char *reason) {
    scan->wrong = scan->at < scan->length ? reason : "the text ends in the middle of the document";
    return false;
}

/* The character to come; 0 at the end, which the text itself does not contain. */
static unsigned char peek(const struct scan *scan) {
    return scan->at < scan->length ? (unsigned char)scan->text[scan->at] : 0;
}

static void skip_space(struct scan *scan) {
    while (peek(scan) && strchr(" \t\r\n", peek(scan))) scan->at++;
}

static bool is_digit(unsigned char c) {
    return c >= '0' && c <= '9';
}

static bool skip_digits(struct scan *scan) {
    if (!is_digit(peek(scan))) return wrong(scan, "in a number a digit must follow here");
    while (is_digit(peek(scan))) scan->at++;
    return true;
}

static bool scan_number(struct scan *scan) {
    size_t start = scan->at;
    if (peek(scan) == '-') scan->at++;
    if (peek(scan) == '0') {
        scan->at++;
        if (is_digit(peek(scan))) return wrong(scan, "a number must not start with 0 and another digit");
    } else if (!skip_digits(scan)) {
        return false;
    }
    if (peek(scan) == '.') {
        scan->at++;
        if (!skip_digits(scan)) return false;
    }
    if (peek(scan) == 'e' || peek(scan) == 'E') {
        scan->at++;
        if (peek(scan) == '+' || peek(scan) == '-') scan->at++;
        if (!skip_digits(scan)) return false;
    }
    if (scan->at - start <= MOST_DIGITS) return true;
    scan->at = start;
    return wrong(scan, "found a number of more than 60 characters; allowed: at most 60");
}

static bool scan_escape(struct scan *scan) {
    scan->at++;
    if (peek(scan) != 'u') {
        if (!peek(scan) || !strchr("\"\\/bfnrt", peek(scan)))
            return wrong(scan, "found an unknown escape; allowed after \\: \" \\ / b f n r t u");
        scan->at++;
        return true;
    }
    scan->at++;
    bool zero = true;
    for (int i = 0; i < 4; i++, scan->at++) {
        if (!peek(scan) || !strchr("0123456789abcdefABCDEF", peek(scan)))
            return wrong(scan, "four hexadecimal digits must follow \\u");
        zero = zero && peek(scan) == '0';
    }
    if (!zero) return true;
    scan->at--;
    return wrong(scan, "found \\u0000, which no text may hold");
}

/* One character of UTF-8 of more than one byte. */
static bool scan_multibyte(struct scan *scan) {
    unsigned char first = peek(scan);
    int more = first >= 0xf0 && first <= 0xf4  ? 3
               : first >= 0xe0 && first < 0xf0 ? 2
               : first >= 0xc2 && first < 0xe0 ? 1
                                               : 0;
    if (!more) return wrong(scan, "found a byte that is not UTF-8");
    for (scan->at++; more > 0; more--, scan->at++)
        if ((peek(scan) & 0xc0) != 0x80) return wrong(scan, "found a byte that is not UTF-8");
    return true;
}

static bool scan_string(struct scan *scan) {
    for (scan->at++; peek(scan) != '"';) {
        if (peek(scan) < 32)
            return wrong(scan, "found a control character in a text; allowed: an escape such as \\n");
        if (peek(scan) == '\\') {
            if (!scan_escape(scan)) return false;
        } else if (peek(scan) >= 128) {
            if (!scan_multibyte(scan)) return false;
        } else {
            scan->at++;
        }
    }
    scan->at++;
    return true;
}

static bool scan_word(struct scan *scan, const char *word) {
    for (; *word; word++, scan->at++)
        if (peek(scan) != (unsigned char)*word)
            return wrong(scan, "found an unknown word; allowed: true, false, null");
    return true;
}

static bool scan_key(struct scan *scan) {
    if (peek(scan) != '"') return wrong(scan, "a key in double quotes must stand here");
    if (!scan_string(scan)) return false;
    skip_space(scan);
    if (peek(scan) != ':') return wrong(scan, "a colon must follow the key");
    scan->at++;
    return true;
}

/* The members of an object or elements of a list, after its opening bracket. */
static bool scan_members(struct scan *scan, char close) {
    scan->at++;
    skip_space(scan);
    if (peek(scan) == (unsigned char)close) {
        scan->at++;
        return true;
    }
    if (++scan->depth > MOST_DEPTH)
        return wrong(scan, "found more than 200 levels of nesting; allowed: at most 200");
    for (;;) {
        skip_space(scan);
        if (close == '}' && !scan_key(scan)) return false;
        if (!scan_value(scan)) return false;
        skip_space(scan);
        unsigned char next = peek(scan);
        if (next != ',' && next != (unsigned char)close)
            return wrong(scan,
                         close == '}' ? "a comma or } must stand here" : "a comma or ] must stand here");
        scan->at++;
        if (next != ',') break;
    }
    scan->depth--;
    return true;
}

static bool scan_value(struct scan *scan) {
    skip_space(scan);
    switch (peek(scan)) {
    case '{':
        return scan_members(scan, '}');
    case '[':
        return scan_members(scan, ']');
    case '"':
        return scan_string(scan);
    case 't':
        return scan_word(scan, "true");
    case 'f':
        return scan_word(scan, "false");
    case 'n':
        return scan_word(scan, "null");
    default:
        break;
    }
    if (peek(scan) == '-' || is_digit(peek(scan))) return scan_number(scan);
    return wrong(scan, "a value must stand here: { [ \" a number, true, false or null");
}

static bool scan_document(struct scan *scan) {
    const char *zero = memchr(scan->text, 0, scan->length);
    if (zero) {
        scan->at = (size_t)(zero - scan->text);
        return wrong(scan, "found a zero byte: a binary file? allowed: text");
    }
    if (scan->length >= 3 && memcmp(scan->text, "\xef\xbb\xbf", 3) == 0) scan->at = 3; /* as cJSON does */
    skip_space(scan);
    if (scan->at == scan->length) {
        scan->wrong = "found an empty text; allowed: a JSON document";
        return false;
    }
    if (!scan_value(scan)) return false;
    skip_space(scan);
    return scan->at == scan->length || wrong(scan, "found text after the end of the document");
}

/* ---- keys given twice -------------------------------------------------------------------------------- */

static int compare_keys(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* In the order of the keys; a key given three times is told once, since errors keep a message once. */
static bool check_own_keys(struct json object, int count) {
    const char **keys = must_alloc((size_t)count * sizeof *keys);
    int i = 0;
    bool sound = true;
    for (const cJSON *child = object.node->child; child; child = child->next) keys[i++] = child->string;
    qsort(keys, (size_t)count, sizeof *keys, compare_keys);
    for (i = 1; i < count; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0) {
            struct json child = json_member(object, keys[i]);
            errors_add(object.errors, object.file, child.path, "the key is given twice; allowed: once");
            sound = false;
        }
    free(keys);
    return sound;
}

static bool check_keys(struct json value) {
    bool sound = true;
    int count = 0;
    for (cJSON *child = value.node->child; child; child = child->next, count++) {
        if (!child->child) continue;
        struct json inner = cJSON_IsObject(value.node) ? json_member(value, child->string)
                                                       : json_element(value, child, count);
        inner.node = child; /* of two with one key, this one */
        sound &= check_keys(inner);
    }
    if (cJSON_IsObject(value.node) && count > 1) sound &= check_own_keys(value, count);
    return sound;
}

/* ---- front door -------------------------------------------------------------------------------------- */

static void add_at(struct json document, const struct scan *scan) {
    int line = 1, column = 1;
    for (size_t i = 0; i < scan->at; i++) {
        bool newline = scan->text[i] == '\n';
        line += newline;
        column = newline ? 1 : column + ((scan->text[i] & 0xc0) != 0x80); /* characters, not bytes */
    }
    char place[32];
    snprintf(place, sizeof place, "%d:%d", line, column);
    errors_add(document.errors, document.file, place, "%s", scan->wrong);
}

struct json json_read_text(const char *text, size_t length, const char *file, struct arena *arena,
                           struct errors *errors) {
    struct json document = {.file = file, .path = "", .arena = arena, .errors = errors};
    if (length > MOST_BYTES) {
        errors_add(errors, file, NULL, "found more than 8 MiB; allowed: at most 8 MiB");
        return document;
    }
    struct scan scan = {.text = text, .length = length};
    if (!scan_document(&scan)) {
        add_at(document, &scan);
        return document;
    }
    const char *end = NULL;
    document.node = cJSON_ParseWithLengthOpts(text, length, &end, 0);
    if (!document.node) {
        scan.at = end && end >= text && end <= text + length ? (size_t)(end - text) : 0;
        scan.wrong = "not valid JSON (half of a \\u pair?)";
        add_at(document, &scan);
    } else if (!check_keys(document)) {
        cJSON_Delete(document.node);
        document.node = NULL;
    }
    return document;
}

struct json json_read_file(const char *file, struct arena *arena, struct errors *errors) {
    struct json nothing = {.file = file, .path = "", .arena = arena, .errors = errors};
    FILE *stream = fopen(file, "rb");
    if (!stream) {
        errors_add(errors, file, NULL, "cannot be opened: %s", strerror(errno));
        return nothing;
    }
    struct text content = {0};
    size_t got = 1;
    while (content.length <= MOST_BYTES && got > 0) {
        if (content.capacity - content.length < 65536) {
            content.capacity = 2 * content.capacity + 65536;
            content.text = must_realloc(content.text, content.capacity);
        }
        got = fread(content.text + content.length, 1, content.capacity - content.length, stream);
        content.length += got;
    }
    int reason = ferror(stream) ? errno : 0;
    fclose(stream);
    if (reason)
        errors_add(errors, file, NULL, "cannot be read: %s", strerror(reason));
    else
        nothing = json_read_text(content.text, content.length, file, arena, errors);
    free(content.text);
    return nothing;
}
