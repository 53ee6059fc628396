"""The program of the soak: eight threads of one driver call everything at random, for so many
seconds, while a ninth kills workers. Every result is compared with that of this process alone.

    python soak.py SECONDS SEED FOLDER

It prints one JSON object: how often each call was made, what was killed, and what went wrong.
`WEFT_SOAK_WITHOUT` names parts to leave out, with commas: those of `CALLS`, and `killing`,
`killing teams`, `threads` (functions are then called by one thread at a time), `kept` (results
that a time limit keeps).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft

THREADS = 8
#: ranks of the team, the driver among them
RANKS = 2
#: how often an item may lose its worker: far more often than anybody kills
RETRIES = 50
#: seconds after which a call hangs, on however busy a machine
HANGS = 240.0

WITHOUT = set(filter(None, os.environ.get("WEFT_SOAK_WITHOUT", "").split(",")))

#: what a team's call may raise while a worker of it is killed
LOST = (weft.WorkerLost, weft.TeamBroken, weft.PeerLost)


class Soak:
    """What the threads have in common."""

    def __init__(self, seconds: float, seed: int, folder: Path) -> None:
        self.seconds, self.seed, self.folder = seconds, seed, folder
        self.until = time.monotonic() + seconds
        self.calls: Counter[str] = Counter()
        self.counting = threading.Lock()
        self.troubles: list[str] = []
        self.team = weft.Team(RANKS, timeout=HANGS)
        self.restarting = threading.Lock()
        #: one function at a time, where several are not to be tried
        self.turn: Any = threading.Lock() if "threads" in WITHOUT else contextlib.nullcontext()
        #: the table to which all threads add
        self.common = weft.ArrayTable(4, dtype="int64", name="common")

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until or bool(self.troubles)

    def count(self, what: str, times: int = 1) -> None:
        with self.counting:
            self.calls[what] += times

    def on_team(self, call: Callable[[], Any]) -> Any:
        """Call something on the team, which is restarted if a worker was lost; None then."""
        starts = self.team.starts
        try:
            with self.turn:
                return call()
        except LOST:
            with self.restarting, self.turn:
                if self.team.starts == starts:
                    self.team.restart()
                    self.count("restart of the team")
            return None


def square(x: Any) -> Any:
    return x * x


def slow_square(x: Any) -> Any:
    time.sleep(0.002)
    return x * x


class Rejected(Exception):
    pass


class Caller:
    """One of the threads: what it calls, and what it keeps between calls."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak, self.number = soak, number
        self.random = random.Random(f"{soak.seed} {number}")
        self.numbers = np.random.default_rng([soak.seed, number])
        #: a value that a function uses, and that changes between its calls
        self.weights = weights = self.numbers.random(1000)
        self.function = weft.function(lambda x: (x * weights).sum(), collect="sum", team=soak.team)
        self.edits = 0
        self.trainer: tuple[Any, ...] | None = None

    def run(self) -> None:
        mine = [call for name, call in CALLS.items() if name not in WITHOUT]
        if self.number:  # a group belongs to one thread
            mine.remove(tables) if tables in mine else None
        while not self.soak.over:
            call = self.random.choice(mine)
            try:
                call(self)
                self.soak.count(call.__name__)
            except BaseException:
                self.soak.troubles.append(f"{call.__name__}: {traceback.format_exc()}")
                return


def expect(found: Any, expected: Any) -> None:
    """Raise unless two results are the same, to rounding."""
    np.testing.assert_allclose(
        np.asarray(found, float), np.asarray(expected, float), rtol=1e-6, atol=1e-9
    )
    if isinstance(expected, list):
        assert len(found) == len(expected)


# the calls


def mapped(caller: Caller) -> None:
    """A function of the script over some numbers."""
    items = range(caller.random.randrange(200))
    expect(weft.map(square, items, retries=RETRIES, timeout=HANGS), [x * x for x in items])


def closures(caller: Caller) -> None:
    """A function that is new at every call, with a megabyte that it uses."""
    data = list(range(caller.random.randrange(10**6), 10**6 + 30_000))[-30_000:]
    step = caller.random.randrange(1, 1000)
    found = weft.map(lambda i: data[i * step], range(20), retries=RETRIES, timeout=HANGS)
    expect(found, [data[i * step] for i in range(20)])


