"""Training methods, in two steps with one all_reduce between.

    gradient_updates, parameter_updates, gradient = adam(loss, parameters)

    f = synk.function(inputs, loss, updates=gradient_updates)    each rank: the gradient of its rows
    synk.all_reduce(gradient)                                    one variable for the whole model
    g = synk.function([], updates=parameter_updates)             each rank: the same step

`extensions.train.make_train_function` makes one function of these. The gradients of all parameters
are one flat variable, and so is a method's memory (momentum, mean squares).

`loss` is a scalar, or the gradients themselves, one for each parameter; it may be called
`loss_or_grads` too, as in Lasagne. First what other rules are made of, then the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from synkhronos._names import also
from synkhronos._packages import deep_enough, pytensor
from weft._core.arguments import explain_keywords
from weft.errors import InvalidType, InvalidValue

Updates = list[tuple[Any, Any]]
Result = tuple[Updates, Updates, Any]
#: given the flat gradient: what is added to the flat parameters, and updates of the memory
Rule = Callable[[Any], tuple[Any, Updates]]


@explain_keywords
def flatten_vars(variables: Sequence[Any]) -> Any:
    """Return all variables as one with a single axis, one after the other."""
    library = pytensor("extensions.updates")
    return library.tensor.concatenate([one.flatten() for one in variables])


@explain_keywords
def vars_flat_size(variables: Sequence[Any]) -> int:
    """Return how many numbers shared variables have in all."""
    return sum(int(one.get_value(borrow=True).size) for one in variables)


@explain_keywords
def unflatten_vars(flat_var: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the parts of a flat variable that have the places and the shapes of shared variables,
    of which it has the values one after the other."""
    found, start = [], 0
    for one in variables:
        value = one.get_value(borrow=True)
        found.append(flat_var[start : start + value.size].reshape(value.shape))
        start += value.size
    return found


