"""Tables on a device: the same numbers as on the CPU, to the bit where they are added.

What ranks do is the same on every device. So ranks without a GPU keep tensors in memory of the
host, as `device="cpu:0"` says, and the same bodies run on a GPU where there is one.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.failures.test_tables import IDS, INSIDE, SERIES, WAYS
from tests.gpus import obstacle
from tests.support import launch, run_python, run_ranks
from weft._core import rows
from weft.errors import (
    Disagreement,
    InvalidType,
    InvalidValue,
    NotInitialized,
    OutOfMemory,
    Stalled,
    UsageError,
)

HOST = "cpu:0"
DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
UPDATERS = ("add", "sgd", "momentum", "adagrad", "rmsprop", "adam")


def same_as_on_the_cpu(group: Any, device: str) -> bool:
    """Whatever is added in the same order gives the same bits."""
    import torch

    rank, size, kind = group.rank, group.size, torch.device(device).type

    def given(shape: Any, dtype: str, seed: int) -> Any:
        generator = np.random.default_rng((seed, rank))
        if dtype[0] in "iu":
            return generator.integers(0, 50, shape).astype(dtype)
        return generator.normal(size=shape).astype(dtype) * 7

    def bits(values: Any) -> bytes:
        return np.ascontiguousarray(values).tobytes()

    for dtype in DTYPES:
        start = given((40, 3), dtype, 0)
        tables = [weft.MatrixTable(start, dtype=dtype, device=one) for one in ("cpu", device)]
        near, far = tables
        group.barrier()

        def there(ids: Any, dtype: str = dtype) -> Any:
            """Row ids: on the device with some dtypes."""
            if ids is None or isinstance(ids, slice | int | np.integer) or "int" in dtype:
                return ids
            return torch.tensor(list(ids), dtype=torch.int64, device=kind)

        def add(delta: Any, ids: Any = None, near: Any = near, far: Any = far) -> None:
            for turn in range(size):  # one after the other: sums of floats depend on the order
                if turn == rank:
                    near.add(delta, ids)
                    far.add(delta, there(ids))
                group.barrier()

        def same(ids: Any = None, near: Any = near, far: Any = far) -> None:
            expected, found = near.get(ids), far.get(there(ids))
            assert found.device.type == kind, found.device
            assert tuple(found.shape) == expected.shape
            assert str(found.dtype) == f"torch.{near.dtype}"
            assert bits(found.cpu().numpy()) == bits(expected), (near.dtype, ids)
            group.barrier()  # before somebody adds again

        same()
        add(given((40, 3), dtype, 1))
        same()
        many = np.random.default_rng(rank).integers(0, 40, 500)
        many[:150] = 7  # more often than the device takes turns
        for ids in ([3], [39, 0], [], range(40), [5, 5, 5, 1, 5], many.tolist(), slice(None, 9, 2)):
            count = len(range(40)[ids]) if isinstance(ids, slice) else len(ids)
            add(given((count, 3), dtype, 2), ids)
            same()
            same(ids)
        add(given(3, dtype, 3), 11)
        same(11)
        same(np.int64(4))
    # many wide rows
    start = given((3000, 256), "float32", 5)
    tables = [weft.MatrixTable(start, device=one) for one in ("cpu", device)]
    near, far = tables
    ids = torch.randperm(3000, generator=torch.Generator().manual_seed(rank))[:2000]
    delta = given((2000, 256), "float32", 6)
    group.barrier()
    for turn in range(size):
        if turn == rank:
            near.add(delta, ids)
            near.add(delta, ids % 700)
            for some in (ids, ids % 700):
                far.add(torch.from_numpy(delta).to(kind), some.to(kind))
        group.barrier()
    for some in (ids, ids % 7):
        found = far.get(some.to(kind))
        assert bits(found.cpu().numpy()) == bits(near.get(some))
    group.barrier()
    # numbers of one dimension, and large ones
    for length in (1, 300_001):
        tables = [weft.ArrayTable(length, device=one) for one in ("cpu", device)]
        group.barrier()
        for turn in range(size):
            if turn == rank:
                delta = given(length, "float32", 4)
                for table in tables:
                    table.add(delta)
                    table.add(delta[:1], [length - 1])
            group.barrier()
        near, far = tables
        assert bits(far.get().cpu().numpy()) == bits(near.get())
        assert bits(np.asarray(far)) == bits(near.get())
        group.barrier()
    return True


def deltas_and_results_of_every_kind(group: Any, device: str) -> bool:
    """What is on the device is taken from there, anything else by way of the host."""
    import torch

    table = weft.MatrixTable(6, 4, device=device, check_finite=True)
    kind = torch.device(device).type
    base = np.arange(24, dtype="float32").reshape(6, 4)
    far = torch.from_numpy(base).to(kind)
    wide = torch.zeros(6, 8, device=kind)
    wide[:, ::2] = far
    leaf = far.clone().requires_grad_()
    expected = np.zeros((6, 4), "float32")
    deltas = [
        *(base, base.tolist(), base.astype("float64"), base.astype("int16"), base.reshape(-1)),
        *(torch.from_numpy(base), far, far.double(), far.reshape(-1), wide[:, ::2], leaf),
        *(np.asfortranarray(base), far.T.contiguous().T, far * 1),
    ]
    for delta in deltas:
        if group.rank == 0:
            table.add(delta)
            table.add(delta[2:4], torch.tensor([2, 3], device=kind)) if len(delta) == 6 else None
        expected += base
        if len(delta) == 6:
            expected[2:4] += base[2:4]
        group.barrier()
        assert np.array_equal(table.get().cpu(), expected), delta
        group.barrier()
    # results
    outs = [
        *(torch.empty(6, 4, device=kind), torch.empty(6, 4), np.empty((6, 4), "float32")),
        *(torch.empty(6, 8, device=kind)[:, ::2], np.empty((6, 8), "float32")[:, ::2]),
        torch.empty(6, 8)[:, ::2],
    ]
    for out in outs:
        assert table.get(out=out) is out
        assert np.array_equal(out if isinstance(out, np.ndarray) else out.cpu(), expected)
        part = out[:3]
        assert table.get([5, 0, 5], out=part) is part
        assert np.array_equal(
            np.asarray(part if kind == "cpu" or isinstance(part, np.ndarray) else part.cpu()),
            expected[[5, 0, 5]],
        )
        row = out[5]
        assert table.get(2, out=row) is row
        assert table.get_async(out=out).wait() is out
        assert np.array_equal(out if isinstance(out, np.ndarray) else out.cpu(), expected)
    group.barrier()

    def refused(call: Any, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            call()

    frozen = np.zeros((6, 4), "float32")
    frozen.flags.writeable = False
    refused(lambda: table.get(out=frozen), InvalidValue, "cannot be written")
    refused(lambda: table.get(out=torch.empty(5, 4, device=kind)), InvalidValue, "the result is")
    refused(lambda: table.get(out=torch.empty(6, 4).half()), InvalidValue, "float16")
    refused(lambda: table.get(out=[1]), InvalidType, "expected a tensor or an array")
    refused(lambda: table.get([6]), InvalidValue, "row 6 is not in this table")
    refused(lambda: table.get(torch.tensor([-1], device=kind)), InvalidValue, "row -1")
    refused(lambda: table.add(far[:1], torch.tensor([6], device=kind)), InvalidValue, "row 6")
    refused(lambda: table.get(torch.tensor([2.0], device=kind)), InvalidType, "whole numbers")
    refused(lambda: table.get(torch.zeros(2, 2, device=kind).long()), InvalidValue, "one row id")
    assert table.get(torch.tensor([2, 1], device=kind).int()).shape == (2, 4)
    refused(lambda: table.add(far[:5]), InvalidValue, "of shape")
    refused(lambda: table.add(far.T), InvalidValue, "of shape")
    refused(lambda: table.add(far.to_sparse()), InvalidType, "to_dense")
    refused(lambda: table.add(far * 1j), InvalidType, "complex64")
    refused(lambda: table.add(far.bfloat16()), InvalidType, "bfloat16")
    refused(lambda: table.add(far / 0), InvalidValue, "check_finite")
    refused(lambda: table.add([np.inf] * 24), InvalidValue, "check_finite")
    assert np.array_equal(table.get().cpu(), expected)
    # a table on the CPU takes tensors from everywhere, too
    near = weft.MatrixTable(6, 4)
    group.barrier()
    near.add(far)
    near.add(far[:1], torch.tensor([5], device=kind))
    group.barrier()
    for out in (torch.empty(6, 4, device=kind), torch.empty(6, 8, device=kind)[:, ::2]):
        assert near.get(out=out) is out
        assert np.array_equal(out.cpu(), near.get())
    return True


def updaters_and_consistencies(group: Any, device: str) -> bool:
    """All rules come to what they come to on the CPU, whoever waits for whom."""
    rank, size = group.rank, group.size

    def keep_largest(table: Any, state: Any, delta: Any) -> None:
        if isinstance(table, np.ndarray):
            np.maximum(table, delta, out=table)
        else:
            table.copy_(table.maximum(delta))
        state["seen"] += 1

    rules = [*UPDATERS, weft.updaters.momentum(nesterov=True)]
    rules.append(weft.updaters.custom(keep_largest, state=["seen"], name="largest"))
    for rule in rules:
        consistencies: list[Any] = ["bsp"]
        consistencies += ["async"] if rule in ("add", "adam") else []
        consistencies += [weft.ssp(2)] if rule == "add" else []  # where any order is the same
        for consistency in consistencies:
            for dtype in ("float32", "float16") if rule in UPDATERS else ("float32",):
                options: dict[str, Any] = {"updater": rule, "consistency": consistency}
                near, far = (
                    weft.MatrixTable(50, 3, dtype=dtype, device=one, **options)
                    for one in ("cpu", device)
                )
                generator = np.random.default_rng(rank)
                for _ in range(4):
                    delta = generator.integers(-9, 9, (50, 3)) / 4  # sums are exact in any order
                    some = generator.integers(-9, 9, (7, 3)) / 4
                    ids = [4, 9, 4, 30, 4, 9, 49]
                    for table in (near, far):
                        for turn in range(size) if consistency != "bsp" else [rank]:
                            if turn == rank:
                                table.add(delta)
                                table.add(some, ids)
                            if consistency == "async":
                                group.barrier()
                    expected, found = near.get(), far.get().cpu().numpy()
                    if consistency == "bsp" and rule in ("add", "largest"):
                        assert np.array_equal(found, expected), rule
                group.barrier()
                expected, found = near.get(), far.get().cpu().numpy()
                accuracy = 2e-2 if dtype == "float16" else 1e-5
                assert np.allclose(found, expected, accuracy, accuracy), (str(rule), dtype)
                assert near._store.steps == far._store.steps
                group.barrier()
    table = weft.ArrayTable(5, exact=False, device=device)
    group.barrier()
    for turn in range(size):
        if turn == rank:
            table.add([1] * 5)
            table.add([1, 1], [0, 0])
        group.barrier()
    assert table.get().tolist() == [3.0 * size, *[float(size)] * 4]
    assert table.interrupted == ()
    # the mean of all ranks' deltas, with the same bits everywhere
    table = weft.ArrayTable(10_000, consistency="bsp", device=device)
    total = np.zeros(10_000, "float32")
    for turn in range(3):
        deltas = [
            np.random.default_rng((turn, one)).normal(size=10_000).astype("float32")
            for one in range(size)
        ]
        table.add(deltas[rank])
        for delta in deltas:
            total += delta
        assert np.array_equal(table.get().cpu(), total)
    # ssp: nobody is more than two ahead
    table = weft.ArrayTable(3, consistency=weft.ssp(2), device=device)
    group.barrier()
    if rank == 0 and size > 1:
        for _ in range(2):
            table.add([1, 1, 1])
        with pytest.raises(Stalled):
            table.add([1, 1, 1], timeout=0.2)
    group.barrier()
    return True


def many_at_once(group: Any, device: str) -> int:
    """No add is lost, and no row is read half written, whoever calls at the same time."""
    import torch

    kind = torch.device(device).type
    table = weft.MatrixTable(2000, 16, dtype="int64", device=device)
    one = torch.ones(2000, 16, dtype=torch.int64, device=kind)
    group.barrier()
    torn = 0
    for turn in range(30):
        table.add(one)
        table.add(one[:5], [turn, turn, 1999, 7, turn])
        handles = [table.add_async(one), table.add_async(one[:1], [0])]
        found = table.get([turn, 50, 1999])
        torn += int((found != found[:, :1]).any())
        for handle in handles:
            handle.wait()
    group.barrier()
    values = table.get().cpu().numpy()
    assert values.sum() == group.size * 30 * 16 * (2 * 2000 + 6), values.sum()
    group.barrier()
    # what was queued before a call is in it, and its result can be used at once
    floats = weft.ArrayTable(1_000_000, device=device)
    group.barrier()
    delta = torch.zeros(1_000_000, device=kind)
    for turn in range(5):
        delta.fill_(turn)
        delta += 1
        handle = floats.add_async(delta)
        handle.wait()
        later = floats.get_async().wait() + 1
        assert float(later.min()) >= sum(range(1, turn + 2)) + 1
    group.barrier()
    assert float(floats.get().max()) == float(floats.get().min()) == 15.0 * group.size
    return torn


def saved_and_loaded(group: Any, device: str) -> bool:
    """A table that was saved on a device is loaded on the CPU and back, with its state."""
    folder = Path(os.environ["WEFT_TEST_FOLDER"])
    for number, (rule, consistency) in enumerate(
        [("adam", "bsp"), ("add", "async"), ("momentum", weft.ssp(3))]
    ):
        table = weft.MatrixTable(
            np.arange(12.0).reshape(4, 3), updater=rule, consistency=consistency, device=device
        )
        for _ in range(3):
            table.add(np.ones((4, 3)))
            group.barrier()
        path = folder / f"table{number}"
        table.save(path)
        near = weft.load(path)
        far = weft.load(path, device=device)
        assert type(near.get()) is np.ndarray
        assert repr(far) == repr(table)
        assert near._store.steps == far._store.steps == table._store.steps
        group.barrier()
        for one in (near, far, table):
            one.add(np.ones((4, 3)), range(4))
            group.barrier()
        assert np.array_equal(far.get().cpu(), table.get().cpu())
        assert np.allclose(near.get(), table.get().cpu(), 1e-6, 1e-6)
        group.barrier()
        near.save(folder / f"again{number}")
        assert weft.load(folder / f"again{number}", into=far) is far
        assert np.array_equal(far.get().cpu(), near.get())
        assert far.get().device.type == table.get().device.type
        group.barrier()
    return True


def refused(group: Any, device: str) -> list[str]:
    """What cannot be is told to every rank."""
    found = []
    for wrong in ("gpu", "cuda:77", "mps", "meta", 3, None):
        with pytest.raises((InvalidValue, InvalidType)) as caught:
            weft.ArrayTable(3, device=wrong)  # type: ignore[arg-type]
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises(InvalidType, match="torch has no such numbers"):
        weft.ArrayTable(3, dtype="longdouble", device=device)
    with pytest.raises(InvalidType, match="torch has no such numbers"):
        weft.ArrayTable(3, dtype="complex256", device=device)
    if group.size > 1:
        with pytest.raises(Disagreement, match="device='c"):
            weft.ArrayTable(3, device="cpu" if group.rank else device)
    table = weft.ArrayTable(3, device=device, updater=lambda rows, state, delta: delta)
    with pytest.raises(InvalidType, match="returned a Tensor"):
        table.add([1, 2, 3])

    def uses_itself(rows: Any, state: Any, delta: Any) -> None:
        again.add([1, 2, 3])

    again = weft.ArrayTable(3, device=device, updater=uses_itself)
    with pytest.raises(UsageError):
        again.add([1, 2, 3])
    fine = weft.ArrayTable(3, device=device)
    group.barrier()
    fine.add([1, 2, 3])
    group.barrier()
    assert fine.get().tolist() == [group.size * k for k in (1, 2, 3)]
    weft.shutdown()
    with pytest.raises(NotInitialized):
        fine.get()
    return found


def all_of_it(group: Any, device: str) -> list[str]:
    assert same_as_on_the_cpu(group, device)
    assert deltas_and_results_of_every_kind(group, device)
    assert updaters_and_consistencies(group, device)
    assert many_at_once(group, device) == 0
    assert saved_and_loaded(group, device)
    return refused(group, device)


@pytest.mark.parametrize("ranks", [1, 3])
def test_tables_of_tensors(ranks: int) -> None:
    for found in run_ranks(ranks, all_of_it, HOST):
        gpu, absent, *others, number, nothing = found
        assert gpu.startswith("InvalidValue: device='gpu': expected 'cpu', 'cuda', or")
        assert absent.startswith("InvalidValue: device='cuda:77': ")
        assert all(text.endswith("tables are on the 'cpu' or on 'cuda'") for text in others)
        for text in (number, nothing):
            assert text.startswith("InvalidType: device="), text
        if obstacle():
            assert "no CUDA" in absent or "no GPU" in absent


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tables_on_a_gpu(ranks: int) -> None:
    for _, absent, *_ in run_ranks(ranks, all_of_it, "cuda"):
        assert "this process may use cuda:0" in absent


# repeated ids


def test_occurrences() -> None:
    generator = np.random.default_rng(0)
    for count in (0, 1, 2, 9, 500):
        ids = generator.integers(0, 20, count)
        seen: dict[int, int] = {}
        expected = []
        for one in ids.tolist():
            expected.append(seen.get(one, 0))
            seen[one] = expected[-1] + 1
        assert rows.occurrences(ids).tolist() == expected


# deaths

#: consistency, way, point: all that an add and a get pass
PASSED = [
    *(
        (consistency, way, point)
        for consistency in ("async", "ssp")
        for way in ("rows", "whole")
        for point in ("table.adding", "table.added", "table.copied", "lock.taken")
    ),
    *(
        ("bsp", way, point)
        for way in ("rows", "whole")
        for point in ("table.staged", "table.adding", "table.applying", "table.added")
    ),
]


def die(device: str, turn: int, env: dict[str, str]) -> None:
    cases = PASSED[turn::6]
    size = 2 + len(cases)
    attempts = [
        (*case, (turn + number) % (size - number), "kill") for number, case in enumerate(cases)
    ]
    outcome = launch(
        SERIES,
        size,
        json.dumps(attempts),
        options=("--keep-going", "--no-prefix"),
        env={"WEFT_TEST_DEVICE": device, **env},
    )
    told = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.code == 137, outcome
    assert sum("done" in line for line in told) == 2, outcome
    for line in (line for line in told if "case" in line):
        assert "error" not in line, line
    for line in (line for line in told if "end" in line):
        consistency, way, point, _ = line["end"]
        victim, columns = line["of"], line["columns"]
        inside = [victim, IDS if way == "rows" else [0, WAYS[way]], line["generation"] - 1]
        assert line["interrupted"] == ([inside] if point in INSIDE else []), line
        left = size - line["generation"]
        survived = [count for rank, count in enumerate(columns) if rank != victim]
        assert survived == [5] * left + [0] * (5 - left), line
        early = ("table.adding", "lock.taken") if consistency != "bsp" else ()
        missing = point == "table.staged" or point in early
        assert columns[victim] == (2 if missing else 3), line


@pytest.mark.parametrize("turn", range(3))
def test_a_rank_dies_in_a_table(turn: int) -> None:
    """Nobody is held up, nobody's adds are lost, and what may be half done is told exactly."""
    die(HOST, turn, {})


