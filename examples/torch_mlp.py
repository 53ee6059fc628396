"""A small network on scikit-learn's handwritten digits, each step over all cores.

    python examples/torch_mlp.py

One program, one loop: `step(images, labels)` gets the whole batch, each rank of the team computes
the gradients of its rows, and every copy of the model updates itself. The last batch of each epoch
is a smaller one that does not split evenly. At the end the same loop runs without weft: losses and
parameters must agree to rounding, and all copies must have the same bits.
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import weft

EPOCHS, BATCH, RANKS = 6, 100, 2

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
held_back = torch.arange(len(labels)) % 5 == 0  # nobody is shown every fifth digit


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.003)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mean over rows."""
    return nn.functional.cross_entropy(model(x), y)


def train(step: Callable[[Tensor, Tensor], float]) -> list[float]:
    """The loss of every step."""
    generator = torch.Generator().manual_seed(2)
    shown = torch.nonzero(~held_back).flatten()
    losses = []
    for _ in range(EPOCHS):
        for batch in shown[torch.randperm(len(shown), generator=generator)].split(BATCH):
            losses.append(step(images[batch], labels[batch]))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    model, optimizer = make()
    with weft.Team(RANKS) as team:
        losses = train(weft.train_step(loss, model, optimizer, team=team))
        assert weft.same(model, team=team)

    with torch.no_grad():
        right = (model(images[held_back]).argmax(dim=1) == labels[held_back]).float().mean().item()
    assert right > 0.9, right

    alone, its_optimizer = make()

    def step_alone(x: Tensor, y: Tensor) -> float:
        its_optimizer.zero_grad()
        value = loss(alone, x, y)
        value.backward()
        its_optimizer.step()
        return value.item()

    expected = train(step_alone)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    print(
        f"{RANKS} ranks: {right:.3f} of {int(held_back.sum())} digits are right; "
        f"{len(losses)} steps as in one process, the last loss {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
