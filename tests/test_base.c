/*
Tests of core/base: what a user sees of a wrong file, that no text crashes the reader, numbers that read back,
reference values of the random numbers, files that are old or new and never half, loops that run each index
once.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/base.h"
#include "tests/cases.h"

#include <errno.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct bench {
    struct arena *arena;
    struct errors errors;
    char folder[64];
};

static int set_up(void **state) {
    struct bench *bench = must_alloc(sizeof *bench);
    bench->arena = arena_new();
    strcpy(bench->folder, "/tmp/disagmoe-base-XXXXXX");
    if (!mkdtemp(bench->folder)) return 1;
    *state = bench;
    return 0;
}

static int tear_down(void **state) {
    struct bench *bench = *state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", bench->folder);
    int status = system(command);
    errors_free(&bench->errors);
    arena_free(bench->arena);
    free(bench);
    return status;
}

static struct json read_text(struct bench *bench, const char *text) {
    return json_read_text(text, strlen(text), "m.json", bench->arena, &bench->errors);
}

static void assert_errors(struct bench *bench, int count, const char *const *messages) {
    for (int i = 0; i < count && i < bench->errors.count; i++)
        assert_string_equal(bench->errors.messages[i], messages[i]);
    assert_int_equal(bench->errors.count, count);
    errors_free(&bench->errors);
}

#define ASSERT_ERRORS(bench, ...)                                                                            \
    do {                                                                                                     \
        const char *const messages_[] = {__VA_ARGS__};                                                       \
        assert_errors(bench, COUNT(messages_), messages_);                                                   \
    } while (0)

/* ---- memory ------------------------------------------------------------------------------------------ */

static void arena_gives_zeroed_aligned_separate_memory(void **state) {
    struct bench *bench = *state;
    struct rng rng = rng_seed(1);
    enum { OBJECTS = 2000 };
    unsigned char *objects[OBJECTS];
    size_t sizes[OBJECTS];
    for (int i = 0; i < OBJECTS; i++) {
        sizes[i] = i % 100 == 0 ? (size_t)rng_below(&rng, 200000) : (size_t)rng_below(&rng, 300);
        objects[i] = arena_alloc(bench->arena, sizes[i]);
        assert_int_equal((uintptr_t)objects[i] % _Alignof(max_align_t), 0);
        for (size_t j = 0; j < sizes[i]; j++) assert_int_equal(objects[i][j], 0);
        memset(objects[i], i % 251 + 1, sizes[i]);
    }
    for (int i = 0; i < OBJECTS; i++)
        for (size_t j = 0; j < sizes[i]; j++) assert_int_equal(objects[i][j], i % 251 + 1);
    assert_string_equal(arena_printf(bench->arena, "%d-%s", 7, "seven"), "7-seven");
    arena_free(NULL);
}

/* ---- errors ------------------------------------------------------------------------------------------ */

static void errors_leave_out_missing_parts_and_repeats(void **state) {
    struct bench *bench = *state;
    errors_add(&bench->errors, "f", "a.b", "found %d, allowed 2", 1);
    errors_add(&bench->errors, "f", "a.b", "found %d, allowed 2", 1);
    errors_add(&bench->errors, NULL, "a", "x");
    errors_add(&bench->errors, "f", "", "x");
    errors_add(&bench->errors, "", NULL, "bell\a and\nline");
    ASSERT_ERRORS(bench, "f: a.b: found 1, allowed 2", "a: x", "f: x", "bell? and?line");
}

static void errors_are_printed_one_a_line(void **state) {
    struct bench *bench = *state;
    errors_add(&bench->errors, "f", "a", "one");
    errors_add(&bench->errors, "f", "b", "two");
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    errors_print(&bench->errors, stream);
    fclose(stream);
    assert_string_equal(text, "disagmoe: f: a: one\ndisagmoe: f: b: two\n");
    free(text);
}

static void errors_are_bounded(void **state) {
    struct bench *bench = *state;
    for (int i = 0; i < 100000; i++) errors_add(&bench->errors, "f", NULL, "error %d", i);
    assert_int_equal(bench->errors.count, 201);
    assert_string_equal(bench->errors.messages[199], "f: error 199");
    assert_string_equal(bench->errors.messages[200], "there are more errors; these are the first");
}

/* ---- JSON text --------------------------------------------------------------------------------------- */

static void assert_refused(struct bench *bench, const char *text, const char *message) {
    struct json document = read_text(bench, text);
    assert_null(document.node);
    ASSERT_ERRORS(bench, message);
}

