"""The user's modules in the workers, brought up to date with the driver's.

    driver                                 worker
    Modules: a digest of every       ──>   imports them, and compares with its own
    attribute, when a module is      <──   Outdated: the attributes that differ, if any
    first used there
    Update: these by value, and      ──>   sets and deletes them
    later all that the driver changes

Where the driver has changed an object in place (`mod.TABLE["a"] = 1`, a method that was patched,
IPython's autoreload, which changes the old functions and classes too), the worker's object is
changed in place; where the driver's module has another object (`importlib.reload`, `mod.f = g`), so
has the worker's. Whoever holds the object from before has what he would have in the driver.

`SentModules` is the driver's record for one worker, `LoadedModules` is the worker's side.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from weft._core.digest import Reader, digest, type_digest
from weft._core.failures import Failure, describe, warn_caller
from weft._core.modules import ModuleDigests, ModuleWatcher, read_module, slowest
from weft._core.own_modules import is_foreign, own_modules
from weft.engines.interruption import by_signal_handler
from weft.engines.local.pool.by_value import Attribute, ByValuePickler, change_in_place
from weft.engines.local.pool.messages import Frames, Message, Modules, Outdated, Update
from weft.engines.local.pool.payload import Payload, is_interrupt, load, unpicklable_error
from weft.engines.local.processes.channel import Closed
from weft.errors import ModuleDiffers, format_bytes


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


def _warn_of_own(name: str, reason: str) -> None:
    """Warn that workers keep what they have, once for each attribute."""
    if name in _own_told:
        return
    _own_told.add(name)
    warn_caller(
        f"{name} is not in the workers what it is here: it cannot be sent to them ({reason}), so "
        "each has the one that its import of the module made. Pass what the function needs as an "
        "argument, or give the class a __getstate__ that leaves out what cannot be pickled"
    )


def _in_child() -> None:
    global _lock, _watcher
    # another thread of the parent's may have been looking
    _lock, _watcher = threading.RLock(), ModuleWatcher(_by_signal_handler)


os.register_at_fork(after_in_child=_in_child)


class SentModules:
    """Record what a worker has been told of the driver's modules."""

    def __init__(self, payload: Callable[[], Payload] = lambda: Payload(owned=True)) -> None:
        """Send values as payloads that `payload` makes."""
        self._payload = payload
        self._known: dict[str, ModuleDigests] = {}
        #: the attributes that it has as its own import made them, and why they cannot be sent
        self._unsent: dict[str, str] = {}

    def messages(self, modules: Mapping[str, ModuleDigests]) -> list[Modules | Update]:
        """Return the messages after which the worker has these modules."""
        changes: dict[Attribute, Change] = {}
        deleted: list[Attribute] = []
        compared: dict[str, dict[str, bytes]] = {}
        for name, now in modules.items():
            before = self._known.get(name)
            if before is None or now.is_reloaded_since(before):
                compared[name] = now.contents
            if before is None or before.digests is now.digests:
                continue
            deleted += [(name, one) for one in before.digests.keys() - now.digests.keys()]
            for attribute in now.changes_since(before):
                changes[name, attribute] = Change.between(before, now, attribute)
        messages: list[Modules | Update] = []
        if changes or deleted:
            messages.append(self._update(changes, deleted))
        return [*messages, Modules(compared)] if compared else messages

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
        return self._update(changes, [], first=True)

    def _update(
        self,
        changes: Mapping[Attribute, Change],
        deleted: list[Attribute],
        *,
        first: bool = False,
    ) -> Update:
        update, unsent = make_update(changes, deleted, first=first, make=self._payload)
        self._unsent.update(unsent)
        return update

    def warn(self) -> None:
        """Warn of what could not be sent. Called when the messages are sent: the program's rules
        for warnings may raise them."""
        unsent, self._unsent = self._unsent, {}
        for name, reason in unsent.items():
            _warn_of_own(name, reason)

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
        return self.opaque and _holds_data(self.value, [])

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


def _holds_data(value: Any, around: list[Any]) -> bool:
    """Return whether there is anything in a value that is compared: not in a lock, a connection or
    a weak reference, nor in a list of such, in which each process has its own as well."""
    if any(one is value for one in around):
        return False
    if type(value) in (list, tuple, set, frozenset, dict):
        parts = value.values() if type(value) is dict else value
        return any(_holds_data(part, [*around, value]) for part in list(parts))
    return digest(value) != type_digest(value)


def make_update(
    changes: Mapping[Attribute, Change],
    deleted: list[Attribute],
    *,
    first: bool = False,
    make: Callable[[], Payload] = lambda: Payload(owned=True),
) -> tuple[Update, dict[str, str]]:
    """Return the message with these changes, or with the reason why they cannot be sent.

    Values that are not compared and cannot be sent are left out; so are, when a worker has just
    imported a module, foreign functions: their state is each process's own. Return also those of
    which a part is compared, with the reason why they cannot be sent.
    """
    try:
        payload, changes, unsent = _pack(changes, first, make)
    except Exception as error:  # a class's own pickling may raise anything
        if is_interrupt(error):
            raise
        return Update(b"", {}, deleted, describe(error)), {}
    digests: dict[Attribute, bytes] = {}
    for attribute, change in changes.items():
        reader = Reader(_by_signal_handler)
        content = reader.digest(change.value)  # as it is now: another thread may have changed it
        if not reader.is_opaque and not reader.has_library_objects:
            digests[attribute] = content
    return Update(payload.data, digests, deleted, None), unsent


