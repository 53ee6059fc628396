"""Several ranks in one process: what the calls' tests use in the place of an engine.

    values -> calls -> their plans -> carried out here -> results, by rank

and arrays to exchange: of every dtype, in every layout, with what NumPy says they come to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from weft._core.arithmetic import combine
from weft._core.calls import Call, Combination, Movement, Reduce
from weft._core.moves import Broadcast, Gather, Scatter

KINDS: dict[str, Any] = {
    "all_reduce": Reduce,
    "reduce": Reduce,
    "broadcast": Broadcast,
    "scatter": Scatter,
    "gather": Gather,
    "all_gather": Gather,
}
OPS = ("sum", "mean", "prod", "min", "max")


def run(name: str, values: Sequence[Any], **options: Any) -> list[Any]:
    """A call of as many ranks as there are values. An option that is a list has one per rank."""
    size = len(values)
    calls = []
    for rank, value in enumerate(values):
        mine = {
            key: option[rank] if isinstance(option, list) else option
            for key, option in options.items()
        }
        calls.append(KINDS[name](name, rank, size, value, **mine))
    return exchange(calls)


def exchange(calls: Sequence[Call]) -> list[Any]:
    """Carry out what the calls of all ranks plan; their results."""
    assert len({call.common for call in calls}) == 1
    plans = [call.settle([other.own for other in calls]) for call in calls]
    # as through slots: everything is read before anything is written
    sent = [[array.copy() for array in call.source] for call in calls]
    for call in calls:
        assert all(array.ndim == 1 and array.flags.c_contiguous for array in call.source)
        assert call.layout.sizes == tuple(array.nbytes for array in call.source)
    if isinstance(plans[0], Combination):
        _combine(calls[0], plans, sent)
    else:
        _move(plans, sent)
    for call in calls:
        call.finish()
    return [call.result() for call in calls]


def _combine(first: Call, plans: Sequence[Combination], sent: list[list[Any]]) -> None:
    """In blocks of two lines, each by one rank for all."""
    size = len(plans)
    for rank, plan in enumerate(plans):
        assert plan[:4] == plans[0][:4]
        assert bool(plan.target) == (bool(sent[0]) and plan.root in (None, rank))
        for index, start, stop, _ in first.layout.blocks_of(rank, size, 128):
            width = sent[0][index].dtype.itemsize
            part = slice(start // width, stop // width)
            made = np.empty_like(sent[0][index][part])
            parts = (arrays[index][part] for arrays in sent)
            combine(parts, made, plan.op, plan.elements[index], plan.weights)
            for other in plans:
                if other.target:
                    other.target[index][part] = made


def _move(plans: Sequence[Movement], sent: list[list[Any]]) -> None:
    outgoing = {copy for plan in plans for copy in plan.outgoing}
    incoming = {copy for plan in plans for copy in plan.incoming if copy.from_rank != copy.to_rank}
    assert outgoing == incoming  # both ends plan the same copies
    for rank, plan in enumerate(plans):
        assert plan.sizes == plans[0].sizes
        assert list(plan.sizes[rank]) == [array.nbytes for array in sent[rank]]
        written = [np.zeros(array.nbytes, bool) for array in plan.target]
        for copy in plan.incoming:
            assert copy.to_rank == rank
            assert copy.length > 0
            source = sent[copy.from_rank][copy.from_array].view(np.uint8)
            place = slice(copy.to_byte, copy.to_byte + copy.length)
            assert not written[copy.to_array][place].any()  # nothing is written twice
            written[copy.to_array][place] = True
            part = source[copy.from_byte : copy.from_byte + copy.length]
            plan.target[copy.to_array].view(np.uint8)[place] = part
        assert all(array.all() for array in written)  # and nothing left out


# arrays

WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = ("float16", "float32", "float64", "longdouble")
COMPLEX = ("complex64", "complex128", "clongdouble")
NUMPY = ("bool", *WHOLE, *FLOATS, *COMPLEX, ">f8", ">i4")
TORCH = (
    *("torch.bool", "torch.uint8", "torch.int16", "torch.int64", "torch.float16"),
    *("torch.bfloat16", "torch.float32", "torch.complex64"),
)
DTYPES = (*NUMPY, *TORCH)
LAYOUTS = ("C", "F", "strided", "reversed", "read-only", "unaligned")

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def numbers(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Random numbers; of floats some are zero, infinite or none."""
    if dtype.startswith("torch."):
        kind = getattr(torch, dtype.removeprefix("torch."))
        plain = "float32" if kind == torch.bfloat16 else dtype.removeprefix("torch.")
        return torch.from_numpy(np.array(numbers(random, plain, shape))).to(kind)
    if np.dtype(dtype).kind in "iu":
        width = np.dtype(dtype).itemsize
        count = int(np.prod(shape, dtype=int))
        return np.frombuffer(random.bytes(count * width), dtype).reshape(shape).copy()
    values = random.normal(size=shape) * 10.0 ** random.integers(-2, 3, shape)
    if np.dtype(dtype).kind == "c":  # infinities become none when they are divided
        return np.asarray(values + 1j * random.normal(size=shape), dtype)
    special = random.choice([0.0, -0.0, np.inf, -np.inf, np.nan], shape)
    values = np.where(random.random(shape) < 0.1, special, values)
    if np.dtype(dtype).kind == "b":
        return np.asarray(values > 0)
    return np.asarray(values, dtype)


