"""`collect=` is said, and checked: a mode that does not fit is an error, never a wrong number."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft

#: the teams are for all tests: a worker loads torch in two seconds
SHARES = True


@pytest.fixture(scope="module", params=[("serial", 1), ("local", 2)], ids=["serial", "local-2"])
def team(request: pytest.FixtureRequest) -> Iterator[weft.Team]:
    engine, size = request.param
    with weft.Team(size, engine=engine) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[weft.Team]:
    with weft.Team(2) as made:
        yield made


X = np.random.default_rng(0).normal(size=(50, 3))


def test_collect_has_no_default() -> None:
    """The error has the lines to write, with the function's name."""
    with pytest.raises(weft.InvalidType, match=r"weft\.function\(sum, collect='sum'\)") as caught:
        weft.function(np.sum)
    for mode in ("'mean'", "'gather'", "None"):
        assert f"collect={mode})" in str(caught.value)
    with pytest.raises(weft.InvalidType, match=r"weft\.function\(fun, collect='mean'\)"):
        weft.function(lambda x: x)


WRONG = [
    (np.sum, "mean", "'sum' would fit"),
    (np.mean, "sum", "'mean' would fit"),
    (np.max, "mean", "'max' would fit"),
    (lambda x: x.min(0), "sum", "'min' would fit"),
    (lambda x: x * 2, "sum", "collect='gather'"),
    (np.std, "mean", "no mode fits"),
    (np.median, "mean", "no mode fits"),
    (lambda x: np.corrcoef(x.T), "mean", "no mode fits"),
    (lambda x: x.sum() + 1, "sum", "no mode fits"),
    (lambda x: x.sum(), "gather", "'sum' would fit"),
    (lambda x: [x.mean(), x.sum()], "mean", r"output\[1\] is"),
    (lambda x: {"a": x.mean(), "b": x.sum()}, {"a": "mean", "b": "mean"}, r"output\['b'\] is"),
]


@pytest.mark.parametrize(("function", "mode", "text"), WRONG)
def test_modes_that_do_not_fit(team: weft.Team, function: Any, mode: Any, text: str) -> None:
    """Both numbers are shown, and the modes that would fit; on every engine alike."""
    f = weft.function(function, split=[0], collect=mode, team=team)
    with pytest.raises((weft.Mismatch, weft.InvalidValue), match=text):
        f(X)


def test_both_numbers_are_shown(pair: weft.Team) -> None:
    """As they were computed, of eight rows in parts of three and five."""
    f = weft.function(np.sum, collect="mean", team=pair)
    with pytest.raises(weft.Mismatch, match=r"(?s)8\.0\) for 8 rows .*4\.25\).*check=None"):
        f(np.ones(10))
    unchecked = weft.function(np.sum, collect="mean", team=pair, check=None)
    assert unchecked(np.ones(10)) == 5.0  # as it was asked for


RIGHT = [
    (np.mean, "mean"),
    (np.sum, "sum"),
    (lambda x: x.mean(0), "mean"),
    (lambda x: x.T @ x, "sum"),
    (np.min, "min"),
    (np.sort, "gather"),
    (len, "sum"),
    (lambda x: [row.tolist() for row in x], "gather"),
    (
        lambda x: {"n": len(x), "rows": x, "none": None},
        {"n": "sum", "rows": "gather", "none": None},
    ),
    (lambda x: 2 ** (70 * len(x)), "prod"),
    (lambda x: (x.astype(np.float32) * 1e6).sum(), "sum"),
    (lambda x: x.astype(np.float16).mean(), "mean"),
    (lambda x: x.sum() * np.nan, "sum"),
    (lambda x: float("inf"), "max"),
    (lambda x: x.sum() * 1j, "sum"),
    (lambda x: bool((x > 0).all()), "min"),
    (lambda x: "text", None),
]


@pytest.mark.parametrize(("function", "mode"), RIGHT)
def test_modes_that_fit_are_not_complained_of(pair: weft.Team, function: Any, mode: Any) -> None:
    """Also in few rows, with rounding, infinities and numbers of any size."""
    f = weft.function(function, split=[0], collect=mode, team=pair)
    for rows in (50, 3, 2, 1):
        f(X[:rows])
        f(X[:rows], batch=[0, -1], num_slices=2)


