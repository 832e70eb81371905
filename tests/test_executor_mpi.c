/*
Training on ranks against the single-process reference: random layouts of both systems, models of all three
families, memory levers and routings; loss and every parameter's gradient must be the reference's, to
rounding, and what a rank holds what the schedule says.

Run plainly this is a cmocka program that starts itself under mpirun, once for each kind of case; a rank goes
through all cases of its kind. A case takes as many of the ranks as its plan has GPUs; the others wait.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "baselines/baselines.h"
#include "sim/sim.h"
#include "tests/cases.h"
#include "tests/under_mpi.h"
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 8 };
static const bool IS_DOUBLE = sizeof(floatX) == sizeof(double);

/* ---- random cases ------------------------------------------------------------------------------------ */

enum family { QWEN3, GPTOSS, DEEPSEEK, NOISY, FAMILIES };
static const char *const attention_of[FAMILIES] = {
    [QWEN3] = "\"kv_heads\": 2, \"qk_norm\": true",
    [GPTOSS] = "\"kv_heads\": 2, \"bias\": true, \"sinks\": true, \"window\": 4, \"window_layers\": \"even\"",
    [DEEPSEEK] = "\"kv_heads\": 4",
    [NOISY] = "\"kv_heads\": 1, \"qk_norm\": true, \"bias\": true",
};
static const char *const moe_of[FAMILIES] = {
    [QWEN3] = "\"renormalise\": true, \"aux_loss\": 0.02",
    [GPTOSS] = "\"router\": \"topk_softmax\", \"activation\": \"swiglu_clamped\", \"bias\": true, "
               "\"aux_loss\": 0.01",
    [DEEPSEEK] =
        "\"shared_experts\": 2, \"dense_layers\": 1, \"dense_hidden\": 12, \"aux_loss\": 0.01, \"z_loss\": "
        "0.001",
    [NOISY] =
        "\"router\": \"noisy_topk\", \"capacity_factor\": 0.7, \"shared_experts\": 1, \"dense_layers\": 2, "
        "\"dense_hidden\": 10, \"bias\": true, \"z_loss\": 0.01",
};

static const char *word(struct rng *rng, const char *const *words, int count) {
    return words[rng_below(rng, count)];
}

struct wanted {
    const char *system;
    int family;
    int cp;
    bool whole;         /* sizes in which copies and rows come out even, for comparing memory */
    const char *levers; /* further keys */
};

/* Sizes of both systems' layouts, at most RANKS GPUs each, of which every replica that fits is used. */
struct sizes {
    int pp, vpp, ep, groups, attn, ffn;
};

static struct sizes random_sizes(struct rng *rng, int cp) {
    struct sizes sizes = {.vpp = 1 + rng_below(rng, 2)};
    int most_pp = RANKS / cp < 3 ? RANKS / cp : 3, most_groups = cp == 1 ? 3 : cp == 2 ? 2 : 1;
    sizes.pp = 1 + rng_below(rng, most_pp);
    int most_ep = RANKS / sizes.pp < 4 ? RANKS / sizes.pp : 4;
    sizes.ep = cp * (1 + rng_below(rng, most_ep / cp));
    sizes.groups = 1 + rng_below(rng, most_groups);
    int most = RANKS / sizes.groups - 1 < 4 ? RANKS / sizes.groups - 1 : 4;
    sizes.attn = cp * (1 + rng_below(rng, most / cp));
    most = RANKS / sizes.groups - sizes.attn;
    sizes.ffn = 1 + rng_below(rng, most < 4 ? most : 4);
    return sizes;
}

