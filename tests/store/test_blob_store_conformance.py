"""Clients of shared stores satisfy the sentences that all of them have to."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from penstock.config.shared_stores import MooncakeSettings, RedisSettings
from penstock.store.clients.blobs import BlobStoreError, BlobWrite
from penstock.store.clients.mooncake import MooncakeBlobs
from penstock.store.clients.redis import RedisBlobs
from penstock.testing.blob_store_suite import SOON_S, BlobStoreSuite, FailingBlobStoreSuite
from tests.store.mooncake_master import MooncakeMaster
from tests.store.redis_server import RedisServer, require_redis

if TYPE_CHECKING:
    from collections.abc import Iterator


class TestMemoryBlobs(BlobStoreSuite):
    @pytest.fixture(autouse=True)
    def serve(self) -> None:
        self.server = MemoryServer()

    def make_client(self) -> MemoryBlobs:
        return MemoryBlobs(self.server)


class TestRedisBlobs(FailingBlobStoreSuite):
    server: RedisServer

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        require_redis()
        cls.server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield
        cls.server.kill()

    def make_client(self) -> RedisBlobs:
        return RedisBlobs(RedisSettings(url=self.server.url))

    def stop_store(self) -> None:
        self.server.stop()

    def continue_store(self) -> None:
        self.server.proceed()

    def kill_store(self) -> None:
        self.server.kill()

    def start_store(self) -> None:
        self.server.start()


class _OpenForLong(MooncakeBlobs):
    """Closed at the end of all tests: Mooncake takes a second for it."""

    def close(self) -> None:
        pass


class TestMooncakeBlobs(FailingBlobStoreSuite):
    keeps_empty_values = False
    master: MooncakeMaster
    holder: MooncakeBlobs
    client: MooncakeBlobs

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def serve(cls) -> Iterator[None]:
        cls.master = MooncakeMaster()
        settings = MooncakeSettings(master=cls.master.address, segment_gib=0.25, threads=1)
        cls.holder = MooncakeBlobs(settings)
        cls.wait_for(cls.holder)
        cls.client = _OpenForLong(MooncakeSettings(master=cls.master.address))
        yield
        MooncakeBlobs.close(cls.client)
        cls.holder.close()
        cls.master.kill()

    @staticmethod
    def wait_for(blobs: MooncakeBlobs) -> None:
        """Until the master, and the memory that it gives out, are there."""
        deadline = time.monotonic() + SOON_S
        while True:
            try:
                write = BlobWrite("ready", [memoryview(b"1")])
                if blobs.write([write], timeout_s=SOON_S) == [""]:
                    return
            except BlobStoreError:
                pass
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)

    def make_client(self) -> MooncakeBlobs:
        return self.client

    def stop_store(self) -> None:
        self.master.stop()

    def continue_store(self) -> None:
        self.master.proceed()

    def kill_store(self) -> None:
        self.master.kill()

    def start_store(self) -> None:
        self.master.start()
        self.wait_for(self.holder)
