"""What mpiruns are told, and what they say."""

from __future__ import annotations

import pytest

from weft._core.hosts import Host
from weft._core.mpirun import (
    INTEL_MPI,
    MPICH,
    OPEN_MPI,
    Mpi,
    arguments,
    is_noise,
    machine_file,
    of_library,
    of_mpirun,
    passed_on,
    settings,
    split_tag,
    tells_failure,
)

HOSTS = (Host("a", 2), Host("b", 1))


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", Mpi(OPEN_MPI, "5.0.11")),
        (
            "HYDRA build details:\n    Version:                                 4.2.0\n",
            Mpi(MPICH, "4.2.0"),
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701 (id: 179630a)",
            Mpi(INTEL_MPI, "2021.13"),
        ),
        ("slurm 23", None),
    ],
)
def test_whose_mpirun_it_is(text: str, mpi: Mpi | None) -> None:
    """By what it prints as its version."""
    assert of_mpirun(text) == mpi


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost", Mpi(OPEN_MPI, "5.0.11")),
        ("MPICH Version:      5.0.2", Mpi(MPICH, "5.0.2")),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", Mpi(INTEL_MPI, "2021.13")),
        ("Cray MPI", None),
    ],
)
def test_whose_library_it_is(text: str, mpi: Mpi | None) -> None:
    """By MPI_Get_library_version. Libraries of MPICH's family are started by its mpiruns."""
    assert of_library(text) == mpi
    assert mpi is None or (mpi.abi == OPEN_MPI) == (mpi.name == OPEN_MPI)


def test_what_open_mpi_is_told() -> None:
    """Ranks fill the hosts, bound to no cores; each line of output is marked."""
    told = arguments(Mpi(OPEN_MPI, "5.0.1"), HOSTS, "f", ["WEFT_TIMEOUT"])
    assert " ".join(told) == (
        "--host a:2,b:1 -np 3 --map-by slot --bind-to none --output tag -x WEFT_TIMEOUT"
    )
    told = arguments(Mpi(OPEN_MPI, "4.1.6"), HOSTS, "f", [], keep_going=True, has_stdin=False)
    assert " ".join(told).endswith("--bind-to none --tag-output --with-ft ulfm --stdin none")


@pytest.mark.parametrize("name", [MPICH, INTEL_MPI])
def test_what_hydra_is_told(name: str) -> None:
    """Its hosts stand in a file; variables need no names, as it passes on all of them."""
    told = arguments(Mpi(name, "4"), HOSTS, "f", ["WEFT_TIMEOUT"])
    assert told == ["-machinefile", "f", "-n", "3", "-prepend-rank"]
    assert machine_file(HOSTS) == "a:2\nb:1\n"
    assert "-disable-auto-cleanup" in arguments(Mpi(name, "4"), HOSTS, "f", [], keep_going=True)


def test_variables_that_ranks_get() -> None:
    """weft's, Python's, and how many threads libraries start; not what makes a process a rank."""
    environ = ("HOME", "WEFT_TIMEOUT", "WEFT_RANK", "PYTHONPATH", "OMP_NUM_THREADS", "MY_WEFT_X")
    expected = ["OMP_NUM_THREADS", "PYTHONPATH", "WEFT_TIMEOUT"]
    assert passed_on(environ, ["WEFT_RANK"]) == expected


def test_settings_of_the_user_win() -> None:
    """Open MPI yields, notices dead hosts, and runs as root where the user is root."""
    user = {"PRTE_MCA_oob_tcp_keepalive_time": "60"}
    found = settings(Mpi(OPEN_MPI, "5"), user, root=True)
    assert found["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert found["PRTE_MCA_oob_tcp_keepalive_intvl"] == "1"
    assert found["PRTE_ALLOW_RUN_AS_ROOT"] == "1"
    assert not user.keys() & found.keys()
    assert "PRTE_ALLOW_RUN_AS_ROOT" not in settings(Mpi(OPEN_MPI, "5"), {}, root=False)
    assert settings(Mpi(MPICH, "4"), {}, root=True) == {}


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        (OPEN_MPI, b"[1,12]<stdout>: [0] a\n", (12, b"[0] a\n")),
        (OPEN_MPI, b"[prterun-hub-9@1,0]<stderr>: \n", (0, b"\n")),
        (OPEN_MPI, b"[1,0][host1:27]<stdout>: x\n", (0, b"x\n")),
        (OPEN_MPI, b"[hub:00031] plm: no\n", (None, b"[hub:00031] plm: no\n")),
        (OPEN_MPI, b"PRTE has lost\n", (None, b"PRTE has lost\n")),
        (MPICH, b"[3] [0] a\n", (3, b"[0] a\n")),
        (MPICH, b"[mpiexec@hub] no\n", (None, b"[mpiexec@hub] no\n")),
    ],
)
def test_lines_of_ranks(name: str, line: bytes, found: tuple[int | None, bytes]) -> None:
    """Are told from mpirun's own, whatever the rest of them looks like."""
    assert split_tag(Mpi(name, "5"), line) == found


def test_lines_of_mpirun() -> None:
    """Some tell of a failure, one means nothing."""
    assert tells_failure(b"PRTE has lost communication with a remote daemon.\n")
    assert tells_failure(b"prterun noticed that process rank 1 with PID 71 on node host2 exited\n")
    assert tells_failure(b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n")
    assert not tells_failure(b"A system call failed during shared memory initialization\n")
    assert is_noise(b"[hub:1] plm:ssh: Warning: setpgid(5,5) failed in parent with errno=13\n")
    assert not is_noise(b"[hub:1] plm:ssh: no\n")
