"""Seed 004 and Playdoh's names: its programs run as they are, and do what they say."""

from __future__ import annotations

import functools
import operator
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distfun
import playdoh
import weft
from playdoh import (
    DistributedFunction,
    distribute,
    finished,
    get_cpu_count,
    get_gpu_count,
    shutdown,
)
from tests.gpus import require_any_names
from tests.support import (
    HANGS,
    Outcome,
    launch,
    run_command,
    run_python,
    wait_until,
    write_script,
)
from weft.errors import AlreadyFinished, InvalidType, InvalidValue, NoSuchPipe, Refused
from weft.resources import count_cores

PROGRAMS = Path(__file__).parent / "programs"
WEFT = (sys.executable, "-m", "weft")
GUARD = 'if __name__ == "__main__":'
#: the code blocks of seed 004, and what they print
BLOCKS = {
    "playdoh_lists": "0.5 0.3333333333333333\n",
    "playdoh_matrix": "[5. 5. 5. 5.]\n",
    "playdoh_usage": "done\n",
    "playdoh_shared_data": "done\n",
}
#: what the examples of its releases did
RELEASES = "playdoh_releases"


def text_of(name: str) -> str:
    return (PROGRAMS / f"{name}.py").read_text()


def run_script(text: str, **environment: str) -> Outcome:
    """`python script.py`"""
    return run_command([sys.executable, str(write_script(text))], env=environment)


# programs


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_the_document(name: str) -> None:
    """It is a program that ends well, with the results that the document promises."""
    outcome = run_script(text_of(name))
    assert (outcome.code, outcome.out, outcome.err) == (0, BLOCKS[name], "")


@pytest.mark.parametrize("name", [name for name in BLOCKS if GUARD in text_of(name)])
def test_a_block_without_its_guard(name: str) -> None:
    """Workers do not run the script again."""
    text = text_of(name)
    assert GUARD in text
    outcome = run_script(text.replace(GUARD, "if True:"))
    assert (outcome.code, outcome.out, outcome.err) == (0, BLOCKS[name], "")


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_with_the_other_import(name: str) -> None:
    """`playdoh` and `distfun` are the same."""
    here, there = "from playdoh import *", "from distfun import *"
    text = text_of(name)
    assert (here in text) != (there in text)
    old, new = (here, there) if here in text else (there, here)
    outcome = run_script(text.replace(old, new))
    assert (outcome.code, outcome.out, outcome.err) == (0, BLOCKS[name], "")


@pytest.mark.parametrize("launcher", ["python", "weft run", "mpirun"])
def test_the_examples_of_the_releases(launcher: str) -> None:
    """Alone, and in each of two ranks, with the blocks of the document after them."""
    paths = [str(PROGRAMS / f"{name}.py") for name in (RELEASES, *BLOCKS)]
    runner = PROGRAMS / "in_turn.py"
    if launcher == "python":
        outcome = run_command([sys.executable, *paths[:1]])
        assert (outcome.code, outcome.out, outcome.err) == (0, "done\n", "")
        return
    outcome = launch(runner, 2, *paths, env={"PYTHONPATH": str(PROGRAMS)}, launcher=launcher)
    assert outcome.code == 0, outcome
    assert outcome.out.count("done: ") == 2 * len(paths), outcome


@pytest.mark.parametrize("cores", ["1", "3"])
def test_the_blocks_on_other_machines(cores: str) -> None:
    """With one core, and with more workers than columns or items can use."""
    for name in ("playdoh_lists", "playdoh_matrix"):
        # a cap, as max_cpu is; where there are fewer cores it does nothing
        outcome = run_script(text_of(name), WEFT_CORES=cores)
        assert (outcome.code, outcome.out) == (0, BLOCKS[name]), outcome


def test_the_second_call_says_what_to_do() -> None:
    """The line to write is in the traceback that ends the script."""
    text = text_of("playdoh_matrix") + "    dfun(x)\n"
    outcome = run_script(text)
    assert outcome.code == 1
    assert outcome.out == BLOCKS["playdoh_matrix"]
    assert "AlreadyFinished: the distributed function 'fun'" in outcome.err
    assert outcome.err.endswith("    dfun = distribute(fun, endaftercall=False)\n")


