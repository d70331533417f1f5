"""Blocks come back as they were, and damaged ones are refused within their bounds."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lab.bench import compression
from lab.bench.block_codec import decode_block, encode_block
from penstock.bench.report import BenchReport

GUARD = 64


def decoded(encoded: bytes, size: int) -> bytes:
    """The block; what lies around it must stay as it was."""
    memory = bytearray(b"\xa5" * (size + 2 * GUARD))
    try:
        decode_block(encoded, memoryview(memory)[GUARD : GUARD + size])
    finally:
        assert set(memory[:GUARD] + memory[GUARD + size :]) == {0xA5}
    return bytes(memory[GUARD : GUARD + size])


@given(st.binary(max_size=600), st.sampled_from([1, 2, 4, 8]))
def test_a_block_comes_back_as_it_was(content: bytes, item_bytes: int) -> None:
    block = content[: len(content) // item_bytes * item_bytes]

    encoded = encode_block(block, item_bytes=item_bytes)

    assert decoded(encoded, len(block)) == block
    assert len(encoded) <= len(block) + 1 or not block


def test_numbers_whose_exponents_are_alike_become_smaller() -> None:
    numbers = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    bfloat16 = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()

    encoded = encode_block(bfloat16, item_bytes=2)

    assert len(encoded) < 0.8 * len(bfloat16)
    assert decoded(encoded, len(bfloat16)) == bfloat16


def test_noise_is_kept_whole() -> None:
    noise = random.Random(1).randbytes(10_000)

    encoded = encode_block(noise, item_bytes=2)

    assert len(encoded) == len(noise) + 1
    assert decoded(encoded, len(noise)) == noise


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_are_a_block_or_refused(content: bytes, size: int) -> None:
    try:
        decoded(content, size)
    except ValueError:
        return
    assert content[0] in (0, 1)


@given(st.data())
def test_a_block_that_was_cut_or_changed_is_refused_or_of_its_length(data: st.DataObject) -> None:
    block = bytes(range(64)) * 8
    encoded = bytearray(encode_block(block, item_bytes=2))
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
        decoded(struct.pack("<BBI", 1, 1, len(bomb)) + bomb, 100)


@pytest.mark.parametrize("item_bytes", [0, 9, 2.0, None, True])
def test_numbers_of_a_wrong_size_are_refused(item_bytes: object) -> None:
    with pytest.raises(ValueError, match="item_bytes"):
        encode_block(b"1234", item_bytes=item_bytes)  # type: ignore[arg-type]


def test_half_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="block has 5 bytes, must be a multiple of 2"):
        encode_block(b"12345", item_bytes=2)


def test_the_benchmark_measures_every_codec_on_every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = torch.randn(2, 2, 2, 16, 2, 8, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(compression, "real_blocks", lambda tokens: kv[: tokens // 16])
    report = BenchReport(version="0", command="lab bench compression")

    compression.run_compression(report, tokens=32, rounds=2)

    rows = report.document().rows
    assert len(rows) == len(compression.CODECS) * len(compression.DTYPES) * 3
    assert all(row.median > 0 for row in rows)
