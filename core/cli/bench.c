/*
disagmoe bench: the suite's own speed on this machine. `sim` uses one thread; its rates are the best of
several rounds, since other programs may share the machine; a round repeats until it lasts long enough to
measure. `train` times the training step of the single-process reference; tests/peers/train_pytorch.py runs
the same step in PyTorch beside it.
*/
#include "cli/cli.h"
#include "layers/layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 5
#define ROUND_SECONDS 0.3

/* Qwen3-235B's 94 layers and 64 micro-batches on 128 GPUs, every choice given. */
static const char manifest_text[] =
    "{\"name\": \"bench\", \"model\": \"models/qwen3-235b-paper.json\", \"cluster\": "
    "\"clusters/h800-16x8.json\","
    " \"systems\": [\"megatron\", \"disagmoe\"], \"seq_len\": 4096, \"micro_batches\": 64,"
    " \"parallel\": {\"pp\": 8, \"vpp\": 2, \"ep\": 16, \"groups\": 4, \"attn_gpus\": 16, \"ffn_gpus\": 16},"
    " \"memory\": {\"recompute\": \"none\"}, \"order\": {\"wave\": 16, \"waves_in_flight\": 2}}";

struct measured {
    double arrange, replay; /* operations a second */
    double whole;           /* seconds from the manifest's plan to the record, both systems */
    int64_t ops;
};

/* Best operations a second of `work` on a schedule. */
static double rate_of(bool (*work)(struct schedule *, struct timeline *), struct schedule *schedule) {
    struct timeline timeline = {0};
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double began = seconds_now(), elapsed;
        int repeats = 0;
        do {
            work(schedule, &timeline);
            repeats++;
            elapsed = seconds_now() - began;
        } while (elapsed < ROUND_SECONDS);
        best = fmax(best, (double)repeats * schedule->op_count / elapsed);
    }
    timeline_free(&timeline);
    return best;
}

static struct measured measure(const struct point *point) {
    struct measured measured = {.arrange = INFINITY, .replay = INFINITY, .whole = INFINITY};
    struct errors errors = {0};
    for (int round = 0; round < ROUNDS; round++) {
        double began = seconds_now();
        for (int i = 0; i < point->system_count; i++) {
            const struct system *system = system_named(point->systems[i]);
            struct plan plan;
            struct result result;
            bool feasible;
            tune_point(system, point->variants[i], &plan, &feasible, &errors);
            simulate_plan(system, &plan, &result, NULL, NULL);
        }
        measured.whole = fmin(measured.whole, seconds_now() - began);
    }
    for (int i = 0; i < point->system_count; i++) {
        const struct system *system = system_named(point->systems[i]);
        struct plan plan;
        bool feasible;
        tune_point(system, point->variants[i], &plan, &feasible, &errors);
        struct schedule *schedule = system->build(&plan);
        measured.arrange = fmin(measured.arrange, rate_of(schedule_arrange, schedule));
        measured.replay = fmin(measured.replay, rate_of(schedule_replay, schedule));
        measured.ops += schedule->op_count;
        schedule_free(schedule);
    }
    errors_free(&errors);
    return measured;
}

static void print(const struct measured *measured, bool json) {
    if (json) {
        cJSON *object = cJSON_CreateObject();
        json_add_number(object, "replay_ops_per_s", measured->replay);
        json_add_number(object, "list_scheduler_ops_per_s", measured->arrange);
        json_add_number(object, "both_systems_s", measured->whole);
        json_add_number(object, "ops", (double)measured->ops);
        print_json_line(object, stdout);
        return;
    }
    printf("replay          %6.1f million operations a second\n", measured->replay / 1e6);
    printf("list-scheduler  %6.1f million operations a second\n", measured->arrange / 1e6);
    printf("both systems    %6.3f s, build, order, time and read off %lld operations\n", measured->whole,
           (long long)measured->ops);
    printf("One thread; the slower system's rate; best of %d rounds.\n", ROUNDS);
}

