/*
Writing and reading checkpoints.

A shard is a safetensors file, so that other people's tools open it too. Its tensors are pieces: runs of one
parameter's elements, a part each (values, first and second moments). A piece that is a whole parameter has
its name and shape; another is a vector with its first element behind the name: "model.norm.weight@24".

Writing: rank 0 makes the temporary folder, every rank writes and syncs its shard, rank 0 lists them with
their checksums and renames the folder. Reading: rank 0 reads the list, the ranks share the checking of
checksums, then each maps all shards and makes sure that every element it needs is there exactly once. Up to
here nothing has been changed; what is left is copying, which cannot fail.

Every stage ends with all ranks agreeing whether it succeeded everywhere, so none waits for one that gave up.
*/
#define _GNU_SOURCE /* renameat2, nftw */
#include "state/checkpoint.h"
#include "state/safetensors.h"
#include "state/state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FORMAT_VERSION = 1, CHUNK_BYTES = 1 << 20 };
#define LIST_NAME "checkpoint.json"
#define LARGEST_WHOLE 9007199254740992.0 /* 2⁵³: what a JSON number can hold exactly */

/* ---- agreement --------------------------------------------------------------------------------------- */

static bool all_succeeded(MPI_Comm comm, bool succeeded) {
    int mine = succeeded, all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, comm);
    return all;
}

static bool root_succeeded(MPI_Comm comm, bool succeeded) {
    int root = succeeded;
    MPI_Bcast(&root, 1, MPI_INT, 0, comm);
    return root;
}

/* Rank 0's text on every rank; NULL on all where it is NULL there. */
static const char *root_text(MPI_Comm comm, struct arena *arena, const char *text) {
    int rank, bytes = text ? (int)strlen(text) + 1 : 0;
    MPI_Comm_rank(comm, &rank);
    MPI_Bcast(&bytes, 1, MPI_INT, 0, comm);
    if (!bytes) return NULL;
    char *copy = arena_alloc(arena, (size_t)bytes);
    if (rank == 0) memcpy(copy, text, (size_t)bytes);
    MPI_Bcast(copy, bytes, MPI_CHAR, 0, comm);
    return copy;
}

/* Hands on what this rank found wrong, with who it is. */
static void report(struct errors *errors, struct errors *found, const char *who) {
    for (int i = 0; i < found->count; i++) errors_add(errors, NULL, NULL, "%s: %s", who, found->messages[i]);
    errors_free(found);
}

/* ---- checksum: XXH64 with seed 0 (github.com/Cyan4973/xxHash), as `xxhsum -H1` prints it --------------- */

static const uint64_t PRIME1 = 0x9e3779b185ebca87u, PRIME2 = 0xc2b2ae3d27d4eb4fu,
                      PRIME3 = 0x165667b19e3779f9u, PRIME4 = 0x85ebca77c2b2ae63u,
                      PRIME5 = 0x27d4eb2f165667c5u;
enum { STRIPE = 32 };

struct checksum {
    uint64_t lanes[4], bytes;
    unsigned char rest[STRIPE]; /* bytes % STRIPE of them: not yet in the lanes */
};

static struct checksum checksum_start(void) {
    return (struct checksum){.lanes = {PRIME1 + PRIME2, PRIME2, 0, 0 - PRIME1}};
}

