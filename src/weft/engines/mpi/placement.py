"""Where the ranks of a group are, and how a collective's bytes are cut and routed. Pure.

Hosts are numbered in the order of their first ranks in the job. Within a group they are ordered by
their lowest ranks there, and sums go in that order.

A reduction is cut into chunks; chunk k is summed by the agent of the k-th host, counted round and
round, which gets the others' partial sums and sends them the result:

    hosts      0     1     2
    chunk 0   sum <- . <-- .      then 0 -> 1, 0 -> 2
    chunk 1    . -> sum <- .      then 1 -> 0, 1 -> 2

so every host sends and receives 2 n (H - 1) / H bytes of n. What all hosts need of one (broadcast,
all_gather) goes along the ring of hosts, chunk after chunk, so that each host receives and sends it
once; what one host needs (gather, scatter) goes straight there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

#: hosts up to which every agent sends its part of a step to every other; from there on parts are
#: passed on, in as many rounds as the number of hosts has binary digits
DIRECT = 8
#: chunks of a sum that are under way at a time
WINDOW = 4
#: bytes of the largest and the smallest chunk, and of all chunks that a host holds
_LARGEST, _SMALLEST, _ALL = 1 << 20, 64 << 10, 64 << 20


@dataclass(frozen=True)
class Placement:
    """Tell which rank of a group is where."""

    #: by rank: its rank in the job
    world: tuple[int, ...]
    #: by rank: the number of its host
    host_of: tuple[int, ...]
    #: by the number of the host: its name
    names: tuple[str, ...]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the group's hosts, in the order of their lowest ranks."""
        return tuple(dict.fromkeys(self.host_of))

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Return the name of each rank's host."""
        return tuple(self.names[host] for host in self.host_of)

    def ranks_on(self, host: int) -> list[int]:
        """Return the group's ranks on a host."""
        return [rank for rank, its in enumerate(self.host_of) if its == host]

    @cached_property
    def most_on_a_host(self) -> int:
        return max(map(self.host_of.count, self.order))

    def part(self, ranks: Sequence[int]) -> Placement:
        """Return the placement of some of the ranks, as a group in this order."""
        world = tuple(self.world[rank] for rank in ranks)
        return Placement(world, tuple(self.host_of[rank] for rank in ranks), self.names)


class Ring(NamedTuple):
    """Tell how many chunks of how many bytes a host holds for a group."""

    slots: int
    chunk: int


def ring_for(most_on_a_host: int) -> Ring:
    """Return the chunks that each host of a group holds: for each rank WINDOW of its numbers, and
    as many partial sums and results. The same on all hosts."""
    slots = (most_on_a_host + 2) * WINDOW
    return Ring(slots, max(_SMALLEST, min(_LARGEST, _ALL // slots // 4096 * 4096)))


class SumChunk(NamedTuple):
    """Consecutive numbers of one array of a reduction."""

    array: int
    start: int
    stop: int


def cut_sum(
    counts: Sequence[int], widths: Sequence[int], *, hosts: int, largest: int
) -> list[SumChunk]:
    """Cut arrays of so many numbers, of so many bytes each while they are summed, into chunks:
    small enough that each host sums some, and not smaller than pays."""
    total = sum(count * width for count, width in zip(counts, widths, strict=True))
    size = max(_SMALLEST, min(largest, total // (2 * hosts)))
    chunks = []
    for array, (count, width) in enumerate(zip(counts, widths, strict=True)):
        step = max(1, size // width)
        chunks += [SumChunk(array, at, min(at + step, count)) for at in range(0, count, step)]
    return chunks


class Stream(NamedTuple):
    """Bytes of one rank's buffer that others need."""

    rank: int
    start: int
    length: int
    #: who needs them; None for all ranks
    to: int | None


class MoveChunk(NamedTuple):
    """A part of a stream, as it passes one host."""

    stream: Stream
    start: int
    length: int
    #: the host that it comes from, None for this one; and the host that it goes on to
    source: int | None
    target: int | None


def cut_streams(
    streams: Sequence[Stream], placement: Placement, host: int, *, largest: int
) -> Iterator[MoveChunk]:
    """Yield the chunks that a host reads, passes on or writes, in the order in which all hosts do.

    A chunk of each stream in turn, so that all hosts have something to send.
    """
    order = placement.order
    at = order.index(host)
    longest = max((stream.length for stream in streams), default=0)
    for offset in range(0, longest, largest):
        for stream in streams:
            length = min(largest, stream.length - offset)
            if length <= 0:
                continue
            home = placement.host_of[stream.rank]
            if stream.to is None:
                source = None if home == host else order[at - 1]
                following = order[(at + 1) % len(order)]
                target = None if following == home else following
            else:
                away = placement.host_of[stream.to]
                if host not in (home, away):
                    continue
                source = home if host != home else None
                target = away if host == home != away else None
            yield MoveChunk(stream, stream.start + offset, length, source, target)


def rounds(hosts: int) -> int:
    """Return in how many rounds all hosts get a small part of each."""
    return 1 if hosts <= DIRECT else (hosts - 1).bit_length()


def sends_to(hosts: int, place: int, turn: int) -> list[int]:
    """Return the places that a host, at `place` in the order of hosts, sends to in a round. It
    sends what it has: its own part and after n rounds those of the 2**n - 1 hosts before it."""
    if hosts <= DIRECT:
        return [other for other in range(hosts) if other != place]
    return [(place + (1 << turn)) % hosts]


def receives_from(hosts: int, place: int, turn: int) -> list[int]:
    """Return the places that a host gets parts from in a round."""
    if hosts <= DIRECT:
        return sends_to(hosts, place, turn)
    return [(place - (1 << turn)) % hosts]
