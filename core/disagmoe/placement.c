/*
Spreading GPUs over nodes and dividing the nodes' NICs.
*/
#include "disagmoe/placement.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- spreading --------------------------------------------------------------------------------------- */

/* Things in a row, spread evenly over nodes; where they do not divide, the first of some nodes have one more.
 */
struct spread {
    int first_node, nodes, things;
};

static int node_of(struct spread spread, int index) {
    return spread.first_node + (int)((int64_t)index * spread.nodes / spread.things);
}

static int gpu_of(const struct cluster *cluster, struct spread spread, int index) {
    int node = node_of(spread, index) - spread.first_node;
    int first = (int)(((int64_t)node * spread.things + spread.nodes - 1) / spread.nodes);
    return (spread.first_node + node) * cluster->gpus_per_node + index - first;
}

static int nodes_for(int things, int a_node) {
    return (things + a_node - 1) / a_node;
}

static int larger(int a, int b) {
    return a > b ? a : b;
}

/* ---- GPUs -------------------------------------------------------------------------------------------- */

static int block_count(const struct plan *plan) {
    return plan->replicas * plan->parallel.groups;
}

static int owned(int nics) {
    return nics > 0 ? nics : 0;
}

/* Nodes of the attention side (mixed: of both) and of the feed-forward side. */
static void count_nodes(const struct plan *plan, int *attention, int *ffn) {
    const struct cluster *cluster = plan->point->cluster;
    const struct parallel *parallel = &plan->parallel;
    int blocks = block_count(plan), m = parallel->attn_gpus, n = parallel->ffn_gpus;
    int a_nics = blocks * owned(parallel->attn_nics), f_nics = blocks * owned(parallel->ffn_nics);
    int gpus = cluster->gpus_per_node, nics = cluster->nics_per_node;
    if (plan->placement == PLACEMENT_MIXED) {
        *attention = larger(nodes_for(blocks * (m + n), gpus), nodes_for(a_nics + f_nics, nics));
        *ffn = 0;
        return;
    }
    *attention = larger(nodes_for(blocks * m, gpus), nodes_for(a_nics, nics));
    *ffn = larger(nodes_for(blocks * n, gpus), nodes_for(f_nics, nics));
}

/* Within a mixed block, which has m of m + n places for attention: the place where the i-th of m equal parts
   ends, or the i-th other one. */
static void interleave(int m, int n, int *attention, int *ffn) {
    int a = 0, f = 0;
    for (int place = 0; place < m + n; place++) {
        bool is_attention = (int64_t)(place + 1) * m / (m + n) > (int64_t)place * m / (m + n);
        if (is_attention)
            attention[a++] = place;
        else
            ffn[f++] = place;
    }
}

static void place_gpus(const struct plan *plan, struct arena *arena, int a_nodes, int f_nodes,
                       struct ring_placement *placement) {
    const struct cluster *cluster = plan->point->cluster;
    int m = plan->parallel.attn_gpus, n = plan->parallel.ffn_gpus, blocks = placement->blocks;
    bool mixed = plan->placement == PLACEMENT_MIXED;
    struct spread a = {0, a_nodes, blocks * m}, f = {a_nodes, f_nodes, blocks * n};
    int *places = arena_alloc(arena, (size_t)(m + n) * sizeof(int)), *f_places = places + m;
    int a_step = m, f_step = n;
    for (int i = 0; i < m; i++) places[i] = i;
    for (int i = 0; i < n; i++) f_places[i] = i;
    if (mixed) {
        interleave(m, n, places, f_places);
        a = f = (struct spread){0, a_nodes, blocks * (m + n)};
        a_step = f_step = m + n;
    }
    int *gpus = arena_alloc(arena, (size_t)(blocks * (m + n)) * sizeof(int));
    for (int b = 0; b < blocks; b++) {
        placement->attention[b] = (struct side){.gpus = gpus, .count = m};
        for (int i = 0; i < m; i++) *gpus++ = gpu_of(cluster, a, b * a_step + places[i]);
        placement->ffn[b] = (struct side){.gpus = gpus, .count = n};
        for (int i = 0; i < n; i++) *gpus++ = gpu_of(cluster, f, b * f_step + f_places[i]);
    }
}

