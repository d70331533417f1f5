"""A process that lends blocks to the benchmark of peers, and sends plain bytes.

python -m lab.bench.peer_blocks_child BLOCK_BYTES COUNT LISTEN PEERS TRANSPORT …

It has one tier for each LISTEN, PEERS and TRANSPORT; peers map the arena of the first. It says the
port of a socket that answers each byte with all of its blocks' bytes, and ends with its input.
"""

from __future__ import annotations

import socket
import sys
import threading

import numpy as np

from penstock.config.shared_stores import PeerSettings
from penstock.store.base import DIGEST_BYTES, LentBlocks, MappedArena, Space, part_name
from penstock.store.peers.blobs import PeerBlobs
from penstock.store.peers.generations import FIRST
from penstock.store.peers.tier import PeerTier
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layout import Layout

SPACE = Space(b"peers".ljust(DIGEST_BYTES), FIRST)
LAYERS = 16
SALT = 7
TIMEOUT_S = 60.0


def make_arena(block_bytes: int, count: int) -> MappedArena:
    """An arena for blocks of one rank."""
    layout = Layout.opaque(
        layers=range(LAYERS),
        block_bytes=block_bytes // LAYERS,
        block_stride=block_bytes // LAYERS,
        encoding="bench",
        block_tokens=16,
        block_count=count,
    )
    host = HostTier.create(layout, count, huge_pages=False)
    form = Form(layout=layout, checksum=Algorithm.XXH3)
    return MappedArena(host, form, part_name(form, rank=0, rank_count=1, equal=True))


def keys_of(count: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "big") for number in range(1, count + 1)]


def make_tier(listen: str, peers: str, transport: str, *, maps: bool) -> PeerTier:
    """A tier whose arenas peers map, or may not map."""
    settings = PeerSettings(listen=listen, peers=peers, transport=transport, timeout_s=TIMEOUT_S)
    blobs = PeerBlobs(settings)
    if not maps:
        blobs.network.books.arena_address = ""
    return PeerTier(blobs, ask_s=TIMEOUT_S, timeout_s=TIMEOUT_S)


def _fill(arena: MappedArena, keys: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    host = arena.host
    memory = host.arena.bytes[host.blocks_offset :][: len(keys) * host.slot_bytes]
    blocks = memory.reshape(len(keys), -1)[:, : host.layout.block_bytes]
    blocks[:] = np.random.default_rng(1).integers(0, 256, blocks.shape, np.uint8)
    sums = arena.span.sum_blocks(blocks, keys, Algorithm.XXH3, salt=SALT)
    host.keep_sums(np.arange(len(keys), dtype=np.int32), sums)
    return blocks


def _send(listener: socket.socket, content: memoryview) -> None:
    peer, _ = listener.accept()
    while peer.recv(1):
        peer.sendall(content)


def main(block_bytes: int, count: int, places: list[str]) -> None:
    arena, keys = make_arena(block_bytes, count), keys_of(count)
    blocks = _fill(arena, keys)
    ways = zip(places[::3], places[1::3], places[2::3], strict=True)
    tiers = [make_tier(*each, maps=not number) for number, each in enumerate(ways)]
    for tier in tiers:
        tier.attach(SPACE.name, [arena])
        tier.lend(LentBlocks(1, [arena], SPACE, keys, range(count), SALT), [])
    listener = socket.create_server(("127.0.0.1", 0))
    content = np.ascontiguousarray(blocks).reshape(-1).data
    threading.Thread(target=_send, args=(listener, content), daemon=True).start()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
