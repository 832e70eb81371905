#!/bin/bash
# disagmoe plan: what it prints, its files, its errors; and at a sample of points how far the program and the search are
# from the best of all layouts.
set -euo pipefail
disagmoe=${DISAGMOE:-build/disagmoe}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A model that tunes in no time on 2 nodes.
cat >"$folder/small.json" <<END
{"name": "small", "model": "$PWD/experiments/models/deepseek-moe-16b-paper.json",
 "cluster": "$PWD/experiments/clusters/h800-16x8.json", "systems": ["megatron", "disagmoe"], "seq_len": 4096,
 "global_batch": 64, "memory": {"recompute": "none", "expert_input": "keep", "grads": "bf16", "moments": "bf16",
 "zero": 1, "offload": false}, "order": {"wave": 2, "waves_in_flight": 4, "prefer": "wave", "patient": true,
 "justified": false}, "placement": "mixed-nodes", "sweep": {"cluster.nodes": [2]}}
END
plan() { "$disagmoe" plan "$folder/small.json" --quiet "$@"; }

# The relaxed form is what its inputs say: the best of all splits, by brute force.
plan --relaxed --json >"$folder/relaxed.json"
plan --json --log "$folder/log.jsonl" --lp "$folder/program.lp" --trials 20 >"$folder/plan.json"
python3 - "$folder" <<'END'
import json, math, sys
folder = sys.argv[1]
relaxed = json.load(open(folder + "/relaxed.json"))
i, milp = relaxed["inputs"], relaxed["milp"]
best = None
for m in range(1, i["gpus"]):
    for n in range(1, i["gpus"] - m + 1):
        nics = i["nics"] // 2
        t = max(i["attn_flops"] / (m * i["attn_flops_per_s"]), i["ffn_flops"] / (n * i["ffn_flops_per_s"]),
                i["bytes"] / (nics * i["nic_bytes_per_s"]))
        if best is None or (t, m + n) < best: best = (t, m + n)
assert max(milp["t_attn_s"], milp["t_ffn_s"]) == best[0] and milp["attn_gpus"] + milp["ffn_gpus"] == best[1], (milp, best)
mfu = (i["attn_flops"] + i["ffn_flops"]) / (best[0] * best[1] * i["peak_flops"])
assert math.isclose(milp["mfu"], mfu, rel_tol=1e-12)
assert relaxed["evaluations"] == 0 and relaxed["form"] == "relaxed" and relaxed["passes"] == "forward"

plan = json.load(open(folder + "/plan.json"))
for key in "system model cluster nodes seq_len swept executor cost_source seed version form passes".split(): assert key in plan, key
for key in "attn_flops ffn_flops bytes peak_flops attn_flops_per_s ffn_flops_per_s nic_bytes_per_s gpus nics".split():
    assert plan["inputs"][key] > 0, key
milp = plan["milp"]
assert milp["attn_gpus"] + milp["ffn_gpus"] <= plan["inputs"]["gpus"] and 0 < milp["mfu"] < 1
assert milp["attn_nics"] + milp["ffn_nics"] <= plan["inputs"]["nics"]
assert plan["evaluations"] == len(plan["candidates"]) <= 20
times = [c["seconds_per_sequence"] for c in plan["candidates"] if c["seconds_per_sequence"]]
assert math.isclose(min(times), plan["chosen"]["step_time_s"] / plan["chosen"]["global_batch"], rel_tol=1e-12)
assert plan["chosen"]["system"] == "disagmoe" and not plan["chosen"]["oom"]
assert set(plan["with_one_more"]) == {"attn_gpus", "ffn_gpus", "attn_nics", "ffn_nics"}
assert all(0 < x <= 1 for x in plan["with_one_more"].values())
END
head -3 "$folder/program.lp" | grep -q Minimize
[ "$(wc -l <"$folder/log.jsonl")" = $(($(python3 -c "import json; print(json.load(open('$folder/plan.json'))['evaluations'])") + 1)) ]

# Again from its log: the same, with nothing evaluated; on another number of threads too.
plan --json --log "$folder/log.jsonl" --trials 20 >"$folder/again.json"
plan --json --jobs 1 --trials 20 >"$folder/one.json"
python3 - "$folder" <<'END'
import json, sys
folder = sys.argv[1]
plan, again, one = (json.load(open(f"{folder}/{name}.json")) for name in ("plan", "again", "one"))
assert again["evaluations"] == 0 and again["chosen"] == plan["chosen"] and again["candidates"] == plan["candidates"]
for each in plan, one: each.pop("solver_s")
assert one == plan
END

# What is printed fits a terminal.
plan --trials 20 >"$folder/text"
for part in "The paper's roofline" "turning point" "layouts tried" "chosen:" "bound by" "a NIC for attention"; do
    grep -q "$part" "$folder/text" || { echo "missing: $part"; cat "$folder/text"; exit 1; }
done
[ "$(awk '{ if (length($0) > n) n = length($0) } END { print n }' "$folder/text")" -le 90 ]

# What the manifest gives is tried as well.
plan --json --trials 40 --set parallel.groups=2 --set parallel.attn_gpus=5 --set parallel.ffn_gpus=3 >"$folder/given.json"
python3 - "$folder" <<'END'
import json, sys
given = json.load(open(sys.argv[1] + "/given.json"))
assert any((c["groups"], c["attn_gpus"], c["ffn_gpus"]) == (2, 5, 3) for c in given["candidates"])
END