/* ---- NICs -------------------------------------------------------------------------------------------- */

/* A side on one of its nodes. */
struct claim {
    int side, node;
    const int *gpus; /* those of the side that stand here */
    int gpu_count, nics;
};

struct claims {
    struct claim *list;
    int count;
    int *wanted; /* (sides) NICs still to be given to each */
    int *left;   /* (nodes) NICs nobody has */
};

static void add_claims(struct claims *claims, const struct cluster *cluster, int side,
                       const struct side *it) {
    for (int i = 0; i < it->count; i++) {
        struct claim *last = claims->count ? &claims->list[claims->count - 1] : NULL;
        int node = it->gpus[i] / cluster->gpus_per_node;
        if (last && last->side == side && last->node == node)
            last->gpu_count++;
        else
            claims->list[claims->count++] = (struct claim){side, node, it->gpus + i, 1, 0};
    }
}

static void give(struct claims *claims, struct claim *claim) {
    claim->nics++;
    claims->wanted[claim->side]--;
    claims->left[claim->node]--;
}

static bool may_take(const struct claims *claims, const struct claim *claim) {
    return claims->wanted[claim->side] > 0 && claims->left[claim->node] > 0;
}

/* One NIC each, then always to the claim with most GPUs a NIC (the first of equals): so a side's NICs are
   spread as its GPUs are, and a node's are divided as the GPUs on it. False when they do not suffice. */
static bool divide_claims(struct claims *claims, int sides) {
    for (int c = 0; c < claims->count; c++) {
        if (!may_take(claims, &claims->list[c])) return false;
        give(claims, &claims->list[c]);
    }
    for (;;) {
        struct claim *neediest = NULL;
        for (int c = 0; c < claims->count; c++) {
            struct claim *claim = &claims->list[c];
            if (!may_take(claims, claim)) continue;
            if (!neediest || claim->gpu_count * neediest->nics > neediest->gpu_count * claim->nics)
                neediest = claim;
        }
        if (!neediest) break;
        give(claims, neediest);
    }
    for (int side = 0; side < sides; side++)
        if (claims->wanted[side] > 0) return false;
    return true;
}

static void take_nic(struct side *side, int *nics, bool *taken, int nic, struct claim *claim) {
    nics[side->nic_count++] = nic;
    taken[nic] = true;
    claim->nics--;
}

/* Each side first takes NICs beside its own GPUs, then what is left on the node. */
static void take_nics(const struct cluster *cluster, const struct claims *claims, struct side **sides,
                      int **nics) {
    bool *taken = must_alloc((size_t)(cluster->nodes * cluster->nics_per_node) * sizeof *taken);
    for (int c = 0; c < claims->count; c++) {
        struct claim *claim = &claims->list[c];
        for (int i = 0; i < claim->gpu_count && claim->nics; i++) {
            int nic = cluster_nic_beside(cluster, claim->gpus[i]);
            if (!taken[nic]) take_nic(sides[claim->side], nics[claim->side], taken, nic, claim);
        }
    }
    for (int c = 0; c < claims->count; c++) {
        struct claim *claim = &claims->list[c];
        for (int nic = claim->node * cluster->nics_per_node; claim->nics; nic++)
            if (!taken[nic]) take_nic(sides[claim->side], nics[claim->side], taken, nic, claim);
    }
    free(taken);
}

static bool place_nics(const struct plan *plan, struct arena *arena, struct ring_placement *placement) {
    const struct cluster *cluster = plan->point->cluster;
    int blocks = placement->blocks, count = 2 * blocks;
    int gpus = blocks * (plan->parallel.attn_gpus + plan->parallel.ffn_gpus);
    struct claims claims = {.list = must_alloc((size_t)gpus * sizeof *claims.list),
                            .wanted = must_alloc((size_t)count * sizeof(int)),
                            .left = must_alloc((size_t)cluster->nodes * sizeof(int))};
    struct side **sides = must_alloc((size_t)count * sizeof *sides);
    int **nics = must_alloc((size_t)count * sizeof *nics);
    for (int node = 0; node < cluster->nodes; node++) claims.left[node] = cluster->nics_per_node;
    for (int b = 0; b < blocks; b++)
        for (int ffn = 0; ffn < 2; ffn++) {
            int wanted = ffn ? plan->parallel.ffn_nics : plan->parallel.attn_nics, s = 2 * b + ffn;
            sides[s] = ffn ? &placement->ffn[b] : &placement->attention[b];
            sides[s]->nics = nics[s] = arena_alloc(arena, (size_t)wanted * sizeof(int));
            claims.wanted[s] = wanted;
            add_claims(&claims, cluster, s, sides[s]);
        }
    bool divided = divide_claims(&claims, count);
    if (divided) take_nics(cluster, &claims, sides, nics);
    free(claims.list);
    free(claims.wanted);
    free(claims.left);
    free(sides);
    free(nics);
    return divided;
}

