"""Every collective, blocking and async, small and large, while a rank is hurt in the middle of it.

A launch is a series of attempts. In an attempt all ranks make the same call, and one of them is
hurt at some point inside; then what is left of the group goes on as a new generation, in which all
six collectives must work. That nothing is left in the end is checked by the fixture in conftest.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support import deadline, launch

CALLS = ("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce")
REDUCTIONS = ("reduce", "all_reduce")
#: the ways that arrays go, and the points that they pass
WAYS = {
    "small": ("collective.filled", "collective.met", "collective.carried"),  # in the slots
    "middle": ("collective.filled", "collective.met", "collective.carried"),  # work is shared
    "large": ("collective.met", "collective.block", "collective.carried"),  # memory to memory
    "pipelined": ("collective.block", "collective.block@2", "collective.block@4"),  # by kernels
    "mapped": ("collective.met", "collective.block", "collective.carried"),  # shared memory
    "rounds": ("collective.met", "collective.round", "collective.carried"),  # slot by slot
}
MEETING = ("meet.before", "meet.after", "wait.block")
#: arrays go another way where there are no loops in C, or where peers cannot reach each other
ENVIRONMENT = {
    "large": {"WEFT_KERNELS": "0"},
    "rounds": {"WEFT_KERNELS": "0", "IN_ROUNDS": "1"},
}
CODES = {"kill": 137, "exit=7": 7}
#: seconds for which ranks wait for one that is stopped: it comes late, but no other must
PATIENCE = 0.5
#: the calls in which a rank is stopped in `make test`, each way that arrays go
STOPPED = ("broadcast", "gather", "all_reduce")

#: what every program here begins with
TOOLS = r"""
import json, os, signal, sys, threading, time
import numpy as np
import weft
from weft import faults
from weft.engines.local.collectives.collective import transport as direct
from weft.engines.local.collectives.collective import transport as slots
from weft.errors import Disagreement, NotInitialized, PeerLost, SetupError, Stalled, UsageError
from weft.errors import UsedAfterFork

