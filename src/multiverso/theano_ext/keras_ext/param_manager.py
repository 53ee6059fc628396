"""The weights of a model of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from multiverso._packages import need
from multiverso.theano_ext.param_manager import KnownModelManager
from weft._core.arguments import explain_keywords


class KerasParamManager(KnownModelManager):
    """Shares the weights of a model or layer, on whichever backend Keras runs.

    manager = KerasParamManager(model)    # everybody has the master's values
    ...                                   # train
    manager.sync_all_param()              # add my change, take the latest

    Raises what `weft.ModelTable` does, and MissingPackage.
    """

    @explain_keywords
    def __init__(self, model: Any) -> None:
        need("keras", "multiverso.theano_ext.keras_ext")
        super().__init__(model)

    def get_all_param_values(self) -> Sequence[Any]:
        values: Sequence[Any] = self.model.get_weights()
        return values

    def set_all_param_values(self, params: Sequence[NDArray[Any]]) -> None:
        self.model.set_weights(params)
