"""Models of PyTorch and of NumPy's arrays, and which adapter takes which model."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from tests.adapters import contract
from tests.adapters.contract import Subject
from tests.support import run_python
from weft.adapters import containers, lookup
from weft.errors import InvalidType, InvalidValue


class Tied(nn.Module):
    """One weight at both ends, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        return self.output(self.middle(self.embedding(x)))


class Mixed(nn.Module):
    """Parameters and buffers of many dtypes and shapes."""

    def __init__(self, *dtypes: Any) -> None:
        super().__init__()
        for dtype in dtypes:
            name = "of_" + str(dtype).removeprefix("torch.")
            values = torch.arange(6).reshape(2, 3).to(dtype)
            if dtype.is_floating_point:
                self.register_parameter(name, nn.Parameter(values))
            else:
                self.register_buffer(name, values)
        self.register_buffer("single", torch.tensor(3.0))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


NUMPYS = [torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
NUMPYS += [torch.complex64]


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        return make()

    return made


def mlp() -> Any:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def frozen() -> Any:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def cnn() -> Any:
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 1)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def trainer_on(batch: Any, optimizer: Any = torch.optim.Adam) -> Callable[[Any], Any]:
    """Trains a module on one batch; without a batch, towards zero."""

    def trainer(model: Any) -> Callable[[], object]:
        modules = [model] if isinstance(model, nn.Module) else model
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        steps = optimizer(trained, lr=0.125)

        def step() -> None:
            steps.zero_grad()
            outputs = trained if batch is None else [model(batch)]
            sum((one.double() - 2).square().sum() for one in outputs).backward()
            steps.step()

        return step

    return trainer


def tensors_trainer(model: Any) -> Callable[[], object]:
    optimizer = torch.optim.SGD([tensor for _, tensor in containers.leaves(model)], lr=0.125)

    def step() -> None:
        optimizer.zero_grad()
        sum(tensor.sum() for _, tensor in containers.leaves(model)).backward()
        optimizer.step()

    return step


def module_parts(model: Any) -> list[Any]:
    modules = [model] if isinstance(model, nn.Module) else model
    return [one for module in modules for one in (*module.parameters(), *module.buffers())]


def leaf_parts(model: Any) -> list[Any]:
    return [leaf for _, leaf in containers.leaves(model)]


def arrays_trainer(model: Any) -> Callable[[], object]:
    held = leaf_parts(model)

    def step() -> None:
        for array in {id(array): array for array in held}.values():
            np.add(array, 1, out=array, casting="unsafe")

    return step


def nested_arrays() -> Any:
    pair = namedtuple("pair", "w b")
    again = np.ones(2)
    return {
        "layers": [pair(np.ones((2, 3), "f4"), np.zeros(3, ">f8")), (np.arange(3),)],
        "steps": np.array(4),
        2: again,
        "again": again,
        "strided": np.zeros((4, 4))[::2, 1::2],
        "half": OrderedDict(x=np.ones(1, "f2"), y=np.ones(2, "c8"), z=np.ones(0)),
    }


def leaf_tensors() -> Any:
    return {"w": torch.ones(2, 3, requires_grad=True), "more": [torch.ones(1, requires_grad=True)]}


SUBJECTS = {
    "mlp": Subject(seeded(mlp), trainer_on(torch.ones(5, 4)), module_parts, True),
    "frozen": Subject(seeded(frozen), trainer_on(torch.ones(5, 4)), module_parts, True),
    "cnn": Subject(
        seeded(cnn), trainer_on(torch.arange(50.0).reshape(2, 1, 5, 5) / 50), module_parts, True
    ),
    "tied": Subject(seeded(Tied), trainer_on(torch.tensor([1, 4])), module_parts, True),
    "mixed": Subject(lambda: Mixed(*NUMPYS), trainer_on(None, torch.optim.SGD), module_parts, True),
    "bfloat16": Subject(
        lambda: Mixed(torch.bfloat16, torch.float32, torch.bool),
        trainer_on(None),
        module_parts,
        False,
    ),
    "list of modules": Subject(
        seeded(lambda: [mlp(), nn.BatchNorm1d(2)]), trainer_on(None), module_parts, True
    ),
    "tensors": Subject(leaf_tensors, tensors_trainer, leaf_parts, True),
    "tensor": Subject(lambda: torch.ones(3, requires_grad=True), tensors_trainer, leaf_parts, True),
    "arrays": Subject(nested_arrays, arrays_trainer, leaf_parts, False),
    "array": Subject(lambda: np.ones(3), arrays_trainer, leaf_parts, False),
}


@pytest.mark.parametrize("check", contract.CHECKS)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_models_keep_the_contract(subject: Subject, check: Any) -> None:
    """Each model of PyTorch and of NumPy's arrays keeps each rule."""
    check(subject)


@pytest.mark.parametrize("make", [mlp, cnn, lambda: Mixed(*NUMPYS)])
def test_modules_are_read_as_their_state_dict(make: Callable[[], Any]) -> None:
    """The same names in the same order; buffers that are not persistent are in neither."""
    model = make()
    assert lookup.named("torch").names(model) == list(model.state_dict())


