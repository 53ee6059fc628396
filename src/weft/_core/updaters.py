"""What `table.add(delta)` does to rows: updaters, by name, with options, or a user's function.

What the built-in ones do is in `rules.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft._core.adding import add_to
from weft._core.elements import Array
from weft._core.rules import RULES, blocks, computed_in
from weft.errors import InvalidType, InvalidValue

_State = Mapping[str, Array]


def resolve(value: Any) -> Updater:
    """Return the updater that a table was given: a name, an updater, or a function of the user's.

    >>> str(resolve("sgd"))
    'sgd(lr=0.001)'

    Raises InvalidValue for a name that is not built in, InvalidType for anything else.
    """
    if isinstance(value, Updater):
        return value
    if isinstance(value, str):
        if value not in BUILT_IN:
            raise InvalidValue(
                f"updater={value!r}: expected one of {', '.join(BUILT_IN)}; "
                "for a rule of your own pass the function itself"
            )
        return BUILT_IN[value]()
    return custom(value)


def from_saved(name: str, options: Iterable[tuple[str, float]]) -> Updater | None:
    """Return the built-in updater of this name with these options; None if it is not built in.

    >>> from_saved("sgd", sgd(lr=0.5).options) == sgd(lr=0.5)
    True

    Raises InvalidValue for an option that this updater does not have.
    """
    if name not in BUILT_IN:
        return None
    known, saved = [option for option, _ in BUILT_IN[name]().options], dict(options)
    if unknown := [option for option in saved if option not in known]:
        raise InvalidValue(
            f"updater {name} was saved with options that this version of weft does not know: "
            f"{', '.join(unknown)}; expected {', '.join(known) or 'none'}"
        )
    return BUILT_IN[name](**saved)


def custom(
    fun: Callable[..., Any], *, state: Sequence[str] = (), name: str | None = None
) -> Updater:
    """Return an updater that calls `fun(rows, state, delta)`, which changes `rows` in place.

    It is called with one block of whole rows after the other. `state` maps each of the given
    names to an array like `rows`, zeros at first, to be changed in place as well. Ranks compare
    the name, which is by default the function's module and qualified name. If the function raises,
    the blocks before stay changed.

    >>> def keep_best(rows, state, delta):
    ...     np.maximum(rows, delta, out=rows)
    ...     state["seen"] += 1
    >>> best = custom(keep_best, state=["seen"])

    Raises InvalidType or InvalidValue if `fun` cannot be called so, or a name is not usable.
    """
    _validate_function(fun)
    if name is None:
        named = fun if hasattr(fun, "__qualname__") else type(fun)
        name = f"{named.__module__}.{named.__qualname__}"
    if not isinstance(name, str):
        raise InvalidType(f"custom(name={name!r}): expected a string, or None for the function's")
    if not name or name in BUILT_IN:
        raise InvalidValue(
            f"custom(name={name!r}): expected a name of your own, neither empty nor one of "
            f"{', '.join(BUILT_IN)}; leave it away for the function's"
        )
    return Updater(name, fun, _validate_names(state))


def _validate_function(fun: object) -> None:
    if not callable(fun):
        raise InvalidType(
            f"updater={fun!r}: expected a function fun(rows, state, delta), an updater such as "
            f"adam(lr=0.01), or one of the names {', '.join(BUILT_IN)}"
        )
    for name, factory in BUILT_IN.items():
        if fun is factory:
            raise InvalidType(f"updater={name}: this function makes an updater; pass {name}()")
    with contextlib.suppress(ValueError):  # of functions in C that do not tell
        signature = inspect.signature(fun)
        try:
            signature.bind(None, None, None)
        except TypeError:
            shown = getattr(fun, "__qualname__", repr(fun))
            message = f"{shown}{signature}: expected a function fun(rows, state, delta)"
            raise InvalidType(message) from None


def _validate_names(state: object) -> tuple[str, ...]:
    call = f"custom(state={state!r})"
    if isinstance(state, str):
        raise InvalidType(f"{call}: expected a tuple of names; for one array state=({state!r},)")
    # a set has no order that all ranks share
    if not isinstance(state, (tuple, list)) or not all(isinstance(key, str) for key in state):
        raise InvalidType(f"{call}: expected a tuple or list of strings, as in state=('mean',)")
    if not all(state) or len(set(state)) < len(state):
        raise InvalidValue(f"{call}: expected names that are distinct, none of them empty")
    if "rows" in state:  # a saved table has the rows under this name
        raise InvalidValue(f"{call}: expected other names than 'rows', which are the table's own")
    return tuple(state)


def add() -> Updater:
    """Add the delta to the rows; for numbers of every kind."""
    return _built_in("add")


def sgd(lr: float = 1e-3) -> Updater:
    """Descend the gradient: subtract the delta `lr` times."""
    return _built_in("sgd", lr=lr)


def momentum(lr: float = 1e-3, momentum: float = 0.9, nesterov: bool = False) -> Updater:
    """Descend along a sum of the deltas so far, in which older ones count less."""
    return _built_in("momentum", "velocity", lr=lr, momentum=momentum, nesterov=nesterov)


def adagrad(lr: float = 1e-2, eps: float = 1e-10) -> Updater:
    """Descend with steps that shrink where deltas have been large."""
    return _built_in("adagrad", "squares", lr=lr, eps=eps)


def rmsprop(lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8) -> Updater:
    """Descend with steps as long as deltas are large compared to the latest ones."""
    return _built_in("rmsprop", "mean_square", lr=lr, alpha=alpha, eps=eps)


def adam(lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Updater:
    """Descend along the mean of the latest deltas over the root of their mean square."""
    return _built_in("adam", "mean", "mean_square", lr=lr, beta1=beta1, beta2=beta2, eps=eps)


#: every updater that has a name, and what makes it
BUILT_IN: dict[str, Callable[..., Updater]] = {
    factory.__name__: factory for factory in (add, sgd, momentum, adagrad, rmsprop, adam)
}


def _built_in(name: str, *state: str, **options: float) -> Updater:
    valid = tuple((option, _validate_option(name, option, options[option])) for option in options)
    return Updater(name, None, state, valid)


_DECAY = ("a number of at least 0 and less than 1, such as 0.9", 0.0, 1.0)
#: what each option must be: in words, at least, and less than
_EXPECTED = {
    "lr": ("a finite number of 0 or more (rows move against the delta)", 0.0, math.inf),
    "eps": ("a finite number above 0, such as 1e-8", math.ulp(0.0), math.inf),
    **dict.fromkeys(("momentum", "alpha", "beta1", "beta2"), _DECAY),
}


def _validate_option(name: str, option: str, value: Any) -> float:
    """Return an option as a float; nesterov as a bool, which may have been saved as a number."""
    if option == "nesterov":
        if isinstance(value, (bool, int, float, np.bool_)) and value in (0, 1):
            return bool(value)
        raise InvalidType(f"{name}(nesterov={value!r}): expected True or False")
    expected, least, limit = _EXPECTED[option]
    message = f"{name}({option}={value!r}): expected {expected}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidType(f"{message}; got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # a whole number may be too large for a float
        number = math.inf
    if not least <= number < limit:
        raise InvalidValue(message)
    return number


@dataclass(frozen=True)
class Updater:
    """What `add` does to rows and the state beside them; made by `adam()`, `custom(fun)`, ...

    >>> rows, delta = np.zeros(2), np.array([1.0, -2.0])
    >>> sgd(lr=0.5).update(rows, {}, delta, step=1)
    >>> rows.tolist()
    [-0.5, 1.0]
    """

    #: "adam"; for a user's function its module and qualified name
    name: str
    #: a user's function of (rows, state, delta); None for one that is built in
    fun: Callable[..., object] | None
    #: names of the arrays beside the rows, each of the rows' shape and dtype, zeros at first
    state: tuple[str, ...] = ()
    #: names and values: compared between ranks, saved with the table
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        options = ", ".join(f"{option}={value!r}" for option, value in self.options)
        return f"{self.name}({options})" if options else self.name

    def validate(self, dtype: np.dtype[Any]) -> None:
        """Raise InvalidType if rows of this dtype cannot have this updater."""
        if self.name not in RULES:  # add, or a user's function
            return
        if dtype not in (np.float16, np.float32, np.float64):
            raise InvalidType(
                f"updater {self}: works on float16, float32 and float64, not on {dtype}; "
                "make the table one of these, or use the updater 'add'"
            )
        least = np.finfo(computed_in(dtype)).tiny
        if dict(self.options).get("eps", 1.0) < least:
            raise InvalidType(
                f"updater {self}: in {dtype} this eps is next to 0; expected {least:.1e} or more"
            )

    def update(self, rows: Array, state: _State, delta: Array, step: int) -> None:
        """Change `rows` and the arrays of `state` in place; all have one shape and dtype.

        `step` counts the adds that these rows have had, this one included. Arrays must be
        C-contiguous. Built-in rules let infinities and NaN pass without warning: an error half way
        would leave rows and state of different adds.
        """
        if self.fun is not None:
            return _update_by_user(self, self.fun, rows, state, delta)
        with np.errstate(all="ignore"):
            if self.name == "add":
                return add_to(rows, delta)
            arrays = (rows, *(state[name] for name in self.state), delta)
            return RULES[self.name].apply(arrays, step, **dict(self.options))


def _update_by_user(
    updater: Updater, fun: Callable[..., object], rows: Array, state: _State, delta: Array
) -> None:
    """Call the function with blocks of whole rows; what it must not change is read-only."""
    delta = delta.view()
    delta.flags.writeable = False
    for part in blocks(rows) if rows.size else ():
        block, kept = rows[part], {name: state[name][part] for name in updater.state}
        given = list(kept.values())
        returned = fun(block, kept, delta[part])
        in_place = [*map(id, kept.values())] == [*map(id, given)]
        if not in_place or (returned is not None and returned is not block):
            what = f"returned a {type(returned).__name__}" if in_place else "replaced its state"
            raise InvalidType(
                f"updater {updater} {what}, which would be lost; expected a function that changes "
                "rows and state in place, as in rows -= delta; state['mean'] += delta"
            )
