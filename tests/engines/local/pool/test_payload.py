"""Functions, items and results as bytes and as blocks of shared memory."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_script, wait_until
from weft.engines.local.memory import blocks
from weft.engines.local.pool.payload import load, pack, pack_function
from weft.engines.local.pool.payload_arrays import LARGE
from weft.errors import InvalidType

Array = np.ndarray[Any, Any]


def arrays() -> dict[str, Array]:
    """Every kind of array, small and large."""
    count = 40_000
    kinds = "?bhilqBHILQefdgFDG"
    found = {f"dtype {kind}": np.arange(count).astype(kind) for kind in kinds}
    found |= {f"small {kind}": np.arange(5).astype(kind) for kind in kinds}
    text = np.array([f"{number:08}" for number in range(count)])
    both = np.zeros(count, dtype=[("a", "i4"), ("b", "f8", (2,))])
    both["a"] = np.arange(count)
    square = np.arange(90_000.0).reshape(300, 300)
    return found | {
        "text": text,
        "bytes": text.astype("S8"),
        "structured": both,
        "field": both["a"],
        "datetime": np.arange(count).astype("M8[s]"),
        "timedelta": np.arange(count).astype("m8[ms]"),
        "void": np.zeros(count, "V3"),
        "big endian": np.arange(count, dtype=">i8"),
        "objects": np.array([None, "a", [1]] * 10_000, dtype=object),
        "fortran": np.asfortranarray(square),
        "transposed": square.T,
        "strided": square[::2, 1::3],
        "reversed": np.arange(float(count))[::-1],
        "broadcast": np.broadcast_to(np.arange(300.0), (300, 300)),
        "three axes": np.arange(count).reshape(4, 100, 100).transpose(2, 0, 1),
        "no axes": np.array(3.5),
        "no rows": np.zeros((0, 5), np.float32),
        "no columns": np.zeros((100_000, 0)),
        "read-only": _read_only(square),
        "small read-only": _read_only(np.arange(3)),
    }


def _read_only(array: Array) -> Array:
    view = array.copy()
    view.flags.writeable = False
    return view


def same(found: Array, expected: Array) -> bool:
    return (
        type(found) is np.ndarray
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and found.flags.f_contiguous >= (expected.flags.f_contiguous and expected.ndim > 1)
        and (
            found.tobytes() == expected.tobytes()
            if expected.dtype.kind == "V"
            else np.array_equal(found, expected)
        )
    )


def there_and_back(value: list[Any]) -> Any:
    payload = pack(value, 0)
    return load(payload.data)


def blocks_in_use() -> int:
    """How many blocks of this process's own somebody has, after what was dropped is seen."""
    gc.collect()
    server = blocks._here.server
    with server._lock:
        server._free_dropped()
        return len(server._entries)


@pytest.mark.parametrize("name", arrays())
def test_an_array_arrives_as_what_it_was(name: str) -> None:
    """A plain array of the same dtype, shape, order and values, writable if it was, and not the
    same memory; in whatever it lies."""
    array = arrays()[name]
    value = [array, {"key": (array[..., None],)}, SimpleNamespace(array=array)]
    loaded = there_and_back(value)
    assert same(loaded[0], array)
    assert loaded[2].array is loaded[0]
    assert same(loaded[1]["key"][0], array[..., None])
    if name != "broadcast":  # NumPy warns of writing to these
        assert loaded[0].flags.writeable == array.flags.writeable
    assert not np.shares_memory(loaded[0], array)


def test_arrays_arrive_in_workers_and_come_back() -> None:
    """The same through a worker, there and back, for all kinds at once."""
    sent = arrays()
    found = weft.map(
        lambda item: (item[0], type(item[1]) is np.ndarray, item[1]), sent.items(), n=2
    )
    for (name, plain, array), expected in zip(found, sent.values(), strict=True):
        assert plain, name
        assert same(array, expected), name
    assert [name for name, _, _ in found] == list(sent)


