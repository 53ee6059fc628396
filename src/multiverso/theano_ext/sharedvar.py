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
from weft.errors import NotInitialized


def mv_shared(*args: Any, **options: Any) -> Any:
    """Return what `pytensor.shared` returns for the same arguments, with a method `mv_sync()`
    that adds the change since the last sync to the table and takes the latest value.

    It starts with the master's value on every worker; what the others pass is ignored, but for its
    name, shape and dtype. All workers make their variables in the same order.

    A pickle or copy of it is a shared variable without a table.

    Raises InvalidType for values that cannot be added up (generators, strings), MissingPackage.
    """
    pytensor = need("pytensor", "multiverso.theano_ext.sharedvar")
    variable = pytensor.shared(*args, **options)
    table = weft.ModelTable(variable, consistency=_session.consistency())
    variable.mv_sync = _Sync(table)
    _session.shared_variables.append(table)
    return variable


def sync_all_mv_shared_vars() -> None:
    """Call `mv_sync()` of every variable that `mv_shared` has made since `init`."""
    for table in _session.shared_variables:
        table.sync()


class _Sync:
    """A variable's `mv_sync`. An object, so that the variable can be pickled without its table."""

    def __init__(self, table: weft.ModelTable | None = None) -> None:
        self._table = table

    def __call__(self) -> None:
        if self._table is None:
            raise NotInitialized(
                "this shared variable was copied or loaded, so it has no table; make one of its "
                "value:\n    sharedvar.mv_shared(variable.get_value())"
            )
        self._table.sync()

    def __reduce__(self) -> tuple[type[_Sync], tuple[()]]:
        return _Sync, ()
