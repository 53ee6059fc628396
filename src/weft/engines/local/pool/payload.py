"""Functions, items and results as bytes; large arrays stay out of them.

    here                                         there
    array of 64 KB or more  -> copied into a block, its reference in the pickle
    array in shared memory  -> its reference      -> an array over the same memory
    everything else         -> pickled by value   -> unpickled

Pickle's own pickler is several times faster than cloudpickle's and knows all that most items are
made of. What it cannot do (lambdas, local classes), or would do wrong (what is defined in the
user's script, `__main__`, which is another module in a worker), is packed by cloudpickle.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import cloudpickle

from weft._core.failures import path_to_fault
from weft.engines.interruption import by_signal_handler
from weft.errors import InvalidType, WeftError

_PROTOCOL = 5

#: nobody can change these, so the same one may come twice; packed in a third of the time
IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))

_EXACTLY_THESE = frozenset(IMMUTABLE)


class Payload:
    """Something as bytes, and the shared memory that they refer to.

    The memory is there for as long as this object is: wherever a signal handler raises, it goes
    with the object. What is `pinned` can be sent and forgotten: its memory is there until somebody
    has attached it.
    """

    def __init__(self, *, pinned: bool = False, most: int | None = None) -> None:
        """`most` bytes of arrays are not in the payload; None: any number."""
        self._most = most
        self.payload = b""
        #: bytes of arrays that are not in the payload
        self.shared = 0
        self._pinned = pinned
        self._pins: list[Any] = []
        #: arrays over the memory
        self._held: list[Any] = []
        #: what each large array became, should a second pickler come across it
        self._reduced: dict[int, tuple[Any, Any]] = {}

    @cached_property
    def digest(self) -> bytes:
        import hashlib

        return hashlib.blake2b(self.payload, digest_size=16).digest()

    @property
    def has_references(self) -> bool:
        """Whether it is of use only as long as the memory that it refers to is there."""
        return bool(self._held or self._pins)

    def release(self) -> None:
        """Give the memory up: who has not attached it yet will not."""
        if self._pins:
            from weft.engines.local.memory import blocks

            for reference in self._pins:
                blocks.release(reference)
        self._pins.clear()
        self._held.clear()
        self._reduced.clear()

    def dump(self, value: Any) -> None:
        """Pickle a value by pickle's own pickler."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file, _PROTOCOL)
        pickler.dispatch_table = {**copyreg.dispatch_table, **self._reducers()}
        pickler.dump(value)
        self.payload = file.getvalue()

    def dump_by_value(self, value: Any) -> None:
        """Pickle a value by cloudpickle's."""
        self.dump_by(cloudpickle.Pickler, value)

    def dump_by(self, kind: Any, value: Any) -> None:
        """Pickle a value by a kind of cloudpickle's pickler."""
        file = io.BytesIO()
        pickler = kind.__new__(kind)
        # before it is initialised, which is when it looks at the table
        pickler.dispatch_table = {**cloudpickle.Pickler.dispatch_table, **self._reducers()}
        pickler.__init__(file, _PROTOCOL)
        pickler.dump(value)
        self.payload = file.getvalue()
        self.drop_array_cache()

    def drop_array_cache(self) -> None:
        """No other pickler will come: who keeps this for the memory keeps no arrays."""
        self._reduced.clear()

    def _reducers(self) -> dict[type, Callable[[Any], Any]]:
        if "numpy" not in sys.modules:
            return {}
        large_arrays = _large_arrays()
        found: dict[type, Callable[[Any], Any]] = dict.fromkeys(large_arrays.KINDS, self._array)
        if "torch" in sys.modules:
            found[sys.modules["torch"].Tensor] = large_arrays.reduce_tensor
        return found

    def _array(self, array: Any) -> Any:
        large_arrays = _large_arrays()
        if not large_arrays.is_large(array):
            return large_arrays.reduce_small(array)
        if id(array) not in self._reduced:
            if self._most is not None and self.shared + array.nbytes > self._most:
                raise PayloadTooLarge(f"more than {self._most} bytes")
            shared = large_arrays.in_shared_memory(array)
            reduced = large_arrays.reduce(array, shared, pin=self._pinned)
            (self._pins if self._pinned else self._held).append(
                reduced[1][0] if self._pinned else shared
            )
            self._reduced[id(array)] = (array, reduced)
            self.shared += array.nbytes
        return self._reduced[id(array)][1]


class ForSeveral(Payload):
    """Sent to several workers, each of which may change its arrays: none sees another's changes."""

    def _array(self, array: Any) -> Any:
        return _large_arrays().private_there(super()._array(array))


@cache
def _large_arrays() -> Any:
    """The module, which loads NumPy: only once there is an array to be sent."""
    from weft.engines.local.pool import payload_arrays

    return payload_arrays


