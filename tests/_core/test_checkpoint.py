"""A table on disk: what comes back, what is refused, and what a failure leaves."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import run_python
from weft._core import checkpoint
from weft._core.arithmetic import Array
from weft._core.checkpoint import Entry, SavedTable
from weft.errors import DamagedFile, InvalidType, InvalidValue, WeftError

ROOT = Path(__file__).parents[2]

DTYPES = [np.dtype(code) for code in "?bhiqBHIQefdFD"]

HEADER = {"kind": "MatrixTable", "name": "weights", "updater": "adam", "options": '{"lr": 0.1}'}


def write(path: Any, metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> None:
    """Save arrays, in pieces."""
    entries = {name: Entry(array.dtype, array.shape) for name, array in arrays.items()}
    checkpoint.write(
        path, metadata, entries, lambda name, start, stop: arrays[name][start:stop].copy()
    )


def read(path: Any) -> tuple[dict[str, str], dict[str, Array]]:
    """What a file has, put together from its pieces."""
    with contextlib.closing(SavedTable(path)) as saved:
        arrays = {name: np.zeros(entry.shape, entry.dtype) for name, entry in saved.entries.items()}
        for name, start, piece in saved.pieces():
            arrays[name][start : start + len(piece)] = piece
        return saved.metadata, arrays


def sample() -> dict[str, Array]:
    """A small table with rows, and the state of their updater."""
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    return {
        "rows": rows,
        "state": rows.astype(np.float16) ** 2,
        "waves": rows.astype(np.complex64) * 1j,
    }


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """Equal names, in order, native dtypes, shapes and bits."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert found[name].dtype == native.dtype
        assert found[name].dtype.isnative
        assert found[name].shape == array.shape
        assert found[name].tobytes() == native.tobytes()
        assert found[name].flags.writeable


# --- what comes back ----------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
texts = st.text(max_size=8)
#: what the format itself writes into the metadata
OWN = {"weft_format", "checksum", "header_checksum", "complex"}


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Array]:
    """Arrays of any dtype, byte order and shape, whose bits are random."""
    bits = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrays = {}
    for name in draw(st.lists(texts, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(DTYPES)).newbyteorder(draw(st.sampled_from("<>")))
        shape = draw(shapes)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = bits.integers(0, 2 if dtype.kind == "b" else 256, size, dtype=np.uint8)
        arrays[name] = raw.view(dtype).reshape(shape)
    return arrays


@settings(deadline=None)
@given(st.dictionaries(texts.filter(lambda key: key not in OWN), texts, max_size=4), tables())
def test_what_is_read_is_what_was_written(header: dict[str, str], arrays: dict[str, Array]) -> None:
    """Any metadata and any arrays come back as they were, and safetensors reads the same."""
    path = Path(os.environ["WEFT_TEST_FOLDER"]) / "table"
    write(path, header, arrays)
    found, back = read(path)
    assert found == header
    assert list(back) == list(arrays)
    others = safetensors.numpy.load_file(path)
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype.newbyteorder("="), array.shape)
        # swapping bytes keeps every bit, where a conversion may quieten a NaN
        same = array if array.dtype.isnative else array.byteswap()
        assert back[name].tobytes() == same.tobytes()
        assert back[name].flags.writeable
        assert back[name].flags.c_contiguous
        assert others.pop(name).tobytes() == same.tobytes()
    assert not others


@pytest.mark.parametrize("field", sorted(OWN))
def test_fields_of_the_format_cannot_be_given(field: str, tmp_path: Path) -> None:
    """Metadata that would be taken for the format's own is refused, and nothing is written."""
    with pytest.raises(InvalidValue, match=field):
        write(tmp_path / "table", {field: "1"}, sample())
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: np.dtype[Any], tmp_path: Path) -> None:
    """Each dtype, in both byte orders, in one and more dimensions."""
    values = np.arange(6).astype(dtype)
    arrays = {
        f"{order} {shape}": values[: int(np.prod(shape))].astype(order + dtype.char).reshape(shape)
        for order in "<>"
        for shape in ((1,), (6,), (2, 3), (3, 1, 2))
    }
    write(tmp_path / "table", {}, arrays)
    assert_same(read(tmp_path / "table")[1], arrays)


def test_the_bits_of_a_nan_are_kept(tmp_path: Path) -> None:
    """NaNs carry payloads and signs, and zeros signs."""
    bits = np.array([0x7FF0000000000001, 0xFFF8DEADBEEF0001, 0x8000000000000000], np.uint64)
    write(tmp_path / "table", {}, {"rows": bits.view(np.float64)})
    assert read(tmp_path / "table")[1]["rows"].view(np.uint64).tolist() == bits.tolist()


