#!/bin/bash
# tests/run.sh MODE:TEST...   runs test programs (cmocka) and scripts, as many at a time as there are cores.
#
# MODE is plain, sanitize, threads or valgrind. A test sees DISAGMOE (the binary of its build), DISAGMOE_MODE, and where it is slow
# DISAGMOE_SAMPLE, by which property tests divide their number of cases. Before skip() a cmocka test prints
# "skip: REASON" on a line; a script that skips exits 77 with the reason on its last line. The name of a test that starts
# Open MPI contains mpi or train.
set -u
cd "$(dirname "$0")/.." || exit 1

limit=600
[ -z "${DISAGMOE_LONG:-}" ] || limit=3600
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
trap 'kill $(cat "$out"/*.pid) 2>/dev/null; wait; exit 130' INT TERM
# One thread each: the tests themselves run side by side.
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp:exitcode=66:history_size=7 LSAN_OPTIONS=suppressions=tests/lsan.supp:print_suppressions=0

count() { # of tests that cmocka sums up as $2 in the output $1
    sed -n "s/.*\[  $2 *\] \([0-9]*\) test(s).*/\1/p" "$1" | awk '{n += $1} END {print n + 0}'
}

# Leaves its counts in $out/$1.counts, and the reason of a failure that is no failed test in $out/$1.why.
run_one() {
    local id=$1 mode=${2%%:*} test=${2#*:} log=$out/$1.log rc=0 passed=0 failed=0 skipped=0 why='' build=build command
    [ "$mode" = plain ] || build=build/$mode
    export DISAGMOE_MODE=$mode DISAGMOE=$PWD/$build/disagmoe
    command=("$test")
    [[ $test != *.sh ]] || command=(bash "$test")
    # Open MPI's own leaks are known by who called malloc far up, which only slow unwinding finds.
    [[ $test != *mpi* && $test != *train* ]] || export ASAN_OPTIONS=fast_unwind_on_malloc=0
    [[ $mode != sanitize && $mode != threads ]] || export DISAGMOE_SAMPLE=${DISAGMOE_SAMPLE:-5}
    if [ "$mode" = valgrind ]; then
        export DISAGMOE_SAMPLE=${DISAGMOE_SAMPLE:-20}
        command=(valgrind --quiet --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite
                 --show-leak-kinds=definite --num-callers=40 --suppressions=tests/valgrind.supp "${command[@]}")
    fi

    local start=$EPOCHREALTIME
    timeout -k 10 $limit "${command[@]}" </dev/null >"$log" 2>&1 &
    echo $! >"$out/$id.pid"
    wait $! 2>/dev/null || rc=$?
    rm "$out/$id.pid"
    local seconds=$(awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $start}")

    if [[ $test = *.sh ]]; then
        case $rc in
            0) passed=1 ;;
            77) skipped=1; echo "$test ($mode): $(tail -n 1 "$log")" >"$out/$id.skips" ;;
            *) failed=1 why="exit status $rc" ;;
        esac
    else
        passed=$(count "$log" PASSED) failed=$(count "$log" FAILED) skipped=$(count "$log" SKIPPED)
        # The summary names the tests skipped; their reasons came before, each just ahead of its own mark.
        awk -v where="$test ($mode)" '
            /^skip: /                     { reason = substr($0, 7) }
            /\[ RUN      \]/              { reason = "no reason given" }
            /\[  SKIPPED \] [A-Za-z_]/    { if (!($NF in seen)) print where ": " $NF ": " reason; seen[$NF] = 1 }
        ' "$log" >"$out/$id.skips"
        if [ $rc != 0 ] && [ "$failed" = 0 ]; then
            failed=1 why="exit status $rc"
        elif [ $((passed + failed + skipped)) = 0 ]; then
            failed=1 why="it reported no test"
        fi
    fi
    case $rc in
        99) [ "$mode" != valgrind ] || why="valgrind found errors" ;;
        124) why="stopped after $limit s" ;;
        126 | 127) why="exit status $rc: a program is missing" ;;
        1[3-6][0-9]) why="killed by SIG$(kill -l $((rc - 128)))" ;;
    esac
    echo "$passed $failed $skipped" >"$out/$id.counts"
    [ "$failed" = 0 ] || echo "${why:-failed tests}" >"$out/$id.why"
    printf '%-4s %6s s  %-8s %-44s %s passed, %s failed, %s skipped%s\n' "$([ "$failed" = 0 ] && echo ok || echo FAIL)" \
        "$seconds" "$mode" "$test" "$passed" "$failed" "$skipped" "${why:+: $why}"
}

id=0 jobs=$(nproc)
for run; do
    [ "$(jobs -rp | wc -l)" -lt "$jobs" ] || wait -n
    : $((++id)) # here, not on the next line, whose $id is a subshell's
    run_one $id "$run" &
done
wait

id=0 passed=0 failed=0 skipped=0 skips=''
for run; do
    : $((++id))
    # A run that left no counts did not come to its end.
    read -r p f s 2>/dev/null <"$out/$id.counts" || { p=0 f=1 s=0; echo "no result" >"$out/$id.why"; }
    : $((passed += p)) $((failed += f)) $((skipped += s))
    if [ -e "$out/$id.why" ]; then
        printf '\n---- %s: %s\n' "$run" "$(cat "$out/$id.why")"
        cat "$out/$id.log" 2>/dev/null
    fi
    [ ! -s "$out/$id.skips" ] || skips+=$(cat "$out/$id.skips")$'\n'
done
[ -z "$skips" ] || printf '\nSkipped:\n%s' "$skips"
[ $# -gt 0 ] || { echo "There is no test to run."; failed=1; }
echo
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
