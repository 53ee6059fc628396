"""This process's place in a group: `init`, `shutdown` and what they say. Holds the one session."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from weft import faults, resources
from weft._core import arguments, seeding
from weft._core.arguments import whole
from weft._core.failures import caller_line
from weft._core.launch import Launched
from weft.engines import launched, registry
from weft.engines.base import Group
from weft.engines.refusals import forked_error
from weft.errors import AlreadyInitialized, InvalidType, NotInitialized, UsedAfterFork
from weft.resources import Plan, count_gpus, limit_threads, plan, prefer_gpu, visible_gpus


class Table(Protocol):
    """Describe what the session needs of a table."""

    def close(self) -> None:
        """End what is pending."""


@dataclass(frozen=True)
class _Session:
    group: Group
    #: the user's line that called init
    line: str
    restore_threads: Callable[[], None]
    #: the tables that were made; some may be gone
    tables: list[weakref.ref[Table]] = field(default_factory=list)


_lock = threading.RLock()
_session: _Session | None = None
#: in a forked child: the process that has the session
_forked_from: int | None = None
_launched: Launched | None = None
#: what shutdown calls, stage by stage, before it closes the engines, with their workers, and leaves
#: the group
_at_shutdown: dict[str, list[Callable[[], None]]] = {"maps": [], "teams": []}
#: what a forked child calls, after it has dropped its parent's session
_in_child: list[Callable[[], None]] = []


def init(
    *, engine: str | None = None, timeout: float | None = None, seed: int | None = None
) -> Group:
    """Join this program's group and return it.

    Under `weft run -n N script.py` the group is the N ranks that were started, and `init` returns
    when all have called it. The same holds under mpirun (of Open MPI, MPICH, Intel MPI) and srun,
    also on several hosts, and on one host under torchrun. Without a launcher the group is this
    process alone, and everything works the same.

    >>> import weft
    >>> group = weft.init()
    >>> weft.rank(), weft.size()
    (0, 1)
    >>> weft.shutdown()

    engine   "local" (processes of this machine), "mpi" (of several hosts) or "serial" (this process
             alone); by default what the launcher implies.
    timeout  seconds that any wait may take; by default WEFT_TIMEOUT, else 1800. The ranks have as
             long to find each other, but 120 seconds if neither is given.
    seed     seeds the random generators of each rank from (seed, rank).

    Raises AlreadyInitialized, UnknownEngine, MissingPackage, EngineUnavailable, MissingRank,
    PeerLost, Refused, InvalidValue, InvalidType.
    """
    global _session, _forked_from, _launched
    with _lock:
        if _session is not None:
            raise AlreadyInitialized(
                f"weft.init() was called before, at {_session.line}; use the group it returned, "
                "or end that session first:\n    weft.shutdown()\n    group = weft.init()"
            )
        if seed is not None and whole(seed) is None:
            raise InvalidType(f"seed={seed!r}: expected a whole number")
        seconds = None if timeout is None else arguments.validate_seconds(timeout)
        seconds = seconds if seconds is not None else arguments.from_environment(os.environ)
        registry.validate_name(engine, "group")
        _launched = _launched or launched.place()
        group = _join(engine, seconds)
        # a process that is alone keeps all its threads
        restore = limit_threads(group.plan.threads) if group.size > 1 else lambda: None
        _session, _forked_from = _Session(group, caller_line(), restore), None
        if seed is not None:
            seeding.seed_generators(seeding.derive(seed, group.rank))
        device()  # torch, if it is loaded, uses this rank's GPU from now on
        return group


def shutdown() -> None:
    """Leave the group, and end the workers of `map`, `distribute` and teams.

    Ranks that still wait for this one get PeerLost. A later `map` starts new workers. Also called
    when the program ends. Calling it twice, or without a session, does nothing more.
    """
    global _session
    with _lock:
        for stage in _at_shutdown.values():
            for end in stage:
                end()
        registry.close_loaded()
        session, _session = _session, None
        if session is None:
            return
        if faults.armed:
            faults.reach("exit.begin")
        for table in _living(session):
            table.close()  # before leaving: it may be writing to shared memory
        session.group.latest.leave()
        session.restore_threads()
        if faults.armed:
            faults.reach("exit.left")


def at_shutdown(stage: str, end: Callable[[], None]) -> None:
    """Make every `shutdown` call `end` in this stage; to register it again changes nothing."""
    if end not in _at_shutdown[stage]:
        _at_shutdown[stage].append(end)


def at_fork(forget: Callable[[], None]) -> None:
    """Make every forked child call `forget`."""
    _in_child.append(forget)


def group() -> Group:
    """Return the group of this session, in its latest generation.

    Raises NotInitialized, UsedAfterFork.
    """
    session = _session
    if session is None:
        raise _no_session_error()
    return session.group.latest


def rank() -> int:
    """Return this process's rank in the group, 0 to size - 1."""
    return group().rank


