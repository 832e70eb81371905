/*
Checkpoints: what is written comes back, bit for bit, under the same layout and under any other; what is
damaged is found before anything is changed; a write that fails or is killed leaves the previous checkpoint as
it was.

Each test starts mpirun on this program again, with the case and a folder of its own in the environment. Cases
make the states of real plans without training: every element's value follows from its parameter's name, its
part (values, moments) and its place, so that what was read is known without asking another rank. A case uses
as many of the ranks as its plan has.
*/
#define _GNU_SOURCE /* unshare, nftw */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "sim/sim.h"
#include "state/state.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

static int world_rank;
static const char *folder; /* of this case */

#define CHECK(condition) check(condition, #condition, __LINE__)
static void check(bool holds, const char *condition, int line) {
    if (holds) return;
    fprintf(stderr, "rank %d: %s:%d: %s is false\n", world_rank, __FILE__, line, condition);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* ---- states of plans --------------------------------------------------------------------------------- */

struct setting {
    const char *system;
    int gpus;
    const char *parallel, *memory;
    int expert_hidden;
    const char *head; /* NULL: last-ffn */
};

struct run {
    struct experiment experiment;
    struct plan plan;
    struct schedule *schedule;
    struct arena *arena;
    struct ranks ranks;
    struct rope rope;
    MPI_Comm comm;
    struct state *state; /* NULL on ranks that the plan does not have */
};

/* Tied embeddings, dense layer, shared experts and biases: every kind of parameter, and experts that do not
   divide evenly. */
static char *manifest_of(struct setting setting) {
    struct errors errors = {0};
    struct arena *arena = arena_new();
    struct json cluster = json_read_file("experiments/clusters/h800-16x8.json", arena, &errors);
    CHECK(cluster.node);
    json_set_path(cluster.node, "nodes", json_number(1));
    json_set_path(cluster.node, "gpus_per_node", json_number(setting.gpus));
    json_set_path(cluster.node, "nics_per_node", json_number(setting.gpus));
    char *printed = cJSON_PrintUnformatted(cluster.node);
    struct text text = {0};
    text_add(
        &text,
        "{\"model\":{\"name\":\"tiny\",\"layers\":3,\"hidden\":12,\"vocab\":17,\"tie_embeddings\":true,"
        "\"attention\":{\"heads\":4,\"kv_heads\":2,\"head_dim\":6,\"qk_norm\":true,\"bias\":true},"
        "\"moe\":{\"experts\":7,\"top_k\":2,\"expert_hidden\":%d,\"shared_experts\":1,\"dense_layers\":1,"
        "\"dense_hidden\":9,\"bias\":true}},\"cluster\":%s,\"systems\":[\"%s\"],\"seq_len\":8,"
        "\"micro_batches\":4,\"placement\":\"mixed-nodes\",\"parallel\":{%s},\"memory\":{%s},\"head\":\"%"
        "s\"}",
        setting.expert_hidden ? setting.expert_hidden : 5, printed, setting.system, setting.parallel,
        setting.memory, setting.head ? setting.head : "last-ffn");
    cJSON_free(printed);
    cJSON_Delete(cluster.node);
    arena_free(arena);
    return text.text;
}

static void no_errors(const struct errors *errors) {
    errors_print(errors, stderr);
    CHECK(errors->count == 0);
}

static struct run *run_open(struct setting setting) {
    struct run *run = must_alloc(sizeof *run);
    struct errors errors = {0};
    char *manifest = manifest_of(setting);
    experiment_read_text(manifest, "experiments/test.json", &run->experiment, &errors);
    no_errors(&errors);
    free(manifest);
    const struct system *system = system_named(setting.system);
    bool feasible = false;
    tune_point(system, &run->experiment.points[0], &run->plan, &feasible, &errors);
    no_errors(&errors);
    CHECK(feasible && run->plan.gpus == setting.gpus);
    run->schedule = system->build(&run->plan);
    run->arena = arena_new();
    ranks_read(&run->ranks, &run->plan, run->schedule, run->arena, &errors);
    no_errors(&errors);
    const struct model *model = run->plan.point->model;
    run->rope = rope_new(run->arena, 8, model->attention.head_dim, model->attention.rope_theta);
    bool mine = world_rank < run->ranks.count;
    MPI_Comm_split(MPI_COMM_WORLD, mine ? 0 : MPI_UNDEFINED, world_rank, &run->comm);
    if (mine) run->state = state_new(&run->ranks, world_rank, run->comm, &run->rope, 1);
    return run;
}

static void run_close(struct run *run) {
    state_free(run->state);
    if (run->comm != MPI_COMM_NULL) MPI_Comm_free(&run->comm);
    schedule_free(run->schedule);
    experiment_free(&run->experiment);
    arena_free(run->arena);
    free(run);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* ---- what elements hold ------------------------------------------------------------------------------ */

/* Of 24 bits; or, where it must survive BF16, of 8. salt: another content for each checkpoint. */
static floatX content(const struct parameter *p, int part, size_t element, bool coarse, uint64_t salt) {
    uint64_t hash = 14695981039346656037u ^ salt;
    for (const char *c = p->name; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    struct rng rng = rng_seed(hash + 3 * element + (uint64_t)part);
    uint64_t bits = rng_next(&rng);
    if (coarse) return (floatX)((int)(bits & 255) - 128) / (floatX)(1 << (bits >> 8 & 15));
    return (floatX)((int)(bits & 0xffffff) - (1 << 23)) / (floatX)(1 << 20);
}

/* Sets a float or, half being given, a BF16 to what it should be; or says whether it is. */
static bool touch(floatX *wide, uint16_t *half, floatX expected, bool set) {
    if (set && half) *half = bf16_from_float((float)expected);
    if (set && !half) *wide = expected;
    return (half ? bf16_to_float(*half) : *wide) == expected;
}

/* All elements that this rank has; returns how many are not as they should be. */
static int64_t visit(struct state *state, bool coarse, uint64_t salt, bool set) {
    int64_t wrong = 0;
    for (int b = 0; b < state->bucket_count; b++)
        for (int i = 0; i < state->parameters.count; i++) {
            const struct bucket *bucket = &state->buckets[b];
            const struct parameter *p = &state->parameters.list[i];
            if (p->offset < bucket->start || p->offset >= bucket->start + bucket->count) continue;
            for (size_t e = 0; e < p->count; e++) {
                size_t at = p->offset + e - bucket->start - bucket->updated.first;
                size_t m = bucket->moments + at;
                wrong += !touch(&state->values[p->offset + e], NULL, content(p, 0, e, false, salt), set);
                if (at >= bucket->updated.count) continue; /* also below first: at has wrapped */
                bool half = state->half_moment1;
                wrong += !touch(half ? NULL : &state->moment1[m], half ? &state->half_moment1[m] : NULL,
                                content(p, 1, e, coarse, salt), set);
                wrong += !touch(half ? NULL : &state->moment2[m], half ? &state->half_moment2[m] : NULL,
                                content(p, 2, e, coarse, salt), set);
            }
        }
    return wrong;
}

/* Values and both moments as bytes. */
struct bytes {
    size_t count;
    char *data;
};

static struct bytes bytes_of(const struct state *state) {
    size_t values = state->parameters.total * sizeof *state->values;
    size_t moments = state->updated * (state->half_moment1 ? sizeof(uint16_t) : sizeof(floatX));
    struct bytes bytes = {values + 2 * moments, must_alloc(values + 2 * moments)};
    memcpy(bytes.data, state->values, values);
    memcpy(bytes.data + values, state->half_moment1 ? (void *)state->half_moment1 : state->moment1, moments);
    memcpy(bytes.data + values + moments, state->half_moment2 ? (void *)state->half_moment2 : state->moment2,
           moments);
    return bytes;
}

/* Whether the state is still these bytes, which are freed. */
static bool still(const struct state *state, struct bytes before) {
    struct bytes now = bytes_of(state);
    bool same = now.count == before.count && memcmp(now.data, before.data, now.count) == 0;
    free(now.data);
    free(before.data);
    return same;
}

static void clobber(struct state *state) {
    size_t moments = state->updated * (state->half_moment1 ? sizeof(uint16_t) : sizeof(floatX));
    memset(state->values, 0xff, state->parameters.total * sizeof *state->values);
    memset(state->half_moment1 ? (void *)state->half_moment1 : state->moment1, 0xff, moments);
    memset(state->half_moment2 ? (void *)state->half_moment2 : state->moment2, 0xff, moments);
}

/* ---- writing and reading ----------------------------------------------------------------------------- */

static const uint64_t SEED = 0xfedcba9876543210u; /* more than a double holds */

static const char *in_folder(const char *format, ...) __attribute__((format(printf, 1, 2)));
static const char *in_folder(const char *format, ...) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4], name[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_step(const struct run *run, const char *where, int64_t step) {
    struct errors errors = {0};
    if (!run->state) return;
    bool done = checkpoint_write(run->state, run->comm, where, (struct progress_mark){step, SEED}, &errors);
    no_errors(&errors);
    CHECK(done);
}

static void read_step(const struct run *run, const char *path, int64_t step) {
    struct errors errors = {0};
    struct progress_mark mark = {0};
    if (!run->state) return;
    clobber(run->state);
    bool done = checkpoint_read(run->state, run->comm, path, &mark, &errors);
    no_errors(&errors);
    CHECK(done && mark.step == step && mark.seed == SEED);
}

static bool some_rank(MPI_Comm comm, bool mine) {
    int one = mine, any = 0;
    MPI_Allreduce(&one, &any, 1, MPI_INT, MPI_MAX, comm);
    return any;
}

/* Whether a message of some rank has all of the words. */
static bool said(MPI_Comm comm, const struct errors *errors, const char *a, const char *b, const char *c) {
    bool mine = false;
    for (int i = 0; i < errors->count; i++)
        mine |= strstr(errors->messages[i], a) && strstr(errors->messages[i], b) &&
                strstr(errors->messages[i], c);
    return some_rank(comm, mine);
}

/* Reading fails everywhere, changes nothing, and says a, b and c of a file and, in another message, which
   checkpoint is sound (may be NULL). */
static void fails(const struct run *run, const char *path, const char *a, const char *b, const char *c,
                  const char *sound) {
    struct errors errors = {0};
    struct progress_mark mark = {77, 77};
    struct bytes before = bytes_of(run->state);
    CHECK(!checkpoint_read(run->state, run->comm, path, &mark, &errors));
    CHECK(still(run->state, before) && mark.step == 77 && mark.seed == 77);
    bool found = said(run->comm, &errors, a, b, c) && said(run->comm, &errors, "rank ", "", "");
    if (sound) found &= said(run->comm, &errors, sound, "is sound", "");
    if (!found) errors_print(&errors, stderr);
    CHECK(found);
    if (!sound) CHECK(!said(run->comm, &errors, "is sound", "", ""));
    errors_free(&errors);
}

static bool exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}

/* ---- cases: what is written comes back --------------------------------------------------------------- */

static void round_trip(void) {
    static const char *const memory[] = {"\"zero\":0,\"moments\":\"fp32\"", "\"zero\":1,\"moments\":\"fp32\"",
                                         "\"zero\":0,\"moments\":\"bf16\"",
                                         "\"zero\":1,\"moments\":\"bf16\""};
    for (int i = 0; i < (int)COUNT(memory); i++) {
        struct run *run =
            run_open((struct setting){"megatron", 4, "\"pp\":1,\"vpp\":1,\"ep\":2", memory[i], 0, NULL});
        const char *where = in_folder("a/b-%d", i); /* two folders that are not there yet */
        visit(run->state, false, 1, true);
        write_step(run, where, 5);
        visit(run->state, false, (uint64_t)i, true);
        struct bytes before = bytes_of(run->state);
        write_step(run, where, 7);
        read_step(run, where, 7);
        CHECK(still(run->state, before));
        write_step(run, where, 123456789);
        read_step(run, where, 123456789);
        read_step(run, in_folder("a/b-%d/step-00000005/", i), 5);
        if (!run->state->half_moment1) CHECK(visit(run->state, false, 1, false) == 0);
        run_close(run);
    }
}

/* From the first layout through all others and back, values and moments known by name everywhere. */
static void layouts(void) {
    static const struct setting settings[] = {
        {"megatron", 8, "\"pp\":2,\"vpp\":1,\"ep\":2", "\"zero\":1,\"moments\":\"bf16\"", 0, NULL}, /* dp 2 */
        {"disagmoe", 5, "\"groups\":1,\"attn_gpus\":2,\"ffn_gpus\":3", "\"zero\":0,\"moments\":\"fp32\"", 0,
         NULL},
        {"disagmoe", 6, "\"groups\":2,\"attn_gpus\":1,\"ffn_gpus\":2", "\"zero\":1,\"moments\":\"fp32\"", 0,
         NULL},
        {"disagmoe", 8, "\"groups\":2,\"attn_gpus\":2,\"ffn_gpus\":2,\"cp\":2",
         "\"zero\":1,\"moments\":\"fp32\"", 0, "all-ffn"},
        {"megatron", 4, "\"pp\":1,\"vpp\":1,\"ep\":4,\"cp\":4", "\"zero\":0,\"moments\":\"fp32\"", 0, NULL},
        {"megatron", 1, "\"pp\":1,\"vpp\":1,\"ep\":1", "\"zero\":0,\"moments\":\"bf16\"", 0, NULL},
        {"disagmoe", 8, "\"groups\":1,\"attn_gpus\":3,\"ffn_gpus\":1", "\"zero\":1,\"moments\":\"bf16\"", 0,
         NULL},
        {"megatron", 8, "\"pp\":2,\"vpp\":1,\"ep\":2", "\"zero\":0,\"moments\":\"fp32\"", 0, NULL}};
    for (int i = 0; i < (int)COUNT(settings); i++) {
        struct run *run = run_open(settings[i]);
        if (i == 0 && run->state) visit(run->state, true, 3, true);
        if (i > 0) read_step(run, folder, i);
        if (run->state) CHECK(visit(run->state, true, 3, false) == 0);
        write_step(run, folder, i + 1);
        run_close(run);
    }
}

/* For builds of two precisions: one writes in its own, the other reads. */
static const struct setting PRECISION = {
    "megatron", 2, "\"pp\":1,\"vpp\":1,\"ep\":2", "\"zero\":1,\"moments\":\"fp32\"", 0, NULL};
static void write_precision(void) {
    struct run *run = run_open(PRECISION);
    visit(run->state, false, 4, true);
    write_step(run, folder, 1);
    run_close(run);
}

static void read_precision(void) {
    struct run *run = run_open(PRECISION);
    read_step(run, folder, 1);
    CHECK(visit(run->state, false, 4, false) == 0);
    run_close(run);
}

/* ---- cases: damage ----------------------------------------------------------------------------------- */

static const struct setting FOUR = {
    "megatron", 4, "\"pp\":1,\"vpp\":1,\"ep\":2", "\"zero\":1,\"moments\":\"fp32\"", 0, NULL};

static struct bytes file_bytes(const char *file) {
    struct stat status;
    int descriptor = open(file, O_RDONLY);
    CHECK(descriptor >= 0 && fstat(descriptor, &status) == 0);
    struct bytes bytes = {(size_t)status.st_size, must_alloc((size_t)status.st_size + 1)};
    CHECK(read(descriptor, bytes.data, bytes.count) == status.st_size);
    close(descriptor);
    return bytes;
}

static void overwrite(const char *file, const void *data, size_t count) {
    int descriptor = open(file, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    CHECK(descriptor >= 0 && write(descriptor, data, count) == (ssize_t)count);
    close(descriptor);
}

/* Runs fails() with a file of step 2 changed by rank 0 (data NULL: gone), and puts the file back. */
static void damaged(const struct run *run, const char *name, const char *data, size_t count,
                    const char *word) {
    char file[512];
    snprintf(file, sizeof file, "%s", in_folder("step-00000002/%s", name));
    struct bytes sound = {0};
    if (world_rank == 0) {
        sound = file_bytes(file);
        if (data)
            overwrite(file, data, count);
        else
            unlink(file);
    }
    MPI_Barrier(run->comm);
    fails(run, folder, name, word, "rank ", "step-00000001");
    fails(run, in_folder("step-00000002"), name, word, "rank ", "step-00000001");
    if (world_rank == 0) overwrite(file, sound.data, sound.count);
    free(sound.data);
    MPI_Barrier(run->comm);
}

static void damaged_shards(const struct run *run) {
    struct bytes shard = file_bytes(in_folder("step-00000002/rank-0002.safetensors"));
    MPI_Barrier(run->comm);
    damaged(run, "rank-0002.safetensors", shard.data, shard.count - 1, "is damaged");
    damaged(run, "rank-0002.safetensors", shard.data, 100, "is damaged");
    damaged(run, "rank-0002.safetensors", "", 0, "is damaged");
    damaged(run, "rank-0000.safetensors", NULL, 0, "No such file");
    const size_t places[] = {3, 100, shard.count / 2, shard.count - 1};
    for (size_t i = 0; i < COUNT(places); i++) {
        shard.data[places[i]] ^= 1;
        damaged(run, "rank-0002.safetensors", shard.data, shard.count, "is damaged");
        shard.data[places[i]] ^= 1;
    }
    free(shard.data);
}

static void damaged_list(const struct run *run) {
    struct bytes list = file_bytes(in_folder("step-00000002/checkpoint.json"));
    MPI_Barrier(run->comm);
    damaged(run, "checkpoint.json", NULL, 0, "No such file");
    damaged(run, "checkpoint.json", list.data, list.count / 2, "");
    damaged(run, "checkpoint.json", "\0\xff garbage", 10, "");
    damaged(run, "checkpoint.json", "{}", 2, "step");
    damaged(run, "checkpoint.json", "[1]", 3, "");
    int changed = 0;
    for (size_t i = 0; i < list.count; i++) { /* every number's last digit, hexadecimal ones too */
        char digit = list.data[i];
        if (digit < '0' || digit > '9' || strchr("0123456789abcdef.", list.data[i + 1])) continue;
        list.data[i] = digit == '1' ? '2' : '1';
        damaged(run, "checkpoint.json", list.data, list.count, "");
        list.data[i] = digit;
        changed++;
    }
    CHECK(changed > 20);
    free(list.data);
}

/* Sound files that together have too little or too much, as a faulty writer would make them. */
static void wrong_pieces(void) {
    struct setting setting = FOUR;
    setting.memory = "\"zero\":0,\"moments\":\"fp32\"";
    struct run *run = run_open(setting);
    struct parameters *parameters = &run->state->parameters;
    struct bucket *shared = run->state->buckets;
    while (shared->holder_count < 4) shared++;
    int me = shared->me;
    write_step(run, in_folder("pieces"), 1);
    parameters->count--; /* the last one is written by nobody */
    write_step(run, in_folder("pieces"), 2);
    parameters->count++;
    fails(run, in_folder("pieces"), "model.norm.weight", "step-00000002", "element 0 is missing",
          "step-00000001");
    shared->me = 0; /* all holders write the first slice */
    write_step(run, in_folder("pieces"), 2);
    shared->me = me;
    fails(run, in_folder("pieces"), "model.embed_tokens.weight", "step-00000002", "twice", "step-00000001");
    shared->me = me == 1 ? 2 : me; /* the second slice is written by nobody, the third one twice */
    write_step(run, in_folder("pieces"), 2);
    shared->me = me;
    fails(run, in_folder("pieces"), "optimizer.moment2.", "step-00000002", "is missing", "step-00000001");
    struct bucket *experts = run->state->buckets; /* of these only half the ranks need anything */
    while (experts->holder_count != 2) experts++;
    me = experts->me;
    if (experts->holders[0] == 0) experts->me = 0;
    write_step(run, in_folder("pieces"), 2);
    experts->me = me;
    fails(run, in_folder("pieces"), ".mlp.experts.", "rank 2", "twice", "step-00000001");
    read_step(run, in_folder("pieces/step-00000001"), 1);
    run_close(run);
}

static void damage(void) {
    struct run *run = run_open(FOUR);
    visit(run->state, false, 1, true);
    write_step(run, folder, 1);
    visit(run->state, false, 2, true);
    write_step(run, folder, 2);
    damaged_shards(run);
    damaged_list(run);
    read_step(run, folder, 2);
    CHECK(visit(run->state, false, 2, false) == 0);
    read_step(run, in_folder("step-00000001"), 1);
    CHECK(visit(run->state, false, 1, false) == 0);
    fails(run, in_folder("nowhere"), "nowhere", "No such file", "", NULL);
    if (world_rank == 0) mkdir(in_folder("empty"), 0777);
    MPI_Barrier(run->comm);
    fails(run, in_folder("empty"), "empty", "no checkpoint", "", NULL);
    run_close(run);

    struct setting setting = FOUR;
    setting.expert_hidden = 6;
    struct run *other = run_open(setting);
    fails(other, folder, "step-00000002/checkpoint.json", "model.moe.expert_hidden", "found 5; expected 6",
          NULL);
    run_close(other);
    wrong_pieces();
}

/* ---- cases: writes that fail ------------------------------------------------------------------------- */

static void limit_files(rlim_t bytes) {
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

/* A write of step 2 fails, names a file, why, and rank and step, and leaves step 1 alone. */
static void cannot_write(const struct run *run, const char *why, const char *who) {
    struct errors errors = {0};
    visit(run->state, false, 2, true);
    CHECK(!checkpoint_write(run->state, run->comm, folder, (struct progress_mark){2, SEED}, &errors));
    bool found = said(run->comm, &errors, why, who, "rank-000") && said(run->comm, &errors, "step 2", "", "");
    if (!found) errors_print(&errors, stderr);
    CHECK(found);
    errors_free(&errors);
    CHECK(!exists(in_folder("step-00000002")) && !exists(in_folder(".step-00000002.tmp")));
    read_step(run, folder, 1);
    CHECK(visit(run->state, false, 1, false) == 0);
}

static struct run *with_step_1(void) {
    struct run *run = run_open(FOUR);
    visit(run->state, false, 1, true);
    write_step(run, folder, 1);
    return run;
}

static void failing(void) {
    struct run *run = with_step_1();
    signal(SIGXFSZ, SIG_IGN);
    for (int rank = 0; rank < 4; rank += 2) {
        char who[16];
        snprintf(who, sizeof who, "rank %d:", rank);
        if (world_rank == rank) limit_files(8192);
        cannot_write(run, "File too large", who);
        if (world_rank == rank) limit_files(RLIM_INFINITY);
    }
    /* A file stands where the folder should be. */
    struct errors errors = {0};
    if (world_rank == 0) overwrite(in_folder("file"), "x", 1);
    MPI_Barrier(run->comm);
    CHECK(!checkpoint_write(run->state, run->comm, in_folder("file"), (struct progress_mark){3, SEED},
                            &errors));
    CHECK(said(run->comm, &errors, "/file", "folder", "step 3, rank 0"));
    errors_free(&errors);
    /* A file stands where the checkpoint should be. */
    if (world_rank == 0) overwrite(in_folder("step-00000004"), "x", 1);
    MPI_Barrier(run->comm);
    CHECK(!checkpoint_write(run->state, run->comm, folder, (struct progress_mark){4, SEED}, &errors));
    CHECK(said(run->comm, &errors, "step-00000004", "Not a directory", "step 4, rank 0"));
    CHECK(!exists(in_folder(".step-00000004.tmp")));
    errors_free(&errors);
    run_close(run);
}

/* The folder is a file system of its own, which rank 0 now makes too small for another checkpoint. */
static void full_disk(void) {
    struct run *run = with_step_1();
    struct statvfs disk;
    if (world_rank == 0) {
        char size[64];
        CHECK(statvfs(folder, &disk) == 0);
        snprintf(size, sizeof size, "size=%llu",
                 (unsigned long long)((disk.f_blocks - disk.f_bfree) * disk.f_frsize + 16384));
        CHECK(mount("none", folder, NULL, MS_REMOUNT, size) == 0);
    }
    MPI_Barrier(run->comm);
    cannot_write(run, "No space left on device", "step 2");
    run_close(run);
}

/* Rank 1 is killed in the middle of its file. */
static void killed(void) {
    struct run *run = with_step_1();
    struct errors errors = {0};
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (world_rank == 1) limit_files(4096);
    checkpoint_write(run->state, run->comm, folder, (struct progress_mark){2, SEED}, &errors);
    exit(0); /* which is not reached */
}

static void after_killed(void) {
    struct run *run = run_open(FOUR);
    CHECK(exists(in_folder(".step-00000002.tmp/rank-0001.safetensors")));
    MPI_Barrier(run->comm);
    if (world_rank == 0) { /* and more that is no checkpoint */
        mkdir(in_folder(".step-00000003.tmp"), 0777);
        mkdir(in_folder(".step-00000003.tmp/sub"), 0777);
        mkdir(in_folder("step-3"), 0777);
        mkdir(in_folder("step-000000003"), 0777);
        mkdir(in_folder("step-00000003.bak"), 0777);
        overwrite(in_folder("notes"), "x", 1);
        /* moved aside by a run that was killed before it put the new one in place */
        CHECK(rename(in_folder("step-00000001"), in_folder(".step-00000001.old")) == 0);
    }
    MPI_Barrier(run->comm);
    fails(run, folder, "holds no checkpoint", "", "", NULL);
    visit(run->state, false, 2, true);
    write_step(run, folder, 2);
    CHECK(!exists(in_folder(".step-00000002.tmp")) && !exists(in_folder(".step-00000003.tmp")));
    CHECK(!exists(in_folder(".step-00000001.old")));
    read_step(run, folder, 2);
    CHECK(visit(run->state, false, 2, false) == 0);
    read_step(run, in_folder("step-00000001"), 1);
    CHECK(visit(run->state, false, 1, false) == 0);
    visit(run->state, false, 5, true); /* step 2 again, with another content */
    write_step(run, folder, 2);
    read_step(run, folder, 2);
    CHECK(visit(run->state, false, 5, false) == 0);
    CHECK(!exists(in_folder(".step-00000002.tmp")) && !exists(in_folder(".step-00000002.old")));
    run_close(run);
}

/* ---- starting cases ---------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {{"round trip", round_trip},         {"layouts", layouts}, {"write precision", write_precision},
             {"read precision", read_precision}, {"damage", damage},   {"failing", failing},
             {"full disk", full_disk},           {"killed", killed},   {"after killed", after_killed}};

static int run_case(const char *name) {
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    folder = getenv("CHECKPOINT_FOLDER");
    for (size_t i = 0; i < COUNT(cases); i++)
        if (strcmp(cases[i].name, name) == 0) cases[i].run();
    MPI_Finalize();
    return 0;
}

static bool has_program(const char *name) {
    const char *path = getenv("PATH");
    for (size_t length; path && *path; path += length + (path[length] != 0)) {
        char file[4096];
        length = strcspn(path, ":");
        snprintf(file, sizeof file, "%.*s/%s", (int)length, path, name);
        if (access(file, X_OK) == 0) return true;
    }
    return false;
}

enum { NO_MOUNT = 77 };

/* In the child: a small file system on the folder, which is gone with the last process that sees it. */
static void mount_folder(void) {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", "none", MS_REC | MS_PRIVATE, "") != 0 ||
        mount("none", folder, "tmpfs", 0, "size=16m") != 0)
        _exit(NO_MOUNT);
}

static char program[4096]; /* that is started: this one, or its twin of the other precision */

static void find_program(void) {
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length < 0 ? 0 : length] = 0;
}

/* BUILD/tests/NAME has its twin at BUILD/double/tests/NAME. */
static bool find_twin(void) {
    static const char mark[] = "double/";
    find_program();
    char *tests = strstr(program, "/tests/"), *last = tests;
    for (; tests; tests = strstr(tests + 1, "/tests/")) last = tests;
    if (!last || strlen(program) + sizeof mark > sizeof program) return false;
    size_t length = strlen(mark);
    char *before = last + 1 - length;
    if (before >= program && strncmp(before, mark, length) == 0) {
        memmove(before, last + 1, strlen(last + 1) + 1);
    } else {
        memmove(last + 1 + length, last + 1, strlen(last + 1) + 1);
        memcpy(last + 1, mark, length);
    }
    return access(program, X_OK) == 0;
}

static void start_mpirun(const char *name, int ranks, const char *log, bool mounted) {
    char count[16];
    snprintf(count, sizeof count, "%d", ranks);
    int output = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (mounted) mount_folder();
    dup2(output, 1);
    dup2(output, 2);
    setenv("CHECKPOINT_CASE", name, 1);
    setenv("CHECKPOINT_FOLDER", folder, 1);
    execlp("mpirun", "mpirun", "-n", count, "--oversubscribe", "--mca", "mpi_yield_when_idle", "1",
           "--timeout", "120", program, (char *)NULL);
    _exit(1);
}

static void print_file(const char *file) {
    char line[1024];
    FILE *stream = fopen(file, "r");
    while (stream && fgets(line, sizeof line, stream)) print_message("%s", line);
    if (stream) fclose(stream);
}

/* Exit status of a case; what it printed is shown where that is not the one expected (−1: any but 0). */
static int mpirun(const char *name, int ranks, bool mounted, int expected) {
    char log[512];
    int status = 0;
    snprintf(log, sizeof log, "%s.log", folder);
    pid_t child = fork();
    if (child == 0) start_mpirun(name, ranks, log, mounted);
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
    if (code != NO_MOUNT && (expected < 0 ? code == 0 : code != expected)) print_file(log);
    unlink(log);
    return code;
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status, (void)kind, (void)place;
    return remove(path);
}

static int set_up(void **state) {
    static char name[256];
    const char *base = getenv("TMPDIR");
    (void)state;
    snprintf(name, sizeof name, "%s/checkpoint-XXXXXX", base && *base ? base : "/tmp");
    folder = mkdtemp(name);
    find_program();
    return folder ? 0 : 1;
}

static int tear_down(void **state) {
    (void)state;
    return nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void need_mpirun(void) {
    if (has_program("mpirun")) return;
    print_message("skip: there is no mpirun on the PATH\n");
    skip();
}

static void test_round_trip(void **state) {
    (void)state;
    need_mpirun();
    assert_int_equal(mpirun("round trip", 4, false, 0), 0);
}

static void test_layouts(void **state) {
    (void)state;
    need_mpirun();
    assert_int_equal(mpirun("layouts", 8, false, 0), 0);
}

static void test_precisions(void **state) {
    (void)state;
    need_mpirun();
    if (!find_twin()) {
        print_message("skip: this test is not built in the other precision\n");
        skip();
    }
    find_program();
    assert_int_equal(mpirun("write precision", 2, false, 0), 0);
    find_twin();
    assert_int_equal(mpirun("read precision", 2, false, 0), 0);
}

static void test_damage(void **state) {
    (void)state;
    need_mpirun();
    assert_int_equal(mpirun("damage", 4, false, 0), 0);
}

static void test_failing_write(void **state) {
    (void)state;
    need_mpirun();
    assert_int_equal(mpirun("failing", 4, false, 0), 0);
}

static void test_full_disk(void **state) {
    (void)state;
    need_mpirun();
    int code = mpirun("full disk", 4, true, 0);
    if (code == NO_MOUNT) {
        print_message("skip: a small file system cannot be mounted here: not root, or not allowed to\n");
        skip();
    }
    assert_int_equal(code, 0);
}

static void test_killed(void **state) {
    (void)state;
    need_mpirun();
    assert_int_not_equal(mpirun("killed", 4, false, -1), 0);
    assert_int_equal(mpirun("after killed", 4, false, 0), 0);
}

int main(void) {
    const char *name = getenv("CHECKPOINT_CASE");
    if (name) return run_case(name);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_layouts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_precisions, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_damage, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_failing_write, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_full_disk, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_killed, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
