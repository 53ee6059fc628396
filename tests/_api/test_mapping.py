"""`map` and `map_async`."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import deadline, run_python, run_script, wait_until, within
from weft._api.mapping import share_of_cores
from weft.errors import (
    Cancelled,
    InvalidType,
    InvalidValue,
    RemoteTraceback,
    Stalled,
    UnknownEngine,
)


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def method(self, x: int) -> int:
        return self.factor * x

    def __call__(self, x: int) -> int:
        return self.method(x)

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def kind(cls, x: int) -> str:
        return f"{cls.__name__} {x}"


def module_function(x: int) -> int:
    return x - 1


def functions() -> dict[str, Callable[[int], Any]]:
    offset = 10

    def closure(x: int) -> int:
        return x + offset

    def recursive(x: int) -> int:
        return 1 if x <= 1 else x * recursive(x - 1)

    def with_defaults(x: int, y: int = 3, *, z: int = 4) -> int:
        return x + y + z

    return {
        "lambda": lambda x: x * x,
        "closure": closure,
        "recursive": recursive,
        "defaults": with_defaults,
        "partial": partial(closure),
        "partial of a lambda": partial(lambda y, x: x - y, 5),
        "bound method": Scale(3).method,
        "object": Scale(4),
        "static method": Scale.static,
        "class method": Scale.kind,
        "class": complex,
        "built-in": abs,
        "ufunc": np.sqrt,
        "of a module": module_function,
    }


def test_functions_of_every_kind_travel() -> None:
    """The results are those of the built-in map, also in the serial engine."""
    items = [1, 2, 3, 4, 5]
    for name, function in functions().items():
        expected = [function(x) for x in items]
        assert weft.map(function, items, n=2) == expected, name
        assert weft.map(function, items, engine="serial") == expected, name


def test_items_of_every_kind() -> None:
    """Whatever can be gone through is: lists, arrays by rows, dicts by keys, generators, none."""
    rows = np.arange(6).reshape(3, 2)
    for items in ([1, 2], (1, 2), range(5), {"a": 1, "b": 2}, "text", rows, [], set()):
        assert weft.map(str, items, n=2) == [str(item) for item in items]
    assert weft.map(str, (x for x in range(50)), n=2) == [str(x) for x in range(50)]

    class Guessed:
        """Says how many there are, and is wrong."""

        def __init__(self, said: int) -> None:
            self.said = said

        def __len__(self) -> int:
            return self.said

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for said in (0, 2, 10):
        assert weft.map(str, Guessed(said), n=2) == ["0", "1", "2"]


@pytest.mark.parametrize("engine", ["local", "serial"])
def test_several_iterables_are_gone_through_in_step(engine: str) -> None:
    """As the built-in does: up to the end of the shortest, of any kinds; what every call gets comes
    after them. The one iterable may be named, as before."""
    options: dict[str, Any] = {"n": 2, "engine": engine}
    assert weft.map(pow, [2, 3, 4], [5, 2], **options) == [32, 9]
    assert weft.map(max, range(1000), itertools.count(), **options) == list(range(1000))
    assert weft.map(lambda x, y, z: (x, y, z), "ab", {"k": 1}, [(1, 2)], **options) == [
        ("a", "k", (1, 2))
    ]
    shared = weft.map(
        lambda x, y, data: x * data["by"] + y, [1, 2], [3, 4], shared_data={"by": 10}, **options
    )
    assert shared == [13, 24]
    named = weft.map(
        lambda x, y, *, shared_data: x + y, [1], [2], shared_data={"by": 10}, **options
    )
    assert named == [3]
    assert weft.map(pow, [], [1], **options) == []
    rows = np.arange(6.0).reshape(3, 2)
    assert weft.map(np.dot, rows, rows, **options) == [1.0, 13.0, 41.0]
    assert weft.map_async(pow, [2, 3], [5, 2], **options).wait() == [32, 9]
    assert weft.map(abs, items=[-1], **options) == [1]


def test_minus_one_is_all_cores() -> None:
    """As in joblib and scikit-learn; the same as no number."""
    assert weft.map(abs, [-1, -2, -3], n=-1) == [1, 2, 3]
    pids = weft.map(lambda _: (time.sleep(0.01), os.getpid())[1], range(40), n=-1)
    assert len(set(pids)) == min(40, share_of_cores())
    with weft.Team(-1, engine="serial") as team:
        assert team.size == 1
    assert weft.distribute(abs, max_cpu=-1)([-1, -2]) == [1, 2]


def test_an_exception_keeps_its_class_and_tells_where() -> None:
    """It is raised at once, with the worker's traceback, the item and the worker as its cause; what
    still runs is ended."""

    def function(x: int) -> int:
        if x == 3:
            raise LookupError("no", x)
        time.sleep(60 if x > 3 else 0)
        return x

    began = time.monotonic()
    with pytest.raises(LookupError) as caught:
        weft.map(function, range(20), n=2)
    assert time.monotonic() - began < within(10)
    assert caught.value.args == ("no", 3)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.item == 3
    assert re.match(r"raised in item 3, worker \d+ \(pid \d+\):\nTraceback", str(cause))
    assert 'raise LookupError("no", x)' in str(cause)


@pytest.mark.parametrize("engine", ["local", "serial"])
def test_odd_exceptions_come_out_as_they_are(engine: str) -> None:
    """StopIteration does not end anything quietly; with on_error="return" failures are in place."""

    def function(x: int) -> int:
        return next(iter([x] * (x % 2)))

    with pytest.raises(StopIteration):
        weft.map(function, [1, 2, 3], n=1, engine=engine)
    found = weft.map(function, [1, 2, 3, 4], n=1, engine=engine, on_error="return")
    assert found[::2] == [1, 3]
    assert [type(error) for error in found[1::2]] == [StopIteration] * 2
    handle = weft.map_async(function, [2], n=1, engine=engine)
    with pytest.raises(StopIteration):
        handle.wait()


def test_an_exit_is_a_failure_of_its_item() -> None:
    """SystemExit ends neither the worker nor this process."""
    found = weft.map(sys.exit, [3], n=1, on_error="return")
    assert isinstance(found[0], weft.errors.RemoteError)
    assert str(found[0]) == "SystemExit: 3"


#: in torch's place, which takes seconds to load in each worker
SEEDS = """
import os, random, signal, weft
import numpy as np

