"""The page on benchmarks: from the results that are kept to docs/benchmarks.md and its pictures.

    python benchmarks/report.py     benchmarks/results/*.json -> docs/benchmarks.md, docs/pictures/
                                    and the tables between the marks of docs/gpu.md

It measures nothing. What the page says of a date or a machine was kept when it was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import comparison
from comparison import BYTES, Line, Results
from pictures import picture

DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Benchmark:
    """One of the programs, and what a reader has to know of its rows."""

    name: str
    title: str
    about: str


BENCHMARKS = (
    Benchmark(
        "ground",
        "The ground",
        "How long meeting, sharing, locking, starting and failing take. Peers run in turn, each "
        "as a job of its own. `2 x import numpy`: two interpreters that only import NumPy.",
    ),
    Benchmark(
        "collectives",
        "Collectives",
        "float32 arrays, the time of the slowest rank. Peers run in turn, each as a job of its "
        "own. `shared`: weft's arrays are those of `weft.share`, the others' stay what they are. "
        "In gather each rank sends that much. gloo's all_reduce always works in place.",
    ),
    Benchmark(
        "tables",
        "Tables",
        "float32: `all` is 10 M elements, `rows` are 1,000 random rows out of 100,000 x 64. The "
        "time of the slowest worker while all work at once. NumPy uses an array of each worker's "
        "own, which no table can beat. Multiverso's times are constants, measured once on another "
        "day. Updaters and the training step run in one process.",
    ),
    Benchmark(
        "map",
        "Map",
        "Two workers that are ready. weft and one peer at a time take turns, so weft has a time "
        "of its own beside each. `in`: arrays that no call has seen. `given before`: arrays of "
        "`weft.share`, Ray's after `put`, Dask's after `scatter`, joblib's in files; in the row "
        "`theirs in call` the others' are those of `in`. `read 400 MB`: one array for all items, "
        "inherited by fork in Pool and ProcessPoolExecutor. `best schedule`: the sum of all items "
        "over two workers.",
    ),
    Benchmark(
        "functions",
        "Functions",
        "All parties of a row are ready at once and take turns. `two processes` know nothing of "
        "each other, which no library can beat. `given before`: an array of `weft.share`, a file "
        "that joblib maps, an array that Pool's processes inherited; `in the call`: a plain "
        "array. `distribute()` is that of synkhronos, of five PyTensor functions.",
    ),
    Benchmark(
        "machines",
        "Machines",
        "float32 arrays between two hosts, which are namespaces of this machine, joined by a "
        "bridge: they share its processor, and bytes between them pass through its memory, so "
        "only ratios count. The time of the slowest rank for one call. Peers run in turn, each as "
        "a job of its own, started by the same mpirun with the same options. mpi4py's calls are "
        "those for buffers. gloo's all_reduce works in place.",
    ),
    Benchmark(
        "machines_map",
        "Map over machines",
        "Two hosts as above, two workers on each, in a cluster of `weft open`. Ray's tasks and its "
        "Pool run in the same program and cluster, Dask in one of its own; they take turns. "
        "`best schedule`: the sum of all items over four workers. `weft, one host`: the local "
        "engine beside the engine ray on the same host.",
    ),
    Benchmark(
        "machines_tables",
        "Tables over machines",
        "Between the same two hosts: a rank gets and adds rows that are all on the other host. "
        "`bare bytes` are a Send and a Recv of as many bytes, without a table. While the owner "
        "computes it keeps the interpreter's lock in calls of two seconds. A model is synchronised "
        "by four ranks at once, beside ranks of which each sends it whole and receives one.",
    ),
    Benchmark(
        "gpu",
        "GPUs",
        "Ranks that share one GPU, by turns or under MPS; [GPUs](gpu.md) says what that is. "
        "float32 tensors on the GPU; a call ends when the GPU has nothing left to do, on the "
        "slowest rank. `torch, alone`: adding two such tensors, or copying one, while the other "
        "ranks wait. `device slots`, `host slots`, `staged`: the path, forced. Tables have 100 MB, "
        "and rows are 10,000 random ones out of 100,000 x 256. ResNet-32 trains on images of "
        "32 x 32; a batch is that of all ranks together, and `one process` trains on all of it. "
        "`on the host`: its images lie in shared memory, else on the driver's GPU.",
    ),
)

#: pages with tables of what was asked, each between a mark that names its benchmark and another
MARKED = ("gpu.md",)
_MARKS = re.compile(r"(<!-- asked: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

HEAD = """\
# Benchmarks

