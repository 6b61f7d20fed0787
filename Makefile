# Two commands on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: install demo test test-slow test-all chaos bench lint docs supply requirements sbom vulnerabilities clean

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

bench: install # speed and scale, in under an hour on two idle cores; benchmarks/README.md
	$(BIN)/python benchmarks/all.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[docs]
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

supply: install # the tools of the three targets below
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[supply]

requirements: supply # requirements.txt: what a site installs, with hashes, without torch (see requirements.in)
	echo "torch; sys_platform == 'never'" > $(VENV)/without-torch.txt
	$(BIN)/uv pip compile -q --generate-hashes --no-header --no-annotate --python-version 3.11.5 \
		--override $(VENV)/without-torch.txt -c constraints.txt \
		--extra flower --extra privacy --extra secure --extra medical --extra onnx --extra tsne \
		-o requirements.txt pyproject.toml requirements.in

sbom: supply # a software bill of materials of the installed environment, in CycloneDX's format
	mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON \
		-o dist/sbom.cdx.json $(BIN)/python

vulnerabilities: supply # known ones of what requirements.txt pins; needs a network
	$(BIN)/pip-audit --require-hashes --disable-pip -r requirements.txt

clean:
	rm -rf $(VENV)
