"""Tables on disk: every rank calls, the master writes or reads, and all learn how it went."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from weft._api import session, tables
from weft._core import checkpoint, updaters
from weft._core.consistency import ssp
from weft.engines.base import Group
from weft.errors import DamagedFile, InvalidType, InvalidValue, UsageError

T = TypeVar("T")
_KINDS = {"ArrayTable": tables.ArrayTable, "MatrixTable": tables.MatrixTable}


def save(table: tables.Table, path: str | os.PathLike[str]) -> None:
    """What `table.save` does."""
    group = table.group
    where = _checked(group, "save", path)
    table.finish()
    group.barrier()  # from here on nobody adds, until all have heard that it is written

    def write() -> None:
        arrays = table._store.arrays()  # under bsp this applies the last clock: count steps after
        checkpoint.write(where, _header(table), arrays)

    _by_master(group, write)


def save_all(folder: str | os.PathLike[str]) -> list[str]:
    """Save every table of this session to a folder, which is made if need be; the paths, in the
    order in which the tables were made.

    Every rank calls it. A file has its table's name, with `.weft` behind it. Raises what
    `table.save` raises, and UsageError if ranks have different tables left.
    """
    group = session.group()
    where = _checked(group, "save_all", folder)
    found = [cast(tables.Table, table) for table in session.tables()]
    names = group.all_gather("\n".join(table.name for table in found))
    if any(other != names[0] for other in names):
        told = "; ".join(f"rank {rank}: {own.splitlines()}" for rank, own in enumerate(names))
        raise UsageError(
            f"save_all() found different tables on different ranks ({told}); keep every table "
            "until all are saved, or save them one by one"
        )
    _by_master(group, lambda: where.mkdir(parents=True, exist_ok=True))
    paths = [str(where / f"{name}.weft") for name in _file_names([table.name for table in found])]
    for table, path in zip(found, paths, strict=True):
        save(table, path)
    return paths


def load(path: str | os.PathLike[str], *, updater: Any = None) -> tables.Table:
    """The table that was saved to a file, with its rows and the state of its updater.

    Every rank calls it; there may be more or fewer of them than there were. A table that had a
    function as its updater needs the same one again as `updater=`.

    Raises DamagedFile if the file is not, or no longer, a saved table, FileNotFoundError and the
    like, on every rank.
    """
    group = session.group()
    where = _checked(group, "load", path)
    held: dict[str, np.ndarray[Any, Any]] = {}

    def read() -> dict[str, Any]:
        header, arrays = checkpoint.read(where)
        _check_header(where, header, arrays)
        held.update(arrays)
        return header

    header = _by_master(group, read)
    try:
        rule = _updater(where, header, updater)
    except Exception as error:
        group.refuse("load", error)
        raise
    slack = header["slack"]
    made: tables.Table = _KINDS[header["kind"]](
        *header["shape"],
        dtype=header["dtype"],
        updater=rule,
        consistency=ssp(slack) if slack else header["consistency"],
        exact=header["exact"],
        name=header["name"],
        check_finite=header["check_finite"],
    )
    if group.is_master:
        for name, array in made._store.arrays().items():
            array[...] = held[name]
        made._store.steps = header["steps"]
    group.barrier()
    return made


def _updater(where: Path, header: dict[str, Any], given: Any) -> updaters.Updater:
    """The updater that a table was saved with."""
    rule = updaters.from_saved(header["updater"], [(k, v) for k, v in header["options"]])
    if given is not None:
        rule = updaters.resolve(given)
    if rule is None or rule.name != header["updater"] or list(rule.state) != header["state"]:
        raise InvalidValue(
            f"{where} was saved with the updater {header['updater']!r} and its state "
            f"{header['state']}; pass the same one: weft.load(path, updater=...)"
        )
    return rule


def _header(table: tables.Table) -> dict[str, Any]:
    spec = table._spec
    return {
        "kind": spec.kind,
        "shape": list(spec.shape),
        "dtype": spec.dtype.name,
        "updater": spec.updater.name,
        "options": [list(option) for option in spec.updater.options],
        "state": list(spec.updater.state),
        "consistency": spec.consistency.name,
        "slack": spec.consistency.slack,
        "exact": spec.exact,
        "name": spec.name,
        "check_finite": table._check_finite,
        "steps": table._store.steps,
    }


def _check_header(where: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """The checksum holds, so this was written by weft; but perhaps not as a table."""
    expected = {"rows", *header.get("state", ())}
    if header.get("kind") not in _KINDS or set(arrays) != expected:
        raise DamagedFile(f"{where} holds no table that this release knows; was it saved by it?")
    if any(list(array.shape) != header["shape"] for array in arrays.values()):
        raise DamagedFile(f"{where} holds arrays of other shapes than its table; save it again")


def _by_master(group: Group, work: Callable[[], T]) -> T:
    """What the master's work returns, or raises, on every rank."""
    outcome: tuple[Any, Exception | None] = None, None
    if group.is_master:
        try:
            outcome = work(), None
        except Exception as error:
            outcome = None, error
    result, raised = group.broadcast(outcome)
    if raised is not None:
        raise raised
    return cast(T, result)


def _checked(group: Group, call: str, path: object) -> Path:
    """A path; what is none is refused, and the others are told instead of waiting."""
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    error = InvalidType(f"path={path!r}: expected a path, as a string or a pathlib.Path")
    group.refuse(call, error)
    raise error


def _file_names(names: list[str]) -> list[str]:
    """Names of files, none twice, for tables of these names."""
    found: list[str] = []
    for name in names:
        plain = "".join(letter if letter.isalnum() or letter in "-_. " else "_" for letter in name)
        plain = plain.strip(". ") or "table"
        number, candidate = 1, plain
        while candidate in found:
            number += 1
            candidate = f"{plain} {number}"
        found.append(candidate)
    return found
