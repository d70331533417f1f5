"""`penstock store` and `penstock store inspect`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from penstock.cli import store
from penstock.cli.app import run
from penstock.cli.store import AGES
from penstock.store.disk import format as disk_format
from penstock.store.disk.format import DiskCipher
from tests.store.segments import BLOCK_BYTES, FORM, SPACE, Segment, key_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.store.process.messages import StoreConfig

SEGMENT = Segment(numbers=[1, 2])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "lock").touch()
    disk_format.write_generations(folder, {SPACE.name: SPACE.generation})
    disk_format.write_form(folder, FORM)
    return folder


def damage_block(path: Path, slot: int) -> None:
    with path.open("r+b") as file:
        file.seek(SEGMENT.geometry.offset(slot))
        file.write(b"changed")


def test_the_file_of_a_server_without_a_model_is_enough_for_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[StoreConfig] = []
    monkeypatch.setattr(store, "serve_store", lambda config, **_: served.append(config))
    host = '[[tiers]]\nname = "host"\nkind = "host"\ngib = 1\n'
    disk = f'[[tiers]]\nname = "disk"\nkind = "disk"\npath = "{tmp_path}/disk"\ngib = 1\n'
    (tmp_path / "p.toml").write_text(f"version = 1\n{host}{disk}", encoding="utf-8")

    assert run(["store", "--config", str(tmp_path / "p.toml")]) == 0

    assert [tier.folder for tier in served[0].tiers] == [f"{tmp_path}/disk"]


def test_inspect_prints_segments_spaces_and_ages(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SEGMENT.write(folder)

    status = run(["store", "inspect", str(folder)])

    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert status == 0
    assert lines[0].startswith(f"{folder}: 1 segment, 2 blocks; 0.0 MiB live, 0.0 MiB dead")
    assert any(line.startswith("00000000.segment  1    0123456789abcdef") for line in lines)
    assert any(line.startswith(SPACE.name.hex() + "  3           2") for line in lines)
    assert f"  {'1 minute':<10}  {0:>8}" in lines
    assert "verified" not in printed.out
    assert printed.err == ""


def test_verify_ends_with_status_0_if_all_is_right(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SEGMENT.write(folder)

    status = run(["store", "inspect", str(folder), "--verify"])

    printed = capsys.readouterr()
    assert status == 0
    assert printed.out.splitlines()[-1] == (
        "verified: 2 blocks whole, 0 by their trailer only, 0 changed meanwhile, 0 damaged"
    )
    assert printed.err == "", "no progress bar where there is no terminal"


def test_a_damaged_block_is_named_and_the_status_is_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_block(SEGMENT.write(folder), 1)

    assert run(["store", "inspect", str(folder)]) == 0
    status = run(["store", "inspect", str(folder), "--verify"])

    assert status == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"damaged: 00000000.segment slot 1, key {key_of(2).hex()[:16]}…: "
        "1 of 4 cells fail their sums"
    )


def test_a_damaged_head_is_named_and_the_status_is_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "00000004.segment").write_bytes(b"PENSTOCK" + bytes(4088))

    status = run(["store", "inspect", str(folder)])

    assert status == 1
    assert "damaged: 00000004.segment: the head does not hold" in capsys.readouterr().out


def test_another_version_is_named_and_is_no_damage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = SEGMENT.head()
    head["version"] = 2
    (folder / "00000000.segment").write_bytes(disk_format.seal_head(head))

    status = run(["store", "inspect", str(folder)])

    assert status == 0
    assert "not read: 00000000.segment: format version is 2, must be 1" in capsys.readouterr().out


def test_json_alone_goes_to_standard_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_block(SEGMENT.write(folder), 0)

    status = run(["store", "inspect", str(folder), "--verify", "--json", "-"])

    document = json.loads(capsys.readouterr().out)
    assert status == 1
    assert (document["blocks"], document["live_bytes"]) == (2, 2 * BLOCK_BYTES)
    assert document["segments"][0]["free"] == 2
    assert document["spaces"][0]["generation"] == 3
    assert {*document["blocks_written_within"]} == {*(name for name, _ in AGES), "longer"}
    assert sum(document["blocks_written_within"].values()) == 2
    assert document["verification"]["whole"] == 1
    assert document["verification"]["damages"][0]["slot"] == 0


def test_encrypted_blocks_are_verified_with_a_key_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography", reason="of the disk-encryption extra")
    Segment(numbers=[1, 2], cipher=DiskCipher(bytes(32))).write(folder)
    key = tmp_path / "key"
    key.write_text("00" * 32)
    key.chmod(0o600)

    status = run(["store", "inspect", str(folder), "--verify", "--key-file", str(key)])

    printed = capsys.readouterr().out
    assert status == 0
    assert "00000000.segment (encrypted)" in printed
    assert "verified: 2 blocks whole" in printed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "there is no such folder"),
        ("file", "is a file, must be the folder of a store"),
        ("empty", "is not the folder of a store: it has no segments and no lock"),
    ],
)
def test_another_folder_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()

    status = run(["store", "inspect", str(tmp_path / name)])

    assert status == 2
    assert capsys.readouterr().err == f"penstock: {tmp_path / name}: {message}\n"


def test_a_key_file_without_verify_is_wrong_usage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["store", "inspect", str(folder), "--key-file", "key"])

    assert status == 2
    assert "is for --verify" in capsys.readouterr().err
