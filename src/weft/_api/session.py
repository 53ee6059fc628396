"""This process's place in a group. The only session there is lives here."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from weft import faults
from weft._core import seeding, timeouts
from weft._core.counts import whole
from weft._core.failures import caller_line
from weft._core.launched import Launched, alone
from weft.engines import launched
from weft.engines.base import Group
from weft.engines.refusals import forked
from weft.errors import (
    AlreadyInitialized,
    EngineUnavailable,
    InvalidType,
    MissingPackage,
    NotInitialized,
    UnknownEngine,
    UsedAfterFork,
)
from weft.resources import count_gpus, limit_threads, plan

ENGINES = ("serial", "local", "mpi", "ray")
#: engines that need a package, and the name under which it is imported
_PACKAGES = {"mpi": "mpi4py", "ray": "ray"}


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
_rounds = 0
#: what else ends at shutdown, in this order
_at_shutdown: list[Callable[[], None]] = []


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
        seconds = None if timeout is None else timeouts.checked(timeout)
        seconds = seconds if seconds is not None else timeouts.from_environment(os.environ)
        _check_engine(engine)
        _launched = _launched or launched.place()
        group, restore = _start(engine, seconds)
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
        for ends in _at_shutdown:
            ends()
        _clear_memory()
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


def _clear_memory() -> None:
    blocks = sys.modules.get("weft.engines.local.blocks")
    if blocks is not None:
        blocks.clear()


def at_shutdown(ends: Callable[[], None], *, first: bool = False) -> None:
    """Have something ended by `shutdown`, every time; to say so again changes nothing."""
    if ends not in _at_shutdown:
        _at_shutdown.insert(0 if first else len(_at_shutdown), ends)


def group() -> Group:
    """The group that `init` returned. Raises NotInitialized, UsedAfterFork."""
    session = _session
    if session is None:
        raise _no_session()
    return session.group.latest


def rank() -> int:
    """This process's rank in the group, 0 to size - 1."""
    return group().rank


def size() -> int:
    """How many ranks the group has."""
    return group().size


def ranks_here() -> int:
    """How many ranks share this machine; 1 without a session."""
    return 1 if _session is None else _session.group.latest.size


def is_master() -> bool:
    """Whether this is rank 0, which by custom prints, validates and saves."""
    return group().is_master


def device() -> str:
    """Where this rank computes: "cuda:0" and so on where there are GPUs, one rank after the other,
    else "cpu". Of GPUs it counts those that CUDA_VISIBLE_DEVICES names, if it is set."""
    count = count_gpus(os.environ)
    return f"cuda:{rank() % count}" if count else "cpu"


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


def _start(engine: str | None, seconds: float | None) -> tuple[Group, Callable[[], None]]:
    global _rounds
    timeout = timeouts.DEFAULT if seconds is None else seconds
    place = _launched
    if engine == "serial" or (engine is None and place is None):
        from weft.engines.serial import SerialGroup

        return SerialGroup(timeout=timeout), lambda: None
    if place is None:
        place = alone()
    if place.obstacle:
        raise EngineUnavailable(place.obstacle)
    from weft.engines.local.system import check_system

    check_system()  # first: elsewhere the rest cannot even be loaded
    from weft.engines.local.group import join
    from weft.engines.local.rendezvous import Identity

    faults.set_rank(place.rank)
    identity = Identity(place.rank, place.size, place.job, _rounds, place.memory, place.launcher)
    restore = limit_threads(plan(place.size).threads)
    try:
        start = timeouts.START if seconds is None else seconds
        joined = join(identity, timeout=timeout, start_timeout=start)
    except BaseException:
        restore()
        raise
    _rounds += 1
    return joined, restore


def _no_session() -> NotInitialized | UsedAfterFork:
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


os.register_at_fork(after_in_child=_start_anew)


def _check_engine(engine: object) -> None:
    if engine is None:
        return
    if engine not in ENGINES:
        raise UnknownEngine(f"engine={engine!r} is unknown; known are {', '.join(ENGINES)}")
    package = _PACKAGES.get(str(engine))
    if package is None:
        return
    later = f"engine={engine!r} is not part of this release; use 'local' for one machine"
    if importlib.util.find_spec(package) is None:
        raise MissingPackage(
            f"{later}. It will need the package {package}, which is not installed:\n"
            f"    pip install 'weft[{engine}]'"
        )
    raise EngineUnavailable(later)


atexit.register(shutdown)
