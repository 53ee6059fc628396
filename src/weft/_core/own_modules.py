"""The user's own modules: which they are, and which of them code and pickles refer to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import _lru_cache_wrapper
from types import CodeType, FunctionType, ModuleType
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
        own = {name: module for name, module in loaded.items() if is_own(name, module)}
        _own = state, own, [(name, _as_pickled(name)) for name in own]
    return _own


def is_own(name: str, module: object) -> bool:
    """Return whether a module that is loaded is the user's own."""
    if not isinstance(module, ModuleType) or name in _SCRIPT:
        return False
    file = vars(module).get("__file__")
    return isinstance(file, str) and is_own_file(name, file)


def is_own_file(name: str, file: str) -> bool:
    """Return whether a file is that of a module of the user's."""
    if not file.endswith((".py", ".pyc")):
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
    if isinstance(value, (FunctionType, type, _lru_cache_wrapper)) and is_importable(value):
        return (value.__module__,)
    return modules_used_by(value) if isinstance(value, FunctionType) else ()


def is_users(module: str) -> bool:
    """Return whether a module is the user's: a file of his own, or the script."""
    return module in _SCRIPT or module in own_modules()


def home_of(function: FunctionType) -> ModuleType | None:
    """Return the module whose variables are a function's globals; None for a function of the main
    program, or of a module that was removed."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and name not in _SCRIPT else None
    return module if module is not None and vars(module) is function.__globals__ else None


def is_foreign(value: Any) -> bool:
    """Return whether a value is a function that an installed package or `exec` has made, such as a
    decorator's, and that cannot be imported from there."""
    if type(value) is not FunctionType:
        return False
    if is_importable(value) and not is_users(value.__module__):
        return False
    home, variables = home_of(value), value.__globals__
    if home is not None:
        return not is_users(home.__name__)
    return "__file__" not in variables and variables.get("__name__") not in _SCRIPT


#: what pytest adds to the modules of tests, whose asserts it compiles in its own way, and
#: `read_module` to a worker's, so that its own workers know too
REWRITTEN_BY_PYTEST = "@pytest_ar"


def is_rewritten(module: ModuleType, code: CodeType) -> bool:
    """Return whether pytest has compiled the asserts of this code in the driver. It is compared by
    name and line: nobody reloads a module of tests, and no two functions with asserts begin in one
    line."""
    return REWRITTEN_BY_PYTEST in vars(module) and _has_asserts(code)


def _has_asserts(code: CodeType) -> bool:
    import dis

    opcode = dis.opmap.get("LOAD_ASSERTION_ERROR") or dis.opmap["LOAD_COMMON_CONSTANT"]
    if opcode in code.co_code[::2] or REWRITTEN_BY_PYTEST in code.co_names:
        return True
    return any(_has_asserts(one) for one in code.co_consts if isinstance(one, CodeType))


def is_importable(value: Any) -> bool:
    """Return whether a function or class is what its module has under its name: not after the
    module was reloaded."""
    found: Any = sys.modules.get(value.__module__) if value.__module__ not in _SCRIPT else None
    for name in value.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # a module may have its own __getattr__
    return (found.__func__ if isinstance(found, staticmethod) else found) is value


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
    names = names_in(function.__code__)
    used = imports_of(function.__code__, variables.get("__package__") or "")
    found = {variables[name].__name__ for name in names if type(variables.get(name)) is ModuleType}
    own = own_modules()
    while found - used:
        used |= found
        found = {f"{package}.{name}" for package in found for name in names} & own.keys()
    return used


def names_in(code: CodeType) -> list[str]:
    """Return the names that a function and those within it look up, sorted."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return sorted({*code.co_names, *(name for one in inner for name in names_in(one))})
