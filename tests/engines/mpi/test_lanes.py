"""What travels together between agents."""

from __future__ import annotations

import numpy as np

from weft.engines.mpi.lanes import join, split, together


def test_messages_are_joined_and_split() -> None:
    """In their order, each with its tag, at addresses that suit any number."""
    random = np.random.default_rng(5)
    for lengths in ((1,), (64, 1, 0, 200), tuple(range(40))):
        messages = [
            (tag, random.integers(0, 255, length).astype(np.uint8))
            for tag, length in enumerate(lengths, 7)
        ]
        whole = join(messages)
        found = split(whole)
        assert [tag for tag, _ in found] == [tag for tag, _ in messages]
        for (_, given), (_, got) in zip(messages, found, strict=True):
            assert np.array_equal(given, got)
            assert (got.ctypes.data - whole.ctypes.data) % 64 == 0


def test_small_messages_travel_together() -> None:
    """As many as follow each other and fit into 64 KB; a large one goes alone, in its place."""
    small, large = np.zeros(20_000, np.uint8), np.zeros(1 << 20, np.uint8)
    messages = [(1, small), (2, small), (3, large), (4, small), (5, small), (6, small), (7, small)]
    found = [[tag for tag, _ in some] for some in together(messages)]
    assert found == [[1, 2], [3], [4, 5, 6], [7]]
    assert not [*together([])]
