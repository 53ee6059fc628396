"""synkhronos.function: what calls give, and what they refuse."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
from weft.errors import InvalidType, InvalidValue

X = np.arange(14, dtype="float32").reshape(7, 2)


def variables() -> tuple[Any, Any]:
    return pt.matrix("x", dtype="float32"), pt.vector("y", dtype="float32")


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=1e-5))


@pytest.mark.parametrize("rows", [7, 2, 1, 0])
@pytest.mark.parametrize("prefix", ["", "c_"])
def test_every_mode(rows: int, prefix: str) -> None:
    """Each gives what one process gives, however the rows split."""
    x, y = variables()
    outputs = {
        "avg": x.dot(y).sum() / x.shape[0],
        "sum": x.sum(axis=0),
        "prod": (x + 1).prod(axis=0),
        "gather": x.dot(y),
    }
    if rows:
        outputs |= {"min": x.min(), "max": (x * x).max(axis=0)}
    f = synk.function([x], [(v, prefix + m) for m, v in outputs.items()], bcast_inputs=[y])
    assert f.output_modes == list(outputs)
    found, whole = f(X[:rows], [1.0, 2.0]), f.as_theano(X[:rows], [1.0, 2.0])
    assert isinstance(found, list)
    for mode, one, other in zip(outputs, found, whole, strict=True):
        assert one.dtype == other.dtype, mode
        assert np.allclose(one, other, equal_nan=True), mode


def test_a_single_output_and_none() -> None:
    """A variable gives a value, a list a list; no outputs give what PyTensor gives."""
    x, _ = variables()
    assert close(synk.function([x], x.mean())(X), X.mean())
    assert close(synk.function([x], (x.sum(), "sum"))(X), X.sum())
    assert close(synk.function([x], [x.mean()])(X), [X.mean()])
    several = synk.function([x], (x.mean(), x.max()))
    assert several.output_modes == ["avg", "avg"]
    assert len(several(X)) == 2
    assert synk.function([x], on_unused_input="ignore")(X) == []


def test_the_callers_own_output() -> None:
    """None keeps what this process computed, which is nothing of too few rows."""
    x, _ = variables()
    f = synk.function([x], [(x.sum(), None), (x.sum(), "sum")])
    assert close(f(X), [X[:3].sum(), X.sum()])
    assert close(f(X[:1], output_subset=[1]), [X[0].sum()])
    with pytest.raises(InvalidValue, match=r"mode None.* of 1 rows for 2 processes this one has"):
        f(X[:1])


def test_integers_are_averaged_as_floats() -> None:
    """A mean of counts is no count."""
    x, _ = variables()
    found = synk.function([x], x.shape[0])(X)
    assert close(found, (4 * 4 + 3 * 3) / 7)


def test_names_and_options() -> None:
    """Inputs by name, outputs by position, a function's name, options of PyTensor."""
    x, y = variables()
    f = synk.function(
        [x],
        [(x.sum(), "sum"), (x.dot(y), "gather"), (x.max(), "max")],
        bcast_inputs=[y],
        name="three",
        allow_input_downcast=True,
    )
    assert f.name == "three"
    assert synk.function([x], x.sum()).name is None
    assert "three" in repr(f)
    assert close(f(X, y=np.ones(2, "float32"))[1], X.sum(axis=1))
    assert close(f(y=np.ones(2, "float32"), x=X, output_subset=[2, 0]), [13, X.sum()])
    for wrong, kind in (([3], InvalidValue), ([-1], InvalidValue), (2, InvalidType)):
        with pytest.raises(kind, match="output_subset"):
            f(X, np.ones(2, "float32"), output_subset=wrong)
    with pytest.raises(InvalidType, match=r"'z'.*\['x', 'y'\]"):
        f(X, z=X)
    with pytest.raises(InvalidType, match="'x' twice"):
        f(X, x=X)
    with pytest.raises(InvalidType, match="got 1 inputs; expected 2"):
        f(X)
    with pytest.raises(InvalidType, match="got 3 inputs; expected 2"):
        f(X, X, X)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (3, [0, 1, 2]),
        (np.int64(2), [0, 1]),
        (slice(1, 6), [1, 2, 3, 4, 5]),
        (slice(None, None, 2), [0, 2, 4, 6]),
        ([5, 1, 1, -1], [5, 1, 1, 6]),
        (np.array([4, 2]), [4, 2]),
    ],
)
def test_a_batch(batch: Any, rows: list[int]) -> None:
    """Chooses rows of all split inputs, arrays and Data, and of nothing else."""
    x, y = variables()
    f = synk.function([x, y], [(x.sum(axis=1) + y, "gather"), x.mean()])
    y_values = np.arange(7, dtype="float32")
    for given in ((X, y_values), f.build_inputs(X, y_values)):
        gathered, mean = f(*given, batch=batch)
        assert close(gathered, X[rows].sum(axis=1) + y_values[rows])
        assert close(mean, X[rows].mean())


