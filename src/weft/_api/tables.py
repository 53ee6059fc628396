"""`ArrayTable` and `MatrixTable`: parameters that the ranks of a group keep together.

    table.get(rows)              table.add(delta, rows)
      validate rows, room          validate delta and rows       _core/tables.py
      store.get(ids, out)          store.add(delta, ids)         engines/
      as the user's library has it                               adapters/

The `_async` forms validate at once and leave the rest to a thread, in order.

`save`, `save_all` and `load` keep tables on disk: every rank calls, the master writes or reads the
file, and all learn the outcome.

    save    all settle    the master copies piece by piece from the store to the file
    load    the master reads the header    all make the table    the master copies pieces into it

First the tables, then their options, then saving and loading.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from weft._api import session
from weft._core import checkpoint, tables, updaters
from weft._core.arguments import whole
from weft._core.arithmetic import Array
from weft._core.rows import rows_on
from weft._core.tables import (
    Consistency,
    Ids,
    Interrupted,
    TableSpec,
    as_array,
    as_delta,
    as_ids,
    as_out,
    ssp,
    validate_dtype,
    validate_size,
)
from weft._core.updaters import Updater
from weft.adapters import lookup
from weft.engines.background import Background
from weft.engines.base import Group, Handle
from weft.engines.refusals import validate_memory
from weft.errors import DamagedFile, InvalidType, InvalidValue, UsageError

_LONGEST_NAME = 100

_NUMPY = lookup.named("numpy")

#: what errors call an array with which a table starts
_START = "the array to start from"


class Table:
    """Give both kinds of table what they have in common."""

    #: the adapter of this rank's results: that of the array which the table was made from
    _library: Any

    def __init__(
        self,
        make_spec: Callable[[], tuple[TableSpec, Array | None]],
        like: Any,
        *,
        check_finite: bool,
    ) -> None:
        group = session.group()
        try:
            spec, values = make_spec()
            if spec.on_device and not group.has_device_tables:
                raise InvalidValue(
                    f"device={spec.device!r} in a group over hosts, whose tables are in memory of "
                    "the hosts; leave device= out: get and add take tensors on a GPU all the same"
                )
        except Exception as error:
            group.refuse(type(self).__name__, error)
            raise
        self._spec, self._check_finite = spec, check_finite
        self._library = lookup.of(like) or _NUMPY
        #: how deltas and results are taken where rows are on a device; None where they are not
        self._on_device: Any = rows_on(spec.device) if spec.on_device else None
        self._as_ids: Callable[[Any], Ids] = partial(as_ids, n_rows=spec.n_rows)
        if self._on_device is not None:
            self._as_ids = partial(self._on_device.as_row_ids, spec=spec)
        self._store = group.make_store(spec, values)
        self._background = Background(f"table {spec.name!r}")
        self._group = group
        session.register(self)

    # properties

    @property
    def name(self) -> str:
        """Return the name that was given, else "table" and its number in the order of creation."""
        return self._spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of all rows."""
        return self._spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the rows."""
        return self._spec.dtype

    @property
    def group(self) -> Group:
        """Return the group whose ranks keep the table, in its latest generation."""
        return self._group.latest

    @property
    def staleness(self) -> int:
        """Return by how many adds the slowest rank was behind when this rank last called `get`."""
        return self._store.staleness

    @property
    def interrupted(self) -> tuple[Interrupted, ...]:
        """List the adds that ranks had begun when they died: the rank, and the rows that may be
        half updated."""
        return self._store.interrupted()

    def __len__(self) -> int:
        return self._spec.n_rows

    def __repr__(self) -> str:
        return f"<{self._spec}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return a copy of all rows for `numpy.asarray`. Raises what `get` raises."""
        if copy is False:  # NumPy 2 asks for the rows themselves
            raise InvalidValue(
                f"copy=False for {self!r}: other ranks change the rows, so their values are always "
                "a copy; leave copy= out"
            )
        self._background.finish()
        values = self._store.get(None, None)
        if self._on_device is not None:
            values = self._on_device.to_host(values)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, rows: Any) -> Any:
        """Refuse what would hide a copy, and a loop of a call for each row. Raises InvalidType."""
        raise InvalidType(
            f"{self!r} has no elements to index or to loop over: write table.get(rows), or "
            "table.get() for all"
        )

    def __setitem__(self, rows: Any, values: Any) -> None:
        """Refuse: other ranks add at the same time. Raises InvalidType."""
        raise self._assigned_error()

    def __iadd__(self, other: Any) -> Any:
        """Refuse: NumPy would put an array in the table's place. Raises InvalidType."""
        raise self._assigned_error()

    __isub__ = __imul__ = __itruediv__ = __iadd__

    def _assigned_error(self) -> InvalidType:
        return InvalidType(
            f"{self!r} cannot be assigned to: write table.add(delta), or table.add(delta, rows), "
            "which does what its updater says"
        )

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled. Raises InvalidType."""
        raise InvalidType(
            f"{self!r} cannot be copied or sent, for it is memory that its ranks share: send "
            "table.get(), or keep it by table.save(path)"
        )

    # reading and updating

    def get(
        self,
        rows: Any = None,
        *,
        out: Any = None,
        timeout: float | None = None,
        consistency: Consistency | None = None,
    ) -> Any:
        """Return a copy of all rows, or of these, in the order given.

        `rows`: a row id, several of them, or a slice, which is taken as NumPy takes it.
        `out`: an array of the result's shape and dtype, which is written to and returned.
        `consistency`: `weft.ssp(k)` to accept rows that have everybody's adds but for the last k of
        this rank's count. Over hosts they may then come from the host's own copy of others' rows,
        which is fetched once for all its ranks; this rank's own last k adds may be missing, too.

        Raises InvalidValue, InvalidType, NotInitialized, and Stalled where the consistency makes
        it wait.
        """
        if self._background.pending:
            self._background.finish()
        ids, room = self._prepare_get(rows, out)
        slack = None if consistency is None else tables.slack_of(consistency)
        values = self._store.get(ids, room, timeout=timeout, slack=slack)
        return out if values is out else self._deliver(values, out)

    def add(self, delta: Any, rows: Any = None, *, timeout: float | None = None) -> None:
        """Give a delta to the updater: for all rows, or one row of it for each of these.

        On return it has taken effect (with "bsp": it will at the next clock). A row that is named
        several times gets the sum of its deltas. If anything is raised, nothing was added.
        """
        if self._background.pending:
            self._background.finish()
        valid, ids = self._prepare_add(delta, rows)
        self._store.add(valid, ids, timeout=timeout)

    def get_async(self, rows: Any = None, *, out: Any = None) -> Handle:
        """Start a `get` and return a handle at once; its `wait()` returns the rows."""
        ids, room = self._prepare_get(rows, out)
        ids = None if ids is None else ids.copy()  # the user may change the array meanwhile
        return self._start(lambda: self._deliver(self._store.get(ids, room), out), "get")

    def add_async(self, delta: Any, rows: Any = None) -> Handle:
        """Start an `add` and return a handle at once; leave `delta` unchanged until it is done."""
        valid, ids = self._prepare_add(delta, rows)
        ids = None if ids is None else ids.copy()
        return self._start(lambda: self._store.add(valid, ids), "add")

    def _start(self, work: Callable[[], Any], name: str) -> Handle:
        """Leave a call to the thread; on a device it goes on with the caller's current stream."""
        if self._on_device is not None:
            work = self._on_device.on_this_stream(self._spec.device, work)
        return self._background.start(work, name)

    def _prepare_get(self, rows: Any, out: Any) -> tuple[Ids | None, Array | None]:
        """Return which rows, and the array to write them to; None for new memory."""
        spec = self._spec
        ids = None if rows is None else self._as_ids(rows)
        if out is None:
            return ids, None
        shape = spec.shape if ids is None else ids.shape + spec.row_shape
        if self._on_device is not None:
            return ids, self._on_device.as_room(out, shape, spec)
        plain = type(out) is np.ndarray and out.dtype is spec.dtype
        if plain and out.shape == shape and out.flags.carray:
            return ids, out  # the usual case
        view = as_out(out, shape, spec.dtype)
        return ids, view if view.flags.c_contiguous and view.flags.aligned else None

    def _deliver(self, values: Array, out: Any) -> Any:
        """Return the values in `out`, or as an array of the table's library."""
        if self._on_device is not None:
            return self._on_device.deliver(values, out)
        if out is None:
            is_numpy = self._library is _NUMPY
            return values if is_numpy else self._library.deliver(values, self._spec.dtype.name)
        adapter: Any = lookup.of(out)
        if adapter.describe(out)[3] != "cpu":  # its view is a copy
            adapter.write(out, [values])
            return out
        view, _ = adapter.view(out)
        if not np.may_share_memory(view, values):  # `out` is not contiguous
            view[...] = values
        return out

    def _prepare_add(self, delta: Any, rows: Any) -> tuple[Array, Ids | None]:
        spec = self._spec
        ids = None if rows is None else self._as_ids(rows)
        shape = spec.shape if ids is None else ids.shape + spec.row_shape
        if self._on_device is not None:
            valid = self._on_device.as_tensor(delta, shape, spec, check_finite=self._check_finite)
        else:
            valid = as_delta(delta, shape, spec.dtype, check_finite=self._check_finite)
        if ids is not None and ids.ndim == 0:
            return valid[None], ids[None]
        return valid, ids

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write rows, options and the updater's state to a safetensors file, for `weft.load`.

        Every rank calls it, and returns when the file is complete. It is written under another
        name beside its place, then renamed. Raises OSError on every rank if it cannot be written.
        """
        save(self, path)

    def finish(self) -> None:
        """Wait until everything begun with `get_async` and `add_async` has ended."""
        self._background.finish()

    def close(self) -> None:
        """End what is pending. `weft.shutdown` calls it before the process leaves the group."""
        self._background.close()


class ArrayTable(Table):
    """One-dimensional parameters that all ranks of the group read and update.

    Every rank makes the table, and all ranks make their tables in the same order.

    >>> import weft
    >>> weft.init().size
    1
    >>> table = weft.ArrayTable(4)
    >>> table.add([1, 2, 3, 4])
    >>> table.add([10, 10], rows=[0, 3])
    >>> table.get()
    array([11.,  2.,  3., 14.], dtype=float32)
    >>> weft.shutdown()

    size_or_array  the number of elements, which start as zeros; or an array to start from, of which
                   the master's values count.
    dtype          of the rows; the array to start from and every delta are rounded to it.
    updater        what `add` does: "add", "sgd", "momentum", "adagrad", "rmsprop", "adam", one of
                   these with options (`weft.updaters.adam(lr=0.01)`), or a function of (rows,
                   state, delta).
    consistency    which adds of others a `get` sees: "async", "bsp" or `weft.ssp(k)`.
    exact          False: no locks; of updates at the same moment some may be lost.
    device         "cpu"; or "cuda", or what `weft.device()` returns: the rows are on rank 0's GPU,
                   which all ranks must reach, `get` returns tensors there, and an updater that is a
                   function gets tensors. "cpu:0" is the same with tensors in memory of the host.
    name           for errors and files; by default "table" and a number.
    check_finite   whether to refuse deltas with NaN or infinity.

    Raises InvalidValue, InvalidType, OutOfMemory, Disagreement if ranks make different tables, and
    with a `device` SetupError where a GPU's memory cannot be shared.
    """

    def __init__(
        self,
        size_or_array: Any,
        *,
        dtype: Any = "float32",
        updater: Any = "add",
        consistency: Any = "async",
        exact: bool = True,
        device: str = "cpu",
        name: str | None = None,
        check_finite: bool = False,
    ) -> None:
        def make_spec() -> tuple[TableSpec, Array | None]:
            values = _values(size_or_array, 1)
            shape = (validate_size("size", size_or_array),) if values is None else values.shape
            options = _Options(dtype, updater, consistency, exact, device, name, check_finite)
            start = None if values is None else size_or_array
            return _spec("ArrayTable", shape, start, options)

        super().__init__(make_spec, size_or_array, check_finite=check_finite)


class MatrixTable(Table):
    """Rows of parameters that all ranks of the group read and update, all or some of them.

    >>> import weft
    >>> weft.init().size
    1
    >>> table = weft.MatrixTable(1000, 3)
    >>> table.add([[1, 1, 1], [2, 2, 2]], rows=[7, 7])
    >>> table.get([7, 8])
    array([[3., 3., 3.],
           [0., 0., 0.]], dtype=float32)
    >>> weft.shutdown()

    n_rows_or_array  the number of rows, which start as zeros; or a matrix to start from.
    n_cols           the number of columns; left out with a matrix.

    The rest is as in `ArrayTable`.
    """

    def __init__(
        self,
        n_rows_or_array: Any,
        n_cols: int | None = None,
        *,
        dtype: Any = "float32",
        updater: Any = "add",
        consistency: Any = "async",
        exact: bool = True,
        device: str = "cpu",
        name: str | None = None,
        check_finite: bool = False,
    ) -> None:
        def make_spec() -> tuple[TableSpec, Array | None]:
            values = _values(n_rows_or_array, 2)
            if values is None:
                if n_cols is None:
                    raise InvalidType(
                        f"MatrixTable({n_rows_or_array!r}): expected the number of columns too, or "
                        "a matrix to start from"
                    )
                shape = validate_size("n_rows", n_rows_or_array), validate_size("n_cols", n_cols)
            elif n_cols is not None and n_cols != values.shape[1]:
                raise InvalidValue(
                    f"n_cols={n_cols!r} with a matrix of shape {values.shape} to start from; "
                    f"expected {values.shape[1]}, or only the matrix"
                )
            else:
                shape = values.shape
            options = _Options(dtype, updater, consistency, exact, device, name, check_finite)
            start = None if values is None else n_rows_or_array
            return _spec("MatrixTable", shape, start, options)

        super().__init__(make_spec, n_rows_or_array, check_finite=check_finite)


class _Options(NamedTuple):
    """The options that both kinds of table have, as the user gave them."""

    dtype: Any
    updater: Any
    consistency: Any
    exact: Any
    device: Any
    name: Any
    check_finite: Any


def _values(given: Any, ndim: int) -> Array | None:
    """Return the array to start from; None if `given` is a size."""
    if isinstance(given, tuple) and len(given) in (1, 2) and None not in map(whole, given):
        kind = "ArrayTable" if len(given) == 1 else "MatrixTable"
        numbers = ", ".join(str(whole(length)) for length in given)
        raise InvalidType(
            f"{given} may be a shape or an array: for a table of this shape write "
            f"{kind}({numbers}), for these numbers to start from a list, [{numbers}]"
        )
    if lookup.of(given) is None and not isinstance(given, (list, tuple, range)):
        return None
    array = as_array(given, _START)
    if array.ndim != ndim or not array.size:
        raise InvalidValue(
            f"an array of shape {array.shape} to start from; expected {ndim} dimension"
            f"{'s' if ndim > 1 else ''} and 1 or more elements"
        )
    return array


def _spec(
    kind: str, shape: tuple[int, ...], start: Any, options: _Options
) -> tuple[TableSpec, Array | None]:
    """Return the specification of a table, and the values it starts with. Raises for what is
    wrong in the options."""
    device = validate_device(options.device)
    for option in ("exact", "check_finite"):
        if not isinstance(getattr(options, option), bool):
            raise InvalidType(f"{option}={getattr(options, option)!r}: expected True or False")
    dtype = validate_dtype(options.dtype)
    updater = updaters.resolve(options.updater)
    updater.validate(dtype)
    name = validate_name(options.name, "table")
    consistency = tables.resolve(options.consistency)
    if device != "cpu":
        rows_on(device).validate_dtype(dtype)
    spec = TableSpec(kind, shape, dtype, updater, consistency, options.exact, name, device)
    return spec, None if start is None else as_delta(start, shape, dtype, what=_START)


def validate_device(given: Any) -> str:
    """Return the device of a table: "cpu", or one of this process with its number. Raises
    InvalidType, InvalidValue, MissingPackage."""
    if given == "cpu":
        return "cpu"
    if given == "cuda":
        session.device()  # the one that is this rank's
    if not isinstance(given, str) and type(given).__module__ != "torch":
        raise InvalidType(f"device={given!r}: expected 'cpu', 'cuda' or what weft.device() returns")
    return lookup.table_device(given)


def validate_name(given: Any, kind: str) -> str:
    """Return the name of a table: the given one or, by default, its kind and number."""
    name = f"{kind} {session.count_tables() + 1}" if given is None else given
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InvalidValue(f"name={name!r}: expected up to {_LONGEST_NAME} printable characters")
    return name


# saving and loading


T = TypeVar("T")

#: the class of each kind of table, and how many dimensions it has
_KINDS = {"ArrayTable": (ArrayTable, 1), "MatrixTable": (MatrixTable, 2)}

#: the fields of a file's metadata; those that are not strings are JSON
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


def save(table: Table, path: str | os.PathLike[str]) -> None:
    """Save a table: see `Table.save`."""
    group, store, spec = table.group, table._store, table._spec
    where = _validate_path(group, "save", path)
    table.finish()
    group.barrier()  # from here until the last broadcast nobody adds
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
    """Save every table of this session to a folder, and return the paths of the files.

    Every rank calls it. The folder is made if need be. Each file is called as its table, with the
    suffix `.weft`; the paths are in the order in which the tables were made.

    Raises what `table.save` raises, and UsageError if ranks have different tables left.
    """
    group = session.group()
    where = _validate_path(group, "save_all", folder)
    present = [cast(Table, table) for table in session.tables()]
    names = group.all_gather("\n".join(table.name for table in present))
    if any(other != names[0] for other in names):
        listed = "; ".join(f"rank {rank}: {own.splitlines()}" for rank, own in enumerate(names))
        raise UsageError(
            f"save_all() found different tables on different ranks ({listed}); keep every table "
            "until all are saved, or save them one by one"
        )
    _by_master(group, lambda: Path(checkpoint.resolve(where)).mkdir(parents=True, exist_ok=True))
    paths = [str(where / f"{name}.weft") for name in _file_names([table.name for table in present])]
    for table, path in zip(present, paths, strict=True):
        save(table, path)
    return paths


def load(
    path: str | os.PathLike[str],
    *,
    updater: Any = None,
    device: str = "cpu",
    into: Table | None = None,
) -> Table:
    """Return the table that was saved to a file, with its rows and its updater's state.

    Every rank calls it; there may be more or fewer ranks than when it was saved. If the updater
    was a function, pass the same one as `updater=`. It is on `device`, wherever it was when it was
    saved. With `into=` that table, of the same shape,
    dtype, updater and consistency, gets the rows and is returned: it is then one of the ranks that
    are left, wherever its rows were before.

    Raises InvalidValue if `into` is another kind of table, DamagedFile if the file is not, or no
    longer, a saved table, OutOfMemory, FileNotFoundError and the like, on every rank.
    """
    group = session.group()
    where = _validate_path(group, "load", path)
    with contextlib.ExitStack() as files:
        opened: list[checkpoint.SavedTable] = []  # by the master

        def read_header() -> dict[str, Any]:
            saved = files.enter_context(contextlib.closing(checkpoint.SavedTable(where)))
            opened.append(saved)
            header = _parse_header(where, saved)
            sizes = [entry.nbytes for entry in saved.entries.values()]
            piece = max(entry.piece_nbytes for entry in saved.entries.values())
            validate_memory(f"the table of {where}", sum(sizes) + piece, "free some memory")
            return header

        header = _by_master(group, read_header)
        try:
            rule = _updater(where, header, updater)
            if into is not None:
                _validate_into(where, header, rule, into)
        except Exception as error:
            group.refuse("load", error)
            raise
        table: Table = _KINDS[header["kind"]][0](
            *header["shape"],
            dtype=header["dtype"],
            updater=rule,
            consistency=header["consistency"],
            exact=header["exact"],
            device=device if into is None else into._spec.device,
            name=header["name"],
            check_finite=header["check_finite"],
        )

        def read_rows() -> None:
            for name, start, values in opened[0].pieces():
                table._store.write_piece(name, start, values)
            table._store.set_steps(header["steps"])

        _by_master(group, read_rows)
        if into is None:
            return table
        into.finish()
        into._store, into._group = table._store, table._group
        return into


def _validate_into(where: Path, header: dict[str, Any], rule: Updater, into: object) -> None:
    """Raise unless a saved table can become this one."""
    if not isinstance(into, Table):
        raise InvalidType(f"load(into={into!r}): expected a table, or nothing for a new one")
    spec = into._spec
    saved = (header["kind"], header["shape"], header["dtype"], rule, header["consistency"])
    if saved != (spec.kind, spec.shape, spec.dtype.name, spec.updater, spec.consistency):
        raise InvalidValue(
            f"{where} has a {header['kind']} of shape {header['shape']} and {header['dtype']} with "
            f"updater {rule} and consistency {header['consistency']}, which cannot become "
            f"{into!r}; leave into= out for a new table"
        )


def _updater(where: Path, header: dict[str, Any], given: Any) -> updaters.Updater:
    """Return the updater that a table was saved with. Raises InvalidValue if `given` differs."""
    rule = updaters.from_saved(header["updater"], header["options"].items())
    if given is not None:
        rule = updaters.resolve(given)
    if rule is None or rule.name != header["updater"] or list(rule.state) != header["state"]:
        raise InvalidValue(
            f"{where} was saved with the updater {header['updater']!r} and its state "
            f"{header['state']}; pass the same one: weft.load(path, updater=...)"
        )
    return rule


def _metadata(table: Table) -> dict[str, str]:
    """Return a file's metadata: all of a table but its arrays."""
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
    """Return the fields, shape and dtype of a saved table.

    Raises DamagedFile if no table can have them: the checksum holds, but whoever can compute one
    may have written anything.
    """
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
        validate_name(fields["name"], "table")
        updaters.from_saved(fields["updater"], fields["options"].items())
        name, slack = fields["consistency"], fields.pop("slack")
        fields["consistency"] = ssp(slack) if name == "ssp" else tables.resolve(name)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DamagedFile(
            f"{where} holds no table that this release knows ({error!r:.100}); was it saved by it?"
        ) from None
    return {**fields, "shape": entry.shape, "dtype": entry.dtype.name}


def _by_master(group: Group, work: Callable[[], T]) -> T:
    """Run `work` on the master, and return its result, or raise its exception, on every rank."""
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
    """Return a path. For what is none, raise InvalidType and have the other ranks raise too."""
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    error = InvalidType(f"path={path!r}: expected a path, as a string or a pathlib.Path")
    group.refuse(call, error)
    raise error


def _file_names(names: list[str]) -> list[str]:
    """Return a file name for each table, all different."""
    files: list[str] = []
    for name in names:
        plain = "".join(letter if letter.isalnum() or letter in "-_. " else "_" for letter in name)
        plain = plain.strip(". ") or "table"
        number, candidate = 1, plain
        while candidate in files:
            number += 1
            candidate = f"{plain} {number}"
        files.append(candidate)
    return files
