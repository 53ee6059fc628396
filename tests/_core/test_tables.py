"""What may be given to a table: sizes, dtypes, deltas, ids and memory for results."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft._core import updaters
from weft._core.tables import (
    BSP,
    TableSpec,
    as_array,
    as_delta,
    as_ids,
    as_out,
    ssp,
    validate_dtype,
    validate_size,
)
from weft.errors import InvalidType, InvalidValue

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "longdouble")
COMPLEX = ("complex64", "complex128", "clongdouble")
F4 = np.dtype("float32")


class Three(enum.IntEnum):
    ROWS = 3


# what a table is


def test_a_spec_is_shown_as_it_would_be_written() -> None:
    """Ranks compare, and errors show, everything that makes a table what it is."""
    spec = TableSpec("MatrixTable", (3, 2), F4, updaters.sgd(), BSP, True, "w")
    assert str(spec) == (
        "MatrixTable(3, 2, dtype='float32', updater=sgd(lr=0.001), consistency=bsp, name='w')"
    )
    assert (spec.n_rows, spec.row_shape, spec.nbytes) == (3, (2,), 24)
    other = TableSpec("ArrayTable", (5,), np.dtype("i2"), updaters.add(), ssp(2), False, "x")
    assert str(other) == (
        "ArrayTable(5, dtype='int16', updater=add, consistency=ssp(2), exact=False, name='x')"
    )
    assert (other.n_rows, other.row_shape, other.nbytes) == (5, (), 10)
    # the arrays beside the rows belong to it, and a function's name does not tell them
    rule = updaters.custom(lambda rows, state, delta: None, state=["a", "b"], name="mine")
    custom = TableSpec("ArrayTable", (5,), F4, rule, BSP, True, "x")
    assert "updater=mine(state=['a', 'b']), consistency=bsp" in str(custom)


# sizes and dtypes


@pytest.mark.parametrize("size", [1, 7, np.int8(3), np.uint64(5), Three.ROWS, 10**30])
def test_sizes(size: Any) -> None:
    """Any positive whole number, as a plain int."""
    found = validate_size("n_rows", size)
    assert (type(found), found) == (int, size)


@pytest.mark.parametrize("wrong", [0, -1, np.int64(-7), -(10**30)])
def test_sizes_out_of_range(wrong: Any) -> None:
    """A table has at least one row and one column."""
    with pytest.raises(InvalidValue, match=rf"n_rows={wrong}: .*expected a positive number"):
        validate_size("n_rows", wrong)


@pytest.mark.parametrize("wrong", [True, 2.0, "3", None, np.float32(3), {}, b"1"])
def test_sizes_of_the_wrong_kind(wrong: Any) -> None:
    """Numbers that are not whole, and what is no number, are named."""
    with pytest.raises(InvalidType) as error:
        validate_size("n_cols", wrong)
    assert str(error.value).startswith(f"n_cols={wrong!r}: expected a whole number")


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS, *COMPLEX])
def test_dtypes(name: str) -> None:
    """By name, as a dtype, as a type, of either byte order; the table's is the machine's own."""
    dtype = np.dtype(name)
    for value in (name, dtype, dtype.type, dtype.newbyteorder(">"), dtype.newbyteorder("<")):
        assert validate_dtype(value) == dtype
        assert validate_dtype(value).isnative


def test_dtypes_of_torch() -> None:
    """Torch's dtypes stand for NumPy's of the same name."""
    for name in ("float16", "float32", "float64", "int8", "int64", "uint8", "complex64"):
        assert validate_dtype(getattr(torch, name)) == np.dtype(name)
    assert validate_dtype(int) == np.dtype(np.int64)


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, "", "floaty", "bool", "str", "object", "M8[s]", "m8", "V4", "f4,f4", ",", "f4,,i4"),
        *(3, {}, {"names": 1}, [], [("a", "f4")], object(), np.ones(2), torch.bfloat16, torch.bool),
    ],
    ids=str,
)
def test_dtypes_that_are_no_numbers(wrong: Any) -> None:
    """Anything else is named, with an example of what would do."""
    with pytest.raises(InvalidType) as error:
        validate_dtype(wrong)
    assert f"dtype={wrong!r}: expected integers, floats or complex" in str(error.value)
    assert "'float32'" in str(error.value)


# deltas


@pytest.mark.parametrize(
    "value",
    [
        [[0, 1, 2], [3, 4, 5]],
        ((0, 1, 2), (3.0, 4, True + 4)),
        range(6),
        [0, 1, 2, 3, 4, 5],
        np.arange(6.0),
        np.arange(6).reshape(2, 3),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.arange(6.0, dtype=F4).reshape(2, 3),
        np.arange(6.0, dtype=F4).reshape(3, 2).T.copy().T.reshape(2, 3),
        np.repeat(np.arange(6.0, dtype=F4), 2)[::2],
        np.asfortranarray(np.arange(6.0, dtype=F4).reshape(2, 3)),
        torch.arange(6),
        torch.arange(6.0, requires_grad=True).reshape(2, 3),
        torch.arange(6.0).reshape(3, 2).T.contiguous().T.reshape(2, 3),
        [np.float64(0), *range(1, 6)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_deltas_as_users_have_them(value: Any) -> None:
    """Lists, ranges, arrays and tensors of all layouts, of the shape or flat."""
    found = as_delta(value, (2, 3), F4)
    assert type(found) is np.ndarray
    assert found.dtype == F4
    assert found.flags.c_contiguous
    assert found.flags.aligned
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_deltas_of_the_right_kind_are_not_copied() -> None:
    """The usual delta passes through as it is."""
    delta = np.ones((2, 3), F4)
    assert as_delta(delta, (2, 3), F4) is delta
    assert np.shares_memory(as_delta(delta.ravel(), (2, 3), F4), delta)
    tensor = torch.ones(2, 3)
    assert np.shares_memory(as_delta(tensor, (2, 3), F4), tensor.numpy())


def test_deltas_that_lie_across_words() -> None:
    """A delta whose numbers are not aligned is copied."""
    odd = np.zeros(25, np.uint8)[1:].view(F4)
    assert not odd.flags.aligned
    assert as_delta(odd, (6,), F4).flags.aligned


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (np.ones(5, F4), (6,)),
        (np.ones(6, F4), (2, 4)),
        (np.ones((3, 2), F4), (2, 3)),
        (np.ones((1, 2, 3), F4), (2, 3)),
        (1.0, (6,)),
        (1.0, (1,)),
        ([], (6,)),
        (np.ones((6, 1), F4), (6,)),
        (np.ones(2, F4), ()),
    ],
)
def test_deltas_of_another_size(value: Any, shape: tuple[int, ...]) -> None:
    """Nothing is stretched; the message has both shapes."""
    with pytest.raises(InvalidValue) as error:
        as_delta(value, shape, F4)
    text = str(error.value)
    assert text.startswith(f"a delta of shape {np.shape(value)} was added where {shape} was")
    assert ("numbers in one row" in text) == (len(shape) == 2)


@pytest.mark.parametrize(
    ("value", "dtype", "kind", "words"),
    [
        # given with a dtype: another kind of number is refused, whatever the values
        (np.ones(2), "int32", InvalidType, ("float64", "int32", "dtype='float64'")),
        (np.ones(2, "c8"), "float32", InvalidType, ("complex64", "float32", "dtype='complex64'")),
        (np.ones(2, "i8"), "uint8", InvalidType, ("int64", "uint8", "dtype='int64'")),
        (torch.ones(2), "int64", InvalidType, ("float32", "int64", "dtype='float64'")),
        (np.float64(1.5), "int64", InvalidType, ("float64", "int64")),
        # given without: only what would be lost
        ([1.5, 2], "int32", InvalidType, ("fractions would be lost", "whole numbers")),
        ([1.0, 2], "int32", InvalidType, ("fractions would be lost", "whole numbers")),
        ([float("nan"), 2], "int32", InvalidType, ("fractions would be lost",)),
        ([1j, 2], "float32", InvalidType, ("complex128", "imaginary parts would be lost")),
        ([1j, 2], "int8", InvalidType, ("complex128", "fractions would be lost")),
        # out of range
        ([1, 300], "int8", InvalidValue, ("int64", "int8", "300", "-128 to 127")),
        ([-1, 3], "uint16", InvalidValue, ("uint16", "-1", "0 to 65535")),
        ([2**63, 2**63], "int64", InvalidValue, ("uint64", str(2**63), str(2**63 - 1))),
        (np.array([1, -129]), "int8", InvalidValue, ("-129", "-128 to 127")),
        (np.array([1, 2**16], "u4"), "uint16", InvalidValue, ("65536", "0 to 65535")),
        ([1.0, 70000.0], "float16", InvalidValue, ("70000.0", "-65504.0 to 65504.0")),
        (np.array([1, -1e39]), "float32", InvalidValue, ("-1e+39", "3.4028")),
        (torch.tensor([1.0, 1e300], dtype=torch.float64), "float32", InvalidValue, ("1e+300",)),
        (np.array([1, 1e39j]), "complex64", InvalidValue, ("complex64", "1e+39j")),
        # no numbers at all
        (["a", "b"], "float32", InvalidType, ("['a', 'b'] (list)", "expected numbers")),
        ("ab", "float32", InvalidType, ("'ab' (str)", "expected numbers")),
        (None, "float32", InvalidType, ("None (NoneType)", "expected numbers")),
        ({"w": 1}, "float32", InvalidType, ("(dict)", "expected numbers")),
        ([2**70, 1], "float32", InvalidType, (str(2**70), "at most 64 bits")),
        (np.array(["a", "b"]), "float32", InvalidType, ("ndarray of <U1", "expected numbers")),
        (np.array([None, 1]), "float32", InvalidType, ("ndarray of object", "expected numbers")),
        (np.zeros(2, "M8[s]"), "float32", InvalidType, ("datetime64[s]", "expected numbers")),
        (np.zeros(2, "m8[s]"), "int64", InvalidType, ("timedelta64[s]", "expected numbers")),
        (np.zeros(2, [("a", "f4")]), "float32", InvalidType, ("'a'", "expected numbers")),
        (np.ma.array([1.0, 2.0]), "float32", InvalidType, ("mask", ".filled")),
        (torch.ones(2, dtype=torch.bfloat16), "float32", InvalidType, ("bfloat16", "x.float()")),
        (torch.ones(2, device="meta"), "float32", InvalidType, ("meta", "no values")),
        ([[1, 2], [3]], "float32", InvalidValue, ("delta is ragged", "one number per element")),
    ],
    ids=repr,
)
def test_deltas_that_would_lose_something(
    value: Any, dtype: str, kind: type[Exception], words: tuple[str, ...]
) -> None:
    """Another kind of number, or one out of range, is refused and named; so is what is none."""
    with pytest.raises(kind) as error:
        as_delta(value, np.shape(value) if kind is InvalidType else (2,), np.dtype(dtype))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("settings", ["warn", "raise"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rounding_is_allowed(dtype: str, settings: Any) -> None:
    """Last digits may go, as in NumPy's own +=, also to 0; infinity and NaN stay what they are."""
    value = np.array(
        [1 / 3, 1e-300, np.inf, -np.inf, np.nan, 2**24 + 1 if dtype == "float32" else 9]
    )
    with np.errstate(all=settings):
        found = as_delta(value, (6,), np.dtype(dtype))
    with np.errstate(all="ignore"):
        assert np.array_equal(found, value.astype(dtype), equal_nan=True)
    assert as_delta([2**24 + 1], (1,), F4).tolist() == [2**24]
    assert as_delta(np.array([2**53 + 1]), (1,), np.dtype("f8")).tolist() == [2**53]
    assert as_delta(np.array([True, False]), (2,), F4).tolist() == [1, 0]
    assert as_delta([True, False], (2,), np.dtype("u1")).tolist() == [1, 0]
    wide = np.array([1 + 2j, complex(np.inf, 0)])
    assert as_delta(wide, (2,), np.dtype("c8")).tolist() == wide.tolist()


