"""Which host runs which items of a map."""

from __future__ import annotations

import itertools
import random

import pytest

from weft._core.shares import Shares, Spans


def numbers(spans: object) -> list[int]:
    return [index for span in spans for index in span]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(50))
def test_spans_are_a_set_of_numbers(seed: int) -> None:
    """Whatever is added, removed and taken, in order, and consecutive ones as one span."""
    choose, spans, expected = random.Random(seed), Spans(), set[int]()
    for _ in range(80):
        start = choose.randrange(40)
        span = range(start, start + choose.randrange(9))
        if (what := choose.random()) < 0.5:
            spans.add(span)
            expected |= set(span)
        elif what < 0.9:
            spans.remove(span)
            expected -= set(span)
        else:
            count = choose.randrange(6)
            taken = numbers(spans.take(count))
            assert taken == sorted(expected)[:count]
            expected -= set(taken)
        assert numbers(spans) == sorted(expected)
        assert len(spans) == len(expected)
        parts = list(spans)
        assert all(one.stop < next.start for one, next in itertools.pairwise(parts))


def test_each_host_gets_its_share_at_once() -> None:
    """In proportion to its workers, all in one."""
    shares = Shares(100)
    shares.join("a", 3)
    shares.join("b", 1)
    assert shares.next("a") == [range(75)]
    assert shares.next("b") == [range(75, 100)]
    assert shares.next("a") == []
    assert shares.left == 100


def test_more_hosts_than_items_leave_some_without() -> None:
    """Nobody gets an item twice, and hosts without any have none."""
    shares = Shares(2)
    for name in "abc":
        shares.join(name, 1)
    assert [numbers(shares.next(name)) for name in "abc"] == [[0], [1], []]
    assert not Shares(0).busy


def test_a_hungry_host_takes_from_the_one_with_most_left() -> None:
    """A part of what that has not begun, if it is worth a message; not before items are known to
    take long."""
    shares = Shares(90)
    for name in "abc":
        shares.join(name, 1)
    assert [shares.next(name) for name in "abc"] == [[range(30)], [range(30, 60)], [range(60, 90)]]
    assert shares.take_from("a") is None  # nobody knows yet how long an item takes
    shares.finished("a", range(30), 30 * 0.1)
    shares.heard("b", [range(45, 60)])
    shares.heard("c", [range(70, 90)])
    assert shares.is_hungry("a")
    assert shares.take_from("a") == ("c", 0.5)
    shares.taken_back("c", [range(80, 90)])
    assert shares.next("a") == [range(80, 90)]
    assert numbers(shares.held("c")) == list(range(60, 80))

    short = Shares(1000)
    short.join("a", 1)
    short.join("b", 1)
    short.next("a"), short.next("b")
    short.finished("a", range(500), 500 * 1e-6)
    assert short.take_from("a") is None


def test_a_lost_host_leaves_its_items_to_others() -> None:
    """What it had not begun counts as not run; what it ran is run again as often as retries say,
    and is failed then."""
    shares = Shares(10, retries=1)
    shares.join("a", 1)
    shares.next("a")
    shares.finished("a", range(2), 1.0)
    shares.heard("a", [range(4, 10)])
    assert shares.begun("a") == [range(2, 4)]
    assert shares.lose("a") == []
    assert numbers(shares.waiting) == list(range(2, 10))
    assert [shares.runs(index) for index in (2, 3, 4)] == [1, 1, 0]
    shares.join("b", 1)
    shares.next("b")
    shares.heard("b", [range(5, 10)])
    assert numbers(shares.lose("b")) == [2, 3]
    assert numbers(shares.waiting) == list(range(4, 10))
    assert shares.runs(4) == 1


def test_a_host_that_joins_is_hungry() -> None:
    """It gets what waits, else a part of what others have."""
    shares = Shares(40)
    shares.join("a", 2)
    shares.next("a")
    shares.finished("a", range(10), 1.0)
    shares.heard("a", [range(12, 40)])
    shares.join("b", 2)
    assert shares.next("b") == []
    assert shares.take_from("b") == ("a", 0.5)


def test_a_stream_is_drawn_as_workers_are_free() -> None:
    """One item for each free worker while items are long, more when they are short."""
    shares = Shares(None)
    shares.join("a", 2)
    shares.join("b", 1)
    assert shares.room() == 3
    shares.add(range(3))
    assert [numbers(shares.next(name)) for name in "ab"] == [[0, 1], [2]]
    assert shares.room() == 0
    shares.finished("a", range(1), 0.5)
    assert shares.room() == 1
    shares.finished("a", range(1, 2), 0.0)
    for index in range(3, 1003):
        shares.add(range(index, index + 1))
        shares.next("a")
        shares.finished("a", range(index, index + 1), 1e-5)
    assert shares.room() > 30


@pytest.mark.parametrize("seed", range(30))
def test_no_item_is_run_by_two_hosts_or_none(seed: int) -> None:
    """Whatever hosts do: finish, give back, are lost, join."""
    choose = random.Random(seed)
    shares, ended, failed, names = (
        Shares(200, retries=1),
        list[int](),
        set[int](),
        iter(range(10**6)),
    )
    for _ in range(3):
        shares.join(f"h{next(names)}", choose.randrange(1, 4))
    while shares.left:
        host = choose.choice(shares.hosts)
        shares.next(host)
        held = numbers(shares.held(host))
        everyone = [index for name in shares.hosts for index in numbers(shares.held(name))]
        assert len(everyone) == len(set(everyone))
        what = choose.random()
        if what < 0.6 and held:
            at = choose.randrange(len(held))
            for index in held[at : at + choose.randrange(1, 9)]:
                shares.finished(host, range(index, index + 1), 0.01)
                ended.append(index)
        elif what < 0.8 and held:
            unbegun = held[choose.randrange(len(held)) :]
            shares.heard(host, Spans(range(i, i + 1) for i in unbegun))
            shares.taken_back(
                host, list(Spans(range(i, i + 1) for i in unbegun[len(unbegun) // 2 :]))
            )
        elif what < 0.85:
            failed |= set(numbers(shares.lose(host)))
            shares.join(f"h{next(names)}", choose.randrange(1, 4))
    assert sorted(ended + list(failed)) == list(range(200))
