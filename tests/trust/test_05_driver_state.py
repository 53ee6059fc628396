"""The driver's state: what it has set when it calls holds in the workers for that call."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

import weft
from tests.support import run_script
from weft.errors import LaunchError


def succeeds(program: str) -> str:
    outcome = run_script(program + "\nprint('done')")
    assert outcome.code == 0, outcome
    assert outcome.out.endswith("done\n"), outcome
    return outcome.err


def test_the_environment() -> None:
    """Variables that are set, changed and deleted between two calls. A worker's share of cores
    stays its own, and what the user has set for threads wins."""
    succeeds(
        """
import os, time
for name in list(os.environ):
    if "THREADS" in name or "LOKY" in name:
        del os.environ[name]
import numpy as np
import weft

def read(name):
    return os.environ.get(name)

names = ["MINE", "HOME", "OMP_NUM_THREADS", "WEFT_CORES", "LOKY_MAX_CPU_COUNT"]
share = str(max(1, len(os.sched_getaffinity(0)) // 2))
assert weft.map(read, names, n=2) == [None, os.environ["HOME"], share, share, share]
os.environ["MINE"] = "1"
del os.environ["HOME"]
os.environ["OMP_NUM_THREADS"] = "7"
assert weft.map(read, names, n=2) == ["1", None, "7", share, share]
del os.environ["MINE"]
del os.environ["OMP_NUM_THREADS"]
assert weft.map(read, names, n=2) == [None, None, share, share, share]
import joblib
assert set(weft.map(lambda _: joblib.cpu_count(), range(4), n=2)) == {int(share)}

distributed = weft.distribute(read)
os.environ["MINE"] = "2"
assert distributed(["MINE"]) == ["2"]
handle = weft.map_async(read, ["MINE"] * 4)
os.environ["MINE"] = "3"
assert handle.wait() == ["2"] * 4  # as it was at the call

with weft.Team(2) as team:
    f = weft.function(lambda x: x * int(os.environ["MINE"]), collect="gather", team=team)
    assert list(f(np.ones(4))) == [3] * 4
    os.environ["MINE"] = "4"
    assert list(f(np.ones(4))) == [4] * 4
    os.environ["TZ"] = "UTC-9"
    time.tzset()
    g = weft.function(lambda x: x * 0 + time.timezone, collect="gather", team=team)
    assert list(g(np.ones(4))) == [-9 * 3600] * 4
"""
    )


def test_what_the_interpreter_and_numpy_have_set() -> None:
    """sys.argv, sys.path, the recursion limit, the working folder, NumPy's errors, decimal's and
    locale's settings, scikit-learn's: in maps and in teams, and back again."""
    succeeds(
        """
import decimal, locale, os, sys
import numpy as np
import sklearn
import weft

def state(_):
    import decimal, locale, sklearn
    return (
        os.getcwd(), sys.argv[:], sys.path[-1], sys.getrecursionlimit(), np.geterr(),
        decimal.getcontext().prec, decimal.getcontext().rounding,
        sorted(signal.__name__ for signal, set in decimal.getcontext().traps.items() if set),
        locale.setlocale(locale.LC_ALL), sklearn.get_config(),
        str(np.array([1 / 3, 2e10])),
    )

with weft.Team(2) as team:
    f = weft.function(lambda x: [state(0)], collect="gather", team=team, check=None)

    def check():
        expected = state(0)
        assert all(found == expected for found in weft.map(state, range(4), n=2)), expected
        assert all(found == expected for found in f(np.ones(4))), expected
        return expected

    before = check()
    os.chdir("/")
    sys.argv[:] = ["other", "--fast"]
    sys.path.append("/nowhere")
    sys.setrecursionlimit(5000)
    sklearn.set_config(assume_finite=True)
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
    np.set_printoptions(precision=3, formatter={"float": lambda x: f"<{x:.2g}>"})
    with np.errstate(divide="raise", invalid="ignore"), decimal.localcontext() as context:
        context.prec = 5
        context.traps[decimal.Inexact] = True
        assert check() != before
        try:
            weft.map(lambda x: 1 / np.float64(x), [0.0], n=2)
            raise AssertionError
        except FloatingPointError:
            pass
    assert check()[4:8] == before[4:8]
"""
    )


def test_what_torch_has_set() -> None:
    """Gradients, inference, autocast, the default dtype and device: around a map, and around a
    function; also for a worker that loads torch in the middle of the call."""
    succeeds(
        """
import torch
import weft

def state(_):
    import torch
    x = torch.ones(2, 2)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        str((x @ x).dtype), (torch.ones(1, requires_grad=True) * 2).requires_grad, x.device.type,
    )

weft.map(abs, [1, 2], n=1)  # this worker has no torch
model = torch.nn.Linear(2, 1)

with weft.Team(2) as team:
    weft.replicate(model, team=team)
    f = weft.function(lambda x: [state(0)] * len(x), collect="gather", team=team)

    def check():
        expected = state(0)
        found = weft.map(state, range(4), n=1)
        assert found == [expected] * 4, (found, expected)
        found = f(torch.ones(4))
        assert list(found) == [expected] * 4, (found, expected)
        return expected

    with torch.no_grad():
        assert check()[0] is False
    assert check()[0] is True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check()[5] == "torch.bfloat16"
    with torch.device("meta"):
        assert set(weft.map(lambda _: torch.ones(2).device.type, range(4), n=1)) == {"meta"}
    torch.set_default_device("meta")
    assert weft.map(state, [0], n=1) == [state(0)]
    torch.set_default_device(None)
    assert check()[7] == "cpu"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    assert check()[2:5] == ("torch.float64", True, "high")
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    check()

    # what a team gets while it infers can be trained afterwards
    late = torch.nn.Linear(2, 1)
    with torch.inference_mode():
        assert check()[1] is True
        g = weft.function(lambda x: late(x), collect="gather", team=team)
        weft.replicate(late, team=team)
        assert g(torch.ones(4, 2)).shape == (4, 1)
    assert check()[1] is False
    optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
    step = weft.train_step(lambda model, x: (model(x) ** 2).mean(), late, optimizer, team=team)
    x = torch.randn(8, 2)
    losses = [step(x) for _ in range(5)]
    assert losses[-1] < losses[0]
"""
    )


def warn(x: int) -> int:
    """Warn from one line, whatever the item."""
    warnings.warn("this is old", DeprecationWarning, stacklevel=1)
    return x


def warn_of(x: int) -> int:
    """Warn of each item."""
    warnings.warn(f"item {x}", UserWarning, stacklevel=1)
    return x


def test_warnings_reach_pytest() -> None:
    """pytest.warns, catch_warnings and filters that raise: in test after test, with warm
    workers."""
    for _ in range(3):
        with pytest.warns(DeprecationWarning, match="this is old"):
            assert weft.map(warn, [1, 2], n=2) == [1, 2]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weft.map(warn_of, range(4), n=2)
        assert sorted(str(one.message) for one in caught) == [f"item {x}" for x in range(4)]
        assert {(one.category, one.filename) for one in caught} == {(UserWarning, __file__)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="item 3"):
                weft.map(warn_of, [3], n=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            weft.map(warn_of, range(4), n=2)
        assert not caught


def test_warnings_of_a_team() -> None:
    """What a worker's part warns of is seen as the driver's own part is."""
    with weft.Team(2) as team:
        f = weft.function(lambda x: x * warn(1), collect="gather", team=team)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            f(np.arange(4.0))
            f(np.arange(4.0))
        assert len(caught) == 1  # one line, one text: shown once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(np.arange(4.0))
        assert len(caught) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(DeprecationWarning):
                f(np.arange(4.0))


def test_warnings_are_printed_once() -> None:
    """As in one process: once for each line and text by default, under the name of the script, and
    by `-W` and the rules of the main program."""
    printed = succeeds(
        """
import warnings
import weft

class Mine(UserWarning):
    pass

def f(x):
    for _ in range(3):
        warnings.warn("of my own", Mine)
        warnings.warn(f"item {x % 2}")
        warnings.warn("old", DeprecationWarning)  # shown in the main program
    return x

weft.map(f, range(8), n=2)
weft.map(f, range(8), n=2)
warnings.simplefilter("error", Mine)
try:
    weft.map(f, range(8), n=2)
    raise AssertionError
except Mine:
    pass
"""
    )
    assert printed.count("Mine: of my own") == 1
    assert printed.count("UserWarning: item 0") == printed.count("UserWarning: item 1") == 1
    assert printed.count("DeprecationWarning: old") == 1
    assert printed.count('  warnings.warn("of my own", Mine)') == 1


def test_a_working_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is called is refused, and says what to write; elsewhere it goes on."""
    team = weft.Team(2)
    f = weft.function(lambda x: x + 1, collect="gather", team=team)
    assert list(f(np.zeros(2))) == [1, 1]
    distributed = weft.distribute(abs)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for call in (
        lambda: weft.map(abs, [-1], n=1),
        lambda: weft.map_async(abs, [-1], n=1).wait(),
        lambda: weft.distribute(abs)([-1]),
        lambda: distributed([-1]),
        lambda: f(np.zeros(2)),
        lambda: weft.Team(2),
    ):
        with pytest.raises(LaunchError, match=r"(?s)has been deleted.*   os.chdir\(folder\)"):
            call()
    monkeypatch.chdir(tmp_path)
    assert weft.map(lambda _: os.getcwd(), [0], n=1) == [str(tmp_path)]
    assert list(f(np.zeros(2))) == [1, 1]
    assert distributed([-1]) == [1]
