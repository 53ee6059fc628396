"""Where Linux's modules are missing, programs run: serially, with one warning.

What macOS and Windows lack is hidden from weft in a process of its own. That is not those systems,
but whatever weft used of it would fail here too.
"""

from __future__ import annotations

import pytest

from tests.support import run_python

#: a model that has learnt: by then torch has loaded what it needs of its own system
LEARNT = """
try:
    import torch
except ImportError:
    torch = None
else:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = lambda model, x, y: ((model(x) - y) ** 2).mean()
    loss(model, torch.ones(4, 2), torch.ones(4, 1)).backward()
    optimizer.step()
"""

#: hides what a system lacks; libraries that weft uses are loaded before, as they know their systems
HIDDEN = """
import asyncio, builtins, ctypes, io, multiprocessing, os, pickle, select, shutil, signal, socket
import subprocess, sys, tempfile, time, warnings
import cloudpickle, numpy, threadpoolctl, tqdm
_system = {system!r}
_lacking = {{
    os: '''O_TMPFILE EFD_CLOEXEC EFD_NONBLOCK eventfd eventfd_read eventfd_write memfd_create
        pidfd_open pipe2 posix_fallocate posix_fadvise sched_getaffinity sched_setaffinity
        sched_getscheduler splice waitid''',
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    select: "epoll",
    socket: "recv_fds send_fds AF_UNIX SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC",
    time: "CLOCK_BOOTTIME",
}}
if _system == "win32":
    _lacking[os] += ''' O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK WNOHANG chown environb fchdir
        fchmod fchown fork forkpty get_blocking getegid geteuid getgid getloadavg
        getpgid getsid getuid killpg lchown mkfifo mknod nice openpty posix_spawn
        pread pwrite readv register_at_fork sched_yield sendfile set_blocking
        setpgid setsid statvfs sync sysconf sysconf_names tcgetpgrp ttyname uname
        wait wait3 wait4 writev'''
    _lacking[signal] += ''' SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP
        SIGUSR1 SIGUSR2 alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt
        sigpending sigwait'''
    _lacking[select] += " poll"
    _lacking[time] += " clock_gettime CLOCK_MONOTONIC tzset"
for _module, _names in _lacking.items():
    for _name in _names.split():
        delattr(_module, _name)
if _system == "darwin":
    os.sysconf_names = {{k: v for k, v in os.sysconf_names.items() if k != "SC_AVPHYS_PAGES"}}
for _name in ["fcntl", *(["pwd", "resource", "termios"] if _system == "win32" else [])]:
    sys.modules[_name] = None
def _without_proc(function):
    def hidden(path, *rest, **options):
        if str(path).startswith(("/proc", "/dev/shm", "/sys/fs/cgroup")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *rest, **options)
    return hidden
builtins.open = io.open = _without_proc(open)
os.open, os.stat, os.listdir = map(_without_proc, (os.open, os.stat, os.listdir))
def _no_library(name, *rest, **options):
    raise OSError(f"weft loads the library {{name}}")
ctypes.CDLL = _no_library  # neither the kernels nor the C library
sys.platform = _system
warnings.simplefilter("always")
"""