@pytest.mark.gpu
@pytest.mark.parametrize("turn", range(6))
def test_a_rank_dies_in_a_table_on_a_gpu(turn: int) -> None:
    die("cuda", turn, {})


BUSY = """
import os, sys, time
import torch, weft
from weft import faults
group = weft.init(timeout=60)
device, cycles, victim = sys.argv[1], int(sys.argv[2]) * 1_800_000, group.rank == 1

def slowly(rows, state, delta):
    rows += delta
    if victim and armed:
        if cycles:
            torch.cuda._sleep(cycles)  # the lock is held, and the GPU at work, when it is killed
        os.kill(os.getpid(), 9)

armed = False
plain = weft.ArrayTable(1_000_000, device=device)
slow = weft.ArrayTable(1_000_000, updater=slowly, device=device)
group.barrier()
one = torch.ones(1_000_000, device=device)
for table in (plain, slow):
    table.add(one)
group.barrier()
armed = True
if victim:
    slow.add(one)
    raise SystemExit("still here")
while not group._meeting.roster.gone([1]):
    plain.add(one)
    slow.add(one, timeout=50)
slow.get()
assert [write.rank for write in slow.interrupted] == [1], slow.interrupted
group = group.survivors()
group.barrier()
before, sums = slow.get(), plain.get()
assert bool((sums == sums[0]).all()), sums
assert bool(((before - before[0]).abs() <= 1).all()), before  # its own add may be half done
group.barrier()
slow.add(one)
group.barrier()
assert bool((slow.get() == before + group.size).all())
print("went on")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("milliseconds", [1, 5, 50])
def test_a_rank_dies_while_its_gpu_works_under_the_lock(milliseconds: int) -> None:
    outcome = launch(BUSY, 3, "cuda", str(milliseconds), options=("--keep-going",))
    assert outcome.out.count("went on") == 2, outcome


def test_a_rank_dies_in_its_updater_under_the_lock() -> None:
    outcome = launch(BUSY, 3, HOST, "0", options=("--keep-going",))
    assert outcome.out.count("went on") == 2, outcome


# what bad places get


def test_cuda_without_a_gpu() -> None:
    """Where there is none, every rank is told in words."""
    if not obstacle():
        pytest.skip("there is a GPU here")

    def body(group: Any) -> list[str]:
        found = []
        for device in ("cuda", "cuda:0"):
            with pytest.raises(InvalidValue) as caught:
                weft.ArrayTable(3, device=device)
            found.append(str(caught.value))
        assert weft.device() == "cpu"
        table = weft.ArrayTable(3, device=weft.device())
        assert type(table.get()) is np.ndarray
        return found

    for found in run_ranks(2, body):
        for text in found:
            assert "CUDA" in text or "no GPU" in text


def test_without_torch() -> None:
    """It is named, with the line that installs it."""
    outcome = run_python(
        """
