# Two commands: `make run` and `make test`. Each sets up what it needs in .venv, from the package index alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# exact versions; .ci/newest.txt and out/lowest.txt are the ends of what pyproject.toml allows
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
OUT ?= out

.PHONY: run test test-slow coverage lint wheel bench docs docs-fresh clean help

run: $(VENV)/.lab  ## redraw every claim of the paper, small: figures, predictions and verdicts in one HTML report
	$(BIN)/keyhole reproduce --preset quick --out $(OUT)/reproduce
	@echo "theory and experiment on one page: $(BIN)/keyhole explore --out $(OUT)/reproduce"

# one thread for BLAS and one for torch: two of them spin on the small matrices of tests
test: $(VENV)/.test  ## the tests, doctests of README and docstrings included
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.test  ## the slow statistical runs
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

coverage: $(VENV)/.test  ## which lines the tests run: a table, and pages in out/coverage
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder \
	  --cov --cov-report=term:skip-covered --cov-report=html:$(OUT)/coverage

lint: $(VENV)/.lint  ## ruff, mypy --strict, and the language of pages, docstrings and messages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/words.py

wheel: $(VENV)/.wheel  ## wheel and sdist, each installed alone into an empty environment: it fits, saves and predicts there
	rm -rf $(OUT)/wheel $(OUT)/wheel-env $(OUT)/sdist-env
	$(BIN)/python -m build --sdist --wheel --no-isolation --outdir $(OUT)/wheel . > /dev/null
	$(PYTHON) -m venv $(OUT)/wheel-env
	$(OUT)/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(OUT)/wheel/*.whl
	$(OUT)/wheel-env/bin/python -W error -P tests/wheel.py
	$(PYTHON) -m venv $(OUT)/sdist-env
	$(OUT)/sdist-env/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(OUT)/wheel/*.tar.gz
	$(OUT)/sdist-env/bin/python -W error -P tests/wheel.py

bench: $(VENV)/.bench  ## every hot path beside its baselines, in one run
	$(BIN)/python benchmarks/hot_paths.py

docs: $(VENV)/.docs  ## these pages as HTML, in out/docs, with saved views of `keyhole explore`
	$(BIN)/sphinx-build -q -W --keep-going -b html docs $(OUT)/docs
	$(BIN)/python docs/views.py $(OUT)/docs/figures $(OUT)/docs/views
	@echo "wrote $(OUT)/docs/index.html"

docs-fresh:  ## the pages from nothing: in an environment of their own, with what the docs extra names and no more
	rm -rf $(OUT)/docs-env $(OUT)/docs docs/generated docs/gallery
	$(MAKE) docs VENV=$(OUT)/docs-env
	rm -rf $(OUT)/docs-env

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

clean:  ## remove the environment and everything made
	rm -rf $(VENV) $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(OUT)/lowest.txt: pyproject.toml
	@mkdir -p $(OUT)
	$(PYTHON) .ci/lowest.py > $@

$(VENV)/.core: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "keyhole needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.lab: $(VENV)/.core
	$(PIP) -e ".[lab]"
	@touch $@

$(VENV)/.wheel: $(VENV)/.core
	$(PIP) -e ".[wheel]"
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) -e ".[test,lint]"
	@touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP) -e ".[bench]"
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) -e ".[docs]"
	@touch $@
