"""Every name and argument of both generations of Synkhronos, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
import weft
from synkhronos.extensions import train, updates
from weft.errors import InvalidType, InvalidValue

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 3)).astype("float32")
Y = RNG.normal(size=(3,)).astype("float32")


class Model:
    """Two variables, s and m, and functions that use one each; s is [1, 1] and [3, 5]."""

    def __init__(self) -> None:
        self.s = pytensor.shared(np.ones(2, "float32"), "s")
        self.m = pytensor.shared(np.zeros((1, 2), "float32"), "m")
        self.of_s = synk.function([], self.s.sum())
        self.of_m = synk.function([], self.m.sum())
        synk.set_value(1, self.s, [3, 5])


@pytest.fixture(name="model")
def _model() -> Iterator[Model]:
    model = Model()
    yield model
    del model.of_s, model.of_m


@pytest.mark.parametrize("name", ["shared_vars", "vars"])
def test_collectives_by_either_name(name: str, model: Model) -> None:
    """All ten, with every argument by its name; and what they return."""
    s, m = model.s, model.m
    one: dict[str, Any] = {name: s}
    both: dict[str, Any] = {name: [s, m]}
    assert synk.broadcast(**one, values=[1, 1], nccl=False) is None
    assert synk.set_value(rank=1, **one, values=[3, 5], batch=None) is None
    assert synk.get_value(rank=1, **one).tolist() == [3, 5]
    assert [value.tolist() for value in synk.get_value(1, **both)] == [[3, 5], [[0, 0]]]
    assert synk.gather(**one, nd_up=1, nccl=True).tolist() == [[1, 1], [3, 5]]
    assert type(synk.gather(**both)) is type(synk.get_value(1, **both)) is tuple
    assert synk.reduce(**one, op="sum", in_place=False, nccl=True).tolist() == [4, 6]
    assert type(synk.reduce(**both, in_place=False)) is tuple
    assert synk.reduce(**one, op="sum") is None
    assert synk.gather(**one).tolist() == [[4, 6], [3, 5]]
    assert synk.all_reduce(**one, op="max", nccl=True) is None
    assert synk.gather(**one).tolist() == [[4, 6], [4, 6]]
    assert synk.all_gather(**one, nccl=True) is None
    assert synk.get_lengths(**one) == [4, 4]
    assert synk.scatter(**one, values=np.arange(7.0, dtype="float32"), batch=slice(1, 6)) is None
    assert synk.get_shapes(**one) == [(2,), (3,)]
    assert (synk.get_lengths(**both), synk.get_lengths(**{name: [s]})) == (
        ([2, 3], [1, 1]),
        ([2, 3],),
    )
    assert synk.get_shapes(**both) == ([(2,), (3,)], [(1, 2), (1, 2)])
    with pytest.raises(InvalidType, match="got 'shared_vars' twice: as 'vars' too"):
        synk.gather(vars=s, shared_vars=s)


def test_a_wrong_keyword(model: Model) -> None:
    """Is named, with the nearest one; nothing of PyTensor's is heard."""
    x = pt.matrix("x", dtype="float32")
    build = synk.function
    f = build([x], x.sum())
    y = pt.vector("y", dtype="float32")
    loss = (x.dot(model.s) - y).mean()
    alone = train.make_train_function_theano(loss, [model.s], x, y, updates.sgd, 0.1)
    wrong: list[tuple[Any, str, str]] = [
        (lambda: synk.gather(model.s, nd_op=0), "nd_op", "nd_up"),
        (lambda: synk.reduce(shared_var=model.s), "shared_var", "shared_vars"),
        (lambda: synk.fork(n_parallell=2), "n_parallell", "n_parallel"),
        (lambda: build([x], x, broadcast_input=[]), "broadcast_input", "broadcast_inputs"),
        (lambda: build([x], x, sliceable_share=[]), "sliceable_share", "sliceable_shareds"),
        (lambda: build([x], x, allow_downcast=1), "allow_downcast", "allow_input_downcast"),
        (lambda: synk.data(X).set_value(input_dat=X), "input_dat", "input_data"),
        (lambda: updates.sgd(los=x.sum(), params=[]), "los", "loss"),
        (lambda: f(X, btach=3), "btach", "batch"),
        (lambda: f.as_theano(y=X), "y", ""),
        (lambda: f.build_inputs(X, minibtach=True), "minibtach", "minibatch"),
        (lambda: build(imputs=[x], outputs=x), "imputs", "inputs"),
        (lambda: train.make_train_function(x.sum(), parms=[]), "parms", "params"),
        (lambda: train.make_train_function([x], output=x.sum()), "train_.*output=", "outputs="),
        (lambda: alone(X, y_dta=X), r"^train\(y_dta=", "y_data="),
    ]
    for call, name, close in wrong:
        with pytest.raises(InvalidType, match=f"{name}.*{close}"):
            call()


