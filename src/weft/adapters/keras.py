"""Models and layers of Keras 3, on any backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from weft.adapters import containers, lookup
from weft.adapters.contents import Contents
from weft.errors import InvalidValue

NAME = "keras"


def is_model(value: Any) -> bool:
    return containers.all_are(value, keras.layers.Layer)


def contents(value: Any) -> Contents | None:
    """Return the settings and weights of a layer; Keras's pickles have the time in them."""
    if not value.built:
        return None
    weights = [_read(variable.value) for variable in value.weights]
    return Contents(variable=(type(value), value.get_config(), weights))


def names(model: Any) -> list[str]:
    """Return numbered names: Keras's own, such as dense_3, count all layers a process ever made."""
    return list(_parameters(model))


def read(model: Any) -> list[NDArray[Any]]:
    return [_read(variable.value) for variable in _parameters(model).values()]


def write(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    parameters = _parameters(model)
    forms = {name: (_read(v.value).dtype, v.shape) for name, v in parameters.items()}
    containers.validate_forms(forms, arrays)
    copies = keras.backend.backend() == "torch"  # other backends may adopt the memory
    for variable, array in zip(parameters.values(), arrays, strict=True):
        variable.assign(array if copies else array.copy())


def parts(model: Any) -> list[Any]:
    """Return the variables, and on the torch backend their tensors too, which optimizers hold."""
    variables = list(_parameters(model).values())
    if keras.backend.backend() != "torch":
        return variables
    return [*variables, *(variable.value for variable in variables)]


def reshape(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    write(model, arrays)  # raises InvalidValue: Keras variables keep their shapes


def live_in(model: Any, arrays: Sequence[NDArray[Any]]) -> bool:
    if keras.backend.backend() != "torch":
        return False
    tensors = {name: variable.value for name, variable in _parameters(model).items()}
    return bool(lookup.named("torch").tensors_live_in(tensors, arrays))


def _parameters(model: Any) -> dict[str, Any]:
    return containers.unique(
        (containers.parameter_name(place, name), variable)
        for place, layer in containers.leaves(model)
        for name, variable in _weights_of(layer)
    )


def _weights_of(layer: Any) -> Iterator[tuple[str, Any]]:
    if not layer.built:
        raise InvalidValue(
            f"{layer.name} has no weights yet: pass it a batch, or call its build(input_shape)"
        )
    if hasattr(layer, "jax_state_sync"):
        layer.jax_state_sync()  # during fit on JAX the values are the trainer's: fetch them
    for position, variable in enumerate(layer.weights):
        yield f"{position}.{variable.name}", variable


def _read(value: Any) -> NDArray[Any]:
    backend = keras.backend.backend()
    if backend in ("torch", "jax"):
        array: NDArray[Any] = lookup.named(backend).read_array(value)
        return array
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)
