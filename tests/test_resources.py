"""The plan: cores, threads, GPUs and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import run_python
from weft import resources
from weft.errors import InvalidType, InvalidValue
from weft.resources import THREAD_VARIABLES, Plan


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "free"),
    [(8, 2, 4, True), (8, 3, 2, True), (2, 2, 1, True), (2, 4, 1, False), (1, 1, 1, True)],
)
def test_threads_per_worker(cores: int, workers: int, threads: int, free: bool) -> None:
    """max(1, cores // workers); cores are free while there is one for each worker."""
    plan = Plan(cores, workers)
    assert (plan.threads, plan.free_cores) == (threads, free)


@pytest.mark.parametrize(
    ("cores", "sharing", "quotas", "threads", "free"),
    [
        (1, 1, [], 1, True),  # mpirun --bind-to core
        (8, 2, [], 4, True),  # two of the four are bound to each socket
        (8, 4, [], 2, True),
        (1, 2, [], 1, False),
        (4, 1, [8.0], 2, True),  # the quota is for all four
        (1, 1, [2.0], 1, False),
        (1, 1, [0.5], 1, False),
    ],
)
def test_bound_workers_divide_their_own_cores(
    cores: int, sharing: int, quotas: list[float], threads: int, free: bool
) -> None:
    """Of four workers only those count that may run on the same cores; a quota is for all."""
    plan = resources._tightest(Plan(cores, sharing), quotas, 4)
    assert (plan.threads, plan.free_cores) == (threads, free)


def test_processes_bound_elsewhere_share_no_core() -> None:
    """Those without a limit share all; one that has ended shares none."""
    outcome = run_python(
        """
import os, subprocess, sys
from weft.resources import count_sharing
cores = sorted(os.sched_getaffinity(0))
line = [sys.executable, "-c", "input()"]
others = [subprocess.Popen(line, stdin=subprocess.PIPE) for _ in range(3)]
os.sched_setaffinity(others[0].pid, cores[:1])
os.sched_setaffinity(others[1].pid, cores[1:] or cores)
pids = [other.pid for other in others]
print(count_sharing([os.getpid(), *pids]))
os.sched_setaffinity(0, cores[:1])
print(count_sharing([os.getpid(), *pids]) - (len(cores) == 1))
for other in others:
    other.communicate(b"\\n")
print(count_sharing([os.getpid(), *pids]))
"""
    )
    assert outcome.out == "4\n3\n1\n", outcome


def test_the_users_variables_win() -> None:
    """What is set is left alone; OMP_NUM_THREADS speaks for all libraries."""
    plan = Plan(8, 2)
    joblib = "LOKY_MAX_CPU_COUNT"
    assert plan.environment({}) == dict.fromkeys((*THREAD_VARIABLES, joblib), "4")
    assert plan.environment({"OMP_NUM_THREADS": "3"}) == {joblib: "4"}
    assert plan.environment({"OMP_NUM_THREADS": "3", joblib: "2"}) == {}
    added = plan.environment({"MKL_NUM_THREADS": "3"})
    assert "MKL_NUM_THREADS" not in added
    assert added["OMP_NUM_THREADS"] == "4"


def _tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "quotas"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        ("0::/a\n", {"a/cpu.max": "400000 100000", "cpu.max": "200000 100000"}, [4.0, 2.0]),
        (
            "3:cpu,cpuacct:/x\n0::/\n",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            [0.5],
        ),
        ("0::/gone\n", {"cpu.max": "300000 100000"}, [3.0]),
        ("", {}, []),
    ],
    ids=["v2", "v2-ancestors", "v1", "v2-namespace", "none"],
)
def test_quotas_of_all_ancestors(
    membership: str, files: dict[str, str], quotas: list[float], tmp_path: Path
) -> None:
    """Version 1 and 2, the process's cgroup and everything above it."""
    _tree(tmp_path, {"membership": membership, **{f"fs/{k}": v for k, v in files.items()}})
    folders = resources._cgroups("cpu", tmp_path / "membership", tmp_path / "fs")
    assert [quota for quota, _ in resources._cpu_quotas(folders)] == quotas


