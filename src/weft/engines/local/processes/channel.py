"""Messages and descriptors between processes of one user, over private Unix sockets.

Addresses are in the abstract namespace: there is no file to leave behind, and
the kernel frees the name with its last holder. Who may talk is decided by the
kernel's word on the other end (SO_PEERCRED), checked on both ends before a
byte is read. Sockets keep message boundaries, so a message is one send.

What crosses a process border: named tuples, carried as JSON.

JSON and not pickle, because these are read before a peer has been checked.
Arrays never travel in messages; descriptors go beside them (see `channel.py`
of the local engine).

    joining a group             attaching a shared array
    member      rank 0          process     keeper
    Hello   ->                  Attach  ->
            <-  Welcome                 <-  Attached (+ descriptor) | Gone
            <-  Rejected        Retain     ->
                                        <-  Retained | Gone
                                Release | ReleaseInFlight ->

    starting workers
    driver      fork server
    Start   ->                  (+ descriptors: its connection, its stdout and stderr)
            <-  Started         (+ descriptor: tells when it ends)
            <-  Ended
            <-  Pool            (behind a named pipe: the first message)
    Close   ->
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from weft.engines.local.processes.linux import translate_os_error
from weft.errors import Refused

_LARGEST = 1 << 15

_MOST_DESCRIPTORS = 8


class Closed(ConnectionError):
    """The other end is gone. Callers translate it into what that means for them."""


class Channel:
    """One end of a conversation with a process of the same user."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        try:
            pid, uid, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
        except OSError:
            connection.close()
            raise
        #: the process at the other end, in this process's numbering
        self.pid = pid
        if uid != os.geteuid():
            connection.close()
            raise Refused(
                f"process {pid} of user {uid} tried to talk to this one of user {os.geteuid()}; "
                "weft connects processes of one user only"
            )

    @classmethod
    def connect(cls, address: str) -> Channel:
        """Raises ConnectionRefusedError while nobody listens there."""
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise translate_os_error(error) from error
        try:
            connection.connect(_abstract(address))
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        packed = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else []
        try:
            self._socket.sendmsg([encode(message)], ancillary)
        except ConnectionError as error:
            raise Closed(str(error)) from None

    def send_now(self, message: Message) -> bool:
        """Send without blocking and without raising; False if it could not be sent.

        Safe in a finalizer: one system call, no locks.
        """
        try:
            self._socket.send(encode(message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the other end is gone, and so is its interest
        return True

    def receive(self, *expected: type[Message]) -> tuple[Any, list[int]]:
        """The next message, one of the expected kinds, and the descriptors that came with it.

        Raises Closed at the end, Refused for any other message.
        """
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _LARGEST, room, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError as error:
            raise Closed(str(error)) from None
        descriptors = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) - len(payload) % 4])
        try:
            if flags & socket.MSG_CTRUNC:
                raise translate_os_error(OSError(errno.EMFILE, "descriptors were lost on the way"))
            if not data:
                raise Closed("the other end closed the connection")
            return decode(data, *expected), list(descriptors)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def wait(self, deadline: float, watched: int = -1) -> bool:
        """Wait for a message; False at the deadline. Raises Closed if pidfd `watched` is first."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if watched >= 0:
            poll.register(watched, select.POLLIN)
        remaining = max(0.0, deadline - time.monotonic())
        ready = {fd for fd, _ in poll.poll(min(remaining, 1e6) * 1000)}
        if self._socket.fileno() in ready:
            return True
        if ready:
            raise Closed("the process at the other end has ended")
        return False

    def close(self) -> None:
        self._socket.close()


class Listener:
    """A private address at which processes of the same user may connect."""

    def __init__(self, address: str) -> None:
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise translate_os_error(error) from error
        try:
            self._socket.bind(_abstract(address))
            self._socket.listen(1024)
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            raise Refused(
                f"the address {address!r} is taken by another process: {error.strerror}"
            ) from None

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Channel | None:
        """The next caller, or None if there is none or it was turned away."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError as error:
            raise translate_os_error(error) from error
        connection.setblocking(True)
        try:
            return Channel(connection)
        except (Refused, OSError):
            return None

    def close(self) -> None:
        self._socket.close()


