"""The agent of a host: the loop that serves its groups.

    forever
      messages that have come        -> the generation that each is for
      each service                   advances as far as it can
      nothing happened?              look again for some milliseconds, then nap: a fiftieth of the
                                     time since something happened, ten milliseconds at most. A rank
                                     of this host that comes to a step rings

After a nap everything is looked at twice: MPI reads its sockets at one look, and sees what came at
the next. The loop ends when all ranks of this host have left the launch, and other hosts have got
what they wait for: the rest of steps that these ranks have come to, and that they have left.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from weft.engines.local.meeting.roster import Roster
from weft.engines.mpi.mail import Letter, Mail, Messages
from weft.engines.mpi.memory import Bell
from weft.engines.mpi.service import REPORT, TAGS, Service, Waiting
from weft.engines.mpi.standby import KEY as TABLES
from weft.engines.mpi.standby import Standby
from weft.engines.mpi.tables import Tables

#: seconds without news in which the loop does not nap, and of the longest nap
_HOT, _LONGEST_NAP = 0.005, 0.01
#: the part of the time since the last news that a nap takes
_NAP_PART = 1 / 50
#: seconds without news after which an agent whose ranks have left ends, whatever it still sends
_LINGERING = 10.0
#: seconds between two looks at who has left the launch, and who asks where everybody is
_LOOK = 0.02


class Agent:
    """Serves the groups of one host, from the first meeting of its ranks to the last."""

    def __init__(
        self,
        mail: Mail,
        messages: Messages,
        roster: Roster,
        *,
        session: int,
        host: int,
        host_of: Sequence[int],
        ranks: Sequence[int],
        leave: Callable[[], bool],
        is_ending: Callable[[], bool],
    ) -> None:
        """`mail` and `messages` outlive this agent; `host_of` tells the host of each rank in MPI;
        `ranks` are the places in the launch of the ranks of this host; `leave` tells whether the
        loop must end, `is_ending` whether it soon will, though ranks of this host may go on."""
        self.mail, self.session = mail, session
        self.mpi_rank = mail.comm.Get_rank()
        self.host, self.host_of = host, host_of
        self.roster, self.place = roster, roster.rank
        self.recorder = roster.open_recorder()
        self._ranks, self._leave, self.is_ending = ranks, leave, is_ending
        self.bell = Bell(roster, roster.rank)
        #: counts what has happened: the loop naps when it stays the same
        self.progress = 0
        self._services: dict[tuple[int, int], tuple[Service, Waiting]] = {}
        #: messages for generations that have not begun here
        self._early: defaultdict[tuple[int, int], list[Letter]] = defaultdict(list)
        self._tags = 0
        #: how many failed peers the services know of
        self._failed = 0
        self.tables = Tables(self, messages)

    def start(self, service: Service, *, take_over: bool = False) -> None:
        """Serve a generation of a group from now on; `take_over` from an agent that has ended."""
        key = service.key, service.meeting.generation
        service.note_failed(self.mail.failed)
        self._services[key] = service, service.take_over() if take_over else service.run()
        for letter in self._early.pop(key, ()):
            service.receive(letter)

    def take_over(self, standby: Standby) -> None:
        """Serve the tables that an agent which has ended has served."""
        for letter in standby.others:
            self._early[letter.frame.key, letter.frame.generation].append(letter)
        self.tables.take_over(standby)

    def serves(self, key: int, generation: int) -> bool:
        """Return whether this generation of a group is served."""
        return (key, generation) in self._services

    def reserve_tags(self, count: int) -> int:
        """Return the first of so many numbers that stand for groups that begin on this host."""
        in_use = {service.group_tag % TAGS for service, _ in self._services.values()}
        first = self._tags
        while in_use & {(first + i) % TAGS for i in range(count)}:
            first += 1
        self._tags = (first + count) % TAGS
        return first

    def formed_elsewhere(self, key: int, generation: int) -> list[int] | None:
        """Return who is in a generation that another host has begun; None if none has."""
        for letter in self._early.get((key, generation), ()):
            if letter.frame.kind == REPORT:
                formed: list[int] = json.loads(letter.body)[1]
                return formed
        return None

    def run(self) -> None:
        """Serve until all ranks of this host have left, or this process must end."""
        news = looked = time.monotonic()
        while True:
            before = self.progress
            self._turn()
            now = time.monotonic()
            if self.progress != before:
                news = now
            if now - looked >= _LOOK:
                looked = now
                for service, _ in self._services.values():
                    service.attend()
                # what others wait for is sent first, if that comes to an end
                done = self._all_have_left() and (now - news > _LINGERING or not self._is_busy())
                if (done and not self.tables.is_needed) or self._leave():
                    self.tables.say_farewell()
                    for service, _ in self._services.values():
                        service.say_farewell()
                    return
            if self.progress != before:
                continue
            waited = now - news
            if waited < _HOT:
                os.sched_yield()
            else:
                self._nap(min(_LONGEST_NAP, waited * _NAP_PART))

    def flush(self, seconds: float) -> None:
        """Let messages go that are being sent."""
        deadline = time.monotonic() + seconds
        while not (self.mail.all_sent and self.tables.all_sent) and time.monotonic() < deadline:
            self.mail.poll()
            self.tables.flush()
            time.sleep(0.001)

    def _nap(self, seconds: float) -> None:
        seen = self.bell.prepare()
        try:
            before = self.progress
            self._turn()
            if self.progress == before:
                self.bell.nap(seen, seconds)
        finally:
            self.bell.end_nap()

    def _turn(self) -> None:
        """Do what can be done now."""
        for letter in self.mail.poll():
            key = letter.frame.key, letter.frame.generation
            if letter.frame.key == TABLES:
                self.tables.receive(letter)
            elif key in self._services:
                self._services[key][0].receive(letter)
            else:
                self._early[key].append(letter)
            self.progress += 1
        self._note_failures()
        self.progress += self.tables.turn()
        for key, (_, waiting) in list(self._services.items()):
            try:
                next(waiting)
            except StopIteration:
                del self._services[key]

    def _note_failures(self) -> None:
        """Tell the services which peers have failed, whoever has noticed it: the mail, or the
        messages of tables."""
        if len(self.mail.failed) == self._failed:
            return
        self.mail.look_for_failures()
        self._failed = len(self.mail.failed)
        for service, _ in self._services.values():
            service.note_failed(self.mail.failed)
        self.progress += 1

    def _is_busy(self) -> bool:
        """Return whether other hosts are still to get what ranks of this one have given."""
        return any(service.is_busy for service, _ in self._services.values())

    def _all_have_left(self) -> bool:
        return len(self.roster.gone(self._ranks)) == len(self._ranks)
