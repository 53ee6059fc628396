"""What hosts said of their Python, packages and names, as a table, and what follows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

#: what is compared, and what a table calls it
ROWS = {
    "name": "name",
    "python": "Python",
    "weft": "weft",
    "numpy": "NumPy",
    "mpi4py": "mpi4py",
    "mpi": "MPI",
}
#: what ranks of one group must share: of Python's version the first two numbers
_MUST_AGREE = ("python", "weft", "numpy")
#: what a table has for what is not there
_ABSENT = "-"


@dataclass(frozen=True)
class Answer:
    """Describe what one host said."""

    #: the host, as the user calls it
    host: str
    #: why it cannot run ranks, in words; "" if nothing is known against it
    refusal: str = ""
    #: of ROWS, those that were asked for; "" for what is not there
    facts: Mapping[str, str] = field(default_factory=dict)
    #: what tells hosts apart even if they have the same name; "" without an answer
    identity: str = ""


def table(answers: Sequence[Answer]) -> str:
    """Return the answers as a table with a column for each host; `<` marks rows that differ."""
    asked = [name for name in ROWS if any(name in answer.facts for answer in answers)]
    rows = [["", *(answer.host for answer in answers)]]
    for name in asked:
        cells = [answer.facts.get(name, "") or _ABSENT for answer in answers]
        here = {cell for cell, answer in zip(cells, answers, strict=True) if answer.facts}
        rows.append([ROWS[name], *cells, "<" if name != "name" and len(here) > 1 else ""])
    width = max(len(row) for row in rows)
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(f"  {line}" for line in lines)


def refusals(answers: Sequence[Answer]) -> list[str]:
    """Return why ranks cannot run on some hosts, or not together: a sentence each."""
    found = [f"{answer.host}: {answer.refusal}" for answer in answers if answer.refusal]
    return [*found, *_same_hosts(answers), *_same_names(answers), *_disagreements(answers)]


def differences(answers: Sequence[Answer]) -> list[str]:
    """Return which versions differ that may differ, but had better not: a sentence each."""
    found = []
    for name, label in ROWS.items():
        versions = {answer.facts[name]: answer.host for answer in answers if answer.facts.get(name)}
        if name not in ("name", *_MUST_AGREE) and len(versions) > 1:
            listed = ", ".join(f"{version} on {host}" for version, host in versions.items())
            found.append(f"{label} differs: {listed}; install the same version on all hosts")
    return found


def _same_hosts(answers: Sequence[Answer]) -> Iterator[str]:
    """Yield a sentence for each host that was named in several ways."""
    named: dict[str, dict[str, None]] = {}
    for answer in answers:
        if answer.identity:
            named.setdefault(answer.identity, {})[answer.host] = None
    for names in named.values():
        if len(names) > 1:
            first, *_ = names
            yield (
                f"{' and '.join(names)} are one host, of which mpirun would run the ranks of one "
                f"name only; name it once, with the number of its ranks, as {first}:{len(names)}"
            )


def _same_names(answers: Sequence[Answer]) -> Iterator[str]:
    """Yield a sentence for each name that several hosts have."""
    named: dict[str, dict[str, str]] = {}
    for answer in answers:
        if answer.identity:
            named.setdefault(answer.facts["name"], {})[answer.identity] = answer.host
    for name, hosts in named.items():
        if len(hosts) > 1:
            listed = " and ".join(hosts.values())
            yield (
                f"{listed} are different hosts that are both called {name!r}: MPI tells hosts "
                "apart by their names, and would hang; give each a name of its own, for example "
                "by hostnamectl set-hostname"
            )


def _disagreements(answers: Sequence[Answer]) -> Iterator[str]:
    for name in _MUST_AGREE:
        versions = {
            ".".join(version.split(".")[:2]) if name == "python" else version
            for answer in answers
            if (version := answer.facts.get(name))
        }
        if len(versions) > 1:
            yield (
                f"{ROWS[name]} is not the same on all hosts ({', '.join(sorted(versions))}): ranks "
                "of one group run the same version; install one of them everywhere"
            )
