"""What a driver and its workers send to each other, and its framing.

    driver               worker
    Settings       ->                       takes over the driver's state, and its share of cores
    Modules        ->                       compares its modules with the driver's
                   <-  Outdated             attributes that differ
    Update         ->                       sets attributes of modules
    CacheFunction  ->                       caches a function under its digest
    Work           ->                       calls it on a chunk of items
                   <-  Begun                it begins an item, where the driver times it
                   <-  Done                 the results in order, and the failures
                   <-  Unreadable           the function or the items could not be loaded
                   <-  Stopped              a SIGINT ended it, with the results that it had
                   <-  Logged, Warned       a log record, a warning, at any time
    Cancel         ->                       releases the memory of its last answer
                   <-  CancelAcknowledged   all that came before is answered
    DropFunction   ->                       drops a function, and the memory that it holds

Messages are pickled, so they pass only between processes that trust each other. Functions, items
and results are bytes in them: the data of payloads (payload.py), whose large arrays travel
separately.

`Frames` sends whole messages over a stream socket: eight bytes of length, then the pickle. On a
blocking socket (the worker's) `send` and `receive` wait, `receive` perhaps for a limited time. On
one that does not block (the driver's) what cannot be sent stays for `flush`, and `receive` returns
None while a message is incomplete.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from typing import Any, NamedTuple

from weft._core.failures import Failure
from weft.engines.local.processes.channel import Closed
from weft.engines.local.processes.output import Logged

#: added to the index of a chunk's first item while a worker loads the chunk
LOADING = 1 << 62

#: in the place of that index: the worker has no chunk
NO_ITEM = (1 << 64) - 1


class Settings(NamedTuple):
    """The driver's settings, which a worker takes over."""

    #: a State (driver_state.py), pickled
    state: bytes
    #: how many cores it may use
    threads: int
    #: the one GPU that it sees; None: those that the driver sees
    gpu: str | None
    #: seconds without a message after which the worker ends; None: never
    idle: float | None


class Modules(NamedTuple):
    """The user's modules that the next function uses."""

    #: of every attribute, by module and name
    digests: dict[str, dict[str, bytes]]


class Outdated(NamedTuple):
    """The answer to Modules if some are not the driver's. The worker waits for Update."""

    #: the names of those that differ, by module
    attributes: dict[str, list[str]]


class Update(NamedTuple):
    """Describe what has to be changed in a worker's modules."""

    #: by module and name: the new value, and whether the old object is to have it too; pickled
    values: bytes
    #: of those that can be compared
    digests: dict[tuple[str, str], bytes]
    deleted: list[tuple[str, str]]
    #: why the values could not be sent
    failure: Failure | None


class Warned(NamedTuple):
    """A warning that was shown in a worker."""

    #: the Warning, pickled
    message: bytes
    filename: str
    lineno: int
    #: the name of the module
    module: str | None


class CacheFunction(NamedTuple):
    """A function to be cached."""

    digest: bytes
    function: bytes


class DropFunction(NamedTuple):
    """A function that is not needed any more."""

    digest: bytes
    #: whether so much is freed with it that the system should have it back
    large: bool = False


class Work(NamedTuple):
    """A chunk: consecutive items for one function."""

    #: of the function
    digest: bytes
    #: the index of the first item
    first: int
    items: bytes
    seed: int | None
    #: whether the items after one that fails are run
    keep_going: bool
    #: whether the driver is told when its one item begins
    timed: bool = False
    #: whether results are kept at a deadline, whatever the function does then
    rescued: bool = False


class Begun(NamedTuple):
    """The one item of a chunk begins."""

    #: when, on the monotonic clock, which all processes of a host share
    at: float


class Done(NamedTuple):
    """The answer to Work."""

    #: the results, None for an item that failed; fewer than the items where the rest was not run:
    #: one failed, or they took long
    values: bytes
    #: the position of each item that failed, and its failure
    failures: list[tuple[int, Failure]]
    #: the duration of all calls together
    seconds: float
    #: bytes of arrays that went through shared memory
    shared: int


class Unreadable(NamedTuple):
    """The answer to Work that could not be loaded."""

    failure: Failure
    #: whether it was the function, and not the items
    about_function: bool


class Stopped(NamedTuple):
    """The answer to Work that was interrupted: Done, of the items before that which was running. If
    the others are not run when one fails, nobody wants their results, and there are none."""

    values: bytes
    failures: list[tuple[int, Failure]]
    seconds: float
    shared: int
    #: whether the function runs on
    stuck: bool = False


class Cancel(NamedTuple):
    """The driver needs no more results: something failed, or it was interrupted, perhaps before it
    sent Work or after it received the answer. The worker may still send an answer, and then
    CancelAcknowledged."""