PROGRAM = """
import numpy as np
import weft

group = weft.init(seed=1)
assert type(group).__name__ == "SerialGroup", group
assert (weft.rank(), weft.size(), weft.is_master()) == (0, 1, True)
weft.barrier()
assert weft.all_reduce(np.arange(3.0)).tolist() == [0.0, 1.0, 2.0]
assert weft.broadcast([np.ones(2)])[0].sum() == 2.0
assert weft.gather(5) == [5], weft.gather(5)
assert weft.all_reduce(2.0, async_op=True).wait() == 2.0

for updater in ("add", "adam"):
    table = weft.MatrixTable(4, 2, updater=updater)
    table.add(np.ones((4, 2)))
    table.add_async(np.ones((1, 2)), rows=[2]).wait()
    assert table.get().shape == (4, 2)
array = weft.ArrayTable(np.arange(4.0))
array.add(np.ones(4))
assert array.get().tolist() == [1.0, 2.0, 3.0, 4.0]
print("tables")

assert weft.map(lambda x: x * x, range(5)) == [0, 1, 4, 9, 16]
assert weft.map_async(abs, [-1, -2]).wait() == [1, 2]
data = {"a": np.ones(1)}
assert weft.map(lambda x, shared_data: x + shared_data["a"][0], [1], shared_data=data) == [2.0]
assert weft.distribute(abs)([-1, -2]) == [1, 2]
assert weft.distribute(np.sqrt)(np.full((3, 4), 4.0)).tolist() == np.full((3, 4), 2.0).tolist()
print("map")

def late(x):
    while x == 1:
        time.sleep(0.01)
    return x

found = weft.map(late, range(3), timeout_each=0.3, on_error="return")
assert [type(one) for one in found] == [int, weft.Stalled, int], found
found = weft.map_async(late, range(3), timeout=0.5, on_error="return").wait()
assert [type(one) for one in found] == [int, weft.Stalled, weft.Cancelled], found
assert list(weft.imap(abs, [-1, -2])) == [1, 2]
print("deadlines")

class Scale:
    factor = 2.0

total = weft.function(lambda x: x.sum(axis=0) * Scale.factor, collect="sum")
assert total(np.ones((10, 2))).tolist() == [20.0, 20.0]
try:
    weft.function(lambda x: x.sum() * Scale.factor, collect="mean")(np.arange(8.0))
except weft.Mismatch:
    print("checked")
with weft.Team(2) as team:
    assert team.size == 1
    replica = weft.replicate(np.zeros(3), team=team)
print("functions")

shared = weft.share(np.arange(6.0).reshape(2, 3))
assert isinstance(shared, weft.SharedArray)
again = weft.share(shared)
again[0, 0] = 7.0
assert shared[0, 0] == 7.0
assert type(shared + 1) is np.ndarray
fixed = weft.share(shared[1], readonly=True)
shared[1, 1] = 9.0
assert fixed[1] == 9.0 and not fixed.flags.writeable
try:
    fixed.flags.writeable = True
except ValueError:
    print("share")
assert pickle.loads(pickle.dumps(shared)).tolist() == shared.tolist()
assert weft.share(shared.copy())[0, 0] == 7.0

if torch is not None:
    step = weft.train_step(loss, model, optimizer)
    losses = [step(torch.ones(4, 2), torch.ones(4, 1)) for _ in range(3)]
    assert losses[2] < losses[0], losses
    models = weft.ModelTable(model)
    models.sync()
    print("training")

for asks in (
    lambda: weft.map(abs, [1], engine="local"),
    lambda: weft.Team(engine="local"),
    lambda: weft.distribute(abs, named_pipe=True),
):
    try:
        asks()
    except weft.errors.EngineUnavailable as error:
        assert f"needs Linux on x86-64, this is {sys.platform} on" in str(error), error
        assert "engine='serial'" in str(error), error
    else:
        raise AssertionError("it was not refused")
print("refused")

with tempfile.TemporaryDirectory() as folder:
    array.save(os.path.join(folder, "table"))
    array.save(os.path.join(folder, "table"))  # over the first
    assert os.listdir(folder) == ["table"]
    assert weft.load(os.path.join(folder, "table")).get().tolist() == [1.0, 2.0, 3.0, 4.0]
print("saved")
weft.shutdown()

import multiverso, playdoh
multiverso.init()
handler = multiverso.ArrayTableHandler(3)
handler.add([1, 2, 3], sync=True)
assert handler.get().tolist() == [1.0, 2.0, 3.0]
multiverso.shutdown()
assert playdoh.map(abs, [-1, -2], max_cpu=2) == [1, 2]
print("older")
assert not [name for name in sys.modules if name.startswith("weft.engines.local")], sys.modules
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_programs_run_serially(system: str) -> None:
    """Tables, collectives, map, functions, share, training, save, older names; one warning."""
    outcome = run_python(LEARNT + HIDDEN.format(system=system) + PROGRAM)
    told = [line for line in outcome.err.splitlines() if "Warning" in line]
    assert outcome.code == 0, outcome.err
    done = outcome.out.split()
    expected = "tables map deadlines checked functions share refused saved older"
    assert [one for one in done if one != "training"] == expected.split()
    assert len(told) == 1, outcome.err
    assert "weft runs serially here, in this process alone: the local engine needs" in told[0]
    assert told[0].startswith("<string>:"), "it is the user's line that is shown"
    assert f"this is {system} on" in told[0]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_commands_say_what_they_need(system: str) -> None:
    """Nothing is launched, and no pipe is served; the doctor names the obstacle."""
    calls = """
from weft.cli import main
for command in (["run", "-n", "2", "x.py"], ["open"], ["status"], ["close"], ["doctor"]):
    try:
        main(command)
    except SystemExit as ended:
        print(command[0], "ended with", ended.code)
"""
    outcome = run_python(HIDDEN.format(system=system) + calls)
    assert outcome.err.count("weft: the local engine needs Linux on x86-64") == 4
    assert outcome.out.count("ended with 1") == 5, outcome
    assert f"weft cannot run ranks here:\n  - this is {system} on" in outcome.out
