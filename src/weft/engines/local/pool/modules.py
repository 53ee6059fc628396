"""The user's modules in the workers, brought up to date with the driver's.

    driver                                 worker
    Modules: a digest of every       ──>   imports them, and compares with its own
    attribute, when a module is      <──   Outdated: the attributes that differ, if any
    first used there
    Update: these by value, and      ──>   sets and deletes them
    later all that the driver changes

Functions are rebuilt over the worker's own module, whose variables they go on to use. Where the
driver has changed an object in place (`mod.TABLE["a"] = 1`, a method that was patched, IPython's
autoreload, which changes the old functions and classes too), the worker's object is changed in
place; where the driver's module has another object (`importlib.reload`, `mod.f = g`), so has the
worker's. Whoever holds the object from before has what he would have in the driver.

`SentModules` is the driver's record for one worker, `LoadedModules` is the worker's side.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

from weft._core.digest import Reader, digest, is_plain_instance, own_attributes, type_digest
from weft._core.failures import Failure, describe, warn_caller
from weft._core.modules import ModuleDigests, ModuleWatcher, read_module, slowest
from weft._core.own_modules import home_of, is_foreign, is_importable, own_modules
from weft.engines.interruption import by_signal_handler
from weft.engines.local.pool.messages import Frames, Message, Modules, Outdated, Update
from weft.engines.local.pool.payload import (
    Payload,
    Pickler,
    is_interrupt,
    load,
    unpicklable_error,
)
from weft.engines.local.processes.channel import Closed
from weft.errors import ModuleDiffers, format_bytes

#: an attribute of a module: the names of both
Attribute = tuple[str, str]


def _by_signal_handler(error: Exception) -> bool:
    # a handler is a function that was called where the error was caught; few errors come from one
    traceback = error.__traceback__
    return traceback is not None and traceback.tb_next is not None and by_signal_handler(error)


_watcher = ModuleWatcher(_by_signal_handler)
#: the code of a module's objects may run while they are read, and call weft
_lock = threading.RLock()

#: seconds of a thread's own from which on a look is worth a warning, and whether one was given
_NOTABLE = 0.02
_warned = False


def look(names: Iterable[str]) -> dict[str, ModuleDigests]:
    """Return the digests of the user's modules among these, and of all that they mention,
    as they are now."""
    global _warned
    with _lock:
        began = time.thread_time()
        modules = _watcher.look(names)
        if _warned or time.thread_time() - began <= _NOTABLE:
            return modules
        began = time.thread_time()
        again = _watcher.look(names)
        seconds = time.thread_time() - began
        _warned = seconds > _NOTABLE and _digests(again) == _digests(modules)
        if not _warned:
            return again
        name, value = slowest(modules)
    _warn(seconds, name, value)
    return modules


def _digests(modules: Mapping[str, ModuleDigests]) -> dict[str, Any]:
    return {name: module.digests for name, module in modules.items()}


def _warn(seconds: float, name: str, value: Any) -> None:
    """Warn that modules take long to compare again, most of it for one attribute."""
    size = getattr(value, "nbytes", None) or sys.getsizeof(value)
    warn_caller(
        f"at each call {seconds * 1000:.0f} ms are spent on comparing the data of modules with the "
        f"workers'; most of it on {name} ({format_bytes(size)}). An array that nobody can write "
        f"to is not compared again:\n    {name}.flags.writeable = False\nOther data is better "
        "passed as an argument, or in shared_data="
    )


#: the attributes of which it was warned that workers have their own
_own_told: set[str] = set()


def _warn_of_own(name: str, value: Any, error: Exception) -> None:
    """Warn that workers keep what they have, once for each attribute."""
    if name in _own_told:
        return
    _own_told.add(name)
    warn_caller(
        f"{name} is not in the workers what it is here: it cannot be sent to them ({error}), so "
        "each has the one that its import of the module made. Pass what the function needs as an "
        "argument, or give the class a __getstate__ that leaves out what cannot be pickled"
    )


def _in_child() -> None:
    global _lock, _watcher
    # another thread of the parent's may have been looking
    _lock, _watcher = threading.RLock(), ModuleWatcher(_by_signal_handler)


os.register_at_fork(after_in_child=_in_child)


class SentModules:
    """What a worker has been told of the driver's modules."""

    def __init__(self) -> None:
        self._known: dict[str, ModuleDigests] = {}

    def messages(self, modules: Mapping[str, ModuleDigests]) -> list[Modules | Update]:
        """Return the messages after which the worker has these modules."""
        changes: dict[Attribute, Change] = {}
        deleted: list[Attribute] = []
        for name, now in modules.items():
            before = self._known.get(name)
            if before is None or before.digests is now.digests:
                continue
            deleted += [(name, one) for one in before.digests.keys() - now.digests.keys()]
            for attribute in now.changes_since(before):
                changes[name, attribute] = Change.between(before, now, attribute)
        messages: list[Modules | Update] = []
        if changes or deleted:
            messages.append(make_update(changes, deleted))
        new = {name: now.contents for name, now in modules.items() if name not in self._known}
        return [*messages, Modules(new)] if new else messages

    def note(self, modules: Mapping[str, ModuleDigests]) -> None:
        """Note that the worker has these."""
        self._known.update(modules)

    def answer(self, outdated: Outdated) -> Update:
        """Return the attributes that a worker does not have as they were told; without those of
        modules that have been forgotten since, or that were deleted."""
        changes = {
            (name, attribute): Change(now.values[attribute], now.is_opaque(attribute))
            for name, now in self._known.items()
            for attribute in outdated.attributes.get(name, ())
            if attribute in now.digests
        }
        return make_update(changes, [], first=True)

    def forget(self) -> None:
        """Compare all modules again: something went wrong in the worker."""
        self._known.clear()