static void wrong_texts_are_refused_with_their_place(void **state) {
    struct bench *bench = *state;
    static const struct {
        const char *text, *message;
    } wrong[] = {
        {"", "m.json: 1:1: found an empty text; allowed: a JSON document"},
        {" \n ", "m.json: 2:2: found an empty text; allowed: a JSON document"},
        {"{\"a\": 1", "m.json: 1:8: the text ends in the middle of the document"},
        {"{\"a\": \"bc", "m.json: 1:10: the text ends in the middle of the document"},
        {"{\"a\"", "m.json: 1:5: the text ends in the middle of the document"},
        {"{\n \"a\": 1,\n}", "m.json: 3:1: a key in double quotes must stand here"},
        {"{\"a\" 1}", "m.json: 1:6: a colon must follow the key"},
        {"{\"a\": 1 \"b\": 2}", "m.json: 1:9: a comma or } must stand here"},
        {"[1, 2 3]", "m.json: 1:7: a comma or ] must stand here"},
        {"[1, ]", "m.json: 1:5: a value must stand here: { [ \" a number, true, false or null"},
        {"{\"é\": x}", "m.json: 1:7: a value must stand here: { [ \" a number, true, false or null"},
        {"{} x", "m.json: 1:4: found text after the end of the document"},
        {"{}{}", "m.json: 1:3: found text after the end of the document"},
        {"NaN", "m.json: 1:1: a value must stand here: { [ \" a number, true, false or null"},
        {"-Infinity", "m.json: 1:2: in a number a digit must follow here"},
        {"01", "m.json: 1:2: a number must not start with 0 and another digit"},
        {"1.", "m.json: 1:3: the text ends in the middle of the document"},
        {"[1.]", "m.json: 1:4: in a number a digit must follow here"},
        {"[1e]", "m.json: 1:4: in a number a digit must follow here"},
        {"+1", "m.json: 1:1: a value must stand here: { [ \" a number, true, false or null"},
        {"tru", "m.json: 1:4: the text ends in the middle of the document"},
        {"[nul]", "m.json: 1:5: found an unknown word; allowed: true, false, null"},
        {"\"a\nb\"", "m.json: 1:3: found a control character in a text; allowed: an escape such as \\n"},
        {"\"\\x\"", "m.json: 1:3: found an unknown escape; allowed after \\: \" \\ / b f n r t u"},
        {"\"\\u00g0\"", "m.json: 1:6: four hexadecimal digits must follow \\u"},
        {"\"\\u0000\"", "m.json: 1:7: found \\u0000, which no text may hold"},
        {"\"\xff\"", "m.json: 1:2: found a byte that is not UTF-8"},
        {"{\"a\": 1, \"b\": {\"c\": 1, \"d\": 2, \"c\": 3}}",
         "m.json: b.c: the key is given twice; allowed: once"},
        {"[1, {\"x\": 1, \"x\": 1}]", "m.json: [1].x: the key is given twice; allowed: once"},
        {"[1234567890123456789012345678901234567890123456789012345678901]",
         "m.json: 1:2: found a number of more than 60 characters; allowed: at most 60"},
    };
    for (size_t i = 0; i < COUNT(wrong); i++) assert_refused(bench, wrong[i].text, wrong[i].message);
}

static void half_a_pair_and_zero_bytes_are_refused(void **state) {
    struct bench *bench = *state;
    assert_null(read_text(bench, "\"\\ud800\"").node);
    assert_int_equal(bench->errors.count, 1);
    errors_free(&bench->errors);
    assert_null(json_read_text("{\"a\":\0 1}", 9, "m.json", bench->arena, &bench->errors).node);
    ASSERT_ERRORS(bench, "m.json: 1:6: found a zero byte: a binary file? allowed: text");
}

static void sound_texts_are_read(void **state) {
    struct bench *bench = *state;
    static const char *const sound[] = {"{}",
                                        "[]",
                                        " 1 ",
                                        "-0.5e-3",
                                        "true",
                                        "\"\\u00e9\"",
                                        "\"é\"",
                                        "[[],{}]",
                                        "null",
                                        "\xef\xbb\xbf{}",
                                        "{\"a\":1,\"A\":2,\"aa\":3}",
                                        "1e999"};
    for (size_t i = 0; i < COUNT(sound); i++) {
        struct json document = read_text(bench, sound[i]);
        assert_int_equal(bench->errors.count, 0);
        assert_non_null(document.node);
        cJSON_Delete(document.node);
    }
}

static void nesting_is_bounded(void **state) {
    struct bench *bench = *state;
    for (int depth = 199; depth <= 201; depth++) {
        struct text text = {0};
        for (int i = 0; i < depth; i++) text_add(&text, "[");
        text_add(&text, "1");
        for (int i = 0; i < depth; i++) text_add(&text, "]");
        struct json document = read_text(bench, text.text);
        assert_int_equal(document.node != NULL, depth <= 200);
        cJSON_Delete(document.node);
        free(text.text);
    }
    ASSERT_ERRORS(bench, "m.json: 1:202: found more than 200 levels of nesting; allowed: at most 200");
    char *deep = must_alloc(1000001);
    memset(deep, '[', 1000000);
    assert_null(read_text(bench, deep).node);
    free(deep);
}

static void files_that_cannot_be_read_are_named(void **state) {
    struct bench *bench = *state;
    assert_null(json_read_file("/nowhere/m.json", bench->arena, &bench->errors).node);
    ASSERT_ERRORS(bench, "/nowhere/m.json: cannot be opened: No such file or directory");
    assert_null(json_read_file("/", bench->arena, &bench->errors).node);
    ASSERT_ERRORS(bench, "/: cannot be read: Is a directory");
    char *file = arena_printf(bench->arena, "%s/large.json", bench->folder);
    FILE *stream = fopen(file, "w");
    for (int i = 0; i < 10 << 10; i++) fprintf(stream, "%1024s", "");
    fclose(stream);
    assert_null(json_read_file(file, bench->arena, &bench->errors).node);
    ASSERT_ERRORS(bench,
                  arena_printf(bench->arena, "%s: found more than 8 MiB; allowed: at most 8 MiB", file));
}

/* A million keys: reading, the search for repeats and the report of unknown keys stay near linear. */
static void many_keys_cost_no_square(void **state) {
    struct bench *bench = *state;
    int count = sampled(300000);
    struct text text = {0};
    for (int i = 0; i < count; i++) text_add(&text, "%s\"key%d\":%d", i ? "," : "{", i, i);
    text_add(&text, "}");
    double start = seconds_now();
    struct json document = json_read_text(text.text, text.length, "m.json", bench->arena, &bench->errors);
    assert_non_null(document.node);
    struct json_field field = {"key7", JSON_INT, 0, true, 0, 0, NULL};
    int value = 0;
    assert_false(json_read_fields(document, &field, 1, &value));
    assert_int_equal(value, 7);
    assert_int_equal(bench->errors.count, 201);
    assert_true(seconds_now() - start < 20);
    cJSON_Delete(document.node);
    free(text.text);
}

/* ---- tables of fields -------------------------------------------------------------------------------- */

struct target {
    int whole, choice;
    double real;
    bool flag;
    const char *text;
    struct json value;
};

static const struct json_field FIELDS[] = {
    {"whole", JSON_INT, offsetof(struct target, whole), true, 1, 10, NULL},
    {"choice", JSON_CHOICE, offsetof(struct target, choice), false, 0, 0, "none|selective|full"},
    {"real", JSON_REAL, offsetof(struct target, real), false, 0, 1e300, NULL},
    {"flag", JSON_BOOL, offsetof(struct target, flag), false, 0, 0, NULL},
    {"text", JSON_TEXT, offsetof(struct target, text), false, 0, 0, NULL},
    {"value", JSON_VALUE, offsetof(struct target, value), false, 0, 0, NULL},
};

