"""A bar that shows how far a map is."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from weft._core.collect import Collected
from weft.errors import InvalidType


class Bar:
    """A tqdm bar, in notebooks their kind of it; or nothing."""

    def __init__(self, progress: bool | str, total: int | None, name: str) -> None:
        self._bar: Any = None
        if progress:
            from tqdm.auto import tqdm  # only now: it takes long to load

            class Unwatched(tqdm):  # type: ignore[misc]  # it has no types
                """Without the thread that tqdm keeps for all bars, until the program ends."""

                monitor_interval = 0

            label = progress if isinstance(progress, str) else name
            self._bar = Unwatched(total=total, desc=label, miniters=1)

    def show(self, collected: Collected) -> None:
        if self._bar is None:
            return
        if collected.failed:
            self._bar.set_postfix(failed=collected.failed, refresh=False)
        self._bar.update(collected.finished - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        if self._bar is None:
            print(text, file=sys.stderr)
        else:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def validate_progress(progress: object) -> None:
    if not isinstance(progress, (bool, str)):
        raise InvalidType(
            f"progress={progress!r}: expected True, False, or a label to show, got "
            f"{type(progress).__name__}"
        )
