"""Collectives that a rank leaves half way: by Ctrl-C, at a deadline, for lack of memory, at exit.

The others are told soon, not at the deadline, and all that are still here can go on together.
"""

from __future__ import annotations

import pytest

from tests.failures.test_collectives import TOOLS
from tests.support import Outcome, launch, marked_processes
from weft.engines.local.collectives.pipelined import has_kernels

#: far longer than any of these tests takes
TIMEOUT = 60
BEGIN = f"""
group = weft.init(timeout={TIMEOUT})
check_all(group)
group.barrier()
"""
#: how a rank finds out that another gave up: in a call of one step, at the next
FOLLOW = """
def follow(name, way="small"):
    try:
        call(group, name, way, root=1)
        group.barrier()
    except PeerLost as error:
        print("told", error.ranks, "gave up" in str(error), name in str(error))
"""
GO_ON = """
group = group.survivors()
check_all(group)
check_all(group, "large")
print("all", group.size)
"""


def run(program: str, ranks: int = 2, *options: str, launcher: str = "weft run") -> Outcome:
    """Run a program after the tools; it ends long before its deadlines."""
    if launcher == "weft run":
        options = ("--no-prefix", *options)
    outcome = launch(TOOLS + program, ranks, options=options, launcher=launcher)
    assert outcome.seconds < TIMEOUT / 2, outcome
    return outcome


def printed(outcome: Outcome) -> list[str]:
    """What the ranks printed, in order; they must have succeeded."""
    assert outcome.code == 0, outcome
    return sorted(outcome.out.splitlines())


# Ctrl-C


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "gather"])
@pytest.mark.parametrize("where", ["waiting", "collective.met", "collective.block"])
def test_ctrl_c_in_a_collective(name: str, where: str) -> None:
    """A rank that catches it can use the group no more and is shown how to go on; the others are
    told that it gave up."""
    outcome = run(
        FOLLOW
        + BEGIN
        + f"""
name, where = {name!r}, {where!r}
way = "small" if where == "waiting" else "large"

def press():
    await_flag("reached")
    os.kill(group._meeting.roster.process(0).pid, signal.SIGINT)

if group.rank == 0:
    arm("wait.block:0:delay=0" if where == "waiting" else f"{{where}}:0:delay=50")
    try:
        call(group, name, way, root=1)
    except KeyboardInterrupt:
        arm("")
        print("interrupted", told_to_go_on(group))
elif where == "waiting":
    press()
    follow(name)
else:
    thread = threading.Thread(target=press)
    thread.start()
    follow(name, way)
    thread.join()
"""
        + GO_ON
    )
    expected = ["all 2", "all 2", "interrupted True", "told (0,) True True"]
    assert printed(outcome) == expected, outcome


def test_ctrl_c_while_waiting_for_a_handle() -> None:
    """The call goes on, and can be waited for again; `survivors` ends it instead."""
    outcome = run(
        BEGIN
        + """
def interrupted(handle):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        handle.wait()
    except KeyboardInterrupt:
        return not handle.done()

if group.rank == 0:
    handle = group.all_reduce(np.ones(2), async_op=True)
    print("interrupted", interrupted(handle))
    raise_flag("go")
    print(handle.wait())
    handle = group.all_reduce(np.ones(SIZES["large"]), async_op=True)
    after = group.gather(1, async_op=True)
    print("interrupted", interrupted(handle))
    raise_flag("interrupted")
    group = group.survivors()
    for ended in (handle, after):
        try:
            ended.wait()
        except UsageError as error:
            print("ended", "survivors()" in str(error))
else:
    await_flag("go")
    group.all_reduce(np.ones(2))
    await_flag("interrupted")
    group = group.survivors()
check_all(group)
print("all", group.size)
"""
    )
    expected = ["[2. 2.]", *["all 2"] * 2, *["ended True"] * 2, *["interrupted True"] * 2]
    assert printed(outcome) == expected, outcome


# deadlines


