"""`weft.share`: arrays in memory that several processes see."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import HANGS, run_python, run_ranks, wait_until
from weft.engines.base import Group
from weft.errors import InvalidType, OutOfMemory, SegmentGone

READER = """
import pickle, sys
import numpy as np
import weft
array = pickle.loads(sys.stdin.buffer.read())
"""


def in_another_process(array: Any, code: str) -> str:
    """What an unrelated process prints about an array that it unpickles."""
    done = subprocess.run(
        [sys.executable, "-c", READER + textwrap.dedent(code)],
        input=pickle.dumps(array),
        capture_output=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(24)[::2],
        np.zeros((0, 5), np.float32),
        np.array(3.5),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array(["ab", "c"]),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.arange(3, dtype=np.float16),
        np.arange(4, dtype=">i8"),
    ],
    ids=lambda a: f"{a.dtype}-{a.shape}",
)
def test_a_shared_array_equals_its_source(array: np.ndarray[Any, Any]) -> None:
    """Any shape, order and dtype without objects; the same dtype, and equal after a pickle."""
    shared = weft.share(array)
    assert isinstance(shared, np.ndarray)
    assert (shared.dtype, shared.shape) == (array.dtype, array.shape)
    assert np.array_equal(shared, array)
    loaded = pickle.loads(pickle.dumps(shared))
    assert (loaded.dtype, loaded.shape, loaded.strides) == (
        array.dtype,
        array.shape,
        shared.strides,
    )
    assert np.array_equal(loaded, array)
    if array.size:
        assert np.shares_memory(loaded, shared)
        assert not np.shares_memory(shared, array)


def test_lists_and_tensors_can_be_shared() -> None:
    """What NumPy can read can be shared; torch works on the memory itself."""
    torch = pytest.importorskip("torch")
    assert weft.share([1, 2, 3]).sum() == 6
    shared = weft.share(torch.arange(6.0))
    tensor = torch.from_numpy(shared)
    tensor += 1
    assert shared.tolist() == [1, 2, 3, 4, 5, 6]


def test_slices_travel_as_references() -> None:
    """A view pickles as a small reference to the same memory, whatever its strides."""
    shared = weft.share(np.arange(1_000_000))
    for view in (shared[10:20], shared[::-3], shared.reshape(1000, 1000)[:, 5], shared[7:7]):
        data = pickle.dumps(view)
        assert len(data) < 1000
        loaded = pickle.loads(data)
        assert np.array_equal(loaded, view)
        assert view.size == 0 or np.shares_memory(loaded, shared)


def test_results_of_arithmetic_are_ordinary() -> None:
    """What is computed from a shared array has its own memory and pickles by value."""
    shared = weft.share(np.arange(4.0))
    result = shared + 1
    assert type(result) is np.ndarray
    assert isinstance(shared.sum(), np.float64)
    assert np.add(shared, 1, out=shared) is shared
    for made in (shared.copy(), copy.deepcopy(shared), np.sort(shared)):
        assert np.array_equal(pickle.loads(pickle.dumps(made)), made)
        assert not np.shares_memory(made, shared)


def test_unrelated_processes_see_the_same_memory() -> None:
    """A process that shares nothing but the user writes; this one sees it. Nothing is copied."""
    shared = weft.share(np.zeros(25_000_000, np.float32))
    out = in_another_process(
        shared,
        """
        status = open("/proc/self/status").read()
        private = int(status.split("RssAnon:")[1].split()[0])
        again = pickle.loads(pickle.dumps(array))
        array[5] = 42
        print(private < 60_000, np.shares_memory(array, again), array.shape, array.flags.writeable)
        """,
    )
    assert out == "True True (25000000,) True"
    assert shared[5] == 42


def test_readonly_holds_everywhere() -> None:
    """With readonly=True nobody writes, here or where it is unpickled; the source is untouched."""
    source = np.arange(4)
    shared = weft.share(source, readonly=True)
    with pytest.raises(ValueError, match="read-only"):
        shared[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        shared.flags.writeable = True
    source[0] = 9
    assert shared[0] == 0
    out = in_another_process(
        shared,
        """
        try:
            array.flags.writeable = True
        except ValueError:
            print(array.flags.writeable, array[:2].flags.writeable, array.tolist())
        """,
    )
    assert out == "False False [0, 1, 2, 3]"
    assert np.shares_memory(pickle.loads(pickle.dumps(shared[1:])), shared)


def test_sharing_again_returns_the_same_memory() -> None:
    """An array that is shared already is not copied; a result computed from one is."""
    shared = weft.share(np.arange(4))
    assert np.shares_memory(weft.share(shared), shared)
    frozen = weft.share(shared, readonly=True)
    assert np.shares_memory(frozen, shared)
    assert shared.flags.writeable
    assert not np.shares_memory(weft.share(shared + 1), shared)


def test_objects_cannot_be_shared() -> None:
    """The error names the dtype and what is expected."""
    for wrong in (
        np.array([object()]),
        [{}],
        np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]),
    ):
        with pytest.raises(InvalidType, match="Python objects"):
            weft.share(wrong)
    with pytest.raises(InvalidType, match=r"share\(\) got NoneType"):
        weft.share(None)


def test_a_mask_is_not_lost_silently() -> None:
    """A masked array is refused: its values alone would mean something else."""
    with pytest.raises(InvalidType, match=r"got MaskedArray with a mask.*filled"):
        weft.share(np.ma.array([1.0, 999.0], mask=[0, 1]))


def test_more_than_memory_holds() -> None:
    """Sharing what does not fit is OutOfMemory before anything is touched."""
    huge = np.broadcast_to(np.zeros(1), (10**13,))
    with pytest.raises(OutOfMemory, match="free"):
        weft.share(huge)


LIFETIME = """
import gc, os, pickle, subprocess, sys, time
import numpy as np
import weft
from weft.engines.local.memory import server as arena
from weft.engines.local.memory import blocks

