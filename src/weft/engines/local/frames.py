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
