"""This process's place in a group. The only session there is lives here."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from weft import faults
from weft._core import arguments, seeding
from weft._core.arguments import whole
from weft._core.failures import caller_line
from weft._core.launch import Launched
from weft.engines import launched, registry
from weft.engines.base import Group
from weft.engines.refusals import forked
from weft.errors import AlreadyInitialized, InvalidType, NotInitialized, UsedAfterFork
from weft.resources import Plan, count_gpus, limit_threads, plan


class Table(Protocol):
    """What the session has to know of a table."""

    def close(self) -> None:
        """End what is pending."""


@dataclass(frozen=True)
class _Session:
    group: Group
    #: where init was called
    line: str
    restore_threads: Callable[[], None]
    #: the tables that were made, and are still there
    tables: list[weakref.ref[Table]] = field(default_factory=list)


_lock = threading.RLock()
_session: _Session | None = None
#: the process that had the session, in a child forked from it
_forked_from: int | None = None
_launched: Launched | None = None
#: What shutdown ends, in this order: what runs, then those for whom it ran. Then it closes the
#: engines, with their workers, and leaves the group.
_at_shutdown: dict[str, list[Callable[[], None]]] = {"maps": [], "teams": []}
#: what a forked child does, after it has left its parent's session
_in_child: list[Callable[[], None]] = []


def init(
    *, engine: str | None = None, timeout: float | None = None, seed: int | None = None
) -> Group:
    """Join this program's group and return it.

    Under `weft run -n N script.py` the group is the N ranks that were started,
    and `init` returns when all are here. The same holds on one host under
    mpirun (of Open MPI, MPICH, Intel MPI), srun and torchrun. Without a
    launcher it is this process alone, and everything works the same.

    >>> import weft
    >>> group = weft.init()
    >>> weft.rank(), weft.size()
    (0, 1)
    >>> weft.shutdown()

    `engine`: "local" (processes of this machine), "serial" (this process
    alone); by default what the launcher says. `timeout`: seconds that any wait
    may take; by default WEFT_TIMEOUT, else 1800. `seed`: seeds the random
    generators of each rank from (seed, rank).

    A group has `timeout` to assemble, but 120 seconds if none is given at all.

    Raises AlreadyInitialized, UnknownEngine, MissingPackage, EngineUnavailable,
    MissingRank, PeerLost, Refused, InvalidValue, InvalidType.
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
        # of a process that is alone no threads are taken
        restore = limit_threads(group.plan.threads) if group.size > 1 else lambda: None
        _session, _forked_from = _Session(group, caller_line(), restore), None
        if seed is not None:
            seeding.seed_generators(seeding.derive(seed, group.rank))
        return group


def shutdown() -> None:
    """Leave the group. Whoever still waits for this rank gets PeerLost.

    The workers of `map` and `distribute` end too; a later call starts new ones.
    Called at exit by itself; does nothing without a session, or twice.
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
            table.close()  # before the others know: it may be writing to the memory they share
        session.group.latest.leave()
        session.restore_threads()
        if faults.armed:
            faults.reach("exit.left")


def at_shutdown(stage: str, end: Callable[[], None]) -> None:
    """Have something ended by `shutdown`, every time; to say so again changes nothing."""
    if end not in _at_shutdown[stage]:
        _at_shutdown[stage].append(end)


def at_fork(forget: Callable[[], None]) -> None:
    """Have something done in every forked child."""
    _in_child.append(forget)


def group() -> Group:
    """The group that `init` returned. Raises NotInitialized, UsedAfterFork."""
    session = _session
    if session is None:
        raise _no_session_error()
    return session.group.latest


def rank() -> int:
    """This process's rank in the group, 0 to size - 1."""
    return group().rank


def size() -> int:
    """How many ranks the group has."""
    return group().size


def plan_here() -> Plan:
    """What this process may use of its host's cores: beside the other ranks, if there is a
    session."""
    return plan(1) if _session is None else _session.group.latest.plan


def is_master() -> bool:
    """Whether this is rank 0, which by custom prints, validates and saves."""
    return group().is_master


def device() -> str:
    """Where this rank computes: "cuda:0" and so on where there are GPUs, one rank of this host
    after the other, else "cpu". Of GPUs it counts those that CUDA_VISIBLE_DEVICES names, if it is
    set."""
    count = count_gpus(os.environ)
    return f"cuda:{group().local_rank % count}" if count else "cpu"


def barrier(*, timeout: float | None = None) -> None:
    """Return when every rank of the group has called it.

    Raises PeerLost, Stalled, Disagreement, NotInitialized, UsedAfterFork, UsedConcurrently.
    """
    group().barrier(timeout=timeout)


def register(table: Table) -> None:
    """Note a new table of the session."""
    if _session is not None:
        _session.tables.append(weakref.ref(table))


def tables() -> list[Table]:
    """The session's tables that are still there, in the order in which they were made."""
    return [] if _session is None else _living(_session)


def count_tables() -> int:
    """How many tables the session has made."""
    return 0 if _session is None else len(_session.tables)


def _living(session: _Session) -> list[Table]:
    found = [reference() for reference in session.tables]
    return [table for table in found if table is not None]


def _join(engine: str | None, seconds: float | None) -> Group:
    row = registry.choose(engine, "group", _launched)
    timeout, start = (arguments.DEFAULT, arguments.START) if seconds is None else (seconds, seconds)
    joined: Group = row.load().join(_launched, timeout=timeout, start_timeout=start)
    return joined


def _no_session_error() -> NotInitialized | UsedAfterFork:
    if _forked_from is not None:
        return forked("the session", _forked_from)
    return NotInitialized(
        "weft is not initialized, or was shut down; first join a group:\n    weft.init()"
    )


def _start_anew() -> None:
    """In a forked child: the session, and the place in the job, are the parent's.

    The environment says that the place is taken, so the child is alone.
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
atexit.register(shutdown)
