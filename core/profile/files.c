/*
What was measured as a cluster manifest and as a table of costs.

Figures are rounded to four digits, which is more than they are worth. Nothing here is a maker's figure: the
peaks, by which MFU divides and which no rate may exceed, are the largest rates measured.
*/
#include "profile/profile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const cost_names[COST_COUNT] = {
    "attn_fwd_s", "attn_bwd_s",  "attn_wgrad_s",   "ffn_fwd_s",   "ffn_bwd_s",   "ffn_wgrad_s",
    "dispatch_s", "combine_s",   "p2p_s",          "embed_fwd_s", "embed_bwd_s", "head_fwd_s",
    "head_bwd_s", "grad_sync_s", "param_gather_s", "optimizer_s"};

const char *cost_name(enum cost cost) {
    return cost_names[cost];
}

static double rounded(double value) {
    char text[32];
    snprintf(text, sizeof text, "%.4g", value);
    return strtod(text, NULL);
}

cJSON *costs_table(const struct spread *costs, const char *source) {
    cJSON *table = cJSON_CreateObject();
    cJSON_AddStringToObject(table, "source", source);
    for (int i = 0; i < COST_COUNT; i++) json_add_number(table, cost_names[i], rounded(costs[i].median));
    return table;
}

/* ---- the machine ------------------------------------------------------------------------------------- */

