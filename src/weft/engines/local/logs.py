"""What workers log: each record goes to the driver, whose own handlers and levels decide."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from weft._core.work import Logged
from weft.engines.local.output import clear_of_bars

_PLAIN = (str, int, float, bool, type(None))


def level_here() -> int:
    """From which level on workers need to say anything."""
    loaded = sys.modules.get("logging")
    return logging.WARNING if loaded is None else logging.getLogger().level


class Forwarder(logging.Handler):
    """In the worker: sends what is logged."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(Logged(_as_values(record)))
        except Exception:
            self.handleError(record)


def _as_values(record: logging.LogRecord) -> dict[str, Any]:
    """A record without what cannot travel: its arguments and its traceback become text."""
    values = {name: value for name, value in vars(record).items() if isinstance(value, _PLAIN)}
    values |= {"msg": record.getMessage(), "args": None}
    if record.exc_info and not record.exc_text:
        values["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return values


def replay(logged: Logged) -> None:
    """In the driver: as if it had been logged here."""
    record = logging.makeLogRecord(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        with clear_of_bars(sys.stderr):
            logger.handle(record)
