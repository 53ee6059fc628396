# make demo    what weft does, on this machine, in under a minute
# make test    lint, types, and the whole test suite
# make soak    a thousand kills, under load, and every fault with every size (about fifteen minutes)
# make bench   weft beside its peers; writes benchmarks/results/ and docs/benchmarks.md
# make docs    the documents as pages in build/site, served on this machine only, at port PORT
# Each sets up .venv by itself and needs only Python 3.10 or later and a C compiler.

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/python -m pip install --quiet

PORTABLE := tests/_api/test_sharing.py tests/contracts tests/engines/local/test_locks.py \
	tests/engines/local/test_meeting.py tests/failures/test_fork.py

# What measures no times and can wait for its turn, the longest first. What is not named here has
# the machine to itself.
BESIDE := tests/_api tests/failures/test_collectives.py tests/test_examples.py tests/contracts \
	tests/failures/test_points.py tests/_core tests/adapters tests/seeds tests/test_doctor.py \
	tests/test_documents.py tests/failures/test_giving_up.py \
	tests/engines/local/test_random_collectives.py tests/test_launched_by_others.py \
	tests/failures/test_table_histories.py tests/test_package.py tests/test_readme.py tests/benchmarks \
	tests/test_site.py tests/test_notebook.py tests/failures/test_interrupts.py tests/test_cli.py \
	tests/engines/local/test_store_deaths.py tests/engines/local/test_wire_memory.py \
	tests/failures/test_functions_interrupted.py tests/test_resources.py

.PHONY: demo test lint types portable soak bench docs clean $(BESIDE)

demo: .venv/core
	$(BIN)/python examples/demo.py

test: .venv/test
	$(MAKE) -j2 --output-sync=target lint types portable $(BESIDE)
	$(BIN)/python -m pytest $(BESIDE:%=--ignore=%)

$(BESIDE): .venv/test
	$(BIN)/python -m pytest -q $@

# what shares memory, once more on the portable kind of it, and without loops in C; tests of both
# kinds have been there
portable: .venv/test
	WEFT_PORTABLE=1 WEFT_KERNELS=0 $(BIN)/python -m pytest -q -k 'not (mpirun or memfd or portable)' $(PORTABLE)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

soak: .venv/test
	$(BIN)/python -m pytest -m soak --timeout=1800

bench: .venv/bench
	$(BIN)/python benchmarks/ground.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/map.py
	$(BIN)/python benchmarks/functions.py
	$(BIN)/python benchmarks/report.py

docs: .venv/docs
	$(BIN)/python docs/drawings/draw.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

.venv/core: pyproject.toml constraints.txt hatch_build.py src/weft/kernels.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "weft needs Python 3.10 or later")'
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

# torch first and by itself: what requires it later finds it there
.venv/test: .venv/core
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[test]'
	touch $@

.venv/docs: .venv/core
	$(PIP) --editable '.[docs]'
	touch $@

.venv/bench: .venv/test
	$(PIP) --editable '.[bench]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
