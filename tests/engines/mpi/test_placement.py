"""Which rank is where, and how bytes are cut and routed: every byte goes where it is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.engines.mpi.placement import (
    DIRECT,
    Placement,
    Stream,
    cut_streams,
    cut_sum,
    receives_from,
    ring_for,
    rounds,
    sends_to,
)

FOUR = Placement((0, 1, 2, 3), (1, 0, 1, 2), ("a", "b", "c"))
placements = st.lists(st.integers(0, 4), min_size=1, max_size=8).map(
    lambda hosts: Placement(tuple(range(len(hosts))), tuple(hosts), ("a", "b", "c", "d", "e"))
)


def test_hosts_are_ordered_by_their_lowest_ranks() -> None:
    """Also in a part of the group, whose ranks come in another order."""
    assert FOUR.order == (1, 0, 2)
    assert FOUR.hosts == ("b", "a", "b", "c")
    assert FOUR.ranks_on(1) == [0, 2]
    assert FOUR.most_on_a_host == 2
    part = FOUR.part([3, 2, 1])
    assert (part.world, part.hosts, part.order) == ((3, 2, 1), ("c", "b", "a"), (2, 1, 0))


def test_the_ring_stays_small() -> None:
    """However many ranks a host has, its chunks take some 64 MB, and at least 64 KB each."""
    assert ring_for(1) == (12, 1 << 20)
    for ranks in (2, 8, 64, 200):
        slots, chunk = ring_for(ranks)
        assert slots == 4 * (ranks + 2)
        assert chunk % 4096 == 0
        assert 1 << 16 <= chunk <= 1 << 20
        assert slots * chunk <= max(64 << 20, slots << 16)


@given(
    st.lists(st.tuples(st.integers(0, 3_000_000), st.sampled_from([1, 2, 4, 8, 16])), max_size=4),
    st.integers(1, 128),
)
def test_sums_are_cut_without_gaps(arrays: list[tuple[int, int]], hosts: int) -> None:
    """Each number is in one chunk, and no chunk is larger than allowed."""
    counts, widths = [count for count, _ in arrays], [width for _, width in arrays]
    chunks = cut_sum(counts, widths, hosts=hosts, largest=1 << 20)
    ends = [0] * len(arrays)
    for chunk in chunks:
        assert chunk.start == ends[chunk.array]
        assert (chunk.stop - chunk.start) * widths[chunk.array] <= 1 << 20
        ends[chunk.array] = chunk.stop
    assert ends == counts


@given(placements, st.data())
def test_chunks_come_from_where_they_were_sent_in_the_same_order(
    placement: Placement, data: st.DataObject
) -> None:
    """What one host sends to another is what that one receives from it, in the same order, and each
    rank's host gets all that it needs."""
    ranks = st.integers(0, len(placement.world) - 1)
    stream = st.builds(Stream, ranks, st.just(64), st.integers(0, 1000), st.none() | ranks)
    streams = data.draw(st.lists(stream, max_size=5))
    by_host = {
        host: list(cut_streams(streams, placement, host, largest=100)) for host in placement.order
    }
    for here, chunks in by_host.items():
        for there, others in by_host.items():
            sent = [chunk[:3] for chunk in chunks if chunk.target == there]
            assert sent == [chunk[:3] for chunk in others if chunk.source == here]
    for stream in streams:
        for rank in range(len(placement.world)):
            if stream.to in (None, rank) and rank != stream.rank:
                chunks = by_host[placement.host_of[rank]]
                got = sum(chunk.length for chunk in chunks if chunk.stream is stream)
                assert got == stream.length


def test_all_hosts_get_all_parts() -> None:
    """By one round up to eight hosts, by as many as the number has binary digits beyond."""
    assert [rounds(hosts) for hosts in (1, 2, DIRECT, 9, 16, 17, 128)] == [1, 1, 1, 4, 4, 5, 7]
    for hosts in (1, 2, 3, 8, 9, 16, 17, 100, 128):
        have = [{host} for host in range(hosts)]
        for turn in range(rounds(hosts)):
            before = [set(known) for known in have]
            for host in range(hosts):
                sources = receives_from(hosts, host, turn)
                assert all(host in sends_to(hosts, source, turn) for source in sources)
                for source in sources:
                    have[host] |= before[source] if hosts > DIRECT else {source}
        assert all(known == set(range(hosts)) for known in have)