/* ---- both -------------------------------------------------------------------------------------------- */

bool placement_fits(const struct plan *plan, struct errors *errors) {
    const struct cluster *cluster = plan->point->cluster;
    const struct parallel *parallel = &plan->parallel;
    int blocks = block_count(plan), gpus = cluster->gpus_per_node, a_nodes, f_nodes;
    count_nodes(plan, &a_nodes, &f_nodes);
    if (a_nodes + f_nodes <= cluster->nodes) return true;
    if (!errors) return false;
    int least = nodes_for(blocks * parallel->attn_gpus, gpus) + nodes_for(blocks * parallel->ffn_gpus, gpus);
    if (plan->placement == PLACEMENT_SPLIT && least > cluster->nodes)
        errors_add(errors, NULL, "placement",
                   "found split-nodes; %d A-GPUs and %d F-GPUs on nodes of their own do not fit the "
                   "cluster's %d nodes",
                   blocks * parallel->attn_gpus, blocks * parallel->ffn_gpus, cluster->nodes);
    else
        errors_add(errors, NULL, owned(parallel->attn_nics) ? "parallel.attn_nics" : "parallel.ffn_nics",
                   "found %d and %d NICs a group, %d groups in all; they need %d nodes, the cluster has %d",
                   owned(parallel->attn_nics), owned(parallel->ffn_nics), blocks, a_nodes + f_nodes,
                   cluster->nodes);
    return false;
}

bool placement_make(const struct plan *plan, struct arena *arena, struct ring_placement *placement,
                    struct errors *errors) {
    int a_nodes, f_nodes, blocks = block_count(plan);
    if (!placement_fits(plan, errors)) return false;
    count_nodes(plan, &a_nodes, &f_nodes);
    *placement = (struct ring_placement){.blocks = blocks};
    placement->attention = arena_alloc(arena, (size_t)blocks * sizeof *placement->attention);
    placement->ffn = arena_alloc(arena, (size_t)blocks * sizeof *placement->ffn);
    place_gpus(plan, arena, a_nodes, f_nodes, placement);
    if (plan->parallel.attn_nics == NICS_SHARED || place_nics(plan, arena, placement)) return true;
    if (errors)
        errors_add(errors, NULL, "parallel.attn_nics",
                   "found %d beside ffn_nics %d; each side owns at least one NIC on every node it stands on, "
                   "and the sides on a node at most its %d NICs together",
                   plan->parallel.attn_nics, plan->parallel.ffn_nics, plan->point->cluster->nics_per_node);
    return false;
}

/* ---- the division -------------------------------------------------------------------------------------- */

static bool run_straddles_nodes(const struct plan *plan, const struct ring_placement *placement) {
    int cp = plan->parallel.cp, node = plan->point->cluster->gpus_per_node;
    for (int b = 0; b < placement->blocks; b++)
        for (int i = 0; i < plan->parallel.attn_gpus; i++)
            if (placement->attention[b].gpus[i] / node != placement->attention[b].gpus[i / cp * cp] / node)
                return true;
    return false;
}

/* The longest dispatch or combine of one replica of the ring. */
static double longest_transfer(const struct plan *plan, const struct ring_placement *placement) {
    int p = plan->parallel.groups, layer = plan->point->model->layers - 1;
    double longest = 0;
    for (int g = 0; g < p; g++) {
        struct sides sides = {placement->attention[g], placement->ffn[g], placement->attention[(g + 1) % p]};
        longest = fmax(longest, plan_dispatch_cost(plan, layer, sides).seconds);
        longest = fmax(longest, plan_combine_cost(plan, layer, sides, 1).seconds);
    }
    return longest;
}