static uint64_t turn(uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

static uint64_t round_of(uint64_t lane, uint64_t input) {
    return turn(lane + input * PRIME2, 31) * PRIME1;
}

static void add_stripe(struct checksum *sum, const unsigned char *stripe) {
    uint64_t words[4];
    memcpy(words, stripe, STRIPE);
    for (int i = 0; i < 4; i++) sum->lanes[i] = round_of(sum->lanes[i], words[i]);
}

static void checksum_add(struct checksum *sum, const void *data, size_t bytes) {
    const unsigned char *at = data;
    size_t held = sum->bytes % STRIPE;
    sum->bytes += bytes;
    if (held) {
        size_t more = bytes < STRIPE - held ? bytes : STRIPE - held;
        memcpy(sum->rest + held, at, more);
        if (held + more < STRIPE) return;
        add_stripe(sum, sum->rest);
        at += more;
        bytes -= more;
    }
    for (; bytes >= STRIPE; at += STRIPE, bytes -= STRIPE) add_stripe(sum, at);
    if (bytes) memcpy(sum->rest, at, bytes);
}

static uint64_t checksum_end(const struct checksum *sum) {
    static const int turns[] = {1, 7, 12, 18};
    const unsigned char *at = sum->rest, *end = at + sum->bytes % STRIPE;
    uint64_t hash = sum->bytes < STRIPE ? PRIME5 : 0, word;
    uint32_t half;
    if (sum->bytes >= STRIPE) {
        for (int i = 0; i < 4; i++) hash += turn(sum->lanes[i], turns[i]);
        for (int i = 0; i < 4; i++) hash = (hash ^ round_of(0, sum->lanes[i])) * PRIME1 + PRIME4;
    }
    hash += sum->bytes;
    for (; end - at >= 8; at += 8) {
        memcpy(&word, at, 8);
        hash = turn(hash ^ round_of(0, word), 27) * PRIME1 + PRIME4;
    }
    for (; end - at >= 4; at += 4) {
        memcpy(&half, at, 4);
        hash = turn(hash ^ half * PRIME1, 23) * PRIME2 + PRIME3;
    }
    for (; at < end; at++) hash = turn(hash ^ *at * PRIME5, 11) * PRIME1;
    hash = (hash ^ hash >> 33) * PRIME2;
    hash = (hash ^ hash >> 29) * PRIME3;
    return hash ^ hash >> 32;
}

static const char *checksum_text(struct arena *arena, uint64_t checksum) {
    return arena_printf(arena, "%016llx", (unsigned long long)checksum);
}

/* ---- pieces ------------------------------------------------------------------------------------------ */

enum part { PART_VALUES, PART_MOMENT1, PART_MOMENT2, PART_COUNT };
static const char *const PREFIXES[PART_COUNT] = {"", "optimizer.moment1.", "optimizer.moment2."};
static const enum tensor_type FLOAT_TYPE = sizeof(floatX) == 8 ? TENSOR_F64 : TENSOR_F32;

static const char *type_name(enum tensor_type type) {
    return type == TENSOR_F64 ? "F64" : type == TENSOR_F32 ? "F32" : "BF16";
}

static size_t type_bytes(enum tensor_type type) {
    return type == TENSOR_F64 ? 8 : type == TENSOR_F32 ? 4 : 2;
}

struct piece {
    enum part part;
    const struct parameter *parameter;
    size_t first, count; /* elements of the parameter */
    enum tensor_type type;
    char *memory; /* in the state */
};

struct pieces {
    struct piece *list;
    size_t count, capacity;
};

static int by_offset(const void *a, const void *b) {
    const struct parameter *const *x = a, *const *y = b;
    return ((*x)->offset > (*y)->offset) - ((*x)->offset < (*y)->offset);
}

/* The parameters in the order in which they lie in the arrays. */
static const struct parameter **in_memory_order(struct arena *arena, const struct parameters *parameters) {
    size_t count = (size_t)parameters->count;
    const struct parameter **order = arena_alloc(arena, (count + 1) * sizeof *order);
    for (size_t i = 0; i < count; i++) order[i] = &parameters->list[i];
    qsort(order, count, sizeof *order, by_offset);
    return order;
}

/* Where a part of a bucket lies: memory is that of the arrays' element `start`. */
struct region {
    enum part part;
    enum tensor_type type;
    size_t start;
    char *memory;
};

/* Adds elements first … end − 1 of the arrays, cut where parameters end. */
static void add_pieces(struct pieces *pieces, const struct parameter **order, int count, struct region region,
                       size_t first, size_t end) {
    int low = 0, high = count; /* the first parameter that ends behind `first` */
    while (low < high) {
        int middle = (low + high) / 2;
        if (order[middle]->offset + order[middle]->count <= first)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < count && order[low]->offset < end; low++) {
        const struct parameter *p = order[low];
        size_t from = p->offset > first ? p->offset : first;
        size_t to = p->offset + p->count < end ? p->offset + p->count : end;
        if (from >= to) continue;
        if (pieces->count == pieces->capacity) {
            pieces->capacity = 2 * pieces->capacity + 64;
            pieces->list = must_realloc(pieces->list, pieces->capacity * sizeof *pieces->list);
        }
        pieces->list[pieces->count++] = (struct piece){
            region.part, p,           from - p->offset,
            to - from,   region.type, region.memory + (from - region.start) * type_bytes(region.type)};
    }
}

static struct region region_of(const struct state *state, enum part part, const struct bucket *bucket) {
    if (part == PART_VALUES)
        return (struct region){part, FLOAT_TYPE, bucket->start, (char *)(state->values + bucket->start)};
    size_t start = bucket->start + bucket->updated.first;
    floatX *moments = part == PART_MOMENT1 ? state->moment1 : state->moment2;
    uint16_t *halves = part == PART_MOMENT1 ? state->half_moment1 : state->half_moment2;
    if (halves) return (struct region){part, TENSOR_BF16, start, (char *)(halves + bucket->moments)};
    return (struct region){part, FLOAT_TYPE, start, (char *)(moments + bucket->moments)};
}

/* What this rank writes: its slice of every bucket. Or what it reads: all its values, and the moments it
 * updates. */
static struct pieces pieces_of(const struct state *state, struct arena *arena, bool written) {
    struct pieces pieces = {0};
    const struct parameter **order = in_memory_order(arena, &state->parameters);
    for (enum part part = 0; part < PART_COUNT; part++)
        for (int b = 0; b < state->bucket_count; b++) {
            const struct bucket *bucket = &state->buckets[b];
            struct slice slice = bucket->updated;
            if (written)
                slice = bucket_slice(bucket, bucket->me);
            else if (part == PART_VALUES)
                slice = (struct slice){0, bucket->count};
            size_t first = bucket->start + slice.first;
            if (slice.count)
                add_pieces(&pieces, order, state->parameters.count, region_of(state, part, bucket), first,
                           first + slice.count);
        }
    return pieces;
}

/* ---- folders ----------------------------------------------------------------------------------------- */

static const char *child(struct arena *arena, const char *folder, const char *name) {
    return arena_printf(arena, "%s/%s", folder, name);
}

static const char *step_name(struct arena *arena, int64_t step) {
    return arena_printf(arena, "step-%08lld", (long long)step);
}

static const char *shard_name(struct arena *arena, int rank) {
    return arena_printf(arena, "rank-%04d.safetensors", rank);
}

/* The step of a folder's name as step_name makes it, else −1. */
static int64_t step_of(const char *name) {
    static const char prefix[] = "step-";
    char again[32];
    if (strncmp(name, prefix, strlen(prefix)) != 0) return -1;
    long long step = strtoll(name + strlen(prefix), NULL, 10);
    snprintf(again, sizeof again, "step-%08lld", step);
    return step >= 0 && strcmp(name, again) == 0 ? step : -1;
}

/* The step of what a write leaves behind when it is killed: ".step-00000100.tmp" or .old; else −1. */
static int64_t leftover_step(const char *name, const char *ending) {
    char middle[32];
    size_t length = strlen(name), end = strlen(ending);
    if (name[0] != '.' || length <= end + 1 || length - end - 1 >= sizeof middle ||
        strcmp(name + length - end, ending) != 0)
        return -1;
    memcpy(middle, name + 1, length - end - 1);
    middle[length - end - 1] = 0;
    return step_of(middle);
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status, (void)kind, (void)place;
    return remove(path);
}

static bool remove_tree(const char *folder) {
    return nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT;
}

/* Makes a rename last; a file system that cannot is none we could do more about. */
static void sync_folder(const char *folder) {
    int descriptor = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return;
    fsync(descriptor);
    close(descriptor);
}

/* Steps of the checkpoints in a folder, latest first; −1 with errno set when it cannot be read. */
static int list_steps(struct arena *arena, const char *folder, int64_t **steps) {
    DIR *stream = opendir(folder);
    if (!stream) return -1;
    int count = 0, capacity = 64;
    *steps = arena_alloc(arena, (size_t)capacity * sizeof **steps);
    for (const struct dirent *entry; (entry = readdir(stream));) {
        int64_t step = step_of(entry->d_name);
        if (step < 0) continue;
        if (count == capacity) {
            int64_t *wider = arena_alloc(arena, 2 * (size_t)capacity * sizeof *wider);
            memcpy(wider, *steps, (size_t)capacity * sizeof *wider);
            *steps = wider;
            capacity *= 2;
        }
        int at = count++;
        for (; at > 0 && (*steps)[at - 1] < step; at--) (*steps)[at] = (*steps)[at - 1];
        (*steps)[at] = step;
    }
    closedir(stream);
    return count;
}

/* ---- writing a shard --------------------------------------------------------------------------------- */

/* A shard as checkpoint.json lists it. */
struct stored_file {
    uint64_t bytes, checksum;
};

struct output {
    int descriptor;
    struct checksum sum;
};

/* False with errno set. A chunk's checksum is made while the chunk is in the cache. */
static bool put(struct output *output, const char *data, size_t bytes) {
    while (bytes > 0) {
        ssize_t written = write(output->descriptor, data, bytes < CHUNK_BYTES ? bytes : CHUNK_BYTES);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return false;
        checksum_add(&output->sum, data, (size_t)written);
        data += written;
        bytes -= (size_t)written;
    }
    return true;
}

static void add_shape(struct text *header, const struct piece *piece) {
    const struct parameter *p = piece->parameter;
    if (piece->count == p->count && p->rows > 1)
        text_add(header, "[%d,%d]", p->rows, p->columns);
    else
        text_add(header, "[%zu]", piece->count);
}

/* Eight bytes of length, then the JSON, padded so that the data behind it is aligned. */
static struct text shard_header(const struct pieces *pieces, int rank, int64_t step) {
    struct text header = {0};
    uint64_t at = 0;
    text_add(&header, "%8s{\"__metadata__\":{\"format\":\"disagmoe\",\"step\":\"%lld\",\"rank\":\"%d\"}", "",
             (long long)step, rank);
    for (size_t i = 0; i < pieces->count; i++) {
        const struct piece *piece = &pieces->list[i];
        uint64_t end = at + piece->count * type_bytes(piece->type);
        text_add(&header, ",\"%s%s", PREFIXES[piece->part], piece->parameter->name);
        if (piece->count < piece->parameter->count) text_add(&header, "@%zu", piece->first);
        text_add(&header, "\":{\"dtype\":\"%s\",\"shape\":", type_name(piece->type));
        add_shape(&header, piece);
        text_add(&header, ",\"data_offsets\":[%llu,%llu]}", (unsigned long long)at, (unsigned long long)end);
        at = end;
    }
    text_add(&header, "}");
    text_add(&header, "%*s", (int)((8 - header.length % 8) % 8), "");
    uint64_t length = header.length - 8;
    memcpy(header.text, &length, 8);
    return header;
}

/* False with errno set. */
static bool put_shard(struct output *output, const struct pieces *pieces, int rank, int64_t step) {
    struct text header = shard_header(pieces, rank, step);
    bool done = put(output, header.text, header.length);
    int reason = errno;
    free(header.text);
    errno = reason;
    for (size_t i = 0; i < pieces->count && done; i++)
        done = put(output, pieces->list[i].memory, pieces->list[i].count * type_bytes(pieces->list[i].type));
    return done && fsync(output->descriptor) == 0;
}

static bool write_shard(const char *file, const struct pieces *pieces, int rank, int64_t step,
                        struct stored_file *shard, struct errors *errors) {
    struct output output = {open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), checksum_start()};
    bool done = output.descriptor >= 0 && put_shard(&output, pieces, rank, step);
    int reason = errno;
    if (output.descriptor >= 0 && close(output.descriptor) != 0 && done) {
        done = false;
        reason = errno;
    }
    if (!done) errors_add(errors, file, NULL, "cannot be written: %s", strerror(reason));
    *shard = (struct stored_file){output.sum.bytes, checksum_end(&output.sum)};
    return done;
}

