"""The store process with a disk tier: what was acknowledged is found by the next process."""

from __future__ import annotations

import random
import signal
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from penstock.cache.operations import BlockFault
from penstock.store.process.link import StoreBack, StoreLost, StoreState, Voided
from tests.store.store_lab import DISK, StoreEngine, StoreProcess, impatience

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.store.process.link import StoreResult

SIZE_BYTES = 8 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    process = StoreProcess(
        tmp_path / "disk", kind="disk", size_bytes=SIZE_BYTES, socket=tmp_path / "socket"
    )
    with closing(process) as store:
        store.start()
        yield store


def until_on(engine: StoreEngine) -> None:
    """Until the tier is on and has read all that lies in its folder."""

    def is_on() -> bool:
        states = [each for each in engine.results if isinstance(each, StoreState)]
        return bool(states) and states[-1].state.on and states[-1].state.recovered == 1.0

    engine.until(is_on)


def test_acknowledged_blocks_survive_kills_of_the_process(store: StoreProcess) -> None:
    draw = random.Random(1)
    acknowledged: list[int] = []
    with closing(StoreEngine(store.config, ranks=2)) as engine:
        for life in range(5):
            engine.up()
            until_on(engine)
            for number in acknowledged:
                _load_when_known(engine, number)
            engine.results.clear()
            numbers = range(100 * life, 100 * life + 30)
            for slot, number in enumerate(numbers):
                engine.fill(slot, number)
            operations = {
                engine.order_save([number], [slot]): number for slot, number in enumerate(numbers)
            }
            ended = draw.randrange(1, 2 * len(numbers))
            engine.until(lambda ended=ended: len(engine.results) >= ended)  # type: ignore[misc]

            store.kill()

            for operation, number in operations.items():
                reports = engine.finish(operation)
                if not any(report.failure or report.faults for report in reports):
                    acknowledged.append(number)
            store.start()
            engine.until(lambda: not engine.link.is_up)
        engine.up()

    assert acknowledged


def _load_when_known(engine: StoreEngine, number: int) -> None:
    """Loads a block; while the tables are read, it may be unknown for a moment."""
    for _ in range(200):
        reports = engine.load([number])
        if not any(report.faults for report in reports):
            break
        assert all(fault is BlockFault.MISSING for each in reports for _, fault in each.faults)
        engine.step(0.05)
    assert engine.holds(32, number)


def test_a_process_that_is_stopped_and_killed_loses_nothing_acknowledged(
    store: StoreProcess,
) -> None:
    with closing(StoreEngine(store.config)) as engine:
        engine.up().save(range(1, 20))
        store.signal(signal.SIGSTOP)
        late = engine.order_load([1], [40])
        with impatience():
            engine.take(StoreLost)

        store.kill()
        store.start()

        engine.take(StoreBack)
        engine.up()
        assert engine.finish(late)[0].failure
        for number in range(1, 20):
            _load_when_known(engine, number)


def test_a_void_counts_as_done_when_it_outlives_the_process(store: StoreProcess) -> None:
    with closing(StoreEngine(store.config)) as engine:
        engine.up()
        until_on(engine)
        engine.save([1])
        generations = store.file("generations")
        kept = generations.read_bytes()
        generations.unlink()
        generations.mkdir()  # Neither replaced nor cut by the process.

        engine.link.void(DISK)

        assert engine.load([1])[0].failure
        engine.until(lambda: any(is_off(each) for each in engine.results))
        assert engine.link.resets.unconfirmed == {DISK}
        # The process could not write it down: the next one finds what was there before.
        store.kill()
        generations.rmdir()
        generations.write_bytes(kept)
        store.start()
        assert isinstance(engine.take(Voided), Voided)
        assert engine.link.resets.unconfirmed == set()
        assert engine.load([1])[0].faults == ((0, BlockFault.MISSING),)


def is_off(result: StoreResult) -> bool:
    return isinstance(result, StoreState) and "generations cannot be" in result.state.why


def test_a_void_that_could_not_be_kept_is_kept_when_the_disk_is_well(store: StoreProcess) -> None:
    with closing(StoreEngine(store.config)) as engine:
        engine.up()
        until_on(engine)
        engine.save([1])
        generations = store.file("generations")
        generations.unlink()
        generations.mkdir()
        engine.link.void(DISK)
        engine.until(lambda: any(is_off(each) for each in engine.results))

        generations.rmdir()

        assert isinstance(engine.take(Voided), Voided)
        assert engine.link.resets.unconfirmed == set()
        engine.save([2])
        assert engine.load([1])[0].faults == ((0, BlockFault.MISSING),)
        assert engine.load([2])[0].faults == ()


def test_a_void_asked_while_the_store_was_away_outlives_a_change_of_weights(
    store: StoreProcess,
) -> None:
    with closing(StoreEngine(store.config)) as engine:
        engine.up()
        until_on(engine)
        engine.save([1])
        store.kill()
        engine.until(lambda: not engine.link.is_up)
        engine.link.void(DISK)
        engine.link.enter_space(bytes(16))
        store.start()

        engine.until(lambda: not engine.link.resets.unconfirmed)
    with closing(StoreEngine(store.config, life=8)) as engine:
        engine.up()
        until_on(engine)

        assert engine.load([1])[0].faults == ((0, BlockFault.MISSING),)


def test_a_folder_in_use_is_told_and_tried_again(store: StoreProcess, tmp_path: Path) -> None:
    second = StoreProcess(
        store.folder, kind="disk", size_bytes=SIZE_BYTES, socket=tmp_path / "other"
    )
    with closing(second), closing(StoreEngine(store.config)) as first:
        first.up().save([1])
        second.start()
        with closing(StoreEngine(second.config)) as engine:
            engine.up(on=False)
            engine.until(lambda: str(store.folder) in engine.why)
            assert not engine.is_on

            assert store.stop() == 0

            engine.results.clear()
            until_on(engine)
            _load_when_known(engine, 1)


def test_a_key_file_that_is_missing_is_the_reason_why_the_tier_is_off(tmp_path: Path) -> None:
    process = StoreProcess(
        tmp_path / "disk",
        kind="disk",
        size_bytes=SIZE_BYTES,
        socket=tmp_path / "socket",
        key_file=str(tmp_path / "none"),
    )
    with closing(process) as store:
        store.start()
        with closing(StoreEngine(store.config)) as engine:
            engine.up(on=False)
            engine.until(lambda: engine.why.startswith("key_file: "))

            (report,) = engine.load([1])

            assert "key_file" in report.failure