def test_memory_headroom_of_all_ancestors(tmp_path: Path) -> None:
    """The tightest limit counts; cache that can be dropped counts as free."""
    _tree(
        tmp_path,
        {
            "membership": "0::/a\n4:memory:/m\n",
            "fs/a/memory.max": "1000",
            "fs/a/memory.current": "900",
            "fs/a/memory.stat": "anon 5\ninactive_file 300\n",
            "fs/memory.max": "max",
            "fs/memory.current": "5",
            "fs/memory/m/memory.limit_in_bytes": "5000",
            "fs/memory/m/memory.usage_in_bytes": "1000",
            "fs/memory/m/memory.stat": "total_inactive_file 1\n",
        },
    )
    folders = resources._cgroups("memory", tmp_path / "membership", tmp_path / "fs")
    assert sorted(free for free, _ in resources._memory_headrooms(folders)) == [400, 4001]


def test_this_machine() -> None:
    """What is counted here is plausible, and says why."""
    cores, reason = resources.count_cores()
    assert 1 <= cores <= (os.cpu_count() or 1)
    assert reason
    free, why = resources.available_memory()
    assert free > 0
    assert why


def test_affinity_counts() -> None:
    """A process bound to one core plans for one."""
    outcome = run_python(
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from weft.resources import count_cores; print(count_cores())"
    )
    assert outcome.out == "(1, 'CPU affinity')\n"


LIMITED = """
import os, sys
for name in list(os.environ):
    if name.endswith("_NUM_THREADS"):
        del os.environ[name]
{imports}
from threadpoolctl import threadpool_info
from weft.resources import limit_threads
def threads():
    import numpy
    return {{pool["num_threads"] for pool in threadpool_info()}}
before = threads() if {loaded} else None
restore = limit_threads(1)
assert os.environ["OMP_NUM_THREADS"] == "1"
assert threads() == {{1}}, threadpool_info()
{check}
restore()
assert "OMP_NUM_THREADS" not in os.environ
if {loaded}:
    assert threads() == before
print("limited")
"""


@pytest.mark.parametrize(
    ("imports", "check"),
    [
        ("", ""),
        ("import numpy", ""),
        ("import numpy, torch", "assert torch.get_num_threads() == 1"),
    ],
    ids=["before imports", "numpy loaded", "torch loaded"],
)
def test_threads_are_limited_before_and_after_loading(imports: str, check: str) -> None:
    """By variables for libraries to come, by threadpoolctl for those already here; undone after."""
    if "torch" in imports:
        pytest.importorskip("torch")
    code = LIMITED.format(imports=imports, loaded=bool(imports), check=check)
    outcome = run_python(code)
    assert outcome.out == "limited\n", outcome


def test_limits_respect_the_user() -> None:
    """With OMP_NUM_THREADS set nothing is changed."""
    outcome = run_python(
        "import numpy, os\n"
        "from threadpoolctl import threadpool_info\n"
        "from weft.resources import limit_threads\n"
        "before = threadpool_info()\n"
        "restore = limit_threads(1)\n"
        "print(threadpool_info() == before, os.environ['OMP_NUM_THREADS'])\n"
        "restore()\n",
        env={"OMP_NUM_THREADS": "2"},
    )
    assert outcome.out == "True 2\n", outcome


FIRST, SECOND = "GPU-1111aaaa-0000", "GPU-1122bbbb-0000"


