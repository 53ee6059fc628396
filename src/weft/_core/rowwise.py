"""A function over some rows, in one rank: slice by slice, then as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft._core.outputs import Modes, Partial, join
from weft._core.portions import RowSlice, count, part
from weft.errors import InvalidType, InvalidValue


class Common(NamedTuple):
    """The name of a common argument of the call, in the place where the function gets it."""

    name: str


class Task(NamedTuple):
    """What one rank gets of a call."""

    #: each a RowSlice, a Common, or the value itself
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    rows: int
    slices: int
    #: which outputs are wanted; None: all
    wanted: tuple[Any, ...] | None

    def with_common(self, common: Mapping[str, Any]) -> Task:
        """Return the task with the common arguments in their places."""

        def given(value: Any) -> Any:
            return common[value.name] if isinstance(value, Common) else value

        return self._replace(
            arguments=[given(one) for one in self.arguments],
            keywords={name: given(one) for name, one in self.keywords.items()},
        )


def compute(function: Callable[..., Any], task: Task, modes: Modes) -> Partial:
    """Return the outputs of a function on a rank's task."""
    slices = min(task.slices, max(1, task.rows))
    parts = []
    for index in range(slices):
        arguments = [_taken(one, slices, index) for one in task.arguments]
        keywords = {name: _taken(one, slices, index) for name, one in task.keywords.items()}
        outputs = select(function(*arguments, **keywords), task.wanted)
        parts.append(Partial(outputs, _rows(task, slices, index)))
    return parts[0] if len(parts) == 1 else Partial(join(parts, modes), task.rows)


def _taken(value: Any, slices: int, index: int) -> Any:
    """A value as the function gets it, for one of several slices."""
    if not isinstance(value, RowSlice):
        return value
    return (value if slices == 1 else RowSlice(value.array, part(value.rows, slices, index))).take()


def _rows(task: Task, slices: int, index: int) -> int:
    return task.rows if slices == 1 else count(part(slice(0, task.rows), slices, index))


def select(outputs: Any, wanted: tuple[Any, ...] | None) -> Any:
    """Some of a function's outputs, or of their modes: by position, or by key."""
    if wanted is None:
        return outputs
    if isinstance(outputs, Mapping):
        known: Sequence[Any] = list(outputs)
    elif isinstance(outputs, (tuple, list)):
        known = range(-len(outputs), len(outputs))
    else:
        raise InvalidType(
            f"outputs={list(wanted)!r}: the function has one output, a {type(outputs).__name__}; "
            "expected a tuple, list or dict of several"
        )
    for key in wanted:
        if key not in known:
            expected = known if isinstance(outputs, Mapping) else f"0 to {len(outputs) - 1}"
            raise InvalidValue(f"outputs has {key!r}; the function's outputs are {expected}")
    if isinstance(outputs, Mapping):
        return {key: outputs[key] for key in wanted}
    return [outputs[index] for index in wanted]
