"""Engines find each other in a Redis: they come and go, and so does the Redis; strangers."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from penstock.cache.operations import BlockFault
from penstock.config.shared_stores import PeerSettings
from penstock.errors import ConfigError
from penstock.store.peers import discovery, network
from penstock.store.peers.blobs import PeerBlobs
from penstock.store.peers.tier import PeerTier
from penstock.transport.machine_keys import MachineKeys
from tests.ports import free_ports
from tests.store.redis_server import RedisServer, require_redis
from tests.store.shared_engines import SPACE, draw_chain
from tests.store.test_peers import PeerEngine, locked, until
from tests.store.test_shared import split

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENTRY_S = 60
"""Longer than a test, but for those where entries end."""


class FoundPeers:
    """Store processes, all of them in this one, that know a Redis and nothing else."""

    def __init__(self, folder: Path, redis: RedisServer, stack: ExitStack) -> None:
        self._folder, self.redis, self._stack = folder, redis, stack

    def tier(self, listen: str = "", **others: object) -> PeerTier:
        listen = listen or f"127.0.0.1:{free_ports(1)[0]}"
        fields = {"listen": listen, "peers": self.redis.url, "timeout_s": 60.0} | others
        settings = PeerSettings(**fields)  # type: ignore[arg-type]
        tier = PeerTier(PeerBlobs(settings), ask_s=60, timeout_s=settings.timeout_s)
        self._stack.callback(lambda: tier.close(deadline=time.monotonic() + 5))
        return tier

    def engine(self, listen: str = "", **others: object) -> PeerEngine:
        return PeerEngine(self.tier(listen, **others), split(1))

    def engine_with(self, keys: MachineKeys, listen: str = "") -> PeerEngine:
        file = self._folder / keys.public
        keys.write(file, replace=True)
        return self.engine(listen, keys_file=str(file))

    def command(self, *words: str | int) -> object:
        """What the Redis answers."""
        from redis import Redis  # noqa: PLC0415 - The fixture has seen that it is there.

        with Redis(port=self.redis.port) as client:
            return client.execute_command(*words)

    def plant(self, entry: str) -> None:
        self.command("ZADD", "penstock:peers", 1 << 40, entry)

    def entries(self) -> list[bytes]:
        entries = self.command("ZRANGE", "penstock:peers", 0, -1)
        assert isinstance(entries, list)
        return entries


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoundPeers]:
    require_redis()
    for name in ("RETRY_S", "RESOLVE_S"):
        monkeypatch.setattr(network, name, 0.02)
    monkeypatch.setattr(network, "RETRY_MAX_S", 0.05)
    monkeypatch.setattr(discovery, "ENTRY_S", ENTRY_S)
    redis = RedisServer(tmp_path / "redis")
    try:
        with ExitStack() as stack:
            yield FoundPeers(tmp_path, redis, stack)
    finally:
        redis.kill()


def unaware(tier: PeerTier) -> str:
    return "; ".join(locked(tier, lambda: tier._network.unaware(SPACE)))


def test_engines_that_know_a_redis_alone_find_each_others_blocks(
    found: FoundPeers, tmp_path: Path
) -> None:
    one, other = found.engine(), found.engine(listen=f"unix:{tmp_path}/other")
    keys, more = draw_chain(1, 3), draw_chain(2, 2)

    one.lend(keys)
    other.lend(more)

    other.knows(3)
    assert other.faults_of(keys) == set()
    other.require_loaded(keys)
    one.knows(2)
    assert one.faults_of(more) == set()


def test_an_engine_that_listens_everywhere_is_found_where_it_reaches_the_redis(
    found: FoundPeers, tmp_path: Path
) -> None:
    keys, [port] = MachineKeys.new(), free_ports(1)
    keys.write(tmp_path / "keys")

    found.tier(f"0.0.0.0:{port}", keys_file=str(tmp_path / "keys"))

    until(lambda: found.entries() == [f"127.0.0.1:{port} {keys.public}".encode()])


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_engines_keep_their_peers_while_the_redis_is_away_and_find_others_once_it_is_back(
    found: FoundPeers, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "REDIS_S", 0.05)
    one, other = found.engine(), found.engine()
    keys, more = draw_chain(1, 3), draw_chain(2, 2)
    one.lend(keys)
    other.knows(3)

    getattr(found.redis, how)()
    until(lambda: "is not known" in unaware(other.tier))

    assert other.faults_of(keys) == set()
    one.lend(more)
    other.knows(5)
    alone = found.engine()
    assert alone.find(keys) == 0
    assert alone.tier.state().on
    if how == "kill":
        found.redis.start()  # It has forgotten all.
    else:
        found.redis.proceed()
    alone.knows(5)
    assert alone.faults_of(more) == set()
    assert other.tier.state().blocks == 5
    until(lambda: unaware(other.tier) == "")


def test_an_engine_that_goes_is_waited_for_until_its_entry_ends(
    found: FoundPeers,
) -> None:
    place = f"127.0.0.1:{free_ports(1)[0]}"
    one, other = found.engine(place), found.engine()
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)

    one.tier.close(deadline=time.monotonic() + 5)

    other.knows(0)
    until(lambda: "is away" in unaware(other.tier))
    found.command("ZADD", "penstock:peers", 1, place)  # A minute later.
    until(lambda: unaware(other.tier) == "")
    assert len(found.entries()) == 1
    again = found.engine(place)
    again.lend(keys)
    other.knows(3)
    assert other.faults_of(keys) == set()


def test_an_entry_of_nobody_costs_no_more_than_a_miss(found: FoundPeers) -> None:
    found.plant(f"127.0.0.1:{free_ports(1)[0]}")
    one, other = found.engine(), found.engine(timeout_s=0.2)
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)
    with one.tier._network.lock:  # What is listed is not there any more.
        one.tier._network.books.lendings.lenders[0].slots.clear()
    for listing in other.maps(3):
        listing.arenas.clear()

    assert other.faults_of(keys) == {BlockFault.MISSING}

    assert other.tier.state().on


@pytest.mark.parametrize("says", ["its own key", "a key that is listed"])
def test_an_engine_of_another_cluster_in_the_same_redis_lists_and_reads_nothing(
    found: FoundPeers, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    keys, foreign = MachineKeys.new(), MachineKeys.new()
    one = found.engine_with(keys)
    [port] = free_ports(1)
    stranger = found.engine_with(foreign.with_peer("example", keys.public), f"127.0.0.1:{port}")
    stranger.lend(draw_chain(1, 3))
    if says == "a key that is listed":
        found.plant(f"127.0.0.1:{port} {keys.public}")
        until(lambda: f"{port} is away" in unaware(one.tier))  # It is dialled.
    until(lambda: "not listed in keys_file" in caplog.text)

    mate = found.engine_with(keys)
    mate.lend(draw_chain(2, 2))

    one.knows(2)
    assert stranger.tier.state().blocks == 0
    assert f"{port} is away" in unaware(one.tier) or says == "its own key"


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "0.0.0.0:5300",
        "10.0.0.1:5300",
        "localhost",
        "name.example:5300",
        "unix:relative",
        "?" * 9999,
    ],
)
def test_an_entry_that_is_none_is_left_out_and_named_in_the_log(
    found: FoundPeers, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    found.plant(entry)
    one, other = found.engine(), found.engine()
    keys = draw_chain(1, 3)

    one.lend(keys)

    other.knows(3)
    lines = [each for each in caplog.messages if "peer is not dialled" in each]
    assert len(lines) == 2  # Once for each engine.
    assert all(len(each) < 1024 for each in lines)


def test_a_redis_that_has_something_else_there_is_named_and_changes_nothing(
    found: FoundPeers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    found.command("SET", "penstock:peers", "something else")
    one, other = found.engine(), found.engine()
    until(lambda: "WRONGTYPE" in caplog.text)

    found.command("DEL", "penstock:peers")

    one.lend(draw_chain(1, 3))
    other.knows(3)


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"peers": "redis://:secret@host:6379"}, "peers", "which has a password"),
        ({"peers": "redis://host:6379,redis://other:6379"}, "peers", "must be redis://"),
        ({"peers": "127.0.0.1:1,redis://:secret@host:6379"}, "peers", "must be HOST:PORT"),
        ({"peers": "127.0.0.1:1", "password_env": "X"}, "password_env", "no effect"),
        ({"peers": "redis://host", "ca_file": "/x"}, "ca_file", "no effect without TLS"),
        ({"peers": "redis://host", "listen": "0.0.0.0:1"}, "keys_file", "must be the file"),
    ],
)
def test_a_redis_that_cannot_be_right_is_refused_and_no_password_is_shown(
    given: dict[str, str], field: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        PeerSettings(**{"listen": "127.0.0.1:1"} | given)  # type: ignore[arg-type]

    assert refused.value.field == field
    assert "secret" not in str(refused.value)
