"""5,000 random collectives over 4 ranks, each compared with NumPy."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import run_ranks
from weft.engines.base import Group
from weft.engines.local.collectives.transport import ROOM

CALLS = ("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce", "all_reduce")
OPS = ("sum", "mean", "prod", "min", "max")
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
    "bfloat16",
)
COUNT = 2000
LAYOUTS = ("C", "C", "F", "strided", "reversed", "read-only")


class Case:
    """One call of a group, the same on all of its ranks: what each gives, and what it should get.

    Everything is drawn from (seed, number), so that every rank knows all of it.
    """

    def __init__(self, seed: int, number: int, size: int) -> None:
        self.random = np.random.default_rng((seed, number))
        draw = self.random.choice
        self.call, self.op = str(draw(CALLS)), str(draw(OPS))
        self.dtype = str(draw(DTYPES))
        self.root = int(self.random.integers(size))
        self.is_async = bool(self.random.random() < 0.3)
        self.layouts = [str(draw(LAYOUTS)) for _ in range(size)]
        self.outs = [str(draw(["", "", "fresh", "strided", "itself"])) for _ in range(size)]
        shape = self._shape()
        shapes = [shape] * size
        if self.call.endswith("gather") and shape:
            shapes = [(int(self.random.integers(shape[0] + 1)), *shape[1:]) for _ in range(size)]
        self.weights: list[float] | None = None
        if self.call.endswith("reduce") and self.op == "mean" and self.random.random() < 0.5:
            self.weights = [float(draw([0, 1, 2.5, 7])) for _ in range(size - 1)] + [3.0]
        self.parts = [self._numbers(one) for one in shapes]

    def __str__(self) -> str:
        shapes = [part.shape for part in self.parts]
        return f"{self.call} {self.op} {self.dtype} {shapes} root {self.root} {self.weights}"

    def _shape(self) -> tuple[int, ...]:
        dimensions = int(self.random.integers(self.call == "scatter", 4))
        shape = [int(self.random.integers(0, 7)) for _ in range(dimensions)]
        kind = self.random.random()
        if shape and kind < 0.1:
            shape[0] = int(self.random.integers(1000))
        elif shape and kind < 0.12:  # more than fits a slot, in some dtypes and on some ranks
            shape[0] = int(self.random.integers(ROOM // 16, ROOM // 4))
            shape[1:] = [min(length, 2) for length in shape[1:]]
        return tuple(shape)

    def _numbers(self, shape: tuple[int, ...]) -> Any:
        """bfloat16 as float32 numbers that it has."""
        if self.dtype == "bfloat16":
            whole = self.random.integers(-128, 128, shape)
            return np.asarray(whole / 32).astype(np.float32)
        if np.dtype(self.dtype).kind in "biu":
            return np.asarray(self.random.integers(0, 256, shape)).astype(self.dtype)
        values = self.random.normal(size=shape)
        if np.dtype(self.dtype).kind == "c":
            values = values + 1j * self.random.normal(size=shape)
        return np.asarray(values).astype(self.dtype)

    # what a rank gives

    def value(self, rank: int) -> Any:
        if self.call in ("broadcast", "scatter") and rank != self.root:
            return None
        array = self.parts[rank].copy()
        if self.layouts[rank] == "F":
            array = np.array(array, order="F")
        elif self.layouts[rank] == "strided":
            array = np.stack([array, array], axis=-1)[..., 1]
        elif self.layouts[rank] == "reversed" and array.ndim:
            array = array[::-1].copy()[::-1]
        elif self.layouts[rank] == "read-only" and self.dtype != "bfloat16":
            array.flags.writeable = False
        if self.dtype != "bfloat16":
            return array
        return torch.from_numpy(array.copy()).bfloat16()

    def out(self, rank: int, value: Any) -> Any:
        expected = self.expected(rank)
        if not self.outs[rank] or expected is None:
            return None
        if self.outs[rank] == "itself":
            writable = value is not None and (self.dtype == "bfloat16" or value.flags.writeable)
            same_shape = writable and value.shape == expected.shape
            return value if same_shape else None
        out = np.zeros((*expected.shape, 2), expected.dtype)[..., 0]
        out = out if self.outs[rank] == "strided" else np.array(out, order="C")
        return torch.from_numpy(out).bfloat16() if self.dtype == "bfloat16" else out

    # what it should get

    def expected(self, rank: int) -> Any:
        if self.call in ("gather", "reduce") and rank != self.root:
            return None
        if self.call == "broadcast":
            return self.parts[self.root]
        if self.call == "scatter":
            return np.array_split(self.parts[self.root], len(self.parts))[rank]
        if self.call.endswith("gather"):
            return np.concatenate([np.atleast_1d(part) for part in self.parts])
        return self._reduced()

    def _reduced(self) -> Any:
        dtype = self.parts[0].dtype
        wide = dtype
        if self.op == "mean" and dtype.kind in "biu":
            wide = np.dtype(np.float64)
        elif dtype == np.float16 and self.op not in ("min", "max"):
            wide = np.dtype(np.float32)
        ufuncs = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}
        rows = [part.astype(wide) for part in self.parts]
        divisor = float(len(rows))
        if self.weights is not None:
            wide = np.result_type(wide, np.float64)
            rows = [row.astype(wide) for row in rows]
            pairs = [
                (row, weight) for row, weight in zip(rows, self.weights, strict=True) if weight
            ]
            rows, divisor = [row * wide.type(w) for row, w in pairs], sum(self.weights)
        total = rows[0]
        for row in rows[1:]:
            total = ufuncs.get(self.op, np.add)(total, row)
        if self.op == "mean":
            total = total / wide.type(divisor)
        if self.dtype == "bfloat16":
            return torch.from_numpy(np.asarray(total, np.float32)).bfloat16().float().numpy()
        return np.asarray(total).astype(dtype)

    def check(self, found: Any, rank: int, value: Any, out: Any) -> None:
        expected = self.expected(rank)
        if expected is None:
            assert found is None
            return
        assert out is None or found is out
        if self.call == "broadcast" and rank == self.root and out is None:
            assert found is value
        if self.dtype == "bfloat16":
            assert found.dtype == torch.bfloat16
            found = found.float().numpy()
        assert type(found) is np.ndarray
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if found.dtype.kind == "c":  # NumPy multiplies single ones and arrays of them differently
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, expected)


def make(case: Case, group: Group, pending: list[Any]) -> bytes:
    """Make the call of a case; the first bits of what all ranks get, if it is there already."""
    value = case.value(group.rank)
    out = case.out(group.rank, value)
    options: dict[str, Any] = {"out": out, "async_op": case.is_async}
    if case.call not in ("all_reduce", "all_gather"):
        options["root"] = case.root
    if case.call.endswith("reduce"):
        options["op"] = case.op
        options["weight"] = None if case.weights is None else case.weights[group.rank]
    found = getattr(group, case.call)(value, **options)
    if case.is_async:
        pending.append((case, found, value, out, group.rank))
        return b""
    case.check(found, group.rank, value, out)
    same = case.call.startswith("all_") and "long" not in case.dtype
    return as_bytes(found) if same else b""


def as_bytes(found: Any) -> bytes:
    if isinstance(found, torch.Tensor):
        found = found.contiguous().view(torch.uint16).numpy()
    return bytes(np.ascontiguousarray(found).tobytes()[:256])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [COUNT, pytest.param(3 * COUNT, marks=pytest.mark.soak)])
def test_random_collectives(count: int) -> None:
    """Any call, dtype, shape, layout, op, root and out=, blocking or not, gives NumPy's numbers."""

    def body(group: Group, seed: int, count: int) -> list[bytes]:
        pair = group.split(group.rank // 2)
        assert pair is not None
        pending: list[Any] = []
        bits = []
        delays = np.random.default_rng((seed, group.rank))
        for number in range(count):
            where = pair if number % 7 == 3 else group
            case = Case(seed, number, where.size)
            try:
                with np.errstate(all="ignore"):
                    made = make(case, where, pending)
                    bits.append(made if where is group else b"")
                    if len(pending) > 5 or number == count - 1:
                        while pending:
                            case, handle, value, out, rank = pending.pop(0)
                            case.check(handle.wait(), rank, value, out)
            except Exception as error:
                raise AssertionError(f"seed {seed}, call {number}: {case}") from error
            if delays.random() < 0.01:
                time.sleep(0.002)
        return bits

    seed = int(os.environ.get("WEFT_TEST_SEED", "20240229"))
    first, *others = run_ranks(4, body, seed, count, limit=280.0)
    assert all(other == first for other in others)
    assert len(first) == count
    assert sum(map(bool, first)) > count // 10
