# `make demo` and `make test` set everything up in .venv on a fresh machine with Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo quick test slow lint mutants dist try-wheel setup clean

demo: setup  ## four writers learn together, in under three minutes on two cores
	$(BIN)/coterie run --out runs/demo --force

ROOMS := adapters aggregation alignment bases data exchange privacy results runs scoring
FILES := config docs files method_settings package shape
CONTRACT := tests/methods/test_contract.py::TestEveryMethod
quick: setup  ## under a minute, while you edit: what needs no run, and the contract on CoMiGS
	$(BIN)/python -m pytest -q -n 2 -m "not slow" --durations=10 \
	  $(ROOMS:%=tests/%) $(FILES:%=tests/test_%.py) \
	  "$(CONTRACT)::test_a_deployment_gives_the_same_bits[comigs-1g1s]" \
	  "$(CONTRACT)::test_a_stopped_run_continues_to_the_same_bits[comigs-1g1s]"

test: setup  ## all tests but the slow ones
	$(BIN)/python -m pytest -n 2 -m "not slow" --durations=10

STARTING := $(patsubst %,tests/engines/test_%.py,deployed_bases deployment door door_limits \
  door_process door_tls intruders leaving remains simulation)
slow: setup  ## the slow tests; those that start processes of their own one by one
	$(BIN)/python -m pytest -n 2 -m slow --durations=10 $(STARTING:%=--ignore=%)
	$(BIN)/python -m pytest -m slow --durations=10 $(STARTING)

mutants: setup  ## faults in the source, each of which the tests must catch
	$(BIN)/python scripts/mutants.py

lint: setup  ## format, lint, types and the walls between rooms, checked and not changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

dist: setup  ## a wheel and a source archive, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

try-wheel: dist  ## the wheel in empty environments, with the newest and the oldest of what it needs
	$(BIN)/python scripts/try_wheel.py dist/*.whl

setup: .venv/.done

.venv/.done: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv runs build dist
