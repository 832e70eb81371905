#!/bin/bash
# The command line: exit status and messages of every verb, records and tables on standard output and in files, full
# disks, Ctrl-C. Tests the binary in $DISAGMOE (default: build/disagmoe), from the repository's root.
set -u
cd "$(dirname "$0")/.." || exit 1

disagmoe=${DISAGMOE:-$PWD/build/disagmoe}
python=/usr/bin/python3
for needed in "$disagmoe" "$python"; do
    [ -x "$needed" ] || { echo "$needed is missing"; exit 77; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
    echo "FAIL line ${BASH_LINENO[1]}: $*"
    sed 's/^/  stderr: /' "$work/err" | head -n 10
    : $((++failures))
}
# expect STATUS ARGUMENT...   runs the binary; its output is left in $work/out and $work/err.
expect() {
    local expected=$1 status=0
    shift
    "$disagmoe" "$@" >"$work/out" 2>"$work/err" </dev/null || status=$?
    [ $status = "$expected" ] || fail "disagmoe $*: exit status $status, expected $expected"
}
out_has() { grep -qF -- "$1" "$work/out" || fail "standard output does not say '$1'"; }
err_has() { grep -qF -- "$1" "$work/err" || fail "standard error does not say '$1'"; }
err_empty() { [ ! -s "$work/err" ] || fail "something on standard error"; }
out_empty() { [ ! -s "$work/out" ] || fail "something on standard output"; }
# Every error is a line "disagmoe: …".
err_named() { [ -s "$work/err" ] && ! grep -qv '^disagmoe: ' "$work/err" || fail "an error without 'disagmoe: '"; }
# json SCRIPT FILE...   a Python script with `json`, `sys` and rows(file): the objects of JSON lines.
json() {
    "$python" -c "
import json, sys
def refuse(text): raise ValueError(text)
def rows(file): return [json.loads(line, parse_constant=refuse) for line in open(file, encoding='utf-8')]
$1" "${@:2}" 2>"$work/err" || fail "Python: $(tail -n 1 "$work/err")"
}

# ---- a small manifest: two sequence lengths, both systems; the ring's order is given, so that nothing takes long ------

cat >"$work/small.json" <<END
{"name": "small", "model": "$PWD/experiments/models/deepseek-moe-16b-paper.json",
 "cluster": "$PWD/experiments/clusters/h800-16x8.json", "systems": ["megatron", "disagmoe"],
 "seq_len": 1024, "global_batch": 64, "sweep": {"seq_len": [1024, 2048]},
 "order": {"wave": 4, "waves_in_flight": 2, "prefer": "forward", "patient": true, "justified": true}}
END
small=("$work/small.json" --set model.layers=4 --set cluster.nodes=1)
one=("${small[@]}" --set seq_len=1024 --system disagmoe)

# ---- usage -----------------------------------------------------------------------------------------------------------

verbs='sim schedule check train import systems bench profile'
expect 0 --help
for verb in $verbs; do out_has "  $verb "; done
expect 0 -h
expect 0 help
expect 0 --version
grep -qE '^disagmoe [0-9]+\.[0-9]+\.[0-9]+$' "$work/out" || fail "--version prints no release"
expect 2
out_empty
err_has "usage: disagmoe VERB"
for unknown in simulate --json -x ''; do
    expect 2 "$unknown"
    out_empty
    err_has "unknown verb '$unknown'"
done
for verb in $verbs; do
    expect 0 "$verb" --help
    err_empty
    out_has "usage: disagmoe $verb"
    expect 0 "$verb" -h
    expect 2 "$verb" --no-such-option
    out_empty
    err_named
    err_has "--no-such-option"
    err_has "disagmoe $verb --help"
done
for verb in sim schedule check train import profile; do
    expect 2 "$verb"
    out_empty
    err_named
    expect 2 "$verb" "$work/small.json" "$work/small.json"
    err_has "unexpected argument"
done
expect 2 systems extra
expect 2 bench unheard
err_has "unheard"
for verb in sim schedule check train; do
    expect 2 "$verb" "$work/small.json" --system
    err_has "value is missing"
    expect 2 "$verb" "$work/small.json" --set seq_len
    err_has "path=value"
    expect 2 "$verb" "$work/small.json" --set =1
    expect 2 "$verb" "$work/small.json" --system=tutel
    err_has "registered systems are megatron, disagmoe"
done
for jobs in 0 -1 two 1.5 '' ' 1' +1 0x10 2000000000 99999999999 99999999999999999999; do
    expect 2 sim "$work/small.json" --jobs "$jobs"
    out_empty
    err_has "disagmoe: sim: --jobs: found $jobs; a whole number from 1 to 1073741824 is needed"
