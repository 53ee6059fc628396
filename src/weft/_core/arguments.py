"""Whole numbers, timeouts and names of arguments, as users give them.

How long a call may wait is said by `timeout=` of the call, else by `timeout=` of `weft.init`, else
by the environment variable WEFT_TIMEOUT, else by `DEFAULT`: a number of seconds, 0 or more.
`math.inf` waits for as long as the peers live.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from weft.errors import InvalidType, InvalidValue

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "WEFT_TIMEOUT"
#: seconds; long enough for a master that evaluates while the others wait at a barrier
DEFAULT = 1800.0
#: seconds that a group without an explicit timeout has to assemble
START = 120.0


def whole(value: Any) -> int | None:
    """Return a whole number as a Python int, or None for any other value.

    NumPy's integers are whole numbers. True and 2.0 are not.

    >>> import numpy
    >>> whole(numpy.int64(2)), whole(2.0), whole(True)
    (2, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def validate_count(value: Any, where: str, name: str, *, least: int | None = None) -> int:
    """Return the option `name` of the call `where` as an int of at least `least`. Raises
    InvalidType for anything but a whole number, InvalidValue for one that is too small."""
    rule = "a whole number" + ("" if least is None else f", {least} or more")
    number = whole(value)
    if number is None:
        got = type(value).__name__
        raise InvalidType(f"{where}({name}={value!r}): expected {rule}, got {got}")
    if least is not None and number < least:
        raise InvalidValue(f"{where}({name}={value!r}): expected {rule}")
    return number


def validate_keywords(given: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise InvalidType for the first argument that the call `where` does not have. It names the
    nearest one that exists."""
    for name in given:
        if name not in known:
            raise _no_such_argument_error(name, known, where)


def explain_keywords(call: Callable[P, T]) -> Callable[P, T]:
    """Make a call raise InvalidType for a keyword that it does not have, in the place of Python's
    TypeError: it names the nearest one that exists. Where nothing is wrong, nothing is looked at.

    >>> @explain_keywords
    ... def add(data, sync=False):
    ...     pass
    >>> add([1], snyc=True)
    Traceback (most recent call last):
    weft.errors.InvalidType: add(snyc=...): there is no such argument; the nearest is sync=. ...
    """

    @functools.wraps(call)
    def explained(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return call(*arguments, **keywords)
        except TypeError:
            error = keyword_error(call, arguments, keywords)
            if error is None:
                raise
        raise error

    return explained


def keyword_error(
    call: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> InvalidType | None:
    """Return what is wrong with the keywords of a call that has failed; None if it was not they."""
    import difflib  # needed for this only
    import inspect

    signature = inspect.signature(call)
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        kinds = {one.name: one.kind for one in signature.parameters.values()}
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        known = [name for name, kind in kinds.items() if kind not in variable]
        known = [name for name in known if name not in ("self", "cls")]
        wrong = [name for name in keywords if name not in known]
        if inspect.Parameter.VAR_KEYWORD in kinds.values():  # then others may be right
            wrong = [name for name in wrong if difflib.get_close_matches(name, known)]
        if wrong:
            where = (
                call.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2].lstrip("_")
            )
            return _no_such_argument_error(wrong[0], known, where)
    return None


def _no_such_argument_error(name: str, known: Collection[str], where: str) -> InvalidType:
    import difflib  # needed for this only

    if not known:
        return InvalidType(f"{where}({name}=...): it takes no arguments")
    (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return InvalidType(
        f"{where}({name}=...): there is no such argument; the nearest is {nearest}=. "
        f"{where} takes {', '.join(known)}"
    )


def validate_seconds(timeout: object, name: str = "timeout") -> float:
    """Return a timeout as seconds. Raises InvalidType and InvalidValue, which name it."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):  # NumPy's numbers too
        raise InvalidType(
            f"{name}={timeout!r}: expected a number of seconds, got {type(timeout).__name__}; "
            "for no deadline pass math.inf"
        )
    if math.isnan(timeout) or timeout < 0:
        raise InvalidValue(
            f"{name}={timeout!r}: expected 0 or more seconds; for no deadline pass math.inf"
        )
    return float(timeout)


def seconds(timeout: object) -> float:
    """Return how long a call may wait: the given timeout, else WEFT_TIMEOUT, else the default."""
    if timeout is not None:
        return validate_seconds(timeout)
    variable = from_environment(os.environ)
    return DEFAULT if variable is None else variable


def deadline_after(timeout: float | None, default: float) -> float:
    """Return when a call gives up, on the monotonic clock: after the timeout, else the default."""
    return time.monotonic() + (default if timeout is None else validate_seconds(timeout))


def seconds_until(deadline: float) -> float:
    """Return the seconds that are left until a deadline; 0 once it has passed."""
    return max(0.0, deadline - time.monotonic())


def from_environment(environ: Mapping[str, str]) -> float | None:
    """Return the seconds in WEFT_TIMEOUT, or None if it is not set."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        return validate_seconds(float(text))
    except ValueError:
        raise InvalidValue(
            f"{VARIABLE}={text!r}: expected 0 or more seconds, or inf; for example {VARIABLE}=60"
        ) from None
