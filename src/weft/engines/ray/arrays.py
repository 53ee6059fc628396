"""Arrays that many calls use, once on each host.

    driver                              host
    put: an array, a number    ──>      Ray's store ── one copy ──>  weft's shared memory
    a Placed in its place      ──>      the array there, mapped by all its workers

A `Placed` is pickled as its number. The driver notes which numbers a pickle mentions, and sends
with it those arrays that the host does not have. `Repeated` finds the arrays that several items of
a map use, which travel in the same way. When nobody refers to a Placed any more, hosts are told to
drop its array.
"""

from __future__ import annotations

import copyreg
import itertools
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft._core import pickling
from weft.engines.interruption import by_signal_handler
from weft.engines.ray.messages import SentArray
from weft.engines.ray.wire import LARGE, sendable
from weft.errors import OutOfMemory, format_bytes

if TYPE_CHECKING:
    from weft._core.arithmetic import Array

_numbers = itertools.count()
#: by thread: the numbers that were mentioned since `noting`
_noted = threading.local()


class Placed:
    """An array that a pool has stored for all its workers."""

    def __init__(self, array: Array, *, readonly: bool) -> None:
        self._set(lambda: array, readonly=readonly, copied=False)

    @classmethod
    def repeated(cls, array: weakref.ref[Any]) -> Placed:
        """Return one for an array, or a tensor, that several items use. It does not keep it."""
        placed = cls.__new__(cls)
        placed._set(lambda: _as_array(array()), readonly=False, copied=True)
        return placed

    def _set(self, find_array: Callable[[], Any], *, readonly: bool, copied: bool) -> None:
        self.number = next(_numbers)
        self._find_array = find_array
        self._readonly, self._copied = readonly, copied
        #: Ray's reference, once it was sent
        self._reference: Any = None
        _placed[self.number] = self

    @property
    def array(self) -> Any:
        return self._find_array()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        return int(self.array.ndim)

    def send(self, store: int) -> SentArray:
        """Return it as a host fetches it; the first call puts it into Ray's store. Raises
        OutOfMemory if it has more bytes than the smallest `store`."""
        array = self.array
        readonly = self._readonly or (self._copied and not array.flags.writeable)
        if self._reference is None:
            import ray

            if array.nbytes > store:
                raise OutOfMemory(
                    f"an array of shape {array.shape} that the items share has "
                    f"{format_bytes(array.nbytes)}, and the smallest of Ray's stores, through "
                    f"which it goes to other machines, {format_bytes(store)}; share a part, or the "
                    "name of a file from which the function reads it"
                )
            self._reference = ray.put(sendable(array))
        return SentArray([self._reference], readonly, self._copied)

    def is_current(self) -> bool:
        """Return whether the array still has the values that were sent, if it was."""
        if self._reference is None:
            return True
        import numpy as np
        import ray

        now, sent = self.array, ray.get(self._reference)
        plain = isinstance(sent, np.ndarray) and sent.flags.c_contiguous
        if not plain or not now.flags.c_contiguous or now.shape != sent.shape:
            return False
        return bool(np.array_equal(_as_bytes(now), _as_bytes(sent)))

    def __reduce__(self) -> Any:
        mentioned: dict[int, Placed] | None = getattr(_noted, "mentioned", None)
        if mentioned is not None:
            mentioned[self.number] = self
        return find, (self.number,)


#: those of this process
_placed: weakref.WeakValueDictionary[int, Placed] = weakref.WeakValueDictionary()


def is_placed(number: int) -> bool:
    """Return whether somebody still refers to an array of this process."""
    return number in _placed


class Noting:
    """A context that notes which arrays pickles mention."""

    def __init__(self) -> None:
        self.mentioned: dict[int, Placed] = {}

    def __enter__(self) -> Noting:
        _noted.mentioned = self.mentioned
        return self

    def __exit__(self, *_: object) -> None:
        _noted.mentioned = None


class Repeated:
    """The large arrays, and tensors, that several items of a map use: by identity. Those of a
    stream may have other values each time, as where a generator writes to one array again and
    again: then they are sent anew."""

    def __init__(self, *, streamed: bool = False) -> None:
        self._streamed = streamed
        #: those that one item has used so far, and those that several have
        self._once: dict[int, weakref.ref[Any]] = {}
        self._placed: dict[int, tuple[weakref.ref[Any], Placed]] = {}
        #: whether a pickle has met others, which items may share that were not looked at
        self.met_others = False

    def look(self, items: Sequence[Any]) -> bool:
        """Look at further items. Return whether more arrays are known now to be used by several."""
        self.met_others = False
        self._once = {key: one for key, one in self._once.items() if one() is not None}
        self._placed = {key: one for key, one in self._placed.items() if one[0]() is not None}
        before = len(self._placed)
        try:
            uses = _count_uses(items)
        except Exception as error:  # a class's own pickling may raise anything: packing tells
            if by_signal_handler(error):
                raise
            return False
        for key, (array, count) in uses.items():
            reference = weakref.ref(array)
            if key in self._placed:
                continue
            if count > 1 or key in self._once:
                self._placed[key] = reference, Placed.repeated(reference)
                self._once.pop(key, None)
            else:
                self._once[key] = reference
        return len(self._placed) > before

    def reducers(self, plain: Mapping[type, Callable[[Any], Any]]) -> dict[type, Any]:
        """Return how arrays are pickled, given how they are otherwise: a repeated one by its
        number."""

        def reducer_of(kind: type) -> Callable[[Any], Any]:
            otherwise = plain.get(kind, _reduce)
            is_array = _is_array(kind)

            def reduce(value: Any) -> Any:
                if is_array and value.nbytes < LARGE:
                    return otherwise(value)
                found = self._placed.get(id(value))
                if found is None:
                    self.met_others = self.met_others or _is_large(value)
                    return otherwise(value)
                placed = found[1]
                if self._streamed and not placed.is_current():
                    placed = Placed.repeated(found[0])
                    self._placed[id(value)] = found[0], placed
                return placed.__reduce__() if is_array else (AsTensor, (placed,))

            return reduce

        return {**plain, **{kind: reducer_of(kind) for kind in _kinds()}}


