"""JAX arrays, and pytrees of them, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from numpy.typing import NDArray

from weft.adapters import containers
from weft.adapters.contents import Contents
from weft.adapters.holder import Holder
from weft.errors import InvalidType, InvalidValue

NAME = "jax"
_BFLOAT16 = "bfloat16"
#: the kinds of NumPy's own numeric dtypes
_NUMBERS = "biufc"


def is_mine(value: Any) -> bool:
    return isinstance(value, jax.Array)


def contents(value: Any) -> Contents:
    """Return the array as a constant: it never changes."""
    return Contents(value)


def describe(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str]:
    _validate_memory(value)
    element = value.dtype.name
    dtype = np.dtype(np.uint16) if element == _BFLOAT16 else np.dtype(value.dtype)
    if dtype.kind not in _NUMBERS:
        raise InvalidType(f"a JAX array of dtype {value.dtype} has no NumPy form")
    devices = {"cpu" if d.platform == "cpu" else str(d) for d in value.devices()}
    return element, dtype, tuple(value.shape), ", ".join(sorted(devices))


def view(value: Any) -> tuple[NDArray[Any], str]:
    """Return a read-only view, as no JAX array can be written to; of one on a device a copy."""
    element, dtype, _, _ = describe(value)
    return np.asarray(value).view(dtype), element


def on_device(value: Any) -> Any:
    """Return a JAX array on a GPU as a tensor over the same memory, if torch can use it there, else
    None: then it is copied to the host."""
    _validate_memory(value)
    if len(value.devices()) != 1 or next(iter(value.devices())).platform == "cpu":
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch.from_dlpack(value) if torch.cuda.is_available() else None


def deliver_tensor(tensor: Any) -> Any:
    """Return an array over the memory of a tensor that weft made on a device."""
    return jnp.from_dlpack(tensor)


def deliver(array: NDArray[Any], element: str) -> Any:
    """Return a copy: JAX would see later changes of memory that it adopted."""
    if element == _BFLOAT16:
        return jnp.array(array.view(jnp.bfloat16))
    delivered = jnp.array(array)
    if delivered.dtype != array.dtype:
        raise InvalidType(
            f"{element} would become {delivered.dtype} in JAX; allow 64 bits with "
            "jax.config.update('jax_enable_x64', True)"
        )
    return delivered


def is_model(value: Any) -> bool:
    if not containers.all_are(value, Holder):
        return False
    parameters = [leaf for _, leaf in _leaves(value)]
    return bool(parameters) and all(_is_parameter(leaf) for leaf in parameters)


def names(model: Any) -> list[str]:
    return list(_parameters(model))


def read(model: Any) -> list[NDArray[Any]]:
    return [read_array(leaf) for leaf in _parameters(model).values()]


def write(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    parameters = _parameters(model)
    forms = {name: (read_array(leaf).dtype, leaf.shape) for name, leaf in parameters.items()}
    containers.validate_forms(forms, arrays)
    reshape(model, arrays)


def parts(model: Any) -> list[Any]:
    return [holder for _, holder in containers.leaves(model)]


def reshape(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    pairs = zip(_parameters(model).values(), arrays, strict=True)
    new = {id(leaf): _like(leaf, array) for leaf, array in pairs}
    for _, holder in containers.leaves(model):
        holder.value = tree_util.tree_map(lambda leaf: new[id(leaf)], holder.value)


def live_in(model: Any, arrays: Sequence[NDArray[Any]]) -> bool:
    return False


def _parameters(model: Any) -> dict[str, Any]:
    return containers.unique(_leaves(model))


def _leaves(model: Any) -> list[tuple[str, Any]]:
    return [
        (containers.parameter_name(place + tree_util.keystr(path)), leaf)
        for place, holder in containers.leaves(model)
        for path, leaf in tree_util.tree_flatten_with_path(holder.value)[0]
    ]


def _is_parameter(leaf: Any) -> bool:
    """Return whether a leaf is a parameter: NumPy arrays too, which stand in pytrees until the
    first training step."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in _NUMBERS
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def read_array(leaf: Any) -> NDArray[Any]:
    """Return a leaf's values as a NumPy array, in float32 if NumPy does not have their dtype."""
    if isinstance(leaf, jax.Array):
        _validate_memory(leaf)
    array = np.asarray(leaf)
    return array if array.dtype.kind in _NUMBERS else array.astype(np.float32)


def _like(leaf: Any, array: NDArray[Any]) -> Any:
    if isinstance(leaf, np.ndarray):
        return array.copy()
    # a copy first: device_put adopts aligned memory
    return jax.device_put(jnp.array(array, dtype=leaf.dtype), leaf.sharding)


def _validate_memory(value: Any) -> None:
    """Raise InvalidType or InvalidValue for an array without values in this process's memory."""
    if isinstance(value, jax.core.Tracer):
        raise InvalidType("a JAX array inside jit, grad or vmap has no values; call weft outside")
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise InvalidType("a JAX random key is no array of numbers; pass jax.random.key_data(key)")
    if value.is_deleted():
        raise InvalidValue("a JAX array that was donated or deleted; pass the one that replaced it")
    if not value.is_fully_addressable:
        raise InvalidType("a JAX array that lies on several hosts; pass the part of this one")
