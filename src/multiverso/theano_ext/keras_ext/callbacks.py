"""A callback of Keras's `fit`."""

from __future__ import annotations

from typing import Any

from multiverso._packages import need
from multiverso.theano_ext.keras_ext.param_manager import KerasParamManager
from weft._core.arguments import explain_keywords, whole
from weft.errors import InvalidType, InvalidValue

_Callback: Any = need("keras", "multiverso.theano_ext.keras_ext.callbacks").callbacks.Callback


class MVCallback(_Callback):  # type: ignore[misc]  # Keras has no types
    """Syncs a model after every `freq` batches, and when training ends.

    model.fit(x, y, callbacks=[MVCallback(model, freq=4)])
    """

    @explain_keywords
    def __init__(self, model: Any, freq: int = 1) -> None:
        super().__init__()
        batches = whole(freq)
        if batches is None:
            raise InvalidType(f"freq={freq!r}: expected a whole number of batches")
        if batches < 1:
            raise InvalidValue(f"freq={freq}: expected 1 or more batches between two syncs")
        self._manager = KerasParamManager(model)
        self._freq, self._batches = batches, 0

    @explain_keywords
    def on_batch_end(self, batch: int, logs: Any = {}) -> None:  # noqa: B006  as of old; not used
        """Count a batch of training, and sync after every `freq` of them."""
        self._batches += 1
        if self._batches % self._freq == 0:
            self._manager.sync_all_param()

    def on_train_end(self, logs: Any = None) -> None:
        self._manager.sync_all_param()
