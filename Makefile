# Every target sets up what it needs in .venv, from a fresh clone on.
#   make train ARGS="steps=50 islands=4"    two islands of two tensor-parallel ranks learn real text
#   make test                               lint and the quick tests
#   make test-all                           and the slow ones (a minute and more each)
#   make bench ARGS=--quick                 every benchmark; records go to build/benchmarks/
#   make bench-kernels ARGS=--quick         the kernels' alone, next to peers that are in .venv; and a picture
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test test-slow test-all lint bench bench-kernels lock clean

ARGS ?=
WORKERS ?= 2
PYTHON ?=
# Passive: threads of two tests that spin for work on two cores keep each other from it.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive .venv/bin/python -m pytest -n $(WORKERS)

help:
	@sed -n 's/^#   //p' Makefile

setup: .venv/installed

train: .venv/installed
	.venv/bin/dilocox train $(ARGS)

test: lint
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: .venv/installed
	$(PYTEST) -m slow $(ARGS)

test-all: test test-slow

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: .venv/installed
	@mkdir -p build/benchmarks
	@for file in $$(grep -l __main__ benchmarks/*.py); do \
		name=$$(basename "$$file" .py); \
		echo "benchmarks.$$name"; \
		.venv/bin/python -m "benchmarks.$$name" --json "build/benchmarks/$$name.json" $(ARGS); \
	done

bench-kernels: .venv/installed
	.venv/bin/python -m benchmarks.kernels --json build/benchmarks/kernels.json $(ARGS)

# A Python that dilocox and the pins suit, with the modules that Debian keeps in a package of their own.
FIND_PYTHON = for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo "$$python"; break; fi; done

.venv/bin/python:
	@python=$$($(FIND_PYTHON)); \
	if [[ -z "$$python" ]]; then \
		root=$$([[ $$(id -u) == 0 ]] || echo sudo); \
		$$root apt-get update -qq && $$root apt-get install -qq --yes python3 python3-venv || true; \
		python=$$($(FIND_PYTHON)); \
	fi; \
	if [[ -z "$$python" ]]; then \
		echo "dilocox needs Python 3.11 or newer with its venv module; install it and name it: make PYTHON=PATH" >&2; \
		exit 1; \
	fi; \
	"$$python" -m venv .venv

# The C++ under kernels/ is compiled by the installation.
.venv/installed: requirements.lock pyproject.toml setup.py $(wildcard kernels/dilocox_kernels/cpu/csrc/*) | .venv/bin/python
	@compiler=$${CXX:-g++}; \
	if ! command -v "$$compiler" >/dev/null; then \
		root=$$([[ $$(id -u) == 0 ]] || echo sudo); \
		$$root apt-get update -qq && $$root apt-get install -qq --yes g++ || true; \
	fi; \
	if ! command -v "$$compiler" >/dev/null; then \
		echo "dilocox needs a C++ compiler, g++ 11 or newer; install it, or name it: CXX=PATH make" >&2; \
		exit 1; \
	fi
	.venv/bin/python -m pip install -qq --no-compile -r requirements.lock # most modules are never imported
	.venv/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# Resolves everything anew from pyproject.toml; look at the difference before committing it.
lock: | .venv/bin/python
	@rm -rf build/lock && .venv/bin/python -m venv build/lock
	build/lock/bin/python -m pip install -qq ".[dev,bench]"
	@{ head -n 1 requirements.lock; \
		build/lock/bin/python -m pip freeze --all --exclude dilocox --exclude pip --exclude wheel | sed 's/+[a-z0-9.]*$$//'; \
	} > build/requirements.lock
	@mv build/requirements.lock requirements.lock

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
