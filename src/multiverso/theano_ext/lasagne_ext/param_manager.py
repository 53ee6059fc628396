"""The parameters of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from multiverso._packages import need
from multiverso.theano_ext.param_manager import KnownModelManager
from weft._core.arguments import explain_keywords


class LasagneParamManager(KnownModelManager):
    """Shares the parameters of a network: a layer of Lasagne, with all that lead to it, or a list
    or dict of PyTensor's shared variables, nested as you like.

    manager = MVNetParamManager(network)    # everybody has the master's values
    ...                                     # train
    manager.sync_all_param()                # add my change, take the latest

    Raises what `weft.ModelTable` does, and MissingPackage.
    """

    @explain_keywords
    def __init__(self, network: Any) -> None:
        need("pytensor", "multiverso.theano_ext.lasagne_ext")
        super().__init__(network)

    def get_all_param_values(self) -> list[NDArray[Any]]:
        from weft.adapters import pytensor

        return [value.copy() for value in pytensor.read(self.model)]

    def set_all_param_values(self, params: Sequence[NDArray[Any]]) -> None:
        from weft.adapters import pytensor

        pytensor.write(self.model, params)


#: as earlier releases called it
MVNetParamManager = LasagneParamManager
