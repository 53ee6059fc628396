"""A pool: a driver and its workers, over sockets and shared memory. `running.py` is one job."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from weft._core.jobs import Finished, Job
from weft.engines.base import Pool
from weft.engines.local.limits import Limits
from weft.engines.local.running import Run
from weft.engines.local.wire import Payload, pack_function
from weft.engines.local.workers import Workers

if TYPE_CHECKING:
    from weft._core.elements import Array


class LocalPool(Pool):
    """Processes of this machine."""

    def __init__(
        self, size: int, workers: Workers, *, cores: int, gpus: Sequence[str] = ()
    ) -> None:
        """`size` workers that share so many cores; with `gpus` one for each of these."""
        self._wanted: list[str | None] = list(gpus) or [None] * size
        self.size = len(self._wanted)
        self._threads = max(1, cores // self.size)
        self._workers = workers

    def prepare(self, function: Callable[[Any], Any]) -> Payload:
        return pack_function(function)

    def forget(self, prepared: Payload) -> None:
        if prepared.has_references:  # others hold nothing, and are kept for the next call
            self._workers.forget(prepared.digest)
            prepared.release()

    def put(self, array: Array, *, readonly: bool = False) -> Any:
        from weft.engines.local.large_arrays import place

        return place(array, readonly=readonly)

    def close(self) -> None:
        self._workers.shut_down()

    def run(self, job: Job) -> Generator[Finished, None, None]:
        wanted = self._wanted
        if isinstance(job.items, (list, tuple, range)) and not job.one_each:
            wanted = wanted[: len(job.items)]  # more would have nothing to do
        limits = Limits(job)
        lent, watch = self._workers.lend(wanted, self._threads, limits.check)
        running = Run(job, limits, self._workers, lent, watch)
        try:
            for part in running.steps():
                yield part
                if part.failures and not job.keep_going:
                    return
        finally:
            running.end()
