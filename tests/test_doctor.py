"""`weft doctor`: what follows from made-up machines, and the command on this one."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import HANGS, Outcome, wait_until
from weft import __version__
from weft.doctor import gpus, look, report
from weft.doctor.look import attempt, reason
from weft.doctor.problems import Fact, Machine, obstacles, problems, thread_number
from weft.engines.local import probes

INSTALLED = {name: Fact("3.0") for name in look.PACKAGES}

#: a machine on which nothing would go wrong
SOUND = Machine(
    weft=Fact("0.1.0"),
    python=Fact("3.12.1", "python"),
    system=Fact("linux", "6.1"),
    processor=Fact("x86_64"),
    cores=Fact(4, "CPU affinity"),
    threads=Fact(1),
    memory=Fact(8 * 10**9, "MemAvailable"),
    memfd=Fact(True),
    pidfd=Fact(True),
    ptrace_scope=Fact("1"),
    reading=Fact(True),
    open_files=Fact(1024),
    gpus=Fact(0),
    mpirun=Fact("Open MPI 5.0.3"),
    mpi=Fact("Open MPI 5.0.11"),
    mpi_threads=Fact("serialized"),
    kernels=Fact(True),
    ranks=Fact(True),
    packages=INSTALLED,
    environment={},
)


def made_up(**changes: Any) -> Machine:
    return replace(SOUND, **changes)


# judging


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    """No problem, and it is said."""
    assert problems(SOUND) == []
    assert report.as_text(SOUND).endswith("\n\nNothing would go wrong.")


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (
            made_up(system=Fact("darwin"), processor=Fact("arm64"), ranks=Fact(False, "no")),
            "this is darwin on arm64, not Linux on x86-64: the local engine refuses; "
            "use engine='serial'",
        ),
        (
            made_up(processor=Fact("aarch64"), ranks=Fact(False, "not tried")),
            "this is linux on aarch64, not Linux on x86-64: the local engine refuses; "
            "use engine='serial'",
        ),
        (
            made_up(environment={"WEFT_TIMEOUT": "soon"}, ranks=Fact(False, "x")),
            "WEFT_TIMEOUT='soon': expected 0 or more seconds, or inf; for example WEFT_TIMEOUT=60",
        ),
        (
            made_up(memfd=Fact(False, "memfd_create: no"), ranks=Fact(False, "x")),
            "no memory that lives without a name (memfd_create: no): the local engine needs "
            "memfd_create, and no filter on it; use engine='serial'",
        ),
        (
            made_up(pidfd=Fact(False, "pidfd_open: no"), ranks=Fact(False, "x")),
            "ranks cannot watch each other (pidfd_open: no): the local engine needs Linux 5.3 or "
            "later, and no filter on pidfd_open; use engine='serial'",
        ),
        (
            made_up(packages={**INSTALLED, "numpy": Fact("")}, ranks=Fact(False, "x")),
            "NumPy is not installed, and weft shares arrays of it: pip install numpy",
        ),
        (
            made_up(ranks=Fact(False, "rank 0 failed first: killed by SIGSYS")),
            "two ranks, started as a trial, did not meet: rank 0 failed first: killed by SIGSYS",
        ),
        (
            made_up(ranks=Fact(None, "no more processes")),
            "two ranks, started as a trial, did not meet: no more processes",
        ),
    ],
)
def test_what_stops_ranks(machine: Machine, told: str) -> None:
    """The cause, where one is known, and what to do."""
    assert obstacles(machine) == [told]
    assert problems(machine)[0] == told
    assert f"weft cannot run ranks here:\n  - {told}" in report.as_text(machine)
    assert json.loads(report.as_json(machine))["usable"] is False


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (
            made_up(cores=Fact(1, "CPU quota in /x")),
            "only 1 core (CPU quota in /x): ranks take turns on it, more are no faster",
        ),
        (
            made_up(cores=Fact(2), environment={"OMP_NUM_THREADS": "16"}),
            "OMP_NUM_THREADS=16 is set and wins over the plan: 2 ranks on 2 cores would run "
            "32 threads; unset it, or start at most 1 rank",
        ),
        (
            made_up(cores=Fact(8), environment={"MKL_NUM_THREADS": "2"}),
            "MKL_NUM_THREADS=2 is set and wins over the plan: 8 ranks on 8 cores would run "
            "16 threads; unset it, or start at most 4 ranks",
        ),
        (
            made_up(environment={"OMP_NUM_THREADS": "all"}),
            "OMP_NUM_THREADS='all' is set and is no whole number of threads: libraries may start "
            "one for each core in each rank; unset it, or set OMP_NUM_THREADS=1",
        ),
        (
            made_up(memory=Fact(512 * 10**6, "memory limit in /sys/fs/cgroup/x")),
            "only 512 MB of memory can be had (memory limit in /sys/fs/cgroup/x): sharing more "
            "raises OutOfMemory",
        ),
        (
            made_up(ptrace_scope=Fact("2"), reading=Fact(False, "not permitted")),
            "ptrace_scope is 2: large arrays are copied twice through shared memory instead of "
            "once: slower, still right",
        ),
        (
            made_up(ptrace_scope=Fact(""), reading=Fact(False, "not permitted")),
            "process_vm_readv is forbidden (not permitted): large arrays are copied twice through "
            "shared memory instead of once: slower, still right",
        ),
        (
            made_up(open_files=Fact(256)),
            "the limit on open files is 256: `weft run` can start about 80 ranks, and each has so "
            "much less for its own files; raise it with `ulimit -n 1024`",
        ),
        (
            made_up(gpus=Fact(None, "nvidia-smi did not answer")),
            "whether there are GPUs is unknown (nvidia-smi did not answer): CUDA may fail or hang "
            "too",
        ),
        (
            made_up(packages={**INSTALLED, "mpi4py": Fact("")}),
            "mpirun is found but mpi4py is not: fine on one host, several need both "
            "(pip install 'weft[mpi]')",
        ),
        (
            made_up(mpirun=Fact("")),
            "mpi4py is found but mpirun is not: fine on one host, several need both "
            "(pip install 'weft[mpi]')",
        ),
        (
            made_up(mpi=Fact(None, "libmpi.so: cannot open"), mpi_threads=Fact(None, "the same")),
            "mpi4py is installed but does not work (libmpi.so: cannot open): fine on one host, not "
            "on several; Open MPI comes with pip install 'weft[mpi]'",
        ),
        (
            made_up(mpi=Fact("MPICH 5.0.2")),
            "mpirun is of Open MPI 5.0.3, but mpi4py loads MPICH 5.0.2: each rank would be alone; "
            "use the mpirun of MPICH, or have mpi4py load another MPI by MPI4PY_MPIABI",
        ),
        (
            made_up(mpi_threads=Fact("funneled")),
            "the MPI library serves one thread only (funneled), weft needs MPI_THREAD_SERIALIZED "
            "on several hosts; use one that was built for threads",
        ),
        (
            made_up(packages={**INSTALLED, "ray": Fact("2.55.1")}),
            "Ray 2.55.1 is installed, and weft open --port needs 2.56 or later on all machines: "
            "pip install 'weft[ray]'",
        ),
        (
            made_up(gpus=Fact(2)),
            "2 GPUs are here: ranks that share one use it by turns, and a turn costs small work "
            "about 0.14 ms (weft doctor --gpu measures it); weft run --mps has them use it at "
            "once, but then a rank that is killed inside a long kernel takes the CUDA contexts of "
            "all others with it",
        ),
        (
            made_up(gpus=Fact(1), devices={"MPS": Fact(True, "here")}),
            "MPS is on: processes use a GPU at once, and one that is killed inside a long kernel, "
            "of some 50 ms, takes the CUDA contexts of all others with it",
        ),
        (
            made_up(kernels=Fact(False, "why")),
            "adding to tables is slower than it could be, still right: weft's loops in C are not "
            "used, because why",
        ),
        (
            made_up(environment={"WEFT_FAULT": "meet.after:1:kill"}),
            "WEFT_FAULT=meet.after:1:kill is set: ranks are killed, stopped or delayed on purpose; "
            "unset it outside of tests",
        ),
    ],
)
def test_what_does_not_stop_ranks(machine: Machine, told: str) -> None:
    """One sentence: what is so, what follows, what to do; ranks run all the same."""
    assert problems(machine) == [told]
    assert obstacles(machine) == []
    assert f"What would go wrong:\n  - {told}" in report.as_text(machine)
    assert json.loads(report.as_json(machine))["warnings"] == [told]


@pytest.mark.parametrize(
    "machine",
    [
        made_up(environment={"OMP_NUM_THREADS": "1", "WEFT_TIMEOUT": "60", "WEFT_FAULT": ""}),
        made_up(ptrace_scope=Fact("2"), reading=Fact(True)),  # an administrator may
        made_up(mpirun=Fact(""), packages={**INSTALLED, "mpi4py": Fact("")}),
        made_up(mpirun=Fact("MPICH 4.2.0"), mpi=Fact("Intel MPI 2021.13")),  # of one family
        made_up(mpirun=Fact("Open MPI 5.0.3"), mpi=Fact("Some MPI 3")),  # who knows
        made_up(open_files=Fact(-1)),  # no limit
        made_up(cores=Fact(None), memory=Fact(None), reading=Fact(None)),
    ],
)
def test_what_is_fine(machine: Machine) -> None:
    """What only looks like a problem, and what is unknown, raise no alarm."""
    assert problems(machine) == []


@pytest.mark.parametrize(
    ("devices", "environment", "told"),
    [
        (
            {"CUDA's library": Fact(False, "no such file")},
            {},
            "CUDA's driver cannot be loaded (no such file): nothing can use the GPUs; install "
            "NVIDIA's driver for them",
        ),
        (
            {"GPUs for ranks": Fact(0)},
            {"CUDA_VISIBLE_DEVICES": "0,0"},
            "CUDA_VISIBLE_DEVICES='0,0' lets nothing see a GPU: CUDA takes the entries up to the "
            "first that names none, and none at all if two name the same",
        ),
        (
            {"GPU 0": Fact("A", "1 MiB, GPU-a, compute mode Exclusive_Process")},
            {},
            "the compute mode of a GPU lets one process use it, or none: ranks cannot share it; "
            "nvidia-smi -c DEFAULT changes that",
        ),
    ],
)
def test_what_is_wrong_with_gpus(
    devices: dict[str, Any], environment: dict[str, str], told: str
) -> None:
    """Beside that they are shared by turns."""
    machine = made_up(gpus=Fact(1), devices=devices, environment=environment)
    assert told in problems(machine)
    assert len(problems(machine)) == 2


def test_every_unknown_fact_is_printed_as_one() -> None:
    """Judging and printing do without any fact but the system's."""
    unknown = {
        name: Fact(None, "it hid")
        for name, fact in vars(SOUND).items()
        if isinstance(fact, Fact) and name not in ("system", "processor", "gpus")
    }
    machine = made_up(**unknown, packages=dict.fromkeys(look.PACKAGES, Fact(None, "it hid")))
    text = report.as_text(machine)
    assert text.count("unknown: it hid\n") == len(unknown) + len(look.PACKAGES)
    assert json.loads(report.as_json(machine))["facts"]["cores"] == {
        "value": None,
        "why": "it hid",
    }


