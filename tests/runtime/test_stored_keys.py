"""A disk whose blocks are encrypted, through `penstock.open`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.stored_engine import Engine, all_but_the_last_block, prompt, said

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("cryptography")


def key_file(folder: Path, name: str, content: bytes, mode: int = 0o600) -> Path:
    path = folder / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_right_key_finds_blocks_and_another_one_finds_nothing_and_destroys_nothing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "disk"
    right, wrong = (key_file(tmp_path, name, name.encode() * 8) for name in ("key1", "key2"))
    with Engine(folder, key_file=right) as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
    written = {each: each.read_bytes() for each in folder.glob("*.segment")}
    with Engine(folder, key_file=wrong) as engine:
        engine.wait_until_on()
        assert engine.save(prompt(1)) == 0  # Its own blocks go into segments of its own.
        assert said(engine).blocks_corrupt == 0
    with Engine(folder) as engine:
        engine.wait_until_on()
        assert engine.answer(prompt(1)) == 0

    assert all(each.read_bytes() == content for each, content in written.items())
    for key in (right, wrong):
        with Engine(folder, key_file=key) as engine:
            engine.wait_until_on()
            assert engine.answer(prompt(1)) == all_but_the_last_block(prompt(1))


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (None, 0, "cannot be read: No such file or directory"),
        (b"short", 0o600, "holds no key, must hold 32 bytes or 64 hexadecimal digits"),
        (b"k" * 32, 0o644, "has mode 0644, must be for its owner alone: 0600 or 0400"),
    ],
)
def test_a_key_that_cannot_be_used_is_one_clear_reason(
    tmp_path: Path, content: bytes | None, mode: int, reason: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        key_file(tmp_path, "key", content, mode)
    with Engine(tmp_path / "disk", key_file=path) as engine:
        told = f"tier disk is off: key_file: {path} {reason}"

        engine.run_until(lambda: engine.cache.health().reasons == (told,))

        assert engine.save(prompt(1)) == 0
    assert not list((tmp_path / "disk").glob("*.segment"))
