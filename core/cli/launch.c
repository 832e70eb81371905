/*
The launcher's side (mpirun as a child, its two pipes, how it ended) and a rank's side (board, signals).

mpirun ends the other ranks when one dies, and the launcher ends mpirun when it is told to end. Should that
not happen in time, the launcher ends the ranks it knows from the board itself: nothing may hang.
*/
#define _GNU_SOURCE /* execvpe, pipe2 */
#include "cli/launch.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define BOARD_VARIABLE "DISAGMOE_BOARD"
#define RUN_VARIABLE "DISAGMOE_RUN"

/* Seconds that mpirun has to end the ranks, and to start them: when it has reported an error, or anyway. */
#define END_PATIENCE 12
#define ERROR_PATIENCE 25
#define START_PATIENCE 120

/* Who speaks, and whether its runs are made of steps. */
static struct {
    const char *verb;
    bool has_steps;
} speaker = {"train", true};

void launch_as(const char *verb, bool has_steps) {
    speaker.verb = verb;
    speaker.has_steps = has_steps;
}

/* ---- the board --------------------------------------------------------------------------------------- */

struct slot {
    int32_t pid;   /* 0: not there yet, or on another machine */
    int32_t ended; /* as it should, or by a signal that somebody sent to all */
    int64_t step;  /* −1: before the first */
    uint64_t host; /* whose process it is: folders may be shared between machines */
};

struct board {
    struct slot *slots;
    int ranks;
    char *file;
    bool unlinked;
};

static uint64_t this_host(void) {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return text_hash(name);
}

static struct slot *map_board(int descriptor, size_t bytes) {
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return map == MAP_FAILED ? NULL : map;
}

static bool make_board(struct board *board, int ranks) {
    const char *folder = getenv("TMPDIR");
    struct text file = {0};
    text_add(&file, "%s/disagmoe-XXXXXX", folder && *folder ? folder : "/tmp");
    size_t bytes = (size_t)ranks * sizeof *board->slots;
    int descriptor = mkstemp(file.text);
    *board = (struct board){.ranks = ranks, .file = file.text};
    if (descriptor >= 0 && ftruncate(descriptor, (off_t)bytes) == 0)
        board->slots = map_board(descriptor, bytes);
    if (!board->slots) fprintf(stderr, "disagmoe: %s: %s: %s\n", speaker.verb, file.text, strerror(errno));
    if (descriptor >= 0) close(descriptor);
    for (int rank = 0; board->slots && rank < ranks; rank++) board->slots[rank].step = -1;
    return board->slots != NULL;
}

static int32_t read_int(const int32_t *place) {
    return __atomic_load_n(place, __ATOMIC_RELAXED);
}

/* Once every rank has its map the name is of no use: nothing is left even of a launcher that is killed. */
static void unlink_when_joined(struct board *board) {
    for (int rank = 0; rank < board->ranks; rank++)
        if (!read_int(&board->slots[rank].pid)) return;
    if (!board->unlinked) unlink(board->file);
    board->unlinked = true;
}

static void drop_board(struct board *board) {
    if (board->slots) munmap(board->slots, (size_t)board->ranks * sizeof *board->slots);
    if (!board->unlinked) unlink(board->file);
    free(board->file);
}

/* A process id may have been given to another program since. */
static bool is_ours(pid_t pid) {
    char link[64], own[4096], other[4096];
    snprintf(link, sizeof link, "/proc/%d/exe", (int)pid);
    ssize_t length = readlink("/proc/self/exe", own, sizeof own);
    return length > 0 && readlink(link, other, sizeof other) == length &&
           memcmp(own, other, (size_t)length) == 0;
}

/* No longer there, or dead and only not yet collected by mpirun. */
static bool is_gone(pid_t pid) {
    char file[64], state = 0;
    if (kill(pid, 0) != 0 && errno == ESRCH) return true;
    snprintf(file, sizeof file, "/proc/%d/stat", (int)pid);
    FILE *stream = fopen(file, "r");
    if (!stream) return false;
    bool known = fscanf(stream, "%*d (%*[^)]) %c", &state) == 1;
    fclose(stream);
    return known && state == 'Z';
}

