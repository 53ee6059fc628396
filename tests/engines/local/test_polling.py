"""For how long a worker stays awake."""

from __future__ import annotations

import pytest

from weft._core.work import Done, Stopped
from weft.engines.local.polling import awake_after


@pytest.mark.parametrize(
    ("seconds", "awake"),
    [(0.0, 0.0005), (0.02, 0.0005), (0.03, 0.00075), (0.04, 0.001), (9.0, 0.001)],
)
def test_after_an_answer(seconds: float, awake: float) -> None:
    """A fortieth of the time that the call took, within limits."""
    assert awake_after(Done(b"", [], seconds, 0)) == pytest.approx(awake)


def test_after_anything_else() -> None:
    """It was interrupted: nothing follows at once."""
    assert awake_after(Stopped()) == 0