def test_arrays_longer_than_a_piece_come_back(tmp_path: Path) -> None:
    """Lengths around multiples of what is written at a time, and rows longer than that."""
    for length in (checkpoint.PIECE - 1, checkpoint.PIECE, 2 * checkpoint.PIECE + 1):
        raw = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
        write(tmp_path / "table", {}, {"rows": raw, "more": raw[:5]})
        assert_same(read(tmp_path / "table")[1], {"rows": raw, "more": raw[:5]})
    rows = raw[: 2 * checkpoint.PIECE].reshape(1, -1)
    write(tmp_path / "table", {}, {"rows": rows})
    assert_same(read(tmp_path / "table")[1], {"rows": rows})


def test_no_more_than_a_piece_is_asked_for_at_a_time(tmp_path: Path) -> None:
    """Whole rows, in order, none twice, of 16 MB at most; they come back in the same pieces."""
    entry, asked = Entry(np.dtype(np.float64), (5_000_000, 2)), []

    def zeros(name: str, start: int, stop: int) -> Array:
        asked.append((name, start, stop))
        return np.zeros((stop - start, 2))

    checkpoint.write(tmp_path / "table", {}, {"rows": entry}, zeros)
    starts = [start for _, start, _ in asked]
    stops = [stop for _, _, stop in asked]
    assert starts == [0, *stops[:-1]]
    assert stops[-1] == 5_000_000
    assert max(stop - start for _, start, stop in asked) * 16 == 16 << 20
    with contextlib.closing(SavedTable(tmp_path / "table")) as saved:
        found = [(name, start, start + len(piece)) for name, start, piece in saved.pieces()]
    assert found == asked


def test_an_array_that_cannot_be_written_to_can_be_saved(tmp_path: Path) -> None:
    """Readonly arrays and arrays of a subclass are saved, and come back as plain ones."""
    rows = np.arange(3.0).view(np.recarray)
    rows.flags.writeable = False
    write(tmp_path / "table", {}, {"rows": rows})
    back = read(tmp_path / "table")[1]["rows"]
    assert type(back) is np.ndarray
    assert_same({"rows": back}, {"rows": np.arange(3.0)})


def test_the_layout_is_the_one_drawn(tmp_path: Path) -> None:
    """Length, header, arrays: one after the other."""
    write(tmp_path / "table", HEADER, sample())
    data = (tmp_path / "table").read_bytes()
    entries = {
        "rows": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]},
        "state": {"dtype": "F16", "shape": [6, 4], "data_offsets": [96, 144]},
        "waves": {"dtype": "F32", "shape": [6, 4, 2], "data_offsets": [144, 336]},
    }
    payload = b"".join(array.tobytes() for array in sample().values())
    assert data == forged(entries, payload, **HEADER, complex='["waves"]')
    assert struct.unpack("<Q", data[:8])[0] % 8 == 0


def test_other_tools_read_what_was_saved(tmp_path: Path) -> None:
    """safetensors' own library, for NumPy and for torch: arrays, slices of them, and metadata."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "table"
    write(path, HEADER, sample())
    for name, array in safetensors.numpy.load_file(path).items():
        expected = sample()[name]
        pairs = expected.view(np.float32).reshape(6, 4, 2) if name == "waves" else expected
        assert (array.dtype, array.shape) == (pairs.dtype, pairs.shape)
        assert array.tobytes() == pairs.tobytes()
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert {key: metadata[key] for key in HEADER} == HEADER
        assert metadata["weft_format"] == "2"
        assert metadata["complex"] == '["waves"]'
        rows = file.get_tensor("rows")
        assert (rows.dtype, tuple(rows.shape)) == (torch.float32, (6, 4))
        assert file.get_slice("rows")[1:3].tolist() == sample()["rows"][1:3].tolist()
        waves = torch.view_as_complex(file.get_tensor("waves"))
        assert np.array_equal(waves.numpy(), sample()["waves"])


def test_files_of_the_first_format_are_refused_in_words(tmp_path: Path) -> None:
    """A file that was written before files were safetensors files."""
    path = tmp_path / "table"
    path.write_bytes(bytes.fromhex(FIRST))
    with pytest.raises(DamagedFile) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} was saved in weft's first format, which this release no longer reads; load it "
        "with the weft that saved it, keep table.get() with numpy.save, and make the table from "
        "that"
    )


FIRST = """
    93776566740d0a1a 010000005e000000
    7b22686561646572223a207b226b696e64223a202241727261795461626c65227d2c2022617272617973223a205b5b
    22726f7773222c20223c6932222c205b335d5d2c205b227374617465222c20223e6634222c205b312c20325d5d5d7d
    2c101b848c2af46aeb2d20b6ed75f3dc210007f17db06474c10f907585c4b4d9
    0100feff0300 3f0000003f800000
    924e4fb97dc07acc8973e8744823ffc83af6fb2c04f8f59694173f88b8bf797e
