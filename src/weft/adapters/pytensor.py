"""Shared variables of PyTensor, and layers of Lasagne, whose parameters they are."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pytensor.compile.executor import Function
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import FrozenApply, Variable
from pytensor.graph.fg import FrozenFunctionGraph

from weft.adapters import containers, lookup
from weft.adapters.contents import Contents

NAME = "pytensor"


def is_model(value: Any) -> bool:
    """Return whether all leaves are layers or shared arrays; shared random generators are not."""
    leaves = containers.leaves(value)
    return bool(leaves) and all(_is_layer(leaf) or _is_parameter(leaf) for _, leaf in leaves)


def names(model: Any) -> list[str]:
    return list(_parameters(model))


def read(model: Any) -> list[NDArray[Any]]:
    return [_value(variable) for variable in _parameters(model).values()]


def write(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    parameters = _parameters(model)
    forms = {name: (_value(v).dtype, _value(v).shape) for name, v in parameters.items()}
    containers.validate_forms(forms, arrays)
    for variable, array in zip(parameters.values(), arrays, strict=True):
        held = variable.get_value(borrow=True)
        if isinstance(held, np.ndarray) and held.flags.writeable:
            np.copyto(held, array)  # no fresh memory, unlike set_value
        else:
            variable.set_value(array)


def parts(model: Any) -> list[Any]:
    """Return the variables, and the containers of their values, which compiled functions hold."""
    variables = list(_parameters(model).values())
    return [*variables, *(variable.container for variable in variables)]


def reshape(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    for variable, array in zip(_parameters(model).values(), arrays, strict=True):
        variable.set_value(array)


def reduce(value: Any, ordered: set[Any]) -> Any:
    """Return how to pickle a compiled function so that it uses the variables of its graph, where
    PyTensor's own way would give it storage of its own, with their values. Of a graph return how to
    pickle its operations one after the other, each after those whose results it uses: PyTensor's
    own way nests them, and a pickler cannot go as deep as graphs are. Return None for other values.

    `ordered` are the results of the operations that this pickle has already, or will have.
    """
    kind: Any = type(value)
    how = _reducer_of(kind)
    return None if how is None else how(value, ordered)


@lru_cache(maxsize=1024)
def _reducer_of(kind: type) -> Any:
    """Return how to pickle values of a class, which costs less to look up than to find out."""
    for base, how in (
        (Function, _reduce_function),
        (FrozenFunctionGraph, _reduce_inner_graph),
        (Variable, _reduce_variable),
    ):
        if issubclass(kind, base):
            return how
    return None


def _reduce_function(value: Any, ordered: set[Any]) -> Any:
    return _link, (value.maker, value.trust_input)


def _reduce_inner_graph(value: Any, ordered: set[Any]) -> Any:
    make, arguments = value.__reduce__()
    return _make_after, (_operations(value.outputs, ordered), make, arguments)


def _reduce_variable(value: Any, ordered: set[Any]) -> Any:
    default = getattr(value, "default_update", None)
    if (value.owner is None and default is None) or type(value.owner) is FrozenApply:
        return None
    operations = _operations([value] if default is None else [value, default], ordered)
    if not operations:
        return None
    new, arguments, state = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:3]
    return new, arguments, (operations, state), None, None, _set_state


def _operations(results: Sequence[Any], ordered: set[Any]) -> list[Any]:
    """Return the operations that lead to these results, each after those whose results it uses,
    but for those that are ordered already. (PyTensor's `toposort` would copy `ordered`.)"""
    found, todo = [], list(results)
    while todo:
        node = todo[-1].owner
        if node is None or todo[-1] in ordered:
            todo.pop()
            continue
        waiting = [one for one in node.inputs if one.owner is not None and one not in ordered]
        if waiting:
            todo += waiting
        else:
            ordered.update(node.outputs)
            found.append(node)
    return found


def _make_after(operations: Sequence[Any], make: Any, arguments: Sequence[Any]) -> Any:
    return make(*arguments)


def _set_state(variable: Any, state: tuple[Sequence[Any], dict[str, Any]]) -> None:
    variable.__dict__.update(state[1])


def contents(value: Any) -> Contents:
    """Return a compiled function's graph as a constant, and the variables that it uses."""
    return Contents(value.maker, (value.trust_input, value.get_shared()))


def _link(maker: Any, trust_input: bool) -> Any:
    function = maker.create()
    function.trust_input = trust_input
    return function


def live_in(model: Any, arrays: Sequence[NDArray[Any]]) -> bool:
    return False


def _parameters(model: Any) -> dict[str, Any]:
    return containers.unique(
        (containers.parameter_name(place, name), variable)
        for place, leaf in containers.leaves(model)
        for name, variable in _variables_of(leaf)
    )


def _variables_of(leaf: Any) -> Iterator[tuple[str, Any]]:
    if not _is_layer(leaf):
        yield leaf.name or "", leaf
        return
    for position, variable in enumerate(sys.modules["lasagne"].layers.get_all_params(leaf)):
        yield f"{position}.{variable.name}", variable


def _is_layer(leaf: Any) -> bool:
    layers = getattr(sys.modules.get("lasagne"), "layers", None)
    return layers is not None and isinstance(leaf, layers.Layer)


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, SharedVariable) and isinstance(_value(leaf), np.ndarray)


def _value(variable: Any) -> Any:
    """Return the array that a shared variable holds, not a copy. Functions compiled for JAX or
    PyTorch leave arrays of these there, those for JAX also wider ones than the variable's dtype."""
    held = variable.get_value(borrow=True)
    library = None if isinstance(held, np.ndarray) else lookup.of(held)
    return held if library is None else library.read_array(held).astype(variable.dtype, copy=False)