done
for steps in 0 -1 99999999999; do
    expect 2 train "$work/small.json" --steps $steps
    err_has "disagmoe: train: --steps: found $steps; a whole number"
    expect 2 bench train --threads $steps
    err_has "disagmoe: bench: --threads: found $steps; a whole number"
done
expect 2 train "$work/small.json" --tolerance inf
err_has "--tolerance"
expect 2 sim "$work/small.json" --json=yes
err_has "no value is allowed: --json=yes"
expect 2 sim "$work/small.json" --csv --json # the next option is no file's name
err_has "a value is missing behind --csv"
[ ! -e ./--json ] || fail "a file --json was written"

# ---- outputs that would overwrite something --------------------------------------------------------------------------

cp "$work/small.json" "$work/copy.json"
ln -s . "$work/here"
ln "$work/copy.json" "$work/hard.json"
both() { # OPTION FILE OPTION FILE MESSAGE: refused, whatever the files
    expect 2 sim "$work/copy.json" "$1" "$2" "$3" "$4"
    out_empty
    err_has "disagmoe: $5"
    [ ! -e "$2" ] || cmp -s "$2" "$work/small.json" || fail "$2 was written"
}
both --csv "$work/x" --jsonl "$work/x" "--jsonl: found $work/x, the file of --csv; another file is needed"
both --jsonl "$work/x" --csv "$work/here/./x" "--jsonl: found $work/x, the file of --csv"
both --csv "$work/new/folder/x" --trace "$work/new/../new//folder/x" "--trace: found "
both --csv "$work/copy.json" --jsonl "$work/y" "--csv: found $work/copy.json, which is read as $work/copy.json"
both --jsonl "$work/hard.json" --csv "$work/y" "--jsonl: found $work/hard.json, which is read as $work/copy.json"
[ ! -e "$work/new" ] || fail "a folder was made"
echo '1 1' >"$work/counts"
cp experiments/models/deepseek-moe-16b-paper.json "$work/model.json"
for option in --csv --jsonl --trace; do
    expect 2 sim "$work/copy.json" --set model="$work/model.json" $option "$work/here/model.json"
    err_has "$option: found $work/here/model.json, which is read as $work/model.json"
    expect 2 sim "$work/copy.json" --set routing=file:counts --set model.moe.experts=2 --set model.moe.top_k=1 \
        $option "$work/counts"
    err_has "$option: found $work/counts, which is read as"
done
cmp -s "$work/model.json" experiments/models/deepseek-moe-16b-paper.json || fail "the model was overwritten"
expect 2 schedule "${one[@]}" --trace "$work/hard.json" --set model="$work/model.json" --trace "$work/model.json"
err_has "--trace: found $work/model.json, which is read as"
expect 2 train "$work/copy.json" --jsonl "$work/x" --trace "$work/x"
err_has "--trace: found $work/x, the file of --jsonl"
expect 2 train "$work/copy.json" --data "$work/counts" --jsonl "$work/counts"
err_has "--jsonl: found $work/counts, which is read as"

# ---- wrong manifests -------------------------------------------------------------------------------------------------

for verb in sim schedule check train; do
    expect 2 $verb "$work/none.json"
    out_empty
    err_has "disagmoe: $work/none.json: cannot be opened"
    expect 2 $verb "$work/small.json" --set seq_len=0 --set model.moe.top_k=100 --set unheard=1
    out_empty
    err_named
    err_has "disagmoe: $work/small.json: seq_len: found 0"
    err_has "disagmoe: $work/small.json: model.moe.top_k: found 100"
    err_has "disagmoe: $work/small.json: unheard: unknown key"
    expect 2 $verb "${one[@]}" --set 'parallel={"groups":4,"attn_gpus":2,"ffn_gpus":1}'
    err_named
    err_has "disagmoe: $work/small.json: disagmoe: parallel.groups: found 4 groups of 2 + 1 GPUs; at most the cluster's 8 GPUs"
    head -c 100 "$work/small.json" >"$work/cut.json"
    expect 2 $verb "$work/cut.json"
    err_has "disagmoe: $work/cut.json: "
    expect 2 $verb /
    err_named
    # Behind a file that is not there only the cause is told.
    expect 2 $verb "$work/small.json" --set model=none.json --set model.layers=8 --set 'sweep={"model.moe.top_k":[1,2]}'
    err_has "disagmoe: $work/none.json: cannot be opened"
    [ "$(wc -l <"$work/err")" = 1 ] || fail "more than the cause"
    for sweep in '{"sweep":[{"seq_len":[1,2]}]}' '{"sweep.seq_len":[[1024]]}'; do
        expect 2 $verb "$work/small.json" --set "sweep=$sweep"
        err_has "a sweep cannot be swept"
    done
