"""Shared variables of PyTensor that are kept in step with the other workers'.

W = sharedvar.mv_shared(value=numpy.zeros((784, 10)), name="W", borrow=True)
...                                    # graphs, functions, updates: as with any other
W.mv_sync()                            # add my change, take the latest
sharedvar.sync_all_mv_shared_vars()    # the same for all of them
"""

from __future__ import annotations

from typing import Any

import weft
from multiverso import _session
from multiverso._packages import need
from multiverso._session import in_own_words
from weft._core.arguments import validate_keywords
from weft.errors import InvalidType, NotInitialized

#: what `pytensor.shared` takes by name
_OPTIONS = ("value", "name", "strict", "allow_downcast", "borrow", "shape", "broadcastable")


class MVSharedVariable:
    """A shared variable with a table: what `mv_sync` needs, beside all that the variable has.

    All workers make theirs in the same order; everybody starts with the master's value. A pickle or
    copy has no table.

    Raises InvalidType for what is no shared variable, or cannot be added up (generators, strings).
    """

    @in_own_words
    def __init__(self, svobj: Any) -> None:
        need("pytensor", "multiverso.theano_ext.sharedvar")
        from pytensor.compile.sharedvalue import SharedVariable

        if not isinstance(svobj, SharedVariable):
            raise _refused_error(
                InvalidType(
                    f"MVSharedVariable({svobj!r}): expected a shared variable of PyTensor:\n"
                    "    MVSharedVariable(pytensor.shared(value))"
                )
            )
        self._svobj = svobj
        self._sync = _Sync(weft.ModelTable(svobj, consistency=_session.consistency()))

    @in_own_words
    def mv_sync(self) -> None:
        """Add the change since the last sync to the table, and take the latest value."""
        self._sync()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_svobj" not in vars(self):  # while it is unpickled
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._svobj, name)


@in_own_words
def mv_shared(*args: Any, **kwargs: Any) -> Any:
    """Return what `pytensor.shared` returns for the same arguments, with a method `mv_sync()`
    that adds the change since the last sync to the table and takes the latest value.

    It starts with the master's value on every worker; what the others pass is ignored, but for its
    name, shape and dtype. All workers make their variables in the same order. Those made since
    `init` are in the list `mv_shared.shared_vars`, each as an `MVSharedVariable`.

    A pickle or copy of it is a shared variable without a table.

    Raises InvalidType for values that cannot be added up (generators, strings) and for arguments
    that `pytensor.shared` does not take, MissingPackage.
    """
    pytensor = need("pytensor", "multiverso.theano_ext.sharedvar")
    try:
        validate_keywords(kwargs, _OPTIONS, "mv_shared")
        variable = pytensor.shared(*args, **kwargs)
    except InvalidType as error:
        raise _refused_error(error) from None
    except TypeError as error:  # an option that a value of this kind does not have
        what = InvalidType(f"mv_shared takes what pytensor.shared takes: {error}")
        raise _refused_error(what) from None
    shared = MVSharedVariable(variable)
    variable.mv_sync = shared._sync
    _session.shared_variables.append(shared)
    return variable


# an attribute of the function, as of old; `init` and `shutdown` empty it
mv_shared.shared_vars = _session.shared_variables  # type: ignore[attr-defined]


def _refused_error(error: InvalidType) -> InvalidType:
    """Return the error, once the others do not wait for this worker's table any more."""
    weft.group().refuse("ModelTable", error)
    return error


@in_own_words
def sync_all_mv_shared_vars() -> None:
    """Call `mv_sync()` of every variable that `mv_shared` has made since `init`."""
    for shared in _session.shared_variables:
        shared.mv_sync()


class _Sync:
    """A variable's `mv_sync`. An object, so that the variable can be pickled without its table."""

    def __init__(self, table: weft.ModelTable | None = None) -> None:
        self._table = table

    @in_own_words
    def __call__(self) -> None:
        if self._table is None:
            raise NotInitialized(
                "this shared variable was copied or loaded, so it has no table; make one of its "
                "value:\n    sharedvar.mv_shared(variable.get_value())"
            )
        self._table.sync()

    def __reduce__(self) -> tuple[type[_Sync], tuple[()]]:
        return _Sync, ()
