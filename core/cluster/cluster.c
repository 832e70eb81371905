/*
Reading a cluster manifest.

Each object of the manifest is one table of fields, so that unknown keys, wrong types and values out of range
are found in one place. What no single key shows (a rate above the hardware's peak, a slow GPU that does not
exist) is checked afterwards, on the parts that could be read: the user sees everything that is wrong at once.
*/
#include "cluster/cluster.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

/* More GPUs a node or nodes than any system has; keeps products of them inside an int. */
#define MOST_NODES 65536
#define MOST_GPUS_PER_NODE 256
/* No link, chip or memory comes near; a figure above it is a slip in the exponent. */
#define MOST_RATE 1e21

/* What bounds an achieved rate: a figure of the hardware, as the manifest names it. */
enum peak { PEAK_FLOPS, PEAK_HBM, PEAK_NVLINK, PEAK_NIC, PEAK_HOST, PEAK_MEMORY, PEAK_NONE };

struct rate_kind {
    const char *name, *unit;
    enum peak peak;
    bool optional;
};

static const struct rate_kind RATE_KINDS[RATE_COUNT] = {
    [RATE_GEMM] = {"gemm", "FLOP/s", PEAK_FLOPS},
    [RATE_CORE_FORWARD] = {"core_attention_forward", "FLOP/s", PEAK_FLOPS},
    [RATE_CORE_BACKWARD] = {"core_attention_backward", "FLOP/s", PEAK_FLOPS},
    [RATE_GROUPED_GEMM] = {"grouped_gemm", "FLOP/s", PEAK_FLOPS},
    [RATE_HEAD_GEMM] = {"head_gemm", "FLOP/s", PEAK_FLOPS, true},
    [RATE_GROUPED_TILE] = {"grouped_gemm_tile", "rows", PEAK_NONE, true},
    [RATE_HBM] = {"hbm", "bytes/s", PEAK_HBM},
    [RATE_KERNEL_LAUNCH] = {"kernel_launch", "s", PEAK_NONE},
    [RATE_LAYER_OVERHEAD] = {"layer_overhead", "s", PEAK_NONE, true},
    [RATE_NVLINK_EXCHANGE] = {"nvlink_exchange", "bytes/s", PEAK_NVLINK},
    [RATE_NIC_EXCHANGE] = {"nic_exchange", "bytes/s", PEAK_NIC},
    [RATE_NVLINK_REDUCE] = {"nvlink_reduce", "bytes/s", PEAK_NVLINK},
    [RATE_NIC_REDUCE] = {"nic_reduce", "bytes/s", PEAK_NIC},
    [RATE_HOST_COPY] = {"host_copy", "bytes/s", PEAK_HOST},
    [RATE_HOST_ADAM] = {"host_adam", "parameters/s", PEAK_NONE},
    [RATE_MEMORY_RESERVE] = {"memory_reserve", "bytes", PEAK_MEMORY},
};

const char *cluster_rate_name(enum rate rate) {
    return RATE_KINDS[rate].name;
}

const char *cluster_rate_unit(enum rate rate) {
    return RATE_KINDS[rate].unit;
}

int cluster_gpus(const struct cluster *cluster) {
    return cluster->nodes * cluster->gpus_per_node;
}

int cluster_gpu_beside(const struct cluster *cluster, int nic) {
    return nic * (cluster->gpus_per_node / cluster->nics_per_node);
}

int cluster_nic_beside(const struct cluster *cluster, int gpu) {
    return gpu / (cluster->gpus_per_node / cluster->nics_per_node);
}

/* ---- blocks of hardware ------------------------------------------------------------------------------ */

/* Each block may say where its figures come from; the text is for the reader of the file alone. */

