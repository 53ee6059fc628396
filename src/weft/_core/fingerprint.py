"""The fingerprint of a function: it tells whether the function would be sent as it was sent before.

Workers have a copy of a registered function. Once something that it uses besides its arguments has
changed, it must be sent again, or workers would compute with the old value and the driver with the
new one.

    def grad(x): return x.T @ (x @ w - y)      w and y are compared by their contents
    w -= 0.1 * f(x)                            so the next call sends grad again

The fingerprint is a hash of the function's pickle, which is hashed as it is made, without a copy of
arrays. So whatever would be sent is compared, and compared whole. By identity are compared

    what workers have        replicas and their parts, arrays in shared memory
    what workers import      functions of modules: these are brought up to date before each call
    what cannot change       code, arrays of JAX, arrays of NumPy that are read-only and own their
                             memory: whoever makes one writable and changes it must make another
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from weft import kernels
from weft._core.arithmetic import Array, address
from weft._core.own_modules import is_importable
from weft._core.pickling import REDUCERS
from weft._core.shared import SharedArray
from weft.adapters import lookup

#: what stands for a value in a pickle where workers have it; None where its contents are sent
PersistentIds = Callable[[Any], Hashable]


@dataclass(frozen=True)
class Fingerprint:
    """A hash of a pickle, or identities. If two are equal, so are the pickles."""

    digest: Hashable
    #: how many bytes were hashed
    size: int = field(compare=False)
    #: objects compared by identity, kept alive so that no other object gets the same one
    held: list[Any] = field(compare=False, repr=False)
    #: whether classes are sent with it, of which a worker has one for all functions
    has_classes: bool = field(default=False, compare=False)


def fingerprint(
    value: Any, persistent_id: PersistentIds = lambda _: None, arrays: Sequence[Any] = ()
) -> Fingerprint:
    """Return the fingerprint of a value, and of contiguous arrays, which cost less apart from it.
    Raises whatever pickling raises."""
    if type(value) is FunctionType and is_importable(value) and not _registry():
        return Fingerprint(id(value), 0, [value])  # workers have it by its name
    constants = _constants(value)
    if constants is not None:  # a small function's pickle would cost a fifth of its call
        return Fingerprint(tuple(map(id, constants)), 0, constants)
    hasher = Hasher()
    hasher.add(arrays)
    pickler = _Pickler(hasher, 5)
    pickler.persistent_id_of = persistent_id
    pickler.held = []
    pickler.dump(value)
    return Fingerprint(hasher.digest, hasher.size, pickler.held, pickler.has_classes)


def _constants(function: Any) -> list[Any] | None:
    """Return all that a function consists of if none of it can change, only be replaced: numbers,
    strings, modules and what is in modules written in C. Else return None."""
    if type(function) is not FunctionType or function.__dict__ or function.__kwdefaults__:
        return None
    used = [*_used_by(function), *(function.__defaults__ or ())]
    return [function.__code__, *used] if all(map(_is_constant, used)) else None


def _is_constant(value: Any) -> bool:
    kind = type(value)
    if kind is BuiltinFunctionType:  # or a method of an object, which may change
        value, kind = value.__self__, type(value.__self__)
    if kind is ModuleType:  # one that is not imported is sent by value
        return sys.modules.get(value.__name__) is value
    return kind in _CONSTANT


_CONSTANT = (int, float, bool, str, bytes, complex, type(None), type(...), np.ufunc)


def _used_by(function: FunctionType) -> list[Any]:
    """Return the values of the global variables that a function uses, and of its closure."""
    variables = function.__globals__
    used = [variables.get(name, _ABSENT) for name in _globals_of(function.__code__)]
    return used + [_contents_of(cell) for cell in function.__closure__ or ()]


#: the value of a variable that does not exist, or hides no built-in function yet
_ABSENT = ...


def _contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return _ABSENT


class Hasher:
    """A file that keeps a hash of what is written to it."""

    def __init__(self) -> None:
        self.size = 0
        self.digest = bytes(16)

    def write(self, data: Any) -> None:
        """Hash bytes, or the buffer of an array."""
        raw = memoryview(data.raw() if hasattr(data, "raw") else data)
        self.add([np.frombuffer(raw, np.uint8) if raw else _EMPTY])

    def add(self, arrays: Sequence[Array]) -> None:
        """Hash contiguous arrays."""
        sizes = [array.nbytes for array in arrays]
        self.size += sum(sizes)
        if _hash_buffers is not None:
            self.digest = _hash_buffers(list(map(address, arrays)), sizes, self.digest)
            return
        for array in arrays:
            hashed = hashlib.blake2b(self.digest, digest_size=16)
            hashed.update(array.reshape(-1).view(np.uint8).data)
            self.digest = hashed.digest()


#: returns the modules whose functions the user has cloudpickle send by value
_registry = cloudpickle.cloudpickle.list_registry_pickle_by_value

_EMPTY = np.empty(0, np.uint8)
_hash_buffers = kernels.hash_kernel()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """The pickler by which functions are sent, for pickles that nobody loads."""

    dispatch_table = REDUCERS
    persistent_id_of: PersistentIds
    held: list[Any]
    has_classes = False

    def reducer_override(self, value: Any) -> Any:
        """Reduce what is not one of Python's own numbers, strings and containers."""
        kind = type(value)
        if kind is FunctionType or issubclass(kind, type):
            reduced = super().reducer_override(value)
            self.has_classes |= issubclass(kind, type) and reduced is not NotImplemented
            return reduced
        known = self.persistent_id_of(value)
        if known is not None:
            return self._same(value, known)
        if isinstance(value, SharedArray):  # its own pickle does not have the values
            return self._same(None, 0, value.view(np.ndarray))
        if kind is _lru_cache_wrapper and not is_importable(value):
            return self._same(None, 0, value.__wrapped__)
        contents = lookup.contents(value)
        if contents is None:
            return super().reducer_override(value)
        return self._same(contents.constant, id(contents.constant), contents.variable)

    def _same(self, value: Any, identity: Hashable, state: Any = None) -> Any:
        self.held.append(value)
        return id, (identity,), state  # nobody calls it

    def _dynamic_function_reduce(self, function: FunctionType) -> Any:
        """Reduce a function that is sent by value, in a third of cloudpickle's time: its code is
        not taken apart, because it cannot change."""
        code = function.__code__
        own = (function.__defaults__, function.__kwdefaults__, function.__dict__)
        return self._same(code, id(code), (_used_by(function), own))


@lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that a function and those within it look up."""
    looked_up = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            looked_up.update(_globals_of(constant))
    return tuple(sorted(looked_up))
