"""Pages of a host pool over a real store process, called by several threads; no SGLang."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from penstock.connectors.sglang.pool_pages import PoolPages
from penstock.errors import UnavailableError
from tests.runtime.stored_engine import SOON_S, process_of
from tests.stopped import stop_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.machine.statistics import StoreStatistics

POOL_PAGES = 64
TOML = """
version = 1
model.name = "m"
model.weights_version = "v1"
cache.block_tokens = 16
[[tiers]]
name = "host"
kind = "host"
blocks = {host}
[[tiers]]
name = "disk"
kind = "disk"
path = "{path}"
gib = {gib}
write = "write_through"
"""


class Pool:
    """A host pool whose pages hold what their keys say, and the tiers below it."""

    def __init__(self, path: Path, *, host: int = 32, gib: float = 0.03) -> None:
        self.kv = np.zeros((POOL_PAGES, 1024), dtype=np.uint8)
        config = penstock.parse_config(TOML.format(path=path, host=host, gib=gib))
        offload = penstock.open_offload(config, kv=self.kv, wait_for_tiers_s=SOON_S)
        self.pages = PoolPages(offload)

    def save(self, keys: Sequence[bytes], first: int = 0) -> list[bool]:
        slots = range(first, first + len(keys))
        for slot, key in zip(slots, keys, strict=True):
            self.kv[slot] = content(key)
        return self.pages.save(keys, slots)

    def load(self, keys: Sequence[bytes], first: int = 0) -> list[bool]:
        """Which pages have arrived; those that have are what they should be."""
        slots = range(first, first + len(keys))
        self.kv[first : first + len(keys)] = 0
        arrived = self.pages.load(keys, slots)
        for slot, key, good in zip(slots, keys, arrived, strict=True):
            assert not good or (self.kv[slot] == content(key)).all()
        return arrived

    @property
    def disk(self) -> StoreStatistics:
        found = self.pages.statistics().tiers[-1].store
        assert found is not None
        return found


def content(key: bytes) -> np.ndarray:
    return np.frombuffer(key * 64, dtype=np.uint8)


def chain(name: str, count: int) -> list[bytes]:
    return [sha256(f"{name} {number}".encode()).digest()[:16] for number in range(count)]


@contextmanager
def opened(path: Path, *, host: int = 32, gib: float = 0.03) -> Iterator[Pool]:
    pool = Pool(path, host=host, gib=gib)
    try:
        yield pool
    finally:
        pool.pages.close(SOON_S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a disk is; calls wait for it as long as it takes: a busy machine is no failure."""
    for name in ("FIND_S", "LOAD_S", "SAVE_S"):
        monkeypatch.setattr(f"penstock.connectors.sglang.pool_pages.{name}", SOON_S)
    monkeypatch.setattr("penstock.store.process.link.SILENT_S", SOON_S)
    return tmp_path / "disk"


def test_a_second_engine_finds_and_loads_what_the_first_has_saved(folder: Path) -> None:
    keys = chain("a", 40)
    with opened(folder) as first:
        assert first.save(keys) == [True] * 40

    with opened(folder) as second:
        assert second.pages.find(keys) == 40
        assert second.load(keys, first=20) == [True] * 40
        assert second.pages.find(chain("b", 3)) == 0
        assert second.load(chain("b", 3)) == [False] * 3


def test_a_page_that_was_reported_as_saved_is_on_the_disk_when_everything_is_killed(
    folder: Path,
) -> None:
    keys = chain("a", 12)
    with opened(folder) as first:
        first.save(keys)
        os.kill(process_of(folder), signal.SIGKILL)

    with opened(folder) as second:
        assert second.pages.find(keys) == 12


def test_only_the_pages_before_a_missing_one_are_found_and_loaded(folder: Path) -> None:
    keys = chain("a", 8)
    with opened(folder) as pool:
        pool.save(keys[:5])
        pool.save(keys[6:])

        assert pool.pages.find(keys) == 5
        assert pool.load(keys) == [True] * 5 + [False] * 3


def test_what_another_engine_has_saved_since_is_found(folder: Path) -> None:
    with opened(folder) as one, opened(folder) as other:
        one.save(chain("a", 6))

        assert other.pages.find(chain("a", 6)) == 6
        assert other.load(chain("a", 6)) == [True] * 6


def test_more_pages_than_host_memory_has_pass_through_it(folder: Path) -> None:
    keys = chain("a", 60)
    with opened(folder, host=8) as pool:
        assert pool.save(keys) == [True] * 60
        assert pool.pages.find(keys) == 60
        assert pool.load(keys) == [True] * 60


