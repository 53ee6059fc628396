"""`train_step`: one step of training over split rows, each replica updating itself."""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from weft._api.team import RegisteredFunction, Team, default_team, in_turn, validate_team
from weft._core.fingerprint import Fingerprint, fingerprint
from weft._core.items import validate_callable
from weft._core.partition import RowSlice, choose, common_length, count, part_of_rows
from weft.adapters import models
from weft.adapters.holder import Holder
from weft.engines.base import Member
from weft.errors import InvalidType, InvalidValue


def train_step(
    loss: Callable[..., Any], model: Any, optimizer: Any, *, team: Team | None = None
) -> Callable[..., float]:
    """Return a function that trains a model by one step: `step(x, y)` returns the loss before it.

    `loss(model, x, y)` is a mean over the rows of its inputs. Each rank computes the gradients of
    its rows, one all_reduce averages them, weighted by rows, and every rank's optimizer updates its
    own copy of the model. Up to rounding, the result is that of a single process.

        step = weft.train_step(lambda model, x, y: F.cross_entropy(model(x), y), model, optimizer)
        for x, y in batches:
            print(step(x, y))

    `model` and `optimizer` are torch's, or for JAX a `weft.Holder` of the parameters and a function
    that returns new parameters: `optimizer(parameters, gradients)`. The driver's are the user's
    own, and up to date after each step.

    What the program changes of them between two steps holds for all ranks: parameters, buffers and
    the optimizer's state, by `load_state_dict` or in place, learning rates, `train()` and `eval()`,
    `requires_grad`, and what the loss uses. All of it is compared by its values before each step.
    The step after a failed one begins with the driver's values.

    Raises InvalidType, InvalidValue. A step raises these, what the loss raises, TeamBroken,
    WorkerLost and Stalled.
    """
    return _TrainStep(loss, model, optimizer, validate_team(team) or default_team())


class _TrainStep:
    def __init__(self, loss: Callable[..., Any], model: Any, optimizer: Any, team: Team) -> None:
        validate_callable(loss, "train_step(loss, model, optimizer)")
        self._framework = _framework_of(model, optimizer)
        self._framework.validate_optimizer(model, optimizer)
        #: whether other ranks may have other values than the driver
        self._differs = team.has_replica(model)
        number_of_model = team.replica_number(model)
        self.team = team
        self._model, self._optimizer, self._loss_given = model, optimizer, loss
        self._loss = RegisteredFunction(team, loss, "the loss")
        #: how many inputs the loss is known to take
        self._counts: set[int] = set()
        # the optimizer holds the model's parameters: in a worker, those of the worker's copy
        number = team.backend.register(optimizer, "the optimizer")
        weakref.finalize(self, team.backend.drop, number).atexit = False
        self._numbers = number_of_model, number
        self._values = self._fingerprint()

    def __repr__(self) -> str:
        return f"<train_step of a {type(self._model).__name__} in {self.team.size} ranks>"

    @in_turn
    def __call__(self, *batch: Any) -> float:
        """Train on these rows, and return the loss before the step."""
        rows = choose(None, common_length({f"argument {i}": x for i, x in enumerate(batch)}))
        parts = [part_of_rows(rows, self.team.size, rank) for rank in range(self.team.size)]
        if not count(rows):
            raise InvalidValue("train_step got inputs without rows; expected at least one")
        if len(batch) not in self._counts:
            _validate_loss(self._loss_given, len(batch))
            self._counts.add(len(batch))
        if self._differs or self._fingerprint() != self._values:
            self._send_values()
        numbers = (*self._numbers, self._loss.number())
        settings = self._framework.settings(self._model, self._optimizer)
        arguments = [
            (
                numbers,
                settings,
                [RowSlice(x, own).take() for x in batch],
                count(own) / count(rows),
            )
            for own in parts
        ]
        try:
            loss: float = self.team.backend.call(self._framework.step, arguments)[0]
        except BaseException:
            self._differs = True
            raise
        self._values = self._fingerprint()
        return loss

    def _fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint of the values of model and optimizer; None without workers."""
        if self.team.size == 1:
            return None
        return fingerprint(self._framework.values(self._model, self._optimizer))

    def _send_values(self) -> None:
        """Send the values of the driver's model and optimizer to the workers."""
        has_state = hasattr(self._optimizer, "state_dict")
        state = self._optimizer.state_dict() if has_state else None
        values = models.read(self._framework.parameters(self._model))
        own = (self._framework.parameters, self._numbers, values, state)
        self.team.backend.call(_adopt, [None, *[own] * (self.team.size - 1)])
        self._differs = False


def _framework_of(model: Any, optimizer: Any) -> ModuleType:
    """Return the adapter that trains this model with this optimizer. Each has

    validate_optimizer(model, optimizer)  raise InvalidValue if it would change nothing
    settings(model, optimizer)            what a program changes of both between two steps
    parameters(model)                     what a step may change of the model, to read and assign
    values(model, optimizer)              what differs if the values of either do
    step(member, numbers, settings, batch, fraction)
                                          remote function: one step, on a fraction of all rows
    """
    if hasattr(optimizer, "param_groups") and hasattr(model, "parameters"):
        return importlib.import_module("weft.adapters.torch_training")
    if isinstance(model, Holder) and callable(optimizer):
        return importlib.import_module("weft.adapters.jax_training")
    raise InvalidType(
        f"train_step got a {type(model).__name__} and a {type(optimizer).__name__}; expected a "
        "torch.nn.Module and a torch.optim.Optimizer, or a weft.Holder and a function of "
        "parameters and gradients"
    )


def _adopt(
    member: Member,
    parameters: Callable[[Any], Any],
    numbers: Sequence[int],
    arrays: Sequence[Any],
    state: Any,
) -> None:
    """Give a rank's model and optimizer the driver's values (a remote function)."""
    model, optimizer = (member.registered[number] for number in numbers)
    models.assign(parameters(model), arrays)
    if state is not None:
        optimizer.load_state_dict(state)


def _validate_loss(loss: Callable[..., Any], inputs: int) -> None:
    """Raise InvalidType for a loss that does not take a model and so many inputs."""
    try:
        signature = inspect.signature(loss, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions in C have none
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
