"""What comes back from two hosts, of which one lacks this folder, is what comes back from one."""

import importlib
import logging
import os
import random
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import near
import numpy as np

import weft

HERE = Path(__file__).parent


def where(_):
    return socket.gethostname()


def ray_map(fun, items, **options):
    return weft.map(fun, items, machines=["host2"], **options)


# both hosts take part, and one of them has nothing of this folder
found = ray_map(lambda _: (where(0), near.__file__, os.path.exists(HERE)), range(20))
assert {host for host, _, _ in found} == {"host1", "host2"}
assert {there for host, _, there in found if host == "host2"} == {False}

# modules: loaded, imported in a function only, changed, edited, classes, exceptions
assert ray_map(near.rated, range(8)) == [2 * x for x in range(8)]
assert ray_map(near.with_lazy, range(8)) == [x + 1000 for x in range(8)]
near.RATE = 10
assert ray_map(near.rated, range(8)) == [10 * x for x in range(8)]
source = HERE / "near.py"
text = source.read_text()
source.write_text(text.replace("return x * RATE", "return x * RATE + 0.5"))
os.utime(source, (1, 1))  # whatever the clock says
importlib.reload(near)
assert ray_map(near.rated, range(8)) == [2 * x + 0.5 for x in range(8)]
source.write_text(text)
importlib.reload(near)
assert ray_map(near.rated, range(8)) == [2 * x for x in range(8)]
readings = ray_map(lambda one: near.Reading(one.value + 1), [near.Reading(x) for x in range(8)])
assert readings == [near.Reading(x + 1) for x in range(8)]
try:
    ray_map(near.broken, range(4))
except near.Broken as error:
    assert (error.code, error.detail) == (error.args[0], "from the package")
    cause = error.__cause__
    assert isinstance(cause, weft.RemoteTraceback)
    assert cause.host in {"host1", "host2"}
    assert cause.item == error.code
    assert cause.host in cause.where
    assert "in broken" in cause.text
hidden = ray_map(near.by_text, range(8), on_error="return")
assert hidden[:4] == [0, 2, 4, 6]
for error in hidden[4:]:
    assert isinstance(error, ModuleNotFoundError)
    assert "'near_hidden' is on this host and did not travel to host2" in error.__notes__[0]


class Mine(Exception):
    pass


def raises(x):
    raise Mine("of the script", x)


mine = ray_map(raises, range(4), on_error="return")
assert [(type(one), one.args) for one in mine] == [(Mine, ("of the script", x)) for x in range(4)]

# what cannot travel is named, with its index among all
lock = threading.Lock()
failed = ray_map(lambda x: 1, [*range(6), lock], on_error="return")
assert failed[:6] == [1] * 6
assert "items[6] is a _thread.lock" in str(failed[6]), failed[6]
failed = ray_map(lambda x: threading.Lock() if x == 6 else x, range(8), on_error="return")
assert [failed[x] for x in (0, 5, 7)] == [0, 5, 7]
assert "results[6] is a _thread.lock" in str(failed[6])


# seeds: as on one host, whatever is taken by whom
def drawn(x):
    time.sleep(0.05 if x < 8 else 0)
    return random.random(), float(np.random.rand())


expected = weft.map(drawn, range(60), seed=7, engine="serial")
assert ray_map(drawn, range(60), seed=7) == expected

# arrays: writable, of any kind; shared ones once, read-only, over each host's shared memory
big = np.arange(300_000.0)
doubled = ray_map(lambda a: np.multiply(a, 2, out=a), [big] * 4 + [big[::2], big[:100]])
for one, of in zip(doubled, [big] * 4 + [big[::2], big[:100]], strict=True):
    assert np.array_equal(one, 2 * of)
    assert one.flags.writeable
assert np.array_equal(big, np.arange(300_000.0))


def shares(x, shared_data):
    array = shared_data["a"]
    return float(array.sum()) + x, array.flags.writeable


for total, writable in ray_map(shares, range(6), shared_data={"a": big}):
    assert total - big.sum() in range(6)
    assert not writable
sums = weft.distribute(lambda x: x.sum(axis=0), machines=["host2"])(np.ones((5, 1000)))
assert sums.tolist() == [5.0] * 1000

# the driver's state
os.environ["SET_BY_THE_PROGRAM"] = "yes"
np.seterr(divide="raise")
states = ray_map(
    lambda _: (os.environ.get("SET_BY_THE_PROGRAM"), np.geterr()["divide"], os.nice(0)), range(8)
)
assert states == [("yes", "raise", 0)] * 8
np.seterr(divide="warn")
threads = dict(ray_map(lambda _: (where(0), os.environ["OMP_NUM_THREADS"]), range(8)))
assert threads == {"host1": "1", "host2": "1"}, threads

# streams, handles, maps within and beside others
stream = weft.imap(lambda x: x * x, iter(range(10**9)), machines=["host2"])
assert [next(stream) for _ in range(20)] == [x * x for x in range(20)]
assert ray_map(abs, [-1, -2, -3]) == [1, 2, 3]
assert [next(stream) for _ in range(3)] == [400, 441, 484]
stream.close()
handles = [
    weft.map_async(lambda x: time.sleep(0.01) or -x, range(40), machines=["host2"])
    for _ in range(2)
]
assert [handle.wait() for handle in handles] == [[-x for x in range(40)]] * 2
nested = ray_map(lambda x: weft.map(abs, [-x, x], n=1), range(4))
assert nested == [[x, x] for x in range(4)]
assert ray_map(lambda x: x, []) == []
assert ray_map(lambda x: x, [5]) == [5]
assert len(ray_map(lambda x: x, np.zeros((3, 2)))) == 3

# output, logs and warnings come here, with the names of host and worker
logging.basicConfig(level=logging.INFO, format="LOG %(message)s", stream=sys.stdout)
warnings.simplefilter("always")


def speaks(x):
    print("printed", x)
    logging.getLogger("any").info("logged %s", x)
    warnings.warn(f"warned {x}", stacklevel=1)


ray_map(speaks, range(4))
weft.shutdown()
print("ended with", threading.active_count(), "thread")
