#!/usr/bin/env bash
# What needs a GPU and has not been measured: tests and benchmarks, in the order of importance, in at most 25 minutes.
#
#     benchmarks/gpu.sh FOLDER [PART ...]      # also: make gpu OUT=FOLDER
#
# Each part writes FOLDER/PART.txt while it runs and has a time limit of its own. When the same folder is given again, parts that
# have finished are not repeated. Without a GPU, the parts that need one are skipped. Nothing is installed. Variables: PYTHON names the
# interpreter, TOTAL_S limits the time of all parts (1500), MB are the sizes for `reduction.py` with Gloo.
set -u
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 1
cd "$(dirname "$0")/.." || exit 1
shift
wanted=" $* "
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$(mktemp -d)}
ends=$((SECONDS + ${TOTAL_S:-1500}))
has_gpu=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))') || exit 1
ranks=$(for each in 2 3 4 6 8; do [ "$each" -le "$(nproc)" ] && printf '%s,' "$each"; done)
failed=0

# part NAME LIMIT_S gpu|cpu COMMAND...
part() {
    local name=$1 limit=$2 needs=$3 file="$out/$1.txt" left=$((ends - SECONDS)) began=$SECONDS status
    shift 3
    [ "$wanted" = "  " ] || [ "${wanted/ $name /}" != "$wanted" ] || return 0
    printf '\n=== %s: %s\n' "$name" "$*"
    if grep -qs "^=== finished" "$file"; then echo "finished before: $file"; return 0; fi
    if [ "$needs" = gpu ] && [ "$has_gpu" = 0 ]; then echo "skipped: needs a GPU"; return 0; fi
    if [ "$left" -lt 20 ]; then echo "skipped: no time left"; failed=1; return 0; fi
    timeout -k 20 "$((limit < left ? limit : left))" "$@" 2>&1 | tee "$file"
    status=${PIPESTATUS[0]}
    if [ "$status" = 0 ]; then
        echo "=== finished after $((SECONDS - began)) s" | tee -a "$file"
    else
        echo "=== ended with exit code $status after $((SECONDS - began)) s (124 and 137: at its limit)" | tee -a "$file"
        failed=1
    fi
}

# A compiled run with an empty cache, and once more with the cache of the first.
compile_twice() {
    local folder; folder=$(mktemp -d)
    for _ in 1 2; do
        TORCHINDUCTOR_CACHE_DIR=$folder "$python" benchmarks/large_models.py --models gpt2 --feeds memory --steps 20 --repeats 1 \
            --only paceline-compile || return 1
    done
}
export -f compile_twice
export python

tests=("$python" -m pytest -q -ra -p no:benchmark) # pytest-benchmark, where it is installed, warns about -n
xdist=$("$python" -c 'import xdist' 2>/dev/null && echo yes)

part tests 360 gpu "${tests[@]}" ${xdist:+-n 8} tests/gpu --ignore tests/gpu/test_nccl_matrix.py
part nccl-matrix 600 gpu "${tests[@]}" tests/gpu/test_nccl_matrix.py # one after the other: ranks that share a GPU take turns
part large-models 400 gpu "$python" benchmarks/large_models.py --feeds memory --steps 30 --limit-s 390
part reduction-nccl 130 gpu "$python" benchmarks/reduction.py --one-gpu --procs 2,4,8,3 --mb 25,100
part reduction-gloo 150 cpu "$python" benchmarks/reduction.py --procs "${ranks%,}" --mb "${MB:-1,25,100}"
part own-loop 100 gpu "$python" benchmarks/own_loop.py --windows 16 --rounds 2
part sum-accuracy 60 gpu "$python" benchmarks/sum_accuracy.py --model gpt2 --precision fp32 --device cuda
part compile-twice 120 gpu bash -c compile_twice
part large-models-loader 180 gpu "$python" benchmarks/large_models.py --feeds loader --steps 30 --repeats 1 --limit-s 170
exit "$failed"
