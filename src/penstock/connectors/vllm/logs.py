"""Forwards Penstock's log lines to vLLM's log.

vLLM configures its own loggers and no others, so Penstock's lines would appear without time, level
and process. This module imports nothing of vLLM, so that every version can use it. The one rule:
code below `penstock.connectors` logs a line once, to the logger `penstock` or to `log`, not both.
"""

from __future__ import annotations

import logging

# Below vLLM's own logger, so that its settings for format and level hold.
log = logging.getLogger("vllm.penstock")


class _VllmHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, "Penstock: %s", record.getMessage())


def log_into_vllm() -> None:
    """Starts forwarding in this process; a second call changes nothing."""
    penstock = logging.getLogger("penstock")
    if not any(isinstance(handler, _VllmHandler) for handler in penstock.handlers):
        penstock.addHandler(_VllmHandler())


def log_off(why: str) -> None:
    """Logs that vLLM runs without Penstock; the scheduler calls it once for all ranks."""
    log.warning("Penstock is off, vLLM runs without it: %s", why)