class Change(NamedTuple):
    """A new value of an attribute."""

    value: Any
    #: whether it is, or holds, something of which only the type is compared
    opaque: bool
    #: whether the old object is to have it, too
    in_place: bool = False

    @property
    def partly(self) -> bool:
        """Return whether it is compared, but for something in it."""
        return self.opaque and digest(self.value) != type_digest(self.value)

    @classmethod
    def between(cls, before: ModuleDigests, now: ModuleDigests, attribute: str) -> Change:
        """Return what has become of an attribute."""
        value, old = now.values[attribute], before.values.get(attribute)
        content, version = now.digests[attribute]
        _, before_version = before.digests.get(attribute, (b"", 0))
        followed = (
            version == before_version
            and type(value) is type(old)
            and digest(old, _by_signal_handler) == content
        )
        return cls(value, now.is_opaque(attribute), value is old or followed)


def make_update(
    changes: Mapping[Attribute, Change], deleted: list[Attribute], *, first: bool = False
) -> Update:
    """Return the message with these changes, or with the reason why they cannot be sent.

    Values that are not compared and cannot be sent are left out; so are, when a worker has just
    imported a module, foreign functions: their state is each process's own.
    """
    try:
        payload, changes = _pack(changes, first)
    except Exception as error:  # a class's own pickling may raise anything
        if is_interrupt(error):
            raise
        return Update(b"", {}, deleted, describe(error))
    digests: dict[Attribute, bytes] = {}
    for attribute, change in changes.items():
        reader = Reader(_by_signal_handler)
        content = reader.digest(change.value)  # as it is now: another thread may have changed it
        if not reader.is_opaque and not reader.has_library_objects:
            digests[attribute] = content
    return Update(payload.data, digests, deleted, None)


def _pack(
    changes: Mapping[Attribute, Change], first: bool
) -> tuple[Payload, Mapping[Attribute, Change]]:
    """Pack new values. Return also those that were packed."""

    class ByValue(AttributePickler):
        sent = changes
        in_place = {  # noqa: RUF012  nobody changes it
            id(change.value): attribute
            for attribute, change in changes.items()
            if change.in_place and is_plain_instance(change.value)
        }

    payload = Payload(owned=True)
    try:
        values = {one: (change.value, change.in_place) for one, change in changes.items()}
        payload.dump_by(ByValue, values)
    except Exception as error:
        payload.release()
        if is_interrupt(error):
            raise
        for (module, name), change in changes.items():
            others = {one: value for one, value in changes.items() if one != (module, name)}
            if _can_be_sent(ByValue, change.value):
                continue
            if not (change.opaque or (first and is_foreign(change.value))):
                raise unpicklable_error(change.value, f"{module}.{name}", error) from error
            if change.partly:
                _warn_of_own(f"{module}.{name}", change.value, error)
            return _pack(others, first)
        raise
    return payload, changes


def _can_be_sent(kind: type[AttributePickler], value: Any) -> bool:
    payload = Payload()
    try:
        payload.dump_by(kind, value)
    except Exception as error:
        if is_interrupt(error):
            raise
        return False
    finally:
        payload.release()
    return True


