"""Clients of shared stores satisfy the sentences that all of them have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from penstock.store.redis_blobs import RedisBlobs
from penstock.store.redis_connections import RedisSettings
from penstock.testing.blob_store_suite import BlobStoreSuite, FailingBlobStoreSuite
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
