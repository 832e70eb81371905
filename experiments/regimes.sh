#!/bin/bash
# experiments/regimes.sh [OPTIONS of disagmoe regimes]   under which of the choices that the paper leaves open its range of
# speedups holds: records, report and figure, into results/. `make regimes` calls it behind set-up and build.
#
# Everything is made in a folder of its own and moved into place at the end. A run that is ended early leaves its records there;
# the next one of the same program, experiments and options goes on from them.
#   REGIMES_DEFINITION   the factors; default: experiments/regimes.json
#   RESULTS              the folder for the results; default: results
# A part of it, to try: experiments/regimes.sh --set 'sweep.model=["models/qwen3-235b-paper.json"]' --set 'sweep.seq_len=[4096]'
set -euo pipefail
export LC_ALL=C.UTF-8
cd "$(dirname "${BASH_SOURCE[0]}")/.."

disagmoe=${DISAGMOE:-build/disagmoe}
python=${PYTHON:-/usr/bin/python3}
definition=${REGIMES_DEFINITION:-experiments/regimes.json}
results=${RESULTS:-results}
[ -x "$disagmoe" ] || { echo "regimes: $disagmoe is missing; 'make' builds it" >&2; exit 2; }
"$python" -c 'import matplotlib' 2>/dev/null || { echo "regimes: $python has no matplotlib; 'make setup' installs it" >&2; exit 2; }

folder=$(dirname "$definition")
of=$({ sha256sum "$disagmoe" "$definition" "$folder"/*.json "$folder"/{models,clusters}/*.json 2>/dev/null || true
       printf '%s\n' "$@"; } | sha256sum | cut -c 1-12)
new=$results/.regimes-$of
mkdir -p "$new"
# Whole lines of all unfinished runs.
for part in "$new"/regimes.jsonl* "$new"/known; do
    [ ! -f "$part" ] || while IFS= read -r line; do printf '%s\n' "$line"; done <"$part"
done >"$new/known.new"
mv "$new/known.new" "$new/known"
rm -f "$new"/regimes.jsonl*
[ ! -s "$new/known" ] || echo "regimes: going on from $(wc -l <"$new/known") records of a run that was ended early" >&2

"$disagmoe" regimes "$definition" "$@" --reuse "$new/known" --jsonl "$new/regimes.jsonl" --csv "$new/regimes.csv" >"$new/regimes.txt"
"$python" -B plots/regimes.py --published "$folder/published.json" "$new/regimes" "$new/regimes.csv"

rm "$new/known"
mv -f "$new"/* "$results/"
rmdir "$new"
cat "$results/regimes.txt"
cat <<END

Written to $(realpath "$results"):
  regimes.txt           the report above
  regimes.jsonl         the records, each system's once for each set of choices
  regimes.csv           the speedups: a row for each variant, model and sequence length
  regimes (.png, .svg)  the figure
END