def arrays(caller: Caller) -> None:
    """Arrays through shared memory, there and back."""
    items = [caller.numbers.random(caller.random.randrange(200_000)) for _ in range(4)]
    found = weft.map(lambda x: x + 1, items, retries=RETRIES, timeout=HANGS)
    for got, item in zip(found, items, strict=True):
        assert np.array_equal(got, item + 1)


def shared(caller: Caller) -> None:
    """Views of a shared array, and data that all items share."""
    array = weft.share(caller.numbers.random((8, 20_000)))
    data = {"weights": caller.numbers.random(20_000)}
    found = weft.map(
        lambda row, data: float(row @ data["weights"]),
        list(array),
        shared_data=data,
        retries=RETRIES,
        timeout=HANGS,
    )
    expect(found, [float(row @ data["weights"]) for row in array])


def failing(caller: Caller) -> None:
    """An exception of the script's own, raised or returned."""
    wrong = caller.random.randrange(30)

    def reject(x: int) -> int:
        if x == wrong:
            raise Rejected(x)
        return x

    results = weft.map(reject, range(30), on_error="return", retries=RETRIES, timeout=HANGS)
    assert [type(result) for result in results].count(Rejected) == 1
    assert isinstance(results[wrong], Rejected)
    try:
        weft.map(reject, range(30), retries=RETRIES, timeout=HANGS)
    except Rejected as error:
        assert error.args == (wrong,)
    else:
        raise AssertionError("nothing was raised")


def in_background(caller: Caller) -> None:
    """A handle: waited for, gone through, or cancelled."""
    items = range(60)
    handle = weft.map_async(slow_square, items, retries=RETRIES, timeout=HANGS)
    how = caller.random.choice(["wait", "results", "cancel"])
    if how == "results":
        expect(sorted(handle.results()), [[x, x * x] for x in items])
        return
    if how == "cancel":
        time.sleep(caller.random.random() * 0.05)
        handle.cancel()
    try:
        expect(handle.wait(), [x * x for x in items])
    except weft.Cancelled:
        assert how == "cancel"


def limited(caller: Caller) -> None:
    """A time limit that passes, or does not."""
    limit, items = caller.random.choice([0.01, 0.1, 1.0, 10.0]), range(40)
    try:
        expect(weft.map(slow_square, items, retries=RETRIES, timeout=limit), [x * x for x in items])
    except weft.Stalled:
        caller.soak.count("limited, and stalled")
    if "kept" in WITHOUT:
        return
    results = weft.map(slow_square, items, retries=RETRIES, timeout=limit, on_error="return")
    assert len(results) == len(items)
    for x, result in zip(items, results, strict=True):
        assert result == x * x or isinstance(result, weft.Stalled | weft.Cancelled), result


def limited_each(caller: Caller) -> None:
    """A time limit of one item: its worker is ended, and the other items have their results."""
    if "timeout_each" not in inspect.signature(weft.map).parameters:
        return
    late = caller.random.randrange(8)
    results: list[Any] = weft.map(  # type: ignore[call-arg]
        lambda x: time.sleep(60) if x == late else x * x,
        range(8),
        retries=1,  # each try of the late one takes a second; others' workers may be killed
        timeout=HANGS,
        timeout_each=1.0,
        on_error="return",
    )
    for x, result in enumerate(results):
        ended = isinstance(result, weft.Stalled | weft.WorkerLost)
        assert ended or (x != late and result == x * x), result


def streamed(caller: Caller) -> None:
    """Some results of endless input."""
    imap: Any = getattr(weft, "imap", None)
    if imap is None:
        return
    options = {"ordered": caller.random.random() < 0.5}
    if "retries" in inspect.signature(imap).parameters:
        options["retries"] = RETRIES
    stream = imap(square, itertools.count(), **options)
    try:
        found = list(itertools.islice(stream, 50))
    except weft.WorkerLost:
        assert "retries" not in options
        return
    finally:
        stream.close()
    if options["ordered"]:
        expect(found, [x * x for x in range(50)])
    else:
        assert all(round(root) ** 2 == x for x, root in zip(found, np.sqrt(found), strict=True))