@pytest.mark.parametrize("way", ["small", "large"])
def test_a_late_rank(way: str) -> None:
    """Whoever waits in vain gives up with Stalled, which names the late one; that one is told when
    it comes."""
    outcome = run(
        FOLLOW
        + BEGIN
        + f"""
if group.rank == 0:
    try:
        call(group, "reduce", {way!r}, root=1, timeout=0.2)
    except Stalled as error:
        print("stalled", error.ranks, told_to_go_on(group))
else:
    await_state(group, 0, lambda state: state.operation == "survivors")
    follow("reduce", {way!r})
"""
        + GO_ON
    )
    expected = ["all 2", "all 2", "stalled (1,) True", "told (0,) True True"]
    assert printed(outcome) == expected, outcome


def test_memory_that_peers_may_still_write_to_is_not_used_again() -> None:
    """A rank leaves a large call and fills new arrays, while another goes on to write results to
    where the arrays of that call were: the new ones are not harmed."""
    outcome = run(
        """
group = weft.init(timeout=60)
length = 4 * slots.ROOM // 8
group.all_reduce(np.ones(length))  # from now on such arrays are parts of the heap
group.barrier()
if group.rank == 0:
    arm("collective.block:0:delay=0.01,collective.block@2:0:raise")
    try:
        group.all_reduce(np.ones(length))
    except faults.InjectedFault:
        pass
    fresh = [np.full(length, 7.0) for _ in range(8)]
    group.survivors()
    print("harmed", sum(int((array != 7).sum()) for array in fresh))
else:
    arm("collective.block@2:1:delay=0.04")
    try:
        group.all_reduce(np.ones(length))
    except PeerLost:
        print("told")
    group.survivors()
"""
    )
    assert printed(outcome) == ["harmed 0", "told"], outcome


def test_a_rank_that_refused_does_not_change_what_others_still_read() -> None:
    """It refuses one call and begins the next, while another still reads what it gave before."""
    outcome = run(
        BEGIN
        + """
arm("collective.met:1:delay=0.5")
print(group.all_reduce(np.ones(2)))
try:
    group.all_reduce(np.ones(2), "sum" if group.rank else "wrong")
except (weft.errors.InvalidValue, Disagreement):
    pass
print(group.all_reduce(np.full(2, 100.0)))
"""
    )
    assert printed(outcome) == ["[2. 2.]", "[2. 2.]", "[200. 200.]", "[200. 200.]"], outcome


# memory


