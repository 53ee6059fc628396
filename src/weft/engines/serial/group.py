"""A group of one rank: the reference for every other group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft._core.arguments import validate_seconds
from weft.engines.base import Group, Handle, Store
from weft.engines.refusals import left_error, superseded_error, validate_split
from weft.resources import host_name

if TYPE_CHECKING:
    from weft._core.arithmetic import Array
    from weft._core.calls import Call, Movement
    from weft._core.tables import TableSpec


class SerialGroup(Group):
    """A group of one rank, which never waits."""

    has_device_tables = True

    def __init__(self, *, timeout: float, name: str = "world", generation: int = 0) -> None:
        self.name, self.rank, self.size, self.hosts = name, 0, 1, (host_name(),)
        self.generation, self.timeout = generation, timeout
        self._splits = 0

    def barrier(self, *, timeout: float | None = None) -> None:
        self._validate_use(timeout)

    def split(
        self, color: int | None, *, key: int = 0, timeout: float | None = None
    ) -> Group | None:
        self._validate_use(timeout)
        color, key = validate_split(color, key)
        self._splits += 1
        if color is None:
            return None
        return SerialGroup(timeout=self.timeout, name=f"{self.name}/{self._splits}.{color}")

    def survivors(self, *, timeout: float | None = None) -> Group:
        self._validate_use(timeout)
        self.successor = SerialGroup(
            timeout=self.timeout, name=self.name, generation=self.generation + 1
        )
        return self.successor

    def leave(self) -> None:
        self.has_left = True

    def make_store(self, spec: TableSpec, values: Array | None) -> Store:
        from weft.engines.serial.store import SerialStore

        self._validate_use(None)
        return SerialStore(self, spec, values)

    def refuse(self, name: str, error: Exception) -> None:
        """Do nothing: there are no other ranks."""

    def carry_out(self, call: Call, *, timeout: float) -> None:
        self._validate_use(timeout)
        carry_out(call)

    def place_of(self, call: Call) -> str | None:
        return call.device

    def _start(self, call: Call, seconds: float) -> Handle:
        self._validate_use(seconds)
        return super()._start(call, seconds)

    def _validate_use(self, timeout: float | None) -> None:
        if self.has_left:
            raise left_error(f"group {self.name!r}")
        if self.successor is not None:
            raise superseded_error(self)
        if timeout is not None:
            validate_seconds(timeout)


def carry_out(call: Call) -> None:
    """Settle a call of this process alone, and move or combine its arrays."""
    # imported late: programs without collectives do without NumPy
    from weft._core.arithmetic import combine
    from weft._core.calls import Combination

    plan = call.settle([call.own])
    if isinstance(plan, Combination):
        for source, target, element in zip(call.source, plan.target, plan.elements, strict=True):
            combine([source], target, plan.op, element, plan.weights)
    else:
        _move(call, plan)
    call.finish()


def _move(call: Call, plan: Movement) -> None:
    from weft._core.arrays import as_bytes

    for copy in plan.incoming:
        source = as_bytes(call.source[copy.from_array])
        target = as_bytes(plan.target[copy.to_array])
        part = source[copy.from_byte : copy.from_byte + copy.length]
        target[copy.to_byte : copy.to_byte + copy.length] = part
