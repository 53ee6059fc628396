"""The worker's side of a pool: receive a message, run the items, reply.

`serve` is the loop, `_reply` one chunk, `carry_out` its items one after the other.
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
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from types import FrameType
from typing import Any, TextIO

from weft import faults, resources
from weft._core.failures import Failure, describe
from weft._core.schedule import LONGEST, TIMED
from weft._core.seeding import derive, seed_generators, seed_torch
from weft.engines.local.pool import driver_state, forwarded_warnings, nesting
from weft.engines.local.pool.messages import (
    LOADING,
    NO_ITEM,
    Answer,
    Begun,
    CacheFunction,
    Cancel,
    CancelAcknowledged,
    Done,
    DropFunction,
    Frames,
    Message,
    Modules,
    Settings,
    Stopped,
    Unreadable,
    Update,
    Work,
)
from weft.engines.local.pool.modules import LoadedModules
from weft.engines.local.pool.payload import (
    Payload,
    collect_garbage,
    load,
    load_borrowed,
    pack,
    retain_borrowed,
)
from weft.engines.local.pool.rescue import Rescue
from weft.engines.local.processes import cuda
from weft.engines.local.processes.channel import Closed
from weft.engines.local.processes.linux import return_free_memory
from weft.engines.local.processes.output import LogForwarder
from weft.errors import DeviceUnavailable, LaunchError, WeftError
from weft.resources import (
    CORES,
    own_threads,
    set_own_threads,
    set_threads,
    thread_variables,
    visible_gpus,
)

#: whether a function is running, which SIGINT ends; at other times SIGINT is late and ignored
_interruptible = False

#: whether this process is a child that the worker's function has forked
_forked = False

#: threads of BLAS and the like, and of single libraries, by the variables that the user has set
_threads: tuple[int, dict[str, int]] = 1, {}

#: the environment variables for threads that weft has set
_added: dict[str, str] = {}

#: the GPUs that CUDA saw when it was initialised; None: it was not
_gpus_of_cuda: list[str] | None = None

#: why nothing can be run: the driver's working folder cannot be entered, or its GPUs not be seen
_unfit: Failure | None = None

#: the most items of a large chunk that are run between two looks at the clock
_UNTIMED = 32

_NO_RESULTS = Payload()


def serve(connection: socket.socket, number: int, item: memoryview) -> None:
    """Serve the driver until it closes the connection, or has been silent for as long as it said.
    `item[0]` tells the fork server which item is being run."""
    _set_up_process(number)
    frames = Frames(connection)
    sending = threading.Lock()

    def send(message: Message) -> None:
        with sending:  # any thread may log
            frames.send(message)

    logging.getLogger().addHandler(LogForwarder(send))
    forwarded_warnings.forward(send)
    modules = LoadedModules(frames, send)
    functions: dict[bytes, Callable[[Any], Any] | Failure] = {}
    results = _NO_RESULTS
    rescue = Rescue()

    try:
        while True:
            message = modules.receive()
            if isinstance(message, Work):
                item[0] = LOADING + message.first
                function = modules.failure() or functions[message.digest]
                answer, results = _reply(message, function, item, send, rescue)
                if isinstance(answer, Unreadable) and answer.about_function:
                    modules.forget()
                retain_borrowed()
                send(answer)
                item[0] = NO_ITEM  # should it end now, no item of the next chunk is lost
                if faults.armed:
                    faults.reach("work.replied")
                del answer, function
            elif isinstance(message, CacheFunction):
                functions[message.digest] = _load_function(message)
            elif isinstance(message, DropFunction):
                functions.pop(message.digest, None)
                collect_garbage()
                if message.large:
                    return_free_memory()
            elif isinstance(message, Cancel):
                with contextlib.suppress(WeftError, OSError):  # else it is freed with this process
                    results.release()
                send(CancelAcknowledged())
            elif isinstance(message, Settings):
                frames.limit_receiving(message.idle)
                _adopt(message)
            elif isinstance(message, (Modules, Update)):
                modules.take(message)
            del message
    except Closed:
        atexit._run_exitfuncs()  # os._exit follows, without unwinding the fork server's frames


def _set_up_process(number: int) -> None:
    global _forked
    _forked = False
    resources.worker_number = number
    nesting.become_worker()
    faults.set_rank(number)
    if faults.armed:
        faults.reach("worker.started")
    signal.signal(signal.SIGINT, _on_interrupt)
    # the driver's thread that started the fork server may have blocked it, as Ray's do
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    sys.unraisablehook = _on_unraisable
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = _line_writer(1), _line_writer(2)
    _start_generators()


def _line_writer(descriptor: int) -> TextIO:
    """Return a line-buffered stream, so that each line is sent when it is complete."""
    return open(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False)


def _start_generators() -> None:
    """Seed the random generators anew: workers are forks of one process."""
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    seed_torch(int.from_bytes(os.urandom(8), "little"))


def _adopt(settings: Settings) -> None:
    """Take over the driver's state, with this worker's own share of cores and GPUs."""
    global _unfit, _gpus_of_cuda
    state = driver_state.load(settings.state)
    own = {CORES: str(settings.threads), nesting.DEPTH: str(nesting.depth(state.environment) + 1)}
    if settings.gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = settings.gpu
    if _gpus_of_cuda is None and cuda.is_initialized():
        _gpus_of_cuda = visible_gpus(os.environ)
    driver_state.adopt_environment(state.environment, own)
    _limit_threads(settings.threads)
    driver_state.adopt(state)
    _unfit = None
    if _gpus_of_cuda is not None and _gpus_of_cuda != (wanted := visible_gpus(os.environ)):
        _unfit = describe(_too_late_error(_gpus_of_cuda, wanted))
    try:
        os.chdir(state.folder)
    except OSError as error:
        _unfit = describe(_folder_error(state.folder, error))


def _too_late_error(seen: Sequence[str], wanted: Sequence[str]) -> DeviceUnavailable:
    then, now = (", ".join(gpus) or "no GPU" for gpus in (seen, wanted))
    return DeviceUnavailable(
        f"a worker is to see {now}, but CUDA was initialised in it when it saw {then}, and does "
        "not look again. If an earlier call did that, have fresh workers:\n    weft.shutdown()\n"
        "If it was a module that Python loads by itself (sitecustomize, a .pth file), by "
        "torch.cuda.is_available() for example, take that out of it"
    )


def _folder_error(folder: str, error: OSError) -> LaunchError:
    return LaunchError(
        f"a worker cannot enter the driver's working folder {folder!r} ({error.strerror}), and in "
        "another one files would not be the same; have the driver change to one that workers can "
        "enter:\n    os.chdir(folder)"
    )


def _limit_threads(threads: int) -> None:
    """Set the plan's number of threads, unless the user's environment has another.

    NumPy was loaded with one thread in the fork server, so variables alone do not reach it.
    """
    global _threads
    own = own_threads(os.environ)
    _added.clear()
    _added.update(thread_variables(threads, os.environ))
    os.environ.update(_added)
    variable = os.environ["OMP_NUM_THREADS"]
    count = int(variable) if variable.isdecimal() else threads
    if (count, own) != _threads:
        _threads = count, own
        set_threads(count)
        set_own_threads(own)


def _load_function(message: CacheFunction) -> Callable[[Any], Any] | Failure:
    """Return a function to be cached, or why it cannot be loaded."""
    try:
        function: Callable[[Any], Any] = load(message.function)
    except BaseException as error:  # modules that it imports may raise anything
        return describe(error)
    if faults.armed:
        faults.reach("worker.cached")
    return function


def _reply(
    work: Work,
    function: Callable[[Any], Any] | Failure,
    item: memoryview,
    send: Callable[[Message], None],
    rescue: Rescue,
) -> tuple[Answer, Payload]:
    """Run the items of a chunk. Return the answer, and the payload that holds its memory."""
    global _interruptible
    if _unfit is not None:
        return Unreadable(_unfit, about_function=True), _NO_RESULTS
    if isinstance(function, Failure):
        return Unreadable(function, about_function=True), _NO_RESULTS
    try:
        items = load_borrowed(work.items)
    except Exception as error:  # a class's own unpickling may raise anything
        return Unreadable(describe(error), about_function=False), _NO_RESULTS
    if faults.armed:
        faults.reach("work.received")
    if work.timed:
        send(Begun(time.monotonic()))
    start = time.perf_counter()
    values: list[Any] = []
    failures: list[tuple[int, Failure]] = []
    kind: type[Done | Stopped] = Done
    if work.rescued:
        rescue.begin(partial(_answer_for, work, values, failures, start, send))
    with driver_state.DuringCall():
        try:
            _interruptible = True
            carry_out(
                function,
                items,
                values,
                failures,
                first=work.first,
                seed=work.seed,
                keep_going=work.keep_going,
                noted=item,
            )
            _interruptible = False
        except KeyboardInterrupt:
            _interruptible = False  # at once: another may come
            kind = Stopped
            if not work.keep_going:
                values.clear()
            failures = [failure for failure in failures if failure[0] < len(values)]
        finally:
            _interruptible = False
    rescue.end()
    if _forked:
        _end_child(failures)
    seconds = time.perf_counter() - start
    if faults.armed:
        faults.reach("work.done")
    payload = _pack_values(values, failures, work.first)
    if faults.armed:
        faults.reach("work.packed")
    _flush()
    data, payload.data = payload.data, b""  # the payload is kept only for its memory
    return kind(data, failures, seconds, payload.shared), payload


#: what holds the memory of results that another thread has sent
_rescued = _NO_RESULTS


def _answer_for(
    work: Work,
    values: list[Any],
    failures: list[tuple[int, Failure]],
    start: float,
    send: Callable[[Message], None],
) -> None:
    """Send what is finished of a chunk whose function does not end."""
    global _rescued
    values = values.copy()
    failures = [failure for failure in failures if failure[0] < len(values)]
    _rescued = _pack_values(values, failures, work.first)
    seconds = time.perf_counter() - start
    send(Stopped(_rescued.data, failures, seconds, _rescued.shared, stuck=True))


def _end_child(failures: list[tuple[int, Failure]]) -> None:
    """End a child that the function forked and that has returned from it: only its parent replies.
    The exit code is that of a script that ended so."""
    code = 0
    if failures:
        _, failure = failures[-1]
        code, message = 1, failure.message
        if failure.kind == "SystemExit" and (message in ("", "None") or message.isdecimal()):
            code = int(message) if message.isdecimal() else 0
        else:
            print(failure.text, file=sys.stderr)
    _flush()
    os._exit(code)


def _pack_values(values: list[Any], failures: list[tuple[int, Failure]], first: int) -> Payload:
    """Pack the results. Those that cannot be pickled become failures of their items."""
    try:
        return pack(values, first, "results", owned=True)
    except Exception:  # a class's own pickling may raise anything
        for position, value in enumerate(values):
            try:
                pack([value], first + position, "results")
            except Exception as error:  # this one cannot be pickled
                failures.append((position, describe(error)))
                values[position] = None
        failures.sort(key=lambda failure: failure[0])
    try:
        return pack(values, first, owned=True)
    except Exception as error:  # each can be pickled, but there is no memory for all of them
        failed = describe(error)
        failures[:] = dict([*enumerate([failed] * len(values)), *failures]).items()
        return pack([None] * len(values), first)


def _flush() -> None:
    """Send what was printed, so that it is seen before the results."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            stream.flush()


