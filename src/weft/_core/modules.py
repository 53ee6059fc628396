"""The user's own modules: whether the driver's and a worker's are the same.

Workers import the modules of a function by name, so that a module's state is one, whoever uses it.
But a file may be edited, a module reloaded, an attribute patched, a constant changed. So each call
compares them, attribute by attribute:

    driver                                        worker
    look: a Picture of each module     ──>        read_module: the same of its own
    that the function uses                        what differs is sent by value

A picture has a digest of each attribute. Equal contents have equal digests in all processes:

    functions                       code, defaults, closure and attributes
    classes                         attributes and bases
    numbers, strings, bytes,        the whole content
    arrays, lists, dicts, sets
    instances of the user's classes their attributes
    modules, what is installed      the name
    anything else                   its type: a lock or a connection is each process's own

`Pictures` looks at modules again and again, and reads only those attributes again that may have
changed: for all others it is enough that the objects are the same.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import marshal
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

#: the names of the user's script: the second in a process of multiprocessing
_SCRIPT = ("__main__", "__mp_main__")
#: weft's own packages
_WEFT = ("weft", "multiverso", "synkhronos", "playdoh", "distfun")

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"

#: the user's modules by name, and the size and the last name of sys.modules then
_own: tuple[tuple[int, str], dict[str, ModuleType], list[tuple[str, bytes]]] = (0, ""), {}, []


def own_modules() -> dict[str, ModuleType]:
    """Return the modules of the user's own folders that are loaded, by name."""
    return _own_now()[1]


def mentioned_in(pickled: bytes) -> list[str]:
    """Return those of the user's modules that a pickle of references mentions, and perhaps others
    whose names it has as strings."""
    if b"\x93" not in pickled:  # the opcode STACK_GLOBAL
        return []
    return [name for name, as_pickled in _own_now()[2] if as_pickled in pickled]


def _own_now() -> tuple[Any, dict[str, ModuleType], list[tuple[str, bytes]]]:
    global _own
    try:
        state = len(sys.modules), next(reversed(sys.modules))
    except RuntimeError:  # another thread is importing
        state = 0, ""
    if _own[0] != state or not state[0]:
        loaded = sys.modules.copy()  # in one step
        own = {name: module for name, module in loaded.items() if _is_own(name, module)}
        _own = state, own, [(name, _as_pickled(name)) for name in own]
    return _own


def _is_own(name: str, module: object) -> bool:
    if not isinstance(module, ModuleType) or name in _SCRIPT:
        return False
    file = vars(module).get("__file__")
    if not isinstance(file, str) or not file.endswith((".py", ".pyc")):
        return False
    if name.partition(".")[0] in _WEFT or file.startswith(_LIBRARY):
        return False
    return not any(folder in file for folder in _INSTALLED)


def _as_pickled(name: str) -> bytes:
    text = name.encode()
    return b"\x8c" + bytes([len(text)]) + text if len(text) < 256 else text


def references(value: Any) -> Iterable[str]:
    """Return the names of the modules that a pickle of a function, class or module refers to."""
    if isinstance(value, ModuleType):
        return (value.__name__,)
    if isinstance(value, (FunctionType, type)) and is_importable(value):
        return (value.__module__,)
    return modules_used_by(value) if isinstance(value, FunctionType) else ()


def home_of(function: FunctionType) -> ModuleType | None:
    """Return the module whose variables are a function's globals; None for a function of the main
    program, or of a module that was removed."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and name not in _SCRIPT else None
    return module if module is not None and vars(module) is function.__globals__ else None


def is_foreign(value: Any) -> bool:
    """Return whether a value is a function that an installed package or `exec` has made, such as a
    decorator's, and that cannot be imported."""
    if type(value) is not FunctionType or is_importable(value):
        return False
    home, variables = home_of(value), value.__globals__
    if home is not None:
        return not _is_users(home.__name__)
    return "__file__" not in variables and variables.get("__name__") not in _SCRIPT


#: what pytest adds to the modules of tests, whose asserts it compiles in its own way, and
#: `read_module` to a worker's, so that its own workers know too
_REWRITTEN_BY_PYTEST = "@pytest_ar"


def is_rewritten(module: ModuleType) -> bool:
    """Return whether pytest has compiled a module in the driver. Its functions are compared by name
    and line: nobody reloads it, and the worker has the same file."""
    return _REWRITTEN_BY_PYTEST in vars(module)


