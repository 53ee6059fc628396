"""What driver and hosts send each other: pickles, and the memory of large arrays beside them.

    here                                          there
    array of 64 KB or more  -> its own memory  -> an array over a copy of it
    everything else         -> pickled         -> unpickled

Ray moves the memory of arrays without pickling it. A receiver has memory of its own, which it may
write to if the sender could, and Ray's store is free again.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from weft._core.failures import Failure, describe, restore
from weft._core.shared import SharedArray
from weft.engines.local.pool.payload import Payload, Pieces, is_interrupt, unpicklable_error
from weft.errors import RemoteTraceback

if TYPE_CHECKING:
    from weft.engines.ray.arrays import Repeated

#: bytes from which on an array travels beside the pickle
LARGE = 1 << 16


class Packed(NamedTuple):
    """A value on its way to another host."""

    data: Any
    #: the memory of its large arrays, and whether nobody may write to it
    buffers: tuple[Any, ...] = ()
    readonly: tuple[bool, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(len(buffer) for buffer in self.buffers)

    def load(self, *, copy: bool = True) -> Any:
        """Return the value, in memory of its own; or, for a reader that changes nothing and passes
        it on, in that of Ray's store."""
        if not self.buffers:
            return pickle.loads(self.data)
        pairs = zip(self.buffers, self.readonly, strict=True)
        memory = _own if copy else _borrowed
        return pickle.loads(self.data, buffers=[memory(*pair) for pair in pairs])


def _own(buffer: Any, readonly: bool) -> Any:
    import numpy as np

    copy = np.array(buffer)
    copy.flags.writeable = not readonly
    return copy


def _borrowed(buffer: Any, readonly: bool) -> Any:
    """Return the same memory, which counts as writable if the sender's did: so that what is made of
    it is. Ray's store lets nobody write."""
    import ctypes

    if readonly:
        return buffer
    memory: Any = (ctypes.c_char * len(buffer)).from_address(buffer.ctypes.data)
    memory.owner = buffer
    return memory


class TooLarge(Exception):
    """Several values have more bytes than are sent together."""


class ByValue(Payload):
    """A payload for another host, which sees no memory of this one."""

    def __init__(
        self, *, most: int | None = None, beside: bool = True, repeated: Repeated | None = None
    ) -> None:
        """Keep large arrays `beside` the pickle, or in it; `repeated` ones travel by themselves."""
        super().__init__(most=most)
        self._repeated = repeated
        self._beside: list[pickle.PickleBuffer] = []
        self._keeps = beside

    @property
    def keep_buffer(self) -> Callable[[pickle.PickleBuffer], bool] | None:  # type: ignore[override]
        """Return what takes the memory of arrays. An attribute would keep them from being freed:
        it refers to this object."""
        return self._keep if self._keeps else None

    def dump_by(self, kind: Any, value: Any) -> None:
        self._beside.clear()
        self.shared = 0
        super().dump_by(kind, value)

    def packed(self) -> Packed:
        """Return what is to be sent."""
        if not self._beside:
            return Packed(self.data)
        import numpy as np

        raw = [buffer.raw() for buffer in self._beside]
        beside = tuple(np.frombuffer(one, np.uint8) for one in raw)
        return Packed(self.data, beside, tuple(one.readonly for one in raw))

    def reducers(self) -> dict[type, Callable[[Any], Any]]:
        if "numpy" not in sys.modules:
            return {}
        from weft.engines.local.pool import payload_arrays

        shared = [kind for kind in payload_arrays.KINDS if kind.__module__.startswith("weft.")]
        reducers: dict[type, Callable[[Any], Any]] = dict.fromkeys(shared, _as_plain)
        if "torch" in sys.modules:
            reducers[sys.modules["torch"].Tensor] = payload_arrays.reduce_tensor
        return reducers if self._repeated is None else self._repeated.reducers(reducers)

    def put(self, pieces: Pieces) -> None:
        self.data = b"".join(pieces.written)
        self.pickled = len(self.data)
        self._check()

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Take the memory of an array. Return whether it stays in the pickle."""
        size = memoryview(buffer).nbytes
        if size < LARGE:
            return True
        self._beside.append(buffer)
        self.shared += size
        self._check()
        return False

    def _check(self) -> None:
        if self._most is not None and self.pickled + self.shared > self._most:
            raise TooLarge


def _as_plain(array: Any) -> Any:
    import numpy as np

    return array.view(np.ndarray).__reduce_ex__(5)


def pack_function(function: Callable[..., Any]) -> tuple[Packed, set[str]]:
    """Pack a function; return also the names of the modules that it refers to. Raises
    InvalidType."""
    payload = ByValue()
    try:
        payload.dump_by_value(function)
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise unpicklable_error(function, "fun", error) from error
    return payload.packed(), payload.modules


def pack_values(
    values: Any, most: int | None = None, repeated: Repeated | None = None
) -> tuple[Packed, set[str]]:
    """Pack values; return also the names of the modules that they refer to. Raises TooLarge if they
    have more than `most` bytes besides `repeated` arrays, and whatever pickling raises."""
    payload = ByValue(most=most, repeated=repeated)
    try:
        if payload.dump(values):
            return payload.packed(), payload.modules
    except TooLarge:
        raise
    except Exception as error:  # a class's own pickling may raise anything
        if is_interrupt(error):
            raise
    payload.dump_by_value(values)
    return payload.packed(), payload.modules


def sendable(array: Any) -> Any:
    """Return an array as Ray's store can have it without a copy besides that one, or packed."""
    import numpy as np

    plain = array.view(np.ndarray) if isinstance(array, SharedArray) else array
    contiguous = plain.flags.c_contiguous or plain.flags.f_contiguous
    if type(plain) is np.ndarray and contiguous and not plain.dtype.hasobject:
        return plain
    return pack_values(array)[0]


class Sent(NamedTuple):
    """An exception as data, so that none flies through Ray, which would change its class."""

    failure: Failure
    #: the worker's traceback and place; None for an error of weft's own
    cause: tuple[str, str, int | None, str] | None
    notes: tuple[str, ...] = ()


def send_error(error: BaseException, host: str = "") -> Sent:
    """Return an exception as data, with the remote traceback that is its cause."""
    cause = error.__cause__
    notes = tuple(getattr(error, "__notes__", ()))
    if not isinstance(cause, RemoteTraceback):
        return Sent(describe(error), None, notes)
    where = f"{cause.where} on {host}" if host else cause.where
    return Sent(describe(error), (cause.text, where, cause.item, cause.host), notes)


def receive_error(sent: Sent) -> Exception:
    """Return the exception with its class and its cause."""
    text, where, item, host = sent.cause or ("", "", None, "")
    error = restore(sent.failure._replace(text=text), where, item, host=host)
    if sent.cause is None:
        error.__cause__ = None
    for note in sent.notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    return error
