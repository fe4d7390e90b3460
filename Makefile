SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
LOCKED := --require-hashes --only-binary :all: --requirement
# tells of pip's output (PIP_VERBOSE=1 takes --quiet back) each 25th file, and when what was fetched is installed
define STAGES
import re, sys
files = 0
for line in iter(sys.stdin.readline, ""):
    if re.match(r" *(Downloading|Using cached|Processing) .*\.whl( |$$)", line):
        files += 1
        if files % 25 == 0:
            print(files, "packages fetched ...")
    elif line.startswith("Installing collected packages"):
        print("installing", files, "packages ...")
endef
export STAGES
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# compiled once, and not in every process that the tests start
unexport PYTHONDONTWRITEBYTECODE

# `make` alone says what there is: a line for each target that ends in "## what it does"
.DEFAULT_GOAL := help
.PHONY: help setup lock demo test test-slow browser check format bench attacks estimate clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## .venv with pinned dependencies and the demo's model

# torch first: what else is needed depends on its build, see lock.py. pip is left to choose the build without hashes, as
# with hashes it would pass over a CPU build in a folder of wheels; then it installs only a known one
$(READY): pyproject.toml constraints.txt requirements.lock lock.py setup.py $(wildcard wire/ring/*.[ch] noise/polynomial/*.[ch] tenant_sdk/serving/attention/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed (PYTHON=... names one)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python lock.py torch > $(VENV)/torch.txt
	@echo "downloading torch, 0.2 GB or, with CUDA, 1 GB, which takes a minute or more ..."
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --constraint constraints.txt --dest $(VENV)/torch torch
	@echo "installing torch, which takes half a minute or more ..."
	$(INSTALL) --no-index --find-links $(VENV)/torch $(LOCKED) $(VENV)/torch.txt
	rm -r $(VENV)/torch
	$(BIN)/python lock.py dev build model > $(VENV)/locked.txt
	@echo "downloading and installing all other packages and the demo's model, which takes a few minutes ..."
	@set -o pipefail; PIP_VERBOSE=1 $(INSTALL) $(LOCKED) $(VENV)/locked.txt \
	| $(PYTHON) -u -c "$$STAGES"
	@echo "compiling the kernels, which takes a minute or two ..."
	$(INSTALL) --no-build-isolation --editable .
	@touch $(READY)

# pip takes the versions from the index that it is set up for, and uv from the one that UV_DEFAULT_INDEX names
lock: ## requirements.lock anew, after a change of pyproject.toml or constraints.txt
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" && \
	"$$folder/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9 && "$$folder/bin/python" lock.py --write

demo: $(READY) ## the main job, end to end, on a real model
	$(BIN)/python examples/demo.py

test: $(READY) ## all tests but the slow ones
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

# whole attacks, simulations, tenants beside killed shards, the soak, commands as processes, the README's commands
test-slow: $(READY) browser ## the slow ones: whole attacks, simulations, commands as processes
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "slow and not ray"
	$(BIN)/python -m pytest -m ray

# for the test of the endpoint's page, which skips and says so where there is no browser
browser: ## chromium for the test of the page, where apt-get can install it
	@for name in chromium-headless-shell chromium google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get && export DEBIAN_FRONTEND=noninteractive && apt-get update && \
	timeout 600 apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1 || \
	echo "no browser here, and none could be installed: the test of the page skips"

check: $(READY) ## ruff, its formatter, mypy (also of the Python in README and docs), import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/doc_blocks.py
	$(BIN)/lint-imports

format: $(READY) ## what ruff can mend and lay out by itself
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(READY) ## the figures of docs/benchmarks.md
	$(BIN)/python -m benchmarks

attacks: $(READY) ## the provider as an adversary: docs/security-evaluation.md
	$(BIN)/python -m attacks.extract_lora --out report
	$(BIN)/python -m attacks.game --out report
	$(BIN)/python -m attacks.active --out report
	$(BIN)/python -m attacks.overflow --out report
	$(BIN)/python -m attacks.weakenings --out report
	$(BIN)/python -m attacks.growth --out report

# DIR is a checkout of lattice-estimator; SAGE=FOLDER an environment with Sage, made where there is no such folder
estimate: ## the bits of noise/params.py again: make estimate ESTIMATOR=DIR, docs/parameters.md
	@$(PYTHON) -m benchmarks.estimate "$(ESTIMATOR)" --sage "$(or $(SAGE),.sage)"

clean: ## remove .venv and .demo
	rm -rf $(VENV) .demo
