"""What is compiled of one graph. The plain function is compiled at once, the others when needed.

cut        the sliceable shared variables are cut to some rows, which are one more input:
           "bounds" of a slice, which is a view, or "indexes", which are taken
sliced     new values of the updated variables are further outputs, so that they can be
           combined over slices and applied once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from synkhronos._packages import pytensor
from weft.errors import InvalidType, InvalidValue

#: what Synkhronos called what weft calls
MODES = {
    "avg": "mean",
    "sum": "sum",
    "prod": "prod",
    "min": "min",
    "max": "max",
    "gather": "gather",
    None: None,
}


class Update(NamedTuple):
    variable: Any
    expression: Any
    #: how the new values of several slices are one
    mode: str | None


class Graph(NamedTuple):
    """A function as the user described it."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    updates: Sequence[Update]
    givens: Any
    sliceable: Sequence[Any]
    options: Mapping[str, Any]

    @property
    def array_updates(self) -> list[Update]:
        """Return the updates of arrays, which can be combined."""
        return [one for one in self.updates if hasattr(one.variable.type, "ndim")]

    @property
    def other_updates(self) -> list[Update]:
        """Return the updates of random generators, which every slice makes."""
        return [one for one in self.updates if not hasattr(one.variable.type, "ndim")]

    def compile(self, cut: str | None = None, *, sliced: bool = False) -> Any:
        """Return a compiled function of the inputs, which returns a list."""
        library = pytensor("synkhronos.function")
        if cut is None and not sliced:
            updates = [(one.variable, one.expression) for one in self.updates]
            return library.function(
                list(self.inputs),
                list(self.outputs),
                updates=updates,
                givens=self.givens,
                **self.options,
            )
        outputs = [getattr(one, "variable", one) for one in self.outputs]
        new = [library.tensor.as_tensor(one.expression) for one in self.array_updates]
        others = self.other_updates
        expressions = [*outputs, *new, *(one.expression for one in others)]
        inputs = list(self.inputs)
        expressions = _replaced(expressions, dict(self.givens or ()))
        if cut is not None:
            rows = library.tensor.lvector("rows")
            inputs.append(rows)
            chosen = slice(rows[0], rows[1]) if cut == "bounds" else rows
            expressions = _replaced(expressions, {one: one[chosen] for one in self.sliceable})
        several = len(outputs) + len(new)
        values = dict(zip([one.variable for one in others], expressions[several:], strict=True))
        if not sliced:
            values.update(
                zip(
                    [one.variable for one in self.array_updates],
                    expressions[len(outputs) : several],
                    strict=True,
                )
            )
            several = len(outputs)
        options = {**self.options, "on_unused_input": "ignore"}
        return library.function(inputs, expressions[:several], updates=values, **options)


def _replaced(expressions: list[Any], replacements: dict[Any, Any]) -> list[Any]:
    from pytensor.graph.replace import clone_replace

    return list(clone_replace(expressions, replacements)) if replacements else expressions


def read_outputs(outputs: Any) -> tuple[list[Any], list[str | None], bool]:
    """Return the variables, their modes, and whether it was a single one."""
    if outputs is None:
        return [], [], False
    single = not isinstance(outputs, list) and not _is_several(outputs)
    variables, modes = [], []
    for position, one in enumerate([outputs] if single else outputs):
        variable, mode = one if isinstance(one, tuple) and len(one) == 2 else (one, "avg")
        if not hasattr(getattr(variable, "variable", variable), "owner"):
            raise InvalidType(
                f"outputs[{position}] is a {type(variable).__name__}; expected a variable of "
                "PyTensor, or (variable, mode)"
            )
        variables.append(variable)
        modes.append(validate_mode(mode, f"outputs[{position}]"))
    return variables, modes, single


def _is_several(outputs: Any) -> bool:
    """Return whether a tuple is one of outputs, rather than a variable and its mode."""
    if not isinstance(outputs, tuple):
        return False
    return len(outputs) != 2 or not (outputs[1] is None or isinstance(outputs[1], str))


def read_updates(updates: Any) -> list[Update]:
    """Return the updates of a dict, or of pairs and triples."""
    items = list(updates.items() if isinstance(updates, Mapping) else updates or ())
    found = []
    for position, item in enumerate(items):
        if not isinstance(item, tuple) or len(item) not in (2, 3):
            raise InvalidType(
                f"updates[{position}]={item!r}: expected (variable, new value) or (variable, new "
                "value, how several slices are combined)"
            )
        mode = validate_mode(item[2] if len(item) == 3 else "avg", f"updates[{position}]")
        found.append(Update(item[0], item[1], mode))
    return found


def validate_mode(mode: object, where: str) -> str | None:
    """Return a mode as one of MODES. Raises InvalidValue."""
    plain = mode[2:] if isinstance(mode, str) and mode.startswith("c_") else mode
    if not isinstance(plain, (str, type(None))) or plain not in MODES:
        known = ", ".join(repr(one) for one in MODES)
        raise InvalidValue(f"{where} has the mode {mode!r}; expected one of {known}")
    return plain
