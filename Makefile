# make serve   try it: sets up .venv, serves the embedded model, prints a request to paste
# make test    lint and tests
# make lint    ruff, mypy, import rules
# make bench   what a step costs the scheduler, and the engine on the embedded model
# make bench-gpu   all targets of docs/performance.md, on a machine with a GPU (MODELS="folder ...")

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODELS ?= $(addprefix bench/configs/,qwen3-0.6b qwen2.5-1.5b qwen3-8b llama-2-7b)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help serve test lint format bench bench-gpu clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

serve: $(STAMP)
	@exec $(BIN)/quire serve --port $(PORT)

test: lint
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_feature_names.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/quire bench scheduler
	$(BIN)/quire bench throughput --case b1 --case b64 --scale 0.25

bench-gpu: $(STAMP)
	$(BIN)/python bench/gpu_table.py $(MODELS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The stamp is newer than what it was installed from, so a second make installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Quire needs Python 3.11 or newer; set PYTHON=/path/to/python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