done
# A part of something that is not there, or left to the tuner, is set alone.
for set in memory.zero=1 memory=auto; do
    expect 0 sim "${one[@]}" --json --set $set --set memory.zero=1
    json 'r, = rows(sys.argv[1]); assert r["memory"]["zero"] == 1' "$work/out"
done
expect 2 sim "${one[@]}" --set seq_len.x=1
err_has "seq_len.x: no such place: seq_len is 1024, not an object"
expect 2 sim "$work/small.json" --set 'systems=["megatron","tutel"]'
err_has "disagmoe: $work/small.json: systems: found \"tutel\""

# ---- sim: records ----------------------------------------------------------------------------------------------------

expect 0 sim "${small[@]}" --json --jobs 1
err_empty
cp "$work/out" "$work/records"
# The keys of a record; nodes and global_batch tell apart the points of a sweep over them.
json '
keys = """swept system model cluster nodes seq_len global_batch micro_batches gpus parallel memory order placement step_time_s
tokens_per_s mfu speedup_vs_megatron breakdown comm_total_s schedule_efficiency peak_memory_bytes oom ops executor
cost_source seed version""".split()
records = rows(sys.argv[1])
assert [(r["seq_len"], r["system"]) for r in records] == [
    (1024, "megatron"), (1024, "disagmoe"), (2048, "megatron"), (2048, "disagmoe")], "which records"
for r in records:
    assert list(r) == keys, f"keys {list(r)}"
    assert r["swept"] == {"seq_len": r["seq_len"]}, "swept"
    assert set(r["breakdown"]) == {"attention_s", "ffn_s", "other_compute_s", "exposed_comm_s", "bubble_s", "optimizer_s"}
    assert abs(sum(r["breakdown"].values()) / r["step_time_s"] - 1) < 1e-9, "breakdown"
    assert set(r["memory"]) == {"recompute", "expert_input", "grads", "moments", "zero", "offload"}
    assert abs(r["tokens_per_s"] * r["step_time_s"] / (64 * r["seq_len"]) - 1) < 1e-9, "tokens"
    assert r["oom"] is False and r["executor"] == "sim" and r["cost_source"] == "model", "texts"
    assert 0 < r["mfu"] < 1 and 0 < r["schedule_efficiency"] <= 1 and r["gpus"] <= 8, "ratios"
    assert (r["order"] is None) == (r["system"] == "megatron"), "order"
for base, other in zip(records[::2], records[1::2]):
    assert base["speedup_vs_megatron"] == 1
    ratio = other["tokens_per_s"] / base["tokens_per_s"]
    assert abs(other["speedup_vs_megatron"] - ratio) < 1e-12, "speedup"
' "$work/records"
for jobs in 1 2 7; do
    expect 0 sim "${small[@]}" --json --jobs $jobs
    cmp -s "$work/out" "$work/records" || fail "--jobs $jobs changes the records"
done
expect 0 sim --json --jobs=2 "${small[@]}" --quiet
cmp -s "$work/out" "$work/records" || fail "options in another order change the records"
expect 0 sim "${one[@]}" --json
json 'r, = rows(sys.argv[1]); assert r["system"] == "disagmoe" and r["speedup_vs_megatron"] is None and r["swept"] == {}' "$work/out"
expect 0 sim "${small[@]}"
err_empty
for word in megatron disagmoe; do out_has $word; done
expect 0 sim "${small[@]}" --explain --json
cmp -s "$work/out" "$work/records" || fail "--explain changes the records"

# A given layout that does not fit runs all the same; where nothing fits the figures are null.
expect 0 sim "${one[@]}" --json --set cluster.gpu.memory_bytes=4e9 --set 'memory={}' --set placement=mixed-nodes \
    --set 'parallel={"groups":2,"attn_gpus":2,"ffn_gpus":2}'
json 'r, = rows(sys.argv[1]); assert r["oom"] is True and r["step_time_s"] > 0 and r["peak_memory_bytes"] > 4e9' "$work/out"
fixed=("${small[@]}" --set seq_len=1024 --set 'memory={}' --set placement=mixed-nodes
    --set 'parallel={"pp":1,"vpp":1,"ep":8,"groups":2,"attn_gpus":2,"ffn_gpus":2}')
expect 0 sim "${fixed[@]}" --json --set per_system.disagmoe.cluster.gpu.memory_bytes=4e9
json '
base, own = rows(sys.argv[1])
assert base["speedup_vs_megatron"] == 1 and base["oom"] is False
assert own["oom"] is True and own["tokens_per_s"] > 0 and own["speedup_vs_megatron"] is None' "$work/out"
expect 0 sim "${small[@]}" --json --set cluster.gpu.memory_bytes=3.1e9 --csv "$work/none.csv"
json '
for r in rows(sys.argv[1]):
    assert r["oom"] is True and r["seq_len"] == r["swept"]["seq_len"] and set(r["breakdown"].values()) == {None}
    assert r["global_batch"] == 64 and r["micro_batches"] is None and r["nodes"] == 1, "inputs"
    for key in "step_time_s tokens_per_s mfu speedup_vs_megatron peak_memory_bytes parallel memory ops".split():
        assert r[key] is None, key
