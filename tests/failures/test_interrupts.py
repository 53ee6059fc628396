"""A signal handler that raises may strike between any two steps: nothing may be lost by it.

Each case is a program of its own: Python reports on stderr whenever a handler raises inside a
finalizer, which is as it should be.
"""

from __future__ import annotations

import pytest

from tests.locking import MAKE_LOCK
from tests.support import AWAIT_STATE, launch, run_python

STRUCK = """
import os, pickle, signal, subprocess, sys, threading, time
import numpy as np
import weft
from weft.engines.local.memory import blocks

class Interrupt(Exception):
    pass

exposed = False

def strike(*_):
    if exposed:
        raise Interrupt

def struck(call, seconds=1.5, strikes=101):
    '''How often a loop of calls was interrupted in that time, and until it was so often.'''
    global exposed
    count = step = 0
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
    end = time.monotonic() + seconds
    while time.monotonic() < end or (count < strikes and time.monotonic() < end + 30):
        step += 1
        try:
            exposed = True
            call(step)
            exposed = False
        except Interrupt:
            exposed = False
            count += 1
        except BaseException:
            exposed = False  # let it be told
            raise
    signal.setitimer(signal.ITIMER_REAL, 0)
    return count
"""


def test_a_group_survives_interrupts() -> None:
    """After any number of interrupts in its calls a group is as usable as before."""
    outcome = run_python(
        STRUCK
        + """
group = weft.init(engine="local")
assert struck(lambda _: group.barrier()) > 100
group.barrier()
group.split(0).barrier()
print("fine")
"""
    )
    assert outcome.out == "fine\n", outcome


@pytest.mark.parametrize("length", [4, 300_000])
def test_collectives_survive_interrupts(length: int) -> None:
    """A rank is struck in the middle of collectives again and again, and goes on with `survivors`
    each time; the other is told each time, and no result is ever wrong."""
    outcome = launch(
        STRUCK
        + f"""
group = weft.init(timeout=60)
value = np.full({length}, 1.0)
in_step = True
group.all_reduce(value)  # loads what it needs

def reduce(_):
    global in_step
    if not in_step:
        group.latest.survivors()
    in_step = False
    result = group.latest.all_reduce(value)
    assert (result == value[0] + 1).all(), result
    in_step = True

if group.rank == 0:
    print("struck", struck(reduce, seconds=3.0, strikes=400) > 50)
    value[:] = 100  # the end
    reduce(0)
else:
    told = total = 0
    while total < 101:
        try:
            result = group.latest.all_reduce(value)
            total = result[0]
            assert total in (2, 101) and (result == total).all(), result
        except weft.PeerLost as error:
            assert error.ranks == (0,), error
            told += 1
            group.latest.survivors()
        except weft.errors.Disagreement as error:
            assert "refused: Interrupt" in str(error), error  # struck before it met anybody
    print("told", told > 50)
""",
        2,
        options=("--no-prefix",),
    )
    assert sorted(outcome.out.splitlines()) == ["struck True", "told True"], outcome


def test_pending_calls_survive_interrupts() -> None:
    """Interrupts while async calls are made, waited for, or followed by blocking ones: none is
    lost, none is carried out twice or out of turn, and no thread is left."""
    outcome = run_python(
        STRUCK
        + """
group = weft.init(engine="local")
group.all_reduce(1)  # loads what it needs
made = []

def go_on():
    if group.latest._given_up:  # struck as it refused a call, because it was struck before
        group.latest.survivors()

def reduce(step):
    go_on()
    handle = group.latest.all_reduce(step, async_op=True)
    made.append(handle)
    assert handle.wait() == step
    if step % 3 == 0:
        group.latest.barrier()

assert struck(reduce, seconds=3.0) > 50
go_on()
print(group.latest.all_reduce(1, async_op=True).wait())
group.latest.barrier()
print(all(handle.done() for handle in made))
weft.shutdown()
print([thread.name for thread in threading.enumerate() if "async" in thread.name])
"""
    )
    assert outcome.out == "1\nTrue\n[]\n", outcome


