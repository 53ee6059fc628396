"""`train_step`: one step of training over split rows, each replica updating itself."""

from __future__ import annotations

import importlib
import inspect
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from weft._api.checking import Schedule, check_parts, shape_of
from weft._api.team import RegisteredFunction, Team, default_team, in_turn, validate_team
from weft._core.arguments import validate_count
from weft._core.checks import Comparison, describe, few
from weft._core.failures import warn_caller
from weft._core.fingerprint import fingerprint
from weft._core.items import validate_callable
from weft._core.partition import choose, common_length, count, part_of_rows, slice_rows
from weft.adapters import models
from weft.adapters.holder import Holder
from weft.engines.base import Member
from weft.engines.generators import SeedSource
from weft.errors import InvalidType, InvalidValue, Mismatch


def train_step(
    loss: Callable[..., Any],
    model: Any,
    optimizer: Any,
    *,
    team: Team | None = None,
    check: bool | None = False,
    seed: int | None = None,
    sync_batchnorm: bool = False,
    scaler: Any = None,
    clip: float | None = None,
    accumulate: int = 1,
) -> Callable[..., float]:
    """Return a function that trains a model by one step: `step(x, y)` returns the loss before it.

    `loss(model, x, y)` is a mean over the rows of its inputs. Each rank computes the gradients of
    its rows, one all_reduce averages them, weighted by rows, and every rank's optimizer updates its
    own copy of the model. Up to rounding, the result is that of a single process.

        step = weft.train_step(lambda model, x, y: F.cross_entropy(model(x), y), model, optimizer)
        for x, y in batches:
            print(step(x, y))

    The inputs are given to the loss as they are given to the step: by position or by name, arrays
    or dicts and tuples of arrays, of as many rows each.

    `model` and `optimizer` are torch's, or for JAX a `weft.Holder` of the parameters and a function
    that returns new parameters: `optimizer(parameters, gradients)`. The driver's are the user's
    own, and up to date after each step.

    team            the ranks; by default one team for all functions and steps.
    check           with False the first step of each shape checks that the loss is a mean over the
                    rows: it computes a few rows here as well, at once and in two parts, without
                    gradients and with the model in its evaluation mode, and raises Mismatch if they
                    differ; with True every step does, with None none.
    seed            seeds the random generators of all ranks at each step from (seed, step, rank);
                    by default those of `Team(seed=...)`, else from the states of the driver's.
    sync_batchnorm  have the batch normalisation of torch normalise by the mean and variance of all
                    ranks' rows. Otherwise each rank normalises its rows by their own.
    scaler          a `torch.amp.GradScaler`, for losses computed in float16: the loss is scaled
                    before its gradients are computed, and where one is infinite no rank updates.
    clip            the largest norm of all gradients together, to which they are scaled down.
    accumulate      computes the gradients of a rank's rows in so many parts, one after the other,
                    which takes the memory of one part. A mean over the rows stays the same.

    Models on a GPU are trained there: each rank has its copy on its own GPU, and the gradients do
    not pass through the host. Inputs on a GPU arrive on each rank's own.

    What the program changes of them between two steps holds for all ranks: parameters, buffers and
    the optimizer's state, by `load_state_dict` or in place, learning rates, `train()` and `eval()`,
    `requires_grad`, and what the loss uses. All of it is compared by its values before each step.
    The step after a failed one begins with the driver's values.

    Raises InvalidType, InvalidValue. A step raises these, what the loss raises, Mismatch,
    TeamBroken, WorkerLost and Stalled.
    """
    return _TrainStep(
        loss,
        model,
        optimizer,
        validate_team(team) or default_team(),
        schedule=Schedule(check),
        seeds=None if seed is None else SeedSource(validate_count(seed, "train_step", "seed")),
        options=_validate_options(sync_batchnorm, scaler, clip, accumulate),
    )


class Options(NamedTuple):
    """Describe how a step is made."""

    sync_batchnorm: bool
    scaler: Any
    clip: float | None
    accumulate: int


