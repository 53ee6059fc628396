"""`distribute`."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.gpus import require_any_names
from tests.support import marked_processes, run_script, wait_until
from weft._api import mapping
from weft.engines.local.memory import blocks
from weft.errors import (
    AlreadyFinished,
    InvalidType,
    InvalidValue,
    MachineUnavailable,
    WeftError,
)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with four, so that tests do the same everywhere."""
    monkeypatch.setattr(mapping, "share_of_cores", lambda: 4)


def test_a_list_gives_the_list_of_results(four_cores: None) -> None:
    """In order, from lists, tuples and ranges, also empty and short ones; on at most `max_cpu`
    workers, and more than there are cores is no error."""
    for most in (1, 3, 1000, None):
        distributed = weft.distribute(lambda x: x * x, max_cpu=most)
        for items in ([], [3], [3, 1, 2], (1, 2), range(50)):
            assert distributed(items) == [x * x for x in items]
    assert repr(distributed) == "<DistributedFunction '<lambda>' on 4 workers>"
    named = weft.distribute(abs, max_cpu=3)
    assert repr(named) == "<DistributedFunction 'abs' on 3 workers>"


def matrices() -> list[np.ndarray[Any, Any]]:
    values = np.random.default_rng(1).normal(size=(6, 5, 37))
    return [
        values[0, 0],
        values[0],
        values,
        np.asfortranarray(values),
        values[::2, :, ::-3],
        values.transpose(2, 1, 0),
        values[0].astype(np.float32),
        values[..., :1],
        values[..., :2],
        values[..., :3],
        (values * 100).astype(np.int16),
        np.array([1, "a", None, 2.5], dtype=object)[:, None].repeat(3, axis=1),
        np.random.default_rng(2).normal(size=(20, 3000)),
    ]


def test_an_array_is_split_and_pasted(four_cores: None) -> None:
    """Of any shape and order, on any number of workers: the same bits for elementwise functions,
    equal to rounding for others, and results may have any leading axes."""

    def elementwise(x: Any) -> Any:
        return x * 2 if x.dtype == object else np.sqrt(np.abs(x)) * x + 1

    def adds_axes(x: Any) -> Any:
        return np.stack([x, x])[:, None]

    for workers in (1, 2, 4):
        for function in (elementwise, adds_axes):
            distributed = weft.distribute(function, max_cpu=workers)
            for array in matrices():
                if array.dtype == object and function is elementwise:
                    continue
                found, expected = distributed(array), function(array)
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert found.tolist() == expected.tolist()
    matrix = np.random.default_rng(3).normal(size=(8, 20))
    product = weft.distribute(lambda x: matrix @ x, max_cpu=3)
    assert np.allclose(product(matrices()[-1]), matrix @ matrices()[-1], rtol=1e-12)
    total = weft.distribute(lambda x: x.sum(axis=0), max_cpu=3)
    assert total(np.ones((5, 7))).tolist() == [5.0] * 7


def test_parts_are_views_of_at_least_two_columns(four_cores: None) -> None:
    """As even as can be, with the strides of the whole; an array is not copied for each worker."""
    seen = weft.distribute(lambda x: np.full(x.shape[-1], x.shape[-1]))(np.zeros((2, 10)))
    assert seen.tolist() == [3] * 6 + [2] * 4
    strides = weft.distribute(lambda x: np.full(x.shape[-1], x.strides[0]))(np.zeros((2, 10)))
    assert strides.tolist() == [80] * 10
    few = weft.distribute(lambda x: np.full(x.shape[-1], x.shape[-1]))(np.zeros((2, 5)))
    assert few.tolist() == [3, 3, 3, 2, 2]


def test_none_calls_once_in_every_worker(four_cores: None) -> None:
    """A function without a parameter is called without; with one it gets None; shared data and
    `use_gpu` do not count as one."""
    found = weft.distribute(lambda: (os.getpid(), time.sleep(0.01))[0], max_cpu=3)(None)
    assert len(set(found)) == 3
    assert os.getpid() not in found
    assert weft.distribute(lambda x: x, max_cpu=2)(None) == [None, None]
    data = {"a": 5}
    assert weft.distribute(lambda d: d["a"], shared_data=data, max_cpu=2)(None) == [5, 5]
    both = weft.distribute(lambda x, d: (x, d["a"]), shared_data=data, max_cpu=1)
    assert both(None) == [(None, 5)]
    assert weft.distribute(lambda use_gpu: use_gpu, max_cpu=2)(None) == [False, False]