arena.WARM_SECONDS = blocks.WARM_SECONDS = 1.0  # so that they need not wait for longer

def reserved():
    files = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            target, status = os.readlink(path), os.stat(path)
        except OSError:  # the segment server's thread has closed it since
            continue
        if target.startswith(("/memfd:weft", "/dev/shm")):
            files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())

def settle(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition(), reserved()
"""


def test_memory_returns_with_the_last_view() -> None:
    """A slice or tensor of a slice keeps the memory; when the last is gone it goes back."""
    outcome = run_python(
        LIFETIME
        + """
shared = weft.share(np.ones(10_000_000))
view = np.asarray(shared[5:10])
del shared
gc.collect()
time.sleep(1.3)
assert reserved() >= 80_000_000 and view.sum() == 5
del view
settle(lambda: reserved() < 20_000_000)
import threading
settle(lambda: threading.active_count() == 1)
print("returned")
""",
    )
    assert outcome.out == "returned\n", outcome


def test_memory_is_reused_at_once() -> None:
    """Sharing array after array of one size takes the memory of one."""
    outcome = run_python(
        LIFETIME
        + """
arena.WARM_SECONDS = blocks.WARM_SECONDS = 60.0  # and on a busy machine no loop takes that long
addresses = set()
for _ in range(20):
    shared = weft.share(np.ones(5_000_000))
    addresses.add(shared.ctypes.data)
    del shared
    assert reserved() < 100_000_000
print(len(addresses))
""",
    )
    assert outcome.out == "1\n", outcome


def test_another_process_keeps_the_memory() -> None:
    """The last view may be elsewhere: its memory is not reused while it is seen, and returns when
    that process drops it, ends, or is killed."""
    outcome = run_python(
        LIFETIME
        + """
HOLDER = '''
import pickle, sys, weft
array = pickle.load(sys.stdin.buffer)
print(array.sum(), flush=True)
how = sys.stdin.buffer.readline().strip()
print(array.sum(), flush=True)
if how == b"drop":
    del array
    print("dropped", flush=True)
    sys.stdin.buffer.readline()
'''
for how in (b"drop", b"end", b"kill"):
    shared = weft.share(np.ones(10_000_000))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=-1, stdout=-1)
    pickle.dump(shared, holder.stdin); holder.stdin.flush()
    assert holder.stdout.readline() == b"10000000.0\\n"
    del shared
    other = weft.share(np.zeros(10_000_000))  # must not land in the same memory
    time.sleep(1.2)
    assert reserved() >= 160_000_000
    if how == b"kill":
        holder.kill()
    else:
        holder.stdin.write(how + b"\\n"); holder.stdin.flush()
        assert holder.stdout.readline() == b"10000000.0\\n"
    settle(lambda: reserved() < 100_000_000)
    holder.kill(); holder.communicate()
    del other