# refused MESSAGE OPTION...: status 2, and the message on stderr.
refused() {
    local message=$1 rc=0
    shift
    plan "$@" >"$folder/out" 2>"$folder/err" || rc=$?
    { [ $rc = 2 ] && grep -q -- "$message" "$folder/err"; } || { echo "expected: $message, got $rc:"; cat "$folder/err"; exit 1; }
}
refused "found megatron; a system that gives attention and experts GPUs of their own" --system megatron
refused "cluster: found 1 GPU" --set 'sweep.cluster.nodes=[1]' --set cluster.gpus_per_node=1 --set cluster.nics_per_node=1
refused "nics_per_node: found 0" --set cluster.nics_per_node=0
refused "parallel.ffn_gpus: found 65; at most the model's 64 experts" --set 'sweep.cluster.nodes=[16]' --set parallel.groups=1 \
    --set parallel.attn_gpus=5 --set parallel.ffn_gpus=65
refused "no allocation is possible: memory" --set "model=$PWD/experiments/models/qwen3-235b-paper.json"
refused "executor: found gpu; allowed are sim and cpu" --executor gpu
refused "the log of another search" --log "$folder/log.jsonl" --set seed=2
refused "costs.attn_fwd_s: found 0; above 0" --set 'costs={"ffn_fwd_s": 1, "attn_bwd_s": 1, "ffn_bwd_s": 1, "dispatch_s": 1, "combine_s": 1}' \
    --set parallel.groups=2 --set parallel.attn_gpus=4 --set parallel.ffn_gpus=4
refused "costs.ffn_fwd_s" --set 'costs={"ffn_fwd_s": -1}'
refused "parallel: found no whole layout" --set 'costs={"attn_fwd_s": 1, "attn_bwd_s": 2, "ffn_fwd_s": 1, "ffn_bwd_s": 2, "dispatch_s": 1, "combine_s": 1}'
refused "--log: found 2 points" --log "$folder/other" --set 'sweep.cluster.nodes=[1, 2]'
refused "another file is needed" --lp "$folder/small.json"
# What can be no file is not replaced by one.
mkfifo "$folder/pipe"
timeout 60 cat "$folder/pipe" >"$folder/piped.lp" &
plan --json --relaxed --lp "$folder/pipe" >/dev/null
wait $!
[ -p "$folder/pipe" ] || { echo "--lp replaced a pipe by a file"; exit 1; }
head -3 "$folder/piped.lp" | grep -q Minimize
refused "/dev/full: cannot be written: No space left" --relaxed --lp /dev/full
[ -c /dev/full ] || { echo "--lp replaced a device by a file"; exit 1; }

# A table of costs holds for the groups that are given: with attention three times as long, it gets three times the GPUs.
plan --json --trials 30 --set 'costs={"attn_fwd_s": 0.003, "attn_bwd_s": 0.006, "ffn_fwd_s": 0.001, "ffn_bwd_s": 0.002, "dispatch_s": 1e-4, "combine_s": 1e-4}' \
    --set parallel.groups=1 --set parallel.attn_gpus=8 --set parallel.ffn_gpus=8 >"$folder/table.json"
python3 - "$folder" <<'END'
import json, sys
table = json.load(open(sys.argv[1] + "/table.json"))
parallel = table["chosen"]["parallel"]
assert table["cost_source"] == "table" and parallel["attn_gpus"] == 3 * parallel["ffn_gpus"], parallel
END

# Measured steps choose too.
if [ "${DISAGMOE_MODE:-plain}" = plain ]; then
    "$disagmoe" plan experiments/tiny-qwen3.json --quiet --json --executor cpu --trials 2 --set parallel='{"groups": 2, "cp": 1}' \
        --set cluster.gpus_per_node=4 --set cluster.nics_per_node=4 >"$folder/cpu.json"
    python3 - "$folder" <<'END'
import json, sys
cpu = json.load(open(sys.argv[1] + "/cpu.json"))
assert cpu["executor"] == "cpu" and any(c["seconds_per_sequence"] for c in cpu["candidates"])
END
fi

# The program and the search against every layout there is: a small point here; the table's twelve points at 8 nodes, which
# take half an hour, on request.
compare() {
    "$disagmoe" plan "$@" --exhaustive --json --quiet >>"$folder/compared.jsonl"
}
compare "$folder/small.json"
compare "$folder/small.json" --set seq_len=8192 --set parallel.cp=2
if [ -n "${DISAGMOE_LONG:-}" ]; then
    for model in deepseek-moe-16b gpt-oss-120b qwen3-235b; do
        compare experiments/speedup.json --set "sweep.model=[\"models/$model-paper.json\"]" --set 'sweep.cluster.nodes=[8]'
    done
fi
python3 - "$folder" <<'END'
import json, sys
worst_search = worst_program = 0
for line in open(sys.argv[1] + "/compared.jsonl"):
    point = json.loads(line)
    ways = point["comparison"]
    best = ways["exhaustive_s_per_sequence"]
    searched, program = ways["searched_s_per_sequence"] / best, (ways["milp_s_per_sequence"] or 9e9) / best
    print(f'{point["model"]} {point["seq_len"]}: program {program:.3f}, with search {searched:.3f} '
          f'({ways["searched_evaluations"]} evaluations), even {(ways["uniform_s_per_sequence"] or 9e9) / best:.3f}, from scratch '
          f'{(ways["scratch_s_per_sequence"] or 9e9) / best:.3f} ({ways["scratch_evaluations"]}), exhaustive {ways["exhaustive_evaluations"]} of {ways["layouts"]}')
    worst_search, worst_program = max(worst_search, searched), max(worst_program, program)
    assert ways["searched_evaluations"] <= ways["layouts"] / 10
    assert searched >= 1 - 1e-9 and searched <= 1.03 # Qwen3 at 8K is 2.4 % off
END
