"""`function`: a PyTensor graph over split data, computed by all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import weft
from synkhronos import _session
from synkhronos._data import Data, data
from synkhronos._graphs import MODES, Graph, read_outputs, read_updates
from synkhronos._orders import Order, run
from synkhronos._selections import cut_of, selections, shifted, subset_of, validate_slices
from synkhronos._shareds import register, validate_sliceable
from synkhronos._values import fit
from weft._core.functions import Common, Partial, Task, join
from weft._core.partition import Batch, RowSlice, choose, common_length, count, part_of_rows
from weft.errors import InvalidType, InvalidValue

#: what a call takes besides inputs by name
OPTIONS = ("output_subset", "batch", "batch_s", "num_slices")
_order = itertools.count()


def function(  # noqa: PLR0917  they were all positional
    inputs: Sequence[Any],
    outputs: Any = None,
    bcast_inputs: Sequence[Any] | None = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Function:
    """Return a function of PyTensor variables that all ranks compute, each on some rows.

    inputs             variables whose values are split along the first axis.
    outputs            a variable, (variable, mode), or a list of these. The mode says what the
                       ranks' outputs come to: "avg" (the default; weighted by rows), "sum",
                       "prod", "min", "max", "gather", or None, which keeps this process's own.
    bcast_inputs       variables whose values go whole to every rank.
    updates            as for pytensor.function, and act in each rank on its own copy. A third
                       element is the mode in which the new values of several slices are one.
    givens, kwargs     as for pytensor.function.
    sliceable_shareds  shared variables, different in each rank, of which `batch_s` and
                       `num_slices` choose rows.

    Raises InvalidValue, InvalidType for what is wrong with these; PyTensor's own errors.
    """
    return Function(
        list(inputs),
        outputs,
        list(bcast_inputs or ()),
        updates,
        givens,
        list(sliceable_shareds or ()),
        kwargs,
    )


class Function:
    """A function of PyTensor variables: what `function` returns."""

    def __init__(  # noqa: PLR0917  as `function` has them
        self,
        inputs: list[Any],
        outputs: Any,
        whole: list[Any],
        updates: Any,
        givens: Any,
        sliceable: list[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        variables, self.output_modes, self._single = read_outputs(outputs)
        read = read_updates(updates)
        self.update_modes = [one.mode for one in read]
        self._inputs = _validate_inputs([*inputs, *whole])
        self._split = len(inputs)
        self._graph = Graph([*inputs, *whole], variables, read, givens, sliceable, kwargs)
        plain = self._graph.compile()
        self.name: str = kwargs.get("name") or plain.name or "function"
        self._compiled: dict[tuple[str | None, bool], Any] = {(None, False): plain}
        self.shareds: list[Any] = list(plain.get_shared())
        validate_sliceable(sliceable, self.shareds)
        #: the team that has the function, and the numbers of what it has
        self._team: weft.Team | None = None
        self._numbers: dict[tuple[str | None, bool], int] = {}
        self.order = next(_order)
        _session.register(self)

    def send(self) -> None:
        """Send the function and its variables to all processes, if they do not have them yet."""
        self._number(None, sliced=False)

    def __call__(
        self,
        *inputs: Any,
        output_subset: Sequence[int] | None = None,
        batch: Batch | None = None,
        batch_s: Any = None,
        num_slices: int = 1,
        **by_name: Any,
    ) -> Any:
        """Compute with all ranks.

        output_subset  the positions of the outputs that are wanted.
        batch          rows of all inputs that are split: the first n, a slice, or indexes.
        batch_s        rows of the sliceable shared variables, in each rank those of its own: one
                       choice for all, or a list with one for each rank.
        num_slices     each rank works through its rows in so many slices. All are computed with
                       the variables' values from before the call; updates are applied once.
        """
        options = CallOptions(output_subset, batch, batch_s, num_slices)
        orders, common = self.orders(inputs, by_name, options)
        own = [None if one is None else (one,) for one in orders]
        results = _session.team(self.name).backend.call(run, own, common=common)
        return self.collect(results, output_subset)

    def as_theano(self, *inputs: Any, **by_name: Any) -> Any:
        """Compute the same function in this process alone, on all rows."""
        values = [np.asarray(one) for one in self._values(inputs, by_name)]
        found = self._compiled[None, False](*values)
        return found[0] if self._single else found

    def build_inputs(
        self,
        *inputs: Any,
        force_cast: bool = False,
        oversize: float = 1,
        minibatch: bool = False,
        **by_name: Any,
    ) -> list[Data]:
        """Return Data for all inputs, in their order, in memory that all ranks see."""
        return [
            data(value, var, force_cast=force_cast, oversize=oversize, minibatch=minibatch)
            for value, var in zip(self._ordered(inputs, by_name), self._inputs, strict=True)
        ]

    def __repr__(self) -> str:
        return f"<synkhronos function {self.name!r}, outputs {self.output_modes}>"

    def orders(
        self, inputs: Sequence[Any], by_name: Mapping[str, Any], options: CallOptions
    ) -> tuple[list[Order | None], dict[str, Any]]:
        """Return what each rank of weft's team is to do, and the arguments common to all."""
        team = _session.team(self.name)
        given = self._values(inputs, by_name)
        split = given[: self._split]
        rows = choose(options.batch, self._length(split, options.batch))
        validate_slices(options.num_slices, count(rows) if split else None)
        several = options.num_slices > 1
        cut = cut_of(options.batch_s, several, self._graph.sliceable)
        sliced = several and bool(self._graph.array_updates)
        order = Order(
            self._number(cut, sliced=sliced),
            Task([], {}, 1, options.num_slices, self._wanted(options.output_subset, sliced)),
            self._modes(options.output_subset, sliced),
            [team.replica_number(one.variable) for one in self._graph.array_updates if sliced],
            cut,
            [team.replica_number(one) for one in self._graph.sliceable],
            has_rows=bool(split),
        )
        arrays = [one.data if isinstance(one, Data) else one for one in given]
        common = {f"input {at}": array for at, array in enumerate(arrays) if at >= self._split}
        chosen = selections(options.batch_s, team.size)
        found: list[Order | None] = [None] * team.size
        for rank, place in enumerate(_session.places(team.size)):
            own = part_of_rows(rows, team.size, rank)
            if split and not count(own) and (place or count(rows)):
                continue  # no rows: nothing to do
            task = order.task._replace(
                arguments=[*_row_slices(split, rows, own), *map(Common, common)],
                rows=count(own) if split else 1,
            )
            found[place] = replace(order, task=task, selection=chosen[rank])
        return found, common

    def collect(self, results: Sequence[Partial | None], subset: Sequence[int] | None) -> Any:
        """Return the ranks' results, joined."""
        places = _session.places(len(results))
        parts = [one for one in (results[place] for place in places) if one is not None]
        modes = self._modes(subset, sliced=False)
        joined = join(parts, modes)
        if results[0] is not None:
            for position, mode in enumerate(modes):
                if mode is None:
                    joined[position] = results[0].outputs[position]
        return joined[0] if self._single else list(joined)

    def _values(self, inputs: Sequence[Any], by_name: Mapping[str, Any]) -> list[Any]:
        """Return the inputs' values in their order, in the variables' dtypes."""
        pairs = zip(self._ordered(inputs, by_name), self._inputs, strict=True)
        return [self._fitted(value, var, at) for at, (value, var) in enumerate(pairs)]

    def _fitted(self, value: Any, var: Any, position: int) -> Any:
        if isinstance(value, Data) and (value.dtype, value.ndim) == (var.dtype, var.ndim):
            return value
        what = f"{self.name}: the input {_called(var, position)}"
        if _is_minibatch(value):
            raise InvalidType(
                f"{what} is {value}; expected a minibatch of dtype {var.dtype} with {var.ndim} axes"
            )
        return fit(value, var.dtype, var.ndim, what)

    def _ordered(self, inputs: Sequence[Any], by_name: Mapping[str, Any]) -> list[Any]:
        names = [one.name for one in self._inputs]
        found = dict(enumerate(inputs))
        for name, value in by_name.items():
            if name not in names:
                raise InvalidType(f"{self.name} got an input {name!r}; its inputs are {names}")
            if names.index(name) in found:
                raise InvalidType(f"{self.name} got the input {name!r} twice")
            found[names.index(name)] = value
        if len(found) != len(names) or len(inputs) > len(names):
            raise InvalidType(
                f"{self.name} got {len(found)} inputs; expected {len(names)}: {names}"
            )
        return [found[position] for position in range(len(names))]

    def _length(self, split: Sequence[Any], batch: Batch | None) -> int:
        """Return how many rows there are to choose from."""
        named = {_called(self._inputs[at], at): one for at, one in enumerate(split)}
        if batch is not None:  # those of minibatches are only the chosen ones
            whole = {name: one for name, one in named.items() if not _is_minibatch(one)}
            if named and not whole:
                raise InvalidValue(
                    f"batch={batch!r} was given, and all split inputs are minibatches; expected at "
                    "least one input with all rows"
                )
            named = whole
        elif not named:
            return 0
        return common_length(
            named, otherwise="; what goes to every rank as it is belongs in bcast_inputs=[...]"
        )

    def _wanted(self, subset: Sequence[int] | None, sliced: bool) -> tuple[int, ...] | None:
        if subset is None:
            return None
        outputs = len(self.output_modes)
        new = len(self._graph.array_updates) if sliced else 0
        return (*subset_of(subset, outputs), *range(outputs, outputs + new))

    def _modes(self, subset: Sequence[int] | None, sliced: bool) -> list[str | None]:
        chosen = range(len(self.output_modes)) if subset is None else subset
        modes = [MODES[self.output_modes[one]] for one in chosen]
        return [*modes, *(MODES[one.mode] for one in self._graph.array_updates if sliced)]

    def _number(self, cut: str | None, *, sliced: bool) -> int:
        """Return the number of a compiled function in the team, which gets it if it has none."""
        team = _session.team(self.name)
        if self._team is not team:
            self._team, self._numbers = team, {}
        key = cut, sliced
        if key not in self._numbers:
            if key not in self._compiled:
                self._compiled[key] = self._graph.compile(cut, sliced=sliced)
            for variable in self.shareds:
                register(team, variable)
            self._numbers[key] = team.backend.register(self._compiled[key], self.name)
        return self._numbers[key]


