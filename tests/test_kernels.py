"""The loops in C, against NumPy's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import run_python
from weft import kernels
from weft._core.arithmetic import add_to, address, can_sum_in_place, sum_in_place
from weft._core.rows import CompiledAdder, make_adder
from weft._core.updaters import BUILT_IN, RULES, Updater, momentum
from weft.errors import InvalidValue

ROOT = Path(__file__).parent.parent
KINDS = ("float32", "float64", "int32", "uint32", "int64", "uint64")
#: numbers of a block of the loop that adds arrays, of the smallest kind
BLOCK = (256 << 10) // 4

needs_them = pytest.mark.skipif(os.environ.get("WEFT_KERNELS") == "0", reason="they are left away")


def some(count: int, kind: str, seed: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
    """Numbers of all sizes, NaN and infinity among the floats; integers overflow when added."""
    bits = np.random.default_rng(seed).integers(0, 256, count * np.dtype(kind).itemsize, np.uint8)
    return bits.view(kind)


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays have the same bits; which NaN it is may differ."""
    words = f"u{one.itemsize}"
    numbers = one == one  # noqa: PLR0124  not NaN
    equal = np.array_equal(numbers, other == other)  # noqa: PLR0124
    return equal and np.array_equal(one.view(words)[numbers], other.view(words)[numbers])


@needs_them
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 5000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_adding_several_arrays_up(kind: str, count: int, ranks: int) -> None:
    """All of them are the sum, rank by rank, and nothing beside them is touched."""
    arrays = [some(count + 2, kind, seed=rank) for rank in range(ranks)]
    before = [array.copy() for array in arrays]
    with np.errstate(all="ignore"):
        expected = reduce(np.add, (array[1:-1] for array in before))
    assert can_sum_in_place(arrays[0], kind)
    sum_in_place([array[1:-1] for array in arrays])
    for array, old in zip(arrays, before, strict=True):
        assert same(array[1:-1], expected)
        assert same(array[[0, -1]], old[[0, -1]])


@needs_them
def test_they_are_here() -> None:
    """Wherever the suite runs there is a C compiler, so weft was installed with them."""
    assert kernels.missing() == ""
    assert all(kernels.add_kernel(kind) and kernels.add_rows_kernel(kind) for kind in KINDS)
    assert all(map(kernels.sum_in_place_kernel, KINDS))
    assert kernels.add_kernel("float16") is None
    assert not can_sum_in_place(np.zeros(1, np.float16), "float16")
    assert not can_sum_in_place(np.zeros(1, np.uint16), "bfloat16")
    assert not can_sum_in_place(np.zeros(1, ">f4"), "float32")
    with pytest.raises(TypeError, match="complex64"):
        sum_in_place([np.zeros(1, np.complex64)])
    assert kernels.add_rows_kernel("complex64") is None
    assert all(kernels.rule_kernel(rule, kind) for rule in RULES for kind in ("float32", "float64"))
    assert kernels.rule_kernel("adam", "int64") is None


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
    loop = kernels.add_kernel(kind)
    assert loop is not None
    loop(address(array[skipped:]), address(delta), count)
    assert same(array, expected)


