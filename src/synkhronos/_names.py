"""Names of arguments: other spellings, those of February 2017, and the nearest one to a wrong one.

Two generations of Synkhronos call the same things by other names, in another order. What is written
here in code is the later one; the earlier one is translated into it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from weft._core.arguments import explain_keywords
from weft.errors import InvalidType, InvalidValue

Result = TypeVar("Result")

#: the defaults of `collect_modes` and `reduce_ops`
REDUCED_BY_AVERAGE = ("reduce", "avg")


def also(
    *,
    early: Sequence[str] = (),
    is_early: Callable[[Sequence[Any]], bool] | None = None,
    **spellings: str,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Make a function take arguments by other names: `also(vars="shared_vars")`.

    `early` is the order of its arguments in February 2017, and `is_early` says whether those given
    by position are in that. By default they are where functions come second: one, or a list of
    these. A wrong keyword is told with the nearest one that exists.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        name = function.__qualname__

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Result:
            if is_early(arguments) if is_early else _has_functions(arguments, early):
                keywords = _by_name(arguments, early, keywords, name)
                arguments = ()
            for spelling in spellings.keys() & keywords.keys():
                if spellings[spelling] in keywords:
                    raise InvalidType(
                        f"{name} got {spellings[spelling]!r} twice: as {spelling!r} too, which is "
                        "another name for it"
                    )
                keywords[spellings[spelling]] = keywords.pop(spelling)
            return function(*arguments, **keywords)

        others = [
            inspect.Parameter(spelling, inspect.Parameter.KEYWORD_ONLY, default=None)
            for spelling in spellings
        ]
        signature = inspect.signature(function)
        parameters = [*signature.parameters.values(), *others]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return explain_keywords(call)

    return decorate


def _by_name(
    arguments: Sequence[Any], names: Sequence[str], keywords: dict[str, Any], where: str
) -> dict[str, Any]:
    """Return a call's arguments by their names. Raises InvalidType for too many, or one twice."""
    if len(arguments) > len(names):
        raise InvalidType(
            f"{where} got {len(arguments)} arguments; expected {len(names)} at most, in the order "
            f"of February 2017: {', '.join(names)}"
        )
    found = dict(zip(names, arguments, strict=False))
    for one in found.keys() & keywords.keys():
        raise InvalidType(f"{where} got {one!r} twice: by its place, and by its name")
    return {**found, **keywords}


def _has_functions(arguments: Sequence[Any], early: Sequence[str]) -> bool:
    if len(arguments) < 2 or not early:
        return False
    second = arguments[1]
    if second is None:  # reduce(s, None, "sum"); the later `broadcast` has values=None there
        return len(early) > 2
    several = second if isinstance(second, (list, tuple)) else [second]
    return bool(several) and all(hasattr(one, "output_modes") for one in several)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name that is most like a wrong one, in words for the end of an error."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest name is {found[0]!r}" if found else ""


def are_modes(value: Any) -> bool:
    """Return whether a positional argument of `function` is February's: a mode, or a list of modes,
    in the place of inputs or updates."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(one is None or isinstance(one, str) for one in value)
    return isinstance(value, str)


def are_variables(value: Any) -> bool:
    """Return whether a positional argument of `function` is February's: a list of inputs, in the
    place of substitutions or of shared variables."""
    if not isinstance(value, (list, tuple)):
        return False
    return all(hasattr(one, "owner") and not hasattr(one, "get_value") for one in value)


def modes_of(collect_modes: Any, reduce_ops: Any, count: int) -> list[Any]:
    """Return the modes of so many outputs, by February's two arguments: "reduce", "gather" or None,
    and of what is reduced the operation; each one for all outputs, or a list."""
    collected = _one_each(collect_modes, count, "collect_modes")
    operations = _one_each(reduce_ops, count, "reduce_ops")
    return [_mode(*pair) for pair in zip(collected, operations, strict=True)]


def _one_each(given: Any, count: int, option: str) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise InvalidValue(
            f"{option} has {len(given)} entries for {count} outputs; expected one each, or one for "
            "all"
        )
    return list(given)


def _mode(collect: Any, operation: Any) -> Any:
    if collect == "reduce":
        return operation
    if collect not in ("gather", None):
        raise InvalidValue(
            f"collect_modes has {collect!r}; expected 'reduce', 'gather' or None, and operations "
            "such as 'sum' in reduce_ops"
        )
    return collect


def are_split(inputs: Sequence[Any], whole: Any, split: Any) -> list[bool]:
    """Return which inputs are split, by February's `broadcast_inputs` or `scatter_inputs`: some of
    the inputs, as variables or by name. Those in neither are the other kind."""
    if whole is None and split is None:
        return [True] * len(inputs)
    if whole is not None and split is not None:
        raise InvalidValue(
            "broadcast_inputs and scatter_inputs were both given; expected one: the other inputs "
            "are of the other kind"
        )
    option, chosen = ("broadcast_inputs", whole) if split is None else ("scatter_inputs", split)
    if not isinstance(chosen, (list, tuple)):
        raise InvalidType(f"{option}={chosen!r}: expected a list of some of the inputs")
    places = {_place(one, inputs, option) for one in chosen}
    return [(at in places) == (split is not None) for at in range(len(inputs))]


def _place(chosen: Any, inputs: Sequence[Any], option: str) -> int:
    for at, given in enumerate(inputs):
        one = getattr(given, "variable", given)
        if chosen in (given, one) or (isinstance(chosen, str) and one.name == chosen):
            return at
    raise InvalidValue(
        f"{option} has {chosen}, which is none of the inputs {list(inputs)}; inputs that are given "
        "besides, and go whole to every rank, are those of bcast_inputs=[...]"
    )