@given(
    st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=4),
    st.sampled_from(INTEGERS),
    st.sampled_from([None, *INTEGERS]),
)
def test_whole_numbers_arrive_as_they_are_or_not_at_all(
    numbers: list[int], dtype: str, given_as: str | None
) -> None:
    """Between integer dtypes either every number is the same afterwards, or it is refused."""
    limits = np.iinfo(dtype)
    value: Any = numbers
    if given_as is not None:
        value = np.array([number % 2**64 for number in numbers], np.uint64).astype(given_as)
    try:
        found = as_delta(value, (len(numbers),), np.dtype(dtype))
    except (InvalidType, InvalidValue):
        outside = [int(n) for n in value if not limits.min <= int(n) <= limits.max]
        mixed = given_as is None and max(numbers) >= 2**63 and min(numbers) < 0  # NumPy: floats
        refused = given_as is not None and not np.can_cast(given_as, dtype, "same_kind")
        assert outside or mixed or refused
    else:
        assert [int(n) for n in found] == [int(n) for n in value]


@pytest.mark.parametrize("dtype", ["int32", "float32", "complex64"])
def test_no_numbers_at_all(dtype: str) -> None:
    """An empty list has no kind."""
    assert as_delta([], (0,), np.dtype(dtype)).dtype == dtype
    assert as_delta([], (0, 4), np.dtype(dtype)).shape == (0, 4)
    with pytest.raises(InvalidType):
        as_delta(np.zeros(0, "c16"), (0,), np.dtype("int32"))


