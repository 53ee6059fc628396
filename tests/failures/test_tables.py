"""Tables while a rank is hurt in the middle of an add or a get.

A launch is a series of attempts, each with a table of its own in which every rank adds to its own
column. In an attempt one rank is hurt; then all that are left go on adding and reading, and in the
end the table must hold what they added. That nothing is left is checked by the fixture in conftest.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.failures.test_collectives import TOOLS
from tests.failures.test_interrupts import STRUCK
from tests.support import launch

#: which part of the table an add is for, and how many rows it has: some of one stripe, all of one,
#: all of several
WAYS = {"rows": 300, "whole": 300, "stripes": 300_000}
IDS = [7, 3, 250]
#: points inside of an add, and all others
INSIDE = ("table.adding", "table.added", "table.applying")

TABLES = (
    TOOLS
    + r"""
WAYS = {"rows": 300, "whole": 300, "stripes": 300_000}
IDS = [7, 3, 250]

class Case:
    '''A table in which every rank has a column, and adds 1 to it.'''

    def __init__(self, group, consistency, way):
        self.group, self.way = group, way
        consistency = weft.ssp(1) if consistency == "ssp" else consistency
        n_rows = WAYS[way]
        device = os.environ.get("WEFT_TEST_DEVICE", "cpu")
        self.table = weft.MatrixTable(
            n_rows, 6, dtype="int64", consistency=consistency, device=device
        )
        self.ids = IDS if way == "rows" else None
        self.delta = np.zeros((len(IDS) if self.ids else n_rows, 6), np.int64)
        self.delta[:, group.rank] = 1
        self.named = np.array(IDS) if self.ids else np.arange(n_rows)

    @property
    def own(self):
        return self.table._store._rows.clocks.own

    def add(self, **options):
        self.table.add(self.delta, self.ids, **options)

    def get(self, **options):
        return self.table.get(self.ids, **options)

    def columns(self):
        '''What is in each column of the rows that are added to, if it is the same in all.'''
        rows = np.asarray(self.table)
        rest = np.delete(rows, self.named, 0)
        assert not rest.any(), rest
        rows = rows[self.named]
        return [int(c[0]) if (c == c[0]).all() else sorted(set(c.tolist())) for c in rows.T]

    def interrupted(self):
        return [
            (one.rank, [one.rows.start, one.rows.stop] if isinstance(one.rows, range) else one.rows,
             one.generation)
            for one in self.table.interrupted
        ]

def attempt(group, number, consistency, way, point, victim, action):
    case = Case(group, consistency, way)
    me, hurt = group.rank, group._meeting.members[victim]
    for _ in range(2):
        case.add()
        case.get()
    if me != victim:
        case.add()
    group.barrier()
    told = {}
    if me == victim:
        try:
            arm(f"{point}:{hurt}:{action}", f"reached{number}")
            case.add()
            case.get()
        except faults.InjectedFault as error:
            told["error"] = "InjectedFault"
        arm("")
        assert is_raised(f"reached{number}"), point
        raise_flag(f"over{number}")
        while case.own < 3:  # a rank that goes on adds as often as the others
            case.add()
    else:
        await_flag(f"reached{number}")  # or somebody else would do what the victim is to do
        if not action.startswith("delay"):
            over = f"over{number}"
            await_state(group, victim, lambda s: s.status != "alive" or is_raised(over))
        began = time.monotonic()
        try:
            case.get(timeout=0.3 if action == "stop" else 60)
            case.table.get([3], timeout=0.3 if action == "stop" else 60)
        except Stalled as error:
            told.update(error="Stalled", ranks=error.ranks, text=str(error))
            told["states"] = [state.status for state in error.states]
        told["seconds"] = time.monotonic() - began
        told["interrupted"] = case.interrupted()
        raise_flag(f"told{number}.{me}")
        if action == "stop" and me == (victim == 0):
            for rank in set(range(group.size)) - {victim}:
                await_flag(f"told{number}.{rank}")
            await_state(group, victim, lambda s: s.status == "stopped")
            os.kill(group._meeting.roster.process(hurt).pid, signal.SIGCONT)
    case.get()
    for _ in range(2):
        case.add()
        case.get()
    tell(case=[consistency, way, point, action], victim=victim, rank=me, **told)
    if action == "kill":
        group = group.survivors()
    group.barrier()
    tell(end=[consistency, way, point, action], columns=case.columns(), of=victim,
         interrupted=case.interrupted(), generation=group.generation)
    group.barrier()
    return group
