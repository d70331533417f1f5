"""Two toy engines for tests of the handoff: pools of KV whose every byte can be told right.

The KV of a token is a number that follows from the request, the layer, the head, the plane and
the token, so that it can be computed anywhere, and compared on any rank of any engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import numpy as np

from penstock.runtime.handoff.directory import Directory, EnginePlace, RankPlace
from penstock.tiers.arrays import ArrayTier
from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.form import Form, Shard
from penstock.vocabulary.layers import ALL_HEADS
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

LAYERS = 3
HEADS = 6
CHANNELS = 4
SLOTS = 64


def kv_of(request: str, layer: int, head: int, plane: int, tokens: range) -> NDArray[np.uint16]:
    """The KV of some tokens: [tokens, channels]."""
    named = crc32(request.encode())
    seed = np.uint64(named * 1_000_003 + layer * 65_537 + head * 257 + plane)
    places = np.arange(tokens.start * CHANNELS, tokens.stop * CHANNELS, dtype=np.uint64)
    mixed: NDArray[np.uint64] = (places + seed) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return (mixed >> np.uint64(40)).astype(np.uint16).reshape(len(tokens), CHANNELS)


def split_layouts(ranks: int, tokens: int) -> list[Layout]:
    """Ranks that share the heads."""
    return [
        Layout.split(
            layers=range(LAYERS),
            heads=Shard(tensor_size=ranks, tensor_rank=rank).heads(HEADS),
            channels=CHANNELS,
            dtype=DType.FP16,
            block_tokens=tokens,
            block_count=SLOTS,
        )
        for rank in range(ranks)
    ]


def latent_layouts(ranks: int, tokens: int) -> list[Layout]:
    """Ranks that all hold the same."""
    return [
        Layout.mla(
            layers=range(LAYERS),
            channels=CHANNELS,
            dtype=DType.FP16,
            block_tokens=tokens,
            block_count=SLOTS,
        )
        for _ in range(ranks)
    ]


class Pool:
    """The KV memory of one rank, which knows what ought to be in it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        sizes = layout.buffer_bytes
        self.tier = ArrayTier(layout, [np.zeros(sizes[at], dtype=np.uint8) for at in sorted(sizes)])

    def visit(
        self,
        request: str,
        slots: Sequence[int],
        tokens: range,
        *,
        layers: range = range(LAYERS),
        write: bool,
    ) -> bool:
        """Writes the KV of some tokens into the slots, or compares what lies there."""
        buffers = self.tier.blocks(()).buffers
        size = self.layout.block_tokens
        numbers = np.arange(tokens.start, tokens.stop)
        where = np.asarray(slots)[numbers // size], numbers % size
        right = True
        for cell in self.layout.cells:
            if cell.layer not in layers:
                continue
            for segment in cell.segments:
                view = segment.plane.view(buffers[segment.plane.buffer])[:, segment.local_head]
                head = 0 if cell.head == ALL_HEADS else cell.head
                kv = kv_of(request, cell.layer, head, int(segment.plane.role), tokens)
                if write:
                    view[where] = kv
                else:
                    right = right and bool((view[where] == kv).all())
        return right

    def compute(
        self, request: str, slots: Sequence[int], tokens: range, layers: range = range(LAYERS)
    ) -> None:
        """Computes a prompt, so to speak."""
        self.visit(request, slots, tokens, layers=layers, write=True)

    def holds(self, request: str, slots: Sequence[int], tokens: range) -> bool:
        """Whether the KV of these tokens is right."""
        return self.visit(request, slots, tokens, write=False)


class Shape(NamedTuple):
    """Two engines."""

    prefill_ranks: int = 2
    decode_ranks: int = 3
    prefill_tokens: int = 4
    decode_tokens: int = 4
    latent: bool = False


def layouts_of(shape: Shape) -> dict[str, Layout]:
    """How the KV of every rank lies, by its name."""
    make = latent_layouts if shape.latent else split_layouts
    return {
        f"{engine}/{n}": layout
        for engine, ranks, tokens in (
            ("prefill", shape.prefill_ranks, shape.prefill_tokens),
            ("decode", shape.decode_ranks, shape.decode_tokens),
        )
        for n, layout in enumerate(make(ranks, tokens))
    }


def directory_of(shape: Shape, address: Callable[[str], str] = lambda _: "") -> Directory:
    """Who takes part; `address` says where a party listens."""
    layouts = layouts_of(shape)
    prefill, decode = (
        EnginePlace(
            scheduler=engine,
            address=address(engine),
            ranks=tuple(
                RankPlace(name=name, form=Form(layout=layout), address=address(name))
                for name, layout in layouts.items()
                if name.startswith(f"{engine}/")
            ),
        )
        for engine in ("prefill", "decode")
    )
    return Directory(prefill=prefill, decode=decode, model="toy", weights="v1")


def keys_of(request: str, token_count: int, block_tokens: int) -> list[bytes]:
    """The keys of a request's blocks."""
    return [f"{request} {n}".encode() for n in range(-(-token_count // block_tokens))]
