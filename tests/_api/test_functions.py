"""`function`: the number that the single process would have given."""

from __future__ import annotations

import functools
import gc
import operator
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.support import run_python, run_ranks
from weft.errors import UnknownEngine

#: the teams are for all tests
SHARES = True


@pytest.fixture(scope="module", params=[("serial", 1), ("local", 3)], ids=["serial", "local-3"])
def team(request: pytest.FixtureRequest) -> Iterator[weft.Team]:
    engine, size = request.param
    with weft.Team(size, engine=engine) as made:
        yield made


@pytest.fixture(scope="module")
def trio() -> Iterator[weft.Team]:
    with weft.Team(3) as made:
        yield made


class Both(NamedTuple):
    loss: Any
    rows: Any


# f(x) == fun(x)


def test_a_function_over_random_rows(trio: weft.Team) -> None:
    """f(x) equals fun(x) for any rows, columns, dtype, slices, batch and mode."""
    modes = ["mean", "sum", "min", "max", "gather"]
    functions = {mode: weft.function(_over(mode), collect=mode, team=trio) for mode in modes}
    shared = weft.share(np.arange(40.0).reshape(20, 2))

    @given(
        st.integers(1, 20),
        st.integers(0, 3),
        st.sampled_from(["float32", "float64", "int32", "float16"]),
        st.sampled_from(modes),
        st.data(),
    )
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    def check(rows: int, columns: int, dtype: str, mode: str, data: Any) -> None:
        x = (np.arange(rows * max(columns, 1)) % 7).astype(dtype)
        x = x.reshape(rows, columns) if columns else x
        x = data.draw(st.sampled_from([x, shared[:rows]]))
        batch = data.draw(
            st.none()
            | st.integers(1, rows)
            | st.sampled_from([slice(None, None, -1), slice(0, None, 2)])
            | st.lists(st.integers(-rows, rows - 1), min_size=1)
        )
        chosen = x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]
        slices = data.draw(st.integers(1, len(chosen)))
        found = functions[mode](x, batch=batch, num_slices=slices)
        expected = _over(mode)(chosen)
        assert np.shape(found) == np.shape(expected)
        tolerance = 5e-3 if x.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)

    check()


def _over(mode: str) -> Any:
    def function(x: Any) -> Any:
        return x * 2 if mode == "gather" else getattr(x, mode)(axis=0)

    return function


def test_fewer_rows_than_ranks(team: weft.Team) -> None:
    """One row, and none: what the function itself gives."""
    total = weft.function(lambda x: x.sum(), collect="sum", team=team)
    assert total(np.array([4.0])) == 4.0
    assert total(np.zeros(0)) == 0.0
    mean = weft.function(lambda x: x.sum() / max(1, len(x)), collect="mean", team=team)
    assert mean(np.zeros((0, 3))) == 0.0
    rows = weft.function(lambda x: x, collect="gather", team=team)
    assert rows(np.zeros((0, 3))).shape == (0, 3)


def test_lists_are_split_too(team: weft.Team) -> None:
    """Python's own lists in and out, with batches of all kinds."""
    double = weft.function(lambda x: [2 * one for one in x], collect="gather", team=team)
    assert double([1, 2, 3, 4]) == [2, 4, 6, 8]
    assert double([1, 2, 3, 4], batch=[3, -4]) == [8, 2]
    assert double([1, 2, 3, 4], batch=slice(None, None, -2)) == [8, 4]
    assert weft.function(sum, collect="sum", team=team)([2**62, 2**62, 2**62]) == 3 * 2**62


def test_trees_of_outputs(team: weft.Team) -> None:
    """Dicts, NamedTuples, a mode for each, and some of them only."""

    def function(x: Any) -> Any:
        return Both(x.mean(), {"rows": x + 1, "most": x.max(), "none": None})

    modes = ["mean", {"rows": "gather", "most": "max", "none": None}]
    f = weft.function(function, collect=modes, team=team)
    x = np.arange(7.0)
    found = f(x)
    assert type(found).__name__ == "Both"
    assert found.loss == 3.0
    assert (found.rows["rows"] == x + 1).all()
    assert (found.rows["most"], found.rows["none"]) == (6.0, None)
    assert f(x, outputs=0) == 3.0
    assert f(x, outputs=[0]) == [3.0]
    g = weft.function(lambda x: {"a": x.sum(), "b": x.min()}, collect={"a": "sum", "b": "min"})
    g._team = team
    assert g(x, outputs="b") == 0.0
    assert g(x, outputs=["b", "a"]) == {"b": 0.0, "a": 21.0}


