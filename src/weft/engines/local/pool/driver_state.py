"""What a process has set for itself, taken over by workers for each call.

    driver                                   worker
    capture, at every call         ──>       adopt, when it differs from the last
                                             DuringCall: what holds for one call only

A few microseconds, so it reads only what is loaded: nobody gets NumPy or torch for it. A library
that the worker loads later, perhaps in the middle of a call, is given its state then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from weft import resources
from weft._core import pickling
from weft.engines.local.pool import forwarded_warnings
from weft.errors import LaunchError


class State(NamedTuple):
    """Describe what a process has set for itself."""

    folder: str
    paths: list[str]
    environment: dict[bytes, bytes]
    arguments: list[str]
    log_level: int
    recursion_limit: int
    #: `warnings.filters`
    filters: tuple[Any, ...]
    #: by the name of a library that is loaded, what `_LIBRARIES` reads of it
    libraries: dict[str, Any]


class Captured:
    """The state of the driver at one time, and the bytes that are sent of it."""

    def __init__(self, state: State) -> None:
        self.state = state

    @classmethod
    def received(cls, data: bytes, **changes: Any) -> Captured:
        """Return the state that a driver on another host has sent, with what differs here."""
        captured = cls(load(data)._replace(**changes))
        captured.data = pickling.dumps(tuple(captured.state))  # its filters are by name already
        return captured

    @cached_property
    def data(self) -> bytes:
        filters = forwarded_warnings.by_name(self.state.filters)
        return pickling.dumps(tuple(self.state._replace(filters=filters)))


#: the last one: usually nothing has changed since
_last: Captured | None = None


def capture() -> Captured:
    """Return the state of this process and thread, the same object as last time if nothing has
    changed. Raises LaunchError if the working folder was deleted."""
    global _last
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError(
            "the working folder of this process has been deleted, so no worker can enter it; "
            "change to one that exists:\n    os.chdir(folder)"
        ) from error
    state = State(
        folder,
        sys.path[:],
        _environment(),
        sys.argv[:],
        logging.getLogger().level,
        sys.getrecursionlimit(),
        tuple(warnings.filters),
        {name: one.read(sys.modules[name]) for name, one in _LIBRARIES.items() if _loaded(name)},
    )
    last = _last
    if last is None or last.state != state:
        last = _last = Captured(state)
    return last


def _environment() -> dict[bytes, bytes]:
    """Return the environment, without decoding each of its variables."""
    data = getattr(os.environ, "_data", None)
    if isinstance(data, dict):
        return data.copy()
    return {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}


def _loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class Library(NamedTuple):
    """Tell how the state of a library is read and set."""

    read: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


class _Torch(NamedTuple):
    """Torch's state; dtypes by name, so that a worker need not load torch to read it."""

    default_dtype: str
    matmul_precision: str
    deterministic: bool
    warn_only: bool
    # of the thread: for one call
    grad: bool
    inference: bool
    #: the devices with autocast, and its dtype there
    autocast: tuple[tuple[str, str], ...]
    #: the kind of device on which tensors are made where none is named; "" for torch's own default
    device: str


def _read_torch(torch: Any) -> _Torch:
    return _Torch(
        str(torch.get_default_dtype()),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _read_autocast(torch),
        _read_device(torch),
    )


def _read_device(torch: Any) -> str:
    """Return what torch.set_default_device, or `with torch.device(...)`, has set in this thread,
    without its number: "cuda" is each process's own."""
    modes = getattr(torch._C, "_len_torch_function_stack", None)  # since 2.0
    if modes is None or not modes():
        return ""
    lowest = torch._C._get_function_stack_at(0)  # where torch keeps it
    device = getattr(lowest, "device", None)
    return device.type if isinstance(device, torch.device) else ""


