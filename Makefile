# Two commands set everything up: `make quickstart` and `make test`. The rest is for development.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACK ?= ../shared/conformance
BEHAVIOUR ?= ../shared/behaviour
BENCH ?=
GPU ?=
TRACE ?=
GOLDEN ?=
MUTATIONS ?=
FUZZ ?= --seconds 180
CHAOS ?=
PEER ?= build/bench/peer

# Hundreds of processes of the tests import the package: its sources are compiled once.
unexport PYTHONDONTWRITEBYTECODE

# Installs quietly, errors apart. Python compiles what is imported when it is imported, a small part of what is
# installed.
pip_install = $(PIP) install -qq --no-compile -c constraints.txt $(1)

.PHONY: help quickstart test test-all services check format docs conformance gates bench gpu trace mutations golden chaos fuzz peer

help:
	@echo "make quickstart   install raymerge and merge three small models: what raymerge does, on real input"
	@echo "make test         install the development tools, then run every check and the tests, but for slow ones and services"
	@echo "make test-all     the same with every test: slow ones and those of make services too"
	@echo "make services     run the tests of the Jobs API, of Kubernetes, of Slurm and of growing clusters: real head nodes"
	@echo "make check        lint, formatting, types and the import contracts only"
	@echo "make format       rewrite the files as make check wants them"
	@echo "make docs         build the documentation as a site in build/site and check its links"
	@echo "make conformance  print how merges compare with those of a conformance pack: PACK=$(PACK)"
	@echo "make peer         check what is said of mergekit, in an environment that has it: PEER=$(PEER)"
	@echo "make gates        print how mixtures with each kind of router behave: BEHAVIOUR=$(BEHAVIOUR)"
	@echo "make bench        measure speed and memory against the storage and mergekit, 25 minutes: BENCH=--help"
	@echo "make gpu          run the tests that need a GPU, and compare merges on it with the processor's: GPU=--help"
	@echo "make trace        count the files and functions that a small merge goes through: TRACE=--files"
	@echo "make golden       compare what 194 merges give with what they gave before, byte by byte: GOLDEN=--help"
	@echo "make mutations    make small changes in the code and tell which of them no test notices, 15 minutes: MUTATIONS=--help"
	@echo "make fuzz         read changed files for three minutes, led by what code they reach: FUZZ=--help"
	@echo "make chaos        inject every fault and print what it cost, at most 15 minutes: CHAOS=--help"

quickstart: $(VENV)/.installed
	@$(BIN)/raymerge submit configs/quickstart/recipe.yml -o quickstart-out --workers 2 --replace
	@$(BIN)/python configs/quickstart/evaluate.py quickstart-out

test: check
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-all: check
	@$(BIN)/python -m pytest -m "" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

services: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -m service

check: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --num-workers 2
	@$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	@PYTHONPATH=tests $(BIN)/python -m kits.method_table
	@for each in recipe profile; do $(BIN)/python -m raymerge.cli schema $$each > configs/schemas/$$each.json; done
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.installed
	@$(call pip_install,-e '.[docs]')
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

conformance: $(VENV)/.installed-dev
	@$(BIN)/python tests/conformance_table.py $(PACK)

peer: $(VENV)/.installed-dev
	@$(BIN)/python tests/peer_table.py $(PEER)

gates: $(VENV)/.installed-dev
	@$(BIN)/python tests/gate_table.py $(BEHAVIOUR)

bench: $(VENV)/.installed-dev
	@$(BIN)/python tests/benchmarks $(BENCH)

gpu: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -m "" -k "gpu or cuda" tests/methods tests/checkpoints tests/execute tests/test_device_numerics.py
	@$(BIN)/python tests/benchmarks/gpu.py $(GPU)

trace: $(VENV)/.installed-dev
	@$(BIN)/python tests/benchmarks/trace.py $(TRACE)

golden: $(VENV)/.installed-dev
	@$(BIN)/python tests/golden/digests.py $(GOLDEN)

mutations: $(VENV)/.installed-dev
	@$(BIN)/python tests/mutations $(MUTATIONS)

fuzz: $(VENV)/.installed-dev
	@$(BIN)/python tests/fuzz $(FUZZ)

chaos: $(VENV)/.installed-dev
	@$(BIN)/python tests/chaos $(CHAOS)

# The pip that comes with Python is older, and takes twice as long to find what to install. torch comes before the
# rest and alone, so that the pinned build is what everything after it finds installed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "raymerge needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo absent)." >&2; \
	  echo "Install one and name it: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch into $(VENV) (minutes the first time) ..."
	@$(call pip_install,pip)
	@$(call pip_install,torch)
	@echo "Installing raymerge into $(VENV) ..."
	@$(call pip_install,-e .)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools into $(VENV) ..."
	@$(call pip_install,-e '.[dev]')
	@touch $@
