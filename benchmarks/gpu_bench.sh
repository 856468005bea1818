#!/bin/bash
# Benchmark one GPU with the shape of Llama-3.1-8B (random weights) and others. usage: gpu_bench.sh FOLDER [STEP ...]
# Steps: table job startup profile (default), shapes batches contexts plots eager compile kernels attention tests.
# The output of a step goes to FOLDER/STEP.txt and its results to FOLDER/STEP as JSON. The table of targets comes last.
# BESIDE="vllm transformers" also measures these engines in the steps table and job.
# LIMIT is the time limit of a step in seconds; WARMUP and REPEATS are runs of a workload. PYTHON is the Python that has
# the GPU's torch. The step startup clears the compile cache FOLDER/cache; set YALIS_CACHE to it to reuse it later.
. "$(dirname "$0")/steps.sh"
steps=${*:-table job startup profile}
LIMIT=${LIMIT:-280} LINES_SHOWN=${LINES_SHOWN:-40}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # where yalis is not installed
shapes=${SHAPES:-benchmarks/shapes}
beside=()
for peer in ${BESIDE:-}; do beside+=(--peer "$peer"); done

# latency STEP SHAPE FLAG ...: prefill all prompts in one step, as the other engines do
latency() {
  local name=$1 shape=$2
  shift 2
  step "$name" "$python" -m yalis bench latency --model "$shapes/$shape.json" --load random --dtype bfloat16 \
    --max-batch-tokens 40960 --no-prefix-reuse --warmup "${WARMUP:-1}" --repeats "${REPEATS:-2}" --out "$folder/$name" "$@"
}

# workloads OUTPUT BATCHxPROMPT ...
workloads() {
  local output=$1
  shift
  for shape in "$@"; do printf -- '--workload %sx%s ' "$shape" "$output"; done
}

# Time from the start of the process to its first token, in seconds.
startup() {
  unset TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR # these may be warm
  YALIS_CACHE=$folder/cache "$python" - "$(date +%s.%N)" "$shapes" <<'P'
import sys, time
from yalis import LLM, SamplingParams
from yalis.study.bandwidth import describe_device

with LLM(f"{sys.argv[2]}/llama-3.1-8b.json", load="random", dtype="bfloat16") as llm:
    ready = time.time() - float(sys.argv[1])
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
    first = time.time() - float(sys.argv[1])
    print(f"{describe_device(llm.device)['name']}: ready after {ready:.1f} s, first token after {first:.1f} s")
P
}
export -f startup
export folder python shapes

for name in $steps; do
  case $name in
  table)
    latency table llama-3.1-8b $(workloads 257 1x128 16x128 64x512) $(workloads 513 16x2480) "${beside[@]}"
    ;;
  job) WARMUP=0 REPEATS=1 latency job llama-3.1-8b --workload 16x2480x33 --workload poster "${beside[@]}" ;; # the first workload is the warm-up
  startup)
    rm -rf "$folder/cache"
    step startup-cold bash -c startup
    step startup-warm bash -c startup
    ;;
  profile) LINES_SHOWN=80 step profile "$python" benchmarks/profile_step.py --batch 1,16,64,96,128,256 --model "$shapes/llama-3.1-8b.json" --json "$folder/profile.json" ;;
  shapes)
    for shape in llama-3.2-1b qwen3-4b qwen2.5-32b; do latency "shapes-$shape" $shape $(workloads 129 1x128 16x128); done
    ;;
  batches)
    latency batches llama-3.1-8b --max-num-seqs 256 \
      $(workloads 33 1x128 2x128 4x128 8x128 16x128 32x128 64x128 96x128 128x128 160x128 192x128 256x128)
    ;;
  contexts)
    WARMUP=0 latency contexts llama-3.1-8b --max-num-seqs 16 \
      $(workloads 33 1x1024 1x4096 1x16384 1x32768 1x65536 16x1024 16x2048 16x4096 16x8192 16x16384)
    ;;
  plots) step plots "$python" benchmarks/plot_growth.py "$folder" ;;
  eager) latency eager llama-3.1-8b --eager $(workloads 65 1x128 16x128) ;;
  compile) latency compile llama-3.1-8b --compile $(workloads 65 1x128 16x128 16x2480) ;;
  kernels) LINES_SHOWN=80 step kernels "$python" -m yalis bench kernels --rows 1,16,64 --out "$folder/kernels" ;;
  attention) LINES_SHOWN=80 step attention "$python" benchmarks/tune_attention.py ${ATTENTION:-decode} ;;
  tests) step tests "$python" -m pytest tests/gpu/test_gpu_graphs.py -p no:cacheprovider -rfEsP --durations=5 ;;
  *) echo "unknown step $name" && failures=$((failures + 1)) ;;
  esac
done
"$python" benchmarks/gpu_table.py "$folder"
exit $failures
