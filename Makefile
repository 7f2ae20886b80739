# Every target sets up what it needs; on a fresh machine `make demo` or `make test` is the first command.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup

# Many small processes share the cores: one thread each is faster than all of them competing.
export OMP_NUM_THREADS := 1
export MPLBACKEND := Agg

.PHONY: help setup demo test servers test-servers lint check format build clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Create .venv and install the project in it

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP) ## Run the asynchronous shopping example
	$(BIN)/python examples/shopping_async.py

test: $(STAMP) ## Run the tests, with warnings as errors
	$(BIN)/pytest

servers: $(STAMP) ## Install servers and clients that others wrote, and models for them, in .servers
	$(PYTHON) tests_servers/setup/install.py

test-servers: servers ## Run the tests against vLLM, llama.cpp, transformers, our own engine, and with clients of others
	$(BIN)/pytest tests_servers --durations=0 --durations-min=5

lint: $(STAMP) ## Check format, style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint test ## Everything that CI runs

format: $(STAMP) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

build: $(STAMP) ## Build the sdist and the wheel in dist/
	rm -rf build dist  # setuptools would pack leftovers
	$(BIN)/python -m build --no-isolation

clean: ## Remove .venv, caches and build output
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
