"""Drawings of calls: who does what, and what goes from one process to another.

    python docs/drawings/draw.py      writes an .svg beside every .txt of this folder

A source is text. Its first line is the title; then come the lanes, and below them, in order, what
happens:

    lane driver blue: your program
    lane worker green: a worker

    driver: what it does | which/file.py has it
    driver -> worker: what goes there | which/file.py sends it
    driver, worker: what both do at the same time
    loop: what is repeated, and until when
    end

A drawing has a background of its own, and is dark where the reader's system is.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

#: background, border, text, text of less weight; then for each colour what it fills and its lines
LIGHT = {
    "ground": ("#ffffff", "#d0d7de"),
    "text": ("#1f2328", "#57606a"),
    "blue": ("#eaf2ff", "#4a7fd4"),
    "green": ("#e9f8ee", "#3a8f58"),
    "amber": ("#fff4e0", "#b97a16"),
    "violet": ("#f4edff", "#8058c8"),
}
DARK = {
    "ground": ("#171a20", "#3d444d"),
    "text": ("#e8eaed", "#a9b1bb"),
    "blue": ("#1b2a45", "#79a5ee"),
    "green": ("#16321f", "#66bd85"),
    "amber": ("#3a2a10", "#dda548"),
    "violet": ("#2c2143", "#b094ea"),
}

MARGIN, LANE, GAP = 24, 300, 36
BOX, LINE, SMALL = 284, 18, 15
#: characters that fit a box, of the text and of a file's name
_WIDE, _NARROW = 37, 40


@dataclass(frozen=True)
class Lane:
    """A process, or memory that several see."""

    key: str
    color: str
    name: str


@dataclass(frozen=True)
class Step:
    """What happens in one lane, or in several at once."""

    lanes: tuple[str, ...]
    text: str
    file: str


@dataclass(frozen=True)
class Message:
    """What goes from one lane to another, or from several at once."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    text: str
    file: str


@dataclass(frozen=True)
class Loop:
    """The beginning of what is repeated; without a text, its end."""

    text: str


@dataclass(frozen=True)
class Drawing:
    title: str
    lanes: tuple[Lane, ...]
    rows: tuple[Step | Message | Loop, ...]


def main() -> None:
    for source in sorted(Path(__file__).parent.glob("*.txt")):
        source.with_suffix(".svg").write_text(draw(source.read_text()))


def draw(source: str) -> str:
    """A source as SVG."""
    return _svg(parse(source))


def parse(source: str) -> Drawing:
    title, *lines = [line for line in source.splitlines() if line.strip()]
    lanes: list[Lane] = []
    rows: list[Step | Message | Loop] = []
    for line in lines:
        if found := re.fullmatch(r"lane (\w+) (\w+): (.+)", line):
            lanes.append(Lane(*found.groups()))
        elif line == "end":
            rows.append(Loop(""))
        elif found := re.fullmatch(r"loop: (.+)", line):
            rows.append(Loop(found[1]))
        elif found := re.fullmatch(r"([\w, ]+?)(?: -> ([\w, ]+?))?: ([^|]+)(?:\| *(.+))?", line):
            there = found[2]
            here = tuple(found[1].split(", "))
            text, file = found[3].strip(), (found[4] or "").strip()
            if there is None:
                rows.append(Step(here, text, file))
            else:
                rows.append(Message(here, tuple(there.split(", ")), text, file))
        else:
            raise ValueError(f"{line!r} is none of: lane, loop, end, a step, a message")
    return Drawing(title, tuple(lanes), tuple(rows))


class _Paper:
    """The parts of a drawing, and how far down it goes."""

    def __init__(self, lanes: tuple[Lane, ...]) -> None:
        self.parts: list[str] = []
        self.y = MARGIN
        self.width = 2 * MARGIN + len(lanes) * LANE + (len(lanes) - 1) * GAP
        self.middles = {
            lane.key: MARGIN + LANE // 2 + number * (LANE + GAP)
            for number, lane in enumerate(lanes)
        }
        self.colors = {lane.key: lane.color for lane in lanes}
        #: where the loops begin that have not ended
        self.open: list[int] = []

    def text(self, x: int, y: int, words: str, kind: str, anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(self, middle: int, top: int, size: tuple[int, int], color: str) -> None:
        width, height = size
        self.parts.append(
            f'<rect x="{middle - width // 2}" y="{top}" width="{width}" height="{height}" rx="6" '
            f'class="{color}"/>'
        )


def _svg(drawing: Drawing) -> str:
    paper = _Paper(drawing.lanes)
    _heads(paper, drawing)
    top = paper.y
    for row in drawing.rows:
        if isinstance(row, Step):
            _step(paper, row)
        elif isinstance(row, Message):
            _message(paper, row)
        else:
            _loop(paper, row)
    height = paper.y + MARGIN - 8
    lines = [f'<path d="M{x} {top - 10}V{paper.y}" class="life"/>' for x in paper.middles.values()]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {paper.width} {height}" '
            f'width="{paper.width}" height="{height}" role="img">',
            f"<title>{escape(drawing.title)}</title>",
            f"<style>\n{_style(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{_style(DARK)}\n}}"
            "\n</style>",
            f'<rect x="0.5" y="0.5" width="{paper.width - 1}" height="{height - 1}" rx="10" '
            'class="ground"/>',
            *lines,
            *paper.parts,
            "</svg>\n",
        ]
    )