def test_64_kb_is_the_border() -> None:
    """An array of as many bytes is not in the pickle; one of a byte less is."""
    below, at = np.zeros(LARGE - 1, np.uint8), np.zeros(LARGE, np.uint8)
    small, large = pack([below], 0), pack([at], 0)
    assert LARGE == 1 << 16
    assert len(small.data) > LARGE - 1
    assert (small.shared, small.has_references) == (0, False)
    assert len(large.data) < 1000
    assert (large.shared, large.has_references) == (LARGE, True)
    large.release()


@dataclass
class Job:
    name: str
    arrays: dict[str, list[Array]]


def test_position_does_not_matter() -> None:
    """Lists, dicts and dataclasses: a large array is never in the pickle, and one that lies in two
    places arrives as one."""
    array = np.arange(100_000.0)
    job = Job("j", {"a": [array, array[:50_000]], "b": [array]})
    payload = pack([job, (1, [array])], 0)
    assert len(payload.data) < 2000
    loaded, (_, (again,)) = load(payload.data)
    assert loaded.arrays["a"][0] is loaded.arrays["b"][0] is again
    assert np.array_equal(loaded.arrays["a"][1], array[:50_000])


def test_a_shared_array_travels_without_a_copy() -> None:
    """What a worker writes into it is seen here, and the other way round; also through a view, in
    the closure of a function, and as a small part. It comes back as itself."""
    shared = weft.share(np.zeros((4, 50_000)))
    wide = weft.share(np.zeros(3))

    def function(item: Any) -> Any:
        row, array = item
        array[:] = row + 1
        shared[row, 0] += 10
        wide[row] = os.getpid()
        return shared[row], type(array).__name__

    found = weft.map(function, [(row, shared[row]) for row in range(3)], n=2)
    assert shared[:, 1].tolist() == [1, 2, 3, 0]
    assert shared[:, 0].tolist() == [11, 12, 13, 0]
    assert os.getpid() not in wide
    assert all(wide)
    for row, (array, kind) in enumerate(found):
        assert kind == "SharedArray"
        assert np.shares_memory(array, shared)
        assert array[1] == row + 1


def test_work_in_place_does_not_touch_the_drivers_array() -> None:
    """A function may change the array that it gets: it is the worker's own, also when it is the
    result of an earlier call, or two items are the same array."""
    array = np.ones(20_000)

    def function(x: Array) -> Array:
        x += 1
        return x

    first = weft.map(function, [array, array], n=2)
    assert [one[0] for one in first] == [2, 2]
    assert array[0] == 1
    second = weft.map(function, [first[0], first[0], first[1]], n=2)
    assert [one[0] for one in second] == [3, 3, 3]
    assert [one[0] for one in first] == [2, 2]
    pasted = weft.distribute(function, max_cpu=2)(first[0])
    assert pasted[0] == 3
    assert first[0][0] == 2


def test_results_are_plain_arrays_that_give_their_memory_back() -> None:
    """They can be written to and outlive the workers; a worker has its memory back for the next
    result when the last view of one is dropped."""

    def function(x: int) -> Any:
        from weft.engines.local.memory import blocks

        return np.full(200_000, x), len(blocks._here.server._entries)

    results = weft.map(function, range(4), n=1)
    array = results[0][0]
    assert type(array) is np.ndarray
    assert array.flags.writeable
    assert not array.flags.owndata
    array += 1
    del array
    kept = [weft.map(function, [0], n=1)[0][1] for _ in range(3)]
    assert max(kept) >= 4
    view = results[3][0][::2]
    del results
    assert wait_until(lambda: weft.map(function, [0], n=1)[0][1] <= 2)
    weft.shutdown()
    assert view.tolist() == [3] * 100_000


