"""Seed 001: Multiverso's Torch binding, as its Python form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multiverso
from multiverso import torch_ext
from tests.hosts import Hosts
from tests.seeds.test_multiverso import run_in_turn
from weft.errors import InvalidType, InvalidValue

PROGRAMS = ["torch_array", "torch_matrix", "old_xor"]


@pytest.mark.parametrize(("workers", "launcher"), [(1, "python"), (2, "weft run"), (4, "mpirun")])
def test_what_the_binding_says(workers: int, launcher: str, tmp_path: Path) -> None:
    """Each section of the document is part of a program that checks its results."""
    run_in_turn(PROGRAMS, workers, launcher, tmp_path)


def test_over_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    """The same programs, unchanged, on two hosts."""
    run_in_turn(["torch_array", "torch_matrix"], 2, two_hosts, tmp_path)


def test_the_names_of_the_document() -> None:
    """All of them are there, and no others."""
    assert torch_ext.__all__ == [
        "ArrayTableHandler",
        "MatrixTableHandler",
        "barrier",
        "init",
        "num_workers",
        "server_id",
        "shutdown",
        "worker_id",
    ]
    assert all(getattr(torch_ext, name).__doc__ for name in torch_ext.__all__)


def test_new_in_both_spellings() -> None:
    """With and without an initial value, and by name."""
    torch_ext.init([])
    for make in (torch_ext.ArrayTableHandler.new, torch_ext.ArrayTableHandler.New):
        assert make(2).get().tolist() == [0, 0]
        assert make(2, [1, 2]).get().tolist() == [1, 2]
        assert make(size=2, init_value=torch.ones(2)).get().tolist() == [1, 1]
    for make in (torch_ext.MatrixTableHandler.new, torch_ext.MatrixTableHandler.New):
        assert make(1, 2).get().tolist() == [[0, 0]]
        found = make(1, 2, torch.tensor([1.0, 2.0])).get()
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == [[1, 2]]
    assert torch_ext.server_id() == torch_ext.worker_id() == 0


def test_tensors_and_lists_in_tensors_out() -> None:
    """Of any dtype and shape that has as many numbers; what is returned is a copy."""
    torch_ext.init()
    array = torch_ext.ArrayTableHandler(4, init_value=torch.ones(2, 2))
    kinds: list[Any] = [
        torch.ones(4),
        torch.ones(2, 2, dtype=torch.float64),
        torch.ones(4, dtype=torch.int64),
        torch.ones(8)[::2],
        torch.ones(4, requires_grad=True),
        [1, 1, 1, 1],
        np.ones(4),
    ]
    for data in kinds:
        array.add(data)
    found = array.get()
    assert torch.equal(found, torch.full((4,), 1.0 + len(kinds)))
    found.zero_()
    assert array.get().sum() == 4 * (1 + len(kinds))
    destination = torch.zeros(2, 2, dtype=torch.float64)
    destination.copy_(array.get().reshape(2, 2))
    assert destination.dtype == torch.float64

    matrix = torch_ext.MatrixTableHandler(3, 2, init_value=[1, 2, 3, 4, 5, 6])
    matrix.add(torch.ones(6), sync=True)
    matrix.add(torch.ones(1, 2), row_ids=torch.tensor([2], dtype=torch.int32))
    assert matrix.get().tolist() == [[2, 3], [4, 5], [7, 8]]
    assert matrix.get(2).tolist() == [[7, 8]]
    assert torch_ext.ArrayTableHandler(1, dtype=torch.float64).get().dtype == torch.float64


def test_the_python_binding_takes_tensors_too() -> None:
    """Tensors in, NumPy's arrays out, as for all other data."""
    multiverso.init()
    array = multiverso.ArrayTableHandler(4, init_value=torch.ones(4, dtype=torch.float64))
    array.add(torch.ones(2, 2, requires_grad=True))
    array.add(torch.arange(4))
    found = array.get()
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [2, 3, 4, 5]
    matrix = multiverso.MatrixTableHandler(2, 2)
    matrix.add(torch.ones(4))
    matrix.add(torch.ones(1, 2), row_ids=torch.tensor(1))
    assert matrix.get(torch.tensor([1, 0])).tolist() == [[2, 2], [1, 1]]


def test_errors_are_wefts() -> None:
    """Wrong sizes, rows and dtypes, and nothing is added."""
    torch_ext.init()
    array, matrix = torch_ext.ArrayTableHandler(2), torch_ext.MatrixTableHandler(2, 2)
    with pytest.raises(InvalidValue, match=r"\(3,\)"):
        array.add(torch.ones(3))
    with pytest.raises(InvalidType, match="bfloat16"):
        array.add(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(InvalidValue, match="row 2"):
        matrix.get([2])
    with pytest.raises(InvalidType, match="expected whole numbers"):
        matrix.add(torch.ones(2), row_ids=torch.tensor([0.5]))
    with pytest.raises(InvalidValue, match="init_value"):
        torch_ext.ArrayTableHandler(2, init_value=torch.ones(3))
    assert not array.get().any()
    assert not matrix.get().any()
