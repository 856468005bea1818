#!/bin/bash
# Compare two checkouts on one GPU: usage: compare_trees.sh FOLDER TREE_A TREE_B [TURNS]
# Each turn measures the latency table and the start-up of both checkouts, in the order A B, then B A, and so on, so that
# a drifting clock affects both alike. Results go to FOLDER/a-N and FOLDER/b-N; the table of medians and ratios comes last.
# PYTHON is the Python that has the GPU's torch. LIMIT is the time limit of one measurement in seconds.
. "$(dirname "$0")/steps.sh"
[ $# -ge 2 ] || { echo "usage: $0 FOLDER TREE_A TREE_B [TURNS]" >&2 && exit 2; }
LIMIT=${LIMIT:-200} LINES_SHOWN=0
a=$(cd "$1" && pwd) b=$(cd "$2" && pwd) turns=${3:-2}
repository=$PWD

# measure LABEL TREE TURN
measure() {
  cd "$2" || exit 1
  export PYTHONPATH=$2 YALIS_CACHE=$folder/cache-$1
  step "$1-$3-start" "$python" -c "
import time
begin = time.time()
from yalis import LLM, SamplingParams
with LLM('benchmarks/shapes/llama-3.1-8b.json', load='random', dtype='bfloat16') as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
    print(time.time() - begin)"
  step "$1-$3" "$python" -m yalis bench latency --model benchmarks/shapes/llama-3.1-8b.json --load random \
    --dtype bfloat16 --max-batch-tokens 40960 --no-prefix-reuse --warmup 1 --repeats 1 --out "$folder/$1-$3" \
    --workload 1x128x257 --workload 16x128x257 --workload 64x512x257 --workload 16x2480x257
  cd "$repository" || exit 1
}

for turn in $(seq "$turns"); do
  if [ $((turn % 2)) = 1 ]; then order="a b"; else order="b a"; fi
  for label in $order; do
    if [ "$label" = a ]; then measure a "$a" "$turn"; else measure b "$b" "$turn"; fi
  done
done
"$python" benchmarks/compare_trees.py "$folder"
exit $((failures + $?))
