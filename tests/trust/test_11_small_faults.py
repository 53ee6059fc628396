"""Lines of the first day that gave something wrong without a word, or an error from inside."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.support import run_ranks, run_script
from weft.engines.base import Group
from weft.errors import InvalidType, InvalidValue

# map in a process of multiprocessing

IN_A_CHILD = """
import multiprocessing, sys
import numpy as np
import weft

FACTOR = 3

class Point:
    def __init__(self, x):
        self.x = x

class Failed(Exception):
    pass

def scale(value):
    if isinstance(value, Point):
        return Point(FACTOR * value.x)
    if value is None:
        raise Failed("none")
    return FACTOR * value

def total(x):
    return (FACTOR * x).sum()

def child():
    global FACTOR
    assert __name__ == "__mp_main__"
    assert weft.map(scale, range(4)) == [0, 3, 6, 9]
    points = weft.map(scale, [Point(1), Point(2)])
    assert [(type(point), point.x) for point in points] == [(Point, 3), (Point, 6)]
    try:
        weft.map(scale, [None])
    except Failed:
        pass
    data = {"point": Point(5)}
    assert weft.map(lambda i, data: data["point"].x + i, range(2), shared_data=data) == [5, 6]
    assert weft.distribute(scale)([1, 2]) == [3, 6]
    with weft.Team(2) as team:
        function = weft.function(total, collect="sum", team=team)
        assert function(np.ones(4)) == 12
        FACTOR = 5
        assert function(np.ones(4)) == 20
    print("same as in the script")

if __name__ == "__main__":
    process = multiprocessing.get_context(METHOD).Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_map_in_a_process_of_multiprocessing(method: str) -> None:
    """Functions, items, results and exceptions of the script are sent as from `__main__`."""
    outcome = run_script(IN_A_CHILD.replace("METHOD", repr(method)))
    assert (outcome.code, outcome.out) == (0, "same as in the script\n"), outcome


# tables as NumPy sees them


def tables_for_numpy(group: Group) -> None:
    vector = weft.ArrayTable(np.arange(6.0))
    matrix = weft.MatrixTable(np.arange(6.0).reshape(3, 2), dtype="float64", consistency="bsp")
    whole = np.asarray(vector)
    assert (type(whole), whole.dtype, whole.tolist()) == (np.ndarray, np.float32, [*range(6)])
    whole[:] = 9  # a copy
    assert np.array(vector, dtype=int).tolist() == [*range(6)]
    assert np.array_equal(np.asarray(matrix), np.arange(6.0).reshape(3, 2))
    assert np.mean(matrix) == 2.5
    assert (np.zeros(6) + vector).tolist() == [*range(6)]
    with pytest.raises(ValueError, match="always a copy; leave copy= out"):
        np.asarray(vector, copy=False)
    tensors = weft.ArrayTable(torch.arange(3.0))
    assert np.asarray(tensors).tolist() == [0, 1, 2]
    group.barrier()
    vector.add_async(np.ones(6))
    group.barrier()
    assert np.asarray(vector)[0] >= 1  # this rank's own add, though left to a thread, is in
    vector.finish()


def tables_in_slices(group: Group) -> None:
    matrix = weft.MatrixTable(np.arange(20.0).reshape(10, 2))
    plain = np.arange(20.0).reshape(10, 2)
    slices = [
        slice(None),
        slice(3),
        slice(2, 5),
        slice(-3, None),
        slice(None, None, -1),
        slice(8, 1, -3),
        slice(5, 2),
        slice(4, 1000),
        slice(np.int64(1), np.int64(9), np.int64(4)),
    ]
    for rows in slices:
        assert np.array_equal(matrix.get(rows), plain[rows]), rows
        assert np.array_equal(matrix.get_async(rows).wait(), plain[rows]), rows
    out = np.empty((3, 2), np.float32)
    assert matrix.get(slice(2, 5), out=out) is out
    group.barrier()
    matrix.add(np.ones((4, 2)), rows=slice(0, 10, 3))
    matrix.add_async(np.ones((2, 2)), rows=slice(-2, None)).wait()
    group.barrier()
    plain[::3] += group.size
    plain[-2:] += group.size
    assert np.array_equal(matrix.get(), plain)
    with pytest.raises(InvalidValue, match=r"shape \(3, 2\) was added where \(2, 2\)"):
        matrix.add(np.ones((3, 2)), rows=slice(2))
    with pytest.raises(InvalidType, match=r"slice\(0.5, None, None\): expected whole numbers"):
        matrix.get(slice(0.5, None))
    with pytest.raises(InvalidType, match="expected whole numbers"):
        matrix.get(slice("a", "b"))
    with pytest.raises(InvalidValue, match="expected a step other than 0"):
        matrix.get(slice(0, 5, 0))
    group.barrier()
    assert np.array_equal(matrix.get(), plain)


