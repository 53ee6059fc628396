"""How nodes end: whoever is killed, nothing is left on any host, and nobody else's Ray is touched."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from tests.hosts import Hosts, Job
from tests.support import wait_until

#: none needs a key file on the hosts then
KEY = {"WEFT_KEY": "a key of many letters"}


def weft(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft", *arguments]


def find(hosts: Hosts, k: int, words: str) -> int:
    """The pid of the process of a host that has these words in its command line."""
    pids = [one.pid for one in hosts.processes(k) if words in one.command]
    return pids[0] if pids else 0


def open_both(hosts: Hosts) -> None:
    """Open a node on each host, of clusters of their own, at the same time."""
    jobs = [hosts.start_on(k, weft("open", "--port", "2718"), env=KEY) for k in (1, 2)]
    for job in jobs:
        outcome = job.wait()
        assert outcome.code == 0, outcome


def test_a_killed_watcher_and_a_killed_ray_start(two_hosts: Hosts) -> None:
    """Each does for the other: also for what Ray leaves, and the folder."""
    open_both(two_hosts)
    import os

    os.kill(find(two_hosts, 1, "node.watch"), signal.SIGKILL)
    os.kill(find(two_hosts, 2, "node.serve"), signal.SIGKILL)
    assert two_hosts.leave_nothing() == []