' "$work/out"
expect 0 sim "${small[@]}" --set cluster.gpu.memory_bytes=3.1e9
out_has "out of memory: nothing tried fits"

# ---- layouts given in part ---------------------------------------------------------------------------------------------

# What is searched fits, however little is given; the 82.9 GB are what is usable.
part() { # SYSTEM PARALLEL [OPTION...]
    expect 0 sim "$PWD/experiments/speedup.json" --set 'sweep={}' --set model=models/qwen3-235b-paper.json --set seq_len=8192 \
        --set model.layers=24 --set order.wave=4 --set order.waves_in_flight=2 --set order.prefer=forward --set order.patient=true \
        --set order.justified=false --system "$1" --json --set "parallel=$2" --set cluster.nodes=4 --set global_batch=128 "${@:3}"
}
for given in megatron:'{"ep":8}' megatron:'{"pp":4}' megatron:'{"vpp":2,"cp":2}' disagmoe:'{"groups":4,"cp":2}' \
    disagmoe:'{"groups":2,"attn_nics":6}'; do
    part "${given%%:*}" "${given#*:}"
    json '
r, = rows(sys.argv[1])
given = json.loads(sys.argv[2])
assert r["oom"] is False and 0 < r["peak_memory_bytes"] <= 85899345920 - 3e9, "memory"
assert {key: r["parallel"][key] for key in given} == given, "what is given"' "$work/out" "${given#*:}"
done
part megatron '{"ep":2}' --set cluster.gpu.memory_bytes=5e9
json 'r, = rows(sys.argv[1]); assert r["oom"] is True and r["step_time_s"] is None and r["speedup_vs_megatron"] is None' "$work/out"
# The parts by themselves, as --set gives them, are one object.
expect 0 sim "${one[@]}" --json --set parallel.groups=2 --set parallel.attn_gpus=2 --set parallel.ffn_gpus=2 --set parallel.cp=2 \
    --set parallel.attn_nics=1 --set parallel.ffn_nics=3 --set placement=mixed-nodes
json '
r, = rows(sys.argv[1])
assert r["parallel"] == {"groups": 2, "attn_gpus": 2, "ffn_gpus": 2, "attn_nics": 1, "ffn_nics": 3, "cp": 2, "replicas": 1}' "$work/out"
# An impossible part is named.
impossible() { # SYSTEM PARALLEL KEY WHAT [OPTION...]
    for verb in sim check schedule; do
        expect 2 $verb "${small[@]}" --set seq_len=1024 --system "$1" --set "parallel=$2" "${@:5}"
        out_empty
        err_named
        err_has "disagmoe: $work/small.json: $1: parallel.$3: found $4"
    done
}
impossible megatron '{"ep":16}' ep 'pp 1 × ep 16; at most the cluster'"'"'s 8 GPUs are allowed'
impossible megatron '{"ep":65}' ep '65; at most the model'"'"'s 64 experts are allowed'
impossible megatron '{"pp":5}' pp '5; at most the model'"'"'s 4 layers are allowed'
impossible megatron '{"vpp":5}' vpp 'pp 1 × vpp 5; at most the model'"'"'s 4 layers are allowed'
impossible megatron '{"pp":4,"ep":4}' pp 'pp 4 × ep 4; at most the cluster'"'"'s 8 GPUs are allowed'
impossible megatron '{"cp":16}' cp 'pp 1 × ep 16; at most the cluster'"'"'s 8 GPUs are allowed'
impossible megatron '{"ep":4,"cp":3}' cp '3; a divisor of ep 4 is allowed'
impossible disagmoe '{"groups":5}' groups '5; at most the model'"'"'s 4 layers are allowed'
impossible disagmoe '{"attn_gpus":8}' attn_gpus '1 groups of 8 + 1 GPUs; at most the cluster'"'"'s 8 GPUs are allowed'
impossible disagmoe '{"ffn_gpus":8}' ffn_gpus '1 groups of 1 + 8 GPUs; at most the cluster'"'"'s 8 GPUs are allowed'
impossible disagmoe '{"cp":8}' cp '1 groups of 8 + 1 GPUs; at most the cluster'"'"'s 8 GPUs are allowed'
impossible disagmoe '{"groups":2,"attn_gpus":2,"ffn_gpus":2,"attn_nics":3,"ffn_nics":2}' attn_nics '3 and 2 NICs a group' \
    --set placement=mixed-nodes
