"""A small residual network on generated images, each step over all cores.

    python examples/torch_resnet.py

The images show a bar, a square or a ring somewhere in noise. The normalisation is by groups of
channels, which looks at one image at a time: batch normalisation looks at the whole batch, of which
each rank has only its rows. At the end the same loop runs without weft: losses and parameters must
agree to rounding, and all copies must have the same bits. Numbers are double: Adam divides by small
gradients and makes much of the last digits of single ones.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import weft

STEPS, BATCH, SIZE, KINDS, RANKS = 50, 63, 16, 3, 2


class Block(nn.Module):
    """Two convolutions, and what went in is added to what comes out."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(4, out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.GroupNorm(4, out),
        )
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        Block(8, 8, 1),
        Block(8, 16, 2),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, KINDS),
    ).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.003)


def generated(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images, and what each shows."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(KINDS, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    corners = torch.randint(SIZE - 6, (count, 2), generator=generator).tolist()
    for image, label, (top, left) in zip(images[:, 0], labels.tolist(), corners, strict=True):
        window = image[top : top + 6, left : left + 6]
        window[2:4] += float(label == 0)
        window += float(label > 0)
        window[1:5, 1:5] -= float(label == 2)
    return images.double(), labels


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mean over rows."""
    return nn.functional.cross_entropy(model(x), y)


def train(step: Callable[[Tensor, Tensor], float]) -> list[float]:
    """The loss of every step."""
    return [step(*generated(BATCH, seed)) for seed in range(STEPS)]


def main() -> None:
    torch.set_num_threads(1)
    model, optimizer = make()
    with weft.Team(RANKS) as team:
        losses = train(weft.train_step(loss, model, optimizer, team=team))
        assert weft.same(model, team=team)

    images, labels = generated(300, seed=STEPS)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean().item()
    assert right > 0.9, right

    alone, its_optimizer = make()

    def step_alone(x: Tensor, y: Tensor) -> float:
        its_optimizer.zero_grad()
        value = loss(alone, x, y)
        value.backward()
        its_optimizer.step()
        return value.item()

    expected = train(step_alone)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-8)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)
    print(
        f"{RANKS} ranks: {right:.3f} of {len(labels)} shapes are right; "
        f"{STEPS} steps as in one process, the last loss {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
