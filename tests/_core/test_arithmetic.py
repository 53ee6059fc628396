"""Numbers combined: in which type, in which order, and how they are rounded back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft._core.arithmetic import (
    BFLOAT16,
    OPERATIONS,
    accumulate,
    accumulates_as_stored,
    combine,
    finish,
    narrow,
    wide_type,
    widen,
)

FLOAT32 = np.dtype(np.float32)
REAL = ["float16", "float32", "float64", "longdouble"]
WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
COMPLEX = ["complex64", "complex128", "clongdouble"]


def combined(parts: list[Any], op: str, weights: list[float] | None = None) -> Any:
    """What arrays of NumPy's come to."""
    arrays = [np.asarray(part) for part in parts]
    out = np.empty_like(arrays[0])
    combine(iter(arrays), out, op, out.dtype.name, weights)
    return out


def rounded(values: Any) -> Any:
    """float32 as the bits of bfloat16."""
    out = np.empty(values.shape, np.uint16)
    narrow(values, out, BFLOAT16)
    return out


def torch_bits(values: Any) -> Any:
    """The same by torch."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def test_every_bfloat16_survives_the_way_to_float32_and_back() -> None:
    """All 65,536 values widen as torch's do and come back the same; a NaN stays one."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = widen(bits, FLOAT32, BFLOAT16)
    by_torch = torch.from_numpy(bits).view(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(wide.view(np.uint32), by_torch.view(np.uint32))
    back, nan = rounded(wide), np.isnan(wide)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(widen(back[nan], FLOAT32, BFLOAT16)).all()
    np.testing.assert_array_equal(back[nan] >> 15, bits[nan] >> 15)


@pytest.mark.parametrize("low", ["0000", "0001", "7fff", "8000", "8001", "ffff", "random"])
def test_bfloat16_is_rounded_as_torch_rounds(low: str) -> None:
    """Nearest, ties to even: just below, on and above each tie, subnormals and infinities too."""
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    below = np.random.default_rng(5).integers(0, 1 << 16, 1 << 16, dtype=np.uint32)
    values = (high | (below if low == "random" else np.uint32(int(low, 16)))).view(np.float32)
    ours, theirs, nan = rounded(values), torch_bits(values), np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(widen(ours[nan], FLOAT32, BFLOAT16)).all()


@pytest.mark.parametrize("op", OPERATIONS)
def test_bfloat16_is_combined_in_float32_and_rounded_once(op: str) -> None:
    """The result is torch's rounding of what float32 comes to."""
    random = np.random.default_rng(6)
    tensors = [torch.from_numpy(random.normal(size=999).astype("f4")).bfloat16() for _ in range(3)]
    out = np.empty(999, np.uint16)
    combine((t.view(torch.uint16).numpy() for t in tensors), out, op, BFLOAT16)
    stack = np.stack([t.to(torch.float32).numpy() for t in tensors])
    expected = stack.mean(axis=0) if op == "mean" else OPERATIONS[op].reduce(stack, axis=0)
    np.testing.assert_array_equal(out, torch_bits(expected))


def test_bfloat16_does_not_lose_small_terms() -> None:
    """256 + 1 + 1 is 258, which sums in bfloat16 do not reach."""
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert (parts[0] + parts[1] + parts[2]).item() == 256.0
    out = np.empty(1, np.uint16)
    combine((part.view(torch.uint16).numpy() for part in parts), out, "sum", BFLOAT16)
    assert torch.from_numpy(out).view(torch.bfloat16).item() == 258.0


def test_float16_is_summed_in_float32() -> None:
    """2048 + 1 + 1 is 2050, and the mean of large numbers does not overflow on the way."""
    assert combined([np.float16([2048]), np.float16([1]), np.float16([1])], "sum") == 2050
    assert combined([np.float16([60000])] * 3, "mean") == 60000
    assert combined([np.float16([300]), np.float16([300]), np.float16([0.5])], "prod") == 45000


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
@pytest.mark.parametrize("op", ["sum", "prod", "mean"])
def test_order_is_the_order_of_ranks(dtype: str, op: str) -> None:
    """The sum is ((0 + 1) + 2) + 3, to the last bit."""
    random = np.random.default_rng(7)
    parts = [random.normal(size=1000).astype(dtype) for _ in range(4)]
    wide = "f4" if dtype == "float16" else dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = OPERATIONS[op](total, part.astype(wide))
    if op == "mean":
        total = total / total.dtype.type(4)
    np.testing.assert_array_equal(combined(parts, op), total.astype(dtype))


@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_numbers_wrap_and_have_a_mean(dtype: str) -> None:
    """Sums and products wrap as NumPy's do; a mean does not wrap, and is cast towards zero."""
    info = np.iinfo(dtype)
    parts = [np.array([info.max, info.min, 3, 1], dtype), np.array([1, 1, 4, 1], dtype)]
    stack = np.stack(parts)
    assert combined(parts, "sum").tolist() == np.add.reduce(stack, axis=0, dtype=dtype).tolist()
    assert combined(parts, "prod").tolist() == (parts[0] * parts[1]).tolist()
    assert combined(parts, "min").tolist() == stack.min(axis=0).tolist()
    assert combined(parts, "max").tolist() == stack.max(axis=0).tolist()
    if info.bits < 64:  # the mean of 64 bits is as exact as float64
        top = np.array([info.max, info.min], dtype)
        assert combined([top] * 3, "mean").tolist() == top.tolist()
    assert combined([np.array([1], dtype), np.array([2], dtype)], "mean") == 1
    if info.min < 0:
        assert combined([np.array([-1], dtype), np.array([-2], dtype)], "mean") == -1


def test_bools_are_or_and_and() -> None:
    """The sum of bools is whether any is true, the product whether all are."""
    parts = [np.array([False, False, True, True]), np.array([False, True, False, True])]
    for op in ("sum", "max", "mean"):  # a mean that is not 0 casts to True
        assert combined(parts, op).tolist() == [False, True, True, True], op
    for op in ("prod", "min"):
        assert combined(parts, op).tolist() == [False, False, False, True], op


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", REAL + COMPLEX)
def test_a_nan_is_the_least_and_the_greatest(dtype: str, op: str) -> None:
    """A NaN on any rank is not lost."""
    parts = [np.array([1, np.nan, 3], dtype), np.array([np.nan, 2, 4], dtype)]
    found = combined(parts, op)
    assert np.isnan(found).tolist() == [True, True, False]
    assert found[2] == (3 if op == "min" else 4)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, *WHOLE])