def test_items_give_their_memory_back() -> None:
    """After a map nothing of its items or closures is held, nor after one that fails."""
    before = blocks_in_use()
    large = np.ones(100_000)
    assert weft.map(lambda x: (x + large).sum(), [large] * 8, n=2) == [200_000.0] * 8
    wait_until(lambda: blocks_in_use() == before)
    with pytest.raises(ZeroDivisionError):
        weft.map(lambda x: 1 // 0, [large] * 8, n=2)
    wait_until(lambda: blocks_in_use() == before)
    with pytest.raises(InvalidType):
        weft.map(len, [[large, threading.Lock()]], n=1)
    wait_until(lambda: blocks_in_use() == before)


def test_a_second_pickler_does_not_copy_again() -> None:
    """What pickle cannot do cloudpickle does, with the blocks that are there already."""
    array = np.ones(100_000)
    payload = pack([array, lambda: 1], 0)
    assert payload.shared == array.nbytes
    loaded, function = load(payload.data)
    assert loaded.sum() == 100_000
    assert function() == 1


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors_travel() -> None:
    """CPU tensors of 64 KB go through shared memory, others as torch wants it; all arrive equal."""
    torch = pytest.importorskip("torch")
    large = torch.arange(100_000.0)
    values = {
        "large": large,
        "transposed": large.reshape(100, 1000).t(),
        "small": torch.arange(3),
        "grad": torch.ones(100_000, requires_grad=True),
        "bfloat16": torch.ones(100_000, dtype=torch.bfloat16),
        "complex": torch.ones(100_000, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(100_000)),
        "sparse": torch.eye(4).to_sparse(),
        "empty": torch.zeros(0),
    }
    payload = pack([large, values["transposed"]], 0)
    assert len(payload.data) < 2000
    assert payload.shared == 2 * large.nbytes
    payload.release()
    for name, value in values.items():
        loaded = there_and_back([value])[0]
        assert type(loaded) is type(value), name
        assert (loaded.dtype, loaded.requires_grad) == (value.dtype, value.requires_grad), name
        assert torch.equal(loaded.detach().to_dense(), value.detach().to_dense()), name
    loaded = there_and_back([large])[0]
    loaded += 1
    assert large[0] == 0


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_subclasses_are_pickled_as_they_want() -> None:
    """A masked array keeps its mask, a matrix is one; a file in memory arrives as its values."""
    masked = np.ma.masked_less(np.arange(100_000.0), 10)
    matrix = np.asmatrix(np.ones((200, 200)))
    loaded = there_and_back([masked, matrix])
    assert loaded[0].sum() == masked.sum()
    assert type(loaded[1]) is np.matrix
    path = Path(os.environ["WEFT_TEST_FOLDER"]) / "values"
    mapped = np.memmap(path, np.int64, "w+", shape=(50_000,))
    mapped[:] = 7
    assert there_and_back([mapped])[0].sum() == 350_000


def test_shared_data_of_a_masked_array_keeps_its_mask() -> None:
    """What is not a plain array is not flattened to one on its way into shared memory."""
    masked = np.ma.masked_less(np.arange(100_000.0), 10)
    found = weft.map(lambda x, data: float(data["m"].sum()), [0], n=1, shared_data={"m": masked})
    assert found == [float(masked.sum())]
    doubled = weft.distribute(lambda x: x * 2, max_cpu=2)(masked)
    assert float(doubled.sum()) == 2 * float(masked.sum())


def test_classes_of_the_script_keep_their_identity() -> None:
    """An instance of a class of `__main__` comes back as one of the very same class; an exception
    too, so that `except` finds it."""
    outcome = run_script(
        """
import weft
from dataclasses import dataclass
from enum import Enum

class Colour(Enum):
    RED = 1

@dataclass
class Point:
    x: int
    colour: Colour = Colour.RED

class Odd(Exception):
    pass

def function(point):
    if point.x == 3:
        raise Odd(point)
    return Point(point.x + 1, point.colour), isinstance(point, Point), point.colour is Colour.RED

found = weft.map(function, [Point(1), Point(2)], n=2)
print([type(point) is Point for point, _, _ in found], found[1][1:])
print(found[0][0].colour is Colour.RED)
try:
    weft.map(function, [Point(3)], n=1)
except Odd as error:
    print("Odd", error.args == (Point(3),))
"""
    )
    assert outcome.out == "[True, True] (True, True)\nTrue\nOdd True\n", outcome


class Model:
    def __init__(self) -> None:
        self.model = SimpleNamespace(lock=threading.Lock())


def test_what_cannot_be_sent_is_named_by_its_path() -> None:
    """The path starts with the item's own index or with the function, and ends at the culprit."""
    items = [1, 2, Model(), 4]
    for n in (1, 2):
        with pytest.raises(
            InvalidType, match=r"^items\[2\]\.model\.lock is a _thread\.lock, which"
        ):
            weft.map(lambda x: x, items, n=n)
    lock = threading.Lock()
    with pytest.raises(InvalidType, match=r"^fun\.lock is a _thread\.lock, .* leave it out, or"):
        weft.map(lambda x: lock, [1])
    many: list[Any] = list(range(500))
    many[400] = {"a": [Model()]}
    with pytest.raises(InvalidType, match=r"^items\[400\]\['a'\]\[0\]\.model\.lock"):
        weft.map(lambda x: x, many, n=1)
    found = weft.map(lambda x: x, many, n=1, on_error="return")
    assert [i for i, value in enumerate(found) if isinstance(value, InvalidType)] == [400]


def test_results_that_cannot_be_sent_are_failures_of_their_items() -> None:
    """The message names the item and the path; the other results of the batch arrive."""

    def function(x: int) -> Any:
        return SimpleNamespace(lock=threading.Lock()) if x == 250 else x

    with pytest.raises(InvalidType, match=r"result.*250.*\.lock is a _thread\.lock"):
        weft.map(function, range(300), n=1)
    found = weft.map(function, range(300), n=1, on_error="return")
    assert [i for i, value in enumerate(found) if value != i] == [250]
    assert isinstance(found[250], InvalidType)


class LoadsHereOnly:
    """Can be unpickled by the process that pickled it only."""

    def __reduce__(self) -> Any:
        def build(pid: int = os.getpid()) -> Any:
            if os.getpid() != pid:
                raise LookupError("not here")

        return build, ()


def test_what_cannot_be_loaded_is_a_failure_of_its_item() -> None:
    """An item there, with its own exception; a result here, with what its unpickling said. Neither
    disturbs the others."""
    item = LoadsHereOnly()
    found = weft.map(lambda x: x, [1, item, 3], n=1, on_error="return")
    assert found[::2] == [1, 3]
    assert isinstance(found[1], LookupError)
    assert found[1].__cause__.item == 1  # type: ignore[attr-defined]
    kind = LoadsHereOnly
    found = weft.map(lambda x: kind() if x == 1 else x, [0, 1, 2], n=1, on_error="return")
    assert found[::2] == [0, 2]
    assert isinstance(found[1], InvalidType)
    assert str(found[1]) == (
        "the result of item 1 has come and cannot be unpickled here: LookupError: not here"
    )
    assert weft.map(lambda x: x, [5], n=1) == [5]


def test_a_function_is_known_by_what_it_is() -> None:
    """The same function packs to the same digest; another value of what it closes over does not."""

    def adder(amount: int) -> Callable[[int], int]:
        return lambda x: x + amount

    first = adder(1)
    assert pack_function(first).digest == pack_function(first).digest
    assert pack_function(first).digest != pack_function(adder(2)).digest


def test_a_function_is_packed_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it has been given other code, or when a name of it means something else now."""

    def function(x):  # type: ignore[no-untyped-def]
        return abs(x)

    assert load(pack_function(function).data)(-1) == 1
    function.__code__ = (lambda x: abs(x) + 1).__code__
    assert load(pack_function(function).data)(-1) == 2
    monkeypatch.setitem(globals(), "abs", lambda x: 7)
    assert load(pack_function(function).data)(-1) == 8