def draw(index):
    if index == 2 and dies and not os.path.exists("lost"):
        open("lost", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    import torch  # the first item of each worker loads it
    return random.random(), float(np.random.rand()), float(torch.rand(1))

dies = False
expected = weft.map(draw, range(6), seed=3, engine="serial")
print(len(set(expected)))
for n in (1, 3):
    print(weft.map(draw, range(6), seed=3, n=n) == expected)
print(weft.map(draw, range(6), seed=4, n=2) == expected)
dies = True
print(weft.map(draw, range(6), seed=3, n=2, retries=1) == expected, os.path.exists("lost"))
weft.shutdown()
unseeded = weft.map(draw, range(4), n=2)
print(len({numbers[2] for numbers in unseeded}))
"""


def test_a_seed_gives_the_same_numbers_for_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random, numpy and torch, though a worker may not have loaded it before its first item; for
    1 and 3 workers, in the serial engine, and after a worker was lost. Without a seed workers
    draw different numbers, also of torch, which begins with the same ones in each process."""
    monkeypatch.chdir(tmp_path)
    outcome = run_script(SEEDS)
    assert outcome.out == "6\nTrue\nTrue\nFalse\nTrue True\n4\n", outcome


def test_shared_data_is_seen_by_all_and_written_by_nobody() -> None:
    """Its arrays are mapped, of any dtype, and read-only in the worker; other values are there."""
    table = np.arange(200_000.0)
    data = {"table": table, "small": np.array(["a", "b"]), "name": "n", "n": [1, 2]}

    def function(x: int, shared: Any) -> Any:
        errors = []
        for array in (shared["table"], shared["small"]):
            try:
                array[0] = array[1]
            except ValueError as error:
                errors.append(str(error))
        return x, float(shared["table"].sum()), shared["name"], shared["n"], errors

    expected = (float(table.sum()), "n", [1, 2], ["assignment destination is read-only"] * 2)
    for engine in ("local", "serial"):
        found = weft.map(function, range(4), n=2, engine=engine, shared_data=data)
        assert found == [(x, *expected) for x in range(4)]
    table[0] = 5
    assert table.flags.writeable
    named = weft.map(lambda x, *, shared_data: shared_data["name"], [1], n=1, shared_data=data)
    assert named == ["n"]


def test_a_bar_counts_finished_items(capsys: pytest.CaptureFixture[str]) -> None:
    """With its label or the function's name, how many of how many, and failures; without a total
    for a generator; and nothing without `progress`."""

    def function(x: int) -> int:
        return 1 // x

    weft.map(function, range(1, 9), n=2, progress="sweep")
    text = capsys.readouterr().err
    assert "sweep: 100%" in text
    assert "8/8" in text
    weft.map(function, iter(range(8)), n=2, progress=True, on_error="return")
    text = capsys.readouterr().err
    assert "function: 8it" in text
    assert "failed=1" in text
    weft.map(function, range(1, 9), n=2)
    assert capsys.readouterr().err == ""


def test_what_workers_print_comes_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole lines, all of them, those of one worker in order, before `map` returns; also of
    programs that a function starts."""

    def function(x: int) -> None:
        for line in range(50):
            print(f"item {x}", end=" ", flush=True)
            print(f"line {line}")
            print(f"error {x} {line}", file=sys.stderr)
        if x == 0:
            subprocess.run(["echo", "from a program"], check=True)
        sys.stdout.write("without end")

    weft.map(function, range(4), n=2)
    captured = capsys.readouterr()
    out = captured.out.splitlines()
    assert "from a program" in captured.out
    for x in range(4):
        lines = [line.removeprefix("without end") for line in out if f"item {x} " in line]
        assert lines == [f"item {x} line {line}" for line in range(50)]
        errors = [line for line in captured.err.splitlines() if line.startswith(f"error {x} ")]
        assert errors == [f"error {x} {line}" for line in range(50)]


def test_what_workers_log_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    """Each record reaches this process's handlers with its logger, level, text and traceback, by
    the levels that are set here."""

    def function(x: int) -> None:
        log = logging.getLogger("work")
        log.warning("item %d of %s", x, ["any", "thing"])
        log.debug("never seen")
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            log.exception("failed")

    with caplog.at_level(logging.INFO):
        weft.map(function, range(3), n=2)
    records = sorted((r.name, r.levelname, r.getMessage()) for r in caplog.records)
    warned = [("work", "WARNING", f"item {x} of ['any', 'thing']") for x in range(3)]
    assert records == sorted([*warned, *[("work", "ERROR", "failed")] * 3])
    assert caplog.text.count("raise ZeroDivisionError") == 3


def test_a_deadline_names_who_has_what() -> None:
    """Stalled says how long, which worker, which items; and the workers can be used again."""
    weft.map(abs, [-1, -2], n=2)  # until they have started nobody has an item
    limit = deadline(0.5)
    with pytest.raises(
        Stalled, match=rf"{limit} s have passed.*\n  worker \d \(pid \d+\) has item"
    ):
        weft.map(time.sleep, [0, 60, 60], n=2, timeout=limit)
    assert weft.map(abs, [-1], n=2, timeout=math.inf) == [1]


# map_async


def test_a_handle_tells_how_far_it_is(tmp_path: Path) -> None:
    """Status and progress while it runs and when it has ended; results in order."""

    def function(x: int) -> int:
        time.sleep(0.01)  # long enough not to be sent with others
        while x == 2 and not (tmp_path / "go").exists():
            time.sleep(0.005)
        return x * x

    for items, total in ((range(3), 3), (iter(range(3)), None)):
        handle = weft.map_async(function, items, n=1)
        wait_until(lambda handle=handle: handle.progress[0] == 2)
        assert (handle.status, handle.done(), handle.progress) == ("running", False, (2, total))
        with pytest.raises(Stalled, match=rf"0\.05 s have passed, and 2 of {total} items"):
            handle.wait(timeout=0.05)
        (tmp_path / "go").touch()
        assert handle.wait(timeout=math.inf) == [0, 1, 4]
        assert (handle.status, handle.done(), handle.progress) == ("finished", True, (3, 3))
        assert repr(handle) == "<MapHandle, finished, 3 of 3 items>"
        assert handle.wait() == [0, 1, 4]
        (tmp_path / "go").unlink()
    with pytest.raises(InvalidValue, match=r"timeout=-1: expected 0 or more seconds"):
        handle.wait(timeout=-1)


def test_results_come_as_they_are_ready(tmp_path: Path) -> None:
    """A long item does not hold back those after it; whoever asks late gets all."""

    def function(x: int) -> int:
        while x == 0 and not (tmp_path / "go").exists():
            time.sleep(0.005)
        return -x

    handle = weft.map_async(function, range(6), n=2)
    seen = []
    for index, value in handle.results():
        assert value == -index
        seen.append(index)
        if len(seen) == 5:
            assert handle.status == "running"
            (tmp_path / "go").touch()
    assert seen[-1] == 0
    assert sorted(seen) == list(range(6))
    assert list(handle.results()) == [(index, -index) for index in seen]


@pytest.mark.parametrize("engine", ["local", "serial"])
def test_a_cancelled_map_ends_soon(engine: str) -> None:
    """`cancel` returns when nothing runs any more; who waits gets Cancelled; twice is once."""
    handle = weft.map_async(lambda x: time.sleep(0.05) or x, range(10_000), n=2, engine=engine)
    wait_until(lambda: handle.progress[0] >= 2)
    began = time.monotonic()
    handle.cancel()
    assert time.monotonic() - began < within(3)
    assert (handle.status, handle.done()) == ("cancelled", True)
    with pytest.raises(Cancelled):
        handle.wait()
    with pytest.raises(Cancelled):
        list(handle.results())
    handle.cancel()
    finished = weft.map_async(abs, [-1], engine=engine)
    assert finished.wait() == [1]
    finished.cancel()
    assert finished.status == "finished"


def test_a_failed_map_is_told_to_who_waits() -> None:
    """Results before the failure can be had; `wait` raises the exception itself."""
    handle = weft.map_async(lambda x: 1 // x, [1, 0], n=1)
    with pytest.raises(ZeroDivisionError):
        handle.wait()
    assert handle.status == "failed"
    seen = []
    with pytest.raises(ZeroDivisionError):
        seen.extend(handle.results())
    handle = weft.map_async(lambda x: 1 // x, [1, 0], n=1, on_error="return")
    assert dict(handle.results())[0] == 1
    assert isinstance(handle.wait()[1], ZeroDivisionError)
    assert handle.status == "finished"


def test_shutdown_cancels_what_is_under_way() -> None:
    """Several maps at once share the workers; `shutdown` ends all of them."""
    handles = [weft.map_async(lambda x: time.sleep(0.2), range(1000), n=1) for _ in range(2)]
    assert weft.map(abs, [-3], n=1) == [3]
    weft.shutdown()
    assert [handle.status for handle in handles] == ["cancelled"] * 2


def test_maps_from_several_threads_do_not_disturb_each_other() -> None:
    """Each call has its workers to itself."""
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        found[number] = weft.map(lambda x: x * number, range(200), n=2)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [x * number for x in range(200)] for number in range(3)}


# what makes no sense

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (weft.map, (3, [1]), {}, InvalidType, r"of map\(fun, items\) is 3 of type int; expected a fun"),
    (weft.map_async, (None, [1]), {}, InvalidType, r"of map_async\(fun, items\) is None of type"),
    (
        weft.map,
        (abs, 5),
        {},
        InvalidType,
        r"items of type int, which cannot be gone .*expected a l",
    ),
    (weft.map, (abs, None), {}, InvalidType, r"items of type NoneType"),
    (weft.map, (abs, np.array(3)), {}, InvalidType, r"items of type ndarray"),
    (weft.map, (abs, [1]), {"n": 0}, InvalidValue, r"n=0: expected one worker or more"),
    (weft.map, (abs, [1]), {"n": -2}, InvalidValue, r"n=-2: expected one .*more, or -1 or None"),
    (weft.map, (pow, [1], 5), {}, InvalidType, r"map got items of type int, which cannot be gone"),
    (weft.map, (abs,), {}, TypeError, r"map\(\) missing 1 required positional argument: 'items'"),
    (weft.map, (abs, [1]), {"n": 2.0}, InvalidType, r"n=2\.0: expected a whole number"),
    (weft.map, (abs, [1]), {"n": True}, InvalidType, r"n=True: expected a whole number"),
    (weft.map, (abs, [1]), {"engine": "mpi"}, UnknownEngine, r"'mpi': known are 'local', 'ray'"),
    (weft.map, (abs, [1]), {"seed": "s"}, InvalidType, r"map\(seed='s'\): expected a whole number"),
    (weft.map, (abs, [1]), {"retries": -1}, InvalidValue, r"retries=-1\): .*number, 0 or more"),
    (weft.map, (abs, [1]), {"retries": None}, InvalidType, r"retries=None\): .*got NoneType"),
    (weft.map, (abs, [1]), {"on_error": "x"}, InvalidValue, r"'x'\): expected 'raise' or 'return'"),
    (weft.map, (abs, [1]), {"progress": 3}, InvalidType, r"progress=3: expected True, False, or a"),
    (weft.map, (abs, [1]), {"timeout": -1}, InvalidValue, r"timeout=-1: expected 0 or more"),
    (weft.map, (abs, [1]), {"timeout": "1"}, InvalidType, r"timeout='1': expected a number"),
    (
        weft.map,
        (abs, [1]),
        {"shared_data": [1]},
        InvalidType,
        r"shared_data is a list; expected a d",
    ),
    (
        weft.map,
        (abs, [1]),
        {"gpus": -1},
        InvalidValue,
        r"map\(gpus=-1\): expected a whole number, 0",
    ),
    (weft.map_async, (abs, [1]), {"retries": -1}, InvalidValue, r"map_async\(retries=-1\)"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "options", "kind", "text"), WRONG, ids=[str(one[4])[:25] for one in WRONG]
)
def test_what_makes_no_sense_is_refused_at_the_call(
    call: Any, arguments: Any, options: Any, kind: type[Exception], text: str
) -> None:
    """The message names the value and what was expected; no worker is started for it."""
    with pytest.raises(kind, match=text):
        call(*arguments, **options)


def test_a_first_map_that_is_refused_leaves_no_process_behind() -> None:
    """Its workers begin to start before its arguments are looked at."""
    outcome = run_python(
        """
import threading, weft

def children():
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return len(file.read().split())

try:
    weft.map(abs, [1, 2], n=0)
except weft.errors.InvalidValue:
    began = children()
weft.shutdown()
print(began, children(), weft.map(abs, [-1, -2], n=2))
"""
    )
    assert outcome.out == "1 0 [1, 2]\n", outcome


def test_a_function_whose_globals_change_is_another() -> None:
    """A map sends the function as it is now, though it sent the same one before."""
    outcome = run_python(
        """
import weft

def scaled(x):
    return x * factor

def plain(x):
    return abs(x)

factor = 2
print(weft.map(scaled, [1, 2]), weft.map(plain, [-1, -2]), weft.map(plain, [-3]))
factor = 3
abs = float
print(weft.map(scaled, [1, 2]), weft.map(plain, [-1, -2]))
"""
    )
    assert outcome.out == "[2, 4] [1, 2] [3]\n[3, 6] [-1.0, -2.0]\n", outcome


def test_a_short_function_that_takes_long_for_once_is_waited_for_asleep() -> None:
    """A driver does not look for an answer again and again."""
    for _ in range(3):
        weft.map(time.sleep, [0.0, 0.0], n=2)
    before = time.process_time()
    weft.map(time.sleep, [1.0, 1.0], n=2)
    assert time.process_time() - before < within(0.1)


def test_little_is_loaded_before_the_first_workers_start() -> None:
    """`weft.map` alone loads neither the session nor the job: both load beside the workers."""
    code = "import sys, weft; weft.map; print(*(name for name in sys.modules if 'weft' in name))"
    loaded = set(run_python(code).out.split())
    assert "weft.engines.registry" in loaded
    assert not loaded & {"weft._api.session", "weft._core.items", "weft.engines.base"}
