"""What lossless compression makes of real KV: ratio, rate, and from which link on it pays.

The KV is that of the default model (SmolLM2) for a page of these docs, computed by the reference
engine and cast to each type. Rates are of one core, by its CPU time, for a whole block: codec and
byte planes. `plain zstd` and `plain lz4` compress the block as it lies. With links, the same
blocks go through a tier in a real Redis behind a link of that rate, with and without compression.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lz4.block
import torch
import zstandard

from lab.bench.compression_links import run_links
from lab.bench.measure import summarize
from penstock.store.shared.io import LEVEL, decode_block, encode_block
from penstock_serve.engine.architecture import share_of
from penstock_serve.engine.batch import TokenSpan, on_device
from penstock_serve.engine.checkpoints import RankWeights, find_model
from penstock_serve.engine.model import Alone, Decoder
from penstock_serve.engine.text import Text
from penstock_serve.engine.worker import allocate_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.bench.report import BenchReport

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
BLOCK_TOKENS = 16
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_CPU = torch.device("cpu")


class Codec(NamedTuple):
    """One way to make a block smaller."""

    encode: Callable[[bytes, int], bytes]
    """From a block and the bytes of its numbers."""
    decode: Callable[[bytes, memoryview], None]


def _decode_planes(encoded: bytes, target: memoryview) -> None:
    if len(encoded) == len(target):
        target[:] = encoded
    else:
        decode_block(encoded, target)


def _decode_zstd(encoded: bytes, target: memoryview) -> None:
    target[:] = zstandard.ZstdDecompressor().decompress(encoded)


def _decode_lz4(encoded: bytes, target: memoryview) -> None:
    target[:] = lz4.block.decompress(encoded, uncompressed_size=len(target))


CODECS = {
    "planes": Codec(
        lambda block, size: encode_block(block, item_bytes=size) or block, _decode_planes
    ),
    "plain zstd": Codec(
        lambda block, _: zstandard.ZstdCompressor(level=LEVEL).compress(block), _decode_zstd
    ),
    "plain lz4": Codec(lambda block, _: lz4.block.compress(block, store_size=False), _decode_lz4),
}


def real_blocks(tokens: int) -> torch.Tensor:
    """The KV of a page: [blocks, layers, K and V, tokens, heads, dimensions], float32."""
    found = find_model(None)
    architecture, checkpoint = found.open()
    share = share_of(architecture, rank=0, ranks=1)
    weights = RankWeights(
        checkpoint, share, head_dim=architecture.head_dim, dtype=torch.float32, device=_CPU
    )
    decoder = Decoder(architecture, weights, Alone(share))
    checkpoint.close()
    page = list(Text.of(found.path).encode(PAGE.read_text("utf-8"))[:tokens])
    blocks = len(page) // BLOCK_TOKENS
    page = page[: blocks * BLOCK_TOKENS]
    kv = allocate_kv(
        architecture,
        share,
        block_count=blocks,
        block_tokens=BLOCK_TOKENS,
        dtype=torch.float32,
        device=_CPU,
    )
    batch = on_device(
        [TokenSpan(0, 0, page, list(range(blocks)))], block_tokens=BLOCK_TOKENS, device=_CPU
    )
    decoder.forward(replace(batch, outputs=torch.tensor([len(page) - 1])), kv)
    return torch.stack(list(kv)).permute(2, 0, 1, 3, 4, 5).contiguous()


def run_compression(
    report: BenchReport, *, tokens: int, rounds: int, links: Sequence[int] = ()
) -> None:
    """Measures every codec on every type, and says from which link on the planes pay.

    Args:
        report: What it adds to.
        tokens: Of the page whose KV is used.
        rounds: Of each measurement.
        links: Rates in MB/s of links that bfloat16 is saved and loaded over, too.

    Raises:
        UnavailableError: links cannot be made here.
    """
    report.progress("computing the KV of a page")
    kv = real_blocks(tokens)
    if links:
        cast = kv.to(torch.bfloat16).contiguous().view(torch.uint8).reshape(len(kv), -1)
        run_links(report, cast.numpy(), links=links, rounds=rounds)
    for dtype, of_torch in DTYPES.items():
        cast = kv.to(of_torch).contiguous().view(torch.uint8).reshape(len(kv), -1)
        blocks = [block.numpy().tobytes() for block in cast]
        for name, codec in CODECS.items():
            _measure(report, dtype, of_torch.itemsize, name, codec, blocks, rounds)
    report.add_note("A link pays below: rate of decoding × (1 - 1 / ratio), for each core.")


def _measure(
    report: BenchReport,
    dtype: str,
    item_bytes: int,
    name: str,
    codec: Codec,
    blocks: list[bytes],
    rounds: int,
) -> None:
    size = sum(map(len, blocks))
    encodings, decodings = [], []
    encoded: list[bytes] = []
    for _ in range(rounds):
        began = time.process_time()
        encoded = [codec.encode(block, item_bytes) for block in blocks]
        encodings.append(size / (time.process_time() - began) / 1e9)
        target = memoryview(bytearray(len(blocks[0])))
        began = time.process_time()
        for each in encoded:
            codec.decode(each, target)
        decodings.append(size / (time.process_time() - began) / 1e9)
        if bytes(target) != blocks[-1]:
            raise AssertionError(f"{name} of {dtype} is not lossless")
    ratio = size / sum(map(len, encoded))
    params: dict[str, str | int] = {"dtype": dtype, "block_bytes": len(blocks[0])}
    for metric, unit, samples in (
        ("ratio", "times", [ratio]),
        ("encode", "GB/s", encodings),
        ("decode", "GB/s", decodings),
    ):
        report.add_row(
            bench="compression",
            side=name,
            params=params,
            metric=metric,
            unit=unit,
            summary=summarize(samples),
        )
    pays = sorted(decodings)[len(decodings) // 2] * max(0.0, 1 - 1 / ratio)
    report.add_note(f"{dtype}, {name}: loads pay on links below {pays:.2f} GB/s for each core")
