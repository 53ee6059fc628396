"""How the loss of a worker is told."""

from __future__ import annotations

from weft._core.messages import Ended
from weft.engines.local.processes import end_as_text
from weft.engines.local.remote_worker import Worker
from weft.errors import Loss, WorkerLost, format_bytes


def worker_lost_error(
    worker: Worker, ended: Ended | None, *, item: int, doing: str, advice: str
) -> WorkerLost:
    """The error for a worker that has ended; None where nobody saw how."""
    if ended is None:
        loss = Loss(item, worker.number, worker.pid, None, 0, False, worker.host)
    else:
        how = ended.code, ended.memory, bool(ended.out_of_memory)
        loss = Loss(item, worker.number, worker.pid, *how, host=worker.host)
    return WorkerLost(f"{worker} {_how(loss)} while it {doing}{_memory(loss)}{advice}", loss=loss)


def _how(loss: Loss) -> str:
    if loss.code is None:
        return "ended, cause unknown (the process that starts workers was ended too),"
    return ("was " if loss.code < 0 else "ended with ") + end_as_text(loss.code)


def _memory(loss: Loss) -> str:
    if loss.out_of_memory:
        what = "and the kernel killed it for want of memory: smaller items, or fewer workers"
        return f"; it had at most {format_bytes(loss.memory)} of memory, {what}"
    return f"; it had at most {format_bytes(loss.memory)} of memory" if loss.memory else ""