/* ---- writing a checkpoint ---------------------------------------------------------------------------- */

struct writing {
    const struct state *state;
    struct progress_mark mark;
    const char *folder, *temporary, *final, *aside;
    struct arena *arena;
    struct errors errors;
};

/* What killed runs left behind goes, except a checkpoint that was moved aside and not yet replaced: it comes
 * back. */
static void clear_leftovers(struct writing *writing) {
    DIR *stream = opendir(writing->folder);
    if (!stream) return;
    for (const struct dirent *entry; (entry = readdir(stream));) {
        const char *path = child(writing->arena, writing->folder, entry->d_name);
        int64_t aside = leftover_step(entry->d_name, ".old");
        if (leftover_step(entry->d_name, ".tmp") >= 0) remove_tree(path);
        if (aside < 0) continue;
        const char *final = child(writing->arena, writing->folder, step_name(writing->arena, aside));
        if (rename(path, final) != 0 && (errno == ENOTEMPTY || errno == EEXIST)) remove_tree(path);
    }
    closedir(stream);
}

static bool prepare_folder(struct writing *writing) {
    if (!make_folder_of(writing->temporary, &writing->errors)) return false;
    clear_leftovers(writing);
    if (mkdir(writing->temporary, 0777) == 0) return true;
    errors_add(&writing->errors, writing->temporary, NULL, "the folder cannot be made: %s", strerror(errno));
    return false;
}