def test_an_error_in_a_function_ends_the_script() -> None:
    """With its own class, and the worker's traceback with the line of the script."""
    outcome = run_script(
        "from playdoh import *\ndef fun(x):\n    return 1 / x\ndistribute(fun)([1, 0])\n"
    )
    assert outcome.code == 1
    assert outcome.err.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "raised in item 1, worker" in outcome.err
    assert "line 3, in fun" in outcome.err


# names


@pytest.mark.parametrize("package", ["playdoh", "distfun"])
def test_the_names_that_a_star_gives(package: str) -> None:
    """Exactly these, `map` among them: without Playdoh's keywords it is the built-in's list."""
    outcome = run_python(
        f"""
import builtins
before = set(globals())
from {package} import *
print(sorted(set(globals()) - before - {{"before"}}), map is builtins.map)
seen = []
map(seen.append, [1, 2])
print(map(int, "12"), map(max, [1, 5], iter([3])), seen)
print(map(lambda x: x * x, [1, 2], cpu=2), map(abs, [-1], max_cpu=1))
"""
    )
    names = [
        "CANUSEGPU",
        "DEFAULT_PORT",
        "DistributedFunction",
        "JobRun",
        "MAXCPU",
        "MAXGPU",
        "distribute",
        "finished",
        "funworker",
        "get_cpu_count",
        "get_gpu_count",
        "map",
        "map_async",
        "shutdown",
    ]
    assert outcome.out == f"{names} False\n[1, 2] [3] [1, 2]\n[1, 4] [1]\n", outcome


def test_both_packages_are_one() -> None:
    """The same objects, under both names; a distributed function is one of weft's too."""
    for name in distfun.__all__:
        assert getattr(distfun, name) is getattr(playdoh, name)
    assert issubclass(DistributedFunction, weft.DistributedFunction)
    assert isinstance(distribute(abs), DistributedFunction)
    assert issubclass(playdoh.JobRun, weft.MapHandle)
    objects = [getattr(playdoh, name) for name in playdoh.__all__]
    assert all(one.__doc__ for one in objects if callable(one))
    assert get_cpu_count() == playdoh.MAXCPU == count_cores()[0]
    assert get_gpu_count() == playdoh.MAXGPU
    assert (get_gpu_count() > 0, 2718) == (playdoh.CANUSEGPU, playdoh.DEFAULT_PORT)


@pytest.mark.parametrize("make", [distribute, DistributedFunction])
def test_the_arguments_of_distribute(make: Callable[..., Any]) -> None:
    """Each by its name; the class takes them as the function does."""
    results = [
        make(fun=abs)([-1]),
        make(abs, shared_data=None, machines=[], named_pipe=None, port=None)([-1]),
        make(abs, max_cpu=2, max_gpu=1, gpu_policy="no_gpu")([-1]),
        make(lambda xs: [1 for _ in xs], accept_lists=True)([-1]),
        make(abs, machines=["localhost", platform.node()], named_pipe=False)([-1]),
        make(abs, machines="localhost")([-1]),
        make(abs, port=2718)([-1]),
        make(abs, machines=["localhost"], port=2719)([-1]),
    ]
    assert results == [[1]] * 8
    assert make(lambda x, shared_data: x + shared_data["k"], {"k": 2})([-1]) == [1]
    dfun = make(abs, endaftercall=False, verbose=False)
    assert (dfun([-1]), dfun([-2])) == ([1], [2])
    finished(dfun)


def test_empty_shared_data_are_none() -> None:
    """The function gets the item alone: of `distribute`, `map` and `map_async`."""
    assert distribute(abs, shared_data={})([-1]) == [1]
    assert playdoh.map(abs, [-1], shared_data={}) == [1]
    assert playdoh.map(abs, [-1], shared_data={}, verbose=False) == [1]
    assert playdoh.map_async(abs, [-1], shared_data={}).get_result() == [1]
    with pytest.raises(InvalidType, match="shared_data is a list"):
        distribute(abs, shared_data=[])  # type: ignore[arg-type]


