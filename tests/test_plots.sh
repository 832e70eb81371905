#!/bin/bash
# Each figure from a small fixture: PNG and SVG are there, are pictures of some size, and are the same bytes when drawn
# again, from JSON lines instead of CSV; wrong input ends in an error and leaves no file behind.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-/usr/bin/python3}
[ "${DISAGMOE_MODE:-plain}" = plain ] || { echo "skip: no program of the suite takes part; the plain run has it"; exit 77; }
"$python" -c 'import matplotlib' 2>/dev/null || { echo "skip: $python has no matplotlib"; exit 77; }

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=0
fail() { echo "FAIL: $*"; failed=1; }

columns=system,model,nodes,seq_len,global_batch,order.wave,order.waves_in_flight,speedup_vs_megatron,schedule_efficiency
columns+=,step_time_s,breakdown.attention_s,breakdown.ffn_s,breakdown.other_compute_s,breakdown.exposed_comm_s
columns+=,breakdown.bubble_s,breakdown.optimizer_s,swept.cluster.nodes,swept.order
# Two models, two sequence lengths, 8 and 16 nodes, both systems; the last point has no feasible plan.
make_csv() {
    echo "$columns"
    for model in deepseek-moe-16b-paper another-model; do
        for nodes in 8 16; do
            for seq_len in 4096 32768; do
                step=$((seq_len * nodes / 1024)) swept=$nodes,'"{""wave"":16,""prefer"":""wave""}"'
                echo "megatron,$model,$nodes,$seq_len,1024,,,1,0.6,$step,$((step / 4)),$((step / 4)),0,$((step / 2)),0,0,$swept"
                if [ $model$nodes$seq_len = another-model1632768 ]; then
                    echo "disagmoe,$model,$nodes,$seq_len,1024,,,,,,,,,,,,$swept"
                else
                    echo "disagmoe,$model,$nodes,$seq_len,1024,16,$((nodes / 8)),1.$nodes,0.9$nodes,$step,$((step / 4)),$((step / 4)),0,$((step / 4)),$((step / 4)),0,$swept"
                fi
            done
        done
    done
}
make_csv >"$out/records.csv"
# The same records nested, as `disagmoe sim --json` prints them.
"$python" - "$out/records.csv" >"$out/records.jsonl" <<'END'
import csv, json, sys
for row in csv.DictReader(open(sys.argv[1])):
    record = {"swept": {}, "order": {}, "breakdown": {}}
    for key, text in row.items():
        if key.startswith("swept."):
            record["swept"][key[6:]] = json.loads(text)
            continue
        value = None if text == "" else text if key in ("system", "model") else float(text)
        *parent, name = key.split(".")
        (record[parent[0]] if parent else record)[name] = value
    if record["order"]["wave"] is None:
        record["order"] = None
    print(json.dumps(record))
END
# Read back they are the same, swept objects included.
(cd plots && "$python" -B -c '
import sys
from common import read_records
lines, records = (read_records([file]) for file in sys.argv[1:])
for line, record in zip(lines, records, strict=True):
    assert {k: v for k, v in line.items() if v is not None} == {k: v for k, v in record.items() if v is not None}
assert lines[0]["swept.cluster.nodes"] == 8 and lines[0]["swept.order"] == "{\"wave\":16,\"prefer\":\"wave\"}"
' "$out/records.csv" "$out/records.jsonl") || fail "CSV and JSON lines are read as different records"
echo '{"speedup_vs_megatron": {"low": 1.2, "high": 1.5}}' >"$out/published.json"

# Lines of a training run: three runs of 40 steps, of which the first two are equal but for rounding.
for run in reference megatron disagmoe; do
    awk -v run=$run 'BEGIN {
        for (step = 0; step < 40; step++)
            printf "{\"system\":\"%s\",\"step\":%d,\"loss\":2,\"cross_entropy\":%.12g}\n", run, step,
                1 + 2 / (1 + step) + (run == "megatron") * 1e-8 + (run == "disagmoe") * step * 1e-4
        printf "{\"system\":\"%s\",\"entropy\":1,\"ranks\":8}\n", run
    }'
done >"$out/lines.jsonl"

draw() { # FIGURE OUTPUT RECORDS
    local options=()
    [ "$1" != speedup ] || options=(--published "$out/published.json")
    [ "$1" != breakdown ] || options=(--nodes 16)
    "$python" -B "plots/$1.py" "${options[@]}" "$2" "$3"
}
for figure in speedup breakdown efficiency loss; do
    records=$out/records.csv again=$out/records.jsonl
    [ $figure != loss ] || records=$out/lines.jsonl again=$out/lines.jsonl
    draw $figure "$out/$figure" "$records"
    draw $figure "$out/$figure-again" "$again"
    for kind in png svg; do
        cmp "$out/$figure.$kind" "$out/$figure-again.$kind" || fail "$figure.$kind differs when drawn again"
    done
    # A PNG says its width and height in bytes 16 to 23; a figure of one column at 300 dots an inch is 1050 wide.
    read -r width height < <("$python" -c 'import struct, sys; print(*struct.unpack(">II", open(sys.argv[1], "rb").read()[16:24]))' \
        "$out/$figure.png")
    [ "$width" = 1050 ] && [ "$height" -gt 500 ] || fail "$figure.png is $width x $height"
    [ "$(stat -c %s "$out/$figure.png")" -gt 15000 ] || fail "$figure.png is nearly empty"
    "$python" -c 'import sys, xml.dom.minidom as x; p = x.parse(sys.argv[1]).getElementsByTagName("path"); sys.exit(len(p) < 20)' \
        "$out/$figure.svg" || fail "$figure.svg has hardly anything in it"
    ! grep -q '<dc:date>' "$out/$figure.svg" || fail "$figure.svg holds a date"
done

: >"$out/empty.jsonl"
echo '{"system": "mega' >"$out/cut-off.jsonl"
! draw speedup "$out/wrong" "$out/missing.csv" 2>/dev/null || fail "speedup took a file that is missing"
! draw breakdown "$out/wrong" "$out/cut-off.jsonl" 2>/dev/null || fail "breakdown took a record that is cut off"
! draw efficiency "$out/wrong" "$out/empty.jsonl" 2>/dev/null || fail "efficiency took no records"
! "$python" -B plots/breakdown.py "$out/wrong" "$out/records.csv" 2>/dev/null || fail "breakdown mixed 8 and 16 nodes"
! draw loss "$out/wrong" "$out/records.jsonl" 2>/dev/null || fail "loss took records without steps"
[ -z "$(ls "$out" | grep -E 'wrong|tmp')" ] || fail "files were left behind: $(ls "$out")"
exit $failed
