#!/bin/bash
# disagmoe profile from the command line: files that check and sim take as they are, links, wrong input, files that
# cannot be written, a killed rank. No time is asserted. Tests $DISAGMOE (default: build/disagmoe) from the root.
set -u
cd "$(dirname "$0")/.." || exit 1

disagmoe=${DISAGMOE:-$PWD/build/disagmoe}
python=/usr/bin/python3
for needed in "$disagmoe" "$python" /usr/bin/mpirun; do
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
expect() { # STATUS ARGUMENT...: its output is left in $work/out and $work/err
    local expected=$1 status=0
    shift
    timeout -k 5 120 "$disagmoe" "$@" >"$work/out" 2>"$work/err" </dev/null || status=$?
    [ $status = "$expected" ] || fail "$*: exit status $status, expected $expected"
}
out_has() { grep -qF -- "$1" "$work/out" || fail "standard output does not say '$1'"; }
err_has() { grep -qF -- "$1" "$work/err" || fail "standard error does not say '$1'"; }
err_empty() { [ ! -s "$work/err" ] || fail "something on standard error"; }
err_is_one_line() { [ "$(wc -l <"$work/err")" = 1 ] || fail "$(wc -l <"$work/err") lines on standard error, expected 1"; }
narrow() { # the table fits a terminal
    awk 'length($0) > 80 { print; wide = 1 } END { exit wide }' "$work/out" || fail "lines above 80 columns"
}
json() { # SCRIPT FILE...
    "$python" -c "
import json, math, sys
def refuse(text): raise ValueError(text)
def rows(file): return [json.loads(line, parse_constant=refuse) for line in open(file, encoding='utf-8')]
def load(file): return json.load(open(file, encoding='utf-8'), parse_constant=refuse)
$1" "${@:2}" 2>"$work/err" || fail "Python: $(tail -n 1 "$work/err")"
}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OPENBLAS_NUM_THREADS=1
quick=(--repeats 2 --steps 2)

# ---- what is written -------------------------------------------------------------------------------------------------

# used MANIFEST SYSTEM ARGUMENT...: profiles, and uses both files.
used() {
    local manifest=$1 system=$2 cluster=$work/cluster.json costs=$work/costs.json
    shift 2
    rm -f "$cluster" "$costs"
    expect 0 profile "$manifest" --system "$system" "$@" "${quick[@]}" --cluster "$cluster" --costs "$costs" --json
    err_empty
    json '
record, = rows(sys.argv[1])
cluster, costs = load(sys.argv[2]), load(sys.argv[3])
assert record["cluster"] == cluster and record["costs"] == costs, "files and record differ"
assert record["system"] == sys.argv[4] and record["repeats"] == 2 and record["ranks"] >= 1
for name, rate in cluster["rates"].items():
    assert list(rate) == ["value", "unit", "source"] and rate["value"] > 0, name
    assert rate["source"].startswith("Measured by disagmoe profile: ") and record["cpu"] in rate["source"], name
for name in "gpu", "nvlink", "nic", "host":
    assert "disagmoe profile" in cluster[name]["source"], name
for name, value in costs.items():
    assert name == "source" or value >= 0 and math.isfinite(value), name
for name in "attn_fwd_s", "attn_bwd_s", "attn_wgrad_s", "ffn_fwd_s", "ffn_bwd_s", "ffn_wgrad_s", "head_bwd_s", "optimizer_s":
    assert costs[name] > 0, name
for row in record["components"]:
    m = row["measured_s"]
    assert 0 <= m["low"] <= m["median"] <= m["high"], row
assert record["step"]["measured_s"]["median"] > 0
for key in "simulated_with_costs_s", "simulated_with_cluster_s", "simulated_with_run_s":
    assert record["step"][key] > 0, key
' "$work/out" "$cluster" "$costs" "$system"
    cp "$work/out" "$work/record"
    # As they are, and the step that sim then says is the one that profile said.
    for file in "cluster=$cluster" "costs=$costs"; do
        expect 0 check "$manifest" --system "$system" "$@" --set "$file"
        expect 0 sim "$manifest" --system "$system" "$@" --set "$file" --json
        json '
record, = rows(sys.argv[1])
sim, = rows(sys.argv[2])
said = record["step"]["simulated_with_" + sys.argv[3].split("=")[0] + "_s"]
assert sim["step_time_s"] == said, (sim["step_time_s"], said)' "$work/record" "$work/out" "$file"
    done
}
small=(--set cluster.gpus_per_node=2 --set cluster.nics_per_node=2 --set global_batch=4)
ring=("${small[@]}" --set parallel.groups=1 --set parallel.attn_gpus=1 --set parallel.ffn_gpus=1)
pipe=("${small[@]}" --set parallel.pp=1 --set parallel.vpp=1 --set parallel.ep=2)
used experiments/tiny-qwen3.json disagmoe "${ring[@]}"
used experiments/tiny-deepseek.json megatron "${pipe[@]}"
if ! $sanitize; then
    used experiments/tiny-qwen3.json disagmoe
    used experiments/tiny-gptoss.json megatron --set memory.zero=1
    # One rank: no links, so copies in memory stand in, and the source says so.
    used experiments/tiny-qwen3.json megatron --set cluster.gpus_per_node=1 --set cluster.nics_per_node=1 \
        --set global_batch=4 --set parallel.pp=1 --set parallel.vpp=1 --set parallel.ep=1
    grep -qF "no link between a single rank" "$work/cluster.json" || fail "links of a single rank"
    # A manifest may name the files, from its own folder.
    sed 's|"clusters/local-8.json"|"cluster.json", "costs": "costs.json"|' experiments/tiny-qwen3.json >"$work/m.json"
    expect 0 sim "$work/m.json" --system megatron --set global_batch=4 --set parallel.pp=1 --set parallel.vpp=1 --set parallel.ep=1 --json
    out_has '"cost_source":"table"'
