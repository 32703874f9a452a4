# `make demo` and `make test` set everything up in .venv first, once.
PYTHON ?= python3
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/.complete
# Tests start many processes: as many run at once as there are cores, up to 4 (one more took longer), and bytecode is kept,
# whatever the environment says.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, max(2, os.cpu_count() or 2)))')
COMPILED := PYTHONDONTWRITEBYTECODE= NUMBA_CACHE_DIR=$(CURDIR)/.pytest_cache/compiled
PYTEST := $(COMPILED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint plans tests thorough docs newcomer matrix slowest clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with everything that demo and test need

# torch comes first and by itself, so that its version is this one whatever else asks for it. All cores compile to
# bytecode, where pip would use one, but not the packages' own tests nor the models of transformers, of which few are used.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "$(PYTHON) is %d.%d, but hydragraph needs 3.11 or later: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(PIP) install --no-compile "$(TORCH)"
	$(PIP) install --no-compile -e ".[dev]"
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' .venv/lib || true  # some packages carry files of other Pythons
	@touch $@

demo: $(STAMP)  ## train 10 M parameters on the standard library with 4 local processes; writes runs/demo
	$(BIN)/hydragraph train examples/demo.yaml --overwrite

lint: $(STAMP)  ## ruff and the strict type check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

# Installation compiles the planner's search. After an edit of it, workers would all compile the same functions.
plans: $(STAMP)
	$(COMPILED) $(BIN)/python -m hydragraph.planner.first_compilation stages devices lengths

tests: plans
	$(PYTEST)

test: $(STAMP)  ## lint and the tests
	@$(MAKE) --no-print-directory -j2 lint tests

slowest: plans  ## run the tests and list those that cost most CPU seconds
	$(PYTEST) --spent 40

thorough: plans  ## every test, larger samples, and two thousand drawn modules (hours)
	$(PYTEST) -m '' --hypothesis-profile=thorough
	$(BIN)/python -m tests.fuzz --count 200
	$(BIN)/python -m tests.fuzz --modules --count 1000
	$(BIN)/python -m tests.fuzz --losses --count 1000
	$(BIN)/python -m tests.fuzz --uses --count 300
	$(BIN)/python -m tests.chaos --count 100
	$(BIN)/python -m tests.right --count 1000

docs: $(STAMP)  ## build the documentation into site/, strictly
	@$(BIN)/python -c "import mkdocs, mkdocstrings, material" 2>/dev/null || $(PIP) install -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

newcomer: $(STAMP)  ## follow README and getting started in a fresh environment without extras (minutes, 2 GB)
	HYDRAGRAPH_TORCH=$(TORCH) $(BIN)/python -m pytest -m thorough -s tests/test_newcomer.py

matrix: $(STAMP)  ## run the core with every PyTorch that is supported, an environment each; README gets the table
	$(BIN)/python -m tests.matrix

clean:  ## remove .venv, runs and caches
	rm -rf .venv runs site .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
