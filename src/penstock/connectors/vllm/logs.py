"""Where Penstock's log lines go inside vLLM: into vLLM's own log, under Penstock's name.

vLLM sets up its own loggers and no others, so what Penstock says would otherwise appear without
time, level and process. The one rule: what Penstock says once is there once; nothing in the
connector says it again.
"""

from __future__ import annotations

import logging

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
