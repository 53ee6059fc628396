"""The digest of a value: equal in all processes for equal contents, and cheap to look at again.

    functions                       code, defaults, closure and attributes
    classes of the user's           attributes and bases
    numbers, strings, bytes,        the whole content
    arrays, lists, dicts, sets
    whatever else can be pickled    the parts that its pickle would have
    modules, what is installed      the name
    anything else                   its type: a lock, a connection or a random generator is each
                                    process's own

A `Reader` makes the digest of one value, and remembers what to compare to know whether the value,
still the same object, has to be read again.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import itertools
import marshal
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from weft._core.own_modules import (
    home_of,
    is_foreign,
    is_importable,
    is_rewritten,
    is_users,
    modules_used_by,
    names_in,
    own_modules,
)
from weft._core.pickling import is_single_dispatch

#: tells errors that came from outside, such as a signal handler's, from those of what is read
IsInterrupt = Callable[[Exception], bool]


def never(_: Exception) -> bool:
    """Return False."""
    return False


def digest(value: Any, is_interrupt: IsInterrupt = never) -> bytes:
    """Return the digest of a value."""
    return Reader(is_interrupt).digest(value)


def type_digest(value: Any) -> bytes:
    """Return the digest of a value that cannot be compared."""
    return Reader(never)._name(value)


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


class Reader:
    """Reads one value: its digest, what it mentions, and what would change with it."""

    def __init__(self, is_interrupt: IsInterrupt, *, for_stamp: bool = False) -> None:
        self._is_interrupt = is_interrupt
        self._for_stamp = for_stamp
        #: the user's modules that it refers to
        self.mentions: set[str] = set()
        #: whether it is, or holds, something of which only the type is compared
        self.is_opaque = False
        #: whether it holds objects of libraries, which are as their own pickles make them
        self.has_library_objects = False
        #: whether it is, or holds, a wrapper with more than is compared: a cache, compiled code
        self.has_wrappers = False
        #: functions, their code and their defaults
        self.functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
        #: cells, classes, and functions with attributes, with the values in them
        self._holders: list[tuple[Any, list[Any]]] = []
        #: values that may be changed in place, the outermost ones, with their stamps
        self._data: list[tuple[Any, bytes]] = []
        #: whether it has to be read again in any case
        self._always = False
        #: by identity: what is being read, and how deep; how many of these are data, or library's
        self._open: dict[int, int] = {}
        self._in_data = self._in_library = 0
        #: by identity: what has been read, its digest, and whether it was noted what changes it
        self._finished: dict[int, tuple[Any, bytes, bool]] = {}

    def digest(self, value: Any) -> bytes:
        """Return the digest of the value, of its type alone if it cannot be compared."""
        try:
            content = self._read(value)
        except _Opaque:
            self.is_opaque = True
            for noted in (self.functions, self._holders, self._data):
                noted.clear()
            content = self._name(value)
        self._finished.clear()
        return content

    @property
    def may_change(self) -> bool:
        """Return whether the value can change and stay the same object, apart from functions' code
        and defaults."""
        return bool(self._always or self._holders or self._data)

    def is_data(self, value: Any) -> bool:
        """Return whether the value itself can be changed in place."""
        return any(one is value for one, _ in self._data)

    def has_changed(self) -> bool:
        """Return whether the value, which is still the same object, has to be read again."""
        for holder, before in self._holders:
            values = _values_in(holder)
            if len(values) != len(before) or not all(map(is_, values, before)):
                return True
        return self._always or any(
            not _is_constant(value) and self._stamp(value) != stamp for value, stamp in self._data
        )

    def _read(self, value: Any) -> bytes:
        """Return the digest of a value. Raises _Opaque."""
        kind = type(value)
        if kind in _SCALARS:
            return _hash(kind.__name__.encode(), self._plain(value))
        if id(value) in self._open:
            return b"again %d" % (len(self._open) - self._open[id(value)])
        _, content, noted = self._finished.get(id(value), (None, b"", False))
        if content and (noted or self._in_data):
            return content
        self._open[id(value)] = len(self._open)
        try:
            content = self._inside(kind, value)
        except _Opaque:
            raise
        except Exception as error:  # an object may raise whatever it is asked
            if self._is_interrupt(error):
                raise
            self._always |= type(error) is RuntimeError  # another thread has changed it meanwhile
            raise _Opaque from error
        finally:
            del self._open[id(value)]
        self._finished[id(value)] = value, content, not self._in_data
        return content

    def _inside(self, kind: type, value: Any) -> bytes:
        read = _READERS.get(kind)
        if read is None:
            read = next((read for applies, read in _OTHER_READERS if applies(kind, value)), None)
        return self._reduced(value) if read is None else read(self, value)

    def _known(self, value: Any) -> bytes:
        """Return the digest of a part of code, which is sent with it whatever it is."""
        opaque, in_library = self.is_opaque, self._in_library
        self._in_library = 0
        try:
            return self._part(value)
        finally:
            self.is_opaque, self._in_library = opaque, in_library

    def _part(self, value: Any) -> bytes:
        """Return the digest of a part, or if it cannot be compared that of its type. Raises
        _Opaque in an object of a library, which is compared whole or not at all."""
        try:
            return self._read(value)
        except _Opaque:
            if self._in_library:
                raise
            self.is_opaque = True
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

    # code

    def _function(self, function: FunctionType) -> bytes:
        home = home_of(function)
        if self._is_compared_elsewhere(function):
            return self._global(function)
        if home is not None and home.__name__ in own_modules():
            self.mentions.add(home.__name__)
            self.mentions |= modules_used_by(function)
        elif is_users(function.__module__) and is_single_dispatch(function):
            registry = function.registry  # type: ignore[attr-defined]
            return self._contents(b"dispatch", function, lambda: [self._part(dict(registry))])
        elif is_importable(function) and not is_users(function.__module__):
            return self._global(function)
        elif is_foreign(function):
            return self._foreign_function(function)
        code, defaults, named = function.__code__, function.__defaults__, function.__kwdefaults__
        self.functions.append((function, code, defaults, named))
        if home is not None and is_rewritten(home, code):
            parts = [f"{code.co_qualname} {code.co_firstlineno}".encode()]
        else:
            parts = [self._code(code), self._known(defaults), self._known(named)]
        for cell in function.__closure__ or ():
            contents = _values_in(cell)
            self._holders.append((cell, contents))
            parts.append(self._known(contents[0]) if contents else b"")
        if function.__dict__:
            parts.append(self._namespace(function, function.__dict__))
        if home is None:  # it is sent with the globals that it uses
            variables = function.__globals__
            parts += [self._known(variables[name]) for name in names_in(code) if name in variables]
            self._always = True
        return _hash(b"function", *parts)

    def _is_compared_elsewhere(self, value: Any) -> bool:
        """Return whether a function or class within the value is an attribute of one of the user's
        modules, which are compared one by one: a worker may have its own cache in it. Of an Enum
        that changes, a worker has another class."""
        if len(self._open) < 2 or "." in value.__qualname__ or isinstance(value, enum.EnumMeta):
            return False
        if value.__module__ not in own_modules() or not is_importable(value):
            return False
        self.mentions.add(value.__module__)
        return True

    def _global(self, value: Any) -> bytes:
        return _hash(b"global", value.__module__.encode(), value.__qualname__.encode())

    def _foreign_function(self, function: FunctionType) -> bytes:
        """Read a foreign function: what it has besides the function that it wraps, and functions
        and classes of its closure, is each process's own."""
        parts = [function.__module__.encode(), function.__qualname__.encode()]
        if isinstance(wrapped := getattr(function, "__wrapped__", None), FunctionType):
            parts.append(self._known(wrapped))
        for cell in function.__closure__ or ():
            contents = _values_in(cell)
            if contents and isinstance(contents[0], (FunctionType, type)):
                self._holders.append((cell, contents))
                parts.append(self._known(contents[0]))
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
        if not is_users(kind.__module__):
            return _hash(b"class", name)
        if self._is_compared_elsewhere(kind):
            return self._global(kind)
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
        self._holders.append((holder, _values_in(holder)))
        parts = [(name.encode(), self._known(attributes[name])) for name in sorted(attributes)]
        return _hash(b"attributes", *itertools.chain.from_iterable(parts))

    def _module(self, module: ModuleType) -> bytes:
        if sys.modules.get(module.__name__) is not module:  # it cannot be imported
            raise _Opaque
        self.mentions.add(module.__name__)
        return _hash(b"module", module.__name__.encode())

    def _member(self, value: enum.Enum) -> bytes:
        return _hash(b"member", self._read(type(value)), value.name.encode())

    def _wrapper(self, value: Any) -> bytes:
        self.has_wrappers = True
        self.has_library_objects |= type(value) is not functools._lru_cache_wrapper
        return _hash(b"wrapper", self._name(value), self._read(value.__wrapped__))

    def _callable(self, value: Any) -> bytes:
        """Read what makes something of functions: a method, a partial, a property."""
        parts = [getattr(value, name) for name in _PARTS[type(value)]]
        return _hash(type(value).__name__.encode(), *map(self._known, parts))

    def _builtin(self, value: Any) -> bytes:
        bound = value.__self__
        of = b"" if bound is None or isinstance(bound, ModuleType) else self._read(bound)
        return _hash(b"builtin", f"{value.__module__}.{value.__qualname__}".encode(), of)

    # data

    def _contents(self, kind: bytes, value: Any, read: Callable[[], Iterable[bytes]]) -> bytes:
        """Read what may be changed in place."""
        self._in_data += 1
        try:
            content = _hash(kind, *read())
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
                stamp = _plain_pickle(value)
                return bytes(stamp) if len(stamp) <= _LONGEST else _hash(b"plain", stamp)
            except Exception as error:  # there is something else in it, or it is in itself
                if self._is_interrupt(error):
                    raise
        return Reader(self._is_interrupt, for_stamp=True)._known(value)

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

        def read() -> Iterable[bytes]:
            return [self._plain(values)] if plain else map(self._part, values)

        return _hash(kind, *read()) if type(values) is tuple else self._contents(kind, values, read)

    def _named_tuple(self, values: Any) -> bytes:
        return _hash(b"named", self._read(type(values)), self._sequence(tuple(values)))

    def _set(self, values: Any) -> bytes:
        if type(values) is frozenset:
            return _hash(b"frozenset", *sorted(map(self._part, values)))
        return self._contents(b"set", values, lambda: sorted(map(self._part, values)))

    def _dict(self, values: dict[Any, Any]) -> bytes:
        parts = [*values, *values.values()]
        plain = _SCALARS.issuperset(map(type, parts))
        return self._contents(
            b"dict", values, lambda: [self._plain(values)] if plain else map(self._part, parts)
        )

    def _array(self, value: Any) -> bytes:
        """Read an array of NumPy, or a tensor of torch, in this machine's memory."""
        content = _array_bytes(value)
        self._note(value, content)
        return content

    def _reduced(self, value: Any) -> bytes:
        """Read what can be pickled, as copyreg and the pickle protocol take it apart."""
        kind = type(value)
        if _is_each_processes_own(kind, value):
            raise _Opaque
        reduce = copyreg.dispatch_table.get(kind)
        parts: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(parts, str):  # the name of a global variable
            return _hash(b"global", f"{kind.__module__} {parts}".encode())
        if _is_immutable(kind, value):
            return _hash(b"reduced", *map(self._read, parts))
        of_library = not is_users(kind.__module__) and kind.__module__ not in _CONTAINERS
        self.has_library_objects |= of_library

        def read() -> Iterator[bytes]:
            for one in parts:  # the last two are iterators
                is_items = isinstance(one, Iterator)
                yield _hash(b"items", *map(self._part, one)) if is_items else self._part(one)

        self._in_library += of_library
        try:
            content = self._contents(b"reduced", value, read)
        finally:
            self._in_library -= of_library
        if not self._for_stamp and not self._in_data and self._data[-1][1] != self._stamp(value):
            self._data.pop()  # it is another one each time
            raise _Opaque
        return content


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


