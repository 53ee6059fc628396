"""Arrays that several items use cross to the other host once, are one memory there, and are gone
when their maps are over."""

import signal
import socket
import time
from pathlib import Path

import numpy as np

import weft

BIG = np.arange(2_500_000.0)  # 20 MB
BOTH = {"machines": ["host2"]}
#: of these the first are slow, so that the second host takes some that the first one has got
NUMBERS = range(60)


def bytes_sent():
    """What this host has sent to others."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line]
    return int(line.partition(":")[2].split()[8])


def use(array, number):
    before, own = array[:5].copy(), before_or(array, number)
    time.sleep(0.05 if number < 20 else 0.005)
    assert (array[:5] == own).all()  # what another worker writes is not seen here
    if array.flags.writeable:
        array[:5] = before
    return socket.gethostname(), memory_of(array), before.sum() + number


def before_or(array, number):
    """Write to an array, if that may be. Return what it has then."""
    if array.flags.writeable:
        array[:5] = -number
    return array[:5].copy()


def memory_of(array):
    """The file that is mapped where an array lies."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return device, inode
    return None


def crosses_once(call):
    before = bytes_sent()
    results = call()
    crossed = bytes_sent() - before
    assert 1 <= crossed / BIG.nbytes < 1.3, crossed / BIG.nbytes
    assert [total for _, _, total in results] == [10.0 + number for number in NUMBERS]
    on_second = sum(host == "host2" for host, _, _ in results)
    assert len({(host, memory) for host, memory, _ in results}) == 2
    return on_second


weft.map(abs, NUMBERS, **BOTH)
pairs = [(BIG, number) for number in NUMBERS]
taken = crosses_once(lambda: weft.map(lambda pair: use(*pair), pairs, **BOTH))
assert taken > len(NUMBERS) / 2, taken
crosses_once(lambda: list(weft.imap(lambda pair: use(*pair), iter(pairs), **BOTH)))
crosses_once(lambda: weft.map(use, [BIG] * len(NUMBERS), NUMBERS, **BOTH))
held = [{"deep": [BIG]}] * len(NUMBERS)
crosses_once(lambda: weft.map(lambda one, k: use(one["deep"][0], k), held, NUMBERS, **BOTH))
crosses_once(lambda: weft.map(lambda number: use(BIG, number), NUMBERS, **BOTH))
fixed = BIG.copy()
fixed.flags.writeable = False
crosses_once(lambda: weft.map(lambda pair: use(*pair), [(fixed, k) for k in NUMBERS], **BOTH))
data = {"shared_data": {"array": BIG}}
crosses_once(
    lambda: weft.map(
        lambda number, shared_data: use(shared_data["array"], number), NUMBERS, **data, **BOTH
    )
)
# one array in many items is no reason to send these one at a time, nor is it that of two hosts
assert weft.map(lambda pair: pair[1], [(BIG, k) for k in range(5000)], **BOTH) == [*range(5000)]
assert BIG[:5].sum() == 10
shared = weft.share(BIG)
assert [one.sum() for one in weft.map(lambda one: one[:5] + 1, [shared] * 9, **BOTH)] == [15.0] * 9
assert weft.map(len, [BIG] * 3 + [BIG[::2]] * 3, **BOTH) == [len(BIG)] * 3 + [len(BIG) // 2] * 3
failed = weft.map(lambda pair: 1, [(BIG, 1), (BIG, signal.signal)], on_error="return", **BOTH)
assert failed[0] == 1


def written_again():
    buffer = np.zeros(100_000)
    for number in range(40):
        buffer[:] = number
        yield buffer


# one array that a generator writes to again and again: each item has what it was when it was sent
seen = list(weft.imap(lambda one: float(one[0] + 0 * one.sum()), written_again(), ahead=1, **BOTH))
assert seen == [float(number) for number in range(40)], seen
print("done", flush=True)
signal.pause()
