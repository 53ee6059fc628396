"""What Playdoh's names refuse: at once, naming the value and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import playdoh
from playdoh import distribute, finished, funworker, shutdown
from weft.errors import InvalidType, InvalidValue, MachineUnavailable, NoSuchPipe
from weft.resources import count_cores


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fun": 3}, InvalidType, r"argument of distribute\(fun\) is 3 of type int"),
        ({"fun": None}, InvalidType, "is None of type NoneType; expected a function"),
        ({"max_cpu": 0}, InvalidValue, r"max_cpu=0\): expected a whole number, 1 or more"),
        ({"max_cpu": -2}, InvalidValue, r"max_cpu=-2\): expected a whole number, 1 or more"),
        ({"max_cpu": 1.5}, InvalidType, r"max_cpu=1\.5\): .* got float"),
        ({"max_cpu": "2"}, InvalidType, r"max_cpu='2'\): .* got str"),
        ({"max_cpu": True}, InvalidType, r"max_cpu=True\): .* got bool"),
        ({"max_gpu": -1}, InvalidValue, r"max_gpu=-1\): expected a whole number, 0 or more"),
        ({"gpu_policy": "gpu"}, InvalidValue, "'gpu'.*'no_gpu', 'prefer_gpu', 'require_all'"),
        ({"gpu_policy": None}, InvalidValue, "None.*'no_gpu', 'prefer_gpu', 'require_all'"),
        ({"shared_data": [1]}, InvalidType, "shared_data is a list; expected a dict"),
        ({"named_pipe": "nobodys"}, NoSuchPipe, "nobody serves the pipe 'nobodys'"),
        ({"named_pipe": "a/b"}, InvalidValue, "named_pipe='a/b': expected a name of letters"),
        ({"named_pipe": ""}, InvalidValue, "named_pipe='': expected a name of letters"),
        ({"named_pipe": 0}, InvalidType, "named_pipe=0: expected True or a name, got int"),
        ({"named_pipe": 5}, InvalidType, "named_pipe=5: expected True or a name, got int"),
        ({"machines": ["host"]}, MachineUnavailable, "no key|cannot take part"),
        ({"machines": ["host"], "port": 2800}, MachineUnavailable, "no key|cannot take part"),
        ({"machines": [("host", 2718)]}, InvalidType, r"machines=\[\('host', 2718\)\]: expected"),
        ({"port": "2718"}, InvalidType, r"distribute\(port='2718'\): expected a whole number"),
        ({"port": 0}, InvalidValue, r"distribute\(port=0\): expected a whole number, 1 or more"),
        ({"port": 65536}, InvalidValue, r"distribute\(port=65536\): expected a port, 1 to 65535"),
    ],
)
def test_distribute_refuses(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """At once, naming the value and what was expected."""
    with pytest.raises(error, match=message):
        distribute(**{"fun": abs, **arguments})


def ragged() -> np.ndarray[Any, Any]:
    rows = np.empty(2, object)
    rows[:] = [[1, 2, 3], [4]]
    return rows


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (3, InvalidType, "'sum', distributed, got a int; expected a list"),
        ("text", InvalidType, "got a str; expected a list"),
        ({1: 2}, InvalidType, "got a dict; expected a list"),
        ({1, 2}, InvalidType, "got a set; expected a list"),
        (iter([1]), InvalidType, "got a list_iterator; expected a list"),
        (np.ones((3, 0)), InvalidValue, r"shape \(3, 0\), which has no columns"),
        (ragged(), InvalidValue, r"a ragged matrix: .* shape \(2,\) with rows of 1, 3 elements"),
    ],
)
def test_a_call_refuses(x: Any, error: type[Exception], message: str) -> None:
    """What is not a list, an array with columns, or None."""
    with pytest.raises(error, match=message):
        distribute(sum)(x)


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (np.sum, "returned a single value; expected one result for each column"),
        (lambda x: x[:, :-1].sum(axis=0), r"shape \(5, 2\) and returned an array of shape \(1,\)"),
        (lambda x: x.sum(axis=1), r"columns 0 to 1 as an array of shape \(5, 2\) and returned"),
        (lambda x: x[: int(x[0, 0]) + 1], "do not fit together"),
    ],
)
def test_results_of_the_wrong_length(fun: Callable[..., Any], message: str) -> None:
    """The error names the columns and the shapes."""
    if count_cores()[0] < 2:
        pytest.skip("with one worker there is one part")
    x = np.arange(20.0).reshape(5, 4)
    with pytest.raises(InvalidValue, match=message):
        distribute(fun, max_cpu=2)(x)


@pytest.mark.parametrize("call", [finished, shutdown])
def test_only_distributed_functions_are_finished(call: Callable[[Any], None]) -> None:
    """Not the function itself."""
    with pytest.raises(InvalidType, match=r"builtin_function_or_method; expected what distribute"):
        call(abs)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_cpu": 0}, InvalidValue, r"funworker\(max_cpu=0\): expected a whole number, 1"),
        ({"max_cpu": "2"}, InvalidType, r"funworker\(max_cpu='2'\)"),
        ({"max_gpu": -1}, InvalidValue, r"funworker\(max_gpu=-1\)"),
        ({"port": "2718"}, InvalidType, r"funworker\(port='2718'\)"),
        ({"port": 70_000}, InvalidValue, r"funworker\(port=70000\): expected a port, 1 to 65535"),
        ({"port": 65_500}, InvalidValue, "port 65500: expected 1 to 65476"),
        ({"port": "a:b"}, InvalidValue, "'a:b': expected HOST:PORT"),
        ({"port": 2.5}, InvalidType, r"funworker\(port=2.5\)"),
        ({"named_pipe": 5}, InvalidType, "named_pipe=5: expected True or a name"),
        ({"named_pipe": "a/b"}, InvalidValue, "named_pipe='a/b': expected a name of letters"),
    ],
)
def test_funworker_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Before it serves anything."""
    with pytest.raises(error, match=message):
        funworker(**arguments)


