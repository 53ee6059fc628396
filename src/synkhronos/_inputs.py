"""The inputs of a function: put in order, read, and cut for each rank. Functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from synkhronos._data import Data, is_minibatch
from synkhronos._names import nearest
from synkhronos._selections import Part, rows_of
from synkhronos._values import fit
from weft._core.functions import Common
from weft._core.partition import Batch, RowSlice
from weft.errors import InvalidType, InvalidValue


@dataclass(frozen=True)
class Inputs:
    """The variables of a function's inputs, and which of them are split."""

    #: the function's, in errors
    name: str
    variables: Sequence[Any]
    #: of each, whether its rows are split; else it goes whole to every rank
    is_split: Sequence[bool]

    @property
    def names(self) -> list[str | None]:
        """Return the variables' names."""
        return [one.name for one in self.variables]

    @property
    def any_split(self) -> bool:
        """Return whether there are rows of inputs to split."""
        return any(self.is_split)

    def order(
        self, inputs: Sequence[Any], by_name: Mapping[str, Any], options: Iterable[str] = ()
    ) -> list[Any]:
        """Return a call's inputs in their order. `options` are what else it takes by name."""
        found = dict(enumerate(inputs))
        for name, value in by_name.items():
            if name not in self.names:
                hint = nearest(name, [*filter(None, self.names), *options])
                raise InvalidType(
                    f"{self.name} got an input {name!r}; its inputs are {self.names}{hint}"
                )
            position = self.names.index(name)
            if position in found:
                raise InvalidType(f"{self.name} got the input {name!r} twice")
            found[position] = value
        expected = len(self.variables)
        if len(found) != expected or len(inputs) > expected:
            raise InvalidType(
                f"{self.name} got {len(found)} inputs; expected {expected}: {self.names}"
            )
        return [found[position] for position in range(expected)]

    def read(
        self, inputs: Sequence[Any], by_name: Mapping[str, Any], options: Iterable[str]
    ) -> list[Any]:
        """Return the inputs' values in their order: arrays in the variables' dtypes, or Data."""
        given = self.order(inputs, by_name, options)
        return [self._fit(value, position) for position, value in enumerate(given)]

    def _fit(self, value: Any, position: int) -> Any:
        variable = self.variables[position]
        if isinstance(value, Data) and (value.dtype, value.ndim) == (variable.dtype, variable.ndim):
            return value
        what = f"{self.name}: the input {self._called(position)}"
        if is_minibatch(value):
            raise InvalidType(
                f"{what} is {value}; expected a minibatch of dtype {variable.dtype} with "
                f"{variable.ndim} axes"
            )
        return fit(value, variable.dtype, variable.ndim, what)

    def rows(self, values: Sequence[Any], batch: Batch | None) -> Any:
        """Return the chosen rows of the inputs that are split: a slice, or indexes."""
        named = {self._called(at): one for at, one in enumerate(values) if self.is_split[at]}
        minibatches = [name for name, one in named.items() if is_minibatch(one)]
        otherwise = "; what goes to every rank as it is belongs in bcast_inputs=[...]"
        return rows_of(named, minibatches, batch, otherwise)

    def arguments(self, values: Sequence[Any], part: Part) -> list[Any]:
        """Return a rank's arguments: its own rows of what is split, and names of what is not."""
        return [
            _row_slice(one, part) if self.is_split[at] else Common(_common_name(at))
            for at, one in enumerate(values)
        ]

    def common(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return what goes whole to every rank, by the names in `arguments`."""
        return {
            _common_name(at): one.data if isinstance(one, Data) else one
            for at, one in enumerate(values)
            if not self.is_split[at]
        }

    def _called(self, position: int) -> str:
        name = self.names[position]
        return repr(name) if name else f"at position {position}"


def _row_slice(value: Any, part: Part) -> RowSlice:
    """Return a rank's own rows of an input that is split."""
    if isinstance(value, Data):
        return RowSlice(value.data, part.positions if value.minibatch else part.rows)
    return RowSlice(value, part.rows)


def _common_name(position: int) -> str:
    return f"input {position}"


def validate_inputs(inputs: Sequence[Any], options: Sequence[str]) -> list[Any]:
    """Return the inputs. Raises InvalidType, InvalidValue for what is no variable, or is called as
    an option of the call."""
    for position, given in enumerate(inputs):
        variable = getattr(given, "variable", given)
        if not hasattr(variable, "owner") or not hasattr(variable, "ndim"):
            raise InvalidType(
                f"inputs[{position}] is a {type(given).__name__}; expected a variable of PyTensor"
            )
        if variable.name in options:
            raise InvalidValue(
                f"inputs[{position}] is called {variable.name!r}, which is an option of the call; "
                "rename it: options are " + ", ".join(options)
            )
    return list(inputs)
