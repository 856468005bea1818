#!/bin/bash
# Record whole jobs on one GPU, with all that the virtual clock needs to replay them (study/replay.py).
# usage: throughput_on_one_gpu.sh FOLDER [STEP ...]
# Steps: 8b-chat 8b-sampled 1b-chat 8b-fixed (default); 8b-top-k 1b-sampled; sampling: the kernels alone;
# 1b-blind 4b-blind 32b-blind: latencies of shapes and batches that the compute model was not fitted to. Results go to
# FOLDER as JSON; the tables come last. Weights are random.
# LIMIT is the time limit of a step in seconds. PYTHON is the Python that has the GPU's torch.
. "$(dirname "$0")/steps.sh"
steps=${*:-8b-chat 8b-sampled 1b-chat 8b-fixed}
LIMIT=${LIMIT:-100} LINES_SHOWN=${LINES_SHOWN:-0}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # where yalis is not installed

# job STEP SHAPE WORKLOAD [FLAG ...]: at most 256 sequences and 16,384 tokens a step, greedy without sampling flags
job() {
  local name=$1 shape=$2 workload=$3
  shift 3
  step "$name" "$python" -m yalis bench throughput --model "benchmarks/shapes/$shape.json" --load random \
    --dtype bfloat16 --device cuda --workload "$workload" "$@" --max-num-seqs 256 \
    --max-batch-tokens 16384 --max-model-len 4096 --no-prefix-reuse \
    --warmup "${WARMUP:-1}" --repeats "${REPEATS:-1}" --out "$folder" ${FLAGS:-}
}

# latency STEP SHAPE WORKLOAD ...
latency() {
  local name=$1 shape=$2 workloads=()
  shift 2
  for one in "$@"; do workloads+=(--workload "$one"); done
  step "$name" "$python" -m yalis bench latency --model "benchmarks/shapes/$shape.json" --load random --dtype bfloat16 \
    --device cuda "${workloads[@]}" --max-batch-tokens 16384 --no-prefix-reuse --warmup 1 --repeats 2 --out "$folder"
}

for name in $steps; do
  case $name in
  8b-chat) job 8b-chat llama-3.1-8b chat ;;
  # The sampled job must be at most 5% slower than 8b-chat in the same run.
  8b-sampled) job 8b-sampled llama-3.1-8b chat --temperature 0.8 --top-p 0.95 ;;
  8b-top-k) job 8b-top-k llama-3.1-8b chat --temperature 0.6 --top-k 20 --top-p 0.95 ;;
  1b-sampled) job 1b-sampled llama-3.2-1b chat:400 --temperature 0.8 --top-p 0.95 ;;
  1b-chat) job 1b-chat llama-3.2-1b chat:400 ;;
  8b-fixed) job 8b-fixed llama-3.1-8b 64x512x128 ;;
  sampling) step sampling "$python" benchmarks/sampling.py --out "$folder/sampling.json" ;;
  1b-blind) latency 1b-blind llama-3.2-1b 64x512x33 256x128x33 1x4096x33 16x2480x33 ;;
  4b-blind) latency 4b-blind qwen3-4b 64x512x33 256x128x33 1x4096x33 16x2480x33 ;;
  32b-blind) latency 32b-blind qwen2.5-32b 64x512x33 16x2480x33 1x4096x33 ;;
  *) echo "unknown step $name" && failures=$((failures + 1)) ;;
  esac
done
for name in $steps; do [ ! -s "$folder/$name.txt" ] || cat "$folder/$name.txt"; done
exit $failures
