"""The settings of the storage backend, as SGLang passes them; no SGLang is needed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.connectors.sglang import versions
from penstock.errors import ConfigError

WHERE = "hicache_storage_backend_extra_config"
CONFIG = """
version = 1
model.name = "m"
model.weights_version = "v1"
[[tiers]]
name = "host"
kind = "host"
gib = 1
"""
DISK = """
[[tiers]]
name = "disk"
kind = "disk"
path = "/var/cache/penstock"
gib = 10
"""
GIVEN = {
    "backend_name": "penstock",
    "module_path": "penstock.connectors.sglang",
    "class_name": "PenstockStorage",
    "interface_v1": 1,
    "config": CONFIG + DISK,
}


def test_a_configuration_with_a_disk_is_read() -> None:
    config = versions.read_storage_settings(GIVEN)

    assert [tier.name for tier in config.cache.tiers] == ["host", "disk"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confg": "x"}, f"{WHERE}.confg: is unknown, must be one of config, any_version"),
        ({"config": None}, f"{WHERE}.config: is None, must be the path of a Penstock config"),
        ({"interface_v1": 0}, f"{WHERE}.interface_v1: is 0, must be 1"),
        ({"any_version": "yes"}, f"{WHERE}.any_version: is 'yes', must be true or false"),
        ({"config": CONFIG}, "tiers: has none that outlives the process, must have a disk"),
        (
            {"config": CONFIG.replace('model.weights_version = "v1"', "") + DISK},
            "model.weights_version: is not given, must say which weights these are",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_what_would_be_right(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        versions.read_storage_settings({**GIVEN, **changes})

    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("version", "any_version", "off"),
    [("0.5.23", False, False), ("0.5.24", False, True), ("0.5.24", True, False)],
)
def test_in_an_untested_sglang_it_keeps_nothing_unless_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, *, version: str, any_version: bool, off: bool
) -> None:
    monkeypatch.setattr(versions, "found_version", lambda: version)

    assert versions.storage_is_off({**GIVEN, "any_version": any_version}) is off
