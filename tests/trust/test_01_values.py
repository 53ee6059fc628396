"""Workers compute with the values that the driver has when it calls, whatever has changed."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_script
from tests.trust import counting
from weft._api.team import _Cost, _costly


@pytest.fixture
def team() -> Iterator[weft.Team]:
    with weft.Team(2) as made:
        yield made


def test_the_program_of_the_report() -> None:
    """One element of a large array, in a program from a file."""
    outcome = run_script(
        "import numpy as np, weft\n"
        "w, x = np.zeros(200_000), np.ones(10)\n"
        "f = weft.function(lambda x: (x * 0 + w.sum()).mean(), collect='mean', team=weft.Team(2))\n"
        "f(x)\n"
        "w[1234] = 7.0\n"
        "print(f(x), f.serial(x))\n"
    )
    assert outcome.out.split() == ["7.0", "7.0"], outcome


class Settings:
    """An object of an importable module."""

    def __init__(self) -> None:
        self.values = [float(n) for n in range(5000)]
        self.inner = {"deep": [np.zeros(3)]}


@pytest.mark.filterwarnings("ignore:.*of the time of")  # each call sends something again
def test_any_change_of_anything(team: weft.Team) -> None:
    """Late in a list, deep in a dict, in a set, in an object of another module, in bytes."""
    array, cut = np.zeros(300_000), np.zeros((500, 700))[::3, ::2]
    numbers, names, own = list(range(10_000)), {"a", "b"}, Settings()
    text, table = bytearray(100_000), {n: [n] for n in range(3000)}
    uses = (array, cut, numbers, names, own, text, table)

    def total(x: Any) -> Any:
        array, cut, numbers, names, own, text, table = uses
        number = array.sum() + cut.sum() + sum(numbers) + len(names) + sum(own.values)
        number += own.inner["deep"][0].sum() + sum(text) + sum(n for (n,) in table.values())
        return x * 0 + number

    f = weft.function(total, collect="gather", team=team)
    x = np.arange(4.0)

    def change(step: int) -> None:
        rng = np.random.default_rng(step)
        if step % 8 == 0:
            array[rng.integers(len(array))] += 1
        elif step % 8 == 1:
            cut[-1, rng.integers(cut.shape[1])] += 1
        elif step % 8 == 2:
            numbers[rng.integers(1000, len(numbers))] += 1
        elif step % 8 == 3:
            names.add(f"name {step}")
        elif step % 8 == 4:
            own.values[rng.integers(1000, 5000)] += 1
        elif step % 8 == 5:
            own.inner["deep"][0][1] += 1
        elif step % 8 == 6:
            text[rng.integers(len(text))] += 1
        else:
            table[int(rng.integers(3000))][0] += 1

    assert (f(x) == f.serial(x)).all()
    for step in range(24):
        change(step)
        found = f(x)
        assert (found == f.serial(x)).all(), step


def test_results_that_are_used_later(team: weft.Team) -> None:
    """A large result lies in shared memory, but is the caller's own: its changes are sent."""
    rows = weft.function(lambda x: x * 2, collect="gather", team=team)(np.ones(50_000))
    part = weft.function(lambda x: x[: len(x)], collect="gather", team=weft.Team(1))(rows)
    for used in (rows, part):
        f = weft.function(lambda x, used=used: x * 0 + used.sum(), collect="gather", team=team)
        f(np.ones(4))
        used[123] += 1
        assert (f(np.ones(4)) == used.sum()).all()


def test_a_data_frame(team: weft.Team) -> None:
    """One number, one text."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": np.arange(5000.0), "name": ["a"] * 5000})

    def total(x: Any) -> Any:
        return x * 0 + frame["n"].sum() + len("".join(frame["name"]))

    f = weft.function(total, collect="gather", team=team)
    x = np.arange(4.0)
    assert np.allclose(f(x), f.serial(x))
    frame.loc[3456, "n"] += 1
    assert np.allclose(f(x), f.serial(x))
    frame.loc[4000, "name"] += "b"
    assert np.allclose(f(x), f.serial(x))


@pytest.mark.filterwarnings("ignore:.*of the time of")
def test_tensors(team: weft.Team) -> None:
    """A tensor and a module that is no replica, changed by `.data`."""
    torch = pytest.importorskip("torch")
    tensor, module = torch.zeros(100_000), torch.nn.Linear(300, 300)

    def total(x: Any) -> Any:
        return x * 0 + float(tensor.sum()) + float(module.weight.detach().double().sum())

    f = weft.function(total, collect="gather", team=team)
    x = np.arange(4.0)
    for _ in range(3):
        assert np.allclose(f(x), f.serial(x))
        tensor.data[12_345] += 1
        assert np.allclose(f(x), f.serial(x))
        module.weight.data[17, 23] += 1
        assert np.allclose(f(x), f.serial(x))


def test_training_sees_changes_of_data() -> None:
    """Parameters and buffers by `.data`, and the optimizer's own state, in place."""
    with weft.Team(2) as team:  # a fixture would hold it, and it the arrays
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)

        class Scaled(torch.nn.Module):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = torch.nn.Linear(3, 1)
                self.register_buffer("scale", torch.ones(1), persistent=False)

            def forward(self, x: Any) -> Any:
                return self.inner(x) * self.scale

        def made() -> tuple[Any, Any]:
            torch.manual_seed(0)
            model = Scaled()
            return model, torch.optim.Adam(model.parameters(), lr=0.1)

        x, y = torch.randn(9, 3), torch.randn(9, 1)
        loss = lambda model, x, y: ((model(x) - y) ** 2).mean()  # noqa: E731
        model, optimizer = made()
        alone, alone_optimizer = made()
        step = weft.train_step(loss, model, optimizer, team=team)

        def step_alone() -> float:
            alone_optimizer.zero_grad()
            value = loss(alone, x, y)
            value.backward()
            alone_optimizer.step()
            return float(value.detach())

        for number in range(6):
            assert step(x, y) == pytest.approx(step_alone(), rel=1e-5)
            for one, other in ((model, optimizer), (alone, alone_optimizer)):
                one.inner.weight.data[0, number % 3] += 0.5
                one.scale.data += 0.25
                other.state[one.inner.weight]["exp_avg"] *= 0.5
        step(x, y)
        step_alone()
        assert weft.same(model, team=team)
        assert torch.allclose(model.inner.weight, alone.inner.weight, rtol=1e-4)


