"""The picture of what benchmarks/simulate.py found: two plots over the number of hosts.

    adds per second and rank            staleness of a get
    |--o---o__                          |        __o
    |   x---x--x                        |   x---x--x
    +--1---8---128 hosts                +--1---8---128 hosts

Written as SVG, as benchmarks/pictures.py does and for its reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pictures import COLOURS, SHAPES, STYLE, text

WIDTH, HEIGHT = 840, 300  # pixels: of the picture
PLOT, TOP, BOTTOM = 320, 64, 250  # pixels: the width of a plot, and its upper and lower border
LEFTS = (70, 490)  # pixels: where each plot begins


def draw(found: Mapping[str, Any]) -> str:
    """Return the picture as the text of a file."""
    hosts = [int(number) for number in found["hosts"]]
    ranks = found["cluster"]["ranks"]
    rules = list(found["hosts"][str(hosts[0])])
    body = legend(rules)
    plots: tuple[tuple[str, Callable[[Any, int], float]], ...] = (
        ("adds per second of each rank", lambda one, n: one["adds_per_second"] / (n * ranks)),
        ("staleness of a get, in adds", lambda one, n: one["staleness"]),
    )
    for left, (title, value) in zip(LEFTS, plots, strict=True):
        rows = {
            rule: [value(found["hosts"][str(number)][rule], number) for number in hosts]
            for rule in rules
        }
        body += plot(left, title, hosts, rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img">',
            "<title>A table on 1 to 128 hosts, simulated</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
            *body,
            "</svg>\n",
        ]
    )


def legend(rules: Sequence[str]) -> list[str]:
    found, x = [], 16.0
    for number, rule in enumerate(rules):
        found += [shape(number, x + 6, 18), text(x + 18, 22, rule)]
        x += 40 + 7.0 * len(rule)
    return found


def plot(
    left: int, title: str, hosts: Sequence[int], rows: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return a plot: hosts on a logarithmic axis, values from 0 on."""
    highest = ceiling(max(max(row) for row in rows.values()))

    def x(number: int) -> float:
        return left + PLOT * math.log2(number) / max(1.0, math.log2(hosts[-1]))

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / highest

    found = [text(left, TOP - 16, title, "section")]
    for step in range(5):
        value = highest * step / 4
        found.append(f'<path class="grid" d="M{left},{y(value):.1f}h{PLOT}"/>')
        found.append(text(left - 8, y(value) + 4, f"{value:g}", "quiet", anchor="end"))
    for number in hosts:
        found.append(text(x(number), BOTTOM + 20, str(number), "quiet", anchor="middle"))
    found.append(text(left + PLOT / 2, BOTTOM + 40, "hosts", "quiet", anchor="middle"))
    for number, row in enumerate(rows.values()):
        points = [(x(at), y(value)) for at, value in zip(hosts, row, strict=True)]
        path = "L".join(f"{a:.1f},{b:.1f}" for a, b in points)
        colour = COLOURS[number]
        found.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        found += [shape(number, a, b) for a, b in points]
    return found


def shape(number: int, x: float, y: float) -> str:
    return (
        f'<g transform="translate({x:.1f},{y:.1f})">'
        f'<path d="{SHAPES[number]}" fill="{COLOURS[number]}"/></g>'
    )


def ceiling(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ... from a value on; 1 at least."""
    step = 1.0
    for factor in (2, 2.5, 2) * 6:
        if value <= step:
            break
        step *= factor
    return step