"""


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=str)
def test_safetensors_files_of_others_are_refused_in_words(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    """A model from elsewhere is no table, but its arrays can be made tables of."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"rows": np.zeros((2, 3))}, path, metadata)
    with pytest.raises(DamagedFile) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} is not a saved table of weft, but perhaps another safetensors file; read its "
        "arrays with safetensors.numpy.load_file, and make a table from one"
    )


def test_a_table_saved_again_by_another_tool_is_refused(tmp_path: Path) -> None:
    """What another tool made of a table, whatever its metadata say, is not what was saved."""
    path = tmp_path / "table"
    write(path, HEADER, sample())
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = safetensors.numpy.load_file(path)
    arrays["rows"] = arrays["rows"] + 1
    safetensors.numpy.save_file(arrays, path, metadata)
    with pytest.raises(DamagedFile, match="is damaged: its checksum does not match"):
        read(path)


def forged(entries: dict[str, Any], payload: bytes = b"", **metadata: Any) -> bytes:
    """A file whose checksums are right, whatever it says."""
    said = {"weft_format": "2", **metadata, "checksum": hashlib.sha256(payload).hexdigest()}
    header = {"__metadata__": {**said, "header_checksum": "0" * 64}, **entries}
    return sealed(json.dumps(header, separators=(",", ":")).encode()) + payload


def sealed(text: bytes) -> bytes:
    """A length and a header, with the header's checksum."""
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    before = b'"header_checksum":"'
    seal = hashlib.sha256(start).hexdigest().encode()
    return start.replace(before + b"0" * 64, before + seal)


