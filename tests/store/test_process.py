"""The store process: engines save, load and find blocks in it, over its socket."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.machine.events import Vanished
from penstock.store.process.link import (
    STEP_KEYS_MAX,
    FoundInStore,
    Paged,
    StoreState,
    Voided,
)
from penstock.store.process.tier_slots import TierSlot
from tests.store.segments import BLOCK_BYTES
from tests.store.store_lab import DISK, PATIENCE_S, StoreEngine, StoreProcess, key_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from penstock.store.base import StoreTier
    from penstock.store.process.messages import StoreTierConfig
    from tests.store.store_lab import MakeEngine


def test_what_was_saved_is_loaded_into_other_slots(make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    numbers = range(10)

    saved = engine.save(numbers)
    loaded = engine.load(numbers)

    assert [(report.faults, report.failure) for report in saved + loaded] == [((), "")] * 2
    assert all(engine.holds(32 + number, number) for number in numbers)


def test_every_rank_reports_on_its_own_part(make_engine: MakeEngine) -> None:
    engine = make_engine(ranks=3).up()

    engine.save([1, 2])
    engine.load([1, 2])

    assert engine.holds(32, 1)
    assert engine.holds(33, 2)


def test_a_block_that_is_not_there_is_missing(make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    engine.save([1])

    (report,) = engine.load([1, 2])

    assert report.faults == ((1, BlockFault.MISSING),)
    assert report.failure == ""


def test_a_block_counts_as_there_if_every_rank_has_it(make_engine: MakeEngine) -> None:
    engine = make_engine(ranks=2).up()
    engine.save([1, 2])
    engine.fill(0, 3)
    engine.hosts[1].arena.bytes[engine.hosts[1].blocks_offset] ^= 1  # Fails its sum.
    engine.finish(engine.order_save([3], [0]))

    number = engine.link.find(DISK, [key_of(each) for each in (1, 3, 4, 2)])

    assert engine.take(FoundInStore) == FoundInStore(number, DISK, [True, False, False, True])
    engine.link.request_page(DISK)
    page = engine.take(Paged)
    assert isinstance(page, Paged)
    assert sorted(page.keys) == [key_of(1), key_of(2)]


def test_pages_list_all_blocks_with_their_parents(make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    for start in range(0, 900, 60):
        engine.save(range(start, start + 60))

    keys: dict[bytes, bytes | None] = {}
    last = False
    while not last:
        engine.link.request_page(DISK)
        page = engine.take(Paged)
        assert isinstance(page, Paged)
        assert len(page.keys) <= STEP_KEYS_MAX
        keys.update(zip(page.keys, page.parents, strict=True))
        last = page.last

    assert keys == {key_of(n): key_of(n - 1) if n else None for n in range(900)}


def test_two_engines_with_one_space_share_their_blocks(make_engine: MakeEngine) -> None:
    one, other = make_engine(life=1).up(), make_engine(life=2).up()
    one.save([5])

    other.load([5])

    assert other.holds(32, 5)


def test_engines_of_other_spaces_find_nothing(make_engine: MakeEngine) -> None:
    one, other = make_engine(life=1).up(), make_engine(life=2, space=bytes(16)).up()
    one.save([5])

    (report,) = other.load([5])

    assert report.faults == ((0, BlockFault.MISSING),)


def test_a_void_space_is_empty_for_all_its_engines(make_engine: MakeEngine) -> None:
    one, other = make_engine(life=1).up(), make_engine(life=2).up()
    one.save([5])

    one.link.void(DISK)

    assert one.take(Voided) == Voided(DISK, 2, own=True)
    assert other.take(Voided) == Voided(DISK, 2, own=False)
    assert one.load([5])[0].faults == ((0, BlockFault.MISSING),)
    assert other.load([5])[0].faults == ((0, BlockFault.MISSING),)
    one.save([6])
    other.load([6])
    assert other.holds(32, 6)


def test_a_request_from_before_a_void_of_another_engine_fails(make_engine: MakeEngine) -> None:
    one, other = make_engine(life=1).up(), make_engine(life=2).up()
    one.link.void(DISK)
    one.take(Voided)
    other.fill(0, 5)

    operation = other.order_save([5], [0])
    other.link.dispatch()  # It has not collected: it does not know of the void.

    (report,) = other.finish(operation)
    assert "generation" in report.failure


def test_jobs_under_way_fail_when_their_space_is_void(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    one, other = make_engine(life=1).up(), make_engine(life=2).up()
    store.file("hold").touch()
    operation = other.order_save([5], [0])
    other.take(StoreState)
    other.link.find(DISK, [])
    other.take(FoundInStore)  # So the save has arrived.

    one.link.void(DISK)
    one.take(Voided)

    (report,) = other.finish(operation)
    assert report.failure == "a new generation was begun"


def test_owners_are_told_of_blocks_that_gave_way(tmp_path: Path) -> None:
    with closing(StoreProcess(tmp_path / "small", size_bytes=3 * BLOCK_BYTES)) as store:
        store.start()
        with closing(StoreEngine(store.config)) as engine:
            engine.up()
            engine.save([1, 2, 3])

            engine.save([4])

            assert engine.take(Vanished) == Vanished(tier=DISK, keys=[key_of(1)])


def test_blocks_that_gave_way_are_not_in_the_rest_of_a_page(tmp_path: Path) -> None:
    count = STEP_KEYS_MAX + 60
    with closing(StoreProcess(tmp_path / "small", size_bytes=count * BLOCK_BYTES)) as store:
        store.start()
        with closing(StoreEngine(store.config)) as engine:
            engine.up()
            for start in range(0, count, 60):
                engine.save(range(start, min(start + 60, count)))
            engine.link.request_page(DISK)
            first = engine.take(Paged)

            engine.save([count])
            assert engine.take(Vanished) == Vanished(tier=DISK, keys=[key_of(0)])
            engine.link.request_page(DISK)

            rest = engine.take(Paged)
            assert isinstance(first, Paged)
            assert isinstance(rest, Paged)
            assert rest.last
            assert first.keys + rest.keys == [key_of(each) for each in range(count - 1, 0, -1)]


def test_a_job_that_is_abandoned_is_reported_as_failed(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine(ranks=2).up()
    store.file("hold").touch()
    operation = engine.order_load([1], [0])

    engine.abandon(operation)

    assert [report.failure for report in engine.finish(operation)] == ["it was abandoned"] * 2


def test_a_job_past_its_deadline_is_cancelled(store: StoreProcess, make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    store.file("hold").touch()

    operation = engine.order_load([1], [0], timeout_s=0.05)

    (report,) = engine.finish(operation)
    assert report.failure == "its deadline has passed"


def test_a_job_that_cannot_be_cancelled_is_reported_when_it_ends(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    engine.save([1])
    store.file("hold").touch()
    store.file("deaf").touch()
    operation = engine.order_load([1], [40])
    engine.abandon(operation)
    engine.link.find(DISK, [])
    engine.take(FoundInStore)
    assert not engine.reports(operation)

    store.file("hold").unlink()
    engine.load([1])

    assert engine.finish(operation)[0].failure == ""
    assert engine.holds(40, 1)


def test_a_tier_that_opens_slowly_keeps_nobody_waiting(tmp_path: Path) -> None:
    with closing(StoreProcess(tmp_path / "slow")) as store:
        store.file("slow").touch()
        store.start()
        with closing(StoreEngine(store.config)) as engine:
            engine.up(on=False)
            assert engine.load([1])[0].failure == "tier 'disk' is off: it is being opened"
            engine.link.void(DISK)
            store.file("slow").unlink()

            engine.take(Voided)
            engine.save([1])
            assert not engine.load([1])[0].faults


def test_closing_waits_for_a_tier_that_is_being_opened_until_its_deadline(tmp_path: Path) -> None:
    config = StoreProcess(tmp_path / "slow").config.tiers[0]
    go_on = threading.Event()

    def open_slowly(_config: StoreTierConfig) -> StoreTier:
        go_on.wait(PATIENCE_S)
        raise UnavailableError("the folder is gone by now")

    slot = TierSlot(config, {"memory": open_slowly})
    assert not slot.open(0.0)

    slot.close(time.monotonic())

    assert slot.state().why == "it is being opened"
    go_on.set()
    slot.close(time.monotonic() + PATIENCE_S)
    assert slot.state().why == "the folder is gone by now"


def test_a_tier_that_is_asked_for_just_before_its_thread_says_so_opens_a_little_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreProcess(tmp_path / "store").config.tiers[0]
    about_to_say, go_on = threading.Event(), threading.Event()
    write = os.eventfd_write

    def write_late(descriptor: int, value: int) -> None:
        about_to_say.set()
        go_on.wait(PATIENCE_S)
        write(descriptor, value)

    def refuse(_config: StoreTierConfig) -> StoreTier:
        raise UnavailableError("the folder is gone")

    monkeypatch.setattr(os, "eventfd_write", write_late)
    slot = TierSlot(config, {"memory": refuse})
    slot.open(0.0)
    assert about_to_say.wait(PATIENCE_S)

    assert not slot.open(0.0)

    assert slot.state().why == "it is being opened"
    go_on.set()
    slot.close(time.monotonic() + PATIENCE_S)
    assert slot.state().why == "the folder is gone"


def test_states_are_sent_when_they_change(make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    engine.save([1, 2])

    def blocks() -> int:
        states = [each for each in engine.results if isinstance(each, StoreState)]
        return states[-1].state.blocks if states else 0

    engine.until(lambda: blocks() == 2)


def test_a_tier_that_cannot_be_opened_is_off_and_tried_again(tmp_path: Path) -> None:
    with closing(StoreProcess(tmp_path / "store")) as store:
        store.file("off").touch()
        store.start()
        with closing(StoreEngine(store.config)) as engine:
            engine.up(on=False)
            engine.until(lambda: "a file that says so" in engine.why)
            assert not engine.is_on
            (report,) = engine.load([1])
            assert "is off" in report.failure

            store.file("off").unlink()
            engine.up()

            engine.save([1])
            engine.load([1])
            assert engine.holds(32, 1)


def test_sockets_may_have_long_paths(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    with closing(StoreProcess(tmp_path / "store", socket=folder / "socket")) as store:
        store.start()
        with closing(StoreEngine(store.config)) as engine:
            engine.up().save([1])

            assert (folder / "socket").stat().st_mode & 0o777 == 0o600


def test_a_second_process_ends_and_leaves_the_first_alone(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    second = StoreProcess(store.folder)

    second.start()

    assert second.process is not None
    assert second.process.wait(PATIENCE_S) == 3
    engine.save([1])


def test_it_ends_at_a_signal_and_leaves_no_socket(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    make_engine().up()

    status = store.stop()

    assert status == 0
    assert not (store.folder / "socket").exists()
