"""Random runs of real ranks, with delays, early leavers and kills, against the rules.

Four ranks add to five tables and read them, in the same order on every rank. In four of them, one
for each consistency, every rank has a column, to which it adds 1: what it reads tells how many adds
of each rank it has seen. The fifth is of float32 under bsp. Each rank writes down what it did; here
this is checked against the rules of `tests/_core/histories.py`, and against the times.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests._core.histories import Added, Event, Gone, Got, violations
from tests.hosts import Hosts
from tests.support import launch
from weft._core.tables import Consistency, resolve, ssp

SIZE, TURNS = 4, 20
RULES: dict[str, Consistency] = {
    "async": resolve("async"),
    "bsp": resolve("bsp"),
    "ssp(1)": ssp(1),
    "ssp(3)": ssp(3),
}

PROGRAM = r"""
import json, os, random, signal, sys, time, zlib
import numpy as np
import weft

plan = json.loads(sys.argv[1])
group = weft.init(timeout=30)
me = group.rank
chance = random.Random(f"{plan['delays']} {me}")
values = np.random.default_rng([plan["seed"], me])
log = os.open(f"{os.environ['WEFT_TEST_FOLDER']}/log{me}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

def note(*what):
    os.write(log, (json.dumps([time.monotonic_ns(), *what]) + "\n").encode())

rules = {"async": "async", "bsp": "bsp", "ssp(1)": weft.ssp(1), "ssp(3)": weft.ssp(3)}
tables = {
    name: weft.MatrixTable(50, group.size, dtype="int64", consistency=rule, name=name)
    for name, rule in rules.items()
}
floats = weft.ArrayTable(5000, consistency="bsp", updater="adagrad", name="floats")
delta = np.zeros((50, group.size), np.int64)
delta[:, me] = 1
note("joins")
group.barrier()
if str(me) in plan["kill"]:
    signal.setitimer(signal.ITIMER_REAL, plan["kill"][str(me)])  # nobody handles it: it kills
for turn in range(1, plan["turns"] + 1):
    if turn == plan["leave"].get(str(me)):
        break
    for name, table in tables.items():
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.003)
        note("add", name)
        if chance.random() < 0.3:
            table.add_async(delta).wait()
        else:
            table.add(delta, None if turn % 3 else range(50))
        note("added", name)
        while chance.random() < 0.5:
            note("get", name)
            rows = table.get() if chance.random() < 0.5 else table.get(range(50))
            like_first = (rows == rows[0]).all()
            note("got", name, rows[0].tolist(), bool(like_first), table.staleness)
    ids = values.integers(5000, size=300)
    floats.add(values.standard_normal(5000 if turn % 2 else 300), None if turn % 2 else ids)
    if chance.random() < 0.5:
        note("bits", turn, zlib.crc32(floats.get().tobytes()))
signal.setitimer(signal.ITIMER_REAL, 0)
note("leaves")
weft.shutdown()
note("left")
"""


def run(plan: dict[str, Any], hosts: Hosts | None = None) -> list[list[list[Any]]]:
    """What each rank wrote down: when, what, and more; on this host, or on several."""
    if hosts is None:
        outcome = launch(PROGRAM, SIZE, json.dumps(plan), options=("--keep-going",))
    else:
        outcome = hosts.launch(PROGRAM, SIZE // hosts.count, json.dumps(plan), ft=True)
    folder = Path(os.environ["WEFT_TEST_FOLDER"])
    texts = [(folder / f"log{rank}").read_text() for rank in range(SIZE)]
    # the last line of a rank that was killed may be incomplete
    logs = [[json.loads(line) for line in text.split("\n")[:-1]] for text in texts]
    killed = [str(rank) for rank, log in enumerate(logs) if log[-1][1] != "left"]
    assert set(killed) <= plan["kill"].keys(), outcome  # some have ended before
    if hosts is None:  # mpirun with ULFM may end with any code
        assert outcome.code == (128 + signal.SIGALRM if killed else 0), outcome
    return logs


def random_plan(seed: int) -> dict[str, Any]:
    """Up to two ranks leave early, up to two are killed, at any time of a run."""
    chance = random.Random(seed)
    hurt = chance.sample(range(SIZE), 3)
    leave, kill = chance.choice([(0, 1), (1, 1), (2, 1), (1, 2), (0, 2)])
    return {
        "seed": seed,
        "delays": seed,
        "turns": TURNS,
        "leave": {str(rank): chance.randrange(1, TURNS) for rank in hurt[:leave]},
        "kill": {str(rank): 0.001 + 0.2 * chance.random() for rank in hurt[leave:][:kill]},
    }


def quiet_plan(delays: int) -> dict[str, Any]:
    return {"seed": 7, "delays": delays, "turns": TURNS, "leave": {"3": 13}, "kill": {}}


@pytest.mark.parametrize("seed", range(5))
def test_random_runs_keep_the_rules(seed: int) -> None:
    """Whoever leaves or is killed, whenever: nobody waits for it, and every get has what its
    table's consistency promises; under bsp the same bits on every rank."""
    keep_the_rules(run(random_plan(seed)))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_random_runs_over_hosts_keep_the_rules(two_hosts: Hosts, seed: int) -> None:
    """The same on two hosts, of which each has half of the rows; the last of a host is killed."""
    plan = random_plan(seed)
    plan["leave"] = {"1": plan["leave"].get("1", 7)}
    plan["kill"] = {"3": 0.1 + 0.1 * seed}
    keep_the_rules(run(plan, two_hosts))