def rows(
    dtype: Any = "F64", shape: Any = (2,), offsets: Any = (0, 16), **more: Any
) -> dict[str, Any]:
    """The entry of an array, right or not."""
    return {"rows": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


# --- what is refused when reading ---------------------------------------------------------------


def altered(data: bytes, seed: int) -> bytes:
    """The bytes of a file after one of the accidents that happen to files."""
    chance = random.Random(seed)
    start, end = sorted(chance.choices(range(len(data) + 1), k=2))
    at = chance.randrange(len(data))
    garbage = chance.randbytes(chance.randint(1, 80))
    size = min(chance.randint(1, 80), len(data) // 2)
    one = chance.randint(0, len(data) // 2 - size)
    two = chance.randint(len(data) // 2, len(data) - size)
    accidents: list[Callable[[], bytes]] = [
        lambda: data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
        lambda: data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + garbage + data[at:],
        lambda: data[:start] + data[end:],
        lambda: (
            data[:one]
            + data[two : two + size]
            + data[one + size : two]
            + data[one : one + size]
            + data[two + size :]
        ),
        lambda: data[:start] + bytes(end - start) + data[end:],
        lambda: data + garbage,
        lambda: data + data[start:end],
        lambda: (data[:at] + garbage + data[at + len(garbage) :])[: len(data)],
    ]
    return accidents[seed % len(accidents)]()


def test_ten_thousand_altered_files_are_refused(tmp_path: Path) -> None:
    """Whatever happened to a file, reading it raises DamagedFile, and never returns a table."""
    path = tmp_path / "table"
    write(path, HEADER, sample())
    data = path.read_bytes()
    same, words = 0, set()
    with open(path, "r+b", buffering=0) as file:
        for seed in range(10_000):
            bad = altered(data, seed)
            if bad == data:
                same += 1
                continue
            os.pwrite(file.fileno(), bad, 0)
            file.truncate(len(bad))
            with pytest.raises(DamagedFile) as caught:
                read(path)
            message = str(caught.value)
            assert message.startswith(f"{path} ")
            words.add(" ".join(message.removeprefix(f"{path} ").split()[:2]))
    assert same < 100, same
    assert words >= {"is not", "is damaged:", "ends after", "goes on"}, words


def test_every_truncation_and_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    """A small file has few enough of them to try all."""
    path = tmp_path / "table"
    write(path, {"kind": "ArrayTable"}, {"rows": np.arange(2, dtype=np.int16)})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(
            DamagedFile, match=f" ends after {length} of (at least )?[0-9]+ bytes; "
        ):
            read(path)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(DamagedFile):
            read(path)


def test_the_message_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    """Path, damage and next step, in words."""
    path = tmp_path / "table"
    write(path, HEADER, {"rows": np.zeros(1000)})
    data = path.read_bytes()
    again = "load another copy of it, or save the table again"
    cases = {
        data[:7000]: f"ends after 7,000 of {len(data):,} bytes; {again}",
        data[:3]: f"ends after 3 of at least {len(data) - 8000:,} bytes; {again}",
        data + bytes(1234): f"goes on for 1,234 bytes after its end; {again}",
        data[:5000] + b"x" + data[5001:]: f"is damaged: its checksum does not match; {again}",
        data.replace(b"weights", b"heights"): f"is damaged: its checksum does not match; {again}",
        b"rows,columns\n1,2\n": "is not a saved table of weft; "
        "pass the path of a file that a table was saved to",
        forged({}, weft_format="3"): "was written by a newer version (format 3, this release reads "
        "2); update weft with `pip install --upgrade weft`, or save the table with this release",
        forged({}, weft_format="1"): f"is damaged: its checksum does not match; {again}",
    }
    for bad, words in cases.items():
        path.write_bytes(bad)
        with pytest.raises(DamagedFile) as caught:
            read(path)
        assert str(caught.value) == f"{path} {words}"
        assert isinstance(caught.value, WeftError)
        assert isinstance(caught.value, ValueError)


def test_a_newer_format_is_told_by_its_number_alone(tmp_path: Path) -> None:
    """What follows the number in a newer version may be anything, its checksum too."""
    path = tmp_path / "table"
    path.write_bytes(forged({}, b"another layout", weft_format="13", header_checksum=7))
    with pytest.raises(DamagedFile, match=r"newer version \(format 13, this release reads 2\)"):
        read(path)


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b"[" * 100_000, b"{", b'{"a": 1, "a": 2}', b'{"rows": 1' + b"1" * 5000 + b"}"],
    ids=lambda text: f"{text!r:.30}",
)
def test_a_header_that_is_no_json_is_refused(text: bytes, tmp_path: Path) -> None:
    """Neither JSON of two minds nor JSON without an end."""
    (tmp_path / "table").write_bytes(sealed(text))
    with pytest.raises(DamagedFile, match="is damaged: its header cannot be read"):
        read(tmp_path / "table")


@pytest.mark.parametrize(
    "entries",
    [
        {"rows": 1},
        {"rows": []},
        {"rows": {"dtype": "F64", "shape": [2]}},
        rows(more=1),
        rows("O"),
        rows("BF16"),
        rows(["F64"]),
        rows(None),
        rows(shape=[]),
        rows(shape=2),
        rows(shape="2"),
        rows(shape=[0]),
        rows(shape=[True], offsets=[0, 8]),
        rows(shape=[2.0]),
        rows(shape=[-2]),
        rows(shape=[2**63]),
        rows(shape=[2**62] * 65),
        rows(offsets=None),
        rows(offsets=[0]),
        rows(offsets=[0, 16, 16]),
        rows(offsets=[0.0, 16.0]),
        rows(offsets=[False, 16]),
        rows(offsets=[0, 8]),
        rows(offsets=[8, 24]),
        rows(offsets=[-16, 0]),
        {**rows(), "more": rows()["rows"]},
        {**rows(), "more": rows(offsets=[24, 40])["rows"]},
        {**rows(), "more": rows(offsets=[8, 24])["rows"]},
    ],
    ids=lambda entries: f"{entries!r:.60}",
)
def test_a_header_that_lies_is_refused(entries: dict[str, Any], tmp_path: Path) -> None:
    """Right checksums do not make a header believed."""
    (tmp_path / "table").write_bytes(forged(entries, bytes(16)))
    with pytest.raises(DamagedFile, match="has a header that makes no sense"):
        read(tmp_path / "table")


@pytest.mark.parametrize(
    "metadata",
    [
        {"name": 7},
        {"name": None},
        {"complex": "rows"},
        {"complex": '"rows"'},
        {"complex": '["other"]'},
        {"complex": "[[]]"},
        {"complex": '["rows"]'},  # which has no dimension of 2 to spare
    ],
    ids=str,
)
def test_metadata_that_lie_are_refused(metadata: dict[str, Any], tmp_path: Path) -> None:
    """Likewise what is said beside the arrays."""
    (tmp_path / "table").write_bytes(forged(rows(), bytes(16), **metadata))
    with pytest.raises(DamagedFile, match="has a header that makes no sense"):
        read(tmp_path / "table")


names = st.text(max_size=2)
dtypes = st.sampled_from(["BOOL", "F32", "I16", "F64", "BF16", "", None])
lengths = st.integers(-1, 3) | st.sampled_from([2**31, 2**63, True, 1.0, "2", None])
offsets = st.lists(st.integers(-8, 40) | st.sampled_from([2**63, None]), max_size=3)
described = st.fixed_dictionaries(
    {"dtype": dtypes, "shape": st.lists(lengths, max_size=3), "data_offsets": offsets}
)


@settings(deadline=None)
@given(st.dictionaries(names, described, max_size=2), st.binary(max_size=40))
def test_a_forged_file_is_refused_or_is_what_it_says(
    entries: dict[str, Any], payload: bytes
) -> None:
    """Whoever can compute a checksum gets a table that fills the file exactly, or DamagedFile."""
    path = Path(os.environ["WEFT_TEST_FOLDER"]) / "table"
    path.write_bytes(forged(entries, payload))
    try:
        metadata, arrays = read(path)
    except DamagedFile:
        return
    assert metadata == {}
    assert list(arrays) == list(entries)
    assert sum(array.nbytes for array in arrays.values()) == len(payload)


@pytest.mark.parametrize("shape", [[2**60], [2**62, 2**62], [10**9], [3]], ids=str)
def test_no_memory_is_taken_for_a_lie(
    shape: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays larger than the file are refused before NumPy is asked for them."""
    data = forged(rows(shape=shape, offsets=[0, 8 * int(np.prod(shape, dtype=object))]), bytes(16))
    (tmp_path / "table").write_bytes(data)
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(DamagedFile, match=r"ends after [0-9]+ of [0-9,]+ bytes"):
        read(tmp_path / "table")


def test_a_long_header_is_not_read(tmp_path: Path) -> None:
    """A length beyond what is ever written is refused, even if the file is that large."""
    with open(tmp_path / "table", "wb") as file:
        file.write(struct.pack("<Q", 2**31))
        file.truncate(2**32)  # a hole, which takes no place on the disk
    with pytest.raises(DamagedFile, match="is not a saved table of weft"):
        read(tmp_path / "table")


def test_a_file_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """The size at the start is not relied on later."""
    path = tmp_path / "table"
    write(path, {}, {"rows": np.zeros(1000)})
    with contextlib.closing(SavedTable(path)) as saved:
        os.truncate(path, 4000)
        with pytest.raises(DamagedFile, match=r"ends after 4,000 of 8,[0-9]+ bytes"):
            list(saved.pieces())


def test_reads_that_return_less_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read may stop anywhere without being at the end."""

    class Hesitant(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:7])

    write(tmp_path / "table", HEADER, sample())
    monkeypatch.setattr(
        checkpoint, "open", lambda path, mode, **_: Hesitant(path, mode), raising=False
    )
    header, arrays = read(tmp_path / "table")
    assert header == HEADER
    assert_same(arrays, sample())


def test_what_is_no_file_stays_the_error_it_is(tmp_path: Path) -> None:
    """Missing files and folders are the operating system's errors."""
    for path in (tmp_path / "missing", tmp_path / "missing" / "table"):
        with pytest.raises(FileNotFoundError):
            read(path)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "missing" / "table", {}, {})
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    with pytest.raises(IsADirectoryError, match="temporary"):
        write(tmp_path / "temporary", {}, {})
    write(tmp_path / "file", {}, {})
    for call in (read, lambda path: write(path, {}, {})):
        with pytest.raises(NotADirectoryError):
            call(tmp_path / "file" / "table")


def test_devices_and_pipes_are_refused(tmp_path: Path) -> None:
    """A pipe is not waited for, and a device is not replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DamagedFile, match="is not a saved table of weft but a device or a pi"):
            read(path)
        with pytest.raises(InvalidValue, match="is a device or a pipe; save the table to a file"):
            write(path, {}, {})
        assert not path.is_file()


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A folder of a user who is not root, as that user."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        if user == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


def test_what_is_not_permitted_stays_permission_error() -> None:
    """Files that may not be read, files that may not be written to, and folders likewise."""
    with without_privileges() as folder:
        path = folder / "table"
        write(path, HEADER, sample())
        path.chmod(0o200)
        with pytest.raises(PermissionError, match="table"):
            read(path)
        path.chmod(0o400)
        with pytest.raises(PermissionError, match="table"):
            write(path, {}, {})
        assert read(path)[0] == HEADER
        folder.chmod(0o500)
        with pytest.raises(PermissionError):
            write(folder / "other", {}, {})
        assert os.listdir(folder) == ["table"]


# --- what is refused when writing ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "arrays", "error", "words"),
    [
        ({"a": "x" * 2**20}, {}, InvalidValue, "has room for 1,048,576; use shorter names"),
        ({"a": "\ud800"}, {}, InvalidValue, "UTF-8 cannot hold it"),
        ({}, {"\ud800": np.zeros(1)}, InvalidValue, "UTF-8 cannot hold it"),
        ({}, {"__metadata__": np.zeros(1)}, InvalidValue, "'__metadata__' .*; give it another na"),
        ({}, {"rows": np.array([None])}, InvalidType, "'rows' has dtype object, .*; convert it"),
        ({}, {"rows": np.array(["a"])}, InvalidType, "'rows' has dtype <U1, .*; convert it"),
        ({}, {"rows": np.zeros(2, "M8[s]")}, InvalidType, "has dtype datetime64"),
        ({}, {"rows": np.zeros(2, "i4,f4")}, InvalidType, "cannot hold"),
        ({}, {"rows": np.zeros(2, "g")}, InvalidType, "has dtype float128"),
        ({}, {"rows": np.zeros(2, "G")}, InvalidType, "has dtype complex256"),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_what_a_file_cannot_hold_is_refused(
    metadata: Any, arrays: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    """Refused before the disk is touched, with what to do instead."""
    with pytest.raises(error, match=words):
        write(tmp_path / "table", metadata, arrays)
    assert os.listdir(tmp_path) == ["temporary"]


# --- what a failure leaves ----------------------------------------------------------------------

OLD = {"rows": np.zeros(3)}
NEW = {"rows": np.ones(5)}


class Os:
    """The module os, with something that happens before the n-th of the calls that matter."""

    CALLS = ("stat", "open", "fchmod", "write", "fsync", "link", "replace", "unlink", "close")

    def __init__(
        self,
        *,
        nameless: bool,
        at: int = 0,
        act: Callable[[], None] = lambda: None,
        missing: tuple[str, ...] = (),
    ):
        self.nameless, self.at, self.act, self.missing = nameless, at, act, missing
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)
        if name not in self.CALLS:
            return getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not self.nameless and arguments[0] == ".":
                raise OSError("no nameless files here")
            self.asked.append(name)
            if len(self.asked) == self.at:
                if name == "write":  # half of it is done
                    os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                elif name == "close":
                    os.close(*arguments)
                self.act()
            return getattr(os, name)(*arguments, **options)

        return call


def calls_of_a_write(path: Path, *, nameless: bool) -> list[str]:
    """What a write to an existing file asks of the operating system, in order."""
    write(path, {}, OLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "os", system := Os(nameless=nameless))
        write(path, {}, NEW)
    assert set(Os.CALLS) - set(system.asked) == (set() if nameless else {"link"})
    return system.asked


both_ways = pytest.mark.parametrize("nameless", [True, False], ids=["nameless", "named"])


@both_ways
def test_the_disk_has_the_file_before_it_has_its_name(nameless: bool, tmp_path: Path) -> None:
    """All is written and flushed, then renamed, then the folder is flushed."""
    calls = calls_of_a_write(tmp_path / "table", nameless=nameless)
    order = [name for name in calls if name in ("write", "fsync", "link", "replace")]
    named = ["link"] if nameless else []
    assert order == ["write"] * order.count("write") + ["fsync", *named, "replace", "fsync"]


@both_ways
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the operating system refuses, the file is the old one or the new one."""

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "table"
    calls = calls_of_a_write(path, nameless=nameless)
    descriptors = os.listdir("/proc/self/fd")
    for at, name in enumerate(calls, 1):
        write(path, {}, OLD)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "os", Os(nameless=nameless, at=at, act=refuse))
            # the old file and the folder are opened before the new file
            if nameless and name == "open" and calls[:at].count("open") == 3:
                write(path, {}, NEW)  # it gets a name from the start instead
                assert_same(read(path)[1], NEW)
                continue
            with pytest.raises(OSError, match="No space left"):
                write(path, {}, NEW)
        assert_same(read(path)[1], NEW if "replace" in calls[: at - 1] else OLD)
        assert sorted(os.listdir(tmp_path)) == ["table", "temporary"], (at, name)
        assert len(os.listdir("/proc/self/fd")) == len(descriptors), (at, name)


