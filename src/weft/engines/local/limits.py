"""How long a map may take, and whether it is still wanted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from weft._core.jobs import Job
from weft.errors import Cancelled, Stalled

#: seconds between two looks at whether a job was cancelled
LOOK = 0.05

Result = TypeVar("Result")


class Limits:
    """The deadline of one job, counted from now, and whether it was cancelled."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._deadline = math.inf if job.timeout is None else time.monotonic() + job.timeout

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._deadline

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline, if there is one."""
        if self._job.timeout is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        if self._deadline == math.inf:
            return LOOK
        return max(0.0, min(LOOK, self._deadline - time.monotonic()))

    def check(self, where: Callable[[], str] = lambda: "  no worker has started yet") -> None:
        """Raise Stalled or Cancelled if it has to end; `where` says who has what."""
        if self._deadline < math.inf and self.over:
            raise self.stalled(where())
        if self._job.cancelled is not None and self._job.cancelled():
            raise Cancelled("the map was cancelled")

    def run_until_deadline(self, action: Callable[[], Result], where: Callable[[], str]) -> Result:
        """What an action of this thread returns, which may wait for anything. Raises Stalled when
        the deadline comes first."""
        if self._job.timeout is None:
            return action()
        from weft.engines.local.guard import ComputationGuard, ComputationInterrupted

        guard = ComputationGuard(lambda: self.over)
        try:
            with guard:
                return action()
        except ComputationInterrupted:
            raise self.stalled(where()) from None
        finally:
            guard.close()

    def stalled(self, where: str) -> Stalled:
        return Stalled(
            f"map: {self._job.timeout} s have passed and items are not finished; pass a longer "
            f"timeout=, or find out why these take so long:\n{where}"
        )
