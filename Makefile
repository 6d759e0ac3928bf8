# make demo     train embeddings of real text through the tiers, look at the store, export it
# make test     the tests but the slow ones;  make test TESTS=tests/test_spec.py: some of them
# make test-all all tests, those of the integrations with their libraries, and as root those
#               that mount file systems (skipped otherwise)
# make torture  the long crash and fault runs, and the whole matrix of file systems (as root)
# make lint     ruff, mypy, the import contracts;  make docs: regenerate docs/cli.md and the layers in CONTRIBUTING.md
# make wheel    build the wheel and use it in fresh environments
# make bench    the benchmarks;  make clean
#
# Everything runs in .venv, which the first target that needs it builds. Another Python: make PYTHON=python3.12 …

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Installed before everything else, so that pip may take a local CPU-only file rather than the CUDA libraries.
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
TESTS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO ?= demo

.PHONY: demo test test-all lint torture docs wheel bench clean
.DEFAULT_GOAL := test

$(VENV): $(READY)

$(READY): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH) -c $(CONSTRAINTS)
	$(BIN)/pip install --quiet -e '.[all,dev]' -c $(CONSTRAINTS)
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/word2vec.py $(DEMO)
	$(BIN)/tierstore inspect $(DEMO)/words.tier --stats
	$(BIN)/tierstore export $(DEMO)/words.tier $(DEMO)/words.npy --table input --force

# One process a core.
test: $(READY)
	$(BIN)/python -m pytest -q -n auto $(TESTS)

test-all: $(READY)
	$(BIN)/pip install --quiet -e '.[formats,integrations]' -c $(CONSTRAINTS)
	$(BIN)/python -m pytest -q -n auto --slow
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
	$(BIN)/python docs/generate_layers.py

wheel:
	tests/wheel.sh $(PYTHON) $(TORCH)

bench: $(READY)
	$(BIN)/pip install --quiet -e '.[bench]' -c $(CONSTRAINTS)
	set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) $(DEMO) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find tierstore cli tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
