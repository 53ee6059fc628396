"""One worker as its driver sees it, and how the driver waits for several.

`Worker` is a worker's connection, its outputs and the functions that it has cached. `Watch`
waits for several at once: for their replies, their output and their end. `worker_lost_error` tells
how one was lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import cast

from weft._core.modules import ModuleDigests
from weft.engines.local.pool.driver_state import Captured
from weft.engines.local.pool.forwarded_warnings import reissue
from weft.engines.local.pool.messages import (
    Answer,
    Begun,
    CacheFunction,
    Cancel,
    CancelAcknowledged,
    DropFunction,
    Frames,
    Modules,
    Outdated,
    Settings,
    Unreadable,
    Update,
    Warned,
    Work,
)
from weft.engines.local.pool.modules import SentModules
from weft.engines.local.pool.payload import Payload
from weft.engines.local.processes import output
from weft.engines.local.processes.channel import Channel, Closed, Ended
from weft.engines.local.processes.linux import end_as_text, readable
from weft.engines.local.processes.output import Logged, OutputRelay, replay
from weft.errors import Loss, WorkerLost, format_bytes
from weft.resources import host_name

#: functions that a worker caches, and the bytes of their pickles, unless one alone has more
_FUNCTIONS, FUNCTION_BYTES = 64, 1 << 20


class Worker:
    """A worker as its driver sees it: its connection, its outputs, its cached functions."""

    def __init__(
        self, number: int, pid: int, *, pidfd: int, frames: Frames, relays: list[OutputRelay]
    ) -> None:
        self.number, self.pid, self.pidfd = number, pid, pidfd
        self.host = host_name()
        self.frames = frames
        self.relays = relays
        #: readable when it replies, when it has ended, when it has printed
        self.descriptors = (frames.fileno(), pidfd, *(relay.descriptor for relay in relays))
        #: the one GPU that it sees; None: those that the driver sees
        self.gpu: str | None = None
        #: the fork server that started it
        self.server: Channel
        #: how many threads BLAS and the like may use in it
        self.threads = 1
        #: seconds without a message after which it ends; None: never
        self.idle_limit: float | None = None
        #: whether it has work that it has not answered
        self.busy = False
        #: when it has last answered
        self.idle_since = time.monotonic()
        #: the driver's state, the threads and the limit that it has
        self._settings: tuple[Captured, int, float | None] | None = None
        self._modules = SentModules()
        #: the modules that it was last brought up to date with: the same for all chunks of a call
        self._latest: Mapping[str, ModuleDigests] | None = None
        #: the functions of this call that have classes of the script
        self._with_classes: set[bytes] = set()
        #: the functions that it has cached: their bytes by digest, the least recently used first
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        #: those that it is to drop, until that is sent: their bytes too. Other threads add to it
        self._unwanted: dict[bytes, int] = {}

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    def bring_up_to_date(self, state: Captured, modules: Mapping[str, ModuleDigests]) -> None:
        """Send it the driver's state and what has changed of these modules, if it does not have
        them. Raises Closed."""
        settings = state, self.threads, self.idle_limit
        if self._settings == settings and self._latest is modules:
            return
        messages: list[Settings | Modules | Update] = []
        if self._settings != settings:
            messages.append(Settings(state.data, self.threads, self.gpu, self.idle_limit))
        messages += self._modules.messages(modules)
        if messages:
            self.frames.send(*messages)
            if any(isinstance(message, Update) for message in messages):
                self._unwanted.update(self._cached)  # they may be those from before
            self._settings = settings
        for digest in self._with_classes:  # other functions may have changed the classes since
            self.forget(digest)
        self._with_classes.clear()
        self._modules.note(modules)
        self._latest = modules
        self._modules.warn()

    @property
    def computes(self) -> bool:
        """Return whether it has work and has not answered, also if nobody has read the answer."""
        connection = self.frames.fileno()
        return self.busy and connection >= 0 and not readable(connection)

    def give(self, function: Payload, work: Work) -> None:
        """Send it work, and before it the function unless it is cached there. Raises Closed."""
        missing = self.function_messages(function.digest, function)
        self.busy = True
        self._send(*missing, work)
        # after: an interrupt may come before it is sent
        self._cached[function.digest] = function.pickled
        if function.has_classes:
            self._with_classes.add(function.digest)

    def function_messages(
        self, digest: bytes, function: Payload
    ) -> list[CacheFunction | DropFunction]:
        """Return the messages after which it has a function cached."""
        unwanted = self._take_unwanted()
        if digest in self._cached:
            self._cached.move_to_end(digest)
            return _drops(unwanted)
        room = FUNCTION_BYTES - function.pickled
        while self._cached and (
            len(self._cached) >= _FUNCTIONS or sum(self._cached.values()) > room
        ):
            oldest = next(iter(self._cached))
            self._unwanted[oldest] = unwanted[oldest] = self._cached[oldest]
            del self._cached[oldest]
        return [*_drops(unwanted), CacheFunction(digest, function.data)]

    def forget(self, digest: bytes) -> None:
        """Make it drop a function with the next work, if it is cached there. For any thread."""
        size = self._cached.get(digest)
        if size is not None:
            self._unwanted[digest] = size

    def send_drops(self) -> None:
        """Make it drop now what it is to forget."""
        if unwanted := self._take_unwanted():
            with contextlib.suppress(Closed):
                self._send(*_drops(unwanted))

    def _take_unwanted(self) -> dict[bytes, int]:
        """Return what it is to drop, which does not count as cached any more."""
        if not self._unwanted:
            return {}
        unwanted = self._unwanted.copy()
        for digest in unwanted:
            self._cached.pop(digest, None)
        return unwanted

    def _send(self, *messages: DropFunction | CacheFunction | Work) -> None:
        self.frames.send(*messages)
        for message in messages:  # after: to drop something twice does no harm
            if isinstance(message, DropFunction):
                self._unwanted.pop(message.digest, None)

    def cancel(self) -> None:
        """Interrupt its function, and have it acknowledge when all is answered. Raises Closed."""
        self.interrupt()
        self.frames.send(Cancel())

    def receive(self) -> Answer | CancelAcknowledged | None:
        """Replay what it has logged and warned of, and send what it asks for. Return its next other
        message; None if that is not here yet. Raises Closed."""
        while isinstance(message := self.frames.receive(), (Logged, Warned, Outdated)):
            if not isinstance(message, Outdated):
                self._note(message)
            else:
                self.frames.send(self._modules.answer(message))
                self._modules.warn()
        if isinstance(message, Unreadable) and message.about_function:  # the next try begins anew
            self._modules.forget()
            self._latest = None
            self._unwanted.update(self._cached)
        if message is not None and not isinstance(message, Begun):
            self.busy, self.idle_since = False, time.monotonic()
        return cast("Answer | CancelAcknowledged | None", message)

    def _note(self, message: Logged | Warned) -> None:
        if output.outlet is not None:
            output.outlet.note(self.number, message)
        elif isinstance(message, Logged):
            replay(message)
        else:
            reissue(message)

    def relay(self, ready: Container[int]) -> list[int]:
        """Print what it has printed, where descriptors are ready. Return those at end of file."""
        readable_relays = [relay for relay in self.relays if relay.descriptor in ready]
        return [relay.descriptor for relay in readable_relays if not relay.read()]

    def interrupt(self) -> None:
        """Send it SIGINT, which ends the function that it runs."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """End the connection, which ends it once it is idle, and close its descriptors. May be
        called again: an interrupt may have come in between."""
        self.frames.shut_down()
        self.frames.close()
        for relay in self.relays:
            relay.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def abandon(self) -> None:
        """Close its descriptors in a forked child."""
        self.frames.close()
        self.__del__()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close what is still open: an interrupt may have come while nobody held this object. The
        default keeps `os.close` within reach when Python ends and clears the modules."""
        descriptors = [self.pidfd, *(relay.descriptor for relay in self.relays)]
        self.pidfd, self.relays = -1, []
        for descriptor in descriptors:
            if descriptor >= 0:
                close(descriptor)


