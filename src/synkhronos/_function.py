"""`function`: a PyTensor graph over split data, computed by all ranks."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import weft
from synkhronos import _session
from synkhronos._data import Data, data
from synkhronos._graphs import MODES, Graph, as_list, read_givens, read_outputs, read_updates
from synkhronos._inputs import Inputs, validate_inputs
from synkhronos._names import are_modes, are_split, are_variables
from synkhronos._orders import Order, run
from synkhronos._packages import pytensor
from synkhronos._selections import (
    cut_of,
    parts,
    selections,
    subset_of,
    validate_slices,
)
from synkhronos._shareds import register, validate_sliceable
from weft._core.arguments import explain_keywords, validate_keywords
from weft._core.functions import Partial, Task, join
from weft._core.partition import Batch, count
from weft.errors import InvalidValue

#: what a call takes besides inputs by name
OPTIONS = ("output_subset", "batch", "batch_s", "num_slices")
_order = itertools.count()


@explain_keywords
def function(  # noqa: PLR0917  they were all positional
    inputs: Sequence[Any],
    outputs: Any = None,
    bcast_inputs: Sequence[Any] | None = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Sequence[Any] | None = None,
    *,
    collect_modes: Any = "reduce",
    reduce_ops: Any = "avg",
    broadcast_inputs: Sequence[Any] | None = None,
    scatter_inputs: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Function:
    """Return a function of PyTensor variables that all ranks compute, each on some rows.

    inputs             variables whose values are split along the first axis.
    outputs            a variable, (variable, mode), or a list of these. The mode says what the
                       ranks' outputs come to: "avg" (the default; weighted by rows), "sum",
                       "prod", "min", "max", "gather", or None, which keeps this process's own.
    bcast_inputs       more inputs, whose values go whole to every rank.
    updates            as for pytensor.function, and act in each rank on its own copy. A third
                       element is the mode in which the new values of several slices are one.
    givens, kwargs     as for pytensor.function.
    sliceable_shareds  shared variables, different in each rank, of which `batch_s` and
                       `num_slices` choose rows.

    The arguments of February 2017:

    collect_modes      "reduce", "gather" or None: for all outputs, or a list with one for each.
    reduce_ops         what is reduced by: for all outputs, or a list with one for each.
    broadcast_inputs   those of `inputs` that go whole to every rank; the others are split.
    scatter_inputs     those of `inputs` that are split; the others go whole to every rank.

    Raises InvalidValue, InvalidType for what is wrong with these; PyTensor's own errors.
    """
    if are_modes(bcast_inputs):  # February's order of arguments
        collect_modes, bcast_inputs = bcast_inputs, None
        if are_variables(givens):
            broadcast_inputs, givens = givens, None
        if are_variables(sliceable_shareds):
            scatter_inputs, sliceable_shareds = sliceable_shareds, None
    if are_modes(updates):
        reduce_ops, updates = updates, None
    takes = [
        inspect.signature(one).parameters
        for one in (function, pytensor("synkhronos.function").function)
    ]
    known = {name: None for one in takes for name in one if name != "kwargs"}
    validate_keywords(kwargs, known, "synkhronos.function")
    own = as_list(inputs, "inputs")
    whole = [] if bcast_inputs is None else as_list(bcast_inputs, "bcast_inputs")
    sliceable = [] if sliceable_shareds is None else as_list(sliceable_shareds, "sliceable_shareds")
    variables, modes, single = read_outputs(outputs, collect_modes, reduce_ops)
    return Function(
        Graph(
            validate_inputs([*own, *whole], OPTIONS),
            variables,
            read_updates(updates),
            read_givens(givens),
            sliceable,
            kwargs,
        ),
        modes,
        are_split(own, broadcast_inputs, scatter_inputs) + [False] * len(whole),
        single=single,
    )


class Function:
    """A function of PyTensor variables: what `function` returns."""

    def __init__(
        self, graph: Graph, output_modes: list[str | None], is_split: list[bool], *, single: bool
    ) -> None:
        self._output_modes = output_modes
        self._update_modes = [one.mode for one in graph.updates]
        self._single = single
        self._graph = graph.with_defaults()
        plain = self._graph.compile()
        #: the name in errors
        self._name: str = self.name or "function"
        variables = [getattr(one, "variable", one) for one in graph.inputs]
        self._inputs = Inputs(self._name, variables, is_split)
        self._compiled: dict[tuple[str | None, bool], Any] = {(None, False): plain}
        self.shareds: list[Any] = list(plain.get_shared())
        validate_sliceable(graph.sliceable, self.shareds)
        #: the inputs of the last call that had any, while somebody else holds them
        self._last: list[weakref.ref[Any]] = []
        #: the team that has the function, and the numbers of what it has
        self._team: weft.Team | None = None
        self._numbers: dict[tuple[str | None, bool], int] = {}
        self.order = next(_order)
        _session.register(self)

    @property
    def name(self) -> str | None:
        """Return the name given to `function`, None if none was."""
        name: str | None = self._graph.options.get("name")
        return name

    @property
    def output_modes(self) -> list[str | None]:
        """Return what each output of the ranks comes to."""
        return self._output_modes

    @property
    def update_modes(self) -> list[str | None]:
        """Return what the new values of several slices come to."""
        return self._update_modes

    @property
    def output_to_cpu(self) -> list[bool]:
        """Return of each output whether it arrives as an array of NumPy's: all do."""
        return [True] * len(self._output_modes)

    @property
    def theano_function(self) -> Any:
        """Return PyTensor's function, which computes in this process alone and returns a list."""
        return self._compiled[None, False]

    def get_shared(self) -> list[Any]:
        """Return the shared variables that it reads or updates."""
        return list(self.shareds)

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
        results = _session.team(self._name).backend.call(run, own, common=common)
        return self.collect(results, output_subset)

    def as_theano(
        self, *inputs: Any, output_subset: Sequence[int] | None = None, **by_name: Any
    ) -> Any:
        """Compute the same function in this process alone, on all rows."""
        values = [np.asarray(one) for one in self._inputs.read(inputs, by_name, OPTIONS[:1])]
        found = self._compiled[None, False](*values)
        if output_subset is not None:
            found = [found[at] for at in subset_of(output_subset, len(found))]
        return found[0] if self._single else found

    def build_inputs(
        self,
        *inputs: Any,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool | Sequence[bool] = False,
        **by_name: Any,
    ) -> Data | tuple[Data, ...]:
        """Return Data for all inputs, in their order, in memory that all ranks see: a tuple, or of
        a single input its Data. `minibatch` is one for all, or a list with one for each."""
        values = self._inputs.order(inputs, by_name, ("force_cast", "oversize", "minibatch"))
        given = minibatch if isinstance(minibatch, (list, tuple)) else [minibatch] * len(values)
        if len(given) != len(values):
            raise InvalidValue(
                f"minibatch has {len(given)} entries for {len(values)} inputs; expected one each, "
                "or one for all"
            )
        found = tuple(
            data(value, var, force_cast=force_cast, oversize=oversize, minibatch=one)
            for value, var, one in zip(values, self._inputs.variables, given, strict=True)
        )
        return found[0] if len(found) == 1 else found

    def get_input_shmems(self, *inputs: Any, **by_name: Any) -> list[Any]:
        """Return arrays in memory that all ranks see, with these values of the inputs or, without
        any, with those of the last call: inputs of further calls, which do not move them."""
        values = list(inputs) or [one() for one in self._last]
        if not by_name and (not values or any(one is None for one in values)):
            raise InvalidValue(
                f"{self._name}.get_input_shmems() got no inputs, and those of its last call are "
                f"gone; expected {len(self._inputs.names)}: {self._inputs.names}"
            )
        pairs = zip(self._inputs.order(values, by_name), self._inputs.variables, strict=True)
        return [data(value, var).data for value, var in pairs]

    def __repr__(self) -> str:
        return f"<synkhronos function {self._name!r}, outputs {self.output_modes}>"

    def orders(
        self, inputs: Sequence[Any], by_name: Mapping[str, Any], options: CallOptions
    ) -> tuple[list[Order | None], dict[str, Any]]:
        """Return what each rank of weft's team is to do, and the arguments common to all."""
        team = _session.team(self._name)
        values = self._inputs.read(inputs, by_name, OPTIONS)
        rows = self._inputs.rows(values, options.batch)
        has_rows = self._inputs.any_split
        order = self._order(options, count(rows) if has_rows else None)
        chosen = selections(options.batch_s, team.size)
        found: list[Order | None] = [None] * team.size
        for part, selection, place in zip(
            parts(rows, team.size), chosen, _session.places(team.size), strict=True
        ):
            if has_rows and not part.length and (place or count(rows)):
                continue  # no rows: nothing to do
            own_rows = part.length if has_rows else 1
            arguments = self._inputs.arguments(values, part)
            task = order.task._replace(arguments=arguments, rows=own_rows)
            found[place] = replace(order, task=task, selection=selection)
        if found[0] is None and None in self._modes(options.output_subset, sliced=False):
            raise InvalidValue(
                f"{self._name} has an output of the mode None, which is this process's own, and of "
                f"{count(rows)} rows for {team.size} processes this one has none; expected more "
                "rows, or another mode"
            )
        self._last = [weakref.ref(one) for one in values]
        return found, self._inputs.common(values)

    def _order(self, options: CallOptions, rows: int | None) -> Order:
        """Return what all ranks are to do, without the inputs."""
        team = _session.team(self._name)
        validate_slices(options.num_slices, rows)
        if options.num_slices > 1 and rows is None and not self._graph.sliceable:
            raise InvalidValue(
                f"num_slices={options.num_slices}: {self._name} has nothing to slice, neither "
                "split inputs nor sliceable_shareds"
            )
        several = options.num_slices > 1
        cut = cut_of(options.batch_s, several, self._graph.sliceable)
        sliced = several and bool(self._graph.array_updates)
        return Order(
            self._number(cut, sliced=sliced),
            Task([], {}, 1, options.num_slices, self._wanted(options.output_subset, sliced)),
            self._modes(options.output_subset, sliced),
            [team.replica_number(one.variable) for one in self._graph.array_updates if sliced],
            cut,
            [team.replica_number(one) for one in self._graph.sliceable],
            has_rows=rows is not None,
        )

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
        team = _session.team(self._name)
        if self._team is not team:
            self._team, self._numbers = team, {}
        key = cut, sliced
        if key not in self._numbers:
            if key not in self._compiled:
                self._compiled[key] = self._graph.compile(cut, sliced=sliced)
            for variable in self.shareds:
                register(team, variable)
            self._numbers[key] = team.backend.register(self._compiled[key], self._name)
        return self._numbers[key]


class CallOptions(NamedTuple):
    """The options of a call."""

    output_subset: Sequence[int] | None = None
    batch: Batch | None = None
    batch_s: Any = None
    num_slices: int = 1
