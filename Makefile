# Two commands on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: install demo test test-slow test-all chaos lint docs clean

install: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[dev]
	touch $@

demo: install
	$(BIN)/furlong demo

test: install # everything that guards correctness, in at most six minutes on two idle cores
	$(PYTEST) -m "not slow"

test-slow: install # the rest: more variants of the same, whole federations of processes, learning
	$(PYTEST) -m slow

test-all: install
	$(PYTEST)

chaos: install # kills, full disks, damaged input, bad nodes; hours on a busy machine
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/chaos.py --scale 1 --federation 12

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[docs]
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
