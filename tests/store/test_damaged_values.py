"""Something else lies under the name of a value or a record: it costs that one, never the tier."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.store import MemoryStore

from lab.fixtures.store_tier_suite import WAIT_S, wait_for_news
from penstock.cache.operations import BlockFault
from penstock.config.shared_stores import MooncakeSettings, RedisSettings
from penstock.store.clients.blobs import BlobStoreError, BlobWrite
from penstock.store.clients.folder import FolderBlobs
from penstock.store.clients.mooncake import MooncakeBlobs
from penstock.store.clients.objects import ObjectBlobs
from penstock.store.clients.redis import RedisBlobs
from penstock.store.shared.tier import SharedTier
from penstock.store.shared.values import generation_name, geometry_name, piece_of, value_name
from penstock.store.stored_tier import FAILURES_MAX
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import DType
from tests.store.mooncake_master import MooncakeMaster
from tests.store.shared_engines import SLOT_COUNT, SPACE, Engine, draw_chain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.store.clients.blobs import BlobStore
    from tests.store.redis_server import RedisServer

    Damage = Callable[[str], None]

LAYOUT = Layout.split(
    layers=range(2),
    heads=HeadRange.all_of(2),
    channels=8,
    dtype=DType.BF16,
    block_tokens=16,
    block_count=SLOT_COUNT,
)


def open_tier(blobs: BlobStore) -> SharedTier:
    return SharedTier(blobs, ask_s=WAIT_S, timeout_s=WAIT_S, poll_s=0.05, absent_s=0)


def blobs_of_redis(server: RedisServer) -> RedisBlobs:
    return RedisBlobs(RedisSettings(url=server.url))


def in_redis(server: RedisServer, *command: str) -> Damage:
    """Puts something else under a name."""
    import redis  # noqa: PLC0415 - an extra

    def damage(name: str) -> None:
        with redis.Redis(port=server.port) as client:
            client.delete(name)
            client.execute_command(command[0], name, *command[1:])

    return damage


def path_of(folder: Path, name: str) -> Path:
    """The file of a value or a record."""
    before, _, last = name.rpartition("/")
    [found] = folder.glob(f"*/{before}/={last}")
    return found


def check_a_damaged_value(blobs: BlobStore, damage: Damage) -> None:
    """One of three blocks is damaged, and as often as would switch the tier off."""
    engine = Engine(open_tier(blobs), [LAYOUT])
    keys = draw_chain(1, 3)
    name = value_name(engine.space, piece_of(engine.arenas[0]), keys[1])
    try:
        for _ in range(FAILURES_MAX + 1):
            engine.save(keys)
            damage(name)
            [ended] = engine.load(keys)
            assert ended.faults == ((1, BlockFault.CORRUPT),)
            engine.require_loaded(keys, [ended])
        # It was removed, so it can be written again.
        assert blobs.exists([name], timeout_s=WAIT_S) == [False]
        engine.save(keys)
        [ended] = engine.load(keys)
        assert ended.faults == ()
        assert engine.tier.state().on
        assert engine.tier.state().blocks_corrupt == FAILURES_MAX + 1
    finally:
        engine.tier.close(deadline=time.monotonic() + WAIT_S)


def check_damaged_records(blobs: BlobStore, damage: Damage) -> None:
    """Nothing old is found, and the tier goes on."""
    engine = Engine(open_tier(blobs), [LAYOUT])
    keys = draw_chain(1, 3)
    try:
        engine.save(keys)
        wait_for_geometry(blobs, engine)
        damage(geometry_name(engine.space, 0))
        damage(generation_name(SPACE))
        deadline = time.monotonic() + WAIT_S
        while engine.tier.generation(SPACE) in {None, engine.space.generation}:
            assert time.monotonic() < deadline, engine.tier.state()
            wait_for_news(engine.tier, 0.05)
            engine.tier.take_generations()
        engine.follow()

        assert engine.find(keys) == 0
        engine.save(keys)
        assert engine.find(keys) == 3
        assert engine.tier.state().on
    finally:
        engine.tier.close(deadline=time.monotonic() + WAIT_S)


def wait_for_geometry(blobs: BlobStore, engine: Engine) -> None:
    deadline = time.monotonic() + WAIT_S
    while blobs.get(geometry_name(engine.space, 0), timeout_s=WAIT_S) is None:
        assert time.monotonic() < deadline
        wait_for_news(engine.tier, 0.05)


def test_a_hash_under_the_name_of_a_redis_value_is_corrupt_and_unlinked(
    redis: RedisServer,
) -> None:
    check_a_damaged_value(blobs_of_redis(redis), in_redis(redis, "HSET", "a", "b"))


@pytest.mark.parametrize(
    "command", [("RPUSH", "a"), ("SET", "x" * 70_000), ("SET", "")], ids=["list", "long", "empty"]
)
def test_a_redis_record_that_is_none_is_replaced(
    redis: RedisServer, command: tuple[str, ...]
) -> None:
    check_damaged_records(blobs_of_redis(redis), in_redis(redis, *command))


def put_folder(path: Path) -> None:
    (path / "in it").mkdir(parents=True)


FILES = {
    "folder": put_folder,
    "pipe": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("put", FILES.values(), ids=FILES)
@pytest.mark.parametrize("check", [check_a_damaged_value, check_damaged_records])
def test_what_is_no_file_of_ours_in_a_folder_is_removed(
    tmp_path: Path, check: Callable[[BlobStore, Damage], None], put: Callable[[Path], None]
) -> None:
    def damage(name: str) -> None:
        path = path_of(tmp_path, name)
        path.unlink()
        put(path)

    check(FolderBlobs(tmp_path), damage)


def test_a_cut_object_costs_the_values_that_it_lacks() -> None:
    memory = MemoryStore()

    def damage(_: str) -> None:
        # The first of three values is whole, and nothing is left of the last one.
        [*_, newest] = sorted(each["path"] for each in obstore.list(memory, "data").collect())
        body = bytes(obstore.get(memory, newest).bytes())
        obstore.put(memory, newest, body[: len(body) // 2])

    tier = open_tier(ObjectBlobs(memory, refresh_s=0.001, linger_s=0.005))
    engine = Engine(tier, [LAYOUT])
    keys = draw_chain(1, 3)
    try:
        for _ in range(FAILURES_MAX + 1):
            engine.save(keys)
            damage("")
            [ended] = engine.load(keys)
            engine.require_loaded(keys, [ended])
            faults = dict(ended.faults)
            assert set(faults.values()) == {BlockFault.CORRUPT}
        assert tier.state().on
        engine.save(keys)
        [ended] = engine.load(keys)
        assert ended.faults == ()
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)


def test_an_object_that_is_no_record_is_replaced() -> None:
    memory = MemoryStore()
    blobs = ObjectBlobs(memory, refresh_s=0.001, linger_s=0.005)

    check_damaged_records(
        blobs, lambda name: obstore.put(memory, f"records/{name}", bytes(100_000)) and None
    )


def test_bytes_that_are_no_record_of_mooncake_are_replaced() -> None:
    master = MooncakeMaster()
    settings = MooncakeSettings(master=master.address, segment_gib=0.0625, threads=1)
    try:
        with closing(MooncakeBlobs(settings)) as blobs:
            write = BlobWrite("record", [memoryview(b"other")])
            wait_until_written(blobs, write)

            assert blobs.get("record", timeout_s=WAIT_S) == b""
            assert not blobs.create("record", b"new", timeout_s=WAIT_S)
            blobs.replace("record", b"new", timeout_s=WAIT_S)
            assert blobs.get("record", timeout_s=WAIT_S) == b"new"
    finally:
        master.kill()


def wait_until_written(blobs: BlobStore, write: BlobWrite) -> None:
    """A master says nothing when it is ready."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            assert blobs.write([write], timeout_s=WAIT_S) == [""]
        except BlobStoreError:
            assert time.monotonic() < deadline
        else:
            return