static bool read_target(struct bench *bench, const char *text, struct target *target) {
    struct json document = read_text(bench, text);
    assert_non_null(document.node);
    bool sound = json_read_fields(document, FIELDS, COUNT(FIELDS), target);
    cJSON_Delete(document.node);
    return sound;
}

static void fields_are_read_and_defaults_kept(void **state) {
    struct bench *bench = *state;
    struct target target = {.real = 0.25, .flag = true};
    assert_true(read_target(bench, "{\"whole\": 3, \"choice\": \"full\", \"text\": \"a\\nb\"}", &target));
    assert_int_equal(target.whole, 3);
    assert_int_equal(target.choice, 2);
    assert_true(target.real == 0.25 && target.flag && !target.value.node);
    assert_string_equal(target.text, "a\nb");
    assert_true(
        read_target(bench, "{\"whole\": 1e1, \"real\": 1e-300, \"flag\": false, \"value\": null}", &target));
    assert_true(target.whole == 10 && target.real == 1e-300 && !target.flag);
    assert_string_equal(target.value.path, "value");
    assert_int_equal(bench->errors.count, 0);
}

static void every_wrong_field_is_told_at_once(void **state) {
    struct bench *bench = *state;
    struct target target = {.whole = 5};
    assert_false(read_target(bench,
                             "{\"whole\": 11, \"choice\": \"ful\", \"real\": -1, \"flag\": 1, \"text\": [1],"
                             " \"whloe\": 1, \"colour\": 2}",
                             &target));
    assert_int_equal(target.whole, 5);
    ASSERT_ERRORS(bench, "m.json: whole: found 11; allowed: a whole number from 1 to 10",
                  "m.json: choice: found \"ful\"; allowed: \"none\", \"selective\" or \"full\"",
                  "m.json: real: found -1; allowed: a number of at least 0",
                  "m.json: flag: found 1; allowed: true or false", "m.json: text: found […]; allowed: a text",
                  "m.json: whloe: unknown key; did you mean \"whole\"?",
                  "m.json: colour: unknown key; allowed: whole, choice, real, flag, text, value");
}

static void numbers_are_checked(void **state) {
    struct bench *bench = *state;
    static const char *const wrong[] = {"1.5",  "1e300", "1e999", "-3",        "\"3\"",
                                        "null", "{}",    "0",     "2147483648"};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        struct target target = {0};
        char text[64];
        snprintf(text, sizeof text, "{\"whole\": %s}", wrong[i]);
        assert_false(read_target(bench, text, &target));
        assert_int_equal(bench->errors.count, 1);
        errors_free(&bench->errors);
    }
    struct target target = {0};
    assert_false(read_target(bench, "{\"whole\": 1, \"real\": -1e999}", &target));
    ASSERT_ERRORS(bench, "m.json: real: found a number beyond 1.8e308; allowed: a number of at least 0");
    assert_false(read_target(bench, "{}", &target));
    ASSERT_ERRORS(bench, "m.json: whole: the key is missing; allowed: a whole number from 1 to 10");
}

static void unbounded_numbers_may_be_negative(void **state) {
    struct bench *bench = *state;
    struct json_field field = {"n", JSON_INT, 0, true, 0, 0, NULL};
    int number = 0;
    struct json document = read_text(bench, "{\"n\": -2147483648}");
    assert_true(json_read_fields(document, &field, 1, &number));
    assert_int_equal(number, INT_MIN);
    cJSON_Delete(document.node);
}

static void what_is_found_is_shortened(void **state) {
    struct bench *bench = *state;
    struct target target = {0};
    char text[2000] = "{\"whole\": \"";
    for (int i = 0; i < 500; i++) strcat(text, "é");
    strcat(text, "\"}");
    read_target(bench, text, &target);
    assert_true(strlen(bench->errors.messages[0]) < 150);
    cJSON *node = cJSON_Parse("5");
    struct json value = {node, "f", "p.q", bench->arena, &bench->errors};
    json_error(value, "allowed: %s", "six");
    assert_string_equal(bench->errors.messages[1], "f: p.q: found 5; allowed: six");
    cJSON_Delete(node);
    errors_free(&bench->errors);
    struct json list = read_text(bench, "[1]");
    assert_false(json_read_fields(list, FIELDS, COUNT(FIELDS), &target));
    ASSERT_ERRORS(bench, "m.json: found […]; allowed: an object");
    cJSON_Delete(list.node);
}

static void members_and_elements_know_their_path(void **state) {
    struct bench *bench = *state;
    struct json document = read_text(bench, "{\"a\": {\"b\": [5]}}");
    struct json list = json_member(json_member(document, "a"), "b");
    struct json element = json_element(list, list.node->child, 0);
    assert_string_equal(element.path, "a.b[0]");
    assert_string_equal(json_member(document, "A").path, "A");
    assert_null(json_member(document, "A").node);
    assert_null(json_member(list, "x").node);
    cJSON_Delete(document.node);
}

static void dotted_paths_set_and_get(void **state) {
    struct bench *bench = *state;
    cJSON *root = read_text(bench, "{\"model\": {\"layers\": 2}, \"n\": 1}").node;
    assert_true(json_set_path(root, "model.layers", cJSON_CreateNumber(8)));
    assert_true(json_set_path(root, "model.extra", cJSON_CreateNumber(9)));
    assert_true(json_set_path(root, "new", cJSON_CreateNumber(10)));
    cJSON *lost = cJSON_CreateNumber(1);
    assert_false(json_set_path(root, "n.x", lost));
    assert_false(json_set_path(root, "absent.x", lost));
    assert_false(json_set_path(root, "model.", lost));
    assert_false(json_set_path(root, "", lost));
    cJSON_Delete(lost);
    assert_int_equal(json_get_path(root, "model.layers")->valueint, 8);
    assert_int_equal(json_get_path(root, "model.extra")->valueint, 9);
    assert_null(json_get_path(root, "model.absent"));
    assert_null(json_get_path(root, "n.x"));
    char *text = cJSON_PrintUnformatted(root);
    assert_string_equal(text, "{\"model\":{\"layers\":8,\"extra\":9},\"n\":1,\"new\":10}");
    free(text);
    cJSON_Delete(root);
}

