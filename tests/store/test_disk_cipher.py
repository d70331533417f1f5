"""Encryption of a disk tier: a wrong key or changed bytes open nothing."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.store_tier_suite import (
    LAYOUTS,
    WAIT_S,
    StoreRig,
    StoreTierSuite,
    wait_until_recovered,
)
from penstock.cache.operations import BlockFault
from penstock.errors import ConfigError, UnavailableError
from penstock.store.disk.format import PAGE_BYTES, DiskCipher, Geometry, load_cipher, read_head
from penstock.store.disk.inspect import inspect_folder
from penstock.store.disk.tier import DiskTier
from tests.store.segments import Segment
from tests.store.test_disk_format import flipped

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("cryptography", reason="of the disk-encryption extra")

VECTORS = Path(__file__).parent / "vectors"
KEY = bytes(range(32))
NONCE = bytes.fromhex("efcdab896745230107000000")
BLOCK = bytes(range(100))
ASSOCIATED = b"a trailer"


def sealed(key: bytes = KEY) -> tuple[bytearray, bytes]:
    into = bytearray(len(BLOCK))
    tag = DiskCipher(key).seal(NONCE, BLOCK, ASSOCIATED, into)
    return into, tag


def test_a_block_opens_again_in_place() -> None:
    block, tag = sealed()

    opened = DiskCipher(KEY).open(NONCE, block, tag, ASSOCIATED, block)

    assert opened
    assert bytes(block) == BLOCK


def test_sealing_is_aes_256_gcm_as_specified_elsewhere() -> None:
    # Test case 15 of McGrew and Viega, "The Galois/Counter Mode of Operation".
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    block = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
    )
    into = bytearray(len(block))

    tag = DiskCipher(key).seal(bytes.fromhex("cafebabefacedbaddecaf888"), block, b"", into)

    assert into.hex() == (
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad"
    )
    assert tag.hex() == "b094dac5d93471bdec1a502270e3cc6c"


def test_the_key_check_and_a_sealed_block_are_those_of_the_test_vector() -> None:
    block, tag = sealed()

    assert DiskCipher(KEY).key_check.hex() == "089a0d47d2d2c432a1081908778d68e5"
    assert (block[:16].hex(), tag.hex()) == (
        "fd2ab88b550d164f48ecfd874a968331",
        "6e0f94fb00b10d4f5809b7ef7b7a116d",
    )


def test_an_encrypted_segment_is_that_of_the_test_vector() -> None:
    vector = json.loads((VECTORS / "encrypted_segment.json").read_text("utf-8"))
    cipher = DiskCipher(bytes.fromhex(vector["key"]))
    pieces = [bytes.fromhex(piece["hex"]) for piece in vector["pieces"]]
    head, _, block, trailer = pieces
    plain = bytearray(len(block))

    opened = cipher.open(trailer[80:92], block, trailer[92:108], trailer[:80], plain)

    assert opened
    assert plain.hex() == vector["plain"]
    assert (head[12:16], head[104:120]) == (b"\1\0\0\0", cipher.key_check)
    written = Segment(numbers=[1], slot_count=1, cipher=cipher).image()
    assert [
        written[piece["offset"] : piece["offset"] + len(raw)]
        for piece, raw in zip(vector["pieces"], pieces, strict=True)
    ] == pieces


def test_a_wrong_key_opens_nothing_and_leaves_zeros() -> None:
    block, tag = sealed()
    other = DiskCipher(bytes(32))
    into = bytearray(b"x" * len(BLOCK))

    opened = other.open(NONCE, block, tag, ASSOCIATED, into)

    assert not opened
    assert not any(into)
    assert other.key_check != DiskCipher(KEY).key_check


@given(st.data())
def test_any_flipped_bit_of_block_tag_nonce_or_associated_bytes_is_found(
    data: st.DataObject,
) -> None:
    block, tag = sealed()
    parts = [NONCE, bytes(block), tag, ASSOCIATED]
    which = data.draw(st.integers(0, 3))
    parts[which] = flipped(parts[which], data.draw(st.integers(0, len(parts[which]) * 8 - 1)))
    nonce, changed, changed_tag, associated = parts

    opened = DiskCipher(KEY).open(nonce, changed, changed_tag, associated, bytearray(len(BLOCK)))

    assert not opened


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", KEY.hex().encode() + b"\r\n"],
)
def test_a_key_is_32_bytes_or_64_hexadecimal_digits(tmp_path: Path, content: bytes) -> None:
    cipher = load_cipher(key_file(tmp_path, content, 0o400))

    assert cipher.key_check == DiskCipher(KEY).key_check


@pytest.mark.parametrize(
    "content",
    [b"", KEY[:-1], KEY + b"\n", KEY.hex().encode()[:-1], b"g" * 64, b"\xff" * 64, b"0" * 65],
)
def test_a_file_without_a_key_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    path = key_file(tmp_path, content)

    with pytest.raises(ConfigError) as caught:
        load_cipher(path)

    assert str(caught.value) == (
        f"key_file: {path} holds no key, must hold 32 bytes or 64 hexadecimal digits"
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, KEY, mode)

    with pytest.raises(
        ConfigError, match=f"has mode {mode:04o}, must be for its owner alone: 0600 or 0400"
    ):
        load_cipher(path)


def test_a_key_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent cannot be read: No such file or directory"):
        load_cipher(tmp_path / "absent")
    with pytest.raises(ConfigError, match="is not a file, must be one with a key"):
        load_cipher(tmp_path)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="key has 16 bytes, must have 32"):
        DiskCipher(bytes(16))


def test_without_the_package_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)

    with pytest.raises(UnavailableError, match="install the extra disk-encryption"):
        DiskCipher(KEY)


SIZE_BYTES = 8 << 20


class TestEncryptedDiskTier(StoreTierSuite):
    def make_tier(self, folder: Path) -> DiskTier:
        return DiskTier(folder, SIZE_BYTES, cipher=DiskCipher(KEY))


@contextmanager
def opened(folder: Path, key: bytes | None) -> Iterator[StoreRig]:
    """A tier with this key, or without one."""
    cipher = DiskCipher(key) if key is not None else None
    tier = DiskTier(folder, SIZE_BYTES, cipher=cipher)
    try:
        wait_until_recovered(tier)
        yield StoreRig(tier, LAYOUTS["whole pages"])
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)


def test_no_block_lies_on_the_disk_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path, KEY) as rig:
        saved = rig.fill()
        rig.save_and_wait(saved)

    on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    # A line of 64 bytes of a block does not occur by chance.
    assert not [1 for block in saved.content if block[:64].tobytes() in on_disk]


@pytest.mark.parametrize("other", [bytes(32), None], ids=["another key", "no key"])
def test_a_wrong_key_finds_nothing_and_destroys_nothing(
    tmp_path: Path, other: bytes | None
) -> None:
    with opened(tmp_path, KEY) as rig:
        saved = rig.fill()
        rig.save_and_wait(saved)
    with opened(tmp_path, other) as rig:
        assert not any(rig.find(saved.keys))
        rig.save_and_wait(rig.fill(seed=2))

    with opened(tmp_path, KEY) as rig:
        read = rig.load_and_wait(saved.keys, saved.slots)

        assert read.faults == ()
        rig.require(saved, saved.slots)


def test_an_encrypted_block_in_the_place_of_another_does_not_open(tmp_path: Path) -> None:
    with opened(tmp_path, KEY) as rig:
        saved = rig.fill(2)
        rig.save_and_wait(saved)
    (path,) = tmp_path.glob("*.segment")
    raw = bytearray(path.read_bytes())
    head = read_head(bytes(raw[:PAGE_BYTES]))
    assert head is not None
    start, size = Geometry.slots_offset(int(head["slot_count"])), saved.content.shape[1]
    first = slice(start, start + size)
    second = slice(start + int(head["slot_bytes"]), start + int(head["slot_bytes"]) + size)
    raw[first], raw[second] = raw[second], raw[first]
    path.write_bytes(raw)

    with opened(tmp_path, KEY) as rig:
        read = rig.load_and_wait(saved.keys, saved.slots)

    assert read.faults == ((0, BlockFault.CORRUPT), (1, BlockFault.CORRUPT))


def test_the_folder_of_a_running_encrypted_tier_can_be_verified(tmp_path: Path) -> None:
    with opened(tmp_path, KEY) as rig:
        rig.save_and_wait(rig.fill())

        inspection = inspect_folder(tmp_path)

        assert inspection.report.damages == []
        assert inspection.verify(DiskCipher(KEY)).whole == 24
        assert inspection.verify().trailer_only == 24
