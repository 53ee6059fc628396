"""A host's part: an actor of Ray in which weft's own pool runs what the driver sends.

    driver                        actor                            workers of this host
    Request: items      ──>       Supply ──> LocalPool.run  ──>    run them
    Report: results     <──       what has ended            <──

`HostActor` is what Ray runs, one for each map that its driver carries out at the same time.
`HostJob` is a map in it. The actor ends itself, and its workers with it, when the driver has asked
for nothing for some seconds: the link between them may be cut, or the driver stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weft._core.failures import restore
from weft._core.items import Finished, Job, Supplied, Supply
from weft._core.own_modules import is_own_file
from weft.engines.base import Pool
from weft.engines.local.pool import driver_state
from weft.engines.local.pool.messages import Modules, Update
from weft.engines.local.pool.modules import Loaded
from weft.engines.local.processes import output
from weft.engines.ray import arrays
from weft.engines.ray.messages import Begin, Part, Report, Request
from weft.engines.ray.modules import Adopted
from weft.engines.ray.status import RunningMap
from weft.engines.ray.wire import Packed, Sent, pack_values, send_error
from weft.errors import (
    Cancelled,
    EngineUnavailable,
    OutOfMemory,
    RemoteError,
    RemoteTraceback,
    format_bytes,
)
from weft.resources import THREAD_VARIABLES, host_name, own_choice, visible_gpus

#: seconds without a call after which an actor ends itself
_SILENCE = 5.0
#: seconds of work that are not worth a report, as it and what follows take as long
_MOMENT = 0.01
#: seconds until a report that has nothing to tell
_REPORT = 1.0
#: bytes of results in one report, unless one chunk has more
_MOST_BYTES = 256 << 20
#: seconds that a job has to end what still runs
_END = 10.0


class HostActor:
    """Run a host's part of maps, as an actor of Ray. Its calls come in any order, in threads."""

    def __init__(self) -> None:
        # here, as several threads that import it at the same time may see a half of it
        importlib.import_module("weft.engines.local.pool.payload_arrays")
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._job: HostJob | None = None
        self._number = -1
        self._outlet = Output()
        self._modules = Adopted()
        self._loaded = Loaded()
        self._own_path = sys.path[:]
        self._own_environment = own_environment()
        with contextlib.suppress(OSError):  # Ray's niceness, which only a privileged user may undo
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        output.pass_on(self._outlet)
        threading.Thread(target=self._watch, name="weft watch", daemon=True).start()

    def ready(self) -> int:
        """Answer when the actor runs."""
        self._heard = time.monotonic()
        return os.getpid()

    def exchange(self, request: Request) -> Report:
        """Begin a job, take items, and report what has ended."""
        self._heard = time.monotonic()
        try:
            with self._lock:
                job = self._job_of(request)
            if job is None:
                return Report((), None, (), {}, (), None, ended=True)
            for batch in request.batches:
                job.add(batch.spans, batch.items)
            return job.report(request, self._outlet)
        except BaseException as error:  # Ray would raise something else
            sent = send_error(restore_here(error), host_name())
            return Report((), None, (), {}, (), sent, ended=True)

    def running(self) -> list[RunningMap]:
        """Return this host's part of the map that is carried out, for `weft status`."""
        job = self._job
        return [] if job is None else [job.running()]

    def take_back(self, number: int, part: float) -> list[range]:
        """Give back this part of the items that have not begun. Return their indexes."""
        self._heard = time.monotonic()
        with self._lock:
            job = self._job if number == self._number else None
        return [] if job is None else job.take_back(part)

    def end(self, number: int, dropped: Sequence[int] = ()) -> list[tuple[str, int, Any]]:
        """End a job and what still runs of it, and drop arrays. Return what was printed."""
        self._heard = time.monotonic()
        arrays.update({}, dropped)
        with self._lock:
            job = self._job if number == self._number else None
            if number >= self._number:
                self._job, self._number = None, number
        if job is not None:
            job.end()
        return self._outlet.take()

    def close_workers(self) -> None:
        """End the workers."""
        from weft.engines.local.pool import workers

        workers.close_workers()

    def _job_of(self, request: Request) -> HostJob | None:
        """Return the job that a request is about, None if it has been ended."""
        arrays.update(request.arrays, request.dropped)
        if request.job < self._number or (request.job == self._number and self._job is None):
            return None
        if request.job > self._number:
            if self._job is not None:  # its driver has forgotten it
                self._job.end()
            self._job, self._number = None, request.job
        if request.begin is not None:
            self._job = self._job or HostJob(request.begin)
            self._prepare(self._job, request.begin, request.modules)
        return self._job

    def _prepare(self, job: HostJob, begin: Begin, messages: Sequence[Modules | Update]) -> None:
        """Bring modules up to date, and start the job unless some of them are not yet."""
        if begin.archive is not None and begin.archive.digest != self._modules.digest:
            if self._modules.digest:
                self.close_workers()  # they have the old ones loaded
            self._modules.adopt(begin.archive)
            self._loaded = Loaded()
        state = driver_state.load(begin.state)
        paths = [path for path in (self._modules.path,) if path]
        paths += [path for path in state.paths if is_own_file("_", path + "/_.py")]
        paths += [path for path in self._own_path if path not in paths]
        sys.path[:] = paths
        for message in messages:
            if isinstance(message, Modules):
                job.outdated.update(self._loaded.compare(message.digests))
            else:
                job.outdated.clear()
                self._loaded.update(message)
        if job.outdated or job.started:
            return
        failure = self._loaded.take_failure()
        if failure is not None:
            job.fail(restore(failure, "the driver's modules", host=host_name()))
            return
        environment = state.environment
        if not begin.is_driver:
            environment = {**self._own_environment, **begin.variables}
        folder = state.folder if os.path.isdir(state.folder) else os.getcwd()
        captured = driver_state.Captured.received(
            begin.state, paths=paths, environment=environment, folder=folder
        )
        job.start(captured, _gpus(begin, self._own_environment, state.environment))

    def _watch(self) -> None:
        while time.monotonic() - self._heard < _SILENCE:
            time.sleep(_SILENCE / 10)
        os._exit(1)  # its workers see it, and end