class CallOptions(NamedTuple):
    """The options of a call."""

    output_subset: Sequence[int] | None = None
    batch: Batch | None = None
    batch_s: Any = None
    num_slices: int = 1


def _row_slices(split: Sequence[Any], rows: Any, own: Any) -> list[RowSlice]:
    """Return a rank's own rows of the inputs that are split."""
    found = []
    for value in split:
        array = value.data if isinstance(value, Data) else value
        taken = shifted(own, rows, len(array)) if _is_minibatch(value) else own
        found.append(RowSlice(array, taken))
    return found


def _is_minibatch(value: Any) -> bool:
    return isinstance(value, Data) and value.minibatch


def _called(variable: Any, position: int) -> str:
    return repr(variable.name) if variable.name else f"at position {position}"


def _validate_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs' variables. Raises InvalidType, InvalidValue."""
    variables = [getattr(one, "variable", one) for one in inputs]
    for position, (given, variable) in enumerate(zip(inputs, variables, strict=True)):
        if not hasattr(variable, "owner") or not hasattr(variable, "ndim"):
            raise InvalidType(
                f"inputs[{position}] is a {type(given).__name__}; expected a variable of PyTensor"
            )
        if variable.name in OPTIONS:
            raise InvalidValue(
                f"inputs[{position}] is called {variable.name!r}, which is an option of the call; "
                "rename it: options are " + ", ".join(OPTIONS)
            )
    return variables
