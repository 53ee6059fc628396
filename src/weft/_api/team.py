"""`Team`: a driver and workers that stay, for functions and replicas."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from weft._api import session
from weft._api.mapping import share_of_cores, validate_size
from weft._core import arguments
from weft._core.failures import warn_caller
from weft._core.fingerprint import Fingerprint, fingerprint
from weft.engines import registry
from weft.engines.base import NO_COMMON, Member, TeamOptions
from weft.engines.generators import DriverStates, Seeds, SeedSource, seeded
from weft.engines.interruption import by_signal_handler
from weft.errors import InvalidType
from weft.resources import choose_gpus

if TYPE_CHECKING:
    from weft.engines.base import Group
    from weft.engines.base import Team as Backend


class Sendable(Protocol):
    """Describe what a team needs of a function that uses it."""

    def send(self) -> None:
        """Send it to the workers, if they do not have it as it is now."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_turn(method: _Method) -> _Method:
    """Make threads call a method one after the other, as far as their objects use the same team:
    what it sends to the workers and what it calls there belong together."""

    @functools.wraps(method)
    def call(user: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return user.team.backend.turns.call(method, user, *arguments, **keywords)

    return cast("_Method", call)


class RegisteredFunction:
    """A function that the workers of a team have a copy of. It is sent again when the program has
    changed something that it uses."""

    def __init__(
        self, team: Team, fun: Callable[..., Any], name: str, *, takes_whole: bool = True
    ) -> None:
        self._team, self._fun, self._name = team, fun, name
        #: whether what it uses can be an argument that goes whole to every rank
        self._takes_whole = takes_whole
        self._number: int | None = None
        #: the fingerprint when it was last sent, and the team's count of restarts then
        self._sent: Fingerprint | None = None
        self._starts = 0
        self._drop: Callable[[], Any] = lambda: None
        self._cost = _Cost()

    def number(self) -> int:
        """Send the function if the workers do not have it as it is now, and return its number."""
        began, used = time.perf_counter(), time.thread_time()
        now = self._fingerprint()
        number = self._number if self._starts == self._team.starts else None
        if number is None:
            return self._send(now)
        if now != self._sent:
            number = self._send(now)
        size = 0 if now is None else now.size
        self._cost.looked(time.perf_counter() - began, time.thread_time() - used, size)
        return number

    def called(self, seconds: float) -> None:
        """Note how long a call took. Warn once if a notable part of it went into `number`."""
        if self._cost.is_notable(seconds):
            warn_caller(_costly(self._fun, self._name, self._cost, takes_whole=self._takes_whole))

    def _send(self, now: Fingerprint | None) -> int:
        self._number = None
        self._drop()
        number = self._team.backend.register(self._fun, self._name, by_value=True)
        self._drop = weakref.finalize(self, self._team.backend.drop, number)
        self._drop.atexit = False
        self._number, self._starts, self._sent = number, self._team.starts, now
        if now is not None and now.has_classes:
            self._mark_outdated()
        return number

    def _mark_outdated(self) -> None:
        """Send those functions again that were sent with other attributes of classes of the
        script: the one that was sent now has changed these for all."""
        for other in list(self._team.with_classes):
            if other is not self and other._fingerprint() != other._sent:
                other._sent = None
        self._team.with_classes.add(self)

    def _fingerprint(self) -> Fingerprint | None:
        """Return what differs once the function would be sent otherwise; None if nobody gets it or
        it cannot be pickled, of which sending it tells."""
        if self._team.size == 1:
            return None
        try:
            return fingerprint(self._fun, self._team.backend.persistent_ids())
        except Exception as error:  # a class's own pickling may raise anything
            if by_signal_handler(error):
                raise
            self._number = None
            return None


class _Cost:
    """Tell how long all calls took to compare what a function uses, and to send it again."""

    def __init__(self) -> None:
        self.looking, self.calling = 0.0, 0.0
        self._looks = 0
        #: of these, how many took long
        self._long = 0
        self._told = False

    @property
    def part(self) -> float:
        """Return which part of the calls' time that was."""
        return self.looking / max(self.calling, self.looking, 1e-9)

    def looked(self, seconds: float, computing: float, size: int) -> None:
        """Note that it took so many seconds, so many of them the thread's own, in which so many
        bytes were compared."""
        self._looks += 1
        self.looking += seconds
        self._long += computing >= (_SECONDS if size >= _BYTES else _SECONDS_OF_LITTLE)

    def is_notable(self, seconds: float) -> bool:
        """Note a call. Return, once, whether it is worth a warning: a fifth of the time, and more
        than the call's own cost, in most of the calls. One or two of them may take long on a busy
        machine, where the thread's own time is longer too."""
        self.calling += seconds
        is_rare = self._long < _CALLS or 2 * self._long < self._looks
        if self._told or is_rare or self.part < _PART:
            return False
        self._told = True
        return True


#: in how many calls, and from which part of their time on, comparing is notable
_CALLS, _PART = 8, 0.2
#: the thread's own seconds from which on a comparison takes long, and those for fewer bytes: to
#: compare next to nothing, and send it, takes 0.4 ms, on a busy machine several times as long
_SECONDS, _BYTES, _SECONDS_OF_LITTLE = 1e-3, 10_000, 1e-2


def _costly(fun: Callable[..., Any], name: str, cost: _Cost, *, takes_whole: bool) -> str:
    """Return the text of the warning, which names the largest value that the function uses."""
    try:
        closure = inspect.getclosurevars(fun)
        used = {**closure.globals, **closure.nonlocals}
        sizes = {variable: fingerprint(value).size for variable, value in used.items()}
    except Exception:  # it is no function, or uses what only workers have
        used, sizes = {}, {}
    largest = max(sizes, key=sizes.__getitem__, default="w")
    size = f", most of all {largest}, {sizes[largest]:,} bytes" if sizes else ""
    lines = [f"weft.replicate({largest})  # each rank has a copy of its own"]
    if takes_whole:
        line = f"weft.function(..., whole=[{largest!r}])  # an argument: sent, not compared"
        lines.insert(0, line)
    if hasattr(used.get(largest, cost), "setflags"):
        lines += [
            f"{largest} = weft.share({largest}, readonly=True)  # all ranks see one array",
            f"{largest}.setflags(write=False)  # an array that nobody changes any more",
        ]
    return (
        f"{cost.part:.0%} of the time of {name}'s calls went into comparing the values that it "
        f"uses besides its arguments with those that the workers have, and sending what had "
        f"changed{size}. One of these avoids it:" + "".join(f"\n    {line}" for line in lines)
    )


def _gpus(named: str | Sequence[str | int] | None) -> Sequence[str]:
    """Return the GPUs that workers take in turn; none if they see what the driver sees."""
    if named is None:
        return session.gpus_of_workers()
    nothing = not isinstance(named, str) and hasattr(named, "__len__") and len(named) == 0
    return () if nothing else choose_gpus(named, os.environ, f"Team(gpus={named!r})")


class Team:
    """A driver, which is this process, and workers that stay, for functions and replicas.

    The driver computes too, as rank 0. The workers stay until `close`, the end of the `with` block,
    or the end of the program.

    >>> import weft
    >>> with weft.Team(2) as team:
    ...     total = weft.function(sum, collect="sum", team=team)
    ...     total([1, 2, 3])
    6

    n             the number of ranks, the driver among them; by default one for each core.
    engine        "local", the default, or "serial": this process alone, for debugging.
    timeout       seconds that a call may take after the driver's own part; by default WEFT_TIMEOUT,
                  else 1800.
    gpus          the GPUs that the workers take in turn, as CUDA_VISIBLE_DEVICES names them, or
                  their numbers: "1,2" or [1, 2]. Each worker sees its own alone; what the driver,
                  rank 0, sees stays as it is. By default rank i has GPU i, counted round; with ()
                  all see what the driver sees.
    mps           whether ranks that share a GPU use it at once, by a private daemon of NVIDIA's
                  MPS, instead of by turns. It ends with `weft.shutdown`, or with this process if
                  that has used CUDA. A rank that is killed inside a long kernel takes the CUDA
                  contexts of all the others with it.
    seed          seeds the random generators of all ranks at each call of a function or training
                  step from (seed, call, rank); by default they derive from the states of the
                  driver's own generators.
    restart_hint  the line that errors tell the user to write after a worker was lost.

    Raises InvalidType, InvalidValue, UnknownEngine, EngineUnavailable, DeviceUnavailable.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        engine: str | None = None,
        timeout: float | None = None,
        gpus: str | Sequence[str | int] | None = None,
        mps: bool = False,
        seed: int | None = None,
        restart_hint: str = "team.restart()",
    ) -> None:
        n = validate_size(n)
        seeds = None if seed is None else SeedSource(arguments.validate_count(seed, "Team", "seed"))
        row = registry.choose(engine, "team")
        seconds = arguments.seconds(timeout)
        self._functions: weakref.WeakSet[Sendable] = weakref.WeakSet()
        #: the functions that were sent with classes of the script
        self.with_classes: weakref.WeakSet[RegisteredFunction] = weakref.WeakSet()
        self._seeds, self._states = seeds, DriverStates()
        #: by id of the object
        self._replicas: dict[int, _Registered] = {}
        options = TeamOptions(n, share_of_cores(), seconds, _gpus(gpus), mps, restart_hint)
        self.backend: Backend = row.load().make_team(options)
        #: how often the workers were restarted
        self.starts = 0
        _teams.add(self)

    @property
    def size(self) -> int:
        """Return the number of ranks, the driver among them."""
        return self.backend.size

    @property
    def group(self) -> Group:
        """Return the group of all ranks."""
        return self.backend.member.group.latest

    def send(self) -> None:
        """Send every function made for this team to the workers now.

        Otherwise a function is sent when it is first called. It may be called any number of times.
        """
        for function in list(self._functions):
            function.send()

    def restart(self) -> None:
        """Start new workers, after one was lost. Replicas get the driver's values."""
        self.backend.restart()
        self.starts += 1
        self._states.forget()
        _teams.add(self)

    def close(self) -> None:
        """End the workers. Closing twice does nothing more."""
        _teams.discard(self)
        self.backend.close()

    def call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        *,
        common: Mapping[str, Any] = NO_COMMON,
        seeds: SeedSource | None = None,
    ) -> list[Any]:
        """Call a remote function in the ranks that have arguments of their own, after their random
        generators were seeded. Return the results in rank order."""
        chosen = seeds or self._seeds
        if chosen is None and self.size == 1:  # the driver's generators are its own
            return self.backend.call(function, own, common=common)
        call = (function, (chosen or self._states).next())
        seeded = [None if mine is None else (*call, *mine) for mine in own]
        results = self.backend.call(_call_seeded, seeded, common=common)
        if chosen is None:
            self._states.note()
        return results

    def track(self, function: Sendable) -> None:
        """Remember a function that uses this team, for `send`."""
        self._functions.add(function)

    def replica_number(self, value: Any, user: Any = None) -> int:
        """Return the number of a replica, of which the workers get copies if they have none. They
        keep them while one of its users exists, and then until another object gets a user; without
        a user, until the team is closed."""
        if user is not None:
            self._drop_unused(value)
        replica = self._replicas.get(id(value))
        if replica is None:
            number = self.backend.register(value, f"the {type(value).__name__}")
            replica = self._replicas[id(value)] = _Registered(number, value)
        replica.users += 1
        if user is not None:
            weakref.finalize(user, replica.leave).atexit = False
        return replica.number

    def _drop_unused(self, wanted: Any) -> None:
        """Drop the copies of objects whose last user is gone, but of the one that is wanted."""
        for identity, replica in list(self._replicas.items()):
            if not replica.users and replica.value is not wanted:
                del self._replicas[identity]
                self.backend.drop(replica.number)

    def has_replica(self, value: Any) -> bool:
        """Return whether the workers have copies of this object."""
        return id(value) in self._replicas

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Team of {self.size} ranks>"