def test_without_an_argument_and_with_an_array_without_axes() -> None:
    """Once in each worker; what an array without axes gives is joined as other arrays are."""
    workers = min(2, count_cores()[0])
    assert distribute(lambda: "called", max_cpu=2)() == ["called"] * workers
    assert distribute(lambda x: x, max_cpu=2)() == [None] * workers
    joined = distribute(lambda x: np.full((2, 3), x is None), max_cpu=2)(np.array(5.0))
    assert joined.tolist() == [[True] * 3 * workers] * 2
    assert distribute(lambda: 7, max_cpu=2)(np.array(5.0)).tolist() == [7] * workers


def test_all_arguments_by_position() -> None:
    """As a program of 2010 may have passed them."""
    dfun = distribute(
        lambda xs, data: [x + data["k"] for x in xs],
        {"k": 5},
        2,
        1,
        "no_gpu",
        [],
        None,
        None,
        True,
        False,
        False,
    )
    assert dfun([1, 2, 3]) == [6, 7, 8]
    assert dfun([4]) == [9]
    finished(dfun)


# what a distributed function does


def test_lists_of_any_size() -> None:
    """One result for each element, in order; tuples and ranges are lists too."""
    dfun = distribute(lambda x: x * 2, endaftercall=False)
    for size in (0, 1, 2, 3, 100):
        assert dfun(list(range(size))) == [2 * n for n in range(size)]
    assert dfun((1, "a")) == [2, "aa"]
    assert dfun(range(3)) == [0, 2, 4]
    finished(dfun)


@pytest.mark.parametrize("shape", [(5, 1), (5, 4), (3, 7), (9,), (2, 3, 8)])
def test_arrays_of_any_shape(shape: tuple[int, ...]) -> None:
    """`dfun(x)` is `fun(x)`."""
    x = np.random.default_rng(0).normal(size=shape)
    elementwise = distribute(np.exp, endaftercall=False)
    assert np.array_equal(elementwise(x), np.exp(x))
    finished(elementwise)
    doubled = distribute(lambda x: np.stack([x, 2 * x]))(x)
    assert np.array_equal(doubled, np.stack([x, 2 * x]))


def test_none_calls_once_in_each_worker() -> None:
    """With None where the function takes an argument, without where it does not."""
    dfun = distribute(lambda x: (os.getpid(), x), max_cpu=2)
    answers = dfun(None)
    assert len({pid for pid, _ in answers}) == len(answers) == min(2, count_cores()[0])
    assert {x for _, x in answers} == {None}
    assert set(distribute(lambda: "called", max_cpu=2)(None)) == {"called"}


def test_accept_lists() -> None:
    """Each worker gets its share as one list, and returns a list."""
    shares = distribute(lambda xs: [(len(xs), x) for x in xs], max_cpu=2, accept_lists=True)
    found = shares(list(range(7)))
    assert [x for _, x in found] == list(range(7))
    assert {size for size, _ in found} == ({3, 4} if count_cores()[0] > 1 else {7})
    with pytest.raises(InvalidValue, match="with accept_lists expected a list of"):
        distribute(sum, accept_lists=True)([1, 2, 3])


def test_shared_data_is_seen_and_not_written() -> None:
    """Arrays of any dtype are mapped, not copied; who writes to one gets an error."""

    def look(x: str, shared_data: dict[str, Any]) -> tuple[str, float, bool]:
        array = shared_data[x]
        return str(array.dtype), float(np.sum(array)), array.flags.writeable

    data: dict[str, Any] = {
        kind: np.ones(20_000, kind) for kind in ("float64", "float32", "int8", "uint16", "bool")
    }
    expected = [(kind, 20_000.0, False) for kind in data]
    assert distribute(look, data)(list(data)) == expected

    def write(x: int, shared_data: dict[str, Any]) -> None:
        shared_data["float64"][x] = 2

    with pytest.raises(ValueError, match="read-only"):
        distribute(write, data)([1])
    assert data["float64"].sum() == 20_000
    assert data["float64"].flags.writeable, "it is still the caller's own"