def test_lines_are_aligned() -> None:
    """Label, value and reason each begin in one column."""
    lines = report.as_text(made_up(memfd=Fact(False, "why"), mpirun=Fact("", "not in PATH")))
    assert "cores                   4             (CPU affinity)\n" in lines
    assert "memory available        8.0 GB        (MemAvailable)\n" in lines
    assert "memfd                   no            (why)\n" in lines
    assert "mpirun                  not in PATH\n" in lines


# the parts of the gathering that are pure


def test_threads_per_rank() -> None:
    """The user's variable, else the plan for a rank per core."""
    assert look.threads_per_rank(4, {"OMP_NUM_THREADS": "3"}).value == 3
    assert look.threads_per_rank(4, {"OMP_NUM_THREADS": "x"}).value is None
    assert look.threads_per_rank(4, {}).value == 1
    assert look.threads_per_rank(None, {}).value is None
    assert [thread_number(text) for text in ("4", "4,2", " 8 ", "0", "-1", "", "x")] == [
        *(4, 4, 8, None, None, None, None)
    ]


def test_what_mpirun_says() -> None:
    """Open MPI, MPICH, and others in their own words."""
    assert look.mpi_version("mpirun (Open MPI) 5.0.3\n\nReport bugs\n") == "Open MPI 5.0.3"
    hydra = "HYDRA build details:\n    Version:                                 4.2.0\n"
    assert look.mpi_version(hydra) == "MPICH 4.2.0"
    assert look.mpi_version("some MPI 3\nmore\n") == "some MPI 3"
    assert look.mpi_version("") == "it did not say which version"


