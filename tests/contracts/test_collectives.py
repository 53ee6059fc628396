"""What every engine's collectives do. Each test runs on every engine, launcher and size.

All bodies of a size run in one launch (`bodies.py`), each in a subgroup of its own. All ranks'
inputs come from `given(rank, ...)`: every rank can work out what it should get.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tests.contracts.bodies import Bodies
from weft.engines.base import Group
from weft.engines.local.collectives.transport import ROOM
from weft.errors import Disagreement, InvalidType, InvalidValue, NotInitialized, Stalled, UsageError

BODIES = Bodies(each_in="subgroup")
OVER_HOSTS = True
OPS = ("sum", "mean", "prod", "min", "max")
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
)
#: elements of 8 bytes that do not fit a slot
LARGE = ROOM // 8 + 1001


def given(rank: int, shape: Any, dtype: str = "float64", seed: int = 0) -> Any:
    """What a rank gives."""
    random = np.random.default_rng((seed, rank))
    if np.dtype(dtype).kind == "c":
        return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(dtype)
    if np.dtype(dtype).kind == "f":
        return random.normal(size=shape).astype(dtype)
    return random.integers(0, 100, shape).astype(dtype)


def reduced(group: Group, parts: list[Any], op: str) -> Any:
    """What the parts of all ranks come to: in rank order within a host, then in that of hosts."""
    dtype = parts[0].dtype
    wide = dtype
    if dtype == np.float16 and op not in ("min", "max"):
        wide = np.dtype(np.float32)
    elif op == "mean" and dtype.kind in "biu":
        wide = np.dtype(np.float64)
    ufunc = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(op, np.add)
    totals: dict[str, Any] = {}
    for host, part in zip(group.hosts, parts, strict=True):
        own = part.astype(wide)
        totals[host] = ufunc(totals[host], own) if host in totals else own
    total, *others = totals.values()
    for other in others:
        total = ufunc(total, other)
    if op == "mean":
        total = total / wide.type(len(parts))
    return np.asarray(total).astype(dtype)


def equal(found: Any, expected: Any) -> bool:
    """The same type, dtype, shape and numbers; complex products to rounding."""
    same = type(found) is np.ndarray and found.dtype == expected.dtype
    if not same or found.shape != expected.shape:
        return False
    if found.dtype.kind == "c":
        return bool(np.allclose(found, expected, rtol=1e-6))
    return bool(np.array_equal(found, expected))


def usable(group: Group) -> bool:
    """Whether all ranks are in step: each gets the others' numbers."""
    turn = group.all_gather(np.array([group.rank])).tolist() == list(range(group.size))
    group.barrier()
    return turn and group.all_reduce(1) == group.size


# what they return


@BODIES.of_all
def every_call_small_and_large(group: Group) -> list[bytes]:
    size, bits = group.size, []
    cases = [(dtype, (3, 4)) for dtype in DTYPES]
    cases += [("float64", shape) for shape in ((), (0,), (1,), (2, 0, 3))]
    cases += [("float64", (LARGE,)), ("float16", (2 * LARGE, 3)), ("int8", (LARGE, 9))]
    for number, (dtype, shape) in enumerate(cases):
        parts = [given(rank, shape, dtype, number) for rank in range(size)]
        mine, root = parts[group.rank], number % size
        large = mine.nbytes > ROOM
        for op in OPS if not large else ("sum", "mean", "max"):
            found = group.all_reduce(mine, op)
            assert equal(found, reduced(group, parts, op)), (op, dtype, shape)
            bits.append(found.tobytes() if mine.itemsize <= 16 and "long" not in dtype else b"")
        found = group.reduce(mine, "sum", root)
        assert found is None if group.rank != root else equal(found, reduced(group, parts, "sum"))
        found = group.broadcast(mine if group.rank == root else None, root)
        assert equal(found, parts[root]), (dtype, shape)
        whole = np.concatenate([np.atleast_1d(part) for part in parts])
        assert equal(group.all_gather(mine), whole), (dtype, shape)
        found = group.gather(mine, root)
        assert found is None if group.rank != root else equal(found, whole)
        if shape:
            found = group.scatter(mine if group.rank == root else None, root)
            assert equal(found, np.array_split(parts[root], size)[group.rank]), (dtype, shape)
            assert not np.shares_memory(found, mine)
    return [one[:4096] + one[-4096:] for one in bits]


