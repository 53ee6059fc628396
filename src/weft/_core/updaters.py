"""What `table.add(delta)` does to rows: a built-in updater with its options, or a user's function.

In this order: `resolve` and `custom`, the built-in updaters, `Updater`, and the rules they apply:

    updater     state                   what becomes of rows r and state, given delta d
    add                                 r += d
    sgd                                 r -= lr d
    momentum    velocity v              v = momentum v + d;  r -= lr v
                                        nesterov: r -= lr (d + momentum v)
    adagrad     squares s               s += d d;  r -= lr d / (sqrt(s) + eps)
    rmsprop     mean_square s           s = alpha s + (1 - alpha) d d;  r -= lr d / (sqrt(s) + eps)
    adam        mean m, mean_square s   m = beta1 m + (1 - beta1) d
                                        s = beta2 s + (1 - beta2) d d
                                        both over 1 - beta ** step, then r -= lr m / (sqrt(s) + eps)

For all but add the delta is a gradient: rows move against it. Formulas and defaults are those of
torch.optim. A kernel in C computes all terms of one element before the next. Where there is none,
NumPy goes through the arrays in blocks and computes all terms of one block before the next:

    rows    [ block ][ block ][ block ]...     memory is read and written once,
    delta   [ block ][ block ][ block ]...     however many terms the rule has:
    state   [ block ][ block ][ block ]...     each block stays in the cache
    scratch [ block ]                          the same one every time

Both give the same bits. float16 is computed in float32 and rounded when it is stored. A square
below 6e-8 is then stored as 0, so that small gradients take large steps; a larger eps, such as
1e-3, prevents that.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft import kernels
from weft._core.arithmetic import Array, add_to, address, kernel_applies
from weft.errors import InvalidType, InvalidValue

_State = Mapping[str, Array]


def resolve(value: Any) -> Updater:
    """Return the updater that `updater=` gives: by name, as an Updater, or as a user's function.

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
    with contextlib.suppress(ValueError):  # some functions in C have no signature
        signature = inspect.signature(fun)
        try:
            signature.bind(None, None, None)
        except TypeError:
            name = getattr(fun, "__qualname__", repr(fun))
            message = f"{name}{signature}: expected a function fun(rows, state, delta)"
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
    """Add the delta to the rows; works for every dtype."""
    return _built_in("add")


def sgd(lr: float = 1e-3) -> Updater:
    """Descend the gradient: subtract `lr` times the delta."""
    return _built_in("sgd", lr=lr)


def momentum(lr: float = 1e-3, momentum: float = 0.9, nesterov: bool = False) -> Updater:
    """Descend along a decaying sum of the deltas so far."""
    return _built_in("momentum", "velocity", lr=lr, momentum=momentum, nesterov=nesterov)


def adagrad(lr: float = 1e-2, eps: float = 1e-10) -> Updater:
    """Descend with steps that shrink where deltas have been large."""
    return _built_in("adagrad", "squares", lr=lr, eps=eps)


def rmsprop(lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8) -> Updater:
    """Descend along the delta over the root of the mean square of the latest ones."""
    return _built_in("rmsprop", "mean_square", lr=lr, alpha=alpha, eps=eps)


