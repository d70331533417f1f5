"""Compressed blocks in a shared store: everybody reads them, and damaged ones are misses."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from obstore.store import MemoryStore

from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from lab.fixtures.store_tier_suite import WAIT_S
from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.clients.folder import FolderBlobs
from penstock.store.clients.objects import ObjectBlobs
from penstock.store.process.messages import StoreTierConfig
from penstock.store.process.tier_slots import open_shared
from penstock.store.shared import io
from penstock.store.shared.tier import SharedTier
from penstock.store.shared.values import CODEC_PLAIN, CODEC_PLANES, HEAD, HEAD_BYTES, _sum_of
from tests.store.shared_engines import NOISE, Engine, draw_chain
from tests.store.test_shared import found_in_time, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.store.base import EndedJob
    from penstock.store.clients.blobs import BlobStore

    OpenTier = Callable[..., SharedTier]


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def open_tier(server: MemoryServer) -> Iterator[OpenTier]:
    made: list[SharedTier] = []

    def make(*, compress: bool, blobs: BlobStore | None = None) -> SharedTier:
        blobs = blobs or MemoryBlobs(server)
        made.append(SharedTier(blobs, ask_s=WAIT_S, poll_s=0.05, absent_s=0, compress=compress))
        return made[-1]

    yield make
    for tier in made:
        tier.close(deadline=time.monotonic() + WAIT_S)


def name_of(server: MemoryServer, key: bytes) -> str:
    return next(name for name in server.values if name.endswith(key.hex()))


def head_of(value: bytes) -> np.void:
    head: np.void = np.frombuffer(value[:HEAD_BYTES], dtype=HEAD)[0]
    return head


def faults_of(ended: list[EndedJob]) -> dict[int, BlockFault]:
    return dict(ended[0].faults)


@pytest.mark.parametrize(("writes", "reads"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("ranks", "readers"), [(1, 1), (1, 2), (2, 1)], ids=["equal", "cut", "joined"]
)
def test_engines_read_each_others_blocks_whoever_compresses(
    open_tier: OpenTier,
    server: MemoryServer,
    ranks: int,
    readers: int,
    *,
    writes: bool,
    reads: bool,
) -> None:
    keys = draw_chain(1, 12)
    Engine(open_tier(compress=writes), split(ranks), salt=1).save(keys)
    engine = Engine(open_tier(compress=reads), split(readers), salt=2)

    found = found_in_time(engine, keys)
    first, again = engine.load(keys), engine.load(keys)

    codec = head_of(server.values[name_of(server, keys[0])])["codec"]
    assert codec == (CODEC_PLANES if writes else CODEC_PLAIN)
    assert found == len(keys)
    assert [each.faults for each in (*first, *again)] == [()] * 2 * readers
    engine.require_loaded(keys)


@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_every_kind_of_store_keeps_compressed_blocks(
    open_tier: OpenTier, tmp_path: Path, kind: str
) -> None:
    store = MemoryStore()

    def client() -> BlobStore:
        if kind == "folder":
            return FolderBlobs(tmp_path, threads=2)
        return ObjectBlobs(store, refresh_s=0.001, linger_s=0.005, threads=2)

    keys = draw_chain(1, 8)
    writer = Engine(open_tier(compress=True, blobs=client()), split(1), salt=1)
    writer.save(keys)
    engine = Engine(open_tier(compress=False, blobs=client()), split(2), salt=2)

    assert found_in_time(engine, keys) == 8
    engine.load(keys)

    engine.require_loaded(keys)
    state, plain = writer.tier.state(), writer.arenas[0].host.layout.block_bytes
    assert state.blocks == 8
    assert state.block_bytes < 0.8 * 8 * plain


def test_a_block_that_would_not_become_smaller_is_stored_as_it_is(
    open_tier: OpenTier, server: MemoryServer
) -> None:
    keys = draw_chain(NOISE, 3)
    engine = Engine(open_tier(compress=True), split(1))

    engine.save(keys)
    engine.load(keys)

    value = server.values[name_of(server, keys[0])]
    layout = engine.arenas[0].host.layout
    assert head_of(value)["codec"] == CODEC_PLAIN
    assert value.endswith(engine.expected(engine.arenas[0], keys[:1]).tobytes())
    assert len(value) == HEAD_BYTES + 8 * len(layout.cells) + layout.block_bytes
    engine.require_loaded(keys)


def _bomb(value: bytes, start: int) -> bytes:
    """The frame says that it has a terabyte, in the same number of bytes."""
    claim = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")
    at = start + 5
    return value[:at] + claim + value[at + len(claim) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda value, _: value[:-1],
        lambda value, start: value[: start + 3],
        lambda value, start: value[:start],
        lambda value, start: value[:start] + b"\xff" * (len(value) - start),
        lambda value, start: value[:start] + bytes(len(value) - start),
        lambda value, start: value[:start] + b"\x09" + value[start + 1 :],
        _bomb,
        lambda value, _: value[:-1] + bytes([value[-1] ^ 1]),
    ],
    ids=["cut", "cut early", "no block", "ones", "zeros", "item size", "bomb", "flipped"],
)
def test_a_damaged_stream_is_a_counted_miss_and_is_removed(
    open_tier: OpenTier,
    server: MemoryServer,
    damage: Callable[[bytes, int], bytes],
) -> None:
    keys = draw_chain(1, 3)
    Engine(open_tier(compress=True), split(1)).save(keys)
    engine = Engine(open_tier(compress=False), split(1), salt=2)
    assert found_in_time(engine, keys) == 3
    name = name_of(server, keys[1])
    start = HEAD_BYTES + 8 * len(engine.arenas[0].host.layout.cells)
    server.values[name] = damage(server.values[name], start)

    ended = engine.load(keys)

    assert faults_of(ended) == {1: BlockFault.CORRUPT}
    assert engine.tier.state().blocks_corrupt == 1
    assert name not in server.values
    engine.require_loaded(keys, ended)


def test_any_flipped_byte_of_a_compressed_value_is_a_miss(
    open_tier: OpenTier, server: MemoryServer
) -> None:
    keys = draw_chain(1, 1)
    engine = Engine(open_tier(compress=True), split(1))
    engine.save(keys)
    name = name_of(server, keys[0])
    value = server.values[name]
    for at in range(0, len(value), 97):
        server.values[name] = value[:at] + bytes([value[at] ^ 0x55]) + value[at + 1 :]
        ended = engine.load(keys)
        engine.require_loaded(keys, ended)
        assert faults_of(ended) == {0: BlockFault.CORRUPT}, at


def test_a_codec_that_is_not_known_is_missed_and_left_to_others(
    open_tier: OpenTier, server: MemoryServer
) -> None:
    keys = draw_chain(1, 2)
    engine = Engine(open_tier(compress=True), split(1))
    engine.save(keys)
    name = name_of(server, keys[1])
    front = HEAD_BYTES + 8 * len(engine.arenas[0].host.layout.cells)
    changed = np.frombuffer(server.values[name], dtype=np.uint8).copy()
    changed[:HEAD_BYTES].view(HEAD)["codec"] = 7
    changed[:HEAD_BYTES].view(HEAD)["sum"] = _sum_of(changed[:front])
    server.values[name] = changed.tobytes()

    ended = engine.load(keys)

    assert faults_of(ended) == {1: BlockFault.MISSING}
    assert engine.tier.state().blocks_corrupt == 0
    assert name in server.values


def test_without_the_package_compressed_blocks_are_missed_and_the_tier_that_wants_it_is_off(
    open_tier: OpenTier, server: MemoryServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = draw_chain(1, 2)
    Engine(open_tier(compress=True), split(1)).save(keys)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    engine = Engine(open_tier(compress=False), split(1), salt=2)

    ended = engine.load(keys)

    assert faults_of(ended) == {0: BlockFault.MISSING, 1: BlockFault.MISSING}
    assert name_of(server, keys[0])
    options = {"url": f"file://{tmp_path}", "compression": "zstd", "ask_ms": 50, "timeout_s": 2}
    with pytest.raises(UnavailableError, match=r'pip install "\.\[compression\]"'):
        open_shared(StoreTierConfig(name="shared", kind="objects", options=options))


def test_compressed_blocks_that_cannot_be_read_are_read_once_and_missed_as_another_form(
    open_tier: OpenTier,
    server: MemoryServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = draw_chain(1, 4)
    Engine(open_tier(compress=False), split(1)).save(keys[:1])
    Engine(open_tier(compress=True), split(1)).save(keys)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(io, "_warned", set())
    engine = Engine(open_tier(compress=False), split(1), salt=2)
    assert found_in_time(engine, keys) == 4
    engine.load(keys)
    server.calls.clear()

    found = [(engine.find(asked), engine.foreign) for asked in (keys, keys[1:], keys)]

    assert found == [(1, True), (0, True), (1, True)]
    assert "read" not in server.calls
    assert caplog.text.count('pip install ".[compression]"') == 1
    assert engine.load(keys[:1])[0].faults == ()


def test_a_block_that_could_not_be_read_is_found_again_once_it_was_written_anew(
    open_tier: OpenTier, server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = draw_chain(1, 2)
    Engine(open_tier(compress=True), split(1)).save(keys)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    engine = Engine(open_tier(compress=False), split(1), salt=2)
    engine.load(keys)
    engine.save(keys)
    still_there = engine.find(keys)
    for key in keys:
        del server.values[name_of(server, key)]  # As a store does that needs the room.

    engine.save(keys)

    assert still_there == 0
    assert engine.find(keys) == 2
    assert faults_of(engine.load(keys)) == {}
