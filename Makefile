# make demo    train embeddings of real text through the tiers, look at the store, export it
# make test    the tests;  make lint: ruff, mypy, the import contract;  make docs: regenerate docs/cli.md
# make test-all the tests, then those that mount file systems (as root; skipped elsewhere)
# make torture the long crash and fault runs, and the whole matrix of file systems (as root)
# make bench   the benchmarks;  make clean
#
# Everything runs in .venv, which the first target that needs it builds. Another Python: make PYTHON=python3.12 …

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Installed before everything else, so that pip may take a local CPU-only file rather than the CUDA libraries.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO ?= demo

.PHONY: demo test test-all lint torture docs bench clean
.DEFAULT_GOAL := test

$(VENV): $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH) -c constraints.txt
	$(BIN)/pip install --quiet -e '.[all,dev]' -c constraints.txt
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/word2vec.py $(DEMO)
	$(BIN)/tierstore inspect $(DEMO)/words.tier --stats
	$(BIN)/tierstore export $(DEMO)/words.tier $(DEMO)/words.npy --table input --force

# One process a core.
test: $(READY)
	$(BIN)/python -m pytest -q -n auto

test-all: test
	$(BIN)/python -m pytest -q --thorough -m thorough

ROUNDS ?= 20
SEED ?= 0
torture: $(READY)
	$(BIN)/python -m pytest -q -s --torture -m torture
	$(BIN)/python -m tests.durability.matrix --rounds $(ROUNDS) --seed $(SEED)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python docs/generate_cli.py

bench: $(READY)
	$(BIN)/pip install --quiet -e '.[bench]' -c constraints.txt
	set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) $(DEMO) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find tierstore cli tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