# Where neither fits its GPUs there is no baseline, and no speedup of its own either.
expect 0 sim "${fixed[@]}" --json --set cluster.gpu.memory_bytes=3.1e9
json '
for r in rows(sys.argv[1]): assert r["oom"] is True and r["tokens_per_s"] > 0 and r["speedup_vs_megatron"] is None, r["system"]' "$work/out"

# ---- sim: per_system -------------------------------------------------------------------------------------------------

# What is set for one system changes its record and no other's but for the speedup.
expect 0 sim "${fixed[@]}" --json
cp "$work/out" "$work/common"
expect 0 sim "${fixed[@]}" --json --set per_system.disagmoe.memory.recompute=full --set per_system.disagmoe.seed=3
json '
common, own = rows(sys.argv[1]), rows(sys.argv[2])
assert own[0] == common[0], "the other system changed"
assert own[1]["memory"]["recompute"] == "full" and own[1]["seed"] == 3 and own[1] != common[1]' "$work/common" "$work/out"
cp "$work/out" "$work/own"
expect 0 sim "${fixed[@]}" --json --set memory.recompute=full --set seed=3 --system disagmoe
json '
def without(record): return {k: v for k, v in record.items() if k != "speedup_vs_megatron"}
assert without(rows(sys.argv[1])[1]) == without(rows(sys.argv[2])[0])' "$work/own" "$work/out"
expect 0 sim "${fixed[@]}" --json --set per_system.disagmoe.memory.recompute=full --system megatron
json 'assert rows(sys.argv[1]) == rows(sys.argv[2])[:1]' "$work/out" "$work/common"
expect 0 sim "${fixed[@]}" --json --csv "$work/per.csv" \
    --set 'sweep={"per_system":[{},{"disagmoe":{"memory":{"recompute":"full"}}}],"per_system.megatron.cluster.nodes":[1,2]}'
json '
import csv
records = rows(sys.argv[1])
assert [r["swept"]["per_system"] for r in records[::4]] == [{}, {"disagmoe": {"memory": {"recompute": "full"}}}]
assert [r["nodes"] for r in records] == [1, 1, 2, 1] * 2
assert [r["memory"]["recompute"] for r in records] == ["none"] * 4 + ["none", "full"] * 2
for base, other in zip(records[::2], records[1::2]):
    ratio = other["tokens_per_s"] / other["nodes"] / (base["tokens_per_s"] / base["nodes"])
    assert abs(other["speedup_vs_megatron"] / ratio - 1) < 1e-12, "speedup per GPU of the cluster"
lines = list(csv.DictReader(open(sys.argv[2], newline="")))
assert [json.loads(line["swept.per_system"]) for line in lines] == [r["swept"]["per_system"] for r in records]
assert [line["swept.per_system.megatron.cluster.nodes"] for line in lines] == list("11221122")' "$work/out" "$work/per.csv"
expect 0 schedule "${fixed[@]}" --system disagmoe --json --set per_system.disagmoe.memory.recompute=full
grep -q recompute "$work/out" || fail "schedule does not know per_system"
expect 0 schedule "${fixed[@]}" --system disagmoe --json --set per_system.megatron.memory.recompute=full
! grep -q recompute "$work/out" || fail "schedule takes the other system's per_system"
expect 0 check "${fixed[@]}" --set per_system.disagmoe.cluster.gpu.memory_bytes=4e9
grep -qE 'megatron: .* valid; peak memory [0-9.]+ GB of the usable 83 GB$' "$work/out" || fail "check: megatron's memory"
grep -qE 'disagmoe: .* valid; peak memory [0-9.]+ GB, [0-9.]+ GB more than the usable 1.0 GB: does not fit$' "$work/out" ||
    fail "check: disagmoe's memory"
for verb in sim schedule check train; do
    expect 2 $verb "${small[@]}" --set per_system.tutel.seed=1
    err_has "disagmoe: $work/small.json: per_system.tutel: no system of this manifest; allowed: megatron, disagmoe"
    expect 2 $verb "${small[@]}" --set per_system.megatron.seed=-1
    err_has "disagmoe: $work/small.json: per_system.megatron.seed: found -1"
done
expect 2 train experiments/tiny-qwen3.json --set per_system.disagmoe.parallel.groups=64
err_has "disagmoe: experiments/tiny-qwen3.json: disagmoe: parallel.groups: found 64"

# ---- sim: tables -----------------------------------------------------------------------------------------------------

