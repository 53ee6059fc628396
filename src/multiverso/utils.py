"""What programs took from Multiverso's own tools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso import api
from weft._core.arguments import explain_keywords
from weft._core.tables import as_array


class Loader:
    """Returns the functions of Multiverso's library by the names that C gave them.

    >>> Loader.get_lib().MV_Barrier.__name__
    'barrier'
    """

    #: what `get_lib` has returned
    LIB: SimpleNamespace | None = None

    @classmethod
    def load_lib(cls) -> SimpleNamespace:
        """Return the functions anew. There is no library to look for: they are `multiverso.api`'s,
        and `MV_Init` takes what `multiverso.init` takes."""
        return SimpleNamespace(
            MV_Init=api.init,
            MV_ShutDown=api.shutdown,
            MV_Barrier=api.barrier,
            MV_NumWorkers=api.workers_num,
            MV_WorkerId=api.worker_id,
            MV_ServerId=api.server_id,
        )

    @classmethod
    def get_lib(cls) -> SimpleNamespace:
        """Return the functions, each time the same."""
        if cls.LIB is None:
            cls.LIB = cls.load_lib()
        return cls.LIB


@explain_keywords
def convert_data(data: Any) -> NDArray[np.float32]:
    """Return numbers as a new array of float32, in which the old tables kept everything.

    Raises InvalidType, InvalidValue for what is no array of numbers.
    """
    return as_array(data, "data").astype(np.float32)
