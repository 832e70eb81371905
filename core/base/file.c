/*
Files: writing one whole or not at all, one that grows while a run goes on, paths beside another, folders.

The temporary file stands beside its target, because only within one file system is a rename atomic. A target
that exists and is no regular file (/dev/stdout, a pipe) is written in place: to replace it would be wrong.
*/
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool write_all(int descriptor, const char *data, size_t bytes) {
    while (bytes > 0) {
        ssize_t written = write(descriptor, data, bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return false;
        data += written;
        bytes -= (size_t)written;
    }
    return true;
}

/* Pipes and terminals know no fsync: EINVAL and EROFS say so and are no failure. */
static bool write_and_close(int descriptor, const void *data, size_t bytes) {
    bool done =
        write_all(descriptor, data, bytes) && (fsync(descriptor) == 0 || errno == EINVAL || errno == EROFS);
    int reason = errno;
    if (close(descriptor) != 0 && done) return false;
    errno = reason;
    return done;
}

/* Makes the rename itself last; a file system that cannot is none we could do more about. */
static void sync_folder_of(const char *file) {
    const char *slash = strrchr(file, '/');
    char *folder = must_alloc(strlen(file) + 2);
    memcpy(folder, slash ? file : ".", slash ? (size_t)(slash - file) + 1 : 1);
    int descriptor = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor >= 0) {
        fsync(descriptor);
        close(descriptor);
    }
    free(folder);
}

/* A new file beside the target, its name left in temporary (room for 48 bytes beyond the target's). */
static int open_temporary(const char *target, char *temporary, size_t room) {
    int descriptor = -1;
    for (int i = 0; i < 1000; i++) {
        snprintf(temporary, room, "%s.%ld-%d.tmp", target, (long)getpid(), i);
        descriptor = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (descriptor >= 0 || errno != EEXIST) break;
    }
    return descriptor;
}

static bool write_beside(const char *target, const void *data, size_t bytes) {
    size_t room = strlen(target) + 48;
    char *temporary = must_alloc(room);
    int descriptor = open_temporary(target, temporary, room), reason = 0;
    bool done = descriptor >= 0;
    if (done) {
        done = write_and_close(descriptor, data, bytes) && rename(temporary, target) == 0;
        reason = errno;
        if (done)
            sync_folder_of(target);
        else
            unlink(temporary);
        errno = reason;
    }
    reason = errno;
    free(temporary);
    errno = reason;
    return done;
}

bool file_write_atomic(const char *file, const void *data, size_t bytes, struct errors *errors) {
    struct stat status;
    bool done = false;
    if (stat(file, &status) == 0 && S_ISDIR(status.st_mode)) {
        errno = EISDIR;
    } else if (stat(file, &status) == 0 && !S_ISREG(status.st_mode)) {
        int descriptor = open(file, O_WRONLY | O_CLOEXEC);
        done = descriptor >= 0 && write_and_close(descriptor, data, bytes);
    } else {
        char *resolved = realpath(file, NULL); /* so that a link goes on pointing to the file */
        done = write_beside(resolved ? resolved : file, data, bytes);
        int reason = errno;
        free(resolved);
        errno = reason;
    }
    if (!done) errors_add(errors, file, NULL, "cannot be written: %s", strerror(errno));
    return done;
}

/* ---- files that grow --------------------------------------------------------------------------------- */

/* A part of its own: what an earlier run left there, or one beside this one writes, stays as it is. */
static bool open_part(struct growing_file *file) {
    size_t room = strlen(file->target) + 32;
    file->part = must_alloc(room);
    for (int i = 1; i < 10000 && file->descriptor < 0; i++) {
        snprintf(file->part, room, i > 1 ? "%s.part%d" : "%s.part", file->target, i);
        file->descriptor = open(file->part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->descriptor < 0 && errno != EEXIST) break;
    }
    return file->descriptor >= 0;
}

static void forget(struct growing_file *file) {
    if (file->descriptor >= 0) close(file->descriptor);
    free(file->target);
    free(file->part);
    *file = (struct growing_file){.descriptor = -1};
}

bool growing_file_open(struct growing_file *file, const char *name, struct errors *errors) {
    struct stat status;
    bool link = lstat(name, &status) == 0 && S_ISLNK(status.st_mode);
    bool there = stat(name, &status) == 0, open_now;
    char *resolved = link ? realpath(name, NULL) : NULL; /* so that a link goes on pointing to the file */
    *file = (struct growing_file){.name = name, .descriptor = -1};
    file->target = resolved ? resolved : strcpy(must_alloc(strlen(name) + 1), name);
    if (there && !S_ISDIR(status.st_mode) && !S_ISREG(status.st_mode)) {
        file->descriptor = open(name, O_WRONLY | O_CLOEXEC);
        open_now = file->descriptor >= 0;
    } else if (there && S_ISDIR(status.st_mode)) {
        errno = EISDIR;
        open_now = false;
    } else {
        open_now = open_part(file);
    }
    if (!open_now) {
        errors_add(errors, name, NULL, "cannot be written: %s", strerror(errno));
        forget(file);
    }
    return open_now;
}

