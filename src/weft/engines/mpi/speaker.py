"""The process that stands for a rank in MPI, its speaker.

    rank                                      its speaker
      start it, before anybody calls MPI_Init   MPI_Init in the rank's place, with what it inherits
      Join                             ---->    all speakers: who is on which host, what versions
                                       <----    Placed, or Refused
      join the launch of this host              join it too, behind its ranks
                                                the first of a host is the agent (agent.py), the
                                                others wait to take its place
      ...                                       ... until all ranks of the host have left
      End                              ---->    wait until all ranks end; MPI_Finalize
                                       <----    the end of the process; or, after a failure, "over",
                                                and the rank ends first

So no rank is ever inside MPI: it waits for shared memory and sockets, where it sees deaths and
deadlines, and whatever the script computes, MPI goes on. A speaker whose rank is gone ends at once.

A script that has initialized MPI itself before has taken the place already: then the speaker is a
thread of the rank, and MPI must allow several threads. What it does is the same, but while the
script computes in C without releasing the interpreter nobody serves its host.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft._core.launch import Launched
from weft._version import __version__
from weft.engines.local.processes.linux import (
    end_as_text,
    end_with_parent,
    open_pidfd,
    process_start,
    readable,
)
from weft.engines.mpi.placement import Placement
from weft.errors import EngineUnavailable, MissingRank, PeerLost, Refused

if TYPE_CHECKING:
    from weft.engines.mpi.mail import Mail, Messages
    from weft.engines.mpi.standby import Standby

_LENGTH = struct.Struct("=Q")
#: bytes in which a speaker says who it is, in the first exchange of all
_RECORD = 1024
#: seconds between two looks of a speaker that has nothing to do, and of one that waits for MPI
_PAUSE, _SHORT_PAUSE = 0.02, 0.001
#: seconds that a speaker whose rank has failed gives the others to say why they end: some of them
#: may not need it and go on; but where all were refused, all have the same to say
_GRACE, _REFUSED_GRACE = 1.0, 10.0
#: seconds that MPI_Finalize may take once all have come to it, and a rank to end without it; the
#: same after a failure, where some may not come; and seconds that a rank which has failed waits for
#: its speaker, which may have been stopped
_FINALIZING, _FAILING, _ENDING = 10, 3, 30.0
#: of one poll, where there is no deadline
_LONG = 3600.0
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from weft.engines.mpi.speaker import main; main(int(sys.argv[1]))"
)


class Gone(Exception):
    """The other end of a conversation has ended."""


class Conversation:
    """One end of the socket between a rank and its speaker: JSON values, each with its length."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, value: Any) -> None:
        """Send a value. Raises Gone."""
        text = json.dumps(value).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(text)) + text)
        except OSError as error:
            raise Gone(str(error)) from None

    def hear(self) -> Any:
        """Return the next value, which has begun to come. Raises Gone."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return json.loads(self._take(length))

    def wait(self, seconds: float) -> bool:
        """Return whether there is something to hear, or the other end is gone, in so long."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def _take(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._socket.recv(length - len(data))
            except OSError as error:
                raise Gone(str(error)) from None
            if not part:
                raise Gone("the other end has closed the connection")
            data += part
        return bytes(data)

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class Placed:
    """Describe where this rank is, and how it finds the others of its host."""

    placement: Placement
    host: int
    local_rank: int
    local_size: int
    #: of this host's ranks and their speakers
    launch: str


# the rank's side