direct.ALLOWED = "IN_ROUNDS" not in os.environ
SIZES = {"small": 12, "middle": 32 << 10, "large": slots.ROOM // 8 + 1200}
SIZES["mapped"] = SIZES["rounds"] = SIZES["large"]
SIZES["pipelined"] = 3 * SIZES["large"]  # several chunks
CALLS = ("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce")

def call(group, name, way="small", root=0, *, asynchronous=False, **options):
    '''The result of a call.'''
    value = np.arange(SIZES[way], dtype=float) + group.rank
    if way == "mapped":
        value = weft.share(value)
    if not name.startswith("all"):
        options["root"] = root
    result = getattr(group, name)(value, async_op=asynchronous, **options)
    return result.wait() if asynchronous else result

def expected(group, name, way="small", root=0):
    values = [np.arange(SIZES[way], dtype=float) + rank for rank in range(group.size)]
    if name == "scatter":
        return np.array_split(values[root], group.size)[group.rank]
    if name in ("gather", "reduce") and group.rank != root:
        return None
    if name == "broadcast":
        return values[root]
    return np.concatenate(values) if "gather" in name else sum(values)

def check(group, name, way="small"):
    root = group.size - 1
    result = call(group, name, way, root)
    assert np.array_equal(result, expected(group, name, way, root)), (name, way, result)

def check_all(group, way="small"):
    for name in CALLS:
        check(group, name, way)

def arm(fault, reached="reached"):
    '''From now on that fault and no other; whoever comes to it raises that flag first.'''
    faults._faults = faults.parse(fault)
    faults._act = lambda fault: (raise_flag(reached), act(fault))
    faults.armed = bool(fault)

act = faults._act

def state_of(group, rank):
    return group._meeting.roster.states(group._meeting.members)[rank]

def await_state(group, rank, condition):
    end = time.monotonic() + 60
    while not condition(state_of(group, rank)):
        assert time.monotonic() < end, state_of(group, rank)
        time.sleep(0.005)

def flag(name):
    return os.path.join(os.environ["WEFT_TEST_FOLDER"], name)

def raise_flag(name):
    open(flag(name), "w").close()

def is_raised(name):
    return os.path.exists(flag(name))

def await_flag(name):
    while not is_raised(name):
        time.sleep(0.005)

def tell(**what):
    os.write(1, (json.dumps(what) + "\n").encode())

def told_to_go_on(group):
    '''Whether a rank that gave up is shown how to go on, at any call.'''
    shown = []
    for attempt in (group.barrier, lambda: call(group, "gather"), lambda: group.split(0)):
        try:
            attempt()
        except UsageError as error:
            shown.append("group = group.survivors()" in str(error))
    return shown == [True] * 3
"""

#: one attempt after the other, as the arguments say
SERIES = (
    TOOLS
    + r"""
group = weft.init(timeout=60)
me = group.rank
check_all(group)
patience, attempts = json.loads(sys.argv[1])
for number, (name, way, asynchronous, point, victim, action) in enumerate(attempts):
    root, hurt = group.size - 1, group._meeting.members[victim]
    reached = f"reached-{way}-{number}"  # two ways may run at a time
    group.barrier()
    arm(f"{point}:{hurt}:{action}", reached)
    if point == "wait.block" and me != hurt:
        await_flag(reached)  # it waits for the others, and so goes to sleep in the kernel
    seconds = patience if action == "stop" and me != hurt else 60
    began = time.monotonic()
    told = {}
    try:
        result = call(group, name, way, root, asynchronous=asynchronous, timeout=seconds)
        assert np.array_equal(result, expected(group, name, way, root)), (name, way, result)
        group.barrier(timeout=seconds)  # after a call of one step the loss shows in the next
    except (PeerLost, Stalled, faults.InjectedFault) as error:
        told = dict(error=type(error).__name__, text=str(error))
        told["ranks"] = getattr(error, "ranks", ())
    told["seconds"] = time.monotonic() - began
    arm("")
    if action == "stop" and group.rank == (victim == 0):
        await_state(group, victim, lambda s: s.status == "stopped" or s.operation == "survivors")
        os.kill(group._meeting.roster.process(hurt).pid, signal.SIGCONT)
    case = f"{name} {way} {'async' if asynchronous else 'blocking'} {point} {action}"
    assert me != hurt or is_raised(reached), case
    tell(case=case, call=name, action=action, victim=victim, rank=group.rank, **told)
    group = group.survivors()
    check_all(group)
    check(group, name, way)
check_all(group, way)
tell(done=me)
"""
)


def run_series(attempts: list[tuple[Any, ...]], way: str, size: int) -> list[dict[str, Any]]:
    """What the ranks told of their attempts."""
    options, env = ("--keep-going", "--no-prefix"), ENVIRONMENT.get(way)
    what = json.dumps((deadline(PATIENCE), attempts))
    outcome = launch(SERIES, size, what, options=options, env=env)
    told = [json.loads(line) for line in outcome.out.splitlines()]
    codes = [CODES[action] for *_, action in attempts if action in CODES]
    assert outcome.code == (codes[0] if codes else 0), outcome
    assert sum("done" in line for line in told) == size - len(codes), outcome
    return [line for line in told if "case" in line]


def calls_that_go(way: str) -> tuple[str, ...]:
    return ("broadcast", *REDUCTIONS) if way == "pipelined" else CALLS


def attempts_for(
    names: tuple[str, ...], way: str, actions: tuple[str, ...], size: int
) -> list[tuple[Any, ...]]:
    """An attempt for each call and action. From call to call other points come first, and each kind
    of meeting point follows one inside the call; blocking and async calls take turns, and so do the
    victims. With `kill` and `exit` the group shrinks."""
    points = [point for pair in zip(WAYS[way], MEETING, strict=True) for point in pair]
    attempts = []
    for number, (name, action) in enumerate(zip(names, actions, strict=True)):
        turn = CALLS.index(name)
        point = points[(turn + number) % len(points)]
        victim = victim_of(name, point, turn + number, size)
        asynchronous = bool((turn + number + turn // 2) % 2)
        attempts.append((name, way, asynchronous, point, victim, action))
        size -= action in CODES
    return attempts


def victim_of(name: str, point: str, turn: int, size: int) -> int:
    """Each rank has its turn; but in scatter the root, which is the last, copies nothing."""
    return 0 if (name, point) == ("scatter", "collective.block") else turn % size


#: what is called in a group that shrinks three times, and which way it goes: in `make test` each
#: call that goes this way once, in `make soak` each of them three times
SHRINKING = [
    *(
        pytest.param(names, way, id=f"{way}-{'-'.join(names)}")
        for way in WAYS
        for names in (
            [("reduce", "all_reduce", "reduce")]
            if way in ("middle", "mapped", "pipelined")
            else [CALLS[::2], CALLS[1::2]]
        )
    ),
    *(
        pytest.param((name,) * 3, way, marks=pytest.mark.soak, id=f"{way}-{name}")
        for way in WAYS
        for name in (REDUCTIONS if way in ("middle", "mapped", "pipelined") else CALLS)
    ),
]


@pytest.mark.parametrize(("names", "way"), SHRINKING)
def test_a_rank_dies_in_a_collective(names: tuple[str, ...], way: str) -> None:
    """Whoever is left is told who died, soon, and can go on: three times, until one is left."""
    attempts = attempts_for(names, way, ("kill", "exit=7", "kill"), 4)
    told = run_series(attempts, way, 4)
    assert len(told) == 3 + 2 + 1, told
    for line in told:
        assert line.get("error") == "PeerLost", line
        assert line["ranks"] == [line["victim"]], line
        assert line["call"] in line["text"], line
        assert line["seconds"] < 20, line


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_raises_or_is_late_in_a_collective(way: str) -> None:
    """At every point of every call: if the rank only comes late all is well; if it raises, and so
    leaves half way, the others are told at once that it gave up, and all can go on together."""
    attempts = [
        (name, way, asynchronous, point, victim_of(name, point, turn + asynchronous, 3), action)
        for turn, name in enumerate(calls_that_go(way))
        for asynchronous in (False, True)
        for point in (*WAYS[way], *MEETING)
        for action in (["raise"] if (turn + asynchronous) % 2 else ["raise", "delay=0.02"])
    ]
    told = run_series(attempts, way, 3)
    assert len(told) == 3 * len(attempts)
    for line in told:
        if line["action"] != "raise":
            assert "error" not in line, line
        elif line["rank"] == line["victim"]:
            assert line.get("error") == "InjectedFault", line
        else:
            assert line.get("error") == "PeerLost", line
            assert line["ranks"] == [line["victim"]], line
            assert "gave up" in line["text"], line
        assert line["seconds"] < 20, line


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_rank_is_stopped_in_a_collective(rest: bool) -> None:
    """Whoever comes to the deadline is told who did not come, and the others that it gave up; when
    the stopped rank runs again, which may be in time for some, all can go on together. Most of this
    is waiting for deadlines: three ways at a time."""

    def told(way: str) -> list[dict[str, Any]]:
        names = [name for name in calls_that_go(way) if rest != (name in STOPPED)]
        attempts = [attempts_for((name,), way, ("stop",), 3)[0] for name in names]
        lines = run_series(attempts, way, 3)
        assert len(lines) == 3 * len(attempts)
        return lines

    with ThreadPoolExecutor(3) as pool:
        every = [line for lines in pool.map(told, WAYS) for line in lines]
    for case in {line["case"] for line in every}:
        others = [line for line in every if line["case"] == case and line["rank"] != line["victim"]]
        stalled = [line for line in others if line.get("error") == "Stalled"]
        assert any(line["victim"] in line["ranks"] for line in stalled), others
        assert {line.get("error") for line in others} <= {"Stalled", "PeerLost", None}, others