def test_no_memory_for_a_result() -> None:
    """One rank cannot make room for what it would get, when all have met: it gives up; where that
    is known before, it refuses."""
    outcome = run(
        BEGIN
        + """
def no_memory(*_, **__):
    raise MemoryError("no room")

make_room = np.empty
for name in ("gather", "all_gather", "scatter", "broadcast"):
    if group.rank == 0:
        np.empty = no_memory
    try:
        call(group, name, root=0 if name == "gather" else 1)
        group.barrier()
    except MemoryError:
        np.empty = make_room
        print(name, "no memory", told_to_go_on(group))
    except PeerLost as error:
        print(name, "told", error.ranks, "gave up" in str(error))
    group = group.survivors()
    check_all(group)
if group.rank == 0:
    np.empty = no_memory
try:
    call(group, "all_reduce", "large")
except MemoryError:
    np.empty = make_room
    print("refused")
except Disagreement as error:
    print("refusal told", "MemoryError: no room" in str(error))
check_all(group)
"""
    )
    expected = ["refusal told True", "refused"]
    for name in ("gather", "all_gather", "scatter", "broadcast"):
        expected += [f"{name} no memory True", f"{name} told (0,) True"]
    assert printed(outcome) == sorted(expected), outcome


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("spare", [2, 3, 5, 10])
def test_no_memory_for_the_slots(rank: int, spare: int) -> None:
    """Whoever cannot make or map them: every rank gets the same error, and as soon as there is room
    the group works. With so little room that it gets scarce later, a rank gives up."""
    outcome = run(
        f"""
import resource
group = weft.init(timeout=60)
import weft.engines.local.collectives.collective, weft._core.moves
group.barrier()
none = resource.getrlimit(resource.RLIMIT_AS)
if group.rank == {rank}:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ({spare} << 20), none[1]))
try:
    group.all_reduce(np.ones(2))
    print("worked")
except SetupError as error:
    print("SetupError", "rank {rank}: " in str(error))
except (MemoryError, PeerLost) as error:
    print("gave up")
resource.setrlimit(resource.RLIMIT_AS, none)
if group._given_up:
    group = group.survivors()
check_all(group)
check_all(group, "large")
print("all", group.size)
"""
    )
    told = printed(outcome)
    assert told.count("all 2") == 2, outcome
    (how,) = set(told) - {"all 2"}
    assert how in (["SetupError True"] if spare < 4 else ["SetupError True", "gave up", "worked"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shared", [False, True], ids=["to work in", "of a shared array"])
def test_no_memory_for_a_large_sum(rank: int, shared: bool) -> None:
    """A rank cannot map what large arrays need, be it a peer's shared array or the memory that all
    work in: every rank gets the same error, and as soon as there is room the group works."""
    if not shared and not has_kernels():
        pytest.skip("without loops in C there is no such memory")
    outcome = run(
        f"""
import resource
group = weft.init(timeout=60)
check_all(group)
own = np.full(8 << 20, group.rank + 1.0)  # 64 MB
own = weft.share(own) if {shared} else own
group.barrier()
none = resource.getrlimit(resource.RLIMIT_AS)
if group.rank == {rank}:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), none[1]))
try:
    group.all_reduce(own, out=own)
except SetupError as error:
    print("SetupError", "rank {rank}: " in str(error))
resource.setrlimit(resource.RLIMIT_AS, none)
total = group.all_reduce(own, out=own)
print("sum", total[0], total[-1])
check_all(group, "large")
"""
    )
    assert printed(outcome) == ["SetupError True"] * 2 + ["sum 3.0 3.0"] * 2, outcome


# the end of a program


@pytest.mark.parametrize("way", ["small", "large"])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("weft.shutdown()", 0),
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('the cause')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
    ],
    ids=["shutdown", "end", "exit", "exception", "SIGTERM"],
)
def test_the_end_while_a_call_is_pending(end: str, code: int, way: str) -> None:
    """The program ends at once, with its own exit code; whoever makes the call too is told."""
    outcome = run(
        BEGIN
        + f"""
if group.rank == 0:
    handle = group.all_gather(np.ones(SIZES[{way!r}]), async_op=True)
    after = group.gather(1, async_op=True)
    {end}
    if "shutdown" in {end!r}:
        for pending in (handle, after):
            try:
                pending.wait()
            except NotInitialized:
                print("ended")
        print("threads", [t.name for t in threading.enumerate() if "async" in t.name])
else:
    await_state(group, 0, lambda state: not state.alive)
    try:
        group.all_gather(np.ones(SIZES[{way!r}]))
        group.gather(1)
    except PeerLost as error:
        print("told", error.ranks)
""",
        2,
        "--keep-going",
    )
    assert outcome.code == code, outcome
    expected = ["told (0,)"]
    if "shutdown" in end:
        expected = ["ended", "ended", "threads []", "told (0,)"]
    assert sorted(outcome.out.splitlines()) == expected, outcome


def test_a_subgroup_is_left_while_a_call_is_pending() -> None:
    """What is pending in it ends; the group that it was split from is not touched."""
    outcome = run(
        BEGIN
        + """
half = group.split(0)
if group.rank == 0:
    handle = half.all_reduce(np.ones(SIZES["large"]), async_op=True)
    half.leave()
    raise_flag("left")
    try:
        handle.wait()
    except NotInitialized:
        print("ended")
else:
    await_flag("left")  # else the call may be through before
    try:
        half.all_reduce(np.ones(SIZES["large"]))
    except PeerLost as error:
        print("told", error.ranks)
check_all(group)
print("all", group.size)
"""
    )
    assert printed(outcome) == ["all 2", "all 2", "ended", "told (0,)"], outcome


# threads and forks


def test_a_handle_is_waited_for_in_other_threads() -> None:
    """Any number of threads may wait for it, each with its own patience."""
    outcome = run(
        BEGIN
        + """
if group.rank == 0:
    handle = group.all_reduce(np.ones(2), async_op=True)
    results = []

    def wait():
        try:
            handle.wait(timeout=0.05)
        except Stalled:
            results.append("not yet")
        results.append(handle.wait()[0])

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while results.count("not yet") < 3:
        time.sleep(0.01)
    raise_flag("go")
    for thread in threads:
        thread.join()
    print(sorted(map(str, results)), handle.done())
else:
    await_flag("go")
    group.all_reduce(np.ones(2))
"""
    )
    assert printed(outcome) == ["['2.0', '2.0', '2.0', 'not yet', 'not yet', 'not yet'] True"]


