"""A training step of a `weft.Holder` of JAX arrays, which are replaced by new ones. The functions
are those that `_api/training.py` requires of a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from weft.errors import InvalidType, InvalidValue


def validate(model: Any, optimizer: Any, options: Any) -> None:
    """Accept any function: what it does is known only when it is called."""
    if options.scaler is not None or options.clip is not None:
        raise InvalidValue(
            "train_step(scaler=..., clip=...) are for models of torch; scale and clip gradients in "
            "the function of parameters and gradients"
        )
    if options.sync_batchnorm:
        raise InvalidValue(
            "sync_batchnorm=True: expected a model of torch; a loss of JAX that uses statistics of "
            "the batch has no mode that joins its parts"
        )


def settings(model: Any, optimizer: Any, options: Any, *, alone: bool) -> None:
    """Return nothing: a function of parameters and gradients has no settings of its own."""


def batchnorm(model: Any) -> None:
    """Return nothing: parameters are arrays, not layers."""


def constants(model: Any) -> list[Any]:
    """Return the parameters, which never change."""
    return [leaf for leaf in jax.tree_util.tree_leaves(model.value) if isinstance(leaf, jax.Array)]


def evaluate(
    loss: Callable[..., Any], model: Any, batch: Sequence[Any], named: dict[str, Any]
) -> Any:
    """Return the loss. Raises InvalidType unless it is one number."""
    computed = loss(model.value, *batch, **named)
    if jax.numpy.ndim(computed) != 0:
        raise InvalidType(f"a loss of shape {computed.shape}; expected one number")
    return computed


def parameters(model: Any) -> Any:
    """Return the model itself."""
    return model


def values(model: Any, optimizer: Any) -> tuple[list[Any], None, Any]:
    """Return the parameters."""
    return [], None, model.value


def step(member: Any, numbers: Sequence[int], _: None, parts: Sequence[Any]) -> float:
    """Compute the gradients of a rank's rows, average them over all ranks, and set new parameters
    (a remote function)."""
    loss, model, optimizer = (member.registered[number] for number in numbers)
    leaves, structure = jax.tree_util.tree_flatten(model.value)
    value, gradients = np.zeros(()), [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    try:
        for batch, named, fraction in parts:
            if fraction:
                gradients_of = _weighted_gradients(loss, numbers[0])
                computed, tree = gradients_of(fraction, model.value, *batch, **named)
                value = value + np.asarray(computed, np.float64)
                more = map(np.asarray, jax.tree_util.tree_leaves(tree))
                gradients = [one + other for one, other in zip(gradients, more, strict=True)]
    except Exception as error:
        member.group.refuse("train_step", error)
        raise
    value, *means = member.group.all_reduce([value, *gradients], "sum")
    mean = jax.tree_util.tree_unflatten(structure, [jax.numpy.asarray(array) for array in means])
    model.value = optimizer(model.value, mean)
    return float(value)


@lru_cache(maxsize=16)
def _weighted_gradients(loss: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return a function for the loss and its gradients, times a fraction. It is compiled once for
    each loss, identified by the number it was sent under, and each number of rows."""

    def weighted(fraction: float, *arguments: Any, **named: Any) -> Any:
        value_and_gradients = jax.value_and_grad(loss)(*arguments, **named)
        return jax.tree_util.tree_map(lambda leaf: leaf * fraction, value_and_gradients)

    compiled: Callable[..., Any] = jax.jit(weighted)
    return compiled
