"""A reset of a shared store stays one, though the store goes back to an earlier time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.runtime.sharing_engine import SharingEngine, of_redis, places_of
from tests.runtime.stored_engine import (
    SOON_S,
    all_but_the_last_block,
    process_of,
    prompt,
    said,
)
from tests.store.redis_server import RedisServer, require_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.runtime.sharing_engine import Place

PROMPTS = range(1, 5)
"""Twice what the memory of an engine holds."""
ALL_TOKENS = sum(all_but_the_last_block(prompt(number)) for number in PROMPTS)
QUICK = "ask_ms = 10000\ntimeout_s = 6\n"
"""A replica that does not answer is waited for for half of `timeout_s`."""


def redis_cli(server: RedisServer, *words: str) -> str:
    command = ["redis-cli", "-p", str(server.port), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def wait_for(server: RedisServer, found: str, *words: str) -> None:
    """Until a command of a server says so."""
    pause = threading.Event()
    deadline = time.monotonic() + SOON_S
    while found not in (said := redis_cli(server, *words)):
        assert time.monotonic() < deadline, said
        pause.wait(0.02)


class ReplicatedRedis:
    """A master with a replica that can be cut off, and takes the place of the master."""

    def __init__(self, folder: Path) -> None:
        self.master = RedisServer(folder / "master", "--repl-diskless-sync-delay", "0")
        self.replica = RedisServer(folder / "replica")
        self.join()

    def join(self) -> None:
        redis_cli(self.replica, "REPLICAOF", "127.0.0.1", str(self.master.port))
        wait_for(self.replica, "master_link_status:up", "INFO", "replication")
        wait_for(self.master, "state=online", "INFO", "replication")

    def cut_off(self) -> None:
        """The replica gets nothing any more, and the master has noticed."""
        self.replica.stop()
        redis_cli(self.master, "CLIENT", "KILL", "TYPE", "replica")
        wait_for(self.master, "connected_slaves:0", "INFO", "replication")

    def fail_over(self) -> None:
        """The master dies; the replica, as far as it had come, answers at its address."""
        self.master.kill()
        self.replica.proceed()
        redis_cli(self.replica, "REPLICAOF", "NO", "ONE")
        redis_cli(self.replica, "CONFIG", "SET", "port", str(self.master.port))
        self.replica.port = self.master.port

    def record(self) -> bytes:
        """What says which generation counts, in the server that was promoted."""
        name = redis_cli(self.replica, "KEYS", "*/generations")
        return redis_cli(self.replica, "--no-raw", "GET", name).encode()

    def kill(self) -> None:
        for server in (self.master, self.replica):
            if server.process is not None and server.process.poll() is None:
                server.proceed()
                server.kill()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ReplicatedRedis]:
    require_redis()
    servers = ReplicatedRedis(tmp_path)
    yield servers
    servers.kill()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with places_of(tmp_path, monkeypatch, QUICK) as place:
        yield place


def cached(engine: SharingEngine) -> int:
    """Tokens of the prompts that an engine finds."""
    found = 0
    for number in PROMPTS:
        engine.look_for(prompt(number))
        found += engine.answer(prompt(number))
        engine.run_until(lambda: not engine.cache.busy)
    return found


def save_all(engine: SharingEngine) -> None:
    for number in PROMPTS:
        engine.save(prompt(number))


def reset(engine: SharingEngine) -> None:
    """Resets, and waits until that is confirmed."""
    engine.cache.reset("weights in place")
    engine.run_until(lambda: said(engine).reset_confirmed)


def use_until_another_counts(engine: SharingEngine, record: Callable[[], bytes]) -> None:
    """Asks for other prompts until the record of the generation is another one.

    Its store process reads it every second while it is used.
    """
    before = record()
    deadline = time.monotonic() + SOON_S
    number = 100
    while record() == before:
        assert time.monotonic() < deadline, "the record of earlier is believed"
        number += 1
        engine.look_for(prompt(number))


def test_no_block_of_before_a_reset_comes_back_with_a_replica_that_was_behind(
    redis: ReplicatedRedis, place: Place
) -> None:
    engine = place("one", of_redis(redis.master))
    save_all(engine)
    redis_cli(redis.master, "WAIT", "1", "60000")
    redis.cut_off()
    reset(engine)

    redis.fail_over()
    use_until_another_counts(engine, redis.record)

    assert cached(engine) == 0
    assert engine.cache.statistics().blocks_corrupt == 0


@pytest.mark.parametrize(
    "who", ["has seen it", pytest.param("asked for it", marks=pytest.mark.long)]
)
def test_an_engine_tells_a_store_process_that_was_restarted_what_was_reset(
    redis: ReplicatedRedis, place: Place, who: str
) -> None:
    asking, other = place("one", of_redis(redis.master)), place("other", of_redis(redis.master))
    save_all(asking)
    asking.save(prompt(9))
    redis_cli(redis.master, "WAIT", "1", "60000")
    other.look_for(prompt(9))  # What it loads now stays in its own memory.
    assert in_store(other) > 0
    redis.cut_off()
    reset(asking)
    other.run_until(lambda: in_store(other) == 0)
    # A new process knows nothing of before, nor does any other one.
    for engine in (asking, other):
        os.kill(process_of(engine.folder), signal.SIGKILL)
        engine.run_until(lambda engine=engine: not engine.cache.health().ok)  # type: ignore[misc]

    redis.fail_over()
    engine = asking if who == "asked for it" else other
    engine.wait_until_on()

    assert cached(engine) == 0


def in_store(engine: SharingEngine) -> int:
    """Blocks that an engine knows to be in the store."""
    return engine.cache.statistics().tiers[-1].ready


def test_a_reset_is_kept_when_a_replica_has_it(redis: ReplicatedRedis, place: Place) -> None:
    engine = place("one", of_redis(redis.master))
    save_all(engine)
    redis.replica.stop()  # The master waits for it, for a minute.

    engine.cache.reset("weights in place")
    engine.run_until(lambda: not engine.cache.health().ok)

    [reason] = engine.cache.health().reasons
    assert "reset of tier shared is not kept yet" in reason
    assert "had no answer from its replica within" in reason
    assert not said(engine).reset_confirmed
    # It counts all the same: nothing old is found, and what is saved is.
    assert cached(engine) == 0
    assert cached(engine) == ALL_TOKENS

    redis.replica.proceed()
    engine.run_until(lambda: engine.cache.health().ok)
    assert said(engine).reset_confirmed
    # What was saved while the replica was behind was not voided once more.
    assert cached(engine) == ALL_TOKENS


@pytest.mark.parametrize(
    "restored", ["the records", pytest.param("all of it", marks=pytest.mark.long)]
)
def test_no_block_of_before_a_reset_comes_back_with_a_backup_of_a_folder(
    tmp_path: Path, place: Place, restored: str
) -> None:
    folder = tmp_path / "objects"
    engine = place("one", f'kind = "objects"\nurl = "file://{folder}"\n')
    save_all(engine)
    shutil.copytree(folder, tmp_path / "backup")
    reset(engine)

    parts = ["records"] if restored == "the records" else ["records", "values"]
    for part in parts:
        # The store process may write there at any time: what it has is moved away as a whole.
        (folder / part).rename(tmp_path / f"{part} of today")
        (tmp_path / "backup" / part).rename(folder / part)
    [record] = (folder / "records").rglob("=generations")
    use_until_another_counts(engine, record.read_bytes)

    assert cached(engine) == 0
