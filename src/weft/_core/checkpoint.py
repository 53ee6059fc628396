"""A table on disk: a safetensors file, which every tool that knows this format opens.

    bytes   in the file
        8   the length of the header, little-endian
      ...   the header, JSON with spaces behind it up to a multiple of 8:
            {"__metadata__": {"weft_format": "2", "checksum": "...", ...},
             "rows": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}, ...}
      ...   the arrays, one after the other, little-endian

The metadata maps strings to strings: what the caller says of the table, and

    weft_format       the version of this layout
    checksum          SHA-256 of the arrays
    header_checksum   SHA-256 of all before the arrays, with zeros in place of this number
    complex           the arrays of complex numbers, as a JSON list. The format has none: they are
                      floats with one dimension more, of length 2, for real and imaginary parts

Arrays are written and read in pieces, so that no more than one piece is in memory. Their checksum
is known last; the header is then written again, with it. When a file is read, the header is
trusted if its own checksum is right and it describes the file to the last byte: a checksum shows
that nothing was damaged, but not that nobody lied.

A file is written without a name, and replaces the target when it is complete:

    nameless  --write, fsync, link-->  NAME.TOKEN.unfinished  --rename-->  NAME  --fsync--> folder

A process that is killed leaves the old file or the new one, and nothing else unless it was killed
between the link and the rename. Where there are no nameless files (NFS, macOS, Windows) the file
has the second name from the start.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from weft._core.arithmetic import Array
from weft.errors import DamagedFile, InvalidType, InvalidValue

VERSION = 2
#: how many bytes are read or written at a time; a piece has at least one row
PIECE = 16 << 20
#: how long a header may be, which is read before any checksum has been verified
_LONGEST = 1 << 20
_LENGTH = struct.Struct("<Q")
#: safetensors' names of dtypes; long doubles differ from machine to machine
_DTYPES = {"BOOL": np.dtype("?")} | {
    f"{kind.upper()}{8 * size}": np.dtype(f"<{kind}{size}")
    for kind, sizes in {"u": (1, 2, 4, 8), "i": (1, 2, 4, 8), "f": (2, 4, 8)}.items()
    for size in sizes
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COMPLEX: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("<f4"): np.dtype("<c8"),
    np.dtype("<f8"): np.dtype("<c16"),
}
_FLOATS = {pair: single for single, pair in _COMPLEX.items()}
_BLANK = "0" * 64
#: the fields of the metadata that this module writes itself
_OWN_FIELDS = {"weft_format", "checksum", "header_checksum", "complex"}
#: what precedes the header's checksum, and occurs nowhere else: in strings quotes are escaped
_SEAL = b'"header_checksum":"'
#: how files began before they were safetensors files
_FIRST_FORMAT = b"\x93weft\r\n\x1a"
_AGAIN = "load another copy of it, or save the table again"
_OTHER = "pass the path of a file that a table was saved to"


class Entry(NamedTuple):
    """One array of a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def piece_nbytes(self) -> int:
        """Return the bytes of the largest piece, which has at least one row."""
        row = prod(self.shape[1:]) * self.dtype.itemsize
        return min(self.nbytes, max(1, PIECE // row) * row)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield where each piece starts and stops, in rows."""
        rows = max(1, PIECE // (prod(self.shape[1:]) * self.dtype.itemsize))
        for start in range(0, self.shape[0], rows):
            yield start, min(start + rows, self.shape[0])


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    entries: Mapping[str, Entry],
    read_piece: Callable[[str, int, int], Array],
) -> None:
    """Write a table to a file, which is afterwards either complete or as it was before.

    `read_piece(name, start, stop)` returns a copy of some rows of an array.

    Raises InvalidType and InvalidValue for what a file cannot hold, and OSError.
    """
    header = _header(metadata, entries, checksum=_BLANK)
    with _replacing(resolve(path)) as file:
        _write_all(file, memoryview(header))
        checksum = hashlib.sha256()
        for name, entry in entries.items():
            little = entry.dtype.newbyteorder("<")
            for start, stop in entry.pieces():
                data = _bytes_of(np.ascontiguousarray(read_piece(name, start, stop), little))
                checksum.update(data)
                _write_all(file, data)
        os.lseek(file, 0, os.SEEK_SET)
        header = _header(metadata, entries, checksum=checksum.hexdigest())
        seal = hashlib.sha256(header).hexdigest().encode()
        _write_all(file, memoryview(header.replace(_SEAL + _BLANK.encode(), _SEAL + seal)))


def _header(metadata: Mapping[str, str], entries: Mapping[str, Entry], *, checksum: str) -> bytes:
    """Return all that precedes the arrays, with zeros in place of its own checksum."""
    if taken := _OWN_FIELDS & metadata.keys():
        raise InvalidValue(f"metadata has {sorted(taken)}, which the format uses itself")
    described: dict[str, Any] = {"__metadata__": {}}
    offset, paired = 0, []
    for name, entry in entries.items():
        dtype: np.dtype[Any] = entry.dtype.newbyteorder("<")
        shape = entry.shape
        if dtype in _FLOATS:
            dtype, shape = _FLOATS[dtype], (*shape, 2)
            paired.append(name)
        if dtype not in _CODES:
            raise InvalidType(
                f"array {name!r} has dtype {entry.dtype}, which a saved table cannot hold; convert "
                "it to bool, integers, float16, float32, float64, complex64 or complex128"
            )
        if name in described:
            raise InvalidValue(f"an array called {name!r} cannot be saved; give it another name")
        end = offset + entry.nbytes
        described[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    described["__metadata__"] = {
        "weft_format": str(VERSION),
        **metadata,
        **({"complex": json.dumps(paired)} if paired else {}),
        "checksum": checksum,
        "header_checksum": _BLANK,
    }
    try:
        text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"a name cannot be saved, since UTF-8 cannot hold it ({error})"
        ) from None
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST:
        raise InvalidValue(
            f"the options of the table and the names of its arrays take {len(text):,} bytes, and a "
            f"saved table has room for {_LONGEST:,}; use shorter names"
        )
    return _LENGTH.pack(len(text)) + text


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


class SavedTable:
    """A saved table, open for reading: its metadata, what arrays there are, and their pieces.
    Raises DamagedFile for a file that is not exactly as it was written, and OSError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        # a pipe must be refused, not waited for
        self._file = open(path, "rb", buffering=0, opener=_open_without_waiting)  # noqa: SIM115
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                self._refuse("is not a saved table of weft but a device or a pipe", _OTHER)
            self._size = status.st_size
            self.metadata, self.entries = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def pieces(self) -> Iterator[tuple[str, int, Array]]:
        """Yield each array's name, the row a piece of it starts at, and the piece. Whether they are
        as they were written is known only at the end: raises DamagedFile then."""
        checksum = hashlib.sha256()
        for name, entry in self.entries.items():
            for start, stop in entry.pieces():
                piece = np.empty((stop - start, *entry.shape[1:]), entry.dtype)
                data = _bytes_of(piece)
                self._fill(data)
                checksum.update(data)
                yield name, start, piece
        if checksum.hexdigest() != self._checksum:
            self._refuse("is damaged: its checksum does not match")

    def _read_header(self) -> tuple[dict[str, str], dict[str, Entry]]:
        prefix = self._take(min(self._size, _LENGTH.size)).ljust(_LENGTH.size, b"\0")
        if prefix == _FIRST_FORMAT:
            self._refuse(
                "was saved in weft's first format, which this release no longer reads",
                "load it with the weft that saved it, keep table.get() with numpy.save, and make "
                "the table from that",
            )
        [length] = _LENGTH.unpack(prefix)
        if length > _LONGEST:
            self._refuse("is not a saved table of weft", _OTHER)
        start = _LENGTH.size + length
        if self._size < start:
            self._refuse(f"ends after {self._size:,} of at least {start:,} bytes")
        text = self._take(length)
        try:
            header = json.loads(text, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            self._refuse(f"is damaged: its header cannot be read ({error!r:.100})")
        metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or "weft_format" not in metadata:
            self._refuse(
                "is not a saved table of weft, but perhaps another safetensors file",
                "read its arrays with safetensors.numpy.load_file, and make a table from one",
            )
        version = str(metadata.pop("weft_format"))
        if version != str(VERSION) and version.isdecimal() and int(version[:9]) > VERSION:
            self._refuse(
                f"was written by a newer version (format {version:.9}, this release reads "
                f"{VERSION})",
                "update weft with `pip install --upgrade weft`, or save the table with this "
                "release",
            )
        before, seal, after = (prefix + text).partition(_SEAL)
        blank = before + seal + _BLANK.encode() + after[len(_BLANK) :]
        checksum = hashlib.sha256(blank).hexdigest()
        if version != str(VERSION) or after[: len(_BLANK)] != checksum.encode():
            self._refuse("is damaged: its checksum does not match")
        try:
            entries, end = _parse_entries(header, metadata)
            self._checksum = metadata.pop("checksum")
            del metadata["header_checksum"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._refuse(f"has a header that makes no sense ({error!r:.100})")
        if self._size < start + end:
            self._refuse(f"ends after {self._size:,} of {start + end:,} bytes")
        if self._size > start + end:
            self._refuse(f"goes on for {self._size - start - end:,} bytes after its end")
        return metadata, entries

    def _take(self, length: int) -> bytes:
        data = bytearray(length)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, data: memoryview) -> None:
        while data:
            count = self._file.readinto(data)
            if not count:  # it was truncated since it was opened
                self._refuse(f"ends after {self._file.tell():,} of {self._size:,} bytes")
            data = data[count:]

    def _refuse(self, what: str, next_step: str = _AGAIN) -> NoReturn:
        raise DamagedFile(f"{self._path} {what}; {next_step}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary. Raise ValueError if it has a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is there twice")
    return values


def _parse_entries(
    header: Mapping[str, Any], metadata: dict[str, Any]
) -> tuple[dict[str, Entry], int]:
    """Return the arrays of a file, and how many bytes they take. Raises ValueError, TypeError or
    KeyError unless they are described as `write` does it: without gaps, none of them empty."""
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("metadata other than strings")
    paired = json.loads(metadata.pop("complex", "[]"))
    if not isinstance(paired, list) or not all(name in header for name in paired):
        raise ValueError(paired)
    entries, end = {}, 0
    for name, described in header.items():
        if len(described) != 3:
            raise ValueError(described)
        dtype, shape = _DTYPES[described["dtype"]], described["shape"]
        # 64 dimensions are NumPy's limit; the product of more could take forever to compute
        if not isinstance(shape, list) or not 1 <= len(shape) <= 64:
            raise ValueError(shape)
        if not all(type(length) is int and 0 < length < 2**63 for length in shape):
            raise ValueError(shape)
        start, end = end, end + dtype.itemsize * prod(shape)
        offsets = described["data_offsets"]
        if offsets != [start, end] or not all(type(offset) is int for offset in offsets):
            raise ValueError(offsets)
        if name in paired:
            if shape[-1] != 2 or len(shape) < 2:
                raise ValueError(shape)
            dtype, shape = _COMPLEX[dtype], shape[:-1]
        entries[name] = Entry(dtype, tuple(shape))
    return entries, end


# --- how a file replaces another ----------------------------------------------------------------


def resolve(path: str | os.PathLike[str]) -> str:
    """Return a path with its links resolved. Raises PermissionError for a link that another user
    planted where everybody may write, such as in /tmp. Linux refuses to follow these too, but only
    when it resolves the path itself."""
    given = os.fsdecode(path)
    if not hasattr(os, "geteuid"):  # Windows
        return os.path.realpath(given)
    resolved, links = os.sep, 0
    rest = os.path.join("" if os.path.isabs(given) else os.getcwd(), given).split(os.sep)[::-1]
    while rest:
        part = rest.pop()
        if part == "..":
            resolved = os.path.dirname(resolved)
        elif part not in ("", "."):
            here = os.path.join(resolved, part)
            if not os.path.islink(here):
                resolved = here
                continue
            _refuse_planted_link(here, resolved)
            links += 1
            if links > 40:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), given)
            target = os.readlink(here)
            resolved = os.sep if os.path.isabs(target) else resolved
            rest += target.split(os.sep)[::-1]
    return resolved


def _refuse_planted_link(link: str, folder: str) -> None:
    owner, around = os.lstat(link).st_uid, os.stat(folder)
    everybody = around.st_mode & stat.S_ISVTX and around.st_mode & stat.S_IWOTH
    if everybody and owner not in (os.geteuid(), around.st_uid):
        raise PermissionError(
            errno.EACCES,
            f"this link belongs to user {owner}, in a folder where everybody may write; save to "
            "another path",
            link,
        )


@contextlib.contextmanager
def _replacing(target: str) -> Iterator[int]:
    """Open a file to write to. At the end it replaces the target; after an error it is removed."""
    folder, name = os.path.split(target)
    unfinished = f"{name[:50]}.{secrets.token_hex(8)}.unfinished"
    permissions = _permissions(target)
    with contextlib.ExitStack() as afterwards:
        at = None
        if hasattr(os, "O_DIRECTORY"):
            at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            afterwards.callback(os.close, at)
        else:  # Windows, where folders have no descriptors
            unfinished, name = os.path.join(folder, unfinished), target
        afterwards.callback(_remove, unfinished, at)
        file, nameless = _open_unfinished(unfinished, at)
        try:
            if permissions is not None:
                os.fchmod(file, permissions)
            yield file
            os.fsync(file)
            if nameless:
                os.link(f"/proc/self/fd/{file}", unfinished, dst_dir_fd=at)
        finally:
            os.close(file)
        os.replace(unfinished, name, src_dir_fd=at, dst_dir_fd=at)
        if at is not None:
            os.fsync(at)


def _permissions(target: str) -> int | None:
    """Return the permissions of the file to be replaced, if it exists and is the caller's own.
    Raises PermissionError if the caller may not write to it."""
    try:
        status = os.stat(target, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidValue(f"{target} is a device or a pipe; save the table to a file")
    # a rename would replace even a write-protected file, which is protected on purpose
    os.close(os.open(target, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)))
    # not another user's: whoever can plant a file could choose who may write to ours
    own = hasattr(os, "geteuid") and status.st_uid == os.geteuid()
    return status.st_mode & 0o777 if own else None


def _open_unfinished(name: str, folder: int | None) -> tuple[int, bool]:
    """Open a new file in the folder. Return its descriptor, and whether it is nameless."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # what is wrong with both ways, the second one raises
            return os.open(".", os.O_WRONLY | os.O_TMPFILE, 0o666, dir_fd=folder), True
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(name, flags, 0o666, dir_fd=folder), False


def _remove(name: str, folder: int | None) -> None:
    with contextlib.suppress(FileNotFoundError):  # it never had this name, or was renamed
        os.unlink(name, dir_fd=folder)
