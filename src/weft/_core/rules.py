"""What built-in updaters do to rows and their state, given a delta.

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
torch.optim. A loop in C has all terms of one number before the next. Where there is none, NumPy
goes over the arrays in blocks, all terms of one block before the next:

    rows    [ block ][ block ][ block ]...     memory is read and written once,
    delta   [ block ][ block ][ block ]...     however many terms the rule has:
    state   [ block ][ block ][ block ]...     each block stays in the cache
    scratch [ block ]                          the same one every time

Both make the same bits. float16 is computed in float32 and rounded when it is stored. A square
below 6e-8 is then stored as 0, so that small gradients take large steps; a larger eps, such as
1e-3, prevents that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft import kernels
from weft._core.elements import Array
from weft._core.values import address, can_change_in_c

#: Elements of a block. Milliseconds for 10 M elements on a core with 1.25 MiB of L2 cache:
#:
#:     elements             8K    16K    32K    64K   128K   256K
#:     momentum, float32    21     17     15     17     17     19
#:     adagrad, float32     32     26     24     24     26     31
#:     adam, float32        50     39     36     37     43     47
#:     adam, float64        80     73     75     84     95     98
BLOCK = 32 * 1024

#: what a rule works on: rows, state, delta, and memory for what comes in between
_Block = tuple[Array, list[Array], Array, Array]


@dataclass(frozen=True)
class Rule:
    """One rule: what it makes of its options, and what it does with that to a block."""

    #: the updater's
    name: str
    #: the numbers that it needs, in the order of kernels.c; of the step and the options by name
    factors: Callable[..., Sequence[float]]
    #: changes a block in place, given the factors
    change: Callable[..., None]

    def apply(self, arrays: Sequence[Array], step: int, **options: float) -> None:
        """Change rows and state, given as the first of `arrays`, by a delta, the last.

        All have one shape and dtype and are C-contiguous. `step` counts from 1.
        """
        if not all(array.flags.c_contiguous for array in arrays):
            # flattening would copy, and the update would be lost
            raise ValueError("an updater needs C-contiguous arrays; use numpy.ascontiguousarray")
        factors = self.factors(step, **options)
        loop = kernels.rule_loop(self.name, arrays[0].dtype.name)
        *changed, delta = arrays
        if loop is not None and all(can_change_in_c(array, delta) for array in changed):
            loop([*map(address, arrays)], arrays[0].size, factors)
        else:
            self._by_blocks([array.reshape(-1) for array in arrays], factors)

    def _by_blocks(self, arrays: list[Array], factors: Sequence[float]) -> None:
        """Do the same without a loop in C; blocks may begin within a row."""
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
            self.change((rows, state, delta, scratch[:size]), *factors)
            for target, source in zip(stored[:-1], computed, strict=False):  # all but the delta
                np.copyto(target, source, casting="same_kind")


def blocks(rows: Array) -> Iterator[slice]:
    """Return the parts of axis 0, each of about BLOCK elements, at least one row."""
    length = max(1, BLOCK // max(1, math.prod(rows.shape[1:])))
    return (slice(start, start + length) for start in range(0, len(rows), length))


def computed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the kind of number that a rule works with to change rows of this one."""
    return np.dtype(np.float32) if dtype.char == "e" else dtype  # NumPy's letter for float16


# What the rules do, in as few passes as NumPy allows and without temporary arrays. kernels.c has
# the same, in the same order.


def _sgd(block: _Block, lr: float) -> None:
    rows, _, delta, scratch = block
    np.multiply(delta, lr, out=scratch)
    rows -= scratch


def _momentum(block: _Block, lr: float, momentum: float, nesterov: float) -> None:
    rows, (velocity,), delta, scratch = block
    velocity *= momentum
    velocity += delta
    np.multiply(velocity, momentum if nesterov else lr, out=scratch)
    if nesterov:
        scratch += delta
        scratch *= lr
    rows -= scratch


def _adagrad(block: _Block, lr: float, eps: float) -> None:
    _, (squares,), delta, scratch = block
    np.multiply(delta, delta, out=scratch)
    squares += scratch
    _descend(block, delta, squares, lr, eps)


def _rmsprop(block: _Block, lr: float, eps: float, kept: float, new: float) -> None:
    _, (mean_square,), delta, _ = block
    _blend_square(block, mean_square, kept, new)
    _descend(block, delta, mean_square, lr, eps)


def _adam(block: _Block, lr: float, eps: float, *weights: float) -> None:
    _, (mean, mean_square), delta, scratch = block
    kept, new, kept_square, new_square = weights
    np.multiply(delta, new, out=scratch)
    mean *= kept
    mean += scratch
    _blend_square(block, mean_square, kept_square, new_square)
    _descend(block, mean, mean_square, lr, eps)


def _blend_square(block: _Block, mean_square: Array, kept: float, new: float) -> None:
    _, _, delta, scratch = block
    np.multiply(delta, delta, out=scratch)
    scratch *= new
    mean_square *= kept
    mean_square += scratch


def _descend(block: _Block, along: Array, square: Array, lr: float, eps: float) -> None:
    """Compute rows -= lr * along / (sqrt(square) + eps)."""
    rows, _, _, scratch = block
    np.sqrt(square, out=scratch)
    scratch += eps
    np.divide(along, scratch, out=scratch)
    scratch *= lr
    rows -= scratch


def _adam_factors(step: int, lr: float, beta1: float, beta2: float, eps: float) -> Sequence[float]:
    # lr (m / c) / (sqrt(s) / root + eps) is (lr root / c) m / (sqrt(s) + root eps)
    root = math.sqrt(1 - beta2**step)
    return lr * root / (1 - beta1**step), root * eps, beta1, 1 - beta1, beta2, 1 - beta2


#: all but add, by the updater's name
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
