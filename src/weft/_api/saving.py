"""Tables on disk: every rank calls, the master writes or reads, and all learn how it went.

save    all settle    the master copies piece by piece from the store to the file
load    the master reads the header    all make the table    the master copies the pieces into it
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from weft._api import session, tables
from weft._core import checkpoint, updaters
from weft._core.consistency import ssp
from weft.engines.base import Group
from weft.errors import DamagedFile, InvalidType, InvalidValue, UsageError

T = TypeVar("T")
#: the class of each kind of table, and how many dimensions it has
_KINDS = {"ArrayTable": (tables.ArrayTable, 1), "MatrixTable": (tables.MatrixTable, 2)}
#: what the metadata of a file says of a table; what is no string is written as JSON
_FIELDS: dict[str, type] = {
    "kind": str,
    "name": str,
    "updater": str,
    "options": dict,
    "state": list,
    "steps": int,
    "consistency": str,
    "slack": int,
    "exact": bool,
    "check_finite": bool,
}


def save(table: tables.Table, path: str | os.PathLike[str]) -> None:
    """Do what `table.save` does."""
    group, store, spec = table.group, table._store, table._spec
    where = _validate_path(group, "save", path)
    table.finish()
    group.barrier()  # from here on nobody adds, until all have heard that it is written
    try:
        store.settle()
    except Exception as error:
        group.refuse("save", error)
        raise
    group.barrier()
    entry = checkpoint.Entry(spec.dtype, spec.shape)
    entries = dict.fromkeys(("rows", *spec.updater.state), entry)
    _by_master(group, lambda: checkpoint.write(where, _metadata(table), entries, store.read_piece))


def save_all(folder: str | os.PathLike[str]) -> list[str]:
    """Save every table of this session to a folder, which is made if need be. Return the paths, in
    the order in which the tables were made.

    Every rank calls it. A file has its table's name, with `.weft` behind it. Raises what
    `table.save` raises, and UsageError if ranks have different tables left.
    """
    group = session.group()
    where = _validate_path(group, "save_all", folder)
    found = [cast(tables.Table, table) for table in session.tables()]
    names = group.all_gather("\n".join(table.name for table in found))
    if any(other != names[0] for other in names):
        told = "; ".join(f"rank {rank}: {own.splitlines()}" for rank, own in enumerate(names))
        raise UsageError(
            f"save_all() found different tables on different ranks ({told}); keep every table "
            "until all are saved, or save them one by one"
        )
    _by_master(group, lambda: Path(checkpoint.resolve(where)).mkdir(parents=True, exist_ok=True))
    paths = [str(where / f"{name}.weft") for name in _file_names([table.name for table in found])]
    for table, path in zip(found, paths, strict=True):
        save(table, path)
    return paths


def load(path: str | os.PathLike[str], *, updater: Any = None) -> tables.Table:
    """Make the table that was saved to a file, with its rows and the state of its updater.

    Every rank calls it; there may be more or fewer of them than there were. A table that had a
    function as its updater needs the same one again as `updater=`.

    Raises DamagedFile if the file is not, or no longer, a saved table, OutOfMemory,
    FileNotFoundError and the like, on every rank.
    """
    group = session.group()
    where = _validate_path(group, "load", path)
    with contextlib.ExitStack() as files:
        opened: list[checkpoint.SavedTable] = []  # by the master

        def read_header() -> dict[str, Any]:
            saved = files.enter_context(contextlib.closing(checkpoint.SavedTable(where)))
            opened.append(saved)
            return _parse_header(where, saved)

        header = _by_master(group, read_header)
        try:
            rule = _updater(where, header, updater)
        except Exception as error:
            group.refuse("load", error)
            raise
        slack = header["slack"]
        made: tables.Table = _KINDS[header["kind"]][0](
            *header["shape"],
            dtype=header["dtype"],
            updater=rule,
            consistency=ssp(slack) if slack else header["consistency"],
            exact=header["exact"],
            name=header["name"],
            check_finite=header["check_finite"],
        )

        def read_rows() -> None:
            for name, start, values in opened[0].pieces():
                made._store.write_piece(name, start, values)
            made._store.set_steps(header["steps"])

        _by_master(group, read_rows)
        return made


def _updater(where: Path, header: dict[str, Any], given: Any) -> updaters.Updater:
    """Return the updater that a table was saved with."""
    rule = updaters.from_saved(header["updater"], header["options"].items())
    if given is not None:
        rule = updaters.resolve(given)
    if rule is None or rule.name != header["updater"] or list(rule.state) != header["state"]:
        raise InvalidValue(
            f"{where} was saved with the updater {header['updater']!r} and its state "
            f"{header['state']}; pass the same one: weft.load(path, updater=...)"
        )
    return rule


def _metadata(table: tables.Table) -> dict[str, str]:
    """Return what a file says of a table besides its arrays."""
    spec = table._spec
    fields = {
        "kind": spec.kind,
        "name": spec.name,
        "updater": spec.updater.name,
        "options": dict(spec.updater.options),
        "state": list(spec.updater.state),
        "steps": table._store.steps,
        "consistency": spec.consistency.name,
        "slack": spec.consistency.slack,
        "exact": spec.exact,
        "check_finite": table._check_finite,
    }
    return {key: v if isinstance(v, str) else json.dumps(v) for key, v in fields.items()}


def _parse_header(where: Path, saved: checkpoint.SavedTable) -> dict[str, Any]:
    """Return what a table is made of again. Raise DamagedFile if no table can be like this: the
    checksum holds, but whoever can compute one may have written anything."""
    fields: dict[str, Any] = {}
    try:
        for key, kind in _FIELDS.items():
            text = saved.metadata[key]
            fields[key] = text if kind is str else json.loads(text)
            if type(fields[key]) is not kind:
                raise TypeError(key)
        [entry] = set(saved.entries.values())
        if list(saved.entries) != ["rows", *fields["state"]]:
            raise ValueError("state")
        if len(entry.shape) != _KINDS[fields["kind"]][1]:
            raise ValueError("shape")
        if not 0 <= fields["steps"] < 2**62 or not 0 <= fields["slack"] < 2**62:
            raise ValueError("steps or slack")
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DamagedFile(
            f"{where} holds no table that this release knows ({error!r:.100}); was it saved by it?"
        ) from None
    return {**fields, "shape": entry.shape, "dtype": entry.dtype.name}


def _by_master(group: Group, work: Callable[[], T]) -> T:
    """Return what the master's work returns, or raise what it raises, on every rank."""
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


def _validate_path(group: Group, call: str, path: object) -> Path:
    """Return a path. Refuse what is none, and tell the others instead of having them wait."""
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    error = InvalidType(f"path={path!r}: expected a path, as a string or a pathlib.Path")
    group.refuse(call, error)
    raise error


def _file_names(names: list[str]) -> list[str]:
    """Return names of files, none twice, for tables of these names."""
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
