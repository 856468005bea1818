#!/bin/bash
# Build, test and benchmark nvrar between ranks that share one GPU. usage: nvrar_on_one_gpu.sh FOLDER [STEP ...]
# Steps: build smoke contract storm proxy bench plain decode variants tests (default: all but tests). Results go to
# FOLDER. proxy runs storms over the test transport (csrc/test_transport), variants runs decode steps with and without
# the fused norm and programmatic dependent launch, in TURNS turns.
# LIMIT is the time limit of a step in seconds. OPS and SHAPES (ranks per node) set the stress test storm; SIZES,
# BACKENDS, PLAIN (NODESxRANKS) and WAYS (all-reduce backends of decode) set the benchmarks. PYTHON is the Python that
# has the GPU's torch. CUDA MPS is started here, and stopped.
. "$(dirname "$0")/steps.sh"
steps=${*:-build smoke contract storm proxy bench plain decode variants}
LIMIT=${LIMIT:-300} LINES_SHOWN=${LINES_SHOWN:-1} BACKENDS=${BACKENDS:-torch,mpi,nvrar,ring,oneshot,nvshmem}
ranks=(mpirun --allow-run-as-root --oversubscribe --bind-to none -n)
export CUDA_MPS_PIPE_DIRECTORY=$folder/mps CUDA_MPS_LOG_DIRECTORY=$folder/mps OMP_NUM_THREADS=1 YALIS_NVRAR_TIMEOUT=20
mkdir -p "$folder/mps"

if [[ $steps == *tests* ]]; then # they start MPS themselves
  step tests "$python" -m pytest tests/gpu/test_gpu_nvrar.py -p no:cacheprovider -rfEs --durations=10
fi
nvidia-cuda-mps-control -d || exit 1
trap 'echo quit -t 1 | nvidia-cuda-mps-control' EXIT
for name in $steps; do
  case $name in
  build)
    step build "$python" -c "
import torch
from yalis.comm.nvrar import build
print(build.missing() or build.build('%d%d' % torch.cuda.get_device_capability()))"
    ;;
  smoke)
    for nodes in 1+1 2 2+2 1+1+1; do step "smoke-$nodes" "$python" -m tests.gpu.nvrar_job small $nodes ops=100; done
    step smoke-again "$python" -m tests.gpu.nvrar_job small 2+1 ops=50 times=3
    step smoke-norm "$python" -m tests.gpu.nvrar_job norm 2+2
    step smoke-compiled "$python" -m tests.gpu.nvrar_job compiled 1+1
    ;;
  contract)
    step contract "$python" -m tests.multiprocess.comm_checks all nvrar 4 cuda:0 2+2
    ;;
  storm)
    for nodes in ${SHAPES:-1+1 2+2 1+1+1+1 2+2+2+2 4+4 1+1+1+1+1+1+1+1 1+1+1 2+2+2}; do
      YALIS_NVRAR_FLAGS=-DNVRAR_JITTER YALIS_NVRAR_ARENA=400 step "storm-$nodes" \
        "$python" -m tests.gpu.nvrar_job stress "$nodes" ops="${OPS:-20000}"
    done
    ;;
  proxy)
    for nodes in 1+1 1+1+1 1+1+1+1; do
      TESTNET_REORDER=1 TESTNET_DELAY_US=5 TESTNET_JITTER_US=20 TESTNET_HOLD_US=10 YALIS_NVRAR_ARENA=400 step "proxy-$nodes" \
        "$python" -m tests.gpu.proxied "$folder/proxy" "$python" -m tests.gpu.nvrar_job stress "$nodes" ops="${OPS:-20000}"
    done
    NVSHMEM_HEAP_KIND=SYSMEM step proxy-sysmem "$python" -m tests.gpu.proxied "$folder/proxy" \
      "$python" -m tests.gpu.nvrar_job small 1+1+1+1 ops=1000
    TESTNET_OPERATION_US=20 step proxy-protocols "$python" -m tests.gpu.proxied "$folder/proxy" \
      "$python" -m tests.gpu.nvrar_job protocols 1+1
    ;;
  bench) # each backend with its best settings, found by the same search
    YALIS_NVRAR_ARENA=600 step bench-tuned "$python" -m yalis bench allreduce --ranks 8 --ranks-per-node 2 --ranks-per-gpu 8 \
      --device cuda --tune --repeats 15 --sizes "${SIZES:-32K,128K,512K,1M}" --dtypes bfloat16 \
      --backends "${BACKENDS//mpi,/}" --out "$folder" --plot "$folder/allreduce-4x2-tuned"
    ;;
  plain) # without a search, eager and in graphs; started by mpirun, which the backend mpi needs
    for grid in ${PLAIN:-2x1 2x2 4x2}; do
      YALIS_NVRAR_ARENA=600 step "bench-$grid" "${ranks[@]}" $((${grid%x*} * ${grid#*x})) "$python" -m yalis bench allreduce \
        --ranks-per-node "${grid#*x}" --ranks-per-gpu 8 --device cuda --repeats 15 --sizes "${SIZES:-32K,128K,512K,1M}" \
        --dtypes bfloat16 --backends "$BACKENDS" --out "$folder" --plot "$folder/allreduce-$grid"
    done
    ;;
  decode) # decode steps of a whole model on 2 nodes of 2 ranks, with each all-reduce backend
    for backend in ${WAYS:-nvrar torch hierarchical mpi}; do
      step "decode-$backend" "${ranks[@]}" 4 "$python" -m yalis bench latency --model benchmarks/shapes/llama-3.2-1b.json --load random \
        --dtype bfloat16 --tp 4 --ranks-per-node 2 --ranks-per-gpu 4 --allreduce "$backend" --batch 1,16 --prompt-len 128 \
        --output-len 65 --repeats 1 --memory-fraction 0.15 --max-num-seqs 16 --out "$folder/decode"
    done
    ;;
  variants) # name, YALIS_NVRAR_FUSE_NORM and YALIS_PDL
    for turn in $(seq "${TURNS:-3}"); do
      for variant in "separate 0 1" "fused 1 1" "fused-pdl 1 all"; do
        set -- $variant
        YALIS_EXPERIMENTAL=1 YALIS_NVRAR_FUSE_NORM=$2 YALIS_PDL=$3 step "variant-$1-$turn" "${ranks[@]}" 4 "$python" -m yalis bench latency \
          --model benchmarks/shapes/llama-3.2-1b.json --load random --dtype bfloat16 --tp 4 --ranks-per-node 2 \
          --ranks-per-gpu 4 --allreduce nvrar --batch 1,16 --prompt-len 128 --output-len 65 --repeats 1 \
          --memory-fraction 0.15 --max-num-seqs 16 --out "$folder/variants/$1"
      done
    done
    ;;
  esac
done
exit $failures
