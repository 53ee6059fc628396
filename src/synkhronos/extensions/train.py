"""`make_train_function`: gradients of split rows, one all_reduce, the same step in every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import weft
from synkhronos import _session
from synkhronos._function import CallOptions, Function, function
from synkhronos._orders import Order, run
from synkhronos._packages import deep_enough, pytensor
from weft._core.arguments import explain_keywords
from weft._core.functions import Partial
from weft._core.partition import Batch
from weft.adapters import models
from weft.engines.base import Member
from weft.errors import InvalidType

#: what Synkhronos's update rules and those of `extensions.updates` are
UpdateRule = Callable[..., tuple[Any, Any, Any]]


def _or_of_parts(make: Callable[..., TrainFunction]) -> Callable[..., TrainFunction]:
    """Make it take a graph of any inputs and outputs, with the updates that a rule has returned."""

    @functools.wraps(make)
    def call(*arguments: Any, **keywords: Any) -> TrainFunction:
        of_parts = isinstance(arguments[0], (list, tuple)) if arguments else "inputs" in keywords
        return (_make_train_function_of_parts if of_parts else make)(*arguments, **keywords)

    return call


@_or_of_parts
@explain_keywords
def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: UpdateRule,
    *args: Any,
    **kwargs: Any,
) -> TrainFunction:
    """Return a function that trains by one step: `train(x, y)` returns the loss before it.

    loss          a mean over the rows of the inputs `x` and `y`.
    params        the shared variables that are trained.
    update_rule   one of `extensions.updates`, called as `update_rule(loss, params, *args,
                  **kwargs)`.

    Gradients are averaged over all ranks, weighted by rows: the step is the one that one process
    would have made, to rounding, and every rank makes the same.

        train = make_train_function(loss, params, x, y, updates.adam, learning_rate=0.01)
        for batch in batches:
            loss = train(x_data, y_data, batch=batch)

    For other inputs and outputs, and with any option of `synkhronos.function`:

        train = make_train_function([x, y], outputs, updates.adam(loss, params), givens=...)
    """
    made = _made_by(update_rule, loss, params, *args, **kwargs)
    return _make_train_function_of_parts([x, y], loss, made)


def _made_by(update_rule: object, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Return what a rule returns. Raises InvalidType for what is no rule."""
    if not callable(update_rule):
        raise InvalidType(
            f"update_rule={update_rule!r}: expected one of synkhronos.extensions.updates, for "
            "example updates.sgd"
        )
    made: tuple[Any, Any, Any] = update_rule(*args, **kwargs)
    return made


@explain_keywords
def _make_train_function_of_parts(  # noqa: PLR0917  as `function` has them
    inputs: Sequence[Any],
    outputs: Any,
    updates: Any,
    bcast_inputs: Sequence[Any] | None = None,
    givens: Any = None,
    sliceable_shareds: Sequence[Any] | None = None,
    **kwargs: Any,
) -> TrainFunction:
    """Return a function that trains by one step, of any inputs and outputs."""
    gradient_updates, parameter_updates, gradient = updates
    name = kwargs.pop("name", None) or "train"
    return TrainFunction(
        function(
            inputs,
            outputs,
            bcast_inputs,
            gradient_updates,
            givens,
            sliceable_shareds,
            name=name,
            **kwargs,
        ),
        function([], updates=parameter_updates, name=f"{name}_step", **kwargs),
        gradient,
    )


@explain_keywords
def make_train_function_theano(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: UpdateRule,
    *args: Any,
    **kwargs: Any,
) -> Callable[[Any, Any], Any]:
    """Return a function that makes the same step in this process alone, by PyTensor: to compare
    with. The arguments are those of `make_train_function`."""
    library = pytensor("make_train_function_theano")
    gradient_updates, parameter_updates, _ = _made_by(update_rule, loss, params, *args, **kwargs)
    with deep_enough([loss, *(new for _, new in [*gradient_updates, *parameter_updates])]):
        gradients = library.function([x, y], loss, updates=gradient_updates)
        step = library.function([], updates=parameter_updates)

    @explain_keywords
    def train(x_data: Any, y_data: Any) -> Any:
        found = gradients(x_data, y_data)
        step()
        return found

    return train


class TrainFunction:
    """A training step: what `make_train_function` returns."""

    def __init__(self, gradients: Function, step: Function, gradient: Any) -> None:
        self.name = gradients.name or "train"
        self.gradients = gradients
        self.step = step
        self._gradient = gradient

    def __call__(
        self,
        *inputs: Any,
        output_subset: Sequence[int] | None = None,
        batch: Batch | None = None,
        batch_s: Any = None,
        num_slices: int = 1,
        **by_name: Any,
    ) -> Any:
        """Make one step with all ranks."""
        options = CallOptions(output_subset, batch, batch_s, num_slices)
        team = _session.team(self.name)
        orders, common = self.gradients.orders(inputs, by_name, options)
        steps, _ = self.step.orders((), {}, CallOptions())
        number = _number_of(team, self._gradient)
        both = zip(orders, steps, strict=True)
        own = [(order, number, step) for order, step in both]
        results = team.backend.call(_train, own, common=common)
        return self.gradients.collect(results, output_subset)

    def as_theano(self, *inputs: Any, **by_name: Any) -> Any:
        """Make the same step in this process alone, on all rows; other ranks' variables stay."""
        found = self.gradients.as_theano(*inputs, **by_name)
        self.step.as_theano()
        return found


def _number_of(team: weft.Team, gradient: Any) -> int:
    """Return the number of the variable of the gradient, or of the list of those of gradients."""
    if isinstance(gradient, list):
        for one in gradient:
            team.replica_number(one)
    return team.replica_number(gradient)


def _train(
    member: Member, order: Order | None, gradient: int, step: Order, /, **common: Any
) -> Partial | None:
    """Compute a rank's gradients, average them over all rows, and make the step (a remote
    function)."""
    found = None
    if order is not None:
        try:
            found = run(member, order, **common)
        except Exception as error:
            member.group.refuse("train", error)
            raise
    variable = member.registered[gradient]
    weight = 0 if found is None else found.rows
    mean = member.group.all_reduce(models.read(variable), "mean", weight=weight)
    models.assign(variable, mean)
    run(member, step)
    return found