/* ---- mutated texts ----------------------------------------------------------------------------------- */

static const char SEED_TEXT[] =
    "{\"name\": \"é\\u00e9\\n\", \"list\": [1, -2.5e-3, true, false, null, {\"a\": {\"b\": []}}],\n"
    " \"whole\": 3, \"choice\": \"full\", \"real\": 1.0, \"flag\": true, \"text\": \"t\", \"value\": {}}\n";

/* Cuts, swaps, repeats or overwrites a piece; never longer than room. */
static size_t mutate(struct rng *rng, char *text, size_t length, size_t room) {
    static const char pieces[] = "{}[]\",:\\0129eE+-.\n tfnu\x80\xff\x01";
    for (int edits = 1 + rng_below(rng, 4); edits > 0 && length > 1; edits--) {
        size_t at = (size_t)rng_below(rng, (int)length), span = 1 + (size_t)rng_below(rng, 8);
        if (span > length - at) span = length - at;
        switch (rng_below(rng, 5)) {
        case 0:
            length = at;
            break;
        case 1:
            text[at] = pieces[rng_below(rng, sizeof pieces)];
            break;
        case 2:
            text[at] = (char)rng_below(rng, 256);
            break;
        case 3:
            memmove(text + at, text + at + span, length - at - span);
            length -= span;
            break;
        default:
            if (length + span > room) break;
            memmove(text + at + span, text + at, length - at);
            length += span;
        }
    }
    return length;
}

/* A text is read or refused with an error; a tree that was read prints and reads back. */
static void values_print_as_they_were(void **state) {
    struct bench *bench = *state;
    static const char *const texts[] = {"1",
                                        "0.1",
                                        "89200000000",
                                        "1e+300",
                                        "-0.30000000000000004",
                                        "true",
                                        "null",
                                        "\"a\\\"b\"",
                                        "[]",
                                        "{}",
                                        "[1,2.5]",
                                        "\"auto\"",
                                        "{\"a\":[1,{\"b\":0.1}],\"c\":\"x\"}"};
    for (size_t i = 0; i < COUNT(texts); i++) {
        struct json value = read_text(bench, texts[i]);
        assert_string_equal(json_text(bench->arena, value.node), texts[i]);
        assert_true(cJSON_Compare(value.node, value.node, true)); /* the value itself is as before */
        cJSON_Delete(value.node);
    }
    assert_int_equal(bench->errors.count, 0);
}

static void mutated_texts_never_crash(void **state) {
    struct bench *bench = *state;
    struct rng rng = rng_seed(2026);
    char buffer[1024];
    int refused = 0, count = sampled(60000);
    for (int i = 0; i < count; i++) {
        memcpy(buffer, SEED_TEXT, sizeof SEED_TEXT);
        size_t length = mutate(&rng, buffer, sizeof SEED_TEXT - 1, sizeof buffer);
        char *exact = must_alloc(length); /* so that a read beyond the end is seen */
        memcpy(exact, buffer, length);
        struct arena *arena = arena_new();
        struct json document = json_read_text(exact, length, "m.json", arena, &bench->errors);
        assert_int_equal(document.node == NULL, bench->errors.count > 0);
        if (document.node) {
            struct target target = {0};
            json_read_fields(document, FIELDS, COUNT(FIELDS), &target);
            char *text = cJSON_PrintUnformatted(document.node);
            assert_non_null(text);
            free(text);
        } else {
            refused++;
        }
        cJSON_Delete(document.node);
        errors_free(&bench->errors);
        arena_free(arena);
        free(exact);
    }
    assert_true(refused > count / 2 && refused < count);
}

static void every_cut_of_a_text_is_refused(void **state) {
    struct bench *bench = *state;
    size_t whole = strlen(SEED_TEXT) - 1; /* without its newline */
    for (size_t length = 0; length < whole; length++) {
        assert_null(json_read_text(SEED_TEXT, length, "m.json", bench->arena, &bench->errors).node);
        assert_int_equal(bench->errors.count, 1);
        errors_free(&bench->errors);
    }
}

/* ---- numbers as text --------------------------------------------------------------------------------- */

static void numbers_print_shortest(void **state) {
    (void)state;
    static const struct {
        double value;
        const char *text;
    } numbers[] = {{0.1, "0.1"},
                   {1, "1"},
                   {1e6, "1000000"},
                   {-2.5, "-2.5"},
                   {1e300, "1e+300"},
                   {0.1 + 0.2, "0.30000000000000004"},
                   {1.0 / 3, "0.3333333333333333"},
                   {85899345920, "85899345920"},
                   {0, "0"},
                   {DBL_MIN / 4, "5.562684646268003e-309"},
                   {NAN, "null"},
                   {INFINITY, "null"}};
    for (size_t i = 0; i < COUNT(numbers); i++) {
        char buffer[32];
        assert_string_equal(number_text(numbers[i].value, buffer), numbers[i].text);
    }
}

static void any_double_reads_back(void **state) {
    struct bench *bench = *state;
    struct rng rng = rng_seed(5);
    for (int i = 0; i < sampled(20000); i++) {
        uint64_t bits = rng_next(&rng);
        double value;
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value)) continue;
        cJSON *object = cJSON_CreateObject();
        json_add_number(object, "real", value);
        json_add_number(object, "whole", 3);
        char *text = cJSON_PrintUnformatted(object);
        cJSON *again = cJSON_Parse(text);
        assert_true(cJSON_GetObjectItem(again, "real")->valuedouble == value);
        struct json_field fields[] = {{"real", JSON_REAL, offsetof(struct target, real), true, 0, 0, NULL},
                                      {"whole", JSON_INT, offsetof(struct target, whole), true, 1, 3, NULL}};
        struct target target = {0};
        struct json written = {object, "m", "", bench->arena, &bench->errors};
        assert_true(json_read_fields(written, fields, 2, &target)); /* unprinted ones too */
        assert_true(target.real == value && target.whole == 3);
        cJSON_Delete(again);
        cJSON_Delete(object);
        free(text);
    }
    cJSON *nothing = json_number(NAN);
    assert_true(cJSON_IsNull(nothing));
    cJSON_Delete(nothing);
}

