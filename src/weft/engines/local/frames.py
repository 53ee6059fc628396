"""Whole messages over a stream socket: eight bytes of length, then the pickle.

A blocking socket (the worker's) makes `send` and `receive` wait. With one that does not block (the
driver's) what cannot be sent stays for `flush`, and `receive` returns None while a message is not
whole.
"""

from __future__ import annotations

import pickle
import socket
import struct

from weft._core.work import Message, as_tuple, from_tuple
from weft.engines.local.channel import Closed

_LENGTH = struct.Struct("=Q")
_READ = 1 << 16


class Frames:
    """One end of a conversation between a driver and a worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._incoming = bytearray()
        self._outgoing = memoryview(b"")
        self._missing = _LENGTH.size
        #: whether a signal handler raised in the middle of something, so that bytes may be lost
        self.broken = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *messages: Message) -> None:
        """Send messages one after the other, or as much as goes. Raises Closed."""
        frames = [bytes(self._outgoing)]
        for message in messages:
            data = pickle.dumps(as_tuple(message), pickle.HIGHEST_PROTOCOL)
            frames += (_LENGTH.pack(len(data)), data)
        self._outgoing = memoryview(b"".join(frames))
        self.flush()

    def flush(self) -> bool:
        """Go on sending; whether everything is sent. Raises Closed."""
        self._begin()
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise Closed(str(error)) from None
        self.broken = False
        return not self._outgoing

    @property
    def unsent(self) -> bool:
        return bool(self._outgoing)

    def receive(self) -> Message | None:
        """The next message; None if it is not here yet. Raises Closed."""
        self._begin()
        while self._missing > 0:
            try:
                data = self._socket.recv(max(_READ, self._missing))
            except BlockingIOError:
                self.broken = False
                return None
            except ConnectionError as error:
                raise Closed(str(error)) from None
            if not data:
                raise Closed("the other end closed the connection")
            self._incoming += data
            self._count()
        end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
        data = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        self._count()
        self.broken = False
        return from_tuple(pickle.loads(data))

    def _begin(self) -> None:
        """Note that something is under way. What was interrupted is not gone on with: bytes that
        were sent would be sent again."""
        if self.broken:
            raise Closed("it was interrupted in the middle of a message")
        self.broken = True

    def _count(self) -> None:
        """How many bytes are missing until the next message is whole; 0 or less if it is."""
        have = len(self._incoming)
        wanted = _LENGTH.size
        if have >= wanted:
            wanted += _LENGTH.unpack_from(self._incoming)[0]
        self._missing = wanted - have

    def close(self) -> None:
        self._socket.close()
