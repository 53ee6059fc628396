"""`train_step`: one step of training over split rows, each replica updating itself."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from weft import adapters
from weft._api.team import RegisteredFunction, Team, default_team
from weft._core import models
from weft._core.calling import check_callable
from weft._core.portions import RowSlice, choose, common_length, count, part
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
    own, and up to date after each step. What the program changes of these in between holds for all
    ranks: parameters and persistent buffers, by `load_state_dict` or in place (torch does not count
    changes of `parameter.data`, which need `weft.replicate(model).broadcast()`), the optimizer's
    state by `load_state_dict`, learning rates, `train()` and `eval()`, `requires_grad`, what the
    loss mentions. After a step that failed the next one begins with the driver's values.
    """
    return _TrainStep(loss, model, optimizer, default_team() if team is None else team)


class _TrainStep:
    def __init__(self, loss: Callable[..., Any], model: Any, optimizer: Any, team: Team) -> None:
        check_callable(loss, "train_step(loss, model, optimizer)")
        if hasattr(optimizer, "param_groups") and hasattr(model, "parameters"):
            _check_optimizer(model, optimizer)
            self._step: Callable[..., float] = _step_of_torch
        elif isinstance(model, Holder) and callable(optimizer):
            self._step = _step_of_jax
        else:
            raise InvalidType(
                f"train_step got a {type(model).__name__} and a {type(optimizer).__name__}; "
                "expected a torch.nn.Module and a torch.optim.Optimizer, or a weft.Holder and a "
                "function of parameters and gradients"
            )
        #: whether ranks may have other values than the driver
        self._differs = team.has_replica(model)
        number_of_model = team.replica_number(model)
        self.team = team
        self._model, self._optimizer, self._loss_given = model, optimizer, loss
        self._loss = RegisteredFunction(team, loss, "the loss")
        #: numbers of inputs that the loss is known to take
        self._counts: set[int] = set()
        # the optimizer mentions the model's parameters: in a worker, those of the worker's copy
        number = team.backend.register(optimizer, "the optimizer")
        weakref.finalize(self, team.backend.drop, number).atexit = False
        self._numbers = number_of_model, number
        self._values = _Values.of(model, optimizer)

    def __call__(self, *batch: Any) -> float:
        """Train on these rows; returns the loss before the step."""
        rows = choose(None, common_length({f"argument {i}": one for i, one in enumerate(batch)}))
        parts = [part(rows, self.team.size, rank) for rank in range(self.team.size)]
        if not count(rows):
            raise InvalidValue("train_step got inputs without rows; expected at least one")
        if len(batch) not in self._counts:
            _check_loss(self._loss_given, len(batch))
            self._counts.add(len(batch))
        if self._differs or not self._values.are(_Values.of(self._model, self._optimizer)):
            self._take_over()
        numbers = (*self._numbers, self._loss.number())
        settings = _settings(self._model, self._optimizer)
        arguments = [
            (
                numbers,
                settings,
                [RowSlice(one, own).take() for one in batch],
                count(own) / count(rows),
            )
            for own in parts
        ]
        try:
            loss: float = self.team.backend.call(self._step, arguments)[0]
        except BaseException:
            self._differs = True
            raise
        finally:
            self._loss.called()
        self._values = _Values.of(self._model, self._optimizer)
        return loss

    def _take_over(self) -> None:
        """Have the workers take over what the driver's model and optimizer are now."""
        has_state = hasattr(self._optimizer, "state_dict")
        state = self._optimizer.state_dict() if has_state else None
        own = (self._numbers, models.read(self._model), state)
        self.team.backend.call(_adopt, [None, *[own] * (self.team.size - 1)])
        self._differs = False


class _Values(NamedTuple):
    """What tells whether somebody has given a model, or its optimizer, other values."""

    #: the object that is replaced by others; held, so that no other has its identity
    held: Any
    #: of what is changed in place
    states: list[Any]

    @classmethod
    def of(cls, model: Any, optimizer: Any) -> _Values:
        if isinstance(model, Holder):
            return cls(model.value, [])
        state = adapters.named("torch").state
        held = getattr(optimizer, "state", None)
        return cls(held, [state(one) for one in (*model.parameters(), *model.buffers())])

    def are(self, other: _Values) -> bool:
        return self.held is other.held and self.states == other.states


class _Settings(NamedTuple):
    """What a program changes of its model and optimizer between two steps."""

    training: list[bool]
    trainable: list[bool]
    #: of each group of parameters: the learning rate, and so on
    options: list[dict[str, Any]]


