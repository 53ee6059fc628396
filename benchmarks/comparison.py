"""What a benchmark found: lines of weft's numbers beside another's, compared, shown and kept.

    a benchmark                        results/NAME.json        report.py
    peer -> one number per round  ->   lines, when, where   ->  docs/benchmarks.md

A line has the numbers of weft and of one other, one of each per round or turn. A ratio is taken
within a round, then its median over rounds counts: above 1, weft is faster, or needs less memory.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

#: peer -> one number per round
Row = Mapping[str, Sequence[float]]

SECONDS, BYTES, CORES = "seconds", "bytes", "cores"


@dataclass(frozen=True)
class Line:
    """One thing that weft did in each round, and what took its turn beside it."""

    section: str  #: empty where a benchmark has only one
    what: str
    ours: Sequence[float]  #: empty where weft was not asked for
    beside: str = ""  #: empty where weft stands alone
    theirs: Sequence[float] = ()
    unit: str = SECONDS
    #: how many times faster weft is to be; below 1: may be slower
    asked: float | None = None
    #: what weft's number is to stay below; then only this counts, and there is no ratio
    limit: float | None = None
    #: no peer, but work that others need not do: a half without the other half, a plain copy
    yardstick: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times faster weft is. None: one of the two is missing, or needs nothing."""
        pairs = list(zip(self.theirs, self.ours, strict=bool(self.theirs and self.ours)))
        if not pairs or self.limit is not None or min(map(min, pairs)) <= 0:
            return None
        return statistics.median(theirs / ours for theirs, ours in pairs)

    @property
    def holds(self) -> bool | None:
        """Whether what was asked is reached; None: nothing was asked, or weft was not there."""
        if self.limit is not None:
            return statistics.median(self.ours) < self.limit if self.ours else None
        return None if self.ratio is None or self.asked is None else self.ratio >= self.asked

    @property
    def our_median(self) -> str:
        return self._shown(self.ours)

    @property
    def their_median(self) -> str:
        return self._shown(self.theirs)

    def _shown(self, numbers: Sequence[float]) -> str:
        return UNITS[self.unit](statistics.median(numbers)) if numbers else ""

    @property
    def ratio_in_words(self) -> str:
        if self.ratio is None:
            return ""
        return f"{self.ratio:.3g} x" if self.ratio < 100 else f"{self.ratio:.0f} x"

    @property
    def asked_in_words(self) -> str:
        if self.limit is not None:
            return f"under {UNITS[self.unit](self.limit)}"
        if self.asked is None:
            return ""
        if self.asked < 1:
            return f"within {1 / self.asked:.3g} x"
        return "as fast" if self.asked == 1 else f"{self.asked:.3g} x faster"

    @property
    def holds_in_words(self) -> str:
        return {None: "", True: "yes", False: "no"}[self.holds]


@dataclass(frozen=True)
class Results:
    """What one run of a benchmark found. What was not recorded is empty."""

    lines: Sequence[Line]
    date: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False
    skipped: Sequence[str] = ()


def lines_of(
    section: str,
    what: str,
    row: Row,
    *,
    labels: Mapping[str, str],
    asked: Mapping[str, float] | None = None,
    yardsticks: Collection[str] = (),
    unit: str = SECONDS,
    limit: float | None = None,
) -> list[Line]:
    """A line for each that is beside weft in a row; one of weft alone, where nobody is."""
    alone = Line(section, what, row.get("weft", ()), unit=unit, limit=limit)
    return [
        dataclasses.replace(
            alone,
            beside=labels[peer],
            theirs=numbers,
            asked=(asked or {}).get(peer),
            yardstick=peer in yardsticks,
        )
        for peer, numbers in row.items()
        if peer != "weft"
    ] or [alone]


# shown


def table(lines: Iterable[Line]) -> str:
    """For a terminal: a line each, with a head for each section."""
    shown: list[str] = []
    section = what = None
    for line in lines:
        if line.section != section:
            heads = ("weft", "beside it", "", "ratio", "asked", "")
            shown += ["", in_columns(line.section, *heads)]
        name = "" if (line.section, line.what) == (section, what) else line.what
        section, what = line.section, line.what
        shown.append(in_columns(name, *cells(line)))
    return "\n".join(shown[1:])


def in_columns(*texts: str) -> str:
    what, ours, beside, theirs, ratio, asked, holds = texts
    line = f"{what:34}{ours:>10}   {beside:26}{theirs:>10}{ratio:>10}{asked:>15}  {holds}"
    return line.rstrip()


def cells(line: Line) -> list[str]:
    """What a table says of a line, after its name."""
    numbers = [line.our_median, line.beside, line.their_median]
    return numbers + [line.ratio_in_words, line.asked_in_words, line.holds_in_words]


def shown_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:  # so that it is not 1000 of the next smaller unit
            number = seconds / scale
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


UNITS: dict[str, Callable[[float], str]] = {
    SECONDS: shown_seconds,
    BYTES: lambda count: f"{count / 1e6:.1f} MB",
    CORES: lambda share: f"{100 * share:.2f} %",
}


# kept


def save(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in dataclasses.asdict(results).items() if key != "lines"}
    lines = ",\n".join(json.dumps(_without_defaults(line)) for line in results.lines)
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "lines": [\n{lines}\n ]\n}}\n')


def load(path: Path) -> Results:
    kept = json.loads(path.read_text())
    return Results(**{**kept, "lines": [Line(**line) for line in kept["lines"]]})


def _without_defaults(line: Line) -> dict[str, Any]:
    return {
        one.name: getattr(line, one.name)
        for one in dataclasses.fields(Line)
        if getattr(line, one.name) != one.default
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def this_machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": _named_in("/proc/cpuinfo", "model name") or platform.processor(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _named_in(file: str, name: str) -> str:
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed."""
    return {
        name: distribution.version
        for name in packages
        for distribution in importlib.metadata.distributions(name=name)
    }
