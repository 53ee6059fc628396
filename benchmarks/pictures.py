"""A picture of what a benchmark found: how many times faster weft is, a mark for each other.

    a section
      one thing     ------+-----|--o---+-----    ratios on a logarithmic axis:
      another       --x---+-----|------+-----    left of the line at 1 weft is slower

Written as SVG without a plotting library: so the same results give the same file everywhere, a
test can compare it, and one file has the colours for a light and for a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from comparison import Line

WIDTH, LEFT, RIGHT = 840, 250, 24  # pixels: of the picture, of the names, beside the axis
HIGH = 20  # pixels: one row
LETTER = 7.0  # pixels: how wide one is, about

#: a colour for each other, and a shape, for those who do not see the colours
COLOURS = ("#2f81f7", "#e8710a", "#1a9e6c", "#b558c9", "#d6336c", "#8a7400", "#0a97a8", "#7d6ae8")
SHAPES = (
    "M-5,0a5,5 0 1 0 10,0a5,5 0 1 0 -10,0z",
    "M-4.5,-4.5h9v9h-9z",
    "M0,-6l6,6l-6,6l-6,-6z",
    "M0,-5.5l5.5,9.5h-11z",
    "M0,5.5l5.5,-9.5h-11z",
)
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.page { fill: #ffffff } .grid { stroke: #d8dee4 } .one { stroke: #1f2328; stroke-width: 1.5 }
.section { font-weight: 600 } .quiet { fill: #59636e } .hollow { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .page { fill: #161b22 } .grid { stroke: #30363d } .one { stroke: #e6edf3 }
  .quiet { fill: #9198a1 } .hollow { fill: #161b22 }
}
"""


def picture(title: str, lines: Sequence[Line]) -> str:
    """An SVG file's text; empty where there is no ratio to show."""
    compared = [line for line in lines if line.ratio is not None]
    if not compared:
        return ""
    marks = {name: number for number, name in enumerate(dict.fromkeys(x.beside for x in compared))}
    axis = Axis(compared)
    legend, top = drawn_legend(marks, compared)
    rows, bottom = drawn_rows(compared, marks, axis, top + 34)
    body = [
        *legend,
        text(axis.place(1) - 8, top + 12, "weft is slower", "quiet", anchor="end"),
        text(axis.place(1) + 8, top + 12, "weft is faster", "quiet"),
        *axis.drawn(top + 18, bottom),
        *rows,
    ]
    height = bottom + 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
            *body,
            "</svg>\n",
        ]
    )


class Axis:
    """From the last tick below all ratios to the first above; 1 is always there."""

    def __init__(self, compared: Sequence[Line]) -> None:
        ratios = [line.ratio for line in compared if line.ratio]
        asked = [line.asked for line in compared if line.asked]
        low, high = min([0.5, *ratios, *asked]), max([2, *ratios, *asked])
        # one tick more at both ends, so that no mark lies on the border
        steps = [step * 10.0**power for power in range(-9, 10) for step in (1, 2, 5)]
        first = max(place for place, step in enumerate(steps) if step < low)
        last = min(place for place, step in enumerate(steps) if step > high)
        self.ticks = steps[first : last + 1]

    def place(self, ratio: float) -> float:
        first, last = math.log(self.ticks[0]), math.log(self.ticks[-1])
        share = (math.log(ratio) - first) / (last - first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def drawn(self, top: int, bottom: int) -> list[str]:
        found = []
        for tick in self.ticks:
            x = self.place(tick)
            kind = "one" if math.isclose(tick, 1) else "grid"
            found.append(f'<path class="{kind}" d="M{x:.1f},{top}V{bottom}"/>')
            shown = f"{tick:g} x" if tick > 0.999 else f"1/{1 / tick:g} x"
            found.append(text(x, bottom + 16, shown, "quiet", anchor="middle"))
        return found


def drawn_legend(marks: dict[str, int], compared: Sequence[Line]) -> tuple[list[str], int]:
    """The legend, and where it ends."""
    yardsticks = {line.beside for line in compared if line.yardstick}
    entries = [(mark(number, name in yardsticks), name) for name, number in marks.items()]
    if yardsticks:
        entries.append(("", "(hollow: no peer, but a yardstick)"))
    if any(line.asked for line in compared):
        entries.append(
            ('<path d="M0,-7V7" stroke="#888888" stroke-width="2"/>', "asked, in the same colour")
        )
    found, x, y = [], 16.0, 22
    for shape, name in entries:
        length = 22 + LETTER * len(name) + 14
        if x + length > WIDTH:
            x, y = 16.0, y + HIGH
        found.append(f'<g transform="translate({x + 6:.1f},{y - 4})">{shape}</g>')
        found.append(text(x + 18, y, name))
        x += length
    return found, y + 8


def drawn_rows(
    compared: Sequence[Line], marks: dict[str, int], axis: Axis, y: int
) -> tuple[list[str], int]:
    """A row for each thing, under the names of their sections; and where they end."""
    found = []
    for section, of_section in groupby(compared, key=lambda line: line.section):
        if section:
            found.append(text(16, y + 4, section, "section"))
            y += HIGH
        for what, of_row in groupby(of_section, key=lambda line: line.what):
            found.append(text(LEFT - 10, y + 4, what, anchor="end"))
            for line in of_row:
                found += drawn_line(line, marks[line.beside], axis, y)
            y += HIGH
    return found, y


def drawn_line(line: Line, number: int, axis: Axis, y: int) -> list[str]:
    found = []
    if line.asked:
        x, colour = axis.place(line.asked), COLOURS[number % len(COLOURS)]
        found.append(f'<path d="M{x:.1f},{y - 7}v14" stroke="{colour}" stroke-width="2"/>')
    said = f"{line.what}, {line.beside}: {line.ratio_in_words}"
    shape = mark(number, line.yardstick, said)
    return [
        *found,
        f'<g transform="translate({axis.place(line.ratio or 1):.1f},{y})">{shape}</g>',
    ]


def mark(number: int, hollow: bool, said: str = "") -> str:
    """How one of the others is drawn everywhere."""
    colour, shape = COLOURS[number % len(COLOURS)], SHAPES[number % len(SHAPES)]
    look = 'class="hollow"' if hollow else f'fill="{colour}"'
    title = f"<title>{escape(said)}</title>" if said else ""
    return f'<path {look} stroke="{colour}" stroke-width="1.5" d="{shape}">{title}</path>'


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{style}>{escape(said)}</text>'
