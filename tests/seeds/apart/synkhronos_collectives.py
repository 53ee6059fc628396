"""synkhronos's collectives on shared variables, and Data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
from weft.errors import InvalidType, InvalidValue

ROWS = np.arange(10, dtype="float32").reshape(5, 2)


@pytest.fixture(name="s")
def _s() -> Iterator[Any]:
    """A variable that the two processes have as [1, 1] and [3, 5]."""
    s = pytensor.shared(np.ones(2, "float32"), "s")
    used = synk.function([], s.sum())
    synk.set_value(1, s, [3, 5])
    yield s
    del used


@pytest.fixture(name="m")
def _m() -> Iterator[Any]:
    m = pytensor.shared(np.zeros((1, 2), "float32"), "m")
    used = synk.function([], m.sum())
    yield m
    del used


def test_values_of_ranks(s: Any) -> None:
    """set_value and get_value; what is got is a copy; variables may be named."""
    assert synk.get_value(1, "s").tolist() == [3, 5]
    synk.set_value(0, s, np.array([7, 8], "int16"))  # up-cast
    got = synk.get_value(0, s)
    assert got.tolist() == s.get_value().tolist() == [7, 8]
    got += 1
    assert s.get_value().tolist() == [7, 8]
    synk.set_value(1, [s], [np.arange(4, dtype="float32")], batch=[3, 1])
    assert synk.get_value(1, [s])[0].tolist() == [3, 1]


def test_gather(s: Any, m: Any) -> None:
    """Stacked or joined, one variable or several, also of different lengths."""
    assert synk.gather(s).tolist() == [[1, 1], [3, 5]]
    assert synk.gather(s, nd_up=0).tolist() == [1, 1, 3, 5]
    assert [one.shape for one in synk.gather([s, m])] == [(2, 2), (2, 1, 2)]
    assert synk.gather([s]).shape == (2, 2)
    synk.scatter(m, ROWS)
    assert synk.get_shapes(m) == [(2, 2), (3, 2)]
    assert synk.get_lengths([m, s]) == ([2, 3], [2, 2])
    assert synk.get_shapes([m]) == ([(2, 2), (3, 2)],)
    assert (synk.gather("m", nd_up=0) == ROWS).all()
    with pytest.raises(InvalidValue, match=r"rank 0 has \(2, 2\), rank 1 has \(3, 2\)"):
        synk.gather(m)
    with pytest.raises(InvalidValue, match="nd_up=2"):
        synk.gather(m, nd_up=2)
    synk.all_gather(m)
    assert (synk.get_value(1, m) == ROWS).all()
    assert (m.get_value() == ROWS).all()


def test_scatter(m: Any) -> None:
    """Of arrays, Data, some rows of them; a row each at least."""
    synk.scatter(m, ROWS, batch=slice(1, 4))
    assert (synk.get_value(0, m) == ROWS[1:2]).all()
    assert (synk.get_value(1, m) == ROWS[2:4]).all()
    synk.scatter([m], [synk.data(ROWS)], batch=[4, 0])
    assert (synk.gather(m, nd_up=0) == ROWS[[4, 0]]).all()
    with pytest.raises(InvalidValue, match="1 rows for 2 ranks"):
        synk.scatter(m, ROWS[:1])


@pytest.mark.parametrize(
    ("op", "result"),
    [("avg", [2, 3]), ("sum", [4, 6]), ("prod", [3, 5]), ("min", [1, 1]), ("max", [3, 5])],
)
def test_reductions(s: Any, op: str, result: list[float]) -> None:
    """Into this process, into nobody, into all."""
    assert synk.reduce(s, op, in_place=False).tolist() == result
    assert synk.gather(s).tolist() == [[1, 1], [3, 5]]
    assert synk.reduce([s], op, in_place=False).tolist() == result
    assert synk.reduce(s, op) is None
    assert synk.gather(s).tolist() == [result, [3, 5]]
    synk.broadcast(s, [1, 1])
    assert synk.gather(s).tolist() == [[1, 1], [1, 1]]
    synk.set_value(1, s, [3, 5])
    synk.all_reduce(s, op, nccl=False)
    assert synk.gather(s).tolist() == [result, result]


def test_several_variables_at_once(s: Any, m: Any) -> None:
    """Travel together."""
    synk.set_value(1, [s, m], [[2, 2], [[4, 4]]])
    synk.all_reduce([s, "m"], "sum")
    assert [one.tolist() for one in synk.get_value(1, [s, m])] == [[3, 3], [[4, 4]]]
    s.set_value(np.zeros(2, "float32"))
    synk.broadcast([s, m])
    assert synk.gather(s).tolist() == [[0, 0], [0, 0]]
    synk.broadcast([s, m], [np.ones(2, "float32"), ROWS])
    assert synk.get_lengths(m) == [5, 5]


def test_scatter_of_a_minibatch(s: Any, m: Any) -> None:
    """As in a call: its rows are the batch's by their positions, whatever indexes that lists."""
    rows = synk.data(np.arange(4, dtype="float32"), minibatch=True)
    synk.scatter([m, s], [ROWS, rows], batch=[4, 0, 3, 1])
    assert synk.gather(m, nd_up=0).tolist() == ROWS[[4, 0, 3, 1]].tolist()
    assert synk.gather(s, nd_up=0).tolist() == [0, 1, 2, 3]
    synk.set_value(1, s, rows, batch=[5, 9, 7])
    assert synk.get_value(1, s).tolist() == [0, 1, 2]
    with pytest.raises(InvalidValue, match=r"5 rows, and the minibatch values\[1\] has 4"):
        synk.scatter([m, s], [ROWS, rows], batch=slice(0, 5))


