"""What tables refuse, in one process: typed, with value and expectation, and with nothing changed.

That of several ranks is in `tests/contracts/test_tables.py`.
"""

from __future__ import annotations

import copy
import doctest
import inspect
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft._api import tables
from weft.errors import (
    DamagedFile,
    InvalidType,
    InvalidValue,
    NotInitialized,
    OutOfMemory,
    UsageError,
)

NAN, INFINITY = math.nan, math.inf
KINDS = {"ArrayTable": (6,), "MatrixTable": (6, 3)}


@pytest.fixture(params=["serial", "local"])
def session(request: pytest.FixtureRequest) -> Iterator[str]:
    """A session of this process alone."""
    weft.init(engine=request.param, timeout=30)
    yield request.param
    weft.shutdown()


def made(kind: str, **options: Any) -> Any:
    return getattr(weft, kind)(*KINDS[kind], **options)


def check_refused(error: Exception, *words: str) -> None:
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"


def test_the_examples_in_the_docstrings_are_true() -> None:
    """Every example prints what it says."""
    assert doctest.testmod(tables).failed == 0


def test_the_names_are_those_of_the_design() -> None:
    """Both kinds have the same options, after how large they are."""
    array = list(inspect.signature(weft.ArrayTable).parameters.values())
    matrix = list(inspect.signature(weft.MatrixTable).parameters.values())
    assert [p.name for p in array[1:]] == [
        *("dtype", "updater", "consistency", "exact", "device", "name", "check_finite")
    ]
    assert array[1:] == matrix[2:]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in array[1:])
    assert array[1].default == "float32"
    assert list(inspect.signature(weft.ArrayTable.get).parameters) == [
        *("self", "rows", "out", "timeout", "consistency")
    ]
    assert list(inspect.signature(weft.ArrayTable.add).parameters) == [
        *("self", "delta", "rows", "timeout")
    ]


# making one


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_a_group_there_are_no_tables(kind: str) -> None:
    """Before weft.init() the message says what is missing."""
    for call in (lambda: made(kind), lambda: weft.load("x"), lambda: weft.save_all("x")):
        with pytest.raises(NotInitialized, match=r"weft\.init\(\)"):
            call()


@pytest.mark.parametrize(
    ("sizes", "kind", "words"),
    [
        ((0,), InvalidValue, ("size=0", "positive number")),
        ((-3,), InvalidValue, ("size=-3", "positive number")),
        ((2.5,), InvalidType, ("size=2.5", "whole number", "array to start from")),
        (("3",), InvalidType, ("size='3'", "whole number")),
        ((True,), InvalidType, ("size=True", "whole number")),
        ((None,), InvalidType, ("size=None", "whole number")),
        (([],), InvalidValue, ("shape (0,)", "1 dimension and 1 or more elements")),
        (([[1, 2]],), InvalidValue, ("shape (1, 2)", "expected 1 dimension")),
        ((np.array(3),), InvalidValue, ("shape ()", "expected 1 dimension")),
        ((["a"],), InvalidType, ("the array to start from is ['a']", "expected numbers")),
        ((np.array([None]),), InvalidType, ("size=array([None]", "whole number")),
        (([[1], [2, 3]],), InvalidValue, ("ragged",)),
        (((3, 2),), InvalidType, ("(3, 2) may be a shape or an array", "MatrixTable(3, 2)")),
        (((3,),), InvalidType, ("(3,) may be a shape or an array", "ArrayTable(3)", "[3]")),
        ((torch.ones(2, dtype=torch.bfloat16),), InvalidType, ("bfloat16", "x.float()")),
        ((np.ma.array([1.0]),), InvalidType, ("mask",)),
        (([1e39],), InvalidValue, ("the array to start from", "1e+39", "out of range")),
        (([1j],), InvalidType, ("the array to start from of complex128", "imaginary")),
        ((np.array([1j]),), InvalidType, ("the array to start from", "dtype='complex128'")),
    ],
    ids=repr,
)
def test_arrays_that_cannot_be(
    session: str, sizes: tuple[Any, ...], kind: type[Exception], words: tuple[str, ...]
) -> None:
    """A wrong size, or something to start from that is no array, is named."""
    with pytest.raises(kind) as error:
        weft.ArrayTable(*sizes)
    check_refused(error.value, *words)


