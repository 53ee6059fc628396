"""`Holder`: a place for a value that cannot be changed itself."""

from __future__ import annotations

from typing import Any


class Holder:
    """A model whose parameters are immutable, such as a pytree of JAX arrays.

    JAX trains by making new arrays, so nothing in a pytree can be written to. A holder has one
    attribute, `value`. Put the pytree there, train by setting `value`, and give the holder itself
    to weft, which sets `value` too:

        model = weft.Holder({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)})
        model.value = update(model.value, batch)

    >>> model = Holder({"w": 1})
    >>> model.value = {"w": 2}
    >>> model
    Holder({'w': 2})
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Holder({self.value!r})"