def adam(lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Updater:
    """Descend along the mean of the latest deltas over the root of their mean square."""
    return _built_in("adam", "mean", "mean_square", lr=lr, beta1=beta1, beta2=beta2, eps=eps)


#: the built-in updaters, by name
BUILT_IN: dict[str, Callable[..., Updater]] = {
    factory.__name__: factory for factory in (add, sgd, momentum, adagrad, rmsprop, adam)
}


def _built_in(name: str, *state: str, **options: float) -> Updater:
    valid = tuple((option, _validate_option(name, option, options[option])) for option in options)
    return Updater(name, None, state, valid)


_DECAY = ("a number of at least 0 and less than 1, such as 0.9", 0.0, 1.0)

#: what each option must be: as text, its minimum, and its limit, which is excluded
_EXPECTED = {
    "lr": ("a finite number of 0 or more (rows move against the delta)", 0.0, math.inf),
    "eps": ("a finite number above 0, such as 1e-8", math.ulp(0.0), math.inf),
    **dict.fromkeys(("momentum", "alpha", "beta1", "beta2"), _DECAY),
}


def _validate_option(name: str, option: str, value: Any) -> float:
    """Return an option as a float; nesterov, which may have been saved as a number, as a bool."""
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
    except OverflowError:  # an int may be too large for a float
        number = math.inf
    if not least <= number < limit:
        raise InvalidValue(message)
    return number


@dataclass(frozen=True)
class Updater:
    """Describe what `add` does to rows and their state; made by `adam()`, `custom(fun)`, ...

    >>> rows, delta = np.zeros(2), np.array([1.0, -2.0])
    >>> sgd(lr=0.5).update(rows, {}, delta, step=1)
    >>> rows.tolist()
    [-0.5, 1.0]
    """

    #: "adam"; for a user's function its module and qualified name
    name: str
    #: a user's function of (rows, state, delta); None for a built-in updater
    fun: Callable[..., object] | None
    #: names of the state arrays, each of the rows' shape and dtype, zeros at first
    state: tuple[str, ...] = ()
    #: names and values, compared between ranks and saved with the table
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
        C-contiguous. Built-in rules give no warning of infinities and NaN: an error half way would
        leave rows and state of different adds.
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
    """Call a user's function with blocks of whole rows. It gets the delta read-only."""
    delta = delta.view()
    delta.flags.writeable = False
    for part in blocks(rows) if rows.size else ():
        block, kept = rows[part], {name: state[name][part] for name in updater.state}
        call_user(updater, fun, block, kept, delta[part])


def call_user(
    updater: Updater, fun: Callable[..., object], rows: Any, state: dict[str, Any], delta: Any
) -> None:
    """Call a user's function. Raises InvalidType for what it returns instead of changing."""
    given = list(state.values())
    returned = fun(rows, state, delta)
    in_place = [*map(id, state.values())] == [*map(id, given)]
    if not in_place or (returned is not None and returned is not rows):
        what = f"returned a {type(returned).__name__}" if in_place else "replaced its state"
        raise InvalidType(
            f"updater {updater} {what}, which would be lost; expected a function that changes "
            "rows and state in place, as in rows -= delta; state['mean'] += delta"
        )


#: Elements of a block. Milliseconds for 10 M elements on a core with 1.25 MiB of L2 cache:
#:
#:     elements             8K    16K    32K    64K   128K   256K
#:     momentum, float32    21     17     15     17     17     19
#:     adagrad, float32     32     26     24     24     26     31
#:     adam, float32        50     39     36     37     43     47
#:     adam, float64        80     73     75     84     95     98
BLOCK = 32 * 1024
#: what a rule works on: rows, state, delta, scratch memory, and the library whose arrays they are:
#: `numpy` or, for tensors on a device, `torch`, which has the same functions under these names
_Block = tuple[Any, list[Any], Any, Any, Any]


@dataclass(frozen=True)
class Rule:
    """Change a block of rows as a built-in updater does."""

    #: the updater's
    name: str
    #: computes the numbers that it needs from the step and the options, in the order of kernels.c
    factors: Callable[..., Sequence[float]]
    #: changes a block in place, given the factors
    change: Callable[..., None]

    def apply(self, arrays: Sequence[Array], step: int, **options: float) -> None:
        """Change rows and state in place. `arrays` are the rows, then the state, then the delta.
        All have one shape and dtype and are C-contiguous. `step` counts from 1."""
        if not all(array.flags.c_contiguous for array in arrays):
            # flattening would copy, and the update would be lost
            raise ValueError("an updater needs C-contiguous arrays; use numpy.ascontiguousarray")
        factors = self.factors(step, **options)
        kernel = kernels.rule_kernel(self.name, arrays[0].dtype.name)
        *changed, delta = arrays
        if kernel is not None and all(kernel_applies(array, delta) for array in changed):
            kernel([*map(address, arrays)], arrays[0].size, factors)
        else:
            self._by_blocks([array.reshape(-1) for array in arrays], factors)

    def _by_blocks(self, arrays: list[Array], factors: Sequence[float]) -> None:
        """Change rows and state without a kernel; blocks may begin within a row."""
        wide = computed_in(arrays[0].dtype)
        scratch = np.empty(min(BLOCK, arrays[0].size), wide)
        buffers = [] if wide == arrays[0].dtype else [np.empty_like(scratch) for _ in arrays]
        for part in blocks(arrays[0]):
            stored = [array[part] for array in arrays]
            size = len(stored[0])
            computed = [buffer[:size] for buffer in buffers]  # none but for float16
            for target, source in zip(computed, stored, strict=False):
                np.copyto(target, source)
            rows, *state, delta = computed or stored
            self.change((rows, state, delta, scratch[:size], np), *factors)
            for target, source in zip(stored[:-1], computed, strict=False):  # all but the delta
                np.copyto(target, source, casting="same_kind")


def blocks(rows: Array) -> Iterator[slice]:
    """Return the slices of axis 0 that have about BLOCK elements each, and at least one row."""
    length = max(1, BLOCK // max(1, math.prod(rows.shape[1:])))
    return (slice(start, start + length) for start in range(0, len(rows), length))


def computed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a rule computes changes of rows of this one."""
    return np.dtype(np.float32) if dtype.char == "e" else dtype  # NumPy's letter for float16


# The rules, in as few passes as NumPy allows and without temporary arrays. kernels.c has the same
# operations, in the same order.


def _sgd(block: _Block, lr: float) -> None:
    rows, _, delta, scratch, library = block
    library.multiply(delta, lr, out=scratch)
    rows -= scratch


def _momentum(block: _Block, lr: float, momentum: float, nesterov: float) -> None:
    rows, (velocity,), delta, scratch, library = block
    velocity *= momentum
    velocity += delta
    library.multiply(velocity, momentum if nesterov else lr, out=scratch)
    if nesterov:
        scratch += delta
        scratch *= lr
    rows -= scratch


def _adagrad(block: _Block, lr: float, eps: float) -> None:
    _, (squares,), delta, scratch, library = block
    library.multiply(delta, delta, out=scratch)
    squares += scratch
    _descend(block, delta, squares, lr, eps)


def _rmsprop(block: _Block, lr: float, eps: float, kept: float, new: float) -> None:
    _, (mean_square,), delta, _, _ = block
    _blend_square(block, mean_square, kept, new)
    _descend(block, delta, mean_square, lr, eps)


def _adam(block: _Block, lr: float, eps: float, *weights: float) -> None:
    _, (mean, mean_square), delta, scratch, library = block
    kept, new, kept_square, new_square = weights
    library.multiply(delta, new, out=scratch)
    mean *= kept
    mean += scratch
    _blend_square(block, mean_square, kept_square, new_square)
    _descend(block, mean, mean_square, lr, eps)


def _blend_square(block: _Block, mean_square: Array, kept: float, new: float) -> None:
    _, _, delta, scratch, library = block
    library.multiply(delta, delta, out=scratch)
    scratch *= new
    mean_square *= kept
    mean_square += scratch


def _descend(block: _Block, along: Array, square: Array, lr: float, eps: float) -> None:
    """Compute rows -= lr * along / (sqrt(square) + eps)."""
    rows, _, _, scratch, library = block
    library.sqrt(square, out=scratch)
    scratch += eps
    library.divide(along, scratch, out=scratch)
    scratch *= lr
    rows -= scratch


def _adam_factors(step: int, lr: float, beta1: float, beta2: float, eps: float) -> Sequence[float]:
    # lr (m / c) / (sqrt(s) / root + eps) is (lr root / c) m / (sqrt(s) + root eps)
    root = math.sqrt(1 - beta2**step)
    return lr * root / (1 - beta1**step), root * eps, beta1, 1 - beta1, beta2, 1 - beta2


#: the rules of all built-in updaters but add, by name
RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", lambda step, lr: (lr,), _sgd),
        Rule("momentum", lambda step, lr, momentum, nesterov: (lr, momentum, nesterov), _momentum),
        Rule("adagrad", lambda step, lr, eps: (lr, eps), _adagrad),
        Rule("rmsprop", lambda step, lr, alpha, eps: (lr, eps, alpha, 1 - alpha), _rmsprop),
        Rule("adam", _adam_factors, _adam),
    )
}
