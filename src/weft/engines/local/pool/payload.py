"""Payloads: functions, items and results as bytes, without their large arrays.

    here                                                there
    array of 64 KB or more  -> copied into a block  ->  an array over the block
    array in shared memory  -> its block's handle   ->  an array over the same memory
    everything else         -> pickled by value     ->  unpickled

    pickle of 1 MB or more  -> copied into a block  ->  unpickled from there

pickle's own pickler is several times faster than cloudpickle's and knows all that most items are
made of. What it cannot do (lambdas, local classes), or would do wrong (what is defined in the
user's script, which is no module of a worker's), cloudpickle packs. The script is `__main__`, and
`__mp_main__` in a process that multiprocessing has started by spawn or forkserver.

This module loads no NumPy: what concerns arrays is in payload_arrays.py.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import cloudpickle

from weft._core import pickling
from weft._core.failures import path_to_fault
from weft._core.own_modules import mentioned_in, references
from weft.engines.interruption import by_signal_handler
from weft.errors import InvalidType, WeftError

_PROTOCOL = 5

#: bytes from which on a pickle goes through shared memory
_LARGE = 1 << 20

#: what comes before the handle of its block then; a pickle begins otherwise
_IN_BLOCK = b"\0"

#: a pickler writes frames of less, in which names are, and longer pieces as they are
_LONGEST_FRAME = 1 << 17

#: immutable, so that the same one may arrive as two
IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))

#: cloudpickle's own functions, by name
_CLOUDPICKLE = vars(cloudpickle.cloudpickle)


class Pickler(pickling.Pickler):
    """The pickler by value, which notes the modules that the pickle refers to."""

    modules: set[str]

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is pickled."""
        if type(value) is FunctionType and _CLOUDPICKLE.get(value.__name__) is value:
            return NotImplemented  # by its name; there are four in each function's pickle
        self.modules.update(references(value))
        return super().reducer_override(value)


class Payload:
    """A pickle, and references to the blocks of shared memory that it mentions.

    The blocks live as long as this object: should a signal handler raise, they are freed with it.
    A subclass for receivers that see no memory of this host overrides `reducers`, `put` and
    `keep_buffer`.
    With `owned=True` the pickle itself holds references, which are in flight: it can be sent and
    forgotten, and the blocks live until the receiver has attached them.
    """

    #: takes the memory of arrays that is not to be in the pickle; None: all is
    keep_buffer: Callable[[Any], Any] | None = None

    def __init__(self, *, owned: bool = False, most: int | None = None) -> None:
        """Allow `most` bytes to be copied to shared memory; None: any number."""
        self._most = most
        #: the pickle, or the handle of the block that it lies in
        self.data = b""
        #: bytes of the pickle
        self.pickled = 0
        #: bytes in shared memory: of arrays, and of the pickle
        self.shared = 0
        #: of these, the bytes that were copied there
        self._copied = 0
        #: whether there are arrays in it
        self.has_arrays = False
        #: modules that it refers to
        self.modules: set[str] = set()
        #: whether it has classes of the script, which the next payload may change
        self.has_classes = False
        #: of a function: the driver's state when it was packed
        self.state: Any = None
        self._owned = owned
        #: handles of the references in flight
        self._handles: list[Any] = []
        #: arrays over the other blocks, which keep them alive
        self._arrays: list[Any] = []
        #: each large array and what it became, by identity, for a second pickler
        self._reduced: dict[int, tuple[Any, Any]] = {}

    @cached_property
    def digest(self) -> bytes:
        import hashlib

        return hashlib.blake2b(self.data, digest_size=16).digest()

    @property
    def has_references(self) -> bool:
        """Return whether it refers to blocks of shared memory."""
        return bool(self._arrays or self._handles)

    def release(self) -> None:
        """Release the blocks: who has not attached them yet no longer can."""
        if self._handles:
            from weft.engines.local.memory import blocks

            for handle in self._handles:
                blocks.release(handle)
        self._handles.clear()
        self._arrays.clear()
        self._reduced.clear()

    def dump(self, value: Any) -> bool:
        """Pickle a value with pickle's own pickler. Return whether that is right: not if something
        in it is defined in `__main__`."""
        pieces = Pieces()
        pickler = pickle.Pickler(pieces, _PROTOCOL, buffer_callback=self.keep_buffer)
        pickler.dispatch_table = {**copyreg.dispatch_table, **self.reducers()}
        pickler.dump(value)
        frames = pieces.frames()
        if b"__main__" in frames or b"__mp_main__" in frames:
            return False
        self.modules.update(mentioned_in(frames))
        self.put(pieces)
        return True

    def dump_by_value(self, value: Any) -> None:
        """Pickle a value with cloudpickle's pickler."""
        self.dump_by(Pickler, value)

    def dump_by(self, kind: Any, value: Any) -> None:
        """Pickle a value with a subclass of cloudpickle's pickler."""
        _send_script_by_value()
        pieces = Pieces()
        pickler = kind.__new__(kind)
        pickler.modules = self.modules
        # before __init__, which reads the table
        pickler.dispatch_table = {**_reducers_by_value(), **self.reducers()}
        pickler.__init__(pieces, _PROTOCOL, self.keep_buffer)
        pickler.dump(value)
        self.has_classes = pickler.has_classes
        self.put(pieces)
        self.drop_array_cache()

    def put(self, pieces: Pieces) -> None:
        """Keep what a pickler has written: here, or in a block if it is large."""
        self.pickled = sum(memoryview(piece).nbytes for piece in pieces.written)
        if self.pickled < _LARGE:
            self.data = b"".join(pieces.written)
            return
        self._copied += self.pickled
        self._check()
        self.data = self._put_in_block(pieces)
        self.shared += self.pickled

    def _check(self) -> None:
        if self._most is not None and self._copied > self._most:
            raise PayloadTooLarge(f"more than {self._most} bytes")

    def _put_in_block(self, pieces: Pieces) -> bytes:
        """Copy a pickle into a block. Return what stands for it. Raises OutOfMemory."""
        from weft.engines.local.memory import blocks

        buffer = blocks.allocate(self.pickled).buffer
        memory, end = memoryview(buffer).cast("B"), 0
        for piece in pieces.written:
            start, end = end, end + memoryview(piece).nbytes
            memory[start:end] = memoryview(piece).cast("B")
        handle = blocks.export(buffer, owned=self._owned)
        if self._owned:
            self._handles.append(handle)
        else:
            self._arrays.append(buffer)
        return _IN_BLOCK + pickle.dumps((handle, self.pickled), _PROTOCOL)

    def drop_array_cache(self) -> None:
        """Drop what was kept for a second pickler: the arrays that were copied into blocks."""
        self._reduced.clear()

    def reducers(self) -> dict[type, Callable[[Any], Any]]:
        """Return how arrays are pickled, by their class."""
        if "numpy" not in sys.modules:
            return {}
        payload_arrays = _payload_arrays()
        reducers: dict[type, Callable[[Any], Any]] = dict.fromkeys(
            payload_arrays.KINDS, self._array
        )
        if "torch" in sys.modules:
            reducers[sys.modules["torch"].Tensor] = payload_arrays.reduce_tensor
        return reducers

    def _array(self, array: Any) -> Any:
        """Reduce an array: put a large one into a block, and refer to that."""
        self.has_arrays = True
        payload_arrays = _payload_arrays()
        if not payload_arrays.is_large(array):
            return payload_arrays.reduce_small(array)
        if id(array) not in self._reduced:
            if not payload_arrays.is_in_shared_memory(array):
                self._copied += array.nbytes
                self._check()
            shared = payload_arrays.in_shared_memory(array)
            reduced = payload_arrays.reduce(array, shared, owned=self._owned)
            (self._handles if self._owned else self._arrays).append(
                reduced[1][0] if self._owned else shared
            )
            self._reduced[id(array)] = (array, reduced)
            self.shared += array.nbytes
        return self._reduced[id(array)][1]