"""
)

SERIES = (
    TABLES
    + r"""
group = weft.init(timeout=60)
for number, one in enumerate(json.loads(sys.argv[1])):
    group = attempt(group, number, *one)
tell(done=group.rank)
"""
)


def run_series(attempts: list[tuple[Any, ...]], size: int) -> tuple[list[Any], list[Any]]:
    """What the ranks told of their attempts, and of the tables in the end."""
    outcome = launch(SERIES, size, json.dumps(attempts), options=("--keep-going", "--no-prefix"))
    told = [json.loads(line) for line in outcome.out.splitlines()]
    deaths = sum(action == "kill" for *_, action in attempts)
    assert outcome.code == (137 if deaths else 0), outcome
    assert sum("done" in line for line in told) == size - deaths, outcome
    return [line for line in told if "case" in line], [line for line in told if "end" in line]


#: consistency, way, point: all that an add and a get pass
PASSED = [
    *(
        (consistency, way, point)
        for consistency in ("async", "ssp")
        for way in WAYS
        for point in ("table.adding", "table.added", "table.copied")
        if (way, point) != ("stripes", "table.copied")
    ),
    *(
        ("bsp", way, point)
        for way in ("rows", "whole")
        for point in ("table.staged", "table.adding", "table.applying", "table.added")
    ),
]


def rows_of(way: str) -> list[int]:
    return IDS if way == "rows" else [0, WAYS[way]]


@pytest.mark.parametrize("turn", range(6))
def test_a_rank_dies_in_a_table(turn: int) -> None:
    """Nobody is held up, nobody's adds are lost, and what may be half done is told exactly."""
    cases = PASSED[turn::6]
    size = 2 + len(cases)
    attempts = [
        (*case, (turn + number) % (size - number), "kill") for number, case in enumerate(cases)
    ]
    told, ends = run_series(attempts, size)
    for line in told:
        assert "error" not in line, line
        assert line["seconds"] < 20, line
    for line in ends:
        consistency, way, point, _ = line["end"]
        victim, columns = line["of"], line["columns"]
        expected = []
        if point in INSIDE:
            expected = [[victim, rows_of(way), line["generation"] - 1]]
        assert line["interrupted"] == expected, line
        for one in (one for one in told if one["case"] == line["end"]):
            assert one["interrupted"] == expected, one  # at once, and for good
        left = size - line["generation"]
        survived = [count for rank, count in enumerate(columns) if rank != victim]
        assert survived == [5] * left + [0] * (5 - left), line
        missing = point == "table.staged" or (consistency != "bsp" and point == "table.adding")
        half = way == "stripes" and point == "table.added"
        assert columns[victim] == ([2, 3] if half else 2 if missing else 3), line


@pytest.mark.parametrize("consistency", ["async", "ssp", "bsp"])
def test_a_rank_raises_or_is_late_in_a_table(consistency: str) -> None:
    """If it comes late all is well; if it raises, only its own add may be missing, and who goes on
    adds it again: under async and ssp it may have been made, under bsp never."""
    attempts = [
        (*case, number % 3, action)
        for number, case in enumerate(PASSED)
        if case[0] == consistency
        for action in ("raise", "delay=0.02")
    ]
    told, ends = run_series(attempts, 3)
    assert len(told) == len(ends) == 3 * len(attempts)
    for line in told:
        raises = line["case"][3] == "raise" and line["rank"] == line["victim"]
        assert line.get("error") == ("InjectedFault" if raises else None), line
    for line in ends:
        consistency, way, point, action = line["end"]
        expected: list[Any] = [5, 5, 5, 0, 0, 0]
        if action == "raise" and point == "table.added" and consistency != "bsp":
            expected[line["of"]] = [5, 6] if way == "stripes" else 6
        assert line["columns"] == expected, line
        assert line["interrupted"] == [], line


