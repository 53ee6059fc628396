"""Carrying out a movement: through the slots, jointly, or from memory to memory.

What one rank sends to all goes jointly (joint_memory.py), if there is a loop in C for it: memory is
read once, and what is written is not read before. Only with 2 ranks whose cores share no cache the
kernel's copies are quicker. Such a copy can be made by either end. Where one rank sends to all, it
pushes its part of each while the receivers pull the rest; where all send to one, all push at once.
"""

from __future__ import annotations

import numpy as np

from weft import faults
from weft._core.copying import copy_to
from weft._core.elements import Array
from weft._core.plans import Copy, Movement
from weft._core.split import layout_of
from weft._core.values import address
from weft.engines.local.direct import Peers
from weft.engines.local.transport import Exchanged, Transport

_BYTES = np.dtype(np.uint8)


def carry_out(transport: Transport, plan: Movement, exchanged: Exchanged) -> bool:
    """Move; whether others may still be using this rank's memory."""
    mover = _Mover(transport, plan, exchanged)
    mover.read_slots()
    directly = False
    if mover.beyond_slots and not mover.broadcast_jointly():
        directly = transport.peers is not None
        if transport.peers is None:
            mover.move_in_rounds()
        else:
            mover.push(transport.peers)
            mover.pull(transport.peers)
    mover.copy_own()  # last: the others need not wait for it
    return directly


class _Mover:
    """One rank's part in a movement."""

    def __init__(self, transport: Transport, plan: Movement, exchanged: Exchanged) -> None:
        self._transport, self._plan, self._exchanged = transport, plan, exchanged
        self._source = [array.view(_BYTES) for array in exchanged.call.source]
        self._target = [array.view(_BYTES) for array in plan.target]
        self._layouts = [layout_of(tuple(sizes)) for sizes in plan.sizes]
        #: ranks whose arrays are not in their slots
        self.beyond_slots = [
            rank
            for rank, said in enumerate(exchanged.ranks)
            if not said.in_slot and self._layouts[rank].size
        ]
        others = [copy for copy in plan.incoming if copy.from_rank != transport.rank]
        self._from_slots = [c for c in others if exchanged.ranks[c.from_rank].in_slot]
        self._from_memory = [c for c in others if not exchanged.ranks[c.from_rank].in_slot]

    def read_slots(self) -> None:
        for copy in self._from_slots:
            begin = self._begin(copy)
            part = self._transport.slots.view(
                self._exchanged.step, copy.from_rank, begin, copy.length, _BYTES
            )
            self._write(copy, 0, part)

    def broadcast_jointly(self) -> bool:
        """Have all ranks work on what one sends to all; whether that was done."""
        transport = self._transport
        if self._exchanged.call.name != "broadcast":
            return False
        memory = transport.ready_joint_memory(self._exchanged)
        if memory is None or (transport.peers is not None and memory.leave_to_kernel()):
            return False
        (root,) = self.beyond_slots
        here = transport.rank == root
        for array in self._source if here else self._target:
            source, target = (array, None) if here else (None, array)
            memory.broadcast(root, source, target, deadline=self._exchanged.deadline)
        return True

    def move_in_rounds(self) -> None:
        """A slot's worth of every array that is not in its slot at a time."""
        slots, room, rank = self._transport.slots, self._transport.slots.room, self._transport.rank
        longest = max((self._layouts[rank].size for rank in self.beyond_slots), default=0)
        for first in range(0, longest, room):
            step = self._transport.meeting.step + 1
            if rank in self.beyond_slots:
                slots.fill(step, self._source, self._layouts[rank].window(first, first + room))
            if faults.armed:
                faults.reach("collective.round")
            self._transport.step(self._exchanged.seconds)
            for copy in self._from_memory:
                begin = self._begin(copy)
                low, high = max(first, begin), min(first + room, begin + copy.length)
                if low < high:
                    part = slots.view(step, copy.from_rank, low - first, high - low, _BYTES)
                    self._write(copy, low - begin, part)

    def push(self, peers: Peers) -> None:
        """Send this rank's part of each copy, where senders have one."""
        if not self._pushed_of(1.0):
            return
        table = np.array([address(array) for array in self._target], np.uint64).tobytes()
        tables = self._transport.exchange(table, self._exchanged)
        targets = [np.frombuffer(one, np.uint64).tolist() for one in tables]
        if self._transport.rank not in self.beyond_slots:
            return
        for copy in self._plan.outgoing:
            if faults.armed:
                faults.reach("collective.block")
            length = int(self._pushed_of(copy.length))
            skipped = copy.length - length
            remote = targets[copy.to_rank][copy.to_array] + copy.to_byte + skipped
            local = address(self._source[copy.from_array]) + copy.from_byte + skipped
            peers.push(copy.to_rank, remote, local, length)

    def pull(self, peers: Peers) -> None:
        """Fetch what the senders do not push."""
        for copy in self._from_memory:
            if faults.armed:
                faults.reach("collective.block")
            location = self._exchanged.ranks[copy.from_rank].sources[copy.from_array]
            local = address(self._target[copy.to_array]) + copy.to_byte
            length = copy.length - int(self._pushed_of(copy.length))
            peers.pull(copy.from_rank, location.address + copy.from_byte, local, length)

    def copy_own(self) -> None:
        for copy in self._plan.incoming:
            if copy.from_rank == self._transport.rank:
                own = self._source[copy.from_array]
                self._write(copy, 0, own[copy.from_byte : copy.from_byte + copy.length])

    def _pushed_of(self, length: float) -> float:
        """How much of so many bytes the sender carries: all, if everybody sends to one; its share
        of the work, if one sends the same to all; else nothing."""
        parts = {"gather": 1.0, "broadcast": 1 / self._transport.size}
        return length * parts.get(self._exchanged.call.name, 0.0)

    def _begin(self, copy: Copy) -> int:
        """Where a copy begins in its sender's buffer."""
        return self._layouts[copy.from_rank].starts[copy.from_array] + copy.from_byte

    def _write(self, copy: Copy, offset: int, part: Array) -> None:
        begin = copy.to_byte + offset
        copy_to(self._target[copy.to_array][begin : begin + len(part)], part)