def test_what_collectives_refuse(s: Any) -> None:
    """Each error names what was given."""
    unused = pytensor.shared(np.ones(2), "unused")
    for name, call in (
        ("scatter", lambda: synk.scatter(None, [ROWS])),
        ("all_gather", lambda: synk.all_gather(None)),
        ("set_value", lambda: synk.set_value(1, None, [ROWS])),
        ("get_value", lambda: synk.get_value(1, None)),
        ("get_lengths", lambda: synk.get_lengths(None)),
        ("get_shapes", lambda: synk.get_shapes(shared_vars=None)),
    ):
        with pytest.raises(InvalidType, match=f"{name} got a NoneType; expected a shared variable"):
            call()
    with pytest.raises(InvalidValue, match=r"gather got the variable 'unused', which no.*'s'"):
        synk.gather(unused)
    with pytest.raises(InvalidValue, match="broadcast got the name 'other': no variable"):
        synk.broadcast("other")
    with pytest.raises(InvalidType, match="reduce got a ndarray"):
        synk.reduce(ROWS)
    for op in ("mean", None):
        with pytest.raises(InvalidValue, match=f"op={op!r}.*'avg', 'sum', 'prod', 'min', 'max'"):
            synk.all_reduce(s, op=op)
    for rank, kind in ((2, InvalidValue), (-1, InvalidValue), ("0", InvalidType)):
        with pytest.raises(kind, match=f"get_value: rank={rank!r}: expected"):
            synk.get_value(rank, s)
        with pytest.raises(kind, match=f"set_value: rank={rank!r}"):
            synk.set_value(rank, s, [0, 0])
    with pytest.raises(InvalidType, match="dtype float64; expected float32"):
        synk.set_value(1, s, np.zeros(2))
    with pytest.raises(InvalidValue, match="2 axes"):
        synk.broadcast(s, ROWS)
    for call in (synk.gather, synk.all_reduce, synk.get_lengths):
        with pytest.raises(InvalidValue, match=f"{call.__name__} got the variable 's' twice"):
            call([s, "s"])
        with pytest.raises(InvalidValue, match=f"{call.__name__} got an empty list; expected"):
            call([])
    twin = pytensor.shared(np.ones(2, "float32"), "s")
    used = synk.function([], twin.sum())
    with pytest.raises(InvalidValue, match="1 values for 2 variables"):
        synk.broadcast([s, twin], [np.zeros(2, "float32")])
    with pytest.raises(InvalidType, match="scatter got a ndarray for 2 variables; expected a list"):
        synk.scatter([s, twin], ROWS)
    with pytest.raises(InvalidValue, match="more than one variable"):
        synk.gather("s")
    assert used() == 2