def test_tensors(team: weft.Team) -> None:
    """PyTorch's in and out, of any dtype, also bfloat16 and ones that require gradients."""
    torch = pytest.importorskip("torch")
    f = weft.function(lambda x, w: (x @ w).mean(0), collect="mean", whole="w", team=team)
    x, w = torch.arange(14.0).reshape(7, 2), torch.ones(2, 3)
    assert torch.allclose(f(x, w), (x @ w).mean(0))
    short = x.to(torch.bfloat16)
    assert torch.allclose(f(short, w.to(torch.bfloat16)).float(), (x @ w).mean(0), rtol=1e-2)
    rows = weft.function(lambda x: x * 2, collect="gather", team=team)
    assert torch.equal(rows(short), short * 2)
    assert torch.equal(rows(x, batch=[5, 1]), x[[5, 1]] * 2)


def test_jax_arrays() -> None:
    """JAX's in and out; means of its integers are floats as wide as it has them."""
    jnp = pytest.importorskip("jax.numpy")
    with weft.Team(2) as team:
        modes = ["mean", "sum", "mean"]
        f = weft.function(
            lambda x: (x.mean(0), x.sum(), x.astype(int)[0]), collect=modes, team=team, check=None
        )
        mean, total, first = f(jnp.arange(10.0).reshape(5, 2))
        assert mean.tolist() == [4.0, 5.0]
        assert float(total) == 45.0
        assert first.dtype == np.float32


# arguments


def test_whole_arguments(team: weft.Team) -> None:
    """By name or position, keyword-only, positional-only, in *args and **kwargs."""

    def function(x: Any, /, w: Any, *more: Any, scale: Any = 1.0, **others: Any) -> Any:
        return float(x.sum() * (len(w) * scale + sum(len(one) for one in more) + len(others["z"])))

    x, w = np.ones(6), [1, 2]
    f = weft.function(function, split=["x"], collect="sum", team=weft.Team(1))
    assert f(x, w, scale=np.float64(2), z="ab") == function(x, w, scale=2, z="ab")
    g = weft.function(
        lambda x, *, w: float(x.sum() * len(w)), whole=["w"], collect="sum", team=team
    )
    assert g(x, w=w) == 12.0
    h = weft.function(lambda *a, **k: float(a[0].sum() * len(a[1])), split=[0], collect="sum")
    h._team = team
    assert h(x, w, z=[1]) == 12.0
    k = weft.function(lambda x, w: float(x.sum() * len(w)), whole=1, collect="sum", team=team)
    assert k(w=w, x=x) == 12.0


def test_all_kinds_of_callables(team: weft.Team) -> None:
    """Built-in functions, partials, methods and objects that can be called."""
    x = np.arange(5.0)
    assert weft.function(np.add.reduce, collect="sum", split=[0], team=team)(x) == 10.0
    partial = functools.partial(np.power, 2.0)
    assert (weft.function(partial, collect="gather", split=[0], team=team)(x) == 2.0**x).all()
    assert weft.function(operator.itemgetter(0), collect="min", team=team)(x) == 0.0

    class Scale:
        factor = 3.0

        def __call__(self, x: Any) -> Any:
            return x * self.factor

        def method(self, x: Any) -> Any:
            return x.sum() * self.factor

    assert (weft.function(Scale(), collect="gather", team=team)(x) == 3 * x).all()
    assert weft.function(Scale().method, collect="sum", team=team)(x) == 30.0


def test_shared_arrays_are_not_moved(trio: weft.Team) -> None:
    """A function gets the rows of a shared array where they are, by slice and by index."""
    shared = weft.share(np.zeros((300, 100)))

    def write(x: Any) -> int:
        x += 1
        return len(x)

    assert weft.function(write, collect="sum", team=trio)(shared) == 300
    assert (shared == 1).all()
    plain = np.zeros((300, 100))
    weft.function(write, collect="sum", team=trio)(plain)
    assert (plain[:100] == 1).all()
    assert (plain[100:] == 0).all()
    rows = weft.function(lambda x: x[:, 0], collect="gather", team=trio)
    shared[:] = np.arange(300)[:, None]
    assert rows(shared, batch=[299, 0, 150, 7]).tolist() == [299, 0, 150, 7]


def test_the_driver_computes_too(trio: weft.Team) -> None:
    """One part each: rank 0 is this process."""
    f = weft.function(lambda x: [os.getpid()], collect="gather", team=trio, check=None)
    pids = f(np.ones(3))
    assert pids[0] == os.getpid()
    assert len(set(pids)) == 3