def test_february_by_its_order(model: Model) -> None:
    """Nothing is passed over: not an array to write to, not an argument too many or given twice."""
    into = np.zeros((2, 2), "float32")
    assert synk.gather(model.s, None, into) is None
    assert into.tolist() == [[1, 1], [3, 5]]
    assert synk.reduce(model.s, None) is None
    assert model.s.get_value().tolist() == [2, 3]
    with pytest.raises(
        InvalidType, match=r"all_reduce got 4 arguments; expected 3 .*: shared_vars"
    ):
        synk.all_reduce(None, model.of_s, "sum", True)
    with pytest.raises(InvalidType, match="gather got 'functions' twice"):
        synk.gather(None, model.of_s, functions=model.of_m)


def test_data_by_either_name() -> None:
    """What a value is called; what is read only is that."""
    data = synk.data(value=X, minibatch=True, name="d")
    data.set_value(input_data=X + 1, force_cast=False, oversize=1)
    data.set_value(value=X)
    assert (data.data == X).all()
    for name in ("input_data", "value"):
        found = data.condition_data(**{name: X.astype("int8")}, force_cast=False)
        assert found.dtype == np.float32
    assert (data.name, data.minibatch) == ("d", True)


def test_a_function_of_february() -> None:
    """Which of the inputs are split, by their variables or names, in any order."""
    x, y = pt.matrix("x", dtype="float32"), pt.vector("y", dtype="float32")
    z = x.dot(y).mean(axis=0)
    calls: list[tuple[Any, tuple[Any, Any]]] = [
        (synk.function([x, y], z, broadcast_inputs=[y]), (X, Y)),
        (synk.function([y, x], z, broadcast_inputs=["y"]), (Y, X)),
        (synk.function([y, x], z, scatter_inputs=[x]), (Y, X)),
        (synk.function([x, y], z, "reduce", "avg", [y]), (X, Y)),
        (synk.function([x, y], z, "reduce", "avg", None, [x]), (X, Y)),
    ]
    synk.distribute()
    for f, values in calls:
        assert np.isclose(f(*values), X.dot(Y).mean(), rtol=1e-5)
        assert np.isclose(f(x=X, y=Y, num_slices=3), f.as_theano(*values), rtol=1e-5)
        assert np.isclose(f.theano_function(*values)[0], f.as_theano(*values))
        assert np.isclose(f(*values, batch=[4, 0]), X[[4, 0]].dot(Y).mean(), rtol=1e-5)
        assert [one.name for one in f.build_inputs(*values)] == [
            "x" if value is X else "y" for value in values
        ]
    whole = synk.function([y], updates={}, outputs=(y.sum(), "sum"), broadcast_inputs=[y])
    assert np.isclose(whole(Y), 2 * Y.sum(), rtol=1e-5)  # both processes have all of it
    for options, words in (
        ({"broadcast_inputs": [x], "scatter_inputs": [y]}, "both given"),
        ({"broadcast_inputs": [pt.vector("w")]}, "broadcast_inputs has w, which is none"),
        ({"scatter_inputs": ["w"]}, "scatter_inputs has w"),
    ):
        with pytest.raises(InvalidValue, match=words):
            synk.function([x, y], z, **options)
    with pytest.raises(InvalidType, match=r"broadcast_inputs=.*expected a list"):
        synk.function([x, y], z, broadcast_inputs=y)


def test_modes_of_february() -> None:
    """Two arguments for all outputs, or one each."""
    x = pt.matrix("x", dtype="float32")
    outputs = [x.sum(), x.max(), x.sum(axis=1), x.sum()]
    f = synk.function(
        [x],
        outputs,
        collect_modes=["reduce", "reduce", "gather", None],
        reduce_ops=["sum", "max", None, None],
    )
    assert f.output_modes == ["sum", "max", "gather", None]
    assert f.output_to_cpu == [True] * 4
    found = f(X)
    expected = [X.sum(), X.max(), X.sum(axis=1), X[:3].sum()]
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one, other, rtol=1e-4)
    assert synk.function([x], x.sum(axis=1), "gather").output_modes == ["gather"]
    assert synk.function([x], x.sum(), reduce_ops="sum").output_modes == ["sum"]
    assert synk.function([x], [x.sum(), x.max()], [None, "reduce"], "max").output_modes == [
        None,
        "max",
    ]
    for wrong, words in (
        ({"collect_modes": "sum"}, "collect_modes has 'sum'; expected 'reduce', 'gather' or None"),
        ({"collect_modes": ["gather"]}, "1 entries for 2 outputs"),
        ({"reduce_ops": "mean"}, "has the mode 'mean'"),
    ):
        with pytest.raises(InvalidValue, match=words):
            synk.function([x], outputs[:2], **wrong)
    with pytest.raises(InvalidValue, match="and collect_modes or"):
        synk.function([x], (x.sum(), "sum"), collect_modes="gather")


