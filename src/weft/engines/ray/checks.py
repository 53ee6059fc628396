"""What is wrong with machines, before anything is run. Pure: answers in, sentences out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft._core.survey import ROWS

#: what the nodes of a cluster must share; of Python's version the first two numbers
_MUST_AGREE = ("python", "weft", "ray")
#: the label of a node for each of the versions
LABELS = {"python": "weft-python", "weft": "weft-version", "ray": "weft-ray", "numpy": "weft-numpy"}
NAMES = {**ROWS, "ray": "Ray"}
_NO_LABEL = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Member:
    """A node that lives, as its cluster describes it."""

    node_id: str
    #: the machine's own name
    name: str
    address: str
    cores: int
    gpus: int
    labels: Mapping[str, str] = field(default_factory=dict)
    #: bytes that Ray's store there has room for
    store: int = 0

    @property
    def versions(self) -> dict[str, str]:
        return {name: self.labels[key] for name, key in LABELS.items() if key in self.labels}


@dataclass(frozen=True)
class Answer:
    """Describe what came of an attempt to reach one machine."""

    #: as the user calls it
    machine: str
    #: "" if its name is unknown
    address: str = ""
    #: why no node with this user's key answers; "" if one does
    refusal: str = ""


@dataclass(frozen=True)
class Problem:
    """One line of the table of all that is wrong."""

    machine: str
    address: str
    reason: str


def labels_of(versions: Mapping[str, str]) -> dict[str, str]:
    """Return versions as labels of a node, which allow fewer characters."""
    return {LABELS[name]: _NO_LABEL.sub("-", version) for name, version in versions.items()}


def problems(
    answers: Iterable[Answer],
    members: Sequence[Member] | None,
    versions: Mapping[str, str],
    cluster: str,
) -> list[Problem]:
    """Return what is wrong with machines. `members` are the nodes of the cluster, None if these are
    unknown; `versions` this machine's."""
    found = []
    for answer in answers:
        member = None if members is None else find(members, answer)
        if member is not None:
            reason = disagreement(member.versions, versions)
        elif answer.refusal or members is None:
            reason = answer.refusal
        else:
            reason = (
                "runs a node of another cluster; on it: weft close, then weft open --join "
                f"{cluster}"
            )
        if reason:
            found.append(Problem(answer.machine, answer.address, reason))
    return found


def find(members: Iterable[Member], answer: Answer) -> Member | None:
    """Return the node of a machine: by its address, or, as a machine may have several of these, by
    its own name. None if it answers as none, or is none."""
    if answer.refusal:
        return None
    by_name = None
    for member in members:
        if member.address == answer.address:
            return member
        if member.name.partition(".")[0] == answer.machine.partition(".")[0]:
            by_name = member
    return by_name


def disagreement(theirs: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Return which versions of a node keep it from working with this machine; "" if none do. A node
    that has none was not started by weft."""
    if "weft" not in theirs:
        return "runs a node of Ray that weft open did not start"
    differing = [name for name in _MUST_AGREE if _parts(name, theirs) != _parts(name, own)]
    if not differing:
        return ""
    has, here = (
        ", ".join(f"{NAMES[name]} {versions.get(name)}" for name in differing)
        for versions in (theirs, own)
    )
    return f"has {has}, this machine has {here}; install the same"


def _parts(name: str, versions: Mapping[str, str]) -> str:
    version = _NO_LABEL.sub("-", versions.get(name, ""))
    return ".".join(version.split(".")[:2]) if name == "python" else version


def table(found: Sequence[Problem]) -> str:
    """Return the problems as lines: machine, address, what is wrong."""
    widths = [max(len(row.machine) for row in found), max(len(row.address) for row in found)]
    return "\n".join(
        f"  {row.machine:<{widths[0]}}  {row.address or '-':<{widths[1]}}  {row.reason}"
        for row in found
    )
