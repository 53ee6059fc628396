"""The engine ray without machines: on a node of this program's own, then on the user's own Ray."""

import os
import sys
import threading

import numpy as np

import weft

# nobody has opened a node here: this program starts one, which ends with it
assert weft.map(abs, [-1, -2, 3], engine="ray") == [1, 2, 3]
assert weft.map(abs, [-1, -2, 3], engine="ray", n=1) == [1, 2, 3]
weft.shutdown()
assert threading.active_count() == 1

import ray  # noqa: E402

ray.init(
    num_cpus=2,
    include_dashboard=False,
    object_store_memory=100_000_000,
    logging_level="ERROR",
    log_to_driver=False,
    _temp_dir=sys.argv[1],
)
threads = {"n": 1, "engine": "ray"}
here = weft.map(lambda _: os.environ["OMP_NUM_THREADS"], [0], n=1)
assert weft.map(lambda _: os.environ["OMP_NUM_THREADS"], [0], **threads) == here  # not Ray's 1

# what Ray's store has no room for is an error, and not written to disk without a word
made = weft.map(lambda n: np.ones(n << 17), [1, 150, 2], engine="ray", on_error="return")
assert [type(one).__name__ for one in made] == ["ndarray", "OutOfMemory", "ndarray"]
assert "the result of item 1 has 157 MB" in str(made[1])
ray_, data = {"engine": "ray"}, {"shared_data": {"a": np.ones(150 << 17)}}
shared = lambda _, shared_data: 1  # noqa: E731
items = [np.ones(3), np.ones(150 << 17), np.ones(4)]
sizes = weft.map(len, items, engine="ray", on_error="return")
assert [sizes[0], sizes[2]] == [3, 4]
assert "items[1] has more bytes than the smallest of Ray's stores, 100 MB" in str(sizes[1])
large = np.ones(150 << 17)


def uses(_):
    return large


for words, call in (
    ("an array of shape (19660800,) that the items", lambda: weft.map(len, [large] * 2, **ray_)),
    ("an array of shape (19660800,) that the items", lambda: weft.map(shared, [1], **ray_, **data)),
    ("the function 'uses', with what it refers to,", lambda: weft.map(uses, [1], **ray_)),
):
    try:
        call()
    except weft.OutOfMemory as error:
        assert str(error).startswith(words), error
        assert "157 MB, and the smallest of Ray's stores" in str(error), error
    else:
        raise AssertionError(words)
# several that have together are sent one after the other
assert set(weft.map(np.sum, [np.ones(10 << 17)] * 20, engine="ray")) == {10.0 * (1 << 17)}

try:
    weft.map(abs, [1], machines=["host1"])
except weft.MachineUnavailable as error:
    assert "runs no node" in str(error)
weft.shutdown()
assert ray.is_initialized()  # it is the user's
ray.shutdown()
print("done")
