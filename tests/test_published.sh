#!/bin/bash
# The paper's results (experiments/published.json) are for the report alone: with other figures, or without the file, the
# records are the same bytes, and no code but the report's names it.
set -euo pipefail
disagmoe=${DISAGMOE:-build/disagmoe}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r experiments "$folder/"
simulate() {
    "$disagmoe" sim "$1/speedup.json" --json --quiet --set model=models/deepseek-moe-16b-paper.json --set model.layers=4 \
        --set cluster.nodes=2 --set seq_len=4096 --set global_batch=64
}
simulate experiments >"$folder/as-published.jsonl"
[ "$(wc -l <"$folder/as-published.jsonl")" = 2 ]
sed -i 's/[0-9]\.[0-9]*/9.5/g' "$folder/experiments/published.json"
simulate "$folder/experiments" | cmp - "$folder/as-published.jsonl"
rm "$folder/experiments/published.json"
simulate "$folder/experiments" | cmp - "$folder/as-published.jsonl"

readers=$(grep -rl published core baselines --include='*.[ch]' | sort | tr '\n' ' ')
if [ "$readers" != "core/cli/cli.h core/cli/regimes.c core/cli/report.c core/cli/sim.c " ]; then
    echo "published.json is named in: $readers"
    exit 1
fi
