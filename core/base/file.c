/*
Files: writing one whole or not at all, paths beside another, folders.

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

/* "a/b" → "a/", "b" → "."; free(result). */
static char *folder_of(const char *file) {
    const char *slash = strrchr(file, '/');
    char *folder = must_alloc(strlen(file) + 2);
    memcpy(folder, slash ? file : ".", slash ? (size_t)(slash - file) + 1 : 1);
    return folder;
}

/* Makes the rename itself last; a file system that cannot is none we could do more about. */
static void sync_folder_of(const char *file) {
    char *folder = folder_of(file);
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

const char *path_beside(struct arena *arena, const char *base, const char *file) {
    const char *slash = base ? strrchr(base, '/') : NULL;
    if (file[0] == '/' || !slash) return arena_strdup(arena, file);
    return arena_printf(arena, "%.*s/%s", (int)(slash - base), base, file);
}

static bool stat_folder_of(const char *file, struct stat *status) {
    char *folder = folder_of(file);
    bool done = stat(folder, status) == 0;
    free(folder);
    return done;
}

bool files_are_one(const char *a, const char *b) {
    struct stat first, second;
    bool is_there = stat(a, &first) == 0, other_is_there = stat(b, &second) == 0;
    if (is_there != other_is_there) return false;
    if (is_there && !S_ISREG(first.st_mode)) return false;
    if (!is_there) {
        const char *name = strrchr(a, '/'), *other_name = strrchr(b, '/');
        if (strcmp(name ? name + 1 : a, other_name ? other_name + 1 : b) != 0) return false;
        if (!stat_folder_of(a, &first) || !stat_folder_of(b, &second)) return strcmp(a, b) == 0;
    }
    return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
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
