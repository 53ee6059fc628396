"""A function on a rank's rows, and the outputs of all ranks joined.

    driver                    each rank                                   driver
    a Task for each rank ->   compute: the function, slice by slice  ->   join: one result

A mode says what an output of the function is, and so how outputs for different rows are joined:

    mean             a mean over rows: weighted by the number of rows
    sum, prod        a sum or product over rows
    min, max         the smallest or largest of all rows
    gather           one row for each row: joined along the first axis
    None             anything: the driver's own is kept

Outputs may be arrays and numbers, or tuples, lists and dicts of them, nested as you like. A list
that is gathered is a list of rows. First tasks and `compute`, then `join`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from weft._core.arithmetic import BFLOAT16, NUMERIC, combine
from weft._core.partition import RowSlice, RowSlices, over_leaves, parts_of
from weft.adapters import lookup
from weft.errors import InvalidType, InvalidValue

#: what an output may be joined by
MODES = ("mean", "sum", "prod", "min", "max", "gather", None)

#: a mode for all outputs, or a list, tuple or dict of modes
Modes = Any


class Common(NamedTuple):
    """A placeholder for an argument that all ranks get, by its name."""

    name: str


class Task(NamedTuple):
    """Describe what one rank gets of a call."""

    #: each a RowSlice or RowSlices, a Common, or the value itself
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    rows: int
    slices: int
    #: which outputs are wanted, by position or key; None: all
    wanted: tuple[Any, ...] | None

    def with_common(self, common: Mapping[str, Any]) -> Task:
        """Return the task with the common arguments in place of their placeholders."""

        def fill(value: Any) -> Any:
            return common[value.name] if isinstance(value, Common) else value

        return self._replace(
            arguments=[fill(value) for value in self.arguments],
            keywords={name: fill(value) for name, value in self.keywords.items()},
        )

    def with_own_rows(self) -> Task:
        """Return the task with copies of its rows, which the function may change."""

        def own(value: Any) -> Any:
            taken = value.take() if isinstance(value, (RowSlice, RowSlices)) else value
            return taken if taken is value else over_leaves(taken, _copied)

        return self._replace(
            arguments=[own(value) for value in self.arguments],
            keywords={name: own(value) for name, value in self.keywords.items()},
        )


def _copied(rows: Any) -> Any:
    """Return rows of a list as copies; those of arrays, chosen by indexes, are copies already."""
    return rows if lookup.of(rows) is not None else copy.deepcopy(rows)


class Partial(NamedTuple):
    """The outputs of a function on some rows."""

    outputs: Any
    rows: int


def compute(
    function: Callable[..., Any],
    task: Task,
    modes: Modes,
    divide: Callable[[int, int], Iterable[tuple[int, int]]] = parts_of,
) -> Partial:
    """Call a function on the rows of a task, slice by slice. Return its outputs, joined. `divide`
    says where the slices of so many rows begin and end."""
    slices = min(task.slices, max(1, task.rows))
    if slices == 1:
        return Partial(_call(function, task, None), task.rows)
    parts = [
        Partial(_call(function, task, borders), borders[1] - borders[0])
        for borders in divide(task.rows, slices)
    ]
    return Partial(join(parts, modes), task.rows)


def _call(function: Callable[..., Any], task: Task, borders: tuple[int, int] | None) -> Any:
    """Return the wanted outputs of the function on a task's rows, or on those between borders."""

    def argument(value: Any) -> Any:
        if not isinstance(value, (RowSlice, RowSlices)):
            return value
        return (value if borders is None else value.between(*borders)).take()

    arguments = [argument(value) for value in task.arguments]
    keywords = {name: argument(value) for name, value in task.keywords.items()}
    return select(function(*arguments, **keywords), task.wanted)


def select(outputs: Any, wanted: tuple[Any, ...] | None) -> Any:
    """Return some of a function's outputs, or of their modes, by position or by key.

    Raises InvalidType if there is only one, InvalidValue for one that does not exist.
    """
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