def test_jax_parameters_replaced_in_their_dict(team: weft.Team) -> None:
    """The pytree stays the same dict, and has another array."""
    jnp = pytest.importorskip("jax.numpy")
    model = weft.Holder({"w": jnp.zeros(2)})
    step = weft.train_step(
        lambda p, x: ((x @ p["w"] - 1) ** 2).mean(), model, lambda p, g: p, team=team
    )
    x = jnp.ones((4, 2))
    assert step(x) == 1.0
    model.value["w"] = jnp.ones(2)
    assert step(x) == 1.0
    model.value["w"] = jnp.ones(2) * 2
    assert step(x) == 9.0


def test_what_costs_nothing() -> None:
    """Read-only arrays that own their memory, replicas, shared arrays: they are not read."""
    with weft.Team(2) as team:  # a fixture would hold it, and it the arrays
        constant = np.ones(30_000_000)
        constant.setflags(write=False)
        replica = np.ones(100_000)
        weft.replicate(replica, team=team)
        shared = weft.share(np.ones(100_000), readonly=True)
        f = weft.function(
            lambda x: x * 0 + constant[0] + replica[0] + shared[0], collect="gather", team=team
        )
        x = np.ones(4)
        assert f(x).tolist() == [3] * 4
        registered = f._registered
        assert registered is not None
        looked = registered._fingerprint()
        assert looked is not None
        assert looked.size < 2000
        replica += 1
        assert f(x).tolist() == [4, 4, 3, 3]  # each rank has its own
        # what a function of a module changes there is no reason to send the function again
        counted = weft.function(counting.mean, collect="mean", team=team, check=None)
        counted.send()
        number, calls = counted._registered_now().number(), counting.calls
        assert counted(x) == 1
        assert counted._registered_now().number() == number
        assert counting.calls == calls + 1


def test_the_warning_is_of_what_is_large() -> None:
    """A busy machine may take a millisecond for anything; the advice would save nothing."""
    cost = _Cost()
    for size, told in ((86, False), (1_000_000, True)):
        for _ in range(10):
            cost.looked(0.005, 0.005, size)
        assert cost.is_notable(0.01) is told


def test_the_warning_has_lines_that_fit() -> None:
    """It names the largest value; only what is an array can be made read-only."""
    table = {str(number): float(number) for number in range(1000)}
    text = _costly(lambda x: x + table["1"], "f", _Cost(), takes_whole=True)
    assert "most of all table, " in text
    assert "whole=['table']" in text
    assert "setflags" not in text
    assert "weft.share" not in text
    weights, small = np.ones(4_000_000), np.ones(4)
    text = _costly(lambda x: x.mean() + weights[0] + small[0], "f", _Cost(), takes_whole=True)
    assert "weights, 32,000,0" in text
    for line in ("whole=['weights']", "weft.replicate(weights)", "readonly=True", "setflags"):
        assert line in text


class Slow:
    """An object of few bytes, which takes long to pickle: longer than a call, if the machine is
    busy too."""

    def __getstate__(self) -> dict[str, int]:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        return {"value": 0}


def test_a_warning_where_comparing_takes_long(team: weft.Team) -> None:
    """Once for each function, with the line to write; then none."""
    slow = Slow()
    assert "whole=['slow']" in told_of(lambda x: x.mean() + (slow is None), team)


def told_of(fun: Any, team: weft.Team) -> str:
    """The text of the one warning that calls of a function give."""
    f = weft.function(fun, collect="mean", team=team)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        end = time.monotonic() + 60
        while not told and time.monotonic() < end:
            f(np.ones(4))
        for _ in range(3):
            f(np.ones(4))
    (one,) = told
    assert one.filename == __file__
    return str(one.message)


