"""How rows are divided over hosts: each is somewhere, once, and pieces fit into a message."""

from __future__ import annotations

import numpy as np
import pytest

from weft._core.sharding import (
    DROPPED,
    GONE,
    ID_BYTES,
    TELLING_SECONDS,
    USES,
    WINDOW,
    News,
    Sharding,
    is_due,
    needed_version,
    news,
    room_for,
    version,
)
from weft._core.tables import ASYNC, BSP, ssp

SHARDINGS = [
    Sharding(n_rows, row_nbytes, hosts, room)
    for n_rows in (1, 2, 3, 7, 1000)
    for row_nbytes in (1, 12, 100)
    for hosts in (1, 2, 3, 8)
    for room in (108, 240, 4096)
]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_every_row_is_somewhere_once(sharding: Sharding) -> None:
    """Parts are consecutive; pieces of all rows, or of a range, cover them in order and fit."""
    rows: list[int] = []
    for host in range(sharding.hosts):
        low, high = sharding.part(host)
        pieces = list(sharding.pieces(host))
        assert all(piece.host == host and piece.low < piece.high for piece in pieces)
        rows += [low + row for piece in pieces for row in range(piece.low, piece.high)]
        assert len(pieces) <= sharding.stripes(host) or low == high
        for piece in pieces:
            size = (piece.high - piece.low) * sharding.row_nbytes
            assert size <= sharding.room
    assert rows == list(range(sharding.n_rows))
    start, stop = sharding.n_rows // 3, sharding.n_rows - sharding.n_rows // 4
    found = [
        sharding.part(piece.host)[0] + row
        for piece in sharding.cut(start, stop)
        for row in range(piece.low, piece.high)
    ]
    assert found == list(range(start, stop))


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_some_rows(sharding: Sharding) -> None:
    """Each named row goes to its host, with its place among all, in order, in pieces that fit."""
    random = np.random.default_rng(3)
    for size in (0, 1, 5, 300):
        ids = random.integers(0, sharding.n_rows, size)
        found = np.full(size, -1)
        for share in sharding.shares(ids):
            low, high = sharding.part(share.host)
            positions = np.arange(size) if share.positions is None else share.positions
            assert (np.diff(positions) > 0).all()
            assert ((share.ids >= 0) & (share.ids < high - low)).all()
            parts = list(sharding.cut_share(share))
            assert np.array_equal(np.concatenate([share.ids[part] for part in parts]), share.ids)
            for part in parts:
                rows = part.stop - part.start
                assert rows == 1 or rows * (sharding.row_nbytes + ID_BYTES) <= sharding.room
            found[positions] = share.ids + low
        assert np.array_equal(found, ids)


def test_room() -> None:
    """A message has 4 MB, less where many ranks of a host have room for some, and always a row."""
    assert room_for(1) == room_for(16) == 4 << 20
    assert room_for(64) == 1 << 20
    assert WINDOW * 64 * room_for(64) == 256 << 20
    assert room_for(10_000) == 256 << 10
    assert room_for(2, 50_000_000) == room_for(1, 40_000_000) == 64 << 20


def test_what_is_told() -> None:
    """Only what has changed, at once where somebody may wait for it."""
    told = {0: News(0, 3, USES), 2: News(2, 5, USES)}
    now = [News(0, 3, USES), News(2, 6, USES), News(4, 0, DROPPED)]
    assert news(now, told) == now[1:]
    assert news([News(0, 3, GONE)], told) == [News(0, 3, GONE)]
    assert is_due(BSP, 0.0)
    assert is_due(ssp(2), 0.0)
    assert not is_due(ASYNC, 0.0)
    assert is_due(ASYNC, TELLING_SECONDS)


def test_how_old_a_copy_is() -> None:
    """A copy has the adds up to the smallest count; ssp(k) accepts what is k clocks older."""
    assert version([7, 4, 9]) == 4
    assert version([4]) >= needed_version(7, 3)
    assert version([4]) < needed_version(8, 3)