static int bench_sim(const char *folder, bool json) {
    struct errors errors = {0};
    struct arena *arena = arena_new();
    struct experiment experiment = {0};
    const char *file = arena_printf(arena, "%s/bench.json", folder);
    int status = STATUS_USAGE;
    if (experiment_read_text(manifest_text, file, &experiment, &errors)) {
        struct measured measured = measure(&experiment.points[0]);
        print(&measured, json);
        status = STATUS_DONE;
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    experiment_free(&experiment);
    arena_free(arena);
    return status;
}

/* ---- training ------------------------------------------------------------------------------------------ */

struct training_bench {
    const char *model;
    int seq_len, sequences, threads, steps;
};

/* Seconds of the fastest whole step (forward, backward, clipping, AdamW) of the single-process reference. */
static double fastest_step(const struct model *model, const struct training_bench *training, double *loss) {
    size_t count = (size_t)training->sequences * ((size_t)training->seq_len + 1);
    int *tokens = must_alloc(count * sizeof *tokens);
    struct rng rng = rng_seed(1);
    for (size_t i = 0; i < count; i++) tokens[i] = rng_below(&rng, model->vocab);
    struct reference *reference =
        reference_new(model, training->seq_len, training->sequences, training->threads, 1);
    struct optimizer optimizer = optimizer_default();
    optimizer.steps = training->steps;
    double best = INFINITY;
    for (int step = 0; step < training->steps; step++) {
        struct batch batch = {tokens, training->sequences, 1, step};
        double began = seconds_now();
        *loss = reference_step(reference, &batch, &optimizer, NULL).total;
        best = fmin(best, seconds_now() - began);
    }
    reference_free(reference);
    free(tokens);
    return best;
}

static int bench_train(const struct training_bench *training, bool json) {
    struct errors errors = {0};
    struct arena *arena = arena_new();
    struct model model = {0};
    int status = STATUS_USAGE;
    struct json file = json_read_file(training->model, arena, &errors);
    if (file.node && model_read(file, &model)) {
        double loss = NAN, seconds = fastest_step(&model, training, &loss);
        double tokens = (double)training->sequences * training->seq_len / seconds;
        if (json)
            printf("{\"seconds\":%.6f,\"tokens_per_s\":%.1f,\"loss\":%.6f,\"threads\":%d}\n", seconds, tokens,
                   loss, training->threads);
        else
            printf("%.4f s a step, %.0f tokens/s, %d thread%s, the fastest of %d steps; loss %.4f\n", seconds,
                   tokens, training->threads, training->threads > 1 ? "s" : "", training->steps, loss);
        status = STATUS_DONE;
    }
    errors_print(&errors, stderr);
    errors_free(&errors);
    cJSON_Delete(file.node);
    arena_free(arena);
    return status;
}

static int run(int argc, char **argv) {
    const char *what = NULL, *folder = "experiments";
    bool json = false, helped;
    struct training_bench training = {
        .seq_len = 512, .sequences = 4, .threads = processor_count(), .steps = 5};
    const struct option_rule rules[] = {
        {"--json", NULL, NULL, &json},
        {"--experiments", &folder, NULL, NULL},
        {"--model", &training.model, NULL, NULL},
        {"--seq-len", NULL, &training.seq_len, NULL},
        {"--sequences", NULL, &training.sequences, NULL},
        {"--threads", NULL, &training.threads, NULL},
        {"--steps", NULL, &training.steps, NULL},
    };
    if (!parse_options(&verb_bench, argc, argv, rules, COUNT(rules), NULL, &what, &helped))
        return STATUS_USAGE;
    if (helped) return STATUS_DONE;
    if (what && strcmp(what, "sim") == 0) return bench_sim(folder, json);
    if (what && strcmp(what, "train") == 0) {
        char model[512];
        snprintf(model, sizeof model, "%s/models/small.json", folder);
        if (!training.model) training.model = model;
        return bench_train(&training, json);
    }
    fprintf(stderr, "disagmoe: bench: found %s; allowed are sim and train\n", what ? what : "nothing");
    return STATUS_USAGE;
}

const struct verb verb_bench = {
    .name = "bench",
    .usage = "sim|train [OPTIONS]",
    .summary = "the suite's own speed on this machine",
    .help = "  sim                   replay, list-scheduler, and a whole simulation of Qwen3-235B\n"
            "  --experiments FOLDER  where models/ and clusters/ are; default: experiments\n"
            "  train                 a training step of a model in this one process\n"
            "  --model FILE          its manifest; default: models/small.json of that folder\n"
            "  --seq-len N, --sequences N, --threads N, --steps N\n"
            "  --json                one object\n",
    .run = run,
};