def test_an_exception_anywhere_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle is no different from a full disk."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    path = tmp_path / "table"
    calls = calls_of_a_write(path, nameless=False)
    write(path, {}, OLD)
    system = Os(nameless=False, at=calls.index("write") + 1, act=interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "os", system)
        with pytest.raises(KeyboardInterrupt):
            write(path, {}, NEW)
    assert_same(read(path)[1], OLD)
    assert sorted(os.listdir(tmp_path)) == ["table", "temporary"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """With the kernel refusing to let files grow, the error is its own and nothing is beside."""
    path = tmp_path / "table"
    write(path, HEADER, sample())
    outcome = run_python(
        """
import os, resource, sys
import numpy
sys.path.insert(0, sys.argv[2])
from tests._core.test_checkpoint import write
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
try:
    write(sys.argv[1], {}, {"rows": numpy.ones(1_000_000)})
except OSError as error:
    print(error.strerror, len(os.listdir("/proc/self/fd")))
""",
        str(path),
        str(ROOT),
    )
    assert outcome.out.startswith("File too large"), outcome
    assert read(path)[0] == HEADER
    assert sorted(os.listdir(tmp_path)) == ["table", "temporary"]


@both_ways
def test_a_killed_write_leaves_the_old_file_or_the_new_one(nameless: bool, tmp_path: Path) -> None:
    """SIGKILL before, after and amid every call; beside lies at most what the drawing says."""
    program = "import sys; sys.path.insert(0, sys.argv[1])\n"
    program += "from tests._core.test_checkpoint import kill_everywhere\n"
    program += f"kill_everywhere(sys.argv[2], nameless={nameless})"
    outcome = run_python(program, str(ROOT), str(tmp_path / "killed"))
    assert outcome.out == "killed at each\n", outcome


def kill_everywhere(folder: str, *, nameless: bool) -> None:
    """Kill a writer at each of its calls; run in a process without threads, since it forks."""
    path = Path(folder) / "table"
    path.parent.mkdir()
    calls = calls_of_a_write(path, nameless=nameless)
    for at, name in enumerate(calls, 1):
        write(path, {}, OLD)
        if (child := os.fork()) == 0:
            kill = partial(os.kill, os.getpid(), signal.SIGKILL)
            vars(checkpoint)["os"] = Os(nameless=nameless, at=at, act=kill)
            write(path, {}, NEW)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        done = calls[: at - 1]
        assert_same(read(path)[1], NEW if "replace" in done else OLD)
        beside = [other for other in path.parent.iterdir() if other != path]
        named = "link" in done if nameless else done.count("open") == 3
        assert len(beside) == (named and "replace" not in done), (at, name, beside)
        for other in beside:
            assert re.fullmatch(r"table\.[0-9a-f]{16}\.unfinished", other.name)
            other.unlink()
    print("killed at each")


def test_of_two_writers_one_wins(tmp_path: Path) -> None:
    """Processes that write to one path at once leave the whole file of one of them, always."""
    path, stop = tmp_path / "table", tmp_path / "stop"
    write(path, {"writer": "0"}, {"rows": np.full(100_000, 0)})
    program = """
import os, sys
import numpy
path, stop, writer, root = sys.argv[1:]
sys.path.insert(0, root)
from tests._core.test_checkpoint import write
while not os.path.exists(stop):
    write(path, {"writer": writer}, {"rows": numpy.full(100_000, int(writer))})
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(stop), str(writer), str(ROOT)]
        )
        for writer in (1, 2)
    ]
    seen: list[int] = []
    try:
        while len(seen) < 100 or not set(seen) >= {1, 2}:
            assert [writer.poll() for writer in writers] == [None, None]
            header, arrays = read(path)
            assert set(arrays["rows"].tolist()) == {int(header["writer"])}
            seen.append(int(header["writer"]))
    finally:
        stop.touch()
        assert [writer.wait(30) for writer in writers] == [0, 0]
    assert read(path)[0]["writer"] in ("1", "2")
    assert sorted(os.listdir(tmp_path)) == ["stop", "table", "temporary"]


def test_a_table_that_changes_while_it_is_saved_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may add to a table between the checksum and the disk: the file stays valid."""
    rows = np.zeros(5_000_000)

    class Adding(Os):
        def __getattr__(self, name: str) -> Any:
            if name == "write":
                np.add(rows, 1, out=rows)
            return super().__getattr__(name)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "os", Adding(nameless=True))
        write(tmp_path / "table", {}, {"rows": rows})
    saved = read(tmp_path / "table")[1]["rows"]
    assert 0 < saved[0] < saved[-1] < rows[-1]


