# A checkout needs python3 (3.10 or newer, with venv) and make; `make setup` installs the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup train test fast chaos cluster lint types reference notebooks docs wheel release bench gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: setup
	$(BIN)/paceline train digits --procs 2

# Most tests wait for processes, so three at a time keep two cores busy. The longest tests are in the first folders. Hundreds
# of processes import the package, so its bytecode is kept.
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Unit tests only: they start no ranks.
fast: setup
	$(BIN)/python -m pytest tests/unit -n 2

chaos: setup
	$(BIN)/python tests/multi/chaos.py --hits 20

# Tests with real Slurm and Ray; those whose program is missing are skipped. Hosts are network namespaces, which need root.
cluster: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest -m 'long or not long' tests/cluster

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Writes the tables of keys in docs/configuration.md and the docstring of Trainer.
reference: setup
	$(BIN)/python scripts/reference.py

# Builds the wheel in dist/, and runs the first page of the README from it in an empty environment.
wheel: setup
	$(BIN)/python scripts/check_wheel.py

# Checks what a release needs: version, changelog, working tree, wheel, docs.
release: setup
	$(BIN)/python scripts/release.py

# Runs the notebooks in docs/notebooks and writes their outputs into them.
notebooks: setup
	$(BIN)/python scripts/notebooks.py

# Builds the documentation site, site/index.html; a broken link or reference is an error. Needs Python 3.11 or newer.
docs: setup
	$(BIN)/python scripts/notebooks.py --pages
	$(BIN)/zensical build --clean --strict

bench: setup
	$(BIN)/python benchmarks/reduction.py
	$(BIN)/python benchmarks/save_stall.py

# Tests and benchmarks that need a GPU, in at most 25 minutes; `make gpu OUT=FOLDER` again continues.
OUT ?= gpu-results
gpu:
	benchmarks/gpu.sh $(OUT)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .cache build dist site
