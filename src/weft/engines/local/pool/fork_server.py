"""The fork server: the process that starts workers, by forking itself.

    driver ── Start ──> fork server ──fork──> worker ── leads a process group of its own,
      │                  no threads             │       prints into pipes
      └───── Settings, CacheFunction, Work ─────┘

A driver may have threads and half-finished work, of which a fork would be a broken copy; a new
interpreter for each worker would load everything anew. So one new interpreter, which does nothing
else, loads it once. It reports how workers end, and kills them when their driver is gone. Should it
be killed itself, the kernel kills the workers.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft._core.launch import Process
from weft.engines.local.pool.messages import NO_ITEM
from weft.engines.local.processes import linux
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
    """A worker: its driver's number for it, its process, its slot in the items."""

    number: int
    pid: int
    pidfd: int
    slot: int
    driver: _Driver


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
        self._items = memoryview(mmap.mmap(-1, 8 * _MOST)).cast("Q")
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
        slot = self._slots[-1]
        self._items[slot] = NO_ITEM
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(server, number, slot, descriptors)
        with contextlib.suppress(OSError):  # the worker does this too; either may be first
            os.setpgid(pid, pid)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        worker = _Worker(number, pid, pidfd, self._slots.pop(), driver)
        self._workers[worker.pidfd] = worker
        driver.workers.append(worker)
        driver.channel.send(Started(number, pid), [worker.pidfd])

    def _become_worker(self, server: int, number: int, slot: int, descriptors: list[int]) -> None:
        """Serve the driver as a worker. Runs in the forked process, and never returns."""
        code = 1
        try:
            linux.end_with_parent(signal.SIGKILL)
            if os.getppid() == server:  # else the server died before the line above
                os.setpgid(0, 0)
                self._close_inherited()
                connection, out, err = descriptors
                os.dup2(out, 1)
                os.dup2(err, 2)
                os.close(out)
                os.close(err)
                from weft.engines.local.pool.worker import serve

                serve(socket.socket(fileno=connection), number, self._items[slot : slot + 1])
                code = 0
        except BaseException:  # nothing may reach the server's frames
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):  # the function may have closed or replaced them
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _close_inherited(self) -> None:
        """Close the server's descriptors in a worker: while it holds them, nobody sees their other
        ends close."""
        for driver in self._drivers:
            driver.channel.close()
            os.close(driver.pidfd)
        for pidfd in self._workers:
            os.close(pidfd)
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
        item = self._items[worker.slot]
        self._slots.append(worker.slot)
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