static void words_of_a_choice(void **state) {
    struct bench *bench = *state;
    assert_string_equal(choice_word(bench->arena, "a|bc|d", 0), "a");
    assert_string_equal(choice_word(bench->arena, "a|bc|d", 1), "bc");
    assert_string_equal(choice_word(bench->arena, "a|bc|d", 2), "d");
}

/* ---- random numbers ---------------------------------------------------------------------------------- */

/* Reference: the authors' C code of splitmix64 and xoshiro256**. */
static void rng_matches_its_reference(void **state) {
    (void)state;
    struct rng rng = rng_seed(0);
    assert_true(rng.state[0] == 0xe220a8397b1dcdafu && rng.state[1] == 0x6e789e6aa1b965f4u);
    assert_true(rng.state[2] == 0x06c45d188009454fu && rng.state[3] == 0xf88bb8a8724c81ecu);
    struct rng plain = {{1, 2, 3, 4}};
    static const uint64_t expected[] = {11520u, 0u, 1509978240u, 1215971899390074240u, 1216172134540287360u};
    for (size_t i = 0; i < COUNT(expected); i++) assert_true(rng_next(&plain) == expected[i]);
}

static void rng_below_is_even(void **state) {
    (void)state;
    struct rng rng = rng_seed(11);
    int counts[7] = {0}, count = 70000;
    for (int i = 0; i < count; i++) {
        int value = rng_below(&rng, 7);
        assert_in_range(value, 0, 6);
        counts[value]++;
    }
    for (int i = 0; i < 7; i++) assert_in_range(counts[i], 9600, 10400); /* four deviations */
    assert_int_equal(rng_below(&rng, 1), 0);
    assert_true(rng_below(&rng, INT_MAX) >= 0);
}

static void rng_normal_has_its_moments(void **state) {
    (void)state;
    struct rng rng = rng_seed(3);
    double sums[5] = {0};
    int count = 200000;
    for (int i = 0; i < count; i++) {
        double x = rng_normal(&rng);
        assert_true(isfinite(x));
        for (int power = 1; power <= 4; power++) sums[power] += pow(x, power);
    }
    assert_true(fabs(sums[1] / count) < 0.01);
    assert_true(fabs(sums[2] / count - 1) < 0.015);
    assert_true(fabs(sums[3] / count) < 0.03);
    assert_true(fabs(sums[4] / count - 3) < 0.1);
}

/* The own logarithm and cosine against the C library's. */
static void rng_normal_is_box_muller(void **state) {
    (void)state;
    struct rng rng = rng_seed(9), twin = rng_seed(9);
    for (int i = 0; i < 100000; i++) {
        double radius = 1 - rng_uniform(&twin), turn = rng_uniform(&twin);
        double expected = sqrt(-2 * log(radius)) * cos(2 * acos(-1) * turn);
        assert_true(fabs(rng_normal(&rng) - expected) < 1e-14 * (1 + fabs(expected)));
    }
}

/* ---- files ------------------------------------------------------------------------------------------- */

static char *content_of(struct bench *bench, const char *file) {
    char buffer[256] = {0};
    FILE *stream = fopen(file, "r");
    if (!stream) return NULL;
    size_t length = fread(buffer, 1, sizeof buffer - 1, stream);
    buffer[length] = 0;
    fclose(stream);
    return arena_strdup(bench->arena, buffer);
}

static int entries(const char *folder) {
    char command[128];
    int count = -1;
    snprintf(command, sizeof command, "ls -A '%s' | wc -l", folder);
    FILE *stream = popen(command, "r");
    if (fscanf(stream, "%d", &count) != 1) count = -1;
    pclose(stream);
    return count;
}

static void atomic_write_replaces(void **state) {
    struct bench *bench = *state;
    char *file = arena_printf(bench->arena, "%s/out", bench->folder);
    char *link = arena_printf(bench->arena, "%s/link", bench->folder);
    assert_true(file_write_atomic(file, "old", 3, &bench->errors));
    assert_true(file_write_atomic(file, "newer", 5, &bench->errors));
    assert_string_equal(content_of(bench, file), "newer");
    assert_int_equal(symlink("out", link), 0);
    assert_true(file_write_atomic(link, "by link", 7, &bench->errors));
    assert_string_equal(content_of(bench, file), "by link");
    assert_true(file_write_atomic("/dev/null", "gone", 4, &bench->errors));
    struct stat status;
    assert_true(stat("/dev/null", &status) == 0 && S_ISCHR(status.st_mode));
    assert_int_equal(entries(bench->folder), 2);
    assert_int_equal(bench->errors.count, 0);
}

/* A file that may not grow is what a full disk looks like. */
static void full_disk_keeps_the_old_content(void **state) {
    struct bench *bench = *state;
    char *file = arena_printf(bench->arena, "%s/out", bench->folder), large[8192] = {0};
    assert_true(file_write_atomic(file, "old", 3, &bench->errors));
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    bool written = file_write_atomic(file, large, sizeof large, &bench->errors);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_false(written);
    assert_string_equal(content_of(bench, file), "old");
    assert_int_equal(entries(bench->folder), 1);
    ASSERT_ERRORS(bench, arena_printf(bench->arena, "%s: cannot be written: File too large", file));
    assert_false(file_write_atomic("/dev/full", "x", 1, &bench->errors));
    ASSERT_ERRORS(bench, "/dev/full: cannot be written: No space left on device");
}