def test_a_minibatch() -> None:
    """It is paired with the batch by position: its row 0 belongs to the batch's first row."""
    x, y = variables()
    f = synk.function([x, y], (x.sum(axis=1) * 0 + y * x[:, 0], "gather"))
    x_data = synk.data(X, x)
    w = synk.data(np.array([1, 10, 100, 1000], "float32"), y, minibatch=True)
    ones = synk.data(np.arange(7, dtype="float32")[:, None] * np.ones(2, "float32"), x)
    assert f(ones, w, batch=[5, 3, 4, 6]).tolist() == [5, 30, 400, 6000]  # the old code's numbers
    assert f(ones, w, batch=[0, 6]).tolist() == [0, 60]  # past its own rows
    for batch in (slice(3, 6), slice(1, 7, 2), [5, 3, 4], np.array([6, 0, 0, 3]), 4):
        rows = np.arange(7)[:batch] if isinstance(batch, int) else np.arange(7)[batch]
        serial = f.as_theano(X[rows], w[: len(rows)])
        for slices in (1, 2):
            assert close(f(x_data, w, batch=batch, num_slices=slices), serial), batch
    with pytest.raises(InvalidValue, match=r"the batch has 5 rows, and the minibatch 'y' has 4"):
        f(x_data, w, batch=5)
    with pytest.raises(InvalidValue, match="different numbers of rows"):
        f(x_data, w)
    with pytest.raises(InvalidType, match="expected a minibatch of dtype float32 with 1 axes"):
        f(x_data, synk.data(np.zeros(3, "int16"), minibatch=True), batch=slice(3, 6))
    g = synk.function([y], (y, "gather"))
    assert g(w, batch=2).tolist() == [1, 10]
    for batch in ([5, 3, 4, 6], slice(4, 8), 4, slice(None)):  # all of them are minibatches: only
        assert g(w, batch=batch).tolist() == [1, 10, 100, 1000]  # the number of rows counts
    for batch in (5, slice(4, 9), [0] * 5):
        with pytest.raises(InvalidValue, match="the batch has 5 rows, and the minibatch 'y' has 4"):
            g(w, batch=batch)


@pytest.mark.parametrize(
    ("batch", "kind", "words"),
    [
        (8, InvalidValue, "batch=8: expected the first 0 to 7"),
        (-1, InvalidValue, "batch=-1"),
        ([0, 7], InvalidValue, "the row 7"),
        (slice(5, 10), InvalidValue, r"batch=slice\(5, 10, None\): expected an end of 7 at most"),
        ([0.5], InvalidType, "float64"),
        ("all", InvalidType, "batch is a str"),
    ],
)
def test_wrong_batches(batch: Any, kind: type[Exception], words: str) -> None:
    """Say what was expected."""
    x, _ = variables()
    with pytest.raises(kind, match=words):
        synk.function([x], x.sum())(X, batch=batch)


