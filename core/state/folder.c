/*
The folder that a run writes checkpoints to: whether it can, and that no other run does.

The lock is a file that only its maker can create (O_EXCL, which network file systems keep to as well) and
that says who that is. It is no lock of the operating system: those end with their process, but not on every
network file system, and tell nobody who holds them. What a killed run leaves behind is found to be stale
where its process could be seen: on the same host, in the same space of process numbers. The same number given
to a later process is told apart by its start, a restart of the host by its boot.

Of several runs that find one stale lock, only one may remove it: the one that creates a second file, named
after that very lock, looks again, and then removes both. So a new lock is never taken for the old one.
*/
#define _GNU_SOURCE /* gethostname */
#include "state/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define LOCK_NAME ".lock"
enum { TRIES = 40, PAUSE_MS = 50, MOST_BYTES = 4096 };

struct folder_lock {
    char *file;
    char *text; /* what it holds */
};

/* ---- whether it can be written ---------------------------------------------------------------------------
 */

static bool make_probe(const char *folder, struct errors *errors) {
    struct text probe = {0};
    text_add(&probe, "%s/.probe-XXXXXX", folder);
    int descriptor = mkstemp(probe.text);
    if (descriptor < 0) errors_add(errors, folder, NULL, "cannot be written: %s", strerror(errno));
    if (descriptor >= 0) unlink(probe.text);
    if (descriptor >= 0) close(descriptor);
    free(probe.text);
    return descriptor >= 0;
}

bool checkpoint_folder_check(const char *folder, double bytes, struct errors *errors) {
    struct statvfs disk;
    struct text inside = {0};
    text_add(&inside, "%s/%s", folder, LOCK_NAME);
    bool sound = make_folder_of(inside.text, errors) && make_probe(folder, errors);
    free(inside.text);
    if (!sound || statvfs(folder, &disk) != 0 || !disk.f_blocks) return sound; /* not known: it is tried */
    double room = (double)disk.f_bavail * (double)disk.f_frsize;
    if (room >= bytes) return true;
    errors_add(errors, folder, NULL, "a checkpoint needs %.3g GB; the disk has %.3g GB left", bytes / 1e9,
               room / 1e9);
    return false;
}

/* ---- who ---------------------------------------------------------------------------------------------- */

/* A process, as the lock's file has it. Texts are in the arena. */
struct holder {
    const char *host, *boot, *space; /* boot: of the host; space: of process numbers */
    double pid, start;               /* start: clock ticks since the boot */
    const char *since;               /* for people */
};

static const char *line_of(struct arena *arena, const char *file) {
    char line[128] = "";
    FILE *stream = fopen(file, "r");
    if (stream && !fgets(line, sizeof line, stream)) line[0] = '\0';
    if (stream) fclose(stream);
    line[strcspn(line, "\n")] = '\0';
    return arena_strdup(arena, line);
}

/* Of its stat file, behind its name, which may hold anything, the 3rd field and the 22nd; −1: there is no
   such process, or only its remains. */
static double start_of(pid_t pid) {
    char file[64], text[1024], state;
    unsigned long long start;
    snprintf(file, sizeof file, "/proc/%ld/stat", (long)pid);
    FILE *stream = fopen(file, "r");
    size_t length = stream ? fread(text, 1, sizeof text - 1, stream) : 0;
    if (stream) fclose(stream);
    text[length] = '\0';
    const char *name_end = strrchr(text, ')');
    const char *fields = ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
    bool found = name_end && sscanf(name_end, fields, &state, &start) == 2;
    return found && state != 'Z' && state != 'X' ? (double)start : -1;
}

static struct holder this_process(struct arena *arena) {
    char host[256] = "", space[64] = "", since[32];
    time_t now = time(NULL);
    struct tm utc;
    gethostname(host, sizeof host - 1);
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = '\0';
    strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S UTC", gmtime_r(&now, &utc));
    return (struct holder){.host = arena_strdup(arena, host),
                           .boot = line_of(arena, "/proc/sys/kernel/random/boot_id"),
                           .space = arena_strdup(arena, space),
                           .pid = (double)getpid(),
                           .start = start_of(getpid()),
                           .since = arena_strdup(arena, since)};
}

static char *text_of(const struct holder *holder) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "host", holder->host);
    json_add_number(object, "pid", holder->pid);
    cJSON_AddStringToObject(object, "since", holder->since);
    json_add_number(object, "start", holder->start);
    cJSON_AddStringToObject(object, "boot", holder->boot);
    cJSON_AddStringToObject(object, "space", holder->space);
    char *text = cJSON_PrintUnformatted(object);
    cJSON_Delete(object);
    return text;
}

static bool read_holder(struct arena *arena, const char *file, const char *text, struct holder *holder) {
    static const struct json_field fields[] = {
        {"host", JSON_TEXT, offsetof(struct holder, host), true, 0, 0, NULL},
        {"pid", JSON_REAL, offsetof(struct holder, pid), true, 1, 1 << 30, NULL},
        {"since", JSON_TEXT, offsetof(struct holder, since), true, 0, 0, NULL},
        {"start", JSON_REAL, offsetof(struct holder, start), true, 0, 0, NULL},
        {"boot", JSON_TEXT, offsetof(struct holder, boot), true, 0, 0, NULL},
        {"space", JSON_TEXT, offsetof(struct holder, space), true, 0, 0, NULL}};
    struct errors ignored = {0};
    struct json document = json_read_text(text, strlen(text), file, arena, &ignored);
    bool sound = document.node && json_read_fields(document, fields, COUNT(fields), holder);
    cJSON_Delete(document.node);
    errors_free(&ignored);
    return sound;
}

