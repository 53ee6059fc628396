"""JAX arrays on a GPU: in collectives they stay there, elsewhere they go through the host."""

from __future__ import annotations

import pytest

from tests.support import launch

PROGRAM = """
import jax.numpy as jnp
import numpy as np
import torch, weft

group = weft.init()


def on_gpu(array):
    return next(iter(array.devices())).platform == "gpu"


for size in 1000, 1_000_000:
    x = jnp.arange(float(size)) + group.rank
    assert on_gpu(x)
    total = weft.all_reduce(x)
    assert type(total) is type(x) and on_gpu(total)
    assert np.array_equal(total, np.arange(float(size)) * group.size + sum(range(group.size)))
    both = weft.all_reduce({"jax": x, "torch": torch.full((3,), 2.0, device="cuda")})
    assert np.array_equal(both["jax"], total) and both["torch"].tolist() == [2.0 * group.size] * 3
    got = weft.broadcast(x if group.is_master else None)
    assert on_gpu(got) and np.array_equal(got, np.arange(float(size)))
    rows = weft.all_gather(x[: 2 + group.rank])
    assert on_gpu(rows) and len(rows) == sum(2 + rank for rank in range(group.size))
half = weft.all_reduce(jnp.ones(7, jnp.bfloat16))
assert half.dtype == jnp.bfloat16 and half.tolist() == [group.size] * 7
print("done")
"""


@pytest.mark.gpu
def test_collectives_of_arrays_on_a_gpu() -> None:
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    outcome = launch(PROGRAM, 2, env=env)
    assert outcome.code == 0, outcome
    assert outcome.out.count("done") == 2, outcome
