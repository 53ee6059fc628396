"""JAX's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft
from weft.adapters import jax as adapter
from weft.adapters import lookup
from weft.errors import InvalidType, InvalidValue

DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]


@pytest.fixture
def _wide(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX with 64 bits, if the test's dtype needs them."""
    jax.config.update("jax_enable_x64", request.getfixturevalue("dtype") in WIDE)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize("dtype", DTYPES + WIDE)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_arrays_are_viewed_and_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    """A view is the same memory, read-only; what is delivered is the same array."""
    value = jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    assert lookup.of(value) is adapter
    array, element = adapter.view(value)
    assert (array.shape, element) == (shape, dtype)
    assert array.dtype == ("uint16" if dtype == "bfloat16" else dtype)
    assert adapter.describe(value) == (dtype, array.dtype, shape, "cpu")
    assert not array.flags.writeable
    if array.size:
        assert array.__array_interface__["data"][0] == value.unsafe_buffer_pointer()
    back = adapter.deliver(array, element)
    assert isinstance(back, jax.Array)
    assert back.dtype == value.dtype
    assert back.shape == shape
    assert (back == value).all()


def test_what_is_delivered_is_a_copy() -> None:
    """JAX takes over memory that lies well, and would see it change."""
    room = np.zeros(4096 + 64, np.uint8)
    start = -room.__array_interface__["data"][0] % 64
    for element in ("float32", "bfloat16"):
        array = room[start : start + 4096].view("f4" if element == "float32" else "u2")
        array[...] = 0
        delivered = adapter.deliver(array, element)
        array[...] = 1
        assert not delivered.any()


def test_bits_are_not_lost_in_silence() -> None:
    """Another rank's float64 has no place where JAX has 32 bits; the message says how to get it."""
    with pytest.raises(InvalidType, match=r"float64 would become float32 .*jax_enable_x64"):
        adapter.deliver(np.ones(2), "float64")


def deleted() -> Any:
    array = jnp.ones(2)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: jax.random.key(0), InvalidType, r"pass jax\.random\.key_data\(key\)"),
        (lambda: jnp.zeros(2, jnp.float8_e4m3fn), InvalidType, "float8_e4m3fn has no NumPy form"),
        (lambda: jnp.zeros(2, jnp.int4), InvalidType, "int4 has no NumPy form"),
        (deleted, InvalidValue, "donated or deleted"),
    ],
)
def test_other_arrays_are_refused(make: Any, error: type[Exception], words: str) -> None:
    """What has no numbers that NumPy has, or none any more."""
    with pytest.raises(error, match=words):
        adapter.view(make())


def test_arrays_inside_jit_are_refused() -> None:
    """They have no values yet."""

    def traced(value: Any) -> Any:
        adapter.view(value)
        return value

    with pytest.raises(InvalidType, match="inside jit, grad or vmap has no values"):
        jax.jit(traced)(jnp.ones(1))


class Elsewhere:
    """An array on another device, as far as this adapter asks."""

    dtype = np.dtype("f4")
    shape = (2,)
    is_fully_addressable = True

    def is_deleted(self) -> bool:
        return False

    def devices(self) -> set[Any]:
        return {type("Device", (), {"platform": "gpu", "__str__": lambda self: "cuda:0"})()}


def test_arrays_on_other_hosts_are_refused() -> None:
    """Those on a device are described with it."""
    assert adapter.describe(Elsewhere()) == ("float32", np.dtype("f4"), (2,), "cuda:0")
    scattered = Elsewhere()
    scattered.is_fully_addressable = False
    with pytest.raises(InvalidType, match="lies on several hosts"):
        adapter.view(scattered)


def test_collectives_take_them() -> None:
    """Sums, and what moves, come back as JAX's; results cannot be written to an immutable array."""
    weft.init(engine="serial")
    value = {"w": jnp.arange(3.0), "half": jnp.ones(2, jnp.bfloat16)}
    for result in (weft.all_reduce(value), weft.broadcast(value), weft.all_gather(value)):
        assert jax.tree_util.tree_structure(result) == jax.tree_util.tree_structure(value)
        assert all(isinstance(leaf, jax.Array) for leaf in result.values())
        assert result["half"].dtype == jnp.bfloat16
    with pytest.raises((InvalidType, InvalidValue), match="read-only"):
        weft.all_reduce(jnp.ones(2), out=jnp.zeros(2))


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_tables_take_and_return_them(engine: str) -> None:
    """As deltas and row ids, and as results of a table that was made from one."""
    weft.init(engine=engine)
    start = jnp.arange(6.0).reshape(3, 2)
    table = weft.MatrixTable(start)
    table.add(jnp.ones((3, 2)))
    table.add(jnp.ones((3, 2), "float16"), jnp.array([1, 2, 1]))
    expected = start + 1 + jnp.array([[0], [2], [1]])
    for found, part in (
        (table.get(), expected),
        (table.get(jnp.array([2, 0], "uint8")), expected[jnp.array([2, 0])]),
        (table.get(jnp.array(1)), expected[1]),
        (table.get_async([0]).wait(), expected[:1]),
    ):
        assert isinstance(found, jax.Array)
        assert found.dtype == jnp.float32
        assert jnp.array_equal(found, part)
    with pytest.raises(InvalidValue, match="cannot be written to"):
        table.get(out=jnp.zeros((3, 2)))
    with pytest.raises(InvalidType, match="bfloat16"):
        table.add(jnp.ones((3, 2), "bfloat16"))
    plain = weft.ArrayTable(3, dtype=jnp.int32)
    plain.add(jnp.array([1, 2, 3], "int8"))
    found = plain.get()
    assert type(found) is np.ndarray
    assert (found.dtype, found.tolist()) == (np.dtype("int32"), [1, 2, 3])
    with pytest.raises(InvalidType, match="float32 for a table of int32"):
        plain.add(jnp.ones(3))
    for dtype in (jnp.bfloat16, "bfloat16"):  # which NumPy knows once JAX is there
        with pytest.raises(InvalidType, match="bfloat16"):
            weft.ArrayTable(3, dtype=dtype)
    weft.shutdown()
