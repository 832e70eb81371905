/*
The folder of a run's checkpoints: what is in the way is said before a run begins, and of any number of runs
only one has it, also when the one before was killed. Runs are child processes here.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "state/checkpoint.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[256], lock_file[300];

static int set_up(void **state) {
    (void)state;
    strcpy(folder, "/tmp/test_folder_XXXXXX");
    if (!mkdtemp(folder)) return 1;
    snprintf(lock_file, sizeof lock_file, "%s/.lock", folder);
    return 0;
}

static int entries(void) {
    DIR *stream = opendir(folder);
    int count = -2; /* . and .. */
    while (readdir(stream)) count++;
    closedir(stream);
    return count;
}

static int tear_down(void **state) {
    (void)state;
    unlink(lock_file);
    return rmdir(folder);
}

static void put(const char *file, const char *text) {
    FILE *stream = fopen(file, "w");
    assert_non_null(stream);
    fputs(text, stream);
    assert_int_equal(fclose(stream), 0);
}

static char *text_of_lock(void) {
    static char text[1024];
    FILE *stream = fopen(lock_file, "r");
    assert_non_null(stream);
    text[fread(text, 1, sizeof text - 1, stream)] = '\0';
    fclose(stream);
    return text;
}

/* ---- whether it can be written ----------------------------------------------------------------------- */

static void assert_unfit(const char *path, double bytes, const char *says) {
    struct errors errors = {0};
    assert_false(checkpoint_folder_check(path, bytes, &errors));
    assert_int_equal(errors.count, 1);
    if (!strstr(errors.messages[0], says)) fail_msg("%s: does not say '%s'", errors.messages[0], says);
    errors_free(&errors);
}

static void folders_are_made(void **state) {
    (void)state;
    char path[400];
    struct errors errors = {0};
    snprintf(path, sizeof path, "%s/a/b", folder);
    for (int i = 0; i < 2; i++) assert_true(checkpoint_folder_check(path, 1000, &errors));
    assert_int_equal(rmdir(path), 0); /* nothing is left in it */
    *strrchr(path, '/') = '\0';
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(entries(), 0);
}

static void what_is_in_the_way(void **state) {
    (void)state;
    char path[400];
    put(lock_file, "a file");
    assert_unfit(lock_file, 0, "is no folder");
    snprintf(path, sizeof path, "%s/below/it", lock_file);
    assert_unfit(path, 0, lock_file);
    assert_unfit("/proc", 0, "/proc: cannot be written");
    assert_unfit("/proc/a", 0, "/proc/a: the folder cannot be made");
    assert_unfit(folder, 1e18, "a checkpoint needs 1e+09 GB; the disk has");
    if (geteuid() == 0) return; /* may write anywhere */
    assert_int_equal(chmod(folder, 0500), 0);
    assert_unfit(folder, 0, "cannot be written: Permission denied");
    chmod(folder, 0700);
}

/* ---- whose it is ------------------------------------------------------------------------------------- */

static void assert_refused(const char *says, const char *also) {
    struct errors errors = {0};
    assert_null(folder_lock_take(folder, &errors));
    assert_int_equal(errors.count, 1);
    if (!strstr(errors.messages[0], says) || !strstr(errors.messages[0], also))
        fail_msg("%s: does not say '%s' and '%s'", errors.messages[0], says, also);
    errors_free(&errors);
}

static void assert_taken_and_released(void) {
    struct errors errors = {0};
    assert_true(folder_lock_is_free(folder, &errors));
    struct folder_lock *lock = folder_lock_take(folder, &errors);
    if (!lock) fail_msg("%s", errors.messages[0]);
    assert_false(folder_lock_is_free(folder, &errors));
    assert_string_equal(folder_lock_file(lock), lock_file);
    errors_free(&errors);
    folder_lock_release(lock);
    assert_int_equal(entries(), 0);
}

static void one_at_a_time(void **state) {
    (void)state;
    char own[64], host[256] = "", other[1024];
    struct errors errors = {0};
    assert_taken_and_released();
    struct folder_lock *lock = folder_lock_take(folder, &errors);
    assert_non_null(lock);
    gethostname(host, sizeof host - 1);
    snprintf(own, sizeof own, "process %ld on ", (long)getpid());
    assert_refused(own, host);
    /* removed by hand and taken by another: that one's stays */
    snprintf(other, sizeof other, "%s ", text_of_lock());
    put(lock_file, other);
    folder_lock_release(lock);
    assert_string_equal(text_of_lock(), other);
    unlink(lock_file);
    assert_taken_and_released();
    assert_null(folder_lock_take("/proc/a", &errors));
    assert_int_equal(errors.count, 1);
    errors_free(&errors);
}

