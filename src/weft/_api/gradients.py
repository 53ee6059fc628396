"""A rank's gradients as one flat array, which the ranks add up where it lies.

after backward    loss | which parameters it depends on | gradient | gradient | ...
                    one array in shared memory: a copy of what torch has computed
add up            one all_reduce of that array, in place; nobody copies anything
take              each parameter's gradient is its part of the array
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from weft import adapters
from weft._api.sharing import share
from weft.engines.base import Group
from weft.errors import InvalidType

#: numbers after which the first gradient begins, or twice as many, ...: a line of the cache
_LINE = 16


class Gradients:
    """Those of some parameters, and the loss that they are the gradients of."""

    def __init__(self, parameters: Sequence[Any], *, shared: bool) -> None:
        self._kinds = _kinds(parameters)
        # half precision is added up in a wider type
        dtype = reduce(torch.promote_types, (one.dtype for one in parameters), torch.float32)
        for one in parameters:
            adapters.named("torch").view(one)  # refuses those on a GPU
        first = -(-(1 + len(parameters)) // _LINE) * _LINE
        bounds = list(accumulate((one.numel() for one in parameters), initial=first))
        flat = np.zeros(bounds[-1], torch.empty(0, dtype=dtype).numpy().dtype)
        # as an array of NumPy's own class, which is described more quickly
        self._flat = share(flat).view(np.ndarray) if shared else flat
        whole = torch.from_numpy(self._flat)
        self._parts = [
            whole[start:stop].view(one.shape)
            for one, start, stop in zip(parameters, bounds, bounds[1:], strict=False)
        ]

    def are_of(self, parameters: Sequence[Any]) -> bool:
        """Whether there is a place for each of these, and for nothing else."""
        return self._kinds == _kinds(parameters)

    def put(self, loss: float, parameters: Sequence[Any]) -> None:
        """Put a rank's own in. Raises InvalidType for those that are not dense."""
        self._flat[0] = loss
        for place, (one, part) in enumerate(zip(parameters, self._parts, strict=True), 1):
            self._flat[place] = one.grad is not None
            if one.grad is None:
                part.zero_()
                continue
            if one.grad.layout is not torch.strided:
                raise InvalidType(
                    f"a parameter of shape {tuple(one.shape)} has a gradient of layout "
                    f"{one.grad.layout}; only dense ones can be added up: an embedding has them "
                    "with sparse=False"
                )
            part.copy_(one.grad.detach())

    def add_up(self, group: Group) -> None:
        """Have them be the sums over all ranks."""
        group.all_reduce(self._flat, out=self._flat)

    def take(self, parameters: Sequence[Any]) -> float:
        """Have the parameters get their gradients; returns the loss. A parameter that no rank's
        loss depends on has no gradient, and is left alone."""
        for place, (one, part) in enumerate(zip(parameters, self._parts, strict=True), 1):
            if self._flat[place]:
                one.grad = part if part.dtype is one.dtype else part.to(one.dtype)
        return float(self._flat[0].real)


def _kinds(parameters: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(one.shape, one.dtype) for one in parameters]
