"""Who a process is, by its environment and those of the processes above it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from weft._core.launch import (
    TAKEN,
    Ancestor,
    Launched,
    Process,
    alone,
    environment,
    launched,
    one_host_error,
)
from weft.errors import InvalidValue

#: what each launcher sets in rank 1 of 2, on one host
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-17631@1",
    "PMIX_RANK": "1",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
}
INTEL_MPI = {**MPICH, "I_MPI_HYDRA_UUID": "1a4b0000-d992-710c-4a60-0600a0f7916b"}
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "Open MPI": OPEN_MPI,
    "srun": SRUN,
    "MPICH": MPICH,
    "Intel MPI": INTEL_MPI,
}
#: the variable that a launcher counts the ranks of this host in
HERE = {
    "torchrun": "LOCAL_WORLD_SIZE",
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "srun": "SLURM_STEP_TASKS_PER_NODE",
    "MPICH": "MPI_LOCALNRANKS",
    "Intel MPI": "MPI_LOCALNRANKS",
}

each_launcher = pytest.mark.parametrize("name", LAUNCHERS)


def read(environ: Mapping[str, str], *above: Mapping[str, str] | None) -> Launched | None:
    """The place of a process below others with these environments, the parent first.

    The topmost one is process 1001, the one below it 1002, and so on.
    """
    return launched(dict(environ), lambda: line(above))


def line(above: tuple[Mapping[str, str] | None, ...]) -> list[Ancestor]:
    pids = range(1000 + len(above), 1000, -1)
    return [
        Ancestor(Process(pid, 50 + pid), environ) for pid, environ in zip(pids, above, strict=True)
    ]


def found(environ: Mapping[str, str], *above: Mapping[str, str] | None) -> Launched:
    """The same where there must be a place at which ranks can meet."""
    place = read(environ, *above)
    assert place is not None
    assert one_host_error(place) is None
    return place


def nobody() -> list[Ancestor]:
    return []


# `weft run`


def test_a_place_is_read_once() -> None:
    """What `weft run` sets is read back and taken out, so that children do not inherit it."""
    environ = {"PATH": "x", **environment(rank=1, size=3, job="j", memory=5, launcher=99)}
    assert launched(environ, nobody) == Launched(1, 3, "j", 5, 99, local_rank=1, local_size=3)
    assert environ == {"PATH": "x"}
    assert launched(environ, nobody) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"WEFT_RANK": "0"},
        {"WEFT_RANK": "x", "WEFT_SIZE": "2", "WEFT_JOB": "j"},
        {"WEFT_RANK": "2", "WEFT_SIZE": "2", "WEFT_JOB": "j"},
    ],
)
def test_half_a_place_is_an_error(environ: dict[str, str]) -> None:
    """Variables that make no sense are shown, not guessed at."""
    with pytest.raises(InvalidValue, match="WEFT_"):
        launched(environ, nobody)


def test_alone_is_a_job_of_its_own() -> None:
    """Two processes alone never share a job."""
    assert alone().job != alone().job
    assert (alone().rank, alone().size) == (0, 1)


# the other launchers


@each_launcher
def test_each_launcher_is_understood(name: str) -> None:
    """Rank and size are the launcher's, in all and on this host; there is neither memory nor a
    launcher of ours."""
    place = found(LAUNCHERS[name], {})
    assert (place.local_rank, place.local_size) == (1, 2)
    assert (place.rank, place.size, place.memory, place.launcher) == (1, 2, -1, 0)
    assert len(place.job) == 32


@each_launcher
def test_a_launch_of_one_is_a_job_of_one(name: str) -> None:
    """mpirun -n 1: nobody to meet, and no name to share."""
    rank_1_of_2 = LAUNCHERS[name]
    one = {key: {"1": "0", "2": "1"}.get(value, value) for key, value in rank_1_of_2.items()}
    place = found(one, {})
    assert (place.rank, place.size) == (0, 1)
    assert place.job != found(one, {}).job


@each_launcher
def test_ranks_agree_on_the_job(name: str) -> None:
    """Every rank of a launch finds the same name, whatever stands between it and the launcher."""
    rank_1 = LAUNCHERS[name]
    rank_0 = {**rank_1, **dict.fromkeys(_own(rank_1), "0")}
    direct = found(rank_1, {"PATH": "x"})
    assert found(rank_0, {"PATH": "x"}).job == direct.job
    assert found(rank_1, {**rank_1, "SHLVL": "2"}, rank_1, {"PATH": "x"}).job == direct.job


@each_launcher
def test_launches_side_by_side_have_other_names(name: str) -> None:
    """Another launching process is another job, even where the launcher's variables are equal."""
    rank = LAUNCHERS[name]
    assert found(rank, {}).job != found(rank, {}, {}).job


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        (TORCHRUN, "TORCHELASTIC_RUN_ID"),
        (TORCHRUN, "TORCHELASTIC_RESTART_COUNT"),
        (TORCHRUN, "MASTER_PORT"),
        (OPEN_MPI, "PMIX_NAMESPACE"),
        (SRUN, "SLURM_JOB_ID"),
        (SRUN, "SLURM_STEP_ID"),
    ],
)
def test_one_process_may_launch_many_jobs(environ: dict[str, str], variable: str) -> None:
    """A daemon's jobs, an agent's restarts and a script's steps are told apart by their ids."""
    assert found(environ, {}).job != found({**environ, variable: "77"}, {}).job


