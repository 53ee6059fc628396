"""Calls by hand: what comes of servers that do not answer as they should."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support import within
from weft.engines.ray import rpc


@pytest.fixture
def serve() -> Iterator[Callable[[bytes | None], str]]:
    """Start servers that accept a call, read it, send what they are given, and close; or, given
    None, say nothing. Returns their addresses."""
    servers: list[tuple[socket.socket, threading.Thread]] = []

    def start(answer: bytes | None) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=_serve, args=(server, answer))
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server, thread in servers:
        thread.join()
        server.close()


def _serve(server: socket.socket, answer: bytes | None) -> None:
    caller, _ = server.accept()
    with caller:
        caller.recv(1 << 16)
        if answer is not None:
            caller.sendall(answer)
            caller.shutdown(socket.SHUT_WR)
        while caller.recv(1 << 16):  # until the caller has enough
            pass


def frame(kind: int, flags: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, 1]) + content


def trailers(status: str, message: str = "") -> bytes:
    fields = [("grpc-status", status), *([("grpc-message", message)] if message else [])]
    literals = (
        b"\x40" + bytes([len(name)]) + name.encode() + bytes([len(text)]) + text.encode()
        for name, text in fields
    )
    return frame(1, 0x5, b"".join(literals))


def call(address: str, timeout: float = 60) -> bytes:
    return rpc.call(address, "Service/Method", b"question", token="t" * 200, timeout=timeout)


def test_an_answer_in_pieces(serve: Callable[[bytes | None], str]) -> None:
    """Settings and pings of the server come first; the answer is in several frames."""
    first = frame(4, 0, b"") + frame(6, 0, b"12345678") + frame(1, 0x4, b"")
    body = b"\0\0\0\0\6answer"
    pieces = frame(0, 0, body[:7]) + frame(0, 0, body[7:])
    assert call(serve(first + pieces + trailers("0"))) == b"answer"
    assert call(serve(first + trailers("0"))) == b""


def test_an_error_is_told(serve: Callable[[bytes | None], str]) -> None:
    """A wrong token by its own class."""
    with pytest.raises(rpc.WrongToken, match="invalid or missing"):
        call(serve(trailers("16", "invalid or missing")))
    with pytest.raises(rpc.CallFailed, match="gRPC status 12 unknown method"):
        call(serve(trailers("12", "unknown method")))
    with pytest.raises(rpc.CallFailed, match="gRPC status unknown"):
        call(serve(frame(1, 0x5, b"")))
    with pytest.raises(rpc.CallFailed, match="it ended the call"):
        call(serve(frame(3, 0, b"\0\0\0\1")))


def test_what_is_no_grpc(serve: Callable[[bytes | None], str]) -> None:
    """It closes the connection, answers in another language, or says nothing."""
    for answer in (b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", b"SSH-2.0-x\r\n"):
        with pytest.raises(rpc.CallFailed, match="it does not speak gRPC"):
            call(serve(answer))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        call(serve(None), timeout=0.2)
    assert time.monotonic() - began < within(2)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        call(f"127.0.0.1:{port}")


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 256, 400, 16_510, 16_511, 20_000])
def test_lengths_of_texts(size: int) -> None:
    """As RFC 7541 has them: seven bits, then groups of seven."""
    encoded = rpc._text("x" * size)
    length, at = encoded[0], 1
    if length == 127:
        shift = 0
        while True:
            byte = encoded[at]
            length += (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                break
    assert (length, len(encoded) - at) == (size, size)