@pytest.mark.parametrize(
    ("sizes", "kind", "words"),
    [
        ((0, 3), InvalidValue, ("n_rows=0", "positive number")),
        ((3, 0), InvalidValue, ("n_cols=0", "positive number")),
        ((3, -1), InvalidValue, ("n_cols=-1", "positive number")),
        ((3,), InvalidType, ("MatrixTable(3)", "number of columns")),
        ((3, 2.0), InvalidType, ("n_cols=2.0", "whole number")),
        (("3", 2), InvalidType, ("n_rows='3'", "whole number")),
        (((3, 2),), InvalidType, ("(3, 2) may be a shape or an array", "MatrixTable(3, 2)")),
        ((np.ones(3),), InvalidValue, ("shape (3,)", "2 dimensions and 1 or more")),
        ((np.ones((0, 3)),), InvalidValue, ("shape (0, 3)", "1 or more elements")),
        ((np.ones((2, 3)), 4), InvalidValue, ("n_cols=4", "(2, 3)", "expected 3")),
        ((np.ones((2, 3)), "3"), InvalidValue, ("n_cols='3'", "(2, 3)", "expected 3")),
    ],
    ids=repr,
)
def test_matrices_that_cannot_be(
    session: str, sizes: tuple[Any, ...], kind: type[Exception], words: tuple[str, ...]
) -> None:
    """Both sizes are checked, and a matrix against the columns given."""
    with pytest.raises(kind) as error:
        weft.MatrixTable(*sizes)
    check_refused(error.value, *words)
    assert weft.MatrixTable(np.ones((2, 3)), 3).shape == (2, 3)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("options", "error_kind", "words"),
    [
        ({"dtype": "text"}, InvalidType, ("dtype='text'", "'float32'")),
        ({"dtype": None}, InvalidType, ("dtype=None", "'float32'")),
        ({"dtype": bool}, InvalidType, ("bool", "'float32'")),
        ({"updater": "sdg"}, InvalidValue, ("updater='sdg'", "add, sgd, momentum")),
        ({"updater": 3}, InvalidType, ("updater=3", "fun(rows, state, delta)")),
        ({"updater": lambda rows: None}, InvalidType, ("fun(rows, state, delta)",)),
        ({"updater": "adam", "dtype": "int32"}, InvalidType, ("adam", "int32", "'add'")),
        ({"updater": "sgd", "dtype": "complex64"}, InvalidType, ("sgd", "complex64")),
        ({"consistency": "eventual"}, InvalidValue, ("consistency='eventual'", "weft.ssp(k)")),
        ({"consistency": 3}, InvalidType, ("consistency=3", "weft.ssp(k)")),
        ({"exact": 1}, InvalidType, ("exact=1", "True or False")),
        ({"exact": None}, InvalidType, ("exact=None", "True or False")),
        ({"device": "cuda:77"}, InvalidValue, ("device='cuda:77'", "'cpu'")),
        ({"name": ""}, InvalidValue, ("name=''", "up to 100 printable characters")),
        ({"name": "n" * 101}, InvalidValue, ("up to 100 printable characters",)),
        ({"name": "a\nb"}, InvalidValue, ("name='a\\nb'", "printable")),
        ({"name": 7}, InvalidValue, ("name=7", "printable")),
    ],
    ids=repr,
)
def test_options_that_cannot_be(
    session: str,
    kind: str,
    options: dict[str, Any],
    error_kind: type[Exception],
    words: tuple[str, ...],
) -> None:
    """Each option names what it was given and what it takes."""
    with pytest.raises(error_kind) as error:
        made(kind, **options)
    check_refused(error.value, *words)
    assert made(kind).name == "table 1"  # what was refused does not count


def test_unknown_options(session: str) -> None:
    """They are Python's own error."""
    with pytest.raises(TypeError, match="updated"):
        weft.ArrayTable(3, updated="add")  # type: ignore[call-arg]


