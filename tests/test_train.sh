#!/bin/bash
# Training for real, from the command line: both systems on the tiny models of every family against the single-process
# reference, in both precisions; layouts, checkpoints, killed ranks, full disks, wrong input. Tests $DISAGMOE (default:
# build/disagmoe) and $DISAGMOE-double beside it, from the repository's root; under sanitizers a smaller part.
set -u
cd "$(dirname "$0")/.." || exit 1

disagmoe=${DISAGMOE:-$PWD/build/disagmoe}
double=$disagmoe-double
python=/usr/bin/python3
for needed in "$disagmoe" "$double" "$python" /usr/bin/mpirun; do
    [ -x "$needed" ] || { echo "$needed is missing"; exit 77; }
done
sanitize=false
[ "${DISAGMOE_MODE:-plain}" != sanitize ] || sanitize=true
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
    echo "FAIL line ${BASH_LINENO[1]}: $*"
    sed 's/^/  stderr: /' "$work/err" | head -n 10
    : $((++failures))
}
# expect STATUS ARGUMENT...   runs $binary; its output is left in $work/out and $work/err. Nothing may take long.
binary=$disagmoe
expect() {
    local expected=$1 status=0
    shift
    timeout -k 5 120 "$binary" "$@" >"$work/out" 2>"$work/err" </dev/null || status=$?
    [ $status = "$expected" ] || fail "$(basename "$binary") $*: exit status $status, expected $expected"
}
out_has() { grep -qF -- "$1" "$work/out" || fail "standard output does not say '$1'"; }
err_has() { grep -qF -- "$1" "$work/err" || fail "standard error does not say '$1'"; }
err_matches() { grep -qE -- "$1" "$work/err" || fail "standard error does not match '$1'"; }
err_empty() { [ ! -s "$work/err" ] || fail "something on standard error"; }
# Said once, by one rank, and nothing of the MPI library beside it.
err_is_one_line() { [ "$(wc -l <"$work/err")" = 1 ] || fail "$(wc -l <"$work/err") lines on standard error, expected 1"; }
# json SCRIPT FILE...   a Python script with `json`, `sys`; rows(file): the objects of JSON lines; steps(file): those of
# steps; same(a, b): the steps of two runs have the same losses, to the last bit.
json() {
    "$python" -c "
import json, sys
def refuse(text): raise ValueError(text)
def rows(file): return [json.loads(line, parse_constant=refuse) for line in open(file, encoding='utf-8')]
def steps(file): return [r for r in rows(file) if 'step' in r]
def same(a, b):
    for x, y in zip(a, b, strict=True):
        for key in 'step loss cross_entropy aux_loss z_loss grad_norm learning_rate imbalance'.split():
            assert x[key] == y[key], (key, x, y)
$1" "${@:2}" 2>"$work/err" || fail "Python: $(tail -n 1 "$work/err")"
}
# An mpirun of one's own: its number of ranks and the binary follow.
mpi=(mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OPENBLAS_NUM_THREADS=1

qwen3=experiments/tiny-qwen3.json

# ---- against the single-process reference ----------------------------------------------------------------------------

verified() { # RUNS TOLERANCE ARGUMENT...: with --verify --json, RUNS of them
    local runs=$1 tolerance=$2 dtype=fp32
    shift 2
    [ "$binary" = "$disagmoe" ] || dtype=fp64
    expect 0 train "$@" --set model.dtype=$dtype --verify --json
    err_empty
    json '
verdicts = [r for r in rows(sys.argv[1]) if "loss_rel" in r]
assert len(verdicts) == int(sys.argv[2]), f"{len(verdicts)} verdicts"
assert rows(sys.argv[1])[-1] == verdicts[-1], "the last line is no verdict"
for v in verdicts:
    assert list(v) == ["loss_rel", "grad_rel", "worst_parameter", "ranks", "system"], "keys"
    assert 0 <= v["loss_rel"] <= float(sys.argv[3]) and 0 <= v["grad_rel"] <= float(sys.argv[3]), str(v)
    assert v["ranks"] >= 1 and v["worst_parameter"].startswith(("model.", "lm_head.")), str(v)
' "$work/out" "$runs" "$tolerance"
}

for family in qwen3 gptoss deepseek; do
    if $sanitize; then
        verified 1 1e-4 experiments/tiny-$family.json --steps 2 --system disagmoe
        continue
    fi
    verified 2 1e-4 experiments/tiny-$family.json --steps 2
    json '
verdicts = [r for r in rows(sys.argv[1]) if "loss_rel" in r]
assert [(v["system"], v["ranks"]) for v in verdicts] == [("megatron", 8), ("disagmoe", 8)]' "$work/out"
    binary=$double
    verified 2 1e-10 experiments/tiny-$family.json --steps 2
    binary=$disagmoe
done

# Layouts, levers, orders: MANIFEST SYSTEM NAME=VALUE...
binary=$double
while read -r family system sets; do
    $sanitize && [ "$family" != deepseek ] && continue
    options=()
    for set in $sets; do options+=(--set "$set"); done
    verified 1 1e-10 experiments/tiny-$family.json --system "$system" --steps 1 "${options[@]}"
done <<'END'
qwen3 megatron parallel={"pp":4,"vpp":1,"ep":2} memory.recompute=full memory.zero=1
qwen3 megatron parallel={"pp":1,"ep":8} memory.offload=true
gptoss megatron parallel={"pp":3,"vpp":1,"ep":1} global_batch=10 memory.expert_input=resend
deepseek megatron parallel={"pp":1,"vpp":1,"ep":3} global_batch=9 routing=zipf:0.5 train.forced_routing=true
qwen3 disagmoe parallel={"groups":1,"attn_gpus":5,"ffn_gpus":3} global_batch=12
qwen3 disagmoe parallel={"groups":3,"attn_gpus":1,"ffn_gpus":1} order.without=["fused-combine","duplex","interleaving","waves"]
qwen3 disagmoe parallel={"groups":4,"attn_gpus":1,"ffn_gpus":1} order={"wave":1,"waves_in_flight":8,"prefer":"backward"}
gptoss disagmoe parallel={"groups":1,"attn_gpus":1,"ffn_gpus":2} micro_batch_size=2 memory.recompute=full
deepseek disagmoe parallel={"groups":3,"attn_gpus":1,"ffn_gpus":1} memory.expert_input=resend memory.recompute=none
qwen3 megatron parallel={"pp":2,"vpp":1,"ep":4,"cp":4} memory.recompute={"attention":"projections","ffn":"none"}
gptoss disagmoe parallel={"groups":2,"attn_gpus":2,"ffn_gpus":2,"cp":2} head=all-ffn memory.recompute={"attention":"full","ffn":"activation","layers":1}
deepseek disagmoe parallel={"groups":1,"attn_gpus":4,"ffn_gpus":3,"cp":2} head=all-ffn memory.recompute={"attention":"norms","ffn":"full"}
END
binary=$disagmoe

if ! $sanitize; then
    # A tolerance that cannot be kept.
    expect 1 train $qwen3 --system disagmoe --steps 1 --verify --tolerance 0
    err_has "disagmoe: train: disagmoe: differs from the single-process reference"
    err_is_one_line
    out_has "DIFFERS"
fi

# What per_system sets holds for its system alone, and the run's record says what is swept.
if ! $sanitize; then
    expect 0 train $qwen3 --steps 1 --json --set per_system.megatron.parallel.pp=4 --set per_system.megatron.parallel.vpp=1 \
        --set per_system.disagmoe.train.learning_rate=0.5 --set 'sweep={"seq_len":[64]}'
    json '
runs = {r["system"]: r for r in rows(sys.argv[1]) if "parallel" in r}
assert runs["megatron"]["parallel"]["pp"] == 4 and list(runs) == ["megatron", "disagmoe"]
assert all(list(r)[0] == "swept" and r["swept"] == {"seq_len": 64} for r in runs.values())
rates = {s["system"]: s["learning_rate"] for s in steps(sys.argv[1])}
assert rates["disagmoe"] > 10 * rates["megatron"], rates' "$work/out"
fi

# ---- what is shown ---------------------------------------------------------------------------------------------------

if ! $sanitize; then
    expect 0 train $qwen3 --steps 3 --system disagmoe
    err_empty
    for word in "disagmoe: tiny-qwen3" "8 ranks: A 2 + F 2, 2 groups" "entropy of the data" tokens/s "grad norm" \
        "memory of the fullest rank" "median of the steps behind the first"; do
        out_has "$word"
    done
    [ "$(wc -L <"$work/out")" -le 80 ] || fail "the table is wider than 80 columns"
fi
expect 0 train $qwen3 --steps 3 --system disagmoe --json --jsonl "$work/new/lines" --trace "$work/trace.json"
cmp -s "$work/out" "$work/new/lines" || fail "--json and --jsonl differ"
json '
*steps, record = rows(sys.argv[1])
assert [s["step"] for s in steps] == [0, 1, 2]
for s in steps:
    assert list(s) == """system executor step loss cross_entropy aux_loss z_loss learning_rate grad_norm tokens_per_s
step_time_s imbalance exposed_comm_s""".split(), "keys of a step"
    assert (s["system"], s["executor"]) == ("disagmoe", "cpu")
    assert abs(s["tokens_per_s"] * s["step_time_s"] / 1024 - 1) < 1e-6, "tokens"
    assert record["entropy"] < s["cross_entropy"] < s["loss"] < 10, "losses"
assert record["cost_source"] == "measured" and record["executor"] == "cpu" and record["ranks"] == record["gpus"] == 8
assert record["seed"] == 1 and record["version"] and record["steps"] == 3 and record["loss"] == steps[-1]["loss"]
assert abs(record["step_time_s"] / ((steps[1]["step_time_s"] + steps[2]["step_time_s"]) / 2) - 1) < 1e-9, "median"
memory = record["memory_bytes"]
assert 0 < memory["static"] < memory["used"] and memory["predicted"] > 0 and record["memory_deviation"] >= 0, "memory"
' "$work/out"
json '
events = json.load(open(sys.argv[1]))["traceEvents"]
assert sum(e["ph"] == "X" for e in events) > 100 and all(e["dur"] >= 0 for e in events if e["ph"] == "X")
tracks = {}
for e in events:
    if e["ph"] == "X": tracks.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
assert len(tracks) == 24, "eight ranks have three lanes each"
for spans in map(sorted, tracks.values()):
    assert all(a[1] < b[0] + 1e-6 for a, b in zip(spans, spans[1:])), "operations of a lane overlap"
' "$work/trace.json"
cp "$work/out" "$work/lines"

# The same run again, and as ranks of an mpirun of one's own with ranks to spare, has the same losses.
timeout 60 "${mpi[@]}" 9 "$disagmoe" train $qwen3 --steps 3 --system disagmoe --json >"$work/out" 2>"$work/err" ||
    fail "under mpirun: exit status $?"
json 'same(steps(sys.argv[1]), steps(sys.argv[2]))' "$work/lines" "$work/out"
if ! $sanitize; then
    # Points of a sweep follow one another, here two systems and two seeds.
    expect 0 train $qwen3 --steps 1 --set 'sweep={"seed":[1,2]}' --json
    json '
steps = [r for r in rows(sys.argv[1]) if "step" in r]
assert [(s["point"], s["system"]) for s in steps] == [("seed=1", "megatron"), ("seed=1", "disagmoe"),
    ("seed=2", "megatron"), ("seed=2", "disagmoe")]
assert abs(steps[0]["loss"] - steps[1]["loss"]) < 1e-4 < abs(steps[0]["loss"] - steps[2]["loss"])
' "$work/out"
fi

# ---- precision -------------------------------------------------------------------------------------------------------

if ! $sanitize; then
    # A model of another dtype is trained all the same, in what the program computes in; one line says so.
    expect 0 train $qwen3 --steps 1 --system disagmoe --set model.dtype=bf16 --json
    err_is_one_line
    err_has "disagmoe: train: note: $qwen3: model.dtype: found bf16 for tiny-qwen3; this program computes in fp32"
    json 'assert rows(sys.argv[1])[-1]["dtype"] == "fp32"' "$work/out"
    binary=$double
    expect 0 train $qwen3 --steps 1 --system disagmoe --json
    err_is_one_line
    err_has "found fp32 for tiny-qwen3; this program computes in fp64"
    json 'assert rows(sys.argv[1])[-1]["dtype"] == "fp64"' "$work/out"
    binary=$disagmoe

    # Gradients of 4,096 like micro-batches, summed in BF16: the norm is FP32's, up to what 8 bits leave (test_layers.c).
    for _ in $(seq 1000); do printf '\005\011\015\025'; done >"$work/same"
    for grads in fp32 bf16; do
        expect 0 train $qwen3 --system megatron --steps 1 --data "$work/same" --set model.layers=1 --set seq_len=4 \
            --set 'parallel={"pp":1,"vpp":1,"ep":1}' --set global_batch=4096 --set memory.grads=$grads --json
        cp "$work/out" "$work/$grads"
    done
    json 'a, b = (steps(f)[0]["grad_norm"] for f in sys.argv[1:])
assert abs(a / b - 1) < 0.01, f"{a} {b}"' "$work/bf16" "$work/fp32"
    # Rounding goes by what is summed: the same bits again, and whatever group or stage a layer is in.
    while read -r system gpus parallel; do
        expect 0 train $qwen3 --system "$system" --steps 3 --set "parallel=$parallel" --set 'memory={"grads":"bf16"}' \
            --set cluster.gpus_per_node="$gpus" --set cluster.nics_per_node="$gpus" --json
        [ -e "$work/$system" ] || cp "$work/out" "$work/$system"
        json 'a, b = ([s["loss"] for s in steps(f)] for f in sys.argv[1:])
assert a == b, f"{a} {b}"' "$work/$system" "$work/out"
    done <<'END'
megatron 1 {"pp":1,"vpp":1,"ep":1}
megatron 4 {"pp":4,"vpp":1,"ep":1}
megatron 4 {"pp":4,"vpp":1,"ep":1}
disagmoe 2 {"groups":1,"attn_gpus":1,"ffn_gpus":1}
disagmoe 8 {"groups":4,"attn_gpus":1,"ffn_gpus":1}
END
fi

# ---- usage and wrong input -------------------------------------------------------------------------------------------

for wrong in "--steps 0" "--tolerance x" "--timeout -1" "--timeout inf" "--every 2" "--resume a --import b" --unheard; do
    # shellcheck disable=SC2086
    expect 2 train $qwen3 $wrong
    err_is_one_line
    err_matches '^disagmoe: train: .*--'
done
expect 2 train
expect 2 train $qwen3 --trace "$work/t"
err_has "2 runs; a single one is needed"
expect 2 train $qwen3 --set seq_len=0
err_has "disagmoe: $qwen3: seq_len: found 0"
expect 2 train $qwen3 --set 'parallel={"pp":2,"vpp":1,"ep":8}' --system megatron
err_is_one_line
err_has "at most the cluster's 8 GPUs"
: >"$work/empty"
printf 'This text has letters, which 64 ids cannot name.%0100d' 0 >"$work/letters"
expect 2 train $qwen3 --data "$work/empty"
err_is_one_line
err_has "disagmoe: $work/empty: is empty"
expect 2 train $qwen3 --data "$work/letters"
err_is_one_line
err_has "disagmoe: $work/letters: byte 0 is 84; the model's vocabulary has ids 0 to 63"
# What never ends.
mkfifo "$work/pipe"
for endless in /dev/zero "$work/pipe" /dev; do
    expect 2 train $qwen3 --data "$endless"
    err_is_one_line
    err_matches "^disagmoe: $endless: is a (device|pipe|folder).*; allowed is a regular file"
done
if ! $sanitize; then
    expect 0 train $qwen3 --data "$work/letters" --set model.vocab=256 --steps 1 --system disagmoe --json
    json 'assert rows(sys.argv[1])[-1]["entropy"] is None' "$work/out"
fi
# What is needed at the end alone is looked at before the first step.
while read -r options; do
    # shellcheck disable=SC2086
    expect 2 train $qwen3 --system disagmoe $options --json
    err_is_one_line
    err_matches '^disagmoe: (/proc|--trace|'"$work"').*: (is no folder|cannot be|the folder cannot be made|found .* the file of --jsonl)'
    [ ! -s "$work/out" ] || fail "steps before what is wrong was found: $options"
done <<END
--checkpoint $work/letters
--checkpoint $work/letters/below
--checkpoint /proc
--trace $work
--trace $work/letters/below
--jsonl $work
--trace $work/both --jsonl $work/both
--resume $work/nowhere
END
expect 1 train $qwen3 --set model=models/qwen3-235b-paper.json --set 'parallel={"groups":2,"attn_gpus":2,"ffn_gpus":2}' \
    --system disagmoe
err_has "this machine has"

# The same under mpirun: once, by one rank; all end with status 2.
started() { # STATUS RANKS ARGUMENT...
    local expected=$1 ranks=$2 status=0
    shift 2
    timeout -k 5 60 "${mpi[@]}" "$ranks" "$disagmoe" train "$@" >"$work/out" 2>"$work/err" || status=$?
    [ $status = "$expected" ] || fail "mpirun -n $ranks: exit status $status, expected $expected"
    [ "$(grep -c '^disagmoe: ' "$work/err")" = 1 ] || fail "not one line of ours"
}
started 2 3 $qwen3 --system megatron
err_has "found 3 ranks; the plan needs 8"
if ! $sanitize; then
    started 2 8 $qwen3 --data "$work/empty"
    started 2 8 $qwen3 --set seq_len=0
    started 2 8 $qwen3 --steps 0
fi
SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 expect 2 train $qwen3
err_has "srun --mpi=pmix"
mkdir "$work/bin"
ln -s "$(command -v timeout)" "$(command -v basename)" "$work/bin"
PATH=$work/bin expect 1 train $qwen3
err_is_one_line
err_has "mpirun is not installed"

# ---- checkpoints -----------------------------------------------------------------------------------------------------

kept=$work/kept
expect 0 train $qwen3 --system disagmoe --steps 6 --checkpoint "$kept" --every 2 --json
cp "$work/out" "$work/whole"
[ "$(ls "$kept")" = "$(printf 'step-0000000%d\n' 2 4 6)" ] || fail "checkpoints: $(ls -A "$kept" | tr '\n' ' ')"
expect 0 train $qwen3 --system disagmoe --steps 6 --resume "$kept/step-00000002" --json
json 'same(steps(sys.argv[1])[2:], steps(sys.argv[2]))' "$work/whole" "$work/out"
if ! $sanitize; then
    # The other system, and sequences in pieces, go on with the same parameters: float32 rounds differently, no more.
    while read -r system sets; do
        # shellcheck disable=SC2086
        expect 0 train $qwen3 --system "$system" --steps 6 --resume "$kept/step-00000002" --json $sets
        json '
for a, b in zip(steps(sys.argv[1])[2:], steps(sys.argv[2]), strict=True):
    assert abs(a["loss"] - b["loss"]) < 1e-3 * a["loss"], (a, b)
' "$work/whole" "$work/out"
    done <<'END'
megatron
disagmoe --set parallel.cp=2 --set head=all-ffn
END
    expect 0 train $qwen3 --system disagmoe --steps 6 --resume "$kept"
    out_has "no step is left to do"
    # A run that goes on keeps its seed, and says so where another one is given.
    expect 0 train $qwen3 --system disagmoe --steps 6 --set seed=7 --resume "$kept/step-00000004" --json
    err_is_one_line
    err_has "disagmoe: train: note: $kept/step-00000004: goes on with the checkpoint's seed 1, not with the manifest's 7"
    json 'same(steps(sys.argv[1])[4:], steps(sys.argv[2]))
assert rows(sys.argv[2])[-1]["seed"] == 1' "$work/whole" "$work/out"
    # No checkpoint, another model's.
    expect 2 train $qwen3 --system disagmoe --resume "$work/bin"
    err_is_one_line
    expect 2 train $qwen3 --system disagmoe --resume "$kept" --set model.layers=3
    err_has "expected 3, as the model of this run has it"
fi
cp -r "$kept/step-00000002" "$work/damaged"
printf X | dd of="$work/damaged/rank-0003.safetensors" bs=1 seek=4000 conv=notrunc 2>/dev/null
expect 2 train $qwen3 --system disagmoe --resume "$work/damaged"
err_has "rank 3: $work/damaged/rank-0003.safetensors: is damaged"

# ---- what ends a run -------------------------------------------------------------------------------------------------

rank_pid() { # RANK TEXT: process of that rank of the run with TEXT on its command line
    local pid
    for pid in $(pgrep -f -- "$2"); do
        # mpirun's own command line has the text too, but not the rank.
        tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qx "OMPI_COMM_WORLD_RANK=$1" && echo "$pid" && return
    done
}
# interrupted RANK|launcher SIGNAL STEPS COMMAND...   sends the signal once STEPS lines are in $work/lines.
interrupted() {
    local whom=$1 signal=$2 lines=$3 pid target status=0 began
    shift 3
    rm -f "$work/lines"
    "$@" --jsonl "$work/lines" >"$work/out" 2>"$work/err" </dev/null &
    pid=$!
    for _ in $(seq 1200); do
        [ "$(wc -l 2>/dev/null <"$work/lines" || echo 0)" -lt "$lines" ] || break
        sleep 0.05
    done
    target=$pid
    [ "$whom" = launcher ] || target=$(rank_pid "$whom" "$work/lines")
    kill "-$signal" "$target" || fail "rank $whom is not there"
    began=$SECONDS
    wait $pid || status=$?
    [ $status != 0 ] || fail "$whom had signal $signal, and the run ended with status 0"
    [ $((SECONDS - began)) -lt 30 ] || fail "the run took $((SECONDS - began)) s to end"
    sleep 0.2
    [ -z "$(pgrep -f -- "$work/lines")" ] || fail "processes are left over"
    return $status
}

killed=$work/killed
rank=$((RANDOM % 8)) after=$((RANDOM % 12 + 4))
long=(train "$qwen3" --system disagmoe --steps 1000 --set train.decay_steps=1000)
interrupted $rank KILL $after "$disagmoe" "${long[@]}" --checkpoint "$killed" --every 2
err_is_one_line
err_matches "^disagmoe: train: rank $rank was killed by signal 9 in step [0-9]+; resume with --resume $killed \(latest"
latest=$(ls "$killed" | tail -n 1)
err_has "(latest checkpoint: $latest)"
[ -z "$(find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'disagmoe-??????' -newer "$work/letters" 2>/dev/null)" ] ||
    fail "a status board is left over"
step=$((10#${latest#step-}))
if ! $sanitize; then
    expect 0 "${long[@]}" --resume "$killed" --steps $((step + 2)) --json
    json '
first = int(sys.argv[3])
assert [s["step"] for s in steps(sys.argv[2])] == [first, first + 1]
known = steps(sys.argv[1])[first:][:2]
same(known, steps(sys.argv[2])[:len(known)])
' "$work/lines" "$work/out" $step
fi

for signal in TERM INT HUP; do
    interrupted launcher $signal 2 "$disagmoe" train $qwen3 --steps 1000 --checkpoint "$work/ended"
    err_is_one_line
    err_matches "^disagmoe: train: ended by signal [0-9]+ in step [0-9]+;"
    [ ! -e "$work/ended/megatron/.lock" ] || fail "a lock is left over"
    $sanitize && break
done
# A rank that says nothing any more is named, and then all end: stopped it is not gone.
silent=$((RANDOM % 8))
interrupted $silent STOP 2 "$disagmoe" "${long[@]}" --timeout 8
err_matches "^disagmoe: train: note: rank $silent: silent for [0-9.]+ s in step [0-9]+, last seen .*; all ranks end after 8 s"
err_matches "^disagmoe: train: rank $silent: silent for [0-9.]+ s in step [0-9]+, last seen .*: all ranks end \(--timeout\)$"
if ! $sanitize; then
    interrupted launcher HUP 2 "${mpi[@]}" 8 "$disagmoe" train $qwen3 --steps 1000
    err_matches "^disagmoe: train: rank [01]: ended by signal 15 in step [0-9]+$"
    interrupted 5 KILL 2 "${mpi[@]}" 8 "$disagmoe" train $qwen3 --steps 1000
    err_matches "^disagmoe: train: rank [01]: ended by signal 15 in step [0-9]+$"
    [ "$(grep -c '^disagmoe: ' "$work/err")" -le 2 ] || fail "every rank reports the end of another"
    interrupted 0 HUP 2 "${mpi[@]}" 8 "$disagmoe" train $qwen3 --steps 1000
    err_matches "^disagmoe: train: rank 0: ended by signal 1 in step [0-9]+$"
fi

expect 1 train $qwen3 --system megatron --set train.learning_rate=1e30 --checkpoint "$work/nan" --json
err_is_one_line
err_matches '^disagmoe: train: rank [0-7]: (loss|gradient) is not finite in step [0-9]+ \('
json 'assert all(type(s["loss"]) is float and s["step"] < 3 for s in rows(sys.argv[1]))' "$work/out"
[ -z "$(ls -A "$work/nan")" ] || fail "a checkpoint was written of a run that failed"

# Two runs in one folder: the second is told whose it is, and touches nothing of the first, which goes on.
"$disagmoe" "${long[@]}" --checkpoint "$work/shared" --every 2 --jsonl "$work/lines" >"$work/first" 2>&1 </dev/null &
first=$!
for _ in $(seq 600); do [ -d "$work/shared/step-00000002" ] && break; sleep 0.05; done
expect 2 "${long[@]}" --checkpoint "$work/shared" --jsonl "$work/lines"
err_is_one_line
err_matches "^disagmoe: $work/shared: is in use by another run: process [0-9]+ on $(hostname) since .*remove $work/shared/.lock"
[ "$(grep -c '"step":0,' "$work/lines")" = 1 ] || fail "the lines of the first run are gone"
kill -TERM $first
wait $first && fail "the first run ended with status 0"
err_file=$(cat "$work/first")
[[ $err_file = *"ended by signal 15"* ]] || fail "the first run: $err_file"

# A disk that is full for files of this size; MPI itself is told to do without large files.
(
    export OMPI_MCA_btl=self,tcp PMIX_MCA_gds=hash
    ulimit -f 100
    failures=0
    expect 1 train $qwen3 --system disagmoe --steps 2 --checkpoint "$work/full"
    exit $failures
) || failures=$((failures + $?))
err_is_one_line
err_matches "^disagmoe: .*/rank-[0-9]+.*: cannot be written: File too large"
[ -z "$(find "$work/full" -type f)" ] || fail "what could not be written whole was left behind"
if [ -c /dev/full ] && ! $sanitize; then
    expect 1 train $qwen3 --system disagmoe --steps 1 --jsonl /dev/full
    err_has "/dev/full: cannot be written: No space left"
    status=0
    timeout 60 "$disagmoe" train $qwen3 --system disagmoe --steps 1 >/dev/full 2>"$work/err" </dev/null || status=$?
    [ $status = 1 ] || fail "standard output on a full disk: exit status $status, expected 1"
    err_has "standard output"
fi

# ---- the single process as a run of its own --------------------------------------------------------------------------

expect 0 train $qwen3 --system disagmoe --steps 2 --reference --checkpoint "$work/beside" --trace "$work/beside.json" --json
[ -d "$work/beside/step-00000002" ] || fail "the reference moved the checkpoints: $(ls "$work/beside")"
json '
found = steps(sys.argv[1])
assert [r["system"] for r in found] == ["reference"] * 2 + ["disagmoe"] * 2, "order of runs"
for a, b in zip(found[:2], found[2:]): assert abs(a["loss"] - b["loss"]) < 1e-5 * a["loss"], (a, b)' "$work/out"
expect 2 train $qwen3 --reference --resume "$work/beside"
err_has "--resume"

# ---- parameters from elsewhere ---------------------------------------------------------------------------------------

golden=tests/golden/qwen3-1
expect 0 import $golden/config.json --output "$work/golden.json"
for system in megatron disagmoe; do
    expect 0 train $qwen3 --set "model=$work/golden.json" --set model.dtype=fp32 --set seq_len=8 --import $golden/model.safetensors --steps 1 \
        --set 'parallel={"pp":2,"vpp":1,"ep":2,"groups":2,"attn_gpus":1,"ffn_gpus":2}' --system $system --verify --json
    err_empty
    cp "$work/out" "$work/imported-$system"
    $sanitize && break
done
$sanitize || json '
a, b = (steps(f)[0]["loss"] for f in sys.argv[1:])
assert abs(a - b) < 1e-5 * a, f"{a} {b}"' "$work/imported-megatron" "$work/imported-disagmoe"
expect 2 train $qwen3 --system disagmoe --import $golden/model.safetensors
err_has "$golden/model.safetensors"
[ "$(grep -vc '^disagmoe: ' "$work/err")" = 0 ] || fail "an error without 'disagmoe: '"

# Shards and an index as transformers saves them; the model with a layer less has no place for that layer.
sharded=tests/golden/mixtral-1
expect 0 import $sharded/config.json --output "$work/sharded.json"
from_shards=(train $qwen3 --set "model=$work/sharded.json" --set model.dtype=fp32 --set seq_len=8 --system disagmoe --steps 1
             --set 'parallel={"groups":1,"attn_gpus":1,"ffn_gpus":2}' --import $sharded/model.safetensors.index.json)
expect 0 "${from_shards[@]}" --verify
err_empty
expect 2 "${from_shards[@]}" --set model.layers=1
err_has "model.layers.1.block_sparse_moe.experts.0.w1.weight: the model has no place for this tensor"
err_has "disagmoe: $sharded/model.safetensors.index.json: 14 more tensors for which the model has no place, 19 in all"
[ "$(sort "$work/err" | uniq -d)" = '' ] || fail "an error is said more than once"

[ $failures = 0 ] || { echo "$failures failed"; exit 1; }
