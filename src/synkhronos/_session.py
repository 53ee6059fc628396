"""The team that `fork` made, and what has been built for it. The package's only state.

Ranks here are Synkhronos's, in which this process has the rank `master_rank`. In weft's team it is
rank 0: places are weft's ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import weft
from weft._api import session
from weft._api.mapping import share_of_cores, validate_size
from weft._api.team import set_default_team
from weft._core.arguments import whole
from weft.errors import AlreadyInitialized, InvalidType, InvalidValue, NotInitialized
from weft.resources import visible_gpus

#: how many processes there are at least, unless another number is given
_FEWEST = 2
#: Python's recursion limit in programs that fork, as Synkhronos set it: of PyTensor's functions
#: some, such as `grad`, call themselves for each operation of a graph
_RECURSION_LIMIT = 50_000

_team: weft.Team | None = None
_master = 0
_closed = False
_visible_before: str | None = None
_limit_before: int | None = None


class Built(Protocol):
    """Describe what the session knows of a function."""

    @property
    def shareds(self) -> list[Any]:
        """Return the shared variables that it uses."""

    def send(self) -> None:
        """Send it to all processes."""


_functions: weakref.WeakSet[Any] = weakref.WeakSet()
#: lists of variables that were given to a collective together, by their identities: each has one
#: replica
_together: dict[tuple[int, ...], list[Any]] = {}


def begin(n: int | None, use_gpu: bool, master: int, timeout: float | None) -> int:
    global _team, _master, _closed
    if _team is not None:
        raise AlreadyInitialized(
            f"synkhronos.fork() was called before, and made {_team.size} processes; end "
            "them first:\n    synkhronos.close()"
        )
    n = validate_size(n)
    rank = whole(master)
    if rank is None:
        raise InvalidType(f"master_rank={master!r}: expected a whole number")
    gpus = _gpus(n) if use_gpu else []
    team = weft.Team(
        # programs for several GPUs name rank 1
        n or len(gpus) or max(_FEWEST, share_of_cores()),
        timeout=timeout,
        gpus=gpus[1:],
        restart_hint="synkhronos.close()\n    synkhronos.fork()",
    )
    if not 0 <= rank < team.size:
        team.close()
        raise InvalidValue(
            f"master_rank={master}: expected a rank of 0 to {team.size - 1}, as there are "
            f"{team.size} processes"
        )
    if gpus:
        _narrow(gpus[0])
    _raise_recursion_limit()
    _team, _master, _closed = team, rank, False
    set_default_team(team)
    return team.size


def end() -> None:
    global _team, _closed
    if _team is None:
        return
    set_default_team(None)
    _team.close()
    _team, _closed = None, True
    _together.clear()
    _widen()
    _restore_recursion_limit()


def team(caller: str) -> weft.Team:
    """Return the team. Raises NotInitialized, which names the caller, if there is none."""
    if _team is None:
        when = "after synkhronos.close()" if _closed else "before synkhronos.fork()"
        raise NotInitialized(
            f"{caller} was called {when}; first start the processes:\n    synkhronos.fork()"
        )
    return _team


def register(function: Built) -> None:
    _functions.add(function)


def send_all() -> None:
    team("distribute()")
    for function in sorted(_functions, key=lambda one: one.order):
        function.send()


def variables() -> Iterator[Any]:
    """Yield the shared variables of all functions, each once."""
    seen: set[int] = set()
    for function in sorted(_functions, key=lambda one: one.order):
        for variable in function.shareds:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield variable


def together(variables: Sequence[Any]) -> Any:
    """Return variables as one object to replicate: a single one, or always the same list."""
    if len(variables) == 1:
        return variables[0]
    return _together.setdefault(tuple(map(id, variables)), list(variables))


def places(size: int) -> list[int]:
    """Return each rank's rank in weft's team."""
    others = iter(range(1, size))
    return [0 if rank == _master else next(others) for rank in range(size)]


def place(rank: object, caller: str) -> int:
    """Return the user's rank as weft's. Raises InvalidType, InvalidValue."""
    size = team(caller).size
    number = whole(rank)
    if number is None:
        raise InvalidType(f"{caller}: rank={rank!r}: expected a whole number")
    if not 0 <= number < size:
        raise InvalidValue(f"{caller}: rank={rank}: expected 0 to {size - 1}")
    return places(size)[number]


def _gpus(n: int | None) -> list[str]:
    """Return the GPU of each process, where there are several; more processes share them."""
    visible = visible_gpus(os.environ)
    wanted = len(visible) if n is None else n
    return [visible[i % len(visible)] for i in range(wanted)] if wanted > 1 < len(visible) else []


def _narrow(gpu: str) -> None:
    """Let what this process loads from now on see one GPU."""
    global _visible_before
    _visible_before = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def _widen() -> None:
    global _visible_before
    if _visible_before is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible_before
        if not _visible_before:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        _visible_before = None


def _raise_recursion_limit() -> None:
    global _limit_before
    _limit_before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(_limit_before, _RECURSION_LIMIT))


def _restore_recursion_limit() -> None:
    """Set the limit from before `fork`, unless the program has set one of its own since."""
    if _limit_before is not None and sys.getrecursionlimit() == _RECURSION_LIMIT:
        with contextlib.suppress(RecursionError):  # called by what is deeper than that
            sys.setrecursionlimit(_limit_before)


session.at_shutdown("teams", end)