def test_locks_survive_interrupts() -> None:
    """After any number of interrupts the lock is free, for writers and readers."""
    outcome = run_python(
        STRUCK
        + MAKE_LOCK
        + """
lock = make_lock(weft.init(engine="local"))

def both(step):
    with lock.exclusive() if step % 2 else lock.shared():
        pass

assert struck(both) > 100

def elsewhere():
    with lock.exclusive(timeout=5):
        print("fine")

thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
"""
    )
    assert outcome.out == "fine\n", outcome


def test_attaching_survives_interrupts() -> None:
    """An interrupted attach never makes a later one return another array, and no reference is lost:
    in the end the owner has everything back."""
    outcome = run_python(
        STRUCK
        + """
OWNER = '''
import pickle, sys, time, weft, numpy as np
from weft.engines.local.memory import blocks
arrays = [weft.share(np.full(1000, float(k))) for k in range(50)]
pickle.dump([pickle.dumps(array) for array in arrays], sys.stdout.buffer)
sys.stdout.flush()
sys.stdin.buffer.readline()
server = blocks._here.server
deadline = time.monotonic() + 60
while server._remote_references and time.monotonic() < deadline:
    time.sleep(0.01)
print(len(server._remote_references), flush=True)
sys.stdin.buffer.readline()
'''
owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1)
pickles = pickle.load(owner.stdout)
wrong = []

def attach(step):
    array = pickle.loads(pickles[step % 50])
    if array[0] != step % 50 or array[999] != step % 50:
        wrong.append((step % 50, array[0]))

attach(0)  # loads what it needs: a module that is interrupted as it is loaded is not weft's
assert struck(attach, seconds=3.0) > 50
for step in range(100):
    attach(step)
owner.stdin.write(b"count\\n"); owner.stdin.flush()
print("wrong:", wrong, "references:", owner.stdout.readline().decode())
owner.communicate(b"end\\n")
"""
    )
    assert outcome.out.split() == ["wrong:", "[]", "references:", "0"], outcome


def test_sharing_survives_interrupts() -> None:
    """An interrupted share keeps no memory."""
    outcome = run_python(
        STRUCK
        + """
large = np.ones(40_000_000, np.uint8)

def share(step):
    weft.share(large if step % 10 == 0 else large[:1000])

share(0)  # loads what it needs
assert struck(share, seconds=3.0) > 50
weft.share(large[:1])
weft.share(large[:1])
server = blocks._here.server
print(len(server._entries) <= 2, server._arenas.size < 200 << 20)
"""
    )
    assert outcome.out == "True True\n", outcome


@pytest.mark.parametrize("wait", ["exclusive", "shared"])
def test_an_interrupt_as_the_holder_dies(wait: str) -> None:
    """The waiter is interrupted at the moment at which it inherits the lock of a dead holder: the
    lock stays usable, and the news is not lost."""
    outcome = launch(
        STRUCK
        + MAKE_LOCK
        + AWAIT_STATE
        + f"""
group = weft.init()
lock = make_lock(group)
group.barrier()
if group.rank == 1:
    with lock.exclusive():
        group.barrier()
        await_state(group, 0, lambda state: state.operation.startswith("waiting for"))
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
group.barrier()
news = []

def take(_):
    with lock.{wait}(timeout=60) as died:
        if died is not None:
            news.append(died)

struck(take, seconds=0.6)
with lock.exclusive(timeout=60) as died:
    if died is not None:
        news.append(died)
print("news", set(news))
""",
        2,
        options=("--keep-going", "--no-prefix"),
    )
    assert outcome.out == "news {1}\n", outcome


def test_waiting_for_a_map_survives_interrupts() -> None:
    """Whichever step of waiting is interrupted, who waits gets the handler's exception and can wait
    again."""
    outcome = run_python(
        """
import sys, time, weft
from weft import Stalled

class Interrupt(Exception):
    pass

def interrupt_at(step):
    def trace(frame, event, _):
        nonlocal step
        step -= 1
        if step == 0:
            sys.settrace(None)
            raise Interrupt
        return trace
    return trace

handle = weft.map_async(time.sleep, [60], n=1)
steps, interrupted = 0, True
while interrupted:
    steps += 1
    try:
        sys.settrace(interrupt_at(steps))
        handle.wait(0.001)
    except Interrupt:
        pass
    except Stalled:
        interrupted = False
    sys.settrace(None)
handle.cancel()
print(steps > 10, handle.status)
"""
    )
    assert (outcome.out, outcome.err) == ("True cancelled\n", ""), outcome
