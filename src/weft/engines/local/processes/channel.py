"""Messages and descriptors between processes of one user, over private Unix sockets.

`Channel`, `Listener`: addresses are in the abstract namespace, so there is no file to leave behind,
and the kernel frees the name when its last socket is closed. Both ends check the user of the other
(SO_PEERCRED) before they read a byte. Sockets keep message boundaries, so a message is one send.

Messages: named tuples, carried as JSON and not as pickles, because they are read before it is known
which program the peer is. Arrays never travel in messages; descriptors travel beside them.

    joining a group             attaching a shared array
    member      rank 0          process     segment server
    Hello   ->                  Attach  ->
            <-  Welcome                 <-  Attached (+ descriptor) | Gone
            <-  Rejected        Retain  ->
                                        <-  Retained | Gone
                                Release | ReleaseInFlight  ->

    memory on devices
    every rank  every other
    DeviceMemory (+ descriptor)  ->

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
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from weft.engines.local.processes.linux import translate_os_error
from weft.errors import Refused

_LARGEST = 1 << 15
_MOST_DESCRIPTORS = 8


class Closed(ConnectionError):
    """The other end is gone. Callers translate it into an error of their own."""


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
        """Connect to a listener. Raises ConnectionRefusedError while nobody listens there."""
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
        """Send a message and descriptors. Raises Closed."""
        packed = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else []
        try:
            self._socket.sendmsg([encode(message)], ancillary)
        except ConnectionError as error:
            raise Closed(str(error)) from None

    def send_now(self, message: Message) -> bool:
        """Send without blocking and without raising. Return False if the socket was full. Safe in a
        finalizer: one system call, no locks."""
        try:
            self._socket.send(encode(message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the other end is gone and needs no message
        return True

    def receive(self, *expected: type[Message]) -> tuple[Any, list[int]]:
        """Return the next message, one of the expected kinds, and its descriptors. Raises Closed at
        the end of the connection, Refused for any other message."""
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
        """Wait for a message. Return False at the deadline. Raises Closed if the process of the
        pidfd `watched` ends first."""
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
        """Return the next connection; None if there is none or it was refused."""
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
    """A rank says who it is; its pid comes from the kernel."""

    version: str
    job: str
    rank: int
    size: int
    start: int


class Welcome(NamedTuple):
    """Rank 0 says that all ranks are there; the descriptor of their memory comes beside it."""

    #: the process that started the ranks and publishes how they end; 0 where there is none
    launcher: int


class Rejected(NamedTuple):
    """Rank 0 says why there is no group, or why the sender may not join it."""

    #: the name of the error to raise
    error: str
    reason: str
    #: the ranks that are missing or lost
    ranks: list[int]


class Attach(NamedTuple):
    """A process asks for a block, and for a remote reference to it."""

    #: numbers the questions of a process; the answer repeats it
    request: int
    block: int
    #: the in-flight reference to release, which has held the block since its export; 0 for none
    in_flight: int


class Retain(NamedTuple):
    """A process that exports a block of another asks the owner for an in-flight reference."""

    request: int
    block: int


class Retained(NamedTuple):
    """The owner has added the in-flight reference."""

    request: int
    in_flight: int


class Attached(NamedTuple):
    """The server says where the block lies; the segment's descriptor comes beside it."""

    request: int
    block: int
    segment: int
    size: int
    offset: int
    length: int


class Gone(NamedTuple):
    """The server no longer has the block."""

    request: int


class Release(NamedTuple):
    """A process has dropped its last views of the blocks of these requests. Not answered."""

    requests: list[int]


class ReleaseInFlight(NamedTuple):
    """A process has received a handle to a block that it maps already. Not answered."""

    block: int
    in_flight: int


class DeviceMemory(NamedTuple):
    """A rank's memory on a device; its descriptor, which does not tell the size, comes beside."""

    rank: int
    size: int


class Start(NamedTuple):
    """A driver asks for a worker; its socket, stdout and stderr come beside it."""

    worker: int


class Started(NamedTuple):
    """The fork server has started a worker; its pidfd comes beside it."""

    worker: int
    pid: int


class Ended(NamedTuple):
    """A worker has ended."""

    worker: int
    #: an exit code, or a negative signal
    code: int
    #: the index of the last item that it began; -1 if it began none
    item: int
    #: its peak memory in bytes
    memory: int
    #: 1 if the kernel killed it because memory ran out
    out_of_memory: int


class Pool(NamedTuple):
    """A fork server behind a named pipe describes itself."""

    version: str
    python: str
    pid: int
    #: the most workers that one driver gets
    size: int
    #: at this moment, as `workers`
    drivers: int
    workers: int


class Close(NamedTuple):
    """Somebody asks a fork server behind a named pipe to end."""


Joining = Hello | Welcome | Rejected
Attaching = Attach | Retain | Retained | Attached | Gone | Release | ReleaseInFlight
Starting = Start | Started | Ended | Pool | Close
Message = Joining | Attaching | Starting | DeviceMemory


#: each kind of message by its name, with the types of its fields
_KINDS: dict[str, tuple[type[Any], tuple[type[Any], ...]]] = {
    kind.__name__: (kind, tuple(get_origin(t) or t for t in get_type_hints(kind).values()))
    for kind in get_args(Message)
}


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return json.dumps([type(message).__name__, *message]).encode()


def decode(data: bytes, *expected: type[Message]) -> Any:
    """Return the message in `data`, one of the expected kinds. Raises Refused for anything else."""
    wanted = " or ".join(kind.__name__ for kind in expected)
    try:
        name, *values = json.loads(data)
        kind, types = _KINDS[name]
        if tuple(map(type, values)) != types:
            raise TypeError(name)
    except (ValueError, TypeError, KeyError):
        raise Refused(f"a peer sent {data[:60]!r} where a message {wanted} was expected") from None
    if kind not in expected:
        raise Refused(f"a peer sent {name} where {wanted} was expected")
    return kind(*values)
