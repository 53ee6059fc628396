"""Who a process is, by its environment."""

from __future__ import annotations

import pytest

from weft._core.launched import Launched, alone, environment, launched
from weft.errors import InvalidValue


def test_a_place_is_read_once() -> None:
    """What `weft run` sets is read back and taken out, so that children do not inherit it."""
    environ = {"PATH": "x", **environment(rank=1, size=3, job="j", memory=5, launcher=99)}
    assert launched(environ) == Launched(1, 3, "j", 5, 99)
    assert environ == {"PATH": "x"}
    assert launched(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"WEFT_RANK": "0"},
        {"WEFT_RANK": "x", "WEFT_SIZE": "2", "WEFT_JOB": "j"},
        {"WEFT_RANK": "2", "WEFT_SIZE": "2", "WEFT_JOB": "j"},
    ],
)
def test_half_a_place_is_an_error(environ: dict[str, str]) -> None:
    """Variables that make no sense are shown, not guessed at."""
    with pytest.raises(InvalidValue, match="WEFT_"):
        launched(environ)


def test_alone_is_a_job_of_its_own() -> None:
    """Two processes alone never share a job."""
    assert alone().job != alone().job
    assert (alone().rank, alone().size) == (0, 1)