import sys
sys.modules["torch"] = None
import weft
weft.init()
try:
    weft.ArrayTable(3, device="cuda")
except weft.MissingPackage as error:
    print(error)
"""
    )
    assert "pip install 'weft[torch]'" in outcome.out, outcome


def fill_the_gpu(group: Any) -> list[str]:
    """A table that does not fit is told to all, with the need; one that fits once torch has given
    back what it keeps is made."""
    import torch

    total = torch.cuda.mem_get_info()[1]
    found = []
    for size in (total // 4 * 2, total // 4 + (1 << 20)):
        with pytest.raises(OutOfMemory) as caught:
            weft.ArrayTable(size, device="cuda")
        found.append(str(caught.value))
    with pytest.raises(OutOfMemory) as caught:
        weft.ArrayTable(total // 12, updater="adam", consistency="bsp", device="cuda")
    del caught  # and what its frames hold
    gc.collect()
    torch.cuda.empty_cache()
    if group.rank == 0:
        free = torch.cuda.mem_get_info()[0]
        held = torch.empty(free - (500 << 20), dtype=torch.uint8, device="cuda")
        del held  # which torch keeps
        assert torch.cuda.mem_get_info()[0] < 1 << 30
    group.barrier()
    table = weft.ArrayTable(1 << 29, device="cuda")  # 2 GB
    group.barrier()
    table.add(torch.ones(3, device="cuda"), [0, 1, (1 << 29) - 1])
    group.barrier()
    assert table.get([0, 5, (1 << 29) - 1]).tolist() == [group.size, 0, group.size]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_table_that_does_not_fit(ranks: int) -> None:
    for found in run_ranks(ranks, fill_the_gpu):
        for text in found:
            assert "MiB free" in text, text
            assert "use smaller arrays" in text, text
