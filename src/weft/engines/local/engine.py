"""The local engine's functions, as the registry lists them.

Importing this loads little, so that the workers of a first map start while the rest is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError

if TYPE_CHECKING:
    from weft._core.launch import Launched
    from weft._core.shared import SharedArray
    from weft.engines.base import Command, PoolOptions, Team, TeamOptions
    from weft.engines.local.group import LocalGroup
    from weft.engines.local.pool.pool import LocalPool

#: how often this process has joined a group: the number of the session within its launch
_sessions = 0
#: whether a pool or a team was made before
_has_workers = False


def join(place: Launched | None, *, timeout: float, start_timeout: float) -> LocalGroup:
    """Join the ranks of a launch, or without a place a group of one. Raises MissingRank, PeerLost,
    Refused."""
    global _sessions
    from weft import faults
    from weft._core.launch import alone
    from weft.engines.local import group
    from weft.engines.local.meeting.rendezvous import Identity

    place = place or alone()
    faults.set_rank(place.rank)
    identity = Identity(place.rank, place.size, place.job, _sessions, place.memory, place.launcher)
    joined = group.join(identity, timeout=timeout, start_timeout=start_timeout)
    _sessions += 1
    return joined


def prestart() -> None:
    """Start the interpreter of the first workers, which takes the longest. Raises NestedTooDeep."""
    if not _has_workers:
        from weft.engines.local.pool import interpreter, nesting

        nesting.validate()
        interpreter.prestart()


def make_pool(options: PoolOptions) -> LocalPool:
    """Return a pool of this process's workers, or of those behind a named pipe. Raises NoSuchPipe,
    Refused, NestedTooDeep."""
    global _has_workers
    from weft.engines.local.pool import nesting
    from weft.engines.local.pool.pool import LocalPool
    from weft.engines.local.pool.workers import workers

    nesting.validate()
    _has_workers = True
    size, pipe = options.size or options.cores, None
    if options.named_pipe is not None and options.named_pipe is not False:
        from weft.engines.local.pool import named_pipe

        pipe = named_pipe.validate_name(options.named_pipe)
        channel, served = named_pipe.connect(pipe)  # now, so that NoSuchPipe is raised here
        channel.close()
        size = min(size, served.size)
    return LocalPool(size, workers(pipe), cores=options.cores, gpus=options.gpus)


def make_team(options: TeamOptions) -> Team:
    """Return a team of this process and workers that stay; for one rank, of this process alone.
    Raises NestedTooDeep, DeviceUnavailable."""
    global _has_workers
    size = options.size or options.cores
    if size == 1:
        from weft.engines.serial.pool import SerialTeam

        return SerialTeam(timeout=options.timeout)
    if options.mps:
        from weft.engines.local.processes import mps

        mps.use()
    from weft.engines.local.pool import nesting
    from weft.engines.local.pool.workers import workers
    from weft.engines.local.team.team import LocalTeam

    nesting.validate()
    _has_workers = True
    return LocalTeam(
        size,
        workers(),
        cores=options.cores,
        timeout=options.timeout,
        gpus=options.gpus,
        fresh=options.mps,
        restart_hint=options.restart_hint,
    )


def share(array: Any, *, readonly: bool) -> SharedArray:
    """Return a copy in shared memory, or a view of an array that lies there already. Raises
    OutOfMemory."""
    from weft.engines.local.memory.arrays import SharedArray, buffer_of, copy_in, read_only

    known = isinstance(array, SharedArray) and buffer_of(array) is not None
    shared: SharedArray = array.view() if known else copy_in(array)
    return read_only(shared) if readonly else shared


def close() -> None:
    """End the workers, and release memory that is kept for reuse."""
    loaded = sys.modules
    if workers := loaded.get("weft.engines.local.pool.workers"):
        workers.close_workers()
    if interpreter := loaded.get("weft.engines.local.pool.interpreter"):
        interpreter.drop()
    if blocks := loaded.get("weft.engines.local.memory.blocks"):
        blocks.clear()
    if mps := loaded.get("weft.engines.local.processes.mps"):
        mps.end()


def launch(command: Command) -> int:
    """Carry out `weft run`; return its exit code."""
    from weft.engines.local.meeting.launcher import run

    return run(command)


def open_pipe(name: object, size: int) -> str:
    """Serve workers behind a named pipe; return its name. Raises LaunchError."""
    from weft.engines.local.pool import named_pipe

    pipe = named_pipe.validate_name(name)
    named_pipe.open_pipe(pipe, size)
    return pipe


def serve_pipe(name: object, size: int, opened: Callable[[str], None]) -> None:
    """Serve workers behind a named pipe until somebody closes it, or this process ends. Calls
    `opened` with its name when it serves. Raises LaunchError."""
    from weft.engines.local.pool import named_pipe

    pipe = named_pipe.validate_name(name)
    named_pipe.serve_pipe(pipe, size, lambda: opened(pipe))


def pipes() -> Iterator[str]:
    """Yield a line for each open pipe of this user: how busy it is, or what is wrong with it."""
    from weft.engines.local.pool import named_pipe

    for pipe in named_pipe.names():
        try:
            channel, pool = named_pipe.connect(pipe)
        except WeftError as error:
            yield f"{pipe}: {error}"
            continue
        channel.close()
        yield (
            f"{pipe}: pid {pool.pid}, {pool.drivers} scripts have {pool.workers} workers, "
            f"up to {pool.size} each"
        )


def close_pipe(name: object) -> str:
    """End a pipe and its workers; return its name. Raises NoSuchPipe, Refused, Stalled."""
    from weft.engines.local.pool import named_pipe

    pipe = named_pipe.validate_name(name)
    named_pipe.close_pipe(pipe)
    return pipe


def has_pipe(name: object) -> bool:
    """Return whether a pipe of this user is open."""
    from weft.engines.local.pool import named_pipe

    return named_pipe.validate_name(name) in named_pipe.names()


def probes() -> dict[str, Callable[[], tuple[Any, str]]]:
    """Return the probes of `weft doctor` by name; each returns a value and the reason for it."""
    from weft.engines.local.probes import PROBES

    return PROBES
