"""How the local engine carries out a collective.

    every rank
      small enough? fill the slot          the arrays travel with the first step
      step: exchange `common` and `own`    different ones: Disagreement, on every rank
      settle                               the plan, the same for all
      small: read the slots                done, after one step
      large: carry                         in one of two ways
        directly                             tell the addresses, copy from process to process in
                                             blocks that fit the cache, step
        through the slots                    a round per slot's worth: fill, step, read

All ranks take the same way, because they decide by what they all know. The
order of sums is the order of ranks in either way, so the bits are the same too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from weft import faults
from weft._core.calls import Call, Combination
from weft._core.elements import Array, combine
from weft._core.moves import Copy, Differ, Movement
from weft._core.split import Layout, Piece, layout_of
from weft._core.values import address
from weft.engines.local import slots
from weft.engines.local.direct import Peers, let_peers_reach
from weft.engines.local.lane import FIRST, Lane
from weft.engines.local.meeting import CALLS, MAILBOX_BYTES, Meeting
from weft.engines.local.segment import Block, portable
from weft.errors import WeftError

UNDER_WAY = CALLS.index("collective, under way")
#: a message begins with whether the arrays are in the slot; `common` ends with a zero byte; then
#: comes `own`, if the arrays are not in the slot as far as it fits, after its length
_FITS, _FITS_NOT, _END = b"1", b"0", b"\0"
_LENGTH = struct.Struct("Q")
_ADDRESS = struct.Struct("QQ")
#: bytes that are pulled, combined and pushed at a time: they stay in the cache meanwhile
_BLOCK = 512 << 10
#: lanes that are kept
_LANES = 256


class Carrier:
    """Carries out the collectives of one group, on one rank."""

    def __init__(self, meeting: Meeting, common_block: Callable[[int, int], Block]) -> None:
        self._meeting = meeting
        self._rank, self._size = meeting.members.index(meeting.roster.rank), len(meeting.members)
        self._common_block = common_block
        self._slots: slots.Slots | None = None
        self._peers = Peers(meeting.roster, meeting.members)
        #: whether every rank can reach every other's memory
        self._direct = False
        self._scratch = np.empty(0, np.uint8)
        self._all_fit = [True] * self._size
        #: by operation, dtype and shape
        self.lanes: dict[tuple[Any, ...], Lane] = {}

    def carry_out(self, call: Call, seconds: float) -> None:
        """Exchange and carry until the call has its result. Every rank makes the same call.

        Raises Disagreement and InvalidValue on every rank alike, at the end of a step; anything
        else leaves the ranks out of step.
        """
        if self._slots is None:
            self._set_up(seconds)
        step = self._meeting.step + 1
        staged, owns, several = self._tell(call, seconds)
        if faults.armed:
            faults.reach("collective.met")
        try:
            plan = call.settle(owns)
        except Differ as differ:
            words = {rank: f"{call.name}({given})" for rank, given in differ.ranks.items()}
            raise self._meeting.disagreement(words) from None
        if isinstance(plan, Combination):
            late = self._combine(plan, call, step, staged=staged[0], seconds=seconds)
        else:
            late = self._move(plan, call.source, step, staged=staged, seconds=seconds)
        if faults.armed:
            faults.reach("collective.carried")
        if several or late:
            self._meeting.meet(UNDER_WAY, seconds)

    def open_lane(self, call: Call, like: Array, op: str) -> None:
        """Prepare the quick way for calls like this one, which was carried out."""
        if call.own or call.layout.size > self._memory.room or not like.dtype.isnative:
            return
        if len(self.lanes) >= _LANES:
            self.lanes.clear()
        message = _FITS + call.common + _END
        self.lanes[op, like.dtype, like.shape] = Lane(
            self._meeting, self._memory, message=message, like=like, op=op, differ=self._differ
        )

    # the first step

    def _tell(self, call: Call, seconds: float) -> tuple[Sequence[bool], Sequence[bytes], bool]:
        """Exchange what the calls say; whose arrays are in their slots, every rank's `own`, and
        whether it took several steps."""
        memory, meeting = self._memory, self._meeting
        common, own = call.common, call.own
        fits = call.layout.size <= memory.room and len(own) < MAILBOX_BYTES - len(common) - 1
        if fits:
            memory.fill(meeting.step + 1, call.source, call.layout.pieces)
            if faults.armed:
                faults.reach("collective.filled")
            message = _FITS + common + _END + own
        else:
            message = (_FITS_NOT + common + _END + _LENGTH.pack(len(own)) + own)[:MAILBOX_BYTES]
        answers = meeting.exchange(FIRST, message, seconds)
        if fits and answers.count(message) == self._size:
            return self._all_fit, [own] * self._size, False
        return self._heard(call, answers, seconds)

    def _heard(
        self, call: Call, answers: Sequence[bytes], seconds: float
    ) -> tuple[Sequence[bool], Sequence[bytes], bool]:
        """What the ranks said, where they did not all say the same, or not all in one step."""
        said = [answer[1:].partition(_END) for answer in answers]
        if any(common != call.common for common, _, _ in said):
            raise self._differ(answers)
        fits = [answer[:1] == _FITS for answer in answers]
        owns, lengths = [], []
        for whole, (_, _, own) in zip(fits, said, strict=True):
            owns.append(own if whole else own[_LENGTH.size :])
            lengths.append(len(own) if whole else _LENGTH.unpack_from(own)[0])
        several = any(len(own) < length for own, length in zip(owns, lengths, strict=True))
        if several:
            owns = self._tell_more(call.own, owns, lengths, seconds)
        return fits, owns, several

    def _differ(self, answers: Sequence[bytes]) -> WeftError:
        """The error of ranks that made different calls."""
        said = [answer[1:].partition(_END)[0].decode() for answer in answers]
        return self._meeting.disagreement(dict(enumerate(said)))

    def _tell_more(
        self, own: bytes, owns: list[bytes], lengths: Sequence[int], seconds: float
    ) -> list[bytes]:
        """The rest of what was too long for the mailboxes, a slot's worth at a time."""
        memory, meeting = self._memory, self._meeting
        texts = [bytearray(text) for text in owns]
        while any(len(text) < length for text, length in zip(texts, lengths, strict=True)):
            told = len(texts[self._rank])
            more = np.frombuffer(own[told : told + memory.room], np.uint8)
            step = meeting.step + 1
            memory.fill(step, [more], [Piece(0, 0, more.nbytes, 0)] if more.nbytes else [])
            meeting.meet(UNDER_WAY, seconds)
            for rank, text in enumerate(texts):
                length = min(lengths[rank] - len(text), memory.room)
                text.extend(memory.view(step, rank, 0, length, more.dtype).tobytes())
        return [bytes(text) for text in texts]

    # combining

    def _combine(
        self, plan: Combination, call: Call, step: int, *, staged: bool, seconds: float
    ) -> bool:
        """Carry out a combination; whether others may still be using this rank's memory."""
        source, layout = call.source, call.layout
        if staged:  # if one rank's are, all are: they have the same arrays
            self._combine_slots(plan, source, layout.pieces, step)
            return False
        if self._direct:
            addresses = self._exchange_addresses(source, plan.target, seconds)
            self._combine_directly(plan, source, layout, addresses)
            return True
        room, meeting = self._memory.room, self._meeting
        for start in range(0, layout.size, room):
            pieces = layout.window(start, start + room)
            step = meeting.step + 1
            self._memory.fill(step, source, pieces)
            if faults.armed:
                faults.reach("collective.round")
            meeting.meet(UNDER_WAY, seconds)
            self._combine_slots(plan, source, pieces, step)
        return False

    def _combine_slots(
        self, plan: Combination, source: Sequence[Array], pieces: Sequence[Piece], step: int
    ) -> None:
        view, ranks = self._memory.view, range(self._size)
        if not plan.target:
            return
        for index, start, stop, at in pieces:
            dtype, length = source[index].dtype, stop - start
            parts = [view(step, rank, at, length, dtype) for rank in ranks]
            out = _part(plan.target[index], start, stop)
            combine(parts, out, plan.op, plan.elements[index], plan.weights)

    def _combine_directly(
        self,
        plan: Combination,
        source: Sequence[Array],
        layout: Layout,
        addresses: Sequence[Sequence[int]],
    ) -> None:
        """Combine this rank's share of the blocks, and hand each to whoever gets the result."""
        receivers = range(self._size) if plan.root is None else [plan.root]
        for piece in layout.blocks_of(self._rank, self._size, _BLOCK):
            if faults.armed:
                faults.reach("collective.block")
            index, start, stop, _ = piece
            own = _part(source[index], start, stop)
            kept = _part(plan.target[index], start, stop) if plan.target else None
            # where the result is made: not over this rank's own numbers before their turn
            in_place = kept is not None and np.may_share_memory(own, kept)
            aside = kept is None or (in_place and self._rank >= 2)
            out = self._scratch_for(own, 2) if aside or kept is None else kept
            pulled = self._pulled(own, None if in_place and not aside else out, piece, addresses)
            combine(pulled, out, plan.op, plan.elements[index], plan.weights)
            if aside and kept is not None:
                np.copyto(kept, out)
            for rank in receivers:
                if rank != self._rank:
                    target = addresses[rank][len(source) + index] + start
                    self._peers.push(rank, target, address(out), out.nbytes)

    def _pulled(
        self, own: Array, first: Array | None, piece: Piece, addresses: Sequence[Sequence[int]]
    ) -> Iterator[Array]:
        """One block of every rank in turn; the first one pulled goes to `first`, if given, the
        others to two scratch blocks by turns."""
        turn = 0
        for rank in range(self._size):
            if rank == self._rank:
                yield own
                continue
            block = self._scratch_for(own, turn % 2) if turn or first is None else first
            remote = addresses[rank][piece.array] + piece.start
            self._peers.pull(rank, remote, address(block), block.nbytes)
            turn += 1
            yield block

    def _scratch_for(self, like: Array, number: int) -> Array:
        """One of three blocks of this rank's own."""
        if not len(self._scratch):
            self._scratch = np.empty(3 * _BLOCK, np.uint8)
        start = number * _BLOCK
        return self._scratch[start : start + like.nbytes].view(like.dtype)

    # moving

    def _move(
        self,
        plan: Movement,
        source: Sequence[Array],
        step: int,
        *,
        staged: Sequence[bool],
        seconds: float,
    ) -> bool:
        """Carry out a movement; whether others may still be using this rank's memory."""
        target = [array.view(np.uint8) for array in plan.target]
        layouts = [layout_of(tuple(sizes)) for sizes in plan.sizes]
        for copy in plan.incoming:
            if copy.source == self._rank:
                own = source[copy.from_array].view(np.uint8)
                _write(target, copy, 0, own[copy.start : copy.start + copy.length])
            elif staged[copy.source]:
                at = layouts[copy.source].starts[copy.from_array] + copy.start
                part = self._memory.view(step, copy.source, at, copy.length, np.dtype(np.uint8))
                _write(target, copy, 0, part)
        if all(staged):
            return False
        if self._direct:
            addresses = self._exchange_addresses(source, plan.target, seconds)
            self._move_directly(plan, source, target, addresses, staged)
            return True
        self._move_in_rounds(plan, source, target, layouts, staged=staged, seconds=seconds)
        return False

    def _move_directly(
        self,
        plan: Movement,
        source: Sequence[Array],
        target: Sequence[Array],
        addresses: Sequence[Sequence[int]],
        staged: Sequence[bool],
    ) -> None:
        """Each copy in two parts: the receiver pulls the one, the sender pushes the other."""
        if faults.armed:
            faults.reach("collective.block")
        for copy in plan.incoming:
            if copy.source != self._rank and not staged[copy.source]:
                length = copy.length - _pushed(copy, plan.pushed)
                remote = addresses[copy.source][copy.from_array] + copy.start
                local = address(target[copy.to_array]) + copy.place
                self._peers.pull(copy.source, remote, local, length)
        if staged[self._rank]:
            return
        for copy in plan.outgoing:
            length = _pushed(copy, plan.pushed)
            skipped = copy.length - length
            n_sources = len(plan.sizes[copy.target])
            remote = addresses[copy.target][n_sources + copy.to_array] + copy.place + skipped
            local = address(source[copy.from_array]) + copy.start + skipped
            self._peers.push(copy.target, remote, local, length)

    def _move_in_rounds(
        self,
        plan: Movement,
        source: Sequence[Array],
        target: Sequence[Array],
        layouts: Sequence[Layout],
        *,
        staged: Sequence[bool],
        seconds: float,
    ) -> None:
        memory, meeting = self._memory, self._meeting
        late = [rank for rank, done in enumerate(staged) if not done]
        for first in range(0, max(layouts[rank].size for rank in late), memory.room):
            step = meeting.step + 1
            if self._rank in late:
                pieces = layouts[self._rank].window(first, first + memory.room)
                memory.fill(step, [array.view(np.uint8) for array in source], pieces)
            if faults.armed:
                faults.reach("collective.round")
            meeting.meet(UNDER_WAY, seconds)
            for copy in plan.incoming:
                if copy.source in late and copy.source != self._rank:
                    begin = layouts[copy.source].starts[copy.from_array] + copy.start
                    low, high = max(first, begin), min(first + memory.room, begin + copy.length)
                    if low < high:
                        part = memory.view(
                            step, copy.source, low - first, high - low, np.dtype(np.uint8)
                        )
                        _write(target, copy, low - begin, part)

    # what both need

    @property
    def _memory(self) -> slots.Slots:
        if self._slots is None:
            raise RuntimeError("the slots are made before anything is carried")
        return self._slots

    def _set_up(self, seconds: float) -> None:
        """Make the slots, and find out whether ranks can reach each other's memory."""
        meeting = self._meeting
        block = self._common_block(FIRST, slots.bytes_for(self._size))
        let_peers_reach()
        word = np.frombuffer(os.urandom(8), np.uint64)
        secret = _ADDRESS.pack(address(word), int(word[0]))
        secrets = [_ADDRESS.unpack(told) for told in meeting.exchange(UNDER_WAY, secret, seconds)]
        reach = not portable() and all(
            self._peers.can_reach(rank, *secrets[rank])
            for rank in range(self._size)
            if rank != self._rank
        )
        answers = meeting.exchange(UNDER_WAY, bytes([reach]), seconds)
        self._direct = all(answer[0] for answer in answers)
        self._slots = slots.Slots(block, rank=self._rank, size=self._size)

    def _exchange_addresses(
        self, source: Sequence[Array], target: Sequence[Array], seconds: float
    ) -> list[list[int]]:
        """Where the arrays of every rank lie: its sources, then its targets."""
        table = np.array([address(array) for array in (*source, *target)], np.uint64).tobytes()
        message = (_LENGTH.pack(len(table)) + table)[:MAILBOX_BYTES]
        answers = self._meeting.exchange(UNDER_WAY, message, seconds)
        lengths = [_LENGTH.unpack_from(answer)[0] for answer in answers]
        tables = [answer[_LENGTH.size :] for answer in answers]
        tables = self._tell_more(table, tables, lengths, seconds)
        return [np.frombuffer(table, np.uint64).tolist() for table in tables]


def _part(array: Array, start: int, stop: int) -> Array:
    """The elements between two bytes."""
    if stop - start == array.nbytes:
        return array
    width = array.dtype.itemsize
    return array[start // width : stop // width]


def _write(target: Sequence[Array], copy: Copy, offset: int, part: Array) -> None:
    place = copy.place + offset
    np.copyto(target[copy.to_array][place : place + len(part)], part)


def _pushed(copy: Copy, share: float) -> int:
    """How many of a copy's last bytes its sender carries."""
    return int(copy.length * share)