def _pack(
    changes: Mapping[Attribute, Change], first: bool, make: Callable[[], Payload]
) -> tuple[Payload, Mapping[Attribute, Change], dict[str, str]]:
    """Pack new values. Return also those that were packed, and those of the others of which a part
    is compared, with the reason."""
    unsent: dict[str, str] = {}
    try:
        return _packed(changes, make), changes, unsent
    except Exception as error:
        if is_interrupt(error):
            raise
        left_out = [one for one in changes if not _can_be_sent(changes, one, make)]
        for module, name in left_out:
            change = changes[module, name]
            if not (change.opaque or (first and is_foreign(change.value))):
                raise unpicklable_error(change.value, f"{module}.{name}", error) from error
            if change.partly:
                unsent[f"{module}.{name}"] = str(error)
        if not left_out:
            raise
    changes = {one: change for one, change in changes.items() if one not in left_out}
    return _packed(changes, make), changes, unsent


def _packed(
    changes: Mapping[Attribute, Change],
    make: Callable[[], Payload],
    only: Attribute | None = None,
) -> Payload:
    """Pack new values, or one of them."""

    class Pickler(ByValuePickler):
        sent = changes.keys()
        in_place = {  # noqa: RUF012  nobody changes it
            id(change.value): attribute for attribute, change in changes.items() if change.in_place
        }

    payload = make()
    try:
        chosen = changes if only is None else (only,)
        values = {one: (changes[one].value, changes[one].in_place) for one in chosen}
        payload.dump_by(Pickler, values)
    except BaseException:
        payload.release()
        raise
    return payload


def _can_be_sent(
    changes: Mapping[Attribute, Change], attribute: Attribute, make: Callable[[], Payload]
) -> bool:
    try:
        _packed(changes, make, attribute).release()
    except Exception as error:
        if is_interrupt(error):
            raise
        return False
    return True


# in the worker


class Loaded:
    """The modules that the driver has told this process of."""

    def __init__(self) -> None:
        #: the digests of those that could not be imported yet
        self._later: dict[str, dict[str, bytes]] = {}
        #: why what comes next cannot be run
        self._failure: Failure | None = None

    def forget(self) -> None:
        """Forget what it was told of modules that it could not import, as the driver does."""
        self._later.clear()

    def take_failure(self) -> Failure | None:
        """Return why what comes next cannot be run, if it cannot, and forget that."""
        failure, self._failure = self._failure, None
        return failure

    def update(self, update: Update) -> None:
        """Set and delete attributes of modules as the driver says."""
        if update.failure is not None:
            self._failure = update.failure
            return
        try:
            _apply(update)
        except BaseException as error:  # modules that it imports may raise anything
            self._failure = describe(error)

    def compare(self, digests: Mapping[str, dict[str, bytes]]) -> dict[str, list[str]]:
        """Import modules, delete attributes that the driver does not have, and return those that
        are not the driver's."""
        outdated: dict[str, list[str]] = {}
        clear_caches()
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


class LoadedModules(Loaded):
    """The same of a worker, whose driver is at the other end of a connection."""

    def __init__(self, frames: Frames, send: Callable[[Outdated], None]) -> None:
        super().__init__()
        self._frames, self._send = frames, send
        #: messages that came while it waited for Update
        self._waiting: deque[Message] = deque()

    def receive(self) -> Message | None:
        """Return the driver's next message. Raises Closed, also if there was none for long."""
        message = self._waiting.popleft() if self._waiting else self._frames.receive()
        if message is None and not self._frames.incomplete:
            raise Closed("nobody has needed this worker for long")
        return message

    def take(self, message: Modules | Update) -> None:
        """Compare modules with the driver's, or change them. Raises Closed."""
        if isinstance(message, Update):
            self.update(message)
            return
        outdated = self.compare(message.digests)
        if outdated:
            self._send(Outdated(outdated))
            while not isinstance(answer := self._frames.receive(), Update):
                if answer is not None:  # nothing has come for long
                    self._waiting.append(answer)
            self.update(answer)

    def failure(self) -> Failure | None:
        """Return why the next chunk cannot be run, if it cannot. Raises Closed."""
        # modules that could not be imported, and have been since
        loaded = {name: one for name, one in self._later.items() if name in sys.modules}
        if loaded:
            self.take(Modules(loaded))
        return self.take_failure()


def _apply(update: Update) -> None:
    """Set and delete attributes. Raises ModuleDiffers if one is not the driver's then."""
    for name, attribute in update.deleted:
        vars(importlib.import_module(name)).pop(attribute, None)
    for (name, attribute), (value, in_place) in load(update.values).items():
        variables = vars(importlib.import_module(name))
        if not (in_place and change_in_place(variables.get(attribute), value)):
            variables[attribute] = value
    clear_caches()
    for (name, attribute), expected in update.digests.items():
        if digest(vars(sys.modules[name])[attribute]) != expected:
            raise ModuleDiffers(
                f"{name}.{attribute} in a worker differs from the driver's, and cannot be "
                "changed there; start new workers, which import it anew:\n    weft.shutdown()"
            )


def clear_caches() -> None:
    """Clear the caches of functions and methods of the user's modules: what is in them was computed
    with what the modules had before."""
    for name, module in own_modules().items():
        values = [*vars(module).values()]
        classes = [one for one in values if isinstance(one, type) and one.__module__ == name]
        for kind in classes:
            values += [getattr(one, "__func__", one) for one in vars(kind).values()]
        for one in values:
            if type(one) is functools._lru_cache_wrapper:
                one.cache_clear()