def test_inputs_in_shared_memory() -> None:
    """Those of the last call, or those that are given; a call with them moves nothing."""
    x, y = pt.matrix("x", dtype="float32"), pt.vector("y", dtype="float32")
    f = synk.function([x, y], x.dot(y).sum(), broadcast_inputs=[y], reduce_ops="sum")
    with pytest.raises(InvalidValue, match=r"got no inputs.*expected 2: \['x', 'y'\]"):
        f.get_input_shmems()
    found = f(X, Y)
    for memory in (f.get_input_shmems(), f.get_input_shmems(X, y=Y)):
        assert all(isinstance(one, weft.SharedArray) for one in memory)
        assert np.isclose(f(*memory), found)
        memory[0][4:] = 0
        assert np.isclose(f(memory[0][:5], memory[1]), X[:4].dot(Y).sum(), rtol=1e-4)


def test_collectives_of_february(model: Model) -> None:
    """Of the variables of functions, or of all; results are written where it is said."""
    s, m = model.s, model.m
    assert synk.broadcast(functions=model.of_m) is None
    assert synk.gather(s).tolist() == [[1, 1], [3, 5]]
    assert synk.gather(functions=[model.of_s]).tolist() == [[1, 1], [3, 5]]
    assert synk.gather(None, [model.of_s], None, 0).tolist() == [1, 1, 3, 5]
    both = synk.gather(m, functions=model.of_s)
    assert [one.shape for one in both] == [(2, 1, 2), (2, 2)]
    into = np.zeros((2, 2), "float32")
    assert synk.gather(s, dest=into) is None
    assert into.tolist() == [[1, 1], [3, 5]]
    assert synk.reduce(s, None, "sum", False).tolist() == [4, 6]
    assert synk.reduce(s, op="max", dest=into[0]) is None
    assert (into[0].tolist(), s.get_value().tolist()) == ([3, 5], [1, 1])
    synk.scatter(m, [ROW, ROW + 2])
    assert synk.gather(m, nd_up=0).tolist() == [[0, 1], [2, 3]]
    synk.scatter(shared_var=m, sources=[ROW, ROW])
    assert synk.gather(m, nd_up=0).tolist() == [[0, 1], [0, 1]]
    synk.all_gather(source=s, dest=m)
    assert synk.get_value(1, m).tolist() == m.get_value().tolist() == [[1, 1], [3, 5]]
    synk.all_gather(m, "m")
    assert synk.get_lengths(m) == [4, 4]
    synk.all_reduce(functions=model.of_s, op="sum")
    synk.all_reduce(None, [model.of_s], "sum")
    assert synk.gather(s).tolist() == [[8, 12], [8, 12]]
    synk.set_value(1, s, [0, 0])
    synk.broadcast()
    assert synk.gather(s).tolist() == [[8, 12], [8, 12]]
    assert len(synk.gather()) >= 2
    synk.reduce()
    with pytest.raises(InvalidValue, match=r"all_gather got 2 variables and dest= of 1"):
        synk.all_gather([s, m], dest=m)
    with pytest.raises(InvalidValue, match=r"dest= for 2 variables"):
        synk.gather([s, m], dest=into)
    with pytest.raises(InvalidType, match=r"dest= a ndarray of shape \(2, 2\); expected .* \(4,\)"):
        synk.gather(s, nd_up=0, dest=into)
    with pytest.raises(InvalidType, match=r"functions=3; expected what synkhronos\.function"):
        synk.gather(functions=3)
    with pytest.raises(InvalidValue, match="one value for each rank, and batch="):
        synk.scatter(m, [ROW, ROW], batch=1)


ROW = np.array([[0, 1]], "float32")


def test_inputs_that_are_built() -> None:
    """One Data of one input, a tuple of several; a minibatch or not, each for itself."""
    x, y = pt.matrix("x", dtype="float32"), pt.vector("y", dtype="float32")
    f = synk.function([x, y], (x[:, 0] * 0 + y, "gather"))
    one = synk.function([x], x.sum()).build_inputs(X, force_cast=False, oversize=1.0)
    assert isinstance(one, synk.Data)
    both = f.build_inputs(X, [1.0, 2.0], minibatch=[False, True])
    assert isinstance(both, tuple)
    assert [data.minibatch for data in both] == [False, True]
    assert f(*both, batch=[6, 2]).tolist() == [1, 2]
    assert [data.minibatch for data in f.build_inputs(X, Y, minibatch=True)] == [True, True]
    with pytest.raises(InvalidValue, match="3 entries for 2 inputs"):
        f.build_inputs(X, Y, minibatch=[True] * 3)