def _settings(model: Any, optimizer: Any) -> _Settings | None:
    if isinstance(model, Holder):
        return None
    hooks = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    if any(getattr(optimizer, name, None) for name in hooks):
        raise InvalidValue(
            f"the {type(optimizer).__name__} has hooks, which torch does not send along, so they "
            "would be called in the driver only; override step() in a class of your own instead"
        )
    return _Settings(
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    )


def _apply_settings(model: Any, optimizer: Any, settings: _Settings) -> None:
    for module, training in zip(model.modules(), settings.training, strict=True):
        module.training = training
    for parameter, trainable in zip(model.parameters(), settings.trainable, strict=True):
        parameter.requires_grad_(trainable)
    for group, options in zip(optimizer.param_groups, settings.options, strict=True):
        group.update(options)


def _adopt(member: Member, numbers: Sequence[int], arrays: Sequence[Any], state: Any) -> None:
    """Remote function: a rank's model and optimizer become what the driver's are."""
    model, optimizer = (member.registered[number] for number in numbers)
    models.assign(model, arrays)
    if state is not None:
        optimizer.load_state_dict(state)


def _step_of_torch(
    member: Member,
    numbers: Sequence[int],
    settings: _Settings,
    batch: Sequence[Any],
    fraction: float,
) -> float:
    """Remote function: take the gradients of a rank's rows, a fraction of all, average, step.

    The loss is weighted before its gradients are taken, so a plain sum of them is their mean.
    """
    from weft._api.gradients import gradients_for

    model, optimizer, loss = (member.registered[number] for number in numbers)
    value = 0.0
    try:
        if member.rank > 0:
            _apply_settings(model, optimizer, settings)
        optimizer.zero_grad(set_to_none=True)
        if fraction:
            computed = _checked(loss(model, *batch))
            (computed * fraction).backward()
            value = float(computed.detach()) * fraction
        parameters = [
            one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
        ]
        gradients = gradients_for(optimizer, parameters, member.group)
        gradients.put(value, parameters)
    except Exception as error:
        member.group.refuse("train_step", error)
        raise
    gradients.add_up(member.group)
    value = gradients.take(parameters)
    # averages over rows, such as those of batch normalisation, or the same everywhere
    buffers = [one for one in model.buffers() if one.numel()]
    if buffers:
        member.group.all_reduce(buffers, "mean", weight=fraction, out=buffers)
    optimizer.step()
    return value


def _check_optimizer(model: Any, optimizer: Any) -> None:
    own = set(map(id, model.parameters()))
    if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
        raise InvalidValue(
            f"the {type(optimizer).__name__} has none of the {type(model).__name__}'s parameters, "
            "so no step would change it; make it with model.parameters()"
        )


def _check_loss(loss: Callable[..., Any], inputs: int) -> None:
    """Refuse a loss that cannot be called as it will be."""
    try:
        signature = inspect.signature(loss, follow_wrapped=False)
    except (TypeError, ValueError):  # of functions in C that do not tell
        return
    try:
        signature.bind(None, *[None] * inputs)
    except TypeError:
        given = ", ".join(["model", *(f"input {number}" for number in range(inputs))])
        name = getattr(loss, "__qualname__", repr(loss))
        raise InvalidType(
            f"{name}{signature} is called as loss({given}) by a step of {inputs} inputs; expected "
            "a function such as: def loss(model, x, y): return F.cross_entropy(model(x), y)"
        ) from None


def _checked(computed: Any) -> Any:
    """What a loss returned, if it is one number that can be derived."""
    import torch

    if not isinstance(computed, torch.Tensor) or computed.numel() != 1:
        shape = f" of shape {tuple(computed.shape)}" if isinstance(computed, torch.Tensor) else ""
        raise InvalidType(
            f"the loss returned a {type(computed).__name__}{shape}; expected a tensor of one "
            "number, the mean over the rows"
        )
    return computed


def _step_of_jax(
    member: Member, numbers: Sequence[int], _: None, batch: Sequence[Any], fraction: float
) -> float:
    """The same for a Holder of JAX's arrays, which are replaced."""
    import jax
    import numpy as np

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
    import jax

    def weighted(fraction: float, *arguments: Any) -> Any:
        found = jax.value_and_grad(loss)(*arguments)
        return jax.tree_util.tree_map(lambda leaf: leaf * fraction, found)

    compiled: Callable[..., Any] = jax.jit(weighted)
    return compiled
