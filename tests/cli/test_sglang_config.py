"""`penstock sglang-config`."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from penstock.connectors.sglang.versions import (
    KNOWN,
    asks_any_version,
    read_settings,
    read_storage_settings,
)

if TYPE_CHECKING:
    from pathlib import Path

TOML = 'version = 1\nmodel.name = "toy"\n[[tiers]]\nname = "host"\nkind = "host"\ngib = 1\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(TOML)
    return path


def test_the_options_are_those_that_sglang_loads_the_linker_by(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sglang-config", str(file)]) == 0
    enable, backend, kind, config, value = shlex.split(capsys.readouterr().out)

    assert enable == "--enable-unified-cache-external-linker"
    assert (backend, kind) == ("--unified-cache-external-linker-backend", "dynamic")
    assert config == "--unified-cache-external-linker-config"
    linker = json.loads(value)
    assert linker["linker"] == "PenstockLinker"
    assert linker["linker_module_path"] == "penstock.connectors.sglang"
    assert read_settings(linker["linker_extra_config"]).cache.tiers[0].name == "host"


def test_every_setting_of_the_linker_has_an_option(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sglang-config", str(file), "--bare", "--inline", "--any-version"]) == 0
    extra = json.loads(capsys.readouterr().out)["linker_extra_config"]

    assert sorted(extra) == sorted(KNOWN)
    assert asks_any_version(extra)
    assert read_settings(extra).model.name == "toy"


def test_the_options_for_hicache_are_those_that_it_loads_the_storage_backend_by(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = '[[tiers]]\nname = "disk"\nkind = "disk"\npath = "/var/cache/penstock"\ngib = 9\n'
    file.write_text(TOML.replace('toy"', 'toy"\nmodel.weights_version = "v1"') + disk)
    assert run(["sglang-config", str(file), "--hicache", "--any-version"]) == 0
    enable, backend, kind, config, value = shlex.split(capsys.readouterr().out)

    assert enable == "--enable-hierarchical-cache"
    assert (backend, kind) == ("--hicache-storage-backend", "dynamic")
    assert config == "--hicache-storage-backend-extra-config"
    extra = json.loads(value)
    assert extra["class_name"] == "PenstockStorage"
    assert extra["module_path"] == "penstock.connectors.sglang"
    assert [tier.name for tier in read_storage_settings(extra).cache.tiers] == ["host", "disk"]


def test_a_configuration_without_tiers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('version = 1\nmodel.name = "toy"\ncache.blocks = 1\n')

    assert run(["sglang-config", str(file)]) == 2
    assert "SGLang would get no tier below its own" in capsys.readouterr().err
