"""What `multiverso.init` chose, and the shared variables made since: the only state here. And
weft's errors, told in the words that a program for Multiverso can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import weft
from weft._core.arguments import keyword_error
from weft.errors import InvalidType, InvalidValue, WeftError

P = ParamSpec("P")
T = TypeVar("T")

#: the group of an `init(sync=True)`
_in_step: weft.Group | None = None
#: the variables that `mv_shared` has made, in the order in which all workers make them
shared_variables: list[Any] = []

#: what weft's errors advise or call arguments, and what to write here
_OWN_WORDS = (
    ("a delta of shape", "data of shape"),
    ("delta of ", "data of "),
    ("delta is ", "data is "),
    ("delta has ", "data has "),
    ("rows is ", "row_ids is "),
    ("rows has shape ", "row_ids has shape "),
    ("rows=", "row_ids="),
    ("n_row_ids=", "num_row="),
    ("n_cols=", "num_col="),
    ("a whole number, or an array to start from", "a whole number"),
    ("use the group it returned, or end that session first", "go on, or end that session first"),
    ("a new one comes from weft.init(), or from split() of a group that it is still in", "join it"),
    ("group = weft.init()", "mv.init()"),
    ("weft.init()", "mv.init()"),
    ("weft.shutdown()", "mv.shutdown()"),
    ("raise timeout=", "set the variable WEFT_TIMEOUT to more seconds"),
    ("raise --timeout or WEFT_TIMEOUT", "set the variable WEFT_TIMEOUT to more seconds"),
)


def in_own_words(call: Callable[P, T]) -> Callable[P, T]:
    """Make the errors of a call advise what this package has, not what weft has. A wrong keyword is
    told with the nearest one that exists."""

    @wraps(call)
    def spoken(*args: P.args, **options: P.kwargs) -> T:
        try:
            return call(*args, **options)
        except WeftError as error:
            error.args = tuple(map(_translate, error.args))
            raise
        except TypeError:
            wrong = keyword_error(call, args, options)
            if wrong is None:
                raise
        raise wrong

    return spoken


def _translate(text: Any) -> Any:
    if isinstance(text, str):
        for weft_has, here in _OWN_WORDS:
            text = text.replace(weft_has, here)
    return text


def validate_sync(sync: object, args: object) -> bool:
    """Return whether `init` was asked for workers in step: by a bool, or by the flags of the first
    releases. Raises InvalidType, InvalidValue."""
    if isinstance(sync, (list, tuple)) and args is None:
        sync, args = False, sync
    if not isinstance(sync, bool):
        raise InvalidType(
            f"init(sync={sync!r}): expected True or False, or a list of flags: init(['-sync=true'])"
        )
    if args is None:
        return sync
    if not isinstance(args, (list, tuple)):
        raise InvalidType(f"init(args={args!r}): expected a list of flags, or nothing")
    return _last_flag(args, sync)


def _last_flag(flags: Sequence[object], sync: bool) -> bool:
    """Return what the flags say. The first may be the program's name, or empty."""
    for position, flag in enumerate(flags):
        name = isinstance(flag, str) and not flag.startswith("-")
        if position == 0 and name:
            continue
        if flag not in ("-sync=true", "-sync=false"):
            raise InvalidValue(
                f"init({list(flags)!r}): the flag {flag!r} has no meaning here; expected "
                "-sync=true, -sync=false or no flags:\n    mv.init()"
            )
        sync = flag == "-sync=true"
    return sync


def begin(sync: bool) -> None:
    global _in_step
    group = weft.init()
    shared_variables.clear()
    _in_step = group if sync else None


def end() -> None:
    global _in_step
    weft.shutdown()
    shared_variables.clear()
    _in_step = None


def consistency() -> str:
    """Return the consistency of new tables, as `weft.ArrayTable` names it."""
    return "bsp" if _in_step is not None and weft.group() is _in_step.latest else "async"