@pytest.mark.parametrize(
    ("value", "shape", "where"),
    [
        ([1, np.nan, np.inf], (3,), "nan at 1"),
        ([[1, 2], [3, -np.inf]], (2, 2), "-inf at (1, 1)"),
        ([1, 2, 3, np.nan], (2, 2), "nan at (1, 1)"),
        (np.array(np.inf), (), "inf at ()"),
        (np.array([complex(0, np.nan)]), (1,), "nan"),
    ],
)
def test_finite_deltas_only(value: Any, shape: tuple[int, ...], where: str) -> None:
    """With check_finite the first number that is not finite is named with its place."""
    dtype = np.result_type(np.asarray(value).dtype, "f4")
    assert as_delta(value, shape, dtype).shape == shape
    with pytest.raises(InvalidValue, match="check_finite=True, so nothing was added") as error:
        as_delta(value, shape, dtype, check_finite=True)
    assert where in str(error.value)
    assert as_delta(np.ones(shape), shape, dtype, check_finite=True).shape == shape
    assert as_delta([1, 2], (2,), np.dtype("i4"), check_finite=True).tolist() == [1, 2]


# ids


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_of_every_integer_dtype(dtype: str) -> None:
    """Ids come as indexes, in their order, whatever they were; strided and swapped too."""
    for value in (
        np.array([3, 0, 3], dtype),
        np.array([3, 9, 0, 9, 3], dtype)[::2],
        np.array([3, 0, 3], np.dtype(dtype).newbyteorder(">")),
        torch.from_numpy(np.array([3, 0, 3], dtype)),
    ):
        found = as_ids(value, 4)
        assert found.dtype == np.intp
        assert found.tolist() == [3, 0, 3]


