#!/bin/bash
# Serve 64 concurrent streams on one GPU, and compare with offline generation of the same requests.
# usage: serve_on_one_gpu.sh FOLDER [STEP ...]
# Steps: serve (default; fails if the server has less than 95% of the throughput of LLM.generate), report (needs
# matplotlib). Results go to FOLDER as JSON. MODEL, WORK (requests x prompt x output), POINTS and FLAGS select what runs.
# Without network, WHEELS is a folder with the wheels of the extra `serve`, which are unpacked into FOLDER. LIMIT is the
# time limit of a step in seconds. PYTHON is the Python that has the GPU's torch.
. "$(dirname "$0")/steps.sh"
steps=${*:-serve}
LIMIT=${LIMIT:-200} LINES_SHOWN=${LINES_SHOWN:-24}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # where yalis is not installed
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$folder/packages" "$WHEELS"/*.whl || exit 1
  PYTHONPATH=$PYTHONPATH:$folder/packages # last, so that packages of the machine are preferred
fi

for name in $steps; do
  case $name in
  serve) step serve "$python" benchmarks/serve_against_offline.py "$folder" \
    --model "${MODEL:-benchmarks/shapes/llama-3.1-8b.json}" --dtype "${DTYPE:-bfloat16}" \
    --workload "${WORK:-192x256x256}" --points "${POINTS:-3}" ${FLAGS:-} ;;
  report) step report "$python" -m yalis report "$folder" -o "$folder/report.html" ;;
  *) echo "unknown step $name" && failures=$((failures + 1)) ;;
  esac
done
exit $failures
