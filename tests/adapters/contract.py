"""What every adapter of models keeps.

To check a new one, describe some of its models as subjects, and run all checks on each:

    @pytest.mark.parametrize("check", contract.CHECKS)
    @pytest.mark.parametrize("subject", [Subject(make, trainer, parts, lives=False)])
    def test_models(subject, check):
        check(subject)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.adapters import lookup
from weft.errors import InvalidValue


@dataclass(frozen=True)
class Subject:
    """A kind of model, and what users do with one."""

    #: makes the same model, with the same values, at each call
    make: Callable[[], Any]
    #: prepares training, with an optimizer that holds on to the parameters; what it returns makes
    #: one step, which changes some parameter
    trainer: Callable[[Any], Callable[[], object]]
    #: the objects of a model that users and optimizers hold
    parts: Callable[[Any], list[Any]]
    #: whether it can live in other memory
    lives: bool


def check_names(subject: Subject) -> None:
    """Names are unique, do not change, and are the same for a model made alike, as ranks do."""
    model = subject.make()
    adapter = adapter_of(model)
    names = adapter.names(model)
    assert names
    assert all(isinstance(name, str) and name for name in names)
    assert len(set(names)) == len(names)
    assert adapter.names(model) == names
    assert adapter.names(subject.make()) == names
    assert len(adapter.read(model)) == len(names)


def check_read(subject: Subject) -> None:
    """Arrays of numbers that NumPy has; the same ones each time, for reading changes nothing."""
    model = subject.make()
    adapter = adapter_of(model)
    first = copies(adapter.read(model))
    assert all(type(array) is np.ndarray and array.dtype.kind in "biufc" for array in first)
    assert_same(adapter.read(model), first)


def check_write(subject: Subject) -> None:
    """What is written is read back, in bits and dtypes; it is copied, and other models differ."""
    model, other = subject.make(), subject.make()
    adapter = adapter_of(model)
    untouched = copies(adapter.read(other))
    values = different(adapter.read(model))
    given = [well_laid(array) for array in values]
    assert adapter.write(model, given) is None
    assert_same(adapter.read(model), values)
    for array in given:
        array[...] = 0
    assert_same(adapter.read(model), values)
    assert_same(adapter.read(other), untouched)


def check_write_takes_any_memory(subject: Subject) -> None:
    """Arrays to be written may be read-only, strided, or the model's own."""
    model = subject.make()
    adapter = adapter_of(model)
    values = different(adapter.read(model))
    readonly = copies(values)
    for array in readonly:
        array.flags.writeable = False
    adapter.write(model, readonly)
    assert_same(adapter.read(model), values)
    again = different(values)
    adapter.write(model, [strided(array) for array in again])
    assert_same(adapter.read(model), again)
    adapter.write(model, adapter.read(model))
    assert_same(adapter.read(model), again)


def check_misfits_are_refused(subject: Subject) -> None:
    """Too few arrays, another shape or dtype: an error that says which, and nothing is written."""
    model = subject.make()
    adapter = adapter_of(model)
    values = copies(adapter.read(model))
    last = adapter.names(model)[-1]
    rest, final = different(values[:-1]), values[-1]
    longer = np.zeros((*final.shape, 1), final.dtype)
    coarser = final.astype(np.complex64 if final.dtype == np.int8 else np.int8)
    for call in (adapter.write, adapter.live_in):
        if call is adapter.live_in and not subject.lives:
            continue
        with pytest.raises(InvalidValue, match=r"arrays for \d+ parameters"):
            call(model, rest)
        for misfit in (longer, coarser):
            with pytest.raises(InvalidValue) as caught:
                call(model, [*rest, misfit])
            assert f"for {last}, which is {final.dtype}{list(final.shape)}" in str(caught.value)
    assert_same(adapter.read(model), values)


