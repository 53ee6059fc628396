"""Results in the order of their items, whatever the order in which they come."""

from __future__ import annotations

from typing import Any

from weft._core.jobs import Finished


class Collected:
    """What has come of a job so far."""

    def __init__(self, total: int | None, *, keep_failures: bool) -> None:
        #: how many items there are; None while nobody knows
        self.total = total
        self.results: list[Any] = [None] * (total or 0)
        self._keep_failures = keep_failures
        #: how many items have ended, and how many of them failed
        self.finished = 0
        self.failed = 0

    def add(self, part: Finished) -> None:
        """Take a chunk in. Raises its first failure, unless failures are kept as results."""
        if part.failures and not self._keep_failures:
            raise part.failures[min(part.failures)]
        end = part.first + len(part.values)
        if end > len(self.results):
            self.results += [None] * (end - len(self.results))
        self.results[part.first : end] = part.values
        for index, error in part.failures.items():
            self.results[index] = error
        self.finished += len(part.values)
        self.failed += len(part.failures)
