# Everything a fresh machine needs: Python 3.11+, pip, venv, a C/C++ compiler, Debian's packages.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
MODEL ?= smollm2
SERVE_FLAGS ?=
PYTEST_FLAGS ?=
BENCH_FLAGS ?=

.PHONY: serve test check bench bench-frontend bench-split proto clean redis

## serve: set up, then serve MODEL (default smollm2) through five processes on 127.0.0.1:8000
serve: $(VENV)/.installed
	exec $(BIN)/sluiceway serve $(MODEL) $(SERVE_FLAGS)

## test: set up, then lint, types, import contracts and every test
test: $(VENV)/.installed-dev redis
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

## check: the fast subset, under two minutes: not the gateway's tests over real HTTP, which mostly wait
check: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" \
	  tests/unit tests/contract --ignore=tests/unit/gateway/http

.PHONY: lint
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## bench-split: tokens/s of one process and of the five, side by side; the last line is the ratio
# (with the worker's default of omp_spin_count on both sides)
bench-split: $(VENV)/.installed-dev
	GOMP_SPINCOUNT=10000 $(BIN)/python -m tests.benchmarks.bench_split --model $(MODEL) $(BENCH_FLAGS)

## bench: how fast `serve` answers, workload by workload; a table, and build/bench.json
bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.benchmarks.bench --model $(MODEL) $(BENCH_FLAGS)

## bench-frontend: CPU per streamed token, added latency and slow readers of gateway and tokenizer
bench-frontend: $(VENV)/.installed-dev
	$(BIN)/python -m tests.benchmarks.bench_frontend --model $(MODEL) $(BENCH_FLAGS)

## proto: write services/common/pb from proto/
proto: $(VENV)/.installed-dev
	$(BIN)/python proto/generate.py

## clean: remove everything that the targets above made in this folder
clean:
	rm -rf $(VENV) .venvs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

redis:
	@command -v redis-server >/dev/null || { \
	  echo "installing Debian's redis-server"; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq redis-server; }

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and alone: the pin keeps pip from taking another build through a dependency.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(PIP) install -c constraints.txt torch==2.13.0
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[all]'
	touch $@

# `dev` holds `all`: one run of pip makes both.
$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@
