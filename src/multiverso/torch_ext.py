"""Multiverso's binding for Torch: the same names, with handlers that return tensors.

    import torch
    from multiverso import torch_ext as mv

    mv.init()
    table = mv.ArrayTableHandler(model_size)
    table.add(gradients)
    parameters.copy_(table.get())
    mv.shutdown()

Data may be tensors of any device, or lists. What `get` returns is on the CPU; as in Torch,
`tensor.copy_` takes it to where it belongs.
"""

from __future__ import annotations

from typing import Any

import multiverso
from multiverso import barrier, init, num_workers, server_id, shutdown, worker_id
from multiverso._packages import need
from weft._core.arguments import explain_keywords

__all__ = [
    "ArrayTableHandler",
    "MatrixTableHandler",
    "barrier",
    "init",
    "num_workers",
    "server_id",
    "shutdown",
    "worker_id",
]


class ArrayTableHandler(multiverso.ArrayTableHandler):
    """`size` numbers that all workers read, as a tensor, and add to."""

    @explain_keywords
    def __init__(self, size: int, init_value: Any = None, *, dtype: Any = "float32") -> None:
        self._torch = need("torch", "multiverso.torch_ext")
        super().__init__(size, _near(init_value), dtype=dtype)

    @classmethod
    @explain_keywords
    def new(cls, size: int, init_value: Any = None) -> ArrayTableHandler:
        """Make a handler, as Lua spelled it: `new` or `New`."""
        return cls(size, init_value)

    New = new

    @explain_keywords
    def get(self) -> Any:
        """Return a copy of the latest values: a tensor of one dimension."""
        return self._torch.from_numpy(super().get())

    @explain_keywords
    def add(self, data: Any, sync: bool = False) -> None:
        super().add(_near(data), sync)


class MatrixTableHandler(multiverso.MatrixTableHandler):
    """Rows that workers read, as a tensor, and add to: all or some."""

    @explain_keywords
    def __init__(
        self, num_row: int, num_col: int, init_value: Any = None, *, dtype: Any = "float32"
    ) -> None:
        self._torch = need("torch", "multiverso.torch_ext")
        super().__init__(num_row, num_col, _near(init_value), dtype=dtype)

    @classmethod
    @explain_keywords
    def new(cls, num_row: int, num_col: int, init_value: Any = None) -> MatrixTableHandler:
        """Make a handler, as Lua spelled it: `new` or `New`."""
        return cls(num_row, num_col, init_value)

    New = new

    @explain_keywords
    def get(self, row_ids: Any = None) -> Any:
        """Return a copy of all rows, or of these: a tensor of two dimensions."""
        return self._torch.from_numpy(super().get(_near(row_ids)))

    @explain_keywords
    def add(self, data: Any = None, row_ids: Any = None, sync: bool = False) -> None:
        super().add(_near(data), _near(row_ids), sync)


def _near(value: Any) -> Any:
    """Return the same numbers on the CPU."""
    return value.cpu() if hasattr(value, "cpu") else value