def _drops(sizes: Mapping[bytes, int]) -> list[CacheFunction | DropFunction]:
    """Return the messages by which functions of so many bytes are dropped."""
    return [DropFunction(digest, large=size > FUNCTION_BYTES) for digest, size in sizes.items()]


#: the workers with events, each with its ready descriptors
ReadyEvents = dict[Worker, set[int]]


class Watch:
    """Some workers and their descriptors, for poll. Kept from call to call: registering them takes
    longer than a short call."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._poll = select.poll()
        self._owners: dict[int, Worker] = {}
        #: an eventfd that wakes the caller of `wait` for another reason; -1: none
        self._wakeup = -1
        #: whether it did so in the last `wait`
        self.woken = False
        for worker in workers:
            self.add(worker)

    def add(self, worker: Worker) -> None:
        # the connection first: output that came before an answer is then reported with it
        for descriptor in worker.descriptors:
            self._poll.register(descriptor, select.POLLIN)
            self._owners[descriptor] = worker

    def remove(self, worker: Worker) -> None:
        for descriptor in worker.descriptors:
            if descriptor in self._owners:
                self._forget(descriptor)

    def watch_wakeup(self, wakeup: int) -> None:
        """Return from `wait` also when this eventfd is readable; -1: no longer."""
        if self._wakeup >= 0:
            self._poll.unregister(self._wakeup)
        self._wakeup = wakeup
        if wakeup >= 0:
            self._poll.register(wakeup, select.POLLIN)

    def relay(self, worker: Worker, ready: set[int]) -> None:
        """Print what a worker has printed, where descriptors are ready."""
        for descriptor in worker.relay(ready):  # closed by its function: it would be ready always
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._owners[descriptor]

    def watch_writable(self, worker: Worker) -> None:
        """Report also when its connection takes more, as long as not everything is sent."""
        more = select.POLLOUT if worker.frames.unsent else 0
        self._poll.modify(worker.frames, select.POLLIN | more)

    def wait(self, seconds: float) -> ReadyEvents:
        """Wait for events, so many seconds at most. Return the workers that have some."""
        events: ReadyEvents = {}
        self.woken = False
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._wakeup:
                self.woken = True
                os.eventfd_read(descriptor)
                continue
            events.setdefault(self._owners[descriptor], set()).add(descriptor)
        return events

    def ended(self) -> list[Worker]:
        """Return the workers that have ended by now."""
        return [worker for worker, events in self.wait(0).items() if worker.pidfd in events]

    def watches(self, workers: Iterable[Worker]) -> bool:
        """Return whether it watches exactly these."""
        return set(self._owners.values()) == set(workers)


def worker_lost_error(
    worker: Worker, ended: Ended | None, *, item: int, doing: str, advice: str
) -> WorkerLost:
    """Return the error for a worker that has ended; `ended` is None where nobody saw how."""
    if ended is None:
        loss = Loss(item, worker.number, worker.pid, None, 0, False, worker.host)
    else:
        how = ended.code, ended.memory, bool(ended.out_of_memory)
        loss = Loss(item, worker.number, worker.pid, *how, host=worker.host)
    return WorkerLost(f"{worker} {_how(loss)} while it {doing}{_memory(loss)}{advice}", loss=loss)


def _how(loss: Loss) -> str:
    if loss.code is None:
        return "ended, cause unknown (the process that starts workers was ended too),"
    return ("was " if loss.code < 0 else "ended with ") + end_as_text(loss.code)


def _memory(loss: Loss) -> str:
    if loss.out_of_memory:
        what = "and the kernel killed it for want of memory: smaller items, or fewer workers"
        return f"; it had at most {format_bytes(loss.memory)} of memory, {what}"
    return f"; it had at most {format_bytes(loss.memory)} of memory" if loss.memory else ""