def test_a_fork_while_a_call_is_pending() -> None:
    """The child is told that neither group nor handle are its own, at once; the parent's call goes
    on, and what had ended before can be read in the child."""
    outcome = run(
        BEGIN
        + """
def attempt(function):
    try:
        return str(function())
    except weft.WeftError as error:
        return type(error).__name__

before = group.all_reduce(np.ones(2), async_op=True)
before.wait()
if group.rank == 0:
    handle = group.all_reduce(np.ones(SIZES["large"]), async_op=True)
    child = os.fork()
    if child == 0:
        print(
            attempt(handle.wait),
            attempt(before.wait),
            attempt(group.barrier),
            attempt(lambda: group.all_reduce(np.ones(2))),
            attempt(lambda: group.all_reduce(np.ones(2), async_op=True)),
            attempt(group.survivors),
            flush=True,
        )
        weft.shutdown()
        os._exit(0)
    print("child", os.waitpid(child, 0)[1])
    raise_flag("go")
    print(handle.wait()[0])
else:
    await_flag("go")
    group.all_reduce(np.ones(SIZES["large"]))
check_all(group)
"""
    )
    told = " ".join(["UsedAfterFork", "[2. 2.]", *["UsedAfterFork"] * 4])
    assert printed(outcome) == ["2.0", told, "child 0"], outcome


def test_no_thread_can_be_started() -> None:
    """An async call that cannot be begun was not made: the group is in step."""
    outcome = run(
        BEGIN
        + """
def no_thread(*_):
    raise RuntimeError("can't start new thread")

start, threading.Thread.start = threading.Thread.start, no_thread
try:
    group.all_reduce(np.ones(2), async_op=True)
except RuntimeError as error:
    print(error)
threading.Thread.start = start
check_all(group)
print(group.all_reduce(np.ones(2), async_op=True).wait())
"""
    )
    assert printed(outcome) == ["[2. 2.]"] * 2 + ["can't start new thread"] * 2, outcome


# under mpirun


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_killed_rank_ends_the_job_of_mpirun(mode: str) -> None:
    """One rank is killed while all reduce large arrays: the job ends, not with 0, and nothing is
    left."""
    outcome = run(
        f"""
group = weft.init(timeout=60)
value = np.ones(SIZES["large"])
for turn in range(10**6):
    if group.rank == 1 and turn == 20:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    if {mode!r} == "async":
        group.all_reduce(value, async_op=True).wait()
    else:
        group.all_reduce(value)
print("passed")
""",
        3,
        launcher="mpirun",
    )
    assert outcome.code != 0, outcome
    assert "passed" not in outcome.out, outcome
    assert not marked_processes()


def test_no_descriptors_to_export_a_shared_array() -> None:
    """A rank cannot offer its array to the others: every rank gets the same error, what the others
    offered is given back, and the group works again."""
    outcome = run(
        """
import gc
from weft.engines.local.collectives import transport
from weft.engines.local.memory import blocks
from weft.errors import OutOfDescriptors
group = weft.init(timeout=60)
check_all(group)
export, turn = blocks.export, 0

def failing(array):
    if group.rank == 1 and turn < 3:
        raise OutOfDescriptors("none is left")
    return export(array)

def mapped():
    lines = [line for line in open("/proc/self/maps") if "memfd" in line]
    ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return sum(end - start for start, end in ends) >> 20

blocks.export = failing
before = mapped()
for turn in range(3):
    own = weft.share(np.ones(8 << 20))  # 64 MB
    try:
        group.all_reduce(own, out=own)
    except SetupError as error:
        print("SetupError", "rank 1: " in str(error))
    del own
deadline = time.monotonic() + 60
while mapped() >= before + 64 and time.monotonic() < deadline:  # others give it back in a moment
    gc.collect()
    blocks.clear()
    time.sleep(0.01)
left = mapped() - before
turn = 3
own = weft.share(np.ones(8 << 20))
print("sum", group.all_reduce(own, out=own)[-1], left < 64 or left)
"""
    )
    assert sorted(printed(outcome)) == ["SetupError True"] * 6 + ["sum 2.0 True"] * 2, outcome
