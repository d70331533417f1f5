"""The whole measurement: the engine's own thread, and an idle engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.bench.interference.engine_time import SHAPES, run_engine_time
from lab.bench.interference.idle_time import run_idle_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.bench.interference.engine_time import EngineShape
    from lab.bench.report import BenchReport

ROUNDS = 7
IDLE_SECONDS = 10.0


def run_on_cpu(
    report: BenchReport, *, rounds: int, idle_s: float, shapes: Sequence[EngineShape] = SHAPES
) -> None:
    """Measures what the host tier costs the engine's thread, and what waiting costs."""
    run_engine_time(report, rounds=rounds, shapes=shapes)
    run_idle_time(report, idle_s=idle_s)