def test_tied_parameters_count_once() -> None:
    """Under the first of their names."""
    names = lookup.named("torch").names(Tied())
    assert names == ["embedding.weight", "middle.weight", "middle.bias"]
    first = nn.Linear(1, 1)
    assert lookup.named("torch").names([first, first]) == ["[0].weight", "[0].bias"]


def test_hooks_of_state_dict_change_nothing() -> None:
    """The live tensors are read and written, not what a hook puts in their place."""
    model = nn.Linear(1, 1)
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.clear())
    adapter = lookup.named("torch")
    adapter.write(model, [np.full((1, 1), 5, "f4"), np.full(1, 6, "f4")])
    assert (model.weight.item(), model.bias.item()) == (5, 6)


def test_torchs_values_are_views_except_of_bfloat16() -> None:
    """Reading costs no copy; bfloat16 is widened, and rounded to the nearest when written."""
    adapter = lookup.named("torch")
    model = nn.Linear(2, 2)
    assert adapter.read(model)[0].__array_interface__["data"][0] == model.weight.data_ptr()
    model.bfloat16()
    (weight, _) = adapter.read(model)
    assert weight.dtype == np.float32
    adapter.write(model, [np.full((2, 2), 1.00390625, "f4"), np.full(2, 3.14159, "f4")])
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    assert model.bias.tolist() == [3.140625, 3.140625]


def test_eight_bit_floats_survive() -> None:
    """They are read as float32, like bfloat16."""
    tensor = torch.tensor([0.5, -448, 2**-9]).to(torch.float8_e4m3fn)
    adapter = lookup.named("torch")
    (array,) = adapter.read(tensor)
    assert array.dtype == np.float32
    adapter.write(tensor, [array[::-1]])
    assert tensor.float().tolist() == [2**-9, -448, 0.5]


def test_modules_without_shapes_are_refused() -> None:
    """A lazy module has to see a batch first; the message says so."""
    with pytest.raises(InvalidValue, match=r"0\.weight has no shape yet: pass a batch"):
        lookup.named("torch").names(nn.Sequential(nn.LazyLinear(3)))


def test_parts_of_one_tensor_do_not_live_elsewhere() -> None:
    """Whoever holds the whole would train something else; so would tensors on other devices."""
    adapter = lookup.named("torch")
    flat = torch.zeros(4)
    parts = [flat[:2], flat[2:]]
    assert adapter.live_in(parts, [np.ones(2, "f4"), np.ones(2, "f4")]) is False
    assert flat.tolist() == [0, 0, 0, 0]
    assert adapter.live_in(torch.empty(2, device="meta"), [np.ones(2, "f4")]) is False
    readonly = np.ones(4, "f4")
    readonly.flags.writeable = False
    assert adapter.live_in(flat, [readonly]) is False


def test_modules_without_memory_are_refused() -> None:
    """Parameters on the meta device have no values to read."""
    with pytest.raises(InvalidType, match="a tensor on meta"):
        lookup.named("torch").read(nn.Linear(1, 1, device="meta"))


def test_readonly_arrays_are_refused() -> None:
    """The message names the one, and nothing is written before it."""
    model = {"a": np.zeros(2), "b": np.zeros(2)}
    model["b"].flags.writeable = False
    adapter = lookup.named("numpy")
    with pytest.raises(InvalidValue, match=r"\['b'\] is a read-only array"):
        adapter.write(model, [np.ones(2), np.ones(2)])
    assert model["a"].tolist() == [0, 0]


def test_names_say_where_a_parameter_stands() -> None:
    """As one would write it; dicts filled in another order agree."""
    adapter = lookup.named("numpy")
    names = ["['a'][0]", "['b']['c']"]
    assert adapter.names({"a": [np.ones(1)], "b": {"c": np.ones(1)}}) == names
    assert adapter.names({"b": {"c": np.ones(1)}, "a": [np.ones(1)]}) == names
    assert adapter.names(np.ones(1)) == ["value"]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (nn.Linear(1, 1), "torch"),
        (nn.Parameter(torch.ones(1)), "torch"),
        ((torch.ones(1), [nn.Linear(1, 1)]), "torch"),
        ({"a": [np.ones(1)]}, "numpy"),
        ([np.ones(1), torch.ones(1)], None),
        ([np.array([None])], None),
        ([np.array(["text"])], None),
        ([np.ones(1), 3.0], None),
        (weft.Holder({"w": np.ones(1)}), "jax"),
        (weft.Holder("text"), None),
        ([], None),
        ({"a": []}, None),
        (CYCLE, None),
        (3, None),
        ("text", None),
        (None, None),
        (nn.Linear, None),
        (object(), None),
    ],
)
def test_each_model_has_its_adapter(value: Any, name: str | None) -> None:
    """What has parameters of one library is its model; mixtures, other values and nothing are none.

    A holder is JAX's, also where its arrays are still NumPy's."""
    found = lookup.of_model(value)
    assert (found and found.NAME) == name


def test_no_framework_is_loaded_to_recognise_a_model() -> None:
    """A library that the program has not imported is not asked."""
    outcome = run_python(
        "import sys, numpy, weft\n"
        "from weft.adapters import lookup\n"
        "print(lookup.of_model([numpy.ones(1)]).NAME, lookup.of_model(object()))\n"
        "print({'torch', 'jax', 'keras', 'pytensor', 'lasagne'} & set(sys.modules))"
    )
    assert outcome.out == "numpy None\nset()\n", outcome