#: the reducers by value with those of copyreg, and what copyreg had then
_reducers_then: tuple[dict[type, Any], dict[type, Any]] = {}, {}


def _reducers_by_value() -> dict[type, Any]:
    """Return the table, a ChainMap, as a dict, which takes a tenth of the time."""
    global _reducers_then
    merged, copyreg_then = _reducers_then
    if not merged or copyreg_then != copyreg.dispatch_table:
        merged = dict(pickling.REDUCERS)
        _reducers_then = merged, dict(copyreg.dispatch_table)
    return merged


class Pieces:
    """The file that a pickler writes to. Long pieces are the pickled objects' own memory."""

    def __init__(self) -> None:
        self.written: list[bytes | memoryview] = []

    def write(self, piece: Any) -> None:
        if isinstance(piece, pickle.PickleBuffer):
            piece = piece.raw()
        self.written.append(piece)

    def frames(self) -> bytes:
        """Return all but the long pieces: what the pickle refers to is there by name."""
        pieces = (one for one in self.written if isinstance(one, bytes))
        return b"".join(one for one in pieces if len(one) <= _LONGEST_FRAME)


class CommonPayload(Payload):
    """A payload for several workers, each of which may change its arrays: they arrive
    copy-on-write."""

    def _array(self, array: Any) -> Any:
        return _payload_arrays().as_copy_on_write(super()._array(array))


@cache
def _payload_arrays() -> Any:
    """Return the module, which loads NumPy, once there is an array to be sent."""
    from weft.engines.local.pool import payload_arrays

    return payload_arrays