def _on_interrupt(_: int, frame: FrameType | None) -> None:
    """Interrupt the function, unless it is importing: the module would stay half loaded for all
    later calls. The driver interrupts again, or ends this process."""
    if _interruptible and nesting.module_being_imported(frame) is None:
        raise KeyboardInterrupt


def _on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Report what finalizers raise, other than the KeyboardInterrupt that the driver asked for."""
    if not (_interruptible and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)


def _in_child() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_in_child)


def carry_out(
    function: Callable[[Any], Any],
    items: list[Any],
    values: list[Any],
    failures: list[tuple[int, Failure]],
    *,
    first: int,
    seed: int | None,
    keep_going: bool,
    noted: MutableSequence[int] | memoryview,
    longest: float = LONGEST,
) -> None:
    """Call a function on each item. Append the results to `values`, None where an item failed, and
    to `failures` each failure with its position.

    Empties the list of items: an argument is freed as soon as its call is over. `noted[0]` is the
    index of the item that is being run. When more than `longest` seconds have passed, what is left
    is not run: there are fewer values. In a chunk of more than TIMED items the clock is looked at
    after some items only. Raises KeyboardInterrupt, after which the values are those of the items
    before.
    """
    clock, timed = time.perf_counter, len(items) <= TIMED
    most = len(items) if timed else 1
    deadline = clock() + longest
    items.reverse()
    take, keep = items.pop, values.append
    while items:
        index = first + len(values)
        try:
            # in few steps: most items of a large chunk are short
            for noted[0] in range(index, index + min(most, len(items))):
                if _forked:
                    os._exit(0)  # a child that an earlier item forked, and that has returned
                if seed is not None:
                    seed_generators(derive(seed, first + len(values)))
                keep(function(take()))
                if timed and clock() > deadline:
                    break
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too is the item's, not the worker's
            failures.append((len(values), describe(error)))
            values.append(None)
            if not keep_going:
                items.clear()
        if clock() > deadline:
            items.clear()
        most = max(most, min(2 * most, _UNTIMED))
