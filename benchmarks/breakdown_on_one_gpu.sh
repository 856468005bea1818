#!/bin/bash
# Break down the time of prefill and decode, for one rank and for ranks that share one GPU.
# usage: breakdown_on_one_gpu.sh FOLDER [STEP ...]
# Steps: tests tp1 tp2 tp4 report (default: all; report needs matplotlib). Results go to FOLDER as JSON.
# SHAPE, WORK and ALLREDUCE (one or more, such as "nvrar torch") select what runs. LIMIT is the time limit of a step in
# seconds. PYTHON is the Python that has the GPU's torch. CUDA MPS is started for ranks that share, and stopped.
. "$(dirname "$0")/steps.sh"
steps=${*:-tests tp1 tp2 tp4 report}
LIMIT=${LIMIT:-200} LINES_SHOWN=${LINES_SHOWN:-45}

# profile NAME FLAG ...
profile() {
  local name=$1
  shift
  step "$name" "$python" -m yalis profile --model "benchmarks/shapes/${SHAPE:-llama-3.1-8b}.json" --load random --dtype bfloat16 \
    --device cuda --workload "${WORK:-16x512x128}" --max-batch-tokens 40960 --max-num-seqs 16 --max-model-len 4608 --out "$folder" "$@"
}

start_mps() {
  [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && return
  export CUDA_MPS_PIPE_DIRECTORY=$folder/mps CUDA_MPS_LOG_DIRECTORY=$folder/mps YALIS_NVRAR_TIMEOUT=60
  mkdir -p "$folder/mps"
  nvidia-cuda-mps-control -d || exit 1
  trap 'echo quit -t 1 | nvidia-cuda-mps-control' EXIT
}

for name in $steps; do
  case $name in
  tests) step tests "$python" -m pytest tests/gpu/test_gpu_profile.py -p no:cacheprovider -rfEsP --durations=3 ;;
  tp1) profile tp1 ;;
  tp2 | tp4)
    start_mps
    for backend in ${ALLREDUCE:-nvrar torch}; do
      profile "$name-$backend" --tp "${name#tp}" --ranks-per-gpu 4 --allreduce "$backend"
    done
    ;;
  report) step report "$python" -m yalis report "$folder" -o "$folder/report.html" ;;
  *) echo "unknown step $name" && failures=$((failures + 1)) ;;
  esac
done
exit $failures