static void unwritable_places_are_named(void **state) {
    struct bench *bench = *state;
    assert_false(file_write_atomic("/nowhere/out", "x", 1, &bench->errors));
    ASSERT_ERRORS(bench, "/nowhere/out: cannot be written: No such file or directory");
    assert_false(file_write_atomic(bench->folder, "x", 1, &bench->errors));
    ASSERT_ERRORS(bench, arena_printf(bench->arena, "%s: cannot be written: Is a directory", bench->folder));
}

static void folders_are_made(void **state) {
    struct bench *bench = *state;
    char *file = arena_printf(bench->arena, "%s/a/b/c", bench->folder);
    assert_true(make_folder_of(file, &bench->errors));
    assert_true(make_folder_of(file, &bench->errors));
    assert_true(make_folder_of("plain", &bench->errors));
    assert_true(file_write_atomic(file, "x", 1, &bench->errors));
    assert_false(make_folder_of(arena_printf(bench->arena, "%s/d/e", file), &bench->errors));
    ASSERT_ERRORS(bench, arena_printf(bench->arena, "%s: is no folder", file));
}

/* What file_write_atomic will be able to write is known before, and nothing is left of the trial. */
static void writable_places_are_known(void **state) {
    struct bench *bench = *state;
    char *file = arena_printf(bench->arena, "%s/a/out", bench->folder);
    char *folder = arena_printf(bench->arena, "%s/a", bench->folder);
    assert_true(file_is_writable(file, &bench->errors));
    assert_int_equal(entries(folder), 0);
    assert_true(file_write_atomic(file, "old", 3, &bench->errors));
    assert_true(file_is_writable(file, &bench->errors) && file_is_writable("/dev/null", &bench->errors));
    assert_string_equal(content_of(bench, file), "old");
    assert_int_equal(entries(folder), 1);
    assert_int_equal(bench->errors.count, 0);
    assert_false(file_is_writable(folder, &bench->errors));
    ASSERT_ERRORS(bench, arena_printf(bench->arena, "%s: cannot be written: Is a directory", folder));
    assert_false(file_is_writable(arena_printf(bench->arena, "%s/below", file), &bench->errors));
    ASSERT_ERRORS(bench, arena_printf(bench->arena, "%s: is no folder", file));
    assert_false(file_is_writable("/proc/out", &bench->errors));
    ASSERT_ERRORS(bench, "/proc/out: cannot be written: No such file or directory");
}

static void growing_files_replace_when_whole(void **state) {
    struct bench *bench = *state;
    char *file = arena_printf(bench->arena, "%s/out", bench->folder);
    char *part = arena_printf(bench->arena, "%s.part", file),
         *other = arena_printf(bench->arena, "%s2", part);
    struct growing_file first, second;
    assert_true(file_write_atomic(file, "old", 3, &bench->errors));
    assert_true(growing_file_open(&first, file, &bench->errors));
    growing_file_add(&first, "one\n", 4);
    assert_string_equal(content_of(bench, part), "one\n");         /* there at once */
    assert_true(growing_file_open(&second, file, &bench->errors)); /* another run: a part of its own */
    growing_file_add(&second, "other\n", 6);
    growing_file_add(&first, "two\n", 4);
    assert_string_equal(content_of(bench, part), "one\ntwo\n");
    assert_string_equal(content_of(bench, other), "other\n");
    assert_string_equal(content_of(bench, file), "old");
    growing_file_leave(&second, true);
    assert_string_equal(content_of(bench, file), "old");
    assert_true(growing_file_finish(&first, &bench->errors));
    assert_string_equal(content_of(bench, file), "one\ntwo\n");
    assert_int_equal(entries(bench->folder), 2); /* what the other left */
    assert_true(growing_file_open(&first, file, &bench->errors));
    growing_file_leave(&first, false);
    assert_string_equal(content_of(bench, file), "one\ntwo\n");
    assert_int_equal(entries(bench->folder), 2);
    /* Nothing is open: nothing happens. */
    growing_file_add(&first, "x", 1);
    growing_file_leave(&first, true);
    assert_true(growing_file_finish(&first, &bench->errors));
    char *link = arena_printf(bench->arena, "%s/link", bench->folder);
    assert_int_equal(symlink("out", link), 0);
    assert_true(growing_file_open(&first, link, &bench->errors));
    growing_file_add(&first, "by link", 7);
    assert_true(growing_file_finish(&first, &bench->errors));
    assert_string_equal(content_of(bench, file), "by link");
    assert_int_equal(bench->errors.count, 0);
}

/* On a full disk what was added before stays, in whole pieces; devices are written in place. */
static void growing_files_keep_whole_pieces(void **state) {
    struct bench *bench = *state;
    char *file = arena_printf(bench->arena, "%s/out", bench->folder), large[8192] = {0};
    char *part = arena_printf(bench->arena, "%s.part", file);
    struct growing_file growing;
    struct rlimit before, small;
    assert_true(file_write_atomic(file, "old", 3, &bench->errors));
    assert_true(growing_file_open(&growing, file, &bench->errors));
    growing_file_add(&growing, "one\n", 4);
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    growing_file_add(&growing, large, sizeof large);
    growing_file_add(&growing, "two\n", 4); /* nothing behind what is missing */
    setrlimit(RLIMIT_FSIZE, &before);
    assert_false(growing_file_finish(&growing, &bench->errors));
    assert_string_equal(content_of(bench, file), "old");
    assert_string_equal(content_of(bench, part), "one\n");
    ASSERT_ERRORS(bench, arena_printf(bench->arena,
                                      "%s: cannot be written: File too large; what is finished lies in %s",
                                      file, part));
    assert_true(growing_file_open(&growing, "/dev/full", &bench->errors));
    growing_file_add(&growing, "x", 1);
    assert_false(growing_file_finish(&growing, &bench->errors));
    ASSERT_ERRORS(bench, "/dev/full: cannot be written: No space left on device");
    assert_false(growing_file_open(&growing, "/nowhere/out", &bench->errors));
    ASSERT_ERRORS(bench, "/nowhere/out: cannot be written: No such file or directory");
    assert_false(growing_file_open(&growing, bench->folder, &bench->errors));
    ASSERT_ERRORS(bench, arena_printf(bench->arena, "%s: cannot be written: Is a directory", bench->folder));
}

