# `make demo` and `make test` set everything up in .venv on a fresh machine with Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test slow lint setup clean

demo: setup  ## four writers learn together, in under three minutes on two cores
	$(BIN)/coterie run --out runs/demo --force

test: setup  ## the tests, slow ones apart
	$(BIN)/python -m pytest -n 2 -m "not slow"

slow: setup  ## the slow tests
	$(BIN)/python -m pytest -m slow

lint: setup  ## format, lint, types and the walls between rooms, checked and not changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

setup: .venv/.done

.venv/.done: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv runs