def distributed(caller: Caller) -> None:
    """A distributed function, of a list and of an array."""
    shift = caller.random.random()
    function = weft.distribute(lambda x: x + shift, retries=RETRIES)
    expect(function([1.0, 2.0, 3.0]), [1 + shift, 2 + shift, 3 + shift])
    array = caller.numbers.random((3, caller.random.randrange(2, 500)))
    assert np.array_equal(function(array), array + shift)


def edited(caller: Caller) -> None:
    """A module of the user's own, edited and loaded again between calls, and a part of it that is
    replaced."""
    name = f"edited_{caller.number}"
    factor, caller.edits = caller.random.randrange(1000), caller.edits + 1
    (caller.soak.folder / f"{name}.py").write_text(
        f"# {'x' * caller.edits}\n"
        f"FACTOR = {factor}\n"
        "def helper(x):\n    return x * FACTOR\n"
        f"def compute(x):\n    return helper(x) + {caller.edits}\n"
    )
    importlib.invalidate_caches()
    module = sys.modules.get(name)
    module = importlib.import_module(name) if module is None else importlib.reload(module)
    expected = [x * factor + caller.edits for x in range(10)]
    assert [module.compute(x) for x in range(10)] == expected
    expect(weft.map(module.compute, range(10), retries=RETRIES, timeout=HANGS), expected)
    total = weft.function(
        lambda x: sum(module.compute(one) for one in x), collect="sum", team=caller.soak.team
    )
    found = caller.soak.on_team(lambda: total(np.arange(10)))
    if found is not None:
        expect(found, sum(expected))
    module.helper = lambda x: x + factor  # type: ignore[attr-defined]
    expected = [x + factor + caller.edits for x in range(10)]
    expect(weft.map(module.compute, range(10), retries=RETRIES, timeout=HANGS), expected)


def functions(caller: Caller) -> None:
    """Functions of a team: one that stays, whose values change, and a new one."""
    caller.weights[caller.random.randrange(1000)] += 1
    x = caller.numbers.random((caller.random.randrange(1, 40), 1000))
    found = caller.soak.on_team(lambda: caller.function(x))
    if found is not None:
        expect(found, (x * caller.weights).sum())
    shift = caller.random.random()
    fresh = weft.function(lambda x: x + shift, collect="gather", team=caller.soak.team)
    found = caller.soak.on_team(lambda: fresh(x))
    if found is not None:
        assert np.array_equal(found, x + shift)


def trained(caller: Caller) -> None:
    """A training step of a small model, beside the same step in this process."""
    if caller.trainer is None:
        model, twin = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, twin)]
        step = caller.soak.on_team(
            lambda: weft.train_step(mean_square, model, optimizers[0], team=caller.soak.team)
        )
        if step is None:
            return
        caller.trainer = model, twin, optimizers[1], step
    model, twin, optimizer, step = caller.trainer
    twin.load_state_dict(model.state_dict())
    x = torch.from_numpy(caller.numbers.random((caller.random.randrange(1, 18), 4), np.float32))
    y = x.sum(1, keepdim=True)
    found = caller.soak.on_team(lambda: step(x, y))
    if found is None:
        return
    optimizer.zero_grad()
    loss = mean_square(twin, x, y)
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(found, loss.item(), rtol=1e-4, atol=1e-7)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def mean_square(model: Any, x: Any, y: Any) -> Any:
    return (model(x) - y).square().mean()


def tables(caller: Caller) -> None:
    """Tables in a group of one: rows, updaters, files, models."""
    plain = caller.numbers.random((50, 3))
    table = weft.MatrixTable(plain, dtype="float64")
    for _ in range(20):
        rows = caller.numbers.integers(0, 50, 10)
        delta = caller.numbers.random((10, 3))
        table.add(delta, rows)
        np.add.at(plain, rows, delta)
    table.add_async(np.ones((50, 3))).wait()
    plain += 1
    np.testing.assert_allclose(np.asarray(table), plain)
    assert np.array_equal(table.get(slice(None, None, -7)), table.get()[::-7])
    path = caller.soak.folder / "table.weft"
    table.save(path)
    assert np.array_equal(weft.load(path).get(), table.get())
    model = {"w": np.zeros(5)}
    synced = weft.ModelTable(model)
    model["w"] += 1
    assert synced.sync()
    assert np.asarray(synced.tables[0]).tolist() == [1] * 5