@pytest.mark.parametrize("consistency", ["async", "ssp", "bsp"])
def test_a_rank_is_stopped_in_a_table(consistency: str) -> None:
    """Who needs what it holds is told at the deadline, by name; when it runs again, all is well."""
    attempts = [
        (*case, number % 3, "stop")
        for number, case in enumerate(PASSED)
        # under ssp an add holds what it holds under async
        if case[0] == consistency and (consistency != "ssp" or case[1] == "whole")
    ]
    told, ends = run_series(attempts, 3)
    assert len(told) == len(ends) == 3 * len(attempts)
    for line in told:
        _, _, point, _ = line["case"]
        if line["rank"] == line["victim"]:
            continue
        assert line["interrupted"] == [], line
        if point == "table.copied":
            assert "error" not in line, line
        else:
            assert line.get("error") == "Stalled", line
            assert line["states"][line["victim"]] == "stopped", line
            assert len(line["states"]) == 3, line
            named = line["ranks"] == [line["victim"]]
            # who holds the table's lock may itself be waiting for the victim to leave it
            assert named or line["ranks"] == [3 - line["rank"] - line["victim"]], line
    for line in ends:
        assert line["columns"] == [5, 5, 5, 0, 0, 0], line
        assert line["interrupted"] == [], line


def test_a_rank_dies_as_it_makes_a_table() -> None:
    """The others are told, and can make it among themselves."""
    outcome = launch(
        TABLES
        + r"""
group = weft.init(timeout=60)
arm("table.made:0:kill")
try:
    Case(group, "bsp", "whole")
except PeerLost as error:
    tell(ranks=error.ranks)
group = group.survivors()
for consistency in ("bsp", "ssp", "async"):
    case = Case(group, consistency, "whole")
    case.add()
    case.get()
    group.barrier()
    tell(columns=case.columns())
""",
        3,
        options=("--keep-going", "--no-prefix"),
    )
    told = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.code == 137, outcome
    assert [line["ranks"] for line in told if "ranks" in line] == [[0]] * 2, outcome
    assert [line["columns"] for line in told if "columns" in line] == [[1, 1, 0, 0, 0, 0]] * 6, (
        outcome
    )


def test_a_rank_that_finishes_early_releases_the_others() -> None:
    """It calls weft.shutdown() or ends, after fewer adds; the others go on, and have its adds."""
    outcome = launch(
        TABLES
        + r"""
group = weft.init(timeout=60)
cases = [Case(group, *how) for how in (("bsp", "whole"), ("bsp", "rows"), ("ssp", "stripes"))]
for turn in range(7):
    if turn == 3 and group.rank == 1:
        weft.shutdown()
        await_flag("over")
    if turn == (3, 5)[group.rank - 1] and group.rank:
        sys.exit()
    for case in cases:
        case.add()
        case.get()
assert [case.table.staleness for case in cases] == [0, 0, 0]
tell(columns=[case.columns() for case in cases])
tell(interrupted=[case.interrupted() for case in cases])
raise_flag("over")
""",
        3,
        options=("--no-prefix",),
    )
    told = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.code == 0, outcome
    assert {"columns": [[7, 3, 5, 0, 0, 0]] * 3} in told, outcome
    assert {"interrupted": [[]] * 3} in told, outcome


@pytest.mark.parametrize("consistency", ["bsp", "ssp"])
def test_unequal_counts_are_told(consistency: str) -> None:
    """Whoever waits for ranks that only stopped adding is told at the deadline who is behind, by
    how much and where they are; and can go on when they have come."""
    outcome = launch(
        TABLES
        + r"""
group = weft.init(timeout=60)
case = Case(group, sys.argv[1], "rows")
case.add()
group.barrier()
if group.rank == 0:
    for turn in range(2):
        try:
            case.add(timeout=0.3)
            case.get(timeout=0.3)
        except Stalled as error:
            tell(text=str(error).splitlines()[0], ranks=error.ranks, turn=turn,
                 states=[s.operation for s in error.states])
            break
    raise_flag("told")
else:
    await_flag("told")
while case.own < 4:
    case.add()
case.get()
group.barrier()
tell(columns=case.columns(), interrupted=case.interrupted())
group.barrier()
""",
        3,
        consistency,
        options=("--no-prefix",),
    )
    told = [json.loads(line) for line in outcome.out.splitlines()]
    stalled = [line for line in told if "text" in line]
    assert len(stalled) == 1, outcome
    assert stalled[0]["ranks"] == [1, 2], outcome
    assert len(stalled[0]["states"]) == 3, outcome
    assert "rank 1 has made 1, rank 2 has made 1" in stalled[0]["text"], outcome
    assert f"({consistency}" in stalled[0]["text"], outcome
    assert [line["columns"] for line in told if "columns" in line] == [[4, 4, 4, 0, 0, 0]] * 3, (
        outcome
    )