/* All of a case but what the kind sets. */
static char *random_case(struct rng *rng, struct wanted wanted) {
    static const char *const prefer[] = {"backward", "forward", "wave"};
    struct text text = {0}, without = {0};
    bool whole = wanted.whole;
    add_random_without(&without, rng);
    struct sizes sizes = random_sizes(rng, wanted.cp);
    int pp = sizes.pp, batch = 1 + rng_below(rng, 12), some = rng_below(rng, 9);
    bool sized = whole || (sizes.vpp > 1 && pp > 1); /* interleaving needs whole rounds */
    int experts = 5 + rng_below(rng, 4),
        layers = pp * sizes.vpp > sizes.groups ? pp * sizes.vpp : sizes.groups;
    int seq_len = wanted.cp > 1 ? 2 * wanted.cp * (1 + some % 4) : 5 + some;
    text_add(
        &text,
        "{\"model\": {\"name\": \"tiny\", \"layers\": %d, \"hidden\": 16, \"vocab\": 33, \"tie_embeddings\": "
        "%s, "
        "\"attention\": {\"heads\": 4, \"head_dim\": 4, %s}, \"moe\": {\"experts\": %d, \"top_k\": %d, "
        "\"expert_hidden\": 8, %s}}, \"cluster\": {\"name\": \"here\", \"nodes\": 1, \"gpus_per_node\": %d, "
        "\"nics_per_node\": %d, CLUSTER}, \"systems\": [\"%s\"], \"seq_len\": %d, \"micro_batch_size\": %d, "
        "\"%s\": %d, \"parallel\": {\"pp\": %d, \"vpp\": %d, \"ep\": %d, \"groups\": %d, \"attn_gpus\": %d, "
        "\"ffn_gpus\": %d, \"cp\": %d}, \"order\": {\"wave\": %d, \"waves_in_flight\": %d, \"prefer\": "
        "\"%s\", \"without\": %s}, "
        "\"placement\": \"mixed-nodes\", \"head\": \"%s\", \"seed\": %d, %s}",
        layers + rng_below(rng, 2) + (wanted.family == NOISY), rng_below(rng, 3) ? "false" : "true",
        attention_of[wanted.family], whole ? 6 : experts, 1 + rng_below(rng, 3), moe_of[wanted.family], RANKS,
        RANKS, wanted.system, whole ? 48 * wanted.cp * (1 + some % 2) : seq_len, 1 + rng_below(rng, 2),
        sized ? "micro_batches" : "global_batch", sized ? pp * (1 + rng_below(rng, 2)) : batch, pp, sizes.vpp,
        sizes.ep, sizes.groups, sizes.attn, sizes.ffn, wanted.cp, 1 + rng_below(rng, 3),
        1 + rng_below(rng, 2), word(rng, prefer, 3), without.text, rng_below(rng, 2) ? "last-ffn" : "all-ffn",
        1 + rng_below(rng, 1000), wanted.levers);
    free(without.text);
    return text.text;
}

/* ---- running one ------------------------------------------------------------------------------------- */

static int my_rank;
static char *cluster_text; /* keys of the cluster file behind its sizes */

