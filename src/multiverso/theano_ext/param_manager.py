"""The parameters of a model, kept in step with the other workers': `weft.ModelTable` under
Multiverso's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import weft
from multiverso import _session
from multiverso._session import in_own_words
from multiverso.tables import ArrayTableHandler
from weft.errors import InvalidValue


class MVModelParamManager(ABC):
    """Shares a model's parameters. A subclass says how they are read and written.

    class MyManager(MVModelParamManager):
        def get_all_param_values(self):
            return [self.model.weights, self.model.bias]

        def set_all_param_values(self, params):
            self.model.weights, self.model.bias = params

    When it is made, every worker's model gets the master's values. All workers make their
    managers, and their tables, in the same order.

    Raises what `weft.ModelTable` does.
    """

    _table: weft.ModelTable

    @in_own_words
    def __init__(self, model: Any) -> None:
        self.model = model
        self._values = self._read()
        self._table = weft.ModelTable(self._values, consistency=_session.consistency())
        self._write()

    @property
    def tbh(self) -> ArrayTableHandler:
        """Return a handler of the table with all parameters, one after the other.

        Raises InvalidValue if they have several dtypes, each of which has a table of its own.
        """
        tables = self._table.tables
        if len(tables) > 1:
            dtypes = ", ".join(str(table.dtype) for table in tables)
            raise InvalidValue(
                f"{type(self).__name__}.tbh of parameters of {dtypes}: each dtype has a table of "
                "its own; expected parameters of one dtype"
            )
        return ArrayTableHandler._of(tables[0])

    @abstractmethod
    def get_all_param_values(self) -> Sequence[Any]:
        """Return the values of the model's parameters, always in the same order."""

    @abstractmethod
    def set_all_param_values(self, params: Sequence[NDArray[Any]]) -> None:
        """Give the parameters these values, in the same order."""

    @in_own_words
    def sync_all_param(self) -> None:
        """Add the change since the last sync to the tables, and take the latest values."""
        for value, now in zip(self._values, self.get_all_param_values(), strict=True):
            np.copyto(value, now)
        self._table.sync()
        self._write()

    def _read(self) -> list[NDArray[Any]]:
        group = weft.group()
        try:
            return [np.array(value) for value in self.get_all_param_values()]
        except Exception as error:
            group.refuse(type(self).__name__, error)  # the others do not wait for its table
            raise

    def _write(self) -> None:
        self.set_all_param_values([value.copy() for value in self._values])


class KnownModelManager(MVModelParamManager):
    """Shares the parameters of a model that weft reads and writes itself."""

    @in_own_words
    def __init__(self, model: Any) -> None:
        self.model = model
        self._table = weft.ModelTable(model, consistency=_session.consistency())

    @in_own_words
    def sync_all_param(self) -> None:
        self._table.sync()
