"""The engine's link to the store process: what it does when either of them dies or hangs."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.cache.operations import BlockFault
from penstock.machine.events import CopyReport
from penstock.store.process.link import (
    FoundInStore,
    Paged,
    StoreBack,
    StoreLost,
    Voided,
)
from tests.descriptors import open_descriptors
from tests.forked import Forked
from tests.store.store_lab import (
    DISK,
    PATIENCE_S,
    StoreEngine,
    StoreProcess,
    impatience,
    key_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.vocabulary.keys import OperationId
    from tests.store.store_lab import MakeEngine


def test_nobody_listens_and_then_somebody_does(tmp_path: Path) -> None:
    with closing(StoreProcess(tmp_path)) as store, closing(StoreEngine(store.config)) as engine:
        lost = engine.take(StoreLost)
        (report,) = engine.load([1])

        store.start()

        assert isinstance(lost, StoreLost)
        assert lost.fenced
        assert "nobody listens" in lost.why
        assert "nobody listens" in report.failure
        engine.take(StoreBack)
        engine.up()
        engine.save([1])


def test_every_operation_ends_once_when_the_process_is_killed(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine(ranks=2).up()
    store.file("hold").touch()
    before = [engine.order_load([n], [n]) for n in range(50)]
    engine.link.find(DISK, [key_of(1)])
    engine.link.dispatch()

    store.kill()
    lost = engine.take(StoreLost)
    if not lost.fenced:  # The connection ends a moment before the process does.
        lost = engine.take(StoreLost)

    assert lost == StoreLost(f"the store process {store.pid} has ended", fenced=True)
    for operation in before:
        assert [bool(report.failure) for report in engine.finish(operation)] == [True, True]
    after = engine.order_load([1], [1])
    assert "has ended" in engine.finish(after)[0].failure


def test_killed_and_started_again_it_works_again(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine(ranks=2).up()
    for _ in range(3):
        engine.save([1, 2])
        operations = [engine.order_load([1], [40]) for _ in range(20)]
        engine.link.dispatch()

        store.kill()
        store.start()

        engine.take(StoreBack)
        engine.up()
        for operation in operations:
            engine.finish(operation)
            assert len(engine.reports(operation)) == 2
        engine.save([1])
        engine.load([1])
        assert engine.holds(32, 1)


def test_a_stopped_process_delays_nothing_and_answers_late(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    engine.save([1])
    engine.results.clear()
    store.signal(signal.SIGSTOP)
    operation = engine.order_load([1], [40])
    longest = 0.0

    def step() -> bool:
        nonlocal longest
        began = time.monotonic()
        engine.link.dispatch()
        engine.results += engine.link.collect()
        longest = max(longest, time.monotonic() - began)
        return any(isinstance(each, StoreLost) for each in engine.results)

    with impatience():
        engine.until(step)
    engine.abandon(operation)
    others = [engine.order_load([1], [n % 64]) for n in range(5000)]
    engine.step()

    assert longest < PATIENCE_S  # A wait would last until the process goes on.
    assert not engine.reports(operation)
    lost = engine.take(StoreLost)
    assert isinstance(lost, StoreLost)
    assert not lost.fenced

    store.signal(signal.SIGCONT)
    engine.take(StoreBack)
    engine.up()
    assert engine.finish(operation)

    def counts() -> Counter[OperationId]:
        return Counter(each.operation for each in engine.results if isinstance(each, CopyReport))

    engine.until(lambda: counts().total() > len(others))
    assert counts() == Counter([operation, *others])


def test_a_stopped_process_that_was_only_asked_for_a_reset_is_lost_until_it_confirms_it(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    engine.results.clear()
    store.signal(signal.SIGSTOP)

    engine.link.void(DISK)
    with impatience():
        lost = engine.take(StoreLost)

    assert isinstance(lost, StoreLost)
    assert engine.link.resets.unconfirmed == {DISK}
    store.signal(signal.SIGCONT)
    engine.take(StoreBack)
    assert isinstance(engine.take(Voided), Voided)
    assert engine.link.resets.unconfirmed == set()


def test_a_stopped_process_that_is_killed_is_fenced(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    store.signal(signal.SIGSTOP)
    operation = engine.order_load([1], [40])
    with impatience():
        lost = engine.take(StoreLost)

    store.kill()

    assert isinstance(lost, StoreLost)
    assert not lost.fenced
    engine.until(
        lambda: StoreLost(f"the store process {store.pid} has ended", fenced=True) in engine.results
    )
    assert engine.finish(operation)[0].failure


def test_a_void_that_was_lost_is_sent_again(store: StoreProcess, make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    store.signal(signal.SIGSTOP)
    engine.link.void(DISK)
    engine.link.dispatch()
    store.kill()
    engine.take(StoreLost)

    store.start()

    engine.take(StoreBack)
    engine.up()
    assert isinstance(engine.take(Voided), Voided)


def test_tiers_can_be_used_when_every_rank_has_offered_its_arena(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine(ranks=2, offer=False)
    engine.offer(0)
    lost = engine.take(StoreLost)
    assert isinstance(lost, StoreLost)

    engine.offer(1)

    engine.take(StoreBack)
    engine.up()
    engine.save([1])
    engine.offers[1].close()
    engine.offers.pop()
    gone = engine.take(StoreLost)
    assert isinstance(gone, StoreLost)
    assert gone.why == "the arenas of these ranks are not there: 1"
    assert not gone.fenced
    assert "ranks are not there: 1" in engine.load([1])[0].failure
    assert store.mapped_arenas() == 1


def test_a_rank_that_was_restarted_has_another_arena(make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    other = make_engine(life=99)
    engine.save([1])
    engine.offers.pop().close()
    engine.take(StoreLost)

    other.up()
    engine.hosts, hosts = other.hosts, engine.hosts
    engine.link.name_arenas([other.offers[0].name])

    engine.take(StoreBack)
    engine.up()
    engine.load([1])
    assert engine.holds(32, 1)
    engine.hosts = hosts


def test_ranks_that_share_an_arena_are_reported_each(tmp_path: Path) -> None:
    with closing(StoreProcess(tmp_path)) as store:
        store.start()
        with closing(StoreEngine(store.config, ranks=2, shared=True)) as engine:
            engine.up().save([1])

            engine.load([1])

            assert engine.holds(32, 1)
            assert store.mapped_arenas() == 1


def test_arenas_are_unmapped_when_their_sessions_end(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    watcher = make_engine(life=1).up()
    engine = make_engine(life=2, ranks=2).up()
    assert store.mapped_arenas() == 3
    store.file("hold").touch()
    store.file("deaf").touch()
    engine.order_load([1], [1])
    engine.link.dispatch()
    engine.link.find(DISK, [])
    engine.take(FoundInStore)
    for offer in engine.offers:
        offer.close()
    engine.offers.clear()
    engine.take(StoreLost)
    assert store.mapped_arenas() == 3  # A job uses two of them.

    store.file("hold").unlink()
    watcher.load([1])

    watcher.link.find(DISK, [])
    watcher.take(FoundInStore)
    assert store.mapped_arenas() == 1


def test_a_client_that_is_killed_leaves_nothing_behind(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    watcher = make_engine(life=1).up()
    before = len(os.listdir(f"/proc/{store.pid}/fd"))
    for _ in range(3):
        read_end, write_end = os.pipe()
        client = Forked("tests.store.saving_client", [store.config.to_json()], stdout=write_end)
        os.close(write_end)
        assert os.read(read_end, 100) == b"ready\n"
        os.close(read_end)
        client.kill()
        client.wait(PATIENCE_S)

    watcher.until(lambda: store.mapped_arenas() == 1)
    watcher.until(lambda: len(os.listdir(f"/proc/{store.pid}/fd")) == before)
    assert watcher.load([1])[0].faults == ((0, BlockFault.MISSING),)  # Of other parts.


def test_an_owner_that_opens_another_session_waits_for_its_old_jobs(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine(life=5).up()
    store.file("hold").touch()
    store.file("deaf").touch()
    engine.order_load([1], [1])
    engine.link.find(DISK, [])
    engine.take(FoundInStore)

    again = make_engine(life=5)
    lost = again.take(StoreLost)
    while lost.why != "jobs of the last session are under way":
        lost = again.take(StoreLost)
    store.file("hold").unlink()
    third = make_engine(life=6).up()
    third.load([1])

    again.up()


def test_an_arena_has_no_other_owner_while_jobs_of_the_last_one_use_it(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    old = make_engine(life=5).up()
    store.file("hold").touch()
    store.file("deaf").touch()
    old.order_load([1], [1])
    old.link.find(DISK, [])
    old.take(FoundInStore)
    old.link.close(time.monotonic())

    new = make_engine(life=6, offer=False)  # The next life of an engine whose arena was kept.
    new.link.name_arenas([old.offers[0].name])
    lost = new.take(StoreLost)
    while "under way" not in lost.why:
        lost = new.take(StoreLost)
    store.file("hold").unlink()
    make_engine(life=7).up().load([1])

    new.up()


def test_an_operation_without_a_deadline_is_carried_out(make_engine: MakeEngine) -> None:
    engine = make_engine().up()
    engine.fill(0, 1)

    operation = engine.order_save([1], [0], timeout_s=math.inf)

    assert engine.finish(operation)[0].failure == ""


def test_descriptors_are_given_back(store: StoreProcess) -> None:
    with closing(StoreEngine(store.config)) as engine:
        engine.up()
    before = open_descriptors()

    for _ in range(3):
        with closing(StoreEngine(store.config)) as engine:
            engine.up()
            engine.save([1])

    assert open_descriptors() <= before
    assert engine.link.collect() == []


def test_a_page_after_the_session_was_lost_is_the_first_again(
    store: StoreProcess, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    engine.save([1, 2])
    engine.link.request_page(DISK)
    assert isinstance(engine.take(Paged), Paged)
    store.kill()
    store.start()
    engine.take(StoreBack)
    engine.up()

    engine.link.request_page(DISK)

    page = engine.take(Paged)
    assert isinstance(page, Paged)
    assert page == Paged(DISK, [], [], last=True)
