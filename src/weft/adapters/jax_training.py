"""A step of training of a `weft.Holder` of JAX's arrays, which are replaced. The functions are
those that `_api/training.py` asks of a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np


def validate_optimizer(model: Any, optimizer: Any) -> None:
    """Take any function: what it does is known once it is called."""


def settings(model: Any, optimizer: Any) -> None:
    """Return nothing: a function of parameters and gradients has no settings of its own."""


def values(model: Any, optimizer: Any) -> Any:
    """Return the parameters, which are replaced by others."""
    return model.value


def same_values(before: Any, now: Any) -> bool:
    """Return whether the parameters are the same object."""
    return before is now


def step(
    member: Any, numbers: Sequence[int], _: None, batch: Sequence[Any], fraction: float
) -> float:
    """Remote function: the gradients of a rank's rows, their mean over all, new parameters."""
    model, optimizer, loss = (member.registered[number] for number in numbers)
    leaves, structure = jax.tree_util.tree_flatten(model.value)
    value, gradients = np.zeros(()), [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    if fraction:
        try:
            gradients_of = _weighted_gradients(loss, numbers[-1])
            computed, tree = gradients_of(fraction, model.value, *batch)
            value = np.asarray(computed, np.float64)
            gradients = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
        except Exception as error:
            member.group.refuse("train_step", error)
            raise
    value, *means = member.group.all_reduce([value, *gradients], "sum")
    mean = jax.tree_util.tree_unflatten(structure, [jax.numpy.asarray(one) for one in means])
    model.value = optimizer(model.value, mean)
    return float(value)


@lru_cache(maxsize=16)
def _weighted_gradients(loss: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The loss and its gradients; compiled once for each loss, as it was sent under a number, and
    for each number of rows."""

    def weighted(fraction: float, *arguments: Any) -> Any:
        found = jax.value_and_grad(loss)(*arguments)
        return jax.tree_util.tree_map(lambda leaf: leaf * fraction, found)

    compiled: Callable[..., Any] = jax.jit(weighted)
    return compiled