# sending


def test_functions_are_sent_by_themselves(trio: weft.Team) -> None:
    """Before or after others were called, once; send() may be called at any time."""
    first = weft.function(lambda x: x.sum(), collect="sum", team=trio)
    trio.send()
    trio.send()
    assert first(np.ones(4)) == 4.0
    second = weft.function(lambda x: (x + 1).sum(), collect="sum", team=trio)
    assert second(np.ones(4)) == 8.0
    trio.send()
    assert first(np.ones(4)) == 4.0


def test_functions_that_are_gone_are_dropped(trio: weft.Team) -> None:
    """Here and in the workers, at the next call."""
    for number in range(20):
        large = np.full(20_000, float(number))
        f = weft.function(lambda x, n=large: float(n[0]), split=[0], collect="max", team=trio)
        assert f(np.ones(4)) == number
    del f
    gc.collect()
    kept = weft.function(np.sum, split=[0], collect="sum", team=trio)
    kept(np.ones(4))
    assert trio.backend.call(_count_kept, [()] * 3) == [1, 1, 1]
    del kept
    assert trio.backend.call(_count_kept, [()] * 3) == [0, 0, 0]


def _count_kept(member: Any) -> int:
    return len(member.registered)


def test_functions_that_mention_functions(trio: weft.Team) -> None:
    """They call the other one's own, in every rank."""
    inner = weft.function(lambda x: x + 1, collect="gather", team=trio)
    assert (inner(np.zeros(3)) == 1).all()
    outer = weft.function(lambda x: inner.serial(x).sum(), collect="sum", team=trio)
    assert outer(np.zeros(6)) == 6.0


# check=True


def test_check_compares_with_the_function_itself(team: weft.Team) -> None:
    """It raises where the mode does not say what the output is, and is silent where it does."""
    x = np.arange(200.0)
    right = {"mean": np.mean, "sum": np.sum, "max": np.max, "gather": np.square}
    for mode, function in right.items():
        f = weft.function(function, split=[0], collect=mode, team=team, check=True)
        np.testing.assert_allclose(f(x), function(x))
        assert np.size(f(x[:1])) == 1
    for mode, function in {"mean": np.sum, "sum": np.mean, "max": np.std}.items():
        f = weft.function(function, split=[0], collect=mode, team=team, check=True)
        with pytest.raises(weft.Mismatch, match="the mode does not say what the output is"):
            f(x)
    kept = weft.function(
        lambda x: (x.mean(), len(x)), collect=["mean", None], team=team, check=True
    )
    assert kept(x)[0] == x.mean()
    nothing = weft.function(lambda x: x.sum() * np.nan, collect="mean", team=team, check=True)
    assert np.isnan(nothing(x))


# where


def test_a_driver_that_is_a_rank() -> None:
    """Ranks of `weft run` have teams of their own."""

    def body(group: weft.Group) -> tuple[int, float]:
        with weft.Team(2) as team:
            f = weft.function(lambda x: x.sum(), collect="sum", team=team)
            found = f(np.arange(5.0) + group.rank)
        return group.rank, float(weft.all_reduce(found, "sum"))

    assert run_ranks(2, body) == [(0, 25.0), (1, 25.0)]


def test_a_driver_that_is_a_worker(trio: weft.Team) -> None:
    """A function may make a team of its own where it runs."""

    def function(x: Any) -> float:
        with weft.Team(2) as inner:
            return float(weft.function(np.sum, split=[0], collect="sum", team=inner)(x))

    assert weft.function(function, collect="sum", team=trio)(np.arange(9.0)) == 36.0


def test_a_script() -> None:
    """Functions of the user's own script, and the default team, which ends with the program."""
    outcome = run_python(
        "import numpy as np, weft\n"
        "W = np.ones(3)\n"
        "def helper(x): return x @ W\n"
        "def fun(x): return helper(x).mean()\n"
        "f = weft.function(fun, collect='mean')\n"
        "print(f(np.ones((5, 3))), f.serial(np.ones((5, 3))))\n"
    )
    assert (outcome.code, outcome.out) == (0, "3.0 3.0\n"), outcome


