"""What pages show: their blocks, and the commands in them with what these print."""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A block that begins with `$ command`: the command and what the page says it prints.

    `before` is the block of Python that stands right before it, where there is one.
    """

    command: tuple[str, ...]
    output: str
    before: str | None = None

    def is_printed_by(self, output: str) -> bool:
        """Whether this is that output; "..." stands for anything, and ranks print in any order."""
        wanted, got = self.output, output
        if self.command[:2] == ("weft", "run"):
            wanted, got = ("".join(sorted(text.splitlines(True))) for text in (wanted, got))
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        return doctest.OutputChecker().check_output(wanted, got, flags)


def blocks(page: Path, language: str) -> list[str]:
    """The texts of all blocks of a language."""
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


def shown(page: Path) -> list[Shown]:
    """All commands of a page with their outputs, in its order."""
    found, program = [], None
    for kind, text in _BLOCK.findall(page.read_text()):
        if kind == "text" and text.startswith("$ "):
            line, _, output = text[2:].partition("\n")
            found.append(Shown(tuple(line.split()), output, program))
        program = text if kind == "python" else None
    return found
