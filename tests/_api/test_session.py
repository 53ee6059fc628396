"""init, shutdown, and every way to use them wrongly."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.gpus import require_any_names
from tests.support import HANGS, await_state, launch, run_python, run_ranks, wait_until
from weft import resources
from weft.engines.base import Group
from weft.engines.local.group import LocalGroup
from weft.errors import (
    AlreadyInitialized,
    InvalidType,
    InvalidValue,
    NotInitialized,
    UnknownEngine,
    UsedConcurrently,
)


def test_without_a_launcher_a_program_is_a_group_of_one() -> None:
    """Everything works in a plain `python script.py`."""
    group = weft.init()
    assert (weft.rank(), weft.size(), weft.is_master()) == (0, 1, True)
    weft.barrier()
    weft.barrier(timeout=1)
    assert weft.group() is group
    weft.shutdown()


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_engines_can_be_named(engine: str) -> None:
    """Both engines give a group of one without a launcher."""
    group = weft.init(engine=engine)
    assert (type(group).__name__, group.size) == (f"{engine.title()}Group", 1)
    group.barrier()


def test_devices_are_those_of_the_host() -> None:
    """GPUs go round among the ranks of a host, whatever their rank in the group."""
    require_any_names()

    def body(group: Group) -> tuple[str, str]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-a,GPU-b"
        before = weft.device()
        group.hosts = ("alder", "birch", "birch")  # as an engine of several hosts would say
        return before, weft.device()

    assert run_ranks(3, body) == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:0"), ("cuda:0", "cuda:1")]


def test_each_rank_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn, as the user's own entries; those of --gpus, if it is given; alone all of them."""
    require_any_names()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c,,GPU-d")

    def body(group: Group) -> tuple[str | None, str]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), weft.device()

    assert run_ranks(4, body) == [(f"GPU-{name}", "cuda:0") for name in "abca"]
    named = ("--gpus", "GPU-c,GPU-b")
    assert run_ranks(3, body, options=named) == [(f"GPU-{name}", "cuda:0") for name in "cbc"]
    assert run_ranks(1, body) == [("GPU-a, GPU-b,GPU-c,,GPU-d", "cuda:0")]
    assert run_ranks(1, body, options=named) == [("GPU-c,GPU-b", "cuda:0")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_ranks(2, body) == [("", "cpu")] * 2


def test_devices_without_a_group_and_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is alone has the first GPU, workers have them in turn, those of a team and of
    `map(gpus=)` as the only one that they see."""
    require_any_names()

    def seen(_: Any = None) -> tuple[str, str | None]:
        return weft.device(), os.environ.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert weft.device() == "cuda:0"
    assert weft.map(seen, [0], engine="serial") == [("cuda:0", "GPU-a,GPU-b,GPU-c")]
    weft.init()
    assert weft.device() == "cuda:0"
    with weft.Team(2) as team, weft.Team(4) as other:  # before: idle workers see all GPUs
        weft.map(abs, range(8), n=4)
        assert team.backend.call(_seen, [()] * 2) == [("cuda:0", "GPU-a,GPU-b,GPU-c"), own("b")]
        found = other.backend.call(_seen, [()] * 4)
        assert found[1:] == [own("b"), own("c"), own("a")]
    with weft.Team(4, gpus="GPU-c,GPU-a") as team:
        assert team.backend.call(_seen, [()] * 4)[1:] == [own("c"), own("a"), own("c")]
    with weft.Team(2, gpus=()) as team:
        assert team.backend.call(_seen, [()] * 2)[1][1] == "GPU-a,GPU-b,GPU-c"
    with pytest.raises(InvalidValue, match=r"'GPU-d' is none of .*: GPU-a, GPU-b, GPU-c"):
        weft.Team(2, gpus=["GPU-d"])
    assert set(weft.map(seen, range(16), gpus=2)) <= {own("a"), own("b")}
    weft.shutdown()
    in_turn = {device for device, _ in weft.map(seen, range(16), n=2)}
    assert in_turn <= {"cuda:0", "cuda:1"}
    numbered = weft.map(lambda _: (weft.device(), resources.worker_number), range(8), n=4)
    assert all(device == f"cuda:{number % 3}" for device, number in numbered)


def test_torch_uses_the_device_of_a_process_that_sees_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of other launchers, and workers of a driver that has loaded torch: without CUDA being
    initialised for it, and without a call of theirs."""
    require_any_names()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")

    def body(group: Group) -> tuple[str, list[int]]:
        import torch

        return weft.device(), chosen(torch)

    expected = [("cuda:0", []), ("cuda:1", [1])]
    assert run_ranks(2, body, launcher="mpirun") == expected
    outcome = run_python(
        "from __future__ import annotations\n"
        "import torch, weft\n"
        "from weft import resources\n"
        f"{inspect.getsource(chosen)}\n"
        "def worker(_): return resources.worker_number, chosen(torch), weft.device()\n"
        "found = weft.map(worker, range(8), n=2)\n"
        "print(all(device == f'cuda:{number}' for number, _, device in found))\n"
        "print(all(indices == [1] * number for number, indices, _ in found))\n"
    )
    assert outcome.out == "True\nTrue\n", outcome


def chosen(torch: Any) -> list[int]:
    """The devices that torch is to use once it initialises CUDA."""
    queued = [call for call, _ in torch.cuda._queued_calls]
    set_device = torch.cuda.set_device
    return [call.args[0] for call in queued if getattr(call, "func", None) == set_device]


def own(name: str) -> tuple[str, str]:
    """What a worker says that sees this GPU alone."""
    return "cuda:0", f"GPU-{name}"


def _seen(_: Any) -> tuple[str, str | None]:
    return weft.device(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_serial_under_a_launcher_is_each_for_itself() -> None:
    """engine="serial" is this process alone, whoever started it."""
    outcome = launch("import weft; print(weft.init(engine='serial').size)", 2)
    assert sorted(outcome.out.splitlines()) == ["[0] 1", "[1] 1"]


@pytest.mark.parametrize("call", ["rank", "size", "is_master", "barrier", "group"])
def test_use_before_init_and_after_shutdown(call: str) -> None:
    """The error shows the line that is missing."""
    with pytest.raises(NotInitialized, match=r"weft\.init\(\)"):
        getattr(weft, call)()
    weft.init()
    getattr(weft, call)()
    weft.shutdown()
    with pytest.raises(NotInitialized, match=r"weft\.init\(\)"):
        getattr(weft, call)()


def test_init_twice_shows_the_first_line() -> None:
    """The second init names where the first was, and changes nothing."""
    group = weft.init()
    with pytest.raises(AlreadyInitialized, match=rf"{__file__}:\d+"):
        weft.init()
    assert weft.group() is group


def test_shutdown_twice_or_without_init_is_nothing() -> None:
    """Cleaning up too often is not an error."""
    weft.shutdown()
    weft.init()
    weft.shutdown()
    weft.shutdown()
    with pytest.raises(NotInitialized):
        weft.rank()


def test_init_again_after_shutdown() -> None:
    """Ranks that all leave can meet again, any number of times."""
    outcome = launch(
        """
import weft
for round in range(4):
    group = weft.init()
    for _ in range(20 + round):
        group.barrier()
    half = group.split(group.rank % 2)
    half.barrier()
    group.barrier()
    weft.shutdown()
print("met four times")
""",
        3,
    )
    assert outcome.code == 0, outcome
    assert outcome.out.count("met four times") == 3


def test_groups_of_a_session_end_with_it() -> None:
    """After shutdown a subgroup says so too."""

    def body(group: Group) -> str:
        half = group.split(0)
        assert half is not None
        half.barrier()
        weft.shutdown()
        try:
            half.barrier()
        except NotInitialized as error:
            return str(error)
        return "worked"

    assert all("has left group 'world/1.0'" in text for text in run_ranks(2, body))


def test_use_after_fork_in_a_child() -> None:
    """A forked child has no place in the group; it is told so, and can start a session alone."""

    def body(group: Group) -> list[str]:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            told = []
            for call in (weft.rank, group.barrier, lambda: group.split(0)):
                try:
                    call()
                    told.append("worked")
                except weft.WeftError as error:
                    told.append(type(error).__name__)
            told.append(str(weft.init().size))
            weft.barrier()
            weft.shutdown()
            os.write(write, ",".join(told).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        told = os.read(read, 1000).decode().split(",")
        os.close(read)
        os.close(write)
        group.barrier()  # the parents have not noticed anything
        return told

    expected = ["UsedAfterFork", "UsedAfterFork", "UsedAfterFork", "1"]
    assert run_ranks(2, body) == [expected] * 2


def test_a_forked_child_that_exits_does_not_end_the_session() -> None:
    """exit handlers of a child leave the parent's place alone."""
    outcome = launch(
        """
import os, sys, weft
group = weft.init()
group.barrier()
if os.fork() == 0:
    sys.exit(0)
os.wait()
for _ in range(10):
    group.barrier()
print("fine")
""",
        2,
    )
    assert (outcome.code, outcome.out.count("fine")) == (0, 2), outcome


def test_one_group_from_two_threads() -> None:
    """The second thread gets an error that shows where the first one is and what to do."""

    def body(group: LocalGroup) -> str:
        own = group.split(0)
        assert own is not None
        told = []
        if group.rank == 0:
            thread = threading.Thread(target=group.barrier)
            thread.start()
            while group._current is None:
                pass
            try:
                group.barrier()
            except UsedConcurrently as error:
                told.append(str(error))
            own.barrier()  # another group is free to use
            thread.join()
        else:
            own.barrier()
            group.barrier()
        return "".join(told)

    text = run_ranks(2, body)[0]
    assert "barrier() while another thread uses group 'world'" in text
    assert "in barrier," in text
    assert "group.split(0)" in text


def test_two_threads_with_a_group_each() -> None:
    """Groups of one rank may be used at the same time."""

    def body(group: Group) -> int:
        groups = [group.split(0) for _ in range(2)]
        done = []

        def work(mine: Group) -> None:
            for _ in range(200):
                mine.barrier()
            done.append(1)

        threads = [threading.Thread(target=work, args=(g,)) for g in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(done)

    assert run_ranks(2, body) == [2, 2]


def test_programs_started_by_a_rank_are_not_that_rank() -> None:
    """A program that a rank runs is a group of its own."""
    outcome = launch(
        """
import subprocess, sys, weft
weft.init()
code = "import weft; print('size', weft.init().size)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
weft.barrier()
""",
        2,
    )
    assert sorted(outcome.out.splitlines()) == ["[0] size 1", "[1] size 1"]


def test_unknown_engine_lists_the_known() -> None:
    """A typo in the name shows the names."""
    with pytest.raises(
        UnknownEngine, match=r"'lokal' is unknown; known are serial, local, mpi, ray"
    ):
        weft.init(engine="lokal")


def test_an_engine_without_its_package_prints_the_pip_line() -> None:
    """A missing extra says how to install it."""
    outcome = run_python(
        """
import sys
sys.modules["mpi4py"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mpi4py" else found(name, *rest)
import weft
try:
    weft.init(engine="mpi")
except weft.WeftError as error:
    print(type(error).__name__, isinstance(error, ImportError), error)
"""
    )
    assert outcome.out.startswith("MissingPackage True"), outcome
    assert "pip install 'weft[mpi]'" in outcome.out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeout": -1}, InvalidValue),
        ({"timeout": "1"}, InvalidType),
        ({"seed": 1.5}, InvalidType),
        ({"seed": True}, InvalidType),
    ],
)
def test_wrong_options_leave_no_session(options: dict[str, Any], error: type[Exception]) -> None:
    """A refused init can be called again."""
    with pytest.raises(error, match=next(iter(options))):
        weft.init(**options)
    weft.init()


def test_the_timeout_of_init_is_the_default_of_calls() -> None:
    """init(timeout=) beats WEFT_TIMEOUT, which beats 1800."""
    assert weft.init(timeout=5).timeout == 5
    outcome = run_python("import weft; print(weft.init().timeout)", env={"WEFT_TIMEOUT": "7"})
    assert outcome.out == "7.0\n"
    outcome = run_python("import weft; print(weft.init().timeout)", env={"WEFT_TIMEOUT": ""})
    assert outcome.out == "1800.0\n"
    outcome = run_python("import weft; weft.init()", env={"WEFT_TIMEOUT": "soon"})
    assert "WEFT_TIMEOUT='soon': expected 0 or more seconds" in outcome.err


def test_a_seed_makes_ranks_repeatable_and_different() -> None:
    """The same seed gives each rank its own numbers, the same in every run."""
    script = """
import random, weft
weft.init(seed=3)
import numpy as np
print(random.random(), np.random.rand())
"""
    first, second = launch(script, 2), launch(script, 2)
    assert sorted(first.out.splitlines()) == sorted(second.out.splitlines())
    assert len({line[4:] for line in first.out.splitlines()}) == 2


def test_a_fast_rank_may_start_again_while_others_still_meet() -> None:
    """Leaving and joining in a tight loop never disturbs who is still in the round before."""
    outcome = launch(
        """
import weft
for _ in range(60):
    weft.init(timeout=20)
    weft.barrier()
    weft.shutdown()
print("sixty rounds")
""",
        4,
    )
    assert outcome.out.count("sixty rounds") == 4, outcome


def test_waiting_for_ever_is_allowed() -> None:
    """timeout=math.inf has no deadline, at the start and in calls."""
    outcome = launch(
        "import math, weft; weft.init(timeout=math.inf); weft.barrier(); print('met')", 2
    )
    assert outcome.out.count("met") == 2, outcome


def test_survivors_take_the_place_of_their_group() -> None:
    """After survivors() the module functions act on the new group, and the old one says so."""

    def body(group: Group) -> Any:
        after = group.survivors().survivors()
        weft.barrier()
        assert weft.group() is after
        try:
            group.barrier()
        except weft.WeftError as error:
            advised = "group = group.latest" in str(error) and group.latest is after
            return type(error).__name__, weft.size(), advised
        return "worked"

    assert run_ranks(2, body) == [("UsageError", 2, True)] * 2
    group = weft.init(engine="serial")
    after = group.survivors()
    assert weft.group() is after
    with pytest.raises(weft.WeftError, match="has a successor"):
        group.barrier()


def test_leaving_a_subgroup_is_told_to_its_peers() -> None:
    """Whoever waits in the subgroup gets PeerLost; the group above goes on."""

    def body(group: Group) -> Any:
        part = group.split(0)
        assert part is not None
        if group.rank == 1:
            part.leave()
            group.barrier()
            return "left"
        try:
            part.barrier(timeout=20)
        except weft.PeerLost as error:
            group.barrier()
            return error.ranks
        return "no error"

    assert run_ranks(2, body) == [(1,), "left"]


def test_shutdown_while_another_thread_waits() -> None:
    """The waiting thread is told that the session has ended."""

    def body(group: Group) -> str:
        told_all = Path(os.environ["WEFT_TEST_FOLDER"]) / "told"
        if group.rank == 1:
            group.split(0)
            wait_until(told_all.exists)  # alive, but not coming
            return "waited"
        told: list[str] = []

        def wait() -> None:
            try:
                group.barrier()
            except weft.WeftError as error:
                told.append(type(error).__name__)

        group.split(0)
        thread = threading.Thread(target=wait)
        thread.start()
        while group._current is None:  # type: ignore[attr-defined]
            pass
        weft.shutdown()
        thread.join(HANGS)
        told_all.touch()
        return told[0]

    assert run_ranks(2, body)[0] == "NotInitialized"


def test_the_table_names_the_subgroup() -> None:
    """Two ranks in barriers of different groups can be told apart."""

    def body(group: Group) -> Any:
        half = group.split(0)
        assert half is not None
        group.barrier()
        if group.rank == 1:
            half.barrier()
            group.barrier()
            return None
        await_state(group, 1, lambda state: state.operation == "barrier of world/1.0")
        try:
            group.barrier(timeout=0.1)
        except weft.Stalled as error:
            told = [state.operation for state in error.states]
        half.barrier()
        group.barrier()
        return told

    assert run_ranks(2, body)[0] == ["barrier", "barrier of world/1.0"]