def is_plain_instance(value: Any) -> bool:
    """Return whether a value has its attributes in a dict, and nothing else, and is pickled so."""
    kind: Any = type(value)
    return all(getattr(kind, name, None) == getattr(_Empty, name, None) for name in _PLAIN)


class _Empty:
    """A class whose instances have a dict, and nothing else."""


#: in what a class does not differ from `_Empty` then
_PLAIN = (
    *("__basicsize__", "__itemsize__", "__dictoffset__", "__new__"),
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__"),
)


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        raise TypeError(type(value))  # functions and classes come here too


def _plain_pickle(value: Any) -> memoryview:
    """Pickle Python's own numbers, strings and containers, equal ones to equal bytes. Raises an
    Exception if there is anything else: an array's buffer would not tell its shape and dtype."""
    pieces = io.BytesIO()
    pickler = _PlainPickler(pieces, 5)
    pickler.fast = True  # the same object twice is written twice
    pickler.dump(value)
    return pieces.getbuffer()


def _values_in(holder: Any) -> list[Any]:
    """Return the values in a cell, a class or the attributes of a function."""
    if type(holder) is not CellType:
        return [*vars(holder).values()]
    try:
        return [holder.cell_contents]
    except ValueError:  # it is empty
        return []


def _is_constant(value: Any) -> bool:
    """Return whether a value is an array of NumPy that nobody can write to."""
    if type(value).__module__ != "numpy" or not _is_array(type(value), value):
        return False
    return value.base is None and not value.flags.writeable


