"""The fork server: the process that starts workers, by forking itself.

    driver ── Start ──> fork server ──fork──> worker ── leads a process group of its own,
      │                  no threads             │       prints into pipes
      └───── Settings, CacheFunction, Work ─────┘

A driver may have threads and half-finished work, of which a fork would be a broken copy; a new
interpreter for each worker would load everything anew. So one new interpreter, which does nothing
else, loads it once. It reports how workers end, and kills them when their driver is gone. Should it
be killed itself, the kernel kills the workers.

Children of a process that has initialised CUDA cannot use it. weft does not do it in the fork
server, but a module that Python loads by itself may (sitecustomize, a .pth file). Then each worker
begins anew after the fork, as an interpreter of its own:

    fork server ──fork──> ──exec──> worker
"""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft._core.launch import Process
from weft.engines.local.pool.messages import NO_ITEM
from weft.engines.local.processes import cuda, linux
from weft.engines.local.processes.channel import Channel, Close, Closed, Ended, Start, Started
from weft.engines.local.processes.linux import oom_kills, open_pidfd, peek_end, process_start
from weft.errors import WeftError

#: the most workers at once, of all drivers together
_MOST = 4096

#: seconds from a driver's end until its workers are killed; idle ones end by themselves
_GRACE = 0.2

#: idle seconds after which the server loads what later workers need
_IDLE = 0.5


class Listener(Protocol):
    """A source of drivers that did not start the server themselves."""

    def fileno(self) -> int: ...

    def accept(self) -> Channel | None: ...


@dataclass(eq=False)
class _Driver:
    """A driver: its connection, its process, its workers."""

    channel: Channel
    pidfd: int
    workers: list[_Worker] = field(default_factory=list)
    gone: bool = False


@dataclass(eq=False)
class _Worker:
    """A worker: its driver's number for it, its process, where it notes its item."""

    number: int
    pid: int
    pidfd: int
    item: _Item
    driver: _Driver


class _Item:
    """The word in which a worker notes the index of its item, and the fork server reads it after
    its end."""

    def __init__(self, word: memoryview, slot: int | None = None, descriptor: int = -1) -> None:
        self.word, self.slot, self.descriptor = word, slot, descriptor
        word[0] = NO_ITEM

    @classmethod
    def for_exec(cls) -> _Item:
        """Return one in memory that outlives an exec, by its descriptor."""
        descriptor = os.memfd_create("weft-item")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(_words(descriptor, mmap.PAGESIZE), descriptor=descriptor)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _words(descriptor: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size)).cast("Q")


