#!/bin/bash
# Who may see whom: a folder uses those below it, through their front doors alone (core/plan by plan/plan.h), and no
# files call each other in a circle.
set -euo pipefail
disagmoe=${DISAGMOE:-build/disagmoe}
build=$(dirname "$disagmoe")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A folder, and the folders it may use. A baseline never sees an executor (sim, train).
cat >"$folder/arrows" <<'END'
base
model     base
cluster   base
schedule  base
plan      schedule model cluster base
disagmoe  plan schedule model cluster base
allocate  plan schedule model cluster base
baselines disagmoe plan schedule model cluster base
layers    model base
state     layers plan schedule model cluster base
train     state layers plan schedule model cluster base
profile   state layers plan schedule model cluster base
sim       plan schedule model cluster base
cli       profile train state layers sim allocate baselines disagmoe plan schedule model cluster base
END

# "FILE HEADER" for each header of ours that a file includes; "CALLER DEFINER" for each that uses what another defines.
grep -H '^#include "' core/*/*.[ch] baselines/*.[ch] | sed 's/:#include "/ /; s/"$//' >"$folder/includes"
for source in core/*/*.c baselines/*.c; do
    nm -g "$build/${source%.c}.o" | awk -v source="$source" '{ print source, $(NF - 1), $NF }'
done >"$folder/symbols"
awk '$2 != "U" { definer[$3] = $1 } $2 == "U" { used[$1 " " $3] }
     END { for (use in used) { split(use, of, " "); if (of[2] in definer) print of[1], definer[of[2]] } }' \
    "$folder/symbols" | sort -u >"$folder/calls"
[ "$(wc -l <"$folder/calls")" -gt 100 ] || { echo "no calls found in $build"; exit 1; }

sed 's/core\///g' "$folder/includes" "$folder/calls" | awk '
    NR == FNR { known[$1]; for (i = 2; i <= NF; i++) allowed[$1 " " $i]; next }
    {
        split($1, from, "/"); split($2, to, "/")
        if (!(from[1] in known)) print "no arrows are given for " from[1]
        if (from[1] == to[1]) next
        if (!((from[1] " " to[1]) in allowed)) print $1 " uses " $2
        if ($2 ~ /\.h$/ && to[2] != to[1] ".h") print $1 " includes " $2 ", which is not a front door"
    }' "$folder/arrows" - | sort -u | tee "$folder/wrong"
[ ! -s "$folder/wrong" ]

tsort "$folder/calls" >/dev/null
# Inside of the executor also by what each file includes.
sed -n 's/^core\/\(train\/[a-z_]*\)\.[ch] \(train\/[a-z_]*\)\.h$/\1 \2/p' "$folder/includes" | tsort >/dev/null
