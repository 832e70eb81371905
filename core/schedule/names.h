/*
Words for the numbers of a schedule, for the files of this folder that print them. The words stand once, in
the
*_CHOICES of schedule.h, so that what is printed is what a reader accepts.
*/
#ifndef SCHEDULE_NAMES_H
#define SCHEDULE_NAMES_H

#include "schedule/schedule.h"

#include <string.h>

#define WORD_SIZE 16

/* Word number `index` of "a|b|c"; "?" when there is none. */
static inline const char *word_of(const char *choices, int index, char word[WORD_SIZE]) {
    while (index > 0 && choices != NULL) {
        choices = strchr(choices, '|');
        if (choices != NULL) choices++;
        index--;
    }
    if (index < 0 || choices == NULL) choices = "?";
    snprintf(word, WORD_SIZE, "%.*s", (int)strcspn(choices, "|"), choices);
    return word;
}

static inline const char *group_name(const struct schedule *schedule, int group) {
    const char *name = schedule->groups[group].name;
    return name != NULL ? name : "?";
}

/* The text as a JSON string with its quotes; free() it. */
static inline char *quoted(const char *text) {
    cJSON *node = cJSON_CreateString(text);
    char *result = node != NULL ? cJSON_PrintUnformatted(node) : NULL;
    cJSON_Delete(node);
    if (result != NULL) return result;
    /* Only memory can be short here: must_alloc says so and ends the process. */
    result = must_alloc(3);
    memcpy(result, "\"\"", 3);
    return result;
}

#endif