class AttributePickler(Pickler):
    """Pickles by value the functions and classes that are sent; others as cloudpickle does."""

    sent: Mapping[Attribute, Change]
    #: by identity, the instances whose attributes the worker's own object is to have
    in_place: Mapping[int, Attribute]

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild an object in the worker."""
        if id(value) in self.in_place:
            made_of = type(value), self.in_place[id(value)]
            return _make_instance, made_of, vars(value), None, None, _replace_attributes
        if type(value) is FunctionType and self._is_sent(value):
            home = home_of(value)
            if home is not None:
                return self._function(value, home)
        elif isinstance(value, type) and self._is_sent(value):
            return self._class(value)
        elif type(value) is functools._lru_cache_wrapper and self._is_sent(value):
            return _make_lru_cache, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)

    def _is_sent(self, value: Any) -> bool:
        """Return whether the worker does not have this function or class under its name."""
        if isinstance(value, type) and value.__module__ not in own_modules():
            return False
        attribute = value.__module__, value.__qualname__.partition(".")[0]
        return attribute in self.sent or not is_importable(value)

    def _existing(self, value: Any) -> Attribute | None:
        """Return the attribute whose object is to be changed in place."""
        attribute = value.__module__, value.__qualname__
        change = self.sent.get(attribute)
        return (
            attribute if change is not None and change.in_place and change.value is value else None
        )

    def _function(self, function: FunctionType, home: ModuleType) -> Any:
        closure = function.__closure__
        contents = None if closure is None else [*map(_contents, closure)]
        state = {
            "__code__": function.__code__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__annotations__": function.__annotations__,
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__name__": function.__name__,
            "__qualname__": function.__qualname__,
        }
        made_of = (function.__code__, home.__name__, self._existing(function))
        return _make_function, made_of, (state, function.__dict__, contents), None, None, _fill

    def _class(self, kind: type) -> Any:
        own = own_attributes(kind)
        slots = vars(kind).get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else tuple(slots)
        start = {name: vars(kind)[name] for name in ("__slots__",) if name in vars(kind)}
        start |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        if isinstance(kind, enum.EnumMeta):
            members: Mapping[str, Any] = kind.__members__
            start |= {name: member._value_ for name, member in members.items()}
        state = {name: value for name, value in own.items() if name not in (*slots, "__slots__")}
        extra = ("__doc__", "__annotations__", "__dataclass_fields__", "__dataclass_params__")
        state |= {name: vars(kind)[name] for name in extra if name in vars(kind)}
        made_of = (type(kind), kind.__name__, kind.__bases__, start, self._existing(kind))
        return _make_class, made_of, state, None, None, _set_attributes


class _NoContent(enum.Enum):
    """Stands for the content of an empty cell. An Enum: unpickled, it is the same object."""

    EMPTY = 0


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NoContent.EMPTY


# in the worker


class LoadedModules:
    """The modules that the driver has told this worker of."""

    def __init__(self, frames: Frames, send: Callable[[Outdated], None]) -> None:
        self._frames, self._send = frames, send
        #: messages that came while it waited for Update
        self._waiting: deque[Message] = deque()
        #: the digests of those that could not be imported yet
        self._later: dict[str, dict[str, bytes]] = {}
        #: why the next chunk cannot be run
        self._failure: Failure | None = None

    def receive(self) -> Message | None:
        """Return the driver's next message. Raises Closed, also if there was none for long."""
        message = self._waiting.popleft() if self._waiting else self._frames.receive()
        if message is None and not self._frames.incomplete:
            raise Closed("nobody has needed this worker for long")
        return message

    def take(self, message: Modules | Update) -> None:
        """Compare modules with the driver's, or change them. Raises Closed."""
        if isinstance(message, Update):
            self._update(message)
            return
        outdated = self._compare(message.digests)
        if outdated:
            self._send(Outdated(outdated))
            while not isinstance(answer := self._frames.receive(), Update):
                if answer is not None:  # nothing has come for long
                    self._waiting.append(answer)
            self._update(answer)

    def failure(self) -> Failure | None:
        """Return why the next chunk cannot be run, if it cannot. Raises Closed."""
        # modules that could not be imported, and have been since
        loaded = {name: one for name, one in self._later.items() if name in sys.modules}
        if loaded:
            self.take(Modules(loaded))
        failure, self._failure = self._failure, None
        return failure

    def forget(self) -> None:
        """Forget what it was told of modules that it could not import, as the driver does."""
        self._later.clear()

    def _update(self, update: Update) -> None:
        if update.failure is not None:
            self._failure = update.failure
            return
        try:
            _apply(update)
        except BaseException as error:  # modules that it imports may raise anything
            self._failure = describe(error)

    def _compare(self, digests: Mapping[str, dict[str, bytes]]) -> dict[str, list[str]]:
        """Import modules, delete attributes that the driver does not have, and return those that
        are not the driver's."""
        outdated: dict[str, list[str]] = {}
        for name, expected in digests.items():
            try:
                module = importlib.import_module(name)
            except BaseException:  # the function's own import says why, if it needs it
                self._later[name] = expected
                continue
            self._later.pop(name, None)
            own = read_module(module, expected)
            for extra in own.keys() - expected.keys():
                if not isinstance(vars(module)[extra], ModuleType):
                    del vars(module)[extra]
            differing = [
                one
                for one, content in expected.items()
                if own.get(one) != content and not one.startswith("@")  # pytest's
            ]
            if differing:
                outdated[name] = differing
        return outdated


