"""The rules of async, bsp and ssp(k), and a model of ranks that follow them.

The model is n ranks and a table without processes, locks or time: each rank is a generator that
says how many adds everybody else must have made before it goes on, as the rules have it; whoever
may go on takes one small step, in an order that Hypothesis chooses; anybody can die between two
steps. What they did is checked against what the rules are for, by `histories.py`, which knows
nothing of how they work.
"""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests._core.histories import Added, Event, Gone, Got, violations
from weft._core import tables
from weft._core.tables import ASYNC, BSP, Consistency, behind, resolve, ssp, staleness
from weft.errors import InvalidType, InvalidValue

RULES = [ASYNC, BSP, ssp(1), ssp(2), ssp(5)]


def named(rule: Consistency) -> str:
    return str(rule)


# the rules


def test_the_example_in_the_docstring_is_true() -> None:
    """What `ssp` shows runs."""
    result = doctest.testmod(tables)
    assert (result.failed, result.attempted > 3) == (0, True)


def test_what_each_rule_waits_for() -> None:
    """The table on top of the module, in numbers."""
    adds = range(6)
    assert [ASYNC.before_add(own) for own in adds] == [0, 0, 0, 0, 0, 0]
    assert [ASYNC.before_get(own) for own in adds] == [0, 0, 0, 0, 0, 0]
    assert [BSP.before_add(own) for own in adds] == [0, 1, 2, 3, 4, 5]
    assert [BSP.before_get(own) for own in adds] == [0, 1, 2, 3, 4, 5]
    assert [ssp(1).before_add(own) for own in adds] == [0, 1, 2, 3, 4, 5]
    assert [ssp(3).before_add(own) for own in adds] == [0, 0, 0, 1, 2, 3]
    assert [ssp(3).before_get(own) for own in adds] == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("given_", "rule", "text"),
    [
        ("async", ASYNC, "async"),
        ("bsp", BSP, "bsp"),
        (ssp(4), Consistency("ssp", 4), "ssp(4)"),
        (BSP, BSP, "bsp"),
    ],
)
def test_rules_have_names(given_: Any, rule: Consistency, text: str) -> None:
    """A rule is given by name or by itself, and is shown as users write it."""
    assert resolve(given_) == rule
    assert str(rule) == text


@pytest.mark.parametrize("wrong", [0, -1, -(10**30)])
def test_a_slack_below_one_is_refused(wrong: int) -> None:
    """Where nobody may be ahead, bsp is meant, and the message says so."""
    with pytest.raises(InvalidValue) as error:
        ssp(wrong)
    assert f"ssp({wrong})" in str(error.value)
    assert "expected 1 or more" in str(error.value)
    assert "consistency='bsp'" in str(error.value)


@pytest.mark.parametrize("wrong", [True, 1.0, "3", None, [1]])
def test_a_slack_is_a_whole_number(wrong: Any) -> None:
    """Anything else is refused, and named."""
    with pytest.raises(InvalidType) as error:
        ssp(wrong)
    assert f"ssp({wrong!r}): expected a whole number" in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("ssp", InvalidValue),
        ("BSP", InvalidValue),
        ("", InvalidValue),
        (None, InvalidType),
        (3, InvalidType),
        (ssp, InvalidType),
        (["async"], InvalidType),
    ],
)
def test_an_unknown_consistency_is_refused(wrong: Any, kind: type[Exception]) -> None:
    """The message names what was given and what would do."""
    with pytest.raises(kind) as error:
        resolve(wrong)
    assert f"consistency={wrong!r}" in str(error.value)
    assert "'async', 'bsp' or weft.ssp(k)" in str(error.value)


def test_who_is_behind_and_by_how_much() -> None:
    """Counts of the others tell who is waited for, and how stale a read may be."""
    counts = {0: 3, 2: 5, 3: 4}
    assert behind(counts, 3) == []
    assert behind(counts, 5) == [0, 3]
    assert behind({}, 9) == []
    assert staleness(5, counts) == 2
    assert staleness(2, counts) == 0
    assert staleness(7, {}) == 0


# the model


