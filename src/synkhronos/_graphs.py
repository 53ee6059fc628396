"""What is compiled of one graph. The plain function is compiled at once, the others when needed.

cut        the sliceable shared variables are cut to some rows, which are one more input:
           "bounds" of a slice, which is a view, or "indexes", which are taken
sliced     new values of the updated variables are further outputs, so that they can be
           combined over slices and applied once

What variables are updated with by default (random streams, running averages) is an update like
those that the user gives: in the others it is found and given too, so that `givens` and the chosen
rows are put into it as they are into the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from synkhronos._names import REDUCED_BY_AVERAGE, modes_of
from synkhronos._packages import deep_enough, pytensor
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
    givens: Mapping[Any, Any]
    sliceable: Sequence[Any]
    options: Mapping[str, Any]
    #: updates that variables have by default
    defaults: Sequence[Update] = ()

    def with_defaults(self) -> Graph:
        """Return the graph with the default updates of all variables that it uses."""
        from pytensor.compile.sharedvalue import SharedVariable
        from pytensor.graph.traversal import ancestors

        none = self.options.get("no_default_updates") or ()
        if none is True:
            return self
        settled = {*none, *(one.variable for one in self.updates), *self.givens}
        found: dict[Any, Update] = {}
        roots = [*self._outputs, *(one.expression for one in self.updates), *self.givens.values()]
        while roots := [one for one in roots if hasattr(one, "owner")]:
            used = list(ancestors(roots, blockers=self.givens))
            new = [one for one in used if isinstance(one, SharedVariable)]
            new = [one for one in new if one not in settled and one.default_update is not None]
            found.update({one: Update(one, one.default_update, "avg") for one in new})
            settled.update(new)
            roots = [one.default_update for one in new]
        return self._replace(defaults=list(found.values()))

    @property
    def _outputs(self) -> list[Any]:
        return [getattr(one, "variable", one) for one in self.outputs]

    @property
    def array_updates(self) -> list[Update]:
        """Return the updates of arrays, which can be combined."""
        return [one for one in self._updates if hasattr(one.variable.type, "ndim")]

    @property
    def other_updates(self) -> list[Update]:
        """Return the updates of random generators, which every slice makes."""
        return [one for one in self._updates if not hasattr(one.variable.type, "ndim")]

    @property
    def _updates(self) -> list[Update]:
        return [*self.updates, *self.defaults]

    def compile(self, cut: str | None = None, *, sliced: bool = False) -> Any:
        """Return a compiled function of the inputs, which returns a list."""
        with deep_enough([*self._outputs, *(one.expression for one in self._updates)]):
            if cut is None and not sliced:
                return self._compile_plain()
            return self._compile_replaced(cut, sliced=sliced)

    def _compile_plain(self) -> Any:
        return pytensor("synkhronos.function").function(
            list(self.inputs),
            list(self.outputs),
            updates=[(one.variable, one.expression) for one in self.updates],
            givens=self.givens,
            **self.options,
        )

    def _compile_replaced(self, cut: str | None, *, sliced: bool) -> Any:
        library = pytensor("synkhronos.function")
        arrays, others = self.array_updates, self.other_updates
        outputs = self._outputs
        new = [library.tensor.as_tensor(one.expression) for one in arrays]
        expressions = [*outputs, *new, *(one.expression for one in others)]
        inputs = list(self.inputs)
        expressions = _replaced(expressions, self.givens)
        if cut is not None:
            rows = library.tensor.lvector("rows")
            inputs.append(rows)
            chosen = slice(rows[0], rows[1]) if cut == "bounds" else rows
            expressions = _replaced(expressions, {one: one[chosen] for one in self.sliceable})
        several = len(outputs) + len(new)
        values = dict(zip([one.variable for one in others], expressions[several:], strict=True))
        if not sliced:
            variables = [one.variable for one in arrays]
            values.update(zip(variables, expressions[len(outputs) : several], strict=True))
            several = len(outputs)
        else:  # PyTensor makes default updates of variables that have no other
            stay = [one.variable for one in arrays if one.variable.default_update is not None]
            values.update(zip(stay, stay, strict=True))
        options = {**self.options, "on_unused_input": "ignore"}
        return library.function(inputs, expressions[:several], updates=values, **options)


def _replaced(expressions: list[Any], replacements: Mapping[Any, Any]) -> list[Any]:
    from pytensor.graph.replace import clone_replace

    return list(clone_replace(expressions, dict(replacements))) if replacements else expressions


def read_outputs(
    outputs: Any, collect_modes: Any, reduce_ops: Any
) -> tuple[list[Any], list[str | None], bool]:
    """Return the variables, their modes, and whether it was a single one."""
    if outputs is None:
        return [], [], False
    single = not isinstance(outputs, list) and not _is_several(outputs)
    given = [outputs] if single else list(outputs)
    modes = modes_of(collect_modes, reduce_ops, len(given))
    variables = []
    for position, one in enumerate(given):
        variable = one
        if isinstance(one, tuple) and len(one) == 2:
            variable, modes[position] = one
            if (collect_modes, reduce_ops) != REDUCED_BY_AVERAGE:
                raise InvalidValue(
                    f"outputs[{position}] has the mode {one[1]!r}, and collect_modes or "
                    "reduce_ops were given too; expected one or the other"
                )
        if not hasattr(getattr(variable, "variable", variable), "owner"):
            raise InvalidType(
                f"outputs[{position}] is a {type(variable).__name__}; expected a variable of "
                "PyTensor, or (variable, mode)"
            )
        variables.append(variable)
    return (
        variables,
        [validate_mode(mode, f"outputs[{at}]") for at, mode in enumerate(modes)],
        single,
    )


def _is_several(outputs: Any) -> bool:
    """Return whether a tuple is one of outputs, rather than a variable and its mode."""
    if not isinstance(outputs, tuple):
        return False
    return len(outputs) != 2 or not (outputs[1] is None or isinstance(outputs[1], str))


def as_list(given: Any, option: str) -> list[Any]:
    """Return what was given as a list. Raises InvalidType for a single variable, or no list."""
    if hasattr(given, "owner") or not isinstance(given, Iterable):
        raise InvalidType(f"{option}={given!r}: expected a list")
    return list(given)


def _items(given: Any, option: str) -> list[Any]:
    """Return the pairs of a dict, or what is in a list; nothing for None."""
    if isinstance(given, Mapping):
        return list(given.items())
    return [] if given is None else as_list(given, option)


def read_updates(updates: Any) -> list[Update]:
    """Return the updates of a dict, or of pairs and triples."""
    items = _items(updates, "updates")
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


def read_givens(givens: Any) -> dict[Any, Any]:
    """Return the substitutions of a dict, or of pairs."""
    pairs = _items(givens, "givens")
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidType(
                f"givens[{position}]={pair!r}: expected (variable, what is put in its place)"
            )
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidValue(f"givens has a variable twice: {[pair[0] for pair in pairs]}")
    return found


def validate_mode(mode: object, where: str) -> str | None:
    """Return a mode as one of MODES. Raises InvalidValue."""
    plain = mode[2:] if isinstance(mode, str) and mode.startswith("c_") else mode
    if not isinstance(plain, (str, type(None))) or plain not in MODES:
        known = ", ".join(repr(one) for one in MODES)
        raise InvalidValue(f"{where} has the mode {mode!r}; expected one of {known}")
    return plain