def is_importable(value: Any) -> bool:
    """Return whether a function or class is what its module has under its name: not after the
    module was reloaded."""
    found: Any = sys.modules.get(value.__module__) if value.__module__ not in _SCRIPT else None
    for name in value.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # a module may have its own __getattr__
    return found is value


def imports_of(code: CodeType, package: str) -> set[str]:
    """Return the names of modules that a function imports when it is called."""
    import dis

    names: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= imports_of(constant, package)
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        level, start = 0, ""
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_CONST" and type(instruction.argval) is int:
                level = instruction.argval
            elif instruction.opname == "IMPORT_NAME":
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                start = ".".join(filter(None, [*above, instruction.argval]))
                names.add(start)
            elif instruction.opname == "IMPORT_FROM":
                names.add(f"{start}.{instruction.argval}")
    return names


def modules_used_by(function: FunctionType) -> set[str]:
    """Return the names of modules that a function's code names or imports: in `pack.age.f()` both
    `pack` and `pack.age`."""
    variables = function.__globals__
    names = _names_in(function.__code__)
    used = imports_of(function.__code__, variables.get("__package__") or "")
    found = {variables[name].__name__ for name in names if type(variables.get(name)) is ModuleType}
    own = own_modules()
    while found - used:
        used |= found
        found = {f"{package}.{name}" for package in found for name in names} & own.keys()
    return used


class Picture:
    """One module at one time."""

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
        #: the attributes of which only the type is compared
        self.opaque = opaque

    def changes_since(self, before: Picture) -> list[str]:
        """Return the attributes that have changed."""
        return [
            name
            for name, content in self.digests.items()
            if before.digests.get(name) != content
            or before.versions.get(name) != self.versions.get(name)
        ]


#: tells errors that came from outside, such as a signal handler's, from those of what is read
IsInterrupt = Callable[[Exception], bool]


def _never(_: Exception) -> bool:
    return False


class Pictures:
    """The modules that were looked at so far. For one thread at a time."""

    def __init__(self, is_interrupt: IsInterrupt = _never) -> None:
        self._is_interrupt = is_interrupt
        self._watched: dict[str, _Watched] = {}

    def look(self, names: Iterable[str]) -> dict[str, Picture]:
        """Return pictures of those of these modules that are the user's own, and of those that they
        mention. A module that has not changed has the same picture as before.

        A look that is interrupted has seen nothing: the next one finds the same changes.
        """
        own = own_modules()
        found: dict[str, Picture] = {}
        waiting = [name for name in names if name in own]
        while waiting:
            name = waiting.pop()
            module = sys.modules.get(name)
            if module is not own[name]:  # it was removed and imported again
                if module is None or not _is_own(name, module):
                    continue
                own[name] = module
            if name in found or getattr(vars(module).get("__spec__"), "_initializing", False):
                continue  # one that is being imported has only a part of its attributes
            watched = self._watched.get(name)
            if watched is None or watched.module is not module:
                watched = self._watched[name] = _Watched(module, self._is_interrupt)
            seen = watched.look()
            found[name] = seen.picture
            waiting += [other for other in seen.mentions if other in own]
        return found


class _Watched:
    """A module, and what was seen of it last."""

    def __init__(self, module: ModuleType, is_interrupt: IsInterrupt) -> None:
        self.module = module
        self._is_interrupt = is_interrupt
        self._seen = _Seen({}, Picture({}, {}, {}, frozenset()), {}, set())

    def look(self) -> _Seen:
        """Return what is seen of it now: the same as before if nothing has changed."""
        variables = dict(vars(self.module))
        changed = self._seen.changed(variables)
        if changed:  # set at once: this may be interrupted anywhere
            self._seen = self._read(variables, changed)
        return self._seen

    def _read(self, variables: dict[str, Any], names: set[str]) -> _Seen:
        before = self._seen.picture
        readers = {name: one for name, one in self._seen.readers.items() if name not in names}
        digests, values = dict(before.digests), dict(before.values)
        versions = dict(before.versions)
        for name in names:
            known, old = digests.pop(name, None) is not None, values.pop(name, None)
            value = variables.get(name)
            if name in variables and _is_compared(self.module, name, value):
                values[name] = value
                reader = readers[name] = _Reader(self._is_interrupt)
                digests[name] = reader.digest(value)
                if known and old is not value and (reader.is_opaque or reader.is_data(value)):
                    versions[name] = versions.get(name, 0) + 1
        if (digests, versions) == (before.digests, before.versions):
            before.values = values
            picture = before
        else:
            opaque = frozenset(name for name, reader in readers.items() if reader.is_opaque)
            picture = Picture(digests, values, versions, opaque)
        mentions = set().union(*(reader.mentions for reader in readers.values()))
        return _Seen(variables, picture, readers, mentions)


