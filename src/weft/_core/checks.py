"""Whether a function's mode is right: the whole compared with its combined parts, on a few rows.

    sample         a few rows of a batch, and two uneven parts of them
    isolate        a copy of the function that shares nothing it could change with the program
    compare        the outputs of the parts, joined by the modes, beside those of the whole; of a
                   function that gives other numbers each time, in several trials

The rows are computed in the driver, so nothing is compared but what the modes say.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft._core import pickling
from weft._core.arithmetic import BFLOAT16, NUMERIC, widen
from weft._core.functions import MODES, Modes, Partial, join, mode_of
from weft._core.partition import count
from weft._core.shared import SharedArray
from weft.adapters import lookup
from weft.errors import InvalidValue

#: how many rows are computed
_FEW = 8


def sample(rows: slice | np.ndarray[Any, Any]) -> tuple[Any, list[Any]]:
    """Return a few of these rows, spread over all, and two parts of them.

    >>> sample(slice(10, 12))
    (array([10, 11]), [array([10]), array([11])])
    """
    positions = np.linspace(0, count(rows) - 1, few(rows)).astype(np.intp)
    chosen = positions + rows.start if isinstance(rows, slice) else rows[positions]
    first = max(1, 3 * len(chosen) // _FEW)
    return chosen, [chosen[:first], chosen[first:]]


def few(rows: slice | np.ndarray[Any, Any]) -> int:
    """Return how many of these rows are computed."""
    return min(_FEW, count(rows))


def isolate(value: Any, shared: Sequence[Any] = ()) -> Any:
    """Return a copy of a function, with all that it uses but the objects in `shared`. Its arrays
    are not copied but read-only: to write to one raises an error. Raises what pickling raises."""
    objects = {id(part): part for part in shared}

    class Pickler(pickling.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            return id(part) if id(part) in objects else None

        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, SharedArray):  # a pickle of it would show what is written
                return part.view(np.ndarray).__reduce_ex__(5)
            reduced = super().reducer_override(part)
            if isinstance(part, type) and isinstance(reduced, tuple) and len(reduced) == 6:
                make, (*arguments, _, extra), *rest = reduced
                return make, (*arguments, None, extra), *rest
            return reduced

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, identity: int) -> Any:
            return objects[identity]

    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    Pickler(file, 5, buffers.append).dump(value)
    file.seek(0)
    return Unpickler(file, buffers=[buffer.raw().toreadonly() for buffer in buffers]).load()


class Difference(NamedTuple):
    """An output that its mode does not describe."""

    name: str
    mode: str
    #: what the function returned for all rows, and what its parts come to
    whole: Any
    joined: Any
    #: the modes that fit
    fitting: list[str]


class Comparison(NamedTuple):
    """A whole beside its combined parts."""

    difference: Difference | None
    #: whether no other mode would fit, nor rows that depend on each other: zeros fit all modes, and
    #: of equal rows nobody can tell
    settled: bool


class Trial(NamedTuple):
    """The outputs of a function for some rows, and for parts of them."""

    whole: Any
    parts: Sequence[Partial]


#: by how many standard deviations ranks of random numbers differ that are not of one kind
#: (5: once in a million of those that are), and up to how many they well may be
_CERTAIN, _LIKELY = 5.0, 1.5


def compare(trials: Sequence[Trial], modes: Modes, limit: float = _CERTAIN) -> Comparison:
    """Compare the whole with its combined parts: once, or in several trials of a function that
    gives other numbers each time. Raises what `join` raises."""
    settled = True
    by_name = [_by_name(trial, modes) for trial in trials]
    for name, (mode, first) in by_name[0].items():
        if mode is None:
            continue
        tried = [leaves[name][1] for leaves in by_name if name in leaves]
        fitting = [known for known in MODES if known and _fits(tried, known, limit)]
        if mode not in fitting:
            joined = join(first.parts, mode)
            return Comparison(Difference(name, mode, first.whole, joined, fitting), settled=True)
        equal_rows = mode == "gather" and _has_equal_rows(first.whole)
        settled = settled and len(fitting) == 1 and not equal_rows
    return Comparison(None, settled)


def vary(trials: Sequence[Trial]) -> bool:
    """Return whether a function gives other numbers each time."""
    return not all(is_close(trials[0].whole, trial.whole) for trial in trials)


def fits_well(trials: Sequence[Trial], modes: Modes) -> bool:
    """Return whether the modes seem to be right for a function that varies."""
    return compare(trials, modes, _LIKELY).difference is None


def _by_name(trial: Trial, modes: Modes) -> dict[str, tuple[Modes, Trial]]:
    """Return each output of a trial, by its name, with its mode."""
    whole, parts = trial
    join(parts, modes)  # raises unless all parts have the same outputs
    each = [{name: leaf for name, _, leaf in _leaves(part.outputs, modes)} for part in parts]
    found = {}
    for name, mode, leaf in _leaves(whole, modes):
        if any(name not in leaves for leaves in each):
            raise InvalidValue(
                f"{name} is there for all rows, and not for some of them; expected the same outputs"
            )
        pairs = zip(each, parts, strict=True)
        pieces = [Partial(leaves[name], part.rows) for leaves, part in pairs]
        found[name] = mode, Trial(leaf, pieces)
    return found


def _leaves(outputs: Any, modes: Modes, name: str = "the output") -> Iterator[tuple[str, Any, Any]]:
    """Yield each output with its name and mode."""
    several = isinstance(modes, (list, tuple, Mapping))
    if isinstance(outputs, Mapping) and (several or modes is not None):
        for key, value in outputs.items():
            yield from _leaves(value, mode_of(modes, key), f"{name}[{key!r}]")
    elif isinstance(outputs, tuple) or (isinstance(outputs, list) and modes != "gather"):
        for index, value in enumerate(outputs):
            yield from _leaves(value, mode_of(modes, index), f"{name}[{index}]")
    else:
        yield name, modes, outputs


def _fits(trials: Sequence[Trial], mode: str, limit: float) -> bool:
    """Return whether the parts joined by a mode make the whole: to rounding, or of a function that
    varies as well as random numbers do (the test of Mann and Whitney)."""
    sums: list[tuple[float, float]] = []
    for whole, parts in trials:
        try:
            joined = join(parts, mode)
        except Exception:  # shapes or types that the mode cannot combine
            return False
        if is_close(whole, joined, [part.outputs for part in parts]):
            return True
        if len(trials) == 1 or not _has_shape_of(whole, joined, mode):
            return False
        sums.append((_sum(whole), _sum(joined)))
    if not vary(trials):
        return False
    wholes, others = np.array(sums).T
    above = np.sign(wholes[:, None] - others).sum() / 2
    count = len(trials)
    return bool(abs(above) <= limit * count * np.sqrt((2 * count + 1) / 12))


def _has_shape_of(one: Any, other: Any, mode: str) -> bool:
    """Return whether two outputs have one shape; of those that are gathered, the rows have."""
    if None in map(lookup.of_array_or_number, (one, other)):
        return type(one) is type(other)
    shapes: list[tuple[int, ...]] = [_readable(value)[0].shape for value in (one, other)]
    start = 1 if mode == "gather" else 0
    return len(shapes[0]) == len(shapes[1]) and shapes[0][start:] == shapes[1][start:]


def _sum(output: Any) -> float:
    """Return a number that tells outputs from those joined by a wrong mode."""
    if lookup.of_array_or_number(output) is None:
        return 0.0
    array, _ = _readable(output)
    if array.dtype.kind not in NUMERIC:
        return 0.0
    return float(np.real(array[np.isfinite(array)]).sum(dtype=np.float64))


def _has_equal_rows(output: Any) -> bool:
    """Return whether an output has the same in every row: that of equal rows, perhaps."""
    if isinstance(output, (list, tuple)):
        return all(is_close(row, output[0]) for row in output)
    if lookup.of_array_or_number(output) is None:
        return False
    rows, _ = _readable(output)
    return bool(rows.ndim) and bool(np.all(rows == rows[:1]))


class _Tolerance(NamedTuple):
    """The difference allowed between results whose sums were taken in another order."""

    #: relative to the result; to the largest number in its parts, which may cancel out; and at all
    of_result: float = 1e-6
    of_largest: float = 1e-10
    absolute: float = 1e-13


#: by the kind of number
_TOLERANCES = {
    "bfloat16": _Tolerance(3e-2, 3e-2, 1e-2),
    "float16": _Tolerance(1e-2, 1e-2, 1e-3),
    "float32": _Tolerance(1e-4, 1e-5, 1e-6),
    "complex64": _Tolerance(1e-4, 1e-5, 1e-6),
}


def is_close(one: Any, other: Any, parts: Sequence[Any] = ()) -> bool:
    """Return whether two outputs are equal up to the rounding of sums of the parts."""
    if isinstance(one, (list, tuple)):
        alike = isinstance(other, (list, tuple)) and len(one) == len(other)
        return alike and all(map(is_close, one, other))
    if isinstance(one, Mapping):
        alike = isinstance(other, Mapping) and one.keys() == other.keys()
        return alike and all(is_close(one[key], other[key]) for key in one)
    whole_numbers = type(one) is int and type(other) is int  # of any width
    if whole_numbers or None in map(lookup.of_array_or_number, (one, other)):
        return bool(np.all(one == other))
    (left, element), (right, second) = _readable(one), _readable(other)
    if left.shape != right.shape or left.dtype.kind not in NUMERIC:
        return bool(np.array_equal(left, right))
    allowed = max(_TOLERANCES.get(kind, _Tolerance()) for kind in (element, second))
    largest = max(_largest(_readable(part)[0]) for part in (one, other, *parts))
    margin = allowed.of_largest * largest + allowed.absolute
    return bool(np.allclose(left, right, rtol=allowed.of_result, atol=margin, equal_nan=True))


def _readable(value: Any) -> tuple[Any, str]:
    """Return an output as an array of a dtype that NumPy has, and the name of its elements."""
    adapter: Any = lookup.of_array_or_number(value)
    array, element = adapter.view(value)
    return (widen(array, np.dtype(np.float32), element) if element == BFLOAT16 else array), element


def _largest(array: Any) -> float:
    finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind in NUMERIC else array[:0]
    return float(finite.max(initial=0))


def describe(difference: Difference, rows: int) -> str:
    """Return what was computed."""
    name, mode, whole, joined, _ = difference
    return (
        f"{name} is {_shown(whole)} for {rows} rows at once, and {_shown(joined)} for two parts of "
        f"them joined by {mode!r}"
    )


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


#: characters of a value in a message
_LONGEST = 120
