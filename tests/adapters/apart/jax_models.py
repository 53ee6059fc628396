"""Pytrees of JAX's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft
from tests.adapters import contract
from tests.adapters.contract import Subject
from weft.adapters import containers, lookup
from weft.errors import InvalidValue


class Layer(NamedTuple):
    w: Any
    b: Any


def layers() -> Any:
    first = Layer(jnp.ones((4, 3)), jnp.zeros(3))
    return weft.Holder({"layers": [first, Layer(jnp.ones((3, 2)), jnp.zeros(2))], "none": None})


def dtypes() -> Any:
    kinds = ["float16", "bfloat16", "float32", "int32", "uint8", "bool", "complex64"]
    tree = {kind: jnp.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    again = jnp.ones(2)
    return weft.Holder((tree, np.ones(3), jnp.array(2.0), jnp.zeros(0), again, [again]))


def alone() -> Any:
    return weft.Holder(jnp.ones(3))


def several() -> Any:
    return {"encoder": layers(), "decoder": [alone()]}


def forwards(tree: Any, x: Any) -> Any:
    for layer in tree["layers"]:
        x = jnp.tanh(x @ layer.w + layer.b)
    return x.sum()


def layers_trainer(model: Any) -> Callable[[], object]:
    gradient = jax.jit(jax.grad(forwards))

    def step() -> None:
        slopes = gradient(model.value, jnp.ones((2, 4)) / 64)
        model.value = jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, model.value, slopes)

    return step


def any_trainer(model: Any) -> Callable[[], object]:
    holders = [holder for _, holder in containers.leaves(model)]

    @jax.jit
    def update(tree: Any) -> Any:
        return jax.tree_util.tree_map(lambda one: (one + 1).astype(one.dtype), tree)

    def step() -> None:
        for holder in holders:
            holder.value = update(holder.value)

    return step


def holders_of(model: Any) -> list[Any]:
    return [holder for _, holder in containers.leaves(model)]


SUBJECTS = {
    "layers": Subject(layers, layers_trainer, holders_of, False),
    "dtypes": Subject(dtypes, any_trainer, holders_of, False),
    "alone": Subject(alone, any_trainer, holders_of, False),
    "several": Subject(several, any_trainer, holders_of, False),
}


@pytest.mark.parametrize("check", contract.CHECKS)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_models_keep_the_contract(subject: Subject, check: Any) -> None:
    """Each pytree in a holder keeps each rule."""
    check(subject)


def test_names_are_paths() -> None:
    """As JAX writes them; what stands alone is the value."""
    adapter = lookup.named("jax")
    names = ["['layers'][0].w", "['layers'][0].b", "['layers'][1].w", "['layers'][1].b"]
    assert adapter.names(layers()) == names
    assert adapter.names(alone()) == ["value"]
    assert adapter.names([alone()]) == ["[0]"]


def test_leaves_stay_what_they_were() -> None:
    """The same tree, dtypes and devices, NumPy's arrays still NumPy's, tied ones still tied."""
    model = dtypes()
    before = model.value
    adapter = lookup.named("jax")
    adapter.write(model, contract.different(adapter.read(model)))
    pairs = zip(*map(jax.tree_util.tree_leaves, (before, model.value)), strict=True)
    for old, new in pairs:
        assert isinstance(new, jax.Array) is isinstance(old, jax.Array)
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert new is not old
        if isinstance(new, jax.Array):
            assert new.sharding == old.sharding
    assert model.value[4] is model.value[5][0]


def test_written_values_are_copies() -> None:
    """JAX takes over memory that lies well, and would see it change."""
    room = np.zeros(4096 + 64, np.uint8)
    start = -room.__array_interface__["data"][0] % 64
    array = room[start : start + 4096].view("f4")
    model = weft.Holder(jnp.ones(1024))
    lookup.named("jax").write(model, [array])
    array[...] = 1
    assert not model.value.any()


def test_donated_arrays_are_refused() -> None:
    """A model whose arrays were given away has no values to read."""
    model = alone()
    model.value.delete()
    with pytest.raises(InvalidValue, match="donated or deleted"):
        lookup.named("jax").read(model)


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones(1),
        [jnp.ones(1)],
        weft.Holder({}),
        weft.Holder({"w": jnp.ones(1), "rate": 0.1}),
        weft.Holder(jax.random.key(0)),
        weft.Holder(np.array(["text"])),
        [alone(), np.ones(1)],
    ],
)
def test_other_values_are_no_models(value: Any) -> None:
    """Immutable arrays without a holder, nothing, numbers and keys of random generators."""
    assert lookup.of_model(value) is None
