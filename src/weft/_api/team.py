"""`Team`: a driver and workers that stay, for functions and replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from weft._api import session
from weft._api.mapping import share_of_cores, validate_size
from weft._core import arguments
from weft._core.fingerprint import Fingerprint, fingerprint
from weft.adapters import models
from weft.engines import registry
from weft.engines.base import TeamOptions

if TYPE_CHECKING:
    from weft.engines.base import Group
    from weft.engines.base import Team as Backend


class Sendable(Protocol):
    """What a team knows of a function that it was built for."""

    def send(self) -> None:
        """Have the workers know it, if they do not yet."""


class RegisteredFunction:
    """A function that is registered with a team. When the program has changed something that it
    mentions, it is sent again."""

    def __init__(self, team: Team, fun: Callable[..., Any], name: str) -> None:
        self._team, self._fun, self._name = team, fun, name
        self._number: int | None = None
        #: what it was and mentioned when it was last sent or called, and how often the team had
        #: started
        self._fingerprint: Fingerprint | None = None
        self._starts = 0
        self._drop: Callable[[], Any] = lambda: None

    def number(self) -> int:
        """Its number, now that the workers have it as it is."""
        known = self._starts == self._team.starts
        if self._number is not None and known and self._look() == self._fingerprint:
            return self._number
        self._number = None
        self._drop()
        number = self._team.backend.register(self._fun, self._name, by_value=True)
        self._drop = weakref.finalize(self, self._team.backend.drop, number)
        self._drop.atexit = False
        self._number, self._starts, self._fingerprint = number, self._team.starts, self._look()
        return number

    def called(self) -> None:
        """A call has ended. What it has changed itself, here as in the workers, such as a cache of
        its own, is no reason to send it again."""
        if self._fingerprint is not None and self._fingerprint.may_change:
            self._fingerprint = self._look()

    def _look(self) -> Fingerprint:
        return fingerprint(self._fun, self._team.workers_have())


class Team:
    """This process, the driver, and `n - 1` workers: by default as many ranks as there are cores.

    Functions and replicas use one. The driver computes too, as rank 0. The workers stay until
    `close`, the end of the `with` block, or the end of the program.

    >>> import weft
    >>> with weft.Team(2) as team:
    ...     total = weft.function(sum, collect="sum", team=team)
    ...     total([1, 2, 3])
    6

    engine   "local", the default, or "serial": this process alone, for debugging.
    timeout  seconds that a call may take after the driver's own part; by default WEFT_TIMEOUT,
             else 1800.
    gpus     for each worker, the GPU that it sees, as CUDA_VISIBLE_DEVICES names it; the driver's
             own is its own matter.
    restart_hint  what errors tell the user to write once a worker is lost.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        engine: str | None = None,
        timeout: float | None = None,
        gpus: Sequence[str] = (),
        restart_hint: str = "team.restart()",
    ) -> None:
        n = validate_size(n)
        row = registry.choose(engine, "team")
        seconds = arguments.seconds(timeout)
        self._functions: weakref.WeakSet[Sendable] = weakref.WeakSet()
        #: by identity of the object: its number, and the object, so that the identity stays its own
        self._replicas: dict[int, tuple[int, Any]] = {}
        options = TeamOptions(n, share_of_cores(), seconds, gpus, restart_hint)
        self.backend: Backend = row.load().make_team(options)
        #: how often the workers were started again
        self.starts = 0
        _teams.add(self)

    @property
    def size(self) -> int:
        """How many ranks there are, the driver among them."""
        return self.backend.size

    @property
    def group(self) -> Group:
        """The group of all ranks."""
        return self.backend.member.group.latest

    def send(self) -> None:
        """Have the workers know every function built for this team by now.

        Functions are sent by themselves when they are first called; this only does it now. It may
        be called any number of times.
        """
        for function in list(self._functions):
            function.send()

    def restart(self) -> None:
        """Start the workers again, after one was lost. Replicas get the driver's values."""
        self.backend.restart()
        self.starts += 1
        _teams.add(self)

    def close(self) -> None:
        """End the workers. Does nothing twice."""
        _teams.discard(self)
        self.backend.close()

    def track(self, function: Sendable) -> None:
        """Note a function that is built for this team, for `send`."""
        self._functions.add(function)

    def replica_number(self, value: Any) -> int:
        """The number of a replicated object; the workers get their copies if they have none."""
        if id(value) not in self._replicas:
            number = self.backend.register(value, f"the {type(value).__name__}")
            self._replicas[id(value)] = number, value
        return self._replicas[id(value)][0]

    def has_replica(self, value: Any) -> bool:
        return id(value) in self._replicas

    def workers_have(self) -> Callable[[Any], bool]:
        """What tells of a value whether workers have it, or a copy of it, by themselves: a replica
        or a part of one, or what lies in shared memory."""

        parts: set[int] | None = None

        def have(value: Any) -> bool:
            nonlocal parts
            if self.has_replica(value) or self.backend.shares(value):
                return True
            if parts is None:  # once in a look: models have many
                replicas = (one for _, one in self._replicas.values())
                parts = {id(part) for one in replicas for part in models.parts(one)}
            return id(value) in parts

        return have

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Team of {self.size} ranks>"


#: those that have workers: they stay until they are closed, whoever else holds them
_teams: set[Team] = set()
_default: Team | None = None


def default_team() -> Team:
    """The team of functions and replicas that were given none; made at its first use."""
    global _default
    if _default is None:
        _default = Team(restart_hint="f.team.restart()  # f: any weft.function or train_step")
    return _default


def set_default_team(team: Team | None) -> None:
    global _default
    _default = team


def _close_all() -> None:
    set_default_team(None)
    for team in list(_teams):
        team.close()


def _in_child() -> None:
    """In a forked child: they are the parent's."""
    set_default_team(None)
    _teams.clear()


session.at_shutdown("teams", _close_all)
session.at_fork(_in_child)
