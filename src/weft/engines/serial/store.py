"""A table in ordinary memory: the reference for every other store."""

from __future__ import annotations

import os
import threading
from functools import partial

from weft._core import rows
from weft._core.arguments import validate_seconds
from weft._core.arithmetic import Array
from weft._core.tables import Ids, Interrupted, TableSpec
from weft.engines.base import Group, Store
from weft.engines.refusals import forked_error, left_error, reentrant_error, validate_memory


class SerialStore(Store):
    """Rows and state of one process, to which every consistency is the same."""

    def __init__(self, group: Group, spec: TableSpec, values: Array | None) -> None:
        if not spec.on_device:
            arrays = 1 + len(spec.updater.state)
            validate_memory(f"{spec.kind} {spec.name!r}", arrays * spec.nbytes, "make it smaller")
        self._library = library = rows.rows_on(spec.device)
        self.spec, self._steps = spec, 0
        self._group, self._process = group, os.getpid()
        zeros = partial(library.zeros, spec.shape, spec.dtype, spec.device)
        self._rows: Array = zeros()
        self._state: dict[str, Array] = {name: zeros() for name in spec.updater.state}
        self._arrays = {"rows": self._rows, **self._state}
        if values is not None:
            library.copy(self._rows, values)
        self._adder = library.make_adder(spec.n_rows, spec.dtype)
        #: threads take turns
        self._turn = threading.RLock()
        #: whether a thread is in the middle of an add
        self._in_turn = False

    def get(
        self,
        ids: Ids | None,
        out: Array | None,
        *,
        timeout: float | None = None,
        slack: int | None = None,
    ) -> Array:
        self._validate_use(timeout)
        with self._turn:
            if self._in_turn:
                raise reentrant_error(self.spec.name)
            copied: Array = self._library.read(self._rows, ids, out)
            return copied

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        self._validate_use(timeout)
        if ids is not None and not ids.size:
            return
        with self._turn:
            if self._in_turn:
                raise reentrant_error(self.spec.name)
            try:
                self._in_turn = True
                self._steps += 1
                self._add(delta, ids)
            finally:
                self._in_turn = False

    def _add(self, delta: Array, ids: Ids | None) -> None:
        updater, library, arrays = self.spec.updater, self._library, (self._rows, self._state)
        if ids is None:
            library.update(arrays, slice(None), delta, updater, self.steps)
        elif updater.name == "add":
            prepared = self._adder.prepare(self._rows, ids, delta, touch=False)
            self._adder.add(self._rows, ids, delta, prepared)
        else:
            ids, delta = library.merge(ids, delta)
            library.update(arrays, ids, delta, updater, self.steps)

    def interrupted(self) -> tuple[Interrupted, ...]:
        return ()

    @property
    def steps(self) -> int:
        return self._steps

    def settle(self, *, timeout: float | None = None) -> None:
        self._validate_use(timeout)

    def read_piece(self, name: str, start: int, stop: int) -> Array:
        piece: Array = self._library.to_host(self._arrays[name][start:stop])
        return piece

    def write_piece(self, name: str, start: int, values: Array) -> None:
        self._library.copy(self._arrays[name][start : start + len(values)], values)

    def set_steps(self, steps: int) -> None:
        self._steps = steps

    def exclusive_rows(self) -> Array:
        self._validate_use(None)
        return self._rows

    def _validate_use(self, timeout: float | None) -> None:
        if os.getpid() != self._process:
            raise forked_error(f"table {self.spec.name!r}", self._process)
        if self._group.latest.has_left:
            raise left_error(f"table {self.spec.name!r}'s group")
        if timeout is not None:
            validate_seconds(timeout)