def _validate_options(
    sync_batchnorm: bool, scaler: Any, clip: float | None, accumulate: int
) -> Options:
    methods = "scale", "unscale_", "step", "update"
    if scaler is not None and not all(callable(getattr(scaler, m, None)) for m in methods):
        raise InvalidType(
            f"train_step(scaler={scaler!r}): expected a torch.amp.GradScaler, or None"
        )
    if clip is not None:
        number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
        if not number:
            raise InvalidType(f"train_step(clip={clip!r}): expected a norm, or None")
        if not 0 < clip < float("inf"):
            raise InvalidValue(f"train_step(clip={clip}): expected a norm above 0")
    parts = validate_count(accumulate, "train_step", "accumulate")
    if parts < 1:
        raise InvalidValue(f"train_step(accumulate={parts}): expected 1 or more parts")
    return Options(sync_batchnorm, scaler, clip, parts)


class _TrainStep:
    def __init__(
        self,
        loss: Callable[..., Any],
        model: Any,
        optimizer: Any,
        team: Team,
        *,
        schedule: Schedule,
        seeds: SeedSource | None,
        options: Options,
    ) -> None:
        validate_callable(loss, "train_step(loss, model, optimizer)")
        self._framework = _framework_of(model, optimizer)
        self._framework.validate(model, optimizer, options)
        #: whether other ranks may have other values than the driver
        self._differs = team.has_replica(model)
        number_of_model = team.replica_number(model, user=self)
        self.team = team
        self._model, self._optimizer, self._loss_given = model, optimizer, loss
        self._loss = RegisteredFunction(team, loss, "the loss", takes_whole=False)
        self._schedule, self._seeds = schedule, seeds
        self._options = options
        #: which inputs the loss is known to take, by their number and names
        self._signatures: set[tuple[Any, ...]] = set()
        # the optimizer holds the model's parameters: in a worker, those of the worker's copy
        named = [(optimizer, "the optimizer")]
        named += [] if options.scaler is None else [(options.scaler, "the scaler")]
        numbers = [team.backend.register(*each) for each in named]
        for number in numbers:
            weakref.finalize(self, team.backend.drop, number).atexit = False
        self._numbers = number_of_model, *numbers
        self._values = self._fingerprint()

    def __repr__(self) -> str:
        return f"<train_step of a {type(self._model).__name__} in {self.team.size} ranks>"

    @in_turn
    def __call__(self, *batch: Any, **named: Any) -> float:
        """Train on these rows, and return the loss before the step."""
        began = time.perf_counter()
        inputs = {**{f"argument {i}": x for i, x in enumerate(batch)}, **named}
        rows = choose(None, common_length(inputs))
        parts = [part_of_rows(rows, self.team.size, rank) for rank in range(self.team.size)]
        if not count(rows):
            raise InvalidValue("train_step got inputs without rows; expected at least one")
        self._validate(batch, named, rows)
        if self._differs or self._fingerprint() != self._values:
            self._send_values()
        numbers = (self._loss.number(), *self._numbers)
        settings = self._framework.settings(
            self._model, self._optimizer, self._options, alone=self.team.size == 1
        )
        arguments = [
            (numbers, settings, self._micro_batches(batch, named, own, count(rows)))
            for own in parts
        ]
        try:
            loss: float = self.team.call(self._framework.step, arguments, seeds=self._seeds)[0]
        except BaseException:
            self._differs = True
            raise
        self._values = self._fingerprint()
        self._loss.called(time.perf_counter() - began)
        return loss

    def _micro_batches(
        self, batch: tuple[Any, ...], named: dict[str, Any], own: Any, total: int
    ) -> list[Any]:
        """Return a rank's inputs, in as many parts as they are to be computed in, each with its
        fraction of all rows."""
        times = self._options.accumulate
        parts = [part_of_rows(own, times, part) for part in range(times)] if times > 1 else [own]
        return [(*_taken(batch, named, part), count(part) / total) for part in parts]

    def _validate(self, batch: tuple[Any, ...], named: dict[str, Any], rows: Any) -> None:
        """Raise for inputs that the loss does not take, or of which it gives no mean."""
        needed = self.team.size * self._options.accumulate
        if self._options.sync_batchnorm and count(rows) < needed:
            raise InvalidValue(
                f"train_step(sync_batchnorm=True) got {count(rows)} rows for {self.team.size} "
                f"ranks, which meet in every layer; expected a row for each, {needed} in all"
            )
        signature = (len(batch), *named)
        if signature not in self._signatures:
            _validate_loss(self._loss_given, len(batch), named)
            self._warn_of_batchnorm()
            self._signatures.add(signature)
        shape = shape_of((key, value, True) for key, value in (*enumerate(batch), *named.items()))
        if count(rows) < 2:
            return
        difference = self._schedule.check(shape, lambda: self._compared(batch, named, rows))
        if difference is not None:
            kind = "a sum" if "sum" in difference.fitting else "no mean"
            raise Mismatch(_LOSS.format(kind, describe(difference, few(rows))))

    def _compared(self, batch: tuple[Any, ...], named: dict[str, Any], rows: Any) -> Comparison:
        def evaluate(isolated: Any, rows: Any) -> Any:
            return self._framework.evaluate(*isolated, *_taken(batch, named, rows))

        used, constants = (self._loss_given, self._model), self._framework.constants(self._model)
        return check_parts(used, evaluate, rows, "mean", constants)

    def _warn_of_batchnorm(self) -> None:
        layer = self._framework.batchnorm(self._model)
        if layer is None or self._options.sync_batchnorm or self.team.size == 1 or self._signatures:
            return
        warn_caller(
            f"the {type(self._model).__name__} has batch normalisation ({layer}): each rank "
            "normalises its rows by their own mean and variance, so the result is not that of one "
            "process. To have it use those of all rows:\n"
            "    weft.train_step(..., sync_batchnorm=True)"
        )

    def _fingerprint(self) -> Any:
        """Return what differs if the values of model and optimizer do; None without workers."""
        if self.team.size == 1:
            return None
        scaler = self._options.scaler
        arrays, on_device, others = self._framework.values(self._model, self._optimizer)
        states = others, None if scaler is None else scaler.state_dict()
        return fingerprint(states, arrays=arrays), on_device

    def _send_values(self) -> None:
        """Send the values of the driver's model and optimizer to the workers."""
        states = [
            each.state_dict() if hasattr(each, "state_dict") else None
            for each in (self._optimizer, self._options.scaler)
        ]
        values = models.read(self._framework.parameters(self._model))
        own = (self._framework.parameters, self._numbers, values, states)
        self.team.backend.call(_adopt, [None, *[own] * (self.team.size - 1)])
        self._differs = False