def trained(rule: Any, *arguments: Any, **keywords: Any) -> list[tuple[Any, Any]]:
    """Losses and parameters after each of three steps: with all processes, and in this one."""
    x, y = pt.matrix("x"), pt.vector("y")
    w = pytensor.shared(np.ones((3, 1)), "w")
    b = pytensor.shared(np.ones((1,)), "b", shape=(1,))
    loss = ((x.dot(w)[:, 0] + b - y) ** 2).mean()
    values = X.astype("float64"), X.sum(axis=1).astype("float64")
    found = []
    for make in (train.make_train_function, train.make_train_function_theano):
        synk.function([], w.sum() + b.sum())  # the workers have them, for broadcast
        for one in (w, b):
            one.set_value(np.ones(one.get_value().shape))
        step = make(loss, [w, b], x, y, rule, *arguments, **keywords)
        if make is train.make_train_function:
            synk.broadcast([w, b])
        for _ in range(3):
            found.append((step(*values), [one.get_value() for one in (w, b)]))
        if make is train.make_train_function:
            assert weft.same(w)
            assert weft.same(b)
    return found


def momentum_of(apply: Any) -> Any:
    """An update rule of one's own: momentum on top of gradient descent."""

    def rule(loss: Any, params: Any, learning_rate: Any) -> Any:
        gradients, steps, flat = updates.sgd(loss_or_grads=loss, params=params, learning_rate=0.1)
        return gradients, apply(steps, momentum=learning_rate * 9), flat

    return rule


@pytest.mark.parametrize(
    "case",
    [
        (updates.adam, 0.01),
        (updates.sgd_nonflat, 0.1),
        (momentum_of(updates.apply_momentum), 0.1),
        (momentum_of(updates.apply_nesterov_momentum), 0.1),
    ],
    ids=["adam", "sgd_nonflat", "apply_momentum", "apply_nesterov_momentum"],
)
def test_training_in_its_old_form(case: tuple[Any, float]) -> None:
    """The steps of all processes are those of one."""
    rule, rate = case
    found = trained(rule, rate)
    for (loss, values), (other, others) in zip(found[:3], found[3:], strict=True):
        assert np.isclose(loss, other)
        assert all(np.allclose(*pair) for pair in zip(values, others, strict=True))
    assert found[2][0] < found[0][0]


def test_momentum_that_is_applied() -> None:
    """Is the momentum of the rules that have it."""
    x = pt.vector("x")
    for apply, rule in (
        (updates.apply_momentum, updates.momentum),
        (updates.apply_nesterov_momentum, updates.nesterov_momentum),
    ):
        results = []
        for own in (False, True):
            w = pytensor.shared(np.array([1.0, 2.0]), "w")
            loss = (x * w**2).sum()
            first, steps, _ = rule(loss, [w], 0.1) if own else updates.sgd(loss, [w], 0.1)
            gradient = pytensor.function([x], updates=first)
            step = pytensor.function([], updates=steps if own else apply(steps, 0.9))
            for _ in range(3):
                gradient([1.0, 3.0])
                step()
            results.append(w.get_value())
        assert np.allclose(*results)


def test_flat_variables() -> None:
    """Of several variables one, and back."""
    a = pytensor.shared(np.arange(6.0).reshape(2, 3), "a")
    b = pytensor.shared(np.array(7.0), "b")
    assert updates.vars_flat_size([a, b]) == 7
    assert updates.flatten_vars([a, b]).eval().tolist() == [0, 1, 2, 3, 4, 5, 7]
    flat = pytensor.shared(np.arange(7.0) * 2)
    parts = [one.eval() for one in updates.unflatten_vars(flat, [a, b])]
    assert (parts[0] == a.get_value() * 2).all()
    assert parts[1] == 12
    loss = (a**2).sum() + 3 * b
    shared, gradient, back = updates.flat_unflat_grads(loss, [a, b])
    assert gradient.eval().tolist() == [0, 2, 4, 6, 8, 10, 3]
    assert shared.get_value().shape == (7,)
    assert [one.eval().shape for one in back] == [(2, 3), ()]
    each, gradients = updates.nonflat_grads(loss_or_grads=loss, params=[a, b])
    assert [one.get_value().shape for one in each] == [(2, 3), ()]
    assert gradients[1].eval() == 3
    first, steps, variables = updates.sgd_nonflat(loss, [a, b], 0.5)
    assert [one for one, _ in first] == variables
    pytensor.function([], updates=first)()
    pytensor.function([], updates=steps)()
    assert (a.get_value() == 0).all()  # a - 0.5 * 2 a
    assert b.get_value() == 5.5
