"""`make_train_function`: gradients of split rows, one all_reduce, the same step in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos import _session
from synkhronos._function import CallOptions, Function, function
from synkhronos._orders import Order, run
from weft._core.functions import Partial
from weft._core.partition import Batch
from weft.adapters import models
from weft.engines.base import Member


def make_train_function(  # noqa: PLR0917  as `function` has them
    inputs: Sequence[Any],
    outputs: Any,
    updates: Any,
    bcast_inputs: Sequence[Any] | None = None,
    givens: Any = None,
    sliceable_shareds: Sequence[Any] | None = None,
    **kwargs: Any,
) -> TrainFunction:
    """Return a function that trains by one step: `train(x, y)` returns the outputs before it.

    `updates` is what one of `extensions.updates` returns, for a loss that is a mean over rows; the
    others are those of `synkhronos.function`, and so are the options of a call. Gradients are
    averaged over all ranks, weighted by rows: the step is the one that one process would have
    made, to rounding, and every rank makes the same.

        train = make_train_function([x, y], loss, updates.adam(loss, parameters))
        for batch in batches:
            loss = train(x_data, y_data, batch=batch)
    """
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


class TrainFunction:
    """A training step: what `make_train_function` returns."""

    def __init__(self, gradients: Function, step: Function, gradient: Any) -> None:
        self.name = gradients.name
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
        number = team.replica_number(self._gradient)
        both = zip(orders, steps, strict=True)
        own = [(order, number, step) for order, step in both]
        results = team.backend.call(_train, own, common=common)
        return self.gradients.collect(results, output_subset)

    def as_theano(self, *inputs: Any, **by_name: Any) -> Any:
        """Make the same step in this process alone, on all rows; other ranks' variables stay."""
        found = self.gradients.as_theano(*inputs, **by_name)
        self.step.as_theano()
        return found


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