static void fail_case(const char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fail_case(const char *text, const char *format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    const char *cluster = strstr(text, ", \"gpu\":"), *behind = strstr(text, ", \"systems\"");
    int before = cluster ? (int)(cluster - text) : 0;
    fprintf(stderr, "rank %d: %s\n  in %.*s …%s\n", my_rank, message, before, text, behind ? behind : "");
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void read_cluster(void) {
    static const char *const sizes[] = {"name", "source", "nodes", "gpus_per_node", "nics_per_node"};
    struct arena *arena = arena_new();
    struct errors errors = {0};
    struct json cluster = json_read_file("experiments/clusters/h800-16x8.json", arena, &errors);
    for (size_t i = 0; i < COUNT(sizes); i++) cJSON_DeleteItemFromObjectCaseSensitive(cluster.node, sizes[i]);
    char *printed = cJSON_PrintUnformatted(cluster.node);
    printed[strlen(printed) - 1] = '\0'; /* without its braces */
    cluster_text = strdup(printed + 1);
    cJSON_free(printed);
    cJSON_Delete(cluster.node);
    arena_free(arena);
}

static char *with_cluster(const char *text) {
    const char *place = strstr(text, "CLUSTER");
    struct text whole = {0};
    text_add(&whole, "%.*s%s%s", (int)(place - text), text, cluster_text, place + strlen("CLUSTER"));
    return whole.text;
}

struct expectation {
    double tolerance; /* of gradients */
    bool memory;      /* routing is forced to the plan's, and large enough for rounding not to matter */
};

/* Of all cases of a kind. */
static struct worst {
    int planned;
    double gradient, held;
} worst_of_kind;

static void check_memory(struct trainer *trainer, const struct expectation *expected, const char *text) {
    int ranks = trainer_ranks(trainer);
    struct memory_report *reports = must_alloc((size_t)ranks * sizeof *reports);
    trainer_memory(trainer, reports);
    for (int rank = 0; rank < ranks; rank++) {
        const struct memory_report *it = &reports[rank];
        double held = it->used - it->used_static, planned = it->as_run - it->predicted_static;
        if (fabs(it->used_static / it->predicted_static - 1) > 0.02)
            fail_case(text, "static: holds %g bytes, predicted %g", it->used_static, it->predicted_static);
        if (expected->memory) worst_of_kind.held = fmax(worst_of_kind.held, fabs(held / planned - 1));
        if (expected->memory && fabs(held / planned - 1) > 0.02)
            fail_case(text, "activations of rank %d: held %g bytes, predicted %g", rank, held, planned);
        if (it->as_run > it->predicted * (1 + 1e-9))
            fail_case(text, "order: %g bytes as run, %g as simulated", it->as_run, it->predicted);
    }
    free(reports);
}

/* Two steps beside the reference, where the case has a plan. */
static void run_case(char *bare, const struct expectation *expected) {
    char *text = with_cluster(bare);
    struct experiment experiment;
    struct errors errors = {0};
    if (!experiment_read_text(text, "test.json", &experiment, &errors))
        fail_case(text, "%s", errors.messages[0]);
    struct point *point = &experiment.points[0];
    point->model->dtype = IS_DOUBLE ? DTYPE_FP64 : DTYPE_FP32;
    const struct system *system = system_named(point->systems[0]);
    struct plan plan;
    bool feasible, planned = tune_point(system, point, &plan, &feasible, &errors) && feasible;
    MPI_Comm comm;
    MPI_Comm_split(MPI_COMM_WORLD, planned && my_rank < plan.gpus ? 0 : MPI_UNDEFINED, my_rank, &comm);
    if (comm != MPI_COMM_NULL) {
        struct schedule *schedule = system->build(&plan);
        struct timeline timeline = {0};
        schedule_arrange(schedule, &timeline);
        struct data *data = data_markov(point->model->vocab, point->seq_len, 5);
        struct trainer *trainer =
            trainer_new(&plan, schedule, &timeline, data, (uint64_t)point->seed, comm, &errors);
        if (!trainer) fail_case(text, "%s", errors.messages[0]);
        trainer_verify(trainer);
        for (int step = 0; step < 2; step++)
            if (!trainer_step(trainer).finite) fail_case(text, "step %d is not finite", step);
        struct verification worst = trainer_verification(trainer);
        if (!(worst.loss_rel < (IS_DOUBLE ? 1e-10 : 1e-4)) || !(worst.grad_rel < expected->tolerance))
            fail_case(text, "loss off by %g, gradient of %s by %g", worst.loss_rel, worst.worst_parameter,
                      worst.grad_rel);
        worst_of_kind.gradient = fmax(worst_of_kind.gradient, worst.grad_rel);
        check_memory(trainer, expected, text);
        trainer_free(trainer);
        data_free(data);
        timeline_free(&timeline);
        schedule_free(schedule);
        MPI_Comm_free(&comm);
    }
    errors_free(&errors);
    experiment_free(&experiment);
    free(text);
    free(bare);
    worst_of_kind.planned += planned;
}

/* ---- kinds of cases ---------------------------------------------------------------------------------- */

static const char *const systems[] = {"megatron", "disagmoe"};
static const double PROOF[] = {1e-4, 1e-10}; /* float32, float64 */

static int sample(int cases) {
    const char *divisor = getenv("DISAGMOE_SAMPLE");
    bool instrumented = strcmp(getenv("DISAGMOE_MODE") ? getenv("DISAGMOE_MODE") : "plain", "plain") != 0;
    if (divisor) return 1 + cases / atoi(divisor);
    return instrumented ? 1 + cases / 8 : cases;
}

/* Every third case each with a run of one, two and four ranks. */
static int cp_of(int i) {
    return 1 << i % 3;
}

static void layouts(void) {
    struct rng rng = rng_seed(1);
    struct expectation expected = {PROOF[IS_DOUBLE], false};
    for (int i = 0; i < sample(48); i++)
        run_case(random_case(&rng, (struct wanted){systems[i % 2], i / 2 % FAMILIES, cp_of(i), false,
                                                   "\"memory\": {}"}),
                 &expected);
}

/* Every level of either side, in all layers and in the lowest alone. */
static void memory_levers(void) {
    static const char *const attention[] = {"none", "norms", "projections", "full"};
    static const char *const ffn[] = {"none", "activation", "full"}, *const input[] = {"keep", "resend"};
    struct rng rng = rng_seed(2);
    struct expectation expected = {PROOF[IS_DOUBLE], true};
    for (int i = 0; i < sample(96); i++) {
        char levers[320];
        int pick = i * 37 % 96; /* few cases, too, have all levels */
        snprintf(levers, sizeof levers,
                 "\"memory\": {\"recompute\": {\"attention\": \"%s\", \"ffn\": \"%s\", \"layers\": %d}, "
                 "\"expert_input\": \"%s\", \"zero\": %d, \"offload\": %s, \"moments\": \"%s\"}, \"train\": "
                 "{\"forced_routing\": true}",
                 attention[pick / 2 % 4], ffn[pick / 8 % 3], 1 + rng_below(&rng, 2),
                 input[rng_below(&rng, 2)], rng_below(&rng, 2), rng_below(&rng, 2) ? "true" : "false",
                 rng_below(&rng, 2) ? "bf16" : "fp32");
        run_case(random_case(&rng, (struct wanted){systems[pick % 2], rng_below(&rng, FAMILIES - 1), cp_of(i),
                                                   true, levers}),
                 &expected);
    }
}

/* Sums in BF16 keep 8 bits: a gradient of M micro-batches and holders may be off by a few of them. */
static void bf16_gradients(void) {
    struct rng rng = rng_seed(3);
    struct expectation expected = {0.1, true};
    for (int i = 0; i < sample(16); i++)
        run_case(
            random_case(&rng, (struct wanted){systems[i % 2], rng_below(&rng, FAMILIES - 1), cp_of(i), true,
                                              i & 2 ? "\"memory\": {\"grads\": \"bf16\", \"zero\": 1}, "
                                                      "\"train\": {\"forced_routing\": true}"
                                                    : "\"memory\": {\"grads\": \"bf16\"}, \"train\": "
                                                      "{\"forced_routing\": true}"}),
            &expected);
}

/* Balanced, skewed, and so skewed that the first experts get every token and the last ones none. */
static void routings(void) {
    static const char *const routing[] = {"balanced", "zipf:1.2", "zipf:10"};
    struct rng rng = rng_seed(4);
    struct expectation expected = {PROOF[IS_DOUBLE], false};
    for (int i = 0; i < sample(24); i++) {
        char levers[160];
        snprintf(levers, sizeof levers,
                 "\"memory\": {}, \"routing\": \"%s\", \"train\": {\"forced_routing\": true}",
                 routing[i / 2 % 3]);
        run_case(random_case(&rng, (struct wanted){systems[i % 2], rng_below(&rng, FAMILIES), cp_of(i / 6),
                                                   false, levers}),
                 &expected);
    }
}

static const struct kind_of_case {
    const char *name;
    void (*run)(void);
} kinds[] = {{"layouts", layouts},
             {"memory_levers", memory_levers},
             {"bf16_gradients", bf16_gradients},
             {"routings", routings}};

/* ---- starting ---------------------------------------------------------------------------------------- */

static int run_rank(const char *name) {
    int provided, status = 2;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
    read_cluster();
    for (size_t i = 0; i < COUNT(kinds); i++)
        if (strcmp(kinds[i].name, name) == 0) {
            kinds[i].run();
            const struct worst *worst = &worst_of_kind;
            if (!my_rank)
                printf("%s: %d plans run, gradients off by at most %.1g, held memory by %.1f %%\n", name,
                       worst->planned, worst->gradient, 100 * worst->held);
            status = worst->planned > 0 ? 0 : 1;
        }
    free(cluster_text);
    MPI_Finalize();
    return status;
}

static const char *program;

static void start_ranks(void **state) {
    const struct kind_of_case *kind = *state;
    assert_ranks_succeed(RANKS, program, kind->name);
}

int main(int argc, char **argv) {
    program = argv[0];
    if (inside_mpi()) return argc == 2 ? run_rank(argv[1]) : 2;
    struct CMUnitTest tests[COUNT(kinds)];
    for (size_t i = 0; i < COUNT(kinds); i++)
        tests[i] = (struct CMUnitTest){kinds[i].name, start_ranks, NULL, NULL, (void *)&kinds[i]};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
