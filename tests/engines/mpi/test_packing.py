"""Several byte strings as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.engines.mpi.packing import pack, packed_size, unpack


@given(st.lists(st.binary(max_size=20)), st.binary(max_size=9))
def test_what_is_packed_is_unpacked(parts: list[bytes], rest: bytes) -> None:
    """Also if something follows."""
    packed = pack(parts)
    assert packed_size(packed + rest) == len(packed)
    assert [bytes(part) for part in unpack(packed + rest)] == parts