def _framework_of(model: Any, optimizer: Any) -> ModuleType:
    """Return the adapter that trains this model with this optimizer. Each has

    validate(model, optimizer, options)   raise InvalidValue if no step would change anything, or
                                          an option cannot be had
    settings(model, optimizer, options, alone=)
                                          what a program changes of both between two steps, for
                                          workers, unless the driver is `alone`
    parameters(model)                     what a step may change of the model, to read and assign
    values(model, optimizer)              what differs if the values of either do: arrays that are
                                          contiguous, those on a device, and anything else
    constants(model)                      what of the model computing a loss does not change
    evaluate(loss, model, batch, named)   the loss, computed with a copy of the model
    batchnorm(model)                      a layer that normalises by the batch's statistics, or None
    step(member, numbers, settings, parts)
                                          remote function: one step on parts of the rows, each
                                          given as batch, named, and its fraction of all rows
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
    states: Sequence[Any],
) -> None:
    """Give a rank's model and optimizer the driver's values (a remote function)."""
    model, *others = (member.registered[number] for number in numbers)
    models.assign(parameters(model), arrays)
    for each, state in zip(others, states, strict=False):
        if state is not None:
            each.load_state_dict(state)


def _taken(
    batch: tuple[Any, ...], named: dict[str, Any], rows: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return some rows of all inputs."""
    taken = {name: slice_rows(value, rows).take() for name, value in named.items()}
    return [slice_rows(value, rows).take() for value in batch], taken


_LOSS = (
    "the loss is {} over the rows, so the mean of the ranks' losses would be another number: {}; "
    "take the mean over the rows, such as reduction='mean' of the losses of torch, or to train by "
    "the mean of the ranks' losses all the same:\n    weft.train_step(..., check=None)"
)


def _validate_loss(loss: Callable[..., Any], inputs: int, named: Collection[str]) -> None:
    """Raise InvalidType for a loss that does not take a model and such inputs."""
    try:
        signature = inspect.signature(loss, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions in C have none
        return
    try:
        signature.bind(None, *[None] * inputs, **dict.fromkeys(named))
    except TypeError:
        by_name = [f"{name}={name}" for name in named]
        given = ["model", *(f"input {number}" for number in range(inputs)), *by_name]
        name = getattr(loss, "__qualname__", repr(loss))
        raise InvalidType(
            f"{name}{signature} is called as loss({', '.join(given)}) by this step; expected "
            "a function such as: def loss(model, x, y): return F.cross_entropy(model(x), y)"
        ) from None
