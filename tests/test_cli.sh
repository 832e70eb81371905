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

# ---- a small manifest: two sequence lengths, both systems ------------------------------------------------------------

cat >"$work/small.json" <<END
{"name": "small", "model": "$PWD/experiments/models/deepseek-moe-16b-paper.json",
 "cluster": "$PWD/experiments/clusters/h800-16x8.json", "systems": ["megatron", "disagmoe"],
 "seq_len": 1024, "global_batch": 64, "sweep": {"seq_len": [1024, 2048]}}
END
small=("$work/small.json" --set model.layers=4 --set cluster.nodes=1)
one=("${small[@]}" --set seq_len=1024 --system disagmoe)

# ---- usage -----------------------------------------------------------------------------------------------------------

verbs='sim schedule check train import systems bench'
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
for verb in sim schedule check train import; do
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
for jobs in 0 -1 two 1.5 '' 99999999999999999999; do
    expect 2 sim "$work/small.json" --jobs "$jobs"
    err_has "whole number"
done

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
    err_has "disagmoe: $work/small.json: disagmoe: parallel: found 4 groups of 2 + 1 GPUs; at most the cluster's 8 GPUs"
    head -c 100 "$work/small.json" >"$work/cut.json"
    expect 2 $verb "$work/cut.json"
    err_has "disagmoe: $work/cut.json: "
    expect 2 $verb /
    err_named
done
expect 2 sim "$work/small.json" --set 'systems=["megatron","tutel"]'
err_has "disagmoe: $work/small.json: systems: found \"tutel\""

# ---- sim: records ----------------------------------------------------------------------------------------------------

expect 0 sim "${small[@]}" --json --jobs 1
err_empty
cp "$work/out" "$work/records"
# The keys of a record; nodes and global_batch tell apart the points of a sweep over them.
json '
keys = """system model cluster nodes seq_len global_batch micro_batches gpus parallel memory order placement step_time_s
tokens_per_s mfu speedup_vs_megatron breakdown comm_total_s schedule_efficiency peak_memory_bytes oom ops executor
cost_source seed version""".split()
records = rows(sys.argv[1])
assert [(r["seq_len"], r["system"]) for r in records] == [
    (1024, "megatron"), (1024, "disagmoe"), (2048, "megatron"), (2048, "disagmoe")], "which records"
for r in records:
    assert list(r) == keys, f"keys {list(r)}"
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
json 'r, = rows(sys.argv[1]); assert r["system"] == "disagmoe" and r["speedup_vs_megatron"] is None' "$work/out"
expect 0 sim "${small[@]}"
err_empty
for word in megatron disagmoe; do out_has $word; done
expect 0 sim "${small[@]}" --explain --json
cmp -s "$work/out" "$work/records" || fail "--explain changes the records"

# A given layout that does not fit runs all the same; where nothing fits the figures are null.
expect 0 sim "${one[@]}" --json --set cluster.gpu.memory_bytes=4e9 --set 'memory={}' --set placement=mixed-nodes \
    --set 'parallel={"groups":2,"attn_gpus":2,"ffn_gpus":2}'
json 'r, = rows(sys.argv[1]); assert r["oom"] is True and r["step_time_s"] > 0 and r["peak_memory_bytes"] > 4e9' "$work/out"
expect 0 sim "${small[@]}" --json --set cluster.gpu.memory_bytes=3.1e9 --csv "$work/none.csv"
json '
for r in rows(sys.argv[1]):
    assert r["oom"] is True and r["seq_len"] > 0 and set(r["breakdown"].values()) == {None}
    for key in "step_time_s tokens_per_s mfu speedup_vs_megatron peak_memory_bytes parallel memory ops".split():
        assert r[key] is None, key
' "$work/out"
expect 0 sim "${small[@]}" --set cluster.gpu.memory_bytes=3.1e9

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
expect 1 sim "${small[@]}" --trace "$work/many.json"
err_has "one feasible record is needed"
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
ln "$work/config.json" "$work/hard.json"
ln -s ../config.json "$work/beside/soft.json"
cp "$work/config.json" "$work/before.json"
for same in "$work/config.json" "$work/./beside/../config.json" "$work/hard.json" "$work/beside/soft.json"; do
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

# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

# Far more points than can be done in time; the interrupt comes once the handler (signal 2: mask 0x2) stands.
seeds=$(seq -s, 1 1000)
"$disagmoe" sim "${one[@]}" --set model.layers=28 --set global_batch=256 --set "sweep={\"seed\":[$seeds]}" \
    --set 'parallel={"groups":2,"attn_gpus":2,"ffn_gpus":2}' --set 'order={"wave":8,"waves_in_flight":1}' \
    --set placement=mixed-nodes --json --jobs 2 --csv "$work/kept.csv" >"$work/out" 2>"$work/err" </dev/null &
pid=$!
for _ in $(seq 600); do
    caught=$(sed -n 's/^SigCgt:[ \t]*//p' "/proc/$pid/status" 2>/dev/null)
    [ -z "$caught" ] || [ $((0x${caught: -8} & 2)) = 0 ] || break
    sleep 0.05
done
sleep 0.5
kill -INT $pid
status=0
wait $pid || status=$?
[ $status = 1 ] || fail "interrupted: exit status $status, expected 1"
kept=$(wc -l <"$work/out")
err_has "interrupted: $kept of 1000 records are finished"
[ "$kept" -ge 1 ] && [ "$kept" -lt 1000 ] || fail "$kept records were kept"
json 'assert [r["seed"] for r in rows(sys.argv[1])] == sorted(r["seed"] for r in rows(sys.argv[1]))' "$work/out"
[ "$(wc -l <"$work/kept.csv")" = $((kept + 1)) ] || fail "the CSV does not hold the finished records"

[ $failures = 0 ] || { echo "$failures failed"; exit 1; }
