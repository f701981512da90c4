PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# A process for each core, with a thread each: the models of the tests are too small for more.
PARALLEL := --numprocesses logical --dist worksteal

.PHONY: quickstart test test-minimum faults soak hf-tests lint

# Trains a small teacher on scikit-learn's digits, distils it with 2 and 3 phases, prints a table.
quickstart: $(INSTALLED)
	$(BIN)/python training/quickstart.py

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL)

# The same with the oldest versions that setup.cfg allows, in an environment of its own.
test-minimum: .venv-minimum/.installed
	.venv-minimum/bin/python -m pytest $(PARALLEL)

# Kills a small run at 20 random moments, each time goes on with it, and compares the end bit for bit; then SIGTERM, two
# processes and a full disk.
faults: $(INSTALLED)
	$(BIN)/python tests/faults/kills.py
	$(BIN)/python tests/faults/commands.py

# 2,000 steps of which one image in a hundred is bad: memory must not grow.
soak: $(INSTALLED)
	$(BIN)/python tests/faults/soak.py

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

.venv-minimum/.installed: setup.cfg constraints-minimum.txt
	test -x .venv-minimum/bin/python || $(PYTHON) -m venv .venv-minimum
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-minimum.txt \
		--editable '.[test]'
	touch $@
