"""Saving by ranks of which one cannot do its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from tests.support import run_ranks
from weft.errors import Disagreement


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
