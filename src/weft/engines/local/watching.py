"""Waiting for several workers at once: for what they say, what they print, and their end."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from weft.engines.local.remote_worker import Worker

ReadyEvents = dict[Worker, set[int]]


class Watch:
    """Some workers and their descriptors. Kept from call to call: registering them takes longer
    than a short call."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._poll = select.poll()
        self._owners: dict[int, Worker] = {}
        #: what rings when there is something to do for another reason
        self._bell = -1
        self.rang = False
        for worker in workers:
            self.add(worker)

    def add(self, worker: Worker) -> None:
        # answers first: with an answer is seen what was printed before it
        for descriptor in worker.descriptors:
            self._poll.register(descriptor, select.POLLIN)
            self._owners[descriptor] = worker

    def remove(self, worker: Worker) -> None:
        for descriptor in worker.descriptors:
            if descriptor in self._owners:
                self._forget(descriptor)

    def listen(self, bell: int) -> None:
        """Return from `wait` also for this bell, an eventfd; for -1 no longer."""
        if self._bell >= 0:
            self._poll.unregister(self._bell)
        self._bell = bell
        if bell >= 0:
            self._poll.register(bell, select.POLLIN)

    def echo(self, worker: Worker, ready: set[int]) -> None:
        """Print what it has printed by now, if anything is ready."""
        for descriptor in worker.echo(ready):  # its function has closed it: it would always be
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._owners[descriptor]

    def watch_writable(self, worker: Worker) -> None:
        """Look also for when it takes more, if not everything was sent."""
        more = select.POLLOUT if worker.frames.unsent else 0
        self._poll.modify(worker.frames, select.POLLIN | more)

    def wait(self, seconds: float) -> ReadyEvents:
        """The workers that want something, each with the descriptors on which it does."""
        found: ReadyEvents = {}
        self.rang = False
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._bell:
                self.rang = True
                os.eventfd_read(descriptor)
                continue
            found.setdefault(self._owners[descriptor], set()).add(descriptor)
        return found

    def ended(self) -> list[Worker]:
        """The workers that have ended by now."""
        return [worker for worker, wants in self.wait(0).items() if worker.pidfd in wants]

    def watches(self, workers: Iterable[Worker]) -> bool:
        """Whether it is exactly these that it watches."""
        return set(self._owners.values()) == set(workers)
