"""Blocks come back as they were, and damaged ones are refused within their bounds."""

from __future__ import annotations

import random
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.shared.io import choose_item_bytes, decode_block, encode_block

if TYPE_CHECKING:
    from pathlib import Path

GUARD = 64


def decoded(encoded: bytes, size: int) -> bytes:
    """The block; what lies around it must stay as it was."""
    memory = bytearray(b"\xa5" * (size + 2 * GUARD))
    try:
        decode_block(encoded, memoryview(memory)[GUARD : GUARD + size])
    finally:
        assert set(memory[:GUARD] + memory[GUARD + size :]) == {0xA5}
    return bytes(memory[GUARD : GUARD + size])


@given(st.binary(max_size=60), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]))
def test_a_block_comes_back_as_it_was_in_fewer_bytes_or_is_kept(
    content: bytes, repeats: int, item_bytes: int
) -> None:
    block = content * repeats

    encoded = encode_block(block, item_bytes=item_bytes)

    if encoded is not None:
        assert decoded(encoded, len(block)) == block
        assert len(encoded) < len(block)


def test_numbers_whose_exponents_are_alike_become_smaller() -> None:
    numbers = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    bfloat16 = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()

    encoded = encode_block(bfloat16, item_bytes=2)

    assert encoded is not None
    assert len(encoded) < 0.8 * len(bfloat16)
    assert decoded(encoded, len(bfloat16)) == bfloat16


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_the_size_of_numbers_is_found_by_trying(item_bytes: int) -> None:
    numbers = np.random.default_rng(1).integers(0, 256, (40_000, item_bytes), dtype=np.uint8)
    numbers[:, -1] &= 3

    assert choose_item_bytes(numbers.tobytes()) == item_bytes


def test_noise_is_not_encoded() -> None:
    noise = random.Random(1).randbytes(10_000)

    assert encode_block(noise, item_bytes=2) is None
    assert encode_block(b"", item_bytes=2) is None
    assert choose_item_bytes(noise) == 2


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_are_a_block_or_refused(content: bytes, size: int) -> None:
    try:
        assert len(decoded(content, size)) == size
    except ValueError:
        return


@given(st.data())
def test_a_block_that_was_cut_or_changed_is_refused_or_of_its_length(data: st.DataObject) -> None:
    block = bytes(range(64)) * 8
    encoded = bytearray(encode_block(block, item_bytes=2) or b"")
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(encoded)))

    for wrong in (bytes(encoded), bytes(encoded[:cut]), bytes(encoded) + b"more"):
        try:
            assert len(decoded(wrong, len(block))) == len(block)
        except ValueError:
            continue


def test_a_frame_that_claims_a_terabyte_takes_no_memory() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    # The frame's header: eight bytes of length, one segment.
    bomb = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + bytes(frame[9:])

    with pytest.raises(ValueError, match="a frame is not that of 100 bytes"):
        decoded(struct.pack("<BI", 1, len(bomb)) + bomb, 100)


@pytest.mark.parametrize("item_bytes", [0, 9, 2.0, None, True])
def test_numbers_of_a_wrong_size_are_refused(item_bytes: object) -> None:
    with pytest.raises(ValueError, match="item_bytes"):
        encode_block(b"1234", item_bytes=item_bytes)  # type: ignore[arg-type]


def test_a_package_that_cannot_be_imported_is_missing_in_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waited for the import of another one got half of the module."""
    begun = threading.Event()
    monkeypatch.setattr(sys, "zstandard_begun", begun, raising=False)
    (tmp_path / "zstandard.py").write_text(
        "import sys, threading\n"
        "sys.zstandard_begun.set()\n"
        "threading.Event().wait(0.2)\n"
        "raise ImportError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zstandard", raising=False)

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(decode_block, b"", memoryview(bytearray(8)))]
        assert begun.wait(30)
        calls.append(threads.submit(decode_block, b"", memoryview(bytearray(8))))

    assert [type(call.exception()) for call in calls] == [ImportError] * 2
