"""What Mooncake Store adds to being a shared store: settings, staging memory, and what it lacks."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import Any

import pytest

from penstock.config.shared_stores import MooncakeSettings
from penstock.errors import ConfigError, UnavailableError
from penstock.store.clients.blobs import BlobOutcome, BlobRange, BlobRead, BlobStoreError, BlobWrite
from penstock.store.clients.mooncake import MooncakeBlobs
from tests.store.mooncake_master import MooncakeMaster, MooncakeSegment, require_mooncake
from tests.store.redis_server import free_port


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("master", {"master": ""}),
        ("master", {"master": "host"}),
        ("master", {"master": "etcd://user@host"}),
        ("master", {"master": None}),
        ("protocol", {"master": "a:1", "protocol": "udp"}),
        ("segment_gib", {"master": "a:1", "segment_gib": -1}),
        ("segment_gib", {"master": "a:1", "segment_gib": float("nan")}),
        ("segment_gib", {"master": "a:1", "segment_gib": "1"}),
        ("replicas", {"master": "a:1", "replicas": 0}),
        ("staging_mib", {"master": "a:1", "staging_mib": 0}),
        ("staging_mib", {"master": "a:1", "staging_mib": 1.5}),
        ("threads", {"master": "a:1", "threads": 65}),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    field: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        MooncakeSettings(**settings)

    assert caught.value.field == field


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)

    with pytest.raises(UnavailableError, match=r'pip install "\.\[mooncake\]"') as caught:
        MooncakeBlobs(MooncakeSettings(master="a:1"))

    assert "libibverbs1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_master_that_is_away_is_named_at_once() -> None:
    require_mooncake()
    address = f"127.0.0.1:{free_port()}"
    with closing(MooncakeBlobs(MooncakeSettings(master=address, threads=1))) as blobs:
        with pytest.raises(BlobStoreError, match=address):
            blobs.exists(["a"], timeout_s=60)
        with pytest.raises(BlobStoreError, match=address):
            blobs.exists(["a"], timeout_s=60)


def test_a_value_beyond_the_staging_memory_is_refused_before_it_is_sent() -> None:
    require_mooncake()
    settings = MooncakeSettings(master=f"127.0.0.1:{free_port()}", staging_mib=1, threads=1)
    with closing(MooncakeBlobs(settings)) as blobs:
        large = BlobWrite("large", [memoryview(bytes(1 << 20)), memoryview(b"1")])

        (problem,) = blobs.write([large], timeout_s=60)

        assert "1048577 bytes" in problem
        assert "staging_mib" in problem


@pytest.mark.long
def test_a_machine_that_stands_still_with_a_value_costs_a_read_its_time() -> None:
    master = MooncakeMaster()
    holder = MooncakeSegment(master)
    value = os.urandom(4 << 20)
    try:
        with closing(MooncakeBlobs(MooncakeSettings(master=master.address))) as blobs:
            writes = [BlobWrite(name, [memoryview(value)]) for name in ("a", "b")]
            assert blobs.write(writes, timeout_s=60) == ["", ""]
            memory = bytearray(len(value))
            read = BlobRead("a", [BlobRange(0, memoryview(memory))])

            holder.stop()
            with pytest.raises(BlobStoreError, match="did not answer"):
                blobs.read([read], timeout_s=0.5)
            memory[:] = b"\xa5" * len(memory)
            # The master knows the value all the same.
            assert blobs.exists(["a"], timeout_s=60) == [True]
            holder.proceed()

            # A master that missed the holder for too long has forgotten what it held.
            other = bytearray(len(value))
            reads = [BlobRead("b", [BlobRange(0, memoryview(other))])]
            (outcome,) = blobs.read(reads, timeout_s=60)
            assert outcome is BlobOutcome.MISSING or other == value
            assert set(memory) == {0xA5}
    finally:
        holder.kill()
        master.kill()
