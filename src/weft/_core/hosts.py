"""The hosts of a launch, as users write them: `a:2,b:2`, or a hostfile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.errors import LaunchError

_NAME = r"\w[\w.-]*|\[[0-9A-Fa-f:.]+\]"  # never an option of ssh
_ENTRY = re.compile(rf"({_NAME})(?::([0-9]+))?")
#: a line of a hostfile: of Open MPI (a slots=2), of MPICH and Intel MPI (a:2)
_LINE = re.compile(rf"({_NAME})(?::([0-9]+)|(?:\s+(?:max_)?slots\s*=\s*[0-9]+)*)")
_SLOTS = re.compile(r"\sslots\s*=\s*([0-9]+)")


class Host(NamedTuple):
    """A host, as the user calls it, and how many ranks it gets."""

    name: str
    ranks: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `a:2,b:2`; a host without a number gets one rank. Raises LaunchError.

    >>> parse_hosts("a:2,b")
    (Host(name='a', ranks=2), Host(name='b', ranks=1))
    """
    hosts = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or match[2] == "0":
            raise LaunchError(
                f"--hosts {text}: {entry!r} is no host with a number of ranks; expected, for "
                "example, --hosts a:2,b:2"
            )
        hosts.append(Host(match[1], int(match[2] or 1)))
    return _merged(hosts)


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """Parse the lines of a hostfile: `a slots=2` or `a:2`; `#` begins a comment. A host without a
    number gets one rank. Raises LaunchError."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        match = _LINE.fullmatch(content)
        if match is not None:
            slots = _SLOTS.search(content)
            hosts.append(Host(match[1], int(match[2] or (slots[1] if slots else 1))))
        if content and (match is None or hosts[-1].ranks == 0):
            raise LaunchError(
                f"--hostfile {name}, line {number}: {content!r} is no host with a number of ranks; "
                "expected, for example, `a slots=2` or `a:2`"
            )
    if not hosts:
        raise LaunchError(f"--hostfile {name} names no host; expected a line such as `a slots=2`")
    return _merged(hosts)


def take(hosts: Sequence[Host], ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts of so many ranks, which fill one host after the other; of all ranks if None.
    Raises LaunchError if the hosts have not so many."""
    total = sum(host.ranks for host in hosts)
    if ranks is None:
        return tuple(hosts)
    if ranks > total:
        listed = ", ".join(f"{host.name}:{host.ranks}" for host in hosts)
        raise LaunchError(
            f"-n {ranks}: the hosts take {total} ranks ({listed}); ask for that many or fewer, or "
            "give hosts more of them"
        )
    taken, left = [], ranks
    for host in hosts:
        if left > 0:
            taken.append(Host(host.name, min(host.ranks, left)))
            left -= taken[-1].ranks
    return tuple(taken)


def hosts_of_ranks(hosts: Iterable[Host]) -> tuple[str, ...]:
    """Return the name of each rank's host."""
    return tuple(host.name for host in hosts for _ in range(host.ranks))


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return the hosts, each once, with the ranks of all its entries."""
    ranks: dict[str, int] = {}
    for host in hosts:
        ranks[host.name] = ranks.get(host.name, 0) + host.ranks
    return tuple(Host(name, number) for name, number in ranks.items())
