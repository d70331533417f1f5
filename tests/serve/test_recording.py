"""What a server recorded predicts what it finds with another setting."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli.app import run
from tests.serve.conftest import serving

if TYPE_CHECKING:
    from pathlib import Path


BLOCK = 8
SMALL, LARGE = 48, 160
"""Blocks of the device, before and after the change."""


def client(running: Any) -> float:
    """Documents of different popularity, asked about again and again; the share that was cached."""
    chance = random.Random(7)
    documents = [[chance.randrange(1, 300) for _ in range(16 * BLOCK)] for _ in range(12)]
    cached = asked = 0
    for number in range(60):
        which = min(chance.randrange(12), chance.randrange(12))
        prompt = [*documents[which], *[1 + number] * 11]
        usage = running.complete(prompt, max_tokens=2)["usage"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        asked += usage["prompt_tokens"]
    return cached / asked


@pytest.mark.long
def test_a_recording_predicts_what_a_larger_device_finds(
    model_folder: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "day.jsonl"
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'version = 1\nmodel.name = "small-model"\nserve.record = "{trace}"\n'
        f"cache = {{ blocks = {SMALL}, block_tokens = {BLOCK} }}\n",
        encoding="utf-8",
    )
    larger = ["--blocks", str(LARGE)]
    with serving(model_folder, "--config", str(config)) as recorded:
        before = client(recorded)
    rates = {}
    for blocks in (SMALL, LARGE):
        config.write_text(
            f'version = 1\nmodel.name = "small-model"\n'
            f"cache = {{ blocks = {blocks}, block_tokens = {BLOCK} }}\n",
            encoding="utf-8",
        )
        report = tmp_path / f"{blocks}.json"
        assert run(["replay", str(trace), "--config", str(config), "--json", str(report)]) == 0
        rates[blocks] = json.loads(report.read_text())["token_rate"]

    with serving(model_folder, "--config", str(config), *larger) as changed:
        after = client(changed)

    assert after - before > 0.1
    assert abs(rates[SMALL] - before) < 0.02
    assert abs(rates[LARGE] - after) < 0.02