class SharedPayload:
    """A value for several workers that is packed once. It can be loaded while this object lives."""

    def __init__(self, value: Any, name: str) -> None:
        self._payload = _pack(CommonPayload(), [value], None, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_one, (self._payload.data,)


def _load_one(payload: bytes) -> Any:
    return load(payload)[0]


class PayloadTooLarge(Exception):
    """Several items have more bytes in large arrays than may be sent together."""


def pack_items(items: list[Any], first: int, *, most: int) -> Payload:
    """Pack items for a worker; `first` is the index of the first of them.

    An array that occurs in several items arrives as several arrays: a function may change what it
    gets. Raises PayloadTooLarge if there are several items with more than `most` bytes of large
    arrays, and InvalidType, which names the part of the item that cannot be pickled.
    """
    if len(items) == 1:
        return pack(items, first)
    payload = pack(items, first, payload=Payload(most=most))
    if payload.has_arrays and len(set(map(id, items))) < len(items):
        payload.release()
        payload = pack(_arrays_apart(items), first, payload=Payload(most=most))
    return payload


def _arrays_apart(items: list[Any]) -> list[Any]:
    """Return the items with a view in the place of an array that occurred before: a pickler would
    write that only once."""
    seen: set[int] = set()
    distinct = []
    for item in items:
        repeated = id(item) in seen and type(item) in _payload_arrays().COPIED
        distinct.append(item.view() if repeated else item)
        seen.add(id(item))
    return distinct


def pack(
    items: list[Any],
    first: int,
    name: str = "items",
    payload: Payload | None = None,
    *,
    owned: bool = False,
) -> Payload:
    """Pack items or results; `first` is the index of the first of them.

    Raises InvalidType, which names the part of the item that cannot be pickled.
    """
    return _pack(payload or Payload(owned=owned), items, first, name)


def _pack(payload: Payload, items: list[Any], first: int | None, name: str) -> Payload:
    """Pack items into a payload. Errors call an item `name[index]`, counted from `first`, or `name`
    where that is None."""
    try:
        if payload.dump(items):
            payload.drop_array_cache()
            return payload
    except BaseException as error:  # a class's own pickling may raise anything
        payload.data = b""
        if is_interrupt(error):
            payload.release()
            raise
    try:
        payload.dump_by_value(items)
    except BaseException as error:
        payload.release()
        if is_interrupt(error):
            raise
        for index, item in enumerate(items, first or 0):
            if not _pickles(item):
                which = name if first is None else f"{name}[{index}]"
                raise unpicklable_error(item, which, error) from error
        raise
    return payload


def pack_function(function: Callable[..., Any]) -> Payload:
    """Pack a function for any number of workers, with what it uses now. Raises InvalidType."""
    payload = CommonPayload()
    try:
        payload.dump_by_value(function)
    except BaseException as error:
        payload.release()
        if is_interrupt(error):
            raise
        raise unpicklable_error(function, "fun", error) from error
    return payload


def load(payload: bytes, seconds: float | None = None) -> Any:
    """Load what was packed. Owners of blocks that it refers to have so many seconds to answer."""
    if seconds is None:
        return _load(payload)
    from weft.engines.local.memory import blocks

    with blocks.attach_timeout(seconds):
        return _load(payload)


def load_borrowed(payload: bytes) -> Any:
    """Load a borrowed payload, whose blocks its sender keeps until it has the answer."""
    blocks = sys.modules.get("weft.engines.local.memory.blocks")
    if blocks is None:  # nothing is mapped yet
        return _load(payload)
    with blocks.borrowing():
        return _load(payload)


def _load(payload: bytes) -> Any:
    if not payload.startswith(_IN_BLOCK):
        return pickle.loads(payload)
    from weft.engines.local.memory import blocks

    handle, size = pickle.loads(memoryview(payload)[len(_IN_BLOCK) :])
    return pickle.loads(memoryview(blocks.attach(handle).buffer).cast("B")[:size])


def retain_borrowed() -> None:
    """Take references to the borrowed blocks that are still in use, before the answer is sent.
    Raises SegmentGone, Stalled."""
    blocks = sys.modules.get("weft.engines.local.memory.blocks")
    if blocks is not None:
        blocks.retain_borrowed()


def collect_garbage() -> None:
    """Free the blocks of what was loaded and is not used any more."""
    blocks = sys.modules.get("weft.engines.local.memory.blocks")
    if blocks is not None:
        blocks.collect_garbage()


def unpicklable_error(value: Any, name: str, error: BaseException) -> InvalidType:
    """Return the error that names the part of a value that cannot be pickled."""
    path, part = path_to_fault(value, name, _pickles)
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    return InvalidType(
        f"{path} is a {kind}, which cannot be sent to another process ({error}); leave it out, or "
        "make it inside the function"
    )


def _send_script_by_value() -> None:
    """Make cloudpickle treat `__mp_main__` as it treats `__main__`."""
    script = sys.modules.get("__mp_main__")
    # elsewhere multiprocessing has that name stand for `__main__` itself
    if script is not None and script.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(script)


def _pickles(value: Any) -> bool:
    try:
        pickling.dumps(value)
    except Exception as error:  # a class's own pickling may raise anything
        if is_interrupt(error):
            raise
        return False
    return True


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error raised while pickling does not mean that the value cannot be pickled:
    an interrupt, or weft's own error about memory."""
    interrupt = not isinstance(error, Exception) or by_signal_handler(error)
    return interrupt or isinstance(error, (WeftError, PayloadTooLarge))
