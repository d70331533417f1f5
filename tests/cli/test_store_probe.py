"""`penstock store probe`: what stored tiers can do, and what is wrong with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from penstock.store import probe
from tests.store.redis_server import RedisServer, require_redis

if TYPE_CHECKING:
    from pathlib import Path

TOML = """
version = 1
[model]
name = "m"
[[tiers]]
name = "host"
kind = "host"
blocks = 16
[[tiers]]
name = "disk"
kind = "disk"
path = "{path}"
gib = 1
[[tiers]]
name = "shared"
kind = "redis"
url = "{url}"
timeout_s = 60
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "BLOCK_BYTES", (4096, 65536))
    monkeypatch.setattr(probe, "ROUND_BYTES", 1 << 18)
    monkeypatch.setattr(probe, "DISK_BYTES", 16 << 20)


def _config(tmp_path: Path, url: str) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(TOML.format(path=tmp_path / "disk", url=url))
    return path


def test_every_stored_tier_is_measured_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_redis()
    server = RedisServer(tmp_path / "redis")
    try:
        config = _config(tmp_path, server.url)
        status = run(["store", "probe", "--config", str(config), "--json", "-"])
    finally:
        server.kill()

    tiers = json.loads(capsys.readouterr().out)["tiers"]
    assert status == 0
    assert [(each["name"], each["problem"], each["faults"]) for each in tiers] == [
        ("disk", "", 0),
        ("shared", "", 0),
    ]
    assert all(size["load_bytes_s"] > 0 for each in tiers for size in each["sizes"])
    assert [*(tmp_path / "disk").iterdir()] == []


def test_a_store_that_cannot_be_reached_is_said_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_redis()

    status = run(["store", "probe", "--config", str(_config(tmp_path, "redis://127.0.0.1:1"))])

    out = capsys.readouterr().out
    assert status == 1
    assert "shared (redis)\n  cannot be used: Redis at 127.0.0.1:1 cannot be reached" in out