def test_wrong_inputs() -> None:
    """Up-casts are done, lossy ones refused; axes and lengths must fit."""
    x, y = variables()
    f = synk.function([x, y], x.sum() + y.sum(), name="f")
    ones = np.ones(7, "float32")
    assert close(f(X.astype("int16"), ones.tolist()), f(X, ones))
    with pytest.raises(InvalidType, match=r"f: the input 'x' has dtype float64; expected float32"):
        f(X.astype("float64"), ones)
    with pytest.raises(InvalidType, match="dtype int64; expected float32"):
        f(X.astype("int64"), ones)
    with pytest.raises(InvalidType, match="expected float32"):
        f(X, [1j] * 7)
    with pytest.raises(InvalidValue, match=r"'y' has 2 axes \(shape \(7, 1\)\); expected.* 1"):
        f(X, ones[:, None])
    with pytest.raises(InvalidValue, match="'x' has 7, 'y' has 6"):
        f(X, ones[:6])
    with pytest.raises(InvalidType, match="expected numbers"):
        f(X, ["a"] * 7)
    with pytest.raises(InvalidValue, match="is no array"):
        f([[1.0], [1.0, 2.0]], ones)
    built = f.build_inputs(X.astype("float64"), ones, force_cast=True, oversize=1.5)
    assert [one.name for one in built] == ["x", "y"]
    assert built[0].alloc_size == 21
    assert close(f(*built), f(X, ones))


def test_wrong_functions() -> None:
    """What is wrong with a function is said when it is built."""
    x, _ = variables()
    s = pytensor.shared(np.ones(2), "s")
    with pytest.raises(InvalidValue, match=r"outputs\[0\] has the mode 'mean'.*'avg', 'sum'.*None"):
        synk.function([x], (x.sum(), "mean"))
    with pytest.raises(InvalidValue, match=r"updates\[0\] has the mode 'all'"):
        synk.function([x], updates=[(s, s + 1, "all")])
    with pytest.raises(InvalidType, match=r"updates\[0\]"):
        synk.function([x], updates=[s])
    with pytest.raises(InvalidValue, match="sliceable_shareds has s"):
        synk.function([x], x.sum(), sliceable_shareds=[s])
    with pytest.raises(InvalidType, match=r"inputs\[0\] is a ndarray"):
        synk.function([X], x.sum())
    for option, wrong in (
        ("inputs", x),
        ("inputs", None),
        ("bcast_inputs", x),
        ("sliceable_shareds", s),
        ("updates", s),
        ("givens", 3),
    ):
        with pytest.raises(InvalidType, match=f"{option}={wrong}: expected a list"):
            synk.function(**{"inputs": [x], "outputs": x.sum(), option: wrong})
    with pytest.raises(InvalidType, match=r"outputs\[0\] is a dict"):
        synk.function([x], {"sum": x.sum()})
    with pytest.raises(InvalidValue, match="'batch', which is an option"):
        synk.function([pt.matrix("batch")], s.sum())


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_slices(slices: int) -> None:
    """Give the same, and updates are computed from the values before the call and applied once."""
    x, y = variables()
    s = pytensor.shared(np.ones(2, "float32"), "s")
    t = pytensor.shared(np.float32(2), "t")
    count = pytensor.shared(0, "count")
    f = synk.function(
        [x],
        [x.mean(), (x.sum(), "sum"), (x.dot(y), "gather"), (x.max(), "max")],
        bcast_inputs=[y],
        updates=[(s, (x * s).sum(axis=0), "sum"), (t, t * x.mean()), (count, count + 1)],
    )
    assert f.update_modes == ["sum", "avg", "avg"]
    y_values = np.array([1, 2], "float32")
    found = f(X, y_values, num_slices=slices)
    assert close(found[0], X.mean())
    assert close(found[1], X.sum())
    assert close(found[2], X @ y_values)
    assert close(found[3], 13)
    assert close(synk.gather(s), [X[:3].sum(axis=0), X[3:].sum(axis=0)])
    assert close(synk.gather(t), [2 * X[:3].mean(), 2 * X[3:].mean()])
    assert synk.gather(count).tolist() == [1, 1]
    assert close(f(X, y_values, num_slices=slices, output_subset=[1]), [X.sum()])
    assert synk.gather(count).tolist() == [2, 2]


