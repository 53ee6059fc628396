"""Which path the numbers of a collective take."""

from itertools import product

import pytest

from weft.engines.local.collectives.carry_out import Path, choose_path


@pytest.mark.parametrize(
    ("open_paths", "chosen"),
    [
        ({"in_slots", "in_place", "pipelined", "reachable"}, Path.SLOTS),
        ({"in_place", "pipelined", "reachable"}, Path.IN_PLACE),
        ({"pipelined", "reachable"}, Path.PIPELINED),
        ({"reachable"}, Path.DIRECT),
        (set(), Path.ROUNDS),
    ],
)
def test_the_quickest_open_path_is_chosen(open_paths: set[str], chosen: Path) -> None:
    """Slots before sums in place before kernels before direct copies; rounds are always open."""
    names = ("in_slots", "in_place", "pipelined", "reachable")
    assert choose_path(**{name: name in open_paths for name in names}) is chosen


def test_a_closed_path_is_never_chosen() -> None:
    """Whatever is open, the path is one of those."""
    needs = (Path.SLOTS, Path.IN_PLACE, Path.PIPELINED, Path.DIRECT)
    for values in product((False, True), repeat=4):
        names = ("in_slots", "in_place", "pipelined", "reachable")
        path = choose_path(**dict(zip(names, values, strict=True)))
        assert path is Path.ROUNDS or values[needs.index(path)]
