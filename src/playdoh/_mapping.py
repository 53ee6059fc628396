"""`map` and `map_async`, with the keywords of two generations of Playdoh.

without any          the built-in's list, in this process
cpu, gpu, ...        weft.map: the last release's, which takes several lists
max_cpu, ...         the same; and what only `distribute` has goes to that, as in the first one

A dict or None after the list is the first release's shared data, whose other arguments may follow
it in their order.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from playdoh._distributing import DistributedFunction, distribute, some
from playdoh._resources import elsewhere
from weft._api.mapping import (
    MapHandle,
    Options,
    make_map,
    share_of_cores,
    validate_items,
)
from weft._core.arguments import explain_keywords, validate_count, validate_keywords
from weft._core.items import validate_callable
from weft.errors import InvalidType, InvalidValue

#: the keywords of `map` and `map_async`
_KEYWORDS = ("cpu", "gpu", "machines", "shared_data", "codedependencies", "max_cpu")

#: those that only `map` has: what `distribute` takes besides
_OF_DISTRIBUTE = (
    "max_gpu",
    "gpu_policy",
    "named_pipe",
    "port",
    "accept_lists",
    "endaftercall",
    "verbose",
)

#: the order of the first release's arguments after the list
_IN_ORDER = tuple(inspect.signature(distribute).parameters)[1:]

#: those of the last release that are not here
_MISSING = ("allocation", "unit_type", "total_units", "do_redirect")


@explain_keywords
def map(fun: Callable[..., Any], *argss: Iterable[Any], **kwdss: Any) -> Any:
    """Return the results of `fun` on the elements of a list, or of several lists in step.

    >>> import operator, playdoh
    >>> playdoh.map(operator.add, [1, 2], [10, 20], cpu=2)
    [11, 22]
    >>> playdoh.map(pow, [2, 3], exp=[5, 2], cpu=2)
    [32, 9]

    cpu, max_cpu      the most workers; no more than there are CPUs.
    gpu               the most GPUs, one worker for each.
    shared_data       a dict that every call gets: `fun(x, shared_data)`.
    codedependencies  accepted: workers of this machine find the script's modules.
    machines          names of other machines that take part, after `weft open` there and here.
    max_gpu, gpu_policy, named_pipe, port, accept_lists, endaftercall, verbose
                      as in `distribute`, with one list or array.

    Any other keyword is one of the function's: a list with a value for each call. A dict or None
    after a single list is `shared_data`, after which what `distribute` takes may follow in its
    order. Without any of these it is the built-in's list, computed in this process.

    Raises what `weft.map` raises; InvalidType, InvalidValue.
    """
    if "args" in kwdss and not argss:  # as the first release called its list
        argss = (kwdss.pop("args"),)
    if _has_shared_data(argss):
        argss, kwdss = argss[:1], _by_first_order(argss[1:], kwdss)
        return _distributed(fun, argss, kwdss)
    if not kwdss:
        _validate(fun, argss, "map")
        return list(builtins.map(fun, *argss))
    if _is_for_distribute(argss, kwdss):
        return _distributed(fun, argss, kwdss)
    return make_map("map", *_prepare(fun, argss, kwdss, "map")).run()


@explain_keywords
def map_async(fun: Callable[..., Any], *argss: Iterable[Any], **kwdss: Any) -> JobRun:
    """Start a `map` in processes and return a handle at once. It takes the same keywords, but for
    those that only `distribute` has.

    >>> import playdoh
    >>> playdoh.map_async(abs, [-1, -2], cpu=2).get_result()
    [1, 2]
    """
    for name in kwdss.keys() & set(_OF_DISTRIBUTE):
        raise InvalidType(f"map_async({name}=...): map has it, and distribute; map_async has not")
    if _has_shared_data(argss):
        raise InvalidType(
            f"map_async got a {type(argss[1]).__name__} as its second list; expected a list, or "
            "the shared data by name: map_async(fun, items, shared_data={...})"
        )
    return JobRun(make_map("map_async", *_prepare(fun, argss, kwdss, "map_async")))


class JobRun(MapHandle):
    """A map that runs in the background: what `map_async` returns. Besides Playdoh's methods it has
    weft's: `status`, `progress`, `wait`, `results`, `cancel`."""

    def get_status(self) -> list[str]:
        """Return a word for each call: "finished", or "processing", "crashed", "killed" for those
        without a result, as the whole map runs, has failed, or was cancelled."""
        ended = set(self._order)
        words = {"failed": "crashed", "cancelled": "killed"}
        rest = words.get(self.status, "processing")
        count, total = self.progress
        calls = range(count if total is None else total)
        return ["finished" if index in ended else rest for index in calls]

    @explain_keywords
    def get_results(self, ids: Sequence[int] | None = None) -> list[Any]:
        """Wait for the results and return them in order, or those of these indexes. Raises what
        `map` raises, and InvalidValue for an index that no call has."""
        results = self.wait()
        if ids is None:
            return results
        found = dict(enumerate(results))
        for one in ids:
            if one not in found:
                raise InvalidValue(
                    f"get_results(ids={ids!r}): expected indexes of 0 to {len(results) - 1}, got "
                    f"{one!r}"
                )
        return [found[one] for one in ids]

    def get_result(self) -> list[Any]:
        """Wait for all results and return them in order. Raises what `map` raises."""
        return self.get_results()

    def get_info(self) -> dict[str, Any]:
        """Return how far it is, without waiting: its status, how many calls have finished, and how
        many there are, None while that is unknown."""
        count, total = self.progress
        return {"status": self.status, "finished": count, "total": total}