def test_slices_that_are_not_even() -> None:
    """Later ones have one row more, as the parts of later processes: it shows where what is
    collected is not of rows. Of 11 rows this process has 5, in slices of 2 and 3, the other 6."""
    rows = np.arange(1, 12, dtype="float32")
    x = pt.vector("x", dtype="float32")
    kept = pytensor.shared(np.zeros(5, "float32"), "kept")
    f = synk.function([x], [(x.sum(), "max"), (x.sum(), "min"), (x.sum(keepdims=True), "gather")])
    largest, smallest, sums = f(rows, num_slices=2)
    assert sums.tolist() == [1 + 2, 3 + 4 + 5, 6 + 7 + 8, 9 + 10 + 11]
    assert (largest, smallest) == (30, 3)
    g = synk.function([], (kept.sum(), "max"), sliceable_shareds=[kept])
    synk.scatter(kept, rows[:10])
    assert g(num_slices=2) == 8 + 9 + 10
    assert g(num_slices=2, batch_s=[4, 3, 2, 1, 0]) == 8 + 7 + 6
    assert g(num_slices=2, batch_s=slice(2, 5)) == 9 + 10


@pytest.mark.parametrize(
    ("slices", "kind"),
    [(0, InvalidValue), (8, InvalidValue), (1.5, InvalidType), (True, InvalidType)],
)
def test_wrong_slices(slices: Any, kind: type[Exception]) -> None:
    """One to as many as there are rows."""
    x, _ = variables()
    with pytest.raises(kind, match=f"num_slices={slices}: expected"):
        synk.function([x], x.sum())(X, num_slices=slices)


def test_slices_of_nothing() -> None:
    """Where no rows are split, there is nothing to slice."""
    s = pytensor.shared(np.float32(1), "s")
    f = synk.function([], s * 2, updates=[(s, s + 1)], name="f")
    assert f(num_slices=1) == 2
    with pytest.raises(InvalidValue, match="num_slices=2: f has nothing to slice"):
        f(num_slices=2)
    assert synk.gather(s).tolist() == [2, 2]


def test_sliceable_variables() -> None:
    """batch_s and num_slices choose rows of each rank's own."""
    x, y = variables()
    s = pytensor.shared(np.zeros((1, 2), "float32"), "rows")
    w = pytensor.shared(np.float32(3), "w")
    total = pytensor.shared(np.zeros(2, "float32"), "total")
    f = synk.function(
        [],
        [(x.sum(axis=0) * w, "sum"), (x, "gather"), x.mean()],
        givens={x: s},
        updates=[(total, total + x.sum(axis=0), "sum")],
        sliceable_shareds=[s],
    )
    synk.scatter(s, X)
    parts = [X[:3], X[3:]]

    def check(chosen: list[Any], **options: Any) -> None:
        rows = np.concatenate([part[one] for part, one in zip(parts, chosen, strict=True)])
        synk.broadcast(total, np.zeros(2, "float32"))
        found = f(**options)
        assert close(found[0], rows.sum(axis=0) * 3), options
        assert close(found[1], rows), options
        assert close(found[2], rows.mean()), options
        sums = [part[one].sum(axis=0) for part, one in zip(parts, chosen, strict=True)]
        assert close(synk.gather(total), sums), options

    all_rows = slice(None)
    check([all_rows, all_rows])
    check([all_rows, all_rows], num_slices=3)
    check([slice(2), slice(2)], batch_s=2)
    check([slice(1, 3), slice(1, 3)], batch_s=slice(1, 3), num_slices=2)
    check([[2, 0], [2, 0]], batch_s=[2, 0])
    check([[1, 2], [3, 0, 0]], batch_s=[[1, 2], [3, 0, 0]], num_slices=2)
    check([slice(0, 1), slice(4)], batch_s=[slice(0, 1), 4])
    check([slice(0, 2), [2, 1]], batch_s=[slice(0, 2), np.array([2, 1])])
    check([[0, 2], [0, 2]], batch_s=slice(None, None, 2))
    for wrong, words in (
        ([slice(1)] * 3, "3 ranks; expected one for all, or 2"),
        (slice(0, 4), r"batch_s=slice\(0, 4, None\): expected an end of 3 at most"),
        (5, "batch_s=5"),
        ([0, 3], "the row 3"),
    ):
        with pytest.raises(InvalidValue, match=words):
            f(batch_s=wrong)
    with pytest.raises(InvalidValue, match="num_slices=4: expected 1 to 3"):
        f(num_slices=4)
    with pytest.raises(InvalidValue, match="without sliceable variables"):
        synk.function([y], y.sum())(X[:, 0], batch_s=2)


