"""`penstock replay`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """\
version = 1
model.name = "m"
cache.block_tokens = 16
cache.blocks = 8
tiers = [{ name = "host", kind = "memory", blocks = 64 }]
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [
        {"timestamp": at * 1000, "tokens": [at % 3] * 70, "output_length": 4} for at in range(9)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (tmp_path / "penstock.toml").write_text(CONFIG, encoding="utf-8")
    return str(path)


def test_a_replay_says_what_was_found_where(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ["--kv-bytes", "1024", "--prefill-rate", "1000", "--bandwidth", "host=1"]

    status = run(
        ["replay", trace, "--config", str(tmp_path / "penstock.toml"), "--json", "-", *rates]
    )

    found = json.loads(capsys.readouterr().out)
    assert status == 0
    assert found["requests"] == 9
    # Six prompts find their four full blocks: some are still on the device, the others below.
    assert found["token_rate"] == pytest.approx(6 * 64 / (9 * 70))
    assert sum(tier["tokens"] for tier in found["tiers"]) == 6 * 64
    assert found["tiers"][1]["tokens"] > 0
    assert {hop["source"]: hop["bytes"] for hop in found["hops"]}["device"] == 12 * 16 * 1024
    assert {miss["reason"]: miss["requests"] for miss in found["misses"]} == {
        "never seen": 3,
        "none": 6,
    }
    assert found["best"]["token_rate"] == found["token_rate"]
    assert found["first_token"]["p99_s"] == pytest.approx(0.07, rel=0.1)


def test_the_report_for_people_has_the_same(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["replay", trace, "--config", str(tmp_path / "penstock.toml")])

    printed = capsys.readouterr().out
    assert status == 0
    assert "found: 60.95% of prompt tokens" in printed
    assert "never seen" in printed
    assert "best possible with 72 blocks: 60.95%; gap 0.00%" in printed


def test_requests_that_are_left_out_count_for_the_best_possible_neither(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = json.dumps({"timestamp": 9000, "tokens": [7] * 400})
    with open(trace, "a", encoding="utf-8") as file:
        file.write(f"{long}\n{long}\n")

    run(["replay", trace, "--config", str(tmp_path / "penstock.toml"), "--json", "-"])

    found = json.loads(capsys.readouterr().out)
    assert found["refused"] == 2
    assert found["best"]["token_rate"] == found["token_rate"] == pytest.approx(6 * 64 / (9 * 70))


def test_without_a_configuration_there_is_an_example(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", trace, "--no-best"]) == 0
    assert "blocks of 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefill-rate", "0"], "is 0, must be a number above 0"),
        (["--bandwidth", "host"], "is 'host', must be the name of a tier and GB a second"),
        (["--bandwidth", "host=1e-9"], "is 'host=1e-9', must be the name of a tier and GB a"),
        (["--bandwidth", "disk=3"], "names 'disk', must be one of host"),
    ],
)
def test_rates_that_make_no_sense_are_refused(
    trace: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["replay", trace, *options])

    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_line_that_is_wrong_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "tokens": [1]}\n{"timestamp": 0, "tokens": 1}\n')

    status = run(["replay", str(path)])

    assert status == 2
    assert capsys.readouterr().err == (
        f"penstock: {path}:2: tokens is 1, must be a list of whole numbers\n"
    )
