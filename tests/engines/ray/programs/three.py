"""Maps over one, two and three hosts, of which items are taken from the slow ones."""

import os
import random
import socket
import sys
import time

import numpy as np

import weft

EACH = ([], ["host2"], ["host2", "host3"])


def drawn(x):
    time.sleep(0.05 if x < 12 else 0)
    return random.random(), float(np.random.rand())


def threads(_):
    time.sleep(0.02)
    return socket.gethostname(), os.environ["OMP_NUM_THREADS"]


def uneven(x):
    time.sleep(0.03 if x % 40 < 12 else 0.002)
    return x * x


def survive():
    """Hosts are lost all the time, also while items are taken from them."""
    for number in range(6):
        print("MAP", number, flush=True)
        results = weft.map(uneven, range(400), machines=["host2", "host3"], retries=100)
        assert results == [x * x for x in range(400)], results
    print("done", flush=True)


def compare():
    expected = weft.map(drawn, range(90), seed=7, engine="serial")
    for machines in EACH:
        assert weft.map(drawn, range(90), seed=7, machines=[*machines, "host1"]) == expected
    # one worker on each host has both of its cores, two have one each
    for n, count in ((3, "2"), (6, "1")):
        found = set(weft.map(threads, range(60), n=n, machines=["host2", "host3"]))
        assert found == {(f"host{k}", count) for k in (1, 2, 3)}, (n, found)
    print("done", flush=True)


survive() if sys.argv[1:] == ["survive"] else compare()