/* The first rank that was there, has not ended as it should and is gone; −1: none. */
static int lost_rank(const struct board *board) {
    for (int rank = 0; rank < board->ranks; rank++) {
        pid_t pid = read_int(&board->slots[rank].pid);
        bool here = board->slots[rank].host == this_host();
        if (pid && here && !read_int(&board->slots[rank].ended) && is_gone(pid)) return rank;
    }
    return -1;
}

static void kill_ranks(const struct board *board) {
    for (int rank = 0; rank < board->ranks; rank++) {
        pid_t pid = read_int(&board->slots[rank].pid);
        bool here = board->slots[rank].host == this_host();
        if (pid && here && kill(pid, 0) == 0 && is_ours(pid)) kill(pid, SIGKILL);
    }
}

/* ---- starting mpirun --------------------------------------------------------------------------------- */

struct child {
    pid_t pid;
    int out, err; /* reading ends of its pipes */
};

struct list {
    char **items;
    int count;
};

static void add(struct list *list, char *item) {
    list->items = must_realloc(list->items, (size_t)(list->count + 1) * sizeof *list->items);
    list->items[list->count++] = item;
}

static struct list command(struct arena *arena, const struct launch *launch) {
    static const char *const options[] = {
        "--oversubscribe", "--bind-to", "none",       "--mca", "mpi_yield_when_idle", "1", "-x",
        BOARD_VARIABLE,    "-x",        RUN_VARIABLE, "-x",    "OPENBLAS_NUM_THREADS"};
    struct list list = {0};
    char self[4096];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    self[length > 0 ? length : 0] = '\0';
    add(&list, "mpirun");
    add(&list, "-n");
    add(&list, arena_printf(arena, "%d", launch->ranks));
    for (size_t i = 0; i < COUNT(options); i++) add(&list, (char *)options[i]);
    add(&list, arena_strdup(arena, self));
    for (int i = 0; launch->arguments[i]; i++) add(&list, launch->arguments[i]);
    add(&list, NULL);
    return list;
}

