"""Updaters: the rules against torch's, blocks against one block, and what is refused."""

from __future__ import annotations

import doctest
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import kernels
from weft._core import updaters
from weft._core.updaters import (
    BLOCK,
    BUILT_IN,
    Updater,
    adagrad,
    adam,
    add,
    custom,
    from_saved,
    momentum,
    resolve,
    rmsprop,
    sgd,
)
from weft.errors import InvalidType, InvalidValue

#: each rule beside torch's
RULES: dict[str, tuple[Updater, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (sgd(), torch.optim.SGD),
    "sgd, lr": (sgd(0.1), functools.partial(torch.optim.SGD, lr=0.1)),
    "momentum": (momentum(), functools.partial(torch.optim.SGD, momentum=0.9)),
    "momentum, all options": (
        momentum(lr=0.02, momentum=0.5),
        functools.partial(torch.optim.SGD, lr=0.02, momentum=0.5),
    ),
    "nesterov": (
        momentum(lr=0.02, nesterov=True),
        functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    ),
    "adagrad": (adagrad(), torch.optim.Adagrad),
    "adagrad, all options": (
        adagrad(lr=0.1, eps=0.01),
        functools.partial(torch.optim.Adagrad, lr=0.1, eps=0.01),
    ),
    "rmsprop": (rmsprop(), torch.optim.RMSprop),
    "rmsprop, all options": (
        rmsprop(lr=0.1, alpha=0.5, eps=0.01),
        functools.partial(torch.optim.RMSprop, lr=0.1, alpha=0.5, eps=0.01),
    ),
    "adam": (adam(), torch.optim.Adam),
    "adam, all options": (
        adam(lr=0.1, beta1=0.5, beta2=0.8, eps=0.01),
        functools.partial(torch.optim.Adam, lr=0.1, betas=(0.5, 0.8), eps=0.01),
    ),
}
EDGES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]
#: torch's name for each array of state
TORCH_STATE = {
    ("momentum", "velocity"): "momentum_buffer",
    ("adagrad", "squares"): "sum",
    ("rmsprop", "mean_square"): "square_avg",
    ("adam", "mean"): "exp_avg",
    ("adam", "mean_square"): "exp_avg_sq",
}


def fresh(shape: Any, dtype: str, seed: int = 0) -> Any:
    """Random numbers, some of them 0."""
    values = np.random.default_rng(seed).normal(size=shape)
    values[np.abs(values) < 0.05] = 0
    return values.astype(dtype)


def zeros(updater: Updater, rows: Any) -> dict[str, Any]:
    """The state of rows that have had no add."""
    return {name: np.zeros_like(rows) for name in updater.state}


def after(updater: Updater, rows: Any, deltas: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Rows and state after some adds; the rows given stay as they are."""
    rows = rows.copy()
    state = zeros(updater, rows)
    for step, delta in enumerate(deltas, start=1):
        updater.update(rows, state, delta, step)
    return rows, state


def same_bits(one: tuple[Any, dict[str, Any]], other: tuple[Any, dict[str, Any]]) -> bool:
    """Whether rows and state are alike to the last bit."""
    names = [None, *one[1]]
    arrays = (
        (pair[0] if name is None else pair[1][name] for pair in (one, other)) for name in names
    )
    return all(a.tobytes() == b.tobytes() for a, b in arrays)


def compare_with_torch(rule: str, shape: Any, dtype: str, steps: int) -> None:
    """Rows and state are torch's to rounding after every step."""
    updater, optimizer = RULES[rule]
    rows = fresh(shape, dtype)
    state = zeros(updater, rows)
    parameter = torch.nn.Parameter(torch.from_numpy(rows.copy()))
    theirs = optimizer([parameter])
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-13, "atol": 1e-14}
    for step in range(1, steps + 1):
        delta = fresh(shape, dtype, seed=step)
        parameter.grad = torch.from_numpy(delta.copy())
        theirs.step()
        updater.update(rows, state, delta, step)
        np.testing.assert_allclose(rows, parameter.detach().numpy(), **near)
    for name, array in state.items():
        kept = theirs.state[parameter][TORCH_STATE[updater.name, name]]
        np.testing.assert_allclose(array, kept.numpy(), **near)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_those_of_torch(rule: str) -> None:
    """Twenty adds move rows and state as twenty steps of torch.optim do."""
    for shape in ((1000,), (37, 11), (1, 1)):
        for dtype in ("float32", "float64"):
            compare_with_torch(rule, shape, dtype, 20)


