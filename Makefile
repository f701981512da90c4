PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: quickstart test hf-tests lint

# Trains a small teacher on scikit-learn's digits, distils it with 2 and 3 phases, prints a table.
quickstart: $(INSTALLED)
	$(BIN)/python training/quickstart.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

# Transformers' own common tests, from its source distribution, against Raptor and against Dinov2.
hf-tests: $(INSTALLED)
	$(BIN)/python tests/hf/run.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(INSTALLED): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