class AsTensor:
    """Stand on a host for a tensor over the memory of an array, which a worker gets."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __reduce__(self) -> Any:
        from weft.engines.local.pool.payload_arrays import as_tensor

        return as_tensor, (self._array,)


def _as_bytes(array: Any) -> Any:
    return array.view(sys.modules["numpy"].ndarray).reshape(-1).view("u1")


def _reduce(array: Any) -> Any:
    return array.__reduce_ex__(5)


def _count_uses(items: Sequence[Any]) -> dict[int, tuple[Any, int]]:
    """Return the large arrays in items, by identity, and how many items have each."""
    try:
        return _count_by(_ByName, copyreg.dispatch_table, items)
    except Exception as error:  # lambdas, local classes
        if by_signal_handler(error):
            raise
        return _count_by(_ByValue, pickling.REDUCERS, items)


def _count_by(
    kind: type[_Looking], reducers: Mapping[type, Any], items: Sequence[Any]
) -> dict[int, tuple[Any, int]]:
    uses: dict[int, tuple[Any, int]] = {}
    pickler: Any = kind.__new__(kind)
    pickler.kinds = frozenset(_kinds())
    # before __init__, which reads the table
    pickler.dispatch_table = {**reducers, **dict.fromkeys(pickler.kinds, lambda _: (int, ()))}
    pickler.__init__(_Nowhere(), 5, buffer_callback=lambda _: False)
    for item in items:
        pickler.met = {}
        pickler.dump(item)
        pickler.clear_memo()  # or what several items have would be seen once
        for key, array in pickler.met.items():
            uses[key] = array, uses.get(key, (array, 0))[1] + 1
    return uses


class _Looking:
    """A pickler that looks for large arrays."""

    kinds: frozenset[type]
    #: those that it has met, by identity
    met: dict[int, Any]

    def persistent_id(self, value: Any) -> None:
        """Look at an object. Pickling calls it whenever one occurs."""
        if type(value) in self.kinds and _is_large(value):
            self.met[id(value)] = value


class _ByName(_Looking, pickle.Pickler):
    """One that finds classes and functions by their names."""


class _ByValue(_Looking, pickling.Pickler):
    """One that looks into those of the script, too."""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, _: Any) -> None:
        """Write nothing."""


def _kinds() -> tuple[type, ...]:
    """Return the classes of arrays that may be repeated."""
    if "numpy" not in sys.modules:
        return ()
    from weft.engines.local.pool.payload_arrays import KINDS

    return (*KINDS, sys.modules["torch"].Tensor) if "torch" in sys.modules else KINDS


def _is_array(kind: type) -> bool:
    return issubclass(kind, sys.modules["numpy"].ndarray)


def _as_array(value: Any) -> Any:
    """Return an array, or that over the memory of a tensor; None if it has none."""
    if _is_array(type(value)):
        return value
    from weft.engines.local.pool.payload_arrays import as_tensor, reduce_tensor

    make, arguments = reduce_tensor(value)[:2]
    return arguments[0] if make is as_tensor else None


def _is_large(value: Any) -> bool:
    array = _as_array(value)
    return array is not None and array.nbytes >= LARGE and not array.dtype.hasobject


# on a host

#: the arrays of this host, by number
_held: dict[int, Any] = {}


def update(sent: Mapping[int, SentArray], dropped: Iterable[int]) -> None:
    """Fetch arrays that the driver has sent, and drop others."""
    for number in dropped:
        _held.pop(number, None)
    new = {number: one for number, one in sent.items() if number not in _held}
    if new:
        import ray

        fetched = ray.get([one.reference[0] for one in new.values()])
        for number, one in new.items():
            _held[number] = _place(fetched.pop(0), one)


def _place(fetched: Any, sent: SentArray) -> Any:
    """Copy an array from Ray's store into weft's shared memory."""
    import numpy as np

    from weft.engines.local.pool.payload_arrays import RepeatedArray, place

    array = fetched if isinstance(fetched, np.ndarray) else fetched.load()
    placed = place(array, readonly=sent.readonly)
    return placed.view(RepeatedArray) if sent.copied and not sent.readonly else placed


def find(number: int) -> Any:
    """Return the array that stands for a number in this process. Unpickling calls it."""
    return _held[number] if number in _held else _placed[number].array