@pytest.mark.parametrize("body", [tables_for_numpy, tables_in_slices])
def test_tables_on_one_rank_and_on_two(body: Any) -> None:
    """`numpy.asarray(table)` is a copy of its values; slices of rows are NumPy's."""
    body(weft.init(engine="serial"))
    run_ranks(2, body)


# what share() would lose


class DataFrame:
    """What NumPy sees of pandas' class."""

    def __init__(self, values: Any) -> None:
        self.columns, self._values = ["a", "b"], np.asarray(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._values

    def to_numpy(self) -> Any:
        return self._values


class Sparse:
    """What a sparse matrix of SciPy's offers."""

    def toarray(self) -> Any:
        return np.eye(2)


FRAME = DataFrame(np.ones((2, 2)))

REFUSED = [
    (FRAME, r"got DataFrame with names of rows or columns.*share \.to_numpy\(\)"),
    ([FRAME, FRAME], r"got DataFrame with"),
    (Sparse(), r"got Sparse with a sparse form.*share \.toarray\(\)"),
    (np.eye(2).view(np.matrix), r"got matrix with.*share numpy\.asarray\(matrix\)"),
    ([np.ma.array([1], mask=[True])], r"got MaskedArray with a mask.*\.filled"),
    (torch.ones(2, requires_grad=True), r"requires grad.*share tensor\.detach\(\)"),
    (torch.ones(2, dtype=torch.bfloat16), r"bfloat16.*share tensor\.float\(\)"),
    (torch.ones(2, device="meta"), r"tensor on meta"),
    (torch.eye(2).to_sparse(), r"tensor\.to_dense\(\)"),
    ([1, "a"], r"got 1 among strings"),
    (b"ab\0", r"numpy\.frombuffer\(data, numpy\.uint8\)"),
    (["ab\0"], r"among strings"),
    ({"a": np.ones(2)}, r"got dict.*share the arrays in it"),
    ([2**70], r"Python objects"),
    ([[1], [1, 2]], r"got a list that is no array.*rows of equal length"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=lambda case: type(case).__name__)
def test_share_refuses_what_it_would_lose(value: Any, words: str) -> None:
    """Names of columns, masks, gradients and numbers among strings are not dropped silently; the
    error has the line to write."""
    with pytest.raises((InvalidType, InvalidValue), match=words):
        weft.share(value)


def test_share_takes_what_is_an_array() -> None:
    """What loses nothing is shared as before: lists, ranges, buffers, strings, tensors, records."""
    assert weft.share(FRAME.to_numpy()).tolist() == [[1, 1], [1, 1]]
    assert weft.share([[1, 2.5], (3, True)]).tolist() == [[1, 2.5], [3, 1]]
    assert weft.share(range(3)).tolist() == [0, 1, 2]
    assert weft.share(collections.deque([1, 2])).tolist() == [1, 2]
    assert weft.share(memoryview(b"ab\0")).tolist() == [97, 98, 0]
    assert weft.share(["a", "bcd"]).tolist() == ["a", "bcd"]
    assert weft.share(3.5) == 3.5
    assert weft.share([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
    assert weft.share(torch.arange(3)).tolist() == [0, 1, 2]
    records = np.rec.array([(1, 2.5)], dtype=[("n", int), ("x", float)])
    assert weft.share(records)["x"].tolist() == [2.5]


# models whose arrays a library replaces


class Estimator:
    """It trains as estimators of scikit-learn may: by new arrays."""

    def __init__(self) -> None:
        self.coef_, self.intercept_ = np.zeros((1, 3)), np.zeros(1)

    def partial_fit(self) -> None:
        self.coef_ = self.coef_ + 1
        self.intercept_ = self.intercept_ + 1


def replaced_arrays(group: Group) -> None:
    estimator = Estimator()
    table = weft.ModelTable([estimator.coef_, estimator.intercept_])
    assert table.sync()
    estimator.partial_fit()
    group.barrier()
    with pytest.raises(InvalidValue, match=r"\[0\].*nothing but this ModelTable.*model\[0\] = "):
        table.sync()
    assert np.asarray(table.tables[0]).tolist() == [0] * 4

    weights = np.zeros(3)
    alone = weft.ModelTable(weights)
    weights += 1
    assert alone.sync()
    weights = weights - 1
    with pytest.raises(InvalidValue, match="w = w - step"):
        alone.sync()


def arrays_put_back(group: Group) -> None:
    estimator = Estimator()
    model = {"coef": estimator.coef_, "intercept": estimator.intercept_}
    table = weft.ModelTable(model)
    for _ in range(3):
        estimator.partial_fit()
        model.update(coef=estimator.coef_, intercept=estimator.intercept_)
        table.sync()
        assert model["coef"] is estimator.coef_
    group.barrier()
    table.sync()
    assert (estimator.coef_ == 3 * group.size).all()
    assert (estimator.intercept_ == 3 * group.size).all()


@pytest.mark.parametrize("body", [replaced_arrays, arrays_put_back])
def test_arrays_that_a_library_replaces(body: Any) -> None:
    """A sync of arrays that only the ModelTable still has is refused, and says what to write; that
    works."""
    body(weft.init(engine="serial"))
    run_ranks(2, body)


def test_a_list_of_your_own_is_warned_of() -> None:
    """If the list is the program's own, its arrays could still be used: a warning, once."""
    weft.init()
    estimator = Estimator()
    model = [estimator.coef_, estimator.intercept_]
    table = weft.ModelTable(model)
    table.sync()
    estimator.partial_fit()
    with pytest.warns(RuntimeWarning, match="has not changed since the last sync") as warned:
        table.sync()
    assert len(warned) == 2
    assert warned[0].filename == __file__
    assert table.sync()  # no second time
    model[:] = [estimator.coef_, estimator.intercept_]
    assert table.sync()
    assert np.asarray(table.tables[0]).tolist() == [1] * 4


def test_scikit_learn_itself() -> None:
    """The arrays of a linear model, of which partial_fit replaces some and changes others."""
    linear = pytest.importorskip("sklearn.linear_model")
    weft.init()
    x, y = np.random.default_rng(0).random((20, 3)), np.arange(20) % 2
    classifier = linear.SGDClassifier(random_state=0).partial_fit(x, y, classes=[0, 1])
    table = weft.ModelTable([classifier.coef_, classifier.intercept_])
    classifier.partial_fit(x, y)
    with pytest.raises(InvalidValue, match="partial_fit of scikit-learn"):
        table.sync()


def make_models() -> list[tuple[weft.ModelTable, Any]]:
    """Tables, and what the program keeps of their models."""
    flat, parts = np.zeros(4), [np.zeros(2), np.zeros(3)]
    views = [flat[:2], flat[2:]]
    mapped = np.frombuffer(bytearray(16))
    nested: dict[str, Any] = {"layers": [np.zeros(2), {"b": np.zeros(1)}], "scale": (np.ones(1),)}
    kept = np.zeros(2)
    return [
        (weft.ModelTable(views), views),
        (weft.ModelTable([flat[1:]]), flat),
        (weft.ModelTable(parts), parts),
        (weft.ModelTable(nested), nested),
        (weft.ModelTable([mapped]), mapped),
        (weft.ModelTable([kept]), memoryview(kept)),
        (weft.ModelTable([kept]), torch.from_numpy(kept)),
    ]


def test_what_the_program_can_reach_is_not_refused() -> None:
    """Through a container, an array, a view, a buffer or a tensor: whatever has the memory."""
    weft.init()
    for table, kept in make_models():
        assert table.sync(), kept  # nor does anything warn


def test_a_model_that_has_become_another() -> None:
    """Arrays of another shape, kind or number are refused; they would be stretched or rounded."""
    weft.init()
    model = {"w": np.zeros(3), "n": np.zeros(1, int)}
    table = weft.ModelTable(model)
    for name, other in (("w", np.zeros(1)), ("w", np.zeros((3, 1))), ("n", np.zeros(1))):
        old, model[name] = model[name], other
        with pytest.raises(InvalidValue, match="make a new ModelTable for another model"):
            table.sync()
        model[name] = old
    model["new"] = np.zeros(2)
    with pytest.raises(InvalidValue, match="make a new ModelTable"):
        table.sync()
    del model["new"]
    assert table.sync()