def test_rows_of_inputs_beside_those_of_variables() -> None:
    """They are cut together, so each rank needs as many of both."""
    _, y = variables()
    s = pytensor.shared(np.zeros(1, "float32"), "s")
    f = synk.function([y], [(y * s, "gather"), ((y + s).sum(), "sum")], sliceable_shareds=[s])
    tens, hundreds = np.arange(10, 16, dtype="float32"), np.arange(100, 106, dtype="float32")
    synk.set_value(0, s, tens)
    synk.set_value(1, s, hundreds)
    values = np.arange(7, dtype="float32")
    expected = np.concatenate([values[:3] * tens[:3], values[3:] * hundreds[:4]])
    total = values.sum() + tens[:3].sum() + hundreds[:4].sum()
    for slices in (1, 2, 3):
        found = f(values, batch_s=[slice(3), slice(4)], num_slices=slices)
        assert found[0].tolist() == expected.tolist()
        assert found[1] == total
    chosen = f(values, batch=[6, 0], batch_s=[[5], [2]])
    assert chosen[0].tolist() == [6 * 15, 0 * 102]
    for options in ({"batch_s": 4}, {"num_slices": 2}, {"batch": 4, "batch_s": 3}):
        with pytest.raises(
            InvalidValue, match=r"has \d rows of the inputs and \d of s; expected as"
        ):
            f(values, **options)


def test_functions_share_variables() -> None:
    """One variable in each process, whichever function uses it and whenever it was built."""
    x, _ = variables()
    s = pytensor.shared(np.zeros(2, "float32"), "s")
    add = synk.function([x], updates={s: s + x.sum(axis=0)})
    synk.distribute()
    add(X)
    double = synk.function([], (s, "sum"), updates=[(s, s * 2)])  # built after distribute
    assert close(double(), X.sum(axis=0))
    synk.distribute()
    synk.distribute()
    plain = pytensor.function([], s, updates=[(s, s * 0)])  # of this process only
    assert close(plain(), 2 * X[:3].sum(axis=0))
    assert close(synk.gather(s), [[0, 0], 2 * X[3:].sum(axis=0)])


def test_random_numbers() -> None:
    """Each process draws its own, and functions that share a generator go on from each other."""
    rng = pytensor.shared(np.random.default_rng(1), "rng")
    after, draws = pt.random.uniform(size=(2,), rng=rng, return_next_rng=True)
    f = synk.function([], (draws, "gather"), updates={rng: after})
    g = synk.function([], (draws * 1, "gather"), updates={rng: after})
    found = np.concatenate([f(), g(), f()])
    assert len(np.unique(found)) == 12


def test_an_exception_in_a_worker() -> None:
    """Comes here as what it is, and the next call works."""
    x, y = variables()
    f = synk.function([x], (x[3:].dot(y).sum(), "sum"), bcast_inputs=[y])
    with pytest.raises(ValueError):
        f(X, np.ones(3, "float32"))
    assert close(f(X, np.ones(2, "float32")), X[6].sum())


def test_many_functions_come_and_go() -> None:
    """A variable that no function uses any more is no longer known."""
    s = pytensor.shared(np.ones(2), "gone")
    f = synk.function([], s.sum())
    assert f() == 2
    assert synk.get_lengths("gone") == [2, 2]
    del f
    gc.collect()
    with pytest.raises(InvalidValue, match="'gone'"):
        synk.get_lengths(s)