/* Of all that a list says: of its text in one form, since numbers may be written in several. */
static const char *list_checksum(struct arena *arena, const cJSON *list) {
    char *text = cJSON_PrintUnformatted(list);
    cJSON *again = cJSON_Parse(text);
    cJSON_free(text);
    cJSON_DeleteItemFromObjectCaseSensitive(again, "checksum");
    text = cJSON_PrintUnformatted(again);
    struct checksum sum = checksum_start();
    checksum_add(&sum, text, strlen(text));
    cJSON_free(text);
    cJSON_Delete(again);
    return checksum_text(arena, checksum_end(&sum));
}

static bool write_list(struct writing *writing, const struct stored_file *shards, int count) {
    struct arena *arena = writing->arena;
    cJSON *list = cJSON_CreateObject();
    json_add_number(list, "version", FORMAT_VERSION);
    json_add_number(list, "step", (double)writing->mark.step);
    cJSON_AddStringToObject(list, "seed", /* a text: JSON's numbers hold 53 bits */
                            arena_printf(arena, "%llu", (unsigned long long)writing->mark.seed));
    cJSON_AddStringToObject(list, "dtype", FLOAT_TYPE == TENSOR_F64 ? "fp64" : "fp32");
    cJSON_AddItemToObject(list, "model", model_write(writing->state->ranks->model));
    cJSON *files = cJSON_AddArrayToObject(list, "files");
    for (int i = 0; i < count; i++) {
        cJSON *file = cJSON_CreateObject();
        cJSON_AddStringToObject(file, "name", shard_name(arena, i));
        json_add_number(file, "bytes", (double)shards[i].bytes);
        cJSON_AddStringToObject(file, "checksum", checksum_text(arena, shards[i].checksum));
        cJSON_AddItemToArray(files, file);
    }
    cJSON_AddStringToObject(list, "checksum", list_checksum(arena, list));
    char *text = cJSON_Print(list);
    /* which syncs the folder too, and with it the shards' names */
    bool done =
        file_write_atomic(child(arena, writing->temporary, LIST_NAME), text, strlen(text), &writing->errors);
    cJSON_free(text);
    cJSON_Delete(list);
    return done;
}

/* Swaps the new checkpoint with one of the same step; where the file system cannot, in two moves. */
static bool replace_folder(const struct writing *writing) {
    if (renameat2(AT_FDCWD, writing->temporary, AT_FDCWD, writing->final, RENAME_EXCHANGE) == 0) {
        remove_tree(writing->temporary);
        return true;
    }
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) return false;
    if (rename(writing->final, writing->aside) != 0) return false;
    if (rename(writing->temporary, writing->final) != 0) {
        int reason = errno;
        rename(writing->aside, writing->final);
        errno = reason;
        return false;
    }
    remove_tree(writing->aside);
    return true;
}

static bool publish(struct writing *writing) {
    bool done = rename(writing->temporary, writing->final) == 0 ||
                ((errno == ENOTEMPTY || errno == EEXIST) && replace_folder(writing));
    if (!done)
        errors_add(&writing->errors, writing->final, NULL, "cannot be put in place: %s", strerror(errno));
    sync_folder(writing->folder);
    return done;
}