class Speaker:
    """A rank's speaker, as the rank sees it."""

    def __init__(self, place: Launched) -> None:
        ours, theirs = socket.socketpair()
        self._conversation = Conversation(ours)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        #: the MPI library, while it is being initialized
        self._initializing = ""
        self.sessions = 0
        if _is_initialized():
            _validate_threads()
            conversation = Conversation(theirs)
            self._thread = threading.Thread(
                target=_speak_in_thread,
                args=(conversation, place.rank, place.size),
                name="weft speaker",
                daemon=True,
            )
            self._thread.start()
            return
        arguments = [str(theirs.fileno()), *sys.path]
        # with all descriptors: some launchers speak over one that they have opened
        os.set_inheritable(theirs.fileno(), True)
        self._process = subprocess.Popen(
            [sys.executable, *_flags(), "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            close_fds=False,
            env={**os.environ, _RANK: str(place.rank), _SIZE: str(place.size)},
        )
        theirs.close()

    def join(self, place: Launched, seconds: float) -> Placed:
        """Return where this rank is, once all speakers have met. Raises MissingRank, Refused,
        PeerLost, EngineUnavailable."""
        self.sessions += 1
        deadline = time.monotonic() + seconds
        who = f"rank {place.rank} on host {socket.gethostname()}"
        try:
            self._conversation.say(["join", self.sessions])
            kind, *answer = self._hear(deadline)
            while kind == "initializes":
                (self._initializing,) = answer
                kind, *answer = self._hear(deadline)
        except TimeoutError:
            self.abandon()
            raise MissingRank(
                f"the {place.size} ranks did not all come within {seconds:g} s (this is {who}); "
                "did one fail before weft.init()? For slow starts raise --timeout or WEFT_TIMEOUT",
            ) from None
        except Gone:
            raise self._lost_error(place, who) from None
        if kind == "refused":
            raise Refused(answer[0])
        if kind == "unavailable":
            raise EngineUnavailable(f"{who}: {answer[0]}")
        world, host_of, names, host, local_rank, local_size, launch = answer
        placement = Placement(tuple(world), tuple(host_of), tuple(names))
        return Placed(placement, host, local_rank, local_size, launch)

    def _hear(self, deadline: float) -> Any:
        """Return what the speaker says next. Raises Gone, TimeoutError."""
        while not self._conversation.wait(min(1.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError
        return self._conversation.hear()

    def _lost_error(self, place: Launched, who: str) -> PeerLost | EngineUnavailable:
        code = self._process.wait() if self._process else 0
        if self._initializing and code > 0:
            return EngineUnavailable(
                f"{who}: {self._initializing}, which mpi4py loads, did not start "
                f"({end_as_text(code)}); what it printed before says why. If it is another MPI "
                f"than the one whose mpirun started this job ({', '.join(place.variables)}), use "
                "the mpirun that belongs to it, or install the other's mpi4py"
            )
        how = f": {end_as_text(code)}" if self._process else ""
        return PeerLost(
            f"the process that stands for {who} in MPI ended while the group was starting{how}; "
            "what it printed before says why",
            [place.rank],
        )

    def end(self, *, failed: bool) -> None:
        """End MPI in this rank's place, after all have come to their ends; after a failure, and if
        others do not come soon, without them."""
        if os.getpid() != self._pid:
            return
        if self._thread is not None:
            with contextlib.suppress(Gone):
                self._conversation.say(["end", failed])
            self._thread.join()
            return
        try:
            self._conversation.say(["end", failed])
            while not self._conversation.wait(_ENDING if failed else _LONG):
                if failed:
                    raise Gone
            self._conversation.hear()  # this process ends first: its exit code counts
        except Gone:
            self.abandon()

    def abandon(self) -> None:
        """End the speaker at once."""
        if self._process is not None and os.getpid() == self._pid:
            self._process.kill()
            self._process.wait()


_RANK, _SIZE = "WEFT_MPI_RANK", "WEFT_MPI_SIZE"


def _flags() -> list[str]:
    """Return the interpreter's flags that matter to what it imports."""
    flags = sys.flags
    letters = {"I": flags.isolated, "E": flags.ignore_environment, "s": flags.no_user_site}
    return [f"-{letter}" for letter, value in letters.items() if value]


def _is_initialized() -> bool:
    """Return whether the script has initialized MPI."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def _validate_threads() -> None:
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise EngineUnavailable(
            "this script has initialized MPI before weft.init(), for fewer threads than the two "
            "that then speak MPI; let mpi4py ask for its default, MPI_THREAD_MULTIPLE, or call "
            "weft.init() first"
        )


# the speaker's side


def main(descriptor: int) -> None:
    """Speak for the rank that started this process."""
    parent = os.getppid()
    end_with_parent(signal.SIGKILL)  # MPI_Init cannot be interrupted otherwise
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which ends this process
    conversation = Conversation(socket.socket(fileno=descriptor))
    os.set_inheritable(descriptor, False)
    watched = open_pidfd_of(parent)
    rank, size = int(os.environ.pop(_RANK)), int(os.environ.pop(_SIZE))
    if os.getppid() != parent:
        os._exit(1)
    mpi = _load_mpi(conversation)
    conversation.say(["initializes", _library(mpi)])
    mpi.Init_thread(mpi.THREAD_SERIALIZED)
    conversation.say(["initializes", ""])
    voice = Voice(conversation, rank, size, lambda: readable(watched))
    end_with_parent(0)
    try:
        failed = voice.serve()
    except Gone:  # the rank is gone, without a word
        os._exit(1)
    complete = voice.await_all_ends(failed)
    # MPI_Finalize keeps the interpreter's lock: no thread could end it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the script may have had it ignored
    signal.alarm(_FAILING if failed else _FINALIZING)
    if complete and not voice.has_lost:
        mpi.Finalize()
    else:
        voice.let_rank_end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def open_pidfd_of(pid: int) -> int:
    from weft._core.launch import Process

    return open_pidfd(Process(pid, process_start(pid)))


def _load_mpi(conversation: Conversation) -> Any:
    """Return mpi4py's MPI, not initialized; if there is none, tell the rank, and end."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    # Open MPI ends the job as soon as a process in it is gone; its ranks need a moment to say who
    os.environ.setdefault("OMPI_MCA_mpi_abort_delay", "1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = f"mpi4py cannot load an MPI library ({error}); Open MPI's comes with"
        conversation.say(["unavailable", f"{reason}\n    pip install 'weft[mpi]'"])
        os._exit(1)
    return MPI


def _library(mpi: Any) -> str:
    """Return the name and the version of the MPI library."""
    words = mpi.Get_library_version().split(",")[0].splitlines()[0]
    return " ".join(words.replace("Version:", "").strip("\0 ").split())


def _speak_in_thread(conversation: Conversation, rank: int, size: int) -> None:
    voice = Voice(conversation, rank, size, lambda: False)
    try:
        failed = voice.serve()
    except Gone:
        return
    if not voice.await_all_ends(failed) and failed:
        # mpi4py would wait for all others in MPI_Finalize
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Voice:
    """Speak MPI for one rank."""

    def __init__(
        self,
        conversation: Conversation,
        rank: int,
        size: int,
        rank_is_gone: Callable[[], bool],
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._conversation, self._rank_is_gone = conversation, rank_is_gone
        self._rank, self._size = rank, size
        self._command: Any = None
        #: since when the rank, which has failed, waits for this process
        self._failed_at = 0.0
        #: of all sessions: what one has sent may be on its way when it ends
        self._mail: Mail | None = None
        self._messages: Messages | None = None
        self.has_lost = False
        #: whether no rank was let into the last session
        self._refused = False
        world = MPI.COMM_WORLD
        #: as MPI counts; the launcher's numbers must be the same
        self._place, self._places = world.Get_rank(), world.Get_size()
        #: for messages, for joining, and for ending: a user's own traffic cannot meet these
        self._comm, self._joining, self._ending = world.Dup(), world.Dup(), world.Dup()
        #: for tables, whose messages go straight into memory
        self._tables_comms = world.Dup(), world.Dup()
        for comm in (self._comm, self._joining, self._ending, *self._tables_comms):
            comm.Set_errhandler(MPI.ERRORS_RETURN)

    def serve(self) -> bool:
        """Serve session after session, until the rank ends. Return whether it has failed. Raises
        Gone if it ends without saying so."""
        while True:
            command, argument = self._next_command()
            if command == "end":
                return bool(argument)
            self._session(argument)

    def await_all_ends(self, failed: bool) -> bool:
        """Wait until all ranks end, after a failure for some time at most. Return whether they
        do."""
        grace = _REFUSED_GRACE if self._refused else _GRACE
        deadline = time.monotonic() + (grace if failed else math.inf)
        pause = _SHORT_PAUSE
        try:
            request = self._ending.Ibarrier()
            while not request.Test():
                if time.monotonic() >= deadline or self._rank_is_gone():
                    return False
                time.sleep(pause)
                pause = min(_PAUSE, pause * 1.2)
        except self._mpi.Exception:
            self.has_lost = True
            return False
        return True

    def let_rank_end(self) -> None:
        """Wait until the rank, which ends without MPI_Finalize, is gone: if MPI saw this process
        end first, it would end the job, with an exit code of its own."""
        with contextlib.suppress(Gone):
            self._conversation.say("over")
        while not self._rank_is_gone():
            time.sleep(_SHORT_PAUSE)

    # one session

    def _session(self, number: int) -> None:
        records = self._meet(number)
        if records is None:
            return
        misfit, refusal = misfit_of(records, _library(self._mpi)), refusal_of(records)
        self._refused = bool(misfit or refusal)
        if self._refused:
            answer = ["unavailable", misfit] if misfit else ["refused", refusal]
            self._conversation.say(answer)
            return
        placed = place_among(records, self._place)
        placement = placed.placement
        self._conversation.say(
            [
                "placed",
                placement.world,
                placement.host_of,
                placement.names,
                placed.host,
                placed.local_rank,
                placed.local_size,
                placed.launch,
            ]
        )
        self._speak(placed, number)

    def _meet(self, number: int) -> list[Any] | None:
        """Return every speaker's record; None if the rank has ended meanwhile."""
        record = json.dumps(own_record(number, self._rank, self._size)).encode()[:_RECORD]
        everybody = bytearray(_RECORD * self._places)
        mine = record.ljust(_RECORD)
        byte = self._mpi.BYTE
        request = self._joining.Iallgather([mine, byte], [everybody, byte])
        while not request.Test():
            if self._rank_is_gone() or self._told_something():
                return None
            time.sleep(_SHORT_PAUSE)
        parts = range(0, len(everybody), _RECORD)
        return [json.loads(everybody[at : at + _RECORD].rstrip()) for at in parts]

    def _speak(self, placed: Placed, number: int) -> None:
        """Join the launch of this host; be its agent, or wait to become it."""
        from weft import faults
        from weft._core.arguments import START
        from weft.engines.local.meeting.rendezvous import Identity, assemble
        from weft.engines.mpi.mail import Mail
        from weft.engines.mpi.memory import Bell
        from weft.engines.mpi.standby import Standby
        from weft.errors import WeftError

        faults.set_rank(-1)  # fault points are for ranks
        size = placed.local_size
        identity = Identity(size + placed.local_rank, 2 * size, placed.launch)
        try:
            joined = assemble(identity, START)
        except WeftError:
            return  # the ranks of this host say why
        roster = joined.roster
        host_agents = {
            host: placed.placement.world[placed.placement.ranks_on(host)[0]]
            for host in placed.placement.order
        }
        self._mail = mail = self._mail or Mail(self._comm)
        if placed.local_rank == 0:
            self._be_agent(placed, joined, host_agents, mail, session=number)
            roster.leave()
            return
        standby, bell = Standby(mail, number), Bell(roster, roster.rank)
        own_rank, earlier = [placed.local_rank], range(size, size + placed.local_rank)
        while not roster.gone(own_rank) and not self._must_leave():
            is_first = len(roster.gone(earlier)) == len(earlier)
            seen = bell.prepare()
            if standby.poll(placed.placement.host_of):
                continue
            if is_first:
                bell.end_nap()
                self._be_agent(
                    *(placed, joined, host_agents, mail), session=number, standby=standby
                )
                break
            bell.nap(seen, _PAUSE)
        roster.leave()

    def _be_agent(
        self,
        placed: Placed,
        joined: Any,
        host_agents: dict[int, int],
        mail: Mail,
        *,
        session: int,
        standby: Standby | None = None,
    ) -> None:
        """Serve this host; in the place of an agent that has ended, with what was kept for then."""
        from weft.engines.mpi.agent import Agent
        from weft.engines.mpi.mail import Messages
        from weft.engines.mpi.meeting import HostMeeting
        from weft.engines.mpi.service import Service

        size, placement = placed.local_size, placed.placement
        self._messages = self._messages or Messages(*self._tables_comms, mail)
        agent = Agent(
            mail,
            self._messages,
            joined.roster,
            session=session,
            host=placed.host,
            host_of=placement.host_of,
            ranks=range(size),
            leave=self._must_leave,
            is_ending=self._is_ending,
        )
        own = size + placed.local_rank
        meeting = HostMeeting(
            joined.memory,
            roster=joined.roster,
            ranks=range(2 * size),
            places=[*range(size), own],
            placement=placement,
            host=placed.host,
            name="world",
            generation=0,
            free_cores=False,
        )
        service = Service(agent, meeting, host_agents, tag=0)
        agent.start(service, take_over=standby is not None)
        if standby is not None:
            agent.take_over(standby)
        try:
            agent.run()
        finally:
            agent.flush(0.2)
            self.has_lost = self.has_lost or bool(agent.mail.failed)

    # the rank

    def _next_command(self) -> Any:
        if self._command is None:
            while not self._conversation.wait(_PAUSE if self._is_sending() else 1.0):
                if self._rank_is_gone():
                    raise Gone
            self._command = self._conversation.hear()
        command, self._command = self._command, None
        return command

    def _told_something(self) -> bool:
        """Return whether the rank has said something, which `_next_command` returns."""
        if self._command is None and self._conversation.wait(0.0):
            self._command = self._conversation.hear()
        return self._command is not None

    def _must_leave(self) -> bool:
        """Return whether the rank is gone without a word, or has failed some time ago."""
        if not self._is_ending():
            return False
        if self._command == ["end", True] and not self._rank_is_gone():
            self._failed_at = self._failed_at or time.monotonic()
            return time.monotonic() > self._failed_at + _GRACE
        return True

    def _is_ending(self) -> bool:
        """Return whether the rank is gone without a word, or has failed: then this process ends
        soon."""
        if self._rank_is_gone():
            return True
        try:
            self._told_something()
        except Gone:
            return True
        return bool(self._command == ["end", True])

    def _is_sending(self) -> bool:
        """Let messages go that the last agent has sent; return whether there still are some."""
        if self._mail is None:
            return False
        self._mail.poll()  # what comes now is of a session that has ended
        return not self._mail.all_sent


# who is where


def own_record(session: int, rank: int, size: int) -> list[Any]:
    """Return what the speakers tell each other when they meet: the session, this host's name and
    what tells it from others, a name for its launch, the versions, and the rank and the size that
    the launcher has told."""
    import platform

    import numpy as np

    names = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "uts", "mnt"))
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    key = [socket.gethostname(), boot, *names]
    versions = {
        "weft": __version__,
        "Python": platform.python_version().rpartition(".")[0],
        "NumPy": np.__version__,
    }
    import hashlib

    digest = hashlib.blake2b("\n".join(key).encode(), digest_size=16).hexdigest()
    return [session, key[0], digest, os.urandom(16).hex(), versions, [rank, size]]


def misfit_of(records: Sequence[Any], library: str) -> str:
    """Return where MPI, which has listed these records by rank, and the launcher do not agree; ""
    if they do. Pure."""
    size = len(records)
    wrong = [
        f"it is rank {rank} of {size} there, on host {record[1]}, and rank {told[0]} of {told[1]} "
        "of this job"
        for rank, record in enumerate(records)
        if (told := record[5]) != [rank, size]
    ]
    if not wrong:
        return ""
    return (
        f"mpi4py is built for another MPI ({library}) than the one whose mpirun started this job, "
        f"or the launcher's variables were changed: {'; '.join(wrong[:8])}. Use the mpirun that "
        "belongs to it, or install the other's mpi4py"
    )


def refusal_of(records: Sequence[Any]) -> str:
    """Return why ranks with these records cannot form a group; "" if they can. Pure."""
    hosts = {record[2]: record for record in records}
    kinds = {json.dumps([*record[4].items()]) for record in records}
    sessions = {record[0] for record in records}
    if len(sessions) > 1:
        return (
            f"the ranks are in different sessions ({sorted(sessions)}): each must call weft.init() "
            "and weft.shutdown() equally often"
        )
    if len(kinds) == 1:
        return ""
    rows = [("host", *records[0][4])]
    rows += sorted((record[1], *record[4].values()) for record in hosts.values())
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return (
        "the hosts have different versions; install the same on all, and compare them with "
        f"`weft doctor --hosts`:\n{table}"
    )


def place_among(records: Sequence[Any], rank: int) -> Placed:
    """Return where a rank is, given the records of all. Pure."""
    keys = [record[2] for record in records]
    hosts = list(dict.fromkeys(keys))
    host_of = tuple(hosts.index(key) for key in keys)
    names = tuple(records[keys.index(key)][1] for key in hosts)
    here = [other for other, key in enumerate(keys) if key == keys[rank]]
    return Placed(
        Placement(tuple(range(len(records))), host_of, names),
        host_of[rank],
        here.index(rank),
        len(here),
        records[here[0]][3],
    )
