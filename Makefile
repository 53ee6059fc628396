# make demo    what weft does, on this machine, in under a minute
# make test    lint, types, and the whole test suite
# make soak    a thousand kills, under load, and every fault with every size (about fifteen minutes)
# make bench   weft beside its peers; writes benchmarks/results/
# Each sets up .venv by itself and needs only Python 3.10 or later and a C compiler.

PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/python -m pip install --quiet

PORTABLE := tests/_api/test_sharing.py tests/contracts tests/engines/local/test_locks.py \
	tests/engines/local/test_meeting.py tests/failures/test_fork.py

.PHONY: demo test lint types pure portable soak bench clean

demo: .venv/core
	$(BIN)/python examples/demo.py

# what needs no other process, or does not mind waiting for its turn, first and two at a time
test: .venv/test
	$(MAKE) -j2 --output-sync=target lint types pure portable
	$(BIN)/python -m pytest --ignore=tests/_core

pure: .venv/test
	$(BIN)/python -m pytest -q tests/_core

# what shares memory, once more on the portable kind of it; tests of both kinds have been there
portable: .venv/test
	WEFT_PORTABLE=1 $(BIN)/python -m pytest -q -k 'not (mpirun or memfd or portable)' $(PORTABLE)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

soak: .venv/test
	$(BIN)/python -m pytest -m soak --timeout=1800 tests/failures

bench: .venv/bench
	$(BIN)/python benchmarks/ground.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/map.py

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "weft needs Python 3.10 or later")'
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

# torch first and by itself: what requires it later finds it there
.venv/test: .venv/core
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[test]'
	touch $@

.venv/bench: .venv/test
	$(PIP) --editable '.[bench]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