@also(loss_or_grads="loss")
def flat_unflat_grads(loss: Any, params: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Return a flat shared variable for the gradients of all parameters, the flat gradient that is
    to be put there, and the gradients as parts of the shared variable."""
    parameters = _validate_params(params)
    dtype = np.result_type(*[one.dtype for one in parameters])
    library = pytensor("extensions.updates")
    shared = library.shared(np.zeros(vars_flat_size(parameters), dtype), name="gradient")
    flat = flatten_vars(_gradients(loss, parameters)).astype(str(dtype))
    return shared, flat, unflatten_vars(shared, parameters)


@also(loss_or_grads="loss")
def nonflat_grads(loss: Any, params: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return a shared variable for the gradient of each parameter, and the gradients."""
    parameters = _validate_params(params)
    return [_zeros(one, "gradient") for one in parameters], _gradients(loss, parameters)


@explain_keywords
def apply_momentum(param_updates: Sequence[tuple[Any, Any]], momentum: Any = 0.9) -> Updates:
    """Return updates with momentum in the place of any others: what these would add is added to
    the velocity instead, and the velocity to the parameter."""
    found = []
    for parameter, new in param_updates:
        velocity = _zeros(parameter, "velocity")
        faster = momentum * velocity + new - parameter
        found += [(velocity, faster), (parameter, parameter + faster)]
    return _as_stored(found)


@explain_keywords
def apply_nesterov_momentum(
    param_updates: Sequence[tuple[Any, Any]], momentum: Any = 0.9
) -> Updates:
    """Return updates with Nesterov's momentum in the place of any others: as `apply_momentum`, but
    the parameter is moved by what the next step would add to it too."""
    found = []
    for parameter, new in param_updates:
        velocity = _zeros(parameter, "velocity")
        faster = momentum * velocity + new - parameter
        found += [(velocity, faster), (parameter, momentum * faster + new)]
    return _as_stored(found)


@also(loss_or_grads="loss")
def sgd_nonflat(
    loss: Any, params: Sequence[Any], learning_rate: Any
) -> tuple[Updates, Updates, list[Any]]:
    """Return updates by gradient descent with a shared variable for each gradient: to compare with
    `sgd`, which has one for all."""
    shared, gradients = nonflat_grads(loss, params)
    steps = [(one, one - learning_rate * own) for one, own in zip(params, shared, strict=True)]
    return _as_stored(zip(shared, gradients, strict=True)), _as_stored(steps), shared


@also(loss_or_grads="loss")
def sgd(loss: Any, params: Sequence[Any], learning_rate: Any) -> Result:
    """Return updates by gradient descent: step = - learning_rate x gradient."""
    return _two_steps(loss, params, lambda flat: (-learning_rate * flat, []))


@also(loss_or_grads="loss")
def momentum(loss: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9) -> Result:
    """Return updates with momentum: velocity = momentum x velocity - learning_rate x gradient;
    step = velocity."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        velocity = _zeros(flat, "velocity")
        new = momentum * velocity - learning_rate * flat
        return new, [(velocity, new)]

    return _two_steps(loss, params, rule)


@also(loss_or_grads="loss")
def nesterov_momentum(
    loss: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9
) -> Result:
    """Return updates with Nesterov's momentum: velocity as in `momentum`; step = momentum x
    velocity - learning_rate x gradient."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        velocity = _zeros(flat, "velocity")
        new = momentum * velocity - learning_rate * flat
        return momentum * new - learning_rate * flat, [(velocity, new)]

    return _two_steps(loss, params, rule)


@also(loss_or_grads="loss")
def adagrad(
    loss: Any, params: Sequence[Any], learning_rate: Any = 1.0, epsilon: float = 1e-6
) -> Result:
    """Return Adagrad's updates: the gradient over the root of the sum of its squares so far."""

    def rule(flat: Any) -> tuple[Any, Updates]:
        squares = _zeros(flat, "squares")
        new = squares + flat**2
        return -learning_rate * flat / (new + epsilon) ** 0.5, [(squares, new)]

    return _two_steps(loss, params, rule)


@also(loss_or_grads="loss")
def rmsprop(
    loss: Any,
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

    return _two_steps(loss, params, rule)


@also(loss_or_grads="loss")
def adadelta(
    loss: Any,
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

    return _two_steps(loss, params, rule)


@also(loss_or_grads="loss")
def adam(  # noqa: PLR0917  they were all positional
    loss: Any,
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

    return _two_steps(loss, params, rule)


@also(loss_or_grads="loss")
def adamax(  # noqa: PLR0917  they were all positional
    loss: Any,
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

    return _two_steps(loss, params, rule)


def _two_steps(loss: Any, params: Sequence[Any], rule: Rule) -> Result:
    """Return a method's updates: of the flat gradient, and from it of the parameters."""
    parameters = _validate_params(params)
    flat, joined, _ = flat_unflat_grads(loss, parameters)
    step, changes = rule(flat)
    own = zip(parameters, unflatten_vars(step, parameters), strict=True)
    changes += [(parameter, parameter + part) for parameter, part in own]
    return [(flat, joined)], _as_stored(changes), flat


def _as_stored(updates: Iterable[tuple[Any, Any]]) -> Updates:
    """Return updates with new values in the dtypes of their variables."""
    return [(one, new.astype(one.dtype)) for one, new in updates]


def _gradients(loss: Any, parameters: Sequence[Any]) -> list[Any]:
    if not isinstance(loss, (list, tuple)):
        with deep_enough([loss]):
            return list(pytensor("extensions.updates").grad(loss, list(parameters)))
    if len(loss) != len(parameters):
        raise InvalidValue(
            f"got {len(loss)} gradients for {len(parameters)} parameters; expected as many"
        )
    return list(loss)


def _validate_params(params: Sequence[Any]) -> list[Any]:
    if hasattr(params, "get_value") or not isinstance(params, Iterable):
        raise InvalidType(f"params={params!r}: expected a list of shared variables")
    parameters = list(params)
    for position, one in enumerate(parameters):
        if not hasattr(one, "get_value") or np.dtype(one.dtype).kind != "f":
            raise InvalidType(
                f"params[{position}] is {one!r}; expected a shared variable of floats"
            )
    if not parameters:
        raise InvalidValue("params is empty; expected shared variables")
    return parameters


def _zeros(like: Any, name: str) -> Any:
    """Return a method's memory, of the same type and size as a variable."""
    value = like.get_value(borrow=True)
    library = pytensor("extensions.updates")
    return library.shared(np.zeros_like(value), name=name, shape=like.type.shape)


def _count(flat: Any) -> Any:
    """Return a variable that counts the steps."""
    return pytensor("extensions.updates").shared(np.zeros((), flat.dtype), name="count")
