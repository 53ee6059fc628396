"""`train_step` over rows that do not split evenly: what one process would have got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import weft
from weft.errors import InvalidValue

torch = pytest.importorskip("torch")


def made() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def squares(model: Any, x: Any, y: Any) -> Any:
    return ((model(x)[:, 0] - y) ** 2).mean()


def alone() -> tuple[Any, Callable[[Any, Any], float]]:
    """The same in one process."""
    model, optimizer = made()

    def step(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        loss = squares(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


def test_the_mean_is_that_of_all_rows_however_they_split() -> None:
    """With 7 rows, and with so few that a rank has none."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 5), torch.randn(7)
    model, optimizer = made()
    reference, reference_step = alone()
    with weft.Team(3) as team:
        step = weft.train_step(squares, model, optimizer, team=team)
        for rows in (7, 5, 2, 1, 7):
            loss = reference_step(x[:rows], y[:rows])
            assert step(x[:rows], y[:rows]) == pytest.approx(loss, rel=1e-5)  # of float32
        assert weft.same(model, team=team)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_no_rows_are_refused() -> None:
    """There is no mean of nothing; nothing has changed."""
    model, optimizer = made()
    with weft.Team(2) as team:
        step = weft.train_step(squares, model, optimizer, team=team)
        with pytest.raises(InvalidValue, match="without rows"):
            step(torch.zeros(0, 5), torch.zeros(0))
        assert weft.same(model, team=team)
    for one, other in zip(model.parameters(), made()[0].parameters(), strict=True):
        assert torch.equal(one, other)