def size() -> int:
    """Return the number of ranks of the group."""
    return group().size


def plan_here() -> Plan:
    """Return the plan of this process: its share of the host's cores, beside other ranks if any."""
    return plan(1) if _session is None else _session.group.latest.plan


def is_master() -> bool:
    """Return whether this is rank 0, which by custom prints, validates and saves."""
    return group().is_master


def device() -> str:
    """Return the device of this process: "cuda:0", "cuda:1", ... where there are GPUs, else "cpu".

    Rank or worker i of a host has GPU i of those that CUDA_VISIBLE_DEVICES lets it see, or all,
    counted round. Ranks of `weft run`, workers of a team and of `map(..., gpus=N)` see their own
    GPU alone, so it is "cuda:0" there; under mpirun, srun and torchrun and in other workers it may
    be another, which torch then uses by default. Without a group it is that of a single rank.
    """
    count = count_gpus(os.environ)
    if not count:
        return "cpu"
    index = _number_on_host() % count
    prefer_gpu(index)
    return f"cuda:{index}"


def gpus_of_workers() -> list[str]:
    """Return the GPUs that workers of this process take in turn, where there are several, beginning
    with the one after its own."""
    visible = visible_gpus(os.environ)
    own = _number_on_host() + 1
    return [visible[(own + i) % len(visible)] for i in range(len(visible))] if visible[1:] else []


def _number_on_host() -> int:
    """Return the number of this process among those that share the GPUs of this host."""
    group = None if _session is None else _session.group.latest
    return group.local_rank if group is not None and group.size > 1 else resources.worker_number


def barrier(*, timeout: float | None = None) -> None:
    """Wait until every rank of the group has called it.

    Raises PeerLost, Stalled, Disagreement, NotInitialized, UsedAfterFork, UsedConcurrently.
    """
    group().barrier(timeout=timeout)


def register(table: Table) -> None:
    """Note a new table of the session."""
    if _session is not None:
        _session.tables.append(weakref.ref(table))


def tables() -> list[Table]:
    """Return the session's tables that still exist, in the order in which they were made."""
    return [] if _session is None else _living(_session)


def count_tables() -> int:
    """Return how many tables the session has made."""
    return 0 if _session is None else len(_session.tables)


def _living(session: _Session) -> list[Table]:
    tables = [reference() for reference in session.tables]
    return [table for table in tables if table is not None]


def _join(engine: str | None, seconds: float | None) -> Group:
    row = registry.choose(engine, "group", _launched)
    timeout, start = (arguments.DEFAULT, arguments.START) if seconds is None else (seconds, seconds)
    joined: Group = row.load().join(_launched, timeout=timeout, start_timeout=start)
    return joined


def _no_session_error() -> NotInitialized | UsedAfterFork:
    if _forked_from is not None:
        return forked_error("the session", _forked_from)
    return NotInitialized(
        "weft is not initialized, or was shut down; first join a group:\n    weft.init()"
    )


def _start_anew() -> None:
    """Drop the session in a forked child: it and the rank in the launch are the parent's.

    The environment says that the rank is taken, so the child is alone.
    """
    global _session, _forked_from, _launched, _lock
    if _session is not None:
        _forked_from = os.getppid()
    _session = _launched = None
    _lock = threading.RLock()
    for forget in _in_child:
        forget()


if hasattr(os, "register_at_fork"):  # Windows has neither
    os.register_at_fork(after_in_child=_start_anew)
atexit.register(registry.end_loaded)  # after `shutdown`: the last one registered is called first
atexit.register(shutdown)
