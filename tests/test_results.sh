#!/bin/bash
# The committed reference results are what the simulator gives today, byte for byte: all of them with DISAGMOE_LONG,
# otherwise the points that are quick. Every figure that moved is named. A figure that moves on purpose is committed
# anew: build/disagmoe sim experiments/speedup.json --json > results/reference/speedup.jsonl
set -euo pipefail
if [ "${DISAGMOE_MODE:-plain}" != plain ]; then
    echo "skip: the plain run compares the results; this one would take minutes"
    exit 77
fi
new=$(mktemp)
trap 'rm -f "$new"' EXIT
simulate() { "${DISAGMOE:-build/disagmoe}" sim experiments/speedup.json --json --quiet "$@" >>"$new"; }
if [ -n "${DISAGMOE_LONG:-}" ]; then
    simulate
    cmp "$new" results/reference/speedup.jsonl && exit 0
else
    simulate --set 'sweep.model=["models/deepseek-moe-16b-paper.json"]' --set 'sweep.cluster.nodes=[8]'
    simulate --set 'sweep.model=["models/qwen3-235b-paper.json"]' --set 'sweep.cluster.nodes=[16]' --system megatron
fi
/usr/bin/python3 -B tests/compare_records.py results/reference/speedup.jsonl "$new"
