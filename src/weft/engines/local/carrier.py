"""How the local engine carries out a collective.

    every rank
      small enough? fill the slot          the arrays travel with the first step
      step: exchange `common` and `own`    different ones: Disagreement, on every rank
      settle                               the plan, the same for all
      small: read the slots                done, after one step
      large: carry                         in one of two ways (combining.py, moving.py)
        directly                             copy from process to process, step
        through the slots                    a round per slot's worth: fill, step, read

All ranks take the same way, because they decide by what they all know. The
order of sums is the order of ranks in either way, so the bits are the same too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft import faults
from weft._core.calls import Call, Combination
from weft._core.elements import Array
from weft._core.moves import Differ
from weft._core.values import address
from weft.engines.local import combining, moving, slots
from weft.engines.local.direct import Peers, let_peers_reach
from weft.engines.local.lane import Lane
from weft.engines.local.mapped import Share, place_of
from weft.engines.local.means import FIRST, UNDER_WAY, Means, Said
from weft.engines.local.meeting import MAILBOX_BYTES, Meeting
from weft.engines.local.segment import Block, portable
from weft.errors import WeftError

#: A message begins with whether the arrays are in the slot, then `common`, which ends with a zero
#: byte. Then comes `own`; or, if the arrays are not in the slot, as much as fits of: how long the
#: rest is, how long the table of arrays is (three words for each), the table, and `own`.
_FITS, _FITS_NOT, _END = b"1", b"0", b"\0"
_LENGTHS = struct.Struct("QQ")
_SECRET = struct.Struct("QQ")
#: lanes that are kept
_LANES = 256


class Carrier:
    """Carries out the collectives of one group, on one rank."""

    def __init__(self, meeting: Meeting, common_block: Callable[[int, int], Block]) -> None:
        self._meeting = meeting
        self._rank, self._size = meeting.members.index(meeting.roster.rank), len(meeting.members)
        self._common_block = common_block
        self._means: Means | None = None
        none: list[list[Any]] = [[]] * self._size
        self._all_fit = Said([True] * self._size, [b""] * self._size, none, none, False)
        #: by operation, dtype and shape
        self.lanes: dict[tuple[Any, ...], Lane] = {}

    def carry_out(self, call: Call, seconds: float) -> None:
        """Exchange and carry until the call has its result. Every rank makes the same call.

        Raises Disagreement and InvalidValue on every rank alike, at the end of a step; anything
        else leaves the ranks out of step.
        """
        if self._meeting.owes_wait:
            self._meeting.catch_up(seconds)
        means = self._means or self._set_up(seconds)
        step = self._meeting.step + 1
        said = self._tell(means, call, seconds)
        if faults.armed:
            faults.reach("collective.met")
        try:
            plan = call.settle(said.owns)
        except Differ as differ:
            words = {rank: f"{call.name}({given})" for rank, given in differ.ranks.items()}
            raise self._meeting.disagreement(words) from None
        carry = combining.carry if isinstance(plan, Combination) else moving.carry
        late = carry(means, plan, call, said, (step, seconds))
        if faults.armed:
            faults.reach("collective.carried")
        if said.several or late:
            self._meeting.meet(UNDER_WAY, seconds)

    def open_lane(self, call: Call, like: Array, op: str) -> None:
        """Prepare the quick way for calls like this one, which was carried out."""
        means = self._means
        if means is None or call.own or not like.dtype.isnative:
            return
        length = call.layout.size
        if length > means.slots.room or slots.work_is_shared(means.size, length):
            return
        if len(self.lanes) >= _LANES:
            self.lanes.clear()
        message = _FITS + call.common + _END
        self.lanes[op, like.dtype, like.shape] = Lane(
            means, message=message, like=like, op=op, differ=self._differ
        )

    # the first step

    def _tell(self, means: Means, call: Call, seconds: float) -> Said:
        """Exchange what the calls say."""
        common, own = call.common, call.own
        space = MAILBOX_BYTES - len(common) - 2
        if call.layout.size <= means.slots.room and len(own) <= space:
            means.slots.fill(self._meeting.step + 1, call.source, call.layout.pieces)
            if faults.armed:
                faults.reach("collective.filled")
            message = _FITS + common + _END + own
            answers = self._meeting.exchange(FIRST, message, seconds)
            if not own and answers.count(message) == self._size:
                return self._all_fit
            return self._heard(means, call, answers, b"", seconds)
        arrays = (*call.source, *call.early_target)
        table = [(address(array), *place_of(array)) for array in arrays]
        rest = np.array(table, np.uint64).tobytes() + own
        lengths = _LENGTHS.pack(len(rest), len(rest) - len(own))
        message = (_FITS_NOT + common + _END + lengths + rest)[:MAILBOX_BYTES]
        answers = self._meeting.exchange(FIRST, message, seconds)
        return self._heard(means, call, answers, rest, seconds)

    def _heard(
        self, means: Means, call: Call, answers: Sequence[bytes], rest: bytes, seconds: float
    ) -> Said:
        """What the ranks said, where they did not all say the same, or not all in one step."""
        heard = [_read(answer) for answer in answers]
        if any(one.common != call.common for one in heard):
            raise self._differ(answers)
        texts = [one.text for one in heard]
        lengths = [one.length for one in heard]
        several = any(len(text) < length for text, length in zip(texts, lengths, strict=True))
        if several:
            texts = means.tell_more(rest, texts, lengths, seconds)
        tables, owns = [], []
        for one, text in zip(heard, texts, strict=True):
            tables.append(np.frombuffer(text[: one.table], np.uint64).reshape(-1, 3).tolist())
            owns.append(text[one.table :])
        return Said(
            fits=[one.fits for one in heard],
            owns=owns,
            addresses=[[row[0] for row in table] for table in tables],
            shares=[[Share(*row[1:]) for row in table] for table in tables],
            several=several,
        )

    def _differ(self, answers: Sequence[bytes]) -> WeftError:
        """The error of ranks that made different calls."""
        said = {rank: _read(answer).common.decode() for rank, answer in enumerate(answers)}
        return self._meeting.disagreement(said)

    def _set_up(self, seconds: float) -> Means:
        """Make the slots, and find out whether ranks can reach each other's memory."""
        meeting = self._meeting
        block = self._common_block(FIRST, slots.bytes_for(self._size))
        let_peers_reach()
        word = np.frombuffer(os.urandom(8), np.uint64)
        secret = _SECRET.pack(address(word), int(word[0]))
        secrets = [_SECRET.unpack(told) for told in meeting.exchange(UNDER_WAY, secret, seconds)]
        peers = Peers(meeting)
        reach = not portable() and all(
            peers.can_reach(rank, *secrets[rank])
            for rank in range(self._size)
            if rank != self._rank
        )
        answers = meeting.exchange(UNDER_WAY, bytes([reach]), seconds)
        self._means = Means(
            meeting,
            slots=slots.Slots(block, rank=self._rank, size=self._size),
            peers=peers if all(answer[0] for answer in answers) else None,
        )
        return self._means


class _Heard(NamedTuple):
    """What one rank said in its message."""

    fits: bool
    common: bytes
    #: bytes of the table and of `own` in all, of which `text` may be only the beginning
    length: int
    #: bytes of the table
    table: int
    text: bytes


def _read(message: bytes) -> _Heard:
    common, _, text = message[1:].partition(_END)
    if message[:1] == _FITS:
        return _Heard(True, common, len(text), 0, text)
    length, table = _LENGTHS.unpack_from(text) if len(text) >= _LENGTHS.size else (0, 0)
    return _Heard(False, common, length, table, text[_LENGTHS.size :])