@pytest.fixture
def as_on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are added by the loop in C, also on a processor on which that is slower."""
    monkeypatch.setattr(kernels, "adding_side_by_side_pays", lambda: kernels.missing() == "")


@pytest.mark.usefixtures("as_on_intel")
@pytest.mark.parametrize("kind", [*KINDS, "float16", "complex64", "int8"])
def test_large_arrays_of_every_kind(kind: str) -> None:
    """What there is no loop for is NumPy's."""
    count = (3 << 20) // np.dtype(kind).itemsize
    array, delta = (np.arange(count) % 100).astype(kind), np.full(count, 3, kind)
    expected = array + delta
    add_to(array, delta)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.usefixtures("as_on_intel")
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
    updater=st.sampled_from([*(BUILT_IN[name]() for name in RULES), momentum(nesterov=True)]),
    kind=st.sampled_from(["float32", "float64"]),
    count=st.integers(0, 70),
    step=st.integers(1, 5),
    skipped=st.sampled_from([0, 1]),
)
def test_rules(updater: Updater, kind: str, count: int, step: int, skipped: int) -> None:
    """As NumPy computes them, to the bit, of numbers of all sizes, and nothing beyond."""
    arrays = [some(count + 2, kind, seed) for seed in range(2 + len(updater.state))]
    here, expected = [[one.copy() for one in arrays] for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        for changed in (here, expected):
            rows, *state, delta = (one[skipped : skipped + count] for one in changed)
            updater.update(rows, dict(zip(updater.state, state, strict=True)), delta, step)
            patch.setattr(kernels, "rule_kernel", lambda *_: None)
    assert all(map(same, here, expected))


@pytest.mark.parametrize("how", ["other byte order", "unaligned", "another dtype", "read-only"])
def test_rules_of_arrays_that_c_cannot_read(how: str) -> None:
    """They are computed as NumPy does it, or refused as NumPy refuses them."""
    rows, delta = np.zeros(100, np.float32), np.ones(100, np.float32)
    if how == "unaligned":
        rows = np.frombuffer(bytearray(401), np.float32, offset=1)
    elif how == "another dtype":
        delta = delta.astype(np.float16)
    elif how == "read-only":
        rows.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            BUILT_IN["sgd"](lr=0.5).update(rows, {}, delta, 1)
        assert not rows.any()
        return
    else:
        rows, delta = rows.astype(">f4"), delta.astype(">f4")
    BUILT_IN["sgd"](lr=0.5).update(rows, {}, delta, 1)
    assert (rows == -0.5).all()


@needs_them
@given(
    ids=st.lists(st.integers(0, 9), max_size=40),
    columns=st.sampled_from([None, 1, 3, 16, 64, 300]),
    kind=st.sampled_from(KINDS),
    how=st.sampled_from(["as they are", "strided", "unaligned", "read-only"]),
)
def test_adding_rows(ids: list[int], columns: int | None, kind: str, how: str) -> None:
    """As NumPy adds one row after the other; a row may be named several times."""
    table = some(10 * (columns or 1), kind).reshape((10, columns) if columns else (10,))
    delta = some(len(ids) * (columns or 1), kind, seed=1).reshape(len(ids), *table.shape[1:])
    named = np.array(ids, np.intp)
    if how == "strided":
        named = np.repeat(named, 2)[::2]
    elif how == "unaligned":
        named = np.frombuffer(b"x" + named.tobytes(), np.intp, offset=1)
    elif how == "read-only":
        named.flags.writeable = False
    expected = table.copy()
    with np.errstate(all="ignore"):
        for row, one in zip(ids, delta, strict=True):
            expected[row] += one
    adder = make_adder(len(table), table.dtype)
    assert isinstance(adder, CompiledAdder)
    adder.add(table, named, delta, adder.prepare(table, named, delta, touch=True))
    assert same(table, expected)


@needs_them
def test_nothing_is_read_beyond_the_ids() -> None:
    """They end where memory ends."""
    program = """
import ctypes, mmap
import numpy as np
from weft import kernels
memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0)
table, delta = np.zeros((7, 3), np.float32), np.ones((20, 3), np.float32)
ids = np.frombuffer(memory, np.intp, 20, mmap.PAGESIZE - 160)
ids[:] = np.arange(20) % 7
loop = kernels.add_rows_kernel("float32")
places = (one.__array_interface__["data"][0] for one in (table, ids, delta))
table_at, ids_at, delta_at = places
print(loop(table_at, 7, ids_at, 20, delta_at, 3), table[:, 0].tolist())
"""
    done = run_python(program)
    assert done.out == "20 [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0]\n", done


@needs_them
@pytest.mark.parametrize("wrong", [10, 2**40, -1, -(2**62)])
def test_ids_that_change_in_between(wrong: int) -> None:
    """The rows before are added to, memory beyond the table is not, and it is said."""
    table, delta = np.zeros((10, 4), np.float32), np.ones((3, 4), np.float32)
    adder = make_adder(10, table.dtype)
    with pytest.raises(InvalidValue, match=f"changed while they were in use: {wrong} is not in"):
        adder.add(table, np.array([9, wrong, 0]), delta, None)
    assert table[:, 0].tolist() == [0] * 9 + [1]


@needs_them
def test_a_library_of_another_version(tmp_path: Path) -> None:
    """One that was not compiled from this kernels.c is not used, nor one that is none."""
    package = tmp_path / "weft"
    shutil.copytree(ROOT / "src" / "weft", package, ignore=shutil.ignore_patterns("__pycache__"))
    program = "from weft import kernels; print(kernels.__file__, kernels.missing())"

    def told() -> str:
        done = run_python(program, env={"PYTHONPATH": str(tmp_path)})
        path, _, reason = done.out.strip().partition(" ")
        assert path == str(package / "kernels.py"), done
        return reason

    assert told() == ""
    with (package / "kernels.c").open("a") as source:
        source.write("/* changed */\n")
    assert told() == "they were compiled for another version of weft; install weft again"
    (package / "libkernels.so").write_bytes(b"")
    assert told() == "they were not compiled; have a C compiler, and install weft again"


@pytest.mark.usefixtures("as_on_intel")
@pytest.mark.parametrize(
    "how", ["strided", "other byte order", "another shape", "read-only", "another dtype"]
)
def test_arrays_that_are_not_alike(how: str) -> None:
    """An updater that is called by itself takes what NumPy takes, and refuses what it refuses."""
    array, delta = np.ones((1024, 1024), np.float32), np.full((1024, 1024), 2, np.float32)
    if how == "strided":
        array = np.ones((1024, 2048), np.float32)[:, ::2]
    elif how == "other byte order":
        array, delta = array.astype(">f4"), delta.astype(">f4")
    elif how == "another shape":
        delta = delta[0]
    elif how == "another dtype":
        delta = delta.astype(np.float64)
    elif how == "read-only":
        array.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            add_to(array, delta)
        return
    add_to(array, delta)
    assert (array == 3).all()
    if how == "strided" and array.base is not None:
        assert (array.base[:, 1::2] == 1).all()


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
    assert done.out == "WEFT_KERNELS=0 is set; unset it [3. 1. 2.]\n", done


@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiler", ["no-such-compiler", "gcc '", "false"])
def test_a_wheel_without_a_compiler(tmp_path: Path, compiler: str) -> None:
    """It is built all the same, for every system, and has no library."""
    tree = tmp_path / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "libkernels*")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=tree,
        env={**os.environ, "CC": compiler},
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "weft/kernels.py" in names
    assert not [name for name in names if name.endswith(".so")]