@pytest.mark.parametrize("value", [[2, 0], (2, 0), range(2, -1, -2), [np.int8(2), 0]])
def test_ids_as_lists(value: Any) -> None:
    """Lists, tuples and ranges."""
    assert as_ids(value, 3).tolist() == [2, 0]


@pytest.mark.parametrize("value", [2, np.uint8(2), np.array(2), torch.tensor(2), Three.ROWS - 1])
def test_one_id(value: Any) -> None:
    """A single id names one row, without a dimension of its own."""
    assert as_ids(value, 3).shape == ()
    assert as_ids(value, 3) == 2


@pytest.mark.parametrize(
    "value", [[], (), range(0), np.zeros(0), torch.zeros(0, dtype=torch.int32)]
)
def test_no_ids(value: Any) -> None:
    """None at all is a list too, whose elements have no kind."""
    assert as_ids(value, 3).shape == (0,)
    assert as_ids(value, 3).dtype == np.intp


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ([0, 3], 3),
        ([0, -1], -1),
        (np.array([1, -(2**63)]), -(2**63)),
        (np.array([1, 2**63 - 1]), 2**63 - 1),
        (np.array([1, 2**64 - 1], np.uint64), 2**64 - 1),
        ([2**63], 2**63),
        (3, 3),
        (-1, -1),
        (torch.tensor([-3]), -3),
        (range(4), 3),
        (np.array([9, -9])[::-1], -9),
        (np.array(7), 7),
    ],
)
def test_ids_out_of_range(value: Any, wrong: int) -> None:
    """The first wrong one is named, and which rows there are; negative ids are no ids."""
    with pytest.raises(InvalidValue, match=rf"^row {wrong} is not in this table; expected 0 to 2$"):
        as_ids(value, 3)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ([0.0, 1.0], InvalidType, ("[0.0, 1.0] (list)", "expected whole numbers")),
        (np.array([1.0]), InvalidType, ("ndarray of float64", "expected whole numbers")),
        (torch.tensor([1.0]), InvalidType, ("Tensor of torch.float32", "expected whole numbers")),
        ([True, False, True], InvalidType, ("[True, False, True]", "expected whole numbers")),
        (np.array([True]), InvalidType, ("ndarray of bool", "expected whole numbers")),
        (1.0, InvalidType, ("1.0 (float)", "expected whole numbers")),
        ("1", InvalidType, ("'1' (str)", "expected numbers")),
        ([None], InvalidType, ("[None] (list)", "expected numbers")),
        (slice(0.5, 2), InvalidType, ("slice(0.5, 2, None)", "expected whole numbers")),
        (slice(0, 2, 0), InvalidValue, ("slice(0, 2, 0)", "a step other than 0")),
        ({1, 2}, InvalidType, ("{1, 2} (set)", "expected numbers")),
        ([2**70], InvalidType, (str(2**70), "at most 64 bits")),
        (list(range(100)) + [0.5], InvalidType, ("[0, 1, 2,", "...", "expected whole numbers")),
        ([[0, 1]], InvalidValue, ("shape (1, 2)", "a list of them")),
        (np.zeros((2, 1), int), InvalidValue, ("shape (2, 1)", "a list of them")),
        ([[0], [1, 2]], InvalidValue, ("rows is ragged",)),
    ],
    ids=repr,
)
def test_ids_of_the_wrong_kind(value: Any, kind: type[Exception], words: tuple[str, ...]) -> None:
    """What is no list of whole numbers is named, at most forty letters of it."""
    with pytest.raises(kind) as error:
        as_ids(value, 3)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value)) < 250


