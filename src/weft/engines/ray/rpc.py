"""One call of a Ray process's gRPC interface, in milliseconds, with an answer in any case.

Ray's own client retries a wrong key for twenty seconds and waits for ever for some answers, keeps
one key per process, and cannot be told how long it may take. This one opens a connection, says

    client                               server
      preface, SETTINGS, WINDOW  ───>      so that any answer fits without further permission
      HEADERS  method and key    ───>
      DATA     the question      ───>
                                 <───  HEADERS, DATA: the answer
                                 <───  HEADERS: grpc-status, and grpc-message if that is not 0

(HTTP/2, RFC 9113, and HPACK, RFC 7541, of which this needs literals only), and closes it. Questions
fit into one frame: 16,384 bytes at most.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

#: kinds of HTTP/2 frames
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACKNOWLEDGE, _END_STREAM, _END_HEADERS = 1, 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: bytes that the server may send: the most that HTTP/2 allows
_LARGEST_WINDOW = 2**31 - 1
_INITIAL_WINDOW_SIZE, _USUAL_WINDOW = 4, 65535
#: of gRPC: the caller has not proved who it is
_UNAUTHENTICATED = 16
#: the variables by which Ray encrypts: whether, and this machine's certificate, its key, and the
#: certificate of the authority
TLS = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_USE_TLS = TLS[0]
#: HPACK: a literal field that is not indexed, and the largest number in seven bits
_LITERAL, _SEVEN_BITS = b"\x10", 127


class WrongToken(Exception):
    """The server has another token, or expects one."""


class CallFailed(Exception):
    """The server answered with an error, or in a way that is no gRPC."""


def call(
    address: str, method: str, question: bytes = b"", *, token: str | None, timeout: float
) -> bytes:
    """Return the server's answer to a question, both as protobuf encodes them.

    Raises WrongToken, CallFailed; OSError, as socket does: ConnectionRefusedError, TimeoutError.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + timeout
    with socket.create_connection((host, int(port)), timeout) as plain:
        connection = _encrypt(plain, host) if os.environ.get(_USE_TLS) == "1" else plain
        connection.sendall(_request(address, method, question, token))
        return _answer(_frames(connection, until))


def _encrypt(plain: socket.socket, host: str) -> socket.socket:
    """Return the connection over TLS, with the certificates that Ray uses: each side shows one that
    the authority has signed, the server's with its address."""
    import ssl

    certificate, key, authority = (os.environ.get(name) for name in TLS[1:])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if certificate:
        context.load_cert_chain(certificate, key)
    if authority:
        context.load_verify_locations(authority)
    return context.wrap_socket(plain, server_hostname=host)


def _request(address: str, method: str, question: bytes, token: str | None) -> bytes:
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/ray.rpc.{method}"),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "weft"),
        *([("authorization", f"Bearer {token}")] if token else []),
    ]
    headers = b"".join(_LITERAL + _text(name) + _text(value) for name, value in fields)
    window = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, window),
            _frame(_WINDOW, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _USUAL_WINDOW)),
            _frame(_HEADERS, _END_HEADERS, 1, headers),
            _frame(_DATA, _END_STREAM, 1, struct.pack(">?I", False, len(question)) + question),
        )
    )


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def _text(value: str) -> bytes:
    """Return a string in HPACK's form without compression: its length, then its bytes."""
    content = value.encode()
    length, rest = b"", len(content)
    if rest >= _SEVEN_BITS:
        length, rest = bytes([_SEVEN_BITS]), rest - _SEVEN_BITS
        while rest > _SEVEN_BITS:
            length, rest = length + bytes([rest & _SEVEN_BITS | 0x80]), rest >> 7
    return length + bytes([rest]) + content


def _frames(connection: socket.socket, until: float) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, flags and content of each frame until the server closes the connection; confirm
    what it wants confirmed."""
    received = bytearray()
    while True:
        while len(received) < 9 or len(received) < 9 + int.from_bytes(received[:3], "big"):
            connection.settimeout(max(0.001, until - time.monotonic()))
            more = connection.recv(1 << 16)
            if not more:
                return
            received += more
        size, kind, flags = int.from_bytes(received[:3], "big"), received[3], received[4]
        content = bytes(received[9 : 9 + size])
        del received[: 9 + size]
        if kind in (_SETTINGS, _PING) and not flags & _ACKNOWLEDGE:
            answer = content if kind == _PING else b""
            connection.sendall(_frame(kind, _ACKNOWLEDGE, 0, answer))
        yield kind, flags, content


def _answer(frames: Iterator[tuple[int, int, bytes]]) -> bytes:
    answer = b""
    for kind, flags, content in frames:
        if kind == _DATA:
            answer += content
        elif kind == _HEADERS and flags & _END_STREAM:
            _validate_status(content)
            return answer[5:]  # after a byte for "not compressed", and four for its size
        elif kind in (_RESET, _GO_AWAY):
            raise CallFailed("it ended the call")
    raise CallFailed("it closed the connection: it does not speak gRPC, or over TLS only")


def _validate_status(trailers: bytes) -> None:
    """Raise WrongToken or CallFailed unless the status is 0. gRPC's own server sends both fields as
    plain literals."""
    status = _field(trailers, b"grpc-status")
    if status == str(_UNAUTHENTICATED):
        raise WrongToken(_field(trailers, b"grpc-message"))
    if status != "0":
        raise CallFailed(f"gRPC status {status or 'unknown'} {_field(trailers, b'grpc-message')}")


def _field(headers: bytes, name: bytes) -> str:
    at = headers.find(name)
    if at < 0:
        return ""
    at += len(name)
    size = headers[at] & _SEVEN_BITS  # longer texts are cut off
    return headers[at + 1 : at + 1 + size].decode(errors="replace")