def test_data() -> None:
    """Values in shared memory: form, room, rows."""
    x = pt.matrix("x", dtype="float32")
    data = synk.data(ROWS, x)
    assert (data.dtype, data.ndim, data.shape, data.size) == ("float32", 2, (5, 2), 10)
    assert (len(data), data.name, data.minibatch, data.alloc_size) == (5, "x", False, 10)
    assert data[1:3].tolist() == ROWS[1:3].tolist()
    data[0] = [7, 7]
    assert np.asarray(data)[0].tolist() == [7, 7]
    data.set_length(3)
    assert (data.shape, data.alloc_size) == ((3, 2), 10)
    data.set_length(6, oversize=2)
    assert (data.shape, data.alloc_size) == ((6, 2), 24)
    assert data[:].tolist() == [[7, 7], [2, 3], [4, 5], [0, 0], [0, 0], [0, 0]]
    data.set_shape((2, 3))
    assert not data.data.any()
    data.free_memory()
    assert data.alloc_size == data.size == 6
    data.set_value([[1, 2]])
    assert data[:].tolist() == [[1, 2]]
    assert data.condition_data(ROWS.astype("int8")).dtype == np.float32
    assert "float32" in repr(data)
    assert synk.data(dtype="int32", shape=(2, 2)).data.tolist() == [[0, 0], [0, 0]]
    assert synk.data(var=x).shape == (0, 0)
    assert synk.data(5.0).shape == ()
    assert synk.data(ROWS, shape=(7, 2), name="more", minibatch=True).shape == (7, 2)
    assert synk.data(ROWS * 1.5, dtype="int32", force_cast=True).dtype == np.int32


def test_data_of_nothing_becomes_something() -> None:
    """Single numbers too."""
    number = synk.data(dtype="float64", ndim=0)
    number.set_value(2)
    assert number.data == 2
    with pytest.raises(InvalidValue, match="without rows"):
        number.set_length(2)


def test_what_data_refuses() -> None:
    """Each error names what was given."""
    data = synk.data(ROWS, oversize=1.5)
    with pytest.raises(InvalidType, match="float64; expected float32"):
        data.set_value(ROWS.astype("float64"))
    data.set_value(ROWS.astype("float64"), force_cast=True)
    with pytest.raises(InvalidValue, match="has 1 axes"):
        data.condition_data(ROWS[0])
    with pytest.raises(InvalidValue, match="oversize=3"):
        data.set_value(ROWS, oversize=3)
    with pytest.raises(InvalidValue, match="expected 2 lengths"):
        data.set_shape((3,))
    with pytest.raises(InvalidType, match="set_length"):
        data.set_length(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="complex128; expected float32"):
        data[0] = 1j
    with pytest.raises(InvalidType, match="neither a value nor var="):
        synk.data(dtype="float32")
    with pytest.raises(InvalidType, match="expected numbers"):
        synk.data("text")
    with pytest.raises(InvalidType, match=r"data\(var=3\): expected a variable"):
        synk.data(var=3)


def test_data_is_not_moved() -> None:
    """What the caller writes, the workers read in the next call."""
    x = pt.matrix("x", dtype="float32")
    f = synk.function([x], (x.sum(axis=1), "gather"))
    data = f.build_inputs(ROWS)
    assert f(data).tolist() == ROWS.sum(axis=1).tolist()
    data[4] = [100, 0]
    assert f(data).tolist()[4] == 100
    data.set_value(np.ones((9, 2), "float32"))
    assert f(data).tolist() == [2] * 9