def _abstract(address: str) -> bytes:
    return b"\0weft/" + address.encode()


class Hello(NamedTuple):
    """A rank says who it is; its pid the kernel says."""

    version: str
    job: str
    rank: int
    size: int
    start: int


class Welcome(NamedTuple):
    """Rank 0 says that all are here; the job's memory comes beside it."""

    #: the process that started the ranks and publishes how they end; 0 where there is none
    launcher: int


class Rejected(NamedTuple):
    """Rank 0 says why there is no group, or why the caller is not let in."""

    #: the name of the error to raise
    error: str
    reason: str
    #: the ranks that are missing or lost
    ranks: list[int]


class Attach(NamedTuple):
    """A process asks for the memory behind a shared array."""

    #: counts the questions of a process; an answer repeats it
    request: int
    block: int
    #: the in_flight to release, which kept the memory since the array was pickled; 0 for none
    in_flight: int


class Retain(NamedTuple):
    """A process about to pickle somebody's shared array asks to keep it until it is attached."""

    request: int
    block: int


class Retained(NamedTuple):
    """The keeper agrees."""

    request: int
    in_flight: int


class Attached(NamedTuple):
    """The keeper says where the block lies; the segment's descriptor comes beside it."""

    request: int
    block: int
    segment: int
    size: int
    offset: int
    length: int


class Gone(NamedTuple):
    """The keeper no longer has the block."""

    request: int


class Release(NamedTuple):
    """A process has dropped its last views of what these requests attached. Not answered."""

    requests: list[int]


class ReleaseInFlight(NamedTuple):
    """A process that was given a reference to a block sees it already. Not answered."""

    block: int
    in_flight: int


class Start(NamedTuple):
    """A driver asks for a worker; its end of their connection and its outputs come beside it."""

    worker: int


class Started(NamedTuple):
    """The fork server has one; a pidfd comes beside it."""

    worker: int
    pid: int


class Ended(NamedTuple):
    """A worker has ended."""

    worker: int
    #: an exit code, or minus a signal
    code: int
    #: the index of the last item that it began; -1 if it began none
    item: int
    #: the most memory it had, in bytes
    memory: int
    #: 1 if the kernel killed it for want of memory
    out_of_memory: int


class Pool(NamedTuple):
    """A server behind a named pipe says who it is, and how busy."""

    version: str
    python: str
    pid: int
    #: workers for one driver, at most
    size: int
    #: at this moment
    drivers: int
    workers: int


class Close(NamedTuple):
    """Somebody wants a server behind a named pipe to end."""


Message = (
    Hello
    | Welcome
    | Rejected
    | Attach
    | Retain
    | Retained
    | Attached
    | Gone
    | Release
    | ReleaseInFlight
    | Start
    | Started
    | Ended
    | Pool
    | Close
)


def _written(kind: type[Any], name: str) -> str:
    """The type of a field, as it is written above."""
    written = kind.__annotations__[name]
    return str(getattr(written, "__forward_arg__", written))


#: each kind by its name, with the types of its fields
_KINDS: dict[str, tuple[type[Any], tuple[type[Any], ...]]] = {
    kind.__name__: (
        kind,
        tuple({"int": int, "str": str}.get(_written(kind, name), list) for name in kind._fields),
    )
    for kind in get_args(Message)
}


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, *message]).encode()


def decode(data: bytes, *expected: type[Message]) -> Any:
    """The message in `data`, one of the expected kinds; anything else is refused."""
    try:
        name, *values = json.loads(data)
        kind, types = _KINDS[name]
        if tuple(map(type, values)) != types:
            raise TypeError(name)
    except (ValueError, TypeError, KeyError):
        wanted = " or ".join(kind.__name__ for kind in expected)
        raise Refused(f"a peer sent {data[:60]!r} where a message {wanted} was expected") from None
    if kind not in expected:
        wanted = " or ".join(kind.__name__ for kind in expected)
        raise Refused(f"a peer sent {name} where {wanted} was expected")
    return kind(*values)
