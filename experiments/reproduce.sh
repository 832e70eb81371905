#!/bin/bash
# The speedup table, the efficiency table, real training of tiny models by both systems, and the figures, into results/. `make reproduce` calls it behind set-up and
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

# From a training run's lines, one a step: system, step, loss, cross-entropy; and one a run: system, tokens/s, ranks.
steps_of() {
    sed -nE 's/.*"system":"([a-z]+)".*"step":([0-9]+),"loss":([^,]+),"cross_entropy":([^,]+),.*/\1 \2 \3 \4/p' "$1"
}
runs_of() {
    sed -nE '/"step":/d; s/.*"system":"([a-z]+)".*"tokens_per_s":([^,]+),.*"ranks":([0-9]+),.*/\1 \2 \3/p' "$1"
}
# A row a step, a column a run; below, each run's speed.
loss_columns() { # MODEL LINES
    awk -v model="$1" '
        FNR == NR { loss[$2, $1] = $3; last = $2; next }
        { name[++runs] = $1; speed[runs] = $2; ranks[runs] = $3 }
        END {
            printf "%-14s", model; for (i = 1; i <= runs; i++) printf " %14s", name[i]; print ""
            for (step = 0; step <= last; step++) {
                printf "step %-9d", step; for (i = 1; i <= runs; i++) printf " %14.8f", loss[step, name[i]]; print ""
            }
            printf "%-14s", "tokens/s"; for (i = 1; i <= runs; i++) printf " %14.0f", speed[i]; print ""
            printf "%-14s", "ranks"; for (i = 1; i <= runs; i++) printf " %14d", ranks[i]; print "\n"
        }' <(steps_of "$2") <(runs_of "$2")
}
last_losses() { # LINES
    steps_of "$1" | awk '
        !($1 in steps) { name[++runs] = $1 }
        { entropy[$1, ++steps[$1]] = $4 }
        END {
            for (i = 1; i <= runs; i++) {
                run = name[i]; sum = 0
                for (k = steps[run] - 49; k <= steps[run]; k++) sum += entropy[run, k] / 50
                printf "%-10s mean cross-entropy of the last 50 of %d steps: %.4f\n", run, steps[run], sum
            }
        }'
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

echo
{
    echo "Real training on 8 ranks that share this machine's $(nproc) cores (executor cpu, fp32), beside a single process:"
    echo "the loss of each step. Speeds are of these few cores and say nothing of a cluster."
    echo
    for model in qwen3 gptoss deepseek; do
        "$disagmoe" train experiments/tiny-$model.json --reference --steps 5 --jsonl "$new/tiny-$model.jsonl" >/dev/null
        loss_columns tiny-$model "$new/tiny-$model.jsonl"
    done
    "$disagmoe" train experiments/markov.json --reference --jsonl "$new/markov.jsonl" >"$new/markov.txt"
    echo "experiments/markov.json:"
    grep -m 1 '^entropy' "$new/markov.txt"
    last_losses "$new/markov.jsonl"
} >"$new/training.txt"
cat "$new/training.txt"

"$python" -B plots/speedup.py --published experiments/published.json "$new/speedup" "$new/speedup.csv"
"$python" -B plots/breakdown.py --nodes 16 "$new/breakdown" "$new/speedup.csv"
"$python" -B plots/efficiency.py "$new/efficiency" "${efficiency[@]}"
"$python" -B plots/loss.py "$new/loss" "$new/markov.jsonl"

mv -f "$new"/* results/
cat <<END

Written to $PWD/results:
  speedup.txt             the table above, and the factors that explain each speedup
  speedup.csv, .jsonl     its 48 records
  efficiency.txt          the efficiency table; efficiency-{4k,16k,32k}.csv: its records
  training.txt            losses of the tiny models; tiny-{qwen3,gptoss,deepseek}.jsonl: their steps
  markov.txt, .jsonl      300 steps on data of known entropy
  speedup, breakdown, efficiency, loss (.png, .svg)   the figures
END
