"""A worker: receive, run, reply.

What a worker does with a chunk: run the items one after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

from weft import faults
from weft._core.failures import Failure, describe
from weft._core.seeding import derive, seed_generators, seed_torch
from weft.engines.local.pool.messages import (
    LOADING,
    Answer,
    CacheFunction,
    Cancel,
    CancelAcknowledged,
    Done,
    DropFunction,
    Frames,
    Message,
    Settings,
    Stopped,
    Unreadable,
    Work,
)
from weft.engines.local.pool.payload import Payload, load, load_borrowed, pack, retain_borrowed
from weft.engines.local.processes.channel import Closed
from weft.engines.local.processes.output import LogForwarder
from weft.errors import LaunchError, WeftError
from weft.resources import CORES, own_threads, set_own_threads, set_threads, thread_variables

#: while a function is run, a SIGINT ends it; at other times it comes too late and means nothing
_interruptible = False

#: whether this is a child that the worker's function forked
_forked = False

#: of BLAS and the like, and the variables that say so to those still to be loaded
_threads: tuple[int, dict[str, int]] = 1, {}

_added: dict[str, str] = {}

#: why nothing can be run: the driver's working folder cannot be entered
_unfit: Failure | None = None

_NO_RESULTS = Payload()


def serve(connection: socket.socket, number: int, item: memoryview) -> None:
    """Do what the driver says until it hangs up. `item` is where to note what is being run."""
    _set_up_process(number)
    frames = Frames(connection)
    sending = threading.Lock()

    def send(message: Message) -> None:
        with sending:  # any thread may log
            frames.send(message)

    logging.getLogger().addHandler(LogForwarder(send))
    functions: dict[bytes, Callable[[Any], Any] | Failure] = {}
    results = _NO_RESULTS

    def note(index: int) -> None:
        if _forked:
            os._exit(0)  # a child of the last item that has returned from its function
        item[0] = index

    try:
        while True:
            message = frames.receive()
            if isinstance(message, Work):
                note(LOADING + message.first)
                answer, results = _reply(message, functions[message.digest], note)
                retain_borrowed()
                send(answer)
                if faults.armed:
                    faults.reach("work.replied")
                del answer
            elif isinstance(message, CacheFunction):
                functions[message.digest] = _learn(message)
                if faults.armed:
                    faults.reach("worker.learned")
            elif isinstance(message, DropFunction):
                functions.pop(message.digest, None)
            elif isinstance(message, Cancel):
                with contextlib.suppress(WeftError, OSError):  # else it goes with this process
                    results.release()
                send(CancelAcknowledged())
            elif isinstance(message, Settings):
                _adopt(message)
            del message
    except Closed:
        atexit._run_exitfuncs()  # it ends without unwinding the server's frames


def _set_up_process(number: int) -> None:
    global _forked
    _forked = False
    faults.set_rank(number)
    if faults.armed:
        faults.reach("worker.started")
    signal.signal(signal.SIGINT, _on_interrupt)
    sys.unraisablehook = _on_unraisable
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = _line_writer(1), _line_writer(2)
    _start_generators()


def _line_writer(descriptor: int) -> TextIO:
    """A stream that sends each line when it is complete."""
    return open(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False)


def _start_generators() -> None:
    """Workers are copies of one process; their random numbers must not be."""
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    seed_torch(int.from_bytes(os.urandom(8), "little"))


def _adopt(settings: Settings) -> None:
    """See the world as the driver does."""
    global _unfit
    if settings.environment is not None:
        os.environ.clear()
        os.environ.update(settings.environment)
    logging.getLogger().setLevel(settings.log_level)
    os.environ[CORES] = str(settings.threads)
    _limit_threads(settings.threads)
    sys.path[:] = settings.paths
    _unfit = None
    try:
        os.chdir(settings.folder)
    except OSError as error:
        _unfit = describe(_folder_error(settings.folder, error))


def _folder_error(folder: str, error: OSError) -> LaunchError:
    return LaunchError(
        f"a worker cannot enter the driver's working folder {folder!r} ({error.strerror}), and in "
        "another one files would not be the same; have the driver change to one that workers can "
        "enter:\n    os.chdir(folder)"
    )


def _limit_threads(threads: int) -> None:
    """The plan's number of threads, unless the user's environment says another.

    NumPy was loaded with one thread, the fork server's.
    """
    global _threads
    for name in _added:
        os.environ.pop(name, None)
    own = own_threads(os.environ)
    _added.clear()
    _added.update(thread_variables(threads, os.environ))
    os.environ.update(_added)
    said = os.environ["OMP_NUM_THREADS"]
    wanted = int(said) if said.isdecimal() else threads
    if (wanted, own) != _threads:
        _threads = wanted, own
        set_threads(wanted)
        set_own_threads(own)


def _learn(message: CacheFunction) -> Callable[[Any], Any] | Failure:
    try:
        function: Callable[[Any], Any] = load(message.function)
        return function
    except BaseException as error:  # whatever a module raises that is imported now
        return describe(error)


def _reply(
    work: Work,
    function: Callable[[Any], Any] | Failure,
    note: Callable[[int], None],
) -> tuple[Answer, Payload]:
    """Run the items; the answer, and what it was made from."""
    global _interruptible
    if _unfit is not None:
        return Unreadable(_unfit, about_function=True), _NO_RESULTS
    if isinstance(function, Failure):
        return Unreadable(function, about_function=True), _NO_RESULTS
    try:
        items = load_borrowed(work.items)
    except Exception as error:  # whatever a class's own unpickling raises
        return Unreadable(describe(error), about_function=False), _NO_RESULTS
    if faults.armed:
        faults.reach("work.received")
    start = time.perf_counter()
    try:
        _interruptible = True
        values, failures = carry_out(
            function,
            items,
            first=work.first,
            seed=work.seed,
            keep_going=work.keep_going,
            note=note,
        )
        _interruptible = False
    except KeyboardInterrupt:
        _interruptible = False  # at once: another may come
        return Stopped(), _NO_RESULTS
    finally:
        _interruptible = False
    if _forked:
        _end_child(failures)
    seconds = time.perf_counter() - start
    if faults.armed:
        faults.reach("work.done")
    packed = _pack_values(values, failures, work.first)
    if faults.armed:
        faults.reach("work.packed")
    _flush()
    payload, packed.payload = packed.payload, b""  # it is kept only for its memory
    return Done(payload, failures, seconds, packed.shared), packed


def _end_child(failures: list[tuple[int, Failure]]) -> None:
    """A child that a function forked, and that has left the function: only its parent replies."""
    code = 0
    if failures:
        kind, message = failures[-1][1].kind, failures[-1][1].message
        code = 1
        if kind == "SystemExit" and (message in ("", "None") or message.isdecimal()):
            code = int(message) if message.isdecimal() else 0
        else:
            print(failures[-1][1].text, file=sys.stderr)
    _flush()
    os._exit(code)


def _pack_values(values: list[Any], failures: list[tuple[int, Failure]], first: int) -> Payload:
    """The results, without those that cannot be sent: these are failures of their items."""
    try:
        return pack(values, first, "results", pinned=True)
    except Exception:  # a class's own pickling may raise anything
        for position, value in enumerate(values):
            try:
                pack([value], first + position, "results")
            except Exception as error:  # this is the one, or one of them
                failures.append((position, describe(error)))
                values[position] = None
        failures.sort(key=lambda failure: failure[0])
    try:
        return pack(values, first, pinned=True)
    except Exception as error:  # each of them can be sent, but there is no memory for all
        failed = describe(error)
        failures[:] = dict([*enumerate([failed] * len(values)), *failures]).items()
        return pack([None] * len(values), first)


def _flush() -> None:
    """What was printed by now is seen before the results are."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            stream.flush()


def _on_interrupt(_: int, frame: FrameType | None) -> None:
    if _interruptible and not _is_importing(frame):
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being loaded, which would stay half loaded for all later calls. Who
    wants this call to end interrupts it again, or ends this process."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """An interrupt that came in a finalizer ends nothing, and is no news: the driver asked for it,
    and will not ask twice."""
    if not (_interruptible and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)


def _in_child() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_in_child)


def carry_out(
    function: Callable[[Any], Any],
    items: list[Any],
    *,
    first: int,
    seed: int | None,
    keep_going: bool,
    note: Callable[[int], None],
) -> tuple[list[Any], list[tuple[int, Failure]]]:
    """The results, None where an item failed, and the failures by position.

    Takes the items out of their list: an argument is gone as soon as its call is over. `note` is
    told the index of each item before its call. KeyboardInterrupt ends it.
    """
    values: list[Any] = []
    failures: list[tuple[int, Failure]] = []
    items.reverse()
    while items:
        index = first + len(values)
        note(index)
        try:
            if seed is not None:
                seed_generators(derive(seed, index))
            values.append(function(items.pop()))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too is the item's, not the worker's
            failures.append((len(values), describe(error)))
            values.append(None)
            if not keep_going:
                items.clear()
    return values, failures