class Model:
    """Ranks and a table, one small step at a time."""

    def __init__(self, rule: Consistency, programs: Sequence[Sequence[str]]) -> None:
        self.rule, self.size = rule, len(programs)
        self.history: list[Event] = []
        #: adds that each rank has made, for all to see
        self.made = [0] * self.size
        #: adds of each rank that are in the rows
        self.applied = [0] * self.size
        self.clock = 0
        self._ranks = {rank: self._rank(rank, p) for rank, p in enumerate(programs)}
        #: what each rank that is present waits for
        self._needs = {rank: next(steps) for rank, steps in self._ranks.items()}

    @property
    def present(self) -> list[int]:
        return list(self._ranks)

    def able(self) -> list[int]:
        """Who can go on: those for whom everybody present has made enough adds."""
        return [
            rank
            for rank, needed in self._needs.items()
            if not behind(
                {other: self.made[other] for other in self._ranks if other != rank}, needed
            )
        ]

    def step(self, rank: int) -> None:
        try:
            self._needs[rank] = next(self._ranks[rank])
        except StopIteration:
            self.go(rank, died=False)

    def go(self, rank: int, *, died: bool) -> None:
        del self._ranks[rank], self._needs[rank]
        self.history.append(Gone(rank, died))

    def _rank(self, rank: int, program: Sequence[str]) -> Iterator[int]:
        """What a rank does; it yields how many adds the others must have made before it goes on."""
        for operation in program:
            own = self.made[rank]
            if operation == "get":
                yield self.rule.before_get(own)
                self._apply_clocks(own)
                self.history.append(Got(rank, own, tuple(self.applied)))
                continue
            yield self.rule.before_add(own)
            self._apply_clocks(own)
            if self.rule.name != "bsp":
                self.applied[rank] += 1
            yield 0  # it is done and nobody has been told: somebody may read, or this one die
            self.made[rank] += 1
            self.history.append(Added(rank, own + 1))
        yield 0  # it may stay for a while

    def _apply_clocks(self, last: int) -> None:
        """Under bsp: everybody's adds up to a clock, each once, in the order of ranks."""
        while self.rule.name == "bsp" and self.clock < last:
            self.clock += 1
            for rank in range(self.size):
                if self.made[rank] >= self.clock:
                    # there is one place for a delta: it must be the one of this clock
                    assert self.made[rank] == self.clock
                    self.applied[rank] += 1


@dataclass(frozen=True)
class Schedule:
    """What ranks are to do, and who takes the next step."""

    programs: list[list[str]]
    #: one number for each step: which of those who can
    turns: list[int]
    #: steps before which somebody dies, and who
    deaths: dict[int, int]


schedules = st.builds(
    Schedule,
    st.lists(st.lists(st.sampled_from(["add", "add", "get"]), max_size=12), min_size=1, max_size=5),
    st.lists(st.integers(0, 59), min_size=1, max_size=60),
    st.dictionaries(st.integers(0, 60), st.integers(0, 4), max_size=3),
)


def played(rule: Consistency, schedule: Schedule) -> list[Event]:
    """What happens when ranks follow a rule by a schedule, to the last one's end."""
    model, number = Model(rule, schedule.programs), 0
    while model.present:
        victim = schedule.deaths.get(number)
        if victim in model.present:
            model.go(victim, died=True)
        else:
            able = model.able()
            assert able, f"nobody can go on: {model.history}"
            model.step(able[schedule.turns[number % len(schedule.turns)] % len(able)])
        number += 1
    return model.history


@pytest.mark.parametrize("rule", RULES, ids=named)
@given(schedule=schedules)
def test_the_model_keeps_what_the_rules_promise(rule: Consistency, schedule: Schedule) -> None:
    """However ranks are delayed, leave and die, every history is allowed, and all come to an
    end."""
    history = played(rule, schedule)
    assert violations(history, len(schedule.programs), rule) == []
    assert violations(history, len(schedule.programs), rule, in_order=False) == []
    gone = [event for event in history if isinstance(event, Gone)]
    assert sorted(event.rank for event in gone) == list(range(len(schedule.programs)))
    if not any(event.died for event in gone):
        # nobody was kept from anything
        done = sum(not isinstance(event, Gone) for event in history)
        assert done == sum(map(len, schedule.programs))


@given(schedule=schedules)
def test_one_rank_alone_never_waits(schedule: Schedule) -> None:
    """With nobody else every rule is the same."""
    alone = Schedule(schedule.programs[:1], schedule.turns, {})
    histories = [played(rule, alone) for rule in RULES if rule != BSP]
    assert all(history == histories[0] for history in histories)
    assert len(played(BSP, alone)) == len(histories[0])


def test_ssp_lets_ranks_be_ahead_by_its_slack() -> None:
    """The rule is as loose as it says: k adds ahead is reached."""
    for k in (1, 2, 5):
        model = Model(ssp(k), [["add"] * 9, ["add"] * 9])
        while 0 in model.able():
            model.step(0)
        assert model.made == [k, 0]
        model.go(1, died=True)  # and who dies releases it
        while 0 in model.able():
            model.step(0)
        assert model.made == [9, 0]


def test_bsp_waits_until_who_is_behind_has_left() -> None:
    """A rank that has added more often waits for the slower one, or until that one leaves."""
    model = Model(BSP, [["add", "get", "add", "get"], ["add"]])
    while 0 in model.able():
        model.step(0)
    assert model.history == [Added(0, 1)]
    while model.present:
        model.step(model.able()[-1])
    gets = [event for event in model.history if isinstance(event, Got)]
    assert gets == [Got(0, 1, (1, 1)), Got(0, 2, (2, 1))]


# the checker finds what is wrong