def test_no_warning_where_there_is_little_to_compare(team: weft.Team) -> None:
    """A small value that changes from call to call, so that it is sent with each."""
    number = 0
    f = weft.function(lambda x: x.mean() + number, collect="mean", team=team)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(200):
            assert f(np.zeros(4)) == number


def test_without_kernels() -> None:
    """Hashes are slower, and no less whole."""
    outcome = run_script(
        "import numpy as np, weft\n"
        "w, x = np.zeros(200_000), np.ones(10)\n"
        "f = weft.function(lambda x: (x * 0 + w.sum()).mean(), collect='mean', team=weft.Team(2))\n"
        "for at in (0, 77_777, 199_999):\n"
        "    w[at] += 1\n"
        "    assert f(x) == f.serial(x)\n"
        "    w[at] = -w[at]\n"
        "    assert f(x) == f.serial(x)\n",
        env={**os.environ, "WEFT_KERNELS": "0"},
    )
    assert outcome.code == 0, outcome


def test_classes_of_the_script() -> None:
    """Attributes that are set, patched and deleted, and other bases, are the driver's in workers;
    nothing that comes from a worker, or is checked, changes the driver's class."""
    outcome = run_script("""
import dataclasses, enum, functools, time
import numpy as np
import weft

class Base:
    def sign(self):
        return 1

class Other:
    def sign(self):
        return -1

class Model(Base):
    rate = 1
    weights = np.ones(5)
    names = ["a"]

    def f(self, x):
        return x * self.rate * self.sign()

    @staticmethod
    def extra(x):
        return x

class Wrong(Exception):
    codes = [1]

class Color(enum.Enum):
    RED = 1

model, weights, names, codes = Model(), Model.weights, Model.names, Wrong.codes
team = weft.Team(2)

def number(x):
    given = getattr(Model, "rate", 0), hasattr(Model, "extra"), Color(1) is Color.RED
    return (*given, model.sign(), float(Model.weights.sum()))

total = weft.function(
    lambda x: x.sum() * number(0)[0] * model.sign() * Model.weights.sum(), collect="sum", team=team
)

def check():
    assert weft.map(number, [1, 2], n=2) == [number(1), number(2)], number(1)
    expected = 6.0 * number(0)[0] * model.sign() * Model.weights.sum()
    assert total(np.arange(4.0)) == expected, (total(np.arange(4.0)), expected)
    assert Model.weights is weights and Model.names is names and Wrong.codes is codes

check()
weights[0] = 10  # by another name than the class's
check()
other = weft.function(lambda x: x * Model.rate, collect="gather", team=team)
assert list(other(np.arange(3.0))) == [0, 1, 2]
Model.rate = 5
check()
Model.rate = 1  # `other` would be sent as it was sent before
assert list(other(np.arange(3.0))) == [0, 1, 2]
check()
Model.rate = 5
check()
del Model.rate, Model.extra
check()
Model.sign = lambda self: 7
check()
del Model.sign
check()
Model.__bases__ = (Other,)
check()

Model.rate = 1
def changed(x):
    time.sleep(0.2)
    Model.rate = 99
    return Model()

handle = weft.map_async(changed, [1, 2])
Model.rate = 5
assert [type(one) for one in handle.wait()] == [Model, Model]
assert Model.rate == 5, Model.rate
def fail(x):
    raise Wrong(x)

found = weft.map(fail, [1], on_error="return")
assert type(found[0]) is Wrong and Wrong.codes is codes

@dataclasses.dataclass(slots=True)
class Slotted:
    value: int

assert weft.map(lambda x: Slotted(x), [1, 2]) == [Slotted(1), Slotted(2)]

SCALE = 2

@functools.lru_cache
def cached(x):
    return x * SCALE

assert weft.map(cached, [1, 2], n=2) == [2, 4]
SCALE = 3
cached.cache_clear()
assert weft.map(cached, [1, 2], n=2) == [3, 6]
with_cache = weft.function(lambda x: x * cached(1), collect="gather", team=team)
assert list(with_cache(np.arange(4.0))) == [0, 3, 6, 9]
SCALE = 4
cached.cache_clear()
assert list(with_cache(np.arange(4.0))) == [0, 4, 8, 12]

class Lazy:
    @functools.cached_property
    def value(self):
        return SCALE

lazy = weft.function(lambda x: x * Lazy().value, collect="gather", team=team)
assert weft.map(lambda x: x * Lazy().value, [1, 2], n=2) == [4, 8]
assert list(lazy(np.arange(4.0))) == [0, 4, 8, 12]
Lazy.value.func.__code__ = (lambda self: SCALE + 1).__code__
assert list(lazy(np.arange(4.0))) == [0, 5, 10, 15]
print("done")
""")
    assert (outcome.code, outcome.out) == (0, "done\n"), outcome
