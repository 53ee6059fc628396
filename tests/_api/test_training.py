"""`train_step`: what the single process would have got, to rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft

torch = pytest.importorskip("torch")

#: the teams are for all tests: a worker loads torch in two seconds
SHARES = True

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.01
    ),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair() -> Iterator[weft.Team]:
    with weft.Team(2, timeout=60.0) as made:
        yield made


@pytest.fixture(scope="module")
def trio() -> Iterator[weft.Team]:
    with weft.Team(3, timeout=60.0) as made:
        yield made


class Net(torch.nn.Module):
    """Two layers, one that may be frozen, and a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 1)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


def loss(model: Any, x: Any, y: Any) -> Any:
    return ((model(x).squeeze(-1) - y) ** 2).mean()


def batches(steps: int) -> Iterator[tuple[Any, Any]]:
    """Of 1 to 11 rows: fewer than ranks, and uneven."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(1 + step % 11, 5, generator=generator)
        yield x, x.sum(1)


def alone(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    value = loss(model, x, y)
    value.backward()
    optimizer.step()
    return float(value.detach())


def test_fifty_steps(trio: weft.Team) -> None:
    """Losses and parameters are those of one process, for every optimizer, uneven batches, a
    schedule of learning rates, and a layer that is frozen on the way; all copies are the same."""
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        ours, theirs = Net(), Net()
        theirs.load_state_dict(ours.state_dict())
        optimizers = make(ours.parameters()), make(theirs.parameters())
        schedules = [torch.optim.lr_scheduler.StepLR(one, 20, 0.5) for one in optimizers]
        step = weft.train_step(loss, ours, optimizers[0], team=trio)
        for number, (x, y) in enumerate(batches(50)):
            if number == 40:
                ours.first.requires_grad_(False)
                theirs.first.requires_grad_(False)
            expected = alone(theirs, optimizers[1], x, y)
            assert step(x, y) == pytest.approx(expected, rel=1e-4, abs=1e-6), (name, number)
            for schedule in schedules:
                schedule.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), name
        assert weft.same(ours, team=trio), name


@pytest.mark.filterwarnings("ignore:.*batch normalisation")
def test_averages_of_batch_normalisation(pair: weft.Team) -> None:
    """Copies stay the same, and the running mean is that of all rows; eval() holds everywhere."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    other = copy.deepcopy(model)
    step = weft.train_step(loss, model, torch.optim.SGD(model.parameters(), lr=0.1), team=pair)
    x = torch.randn(7, 5) + 3
    step(x, x.sum(1))
    other(x)
    assert torch.allclose(model[0].running_mean, other[0].running_mean, atol=1e-6)
    assert weft.same(model, team=pair)
    model.eval()
    before = model[0].running_mean.clone()
    step(x, x.sum(1))
    assert torch.equal(before, model[0].running_mean)
    assert weft.same(model, team=pair)


def test_after_a_step_that_failed() -> None:
    """The next one begins with the driver's values and optimizer in all ranks, though some had gone
    on; after a loss, restart does the same."""

    def fragile(model: Any, x: Any, y: Any) -> Any:
        if float(x[-1, 0]) > 100:
            raise ArithmeticError("too large")
        return loss(model, x, y)

    with weft.Team(2, timeout=20.0) as team:
        torch.manual_seed(0)
        model = Net()
        other = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        alone_with = torch.optim.Adam(other.parameters(), lr=0.01)
        step = weft.train_step(fragile, model, optimizer, team=team)
        x, y = next(iter(batches(1)))
        x, y = torch.cat([x, x + 1, x + 2]), torch.cat([y, y, y])
        wrong = x.clone()
        wrong[-1] = 1000
        for _ in range(3):
            assert step(x, y) == pytest.approx(alone(other, alone_with, x, y), rel=1e-5)
            with pytest.raises(ArithmeticError, match="too large"):
                step(wrong, y)
        team.restart()
        assert step(x, y) == pytest.approx(alone(other, alone_with, x, y), rel=1e-5)
        assert weft.same(model, team=team)