/* Whether it is known to be gone: what cannot be seen from here may be running. */
static bool is_gone(const struct holder *holder, const struct holder *here) {
    if (strcmp(holder->host, here->host) != 0) return false;
    if (strcmp(holder->boot, here->boot) != 0) return true;
    if (strcmp(holder->space, here->space) != 0) return false;
    double self = start_of(getpid());
    return self >= 0 && start_of((pid_t)holder->pid) != holder->start; /* without /proc nothing is known */
}

/* ---- the file ----------------------------------------------------------------------------------------- */

/* Its text, at most MOST_BYTES; "" where nothing is in it; NULL with errno set where there is no file. */
static char *read_lock(const char *file) {
    FILE *stream = fopen(file, "r");
    if (!stream) return NULL;
    char *text = must_alloc(MOST_BYTES + 1);
    text[fread(text, 1, MOST_BYTES, stream)] = '\0';
    fclose(stream);
    return text;
}

/* False with errno set: EEXIST where another one has it. What could not be written whole is removed. */
static bool create_lock(const char *file, const char *text) {
    int descriptor = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) return false;
    ssize_t length = (ssize_t)strlen(text);
    errno = ENOSPC;
    bool written = write(descriptor, text, (size_t)length) == length;
    int reason = errno;
    if (close(descriptor) != 0 && written) {
        written = false;
        reason = errno;
    }
    if (!written) unlink(file);
    errno = reason;
    return written;
}

static void pause_a_little(void) {
    struct timespec pause = {.tv_nsec = PAUSE_MS * 1000 * 1000};
    nanosleep(&pause, NULL);
}

/* Removes the lock with this text, or waits for another run that is about to. */
static void remove_stale(const char *file, const char *stale) {
    struct text guard = {0};
    text_add(&guard, "%s-%016llx", file, (unsigned long long)text_hash(stale));
    if (create_lock(guard.text, stale)) {
        char *now = read_lock(file);
        if (now && strcmp(now, stale) == 0) unlink(file);
        free(now);
        unlink(guard.text);
    } else {
        pause_a_little();
    }
    free(guard.text);
}

/* ---- taking it ---------------------------------------------------------------------------------------- */

enum state_of_lock { LOCK_FREE, LOCK_STALE, LOCK_HELD, LOCK_UNCLEAR };

/* Whose it is; *text (for the caller to free) what it holds. LOCK_UNCLEAR: it may be just being written. */
static enum state_of_lock look(struct arena *arena, const char *file, struct holder *holder, char **text) {
    struct holder here = this_process(arena);
    *text = read_lock(file);
    if (!*text) return errno == ENOENT || errno == ENOTDIR ? LOCK_FREE : LOCK_UNCLEAR;
    if (!read_holder(arena, file, *text, holder)) return LOCK_UNCLEAR;
    return is_gone(holder, &here) ? LOCK_STALE : LOCK_HELD;
}

static void say_held(const char *folder, const char *file, enum state_of_lock state,
                     const struct holder *holder, struct errors *errors) {
    if (state == LOCK_HELD)
        errors_add(
            errors, folder, NULL,
            "is in use by another run: process %.0f on %s since %s; allowed is one run at a time (if it "
            "is gone, remove %s)",
            holder->pid, holder->host, holder->since, file);
    else if (state == LOCK_STALE)
        errors_add(errors, file, NULL,
                   "is of a run that is gone and could not be removed; remove it, and %s-* beside it", file);
    else
        errors_add(errors, file, NULL,
                   "does not say which run uses the folder; if there is none, remove this file");
}

static struct folder_lock *lock_new(char *file, char *text) {
    struct folder_lock *lock = must_alloc(sizeof *lock);
    *lock = (struct folder_lock){file, text};
    return lock;
}

struct folder_lock *folder_lock_take(const char *folder, struct errors *errors) {
    struct arena *arena = arena_new();
    struct holder mine = this_process(arena), other = {0};
    struct text file = {0};
    char *text = text_of(&mine);
    enum state_of_lock state = LOCK_FREE;
    text_add(&file, "%s/%s", folder, LOCK_NAME);
    bool taken = false, failed = false;
    for (int i = 0; i < TRIES && !taken && !failed && state != LOCK_HELD; i++) {
        taken = create_lock(file.text, text);
        failed = !taken && errno != EEXIST;
        if (failed) errors_add(errors, file.text, NULL, "cannot be written: %s", strerror(errno));
        if (taken || failed) break;
        char *found;
        state = look(arena, file.text, &other, &found);
        if (state == LOCK_STALE) remove_stale(file.text, found);
        if (state == LOCK_UNCLEAR) pause_a_little();
        free(found);
    }
    if (!taken && !failed) say_held(folder, file.text, state, &other, errors);
    arena_free(arena);
    if (taken) return lock_new(file.text, text);
    free(file.text);
    free(text);
    return NULL;
}

bool folder_lock_is_free(const char *folder, struct errors *errors) {
    struct arena *arena = arena_new();
    struct holder other;
    struct text file = {0};
    char *found;
    text_add(&file, "%s/%s", folder, LOCK_NAME);
    enum state_of_lock state = look(arena, file.text, &other, &found);
    if (state == LOCK_HELD) say_held(folder, file.text, state, &other, errors);
    free(found);
    free(file.text);
    arena_free(arena);
    return state != LOCK_HELD;
}

const char *folder_lock_file(const struct folder_lock *lock) {
    return lock->file;
}

void folder_lock_release(struct folder_lock *lock) {
    if (!lock) return;
    char *now = read_lock(lock->file);
    if (now && strcmp(now, lock->text) == 0) unlink(lock->file);
    free(now);
    free(lock->file);
    free(lock->text);
    free(lock);
}
