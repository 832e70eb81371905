/* Every system of the suite by name. A new one adds its file and a line here. */
#include "baselines/baselines.h"
#include "disagmoe/disagmoe.h"

#include <string.h>

static const struct system *const systems[] = {&megatron, &disagmoe};

const struct system *const *systems_all(int *count) {
    *count = COUNT(systems);
    return systems;
}

const struct system *system_named(const char *name) {
    for (size_t i = 0; i < COUNT(systems); i++)
        if (strcmp(systems[i]->name, name) == 0) return systems[i];
    return NULL;
}