def test_lists_to_start_from_need_values_that_fit(session: str) -> None:
    """A list has no dtype of its own: whole numbers are a start for every kind of table."""
    for dtype in ("uint8", "int16", "float16", "complex64"):
        assert weft.ArrayTable(range(3), dtype=dtype).get().tolist() == [0, 1, 2]
        assert weft.MatrixTable([[0, 1], [2, 255]], dtype=dtype).get()[1, 1] == 255
    with pytest.raises(InvalidValue, match="256 is out of range; expected 0 to 255"):
        weft.ArrayTable([1, 256], dtype="uint8")


@pytest.mark.parametrize("consistency", ["async", "bsp", weft.ssp(1)], ids=str)
def test_tables_larger_than_memory(session: str, consistency: Any) -> None:
    """A MemoryError that says how much there is; the state of an updater counts."""
    free = weft.resources.available_memory()[0]
    for make in (
        lambda: weft.ArrayTable(free // 4, consistency=consistency),
        lambda: weft.MatrixTable(free // 24, 4, updater="adam", consistency=consistency),
        lambda: weft.ArrayTable(10**400, consistency=consistency),
    ):
        with pytest.raises(OutOfMemory) as error:
            make()
        assert isinstance(error.value, MemoryError)
        check_refused(error.value, "GB was asked for", "are free", "make it smaller")


# using one

DELTAS: list[tuple[Any, Any, type[Exception], tuple[str, ...]]] = [
    (np.ones(5), None, InvalidValue, ("(5,)", "was expected")),
    (1.0, None, InvalidValue, ("()", "was expected")),
    (np.ones((2, 3, 1)), [0, 1], InvalidValue, ("(2, 3, 1)", "was expected")),
    (np.ones(7), [1, 2], InvalidValue, ("(7,)", "was expected")),
    ([], [1, 2], InvalidValue, ("(0,)", "was expected")),
    (np.ones(18, complex), None, InvalidType, ("complex128", "float32")),
    (["x"] * 18, None, InvalidType, ("'x'", "expected numbers")),
    (None, None, InvalidType, ("None", "expected numbers")),
    (np.array(["x"] * 18), None, InvalidType, ("<U1", "expected numbers")),
    ([1e39] * 18, None, InvalidValue, ("1e+39", "out of range")),
    (torch.ones(18, dtype=torch.bfloat16), None, InvalidType, ("bfloat16", "x.float()")),
]
ROWS: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    ([0, 6], InvalidValue, ("row 6", "0 to 5")),
    ([-1], InvalidValue, ("row -1", "0 to 5")),
    (6, InvalidValue, ("row 6", "0 to 5")),
    (np.array([2**64 - 1], np.uint64), InvalidValue, (f"row {2**64 - 1}", "0 to 5")),
    ([0.0], InvalidType, ("[0.0]", "whole numbers")),
    ([True], InvalidType, ("[True]", "whole numbers")),
    ("0", InvalidType, ("'0'", "numbers")),
    ([[0]], InvalidValue, ("shape (1, 1)", "a list of them")),
    (np.array([True] * 6), InvalidType, ("bool", "numpy.flatnonzero(mask)")),
    (slice("a", None), InvalidType, ("slice('a', None, None)", "expected whole numbers")),
    (slice(0, 6, 0), InvalidValue, ("slice(0, 6, 0)", "a step other than 0")),
]


@pytest.mark.parametrize("consistency", ["async", "bsp", weft.ssp(1)], ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_refused_changes_nothing(session: str, kind: str, consistency: Any) -> None:
    """Every wrong delta, row id and place for results, asked for at once or with a handle."""
    table = made(kind, consistency=consistency, updater="momentum")
    start = np.arange(math.prod(table.shape), dtype="f4").reshape(table.shape)
    table.add(start)
    before = table.get()
    assert before.any()
    for delta, rows, error_kind, words in DELTAS:
        for add in (table.add, table.add_async):
            with pytest.raises(error_kind) as error:
                add(delta, rows)
            check_refused(error.value, *words)
    for rows, error_kind, words in ROWS:
        for call in (
            lambda r=rows: table.get(r),
            lambda r=rows: table.get_async(r),
            lambda r=rows: table.add([1, 1, 1], r),
            lambda r=rows: table.add_async([1, 1, 1], r),
        ):
            with pytest.raises(error_kind) as error:
                call()
            check_refused(error.value, *words)
    out = np.full(table.shape, 7, "f4")
    for wrong, words in (
        (out[:5], ("float32[5", "the result is float32[6")),
        (out.astype("f8"), ("float64", "the result is float32")),
        (np.broadcast_to(out[:1], table.shape), ("cannot be written to",)),
    ):
        for get in (table.get, table.get_async):
            with pytest.raises(InvalidValue) as error:
                get(out=wrong)
            check_refused(error.value, *words)
    with pytest.raises(InvalidType, match="expected an array"):
        table.get(out=[0] * 6)
    assert (out == 7).all()
    assert np.array_equal(table.get(), before)
    # the state too: the next add does what it would have done
    table.add(start)
    other = made(kind, consistency=consistency, updater="momentum")
    other.add(start)
    other.add(start)
    assert np.array_equal(table.get(), other.get())
    assert table.staleness == 0


def test_what_a_table_is_not(session: str) -> None:
    """Indexing, loops, assignment, copies and pickles are refused with the line to write: a copy
    would be no table, and `table += array` would have put an array in the table's place."""
    table = made("ArrayTable")
    lines: list[tuple[Callable[[], Any], str]] = [
        (lambda: table[0], r"table\.get\(rows\)"),
        (lambda: list(table), r"table\.get\(\) for all"),
        (lambda: 0.0 in table, r"table\.get"),
        (lambda: operator.setitem(table, 0, 1.0), r"table\.add\(delta, rows\)"),
        (lambda: operator.iadd(table, np.ones(6)), r"table\.add\(delta\)"),
        (lambda: operator.imul(table, np.ones(6)), r"table\.add\(delta\)"),
        (lambda: copy.copy(table), r"send table\.get\(\)"),
        (lambda: copy.deepcopy({"t": table}), r"send table\.get\(\)"),
        (lambda: pickle.dumps(table), r"send table\.get\(\)"),
        (lambda: weft.map(lambda i: table.get(i) + i, range(2), n=2), r"send table\.get\(\)"),
        (lambda: weft.broadcast(table), r"send table\.get\(\)"),
        (lambda: pickle.dumps(weft.group()), r"weft\.init\(\)"),
        (lambda: table.add(1), r"one number everywhere, numpy\.full\(\(6,\), x\)"),
        (lambda: weft.ArrayTable(3, check_finite="no"), r"check_finite='no'"),  # type: ignore[arg-type]
    ]
    for call, words in lines:
        with pytest.raises((InvalidType, InvalidValue), match=words):
            call()
    assert len(table) == 6
    assert (table == table.get()).all()
    assert not table.get().any()


def test_casts_that_lose_are_refused_and_rounding_is_not(session: str) -> None:
    """Another kind of number and numbers out of range change nothing; last digits may go."""
    whole = weft.ArrayTable([1, 2, 3], dtype="int8")
    for delta, kind in (
        (np.ones(3), InvalidType),
        ([0.5, 1, 1], InvalidType),
        ([1, 1, 128], InvalidValue),
        (np.array([1, 1, -129]), InvalidValue),
        (np.array([1, 1, 1], "u1"), None),
        (np.array([1, 1, 1], "i8"), None),
        ([1, True, 1], None),
    ):
        before = whole.get()
        if kind is None:
            whole.add(delta)
            assert np.array_equal(whole.get(), before + 1)
        else:
            with pytest.raises(kind):
                whole.add(delta)
            assert np.array_equal(whole.get(), before)
    half = weft.ArrayTable(2, dtype="float16")
    half.add(np.array([1 / 3, 1e-30]))
    assert half.get().tolist() == [np.float16(1 / 3), 0]
    with pytest.raises(InvalidValue, match="65504"):
        half.add([0, 1e5])
    assert half.get().tolist() == [np.float16(1 / 3), 0]


@pytest.mark.parametrize("kind", list(KINDS))
def test_finite_deltas_only(session: str, kind: str) -> None:
    """check_finite refuses NaN and infinity and says where; without it they pass."""
    careful, careless = made(kind, check_finite=True), made(kind)
    for wrong in (NAN, INFINITY, -INFINITY):
        delta = np.ones(careful.shape, "f4")
        delta[3] = wrong
        for add in (careful.add, careful.add_async):
            with pytest.raises(InvalidValue) as error:
                add(delta)
            check_refused(
                error.value, f"{wrong} at ", "3", "check_finite=True", "nothing was added"
            )
            with pytest.raises(InvalidValue, match="check_finite"):
                add(delta[3], 2)
        careless.add(delta)
    assert not careful.get().any()
    assert np.isnan(careless.get()[3]).all()
    careful.add(np.ones(careful.shape))
    assert (careful.get() == 1).all()
    # the numbers may be finite where they come from
    with pytest.raises(InvalidValue, match="out of range"):
        careful.add(np.full(careful.shape, 1e39))


def test_checking_is_kept_with_the_table(session: str, tmp_path: Path) -> None:
    """A loaded table refuses what the saved one did."""
    weft.ArrayTable(2, check_finite=True).save(tmp_path / "careful")
    weft.ArrayTable(2).save(tmp_path / "careless")
    with pytest.raises(InvalidValue, match="check_finite"):
        weft.load(tmp_path / "careful").add([1, NAN])
    weft.load(tmp_path / "careless").add([1, NAN])


def test_after_a_refused_add_handles_go_on(session: str) -> None:
    """What is refused at once is no pending call."""
    table = weft.ArrayTable(2)
    first = table.add_async([1, 1])
    with pytest.raises(InvalidValue):
        table.add_async([1, 1, 1])
    second = table.add_async([1, 1])
    assert table.get().tolist() == [2, 2]
    assert first.done()
    assert second.done()


# saving


@pytest.mark.parametrize("wrong", [None, 7, b"x", ["x"]], ids=repr)
def test_paths_of_the_wrong_kind(session: str, wrong: Any) -> None:
    """A path is a string or a pathlib.Path; the message shows what it was."""
    table = weft.ArrayTable(2)
    for call in (table.save, weft.load, weft.save_all):
        with pytest.raises(InvalidType) as error:
            call(wrong)
        check_refused(error.value, f"path={wrong!r}", "pathlib.Path")


def test_what_cannot_be_saved_or_loaded(session: str, tmp_path: Path) -> None:
    """Errors of the file system are Python's own; files that are no tables are named."""
    table = weft.ArrayTable([1, 2])
    with pytest.raises(FileNotFoundError):
        table.save(tmp_path / "missing" / "table")
    with pytest.raises(IsADirectoryError):
        table.save(tmp_path)
    with pytest.raises(FileNotFoundError):
        weft.load(tmp_path / "missing")
    text = tmp_path / "text"
    text.write_text("1 2 3")
    with pytest.raises(DamagedFile, match="text is not a saved table"):
        weft.load(text)
    with pytest.raises((FileExistsError, NotADirectoryError)):
        weft.save_all(text)
    assert text.read_text() == "1 2 3"
    assert table.get().tolist() == [1, 2]


def _noted(rows: Any, state: Any, delta: Any) -> None:
    rows += delta


def test_a_saved_function_is_needed_again(session: str, tmp_path: Path) -> None:
    """Another updater, or one with other state, is refused."""
    custom = weft.updaters.custom
    path = tmp_path / "table"
    weft.ArrayTable(2, updater=custom(_noted, state=["a"], name="noted")).save(path)
    for wrong in (None, "add", custom(_noted, name="noted"), custom(_noted, state=["a"])):
        with pytest.raises(InvalidValue) as error:
            weft.load(path, updater=wrong)
        check_refused(error.value, "'noted'", "['a']", "weft.load(path, updater=...)")
    assert weft.load(path, updater=custom(_noted, state=["a"], name="noted")).shape == (2,)
    with pytest.raises(InvalidValue, match="'rows', which are the table's own"):
        custom(_noted, state=["rows"])


def test_an_updater_that_raises_is_heard_of_by_the_handle(session: str) -> None:
    """wait() raises it, as often as it is called."""

    def fails(rows: Any, state: Any, delta: Any) -> None:
        raise ArithmeticError("no")

    table = weft.ArrayTable(2, updater=fails)
    handle = table.add_async([1, 1])
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="no"):
            handle.wait()
    assert table.get().tolist() == [0, 0]
    assert issubclass(InvalidValue, UsageError)
