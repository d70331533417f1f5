"""Where Penstock's log lines go inside vLLM: into vLLM's own log, under Penstock's name.

vLLM sets up its own loggers and no others, so what Penstock says would otherwise appear without
time, level and process. The one rule: what Penstock says once is there once; nothing in the
connector says it again.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S = 60.0
"""Of one kind of trouble there is a line at once, and then one in so long at most: a client or a
bad memory module could otherwise fill the log."""
# Below vLLM's own logger, so that its settings for format and level hold.
log = logging.getLogger("vllm.penstock")


class _IntoVllm(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, "Penstock: %s", record.getMessage())


def log_into_vllm() -> None:
    """From now on, in this process; a second call changes nothing."""
    penstock = logging.getLogger("penstock")
    if not any(isinstance(handler, _IntoVllm) for handler in penstock.handlers):
        penstock.addHandler(_IntoVllm())


def log_off(why: str) -> None:
    """Says that vLLM runs without Penstock; said by the scheduler, once for all its ranks."""
    log.warning("Penstock is off, vLLM runs without it: %s", why)


class TroubleLog:
    """Warnings about what may happen any number of times: the first at once, then now and then."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}
        """When each kind was last told."""
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Logs a warning, unless one of its kind was logged a short while ago.

        Args:
            kind: One of a few, chosen here and not by a client.
            message: As for the standard library's loggers.
            args: What is put into the message.
        """
        now = self._clock()
        if kind in self._told and now - self._told[kind] < EVERY_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._told[kind] = now
        left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more of this kind since the last such line)" if left_out else ""
        log.warning(f"Penstock: {message}{more}", *args)  # noqa: G004 - the message is a constant
