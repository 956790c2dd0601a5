# The one door: `make demo` and `make test` set everything up on a fresh machine.

PYTHON ?= python3
VENV   ?= .venv
WORKERS ?= 2
BIN    := $(VENV)/bin
# Most modules are never imported, so they are compiled when they are, not when they are installed.
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

# Two pytest workers share the machine, and the demo's models are small: threads that wait for each
# other cost more than they bring, and ten times as much on a busy machine (benchmarks/LOG.md).
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all compiler test-kernels check package-check docs bench-cpu clean

help:
	@echo "make demo         set up, then do the whole job on the bundled model family"
	@echo "make test         set up, then format, linters, types, import layers and the tests"
	@echo "make test-all     make check, and the tests with the cases that are marked as slow"
	@echo "make test-kernels compile every instance of every kernel for every architecture"
	@echo "make check        format, linters, types (of benchmarks, too) and import layers only"
	@echo "make docs         the documentation site, in site/, with every link checked"
	@echo "make bench-cpu    the long comparisons (an hour); results go to benchmarks/results"
	@echo "make clean        remove $(VENV)"

demo: $(VENV)/.package
	$(BIN)/g4spec demo

RUN_TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=25

test: compiler package-check.beside
	$(RUN_TESTS) $(PYTEST)

test-all: compiler check.beside
	$(RUN_TESTS) -m '' $(PYTEST)

# The checks, of which mypy takes most, leave a core idle; the rest of a new installation uses it.
%.beside:
	@$(MAKE) --no-print-directory -j2 $* $(VENV)/.oracle

compiler:
	@command -v g++ >/dev/null || { echo "the tests need g++, which compiles the kernels for a CPU; Debian, Ubuntu: apt install g++" >&2; exit 1; }

test-kernels: $(VENV)/.tests
	G4SPEC_COMPILE=all $(BIN)/python -m pytest tests/arch/test_kernels.py

check: package-check
	$(BIN)/mypy --num-workers=2 --config-file=benchmarks/mypy.ini

package-check: $(VENV)/.tests
	$(BIN)/ruff check g4spec tests benchmarks packaging docs
	$(BIN)/ruff format --check --quiet g4spec tests benchmarks packaging docs examples
	$(BIN)/mypy --num-workers=2
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/linkchecker --config docs/linkchecker.ini site/index.html

bench-cpu: $(VENV)/.oracle
	@for script in benchmarks/cpu_*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "g4spec needs Python 3.10 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# Stamps: installing again happens only when what is to be installed changed.
$(VENV)/.package: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV): minutes the first time'
	@$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e '.[docs]'
	@touch $@

# torch with its libraries is more than half of all that is installed: another pip does it beside
# the rest. First comes what both need, so that they do not write the same files.
$(VENV)/.tests: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV): minutes the first time'
	@$(PIP) filelock fsspec jinja2 typing-extensions
	@$(PIP) torch & $(PIP) -e '.[dev,oracle]'; code=$$?; wait $$! && exit $$code
	@$(PIP) -e '.[test,dev,oracle]'
	@touch $@ $(VENV)/.package

$(VENV)/.oracle: $(VENV)/.tests
	@# Their own requirements name builds of torchvision and torchaudio that are not needed here.
	@# They need Python 3.11; on 3.10 the tests that compare with them are left out.
	@$(PIP) --no-deps "speculators==0.9.0; python_version >= '3.11'" \
	                  "hs-connectors==0.9.0; python_version >= '3.11'"
	@# Compile what tests import, which every worker would do at the same time. Tests report errors.
	@$(BIN)/python -c 'import anthropic, openai, speculators' > /dev/null 2>&1 || true
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null 2>&1 || true
	@touch $@