/* Ours with what the ranks need; later ones would lose against earlier ones, so those are left out. */
static struct list environment(struct arena *arena, const struct launch *launch, const char *board) {
    char *const set[] = {arena_printf(arena, BOARD_VARIABLE "=%s", board),
                         arena_printf(arena, RUN_VARIABLE "=%d", launch->run),
                         "OPENBLAS_NUM_THREADS=1", /* a rank computes on one thread */
                         "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
    size_t used = geteuid() == 0 ? COUNT(set) : COUNT(set) - 2;
    struct list list = {0};
    for (char **variable = environ; *variable; variable++) {
        bool replaced = false;
        for (size_t i = 0; i < used; i++)
            replaced |= strncmp(*variable, set[i], strcspn(set[i], "=") + 1) == 0;
        if (!replaced) add(&list, *variable);
    }
    for (size_t i = 0; i < used; i++) add(&list, set[i]);
    add(&list, NULL);
    return list;
}

/* In the child: a group of its own, so that Ctrl-C reaches it once, through the launcher; and it ends when
   the launcher is gone. Only calls that are safe behind fork. */
static void become(struct list arguments, struct list variables, int out, int err, int failed) {
    int null = open("/dev/null", O_RDONLY);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    dup2(null, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    execvpe("mpirun", arguments.items, variables.items);
    int reason = errno;
    if (write(failed, &reason, sizeof reason) < 0) _exit(126);
    _exit(127);
}

static void report_start(int reason) {
    if (reason == ENOENT)
        fprintf(stderr,
                "disagmoe: %s: mpirun is not installed; apt-get install openmpi-bin libopenmpi-dev "
                "provides it\n",
                speaker.verb);
    else
        fprintf(stderr, "disagmoe: %s: mpirun cannot be started: %s\n", speaker.verb, strerror(reason));
}

static bool start(const struct launch *launch, const struct board *board, struct child *child) {
    struct arena *arena = arena_new();
    struct list arguments = command(arena, launch), variables = environment(arena, launch, board->file);
    int out[2] = {-1, -1}, err[2] = {-1, -1}, failed[2] = {-1, -1}, reason = 0;
    child->pid = -1;
    if (pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0 && pipe2(failed, O_CLOEXEC) == 0)
        child->pid = fork();
    if (child->pid == 0) become(arguments, variables, out[1], err[1], failed[1]);
    if (child->pid < 0) reason = errno;
    close(out[1]);
    close(err[1]);
    close(failed[1]);
    ssize_t got = -1;
    if (child->pid > 0) do
            got = read(failed[0], &reason, sizeof reason);
        while (got < 0 && errno == EINTR);
    if (got > 0) waitpid(child->pid, NULL, 0);
    close(failed[0]);
    *child = (struct child){child->pid, out[0], err[0]};
    if (reason) {
        report_start(reason);
        close(out[0]);
        close(err[0]);
    }
    free(arguments.items);
    free(variables.items);
    arena_free(arena);
    return reason == 0;
}

/* ---- what it prints ---------------------------------------------------------------------------------- */

struct listener {
    struct text line; /* of stderr, until its end has come */
    struct text held; /* Open MPI's own lines */
    bool banner;      /* between its rows of dashes */
    bool error;       /* one of its lines is an error */
    bool given_up;    /* the ranks did not start in time */
    bool explained;   /* a line of ours has been passed on */
    int lost;         /* the first rank found gone; −1: none */
    int rank, signal; /* that mpirun says was killed; rank −1: none */
};

static bool is_rule(const char *line) {
    size_t length = strspn(line, "-");
    return length >= 40 && line[length] == '\0';
}

/* "[host:1234] …" and "[warn] …": Open MPI and its event library speaking for themselves. */
static bool is_runtime(const char *line) {
    static const char *const beginnings[] = {"mpirun: ", "*** ", "[warn]", "[err]"};
    for (size_t i = 0; i < COUNT(beginnings); i++)
        if (strncmp(line, beginnings[i], strlen(beginnings[i])) == 0) return true;
    const char *end = strchr(line, ']'), *colon = end ? memchr(line, ':', (size_t)(end - line)) : NULL;
    return line[0] == '[' && colon && (isdigit((unsigned char)colon[1]) || line[1] == '[');
}

static void pass_line(struct listener *listener, const char *line) {
    bool ours = strncmp(line, "disagmoe: ", 10) == 0, rule = is_rule(line);
    const char *killed = strstr(line, "noticed that process rank ");
    if (!ours && killed)
        sscanf(killed, "noticed that process rank %d with PID %*d on node %*s exited on signal %d",
               &listener->rank, &listener->signal);
    if (!ours && (rule || listener->banner || is_runtime(line))) {
        if (listener->held.length < 1 << 16) text_add(&listener->held, "%s\n", line);
    } else {
        fprintf(stderr, "%s\n", line);
    }
    listener->error |= !ours && (strstr(line, "ERROR") || strstr(line, "error occurred"));
    listener->explained |= ours && strncmp(line, LAUNCH_NOTE, strlen(LAUNCH_NOTE)) != 0;
    listener->banner ^= rule;
}

static void take_errors(struct listener *listener, const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] != '\n') {
            text_add(&listener->line, "%c", bytes[i] ? bytes[i] : ' ');
            continue;
        }
        pass_line(listener, listener->line.text ? listener->line.text : "");
        if (listener->line.text) *listener->line.text = '\0';
        listener->line.length = 0;
    }
}

