# The verbs that people and CI share. `make help` lists them.
#
# VENV names the environment; every verb makes it, and brings it up to date when pyproject.toml changes.
# TORCH is what pip is asked for; a machine with its own build of torch can name that. JOBS is how many
# tests run at once, for two cores one more: many wait for servers, browsers and clocks. MARKS says which.

VENV  ?= .venv
TORCH ?= torch==2.13.0
PYTHON3 ?= python3
JOBS  ?= 3
MARKS ?= not gpu and not slow

PYTHON := $(VENV)/bin/python
# On a terminal pip shows how far it is; elsewhere it only tells of errors.
PIP    := $(PYTHON) -m pip --disable-pip-version-check --no-input $(shell test -t 2 || echo -qq)
READY  := $(VENV)/.kvatlas
DEV    := $(VENV)/.kvatlas-dev
# uv finds and unpacks a hundred packages in a sixth of pip's time. torch stays pip's: uv takes the one that is
# there, and knows neither pip's settings nor a build of torch that they lead to. Where uv reaches no index, pip
# installs the rest too.
QUIET  := $(shell test -t 2 || echo -q)
INSTALL = $(PIP) install --no-compile "$(TORCH)" "uv>=0.9,<1" && \
  { $(PYTHON) -m uv pip install $(QUIET) --python $(PYTHON) -e '.[$(1)]' || \
    { echo "uv could not, so pip does it"; $(PIP) install --no-compile -e '.[$(1)]'; }; }

# A checkout runs without being installed: protos/ holds the package kvatlas.
export PYTHONPATH := $(CURDIR)/protos
# Tests start hundreds of processes. Where this is set, as in many containers, each would compile all its sources again.
export PYTHONDONTWRITEBYTECODE :=
# One process computes with all cores; many tests at once must not each start a thread per core.
TEST_ENV := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo serve up down test test-all test-gpu memcheck test-clients sim check fix bench audit protos clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV)  ## environment with everything; the git hook too, where pre-commit is installed
	@if command -v pre-commit >/dev/null && [ -d .git ] && [ -z "$(CI)" ]; then pre-commit install; fi
	@echo "ready: $(PYTHON)"

demo: $(READY)  ## fetch the small model, serve it, ask twice, show the page map
	@$(PYTHON) -m kvatlas.cli demo

serve: $(READY)  ## worker and service on this machine, on port 50051
	@$(PYTHON) -m kvatlas.cli serve

# Compose's two command lines differ in one blank.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

up:  ## service, worker, dashboard, Prometheus, Alertmanager and Grafana in containers
	@$(COMPOSE) up --build --detach

down:  ## ends them in order; what they have kept stays
	@$(COMPOSE) down

test: $(DEV)  ## what needs neither a GPU nor patience
	@$(TEST_ENV) $(PYTHON) -m pytest -q -n $(JOBS) --dist worksteal -m "$(MARKS)" $(PYTEST_ARGS)

test-all: $(DEV)  ## all that this machine can run
	@$(TEST_ENV) $(PYTHON) -m pytest -q $(PYTEST_ARGS)

test-gpu: $(DEV)  ## what needs a CUDA device
	@$(PYTHON) -m pytest -q -m gpu $(PYTEST_ARGS)

# Every tensor gets an allocation of its own, or a read past one would hit the next; graphs need the allocator.
memcheck: $(DEV)  ## the kernel tests under compute-sanitizer
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \
	  --target-processes all --error-exitcode 9 --launch-timeout 0 $(PYTHON) -m pytest -q --timeout 0 \
	  -m "gpu and not slow" -k "not graph and not captured and not chain" \
	  $(patsubst %,tests/gpu/test_%_gpu.py,attention cluster_decode decode_product decode_stretches ring_product \
	  sample_kernel sliced_product small_kernels) $(PYTEST_ARGS)

test-clients: $(DEV)  ## Node and buf curl against a real server
	@$(TEST_ENV) $(PYTHON) -m pytest -q tests/integration/test_foreign_clients.py $(PYTEST_ARGS)

sim: $(DEV)  ## the whole control plane from many seeds
	@$(TEST_ENV) $(PYTHON) -m pytest -q tests/simulation $(PYTEST_ARGS)

check: $(DEV)  ## format, lint, types, import contracts, protos
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m mypy
	@PYTHONPATH=$(CURDIR)/protos:$(CURDIR) $(VENV)/bin/lint-imports --no-logo
	@$(PYTHON) protos/generate.py --check
	@$(VENV)/bin/buf lint protos
	@$(VENV)/bin/buf format --diff --exit-code protos
	@tag=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true); \
	if [ -n "$$tag" ]; then \
	  echo "buf breaking against $$tag"; \
	  $(VENV)/bin/buf breaking protos --against ".git#tag=$$tag,subdir=protos"; \
	else echo "buf breaking: no release tag yet"; fi

fix: $(DEV)  ## the mirror of check: format, safe fixes, protos, dashboards, tables of the docs
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .
	@$(VENV)/bin/buf format --write protos
	@$(PYTHON) protos/generate.py
	@$(PYTHON) -m deploy.grafana.generate
	@$(PYTHON) -m docs.tables
	@$(PYTHON) -m docs.metric_tables

bench: $(DEV)  ## what a step, a token and a stream cost, into benchmarks/results/
	@$(PYTHON) -m benchmarks.control_plane
	@$(PYTHON) -m benchmarks.cpu "$$($(PYTHON) -m kvatlas.cli pull)"
	@$(PYTHON) -m benchmarks.streaming

# Asks the registries' advisory services, which mirrors often lack: not part of `check`.
audit: $(DEV)  ## known vulnerabilities of what the images pin, and of Node's packages
	@$(PIP) install "pip-audit>=2.9"
	@for image in service dashboard worker; do \
	  $(PYTHON) -m pip_audit --strict --disable-pip --require-hashes -r deploy/requirements/$$image.txt || exit 1; done
	@npm audit --prefix examples/node
	@npm audit --prefix deploy/grafana/schema

protos: $(DEV)  ## compile the protos beside their sources
	@$(PYTHON) protos/generate.py

clean:  ## remove the environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache examples/node/node_modules

# The environment of `make demo` has no tools; the one of all other verbs does, and serves the demo too.
# Neither is compiled here: Python compiles what is imported when it first is, a small part of all.

$(PYTHON):
	@echo "making $(VENV)"
	@$(PYTHON3) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }

$(DEV): pyproject.toml | $(PYTHON)
	@echo "installing torch, kvatlas and the tools (once)"
	@$(call INSTALL,dev)
	@touch $(READY) $(DEV)

$(READY): pyproject.toml | $(PYTHON)
	@if [ -f $(DEV) ]; then $(MAKE) --no-print-directory $(DEV); else \
	  echo "installing torch and kvatlas (once)"; \
	  $(call INSTALL,all) && touch $(READY); fi
