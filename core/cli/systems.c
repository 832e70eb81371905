/* disagmoe systems: every registered system. */
#include "cli/cli.h"

static const struct {
    enum executor executor;
    const char *name;
} executor_names[] = {{EXECUTOR_SIMULATOR, "sim"},
                      {EXECUTOR_CPU, "cpu"},
                      {EXECUTOR_CUDA, "cuda"},
                      {EXECUTOR_EMULATION, "emulate"}};

static void print_json(const struct system *system) {
    cJSON *object = cJSON_CreateObject(), *executors = cJSON_AddArrayToObject(object, "executors");
    for (size_t i = 0; i < COUNT(executor_names); i++)
        if (system->executors & executor_names[i].executor)
            cJSON_AddItemToArray(executors, cJSON_CreateString(executor_names[i].name));
    cJSON_AddStringToObject(object, "name", system->name);
    cJSON_AddStringToObject(object, "title", system->title);
    cJSON_AddStringToObject(object, "paper", system->paper);
    print_json_line(object, stdout);
}

static void print_text(const struct system *system) {
    printf("%s\n  %s\n  paper: %s\n  executors:", system->name, system->title, system->paper);
    for (size_t i = 0; i < COUNT(executor_names); i++)
        if (system->executors & executor_names[i].executor) printf(" %s", executor_names[i].name);
    printf("\n");
}

static int run(int argc, char **argv) {
    bool json = false, helped;
    const struct option_rule rules[] = {{"--json", NULL, NULL, &json}};
    if (!parse_options(&verb_systems, argc, argv, rules, COUNT(rules), NULL, NULL, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    int count;
    const struct system *const *systems = systems_all(&count);
    for (int i = 0; i < count; i++) (json ? print_json : print_text)(systems[i]);
    return STATUS_DONE;
}

const struct verb verb_systems = {
    .name = "systems",
    .usage = "[--json]",
    .summary = "every registered system: what it is, its paper, its executors",
    .help = "  --json     one object a line\n",
    .run = run,
};