static void same_files_are_known(void **state) {
    struct bench *bench = *state;
    char *folder = bench->folder;
#define HERE(name) arena_printf(bench->arena, "%s/" name, folder)
    assert_true(file_write_atomic(HERE("a"), "x", 1, &bench->errors));
    assert_true(file_write_atomic(HERE("b"), "x", 1, &bench->errors));
    assert_int_equal(link(HERE("a"), HERE("hard")), 0);
    assert_int_equal(symlink("a", HERE("soft")), 0);
    assert_int_equal(symlink(".", HERE("folder")), 0);
    assert_true(is_same_file(HERE("a"), HERE("a")));
    assert_true(is_same_file(HERE("a"), HERE("hard")));
    assert_true(is_same_file(HERE("a"), HERE("soft")));
    assert_true(is_same_file(HERE("a"), HERE("folder/./a")));
    assert_false(is_same_file(HERE("a"), HERE("b")));
    assert_false(is_same_file(HERE("a"), HERE("none")));
    /* Files that are not there yet. */
    assert_true(is_same_file(HERE("new"), HERE("folder/new")));
    assert_true(is_same_file(HERE("new"), HERE("folder//./folder/new")));
    assert_true(is_same_file(HERE("x/y/z"), HERE("folder/x/./y/../y/z")));
    assert_true(is_same_file("no-such-file-here", "./no-such-file-here"));
    assert_true(is_same_file("/no/../no/file", "/no/file"));
    assert_true(is_same_file("/../../no", "/no"));
    assert_false(is_same_file(HERE("x/y/z"), HERE("x/z")));
    assert_false(is_same_file(HERE("new"), HERE("newer")));
    assert_true(is_same_file("", ""));
    assert_false(is_same_file("/dev/null", "/dev/null")); /* a device is nobody's alone */
#undef HERE
}

static void paths_beside(void **state) {
    struct bench *bench = *state;
    assert_string_equal(path_beside(bench->arena, "e/a.json", "m/b.json"), "e/m/b.json");
    assert_string_equal(path_beside(bench->arena, "e/a.json", "/m/b.json"), "/m/b.json");
    assert_string_equal(path_beside(bench->arena, "a.json", "b.json"), "b.json");
    assert_string_equal(path_beside(bench->arena, "/a.json", "b.json"), "/b.json");
    assert_string_equal(path_beside(bench->arena, NULL, "b.json"), "b.json");
}

/* ---- loops ------------------------------------------------------------------------------------------- */

struct tally {
    int runs[1000];
    int last;
    volatile int stop;
};

static void count_run(void *context, int i) {
    struct tally *tally = context;
    __atomic_fetch_add(&tally->runs[i], 1, __ATOMIC_RELAXED);
    if (i == 99) __atomic_store_n(&tally->stop, tally->last, __ATOMIC_RELAXED);
}

static void loops_run_each_index_once(void **state) {
    (void)state;
    static const int jobs[] = {-1, 0, 1, 2, 7, 2000};
    for (size_t j = 0; j < COUNT(jobs); j++) {
        struct tally tally = {0};
        parallel_for(1000, jobs[j] > 64 ? 64 : jobs[j], count_run, &tally, &tally.stop);
        for (int i = 0; i < 1000; i++) assert_int_equal(tally.runs[i], 1);
    }
    struct tally none = {0};
    parallel_for(0, 4, count_run, &none, NULL);
    parallel_for(3, 100, count_run, &none, NULL);
    assert_int_equal(none.runs[0] + none.runs[1] + none.runs[2] + none.runs[3], 3);
}

static void loops_stop_when_told(void **state) {
    (void)state;
    struct tally tally = {.last = 1};
    parallel_for(1000, 1, count_run, &tally, &tally.stop);
    assert_int_equal(tally.runs[99], 1);
    assert_int_equal(tally.runs[100], 0);
}

static void append_index(void *context, int i) {
    int *sequence = context;
    assert_int_equal(sequence[0]++, i);
}

static void one_job_runs_in_order(void **state) {
    (void)state;
    int next = 0;
    parallel_for(50, 1, append_index, &next, NULL);
    assert_int_equal(next, 50);
    assert_true(processor_count() >= 1);
    double start = seconds_now();
    assert_true(seconds_now() >= start);
}

static char *progress_lines(struct bench *bench, double age, double quiet, int done, int total) {
    char *file = arena_printf(bench->arena, "%s/err", bench->folder);
    fflush(stderr);
    int kept = dup(STDERR_FILENO);
    assert_non_null(freopen(file, "w", stderr));
    struct progress progress = progress_begin("points", total);
    progress.began -= age;
    progress.shown -= quiet;
    progress_show(&progress, done);
    progress_show(&progress, done); /* too soon for another line */
    progress_clear(&progress);
    fflush(stderr);
    dup2(kept, STDERR_FILENO);
    close(kept);
    return content_of(bench, file);
}

/* Off a terminal: a line each half minute, of long work each tenth of the time gone by, none at the end. */
static void progress_is_a_line_now_and_then(void **state) {
    struct bench *bench = *state;
    assert_string_equal(progress_lines(bench, 0, 0, 3, 10), "");
    assert_string_equal(progress_lines(bench, 25, 25, 3, 10), "");
    assert_string_equal(progress_lines(bench, 60, 60, 3, 10),
                        "disagmoe: points: 3 of 10 (30 %) after 1 min 00 s, about 2 min 20 s left\n");
    assert_string_equal(progress_lines(bench, 60, 60, 10, 10), "");
    assert_string_equal(progress_lines(bench, 60, 60, 0, 10), "");
    assert_string_equal(progress_lines(bench, 7200, 700, 1, 3), "");
    assert_string_equal(progress_lines(bench, 7200, 730, 1, 3),
                        "disagmoe: points: 1 of 3 (33 %) after 2 h 00 min, about 4 h 00 min left\n");
}

