# make demo     train embeddings of real text through the tiers, look at the store, export it
# make test     the tests but the slow ones;  make test TESTS=tests/test_spec.py: some of them
# make test-all all tests, those of the integrations with their libraries, pyright, and as root those
#               that mount file systems (skipped otherwise)
# make nightly  these, the blocks of the documentation and the benchmarks each in a process of its own,
#               twenty times as many random examples, and all mutants, which make mutants tries alone
# make coverage  which lines the tests run, in build/coverage
# make core     build the compiled core in this tree
# make install  all that the tests and the documentation site need
# make torture  the long crash and fault runs, and the whole matrix of file systems (as root)
# make lint     ruff, mypy, the import contracts;  make docs: regenerate docs/cli.md, docs/cli/, docs/json.md, the layers in
#               CONTRIBUTING.md, and the charts of docs/benchmarks.md
# make docs-site  the documentation site, in build/site
# make wheel    build the wheel and use it in fresh environments
# make links    visit the links of the documentation to other sites
# make bench    the benchmarks;  make clean
#
# Everything runs in .venv, which the first target that needs it builds. Another Python: make PYTHON=python3.12 …

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Installed before everything else, so that pip may take a local CPU-only file rather than the CUDA libraries.
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
TESTS ?=
# Of `make nightly` and `make mutants`: words in the lines of the mutants to try, or --jobs 64, or --part 3/8.
MUTANTS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OTHERS := $(VENV)/.others
DOCS := $(VENV)/.docs
DEMO ?= demo

.PHONY: demo test test-all nightly mutants coverage core install lint torture docs docs-site links wheel bench clean
.DEFAULT_GOAL := test

$(VENV): $(READY)

CORE := hatch_build.py $(wildcard tierstore/_core/*.[ch])
$(READY): pyproject.toml $(CONSTRAINTS) $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet 'pip>=25.1'  # which knows groups of dependencies
	$(BIN)/pip install --quiet $(TORCH) -c $(CONSTRAINTS)
	$(BIN)/pip install --quiet -e '.[torch,formats]' --group dev -c $(CONSTRAINTS)
	touch $(READY)

# After a change of tierstore/_core; TIERSTORE_CORE_DEBUG=1 checks every index.
core:
	$(PYTHON) hatch_build.py

# The model is small: on a busy machine threads would wait for each other most of the time.
demo: export OMP_NUM_THREADS := $(or $(OMP_NUM_THREADS),1)
demo: $(READY)
	@echo "Training word vectors of the documentation on this machine, in a quarter of the memory they need."
	@$(BIN)/python examples/word2vec.py --store $(DEMO)/words.tier
	@$(BIN)/tierstore report $(DEMO)/words.tier $(DEMO)/report.html --table input --key python \
	  --history $(DEMO)/words.hits.jsonl --force
	@$(BIN)/tierstore export $(DEMO)/words.tier $(DEMO)/words.npy --table input --force
	@echo
	@echo "A picture of the words: open $(DEMO)/report.html in a browser. Next, try:"
	@echo "  1. $(BIN)/tierstore near $(DEMO)/words.tier --table input --key file"
	@echo "  2. $(BIN)/python examples/word2vec.py --store $(DEMO)/words.tier --epochs 12 --budget 1MiB"
	@echo "  3. docs/how-to/replace-an-embedding.md: what changes in a script of yours"

# One process a processor that may be used, each with tests of its own files while it has some. They and
# their children share compiled modules.
test test-all nightly mutants: export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(TESTS)

test-all: install
	$(BIN)/python -m pytest -q -n auto --dist worksteal --slow --thorough

nightly: install
	$(BIN)/python -m pytest -q -n auto --dist worksteal --slow --thorough --nightly
	$(BIN)/python -m tests.mutants $(MUTANTS)

# Which lines the tests run: build/coverage has a page for each file, build/coverage.md a table.
coverage: $(READY)
	$(BIN)/pip install --quiet --group coverage
	-$(BIN)/python -m pytest -q -n auto --dist worksteal --cov=tierstore --cov=tierstore_cli \
	  --cov-report=html:build/coverage --cov-report=
	$(BIN)/python -m coverage report --format=markdown --sort=cover > build/coverage.md
	$(BIN)/python -m coverage report --format=total

mutants: $(READY)
	$(BIN)/python -m tests.mutants $(MUTANTS)

# Whatever the tests and the documentation need, at once: two pips in one environment would disturb each other.
install: $(OTHERS) $(DOCS)

$(OTHERS): $(READY)
	$(BIN)/pip install --quiet --group integrations --group writers --group checker -c $(CONSTRAINTS)
	touch $(OTHERS)

$(DOCS): $(READY)
	$(BIN)/pip install --quiet --group docs -c $(CONSTRAINTS)
	touch $(DOCS)

ROUNDS ?= 20
SEED ?= 0
# Seconds for which a trainer runs while what it holds is watched.
SOAK ?= 3600
torture: export TIERSTORE_SOAK_SECONDS := $(SOAK)
torture: $(READY)
	$(BIN)/python -m pytest -q -s --slow --thorough --torture -m torture
	$(BIN)/python -m tests.durability.matrix --rounds $(ROUNDS) --seed $(SEED)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_json.py
	$(BIN)/python docs/generate_layers.py
	$(BIN)/python docs/generate_benchmarks.py

# Strict: a warning is an error, and so is a link to a page or heading that is not there.
docs-site: $(DOCS)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

# Needs the network: other sites come and go, so no test depends on them.
links: $(DOCS)
	$(BIN)/python -m sphinx -q -b linkcheck docs build/links

wheel:
	tests/wheel.sh $(PYTHON) $(TORCH)

bench: $(READY)
	$(BIN)/pip install --quiet --group bench -c $(CONSTRAINTS)
	set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) $(DEMO) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find tierstore cli tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