def test_pending_calls_at_shutdown() -> None:
    """What was begun before is carried out; what waits for others is given up when this rank
    leaves, and the others go on without it."""
    outcome = launch(
        TABLES
        + r"""
from weft.engines import background
background._ENDING = 0.5
group = weft.init(timeout=60)
free, bound = Case(group, "async", "stripes"), Case(group, "bsp", "whole")
group.barrier()
if group.rank == 0:
    handles = [free.table.add_async(free.delta) for _ in range(5)]
    handles += [bound.table.add_async(bound.delta) for _ in range(2)]
    weft.shutdown()
    try:
        handles[-1].wait(30)
    except NotInitialized:
        tell(given_up=[handle.done() for handle in handles])
    try:
        free.table.get_async().wait(30)
    except NotInitialized:
        tell(left=True)
    raise_flag("left")
else:
    await_flag("left")
    bound.add()
    tell(free=free.columns(), bound=bound.columns())
""",
        2,
        options=("--no-prefix",),
    )
    told = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.code == 0, outcome
    assert {"given_up": [True] * 7} in told, outcome
    assert {"left": True} in told, outcome
    assert {"free": [5, 0, 0, 0, 0, 0], "bound": [1, 1, 0, 0, 0, 0]} in told, outcome


@pytest.mark.parametrize("consistency", ["async", "bsp"])
def test_tables_survive_interrupts(consistency: str) -> None:
    """A rank is struck in the middle of adds and gets again and again: the other is not held up,
    none of its adds is lost or made twice, and the struck one's are there or not."""
    # a traceback that is kept keeps what is in it
    kept = "except Interrupt as error:\n            kept = error\n"
    struck = STRUCK.replace("except Interrupt:\n", kept).replace(
        "global exposed", "global exposed, kept"
    )
    assert struck.count("kept") == 2
    outcome = launch(
        struck
        + TABLES
        + r"""
group = weft.init(timeout=30)
case, other = Case(group, sys.argv[1], "whole"), Case(group, "async", "stripes")
made = {case: 0, other: 0}

def use(step, seconds=30):
    for one in (other, case) if step % 5 == 0 and sys.argv[1] == "async" else (case,):
        one.add(timeout=seconds)
        made[one] += 1
        one.get(timeout=seconds)

use(0)  # loads what it needs
group.barrier()
if group.rank == 0:
    count = struck(use, seconds=2.0)
    raise_flag("over")
else:
    count = step = 0
    while not os.path.exists(flag("over")):
        step += 1
        try:
            use(step, 1.0)
        except Stalled:  # the other may have come to its end
            pass
for one in (case, other):
    changes = one.table._store._rows.changes
    assert changes.write_begun[group.rank] == changes.write_done[group.rank]
if sys.argv[1] == "bsp":
    most = group.all_reduce(case.own, "max")
    while case.own < most:
        case.add()
group.barrier()
columns, others = case.columns(), other.columns()
tell(rank=group.rank, own=case.own, made=[*made.values()], columns=columns, others=others,
     struck=count)
group.barrier()
""",
        2,
        consistency,
        options=("--no-prefix",),
    )
    assert outcome.code == 0, outcome
    first, second = sorted(map(json.loads, outcome.out.splitlines()), key=lambda one: one["rank"])
    count = first["struck"]
    assert count > 20, outcome
    assert first["columns"] == second["columns"], outcome
    if consistency == "bsp":
        assert first["columns"][:2] == [first["own"], second["own"]], outcome
        return
    assert second["columns"][1] == second["made"][0], outcome
    assert second["others"][1] == second["made"][1], outcome
    assert 0 <= first["columns"][0] - first["made"][0] <= count, outcome