def _is_immutable(kind: type, value: Any) -> bool:
    """Return whether a value need not be read again; others may be changed in place."""
    numpy: Any = sys.modules.get("numpy")
    number = numpy is not None and isinstance(value, numpy.generic)
    in_module = kind.__module__ in ("numpy.dtypes", "typing", "collections.abc")
    return number or in_module or _full_name(kind) in _IMMUTABLE


def _is_each_processes_own(kind: type, value: Any) -> bool:
    """Return whether a value is not compared, though it could be pickled: an iterator of Python's
    or a library's, a random generator, or an object that stands for itself."""
    generator = getattr(sys.modules.get("random"), "Random", ())
    return (
        kind is object
        or isinstance(value, generator)
        or (isinstance(value, Iterator) and not is_users(kind.__module__))
        or kind.__module__.startswith(_EACH_PROCESSES_OWN)
    )


_EACH_PROCESSES_OWN = ("numpy.random", "torch._C", "weft.", "_pytest.")


def _array_bytes(value: Any) -> bytes:
    """Return the digest of an array, or of a tensor. Raises _Opaque."""
    torch: Any = sys.modules.get("torch")
    kind = type(value)
    name = kind.__name__.encode()
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not value.is_leaf:
            raise _Opaque
        about = f"{value.dtype} {tuple(value.shape)} {value.requires_grad}".encode()
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _hash(name, about, memoryview(content))
    numpy: Any = sys.modules["numpy"]
    about = f"{value.dtype.descr} {value.shape} {value.flags.fnc}".encode()
    content = numpy.ascontiguousarray(value.view(numpy.ndarray)).reshape(-1).view(numpy.uint8)
    return _hash(name, about, memoryview(content))


