"""A table over hosts, as one of its ranks sees it.

    get    ask all other hosts for their rows; read those of this host meanwhile; take the answers
    add    have all other hosts add their part; update this host's rows meanwhile; when all have:
           count the add, on this host, whose agent tells the others

The rows of the own host are read and updated as in the local engine. Who counts an add has its rows
everywhere, so whoever sees the count may rely on them, and under bsp an add of a rank that dies is
on all hosts or on none.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from weft._core import rows
from weft._core.arguments import deadline_after, seconds_until, validate_seconds
from weft._core.sharding import DROPPED, ID_BYTES, Piece, Share
from weft.engines.base import Store
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import BlockHandle
from weft.engines.local.tables.state import STATE, TableMemory
from weft.engines.mpi import lanes
from weft.engines.mpi.copies import CopyMemory, RowCopy
from weft.engines.mpi.lanes import HostGone, Message, Request, rows_at
from weft.engines.mpi.layout import HostRanks, HostRows, Layout, decode_writes, shifted
from weft.engines.refusals import reentrant_error
from weft.errors import RowsLost

if TYPE_CHECKING:
    from weft._core.arithmetic import Array
    from weft._core.tables import Ids, Interrupted
    from weft.engines.local.meeting.roster import Recorder
    from weft.engines.local.memory.segment import Block
    from weft.engines.mpi.lanes import Lane
    from weft.engines.mpi.meeting import HostMeeting


class HostStore(Store):
    """One table over hosts."""

    def __init__(
        self,
        key: int,
        layout: Layout,
        block: Block,
        memory: TableMemory,
        *,
        ranks: HostRanks,
        meeting: HostMeeting,
        recorder: Recorder,
        timeout: float,
    ) -> None:
        self.spec, self._key, self._sharding = layout.spec, key, layout.sharding
        self._meeting, self._timeout = meeting, timeout
        self._layout, self._ranks, self._recorder = layout, ranks, recorder
        self._copy: RowCopy | None = None
        self._hosts = meeting.placement.order
        self._at = self._hosts.index(meeting.host)
        self._low, self._high = self._sharding.part(self._at)
        self._lane: Lane | None = meeting.lanes.get(layout.sharding.room)
        self._own = HostRows(memory, block, ranks=ranks, recorder=recorder, timeout=timeout)
        #: held by the thread of this rank that adds or, under bsp, gets
        self._turn = threading.RLock()
        self._in_turn = 0
        #: the clock through which all adds are applied when the table is saved
        self._settled = 0
        ranks.roster.watch(ranks.members)
        dropped = block, memory.word(ranks.rank, STATE), meeting
        weakref.finalize(self, _drop, *dropped).atexit = False

    # reading

    def get(
        self,
        ids: Ids | None,
        out: Array | None,
        *,
        timeout: float | None = None,
        slack: int | None = None,
    ) -> Array:
        self._own.validate_use()
        if timeout is not None:
            validate_seconds(timeout)
        deadline = deadline_after(timeout, self._timeout)
        try:
            # under bsp all ranks read the same rows: a rank of this host may wait for another's add
            if slack is not None and self._lane is not None and not self._own.is_bsp:
                return self._get_copied(ids, out, slack, deadline)
            copied = self._get(ids, out, deadline)
        except BaseException:
            while True:  # the first exception is the one that is raised
                try:
                    if self._in_turn != threading.get_ident():
                        self._own.release_locks()
                    if self._copy is not None:
                        self._copy.lock.release_held()
                    break
                except BaseException:
                    continue
            raise
        self.staleness = self._own.clocks.staleness()
        return copied

    def _get_copied(self, ids: Ids | None, out: Array | None, slack: int, deadline: float) -> Array:
        """Read the own host's rows, and others from its copy, which is renewed where it is too
        old."""
        own, clock = self._own, self._own.clocks.own
        named = np.arange(self.spec.n_rows) if ids is None else ids
        found = out
        if found is None:
            found = np.empty(named.shape + self.spec.row_shape, self.spec.dtype)
        flat, named = found.reshape(named.size, *self.spec.row_shape), named.reshape(-1)
        here = (named >= self._low) & (named < self._high)
        away = (~here).nonzero()[0]
        oldest = clock
        if away.size:
            copied = np.empty((away.size, *self.spec.row_shape), self.spec.dtype)
            oldest = self._open_copy(deadline).read(
                named[away],
                copied,
                own=clock,
                slack=slack,
                counts=lambda: [own.clocks.own, *own.clocks.present().values()],
                fetch=lambda rows_named, into: self._fetch(rows_named, into, deadline),
                deadline=deadline,
            )
            rows.write(flat, away, copied)
        if away.size < named.size:
            mine = here.nonzero()[0]
            rows.write(flat, mine, self._get(named[mine], None, deadline))
        self.staleness = max(0, clock - oldest)
        return found

    def _fetch(self, ids: Ids, out: Array, deadline: float) -> None:
        self._get(ids, out, deadline)

    def _open_copy(self, deadline: float) -> RowCopy:
        """Return this host's copy of other hosts' rows. Raises OutOfMemory."""
        if self._copy is None:
            handles: list[bytes] = []
            message = Message(
                self._request(lanes.COPY, self._at),
                take=lambda body: handles.append(body.tobytes()),
            )
            self._converse([message], deadline)
            block = blocks.attach(BlockHandle.decode(handles[0]), seconds_until(deadline))
            memory = CopyMemory(self._layout, self._at, len(self._ranks.members), block)
            self._copy = RowCopy(
                memory, ranks=self._ranks, recorder=self._recorder, timeout=self._timeout
            )
        return self._copy

    def _get(self, ids: Ids | None, out: Array | None, deadline: float) -> Array:
        if not self._own.is_bsp:
            return self._read(ids, out, 0, deadline)
        with self._turn:
            self._validate_turn()
            try:
                self._in_turn = threading.get_ident()
                needed = self.spec.consistency.before_get(self._own.clocks.own)
                self._own.apply_through(needed, deadline)
                return self._read(ids, out, needed, deadline)
            finally:
                self._in_turn = 0

    def _read(self, ids: Ids | None, out: Array | None, clock: int, deadline: float) -> Array:
        """Copy rows of all hosts; under bsp those of a clock."""
        if ids is None:
            return self._read_all(out, clock, deadline)
        shape = ids.shape + self.spec.row_shape
        found = np.empty(shape, self.spec.dtype) if out is None else out
        flat = found.reshape(ids.size, *self.spec.row_shape)
        shares = self._sharding.shares(ids.reshape(-1))
        own = next((share for share in shares if share.host == self._at), None)
        others = [share for share in shares if share.host != self._at]

        def read_own() -> None:
            if own is None:
                return
            if own.positions is None:
                self._own.read(own.ids, flat, seconds_until(deadline))
            else:
                some = self._own.read(own.ids, None, seconds_until(deadline))
                rows.write(flat, own.positions, some)

        messages = _in_turn(self._messages_of(share, flat, clock) for share in others)
        self._converse(messages if others else (), deadline, read_own)
        return found

    def _messages_of(self, share: Share, flat: Array, clock: int) -> Iterator[Message]:
        for part in self._sharding.cut_share(share):
            ids = share.ids[part]
            request = self._request(
                lanes.GET_SOME, share.host, count=ids.size, clock=clock, length=_ids_end(ids.size)
            )
            where = part if share.positions is None else share.positions[part]
            yield Message(request, ids, take=partial(self._put, flat, where))

    def _put(self, flat: Array, where: Any, body: Array) -> None:
        if isinstance(where, slice):
            flat[where] = body.view(self.spec.dtype).reshape(flat[where].shape)
        else:
            some = body.view(self.spec.dtype).reshape(len(where), *flat.shape[1:])
            rows.write(flat, where, some)

    def _read_all(self, out: Array | None, clock: int, deadline: float) -> Array:
        found = np.empty(self.spec.shape, self.spec.dtype) if out is None else out
        messages = self._messages_to_get(found, clock)
        self._converse(messages, deadline, lambda: self._read_own(found, deadline))
        return found

    def _read_own(self, found: Array, deadline: float) -> None:
        if self._low < self._high:
            own = found[self._low : self._high]
            self._own.read(None, own, seconds_until(deadline))

    def _messages_to_get(self, found: Array, clock: int) -> Iterator[Message]:
        pieces = _in_turn(
            self._sharding.pieces(host) for host in range(len(self._hosts)) if host != self._at
        )
        return (
            Message(
                self._of_piece(lanes.GET_RANGE, piece, clock=clock),
                take=partial(self._put, found, self._slice_of(piece)),
            )
            for piece in pieces
        )

    # writing

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        own = self._own
        own.validate_use()
        delta, ids = own.merge(delta, ids)
        with self._turn:
            self._validate_turn()
            try:
                self._in_turn = threading.get_ident()
                deadline = deadline_after(timeout, self._timeout)
                needed = self.spec.consistency.before_add(own.clocks.own)
                if own.is_bsp:
                    own.apply_through(needed, deadline)
                else:
                    own.clocks.await_others(needed, deadline)
                if ids is None:
                    self._add_all(delta, needed, deadline)
                elif ids.size or own.is_bsp:
                    self._add_some(delta, ids, needed, deadline)
                own.clocks.tick()
            except BaseException:
                while True:
                    try:
                        own.release_locks()
                        break
                    except BaseException:
                        continue
                raise
            finally:
                self._in_turn = 0

    @classmethod
    def exchange(
        cls, parts: Sequence[tuple[Store, Array, Array]], *, timeout: float | None = None
    ) -> None:
        """Add to several tables and read them, without a wait in between, where the consistency
        allows it: each host carries out a rank's requests in their order."""
        stores = [store for store, _, _ in parts if isinstance(store, HostStore)]
        alike = len(stores) == len(parts) and len({id(store._lane) for store in stores}) == 1
        if not alike or any(store._own.is_bsp for store in stores):
            super().exchange(parts, timeout=timeout)
            return
        with contextlib.ExitStack() as turns:
            for store in stores:
                store._own.validate_use()
                turns.enter_context(store._taking_turn())
            deadline = deadline_after(timeout, stores[0]._timeout)
            for store in stores:
                clocks = store._own.clocks
                clocks.await_others(store.spec.consistency.before_add(clocks.own), deadline)
            given = [(s, delta, out) for s, (_, delta, out) in zip(stores, parts, strict=True)]

            def change_own() -> None:
                for store, delta, out in given:
                    store._update_own(delta)
                    store._read_own(out, deadline)

            messages = itertools.chain(
                *(store._messages_to_add(delta, 0) for store, delta, _ in given),
                *(store._messages_to_get(out, 0) for store, _, out in given),
            )
            stores[0]._converse(messages, deadline, change_own, once_begun=True)
            for store in stores:
                store._own.clocks.tick()
                store.staleness = store._own.clocks.staleness()

    @contextlib.contextmanager
    def _taking_turn(self) -> Iterator[None]:
        """Make this thread the one that adds, until the end; release what it still holds then
        if anything was raised."""
        with self._turn:
            self._validate_turn()
            try:
                self._in_turn = threading.get_ident()
                yield
            except BaseException:
                while True:
                    try:
                        self._own.release_locks()
                        break
                    except BaseException:
                        continue
                raise
            finally:
                self._in_turn = 0

    def _add_all(self, delta: Array, clock: int, deadline: float) -> None:
        messages = self._messages_to_add(delta, clock)
        self._converse(messages, deadline, lambda: self._update_own(delta), once_begun=True)

    def _update_own(self, delta: Array) -> None:
        if self._low < self._high:
            self._begin_own()
            mine = delta[self._low : self._high]
            self._own.update(mine, None, deadline_after(None, self._timeout))

    def _begin_own(self) -> None:
        """Note that changes of this rank's next add follow. Under bsp they are none of its own."""
        if not self._own.is_bsp:
            self._own.changes.begin_add(self._next_add)

    @property
    def _next_add(self) -> int:
        return 0 if self._own.is_bsp else self._own.clocks.own + 1

    def _messages_to_add(self, delta: Array, clock: int) -> Iterator[Message]:
        return _in_turn(
            self._parts_of_all(host, delta, clock)
            for host in range(len(self._hosts))
            if host != self._at
        )

    def _parts_of_all(self, host: int, delta: Array, clock: int) -> Iterator[Message]:
        for number, piece in enumerate(self._sharding.pieces(host)):
            part = delta[self._slice_of(piece)]
            request = self._of_piece(
                lanes.ADD_RANGE,
                piece,
                flags=self._flags(first=number == 0),
                number=number,
                clock=clock,
                length=lanes.HEADER + part.nbytes,
                add=self._next_add,
            )
            yield Message(request, fill=partial(_fill, part))

    def _add_some(self, delta: Array, ids: Ids, clock: int, deadline: float) -> None:
        shares = {share.host: share for share in self._sharding.shares(ids)}
        counted = self.spec.updater.name != "add" and not self._own.is_bsp
        nothing = np.empty(0, np.intp)
        everywhere = counted or self._own.is_bsp
        hosts = range(len(self._hosts)) if everywhere else shares.keys()
        all_shares = [shares.get(host, Share(host, nothing, nothing)) for host in hosts]

        marks, rank, number = self._own.marks, self._own.ranks.rank, 0
        if counted:
            marks.begun[rank] = number = marks.begun[rank] + 1

        def add_own() -> None:
            share = shares.get(self._at)
            if share is not None:
                self._begin_own()
                mine = delta if share.positions is None else delta[share.positions]
                self._own.update(mine, share.ids, deadline_after(None, self._timeout))
            elif self._own.is_bsp:
                self._own.update(delta[:0], nothing, deadline)
            marks.count(rank, number)

        messages = _in_turn(
            self._parts_of(share, delta, clock, counted=number)
            for share in all_shares
            if share.host != self._at
        )
        self._converse(messages, deadline, add_own, once_begun=True)

    def _parts_of(
        self, share: Share, delta: Array, clock: int, *, counted: int
    ) -> Iterator[Message]:
        for part in [*self._sharding.cut_share(share)] or [slice(0, 0)]:
            ids = share.ids[part]
            where = part if share.positions is None else share.positions[part]
            request = self._request(
                lanes.ADD_SOME,
                share.host,
                flags=self._flags(first=part.start == 0),
                number=part.start,
                count=ids.size,
                clock=clock,
                length=rows_at(ids.size) + ids.size * self._sharding.row_nbytes,
                add=self._next_add,
                counted=counted,
            )
            yield Message(request, ids, fill=partial(_take_rows, delta, where))

    def _flags(self, *, first: bool) -> int:
        return (lanes.FIRST if first else 0) | (lanes.STAGED if self._own.is_bsp else 0)

    def _validate_turn(self) -> None:
        """Raise if this thread is in the middle of another call, as in a signal handler."""
        if self._in_turn:
            raise reentrant_error(self.spec.name)

    # the rest

    def interrupted(self) -> tuple[Interrupted, ...]:
        own = [shifted(write, self._low) for write in self._own.changes.interrupted()]
        if self._own.ranks.roster.is_here and self._lane is not None:
            for host in range(len(self._hosts)):
                if host != self._at:
                    own += self._interrupted_at(host)
        return tuple(own)

    def _interrupted_at(self, host: int) -> list[Interrupted]:
        """Return what the agent of a host knows; nothing if its rows are lost."""
        texts: list[bytes] = []
        message = Message(
            self._request(lanes.CHANGES, host), take=lambda body: texts.append(body.tobytes())
        )
        try:
            self._converse([message], deadline_after(None, self._timeout))
        except RowsLost:
            return []
        return decode_writes(texts[0])

    def settle(self, *, timeout: float | None = None) -> None:
        self._own.validate_use()
        if not self._own.is_bsp:
            return
        deadline = deadline_after(timeout, self._timeout)
        own = self._own
        # the ranks have met since they added, but what the agents tell may still be on its way
        for rank, adds in self._counts(deadline).items():
            own.clocks.await_rank(rank, adds, deadline)
        self._settled = min([own.clocks.own, *own.clocks.present().values()])
        own.apply_through(self._settled, deadline)

    def _counts(self, deadline: float) -> dict[int, int]:
        """Return how many adds the ranks of other hosts have made, as their agents know."""
        found: dict[int, int] = {}
        placement = self._meeting.placement

        def take(host: int, body: Array) -> None:
            counts = body.view(np.int64)
            found.update({rank: int(counts[rank]) for rank in placement.ranks_on(host)})

        others = [host for host in range(len(self._hosts)) if host != self._at]
        messages = (
            Message(self._request(lanes.COUNTS, host), take=partial(take, self._hosts[host]))
            for host in others
        )
        self._converse(messages, deadline)
        return found

    def read_piece(self, name: str, start: int, stop: int) -> Array:
        self._own.validate_use()
        found = np.empty((stop - start, *self.spec.row_shape), self.spec.dtype)
        deadline = deadline_after(None, self._timeout)

        def messages() -> Iterator[Message]:
            for piece, where in self._cut(start, stop):
                if piece.host == self._at:
                    found[where] = self._own.piece(name, piece.low, piece.high)
                    continue
                request = self._of_piece(
                    lanes.READ, piece, array=self._array(name), clock=self._settled
                )
                yield Message(request, take=partial(self._put, found, where))

        self._converse(messages(), deadline)
        return found

    def write_piece(self, name: str, start: int, values: Array) -> None:
        self._own.validate_use()
        deadline = deadline_after(None, self._timeout)

        def messages() -> Iterator[Message]:
            for piece, where in self._cut(start, start + len(values)):
                part = values[where]
                if piece.host == self._at:
                    self._own.piece(name, piece.low, piece.high)[...] = part
                    continue
                length = lanes.HEADER + part.nbytes
                request = self._of_piece(lanes.WRITE, piece, array=self._array(name), length=length)
                yield Message(request, fill=partial(_fill, part))

        self._converse(messages(), deadline)

    def _cut(self, start: int, stop: int) -> Iterator[tuple[Piece, slice]]:
        """Yield the pieces of some rows, and where each is among them."""
        for piece in self._sharding.cut(start, stop):
            low = self._sharding.part(piece.host)[0] - start
            yield piece, slice(low + piece.low, low + piece.high)

    def _array(self, name: str) -> int:
        return ("rows", *self.spec.updater.state).index(name)

    @property
    def steps(self) -> int:
        return self._own.steps

    def set_steps(self, steps: int) -> None:
        self._own.set_steps(steps)
        others = [host for host in range(len(self._hosts)) if host != self._at]
        messages = (Message(self._request(lanes.SET_STEPS, host, clock=steps)) for host in others)
        self._converse(messages, deadline_after(None, self._timeout))

    # requests

    def _slice_of(self, piece: Piece) -> slice:
        """Return the rows of a piece, as the table numbers them."""
        low = self._sharding.part(piece.host)[0]
        return slice(low + piece.low, low + piece.high)

    def _of_piece(self, kind: int, piece: Piece, **more: int) -> Request:
        return self._request(kind, piece.host, low=piece.low, high=piece.high, **more)

    def _request(
        self,
        kind: int,
        host: int,
        *,
        flags: int = 0,
        array: int = 0,
        low: int = 0,
        high: int = 0,
        number: int = 0,
        count: int = 0,
        clock: int = 0,
        length: int = lanes.HEADER,
        add: int = 0,
        counted: int = 0,
    ) -> Request:
        return Request(
            table=self._key,
            kind=kind,
            flags=flags,
            array=array,
            rank=self._own.ranks.rank,
            host=self._hosts[host],
            low=low,
            high=high,
            number=number,
            named=count,
            clock=clock,
            length=length,
            add=add,
            counted=counted,
        )

    def _converse(
        self,
        messages: Iterable[Message],
        deadline: float,
        meanwhile: Any = None,
        *,
        once_begun: bool = False,
    ) -> None:
        """Let agents carry out requests, and do something meanwhile. An add that has begun goes on
        to the end, even past its own deadline. Raises RowsLost."""
        messages = iter(messages)
        first = next(messages, None)
        if first is None or self._lane is None:
            if meanwhile is not None:
                meanwhile()
            return
        try:
            self._lane.converse(
                self.spec.name,
                _chain(first, messages),
                deadline,
                meanwhile=meanwhile,
                seconds=self._timeout if once_begun else None,
            )
        except HostGone as gone:
            raise self._lost_error(gone) from None

    def _lost_error(self, gone: HostGone) -> RowsLost:
        names = self._meeting.placement.names
        host = next(at for at, number in enumerate(self._hosts) if names[number] == gone.host)
        low, high = self._sharding.part(host)
        return RowsLost(
            f"table {self.spec.name!r}: host {gone.host}, which kept rows {low} to {high - 1}, "
            f"{gone.why}; the other rows are still there. Go on with the ranks that are left, and "
            "load what was saved last:\n    group = group.survivors()\n"
            "    weft.load(path, into=table)",
            gone.ranks,
            self._meeting.local_states(),
            host=gone.host,
            rows=range(low, high),
        )


def _in_turn(iterators: Iterable[Iterator[Any]]) -> Iterator[Any]:
    """Yield the first of each, then the second of each, ..."""
    for several in zip_longest(*iterators):
        yield from (one for one in several if one is not None)


def _chain(first: Message, others: Iterator[Message]) -> Iterator[Message]:
    yield first
    yield from others


def _ids_end(count: int) -> int:
    return lanes.HEADER + count * ID_BYTES


def _fill(part: Array, memory: Array) -> None:
    np.copyto(memory.view(part.dtype).reshape(part.shape), part)


def _take_rows(delta: Array, where: Any, memory: Array) -> None:
    if isinstance(where, slice):
        _fill(delta[where], memory)
    else:
        shape = (len(where), *delta.shape[1:])
        delta.take(where, 0, memory.view(delta.dtype).reshape(shape), "clip")


def _drop(block: Block, index: int, meeting: HostMeeting) -> None:
    """Note that a rank does not use a table any more. A forked child is no rank."""
    if meeting.roster.is_here:
        block.words[index] = DROPPED