def check_identities(subject: Subject) -> None:
    """The objects that users hold are still the model's after it was written, and as they were."""
    model = subject.make()
    adapter = adapter_of(model)
    before = subject.parts(model)
    kinds = [described(part) for part in before]
    adapter.write(model, different(adapter.read(model)))
    assert_same_objects(subject.parts(model), before)
    assert [described(part) for part in before] == kinds
    assert adapter.live_in(model, copies(adapter.read(model))) is subject.lives
    assert_same_objects(subject.parts(model), before)
    assert [described(part) for part in before] == kinds


def check_training_goes_on(subject: Subject) -> None:
    """An optimizer made before the model was written still trains it, from the values written."""
    model, twin = subject.make(), subject.make()
    adapter = adapter_of(model)
    step, twin_step = subject.trainer(model), subject.trainer(twin)
    step()
    twin_step()
    values = different(adapter.read(model))
    adapter.write(model, values)
    adapter.write(twin, values)
    step()
    assert not all_same(adapter.read(model), values)
    twin_step()
    assert_same(adapter.read(model), adapter.read(twin))


def check_live_in(subject: Subject) -> None:
    """Model and arrays are one memory from then on, or `live_in` is False and did nothing."""
    model = subject.make()
    adapter = adapter_of(model)
    step = subject.trainer(model)
    step()
    values = copies(adapter.read(model))
    arrays = copies(values)
    assert adapter.live_in(model, arrays) is subject.lives
    assert_same(adapter.read(model), values)
    changed = different(values)
    overwrite(arrays, changed)
    assert_same(adapter.read(model), changed if subject.lives else values)
    step()
    assert all_same(adapter.read(model), arrays) is subject.lives
    assert all_same(arrays, changed) is not subject.lives
    values = different(adapter.read(model))
    adapter.write(model, values)
    assert_same(arrays, values if subject.lives else changed)


CHECKS = [
    check_names,
    check_read,
    check_write,
    check_write_takes_any_memory,
    check_misfits_are_refused,
    check_identities,
    check_training_goes_on,
    check_live_in,
]


def adapter_of(model: Any) -> ModuleType:
    found = lookup.of_model(model)
    assert found is not None, model
    assert found.is_model(model)
    return found


def copies(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    return [array.copy() for array in arrays]


def different(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Other values of the same dtypes, small enough to train on, and exact even in 8 bits."""
    changed = []
    for index, array in enumerate(arrays):
        if array.dtype == bool:
            changed.append(np.logical_not(array, out=np.empty_like(array)))
            continue
        unit = 16 if array.dtype.kind in "fc" else 1
        count = (np.arange(array.size).reshape(array.shape) + index) % 7 + 1
        values = np.where(array == count / unit, count / unit + 1, count / unit)
        changed.append(values.astype(array.dtype))
    return changed


def well_laid(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that begins where a cache line does: JAX takes over such memory if it is let."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.__array_interface__["data"][0] % 64
    laid = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    laid[...] = array
    return laid


def strided(array: NDArray[Any]) -> NDArray[Any]:
    """The same values, with gaps between them."""
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


def overwrite(arrays: list[NDArray[Any]], values: list[NDArray[Any]]) -> None:
    for array, value in zip(arrays, values, strict=True):
        array[...] = value


def described(part: Any) -> tuple[Any, ...]:
    """What of a parameter is to stay, besides the object."""
    marks = ("dtype", "device", "requires_grad", "shape", "trainable", "name", "type")
    return (type(part), *(str(getattr(part, mark, None)) for mark in marks))


def assert_same_objects(ones: list[Any], others: list[Any]) -> None:
    assert len(ones) == len(others)
    assert all(one is other for one, other in zip(ones, others, strict=True))


def all_same(ones: list[NDArray[Any]], others: list[NDArray[Any]]) -> bool:
    """Whether bits, dtypes and shapes are the same."""
    return [_bits(one) for one in ones] == [_bits(other) for other in others]


def assert_same(ones: list[NDArray[Any]], others: list[NDArray[Any]]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert all_same(ones, others)


def _bits(array: NDArray[Any]) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.tobytes()
