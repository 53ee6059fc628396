"""The user's own modules: whether the driver's and a worker's are the same.

Workers import the modules of a function by name, so that a module's state is one, whoever uses it.
But a file may be edited, a module reloaded, an attribute patched, a constant changed. So each call
compares them, attribute by attribute:

    driver                                        worker
    look: ModuleDigests of each module ──>        read_module: the same of its own
    that the function uses                        what differs is sent by value

`ModuleWatcher` looks at modules again and again, and reads only those attributes again that may
have changed: for all others it is enough that the objects are the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from weft._core.digest import IsInterrupt, Reader, digest, never
from weft._core.own_modules import REWRITTEN_BY_PYTEST, is_own, own_modules


class ModuleDigests:
    """One module at one time: a digest of each of its attributes."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        #: of each attribute: the digest of its value, and how often it got another object of which
        #: the digest does not tell all, because it cannot be compared, or because functions may
        #: have changed the worker's since. Two of one module are the same object if they are equal
        self.digests: dict[str, tuple[bytes, int]] = {}
        self.values: dict[str, Any] = {}
        #: what is to be looked at to know which attributes have changed
        self.readers: dict[str, Reader] = {}
        self._may_change: list[tuple[str, Reader]] = []
        self._functions: list[tuple[str, FunctionType, Any, Any, Any]] = []
        #: the other modules that it mentions
        self.mentions: set[str] = set()

    @property
    def contents(self) -> dict[str, bytes]:
        """Return the digest of each attribute's value."""
        return {name: content for name, (content, _) in self.digests.items()}

    def is_opaque(self, attribute: str) -> bool:
        """Return whether it is, or holds, something of which only the type is compared."""
        return self.readers[attribute].is_opaque

    def changes_since(self, before: ModuleDigests) -> list[str]:
        """Return the attributes that have changed."""
        return [name for name, one in self.digests.items() if before.digests.get(name) != one]

    def is_reloaded_since(self, before: ModuleDigests) -> bool:
        """Return whether the module was run again, which makes all of its attributes anew."""
        return self.values.get("__spec__") is not before.values.get("__spec__")

    def now(self, is_interrupt: IsInterrupt) -> ModuleDigests:
        """Return the module as it is now: this object if nothing has changed."""
        values = dict(vars(self.module))
        changed = self._changed(values)
        return self._read(values, changed, is_interrupt) if changed else self

    def _changed(self, values: dict[str, Any]) -> set[str]:
        """Return the names of the attributes that may have changed."""
        before = self.values
        changed = {
            name
            for name, function, code, defaults, named in self._functions
            if function.__code__ is not code
            or function.__defaults__ is not defaults
            or function.__kwdefaults__ is not named
        }
        changed.update(name for name, reader in self._may_change if reader.has_changed())
        same = len(before) == len(values) and all(map(is_, values.values(), before.values()))
        if not same or [*values] != [*before]:
            changed |= before.keys() - values.keys()
            changed |= {
                name
                for name, value in values.items()
                if name not in before or before[name] is not value
            }
        return changed

    def _read(
        self, values: dict[str, Any], changed: set[str], is_interrupt: IsInterrupt
    ) -> ModuleDigests:
        now = ModuleDigests(self.module)
        now.values = values
        now.readers = {name: one for name, one in self.readers.items() if name not in changed}
        digests = {name: one for name, one in self.digests.items() if name not in changed}
        for name in changed & values.keys():
            value = values[name]
            if _is_compared(self.module, name, value):
                reader = now.readers[name] = Reader(is_interrupt)
                content = reader.digest(value)
                _, version = self.digests.get(name, (b"", 0))
                is_other = name in self.digests and self.values[name] is not value
                partly = reader.is_opaque or reader.has_wrappers
                if is_other and (partly or reader.is_data(value)):
                    version += 1
                digests[name] = content, version
        now.digests = self.digests if digests == self.digests else digests
        now._may_change = [(name, one) for name, one in now.readers.items() if one.may_change]
        now._functions = [
            (name, *function) for name, one in now.readers.items() for function in one.functions
        ]
        now.mentions = set().union(*(one.mentions for one in now.readers.values()))
        return now


class ModuleWatcher:
    """The modules that were looked at so far. For one thread at a time."""

    def __init__(self, is_interrupt: IsInterrupt = never) -> None:
        self._is_interrupt = is_interrupt
        self._seen: dict[str, ModuleDigests] = {}

    def look(self, names: Iterable[str]) -> dict[str, ModuleDigests]:
        """Return the digests of those of these modules that are the user's own, and of those that
        they mention.

        A look that is interrupted has seen nothing: the next one finds the same changes.
        """
        own = own_modules()
        found: dict[str, ModuleDigests] = {}
        waiting = [name for name in names if name in own]
        while waiting:
            name = waiting.pop()
            module = sys.modules.get(name)
            if module is not own[name]:  # it was removed and imported again
                if module is None or not is_own(name, module):
                    continue
                own[name] = module
            if name in found or getattr(vars(module).get("__spec__"), "_initializing", False):
                continue  # one that is being imported has only a part of its attributes
            seen = self._seen.get(name)
            if seen is None or seen.module is not module:
                seen = ModuleDigests(module)
            found[name] = self._seen[name] = seen.now(self._is_interrupt)
            waiting += [other for other in found[name].mentions if other in own]
        return found


def slowest(modules: Mapping[str, ModuleDigests]) -> tuple[str, Any]:
    """Return the attribute of these modules that takes longest to compare, and its value."""
    times: list[tuple[float, str, str]] = []
    for name, module in modules.items():
        for attribute, reader in module.readers.items():
            began = time.perf_counter()
            reader.has_changed()
            times.append((time.perf_counter() - began, name, attribute))
    _, name, attribute = max(times)
    return f"{name}.{attribute}", modules[name].values[attribute]


def read_module(module: ModuleType, expected: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the digest of each attribute of a worker's module, as the driver would, whose digests
    are given."""
    if REWRITTEN_BY_PYTEST in expected:
        vars(module).setdefault(REWRITTEN_BY_PYTEST, None)
    return {
        name: digest(value)
        for name, value in vars(module).copy().items()
        if _is_compared(module, name, value)
    }


def _is_compared(module: ModuleType, name: str, value: Any) -> bool:
    """Return whether an attribute of a module belongs to the program, not to the import system."""
    if isinstance(value, ModuleType):
        return value.__name__ != f"{module.__name__}.{name}"  # a submodule that was imported
    return not (name.startswith("__") and name.endswith("__")) or type(value) is FunctionType