def test_arrays_of_numpy_and_shared_ones(pair: weft.Team) -> None:
    """A batch may be anything with rows that the loss can use."""
    model = torch.nn.Linear(3, 1)

    def of_arrays(model: Any, x: Any, y: Any) -> Any:
        return loss(model, torch.tensor(np.asarray(x)), torch.tensor(np.asarray(y)))

    step = weft.train_step(of_arrays, model, torch.optim.SGD(model.parameters(), lr=0.1), team=pair)
    x = np.ones((5, 3), np.float32)
    expected = of_arrays(model, x, x[:, 0]).item()
    assert step(weft.share(x), x[:, 0]) == pytest.approx(expected, rel=1e-5)


def test_what_bad_input_gets() -> None:
    """Typed errors that name the argument and the expectation."""
    with weft.Team(1) as team:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(weft.InvalidType, match="a SGD and a Linear; expected a torch"):
            weft.train_step(loss, optimizer, model, team=team)
        step = weft.train_step(loss, model, optimizer, team=team)
        with pytest.raises(weft.InvalidValue, match="argument 0 has 2, argument 1 has 3"):
            step(torch.ones(2, 3), torch.ones(3))
        for nothing in ((), (torch.ones(0, 3), torch.ones(0))):
            with pytest.raises(weft.InvalidValue, match="without rows"):
                step(*nothing)


# what the program changes between two steps


def touch(model: Any, optimizer: Any, how: str, saved: Any, number: int) -> None:
    """What people do between two steps."""
    if how == "clamped":
        with torch.no_grad():
            model.first.weight.clamp_(-0.1, 0.1)
    elif how == "loaded" and number == 3:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    elif how == "the optimizer's state" and number == 3:
        optimizer.load_state_dict(saved[1])
    elif how == "replaced" and number == 3:
        model.first.weight.data = torch.ones_like(model.first.weight)


@pytest.mark.parametrize(
    "how", ["before the first", "clamped", "loaded", "the optimizer's state", "replaced"]
)
def test_values_that_the_program_changes(pair: weft.Team, how: str) -> None:
    """Every rank goes on with them, as the single process does."""
    given = list(batches(6))
    found = []
    for distributed in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step: Any = alone_on(model, optimizer)
        if distributed:
            step = weft.train_step(loss, model, optimizer, team=pair)
        if how == "before the first":
            with torch.no_grad():
                model.first.weight.mul_(2)
        values = []
        for number, (x, y) in enumerate(given):
            values.append(step(x, y))
            touch(model, optimizer, how, saved, number)
        found.append(values)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def alone_on(model: Any, optimizer: Any) -> Any:
    return lambda x, y: alone(model, optimizer, x, y)


def test_what_a_loss_mentions_may_change(pair: weft.Team) -> None:
    """A weight in the loss is everywhere what it is in the driver."""
    x, y = next(batches(1))
    x, y = x.repeat(8, 1), y.repeat(8)
    model = Net()
    weight = 1.0
    step = weft.train_step(
        lambda model, x, y: weight * loss(model, x, y),
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        team=pair,
    )
    first = step(x, y)
    weight = 3.0
    assert step(x, y) == pytest.approx(3 * first)


def test_a_loss_that_cannot_be(pair: weft.Team) -> None:
    """How it is called, and what it must return, is said; an optimizer of another model too."""
    x, y = next(batches(1))
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(weft.InvalidType, match=r"called as loss\(model, input 0, input 1\)"):
        weft.train_step(lambda x, y: x, model, optimizer, team=pair)(x, y)
    for returned, words in (
        (lambda model, x, y: (loss(model, x, y), x), "returned a tuple; expected a tensor"),
        (lambda model, x, y: 1.0, "returned a float; expected a tensor of one number"),
        (lambda model, x, y: model(x)[:, 0].repeat(2), "of shape"),
    ):
        with pytest.raises(weft.InvalidType, match=words):
            weft.train_step(returned, model, optimizer, team=pair)(x, y)
    with pytest.raises(weft.InvalidValue, match="none of the Net's parameters"):
        weft.train_step(loss, other, optimizer, team=pair)


