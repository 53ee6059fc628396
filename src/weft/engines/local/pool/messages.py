"""What a driver and its workers say to each other.

    driver               worker
    Settings       ->                  takes over folder, paths, environment, threads
    CacheFunction  ->                  keeps a function under its digest
    Work           ->                  calls it on some consecutive items
                   <-  Done            the results in order, and what failed
                   <-  Unreadable      the function or the items could not be loaded there
                   <-  Stopped         a SIGINT of the driver's ended it
                   <-  Logged          what was logged meanwhile
    Cancel         ->                  gives up the memory of its last answer
                   <-  CancelAcknowledged       it has answered all that came before
    DropFunction   ->                  drops a function, and what it holds

These are pickled, so they pass only between processes that know each other. Functions, items and
results are bytes here, packed by the engine: it knows which arrays need not be in them.

Whole messages over a stream socket: eight bytes of length, then the pickle.

A blocking socket (the worker's) makes `send` and `receive` wait. With one that does not block (the
driver's) what cannot be sent stays for `flush`, and `receive` returns None while a message is not
whole.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any, NamedTuple

from weft._core.failures import Failure
from weft.engines.local.processes.channel import Closed
from weft.engines.local.processes.output import Logged

#: added to the index of a chunk's first item while a worker loads the chunk
LOADING = 1 << 62


class Settings(NamedTuple):
    """How a worker sees the world: as its driver does."""

    folder: str
    paths: list[str]
    threads: int
    #: from which level on the driver wants to hear what is logged
    log_level: int
    #: None: leave it as it is
    environment: dict[str, str] | None


class CacheFunction(NamedTuple):
    digest: bytes
    function: bytes


class DropFunction(NamedTuple):
    digest: bytes


class Work(NamedTuple):
    #: which function
    digest: bytes
    #: the index of the first item
    first: int
    items: bytes
    seed: int | None
    #: whether the items after one that fails are run
    keep_going: bool


class Done(NamedTuple):
    #: the results; None in the place of an item that failed. Fewer than items where one failed and
    #: the rest is not run
    values: bytes
    #: the position of each item that failed, and how
    failures: list[tuple[int, Failure]]
    #: how long the calls took, all together
    seconds: float
    #: bytes of arrays that went through shared memory
    shared: int


class Unreadable(NamedTuple):
    failure: Failure
    #: or about the items
    about_function: bool


class Stopped(NamedTuple):
    """The driver has interrupted it and wants no results."""


class Cancel(NamedTuple):
    """The driver wants no more results: something failed, or it was interrupted, perhaps before it
    had sent Work or after it had received the answer. An answer may still come, and
    CancelAcknowledged after it."""


class CancelAcknowledged(NamedTuple):
    """All that came before is answered, and the memory of the last answer is given up."""


#: what is said, by the number that stands for its kind on the way
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
)

_NUMBERS: dict[type, int] = {kind: number for number, kind in enumerate(KINDS)}


def as_tuple(message: Message) -> tuple[Any, ...]:
    """A message as a plain tuple, which pickles three times faster."""
    return (_NUMBERS[type(message)], *message)


def from_tuple(values: tuple[Any, ...]) -> Message:
    """The mirror of `as_tuple`."""
    return KINDS[values[0]]._make(values[1:])


Answer = Done | Unreadable | Stopped

Message = (
    Settings | CacheFunction | DropFunction | Work | Answer | Cancel | CancelAcknowledged | Logged
)

_LENGTH = struct.Struct("=Q")

_READ = 1 << 16


class Frames:
    """One end of a conversation between a driver and a worker.

    A signal handler that raises, wherever it does, costs at most the message that was being sent or
    received, and no bytes. Python runs handlers only between steps of its own, and `extend` and
    `map` are C: a call of the socket and the note of what it did are one step.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        #: what has come of the next messages
        self._incoming: list[bytes] = []
        #: what is to be sent, and how many bytes of it the socket has taken each time
        self._outgoing: tuple[memoryview, list[int]] = memoryview(b""), []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *messages: Message) -> None:
        """Send messages one after the other, or as much as goes. Raises Closed."""
        frames: list[bytes | memoryview] = [self._left()]
        for message in messages:
            data = pickle.dumps(as_tuple(message), pickle.HIGHEST_PROTOCOL)
            frames += (_LENGTH.pack(len(data)), data)
        self._outgoing = memoryview(b"".join(frames)), []
        self.flush()

    def flush(self) -> bool:
        """Go on sending; whether everything is sent. Raises Closed."""
        self._check_open()
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
        return bool(self._left())

    def _left(self) -> memoryview:
        data, taken = self._outgoing
        return data[sum(taken) :]

    def receive(self) -> Message | None:
        """The next message; None if it is not here yet. Raises Closed."""
        self._check_open()
        while (missing := self._missing()) > 0:
            try:
                self._incoming.extend(map(self._socket.recv, (max(_READ, missing),)))
            except BlockingIOError:
                return None
            except ConnectionError as error:
                raise Closed(str(error)) from None
            if not self._incoming[-1]:
                raise Closed("the other end closed the connection")
        data = b"".join(self._incoming)
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        message = from_tuple(pickle.loads(data[_LENGTH.size : end]))
        self._incoming = [data[end:]]
        return message

    def _missing(self) -> int:
        """How many bytes are missing until the next message is whole; 0 or less if it is."""
        have = sum(map(len, self._incoming))
        wanted = _LENGTH.size
        if have >= wanted:
            if len(self._incoming[0]) < wanted:  # the length itself has come in pieces
                self._incoming = [b"".join(self._incoming)]
            wanted += _LENGTH.unpack_from(self._incoming[0])[0]
        return wanted - have

    def _check_open(self) -> None:
        if self._socket.fileno() < 0:
            raise Closed("it was closed here")

    def close(self) -> None:
        self._socket.close()
