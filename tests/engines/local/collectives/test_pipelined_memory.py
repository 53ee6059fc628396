"""Large sums and broadcasts of all ranks together: what only shows with processes of their own."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_ranks, within
from weft import faults
from weft.engines.base import Group
from weft.engines.local.collectives import pipelined
from weft.engines.local.collectives.persistent import PersistentPipelinedSum
from weft.engines.local.collectives.pipelined import PipelinedMemory
from weft.errors import Disagreement, InvalidValue

needs_kernels = pytest.mark.skipif(
    os.environ.get("WEFT_KERNELS") == "0", reason="the kernels are switched off"
)
#: more than passes through the slots, and not a whole number of lines
LENGTH = 300_011


def numbers(rank: int, kind: str = "float32", shape: Any = LENGTH) -> Any:
    return (np.random.default_rng(rank).normal(size=shape) * 1000).astype(kind)


SIZES = [3, *(pytest.param(size, marks=pytest.mark.soak) for size in (2, 4))]


@pytest.mark.parametrize("size", SIZES)
def test_the_bits_are_those_of_other_ways(size: int) -> None:
    """With and without loops in C, and where only some ranks have them: the same sums and means, to
    the bit, whatever the arrays are like."""

    def body(group: Group) -> list[str]:
        found = []
        for kind in ("float32", "float64", "int32", "uint64"):
            own, double = (numbers(group.rank, kind, n) for n in (LENGTH, 2 * LENGTH))
            shifted = np.empty(own.nbytes + 1, np.uint8)[1:].view(kind)
            several = [numbers(group.rank + turn, kind, (1000, 300)) for turn in range(3)]
            for op in ("sum", "mean"):
                shifted[...] = own
                found += [group.all_reduce(own, op), group.all_reduce(double[::2], op)]
                reduced = group.reduce(own, op, root=group.size - 1)
                found.append(group.broadcast(reduced, root=group.size - 1))
                found.append(group.all_reduce(shifted, op, out=shifted).copy())
                found += group.all_reduce(several, op)
                found.append(group.all_reduce(own.copy(), op, async_op=True).wait())
        return [hashlib.sha256(one).hexdigest() for one in found]

    with_loops = run_ranks(size, body)
    assert all(found == with_loops[0] for found in with_loops)
    assert run_ranks(size, body, env={"WEFT_KERNELS": "0"}) == with_loops
    one_without = run_ranks(size, _without_loops_on_rank_0, body)
    assert one_without == with_loops


def _without_loops_on_rank_0(group: Group, body: Any) -> Any:
    from weft import kernels

    if group.rank == 0:
        kernels._library, kernels._missing = None, "taken away"
        kernels._kernel.cache_clear()
    return body(group)


@needs_kernels
def test_it_is_prepared_by_shape() -> None:
    """From the second call on, whichever arrays they are, each rank's for itself; calls that differ
    are told, and all can go on."""

    def body(group: Group) -> list[Any]:
        quickly: list[int] = []
        run = PersistentPipelinedSum.run

        def counted(self: PersistentPipelinedSum, *arguments: Any) -> Any:
            quickly.append(turn)
            return run(self, *arguments)

        PersistentPipelinedSum.run = counted  # type: ignore[method-assign]
        found: list[Any] = []
        for turn in range(10):
            own = numbers(group.rank + turn, shape=(500, 1000))
            out: Any = (None, own, np.zeros_like(own))[turn % 3]
            if turn == 4 and group.rank == 0:
                own = own.T.copy().T  # lies otherwise
            if turn == 5:
                out = own = weft.share(own) if group.rank else own
            if turn == 6 and group.rank == 1:
                out = np.zeros_like(own)[:, ::-1]
            if turn == 7:
                out = own.reshape(-1)[::-1].reshape(own.shape)  # the same memory, the other way
            op = "max" if turn == 8 and group.rank == 1 else "sum"
            try:
                found.append(group.all_reduce(own, op, out=out).tobytes())
            except Disagreement as error:
                found.append("max" in str(error) and "sum" in str(error))
        own = numbers(group.rank, shape=(500, 1000))
        own.flags.writeable = False
        with pytest.raises(InvalidValue, match="cannot be written to"):
            group.all_reduce(own, out=own)
        return [found, quickly]

    (first, quickly_0), (second, quickly_1) = run_ranks(2, body)
    assert first == second
    for turn, found in enumerate(first):
        expected = numbers(turn, shape=(500, 1000)) + numbers(turn + 1, shape=(500, 1000))
        assert found is True if turn == 8 else found == expected.tobytes()
    assert quickly_0 == [1, 2, 3, 5, 6, 8, 9]
    assert quickly_1 == [1, 2, 3, 4, 9]


@needs_kernels
@pytest.mark.alone
def test_waiting_in_the_middle_of_a_sum_costs_little() -> None:
    """While another is late with its chunk, a rank sleeps, and says in time that it waits."""

    def body(group: Group) -> tuple[float, float]:
        own = numbers(group.rank)
        group.all_reduce(own)
        if group.rank == 0:
            faults._faults, faults.armed = faults.parse("collective.block@3:0:delay=2"), True
        group.barrier()
        began, spent = time.monotonic(), time.process_time()
        total = group.all_reduce(own)
        spent = time.process_time() - spent
        assert np.array_equal(total, numbers(0) + numbers(1))
        return time.monotonic() - began, spent

    waited, spent = run_ranks(2, body)[1]
    assert waited > 1.9
    assert spent < within(0.06)


@needs_kernels
def test_its_memory_is_made_when_it_is_needed() -> None:
    """Small sums, and large ones of another kind, do without."""

    def body(group: Group) -> list[bool]:
        def made() -> bool:
            collectives = group._collectives  # type: ignore[attr-defined]
            return isinstance(collectives._transport.pipelined_memory, PipelinedMemory)

        found = []
        for value, op in ((np.ones(3), "sum"), (numbers(0), "max"), (numbers(0), "mean")):
            group.all_reduce(value, op)
            found.append(made())
        return found

    assert run_ranks(2, body) == [[False, False, True]] * 2


@needs_kernels
@pytest.mark.parametrize(("size", "pipelined_turns"), [(2, [0, 16, 32]), (3, list(range(34)))])
def test_broadcasts_where_cores_share_no_cache(size: int, pipelined_turns: list[int]) -> None:
    """One to one goes by the kernel's copies for a while, then it is tried again; to several it
    stays pipelined. All ranks take the same way, and what arrives is right."""

    def body(group: Group) -> tuple[list[int], bool, bool]:
        pipelined._SLOW = 0  # giving is always found to be slow
        found, right = [], True
        carry_out = PipelinedMemory._carry_out

        def noted(*arguments: Any) -> None:
            if turn not in found:
                found.append(turn)
            carry_out(*arguments)

        PipelinedMemory._carry_out = noted  # type: ignore[method-assign]
        for turn in range(34):
            root = turn // 16 % group.size
            several = [numbers(turn, shape=length) for length in (4_000_000, 0, 1_000_003)]
            given = several if group.rank == root else [np.empty_like(one) for one in several]
            arrived = group.broadcast(given, root)
            right &= all(map(np.array_equal, arrived, several))
        transport = group._collectives._transport  # type: ignore[attr-defined]
        return found, right, transport.peers is not None

    answers = run_ranks(size, body)
    if not answers[0][2]:
        pytest.skip("ranks may not reach each other's memory here")
    assert answers == [(pipelined_turns, True, True)] * size


@needs_kernels
def test_a_few_steps_at_a_time() -> None:
    """A sum of more chunks than are done at once comes to its end, and hears signals meanwhile."""

    def body(group: Group) -> bool:
        pipelined._STEPS = 3
        own = numbers(group.rank, shape=5_000_000)
        return np.array_equal(group.all_reduce(own, out=own), _sum(group.size))

    assert run_ranks(3, body) == [True] * 3


def _sum(size: int) -> Any:
    total = numbers(0, shape=5_000_000)
    for rank in range(1, size):
        total = total + numbers(rank, shape=5_000_000)
    return total