@pytest.fixture
def gpus(tmp_path: Path) -> dict[str, Path]:
    """A machine with two GPUs: their device files, and what the driver tells of them."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for number, uuid in enumerate((FIRST, SECOND)):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t H200\nGPU UUID: \t {uuid}\nIRQ: 1\n")
    return {"devices": tmp_path / "dev", "driver": tmp_path / "gpus"}


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, ["0", "1"]),
        ("0", ["0"]),
        (" 1, 0", ["1", "0"]),
        ("0,", ["0"]),
        ("0,-1,1", ["0"]),
        ("1,2,0", ["1"]),
        ("0,0", []),
        ("0,00", []),
        ("", []),
        ("-1", []),
        ("nonsense,0", []),
        ("1111aaaa-0000", []),
        ("aaaa-1111", []),
        ("1b11aaaa-0000", ["1b11aaaa-0000"]),
        ("1,1b11aaaa-0000", []),
        (FIRST, [FIRST]),
        ("GPU-11", []),
        ("GPU-112,GPU-111", ["GPU-112", "GPU-111"]),
        (f"{FIRST},GPU-1111", []),
        ("GPU-9,0", []),
        ("MIG-5a,MIG-5b", ["MIG-5a", "MIG-5b"]),
    ],
)
def test_gpus_are_read_as_cuda_reads_them(
    variable: str | None, seen: list[str], gpus: dict[str, Path]
) -> None:
    """The list ends at the first entry that names no GPU, or several; two entries of one are none.
    Entries stay as the user has written them."""
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert resources.visible_gpus(environ, **gpus) == seen


def test_names_of_gpus_that_nobody_can_look_up_are_taken(tmp_path: Path) -> None:
    """Numbers are not: there is no device file of theirs."""
    missing = {"devices": tmp_path / "none", "driver": tmp_path / "none"}
    for variable, seen in (("GPU-a,GPU-b", ["GPU-a", "GPU-b"]), ("0", []), ("GPU-a,GPU-a", [])):
        assert resources.visible_gpus({"CUDA_VISIBLE_DEVICES": variable}, **missing) == seen
    assert resources.visible_gpus({}, **missing) == []


@pytest.mark.parametrize(
    ("variable", "wanted", "chosen"),
    [
        (None, "1, 0", ["1", "0"]),
        (None, [1], ["1"]),
        (None, "0,0", ["0", "0"]),
        (None, SECOND, [SECOND]),
        (None, "GPU-112", ["GPU-112"]),
        ("GPU-112", SECOND, ["GPU-112"]),
        (FIRST, "GPU-1111", [FIRST]),
        ("1", "1", ["1"]),
        ("MIG-5a,MIG-5b", "MIG-5b", ["MIG-5b"]),
    ],
)
def test_chosen_gpus_are_the_users_own_entries(
    variable: str | None, wanted: object, chosen: list[str], gpus: dict[str, Path]
) -> None:
    """They are handed on as text, whatever part of a UUID they were named by."""
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert resources.choose_gpus(wanted, environ, "here", **gpus) == chosen


@pytest.mark.parametrize(
    ("variable", "wanted", "error", "match"),
    [
        (None, "7", InvalidValue, "here: '7' is none of the GPUs that may be used here: 0, 1"),
        ("1", "0", InvalidValue, "'0' is none of the GPUs that may be used here: 1$"),
        ("1", FIRST, InvalidValue, f"{FIRST}' is none of the GPUs .*: 1$"),
        (None, "GPU-11", InvalidValue, "'GPU-11' is none"),
        (None, "GPU-9", InvalidValue, "'GPU-9' is none"),
        (f"{FIRST},{SECOND}", "GPU-11", InvalidValue, "'GPU-11' is none"),
        ("", "0", InvalidValue, "no GPU may be used here; CUDA_VISIBLE_DEVICES=''"),
        (None, "", InvalidValue, "expected names of GPUs"),
        (None, "0,,1", InvalidValue, "expected names of GPUs"),
        (None, [], InvalidValue, "expected names of GPUs"),
        (None, 3, InvalidType, "expected names of GPUs"),
        (None, [0.5], InvalidType, "expected names of GPUs"),
    ],
)
def test_gpus_outside_of_what_may_be_seen(
    variable: str | None,
    wanted: object,
    error: type[Exception],
    match: str,
    gpus: dict[str, Path],
) -> None:
    """The error lists what may be seen. Nothing is widened: not even a GPU that exists."""
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    with pytest.raises(error, match=match):
        resources.choose_gpus(wanted, environ, "here", **gpus)


def test_sharing_gpus() -> None:
    """In turn; a rank that is alone has all of those that were named."""
    assert resources.share_gpus(["a", "b"], 3) == ["a", "b", "a"]
    assert resources.share_gpus([], 2) == [None, None]
    name = "CUDA_VISIBLE_DEVICES"
    assert [resources.narrow(["a", "b"], i, 3) for i in range(3)] == [
        {name: "a"},
        {name: "b"},
        {name: "a"},
    ]
    assert resources.narrow(["a", "b"], 0, 1) == {name: "a,b"}
    assert resources.narrow([], 1, 2) == {}


def test_torch_prefers_a_gpu_before_cuda_is_initialised() -> None:
    """It is told to, once, and does it when it initialises CUDA. Without torch nothing is done."""
    outcome = run_python(
        "from weft import resources\n"
        "resources.prefer_gpu(1)\n"
        "import torch\n"
        "for index in (1, 1, 0): resources.prefer_gpu(index)\n"
        "queued = [call for call, _ in torch.cuda._queued_calls]\n"
        "print([call.args for call in queued if getattr(call, 'func', 0) == torch.cuda.set_device])"
        "\nprint(torch.cuda.is_initialized())"
    )
    assert outcome.out == "[(1,), (0,)]\nFalse\n", outcome
