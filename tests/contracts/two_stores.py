"""Tables of two stores that share no memory: the first rank of each host keeps some of the rows.

    a rank: StoreOfTwoHosts  --(table, method, arguments)-->  Keeper, a thread of that rank: Part
                             <--------result or error-------

Every call is answered at once; who has to wait for others asks again.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Listener, wait
from typing import Any

import numpy as np

from weft._core import tables
from weft._core.arguments import deadline_after
from weft._core.arithmetic import Array
from weft._core.partition import part_of
from weft._core.tables import Ids, TableSpec
from weft.engines.base import Group, Store
from weft.engines.serial.store import SerialStore
from weft.errors import Stalled


class Tables:
    """All tables of a group, as one of its ranks has them."""

    def __init__(self, group: Group) -> None:
        self._group, self._made = group, 0
        self._keeper = Keeper() if group.local_rank == 0 else None
        addresses = group.all_gather("" if self._keeper is None else self._keeper.address)
        self._connections = [Client(address) for address in addresses if address]
        self._lock = threading.Lock()
        if self._keeper is not None:
            self._keeper.start(group.size)
        for connection in self._connections:
            connection.send(group.rank)

    def make(self, spec: TableSpec, values: Array | None) -> Store:
        """Every rank calls it; rank 0's values count."""
        self._made += 1
        start = self._group.broadcast(values if self._group.rank == 0 else None)
        store = StoreOfTwoHosts(self._group, spec, self, self._made, len(self._connections))
        if self._keeper is not None:
            hosts = self._group.hosts
            low, high = store.ranges[[*dict.fromkeys(hosts)].index(hosts[self._group.rank])]
            own = replace(spec, shape=(high - low, *spec.row_shape))
            some = None if start is None else start[low:high]
            self._keeper.parts[self._made] = Part(self._group, own, some)
        self._group.barrier()
        return store

    def ask(self, host: int, table: int, name: str, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self._connections[host].send((table, name, arguments))
            answer = self._connections[host].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Leave; who keeps rows stays until the others need them no more."""
        for connection in self._connections:
            connection.close()
        if self._keeper is not None:
            self._keeper.join()


class StoreOfTwoHosts(Store):
    """A table as one rank sees it, who asks for every row."""

    def __init__(
        self, group: Any, spec: TableSpec, keepers: Tables, number: int, hosts: int
    ) -> None:
        self.spec, self._group, self._keepers, self._number = spec, group, keepers, number
        self.ranges = [part_of(spec.n_rows, hosts, host) for host in range(hosts)]
        self._bsp = spec.consistency.name == "bsp"
        #: how many adds this rank has made
        self._own = 0
        self._turn = threading.RLock()

    def _ask(self, host: int, name: str, *arguments: Any) -> Any:
        roster = self._group._meeting.roster
        if not roster.is_here:
            raise roster.unusable_error(f"table {self.spec.name!r}")
        return self._keepers.ask(host, self._number, name, arguments)

    def _ask_all(self, name: str, *arguments: Any) -> list[Any]:
        return [self._ask(host, name, *arguments) for host in range(len(self.ranges))]

    def _await(self, needed: int, timeout: float | None) -> None:
        """Wait until every rank that is here has made so many adds."""
        deadline = deadline_after(timeout, self._group.timeout)
        while late := tables.behind(counts := self._ask(0, "counts"), needed):
            if time.monotonic() >= deadline:
                raise Stalled(
                    f"table {self.spec.name!r} ({self.spec.consistency}): rank {self._group.rank} "
                    f"has made {self._own} adds and waits until every rank has made {needed}, but "
                    + ", ".join(f"rank {rank} has made {counts[rank]}" for rank in late)
                    + "; one that has finished calls weft.shutdown()",
                    late,
                    self._group._meeting.roster.states(self._group._meeting.members),
                )
            time.sleep(0.001)

    def get(
        self,
        ids: Ids | None,
        out: Array | None,
        *,
        timeout: float | None = None,
        slack: int | None = None,
    ) -> Array:
        with self._turn:
            needed = self.spec.consistency.before_get(self._own)
            self._await(needed, timeout)
            if self._bsp:
                self._ask_all("apply", needed)
            if ids is None:
                found = self.read_piece("rows", 0, self.spec.n_rows)
            else:
                found = np.empty(ids.shape + self.spec.row_shape, self.spec.dtype)
                for host, (low, high) in enumerate(self.ranges):
                    here = (ids >= low) & (ids < high)
                    found[here] = self._ask(host, "get", ids[here] - low, None)
            self.staleness = tables.staleness(self._own, self._ask(0, "counts"))
        if out is None:
            return found
        out[...] = found
        return out

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        with self._turn:
            self._await(self.spec.consistency.before_add(self._own), timeout)
            for host, (low, high) in enumerate(self.ranges):
                some = slice(low, high) if ids is None else (ids >= low) & (ids < high)
                part = delta[some], None if ids is None else ids[some] - low
                if self._bsp:
                    self._ask(host, "stage", self._own + 1, self._group.rank, *part)
                elif ids is None or ids.size:
                    self._ask(host, "add", *part)
            self._own += 1
            self._ask(0, "count", self._group.rank)

    def interrupted(self) -> tuple[()]:
        return ()

    def settle(self, *, timeout: float | None = None) -> None:
        """Where one rank calls it alone, it waits here, and the others are elsewhere."""
        self._group.latest.barrier(timeout=timeout)
        if self._bsp:
            self._ask_all("apply", min(self._ask(0, "counts").values()))

    def read_piece(self, name: str, start: int, stop: int) -> Array:
        pieces = []
        for host, (low, high) in enumerate(self.ranges):
            first, last = max(start, low), min(stop, high)
            if first < last:
                pieces.append(self._ask(host, "read_piece", name, first - low, last - low))
        return np.concatenate(pieces)

    def write_piece(self, name: str, start: int, values: Array) -> None:
        for host, (low, high) in enumerate(self.ranges):
            first, last = max(start, low), min(start + len(values), high)
            if first < last:
                part = values[first - start : last - start]
                self._ask(host, "write_piece", name, first - low, part)

    @property
    def steps(self) -> int:
        [steps] = {*self._ask_all("steps")}
        return int(steps)

    def set_steps(self, steps: int) -> None:
        self._ask_all("set_steps", steps)


class Keeper:
    """A host's rows of all tables of a group, until every rank has left."""

    def __init__(self) -> None:
        self.address = f"\0weft tests {uuid.uuid4()}"
        self.parts: dict[int, Part] = {}
        self._listener = Listener(self.address, backlog=100)

    def start(self, size: int) -> None:
        self._thread = threading.Thread(target=self._run, args=(size,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self, size: int) -> None:
        accepted = [self._listener.accept() for _ in range(size)]
        self._listener.close()
        ranks: dict[Any, int] = {connection: connection.recv() for connection in accepted}
        while ranks:
            ready: list[Any] = wait(list(ranks))
            for connection in ready:
                try:
                    asked = connection.recv()
                except (EOFError, OSError):
                    self._forget(ranks.pop(connection))
                else:
                    connection.send(self._answer(*asked))

    def _answer(self, table: int, name: str, arguments: Sequence[Any]) -> Any:
        try:
            found = getattr(self.parts[table], name)
            return found(*arguments) if callable(found) else found
        except Exception as error:
            return error

    def _forget(self, rank: int) -> None:
        for part in list(self.parts.values()):
            part.counts.pop(rank, None)


class Part(SerialStore):
    """Some rows of a table, and what ranks have added to them under bsp, by clock."""

    def __init__(self, group: Group, spec: TableSpec, values: Array | None) -> None:
        super().__init__(group, spec, values)
        #: how many adds each rank that is here has made, at the first host
        self.counts = dict.fromkeys(range(group.size), 0)
        self._size, self._applied = group.size, 0
        self._staged: dict[int, dict[int, tuple[Array, Ids | None]]] = {}

    def _validate_use(self, timeout: float | None) -> None:
        """It goes on when its own rank has left."""

    def count(self, rank: int) -> None:
        self.counts[rank] += 1

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        if ids is not None and not ids.size:  # all of the rows are elsewhere
            self.set_steps(self.steps + 1)
        super().add(delta, ids)

    def stage(self, clock: int, rank: int, delta: Array, ids: Ids | None) -> None:
        self._staged.setdefault(clock, {})[rank] = delta, ids

    def apply(self, clock: int) -> None:
        """Apply what all ranks have added until then, in the order of ranks."""
        while self._applied < clock:
            self._applied += 1
            before, adds = self.steps, self._staged.pop(self._applied, {})
            for rank in sorted(adds):
                self.set_steps(before + rank)
                self.add(*adds[rank])
            self.set_steps(before + self._size)
