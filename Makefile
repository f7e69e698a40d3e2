# `make demo` and `make test` are all that a newcomer needs; both set up what they use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint setup tutorials docs build checkpoint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/minillava reproduce --preset quick --open-report

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Run every tutorial and write its notebook.
tutorials: setup
	$(BIN)/python tutorials/build.py

# The site, as static pages in docs/site/build.
docs: setup
	$(BIN)/pip install -q -e '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -q docs/site docs/site/build

# Compile the LayerNorm kernels against the torch that is installed: CUDA where there is a toolkit, else C++.
build: setup
	MINILLAVA_BUILD=1 $(BIN)/pip install -q --no-build-isolation --no-deps -e .

clean:
	rm -rf $(VENV) build *.egg-info minillava/*.so

# The model that ships: the aligned arm of the quick preset, in half precision.
checkpoint: setup
	$(BIN)/minillava reproduce --preset quick
	$(BIN)/python -c "from pathlib import Path; from minillava.checkpoint import load_model, save_model; \
	save_model(Path('minillava/checkpoint'), *load_model(Path('runs/quick/aligned-seed0/model-0.002')), half=True)"