/* The best division so far; what the manifest gives stays as it is. */
struct division {
    struct plan *plan;
    struct parallel best;
    double longest; /* INFINITY: none yet */
    bool straddles; /* of the best */
};

/* Seconds of the longest transfer; INFINITY where it does not fit. */
static double try_division(struct division *division, int attention, int ffn) {
    struct plan tried = *division->plan;
    struct ring_placement placement;
    struct arena *arena = arena_new();
    double longest = INFINITY;
    if (!tried.parallel.attn_nics) tried.parallel.attn_nics = attention;
    if (!tried.parallel.ffn_nics) tried.parallel.ffn_nics = ffn;
    if (placement_make(&tried, arena, &placement, NULL)) {
        bool straddles = run_straddles_nodes(&tried, &placement);
        bool worse = straddles && !division->straddles && division->longest < INFINITY;
        longest = longest_transfer(&tried, &placement);
        /* More nodes must pay: equal ones differ in the last bits. */
        if (!worse && longest < division->longest * (1 - 1e-9)) {
            division->longest = longest;
            division->best = tried.parallel;
            division->straddles = straddles;
        }
    }
    arena_free(arena);
    return longest;
}

/* All NICs of the nodes; the spare nodes go to either side. What leaves one side enters the other, so the
   best division is near equal numbers. */
static void divide_split(struct division *division) {
    const struct plan *plan = division->plan;
    const struct cluster *cluster = plan->point->cluster;
    int blocks = block_count(plan), gpus = cluster->gpus_per_node, nics = cluster->nics_per_node;
    int a_least = nodes_for(blocks * plan->parallel.attn_gpus, gpus);
    int f_least = nodes_for(blocks * plan->parallel.ffn_gpus, gpus);
    try_division(division, a_least * nics / blocks, f_least * nics / blocks);
    int spare = cluster->nodes - a_least - f_least;
    for (int more = 0; spare > 0 && more <= spare; more++) {
        int a_nodes = a_least + more, f_nodes = cluster->nodes - a_nodes;
        try_division(division, a_nodes * nics / blocks, f_nodes * nics / blocks);
    }
}

/* From equal numbers on, one NIC at a time as long as that helps: from one side to the other, and fewer for
   both, since a side on few nodes finds less of them left where the other asks for many. */
static void divide_mixed_on(struct division *division, int nodes) {
    const struct plan *plan = division->plan;
    const struct parallel *parallel = &plan->parallel;
    int total = nodes * plan->point->cluster->nics_per_node / block_count(plan);
    int half = total / 2, own = total * parallel->attn_gpus / (parallel->attn_gpus + parallel->ffn_gpus);
    double longest = try_division(division, half, total - half);
    for (int step = -1; step <= 1; step += 2) {
        double before = longest;
        for (int a = half + step; a > 0 && a < total; a += step) {
            double now = try_division(division, a, total - a);
            if (now > before) break;
            before = now;
        }
    }
    try_division(division, own, total - own);
    for (int each = half - 1; each > 0; each--) {
        double now = try_division(division, each, each);
        if (now > longest) break;
        longest = now;
    }
}

static void divide_mixed(struct division *division) {
    const struct plan *plan = division->plan;
    const struct cluster *cluster = plan->point->cluster;
    int gpus = block_count(plan) * (plan->parallel.attn_gpus + plan->parallel.ffn_gpus);
    int least = nodes_for(gpus, cluster->gpus_per_node);
    divide_mixed_on(division, least);
    if (least < cluster->nodes) divide_mixed_on(division, cluster->nodes);
}

void placement_divide_nics(struct plan *plan) {
    struct parallel *parallel = &plan->parallel;
    struct division division = {.plan = plan, .best = *parallel, .longest = INFINITY};
    if (parallel->attn_nics && parallel->ffn_nics) return;
    if (plan->placement == PLACEMENT_MIXED)
        divide_mixed(&division);
    else
        divide_split(&division);
    *parallel = division.best;
    if (division.longest == INFINITY && !parallel->attn_nics && !parallel->ffn_nics)
        parallel->attn_nics = parallel->ffn_nics = NICS_SHARED;
}