@given(st.lists(st.integers(-3, 12), max_size=8), st.integers(1, 10))
def test_ids_are_within_the_table_or_refused(ids: list[int], n_rows: int) -> None:
    """What is returned can be used as indexes without a further look."""
    try:
        found = as_ids(np.array(ids, dtype=np.intp), n_rows)
    except InvalidValue as error:
        first = next(one for one in ids if not 0 <= one < n_rows)
        assert f"row {first} is not" in str(error)
    else:
        assert all(0 <= one < n_rows for one in ids)
        assert found.tolist() == ids


# memory for results


def test_out_is_a_view() -> None:
    """What is written to the view is the user's."""
    for out in (np.zeros((2, 3), F4), np.zeros((2, 6), F4)[:, ::2], torch.zeros(2, 3)):
        as_out(out, (2, 3), F4)[...] = 7
        assert out.sum() == 42
    number = np.zeros((), "c16")
    as_out(number, (), np.dtype("c16"))[...] = 1j
    assert number == 1j


def _frozen() -> Any:
    array = np.zeros((2, 3), F4)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "kind", "words"),
    [
        (np.zeros((3, 2), F4), InvalidValue, ("float32[3, 2]", "the result is float32[2, 3]")),
        (np.zeros(6, F4), InvalidValue, ("float32[6]", "the result is float32[2, 3]")),
        (np.zeros((2, 3)), InvalidValue, ("float64[2, 3]", "the result is float32[2, 3]")),
        (torch.zeros(2, 3, dtype=torch.int32), InvalidValue, ("int32[2, 3]",)),
        (_frozen(), InvalidValue, ("cannot be written to",)),
        (np.zeros((2, 3), ">f4"), InvalidValue, ("cannot be written to",)),
        ([[0, 0, 0]] * 2, InvalidType, ("(list)", "expected an array")),
        (np.zeros((2, 3), object), InvalidType, ("ndarray of object", "expected an array")),
        (7, InvalidType, ("out= is 7 (int)", "expected an array")),
        (torch.zeros(2, 3, device="meta"), InvalidType, ("meta", "no values")),
        (np.ma.zeros((2, 3), F4), InvalidType, ("mask",)),
    ],
    ids=repr,
)
def test_out_that_cannot_hold_the_result(
    out: Any, kind: type[Exception], words: tuple[str, ...]
) -> None:
    """Another shape or dtype, and what is no memory, is refused with both named."""
    with pytest.raises(kind) as error:
        as_out(out, (2, 3), F4)
    for word in words:
        assert word in str(error.value)


def test_out_of_bfloat16_is_not_of_uint16() -> None:
    """NumPy sees such a tensor as whole numbers; it is refused under its own name."""
    with pytest.raises(InvalidValue, match=r"bfloat16\[2\]; the result is uint16\[2\]"):
        as_out(torch.zeros(2, dtype=torch.bfloat16), (2,), np.dtype(np.uint16))


def test_arrays_are_named_in_errors() -> None:
    """What is wrong is called as the caller calls it."""
    with pytest.raises(InvalidType, match="the array to start from is"):
        as_array("x", "the array to start from")
