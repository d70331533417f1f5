"""The measurement, and the command, for real and small."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lab.bench.interference import on_cpu
from lab.bench.interference.engine_time import EngineShape, SmallEngine
from lab.bench.interference.idle_time import measure_idle
from lab.bench.report import BenchReport, Document
from lab.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SMALL = EngineShape(
    device_blocks=16,
    host_blocks=256,
    token_bytes=64,
    running=2,
    prompt_tokens=48,
    answer_tokens=4,
    prompts=12,
    requests=24,
    width=16,
    layers=2,
)


def test_where_nothing_is_reused_both_engines_compute_every_token() -> None:
    off = SmallEngine(SMALL, tier=False).run("nothing")
    on = SmallEngine(SMALL, tier=True).run("nothing")

    assert off.cached_tokens == on.cached_tokens == 0
    assert off.thread_s > 0
    assert on.step_ns > 0


def test_where_prefixes_come_back_the_tier_has_what_the_device_forgot() -> None:
    off = SmallEngine(SMALL, tier=False).run("prefixes")
    on = SmallEngine(SMALL, tier=True).run("prefixes")

    assert off.cached_tokens == 0
    assert on.cached_tokens == SMALL.prompts * (SMALL.prompt_tokens - SMALL.block_tokens)


def test_a_request_that_waits_for_a_slow_tier_costs_next_to_nothing() -> None:
    found = measure_idle(1.0)

    assert found.seconds >= 1.0
    # Far more than is claimed: this machine may be busy, and the garbage collector have its turn.
    # Who asks over and over uses all of the time, and wakes thousands of times.
    assert found.engine_cpu_s + found.rank_cpu_s < 0.5 * found.seconds
    assert found.wakings < 20 * found.seconds


@pytest.mark.long
def test_the_command_measures_on_the_cpu_and_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = on_cpu.run_engine_time

    def small(report: BenchReport, *, rounds: int, shapes: Sequence[EngineShape]) -> None:
        assert len(shapes) == 2
        measure(report, rounds=rounds, shapes=[SMALL])

    monkeypatch.setattr(on_cpu, "run_engine_time", small)
    path = tmp_path / "report.json"
    options = ["--rounds", "3", "--idle-seconds", "0.2"]

    status = run(["bench", "interference", *options, "--json", str(path)])

    assert status == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document.keys() == set(Document.__struct_fields__)
    rows = {(row["bench"], row["side"], row["metric"]) for row in document["rows"]}
    assert ("engine thread", "host tier on", "per step, of that without") in rows
    assert ("idle engine", "engine and rank", "CPU time") in rows
    (ratio,) = document["ratios"]
    assert ratio["name"] == "idle engine: CPU seconds in 0.2 s beside one waiting request"
    assert ratio["target"] == pytest.approx(0.004)
    assert "engine thread" in capsys.readouterr().out
