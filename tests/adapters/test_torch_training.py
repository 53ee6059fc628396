"""The array that a rank's gradients lie in."""

from __future__ import annotations

from typing import Any

import pytest

from weft.engines.serial.group import SerialGroup

torch = pytest.importorskip("torch")

from weft.adapters.torch_training import gradients_for  # noqa: E402  it needs torch


def parameters(*shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[Any]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def step(optimizer: Any, some: list[Any], loss: float = 1.0) -> float:
    """As a step of training does: gradients of ones, a sum over one rank."""
    for one in some:
        one.grad = torch.ones_like(one)
    group = SerialGroup(timeout=10)
    made = gradients_for(optimizer, some, group)
    made.put(loss, some)
    made.sum_in_place(group)
    return made.take(some)


def test_each_step_uses_the_same_array_unless_a_gradient_is_held() -> None:
    """By anybody, and be it a part of one."""
    some = parameters((3, 4), (5,))
    optimizer = torch.optim.SGD(some, lr=0.1)
    places = []
    held: list[Any] = []
    for turn in range(5):
        assert step(optimizer, some, float(turn)) == turn
        places.append(some[0].grad.data_ptr())
        assert some[0].grad.shape == (3, 4)
        assert some[1].grad.tolist() == [1.0] * 5
        if turn == 2:
            held.append(some[1].grad[1:].data)
    assert places[0] == places[1] == places[2]
    assert places[3] != places[2]
    assert places[4] == places[3]


def test_sets_of_parameters_have_arrays_of_their_own() -> None:
    """As where two are trained by turns; of many sets the arrays are given up at some time."""
    some = parameters((2,), (3,), (4,), (5,), (6,))
    optimizer = torch.optim.SGD(some, lr=0.1)
    first = gradients_for(optimizer, some[:1], SerialGroup(timeout=10))
    second = gradients_for(optimizer, some[1:2], SerialGroup(timeout=10))
    assert gradients_for(optimizer, some[:1], SerialGroup(timeout=10)) is first
    assert gradients_for(optimizer, some[1:2], SerialGroup(timeout=10)) is second
    for one in some[2:]:
        gradients_for(optimizer, [one], SerialGroup(timeout=10))
    assert gradients_for(optimizer, some[:1], SerialGroup(timeout=10)) is not first


def test_parameters_without_a_gradient_and_without_numbers() -> None:
    """The one is left alone, the other has as many as before: none."""
    some = parameters((2,), (0,), ())
    optimizer = torch.optim.SGD(some, lr=0.1)
    some[1].grad, some[2].grad = torch.ones(0), torch.ones(())
    made = gradients_for(optimizer, some, SerialGroup(timeout=10))
    made.put(0.5, some)
    assert made.take(some) == 0.5
    assert some[0].grad is None
    assert some[1].grad.shape == (0,)
    assert some[2].grad.item() == 1


def test_complex_parameters() -> None:
    some = parameters((2,), dtype=torch.complex64)
    optimizer = torch.optim.SGD(some, lr=0.1)
    assert step(optimizer, some, 0.25) == 0.25
    assert some[0].grad.tolist() == [1, 1]
