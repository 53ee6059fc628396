# make demo    what weft does, on this machine, in under a minute
# make test    lint, types, and the whole test suite
# make soak    a thousand kills, under load, every fault with every size (about fifteen minutes), and
#              an hour of mixed calls from eight threads (WEFT_SOAK_SECONDS=60 makes it a minute)
# make gpu     the tests that need an NVIDIA GPU; elsewhere each says why it is skipped
# make bench   weft beside its peers; writes benchmarks/results/ and docs/benchmarks.md
# make docs    the documents as pages in build/site, served on this machine only, at port PORT
# Each sets up .venv by itself and needs only Python 3.11 or later and a C compiler.

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/python -m pip install --quiet

.PHONY: demo test lint types soak gpu bench docs clean

demo: .venv/core
	$(BIN)/python examples/demo.py

test: .venv/test
	$(BIN)/python tests/run.py

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

soak: .venv/test
	$(BIN)/python -m pytest -m soak --timeout=1800  # the hour has a limit of its own

gpu: .venv/test
	$(BIN)/python -m pytest -m gpu

bench: .venv/bench
	$(BIN)/python benchmarks/ground.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/map.py
	$(BIN)/python benchmarks/functions.py
	$(BIN)/python benchmarks/machines.py
	$(BIN)/python benchmarks/machines_map.py
	$(BIN)/python benchmarks/machines_tables.py
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/report.py

docs: .venv/docs
	$(BIN)/python docs/drawings/draw.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

.venv/core: pyproject.toml constraints.txt hatch_build.py src/weft/kernels.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weft needs Python 3.11 or later")'
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
