#!/bin/bash
# Time one rank's slice of large models alone on one GPU: every collective returns at once. The tables come last.
# usage: slices_on_one_gpu.sh FOLDER [STEP ...]
# Steps: 70b 405b (default), tests qwen3-32b report (needs matplotlib). Results go to FOLDER as JSON.
# RANK, REPEATS and FLAGS (further flags of bench slice) select what runs. LIMIT is the time limit of a step in seconds;
# the finished slices of a step that exceeds it are kept. PYTHON is the Python that has the GPU's torch.
. "$(dirname "$0")/steps.sh"
steps=${*:-70b 405b}
LIMIT=${LIMIT:-255} LINES_SHOWN=${LINES_SHOWN:-0}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # where yalis is not installed

# slices STEP SHAPE TP: decode steps of 1, 16 and 64 sequences, and a prefill of 16 x 2480 tokens with decode steps after it
slices() {
  step "$1" "$python" -m yalis bench slice --model "benchmarks/shapes/$2.json" --dtype bfloat16 --device cuda --tp "$3" \
    --rank "${RANK:-0}" --batch 1,16,64 --prompt-len 128 --output-len 33 --workload 16x2480x33 \
    --max-batch-tokens 16384 --warmup 1 --repeats "${REPEATS:-2}" --out "$folder" ${FLAGS:-}
}

for name in $steps; do
  case $name in
  tests) step tests "$python" -m pytest tests/gpu/test_gpu_slice.py -p no:cacheprovider -rfEsP --durations=3 ;;
  70b) slices 70b llama-3.1-70b "${TP:-4,8,16,32}" ;;
  405b) slices 405b llama-3.1-405b "${TP:-8,16,32}" ;;
  qwen3-32b) slices qwen3-32b qwen3-32b "${TP:-1,2,4,8}" ;;
  report) step report "$python" -m yalis report "$folder" -o "$folder/report.html" ;;
  *) echo "unknown step $name" && failures=$((failures + 1)) ;;
  esac
done
for name in $steps; do [ ! -s "$folder/$name.txt" ] || cat "$folder/$name.txt"; done
exit $failures
