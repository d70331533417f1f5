"""`penstock doctor`: findings with remedies, as text and JSON, and a status."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from penstock.cli.app import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def write_config(path: Path, port: int) -> str:
    path.write_text(
        f"version = 1\ncache.blocks = 8\n[serve]\nport = {port}\n"
        '[[tiers]]\nname = "host"\nkind = "host"\ngib = 0.01\n'
        f'[[tiers]]\nname = "disk"\nkind = "disk"\ngib = 0.01\npath = "{path.parent}/kv"\n',
        encoding="utf-8",
    )
    return str(path)


def test_a_fit_machine_ends_with_status_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["doctor", "--config", write_config(tmp_path / "penstock.toml", 0)])

    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "tier 'disk'" in shown
    assert "\x1b" not in shown
    assert shown.splitlines()[-1].endswith("0 problems")


def test_a_problem_ends_with_status_one_and_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = write_config(tmp_path / "penstock.toml", port)

        status = run(["doctor", "--config", file, "--json", "-"])

    written = json.loads(capsys.readouterr().out)
    assert status == 1
    # What others read: these keys stay.
    assert set(written) == {"penstock", "problems", "findings"}
    assert {frozenset(each) for each in written["findings"]} == {
        frozenset({"check", "status", "seen", "remedy"})
    }
    assert written["problems"] == 1
    [found] = [each for each in written["findings"] if each["status"] == "problem"]
    assert found["seen"] == f"127.0.0.1:{port}: Address already in use"
    assert "serve.port" in found["remedy"]


def test_a_wrong_configuration_ends_with_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("version = 1\ncache.blocks = -1\n", encoding="utf-8")

    assert run(["doctor", "--config", str(file)]) == 2
    assert "cache.blocks" in capsys.readouterr().err
