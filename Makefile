# SPDX-License-Identifier: Apache-2.0
# `make serve` and `make test` do their own set-up; ARGS goes to the program that a target runs.

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
TESTS ?= tests
# Tests that start processes share one of the two workers (see tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
SHELL_SCRIPTS := .ci/run $(shell find scripts docker bench -name '*.sh')
MODELS := $(wildcard model_repository/*/1/model.py)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-slow test-gpu aot bench-kernels lint format clean

help:
	@echo 'make setup        make $(VENV) with everything (serve and test do it themselves)'
	@echo 'make serve        serve on 8000/8001/8002; ARGS="--checkpoint DIR --ranks 8 ..."'
	@echo 'make test         the tests that take minutes; TESTS=path, ARGS="-k name"'
	@echo 'make test-slow    the rest; CI runs it too'
	@echo 'make test-gpu     the tests that need an NVIDIA GPU'
	@echo 'make aot          compile every kernel for sm_90 (no GPU), bench/results/aot.json'
	@echo 'make bench-kernels  check and time the operators on this GPU'
	@echo 'make lint         ruff, mypy --strict, shellcheck'
	@echo 'make format       apply ruff fixes and formatting'
	@echo 'make clean        remove caches and build output, not $(VENV)'

setup:
	@bash scripts/install.sh --venv $(VENV)

# exec: make's only child is glmserve itself. Ctrl-C reaches both; SIGTERM to make is passed on by
# make. Either way make then waits until the server has stopped.
serve: setup
	@exec $(BIN)/glmserve serve $(ARGS)

test: setup
	$(PYTEST) -m 'not slow and not gpu' $(TESTS) $(ARGS)

# A part of the tree without slow tests (pytest's status 5) is no failure.
test-slow: setup
	$(PYTEST) -m 'slow and not gpu' $(TESTS) $(ARGS) || [ $$? -eq 5 ]

# Compiles every shipped kernel configuration for sm_90; needs no GPU.
aot: setup
	$(BIN)/python bench/aot.py $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -m gpu $(TESTS) $(ARGS)

bench-kernels: setup
	$(BIN)/python bench/kernels.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@# Triton wants every model file to be called model.py, so mypy sees them one at a time.
	set -e; for model in $(MODELS); do $(BIN)/mypy $$model; done
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/readme_tables.py

clean:
	rm -rf build dist tests/.cache src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests model_repository -name __pycache__ -prune -exec rm -rf {} +
