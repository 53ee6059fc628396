"""A rank's gradients as one flat array, which the ranks add up where it lies.

after backward   loss | which parameters it depends on | gradient | gradient | ...
                   one array of the group's, with a copy of what torch has computed
add up           one all_reduce of that array, in place: nobody copies anything
take             each parameter's gradient is its part of the array, until the next step

Somebody may hold a gradient for longer than that: then the next step uses another array.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch

from weft import adapters
from weft.engines.base import Group
from weft.errors import InvalidType

#: the first gradient begins at a multiple of this: a line of the cache, in float32
_LINE = 16
#: different sets of parameters of one optimizer that have an array at a time
_SETS = 4

#: By optimizer, and by what makes an array fit: they go with the optimizer, of which a rank may get
#: another under the same number.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Gradients]]
_made = weakref.WeakKeyDictionary()


def gradients_for(optimizer: Any, parameters: Sequence[Any], group: Group) -> Gradients:
    """Where the gradients of an optimizer's parameters go: at each step to the same array, unless
    somebody holds one. The group adds them up."""
    key = (group.size, *((one.shape, one.dtype, one.stride()) for one in parameters))
    made = _made.setdefault(optimizer, {})
    if key not in made or made[key].in_use:
        if len(made) >= _SETS:
            made.clear()
        made[key] = Gradients(parameters, group)
    return made[key]


class Gradients:
    """Those of some parameters, and the loss that they are the gradients of."""

    def __init__(self, parameters: Sequence[Any], group: Group) -> None:
        # half precision is added up in a wider type
        self._dtype = reduce(torch.promote_types, (one.dtype for one in parameters), torch.float32)
        for one in parameters:
            adapters.named("torch").view(one)  # refuses those on a GPU
        first = -(-(1 + len(parameters)) // _LINE) * _LINE
        *starts, size = accumulate((one.numel() for one in parameters), initial=first)
        self._flat = group.allocate(size, torch.empty(0, dtype=self._dtype).numpy().dtype)
        #: where each gradient begins, and its form: as torch would lay it out, which some
        #: optimizers rely on
        self._forms = [
            (one.shape, torch.empty_like(one, device="meta").stride(), start)
            for one, start in zip(parameters, starts, strict=True)
        ]
        self._parts: list[Any] = []
        #: a weak reference to the array under all gradients given out: there while one is
        self._given: Callable[[], Any] = lambda: None

    @property
    def in_use(self) -> bool:
        """Whether somebody has a gradient of the last step."""
        return self._given() is not None

    def put(self, loss: float, parameters: Sequence[Any]) -> None:
        """Put a rank's own in. Raises InvalidType for those that are not dense."""
        array = self._flat[:]  # all tensors over it together hold this one
        whole = torch.from_numpy(array)
        self._given = weakref.ref(array)
        self._parts = [whole.as_strided(*form) for form in self._forms]
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
        parts, self._parts = self._parts, []
        for place, (one, part) in enumerate(zip(parameters, parts, strict=True), 1):
            if self._flat[place]:
                one.grad = part if self._dtype is one.dtype else part.to(one.dtype)
        return float(self._flat[0].real)  # complex parameters make the array complex
