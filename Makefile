# The two commands of a newcomer: make demo, make test. Both set everything up in $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU tests need no CUDA build of torch, which is several GB; the worker itself takes any torch from 2.11 on.
TORCH := torch==2.13.0
export OMP_NUM_THREADS := 1

.PHONY: demo test lint types stubs protos unit service clean

demo: $(VENV)/.runs
	$(BIN)/python -m tandem.demo

test: lint types stubs unit service

$(VENV)/.runs: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Tandem needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[worker]'
	touch $@

$(VENV)/.develops: $(VENV)/.runs
	$(BIN)/pip install --quiet --editable '.[worker,dev]'
	touch $@

# Proves that the scheduler needs no torch: there is none in this environment.
$(VENV)-scheduler/.runs: pyproject.toml
	$(PYTHON) -m venv $(VENV)-scheduler
	$(VENV)-scheduler/bin/pip install --quiet --editable . hypothesis 'pytest>=9'
	touch $@

lint: $(VENV)/.develops
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint

types: $(VENV)/.develops
	$(BIN)/mypy shared scheduler_svc worker_svc tandem bench

stubs: $(VENV)/.develops
	$(BIN)/python protos/generate.py --check

protos: $(VENV)/.develops
	$(BIN)/python protos/generate.py

# Tests of one part each, on all cores; the scheduler core's run where torch is not installed.
unit: $(VENV)/.develops $(VENV)-scheduler/.runs
	$(VENV)-scheduler/bin/python -m pytest tests/core tests/shared
	$(BIN)/python -m pytest -n auto --dist worksteal tests --ignore tests/core --ignore tests/shared --ignore tests/service

# Tests of all parts together: real processes, real gRPC, killed and stopped. A file shares its services.
service: $(VENV)/.develops
	$(BIN)/python -m pytest -n auto --dist loadfile tests/service

clean:
	rm -rf $(VENV) $(VENV)-scheduler *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