def test_finished_and_shutdown() -> None:
    """Both may be called twice, also after the only call; later calls say what to do."""
    dfun = distribute(abs, endaftercall=False)
    (pid,) = distribute(lambda _: os.getpid(), max_cpu=1)([0])
    assert dfun([-1]) == [1]
    finished(dfun)
    finished(dfun)
    assert os.path.exists(f"/proc/{pid}"), "workers stay for the next function"
    with pytest.raises(AlreadyFinished, match=r"'abs' has been finished; make a new one"):
        dfun([1])
    dfun = distribute(abs)
    assert dfun([-2]) == [2]
    shutdown(dfun)
    shutdown(dfun)
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(AlreadyFinished, match=r"distribute\(fun, endaftercall=False\)"):
        dfun([1])
    assert distribute(abs)([-3]) == [3], "new workers are started"


def test_a_method_does_what_the_function_of_its_name_does() -> None:
    """`dfun.finished()` and `dfun.shutdown()`."""
    dfun = distribute(abs, endaftercall=False)
    (pid,) = distribute(lambda _: os.getpid(), max_cpu=1)([0])
    dfun.finished()
    with pytest.raises(AlreadyFinished, match="has been finished"):
        dfun([1])
    assert os.path.exists(f"/proc/{pid}")
    distribute(abs).shutdown()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_refused_argument_does_not_use_up_the_call() -> None:
    """A function that ends after its first call has not been called yet."""
    dfun = distribute(abs)
    with pytest.raises(InvalidType):
        dfun(3)
    assert dfun([-3]) == [3]


def test_more_cpus_than_there_are() -> None:
    """max_cpu is a cap: it has no effect beyond the cores."""
    assert len(distribute(lambda: 0, max_cpu=1000)(None)) == count_cores()[0]
    assert len(distribute(lambda: 0, max_cpu=1)(None)) == 1