static bool read_gpu(struct json value, struct cluster *cluster) {
    struct block {
        const char *name, *source;
        double memory_bytes, peak_flops, hbm_bytes_per_s;
    } block = {0};
    const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct block, name), true, 0, 0, NULL},
        {"memory_bytes", JSON_REAL, offsetof(struct block, memory_bytes), true, 1, MOST_RATE, NULL},
        {"peak_flops", JSON_REAL, offsetof(struct block, peak_flops), true, 1, MOST_RATE, NULL},
        {"hbm_bytes_per_s", JSON_REAL, offsetof(struct block, hbm_bytes_per_s), true, 1, MOST_RATE, NULL},
        {"source", JSON_TEXT, offsetof(struct block, source), false, 0, 0, NULL},
    };
    if (!json_read_fields(value, fields, COUNT(fields), &block)) return false;
    cluster->gpu.name = block.name;
    cluster->gpu.memory_bytes = block.memory_bytes;
    cluster->gpu.peak_flops = block.peak_flops;
    cluster->gpu.hbm_bytes_per_s = block.hbm_bytes_per_s;
    return true;
}

static bool read_link(struct json value, double *bytes_per_s, double *latency_s) {
    struct block {
        double bytes_per_s, latency_s;
        const char *source;
    } block = {0};
    const struct json_field fields[] = {
        {"bytes_per_s", JSON_REAL, offsetof(struct block, bytes_per_s), true, 1, MOST_RATE, NULL},
        {"latency_s", JSON_REAL, offsetof(struct block, latency_s), true, 0, 1, NULL},
        {"source", JSON_TEXT, offsetof(struct block, source), false, 0, 0, NULL},
    };
    if (!json_read_fields(value, fields, COUNT(fields), &block)) return false;
    *bytes_per_s = block.bytes_per_s;
    *latency_s = block.latency_s;
    return true;
}

static bool read_host(struct json value, struct cluster *cluster) {
    struct block {
        double bytes_per_s;
        const char *source;
    } block = {0};
    const struct json_field fields[] = {
        {"bytes_per_s", JSON_REAL, offsetof(struct block, bytes_per_s), true, 1, MOST_RATE, NULL},
        {"source", JSON_TEXT, offsetof(struct block, source), false, 0, 0, NULL},
    };
    if (!json_read_fields(value, fields, COUNT(fields), &block)) return false;
    cluster->host_bytes_per_s = block.bytes_per_s;
    return true;
}

static bool read_spine(struct json value, struct cluster *cluster) {
    struct block {
        double oversubscription;
        bool rail_only;
        const char *source;
    } block = {.oversubscription = 1};
    const struct json_field fields[] = {
        {"oversubscription", JSON_REAL, offsetof(struct block, oversubscription), false, 1, 1000, NULL},
        {"rail_only", JSON_BOOL, offsetof(struct block, rail_only), false, 0, 0, NULL},
        {"source", JSON_TEXT, offsetof(struct block, source), false, 0, 0, NULL},
    };
    if (!json_read_fields(value, fields, COUNT(fields), &block)) return false;
    cluster->spine.oversubscription = block.oversubscription;
    cluster->spine.rail_only = block.rail_only;
    return true;
}

/* ---- slow GPUs --------------------------------------------------------------------------------------- */

static bool read_slow_gpu(struct json value, struct slow_gpu *slow) {
    const struct json_field fields[] = {
        {"gpu", JSON_INT, offsetof(struct slow_gpu, gpu), true, 0, INT_MAX, NULL},
        {"speed", JSON_REAL, offsetof(struct slow_gpu, speed), true, 1e-3, 1, NULL},
    };
    return json_read_fields(value, fields, COUNT(fields), slow);
}

static bool slow_before(const struct cluster *cluster, int gpu) {
    for (int i = 0; i < cluster->slow_count; i++)
        if (cluster->slow_gpus[i].gpu == gpu) return true;
    return false;
}

/* gpus: how many the cluster has; 0 when that could not be read, then indices are not checked against it. */
static bool read_slow_gpus(struct json value, int gpus, struct cluster *cluster) {
    if (!cJSON_IsArray(value.node)) {
        json_error(value, "allowed: a list of {\"gpu\", \"speed\"}");
        return false;
    }
    cluster->slow_gpus =
        arena_alloc(value.arena, (size_t)cJSON_GetArraySize(value.node) * sizeof(struct slow_gpu) + 1);
    bool good = true;
    int index = 0;
    for (const cJSON *node = value.node->child; node; node = node->next, index++) {
        struct json element = json_element(value, node, index);
        struct slow_gpu slow = {0};
        if (!read_slow_gpu(element, &slow)) {
            good = false;
        } else if (gpus && slow.gpu >= gpus) {
            json_error(json_member(element, "gpu"), "the cluster has %d GPUs; allowed: 0 to %d", gpus,
                       gpus - 1);
            good = false;
        } else if (slow_before(cluster, slow.gpu)) {
            json_error(json_member(element, "gpu"), "this GPU is listed already; allowed: each once");
            good = false;
        } else {
            cluster->slow_gpus[cluster->slow_count++] = slow;
        }
    }
    return good;
}