def test_writes_that_take_less_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write may take only a part of what it is given."""

    class Hesitant(Os):
        def write(self, file: int, data: memoryview) -> int:
            return os.write(file, data[:7])

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "os", Hesitant(nameless=True))
        write(tmp_path / "table", HEADER, sample())
    assert_same(read(tmp_path / "table")[1], sample())


# --- where the file lies ------------------------------------------------------------------------


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Saving to a symbolic link replaces the file behind it, as opening it for writing would."""
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to("real/table")
    for arrays in (OLD, NEW):
        write(tmp_path / "latest", {}, arrays)
        assert (tmp_path / "latest").is_symlink()
        assert_same(read(tmp_path / "real" / "table")[1], arrays)
        assert os.listdir(tmp_path / "real") == ["table"]


def test_permissions_are_those_of_the_old_file(tmp_path: Path) -> None:
    """A new file gets what the umask leaves, one that replaces another keeps its permissions."""
    path = tmp_path / "table"
    before = os.umask(0o027)
    try:
        write(path, {}, OLD)
        assert path.stat().st_mode & 0o7777 == 0o640
        path.chmod(0o604)
        write(path, {}, NEW)
        assert path.stat().st_mode & 0o7777 == 0o604
    finally:
        os.umask(before)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
NOBODY = 65534