def test_what_nvidia_smi_says() -> None:
    """A line for each GPU; none; a complaint, where the device files count."""
    parse = gpus.parse_nvidia_smi
    both = "A, 1 MiB, GPU-a, 5.1, Default\nB, 2 MiB, GPU-b, 5.1, Exclusive_Process\n"
    assert parse(0, both, []) == Fact(2, "A, 1 MiB; B, 2 MiB")
    assert parse(6, "No devices were found\n", ["nvidia0"]).value == 0
    failed = parse(9, "it has failed\n", [])
    assert failed == Fact(None, "nvidia-smi ended with code 9: it has failed")
    assert parse(9, "", ["nvidia0", "nvidia1"]).value == 2
    assert gpus.rows_of("it has failed\n") == []
    found = gpus.about(2, gpus.rows_of(both), {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"})
    assert found["GPU 1"] == Fact("B", "2 MiB, GPU-b, compute mode Exclusive_Process")
    assert found["NVIDIA's driver"] == Fact("5.1")
    assert found["GPUs for ranks"] == Fact(2, "MIG-a, MIG-b")
    assert gpus.about(0, [], {}) == {}


def test_where_mps_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemon's socket lies where the variable says; without its program none can be started."""
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.mps(environ).value is False
    assert "no nvidia-cuda-mps-control in PATH" in gpus.mps(environ).why
    fake(tmp_path, "nvidia-cuda-mps-control", "")
    assert gpus.mps(environ) == Fact(False, "weft run --mps starts a daemon for its ranks")
    (tmp_path / "control").touch()
    assert gpus.mps(environ) == Fact(True, f"a daemon at {tmp_path}")


def test_what_two_ranks_measure() -> None:
    """Times, whether they share a GPU and how, and which way tensors go."""
    trial = {
        "uuids": ["a", "a"],
        "mps": False,
        "alone": 14e-6,
        "together": 289e-6,
        "all_reduce": [[1000, 39e-6, False], [100_000_000, 1.5e-3, True]],
    }
    assert gpus.measured(trial) == {
        "small work, alone": Fact("14 us", "one rank, a kernel and its end"),
        "small work, both": Fact("289 us", "two ranks on one GPU, which use it by turns"),
        "all_reduce, 1 kB": Fact("39 us", "added up on the host"),
        "all_reduce, 100 MB": Fact("1.50 ms", "added up on the GPU"),
    }
    each = gpus.measured({**trial, "uuids": ["a", "b"], "mps": True})
    assert each["small work, both"].why == "two ranks, a GPU each"


def test_the_line_that_says_why_ranks_failed() -> None:
    """The last, unless that says only that the rank printed nothing."""
    assert look.complaint("weft: no memory\n") == "no memory"
    killed = "weft run: rank 0 (pid 1) failed first: killed\nweft run: rank 0 printed nothing\n"
    assert look.complaint(killed) == "rank 0 (pid 1) failed first: killed"
    raised = "weft run: rank 0 failed first\nweft run: the last lines:\n    KeyError: 'x'\n"
    assert look.complaint(raised) == "KeyError: 'x'"
    assert look.complaint("") == ""


def test_what_the_end_of_the_reader_means() -> None:
    """Allowed, forbidden by whom, or unknown."""
    assert probes.verdict(0, seccomp=True)[0] is True
    assert probes.verdict(errno.EPERM, seccomp=False) == (False, "Operation not permitted")
    filtered = probes.verdict(errno.EPERM, seccomp=True)
    assert filtered == (False, "Operation not permitted, perhaps by a seccomp filter")
    assert probes.verdict(-signal.SIGSYS, seccomp=True)[0] is False
    assert probes.verdict(-signal.SIGKILL, seccomp=False)[0] is None
    assert probes.verdict(errno.ESRCH, seccomp=False) == (None, "No such process")
    assert probes.verdict(255, seccomp=False)[0] is None


def test_a_probe_that_fails_is_a_fact() -> None:
    """Unknown, and why in one line."""
    assert attempt(lambda: Fact(1, "so")) == Fact(1, "so")
    assert attempt(lambda: Fact(int("two\nlines"))).value is None
    assert reason(OSError(errno.ENOENT, "No such file")) == "No such file"
    assert reason(ValueError("two\n  lines")) == "two lines"
    assert reason(KeyError()) == "KeyError"


def test_what_yama_says(tmp_path: Path) -> None:
    """The scope and its meaning; or that there is no Yama."""
    setting = tmp_path / "ptrace_scope"
    assert look._ptrace_scope(setting) == Fact("", "this kernel has no Yama")
    setting.write_text("2\n")
    assert look._ptrace_scope(setting).value == "2"
    assert "administrators" in look._ptrace_scope(setting).why
    setting.write_text("7\n")
    assert look._ptrace_scope(setting) == Fact("7", "a scope that weft does not know")


# the command


def doctor(*options: str, env: Mapping[str, str] | None = None, **process: Any) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "weft", "doctor", *options],
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**_plain_environment(), **(env or {})},
        **process,
    )
    assert "Traceback" not in done.stderr
    return Outcome(done.returncode, done.stdout, done.stderr, 0.0)