def validate_modes(modes: Modes) -> None:
    """Raise InvalidValue unless this is a mode, or a sequence or dict of modes."""
    if isinstance(modes, (list, tuple)):
        each: Sequence[Any] = modes
    elif isinstance(modes, Mapping):
        each = list(modes.values())
    else:
        each = [modes]
    for mode in each:
        if isinstance(mode, (list, tuple, Mapping)):
            validate_modes(mode)
        elif mode not in MODES:
            known = ", ".join(map(repr, MODES))
            raise InvalidValue(f"collect={mode!r}: expected one of {known}")


def join(parts: Sequence[Partial], modes: Modes, name: str = "the output") -> Any:
    """Join the outputs for different rows by their modes. Errors call them `name`.

    Raises InvalidType and InvalidValue for outputs that cannot be joined so.
    """
    if isinstance(modes, (list, tuple, Mapping)):
        return _join_each(parts, modes, name)
    first = parts[0].outputs
    if modes is None:
        return first
    if isinstance(first, Mapping):
        return {key: join(_pick(parts, key, name), modes, f"{name}[{key!r}]") for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and modes != "gather"):
        values = [join(_pick(parts, i, name), modes, f"{name}[{i}]") for i in range(len(first))]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    return _join_leaf(parts, modes, name)


def _join_each(parts: Sequence[Partial], modes: Modes, name: str) -> Any:
    """Join each output by its own mode."""
    first = parts[0].outputs
    keyed = isinstance(modes, Mapping)
    fits = isinstance(first, Mapping) if keyed else isinstance(first, (tuple, list))
    if not fits or len(first) != len(modes) or (keyed and set(first) != set(modes)):
        raise InvalidValue(
            f"collect has modes for {len(modes)} outputs, {list(modes)}; the function returned "
            f"{_shape_of(first)}"
        )
    keys = list(modes) if keyed else list(range(len(modes)))
    values = [join(_pick(parts, key, name), modes[key], f"{name}[{key!r}]") for key in keys]
    if keyed:
        return dict(zip(keys, values, strict=True))
    return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)


def _pick(parts: Sequence[Partial], key: Any, name: str) -> list[Partial]:
    """Return one output of each part. Raise InvalidValue unless all parts have the same outputs."""
    first = parts[0].outputs
    for part in parts:
        alike = type(part.outputs) is type(first) and len(part.outputs) == len(first)
        if not alike or (isinstance(first, Mapping) and key not in part.outputs):
            raise InvalidValue(
                f"{name} is {_shape_of(first)} for some rows and {_shape_of(part.outputs)} for "
                "others; expected the same outputs for all"
            )
    return [Partial(part.outputs[key], part.rows) for part in parts]


def _join_leaf(parts: Sequence[Partial], mode: str, name: str) -> Any:
    values = [part.outputs for part in parts]
    if all(value is None for value in values):
        return None  # as many pytrees have it
    if mode == "gather":
        return _gathered(values, name)
    if mode in ("sum", "prod") and set(map(type, values)) in ({int}, {float}):
        # not as arrays: ints may have any width, and for floats what follows would take longer than
        # the call; in order, as arrays are combined
        return reduce(operator.add if mode == "sum" else operator.mul, values)
    adapter = _adapter_of(values, mode, name)
    device = _common_device(values)
    arrays, element = _viewed(values, mode, name)
    _validate_alike(arrays, name, mode)
    if len(arrays) == 1 and (mode != "mean" or parts[0].rows == 0):
        return _placed(adapter.deliver(arrays[0].copy(), element), device)
    weighted = mode == "mean" and any(part.rows for part in parts)
    weights = [float(part.rows) for part in parts] if weighted else None
    if mode == "mean" and arrays[0].dtype.kind in "biu" and element != BFLOAT16:
        arrays, element = [array.astype(np.float64) for array in arrays], "float64"
    out = np.empty_like(arrays[0])
    combine(arrays, out, mode, element, weights)
    return _placed(_delivered(adapter, out, element), device)