class Clipping(torch.optim.SGD):  # type: ignore[misc]  # torch is not looked at
    """Clips the gradients of the whole batch before each step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.01)
        return super().step(closure)


def test_gradients_are_clipped_by_the_optimizer(pair: weft.Team) -> None:
    """Its own step has the sum of all ranks' gradients; a hook would be called in the driver only,
    and is refused."""
    given = list(batches(4))
    found = []
    for distributed in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = Clipping(model.parameters(), lr=1.0)
        step: Any = alone_on(model, optimizer)
        if distributed:
            step = weft.train_step(loss, model, optimizer, team=pair)
        found.append([step(x, y) for x, y in given])
        assert not distributed or weft.same(model, team=pair)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(weft.InvalidValue, match="the Clipping has hooks"):
        step(*given[0])


def _dot(model: Any, x: Any) -> Any:
    """Its gradient is a third of the sum of the rows, so that of three ranks one row each."""
    return (model.weight.float() * x).sum() / len(x)


def test_gradients_of_half_precision_are_added_up_in_a_wider_type(trio: weft.Team) -> None:
    """In bfloat16, 256 and 1 are 256, however often."""
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    step = weft.train_step(_dot, model, torch.optim.SGD(model.parameters(), lr=0.1), team=trio)
    step(3 * torch.tensor([[256.0], [1.0], [1.0]]))
    assert weft.same(model, team=trio)
    assert model.weight.grad.dtype is torch.bfloat16
    assert model.weight.grad.item() == 258


def test_gradients_that_are_not_dense_are_refused(pair: weft.Team) -> None:
    """By an error that says what to do, and the team can be used again."""
    sparse = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    dense = torch.nn.Embedding(10, 3)

    def mean(model: Any, rows: Any) -> Any:
        return model(rows).mean()

    with pytest.raises(weft.InvalidType, match=r"\(10, 3\).*sparse=False"):
        weft.train_step(mean, sparse, optimizer, team=pair)(torch.arange(4))
    step = weft.train_step(mean, dense, torch.optim.SGD(dense.parameters(), lr=0.1), team=pair)
    expected = mean(dense, torch.arange(4)).item()
    assert step(torch.arange(4)) == pytest.approx(expected, rel=1e-4)


def test_parameters_may_be_thawed_between_two_steps(pair: weft.Team) -> None:
    """The gradients' place is made anew when there are more of them, or fewer."""
    torch.manual_seed(3)
    model = Net()
    single = copy.deepcopy(model)
    optimizers = [OPTIMIZERS["momentum"](one.parameters()) for one in (model, single)]
    step = weft.train_step(loss, model, optimizers[0], team=pair)
    for number, (x, y) in enumerate(batches(6)):
        for one in (model, single):
            one.first.requires_grad_(number % 3 != 1)
        assert step(x, y) == pytest.approx(alone(single, optimizers[1], x, y), rel=1e-4)
    assert weft.same(model, team=pair)
    for own, other in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(own, other)
    assert model.unused.grad is None


class KeepsGradients(torch.optim.Optimizer):
    """Steps by the mean of this gradient and the last, which it simply holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    last = self.state[one].get("last", one.grad)
                    one.sub_((one.grad + last) / 2, alpha=group["lr"])
                    self.state[one]["last"] = one.grad


def test_a_gradient_that_somebody_holds_stays_as_it_is(pair: weft.Team) -> None:
    """The optimizer, or the program: the next step's gradients are elsewhere."""
    torch.manual_seed(4)
    model = Net()
    single = copy.deepcopy(model)
    optimizers = [KeepsGradients(one.parameters()) for one in (model, single)]
    held, copies = [], []
    step = weft.train_step(loss, model, optimizers[0], team=pair)
    for x, y in batches(6):
        step(x, y)
        alone(single, optimizers[1], x, y)
        held.append(model.first.weight.grad[2:])
        copies.append(held[-1].clone())
    for one, other in zip(held, copies, strict=True):
        assert torch.equal(one, other)
    for own, other in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def _mean_square(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_lie_as_their_parameters_do(pair: weft.Team, fused: bool) -> None:
    """Fused optimizers go through both as they lie."""
    torch.manual_seed(5)
    model = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    single = copy.deepcopy(model)
    optimizers = [
        torch.optim.AdamW(one.parameters(), lr=0.01, fused=fused) for one in (model, single)
    ]
    step = weft.train_step(_mean_square, model, optimizers[0], team=pair)
    for _ in range(3):
        x = torch.randn(5, 4, 6, 6)
        step(x)
        optimizers[1].zero_grad()
        _mean_square(single, x).backward()
        optimizers[1].step()
    assert model.weight.grad.stride() == model.weight.stride()
    torch.testing.assert_close(model.weight, single.weight)