/* Everything there is to read of one pipe; false at its end. */
static bool relay(int descriptor, struct listener *errors) {
    char bytes[4096];
    for (;;) {
        ssize_t count = read(descriptor, bytes, sizeof bytes);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            if (!errors) fflush(stdout);
            return count < 0 && errno == EAGAIN;
        }
        if (errors)
            take_errors(errors, bytes, (size_t)count);
        else
            fwrite(bytes, 1, (size_t)count, stdout); /* main says it when standard output cannot take it */
    }
}

/* ---- until it ends ----------------------------------------------------------------------------------- */

static volatile sig_atomic_t told_to_end; /* the signal's number */

static void on_end(int signal_number) {
    told_to_end = signal_number;
}

static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
struct handlers {
    struct sigaction old[COUNT(ending)];
};

static bool is_nohup(int signal_number) {
    struct sigaction now;
    return signal_number == SIGHUP && sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler == SIG_IGN;
}

static void catch_ends(struct handlers *handlers) {
    struct sigaction action = {.sa_handler = on_end};
    for (size_t i = 0; i < COUNT(ending); i++) {
        sigaction(ending[i], NULL, &handlers->old[i]);
        if (!is_nohup(ending[i])) sigaction(ending[i], &action, NULL);
    }
}

static void restore_ends(const struct handlers *handlers) {
    for (size_t i = 0; i < COUNT(ending); i++) sigaction(ending[i], &handlers->old[i], NULL);
}

/* Seconds from the start at which the run is given up if nothing changes; 0: never. */
static double deadline_of(const struct board *board, const struct listener *listener, double began) {
    for (int rank = 0; rank < board->ranks; rank++)
        if (read_int(&board->slots[rank].pid)) return 0;
    return began + (listener->error ? ERROR_PATIENCE : START_PATIENCE + board->ranks);
}

/* Until mpirun has ended: its status as waitpid gives it. */
static int follow(const struct child *child, struct board *board, struct listener *listener) {
    struct pollfd pipes[] = {{.fd = child->out, .events = POLLIN}, {.fd = child->err, .events = POLLIN}};
    bool told = false;
    double deadline = 0, began = seconds_now();
    int status;
    fcntl(child->out, F_SETFL, O_NONBLOCK);
    fcntl(child->err, F_SETFL, O_NONBLOCK);
    for (;;) {
        bool ended = waitpid(child->pid, &status, WNOHANG) == child->pid;
        if (pipes[0].fd >= 0 && !relay(pipes[0].fd, NULL)) pipes[0].fd = -1; /* poll passes over it */
        if (pipes[1].fd >= 0 && !relay(pipes[1].fd, listener)) pipes[1].fd = -1;
        if (ended) return status;
        if (told_to_end && !told) kill(child->pid, SIGTERM);
        told |= told_to_end != 0;
        if (listener->lost < 0) listener->lost = lost_rank(board);
        if (!deadline && (told || listener->lost >= 0)) deadline = seconds_now() + END_PATIENCE;
        double latest = deadline ? deadline : deadline_of(board, listener, began);
        if (latest && seconds_now() > latest) {
            listener->given_up = !deadline;
            kill_ranks(board);
            kill(child->pid, SIGKILL);
        }
        unlink_when_joined(board);
        poll(pipes, COUNT(pipes), 100);
    }
}

/* ---- how it ended ------------------------------------------------------------------------------------ */

/* The step of a checkpoint's folder, step-00000100, or −1. */
static long long step_of(const char *name) {
    long long step;
    int end = 0;
    return sscanf(name, "step-%lld%n", &step, &end) == 1 && name[end] == '\0' ? step : -1;
}

/* "; resume with …", as far as there is something to resume from. */
static void add_advice(struct text *message, const char *folder) {
    long long latest = -1;
    char name[64] = "";
    DIR *entries = folder ? opendir(folder) : NULL;
    for (struct dirent *entry; entries && (entry = readdir(entries));)
        if (step_of(entry->d_name) > latest) {
            latest = step_of(entry->d_name);
            snprintf(name, sizeof name, "%.60s", entry->d_name);
        }
    if (entries) closedir(entries);
    if (latest >= 0)
        text_add(message, "; resume with --resume %s (latest checkpoint: %s)", folder, name);
    else
        text_add(message, folder ? "; there is no checkpoint yet in %s" : "; no checkpoints were asked for",
                 folder);
}

