"""`train_step`: one step of training over split rows, each replica updating itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from weft._api.team import Team, default_team
from weft._core.calling import check_callable
from weft._core.portions import choose, common_length, count, part
from weft.adapters.holder import Holder
from weft.engines.base import Member
from weft.errors import InvalidType, InvalidValue


def train_step(
    loss: Callable[..., Any], model: Any, optimizer: Any, *, team: Team | None = None
) -> Callable[..., float]:
    """A function that trains a model by one step: `step(x, y)` returns the loss before it.

    `loss(model, x, y)` is a mean over the rows of its inputs. Each rank computes the gradients of
    its rows, one all_reduce averages them, weighted by rows, and every rank's optimizer changes its
    own copy of the model. The result is what one process would have got, to rounding.

        step = weft.train_step(lambda model, x, y: F.cross_entropy(model(x), y), model, optimizer)
        for x, y in batches:
            print(step(x, y))

    `model` and `optimizer` are torch's, or for JAX a `weft.Holder` of the parameters and a function
    that returns new parameters: `optimizer(parameters, gradients)`. The driver's are the user's
    own, and up to date after each step.
    """
    return _TrainStep(loss, model, optimizer, default_team() if team is None else team)


class _TrainStep:
    def __init__(self, loss: Callable[..., Any], model: Any, optimizer: Any, team: Team) -> None:
        check_callable(loss, "train_step")
        if hasattr(optimizer, "param_groups") and hasattr(model, "parameters"):
            self._step: Callable[..., float] = _step
        elif isinstance(model, Holder) and callable(optimizer):
            self._step = _step_of_jax
        else:
            raise InvalidType(
                f"train_step got a {type(model).__name__} and a {type(optimizer).__name__}; "
                "expected a torch.nn.Module and a torch.optim.Optimizer, or a weft.Holder and a "
                "function of parameters and gradients"
            )
        self._team = team
        # the optimizer mentions the model's parameters: in a worker, those of the worker's copy
        self._numbers = (
            team.replica_number(model),
            team.engine.keep(optimizer, "the optimizer"),
            team.engine.keep(loss, "the loss"),
        )

    def __call__(self, *batch: Any) -> float:
        """Train on these rows; returns the loss before the step."""
        rows = choose(None, common_length({f"argument {i}": one for i, one in enumerate(batch)}))
        parts = [part(rows, self._team.size, rank) for rank in range(self._team.size)]
        if not count(rows):
            raise InvalidValue("train_step got inputs without rows; expected at least one")
        fractions = [count(own) / count(rows) for own in parts]
        arguments = [
            (self._numbers, [one[own] for one in batch], fraction)
            for own, fraction in zip(parts, fractions, strict=True)
        ]
        return float(self._team.engine.call(self._step, arguments)[0])


def _step(member: Member, numbers: Sequence[int], batch: Sequence[Any], fraction: float) -> float:
    """A procedure: the gradients of a rank's rows, a fraction of all, their mean, the optimizer.

    The loss is weighted before its gradients are taken, so a plain sum of them is their mean.
    """
    import torch

    model, optimizer, loss = (member.kept[number] for number in numbers)
    optimizer.zero_grad(set_to_none=True)
    value = torch.zeros((), dtype=torch.float64)
    if fraction:
        try:
            computed = loss(model, *batch)
            (computed * fraction).backward()
        except Exception as error:
            member.group.refuse("train_step", error)
            raise
        value = computed.detach().to(torch.float64) * fraction
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [one.grad for one in parameters if one.grad is not None]
    both = [value, *gradients]
    member.group.all_reduce(both, "sum", out=both)
    optimizer.step()
    return float(value)


def _step_of_jax(
    member: Member, numbers: Sequence[int], batch: Sequence[Any], fraction: float
) -> float:
    """The same for a Holder of JAX's arrays, which are replaced."""
    import jax
    import numpy as np

    model, optimizer, loss = (member.kept[number] for number in numbers)
    leaves, structure = jax.tree_util.tree_flatten(model.value)
    value, gradients = np.zeros(()), [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    if fraction:
        try:
            computed, tree = _weighted_gradients(loss)(fraction, model.value, *batch)
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
def _weighted_gradients(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss and its gradients; compiled once for each loss, and for each number of rows."""
    import jax

    def weighted(fraction: float, *arguments: Any) -> Any:
        found = jax.value_and_grad(loss)(*arguments)
        return jax.tree_util.tree_map(lambda leaf: leaf * fraction, found)

    compiled: Callable[..., Any] = jax.jit(weighted)
    return compiled
