"""The loops in C, against NumPy's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import run_python
from weft import kernels
from weft._core.adding import add_to
from weft._core.rows import CompiledAdder, make_adder
from weft._core.values import address

ROOT = Path(__file__).parent.parent
KINDS = ("float32", "float64", "int32", "uint32", "int64", "uint64")
#: numbers of a block of the loop that adds arrays, of the smallest kind
BLOCK = (256 << 10) // 4

needs_them = pytest.mark.skipif(kernels.missing() == "WEFT_KERNELS=0", reason="they are left away")


def some(count: int, kind: str, seed: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
    """Numbers of all sizes, NaN and infinity among the floats; integers overflow when added."""
    bits = np.random.default_rng(seed).integers(0, 256, count * np.dtype(kind).itemsize, np.uint8)
    return bits.view(kind)


def same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays are equal; which NaN it is may differ."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@needs_them
def test_they_are_here() -> None:
    """Wherever the suite runs there is a C compiler, so weft was installed with them."""
    assert kernels.missing() == ""
    assert all(kernels.adder(kind) and kernels.row_adder(kind) for kind in KINDS)
    assert kernels.adder("float16") is None
    assert kernels.row_adder("complex64") is None


@needs_them
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, BLOCK // 2, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
@pytest.mark.parametrize("skipped", [0, 1])
def test_adding_arrays(kind: str, count: int, skipped: int) -> None:
    """As NumPy adds them, whatever the length and wherever they begin, and nothing beyond."""
    array, delta = some(count + 2, kind), some(count + 2, kind, seed=1)
    expected = array.copy()
    with np.errstate(all="ignore"):
        expected[skipped : skipped + count] += delta[:count]
    loop = kernels.adder(kind)
    assert loop is not None
    loop(address(array[skipped:]), address(delta), count)
    assert same_bits(array, expected)


@pytest.mark.parametrize("kind", [*KINDS, "float16", "complex64", "int8"])
def test_large_arrays_of_every_kind(kind: str) -> None:
    """What there is no loop for is NumPy's."""
    count = (3 << 20) // np.dtype(kind).itemsize
    array, delta = (np.arange(count) % 100).astype(kind), np.full(count, 3, kind)
    expected = array + delta
    add_to(array, delta)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("shift", [0, 1, 4096])
def test_an_array_added_to_one_that_it_overlaps(shift: int) -> None:
    """The delta counts as it was before."""
    whole = np.arange(1 << 20, dtype=np.float32)
    array, delta = whole[shift:], whole[: whole.size - shift]
    expected = array + delta
    add_to(array, delta)
    np.testing.assert_array_equal(array, expected)


@needs_them
@given(
    ids=st.lists(st.integers(0, 9), max_size=40),
    columns=st.sampled_from([0, 1, 3, 16, 64, 300]),
    kind=st.sampled_from(KINDS),
    strided=st.booleans(),
)
def test_adding_rows(ids: list[int], columns: int, kind: str, strided: bool) -> None:
    """As NumPy adds one row after the other; a row may be named several times."""
    table = some(10 * max(columns, 1), kind).reshape((10, columns) if columns else (10,))
    delta = some(len(ids) * max(columns, 1), kind, seed=1).reshape(len(ids), *table.shape[1:])
    named = np.array(ids, np.intp)
    if strided:
        named = np.repeat(named, 2)[::2]
    expected = table.copy()
    with np.errstate(all="ignore"):
        for row, one in zip(ids, delta, strict=True):
            expected[row] += one
    adder = make_adder(len(table), table.dtype)
    assert isinstance(adder, CompiledAdder)
    adder.touch(table, named, delta)
    adder.add(table, named, delta, adder.find(named))
    assert same_bits(table, expected)


def test_they_can_be_left_away() -> None:
    """With WEFT_KERNELS=0 tables do the same without them."""
    program = """
import numpy as np, weft
from weft import kernels
weft.init()
table = weft.MatrixTable(10_000, 64)
table.add(np.ones((10_000, 64), np.float32))
table.add(np.ones((3, 64), np.float32), rows=[7, 7, 9])
print(kernels.missing(), table.get([7, 8, 9])[:, 0])
"""
    done = run_python(program, env={"WEFT_KERNELS": "0"})
    assert done.out == "WEFT_KERNELS=0 [3. 1. 2.]\n", done


@pytest.mark.timeout(600)
def test_a_wheel_without_a_compiler(tmp_path: Path) -> None:
    """It is built all the same, for every system, and has no library."""
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=tree,
        env={**os.environ, "CC": "no-such-compiler"},
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "weft/kernels.py" in names
    assert not [name for name in names if name.endswith(".so")]