# what bad input gets


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"collect": "average"}, weft.InvalidValue, r"collect='average'.*'mean', 'sum'"),
        ({"split": ["z"]}, weft.InvalidValue, r"split has 'z'.*\['x', 'w'\]"),
        ({"split": [2]}, weft.InvalidValue, r"split has 2.*\['x', 'w'\]"),
        ({"whole": [-1]}, weft.InvalidValue, "whole has -1"),
        ({"whole": [1.5]}, weft.InvalidType, r"whole has 1\.5"),
        ({"whole": None}, weft.InvalidType, "whole=None"),
        ({"whole": ["x"], "split": [0]}, weft.InvalidValue, r"\['x'\] is both"),
    ],
)
def test_functions_that_cannot_be_built(options: Any, error: type[Exception], text: str) -> None:
    """When it is built: the option, its value, and what was expected."""
    with pytest.raises(error, match=text):
        weft.function(lambda x, w: 0, **{"collect": "sum", **options})


def test_parameters_that_are_options() -> None:
    """A function with a parameter called like an option of the call is refused."""
    with pytest.raises(weft.InvalidValue, match=r"'batch'.*batch, num_slices, outputs"):
        weft.function(lambda x, batch: 0, collect="mean")
    with pytest.raises(weft.InvalidType):
        weft.function(5, collect="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((np.ones(3), np.ones(4)), {}, weft.InvalidValue, "x has 3, y has 4"),
        ((np.ones(3), 2.0), {}, weft.InvalidType, r"y is a float.*whole=\[...\]"),
        ((np.ones(3), np.ones(3)), {"batch": [3]}, weft.InvalidValue, "batch has the row 3"),
        ((np.ones(3), np.ones(3)), {"batch": 4}, weft.InvalidValue, "batch=4"),
        ((np.ones(3), np.ones(3)), {"batch": 1.0}, weft.InvalidType, "a number of rows, a slice"),
        ((np.ones(3), np.ones(3)), {"num_slices": 0}, weft.InvalidValue, "num_slices=0.*1 to 3"),
        ((np.ones(3), np.ones(3)), {"num_slices": 4}, weft.InvalidValue, "num_slices=4.*1 to 3"),
        ((np.ones(3), np.ones(3)), {"num_slices": 1.5}, weft.InvalidType, r"num_slices=1\.5"),
        ((np.ones(3), np.ones(3)), {"outputs": [2]}, weft.InvalidValue, "outputs has 2"),
        ((), {}, weft.InvalidValue, "without an argument to split"),
    ],
)
def test_calls_that_cannot_be_made(
    arguments: Any, options: Any, error: type[Exception], text: str
) -> None:
    """The argument, its value and the expectation; nothing is computed."""
    with weft.Team(1) as team:
        f = weft.function(lambda x, y: (0.0, 1.0), collect=["mean", "sum"], team=team)
        with pytest.raises(error, match=text):
            f(*arguments, **options)


def test_a_team_is_a_team() -> None:
    """A number of workers is none; every call that takes a team says so."""
    calls: list[Callable[[], Any]] = [
        lambda: weft.function(np.sum, collect="sum", team=2),  # type: ignore[arg-type]
        lambda: weft.replicate(np.zeros(3), team=2),  # type: ignore[arg-type]
        lambda: weft.train_step(np.sum, None, None, team=2),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(weft.InvalidType, match=r"team=2: expected a Team.*weft\.Team\(2\)"):
            call()


def test_outputs_that_cannot_be_averaged(team: weft.Team) -> None:
    """Strings, ragged rows, and outputs that are not the same in all parts."""
    with pytest.raises(weft.InvalidType, match="is a str, which collect='mean' cannot combine"):
        weft.function(lambda x: "text", collect="mean", team=team)(np.ones(6))
    for rows in (7, 6):  # of which 3 ranks would have as many
        with pytest.raises(weft.InvalidValue, match="other shapes in some parts"):
            weft.function(lambda x: x, collect="mean", team=team)(np.ones(rows))


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_calls_after_close(engine: str) -> None:
    """They say so, however often, and closing twice does nothing."""
    team = weft.Team(2, engine=engine)
    f = weft.function(np.sum, collect="sum", split=[0], team=team)
    team.close()
    team.close()
    for _ in range(2):
        with pytest.raises(weft.TeamBroken, match=r"has been closed.*weft\.Team\(\)"):
            f(np.ones(3))
    with pytest.raises(weft.TeamBroken, match="closed"):
        weft.replicate(np.ones(3), team=team)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((0,), {}, weft.InvalidValue),
        ((1.5,), {}, weft.InvalidType),
        ((2,), {"engine": "other"}, UnknownEngine),
        ((2,), {"timeout": -1}, weft.InvalidValue),
    ],
)
def test_teams_that_cannot_be_made(arguments: Any, options: Any, error: type[Exception]) -> None:
    """The argument and its value are named, and nothing is started."""
    with pytest.raises(error):
        weft.Team(*arguments, **options)