def _read_autocast(torch: Any) -> tuple[tuple[str, str], ...]:
    if not hasattr(torch, "get_autocast_dtype"):  # before 2.4
        cuda = torch.is_autocast_enabled(), ("cuda", str(torch.get_autocast_gpu_dtype()))
        cpu = torch.is_autocast_cpu_enabled(), ("cpu", str(torch.get_autocast_cpu_dtype()))
        return tuple(one for enabled, one in (cpu, cuda) if enabled)
    return tuple(
        (device, str(torch.get_autocast_dtype(device)))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


def _dtype(torch: Any, name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _set_torch(torch: Any, state: Any) -> None:
    wanted = _Torch(*state)
    torch.set_default_dtype(_dtype(torch, wanted.default_dtype))
    torch.set_float32_matmul_precision(wanted.matmul_precision)
    torch.use_deterministic_algorithms(wanted.deterministic, warn_only=wanted.warn_only)
    resources.prefer_own_gpu()
    if _call is not None:  # it was loaded in the middle of the call
        _enter_torch(_call, torch, wanted)


def _enter_torch(call: contextlib.ExitStack, torch: Any, wanted: _Torch) -> None:
    if not wanted.grad:
        call.enter_context(torch.set_grad_enabled(False))
    if wanted.inference:
        call.enter_context(torch.inference_mode())
    for device, dtype in wanted.autocast:
        call.enter_context(torch.autocast(device, dtype=_dtype(torch, dtype)))
    if wanted.device:
        call.enter_context(torch.device(wanted.device))


def _set_numpy(numpy: Any, state: Any) -> None:
    errors, printing = state
    numpy.seterr(**errors)
    numpy.set_printoptions(**printing)


def _read_decimal(decimal: Any) -> tuple[Any, ...]:
    context = decimal.getcontext()
    _, (*settings, _, traps) = context.__reduce__()
    return (*settings, tuple(signal.__name__ for signal in traps))


def _set_decimal(decimal: Any, state: Any) -> None:
    precision, rounding, least, most, capitals, clamp, traps = state
    signals = [getattr(decimal, name) for name in traps]
    decimal.setcontext(
        decimal.Context(precision, rounding, least, most, capitals, clamp, [], signals)
    )


def _set_locale(locale: Any, state: str) -> None:
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, state)


_LIBRARIES: dict[str, Library] = {
    "numpy": Library(lambda numpy: (numpy.geterr(), numpy.get_printoptions()), _set_numpy),
    "torch": Library(_read_torch, _set_torch),
    "sklearn": Library(
        lambda sklearn: sklearn.get_config(), lambda sklearn, state: sklearn.set_config(**state)
    ),
    "decimal": Library(_read_decimal, _set_decimal),
    "locale": Library(lambda locale: locale.setlocale(locale.LC_ALL), _set_locale),
}

# in the worker

#: the state of libraries that are not loaded yet, by name
_pending: dict[str, Any] = {}

#: torch's state for calls; None: torch is not loaded in the driver
_torch: _Torch | None = None

#: the call under way
_call: contextlib.ExitStack | None = None


def load(data: bytes) -> State:
    """Return the state that the driver has sent."""
    return State(*pickle.loads(data))


def adopt(state: State) -> None:
    """Take over the driver's state, except for its environment and its working folder."""
    global _torch
    logging.getLogger().setLevel(state.log_level)
    sys.path[:] = state.paths
    sys.argv[:] = state.arguments
    sys.setrecursionlimit(max(state.recursion_limit, _LEAST_RECURSION))
    forwarded_warnings.adopt(state.filters)
    _torch = _Torch(*state.libraries["torch"]) if "torch" in state.libraries else None
    _pending.clear()
    for name, wanted in state.libraries.items():
        if _loaded(name):
            _LIBRARIES[name].set(sys.modules[name], wanted)
        else:
            _pending[name] = wanted
    if _pending and not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


#: frames that weft's own calls in a worker need
_LEAST_RECURSION = 200


def adopt_environment(environment: dict[bytes, bytes], own: dict[str, str]) -> None:
    """Take over the driver's environment, with some variables of this worker's own."""
    wanted = environment | {name.encode(): value.encode() for name, value in own.items()}
    zone = os.environ.get("TZ")
    for name in os.environb.keys() - wanted.keys():
        del os.environb[name]
    for name, value in wanted.items():
        if os.environb.get(name) != value:
            os.environb[name] = value
    if os.environ.get("TZ") != zone:
        time.tzset()


class _WhenLoaded:
    """Sets the state of a library when it is imported, perhaps in the middle of a call."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return how to import a library whose state is pending."""
        if name not in _pending:
            return None
        wanted = _pending.pop(name)  # so the next line asks the other finders
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_set(module: Any) -> None:
            try:
                execute(module)
            except BaseException:
                _pending[name] = wanted
                raise
            _LIBRARIES[name].set(module, wanted)

        loader.exec_module = execute_and_set
        return spec


class DuringCall:
    """A context that holds what the driver's thread has set for the call: torch's grad mode,
    autocast, ..."""

    def __enter__(self) -> None:
        global _call
        forwarded_warnings.begin_call()
        _call = contextlib.ExitStack()
        if _torch is not None and _loaded("torch"):
            _enter_torch(_call, sys.modules["torch"], _torch)

    def __exit__(self, *_: object) -> None:
        global _call
        stack, _call = _call, None
        if stack is not None:
            stack.close()


def outside_inference() -> contextlib.AbstractContextManager[Any]:
    """Return a context for what outlives the call: tensors made in inference mode could never be
    used in training."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.inference_mode(False)
    return context
