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
# Whole files to a process: tests of one file often need the same kernels.
FILES := -n 2 --dist loadfile

# What the demo trains by: its kernels are compiled with the set-up.
DEMO_CODECS := topr:0.01/rice/qsgd topr:0.01/rice/fitpoly topr:0.01/bloom:p2,fpr=0.001/qsgd

.PHONY: demo test lint types kernels unit core torch tensorflow jax bounds integrations golden clean

demo: $(DEMO_INSTALLED)
	$(BIN)/deepreduce demo --report report

# Two suites at a time, as ranks of a distributed test often wait for each other; each prints what it found when it is done.
test: lint
	$(MAKE) --jobs 2 --output-sync=line types unit bounds

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy --strict src

unit: core torch tensorflow jax

# Before the tests, as all their processes would compile the same kernels otherwise.
kernels: $(INSTALLED)
	$(BIN)/deepreduce warmup

core: kernels
	$(BIN)/pytest $(FILES) tests/test_*.py src

# Each framework by itself: its ranks are forked from a server that has imported it already, and there is one such server in a process.
torch: kernels
	$(BIN)/pytest $(FILES) tests/torch

tensorflow: kernels
	$(BIN)/pytest $(FILES) tests/tensorflow

jax: kernels
	$(BIN)/pytest $(FILES) tests/jax

# The kernels once more, with every array access checked.
bounds: $(INSTALLED)
	NUMBA_BOUNDSCHECK=1 $(BIN)/pytest $(FILES) tests/test_kernels_*.py

# The tools people train with, in a place of their own: they bring a hundred packages that nothing else needs.
integrations: $(TOOLS_INSTALLED)
	$(TOOLS_BIN)/pytest $(FILES) tests/integrations src/deepreduce/integrations

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