void growing_file_add(struct growing_file *file, const char *data, size_t bytes) {
    if (!file->name || file->failure) return;
    if (write_all(file->descriptor, data, bytes)) {
        file->length += bytes;
        return;
    }
    file->failure = errno;
    if (file->part && ftruncate(file->descriptor, (off_t)file->length) != 0) file->failure = errno;
}

bool growing_file_finish(struct growing_file *file, struct errors *errors) {
    if (!file->name) return true;
    int reason = file->failure;
    if (!reason && !write_and_close(file->descriptor, NULL, 0)) reason = errno;
    if (!file->failure) file->descriptor = -1;
    if (!reason && file->part && rename(file->part, file->target) != 0) reason = errno;
    bool left = reason && file->part && file->length;
    if (reason)
        errors_add(errors, file->name, NULL, "cannot be written: %s%s%s", strerror(reason),
                   left ? "; what is finished lies in " : "", left ? file->part : "");
    if (reason && file->part && !left) unlink(file->part);
    if (!reason && file->part) sync_folder_of(file->target);
    forget(file);
    return reason == 0;
}

void growing_file_leave(struct growing_file *file, bool keep) {
    if (!file->name) return;
    if (file->part && !keep) unlink(file->part);
    forget(file);
}

/* ---- paths ------------------------------------------------------------------------------------------- */

/* Appends a path to a resolved one. */
static void walk(struct text *whole, const char *rest) {
    while (*rest) {
        size_t part = strcspn(rest, "/");
        char *last = whole->length ? strrchr(whole->text, '/') : NULL;
        if (part == 2 && strncmp(rest, "..", 2) == 0 && last)
            whole->length = (size_t)(last - whole->text), *last = '\0';
        else if (part && !(part == 1 && *rest == '.'))
            text_add(whole, "/%.*s", (int)part, rest);
        rest += part + (rest[part] == '/');
    }
}

/* The path from the root, links resolved as far as it leads to something; the caller frees it. */
static char *resolve(const char *path) {
    char *front = strcpy(must_alloc(strlen(path) + 1), path), *found = NULL;
    size_t end = strlen(front);
    while (end > 0 && !(found = realpath(front, NULL))) {
        while (end > 0 && front[end - 1] != '/') end--;
        while (end > 0 && front[end - 1] == '/') end--;
        front[end] = '\0';
    }
    if (!found) found = realpath(path[0] == '/' ? "/" : ".", NULL);
    struct text whole = {0};
    text_add(&whole, "%s", found && strcmp(found, "/") != 0 ? found : "");
    walk(&whole, path + end);
    free(found);
    free(front);
    return whole.text;
}

bool is_same_file(const char *a, const char *b) {
    struct stat first, second;
    bool there = stat(a, &first) == 0, also = stat(b, &second) == 0;
    if (there && also)
        return first.st_dev == second.st_dev && first.st_ino == second.st_ino && !S_ISCHR(first.st_mode);
    if (there || also) return false;
    char *x = resolve(a), *y = resolve(b);
    bool same = strcmp(x, y) == 0;
    free(x);
    free(y);
    return same;
}

const char *path_beside(struct arena *arena, const char *base, const char *file) {
    const char *slash = base ? strrchr(base, '/') : NULL;
    if (file[0] == '/' || !slash) return arena_strdup(arena, file);
    return arena_printf(arena, "%.*s/%s", (int)(slash - base), base, file);
}

bool make_folder_of(const char *file, struct errors *errors) {
    char *folder = strcpy(must_alloc(strlen(file) + 1), file);
    bool done = true;
    for (char *slash = strchr(folder + (folder[0] == '/'), '/'); slash && done;
         slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int reason = mkdir(folder, 0777) == 0 ? 0 : errno;
        struct stat status;
        done = reason == 0 || (stat(folder, &status) == 0 && S_ISDIR(status.st_mode));
        if (!done && reason == EEXIST)
            errors_add(errors, folder, NULL, "is no folder");
        else if (!done)
            errors_add(errors, folder, NULL, "the folder cannot be made: %s", strerror(reason));
        *slash = '/';
    }
    free(folder);
    return done;
}

/* 0, or errno: what would keep a new file from standing beside the target, or the target from being written.
 */
static int try_to_write(const char *file) {
    struct stat status;
    bool there = stat(file, &status) == 0;
    if (there && S_ISDIR(status.st_mode)) return EISDIR;
    if (there && !S_ISREG(status.st_mode)) return access(file, W_OK) == 0 ? 0 : errno;
    char *resolved = realpath(file, NULL);
    const char *target = resolved ? resolved : file;
    size_t room = strlen(target) + 48;
    char *temporary = must_alloc(room);
    int descriptor = open_temporary(target, temporary, room), reason = descriptor < 0 ? errno : 0;
    if (descriptor >= 0) unlink(temporary);
    if (descriptor >= 0) close(descriptor);
    free(temporary);
    free(resolved);
    return reason;
}

bool file_is_writable(const char *file, struct errors *errors) {
    if (!make_folder_of(file, errors)) return false;
    int reason = try_to_write(file);
    if (reason) errors_add(errors, file, NULL, "cannot be written: %s", strerror(reason));
    return !reason;
}
