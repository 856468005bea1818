#!/bin/bash
# Record whole jobs on one GPU, with all that the virtual clock needs to replay them (study/replay.py).
# usage: throughput_on_one_gpu.sh FOLDER [STEP ...]
# Steps: 8b-chat 1b-chat 8b-fixed (default). Results go to FOLDER as JSON; the tables come last. Weights are random.
# LIMIT is the time limit of a step in seconds. PYTHON is the Python that has the GPU's torch.
. "$(dirname "$0")/steps.sh"
steps=${*:-8b-chat 1b-chat 8b-fixed}
LIMIT=${LIMIT:-100} LINES_SHOWN=${LINES_SHOWN:-0}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # where yalis is not installed

# job STEP SHAPE WORKLOAD: at most 256 sequences and 16,384 tokens a step, greedy
job() {
  step "$1" "$python" -m yalis bench throughput --model "benchmarks/shapes/$2.json" --load random --dtype bfloat16 \
    --device cuda --workload "$3" --max-num-seqs 256 --max-batch-tokens 16384 --max-model-len 4096 --no-prefix-reuse \
    --warmup "${WARMUP:-1}" --repeats "${REPEATS:-1}" --out "$folder" ${FLAGS:-}
}

for name in $steps; do
  case $name in
  8b-chat) job 8b-chat llama-3.1-8b chat ;;
  1b-chat) job 1b-chat llama-3.2-1b chat:400 ;;
  8b-fixed) job 8b-fixed llama-3.1-8b 64x512x128 ;;
  *) echo "unknown step $name" && failures=$((failures + 1)) ;;
  esac
done
for name in $steps; do [ ! -s "$folder/$name.txt" ] || cat "$folder/$name.txt"; done
exit $failures
