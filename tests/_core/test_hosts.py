"""Hosts as users write them."""

from __future__ import annotations

import pytest

from weft._core.hosts import Host, hosts_of_ranks, parse_hostfile, parse_hosts, take
from weft.errors import LaunchError

A2, B1 = Host("a", 2), Host("b", 1)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b", (A2, B1)),
        (" a:2 , b:1 ", (A2, B1)),
        ("a,b,a", (A2, B1)),
        ("10.0.0.1:3", (Host("10.0.0.1", 3),)),
        ("[fe80::1]:3,node-1.example.org", (Host("[fe80::1]", 3), Host("node-1.example.org", 1))),
    ],
)
def test_hosts_on_the_command_line(text: str, hosts: tuple[Host, ...]) -> None:
    """A host without a number gets one rank; one that is named twice gets the sum."""
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "''"),
        ("a:2,,b", "''"),
        ("a:0", "'a:0'"),
        ("a:x", "'a:x'"),
        ("a:-1", "'a:-1'"),
        ("a b", "'a b'"),
        ("-x", "'-x'"),
        ("a;rm", "'a;rm'"),
    ],
)
def test_hosts_that_do_not_parse(text: str, wrong: str) -> None:
    """The entry is named, and an example is given."""
    with pytest.raises(LaunchError, match=r"expected, for example, --hosts a:2,b:2") as caught:
        parse_hosts(text)
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2\nb",
        "# machines\n\na:2  # the big one\nb:1\n",
        "a max_slots=4 slots=2\nb slots = 1 max_slots=2",
        "a\nb\na\n",
    ],
)
def test_hostfiles(text: str) -> None:
    """As Open MPI, MPICH and Intel MPI read them."""
    assert parse_hostfile(text, "f") == (A2, B1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a slots=2\nb slosts=2", "--hostfile f, line 2: 'b slosts=2' is no host with a number"),
        ("a:0", "--hostfile f, line 1: 'a:0' is no host with a number"),
        ("a slots=0", "line 1"),
        ("a b", "line 1: 'a b'"),
        ("# nobody\n", "--hostfile f names no host; expected a line such as `a slots=2`"),
    ],
)
def test_hostfiles_that_do_not_parse(text: str, told: str) -> None:
    """File and line are named, and what was expected."""
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(text, "f")
    assert told in str(caught.value)


def test_ranks_fill_one_host_after_the_other() -> None:
    """Fewer leave hosts out; more than there are slots are refused, with the slots."""
    assert take((A2, B1), None) == (A2, B1)
    assert take((A2, B1), 2) == (A2,)
    assert take((A2, Host("b", 4)), 3) == (A2, B1)
    assert hosts_of_ranks((A2, B1)) == ("a", "a", "b")
    with pytest.raises(LaunchError, match=r"-n 4: the hosts take 3 ranks \(a:2, b:1\); ask for"):
        take((A2, B1), 4)
