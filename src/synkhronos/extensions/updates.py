"""Training methods, in two steps with one all_reduce between.

    gradient_updates, parameter_updates, gradient = adam(loss, parameters)

    f = synk.function(inputs, loss, updates=gradient_updates)    each rank: the gradient of its rows
    synk.all_reduce(gradient)                                    one variable for the whole model
    g = synk.function([], updates=parameter_updates)             each rank: the same step

`extensions.train.make_train_function` makes one function of these. The gradients of all parameters
are one flat variable, and so is a method's memory (momentum, mean squares).

`loss_or_grads` is a scalar, or the gradients themselves, one for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synkhronos._packages import pytensor
from weft.errors import InvalidType, InvalidValue

Updates = list[tuple[Any, Any]]
Result = tuple[Updates, Updates, Any]
#: given the flat gradient: what is added to the flat parameters, and updates of the memory
Rule = Callable[[Any], tuple[Any, Updates]]


def sgd(loss_or_grads: Any, params: Sequence[Any], learning_rate: Any) -> Result:
    """Return updates by gradient descent: step = - learning_rate x gradient."""
    return _two_steps(loss_or_grads, params, lambda flat: (-learning_rate * flat, []))


def momentum(
    loss_or_grads: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9
) -> Result:
    """Return updates with momentum: velocity = momentum x velocity - learning_rate x gradient;
    step = velocity."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        velocity = _zeros(flat, "velocity")
        new = momentum * velocity - learning_rate * flat
        return new, [(velocity, new)]

    return _two_steps(loss_or_grads, params, rule)


def nesterov_momentum(
    loss_or_grads: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9
) -> Result:
    """Return updates with Nesterov's momentum: velocity as in `momentum`; step = momentum x
    velocity - learning_rate x gradient."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        velocity = _zeros(flat, "velocity")
        new = momentum * velocity - learning_rate * flat
        return momentum * new - learning_rate * flat, [(velocity, new)]

    return _two_steps(loss_or_grads, params, rule)


def adagrad(
    loss_or_grads: Any, params: Sequence[Any], learning_rate: Any = 1.0, epsilon: float = 1e-6
) -> Result:
    """Return Adagrad's updates: the gradient over the root of the sum of its squares so far."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        squares = _zeros(flat, "squares")
        new = squares + flat**2
        return -learning_rate * flat / (new + epsilon) ** 0.5, [(squares, new)]

    return _two_steps(loss_or_grads, params, rule)


def rmsprop(
    loss_or_grads: Any,
    params: Sequence[Any],
    learning_rate: Any = 1.0,
    rho: Any = 0.9,
    epsilon: float = 1e-6,
) -> Result:
    """Return RMSProp's updates: the gradient over the root of the moving mean of its squares."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        squares = _zeros(flat, "squares")
        new = rho * squares + (1 - rho) * flat**2
        return -learning_rate * flat / (new + epsilon) ** 0.5, [(squares, new)]

    return _two_steps(loss_or_grads, params, rule)


def adadelta(
    loss_or_grads: Any,
    params: Sequence[Any],
    learning_rate: Any = 1.0,
    rho: Any = 0.95,
    epsilon: float = 1e-6,
) -> Result:
    """Return Adadelta's updates: `rmsprop` in the unit of the parameters, that is, times the root
    of the mean square of the steps."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        squares, steps = _zeros(flat, "squares"), _zeros(flat, "steps")
        new = rho * squares + (1 - rho) * flat**2
        step = flat * ((steps + epsilon) / (new + epsilon)) ** 0.5
        return -learning_rate * step, [
            (squares, new),
            (steps, rho * steps + (1 - rho) * step**2),
        ]

    return _two_steps(loss_or_grads, params, rule)


def adam(  # noqa: PLR0917  they were all positional
    loss_or_grads: Any,
    params: Sequence[Any],
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: float = 1e-8,
) -> Result:
    """Return Adam's updates: moving averages of the gradient and of its squares, both corrected for
    their start."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        first, second, count = _zeros(flat, "first"), _zeros(flat, "second"), _count(flat)
        time = count + 1
        new_first = beta1 * first + (1 - beta1) * flat
        new_second = beta2 * second + (1 - beta2) * flat**2
        rate = learning_rate * (1 - beta2**time) ** 0.5 / (1 - beta1**time)
        step = -rate * new_first / (new_second**0.5 + epsilon)
        return step, [(first, new_first), (second, new_second), (count, time)]

    return _two_steps(loss_or_grads, params, rule)


def adamax(  # noqa: PLR0917  they were all positional
    loss_or_grads: Any,
    params: Sequence[Any],
    learning_rate: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: float = 1e-8,
) -> Result:
    """Return AdaMax's updates: `adam` with the largest gradient so far, which decays, in place of
    the mean square."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        maximum = pytensor("extensions.updates").tensor.maximum
        first, largest, count = _zeros(flat, "first"), _zeros(flat, "largest"), _count(flat)
        time = count + 1
        new_first = beta1 * first + (1 - beta1) * flat
        new_largest = maximum(beta2 * largest, abs(flat))
        step = -(learning_rate / (1 - beta1**time)) * new_first / (new_largest + epsilon)
        return step, [(first, new_first), (largest, new_largest), (count, time)]

    return _two_steps(loss_or_grads, params, rule)


def _two_steps(loss_or_grads: Any, params: Sequence[Any], rule: Rule) -> Result:
    """Return a method's updates: of the flat gradient, and from it of the parameters."""
    library = pytensor("extensions.updates")
    parameters = _validate_params(params)
    gradients = _gradients(library, loss_or_grads, parameters)
    values = [one.get_value(borrow=True) for one in parameters]
    dtype = np.result_type(*[one.dtype for one in parameters])
    size = sum(value.size for value in values)
    flat = library.shared(np.zeros(size, dtype), name="gradient")
    joined = library.tensor.concatenate([one.flatten() for one in gradients]).astype(str(dtype))
    step, changes = rule(flat)
    start = 0
    for parameter, value in zip(parameters, values, strict=True):
        own = step[start : start + value.size].reshape(value.shape)
        changes.append((parameter, (parameter + own).astype(parameter.dtype)))
        start += value.size
    return [(flat, joined)], [(one, new.astype(one.dtype)) for one, new in changes], flat


def _gradients(library: Any, loss_or_grads: Any, parameters: Sequence[Any]) -> list[Any]:
    if not isinstance(loss_or_grads, (list, tuple)):
        return list(library.grad(loss_or_grads, list(parameters)))
    if len(loss_or_grads) != len(parameters):
        raise InvalidValue(
            f"got {len(loss_or_grads)} gradients for {len(parameters)} parameters; expected as many"
        )
    return list(loss_or_grads)


def _validate_params(params: Sequence[Any]) -> list[Any]:
    parameters = list(params)
    for position, one in enumerate(parameters):
        if not hasattr(one, "get_value") or np.dtype(one.dtype).kind != "f":
            raise InvalidType(
                f"params[{position}] is {one!r}; expected a shared variable of floats"
            )
    if not parameters:
        raise InvalidValue("params is empty; expected shared variables")
    return parameters


def _zeros(flat: Any, name: str) -> Any:
    """Return a method's memory, of the gradient's size."""
    value = flat.get_value(borrow=True)
    return pytensor("extensions.updates").shared(np.zeros_like(value), name=name)


def _count(flat: Any) -> Any:
    """Return a variable that counts the steps."""
    return pytensor("extensions.updates").shared(np.zeros((), flat.dtype), name="count")