@each_launcher
def test_processes_that_show_nothing_are_passed_over(name: str) -> None:
    """A wrapper of another user does not count as the launcher; but if nobody else is there,
    as above srun's ranks, the last one serves."""
    rank = LAUNCHERS[name]
    assert found(rank, None, rank, {}).job == found(rank, {}).job
    assert found(rank, rank, None, None).job == found(rank, None).job


@each_launcher
def test_a_launcher_out_of_sight_is_an_obstacle(name: str) -> None:
    """Where every visible ancestor is this rank, other ranks cannot be seen either."""
    for above in ((), (LAUNCHERS[name],)):
        place = read(LAUNCHERS[name], *above)
        assert place is not None
        error = str(one_host_error(place))
        assert "cannot be seen" in error
        assert "weft run -n 2" in error


@each_launcher
def test_ranks_on_several_hosts_are_an_obstacle(name: str) -> None:
    """The launcher says that fewer are here than there are; the text shows its variables."""
    place = read({**LAUNCHERS[name], HERE[name]: "1(x2)" if name == "srun" else "1"}, {})
    assert place is not None
    assert (place.size, place.local_size) == (2, 1)
    error = str(one_host_error(place))
    assert error.startswith(f"this job's 2 ranks span hosts ({HERE[name]}=1")
    assert "meet there by MPI; start them by mpirun, srun or `weft run --hosts`" in error


@pytest.mark.parametrize(
    ("tasks", "host", "local_rank", "local_size"),
    [("2(x3),1", "1", 1, 2), ("2(x3),1", "3", 0, 1), ("3,4", "0", 2, 3), ("3,4", "1", 3, 4)],
)
def test_slurm_tells_the_ranks_of_every_host(
    tasks: str, host: str, local_rank: int, local_size: int
) -> None:
    """Those of this host are found by its number."""
    said = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": host}
    place = read({**SRUN, **said, "SLURM_LOCALID": str(local_rank)}, {})
    assert place is not None
    assert (place.local_rank, place.local_size) == (local_rank, local_size)
    assert one_host_error(place) is not None


