/*
The roofline of one layer (the paper's section 4), and its intensities (section 3).
*/
#include "allocate/allocate.h"

#include <math.h>

/* Forward FLOPs of one sequence in a layer on average: windows and dense layers differ. */
struct forward_flops {
    double attention, ffn;
};

static struct forward_flops forward_of(const struct model *model, int seq_len) {
    struct forward_flops sum = {0};
    struct tokens tokens = {1, seq_len, 1};
    for (int layer = 0; layer < model->layers; layer++) {
        double copies = (double)seq_len * model_copies(model, layer);
        struct ffn_load load = {copies, copies, model->moe.experts, seq_len};
        struct work attention = model_attention_work(model, layer, WORK_FORWARD, tokens, 0);
        struct work ffn = model_ffn_work(model, layer, WORK_FORWARD, load, 0);
        sum.attention += work_flops(&attention, UNIT_DENSE) + attention.core_flops;
        sum.ffn += work_flops(&ffn, UNIT_DENSE) + work_flops(&ffn, UNIT_EXPERTS);
    }
    return (struct forward_flops){sum.attention / model->layers, sum.ffn / model->layers};
}

/* Bytes of one sequence that dispatch sends, in a layer on average. */
static double copies_bytes(const struct model *model, int seq_len) {
    double copies = 0;
    for (int layer = 0; layer < model->layers; layer++) copies += model_copies(model, layer);
    return copies / model->layers * seq_len * model_hidden_bytes(model);
}

struct roofline roofline_relaxed(const struct point *point, double sequences) {
    const struct cluster *cluster = point->cluster;
    struct forward_flops flops = forward_of(point->model, point->seq_len);
    return (struct roofline){
        .attn_flops = sequences * flops.attention,
        .ffn_flops = sequences * flops.ffn,
        .bytes = sequences * copies_bytes(point->model, point->seq_len),
        .peak_flops = cluster->gpu.peak_flops,
        .attn_flops_per_s = cluster->gpu.peak_flops,
        .ffn_flops_per_s = cluster->gpu.peak_flops,
        .nic_bytes_per_s = cluster->nic.bytes_per_s,
        .gpus = cluster_gpus(cluster),
        .nics = cluster->nodes * cluster->nics_per_node,
    };
}

struct intensity intensity_of_paper(const struct model *model, int seq_len) {
    double queries_a_key = (double)model->attention.heads / model->attention.kv_heads;
    return (struct intensity){(model->hidden * (2 + 2 / queries_a_key) + 4.0 * seq_len) /
                                  (2.0 * model->moe.top_k),
                              2.0 * model->moe.expert_hidden};
}

struct intensity intensity_exact(const struct model *model, int seq_len) {
    struct forward_flops flops = forward_of(model, seq_len);
    double bytes = copies_bytes(model, seq_len);
    return (struct intensity){flops.attention / bytes, flops.ffn / bytes};
}

double turning_point(double flops_per_s, double bytes_per_s) {
    return flops_per_s / bytes_per_s;
}

struct allocation_problem roofline_problem(const struct roofline *roofline, struct arena *arena) {
    int most_gpus = roofline->gpus > 1 ? roofline->gpus - 1 : 0,
        nics = roofline->nics > 0 ? roofline->nics : 0;
    double *attention = arena_alloc(arena, (size_t)(most_gpus + 1) * sizeof(double));
    double *ffn = arena_alloc(arena, (size_t)(most_gpus + 1) * sizeof(double));
    double *nic = arena_alloc(arena, (size_t)(nics + 1) * sizeof(double));
    for (int i = 0; i < most_gpus; i++) {
        attention[i] = roofline->attn_flops / ((i + 1) * roofline->attn_flops_per_s);
        ffn[i] = roofline->ffn_flops / ((i + 1) * roofline->ffn_flops_per_s);
    }
    for (int i = 0; i < nics; i++) nic[i] = roofline->bytes / ((i + 1) * roofline->nic_bytes_per_s);
    return (struct allocation_problem){.gpus = roofline->gpus,
                                       .nics = nics,
                                       .most_attn_gpus = most_gpus,
                                       .most_ffn_gpus = most_gpus,
                                       .attn_seconds = attention,
                                       .ffn_seconds = ffn,
                                       .attn_nic_seconds = nic,
                                       .ffn_nic_seconds = nic,
                                       .usable = INFINITY,
                                       .flops = roofline->attn_flops + roofline->ffn_flops,
                                       .peak_flops = roofline->peak_flops,
                                       .multiple = 1};
}