/* A run of its own; its lock is taken when this returns. It ends when it is killed. */
static pid_t start_holder(void) {
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        struct errors errors = {0};
        if (!folder_lock_take(folder, &errors)) _exit(1);
        if (write(ready[1], "", 1) == 1) pause();
        _exit(1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return child;
}

static void killed_runs_leave_no_lock(void **state) {
    (void)state;
    char said[64];
    int status;
    pid_t child = start_holder();
    snprintf(said, sizeof said, "process %ld on ", (long)child);
    assert_refused(said, "since 2");
    kill(child, SIGSTOP); /* stopped is not gone */
    assert_refused(said, lock_file);
    kill(child, SIGKILL);
    siginfo_t dead; /* dead, and not yet collected */
    assert_int_equal(waitid(P_PID, (id_t)child, &dead, WEXITED | WNOWAIT), 0);
    assert_taken_and_released();
    assert_int_equal(waitpid(child, &status, 0), child);
    child = start_holder();
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_taken_and_released();
}

/* The lock's text with one value replaced. */
static void put_changed(const char *text, const char *key, cJSON *value) {
    cJSON *object = cJSON_Parse(text);
    assert_true(cJSON_HasObjectItem(object, key));
    cJSON_ReplaceItemInObjectCaseSensitive(object, key, value);
    char *changed = cJSON_PrintUnformatted(object);
    put(lock_file, changed);
    cJSON_free(changed);
    cJSON_Delete(object);
}

static void processes_are_told_apart(void **state) {
    (void)state;
    char text[1024];
    struct errors errors = {0};
    struct folder_lock *lock = folder_lock_take(folder, &errors);
    assert_non_null(lock);
    snprintf(text, sizeof text, "%s", text_of_lock());
    folder_lock_release(lock);
    put(lock_file, text);
    assert_refused("in use by another run", "process");
    put_changed(text, "start", json_number(1)); /* this process has the number of one that is gone */
    assert_taken_and_released();
    put_changed(text, "boot", cJSON_CreateString("another")); /* this host was started again */
    assert_taken_and_released();
    put_changed(text, "pid", json_number(1 << 29));
    assert_taken_and_released();
    put_changed(text, "host", cJSON_CreateString("elsewhere")); /* not seen from here: it may be alive */
    assert_refused("on elsewhere since", lock_file);
    put_changed(text, "space", cJSON_CreateString("pid:[1]"));
    assert_refused("in use by another run", "process");
    for (int i = 0; i < 2; i++) {
        put(lock_file, i ? "{\"host\":\"cut" : "");
        assert_true(folder_lock_is_free(folder, &errors)); /* perhaps: taking it shows */
        assert_refused(lock_file, "does not say which run");
    }
}

/* Of many that begin at the same moment one gets the folder, whether it was free or left behind. */
static void one_of_many(void **state) {
    (void)state;
    enum { MANY = 12, ROUNDS = 20 };
    for (int round = 0; round < ROUNDS; round++) {
        int go[2], said[2], end[2], winners = 0, status;
        char byte;
        assert_true(pipe(go) == 0 && pipe(said) == 0 && pipe(end) == 0);
        if (round % 2) {
            pid_t child = start_holder();
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
        }
        for (int i = 0; i < MANY; i++) {
            pid_t child = fork();
            assert_true(child >= 0);
            if (child > 0) continue;
            struct errors errors = {0};
            close(go[1]), close(end[1]);
            if (read(go[0], &byte, 1) != 0) _exit(1);
            struct folder_lock *lock = folder_lock_take(folder, &errors);
            if (write(said[1], lock ? "w" : "l", 1) != 1 || read(end[0], &byte, 1) != 0) _exit(1);
            folder_lock_release(lock);
            _exit(0);
        }
        close(go[1]);
        for (int i = 0; i < MANY; i++) {
            assert_int_equal(read(said[0], &byte, 1), 1);
            winners += byte == 'w';
        }
        close(end[1]);
        for (int i = 0; i < MANY; i++) {
            wait(&status);
            assert_int_equal(status, 0);
        }
        close(go[0]), close(said[0]), close(said[1]), close(end[0]);
        assert_int_equal(winners, 1);
        assert_int_equal(entries(), 0);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(folders_are_made),          TEST(what_is_in_the_way),       TEST(one_at_a_time),
        TEST(killed_runs_leave_no_lock), TEST(processes_are_told_apart), TEST(one_of_many),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