def _apply(update: Update) -> None:
    """Set and delete attributes. Raises ModuleDiffers if one is not the driver's then."""
    for name, attribute in update.deleted:
        vars(importlib.import_module(name)).pop(attribute, None)
    for (name, attribute), (value, in_place) in load(update.values).items():
        variables = vars(importlib.import_module(name))
        if not (in_place and _change_in_place(variables.get(attribute), value)):
            variables[attribute] = value
    for (name, attribute), expected in update.digests.items():
        if digest(vars(sys.modules[name])[attribute]) != expected:
            raise ModuleDiffers(
                f"{name}.{attribute} in a worker differs from the driver's, and cannot be "
                "changed there; start new workers, which import it anew:\n    weft.shutdown()"
            )


def _change_in_place(old: Any, value: Any) -> bool:
    """Give an object the content of another. Return whether that could be done."""
    if type(old) is not type(value):
        return False
    if old is value:  # changed when it was loaded
        return True
    if type(value) in (dict, set):
        old.clear()
        old.update(value)
    elif type(value) in (list, bytearray):
        old[:] = value
    elif _is_array_like(old, value):
        old[...] = value
    else:
        return False
    return True


def _is_array_like(old: Any, value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and (old.shape, old.dtype, old.flags.writeable) == (value.shape, value.dtype, True)
    )


def _at(attribute: Attribute | None) -> Any:
    """Return what is to be changed in place; None if there is nothing."""
    if attribute is None:
        return None
    name, path = attribute
    return vars(sys.modules[name]).get(path)


def _make_function(code: Any, home: str, existing: Attribute | None) -> FunctionType:
    old = _at(existing)
    if type(old) is FunctionType and len(old.__code__.co_freevars) == len(code.co_freevars):
        return old
    closure = tuple(CellType() for _ in code.co_freevars)
    variables = vars(importlib.import_module(home))
    return FunctionType(code, variables, code.co_name, None, closure)


def _fill(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any], Any]) -> None:
    attributes, own, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.clear()
    function.__dict__.update(own)
    for cell, content in zip(function.__closure__ or (), contents or (), strict=True):
        if content is not _NoContent.EMPTY:
            cell.cell_contents = content


def _make_instance(kind: Any, existing: Attribute) -> Any:
    old = _at(existing)
    return old if type(old) is kind else object.__new__(kind)


def _replace_attributes(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


def _make_class(
    kind: Any,
    name: str,
    bases: tuple[type, ...],
    start: dict[str, Any],
    existing: Attribute | None,
) -> type:
    old = _at(existing)
    slots = start.get("__slots__")
    same = isinstance(old, type) and old.__bases__ == bases and type(old) is kind
    if same and vars(old).get("__slots__") == slots and not issubclass(kind, enum.EnumMeta):
        return old  # type: ignore[no-any-return]
    return types.new_class(name, bases, {"metaclass": kind}, lambda space: space.update(start))


def _set_attributes(kind: type, attributes: dict[str, Any]) -> None:
    for name in own_attributes(kind).keys() - attributes.keys() - {"__slots__"}:
        if not isinstance(vars(kind)[name], types.MemberDescriptorType):
            delattr(kind, name)
    for name, value in attributes.items():
        setattr(kind, name, value)


def _make_lru_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)