print("returned")
""",
    )
    assert outcome.out == "returned\n", outcome


def test_a_pickle_keeps_the_memory_until_it_is_loaded() -> None:
    """The sender may drop its array right after pickling it."""
    outcome = run_python(
        LIFETIME
        + """
data = pickle.dumps(weft.share(np.ones(10_000_000)))
gc.collect()
others = [weft.share(np.zeros(10_000_000)) for _ in range(2)]
array = pickle.loads(data)
assert array.sum() == 10_000_000
second = pickle.loads(data)
assert np.shares_memory(array, second)
del array, second, others
settle(lambda: reserved() < 20_000_000)
try:
    pickle.loads(data)
except weft.WeftError as error:
    print(type(error).__name__)
""",
    )
    assert outcome.out == "SegmentGone\n", outcome


def test_an_array_outlives_its_owner() -> None:
    """When the process that shared it ends, others keep it and can hand it on."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pickle, sys, weft, numpy as np\n"
            "data = pickle.dumps(weft.share(np.arange(1000)))\n"
            "sys.stdout.buffer.write(data); sys.stdout.flush(); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    array = pickle.load(owner.stdout)
    owner.kill()
    owner.communicate()
    assert array.sum() == 499_500
    out = in_another_process(array, "array[0] = 1; print(array.sum())")
    assert out == "499501"
    assert array[0] == 1