def _common_device(values: Sequence[Any]) -> Any:
    """Return the device on which all values are, if they are tensors on one, else None."""
    devices = {getattr(value, "device", None) if _is_tensor(value) else None for value in values}
    return devices.pop() if len(devices) == 1 else None


def _is_tensor(value: Any) -> bool:
    return bool(getattr(lookup.of(value), "NAME", "") == "torch")


def _placed(tensor: Any, device: Any) -> Any:
    return tensor if device is None or device.type == "cpu" else tensor.to(device)


def _gathered(values: Sequence[Any], name: str) -> Any:
    if all(isinstance(value, list) for value in values):
        return [row for value in values for row in value]
    if all(isinstance(value, np.ndarray) for value in values):
        return _concatenated(values, name)  # of any dtype
    adapter = _adapter_of(values, "gather", name)
    arrays, element = _viewed(values, "gather", name)
    joined = _concatenated(arrays, name)
    if arrays[0].ndim == 0:
        return joined
    return _placed(adapter.deliver(joined, element), _common_device(values))


def _adapter_of(values: Sequence[Any], mode: str, name: str) -> Any:
    """Return the adapter of the first value. Raise InvalidType unless all are arrays or numbers."""
    for value in values:
        if lookup.of_array_or_number(value) is None:
            raise InvalidType(
                f"{name} is a {type(value).__name__}, which collect={mode!r} cannot combine; "
                "expected arrays or numbers; collect=None keeps the driver's own"
            )
    return lookup.of_array_or_number(values[0])


def _viewed(values: Sequence[Any], mode: str, name: str) -> tuple[list[Any], str]:
    """Return all values as NumPy arrays of one dtype, and the kind of number in them."""
    views = [_adapter_of([value], mode, name).view(value) for value in values]
    arrays = [array for array, _ in views]
    elements = {element for _, element in views}
    if len(elements) == 1:
        return arrays, elements.pop()
    if BFLOAT16 in elements or any(array.dtype.kind not in NUMERIC for array in arrays):
        raise InvalidType(
            f"{name} has dtype {' and '.join(sorted(elements))} for different rows; expected one"
        )
    common = np.result_type(*arrays)
    return [array.astype(common) for array in arrays], common.name


def _concatenated(arrays: Sequence[Any], name: str) -> Any:
    try:
        return np.concatenate([np.atleast_1d(array) for array in arrays])
    except ValueError:
        raise _shapes_error(arrays, name, "needs rows of one shape") from None


def _delivered(adapter: Any, array: Any, element: str) -> Any:
    try:
        return adapter.deliver(array, element)
    except InvalidType:  # JAX without 64 bits, whose own means of integers are float32 too
        return adapter.deliver(array.astype(np.float32), "float32")


def _validate_alike(arrays: Sequence[Any], name: str, mode: str) -> None:
    if arrays[0].dtype.kind not in NUMERIC:
        raise InvalidType(
            f"{name} has dtype {arrays[0].dtype}, which collect={mode!r} cannot combine; expected "
            "numbers"
        )
    if len({array.shape for array in arrays}) > 1:
        raise _shapes_error(
            arrays,
            name,
            f"collect={mode!r} needs one shape: a value over all rows. For one row per row use "
            "collect='gather'",
        )


def _shapes_error(arrays: Sequence[Any], name: str, expected: str) -> InvalidValue:
    shapes = ", ".join(map(str, sorted({np.shape(array) for array in arrays})))
    return InvalidValue(
        f"{name} has other shapes in some parts than in others: {shapes}; {expected}"
    )


def _shape_of(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a dict with {list(outputs)}"
    if isinstance(outputs, (tuple, list)):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"a {type(outputs).__name__}"


def mode_of(modes: Modes, key: Any) -> Modes:
    """Return the mode of one of several outputs."""
    return modes[key] if isinstance(modes, (list, tuple, Mapping)) else modes
