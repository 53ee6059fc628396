"""The driver's rules for warnings in a worker, and a worker's warnings in the driver.

driver                                   worker
by_name: `warnings.filters`    ──>       adopt
reissue: as if its own line    <──       forward: what the rules have shown
had been run
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, cast

from weft._core import pickling
from weft.engines.local.pool.messages import Warned
from weft.engines.local.processes.output import clear_of_bars

#: a rule of `warnings.filters`: what is done, the text, the category, the module, the line
Rule = tuple[Any, ...]


def by_name(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return rules with their categories by name: workers need not import their modules. One of the
    main program stays, to be pickled."""
    return tuple(
        rule
        if rule[2].__module__ == "__main__"
        else (*rule[:2], (rule[2].__module__, rule[2].__qualname__), *rule[3:])
        for rule in rules
    )


# in the worker

#: the driver's rules
_rules: tuple[Rule, ...] = ()
#: whether there are rules for a category whose module is not loaded here
_unresolved = False
#: whether a warning was shown since the rules were set
_shown = False


def adopt(rules: tuple[Rule, ...]) -> None:
    """Take over the driver's rules."""
    global _rules
    _rules = rules
    _set_filters()


def begin_call() -> None:
    """Show again what was shown in an earlier call: the driver knows what it has shown."""
    if _unresolved or _shown:
        _set_filters()


def _set_filters() -> None:
    global _unresolved, _shown
    rules = [(*rule[:2], _resolve(rule[2]), *rule[3:]) for rule in _rules]
    warnings.resetwarnings()
    warnings.filters.extend(rule for rule in rules if rule[2] is not None)  # type: ignore[attr-defined]
    warnings.onceregistry.clear()  # type: ignore[attr-defined]
    _unresolved, _shown = any(rule[2] is None for rule in rules), False


def _resolve(category: Any) -> Any:
    """Return the category of this name; None if its module is not loaded."""
    if isinstance(category, type):
        return category
    module, name = category
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def forward(send: Callable[[Warned], None]) -> None:
    """Send the warnings that are shown in this process to the driver."""
    show = warnings.showwarning

    def forward_one(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        global _shown
        _shown = True
        if rest and rest[0] is not None:  # a file that it is to be printed to
            show(message, category, filename, lineno, *rest)
            return
        try:
            data = pickling.dumps(message)
            pickle.loads(data)
        except Exception:  # a class's own pickling may raise anything
            data = pickling.dumps(RuntimeWarning(f"{category.__name__}: {message}"))
        send(Warned(data, filename, lineno, _module_at(filename, lineno)))

    warnings.showwarning = cast("Any", forward_one)


def _module_at(filename: str, lineno: int) -> str | None:
    """Return the name of the module whose line has warned, if it is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == filename and frame.f_lineno == lineno:
            name = frame.f_globals.get("__name__")
            return name if isinstance(name, str) else None
        frame = frame.f_back
    return None


# in the driver

#: what was shown of files that are not loaded here
_registries: dict[str, dict[Any, Any]] = {}


def reissue(warned: Warned) -> None:
    """Issue a worker's warning in the driver."""
    module = sys.modules.get(warned.module or "")
    if module is not None:
        registry = vars(module).setdefault("__warningregistry__", {})
    else:
        registry = _registries.setdefault(warned.filename, {})
    message = pickle.loads(warned.message)
    with clear_of_bars(sys.stderr):
        warnings.warn_explicit(
            message,
            type(message),
            warned.filename,
            warned.lineno,
            module=warned.module,
            registry=registry,
        )
