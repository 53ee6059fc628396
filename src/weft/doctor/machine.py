"""What is known about a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Fact(Generic[Value]):
    """A value and its reason. None: it is unknown. An empty text: there is no such thing here."""

    value: Value | None
    why: str = ""


@dataclass(frozen=True)
class Machine:
    """Sizes are in bytes."""

    weft: Fact[str]
    python: Fact[str]
    #: as sys.platform has it: linux
    system: Fact[str]
    #: as the kernel has it: x86_64
    processor: Fact[str]
    cores: Fact[int]
    #: of each rank, when there are as many ranks as cores
    threads: Fact[int]
    #: that can be allocated now
    memory: Fact[int]
    memfd: Fact[bool]
    pidfd: Fact[bool]
    ptrace_scope: Fact[str]
    #: whether one child of this process could read another's memory
    reading: Fact[bool]
    open_files: Fact[int]
    gpus: Fact[int]
    mpirun: Fact[str]
    #: whether the loops in C were compiled
    kernels: Fact[bool]
    #: whether two ranks, started as a trial, met
    ranks: Fact[bool]
    #: name -> version
    packages: Mapping[str, Fact[str]]
    #: the variables that change what ranks do, where they are set
    environment: Mapping[str, str]


def attempt(probe: Callable[[], Fact[Value]]) -> Fact[Value]:
    """What a probe finds; if it fails, that the fact is unknown, and why."""
    try:
        return probe()
    except Exception as error:
        return Fact(None, reason(error))


def reason(error: Exception) -> str:
    """An exception in one line; of the system's errors the part that is not a number."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def thread_number(text: str) -> int | None:
    """What a variable such as OMP_NUM_THREADS says: `4`, or `4,2` with nested regions."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