def _heads(paper: _Paper, drawing: Drawing) -> None:
    """The title, and the lanes' names."""
    paper.text(MARGIN, paper.y + 14, drawing.title, "title", "start")
    paper.y += 34
    for lane in drawing.lanes:
        middle = paper.middles[lane.key]
        paper.box(middle, paper.y, (LANE, 34), lane.color)
        paper.text(middle, paper.y + 22, lane.name, "name")
    paper.y += 34 + 20


def _step(paper: _Paper, step: Step) -> None:
    lines = textwrap.wrap(step.text, _WIDE)
    files = textwrap.wrap(step.file, _NARROW)
    height = 12 + LINE * len(lines) + SMALL * len(files)
    for lane in step.lanes:
        middle, y = paper.middles[lane], paper.y + 3
        paper.box(middle, paper.y, (BOX, height), paper.colors[lane])
        for line in lines:
            y += LINE
            paper.text(middle, y, line, "text")
        for line in files:
            y += SMALL
            paper.text(middle, y, line, "file")
    paper.y += height + 14


def _message(paper: _Paper, message: Message) -> None:
    """Arrows, each with the words above and the file below."""
    pairs = [
        (paper.middles[one], paper.middles[other])
        for one in message.senders
        for other in message.receivers
    ]
    across = min(abs(stop - start) for start, stop in pairs)
    lines = textwrap.wrap(message.text, across // 8 - 2)
    y = paper.y + 16 * len(lines) + 4
    for start, stop in pairs:
        middle, sign = (start + stop) // 2, 1 if stop > start else -1
        for number, line in enumerate(lines, 1):
            paper.text(middle, paper.y + 16 * number - 4, line, "said")
        paper.parts.append(
            f'<path d="M{start} {y}H{stop - 9 * sign}" class="arrow"/>'
            f'<path d="M{stop} {y}l{-10 * sign} -5v10z" class="head"/>'
        )
        paper.text(middle, y + SMALL, message.file, "file")
    paper.y = y + SMALL + 18


def _loop(paper: _Paper, loop: Loop) -> None:
    if loop.text:
        paper.open.append(paper.y)
        paper.text(MARGIN + 4, paper.y + 14, loop.text, "loop", "start")
        paper.y += 26
        return
    top, left = paper.open.pop(), MARGIN - 10
    paper.parts.insert(
        0,
        f'<rect x="{left}" y="{top - 6}" width="{paper.width - 2 * left}" '
        f'height="{paper.y - top}" rx="8" class="frame"/>',
    )
    paper.y += 14


def _style(colors: dict[str, tuple[str, str]]) -> str:
    text, less = colors["text"]
    sans, mono = "system-ui,sans-serif", "ui-monospace,monospace"
    fills = [
        f".{name}{{fill:{fill};stroke:{line}}}"
        for name, (fill, line) in colors.items()
        if name != "text"
    ]
    return "\n".join(
        [
            *fills,
            f".text,.said{{font:13px {sans};fill:{text}}}",
            f".title{{font:600 16px {sans};fill:{text}}}",
            f".name{{font:600 14px {sans};fill:{text}}}",
            f".loop{{font:italic 13px {sans};fill:{less}}}",
            f".file{{font:11px {mono};fill:{less}}}",
            f".life{{stroke:{less};stroke-dasharray:3 5;opacity:.6}}",
            f".frame{{fill:none;stroke:{less};stroke-dasharray:6 4}}",
            f".arrow{{stroke:{text};stroke-width:1.5;fill:none}}",
            f".head{{fill:{text}}}",
        ]
    )


if __name__ == "__main__":
    main()
