"""The table of engines, and the choice of one for a call.

Code that needs an engine calls `choose` and names what the engine must offer:

    init                   "group"       Team, function, train_step   "team"
    map, distribute        "pool"        share                        "share"
    weft run, named pipes  "launch"      weft run --hosts             "hosts"
    weft open --port       "machines"

The module of a row is imported at its first use. Of these functions it has those for what the row
offers:

    join(place, *, timeout, start_timeout) -> Group     group
    make_pool(PoolOptions) -> Pool, prestart()          pool
    make_team(TeamOptions) -> Team                      team
    share(array, *, readonly) -> SharedArray            share
    launch(Command) -> exit code; open_pipe, serve_pipe, pipes, close_pipe; probes()    launch
    launch(Command) -> exit code; survey(hosts), find_mpirun()                         hosts
    open_node, serve_node, close_node, status                                          machines
    close()      end the engine's workers in this process; a later call may start new ones
    end()        the interpreter ends, and the group was left     group over hosts
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft._core.launch import Launched, one_host_error, spans_hosts
from weft.errors import EngineUnavailable, MissingPackage, UnknownEngine
from weft.resources import host_name


@dataclass(frozen=True)
class Engine:
    """One row of the table."""

    name: str
    #: "" for an engine of which only the name is known
    module: str
    #: of "group", "pool", "team", "share", "launch", "hosts", "machines"
    offers: frozenset[str]
    #: the package that it imports; weft's extra of the engine's name installs it
    requires: str = ""
    #: returns why it cannot run here, or "" where it can, without importing the module
    obstacle: Callable[[], str] = lambda: ""

    def load(self) -> Any:
        """Import and return the engine's module."""
        return importlib.import_module(self.module)

    def missing(self) -> bool:
        """Return whether the package that it imports is not installed."""
        return bool(self.requires) and importlib.util.find_spec(self.requires) is None

    def validate(self, who: str = "") -> None:
        """Raise MissingPackage or EngineUnavailable if the engine cannot run here; `who` wants it,
        if it was not asked for by name."""
        reason = self.obstacle()
        if self.missing():
            raise MissingPackage(
                f"{reason or who or f'engine={self.name!r}'}. It needs the package "
                f"{self.requires}, which is not installed:\n    pip install 'weft[{self.name}]'"
            )
        if reason:
            raise EngineUnavailable(reason)


def system_obstacle() -> str:
    """Return why the local engine cannot run here, or "": its memory model needs x86-64."""
    machine = os.uname().machine if hasattr(os, "uname") else "an unknown machine"
    if sys.platform == "linux" and machine == "x86_64":
        return ""
    return (
        f"the local engine needs Linux on x86-64, this is {sys.platform} on {machine}; "
        "run one process, with engine='serial'"
    )


_IN_ONE_PROCESS = frozenset({"group", "pool", "team", "share"})

ENGINES = {
    row.name: row
    for row in (
        Engine("serial", "weft.engines.serial.engine", _IN_ONE_PROCESS),
        Engine(
            "local",
            "weft.engines.local.engine",
            _IN_ONE_PROCESS | {"launch"},
            obstacle=system_obstacle,
        ),
        Engine(
            "mpi",
            "weft.engines.mpi.engine",
            frozenset({"group", "hosts"}),
            requires="mpi4py",
            obstacle=system_obstacle,
        ),
        Engine(
            "ray",
            "weft.engines.ray.engine",
            frozenset({"pool", "machines"}),
            requires="ray",
            obstacle=system_obstacle,
        ),
    )
}

#: whether the user was warned that weft runs serially here
_warned = False


def choose(engine: str | None, offer: str, place: Launched | None = None) -> Engine:
    """Return the named row, or without a name the one for this place and system.

    That is local, but mpi for a group whose ranks an MPI launcher has started on several hosts, and
    serial for the group of a process that no launcher started. Where the local engine cannot run,
    serial takes over what one process can do, with one warning.

    Raises UnknownEngine, MissingPackage, EngineUnavailable.
    """
    if engine is not None:
        row = _named(engine, offer)
        row.validate()
    elif offer == "group" and place is None:
        row = ENGINES["serial"]
    elif offer == "group" and place is not None and place.speaks_mpi and spans_hosts(place):
        row = ENGINES["mpi"]
        row.validate(f"rank {place.rank} on host {host_name()}: its ranks span hosts")
    else:
        row = ENGINES["local"]
        alone = place is None or place.size == 1
        if alone and offer in ENGINES["serial"].offers and (reason := row.obstacle()):
            _warn_once(reason)
            return ENGINES["serial"]
        row.validate()
    if row.name == "local" and place is not None and (error := one_host_error(place)):
        raise error
    return row


def validate_name(engine: str | None, offer: str) -> None:
    """Raise what `choose` raises for a name, without regard to a launcher."""
    if engine is not None:
        _named(engine, offer).validate()


def prestart(engine: str | None) -> None:
    """Start a pool's engine while its caller is still being imported. A wrong name, or an engine
    that cannot run, is an error only when the pool is made."""
    row = ENGINES.get(engine or "local")
    if row is not None and row.module and "pool" in row.offers and not row.obstacle():
        row.load().prestart()


def close_loaded() -> None:
    """Close every engine that this process has loaded a module of."""
    for row in ENGINES.values():
        if row.module.rpartition(".")[0] in sys.modules:
            row.load().close()


def end_loaded() -> None:
    """End what engines hold of this process's launch: the interpreter ends."""
    row = ENGINES["mpi"]
    if row.module in sys.modules:
        row.load().end()


def _named(engine: str, offer: str) -> Engine:
    row = ENGINES.get(engine) if isinstance(engine, str) else None
    if row is None:
        raise UnknownEngine(f"engine={engine!r} is unknown; known are {', '.join(ENGINES)}")
    if offer not in row.offers:
        fit = sorted(row.name for row in ENGINES.values() if row.module and offer in row.offers)
        raise UnknownEngine(f"engine={engine!r}: known are {', '.join(map(repr, fit))}")
    return row


def _warn_once(reason: str) -> None:
    from weft._core.failures import warn_caller  # imported late: most programs never warn

    global _warned
    if _warned:
        return
    _warned = True
    warn_caller(
        f"weft runs serially here, in this process alone: {reason.partition(';')[0]}. "
        "With engine='serial' it does so without this warning"
    )