def test_weights_make_the_mean_of_all_rows(dtype: str) -> None:
    """The weighted mean of the parts' means is the mean of all rows."""
    rows = np.arange(24).reshape(8, 3) % 8
    parts = [rows[:1].mean(axis=0), rows[1:3].mean(axis=0), rows[3:].mean(axis=0)]
    found = combined([part.astype(dtype) for part in parts], "mean", [1, 2, 5])
    expected = sum(w * p.astype(dtype) for w, p in zip((1, 2, 5), parts, strict=True)) / 8
    np.testing.assert_allclose(found.astype("c16"), expected.astype(dtype).astype("c16"), rtol=2e-3)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX])
def test_no_weight_no_say(dtype: str) -> None:
    """A part of weight 0 does not count, even if it is NaN or infinite, whichever rank has it."""
    for place in range(3):
        parts = [np.array([4, 8], dtype), np.array([6, 2], dtype)]
        weights = [1.0, 3.0]
        parts.insert(place, np.array([np.nan, np.inf], dtype))
        weights.insert(place, 0.0)
        np.testing.assert_array_equal(combined(parts, "mean", weights), np.array([5.5, 3.5], dtype))


def test_no_weight_at_all_is_an_error() -> None:
    """Without any weight there is no mean."""
    with pytest.raises(ValueError, match="all weights are 0"):
        combined([np.ones(2), np.ones(2)], "mean", [0.0, 0.0])


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float16", "int32", "float64", "bool"])
@pytest.mark.parametrize("place", [0, 1])
def test_the_result_may_take_the_place_of_one_of_the_first_two(
    op: str, dtype: str, place: int
) -> None:
    """Parts may be overwritten once the one after the next is asked for: the result is the same."""
    random = np.random.default_rng(8)
    values = [random.integers(0, 5, 100).astype(dtype) for _ in range(4)]
    expected = combined(values, op)
    parts = [value.copy() for value in values]
    turns = [np.empty(100, dtype), np.empty(100, dtype)]

    def pulled() -> Any:
        for rank, part in enumerate(parts):
            if rank == place:
                yield part
            else:
                turns[rank % 2][...] = part
                yield turns[rank % 2]

    combine(pulled(), parts[place], op, dtype)
    np.testing.assert_array_equal(parts[place], expected)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "complex64"])
def test_one_part_is_its_own_result(op: str, dtype: str) -> None:
    """A group of one gets back what it gave, and the part is left alone."""
    part = np.array([0, 1, 1, 0], dtype)
    before = part.copy()
    np.testing.assert_array_equal(combined([part], op), before)
    np.testing.assert_array_equal(part, before)


def test_what_needs_a_wider_type() -> None:
    """Only float16's sums and the means of whole numbers are made in another type."""
    wider = {
        (np.dtype(dtype).name, op)
        for dtype in ["bool", *WHOLE, *REAL, *COMPLEX]
        for op in OPERATIONS
        if not accumulates_as_stored(np.dtype(dtype), op)
    }
    assert wider == {("float16", op) for op in ("sum", "prod", "mean")} | {
        (name, "mean") for name in ("bool", *WHOLE)
    }