def test_damage_on_the_disk_is_counted_and_never_served(folder: Path) -> None:
    keys = chain("a", 12)
    with opened(folder) as first:
        first.save(keys)
    (segment,) = folder.glob("*.segment")
    written = bytearray(segment.read_bytes())
    place = written.index(content(keys[7]).tobytes())
    written[place + 100] ^= 1
    segment.write_bytes(written)

    with opened(folder) as second:
        assert second.pages.find(keys) == 12
        assert second.load(keys) == [True] * 7 + [False] * 5

        assert second.pages.statistics().blocks_corrupt == 1
        assert second.pages.find(keys) == 7
        second.save(keys)
        assert second.load(keys) == [True] * 12


def test_without_a_store_process_pages_are_missed_and_nobody_waits(folder: Path) -> None:
    with opened(folder, host=8) as pool:
        pool.save(chain("a", 20))
        os.kill(process_of(folder), signal.SIGKILL)
        while pool.pages.health.ok:
            pool.pages.find(chain("b", 1))

        assert False in pool.load(chain("a", 20))


def test_a_store_process_that_stands_still_costs_a_call_its_deadline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder, host=8) as pool:
        saved = pool.save(chain("a", 20))
        for name in ("FIND_S", "LOAD_S", "SAVE_S"):
            monkeypatch.setattr(f"penstock.connectors.sglang.pool_pages.{name}", 0.3)
        process = process_of(folder)
        stop_process(process)
        try:
            missed = pool.load(chain("a", 20))
            found = pool.pages.find(chain("c", 2))
            refused = pool.save(chain("b", 20))
        finally:
            os.kill(process, signal.SIGCONT)
        monkeypatch.setattr("penstock.connectors.sglang.pool_pages.LOAD_S", SOON_S)

        assert all(saved)
        assert False in missed
        assert found == 0
        assert False in refused
        assert pool.load(chain("a", 20)) == [True] * 20, "it goes on where it stood"


def test_a_disk_that_is_full_gives_up_what_is_oldest(folder: Path) -> None:
    with opened(folder, gib=0.002) as pool:
        for number in range(40):
            pool.save(chain(str(number), 60))

        assert pool.disk.blocks_reclaimed > 0
        assert pool.load(chain("39", 60)) == [True] * 60
        assert pool.pages.find(chain("0", 60)) == 0


def test_a_call_does_not_wait_for_the_end_of_another(folder: Path) -> None:
    with opened(folder) as pool:
        pool.save(chain("a", 4))
        process = process_of(folder)
        stop_process(process)
        try:
            with ThreadPoolExecutor(2) as threads:
                saving = threads.submit(pool.save, chain("b", 4), 10)
                while not pool.pages.statistics().tiers[0].ready >= 8:
                    time.sleep(0.001)
                loaded = pool.load(chain("a", 4), first=20)
                was_saving = not saving.done()
                os.kill(process, signal.SIGCONT)
                saved = saving.result(SOON_S)
        finally:
            os.kill(process, signal.SIGCONT)

        assert loaded == [True] * 4
        assert was_saving
        assert saved == [True] * 4


def test_many_threads_get_their_own_answers(folder: Path) -> None:
    start = threading.Barrier(4)

    def work(pool: Pool, thread: int) -> None:
        start.wait(SOON_S)
        for number in range(12):
            keys = chain(f"{thread} {number}", 1 + (thread + number) % 9)
            assert pool.save(keys, first=thread * 16) == [True] * len(keys)
            assert pool.pages.find([*keys, *chain("nothing", 1)]) == len(keys)
            assert pool.load(keys, first=thread * 16) == [True] * len(keys)

    with opened(folder) as pool, ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(work, pool, thread) for thread in range(4)]:
            each.result(SOON_S)


def test_a_reset_voids_all_pages_for_later_engines_too(folder: Path) -> None:
    with opened(folder) as pool:
        pool.save(chain("a", 4))
        pool.pages.reset("a test")
        assert pool.pages.find(chain("a", 4)) == 0
        pool.save(chain("b", 4))

    with opened(folder) as later:
        assert later.pages.find(chain("a", 4)) == 0
        assert later.pages.find(chain("b", 4)) == 4


def test_after_the_end_calls_say_so(folder: Path) -> None:
    pool = Pool(folder)
    pool.pages.close(SOON_S)

    with pytest.raises(UnavailableError, match="closed"):
        pool.pages.find(chain("a", 1))


def test_an_error_of_one_call_is_raised_there_and_others_go_on(folder: Path) -> None:
    with opened(folder) as pool:
        with pytest.raises(ValueError, match="a key occurs twice"):
            pool.save(chain("a", 1) * 2)

        assert pool.save(chain("a", 1)) == [True]
