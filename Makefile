# Two commands do all their own set-up in .venv, from a bare python3: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BOUNDS_CACHE := $(abspath $(VENV))/.bounds-cache

.PHONY: demo test lint types unit bounds golden clean

demo: $(INSTALLED)
	$(BIN)/python examples/sizes.py

test: lint types unit bounds

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy --strict src

unit: $(INSTALLED)
	$(BIN)/pytest

# The kernels once more, with every array access checked; compiled code is cached apart, as the cache does not tell the two apart.
bounds: $(INSTALLED)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(BOUNDS_CACHE) $(BIN)/pytest tests/test_kernels_*.py

# The only writer of tests/golden: run it by hand when the format gains something, never to make a test pass.
golden: $(INSTALLED)
	$(BIN)/python tests/golden/write.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,torch,plot]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