/* All ranks' shards; rank 0 then has all of them in shards. */
static bool write_shards(struct writing *writing, MPI_Comm comm, int rank, struct stored_file *shards) {
    struct pieces pieces = pieces_of(writing->state, writing->arena, true);
    struct stored_file mine;
    bool written = write_shard(child(writing->arena, writing->temporary, shard_name(writing->arena, rank)),
                               &pieces, rank, writing->mark.step, &mine, &writing->errors);
    free(pieces.list);
    MPI_Gather(&mine, 2, MPI_UINT64_T, shards, 2, MPI_UINT64_T, 0, comm);
    return all_succeeded(comm, written);
}

bool checkpoint_write(const struct state *state, MPI_Comm comm, const char *folder, struct progress_mark mark,
                      struct errors *errors) {
    int rank, count;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &count);
    struct arena *arena = arena_new();
    const char *name = step_name(arena, mark.step);
    struct writing writing = {.state = state, .mark = mark, .folder = folder, .arena = arena};
    writing.final = child(arena, folder, name);
    writing.temporary = arena_printf(arena, "%s/.%s.tmp", folder, name);
    writing.aside = arena_printf(arena, "%s/.%s.old", folder, name);
    struct stored_file *shards = arena_alloc(arena, (size_t)count * sizeof *shards);
    bool done = root_succeeded(comm, rank != 0 || prepare_folder(&writing));
    if (done) {
        done = write_shards(&writing, comm, rank, shards);
        if (done && rank == 0) done = write_list(&writing, shards, count) && publish(&writing);
        done = root_succeeded(comm, done);
        if (!done && rank == 0) remove_tree(writing.temporary);
    }
    report(errors, &writing.errors, arena_printf(arena, "step %lld, rank %d", (long long)mark.step, rank));
    arena_free(arena);
    return done;
}

/* ---- reading checkpoint.json ------------------------------------------------------------------------- */

struct list {
    struct progress_mark mark;
    struct stored_file *shards;
    int count;
};

enum verdict { VERDICT_SOUND, VERDICT_DAMAGED, VERDICT_OTHER }; /* other: of another model */

static bool read_number(const char *text, int base, const char *digits, uint64_t *number) {
    char *end;
    errno = 0;
    *number = strtoull(text, &end, base);
    return *text && text[strspn(text, digits)] == 0 && !*end && errno == 0;
}

static bool read_shard_entry(struct json entry, int index, struct stored_file *shard) {
    struct raw {
        const char *name, *checksum;
        double bytes;
    } raw;
    static const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct raw, name), true, 0, 0, NULL},
        {"bytes", JSON_REAL, offsetof(struct raw, bytes), true, 0, LARGEST_WHOLE, NULL},
        {"checksum", JSON_TEXT, offsetof(struct raw, checksum), true, 0, 0, NULL}};
    if (!json_read_fields(entry, fields, COUNT(fields), &raw)) return false;
    const char *name = shard_name(entry.arena, index);
    shard->bytes = (uint64_t)raw.bytes;
    if (strcmp(raw.name, name) != 0)
        json_error(json_member(entry, "name"), "expected \"%s\"", name);
    else if (strlen(raw.checksum) != 16 ||
             !read_number(raw.checksum, 16, "0123456789abcdef", &shard->checksum))
        json_error(json_member(entry, "checksum"), "expected 16 hexadecimal digits");
    else
        return true;
    return false;
}

static bool read_shard_entries(struct json files, struct list *list) {
    if (!cJSON_IsArray(files.node) || !files.node->child) {
        json_error(files, "expected a list of at least one file");
        return false;
    }
    bool sound = true;
    list->shards = arena_alloc(files.arena, (size_t)cJSON_GetArraySize(files.node) * sizeof *list->shards);
    for (const cJSON *entry = files.node->child; entry; entry = entry->next, list->count++)
        sound &= read_shard_entry(json_element(files, entry, list->count), list->count,
                                  &list->shards[list->count]);
    return sound;
}

/* Whether two models as model_write gives them are one architecture. */
static bool same_model(struct json found, const cJSON *expected) {
    static const char *const free_keys[] = {"name", "source", "dtype"};
    bool same = true;
    for (const cJSON *key = expected->child; key; key = key->next) {
        struct json value = json_member(found, key->string);
        bool is_free = false;
        for (size_t i = 0; i < COUNT(free_keys); i++) is_free |= strcmp(key->string, free_keys[i]) == 0;
        if (is_free) continue;
        if (cJSON_IsObject(key)) {
            same &= same_model(value, key);
            continue;
        }
        char *mine = cJSON_PrintUnformatted(key), *theirs = cJSON_PrintUnformatted(value.node);
        if (strcmp(mine, theirs) != 0) {
            json_error(value, "expected %s, as the model of this run has it", mine);
            same = false;
        }
        cJSON_free(mine);
        cJSON_free(theirs);
    }
    return same;
}

static enum verdict check_model(struct json stored, const struct model *model) {
    struct model read;
    if (!model_read(stored, &read)) return VERDICT_DAMAGED;
    struct json found = stored;
    found.node = model_write(&read); /* with every default written out */
    cJSON *expected = model_write(model);
    bool same = same_model(found, expected);
    cJSON_Delete(found.node);
    cJSON_Delete(expected);
    return same ? VERDICT_SOUND : VERDICT_OTHER;
}

