# make demo   set up, then run the main job (ARGS="--ranks 4" and the like are passed on)
# make test   set up, then lint, format check, types, tests
# make test-broad  the tests that make test leaves out because they take longer; what has to pass for a
#             change to land is make test test-broad
# make test-all  all tests: those of make test, of make test-broad, and those marked slow, for hours
# make test-oldest, make test-newest  make test and test-broad with the oldest versions that are supported
#             (constraints-oldest.txt), or the newest there are, in environments of their own
# make compatibility  the table of families: exact, split, or whole (goes on where it ended)
# make docs   the site of the documents, in build/site; warnings are errors
# make pytest some of the tests, in one process (ARGS="-k masks" goes to pytest)
# make lint, make types, make format  what ruff says; what mypy says; ruff's own mends
# make setup  the virtual environment with the package installed in it, editable
# PYTHON      the interpreter that makes the environment (3.11 or later); VENV where it lies
# WORKERS     how many processes share the tests (2)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
START := $(shell date +%s)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu)
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)
# Named after what set-up depends on: a repeat with nothing changed runs no pip at all.
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints-*.txt Makefile | cksum | cut -d' ' -f1)$(GPU)
# mypy knows nothing of package-dir: it reads the package as it is once installed, through links.
TYPED := .mypy_cache/installed

# Benchmarks run seldom: that the names they use are there is known before.
LOOSELY := --ignore-missing-imports --follow-imports silent --no-warn-unused-ignores \
    $(addprefix --disable-error-code ,arg-type assignment call-arg call-overload dict-item misc \
    return-value str-unpack union-attr var-annotated)

.PHONY: help setup demo test test-broad test-all test-oldest test-newest compatibility lint types docs pytest format
help:
	@sed -n 's/^# //p' Makefile | sed '/^Named/,$$d'

setup: $(STAMP)
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("ParaDySe needs Python 3.11 or later, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[dev]'
	@rm -f $(VENV)/.setup-*
	@touch $@

demo: setup
	$(BIN)/paradyse demo $(ARGS)

test: MARKED := -m "not slow and not broad"
test-broad: MARKED := -m "broad and not slow"
test test-broad test-all: setup lint types
	@trap 'echo "make $@ took $$(($$(date +%s) - $(START))) s"' EXIT; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(MARKED) $(ARGS)

# The environments stay apart, and each is made anew only if what it depends on has changed.
test-oldest: GIVEN := -c constraints-oldest.txt
test-newest: GIVEN := --upgrade
test-oldest test-newest:
	$(MAKE) test test-broad VENV=.venv-$(@:test-%=%) CONSTRAINTS='$(GIVEN)' ARGS='$(ARGS)'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/paradyse
	@ln -s $(CURDIR)/paradyse/* $(CURDIR)/passes $(CURDIR)/kernels $(TYPED)/paradyse/
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
	    --cache-dir $(CURDIR)/.mypy_cache -p paradyse
	cd $(TYPED) && MYPYPATH=$(CURDIR)/benchmarks:$(CURDIR)/tests $(abspath $(BIN))/mypy \
	    --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache/benchmarks \
	    $(LOOSELY) $(CURDIR)/benchmarks/*.py

compatibility: setup
	$(BIN)/python tests/compatibility.py $(ARGS)

docs: setup
	$(BIN)/python -m pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[docs]'
	$(BIN)/python -m mkdocs -q build

pytest: setup
	$(BIN)/python -m pytest $(ARGS)
