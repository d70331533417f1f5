"""The files of a disk tier: written as the specification says, and damage is found."""

from __future__ import annotations

import json
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from penstock.store.disk import format as disk_format
from penstock.store.disk.format import (
    Geometry,
)
from tests.store.segments import (
    BLOCK_BYTES,
    FORM,
    LIFE,
    SPACE,
    SPAN,
    Segment,
    block_of,
    key_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

VECTOR = json.loads((Path(__file__).parent / "vectors" / "segment.json").read_text("utf-8"))
SEGMENT = Segment(numbers=[1, 2], slot_count=3)
MASK = 0xFFFF_FFFF


def vector_image() -> bytes:
    image = bytearray(VECTOR["file_bytes"])
    for piece in VECTOR["pieces"]:
        raw = bytes.fromhex(piece["hex"])
        image[piece["offset"] : piece["offset"] + len(raw)] = raw
    return bytes(image)


def mix64(raw: bytes, seed: int) -> int:
    """The sum of docs/checksums.md, a word at a time."""
    words = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
    low = high = 0
    for position, word in enumerate([*words, len(raw)]):
        x = word ^ (position * 0x9E3779B1 + seed) & MASK
        x = (x ^ x >> 11) * 0x7FEB352D & MASK
        x = (x ^ x >> 15) * 0x846CA68B & MASK
        x ^= x >> 15
        y = (x ^ (position * 0x85EBCA77 + (seed >> 32)) & MASK) * 0xC2B2AE3D & MASK
        low, high = low + x & MASK, high + (y ^ y >> 16) & MASK
    return high << 32 | low


def read_by_the_page(image: bytes) -> Iterator[tuple[bytes, bytes, bytes, tuple[int, ...]]]:
    """Key, parent, block and cell sums of each slot, read as docs/disk-format.md says."""
    magic, version, _, life, _, block_bytes, slot_bytes, slots, cells = struct.unpack_from(
        "<8sIIQQQQII", image
    )
    assert (magic, version) == (b"PENSTOCK", 1)
    assert xxh3_64_intdigest(image[:248]) == int.from_bytes(image[248:256], "little")
    first = 4096 + -(-slots * 256 // 4096) * 4096
    for slot in range(slots):
        row = image[4096 + slot * 256 :][:256]
        of_life, key, parent, space, generation, trailer_sum, _, of_slot, flags = (
            struct.unpack_from("<Q32s32s16sQQQII", row)
        )
        if of_life != life or of_slot != slot:
            continue
        assert flags == 0
        if mix64(row[:248], life) != int.from_bytes(row[248:], "little"):
            continue
        at = first + slot * slot_bytes
        trailer = image[at + -(-block_bytes // 4096) * 4096 : at + slot_bytes]
        named = struct.unpack_from("<Q32s16sQQII", trailer)
        assert named == (life, key, space, generation, 0, slot, cells)
        table = trailer[256 : 256 + 8 * cells]
        found = int.from_bytes(trailer[248:256], "little")
        assert found == trailer_sum == xxh3_64_intdigest(trailer[:248] + table)
        yield key, parent, image[at : at + block_bytes], struct.unpack(f"<{cells}Q", table)


def test_a_segment_is_written_as_in_the_test_vector() -> None:
    assert bytes(SEGMENT.image()) == vector_image()


def test_a_reader_made_from_the_page_alone_reads_the_test_vector() -> None:
    read = list(read_by_the_page(vector_image()))

    keys = [bytes.fromhex(each["key"]) for each in VECTOR["blocks"]]
    assert [key for key, *_ in read] == [key + bytes(16) for key in keys]
    assert [parent for _, parent, *_ in read] == [bytes(32), key_of(1) + bytes(16)]
    for key, (_, _, block, sums) in zip(keys, read, strict=True):
        rows = np.frombuffer(block, dtype=np.uint8).reshape(1, -1)
        assert SPAN.sum_blocks(rows, [key], FORM.checksum)[0].tolist() == list(sums)


def test_the_code_reads_the_test_vector() -> None:
    image = vector_image()
    geometry = SEGMENT.geometry

    head = disk_format.read_head(image[:4096])
    assert head is not None
    rows = np.frombuffer(image[4096:][: 3 * disk_format.ROW_BYTES], dtype=disk_format.ROW)

    assert head["form"].tobytes() == FORM.fingerprint
    assert (head["slot_count"], head["slot_bytes"]) == (3, geometry.slot_bytes)
    assert disk_format.sound_rows(rows, int(head["life"])).tolist() == [True, True, False]
    for slot in range(2):
        at = geometry.offset(slot)
        trailer = disk_format.read_trailer(image[at + geometry.trailer_offset :])
        assert trailer is not None
        assert trailer[0]["sum"] == rows[slot]["trailer_sum"]
        assert image[at : at + BLOCK_BYTES] == block_of(slot + 1)


def test_form_and_generations_are_written_as_in_the_test_vector(tmp_path: Path) -> None:
    disk_format.write_form(tmp_path, FORM)
    disk_format.write_generations(tmp_path, {SPACE.name: SPACE.generation, bytes(16): 0})

    assert (tmp_path / VECTOR["form"]["name"]).read_bytes().hex() == VECTOR["form"]["hex"]
    assert (tmp_path / "generations").read_text("utf-8") == VECTOR["generations"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert disk_format.read_form(tmp_path, FORM.fingerprint) == FORM
    assert disk_format.read_generations(tmp_path) == {SPACE.name: 3, bytes(16): 0}


def flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.integers(0, 256 * 8 - 1))
def test_any_flipped_bit_of_a_head_is_found(bit: int) -> None:
    page = disk_format.seal_head(SEGMENT.head())

    assert disk_format.read_head(page) is not None
    assert disk_format.read_head(flipped(page, bit)) is None


@given(st.integers(0, 255))
def test_a_head_that_was_cut_is_found(size: int) -> None:
    page = disk_format.seal_head(SEGMENT.head())

    assert disk_format.read_head(page[:size]) is None
    assert disk_format.read_head(page[:size].ljust(4096, b"\0")) is None


def test_a_whole_head_of_another_version_is_not_taken_for_damage() -> None:
    head = SEGMENT.head()
    head["version"] = 2

    with pytest.raises(ValueError, match="format version is 2, must be 1"):
        disk_format.read_head(disk_format.seal_head(head))


@given(st.integers(0, 2 * 256 * 8 - 1))
def test_any_flipped_bit_of_a_row_loses_that_row_alone(bit: int) -> None:
    raw = SEGMENT.rows().tobytes()

    rows = np.frombuffer(flipped(raw, bit), dtype=disk_format.ROW)

    sound = disk_format.sound_rows(rows, LIFE).tolist()
    assert sound == [row != bit // 8 // 256 for row in range(2)]


@given(st.integers(1, 2**64 - 1))
def test_rows_of_another_life_are_not_sound(difference: int) -> None:
    assert not disk_format.sound_rows(SEGMENT.rows(), LIFE ^ difference).any()


@given(st.integers(0, 255), st.binary(min_size=256, max_size=256))
def test_a_row_that_was_written_in_part_is_not_sound(size: int, old: bytes) -> None:
    raw = SEGMENT.rows()[:1].tobytes()

    torn = np.frombuffer(raw[:size] + old[size:], dtype=disk_format.ROW)

    assert disk_format.sound_rows(torn, LIFE).tolist() == [torn.tobytes() == raw]


def test_rows_that_changed_places_are_not_sound() -> None:
    rows = SEGMENT.rows()

    assert disk_format.sound_rows(rows, LIFE).all()
    assert not disk_format.sound_rows(rows[::-1], LIFE).any()


@given(st.data())
def test_any_flipped_bit_of_a_trailer_is_found(data: st.DataObject) -> None:
    raw = SEGMENT.trailer(0)
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))

    assert disk_format.read_trailer(raw.ljust(4096, b"\0")) is not None
    assert disk_format.read_trailer(flipped(raw, bit).ljust(4096, b"\0")) is None


@given(st.data())
def test_a_trailer_that_was_cut_is_found(data: st.DataObject) -> None:
    raw = SEGMENT.trailer(0)
    size = data.draw(st.integers(0, len(raw) - 1))
    # A tail of zeros that was cut off cannot be told from zeros that were written.
    kept = raw[:size].ljust(4096, b"\0")

    assert disk_format.read_trailer(raw[:size]) is None
    assert (disk_format.read_trailer(kept) is None) == (kept[: len(raw)] != raw)


@given(
    numbers=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    lives=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    generations=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    slots=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_trailers_of_other_keys_lives_generations_or_slots_have_other_sums(
    numbers: tuple[int, int],
    lives: tuple[int, int],
    generations: tuple[int, int],
    slots: tuple[int, int],
) -> None:
    made = []
    for number, life, generation, slot in zip(numbers, lives, generations, slots, strict=True):
        space = SPACE._replace(generation=generation)
        segment = Segment(numbers=[number] * 3, life=life, space=space)
        trailer = disk_format.read_trailer(segment.trailer(slot))
        assert trailer is not None
        made.append(int(trailer[0]["sum"]))
    same = all(a == b for a, b in (numbers, lives, generations, slots))

    assert (made[0] == made[1]) == same


@given(
    block_bytes=st.integers(1, 1 << 20),
    cell_count=st.integers(1, 4096),
    segment_bytes=st.integers(1 << 21, 1 << 26),
)
def test_head_table_and_slots_do_not_overlap_and_fill_the_segment(
    block_bytes: int, cell_count: int, segment_bytes: int
) -> None:
    geometry = Geometry(segment_bytes=segment_bytes, block_bytes=block_bytes, cell_count=cell_count)

    last = geometry.slot_count - 1

    assert geometry.row_offset(last) + disk_format.ROW_BYTES <= geometry.offset(0)
    assert geometry.offset(0) % geometry.slot_bytes % disk_format.PAGE_BYTES == 0
    assert block_bytes <= geometry.trailer_offset
    assert 256 + 8 * cell_count <= geometry.trailer_bytes
    assert geometry.offset(last) + geometry.slot_bytes <= segment_bytes
    more = geometry.slots_offset(last + 2) + (last + 2) * geometry.slot_bytes
    assert more > segment_bytes


def test_a_segment_without_room_for_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="segment_bytes is 8192, must have room for one slot"):
        Geometry(segment_bytes=8192, block_bytes=100, cell_count=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"\xff{", "damaged"),
        (b'{"version":1}', "damaged"),
        (VECTOR["generations"].replace(":3", ":4").encode(), "its sum does not hold"),
        (VECTOR["generations"].replace('"version":1', '"version":2').encode(), "has version 2"),
        (VECTOR["generations"].replace('{"00', '{"0x').encode(), "damaged"),
    ],
)
def test_damaged_generations_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "generations").write_bytes(content)

    with pytest.raises(ValueError, match=message):
        disk_format.read_generations(tmp_path)


def test_without_the_file_there_are_no_generations(tmp_path: Path) -> None:
    assert disk_format.read_generations(tmp_path) is None


def test_a_damaged_form_is_not_known_and_is_written_again(tmp_path: Path) -> None:
    disk_format.write_form(tmp_path, FORM)
    path = tmp_path / VECTOR["form"]["name"]
    path.write_bytes(path.read_bytes().replace(b"fp8_e4m3", b"fp8_e5m2"))

    assert disk_format.read_form(tmp_path, FORM.fingerprint) is None

    disk_format.write_form(tmp_path, FORM)
    assert disk_format.read_form(tmp_path, FORM.fingerprint) == FORM


def test_a_form_that_was_never_written_is_not_known(tmp_path: Path) -> None:
    assert disk_format.read_form(tmp_path, bytes(16)) is None
