"""A table on disk: a header, arrays, and a checksum.

    bytes   in the file
        8   MAGIC: its line ends do not survive being taken for text
        4   the version of the format, which all versions keep here
        4   the length of the description
      ...   the description, as JSON: {"header": ..., "arrays": [[name, dtype, shape], ...]}
       32   SHA-256 of all above
      ...   the arrays, one after the other, in the byte order that their dtype says
       32   SHA-256 of all above but the first checksum

Numbers are little-endian. The first checksum lets the description be believed before the arrays
are read, the second both together. Sizes are compared with the file's before memory is taken for
them, since a checksum says that nothing was damaged and not that nobody lied.

A file is written without a name, and takes the target's place when it is complete:

    nameless  --write, fsync, link-->  NAME.TOKEN.unfinished  --rename-->  NAME  --fsync--> folder

Whoever is killed leaves the old file or the new one, and nothing beside unless killed between the
link and the rename. File systems without nameless files (NFS) get the second name from the start.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from weft._core.elements import Array
from weft.errors import DamagedFile, InvalidType, InvalidValue

MAGIC = b"\x93weft\r\n\x1a"
VERSION = 1
_PREFIX = struct.Struct("<8sII")
_CHECKSUM = 32
#: how much is copied, checksummed and written at a time: what the cache of a core holds
_CHUNK = 1 << 20
#: how long a description may be, and so how much is read before a checksum has been seen
_LONGEST = 1 << 24
#: what arrays may hold, as files say it; long doubles differ from machine to machine
_DTYPES = {
    dtype.str: dtype
    for code in "?bhiqBHIQefdFD"
    for dtype in (np.dtype("<" + code), np.dtype(">" + code))
}
_AGAIN = "load another copy of it, or save the table again"
_OTHER = "pass the path of a file that a table was saved to"


def write(
    path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Mapping[str, Array]
) -> None:
    """Put a table into a file, which is afterwards the new one, or untouched.

    The header is kept as JSON keeps it: tuples come back as lists. The arrays are C-contiguous;
    if others change them meanwhile, the file has some of the changes and is valid.

    Raises InvalidType and InvalidValue for what a file cannot hold, and OSError.
    """
    prefix = _described(header, arrays)
    with _replacing(os.path.realpath(path)) as file:
        writer = _Writer(file)
        writer.put(memoryview(prefix))
        writer.put_checksum()
        for array in arrays.values():
            writer.put(_bytes_of(array))
        writer.put_checksum()


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header and the arrays of a file that `write` wrote; the arrays are the caller's own.

    Raises DamagedFile for a file that is not exactly as it was written, and OSError.
    """
    # a pipe is to be refused, not waited for
    with open(path, "rb", buffering=0, opener=_open_without_waiting) as file:
        reader = _Reader(file, os.fspath(path))
        header, places = _understood(reader)
        arrays = {}
        for name, dtype, shape in places:
            try:
                arrays[name] = np.empty(shape, dtype)
            except ValueError as error:  # too many dimensions, or too long ones beside a 0
                reader.refuse(f"has an array {name!r} that NumPy cannot make ({error})")
            reader.fill(_bytes_of(arrays[name]))
        reader.check()
    return header, {name: _native(array) for name, array in arrays.items()}


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _bytes_of(array: Array) -> memoryview:
    return np.asarray(array).reshape(-1).view(np.uint8).data


def _native(array: Array) -> Array:
    if array.dtype.isnative:
        return array
    swapped: Array = array.byteswap(inplace=True).view(array.dtype.newbyteorder("="))
    return swapped


# --- what a file says of its arrays: written, and understood ------------------------------------