static enum verdict read_list(struct json document, const struct model *model, struct list *list) {
    struct raw {
        struct json model, files;
        const char *seed, *checksum;
        double step;
        int version, dtype;
    } raw;
    static const struct json_field fields[] = {
        {"version", JSON_INT, offsetof(struct raw, version), true, FORMAT_VERSION, FORMAT_VERSION, NULL},
        {"step", JSON_REAL, offsetof(struct raw, step), true, 0, LARGEST_WHOLE, NULL},
        {"seed", JSON_TEXT, offsetof(struct raw, seed), true, 0, 0, NULL},
        {"dtype", JSON_CHOICE, offsetof(struct raw, dtype), true, 0, 0, DTYPE_CHOICES},
        {"model", JSON_VALUE, offsetof(struct raw, model), true, 0, 0, NULL},
        {"files", JSON_VALUE, offsetof(struct raw, files), true, 0, 0, NULL},
        {"checksum", JSON_TEXT, offsetof(struct raw, checksum), true, 0, 0, NULL}};
    if (!document.node || !json_read_fields(document, fields, COUNT(fields), &raw)) return VERDICT_DAMAGED;
    const char *checksum = list_checksum(document.arena, document.node);
    if (strcmp(raw.checksum, checksum) != 0) {
        json_error(json_member(document, "checksum"), "the rest of the file has \"%s\": it is damaged",
                   checksum);
        return VERDICT_DAMAGED;
    }
    list->mark.step = (int64_t)raw.step;
    if (!read_number(raw.seed, 10, "0123456789", &list->mark.seed)) {
        json_error(json_member(document, "seed"), "expected a whole number below 2^64, as a text");
        return VERDICT_DAMAGED;
    }
    if (!read_shard_entries(raw.files, list)) return VERDICT_DAMAGED;
    return check_model(raw.model, model);
}

/* ---- checking a checkpoint's files ------------------------------------------------------------------- */

struct reading {
    struct state *state;
    MPI_Comm comm;
    int rank, ranks;
    const char *folder; /* of the checkpoint */
    const char *parent; /* of the checkpoints beside it */
    struct list list;
    struct safetensors **files; /* (list.count), NULL where none of it is needed */
    struct arena *arena;
    struct errors *errors;
};

/* Rank 0 reads the list, all receive it. */
static enum verdict open_list(struct reading *reading) {
    struct list *list = &reading->list;
    *list = (struct list){0};
    uint64_t head[4] = {VERDICT_SOUND};
    if (reading->rank == 0) {
        const char *file = child(reading->arena, reading->folder, LIST_NAME);
        struct json document = json_read_file(file, reading->arena, reading->errors);
        head[0] = read_list(document, reading->state->ranks->model, list);
        cJSON_Delete(document.node);
        head[1] = (uint64_t)list->mark.step;
        head[2] = list->mark.seed;
        head[3] = (uint64_t)list->count;
    }
    MPI_Bcast(head, COUNT(head), MPI_UINT64_T, 0, reading->comm);
    if (head[0] != VERDICT_SOUND) return (enum verdict)head[0];
    list->mark = (struct progress_mark){(int64_t)head[1], head[2]};
    list->count = (int)head[3];
    if (reading->rank != 0)
        list->shards = arena_alloc(reading->arena, (size_t)list->count * sizeof *list->shards);
    MPI_Bcast(list->shards, 2 * list->count, MPI_UINT64_T, 0, reading->comm);
    return VERDICT_SOUND;
}

/* False with errno set. */
static bool sum_file(int descriptor, struct checksum *sum) {
    char *chunk = must_alloc(CHUNK_BYTES);
    ssize_t bytes;
    while ((bytes = read(descriptor, chunk, CHUNK_BYTES)) != 0) {
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes < 0) break;
        checksum_add(sum, chunk, (size_t)bytes);
    }
    int reason = errno;
    free(chunk);
    errno = reason;
    return bytes == 0;
}

static bool check_file(const char *file, struct stored_file expected, struct errors *errors) {
    struct checksum sum = checksum_start();
    struct stat status;
    int descriptor = open(file, O_RDONLY | O_CLOEXEC), before = errors->count;
    bool opened = descriptor >= 0 && fstat(descriptor, &status) == 0;
    if (opened && (uint64_t)status.st_size != expected.bytes)
        errors_add(errors, file, NULL, "is damaged: found %lld bytes; expected %llu",
                   (long long)status.st_size, (unsigned long long)expected.bytes);
    else if (!opened || !sum_file(descriptor, &sum))
        errors_add(errors, file, NULL, "cannot be read: %s", strerror(errno));
    else if (checksum_end(&sum) != expected.checksum)
        errors_add(errors, file, NULL, "is damaged: found checksum %016llx; expected %016llx",
                   (unsigned long long)checksum_end(&sum), (unsigned long long)expected.checksum);
    if (descriptor >= 0) close(descriptor);
    return errors->count == before;
}