class CancelAcknowledged(NamedTuple):
    """All that came before is answered, and the memory of the last answer is released."""


#: the kinds of messages; a pickle holds the position in this tuple
KINDS = (
    Settings,
    CacheFunction,
    DropFunction,
    Work,
    Done,
    Unreadable,
    Stopped,
    Cancel,
    CancelAcknowledged,
    Logged,
    Begun,
    Modules,
    Outdated,
    Update,
    Warned,
)

_NUMBERS: dict[type, int] = {kind: number for number, kind in enumerate(KINDS)}


def as_tuple(message: Message) -> tuple[Any, ...]:
    """Return a message as a plain tuple, which pickles three times faster."""
    return (_NUMBERS[type(message)], *message)


def from_tuple(values: tuple[Any, ...]) -> Message:
    """Return the message of a tuple: the inverse of `as_tuple`."""
    return KINDS[values[0]]._make(values[1:])


Answer = Done | Unreadable | Stopped

#: what the worker sends besides answers
Aside = Logged | Warned | Outdated

Message = (
    Settings
    | Modules
    | Update
    | CacheFunction
    | DropFunction
    | Work
    | Begun
    | Answer
    | Aside
    | Cancel
    | CancelAcknowledged
)

_LENGTH = struct.Struct("=Q")

_TIMEVAL = struct.Struct("ll")

_READ = 1 << 16


class Frames:
    """One end of the connection between a driver and a worker.

    A signal handler that raises loses at most the message that was being sent or received, and
    never a part of one. Python runs handlers only between bytecodes, and `extend` and `map` are C:
    a call of the socket and the record of what it did are one step.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        #: what has been received of the next messages
        self._incoming: list[bytes] = []
        #: what is to be sent, and how many bytes of it the socket has taken each time
        self._outgoing: tuple[memoryview, list[int]] = memoryview(b""), []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *messages: Message) -> None:
        """Send messages in order, or as much of them as the socket takes. Raises Closed."""
        frames: list[bytes | memoryview] = [self._left()] if self.unsent else []
        for message in messages:
            data = pickle.dumps(as_tuple(message), pickle.HIGHEST_PROTOCOL)
            frames += (_LENGTH.pack(len(data)), data)
        self._outgoing = memoryview(b"".join(frames)), []
        self.flush()

    def flush(self) -> bool:
        """Go on sending. Return whether everything is sent. Raises Closed."""
        self._validate_open()
        _, taken = self._outgoing
        try:
            while left := self._left():
                taken.extend(map(self._socket.send, (left,)))
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise Closed(str(error)) from None
        self._outgoing = memoryview(b""), []  # it may be large
        return True

    @property
    def unsent(self) -> bool:
        return len(self._outgoing[0]) > 0

    def _left(self) -> memoryview:
        data, taken = self._outgoing
        return data[sum(taken) :]

    def limit_receiving(self, seconds: float | None) -> None:
        """Make `receive` on a blocking socket return None if so long nothing has come."""
        whole, part = divmod(seconds or 0.0, 1.0)
        limit = _TIMEVAL.pack(int(whole), int(part * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    @property
    def incomplete(self) -> bool:
        """Return whether a part of the next message has come."""
        return any(self._incoming)

    def receive(self) -> Message | None:
        """Return the next message; None if it is incomplete. Raises Closed."""
        self._validate_open()
        while (missing := self._missing()) > 0:
            try:
                self._incoming.extend(map(self._socket.recv, (max(_READ, missing),)))
            except BlockingIOError:
                return None
            except ConnectionError as error:
                raise Closed(str(error)) from None
            if not self._incoming[-1]:
                raise Closed("the other end closed the connection")
        data = self._incoming[0] if len(self._incoming) == 1 else b"".join(self._incoming)
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        message = from_tuple(pickle.loads(data[_LENGTH.size : end]))
        self._incoming = [data[end:]] if len(data) > end else []
        return message

    def _missing(self) -> int:
        """Return how many bytes the next message still lacks; 0 or less if it is complete."""
        have = sum(map(len, self._incoming))
        wanted = _LENGTH.size
        if have >= wanted:
            if len(self._incoming[0]) < wanted:  # the length itself came in pieces
                self._incoming = [b"".join(self._incoming)]
            wanted += _LENGTH.unpack_from(self._incoming[0])[0]
        return wanted - have

    def _validate_open(self) -> None:
        if self._socket.fileno() < 0:
            raise Closed("it was closed here")

    def shut_down(self) -> None:
        """End the connection: the other end is closed even if forked children have copies of this
        one."""
        with contextlib.suppress(OSError):  # it is closed already, at either end
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