def test_a_pickle_outlives_the_owner_of_its_memory() -> None:
    """The owner ends between pickling and unpickling: who pickled it hands it on instead."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pickle, sys, weft, numpy as np\n"
            "data = pickle.dumps(weft.share(np.arange(1000)))\n"
            "sys.stdout.buffer.write(data); sys.stdout.flush(); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    array = pickle.load(owner.stdout)
    data = pickle.dumps(array)
    owner.kill()
    owner.communicate()
    done = subprocess.run(
        [sys.executable, "-c", READER + "print(array.sum())"],
        input=data,
        capture_output=True,
        timeout=HANGS,
    )
    assert done.stdout == b"499500\n", done.stderr.decode()


def test_a_reference_to_an_ended_owner_is_an_error(tmp_path: Path) -> None:
    """Unpickling after the only holder has ended says so; it does not hang."""
    outcome = run_python(
        "import pickle, sys, weft, numpy as np\n"
        "open(sys.argv[1], 'wb').write(pickle.dumps(weft.share(np.arange(10))))",
        str(tmp_path / "stale"),
    )
    assert outcome.code == 0, outcome
    with pytest.raises(SegmentGone, match="keep the array alive where it was shared"):
        pickle.loads((tmp_path / "stale").read_bytes())


def test_many_arrays_take_few_descriptors() -> None:
    """Three thousand shared arrays live within a limit of 1,024 descriptors, here and there."""
    arrays = [weft.share(np.full(100, number)) for number in range(3000)]
    before = len(os.listdir("/proc/self/fd"))
    assert before < 60
    out = in_another_process(
        arrays,
        "import os; print(len(array), int(array[-1][0]), len(os.listdir('/proc/self/fd')) < 60)",
    )
    assert out == "3000 2999 True"
    del arrays
    gc.collect()


def test_two_processes_attach_each_others_arrays_at_once() -> None:
    """Ranks that attach from each other at the same time do not wait for each other in a circle."""

    def body(group: Group) -> float:
        import numpy as np

        folder = os.environ["WEFT_TEST_FOLDER"]
        mine = [weft.share(np.full(1000, group.rank * 100 + k)) for k in range(50)]
        with open(f"{folder}/arrays{group.rank}", "wb") as file:
            pickle.dump(mine, file)
        group.barrier()
        total = 0.0
        for other in range(group.size):
            with open(f"{folder}/arrays{other}", "rb") as file:
                total += sum(float(array[0]) for array in pickle.load(file))
        group.barrier()
        return total

    expected = sum(rank * 100 + k for rank in range(3) for k in range(50))
    assert run_ranks(3, body) == [expected] * 3


def test_a_forked_child_shares_for_itself() -> None:
    """A child sees what it inherited, and what it shares does not land in the parent's memory."""
    outcome = run_python(
        """
import os, gc, numpy as np, weft
kept = weft.share(np.full(1000, 1.0))
freed = weft.share(np.full(1000, 2.0))
del freed
pid = os.fork()
if pid == 0:
    mine = weft.share(np.full(1000, 3.0))
    kept[0] = 5
    del kept
    gc.collect()
    os._exit(0 if mine.sum() == 3000 else 1)
assert os.waitpid(pid, 0)[1] == 0
again = weft.share(np.full(1000, 4.0))
assert (kept[0], kept[1], again.sum()) == (5, 1, 4000)
print("apart")
"""
    )
    assert outcome.out == "apart\n", outcome


def test_threads_share_and_attach_at_once() -> None:
    """Arrays made, pickled, loaded and dropped by several threads keep their values."""
    outcome = run_python(
        """
import pickle, threading, numpy as np, weft
wrong = []
def work(seed):
    rng = np.random.default_rng(seed)
    for step in range(300):
        value = seed * 1000 + step
        array = pickle.loads(pickle.dumps(weft.share(np.full(rng.integers(1, 5000), value))))
        if not (array == value).all():
            wrong.append((seed, step))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong)
"""
    )
    assert outcome.out == "[]\n", outcome


def test_the_segment_server_ends_when_it_has_nothing_to_serve() -> None:
    """No thread and no socket stay after the last shared array is gone."""
    import threading

    shared = weft.share(np.arange(10))
    assert "weft segment server" not in [thread.name for thread in threading.enumerate()]
    loaded = pickle.loads(pickle.dumps(shared))
    assert "weft segment server" in [thread.name for thread in threading.enumerate()]
    del shared, loaded
    wait_until(lambda: "weft segment server" not in [t.name for t in threading.enumerate()])


