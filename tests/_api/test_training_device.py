"""`train_step` of models on a device, and its options: what the single process gets, to rounding.

The same program runs on the CPU and, where there is one, on a GPU that the ranks share.
"""

from __future__ import annotations

import pytest

from tests.support import launch

TRAINING = """
import copy, sys, warnings
import numpy as np
import torch, weft
from torch.nn import functional as F

torch.set_num_threads(1)
device, ranks, kinds = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


class Net(torch.nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.norm = torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity()
        self.second = torch.nn.Linear(16, 3)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def mixed(dtype):
    def loss(model, x, y):
        with torch.autocast(x.device.type, dtype=dtype):
            return F.cross_entropy(model(x).float(), y)
    return loss


def compiled(model, x, y):
    call = getattr(compiled, "call", None)
    if call is None:
        backend = "eager" if device == "cpu" else "inductor"
        call = compiled.call = torch.compile(model, backend=backend)
    return F.cross_entropy(call(x), y)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


CASES = {
    "sgd": (loss, sgd, {}),
    "adam": (loss, adam, {}),
    "bfloat16": (mixed(torch.bfloat16), sgd, {}),
    "float16": (mixed(torch.float16), sgd, {"scaler": 1024.0}),
    "scaled and clipped": (mixed(torch.float16), sgd, {"scaler": 1024.0, "clip": 0.05}),
    "clip": (loss, sgd, {"clip": 0.05}),
    "accumulate": (loss, adam, {"accumulate": 3}),
    "batchnorm": (loss, sgd, {"sync_batchnorm": True}),
    "compiled": (compiled, sgd, {}),
    "schedule": (loss, sgd, {}),
    "half parameters": (loss, sgd, {}),
}


def one_process(model, optimizer, loss, x, y, scaler=None, clip=None, **_):
    optimizer.zero_grad()
    value = loss(model, x, y)
    (value if scaler is None else scaler.scale(value)).backward()
    if clip is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return value.item()


torch.manual_seed(0)
x = torch.randn(5, 26, 6).to(device)
y = torch.randint(0, 3, (5, 26)).to(device)
with weft.Team(ranks, timeout=100) as team:
    for kind in kinds or CASES:
        loss_of, optimizer_of, options = CASES[kind]
        options = dict(options)
        model = Net(norm=kind == "batchnorm").to(device)
        if kind == "half parameters":
            model = model.bfloat16()
            x_of = lambda i: x[i].bfloat16()
        else:
            x_of = lambda i: x[i]
        reference = copy.deepcopy(model)
        own = dict(options)
        if "scaler" in options:
            options["scaler"] = torch.amp.GradScaler(device, init_scale=options["scaler"])
            own["scaler"] = torch.amp.GradScaler(device, init_scale=own["scaler"])
        optimizer, other = optimizer_of(model), optimizer_of(reference)
        step = weft.train_step(loss_of, model, optimizer, team=team, check=None, **options)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.1) for o in (optimizer, other)]
        rounded = "bfloat16", "float16", "scaled and clipped", "half parameters"
        close = 0.03 if kind in rounded else 1e-4
        for turn in range(5):
            if kind == "compiled" and turn == 0:
                compiled.call = None
            found = step(x_of(turn), y[turn])
            if kind == "compiled":
                compiled.call = torch.compile(reference, backend="eager")
            expected = one_process(reference, other, loss_of, x_of(turn), y[turn], **own)
            if kind == "compiled":
                compiled.call = None
            assert abs(found - expected) < close, (kind, turn, found, expected)
            if kind == "schedule":
                for scheduler in schedulers:
                    scheduler.step()
            if turn == 2:  # a change by the user, on the device
                for both in model, reference:
                    with torch.no_grad():
                        both.first.weight.mul_(0.5)
        for name, tensor in model.state_dict().items():
            theirs = reference.state_dict()[name]
            assert tensor.device.type == torch.device(device).type
            assert torch.allclose(tensor.float(), theirs.float(), atol=close, rtol=0), (kind, name)
        if "scaler" in options:
            assert options["scaler"].get_scale() == own["scaler"].get_scale()
        print("trained", kind)
"""

QUICK = ("sgd", "half parameters", "scaled and clipped", "accumulate", "batchnorm", "compiled")


def test_options() -> None:
    outcome = launch(TRAINING, 1, "cpu", "2", *QUICK)
    assert outcome.code == 0, outcome
    assert outcome.out.count("trained") == len(QUICK), outcome


@pytest.mark.soak
def test_all_options() -> None:
    outcome = launch(TRAINING, 1, "cpu", "3")
    assert outcome.code == 0, outcome
    assert outcome.out.count("trained") == 11, outcome


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_a_gpu(ranks: int) -> None:
    outcome = launch(TRAINING, 1, "cuda", str(ranks))
    assert outcome.code == 0, outcome
    assert outcome.out.count("trained") == 11, outcome
