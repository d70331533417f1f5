"""`penstock config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli.app import run
from penstock.config import STARTER_TOML, parse_config

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_check_says_what_a_file_in_order_describes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(STARTER_TOML, encoding="utf-8")

    status = run(["config", "check", str(path)])

    assert status == 0
    assert capsys.readouterr().out == (
        f"{path}: in order: 16 tokens a block; 1024 device blocks → host (memory, 8192 blocks)\n"
    )


def test_check_says_when_the_engine_keeps_its_device_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(
        'version = 1\nmodel.name = "m"\ntiers = [{ name = "host", kind = "memory", blocks = 4 }]',
        encoding="utf-8",
    )

    status = run(["config", "check", str(path)])

    assert status == 0
    assert "the engine's own device blocks → host (memory, 4 blocks)" in capsys.readouterr().out


def test_check_says_the_size_of_a_tier_that_has_no_number_of_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(
        'version = 1\nmodel.name = "m"\ntiers = [{ name = "ram", kind = "host", gib = 1.5 }]',
        encoding="utf-8",
    )

    status = run(["config", "check", str(path)])

    assert status == 0
    assert "→ ram (host, 1.5 GiB)" in capsys.readouterr().out


def test_check_refuses_a_file_with_a_line_for_each_key_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(STARTER_TOML.replace("blocks", "block"), encoding="utf-8")

    status = run(["config", "check", str(path)])

    assert status == 2
    assert capsys.readouterr().err == (
        f"penstock: {path}: cache.block: unknown; did you mean blocks?\n"
        f"{path}: tiers[0].block: unknown; did you mean blocks?\n"
    )


def test_show_prints_a_configuration_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["config", "show"])

    assert status == 0
    assert parse_config(capsys.readouterr().out) == parse_config(STARTER_TOML)


def test_show_prints_what_a_file_comes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(STARTER_TOML.replace("1024", "77"), encoding="utf-8")

    status = run(["config", "show", "--config", str(path)])

    printed = capsys.readouterr().out
    assert status == 0
    assert parse_config(printed) == parse_config(STARTER_TOML.replace("1024", "77"))
    assert "block_tokens = 16" in printed