narrow() { # no line is wider than a terminal
    local wide
    wide=$(LC_ALL=C.UTF-8 awk 'length($0) > 80' "$work/out")
    [ -z "$wide" ] || fail "wider than 80: $wide"
}
expect 0 sim "${small[@]}" --set order=auto --set model.layers=2 --set global_batch=16 --explain
narrow
out_has "megatron: searched pp, vpp, ep, cp, memory;"
out_has "disagmoe: searched groups, attn_gpus, ffn_gpus, cp, memory, order, placement;"
! grep -q 'as in the paper' "$work/out" || fail "an EP that nobody gave is called the paper's"
expect 0 sim "${small[@]}" --set parallel.ep=2 --set seq_len=1024
out_has "megatron: given ep 2; searched pp, vpp, cp, memory;"
! grep -q 'as in the paper' "$work/out" || fail "EP 2 is called the paper's"
expect 0 sim "${small[@]}" --set cluster.nodes=2 --set parallel.ep=16 --set memory=auto --set seq_len=1024
out_has "megatron: given ep 16 as in the paper; searched pp, vpp, cp, memory;"
expect 0 sim "${fixed[@]}" --set 'sweep={"parallel.ep":[4,8],"order":[{"wave":4,"waves_in_flight":2},{"wave":2,"waves_in_flight":2}]}' \
    --set per_system.megatron.seed=5
narrow
grep -qE '^ seq node +ep +order +system' "$work/out" || grep -qE 'model +seq +node +ep +order +system' "$work/out" ||
    fail "no columns for what is swept"
out_has 'order #2: {"wave":2,"waves_in_flight":2}'
out_has "ep: parallel.ep"
out_has "megatron: given pp 1, vpp 1; given by point ep; default cp, memory; for it"
out_has '    alone {"seed":5};'
[ "$(grep -c ' megatron ' "$work/out")" = 4 ] || fail "not a row for each record"
expect 0 sim "${fixed[@]}" --set 'sweep={"global_batch":[8,16],"parallel.ep":[4,8],"memory.zero":[0,1],"seed":[1,2],"routing":["balanced","zipf:0.25"]}'
narrow
out_has "point #32: global_batch=16 parallel.ep=8 memory.zero=1 seed=2"
out_has '  routing="zipf:0.25"'
grep -qE '#32 megatron ' "$work/out" || fail "rows are not numbered"
expect 0 sim experiments/tiny-qwen3.json
narrow
grep -qE 'megatron .* [0-9.]+ [KM]B$' "$work/out" || fail "a tiny model's memory is not in its own unit"

# ---- sim: files ------------------------------------------------------------------------------------------------------

expect 0 sim "${small[@]}" --csv "$work/new/folder/a.csv" --jsonl "$work/a.jsonl"
cmp -s "$work/a.jsonl" "$work/records" || fail "--jsonl and --json differ"
json '
import csv
lines = list(csv.DictReader(open(sys.argv[1], newline="")))
records = rows(sys.argv[2])
assert len(lines) == len(records) == 4
for line, record in zip(lines, records):
    assert None not in line and None not in line.values(), "columns"
    for column, text in line.items():
        value = record
        for key in column.split("."): value = (value or {}).get(key)
        shown = "" if value is None else value if isinstance(value, str) else json.dumps(value)
        assert text == shown or float(text) == value, f"{column}: {text} is not {shown}"
' "$work/new/folder/a.csv" "$work/records"
expect 0 sim "${one[@]}" --trace "$work/trace.json"
json '
events = json.load(open(sys.argv[1]))["traceEvents"]
assert sum(e["ph"] == "X" for e in events) > 100 and sum(e.get("name") == "thread_name" for e in events) >= 3
assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
' "$work/trace.json"
expect 2 sim "${small[@]}" --trace "$work/many.json" --csv "$work/many.csv"
out_empty
err_has "--trace: found 4 records; one is needed"
[ ! -e "$work/many.csv" ] || fail "a run that was refused wrote a file"
expect 1 sim "${one[@]}" --set cluster.gpu.memory_bytes=3.1e9 --trace "$work/many.json"
err_has "--trace: nothing fits the GPUs' memory"
[ ! -e "$work/many.json" ] || fail "a trace of several records was written"

# ---- schedule, check, systems, import --------------------------------------------------------------------------------

expect 0 schedule "${one[@]}" --json --trace "$work/again.json"
json '
schedule = json.load(open(sys.argv[1]))
ops, lanes = {op["id"]: op for op in schedule["ops"]}, schedule["lanes"]
assert list(ops) == list(range(len(ops))) and set(schedule) == {"makespan_s", "lanes", "ops"}
for op in ops.values():
    assert set(op) == set("id kind pass layer micro_batch chunk chunks lanes deps duration_s start_s end_s bytes".split())
    assert all(ops[d]["end_s"] <= op["start_s"] for d in op["deps"]), "dependencies"