class _Seen:
    """What was seen of a module, and what to compare to know which of its attributes have to be
    read again."""

    def __init__(
        self,
        variables: dict[str, Any],
        picture: Picture,
        readers: dict[str, _Reader],
        mentions: set[str],
    ) -> None:
        self.picture, self.readers = picture, readers
        #: the modules that its attributes mention
        self.mentions = mentions
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
    if _REWRITTEN_BY_PYTEST in expected:
        vars(module).setdefault(_REWRITTEN_BY_PYTEST, None)
    return {
        name: digest(value)
        for name, value in vars(module).copy().items()
        if _is_compared(module, name, value)
    }


def digest(value: Any, is_interrupt: IsInterrupt = _never) -> bytes:
    """Return the digest of a value."""
    return _Reader(is_interrupt).digest(value)


def _is_compared(module: ModuleType, name: str, value: Any) -> bool:
    """Return whether an attribute of a module belongs to the program, not to the import system."""
    if isinstance(value, ModuleType):
        return value.__name__ != f"{module.__name__}.{name}"  # a submodule that was imported
    return not (name.startswith("__") and name.endswith("__")) or type(value) is FunctionType


class _Opaque(Exception):
    """A value of which only the type is compared."""


#: immutable values, whose repr has all of them
_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None), type(...), range))

#: the longest stamp that is kept as it is
_LONGEST = 256