/* Every rank reads its share of the files. */
static bool check_files(const struct reading *reading) {
    bool sound = true;
    for (int i = reading->rank; i < reading->list.count; i += reading->ranks)
        sound &= check_file(child(reading->arena, reading->folder, shard_name(reading->arena, i)),
                            reading->list.shards[i], reading->errors);
    return all_succeeded(reading->comm, sound);
}

/* ---- finding what a rank needs ----------------------------------------------------------------------- */

/* A stored tensor, elements first … first + count − 1 of a parameter, that a needed piece has elements of. */
struct source {
    const struct piece *piece;
    const struct stored_tensor *tensor;
    size_t first;
};

struct sources {
    struct source *list;
    size_t count, capacity;
};

static int by_name(const void *a, const void *b) {
    const struct piece *x = a, *y = b;
    return x->part != y->part ? (int)x->part - (int)y->part : strcmp(x->parameter->name, y->parameter->name);
}

static int by_place(const void *a, const void *b) {
    const struct source *x = a, *y = b;
    if (x->piece != y->piece) return x->piece < y->piece ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

/* The piece (sorted by name) that a stored tensor belongs to, or NULL; *first: its place in the parameter. */
static const struct piece *piece_of(const struct pieces *pieces, struct arena *arena, const char *stored,
                                    uint64_t *first) {
    enum part part = PART_VALUES;
    for (enum part p = PART_MOMENT1; p < PART_COUNT; p++)
        if (strncmp(stored, PREFIXES[p], strlen(PREFIXES[p])) == 0) part = p;
    char *name = arena_strdup(arena, stored + strlen(PREFIXES[part])), *at = strchr(name, '@');
    *first = 0;
    if (at) {
        *at = 0;
        if (!read_number(at + 1, 10, "0123456789", first)) return NULL;
    }
    struct parameter parameter = {.name = name};
    struct piece key = {.part = part, .parameter = &parameter};
    return pieces->count ? bsearch(&key, pieces->list, pieces->count, sizeof key, by_name) : NULL;
}

/* Adds the file's tensors that are needed. False when one is of the wrong size or type. */
static bool add_sources(struct sources *sources, const struct pieces *pieces, const struct safetensors *file,
                        struct errors *errors) {
    for (int i = 0; i < file->count; i++) {
        const struct stored_tensor *tensor = &file->tensors[i];
        uint64_t first, count = (uint64_t)tensor->count;
        const struct piece *piece = piece_of(pieces, file->arena, tensor->name, &first);
        if (!piece) continue;
        size_t whole = piece->parameter->count;
        if (first > whole || count > whole - first || tensor->type == TENSOR_OTHER) {
            errors_add(
                errors, file->file, tensor->name,
                "found %llu elements of type %s; at most %zu of type F64, F32, F16 or BF16 are allowed",
                (unsigned long long)count, tensor->type_name, first > whole ? 0 : whole - first);
            return false;
        }
        if (first + count <= piece->first || first >= piece->first + piece->count) continue;
        if (sources->count == sources->capacity) {
            sources->capacity = 2 * sources->capacity + 64;
            sources->list = must_realloc(sources->list, sources->capacity * sizeof *sources->list);
        }
        sources->list[sources->count++] = (struct source){piece, tensor, first};
    }
    return true;
}

/* Maps every shard, and keeps those of which something is needed. */
static bool open_shards(struct reading *reading, const struct pieces *pieces, struct sources *sources) {
    bool sound = true;
    reading->files = arena_alloc(reading->arena, (size_t)reading->list.count * sizeof *reading->files);
    for (int i = 0; i < reading->list.count && sound; i++) {
        size_t before = sources->count;
        const char *name = child(reading->arena, reading->folder, shard_name(reading->arena, i));
        struct safetensors *file = safetensors_open(name, reading->errors);
        sound = file && add_sources(sources, pieces, file, reading->errors);
        if (sources->count > before)
            reading->files[i] = file;
        else
            safetensors_close(file);
    }
    if (sources->count) qsort(sources->list, sources->count, sizeof *sources->list, by_place);
    return sound;
}

static size_t source_end(const struct source *source) {
    return source->first + (size_t)source->tensor->count;
}

/* Whether the sources (sorted by place) have every element of every piece once. */
static bool covers(const struct reading *reading, const struct pieces *pieces,
                   const struct sources *sources) {
    const struct source *source = sources->list, *last = source + sources->count;
    bool sound = true;
    for (size_t i = 0; i < pieces->count; i++) {
        const struct piece *piece = &pieces->list[i];
        size_t at = piece->first, end = piece->first + piece->count;
        bool twice = false;
        for (; source < last && source->piece == piece; source++) {
            size_t from = source->first > piece->first ? source->first : piece->first;
            twice |= from < at;
            if (from == at) at = source_end(source);
        }
        if (at >= end && !twice) continue;
        errors_add(reading->errors, reading->folder,
                   arena_printf(reading->arena, "%s%s", PREFIXES[piece->part], piece->parameter->name),
                   twice ? "elements are stored twice" : "element %zu is missing", at);
        sound = false;
    }
    return sound;
}

/* ---- taking it over ---------------------------------------------------------------------------------- */

static void convert(const struct stored_tensor *tensor, size_t start, size_t count, enum tensor_type type,
                    char *out) {
    enum { AT_ONCE = 1024 };
    floatX wide[AT_ONCE];
    for (size_t done = 0; done < count;) {
        size_t now = count - done < AT_ONCE ? count - done : AT_ONCE;
        stored_tensor_copy(tensor, (int64_t)(start + done), 0, 1, 1, (int)now, wide);
        if (type == TENSOR_BF16)
            for (size_t i = 0; i < now; i++) ((uint16_t *)out)[done + i] = bf16_from_float((float)wide[i]);
        else
            memcpy((floatX *)out + done, wide, now * sizeof *wide);
        done += now;
    }
}

static void copy_source(const struct source *source) {
    const struct piece *piece = source->piece;
    const struct stored_tensor *tensor = source->tensor;
    size_t end = piece->first + piece->count, size = type_bytes(piece->type);
    size_t from = source->first > piece->first ? source->first : piece->first;
    size_t count = (source_end(source) < end ? source_end(source) : end) - from, start = from - source->first;
    char *out = piece->memory + (from - piece->first) * size;
    if (tensor->type == piece->type)
        memcpy(out, tensor->data + start * size, count * size);
    else
        convert(tensor, start, count, piece->type, out);
}

/* Collective. Nothing in the state changes unless every rank found all it needs. */
static bool take_over(struct reading *reading) {
    struct pieces pieces = pieces_of(reading->state, reading->arena, false);
    struct sources sources = {0};
    if (pieces.count) qsort(pieces.list, pieces.count, sizeof *pieces.list, by_name);
    bool found = open_shards(reading, &pieces, &sources) && covers(reading, &pieces, &sources);
    found = all_succeeded(reading->comm, found);
    for (size_t i = 0; i < sources.count && found; i++) copy_source(&sources.list[i]);
    for (int i = 0; i < reading->list.count; i++) safetensors_close(reading->files[i]);
    free(sources.list);
    free(pieces.list);
    return found;
}

/* ---- which checkpoint -------------------------------------------------------------------------------- */

static const char *without_slashes(struct arena *arena, const char *path) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') length--;
    return arena_printf(arena, "%.*s", (int)length, path);
}