def test_accept_lists_gives_each_worker_its_share(four_cores: None) -> None:
    """The function is called once per worker with a list; the lists of results are joined."""

    def function(items: list[int]) -> list[Any]:
        assert isinstance(items, list)
        return [(x, len(items)) for x in items]

    distributed = weft.distribute(function, accept_lists=True, max_cpu=3)
    assert distributed(range(7)) == [(0, 3), (1, 3), (2, 3), (3, 2), (4, 2), (5, 2), (6, 2)]
    assert distributed([1]) == [(1, 1)]
    assert distributed([]) == []
    wrong = weft.distribute(lambda items: items[1:], accept_lists=True, max_cpu=2)
    with pytest.raises(InvalidValue, match=r"list of items 0 to 1 and returned 1; .* of 2 results"):
        wrong([1, 2, 3, 4])
    wrong = weft.distribute(lambda items: 7, accept_lists=True, max_cpu=1)
    with pytest.raises(InvalidValue, match=r"items 0 to 0 and returned int; with accept_lists"):
        wrong([1])


def test_a_seed_holds_for_any_number_of_workers(four_cores: None) -> None:
    """Lists and matrices give the same numbers with 1, 2 and 4 workers, and in a second call."""

    def noise(x: Any) -> Any:
        return x + np.random.rand(x.shape[-1])

    matrix = np.zeros((2, 100))
    listed = [weft.distribute(lambda _: random.random(), seed=1, max_cpu=n) for n in (1, 2, 4)]
    assert listed[0](range(9)) == listed[0](range(9)) == listed[1](range(9)) == listed[2](range(9))
    found = [weft.distribute(noise, seed=1, max_cpu=n)(matrix) for n in (1, 2, 4)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    assert len(np.unique(found[0])) == 100
    assert not np.array_equal(found[0], weft.distribute(noise, seed=2, max_cpu=2)(matrix))


def test_a_second_function_has_the_same_warm_workers() -> None:
    """Also after `finished` and a `with`; `shutdown` of one ends the workers, and the next call
    starts others."""

    def pids() -> set[int]:
        with weft.distribute(os.getpid, max_cpu=2) as distributed:
            return set(distributed(None))

    first = pids()
    assert pids() == first
    distributed = weft.distribute(lambda x: x, max_cpu=2)
    distributed([1])
    distributed.finished()
    assert pids() == first
    distributed = weft.distribute(lambda x: x, max_cpu=2)
    distributed.shutdown()
    wait_until(lambda: not marked_processes())
    assert pids().isdisjoint(first)


def test_an_ended_function_says_what_to_do() -> None:
    """A second call after endaftercall, after `finished`, after its `with`; each by name, with the
    line that helps. A call that was refused is no call."""
    once = weft.distribute(abs, max_cpu=1, endaftercall=True)
    with pytest.raises(InvalidType):
        once(5)
    assert once([-1]) == [1]
    with pytest.raises(AlreadyFinished, match=r"'abs' has been called.*\n.*endaftercall=False\)"):
        once([-1])
    with weft.distribute(abs, max_cpu=1) as often:
        assert often([-1]) == often([-1]) == [1]
    with pytest.raises(AlreadyFinished, match=r"'abs' has been finished; make a new one:\n"):
        often([-1])
    often.finished()
    failing = weft.distribute(lambda x: 1 // x, max_cpu=1, endaftercall=True)
    with pytest.raises(ZeroDivisionError):
        failing([0])
    with pytest.raises(AlreadyFinished):
        failing([1])


def test_finished_gives_shared_data_back() -> None:
    """While the function can be called its arrays are there once; afterwards nowhere."""

    def kept() -> int:
        gc.collect()
        server = blocks._here.server
        with server._lock:
            server._free_dropped()
            return len(server._entries)

    before = kept()
    data = {"a": np.ones(100_000), "b": np.ones(5)}
    distributed = weft.distribute(lambda x, d: d["a"].sum() + x, shared_data=data, max_cpu=2)
    assert distributed([1, 2]) == [100_001, 100_002]
    assert kept() == before + 2
    data["a"][0] = 9
    assert distributed([1]) == [100_001]
    distributed.finished()
    del distributed
    wait_until(lambda: kept() == before)


def test_verbose_tells_who_ran_what(capsys: pytest.CaptureFixture[str]) -> None:
    """Worker, items, time and bytes, a line each, not mixed with the bar."""
    large = np.ones(100_000)
    weft.distribute(lambda x: time.sleep(0.01) or x, max_cpu=2, verbose=True)([large, 1, 2])
    text = capsys.readouterr().err.replace("\r", "\n")  # the bar goes back to draw itself anew
    lines = re.findall(
        r"^weft: worker \d+ \(pid \d+\) ran item \d of '<lambda>' in \d.* ms; .* there, .* back$",
        text,
        re.MULTILINE,
    )
    assert len(lines) == 3, text
    assert any("ran item 0 of" in line and line.count("800,") == 2 for line in lines), text
    assert "3/3" in text
    weft.distribute(lambda x: x, max_cpu=2, progress="label")([1, 2])
    assert re.search(r"label: 100%.*2/2", capsys.readouterr().err)
    weft.distribute(lambda x: x, max_cpu=2)([1, 2])
    assert capsys.readouterr().err == ""


def test_a_function_may_distribute_within_its_share(four_cores: None) -> None:
    """A worker's own workers are as many as its part of the cores, and end with it."""

    def inner(x: int) -> Any:
        distributed = weft.distribute(lambda y: (os.getpid(), x * y))
        values = [value for _, value in distributed([1, 2, 3])]
        return values, repr(distributed), os.environ["WEFT_CORES"]

    found = weft.distribute(inner, max_cpu=4)(range(3))
    share = weft.resources.count_cores()[0] // 4 or 1
    for x, (values, text, cores) in enumerate(found):
        assert values == [x, 2 * x, 3 * x]
        assert text.endswith(f"on {share} workers>")
        assert int(cores) == share
    weft.shutdown()
    wait_until(lambda: not marked_processes())


def test_workers_do_not_fight_for_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its part of the cores for BLAS, also when the next call has another number of
    workers; a number that the user has set wins."""

    def threads() -> Any:
        import threadpoolctl

        np.ones((4, 4)) @ np.ones((4, 4))
        return {one["num_threads"] for one in threadpoolctl.threadpool_info()}

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = weft.resources.count_cores()[0]
    for n in (1, 2, 1):
        found = weft.distribute(threads, max_cpu=n)(None)
        assert found == [{max(1, cores // n)}] * min(n, cores)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        for n, wanted in ((1, 1), (cores, cores)):  # less than its part, and more
            weft.shutdown()
            with monkeypatch.context() as patch:
                patch.setenv(name, str(wanted))
                assert weft.distribute(threads, max_cpu=n)(None) == [{wanted}] * n


def test_each_gpu_worker_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrowed from the user's own; `max_gpu` is a cap; without GPUs, or without asking for them,
    the work is done by CPUs and functions are told so."""

    require_any_names()

    def seen(use_gpu: bool) -> Any:
        return use_gpu, os.environ.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    for policy in ("prefer_gpu", "require_all"):
        found = weft.distribute(seen, gpu_policy=policy, max_gpu=5)(None)
        assert sorted(found) == [(True, "GPU-a"), (True, "GPU-b")]
    assert weft.distribute(seen, gpu_policy="prefer_gpu", max_gpu=1)(None) == [(True, "GPU-a")]
    assert weft.distribute(seen, max_cpu=1)(None) == [(False, "GPU-a,GPU-b")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = weft.distribute(seen, gpu_policy="prefer_gpu", max_cpu=1)(None)
    assert [use_gpu for use_gpu, _ in found] == [False]


SCRIPT = """
import os, sys
import numpy as np
import weft
import beside

factor = 2

def scaled(x):
    return x * factor

distributed = weft.distribute(scaled, max_cpu=2)
print(distributed([1, 2]), weft.map(scaled, [1, 2], n=2))
factor = 10
print(distributed([1, 2]), weft.map(scaled, [1, 2], n=2))
print(weft.map(beside.function, [1, 2], n=2), weft.map(lambda x: beside.VALUE + x, [1], n=2))
os.makedirs("inner", exist_ok=True)
os.chdir("inner")
open("file", "w").write("found")
print(weft.map(lambda x: open("file").read(), [1], n=2), weft.map(lambda _: os.getcwd(), [1], n=2)
      == [os.getcwd()])
print(weft.map(lambda x: __name__, [1], n=1), distributed(np.ones(4)).tolist())
"""


def test_a_script_needs_no_main_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs twice; modules beside it and the folder it has changed to are there.
    `map` sees a global as it is at the call, `distribute` as it was when it was built."""
    (tmp_path / "beside.py").write_text("VALUE = 7\ndef function(x):\n    return x + VALUE\n")
    monkeypatch.chdir(tmp_path)
    outcome = run_script(SCRIPT)
    assert outcome.out.splitlines() == [
        "[2, 4] [2, 4]",
        "[2, 4] [10, 20]",
        "[8, 9] [8]",
        "['found'] True",
        "['__main__'] [2.0, 2.0, 2.0, 2.0]",
    ], outcome
    assert outcome.err == ""


# what makes no sense

WRONG: list[tuple[dict[str, Any], type[WeftError], str]] = [
    ({"fun": 3}, InvalidType, r"of distribute\(fun\) is 3 of type int; expected a function"),
    ({"max_cpu": 0}, InvalidValue, r"distribute\(max_cpu=0\): expected a whole number, 1 or more"),
    ({"max_cpu": -4}, InvalidValue, r"max_cpu=-4\): expected a whole number, 1 or more"),
    ({"max_cpu": 1.5}, InvalidType, r"max_cpu=1\.5\): expected a whole number.*got float"),
    ({"max_cpu": "2"}, InvalidType, r"max_cpu='2'\): expected a whole number.*got str"),
    ({"max_cpu": True}, InvalidType, r"max_cpu=True\): expected a whole number.*got bool"),
    ({"max_gpu": -1}, InvalidValue, r"distribute\(max_gpu=-1\): expected a whole number"),
    (
        {"gpu_policy": "all"},
        InvalidValue,
        r"gpu_policy='all'\): expected one of 'no_gpu', 'prefer_gpu', 'require_all'",
    ),
    ({"gpu_policy": None}, InvalidValue, r"gpu_policy=None\): expected one of 'no_gpu'"),
    ({"shared_data": [1]}, InvalidType, r"shared_data is a list; expected a dict, for example"),
    ({"shared_data": np.ones(2)}, InvalidType, r"shared_data is a ndarray; expected a dict"),
    ({"machines": ["a"]}, MachineUnavailable, "no key|cannot take part"),
    ({"machines": "bob"}, InvalidType, r"machines='bob': expected a list of names"),
    ({"machines": [""]}, InvalidValue, r"expected names of machines, got an empty one"),
    ({"machines": ["a"], "named_pipe": True}, InvalidValue, "a pipe serves this machine alone"),
    ({"port": 2718}, InvalidValue, r"(?s)port=2718 without machines=.* machines=\['bob', 'jim'\]"),
    (
        {"retries": -1},
        InvalidValue,
        r"distribute\(retries=-1\): expected a whole number, 0 or more",
    ),
    ({"seed": 1.0}, InvalidType, r"distribute\(seed=1\.0\): expected a whole number, got float"),
    ({"progress": 1}, InvalidType, r"progress=1: expected True, False, or a label"),
    ({"named_pipe": "no one serves this"}, InvalidValue, r"named_pipe='no one serves this': exp"),
    ({"named_pipe": 3}, InvalidType, r"named_pipe=3: expected True or a name, got int"),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG, ids=[str(one[0]) for one in WRONG])
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], kind: type[WeftError], text: str
) -> None:
    """When the function is distributed, by name and value, with what was expected."""
    options = dict(options)
    fun = options.pop("fun", abs)
    with pytest.raises(kind, match=text):
        weft.distribute(fun, **options)


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        (5, InvalidType, r"'abs', distributed, got a int; expected a list .* an array .* or None"),
        ("text", InvalidType, r"got a str; expected a list"),
        ({1: 2}, InvalidType, r"got a dict; expected a list"),
        (iter([1]), InvalidType, r"got a list_iterator; expected a list"),
        (np.float64(3), InvalidType, r"got a float64; expected a list"),
        (np.array(3), InvalidType, r"without axes, array\(3\); expected a list, or an array"),
        (np.zeros((3, 0)), InvalidValue, r"shape \(3, 0\), which has no columns; expected one"),
        (
            np.array([[1, 2], [3]], dtype=object),
            InvalidValue,
            r"ragged matrix: .* shape \(2,\) with rows of 1, 2 elements; expected rows of one",
        ),
    ],
    ids=lambda value: None,
)
def test_arguments_that_make_no_sense_are_refused(x: Any, kind: type[WeftError], text: str) -> None:
    """At the call, without a worker; the function can be called again."""
    with pytest.raises(kind, match=text):
        weft.distribute(abs)(x)
    assert not marked_processes()


def test_results_of_the_wrong_length_are_refused(four_cores: None) -> None:
    """The message names the columns, the shape that the function got, and what it returned."""
    matrix = np.zeros((3, 10))
    with pytest.raises(
        InvalidValue,
        match=r"columns 0 to 4 as an array of shape \(3, 5\) and returned a single value; exp",
    ):
        weft.distribute(lambda x: x.sum(), max_cpu=2)(matrix)
    with pytest.raises(InvalidValue, match=r"returned an array of shape \(3,\); .* last axis of 5"):
        weft.distribute(lambda x: x.sum(axis=1), max_cpu=2)(matrix)
    uneven = weft.distribute(lambda x: np.zeros((x.shape[-1], x.shape[-1])), max_cpu=4)
    with pytest.raises(InvalidValue, match=r"do not fit together: .*\(3, 3\) for columns 0 to 2, "):
        uneven(matrix)


def test_failures_come_out_as_of_map() -> None:
    """An exception keeps its class, with the worker's traceback as its cause."""
    with pytest.raises(ZeroDivisionError) as caught:
        weft.distribute(lambda x: 1 // x, max_cpu=2)([1, 1, 0, 1])
    assert caught.value.__cause__.item == 2  # type: ignore[union-attr]
    with pytest.raises(StopIteration):
        weft.distribute(lambda x: next(iter(x)), max_cpu=1)([[]])
    assert sys.exc_info() == (None, None, None)
