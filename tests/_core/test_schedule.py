"""Which items are run next, and how many at once: whole runs, simulated."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft._core.items import Supplied, Supply, Window, zipped
from weft._core.schedule import LONGEST, TIMED, UNKNOWN, Chunk, Cost, Schedule

#: what sending a chunk costs, as measured on one machine
OVERHEAD = 0.0001


@dataclass
class Simulated:
    """Workers with a clock of their own; `run` carries out a schedule to its end."""

    workers: int
    #: how long an item takes
    duration: Callable[[Any], float]
    #: whether a worker dies now that it begins the item of this index
    dies: Callable[[int], bool] = lambda index: False
    size: Callable[[Any], int] = lambda item: 0
    results: dict[int, Any] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    end: float = 0.0

    def run(self, items: Iterable[Any], *, retries: int = 0, expected: Cost = UNKNOWN) -> Simulated:
        schedule = Schedule(items, self.workers, retries=retries, expected=expected)
        number = itertools.count()
        busy: list[tuple[float, int, Chunk, int | None, float, Chunk]] = []
        idle, now = self.workers, 0.0
        while True:
            while idle and (chunk := schedule.next()) is not None:
                idle -= 1
                self.chunks.append(chunk)
                lost, seconds, rest = self._try(chunk)
                end = now + OVERHEAD + seconds
                heapq.heappush(busy, (end, next(number), chunk, lost, seconds, rest))
            if not busy:
                return self
            now, _, chunk, lost, seconds, rest = heapq.heappop(busy)
            idle += 1
            self.end = now
            if lost is None:
                ended = Chunk(chunk.first, chunk.items[: len(chunk.items) - len(rest.items)])
                assert not self.results.keys() & set(_indices(ended))
                self.results.update(zip(_indices(ended), ended.items, strict=True))
                schedule.done(len(ended.items), seconds, sum(map(self.size, ended.items)))
                schedule.given_back(rest)
            elif not schedule.lost(chunk, lost):
                self.failed.append(lost)

    def _try(self, chunk: Chunk) -> tuple[int | None, float, Chunk]:
        """In which item the worker dies, if it does, how long it was at work, and what it gives
        back."""
        seconds = 0.0
        for position, item in enumerate(chunk.items):
            index = chunk.first + position
            looks = len(chunk.items) <= TIMED or position % 32 == 0
            if seconds > LONGEST and looks:
                return None, seconds, Chunk(index, chunk.items[position:])
            self.begun[index] = self.begun.get(index, 0) + 1
            if self.dies(index):
                return index, seconds, Chunk(index, [])
            seconds += self.duration(item)
        return None, seconds, Chunk(chunk.first + len(chunk.items), [])


def _indices(chunk: Chunk) -> range:
    return range(chunk.first, chunk.first + len(chunk.items))


durations = st.lists(st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 0.1, 3.0]), max_size=60)


@given(durations, st.integers(1, 5), st.booleans())
def test_every_item_is_begun_once(seconds: list[float], workers: int, known: bool) -> None:
    """Without losses each item is run once, under its own index, however long items take."""
    items = list(enumerate(seconds))
    run = Simulated(workers, lambda item: item[1]).run(items if known else iter(items))
    assert run.results == dict(enumerate(items))
    assert run.begun == dict.fromkeys(range(len(items)), 1)


@given(
    durations,
    st.integers(1, 4),
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 59), st.integers(1, 6), max_size=10),
)
def test_a_lost_item_runs_again_as_often_as_asked(
    seconds: list[float], workers: int, retries: int, deaths: dict[int, int]
) -> None:
    """An item that loses its worker more than `retries` times has failed; all others come out."""
    items = list(enumerate(seconds))
    run = Simulated(workers, lambda item: item[1], _dying(deaths)).run(items, retries=retries)
    hopeless = {index for index, times in deaths.items() if times > retries and index < len(items)}
    assert sorted(run.failed) == sorted(hopeless)
    assert run.results == {i: item for i, item in enumerate(items) if i not in hopeless}


def _dying(deaths: dict[int, int]) -> Callable[[int], bool]:
    """Each item loses its worker so many times, then never again."""
    left = dict(deaths)

    def dies(index: int) -> bool:
        left[index] = left.get(index, 0) - 1
        return left[index] >= 0

    return dies


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_an_item_that_always_kills_runs_retries_plus_one_times(retries: int) -> None:
    """The item that kills is tried so often and no more, the others are not charged for it."""
    run = Simulated(2, lambda item: 0.0, lambda index: index == 700)
    run.run(range(1000), retries=retries)
    assert run.begun[700] == retries + 1
    assert run.failed == [700]
    assert len(run.results) == 999


def test_a_lost_chunk_is_cut_at_the_item_that_lost_it() -> None:
    """Those before it lost their results, those after never ran: both run again, it by itself."""
    schedule = Schedule([], 1, retries=1)
    chunk = Chunk(10, list("abcde"))
    assert schedule.lost(chunk, 12)
    assert [schedule.next() for _ in range(4)] == [
        Chunk(10, ["a", "b"]),
        Chunk(12, ["c"]),
        Chunk(13, ["d", "e"]),
        None,
    ]
    assert not schedule.lost(Chunk(12, ["c"]), 12)
    assert schedule.next() is None


def test_a_chunk_can_be_taken_apart() -> None:
    """What could not be sent together is given out one item at a time, under the same indices."""
    schedule = Schedule([], 1)
    schedule.resend_singly(Chunk(3, ["a", "b"]))
    assert [schedule.next(), schedule.next()] == [Chunk(3, ["a"]), Chunk(4, ["b"])]


def test_what_is_known_to_be_short_goes_together() -> None:
    """Each worker gets its share of trivial items of a function that was seen before; of one that
    took long, or of whose items nothing is known, all go one by one."""
    for cost, sizes in (
        (Cost(1e-6), [8, 8]),
        (Cost(0.1), [1] * 16),
        (UNKNOWN, [1] * 16),
        (Cost(1e-6, nbytes=2 << 20), [2] * 8),  # no more than 4 MB at a time
    ):
        schedule = Schedule(range(16), 2, expected=cost)
        sizes_seen = []
        while chunk := schedule.next():
            sizes_seen.append(len(chunk.items))
            items = len(chunk.items)
            schedule.done(
                items, items * (cost.seconds if cost.is_known else 0.1), items * int(cost.nbytes)
            )
        assert sizes_seen == sizes


def test_what_items_cost_is_expected_until_it_is_known() -> None:
    """The mean over all that have ended counts as soon as one has; what may be slow to come is not
    waited for, so of that nothing is expected."""
    schedule = Schedule(range(4), 2, expected=Cost(1.0, 10))
    assert schedule.cost == Cost(1.0, 10)
    schedule.done(2, 0.25, 1000)
    assert schedule.cost == Cost(0.125, 500)
    generator = Schedule(iter(range(4)), 2, expected=Cost(1e-6))
    assert not generator.cost.is_known
    assert generator.next() == Chunk(0, [0])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 1e-7, 1e-6, 1e-5])
def test_tiny_items_go_in_chunks(seconds: float, known: bool) -> None:
    """Sending costs less than a tenth of what it would for ten thousand tiny items one by one."""
    items: Iterable[int] = range(10_000) if known else iter(range(10_000))
    run = Simulated(2, lambda item: seconds).run(items)
    assert len(run.chunks) < 200
    assert len(run.results) == 10_000


def test_long_items_are_sent_one_at_a_time() -> None:
    """Items of some milliseconds wait for nobody: each is a chunk of its own."""
    run = Simulated(3, lambda item: 0.005).run(iter(range(100)))
    assert {len(chunk.items) for chunk in run.chunks} == {1}


def test_a_chunk_does_not_hold_many_bytes() -> None:
    """However short, items with large arrays are sent few at a time."""
    run = Simulated(2, lambda item: 0.0, size=lambda item: 1 << 20).run(range(500))
    assert max(len(chunk.items) for chunk in run.chunks) <= 4


def test_items_that_turn_long_are_soon_sent_singly() -> None:
    """After many short ones, no chunk holds more than a few of those that take long."""
    run = Simulated(2, lambda item: 1e-5 if item < 2000 else 0.05).run(range(2400))
    long = [len(chunk.items) for chunk in run.chunks if chunk.first >= 2000]
    assert sum(long[:3]) <= 400
    assert set(long[-40:]) == {1}


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.3, 1.0, 2.0]))
def test_uneven_items_end_together(seed: int, workers: int, spread: float) -> None:
    """200 items of any lengths take at most a tenth more than if whoever is free took the next one
    at no cost, which is the best for who does not know how long they will take."""
    random = Random(seed)
    seconds = [0.02 * random.lognormvariate(0, spread) for _ in range(200)]
    free = [0.0] * workers
    for one in seconds:
        heapq.heapreplace(free, free[0] + one)
    assert Simulated(workers, lambda item: item).run(seconds).end <= 1.1 * max(free)


@pytest.mark.parametrize("expected", [UNKNOWN, Cost(1e-6)])
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("short", [0, 20, 999, 1000, 1001])
def test_long_items_after_short_ones_are_shared_out(
    short: int, workers: int, expected: Cost
) -> None:
    """Eight of 0.2 s at the end of any number of trivial ones come to all workers alike, as soon as
    the first of them has ended."""
    seconds = [0.0] * short + [0.2] * 8
    run = Simulated(workers, lambda item: item).run(seconds, expected=expected)
    assert run.end <= 1.1 * (0.2 + sum(seconds) / workers)


def test_long_items_before_short_ones_keep_nothing_back() -> None:
    """A worker that runs one of them has no others, also if all were short before."""
    seconds = [0.2] * 2 + [0.0] * 998
    run = Simulated(2, lambda item: item).run(seconds, expected=Cost(1e-6))
    assert run.end <= 1.1 * 0.4
    uneven = Simulated(4, lambda item: item).run([0.2, *[0.0] * 63] * 4, expected=Cost(1e-6))
    assert uneven.end <= 1.1 * 0.2


def test_what_is_given_back_is_shared_out() -> None:
    """Two for each worker one by one, then in pairs, ...: next to a long item there may be more."""
    schedule = Schedule(range(100), 2, expected=Cost(1e-6))
    assert schedule.next() == Chunk(0, list(range(50)))
    assert schedule.next() == Chunk(50, list(range(50, 100)))
    schedule.done(1, 0.2, 0)
    schedule.given_back(Chunk(1, list(range(1, 11))))
    singles = [range(index, index + 1) for index in range(1, 5)]
    spans = [*singles, range(5, 7), range(7, 9), range(9, 11)]
    assert schedule.left() == spans
    assert [schedule.next() for _ in spans] == [Chunk(span.start, list(span)) for span in spans]
    assert schedule.next() is None


def test_some_long_items_before_many_short_ones_are_shared_out() -> None:
    """They come in one chunk, and each worker gets its part of them, or nearly."""
    seconds = [0.02] * 8 + [0.0] * 1000
    run = Simulated(2, lambda item: item).run(seconds, expected=Cost(1e-6))
    assert run.end <= 0.02 + 0.75 * sum(seconds)
    assert len(run.chunks) < 60


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("order", ["mixed", "longest first", "shortest first"])
def test_two_hundred_uneven_items_are_within_a_tenth_of_the_best(order: str, workers: int) -> None:
    """Lengths from half a millisecond to a hundred times that, as in the benchmark."""
    seconds = [0.0005 * 100 ** ((index * 89 % 200) / 200) for index in range(200)]
    if order != "mixed":
        seconds.sort(reverse=order == "longest first")
    run = Simulated(workers, lambda item: item).run(seconds)
    assert run.end <= 1.1 * sum(seconds) / workers


def test_nothing_is_drawn_before_a_worker_is_free() -> None:
    """A generator is asked only for what is given out at once."""
    drawn = []

    def items() -> Iterator[int]:
        for index in range(1000):
            drawn.append(index)
            yield index

    schedule = Schedule(items(), 2)
    assert drawn == []
    first, second = schedule.next(), schedule.next()
    assert drawn == [0, 1]
    assert first == Chunk(0, [0])
    assert second is not None
    schedule.done(len(second.items), 0.1, 0)
    assert schedule.next() == Chunk(2, [2])
    assert len(drawn) == 3


def test_the_total_is_known_when_it_can_be() -> None:
    """A list has one from the beginning, a generator when it has ended."""
    assert Schedule([1, 2, 3], 2).total == 3
    schedule = Schedule(iter([1]), 2)
    assert schedule.total is None
    schedule.next()
    assert schedule.next() is None
    assert schedule.total == 1


class Lazy(list[int]):
    """A list that says how many items it has, and is wrong."""

    def __init__(self, said: int) -> None:
        super().__init__([0] * said)

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("said", [0, 2, 3, 10])
def test_a_length_may_be_wrong(said: int, at_hand: bool) -> None:
    """Whatever it says, all items are run, and then their number is known."""

    class Other:
        def __len__(self) -> int:
            return said

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    schedule = Schedule(Lazy(said) if at_hand else Other(), 2)
    assert (schedule.total, schedule.at_hand) == (said, at_hand)
    items = []
    while (chunk := schedule.next()) is not None:
        items += chunk.items
        assert schedule.total is None or schedule.total >= len(items)
        schedule.done(len(chunk.items), 1e-6, 10)
    assert items == [0, 1, 2]
    assert (schedule.total, schedule.left()) == (3, [])


def test_items_that_are_slow_to_come_are_not_waited_for() -> None:
    """However short their runs were, a chunk is given out when drawing it takes long; items that
    come at once go in chunks as before."""
    now = 0.0

    def items(seconds: float) -> Iterator[int]:
        nonlocal now
        for index in range(1000):
            now += seconds
            yield index

    for seconds, least, most in ((0.1, 1, 1), (0.001, 3, 5), (1e-6, 10, 1000)):
        schedule = Schedule(items(seconds), 2, clock=lambda: now)
        for _ in range(12):
            chunk = schedule.next()
            assert chunk is not None
            schedule.done(len(chunk.items), 1e-7, 0)
        assert least <= len(chunk.items) <= most


def test_nobody_gets_more_than_a_share_of_what_is_not_known() -> None:
    """Of a generator at most a worker's share of what has ended, and of items that are expected to
    be short its share, or what is done in some milliseconds."""
    schedule = Schedule(iter(range(10_000)), 4)
    ended = 0
    for _ in range(40):
        chunk = schedule.next()
        assert chunk is not None
        assert len(chunk.items) <= max(1, ended // 4)
        ended += len(chunk.items)
        schedule.done(len(chunk.items), 1e-7, 0)
    assert ended > 1000
    for total, size in ((48, 12), (4 * TIMED + 4, TIMED + 1), (10**6, 3000)):
        expected = Schedule(range(total), 4, expected=Cost(1e-6))
        chunks = [expected.next() for _ in range(4)]
        assert all(chunk is not None and len(chunk.items) == size for chunk in chunks)


@given(
    st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 0.1]), min_size=1, max_size=300),
    st.integers(1, 5),
    st.integers(1, 40) | st.none(),
    st.booleans(),
    st.randoms(),
)
def test_a_stream_draws_no_more_than_its_window_allows(
    seconds: list[float], workers: int, ahead: int | None, known: bool, random: Any
) -> None:
    """Whatever items take, and however slowly they are consumed: never more than `ahead` are drawn
    and not consumed, each comes once, and a stream whose results are all consumed goes on."""
    window = Window(ahead)
    schedule = Schedule(seconds if known else iter(seconds), workers, window=window)
    busy: list[Chunk] = []
    drawn, consumed, results = 0, 0, []
    while True:
        while len(busy) < workers and (chunk := schedule.next()) is not None:
            busy.append(chunk)
            drawn += len(chunk.items)
            if ahead is not None:
                assert drawn - consumed <= ahead
        if busy and (consumed == len(results) or random.random() < 0.5):
            chunk = busy.pop(random.randrange(len(busy)))
            schedule.done(len(chunk.items), sum(chunk.items), 0)
            results += chunk.items
        elif consumed < len(results):
            window.consume()
            consumed += 1
        else:
            break
    assert not schedule.waiting
    assert consumed == drawn == len(seconds)


@pytest.mark.parametrize("known", [True, False])
def test_a_stream_whose_items_have_all_been_drawn_waits_for_nobody(known: bool) -> None:
    """If it is known how many there are: it ends whether its results are consumed or not."""
    schedule = Schedule([1, 2] if known else iter([1, 2]), 2, window=Window(2))
    assert [schedule.next(), schedule.next()] == [Chunk(0, [1]), Chunk(1, [2])]
    assert schedule.next() is None
    assert schedule.waiting is not known
    assert schedule.exhausted is known


def test_a_stream_begins_with_single_items_however_many_there_are() -> None:
    """Of a billion items a first part would be more than fits in memory."""
    schedule = Schedule(range(10**9), 2, window=Window())
    drawn = 0
    while chunk := schedule.next():
        assert len(chunk.items) == 1
        drawn += 1
    assert schedule.waiting
    assert 2 < drawn < 20


def test_a_stream_of_short_items_has_some_chunks_for_each_worker() -> None:
    """Without `ahead` they grow as those of a map do, to a thousand items."""
    window = Window()
    schedule = Schedule(itertools.count(), 2, window=window)
    longest = 0
    for _ in range(200):
        chunk = schedule.next()
        assert chunk is not None
        schedule.done(len(chunk.items), 1e-6 * len(chunk.items), 0)
        for _ in chunk.items:
            window.consume()
        longest = max(longest, len(chunk.items))
    assert longest == 1000
    before = schedule.taken
    while schedule.next() is not None:
        pass
    assert schedule.taken - before <= 8 * longest


def test_timed_items_are_sent_singly() -> None:
    """However short they are known to be."""
    schedule = Schedule(range(100), 2, expected=Cost(1e-7), singly=True)
    for index in range(100):
        assert schedule.next() == Chunk(index, [index])
        schedule.done(1, 1e-7, 0)


def test_an_item_that_failed_is_run_again_as_often_as_asked() -> None:
    """It is one count with losses, and it is forgotten when the item has ended."""
    schedule = Schedule([], 1, retries=2)
    chunk = Chunk(5, list("abc"))
    assert schedule.failed(chunk, 6)
    assert schedule.next() == Chunk(6, ["b"])
    assert schedule.lost(Chunk(6, ["b"]), 6)
    assert schedule.next() == Chunk(6, ["b"])
    assert not schedule.failed(Chunk(6, ["b"]), 6)
    assert schedule.next() is None
    assert schedule.failed(chunk, 7)
    assert schedule.next() == Chunk(7, ["c"])
    schedule.forget(Chunk(7, ["c"]))
    assert schedule._runs == {}


def test_what_is_left_when_the_time_is_over() -> None:
    """What was to be run again, and what was not drawn; of an unknown number only the former."""
    schedule = Schedule(range(10), 1, retries=1)
    chunk = schedule.next()
    assert chunk == Chunk(0, [0])
    schedule.put_back(chunk)
    assert schedule.left() == [range(1), range(1, 10)]
    assert schedule.next() == chunk
    assert schedule.left() == [range(1, 10)]
    unknown = Schedule(iter(range(10)), 1)
    chunk = unknown.next()
    assert chunk is not None
    assert unknown.left() == []
    unknown.resend_singly(chunk)
    assert unknown.left() == [range(1)]


def test_several_iterables_are_at_hand_if_each_is() -> None:
    """Then their number is known, and they go in chunks at once."""
    schedule = Schedule(zipped([list(range(16)), range(20)]), 2, expected=Cost(1e-6))
    assert (schedule.total, schedule.at_hand) == (16, True)
    assert schedule.next() == Chunk(0, [(index, index) for index in range(8)])


def test_a_supply_grows_and_shrinks() -> None:
    """Items come under the indexes that they have among all, the first are drawn first, and the
    last are taken back first; whoever waits is woken."""
    woken = []
    supply = Supply(threading.Lock())
    supply.wake = lambda: woken.append(len(supply))
    supply.add(Supplied(10, ["a", "b", "c"]))
    supply.add(Supplied(50, ["x", "y"], runs=1))
    assert woken == [3, 5]
    assert supply.draw(2) == Supplied(10, ["a", "b"])
    assert supply.spans() == [range(12, 13), range(50, 52)]
    assert supply.take_back(1) == [range(51, 52)]
    assert supply.take_back(5) == [range(12, 13), range(50, 51)]
    assert len(supply) == 0
    assert supply.draw(1) is None
    assert not supply.closed
    supply.close()
    assert supply.closed


def test_a_schedule_of_a_supply() -> None:
    """It waits while nothing is there, gives each item its own index, counts earlier runs, and ends
    when the supply is closed and empty."""
    supply = Supply(threading.Lock())
    schedule = Schedule(supply, 2, retries=1)
    assert schedule.next() is None
    assert schedule.waiting
    supply.add(Supplied(7, ["a"], runs=1))
    supply.add(Supplied(100, ["b"]))
    chunk = schedule.next()
    assert chunk == Chunk(7, ["a"])
    assert not schedule.waiting
    assert not schedule.lost(chunk, 7)  # it was run before, elsewhere
    assert schedule.left() == [range(100, 101)]
    second = schedule.next()
    assert second == Chunk(100, ["b"])
    assert schedule.lost(second, 100)
    assert schedule.next() == second
    assert schedule.next() is None
    assert schedule.waiting
    assert schedule.exhausted
    assert not schedule.ends_unknown
    supply.close()
    assert schedule.next() is None
    assert not schedule.waiting