class Server:
    """Starts workers for its drivers until the last one is gone and no listener is left."""

    def __init__(
        self,
        drivers: Sequence[Channel],
        listener: Listener | None = None,
        *,
        when_idle: Callable[[], None] | None = None,
    ) -> None:
        self._listener = listener
        self._when_idle = when_idle
        self._drivers: list[_Driver] = []
        self._workers: dict[int, _Worker] = {}
        #: the index of each worker's item, by slot: written by the worker, read here after its end
        self._items = _words(-1, 8 * _MOST)
        self._slots = list(range(_MOST))
        self._oom_kills = oom_kills()
        self._kill_at: dict[_Worker, float] = {}
        for channel in drivers:
            self._add(channel)

    @property
    def sizes(self) -> tuple[int, int]:
        """Return how many drivers and workers there are."""
        return len(self._drivers), len(self._workers)

    def run(self) -> None:
        while self._drivers or self._workers or self._listener is not None:
            self.step()

    def step(self) -> None:
        """Wait for events, and handle them."""
        ready = self._wait()
        if not ready and self._when_idle is not None:
            when_idle, self._when_idle = self._when_idle, None
            when_idle()
        # first: a descriptor closed below leaves its number to one opened below
        ended = [worker for worker in self._workers.values() if worker.pidfd in ready]
        if self._listener is not None and self._listener.fileno() in ready:
            channel = self._listener.accept()
            if channel is not None:
                self._add(channel)
        for driver in list(self._drivers):
            if driver.channel.fileno() in ready:
                self._answer(driver)
            elif driver.pidfd in ready:
                self._forget(driver)
        self._reap(ended)
        for worker in [worker for worker, due in self._kill_at.items() if due <= time.monotonic()]:
            del self._kill_at[worker]
            self._kill(worker)

    def _wait(self) -> set[int]:
        poll = select.poll()
        watched = [fd for driver in self._drivers for fd in (driver.channel.fileno(), driver.pidfd)]
        if self._listener is not None:
            watched.append(self._listener.fileno())
        for descriptor in (*watched, *self._workers):
            poll.register(descriptor, select.POLLIN)
        limits = [max(0.0, due - time.monotonic()) for due in self._kill_at.values()]
        if self._when_idle is not None:
            limits.append(_IDLE)
        limit = min(limits) * 1000 + 1 if limits else None
        return {descriptor for descriptor, _ in poll.poll(limit)}

    def _add(self, channel: Channel) -> None:
        pidfd = open_pidfd(Process(channel.pid, process_start(channel.pid)))
        if pidfd < 0:
            channel.close()
        else:
            self._drivers.append(_Driver(channel, pidfd))

    def _answer(self, driver: _Driver) -> None:
        try:
            message, descriptors = driver.channel.receive(Start, Close)
        except Closed:
            self._forget(driver)
            return
        except WeftError as error:
            _report(str(error))
            self._forget(driver)
            return
        if isinstance(message, Close):
            self._close()
            return
        try:
            self._start(driver, message.worker, descriptors)
        except Closed:
            self._forget(driver)
        except OSError as error:
            _report(f"no more workers can be started: {error}")
            self._forget(driver)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, driver: _Driver, number: int, descriptors: list[int]) -> None:
        if not self._slots:
            raise OSError(errno.EAGAIN, f"there are {_MOST} already")
        item = self._make_item()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(server, number, item, descriptors)
        with contextlib.suppress(OSError):  # the worker does this too; either may be first
            os.setpgid(pid, pid)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._free_item(item)
            raise
        worker = _Worker(number, pid, pidfd, item, driver)
        self._workers[worker.pidfd] = worker
        driver.workers.append(worker)
        driver.channel.send(Started(number, pid), [worker.pidfd])

    def _make_item(self) -> _Item:
        if cuda.is_initialized():
            return _Item.for_exec()
        slot = self._slots.pop()
        return _Item(self._items[slot : slot + 1], slot)

    def _free_item(self, item: _Item) -> None:
        item.close()
        if item.slot is not None:
            self._slots.append(item.slot)

    def _become_worker(self, server: int, number: int, item: _Item, descriptors: list[int]) -> None:
        """Serve the driver as a worker. Runs in the forked process, and never returns."""
        with _ending():
            linux.end_with_parent(signal.SIGKILL)
            if os.getppid() == server:  # else the server died before the line above
                os.setpgid(0, 0)
                self._close_inherited()
                connection, out, err = descriptors
                os.dup2(out, 1)
                os.dup2(err, 2)
                os.close(out)
                os.close(err)
                if item.descriptor >= 0:
                    _begin_anew(connection, number, item.descriptor)
                _serve(connection, number, item.word)

    def _close_inherited(self) -> None:
        """Close the server's descriptors in a worker: while it holds them, nobody sees their other
        ends close."""
        for driver in self._drivers:
            driver.channel.close()
            os.close(driver.pidfd)
        for worker in self._workers.values():
            os.close(worker.pidfd)
            worker.item.close()
        if self._listener is not None:
            os.close(self._listener.fileno())

    def _reap(self, ended: Sequence[_Worker]) -> None:
        kills, before = oom_kills() if ended else self._oom_kills, self._oom_kills
        self._oom_kills = kills  # counted once: a later worker's end has another cause
        for worker in ended:
            del self._workers[worker.pidfd]
            self._reap_one(worker, out_of_memory=kills > before)

    def _reap_one(self, worker: _Worker, *, out_of_memory: bool) -> None:
        code = peek_end(worker.pid)
        with contextlib.suppress(OSError):  # its children, before its pid is free
            os.killpg(worker.pid, signal.SIGKILL)
        usage = os.wait4(worker.pid, 0)[2]
        os.close(worker.pidfd)
        self._kill_at.pop(worker, None)
        item = worker.item.word[0]
        self._free_item(worker.item)
        worker.driver.workers.remove(worker)
        if not worker.driver.gone:
            ended = Ended(
                worker.number,
                code,
                -1 if item == NO_ITEM else item,
                usage.ru_maxrss * 1024,
                int(out_of_memory and code == -signal.SIGKILL),
            )
            worker.driver.channel.send_now(ended)

    def _close(self) -> None:
        """Accept no more drivers, and end all workers."""
        self._listener = None
        for driver in list(self._drivers):
            self._forget(driver)

    def _forget(self, driver: _Driver) -> None:
        driver.gone = True
        self._drivers.remove(driver)
        driver.channel.close()
        os.close(driver.pidfd)
        for worker in driver.workers:
            self._kill_at[worker] = time.monotonic() + _GRACE

    @staticmethod
    def _kill(worker: _Worker) -> None:
        with contextlib.suppress(OSError):
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # it may have left its process group
            os.kill(worker.pid, signal.SIGKILL)


def _serve(connection: int, number: int, item: memoryview) -> None:
    from weft.engines.local.pool.worker import serve

    serve(socket.socket(fileno=connection), number, item)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """End this process, a worker, with the block."""
    code = 1
    try:
        yield
        code = 0
    except BaseException:  # nothing may reach the server's frames
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):  # the function may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_PROGRAM = """\
import sys
sys.path[:] = sys.argv[4:]
from weft.engines.local.pool.fork_server import go_on
go_on(*map(int, sys.argv[1:4]))
"""


def _begin_anew(connection: int, number: int, item: int) -> None:
    """Replace a forked worker by a new interpreter, which goes on as that worker."""
    for descriptor in (connection, item):
        os.set_inheritable(descriptor, True)
    own = map(str, (connection, number, item))
    os.execv(sys.executable, [sys.executable, "-c", _PROGRAM, *own, *sys.path])


def go_on(connection: int, number: int, item: int) -> None:
    """Serve the driver as the worker that has begun anew. Never returns."""
    with _ending():
        os.set_inheritable(connection, False)
        word = _words(item, mmap.PAGESIZE)
        os.close(item)
        _serve(connection, number, word[:1])


def _report(what: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be gone
        print(f"weft: {what}", file=sys.stderr)


def main(descriptor: int, *, numpy: bool) -> None:
    """Run the fork server; `descriptor` is its end of the connection to the driver.

    The first workers are needed at once. They load NumPy themselves if their functions need it, all
    at the same time; for later ones the server loads it when it is idle.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    import weft.engines.local.pool.worker  # noqa: F401  loaded once, for all workers

    gc.freeze()  # collections in workers skip these objects, whose pages stay shared
    Server([channel], when_idle=preload if numpy else None).run()


def preload() -> None:
    """Load NumPy and the modules that handle arrays."""
    import weft.engines.local.pool.payload_arrays
    import weft.engines.local.pool.worker  # noqa: F401

    gc.collect()
    gc.freeze()
