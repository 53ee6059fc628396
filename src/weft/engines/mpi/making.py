"""How a table over hosts is made: by the ranks, and by the agents of their hosts.

rank                                    agent
  the table's description    ---->        with the others: all the same? does it fit?
                                          memory for this host's part, and lanes for its ranks
  attach both                <----        handles
  whether that worked        ---->        with the others: did it everywhere?
  rank 0: the first values   <----
  done                       ---->        when rank 0 has written them
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

from weft._core.arguments import seconds_until
from weft._core.sharding import WINDOW
from weft.engines.local.meeting.meeting import TABLE, TROUBLES, UNDER_WAY, in_words
from weft.engines.local.meeting.roster import Recorder
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import Block, BlockHandle
from weft.engines.mpi.lanes import Lane, LaneMemory
from weft.engines.mpi.layout import HostGroup, HostRanks, Layout, layout_of, places_of
from weft.engines.mpi.meeting import DONE, TROUBLE
from weft.engines.mpi.packing import pack, unpack
from weft.engines.mpi.store import HostStore
from weft.errors import InvalidType, OutOfMemory, SetupError, WeftError, format_bytes
from weft.resources import available_memory

if TYPE_CHECKING:
    from weft._core.arithmetic import Array
    from weft._core.tables import TableSpec
    from weft.engines.mpi.meeting import HostMeeting
    from weft.engines.mpi.service import Service, Waiting
    from weft.engines.mpi.standby import Kept

#: what an agent's reply begins with
_MADE, _TOO_LARGE, _NOT_SENT, _NO_MEMORY = b"M", b"L", b"S", b"N"
#: bytes that are left to other programs
_MARGIN = 64 << 20
#: bytes of a rank's words, besides locks
_PER_RANK = 8192
#: seconds that the agent waits for the other speakers of its host to map a table
_KEEPING = 1.0


# the rank's side


def make_store(
    meeting: HostMeeting,
    recorder: Recorder,
    spec: TableSpec,
    values: Array | None,
    *,
    deadline: float,
    timeout: float,
) -> HostStore | Exception:
    """Make a table of the group's ranks, or return why it cannot be, the same on every rank.
    Raises Disagreement, SetupError, on every rank alike."""
    text = pack([str(spec).encode(), *_pickled(spec, meeting)])
    kind, *rest = unpack(meeting.converse(TABLE, text, deadline))
    if bytes(kind) != _MADE:
        return _refusal(bytes(kind), rest[0])
    key, table, lanes = (bytes(part) for part in rest)
    layout = layout_of(spec, meeting.placement)
    store, trouble = None, b"\0"
    try:
        store = _open(
            meeting,
            recorder,
            layout,
            (int.from_bytes(key, "little"), table, lanes),
            deadline=deadline,
            timeout=timeout,
        )
    except TROUBLES as error:
        trouble = in_words(error)
    meeting.converse(UNDER_WAY, trouble, deadline)
    if store is None:
        raise SetupError(f"table {spec.name!r}: no memory, but nobody was told")
    trouble = b"\0"
    if meeting.group_rank == 0 and values is not None:
        try:
            store.write_piece("rows", 0, values)
        except WeftError as error:
            trouble = in_words(error)
    meeting.converse(UNDER_WAY, trouble, deadline)
    return store


def _pickled(spec: TableSpec, meeting: HostMeeting) -> list[bytes]:
    """Return the description for the agent, which the first rank of a host gives, and why it cannot
    be sent."""
    if meeting.rank:
        return [b"", b""]
    import cloudpickle

    try:
        return [cloudpickle.dumps(spec), b""]
    except Exception as error:
        return [b"", f"{type(error).__name__}: {error}".encode()]


def _refusal(kind: bytes, text: Any) -> Exception:
    words = bytes(text).decode(errors="replace")
    kinds = {_TOO_LARGE: OutOfMemory, _NOT_SENT: InvalidType, _NO_MEMORY: SetupError}
    return kinds[kind](words)


def _open(
    meeting: HostMeeting,
    recorder: Recorder,
    layout: Layout,
    made: tuple[int, bytes, bytes],
    *,
    deadline: float,
    timeout: float,
) -> HostStore:
    key, table, lanes = made
    block = _attach(table, deadline)
    room = layout.sharding.room
    if lanes and room not in meeting.lanes:
        memory = LaneMemory(_attach(lanes, deadline), ranks=len(meeting.local), room=room)
        meeting.lanes[room] = Lane(memory, meeting)
    group = HostGroup.of(meeting)
    places = len(places_of(group, meeting.roster))
    memory_of_part = layout.memory(group.at, places, block)
    return HostStore(
        key,
        layout,
        block,
        memory_of_part,
        ranks=HostRanks(
            group,
            meeting.roster,
            memory_of_part,
            block,
            bell=meeting.bell,
            states=meeting.all_states,
        ),
        meeting=meeting,
        recorder=recorder,
        timeout=timeout,
    )


def _attach(handle: bytes, deadline: float) -> Block:
    return blocks.attach(BlockHandle.decode(handle), seconds_until(deadline) / 2)


# the agent's side


def make_table(service: Service) -> Waiting:
    """Make a table with the ranks of this host, which have come for it."""
    texts, _ = yield from service.read_texts()
    told = [[bytes(part) for part in unpack(text)] for text in texts]
    words = [name.decode(errors="replace") for name, *_ in told]
    if len(set(words)) > 1:
        yield from service.exchange(0, b"")
        yield from service.differ(words)
        return
    plan = _Plan(service, told[0])
    digest = hashlib.sha256(told[0][0]).digest()
    bodies = yield from service.exchange(TABLE, pack([digest, json.dumps(plan.needs).encode()]))
    others = [unpack(body) for body in bodies or ()]
    if bodies is None or any(other[0] != digest for other in others):
        yield from service.differ(words)
        return
    refusal = _common_refusal(service, plan.what, [json.loads(bytes(o[1])) for o in others])
    if refusal is not None:
        yield from service.reply(memoryview(pack(refusal)))
        return
    trouble = plan.allocate()
    try:
        service.midway = True
        bodies = yield from service.exchange(UNDER_WAY, pack([trouble]))
        troubles = service.troubles_in_words(bodies)
        if troubles:
            plan.drop()
            yield from service.reply(memoryview(pack([_NO_MEMORY, troubles])))
            return
        yield from service.reply(memoryview(pack([_MADE, *plan.handles()])))
        yield from plan.await_standbys()
        for _ in ("attached", "first values"):
            service.midway = True
            yield from service.gather()
            texts, _ = yield from service.read_texts()
            service.midway = False
            bodies = yield from service.exchange(UNDER_WAY, pack(texts))
            if bodies is None:
                plan.drop()
                yield from service.differ([None] * len(texts))
                return
            troubles = service.troubles_in_words(bodies)
            service.meeting.arrive(UNDER_WAY, TROUBLE if troubles else DONE, troubles)
            if troubles:
                plan.drop()
                return
    except BaseException:
        plan.drop()
        raise


def _common_refusal(service: Service, what: str, needs: list[Any]) -> list[bytes] | None:
    """Return why the table cannot be, given what each host needs and has."""
    names = [service.placement.names[host] for host in service.hosts]
    unsent = {trouble for *_, trouble in needs if trouble}
    if unsent:
        text = (
            f"{what}: its updater cannot be sent to the processes that keep the rows of each "
            f"host ({'; '.join(sorted(unsent))}); give it a function that can be pickled"
        )
        return [_NOT_SENT, text.encode()]
    if all(need + _MARGIN <= free for need, free, _, _ in needs):
        return None
    lines = "; ".join(
        f"host {name} needs {format_bytes(need)}, and {format_bytes(free)} are free ({reason})"
        for name, (need, free, reason, _) in zip(names, needs, strict=True)
    )
    total = sum(need for need, *_ in needs)
    text = (
        f"{what} of {format_bytes(total)} was asked for, over {len(names)} hosts: {lines}; "
        "make it smaller"
    )
    return [_TOO_LARGE, text.encode()]


class _Plan:
    """Plan what this host needs for a table, and what was made of it."""

    def __init__(self, service: Service, told: list[bytes]) -> None:
        self._service = service
        self._kept: Kept | None = None
        name, spec, trouble = told
        #: the table, as errors call it
        self.what = name.decode(errors="replace")
        words = trouble.decode(errors="replace")
        need = 0
        if not words:
            try:
                import cloudpickle

                self._spec = spec
                self._layout = layout_of(cloudpickle.loads(spec), service.placement)
                self.what = f"{self._layout.spec.kind} {self._layout.spec.name!r}"
                need = self._need()
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
        free, reason = available_memory()
        #: the bytes it takes on this host, those that are free, which limit says so; or a trouble
        self.needs = [need, free, reason, words]

    def _need(self) -> int:
        spec, sharding = self._layout.spec, self._layout.sharding
        low, high = sharding.part(self._service.at)
        arrays = 1 + len(spec.updater.state)
        if spec.consistency.name == "bsp":
            arrays += self._layout.ranks
        need = (high - low) * sharding.row_nbytes * arrays
        if sharding.room not in self._service.lanes:
            count = len(self._service.meeting.local)
            need += LaneMemory.bytes_for(ranks=count, room=sharding.room)
        return need

    def allocate(self) -> bytes:
        """Make the memory, and serve it. Return what went wrong."""
        from weft.engines.mpi.standby import Kept  # which speaks MPI, as ranks must not

        service, layout = self._service, self._layout
        group, tables = HostGroup.of(service.meeting), service.agent.tables
        places, count = len(places_of(group, service.agent.roster)), len(group.members)
        room = layout.sharding.room
        lane = service.key, group.generation, room
        service.tables_made += 1  # on all hosts alike, whatever goes wrong on one: keys are equal
        try:
            size = layout.memory(service.at, places).nbytes
            block = blocks.allocate(size)
            layout.memory(service.at, places, block).format(None)
            if len(service.hosts) > 1 and room not in service.lanes:
                lanes = blocks.allocate(LaneMemory.bytes_for(ranks=count, room=room))
                opened = LaneMemory(lanes, ranks=count, room=room)
                lanes.clear(0, opened.flags_at // 8 + WINDOW)
                service.lanes[room] = tables.open_lanes(lane, group, opened)
            handles = [blocks.export(block.buffer, owned=False).encode(), b""]
            if room in service.lanes:
                lanes = service.lanes[room].memory.block
                handles[1] = blocks.export(lanes.buffer, owned=False).encode()
        except TROUBLES as error:
            return in_words(error)
        name = f"{service.key} {group.generation} {service.tables_made}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        self._kept = Kept(key, group, lane, self._spec, *handles)
        tables.add_part(self._kept, layout, block)
        return b""

    def handles(self) -> list[bytes]:
        if self._kept is None:
            return []
        return [self._kept.key.to_bytes(8, "little"), self._kept.table, self._kept.lanes]

    def await_standbys(self) -> Waiting:
        """Wait until the other speakers of this host have mapped it: if the agent ends, the next
        one has it. Not for one that is stopped."""
        kept, tables = self._kept, self._service.agent.tables
        deadline = time.monotonic() + _KEEPING
        if kept is not None:
            yield from self._service.until(
                lambda: tables.is_kept(kept.key) or time.monotonic() > deadline
            )

    def drop(self) -> None:
        if self._kept is not None:
            self._service.agent.tables.drop_part(self._kept.key)
