"""A collective of one rank: the reference for every engine."""

from __future__ import annotations

import numpy as np

from weft._core.calls import Call
from weft._core.elements import combine
from weft._core.plans import Combination, Movement


def carry_out(call: Call) -> None:
    """Do what the call plans, in this process alone."""
    plan = call.settle([call.own])
    if isinstance(plan, Combination):
        for source, target, element in zip(call.source, plan.target, plan.elements, strict=True):
            combine([source], target, plan.op, element, plan.weights)
    else:
        _move(call, plan)
    call.finish()


def _move(call: Call, plan: Movement) -> None:
    for copy in plan.incoming:
        source = call.source[copy.from_array].view(np.uint8)
        target = plan.target[copy.to_array].view(np.uint8)
        part = source[copy.from_byte : copy.from_byte + copy.length]
        target[copy.to_byte : copy.to_byte + copy.length] = part
