"""The user's own modules on their way to hosts that do not have them.

    driver                                       host
    collect: their source files, as a zip ──>    adopt: the zip as a file without a name, first in
    named by its content                         the path from which its workers import

What is loaded travels, with all that lies in its packages, and what its code imports but has not
loaded. An edited file makes another zip. A module's state, as the program has changed it, follows
as it does between a driver and workers of one host.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import io
import os
import sys
import zipfile
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any, NamedTuple

from weft._core.own_modules import is_own, is_own_file, own_modules


class Archive(NamedTuple):
    """Source files, and the digest of their contents."""

    digest: str
    data: bytes


NOTHING = Archive("", b"")


def collect(names: Iterable[str]) -> Archive:
    """Return the user's modules that are loaded, those of these names, and what they import."""
    files: dict[str, str] = {}
    for name in own_modules():
        module = sys.modules.get(name)  # it may have been removed, and imported from elsewhere
        if is_own(name, module):
            _add(files, name, str(vars(module)["__file__"]))
    waiting = {name.partition(".")[0] for name in names}
    seen: set[str] = set()
    for path in list(files.values()):
        waiting |= _imports_of(path)
    while waiting:
        name = waiting.pop()
        if name in seen or name in sys.modules:
            continue
        seen.add(name)
        before = set(files.values())
        _add_unloaded(files, name)
        for path in set(files.values()) - before:
            waiting |= _imports_of(path)
    return _zip(tuple(sorted((name, *_version(path)) for name, path in files.items())))


def is_here(name: str) -> bool:
    """Return whether this process could import a module of the user's of this name."""
    files: dict[str, str] = {}
    if name.partition(".")[0] in own_modules():
        return True
    _add_unloaded(files, name.partition(".")[0])
    return bool(files)


def _add(files: dict[str, str], name: str, path: str) -> None:
    """Add a module's file, and if it is a package's, all that lies in its folder."""
    path = os.path.abspath(path)
    place = name.replace(".", "/")
    if not path.endswith(".py"):
        return
    if os.path.basename(path) != "__init__.py":
        files[place + ".py"] = path
        return
    top = os.path.dirname(path)
    if f"{place}/__init__.py" in files:
        return
    for folder, folders, names in os.walk(top):
        folders[:] = [one for one in folders if one != "__pycache__"]
        for one in names:
            if one.endswith(".py"):
                file = os.path.join(folder, one)
                files[f"{place}/{os.path.relpath(file, top)}"] = file


def _add_unloaded(files: dict[str, str], name: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is not None and spec.origin is not None and is_own_file(name, spec.origin):
        _add(files, name, spec.origin)


def _imports_of(path: str) -> set[str]:
    return _imports_in(*_version(path)) if os.path.exists(path) else set()


@lru_cache(maxsize=10_000)
def _imports_in(path: str, changed: int, size: int) -> set[str]:
    """Return the first names of the modules that a file imports anywhere."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _version(path: str) -> tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError:  # it was deleted since
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=4)
def _zip(files: tuple[tuple[str, str, int, int], ...]) -> Archive:
    if not files:
        return NOTHING
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, path, _, _ in files:
            try:
                with open(path, "rb") as file:
                    archive.writestr(zipfile.ZipInfo(name), file.read())
            except OSError:  # it was deleted since: the import says so if it is needed
                continue
    data = written.getvalue()
    return Archive(hashlib.sha256(data).hexdigest(), data)


# on a host


class Adopted:
    """The driver's modules on a host: an archive in memory, which its workers import from."""

    def __init__(self) -> None:
        self.digest = ""
        #: the archive's file as all processes of the host can open it
        self.path = ""
        self._descriptor = -1

    def adopt(self, archive: Archive) -> None:
        """Import modules from another archive from now on; forget those that came from the last."""
        before, old = self.path, self._descriptor
        self._descriptor = os.memfd_create("modules", os.MFD_CLOEXEC)
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(archive.data)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.digest = archive.digest
        for name, module in list(sys.modules.items()):
            if before and str(getattr(module, "__file__", "")).startswith(before + "/"):
                del sys.modules[name]
        for cached in (sys.path_importer_cache, _zip_cache()):
            cached.pop(self.path, None)
        sys.path[:] = [self.path, *(path for path in sys.path if path != before)]
        importlib.invalidate_caches()
        if old >= 0:
            os.close(old)


@cache
def _zip_cache() -> dict[str, Any]:
    import zipimport

    found: dict[str, Any] = vars(zipimport)["_zip_directory_cache"]
    return found
