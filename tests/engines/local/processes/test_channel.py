"""What crosses a process border."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engines.local.processes.channel import (
    Attach,
    Gone,
    Hello,
    Message,
    Release,
    ReleaseInFlight,
    Welcome,
    decode,
    encode,
)
from weft.errors import Refused

SAMPLES: list[Message] = [
    Hello("1.0", "job", 1, 2, 3),
    Welcome(5),
    Attach(1, 2, 3),
    Gone(1),
    Release([2**55, 1]),
    ReleaseInFlight(2**55, 1),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_messages_come_back_as_they_were(message: Message) -> None:
    """encode and decode are inverse, for the expected kind only."""
    assert decode(encode(message), type(message)) == message
    with pytest.raises(Refused, match="was expected"):
        decode(encode(message), Attach if not isinstance(message, Attach) else Gone)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    """Bytes from a stranger never raise anything but Refused."""
    with pytest.raises(Refused):
        decode(data, Hello)


@pytest.mark.parametrize(
    "values",
    [
        ["Hello"],
        ["os.system", "true"],
        ["Gone", "1"],
        ["Gone", 1, 2],
        ["Gone", None],
        ["Gone", True],
        [["Gone"], 1],
        [],
        {"Gone": 1},
        1,
    ],
)
def test_wrong_fields_are_refused(values: object) -> None:
    """Missing, surplus and wrongly typed fields."""
    with pytest.raises(Refused):
        decode(json.dumps(values).encode(), Hello, Gone)