for lane in lanes:
    assert set(lane) == {"id", "group", "resource", "ops"} and lane["resource"] in ("compute", "send", "recv")
    order = [ops[i] for i in lane["ops"]]
    assert all(a["end_s"] <= b["start_s"] for a, b in zip(order, order[1:])), "lane"
    assert all(lane["id"] in op["lanes"] for op in order)
assert max(op["end_s"] for op in ops.values()) == schedule["makespan_s"]
' "$work/out"
cmp -s "$work/again.json" "$work/trace.json" || fail "the traces of sim and schedule differ"
expect 0 schedule "${one[@]}"
out_has A0
expect 2 schedule "${small[@]}"
err_has "one of each is needed"
expect 1 schedule "${one[@]}" --set cluster.gpu.memory_bytes=3.1e9
err_has "nothing fits"

expect 0 check "${small[@]}"
err_empty
[ "$(grep -c 'of the usable 83 GB' "$work/out")" = 4 ] || fail "check does not say what is usable"
[ "$(grep -c 'operations, valid' "$work/out")" = 4 ] || fail "check does not speak of four schedules"

expect 0 systems
for word in megatron disagmoe 2605.11005; do out_has $word; done
expect 0 systems --json
json '
systems = rows(sys.argv[1])
assert [s["name"] for s in systems][:2] == ["megatron", "disagmoe"]
assert all({"sim", "cpu"} <= set(s["executors"]) and s["title"] and s["paper"] for s in systems)' "$work/out"

cat >"$work/config.json" <<END
{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
 "num_experts_per_tok": 2, "vocab_size": 32000, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "hidden_act": "silu",
 "tie_word_embeddings": false, "max_position_embeddings": 32768, "sliding_window": null}
END
expect 0 import "$work/config.json" --output "$work/mixtral.json"
out_empty
expect 0 import "$work/config.json"
cmp -s "$work/out" "$work/mixtral.json" || fail "import --output writes something else"
json 'm = json.load(open(sys.argv[1])); assert (m["layers"], m["hidden"], m["moe"]["top_k"]) == (32, 4096, 2)' "$work/out"
expect 0 check "${one[@]}" --set "model=$work/mixtral.json" --set model.layers=2
# Its own input by any name: nothing is written.
mkdir "$work/beside"
ln "$work/config.json" "$work/beside/hard.json"
ln -s ../config.json "$work/beside/soft.json"
cp "$work/config.json" "$work/before.json"
for same in "$work/config.json" "$work/./beside/../config.json" "$work/beside/hard.json" "$work/beside/soft.json"; do
    expect 2 import "$work/config.json" --output "$same"
    err_named
    err_has "--output: found $same, the file that is read"
    cmp -s "$work/config.json" "$work/before.json" || fail "--output $same changed the input"
done
expect 2 import "$work/beside/soft.json" --output "$work/config.json"
expect 2 import "$work/small.json"
err_named
expect 2 import "$work/none.json"
err_has "cannot be opened"

# ---- full disks ------------------------------------------------------------------------------------------------------

full() { # ARGUMENT...: with standard output on a full disk
    local status=0
    "$disagmoe" "$@" >/dev/full 2>"$work/err" </dev/null || status=$?
    [ $status = 1 ] || fail "disagmoe $* > /dev/full: exit status $status, expected 1"
    err_has "standard output"
}
if [ -c /dev/full ]; then
    full sim "${small[@]}"
    full sim "${small[@]}" --json
    full schedule "${one[@]}" --json
    full schedule "${one[@]}"
    full check "${one[@]}"
    full train --help
    full systems
    full systems --json
    full import "$work/config.json"
    full --help
    full sim --help
    full --version
    for option in --csv --jsonl --trace; do
        expect 1 sim "${one[@]}" $option /dev/full
        err_has "/dev/full: cannot be written: No space left"
    done
    expect 1 schedule "${one[@]}" --trace /dev/full
    err_has "/dev/full: cannot be written"
    expect 1 import "$work/config.json" --output /dev/full
    err_has "/dev/full: cannot be written"
    [ -c /dev/full ] || fail "/dev/full was replaced"
fi
expect 1 sim "${one[@]}" --csv "$work"
err_has "$work: cannot be written"
expect 1 sim "${one[@]}" --csv "$work/small.json/a.csv"
err_named
[ -z "$(find "$work" -name '*.tmp*')" ] || fail "a temporary file was left behind"

# ---- files grow, and every end of a run keeps what is finished -------------------------------------------------------