def test_large_weights_do_not_overflow() -> None:
    """A weighted mean is taken in double precision, so that it is finite where its parts are."""
    parts = [np.full(2, 1e35, np.float32), np.full(2, 3e35, np.float32)]
    out = np.empty(2, np.float32)
    combine(parts, out, "mean", "float32", [1e5, 1e5])
    np.testing.assert_allclose(out, 2e35, rtol=1e-6)


# over hosts


def combined_over_hosts(
    parts: list[Any], hosts: list[int], op: str, weights: list[float] | None = None
) -> Any:
    """The same as `combined` where rank r is on host hosts[r]: a total of each, then of all."""
    dtype = parts[0].dtype
    wide = wide_type(dtype, op, dtype.name, weighted=weights is not None)
    totals, weight = [], 0.0
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        total = np.full(parts[0].shape, 77, wide)
        own = None if weights is None else [weights[rank] for rank in ranks]
        found = accumulate((parts[rank] for rank in ranks), total, op, dtype.name, own)
        weight += found
        totals += [total] if found else []
    total, out = np.empty_like(totals[0]), np.empty_like(parts[0])
    assert accumulate(totals, total, op, total.dtype.name) == len(totals)
    finish(total, out, op, dtype.name, weight)
    return out


PLACEMENTS = [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 1, 0, 1]]


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", ["bool", *WHOLE])
def test_whole_numbers_are_the_same_on_any_hosts(dtype: str, op: str, hosts: list[int]) -> None:
    """Wherever the ranks are, integers come to the same bits; means too, where the sum is exact in
    double precision."""
    random = np.random.default_rng(9)
    size = np.dtype(dtype).itemsize
    parts = [np.frombuffer(random.bytes(100 * size), dtype) for _ in hosts]
    if dtype == "bool":
        parts = [random.integers(0, 2, 100).astype(bool) for _ in hosts]
    if op == "mean" and size == 8:
        parts = [part >> np.array(14, dtype) for part in parts]
    np.testing.assert_array_equal(combined_over_hosts(parts, hosts, op), combined(parts, op))


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "mean", "max"])
@pytest.mark.parametrize("dtype", REAL + COMPLEX)
def test_the_order_is_ranks_within_hosts_then_hosts(dtype: str, op: str, hosts: list[int]) -> None:
    """Each host's total in rank order, then these in the order of hosts, rounded back once."""
    random = np.random.default_rng(10)
    parts = [random.normal(size=1000).astype(dtype) for _ in hosts]
    wide = "f4" if dtype == "float16" and op != "max" else dtype
    totals: dict[int, Any] = {}
    for host, part in zip(hosts, parts, strict=True):
        term = part.astype(wide)
        totals[host] = OPERATIONS[op](totals[host], term) if host in totals else term
    first, *others = totals.values()
    for total in others:
        first = OPERATIONS[op](first, total)
    expected = first / first.dtype.type(len(hosts)) if op == "mean" else first
    found = combined_over_hosts(parts, hosts, op)
    np.testing.assert_array_equal(found, expected.astype(dtype))
    if len(set(hosts)) in (1, len(hosts)):  # both are one line of ranks
        np.testing.assert_array_equal(found, combined(parts, op))


def test_totals_of_hosts_are_wide() -> None:
    """2048 + 1 on each of two hosts is 4098, and means of small integers do not wrap on the way."""
    halves = [np.float16([value]) for value in (2048, 1, 2048, 1)]
    assert combined_over_hosts(halves, [0, 0, 1, 1], "sum") == 4098
    assert combined_over_hosts(halves, [0, 0, 1, 1], "mean") == 1024.5
    bytes_ = [np.int8([value]) for value in (127, 127, 126, 124)]
    assert combined_over_hosts(bytes_, [0, 0, 1, 1], "mean") == 126
    bits = [torch.tensor([x], dtype=torch.bfloat16).view(torch.uint16).numpy() for x in (256, 1, 1)]
    total = np.empty(1, wide_type(bits[0].dtype, "sum", BFLOAT16, weighted=False))
    assert accumulate(iter(bits), total, "sum", BFLOAT16) == 3
    assert total == 258


@pytest.mark.parametrize("weights", [[1, 2, 5, 0, 0], [0, 0, 1, 3, 0], [2, 0, 0, 0, 1]], ids=str)
def test_hosts_without_weight_have_no_say(weights: list[float]) -> None:
    """A host on which nobody has rows leaves its total alone, and does not count in the mean."""
    random = np.random.default_rng(11)
    parts = [random.normal(size=50) for _ in weights]
    for part, weight in zip(parts, weights, strict=True):
        part[0] = part[0] if weight else np.nan
    found = combined_over_hosts(parts, [0, 0, 1, 1, 2], "mean", weights)
    np.testing.assert_allclose(found, combined(parts, "mean", weights), rtol=1e-14)
