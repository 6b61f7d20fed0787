# Two commands on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: install demo test lint docs clean

install: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[dev]
	touch $@

demo: install
	$(BIN)/furlong demo

test: install
	$(BIN)/python -m pytest -n 2

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[docs]
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