# hashes


def hashed(data: bytes, seed: bytes = bytes(16)) -> bytes:
    kernel = kernels.hash_kernel()
    assert kernel is not None
    return kernel([address(np.frombuffer(data or b"0", np.uint8))], [len(data)], seed)


@needs_them
def test_hashes_of_changes_differ() -> None:
    """One bit or two, two signs, swapped words, zeros at the end: never the same hash."""
    base = np.arange(40, dtype=np.uint64)
    seen = {hashed(base.tobytes())}
    bits = [
        (word, np.uint64(1 << bit)) for word in range(0, 40, 3) for bit in (0, 1, 28, 31, 62, 63)
    ]
    for at, (word, mask) in enumerate(bits):
        for other, second in bits[at:]:
            changed = base.copy()
            changed[word] ^= mask
            if (other, second) != (word, mask):
                changed[other] ^= second
            seen.add(hashed(changed.tobytes()))
    assert len(seen) == 1 + len(bits) * (len(bits) + 1) // 2
    swapped = base.copy()
    swapped[[3, 11]] = swapped[[11, 3]]
    assert hashed(swapped.tobytes()) not in seen
    lengths = {hashed(bytes(size)) for size in range(300)}
    assert len(lengths) == 300
    assert hashed(b"x") != hashed(b"x", bytes(15) + b"x")


@needs_them
@given(st.binary(max_size=300), st.integers(0, 63))
def test_hashes_do_not_depend_on_where_the_bytes_lie(data: bytes, offset: int) -> None:
    """Nor on what lies beside them."""
    room = np.frombuffer(bytes(offset) + data + b"more", np.uint8)
    kernel = kernels.hash_kernel()
    assert kernel is not None
    assert kernel([address(room) + offset], [len(data)], bytes(16)) == hashed(data)
    assert kernel([address(room)] * 2, [1, 2], bytes(16)) != kernel([address(room)], [3], bytes(16))
