"""Caches that share a store: what one engine has computed, another one finds."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest
from moto.server import ThreadedMotoServer

from penstock import LeaseState
from tests.runtime.sharing_engine import SharingEngine, of_redis, places_of
from tests.runtime.stored_engine import SOON_S, all_but_the_last_block, process_of, prompt
from tests.stopped import stop_process
from tests.store.redis_server import RedisServer, require_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.runtime.sharing_engine import Place
    from tests.store.mooncake_master import MooncakeMaster


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with places_of(tmp_path, monkeypatch) as place:
        yield place


@pytest.fixture
def machine(place: Place, redis: RedisServer) -> Callable[[str], SharingEngine]:
    return lambda name: place(name, of_redis(redis))


def test_what_one_machine_has_computed_another_one_finds(
    machine: Callable[[str], SharingEngine],
) -> None:
    one, other = machine("one"), machine("other")
    one.save(prompt(1))

    other.look_for(prompt(1))

    assert other.answer(prompt(1)) == all_but_the_last_block(prompt(1))
    assert other.cache.statistics().blocks_corrupt == 0


def test_an_acquire_alone_finds_what_another_machine_has_stored(
    place: Place, tmp_path: Path
) -> None:
    store = f'kind = "objects"\nurl = "file://{tmp_path}/objects"\n'
    one, other = place("one", store), place("other", store)
    one.save(prompt(1))

    with other.cache.acquire(prompt(1), search_s=0) as lease:
        assert (lease.state, lease.cached_tokens) == (LeaseState.READY, 0)
    with other.cache.acquire(prompt(1)) as lease:
        assert lease.state is LeaseState.LOADING
        other.run_until(lambda: lease.state is not LeaseState.LOADING)
        assert lease.state is LeaseState.READY
        assert lease.cached_tokens == all_but_the_last_block(prompt(1))
        assert lease.cached_by_tier == (0, 0, all_but_the_last_block(prompt(1)))

    assert other.answer(prompt(1)) == all_but_the_last_block(prompt(1))
    assert other.answer(prompt(2)) == 0  # Nobody has it: it is computed.
    other.cache.audit()


def test_an_acquire_waits_no_longer_than_it_says_for_a_store_that_does_not_answer(
    place: Place, tmp_path: Path
) -> None:
    engine = place("one", f'kind = "objects"\nurl = "file://{tmp_path}/objects"\n')
    pid = process_of(tmp_path / "one")
    stop_process(pid)
    try:
        with engine.cache.acquire(prompt(1), search_s=0.05) as lease:
            assert lease.state is LeaseState.LOADING
            engine.run_until(lambda: lease.state is not LeaseState.LOADING)
            assert (lease.state, lease.cached_tokens) == (LeaseState.READY, 0)
            lease.commit_prompt(len(prompt(1)))
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_miss_says_that_blocks_are_there_in_a_form_that_cannot_be_read(
    place: Place, tmp_path: Path
) -> None:
    store = f'kind = "objects"\nurl = "file://{tmp_path}/objects"\n'
    place("one", store).save(prompt(1))
    with SharingEngine(tmp_path / "one", store, block_numbers=128) as other:
        other.wait_until_on()
        deadline = time.monotonic() + SOON_S
        reason = ""
        while reason != "form" and time.monotonic() < deadline:
            # Until it has read how others cut their blocks, nobody knows of them.
            other.look_for(prompt(1))
            with other.cache.acquire(prompt(1)) as lease:
                reason = lease.miss.reason.value

    assert reason == "form"


def test_a_miss_says_form_where_the_package_for_compressed_blocks_is_missing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f'kind = "objects"\nurl = "file://{tmp_path}/objects"\n'
    place("one", f'{store}compression = "zstd"\n').save(zeros := [0] * len(prompt(1)))
    without = tmp_path / "without"
    without.mkdir()
    (without / "zstandard.py").write_text("raise ImportError\n")
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{without}:{path}" if path else str(without))
    other = place("other", store)
    reasons = []
    for _ in range(5):  # What cannot be read is remembered for a while, which may be over.
        other.look_for(zeros)
        with other.cache.acquire(zeros) as lease:
            assert lease.cached_tokens == 0
            reasons.append(lease.miss.reason.value)

    assert "form" in reasons


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server that speaks S3, as keys of a tier."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    made = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
    urllib.request.urlopen(made, timeout=60).close()
    monkeypatch.setenv("OF_THE_TEST", "a secret")
    yield f"""
url = "s3://bucket/kv"
endpoint = "{endpoint}"
key_id_env = "OF_THE_TEST"
secret_env = "OF_THE_TEST"
"""
    server.stop()


# Other tests here have engines over a folder.
@pytest.mark.parametrize("where", ["bucket", pytest.param("folder", marks=pytest.mark.long)])
def test_what_one_machine_has_put_into_objects_another_one_finds(
    place: Place, tmp_path: Path, bucket: str, where: str
) -> None:
    keys = bucket if where == "bucket" else f'url = "file://{tmp_path}/objects"\n'
    store = f'kind = "objects"\nrefresh_s = 0.1\n{keys}'
    one, other = place("one", store), place("other", store)
    one.save(prompt(1))

    other.look_for(prompt(1))

    assert other.answer(prompt(1)) == all_but_the_last_block(prompt(1))
    assert other.cache.statistics().blocks_corrupt == 0


def test_machines_share_the_memory_that_one_of_them_lends_to_mooncake(
    master: MooncakeMaster, place: Place
) -> None:
    store = f'kind = "mooncake"\nmaster = "{master.address}"\n'
    one = place("one", store + "segment_gib = 0.1\n")
    other = place("other", store)
    one.save(prompt(1))

    other.look_for(prompt(1))

    assert other.answer(prompt(1)) == all_but_the_last_block(prompt(1))


def test_a_reset_on_one_machine_is_one_on_all(machine: Callable[[str], SharingEngine]) -> None:
    one, other = machine("one"), machine("other")
    one.save(prompt(1))
    one.save(prompt(2))
    other.look_for(prompt(1))
    assert in_store(other) > 0

    one.cache.reset("a test")
    one.run_until(lambda: one.cache.health().ok)
    other.run_until(lambda: in_store(other) == 0)
    other.look_for(prompt(2))

    assert other.answer(prompt(2)) == 0


def in_store(engine: SharingEngine) -> int:
    """Blocks that an engine knows to be in the store."""
    return engine.cache.statistics().tiers[-1].ready


def test_a_store_process_that_is_killed_finds_the_blocks_again(
    machine: Callable[[str], SharingEngine],
) -> None:
    engine = machine("one")
    engine.save(prompt(1))
    for number in range(2, 5):  # Host memory has forgotten the first one.
        engine.save(prompt(number))

    os.kill(process_of(engine.folder), signal.SIGKILL)
    engine.run_until(lambda: not engine.cache.health().ok)
    engine.wait_until_on()
    engine.look_for(prompt(1))

    assert engine.answer(prompt(1)) == all_but_the_last_block(prompt(1))


def test_a_wrong_address_leaves_the_tier_off_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_redis()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with SharingEngine(tmp_path, 'kind = "redis"\nurl = "redis://127.0.0.1:1"\n') as engine:
        engine.run_until(lambda: "127.0.0.1:1" in str(engine.cache.health().reasons))

        assert engine.save(prompt(1)) == 0