def _described(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """The start of the file, up to the first checksum."""
    for name, array in arrays.items():
        _refuse_unfit(name, array)
    places = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    try:
        text = json.dumps({"header": dict(header), "arrays": places}).encode()
    except (TypeError, ValueError) as error:
        raise InvalidType(
            f"the header {header!r} cannot be saved, since JSON cannot hold it ({error}); "
            "use numbers, strings, lists and dictionaries"
        ) from error
    if len(text) > _LONGEST:
        raise InvalidValue(
            f"the header and the names of the arrays take {len(text):,} bytes, and a saved table "
            f"has room for {_LONGEST:,}; put what is long into an array"
        )
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def _refuse_unfit(name: str, array: Array) -> None:
    if not isinstance(name, str):
        raise InvalidType(f"an array is called {name!r}; use a string")
    if not isinstance(array, np.ndarray):
        raise InvalidType(f"{name!r} is of type {type(array).__name__}; save a NumPy array")
    if array.dtype.str not in _DTYPES:
        raise InvalidType(
            f"array {name!r} has dtype {array.dtype}, which a saved table cannot hold; convert it "
            "to bool, integers, float16, float32, float64, complex64 or complex128"
        )
    if not array.flags.c_contiguous:
        raise InvalidValue(
            f"array {name!r} is not C-contiguous (strides {array.strides}); "
            "save numpy.ascontiguousarray of it"
        )


_Place = tuple[str, np.dtype[Any], tuple[int, ...]]


def _understood(reader: _Reader) -> tuple[dict[str, Any], list[_Place]]:
    """The header, and what arrays follow, which have exactly the size of the rest of the file."""
    least = _PREFIX.size + 2 * _CHECKSUM
    start = reader.take(min(_PREFIX.size, reader.size))
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        reader.refuse("is not a saved table of weft", _OTHER)
    if len(start) < _PREFIX.size:
        reader.refuse(f"ends after {reader.size:,} of at least {least:,} bytes")
    _, version, length = _PREFIX.unpack(start)
    if version > VERSION:
        reader.refuse(
            f"was written by a newer version (format {version}, this release reads {VERSION})",
            "update weft with `pip install --upgrade weft`, or save the table with this release",
        )
    if version < VERSION or length > _LONGEST:
        reader.refuse("is damaged in its first bytes")
    if reader.size < least + length:
        reader.refuse(f"ends after {reader.size:,} of at least {least + length:,} bytes")
    text = reader.take(length)
    reader.check()
    try:
        header, places = _parsed(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reader.refuse(f"has a description that makes no sense ({error!r:.100})")
    whole = least + length + sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in places)
    if reader.size < whole:
        reader.refuse(f"ends after {reader.size:,} of {whole:,} bytes")
    if reader.size > whole:
        reader.refuse(f"goes on for {reader.size - whole:,} bytes after its end")
    return header, places


def _parsed(text: bytes) -> tuple[dict[str, Any], list[_Place]]:
    description = json.loads(text)
    header, entries = description["header"], description["arrays"]
    if not isinstance(header, dict):
        raise TypeError(header)
    places = []
    for name, dtype, shape in entries:
        # 64 dimensions are NumPy's limit; the product of more could take forever to compute
        if len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            raise ValueError(shape)
        places.append((name, _DTYPES[dtype], tuple(shape)))
    names = {name for name, _, _ in places}
    if len(names) < len(places) or not all(isinstance(name, str) for name in names):
        raise ValueError("names of arrays")
    return header, places


# --- bytes and their checksum: out, and in ------------------------------------------------------


class _Writer:
    """Writes to a descriptor, and keeps the checksum of what it wrote."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._checksum = hashlib.sha256()
        self._chunk = memoryview(bytearray(_CHUNK))

    def put(self, data: memoryview) -> None:
        for at in range(0, len(data), _CHUNK):
            part = self._chunk[: min(_CHUNK, len(data) - at)]
            # a copy, since other processes may change the data between the next two lines
            part[:] = data[at : at + len(part)]
            self._checksum.update(part)
            self._put_all(part)

    def put_checksum(self) -> None:
        self._put_all(memoryview(self._checksum.digest()))

    def _put_all(self, part: memoryview) -> None:
        while part:
            part = part[os.write(self._file, part) :]


class _Reader:
    """Reads a file in order, and keeps the checksum of what it read."""

    def __init__(self, file: io.FileIO, path: str) -> None:
        self._file = file
        self._path = path
        self._checksum = hashlib.sha256()
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            self.refuse("is not a saved table of weft but a device or a pipe", _OTHER)
        self.size = status.st_size

    def fill(self, data: memoryview) -> None:
        for at in range(0, len(data), _CHUNK):
            part = data[at : at + _CHUNK]
            self._fill_all(part)
            self._checksum.update(part)

    def take(self, length: int) -> bytes:
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)

    def check(self) -> None:
        found = bytearray(_CHECKSUM)
        self._fill_all(memoryview(found))
        if found != self._checksum.digest():
            self.refuse("is damaged: its checksum does not match")

    def refuse(self, what: str, next_step: str = _AGAIN) -> NoReturn:
        raise DamagedFile(f"{self._path} {what}; {next_step}") from None

    def _fill_all(self, part: memoryview) -> None:
        while part:
            count = self._file.readinto(part)
            if not count:  # somebody cut it since it was opened
                self.refuse(f"ends after {self._file.tell():,} of {self.size:,} bytes")
            part = part[count:]


# --- how a file takes another one's place -------------------------------------------------------


@contextlib.contextmanager
def _replacing(target: str) -> Iterator[int]:
    """A descriptor to write to. What was written is then the target; after an error it is gone."""
    folder, name = os.path.split(target)
    unfinished = f"{name[:50]}.{secrets.token_hex(8)}.unfinished"
    permissions = _permissions(target)
    with contextlib.ExitStack() as afterwards:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        afterwards.callback(os.close, at)
        afterwards.callback(_remove, unfinished, at)
        file, nameless = _open_unfinished(unfinished, at)
        afterwards.callback(os.close, file)
        if permissions is not None:
            os.fchmod(file, permissions)
        yield file
        os.fsync(file)
        if nameless:
            os.link(f"/proc/self/fd/{file}", unfinished, dst_dir_fd=at)
        os.replace(unfinished, name, src_dir_fd=at, dst_dir_fd=at)
        os.fsync(at)


def _permissions(target: str) -> int | None:
    """Those of the file to be replaced, if there is one and the caller may write to it."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(mode):
        raise InvalidValue(f"{target} is a device or a pipe; save the table to a file")
    # renaming would not ask, and a file that is write-protected is so on purpose
    os.close(os.open(target, os.O_WRONLY))
    return stat.S_IMODE(mode)


def _open_unfinished(name: str, folder: int) -> tuple[int, bool]:
    """A new file in the folder, and whether it is nameless."""
    with contextlib.suppress(OSError):  # what is wrong for both kinds, the second one says
        return os.open(".", os.O_WRONLY | os.O_TMPFILE, 0o666, dir_fd=folder), True
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder), False


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # it never had this name, or has another now
        os.unlink(name, dir_fd=folder)
