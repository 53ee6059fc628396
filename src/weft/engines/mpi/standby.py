"""What the other speakers of a host keep of its tables, in case they take their agent's place.

    agent                                   each later speaker of the host
      a table is made
      KEEP: what it is, and handles  ---->    maps its memory, and its group's lanes
      the ranks may use it           <----    KEPT
      nobody uses it any more
      DROP                           ---->    unmaps it

So the memory is there whatever ends the agent, and nobody has to be asked for it then. Agents of
other hosts that have taken another's place tell all speakers (HERE), as any may be an agent later.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.engines.local.meeting.meeting import TROUBLES
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import Block, BlockHandle
from weft.engines.mpi.layout import HostGroup
from weft.engines.mpi.mail import Frame, Letter, Mail
from weft.engines.mpi.packing import pack, unpack
from weft.engines.mpi.placement import Placement

if TYPE_CHECKING:
    from weft._core.tables import TableSpec

#: the key of messages about tables, which are for no group
KEY = 0
#: their kinds: counts of adds, and what is above
NEWS, KEEP, KEPT, DROP, HERE = range(5)
#: a group, its generation, and the room of a message: what has lanes of its own
LaneKey = tuple[int, int, int]


def frame_of(kind: int, session: int) -> Frame:
    return Frame(KEY, 0, kind, 0, session)


@dataclass(frozen=True)
class Kept:
    """Describe a table to those who keep it."""

    key: int
    group: HostGroup
    lane: LaneKey
    #: its TableSpec, pickled; and handles of its memory and of the group's lanes
    pickled: bytes
    table: bytes
    lanes: bytes

    def spec(self) -> TableSpec:
        import cloudpickle

        spec: TableSpec = cloudpickle.loads(self.pickled)
        return spec

    def encode(self) -> bytes:
        group, placement = self.group, self.group.placement
        places = [placement.world, placement.host_of, placement.names]
        head = [self.key, self.lane, group.name, group.generation, places, group.host]
        text = json.dumps([*head, group.members]).encode()
        return pack([text, self.pickled, self.table, self.lanes])

    @staticmethod
    def decode(body: bytes) -> Kept:
        text, *parts = (bytes(part) for part in unpack(body))
        key, lane, name, generation, places, host, members = json.loads(text)
        placement = Placement(*map(tuple, places))
        group = HostGroup(name, generation, placement, host, tuple(members))
        return Kept(key, group, tuple(lane), *parts)


class Standby:
    """Tell what one speaker keeps, until it takes the agent's place."""

    def __init__(self, mail: Mail, session: int) -> None:
        self._mail, self._session = mail, session
        #: by key: a table, its memory, and that of the lanes of its group
        self.tables: dict[int, tuple[Kept, Block, Block | None]] = {}
        #: by host: the agent that has taken another's place
        self.agents: dict[int, int] = {}
        #: messages for the agent that this speaker may become
        self.others: list[Letter] = []

    def poll(self, host_of: tuple[int, ...]) -> bool:
        """Take the messages that have come; return whether there were any."""
        letters = self._mail.poll()
        for letter in letters:
            frame = letter.frame
            if frame.key != KEY:
                self.others.append(letter)
            elif frame.number != self._session:
                continue
            elif frame.kind == KEEP:
                self._keep(letter)
            elif frame.kind == DROP:
                self.tables.pop(int.from_bytes(letter.body, "little"), None)
            elif frame.kind == HERE:
                self.agents[host_of[letter.sender]] = letter.sender
        return bool(letters)

    def _keep(self, letter: Letter) -> None:
        kept = Kept.decode(letter.body)
        with contextlib.suppress(*TROUBLES):  # then the rows are lost with the agent
            table = blocks.attach(BlockHandle.decode(kept.table), 1.0)
            lanes = blocks.attach(BlockHandle.decode(kept.lanes), 1.0) if kept.lanes else None
            self.tables[kept.key] = kept, table, lanes
        body = kept.key.to_bytes(8, "little")
        self._mail.send(letter.sender, frame_of(KEPT, self._session), body)