static const char *parent_of(struct arena *arena, const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash) return ".";
    return slash == path ? "/" : arena_printf(arena, "%.*s", (int)(slash - path), path);
}

/* On rank 0: path itself, or the latest checkpoint in it. */
static void choose(struct reading *reading, const char *path) {
    struct arena *arena = reading->arena;
    const char *slash = strrchr(path, '/');
    int64_t *steps;
    if (step_of(slash ? slash + 1 : path) >= 0 || access(child(arena, path, LIST_NAME), F_OK) == 0) {
        reading->folder = path;
        reading->parent = parent_of(arena, path);
        return;
    }
    int count = list_steps(arena, path, &steps);
    if (count > 0) {
        reading->folder = child(arena, path, step_name(arena, steps[0]));
        reading->parent = path;
    } else if (count == 0) {
        errors_add(reading->errors, path, NULL,
                   "holds no checkpoint: neither " LIST_NAME " nor a folder like step-00000100");
    } else {
        errors_add(reading->errors, path, NULL, "cannot be read: %s", strerror(errno));
    }
}

static bool same_folder(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Adds to a damaged checkpoint's errors which other one is sound. */
static void suggest(struct reading *reading) {
    struct errors ignored = {0};
    struct reading other = *reading;
    other.errors = &ignored;
    int64_t *steps = NULL;
    int next = 0, count = reading->rank == 0 ? list_steps(reading->arena, reading->parent, &steps) : 0;
    bool sound = false;
    do {
        other.folder = NULL;
        while (next < count && !other.folder) {
            other.folder = child(reading->arena, reading->parent, step_name(reading->arena, steps[next++]));
            if (same_folder(other.folder, reading->folder)) other.folder = NULL;
        }
        other.folder = root_text(reading->comm, reading->arena, other.folder);
        sound = other.folder && open_list(&other) == VERDICT_SOUND && check_files(&other);
    } while (!sound && other.folder);
    errors_free(&ignored);
    if (!reading->errors->count) return;
    if (sound)
        errors_add(reading->errors, other.folder, NULL, "is sound: resume from this one instead");
    else
        errors_add(reading->errors, reading->parent, NULL, "holds no other checkpoint that is sound");
}

bool checkpoint_read(struct state *state, MPI_Comm comm, const char *path, struct progress_mark *mark,
                     struct errors *errors) {
    struct errors found = {0};
    struct arena *arena = arena_new();
    struct reading reading = {.state = state, .comm = comm, .arena = arena, .errors = &found};
    MPI_Comm_rank(comm, &reading.rank);
    MPI_Comm_size(comm, &reading.ranks);
    if (reading.rank == 0) choose(&reading, without_slashes(arena, path));
    reading.folder = root_text(comm, arena, reading.folder);
    reading.parent = root_text(comm, arena, reading.parent);
    bool done = false;
    if (reading.folder) {
        enum verdict verdict = open_list(&reading);
        done = verdict == VERDICT_SOUND && check_files(&reading) && take_over(&reading);
        if (!done && verdict != VERDICT_OTHER) suggest(&reading);
        if (done) *mark = reading.list.mark;
    }
    report(errors, &found, arena_printf(arena, "rank %d", reading.rank));
    arena_free(arena);
    return done;
}