def test_every_call_small_and_large(outcome: Any) -> None:
    """Every call, op and dtype gives NumPy's numbers, the same bits on every rank."""
    first, *others = outcome(every_call_small_and_large)
    assert all(other == first for other in others)
    assert len(first) == 5 * (len(DTYPES) + 4) + 3 * 3


@BODIES.of_all
def layouts_lengths_and_places(group: Group) -> bool:
    size, rank = group.size, group.rank
    for length in (6, LARGE):
        parts = [given(other, (2, length)) for other in range(size)]
        total = reduced(group, parts, "sum")
        frozen = parts[rank].copy()
        frozen.flags.writeable = False
        wide = np.zeros((2, 2 * length))
        wide[:, ::2] = parts[rank]
        for value in (
            np.asfortranarray(parts[rank]),
            wide[:, ::2],
            parts[rank][::-1, ::-1].copy()[::-1, ::-1],
            frozen,
            parts[rank].astype(">f8"),
        ):
            assert equal(group.all_reduce(value), total)
            assert equal(group.all_gather(value), np.concatenate(parts))
        # into memory of one's own, contiguous or not, which the next call may use again
        for out in (np.full((2, length), 7.0), np.full((2, 3 * length), 7.0)[:, ::3]):
            for _ in range(2):
                assert group.all_reduce(parts[rank], out=out) is out
                assert equal(np.array(out), total)
            assert group.broadcast(parts[rank], size - 1, out=out) is out
            assert equal(np.array(out), parts[-1])
            at_root = group.reduce(parts[rank], "max", out=out)
            assert at_root is (out if rank == 0 else None)
        assert np.isin(wide[:, 1::2], 0).all()
        # in place, and overlapping by all but one element
        value = parts[rank].copy()
        assert group.all_reduce(value, out=value) is value
        assert equal(value, total)
        memory = np.zeros(2 * length + 1)
        value, out = memory[1:], memory[:-1]
        value[...] = parts[rank].ravel()
        group.all_reduce(value, out=out)
        assert equal(np.array(out), total.ravel())
        # a different number of rows on each rank, some without any
        rows = [given(other, (other * length // 3, 3)) for other in range(size)]
        whole = np.concatenate(rows)
        assert equal(group.all_gather(rows[rank]), whole)
        out = np.empty_like(whole) if rank == size - 1 else None
        found = group.gather(rows[rank], size - 1, out=out)
        assert found is out
        assert out is None or equal(out, whole)
        share = np.empty((len(np.array_split(rows[-1], size)[rank]), 3))
        assert group.scatter(rows[-1], size - 1, out=share) is share
        assert equal(share, np.array_split(rows[-1], size)[rank])
    # fewer rows than ranks: some get none
    found = group.scatter(np.arange(1), 0)
    assert found.tolist() == ([0] if rank == 0 else [])
    # and the mean of uneven parts
    rows = [given(other, (5 * other + 1, 2)) for other in range(size)]
    mean = group.all_reduce(rows[rank].mean(axis=0), "mean", weight=len(rows[rank]))
    assert np.allclose(mean, np.concatenate(rows).mean(axis=0), rtol=1e-14)
    nothing = np.full(LARGE, np.nan) if rank else np.full(LARGE, 4.0)
    mean = group.reduce(nothing, "mean", weight=0 if rank else 2)
    assert mean is None if rank else (mean == 4.0).all()
    return usable(group)


def test_layouts_lengths_and_places(outcome: Any) -> None:
    """Strided and read-only inputs, different lengths, and results in, over and beside them."""
    assert all(outcome(layouts_lengths_and_places))


@BODIES.of_all
def trees_and_objects(group: Group) -> bool:
    size, rank = group.size, group.rank

    def tree(of: int, length: int) -> Any:
        model = {
            "weights": [given(of, (length, 2)), given(of, (3,), "int32")],
            "bias": (given(of, (2, 2), "float16"), given(of, (0, 4))),
        }
        return model if of % 2 else dict(reversed(model.items()))

    for length in (3, LARGE):
        trees = [tree(of, length) for of in range(size)]
        expected = [
            reduced(group, [one["weights"][0] for one in trees], "sum"),
            reduced(group, [one["weights"][1] for one in trees], "sum"),
            reduced(group, [one["bias"][0] for one in trees], "sum"),
        ]
        found = group.all_reduce(trees[rank])
        assert list(found) == list(trees[rank])  # keys in this rank's own order
        assert all(map(equal, [*found["weights"], found["bias"][0]], expected))
        assert type(found["bias"]) is tuple
        assert group.all_reduce(trees[rank], out=trees[rank]) is trees[rank]
        assert equal(trees[rank]["weights"][0], expected[0])
        trees = [tree(of, length) for of in range(size)]
        last = group.broadcast(trees[rank] if rank == size - 1 else None, size - 1)
        assert equal(last["weights"][0], trees[-1]["weights"][0])
        every = group.all_gather(trees[rank])
        assert equal(every["weights"][0], np.concatenate([t["weights"][0] for t in trees]))
        mine = group.scatter(trees[rank] if rank == 0 else None)
        share = np.array_split(trees[0]["weights"][0], size)[rank]
        assert equal(mine["weights"][0], share)
    # many, and in other letters: descriptions that do not fit a message
    many = [given(rank, (k % 5,), seed=k) for k in range(300)]
    found = group.all_reduce(many)
    assert all(
        equal(one, reduced(group, [given(of, (k % 5,), seed=k) for of in range(size)], "sum"))
        for k, one in enumerate(found)
    )
    assert len(group.broadcast(many, size - 1)) == len(group.all_gather(many)) == 300
    keys = ["嵌入" * 150, "веса" * 90, "\U0001f9f6" * 90]
    found = group.all_reduce({key: np.ones(2) for key in keys})
    assert [found[key].tolist() for key in keys] == [[size, size]] * 3
    # single numbers
    assert group.all_reduce(rank) == sum(range(size))
    assert group.all_reduce({"loss": 0.5, "rows": 2}) == {"loss": 0.5 * size, "rows": 2 * size}
    assert group.all_reduce(rank, "mean") == (size - 1) / 2
    # objects, small and large
    value = {"name": "x" * (2 * ROOM), "of": rank, "numbers": [1, np.arange(3)]}
    for root in range(size):
        got = group.broadcast(value if rank == root else None, root)
        assert (got["name"], got["of"]) == (value["name"], root)
    assert group.all_gather(("of", rank)) == [("of", other) for other in range(size)]
    gathered = group.gather("y" * (rank * ROOM // 2), size - 1)
    lengths = None if gathered is None else [len(text) for text in gathered]
    assert lengths == ([other * ROOM // 2 for other in range(size)] if rank == size - 1 else None)
    texts = [f"{k}" for k in range(size + 1)]
    assert group.scatter(texts if rank == 0 else None) == (
        texts[:2] if rank == 0 else [texts[rank + 1]]
    )
    assert group.broadcast(lambda x: x + rank, 0)(1) == 1 + rank * (rank == 0)
    assert group.broadcast(None) is None
    assert group.all_gather([]) == [[]] * size
    return usable(group)


def test_trees_and_objects(outcome: Any) -> None:
    """Lists, tuples and dicts of arrays travel in one call; other objects as they are."""
    assert all(outcome(trees_and_objects))


@BODIES.of_all
def results_do_not_depend_on_timing(group: Group) -> list[bytes]:
    bits = []
    for run in range(3):
        delays = np.random.default_rng((run, group.rank))
        for number, shape in enumerate([(5,), (1000, 3), (LARGE,), (LARGE, 2), (7,)]):
            value = given(group.rank, shape, "float32", number)
            time.sleep(delays.random() * 0.01)
            found = group.all_reduce(value, "mean", async_op=bool(run % 2))
            time.sleep(delays.random() * 0.01)
            if run % 2:
                found = found.wait()
            bits.append(found.tobytes()[-9999:])
    return bits


def test_results_do_not_depend_on_timing(outcome: Any) -> None:
    """Whoever comes first or last, the bits are the same, on every rank and in every run."""
    results = outcome(results_do_not_depend_on_timing)
    assert all(one == results[0] for one in results)
    assert results[0][:5] == results[0][5:10] == results[0][10:]


# async


@BODIES.of_all
def async_calls(group: Group) -> bool:
    size, rank = group.size, group.rank
    parts = [given(of, (LARGE,)) for of in range(size)]
    total = reduced(group, parts, "sum")
    mine, out = parts[rank].copy(), np.empty(LARGE)
    handles = [
        group.all_reduce(mine, async_op=True),
        group.broadcast(parts[rank], size - 1, async_op=True),
        group.all_gather("rank", async_op=True),
        group.all_reduce(np.array([rank]), "max", async_op=True),
        group.all_reduce(parts[rank], out=out, async_op=True),
        group.reduce(np.ones(3), async_op=True),
        group.scatter(np.arange(size), async_op=True),
        group.gather(np.array(rank), async_op=True),
    ]
    # a blocking call comes after the pending ones, which are done then
    assert group.all_reduce(np.ones(2)).tolist() == [size, size]
    assert all(handle.done() for handle in handles)
    found = [handle.wait() for handle in reversed(handles)][::-1]
    assert equal(found[0], total)
    assert equal(found[1], parts[-1])
    assert found[2] == ["rank"] * size
    assert found[3].tolist() == [size - 1]
    assert found[4] is out
    assert equal(out, total)
    assert found[5] is None if rank else found[5].tolist() == [size] * 3
    assert found[6].tolist() == [rank]
    assert found[7] is None if rank else found[7].tolist() == list(range(size))
    assert handles[0].wait(timeout=5) is found[0]  # as often as one likes

    # it is carried out while this thread does something else: nobody waits for it
    handle = group.all_reduce(mine, out=mine, async_op=True)
    deadline, work = time.monotonic() + 30, 0
    while not handle.done() and time.monotonic() < deadline:
        work += 1
        time.sleep(0.001)
    assert handle.done()
    assert handle.wait() is mine
    assert equal(mine, total)

    # barriers, splits and survivors come after pending calls too
    for follow in (group.barrier, lambda: group.split(0)):
        handle = group.all_reduce(parts[rank], async_op=True)
        follow()
        assert handle.done()
        assert equal(handle.wait(), total)
    try:
        handle.wait(timeout=-1)
    except InvalidValue as error:
        assert "-1" in str(error)
    else:
        return False
    return usable(group)


def test_async_calls(outcome: Any) -> None:
    """Handles: several at once, waited for in any order, beside the caller's work."""
    assert all(outcome(async_calls))


@BODIES.of_all
def async_errors_come_with_wait(group: Group) -> int:
    caught = 0
    handle = group.all_reduce(np.ones(3), "mean", weight=0, async_op=True)
    for _ in range(2):
        try:
            handle.wait()
        except InvalidValue as error:
            assert "weights" in str(error)
            caught += 1
    assert handle.done()
    assert usable(group)
    return caught


def test_async_errors_come_with_wait(outcome: Any) -> None:
    """What the ranks refuse together is raised by wait(), each time, and the group goes on."""
    assert outcome(async_errors_come_with_wait) == [2] * outcome.size


@BODIES.of_several
def waiting_for_others_can_end_before_the_call(group: Group) -> bool:
    side = group.split(0)
    assert side is not None
    stalled = 0
    if group.rank == 0:
        handle = group.all_reduce(np.ones(3), async_op=True)
        for seconds in (0, 0.05):
            try:
                handle.wait(timeout=seconds)
            except Stalled as error:
                assert "all_reduce was not done after" in str(error)
                stalled += not handle.done()
        side.barrier()  # only now do the others come
    else:
        side.barrier()
        handle = group.all_reduce(np.ones(3), async_op=True)
    assert handle.wait(timeout=30).tolist() == [group.size] * 3
    assert stalled == (2 if group.rank == 0 else 0)
    # one that is pending when the others make another call: all see what each did
    wrong = group.all_reduce(np.ones(3 + (group.rank == 0)), async_op=True)
    try:
        wrong.wait()
    except Disagreement as error:
        return "float64[3]" in str(error) and "float64[4]" in str(error) and usable(group)
    return False


def test_waiting_for_others_can_end_before_the_call(outcome_of_several: Any) -> None:
    """wait(timeout) raises Stalled while others have not come; the call goes on."""
    assert all(outcome_of_several(waiting_for_others_can_end_before_the_call))


# groups


@BODIES.of_all
def subgroups_and_survivors(group: Group) -> bool:
    size, rank = group.size, group.rank
    parity = group.split(rank % 2, key=-rank)  # in the other order
    assert parity is not None
    members = [of for of in range(size) if of % 2 == rank % 2][::-1]
    for length in (4, LARGE):
        parts = [given(of, (length,)) for of in range(size)]
        pending = group.all_reduce(parts[rank], async_op=True)
        found = parity.all_reduce(parts[rank])
        assert equal(found, reduced(parity, [parts[of] for of in members], "sum"))
        assert equal(parity.all_gather(parts[rank]), np.concatenate([parts[of] for of in members]))
        assert equal(pending.wait(), reduced(group, parts, "sum"))
        assert parity.broadcast(rank, parity.size - 1) == members[-1]
    for _ in range(2):
        before, group = group, group.survivors()
        try:
            before.all_reduce(np.ones(2))
        except UsageError as error:
            assert "survivors()" in str(error)
        else:
            return False
        for length in (4, LARGE):
            parts = [given(of, (length,), seed=5) for of in range(size)]
            for _ in range(2):
                assert equal(group.all_reduce(parts[rank]), reduced(group, parts, "sum"))
    assert usable(group)
    group.leave()
    for call in (group.all_reduce, group.broadcast, group.all_gather, group.scatter):
        for options in ({}, {"async_op": True}):
            try:
                call(np.ones(2), **options)
            except NotInitialized as error:
                assert "weft.init()" in str(error)
            else:
                return False
    return True


def test_subgroups_and_survivors(outcome: Any) -> None:
    """Subgroups and later generations have collectives of their own, side by side."""
    assert all(outcome(subgroups_and_survivors))


# what ranks disagree on


@BODIES.of_several
def disagreements(group: Group) -> int:
    # by rank 0, by the others, and what the text shows of each
    forms: list[tuple[Any, Any, str, str]] = [
        (
            lambda g: g.all_reduce(np.ones(3)),
            lambda g: g.all_reduce(np.ones(4)),
            "all_reduce(float64[3], op='sum')",
            "all_reduce(float64[4], op='sum')",
        ),
        (
            lambda g: g.all_reduce(np.ones(LARGE)),
            lambda g: g.all_reduce(np.ones(4)),
            f"all_reduce(float64[{LARGE}], op='sum')",
            "all_reduce(float64[4], op='sum')",
        ),
        (
            lambda g: g.all_reduce(np.ones(3, "f4")),
            lambda g: g.all_reduce(np.ones(3)),
            "all_reduce(float32[3]",
            "all_reduce(float64[3]",
        ),
        (
            lambda g: g.all_reduce(np.ones(3), "max"),
            lambda g: g.all_reduce(np.ones(3), "min"),
            "op='max'",
            "op='min'",
        ),
        (
            lambda g: g.reduce(np.ones(3), root=0),
            lambda g: g.reduce(np.ones(3), root=1),
            "reduce(float64[3], op='sum', root=0)",
            "reduce(float64[3], op='sum', root=1)",
        ),
        (
            lambda g: g.all_reduce(np.ones(3), "mean"),
            lambda g: g.all_reduce(np.ones(3), "mean", weight=2),
            "all_reduce(float64[3], op='mean')",
            "all_reduce(float64[3], op='mean', weight=...)",
        ),
        (
            lambda g: g.all_reduce(1),
            lambda g: g.all_reduce(1.0),
            "all_reduce(int64[]",
            "all_reduce(float64[]",
        ),
        (
            lambda g: g.all_reduce([np.ones(3)]),
            lambda g: g.all_reduce({"a": np.ones(3)}),
            "all_reduce([float64[3]]",
            "all_reduce({'a': float64[3]}",
        ),
        (
            lambda g: g.broadcast(np.ones(3)),
            lambda g: g.broadcast(np.ones((3, 1))),
            "broadcast(float64[3])",
            "broadcast(float64[3, 1])",
        ),
        (
            lambda g: g.broadcast(np.ones(LARGE)),
            lambda g: g.broadcast(np.ones(3, "i4")),
            f"broadcast(float64[{LARGE}])",
            "broadcast(int32[3])",
        ),
        (
            lambda g: g.broadcast(np.ones(3), 0),
            lambda g: g.broadcast(np.ones(3), 1),
            "broadcast(root=0)",
            "broadcast(root=1)",
        ),
        (
            lambda g: g.scatter(np.ones(3)),
            lambda g: g.scatter(np.ones(5)),
            "scatter(float64[3])",
            "scatter(float64[5])",
        ),
        (
            lambda g: g.all_gather(np.ones((3, 2))),
            lambda g: g.all_gather(np.ones((3, 4))),
            "all_gather(float64[rows, 2])",
            "all_gather(float64[rows, 4])",
        ),
        (
            lambda g: g.gather(np.ones(3)),
            lambda g: g.gather("text"),
            "gather(float64[rows], root=0)",
            "gather(object, root=0)",
        ),
        (
            lambda g: g.all_reduce(np.ones(3)),
            lambda g: g.all_gather(np.ones(3)),
            "all_reduce(float64[3], op='sum')",
            "all_gather(float64[rows])",
        ),
        (
            lambda g: g.all_reduce(np.ones(3)),
            lambda g: g.barrier(),
            "called all_reduce",
            "called barrier",
        ),
        (
            lambda g: g.split(0),
            lambda g: g.broadcast(np.ones(LARGE)),
            "called split",
            "called broadcast",
        ),
        (
            lambda g: g.all_reduce(np.ones(3), async_op=True).wait(),
            lambda g: g.all_reduce(np.ones(4)),
            "all_reduce(float64[3], op='sum')",
            "all_reduce(float64[4], op='sum')",
        ),
    ]
    fresh = group.split(0)
    assert fresh is not None
    shown = 0
    for where in (group, fresh):  # the first call of a group differs too
        for first, second, of_first, of_second in forms if where is group else forms[-3:]:
            for _ in range(2):
                try:
                    (second if where.rank else first)(where)
                except Disagreement as error:
                    text = str(error).partition("\n")[0]
                    said = text.split("; rank ")
                    assert len(said) == where.size, text
                    assert of_first in said[0], text
                    assert all(of_second in one for one in said[1:]), text
                    lines = [call.__code__.co_firstlineno for call in (first, second)]
                    assert f"test_collectives.py:{lines[0]}" in said[0], text
                    assert all(f"test_collectives.py:{lines[1]}" in s for s in said[1:]), text
                    shown += 1
            assert usable(where)
    return shown


def test_disagreements(outcome_of_several: Any) -> None:
    """Different shapes, dtypes, ops, roots or calls: one error with each rank's call and line."""
    assert outcome_of_several(disagreements) == [2 * (18 + 3)] * outcome_of_several.size


@BODIES.of_several
def one_rank_refuses(group: Group) -> tuple[int, int]:
    refused = heard = 0
    wrong: list[tuple[Any, str]] = [
        (lambda: group.all_reduce(np.ones(3), "average"), "op='average'"),
        (lambda: group.reduce(np.ones(3), root=9), "root=9"),
        (lambda: group.all_reduce(np.array(["text"])), "expected numbers"),
        (lambda: group.all_reduce(np.ones(3), "mean", weight=-1), "weight=-1"),
        (lambda: group.all_reduce(np.ones(3), out=np.ones(4)), "out= is float64[4]"),
        (lambda: group.all_reduce(np.ones(3), ["sum"]), "op=['sum']"),
        (lambda: group.all_reduce(np.ones(3), timeout=-1), "timeout=-1"),
        (lambda: group.scatter(np.array(3.0), 0, async_op=True), "no rows to share out"),
    ]
    for turn in range(3 * group.size):
        call, reason = wrong[turn % len(wrong)]
        times = 1 + turn % 3  # also several times in a row
        for _ in range(times):
            try:
                if group.rank == turn % group.size:
                    call()
                else:
                    group.all_reduce(np.ones(3))
            except Disagreement as error:
                text = str(error)
                assert f"rank {turn % group.size} called" in text
                assert "which refused: Invalid" in text, text
                assert reason in text, text
                assert text.count("test_collectives.py:") >= group.size
                heard += 1
            except (InvalidValue, InvalidType) as error:
                assert reason in str(error)
                refused += 1
        if turn % 2:
            assert usable(group)
    assert usable(group)
    # all at once, and some with calls pending
    for call, _ in wrong * 2:
        if group.rank % 2:
            group.all_reduce(np.ones(3), async_op=True)
        else:
            group.all_reduce(np.ones(3))
        try:
            call()
        except (InvalidValue, InvalidType):
            refused += 100
    assert usable(group)
    return refused % 100, heard


def test_one_rank_refuses(outcome_of_several: Any) -> None:
    """Who refuses its arguments raises its own error, the others hear the reason; all go on."""
    results = outcome_of_several(one_rank_refuses)
    calls = sum(1 + turn % 3 for turn in range(3 * outcome_of_several.size))
    assert all(refused + heard == calls for refused, heard in results)
    assert sum(refused for refused, _ in results) == calls


@BODIES.of_all
def bad_input(group: Group) -> list[str]:
    one = np.ones(3)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    valid = f"expected a rank of the group, 0 to {group.size - 1}"
    of_root = ("scatter(dict)", "broadcast")
    cases: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
        (lambda: group.all_reduce(one, "avg"), InvalidValue, ("'avg'", "sum, mean, prod")),
        (
            lambda: group.reduce(one, "avg"),
            InvalidValue,
            ("'avg'", "sum, mean, prod, min, max"),
        ),
        (lambda: group.broadcast(one, group.size), InvalidValue, (f"root={group.size}", valid)),
        (lambda: group.scatter(one, -1), InvalidValue, ("root=-1", valid)),
        (lambda: group.gather(one, "x"), InvalidType, ("root='x'", valid)),
        (lambda: group.reduce(one, root=None), InvalidType, ("root=None", valid)),
        (lambda: group.all_reduce(np.array([{}])), InvalidType, ("Python objects", "numbers")),
        (lambda: group.all_reduce(np.array(["a"])), InvalidType, ("str", "expected numbers")),
        (lambda: group.all_reduce("text"), InvalidType, ("str", "expected numbers")),
        (lambda: group.all_reduce(None), InvalidType, ("None", "expected numbers")),
        (lambda: group.all_reduce(2**64), InvalidValue, (str(2**64), "64 bits")),
        (lambda: group.all_reduce(one, out=np.ones(2)), InvalidValue, ("[2]", "[3]")),
        (lambda: group.all_reduce(one, out=one.astype("f4")), InvalidValue, ("float32[3]",)),
        (lambda: group.all_reduce(one, out=frozen), InvalidValue, ("cannot be written to",)),
        (lambda: group.all_reduce(one, out=[1, 2]), InvalidType, ("out=list",)),
        (lambda: group.broadcast(one, out=np.ones(2)), InvalidValue, ("[2]", "[3]")),
        (lambda: group.scatter(one, out=np.ones(9)), InvalidValue, ("[9]", "rank 0's out=")),
        (lambda: group.all_gather(one, out=one[:2]), InvalidValue, ("[2]", "rank 0's out=")),
        (lambda: group.all_gather("x", out=one), InvalidType, ("all_gather(str, out=...)",)),
        (lambda: group.all_reduce(one, "mean", weight=-2), InvalidValue, ("weight=-2",)),
        (lambda: group.all_reduce(one, "mean", weight="2"), InvalidType, ("weight='2'",)),
        (lambda: group.all_reduce(one, weight=2), InvalidValue, ("for op='mean'",)),
        (lambda: group.reduce(one, "mean", weight=0), InvalidValue, ("weights", "are 0")),
        (lambda: group.scatter(np.array(1.0)), InvalidValue, ("no rows", "broadcast")),
        (lambda: group.scatter({"a": 1}), InvalidType, of_root),
        (lambda: group.all_reduce(np.ma.array([1, 2])), InvalidType, ("mask", ".filled")),
        (lambda: group.all_gather(np.ma.array([1, 2])), InvalidType, ("mask", ".filled")),
        (lambda: group.all_reduce(one, timeout="x"), InvalidType, ("timeout='x'",)),
    ]
    missing = []
    for number, (call, expected, words) in enumerate(cases):
        for _ in range(2):  # the second time it might be prepared
            try:
                call()
            except (expected, Disagreement) as error:
                # only the root's value counts in a scatter: the others hear that it refused
                if isinstance(error, Disagreement) and (group.rank == 0 or words != of_root):
                    missing.append(f"{number}: {error}")
                missing += [
                    f"{number}: {word} in {error}" for word in words if word not in str(error)
                ]
            else:
                missing.append(f"{number}: nothing was raised")
        if number % 5 == 0 and not usable(group):
            missing.append(f"{number}: not usable")
    return missing if usable(group) else ["not usable"]


def test_bad_input(outcome: Any) -> None:
    """The message names the value and what would do, on every engine alike; the group goes on."""
    assert outcome(bad_input) == [[]] * outcome.size