def laid_out(array: Any, layout: str) -> Any:
    """The same numbers in another order in memory."""
    if isinstance(array, torch.Tensor):
        if layout == "F" and array.ndim > 1:
            return array.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.stack([array, array], dim=-1)[..., 0] if layout == "strided" else array
    array = array.copy()
    if layout == "F":
        array = np.array(array, order="F")
    elif layout == "strided":
        array = np.stack([array, array], axis=-1)[..., 0]
    elif layout == "reversed" and array.ndim:
        array = array[::-1].copy()[::-1]
    elif layout == "read-only":
        array.flags.writeable = False
    elif layout == "unaligned":
        moved = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        moved[...] = array
        array = moved
    return array


def empty_like(value: Any, layout: str, shape: tuple[int, ...] | None = None) -> Any:
    """An array for results, with something in it that is to be overwritten."""
    shape = tuple(value.shape) if shape is None else shape
    if isinstance(value, torch.Tensor):
        return laid_out(torch.full(shape, 77, dtype=torch.int64).to(value.dtype), layout)
    dtype = value.dtype.newbyteorder("=")
    return laid_out(np.full(shape, 77).astype(dtype), "C" if layout == "read-only" else layout)


def as_numpy(value: Any) -> Any:
    """A result as NumPy has it; bfloat16 as float32, which holds all of it."""
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(value)


def reduced(values: Sequence[Any], op: str, weights: Sequence[float] | None = None) -> Any:
    """What NumPy says the values come to, as `as_numpy` has it."""
    stack = np.stack([as_numpy(value) for value in values])
    dtype = stack.dtype.newbyteorder("=")
    wide: Any = dtype.type
    if op == "mean" and dtype.kind in "biu":
        wide = np.float64
    elif dtype == np.float16 and op not in ("min", "max"):
        wide = np.float32
    if weights is not None:
        wide = np.result_type(wide, np.float64).type
    ufunc = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(op, np.add)
    rows = list(stack.astype(wide))
    if weights is not None:
        rows = [row * wide(w) for row, w in zip(rows, weights, strict=True) if w]
    result = functools.reduce(ufunc, rows)  # in rank order
    if op == "mean":
        result = result / wide(len(rows) if weights is None else sum(weights))
    if isinstance(values[0], torch.Tensor) and values[0].dtype == torch.bfloat16:
        return torch.from_numpy(np.asarray(result, np.float32)).bfloat16().float().numpy()
    return np.asarray(result).astype(dtype)


def check(found: Any, expected: Any, like: Any) -> None:
    """The result is of the type of what was given and, but for complex ones, equal to the bit."""
    assert type(found) is type(like)
    if isinstance(like, torch.Tensor):
        assert found.dtype == like.dtype
    else:
        assert found.dtype == like.dtype.newbyteorder("=")
    expected = as_numpy(expected)
    assert tuple(found.shape) == expected.shape
    found = as_numpy(found)
    if found.dtype.kind == "c":  # NumPy multiplies single ones and arrays of them differently
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        return
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        zero = expected == 0
        np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(expected[zero]))