@pytest.mark.parametrize("shape", [*EDGES, (3, BLOCK + 5), (BLOCK // 8 + 3, 9), (5, 0)], ids=str)
def test_rules_are_those_of_torch_around_the_borders_of_blocks(shape: Any) -> None:
    """No element is left out or done twice, wherever blocks end, even within a row."""
    for rule in ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam"):
        compare_with_torch(rule, shape, "float32", 3)


@pytest.mark.parametrize("name", BUILT_IN)
def test_defaults_are_those_of_torch(name: str) -> None:
    """Every option that torch has too has torch's default."""
    if name == "add":
        assert add().options == ()
        return
    theirs = {
        "sgd": torch.optim.SGD,
        "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "adam": torch.optim.Adam,
    }[name]([torch.nn.Parameter(torch.zeros(1))]).defaults
    if name == "adam":
        theirs = {**theirs, "beta1": theirs["betas"][0], "beta2": theirs["betas"][1]}
    assert dict(resolve(name).options) == {o: theirs[o] for o, _ in resolve(name).options}


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from([*RULES, "add"]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    shape=st.one_of(
        st.tuples(st.integers(0, 90)), st.tuples(st.integers(0, 9), st.integers(0, 30))
    ),
    block=st.integers(1, 40),
)
def test_blocks_change_no_bit(rule: str, dtype: str, shape: tuple[int, ...], block: int) -> None:
    """In blocks of any size the result has the same bits as in one block, or by a loop in C."""
    updater = add() if rule == "add" else RULES[rule][0]
    rows, deltas = fresh(shape, dtype), [fresh(shape, dtype, seed) for seed in (1, 2)]
    whole = after(updater, rows, deltas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "rule_kernel", lambda *_: None)
        patch.setattr(updaters, "BLOCK", block)
        assert same_bits(after(updater, rows, deltas), whole)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_delta_stays_as_it_is(name: str) -> None:
    """The delta may be read-only memory, and is not changed."""
    for dtype in ("float16", "float32", "float64"):
        for size in (0, 1, BLOCK + 1):
            delta = fresh(size, dtype, seed=1)
            before = delta.copy()
            delta.flags.writeable = False
            rows, _ = after(resolve(name), fresh(size, dtype), [delta])
            assert delta.tobytes() == before.tobytes()
            assert rows.dtype == dtype


@pytest.mark.parametrize("shape", [BLOCK, (64, BLOCK // 64)], ids=str)
@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "add"])
def test_memory_is_allocated_once_per_call(
    name: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows and state an update needs one block of scratch memory, not one per term."""
    import tracemalloc

    monkeypatch.setattr(kernels, "rule_kernel", lambda *_: None)
    monkeypatch.setattr(updaters, "BLOCK", BLOCK // 16)
    updater = resolve(name)
    rows, delta = fresh(shape, "float64"), fresh(shape, "float64", seed=1)
    state = zeros(updater, rows)
    updater.update(rows, state, delta, 1)
    tracemalloc.start()
    try:
        updater.update(rows, state, delta, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    block = BLOCK // 16 * rows.itemsize
    assert block <= peak < 1.5 * block


@pytest.mark.parametrize("rule", RULES)
def test_float16_is_computed_in_float32(rule: str) -> None:
    """An add to float16 is the add of float32, rounded once when it is stored."""
    updater, _ = RULES[rule]
    rows, delta = fresh((40, 9), "float16"), fresh((40, 9), "float16", seed=1)
    wide, state = after(updater, rows.astype("float32"), [delta.astype("float32")])
    rounded = wide.astype("float16"), {name: a.astype("float16") for name, a in state.items()}
    assert same_bits(after(updater, rows, [delta]), rounded)


def test_float16_with_small_gradients_and_default_eps_has_no_nan() -> None:
    """An eps that is 0 in float16 still keeps 0 / 0 away."""
    delta = np.array([0, 1e-4, 1, 0], "float16")
    for name in ("adagrad", "rmsprop", "adam"):
        rows, _ = after(resolve(name), np.ones(4, "float16"), [delta] * 3)
        assert not np.isnan(rows).any(), name
        assert rows[0] == rows[3] == 1, name


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint64", "int32", "complex64"])
def test_add_adds_numbers_of_every_kind(dtype: str) -> None:
    """add is NumPy's sum, with its rounding and wrapping."""
    for shape in ((0,), (7,), (BLOCK + 1,), (3, BLOCK + 1), (0, 4)):
        rows, delta = np.random.default_rng(3).integers(0, 127, size=(2, *shape)).astype(dtype)
        sums, state = after(add(), rows, [delta])
        np.testing.assert_array_equal(sums, rows + delta)
        assert sums.dtype == dtype
        assert state == {}


@pytest.mark.parametrize("name", BUILT_IN)
def test_infinities_and_nan_pass_without_half_an_update(name: str) -> None:
    """Even where the program has NumPy raise, all elements are done, those with NaN included."""
    updater = resolve(name)
    rows = np.array([np.nan, 1, 1, 1], "float32")
    delta = np.array([1, np.inf, 3e38, 1], "float32")
    state = zeros(updater, rows)
    with np.errstate(all="raise"):
        for step in (1, 2):
            updater.update(rows, state, delta, step)
    assert np.isnan(rows[0])
    expected, _ = after(updater, np.ones(1, "float32"), [np.ones(1, "float32")] * 2)
    assert rows[3] == expected[0]


def test_adam_knows_the_step_of_its_rows() -> None:
    """The first step has the length lr however small the delta; at a late one zeros still count."""
    for step, length in ((1, 1e-3), (10**6, 1e-3 * 0.1 / math.sqrt(0.001))):
        rows = np.zeros(3)
        adam().update(rows, zeros(adam(), rows), np.full(3, 0.01), step)
        np.testing.assert_allclose(rows, -length, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "add"])
def test_arrays_with_gaps_are_refused(name: str) -> None:
    """A view with gaps would be copied and the update lost: it raises, and changes nothing."""
    rows = np.ones((6, 6))[:, ::2]
    updater = resolve(name)
    state = zeros(updater, np.empty((6, 3)))
    with pytest.raises(ValueError, match="C-contiguous"):
        updater.update(rows, state, np.ones((6, 3)), 1)
    assert (rows == 1).all()


# Functions of the user's


def blend(rows: Any, state: Any, delta: Any) -> None:
    """An updater of a user's."""
    state["seen"] += 1
    rows += (delta - rows) / state["seen"]


class Scale:
    """An updater of a user's that is an object."""

    def __call__(self, rows: Any, state: Any, delta: Any) -> None:
        rows *= delta


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        (0, []),
        (1, [(1,)]),
        (BLOCK, [(BLOCK,)]),
        (2 * BLOCK + 1, [(BLOCK,), (BLOCK,), (1,)]),
        ((3, BLOCK + 1), [(1, BLOCK + 1)] * 3),
        ((5, BLOCK // 2), [(2, BLOCK // 2), (2, BLOCK // 2), (1, BLOCK // 2)]),
        ((3, BLOCK // 2 + 1), [(1, BLOCK // 2 + 1)] * 3),
        ((0, 3), []),
        ((3, 0), []),
    ],
    ids=str,
)
def test_functions_see_blocks_of_whole_rows(shape: Any, blocks: list[tuple[int, ...]]) -> None:
    """A function gets as many whole rows as fit a block, one at least, each row once."""
    seen = []

    def look(rows: Any, state: Any, delta: Any) -> None:
        assert rows.shape == state["kept"].shape == delta.shape
        seen.append(rows.shape)
        rows += delta
        state["kept"] -= delta

    rows, delta = fresh(shape, "float32"), fresh(shape, "float32", seed=1)
    found, state = after(custom(look, state=("kept",)), rows, [delta])
    assert seen == blocks
    np.testing.assert_array_equal(found, rows + delta)
    np.testing.assert_array_equal(state["kept"], -delta)


def test_functions_keep_state() -> None:
    """What a function writes to its state is there at the next add: here, the mean of all."""
    deltas = [fresh((BLOCK // 4, 9), "float64", seed) for seed in range(5)]
    rows, state = after(custom(blend, state=["seen"]), np.zeros((BLOCK // 4, 9)), deltas)
    np.testing.assert_allclose(rows, np.mean(deltas, axis=0), atol=1e-12)
    assert (state["seen"] == 5).all()


@pytest.mark.parametrize("dtype", ["int16", "bool", "complex128"])
def test_functions_take_rows_of_every_dtype(dtype: str) -> None:
    """A function may be for whole numbers, and may return the rows, as with out=."""

    def larger(rows: Any, state: Any, delta: Any) -> Any:
        return np.maximum(rows, delta, out=rows)

    updater = custom(larger)
    updater.validate(np.dtype(dtype))
    rows, _ = after(updater, np.array([0, 1], dtype), [np.array([1, 0], dtype)])
    assert rows.tolist() == [1, 1]


def test_functions_cannot_lose_their_work() -> None:
    """A value returned, state put in place of the array, or a changed delta raise."""

    def replace(rows: Any, state: Any, delta: Any) -> None:
        state["kept"] = state["kept"] + delta

    def drop(rows: Any, state: Any, delta: Any) -> None:
        del state["kept"]

    def invent(rows: Any, state: Any, delta: Any) -> None:
        state["new"] = delta

    def change(rows: Any, state: Any, delta: Any) -> None:
        delta *= 2

    rows, delta = np.ones(3), np.ones(3)
    with pytest.raises(InvalidType, match=r"returned a ndarray.*in place, as in rows -= delta"):
        after(custom(lambda rows, state, delta: rows - delta), rows, [delta])
    for fun in (replace, drop, invent):
        with pytest.raises(InvalidType, match=r"replaced its state.*state\['mean'\] \+= delta"):
            after(custom(fun, state=["kept"]), rows, [delta])
    with pytest.raises(ValueError, match="read-only"):
        after(custom(change), rows, [delta])
    assert delta.flags.writeable
    assert (delta == 1).all()


def test_errors_of_functions_pass() -> None:
    """What a function raises is what add raises; NumPy's error state is the program's."""
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        after(
            custom(lambda rows, state, delta: np.divide(1, delta, out=rows)),
            np.ones(1),
            [np.zeros(1)],
        )
    with pytest.raises(KeyError, match="missing"):
        after(custom(lambda rows, state, delta: state["missing"]), np.ones(1), [np.ones(1)])


def test_names_of_functions() -> None:
    """A function is named by its module and qualified name, an object by its class."""
    assert custom(blend).name == f"{__name__}.blend"
    assert custom(Scale()).name == f"{__name__}.Scale"
    assert custom(functools.partial(blend)).name == "functools.partial"
    assert custom(blend, name="blend").name == "blend"
    local = custom(lambda rows, state, delta: None).name
    assert local == f"{__name__}.test_names_of_functions.<locals>.<lambda>"


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (3, r"updater=3: expected a function fun\(rows, state, delta\)"),
        (
            lambda rows, delta: None,
            r"\(rows, delta\): expected a function fun\(rows, state, delta\)",
        ),
        (functools.partial(blend, 1), r"expected a function fun\(rows, state, delta\)"),
        (adam, r"updater=adam: this function makes an updater; pass adam\(\)"),
    ],
    ids=["number", "two arguments", "partial", "factory"],
)
def test_what_is_no_function_of_three(fun: Any, message: str) -> None:
    """What cannot be called with rows, state and delta is refused before any add."""
    with pytest.raises(InvalidType, match=message):
        custom(fun)


def test_functions_that_do_not_tell_their_arguments() -> None:
    """A function without a signature is taken at its word."""

    class Broken(Scale):
        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature found")

    assert custom(Broken()).name.endswith("Broken")


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ("mean", InvalidType, r"state='mean'\).*for one array state=\('mean',\)"),
        (3, InvalidType, r"state=3\): expected a tuple or list of strings"),
        ({"a"}, InvalidType, r"state=\{'a'\}\): expected a tuple or list"),
        (["a", 1], InvalidType, "expected a tuple or list of strings"),
        ([b"a"], InvalidType, "expected a tuple or list of strings"),
        (["a", ""], InvalidValue, r"\['a', ''\]\): expected names that are distinct, none of them"),
        (("a", "b", "a"), InvalidValue, "expected names that are distinct"),
    ],
    ids=str,
)
def test_names_of_state_are_distinct_strings(state: Any, error: type, message: str) -> None:
    """State has distinct, non-empty names in an order that all ranks share."""
    with pytest.raises(error, match=message):
        custom(blend, state=state)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (3, InvalidType, r"custom\(name=3\): expected a string"),
        ("", InvalidValue, r"custom\(name=''\): expected a name of your own"),
        ("adam", InvalidValue, r"custom\(name='adam'\): .*nor one of add, sgd"),
    ],
    ids=str,
)
def test_names_that_a_function_cannot_have(name: Any, error: type, message: str) -> None:
    """A function has a name, and none that would be loaded as another updater."""
    with pytest.raises(error, match=message):
        custom(blend, name=name)


# Names, options, dtypes


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_updaters_are_values(name: str) -> None:
    """Each resolves by name, equals itself after pickling, and comes back from what is saved."""
    updater = resolve(name)
    assert updater.name == name
    assert updater == BUILT_IN[name]() == resolve(updater) == pickle.loads(pickle.dumps(updater))
    assert from_saved(name, updater.options) == updater
    saved_as_numbers = [(option, float(value)) for option, value in updater.options]
    assert from_saved(name, saved_as_numbers) == updater
    assert str(from_saved(name, saved_as_numbers)) == str(updater)


def test_options_come_back_from_what_is_saved() -> None:
    """Options other than the defaults are kept; missing ones are the defaults; others refused."""
    assert from_saved("momentum", momentum(0.5, 0.25, True).options) == momentum(0.5, 0.25, True)
    assert from_saved("adam", [("lr", 0.5)]) == adam(lr=0.5)
    assert from_saved(f"{__name__}.blend", []) is None
    with pytest.raises(InvalidValue, match=r"adam was saved with.*: decay; expected lr, beta1"):
        from_saved("adam", [("decay", 0.5)])
    with pytest.raises(InvalidValue, match=r"add was saved with.*: lr; expected none"):
        from_saved("add", [("lr", 0.5)])


def test_updaters_show_their_options() -> None:
    """An updater reads like the call that makes it."""
    assert str(adam(lr=0.01)) == "adam(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-08)"
    assert str(momentum(1, nesterov=True)) == "momentum(lr=1.0, momentum=0.9, nesterov=True)"
    assert str(sgd(np.float32(0.5))) == "sgd(lr=0.5)"
    assert str(add()) == "add"
    assert str(custom(blend)) == f"{__name__}.blend"


def test_resolving() -> None:
    """A function becomes an updater; an unknown name lists the known; the rest is refused."""
    assert resolve(blend) == custom(blend)
    with pytest.raises(InvalidValue, match=r"'adma'.*add, sgd, momentum, adagrad, rmsprop, adam;"):
        resolve("adma")
    for value in (None, 3, ["adam"]):
        with pytest.raises(
            InvalidType, match=r"fun\(rows, state, delta\), .*or one of the names add, "
        ):
            resolve(value)
    with pytest.raises(InvalidType, match=r"updater=sgd: .*pass sgd\(\)"):
        resolve(sgd)


@pytest.mark.parametrize("value", ["0.1", None, True, np.True_, 1j, [0.1], np.array(0.1)], ids=repr)
def test_options_are_numbers(value: Any) -> None:
    """What is no number is refused, bools too, with option, value and expectation."""
    for name, factory in BUILT_IN.items():
        for option in set(dict(resolve(name).options)) - {"nesterov"}:
            with pytest.raises(InvalidType, match=rf"{name}\({option}=.*\): expected a .*; got "):
                factory(**{option: value})


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("lr", [-0.1, -1e-300, math.inf, math.nan, -math.inf, 10**400, -(10**400)]),
        ("eps", [0, -1e-8, math.inf, math.nan, 10**400, np.longdouble("1e-400")]),
        ("momentum", [-0.1, 1, 1.5, math.nan, math.inf, 10**400]),
        ("alpha", [-0.1, 1, 1.5, math.nan]),
        ("beta1", [-0.1, 1, 1.5, math.nan, np.nextafter(np.longdouble(1), np.longdouble(0))]),
        ("beta2", [-0.1, 1, 1.5, math.nan]),
    ],
)
def test_options_have_limits(option: str, values: list[Any]) -> None:
    """A number outside what the formula takes is refused in every updater that has the option."""
    for name, factory in BUILT_IN.items():
        if option in dict(resolve(name).options):
            for value in values:
                with pytest.raises(InvalidValue, match=rf"{name}\({option}=.*\): expected a "):
                    factory(**{option: value})


def test_limits_themselves_are_taken() -> None:
    """A lr and a decay of 0, the smallest eps, and every kind of real number are options."""
    assert dict(adam(lr=0, beta1=0, beta2=0, eps=5e-324).options)["eps"] == 5e-324
    assert rmsprop(np.float64(0.5), np.float32(0.5), np.longdouble(1)) == rmsprop(0.5, 0.5, 1.0)
    assert sgd(np.int8(1)).options == (("lr", 1.0),)
    rows, _ = after(adam(lr=0, beta1=0, beta2=0), np.ones(3), [np.ones(3)])
    assert rows.tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [2, 0.5, "yes", None, [True], np.array([True, False])], ids=repr)
def test_nesterov_is_true_or_false(value: Any) -> None:
    """nesterov takes what equals True or False, and nothing else."""
    with pytest.raises(InvalidType, match=r"momentum\(nesterov=.*\): expected True or False"):
        momentum(nesterov=value)
    assert momentum(nesterov=np.True_).options[-1] == ("nesterov", True)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "longdouble", ">f4", "O"])
def test_rules_need_floats(dtype: str) -> None:
    """All but add and functions of the user's refuse what is no float16, float32 or float64."""
    for name in BUILT_IN:
        if name == "add":
            resolve(name).validate(np.dtype(dtype))
        else:
            with pytest.raises(InvalidType, match=rf"{name}.*float16, float32 and float64, not on"):
                resolve(name).validate(np.dtype(dtype))
    custom(blend).validate(np.dtype(dtype))


def test_rules_take_floats() -> None:
    """Every built-in updater works on the three floats."""
    for name in BUILT_IN:
        for dtype in ("float16", "float32", "float64"):
            resolve(name).validate(np.dtype(dtype))


def test_eps_must_not_vanish() -> None:
    """An eps that the dtype cannot tell from 0 is refused where it would give 0 / 0."""
    tiny = adagrad(eps=1e-40)
    tiny.validate(np.dtype("float64"))
    for dtype in ("float16", "float32"):
        with pytest.raises(InvalidType, match=rf"1e-40\): in {dtype} .*expected 1.2e-38 or more"):
            tiny.validate(np.dtype(dtype))


def test_docstring_examples_are_true() -> None:
    """What the docstrings show is what happens."""
    failed, tried = doctest.testmod(updaters)
    assert (failed, tried > 5) == (0, True)