weft and its peers, measured side by side by the programs in `benchmarks/`. `make bench` runs them
all and then writes this page from `benchmarks/results/`; it is not edited by hand.

A time is the median over rounds. A ratio is the other's time divided by weft's, taken within a
round, and of these the median, so it may differ from the ratio of the two times: above 1 weft is
faster, below 1 the other is. Where it was settled how fast weft is to be, the column "asked" says
so: "within 1.3 x" means that weft may take 1.3 times as long. Times of different days or machines
are not to be compared, and those of one run vary; ratios vary less.
"""


def main() -> None:
    for path, content in files(kept()).items():
        (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / path).write_text(content)
        print(f"written: docs/{path}")


def kept() -> dict[str, Results]:
    """What the benchmarks that have run found when they last did."""
    paths = {one.name: comparison.RESULTS / f"{one.name}.json" for one in BENCHMARKS}
    return {name: comparison.load(path) for name, path in paths.items() if path.exists()}


def files(found: Mapping[str, Results]) -> dict[str, str]:
    """From what each benchmark found to all files of the report, by their paths under docs/. Of the
    pages with marks, which say more than figures, the rest stays as it is."""
    drawn = {
        benchmark.name: picture(f"{benchmark.title}: how many times faster weft is", results.lines)
        for benchmark in BENCHMARKS
        if (results := found.get(benchmark.name))
    }
    pictures = {picture_path(name): content for name, content in drawn.items() if content}
    marked = {name: DOCS / name for name in MARKED}
    filled_in = {name: filled(at.read_text(), found) for name, at in marked.items() if at.exists()}
    return {"benchmarks.md": page(found), **filled_in, **pictures}


def picture_path(name: str) -> str:
    return f"pictures/benchmark-{name}.svg"


def page(found: Mapping[str, Results]) -> str:
    named = [
        (f"{benchmark.title}, {line.section}" if line.section else benchmark.title, line)
        for benchmark in BENCHMARKS
        if benchmark.name in found
        for line in found[benchmark.name].lines
    ]
    parts = [HEAD, slower_than_peers(named), slower_than_yardsticks(named), not_holding(named)]
    parts += [section(benchmark, found.get(benchmark.name)) for benchmark in BENCHMARKS]
    return "\n".join(filter(None, parts))


def filled(text: str, found: Mapping[str, Results]) -> str:
    """A page with its tables of what was asked as they are now."""
    return _MARKS.sub(lambda marks: f"{marks[1]}{asked(found.get(marks[2]))}{marks[3]}", text)


def asked(results: Results | None) -> str:
    """What was asked of a benchmark, beside what was measured."""
    if results is None:
        return "Not measured.\n"
    heads = ("", "what", "weft", "beside it", "its", "ratio", "asked", "holds")
    rows = (
        [line.section, line.what, *comparison.cells(line)]
        for line in results.lines
        if line.holds is not None
    )
    said = "".join(f"- {one}\n" for one in circumstances(results))
    return f"{said}\n{markdown_table(heads, rows)}"


# what comes first: where weft is behind

#: lines, each with the name of the section it is from
Named = Sequence[tuple[str, Line]]


def slower_than_peers(named: Named) -> str:
    compared = [(place, line) for place, line in named if line.ratio and not line.yardstick]
    behind = [(place, line) for place, line in compared if is_behind(line)]
    if not compared:
        said = "No peer was measured.\n"
    elif not behind:
        said = f"In none of {counted(compared)} with a peer.\n"
    else:
        said = f"In {len(behind)} of {counted(compared)} with a peer:\n\n" + listed(
            (place, f"{line.what}: {line.beside} {lead(line)}, {both_medians(line)}")
            for place, line in behind
        )
    return f"## Where a peer is faster\n\n{said}"


def slower_than_yardsticks(named: Named) -> str:
    compared = [(place, line) for place, line in named if line.ratio and line.yardstick]
    behind = [(place, line) for place, line in compared if is_behind(line)]
    if not behind:
        return ""
    told = (
        "Some rows stand beside a yardstick that is no peer: work that has to be done in any\n"
        "case, a share of the work without the rest, or other work that is known better.\n"
        f"In {len(behind)} of {counted(compared)} weft needs more than its yardstick:\n"
    )
    heads = ("", "what", "weft", "yardstick", "its", "weft needs")
    rows = (
        [place, line.what, line.our_median, line.beside, line.their_median, times_as_much(line)]
        for place, line in behind
    )
    return f"### Beside yardsticks\n\n{told}\n{markdown_table(heads, rows)}"


def not_holding(named: Named) -> str:
    asked = [(place, line) for place, line in named if line.holds is not None]
    failed = [(place, line) for place, line in asked if not line.holds]
    if not asked:
        said = "Nothing that was asked has been measured.\n"
    elif not failed:
        said = f"All {len(asked)} things that were asked and measured hold.\n"
    else:
        said = (
            f"{len(failed)} of {len(asked)} things that were asked and measured:\n\n"
            + markdown_table(
                ("", "what", "asked", "measured"),
                ([place, line.what, demand(line), outcome(line)] for place, line in failed),
            )
        )
    return f"## What was asked and does not hold\n\n{said}"


def is_behind(line: Line) -> bool:
    return line.ratio is not None and line.ratio < 1


def counted(lines: Sequence[object]) -> str:
    return f"{len(lines)} comparison{'s' * (len(lines) != 1)}"


def lead(line: Line) -> str:
    """By how much the other is ahead."""
    times = 1 / (line.ratio or 1)
    much = f"{100 * (times - 1):.2g} %" if times < 1.1 else f"{times:.3g} times"
    return f"needs {much} less" if line.unit == BYTES else f"is {much} faster"


def times_as_much(line: Line) -> str:
    """What weft needs, compared with the other."""
    times = 1 / (line.ratio or 1)
    return f"{100 * (times - 1):.2g} % more" if times < 1.1 else f"{times:.3g} times as much"


def both_medians(line: Line) -> str:
    return f"{line.their_median} beside weft's {line.our_median}"


def demand(line: Line) -> str:
    if line.limit is not None:
        return line.asked_in_words
    link = {True: "of", False: "than"}[(line.asked or 1) < 1]
    return f"{line.asked_in_words} {'as' if line.asked == 1 else link} {line.beside}"


def outcome(line: Line) -> str:
    if line.limit is not None:
        return line.our_median
    return line.ratio_in_words + (f" ({times_as_much(line)})" if is_behind(line) else "")


def listed(items: Iterable[tuple[str, str]]) -> str:
    """A list for each place."""
    parts = []
    for place, of_place in groupby(items, key=lambda item: item[0]):
        parts.append(f"{place}:\n\n" + "".join(f"- {said}\n" for _, said in of_place))
    return "\n".join(parts)


# a benchmark's own section


def section(benchmark: Benchmark, results: Results | None) -> str:
    parts = [
        f"## {benchmark.title}\n\n{benchmark.about}\n",
        f"- program: `benchmarks/{benchmark.name}.py`\n"
        + "".join(f"- {said}\n" for said in circumstances(results)),
    ]
    lines = results.lines if results else []
    if any(line.ratio for line in lines):
        told = f"{benchmark.title}: how many times faster weft is"
        parts.append(f"![{told}]({picture_path(benchmark.name)})\n")
    for name, of_section in groupby(lines, key=lambda line: line.section):
        title = f"### {benchmark.title}: {name}\n\n" if name else ""
        parts.append(title + table(list(of_section)))
    return "\n".join(parts)


def circumstances(results: Results | None) -> list[str]:
    """When, where and with what it was measured, as far as that was recorded."""
    if results is None:
        return ["not measured"]
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    said = [
        f"date: {results.date or 'not recorded'}",
        f"machine: {machine_in_words(results) or 'not recorded'}",
        f"versions: {versions or 'not recorded'}",
    ]
    if results.quick:
        said.append("a quick run: fewer rounds and repetitions than usual")
    if results.skipped:
        said.append(f"not measured: {'; '.join(results.skipped)}")
    return said


def machine_in_words(results: Results) -> str:
    known = results.machine
    if not known:
        return ""
    memory = f"{known['memory'] / 2**30:.0f} GiB of memory" if "memory" in known else ""
    return ", ".join(
        str(part)
        for part in (
            f"{known['cores']} cores" if "cores" in known else "",
            known.get("processor", "processor not recorded"),
            memory or "memory not recorded",
            known.get("gpu", ""),
            known.get("system", "system not recorded"),
            f"Python {known['python']}" if "python" in known else "",
        )
        if part
    )


def table(lines: Sequence[Line]) -> str:
    """A row for each line; only the first of a thing says what it is."""
    heads = ("what", "weft", "beside it", "its", "ratio", "asked", "holds")
    rows, last = [], None
    for line in lines:
        rows.append([line.what if line.what != last else "", *comparison.cells(line)])
        last = line.what
    return markdown_table(heads, rows)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(heads), ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    main()
