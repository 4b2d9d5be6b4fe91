# Two commands for newcomers: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Where there is no GPU: torch's CUDA build on a simulated one (tests/simcuda). Never install anything there that
# needs torch: pip would bring NVIDIA's libraries, and torch would take those.
GPU_VENV := .venv-gpu
GPU_PIP := $(GPU_VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt
GPU_TESTS := -m pytest -q --confcutdir=tests/gpu tests/gpu
QUICK_TESTS := tests/test_architecture.py tests/test_bound.py tests/test_cli.py tests/test_config.py tests/test_devices.py \
  tests/test_formulas.py tests/test_measuring.py tests/test_monitor.py tests/test_observe.py tests/test_record.py \
  tests/test_steps.py tests/test_timing.py tests/test_training_monitor.py tests/test_waterfall.py

.PHONY: help demo test test-all check coverage test-gpu gpu-truth gpu-evidence simulated-gpu test-versions lint results pictures clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small GPT for half a minute and watch its MFU"
	@echo "make test    linters, types and tests"
	@echo "make test-all  the same, with tests that are slow and say little more"
	@echo "make coverage  the tests, and which lines of src/ they reach"
	@echo "make check   linters, types and a quick part of the tests: three minutes"
	@echo "make lint    linters and types only"
	@echo "make test-gpu  what a CUDA device can show: on yours, else on a simulated one"
	@echo "make gpu-truth  verdict, waterfall and MFU against what the simulated device did"
	@echo "make gpu-evidence  ten minutes on your GPU: one file that you can send us"
	@echo "make test-versions  the tests of TORCH_TESTS on every torch of TORCH_VERSIONS (gigabytes), into docs/versions.md"
	@echo "make results   a short run of every benchmark, then the README's tables from the results on file"
	@echo "make pictures  the README's pictures, from real runs in a real browser"
	@echo "make clean   remove the virtual environment and caches"

demo: $(VENV)/.ready-demo
	@$(BIN)/flopmeter demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ""

# Its own warnings on stderr, and its hold on forked workers, fail a handful of tests that look at just those.
coverage: $(VENV)/.ready-test
	-$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term

check: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK_TESTS)

# Without a GPU, a compiler or torch's CUDA build there is nothing to test: one line says so.
test-gpu: $(VENV)/.ready-test
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/python $(GPU_TESTS); \
	elif [ "$$(uname -sm)" != "Linux x86_64" ] || ! command -v g++ readelf nm >/dev/null; then \
	  echo "tests/gpu did not run: no CUDA device, and the simulated one needs Linux on x86-64, g++ and binutils"; \
	elif ! $(MAKE) -s $(GPU_VENV)/.ready 2>/dev/null; then \
	  echo "tests/gpu did not run: no CUDA device, and torch's CUDA build for the simulated one could not be installed"; \
	else \
	  $(MAKE) -s simulated-gpu && for devices in 1 2; do echo "tests/gpu, simulated devices: $$devices"; \
	    SIMCUDA_DEVICES=$$devices tests/simcuda/run python $(GPU_TESTS) || exit 1; done; fi

# Only the simulated device knows what it did.
gpu-truth: simulated-gpu
	tests/simcuda/run python benchmarks/gpu_truth.py

TORCH_VERSIONS := 2.6.0 2.8.0 2.9.1 2.10.0 2.12.1 2.13.0 2.15.0
TORCH_TESTS := tests/test_torch_versions.py
# A folder of environments that are there already, each named after its version, is used as it is.
TORCH_ENVIRONMENTS ?= .venv-versions

test-versions: $(VENV)/.ready-test
	$(BIN)/python scripts/test_versions.py $(TORCH_VERSIONS) --tests $(TORCH_TESTS) --environments $(TORCH_ENVIRONMENTS)

# The short form only shows that every benchmark runs: the figures on file come from full runs on a quiet machine.
results: $(VENV)/.ready-test
	@for line in "overhead.py --quick" "profiler_cost.py --quick" "report.py --short" "planted.py --quick" "distributed.py --quick" \
	  "soak.py --short" "run_script.py --short" "integrations.py --short" "mutation.py --quick" "waterfall.py --quick" "wild.py --short" \
	  "prediction.py --quick" "tried.py --short"; do \
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

gpu-evidence: $(VENV)/.ready-test
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	  then $(BIN)/python scripts/gpu_evidence.py; \
	  else $(MAKE) -s simulated-gpu && tests/simcuda/run python scripts/gpu_evidence.py; fi

simulated-gpu: $(GPU_VENV)/.ready $(GPU_VENV)/simcuda/.built

# The build without a local version ("===") is the one for CUDA; a folder of CPU builds cannot take its place.
$(GPU_VENV)/.torch: constraints.txt
	@echo "Making $(GPU_VENV) with torch's CUDA build, without NVIDIA's libraries (once) ..."
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(GPU_PIP) --no-deps "torch===$$(sed -n 's/^torch==//p' constraints.txt)"
	@touch $@

$(GPU_VENV)/.ready: $(GPU_VENV)/.torch pyproject.toml
	@$(GPU_VENV)/bin/python -c "from importlib.metadata import requires; print(*[each for each in requires('torch') \
	  if 'extra' not in each and not each.startswith(('nvidia', 'cuda'))], sep='\n')" > $(GPU_VENV)/torch-needs.txt
	@$(GPU_PIP) -r $(GPU_VENV)/torch-needs.txt -e '.[nvml,resources]' numpy pytest pytest-timeout 2> $(GPU_VENV)/pip.txt \
	  || { cat $(GPU_VENV)/pip.txt >&2; exit 1; }
	@touch $@

$(GPU_VENV)/simcuda/.built: $(GPU_VENV)/.torch tests/simcuda/build.sh $(wildcard tests/simcuda/*.cpp tests/simcuda/*.h tests/simcuda/*.py)
	@echo "Building the simulated CUDA device ..."
	@tests/simcuda/build.sh $(GPU_VENV)/bin/python $(GPU_VENV)/simcuda
	@touch $@

clean:
	rm -rf $(VENV) $(GPU_VENV) .venv-versions .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
