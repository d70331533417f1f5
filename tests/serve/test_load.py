"""`penstock load` against a real server: the later turns of its conversations are cached."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.cli.app import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import Running


def test_a_served_model_is_measured_and_its_later_turns_are_cached(
    server: Running, tmp_path: Path
) -> None:
    report = tmp_path / "run.json"
    lengths = ("--system-tokens", "10", "--turn-tokens", "10", "--output-tokens", "6")

    status = run(
        [
            "load",
            server.address,
            "--requests",
            "6",
            "--turns",
            "3",
            "--gap-s",
            "0",
            *lengths,
            "--concurrency",
            "2",
            "--ignore-eos",
            "--json",
            str(report),
        ]
    )

    written = json.loads(report.read_text(encoding="utf-8"))
    assert status == 0, written["errors"]
    assert written["model"] == "small-model"
    assert [each["output_tokens"] for each in written["records"]] == [6] * 6
    assert 0 < written["cached_share"] < 1
    later = [each for each in written["records"] if each["turn"]]
    assert all(each["cached_tokens"] > 0 for each in later)
    assert written["first_token"]["p50_s"] > 0
