/* Option parsing and manifest loading, shared by the verbs. */
#include "cli/cli.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

volatile int interrupted = 0;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

void catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt,
                               .sa_flags = (int)SA_RESETHAND}; /* a second one ends it */
    sigaction(SIGINT, &action, NULL);
}

static void usage_error(const struct verb *verb, const char *what, const char *which) {
    fprintf(stderr, "disagmoe: %s: %s %s; see 'disagmoe %s --help'\n", verb->name, what, which, verb->name);
}

static bool take_number(const char *text, int *number) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || end == text || value < 1 || value > 1 << 20) return false;
    *number = (int)value;
    return true;
}

/* Ends the path where the value begins: arguments may be written to. */
static bool take_override(const struct verb *verb, struct options *options, char *text) {
    char *equals = strchr(text, '=');
    if (!equals || equals == text) {
        usage_error(verb, "--set takes path=value, found", text);
        return false;
    }
    if (options->override_count == MAX_OVERRIDES) {
        usage_error(verb, "too many of", "--set");
        return false;
    }
    *equals = '\0';
    options->overrides[options->override_count++] = (struct override){text, equals + 1};
    return true;
}

static bool take_value(const struct verb *verb, const struct option_rule *rule, const char *value) {
    if (rule->text) *rule->text = value;
    if (rule->number && !take_number(value, rule->number)) {
        usage_error(verb, "a whole number from 1 on is needed, found", value);
        return false;
    }
    return true;
}

static void print_help(const struct verb *verb) {
    printf("usage: disagmoe %s %s\n%s\n%s%s", verb->name, verb->usage, verb->summary, *verb->help ? "\n" : "",
           verb->help);
}

/* --name VALUE or --name=VALUE: the value, or NULL when there is none. */
static char *value_of(char **argv, int argc, int *i, size_t name_length) {
    if (argv[*i][name_length] == '=') return argv[*i] + name_length + 1;
    return *i + 1 < argc ? argv[++*i] : NULL;
}

bool parse_options(const struct verb *verb, int argc, char **argv, const struct option_rule *rules,
                   int rule_count, struct options *options, const char **positional, bool *helped) {
    *helped = false;
    for (int i = 0; i < argc; i++) {
        const char *argument = argv[i];
        if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) {
            print_help(verb);
            return *helped = true;
        }
        if (argument[0] != '-' || !argument[1]) {
            if (!positional || *positional) {
                usage_error(verb, "unexpected argument", argument);
                return false;
            }
            *positional = argument;
            continue;
        }
        size_t length = strcspn(argument, "=");
        const struct option_rule *rule = NULL;
        for (int k = 0; k < rule_count; k++)
            if (strlen(rules[k].name) == length && strncmp(rules[k].name, argument, length) == 0)
                rule = &rules[k];
        bool set = length == 5 && strncmp(argument, "--set", 5) == 0;
        if (!rule && !(set && options)) {
            usage_error(verb, "unknown option", argument);
            return false;
        }
        if (rule && rule->flag) {
            *rule->flag = true;
            continue;
        }
        char *value = value_of(argv, argc, &i, length);
        if (!value) {
            usage_error(verb, "a value is missing behind", argument);
            return false;
        }
        if (rule ? !take_value(verb, rule, value) : !take_override(verb, options, value)) return false;
    }
    return true;
}

static void check_system(const char *name, const char *file, const char *path, struct errors *errors) {
    if (system_named(name)) return;
    struct text known = {0};
    int count;
    const struct system *const *systems = systems_all(&count);
    for (int i = 0; i < count; i++) text_add(&known, "%s%s", i ? ", " : "", systems[i]->name);
    errors_add(errors, file, path, "found \"%s\"; registered systems are %s", name, known.text);
    free(known.text);
}

void add_point_errors(const struct options *options, const struct point *point, const struct system *system,
                      const struct errors *found, struct errors *errors) {
    for (int i = 0; i < found->count; i++)
        errors_add(errors, options->manifest, NULL, "%s%s%s: %s", point->label, *point->label ? ": " : "",
                   system->name, found->messages[i]);
}

void print_json_line(cJSON *object, FILE *stream) {
    char *text = cJSON_PrintUnformatted(object);
    fprintf(stream, "%s\n", text);
    cJSON_free(text);
    cJSON_Delete(object);
}

bool is_missing(const struct verb *verb, const char *text, const char *what) {
    if (!text)
        fprintf(stderr, "disagmoe: %s: %s is needed; see 'disagmoe %s --help'\n", verb->name, what,
                verb->name);
    return !text;
}

bool load_experiment(const struct options *options, struct experiment *experiment, struct errors *errors) {
    int before = errors->count;
    experiment_read(options->manifest, options->overrides, options->override_count, experiment, errors);
    if (options->system) check_system(options->system, NULL, "--system", errors);
    for (int i = 0; i < experiment->point_count; i++) {
        struct point *point = &experiment->points[i];
        if (options->system) {
            point->systems = arena_alloc(experiment->arena, sizeof *point->systems);
            point->systems[0] = options->system;
            point->system_count = 1;
            continue;
        }
        for (int k = 0; k < point->system_count; k++)
            check_system(point->systems[k], options->manifest, "systems", errors);
    }
    return errors->count == before;
}