@pytest.mark.parametrize(
    ("rule", "history", "reason"),
    [
        (ASYNC, [Added(0, 1), Got(0, 1, (0, 0))], "others of its own"),
        (ASYNC, [Got(0, 0, (1, 0)), Added(0, 1)], "others of its own"),
        (ASYNC, [Added(1, 1), Got(0, 0, (0, 1)), Got(0, 0, (0, 0))], "saw more of rank 1 before"),
        (ASYNC, [Added(1, 1), Gone(1), Got(0, 0, (0, 2))], "rank 1 never made so many"),
        (ASYNC, [Added(1, 1), Gone(1, died=True), Got(0, 0, (0, 3))], "rank 1 never made so many"),
        (ASYNC, [Added(0, 2)], "its rank has made 1 adds"),
        (ASYNC, [Added(0, 1), Got(0, 0, (0, 0))], "its rank has made 1 adds"),
        (ASYNC, [Gone(0), Got(0, 0, (0, 0))], "it had gone"),
        (ssp(2), [Added(0, 1), Got(0, 1, (0, 0))], "others of its own"),
        (ssp(2), [Added(0, 1), Added(0, 2), Added(0, 3)], "the slowest has made 0"),
        (ssp(1), [Added(1, 1), Got(1, 1, (0, 1)), Added(1, 2)], "the slowest has made 0"),
        (BSP, [Added(0, 1), Added(1, 1), Got(0, 1, (1, 0))], "of rank 1 it is not min(own, 1)"),
        (BSP, [Added(0, 1), Added(1, 1), Got(1, 1, (0, 1))], "of rank 0 it is not min(own, 1)"),
        (BSP, [Added(1, 1), Got(0, 0, (0, 1))], "of rank 1 it is not min(own, 1)"),
        (
            BSP,
            [Added(1, 1), Gone(1, died=True), Added(0, 1), Added(0, 2), Got(0, 2, (2, 2))],
            "of rank 1 it is not min(own, 1)",
        ),
        (BSP, [Added(0, 1), Got(0, 1, (1, 0))], "the slowest has made 0"),
        (BSP, [Added(0, 1), Got(0, 1, (1, 1)), Added(1, 1)], "the slowest has made 0"),
    ],
)
def test_wrong_histories_are_found(rule: Consistency, history: list[Event], reason: str) -> None:
    """Each rule, broken by hand in one place, is reported there."""
    assert any(reason in text for text in violations(history, 2, rule))


def test_right_histories_are_not_reported() -> None:
    """What only looks wrong: an add that a dead rank had begun, and one who leads those left."""
    begun = [Gone(1, died=True), Got(0, 0, (0, 1))]
    assert violations(begun, 2, ASYNC) == []
    ahead = [Added(0, 1), Added(0, 2), Gone(1), Added(0, 3), Added(2, 1), Added(0, 4)]
    assert violations(ahead, 3, ssp(2)) == [f"{ahead[3]}: the slowest has made 0"] + [
        f"{ahead[5]}: the slowest has made 1"
    ]
    assert violations([ahead[0], ahead[1], Gone(1), Gone(2), ahead[3]], 3, ssp(2)) == []
    early = [Gone(1), Added(0, 1), Got(0, 1, (1, 0))]
    assert violations(early, 2, BSP) == []
    # what only the order between ranks tells
    late = [Added(0, 1), Got(0, 1, (1, 1)), Added(1, 1)]
    assert violations(late, 2, BSP, in_order=False) == []


class _Wrong(Consistency):
    """A rule with one mistake."""

    def __init__(self, rule: Consistency, wait: Callable[[str, int], int]) -> None:
        super().__init__(rule.name, rule.slack)
        object.__setattr__(self, "wait", wait)

    def before_add(self, own: int) -> int:
        return self.wait("add", own)  # type: ignore[attr-defined, no-any-return]

    def before_get(self, own: int) -> int:
        return self.wait("get", own)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("rule", "wait"),
    [
        (ssp(1), lambda operation, own: 0),
        (ssp(2), lambda operation, own: own - 2 if operation == "add" else 0),
        (BSP, lambda operation, own: own if operation == "add" else 0),
        (BSP, lambda operation, own: own if operation == "add" else own - 1),
        (BSP, lambda operation, own: own - 1 if operation == "add" else own),
        (BSP, lambda operation, own: own + 1),
        (ssp(2), lambda operation, own: own + 1 if operation == "add" else 0),
    ],
    ids=["never", "one late", "gets do not", "gets less", "adds less", "for too much", "ever"],
)
def test_wrong_rules_are_found(rule: Consistency, wait: Callable[[str, int], int]) -> None:
    """Ranks that follow a rule with one mistake soon have a history that is not allowed, a delta
    that is lost, or nobody who can go on."""
    numbers = random.Random(0)
    for _ in range(500):
        programs = [numbers.choices(["add", "get"], k=8) for _ in range(3)]
        schedule = Schedule(programs, [numbers.randrange(60) for _ in range(60)], {})
        try:
            if violations(played(_Wrong(rule, wait), schedule), 3, rule):
                return
        except AssertionError:
            return
    pytest.fail("nothing was found")
