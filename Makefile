# make demo    a real model answers, from nothing but Python 3.10+
# make test    lint, types, import direction and tests on the CPU; what CI runs
PYTHON ?= python3
# A torch already in the environment is kept; this is what an empty one gets.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-full lint fetch gpu-test gpu-bench bench clean help

help:
	@sed -n 's/^# //p' Makefile

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"yalis needs Python 3.10 or newer, and $(PYTHON) is {v[0]}.{v[1]}; run: make $(MAKECMDGOALS) PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
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

test: lint fetch
	$(PYTEST) -m 'not full' tests/unit

test-full: lint fetch
	$(PYTEST) tests/unit

# On a machine with a GPU, with the Python that holds its torch: nothing is installed.
gpu-test:
	$(PYTHON) -m pytest tests/gpu

clean:
	rm -rf $(VENV) build dist *.egg-info