static void durations_read_well(void **state) {
    (void)state;
    static const struct {
        double seconds;
        const char *text;
    } cases[] = {{0, "0 s"},           {0.4, "0 s"},           {59.4, "59 s"},
                 {59.6, "1 min 00 s"}, {61, "1 min 01 s"},     {3599, "59 min 59 s"},
                 {3600, "1 h 00 min"}, {36061, "10 h 01 min"}, {1e30, "277777777777 h 46 min"}};
    char buffer[32];
    for (size_t i = 0; i < COUNT(cases); i++)
        assert_string_equal(duration_text(cases[i].seconds, buffer), cases[i].text);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

/* ---- pulse ------------------------------------------------------------------------------------------- */

struct patient {
    struct pulse *pulse;
    int orders, answers; /* pipes' ends: a byte is a kind; an answer to each when it is so */
};

/* Does what it is told: works (a while, then no more), or waits. */
static void *be_watched(void *argument) {
    const struct patient *patient = argument;
    char order;
    while (read(patient->orders, &order, 1) == 1) {
        struct timespec until, now;
        pulse_set(patient->pulse, 2, (enum pulse_kind)order, "thread %d", 2);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &until);
        do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        while (now.tv_sec == until.tv_sec && now.tv_nsec < until.tv_nsec + 1000 * 1000);
        if (write(patient->answers, &order, 1) != 1) break;
    }
    return NULL;
}

static void tell(int orders, int answers, enum pulse_kind kind) {
    char order = (char)kind, answer;
    assert_int_equal(write(orders, &order, 1), 1);
    assert_int_equal(read(answers, &answer, 1), 1);
}

/* Waits until the thread sleeps in its pipe: then it has no processor time any more. */
static uint64_t life_at_rest(struct pulse *pulse) {
    uint64_t before, life = pulse_read(pulse).life;
    const struct timespec nap = {.tv_nsec = 20 * 1000 * 1000};
    do {
        before = life;
        nanosleep(&nap, NULL);
        life = pulse_read(pulse).life;
    } while (life != before);
    return life;
}

static void pulse_goes_on_with_work(void **state) {
    (void)state;
    int orders[2], answers[2];
    assert_true(pipe(orders) == 0 && pipe(answers) == 0);
    struct patient patient = {pulse_new(), orders[0], answers[1]};
    pthread_t thread;
    assert_true(pulse_read(patient.pulse).waits);
    assert_string_equal(pulse_read(patient.pulse).text, "");
    assert_int_equal(pthread_create(&thread, NULL, be_watched, &patient), 0);
    tell(orders[1], answers[0], PULSE_WORK);
    assert_false(pulse_read(patient.pulse).waits);
    assert_string_equal(pulse_read(patient.pulse).text, "thread 2");
    uint64_t life = life_at_rest(patient.pulse);
    pulse_set(patient.pulse, 0, PULSE_WAIT, "the main one"); /* a thread that does something else is a sign */
    uint64_t next = life_at_rest(patient.pulse);
    assert_true(next != life);
    assert_string_equal(pulse_read(patient.pulse).text, "thread 2"); /* who works tells more */
    tell(orders[1], answers[0], PULSE_WAIT);
    assert_true(pulse_read(patient.pulse).waits);
    assert_string_equal(pulse_read(patient.pulse).text, "the main one"); /* it has waited longer */
    tell(orders[1], answers[0], PULSE_WORK);
    life = life_at_rest(patient.pulse);
    tell(orders[1], answers[0], PULSE_WORK); /* a millisecond of work */
    assert_true(life_at_rest(patient.pulse) >= life + 1000 * 1000);
    close(orders[1]);
    pthread_join(thread, NULL);
    /* A thread that has ended has no time of its own, once the kernel has put it away: a moment after the
     * join. */
    const struct timespec nap = {.tv_nsec = 10 * 1000 * 1000};
    for (int i = 0; i < 1000 && pulse_read(patient.pulse).life >= life; i++) nanosleep(&nap, NULL);
    assert_true(pulse_read(patient.pulse).life < life);
    close(orders[0]), close(answers[0]), close(answers[1]);
    pulse_free(patient.pulse);
    pulse_set(NULL, 0, PULSE_WORK, "nobody looks");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(arena_gives_zeroed_aligned_separate_memory),
        TEST(errors_leave_out_missing_parts_and_repeats),
        TEST(errors_are_printed_one_a_line),
        TEST(errors_are_bounded),
        TEST(wrong_texts_are_refused_with_their_place),
        TEST(half_a_pair_and_zero_bytes_are_refused),
        TEST(sound_texts_are_read),
        TEST(nesting_is_bounded),
        TEST(files_that_cannot_be_read_are_named),
        TEST(many_keys_cost_no_square),
        TEST(fields_are_read_and_defaults_kept),
        TEST(every_wrong_field_is_told_at_once),
        TEST(numbers_are_checked),
        TEST(unbounded_numbers_may_be_negative),
        TEST(what_is_found_is_shortened),
        TEST(members_and_elements_know_their_path),
        TEST(dotted_paths_set_and_get),
        TEST(values_print_as_they_were),
        TEST(mutated_texts_never_crash),
        TEST(every_cut_of_a_text_is_refused),
        TEST(numbers_print_shortest),
        TEST(any_double_reads_back),
        TEST(words_of_a_choice),
        TEST(rng_matches_its_reference),
        TEST(rng_below_is_even),
        TEST(rng_normal_has_its_moments),
        TEST(rng_normal_is_box_muller),
        TEST(atomic_write_replaces),
        TEST(full_disk_keeps_the_old_content),
        TEST(unwritable_places_are_named),
        TEST(folders_are_made),
        TEST(writable_places_are_known),
        TEST(paths_beside),
        TEST(growing_files_replace_when_whole),
        TEST(growing_files_keep_whole_pieces),
        TEST(same_files_are_known),
        TEST(loops_run_each_index_once),
        TEST(loops_stop_when_told),
        TEST(one_job_runs_in_order),
        TEST(pulse_goes_on_with_work),
        TEST(progress_is_a_line_now_and_then),
        TEST(durations_read_well),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