#: held while values are loaded: that imports the user's modules, each of which may import others
_loading = threading.Lock()


class HostJob:
    """A map on this host: a thread carries it out by a pool of the local engine."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._supply = Supply(threading.Lock())
        self._changed = threading.Condition()
        self._finished: list[Finished] = []
        #: how many items it has got and not finished
        self._left = 0
        self._done = 0
        self._seconds = 0.0
        self._since = time.monotonic()
        self._failures: list[tuple[range, Exception]] = []
        self._error: BaseException | None = None
        self._cancelled = self._ended = False
        self._thread: threading.Thread | None = None
        #: attributes of modules that are not the driver's yet
        self.outdated: dict[str, list[str]] = {}

    def running(self) -> RunningMap:
        """Return what there is to tell of it."""
        begin = self._begin
        seconds = time.monotonic() - self._since
        return RunningMap(
            begin.address, begin.driver, begin.name, begin.workers, begin.gpus, self._done, seconds
        )

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self, state: driver_state.Captured, gpus: Sequence[str]) -> None:
        """Begin to run items, on these GPUs if there are some."""
        self._thread = threading.Thread(
            target=self._run, args=(state, gpus), name="weft map", daemon=True
        )
        self._thread.start()

    def add(self, spans: tuple[tuple[range, int], ...], packed: Packed) -> None:
        """Take items to run."""
        with self._changed:
            self._left += sum(len(span) for span, _ in spans)
        try:
            with _loading:
                items = packed.load(copy=False)  # the workers get copies
        except Exception as error:  # a class's own unpickling may raise anything
            self._add_singly(spans, error)
            return
        for span, runs in spans:
            own, items = items[: len(span)], items[len(span) :]
            self._supply.add(Supplied(span.start, own, runs))

    def _add_singly(self, spans: tuple[tuple[range, int], ...], error: Exception) -> None:
        with self._changed:
            failed = restore_here(error)
            for span, _ in spans:
                values: list[Any] = [None] * len(span)
                failures = dict.fromkeys(span, failed)
                self._finished.append(Finished(span.start, values, failures, worker=-1, pid=0))
                self._left -= len(span)
            self._changed.notify_all()

    def take_back(self, part: float) -> list[range]:
        """Give back this part of the items that have not begun."""
        with self._changed:
            spans = self._supply.take_back(math.ceil(len(self._supply) * part))
            self._left -= sum(len(span) for span in spans)
            self._changed.notify_all()
        return spans

    def report(self, request: Request, outlet: Output) -> Report:
        """Return what has ended, when there is enough of it."""
        workers = self._begin.workers

        def over() -> bool:
            few = request.more and len(self._supply) < workers
            return self._ended or bool(self.outdated) or self._left == 0 or few

        with self._changed:
            self._changed.wait_for(lambda: self._finished or over(), _REPORT)
            if self._finished:
                self._changed.wait_for(over, request.patience)
                if self._left * self._seconds < _MOMENT * workers * max(1, self._done):
                    # all will have ended before others could take something
                    self._changed.wait_for(lambda: self._left == 0 or self._ended, _MOMENT)
            finished = self._take()
            ended = self._ended and not self._finished
            error = self._error if ended else None
            unbegun = tuple(self._supply.spans())
        parts, values = _pack(finished, self._begin.store)
        sent = None if error is None else send_error(error, host_name())
        return Report(parts, values, unbegun, self.outdated, outlet.take(), sent, ended)

    def _take(self) -> list[Finished]:
        """Remove and return what has ended, but not more than goes well into one report."""
        count, size = 0, 0
        for one in self._finished:
            size += one.received
            if count and size > _MOST_BYTES:
                break
            count += 1
        taken, self._finished = self._finished[:count], self._finished[count:]
        return taken

    def fail(self, error: BaseException) -> None:
        """End the job before it has begun."""
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def end(self) -> None:
        """End what still runs, and return when it has ended."""
        self._cancelled = True
        self._supply.close()
        if self._thread is not None:
            self._thread.join(_END)

    def _run(self, state: driver_state.Captured, gpus: Sequence[str]) -> None:
        error: BaseException | None = None
        try:
            with _loading:
                function, retry_on = self._load_function(), self._begin.retry_on.load()
            pool = _make_pool(self._begin, gpus)
            prepared = pool.prepare(function)
            prepared.state = state
            del function
            try:
                for finished in pool.run(self._job(prepared, retry_on)):
                    with self._changed:
                        self._finished.append(finished)
                        self._left -= len(finished.values)
                        self._done += len(finished.values)
                        self._seconds += finished.seconds
                        self._changed.notify_all()
            finally:
                pool.forget(prepared)
        except Cancelled:
            pass
        except BaseException as caught:  # the driver raises it
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _load_function(self) -> Any:
        packed = self._begin.function
        if isinstance(packed, list):
            import ray

            packed = ray.get(packed[0])
        return packed.load(copy=False)  # the workers get copies

    def _job(self, prepared: Any, retry_on: Any) -> Job:
        begin = self._begin
        return Job(
            prepared,
            self._supply,  # type: ignore[arg-type]
            seed=begin.seed,
            retries=begin.retries,
            retry_on=retry_on,
            keep_going=begin.keep_going,
            one_each=begin.one_each,
            timeout=begin.timeout,
            elapsed=begin.elapsed,
            timeout_each=begin.timeout_each,
            cancelled=lambda: self._cancelled,
        )


def restore_here(error: BaseException) -> Exception:
    """Return an exception that this process has raised, with its traceback as a remote one."""
    import traceback

    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):  # one that would end the driver
        error = RemoteError(f"{type(error).__qualname__}: {error}")
    error.__cause__ = RemoteTraceback(text, f"process {os.getpid()}", None, host_name())
    return error.with_traceback(None)


def _make_pool(begin: Begin, gpus: Sequence[str]) -> Pool:
    from weft.engines.local.pool.pool import LocalPool
    from weft.engines.local.pool.workers import workers

    return LocalPool(begin.workers, workers(None), cores=begin.cores, gpus=gpus)


def _gpus(
    begin: Begin, own: Mapping[bytes, bytes], programs: Mapping[bytes, bytes]
) -> Sequence[str]:
    """Return the GPUs of this host that a job uses, by the environments of the host and of the
    program. Raises EngineUnavailable if there are fewer than its driver counts on."""
    if not begin.gpus:
        return ()
    given = visible_gpus(_decoded(own))
    chosen = given
    if begin.is_driver and (visible := own_choice(_decoded(programs))) is not None:
        chosen = [gpu for gpu in given if gpu in visible]
    if len(chosen) < begin.gpus:
        raise EngineUnavailable(
            f"{begin.gpus} of the GPUs of {host_name()} were to be used; it has "
            f"{', '.join(given) or 'none'}, of which this program may use "
            f"{', '.join(chosen) or 'none'}: CUDA_VISIBLE_DEVICES has to name them here as it did "
            "for weft open"
        )
    return chosen[: begin.gpus]


def _decoded(environment: Mapping[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}


def _pack(finished: list[Finished], store: int) -> tuple[tuple[Part, ...], Packed | None]:
    """Return chunks that have ended, and the values of all of them as one; results of more bytes
    than the `store` become failures."""
    host = host_name()
    failures: list[dict[int, Sent]] = [
        {index: send_error(error, host) for index, error in one.failures.items()}
        for one in finished
    ]
    for position, one in enumerate(finished):
        if one.received > store:
            error = _too_large(one, store)
            failures[position] = dict.fromkeys(_indexes(one), send_error(error, host))
            one.values[:] = [None] * len(one.values)
    values = [one.values for one in finished]
    packed = None
    if finished:
        try:
            packed, _ = pack_values(values)
        except Exception:  # of one that can be unpickled and not be pickled again
            for position, one in enumerate(finished):
                for index, value in enumerate(one.values):
                    try:
                        pack_values(value)
                    except Exception as error:  # this one
                        failures[position][one.first + index] = send_error(restore_here(error))
                        one.values[index] = None
            packed, _ = pack_values(values)
    parts = tuple(
        Part(
            one.first,
            len(one.values),
            tuple(failed.items()),
            one.worker,
            one.pid,
            one.seconds,
            one.sent,
            one.received,
            one.host,
        )
        for one, failed in zip(finished, failures, strict=True)
    )
    return parts, packed


def _indexes(one: Finished) -> range:
    return range(one.first, one.first + len(one.values))


def _too_large(one: Finished, store: int) -> OutOfMemory:
    indexes = _indexes(one)
    which = (
        f"item {indexes[0]} has"
        if len(indexes) == 1
        else f"items {indexes[0]} to {indexes[-1]} have"
    )
    return OutOfMemory(
        f"the result of {which} {format_bytes(one.received)}, and the smallest of Ray's stores, "
        f"through which it would go from {host_name()} to the driver, {format_bytes(store)}; "
        "return a part, or write it to a file"
    )


class Output:
    """Collect what workers have printed and logged, until the next report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: list[tuple[str, int, Any]] = []

    def print(self, stream: str, worker: int, text: str) -> None:
        with self._lock:
            self._taken.append((stream, worker, text))

    def note(self, worker: int, message: Any) -> None:
        with self._lock:
            self._taken.append(("", worker, message))

    def take(self) -> list[tuple[str, int, Any]]:
        """Remove and return it."""
        with self._lock:
            taken, self._taken = self._taken, []
        return taken


def own_environment() -> dict[bytes, bytes]:
    """Return this host's environment without what Ray has added to it: threads are weft's to
    limit."""
    environment = dict(os.environb)
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            before = {line.partition(b"=")[0] for line in file.read().split(b"\0")}
    except OSError:
        before = set()
    for name in map(str.encode, THREAD_VARIABLES):
        if name not in before:
            environment.pop(name, None)
            os.environb.pop(name, None)
    return environment
