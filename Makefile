# These do all their own set-up, from a bare python3: `make demo` and `make test` in .venv, `make integrations` in .venv-integrations.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_INSTALLED := $(VENV)/.demo-installed
INSTALLED := $(VENV)/.installed
TOOLS_VENV := .venv-integrations
TOOLS_BIN := $(TOOLS_VENV)/bin
TOOLS_INSTALLED := $(TOOLS_VENV)/.installed
# Modules are compiled when they are first imported, as most never are; that must be kept, for all the worker processes of a test run.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
BOUNDS_CACHE := $(abspath $(VENV))/.bounds-cache
PARALLEL := -n auto --maxprocesses 8 --dist loadfile
# Ranks of a distributed test often wait for each other: one file more than this has cores for.
FRAMEWORK := -n 3 --dist loadfile

# What the demo trains by: its kernels are compiled with the set-up.
DEMO_CODECS := topr:0.01/rice/qsgd topr:0.01/rice/fitpoly topr:0.01/bloom:p2,fpr=0.001/qsgd

.PHONY: demo test lint types unit bounds integrations golden clean

demo: $(DEMO_INSTALLED)
	$(BIN)/deepreduce demo --report report

test: lint types unit bounds

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy --strict src

# The kernels are compiled first, before many processes would each do so at the same time. Then each framework by itself: its ranks are
# forked from a server that has imported it already, and there is one such server in a process.
unit: $(INSTALLED)
	$(BIN)/deepreduce warmup
	$(BIN)/pytest $(PARALLEL) tests/test_*.py src
	$(BIN)/pytest $(FRAMEWORK) tests/jax
	$(BIN)/pytest $(FRAMEWORK) tests/tensorflow
	$(BIN)/pytest $(FRAMEWORK) tests/torch tests/integrations/test_fsdp.py

# The kernels once more, with every array access checked; compiled code is cached apart, as the cache does not tell the two apart.
bounds: $(INSTALLED)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(BOUNDS_CACHE) $(BIN)/pytest $(PARALLEL) tests/test_kernels_*.py

# The tools people train with, in a place of their own: they bring a hundred packages that nothing else needs.
integrations: $(TOOLS_INSTALLED)
	$(TOOLS_BIN)/pytest tests/integrations src/deepreduce/integrations

# The only writer of tests/golden: run it by hand when the format gains something, never to make a test pass.
golden: $(INSTALLED)
	$(BIN)/python tests/golden/write.py

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(DEMO_INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e ".[demo]"
	$(BIN)/deepreduce warmup --dtype float32 $(addprefix --codec ,$(DEMO_CODECS))
	touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e ".[dev]"
	touch $@ $(DEMO_INSTALLED)

$(TOOLS_BIN)/pip:
	$(PYTHON) -m venv $(TOOLS_VENV)

$(TOOLS_INSTALLED): pyproject.toml constraints.txt | $(TOOLS_BIN)/pip
	$(TOOLS_BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[integrations]"
	touch $@

clean:
	rm -rf $(VENV) $(TOOLS_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