def added(caller: Caller) -> None:
    """A table to which all threads add."""
    for _ in range(10):
        caller.soak.common.add([1, 0, 0, caller.number])
    caller.soak.count("adds", 10)
    caller.soak.count("sum of adds", 10 * caller.number)


CALLS: dict[str, Callable[[Caller], None]] = {
    call.__name__: call
    for call in (
        mapped,
        closures,
        arrays,
        shared,
        failing,
        in_background,
        limited,
        limited_each,
        streamed,
        distributed,
        edited,
        functions,
        trained,
        tables,
        added,
    )
}


# what is killed


def kill_at_random(soak: Soak) -> None:
    """Kill workers of the pool some sixty times, and of the team some ten times."""
    chance = random.Random(f"{soak.seed} kills")
    gap = max(5.0, soak.seconds / 72)  # a worker lives long enough to show whether it grows
    while not pause(soak, chance.expovariate(1 / gap)):
        try:
            if chance.random() < 1 / 6 and "killing teams" not in WITHOUT:
                kill_one(soak, chance, "workers of the team killed", team_workers(soak))
            else:
                found = weft.map(who, range(20), retries=RETRIES, timeout=HANGS)
                kill_one(soak, chance, "workers of the pool killed", set(found))
        except BaseException:
            soak.troubles.append(f"killing: {traceback.format_exc()}")


def pause(soak: Soak, seconds: float) -> bool:
    """Wait for so long, and return whether the soak is over."""
    until = time.monotonic() + seconds
    while not soak.over and time.monotonic() < until:
        time.sleep(0.05)
    return soak.over


def who(_: Any) -> int:
    time.sleep(0.001)
    return os.getpid()


def team_workers(soak: Soak) -> set[int]:
    """Return the processes that have just computed a function of the team."""
    folder = soak.folder / "ranks"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()

    def leave_a_trace(x: Any) -> Any:
        (folder / str(os.getpid())).touch()
        return x.sum()

    trace = weft.function(leave_a_trace, collect="sum", team=soak.team)
    soak.on_team(lambda: trace(np.ones(2 * RANKS)))
    return {int(path.name) for path in folder.iterdir()} - {os.getpid()}


def kill_one(soak: Soak, chance: random.Random, what: str, workers: set[int]) -> None:
    """Kill one of these processes, some time later, unless it has ended since."""
    for pid in chance.sample(sorted(workers), min(1, len(workers))):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if os.getpid() in ancestors(pid):  # not another process that has this number now
                    pause(soak, chance.random() * 0.3)
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    soak.count(what)
            finally:
                os.close(descriptor)


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, that one's parent, and so on."""
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        pid = int(status.split("PPid:")[1].split()[0])
        yield pid


def main() -> int:
    seconds, seed, folder = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.dump_traceback_later(seconds + HANGS + 60, exit=True)
    sys.path.insert(0, str(folder))
    weft.init()
    soak = Soak(seconds, seed, folder)
    threads = [
        threading.Thread(target=Caller(soak, number).run, name=f"caller {number}")
        for number in range(THREADS)
    ]
    if "killing" not in WITHOUT:
        threads.append(threading.Thread(target=kill_at_random, args=[soak], name="killer"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [soak.calls["adds"], 0, 0, soak.calls["sum of adds"]]
    if not soak.troubles and np.asarray(soak.common).tolist() != expected:
        soak.troubles.append(f"added: {np.asarray(soak.common)} instead of {expected}")
    soak.team.close()
    weft.shutdown()
    print(json.dumps({"calls": soak.calls, "troubles": soak.troubles}))
    return bool(soak.troubles)


if __name__ == "__main__":
    sys.exit(main())
