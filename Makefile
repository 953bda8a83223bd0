# `make demo` and `make test` need Python 3.11 to 3.13 and the network once; nothing else.

VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin

# The first that works. 3.11 first: constraints.txt was made with it.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	2>/dev/null && echo $$python && break; done)

# These targets run what is in this directory, so they may do it as root (in CI, in a container).
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

.PHONY: demo test test-unit test-launched test-plugins lint format setup clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: test-unit test-launched test-plugins

test-unit: $(READY)
	$(BIN)/python -m pytest tests/unit tests/conformance

test-launched: $(READY)
	$(BIN)/python -m pytest tests/launched

test-plugins: $(READY)
	$(BIN)/python -m pytest $(wildcard $(addprefix tests/,launch torch tensorflow keras lightning examples))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

# venv without ensurepip (Debian without python3-venv) is rescued by virtualenv.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 found; say PYTHON=/path/to/it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m pip install virtualenv && $(PYTHON) -m virtualenv $(VENV); }
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]' --group test --group lint
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist
