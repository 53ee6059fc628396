"""Docstrings as the reference shows them.

weft's docstrings are written to be read in an editor: examples begin with `>>>`, and what arguments
mean stands in two columns. Markdown would run both together. What an attribute is stands above it,
after `#:`. mkdocs.yml names this file, and mkdocstrings has every object pass through it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

#: the first line of an entry: names, two spaces or more, what they mean
_ENTRY = re.compile(r"([\w.]+(?:, [\w.]+)*) {2,}(\S.*)")


class Docstrings(griffe.Extension):
    """Has docstrings be Markdown."""

    def on_object(self, *, obj: Any, loader: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        elif obj.is_attribute and obj.lineno:
            lines = obj.filepath.read_text().splitlines()[: obj.lineno - 1]
            if said := comment_above(lines):
                obj.docstring = griffe.Docstring(said, parent=obj)


def as_markdown(docstring: str) -> str:
    """A docstring, with its examples fenced and its columns made a list."""
    paragraphs = re.split(r"\n(?:[ \t]*\n)+", docstring.strip("\n"))
    return "\n\n".join(map(_paragraph, paragraphs))


def comment_above(lines: list[str]) -> str:
    """What the last of these lines say after `#:`."""
    said: list[str] = []
    for line in reversed(lines):
        if not line.strip().startswith("#:"):
            break
        said.insert(0, line.strip().removeprefix("#:").strip())
    text = " ".join(said)
    return text[:1].upper() + text[1:]


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith(">>>"):
            before = ["\n".join(lines[:number]), ""] if number else []
            return "\n".join([*before, "```pycon", *lines[number:], "```"])
    return _list(lines) if _ENTRY.fullmatch(lines[0]) else text


def _list(lines: list[str]) -> str:
    """Two columns as a list; a line that is indented goes on with the entry before."""
    entries: list[str] = []
    for line in lines:
        entry = _ENTRY.fullmatch(line)
        if entry:
            entries.append(f"- `{entry[1]}`: {entry[2]}")
        elif line.startswith(" "):
            entries[-1] += " " + line.strip()
        else:
            entries.append(f"\n{line}")
    return "\n".join(entries)