static void add_step(struct text *message, int64_t step) {
    if (step < 0)
        text_add(message, " before the first step");
    else
        text_add(message, " in step %lld", (long long)step);
}

static int64_t latest_step(const struct board *board) {
    int64_t latest = -1;
    for (int rank = 0; rank < board->ranks; rank++)
        if (board->slots[rank].step > latest) latest = board->slots[rank].step;
    return latest;
}

/* rank −1: it is not known which was the first. */
static void say_how_it_ended(const struct launch *launch, const struct board *board,
                             const struct listener *listener, int rank) {
    struct text message = {0};
    if (listener->given_up) {
        fprintf(stderr, "disagmoe: %s: mpirun did not start the ranks in time\n", speaker.verb);
        return;
    }
    if (told_to_end)
        text_add(&message, "ended by signal %d", (int)told_to_end);
    else if (rank >= 0 && rank == listener->rank)
        text_add(&message, "rank %d was killed by signal %d", rank, listener->signal);
    else if (rank >= 0)
        text_add(&message, "rank %d ended without a word", rank);
    else
        text_add(&message, "mpirun was killed");
    if (speaker.has_steps) {
        add_step(&message, rank >= 0 && !told_to_end ? board->slots[rank].step : latest_step(board));
        add_advice(&message, launch->checkpoints);
    }
    fprintf(stderr, "disagmoe: %s: %s\n", speaker.verb, message.text);
    free(message.text);
}

/* mpirun ends with the first rank's status that is not 0, and with 128 + the signal of a rank killed. */
static enum launch_end judge(const struct launch *launch, const struct board *board,
                             const struct listener *listener, int status) {
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == 0 && !told_to_end) return LAUNCH_DONE;
    bool killed = listener->rank >= 0 && listener->rank < board->ranks;
    int rank = killed                             ? listener->rank
               : listener->explained || code == 2 ? -1
               : listener->lost >= 0              ? listener->lost
                                                  : lost_rank(board);
    bool plain = told_to_end || (code < 0 && !listener->given_up) ||
                 (killed && (listener->signal == SIGKILL || listener->signal == SIGTERM));
    if (listener->held.text && !plain && (killed || !listener->explained)) fputs(listener->held.text, stderr);
    if (told_to_end || code < 0 || rank >= 0) {
        say_how_it_ended(launch, board, listener, rank);
        return LAUNCH_CUT;
    }
    if (!listener->explained)
        fprintf(stderr, "disagmoe: %s: the run failed: mpirun ended with status %d\n", speaker.verb, code);
    return code == 2 ? LAUNCH_USAGE : LAUNCH_FAILED;
}

enum launch_end launch_ranks(const struct launch *launch) {
    struct board board;
    struct child child;
    struct listener listener = {.rank = -1, .lost = -1};
    struct handlers handlers;
    enum launch_end end = LAUNCH_CUT;
    if (make_board(&board, launch->ranks)) {
        told_to_end = 0;
        catch_ends(&handlers);
        if (start(launch, &board, &child)) {
            int status = follow(&child, &board, &listener);
            if (listener.line.length) pass_line(&listener, listener.line.text);
            close(child.out);
            close(child.err);
            end = judge(launch, &board, &listener, status);
            kill_ranks(&board);
        }
        restore_ends(&handlers);
    }
    drop_board(&board);
    free(listener.line.text);
    free(listener.held.text);
    return end;
}

/* ---- a rank ------------------------------------------------------------------------------------------ */

bool launch_inside(void) {
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMIX_RANK") || getenv("PMI_RANK");
}