/* ---- rates ------------------------------------------------------------------------------------------- */

static bool read_rate(struct json value, enum rate rate, struct cluster *cluster) {
    struct entry {
        double value;
        const char *unit, *source;
    } entry = {0};
    /* Time and reserved memory may be nothing; a speed may not. */
    bool is_time = rate == RATE_KERNEL_LAUNCH || rate == RATE_LAYER_OVERHEAD;
    bool may_be_zero = is_time || rate == RATE_MEMORY_RESERVE;
    const struct json_field fields[] = {
        {"value", JSON_REAL, offsetof(struct entry, value), true, may_be_zero ? 0 : 1,
         is_time ? 1 : MOST_RATE, NULL},
        {"unit", JSON_TEXT, offsetof(struct entry, unit), true, 0, 0, NULL},
        {"source", JSON_TEXT, offsetof(struct entry, source), true, 0, 0, NULL},
    };
    bool good = json_read_fields(value, fields, COUNT(fields), &entry);
    if (entry.unit && strcmp(entry.unit, RATE_KINDS[rate].unit) != 0) {
        json_error(json_member(value, "unit"), "allowed: \"%s\"", RATE_KINDS[rate].unit);
        good = false;
    }
    if (entry.source && entry.source[strspn(entry.source, " \t\r\n")] == '\0') {
        json_error(json_member(value, "source"), "allowed: a text that says where the value comes from");
        good = false;
    }
    cluster->rates[rate] = entry.value;
    cluster->rate_sources[rate] = entry.source;
    return good;
}

/* rates_read[rate]: whether that one is usable. */
static bool read_rates(struct json value, struct cluster *cluster, bool *rates_read) {
    struct json entries[RATE_COUNT] = {0};
    struct json_field fields[RATE_COUNT];
    for (int rate = 0; rate < RATE_COUNT; rate++)
        fields[rate] = (struct json_field){.key = RATE_KINDS[rate].name,
                                           .type = JSON_VALUE,
                                           .offset = (size_t)rate * sizeof entries[0],
                                           .required = !RATE_KINDS[rate].optional};
    bool good = json_read_fields(value, fields, RATE_COUNT, entries);
    for (int rate = 0; rate < RATE_COUNT; rate++) {
        if (!entries[rate].node) continue;
        rates_read[rate] = read_rate(entries[rate], (enum rate)rate, cluster);
        good &= rates_read[rate];
    }
    if (!entries[RATE_HEAD_GEMM].node) cluster->rates[RATE_HEAD_GEMM] = cluster->rates[RATE_GEMM];
    return good;
}

struct bound {
    const char *key;
    double value; /* 0: could not be read */
};

static struct bound peak_of(const struct cluster *cluster, enum peak peak) {
    switch (peak) {
    case PEAK_FLOPS:
        return (struct bound){"gpu.peak_flops", cluster->gpu.peak_flops};
    case PEAK_HBM:
        return (struct bound){"gpu.hbm_bytes_per_s", cluster->gpu.hbm_bytes_per_s};
    case PEAK_NVLINK:
        return (struct bound){"nvlink.bytes_per_s", cluster->nvlink.bytes_per_s};
    case PEAK_NIC:
        return (struct bound){"nic.bytes_per_s", cluster->nic.bytes_per_s};
    case PEAK_HOST:
        return (struct bound){"host.bytes_per_s", cluster->host_bytes_per_s};
    case PEAK_MEMORY:
        return (struct bound){"gpu.memory_bytes", cluster->gpu.memory_bytes};
    case PEAK_NONE:
        break;
    }
    return (struct bound){"", 0};
}