def both(x: int, y: int = 0) -> int:
    return x + y


@pytest.mark.parametrize("call", [playdoh.map, playdoh.map_async])
def test_map_refuses(call: Callable[..., Any]) -> None:
    """At once, in the spelling that was used."""
    name = call.__name__
    for arguments, options, error, message in (
        ((abs,), {}, InvalidType, rf"{name} got a function and no list"),
        ((abs,), {"cpu": 2}, InvalidType, rf"{name} got a function and no list"),
        ((3, [1]), {}, InvalidType, rf"argument of {name}\(fun, items\) is 3 of type int"),
        ((3, [1], [2]), {"cpu": 1}, InvalidType, rf"of {name}\(fun, items\) is 3 of type int"),
        ((abs, 3), {}, InvalidType, "items of type int"),
        ((max, [1], 3), {"cpu": 1}, InvalidType, "items of type int, which cannot be gone"),
        ((abs, [1]), {"cpu": 0}, InvalidValue, rf"{name}\(cpu=0\)"),
        ((abs, [1]), {"cpu": "2"}, InvalidType, rf"{name}\(cpu='2'\)"),
        ((abs, [1]), {"max_cpu": 0}, InvalidValue, rf"{name}\(max_cpu=0\)"),
        ((abs, [1]), {"cpu": 1, "max_cpu": 2}, InvalidType, r"cpu=1, max_cpu=2\): expected one"),
        ((abs, [1]), {"gpu": -1}, InvalidValue, rf"{name}\(gpu=-1\)"),
        ((abs, [1]), {"machines": ["host"]}, MachineUnavailable, "no key|cannot take part"),
        ((abs, [1]), {"shared_data": 5}, InvalidType, "shared_data is a int; expected a dict"),
        ((abs, [1]), {"codedependencies": "a.py"}, InvalidType, r"codedependencies='a\.py'"),
        ((abs, [1]), {"codedependencies": [1]}, InvalidType, "expected a list of files"),
        ((abs, [1]), {"allocation": 1}, InvalidType, rf"{name}\(allocation=\.\.\.\): resources"),
        ((abs, [1]), {"cpus": 2}, InvalidType, rf"{name}\(cpus=\.\.\.\): .* nearest is cpu="),
        ((both, [1]), {"yy": [2]}, InvalidType, rf"{name}\(yy=\.\.\.\): .* nearest is y="),
        ((both, [1]), {"y": 2}, InvalidType, rf"{name}\(y=2\): expected a list with a value"),
    ):
        with pytest.raises(error, match=message):
            call(*arguments, **options)


def test_keywords_of_distribute_in_other_calls() -> None:
    """They are named; `map` takes them with one list, `map_async` does not."""
    with pytest.raises(InvalidType, match=r"map_async\(verbose=\.\.\.\): map has it"):
        playdoh.map_async(abs, [1], verbose=True)
    with pytest.raises(InvalidType, match=r"map\(verbose\) got 2 lists; expected one"):
        playdoh.map(max, [1], [2], verbose=True)
    with pytest.raises(InvalidType, match=r"map\(cpu=\.\.\.\): .* the nearest is max_cpu="):
        playdoh.map(abs, [1], verbose=True, cpu=2)


def test_the_first_releases_order_in_other_calls() -> None:
    """Of `map` alone, which passes nothing over."""
    with pytest.raises(InvalidType, match=r"map got 11 arguments after the list; expected 10 at"):
        playdoh.map(abs, [1], *[None] * 11)
    with pytest.raises(InvalidType, match="map got 'max_cpu' twice: by its place, and by its name"):
        playdoh.map(abs, [1], None, 2, max_cpu=2)
    with pytest.raises(InvalidType, match=r"map\(cpu=\.\.\.\): .* the nearest is max_cpu="):
        playdoh.map(abs, [1], None, cpu=2)
    with pytest.raises(InvalidType, match=r"map_async got a dict as its second list; .*by name"):
        playdoh.map_async(abs, [1], {"k": 5})