@dataclass
class _Registered:
    """An object of which the workers have copies."""

    number: int
    #: so that no other object gets the same id
    value: Any
    #: how many need the copies
    users: int = 0

    def leave(self) -> None:
        """Note that a user is gone. Safe in finalizers."""
        self.users -= 1


def _call_seeded(
    member: Member, function: Callable[..., Any], seeds: Seeds, /, *own: Any, **common: Any
) -> Any:
    """Seed a rank's random generators, and call a remote function (a remote function too)."""
    with seeded(seeds, member.rank):
        return function(member, *own, **common)


#: teams that have workers: they stay until they are closed, even if nobody else holds them
_teams: set[Team] = set()
_default: Team | None = None
#: several threads may be the first to use it
_making = threading.RLock()


def default_team() -> Team:
    """Return the team of functions and replicas that were given none; made at its first use."""
    global _default
    with _making:
        if _default is None:
            _default = Team(restart_hint="f.team.restart()  # f: any weft.function or train_step")
        return _default


def validate_team(team: Any) -> Team | None:
    """Return what was given as `team=`. Raises InvalidType unless it is a Team or None."""
    if team is None or isinstance(team, Team):
        return team
    raise InvalidType(
        f"team={team!r}: expected a Team, such as team=weft.Team(2), or None for the default one"
    )


def set_default_team(team: Team | None) -> None:
    """Replace the default team; with None the next use makes a new one."""
    global _default
    _default = team


def _close_all() -> None:
    set_default_team(None)
    for team in list(_teams):
        team.close()


def _in_child() -> None:
    """Forget all teams in a forked child: they are the parent's."""
    global _making
    _making = threading.RLock()
    set_default_team(None)
    _teams.clear()


session.at_shutdown("teams", _close_all)
session.at_fork(_in_child)