def test_releases_are_not_lost_while_the_owner_is_busy() -> None:
    """An owner that computes without a pause gets thousands of arrays back afterwards."""
    outcome = run_python(
        """
import mmap, pickle, subprocess, sys, tempfile, time, numpy as np, weft
from weft.engines.local.memory import blocks
USER = '''
import mmap, pickle, sys, weft
with open(sys.argv[1], "r+b") as file:
    dropped = mmap.mmap(file.fileno(), 1)
arrays = pickle.load(sys.stdin.buffer)
print("loaded", flush=True)
sys.stdin.buffer.readline()
while arrays:
    arrays.pop()
dropped[0] = 1
print("dropped", flush=True)
sys.stdin.buffer.readline()
'''
with tempfile.NamedTemporaryFile() as file:
    file.write(bytes(1)); file.flush()
    dropped = mmap.mmap(file.fileno(), 1)
    arrays = [weft.share(np.full(100, float(k))) for k in range(3000)]
    user = subprocess.Popen([sys.executable, "-c", USER, file.name], stdin=-1, stdout=-1)
    pickle.dump(arrays, user.stdin); user.stdin.flush()
    assert user.stdout.readline() == b"loaded\\n"
del arrays
user.stdin.write(b"x\\n"); user.stdin.flush()
sys.setswitchinterval(1000)  # the segment server's thread gets no turn
end = time.monotonic() + 60
while not dropped[0]:
    assert time.monotonic() < end
sys.setswitchinterval(0.005)
assert user.stdout.readline() == b"dropped\\n"
deadline = time.monotonic() + 60
server = blocks._here.server
while server._remote_references and time.monotonic() < deadline:
    time.sleep(0.01)
left = len(server._remote_references)
user.communicate(b"x\\n")
print(left)
"""
    )
    assert outcome.out == "0\n", outcome


def test_a_segment_server_without_descriptors_recovers() -> None:
    """When no descriptor is left the caller waits; when there is one again it is served."""
    outcome = run_python(
        """
import os, pickle, resource, subprocess, sys, threading, numpy as np, weft
from weft.engines.local.processes.channel import Listener

accept, refused = Listener.accept, threading.Event()

def accept_or_tell(listener):
    try:
        return accept(listener)
    except BaseException:
        refused.set()
        raise

Listener.accept = accept_or_tell
data = pickle.dumps(weft.share(np.full(1000, 7.0)))
soft = resource.getrlimit(resource.RLIMIT_NOFILE)
user = subprocess.Popen(
    [sys.executable, "-c", "import pickle, sys, weft, numpy\\n"
     "data = sys.stdin.buffer.readline()\\nprint('ready', flush=True)\\n"
     "print(pickle.loads(bytes.fromhex(data.decode())).sum(), flush=True)"],
    stdin=-1, stdout=-1)
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, soft[1]))
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
user.stdin.write(data.hex().encode() + b"\\n"); user.stdin.flush()
assert user.stdout.readline() == b"ready\\n"
print(refused.wait(60))
for descriptor in held:
    os.close(descriptor)
print(user.stdout.readline().decode().strip())
user.communicate()
"""
    )
    assert outcome.out == "True\n7000.0\n", outcome


def test_a_large_mapping_stays_for_a_while() -> None:
    """A process that drops somebody's large array can have it again without mapping it anew; when
    it does not, the memory is given back."""
    outcome = run_python(
        """
import pickle, subprocess, sys, time
import weft
from weft.engines.local.memory import blocks
OWNER = '''
import pickle, sys, weft, numpy as np
large = weft.share(np.ones(1_000_000))
pickle.dump([pickle.dumps(large) for _ in range(3)], sys.stdout.buffer)
sys.stdout.flush()
sys.stdin.buffer.readline()
'''
owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1)
blocks.WARM_SECONDS = 1000
first, again, last = pickle.load(owner.stdout)

def mapped():
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "memfd:weft" in line or "/dev/shm/" in line]
    return [line.split()[0] for line in lines]

array = pickle.loads(first)
before = mapped()
del array
print(bool(before), mapped() == before)
array = pickle.loads(again)
print(array.sum(), mapped() == before)
del array
blocks.WARM_SECONDS = 0.1
blocks._here.client.wake()  # it would sleep for longer
end = time.monotonic() + 60
while mapped() and time.monotonic() < end:
    time.sleep(0.01)
print(bool(mapped()))
blocks.WARM_SECONDS = 1000
array = pickle.loads(last)
del array
print(bool(mapped()))
weft.shutdown()
print(bool(mapped()))
owner.communicate(b"end\\n")
""",
    )
    assert outcome.out.split() == ["True", "True", "1000000.0", "True", "False", "True", "False"], (
        outcome
    )