# A run whose points are partly impossible is not whole: the file stays, what is finished lies beside it.
echo old >"$work/old.csv"
expect 2 sim "${fixed[@]}" --set 'sweep={"parallel.groups":[2,64]}' --csv "$work/old.csv" --json
[ "$(cat "$work/old.csv")" = old ] || fail "a run with errors replaced a file"
[ "$(wc -l <"$work/old.csv.part")" = $(($(wc -l <"$work/out") + 1)) ] || fail "the part does not hold the finished records"
err_has "$work/old.csv: left as it was: the run is not whole; what is finished lies in $work/old.csv.part"
rm "$work/old.csv.part"
expect 2 sim "${fixed[@]}" --set parallel.groups=64 --system disagmoe --csv "$work/old.csv"
[ ! -e "$work/old.csv.part" ] || fail "a part without records was left behind"
expect 0 sim "${fixed[@]}" --csv "$work/old.csv"
[ "$(wc -l <"$work/old.csv")" = 3 ] || fail "a whole run did not replace the file"

# begin_long: far more points than can be done in time, until some are written. Leaves its process in $pid.
begin_long() {
    echo old >"$work/kept.csv"
    rm -f "$work"/kept.*.part*
    "$disagmoe" sim "${one[@]}" --set model.layers=28 --set global_batch=256 --set "sweep={\"seed\":[$(seq -s, 1 1000)]}" \
        --set 'parallel={"groups":2,"attn_gpus":2,"ffn_gpus":2}' --set 'order={"wave":8,"waves_in_flight":1}' \
        --set placement=mixed-nodes --json --jobs 2 --csv "$work/kept.csv" --jsonl "$work/kept.jsonl" \
        >"$work/out" 2>"$work/err" </dev/null &
    pid=$!
    for _ in $(seq 1200); do
        [ ! -e "$work/kept.jsonl.part" ] || [ "$(wc -l <"$work/kept.jsonl.part")" -lt 3 ] || return 0
        sleep 0.05
    done
    fail "no records were written"
}
# The records of both files and of standard output are the first ones, in order.
are_first() {
    json '
import csv
records = rows(sys.argv[1])
lines = list(csv.DictReader(open(sys.argv[2], newline="")))
assert [r["swept"]["seed"] for r in records] == list(range(1, len(records) + 1)), "order"
assert [float(line["step_time_s"]) for line in lines] == [r["step_time_s"] for r in records]
assert rows(sys.argv[3]) == records' "$work/kept.jsonl.part" "$work/kept.csv.part" "$work/out"
    [ "$(cat "$work/kept.csv")" = old ] || fail "a part replaced the file"
    [ ! -e "$work/kept.jsonl" ] || fail "a part became the file"
}
for signal in INT TERM HUP; do
    begin_long
    kill -$signal $pid
    status=0
    wait $pid || status=$?
    [ $status = 1 ] || fail "SIG$signal: exit status $status, expected 1"
    kept=$(wc -l <"$work/out")
    [ "$kept" -ge 3 ] && [ "$kept" -lt 1000 ] || fail "$kept records were kept"
    err_has "interrupted: $kept of 1000 records are finished"
    err_has "$work/kept.csv: left as it was: the run is not whole; what is finished lies in $work/kept.csv.part"
    err_named
    are_first
done
begin_long
kill -KILL $pid
wait $pid 2>/dev/null
are_first
# Another run to the same file leaves alone what the killed one finished.
cp "$work/kept.csv.part" "$work/killed"
expect 0 sim "${fixed[@]}" --csv "$work/kept.csv"
cmp -s "$work/kept.csv.part" "$work/killed" || fail "the part of a killed run was touched"
[ "$(wc -l <"$work/kept.csv")" = 3 ] && [ ! -e "$work/kept.csv.part2" ] || fail "a part beside another"
# check ends likewise; what it has said stands.
"$disagmoe" check "${fixed[@]}" --set "sweep={\"seed\":[$(seq -s, 1 2000)]}" >"$work/out" 2>"$work/err" </dev/null &
pid=$!
for _ in $(seq 1200); do
    sleep 0.05
    [ "/proc/$pid/exe" -ef "$disagmoe" ] || continue # bash has yet to make way for the program
    caught=$(sed -n 's/^SigCgt:[ \t]*//p' "/proc/$pid/status" 2>/dev/null)
    # All handlers stand when the last one does: SIGHUP, mask 0x1.
    [ -z "$caught" ] || [ $((0x${caught: -8} & 1)) = 0 ] || break
done
kill -TERM $pid
status=0
wait $pid || status=$?
[ $status = 1 ] || fail "check: exit status $status after SIGTERM, expected 1"
points=$(($(wc -l <"$work/out") / 2))
err_has "interrupted: $points of 2000 points are checked"
# nohup: a hang-up that is ignored stays ignored.
(trap '' HUP; begin_long; kill -HUP $pid; sleep 0.3; kill -TERM $pid; wait $pid)
grep -q 'interrupted: ' "$work/err" || fail "SIGHUP was not ignored"

[ $failures = 0 ] || { echo "$failures failed"; exit 1; }