static void read_cpu(char *name, size_t size) {
    char line[256];
    FILE *stream = fopen("/proc/cpuinfo", "r");
    snprintf(name, size, "an unnamed processor");
    while (stream && fgets(line, sizeof line, stream)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        snprintf(name, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (stream) fclose(stream);
}

/* Of this process, which has measured and so has the MPI library's buffers. */
static double resident_bytes(void) {
    FILE *stream = fopen("/proc/self/statm", "r");
    long long pages = 0;
    if (stream && fscanf(stream, "%*d %lld", &pages) != 1) pages = 0;
    if (stream) fclose(stream);
    return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

void describe_machine(struct machine *machine) {
    int here = machine->ranks / machine->hosts;
    struct measured_rate *reserve = &machine->rates[RATE_MEMORY_RESERVE];
    double bytes = resident_bytes();
    read_cpu(machine->cpu, sizeof machine->cpu);
    machine->processors = processor_count();
    machine->memory_bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / here;
    reserve->value = (struct spread){bytes, bytes, bytes};
    snprintf(reserve->how, sizeof reserve->how, "a rank's resident memory, of program and MPI library");
}

/* ---- cluster ----------------------------------------------------------------------------------------- */

static void add_source(cJSON *object, const struct machine *machine, const char *how,
                       const struct spread *value) {
    struct text text = {0};
    text_add(&text, "Measured by disagmoe profile: %s", how);
    if (value) text_add(&text, "; median of %d, %.4g to %.4g", machine->repeats, value->low, value->high);
    text_add(&text, "; %d rank%s at once, a thread each, on %d host%s with %d processor%s, %s",
             machine->ranks, machine->ranks > 1 ? "s" : "", machine->hosts, machine->hosts > 1 ? "s" : "",
             machine->processors, machine->processors > 1 ? "s" : "", machine->cpu);
    cJSON_AddStringToObject(object, "source", text.text);
    free(text.text);
}

static double largest(const struct machine *machine, const enum rate *rates, size_t count, double most) {
    for (size_t i = 0; i < count; i++) most = fmax(most, machine->rates[rates[i]].value.median);
    return rounded(most);
}

static cJSON *gpu_block(const struct machine *machine) {
    static const enum rate products[] = {RATE_GEMM, RATE_CORE_FORWARD, RATE_CORE_BACKWARD, RATE_GROUPED_GEMM,
                                         RATE_HEAD_GEMM};
    static const enum rate memory[] = {RATE_HBM};
    cJSON *gpu = cJSON_CreateObject();
    struct text how = {0};
    text_add(&how,
             "the largest rates measured, as peaks: %s, and copies in memory; memory is the host's share",
             machine->peak_flops.how);
    cJSON_AddStringToObject(gpu, "name", "a process on a CPU core");
    json_add_number(gpu, "memory_bytes", rounded(machine->memory_bytes));
    json_add_number(gpu, "peak_flops",
                    largest(machine, products, COUNT(products), machine->peak_flops.value.median));
    json_add_number(gpu, "hbm_bytes_per_s",
                    largest(machine, memory, COUNT(memory), 2 * machine->copy.value.median));
    add_source(gpu, machine, how.text, NULL);
    free(how.text);
    return gpu;
}

/* factor: ranks that the link serves. */
static cJSON *link_block(const struct machine *machine, const struct measured_rate *link,
                         const struct measured_rate *latency, enum rate exchange, enum rate reduce,
                         double factor) {
    const enum rate rates[] = {exchange, reduce};
    struct text how = {0};
    cJSON *block = cJSON_CreateObject();
    text_add(&how, "%s, or the largest rate beside it; latency of one byte", link->how);
    json_add_number(block, "bytes_per_s",
                    rounded(factor * largest(machine, rates, COUNT(rates), link->value.median)));
    json_add_number(block, "latency_s", rounded(latency->value.median));
    add_source(block, machine, how.text, &link->value);
    free(how.text);
    return block;
}

cJSON *machine_cluster(const struct machine *machine, const struct cluster *like, const char *name) {
    double ranks_a_nic = (double)like->gpus_per_node / like->nics_per_node; /* each had its part of one */
    cJSON *cluster = cJSON_CreateObject(), *host, *spine, *rates;
    cJSON_AddStringToObject(cluster, "name", name);
    add_source(cluster, machine, "kernels and links of this machine", NULL);
    json_add_number(cluster, "nodes", like->nodes);
    json_add_number(cluster, "gpus_per_node", like->gpus_per_node);
    json_add_number(cluster, "nics_per_node", like->nics_per_node);
    cJSON_AddItemToObject(cluster, "gpu", gpu_block(machine));
    cJSON_AddItemToObject(cluster, "nvlink",
                          link_block(machine, &machine->inside, &machine->inside_latency,
                                     RATE_NVLINK_EXCHANGE, RATE_NVLINK_REDUCE, 1));
    cJSON_AddItemToObject(cluster, "nic",
                          link_block(machine, &machine->between, &machine->between_latency, RATE_NIC_EXCHANGE,
                                     RATE_NIC_REDUCE, ranks_a_nic));
    host = cJSON_AddObjectToObject(cluster, "host");
    json_add_number(host, "bytes_per_s", rounded(machine->copy.value.median));
    add_source(host, machine, machine->copy.how, &machine->copy.value);
    spine = cJSON_AddObjectToObject(cluster, "spine");
    json_add_number(spine, "oversubscription", 1);
    cJSON_AddFalseToObject(spine, "rail_only");
    cJSON_AddStringToObject(spine, "source", "Not measured apart: all pairs and ranks were measured at once");
    cJSON_AddArrayToObject(cluster, "slow_gpus");
    rates = cJSON_AddObjectToObject(cluster, "rates");
    for (int i = 0; i < RATE_COUNT; i++) {
        const struct measured_rate *rate = &machine->rates[i];
        if (!(rate->value.median > 0)) continue;
        cJSON *entry = cJSON_AddObjectToObject(rates, cluster_rate_name((enum rate)i));
        bool nic = i == RATE_NIC_EXCHANGE || i == RATE_NIC_REDUCE;
        json_add_number(entry, "value", rounded((nic ? ranks_a_nic : 1) * rounded(rate->value.median)));
        cJSON_AddStringToObject(entry, "unit", cluster_rate_unit((enum rate)i));
        add_source(entry, machine, rate->how, i == RATE_MEMORY_RESERVE ? NULL : &rate->value);
    }
    return cluster;
}
