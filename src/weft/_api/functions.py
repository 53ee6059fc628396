"""`function`: one call over split rows, with the result of a single process."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft._api.checking import Schedule, check_parts, shape_of
from weft._api.team import RegisteredFunction, Team, default_team, in_turn, validate_team
from weft._core.arguments import validate_count, whole
from weft._core.checks import Comparison, describe, few
from weft._core.functions import (
    Common,
    Modes,
    Partial,
    Task,
    compute,
    join,
    select,
    validate_modes,
)
from weft._core.items import validate_callable
from weft._core.partition import Batch, choose, common_length, count, part_of_rows, slice_rows
from weft.engines.base import Member
from weft.engines.generators import SeedSource
from weft.errors import InvalidType, InvalidValue, Mismatch

#: what a call takes besides the function's own arguments
OPTIONS = ("batch", "num_slices", "outputs")

Which = Sequence[str | int] | str | int


def function(
    fun: Callable[..., Any],
    *,
    collect: Modes = ...,
    split: Which | None = None,
    whole: Which = (),
    team: Team | None = None,
    check: bool | None = False,
    seed: int | None = None,
) -> Function:
    """Return `fun` as a function whose rows are computed by all ranks of a team.

    `f(x, y)` equals `fun(x, y)` if `collect` says how the output depends on the rows:

    >>> import numpy, weft
    >>> f = weft.function(lambda x, w: (x @ w).mean(), collect="mean", whole=["w"])
    >>> f(numpy.ones((5, 2)), numpy.ones(2))
    np.float64(2.0)
    >>> weft.shutdown()

    collect  "mean" (over the rows, weighted by how many each rank had), "sum", "prod", "min",
             "max", "gather" (one row for each row), or None (the driver's own output); for several
             outputs one mode for all, or a list or dict of modes. It must be given.
    split    the arguments that are split along their first axis, by name or position; by default
             all but `whole`. A dict or tuple of arrays is split array by array.
    whole    the arguments that go to every rank as they are.
    team     the ranks; by default one team for all functions, with one rank for each core.
    check    with False the first call of each shape computes a few rows here as well, at once and
             in two parts, and raises Mismatch if `collect` does not make one of the other; with
             True every call does, with None none.
    seed     seeds the random generators of all ranks at each call from (seed, call, rank); by
             default those of `Team(seed=...)`, else from the states of the driver's generators.

    Calls take these besides the function's own arguments:

    batch       rows of all split arguments: the first n, a slice, or a list of indexes.
    num_slices  in how many slices each rank works through its rows, to save memory.
    outputs     the outputs to return, by position or key.

    `f.serial(...)` calls `fun` here. Arrays of `weft.share` are not copied. `fun` is sent at its
    first call, and again when anything that it uses has changed since it was sent: that is compared
    whole at each call. What is large, and changes seldom or never, is better a replica, an array of
    `weft.share(array, readonly=True)`, or made read-only by `array.setflags(write=False)`; these
    are not compared. What changes at every call is better an argument.

    A check calls a copy of `fun`, to which arrays are read-only. It says nothing of a function that
    raises an error then. One that gives other numbers each time is called up to 120 times.

    Raises InvalidType, InvalidValue. Calls raise these, what `fun` raises, Mismatch, TeamBroken,
    UsedConcurrently, WorkerLost and Stalled.
    """
    validate_callable(fun, "function(fun)")
    if collect is ...:
        raise _without_collect_error(fun)
    validate_modes(collect)
    return Function(
        fun, collect=collect, split=split, whole=whole, team=team, check=check, seed=seed
    )


def _without_collect_error(fun: Callable[..., Any]) -> InvalidType:
    name = _in_code(_name_of(fun))
    lines = [
        f"    weft.function({name}, collect={mode!r})  # {what}" for mode, what in _MODES.items()
    ]
    return InvalidType(
        f"function({name}) was not told by collect= what the output is, and so how the ranks' "
        "outputs make one; write one of\n" + "\n".join(lines)
    )


_MODES = {
    "mean": "a mean over the rows",
    "sum": "a sum over the rows; also 'prod', 'min', 'max'",
    "gather": "one row for each row",
    None: "anything: the driver's own output, of its own rows",
}


def _name_of(fun: Callable[..., Any]) -> str:
    return str(getattr(fun, "__name__", type(fun).__name__))


def _in_code(name: str) -> str:
    return name if name.isidentifier() else "fun"  # a lambda has no name


class Function:
    """A function over split rows: what `function` returns."""

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        collect: Modes,
        split: Which | None,
        whole: Which,
        team: Team | None,
        check: bool | None,
        seed: int | None,
    ) -> None:
        self.name = _name_of(fun)
        self.collect = collect
        self._fun = fun
        parameters = _parameters_of(fun)
        self._names = [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]
        self._whole = parse_argument_names(parameters, whole, "whole")
        self._split = None if split is None else parse_argument_names(parameters, split, "split")
        both = self._whole & (self._split or set())
        if both:
            raise InvalidValue(f"{sorted(map(str, both))} is both in split= and in whole=")
        self._schedule = Schedule(check)
        self._seeds = None if seed is None else SeedSource(validate_count(seed, "function", "seed"))
        #: by position or name: whether an argument is split
        self._splits: dict[int | str, bool] = {}
        self._team = validate_team(team)
        self._registered: RegisteredFunction | None = None
        if team is not None:
            team.track(self)

    @property
    def team(self) -> Team:
        """Return the team that computes the function."""
        if self._team is None:
            self._team = default_team()
            self._team.track(self)
        return self._team

    @in_turn
    def send(self) -> None:
        """Send the function to the workers, if they do not have it as it is now."""
        self._registered_now().number()

    def _registered_now(self) -> RegisteredFunction:
        if self._registered is None:
            self._registered = RegisteredFunction(self.team, self._fun, self.name)
        return self._registered

    @in_turn
    def __call__(
        self,
        *arguments: Any,
        batch: Batch | None = None,
        num_slices: int = 1,
        outputs: Sequence[Any] | Any = None,
        **keywords: Any,
    ) -> Any:
        """Call the function with its rows split over the ranks. `weft.function` has the options."""
        began = time.perf_counter()
        number = self._registered_now().number()
        split = self._split_arguments(arguments, keywords)
        length = common_length(
            {self._name_of(key): value for key, value in split.items()},
            otherwise="; what goes to every rank as it is belongs in whole=[...]",
        )
        rows = choose(batch, length)
        slices = _validate_slices(num_slices, count(rows))
        single = outputs is not None and not isinstance(outputs, (list, tuple))
        wanted = None if outputs is None else (outputs,) if single else tuple(outputs)
        modes = self.collect
        if wanted is not None and isinstance(modes, (list, tuple, Mapping)):
            modes = select(modes, wanted)
        call = _Call(number, arguments, keywords, split.keys(), slices, wanted)
        self._validate(call, rows, modes)
        joined = self._on_team(call, rows, modes)
        self._registered_now().called(time.perf_counter() - began)
        if single:
            return next(iter(joined.values())) if isinstance(joined, Mapping) else joined[0]
        return joined

    def serial(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function itself, in this process."""
        return self._fun(*arguments, **keywords)

    def __repr__(self) -> str:
        return f"<Function {self.name!r}, collect={self.collect!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the team: in a worker whose function uses this one, it has none yet. And what
        its calls have left: the function that uses it would be sent again after each."""
        fresh: dict[str, Any] = {"_team": None, "_registered": None, "_splits": {}}
        fresh["_schedule"] = Schedule(self._schedule.option)
        fresh["_seeds"] = self._seeds and SeedSource(self._seeds.seed)
        return {**self.__dict__, **fresh}

    def _on_team(self, call: _Call, rows: Any, modes: Modes) -> Any:
        size = self.team.size
        parts = [part_of_rows(rows, size, rank) for rank in range(size)]
        own = [
            # without any rows the driver alone calls it
            (call.number, modes, *self._task(call, rows)) if count(rows) or rank == 0 else None
            for rank, rows in enumerate(parts)
        ]
        results = self.team.call(_compute, own, common=self._common(call), seeds=self._seeds)
        return join([Partial(*result) for result in results if result is not None], modes)

    def _is_split(self, key: int | str) -> bool:
        if key not in self._splits:
            keys = {key, self._name_of(key)}
            chosen = self._split is None or bool(keys & self._split)
            self._splits[key] = chosen and not keys & self._whole
        return self._splits[key]

    def _name_of(self, key: int | str) -> str:
        if isinstance(key, str):
            return key
        return self._names[key] if key < len(self._names) else f"argument {key}"

    def _split_arguments(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> dict[int | str, Any]:
        """Return the split arguments by position or name. Raises InvalidValue for none."""
        split = {key: x for key, x in _given(arguments, keywords) if self._is_split(key)}
        if not split:
            raise InvalidValue(
                f"{self.name!r} was called without an argument to split; give it one, or call "
                f"{self.name}.serial(...)"
            )
        return split

    def _common(self, call: _Call) -> dict[str, Any]:
        """Return the arguments that go whole to every rank, by name."""
        return {name: value for name, value, is_split in self._inputs(call) if not is_split}

    def _task(self, call: _Call, rows: Any) -> Task:
        """Return a rank's part of a call, with references to the common arguments."""

        def given(key: int | str, value: Any) -> Any:
            return slice_rows(value, rows) if key in call.split else Common(self._name_of(key))

        return Task(
            [given(position, value) for position, value in enumerate(call.arguments)],
            {name: given(name, value) for name, value in call.keywords.items()},
            count(rows),
            call.slices,
            call.wanted,
        )

    def _validate(self, call: _Call, rows: Any, modes: Modes) -> None:
        """Raise Mismatch if this call is to be checked and the modes do not say what the outputs
        are."""
        if count(rows) < 2 or modes is None:
            return
        shape = (call.wanted, shape_of(self._inputs(call)))
        difference = self._schedule.check(shape, lambda: self._compared(call, rows, modes))
        if difference is None:
            return
        fitting = " or ".join(f"collect={mode!r}" for mode in difference.fitting)
        raise Mismatch(
            f"{self.name!r} with collect={self.collect!r}: {describe(difference, few(rows))}: the "
            "mode does not say what the output is; "
            + (f"{fitting} would fit" if fitting else _NO_MODE)
            + "; to leave out this check:\n"
            f"    weft.function({_in_code(self.name)}, ..., check=None)"
        )

    def _compared(self, call: _Call, rows: Any, modes: Modes) -> Comparison:
        def evaluate(isolated: Any, rows: Any) -> Any:
            fun, common = isolated
            task = self._task(call._replace(slices=1), rows).with_common(common)
            return compute(fun, task.with_own_rows(), modes).outputs

        return check_parts((self._fun, self._common(call)), evaluate, rows, modes)

    def _inputs(self, call: _Call) -> Iterator[tuple[str, Any, bool]]:
        """Yield the arguments of a call, each with its name and whether it is split."""
        given = _given(call.arguments, call.keywords)
        return ((self._name_of(key), value, key in call.split) for key, value in given)


def _given(
    arguments: Iterable[Any], keywords: Mapping[str, Any]
) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(arguments)
    yield from keywords.items()


#: what to do about a function that no mode describes
_NO_MODE = (
    "no mode fits: return what has one, such as sums and counts, and make the rest of it after the "
    "call, or call f.serial(...)"
)


class _Call(NamedTuple):
    """One call of a function."""

    #: the function's number in the team
    number: int
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    #: which of them are split, by position or name
    split: Collection[int | str]
    slices: int
    wanted: tuple[Any, ...] | None


def _compute(
    member: Member, number: int, modes: Modes, /, *task: Any, **common: Any
) -> tuple[Any, int]:
    """Compute a rank's task (a remote function). Plain tuples travel in half the time."""
    outputs, rows = compute(member.registered[number], Task(*task).with_common(common), modes)
    return outputs, rows


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters, in order; any number of any where they are not known."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some built-in functions
        return [inspect.Parameter(f"any{kind}", kind) for kind in _REST]
    clash = [p.name for p in parameters if p.name in OPTIONS and p.kind not in _REST]
    if clash:
        raise InvalidValue(
            f"the function has a parameter {clash[0]!r}, which is an option of the call; rename "
            "it: options are " + ", ".join(OPTIONS)
        )
    return parameters


def parse_argument_names(
    parameters: Sequence[inspect.Parameter], which: Which, option: str
) -> set[str | int]:
    """Return the arguments given as split= or whole=, by name where they have one, else by
    position. Raises InvalidType, InvalidValue."""
    given = [which] if isinstance(which, str) or whole(which) is not None else which
    if not isinstance(given, Iterable):
        raise InvalidType(f"{option}={which!r}: expected a list of names or positions of arguments")
    return {_argument(parameters, name, option) for name in given}


def _argument(parameters: Sequence[inspect.Parameter], which: object, option: str) -> str | int:
    names = [p.name for p in parameters if p.kind not in _REST]
    ordered = [p.name for p in parameters if p.kind in _BY_POSITION]
    any_position, any_name = (any(p.kind is kind for p in parameters) for kind in _REST)
    position = whole(which)
    if position is None and not isinstance(which, str):
        raise InvalidType(
            f"{option} has {which!r}; expected names or positions of arguments, for example "
            f"{option}=['x'] or {option}=[0]"
        )
    if position is None:
        name = str(which)
        wrong = name not in names and not any_name
    else:
        name = ordered[position] if 0 <= position < len(ordered) else ""
        wrong = position < 0 or not (name or any_position)
    if wrong:
        raise InvalidValue(f"{option} has {which!r}; the function's arguments are {names}")
    return name or position or 0


def _validate_slices(slices: object, rows: int) -> int:
    number = whole(slices)
    if number is None:
        raise InvalidType(f"num_slices={slices!r}: expected a whole number")
    if not 1 <= number <= max(1, rows):
        raise InvalidValue(
            f"num_slices={slices}: expected 1 to {max(1, rows)}, as many as there are rows"
        )
    return number