bool launch_is_stray(void) {
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS");
    return !launch_inside() && getenv("SLURM_STEP_ID") && tasks && atoi(tasks) > 1;
}

int launch_run(void) {
    const char *run = getenv(RUN_VARIABLE);
    return run ? atoi(run) : -1;
}

/* What the handler needs: it may only read this, write a line and end. */
static struct {
    struct slot *slot, alone; /* its place on the board, or alone */
    char line[96];            /* "disagmoe: train: rank 3: ended by signal " */
    size_t length;
    bool says;
    const char *held; /* file to remove */
} self;

static size_t add_digits(char *out, int64_t number) {
    char digits[24];
    size_t count = 0;
    do digits[count++] = (char)('0' + number % 10);
    while (number /= 10);
    for (size_t i = 0; i < count; i++) out[i] = digits[count - 1 - i];
    return count;
}

static void on_signal(int signal_number) {
    static const char in[] = " in step ", before[] = " before the first step";
    int64_t step = __atomic_load_n(&self.slot->step, __ATOMIC_RELAXED);
    const char *held = __atomic_load_n(&self.held, __ATOMIC_RELAXED);
    __atomic_store_n(&self.slot->ended, 1, __ATOMIC_RELAXED);
    if (held) unlink(held);
    if (self.says) {
        char line[160];
        size_t length = self.length;
        memcpy(line, self.line, length);
        length += add_digits(line + length, signal_number);
        const char *where = step < 0 ? before : in;
        size_t more = !speaker.has_steps ? 0 : step < 0 ? sizeof before - 1 : sizeof in - 1;
        memcpy(line + length, where, more);
        length += more;
        if (step >= 0 && speaker.has_steps) length += add_digits(line + length, step);
        line[length++] = '\n';
        if (write(STDERR_FILENO, line, length) < 0) _exit(1);
    }
    _exit(1);
}

static struct slot *find_slot(int rank) {
    const char *file = getenv(BOARD_VARIABLE);
    int descriptor = file ? open(file, O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0) return NULL; /* on another machine there is none */
    off_t bytes = lseek(descriptor, 0, SEEK_END);
    struct slot *slots =
        (size_t)bytes >= (size_t)(rank + 1) * sizeof *slots ? map_board(descriptor, (size_t)bytes) : NULL;
    close(descriptor);
    return slots ? &slots[rank] : NULL;
}

void launch_join(int rank) {
    struct slot *found = find_slot(rank);
    self.alone.step = -1;
    self.slot = found ? found : &self.alone;
    self.slot->host = this_host();
    __atomic_store_n(&self.slot->pid, (int32_t)getpid(), __ATOMIC_RELEASE);
    self.says = launch_run() < 0 && rank < 2;
    self.length = (size_t)snprintf(self.line, sizeof self.line, "disagmoe: %s: rank %d: ended by signal ",
                                   speaker.verb, rank);
    struct sigaction end = {.sa_handler = on_signal}, ignore = {.sa_handler = SIG_IGN};
    for (size_t i = 0; i < COUNT(ending); i++)
        if (ending[i] != SIGPIPE && !is_nohup(ending[i])) sigaction(ending[i], &end, NULL);
    sigaction(SIGXFSZ, &ignore, NULL);
}

void launch_step(int64_t step) {
    __atomic_store_n(&self.slot->step, step, __ATOMIC_RELAXED);
}

int64_t launch_current_step(void) {
    return __atomic_load_n(&self.slot->step, __ATOMIC_RELAXED);
}

void launch_hold(const char *file) {
    __atomic_store_n(&self.held, file, __ATOMIC_RELAXED);
}

/* mpirun ends the slower ranks of a failed run: they are ending, so that is no news. */
void launch_leave(void) {
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    for (size_t i = 0; i < COUNT(ending); i++)
        if (ending[i] != SIGPIPE) sigaction(ending[i], &ignore, NULL);
    __atomic_store_n(&self.slot->ended, 1, __ATOMIC_RELAXED);
}
