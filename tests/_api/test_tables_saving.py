"""Saving and loading by stores that share no memory: each rank keeps rows of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import weft
from tests.support import run_ranks
from weft._core.arithmetic import Array
from weft._core.tables import Ids, TableSpec
from weft.engines.base import Group, Store
from weft.errors import Disagreement


class ApartStore(Store):
    """Rows in the memory of one rank each; the others reach them by files, once it has settled."""

    def __init__(self, group: Group, spec: TableSpec, folder: Path) -> None:
        self.spec, self._group, self._folder, self._steps = spec, group, folder, 0
        self._held_back, self.settled = np.zeros(spec.shape, spec.dtype), 0
        bounds = [spec.n_rows * rank // group.size for rank in range(group.size + 1)]
        self._parts = list(zip(bounds, bounds[1:], strict=False))
        self._own = np.zeros((bounds[group.rank + 1] - bounds[group.rank], *spec.row_shape))

    @property
    def steps(self) -> int:
        return self._steps

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        self._held_back += delta

    def settle(self, *, timeout: float | None = None) -> None:
        total = self._group.all_reduce(self._held_back)
        low, high = self._parts[self._group.rank]
        self._own += total[low:high]
        self._held_back[...] = 0
        self._steps += self._group.size
        self.settled += 1
        np.save(self._file(self._group.rank), self._own)

    def read_piece(self, name: str, start: int, stop: int) -> Array:
        parts = [np.load(self._file(rank)) for rank in range(self._group.size)]
        return np.concatenate(parts)[start:stop].astype(self.spec.dtype)

    def write_piece(self, name: str, start: int, values: Array) -> None:
        for rank, (low, high) in enumerate(self._parts):
            path = self._file(rank)
            part = np.load(path) if path.exists() else np.zeros((high - low, *self.spec.row_shape))
            first, last = max(low, start), min(high, start + len(values))
            if first < last:
                part[first - low : last - low] = values[first - start : last - start]
            np.save(path, part)

    def set_steps(self, steps: int) -> None:
        self._steps = steps

    def get(self, ids: Ids | None, out: Array | None, *, timeout: float | None = None) -> Array:
        return self.read_piece("rows", 0, self.spec.n_rows)

    def interrupted(self) -> tuple[()]:
        return ()

    def _file(self, rank: int) -> Path:
        return self._folder / f"{self.spec.name} {rank}.npy"


def test_stores_that_share_no_memory_save_what_every_rank_held_back(tmp_path: Path) -> None:
    """Each rank settles, once, and the master then has the rows of all of them."""

    def body(group: Any, folder: str) -> list[Any]:
        stores: list[ApartStore] = []

        def make_store(spec: TableSpec, values: Array | None) -> Store:
            where = Path(folder) / f"store {len(stores)}"
            where.mkdir(exist_ok=True)
            stores.append(ApartStore(group, spec, where))
            return stores[-1]

        group.make_store = make_store
        table = weft.MatrixTable(7, 2, consistency="bsp")
        table.add(np.full((7, 2), 10.0**group.rank))
        table.save(Path(folder) / "table")
        again = weft.load(Path(folder) / "table")
        return [stores[0].settled, again.get().tolist(), again._store.exclusive_rows()]

    assert run_ranks(3, body, str(tmp_path)) == [[1, [[111.0, 111.0]] * 7, None]] * 3
    rows = safetensors.numpy.load_file(tmp_path / "table")["rows"]
    assert rows.tolist() == [[111.0, 111.0]] * 7


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_settle_keeps_nobody_waiting(victim: int, tmp_path: Path) -> None:
    """It raises its own error, the others hear of it, nothing is written, and all can go on."""

    def body(group: Any, folder: str) -> bool:
        table = weft.ArrayTable([1, 2, 3], consistency="bsp")
        table.add([1, 1, 1])
        if group.rank == victim:

            def settle(*, timeout: float | None = None) -> None:
                raise ArithmeticError("no way")

            vars(table._store)["settle"] = settle
        with pytest.raises(ArithmeticError if group.rank == victim else Disagreement, match="no w"):
            table.save(Path(folder) / "table")
        vars(table._store).pop("settle", None)
        written = (Path(folder) / "table").exists()
        group.barrier()
        table.save(Path(folder) / "table")
        return not written and bool((weft.load(Path(folder) / "table").get() == [3, 4, 5]).all())

    assert run_ranks(2, body, str(tmp_path)) == [True, True]