@each_launcher
def test_where_the_host_is_not_told_ranks_may_meet(name: str) -> None:
    """Without a count of those here they try; who does not come is named at the deadline."""
    environ = {key: value for key, value in LAUNCHERS[name].items() if key != HERE[name]}
    assert found(environ, {}).size == 2


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {**SRUN, "SLURM_STEP_ID": "4294967291"},
        {**SRUN, "SLURM_STEP_ID": "batch"},
        {**SRUN, "SLURM_STEP_ID": ""},
    ],
    ids=["RANK", "no rank", "no size", "sbatch", "batch step", "named step", "empty step"],
)
def test_what_is_not_a_launch(environ: dict[str, str]) -> None:
    """Common names, half a launcher's variables, and Slurm's shells start no ranks."""
    assert read(environ, {}) is None


@pytest.mark.parametrize("wrong", [{"PMI_RANK": "x"}, {"PMI_RANK": "2"}, {"PMI_SIZE": ""}])
def test_wrong_values_are_shown(wrong: dict[str, str]) -> None:
    """They are an error each time, not one process that goes on alone."""
    environ = {**MPICH, **wrong}
    for _ in range(2):
        with pytest.raises(InvalidValue, match=r"PMI_RANK='.*' and PMI_SIZE='.*'.*MPICH"):
            launched(environ, nobody)


# launchers inside launchers


def test_weft_run_goes_first() -> None:
    """`weft run` under mpirun: its ranks are its own."""
    ours = environment(rank=0, size=3, job="j", memory=5, launcher=99)
    environ = {**OPEN_MPI, **ours}
    assert launched(environ, nobody) == Launched(0, 3, "j", 5, 99, local_rank=0, local_size=3)
    assert launched(environ, lambda: line(({},))) is None  # a program that this rank starts


@pytest.mark.parametrize(
    ("outer", "inner"), list(itertools.permutations(("torchrun", "Open MPI", "srun", "MPICH"), 2))
)
def test_the_nearest_launcher_counts(outer: str, inner: str) -> None:
    """A rank of one launcher is the process in which the other is started."""
    above = LAUNCHERS[outer]
    rank = {**above, **LAUNCHERS[inner]}
    assert found(rank, rank, above, above, {}).job == found(LAUNCHERS[inner], above, above, {}).job


def test_mpich_inside_mpich() -> None:
    """The inner ranks stop at the inner proxy, though it has inherited a place of equal numbers."""
    inner = {**MPICH, "PMI_FD": "23"}
    assert found(inner, MPICH, {}).job == found({**MPICH, "PMI_FD": "24"}, MPICH, {}).job
    assert found(inner, MPICH, {}).job != found(MPICH, {}).job


def test_srun_that_speaks_pmi_is_srun() -> None:
    """Both sets of variables come from one launcher; Slurm's say more."""
    both = {**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"}
    assert found(both, None, None).job == found(SRUN, None, None).job


# a place is taken once


@each_launcher
def test_programs_that_a_rank_starts_are_alone(name: str) -> None:
    """The launcher's variables stay for others to read; WEFT_TAKEN says whose they are."""
    environ = dict(LAUNCHERS[name])
    assert launched(environ, lambda: line(({},))) is not None
    assert environ.pop(TAKEN) != ""
    assert environ == LAUNCHERS[name]
    environ = dict(LAUNCHERS[name])
    launched(environ, lambda: line(({},)))
    assert launched(environ, lambda: line((LAUNCHERS[name], {}))) is None


def test_a_rank_may_launch_others() -> None:
    """mpirun started by a rank of mpirun: the place there is another one, and free."""
    environ = dict(OPEN_MPI)
    launched(environ, lambda: line(({},)))
    inner = {**environ, "PMIX_NAMESPACE": "prterun-host-17632@1"}
    assert found(inner, environ, {}).rank == 1


def _own(environ: Mapping[str, str]) -> list[str]:
    """The variables that each rank has for itself."""
    ends = ("RANK", "LOCAL_RANK", "PROCID", "LOCALID", "LOCALRANKID", "FD")
    return [name for name in environ if name.endswith(ends) and name != "GROUP_RANK"]