def test_verbose_tells_who_ran_what(capfd: pytest.CaptureFixture[str]) -> None:
    """On stderr, so that results that are printed stay clean."""
    assert distribute(abs, verbose=True)([-1, -2]) == [1, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search("ran items? 0( to 1)? of 'abs'", err)
    assert "2/2" in err, "a bar"


# GPUs: two that the environment names; nothing is computed on them


def ask(use_gpu: bool) -> tuple[bool, str | None]:
    return use_gpu, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("policy", "most", "answers"),
    [
        ("prefer_gpu", None, [(True, "GPU-a"), (True, "GPU-b")]),
        ("require_all", None, [(True, "GPU-a"), (True, "GPU-b")]),
        ("prefer_gpu", 1, [(True, "GPU-a")]),
        ("prefer_gpu", 8, [(True, "GPU-a"), (True, "GPU-b")]),
        ("prefer_gpu", 0, [(False, "GPU-a,GPU-b")]),
        ("no_gpu", None, [(False, "GPU-a,GPU-b")]),
    ],
)
def test_gpu_policies(
    policy: str,
    most: int | None,
    answers: list[tuple[bool, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One worker for each GPU, which sees this one; or workers on CPUs, told so."""
    require_any_names()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    found = distribute(ask, max_cpu=1, max_gpu=most, gpu_policy=policy)(None)
    assert sorted(found) == answers
    if policy != "no_gpu":
        mapped = playdoh.map(lambda _, use_gpu: ask(use_gpu), [0] * 8, cpu=1, gpu=most or 0)
        assert set(mapped) <= set(answers) if most else {(False, "GPU-a,GPU-b")}


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both policies fall back on CPUs, and the function is told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for policy in ("prefer_gpu", "require_all"):
        assert distribute(ask, max_cpu=1, gpu_policy=policy)(None) == [(False, "")]


# workers behind a named pipe


def pipe_command(command: str, pipe: str, environment: dict[str, str]) -> Outcome:
    return run_command([*WEFT, command, "--pipe", pipe], env=environment)


def test_a_named_pipe_from_one_script_after_another() -> None:
    """`finished` leaves its workers to the next script, `shutdown` ends them for everybody."""
    pipe, environment = f"playdoh-{os.getpid()}", {"WEFT_KEY": "a key of this test's"}
    script = (
        "import os\n"
        "from playdoh import *\n"
        f"dfun = distribute(lambda x: x * os.getppid(), named_pipe={pipe!r})\n"
        "print(dfun([1])[0])\n"
        "ENDING(dfun)\n"
    )
    opened = pipe_command("open", pipe, environment)
    try:
        assert opened.code == 0, opened
        servers = set()
        for ending in ("finished", "shutdown"):
            outcome = run_script(script.replace("ENDING", ending), **environment)
            assert outcome.code == 0, outcome
            servers.add(outcome.out)
        assert len(servers) == 1, "both had workers of the same server"
        outcome = run_script(script.replace("ENDING", "finished"), **environment)
        assert f"NoSuchPipe: nobody serves the pipe '{pipe}'" in outcome.err, outcome
        assert f"weft open --pipe {pipe}" in outcome.err
    finally:
        pipe_command("close", pipe, environment)


def test_a_named_pipe_with_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not the key of the one who opened it is not let in."""
    pipe, environment = f"playdoh-key-{os.getpid()}", {"WEFT_KEY": "a key of this test's"}
    try:
        assert pipe_command("open", pipe, environment).code == 0
        monkeypatch.setenv("WEFT_KEY", "another")
        with pytest.raises(Refused, match=f"'{pipe}' did not let this process in.*another key"):
            distribute(abs, named_pipe=pipe)
    finally:
        assert pipe_command("close", pipe, environment).code == 0


# a script that serves workers


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a pipe that nobody serves yet."""
    monkeypatch.setenv("WEFT_KEY", "a key of this test's")
    return f"playdoh-worker-{os.getpid()}"


def start_funworker(arguments: str) -> subprocess.Popen[str]:
    """A script that calls `funworker`, and has said that it serves."""
    text = f"from playdoh import *\nfunworker({arguments})\nprint('it has returned')\n"
    worker = subprocess.Popen(
        [sys.executable, str(write_script(text))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    line = worker.stdout.readline()
    assert line.startswith("playdoh: waiting for scripts of this machine: distribute(fun, named_")
    return worker


def test_funworker_serves_until_shutdown(pipe: str) -> None:
    """One script after another, with as many workers as it allows; then it returns."""
    worker = start_funworker(f"port=None, named_pipe={pipe!r}, max_cpu=1, max_gpu=None")
    try:
        servers = set()
        for ending in (finished, finished, shutdown):
            dfun = distribute(os.getppid, named_pipe=pipe, endaftercall=False)
            (server,) = dfun()
            servers.add(server)
            ending(dfun)
        assert len(servers) == 1
        out, err = worker.communicate(timeout=HANGS)
        assert (worker.returncode, out, err) == (0, "it has returned\n", "")
        with pytest.raises(NoSuchPipe):
            distribute(abs, named_pipe=pipe)
    finally:
        worker.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_funworker_takes_its_workers_along(pipe: str, number: int) -> None:
    """However its script ends, nobody serves the pipe any more."""
    worker = start_funworker(f"1, None, {pipe!r}")
    try:
        again = run_python(f"import playdoh; playdoh.funworker(named_pipe={pipe!r})")
        assert f"LaunchError: the pipe {pipe!r} is served already" in again.err, again
        dfun = distribute(os.getpid, named_pipe=pipe, endaftercall=False)
        (pid,) = dfun()
        worker.send_signal(number)
        _, err = worker.communicate(timeout=HANGS)
        assert worker.returncode != 0
        assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT), err
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        wait_until(lambda: pipe not in run_command([*WEFT, "status"]).out)
        with pytest.raises(NoSuchPipe):
            distribute(abs, named_pipe=pipe)
    finally:
        worker.kill()


def test_what_has_no_effect_in_funworker(pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cap of GPUs, where there are more, and its port: it says so. `weft close` ends it too."""
    require_any_names()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    worker = start_funworker(f"max_gpu=1, named_pipe={pipe!r}, port=2718")
    try:
        assert f"{pipe}: pid " in run_command([*WEFT, "status"]).out
        closed = run_command([*WEFT, "close", "--pipe", pipe])
        assert closed.code == 0, closed
        out, err = worker.communicate(timeout=HANGS)
        assert (worker.returncode, out) == (0, "it has returned\n")
        assert "RuntimeWarning: funworker(max_gpu=1) has no effect: each script says how" in err
        assert "distribute(fun, max_gpu=1)" in err
        assert "RuntimeWarning: funworker(port=2718) has no effect: with named_pipe=" in err
    finally:
        worker.kill()


# the later spelling


def test_map_without_keywords_is_the_built_ins_list() -> None:
    """In this process, up to the end of the shortest; exceptions are the function's own."""
    seen: list[int] = []
    assert playdoh.map(seen.append, [1, 2]) == [None, None]
    assert seen == [1, 2]
    assert playdoh.map(max, [1, 5, 7], (3, 4), iter([2, 9])) == [3, 9]
    assert playdoh.map(str, "ab") == ["a", "b"]
    assert playdoh.map(abs, []) == []
    with pytest.raises(ZeroDivisionError):
        playdoh.map(lambda x: 1 / x, [1, 0])
    pids = playdoh.map(lambda _: os.getpid(), [0, 1], cpu=2)
    assert os.getpid() not in pids, "with a keyword it uses processes"


def test_map_with_the_keywords_of_both_generations() -> None:
    """`cpu` and `max_cpu`, both capped; `codedependencies`, `machines`; what distribute takes."""
    for options in (
        {"cpu": 2},
        {"cpu": 1000},
        {"max_cpu": 2},
        {"max_cpu": 1000},
        {"cpu": None},
        {"gpu": 0},
        {"machines": []},
        {"machines": "localhost"},
        {"machines": ["127.0.0.1", ("localhost", 2718)]},
        {"codedependencies": ["module.py"]},
        {"codedependencies": []},
        {"accept_lists": False, "verbose": False},
        {"max_gpu": 0, "gpu_policy": "prefer_gpu"},
        {"named_pipe": None, "port": None, "endaftercall": True},
    ):
        assert playdoh.map(abs, [-1, -2], **options) == [1, 2], options
        assert playdoh.map(fun=abs, args=[-1, -2], **options) == [1, 2], options
    assert playdoh.map(sorted, [2, 1], accept_lists=True, max_cpu=1) == [1, 2]
    matrix = np.arange(12.0).reshape(3, 4)
    assert playdoh.map(np.exp, matrix, max_cpu=2).tolist() == np.exp(matrix).tolist()
    assert len(playdoh.map(lambda row: row.sum(), matrix, cpu=2)) == 3
    for options in ({"cpu": 2}, {"max_cpu": 2}):
        handle = playdoh.map_async(abs, [-1, -2], codedependencies=["module.py"], **options)
        assert handle.get_results() == [1, 2]


def test_map_in_the_order_of_the_first_release() -> None:
    """Its shared data, a dict or None, came after the list, and then the rest of `distribute`."""

    def add(x: int, shared_data: dict[str, int]) -> int:
        return x + shared_data["k"]

    def add_all(xs: list[int], shared_data: dict[str, int]) -> list[int]:
        return [add(x, shared_data) for x in xs]

    data = {"k": 5}
    rest: list[Any] = [None, "no_gpu", [], None, None]
    assert playdoh.map(add, [1, 2], data) == [6, 7]
    assert playdoh.map(add, [1, 2], data, 2) == [6, 7]
    assert playdoh.map(add, [1, 2], data, max_cpu=2) == [6, 7]
    assert playdoh.map(add, [1, 2], data, 2, *rest, False, True, False) == [6, 7]
    assert playdoh.map(add_all, [1, 2], data, 2, *rest, True) == [6, 7]
    assert playdoh.map(abs, [-1, -2], None, 2) == [1, 2]
    assert playdoh.map(abs, [-1, -2], {}) == [1, 2]
    matrix = np.arange(12.0).reshape(3, 4)
    assert playdoh.map(lambda x: x.sum(axis=0), matrix, None, 2).tolist() == [12, 15, 18, 21]
    assert playdoh.map(lambda: 7, None, max_cpu=1) == playdoh.map(lambda: 7, None, None, 1) == [7]


def test_the_functions_own_keywords_are_lists() -> None:
    """One value of each for a call, beside lists by position and shared data."""

    def area(width: float, height: float = 1, *, scale: float = 1) -> float:
        return width * height * scale

    assert playdoh.map(area, [1, 2], height=[3, 4], cpu=2) == [3, 8]
    assert playdoh.map(area, [1, 2], scale=iter([10, 100])) == [10, 200]
    assert playdoh.map(area, width=[1, 2], height=[3, 4], cpu=1) == [3, 8]
    assert playdoh.map_async(area, [1, 2], [1, 1], scale=[5, 5]).get_result() == [5, 10]

    def shift(x: int, y: int, shared_data: dict[str, int]) -> int:
        return x - y + shared_data["by"]

    for options in ({"y": [1, 1]}, {"y": (1, 1), "cpu": 2}):
        assert playdoh.map(shift, [5, 6], shared_data={"by": 10}, **options) == [14, 15]
    assert playdoh.map(lambda x, d, y: x - y + d["by"], [5], y=[1], shared_data={"by": 3}) == [7]


def test_map_on_one_list_and_on_several() -> None:
    """Of several lists, one element of each."""
    assert playdoh.map(abs, [-1, -2, -3], cpu=2) == [1, 2, 3]
    assert playdoh.map(operator.add, [1, 2], [10, 20], cpu=2) == [11, 22]
    assert playdoh.map(max, [1, 5, 7], (3, 4), iter([2, 9]), cpu=2) == [3, 9]
    assert playdoh.map(functools.partial(pow, mod=7), range(3), range(3), cpu=2) == [1, 1, 4]
    assert playdoh.map(operator.add, [], [], cpu=2) == []


def test_map_with_shared_data() -> None:
    """After the elements, whatever the parameter is called; or by name."""
    data = {"weights": np.arange(50_000.0)}
    total = data["weights"].sum()
    assert playdoh.map(lambda x, d: x + d["weights"].sum(), [1], shared_data=data) == [1 + total]
    functions: list[Callable[..., Any]] = [
        lambda x, y, data: x * y + data["weights"].sum(),
        lambda x, y, *, shared_data: x * y + shared_data["weights"].sum(),
    ]
    for fun in functions:
        assert playdoh.map(fun, [1, 2], [3, 4], shared_data=data) == [3 + total, 8 + total]


def test_map_async() -> None:
    """A handle with a status and results."""
    handle = playdoh.map_async(operator.mul, [1, 2, 3], [4, 5, 6], cpu=2)
    assert sorted(handle.results()) == [(0, 4), (1, 10), (2, 18)]
    assert handle.wait() == [4, 10, 18]
    assert (handle.status, handle.progress) == ("finished", (3, 3))
    assert handle.get_result() == handle.get_results() == [4, 10, 18]
    assert handle.get_results([2, 0]) == handle.get_results(ids=[2, 0]) == [18, 4]
    assert handle.get_status() == ["finished"] * 3
    assert handle.get_info() == {"status": "finished", "finished": 3, "total": 3}
    assert repr(handle) == "<JobRun, finished, 3 of 3 items>"
    with pytest.raises(InvalidValue, match=r"ids=\[1, 3\]\): expected indexes of 0 to 2, got 3"):
        handle.get_results([1, 3])


def test_the_status_of_a_run(tmp_path: Path) -> None:
    """A word for each call, while it runs, after a failure, and when it was cancelled."""
    go = tmp_path / "go"

    def wait_for_it(x: int) -> int:
        while x > 0 and not go.exists():
            time.sleep(0.005)
        return x

    handle = playdoh.map_async(wait_for_it, [0, 1], cpu=2)
    if count_cores()[0] > 1:
        wait_until(lambda: handle.get_info()["finished"] == 1)
        assert handle.get_status() == ["finished", "processing"]
        assert handle.get_info() == {"status": "running", "finished": 1, "total": 2}
    handle.cancel()
    assert handle.get_status()[1] == "killed"
    go.touch()
    assert playdoh.map_async(wait_for_it, iter([0, 1])).get_result() == [0, 1]
    handle = playdoh.map_async(lambda x: 1 / x, [0], cpu=1)
    with pytest.raises(ZeroDivisionError):
        handle.get_result()
    assert handle.get_status() == ["crashed"]
    assert handle.get_info()["status"] == "failed"