static bool check_peaks(struct json rates, const struct cluster *cluster, const bool *rates_read) {
    bool good = true;
    for (int rate = 0; rate < RATE_COUNT; rate++) {
        struct bound peak = peak_of(cluster, RATE_KINDS[rate].peak);
        if (!rates_read[rate] || peak.value == 0 || cluster->rates[rate] <= peak.value) continue;
        char text[32];
        json_error(json_member(json_member(rates, RATE_KINDS[rate].name), "value"),
                   "above what the hardware has; allowed: at most %s, %s", peak.key,
                   number_text(peak.value, text));
        good = false;
    }
    return good;
}

/* ---- the whole file ---------------------------------------------------------------------------------- */

struct parts {
    const char *name, *source;
    int nodes, gpus_per_node, nics_per_node;
    struct json gpu, nvlink, nic, host, spine, slow_gpus, rates;
};

static bool read_parts(struct json value, struct parts *parts) {
    const struct json_field fields[] = {
        {"name", JSON_TEXT, offsetof(struct parts, name), true, 0, 0, NULL},
        {"source", JSON_TEXT, offsetof(struct parts, source), false, 0, 0, NULL},
        {"nodes", JSON_INT, offsetof(struct parts, nodes), true, 1, MOST_NODES, NULL},
        {"gpus_per_node", JSON_INT, offsetof(struct parts, gpus_per_node), true, 1, MOST_GPUS_PER_NODE, NULL},
        {"nics_per_node", JSON_INT, offsetof(struct parts, nics_per_node), true, 1, MOST_GPUS_PER_NODE, NULL},
        {"gpu", JSON_VALUE, offsetof(struct parts, gpu), true, 0, 0, NULL},
        {"nvlink", JSON_VALUE, offsetof(struct parts, nvlink), true, 0, 0, NULL},
        {"nic", JSON_VALUE, offsetof(struct parts, nic), true, 0, 0, NULL},
        {"host", JSON_VALUE, offsetof(struct parts, host), true, 0, 0, NULL},
        {"spine", JSON_VALUE, offsetof(struct parts, spine), false, 0, 0, NULL},
        {"slow_gpus", JSON_VALUE, offsetof(struct parts, slow_gpus), false, 0, 0, NULL},
        {"rates", JSON_VALUE, offsetof(struct parts, rates), true, 0, 0, NULL},
    };
    return json_read_fields(value, fields, COUNT(fields), parts);
}

static bool in_range(int value, int most) {
    return value >= 1 && value <= most;
}

bool cluster_read(struct json value, struct cluster *cluster) {
    assert(value.node);
    *cluster = (struct cluster){.spine.oversubscription = 1};
    struct parts parts = {0};
    bool rates_read[RATE_COUNT] = {false};
    bool good = read_parts(value, &parts);
    cluster->name = parts.name;
    cluster->nodes = parts.nodes;
    cluster->gpus_per_node = parts.gpus_per_node;
    cluster->nics_per_node = parts.nics_per_node;
    if (parts.gpu.node) good &= read_gpu(parts.gpu, cluster);
    if (parts.nvlink.node)
        good &= read_link(parts.nvlink, &cluster->nvlink.bytes_per_s, &cluster->nvlink.latency_s);
    if (parts.nic.node) good &= read_link(parts.nic, &cluster->nic.bytes_per_s, &cluster->nic.latency_s);
    if (parts.host.node) good &= read_host(parts.host, cluster);
    if (parts.spine.node) good &= read_spine(parts.spine, cluster);
    if (parts.rates.node) good &= read_rates(parts.rates, cluster, rates_read);

    bool counted =
        in_range(cluster->nodes, MOST_NODES) && in_range(cluster->gpus_per_node, MOST_GPUS_PER_NODE);
    if (parts.slow_gpus.node)
        good &= read_slow_gpus(parts.slow_gpus, counted ? cluster_gpus(cluster) : 0, cluster);
    if (counted && in_range(cluster->nics_per_node, MOST_GPUS_PER_NODE) &&
        cluster->gpus_per_node % cluster->nics_per_node != 0) {
        json_error(json_member(value, "nics_per_node"), "allowed: a divisor of gpus_per_node, %d",
                   cluster->gpus_per_node);
        good = false;
    }
    if (parts.rates.node) good &= check_peaks(parts.rates, cluster, rates_read);
    return good;
}
