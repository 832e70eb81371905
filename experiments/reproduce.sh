#!/bin/bash
# The speedup table, the efficiency table and their figures, into results/. `make reproduce` calls it behind set-up and
# build. Everything is made in a folder of its own and moved into place at the end: a run that fails changes nothing.
set -euo pipefail
export LC_ALL=C.UTF-8
cd "$(dirname "${BASH_SOURCE[0]}")/.."

disagmoe=${DISAGMOE:-build/disagmoe}
python=${PYTHON:-/usr/bin/python3}
[ -x "$disagmoe" ] || { echo "reproduce: $disagmoe is missing; 'make' builds it" >&2; exit 2; }
"$python" -c 'import matplotlib' 2>/dev/null || { echo "reproduce: $python has no matplotlib; 'make setup' installs it" >&2; exit 2; }

mkdir -p results
new=$(mktemp -d results/.reproduce.XXXXXX)
trap 'rm -rf "$new"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# From the efficiency records of one sequence length: for each number of micro-batches in flight its best order.
best_orders() {
    awk -F, '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        {
            wave = $at["order.wave"]; waves = $at["order.waves_in_flight"]; flying = wave * waves
            efficiency = $at["schedule_efficiency"]; seq_len = $at["seq_len"]
            if (!(flying in best)) { best[flying] = -1; number[++count] = flying }
            if (efficiency > best[flying]) { best[flying] = efficiency; order[flying] = waves "x" wave " " $at["order.prefer"] }
        }
        END {
            for (i = 1; i <= count; i++)
                printf "%3dK  %9d  %10.3f  %s\n", seq_len / 1024, number[i], best[number[i]], order[number[i]]
        }' "$1"
}

"$disagmoe" sim experiments/speedup.json --csv "$new/speedup.csv" --jsonl "$new/speedup.jsonl" --explain >"$new/speedup.txt"
sed '/^Factors of the step time/,$d' "$new/speedup.txt"

efficiency=()
for seq in 4k 16k 32k; do
    "$disagmoe" sim "experiments/efficiency-$seq.json" --csv "$new/efficiency-$seq.csv" --quiet >/dev/null
    efficiency+=("$new/efficiency-$seq.csv")
done
{
    echo "Schedule efficiency of DisagMoE with section 3's ratios as costs (32 layers, 4 groups, 64 micro-batches)"
    echo "seq   in flight  efficiency  best order: waves x micro-batches, who goes first"
    for file in "${efficiency[@]}"; do best_orders "$file"; done
} >"$new/efficiency.txt"
cat "$new/efficiency.txt"

"$python" -B plots/speedup.py --published experiments/published.json "$new/speedup" "$new/speedup.csv"
"$python" -B plots/breakdown.py --nodes 16 "$new/breakdown" "$new/speedup.csv"
"$python" -B plots/efficiency.py "$new/efficiency" "${efficiency[@]}"

mv -f "$new"/* results/
cat <<END

Written to $PWD/results:
  speedup.txt             the table above, and the factors that explain each speedup
  speedup.csv, .jsonl     its 48 records
  efficiency.txt          the efficiency table; efficiency-{4k,16k,32k}.csv: its records
  speedup, breakdown, efficiency (.png, .svg)   the figures
END