def test_numbers_that_cancel_out(pair: weft.Team) -> None:
    """What is left of large terms is rounding, and no reason for an alarm."""
    x = X.astype(np.float32) * 1e3

    def gradient(x: Any) -> Any:
        p = np.exp(x - x.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[:, 0] -= 1
        return p.sum(0), p.sum(), (x - x.mean(1, keepdims=True)).sum(1).sum()

    weft.function(gradient, collect="sum", team=pair, check=True)(x)


def test_zeros_settle_nothing(pair: weft.Team) -> None:
    """A first call with zeros fits any mode: later calls are checked too."""
    f = weft.function(np.sum, collect="mean", team=pair)
    assert f(np.zeros(10)) == 0
    with pytest.raises(weft.Mismatch):
        f(np.ones(10))


def test_what_was_refused_is_refused_again(pair: weft.Team) -> None:
    """In a notebook a cell is run again; also where calls before it could not tell."""
    f = weft.function(np.sum, collect="mean", team=pair)
    for _ in range(5):
        with pytest.raises(weft.Mismatch):
            f(np.ones(10))
    f = weft.function(np.sum, collect="mean", team=pair)
    f(np.zeros(10))
    for _ in range(5):
        with pytest.raises(weft.Mismatch):
            f(np.ones(10))


def test_equal_rows_settle_nothing(pair: weft.Team) -> None:
    """A first call with ones, to try it: rows that depend on each other show at the next one."""
    f = weft.function(lambda x: x - x.mean(), collect="gather", team=pair)
    assert f(np.ones(10)).tolist() == [0] * 10
    with pytest.raises(weft.Mismatch, match="no mode fits"):
        f(np.arange(10.0))


# it counts its calls in a global variable, and so is sent at each of them, which a slow machine is
# told of
@pytest.mark.filterwarnings("ignore:.*of the time of mean's calls went into comparing")
def test_when_it_is_checked(pair: weft.Team) -> None:
    """Once for each shape, dtype and set of arguments; at every call with check=True."""
    from tests.trust import counting

    counting.calls = 0

    def calls_of(f: Any, *arguments: Any, **named: Any) -> int:
        before = counting.calls
        f(*arguments, **named)
        return counting.calls - before

    f = weft.function(counting.mean, collect="mean", whole=["scale"], team=pair)
    assert [calls_of(f, X) for _ in range(5)] == [4, 1, 1, 1, 1]  # whole, two parts, and the call
    assert calls_of(f, X[:20]) == 1
    assert calls_of(f, X[:, :2]) == 4
    assert calls_of(f, X.astype(np.float32)) == 4
    assert calls_of(f, X, scale=3.0) == 4
    assert calls_of(f, X[:1]) == 1  # a row has no parts
    every = weft.function(counting.mean, collect="mean", team=pair, check=True)
    assert [calls_of(every, X) for _ in range(3)] == [4, 4, 4]
    never = weft.function(counting.mean, collect="mean", team=pair, check=None)
    assert calls_of(never, X) == 1
    with pytest.raises(weft.InvalidType, match="check='yes'"):
        weft.function(np.sum, collect="sum", check="yes")  # type: ignore[arg-type]


def test_a_check_changes_nothing(pair: weft.Team) -> None:
    """Neither the function's own state, nor its arguments, nor replicas, nor shared arrays."""
    torch = pytest.importorskip("torch")
    seen: list[int] = []
    table, total = {"calls": 0}, np.zeros(1)
    shared = weft.share(np.zeros(1))
    model, rng = torch.nn.Linear(3, 1), np.random.default_rng(0)
    weft.replicate(model, team=pair)
    before = model.weight.detach().clone()

    def stateful(x: Any, w: Any) -> Any:
        seen.append(len(x))
        table["calls"] += 1
        x *= 2  # its own rows
        w[0] = 5
        rng.random()
        with torch.no_grad():
            model.weight += 1
        return x.sum()

    x, w = X.copy(), np.ones(2)
    f = weft.function(stateful, collect="sum", whole=["w"], team=pair)
    assert f(x, w) == pytest.approx(2 * X.sum())
    assert (seen, table) == ([25], {"calls": 1})
    assert torch.equal(model.weight, before + 1)
    assert rng.random() == np.random.default_rng(0).random(2)[1]
    assert (x[25:] == X[25:]).all()

    def writes(x: Any) -> Any:
        total[0] += len(x)  # read-only while it is checked, so it is not
        shared[0] += 1
        return x.sum()

    g = weft.function(writes, collect="sum", team=pair)
    g(X)
    assert (total[0], shared[0]) == (25, 2)


def test_random_generators_are_as_before(pair: weft.Team) -> None:
    """Functions that are random are not complained of, and what the driver draws is not changed."""
    torch = pytest.importorskip("torch")

    def noisy(x: Any) -> Any:
        noise = np.random.rand(*x.shape) + random.random() + float(torch.rand(1))
        return (x + noise).mean()

    rng = np.random.default_rng(0)
    weft.function(lambda x: (x + rng.random(x.shape)).mean(), collect="mean", team=pair)(X)
    outcomes = []
    for check in (True, None):
        np.random.seed(0)
        random.seed(0)
        torch.manual_seed(0)
        f = weft.function(noisy, collect="mean", team=pair, check=check)
        outcomes.append((f(X), np.random.rand(), random.random(), float(torch.rand(1))))
    assert outcomes[0] == outcomes[1]


def dropped(x: Any) -> Any:
    return x * (np.random.random(x.shape) < 0.5)


RANDOM_AND_WRONG = [
    (lambda x: dropped(x).sum(), "mean", "'sum'.* would fit"),
    (lambda x: dropped(x).mean(), "sum", "'mean'.* would fit"),
    (
        lambda x: (dropped(x).mean(), dropped(x).sum()),
        "mean",
        r"output\[1\] is .*'sum'.* would fit",
    ),
    (lambda x: np.random.rand(len(x)).sum(), "gather", "'sum'.* would fit"),
    (lambda x: x + np.random.rand(*x.shape), "mean", "collect='gather'"),
]


@pytest.mark.parametrize(("function", "mode", "text"), RANDOM_AND_WRONG)
def test_random_functions_with_a_wrong_mode(
    pair: weft.Team, function: Any, mode: Any, text: str
) -> None:
    """They are tried several times: what the mode makes of the parts is never near the whole."""
    np.random.seed(0)
    f = weft.function(function, collect=mode, team=pair)
    with pytest.raises((weft.Mismatch, weft.InvalidValue), match=text):
        f(np.abs(X) + 1)


RANDOM_AND_RIGHT = [
    (lambda x: dropped(x).mean(), "mean"),
    (lambda x: dropped(x).sum(0), "sum"),
    (lambda x: x * np.random.normal(), "gather"),
    (lambda x: (x + np.random.normal() * 100).mean(), "mean"),
    (lambda x: x[np.random.random(len(x)) < 0.7], "gather"),
    (lambda x: dropped(x).max(), "max"),
    (lambda x: {"loss": dropped(x).mean(), "n": len(x)}, {"loss": "mean", "n": "sum"}),
    (lambda x: [str(np.random.rand()) for _ in x], "gather"),
]


@pytest.mark.parametrize(("function", "mode"), RANDOM_AND_RIGHT)
def test_random_functions_with_a_mode_that_fits(pair: weft.Team, function: Any, mode: Any) -> None:
    """Never an alarm, whatever they draw."""
    for seed in range(30):
        np.random.seed(seed)
        weft.function(function, collect=mode, team=pair)(X)


def test_a_random_loss_that_is_a_sum(pair: weft.Team) -> None:
    """Dropout that the model's evaluation mode does not switch off hides nothing."""
    torch = pytest.importorskip("torch")
    model, optimizer = linear(torch)
    x, y = torch.randn(20, 3), torch.randn(20, 1) + 3
    drop = torch.nn.functional.dropout

    def loss(model: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.mse_loss(drop(model(x)), y, reduction="sum")

    with pytest.raises(weft.Mismatch, match="the loss is a sum"):
        weft.train_step(loss, model, optimizer, team=pair)(x, y)
    weft.train_step(lambda m, x, y: loss(m, x, y) / len(x), model, optimizer, team=pair)(x, y)


def test_functions_that_need_many_rows(pair: weft.Team) -> None:
    """What raises an error on a few rows is not checked, and its warnings are not shown."""

    def function(x: Any) -> Any:
        if len(x) < 20:
            raise ValueError("too few")
        return x.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weft.function(function, collect="sum", team=pair)(X) == pytest.approx(X.sum())
        logs = weft.function(lambda x: np.log(x * 0 + 1).sum(), collect="sum", team=pair)
        assert logs(X) == 0


# training


def linear(torch: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_loss_that_is_a_sum(pair: weft.Team) -> None:
    """Half of it would be the result; also with dropout, before anything has changed."""
    torch = pytest.importorskip("torch")
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model, optimizer = linear(torch)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(model: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.mse_loss(model(x), y, reduction="sum")

    with pytest.raises(weft.Mismatch, match=r"the loss is a sum.*reduction='mean'"):
        weft.train_step(loss, model, optimizer, team=pair)(x, y)
    assert all(map(torch.equal, before, model.parameters()))
    assert model.training
    weft.train_step(loss, model, optimizer, team=pair, check=None)(x, y)
    step = weft.train_step(lambda m, x, y: loss(m, x, y) / len(x), model, optimizer, team=pair)
    step(x, y)
    with pytest.raises(weft.Mismatch, match="the loss is no mean"):
        weft.train_step(lambda m, x, y: (m(x) - y).std(), model, optimizer, team=pair, check=True)(
            x, y
        )


def test_a_loss_of_jax_that_is_a_sum(pair: weft.Team) -> None:
    """Without a step."""
    jnp = pytest.importorskip("jax.numpy")
    model = weft.Holder({"w": jnp.ones(3)})
    x = jnp.asarray(X)
    with pytest.raises(weft.Mismatch, match="the loss is a sum"):
        weft.train_step(lambda p, x: ((x @ p["w"]) ** 2).sum(), model, lambda p, g: p, team=pair)(x)
    with pytest.raises(weft.InvalidValue, match="sync_batchnorm=True: expected a model of torc"):
        weft.train_step(lambda p, x: 0, model, lambda p, g: p, sync_batchnorm=True, team=pair)


def normalised(torch: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 3),
        torch.nn.BatchNorm1d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 5),
        torch.nn.BatchNorm1d(5, momentum=None, affine=False),
        torch.nn.Linear(5, 1),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_batch_normalisation_over_ranks() -> None:
    """It is warned of once; with sync_batchnorm=True all is as in one process: losses, parameters
    and running averages."""
    torch = pytest.importorskip("torch")
    x, y = torch.randn(13, 3, 10), torch.randn(13, 1)
    loss = lambda model, x, y: ((model(x) - y) ** 2).mean()  # noqa: E731
    alone, alone_optimizer = normalised(torch)
    model, optimizer = normalised(torch)
    with weft.Team(3) as trio:
        step = weft.train_step(loss, model, optimizer, team=trio, sync_batchnorm=True)
        for _ in range(4):
            alone_optimizer.zero_grad()
            expected = loss(alone, x, y)
            expected.backward()
            alone_optimizer.step()
            assert step(x, y) == pytest.approx(expected.item(), rel=1e-4)
        for name, value in alone.state_dict().items():
            assert torch.allclose(model.state_dict()[name], value, rtol=1e-3, atol=1e-5), name
        assert weft.same(model, team=trio)
        assert "forward" not in vars(model[1])
        with pytest.raises(weft.InvalidValue, match="2 rows for 3 ranks"):
            step(x[:2], y[:2])

        apart = weft.train_step(loss, model, optimizer, team=trio)
        with pytest.warns(RuntimeWarning, match=r"(?s)BatchNorm1d 1.*sync_batchnorm=True") as told:
            apart(x, y)
        assert [one.filename for one in told] == [__file__]
        apart(x, y)  # warnings are errors in tests
        model.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            weft.train_step(loss, model, optimizer, team=trio)(x, y)


def test_a_synced_step_that_fails(pair: weft.Team) -> None:
    """One rank's error ends the step for all, and the next one works."""
    torch = pytest.importorskip("torch")
    x, y = torch.randn(12, 3, 10), torch.randn(12, 1)
    model, optimizer = normalised(torch)

    def loss(model: Any, x: Any, y: Any) -> Any:
        if (y > 100).any():
            raise ZeroDivisionError
        return ((model(x) - y) ** 2).mean()

    step = weft.train_step(loss, model, optimizer, team=pair, sync_batchnorm=True, check=None)
    step(x, y)
    for row in (0, -1):  # rank 0's, rank 1's
        bad = y.clone()
        bad[row] = 1000
        with pytest.raises(ZeroDivisionError):
            step(x, bad)
        assert step(x, y) > 0
    assert weft.same(model, team=pair)


# dicts and keyword arguments


def test_dicts_tuples_and_names(team: weft.Team) -> None:
    """The rows of every array in them; `f(x)` equals `fun(x)`."""
    from collections import OrderedDict, UserDict

    data = {"a": X[:, 0], "more": (X, weft.share(X), [1.0] * 50), "t": {"n": list(range(50))}}

    def function(given: Any, *, y: Any, scale: float = 1.0) -> Any:
        first, second, third = given["more"]
        rows = given["a"] + first.sum(1) + second.sum(1) + np.array(third) + given["t"]["n"] + y
        return rows * scale

    f = weft.function(function, collect="gather", whole=["scale"], team=team)
    for options in ({}, {"batch": [3, 1, 1]}, {"batch": slice(None, 9), "num_slices": 4}):
        chosen = options.get("batch", slice(None))
        expected = function(data, y=X[:, 1], scale=2.0)[chosen]
        assert np.allclose(f(data, y=X[:, 1], scale=2.0, **options), expected)  # type: ignore[arg-type]
    for kind in (OrderedDict, UserDict):
        kinds = weft.function(
            lambda given: [type(given).__name__] * len(given["x"]), collect="gather", team=team
        )
        assert kinds(kind(x=X)) == [kind.__name__] * 50
    pairs = weft.function(lambda pair: (pair[0] * pair[1]).sum(), collect="sum", team=team)
    assert pairs((X, X)) == pytest.approx((X * X).sum())
    total = weft.function(sum, collect="sum", team=team)
    assert total((1, 2, 3)) == 6  # a tuple of numbers is one of rows


def test_leaves_that_do_not_fit(pair: weft.Team) -> None:
    """The error names the leaf."""
    f = weft.function(lambda given: 0.0, collect="sum", team=pair)
    with pytest.raises(weft.InvalidValue, match=r"given\['a'\] has 50, .*given\['b'\]\[1\] has 49"):
        f({"a": X, "b": (X, X[1:])})
    with pytest.raises(weft.InvalidType, match=r"given\['b'\] is a bool without rows"):
        f({"a": X, "b": True})
    with pytest.raises(weft.InvalidType, match=r"given\[1\] is a float without rows"):
        f((X, 2.0))


def test_training_with_dicts_and_names(pair: weft.Team) -> None:
    """`step({"x": ..., "y": ...})` and `step(x=..., y=...)`, in torch and in JAX."""
    torch = pytest.importorskip("torch")
    x, y = torch.randn(11, 3), torch.randn(11, 1)
    model, optimizer = linear(torch)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=True)

    def of_dict(model: Any, batch: Any) -> Any:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    def of_names(model: Any, x: Any, *, y: Any) -> Any:
        return ((model(x) - y) ** 2).mean()

    expected = of_names(model, x, y=y).item()
    by_dict = weft.train_step(of_dict, model, optimizer, team=pair)
    assert by_dict({"x": x, "y": y}) == pytest.approx(expected, rel=1e-5)
    expected = of_names(model, x, y=y).item()
    by_name = weft.train_step(of_names, model, optimizer, team=pair)
    assert by_name(x=x, y=y) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(weft.InvalidType, match=r"loss\(model, input 0, z=z\)"):
        by_name(x, z=y)
    with pytest.raises(weft.InvalidValue, match=r"argument 0\['x'\] has 11"):
        by_dict({"x": x, "y": y[1:]})
    jnp = pytest.importorskip("jax.numpy")
    holder = weft.Holder(jnp.ones(3))
    step = weft.train_step(
        lambda p, b, *, y: ((b["x"] @ p - y) ** 2).mean(), holder, lambda p, g: p, team=pair
    )
    found = step({"x": X}, y=X[:, 0])
    assert found == pytest.approx(((X.sum(1) - X[:, 0]) ** 2).mean(), rel=1e-5)