# what a function mentions


# it is sent at almost each of its calls, which a slow machine is told of
@pytest.mark.filterwarnings("ignore:.*calls went into comparing the values")
def test_what_it_mentions_may_change(team: weft.Team) -> None:
    """All ranks see an array changed in place, another number, an attribute, a list: the result is
    what the function gives here."""
    x = np.arange(12.0).reshape(6, 2)
    weights, factor, listed = np.ones(2), 1.0, [0.0]
    f = weft.function(
        lambda x: (factor * (x @ weights) + listed[0]).mean(), collect="mean", team=team
    )
    for _ in range(3):
        assert f(x) == pytest.approx(f.serial(x))
        assert f(x) == pytest.approx(f.serial(x))
        weights += 1
        assert f(x) == pytest.approx(f.serial(x))
        factor += 1
        assert f(x) == pytest.approx(f.serial(x))
        listed.append(listed.pop() + 5)
    assert f(x) == pytest.approx(f.serial(x))


class Marked:
    """An object of which each copy has a number of its own."""

    number = 0

    def __init__(self) -> None:
        self.value = 0

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state, number=int.from_bytes(os.urandom(7)))


def test_it_is_sent_again_only_if_something_changed(trio: weft.Team) -> None:
    """Workers keep one copy, and have no older ones."""
    used = Marked()

    def copies(x: Any) -> Any:
        return np.full(len(x), used.number)

    f = weft.function(copies, collect="gather", team=trio)
    kept = trio.backend.member.registered
    x = np.arange(6)
    first = f(x)
    assert (f(x) == first).all()
    used.value += 1
    again = f(x)
    assert (again[:2] == first[:2]).all()  # the driver's own
    assert (again[2:] != first[2:]).all()
    before = len(kept)
    for _ in range(5):
        used.value += 1
        f(x)
    assert len(kept) <= before


def test_one_function_in_two(trio: weft.Team) -> None:
    """Also where one that is kept mentions another: each has what there is now."""
    weights = np.zeros(1)

    def inner(x: Any) -> Any:
        return x * 0 + weights[0]

    first, second = (weft.function(inner, collect="gather", team=trio) for _ in range(2))
    outer = weft.function(lambda x: inner(x), collect="gather", team=trio)  # noqa: PLW0108
    x = np.arange(3.0)
    for number in range(3):
        weights[0] = number
        for f in (second, outer, first, outer):
            assert f(x).tolist() == [number] * 3


def test_what_a_call_changes_here_is_sent(trio: weft.Team) -> None:
    """A cache, a counter: at the next call all ranks have the driver's. What cannot be sent is
    refused with its path, and the team goes on."""
    cache: dict[str, Any] = {}
    calls = 0

    def fun(x: Any) -> Any:
        nonlocal calls
        calls += len(x)
        cache["calls"] = calls
        return np.full(len(x), cache["calls"])

    f = weft.function(fun, collect="gather", team=trio)
    for number in range(1, 4):
        assert f(np.arange(5.0)).tolist() == [2 * number] * 4 + [2 * number - 1]
    cache["lock"] = threading.Lock()
    with pytest.raises(weft.InvalidType, match=r"fun\.cache\['lock'\] is a _thread\.lock"):
        f(np.arange(5.0))
    del cache["lock"]
    assert f(np.arange(5.0)).tolist() == [8] * 4 + [7]


def test_changes_around_a_restart(trio: weft.Team) -> None:
    """Workers that were started again have what there was then; the next call has what is now."""
    scale = 1.0
    f = weft.function(lambda x: x * 0 + scale, collect="gather", team=trio)
    x = np.arange(3.0)
    assert f(x).tolist() == [1, 1, 1]
    scale = 2.0
    trio.restart()
    scale = 1.0
    assert f(x).tolist() == [1, 1, 1]


def test_a_replica_is_not_sent_again(trio: weft.Team) -> None:
    """Each rank's own copy stays as it is, also where the driver changes its."""
    weights = np.zeros(2)
    replica = weft.replicate(weights, team=trio)
    f = weft.function(lambda x: x * 0 + weights[0], collect="gather", team=trio)
    x = np.arange(3.0)
    assert f(x).tolist() == [0, 0, 0]
    weights += 1
    assert f(x).tolist() == [1, 0, 0]
    replica.broadcast()
    assert f(x).tolist() == [1, 1, 1]
