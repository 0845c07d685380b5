# Every target makes its own environment: .venv, with the versions of constraints.txt. Nothing is installed outside it.
#   make demo    train a model that plain DDP does not fit into memory, on two CPU processes, and compare with DDP
#   make test    the tests that every change runs, with a quarter of the random instances
#   make test-all  all tests with all instances
#   make test-compat  what other libraries bring, in an environment of its own (.venv-compat), some minutes
#   make test-oldest  what users do, with the lowest versions that setup.cfg promises, in an environment of its own
#                     (.venv-oldest: 6 GB, since torch of that age brings what it needs of CUDA)
#   make test-newest  the same with the newest versions that are published (.venv-newest)
#   make lint    formatting, types, import contracts
#   make package  a wheel and a source distribution, looked at, and the wheel in an environment of its own (.venv-package)
#   make docs    the documents as a site, in site/
#   make bench   the benchmarks that run on a CPU
#   make gpu     on a machine with a card: the tests that need one, and short runs by plans of every kind
#   make gpu-offload  on a machine with a card: models that it does not hold, against other ways to train them there
# PYTHON=python3.12 chooses the interpreter, VENV=dir the environment's place.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS ?= dev
PINNED ?= -c constraints.txt

# Two processes on a small machine: more threads than cores make every operator slower, not faster.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: install demo test test-all test-compat test-oldest test-newest lint package docs bench gpu gpu-offload clean
.DEFAULT_GOAL := test

install: $(INSTALLED)

$(INSTALLED): constraints.txt setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PINNED) 'setuptools>=77'
	$(BIN)/python -m pip install --quiet $(PINNED) --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/byte_gpt/demo.py

# Two processes that each take whole files: what a file prepares once for all of its tests stays prepared once.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder --durations=25

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest --all $(PYTEST_ARGS)

# What people bring, at the versions of the extra "compat"; the other targets do without it.
COMPAT := .venv-compat

test-compat:
	$(MAKE) VENV=$(COMPAT) EXTRAS=dev,compat install
	$(COMPAT)/bin/python -m pytest tests/compat

# Each with an interpreter of its age, if there is one; the floors are in setup.cfg and nowhere else.
OLDEST := .venv-oldest
NEWEST := .venv-newest
OLDEST_PYTHON ?= $(or $(shell for minor in 10 11 12 13; do python3.$$minor -V >/dev/null 2>&1 && echo python3.$$minor && break; done),$(PYTHON))
NEWEST_PYTHON ?= $(or $(shell for minor in 14 13 12 11 10; do python3.$$minor -V >/dev/null 2>&1 && echo python3.$$minor && break; done),$(PYTHON))

test-oldest:
	mkdir -p $(OLDEST)
	$(PYTHON) -m benchmarks.versions.floors > $(OLDEST)/floors.txt
	rm -f $(OLDEST)/.installed
	$(MAKE) VENV=$(OLDEST) EXTRAS=test PYTHON=$(OLDEST_PYTHON) PINNED='-c $(OLDEST)/floors.txt' install
	$(OLDEST)/bin/python -m benchmarks.versions.run oldest

test-newest:
	rm -f $(NEWEST)/.installed
	$(MAKE) VENV=$(NEWEST) EXTRAS=test PYTHON=$(NEWEST_PYTHON) PINNED='--upgrade --upgrade-strategy eager' install
	$(NEWEST)/bin/python -m benchmarks.versions.run newest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p lightning_mist
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m benchmarks.report --check README.md docs/*.md

# The wheel is alone in its environment: what the package needs is taken from $(VENV), where it lies beside it.
PACKAGE := .venv-package

package: $(INSTALLED)
	rm -rf $(PACKAGE) $(PACKAGE)-dist
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install --quiet -c constraints.txt build twine
	$(PACKAGE)/bin/python -m build --outdir $(PACKAGE)-dist . >/dev/null
	$(PACKAGE)/bin/twine check --strict $(PACKAGE)-dist/*
	$(PYTHON) -m venv --clear $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install --quiet --no-deps $(PACKAGE)-dist/*.whl
	$(PACKAGE)/bin/python tests/built_package.py $(PACKAGE)-dist "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

docs: $(INSTALLED)
	$(BIN)/python -m mkdocs build --strict --site-dir site

# Writes records to benchmarks/records and brings the documents' tables up to date with them.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.hardware.profile
	$(BIN)/python -m benchmarks.accuracy.step_times
	$(BIN)/python -m benchmarks.accuracy.published_time
	$(BIN)/python -m benchmarks.accuracy.published_runs
	$(BIN)/python -m benchmarks.accuracy.memory_limits
	$(BIN)/python -m benchmarks.accuracy.summed_needs
	$(BIN)/python -m benchmarks.accuracy.larger_than_memory
	$(BIN)/python -m benchmarks.accuracy.state_on_disk
	$(BIN)/python -m benchmarks.planner.tuning
	$(BIN)/python -m benchmarks.planner.search_times
	$(BIN)/python -m benchmarks.planner.growth
	$(BIN)/python -m benchmarks.planner.command_times
	$(BIN)/python -m benchmarks.planner.against_brute_force
	$(BIN)/python -m benchmarks.planner.against_brute_force --unlike --instances 300
	$(BIN)/python -m benchmarks.planner.processor_seconds
	$(BIN)/python -m benchmarks.throughput.against_ddp
	$(BIN)/python -m benchmarks.parity.table
	$(BIN)/python -m benchmarks.parity.random
	$(BIN)/python -m benchmarks.parity.fabric
	$(BIN)/python -m benchmarks.parity.steps
	$(BIN)/python -m benchmarks.uses.run
	$(BIN)/python -m benchmarks.reports.run
	$(BIN)/python -m benchmarks.demo
	$(BIN)/python -m benchmarks.summary
	$(BIN)/python -m benchmarks.report README.md docs/*.md

# Needs an environment whose torch has CUDA: GPU_PYTHON=python takes what is installed. Writes a record, also of what
# could not be done; GPU_ARGS="--devices 2" takes two cards, and NCCL between them.
GPU_PYTHON ?= $(BIN)/python
GPU_ARGS ?=

gpu:
	$(GPU_PYTHON) -m benchmarks.card $(GPU_ARGS)

# Models of 2.7 and 7 billion parameters under caps of 24 and 40 GiB, for hours, and with 12 bytes or more of host
# memory for each parameter. DeepSpeed is tried if it is installed. GPU_ARGS="--sizes 2.7b --caps 24 --pairs 1" for less.
gpu-offload:
	$(GPU_PYTHON) -m benchmarks.throughput.offload $(GPU_ARGS)

clean:
	rm -rf $(VENV)
