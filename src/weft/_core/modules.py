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
    """The digest of each attribute of one module at one time."""

    def __init__(
        self,
        digests: dict[str, bytes],
        values: dict[str, Any],
        versions: dict[str, int],
        opaque: frozenset[str],
    ) -> None:
        #: of each attribute
        self.digests = digests
        #: the driver's objects
        self.values = values
        #: how often an attribute got another object of which the digest does not tell all: one that
        #: cannot be compared, or that functions may have changed in a worker since
        self.versions = versions
        #: the attributes that are, or hold, something of which only the type is compared
        self.opaque = opaque

    def changes_since(self, before: ModuleDigests) -> list[str]:
        """Return the attributes that have changed."""
        return [
            name
            for name, content in self.digests.items()
            if before.digests.get(name) != content
            or before.versions.get(name) != self.versions.get(name)
        ]


class ModuleWatcher:
    """The modules that were looked at so far. For one thread at a time."""

    def __init__(self, is_interrupt: IsInterrupt = never) -> None:
        self._is_interrupt = is_interrupt
        self._watched: dict[str, _Watched] = {}

    def look(self, names: Iterable[str]) -> dict[str, ModuleDigests]:
        """Return the digests of those of these modules that are the user's own, and of those that
        they mention. A module that has not changed has the same object as before.

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
            watched = self._watched.get(name)
            if watched is None or watched.module is not module:
                watched = self._watched[name] = _Watched(module, self._is_interrupt)
            watched.look()
            found[name] = watched.seen.digests
            waiting += [other for other in watched.seen.mentions if other in own]
        return found

    def slowest(self, names: Iterable[str]) -> tuple[str, Any]:
        """Return the attribute of these modules that takes longest to compare, and its value."""
        times: list[tuple[float, str, str]] = []
        for name in names:
            for attribute, reader in self._watched[name].seen.readers.items():
                began = time.perf_counter()
                reader.has_changed()
                times.append((time.perf_counter() - began, name, attribute))
        _, name, attribute = max(times)
        return f"{name}.{attribute}", self._watched[name].seen.digests.values[attribute]


class _Watched:
    """A module, and what was seen of it last."""

    def __init__(self, module: ModuleType, is_interrupt: IsInterrupt) -> None:
        self.module = module
        self._is_interrupt = is_interrupt
        self.seen = _Seen({}, ModuleDigests({}, {}, {}, frozenset()), {})

    def look(self) -> None:
        """See what it is now: the same as before if nothing has changed."""
        variables = dict(vars(self.module))
        changed = self.seen.changed(variables)
        if changed:  # set at once: this may be interrupted anywhere
            self.seen = self._read(variables, changed)

    def _read(self, variables: dict[str, Any], names: set[str]) -> _Seen:
        before = self.seen.digests
        readers = {name: one for name, one in self.seen.readers.items() if name not in names}
        digests, values = dict(before.digests), dict(before.values)
        versions = dict(before.versions)
        for name in names:
            known, old = digests.pop(name, None) is not None, values.pop(name, None)
            value = variables.get(name)
            if name in variables and _is_compared(self.module, name, value):
                values[name] = value
                reader = readers[name] = Reader(self._is_interrupt)
                digests[name] = reader.digest(value)
                if known and old is not value and (reader.is_opaque or reader.is_data(value)):
                    versions[name] = versions.get(name, 0) + 1
        if (digests, versions) == (before.digests, before.versions):
            before.values = values
            return _Seen(variables, before, readers)
        opaque = frozenset(name for name, reader in readers.items() if reader.is_opaque)
        return _Seen(variables, ModuleDigests(digests, values, versions, opaque), readers)


class _Seen:
    """What was seen of a module, and what to compare to know which of its attributes have to be
    read again."""

    def __init__(
        self, variables: dict[str, Any], digests: ModuleDigests, readers: dict[str, Reader]
    ) -> None:
        self.digests, self.readers = digests, readers
        #: the modules that its attributes mention
        self.mentions: set[str] = set().union(*(one.mentions for one in readers.values()))
        self._variables = variables
        #: the readers of the attributes that may change and stay the same object, and the functions
        #: in them
        self._may_change = [(name, one) for name, one in readers.items() if one.may_change]
        self._functions = [(name, *one) for name in readers for one in readers[name].functions]

    def changed(self, variables: dict[str, Any]) -> set[str]:
        """Return the names of the attributes that may have changed."""
        before = self._variables
        changed = {
            name
            for name, function, code, defaults, named in self._functions
            if function.__code__ is not code
            or function.__defaults__ is not defaults
            or function.__kwdefaults__ is not named
        }
        changed.update(name for name, reader in self._may_change if reader.has_changed())
        same = len(before) == len(variables) and all(map(is_, variables.values(), before.values()))
        if not same or [*variables] != [*before]:
            changed |= before.keys() - variables.keys()
            changed |= {
                name
                for name, value in variables.items()
                if name not in before or before[name] is not value
            }
        return changed


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
