"""`Data`: an input in memory that all processes see, so that calls do not move it."""

from __future__ import annotations

from typing import Any

import numpy as np

import weft
from synkhronos._names import also
from synkhronos._values import fit
from weft._core.arguments import explain_keywords
from weft.errors import InvalidType, InvalidValue


@explain_keywords
def data(  # noqa: PLR0917  they were all positional
    value: Any = None,
    var: Any = None,
    dtype: Any = None,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """Return values for an input of functions, in shared memory.

    value       the values; without, there are none yet, or zeros of `shape`.
    var         the variable whose dtype, number of axes and name it gets; or give `dtype` and
                `ndim`; by default they are the value's.
    minibatch   its rows are those of a batch, in its order, not of all data: its row 0 belongs to
                the first row of `batch`.
    force_cast  convert the value also where that loses something.
    oversize    1 to 2: how many times the memory that the value needs, to grow later.

    >>> import numpy, synkhronos
    >>> x = synkhronos.data(numpy.arange(6.0).reshape(3, 2), oversize=2)
    >>> x.shape, x.alloc_size
    ((3, 2), 12)
    >>> x[1:].sum()
    np.float64(14.0)
    """
    if var is not None:
        if not hasattr(var, "dtype") or not hasattr(var, "ndim"):
            raise InvalidType(f"data(var={var!r}): expected a variable of PyTensor")
        dtype = var.dtype if dtype is None else dtype
        ndim = var.ndim if ndim is None else ndim
        name = var.name if name is None else name
    if value is not None:
        array = fit(value, dtype, ndim, f"data({name or 'value'})", force_cast=force_cast)
        dtype, ndim = array.dtype, array.ndim
    ndim = len(shape) if ndim is None and shape is not None else ndim
    if dtype is None or ndim is None:
        raise InvalidType(
            "data() got neither a value nor var=, nor both dtype= and ndim= (or shape=); these are "
            "fixed from the beginning"
        )
    made = Data(dtype, ndim, minibatch=minibatch, name=name)
    if value is not None:
        made.set_value(array, oversize=oversize)
        if shape is not None:
            made.set_shape(shape)
    elif shape is not None:
        made.set_shape(shape, oversize=oversize)
    return made


class Data:
    """An input in shared memory: what `data` returns.

    Its dtype and number of axes are fixed; its shape and values may change.
    """

    def __init__(
        self, dtype: Any, ndim: int, *, minibatch: bool = False, name: str | None = None
    ) -> None:
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._ndim = ndim
        self._minibatch = bool(minibatch)
        self._name = name
        self._memory: Any = weft.share(np.zeros(0 if ndim else 1, self._dtype))
        self._data: Any = self._over((0,) * ndim)

    @property
    def data(self) -> Any:
        """Return the values themselves: an array in shared memory."""
        return self._data

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def ndim(self) -> int:
        return self._ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._data.shape)

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def minibatch(self) -> bool:
        """Return whether its rows are those of a batch."""
        return self._minibatch

    @property
    def size(self) -> int:
        """Return how many numbers it has."""
        return int(self._data.size)

    @property
    def alloc_size(self) -> int:
        """Return for how many numbers there is memory."""
        return int(self._memory.size)

    @also(value="input_data")
    def set_value(self, input_data: Any, force_cast: bool = False, oversize: float = 1) -> None:
        """Copy values in, of any shape with the same number of axes."""
        array = self.condition_data(input_data, force_cast)
        self.set_shape(array.shape, oversize=oversize)
        np.copyto(self._data, array)

    @also(value="input_data")
    def condition_data(self, input_data: Any, force_cast: bool = False) -> Any:
        """Return a value as `set_value` would copy it: in this dtype and number of axes."""
        what = f"the value of {self}"
        return fit(input_data, self._dtype, self._ndim, what, force_cast=force_cast)

    @explain_keywords
    def set_length(self, length: int, oversize: float = 1) -> None:
        """Set the number of rows: keep the first ones, add zeros where there were none."""
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
            raise InvalidType(f"set_length({length!r}): expected a whole number of rows")
        if self._ndim == 0:
            raise InvalidValue(f"set_length({length}): {self} is a single number, without rows")
        self.set_shape((int(length), *self.shape[1:]), oversize=oversize)

    @explain_keywords
    def set_shape(self, shape: tuple[int, ...], oversize: float = 1) -> None:
        """Set the shape. Values stay if the rows have the same shape as before; the rest is zero.
        Memory grows if necessary, and never shrinks here."""
        if len(shape) != self._ndim or min(shape, default=0) < 0:
            raise InvalidValue(f"the shape {shape}: expected {self._ndim} lengths of 0 or more")
        if not 1 <= oversize <= 2:
            raise InvalidValue(f"oversize={oversize!r}: expected 1 to 2 times the memory needed")
        size, before = int(np.prod(shape)), self._data
        kept = min(size, before.size) if tuple(shape[1:]) == before.shape[1:] else 0
        if size > self.alloc_size:
            self._memory = weft.share(np.zeros(int(size * oversize), self._dtype))
            self._memory[:kept] = before.reshape(-1)[:kept]
        else:
            self._memory[kept:size] = 0
        self._data = self._over(tuple(shape))

    def free_memory(self) -> None:
        """Free the memory that the values do not need."""
        values = np.array(self._data)
        self._memory = weft.share(values.reshape(-1))
        self._data = self._over(values.shape)

    def _over(self, shape: tuple[int, ...]) -> Any:
        return self._memory[: int(np.prod(shape))].reshape(shape)

    def __getitem__(self, rows: Any) -> Any:
        return self._data[rows]

    def __setitem__(self, rows: Any, values: Any) -> None:
        given = np.asarray(values).dtype
        if not np.can_cast(given, self._dtype, "same_kind"):
            raise InvalidType(f"{self} got values of dtype {given}; expected {self._dtype}")
        self._data[rows] = values

    def __len__(self) -> int:
        return len(self._data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._data, dtype=dtype) if copy else np.asarray(self._data, dtype=dtype)

    def __repr__(self) -> str:
        name = "" if self.name is None else f" {self.name}"
        return f"<Data{name} of dtype {self._dtype}, shape {self.shape}>"


def is_minibatch(value: Any) -> bool:
    """Return whether a value has the rows of a batch alone."""
    return isinstance(value, Data) and value.minibatch
