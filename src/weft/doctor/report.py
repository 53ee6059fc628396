"""The command `weft doctor`: facts and problems as text or JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from weft.doctor.look import look
from weft.doctor.problems import Fact, Machine, drawbacks, obstacles, problems
from weft.errors import format_bytes

_LABELS = {
    "threads": "threads per rank",
    "memory": "memory available",
    "pidfd": "pidfd_open",
    "reading": "process_vm_readv",
    "open_files": "open files",
    "gpus": "GPUs",
    "mpi": "MPI library",
    "mpi_threads": "MPI threads",
    "kernels": "loops in C",
    "ranks": "ranks meet",
}
#: longer values push their reason to the right
_LABEL_WIDTH, _VALUE_WIDTH = 24, 12


def report(*, in_json: bool, gpu: bool = False) -> int:
    """Print facts and problems; return 0 if weft can run ranks on this machine, else 1. `gpu`: with
    what two ranks measure on a GPU."""
    machine = look(gpu=gpu)
    with contextlib.suppress(BrokenPipeError):  # as in `weft doctor | head -3`
        print(as_json(machine) if in_json else as_text(machine))
    return 1 if obstacles(machine) else 0


def as_text(machine: Machine) -> str:
    """Return one fact per line, then what would go wrong."""
    lines = [
        *(_fact_line(name, fact) for name, fact in _facts(machine)),
        *(_line(name, text, "set") for name, text in machine.environment.items()),
    ]
    stopping, slowing = obstacles(machine), drawbacks(machine)
    lines += listed("weft cannot run ranks here:", stopping)
    lines += listed("What would go wrong:", slowing)
    if not stopping and not slowing:
        lines += ["", "Nothing would go wrong."]
    return "\n".join(lines)


def as_json(machine: Machine) -> str:
    """Return the same as one object; an unknown value is null, that of an absent thing empty."""
    contents: dict[str, Any] = {
        "usable": not obstacles(machine),
        "facts": {name: asdict(fact) for name, fact in _facts(machine)},
        "environment": dict(machine.environment),
        "warnings": problems(machine),
    }
    return json.dumps(contents, indent=2)


def _facts(machine: Machine) -> list[tuple[str, Fact[Any]]]:
    named = [(field.name, getattr(machine, field.name)) for field in fields(machine)]
    facts = [(name, fact) for name, fact in named if isinstance(fact, Fact)]
    return [*facts, *machine.packages.items(), *machine.devices.items()]


def _fact_line(name: str, fact: Fact[Any]) -> str:
    label = _LABELS.get(name, name)
    if fact.value is None:
        return _line(label, f"unknown: {fact.why}", "")
    if fact.value == "":
        return _line(label, fact.why, "")
    return _line(label, _value(name, fact.value), fact.why)


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_bytes(value) if name == "memory" else str(value)


def _line(label: str, value: str, why: str) -> str:
    """Format a line: `cores                   2             (CPU affinity)`."""
    reason = f"  ({why})" if why else ""
    return f"{label:<{_LABEL_WIDTH}}{value:<{_VALUE_WIDTH}}{reason}".rstrip()


def listed(title: str, items: Sequence[str]) -> list[str]:
    """Return a title and items, as lines."""
    return ["", title, *(f"  - {item}" for item in items)] if items else []
