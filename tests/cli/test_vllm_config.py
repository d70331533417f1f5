"""`penstock vllm-config`."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from penstock.connectors.vllm.versions import KNOWN, asks_any_version, read_settings

if TYPE_CHECKING:
    from pathlib import Path

TOML = 'version = 1\nmodel.name = "toy"\n[[tiers]]\nname = "host"\nkind = "host"\ngib = 1\n'


def test_the_flag_is_what_the_connector_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TOML)

    assert run(["vllm-config", str(file)]) == 0
    flag, value = shlex.split(capsys.readouterr().out)
    transfer = json.loads(value)

    assert flag == "--kv-transfer-config"
    settings = read_settings(
        transfer["kv_connector_extra_config"], failure_policy=transfer["kv_load_failure_policy"]
    )
    assert settings.config.cache.tiers[0].name == "host"


def test_a_path_with_an_equals_sign_is_read_as_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "team=blue" / "penstock.toml"
    file.parent.mkdir()
    file.write_text(TOML)

    assert run(["vllm-config", str(file), "--bare"]) == 0
    extra = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]

    assert extra["config"] == str(file)
    assert read_settings(extra, failure_policy="recompute").config.cache.tiers[0].name == "host"


def test_a_path_with_a_line_break_cannot_stand_in_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two\nlines.toml"
    file.write_text(TOML)

    assert run(["vllm-config", str(file)]) != 0
    assert "line break" in capsys.readouterr().err
    assert run(["vllm-config", str(file), "--inline"]) == 0


def test_the_content_may_stand_in_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TOML)

    assert run(["vllm-config", str(file), "--inline", "--bare"]) == 0
    transfer = json.loads(capsys.readouterr().out)

    assert transfer["kv_connector_extra_config"]["config"] == TOML


def test_what_was_not_asked_for_does_not_stand_in_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TOML)

    assert run(["vllm-config", str(file), "--bare"]) == 0
    transfer = json.loads(capsys.readouterr().out)

    assert transfer["kv_load_failure_policy"] == "recompute"
    assert set(transfer["kv_connector_extra_config"]) == {"config"}


@pytest.mark.parametrize("key", [key for key in KNOWN if key != "config"])
def test_every_key_that_the_connector_reads_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TOML)

    assert run(["vllm-config", str(file), "--bare", f"--{key.replace('_', '-')}"]) == 0
    transfer = json.loads(capsys.readouterr().out)
    extra, policy = transfer["kv_connector_extra_config"], transfer["kv_load_failure_policy"]

    assert extra[key] is True
    assert set(extra) == {"config", key}
    assert policy == ("fail" if key == "allow_fail" else "recompute")
    settings = read_settings(extra, failure_policy=policy)
    assert settings.layerwise == (key == "layerwise")
    assert settings.hands_over == (key == "handoff")
    assert asks_any_version(extra) == (key == "any_version")


def test_the_role_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TOML)

    assert run(["vllm-config", str(file), "--bare", "--role", "kv_producer"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_role"] == "kv_producer"
    assert run(["vllm-config", str(file), "--role", "producer"]) == 2
    assert "must be one of kv_both, kv_producer" in capsys.readouterr().err


def test_a_file_without_tiers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('version = 1\nmodel.name = "toy"\n')

    assert run(["vllm-config", str(file)]) == 2
    assert "tiers" in capsys.readouterr().err


def test_a_file_that_can_be_read_once_is_put_into_the_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    read, write = os.pipe()
    os.write(write, TOML.encode())
    os.close(write)

    assert run(["vllm-config", f"/dev/fd/{read}", "--inline", "--bare"]) == 0
    os.close(read)

    extra = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]
    assert extra["config"] == TOML