def _plain_environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in look.VARIABLES}


def facts(outcome: Outcome) -> dict[str, Any]:
    return {name: fact["value"] for name, fact in json.loads(outcome.out)["facts"].items()}


def fake(folder: Path, name: str, text: str) -> dict[str, str]:
    """An environment in whose PATH there is only such a program."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def test_this_machine() -> None:
    """Text and JSON say the same; ranks run where the tests run."""
    text, same = doctor(), doctor("--json")
    assert (text.code, same.code) == (0, 0)
    assert (text.err, same.err) == ("", "")
    told = json.loads(same.out)
    assert told["usable"] is True
    known = facts(same)
    assert known["weft"] == __version__
    assert known["cores"] == len(os.sched_getaffinity(0)) or "quota" in text.out
    assert known["ranks"] is True
    assert known["mpirun"] == known["mpi"]
    assert known["mpi_threads"] == "serialized"
    assert "ranks meet              yes" in text.out
    assert f"numpy                   {known['numpy']}\n" in text.out
    for warning in told["warnings"]:
        assert f"  - {warning}" in text.out


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_it(unbuffered: str) -> None:
    """`weft doctor | head -3`: no traceback, and the exit code still tells."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "weft", "doctor"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANGS,
            env={**_plain_environment(), "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_frameworks_are_not_loaded() -> None:
    """Versions come from the packages' metadata: neither NumPy nor torch is imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "weft", "doctor"],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert "weft.doctor.look" in done.stderr
    for name in ("numpy", "torch", "mpi4py"):
        assert f"| {name}\n" not in done.stderr


def test_wrong_variables(tmp_path: Path) -> None:
    """WEFT_TIMEOUT stops ranks, OMP_NUM_THREADS makes them slow; both are told at once."""
    outcome = doctor("--json", env={"WEFT_TIMEOUT": "soon", "OMP_NUM_THREADS": "64"})
    told = json.loads(outcome.out)
    assert outcome.code == 1
    assert told["environment"] == {"WEFT_TIMEOUT": "soon", "OMP_NUM_THREADS": "64"}
    assert [warning.split("=")[0] for warning in told["warnings"]] == [*told["environment"]][::-1]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("join.start:0:kill", "did not meet: rank 0 (pid"),
        ("meet.before:1:raise", "InjectedFault"),
        ("nowhere:0:kill", "did not meet: WEFT_FAULT='nowhere:0:kill'"),
    ],
)
def test_ranks_that_do_not_meet(fault: str, told: str) -> None:
    """The trial is a real one: what befalls its ranks is told, and ranks cannot run."""
    outcome = doctor(env={"WEFT_FAULT": fault})
    assert outcome.code == 1
    assert told in outcome.out.partition("weft cannot run ranks here:")[2]


def test_an_empty_path(tmp_path: Path) -> None:
    """Without nvidia-smi there is none, and that is no problem; mpirun lies beside Python."""
    outcome = doctor("--json", env={"PATH": str(tmp_path)})
    assert outcome.code == 0
    assert facts(outcome)["gpus"] == 0
    assert facts(outcome)["mpirun"].startswith("Open MPI ")


def test_gpus_by_nvidia_smi(tmp_path: Path) -> None:
    """Each line of its answer is a GPU."""
    row = "NVIDIA H200, 143771 MiB, GPU-1, 580.1, Default"
    outcome = doctor(env=fake(tmp_path / "bin", "nvidia-smi", f"echo '{row}'"))
    assert outcome.code == 0
    assert "GPUs                    1             (NVIDIA H200, 143771 MiB)\n" in outcome.out
    described = "(143771 MiB, GPU-1, compute mode Default)\n"
    assert f"GPU 0                   NVIDIA H200   {described}" in outcome.out
    assert "NVIDIA's driver         580.1\n" in outcome.out
    assert "  - a GPU is here: ranks that share one use it by turns, and a turn" in outcome.out


def test_a_trial_without_a_gpu() -> None:
    """Asked for, it says why there is none."""
    outcome = doctor("--gpu", env={"CUDA_VISIBLE_DEVICES": ""})
    assert outcome.code == 0
    assert "a trial on the GPU      unknown: no GPU may be used here\n" in outcome.out


@pytest.mark.gpu
def test_a_trial_on_a_gpu() -> None:
    """Two ranks that share a GPU, as a user would: by turns, and then under MPS."""
    outcome = doctor("--gpu")
    assert outcome.code == 0, outcome
    print(outcome.out)  # for the log
    assert "two ranks on one GPU, which use it by turns" in outcome.out
    for size in ("1 kB", "1 MB", "100 MB"):
        line = rf"all_reduce, {size} +\d.* [um]s +\(added up on the "
        assert re.search(line, outcome.out), outcome
    assert "NVIDIA's driver " in outcome.out
    assert "CUDA's library          yes           (libcuda.so.1)\n" in outcome.out


def test_programs_that_cannot_be_run(tmp_path: Path) -> None:
    """A broken nvidia-smi is unknown, unless device files tell more."""
    env = fake(tmp_path / "bin", "nvidia-smi", "echo broken; exit 9")
    outcome = doctor("--json", env=env)
    assert outcome.code == 0
    assert "code 9: broken" in json.loads(outcome.out)["facts"]["gpus"]["why"]


def test_where_mpirun_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside Python, then in PATH; one that does not run is unknown."""
    beside, path = tmp_path / "beside", tmp_path / "path"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(beside))
    monkeypatch.setenv("PATH", str(path))
    assert look.mpirun() == Fact("", "neither beside Python nor in PATH")
    fake(path, "mpiexec", "echo 'HYDRA build details:'; echo '    Version:   4.2.0'")
    assert look.mpirun() == Fact("MPICH 4.2.0", str(path / "mpiexec"))
    fake(beside, "mpirun", "echo 'mpirun (Open MPI) 5.0.3'")
    assert look.mpirun() == Fact("Open MPI 5.0.3", str(beside / "mpirun"))
    (beside / "mpirun").write_bytes(b"\x7fnothing that runs")
    assert attempt(look.mpirun).value is None


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    """After a few seconds, with what it has started; the fact is unknown."""
    env = fake(tmp_path / "bin", "nvidia-smi", "/bin/sleep 1000; echo late")
    outcome = doctor("--json", env=env)
    assert outcome.code == 0
    told = f"{tmp_path}/bin/nvidia-smi did not answer within 5 s"
    assert told in json.loads(outcome.out)["facts"]["gpus"]["why"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_while_it_asks(number: signal.Signals, tmp_path: Path) -> None:
    """Whatever ends the command, what it has started ends too (the fixture looks)."""
    begun = tmp_path / "begun"
    env = fake(tmp_path / "bin", "nvidia-smi", f": > {begun}\nexec /bin/sleep 1000")
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", "doctor"],
        env={**_plain_environment(), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(begun.exists)
    process.send_signal(number)
    out, err = process.communicate(timeout=HANGS)
    assert (out, err) == ("", "")
    assert process.returncode == (130 if number == signal.SIGINT else -number)


def test_few_open_files() -> None:
    """The limit of this process, and what it means for ranks."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    outcome = doctor(preexec_fn=limit)
    assert outcome.code == 0
    assert "open files              64            (the hard limit is 64)\n" in outcome.out
    assert "the limit on open files is 64: `weft run` can start about 16 ranks" in outcome.out


def test_one_core() -> None:
    """Bound to one core, ranks still run, and it is said."""

    def bind() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    outcome = doctor(preexec_fn=bind)
    assert outcome.code == 0
    assert "only 1 core (CPU affinity)" in outcome.out


# what a seccomp filter, as containers have one, does to it

#: refuses one system call, and becomes `weft doctor`
FILTERED = """
import ctypes, os, struct, sys
number, action = int(sys.argv[1]), int(sys.argv[2], 16)
load, equal, answer = 0x20, 0x15, 0x06
program = b"".join(struct.pack("HBBI", *step) for step in (
    (load, 0, 0, 0),          # the number of the system call
    (equal, 0, 1, number),    # another: skip one step
    (answer, 0, 0, action),
    (answer, 0, 0, 0x7FFF0000),  # allow
))
steps = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(steps)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
assert prctl(22, 2, filter, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.executable, [sys.executable, "-m", "weft", "doctor"])
"""
_REFUSE, _KILL = 0x00050000 | errno.EPERM, 0x80000000
_READ_MEMORY, _MEMFD, _PIDFD = 310, 319, 434


@pytest.mark.parametrize(
    ("call", "action", "code", "told"),
    [
        (_READ_MEMORY, _REFUSE, 0, "Operation not permitted, perhaps by a seccomp filter"),
        (
            _READ_MEMORY,
            _KILL,
            1,
            "a seccomp filter kills the process that tries): the local engine needs",
        ),
        (_MEMFD, _REFUSE, 1, "(memfd_create: Operation not permitted): the local engine needs"),
        (_PIDFD, _REFUSE, 1, "(pidfd_open: Operation not permitted): the local engine needs"),
    ],
    ids=["reading refused", "reading kills", "memfd refused", "pidfd refused"],
)
def test_filtered_system_calls(call: int, action: int, code: int, told: str) -> None:
    """What is forbidden is found out by trying, and told with what follows."""
    done = subprocess.run(
        [sys.executable, "-c", FILTERED, str(call), hex(action)],
        capture_output=True,
        text=True,
        timeout=HANGS,
        env=_plain_environment(),
    )
    if "no new privileges" in done.stderr or "AssertionError" in done.stderr:
        pytest.skip(f"this machine allows no filter: {done.stderr}")
    assert (done.returncode, done.stderr) == (code, "")
    assert told in done.stdout.partition("\n\n")[2]