@as_root
def test_a_planted_file_does_not_choose_the_permissions(tmp_path: Path) -> None:
    """Neither whose the new file is nor who may write to it or become its owner by it."""
    path = tmp_path / "table"
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o4777)
    before = os.umask(0o022)
    try:
        write(path, {}, OLD)
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o7777, path.stat().st_uid) == (0o644, 0)
    path.chmod(0o6755)  # of one's own, only what is read, written and executed
    write(path, {}, NEW)
    assert path.stat().st_mode & 0o7777 == 0o755
    assert_same(read(path)[1], NEW)


@as_root
@pytest.mark.parametrize("path", ["link", "chain", "folder/table", "folder/../victim"])
def test_links_that_others_planted_are_not_followed(path: str, tmp_path: Path) -> None:
    """In a folder where everybody may write, as /tmp, links are followed that are one's own, or the
    folder's owner's; elsewhere all are."""
    private, public = tmp_path / "private", tmp_path / "public"
    (private / "folder").mkdir(parents=True)
    public.mkdir()
    (private / "victim").write_text("as it was")
    (public / "link").symlink_to(private / "victim")
    (public / "folder").symlink_to(private / "folder")
    (tmp_path / "own").symlink_to(public / "link")
    (public / "chain").symlink_to("../own")
    links = [public / "link", public / "folder"]
    for link in links:
        os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    public.chmod(0o1777)
    with pytest.raises(PermissionError, match=r"belongs to user 65534, .*; save to another path"):
        write(public / path, {}, NEW)
    assert (private / "victim").read_text() == "as it was"
    assert os.listdir(private / "folder") == []
    assert sorted(os.listdir(public)) == ["chain", "folder", "link"]
    for mode, owner, link_owner in ((0o777, 0, NOBODY), (0o1777, NOBODY, NOBODY), (0o1777, 0, 0)):
        for link in links:
            os.chown(link, link_owner, link_owner, follow_symlinks=False)
        os.chown(public, owner, owner)
        public.chmod(mode)
        (private / "victim").write_text("as it was")
        write(public / path, {}, NEW)
        assert_same(read(public / path)[1], NEW)
        saved = private / "folder" / "table" if path == "folder/table" else private / "victim"
        assert_same(read(saved)[1], NEW)


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    """As the operating system has it."""
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write(tmp_path / "one", {}, NEW)


@pytest.mark.parametrize(
    "missing",
    [
        ("O_TMPFILE",),
        ("O_TMPFILE", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "geteuid", "fchmod"),
    ],
    ids=["macOS", "Windows"],
)
def test_tables_are_saved_where_linux_is_not(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what other systems lack: the file has a name from the start, and takes its place."""
    monkeypatch.chdir(tmp_path)
    for arrays in (OLD, NEW):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "os", system := Os(nameless=True, missing=missing))
            write("table", HEADER, arrays)
            assert "link" not in system.asked
            assert system.asked.index("close") < system.asked.index("replace")
            assert_same(read("table")[1], arrays)
    assert sorted(os.listdir(tmp_path)) == ["table", "temporary"]


@both_ways
def test_any_name_that_a_file_can_have(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long names, names in any script, relative ones, as text or as a path."""
    monkeypatch.chdir(tmp_path)
    for name in ("table", "x" * 255, "織" * 85, "a b\n.weft"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "os", Os(nameless=nameless))
            write(name, {}, NEW)
        assert_same(read(Path(name))[1], NEW)
        assert_same(read(tmp_path / name)[1], NEW)
    assert len(os.listdir(tmp_path)) == 5