def _is_for_distribute(argss: Sequence[Any], kwdss: Mapping[str, Any]) -> bool:
    """Return whether a call is one of the first release, whose `map` was `distribute` and a call:
    by a keyword that only those had, or an array, which `distribute` splits along its last axis."""
    if kwdss.keys() & set(_OF_DISTRIBUTE):
        return True
    if "max_cpu" not in kwdss or len(argss) != 1:
        return False
    return argss[0] is None or type(argss[0]).__name__ == "ndarray"


def _has_shared_data(argss: Sequence[Any]) -> bool:
    """Return whether the second positional argument is the first release's shared data."""
    return len(argss) > 1 and (argss[1] is None or isinstance(argss[1], Mapping))


def _by_first_order(values: Sequence[Any], kwdss: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first release's arguments by their names. Raises InvalidType for too many, or one
    that was given twice."""
    if len(values) > len(_IN_ORDER):
        raise InvalidType(
            f"map got {len(values)} arguments after the list; expected {len(_IN_ORDER)} at most: "
            + ", ".join(_IN_ORDER)
        )
    found = dict(zip(_IN_ORDER, values, strict=False))
    for name in found.keys() & kwdss.keys():
        raise InvalidType(f"map got {name!r} twice: by its place, and by its name")
    return {**found, **kwdss}


def _distributed(fun: Callable[..., Any], argss: Sequence[Any], kwdss: Mapping[str, Any]) -> Any:
    options = ("shared_data", "max_cpu", "machines", *_OF_DISTRIBUTE)
    validate_keywords(kwdss, options, "map")
    if len(argss) != 1:
        names = ", ".join(sorted(kwdss))
        raise InvalidType(
            f"map({names}) got {len(argss)} lists; expected one, as distribute takes; for several "
            "write map(fun, list, list, cpu=2)"
        )
    return DistributedFunction(fun, **kwdss)(argss[0])


def _prepare(
    fun: Callable[..., Any], argss: Sequence[Any], kwdss: dict[str, Any], where: str
) -> tuple[Callable[..., Any], list[Any], Options]:
    """Return the function, its lists, and weft's options. Raises InvalidType, InvalidValue."""
    own = {name: values for name, values in kwdss.items() if name not in _KEYWORDS}
    for name in own.keys() & set(_MISSING):
        raise InvalidType(
            f"{where}({name}=...): resources are not allocated here; say how many workers:\n"
            f"    {where}(fun, items, cpu=2)"
        )
    _validate_own(fun, own, where)
    _validate(fun, (*argss, *own.values()), where)
    _validate_dependencies(kwdss.get("codedependencies"), where)
    gpu = kwdss.get("gpu")
    if gpu is not None:
        validate_count(gpu, where, "gpu", least=0)
    options = Options(
        max_cpu=_workers(kwdss, where),
        gpus=gpu,
        machines=elsewhere(kwdss.get("machines", [])),
        shared_data=some(kwdss.get("shared_data")),
    )
    function = _by_name(fun, len(argss), tuple(own)) if own else fun
    return function, [*argss, *own.values()], options


def _validate(fun: object, lists: Sequence[object], where: str) -> None:
    validate_callable(fun, f"{where}(fun, items)")
    if not lists:
        raise InvalidType(f"{where} got a function and no list; expected {where}(fun, list, ...)")
    for one in lists:
        validate_items(one, where)


def _validate_own(fun: Callable[..., Any], own: Mapping[str, Any], where: str) -> None:
    """Raise InvalidType for a keyword that is neither Playdoh's nor the function's, or no list."""
    _validate_names(fun, own, where)
    for name, values in own.items():
        if not isinstance(values, Iterable):
            raise InvalidType(
                f"{where}({name}={values!r}): expected a list with a value for each call"
            )


def _validate_names(fun: Callable[..., Any], own: Mapping[str, Any], where: str) -> None:
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [one.name for one in parameters.values() if one.kind in kinds]
        validate_keywords(own, list(dict.fromkeys([*_KEYWORDS, *_OF_DISTRIBUTE, *names])), where)


def _validate_dependencies(paths: object, where: str) -> None:
    if paths is None:
        return
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) for path in paths):
        raise InvalidType(
            f"{where}(codedependencies={paths!r}): expected a list of files, for example "
            "codedependencies=['module.py']"
        )


def _workers(kwdss: Mapping[str, Any], where: str) -> int | None:
    """Return the number of workers: no more than there are CPUs."""
    given = [name for name in ("cpu", "max_cpu") if kwdss.get(name) is not None]
    if len(given) > 1:
        raise InvalidType(
            f"{where}(cpu={kwdss['cpu']!r}, max_cpu={kwdss['max_cpu']!r}): expected one of them, "
            "as they mean the same"
        )
    counts = [validate_count(kwdss[name], where, name, least=1) for name in given]
    return min(counts[0], share_of_cores()) if counts else None


def _by_name(
    fun: Callable[..., Any], positional: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    """Return a function whose arguments after so many have these names in `fun`."""

    @wraps(fun)  # with its parameters, by which weft gives it shared data
    def call(*values: Any, **options: Any) -> Any:
        end = positional + len(names)
        named = dict(zip(names, values[positional:end], strict=True))
        return fun(*values[:positional], *values[end:], **named, **options)

    return call
