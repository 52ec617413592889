# make serve   try it: sets up .venv, serves the embedded model, prints a request to paste
# make test    lint and tests
# make real    fetches three small published models, which `make test` runs where they are there
# make test-all    the same, and the slow tests
# make test-ops, test-one-rank, test-ranks   the tests of `make test` in parts
# make kernels TRITON=3.7.1   Hopper's kernels through another Triton's compiler, without a GPU
# make lint    ruff, mypy, import rules and other checks
# make learn   sets up .venv for the lessons and their exercises, and opens the site
# make lessons   the site of docs and lessons, in build/site
# make core    counts the core's lines of code and writes them into ARCHITECTURE.md
# make bench   what a step costs the scheduler, and the engine on the embedded model
# make bench-gpu-scaling   models on one to eight GPUs, on a machine that has them
# make bench-contract   on a GPU: fails if a recorded case is over 2 % slower than the last release's
# make bench-contract-cpu   the same for the host's work, over 15 %
# make bench-gpu   all targets of docs/performance.md, on a machine with a GPU (MODELS="folder ...")

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
TRITON ?= 3.7.1
# Tests of several processes that compute together.
RANK_TESTS := tests/models/test_parallel.py tests/engine/test_workers.py tests/engine/test_ranks.py \
	tests/server/test_lost_ranks.py
MODELS ?= $(addprefix bench/configs/,qwen3-0.6b qwen2.5-1.5b qwen3-8b llama-2-7b)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests that need a GPU have it to themselves.
PYTEST_WORKERS ?= $(shell command -v nvidia-smi > /dev/null && echo 0 || \
	getconf _NPROCESSORS_ONLN | awk '{ print ($$1 < 8 ? $$1 : 8) }')
# One thread for each of several workers: more would only wait for each other. What pytest makes of
# tests' assertions is kept for the next run, also where the environment wants no such files.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(if $(filter 0 1,$(PYTEST_WORKERS)),$${OMP_NUM_THREADS:-2},1) \
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help serve test real test-all test-ops test-one-rank test-ranks kernels lint learn lessons core format bench bench-contract bench-contract-cpu bench-gpu \
	bench-gpu-scaling clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

serve: $(VENV)/.serve
	@exec $(BIN)/quire serve --port $(PORT)

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ''

real: $(VENV)/.dev
	$(BIN)/python -m tests.real.prepare

test-ops: $(VENV)/.dev
	$(PYTEST) tests/ops

test-one-rank: $(VENV)/.dev
	$(PYTEST) tests --ignore=tests/ops $(addprefix --ignore=,$(RANK_TESTS))

test-ranks: $(VENV)/.dev
	$(PYTEST) $(RANK_TESTS)

kernels: $(VENV)/.dev
	$(PIP) install --quiet --no-deps --target build/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=build/triton-$(TRITON) $(BIN)/python -m tests.ops.compile_kernels --gluon

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy -p lessons
	$(BIN)/lint-imports
	$(BIN)/python tools/check_feature_names.py
	$(BIN)/python tools/check_docstrings.py
	$(BIN)/python tools/check_class_names.py
	$(BIN)/python tools/check_import_circles.py
	$(BIN)/python tools/core.py
	$(BIN)/python bench/report.py --check

lessons: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "Open build/site/index.html; search needs a server: python3 -m http.server -d build/site"

learn: $(VENV)/.learn lessons
	@$(BIN)/python tools/open_site.py

core: $(VENV)/.serve
	$(BIN)/python tools/core.py --markdown

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.serve
	$(BIN)/quire bench scheduler
	$(BIN)/quire bench throughput --case b1 --case b64 --scale 0.25

bench-contract: $(VENV)/.dev
	$(BIN)/python bench/contract.py

bench-contract-cpu: $(VENV)/.dev
	$(BIN)/python bench/contract.py --cpu

bench-gpu: $(VENV)/.dev
	$(BIN)/python bench/gpu_table.py $(MODELS)

bench-gpu-scaling: $(VENV)/.dev
	$(BIN)/python bench/scaling.py

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# A stamp is newer than what it was installed from, so a second make installs nothing.
$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Quire and what it needs to serve into $(VENV); PyTorch is most of it."
	$(PIP) install --progress-bar on -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing what tests and linters need into $(VENV)."
	$(PIP) install --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.serve
	@echo "Installing what the site needs into $(VENV)."
	$(PIP) install --progress-bar on -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.learn: $(VENV)/.serve
	@echo "Installing what the lessons' plots, kernels and exercises need into $(VENV)."
	$(PIP) install --progress-bar on -c constraints.txt -e '.[learn]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Quire needs Python 3.11 or newer; set PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Creating $(VENV)."
	$(PYTHON) -m venv $(VENV)
