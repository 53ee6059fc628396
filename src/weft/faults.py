"""Named fault points, by which the failure suite reaches every line that matters.

    WEFT_FAULT=point:rank:action        one fault
    WEFT_FAULT=a:0:kill,b:1:delay=0.5   several, separated by commas

A point is a name in `POINTS`; the rank is one of the whole job, or `*`; the action is one of
`kill`, `segv`, `exit=CODE`, `raise`, `stop`, `delay=SECONDS`. `point@3` acts the third time that
the point is reached instead of the first.

With the variable unset `armed` is False, and a point costs one test of it:

    if faults.armed:
        faults.reach("meet.after")
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from weft.errors import InvalidValue

VARIABLE = "WEFT_FAULT"

POINTS = (
    "join.start",  # a rank is about to look for its group
    "join.sent",  # it has sent its identity and waits for the others
    "join.mapped",  # it has mapped the group's memory
    "meet.before",  # is about to publish its arrival at a barrier
    "meet.after",  # has published its arrival
    "wait.block",  # has spun in vain and is about to sleep on a futex
    "split.made",  # the leader of a subgroup has made its memory
    "collective.made",  # rank 0 has made the memory of a group's collectives
    "collective.filled",  # has filled its slot and is about to arrive at the first step
    "collective.met",  # knows the other ranks' headers
    "collective.round",  # has filled its slot for one of several rounds
    "collective.block",  # is about to copy from or to a peer's memory, or to pipeline chunks
    "collective.carried",  # has its result; others may still read its memory
    "lock.taken",  # holds a lock exclusively
    "lock.shared",  # holds a lock in shared mode
    "table.made",  # rank 0 has made the memory of a table
    "table.adding",  # has announced which rows it is about to change
    "table.added",  # has changed them, and has not announced it yet
    "table.staged",  # has staged its delta for a later clock, and has not announced it yet
    "table.applying",  # is about to apply a part of a clock's deltas
    "table.copied",  # has copied rows, and is about to check that they were not torn
    "share.created",  # has made a shared array
    "share.attach",  # is about to attach another process's shared array
    "share.attached",  # has attached it
    "worker.started",  # a worker is about to listen to its driver
    "worker.cached",  # it has received a function
    "work.received",  # it has received the items and is about to run them
    "work.done",  # it has run them
    "work.packed",  # its results are ready to send, the large ones in shared memory
    "work.replied",  # it has sent them; its driver may not have attached that memory yet
    "exit.begin",  # shutdown() was called
    "exit.left",  # has told its peers that it leaves
)

ACTIONS = ("kill", "segv", "exit", "raise", "stop", "delay")


class InjectedFault(Exception):
    """The exception of the action `raise`."""


@dataclass
class _Fault:
    point: str
    rank: int | None
    action: str
    argument: float
    countdown: int


def parse(text: str) -> list[_Fault]:
    """Return the faults that a value of WEFT_FAULT asks for. Raises InvalidValue."""
    return [_parse_fault(part) for part in text.split(",") if part.strip()]


def _parse_fault(text: str) -> _Fault:
    form = f"{VARIABLE}={text!r}: expected point[@count]:rank:action[=argument]"
    fields = text.strip().split(":")
    if len(fields) != 3:
        raise InvalidValue(f"{form}, for example meet.after:1:kill")
    point, _, count = fields[0].partition("@")
    action, _, argument = fields[2].partition("=")
    if point not in POINTS:
        raise InvalidValue(f"{form}; there is no point {point!r}, known are {', '.join(POINTS)}")
    if action not in ACTIONS:
        raise InvalidValue(f"{form}; there is no action {action!r}, known are {', '.join(ACTIONS)}")
    try:
        rank = None if fields[1] == "*" else int(fields[1])
        return _Fault(point, rank, action, float(argument or 1), int(count or 1))
    except ValueError as error:
        raise InvalidValue(f"{form}; {error}") from None


_faults = parse(os.environ.get(VARIABLE, ""))
_rank: int | None = None
#: False unless WEFT_FAULT is set: points are skipped without a call
armed = bool(_faults)


def set_rank(rank: int) -> None:
    """Set which rank this process is."""
    global _rank
    _rank = rank


def reach(point: str) -> None:
    """Act if a fault is set at this point. Call it only if `armed` is true."""
    if point not in POINTS:
        raise InvalidValue(f"fault point {point!r} is not in weft.faults.POINTS; add it there")
    for fault in _faults:
        if fault.point == point and fault.rank in (None, _rank):
            fault.countdown -= 1
            if fault.countdown == 0:
                _act(fault)


def _act(fault: _Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "segv":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault.action == "exit":
        os._exit(int(fault.argument))
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "delay":
        time.sleep(fault.argument)
    else:
        raise InjectedFault(f"asked for by {VARIABLE} at {fault.point}")
