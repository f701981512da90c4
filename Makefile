PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: quickstart test lint

# Trains a small teacher on scikit-learn's digits, distils it with 2 and 3 phases, prints a table.
quickstart: $(INSTALLED)
	$(BIN)/python training/quickstart.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(INSTALLED): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
