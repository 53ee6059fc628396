"""The memory behind what is packed: whose it is, and when it is given back."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.engines.local.pool.test_payload import blocks_in_use
from tests.support import run_command, wait_until
from weft.engines.local.memory import arrays
from weft.engines.local.pool import payload, payload_arrays
from weft.engines.local.pool.payload import pack

#: what runs between the making of a block and the moment at which somebody has it
INTERRUPTED = {module.__file__ for module in (payload, payload_arrays, arrays)}


@pytest.mark.parametrize("pickler", ["pickle's", "cloudpickle's"])
def test_an_interrupt_while_packing_keeps_no_memory(pickler: str) -> None:
    """Wherever it strikes: in each line of what packs and places arrays, one after the other."""
    before = blocks_in_use()
    value = [np.ones(20_000), (lambda: 1) if pickler == "cloudpickle's" else 1]
    struck: Counter[str] = Counter()
    gc.collect()
    for moment in itertools.count():
        left = moment

        def strike(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in INTERRUPTED:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    struck[frame.f_code.co_filename] += 1
                    raise KeyboardInterrupt
            return strike

        gc.disable()  # or what is collected in between might be struck, and nobody told
        sys.settrace(strike)
        try:
            packed = pack(value, 0)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(None)
            gc.enable()
        assert struck.total() == moment + 1, "each moment is one later"
        assert blocks_in_use() == before, moment
    assert struck.total() > 30
    assert set(struck) == INTERRUPTED
    assert blocks_in_use() == before + 1
    del packed
    assert blocks_in_use() == before


@pytest.mark.parametrize("count", [20_000, 200_000])
def test_what_a_function_changes_of_its_arrays_is_each_workers_own(count: int) -> None:
    """A function with an array to write notes into: no worker sees another's, nor does the
    driver."""
    notes = np.zeros(count)
    both = weft.share(np.zeros(2))

    def function(rank: int) -> tuple[float, float]:
        notes[:] = rank + 1
        both[rank] = 1
        assert wait_until(both.all)  # both have written
        return float(notes[0]), float(notes[-1])

    assert weft.map(function, range(2), n=2) == [(1, 1), (2, 2)]
    assert notes.sum() == 0


def test_what_nobody_changes_of_a_functions_arrays_is_one_memory() -> None:
    """A worker that reads a large array has no copy of it, and gives it back with the function."""
    before = blocks_in_use()
    table = np.ones(5_000_000)
    idle = weft.map(lambda x: _private_kilobytes(), [0], n=1)[0]
    total, private = weft.map(lambda x: (table.sum(), _private_kilobytes()), [0], n=1)[0]
    assert total == 5_000_000
    assert private - idle < 10_000
    assert wait_until(lambda: blocks_in_use() == before)


def test_a_function_that_its_own_globals_refer_to_keeps_no_memory() -> None:
    """As those of a script do that call each other: workers give back what these have used."""
    script = """
import numpy, weft
from tests.engines.local.pool.test_payload import blocks_in_use
from tests.support import run_command, wait_until
TABLE = numpy.arange(1_000_000.0)  # so large that it is mapped, not copied
def double(x): return 2 * x
def use(k): return double(float(TABLE[k]))
assert weft.map(use, range(8), n=2) == [2 * k for k in range(8)]
assert wait_until(lambda: blocks_in_use() == 0)
"""
    outcome = run_command([sys.executable, "-c", script])
    assert outcome.code == 0, outcome


def _private_kilobytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