#: attributes of classes that Python makes, or that other attributes were made from
_NOT_COMPARED = {
    "__annotations__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__slotnames__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}


class _Reader:
    """Reads one attribute: its digest, what it mentions, and what would change with it."""

    def __init__(self, is_interrupt: IsInterrupt, *, for_stamp: bool = False) -> None:
        self._is_interrupt = is_interrupt
        self._for_stamp = for_stamp
        self.mentions: set[str] = set()
        self.is_opaque = False
        #: functions, their code and their defaults
        self.functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
        #: cells, with what they had
        self._cells: list[tuple[CellType, Any]] = []
        #: classes, and functions with attributes
        self._namespaces: list[tuple[Any, list[Any]]] = []
        #: values that may be changed in place, the outermost ones, with their stamps
        self._data: list[tuple[Any, bytes]] = []
        #: whether it has to be read again in any case
        self._always = False
        #: by identity: what is being read, and how deep; how many of these are data
        self._open: dict[int, int] = {}
        self._in_data = 0

    @property
    def may_change(self) -> bool:
        """Return whether the attribute can change and stay the same object, apart from functions'
        code and defaults."""
        return bool(self._always or self._cells or self._namespaces or self._data)

    def is_data(self, value: Any) -> bool:
        """Return whether the attribute itself can be changed in place."""
        inside = getattr(value, "__dict__", None)
        return any(one is value or one is inside for one, _ in self._data)

    def has_changed(self) -> bool:
        """Return whether the attribute, which is still the same object, has to be read again."""
        for cell, content in self._cells:
            if _content(cell) is not content:
                return True
        for holder, before in self._namespaces:
            values = vars(holder).values()
            if len(values) != len(before) or not all(map(is_, values, before)):
                return True
        return self._always or any(
            not _is_constant(value) and self._stamp(value) != stamp for value, stamp in self._data
        )

    def digest(self, value: Any) -> bytes:
        """Return the digest of the attribute, of its type alone if it cannot be compared."""
        try:
            return self._read(value)
        except _Opaque:
            self.is_opaque = True
            self.functions.clear()
            self._cells.clear()
            self._namespaces.clear()
            self._data.clear()
            return self._name(value)

    def _read(self, value: Any) -> bytes:
        """Return the digest of a value. Raises _Opaque."""
        kind = type(value)
        if kind in _SCALARS:
            return _hash(kind.__name__.encode(), self._plain(value))
        if id(value) in self._open:
            return b"again %d" % (len(self._open) - self._open[id(value)])
        self._open[id(value)] = len(self._open)
        try:
            return self._inside(kind, value)
        except _Opaque:
            raise
        except Exception as error:  # an object may raise whatever it is asked
            if self._is_interrupt(error):
                raise
            raise _Opaque from error
        finally:
            del self._open[id(value)]

    def _inside(self, kind: type, value: Any) -> bytes:
        read = _READERS.get(kind)
        if read is None:
            read = next((read for applies, read in _OTHER_READERS if applies(kind, value)), None)
        if read is None:
            raise _Opaque
        return read(self, value)

    def _known(self, value: Any) -> bytes:
        """Return the digest of a value, or if it cannot be compared that of its type."""
        try:
            return self._read(value)
        except _Opaque:
            return self._name(value)

    def _name(self, value: Any) -> bytes:
        kind = type(value)
        try:
            name = value.__name__  # functions in C have one
        except Exception as error:
            if self._is_interrupt(error):
                raise
            name = ""
        text = f"{kind.__module__}.{kind.__qualname__} {name if isinstance(name, str) else ''}"
        return _hash(b"object", text.encode())

    def _function(self, function: FunctionType) -> bytes:
        home = home_of(function)
        if home is not None and home.__name__ in own_modules():
            self.mentions.add(home.__name__)
            self.mentions |= modules_used_by(function)
        elif is_importable(function):
            return _hash(b"global", function.__module__.encode(), function.__qualname__.encode())
        elif is_foreign(function):
            return self._foreign_function(function)
        code, defaults, named = function.__code__, function.__defaults__, function.__kwdefaults__
        self.functions.append((function, code, defaults, named))
        if home is not None and is_rewritten(home):
            parts = [f"{code.co_qualname} {code.co_firstlineno}".encode()]
        else:
            parts = [self._code(code), self._known(defaults), self._known(named)]
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._cells.append((cell, content))
            parts.append(b"" if content is CellType else self._known(content))
        if function.__dict__:
            parts.append(self._namespace(function, function.__dict__))
        if home is None:  # it is sent with the globals that it uses
            variables = function.__globals__
            parts += [self._known(variables[name]) for name in _names_in(code) if name in variables]
            self._always = True
        return _hash(b"function", *parts)

    def _foreign_function(self, function: FunctionType) -> bytes:
        """Read a foreign function: what it has besides the function that it wraps, and functions
        and classes of its closure, is each process's own."""
        parts = [function.__module__.encode(), function.__qualname__.encode()]
        if isinstance(wrapped := getattr(function, "__wrapped__", None), FunctionType):
            parts.append(self._known(wrapped))
        for cell in function.__closure__ or ():
            content = _content(cell)
            if isinstance(content, (FunctionType, type)):
                self._cells.append((cell, content))
                parts.append(self._known(content))
        return _hash(b"foreign", *parts)

    def _code(self, code: CodeType) -> bytes:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        plain = repr((code.co_name, names, counts)).encode()
        constants = [
            self._code(constant) if isinstance(constant, CodeType) else self._known(constant)
            for constant in code.co_consts
        ]
        return _hash(b"code", code.co_code, code.co_exceptiontable, plain, *constants)

    def _class(self, kind: type) -> bytes:
        name = f"{kind.__module__}.{kind.__qualname__}".encode()
        if not _is_users(kind.__module__):
            return _hash(b"class", name)
        self.mentions.add(kind.__module__)
        parts = [name, self._known(type(kind)), *map(self._known, kind.__bases__)]
        if isinstance(kind, enum.EnumMeta):
            members: Mapping[str, Any] = kind.__members__
            parts += [
                _hash(b"member", name.encode(), self._known(member._value_))
                for name, member in members.items()
            ]
        parts.append(self._namespace(kind, own_attributes(kind)))
        return _hash(b"class", *parts)

    def _namespace(self, holder: Any, attributes: Mapping[str, Any]) -> bytes:
        self._namespaces.append((holder, list(vars(holder).values())))
        parts = [(name.encode(), self._known(attributes[name])) for name in sorted(attributes)]
        return _hash(b"attributes", *itertools.chain.from_iterable(parts))

    def _instance(self, value: Any) -> bytes:
        """Read an instance of a class of the user's that has attributes only in its dict."""
        kind = type(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return _hash(b"instance", self._read(kind), self._sequence(tuple(value)))
        own = {name for parent in kind.__mro__[:-1] for name in vars(parent)}
        reduces = "__reduce__" in own or "__reduce_ex__" in own
        if reduces or kind.__basicsize__ != _Empty.__basicsize__:
            raise _Opaque
        return _hash(b"instance", self._read(kind), self._dict(vars(value)))

    def _module(self, module: ModuleType) -> bytes:
        if sys.modules.get(module.__name__) is not module:  # it cannot be imported
            raise _Opaque
        self.mentions.add(module.__name__)
        return _hash(b"module", module.__name__.encode())

    def _value(self, value: Any) -> bytes:
        return _hash(b"value", type(value).__name__.encode(), repr(value).encode())

    def _pattern(self, value: Any) -> bytes:
        return _hash(b"pattern", repr((value.pattern, value.flags)).encode())

    def _member(self, value: enum.Enum) -> bytes:
        return _hash(b"member", self._read(type(value)), value.name.encode())

    def _wrapper(self, value: Any) -> bytes:
        return _hash(b"wrapper", self._name(value), self._read(value.__wrapped__))

    # data

    def _contents(self, kind: bytes, value: Any, parts: Iterable[Any]) -> bytes:
        """Read what may be changed in place, and consists of these parts."""
        self._in_data += 1
        try:
            content = _hash(kind, *map(self._read, parts))
        finally:
            self._in_data -= 1
        self._note(value, None)
        return content

    def _note(self, value: Any, stamp: bytes | None) -> None:
        """Note what may be changed in place, unless it is inside of something else that may."""
        if not self._in_data and not self._for_stamp:
            self._data.append((value, self._stamp(value) if stamp is None else stamp))

    def _stamp(self, value: Any) -> bytes:
        """Return what changes with a value that may be changed in place, in this process only."""
        if type(value) in (dict, list, set, bytearray):
            try:
                stamp = marshal.dumps(value, 2)
                return stamp if len(stamp) <= _LONGEST else _hash(b"marshal", stamp)
            except ValueError as error:  # there is something else in it
                if self._is_interrupt(error):
                    raise
        return _Reader(self._is_interrupt, for_stamp=True)._known(value)

    def _plain(self, value: Any) -> bytes:
        if type(value) is bytes:
            return value
        try:
            return repr(value).encode(errors="surrogatepass")
        except ValueError as error:  # a whole number with thousands of digits
            if self._is_interrupt(error):
                raise
            return marshal.dumps(value, 0)

    def _sequence(self, values: Any) -> bytes:
        kind = type(values).__name__.encode()
        plain = _SCALARS.issuperset(map(type, values))
        if type(values) is tuple:
            return _hash(kind, *([self._plain(values)] if plain else map(self._read, values)))
        return self._contents(kind, values, [self._plain(values)] if plain else values)

    def _set(self, values: Any) -> bytes:
        ordered = sorted(map(self._read, values))
        if type(values) is frozenset:
            return _hash(b"frozenset", *ordered)
        return self._contents(b"set", values, ordered)

    def _dict(self, values: Any) -> bytes:
        parts = [*values, *values.values()]
        plain = _SCALARS.issuperset(map(type, parts))
        factory = self._known(getattr(values, "default_factory", None))
        kind = type(values).__name__.encode() + factory
        return self._contents(kind, values, [self._plain(dict(values))] if plain else parts)

    def _bytearray(self, value: bytearray) -> bytes:
        return self._contents(b"bytearray", value, [bytes(value)])

    def _array(self, value: Any) -> bytes:
        """Read a NumPy array or number, or a tensor of torch in this machine's memory."""
        content = _array_bytes(value)
        self._note(value, content)
        return content

    def _parts(self, value: Any) -> bytes:
        """Read what consists of other values: a method, a partial, a property."""
        parts: Iterator[Any]
        if isinstance(value, MethodType):
            parts = iter((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            parts = iter((value.func, value.args, value.keywords))
        elif isinstance(value, property):
            parts = iter((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            parts = iter((value.func,))
        else:  # classmethod, staticmethod
            parts = iter((value.__func__,))
        return _hash(type(value).__name__.encode(), *map(self._known, parts))

    def _builtin(self, value: Any) -> bytes:
        bound = value.__self__
        of = b"" if bound is None or isinstance(bound, ModuleType) else self._read(bound)
        return _hash(b"builtin", f"{value.__module__}.{value.__qualname__}".encode(), of)


def own_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes that a class itself has, and that were not made by Python."""
    attributes = {name: value for name, value in vars(kind).items() if name not in _NOT_COMPARED}
    if isinstance(kind, enum.EnumMeta):
        compared = (FunctionType, property, classmethod, staticmethod)
        return {
            name: value
            for name, value in attributes.items()
            if isinstance(value, compared)
            and name not in ("__new__", "__new_member__", "_generate_next_value_")
            and name not in kind.__members__
        }
    return attributes


def _is_users(module: str) -> bool:
    return module in _SCRIPT or module in own_modules()


class _Empty:
    """A class whose instances have a dict, and nothing else."""


def _content(cell: CellType) -> Any:
    """Return what is in a cell; CellType if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return CellType


def _names_in(code: CodeType) -> list[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return sorted({*code.co_names, *(name for one in inner for name in _names_in(one))})


def _is_constant(value: Any) -> bool:
    """Return whether a value is an array that nobody can write to."""
    flags = getattr(value, "flags", None)
    return flags is not None and value.base is None and not flags.writeable


def _array_bytes(value: Any) -> bytes:
    """Return the digest of an array, a NumPy number or dtype, or a tensor. Raises _Opaque."""
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    kind = type(value)
    name = kind.__name__.encode()
    if numpy is not None and isinstance(value, numpy.generic):
        return _hash(name, value.dtype.str.encode(), value.tobytes())
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
        about = f"{value.dtype.descr} {value.shape}".encode()
        content = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        return _hash(name, about, memoryview(content))
    if torch is not None and kind is torch.Tensor and value.device.type == "cpu" and value.is_leaf:
        about = f"{value.dtype} {tuple(value.shape)} {value.requires_grad}".encode()
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _hash(name, about, memoryview(content))
    if torch is not None and kind in (torch.dtype, torch.device):
        return _hash(name, str(value).encode())
    raise _Opaque


def _hash(kind: bytes, *parts: Any) -> bytes:
    import hashlib

    total = hashlib.blake2b(kind, digest_size=16)
    for part in parts:
        total.update(b"%d:" % len(part))
        total.update(part)
    return total.digest()


_READERS: dict[type, Callable[[_Reader, Any], bytes]] = {
    FunctionType: _Reader._function,
    BuiltinFunctionType: _Reader._builtin,
    **dict.fromkeys((list, tuple, collections.deque), _Reader._sequence),
    **dict.fromkeys((set, frozenset), _Reader._set),
    **dict.fromkeys(
        (dict, collections.OrderedDict, collections.defaultdict, collections.Counter), _Reader._dict
    ),
    bytearray: _Reader._bytearray,
    **dict.fromkeys(
        (
            MethodType,
            functools.partial,
            functools.cached_property,
            property,
            classmethod,
            staticmethod,
        ),
        _Reader._parts,
    ),
}

#: immutable values of the standard library, whose repr has all of them
_BY_REPR = {
    *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *("decimal.Decimal", "fractions.Fraction", "uuid.UUID", "zoneinfo.ZoneInfo"),
    *(f"{home}.{kind}PosixPath" for home in ("pathlib", "pathlib._local") for kind in ("", "Pure")),
    "builtins.slice",
}

#: for whom the type alone does not tell: whether it applies to a type and a value
_OTHER_READERS: list[tuple[Callable[[type, Any], bool], Callable[[_Reader, Any], bytes]]] = [
    (lambda kind, _: issubclass(kind, type), _Reader._class),
    (lambda kind, _: issubclass(kind, ModuleType), _Reader._module),
    (lambda kind, _: f"{kind.__module__}.{kind.__name__}" in _BY_REPR, _Reader._value),
    (lambda kind, _: (kind.__module__, kind.__name__) == ("re", "Pattern"), _Reader._pattern),
    (lambda kind, _: issubclass(kind, enum.Enum), _Reader._member),
    (lambda kind, _: kind.__module__ in ("numpy", "torch"), _Reader._array),
    (
        lambda _, value: isinstance(getattr(value, "__wrapped__", None), FunctionType),
        _Reader._wrapper,
    ),
    (lambda kind, _: _is_users(kind.__module__), _Reader._instance),
]
