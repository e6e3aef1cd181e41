# `make check` is what CI runs. Every target prints its commands.
# Another interpreter: `make gpu PYTHON=python3`; it is used as it is and nothing is installed.

PYTHON ?= .venv/bin/python
BASE_PYTHON ?= python3
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-demo

# A rank computes with one thread; two ranks with a pool of threads each fight for the cores.
ONE_THREAD := OMP_NUM_THREADS=1
# Ranks wait for each other: three tests at once fill two cores.
AT_ONCE := -n 3 --dist worksteal

ifeq ($(PYTHON),.venv/bin/python)
INSTALLED := $(STAMP)
# The demo needs no tools for tests; what `make setup` has installed is enough.
DEMO_INSTALLED := $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
endif

.PHONY: setup demo test test-all gpu lint format type docs check bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install "$$(grep '^torch==' constraints.txt)"
	.venv/bin/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

$(DEMO_STAMP): pyproject.toml constraints.txt
	test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install --no-compile "$$(grep '^torch==' constraints.txt)"
	.venv/bin/python -m pip install --no-compile --constraint constraints.txt --editable .
	touch $@

demo: $(DEMO_INSTALLED)
	$(ONE_THREAD) $(PYTHON) examples/gpt/train.py fit --config examples/gpt/cpu.yaml

test: $(INSTALLED)
	$(ONE_THREAD) $(PYTHON) -m pytest $(AT_ONCE) -m "not slow and not gpu and not alone"
	$(ONE_THREAD) $(PYTHON) -m pytest -m "alone and not slow and not gpu"

test-all: $(INSTALLED)
	$(ONE_THREAD) $(PYTHON) -m pytest $(AT_ONCE) -m "not gpu and not alone"
	$(ONE_THREAD) $(PYTHON) -m pytest -m "alone and not gpu"

# Arguments: `make gpu GPU="--only step/ --again"`.
gpu:
	$(ONE_THREAD) $(PYTHON) -m benchmarks.gpu $(GPU)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m codespell_lib $$(git ls-files)

format: $(INSTALLED)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

type: $(INSTALLED)
	$(PYTHON) -m mypy --strict lightning_zero lightning_zero_ops

# The pages of docs/ as a site in build/site; a link that leads nowhere fails.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --site-dir build/site

check: lint type docs test

bench: $(INSTALLED)
	$(ONE_THREAD) $(PYTHON) -m benchmarks.run