class SharedPayload:
    """A value that several workers get, packed only once for all. It is of use while this lives."""

    def __init__(self, value: Any, name: str) -> None:
        self._packed = _pack(ForSeveral(), [value], None, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_one, (self._packed.payload,)


def _load_one(payload: bytes) -> Any:
    return load(payload)[0]


class PayloadTooLarge(Exception):
    """Some items have more bytes in arrays than were to be sent together."""


def pack_items(items: list[Any], first: int, *, most: int) -> Payload:
    """Items ready to be sent to a worker; `first` is the index of the first of them. If they are
    several, their arrays have so many bytes at most: otherwise raises PayloadTooLarge.

    An array that comes several times is several arrays there: a function may change what it gets.
    Raises InvalidType, which says what in which of them is in the way.
    """
    if len(items) == 1:
        return pack(items, first)
    return _pack(Payload(most=most), _arrays_apart(items), first, "items")


def _arrays_apart(items: list[Any]) -> list[Any]:
    """The items, with a view in the place of an array that came before: a pickler would write that
    only once."""
    numpy = sys.modules.get("numpy")
    if numpy is None or numpy.ndarray not in set(map(type, items)):
        return items
    seen: set[int] = set()
    found = []
    for item in items:
        again = id(item) in seen and type(item) is numpy.ndarray
        found.append(item.view() if again else item)
        seen.add(id(item))
    return found


def pack(
    items: list[Any],
    first: int,
    name: str = "items",
    packed: Payload | None = None,
    *,
    pinned: bool = False,
) -> Payload:
    """Items, or results, ready to be sent; `first` is the index of the first of them.

    Raises InvalidType, which says what in which of them is in the way.
    """
    return _pack(packed or Payload(pinned=pinned), items, first, name)


def _pack(packed: Payload, items: list[Any], first: int | None, name: str) -> Payload:
    """Errors call an item by the name, with its index, which is that of the first or a later one;
    without one if there is no first."""
    # a lone tuple is what most functions of a team return
    values = items[0] if len(items) == 1 and type(items[0]) is tuple else items
    if _EXACTLY_THESE.issuperset(map(type, values)):
        packed.payload = pickle.dumps(items, _PROTOCOL)
        return packed
    try:
        packed.dump(items)
        if b"__main__" not in packed.payload:
            packed.drop_array_cache()
            return packed
    except BaseException as error:  # a class's own pickling may raise anything
        packed.payload = b""
        if is_interrupt(error):
            packed.release()
            raise
    try:
        packed.dump_by_value(items)
    except BaseException as error:
        packed.release()
        if is_interrupt(error):
            raise
        for index, item in enumerate(items, first or 0):
            if not _pickles(item):
                which = name if first is None else f"{name}[{index}]"
                raise unpicklable(item, which, error) from error
        raise
    return packed


def pack_function(function: Callable[..., Any]) -> Payload:
    """Return a function ready to be sent to any number of workers, with what it uses now.

    Raises InvalidType.
    """
    packed = ForSeveral()
    try:
        packed.dump_by_value(function)
    except BaseException as error:
        packed.release()
        if is_interrupt(error):
            raise
        raise unpicklable(function, "fun", error) from error
    return packed


def load(payload: bytes, seconds: float | None = None) -> Any:
    """What was packed. Owners of memory that it refers to have so many seconds to answer."""
    if seconds is None:
        return pickle.loads(payload)
    from weft.engines.local.memory import blocks

    with blocks.attach_timeout(seconds):
        return pickle.loads(payload)


def load_borrowed(payload: bytes) -> Any:
    """What was packed by somebody who waits for an answer, and keeps the memory that it refers to
    until then."""
    blocks = sys.modules.get("weft.engines.local.memory.blocks")
    if blocks is None:  # nothing is mapped yet
        return pickle.loads(payload)
    with blocks.borrowing():
        return pickle.loads(payload)


def retain_borrowed() -> None:
    """Before the answer: have what is still used of that memory stay. Raises SegmentGone,
    Stalled."""
    blocks = sys.modules.get("weft.engines.local.memory.blocks")
    if blocks is not None:
        blocks.retain_borrowed()


def unpicklable(value: Any, name: str, error: BaseException) -> InvalidType:
    path, part = path_to_fault(value, name, _pickles)
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    return InvalidType(
        f"{path} is a {kind}, which cannot be sent to another process ({error}); leave it out, or "
        "make it inside the function"
    )


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value, _PROTOCOL)
    except Exception as error:  # see above
        if is_interrupt(error):
            raise
        return False
    return True


def is_interrupt(error: BaseException) -> bool:
    """Whether what was raised while something was pickled does not mean that it cannot be: an
    interrupt, or weft's own word on memory."""
    interrupt = not isinstance(error, Exception) or by_signal_handler(error)
    return interrupt or isinstance(error, (WeftError, PayloadTooLarge))
