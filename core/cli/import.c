/* disagmoe import: a HuggingFace config.json becomes a model manifest. */
#include "cli/cli.h"

#include <stdlib.h>

static int run(int argc, char **argv) {
    const char *file = NULL, *output = NULL;
    bool helped;
    const struct option_rule rules[] = {{"--output", &output, NULL, NULL}};
    if (!parse_options(&verb_import, argc, argv, rules, COUNT(rules), NULL, &file, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (is_missing(&verb_import, file, "a config.json")) return STATUS_USAGE;
    if (output && is_same_file(file, output)) {
        fprintf(stderr, "disagmoe: import: --output: found %s, the file that is read; any other is allowed\n",
                output);
        return STATUS_USAGE;
    }
    struct errors errors = {0};
    struct arena *arena = arena_new();
    struct model model = {0};
    struct json config = json_read_file(file, arena, &errors);
    int status = STATUS_USAGE;
    if (config.node && model_import(config, &model)) {
        cJSON *manifest = model_write(&model);
        char *text = cJSON_Print(manifest);
        struct text whole = {0};
        text_add(&whole, "%s\n", text);
        status = STATUS_DONE;
        if (!output)
            fputs(whole.text, stdout);
        else if (!file_write_atomic(output, whole.text, whole.length, &errors))
            status = STATUS_FAILED;
        free(whole.text);
        cJSON_free(text);
        cJSON_Delete(manifest);
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    cJSON_Delete(config.node);
    arena_free(arena);
    return status;
}

const struct verb verb_import = {
    .name = "import",
    .usage = "FILE [--output MODEL.json]",
    .summary = "a HuggingFace config.json becomes a model manifest",
    .help = "  --output FILE  write there instead of to standard output\n"
            "Families: Qwen3-MoE, GPT-OSS, DeepSeek-MoE, Mixtral. An absent key has what its configuration\n"
            "class takes for it; what changes the mathematics and cannot be represented is refused.\n",
    .run = run,
};