def _is_array(kind: type, value: Any) -> bool:
    """Return whether a value is an array or tensor that is nothing but its memory."""
    name = _full_name(kind)
    return name == "torch.Tensor" or (name in _ARRAYS and not value.dtype.hasobject)


_ARRAYS = {
    *("numpy.ndarray", "numpy.memmap", "numpy.rec.recarray", "numpy.recarray", "numpy.matrix"),
    "weft._core.shared.SharedArray",
}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _hash(kind: bytes, *parts: Any) -> bytes:
    import hashlib

    total = hashlib.blake2b(kind, digest_size=16)
    for part in parts:
        total.update(b"%d:" % len(part))
        total.update(part)
    return total.digest()


#: what consists of functions and other values, which are its attributes
_PARTS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    property: ("fget", "fset", "fdel"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
}

_READERS: dict[type, Callable[[Reader, Any], bytes]] = {
    FunctionType: Reader._function,
    BuiltinFunctionType: Reader._builtin,
    **dict.fromkeys(_PARTS, Reader._callable),
    **dict.fromkeys((MemberDescriptorType, GetSetDescriptorType), Reader._name),
    **dict.fromkeys((list, tuple), Reader._sequence),
    **dict.fromkeys((set, frozenset), Reader._set),
    dict: Reader._dict,
}

#: for whom the type alone does not tell: whether it applies to a type and a value
_OTHER_READERS: list[tuple[Callable[[type, Any], bool], Callable[[Reader, Any], bytes]]] = [
    (lambda kind, _: issubclass(kind, type), Reader._class),
    (lambda kind, _: issubclass(kind, ModuleType), Reader._module),
    (lambda kind, _: issubclass(kind, enum.Enum), Reader._member),
    (_is_array, Reader._array),
    (lambda kind, _: issubclass(kind, tuple) and hasattr(kind, "_fields"), Reader._named_tuple),
    (
        lambda kind, value: (
            not is_users(kind.__module__)
            and isinstance(getattr(value, "__wrapped__", None), FunctionType)
        ),
        Reader._wrapper,
    ),
]

#: modules whose objects are containers of the user's
_CONTAINERS = ("collections", "types")

#: immutable values of libraries
_IMMUTABLE = {
    *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *("decimal.Decimal", "fractions.Fraction", "uuid.UUID", "zoneinfo.ZoneInfo"),
    *(f"{home}.{kind}PosixPath" for home in ("pathlib", "pathlib._local") for kind in ("", "Pure")),
    *("builtins.slice", "re.Pattern", "torch.device", "types.GenericAlias", "types.UnionType"),
    *("_collections._tuplegetter", "__future__._Feature"),
    "dataclasses._HAS_DEFAULT_FACTORY_CLASS",
}
