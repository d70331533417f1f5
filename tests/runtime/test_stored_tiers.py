"""A cache with a disk below its host memory: blocks outlive the process that saved them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.runtime.stored_tiers import store_config
from penstock.store.process.sessions import StoreListener
from tests.descriptors import open_descriptors
from tests.runtime.stored_engine import (
    BLOCK_TOKENS,
    SOON_S,
    Engine,
    all_but_the_last_block,
    on_disk,
    processes_of,
    prompt,
    said,
    store_pid,
)
from tests.stopped import stop_process
from tests.transport.test_strangers import NOBODY, as_nobody, as_root

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Engine]:
    return lambda **given: Engine(tmp_path / "disk", **given)


def test_a_cache_that_is_opened_again_finds_what_the_last_one_saved(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        assert engine.save(prompt(1)) == 0
    with opened() as engine:
        engine.wait_until_on()

        assert engine.answer(prompt(1)) == all_but_the_last_block(prompt(1))
        assert engine.cache.statistics().blocks_corrupt == 0


def test_more_than_host_memory_holds_comes_back_from_the_disk(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        for number in range(12):  # 96 blocks: six times what host memory holds.
            engine.save(prompt(number))

        for number in range(12):
            assert engine.save(prompt(number)) == all_but_the_last_block(prompt(number))
        engine.cache.audit()


def test_what_was_ordered_since_the_last_step_is_sent_before_an_engine_waits(
    opened: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.process.link.PING_S", 1000.0)  # Nothing else wakes it.
    with opened() as engine:
        engine.wait_until_on()
        for number in range(4):
            engine.save(prompt(number))

        with engine.cache.acquire(prompt(0)) as lease:
            while lease.state is penstock.LeaseState.LOADING:
                engine.cache.wait(time.monotonic() + SOON_S)
                engine.cache.step()

            assert lease.token_count == all_but_the_last_block(prompt(0))


def test_a_store_process_that_is_killed_is_started_again_and_finds_its_blocks(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        for number in range(2, 6):  # Out of the host memory, which holds two of them.
            engine.save(prompt(number))
        os.kill(store_pid(engine), signal.SIGKILL)
        engine.run_until(lambda: not engine.cache.health().ok)

        assert engine.answer(prompt(9)) == 0  # Without the store requests are computed.
        engine.wait_until_on()
        engine.run_until(lambda: not engine.cache.busy)
        assert engine.answer(prompt(1)) == all_but_the_last_block(prompt(1))
        engine.cache.audit()


def test_a_store_process_that_is_stopped_hangs_nobody(
    opened: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.process.link.SILENT_S", 0.5)
    with opened() as engine:
        engine.wait_until_on()
        for number in range(6):
            engine.save(prompt(number))
        pid = store_pid(engine)
        stop_process(pid)
        try:
            for number in range(6, 10):
                assert engine.answer(prompt(number)) == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        engine.run_until(lambda: not engine.cache.busy)
        engine.wait_until_on()
        engine.cache.audit()


def test_after_a_reset_nothing_that_was_stored_is_found_again(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        engine.cache.reset("the operator wants it")
        engine.wait_until_on()

        assert engine.save(prompt(1, blocks=4)) == 0
    with opened() as engine:
        engine.run_until(lambda: on_disk(engine) == 4)  # Those that were saved after the reset.

        assert engine.answer(prompt(1)) == 4 * BLOCK_TOKENS


def test_an_engine_keeps_a_reset_although_a_backup_of_the_folder_is_restored(
    opened: Callable[..., Engine], tmp_path: Path
) -> None:
    """Nothing in the folder shows that it is old, and the process that voided it is dead."""
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        engine.run_until(lambda: said(engine).blocks == 8)
        without_socket = shutil.ignore_patterns("socket*")
        shutil.copytree(engine.folder, tmp_path / "backup", ignore=without_socket)
        engine.cache.reset("weights in place")
        engine.run_until(lambda: said(engine).reset_confirmed)
        os.kill(store_pid(engine), signal.SIGKILL)
        shutil.rmtree(engine.folder)
        shutil.copytree(tmp_path / "backup", engine.folder)
        engine.run_until(lambda: not engine.cache.health().ok)

        engine.wait_until_on()

        assert engine.save(prompt(1)) == 0
        assert said(engine).generations_lost == 1


def test_a_reset_while_the_store_is_away_is_told_and_kept_when_it_is_back(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        engine.run_until(lambda: said(engine).blocks == 8)
        os.kill(store_pid(engine), signal.SIGKILL)
        engine.run_until(lambda: not engine.cache.health().ok)

        engine.cache.reset("the operator wants it")

        told = "reset of tier disk is not kept yet: its blocks are found again if this process ends"
        assert any(told in reason for reason in engine.cache.health().reasons)
        assert not said(engine).reset_confirmed
        # Closing gives the store time to keep it.
    with opened() as engine:
        engine.wait_until_on()
        assert said(engine).reset_confirmed
        assert engine.answer(prompt(1)) == 0


def test_other_weights_find_nothing_and_the_old_ones_their_own(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
    with opened(weights="v2") as engine:
        engine.wait_until_on()
        assert engine.save(prompt(1, blocks=2)) == 0
        engine.cache.change_weights("v1")
        engine.run_until(lambda: on_disk(engine) == 8)

        assert engine.answer(prompt(1)) == all_but_the_last_block(prompt(1))


def test_with_weights_that_are_no_longer_known_nothing_is_stored(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        engine.cache.change_weights("")
        engine.run_until(
            lambda: any(
                "model.weights_version is not given" in each
                for each in engine.cache.health().reasons
            )
        )

        engine.save(prompt(2))

        assert on_disk(engine) == 0
        engine.cache.change_weights("v1")
        engine.run_until(lambda: on_disk(engine) == 8)
        assert engine.answer(prompt(1)) == all_but_the_last_block(prompt(1))


def test_with_unknown_weights_nothing_is_stored(
    opened: Callable[..., Engine], tmp_path: Path
) -> None:
    with opened(weights="") as engine:
        engine.save(prompt(1))

        [reason] = engine.cache.health().reasons
        assert "model.weights_version is not given" in reason
        assert not engine.cache.persists
    assert not (tmp_path / "disk").exists()


def test_a_prefetch_brings_blocks_to_host_memory_before_they_are_acquired(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
    with opened() as engine:
        engine.wait_until_on()
        engine.cache.prefetch(prompt(1), request="soon")
        engine.run_until(lambda: engine.cache.statistics().tiers[1].ready == 8)
        lease = engine.cache.acquire(prompt(1))

        # They count for where they came from.
        assert lease.cached_by_tier[1:] == (0, all_but_the_last_block(prompt(1)))
        lease.release()


def test_two_engines_of_one_machine_share_a_folder(opened: Callable[..., Engine]) -> None:
    with opened() as first, opened() as second:
        first.wait_until_on()
        second.wait_until_on()
        first.save(prompt(1))

        second.cache.prefetch(prompt(1))
        second.run_until(lambda: second.cache.statistics().tiers[1].ready == 8)
        assert second.answer(prompt(1)) == all_but_the_last_block(prompt(1))
        second.cache.audit()


def test_statistics_show_what_the_store_has(opened: Callable[..., Engine]) -> None:
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        engine.run_until(lambda: said(engine).blocks == 8)

        assert said(engine).block_bytes == 8 * 256 * 8
        assert said(engine).recovered == 1
        assert said(engine).capacity_bytes > 0


def test_a_path_that_is_a_file_is_the_reason_why_the_disk_is_off(
    opened: Callable[..., Engine], tmp_path: Path
) -> None:
    (tmp_path / "disk").write_text("not a folder")
    with opened() as engine:
        engine.run_until(lambda: "Not a directory" in engine.cache.health().reasons[0])

        assert engine.save(prompt(1)) == 0
    assert (tmp_path / "disk").read_text() == "not a folder"


def test_a_folder_that_cannot_be_made_is_the_reason_why_the_disk_is_off(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    told = f"tier disk is off: folder {tmp_path / 'gone'} cannot be used: File exists"
    with Engine(tmp_path / "gone") as engine:
        engine.run_until(lambda: engine.cache.health().reasons == (told,))

        assert engine.save(prompt(1)) == 0


def test_nothing_is_left_behind(opened: Callable[..., Engine]) -> None:
    before = open_descriptors()
    with opened() as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        pid = store_pid(engine)

    assert not Path(f"/proc/{pid}").exists()
    assert open_descriptors() <= before


SHARED = """
version = 1
[model]
name = "m"
weights_version = "v1"
[[tiers]]
name = "host"
kind = "host"
blocks = 16
[[tiers]]
name = "shared"
kind = "redis"
url = "redis://127.0.0.1:1"
"""


@as_root
def test_folders_that_another_user_made_first_do_not_switch_shared_tiers_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(os.path.realpath("/tmp")) / f"penstock-sticky-{os.getpid()}"
    root.mkdir()
    root.chmod(0o1777)
    config = penstock.parse_config(SHARED)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(root))

    def serve() -> None:
        store = store_config(config)
        assert store is not None
        # The second one is an engine that was started with the same configuration.
        assert store_config(config) == store
        StoreListener.open(Path(store.socket))

    try:
        (root / f"penstock-{NOBODY}").mkdir(mode=0o700)  # As it was called once.
        assert as_nobody(serve) == "done"
        for found in root.glob(f"penstock-shared-{NOBODY}-*"):
            os.chown(found, 0, 0)

        assert as_nobody(serve) == "done"
    finally:
        shutil.rmtree(root)


def test_a_store_whose_folder_was_removed_is_found_by_the_next_session_and_by_other_engines(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "disk"
    with Engine(folder) as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        store = store_pid(engine)
        shutil.rmtree(folder)
        engine.save(prompt(2))  # It is noticed by then, or by the next one.
        engine.run_until((folder / "socket").exists)

        engine.cache.change_weights("v2")
        engine.wait_until_on()
        with Engine(folder) as other:
            other.wait_until_on()

            assert processes_of(folder) == {store}


def test_what_an_engine_has_from_before_the_reset_of_another_is_not_written_after_it(
    tmp_path: Path,
) -> None:
    folder, before, longer = tmp_path / "disk", prompt(1, 4), prompt(1, 8)
    with Engine(folder) as engine, Engine(folder) as other:
        engine.wait_until_on()
        other.wait_until_on()
        engine.save(before)
        other.cache.reset("weights in place")
        other.run_until(lambda: said(other).reset_confirmed)
        engine.run_until(lambda: on_disk(engine) == 0)

        kept = engine.save(longer)
        with Engine(folder) as third:
            third.wait_until_on()
            third.run_until(lambda: on_disk(third) == 4)

            assert kept == len(before), "it has them in its own memory"
            assert third.answer(longer) == 0


def test_an_engine_with_another_key_is_refused_by_the_process_that_serves_its_folder(
    tmp_path: Path,
) -> None:
    folder, key = tmp_path / "disk", tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    with Engine(folder) as engine:
        engine.wait_until_on()

        with Engine(folder, key_file=key) as other:
            other.run_until(lambda: "key_file" in "".join(other.cache.health().reasons))
            other.answer(prompt(1))

            assert said(engine).blocks == 0
