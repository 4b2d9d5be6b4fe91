# Two commands for newcomers: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help demo test coverage test-gpu test-versions lint results pictures clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small GPT for half a minute and watch its MFU"
	@echo "make test    linters, types and tests"
	@echo "make coverage  the tests, and which lines of src/ they reach"
	@echo "make lint    linters and types only"
	@echo "make test-gpu  what only a CUDA device can show"
	@echo "make test-versions  the tests of TORCH_TESTS on every torch of TORCH_VERSIONS (gigabytes), into docs/versions.md"
	@echo "make results   a short run of every benchmark, then the README's tables from the results on file"
	@echo "make pictures  the README's pictures, from real runs in a real browser"
	@echo "make clean   remove the virtual environment and caches"

demo: $(VENV)/.ready-demo
	@$(BIN)/flopmeter demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Its own warnings on stderr, and its hold on forked workers, fail a handful of tests that look at just those.
coverage: $(VENV)/.ready-test
	-$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term

test-gpu: $(VENV)/.ready-test
	$(BIN)/python -m pytest tests/gpu

TORCH_VERSIONS := 2.6.0 2.8.0 2.9.1 2.10.0 2.12.1 2.13.0 2.15.0
TORCH_TESTS := tests/test_torch_versions.py
# A folder of environments that are there already, each named after its version, is used as it is.
TORCH_ENVIRONMENTS ?= .venv-versions

test-versions: $(VENV)/.ready-test
	$(BIN)/python scripts/test_versions.py $(TORCH_VERSIONS) --tests $(TORCH_TESTS) --environments $(TORCH_ENVIRONMENTS)

# The short form only shows that every benchmark runs: the figures on file come from full runs on a quiet machine.
results: $(VENV)/.ready-test
	@for line in "overhead.py --quick" "profiler_cost.py --quick" "report.py --short" "planted.py --quick" "distributed.py --quick" \
	  "soak.py --short" "run_script.py --short" "integrations.py --short" "mutation.py --quick" "waterfall.py --quick"; do \
	  echo "benchmarks/$$line"; $(BIN)/python benchmarks/$$line > $(VENV)/result.txt || exit 1; done
	$(BIN)/python scripts/write_results.py

pictures: $(VENV)/.ready-test
	$(BIN)/python scripts/make_pictures.py

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A torch that the chosen Python already has is used as it is; only without one is torch installed.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("flopmeter needs Python 3.10 or newer: make PYTHON=python3.x") if sys.version_info < (3, 10) else None'
	@echo "Making $(VENV) ..."
	@if $(PYTHON) -c 'import torch' 2>/dev/null; \
	  then $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else $(PYTHON) -m venv $(VENV); fi
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "Installing torch (once) ..."; $(PIP) torch numpy; }
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.made pyproject.toml
	@echo "Installing flopmeter (once) ..."
	@$(PIP) -q -e '.[serve,transformers]'
	@touch $@

$(VENV)/.ready-test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing flopmeter and what its tests need (once) ..."
	@$(PIP) -q -e '.[dev]'
	@touch $@ $(VENV)/.ready-demo

clean:
	rm -rf $(VENV) .venv-versions .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
