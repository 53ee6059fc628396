"""The command `weft doctor --hosts a,b`: what hosts have, side by side."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from weft._core.survey import Answer, differences, refusals, table
from weft.doctor.report import listed
from weft.engines.registry import ENGINES


def report_hosts(hosts: Sequence[str], *, in_json: bool) -> int:
    """Print what each host has, and what would go wrong; return 0 if all of them can run ranks
    together, else 1."""
    answers: list[Answer] = ENGINES["mpi"].load().survey(hosts)
    with contextlib.suppress(BrokenPipeError):  # as in `weft doctor --hosts a,b | head -3`
        print(as_json(answers) if in_json else as_text(answers))
    return 1 if refusals(answers) else 0


def as_text(answers: Sequence[Answer]) -> str:
    """Return a column for each host, then what would go wrong."""
    stopping, slowing = refusals(answers), differences(answers)
    lines = [table(answers)]
    lines += listed("These hosts cannot run ranks together:", stopping)
    lines += listed("What may go wrong:", slowing)
    if not stopping and not slowing:
        lines += ["", "Nothing would go wrong."]
    return "\n".join(lines)


def as_json(answers: Sequence[Answer]) -> str:
    """Return the same as one object."""
    contents = {
        "usable": not refusals(answers),
        "hosts": {answer.host: asdict(answer) for answer in answers},
        "warnings": [*refusals(answers), *differences(answers)],
    }
    return json.dumps(contents, indent=2)