def keep_the_rules(logs: list[list[list[Any]]]) -> None:
    for name, rule in RULES.items():
        events = [[line for line in log if line[2:3] == [name]] for log in logs]
        killed = [rank for rank, log in enumerate(logs) if log[-1][1] != "left"]
        history = _history(events, killed)
        assert not violations(history, SIZE, rule, in_order=False), (name, logs)
        assert not _too_early(logs, name, rule), (name, logs)
    _equal_bits(logs)


def test_bsp_gives_the_same_bits_in_every_run(two_hosts: Hosts) -> None:
    """Three runs of one program, with other delays and on one host or two: every get of every rank
    has the same bits."""
    one, other, over_hosts = (
        _equal_bits(run(quiet_plan(delays), hosts))
        for delays, hosts in ((1, None), (2, None), (3, two_hosts))
    )
    for first, second in ((one, other), (one, over_hosts)):
        common = first.keys() & second.keys()
        assert len(common) > TURNS // 2
        assert {turn: first[turn] for turn in common} == {turn: second[turn] for turn in common}


def _history(events: Sequence[Sequence[list[Any]]], killed: Sequence[int]) -> list[Event]:
    """One rank's events after the other's. An add in which its rank was killed has been made if
    anybody has seen it."""
    history: list[Event] = []
    for rank, own_events in enumerate(events):
        own = begun = 0
        for _, what, *more in own_events:
            begun += what == "add"
            if what == "added":
                own += 1
                history.append(Added(rank, own))
            elif what == "got":
                _, seen, alike, _ = more
                assert alike or killed, (rank, more)
                history.append(Got(rank, own, tuple(seen)))
        seen_by = [line[3][rank] for log in events for line in log if line[1] == "got"]
        if begun > own and max(seen_by, default=0) > own:
            history.append(Added(rank, own + 1))
        history.append(Gone(rank, died=rank in killed))
    return history


def _too_early(logs: Sequence[Sequence[list[Any]]], name: str, rule: Consistency) -> list[Any]:
    """The adds under ssp, and the gets under bsp, that ended before a rank that had not left or
    died had even begun the add that they had to wait for."""
    begun = [[line[0] for line in log if line[1:3] == ["add", name]] for log in logs]
    # a rank is there until it says that it leaves, or until its last sign of life
    ends = [next((line[0] for line in log if line[1] == "leaves"), log[-1][0]) for log in logs]
    found = []
    for rank, log in enumerate(logs):
        own = 0
        for when, what, *more in log:
            if not more or more[0] != name or what not in ("added", "got"):
                continue
            own += what == "added"
            needed = rule.before_add(own - 1) if what == "added" else rule.before_get(own)
            for other in range(SIZE):
                waits = needed > 0 and other != rank and when < ends[other]
                if waits and (len(begun[other]) < needed or begun[other][needed - 1] > when):
                    found.append((rank, what, own, other))
    return found


def _equal_bits(logs: Sequence[Sequence[list[Any]]]) -> dict[int, int]:
    """What was read of the floats after each turn, the same by all who did."""
    found: dict[int, int] = {}
    for log in logs:
        for _, what, *more in log:
            if what == "bits":
                turn, bits = more
                assert found.setdefault(turn, bits) == bits, (turn, logs)
    return found