fi
expect 0 profile experiments/tiny-qwen3.json --system disagmoe "${ring[@]}" "${quick[@]}"
err_empty
narrow
for said in roofline measured "attention forward" "whole step" "simulated with the table of costs" "simulated with the cluster file"; do
    out_has "$said"
done

# ---- links -----------------------------------------------------------------------------------------------------------

pairs() { # FILE RANKS
    json '
ranks = int(sys.argv[2])
lines = rows(sys.argv[1])
assert [(r["a"], r["b"]) for r in lines] == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)], "pairs"
for r in lines:
    assert r["bytes_per_s_low"] <= r["bytes_per_s"] <= r["bytes_per_s_high"] and r["bytes_per_s"] > 0, r
    assert 0 < r["latency_s_low"] <= r["latency_s"] <= r["latency_s_high"] and r["host_a"] and r["host_b"], r
' "$1" "$2"
}
for ranks in 2 3; do
    expect 0 profile --links --ranks $ranks --repeats 2 --json
    err_empty
    pairs "$work/out" $ranks
done
mpirun --oversubscribe -n 4 "$disagmoe" profile --links --json --repeats 2 >"$work/out" 2>"$work/err" || fail "under mpirun"
pairs "$work/out" 4
expect 0 profile --links --ranks 2 --repeats 2
err_empty
narrow
out_has "inside a host: 1 pair"

# ---- wrong input -----------------------------------------------------------------------------------------------------

refused() { # TEXT ARGUMENT...
    local text=$1
    shift
    expect 2 profile "$@"
    err_has "$text"
    [ ! -s "$work/out" ] || fail "something on standard output"
}
m=experiments/tiny-qwen3.json
refused "a manifest, or --links" --json
refused "no manifest is allowed" $m --links
refused "--links takes" --links --costs "$work/x"
refused "--ranks needs --links" $m --ranks 2
refused "found 1; a link needs 2" --links --ranks 1
refused "--steps: found 1" $m --system disagmoe --steps 1
refused "--repeats: found 0" $m --system disagmoe --repeats 0
refused "$m: systems: found 2; a single one is needed" $m
refused "$m: parallel.cp: found 2; profile measures whole sequences" $m --system disagmoe --set parallel.cp=2
refused "$m: costs: found a table" $m --system disagmoe --set 'costs={"attn_fwd_s":1}'
refused "$m: sweep: found 2 points" $m --system disagmoe --set 'sweep={"seq_len":[64,128]}'
refused "--cluster: found experiments/clusters/local-8.json, which is read" $m --system disagmoe --cluster experiments/clusters/local-8.json
refused "none.json: cannot be opened" none.json
refused "$work/folder/: " $m --system disagmoe --costs "$work/folder/" --set seed=2
while IFS='|' read -r bad said; do
    expect 2 sim $m --system disagmoe --set "$bad"
    err_has "$said"
done <<'END'
costs=none.json|experiments/none.json: cannot be opened
costs=3|costs: found 3; allowed: an object
costs={"attn_fwd_s":-1}|costs.attn_fwd_s: found -1
costs={"attention":1}|costs.attention
END
# Another number of ranks than the plan's: said once.
mpirun --oversubscribe -n 3 "$disagmoe" profile $m --system disagmoe >"$work/out" 2>"$work/err" && fail "3 ranks for 8 GPUs"
err_has "found 3 ranks; the plan needs 8"
[ "$(grep -c 'the plan needs' "$work/err")" = 1 ] || fail "said more than once"
mpirun -n 1 "$disagmoe" profile --links >"$work/out" 2>"$work/err" && fail "links of one rank"
err_has "found 1 rank; a link needs 2"

# ---- files that cannot be written, ranks that end --------------------------------------------------------------------

echo kept >"$work/kept.json"
# A limit on files' sizes stands in for a full disk. The old file stays, and no part of a new one.
(
    ulimit -f 1
    exec "$disagmoe" profile $m --system disagmoe "${ring[@]}" "${quick[@]}" --cluster "$work/kept.json"
) >"$work/out" 2>"$work/err" </dev/null && fail "a full disk"
[ "$(cat "$work/kept.json")" = kept ] || fail "the old file is gone"
[ "$(ls "$work" | grep -c kept)" = 1 ] || fail "a part is left: $(ls "$work")"

rank_pid() { # RANK TEXT: process of that rank of the run with TEXT on its command line
    local pid
    for pid in $(pgrep -f -- "$2"); do
        tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qx "OMPI_COMM_WORLD_RANK=$1" && echo "$pid" && return
    done
}
mark=$work/killed.json
timeout -k 5 120 "$disagmoe" profile $m --system disagmoe --steps 100000 --repeats 2 --cluster "$mark" >"$work/out" 2>"$work/err" </dev/null &
pid=$! target=
for _ in $(seq 600); do
    target=$(rank_pid 3 "$mark")
    [ -z "$target" ] || break
    sleep 0.05
done
sleep 1
kill -KILL "$target" || fail "rank 3 is not there"
status=0
wait $pid || status=$?
[ $status = 1 ] || fail "a killed rank: exit status $status, expected 1"
err_has "disagmoe: profile: rank 3 was killed by signal 9"
err_is_one_line
sleep 0.2
[ -z "$(pgrep -f -- "$mark")" ] || fail "processes are left over"
[ ! -e "$mark" ] || fail "a killed run has written $mark"

[ $failures = 0 ] || { echo "$failures failed"; exit 1; }
echo passed
