#!/bin/bash
# disagmoe regimes and experiments/regimes.sh with small models: what is in the files, that no record is simulated twice, that
# runs go on from what is there, the same bytes always; on made-up records, what the report says of them. The committed
# records are complete, and some of them are what the simulator gives today.
set -euo pipefail
cd "$(dirname "$0")/.."
disagmoe=${DISAGMOE:-build/disagmoe}
python=${PYTHON:-/usr/bin/python3}
"$python" -c 'import matplotlib' 2>/dev/null || { echo "skip: $python has no matplotlib"; exit 77; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
results=$out/results
failed=0
fail() { echo "FAIL: $*"; failed=1; }
expect() { # FILE TEXT...
    local file=$1 text
    for text in "${@:2}"; do
        grep -qF -- "$text" "$file" || { fail "not said: $text"; sed 's/^/    /' "$file"; }
    done
}

# Two models of four layers, three sequence lengths, eight GPUs on two nodes; what is searched is soon searched.
mkdir -p "$out/experiments/models" "$out/experiments/clusters"
cp experiments/published.json "$out/experiments/"
"$python" - "$out/experiments" <<'END'
import json, sys
folder = sys.argv[1]

def write(name, value):
    with open(f"{folder}/{name}.json", "w") as stream:
        json.dump(value, stream)

model = json.load(open("experiments/tiny-qwen3.json"))["model"]
for name, vocab in ("one", 64), ("two", 4096):
    write(f"models/{name}", model | {"name": name, "vocab": vocab})
write("clusters/small", json.load(open("experiments/clusters/local-8.json")) | {"nodes": 2, "gpus_per_node": 4, "nics_per_node": 4})
write("table", {
    "model": "models/one.json", "cluster": "clusters/small.json", "systems": ["megatron", "disagmoe"],
    "seq_len": 64, "global_batch": 32,
    "parallel": {"pp": 2, "vpp": 1, "ep": 2, "groups": 2, "attn_gpus": 2, "ffn_gpus": 2},
    "order": {"wave": 2, "waves_in_flight": 2, "prefer": "wave"},
    "sweep": {"model": ["models/one.json", "models/two.json"], "seq_len": [64, 128, 256]}})
exchange = "cluster.rates.nic_exchange.value"
write("regimes", {
    "manifest": "table.json", "set": {"seed": 1},
    "factors": [
        {"name": "batch", "default": "32", "levels": [
            {"name": "16", "set": {"global_batch": 16}},
            {"name": "tokens", "set": {"global_batch": {"by_seq_len": {"128": 16, "256": 8}}}}]},
        {"name": "recompute", "default": "tuned", "levels": [
            {"name": "full", "by_point": True, "per_system": {"megatron": {"memory.recompute": "full"}}}]},
        {"name": "head", "default": "last-ffn", "levels": [
            {"name": "all-ffn", "per_system": {"disagmoe": {"head": "all-ffn"}}}]},
        {"name": "NICs", "default": "one rate", "levels": [
            {"name": "half", "per_system": {"megatron": {exchange: {"times": 0.5}}}}]},
        {"name": "stages", "default": "tuned", "levels": [
            {"name": "four", "per_system": {"megatron": {"parallel.pp": 4}}}]}],
    "combinations": [{"recompute": "full", "head": "all-ffn"}],
    "sensitivity": [{"name": "NIC", "default": "1", "levels": [{"name": "x0.8", "set": {exchange: {"times": 0.8}}}]}]})
END
regimes() { "$disagmoe" regimes "$out/experiments/regimes.json" --quiet "$@"; }

# The script, and what it leaves.
RESULTS=$results REGIMES_DEFINITION=$out/experiments/regimes.json experiments/regimes.sh >"$out/printed" ||
    fail "experiments/regimes.sh ended with $?"
[ "$(ls -A "$results" | tr '\n' ' ')" = "regimes.csv regimes.jsonl regimes.png regimes.svg regimes.txt " ] ||
    fail "other files are left: $(ls -A "$results")"
! awk 'length > 80' "$results/regimes.txt" | grep . || fail "lines above are wider than 80"
expect "$results/regimes.txt" "one factor at a time" "batch tokens" "recompute full" "NIC x0.8" "every speedup" \
    "combination 1: recompute full, head all-ffn." "At all sequences: " "At the shortest and longest sequences: "

"$python" - "$results" <<'END' || fail "the records are not as above"
import csv, json, sys
records = [json.loads(line) for line in open(sys.argv[1] + "/regimes.jsonl")]
rows = list(csv.DictReader(open(sys.argv[1] + "/regimes.csv")))
swept = [(r["system"], json.dumps(r["swept"], sort_keys=True)) for r in records]
assert len(set(swept)) == len(swept), "a record is there twice"

def of(system, **own):
    own = {key.replace("__", "."): value for key, value in own.items()}
    return [r for r in records if r["system"] == system
            and {k: v for k, v in r["swept"].items() if k not in ("model", "seq_len")} == own]

# Six points; what is set for one system alone is no matter of the other's; equal tokens at 128 are batch 16.
for system in "megatron", "disagmoe":
    assert len(of(system)) == len(of(system, global_batch=16)) == 6
    assert {r["seq_len"] for r in of(system, global_batch=8)} == {256}
    assert len(of(system, cluster__rates__nic_exchange__value=4e8)) == 4, "a sensitivity is shown at the ends"
assert len(of("megatron", memory__recompute="full")) == 6 and not of("disagmoe", memory__recompute="full")
assert len(of("disagmoe", head="all-ffn")) == 6 and not of("megatron", head="all-ffn")
assert len(of("megatron", cluster__rates__nic_exchange__value=2.5e8)) == 6
assert len(of("megatron", parallel__pp=4)) == 6
assert all(r["parallel"]["pp"] == 4 for r in of("megatron", parallel__pp=4))
assert all(r["memory"]["recompute"] == "full" for r in of("megatron", memory__recompute="full"))
assert all(r["global_batch"] == 16 for r in of("megatron", global_batch=16))

# A speedup is the quotient of the two records that its variant names.
rate = {(r["system"], r["model"], r["seq_len"]): r["tokens_per_s"]
        for r in of("megatron", memory__recompute="full") + of("disagmoe", head="all-ffn")}
mine = [r for r in rows if r["kind"] == "combination"]
assert len(mine) == 6 and mine[0]["levels"] == "recompute full, head all-ffn"
for row in mine:
    point = row["model"], int(row["seq_len"])
    assert abs(float(row["speedup"]) / (rate["disagmoe", *point] / rate["megatron", *point]) - 1) < 1e-12
products = [r for r in rows if r["kind"] == "product"]
crossed = len(products[0]["variant"].split(",")[0])
names = {r["variant"] for r in products}
assert len(names) > 2 ** crossed and {"-" * crossed, "ABCD"[:crossed]} < names, names
assert crossed >= 2 and all(r["seq_len"] != "128" or "all lengths" in r["variant"] for r in products)
END

# The same bytes with another number of threads, from records alone, and from a part of them.
regimes --jobs 3 --jsonl "$out/again.jsonl" >"$out/again.txt"
cmp "$out/again.jsonl" "$results/regimes.jsonl" && cmp "$out/again.txt" "$results/regimes.txt" || fail "another run gives other bytes"
regimes --records "$results/regimes.jsonl" --csv "$out/again.csv" >"$out/again.txt"
cmp "$out/again.txt" "$results/regimes.txt" && cmp "$out/again.csv" "$results/regimes.csv" || fail "records alone give another report"
sed '1~3d' "$results/regimes.jsonl" >"$out/part.jsonl"
printf '{"swept":{"model"' >>"$out/part.jsonl" # a line that a killed run did not end
regimes --reuse "$out/part.jsonl" --jsonl "$out/again.jsonl" >/dev/null
cmp "$out/again.jsonl" "$results/regimes.jsonl" || fail "a run that goes on from a part gives other records"

# Made-up records of every variant: Megatron's tokens/s are 1, or half under full recomputation, those of DisagMoE as told,
# by sequence length n, model m and what else is set, s.
made_up() { # OUTPUT EXPRESSION
    "$python" - "$out/experiments" "$2" >"$1" <<'END'
import itertools, json, sys
exchange = "cluster.rates.nic_exchange.value"
own = {
    "megatron": [{"memory.recompute": "full"}, {exchange: 2.5e8}, {"parallel.pp": 4}],
    "disagmoe": [{"head": "all-ffn"}]}
both = [{}, {"global_batch": 16}, {"global_batch": 8}, {exchange: 4e8}]
for system, settings in own.items():
    choices = [sum(([*s.items()] for s in chosen), []) for count in range(len(settings) + 1)
               for chosen in itertools.combinations(settings, count)]
    for common, chosen, n, m in itertools.product(both, choices, (64, 128, 256), ("one", "two")):
        s = {"model": f"models/{m}.json", "seq_len": n} | common | dict(chosen)
        rate = eval(sys.argv[2]) if system == "disagmoe" else 0.5 if s.get("memory.recompute") else 1
        print(json.dumps({"swept": s, "system": system, "nodes": 2, "tokens_per_s": rate, "oom": rate is None}))
END
}
# Full recomputation of the baseline doubles the speedup: alone it is too much at 256, with DisagMoE's head on all groups
# all are inside.
made_up "$out/made-up.jsonl" '{64: 0.85, 128: 0.88, 256: 0.95}[n] * (0.95 if "head" in s else 1)'
regimes --records "$out/made-up.jsonl" >"$out/report"
expect "$out/report" \
    "table                  0.85-0.85 0.88-0.88 0.95-0.95   0/6  4.18  256" \
    "recompute full         1.70-1.70 1.76-1.76 1.90-1.90   4/6  0.18  256" \
    "combination 1          1.61-1.61 1.67-1.67 1.80-1.80   6/6  0.00  256" \
    "  0.693  A  recompute full" "  0.051  B  head all-ffn" "      -     stages: nothing changes" \
    "AB                     1.61-1.61         - 1.80-1.80   4/4  0.00  256" \
    "At all sequences: all 6 speedups are inside under: recompute full, head" "the largest is at 256, as the paper says"
# Every variant of the product that has all inside at the ends is shown at all lengths.
made_up "$out/made-up.jsonl" '{64: 0.85, 128: 0.70 if "head" in s else 0.87, 256: 0.89}[n] * (0.95 if "head" in s else 1)'
regimes --records "$out/made-up.jsonl" >"$out/report"
tr '\n' ' ' <"$out/report" | tr -s ' ' >"$out/line"
expect "$out/line" "A-, all lengths 1.70-1.70 1.74-1.74 1.78-1.78 6/6" "AB, all lengths 1.61-1.61 1.33-1.33 1.69-1.69 4/6" \
    "under: recompute full;"
! grep -F "also all inside" "$out/report" || fail "the nearest is told twice"
# None inside: the nearest is told, and where the largest lies.
made_up "$out/made-up.jsonl" '{64: 0.95, 128: 0.95, 256: 0.93}[n]'
regimes --records "$out/made-up.jsonl" >"$out/report"
expect "$out/report" "no variant has all 6 speedups inside; the nearest has 0:" "largest is at 64, not at"
tr '\n' ' ' <"$out/report" | tr -s ' ' >"$out/line"
expect "$out/line" "At all sequences: no variant has all 6 speedups inside; the nearest has 0: recompute full; the others are 0.46 away" \
    "A 1.90-1.90 - 1.86-1.86 0/4 0.28 64 - 0.95-0.95 - 0.93-0.93 0/4 2.60 64 A, all lengths 1.90-1.90"
# Where DisagMoE does not fit, that is said, and counts as outside; no product takes such a level.
made_up "$out/made-up.jsonl" 'None if m == "two" and n == 256 and "head" in s else 0.85'
regimes --records "$out/made-up.jsonl" >"$out/report"
expect "$out/report" "combination 1          1.70-1.70 1.70-1.70 1.70-1.70!  5/6     -   64" "      -     head: nothing changes, or a system does not fit" \
    "all 6 speedups are inside under: recompute full;"

# What is wrong is said.
wrong() { # STATUS TEXT OPTIONS...
    local status=0
    regimes "${@:3}" >/dev/null 2>"$out/said" || status=$?
    [ $status = "$1" ] || fail "status $status, not $1: ${*:3}"
    expect "$out/said" "$2"
}
head -n 9 "$results/regimes.jsonl" >"$out/few.jsonl"
wrong 2 "the records lack megatron at" --records "$out/few.jsonl"
echo '{"system": "megatron"}' >"$out/other.jsonl"
wrong 2 "other.jsonl:1: no record of a simulation" --records "$out/other.jsonl"
wrong 2 "which is read; another file is needed" --reuse "$out/few.jsonl" --jsonl "$out/few.jsonl"
wrong 2 "global_batch" --set global_batch=0
while read -r path value text; do
    "$python" - "$out/experiments/regimes.json" "$path" "$value" >"$out/experiments/wrong.json" <<'END'
import json, sys
document = place = json.load(open(sys.argv[1]))
*parts, last = sys.argv[2].split(".")
for part in parts:
    place = place[int(part) if part.isdigit() else part]
place[last] = json.loads(sys.argv[3])
print(json.dumps(document))
END
    status=0
    "$disagmoe" regimes "$out/experiments/wrong.json" --quiet >/dev/null 2>"$out/said" || status=$?
    [ $status = 2 ] || fail "status $status: $path $value"
    expect "$out/said" "$text"
done <<'END'
factors.0.levels.0.st 1 factors[0].levels[0].st
manifest "missing.json" missing.json
combinations.0.head "gone" combinations[0].head
factors.1.levels.0.per_system {"tutel":{}} factors[1].levels[0].per_system.tutel
factors.3.levels.0.set {"cluster.gone":{"times":2}} cluster.gone
factors.0.levels.0.set {"gone":1} gone
END

# The committed records: none is missing, and those taken out are made again, the same bytes: two, or with DISAGMOE_LONG more.
reference=results/reference/regimes.jsonl
if [ -e $reference ] && [ "${DISAGMOE_MODE:-plain}" = plain ]; then
    "$disagmoe" regimes experiments/regimes.json --records $reference >/dev/null || fail "the committed records are not whole"
    every=300
    [ -z "${DISAGMOE_LONG:-}" ] || every=40
    sed "1~${every}d" $reference >"$out/part.jsonl"
    "$disagmoe" regimes experiments/regimes.json --quiet --reuse "$out/part.jsonl" --jsonl "$out/again.jsonl" >/dev/null
    cmp "$out/again.jsonl" $reference || fail "the simulator gives other records than $reference today"
fi
exit $failed
