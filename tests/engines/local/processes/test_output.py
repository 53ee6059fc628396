"""What ranks print, line by line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.engines.local.processes.output import Lines


@given(st.lists(st.binary(max_size=30)))
def test_nothing_is_lost_however_it_is_cut(chunks: list[bytes]) -> None:
    """The lines put together are the input, with at most one line end added."""
    lines = Lines()
    out = [line for chunk in chunks for line in lines.feed(chunk)] + lines.finish()
    whole = b"".join(chunks)
    assert b"".join(out) in (whole, whole + b"\n")


def test_lines_wait_for_their_end() -> None:
    """A line comes out when it is complete; a carriage return completes a line, as bars do."""
    lines = Lines()
    assert lines.feed(b"one\ntw") == [b"one\n"]
    assert lines.feed(b"o\n10%\r20%\rx") == [b"two\n", b"10%\r", b"20%\r"]
    assert lines.finish() == [b"x\n"]
    assert lines.finish() == []


def test_a_line_without_end_comes_out_in_pieces() -> None:
    """A rank that never ends its line does not fill the launcher's memory."""
    lines = Lines()
    assert sum(map(len, lines.feed(b"x" * 200_000))) == 200_000
