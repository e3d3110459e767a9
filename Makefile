# make setup   a virtual environment in .venv with everything pinned
# make demo    train on four local Ray nodes, lose one, go on
# make test    format, lint, types, tests; make unit and make cluster run a part of them
# make soak    the long forms: cluster tests with 30 random kills (PLANARIA_KILLS, PLANARIA_SEED), 20 pairs of layouts
# make chaos   random faults of all kinds against one long job (SEED=1, FAULTS=200, KINDS=NodeKilled,WorkerFrozen,...)
# make network cut, lossy and slow links between nodes in network namespaces (as root; needs iproute2 and iptables)
# make parity  families of models on every layout beside one process; renders docs/parity.md (PARITY_ARGS=--families=llava*)
# make dashboards  write Grafana's dashboards from platform/planaria/dashboards
# make bench   run every benchmark, render docs/benchmarks.md
#
# PYTHON=...       interpreter to build .venv with (default: the first of 3.11 or newer on PATH)
# PIP_ARGS=...     more arguments for pip install, e.g. an index that holds CPU-only wheels of torch
# PYTEST_ARGS=...  more arguments for pytest, e.g. -k checkpoint
# JOBS=...         test processes of make unit and make cluster (default: 2)
# BENCH_ARGS=...   more arguments for every benchmark, e.g. --quick

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup demo test unit cluster soak chaos network parity dashboards lint format bench clean

VENV := .venv
STAMP := $(VENV)/.complete
PYTHON ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2
BENCH_ARGS ?=
PARITY_ARGS ?=
SEED ?= 1
FAULTS ?= 200
KINDS ?=

# One thread per process, as many processes share few cores. Local clusters listen on loopback only;
# without a pinned mode, ray.init() would switch token authentication on and write ~/.ray/auth_token.
export OMP_NUM_THREADS ?= 1
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@sed -n '/^# make/s/^# //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=; found=; \
	for name in $(or $(PYTHON),python3.11 python3 python3.12 python3.13); do \
	    version=$$("$$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	    found="$$found $$name is $$version;"; \
	    if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "planaria needs Python 3.11 or newer (found:$${found:- none}). Install it, e.g. 'apt-get install python3.11 python3.11-venv', or name one: make setup PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "$$python cannot make virtual environments: its module ensurepip is missing. On Debian and Ubuntu: apt-get install python$$version-venv" >&2; \
	    exit 1; \
	fi; \
	if ! $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(VENV)/bin/planaria demo

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test: lint unit cluster

unit: setup
	$(VENV)/bin/pytest -n $(JOBS) --dist loadfile -m 'not cluster' $(PYTEST_ARGS)

# Two at a time: every one of these starts a cluster of many processes, which wait for one another most of the time.
cluster: setup
	$(VENV)/bin/pytest -n $(JOBS) --dist loadgroup -m 'cluster and not solo' --durations=12 $(PYTEST_ARGS)
	$(VENV)/bin/pytest -m 'cluster and solo' $(PYTEST_ARGS)

soak: setup
	PLANARIA_LONG=1 PLANARIA_KILLS=$${PLANARIA_KILLS:-30} $(VENV)/bin/pytest -s tests/cluster
	PLANARIA_LONG=1 $(VENV)/bin/pytest -s tests/engine tests/memory tests/bench tests/dashboards

chaos: setup
	PLANARIA_SEED=$(SEED) PLANARIA_FAULTS=$(FAULTS) PLANARIA_KINDS=$(KINDS) $(VENV)/bin/pytest -s tests/chaos

network: setup
	PLANARIA_NETWORK=long $(VENV)/bin/pytest -s tests/network

parity: setup
	$(VENV)/bin/planaria parity --json build/parity.json --markdown docs/parity.md $(PARITY_ARGS)

dashboards: setup
	$(VENV)/bin/python -m planaria.dashboards dashboards/grafana/dashboards

bench: setup
	@mkdir -p build/bench
	@shopt -s nullglob; \
	for job in jobs/bench/[a-z]*.py; do \
	    name=$$(basename "$$job" .py); \
	    if [ "$$name" = render ]; then continue; fi; \
	    echo "== $$name"; \
	    $(VENV)/bin/python "$$job" --json "build/bench/$$name.json" $(BENCH_ARGS); \
	done
	$(VENV)/bin/python jobs/bench/render.py build/bench docs/benchmarks.md

clean:
	rm -rf $(VENV) build dist platform/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
