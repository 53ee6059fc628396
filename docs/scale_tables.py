"""The tables of docs/scale.md: what one call over hosts costs, from the functions that decide it.

python docs/scale_tables.py     placement.py, memory.py -> the tables between the page's marks
                                and benchmarks/results/simulation.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.engines.mpi import placement
from weft.engines.mpi.memory import HostMemory
from weft.engines.mpi.placement import WINDOW, Placement, Stream, cut_streams, cut_sum, ring_for

PAGE = Path(__file__).with_name("scale.md")
SIMULATION = PAGE.parent.parent / "benchmarks" / "results" / "simulation.json"
HOSTS = (2, 3, 4, 8, 9, 16, 32, 64, 128)
RANKS = (1, 2, 8, 64)
#: bytes of a large array, and of one of its numbers
LARGE, WIDTH = 100_000_000, 4
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


def filled(page: str) -> str:
    """The page with its tables as they are now."""
    tables = {
        "small": small,
        "large": large,
        "memory": memory,
        "simulated": simulated,
        "checked": checked,
    }
    return _TABLE.sub(lambda found: f"{found[1]}{tables[found[2]]()}{found[3]}", page)


def small() -> str:
    """What one exchange of the agents costs each of them."""
    rows = []
    for hosts in HOSTS:
        messages, parts = exchanged(hosts)
        how = "to every other" if hosts <= placement.DIRECT else "passed on"
        rows.append([hosts, how, placement.rounds(hosts), messages, parts])
    return table(("hosts", "parts go", "rounds", "messages a host sends", "parts in them"), rows)


def exchanged(hosts: int) -> tuple[int, int]:
    """How many messages an agent sends in an exchange, and how many hosts' parts are in them."""
    have = [{at} for at in range(hosts)]
    messages = parts = 0
    for turn in range(placement.rounds(hosts)):
        before = [set(own) for own in have]
        targets = placement.sends_to(hosts, 0, turn)
        sent = 1 if hosts <= placement.DIRECT else len(before[0])
        messages, parts = messages + len(targets), parts + sent * len(targets)
        for at in range(hosts):
            for source in placement.receives_from(hosts, at, turn):
                have[at] |= before[source]
    if any(len(all_parts) < hosts for all_parts in have):
        raise AssertionError(f"{hosts} hosts: an exchange leaves a host without some parts")
    return messages, parts


def large() -> str:
    """What 100 MB cost the host that sends most, after the exchange."""
    rows = []
    for hosts in HOSTS:
        counts, largest = [LARGE // WIDTH], ring_for(1).chunk
        chunks = cut_sum(counts, [WIDTH], hosts=hosts, largest=largest)
        sizes = [(chunk.stop - chunk.start) * WIDTH for chunk in chunks]
        own, others = sizes[::hosts], [s for k, s in enumerate(sizes) if k % hosts]
        messages = len(others) + len(own) * (hosts - 1)
        sent = sum(others) + sum(own) * (hosts - 1)
        held = max(sizes) * -(-WINDOW // hosts) * (hosts - 1)
        moved = [chunk for chunk in broadcast_chunks(hosts) if chunk.target is not None]
        rows.append(
            [
                hosts,
                f"{len(sizes)} of {shown(max(sizes))}",
                messages,
                shown(sent),
                shown(held),
                len(moved),
                shown(sum(chunk.length for chunk in moved)),
            ]
        )
    heads = ("hosts", "all_reduce: chunks", "messages", "bytes", "parts held")
    return table((*heads, "broadcast: messages", "bytes"), rows)


def broadcast_chunks(hosts: int) -> Iterable[placement.MoveChunk]:
    """The chunks of a broadcast as they pass the first host, where the root is."""
    placed = placement_of(hosts, 1)
    stream = Stream(0, 0, LARGE, None)
    return cut_streams([stream], placed, 0, largest=ring_for(1).chunk)


def memory() -> str:
    """The shared memory that a group has on each of its hosts."""
    rows = []
    for ranks in RANKS:
        ring = ring_for(ranks)
        sizes = [
            HostMemory.bytes_for(places=ranks + 1, most=ranks + 1, ranks=hosts * ranks, ring=ring)
            for hosts in (2, 16, 128)
        ]
        rows.append([ranks, f"{ring.slots} of {shown(ring.chunk)}", *map(shown, sizes)])
    heads = ("ranks on each host", "chunks of the ring", "2 hosts", "16 hosts", "128 hosts")
    return table(heads, rows)


def simulated() -> str:
    """A table's adds and gets on so many hosts, as benchmarks/simulate.py found them."""
    found = json.loads(SIMULATION.read_text())
    ranks = found["cluster"]["ranks"]
    rows = []
    for hosts, rules in found["hosts"].items():
        cells: list[object] = [hosts, int(hosts) * ranks]
        for outcome in rules.values():
            cells.append(f"{outcome['adds_per_second']:,.0f}")
            cells.append(f"{outcome['staleness']:.1f}")
        rows.append(cells)
    heads = ["hosts", "ranks"]
    for rule in next(iter(found["hosts"].values())):
        heads += [f"{rule}: adds per second", "staleness"]
    return table(heads, rows)


def checked() -> str:
    """The same beside real hosts."""
    found = json.loads(SIMULATION.read_text()).get("check", {})
    rows = []
    for hosts, row in found.items():
        for rule, pair in row.items() if hosts.isdigit() else ():
            if isinstance(pair, dict):
                (adds, expected), (stale, behind) = pair["adds"], pair["staleness"]
                rows.append(
                    [hosts, rule, f"{adds:.0f}", f"{expected:.0f}", f"{stale:.1f}", f"{behind:.1f}"]
                )
    heads = ("hosts", "rule", "adds per second: measured", "simulated")
    return table((*heads, "staleness: measured", "simulated"), rows)


def placement_of(hosts: int, ranks: int) -> Placement:
    """So many hosts with so many ranks each."""
    host_of = tuple(rank // ranks for rank in range(hosts * ranks))
    names = tuple(f"host{host}" for host in range(hosts))
    return Placement(tuple(range(hosts * ranks)), host_of, names)


def shown(size: int) -> str:
    """Bytes, in the unit that fits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            number = size / scale
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{size} bytes"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


if __name__ == "__main__":
    main()
