/* Option parsing and manifest loading, shared by the verbs. */
#include "cli/cli.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

volatile int interrupted = 0;

static const int ends[] = {SIGINT, SIGTERM, SIGHUP};

static void on_interrupt(int signal_number) {
    const struct sigaction at_once = {.sa_handler = SIG_DFL};
    (void)signal_number;
    interrupted = 1;
    for (size_t i = 0; i < COUNT(ends); i++) sigaction(ends[i], &at_once, NULL);
}

void catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART}, old;
    for (size_t i = 0; i < COUNT(ends); i++) {
        sigaction(ends[i], NULL, &old);
        bool nohup = ends[i] == SIGHUP && old.sa_handler == SIG_IGN;
        if (!nohup) sigaction(ends[i], &action, NULL);
    }
}

static void usage_error(const struct verb *verb, const char *what, const char *which) {
    fprintf(stderr, "disagmoe: %s: %s %s; see 'disagmoe %s --help'\n", verb->name, what, which, verb->name);
}

#define MOST (1 << 30)

static bool take_number(const char *text, int *number) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || !isdigit((unsigned char)*text) || value < 1 || value > MOST) return false;
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
    if (!rule->number || take_number(value, rule->number)) return true;
    fprintf(stderr, "disagmoe: %s: %s: found %s; a whole number from 1 to %d is needed\n", verb->name,
            rule->name, value, MOST);
    return false;
}

static void print_help(const struct verb *verb) {
    printf("usage: disagmoe %s %s\n%s\n%s%s", verb->name, verb->usage, verb->summary, *verb->help ? "\n" : "",
           verb->help);
}

/* --name VALUE or --name=VALUE: the value, or NULL when there is none. The next option is none. */
static char *value_of(char **argv, int argc, int *i, size_t name_length) {
    if (argv[*i][name_length] == '=') return argv[*i] + name_length + 1;
    return *i + 1 < argc && strncmp(argv[*i + 1], "--", 2) != 0 ? argv[++*i] : NULL;
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
            if (argument[length]) usage_error(verb, "no value is allowed:", argument);
            if (argument[length]) return false;
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

const char *bytes_text(double bytes, char *buffer) {
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB"};
    size_t unit = 0;
    for (; bytes >= 999.5 && unit + 1 < COUNT(units); unit++) bytes /= 1000;
    snprintf(buffer, 16, unit && bytes < 9.95 ? "%.1f %s" : "%.0f %s", fmin(bytes, 1e9), units[unit]);
    return buffer;
}

/* ---- experiments ------------------------------------------------------------------------------------- */

/* Leaves one system to a point: the variant the manifest has for it, or the point itself. */
static void keep_system(struct experiment *experiment, struct point *point, const char *name) {
    struct point **variant = arena_alloc(experiment->arena, sizeof *variant);
    *variant = point;
    for (int k = 0; k < point->system_count; k++)
        if (strcmp(point->systems[k], name) == 0) *variant = point->variants[k];
    point->systems = arena_alloc(experiment->arena, sizeof *point->systems);
    point->systems[0] = name;
    point->system_count = 1;
    point->variants = variant;
}

bool load_experiment(const struct options *options, struct experiment *experiment, struct errors *errors) {
    int before = errors->count;
    experiment_read(options->manifest, options->overrides, options->override_count, experiment, errors);
    if (options->system) check_system(options->system, NULL, "--system", errors);
    for (int i = 0; i < experiment->point_count; i++) {
        struct point *point = &experiment->points[i];
        if (options->system)
            keep_system(experiment, point, options->system);
        else
            for (int k = 0; k < point->system_count; k++)
                check_system(point->systems[k], options->manifest, "systems", errors);
    }
    return errors->count == before;
}

/* ---- outputs ----------------------------------------------------------------------------------------- */

static void check_input(const struct output *output, const char *input, struct errors *errors) {
    if (is_same_file(output->file, input))
        errors_add(errors, NULL, output->option, "found %s, which is read as %s; another file is needed",
                   output->file, input);
}

/* Files that a point names and that are no part of the manifest. */
static void check_point_inputs(const struct output *output, const struct experiment *experiment,
                               const struct point *point, struct errors *errors) {
    const char *routing = point->routing.text, *data = point->training.data;
    if (strncmp(routing, "file:", 5) == 0)
        check_input(output, path_beside(experiment->arena, experiment->file, routing + 5), errors);
    if (strcmp(data, "markov") != 0) check_input(output, data, errors);
}

void check_outputs(const struct output *outputs, int count, const struct experiment *experiment,
                   struct errors *errors) {
    for (int i = 0; i < count; i++) {
        if (!outputs[i].file) continue;
        for (int k = 0; k < i; k++)
            if (outputs[k].file && is_same_file(outputs[i].file, outputs[k].file))
                errors_add(errors, NULL, outputs[i].option,
                           "found %s, the file of %s; another file is needed", outputs[i].file,
                           outputs[k].option);
        for (int k = 0; k < experiment->file_count; k++)
            check_input(&outputs[i], experiment->files[k], errors);
        for (int p = 0; p < experiment->point_count; p++)
            for (int k = 0; k < experiment->points[p].system_count; k++)
                check_point_inputs(&outputs[i], experiment, experiment->points[p].variants[k], errors);
    }
}
