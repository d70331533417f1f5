"""What Penstock logs is in vLLM's log, once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from penstock.connectors.vllm.versions import log, log_into_vllm
from penstock.runtime.status import HealthLog

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What vLLM's logger gets; afterwards nothing goes there any more."""
    penstock, before = logging.getLogger("penstock"), [*logging.getLogger("penstock").handlers]
    kept = Kept()
    log.addHandler(kept)
    yield kept
    log.removeHandler(kept)
    for handler in [each for each in penstock.handlers if each not in before]:
        penstock.removeHandler(handler)


def test_a_degraded_tier_is_logged_once_in_the_log_of_vllm(kept: Kept) -> None:
    log_into_vllm()
    log_into_vllm()
    health = HealthLog()

    health.fail("tier host", "is off", "its memory cannot be pinned")
    health.fail("tier host", "is off", "its memory cannot be pinned")

    said = "WARNING Penstock: degraded: tier host is off cause=its memory cannot be pinned"
    assert kept.lines == [said]
