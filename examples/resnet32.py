"""ResNet-32, the network of 464,154 parameters for images of CIFAR's shape, trained by several
processes on GPUs or on the CPU, in both ways that weft has.

    weft run -n 2 examples/resnet32.py           ranks at their own pace, with a `ModelTable`
    python examples/resnet32.py --team 2         one loop, each step split over a `Team`

Each process computes on `weft.device()`: on a GPU of its own where there are enough, else on one
that they share, for which `weft run --mps` is made. The images are generated, and easy: each kind
has a pattern of its own, under noise. At the end the network must tell most of those that it has
not seen, all copies must have the same values, and the program says how many images a second were
trained on. On the CPU there are few, small images; the options ask for more.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import weft

KINDS, RATE = 10, 0.02
UNSEEN = 500
#: steps before the clock starts
WARM = 5


class Block(nn.Module):
    """Two convolutions, and what went in is added to what comes out: every second pixel of it where
    the image becomes smaller, and zeros for new channels."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.stride, self.new = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, :, :: self.stride, :: self.stride]
        if self.new:
            kept = nn.functional.pad(kept, (0, 0, 0, 0, 0, self.new))
        return torch.relu(kept + self.body(x))


def resnet32() -> nn.Module:
    """The network: one convolution, three times five blocks, one linear layer."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for channels, out in ((16, 16), (16, 32), (32, 64)):
        layers.append(Block(channels, out, out // channels))
        layers += [Block(out, out, 1) for _ in range(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, KINDS))


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mean over rows."""
    return nn.functional.cross_entropy(model(x), y)


class Images:
    """Generated images, on a device."""

    def __init__(self, side: int, device: str, seed: int) -> None:
        # the same patterns everywhere, and noise of each rank's own
        patterns = torch.randn(KINDS, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self._patterns = nn.functional.interpolate(patterns, (side, side)).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Images, and of which kind each is."""
        device = self._patterns.device
        y = torch.randint(KINDS, (count,), generator=self._generator, device=device)
        x = self._patterns[y]
        return x + torch.randn(x.shape, generator=self._generator, device=device), y

    def batches(self, steps: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(count) for _ in range(steps))


def main() -> None:
    device = weft.device()
    given = options(on_gpu=device != "cpu")
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    if given.team:
        train_in_team(given, device)
    else:
        train_with_table(given, device)


def options(*, on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet-32, trained by several processes.")
    parser.add_argument("--team", type=int, default=0, help="train with a Team of so many ranks")
    parser.add_argument("--mps", action="store_true", help="in which they use one GPU at once")
    parser.add_argument("--steps", type=int, default=300 if on_gpu else 40, help="of training")
    parser.add_argument("--batch", type=int, default=1024 if on_gpu else 32, help="of all ranks")
    parser.add_argument("--side", type=int, default=32 if on_gpu else 8, help="pixels of an image")
    return parser.parse_args()


def train_with_table(given: argparse.Namespace, device: str) -> None:
    """Each rank trains on a share of each batch, adds what it has learned, and takes the rest."""
    group = weft.init()
    images = Images(given.side, device, seed=1 + group.rank)
    model = resnet32().to(device)
    table = weft.ModelTable(model)
    optimizer = optimizer_of(model, RATE / group.size)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        table.sync()

    trained = images_per_second(step, images, given.steps, max(2, given.batch // group.size))
    total = group.all_reduce(trained)
    group.barrier()
    table.sync()  # nobody adds any more
    right = share_right(model, images)
    if weft.is_master():
        report(group.size, "ModelTable", total, right)
    low, high = (group.all_reduce([*model.state_dict().values()], op) for op in ("min", "max"))
    assert all(torch.equal(*pair) for pair in zip(low, high, strict=True))
    weft.shutdown()


def train_in_team(given: argparse.Namespace, device: str) -> None:
    """The driver trains, and each rank of a team computes its share of each step."""
    with weft.Team(given.team, mps=given.mps) as team:
        images, model = Images(given.side, device, seed=1), resnet32().to(device)
        # each rank's batch normalisation is to look at its own rows, which is no mistake here
        warnings.filterwarnings("ignore", "the Sequential has batch normalisation")
        step = weft.train_step(loss, model, optimizer_of(model, RATE), team=team)
        trained = images_per_second(step, images, given.steps, given.batch)
        assert weft.same(model, team=team)
        report(team.size, "train_step", trained, share_right(model, images))


def images_per_second(
    step: Callable[[Tensor, Tensor], Any], images: Images, steps: int, count: int
) -> float:
    """Train, and return how many images a second, without the first steps, which prepare much."""
    for x, y in images.batches(WARM, count):
        step(x, y)
    began = finished()
    for x, y in images.batches(steps - WARM, count):
        step(x, y)
    return (steps - WARM) * count / (finished() - began)


def finished() -> float:
    """The time when the device has done what it was given."""
    if weft.device() != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def share_right(model: nn.Module, images: Images) -> float:
    """The share of images that were no part of the training and of which the kind is told."""
    x, y = images.batch(UNSEEN)
    with torch.no_grad():
        right = (model.eval()(x).argmax(dim=1) == y).float().mean().item()
    assert right > 0.8, right
    return right


def report(ranks: int, way: str, trained: float, right: float) -> None:
    print(
        f"{way}, {ranks} rank{'s' * (ranks > 1)}: {trained:,.0f} images a second; "
        f"{right:.2f} of {UNSEEN} new ones are told"
    )


if __name__ == "__main__":
    main()
